"""How rows of a latent cache come to shared memory: by TMA, swizzled for wgmma, a kv tile in blocks
of columns, each of which has barriers of its own.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import DecodeInputs
from pallas_attn.kernels.attention import cache_layout, functions
from pallas_attn.kernels.attention.cache_layout import Layout, Row
from pallas_attn.kernels.attention.plan import Context
from pallas_attn.kernels.decode import producer, scheduler
from pallas_attn.kernels.decode.scheduler import Plan, Share, Table, WorkTile
from pallas_attn.kernels.lang import mosaic, threads

COMPILER = plgpu.CompilerParams(
    approx_math=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    unsafe_no_auto_barriers=True,  # each store says what makes it seen
)

Array = Any
Ref = Any
Scalar = Any

TILE = 64  # keys
WIDTH = 64  # columns of a swizzle of 128 bytes
PREFETCH = 1  # tiles between the one that is copied and the one that is prefetched to L2


class Refs(NamedTuple):
    """Global memory that is read."""

    q: Ref  # [M * padded, H]
    kv: Ref  # [layers * sequences or pages, rows, H]
    given: scheduler.Lengths
    page_table: Ref | None
    layer: Ref | None
    mask_aux: tuple[Ref, ...] = ()  # what a function of positions reads: `functions.flat`


def refs_of(inputs: DecodeInputs, layout: Layout, rows: int) -> Refs:
    """`rows`: query rows that a sequence has in memory; those past its own are zeros."""
    m, *_, width = inputs.q.shape
    q = inputs.q.reshape(m, -1, width)
    if rows > q.shape[1]:
        q = jnp.pad(q, ((0, 0), (0, rows - q.shape[1]), (0, 0)))
    return Refs(
        q=q.reshape(-1, width),
        kv=layout.view(inputs.k_cache),
        given=scheduler.lengths_of(inputs, None),
        page_table=inputs.page_table,
        layer=cache_layout.scalar_operand(inputs.layer),
        mask_aux=functions.flat(inputs.mask_aux),
    )


def sinks_of(inputs: DecodeInputs, rows: int) -> Array | None:
    """float32[rows]: of a sequence's query rows; those past its own are 0."""
    if inputs.sinks is None:
        return None
    sinks = jnp.tile(inputs.sinks.astype(jnp.float32), inputs.q.shape[1])
    return jnp.pad(sinks, (0, rows - sinks.size))


def fill_table(ctx: Context) -> None:
    """By one warpgroup, for all."""
    program = mosaic.in_context(scheduler.fill_table, ctx.plan)
    refs = scheduler.TableRefs(ctx.refs.given, ctx.smem.table)
    threads.each_thread(program, refs, producer.usable(ctx.plan, ctx.refs.layer))


def each_work(plan: Plan, table: Table, share: Share, body: Callable, carry: Any) -> Any:
    """`body(work, number, carry)` for each work of the block."""

    def one(state):
        unit, m, number, carry = state
        work = scheduler.work_at(plan, table, share, unit, m)
        return work.next_unit, work.sequence, number + 1, body(work, number, carry)

    m = scheduler.sequence_of(plan, table, share.first)
    start = (share.first, m, jnp.int32(0), carry)
    return lax.while_loop(lambda state: state[0] < share.end, one, start)[3]


class Block(NamedTuple):
    """Columns of a tile, and where they go."""

    columns: Any  # of K
    to: Ref  # [TILE, columns]
    ready: Ref  # the barrier that completes when they are there
    free: Ref | None  # the one that completes when what lay there before is not needed any more
    reused: Any  # whether something lay there before: else `free` is not waited for


def load(
    ctx: Context,
    work: WorkTile,
    count: Scalar,
    blocks_of: Callable[[Scalar], Iterable[Block]],
    prefetches: Callable[[Scalar], Scalar] | None = None,
) -> Scalar:
    """Issues the copies of all tiles of a work. `count`: tiles since the kernel began, which comes
    back with those of this work added; `blocks_of(count)`: where those of a tile go.
    `prefetches(tile)`: whether this block prefetches a tile to L2 before it is copied.
    """
    plan = ctx.plan
    producer.check_skipped_pages(ctx, work, threads.each_thread)

    def one_tile(tile, carry):
        count, pages = carry
        if prefetches is not None:
            later = tile + PREFETCH
            wanted = prefetches(later) & (later < work.end)
            pl.when(wanted)(functools.partial(_prefetch, ctx, work, later))
        for number, block in enumerate(blocks_of(count)):
            if block.free is not None:
                pl.when(block.reused)(functools.partial(plgpu.barrier_wait, block.free))
            for n, page in enumerate(pages):
                first = n * plan.page_rows
                stretch = _Stretch(tile * TILE + first, first, page)
                _copy_rows(ctx, work, stretch, block, finds_missing=number == 0)
        return count + 1, _pages(ctx, work, tile + 1)

    ahead = _pages(ctx, work, work.tile)
    return lax.fori_loop(work.tile, work.end, one_tile, (count, ahead))[0]


