"""How the partials of a decoded row become one: those of the warps of a block, and of several
blocks.

The warps of a block leave theirs in shared memory. A block that had all keys of its row writes the
result. One that had some of them writes its partial (`attention.partials`) to global memory and
arrives at the row's counter; the block that arrives last combines all partials, in their order, so
that the bits do not depend on which block that is.

These are programs for one thread (`threads.each_thread`), which takes 4 neighbouring columns of a
row at a time. They are loops, not unrolled: instructions that run once are fetched from far away.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

from pallas_attn.kernels.attention import partials
from pallas_attn.kernels.attention.partials import Partial
from pallas_attn.kernels.decode.plan import ZERO_BYTES, Plan
from pallas_attn.kernels.decode.scheduler import Partials
from pallas_attn.kernels.lang import threads
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.threads import LANES, Thread
from pallas_attn.kernels.lang.types import GmemRef, Index, Predicate, SmemRef
from pallas_attn.kernels.mma import mma_rowmajor

LOADS_AT_ONCE = 16  # loads of partials that a warp has under way: each batch is a trip to memory
ROWS_A_TRIP = 2  # rows (or halves of wider ones) that a warp combines in the same trips


class WarpPartials(NamedTuple):
    """A partial of each row of each warp, in shared memory."""

    out: SmemRef  # float32[4 * warp_rows, Hv + padding]
    row_max: SmemRef  # float32[4 * warp_rows]
    row_sum: SmemRef


PartialRefs = tuple[GmemRef, GmemRef, GmemRef]  # accumulators, row maxima, row sums


class Results(NamedTuple):
    """The results and partials in global memory."""

    out: GmemRef  # [M, t, N, Hv]
    lse: GmemRef  # float32[M, N, t]
    partial_out: GmemRef  # float32[plan.partials, chunk_rows, Hv]
    partial_max: GmemRef  # float32[plan.partials, chunk_rows]
    partial_sum: GmemRef
    counters: GmemRef  # int32[M * heads] see `plan.counters`
    sinks: GmemRef | None


class Outputs(NamedTuple):
    """The arrays that a launch makes."""

    out: GmemRef
    lse: GmemRef
    partials: PartialRefs

    def results(self, counters: GmemRef, sinks: GmemRef | None) -> Results:
        return Results(self.out, self.lse, *self.partials, counters, sinks)


class Head(NamedTuple):
    """The head of a sequence that a block has finished with, and the places of its partials; int32
    scalars.
    """

    sequence: Index
    head: Index
    lost: Index  # 1: the result is NaN
    places: Partials
    queries: Index | None = None  # packed query rows of the sequence
    row: Index | None = None  # the first of them


class _Place(NamedTuple):
    """The part of the output that one thread has: four neighbouring columns of a row."""

    row: Index  # in the q chunk
    column: Index  # in words of four columns
    exists: Predicate


class ResultRefs(NamedTuple):
    """Memory that `write_result` and `write_partial` read and write."""

    warps: WarpPartials
    results: Results
    last: SmemRef  # int32[1]


def write_result(ctx: ThreadContext) -> None:
    """The block had all keys: the warps' partials -> the result. `ctx.refs`: `ResultRefs`."""
    ctx.thread.sync()

    def write(places: list[_Place]) -> None:
        for place in places:
            _write(ctx, ctx.refs.results, place, _of_warps(ctx, place))

    _each_places(ctx, write, 1)


def write_partial(ctx: ThreadContext) -> None:
    """The block had some of the keys: the warps' partials -> one in global memory. `refs.last`
    becomes 1 where it is the last block of its row. `ctx.refs`: `ResultRefs`.
    """
    thread, (_, results, last), at, plan = ctx
    thread.sync()

    def write(places: list[_Place]) -> None:
        for place in places:
            partial = _of_warps(ctx, place)
            line = at.places.own * plan.queries.chunk_rows + place.row
            words = plan.problem.v_head_dim // 4
            index = thread.to_int64(line) * words + thread.to_int64(place.column)
            thread.store_floats(results.partial_out, index, partial.out, place.exists)
            first = place.exists & (place.column < 1)
            thread.store_floats(results.partial_max, line, [partial.row_max], first)
            thread.store_floats(results.partial_sum, line, [partial.row_sum], first)

    _each_places(ctx, write, 1)
    arrive(ctx._replace(refs=CounterRefs(results.counters, last)))


class CounterRefs(NamedTuple):
    counters: GmemRef
    last: SmemRef  # int32[1]


