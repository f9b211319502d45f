"""Parts of a row of blocks of `mla_sm90` and `sm90_few_rows`: `combine` for outputs
that are tiles of a matmul. A part lies in global memory as the threads hold it, which take 16 bytes
each at a time; whoever arrives last adds up all parts, in their order.

Other blocks wrote their parts before they arrived. The interpreter knows that of programs only, so
parts are written and read by inline code, each with a twin in NumPy.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_attn.kernels.decode.scheduler import Plan
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.mma import mma_rowmajor

Array = Any
Ref = Any
Scalar = Any

ALIGNED = 4  # parts whose tops are asked for at once


def worth(plan: Plan, times: int) -> int:
    """In how many parts a row is done soonest: one block merges them, one after the other. `times`:
    how often a part could be merged while one block took all keys.
    """
    return plan.most_units if plan.problem.batch_invariant else max(1, math.isqrt(times))


class Slots(NamedTuple):
    """Where the parts of a row are: part p at `first` where p is 0, else `later + p * apart`."""

    count: Scalar
    mine: Scalar
    first: Scalar
    later: Scalar
    apart: int

    def of(self, p: Scalar) -> Scalar:
        return jnp.where(p < 1, self.first, self.later + p * self.apart)


def leave(ref: Ref, index: Scalar, tile: Array) -> None:
    """Writes a tile of float32 to row `index` of `ref` [tiles, numbers of a tile]."""
    size = ref.shape[1]

    def code(tile, ref, index):
        base, kind = _place(ref, index, size), ir.VectorType.get((4,), ir.F32Type.get())
        for n, pair in enumerate(tile.registers.reshape(-1, 2)):
            four = llvm.mlir_undef(kind)
            for i in range(4):
                number = vector.extract(pair[i // 2], [], [i % 2])
                four = vector.insert(number, four, [], [i])
            address = utils.getelementptr(base, [n * 4 * mosaic.THREADS], ir.F32Type.get())
            llvm.store(four, address, alignment=16)

    def twin(tile, ref, index):
        ref[int(index)] = tile.ravel()

    types = (mosaic.TILE, mma_rowmajor.REF, mma_rowmajor.SCALAR)
    mma_rowmajor.inline(code, twin, (tile, ref, index), types, None)


def fetched(ref: Ref, index: Scalar, shape: tuple[int, int]) -> Array:
    """Row `index` as `leave` left it: the tile."""
    size = ref.shape[1]

    def code(ref, index):
        base, kind = _place(ref, index, size), ir.VectorType.get((4,), ir.F32Type.get())
        registers = []
        for n in range(size // mosaic.THREADS // 4):
            address = utils.getelementptr(base, [n * 4 * mosaic.THREADS], ir.F32Type.get())
            loaded = llvm.load(kind, address, alignment=16)
            four = [vector.extract(loaded, [], [i]) for i in range(4)]
            registers += [mma_rowmajor.pair_of(*four[:2]), mma_rowmajor.pair_of(*four[2:])]
        return mma_rowmajor.tile_with(registers, shape)

    def twin(ref, index):
        return ref[int(index)].reshape(shape).copy()

    result = mma_rowmajor.tile_of(shape, jnp.float32)
    types = (mma_rowmajor.REF, mma_rowmajor.SCALAR)
    return mma_rowmajor.inline(code, twin, (ref, index), types, result)


def _place(ref: Ref, index: Any, size: int) -> ir.Value:
    """Of the thread's first four numbers."""
    thread = threads.Thread()
    start = thread.wide(mosaic.Int(index.registers.item())) * size
    start = start + thread.wide(thread.index % mosaic.THREADS) * 4
    return mosaic.address_of(ref, start, 4)


def numbers(ref: Ref, index: Scalar, layout: Any) -> Array:
    """Row `index` of `ref` [.., rows of query]: one number a row or, with keys down, a column."""
    count = ref.shape[1]

    def code(ref, index):
        at = arith.index_cast(ir.IndexType.get(), index.registers.item())
        registers: Any = layout.to_mgpu()
        row, array = utils.memref_slice(ref, (at,)), mgpu.FragmentedArray
        return array.load_untiled(row, layout=registers, optimized=False)

    def twin(ref, index):
        return ref[int(index)].copy()

    result = plgpu.ShapeDtypeStruct((count,), jnp.float32, layout=layout)
    types = (mma_rowmajor.REF, mma_rowmajor.SCALAR)
    return mma_rowmajor.inline(code, twin, (ref, index), types, result)


def base_of(top: Array) -> Array:
    """What exponents are taken relative to."""
    return jnp.where(top == -jnp.inf, 0.0, top)


def highest(tops: Ref, slots: Slots, layout: Any) -> Array:
    """Of all parts."""

    def four(n, top):
        for i in range(ALIGNED):
            p = jnp.minimum(n * ALIGNED + i, slots.count - 1)
            top = jnp.maximum(top, numbers(tops, slots.of(p), layout))
        return top

    start = numbers(tops, slots.mine, layout)
    batches = lax.div(slots.count + (ALIGNED - 1), jnp.int32(ALIGNED))
    return lax.fori_loop(0, batches, four, start)


def total(refs: tuple[Ref, Ref], slots: Slots, top: Array, layout: Any) -> Array:
    """The sum of all weights, relative to `top`; refs: tops and totals."""

    def one(p, total):
        slot = slots.of(p)
        weight = jnp.exp2(numbers(refs[0], slot, layout) - base_of(top))
        return total + weight * numbers(refs[1], slot, layout)

    return lax.fori_loop(0, slots.count, one, plgpu.layout_cast(jnp.zeros_like(top), layout))


def added(
    accs: tuple[Array, ...], slots: Slots, weighed: Callable[[Scalar], tuple[Array, ...]]
) -> tuple[Array, ...]:
    """accs and, of all parts in their order, `weighed(slot)`: like accs."""

    def plus(p, accs):
        return tuple(a + b for a, b in zip(accs, weighed(slots.of(p)), strict=True))

    return lax.fori_loop(0, slots.count, plus, accs)