class _Stretch(NamedTuple):
    """Rows of a tile that lie together in memory: all, or those of a page."""

    position: Scalar  # of the first, in the sequence
    first: int  # in the tile
    page: Scalar | None


def _pages(ctx: Context, work: WorkTile, tile: Scalar) -> list[Scalar | None]:
    """Of each stretch of a tile; they are loaded a tile ahead."""
    plan = ctx.plan
    rows = [tile * TILE + first for first in range(0, TILE, plan.page_rows)]
    if not plan.layout.paged:
        return [None for _ in rows]
    table: Any = ctx.refs.page_table
    last = jnp.maximum(work.length - 1, 0)
    return [table[work.sequence, plan.layout.entry(jnp.minimum(row, last))] for row in rows]


def _prefetch(ctx: Context, work: WorkTile, tile: Scalar) -> None:
    """A tile to L2."""
    plan = ctx.plan
    blocks = plan.problem.head_dim // WIDTH
    width = WIDTH * next(n for n in (4, 3, 2, 1) if blocks % n == 0)
    for n, page in enumerate(_pages(ctx, work, tile)):
        slab, row = _slice_of(ctx, work, tile * TILE + n * plan.page_rows, page)
        for column in range(0, plan.problem.head_dim, width):
            columns = pl.ds(column, width)
            plgpu.async_prefetch(ctx.refs.kv.at[slab, pl.ds(row, plan.page_rows), columns])


def _slice_of(
    ctx: Context, work: WorkTile, position: Scalar, page: Scalar | None
) -> tuple[Scalar, Scalar]:
    """Where a row lies in the view of the cache; if its layer or page is missing, another's: the
    result will be NaN.
    """
    layout, layer = ctx.plan.layout, None
    if ctx.refs.layer is not None:
        layer = jnp.clip(ctx.refs.layer[0], 0, layout.layers - 1)
    if page is not None:
        page = jnp.where(layout.lacks_page(page), 0, page)
    return layout.slice_of(Row(work.sequence, 0, position, layer, page))


def _copy_rows(
    ctx: Context, work: WorkTile, stretch: _Stretch, block: Block, finds_missing: bool
) -> None:
    """A block's columns of a stretch. `finds_missing`: a missing page is noted in the table."""
    plan, (position, first, page) = ctx.plan, stretch

    def copy():
        slab, row = _slice_of(ctx, work, position, page)
        source = ctx.refs.kv.at[slab, pl.ds(row, plan.page_rows), block.columns]
        to = block.to.at[pl.ds(first, plan.page_rows)]
        plgpu.copy_gmem_to_smem(source, to, block.ready)

    if page is None:
        return copy()

    @pl.when(position < work.length)
    def _():
        if finds_missing:
            missing = plan.layout.lacks_page(page)
            lost = ctx.smem.table.lost
            pl.when(missing)(lambda: threads.each_thread(_lose, lost, work.sequence))
        copy()

    pl.when(position >= work.length)(lambda: plgpu.barrier_arrive(block.ready))
    return None


def _lose(thread: threads.Thread, lost: Ref, m: Any) -> None:
    thread.shared_store(lost, m, thread.index * 0 + 1, thread.index < 1)


def clear(tile: Ref, columns: int, live: Scalar) -> None:
    """Zeros over values past the last key: whatever lies there, NaN too, has a weight of 0."""
    inside = mosaic.positions((TILE, WIDTH), 0, 0) < live
    for column in range(0, columns, WIDTH):
        ref = tile.at[:, pl.ds(column, WIDTH)]
        ref[...] = jnp.where(inside, plgpu.load(ref, layout=mosaic.TILE), 0)
