"""KV tiles on their way to shared memory: those of a block's work tiles, one after the other, into
the slots of a ring. There is no producer warp: threads that compute issue the copies.

On Hopper these are bulk copies, one of K and one of V for each stretch of rows that lies together
in memory, or one of both where K and V lie side by side. A slot's barrier completes when the bytes
announced for it are there. `box_copies` and `thread_copies` copy tiles otherwise.

Small pages make many copies of a tile. Memory gives pages in any order almost as fast as one long
row; the cost is the time to look them up and to issue copies. So where a block reads many keys, the
pages of a tile are looked up while the tile before it is loaded.
"""

import functools
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import DecodeInputs
from pallas_attn.kernels.attention import cache_layout, functions
from pallas_attn.kernels.attention.cache_layout import Row
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.decode import combine_splits, scheduler
from pallas_attn.kernels.decode.plan import ZERO_BYTES, Copies, Plan, at_least
from pallas_attn.kernels.decode.scheduler import Share, WorkTile
from pallas_attn.kernels.lang import threads
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.threads import Word
from pallas_attn.kernels.lang.types import GmemRef, Index, Operand, Predicate, SmemRef

# ---- memory --------------------------------------------------------------------------------------


class DecodeSmem(NamedTuple):
    """Shared memory of a block."""

    k: SmemRef  # [stages, tile, H]; [stages, tile, H + Hv] if K and V share one array
    v: SmemRef | None  # [stages, tile, Hv]
    warp_partials: combine_splits.WarpPartials
    table: scheduler.Table
    barriers: SmemRef  # [stages] of 8 bytes
    last: SmemRef  # int32[1]: whether this block is the last of its row's
    k_scale: SmemRef | None = None  # float32[stages, tile], of a quantised cache
    v_scale: SmemRef | None = None
    q: SmemRef | None = None  # queries of float32: `mma_tf32.queries_shape`
    scores: SmemRef | None = None  # `column_parts.shape`, where warps divide the columns


class DecodeRefs(NamedTuple):
    """Global memory that is read."""

    q: GmemRef  # [M, t, N, H]
    caches: tuple[tuple[GmemRef, ...], ...]  # K and V, and their scales if any: `Layout.tables`
    lengths: scheduler.Lengths
    page_table: GmemRef | None
    layer: GmemRef | None
    sinks: GmemRef | None
    counters: GmemRef  # `plan.counters`
    mask_aux: tuple[GmemRef, ...] = ()  # operands of a function of positions: `functions.flat`
    score_aux: tuple[GmemRef, ...] = ()


def refs_of(inputs: DecodeInputs, counters: Operand, plan: Plan) -> DecodeRefs:
    return DecodeRefs(
        q=inputs.q,
        caches=plan.layout.tables(inputs.k_cache, inputs.v_cache, inputs.k_scale, inputs.v_scale),
        lengths=scheduler.Lengths(
            inputs.lengths,
            inputs.new_lengths,
            plan.layout.capacities_operand(),
            cache_layout.scalar_operand(inputs.mask_left),
            cache_layout.scalar_operand(inputs.mask_right),
            inputs.starts,
        ),
        page_table=inputs.page_table,
        layer=cache_layout.scalar_operand(inputs.layer),
        sinks=inputs.sinks,
        counters=counters,
        mask_aux=functions.flat(inputs.mask_aux) if inputs.mask_aux else (),
        score_aux=functions.flat(inputs.score_aux) if inputs.score_aux else (),
    )


class Memory(NamedTuple):
    """A context's memory, as programs of one thread are handed it."""

    refs: DecodeRefs
    smem: Any  # `DecodeSmem`, or that of a kernel for latent caches


def has_layer(plan: Plan, layer: GmemRef | None) -> Index:
    """1; or 0 where a traced layer is none that the cache has."""
    if layer is None:
        return jnp.int32(1)
    return plan.layout.has_layer(layer[0]).astype(jnp.int32)


# ---- the order of tiles --------------------------------------------------------------------------


class Tile(NamedTuple):
    """A kv tile to be loaded, as int32 scalars."""

    sequence: Index
    head: Index
    row: Index  # its first key
    live: Index  # keys that exist, of those from `row` on; 0 or less: nothing to load
    slot: Index  # the entry of the ring
    wanted: Index  # 0: no tile is left
    layer: Index | None
    page: Index | None = None  # int32[128]: the page that each thread has looked up


