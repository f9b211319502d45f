"""How the parts of a decoded row become one: of the warps of a block, and of blocks.

A part of a row is an output that is not yet divided, the largest logit (`top`, in log2 units) that
it is relative to, and the sum of its weights (`total`). The warps of a block leave theirs in shared
memory. A block that had all keys of its row writes the result; one that had some of them writes its
part to global memory and arrives at the row's counter, and who arrives last merges the parts, in
their order: the bits do not depend on who that is.

These are programs for one thread (`threads.each_thread`), which takes 4 neighbouring columns of a
row at a time. They are loops, not straight code: what is run once is fetched once, from far away.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_attn._problem import DecodeInputs, DecodeProblem
from pallas_attn.kernels.attention import softmax
from pallas_attn.kernels.decode.scheduler import BLANK, Plan
from pallas_attn.kernels.lang import threads
from pallas_attn.kernels.mma import mma_rowmajor

Ref = Any

LANES = 32
AHEAD = 16  # parts that a warp asks for at once: each batch is a trip to memory
ABREAST = 2  # rows (or halves of wider ones) that a warp merges in the same trips


class Spilled(NamedTuple):
    """What the warps leave: in shared memory."""

    out: Ref  # float32[4 * plan.spilled_rows, Hv + padding]
    top: Ref  # float32[4 * plan.spilled_rows]
    total: Ref


class Results(NamedTuple):
    """In global memory."""

    out: Ref  # [M, t, N, Hv]
    lse: Ref  # float32[M, N, t]
    parts: Ref  # float32[slots, chunk_rows, Hv]
    tops: Ref  # float32[slots, chunk_rows]
    totals: Ref
    counters: Ref  # int32[M * heads] behind `BLANK` bytes, 0 before a launch and after it
    sinks: Ref | None


class Where(NamedTuple):
    """Whose rows these are, as int32 scalars."""

    m: Any
    head: Any
    lost: Any  # 1: the result is NaN
    count: Any  # of the parts of this head
    mine: Any  # this block's slot
    first: Any  # the slots of the others: `scheduler.Parts`
    later: Any


class _Part(NamedTuple):
    top: Any
    total: Any
    out: list[Any]


_calls = itertools.count(1)


def counters(plan: Plan) -> np.ndarray:
    """A zero for every head of every sequence, where its parts are counted in, behind `BLANK` bytes
    of zeros that are only read (`producer.fetch`).

    Each launch leaves them as it found them, so they are a constant: XLA has nothing to clear,
    which would be a launch of its own. The number behind them is that of this call:
    two calls in a program would otherwise share one constant, and must not if XLA ever ran them
    side by side. (Calls of one jitted function inside another still do: docs/architecture.) It
    also keeps XLA from making the zeros itself.
    """
    zeros = BLANK // 4 + plan.problem.sequences * plan.heads
    return np.append(np.zeros(zeros, np.int32), np.int32(next(_calls) % 2**31 or 1))


def of_no_rows(inputs: DecodeInputs, problem: DecodeProblem) -> tuple[Any, Any]:
    """out and lse over a cache without rows: NaN for a sequence that should have some."""
    rows = (problem.sequences, problem.q_len, problem.q_heads)
    lost = (inputs.lengths > 0)[:, None, None]
    out = jnp.where(lost[..., None], jnp.nan, jnp.zeros((*rows, problem.v_head_dim)))
    lse = jnp.where(lost, jnp.nan, jnp.full((rows[0], rows[2], rows[1]), -jnp.inf))
    return out.astype(problem.dtype), lse.astype(jnp.float32)


def whole(thread: threads.Thread, refs: tuple[Spilled, Results], at: Where, *, plan: Plan) -> None:
    """The block had all keys: warps' parts -> the result."""
    spilled, results = refs
    thread.sync()

    def place(place: tuple) -> None:
        _write(thread, results, place, _of_warps(thread, spilled, place, at, plan), at, plan)

    _each_place(thread, place, at, plan)


def publish(
    thread: threads.Thread, refs: tuple[Spilled, Results, Ref], at: Where, *, plan: Plan
) -> None:
    """The block had some of the keys: warps' parts -> a part in global memory; is it the last?"""
    spilled, results, last = refs
    thread.sync()

    def place(place: tuple) -> None:
        row, column, there = place
        part = _of_warps(thread, spilled, place, at, plan)
        line = at.mine * plan.chunk_rows + row
        words = plan.problem.v_head_dim // 4
        index = thread.wide(line) * words + thread.wide(column)
        thread.store_floats(results.parts, index, part.out, there)
        first = there & (column < 1)
        thread.store_floats(results.tops, line, [part.top], first)
        thread.store_floats(results.totals, line, [part.total], first)

    _each_place(thread, place, at, plan)
    arrive(thread, (results.counters, last), at, plan=plan)


