"""Addresses of the rows of a KV cache: one object for each layout of caches, made by `layout_of`.

Every array of a cache is [layers, slabs, kv heads, rows of a slab, head dim]. That of a cache of
one layer has no first axis, and an array of scales has no last one. A slab holds rows of all kv
heads that lie together:

    per_sequence   an array for each sequence, of a single slab
    stacked        one array for all, a slab for each sequence
    paged          one array for all, a slab for each page; a page table [M, entries] has the pages
                   of each sequence in order
    interleaved    paged, but K and V share one array [layers, pages, rows of a page, kv heads,
                   H + Hv]: for each head the row of K, followed by the row of V
    listed         the arrays of a stacked or paged cache, and for each sequence a list of rows in
                   place of its entries of the page table

A program for one thread asks for `number`, the number of a row among all rows of an array, in 64
bits; the word of memory follows by a multiplication. A kernel that copies by TMA asks for
`slice_of` an array in the form of `view`, or for `rows_from`. By `Contiguous` it finds the rows of
K and V of `flash_attention`, [M, rows, kv heads, head dim], all the same.
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
from pallas_attn.kernels.lang.threads import Thread
from pallas_attn.kernels.lang.types import GmemRef, Index, Operand, SmemRef


class Row(NamedTuple):
    """A row of a cache: the key, the value or the scale at one position of a sequence."""

    sequence: Index
    head: Index  # kv head
    position: Index
    layer: Index | None = None  # None: the cache has one layer, and no axis for it
    page: Index | None = None  # the page of the position, which exists; None: there are no pages
    capacity: Index | None = None  # rows of the sequence, where capacities differ


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes and addresses of a cache; the subclasses say which slab has a row."""

    capacities: tuple[int, ...]  # rows that sequences can hold
    kv_heads: int
    layers: int | None
    slabs: int  # slabs of one layer of an array
    slab_rows: int | None  # rows of a kv head in a slab; None where they differ between arrays
    separate = False  # whether each sequence has arrays of its own
    joined = False  # whether K and V share one array, whose rows are a row of K and one of V
    paged = False
    listed = False  # whether a page table has single rows

    @property
    def capacity(self) -> int | None:
        """The capacity of every sequence; None where they differ."""
        return self.capacities[0] if len(set(self.capacities)) == 1 else None

    def page_rows(self, tile: int) -> int:
        """The number of rows of a tile that lie in one slab, wherever the tile begins."""
        return tile

    def contiguous_rows(self, tile: int) -> int:
        """How many rows of a tile lie together in memory, wherever the tile begins."""
        return self.page_rows(tile)

    def slab(self, row: Row) -> Index | None:
        """The slab of a layer that has the row; None where there is a single one."""
        del row
        return None

    def row_in_slab(self, position: Index) -> Index:
        return position

    def tables(self, *arrays: Operand) -> tuple[tuple[Operand, ...], ...]:
        """The arrays of a cache (K, V, their scales; None where there are none) as an operand:
        those of each sequence, or those of all.
        """
        columns = [x if self.separate else (x,) for x in arrays if x is not None]
        return tuple(zip(*columns, strict=True))

    def capacities_operand(self) -> Operand | None:
        """int32[M], where capacities differ."""
        return None if self.capacity is not None else jnp.asarray(self.capacities, jnp.int32)

    def view(self, array: Operand) -> Operand:
        """[layers * slabs * kv heads, rows of a slab, H] of one array, for `slice_of`."""
        return array.reshape(-1, *array.shape[-2:])

    def has_layer(self, layer: Index) -> Index:
        """Whether the cache has a layer of this number."""
        assert self.layers is not None
        return (layer >= 0) & (layer < self.layers)

    def arrays_of(
        self, thread: Thread, tables: Sequence[tuple[GmemRef, ...]], sequence: Index
    ) -> tuple[GmemRef, ...]:
        """The arrays that hold the sequence, of an operand made by `tables`."""
        return thread.pick(sequence, tables) if len(tables) > 1 else tables[0]

    def number(self, thread: Thread, row: Row) -> Index:
        """The number of the row among all of its array, in 64 bits."""
        line, slab = thread.to_int64(row.head), self._slab_of_all(row)
        if slab is not None:
            line = thread.to_int64(slab) * self.kv_heads + line
        rows = self.slab_rows if row.capacity is None else thread.to_int64(row.capacity)
        return line * rows + thread.to_int64(self.row_in_slab(row.position))

    def slice_of(self, row: Row) -> tuple[Index, Index]:
        """(index, row) of it in the array's `view`."""
        slab = self._slab_of_all(row)
        index = row.head if slab is None else slab * self.kv_heads + row.head
        return index, self.row_in_slab(row.position)

    def rows_from(self, row: Row, rows: int) -> tuple[Any, ...]:
        """Indices in the array's `view`, but for the columns, of `rows` rows from this one on."""
        index, start = self.slice_of(row)
        return index, pl.ds(start, rows)

    def _slab_of_all(self, row: Row) -> Index | None:
        slab = self.slab(row)
        if row.layer is None:
            return slab
        return row.layer if slab is None else row.layer * self.slabs + slab


class PerSequence(Layout):
    """[layers, kv heads, capacity of the sequence, H] for each sequence."""

    separate = True


