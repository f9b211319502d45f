"""Rows of K normed and rotated on their way into a cache, in float32: see `pallas_attn.rotary`.

Rows are shared by neighbouring threads, as where they are quantised. The norm takes the sum of a
row's squares, by shuffles. A thread has the columns that its own ones turn with in the same words
where pairs are neighbours; else it reads them too, from L1. Products and sums are each rounded,
none is fused with another.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_attn._call.problem import AppendProblem, Change
from pallas_attn.errors import Limit
from pallas_attn.kernels.append import plan as append_plan
from pallas_attn.kernels.append.plan import Plan
from pallas_attn.kernels.lang.mosaic import Thread, ThreadContext

DTYPES = ("bfloat16", "float16", "float32")  # of rows
HEAD_DIM_MOST = 4096  # a warp holds a row in registers


def limit(problem: AppendProblem) -> Limit | None:
    change = problem.change
    assert change is not None
    if not problem.quantized and problem.cache_dtype not in DTYPES:
        return Limit(
            f"rotary or norm into a {problem.cache_dtype} cache without scales",
            f"use one of {', '.join(DTYPES)}, or a cache with scales",
        )
    if problem.head_dim > HEAD_DIM_MOST:
        return Limit(
            f"head dim {problem.head_dim}: a warp holds a row in registers to change it",
            f"use head dims up to {HEAD_DIM_MOST}, or do it before",
        )
    if change.interleaved and (change.first % 2 or problem.head_dim % 2):
        return Limit(
            f"interleaved pairs from column {change.first} on, of {problem.head_dim}",
            "begin at an even column of an even number",
        )
    if change.positions * change.pairs >= 2**31:
        return Limit("it counts numbers of the tables in 32 bits", "use fewer positions")
    return None


def change_of(plan: Plan) -> Change:
    assert plan.change is not None
    return plan.change


def changed(ctx: ThreadContext, row: Any, begin: Any, columns: Any) -> list[list[Any]]:
    """One thread's words of a row of K. `row`: which of the sequence's rows of a head it is;
    `begin`: its first word; `columns`: which of its words the thread has. Those past the end of a
    row may be anything.
    """
    thread, refs, _, plan = ctx
    change, nbytes = change_of(plan), plan.word_bytes[0]

    def numbers(column):
        word = thread.load(refs.new[0], begin + thread.wide(column), nbytes)
        return thread.numbers(word, nbytes, plan.new_dtype)

    inside = [thread.minimum(column, plan.row_words[0] - 1) for column in columns]
    words = [numbers(n) for n in inside]
    normed = _norm(ctx, columns, words)
    own = [normed(n, word) for n, word in zip(inside, words, strict=True)]
    if not change.pairs:
        return own
    position = _position(ctx, row)
    if change.interleaved:
        turn = functools.partial(_interleaved, ctx, position)
    else:
        turn = functools.partial(_halves, ctx, position, lambda n: normed(n, numbers(n)))
    return [turn(n, word) for n, word in zip(inside, own, strict=True)]


def _norm(ctx: ThreadContext, columns: Any, words: Any) -> Callable[[Any, list[Any]], list[Any]]:
    """A function of a word's column and its numbers."""
    thread, refs, _, plan = ctx
    change = change_of(plan)
    if change.eps is None:
        return lambda column, word: word
    total: Any = None
    for column, word in zip(columns, words, strict=True):
        squares = functools.reduce(thread.plus, [thread.times(x, x) for x in word])
        counts = thread.select(column < plan.row_words[0], thread.bits(squares), 0)
        squares = thread.as_float(counts)
        total = squares if total is None else thread.plus(total, squares)
    total = thread.sum_of_lanes(total, plan.lanes)
    inverse = thread.rsqrt(thread.plus(thread.times(total, 1 / change.dim), change.eps))

    def normed(column: Any, word: list[Any]) -> list[Any]:
        weight = _numbers(thread, refs.norm_weight, column, len(word), change.weight_dtype)
        return [
            thread.times(thread.times(x, inverse), w) for x, w in zip(word, weight, strict=True)
        ]

    return normed


def _numbers(thread: Thread, ref: Any, number: Any, count: int, dtype: str) -> list[Any]:
    """Group `number` of `count` numbers each, a power of two, of an array."""
    size = jnp.dtype(dtype).itemsize
    nbytes = min(16, count * size)
    words = range(count * size // nbytes)
    found = [thread.load(ref, number * len(words) + n, nbytes) for n in words]
    return [x for word in found for x in thread.numbers(word, nbytes, dtype)]


def _position(ctx: ThreadContext, row: Any) -> Any:
    """Of a row of a head; of one that has no place, some position of the tables."""
    thread, refs, at, plan = ctx
    token = row // plan.heads
    position = append_plan.packed_row(ctx, refs.start, token) if plan.packed else token + at.start
    return thread.minimum(thread.maximum(position, 0), change_of(plan).positions - 1)


def _angles(ctx: ThreadContext, position: Any, group: Any, count: int) -> list[list[Any]]:
    """cos and sin of `count` pairs, which are group `group` of the row of the tables."""
    number = position * (change_of(ctx.plan).pairs // count) + group
    tables = ctx.refs.cos, ctx.refs.sin
    return [_numbers(ctx.thread, ref, number, count, "float32") for ref in tables]


def _halves(
    ctx: ThreadContext, position: Any, normed_at: Callable, n: Any, word: list[Any]
) -> list[Any]:
    """Word n of a row, whose pairs are `change.pairs` columns apart. `normed_at(n)`: any word."""
    thread, change, count = ctx.thread, change_of(ctx.plan), len(word)
    first, half = change.first // count, change.pairs // count  # in words
    low = (n >= first) & (n < first + half)
    high = (n >= first + half) & (n < first + 2 * half)
    other = normed_at(thread.select(high, n - half, thread.select(low, n + half, n)))
    group = thread.select(low, n - first, thread.select(high, n - (first + half), n * 0))
    cos, sin = _angles(ctx, position, group, count)
    turned = []
    for x, y, c, s in zip(word, other, cos, sin, strict=True):
        s = thread.as_float(thread.select(low, thread.bits(thread.times(s, -1.0)), thread.bits(s)))
        value = thread.plus(thread.times(x, c), thread.times(y, s))
        bits = thread.select(low | high, thread.bits(value), thread.bits(x))
        turned.append(thread.as_float(bits))
    return turned


def _interleaved(ctx: ThreadContext, position: Any, n: Any, word: list[Any]) -> list[Any]:
    """Word n of a row, whose pairs are neighbours."""
    thread, change, count = ctx.thread, change_of(ctx.plan), len(word) // 2
    first, words = change.first // len(word), change.pairs // count
    inside = (n >= first) & (n < first + words)
    group = thread.select(inside, n - first, n * 0)
    cos, sin = _angles(ctx, position, group, count)
    turned = []
    for a, b, c, s in zip(word[::2], word[1::2], cos, sin, strict=True):
        minus = thread.times(thread.times(b, s), -1.0)
        pair = (
            (a, thread.plus(thread.times(a, c), minus)),
            (b, thread.plus(thread.times(b, c), thread.times(a, s))),
        )
        for given, value in pair:
            bits = thread.select(inside, thread.bits(value), thread.bits(given))
            turned.append(thread.as_float(bits))
    return turned