def arrive(thread: threads.Thread, refs: tuple[Ref, Ref], at: Where, *, plan: Plan) -> None:
    """Counts the block's part in: `last[0]` becomes 1 where all others are there."""
    counters, last = refs
    counter = at.m * plan.heads + at.head + BLANK // 4
    thread.arrive(counters, counter, at.count, last)


class _Trip(NamedTuple):
    """Up to 32 parts of the rows that a warp merges abreast, one a lane."""

    thread: threads.Thread
    parts: Ref
    places: list[tuple]
    lines: list[Any]  # where this lane's part of each row lies
    left: Any  # how many parts there are
    words: int  # of a row: 4 columns each

    @property
    def ahead(self) -> int:
        return AHEAD // len(self.places)

    def read(self, batch: Any) -> list:
        """Asks for so many parts of each row from number `batch` on."""
        thread, found = self.thread, []
        for (_, column, _), line in zip(self.places, self.lines, strict=True):
            at = [thread.wide(thread.of_lane(line, batch + i)) for i in range(self.ahead)]
            at = [n * self.words + thread.wide(column) for n in at]
            found.append([thread.load_floats(self.parts, n, 4) for n in at])
        return found

    def added(self, outs: list, weights: list, batch: Any, numbers: list) -> list:
        """outs and, weighed, what `read` gave for `batch`."""
        thread, zero, result = self.thread, self.thread.number(0.0), []
        for out, weight, mine in zip(outs, weights, numbers, strict=True):
            for i, four in enumerate(mine):
                w = thread.of_lane(weight, batch + i)
                there = batch + i < self.left  # else it is the first part: no 0 * inf of it
                four = [thread.choose(there, y, zero) for y in four]
                out = [x + w * y for x, y in zip(out, four, strict=True)]
            result.append(out)
        return result


def merge(thread: threads.Thread, refs: Results, at: Where, *, plan: Plan) -> None:
    """The last block: everybody's parts -> the result.

    A warp has a row, or `ABREAST` if it has no more. Each lane looks up one part's top and total;
    then the warp adds up the parts, lanes side by side, `AHEAD` reads on their way.
    """
    trips = (at.count + (LANES - 1)) // LANES
    words = plan.problem.v_head_dim // 4
    lane = thread.index % LANES
    zero, nothing = thread.number(0.0), thread.number(float("-inf"))

    def some(trip: Any, carry: list, places: list[tuple]) -> list:
        p = trip * LANES + lane
        exists = p < at.count
        slot = thread.choose(p < 1, at.first, at.later + p * plan.slots_a_block)
        slot = thread.choose(exists, slot, at.first) * plan.chunk_rows
        left = thread.minimum(at.count - trip * LANES, LANES)
        lines = [slot + row for row, *_ in places]
        sums = [
            [thread.load_floats(ref, line, 1)[0] for ref in (refs.tops, refs.totals)]
            for line in lines
        ]
        here = _Trip(thread, refs.parts, places, lines, left, words)
        first = here.read(lane * 0)  # on its way before anybody knows its weight
        tops, weights, outs = [], [], []
        for part, (own, owned) in zip(_parts(carry), sums, strict=True):
            own = thread.choose(exists, own, nothing)
            owned = thread.choose(exists, owned, zero)
            higher = thread.highest(part.top, thread.warp_highest(own))
            base = thread.choose(thread.nothing_yet(higher), zero, higher)
            shrink, weight = thread.exp2(part.top - base), thread.exp2(own - base)
            tops.append([higher, part.total * shrink + thread.warp_sum(weight * owned)])
            weights.append(weight)
            outs.append([x * shrink for x in part.out])
        outs = here.added(outs, weights, lane * 0, first)

        def later(batch: Any, flat: list) -> list:
            batch = (batch + 1) * here.ahead
            outs = [list(four) for four in itertools.batched(flat, 4)]
            return sum(here.added(outs, weights, batch, here.read(batch)), [])

        batches = (left + (here.ahead - 1)) // here.ahead - 1
        flat = thread.loop(batches, sum(outs, []), later)
        both = zip(tops, itertools.batched(flat, 4), strict=True)
        return sum(([*pair, *four] for pair, four in both), [])

    def abreast(places: list[tuple]) -> None:
        carry = [nothing, zero, *[zero] * 4] * len(places)
        carry = thread.loop(trips, carry, functools.partial(some, places=places))
        for place, part in zip(places, _parts(carry), strict=True):
            _write(thread, refs, place, part, at, plan)

    _each_places(thread, abreast, at, plan)


