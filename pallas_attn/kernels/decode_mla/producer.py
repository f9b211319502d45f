"""Rows of a latent cache on their way to shared memory: by TMA, swizzled for wgmma, a kv tile in
blocks of columns, each of which has barriers of its own.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import DecodeInputs
from pallas_attn.kernels.attention import cache_layout, functions, tma_operands
from pallas_attn.kernels.attention.cache_layout import Row
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.decode import loads, scheduler
from pallas_attn.kernels.decode.combine_splits import Outputs
from pallas_attn.kernels.decode.plan import Plan
from pallas_attn.kernels.decode.scheduler import Share, Table, WorkTile
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.panels import Block
from pallas_attn.kernels.lang.types import GmemRef, Index, Operand, Predicate, SmemRef

TILE = 64  # keys
WIDTH = 64  # columns of a swizzle of 128 bytes
PREFETCH = 1  # tiles between the one that is copied and the one that is prefetched to L2


class LatentRefs(NamedTuple):
    """Global memory that is read, and the counters."""

    q: GmemRef  # [M * padded, H]
    kv: GmemRef  # [layers * sequences or pages, rows, H]
    lengths: scheduler.Lengths
    page_table: GmemRef | None
    layer: GmemRef | None
    mask_aux: tuple[GmemRef, ...]  # arrays of a function of positions: `functions.flat`
    counters: GmemRef  # `combine_splits.Results`
    sinks: GmemRef | None  # float32[rows of a sequence, and some more]
    lost: GmemRef | None = None  # int32[M]: `scheduler.Table.lost`, of rows that lists name
    score_aux: tuple[GmemRef, ...] = ()


def padded_rows(plan: Plan) -> int:
    """Query rows of a sequence as they lie in memory: TMA reads from a multiple of 8 only."""
    return tma_operands.round_up(plan.queries.rows, 8)


def refs_of(inputs: DecodeInputs, counters: Operand, plan: Plan) -> LatentRefs:
    """Query rows and sinks past a sequence's own are zeros."""
    m, *_, width = inputs.q.shape
    q, row_sinks, rows = inputs.q.reshape(m, -1, width), None, padded_rows(plan)
    if rows > q.shape[1]:
        q = jnp.pad(q, ((0, 0), (0, rows - q.shape[1]), (0, 0)))
    if inputs.sinks is not None:
        row_sinks = jnp.tile(inputs.sinks.astype(jnp.float32), inputs.q.shape[1])
        chunks = plan.queries.chunks * plan.queries.chunk_rows
        row_sinks = jnp.pad(row_sinks, (0, chunks - row_sinks.size))
    lost = None
    if plan.layout.listed:
        lost = (inputs.lengths > plan.layout.capacity).astype(jnp.int32)
        inputs = inputs._replace(lengths=jnp.where(lost == 1, 0, jnp.maximum(inputs.lengths, 0)))
    return LatentRefs(
        q=q.reshape(-1, width),
        kv=plan.layout.view(inputs.k_cache),
        lengths=scheduler.Lengths(
            inputs.lengths,
            inputs.new_lengths,
            None,
            cache_layout.scalar_operand(inputs.mask_left),
            cache_layout.scalar_operand(inputs.mask_right),
            inputs.starts,
        ),
        page_table=inputs.page_table,
        layer=cache_layout.scalar_operand(inputs.layer),
        mask_aux=functions.flat(inputs.mask_aux),
        counters=counters,
        sinks=row_sinks,
        lost=lost,
        score_aux=functions.flat(inputs.score_aux),
    )


