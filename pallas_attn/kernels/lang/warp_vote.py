"""Decisions of each warp of a warpgroup for itself, on tiles in registers."""

import functools
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf, vector

from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.asm import do, give, i32
from pallas_attn.kernels.lang.types import Layout


def any_in_warp(numbers: jax.Array, bound: float, layout: Layout | None = None) -> jax.Array:
    """int32: 1 where one of this warp's part of a tile, or of one number a row, lies above `bound`,
    else 0.

    Each of the four warps has its own answer. Only arithmetic may depend on it: not a barrier, not
    a matmul. The interpreter, which has no warps, answers for all rows at once.
    """
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)

    def vote(_, tile):
        numbers = [
            vector.extract(register, [], ir.DenseI64ArrayAttr.get([i]))
            for register in tile.registers.flat
            for i in range(ir.VectorType(register.type).shape[0])
        ]
        # A row without a key is -inf minus -inf, NaN: it must not silence its thread's others.
        highest = functools.reduce(arith.maxnumf, numbers)
        limit = utils.c(float(bound), highest.type)
        above = arith.extui(i32(), arith.cmpf(arith.CmpFPredicate.OGT, highest, limit))
        ptx = (
            "{ .reg .pred p, q; setp.ne.s32 p, $1, 0;"
            " vote.sync.any.pred q, p, 0xffffffff; selp.s32 $0, 1, 0, q; }"
        )
        answer = give(i32(), ptx, [above], "=r,r")
        return mgpu.FragmentedArray.splat(answer, (), is_signed=True)

    inline: Any = vote
    inline.values = lambda x: (x > bound).any().astype(jnp.int32)  # the interpreter runs this
    layout = layout or (mosaic.TILE if numbers.ndim == 2 else mosaic.ROW)
    return plgpu.inline_mgpu(arg_types=(layout,), return_type=result)(inline)(numbers)


def scheduling_fence(where: jax.Array) -> None:
    """A branch, across which ptxas schedules nothing. It is taken where `where`, an int32 that each
    warp has for itself, is not 0: hardly ever.

    ptxas takes the wait for a matmul for a load, whose latency it hides behind whatever comes
    before: left alone it puts 50 of 64 exponents behind the wait that they could have run under.
    """

    def code(_, where):
        (number,) = where.registers.flat
        if_op: Any = scf.IfOp  # mypy knows the generated class only
        branch = if_op(arith.cmpi(arith.CmpIPredicate.ne, number, utils.c(0, number.type)))
        with ir.InsertionPoint(branch.then_block):
            do("nanosleep.u32 20;", [], "")
            scf.yield_([])

    inline: Any = code
    inline.values = lambda where: None  # the interpreter runs this
    plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))(inline)(where)