class Loading(NamedTuple):
    """How far loading is: `work.tile` is the next tile."""

    work: WorkTile
    tile: Tile | None  # the next tile, where its pages have been looked up ahead


def fill_ring(ctx: KernelContext, share: Share, first: WorkTile) -> Loading:
    """Loads tiles until all slots but one are taken."""
    plan, count = ctx.plan, ctx.plan.tiling.stages - 1
    if plan.copies.bulk:
        count = jnp.minimum(count, (share.end - share.first) * plan.keys.tiles_a_unit)
    if plan.layout.paged and plan.copies.bulk:
        return _fill_ring_of_pages(ctx, share, first, count)

    def load_one(slot, work):
        return load(ctx, next_tile(ctx, share, work, slot))

    return Loading(lax.fori_loop(0, count, load_one, first), None)


def _fill_ring_of_pages(ctx: KernelContext, share: Share, first: WorkTile, count: Index) -> Loading:
    """The pages of a tile come while those of the tile before it are awaited."""

    def load_one(slot, ahead):
        work = ahead.work
        after = work._replace(tile=jnp.minimum(work.tile + 1, work.end))
        later = next_tile(ctx, share, after, slot + 1)
        load(ctx, ahead)
        return later

    ahead = lax.fori_loop(0, count, load_one, next_tile(ctx, share, first, jnp.int32(0)))
    return ahead if ctx.plan.pages_ahead else ahead._replace(tile=None)


def next_tile(ctx: KernelContext, share: Share, work: WorkTile, slot: Index) -> Loading:
    """The next tile of the block's share, if there is one; and the work tile that it is of."""
    plan, refs, smem = ctx
    ends = (work.tile >= work.end) & (work.next_unit < share.end)

    def begun():
        new = scheduler.work_at(plan, smem.table, share, work.next_unit, work.sequence)
        if plan.tiling.many_heads:
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
        page = threads.run(plan.copies.load_pages, plan, refs, tile, returns="each")
        tile = tile._replace(page=page)
    return Loading(work, tile)


def load(ctx: KernelContext, target: Loading) -> WorkTile:
    """Issues the copies of a kv tile; gives the work tile with the next one.

    Where blocks have few tiles, all have been issued by the time the first is there: to go through
    the instructions for none would be a good part of what each of them takes.
    """
    plan, (work, tile) = ctx.plan, target
    assert tile is not None
    memory = Memory(ctx.refs, ctx.smem)
    copy = functools.partial(threads.run, plan.copies.copy_tile, plan, memory, tile)
    if plan.copies.bulk and not plan.tiling.load_first:
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
    """Looks up the pages before the first that is read, where `plan.skips_pages`: a mask that lets
    the block skip them does not excuse a missing one, which loses the sequence.
    """
    plan = ctx.plan
    skipped = _Skipped(work.sequence, plan.layout.entry(work.tile * plan.keys.tile))
    refs = _Pages(ctx.refs.page_table, ctx.smem.table.lost)
    threads.run(_check_pages, plan, refs, skipped)


def _check_pages(ctx: ThreadContext) -> None:
    thread, (page_table, lost), (sequence, pages), plan = ctx
    plan.layout.note_missing(thread, page_table, sequence, pages, (lost, sequence))


# ---- copies: programs of one thread --------------------------------------------------------------


class Phase(NamedTuple):
    """A slot of the ring, and the parity of the phase in which its barrier completes."""

    slot: Index
    parity: Index


def live_keys(ctx: ThreadContext) -> Index:
    """How many keys of the tile `ctx.at` exist; 0 or less where there is nothing to load."""
    thread, _, at, plan = ctx
    return thread.select(at.wanted >= 1, thread.minimum(at.live, plan.keys.tile), 0)


def load_page(ctx: ThreadContext, skipped: Index, exists: Predicate) -> Index:
    """The page of key `skipped` of the tile; of some key of the sequence where it does not exist.
    `ctx.refs`: `DecodeRefs`.
    """
    thread, refs, at, plan = ctx
    row = thread.select(exists, at.row + skipped, 0)
    return plan.layout.load_page(thread, refs.page_table, at.sequence, plan.layout.entry(row))


