"""How a block asks for tiles of keys and values: programs for one thread (`threads.each_thread`),
and which tile is next.

Small pages make many copies of a tile. Memory gives pages in any order almost as fast as one long
row; what they cost is time to look them up and to ask. So where streams are long a tile's pages are
looked up while the one before it is asked for; and where every block still has whole ones, it takes
several heads side by side, which lie together in a page (`_fetch_abreast`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_attn._problem import DecodeInputs, DecodeProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import cache_layout, tma_operands
from pallas_attn.kernels.attention.cache_layout import Row
from pallas_attn.kernels.decode import combine, scheduler
from pallas_attn.kernels.decode.scheduler import BLANK, Piece, Plan, Share, Table
from pallas_attn.kernels.lang import threads

Ref = Any
Scalar = Any


class Smem(NamedTuple):
    k: Any  # [stages, tile, H]
    v: Any  # [stages, tile, Hv]
    spilled: combine.Spilled
    table: Table
    barriers: Any  # [stages] of 8 bytes
    last: Any  # int32[1]: whether this block is the last of its row's
    k_scale: Any = None  # float32[stages, tile], of a quantised cache
    v_scale: Any = None
    q: Any = None  # of float32: `mma_tf32.queries_shape`


class Refs(NamedTuple):
    """Global memory that is read."""

    q: Ref  # [M, t, N, H]
    # K and V, and their scales if they have any: of a sequence each, or of all.
    caches: tuple[tuple[Ref, ...], ...]
    given: scheduler.Lengths
    page_table: Ref | None
    layer: Ref | None
    sinks: Ref | None
    counters: Ref  # behind `BLANK` bytes of zeros


def refs_of(inputs: DecodeInputs, counters: Any, plan: Plan) -> Refs:
    return Refs(
        q=inputs.q,
        caches=plan.layout.tables(inputs.k_cache, inputs.v_cache, inputs.k_scale, inputs.v_scale),
        given=scheduler.Lengths(inputs.lengths, plan.layout.capacities_operand()),
        page_table=inputs.page_table,
        layer=cache_layout.layer_operand(inputs.layer),
        sinks=inputs.sinks,
        counters=counters,
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
    """A tile to be loaded, as int32 scalars."""

    m: Scalar
    head: Scalar
    row: Scalar  # its first key
    live: Scalar  # keys that exist, of those from `row` on; 0 or less: nothing to load
    slot: Scalar
    wanted: Scalar  # 0: no tile is left
    layer: Scalar | None
    page: Any = None  # int32[128]: what `look_up` gave


def next_tile(
    plan: Plan, refs: Refs, smem: Smem, share: Share, place: tuple[Piece, Any]
) -> tuple[Piece, Tile]:
    """The next tile of the block's line, if there is one, for a slot of the ring; and the piece
    that it belongs to.
    """
    piece, slot = place
    more = (piece.tile >= piece.end) & (piece.following < share.end)

    def opened():
        new = scheduler.piece_at(plan, smem.table, share, piece.following, piece.m)
        if plan.config.many:
            near = functools.partial(bring_queries, plan=plan)
            threads.each_thread(near, refs.q, scheduler.first_query(plan, new))
        return new

    piece = lax.cond(more, opened, lambda: piece)
    row = piece.tile * plan.tile
    tile = Tile(
        m=piece.m,
        head=lax.div(piece.head, jnp.int32(plan.chunks)),
        row=row,
        live=piece.length - row,
        slot=slot,
        wanted=(piece.tile < piece.end).astype(jnp.int32),
        layer=None if refs.layer is None else refs.layer[0],
    )
    if plan.layout.paged:
        page = functools.partial(look_up, plan=plan)
        tile = tile._replace(page=threads.each_thread(page, refs, tile, returns=True))
    return piece, tile


def ask(plan: Plan, refs: Refs, smem: Smem, ahead: tuple[Piece, Tile]) -> Piece:
    """Asks for a tile; where loading stands then.

    Where blocks have few tiles, all have been asked for by the time the first is there: asking for
    none, instruction by instruction, would be a good part of what each of them takes.
    """
    piece, tile = ahead

    def fetching():
        threads.each_thread(functools.partial(fetch, plan=plan), (refs, smem), tile)

    if plan.bulk and not plan.config.eager:
        pl.when(tile.wanted >= 1)(fetching)
    else:  # threads that copy count their groups of copies, empty ones too
        fetching()
    return piece._replace(tile=jnp.minimum(piece.tile + 1, piece.end))


def _number(thread: threads.Thread) -> Any:
    """Which of a tile's copies is this thread's: lanes that ask for copies wait for each other, so
    neighbours are in different warps.
    """
    return thread.index % 32 * threads.WARPS + thread.index // 32


def _piece(thread: threads.Thread, at: Tile, plan: Plan) -> tuple[Any, Any, Any]:
    """(its first key in the tile, how many of its keys exist, which head's they are of those side
    by side) of this thread's piece of a tile, which lies together in memory.

    Piece p is that of warp p % 4: lanes that ask for copies wait for each other.
    """
    live = thread.select(at.wanted >= 1, thread.minimum(at.live, plan.tile), 0)
    piece, head = _number(thread), None
    if plan.abreast > 1:
        piece, head = piece // plan.abreast, piece % plan.abreast
    skipped = piece * plan.page_rows
    return skipped, thread.minimum(live - skipped, plan.page_rows), head


def look_up(thread: threads.Thread, refs: Refs, at: Tile, plan: Plan) -> Any:
    """The page of this thread's piece; asked for well before `fetch` wants to know. Where threads
    copy, every warp looks up all pieces, a lane each.
    """
    skipped, here, _ = _piece(thread, at, plan)
    if not plan.bulk:
        live = thread.select(at.wanted >= 1, thread.minimum(at.live, plan.tile), 0)
        skipped = thread.index % 32 * plan.page_rows
        here = live - skipped
    row = thread.select(here >= 1, at.row + skipped, 0)
    return plan.layout.load_page(thread, refs.page_table, at.m, plan.layout.entry(row))


def fetch(thread: threads.Thread, refs: tuple[Refs, Smem], at: Tile, plan: Plan) -> None:
    """Asks for a tile: a copy of K and one of V for what lies together. Only rows that exist are
    read. Behind them V gets zeros, by copies too: whatever lay there, NaN too, has a weight of 0,
    and a store would have to wait for all copies under way before it lets others follow.
    """
    if not plan.bulk:
        _fetch_by_threads(thread, refs, at, plan)
        return
    given, smem = refs
    if plan.abreast > 1:
        _fetch_abreast(thread, refs, at, plan)
        return
    row_bytes = [plan.itemsize * dim for dim in (plan.problem.head_dim, plan.problem.v_head_dim)]
    live = thread.select(at.wanted >= 1, thread.minimum(at.live, plan.tile), 0)
    live = scheduler.at_least(live, 0)
    missing = (live * -1 + plan.tile) * row_bytes[1]
    nbytes = live * row_bytes[0] + plan.tile * row_bytes[1]
    if plan.problem.quantized:
        nbytes = nbytes + _scale_bytes(live) * 2
    thread.announce(smem.barriers, at.slot, nbytes, (thread.index < 1) & (at.wanted >= 1))
    caches = plan.layout.arrays_of(thread, given.caches, at.m)
    skipped, here, _ = _piece(thread, at, plan)
    there = here >= 1
    line = _source(thread, (given, smem.table), at, skipped, there, plan)
    row = at.slot * plan.tile + skipped
    done = (smem.barriers, at.slot)
    for cache, ring, size in zip(caches[:2], (smem.k, smem.v), row_bytes, strict=True):
        words = size // 16
        thread.copy((ring, row * words), (cache, line * words), here * size, done, there)
    chunk = _number(thread) * BLANK
    blank = thread.minimum(missing - chunk, BLANK)
    to = (at.slot + 1) * (plan.tile * row_bytes[1] // 16) + chunk // 16 - missing // 16
    some = (blank >= 1) & (at.wanted >= 1)
    thread.copy((smem.v, to), (given.counters, thread.wide(chunk * 0)), blank, done, some)
    if plan.problem.quantized:  # 4 scales a word: capacities, pages and pieces are multiples of 4
        nbytes = _scale_bytes(scheduler.at_least(here, 0))
        for cache, ring in zip(caches[2:], (smem.k_scale, smem.v_scale), strict=True):
            thread.copy((ring, row // 4), (cache, line // 4), nbytes, done, there)


def _fetch_abreast(thread: threads.Thread, refs: tuple[Refs, Smem], at: Tile, plan: Plan) -> None:
    """`fetch` of heads side by side, which a page holds one behind the other: what a whole page has
    of them comes by one copy each of K and V, by different warps. Of the page that a sequence ends
    in, each thread copies a head's.
    """
    given, smem = refs
    (caches,), rows = given.caches, plan.page_rows
    row_bytes = [plan.itemsize * dim for dim in (plan.problem.head_dim, plan.problem.v_head_dim)]
    live = thread.select(at.wanted >= 1, thread.minimum(at.live, plan.tile), 0)
    live = scheduler.at_least(live, 0)
    nbytes = live * (row_bytes[0] * plan.abreast) + plan.lines * row_bytes[1]
    if plan.problem.quantized:
        nbytes = nbytes + _scale_bytes(live) * (2 * plan.abreast)
    thread.announce(smem.barriers, at.slot, nbytes, (thread.index < 1) & (at.wanted >= 1))
    skipped, here, head = _piece(thread, at, plan)
    inside = (skipped < plan.tile) & (at.wanted >= 1)
    here = scheduler.at_least(here, 0)
    whole, there = here >= rows, here >= 1
    first = thread.select(whole, thread.index * 0, head)  # of the heads that this thread brings
    place = at._replace(head=at.head * plan.abreast + first)
    line = _source(thread, (given, smem.table), place, skipped, there, plan)
    row = at.slot * plan.lines + skipped * plan.abreast + first * rows
    done, count = (smem.barriers, at.slot), thread.select(whole, here * plan.abreast, here)

    def turn_of(n):
        return there & ((here < rows) | ((head >= n) & (head <= n)))

    rings = [(smem.k, row_bytes[0] // 16), (smem.v, row_bytes[1] // 16)]
    for n, (cache, (ring, words)) in enumerate(zip(caches[:2], rings, strict=True)):
        nbytes = count * words * 16
        thread.copy((ring, row * words), (cache, line * words), nbytes, done, turn_of(n))
    for start in range(0, rows * row_bytes[1], BLANK):
        missing = (here * -1 + rows) * row_bytes[1] - start
        blank = thread.minimum(missing, BLANK)
        to = (at.slot * plan.lines + skipped * plan.abreast + head * rows + here) * rings[1][1]
        to = to + start // 16
        some = inside & (blank >= 1)
        thread.copy((smem.v, to), (given.counters, thread.wide(head * 0)), blank, done, some)
    if plan.problem.quantized:
        nbytes = _scale_bytes(count)
        for n, cache, ring in zip((-2, -1), caches[2:], (smem.k_scale, smem.v_scale), strict=True):
            turn = turn_of(n % plan.abreast)
            thread.copy((ring, row // 4), (cache, line // 4), nbytes, done, turn)


def _fetch_by_threads(
    thread: threads.Thread, refs: tuple[Refs, Smem], at: Tile, plan: Plan
) -> None:
    """`fetch` where there are no bulk copies: 16 bytes a thread at a time, zeros where there is no
    row.
    """
    given, smem = refs
    live = thread.select(at.wanted >= 1, thread.minimum(at.live, plan.tile), 0)
    caches = plan.layout.arrays_of(thread, given.caches, at.m)
    start = at.slot * plan.tile
    line_of = finder(thread, (given, smem.table), at, live, plan)
    dims = (plan.problem.head_dim, plan.problem.v_head_dim)
    for cache, ring, dim in zip(caches[:2], (smem.k, smem.v), dims, strict=True):
        words = plan.itemsize * dim // 16
        for first in range(0, plan.tile * words, 128):
            index = thread.index + first
            row, word = index // words, index % words
            inside = None if first + 128 <= plan.tile * words else row < plan.tile
            source = line_of(thread.minimum(row, plan.tile - 1)) * words + thread.wide(word)
            to = (ring, (start + row) * words + word)
            thread.copy_async(to, (cache, source), row < live, inside)
    scales = (smem.k_scale, smem.v_scale) if plan.problem.quantized else ()
    for cache, ring in zip(caches[2:], scales, strict=True):
        for first in range(0, plan.tile, 128):
            row = thread.index + first
            inside = None if first + 128 <= plan.tile else row < plan.tile
            source = line_of(thread.minimum(row, plan.tile - 1))
            thread.copy_async((ring, start + row), (cache, source), row < live, inside, 4)
    thread.commit_copies()


def finder(
    thread: threads.Thread, refs: tuple[Refs, Table], at: Tile, live: Any, plan: Plan
) -> Callable[[Any], Any]:
    """Where threads copy: row of the tile, of which `live` exist -> `_source` of it."""
    given, _ = refs
    if not plan.layout.paged:
        begin = _source(thread, refs, at, thread.index * 0, live >= 1, plan)
        return lambda row: begin + thread.wide(row)

    def line_of(row: Any) -> Any:
        piece = row // plan.page_rows
        if plan.tile // plan.page_rows <= 32:
            page = thread.of_lane(at.page, piece)
        else:
            entry = plan.layout.entry(thread.select(row < live, at.row + row, 0))
            page = plan.layout.load_page(thread, given.page_table, at.m, entry)
        return _source(thread, refs, at._replace(page=page), row, row < live, plan)

    return line_of


def _scale_bytes(rows: Any) -> Any:
    """Of the scales of so many rows, in whole words."""
    return (rows + 3) // 4 * 16


def _source(
    thread: threads.Thread, refs: tuple[Refs, Table], at: Tile, skipped: Any, there: Any, plan: Plan
) -> Any:
    """The row of the cache's array where key `skipped` of the tile lies, in 64 bits. A page that is
    missing makes its sequence a lost one.
    """
    (given, table), layout = refs, plan.layout
    row, page, capacity = at.row + skipped, at.page, None
    if layout.capacity is None:
        capacity = thread.load(given.given.capacities, at.m, 4)
    if layout.paged:
        row = thread.select(there, row, 0)
        good = layout.has_page(page)
        page = thread.select(good, page, 0)  # some page's rows: the result will be NaN
        bad = thread.select(good, thread.index * 0, 1)
        thread.shared_store(table.lost, at.m, bad, there & (bad >= 1))
    return layout.number(thread, Row(at.m, at.head, row, at.layer, page, capacity))


def bring_queries(thread: threads.Thread, q: Ref, at: tuple[Any, Any], plan: Plan) -> None:
    """Has the queries of a piece to come brought near."""
    (first, chunk), problem = at, plan.problem
    row_bytes = problem.head_dim * jnp.dtype(problem.dtype).itemsize
    lines = -(-row_bytes // 128)
    n = thread.minimum(thread.index // lines, plan.most_rows - 1) + chunk
    if plan.abreast > 1:
        first, n = first + n // plan.rows * plan.group, n % plan.rows
    n = thread.minimum(n, plan.rows - 1)
    row = thread.wide(first + n // plan.group * problem.q_heads + n % plan.group)
    word = thread.minimum(thread.index % lines * 8, row_bytes // 16 - 1)
    thread.prefetch(q, row * (row_bytes // 16) + thread.wide(word), 16)


def check_skipped_pages(
    plan: Plan, refs: Any, table: Table, piece: Piece, each_thread: Callable = threads.each_thread
) -> None:
    """Pages before the first that is read: a window does not excuse a missing one."""
    if plan.checks_skipped_pages:
        before = plan.layout.entry(piece.tile * plan.tile)
        program = functools.partial(_check_pages, plan=plan)
        each_thread(program, (refs, table), (piece.m, before))


def _check_pages(thread: threads.Thread, refs: tuple[Refs, Table], at: Any, plan: Plan) -> None:
    """All of a sequence's before some."""
    (given, table), (m, pages) = refs, at

    def some(i: Any, carry: list) -> list:
        slot = i * 128 + thread.index
        there = slot < pages
        entry = thread.select(there, slot, 0)
        good = plan.layout.has_page(plan.layout.load_page(thread, given.page_table, m, entry))
        bad = thread.select(good, thread.index * 0, 1)
        thread.shared_store(table.lost, m, bad, there & (bad >= 1))
        return carry

    thread.loop((pages + 127) // 128, [], some)


def make_barriers(thread: threads.Thread, barriers: Ref, plan: Plan) -> None:
    if plan.bulk:
        thread.make_barriers(barriers, plan.config.stages)


def sync(thread: threads.Thread, refs: Any, at: Any, plan: Plan) -> None:
    """All have read the tile before; where threads copy, the next tile is there."""
    del refs, at
    if not plan.bulk and plan.config.stages > 1:
        thread.wait_copies(plan.config.stages - 2)
    thread.sync()


def wait(thread: threads.Thread, barriers: Ref, at: tuple[Any, Any], plan: Plan) -> None:
    """Until a bulk copy is there, or the tile that threads have just asked for."""
    if plan.bulk:
        thread.wait(barriers, *at)
    elif plan.config.stages == 1:
        thread.wait_copies(0)
        thread.sync()
