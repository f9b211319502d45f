"""The append's program where it computes: rows of K are normed and rotated (`change`), and rows of
quantised caches become narrow numbers with a scale.

Neighbouring threads share a row of a head: 1 to 32 of them, a power of two, each with every so
manyth word of it (16 bytes where the head dim allows), so that reads and writes are coalesced. They
find the row's largest magnitude with shuffles, and then each knows the scale (`mma/scales.py`). The
first of them writes it.
"""

import functools
from typing import Any, NamedTuple

from pallas_attn._call.problem import QUANTIZED, AppendProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.append import change as append_change
from pallas_attn.kernels.append import plan as append_plan
from pallas_attn.kernels.append.plan import Place
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.asm import Int
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.threads import Float
from pallas_attn.kernels.lang.types import GmemRef, Index, Predicate
from pallas_attn.kernels.mma import scales
from pallas_attn.kernels.mma.scales import HEAD_DIM_MOST, Scale

NEW_DTYPES = ("bfloat16", "float16", "float32")  # dtypes of new rows; others are cast first


def limit(problem: AppendProblem) -> Limit | None:
    """Why rows cannot be quantised, or None."""
    if problem.cache_dtype not in QUANTIZED:
        return Limit(
            f"no quantised {problem.cache_dtype} caches", f"use one of {', '.join(QUANTIZED)}"
        )
    largest = max(problem.head_dim, problem.v_head_dim or 0)
    if largest > HEAD_DIM_MOST:
        return Limit(
            f"head dim {largest}: a warp holds a row in registers to quantise it",
            f"use head dims up to {HEAD_DIM_MOST}, or a cache that is not quantised",
        )
    return None


class Row(NamedTuple):
    """One thread's part of a new row."""

    words: list[Int]  # none where they are changed
    changed: list[list[Float]] | None  # a list for each word; None where they are not
    columns: list[Index]  # the number of each word in the row
    row_words: int


class Scaled(NamedTuple):
    """The scale of a row, on which its threads agree, and the numbers of one of them."""

    numbers: list[list[Float]]  # a list for each word
    scale: Scale


def write_rows(ctx: ThreadContext) -> None:
    """The program of one thread: reads its words, changes them, agrees on scales, converts,
    writes.
    """
    (thread, refs, _, plan), rows = ctx, rows_of(ctx)
    arrays = range(len(refs.new))
    rows_read = append_plan.read_all(ctx, read_row, rows)
    caches = append_plan.arrays_of(ctx, rows, (1,))[1]
    # All maxima before anything that needs one: their shuffles then wait together.
    scaled: list[list[Any]] = [[None for _ in rows] for _ in arrays]
    if plan.problem.quantized:
        scaled = [[_scale(ctx, row, array) for row in rows_read[array]] for array in arrays]
    places = [append_plan.place(ctx, row, 1) for row in rows]
    for array in arrays:
        each = zip(caches, places, rows_read[array], scaled[array], strict=True)
        for cache, place, row, numbers in each:
            at_row = plan.layout.number(thread, place.row)
            if numbers is None:
                _write_plain(ctx, cache[array], place, at_row, row, array)
            else:
                to = _To(cache[array], cache[len(refs.new) + array])
                _write(ctx, to, place, at_row, row, numbers)


def rows_of(ctx: ThreadContext) -> list[Index]:
    """The rows of which a thread has some words."""
    thread, _, at, plan = ctx
    at_once = mosaic.THREADS // plan.lanes
    first = at.chunk * plan.chunk_items + thread.index // plan.lanes
    return [first + i * at_once for i in range(plan.in_flight)]


def read_row(ctx: ThreadContext, row: Index, array: int) -> Row:
    """This thread's words of a row. Threads past the end of a row, and of the rows, read the words
    of others, which changes no maximum, and write none.
    """
    thread, refs, at, plan = ctx
    rows = plan.problem.new_rows * plan.problem.kv_heads
    row_words = plan.row_words[array]
    if rows % plan.chunk_items:
        row = thread.minimum(row, rows - 1)
    begin = (thread.to_int64(at.sequence) * rows + thread.to_int64(row)) * row_words
    lane = thread.index % plan.lanes
    columns = [lane + start for start in range(0, row_words, plan.lanes)]
    if plan.problem.change is not None and array == 0:
        changed = append_change.changed(ctx, row, begin, columns)
        return Row([], changed, columns, row_words)
    inside = list(columns)
    if row_words % plan.lanes:
        inside[-1] = thread.minimum(columns[-1], row_words - 1)
    nbytes = plan.word_bytes[array]
    words = [thread.load(refs.new[array], begin + thread.to_int64(n), nbytes) for n in inside]
    return Row(words, None, columns, row_words)


