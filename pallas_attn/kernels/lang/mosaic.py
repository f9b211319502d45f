"""The layer over Mosaic GPU for kernels that work on tiles: layouts, loads and stores, launches,
inline machine code with its twin in NumPy for the CPU interpreter, and Hopper's sizes. Of these
operations, those that depend on the JAX version are made to look alike here.

Kernels that reach other GPUs import `peer_memory`, and programs of single threads `thread_program`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, vector

from pallas_attn._call import gpu_specs
from pallas_attn.kernels.lang.asm import Int, address_of, do_where, give, i32, number_of
from pallas_attn.kernels.lang.types import (
    DType,
    GmemRef,
    Index,
    Layout,
    Predicate,
    Ref,
    RegisterTile,
    Scalar,
    SmemRef,
)

# Hopper's: bytes of shared memory that a block may have, of which so many are kept for barriers and
# for alignment; and blocks of a persistent kernel, one a multiprocessor.
SMEM_LIMIT = gpu_specs.shared_memory(gpu_specs.HOPPER)
BARRIERS = 1024
MULTIPROCESSORS = gpu_specs.multiprocessors(gpu_specs.HOPPER)
THREADS = 128  # threads of a warpgroup
REDUCTION_BYTES = 2048  # shared memory that Mosaic takes where rows are reduced
TILE = plgpu.Layout.WGMMA  # a matmul's result, [rows, columns]
ROW = TILE.reduce(1)  # one number a row of it
COLUMN = TILE.reduce(0)  # one number a column
SCALAR = plgpu.Layout.WG_SPLAT  # one number
REF = plgpu.RefType()  # an array in memory
PARAMETER_BYTES = 32764  # a launch has so many since CUDA 12.1; an operand takes 8
MOST_BLOCKS = 65535  # along an axis of a grid that is not CUDA's x

# New in JAX 0.12, which then refuses a plain `ref[...] = value` for some layouts.
_store = getattr(plgpu, "store", None)


def tile_type(shape: Sequence[int], dtype: DType, layout: Layout) -> Any:
    """The type of a register tile: what inline machine code returns."""
    return plgpu.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), layout=layout)


NUMBER = tile_type((), jnp.int32, layout=SCALAR)  # the type of an int32


def load(ref: Ref, layout: Layout | None = None) -> jax.Array:
    """The tile under `ref` in registers, in `layout`; from global memory too, where no layout has a
    vectorised load.
    """
    return plgpu.load(ref, layout=layout, optimized=False)


def load_vector(ref: Ref, layout: Layout, axis: int, shape: Sequence[int]) -> jax.Array:
    """A vector along one axis of a tile in `layout`, spread over the other."""
    return lax.broadcast_in_dim(load(ref, layout.reduce(1 - axis)), tuple(shape), [axis])


def store(ref: GmemRef, value: jax.Array) -> None:
    """Writes a register tile of any layout to global memory."""
    if _store is None:
        ref[...] = value
    else:
        _store(ref, value, optimized=False)


def swizzled(shape: Sequence[int], dtype: DType, swizzle: int) -> Any:
    """Shared memory for tiles that matmuls and TMA share; rows are whole swizzles (bytes)."""
    return plgpu.SMEM(tuple(shape), dtype, transforms=swizzle_transforms(dtype, swizzle))


def swizzle_transforms(dtype: DType, swizzle: int) -> tuple[Any, Any]:
    """Transforms of shared memory in tiles of 8 rows and one swizzle (bytes)."""
    tile: Any = plgpu.TilingTransform  # mypy takes both for abstract
    swizzle_by: Any = plgpu.SwizzleTransform
    return tile((8, swizzle // jnp.dtype(dtype).itemsize)), swizzle_by(swizzle)


def bytes_of(scratch: Any) -> int:
    """Bytes of all buffers of a tree of shared memory, as Mosaic lays them out: each begins at a
    multiple of 1024. Barriers are not counted, nor `REDUCTION_BYTES`.
    """
    leaves = jax.tree.leaves(scratch, is_leaf=lambda x: isinstance(x, plgpu.Barrier))
    buffers = [x for x in leaves if not isinstance(x, plgpu.Barrier)]
    sizes = [math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in buffers]
    return sum(-(-size // 1024) * 1024 for size in sizes)


def columns(ref: GmemRef, start: int, width: int, traced: Index) -> Any:
    """Columns of a ref in global memory, for TMA, which fills what lies past its end with zeros.

    JAX 0.12 refuses to slice past an end where it can see it: any `traced` integer hides it.
    """
    return pl.ds(start if start + width <= ref.shape[-1] else start + 0 * traced, width)


def share_registers(
    wg: jax.Array,
    workers: int,
    load: Callable[[], None] | Sequence[Callable[[], None]],
    compute: Callable[[], None],
    ours: int,
    loader: int = 24,
) -> None:
    """Divides roles and registers between warpgroups: those below `workers` run `compute` with
    `ours` registers a thread, the one after them runs `load` with `loader`; each of several has one
    `load`.

    A block begins with an equal number for each, a multiple of 8. If all together ask for more than
    it has, the launch hangs.
    """
    loads = load if isinstance(load, Sequence) else (load,)
    groups = workers + len(loads)
    equal = min(65536 // (THREADS * groups) // 8 * 8, 240)
    assert workers * ours + len(loads) * loader <= groups * equal and ours % 8 == 0 == loader % 8

    for number, role in enumerate(loads):
        take_role(wg == workers + number, loader, role)
    take_role(wg < workers, ours, compute, more=True)


def take_role(
    here: Predicate, registers: int, role: Callable[[], None], more: bool = False
) -> None:
    """Runs `role` in the warpgroups for which `here` holds, each thread of which then has so many
    registers: `more` than it had, or fewer.
    """

    @pl.when(here)
    def _():
        plgpu.set_max_registers(registers, action="increase" if more else "decrease")
        role()


def take_roles(
    wg: jax.Array, roles: Sequence[Callable[[], None]], registers: Sequence[int]
) -> None:
    """Runs `roles[n]` in warpgroup n, each thread of which then has `registers[n]`.

    A block begins with an equal number for each, a multiple of 8. If all together ask for more than
    it has, the launch hangs; an "increase" to less, or a "decrease" to more, is not defined.
    """
    equal = min(65536 // (THREADS * len(roles)) // 8 * 8, 240)
    assert sum(registers) * THREADS <= 65536 and not any(n % 8 for n in registers)
    for number, (role, ours) in enumerate(zip(roles, registers, strict=True)):

        @pl.when(wg == number)
        def _(role=role, ours=ours):
            plgpu.set_max_registers(ours, action="increase" if ours > equal else "decrease")
            role()


@functools.cache
def without_barriers(by_lane: bool = False) -> Any:
    """Parameters of a kernel whose warpgroups read what they write to shared memory by TMA or
    matmuls only, after `commit_smem`, or after a barrier. Else Mosaic puts each store between two
    barriers of its warpgroup.
    """
    lane, warpgroup = plgpu.LoweringSemantics.Lane, plgpu.LoweringSemantics.Warpgroup
    return plgpu.CompilerParams(
        approx_math=True,
        unsafe_no_auto_barriers=True,
        lowering_semantics=lane if by_lane else warpgroup,
    )


def filled(shape: Sequence[int], value: Scalar, dtype: DType = jnp.float32) -> jax.Array:
    """A tile (2-D), or one number a row of it (1-D), of equal values in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, dtype), TILE if len(shape) == 2 else ROW)


