"""How the partials of a decoded row become one: of the warps of a block, and of several blocks.

A partial of a row is an output that is not yet divided, the row max that it is relative to (in log2
units), and the row sum of its weights. The warps of a block leave theirs in shared memory. A block
that had all keys of its row writes the result. One that had some of them writes its partial to
global memory and arrives at the row's counter; the block that arrives last combines all partials,
in their order, so that the bits do not depend on which block that is.

These are programs for one thread (`threads.each_thread`), which takes 4 neighbouring columns of a
row at a time. They are loops, not unrolled: instructions that run once are fetched from far away.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn.kernels.attention import softmax
from pallas_attn.kernels.decode.scheduler import ZERO_BYTES, Plan
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.mosaic import ThreadContext
from pallas_attn.kernels.lang.threads import LANES
from pallas_attn.kernels.mma import mma_rowmajor

Ref = Any

LOADS_AT_ONCE = 16  # loads of partials that a warp has under way: each batch is a trip to memory
ROWS_AT_ONCE = 2  # rows (or halves of wider ones) that a warp combines in the same trips


class WarpPartials(NamedTuple):
    """What the warps leave in shared memory."""

    out: Ref  # float32[4 * plan.warp_rows, Hv + padding]
    row_max: Ref  # float32[4 * plan.warp_rows]
    row_sum: Ref


class Results(NamedTuple):
    """In global memory."""

    out: Ref  # [M, t, N, Hv]
    lse: Ref  # float32[M, N, t]
    partial_out: Ref  # float32[plan.partials, chunk_rows, Hv]
    partial_max: Ref  # float32[plan.partials, chunk_rows]
    partial_sum: Ref
    counters: Ref  # int32[M * heads] behind `ZERO_BYTES`, 0 before a launch and after it
    sinks: Ref | None


class Head(NamedTuple):
    """Whose rows a block has finished with, and where their partials lie; int32 scalars."""

    sequence: Any
    head: Any
    lost: Any  # 1: the result is NaN
    count: Any  # the rest as in `scheduler.Partials`
    own: Any
    first: Any
    later: Any
    rows: Any = None  # where rows are packed: of the sequence, and the first of them
    row: Any = None


class Owned(NamedTuple):
    """Packed rows [first, end) are those of sequences; and which block of how many this is."""

    first: Any
    end: Any
    block: Any
    blocks: Any


class _Place(NamedTuple):
    """What one thread has of the output: four neighbouring columns of a row."""

    row: Any  # of the q chunk
    column: Any  # of those, counted in fours
    exists: Any


class _Partial(NamedTuple):
    row_max: Any
    row_sum: Any
    out: list[Any]  # four columns


_calls = itertools.count(1)


def counters(plan: Plan) -> np.ndarray:
    """A zero for every head of every sequence, in which its partials are counted, behind
    `ZERO_BYTES` of zeros that are only read (`producer.copy_tile`).

    Each launch leaves them as it found them, so they are a constant: XLA has nothing to clear,
    which would be a launch of its own. The number behind them is that of this call: two calls in a
    program would otherwise share one constant, and must not if XLA ever ran them side by side.
    (Calls of one jitted function inside another still do.) It also keeps XLA from making the zeros
    itself.
    """
    zeros = ZERO_BYTES // 4 + plan.problem.kv_heads // plan.heads_at_once * plan.lines
    return np.append(np.zeros(zeros, np.int32), np.int32(next(_calls) % 2**31 or 1))


def of_no_rows(inputs: DecodeInputs, problem: DecodeProblem) -> tuple[Any, Any]:
    """out and lse over a cache without rows: NaN for a sequence that should have some."""
    lost = inputs.lengths > 0
    if inputs.new_lengths is not None:
        lost |= inputs.new_lengths < 0
    if inputs.starts is not None:  # whether a row is one of a sequence that is lost
        row = jnp.arange(problem.tokens, dtype=jnp.int32)[:, None]
        lost = ((inputs.starts[:-1] <= row) & (row < inputs.starts[1:]) & lost).any(axis=1)
    lost_rows = lost[:, None, None] if inputs.starts is None else lost[:, None]
    out = jnp.zeros((*problem.out_shape, problem.v_head_dim))
    out = jnp.where(lost_rows[..., None], jnp.nan, out)
    lse = jnp.full(problem.lse_shape, -jnp.inf)
    lse = jnp.where(lost_rows if inputs.starts is None else lost, jnp.nan, lse)
    return out.astype(problem.dtype), lse.astype(jnp.float32)


def out_types(plan: Plan) -> tuple[Any, ...]:
    """Of a kernel: out, lse, and the partials (`Results.partial_out`, and so on)."""
    problem, of = plan.problem, jax.ShapeDtypeStruct
    partials = (plan.partials, plan.chunk_rows)
    return (
        of((*problem.out_shape, problem.v_head_dim), problem.dtype),
        of(problem.lse_shape, jnp.float32),
        (
            of((*partials, problem.v_head_dim), jnp.float32),
            of(partials, jnp.float32),
            of(partials, jnp.float32),
        ),
    )


class ResultRefs(NamedTuple):
    """What `write_result` and `write_partial` read and write."""

    warps: WarpPartials
    results: Results
    last: Ref  # int32[1] in shared memory


def write_result(ctx: ThreadContext) -> None:
    """The block had all keys: the warps' partials -> the result. `ctx.refs`: `ResultRefs`."""
    ctx.thread.sync()

    def write(place: _Place) -> None:
        _write(ctx, ctx.refs.results, place, _of_warps(ctx, place))

    _each_place(ctx, write)


