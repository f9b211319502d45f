"""The end of a work tile of the fused Hopper kernel where dQ is added up in slots (`dq_slots`): the
last work tile of a kv head rounds its sums to dq and leaves zeros.
"""

from typing import Any, NamedTuple

import jax.experimental.pallas as pl

from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.flash_bwd import dq_slots, dq_sum
from pallas_attn.kernels.flash_bwd.dq_slots import COLUMNS, HALVES, SlotPlace
from pallas_attn.kernels.flash_bwd.key_tiles import KeyTile
from pallas_attn.kernels.flash_bwd.plan import KeyPlan
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.thread_program import Int, ThreadContext
from pallas_attn.kernels.lang.types import GmemRef, Index

IN_FLIGHT = 16  # words of 16 bytes that a thread asks for before it waits for the first


class SlotRefs(NamedTuple):
    counters: GmemRef
    sums: GmemRef
    dq: GmemRef


def finish(ctx: KernelContext, work: KeyTile, wg: Index) -> None:
    """Counts a work tile, which has made its additions to the warpgroup's half of the rows; rounds
    that half if all work tiles of the kv head are counted.
    """
    plan, refs, _ = ctx
    at = dq_slots.place(plan.order, work, wg)
    own = SlotRefs(refs.dq_counters, refs.dq, refs.dq_rounded)
    pl.when(dq_slots.is_last(ctx, at))(lambda: threads.run(_round, plan, own, at))


class _Part(NamedTuple):
    """Columns whose sums lie together: all, or a panel where they lie as threads add them."""

    words: int  # words of 16 bytes before them
    first: int  # their first column, in units of `COLUMNS`
    width: int  # columns, of which some may be past the last
    chunks: int  # units of `COLUMNS` that dq has


class _Chunk(NamedTuple):
    """`COLUMNS` columns of a row of dq, or of two."""

    head: Int  # query head in its group
    column: Int  # in units of `COLUMNS`
    rows: list[Int]
    words: list[Int]  # places of their sums


def _parts(plan: KeyPlan) -> list[_Part]:
    chunks = plan.problem.head_dim // COLUMNS
    if not dq_sum.is_split_by_rows(plan):
        return [_Part(0, 0, dq_sum.columns(plan), chunks)]
    parts, before = [], 0
    rows = dq_slots.number(plan.order) * plan.problem.group * dq_sum.rows_of_head(plan)
    for width in dq_sum.qk_widths(plan):
        left = min(width // COLUMNS, chunks - before // COLUMNS)
        parts.append(_Part(before * rows // 4, before // COLUMNS, width, left))
        before += width
    return parts


def _chunk_in_rows(plan: KeyPlan, part: _Part, at: SlotPlace, item: Int) -> _Chunk:
    """Item `item` of a half, of sums in rows [slots, rows, group, columns]."""
    group, rows = plan.problem.group, dq_sum.rows_of_head(plan)
    chunk, line = item % part.chunks, item // part.chunks
    head, row = line % group, line // group + at.half * (rows // HALVES)
    word = ((at.slot * rows + row) * group + head) * (part.width // 4) + chunk * 2
    return _Chunk(head, chunk, [row], [word, word + 1])


def _chunk_in_pieces(plan: KeyPlan, part: _Part, at: SlotPlace, item: Int) -> _Chunk:
    """Likewise of sums in pieces of 64 rows, every second of which is of this half, as
    `mma_rowmajor.add` leaves them: 16 bytes are two columns of two rows.
    """
    group, pieces = plan.problem.group, dq_sum.rows_of_head(plan) // ROWS
    chunk, lane, piece = item % part.chunks, item // part.chunks % 32, item // part.chunks // 32
    head, piece = piece // (pieces // HALVES), piece % (pieces // HALVES) * HALVES + at.half
    row = piece * ROWS + lane // 8 * 16 + lane % 8
    word = ((at.slot * group + head) * pieces + piece) * (ROWS * part.width // 4)
    word = word + part.words + chunk * mosaic.THREADS + lane * 4
    return _Chunk(head, chunk + part.first, [row, row + 8], [word + n for n in range(4)])


def _by_row(words: list[list[Any]]) -> list[list[Any]]:
    """The numbers of a `_Chunk`, by row."""
    if len(words) * 4 == COLUMNS:
        return [words[0] + words[1]]
    return [[x for word in words for x in word[n : n + 2]] for n in (0, 2)]


def _round(ctx: ThreadContext) -> None:
    for part in _parts(ctx.plan):
        _round_part(ctx, part)
    dq_slots.pass_on(ctx)


def _round_part(ctx: ThreadContext, part: _Part) -> None:
    """Rounds half of the rows; a thread has asked for `IN_FLIGHT` words when it uses the first."""
    thread, refs, at, plan = ctx
    chunk_of, words = _chunk_in_rows, 2
    if dq_sum.is_split_by_rows(plan):
        chunk_of, words = _chunk_in_pieces, 4
    numbers = plan.problem.group * dq_sum.rows_of_head(plan) // HALVES * part.chunks * COLUMNS
    chunks, together = numbers // (4 * words), IN_FLIGHT // words

    def some(n: Int, carry: list[Any]) -> list[Any]:
        items = [thread.index + (n * together + m) * mosaic.THREADS for m in range(together)]
        loaded = []
        for item in items:
            chunk = chunk_of(plan, part, at, item)
            each = [thread.load_where(refs.sums, x, 16, item < chunks) for x in chunk.words]
            loaded.append((chunk, item < chunks, each))
        for chunk, exists, each in loaded:
            _store(ctx, chunk, exists, [thread.numbers(x, 16, "float32") for x in each])
        return carry

    thread.loop(pl.cdiv(chunks, together * mosaic.THREADS), [], some)


def _store(ctx: ThreadContext, chunk: _Chunk, exists: Int, numbers: list[list[Any]]) -> None:
    """Stores a part of dq, if it exists, and zeros where its sums were."""
    thread, refs, at, plan = ctx
    problem = plan.problem
    for word in chunk.words:
        thread.store_floats(refs.sums, word, [thread.number(0.0)] * 4, exists)
    for row, eight in zip(chunk.rows, _by_row(numbers), strict=True):
        line = (at.batch * problem.q_len + row) * problem.q_heads + chunk.head
        line = thread.to_int64(line + at.kv_head * problem.group)
        place = line * (problem.head_dim // COLUMNS) + thread.to_int64(chunk.column)
        value = thread.rounded([x * problem.scale for x in eight], problem.dtype)
        thread.store(refs.dq, place, value, 2 * COLUMNS, exists & (row < problem.q_len))
