"""Places of rows in a cache, against arrays whose numbers say which row they belong to."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.kernels.attention import cache_layout
from pallas_attn.kernels.attention.cache_layout import Row
from tests.support import operations as support

KINDS = ("per_sequence", "stacked", "paged")
HEADS, PAGES, PAGE_SIZE = 3, 7, 4
TABLE = np.asarray([[4, 0, 6], [5, 2, 1]])


class Numbers:
    """A thread for which numbers of 32 bits are those of 64."""

    def to_int64(self, x):
        return x


def problem_of(kind, layers, capacities=(12, 12)):
    pool = kind in ("paged", "interleaved")
    paged = {"page_size": PAGE_SIZE, "pages": PAGES} if pool else {}
    fields = {"kind": kind, "layers": layers, "capacities": capacities, "kv_heads": HEADS, **paged}
    return dataclasses.replace(support._BASE["decode"], sequences=2, **fields)


def array_of(kind, layers, sequence, capacity):
    """The array that holds a sequence: row [layer, head, position] of a sequence is its number."""
    number = itertools.count()
    rows = np.full((layers, HEADS, capacity), -1)
    for at in np.ndindex(rows.shape):
        rows[at] = next(number)
    if kind == "per_sequence":
        return rows, rows
    others = np.full((layers, 2 if kind == "stacked" else PAGES, HEADS), -1)[..., None]
    if kind == "stacked":
        array = np.repeat(others, capacity, -1)
        array[:, sequence] = rows
        return rows, array
    array = np.repeat(others, PAGE_SIZE, -1)
    for slot, page in enumerate(TABLE[sequence]):
        array[:, page] = rows[..., slot * PAGE_SIZE : (slot + 1) * PAGE_SIZE]
    return rows, array


@pytest.mark.parametrize("layers", [None, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_found(kind, layers):
    layout = cache_layout.layout_of(problem_of(kind, layers))
    for sequence in range(2):
        rows, array = array_of(kind, layers or 1, sequence, 12)
        view = layout.view(np.stack([array] * 8, axis=-1))  # 8: a head dim
        for (layer, head, position), want in np.ndenumerate(rows):
            page = TABLE[sequence, layout.entry(position)] if layout.paged else None
            layer = None if layers is None else layer
            row = Row(sequence, head, position, layer, page)
            assert array.ravel()[layout.number(Numbers(), row)] == want
            of_block = Row(*(None if x is None else jnp.int32(x) for x in row))
            index, within = layout.slice_of(of_block)
            assert (view[index, within] == want).all()


def test_capacities_that_differ():
    layout = cache_layout.layout_of(problem_of("per_sequence", 2, (5, 9)))
    assert layout.capacity is None
    np.testing.assert_array_equal(layout.capacities_operand(), [5, 9])
    rows, array = array_of("per_sequence", 2, 1, 9)
    for (layer, head, position), want in np.ndenumerate(rows):
        row = Row(1, head, position, layer, capacity=9)
        assert array.ravel()[layout.number(Numbers(), row)] == want


@pytest.mark.parametrize("kind", KINDS)
def test_tables(kind):
    layout = cache_layout.layout_of(problem_of(kind, None))
    k, v = (("k0", "k1"), ("v0", "v1")) if layout.separate else ("k", "v")
    want = (("k0", "v0"), ("k1", "v1")) if layout.separate else (("k", "v"),)
    assert layout.tables(k, v, None, None) == want


def test_pages_and_layers_that_there_are():
    layout = cache_layout.layout_of(problem_of("paged", 2))
    assert [bool(layout.has_page(n)) for n in (-2, -1, 0, 6, 7)] == [
        False,
        False,
        True,
        True,
        False,
    ]
    assert [bool(layout.has_layer(n)) for n in (-1, 0, 1, 2)] == [False, True, True, False]
    assert (layout.entries, layout.contiguous_rows(6)) == (3, 2)


def test_interleaved_pages():
    """A row of K and V together; every method finds it."""
    layout = cache_layout.layout_of(problem_of("interleaved", None))
    shape = (PAGES, PAGE_SIZE, HEADS)
    array = np.arange(np.prod(shape)).reshape(shape)
    view = layout.view(np.stack([array] * 8, axis=-1))  # 8: columns of K and V
    for (page, within, head), want in np.ndenumerate(array):
        sequence, slot = (int(x[0]) for x in np.nonzero(page == TABLE)) if page != 3 else (0, None)
        if slot is None:  # a page that nobody has
            continue
        position = slot * PAGE_SIZE + within
        row = Row(sequence, head, position, page=page)
        assert array.ravel()[layout.number(Numbers(), row)] == want
        assert array[layout.coordinates(row)] == want
        index, rows, column = layout.rows_from(row, 1)
        assert (view[index, rows.start, column] == want).all()
    assert layout.box(4, 128) == (1, 4, 1, 128)
    assert layout.tables("kv", None) == (("kv",),)
    assert (layout.page_rows(6), layout.contiguous_rows(6)) == (2, 1)
    of_one_head = dataclasses.replace(problem_of("interleaved", None), kv_heads=1)
    assert cache_layout.layout_of(of_one_head).contiguous_rows(6) == 2
