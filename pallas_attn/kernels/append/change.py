"""Rows of K normed and rotated on their way into a cache, in float32: see `pallas_attn.rotary`.

Rows are shared by neighbouring threads, as where they are quantised. The norm takes the sum of a
row's squares, by shuffles. A thread has the columns that its own ones turn with in the same words
where pairs are neighbours; else it reads them too, from L1. Products and sums are each rounded,
none is fused with another.
"""

import functools
import operator
from collections.abc import Callable

import jax.numpy as jnp

from pallas_attn._call.problem import AppendProblem, Change
from pallas_attn.errors import Limit
from pallas_attn.kernels.append import plan as append_plan
from pallas_attn.kernels.append.plan import Plan
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.threads import Float, Thread
from pallas_attn.kernels.lang.types import GmemRef, Index
from pallas_attn.kernels.mma.scales import HEAD_DIM_MOST

DTYPES = ("bfloat16", "float16", "float32")  # dtypes of rows

Floats = list[Float]  # the numbers of a word


def limit(problem: AppendProblem) -> Limit | None:
    """Why rows cannot be changed, or None."""
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
    assert plan.problem.change is not None
    return plan.problem.change


def changed(ctx: ThreadContext, row: Index, begin: Index, columns: list[Index]) -> list[Floats]:
    """One thread's words of a row of K. `row`: its number among the sequence's rows of a head;
    `begin`: its first word; `columns`: which of its words the thread has. Those past the end of a
    row may be anything.
    """
    thread, refs, _, plan = ctx
    change, nbytes = change_of(plan), plan.word_bytes[0]

    def numbers(column):
        word = thread.load(refs.new[0], begin + thread.to_int64(column), nbytes)
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


def _norm(
    ctx: ThreadContext, columns: list[Index], words: list[Floats]
) -> Callable[[Index, Floats], Floats]:
    """A function of a word's column and its numbers, which norms them."""
    thread, refs, _, plan = ctx
    change = change_of(plan)
    if change.eps is None:
        return lambda column, word: word
    zero, sums = thread.number(0.0), []
    for column, word in zip(columns, words, strict=True):
        squares = functools.reduce(operator.add, [x * x for x in word])
        sums.append(thread.choose(column < plan.row_words[0], squares, zero))
    total = thread.sum_of_lanes(functools.reduce(operator.add, sums), plan.lanes)
    inverse = thread.rsqrt(total * (1 / change.dim) + change.eps)

    def normed(column: Index, word: Floats) -> Floats:
        weight = _numbers(thread, refs.norm_weight, column, len(word), change.weight_dtype)
        return [x * inverse * w for x, w in zip(word, weight, strict=True)]

    return normed


def _numbers(thread: Thread, ref: GmemRef, number: Index, count: int, dtype: str) -> Floats:
    """Group `number` of `count` numbers each, a power of two, of an array."""
    size = jnp.dtype(dtype).itemsize
    nbytes = min(16, count * size)
    words = range(count * size // nbytes)
    loaded = [thread.load(ref, number * len(words) + n, nbytes) for n in words]
    return [x for word in loaded for x in thread.numbers(word, nbytes, dtype)]


def _position(ctx: ThreadContext, row: Index) -> Index:
    """The position of a row of a head; of one that has no place, some position of the tables."""
    thread, refs, at, plan = ctx
    token = row // plan.problem.kv_heads
    if plan.problem.packed:
        position = append_plan.packed_row(ctx, refs.positions, token)
    else:
        position = token + at.start
    return thread.minimum(thread.maximum(position, 0), change_of(plan).positions - 1)


def _angles(ctx: ThreadContext, position: Index, group: Index, count: int) -> list[Floats]:
    """cos and sin of `count` pairs, which are group `group` of the row of the tables."""
    number = position * (change_of(ctx.plan).pairs // count) + group
    tables = ctx.refs.cos, ctx.refs.sin
    return [_numbers(ctx.thread, ref, number, count, "float32") for ref in tables]


def _halves(
    ctx: ThreadContext,
    position: Index,
    normed_at: Callable[[Index], Floats],
    n: Index,
    word: Floats,
) -> Floats:
    """Word n of a row, whose pairs are `change.pairs` columns apart. `normed_at(n)`: any word."""
    thread, change, count = ctx.thread, change_of(ctx.plan), len(word)
    first, half = change.first // count, change.pairs // count  # in words
    low = (n >= first) & (n < first + half)
    high = (n >= first + half) & (n < first + 2 * half)
    other = normed_at(thread.select(high, n - half, thread.select(low, n + half, n)))
    group = thread.select(low, n - first, thread.select(high, n - (first + half), n * 0))
    cos, sin = _angles(ctx, position, group, count)
    rotated = []
    for x, y, c, s in zip(word, other, cos, sin, strict=True):
        s = thread.choose(low, s * -1.0, s)
        rotated.append(thread.choose(low | high, x * c + y * s, x))
    return rotated


def _interleaved(ctx: ThreadContext, position: Index, n: Index, word: Floats) -> Floats:
    """Word n of a row, whose pairs are neighbours."""
    thread, change, count = ctx.thread, change_of(ctx.plan), len(word) // 2
    first, words = change.first // len(word), change.pairs // count
    inside = (n >= first) & (n < first + words)
    group = thread.select(inside, n - first, n * 0)
    cos, sin = _angles(ctx, position, group, count)
    rotated = []
    for a, b, c, s in zip(word[::2], word[1::2], cos, sin, strict=True):
        minus = b * s * -1.0
        rotated.append(thread.choose(inside, a * c + minus, a))
        rotated.append(thread.choose(inside, b * c + a * s, b))
    return rotated
