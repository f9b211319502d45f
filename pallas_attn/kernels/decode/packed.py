"""Decode of packed rows: sequences have different numbers of query rows, [starts[m], starts[m + 1])
of all, which are known when the kernel runs.

A launch serves sequences of `problem.fewest` to `problem.q_len` rows. Their q chunks are counted by
the running sum that counts kv tiles, and a sequence without rows has no unit.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.threads import Thread
from pallas_attn.kernels.lang.types import GmemRef, Index, SmemRef

# ---- the table of sequences (`scheduler.Table`) --------------------------------------------------


class PackedTable(NamedTuple):
    """int32 numbers of each sequence, beside those of `scheduler.Table`."""

    counts: SmemRef  # query rows of the sequence that this launch serves
    first: SmemRef  # the first of them; behind the last sequence, the end of all rows
    following: SmemRef  # the next sequence that has a unit


def load_ends(thread: Thread, starts: GmemRef, m: Index) -> list[Index]:
    """The first row of sequence m, and the one behind its last."""
    return [thread.load(starts, m + n, 4) for n in (0, 1)]


def served(ctx: ThreadContext, ends: list[Index]) -> Index:
    """The query rows of a sequence; 0 where another launch serves it."""
    count, problem = ends[1] - ends[0], ctx.plan.problem
    return ctx.thread.select((count >= problem.fewest) & (count <= problem.q_len), count, 0)


def store(
    ctx: ThreadContext, table: PackedTable, m: Index, count: Index, ends: list[Index]
) -> None:
    """Writes the numbers of sequence m."""
    thread, writes = ctx.thread, ctx.thread.index < 32
    thread.shared_store(table.counts, m, count, writes)
    first = thread.select(m < ctx.plan.problem.sequences, *ends)
    thread.shared_store(table.first, m, first, writes)


def finish(
    ctx: ThreadContext,
    table: PackedTable,
    places: list[Index],
    have_units: list[Index],
    ends: list[Index],
) -> None:
    """Writes the end of all rows, and for each sequence the next that has a unit. `ends`: rows of
    the last of this lane's `places`.
    """
    thread, writes = ctx.thread, ctx.thread.index < 32
    # The end of all rows where every lane has sequences in all its places; else it lies there.
    last_lane = thread.index % 32 >= 31
    thread.shared_store(table.first, places[-1] + 1, ends[1], last_lane & writes)
    for m, following in zip(places, _following(ctx, places, have_units), strict=True):
        thread.shared_store(table.following, m, following, writes)


def _following(ctx: ThreadContext, places: list[Index], have_units: list[Index]) -> list[Index]:
    """For each sequence of a lane the next that has a unit, or the last of all."""
    thread, last = ctx.thread, ctx.plan.problem.sequences - 1
    lane, first = thread.index % 32, thread.index * 0 + last
    for m, some in reversed(list(zip(places, have_units, strict=True))):
        first = thread.select(some, m, first)
    for distance in (1, 2, 4, 8, 16):  # now the first of this lane and of those behind it
        other = thread.of_lane(first, thread.minimum(lane + distance, 31))
        first = thread.minimum(first, other)
    behind = thread.of_lane(first, thread.minimum(lane + 1, 31))
    after = thread.select(lane <= 30, behind, last)
    following = []
    for m, some in reversed(list(zip(places, have_units, strict=True))):
        following.append(after)
        after = thread.select(some, m, after)
    return following[::-1]


# ---- rows that no sequence owns ------------------------------------------------------------------


class Unowned(NamedTuple):
    """The rows before `first` and from `end` on, and the number of this block among all."""

    first: Index
    end: Index
    block: Index
    blocks: Index


def begin(plan: Any, table: PackedTable, results: Any, block_id: Index) -> None:
    """The first of a call's launches writes these rows. `results`: `combine_splits.Results`."""
    if plan.problem.fewest == 1:
        ends = table.first[0], table.first[plan.problem.sequences]
        at = Unowned(*ends, block_id, jnp.int32(plan.grid))
        threads.run(write_unowned, plan, results, at)


def write_unowned(ctx: ThreadContext) -> None:
    """Writes out 0, lse -inf. `ctx.refs`: `combine_splits.Results`; `ctx.at`: `Unowned`."""
    thread, refs, at, plan = ctx
    problem = plan.problem
    zero, nothing = thread.number(0.0), thread.number(float("-inf"))
    words = problem.q_heads * problem.v_head_dim // 4
    count = at.first - at.end + problem.tokens

    def write_row(i: Index, carry: list) -> list:
        number = i * at.blocks + at.block
        row = thread.select(number < at.first, number, number - at.first + at.end)
        for start in range(0, words, mosaic.THREADS):
            word = thread.index + start
            index, inside = thread.to_int64(row) * words + thread.to_int64(word), word < words
            if problem.dtype == "float32":
                thread.store_floats(refs.out, index, [zero] * 4, inside)
            else:
                thread.store_narrow(refs.out, index, [zero] * 4, problem.dtype, inside)
        for start in range(0, problem.q_heads, mosaic.THREADS):
            head = thread.index + start
            index = thread.to_int64(head) * problem.tokens + thread.to_int64(row)
            thread.store_floats(refs.lse, index, [nothing], head < problem.q_heads)
        return carry

    rows = (count - at.block + at.blocks - 1) // at.blocks
    thread.loop(rows, [], write_row)
