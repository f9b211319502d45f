"""The static facts of an append, and the arithmetic from a word of the new rows to its place in a
cache.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AppendProblem, Change
from pallas_attn.kernels.attention import cache_layout
from pallas_attn.kernels.attention.cache_layout import Layout, Row
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.types import GmemRef, Index, Predicate
from pallas_attn.kernels.mma.scales import lanes_of

IN_FLIGHT_MOST = 16  # words that a thread may hold
CHUNK_MOST = IN_FLIGHT_MOST * mosaic.THREADS  # words of a chunk: the last may count so far too far


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static facts of one launch. Items are words; rows of a head where threads share them."""

    problem: AppendProblem
    layout: Layout
    row_words: tuple[int, ...]  # words in a head's new row: of K, and of V
    word_bytes: tuple[int, ...]
    lanes: int  # neighbouring threads that share a row, to compute; 0: words are moved
    in_flight: int  # items that a thread holds
    chunks: int  # chunks of a sequence

    @classmethod
    def of(cls, problem: AppendProblem, sides: tuple[str, ...], words: int) -> "Plan":
        """`words`: how many words (or rows, where they are quantised) a thread may hold of an
        array.
        """
        dims = {"k": problem.head_dim, "v": problem.v_head_dim or 0}
        size = jnp.dtype(_new_dtype(problem)).itemsize
        row_bytes = [dims[side] * size for side in sides]
        word_bytes = [math.gcd(nbytes, 16) for nbytes in row_bytes]
        if (change := problem.change) is not None and sides[0] == "k":
            word_bytes[0] = math.gcd(word_bytes[0], *(n * size for n in _whole_words(change)))
        row_words = tuple(n // word for n, word in zip(row_bytes, word_bytes, strict=True))
        lanes, items = 0, problem.new_rows * problem.kv_heads
        if problem.quantized or change is not None:
            lanes = lanes_of(max(row_words))
            words = max(words // pl.cdiv(max(row_words), lanes), 1)
        else:
            items *= max(row_words)
        at_once = mosaic.THREADS // (lanes or 1)
        in_flight = min(words, pl.cdiv(items, at_once))
        return cls(
            problem=problem,
            layout=cache_layout.layout_of(problem),
            row_words=row_words,
            word_bytes=tuple(word_bytes),
            lanes=lanes,
            in_flight=in_flight,
            chunks=pl.cdiv(items, at_once * in_flight),
        )

    @property
    def sequences(self) -> int:
        """Sequences over which blocks are shared out; all packed rows count as one."""
        return 1 if self.problem.packed else self.problem.sequences

    @property
    def new_dtype(self) -> str:
        return _new_dtype(self.problem)

    def words_in_cache(self, array: int) -> tuple[int, int]:
        """(offset, length) in words: where the new row of K (array 0) or V (1) begins in a row of
        the cache array, and the length of that row.
        """
        if not self.layout.joined:
            return 0, self.row_words[array]
        pairs = zip(self.row_words, self.word_bytes, strict=True)
        nbytes = [words * word for words, word in pairs]
        word = self.word_bytes[array]
        return sum(nbytes[:array]) // word, sum(nbytes) // word

    @property
    def chunk_items(self) -> int:
        """Items of a chunk."""
        return self.in_flight * mosaic.THREADS // (self.lanes or 1)

    @property
    def row_items(self) -> int:
        """Items of a new row."""
        return self.problem.kv_heads * (1 if self.lanes else max(self.row_words))


def _new_dtype(problem: AppendProblem) -> str:
    """The dtype of new rows; a cast to it is left to XLA."""
    return problem.dtype if problem.quantized else problem.cache_dtype


def _whole_words(change: Change) -> tuple[int, ...]:
    """Numbers of columns that are whole words: those before the first that is rotated, and those
    of each half, or of all pairs.
    """
    if not change.pairs:
        return ()
    return change.first, (2 if change.interleaved else 1) * change.pairs


class AppendRefs(NamedTuple):
    """Global memory; the caches are written."""

    new: tuple[GmemRef, ...]  # K, and V where there is one
    # A sequence each, or one for all: K and V, and the scales of K and of V where they have any.
    caches: tuple[tuple[GmemRef, ...], ...]
    end: GmemRef | None  # this and the next two: those of `AppendInputs`
    positions: GmemRef | None
    new_lengths: GmemRef | None
    capacities: GmemRef | None  # int32[M], where they differ
    page_table: GmemRef | None
    layer: GmemRef | None
    owners: GmemRef | None = None  # int32[tokens], where rows are packed
    cos: GmemRef | None = None  # the tables of `Change`, and its weight
    sin: GmemRef | None = None
    norm_weight: GmemRef | None = None
    start: GmemRef | None = None  # position of row 0, in place of `end`


class At(NamedTuple):
    """The place of a block in the grid, and what the lengths say there; int32 scalars."""

    sequence: Index
    chunk: Index
    start: Index | None  # None where rows are packed, and each has its own
    rows: Index  # new rows that have a place; packed: that may have
    capacity: Index | None
    layer: Index | None


class Place(NamedTuple):
    """The place of one thread's word, within the K or V array."""

    exists: Predicate
    row: Row
    column: Index


def block_at(ctx: KernelContext) -> At:
    (plan, refs, _), problem = ctx, ctx.plan.problem
    block = lax.axis_index("block")
    sequence = lax.div(block, jnp.int32(plan.chunks))
    layer = None if refs.layer is None else refs.layer[0]
    if problem.packed:
        rows = jnp.int32(problem.new_rows)
        rows = rows if layer is None else jnp.where(plan.layout.has_layer(layer), rows, 0)
        return At(sequence, block, None, rows, None, layer)
    if refs.end is not None:
        end = refs.end[sequence]
        start = end - refs.new_lengths[sequence]  # wraps only where `end` is negative
    else:
        assert refs.start is not None
        end = start = refs.start[sequence]
    capacity = None if refs.capacities is None else refs.capacities[sequence]
    # start + row could pass 2**31, this cannot.
    rows = (plan.layout.capacity if capacity is None else capacity) - start
    rows = jnp.minimum(rows, problem.new_rows)
    if refs.new_lengths is not None:
        rows = jnp.minimum(rows, refs.new_lengths[sequence])
    rows = jnp.where(start | end >= 0, rows, 0)
    if layer is not None:
        rows = jnp.where(plan.layout.has_layer(layer), rows, 0)
    return At(sequence, lax.rem(block, jnp.int32(plan.chunks)), start, rows, capacity, layer)


def read_all(ctx: ThreadContext, read: Callable[..., Any], items: list[Index]) -> list[list[Any]]:
    """`read(ctx, item, array)` of each item of a thread, a list an array: all loads are issued
    before anything else.
    """
    plan = ctx.plan
    if plan.layout.paged and plan.chunks == 1 and not plan.problem.packed:
        _prefetch_page_table(ctx)
    loaded = [[read(ctx, item, array) for item in items] for array in range(len(ctx.refs.new))]
    if plan.layout.paged:
        ctx.thread.order_loads()
    return loaded


def _prefetch_page_table(ctx: ThreadContext) -> None:
    """Prefetches the page table while the length is still being loaded: which entry is needed
    depends on the length, but the lines that may hold it do not.
    """
    thread, refs, at, plan = ctx
    # 8 entries a sector of 32 bytes
    entry = thread.minimum(thread.index * 8, plan.layout.entries - 1)
    thread.prefetch(refs.page_table, plan.layout.entry_index(thread, at.sequence, entry), 4)


def place(ctx: ThreadContext, word: Index, row_words: int) -> Place:
    """The place of a word, of which a row of a head has so many."""
    thread, refs, at, plan = ctx
    heads = plan.problem.kv_heads
    row = word // (heads * row_words)
    head, column = word // row_words % heads, word % row_words
    exists = row < at.rows  # and so the word is one of this sequence's: at.rows <= new_rows
    sequence, capacity, page = at.sequence, at.capacity, None
    if plan.problem.packed:
        sequence = packed_row(ctx, refs.owners, row)
        position = packed_row(ctx, refs.positions, row)
        if plan.layout.capacity is None:
            capacity = thread.load(refs.capacities, sequence, 4)
        most = plan.layout.capacity if capacity is None else capacity
        exists = exists & (position >= 0) & (position < most)
    else:
        position = at.start + row
    if plan.layout.paged:
        position = thread.select(exists, position, 0)
        entry = plan.layout.entry(position)
        page = plan.layout.load_page(thread, refs.page_table, sequence, entry)
        exists = exists & plan.layout.has_page(page)
    return Place(exists, Row(sequence, head, position, at.layer, page, capacity), column)


def arrays_of(
    ctx: ThreadContext, items: list[Index], sizes: tuple[int, ...]
) -> dict[int, list[tuple[GmemRef, ...]]]:
    """The arrays of the cache that each of a thread's items goes to, for each size: the items that
    a row of a head has.
    """
    thread, refs, at, plan = ctx
    if not plan.problem.packed or len(refs.caches) == 1:
        arrays = plan.layout.arrays_of(thread, refs.caches, at.sequence)
        return dict.fromkeys(sizes, [arrays] * len(items))
    heads = plan.problem.kv_heads
    rows = {size: [item // (heads * size) for item in items] for size in sizes}

    def arrays_at(row: Index) -> tuple[GmemRef, ...]:
        owner = packed_row(ctx, refs.owners, row)
        return plan.layout.arrays_of(thread, refs.caches, owner)

    return {size: [arrays_at(row) for row in rows[size]] for size in sizes}


def packed_row(ctx: ThreadContext, ref: GmemRef, row: Index) -> Index:
    """The number of a packed row in an array; of the last one where there are no more rows."""
    return ctx.thread.load(ref, ctx.thread.minimum(row, ctx.plan.problem.new_rows - 1), 4)
