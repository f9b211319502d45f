"""Where the rows of a KV cache lie: one object for each layout of caches, made by `layout_of`.

Every array of a cache is [layers, slabs, kv heads, rows of a slab, head dim]. That of a cache of
one layer has no first axis, and an array of scales has no last one. A slab is what lies together of
all kv heads:

    per_sequence   an array for each sequence, of a single slab
    stacked        one array for all, a slab for each sequence
    paged          one array for all, a slab for each page; a page table [M, entries] has the pages
                   of each sequence in order

A kernel asks a layout for addresses in one of two forms. A program for one thread
(`mosaic.each_thread`) asks for `number`, which of all rows of an array a row is, in 64 bits; the
word of memory follows by a multiplication. A kernel that copies by TMA asks for `slice_of` an array
in the form of `view`, or for `rows_from`.

K and V of `flash_attention`, [M, rows, kv heads, head dim], are no cache; by `Contiguous` a kernel
that copies by TMA finds their rows all the same.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.lang import mosaic

Array = Any
Ref = Any
Scalar = Any  # an int32 of the whole block, or an Int of one thread


class Row(NamedTuple):
    """A row of a cache: the key, the value or the scale at one position of a sequence."""

    sequence: Scalar
    head: Scalar  # kv head
    position: Scalar
    layer: Scalar | None = None  # None: the cache has one layer, and no axis for it
    page: Scalar | None = None  # where pages are used: that of the position, which exists
    capacity: Scalar | None = None  # of the sequence, where capacities differ


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the three layouts share."""

    capacities: tuple[int, ...]  # rows that sequences can hold
    kv_heads: int
    layers: int | None
    slabs: int  # of one layer of an array
    slab_rows: int | None  # of a kv head in a slab; None where they differ between arrays

    separate = False  # whether each sequence has arrays of its own
    paged = False

    @property
    def capacity(self) -> int | None:
        """Of every sequence; None where they differ."""
        return self.capacities[0] if len(set(self.capacities)) == 1 else None

    def contiguous_rows(self, tile: int) -> int:
        """How many rows of a tile lie together in memory, wherever the tile begins."""
        return tile

    def slab(self, row: Row) -> Scalar | None:
        """Which slab of a layer has the row; None where there is a single one."""
        del row
        return None

    def row_in_slab(self, position: Scalar) -> Scalar:
        return position

    # ---- operands --------------------------------------------------------------------------------

    def tables(self, *arrays: Any) -> tuple[tuple[Array, ...], ...]:
        """The arrays of a cache (K, V, their scales; None where there are none) as an operand:
        those of each sequence, or those of all.
        """
        given = [x if self.separate else (x,) for x in arrays if x is not None]
        return tuple(zip(*given, strict=True))

    def capacities_operand(self) -> Array | None:
        """int32[M], where capacities differ."""
        return None if self.capacity is not None else jnp.asarray(self.capacities, jnp.int32)

    def view(self, array: Array) -> Array:
        """[layers * slabs * kv heads, rows of a slab, H] of one array, for `slice_of`."""
        return array.reshape(-1, *array.shape[-2:])

    # ---- addresses -------------------------------------------------------------------------------

    def has_layer(self, layer: Scalar) -> Scalar:
        """Whether the cache has a layer of this number."""
        return (layer >= 0) & (layer < (1 if self.layers is None else self.layers))

    def arrays_of(
        self, thread: mosaic.Thread, tables: Sequence[tuple[Ref, ...]], sequence: Scalar
    ) -> tuple[Ref, ...]:
        """Of an operand made by `tables`: the arrays that hold the sequence."""
        return thread.pick(sequence, tables) if len(tables) > 1 else tables[0]

    def number(self, thread: mosaic.Thread, row: Row) -> Any:
        """Which of all rows of its array this is, in 64 bits."""
        line, slab = thread.wide(row.head), self._slab_of_all(row)
        if slab is not None:
            line = thread.wide(slab) * self.kv_heads + line
        rows = self.slab_rows if row.capacity is None else thread.wide(row.capacity)
        return line * rows + thread.wide(self.row_in_slab(row.position))

    def slice_of(self, row: Row) -> tuple[Scalar, Scalar]:
        """(index, row) of it in the array's `view`."""
        slab = self._slab_of_all(row)
        index = row.head if slab is None else slab * self.kv_heads + row.head
        return index, self.row_in_slab(row.position)

    def rows_from(self, row: Row, rows: int) -> tuple[Any, ...]:
        """So many rows from this one on, as indices of the array's `view` but for the columns."""
        index, start = self.slice_of(row)
        return index, pl.ds(start, rows)

    def _slab_of_all(self, row: Row) -> Scalar | None:
        slab = self.slab(row)
        if row.layer is None:
            return slab
        return row.layer if slab is None else row.layer * self.slabs + slab