def positions(shape: Sequence[int], axis: int, start: Index, layout: Layout = TILE) -> jax.Array:
    """start, start + 1, ... along one axis of a tile in `layout`, or down its rows alone."""
    layout = layout if len(shape) == 2 else layout.reduce(1)
    return plgpu.broadcasted_iota(jnp.int32, tuple(shape), axis, layout=layout) + start


def warp_layout(shape: tuple[int, int], down: int) -> Layout:
    """The layout of a warpgroup's tile in which each warp has one piece: `down` of them lie one
    above the other, 4 // down beside each other.
    """
    rows, columns = shape
    steps = (shape, (rows // down, columns * down // 4), (16, 8), (8, 8), (1, 2))
    whole = mgpu.TiledLayout(Tiling(steps), (-10, -9), (-4, -3), -1, _check_canonical=False)
    tiled = whole.canonicalize()
    return plgpu.Layout.TILED(tiled.tiling, tiled.warp_dims, tiled.lane_dims, tiled.vector_dim)


def inline(
    code: Callable[..., Any],
    twin: Callable[..., Any],
    args: Sequence[Any],
    types: Sequence[Any],
    result: Any,
    *,
    traced: bool = False,
) -> Any:
    """`code(*args)` in MLIR on the GPU, `twin(*args)` in NumPy under the interpreter; `traced`: in
    jax.numpy, of values alone. `types`: layouts of registers, `plgpu.RefType` of refs. Code has
    what is `SCALAR` as an `Int`.
    """

    def run(context, *values):
        del context
        return code(*jax.tree.map(handed, tuple(types), values))

    def handed(kind, value):
        return Int(value.registers.item()) if kind is SCALAR else value

    known: Any = run
    setattr(known, "values" if traced else "twin", twin)
    return plgpu.inline_mgpu(arg_types=tuple(types), return_type=result)(known)(*args)


def thread_index() -> Int:
    """In inlined code: the number of the thread in its warpgroup."""
    return Int(arith.index_cast(i32(), gpu.thread_id(gpu.Dimension.x))) % THREADS


def store_rows(
    values: RegisterTile, to: GmemRef, where: tuple[Index, ...], whole: bool = False
) -> None:
    """Writes float32 values [rows], a row in four threads each, to `to` [B, heads, T] from `where`
    (batch, head, row) on; those past T are dropped. `whole`: none of the launch's are past T.
    """
    (batch, head, row), (_, heads, length) = where, to.shape
    if whole:
        return store(to.at[batch, head, pl.ds(row, values.shape[0])], values)

    def code(values, to, batch, head, row):
        thread = thread_index()
        lane = thread % 32
        row = row + thread // 32 * 16 + lane // 4
        line = (batch * heads + head) * length + row  # 32 bits count the rows of all heads
        address = address_of(to, line, 4)
        ours = lane % 4 < 1
        for number, register in enumerate(values.registers.flat):
            below = number // 2 * 64 + number % 2 * 8
            value = number_of(register)
            inside = (ours & (row + below < length)).value
            do_where(inside, f"st.global.f32 [$1+{4 * below}], $2", [address, value], "l,f")

    def twin(values, to, batch, head, row):
        some = values[: max(0, length - int(row))]
        to[int(batch), int(head), int(row) : int(row) + len(some)] = some

    types = ROW, REF, SCALAR, SCALAR, SCALAR
    args = values, to, *[jnp.int32(0) + x for x in (batch, head, row)]
    return inline(code, twin, args, types, None)


def array_of(
    registers: Sequence[ir.Value],
    shape: Sequence[int],
    layout: Layout,
    signed: bool | None = None,
) -> mgpu.FragmentedArray:
    """In inlined code: an array of this shape and layout of a thread's registers."""
    kind, values = layout.to_mgpu(), np.empty(len(registers), object)
    values[:] = registers
    values = values.reshape(kind.registers_shape(tuple(shape)))
    return mgpu.FragmentedArray(_registers=values, _layout=kind, _is_signed=signed)


def broadcast_rows(rows: jax.Array, shape: Sequence[int]) -> jax.Array:
    """One number a row, spread over the columns."""
    return lax.broadcast_in_dim(rows, tuple(shape), [0])


def broadcast_scalar(scalar: jax.Array, shape: Sequence[int]) -> jax.Array:
    """One number, everywhere: Mosaic does not broadcast the operands of a select by itself."""
    return lax.broadcast_in_dim(scalar, tuple(shape), ())


def opaque_zero(number: jax.Array, bits: int = 31) -> jax.Array:
    """0 from an int32 below 2**bits, which the compiler does not know to be 0. Values computed with
    it are computed here, not ahead of a loop and kept in registers, of which there are too few.
    """
    return lax.shift_right_logical(number, jnp.int32(bits))


def results_are_used(used: jax.Array, matmuls: int = 1 << 30) -> None:
    """Tells the interpreter whether the results of this warpgroup's next `matmuls`, or of all until
    it is told again, are used: where not (0), it does not look for races in what they read. It
    emits no code.
    """

    def code(_, used):
        del used

    known: Any = code
    known.matmuls = matmuls
    plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))(known)(used)


