"""The append's program where it computes: rows of K are normed and rotated (`change`), and where
caches are quantised rows become narrow numbers and a scale each, on their way.

Neighbouring threads share a row of a head: 1 to 32 of them, a power of two, each with every so
manyth word of it (16 bytes where the head dim allows), so that reads and writes are coalesced. They
find the row's largest magnitude with shuffles, and then each knows the scale: `reference.quantize`
says how, and the bytes are the same. The first of them writes it.

Magnitudes are compared as integers, which order as the floats do and put NaN above infinity above
all numbers. GPUs before sm89 convert to float8 by hand, in integers.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from pallas_attn._call.problem import QUANTIZED, AppendProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.append import change as append_change
from pallas_attn.kernels.append import plan as append_plan
from pallas_attn.kernels.append.plan import Place
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.mosaic import ThreadContext

Ref = Any

NEW_DTYPES = ("bfloat16", "float16", "float32")  # what a row may come in; all else is cast first
HEAD_DIM_MOST = 4096  # a warp holds a row in registers

_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
_FLOOR = 27 << 23  # the bits of 2**-100
_INFINITY, _NAN = 0x7F800000, 0x7FC00000


def limit(problem: AppendProblem) -> Limit | None:
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


class _Row(NamedTuple):
    """One thread's part of a new row."""

    words: list[Any]  # as they come; none where they are changed
    changed: list[list[Any]] | None  # float32, a word each; None where they are not
    columns: list[Any]  # of each word, in the row
    row_words: int


class _Scaled(NamedTuple):
    """What the threads of a row agree on, and the numbers of one of them."""

    numbers: list[list[Any]]  # float32, a word each
    finite: Any
    scale: Any  # its bits


def write_rows(ctx: ThreadContext) -> None:
    """What one thread does: read its words, change them, agree on scales, convert, write."""
    thread, refs, at, plan = ctx
    at_once = mosaic.THREADS // plan.lanes
    first = at.chunk * plan.chunk_items + thread.index // plan.lanes
    rows = [first + i * at_once for i in range(plan.in_flight)]
    arrays = range(len(refs.new))
    found_rows = append_plan.read_all(ctx, _read, rows)
    caches = append_plan.arrays_of(ctx, rows)[1]
    # All maxima before anything that needs one: their shuffles then wait together.
    scaled: list[list[Any]] = [[None for _ in rows] for _ in arrays]
    if plan.quantized:
        scaled = [[_scale(ctx, row, array) for row in found_rows[array]] for array in arrays]
    places = [append_plan.place(ctx, row, 1) for row in rows]
    for array in arrays:
        written = zip(caches, places, found_rows[array], scaled[array], strict=True)
        for some, place, row, found in written:
            at_row = plan.layout.number(thread, place.row)
            if found is None:
                _write_plain(ctx, some[array], place, at_row, row, array)
                continue
            into = _Into(some[array], some[len(refs.new) + array])
            _write(ctx, into, place, at_row, row, found)


def _read(ctx: ThreadContext, row: Any, array: int) -> _Row:
    """Threads past the end of a row, and of the rows, read what others read: it changes no maximum,
    and none of it is written.
    """
    thread, refs, at, plan = ctx
    rows, row_words = plan.new_rows * plan.heads, plan.row_words[array]
    if rows % plan.chunk_items:
        row = thread.minimum(row, rows - 1)
    begin = (thread.wide(at.sequence) * rows + thread.wide(row)) * row_words
    lane = thread.index % plan.lanes
    columns = [lane + start for start in range(0, row_words, plan.lanes)]
    if plan.change is not None and array == 0:
        changed = append_change.changed(ctx, row, begin, columns)
        return _Row([], changed, columns, row_words)
    inside = list(columns)
    if row_words % plan.lanes:
        inside[-1] = thread.minimum(columns[-1], row_words - 1)
    nbytes = plan.word_bytes[array]
    words = [thread.load(refs.new[array], begin + thread.wide(n), nbytes) for n in inside]
    return _Row(words, None, columns, row_words)


