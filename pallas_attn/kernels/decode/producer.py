"""How a block loads kv tiles: which tile is next, and programs for one thread
(`threads.each_thread`) that copy it to shared memory.

Small pages make many copies of a tile. Memory gives pages in any order almost as fast as one long
row; what they cost is time to look them up and to issue copies. So where a block reads many keys, a
tile's pages are looked up while the tile before it is loaded; and where every block still has whole
heads, it takes several at once, which lie together in a page (`_copy_heads`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import cache_layout, functions, tma_operands
from pallas_attn.kernels.attention.cache_layout import Row
from pallas_attn.kernels.attention.plan import Context
from pallas_attn.kernels.decode import combine_splits, scheduler
from pallas_attn.kernels.decode.scheduler import (
    ZERO_BYTES,
    Plan,
    Share,
    Table,
    WorkTile,
)
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.mosaic import ThreadContext
from pallas_attn.kernels.lang.threads import Word

Ref = Any
Scalar = Any


class Smem(NamedTuple):
    k: Any  # [stages, tile, H]
    v: Any  # [stages, tile, Hv]
    warp_partials: combine_splits.WarpPartials
    table: Table
    barriers: Any  # [stages] of 8 bytes
    last: Any  # int32[1]: whether this block is the last of its row's
    k_scale: Any = None  # float32[stages, tile], of a quantised cache
    v_scale: Any = None
    q: Any = None  # of float32: `mma_tf32.queries_shape`


class Refs(NamedTuple):
    """Global memory that is read."""

    q: Ref  # [M, t, N, H]
    caches: tuple[tuple[Ref, ...], ...]  # K and V, and their scales if any: `Layout.tables`
    given: scheduler.Lengths
    page_table: Ref | None
    layer: Ref | None
    sinks: Ref | None
    counters: Ref  # behind `ZERO_BYTES` of zeros
    mask_aux: tuple[Ref, ...] = ()  # what a function of positions reads: `functions.flat`


class Memory(NamedTuple):
    """A context's memory, as programs of one thread are handed it."""

    refs: Refs
    smem: Any


def refs_of(inputs: DecodeInputs, counters: Any, plan: Plan) -> Refs:
    return Refs(
        q=inputs.q,
        caches=plan.layout.tables(inputs.k_cache, inputs.v_cache, inputs.k_scale, inputs.v_scale),
        given=scheduler.lengths_of(inputs, plan.layout.capacities_operand()),
        page_table=inputs.page_table,
        layer=cache_layout.scalar_operand(inputs.layer),
        sinks=inputs.sinks,
        counters=counters,
        mask_aux=functions.flat(inputs.mask_aux),
    )


def usable(plan: Plan, layer: Ref | None) -> Scalar:
    """1; or 0 where a traced layer is none that the cache has."""
    if layer is None:
        return jnp.int32(1)
    return plan.layout.has_layer(layer[0]).astype(jnp.int32)


def narrow_limit(problem: DecodeProblem) -> Limit | None:
    """Why quantised rows cannot be copied as they lie, or None."""
    if problem.head_dim % 64 or problem.v_head_dim % 8:
        return Limit(
            f"a quantised cache of head dim {problem.head_dim}; it takes multiples of 64",
            tma_operands.HOW_TO_PAD,
        )
    sizes = problem.capacities if problem.page_size is None else (problem.page_size,)
    if any(size % 4 for size in sizes) or problem.v_head_dim % 16:
        return Limit(
            "rows are copied 16 bytes at a time, scales too",
            "make capacities (or the page size) a multiple of 4 and v_head_dim one of 16",
        )
    return None


class Tile(NamedTuple):
    """A kv tile to be loaded, as int32 scalars."""

    sequence: Scalar
    head: Scalar
    row: Scalar  # its first key
    live: Scalar  # keys that exist, of those from `row` on; 0 or less: nothing to load
    slot: Scalar  # of the ring
    wanted: Scalar  # 0: no tile is left
    layer: Scalar | None
    page: Any = None  # int32[128]: what `load_pages` gave