def overwrites_what_is_masked(stores: int) -> None:
    """Tells the interpreter that this warpgroup's next `stores` to shared memory change nothing
    that counts in a matmul under way in another warp. It emits no code.
    """

    def code(_):
        pass

    known: Any = code
    known.stores = stores
    plgpu.inline_mgpu(arg_types=())(known)()


def any_in_warp(numbers: jax.Array, bound: float, layout: Layout | None = None) -> jax.Array:
    """int32: 1 where one of this warp's part of a tile, or of one number a row, lies above `bound`,
    else 0.

    Each of the four warps has its own answer. Only arithmetic may depend on it: not a barrier, not
    a matmul. The interpreter, which has no warps, answers for all rows at once.
    """

    def vote(tile):
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

    def twin(x):
        return (x > bound).any().astype(jnp.int32)

    layout = layout or (TILE if numbers.ndim == 2 else ROW)
    return inline(vote, twin, (numbers,), (layout,), NUMBER, traced=True)


def grid_of(**axes: int) -> dict[str, Any]:
    """A grid of so many blocks along each axis, as `plgpu.kernel` takes it. The last axis becomes
    CUDA's x: the longest, where another has more blocks than CUDA launches along it.
    """
    if max(list(axes.values())[:-1], default=0) > MOST_BLOCKS:
        axes = dict(sorted(axes.items(), key=lambda axis: axis[1]))
    return {"grid": tuple(axes.values()), "grid_names": tuple(axes)}


def persistent_kernel(
    body: Callable[..., None],
    name: str,
    out_type: Any,
    scratch: SmemRef,
    size: tuple[int, int],
    barriers: bool = False,
) -> Callable[..., Any]:
    """The launch of `body(refs, *outs, scratch)`, whose blocks take work tiles, one after another,
    until none is left. `size`: the blocks (axis "block"), and the warpgroups of each (axis "wg", if
    there are several).
    `barriers`: whether Mosaic adds those that `without_barriers` leaves out.
    """
    usual = plgpu.CompilerParams(approx_math=True)
    threads: Any = {"num_threads": size[1], "thread_name": "wg"} if size[1] > 1 else {}
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=(scratch,),
        grid=size[:1],
        grid_names=("block",),
        **threads,
        compiler_params=usual if barriers else without_barriers(),
        kernel_name=name,
    )


def overlap_launches() -> None:
    """Programmatic dependent launch, from sm90 on: waits for all writes of earlier kernels, while
    the launch itself began when the one before was ending, if that called this too; and lets the
    next kernel begin.
    """
    plgpu.griddepcontrol_launch_dependents()
    plgpu.griddepcontrol_wait()
