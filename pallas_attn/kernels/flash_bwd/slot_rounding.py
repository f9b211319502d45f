"""The end of a work tile of the fused Hopper kernel where dQ is added up in slots (`dq_slots`): the
last work tile of a kv head rounds its sums to dq and leaves zeros.
"""

from typing import Any, NamedTuple

import jax.experimental.pallas as pl

from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.flash_bwd import dq_slots, dq_sum
from pallas_attn.kernels.flash_bwd.dq_slots import COLUMNS, HALVES
from pallas_attn.kernels.flash_bwd.key_tiles import KeyTile
from pallas_attn.kernels.flash_bwd.plan import KeyPlan
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.thread_program import Int, ThreadContext
from pallas_attn.kernels.lang.types import GmemRef, Index

IN_FLIGHT = 16  # words of 16 bytes that a thread asks for before it waits for the first
LANES = 8  # threads that share a row
LINES = ROWS // 2  # rows of a piece that lie first in a word


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


class _Columns(NamedTuple):
    """Columns of dq that are rounded at one time, counted in units of `COLUMNS`."""

    words: int  # words of 16 bytes before the panel of these columns
    width: int  # columns of the panel, one by one
    of_panel: int  # columns of the panel before these
    before: int  # columns before these
    units: int

    @property
    def lanes(self) -> int:
        """Neighbouring threads that share a row: a power of two."""
        return 1 << (self.units - 1).bit_length()

    @property
    def lines(self) -> int:
        """Threads that have the same column."""
        return mosaic.THREADS // self.lanes