def write_partial(ctx: ThreadContext) -> None:
    """The block had some of the keys: the warps' partials -> one in global memory. `refs.last`
    becomes 1 where it is the last block of its row. `ctx.refs`: `ResultRefs`.
    """
    thread, (_, results, last), at, plan = ctx
    thread.sync()

    def write(place: _Place) -> None:
        partial = _of_warps(ctx, place)
        line = at.own * plan.chunk_rows + place.row
        words = plan.problem.v_head_dim // 4
        index = thread.wide(line) * words + thread.wide(place.column)
        thread.store_floats(results.partial_out, index, partial.out, place.exists)
        first = place.exists & (place.column < 1)
        thread.store_floats(results.partial_max, line, [partial.row_max], first)
        thread.store_floats(results.partial_sum, line, [partial.row_sum], first)

    _each_place(ctx, write)
    arrive(ctx._replace(refs=CounterRefs(results.counters, last)))


class CounterRefs(NamedTuple):
    counters: Ref
    last: Ref  # int32[1] in shared memory


def arrive(ctx: ThreadContext) -> None:
    """Counts the block's partial in: `last[0]` becomes 1 where all others are there. `ctx.refs`:
    `CounterRefs`.
    """
    thread, refs, at, plan = ctx
    counter = at.sequence * plan.heads + at.head
    if at.rows is not None:
        head, chunk = _head_and_chunk(at, plan)
        line = at.sequence
        if plan.chunks > 1:  # chunks of one sequence are followed by those of the next
            line = line + at.row * plan.group // plan.chunk_rows + chunk
        counter = head * plan.lines + line
    counter = counter + ZERO_BYTES // 4
    thread.arrive(refs.counters, counter, at.count, refs.last)