class Position(NamedTuple):
    """Where loading stands: the work tile, whose `tile` is the next, and a slot of the ring."""

    work: WorkTile
    slot: Scalar


class NextTile(NamedTuple):
    """A kv tile that `load` is to copy, and the work tile that it belongs to."""

    work: WorkTile
    tile: Tile


def next_tile(ctx: Context, share: Share, position: Position) -> NextTile:
    """The next tile of the block's share, if there is one."""
    plan, refs, smem = ctx
    work, slot = position
    more = (work.tile >= work.end) & (work.next_unit < share.end)

    def begun():
        new = scheduler.work_at(plan, smem.table, share, work.next_unit, work.sequence)
        if plan.config.many_heads:
            first = scheduler.first_query(plan, new)
            threads.each_thread(mosaic.in_context(prefetch_queries, plan), refs.q, first)
        return new

    work = lax.cond(more, begun, lambda: work)
    row = work.tile * plan.tile
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
        program = mosaic.in_context(load_pages, plan)
        tile = tile._replace(page=threads.each_thread(program, refs, tile, returns="each"))
    return NextTile(work, tile)


def load(ctx: Context, following: NextTile) -> WorkTile:
    """Issues the copies of a kv tile; comes back with the work tile where loading stands then.

    Where blocks have few tiles, all have been issued by the time the first is there: to go through
    the instructions for none would be a good part of what each of them takes.
    """
    plan, (work, tile) = ctx.plan, following

    def copied():
        threads.each_thread(mosaic.in_context(copy_tile, plan), Memory(ctx.refs, ctx.smem), tile)

    if plan.bulk and not plan.config.load_first:
        pl.when(tile.wanted >= 1)(copied)
    else:  # threads that copy count their groups of copies, empty ones too
        copied()
    return work._replace(tile=jnp.minimum(work.tile + 1, work.end))


def _copy_number(thread: threads.Thread) -> Any:
    """Which of a tile's copies is this thread's: lanes that issue copies wait for each other, so
    neighbours are in different warps.
    """
    return thread.index % 32 * threads.WARPS + thread.index // 32


class _Stretch(NamedTuple):
    """Rows of a tile that lie together in memory and are copied by one thread."""

    skipped: Any  # the first of its keys, in the tile
    live: Any  # how many of its keys exist
    head: Any  # of heads that are taken at once: whose they are


def live_keys(ctx: ThreadContext) -> Any:
    """How many keys of the tile exist; 0 or less where there is nothing to load."""
    thread, _, at, plan = ctx
    return thread.select(at.wanted >= 1, thread.minimum(at.live, plan.tile), 0)


def _stretch(ctx: ThreadContext) -> _Stretch:
    """This thread's. Number n is that of warp n % 4: see `_copy_number`."""
    thread, plan = ctx.thread, ctx.plan
    live = live_keys(ctx)
    number, head = _copy_number(thread), None
    if plan.heads_at_once > 1:
        number, head = number // plan.heads_at_once, number % plan.heads_at_once
    skipped = number * plan.page_rows
    return _Stretch(skipped, thread.minimum(live - skipped, plan.page_rows), head)


def load_pages(ctx: ThreadContext) -> Any:
    """The page of this thread's stretch of a tile, well before `copy_tile` needs it. Where threads
    copy, every warp looks up all pages, a lane each.
    """
    thread, refs, at, plan = ctx
    skipped, here, _ = _stretch(ctx)
    if not plan.bulk:
        live = live_keys(ctx)
        skipped = thread.index % 32 * plan.page_rows
        here = live - skipped
    row = thread.select(here >= 1, at.row + skipped, 0)
    return plan.layout.load_page(thread, refs.page_table, at.sequence, plan.layout.entry(row))


