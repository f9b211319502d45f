"""Boundaries at which every kernel family is tried: sizes, lengths and integers."""

import numpy as np

TILE = 64  # rows of the tiles that tests give kernels
CAPACITY = 208  # rows: 13 pages of 16, and no whole number of tiles
LEAST, MOST = int(np.iinfo(np.int32).min), int(np.iinfo(np.int32).max)
ENDS = (LEAST, MOST, -1)  # of the integers that a call hands over: pages, ids, starts, lengths
SIZES = (192, 200)  # whole tiles, and not
PARTS = 10  # partials of one row, more than a thread loads at a time


def lengths(most: int) -> tuple[int, ...]:
    """Of sequences that hold up to `most` rows: none, one, a tile one key short, whole and one key
    long, all but one, and all.
    """
    return (0, 1, TILE - 1, TILE, TILE + 1, most - 1, most)


def with_hard_pages(table: np.ndarray, page_size: int, lengths: tuple[int, ...]) -> np.ndarray:
    """Past its length a sequence has no page, or a number that is none. The last two sequences
    share their first pages.
    """
    table = np.array(table)
    table[-2, :2] = table[-1, :2]
    for m, length in enumerate(lengths):
        first = -(-length // page_size)
        ends = np.resize(np.array([*ENDS, len(table) * 10**6]), table.shape[1])
        table[m, first:] = ends[first:]
    return table