class _Batch(NamedTuple):
    """Up to 32 partials, one a lane, of the rows that a warp combines at once."""

    thread: threads.Thread
    partial_out: Ref
    places: list[_Place]
    lines: list[Any]  # where this lane's partial of each row lies
    left: Any  # how many partials there are
    words: int  # of a row: 4 columns each

    @property
    def loads(self) -> int:
        """Of each row, that are under way together."""
        return LOADS_AT_ONCE // len(self.places)

    def load(self, first: Any) -> list:
        """So many partials of each row, from number `first` on."""
        thread, found = self.thread, []
        for place, line in zip(self.places, self.lines, strict=True):
            at = [thread.wide(thread.of_lane(line, first + i)) for i in range(self.loads)]
            at = [n * self.words + thread.wide(place.column) for n in at]
            found.append([thread.load_floats(self.partial_out, n, 4) for n in at])
        return found

    def added(self, outs: list, weights: list, first: Any, loaded: list) -> list:
        """outs and, weighed, what `load` gave for `first`."""
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

    A warp has a row, or `ROWS_AT_ONCE` if it has no more. Each lane loads the row max and the row
    sum of one partial; then the warp adds up the outputs, lanes side by side.
    """
    thread, refs, at, plan = ctx
    trips = (at.count + (LANES - 1)) // LANES
    words = plan.problem.v_head_dim // 4
    lane = thread.index % LANES
    zero, nothing = thread.number(0.0), thread.number(float("-inf"))

    def one_trip(trip: Any, carry: list, places: list[_Place]) -> list:
        p = trip * LANES + lane
        exists = p < at.count
        index = thread.choose(p < 1, at.first, at.later + p * plan.partials_a_block)
        start = thread.choose(exists, index, at.first) * plan.chunk_rows
        left = thread.minimum(at.count - trip * LANES, LANES)
        lines = [start + place.row for place in places]
        sums = [
            [thread.load_floats(ref, line, 1)[0] for ref in (refs.partial_max, refs.partial_sum)]
            for line in lines
        ]
        batch = _Batch(thread, refs.partial_out, places, lines, left, words)
        first = batch.load(lane * 0)  # under way before the weights are known
        states, weights, outs = [], [], []
        for partial, (own_max, own_sum) in zip(_partials(carry), sums, strict=True):
            own_max = thread.choose(exists, own_max, nothing)
            own_sum = thread.choose(exists, own_sum, zero)
            row_max = thread.highest(partial.row_max, thread.warp_highest(own_max))
            base = thread.choose(thread.nothing_yet(row_max), zero, row_max)
            rescale, weight = thread.exp2(partial.row_max - base), thread.exp2(own_max - base)
            row_sum = partial.row_sum * rescale + thread.warp_sum(weight * own_sum)
            states.append([row_max, row_sum])
            weights.append(weight)
            outs.append([x * rescale for x in partial.out])
        outs = batch.added(outs, weights, lane * 0, first)

        def more(number: Any, flat: list) -> list:
            start = (number + 1) * batch.loads
            outs = [list(four) for four in itertools.batched(flat, 4)]
            return sum(batch.added(outs, weights, start, batch.load(start)), [])

        batches = (left + (batch.loads - 1)) // batch.loads - 1
        flat = thread.loop(batches, sum(outs, []), more)
        both = zip(states, itertools.batched(flat, 4), strict=True)
        return sum(([*state, *four] for state, four in both), [])

    def rows(places: list[_Place]) -> None:
        carry = [nothing, zero, *[zero] * 4] * len(places)
        carry = thread.loop(trips, carry, functools.partial(one_trip, places=places))
        for place, partial in zip(places, _partials(carry), strict=True):
            _write(ctx, refs, place, partial)

    _each_places(ctx, rows)


def _partials(flat: list) -> list[_Partial]:
    return [_Partial(top, total, out) for top, total, *out in itertools.batched(flat, 6)]


def _each_place(ctx: ThreadContext, body: Callable[[_Place], None]) -> None:
    """`body(place)` for all that this thread has: rows go to warps and columns to lanes."""
    _each_places(ctx, lambda places: body(*places), 1)


def _each_places(
    ctx: ThreadContext, body: Callable[[list[_Place]], None], most: int = ROWS_AT_ONCE
) -> None:
    """`_each_place` with a list: of all places, if they are no more than `most`, else of one."""
    thread, _, at, plan = ctx
    words = plan.problem.v_head_dim // 4
    across = -(-words // LANES)
    count = -(-plan.most_rows // threads.WARPS) * across

    def place(number: Any) -> _Place:
        row = number // across * threads.WARPS + thread.index // LANES
        column = thread.index % LANES
        if across > 1:
            column = column + number % across * LANES
        exists = (row < plan.most_rows) & (column < words)
        if at.rows is not None:
            query = _head_and_chunk(at, plan)[1] * plan.chunk_rows + row
            query = row % plan.rows if plan.heads_at_once > 1 else query
            exists = exists & (query < at.rows * plan.group)
        elif plan.chunks > 1:
            exists = exists & (at.head % plan.chunks * plan.chunk_rows + row < plan.rows)
        row = thread.minimum(row, plan.most_rows - 1)
        return _Place(row, thread.minimum(column, words - 1), exists)

    def one(number: Any, carry: list) -> list:
        body([place(number)])
        return carry

    if count <= most:
        body([place(thread.index * 0 + number) for number in range(count)])
    else:
        thread.loop(count, [], one)


def _head_and_chunk(at: Head, plan: Plan) -> tuple[Any, Any]:
    """`scheduler.head_and_chunk`, of one thread."""
    chunks = plan.chunks_of(at.rows, lambda x, y: x // y)
    return at.head // chunks, at.head % chunks


def _of_warps(ctx: ThreadContext, place: _Place) -> _Partial:
    thread, (warps, _, _), at, plan = ctx
    pitch = (plan.problem.v_head_dim + mma_rowmajor.ROW_PADDING) // 4
    partials = []
    for group in range(plan.split.groups):
        line = place.row  # of the warp that has it: a warp's row block, then its group of keys
        if plan.row_blocks > 1:
            line = line // mma_rowmajor.ROWS * plan.warp_rows + line % mma_rowmajor.ROWS
        line = line + group * plan.split.row_blocks * plan.warp_rows
        (row_max,) = thread.shared_floats(warps.row_max, line, 1)
        (row_sum,) = thread.shared_floats(warps.row_sum, line, 1)
        out = thread.shared_floats(warps.out, line * pitch + place.column, 4)
        partials.append(_Partial(row_max, row_sum, out))
    partial = _combined(thread, partials)
    lost = thread.choose(at.lost >= 1, thread.number(float("nan")), thread.number(0.0))
    return partial._replace(row_sum=partial.row_sum + lost)


def _combined(thread: threads.Thread, partials: list[_Partial]) -> _Partial:
    row_max = functools.reduce(thread.highest, [partial.row_max for partial in partials])
    base = thread.choose(thread.nothing_yet(row_max), thread.number(0.0), row_max)
    weights = [thread.exp2(partial.row_max - base) for partial in partials]
    pairs = list(zip(weights, partials, strict=True))
    row_sum = functools.reduce(lambda a, b: a + b, [w * x.row_sum for w, x in pairs])
    out = [functools.reduce(lambda a, b: a + b, [w * x.out[i] for w, x in pairs]) for i in range(4)]
    return _Partial(row_max, row_sum, out)


def _write(ctx: ThreadContext, results: Results, place: _Place, partial: _Partial) -> None:
    """Columns of a row whose keys have all been taken -> out and lse."""
    thread, _, at, plan = ctx
    problem, row = plan.problem, place.row
    kv_head, chunk = _head_and_chunk(at, plan)
    n = chunk * plan.chunk_rows + row
    if plan.heads_at_once > 1:
        n, kv_head = row % plan.rows, kv_head * plan.heads_at_once + row // plan.rows
    token, head = n // plan.group, kv_head * plan.group + n % plan.group
    head = thread.minimum(head, problem.q_heads - 1)
    sink = None
    if results.sinks is not None:
        (sink,) = thread.load_floats(results.sinks, head, 1)
    factor, lse = softmax.finish_row(thread, partial.row_max, partial.row_sum, sink)
    wide = thread.wide(at.sequence) * problem.q_len if at.row is None else thread.wide(at.row)
    line = (wide + thread.wide(token)) * problem.q_heads + thread.wide(head)
    words = problem.v_head_dim // 4
    values = [x * factor for x in partial.out]
    index = line * words + thread.wide(place.column)
    if problem.dtype == "float32":
        thread.store_floats(results.out, index, values, place.exists)
    else:
        thread.store_narrow(results.out, index, values, problem.dtype, place.exists)
    if at.row is None:
        line = (thread.wide(at.sequence) * problem.q_heads + thread.wide(head)) * problem.q_len
    else:
        line = thread.wide(head) * problem.tokens + thread.wide(at.row)
    first = place.exists & (place.column < 1)
    thread.store_floats(results.lse, line + thread.wide(token), [lse], first)


def write_unowned(ctx: ThreadContext) -> None:
    """Packed rows that no sequence owns: out 0, lse -inf. `ctx.refs`: `Results`; `at`: `Owned`."""
    thread, refs, at, plan = ctx
    problem = plan.problem
    zero, nothing = thread.number(0.0), thread.number(float("-inf"))
    words = problem.q_heads * problem.v_head_dim // 4
    count = at.first - at.end + problem.tokens

    def one(i: Any, carry: list) -> list:
        number = i * at.blocks + at.block
        row = thread.select(number < at.first, number, number - at.first + at.end)
        for start in range(0, words, mosaic.THREADS):
            word = thread.index + start
            index, inside = thread.wide(row) * words + thread.wide(word), word < words
            if problem.dtype == "float32":
                thread.store_floats(refs.out, index, [zero] * 4, inside)
            else:
                thread.store_narrow(refs.out, index, [zero] * 4, problem.dtype, inside)
        for start in range(0, problem.q_heads, mosaic.THREADS):
            head = thread.index + start
            index = thread.wide(head) * problem.tokens + thread.wide(row)
            thread.store_floats(refs.lse, index, [nothing], head < problem.q_heads)
        return carry

    rows = (count - at.block + at.blocks - 1) // at.blocks
    thread.loop(rows, [], one)