def kernel_of(
    plan: Plan, body: Callable[..., None], outputs: Outputs, smem: SmemRef, warpgroups: int
) -> Callable[..., Any]:
    """The launch of `body(refs, outputs, smem)` on all blocks."""
    return plgpu.kernel(
        functools.partial(body, plan=plan),
        out_type=(outputs,),
        scratch_types=(smem,),
        grid=(plan.grid,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="wg",
        compiler_params=mosaic.without_barriers(by_lane=True),
        kernel_name="decode_latent_sm90",
    )


def fill_table(ctx: KernelContext) -> None:
    """Fills the table of lengths, by one warpgroup for all."""
    if ctx.plan.layout.listed:  # it lies in global memory
        return
    refs = scheduler.TableRefs(ctx.refs.lengths, ctx.smem.table)
    threads.run(scheduler.fill_table, ctx.plan, refs, loads.has_layer(ctx.plan, ctx.refs.layer))


def each_work(plan: Plan, table: Table, share: Share, body: Callable, carry: Index) -> Index:
    """`body(work, number, carry)` for each work of the block."""

    def take(state):
        unit, m, number, carry = state
        work = scheduler.work_at(plan, table, share, unit, m)
        if plan.layout.listed:  # units are those of full lists
            work = work._replace(end=jnp.maximum(work.end, work.tile + 1))
        return work.next_unit, work.sequence, number + 1, body(work, number, carry)

    share, m = scheduler.begin(plan, table, share)
    start = (share.first, m, jnp.int32(0), carry)
    return lax.while_loop(lambda state: state[0] < share.end, take, start)[3]


class Copy(NamedTuple):
    """A slice of the columns of K, and the block that it is copied to."""

    columns: Any
    to: Block
    reused: Predicate  # whether the block was in use before: else `free` is not waited for
    whole: bool = False  # whole rows, which lie together in memory: no tensor map


def load(
    ctx: KernelContext,
    work: WorkTile,
    count: Index,
    copies_of: Callable[[Index], Iterable[Copy]],
    prefetches: Callable[[Index], Predicate] | None = None,
) -> Index:
    """Issues the copies of all tiles of a work. `count`: tiles since the kernel began, which comes
    back with those of this work added; `copies_of(count)`: the copies of a tile.
    `prefetches(tile)`: whether this block prefetches a tile to L2 before it is copied.
    """
    plan = ctx.plan
    if plan.skips_pages:
        loads.check_skipped_pages(ctx, work)

    def one_tile(tile, carry):
        count, pages = carry
        if prefetches is not None:
            later = tile + PREFETCH
            wanted = prefetches(later) & (later < work.end)
            pl.when(wanted)(functools.partial(_prefetch, ctx, work, later))
        for number, copy in enumerate(copies_of(count)):
            copy.to.acquire(copy.reused)
            for n, page in enumerate(pages):
                first = n * plan.keys.page_rows
                stretch = Stretch(tile * TILE + first, first, page)
                copy_rows(ctx, work, stretch, copy, finds_missing=number == 0)
        return count + 1, pages_of(ctx, work, tile + 1)

    ahead = pages_of(ctx, work, work.tile)
    return lax.fori_loop(work.tile, work.end, one_tile, (count, ahead))[0]


class Stretch(NamedTuple):
    """Rows of a tile that lie together in memory: all, or those of a page."""

    position: Index  # first row in the sequence
    first: int  # first row in the block that they are copied to
    page: Index | None


def pages_of(ctx: KernelContext, work: WorkTile, tile: Index) -> list[Index | None]:
    """The page of each stretch of a tile; they are loaded a tile ahead."""
    plan = ctx.plan
    rows = [tile * TILE + first for first in range(0, TILE, plan.keys.page_rows)]
    if not plan.layout.paged:
        return [None for _ in rows]
    table, last = ctx.refs.page_table, jnp.maximum(work.length - 1, 0)
    return [table[work.sequence, plan.layout.entry(jnp.minimum(row, last))] for row in rows]


def _prefetch(ctx: KernelContext, work: WorkTile, tile: Index) -> None:
    """Prefetches a tile to L2."""
    plan = ctx.plan
    blocks = plan.problem.head_dim // WIDTH
    width = WIDTH * next(n for n in (4, 3, 2, 1) if blocks % n == 0)
    for n, page in enumerate(pages_of(ctx, work, tile)):
        slab, row = _slice_of(ctx, work, tile * TILE + n * plan.keys.page_rows, page)
        for column in range(0, plan.problem.head_dim, width):
            columns = pl.ds(column, width)
            plgpu.async_prefetch(ctx.refs.kv.at[slab, pl.ds(row, plan.keys.page_rows), columns])


def _slice_of(
    ctx: KernelContext, work: WorkTile, position: Index, page: Index | None
) -> tuple[Index, Index]:
    """Index and row in the view of the cache; of another row, if its layer or page is missing: the
    result will be NaN.
    """
    layout, layer = ctx.plan.layout, None
    if ctx.refs.layer is not None:
        layer = jnp.clip(ctx.refs.layer[0], 0, layout.layers - 1)
    if page is not None:
        page = jnp.where(layout.lacks_page(page), 0, page)
    return layout.slice_of(Row(work.sequence, 0, position, layer, page))


def copy_rows(
    ctx: KernelContext, work: WorkTile, stretch: Stretch, copy: Copy, finds_missing: bool
) -> None:
    """The copy's columns of a stretch. `finds_missing`: a missing page is noted in the table."""
    plan, (position, first, page) = ctx.plan, stretch

    def issue():
        slab, row = _slice_of(ctx, work, position, page)
        source = ctx.refs.kv.at[slab, pl.ds(row, plan.keys.page_rows), copy.columns]
        to = copy.to.ref.at[pl.ds(first, plan.keys.page_rows)]
        bounds = plgpu.OOBFillMode.PROMISE_IN_BOUNDS if copy.whole else None
        plgpu.copy_gmem_to_smem(source, to, copy.to.ready, oob_mode=bounds)

    if page is None:
        return issue()

    @pl.when(position < work.length)
    def _():
        if finds_missing:
            missing = plan.layout.lacks_page(page)
            lost = ctx.smem.table.lost
            pl.when(missing)(lambda: threads.each_thread(_lose, lost, work.sequence))
        issue()

    pl.when(position >= work.length)(lambda: plgpu.barrier_arrive(copy.to.ready))
    return None


def _lose(thread: threads.Thread, lost: SmemRef, m: Index) -> None:
    thread.shared_store(lost, m, thread.index * 0 + 1, thread.index < 1)


def clear(tile: SmemRef, columns: int, live: Index) -> None:
    """Zeros over values past the last key: whatever lies there, NaN too, has a weight of 0."""
    inside = mosaic.positions((TILE, WIDTH), 0, 0) < live
    mosaic.overwrites_what_is_masked(columns // WIDTH)  # scores of these rows
    for column in range(0, columns, WIDTH):
        ref = tile.at[:, pl.ds(column, WIDTH)]
        ref[...] = jnp.where(inside, plgpu.load(ref, layout=mosaic.TILE), 0)
