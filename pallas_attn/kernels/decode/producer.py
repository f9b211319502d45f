"""The order in which a block loads kv tiles: those of its work tiles, one after the other, into the
slots of a ring. There is no producer warp: threads that compute issue the copies.

Small pages make many copies of a tile. Memory gives pages in any order almost as fast as one long
row; the cost is the time to look them up and to issue copies. So where a block reads many keys, the
pages of a tile are looked up while the tile before it is loaded.
"""

from types import ModuleType
from typing import NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.decode import box_copies, bulk_copies, scheduler, thread_copies
from pallas_attn.kernels.decode.memory import Memory, Tile
from pallas_attn.kernels.decode.plan import Plan
from pallas_attn.kernels.decode.scheduler import Share, WorkTile
from pallas_attn.kernels.lang import threads
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.types import GmemRef, Index, SmemRef


class Phase(NamedTuple):
    """A slot of the ring, and the parity of the phase in which its barrier completes."""

    slot: Index
    parity: Index


class NextTile(NamedTuple):
    """A kv tile that `issue` is to copy, and the work tile that it belongs to."""

    work: WorkTile
    tile: Tile


class Loading(NamedTuple):
    """How far loading is: `work.tile` is the next tile."""

    work: WorkTile
    tile: Tile | None  # the next tile, where its pages have been looked up ahead


def copies_of(plan: Plan) -> ModuleType:
    """The module that copies tiles: it has `make_barriers`, `meet`, `wait`, `load_pages` and
    `copy_tile`.
    """
    if not plan.config.bulk:
        return thread_copies
    return box_copies if plan.layout.joined and box_copies.serves(plan) else bulk_copies


def fill_ring(ctx: KernelContext, share: Share, first: WorkTile) -> Loading:
    """Loads tiles until all slots but one are taken."""
    plan, stages = ctx.plan, ctx.plan.config.stages
    most = (share.end - share.first) * plan.keys.tiles_a_unit if plan.config.bulk else stages
    count = jnp.minimum(stages - 1, most)
    if plan.layout.paged and plan.config.bulk:
        return _fill_ring_of_pages(ctx, share, first, count)

    def load_one(slot, work):
        return issue(ctx, next_tile(ctx, share, work, slot))

    return Loading(lax.fori_loop(0, count, load_one, first), None)


def _fill_ring_of_pages(ctx: KernelContext, share: Share, first: WorkTile, count: Index) -> Loading:
    """The pages of a tile come while those of the tile before it are awaited."""

    def load_one(slot, ahead):
        work = ahead.work
        after = work._replace(tile=jnp.minimum(work.tile + 1, work.end))
        later = next_tile(ctx, share, after, slot + 1)
        issue(ctx, ahead)
        return later

    ahead = lax.fori_loop(0, count, load_one, next_tile(ctx, share, first, jnp.int32(0)))
    return Loading(ahead.work, ahead.tile if _pages_ahead(ctx.plan) else None)


def _pages_ahead(plan: Plan) -> bool:
    """Whether the pages of a tile are looked up while the tile before it is loaded."""
    config = plan.config
    first = config.load_first and (config.many_heads or plan.problem.quantized)
    return first and plan.layout.paged and config.bulk


def following(ctx: KernelContext, share: Share, loading: Loading, slot: Index) -> NextTile:
    """The tile that is loaded next, into `slot`."""
    if loading.tile is not None:
        return NextTile(loading.work, loading.tile)
    return next_tile(ctx, share, loading.work, slot)


def load(ctx: KernelContext, share: Share, tile: NextTile, slot: Index) -> Loading:
    """Issues the copies of a tile; `slot` is that of the tile after it."""
    work = issue(ctx, tile)
    if _pages_ahead(ctx.plan):
        return Loading(*next_tile(ctx, share, work, slot))
    return Loading(work, None)


def next_tile(ctx: KernelContext, share: Share, work: WorkTile, slot: Index) -> NextTile:
    """The next tile of the block's share, if there is one."""
    plan, refs, smem = ctx
    ends = (work.tile >= work.end) & (work.next_unit < share.end)

    def begun():
        new = scheduler.work_at(plan, smem.table, share, work.next_unit, work.sequence)
        if plan.config.many_heads:
            first = scheduler.first_query(plan, new)
            threads.run(prefetch_queries, plan, refs.q, first)
        return new

    work = lax.cond(ends, begun, lambda: work)
    row = work.tile * plan.keys.tile
    tile = Tile(
        sequence=work.sequence,
        head=scheduler.head_and_chunk(plan, work)[0],
        row=row,
        live=work.length - row,
        slot=slot,
        wanted=(work.tile < work.end).astype(jnp.int32),
        layer=None if refs.layer is None else refs.layer[0],
    )
    if plan.layout.paged:
        page = threads.run(copies_of(plan).load_pages, plan, refs, tile, returns="each")
        tile = tile._replace(page=page)
    return NextTile(work, tile)


def issue(ctx: KernelContext, target: NextTile) -> WorkTile:
    """Issues the copies of a kv tile; gives the work tile with the next one.

    Where blocks have few tiles, all have been issued by the time the first is there: to go through
    the instructions for none would be a good part of what each of them takes.
    """
    plan, (work, tile) = ctx.plan, target

    def copy():
        threads.run(copies_of(plan).copy_tile, plan, Memory(ctx.refs, ctx.smem), tile)

    if plan.config.bulk and not plan.config.load_first:
        pl.when(tile.wanted >= 1)(copy)
    else:  # threads that copy count their groups of copies, empty ones too
        copy()
    return work._replace(tile=jnp.minimum(work.tile + 1, work.end))


def prefetch_queries(ctx: ThreadContext) -> None:
    """Has the query rows of a coming work brought into the cache of the multiprocessor."""
    thread, q, (first, chunk), plan = ctx
    problem, queries = plan.problem, plan.queries
    row_bytes = problem.head_dim * jnp.dtype(problem.dtype).itemsize
    lines = -(-row_bytes // 128)
    n = thread.minimum(thread.index // lines, queries.most_rows - 1) + chunk
    n = thread.minimum(n, queries.rows - 1)
    row = first + n // queries.group * problem.q_heads + n % queries.group
    if problem.tokens is not None:  # rows past the sequence's last are another's, or none
        row = thread.minimum(row, problem.tokens * problem.q_heads - 1)
    row = thread.to_int64(row)
    word = thread.minimum(thread.index % lines * 8, row_bytes // 16 - 1)
    thread.prefetch(q, row * (row_bytes // 16) + thread.to_int64(word), 16)


# ---- pages that a mask skips ---------------------------------------------------------------------


class _Pages(NamedTuple):
    page_table: GmemRef
    lost: SmemRef  # field of the table of sequences


class _Skipped(NamedTuple):
    sequence: Index
    pages: Index  # how many lie before the first that is read


def check_skipped_pages(ctx: KernelContext, work: WorkTile) -> None:
    """Looks up the pages before the first that is read: a mask that lets the block skip them does
    not excuse a missing one, which loses the sequence.
    """
    plan = ctx.plan
    if plan.layout.paged and plan.problem.mask.bounds_left:
        skipped = _Skipped(work.sequence, plan.layout.entry(work.tile * plan.keys.tile))
        refs = _Pages(ctx.refs.page_table, ctx.smem.table.lost)
        threads.run(_check_pages, plan, refs, skipped)


def _check_pages(ctx: ThreadContext) -> None:
    thread, (page_table, lost), (sequence, pages), plan = ctx
    plan.layout.note_missing(thread, page_table, sequence, pages, (lost, sequence))
