"""Rows of a latent cache that a list names, on their way to where matmuls have them: TMA of this
GPU takes no list, so threads copy, by cp.async, 16 bytes at a time, to where swizzled shared memory
has them. Eight neighbouring threads copy 128 bytes of a row.
"""

from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np

from pallas_attn.kernels.lang import asm, mosaic, threads
from pallas_attn.kernels.lang.asm import Int
from pallas_attn.kernels.lang.mosaic import REF, SCALAR
from pallas_attn.kernels.lang.threads import Word
from pallas_attn.kernels.lang.types import GmemRef, Index, RegisterTile, SmemRef
from pallas_attn.kernels.mma import packed_rows

TILE = 64  # rows of a tile
ACROSS = 8  # threads that copy 128 bytes of a row side by side: a swizzle
AT_ONCE = mosaic.THREADS // ACROSS  # rows that all threads copy together
EACH = TILE // AT_ONCE  # rows of a tile of which a thread copies some
NUMBER = plgpu.Layout.WG_STRIDED((mosaic.THREADS,), 1)  # a number a thread


class Layer(NamedTuple):
    """The layer of the cache that is read, and the rows that each layer has."""

    number: Index
    rows: int


def row_of(thread: threads.Thread, n: int) -> Index:
    """The n-th row of a tile of which a thread copies some, for n below `EACH`."""
    return thread.index // ACROSS + n * AT_ONCE


def copy(
    kv: GmemRef,
    layer: Layer,
    rows: list[RegisterTile],
    column: int,
    to: SmemRef,
    index: tuple[Index, ...],
) -> None:
    """Issues the copies of columns of a tile of kv [slabs, rows of a slab, H] from `column` on, as
    many as a tile of `to` has, to to[index], which is [TILE, columns]; they are a group. `rows`:
    int32[128] `EACH` times, where each thread's `row_of` the tile lies among the rows of the layer;
    zeros where there is no such row.
    """
    words, chunks, count = kv.shape[2] // 8, to.shape[-1] // 8, len(index)
    to_sizes, layer_rows = to.shape[:count], layer.rows

    def code(kv, to, layer, *numbers):
        thread = threads.Thread()
        index, rows = numbers[:count], numbers[count:]
        entry: Any = None
        for size, x in zip(to_sizes, index, strict=True):
            entry = x if entry is None else entry * size + x
        word = thread.index % ACROSS
        place = packed_rows.swizzled_place(thread.index // ACROSS, word, chunks, ACROSS)
        place = entry * (TILE * chunks) + place
        begin = thread.to_int64(layer) * layer_rows
        for n, row in enumerate(rows):
            row = Int(asm.number_of(row.registers.item()))
            there = exists(row, layer_rows)
            line = begin + thread.to_int64(thread.select(there, row, 0))
            source = line * words + thread.to_int64(word) + column // 8
            for chunk in range(0, chunks, ACROSS):
                to_word = Word(to, place, n * AT_ONCE * chunks + chunk * 8)
                thread.copy_async(to_word, Word(kv, source, chunk), there)
        thread.commit_copies()

    def twin(kv, to, layer, *numbers):
        index, rows = tuple(map(int, numbers[:count])), numbers[count:]
        every = np.stack([np.asarray(x)[::ACROSS] for x in rows]).reshape(-1)
        tile = np.zeros((TILE, chunks * 8), kv.dtype)
        flat = kv.reshape(-1, kv.shape[-1])
        there = exists(every, layer_rows)
        line = int(layer) * layer_rows + every[there]
        tile[there] = flat[line, column : column + chunks * 8]
        to[index] = tile

    room = plgpu.RefType(mosaic.swizzle_transforms(to.dtype, ACROSS * 16))
    kinds = (REF, room, SCALAR, *[SCALAR] * count, *[NUMBER] * len(rows))
    mosaic.inline(code, twin, (kv, to, layer.number, *index, *rows), kinds, None)


def exists(row: Index, rows: int) -> Index:
    """Whether a layer has a row of this number."""
    return (row >= 0) & (row < rows)