def copy_tile(ctx: ThreadContext) -> None:
    """Issues the copies of a tile: one of K and one of V for what lies together. Only rows that
    exist are read. Rows of V behind them are filled with zeros, by copies too: whatever lay there,
    NaN too, has a weight of 0, and a store would have to wait for all copies under way before it
    lets others follow.
    """
    thread, (given, smem), at, plan = ctx
    if not plan.bulk:
        _copy_by_threads(ctx)
        return
    if plan.heads_at_once > 1:
        _copy_heads(ctx)
        return
    row_bytes = [plan.itemsize * dim for dim in (plan.problem.head_dim, plan.problem.v_head_dim)]
    live = scheduler.at_least(live_keys(ctx), 0)
    missing = (live * -1 + plan.tile) * row_bytes[1]
    nbytes = live * row_bytes[0] + plan.tile * row_bytes[1]
    if plan.problem.quantized:
        nbytes = nbytes + _scale_bytes(live) * 2
    thread.announce(smem.barriers, at.slot, nbytes, (thread.index < 1) & (at.wanted >= 1))
    caches = plan.layout.arrays_of(thread, given.caches, at.sequence)
    skipped, here, _ = _stretch(ctx)
    exists = here >= 1
    line = _row_number(ctx, skipped, exists)
    row = at.slot * plan.tile + skipped
    done = Word(smem.barriers, at.slot)
    for cache, ring, size in zip(caches[:2], (smem.k, smem.v), row_bytes, strict=True):
        words = size // 16
        thread.copy(Word(ring, row * words), Word(cache, line * words), here * size, done, exists)
    chunk = _copy_number(thread) * ZERO_BYTES
    zeros = thread.minimum(missing - chunk, ZERO_BYTES)
    to = (at.slot + 1) * (plan.tile * row_bytes[1] // 16) + chunk // 16 - missing // 16
    some = (zeros >= 1) & (at.wanted >= 1)
    thread.copy(Word(smem.v, to), Word(given.counters, thread.wide(chunk * 0)), zeros, done, some)
    if plan.problem.quantized:  # 4 scales a word: capacities, pages and tiles are multiples of 4
        nbytes = _scale_bytes(scheduler.at_least(here, 0))
        for cache, ring in zip(caches[2:], (smem.k_scale, smem.v_scale), strict=True):
            thread.copy(Word(ring, row // 4), Word(cache, line // 4), nbytes, done, exists)


def _copy_heads(ctx: ThreadContext) -> None:
    """`copy_tile` of several heads at once, which a page holds one behind the other: what a whole
    page has of them comes by one copy each of K and V, by different warps. Of the page that a
    sequence ends in, each thread copies a head's rows.
    """
    thread, (given, smem), at, plan = ctx
    (caches,), rows = given.caches, plan.page_rows
    row_bytes = [plan.itemsize * dim for dim in (plan.problem.head_dim, plan.problem.v_head_dim)]
    live = scheduler.at_least(live_keys(ctx), 0)
    nbytes = live * (row_bytes[0] * plan.heads_at_once) + plan.tile_rows * row_bytes[1]
    if plan.problem.quantized:
        nbytes = nbytes + _scale_bytes(live) * (2 * plan.heads_at_once)
    thread.announce(smem.barriers, at.slot, nbytes, (thread.index < 1) & (at.wanted >= 1))
    skipped, here, head = _stretch(ctx)
    inside = (skipped < plan.tile) & (at.wanted >= 1)
    here = scheduler.at_least(here, 0)
    whole, exists = here >= rows, here >= 1
    first = thread.select(whole, thread.index * 0, head)  # of the heads that this thread copies
    place = at._replace(head=at.head * plan.heads_at_once + first)
    line = _row_number(ctx._replace(at=place), skipped, exists)
    row = at.slot * plan.tile_rows + skipped * plan.heads_at_once + first * rows
    done, count = (
        Word(smem.barriers, at.slot),
        thread.select(whole, here * plan.heads_at_once, here),
    )

    def is_copied_here(n):  # of a whole page, array n by the n-th of its threads
        return exists & ((here < rows) | ((head >= n) & (head <= n)))

    rings = [(smem.k, row_bytes[0] // 16), (smem.v, row_bytes[1] // 16)]
    for n, (cache, (ring, words)) in enumerate(zip(caches[:2], rings, strict=True)):
        nbytes = count * words * 16
        thread.copy(
            Word(ring, row * words), Word(cache, line * words), nbytes, done, is_copied_here(n)
        )
    for start in range(0, rows * row_bytes[1], ZERO_BYTES):
        missing = (here * -1 + rows) * row_bytes[1] - start
        zeros = thread.minimum(missing, ZERO_BYTES)
        to = at.slot * plan.tile_rows + skipped * plan.heads_at_once + head * rows + here
        to = to * rings[1][1] + start // 16
        some = inside & (zeros >= 1)
        thread.copy(
            Word(smem.v, to), Word(given.counters, thread.wide(head * 0)), zeros, done, some
        )
    if plan.problem.quantized:
        nbytes = _scale_bytes(count)
        for n, cache, ring in zip((-2, -1), caches[2:], (smem.k_scale, smem.v_scale), strict=True):
            here_too = is_copied_here(n % plan.heads_at_once)
            thread.copy(Word(ring, row // 4), Word(cache, line // 4), nbytes, done, here_too)


def _copy_by_threads(ctx: ThreadContext) -> None:
    """`copy_tile` where there are no bulk copies: 16 bytes a thread at a time, zeros where there is
    no row.
    """
    thread, (given, smem), at, plan = ctx
    live = live_keys(ctx)
    caches = plan.layout.arrays_of(thread, given.caches, at.sequence)
    start = at.slot * plan.tile
    number_of = row_numbers(ctx, live)
    dims = (plan.problem.head_dim, plan.problem.v_head_dim)
    for cache, ring, dim in zip(caches[:2], (smem.k, smem.v), dims, strict=True):
        words = plan.itemsize * dim // 16
        for first in range(0, plan.tile * words, 128):
            index = thread.index + first
            row, word = index // words, index % words
            inside = None if first + 128 <= plan.tile * words else row < plan.tile
            source = number_of(thread.minimum(row, plan.tile - 1)) * words + thread.wide(word)
            to = Word(ring, (start + row) * words + word)
            thread.copy_async(to, Word(cache, source), row < live, inside)
    scales = (smem.k_scale, smem.v_scale) if plan.problem.quantized else ()
    for cache, ring in zip(caches[2:], scales, strict=True):
        for first in range(0, plan.tile, 128):
            row = thread.index + first
            inside = None if first + 128 <= plan.tile else row < plan.tile
            source = number_of(thread.minimum(row, plan.tile - 1))
            thread.copy_async(Word(ring, start + row), Word(cache, source), row < live, inside, 4)
    thread.commit_copies()


def row_numbers(ctx: ThreadContext, live: Any) -> Callable[[Any], Any]:
    """Where threads copy: row of the tile, of which `live` exist -> its number in the array."""
    thread, memory, at, plan = ctx
    if not plan.layout.paged:
        begin = _row_number(ctx, thread.index * 0, live >= 1)
        return lambda row: begin + thread.wide(row)

    def number_of(row: Any) -> Any:
        stretch = row // plan.page_rows
        if plan.tile // plan.page_rows <= 32:
            page = thread.of_lane(at.page, stretch)
        else:
            entry = plan.layout.entry(thread.select(row < live, at.row + row, 0))
            page = plan.layout.load_page(thread, memory.refs.page_table, at.sequence, entry)
        return _row_number(ctx._replace(at=at._replace(page=page)), row, row < live)

    return number_of


def _scale_bytes(rows: Any) -> Any:
    """Of the scales of so many rows, in whole words."""
    return (rows + 3) // 4 * 16


def _row_number(ctx: ThreadContext, skipped: Any, exists: Any) -> Any:
    """Which row of the cache's array key `skipped` of the tile is, in 64 bits. A page that is
    missing makes its sequence a lost one.
    """
    thread, memory, at, plan = ctx
    layout, table = plan.layout, memory.smem.table
    row, page, capacity = at.row + skipped, at.page, None
    if layout.capacity is None:
        capacity = thread.load(memory.refs.given.capacities, at.sequence, 4)
    if layout.paged:
        row = thread.select(exists, row, 0)
        good = layout.has_page(page)
        page = thread.select(good, page, 0)  # some page's rows: the result will be NaN
        bad = thread.select(good, thread.index * 0, 1)
        thread.shared_store(table.lost, at.sequence, bad, exists & (bad >= 1))
    return layout.number(thread, Row(at.sequence, at.head, row, at.layer, page, capacity))


def prefetch_queries(ctx: ThreadContext) -> None:
    """Has the query rows of a coming work brought into the cache of the multiprocessor."""
    thread, q, (first, chunk), plan = ctx
    problem = plan.problem
    row_bytes = problem.head_dim * jnp.dtype(problem.dtype).itemsize
    lines = -(-row_bytes // 128)
    n = thread.minimum(thread.index // lines, plan.most_rows - 1) + chunk
    if plan.heads_at_once > 1:
        first, n = first + n // plan.rows * plan.group, n % plan.rows
    n = thread.minimum(n, plan.rows - 1)
    row = first + n // plan.group * problem.q_heads + n % plan.group
    if problem.tokens is not None:  # rows past the sequence's last are another's, or none
        row = thread.minimum(row, problem.tokens * problem.q_heads - 1)
    row = thread.wide(row)
    word = thread.minimum(thread.index % lines * 8, row_bytes // 16 - 1)
    thread.prefetch(q, row * (row_bytes // 16) + thread.wide(word), 16)


class _Pages(NamedTuple):
    page_table: Ref
    lost: Ref  # of the table in shared memory


class _Skipped(NamedTuple):
    sequence: Scalar
    pages: Scalar  # how many lie before the first that is read


def check_skipped_pages(
    ctx: Context, work: WorkTile, each_thread: Callable = threads.each_thread
) -> None:
    """Looks up the pages before the first that is read: a mask that lets the block skip them does
    not excuse a missing one.
    """
    plan = ctx.plan
    if plan.checks_skipped_pages:
        skipped = _Skipped(work.sequence, plan.layout.entry(work.tile * plan.tile))
        refs = _Pages(ctx.refs.page_table, ctx.smem.table.lost)
        each_thread(mosaic.in_context(_check_pages, plan), refs, skipped)


def _check_pages(ctx: ThreadContext) -> None:
    thread, (page_table, lost), (sequence, pages), plan = ctx
    plan.layout.note_missing(thread, page_table, sequence, pages, (lost, sequence))


class Phase(NamedTuple):
    """A slot of the ring, and the parity of the phase in which its barrier completes."""

    slot: Scalar
    parity: Scalar


def make_barriers(thread: threads.Thread, barriers: Ref, plan: Plan) -> None:
    if plan.bulk:
        thread.make_barriers(barriers, plan.config.stages)


def meet(ctx: ThreadContext, left: int | None) -> None:
    """All threads, when all but the last `left` of their copies are there; None: whatever is."""
    if left is not None:
        ctx.thread.wait_copies(left)
    ctx.thread.sync()


def wait(ctx: ThreadContext) -> None:
    """Until a bulk copy is there, or the tile that threads have just begun to copy."""
    thread, barriers, at, plan = ctx
    if plan.bulk:
        thread.wait(barriers, *at)
    elif plan.config.stages == 1:
        thread.wait_copies(0)
        thread.sync()