def arrive(ctx: ThreadContext) -> None:
    """Counts the block's partial in: `last[0]` becomes 1 where all others are there. `ctx.refs`:
    `CounterRefs`.
    """
    thread, refs, at, plan = ctx
    counter = at.sequence * plan.heads + at.head
    if at.queries is not None:
        head, chunk = _head_and_chunk(at, plan)
        line, queries = at.sequence, plan.queries
        if queries.chunks > 1:  # chunks of one sequence are followed by those of the next
            line = line + at.row * queries.group // queries.chunk_rows + chunk
        counter = head * plan.lines + line
    counter = counter + ZERO_BYTES // 4
    thread.arrive(refs.counters, counter, at.places.count, refs.last)


class _Batch(NamedTuple):
    """Up to 32 partials, one a lane, of the rows that a warp combines at once."""

    thread: Thread
    partial_out: GmemRef
    places: list[_Place]
    lines: list[Index]  # the line of this lane's partial of each row
    left: Index  # how many partials there are
    words: int  # 4 columns each, of a row
    loads: int  # loads of each row that are under way together

    def load(self, first: Index) -> list:
        """`self.loads` partials of each row, from number `first` on."""
        thread, loaded = self.thread, []
        for place, line in zip(self.places, self.lines, strict=True):
            at = [thread.to_int64(thread.of_lane(line, first + i)) for i in range(self.loads)]
            at = [n * self.words + thread.to_int64(place.column) for n in at]
            loaded.append([thread.load_floats(self.partial_out, n, 4) for n in at])
        return loaded

    def added(self, outs: list, weights: list, first: Index, loaded: list) -> list:
        """outs plus the weighed partials that `load(first)` gave."""
        thread, zero, result = self.thread, self.thread.number(0.0), []
        for out, weight, mine in zip(outs, weights, loaded, strict=True):
            for i, four in enumerate(mine):
                w = thread.of_lane(weight, first + i)
                exists = first + i < self.left  # else it is the first partial: no 0 * inf of it
                four = [thread.choose(exists, y, zero) for y in four]
                out = [x + w * y for x, y in zip(out, four, strict=True)]
            result.append(out)
        return result


def combine(ctx: ThreadContext) -> None:
    """The last block: the partials of all blocks -> the result. `ctx.refs`: `Results`.

    A warp has a row, or `ROWS_A_TRIP` if it has no more. Each lane loads the row max and the row
    sum of one partial; then the warp adds up the outputs, lanes side by side.
    """
    (thread, refs, at, plan), count = ctx, ctx.at.places.count
    trips = (count + (LANES - 1)) // LANES
    words = plan.problem.v_head_dim // 4
    lane = thread.index % LANES

    def one_trip(trip: Index, carry: list, places: list[_Place]) -> list:
        p = trip * LANES + lane
        exists, (_, _, first, later) = p < count, at.places
        index = thread.choose(p < 1, first, later + p * plan.partials_a_block)
        start = thread.choose(exists, index, first) * plan.queries.chunk_rows
        left = thread.minimum(count - trip * LANES, LANES)
        lines = [start + place.row for place in places]
        sums = [
            [thread.load_floats(ref, line, 1)[0] for ref in (refs.partial_max, refs.partial_sum)]
            for line in lines
        ]
        loads = LOADS_AT_ONCE // len(places)
        batch = _Batch(thread, refs.partial_out, places, lines, left, words, loads)
        loaded = batch.load(lane * 0)  # under way before the weights are known
        states, weights, outs = [], [], []
        for before, (own_max, own_sum) in zip(itertools.batched(carry, 6), sums, strict=True):
            new = partials.weighed(thread, own_max, own_sum, exists, before[:2])
            states.append([new.row_max, new.row_sum])
            weights.append(new.weight)
            outs.append([x * new.rescale for x in before[2:]])
        outs = batch.added(outs, weights, lane * 0, loaded)

        def more(number: Index, flat: list) -> list:
            start = (number + 1) * batch.loads
            outs = [list(four) for four in itertools.batched(flat, 4)]
            return sum(batch.added(outs, weights, start, batch.load(start)), [])

        batches = (left + (batch.loads - 1)) // batch.loads - 1
        flat = thread.loop(batches, sum(outs, []), more)
        both = zip(states, itertools.batched(flat, 4), strict=True)
        return sum([[*state, *four] for state, four in both], [])

    def rows(places: list[_Place]) -> None:
        zero, nothing = thread.number(0.0), thread.number(float("-inf"))
        carry = [nothing, zero, *[zero] * 4] * len(places)
        carry = thread.loop(trips, carry, functools.partial(one_trip, places=places))
        for place, (top, total, *out) in zip(places, itertools.batched(carry, 6), strict=True):
            _write(ctx, refs, place, Partial(top, total, out))

    _each_places(ctx, rows, ROWS_A_TRIP)