def _scale(ctx: ThreadContext, row: _Row, array: int) -> _Scaled:
    thread, plan = ctx.thread, ctx.plan
    nbytes, numbers = plan.word_bytes[array], row.changed
    if numbers is None:
        numbers = [thread.numbers(word, nbytes, plan.new_dtype) for word in row.words]
    magnitudes = [thread.bits(x) & 0x7FFFFFFF for word in numbers for x in word]
    top = thread.most_of_lanes(functools.reduce(thread.maximum, magnitudes), plan.lanes)
    finite = top < _INFINITY
    inverse_of_largest = float(np.float32(1) / np.float32(_LARGEST[plan.cache_dtype]))
    scale = thread.times(thread.as_float(thread.select(finite, top, 0)), inverse_of_largest)
    return _Scaled(numbers, finite, thread.maximum(thread.bits(scale), _FLOOR))


class _Into(NamedTuple):
    """An array of a cache."""

    numbers: Ref
    scales: Ref


def _write(
    ctx: ThreadContext, into: _Into, place: Place, at_row: Any, row: _Row, scaled: _Scaled
) -> None:
    """The numbers of one thread, and the scale from the first of those that share it."""
    thread, plan = ctx.thread, ctx.plan
    inverse = thread.reciprocal(thread.as_float(scaled.scale))
    row_words = row.row_words
    for column, word in zip(row.columns, scaled.numbers, strict=True):
        values = [thread.times(x, inverse) for x in word]
        by_hand = plan.cache_dtype != "int8" and not plan.float8
        packed = (
            _float8(thread, values, plan.cache_dtype)
            if by_hand
            else thread.narrow(values, plan.cache_dtype)
        )
        exists = place.exists
        if row_words % plan.lanes:
            exists = exists & (column < row_words)
        index = at_row * row_words + thread.wide(column)
        packed = thread.select(scaled.finite, packed, 0)
        thread.store(into.numbers, index, packed, len(word), exists)
    leads = place.exists & (thread.index % plan.lanes < 1)
    thread.store(into.scales, at_row, thread.select(scaled.finite, scaled.scale, _NAN), 4, leads)


def _write_plain(
    ctx: ThreadContext, into: Ref, place: Place, at_row: Any, row: _Row, array: int
) -> None:
    """The words of one thread, into a cache of numbers as they are."""
    thread, plan = ctx.thread, ctx.plan
    words, nbytes = row.words, plan.word_bytes[array]
    if row.changed is not None:
        words = [thread.rounded(word, plan.cache_dtype) for word in row.changed]
    for column, word in zip(row.columns, words, strict=True):
        exists = place.exists
        if row.row_words % plan.lanes:
            exists = exists & (column < row.row_words)
        thread.store(into, at_row * row.row_words + thread.wide(column), word, nbytes, exists)


_FORMATS = {"float8_e4m3fn": (3, 7), "float8_e5m2": (2, 15)}  # bits of the mantissa, bias


def _float8(thread: mosaic.Thread, numbers: list[Any], dtype: str) -> Any:
    """`thread.narrow` in integers, for numbers within the range of the dtype."""
    mantissa, bias = _FORMATS[dtype]
    unit = 2 ** (23 - mantissa)  # of the last place that stays, in the bits of a float32
    # Added to a number, it leaves whole multiples of the smallest subnormal, rounded, at its end.
    step = 2.0 ** (24 - bias - mantissa)
    codes = []
    for number in numbers:
        bits = thread.bits(number)
        magnitude = bits & 0x7FFFFFFF
        odd = magnitude // unit & 1
        normal = (magnitude + odd + (unit // 2 - 1)) // unit - (127 - bias) * 2**mantissa
        small = thread.bits(thread.plus(thread.as_float(magnitude), step))
        small = small - int(np.float32(step).view(np.int32))
        code = thread.select(magnitude < (128 - bias) * 2**23, small, normal)
        codes.append(thread.select(bits < 0, code + 128, code))
    return thread.packed(codes)
