"""How the parts of a decoded row become one: of the warps of a block, and of blocks.

A part of a row is an output that is not yet divided, the largest logit (`top`, in log2 units) that
it is relative to, and the sum of its weights (`total`). The warps of a block leave theirs in shared
memory. A block that had all keys of its row writes the result; one that had some of them writes its
part to global memory and arrives at the row's counter, and who arrives last merges the parts, in
their order: the bits do not depend on who that is.

These are programs for one thread (`warps.each_thread`), which takes 4 neighbouring columns of a row
at a time.
"""

import functools
from typing import Any, NamedTuple

from pallas_attn.kernels import softmax, warps
from pallas_attn.kernels.decode_plan import Plan

Ref = Any

AHEAD = 8  # parts that a thread asks for at once


class Spilled(NamedTuple):
    """What the warps leave: in shared memory."""

    out: Ref  # float32[64, Hv + padding]
    top: Ref  # float32[64]
    total: Ref


class Results(NamedTuple):
    """In global memory."""

    out: Ref  # [M, t, N, Hv]
    lse: Ref  # float32[M, N, t]
    parts: Ref  # float32[slots, chunk_rows, Hv]
    tops: Ref  # float32[slots, chunk_rows]
    totals: Ref
    counters: Ref  # int32[M * heads], 0 before a launch and after it
    sinks: Ref | None


class Where(NamedTuple):
    """Whose rows these are, as int32 scalars."""

    m: Any
    head: Any
    lost: Any  # 1: the result is NaN
    count: Any  # of the parts of this head
    mine: Any  # this block's slot
    first: Any  # the slots of the others: `decode_plan.Parts`
    later: Any


class _Part(NamedTuple):
    top: Any
    total: Any
    out: list[Any]


def whole(thread: warps.Thread, refs: tuple[Spilled, Results], at: Where, *, plan: Plan) -> None:
    """The block had all keys: warps' parts -> the result."""
    spilled, results = refs
    thread.sync()

    def group(g: Any) -> None:
        place = _place(thread, g, at, plan)
        _write(thread, results, place, _of_warps(thread, spilled, place, at, plan), at, plan)

    _each_group(thread, group, plan)


def publish(
    thread: warps.Thread, refs: tuple[Spilled, Results, Ref], at: Where, *, plan: Plan
) -> None:
    """The block had some of the keys: warps' parts -> a part in global memory; is it the last?"""
    spilled, results, last = refs
    thread.sync()

    def group(g: Any) -> None:
        place = row, column, there = _place(thread, g, at, plan)
        part = _of_warps(thread, spilled, place, at, plan)
        line = thread.wide(at.mine) * plan.chunk_rows + thread.wide(row)
        words = plan.problem.v_head_dim // 4
        thread.store_floats(results.parts, line * words + thread.wide(column), part.out, there)
        first = there & (column < 1)
        thread.store_floats(results.tops, line, [part.top], first)
        thread.store_floats(results.totals, line, [part.total], first)

    _each_group(thread, group, plan)
    thread.arrive(results.counters, at.m * plan.heads + at.head, at.count, last)


def merge(thread: warps.Thread, refs: Results, at: Where, *, plan: Plan) -> None:
    """The last block: everybody's parts -> the result."""
    trips = (at.count + (AHEAD - 1)) // AHEAD

    def group(g: Any) -> None:
        row, column, there = _place(thread, g, at, plan)

        def some(trip: Any, carry: list) -> list:
            part = _Part(carry[0], carry[1], carry[2:])
            parts = [trip * AHEAD + i for i in range(AHEAD)]
            read = [_read(thread, refs, p, (row, column), at, plan) for p in parts]
            merged = _merged(thread, [part, *read])
            return [merged.top, merged.total, *merged.out]

        zero = thread.number(0.0)
        start = [thread.number(float("-inf")), zero, *[zero] * 4]
        top, total, *out = thread.loop(trips, start, some)
        _write(thread, refs, (row, column, there), _Part(top, total, out), at, plan)

    _each_group(thread, group, plan)