class PerSequence(Layout):
    """[layers, kv heads, capacity of the sequence, H] for each sequence."""

    separate = True


class Stacked(Layout):
    """[layers, M, kv heads, capacity, H]."""

    def slab(self, row: Row) -> Scalar:
        return row.sequence


class Paged(Layout):
    """[layers, pages, kv heads, rows of a page, H], and a page table."""

    paged = True

    @property
    def page_size(self) -> int:
        assert self.slab_rows is not None
        return self.slab_rows

    @property
    def entries(self) -> int:
        """Of a sequence in the page table."""
        return self.capacities[0] // self.page_size

    def contiguous_rows(self, tile: int) -> int:
        return math.gcd(self.page_size, tile)

    def slab(self, row: Row) -> Scalar | None:
        return row.page

    def row_in_slab(self, position: Scalar) -> Scalar:
        if isinstance(position, jax.Array):
            return lax.rem(position, jnp.int32(self.page_size))
        return position % self.page_size

    def has_page(self, page: Scalar) -> Scalar:
        """Whether what the page table says is a page."""
        return (page >= 0) & (page < self.slabs)

    def lacks_page(self, page: Scalar) -> Scalar:
        """The opposite of `has_page`, without an operation for it."""
        return (page < 0) | (page >= self.slabs)

    def entry(self, position: Scalar) -> Scalar:
        """Which entry of its sequence in the page table has the page of a position."""
        if isinstance(position, jax.Array):
            return lax.div(position, jnp.int32(self.page_size))
        return position // self.page_size

    def entry_index(self, thread: mosaic.Thread, sequence: Scalar, entry: Scalar) -> Any:
        """Where an entry of a sequence lies in the page table, in 64 bits."""
        return thread.wide(sequence) * self.entries + thread.wide(entry)

    def load_page(
        self, thread: mosaic.Thread, page_table: Ref, sequence: Scalar, entry: Scalar
    ) -> Any:
        return thread.load(page_table, self.entry_index(thread, sequence, entry), 4)

    def note_missing(
        self, thread: Any, page_table: Ref, sequence: Scalar, count: Scalar, to: tuple[Ref, Scalar]
    ) -> None:
        """Stores 1 to a word of shared memory, (ref, index), where one of the first `count` pages
        of a sequence is missing. Each thread of the warpgroup looks up every 128th.
        """

        def some(i: Any, carry: list) -> list:
            number = i * mosaic.THREADS + thread.index
            inside = number < count
            entry = thread.select(inside, number, 0)
            page = self.load_page(thread, page_table, sequence, entry)
            bad = thread.select(self.has_page(page), thread.index * 0, 1)
            thread.shared_store(*to, bad, inside & (bad >= 1))
            return carry

        thread.loop((count + (mosaic.THREADS - 1)) // mosaic.THREADS, [], some)


class Contiguous(Layout):
    """[M, rows, kv heads, H]: no cache."""

    def view(self, array: Array) -> Array:
        return array

    def rows_from(self, row: Row, rows: int) -> tuple[Any, ...]:
        return row.sequence, pl.ds(row.position, rows), row.head


def layout_of(problem: Any) -> Layout:
    """That of the caches of an `AppendProblem`, a `DecodeProblem` or any that has their fields."""
    facts = (problem.capacities, problem.kv_heads, problem.layers)
    same = problem.capacities[0] if len(set(problem.capacities)) == 1 else None
    if problem.kind == "per_sequence":
        return PerSequence(*facts, 1, same)
    if problem.kind == "stacked":
        return Stacked(*facts, problem.sequences, same)
    return Paged(*facts, problem.pages or 0, problem.page_size)


def scalar_operand(number: Any) -> Array | None:
    """int32[1]: of a layer, or of a bound of a mask; or None where there is none."""
    return None if number is None else jnp.asarray(number, jnp.int32).reshape(1)


def of_one_sequence(problem: Any) -> Any:
    """A problem of packed rows as if one sequence, the longest, had all of them."""
    return dataclasses.replace(
        problem,
        kind="stacked",
        tokens=None,
        q_len=problem.tokens,
        sequences=1,
        capacities=(max(problem.capacities),),
        page_size=None,
        pages=None,
    )


def whole_sequences(problem: Any) -> Any:
    """A problem over stacked caches as one over pages, each of which holds a whole sequence; one
    over pages as it is.
    """
    if problem.kind == "paged":
        return problem
    rows, pages = problem.capacities[0], problem.sequences
    return dataclasses.replace(problem, kind="paged", page_size=rows, pages=pages)