def _parts(flat: list) -> list[_Part]:
    return [_Part(top, total, out) for top, total, *out in itertools.batched(flat, 6)]


def _each_place(thread: threads.Thread, body: Any, at: Where, plan: Plan) -> None:
    """`body((row of the chunk, group of 4 columns, whether it exists))`, for all that this thread
    has: rows go to warps and columns to lanes.
    """
    _each_places(thread, lambda places: body(*places), at, plan, 1)


def _each_places(
    thread: threads.Thread, body: Any, at: Where, plan: Plan, most: int = ABREAST
) -> None:
    """`_each_place` with a list: of all places, if they are no more than `most`, else of one."""
    words = plan.problem.v_head_dim // 4
    across = -(-words // LANES)
    turns = -(-plan.most_rows // threads.WARPS) * across

    def place(turn: Any) -> tuple:
        row = turn // across * threads.WARPS + thread.index // LANES
        column = thread.index % LANES
        if across > 1:
            column = column + turn % across * LANES
        there = (row < plan.most_rows) & (column < words)
        if plan.chunks > 1:
            there = there & (at.head % plan.chunks * plan.chunk_rows + row < plan.rows)
        row = thread.minimum(row, plan.most_rows - 1)
        return row, thread.minimum(column, words - 1), there

    def one(turn: Any, carry: list) -> list:
        body([place(turn)])
        return carry

    if turns <= most:
        body([place(thread.index * 0 + turn) for turn in range(turns)])
    else:
        thread.loop(turns, [], one)


def _of_warps(
    thread: threads.Thread, spilled: Spilled, place: tuple, at: Where, plan: Plan
) -> _Part:
    row, column, _ = place
    pitch = (plan.problem.v_head_dim + mma_rowmajor.ROW_PADDING) // 4
    parts = []
    for group in range(plan.split.groups):
        line = row  # of the warp that has it: a warp's row block, then its group of keys
        if plan.row_blocks > 1:
            line = row // mma_rowmajor.ROWS * plan.spilled_rows + row % mma_rowmajor.ROWS
        line = line + group * plan.split.row_blocks * plan.spilled_rows
        (top,) = thread.shared_floats(spilled.top, line, 1)
        (total,) = thread.shared_floats(spilled.total, line, 1)
        parts.append(_Part(top, total, thread.shared_floats(spilled.out, line * pitch + column, 4)))
    part = _merged(thread, parts)
    lost = thread.choose(at.lost >= 1, thread.number(float("nan")), thread.number(0.0))
    return part._replace(total=part.total + lost)


def _merged(thread: threads.Thread, parts: list[_Part]) -> _Part:
    top = functools.reduce(thread.highest, [part.top for part in parts])
    base = thread.choose(thread.nothing_yet(top), thread.number(0.0), top)
    weights = [thread.exp2(part.top - base) for part in parts]
    pairs = list(zip(weights, parts, strict=True))
    total = functools.reduce(lambda a, b: a + b, [w * part.total for w, part in pairs])
    out = [
        functools.reduce(lambda a, b: a + b, [w * part.out[i] for w, part in pairs])
        for i in range(4)
    ]
    return _Part(top, total, out)


def _write(
    thread: threads.Thread, results: Results, place: tuple, part: _Part, at: Where, plan: Plan
) -> None:
    """A whole row's group of columns -> out and lse."""
    problem = plan.problem
    row, column, there = place
    n = at.head % plan.chunks * plan.chunk_rows + row
    kv_head = at.head // plan.chunks
    if plan.abreast > 1:
        n, kv_head = row % plan.rows, kv_head * plan.abreast + row // plan.rows
    token, head = n // plan.group, kv_head * plan.group + n % plan.group
    head = thread.minimum(head, problem.q_heads - 1)
    sink = None
    if results.sinks is not None:
        (sink,) = thread.load_floats(results.sinks, head, 1)
    factor, lse = softmax.finish_row(thread, part.top, part.total, sink)
    wide = thread.wide(at.m) * problem.q_len
    line = (wide + thread.wide(token)) * problem.q_heads + thread.wide(head)
    words = problem.v_head_dim // 4
    values = [x * factor for x in part.out]
    index = line * words + thread.wide(column)
    if problem.dtype == "float32":
        thread.store_floats(results.out, index, values, there)
    else:
        thread.store_narrow(results.out, index, values, problem.dtype, there)
    line = (thread.wide(at.m) * problem.q_heads + thread.wide(head)) * problem.q_len
    thread.store_floats(results.lse, line + thread.wide(token), [lse], there & (column < 1))