def _each_group(thread: warps.Thread, body: Any, plan: Plan) -> None:
    """`body(g)` for every group of 4 columns that this thread has: its g-th."""
    groups = -(-plan_rows(plan) * (plan.problem.v_head_dim // 4) // 128)
    if groups <= 4:
        for g in range(groups):
            body(g)
        return

    def one(g: Any, carry: list) -> list:
        body(g)
        return carry

    thread.loop(groups, [], one)


def plan_rows(plan: Plan) -> int:
    """Rows that a chunk may have."""
    return min(plan.rows, plan.chunk_rows)


def _place(thread: warps.Thread, g: Any, at: Where, plan: Plan) -> tuple[Any, Any, Any]:
    """(row of the chunk, group of columns, whether it exists) of this thread's g-th group."""
    words = plan.problem.v_head_dim // 4
    index = thread.index + g * 128
    row, column = index // words, index % words
    rows = plan_rows(plan)
    there = row < rows
    if plan.chunks > 1:
        chunk = at.head % plan.chunks
        there = there & (chunk * plan.chunk_rows + row < plan.rows)
    return thread.minimum(row, rows - 1), column, there


def _of_warps(thread: warps.Thread, spilled: Spilled, place: tuple, at: Where, plan: Plan) -> _Part:
    row, column, _ = place
    pitch = (plan.problem.v_head_dim + SPARE) // 4
    parts = []
    for group in range(plan.split.groups):
        line = row + group * plan.chunk_rows
        (top,) = thread.shared_floats(spilled.top, line, 1)
        (total,) = thread.shared_floats(spilled.total, line, 1)
        parts.append(_Part(top, total, thread.shared_floats(spilled.out, line * pitch + column, 4)))
    part = _merged(thread, parts)
    lost = thread.choose(at.lost >= 1, thread.number(float("nan")), thread.number(0.0))
    return part._replace(total=part.total + lost)


SPARE = 8  # floats behind a spilled row: without, 8 rows would meet in the same banks


def _merged(thread: warps.Thread, parts: list[_Part]) -> _Part:
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


def _read(
    thread: warps.Thread, refs: Results, p: Any, place: tuple, at: Where, plan: Plan
) -> _Part:
    """Part p, or one that weighs nothing where there is no such part."""
    row, column = place
    exists = p < at.count
    slot = thread.choose(p < 1, at.first, at.later + p * plan.slots_a_block)
    line = thread.wide(thread.choose(exists, slot, at.first)) * plan.chunk_rows + thread.wide(row)
    (top,) = thread.load_floats(refs.tops, line, 1)
    (total,) = thread.load_floats(refs.totals, line, 1)
    words = plan.problem.v_head_dim // 4
    out = thread.load_floats(refs.parts, line * words + thread.wide(column), 4)
    zero = thread.number(0.0)
    drop = lambda x: thread.choose(exists, x, zero)  # noqa: E731
    nothing = thread.number(float("-inf"))
    return _Part(thread.choose(exists, top, nothing), drop(total), [drop(x) for x in out])


def _write(
    thread: warps.Thread, results: Results, place: tuple, part: _Part, at: Where, plan: Plan
) -> None:
    """A whole row's group of columns -> out and lse: `softmax.finish`, thread by thread."""
    problem = plan.problem
    row, column, there = place
    n = at.head % plan.chunks * plan.chunk_rows + row
    kv_head = at.head // plan.chunks
    token, head = n // plan.group, kv_head * plan.group + n % plan.group
    head = thread.minimum(head, problem.q_heads - 1)
    one, zero = thread.number(1.0), thread.number(0.0)
    empty = thread.nothing_yet(part.top) & thread.is_zero(part.total)
    base = thread.choose(empty, zero, part.top)
    higher, total = base, part.total
    if results.sinks is not None:
        (sink,) = thread.load_floats(results.sinks, head, 1)
        sink = sink * softmax.LOG2_E
        higher = thread.highest(base, sink)
        total = total * thread.exp2(base - higher) + thread.exp2(sink - higher)
    total = thread.choose(empty, one, total)
    factor = thread.choose(empty, zero, thread.exp2(base - higher) / total)
    lse = (higher + thread.log2(total)) * (1 / softmax.LOG2_E)
    lse = thread.choose(empty, thread.number(float("-inf")), lse)
    wide = thread.wide(at.m) * problem.q_len
    line = (wide + thread.wide(token)) * problem.q_heads + thread.wide(head)
    words = problem.v_head_dim // 4
    values = [x * factor for x in part.out]
    index = line * words + thread.wide(column)
    thread.store_narrow(results.out, index, values, problem.dtype, there)
    line = (thread.wide(at.m) * problem.q_heads + thread.wide(head)) * problem.q_len
    thread.store_floats(results.lse, line + thread.wide(token), [lse], there & (column < 1))
