"""Rows of 8-bit numbers that become rows for matmuls, in shared memory. A warpgroup converts them
to float16, which is exact, multiplies them by their row's scale in float32, rounds them to the
dtype of the matmuls and stores them where TMA would have put them.

Each thread converts pieces of 16 bytes, in whose order the numbers lie. Of 8 neighbouring threads 4
have pieces of one row and 4 of the next: what they store lies in different banks, and from global
memory they read half a cache line of each row. The loads of a few pieces are under way before the
first is converted: ptxas cannot know that no store is to where they read, and moves none of them.
"""

import collections
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_attn.kernels.lang import asm, mosaic, thread_math, threads
from pallas_attn.kernels.lang.mosaic import REF, SCALAR, THREADS
from pallas_attn.kernels.mma import packed_rows

COLUMNS = 64  # the columns of a row are a multiple of it


def place(number: Any, words: int) -> tuple[Any, Any]:
    """(row, word of it) of the 16 bytes of this number in a slot; a row has so many words."""
    rest = number // 8
    row = rest // (words // 4) * 2 + number // 4 % 2
    return row, rest % (words // 4) * 4 + number % 4


class Piece(NamedTuple):
    """16 bytes of a thread's: number `number` + `start` of the slot, in row `row` + `below`."""

    number: Any
    start: int
    row: Any
    below: int  # rows: a multiple of 8
    word: Any


def pieces(index: Any, block: int, words: int) -> list[Piece]:
    """The pieces of a thread. Few addresses are computed; others differ from them by constants."""
    result, period = [], 3 if words % 3 == 0 else 1  # after which words repeat
    firsts = [(index + n * THREADS, *place(index + n * THREADS, words)) for n in range(period)]
    for start in range(0, block * words, period * THREADS):
        for number, row, word in firsts:
            result.append(Piece(number, start, row, start // words, word))
    return result


def widen(
    numbers: Any, scales: Any, slot: Any, to: Any, entry: Any, swizzle: int, loads: int
) -> None:
    """The rows in slot `slot` of numbers [slots, bytes] and scales float32[slots, rows], in entry
    `entry` of `to` [entries, rows, columns], which is swizzled. `loads`: how many pieces are being
    loaded while one is converted.
    """
    (_, block, dim), slot_words = to.shape, numbers.shape[1] // 16
    words, across = dim // 16, swizzle // 16
    stored, dtype = (str(x.dtype) for x in (numbers, to))

    def code(numbers, scales, to, slot, entry):
        thread = threads.Thread()
        mine: list[Piece] = pieces(thread.index, block, words)

        def load(piece: Piece) -> tuple[Any, Any]:
            scale = asm.address_of(scales, slot * block + piece.row, 4)
            scale = llvm.load(ir.F32Type.get(), _moved(scale, piece.below, 4), alignment=4)
            address = asm.address_of(numbers, slot * slot_words + piece.number, 16)
            narrow = llvm.load(asm.word_type(16), _moved(address, piece.start, 16), alignment=16)
            return narrow, scale

        loaded = collections.deque(load(piece) for piece in mine[:loads])
        for number, (_, _, row, below, word) in enumerate(mine):
            loaded.extend(load(piece) for piece in mine[number + loads : number + loads + 1])
            narrow, scale = loaded.popleft()
            parts = [vector.extract(narrow, [], [i]) for i in range(4)]
            halves = thread_math.to_16_bits(parts, stored)
            floats = [x for half in halves for x in thread_math.from_word(half, 4, "float16")]
            floats = [arith.mulf(x, scale) for x in floats]
            for n in range(2):
                chunk = packed_rows.swizzled_place(row, word * 2 + n, dim // 8, across)
                address = asm.address_of(to, entry * (block * dim // 8) + chunk, 16)
                wide = thread_math.rounded(floats[8 * n : 8 * n + 8], dtype)
                llvm.store(wide, _moved(address, below * (dim // 8), 16), alignment=16)

    def twin(numbers, scales, to, slot, entry):
        row, word = place(np.arange(block * words), words)
        tile = np.empty((block, words, 16), numbers.dtype)
        tile[row, word] = numbers[int(slot)].reshape(-1, 16)[: block * words]
        scale = scales[int(slot)][:, None]
        to[int(entry)] = (tile.reshape(block, dim).astype(np.float32) * scale).astype(to.dtype)

    room = plgpu.RefType(mosaic.swizzle_transforms(to.dtype, swizzle))
    operands = (numbers, scales, to, slot, entry)
    mosaic.inline(code, twin, operands, (REF, REF, room, SCALAR, SCALAR), None)


def _moved(address: ir.Value, words: int, nbytes: int) -> ir.Value:
    """The address so many words further."""
    return utils.getelementptr(address, [words], asm.word_type(nbytes))