def _scale(ctx: ThreadContext, row: Row, array: int) -> Scaled:
    return scaled(ctx, numbers_of(ctx, row, array), ctx.plan.lanes)


def numbers_of(ctx: ThreadContext, row: Row, array: int) -> list[list[Float]]:
    """The numbers of each word."""
    (thread, _, _, plan), numbers = ctx, row.changed
    if numbers is None:
        nbytes = plan.word_bytes[array]
        numbers = [thread.numbers(word, nbytes, plan.new_dtype) for word in row.words]
    return numbers


def scaled(ctx: ThreadContext, numbers: list[list[Float]], lanes: int) -> Scaled:
    """The scale of all numbers that so many neighbouring threads have."""
    thread, plan = ctx.thread, ctx.plan
    magnitudes = [thread.bits(x) & 0x7FFFFFFF for word in numbers for x in word]
    top = thread.most_of_lanes(functools.reduce(thread.maximum, magnitudes), lanes)
    return Scaled(numbers, scales.of_magnitude(thread, top, plan.problem.cache_dtype))


def narrowed(ctx: ThreadContext, scaled: Scaled) -> list[Int]:
    """The words of one thread as 8-bit numbers."""
    thread, dtype, scale = ctx.thread, ctx.plan.problem.cache_dtype, scaled.scale
    inverse = thread.reciprocal(thread.as_float(scale.bits))
    by_hand = scales.rounds_by_hand(dtype, ctx.plan.problem.gpu)
    words = []
    for word in scaled.numbers:
        packed = scales.narrowed(thread, [x * inverse for x in word], dtype, by_hand)
        words.append(thread.select(scale.finite, packed, 0))
    return words


def stored_scale(ctx: ThreadContext, scaled: Scaled) -> Int:
    """The bits of the scale in the cache."""
    return scales.stored(ctx.thread, scaled.scale)


class _To(NamedTuple):
    """An array of a quantised cache."""

    numbers: GmemRef
    scales: GmemRef


def _write(
    ctx: ThreadContext, to: _To, place: Place, at_row: Index, row: Row, scaled: Scaled
) -> None:
    """Writes the numbers of one thread; the first of those that share the row writes the scale."""
    thread, plan = ctx.thread, ctx.plan
    each = zip(row.columns, scaled.numbers, narrowed(ctx, scaled), strict=True)
    for column, word, packed in each:
        index, exists = _word_at(ctx, place, at_row, row, column)
        thread.store(to.numbers, index, packed, len(word), exists)
    leads = place.exists & (thread.index % plan.lanes < 1)
    thread.store(to.scales, at_row, stored_scale(ctx, scaled), 4, leads)


def _write_plain(
    ctx: ThreadContext, to: GmemRef, place: Place, at_row: Index, row: Row, array: int
) -> None:
    """Writes the words of one thread into a cache that is not quantised."""
    thread, plan = ctx.thread, ctx.plan
    words = row.words
    if row.changed is not None:
        words = [thread.rounded(word, plan.problem.cache_dtype) for word in row.changed]
    for column, word in zip(row.columns, words, strict=True):
        index, exists = _word_at(ctx, place, at_row, row, column)
        thread.store(to, index, word, plan.word_bytes[array], exists)


def _word_at(
    ctx: ThreadContext, place: Place, at_row: Index, row: Row, column: Index
) -> tuple[Index, Predicate]:
    """(the place of a word in its array, whether it exists)."""
    exists = place.exists
    if row.row_words % ctx.plan.lanes:
        exists = exists & (column < row.row_words)
    return at_row * row.row_words + ctx.thread.to_int64(column), exists