class Stacked(Layout):
    """[layers, M, kv heads, capacity, H]."""

    def slab(self, row: Row) -> Index:
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
        """Entries of a sequence in the page table."""
        return self.capacities[0] // self.page_size

    def page_rows(self, tile: int) -> int:
        return math.gcd(self.page_size, tile)

    def slab(self, row: Row) -> Index | None:
        return row.page

    def row_in_slab(self, position: Index) -> Index:
        if isinstance(position, jax.Array):
            return lax.rem(position, jnp.int32(self.page_size))
        return position % self.page_size

    def has_page(self, page: Index) -> Index:
        """Whether what the page table says is a page."""
        return (page >= 0) & (page < self.slabs)

    def lacks_page(self, page: Index) -> Index:
        """The opposite of `has_page`, without an operation for it."""
        return (page < 0) | (page >= self.slabs)

    def entry(self, position: Index) -> Index:
        """The entry of its sequence in the page table that has the page of a position."""
        if isinstance(position, jax.Array):
            return lax.div(position, jnp.int32(self.page_size))
        return position // self.page_size

    def entry_index(self, thread: Thread, sequence: Index, entry: Index) -> Index:
        """The place of an entry of a sequence in the page table, in 64 bits."""
        return thread.to_int64(sequence) * self.entries + thread.to_int64(entry)

    def load_page(
        self, thread: Thread, page_table: GmemRef, sequence: Index, entry: Index
    ) -> Index:
        return thread.load(page_table, self.entry_index(thread, sequence, entry), 4)

    def note_missing(
        self,
        thread: Thread,
        page_table: GmemRef,
        sequence: Index,
        count: Index,
        to: tuple[SmemRef, Index],
    ) -> None:
        """Stores 1 to a word of shared memory, (ref, index), where one of the first `count` pages
        of a sequence is missing. Each thread of the warpgroup looks up every 128th.
        """

        def look(i: Index, carry: list) -> list:
            number = i * mosaic.THREADS + thread.index
            inside = number < count
            entry = thread.select(inside, number, 0)
            page = self.load_page(thread, page_table, sequence, entry)
            bad = thread.select(self.has_page(page), thread.index * 0, 1)
            thread.shared_store(*to, bad, inside & (bad >= 1))
            return carry

        thread.loop((count + (mosaic.THREADS - 1)) // mosaic.THREADS, [], look)


class Interleaved(Paged):
    """K and V in one array [layers, pages, rows of a page, kv heads, H + Hv], and a page table. The
    rows of a head are not contiguous: rows of the other heads lie between them.
    """

    joined = True

    def contiguous_rows(self, tile: int) -> int:
        return self.page_rows(tile) if self.kv_heads == 1 else 1

    def view(self, array: Operand) -> Operand:
        return array.reshape(-1, *array.shape[-3:])

    def number(self, thread: Thread, row: Row) -> Index:
        page: Index = self._slab_of_all(row)
        slab = thread.to_int64(page)
        position = slab * self.page_size + thread.to_int64(self.row_in_slab(row.position))
        return position * self.kv_heads + thread.to_int64(row.head)

    def box(self, rows: int, columns: int) -> tuple[int, ...]:
        """The shape of `rows` rows of a head in the array."""
        return 1, rows, 1, columns

    def coordinates(self, row: Row) -> tuple[Index, ...]:
        """Indices of the row in all axes of the array but the last."""
        return row.page, self.row_in_slab(row.position), row.head

    def rows_from(self, row: Row, rows: int) -> tuple[Any, ...]:
        start = self.row_in_slab(row.position)
        return self._slab_of_all(row), pl.ds(start, rows), row.head


class Listed(Paged):
    """The arrays of a stacked or paged cache, in which each entry of a list [sequences, entries]
    names a row of a layer: its slab's number times the rows of a slab, and its number there.
    """

    listed = True

    @property
    def entries(self) -> int:
        return self.capacities[0]

    @property
    def rows(self) -> int:
        """Rows of a kv head that a layer has."""
        return self.slabs * self.page_size

    def page_rows(self, tile: int) -> int:
        return 1

    def has_page(self, page: Index) -> Index:
        return (page >= 0) & (page < self.rows)

    def entry(self, position: Index) -> Index:
        return position

    def number(self, thread: Thread, row: Row) -> Index:
        assert row.page is not None
        inside = row._replace(page=row.page // self.page_size, position=row.page % self.page_size)
        return super().number(thread, inside)


class Contiguous(Layout):
    """[M, rows, kv heads, H]: no cache."""

    def rows_from(self, row: Row, rows: int) -> tuple[Any, ...]:
        return row.sequence, pl.ds(row.position, rows), row.head


def layout_of(problem: Any) -> Layout:
    """The layout of the caches of a problem that has the fields of a `DecodeProblem`."""
    sizes = (problem.capacities, problem.kv_heads, problem.layers)
    same = problem.capacities[0] if len(set(problem.capacities)) == 1 else None
    if problem.kind == "per_sequence":
        return PerSequence(*sizes, 1, same)
    if problem.kind == "stacked":
        return Stacked(*sizes, problem.sequences, same)
    pool = {"interleaved": Interleaved, "listed": Listed}.get(problem.kind, Paged)
    return pool(*sizes, problem.pages or 0, problem.page_size)


def scalar_operand(number: Operand | None) -> Operand | None:
    """int32[1]: a layer, or a bound of a mask; None where there is none."""
    return None if number is None else jnp.asarray(number, jnp.int32).reshape(1)
