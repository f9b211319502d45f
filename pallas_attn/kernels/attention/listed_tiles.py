"""The lists of tiles that a mask function leaves, and which block takes which work tile: a small
kernel, for masks that read arrays.

`tile_lists.tiles` and `tile_scheduler.table` compute the same in jax.numpy, of which XLA makes ten
kernels. What comes in is what the function leaves of each pair of tiles, which XLA finds by bounds
(`tile_lists.codes`). Several blocks share the lists of a batch row, or of a head where the mask
depends on it. Four programs of single threads, with a barrier for all threads of a block between
them:

  counts  a warp for each list, of all of them: how many tiles it has
  lists   a warp for each list of the block's own
  ranks   a warp for each work tile: how many of them have longer lists
  codes   a thread for each entry of the schedule of the block's own: the work tile of a rank
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn.kernels.attention import tile_lists
from pallas_attn.kernels.lang import mosaic, thread_program, threads
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.threads import LANES, Thread
from pallas_attn.kernels.lang.types import Index, Operand, Predicate

WARPGROUPS = 4
MOST_PAIRS = 2**24  # pairs of tiles of a head, all of which each of its blocks counts
HALF = 2**16  # two numbers share a word
MOST_TILES = 12 * 1024  # tiles of a head: two words each, in the shared memory of any GPU


class _Sizes(NamedTuple):
    """How many there are of each, and where they lie in shared memory."""

    batches: int  # batch rows that have lists of their own
    heads: int
    tiles: int  # lists of one of these
    n: int  # tiles that a list may hold
    row_blocks: int
    never_empty: bool
    entries: tuple[int, int]  # entries of the schedule
    bits: int  # bits of a code, for the work tile
    heads_of_codes: int  # a batch row
    warpgroups: int = WARPGROUPS

    @property
    def blocks(self) -> int:
        """The blocks that share the lists of one head."""
        return -(-self.tiles // (WARPGROUPS * threads.WARPS))

    @property
    def first(self) -> int:
        return tile_lists.first(self.row_blocks)

    @property
    def costs(self) -> int:
        return 0

    @property
    def order(self) -> int:
        return self.tiles

    @property
    def words(self) -> int:
        return 2 * self.tiles


class _Refs(NamedTuple):
    codes: Any  # int32[batches, heads, tiles, n]: `tile_lists.codes`
    schedule: Any  # with ranks for work tiles
    lists: Any = None  # int32[batches, heads, tiles, first + n], written
    table: Any = None  # like schedule, written
    memory: Any = None  # shared: see `_Sizes`


class _Block(NamedTuple):
    owner: Any  # owner of these lists: batch row and head
    part: Any  # which of its blocks
    wg: Any


def fits(kinds: Operand) -> bool:
    """Whether `prepare` takes what `tile_lists.kinds` gives."""
    batches, heads, tiles, row_blocks, n = kinds.shape[1:]
    if batches * heads * tiles * (tile_lists.first(row_blocks) + n) >= 2**31:
        return False
    few = tiles * n <= MOST_PAIRS and tiles <= MOST_TILES and n <= HALF // 4
    return few and row_blocks <= 4


def prepare(
    codes: Operand, table: np.ndarray, row_blocks: int, never_empty: bool, of_codes: tuple[int, int]
) -> tuple[Any, Any]:
    """(`tile_lists.tiles`, `tile_scheduler.table`) of what `tile_lists.codes` gives, and of a
    table of ranks. `of_codes`: the bits of its codes for the work tile, and heads of a batch row.
    """
    facts = (row_blocks, never_empty, table.shape, *of_codes)
    sizes = _Sizes(*(*codes.shape, *facts))
    kernel = plgpu.kernel(
        functools.partial(_kernel, sizes=sizes),
        out_type=(
            jax.ShapeDtypeStruct((*codes.shape[:3], sizes.first + sizes.n), jnp.int32),
            jax.ShapeDtypeStruct(table.shape, jnp.int32),
        ),
        scratch_types=(
            plgpu.SMEM((sizes.words,), jnp.int32),
            plgpu.Barrier(num_barriers=len(PROGRAMS) - 1, num_arrivals=WARPGROUPS),
        ),
        **mosaic.grid_of(owner=sizes.batches * sizes.heads, part=sizes.blocks),
        num_threads=WARPGROUPS,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="listed_tiles",
    )
    return kernel(_Refs(codes, jnp.asarray(table)))


def _kernel(refs: _Refs, lists: Operand, table: Any, *scratch: Any, sizes: _Sizes) -> None:
    memory, barriers = scratch
    refs = refs._replace(lists=lists, table=table, memory=memory)
    block = _Block(*(lax.axis_index(name) for name in ("owner", "part", "wg")))
    for number, program in enumerate(PROGRAMS):
        threads.each_thread(thread_program.in_context(program, sizes), refs, block)
        if number < len(PROGRAMS) - 1:
            plgpu.barrier_arrive(barriers.at[number])
            plgpu.barrier_wait(barriers.at[number])


class _Code:
    """The code of a tile: bits 2r and 2r + 1 say that row block r sees some of it, and all."""

    def __init__(self, thread: Thread, word: Any, there: Predicate, row_blocks: int):
        some = sum(1 << 2 * r for r in range(row_blocks))
        word = thread.select(there, word, 0)
        self.every = (word & some) > 0
        self.word = thread.select(self.every, word, 0)
        self.wholes = (word & 2 * some) >= 2 * some  # only where some row block sees it, too
        self.wholes = self.wholes & self.every

    def has(self, bit: int) -> Any:
        return (self.word & (1 << bit)) > 0


def _steps(sizes: _Sizes) -> int:
    return -(-sizes.n // LANES)


def _code(ctx: ThreadContext, first: Index, tile: Index, there: Predicate) -> _Code:
    thread, refs, _, sizes = ctx
    word = thread.load(refs.codes, first + thread.minimum(tile, sizes.n - 1), 4)
    return _Code(thread, word, there & (tile < sizes.n), sizes.row_blocks)


def _counts(ctx: ThreadContext) -> None:
    thread, refs, block, sizes = ctx

    def count_tiles(number, lane, there, _):
        first = (block.owner * sizes.tiles + number) * sizes.n

        def some(i, carry):
            code = _code(ctx, first, lane + i * LANES, there)
            return [carry[0] + thread.select(code.every, lane * 0 + 1, 0)]

        (count,) = threads.repeat(thread, _steps(sizes), [lane * 0], some)
        count = thread.total_of_lanes(count)
        if sizes.never_empty:
            count = thread.maximum(count, 1)
        thread.shared_store(refs.memory, number + sizes.costs, count, there & (lane < 1))

    threads.each_item(thread, block.wg, sizes.tiles, LANES, sizes.warpgroups, count_tiles)
    thread.sync()


def _lists(ctx: ThreadContext) -> None:
    """A warp for each list."""
    thread, _, block, sizes = ctx
    share = -(-sizes.tiles // sizes.blocks)

    def write_list(number, lane, there, _):
        number = block.part * share + number
        there = there & (number < sizes.tiles)
        number = thread.minimum(number, sizes.tiles - 1)
        _list(ctx, _Line(block.owner * sizes.tiles + number, lane, there))

    threads.each_item(thread, block.wg, share, LANES, sizes.warpgroups, write_list)
    thread.sync()


class _Line(NamedTuple):
    """A list, and who writes it."""

    number: Any
    lane: Any
    there: Any


def _list(ctx: ThreadContext, line: _Line) -> None:
    """Tiles before the first that all see whole, those that all see whole, all others that some
    query sees, and then the rest; each part in order.
    """
    thread, refs, _, sizes = ctx
    (number, lane, there), n = line, sizes.n
    first, into = number * n, number * (sizes.first + n) + sizes.first
    nothing, unit = lane * 0, lane * 0 + 1

    def looked_at(i):
        tile = lane + i * LANES
        return tile, _code(ctx, first, tile, there)

    def begins(i, carry):
        tile, code = looked_at(i)
        both = thread.select(code.every, unit, 0) + thread.select(code.wholes, unit * HALF, 0)
        left = thread.select(code.wholes, tile * -1 + n, 0)
        return [thread.maximum(carry[0], left), carry[1] + both]

    begin, both = threads.repeat(thread, _steps(sizes), [nothing, nothing], begins)
    begin = thread.most_of_lanes(begin, LANES) * -1 + n
    both = thread.total_of_lanes(both)
    count, wholes = both % HALF, both // HALF

    def ahead(i, carry):
        tile, code = looked_at(i)
        return [carry[0] + thread.select(code.every & (tile < begin), unit, 0)]

    (before,) = threads.repeat(thread, _steps(sizes), [nothing], ahead)
    before = thread.total_of_lanes(before)

    def places(i, carry):
        run, last, *ends = carry
        tile, code = looked_at(i)
        own = thread.select(code.every, unit, 0) + thread.select(code.wholes, unit * HALF, 0)
        earlier = run + thread.running_sum(own) - own
        seen, whole = earlier % HALF, earlier // HALF
        masked = thread.select(tile < begin, seen, seen + wholes - whole)
        place = thread.select(code.every, masked, count + tile - seen)
        place = thread.select(code.wholes, before + whole, place)
        thread.store(refs.lists, into + place, tile, 4, there & (tile < n))
        key = (place + 1) * HALF + tile  # the greatest is that of the last place
        last = thread.maximum(last, thread.select(code.every, key, 0))
        if sizes.row_blocks > 1:
            ends = _ends(thread, code, (place, key, unit), ends, n)
        return [run + thread.total_of_lanes(own), last, *ends]

    width = ENDS * sizes.row_blocks if sizes.row_blocks > 1 else 0
    carry = [nothing] * (2 + width)
    _, last, *ends = threads.repeat(thread, _steps(sizes), carry, places)
    last = thread.most_of_lanes(last, LANES) % HALF  # 0 where there is none
    count = thread.maximum(count, 1) if sizes.never_empty else count
    some = wholes > 0
    header = [count, thread.select(some, before, 0), thread.select(some, before + wholes, 0), last]
    for r in range(width // ENDS):
        header += _span(thread, ends[ENDS * r :][:ENDS], header[:4], n)
    record = nothing
    for at, field in enumerate(header):
        record = thread.select((lane <= at) & (lane >= at), field, record)
    where = there & (lane < len(header))
    thread.store(refs.lists, number * (sizes.first + n) + lane, record, 4, where)


ENDS = 5  # numbers that are kept of each row block


def _ends(thread: Thread, code: _Code, tile: tuple[Any, Any, Any], ends: list, n: int) -> list:
    """The ends of each row block, so far: n - the first place of its tiles; the last one's key; of
    the tiles that it sees whole n - the first place, the place after the last, and how many there
    are.
    """
    place, key, unit = tile
    updated = []
    for r in range(len(ends) // ENDS):
        lo, hi, own_lo, own_hi, count = ends[ENDS * r :][:ENDS]
        some, whole = code.has(2 * r), code.has(2 * r + 1)
        left = place * -1 + n
        updated += [
            thread.maximum(lo, thread.select(some, left, 0)),
            thread.maximum(hi, thread.select(some, key, 0)),
            thread.maximum(own_lo, thread.select(whole, left, 0)),
            thread.maximum(own_hi, thread.select(whole, place + 1, 0)),
            count + thread.select(whole, unit, 0),
        ]
    return updated


def _span(thread: Thread, ends: list, header: list, n: int) -> list:
    """The fields of a list for one row block: see `tile_lists`."""
    count, full_lo, full_hi, last = header
    lo, key, own_lo, own_hi = (thread.most_of_lanes(x, LANES) for x in ends[:4])
    length = thread.total_of_lanes(ends[4])
    lo, own_lo, hi, own_last = lo * -1 + n, own_lo * -1 + n, key // HALF, key % HALF
    one_run = (own_hi - own_lo <= length) & (own_hi - own_lo >= length)
    own_lo = thread.select(one_run, own_lo, full_lo)
    own_hi = thread.select(one_run, own_hi, full_hi)
    some, none = own_hi > own_lo, hi < 1
    fields = lo, thread.select(some, own_lo, lo), thread.select(some, own_hi, lo)
    return [
        *(thread.select(none, count - 1, x) for x in fields),
        thread.select(none, count, hi),
        thread.select(none, last, own_last),
    ]


def _ranks(ctx: ThreadContext) -> None:
    threads.order_by_cost(ctx.thread, ctx.refs.memory, ctx.at.wg, ctx.plan)


def _codes(ctx: ThreadContext) -> None:
    """Codes behind a block's work tiles stand for the first of all, and are never taken."""
    thread, refs, block, sizes = ctx
    entries, unit = math.prod(sizes.entries), 1 << sizes.bits
    share = -(-entries // sizes.blocks)

    def load(number, _):
        number = block.part * share + number
        return number, thread.load(refs.schedule, thread.minimum(number, entries - 1), 4)

    def finish(_, lane, there, loaded):
        number, value = loaded
        there = there & (number < entries)
        head, rank = value // unit, value % unit
        tile = thread.shared_load(refs.memory, thread.minimum(rank, sizes.tiles - 1) + sizes.order)
        owner = lane * 0
        if sizes.batches > 1:
            owner = head // sizes.heads_of_codes * sizes.heads
        if sizes.heads > 1:
            own = head % sizes.heads_of_codes
            if sizes.heads < sizes.heads_of_codes:  # heads that follow each other share lists
                own = own * sizes.heads // sizes.heads_of_codes
            owner = owner + own
        counts = number % sizes.entries[1] < 1
        owner = thread.select(counts, lane * 0, owner)
        ours = (owner <= block.owner) & (owner >= block.owner)
        code = thread.select(counts, value, head * unit + tile)
        thread.store(refs.table, number, code, 4, there & ours)

    threads.each_item(thread, block.wg, share, 1, sizes.warpgroups, finish, load)


PROGRAMS = (_counts, _lists, _ranks, _codes)
