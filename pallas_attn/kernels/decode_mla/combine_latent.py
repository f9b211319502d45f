"""Partials of a row combined in `decode_mla.sm90` and `sm90_few_rows`: `decode.combine_splits` for
outputs that are tiles of a matmul. A partial lies in global memory as the threads hold it, in words
of 16 bytes. The block that arrives last adds up all partials, in their order.

Other blocks wrote their partials before they arrived. The interpreter knows that for programs only,
so partials are written and read by inline code, each with a twin in NumPy.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_attn.kernels.attention import softmax
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.decode import combine_splits, scheduler
from pallas_attn.kernels.decode.combine_splits import Head, Results
from pallas_attn.kernels.decode.plan import Plan
from pallas_attn.kernels.lang import asm, mosaic, threads
from pallas_attn.kernels.lang.types import (
    Barrier,
    GmemRef,
    Index,
    Layout,
    Predicate,
    RegisterTile,
)
from pallas_attn.kernels.mma import mma_rowmajor

LOADS_AT_ONCE = 4  # partials whose row maxima are loaded together


APART_GAIN = 8  # how many partials `combine_apart` adds while a block would add one


def best_splits(plan: Plan, times: int, apart: bool = False) -> int:
    """The number of splits with which a row is done soonest: one block combines their partials, one
    after the other, or where `apart` all blocks do. `times`: how often a partial could be added
    while one block took all keys.
    """
    if plan.problem.batch_invariant:
        return plan.keys.most_units
    return max(1, math.isqrt(times * (APART_GAIN if apart else 1)))


class Partials(NamedTuple):
    """The partials of a row."""

    places: scheduler.Partials
    stride: int  # plan.partials_a_block

    @property
    def count(self) -> Index:
        return self.places.count

    def place(self, p: Index) -> Index:
        """The place of partial p."""
        return jnp.where(p < 1, self.places.first, self.places.later + p * self.stride)


class Ending(NamedTuple):
    """Programs of a warpgroup for when the block has taken its keys of a row."""

    result: Callable[[], None]  # the block had all: writes the result
    partial: Callable[[], None]  # it had some: writes its partial
    combined: Callable[[], None]  # it is the last of the row's: all partials -> the result
    counts: Predicate = True  # whether this warpgroup counts the block
    join: Callable[[], None] | None = None  # waits for the other warpgroups that end so


def finish(ctx: KernelContext, results: Results, head: Head, end: Ending) -> None:
    """The result of a row, or a partial of it; the last block makes the result of all partials."""
    pl.when(head.places.count == 1)(end.result)

    @pl.when(head.places.count > 1)
    def _():
        end.partial()
        counter = combine_splits.CounterRefs(results.counters, ctx.smem.last)
        arrive = functools.partial(threads.run, combine_splits.arrive, ctx.plan, counter, head)
        join = end.join or (lambda: None)
        join()
        if end.counts is True:
            arrive()
        elif end.counts is not False:
            pl.when(end.counts)(arrive)
        join()
        pl.when(ctx.smem.last[0] == 1)(end.combined)
        join()  # `last` is read


def join(barrier: Barrier) -> None:
    """Waits until all warpgroups that arrive at the barrier are there."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def with_lost(row_sum: RegisterTile, lost: Index) -> RegisterTile:
    """The row sum, NaN where the sequence was lost."""
    return row_sum + mosaic.broadcast_scalar(jnp.where(lost == 1, jnp.nan, 0.0), row_sum.shape)


