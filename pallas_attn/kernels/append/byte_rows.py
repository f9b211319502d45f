"""The append's program for latent rows in FlashMLA's format (`_call/byte_rows.py`).

Neighbouring threads share a row, as in `quantize`; those that have the 128 columns of a scale agree
on it, and the first of them writes it. The other columns are rounded to bfloat16.
"""

from pallas_attn._call.byte_rows import BYTE_ROW, REST_DTYPE, SCALE_COLUMNS
from pallas_attn.kernels.append import plan as append_plan
from pallas_attn.kernels.append import quantize
from pallas_attn.kernels.append.plan import Place
from pallas_attn.kernels.append.quantize import Row
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.types import GmemRef, Index


def write_rows(ctx: ThreadContext) -> None:
    """The program of one thread: reads its words, changes them, agrees on scales, converts,
    writes.
    """
    thread, rows = ctx.thread, quantize.rows_of(ctx)
    (rows_read,) = append_plan.read_all(ctx, quantize.read_row, rows)
    caches = append_plan.arrays_of(ctx, rows, (1,))[1]
    places = [append_plan.place(ctx, row, 1) for row in rows]
    for (cache,), place, row in zip(caches, places, rows_read, strict=True):
        _write(ctx, cache, place, ctx.plan.layout.number(thread, place.row), row)


def _write(ctx: ThreadContext, cache: GmemRef, place: Place, at_row: Index, row: Row) -> None:
    """The words of one thread: those of V, whose number is the same for all threads, and others."""
    (thread, _, _, plan), numbers = ctx, quantize.numbers_of(ctx, row, 0)
    word, dtype = len(numbers[0]), plan.new_dtype
    # A scale's words: some of each of `lanes` threads.
    lanes = min(SCALE_COLUMNS // word, plan.lanes)
    together = SCALE_COLUMNS // word // lanes
    of_v = BYTE_ROW.v_head_dim // word // plan.lanes

    def at(nbytes: int, begin: int, number: Index) -> Index:
        first = at_row * (BYTE_ROW.size // nbytes)
        return first + thread.to_int64(number + begin // nbytes)

    for start in range(0, of_v, together):
        own = slice(start, start + together)
        scaled = quantize.scaled(ctx, numbers[own], lanes)
        narrow = quantize.narrowed(ctx, scaled)
        for column, packed in zip(row.columns[own], narrow, strict=True):
            thread.store(cache, at(word, 0, column), packed, word, place.exists)
        scale = row.columns[start] * word // SCALE_COLUMNS
        leads = place.exists & (thread.index % lanes < 1)
        to = at(4, BYTE_ROW.v_head_dim, scale)
        thread.store(cache, to, quantize.stored_scale(ctx, scaled), 4, leads)
    for number in range(of_v, len(numbers)):
        column = row.columns[number]
        if row.changed is None and dtype == REST_DTYPE:
            value = row.words[number]
        else:
            value = thread.rounded(numbers[number], REST_DTYPE)
        exists = place.exists & (column < row.row_words)
        to = at(2 * word, BYTE_ROW.rest_begins, column - BYTE_ROW.v_head_dim // word)
        thread.store(cache, to, value, 2 * word, exists)
