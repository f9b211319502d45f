"""A mask on a tile in registers, as a band of columns in each row.

Said in jax.numpy a mask compares two tiles of positions. They do not depend on the tile of keys but
for one sum, so that LLVM computes them before the loop over keys and holds them: 32 registers or
more, spilled where there were none left. Here a row's bounds are made relative to the columns of
the thread that holds it, and columns are numbers in the instructions: a comparison and a select for
each logit and bound, nothing to hold.
"""

import functools
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, vector

from pallas_attn.kernels.lang import mosaic

Array = jax.Array

LESS, EQUAL = arith.CmpIPredicate.slt, arith.CmpIPredicate.eq


def within(
    s: Array, low: Array | None, high: Array | None, ids: tuple[Array, Array] | None = None
) -> Array:
    """A tile of float32 logits [64, keys] with -inf in columns below `low` and from `high` on (each
    int32[64], one a row), and where the two `ids`, int32[64] and int32[keys], differ.
    """
    given = {"low": low, "high": high, "rows": None, "columns": None}
    if ids is not None:
        given["rows"], given["columns"] = ids
    given = {name: x for name, x in given.items() if x is not None}
    if not given:
        return s
    kinds = {name: mosaic.COLUMN if name == "columns" else mosaic.ROW for name in given}
    names = tuple(given)

    def code(_, s, *args):
        return _cut(s, dict(zip(names, args, strict=True)))

    def values(s, *args):  # what the interpreter runs
        given, column = dict(zip(names, args, strict=True)), jnp.arange(s.shape[1])[None]
        hidden = jnp.zeros(s.shape, bool)
        if "low" in given:
            hidden |= column < given["low"][:, None]
        if "high" in given:
            hidden |= column >= given["high"][:, None]
        if "rows" in given:
            hidden |= given["rows"][:, None] != given["columns"][None]
        return jnp.where(hidden, -jnp.inf, s)

    inline: Any = code
    inline.values = values
    result = plgpu.ShapeDtypeStruct(s.shape, jnp.float32, layout=mosaic.TILE)
    call = plgpu.inline_mgpu(arg_types=(mosaic.TILE, *kinds.values()), return_type=result)
    return call(inline)(s, *given.values())


def _cut(s: Any, given: dict[str, Any]) -> Any:
    """A thread holds two neighbouring columns of each 8, of two rows that are 8 apart."""
    number = ir.IntegerType.get_signless(32)
    thread = arith.index_cast(number, gpu.thread_id(gpu.Dimension.x))
    first = arith.muli(arith.remui(thread, utils.c(4, number)), utils.c(2, number))
    given = {name: [_each(r) for r in x.registers.flat] for name, x in given.items()}
    for name in {"low", "high"} & set(given):
        given[name] = [arith.subi(bound, first) for (bound,) in given[name]]
    registers, nothing = s.registers.copy(), utils.c(float("-inf"), ir.F32Type.get())
    for at, register in enumerate(s.registers.flat):
        pair, (block, row) = register, divmod(at, 2)
        for i, logit in enumerate(_each(register)):
            column, terms = utils.c(8 * block + i, number), []
            if "high" in given:
                terms.append(arith.cmpi(LESS, column, given["high"][row]))
            if "low" in given:
                terms.append(arith.cmpi(arith.CmpIPredicate.sge, column, given["low"][row]))
            if "rows" in given:
                own, other = given["rows"][row][0], given["columns"][block][i]
                terms.append(arith.cmpi(EQUAL, own, other))
            seen = functools.reduce(arith.andi, terms)
            pair = vector.insert(arith.select(seen, logit, nothing), pair, [], [i])
        registers[np.unravel_index(at, registers.shape)] = pair
    return mgpu.FragmentedArray(_registers=registers, _layout=s.layout, _is_signed=None)


def _each(register: ir.Value) -> list[ir.Value]:
    return [vector.extract(register, [], [i]) for i in range(ir.VectorType(register.type).shape[0])]
