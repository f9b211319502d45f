"""Boundaries at which every kernel family is tried: sizes, lengths and integers."""

import numpy as np

TILE = 64  # rows of the tiles that tests give kernels
CAPACITY = 208  # rows: 13 pages of 16, and no whole number of tiles
LEAST, MOST = int(np.iinfo(np.int32).min), int(np.iinfo(np.int32).max)
ENDS = (LEAST, MOST, -1)  # integers that a call may pass: pages, ids, starts, lengths
SIZES = (192, 200)  # whole tiles, and not
PARTS = 10  # partials of one row, more than a thread loads at a time


def lengths(most: int) -> tuple[int, ...]:
    """Lengths of sequences that hold up to `most` rows: 0, 1, a tile less a key, a tile, a tile and
    a key, all rows but one, and all.
    """
    return (0, 1, TILE - 1, TILE, TILE + 1, most - 1, most)


def with_hard_pages(table: np.ndarray, page_size: int, lengths: tuple[int, ...]) -> np.ndarray:
    """A page table whose entries past a sequence's length are no pages of the pool, and whose last
    two sequences share their first pages.
    """
    table = np.array(table)
    table[-2:-1, :2] = table[-1, :2]  # a sequence that is alone has its own
    for m, length in enumerate(lengths):
        first = -(-length // page_size)
        ends = np.resize(np.array([*ENDS, len(table) * 10**6]), table.shape[1])
        table[m, first:] = ends[first:]
    return table