def place_of(ctx: ThreadContext, skipped: Index, exists: Predicate) -> Row:
    """The place of key `skipped` of the tile. A page that is missing makes its sequence a lost one.
    `ctx.refs`: `Memory`.
    """
    thread, memory, at, plan = ctx
    layout, table = plan.layout, memory.smem.table
    row, page, capacity = at.row + skipped, at.page, None
    if layout.capacity is None:
        capacity = thread.load(memory.refs.lengths.capacities, at.sequence, 4)
    if layout.paged:
        row = thread.select(exists, row, 0)
        good = layout.has_page(page)
        page = thread.select(good, page, 0)  # some page's rows: the result will be NaN
        bad = thread.select(good, thread.index * 0, 1)
        thread.shared_store(table.lost, at.sequence, bad, exists & (bad >= 1))
    return Row(at.sequence, at.head, row, at.layer, page, capacity)


def make_barriers(ctx: ThreadContext) -> None:
    """One for each slot of the ring."""
    ctx.thread.make_barriers(ctx.refs.barriers, ctx.plan.tiling.stages)


def meet(ctx: ThreadContext) -> None:
    """All threads meet: all have read the slot that is filled next."""
    ctx.thread.sync()


def wait(ctx: ThreadContext) -> None:
    """Waits until the tile of a `Phase` is there. `ctx.refs`: the barriers."""
    ctx.thread.wait(ctx.refs, *ctx.at)


class _Stretch(NamedTuple):
    """Rows of a tile that lie together in memory and are copied by one thread."""

    number: Index  # place among the copies for the tile
    skipped: Index  # the first of its keys, in the tile
    live: Index  # how many of its keys exist


def _stretch(ctx: ThreadContext) -> _Stretch:
    """Lanes that issue copies wait for each other, so neighbours are in different warps."""
    thread, rows = ctx.thread, ctx.plan.keys.contiguous_rows
    live = live_keys(ctx)
    number = thread.index % 32 * threads.WARPS + thread.index // 32
    skipped = number * rows
    return _Stretch(number, skipped, thread.minimum(live - skipped, rows))


def load_pages(ctx: ThreadContext) -> Index:
    """The page of this thread's stretch of a tile, well before `copy_tile` needs it."""
    stretch = _stretch(ctx)
    return load_page(ctx, stretch.skipped, stretch.live >= 1)


def copy_tile(ctx: ThreadContext) -> None:
    """Issues the copies of a tile. Only rows that exist are read. Rows of V behind them are filled
    with zeros, by copies too: whatever lay there, NaN too, has a weight of 0, and a store would
    have to wait for all copies under way before it lets others follow.
    """
    thread, (refs, smem), at, plan = ctx
    tile, rings = plan.keys.tile, (smem.k, smem.v)
    *k_bytes, v_bytes = plan.row_bytes
    live = at_least(live_keys(ctx), 0)
    missing = (live * -1 + tile) * v_bytes
    nbytes = live * sum(k_bytes) + tile * v_bytes
    if plan.scaled:
        nbytes = nbytes + _scale_bytes(live) * 2
    thread.announce(smem.barriers, at.slot, nbytes, (thread.index < 1) & (at.wanted >= 1))
    arrays = plan.layout.arrays_of(thread, refs.caches, at.sequence)
    number, skipped, here = _stretch(ctx)
    exists = here >= 1
    line = plan.layout.number(thread, place_of(ctx, skipped, exists))
    row = at.slot * tile + skipped
    done = Word(smem.barriers, at.slot)
    for array, ring, size in zip(arrays, rings, plan.row_bytes, strict=False):
        words = size // 16
        thread.copy(Word(ring, row * words), Word(array, line * words), here * size, done, exists)
    chunk = number * ZERO_BYTES
    zeros = thread.minimum(missing - chunk, ZERO_BYTES)
    to = (at.slot + 1) * (tile * v_bytes // 16) + chunk // 16 - missing // 16
    some = (zeros >= 1) & (at.wanted >= 1)
    source = Word(refs.counters, thread.to_int64(chunk * 0))
    thread.copy(Word(rings[len(k_bytes)], to), source, zeros, done, some)
    if plan.scaled:  # 4 scales a word: capacities, pages and tiles are multiples of 4
        nbytes = _scale_bytes(at_least(here, 0))
        for array, ring in zip(arrays[2:], (smem.k_scale, smem.v_scale), strict=True):
            thread.copy(Word(ring, row // 4), Word(array, line // 4), nbytes, done, exists)


def _scale_bytes(rows: Index) -> Index:
    """Bytes of the scales of so many rows, in whole words."""
    return (rows + 3) // 4 * 16


COPIES = Copies(copy_tile, load_pages, meet, wait, make_barriers)