def _each_places(ctx: ThreadContext, body: Callable[[list[_Place]], None], most: int) -> None:
    """`body` of a list of all places that this thread has, if they are no more than `most`; else of
    each in turn. Rows go to warps and columns to lanes.
    """
    thread, _, at, plan = ctx
    queries, words = plan.queries, plan.problem.v_head_dim // 4
    across = -(-words // LANES)
    count = -(-queries.most_rows // threads.WARPS) * across

    def place(number: Index) -> _Place:
        row = number // across * threads.WARPS + thread.index // LANES
        column = thread.index % LANES
        if across > 1:
            column = column + number % across * LANES
        exists = (row < queries.most_rows) & (column < words)
        if at.queries is not None:
            query = _head_and_chunk(at, plan)[1] * queries.chunk_rows + row
            exists = exists & (query < at.queries * queries.group)
        elif queries.chunks > 1:
            query = at.head % queries.chunks * queries.chunk_rows + row
            exists = exists & (query < queries.rows)
        row = thread.minimum(row, queries.most_rows - 1)
        return _Place(row, thread.minimum(column, words - 1), exists)

    def body_of_place(number: Index, carry: list) -> list:
        body([place(number)])
        return carry

    if count <= most:
        body([place(thread.index * 0 + number) for number in range(count)])
    else:
        thread.loop(count, [], body_of_place)


def _head_and_chunk(at: Head, plan: Plan) -> tuple[Index, Index]:
    """`scheduler.head_and_chunk`, of one thread."""
    chunks = plan.queries.chunks_of(at.queries)
    return at.head // chunks, at.head % chunks


def _of_warps(ctx: ThreadContext, place: _Place) -> Partial:
    """The partials of a block's warps as one."""
    thread, (warps, _, _), at, plan = ctx
    rows = plan.queries.warp_rows
    pitch = (plan.problem.v_head_dim + mma_rowmajor.ROW_PADDING) // 4
    of_groups = []
    for group in range(plan.split.groups):
        line = place.row  # warps are ordered by their group of keys, then by their row block
        if plan.queries.row_blocks > 1:
            line = line // mma_rowmajor.ROWS * rows + line % mma_rowmajor.ROWS
        line = line + group * plan.split.row_blocks * rows
        (row_max,) = thread.shared_floats(warps.row_max, line, 1)
        (row_sum,) = thread.shared_floats(warps.row_sum, line, 1)
        out = thread.shared_floats(warps.out, line * pitch + place.column, 4)
        of_groups.append(Partial(row_max, row_sum, out))
    partial = partials.joined(thread, of_groups)
    lost = thread.choose(at.lost >= 1, thread.number(float("nan")), thread.number(0.0))
    return partial._replace(row_sum=partial.row_sum + lost)


def _write(ctx: ThreadContext, results: Results, place: _Place, partial: Partial) -> None:
    """Columns of a row whose keys have all been taken -> out and lse."""
    thread, _, at, plan = ctx
    problem, queries = plan.problem, plan.queries
    kv_head, chunk = _head_and_chunk(at, plan)
    n = chunk * queries.chunk_rows + place.row
    token, head = n // queries.group, kv_head * queries.group + n % queries.group
    head = thread.minimum(head, problem.q_heads - 1)
    sink = None
    if results.sinks is not None:
        (sink,) = thread.load_floats(results.sinks, head, 1)
    factor, lse = partials.finish_row(thread, partial.row_max, partial.row_sum, sink)
    wide = (
        thread.to_int64(at.sequence) * problem.q_len if at.row is None else thread.to_int64(at.row)
    )
    line = (wide + thread.to_int64(token)) * problem.q_heads + thread.to_int64(head)
    words = problem.v_head_dim // 4
    values = [x * factor for x in partial.out]
    index = line * words + thread.to_int64(place.column)
    if problem.dtype == "float32":
        thread.store_floats(results.out, index, values, place.exists)
    else:
        thread.store_narrow(results.out, index, values, problem.dtype, place.exists)
    if at.row is None:
        line = (
            thread.to_int64(at.sequence) * problem.q_heads + thread.to_int64(head)
        ) * problem.q_len
    else:
        line = thread.to_int64(head) * problem.tokens + thread.to_int64(at.row)
    first = place.exists & (place.column < 1)
    thread.store_floats(results.lse, line + thread.to_int64(token), [lse], first)