def store(ref: GmemRef, index: Index, tile: RegisterTile) -> None:
    """Writes a tile of float32 to row `index` of `ref` [tiles, numbers of a tile]."""
    size = ref.shape[1]

    def code(tile, ref, index):
        base, kind = _address(ref, index, size), ir.VectorType.get((4,), ir.F32Type.get())
        for n, pair in enumerate(tile.registers.reshape(-1, 2)):
            four = llvm.mlir_undef(kind)
            for i in range(4):
                number = vector.extract(pair[i // 2], [], [i % 2])
                four = vector.insert(number, four, [], [i])
            address = utils.getelementptr(base, [n * 4 * mosaic.THREADS], ir.F32Type.get())
            llvm.store(four, address, alignment=16)

    def twin(tile, ref, index):
        ref[int(index)] = tile.reshape(_pieces(tile.shape)).transpose(_ORDER).ravel()

    types = (mosaic.TILE, mosaic.REF, mosaic.SCALAR)
    mosaic.inline(code, twin, (tile, ref, index), types, None)


def load(ref: GmemRef, index: Index, shape: tuple[int, int]) -> RegisterTile:
    """The tile that `store` wrote to row `index`."""
    size = ref.shape[1]

    def code(ref, index):
        base, kind = _address(ref, index, size), ir.VectorType.get((4,), ir.F32Type.get())
        registers = []
        for n in range(size // mosaic.THREADS // 4):
            address = utils.getelementptr(base, [n * 4 * mosaic.THREADS], ir.F32Type.get())
            loaded = llvm.load(kind, address, alignment=16)
            four = [vector.extract(loaded, [], [i]) for i in range(4)]
            registers += [mma_rowmajor.pair_of(*four[:2]), mma_rowmajor.pair_of(*four[2:])]
        return mma_rowmajor.tile_with(registers, shape)

    def twin(ref, index):
        pieces = _pieces(shape)
        ordered = ref[int(index)].reshape([pieces[axis] for axis in _ORDER])
        return ordered.transpose(np.argsort(_ORDER)).reshape(shape)

    result = mma_rowmajor.tile_of(shape, jnp.float32)
    types = (mosaic.REF, mosaic.SCALAR)
    return mosaic.inline(code, twin, (ref, index), types, result)


# Axes of `_pieces` in the order of memory: a word of four numbers is two rows of a thread.
_ORDER = (0, 4, 1, 3, 5, 2, 6)


def _pieces(shape: tuple[int, int]) -> tuple[int, ...]:
    """A tile [rows, columns] as [matmuls, warps, halves, rows, words, threads of a row, 2]."""
    rows, columns = shape
    return rows // mma_rowmajor.ROWS // threads.WARPS, threads.WARPS, 2, 8, columns // 8, 4, 2


def _address(ref: GmemRef, index: asm.Int, size: int) -> ir.Value:
    """The address of the first four numbers that the thread holds."""
    thread = threads.Thread()
    start = thread.to_int64(index) * size
    start = start + thread.to_int64(thread.index) * 4
    return asm.address_of(ref, start, 4)


def load_rows(ref: GmemRef, index: Index, layout: Layout) -> RegisterTile:
    """Row `index` of `ref` [.., query rows]: one number a row of a tile, or a column where the
    rows of a tile are keys.
    """
    count = ref.shape[1]

    def code(ref, index):
        at = arith.index_cast(ir.IndexType.get(), index.value)
        registers: Any = layout.to_mgpu()
        row, array = utils.memref_slice(ref, (at,)), mgpu.FragmentedArray
        return array.load_untiled(row, layout=registers, optimized=False)

    def twin(ref, index):
        return ref[int(index)].copy()

    result = mosaic.tile_type((count,), jnp.float32, layout=layout)
    types = (mosaic.REF, mosaic.SCALAR)
    return mosaic.inline(code, twin, (ref, index), types, result)


def row_max_of(results: Results, partials: Partials, layout: Layout) -> RegisterTile:
    """The row max of all partials."""

    def some(n, row_max):
        for i in range(LOADS_AT_ONCE):
            p = jnp.minimum(n * LOADS_AT_ONCE + i, partials.count - 1)
            row_max = jnp.maximum(
                row_max, load_rows(results.partial_max, partials.place(p), layout)
            )
        return row_max

    start = load_rows(results.partial_max, partials.places.own, layout)
    batches = lax.div(partials.count + (LOADS_AT_ONCE - 1), jnp.int32(LOADS_AT_ONCE))
    return lax.fori_loop(0, batches, some, start)


def row_sum_of(
    results: Results, partials: Partials, row_max: RegisterTile, layout: Layout
) -> RegisterTile:
    """The row sum of all partials, relative to `row_max`."""

    def add(p, row_sum):
        index = partials.place(p)
        weight = jnp.exp2(load_rows(results.partial_max, index, layout) - softmax.base_of(row_max))
        return row_sum + weight * load_rows(results.partial_sum, index, layout)

    zeros = plgpu.layout_cast(jnp.zeros_like(row_max), layout)
    return lax.fori_loop(0, partials.count, add, zeros)


def added(
    accs: Sequence[RegisterTile],
    partials: Partials,
    weighed: Callable[[Index], Sequence[RegisterTile]],
) -> tuple[RegisterTile, ...]:
    """accs plus `weighed(index)`, as many tiles, of all partials in their order."""

    def plus(p, accs):
        return tuple(a + b for a, b in zip(accs, weighed(partials.place(p)), strict=True))

    return lax.fori_loop(0, partials.count, plus, tuple(accs))


def of_sequences(plan: Plan, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[M, t, N, Hv] and [M, N, t], from rows by sequence, with some to spare in each."""
    problem = plan.problem
    shape = (problem.sequences, problem.q_len, problem.q_heads)
    out = out.reshape(problem.sequences, -1, problem.v_head_dim)[:, : plan.queries.rows]
    lse = lse.reshape(problem.sequences, -1)[:, : plan.queries.rows].reshape(shape).swapaxes(1, 2)
    return out.reshape(*shape, -1), lse