def _columns(plan: KeyPlan) -> list[_Columns]:
    heads, dim = dq_slots.number(plan.order) * plan.problem.group, plan.problem.head_dim
    rows, parts, before = heads * dq_sum.rows_of_head(plan), list[_Columns](), 0
    for width in dq_sum.widths_in_memory(plan):
        there = min(width, dim - before) // COLUMNS
        for first in range(0, there, LANES):
            count = min(LANES, there - first)
            every = before // COLUMNS + first
            parts.append(_Columns(before * rows // 4, width, first, every, count))
        before += width
    return parts


class _Place(NamedTuple):
    """The places of a thread in a step: addresses of later steps are constants apart."""

    word: Int  # the first of its words of sums
    row: Int
    to: Int  # its place in dq, in words of 16 bytes


class _Rows:
    """Sums in rows [slots * group, rows, 1, columns]: a thread has a row, whose numbers are two
    words.
    """

    words, rows = 2, (0,)  # words of 16 bytes of a thread, and its rows, in a step

    def first(self, ctx: ThreadContext, columns: _Columns, head: Int) -> tuple[Int, Int]:
        """The first word and the row of a thread."""
        thread, _, at, plan = ctx
        rows = dq_sum.rows_of_head(plan)
        row = thread.index // columns.lanes + at.half * (rows // HALVES)
        column = thread.index % columns.lanes + columns.of_panel
        return (head * rows + row) * (columns.width // 4) + column * self.words, row

    def after(self, lines: int, columns: _Columns) -> tuple[int, int]:
        """Words and rows to the line that is `lines` further."""
        return lines * columns.width // 4, lines

    def end(self, ctx: ThreadContext) -> Int:
        """The row after the last of this half."""
        return (ctx.at.half + 1) * (dq_sum.rows_of_head(ctx.plan) // HALVES)

    def by_row(self, words: list[list[Any]]) -> list[list[Any]]:
        """The numbers of each row."""
        return [words[0] + words[1]]


class _Pieces:
    """Sums in pieces of 64 rows, every second of which is of this half, as `mma_rowmajor.add`
    leaves them: 16 bytes are two columns of rows r and r + 8, and a thread has both rows.
    """

    words, rows = 4, (0, 8)

    def first(self, ctx: ThreadContext, columns: _Columns, head: Int) -> tuple[Int, Int]:
        thread, _, at, plan = ctx
        line = thread.index // columns.lanes
        piece, line = line // LINES * HALVES + at.half, line % LINES
        column = thread.index % columns.lanes + columns.of_panel
        word = head * (dq_sum.rows_of_head(plan) // ROWS) + piece
        word = word * (ROWS * columns.width // 4) + columns.words
        word = word + column * mosaic.THREADS + line * self.words
        return word, piece * ROWS + line // 8 * 16 + line % 8

    def after(self, lines: int, columns: _Columns) -> tuple[int, int]:
        pieces, lines = divmod(lines, LINES)
        rows = HALVES * pieces * ROWS
        return rows * columns.width // 4 + lines * self.words, rows + lines * 2

    def end(self, ctx: ThreadContext) -> Int | int:
        return dq_sum.rows_of_head(ctx.plan)

    def by_row(self, words: list[list[Any]]) -> list[list[Any]]:
        return [[x for word in words for x in word[n : n + 2]] for n in (0, 2)]


def _layout(plan: KeyPlan) -> _Rows | _Pieces:
    return _Pieces() if dq_sum.is_split_by_rows(plan) else _Rows()


def _round(ctx: ThreadContext) -> None:
    def of_head(g: Int, carry: list[Any]) -> list[Any]:
        for columns in _columns(ctx.plan):
            _round_columns(ctx, columns, g)
        return carry

    ctx.thread.loop(ctx.plan.problem.group, [], of_head)
    dq_slots.pass_on(ctx)


def _round_columns(ctx: ThreadContext, columns: _Columns, g: Int) -> None:
    """A thread asks for `IN_FLIGHT` words before it uses the first. Few other warps can work while
    one waits, so that a step has to be few instructions.
    """
    thread, _, at, plan = ctx
    problem, layout = plan.problem, _layout(plan)
    word, row = layout.first(ctx, columns, at.slot * problem.group + g)
    line = (at.batch * problem.q_len + row) * problem.q_heads + at.kv_head * problem.group + g
    line = thread.to_int64(line) * (problem.head_dim // COLUMNS)
    line = line + thread.to_int64(thread.index % columns.lanes + columns.before)
    place = _Place(thread.to_int64(word), row, line)
    every = dq_sum.rows_of_head(plan) // HALVES // len(layout.rows)
    steps, together = pl.cdiv(every, columns.lines), IN_FLIGHT // layout.words

    def some(_: Int, carry: list[Any]) -> list[Any]:
        place = _Place(*carry)
        _round_steps(ctx, columns, [_step_after(ctx, place, columns, n) for n in range(together)])
        return list(_step_after(ctx, place, columns, together))

    if steps >= together:
        place = _Place(*thread.loop(steps // together, list(place), some))
    rest = range(steps % together)
    _round_steps(ctx, columns, [_step_after(ctx, place, columns, n) for n in rest])


def _step_after(ctx: ThreadContext, place: _Place, columns: _Columns, n: int) -> _Place:
    """The places `n` steps later."""
    problem = ctx.plan.problem
    words, rows = _layout(ctx.plan).after(n * columns.lines, columns)
    of_row = problem.q_heads * (problem.head_dim // COLUMNS)
    return _Place(place.word + words, place.row + rows, place.to + rows * of_row)


def _round_steps(ctx: ThreadContext, columns: _Columns, places: list[_Place]) -> None:
    thread, refs, _, plan = ctx
    problem, layout, loaded = plan.problem, _layout(plan), []
    inside = thread.index % columns.lanes < columns.units
    for place in places:
        exists = inside & (place.row < layout.end(ctx))
        words = [place.word + n for n in range(layout.words)]
        each = [thread.load_where(refs.sums, word, 16, exists) for word in words]
        loaded.append((place, words, exists, [thread.numbers(x, 16, "float32") for x in each]))
    of_row = problem.q_heads * (problem.head_dim // COLUMNS)
    for place, words, exists, numbers in loaded:
        for word in words:
            thread.store_floats(refs.sums, word, [thread.number(0.0)] * 4, exists)
        for n, eight in zip(layout.rows, layout.by_row(numbers), strict=True):
            value = thread.rounded([x * problem.scale for x in eight], problem.dtype)
            there = exists & (place.row + n < problem.q_len)
            thread.store(refs.dq, place.to + n * of_row, value, 2 * COLUMNS, there)
