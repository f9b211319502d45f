"""Latent rows of bytes (`_call/byte_rows.py`) that become rows for matmuls, in shared memory.

A thread has one row of a tile, and some of its words. So 8 neighbouring threads have 8 rows, whose
words lie in different banks: raw rows are 41 words of 16 bytes, and swizzled ones are made so.
"""

from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_attn._call.byte_rows import BYTE_DTYPE, BYTE_ROW, REST_DTYPE, SCALE_COLUMNS
from pallas_attn.kernels.lang import asm, thread_math, threads
from pallas_attn.kernels.lang.mosaic import THREADS, inline
from pallas_attn.kernels.lang.thread_program import Int
from pallas_attn.kernels.lang.types import Index, SmemRef
from pallas_attn.kernels.mma import packed_rows
from pallas_attn.kernels.mma.mma_rowmajor import REF, SCALAR

SWIZZLE = 128  # bytes
WORD = 16  # bytes


class Tile(NamedTuple):
    """Scalars: the tile's rows are in slots `slot`, `slot` + 1, .. of `raw` [slots, rows, bytes],
    behind the last of which comes the first. They go to entry `entry` of `to`.
    """

    slot: Index
    entry: Index


def widen(raw: SmemRef, to: SmemRef, tile: Tile, begin: int) -> None:
    """Columns from `begin` on of a tile, to an entry of `to` [entries, rows, columns], which is
    swizzled.
    """
    slots, slot_rows, _ = raw.shape
    _, rows, width = to.shape
    dtype, parts = str(to.dtype), THREADS // rows
    end, end_of_v = begin + width, BYTE_ROW.v_head_dim
    narrow = range(begin // WORD, min(end, end_of_v) // WORD, parts)
    rest = range(max(begin - end_of_v, 0) // 8, (end - end_of_v) // 8, parts)

    def code(raw, slot, to, entry):
        thread = threads.Thread()
        row, part = thread.index % rows, thread.index // rows
        number = Int(slot.registers.item()) + row // slot_rows
        number = thread.select(number >= slots, number - slots, number)
        line = (number * slot_rows + row % slot_rows) * (BYTE_ROW.size // WORD)
        of_row, line = (asm.address_of(raw, word, WORD) for word in (line, line + part))
        chunks = width // 8  # words of a wide row
        first = Int(entry.registers.item()) * (rows * chunks)

        def load(word: int) -> ir.Value:
            return llvm.load(asm.word_type(WORD), _moved(line, word), alignment=WORD)

        def store(chunk: Index, value: ir.Value) -> None:
            place = packed_rows.swizzled_place(row, chunk, chunks, SWIZZLE // WORD)
            llvm.store(value, asm.address_of(to, first + place, WORD), alignment=WORD)

        if narrow:
            words = [load(word) for word in narrow]
            kind = ir.VectorType.get((BYTE_ROW.scales,), ir.F32Type.get())
            scales = llvm.load(kind, _moved(of_row, end_of_v // WORD), alignment=WORD)
        for word, number in zip(narrow, words if narrow else [], strict=True):
            scale = vector.extract(scales, [], [word * WORD // SCALE_COLUMNS])
            quarters = [vector.extract(number, [], [i]) for i in range(4)]
            pairs = thread_math.to_16_bits(quarters, BYTE_DTYPE)
            floats = [x for pair in pairs for x in thread_math.from_word(pair, 4, "float16")]
            floats = [arith.mulf(x, scale) for x in floats]
            for n in range(2):
                wide = thread_math.rounded(floats[8 * n : 8 * n + 8], dtype)
                store(part * 2 + (word * 2 + n - begin // 8), wide)
        for word in rest:
            value = load(BYTE_ROW.rest_begins // WORD + word)
            if dtype != REST_DTYPE:
                quarters = [vector.extract(value, [], [i]) for i in range(4)]
                floats = [y for x in quarters for y in thread_math.from_word(x, 4, REST_DTYPE)]
                value = thread_math.rounded(floats, dtype)
            store(part + (word + (end_of_v - begin) // 8), value)

    def twin(raw, slot, to, entry):
        order = (int(slot) + np.arange(rows // slot_rows)) % slots
        tile = np.ascontiguousarray(raw[order].reshape(rows, -1))
        ends = BYTE_ROW.v_head_dim, BYTE_ROW.rest_begins
        numbers, scales, others = (np.ascontiguousarray(x) for x in np.split(tile, ends, axis=1))
        v = numbers.view(BYTE_DTYPE).astype(np.float32)
        v = v * np.repeat(scales.view(np.float32), SCALE_COLUMNS, axis=1)
        others = others.view(REST_DTYPE).astype(np.float32)
        wide = np.concatenate([v, others], axis=1)[:, begin : begin + width]
        to[int(entry)] = wide.astype(to.dtype)

    tiled: Any = plgpu.TilingTransform
    swizzled: Any = plgpu.SwizzleTransform
    room = plgpu.RefType(transforms=(tiled((8, SWIZZLE // 2)), swizzled(SWIZZLE)))
    operands = raw, tile.slot, to, tile.entry
    inline(code, twin, operands, (REF, SCALAR, room, SCALAR), None)


def _moved(address: ir.Value, words: int) -> ir.Value:
    """The address so many words further."""
    return utils.getelementptr(address, [words], asm.word_type(WORD))
