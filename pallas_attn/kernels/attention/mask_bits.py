"""Masks of queries and keys, mask_array [B|1, N|1, T, S], as bits: for kernels whose tiles of
scores have keys as rows.

A thread of such a kernel holds scores of two keys, whose booleans for neighbouring queries are S
bytes apart. A launch before it (`packed`) reads the boolean array itself and makes words of 32
queries, with the keys side by side: an eighth of the bytes, which all heads that share the mask
read once a tile. A tile of 64 queries takes two words a key (`hide`).
"""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_attn.kernels.attention import logits
from pallas_attn.kernels.attention.logits import LogitTile
from pallas_attn.kernels.lang import asm, booleans, mosaic
from pallas_attn.kernels.lang.thread_program import Int, Thread
from pallas_attn.kernels.lang.types import GmemRef, Index, Operand, RegisterTile

WORD = 32  # queries


def takes(shape: tuple[int, ...] | None) -> bool:
    """Whether a mask differs from query to query and from key to key."""
    return shape is not None and min(shape[2:]) > 1


# ---- the launch ----------------------------------------------------------------------------------


def packed(mask: Operand, rows: int, keys: int) -> jax.Array:
    """int32[B|1, N|1, words, `keys` or more]: bit i of word w is of query 32 * w + i; 0 past the
    ends of the mask. `rows`: queries that are read at most.
    """
    width = _width(mask.shape[3])
    count = mosaic.THREADS * width
    words, blocks = pl.cdiv(rows, WORD), pl.cdiv(keys, count)

    def kernel(mask: GmemRef, out: GmemRef) -> None:
        batch, head, word, block = (lax.axis_index(n) for n in ("batch", "head", "word", "block"))
        line = batch * mask.shape[1] + head
        bits = _words(mask, line, word * WORD, block * count)
        mosaic.store(out.at[batch, head, word, pl.ds(block * count, count)], bits)

    batches, heads = mask.shape[:2]
    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((batches, heads, words, blocks * count), jnp.int32),
        **mosaic.grid_of(batch=batches, head=heads, word=words, block=blocks),
        compiler_params=mosaic.without_barriers(),
        kernel_name="mask_bits",
    )
    return call(mask)


def _width(keys: int) -> int:
    """Keys of a thread, whose bytes it loads at once."""
    return next(width for width in (4, 2, 1) if keys % width == 0)


def _words(ref: GmemRef, line: Index, row: Index, key: Index) -> RegisterTile:
    """The words of 32 queries from `row` on, of as many keys from `key` on as a warpgroup has."""
    *_, rows, keys = ref.shape
    width = _width(keys)
    count = mosaic.THREADS * width

    def code(ref: Any, *numbers: Any) -> mgpu.FragmentedArray:
        line, row, key = (Int(x.registers.item()) for x in numbers)
        thread = Thread()
        own = key + thread.index * width
        first = thread.to_int64(line) * (rows * keys) + thread.to_int64(row) * keys
        base = utils.getelementptr(
            asm.pointer_of(ref), [(first + thread.to_int64(own)).value], asm.word_type(1)
        )
        places = [utils.getelementptr(base, [i * keys], asm.word_type(1)) for i in range(WORD)]
        inside = [(own < keys) & (row + i < rows) for i in range(WORD)]
        loaded = [
            Int(booleans.load(place, where, width))
            for place, where in zip(places, inside, strict=True)
        ]
        # Byte j of `eights[g]`: eight queries of key j.
        eights = []
        for group in range(0, WORD, 8):
            eight = loaded[group]
            for i in range(1, 8):
                eight = eight | loaded[group + i] << i
            eights.append(eight)
        registers = []
        for j in range(width):
            bytes_ = [((eight >> 8 * j) & 255) << 8 * g for g, eight in enumerate(eights)]
            registers.append((bytes_[0] | bytes_[1] | bytes_[2] | bytes_[3]).value)
        kind = ir.VectorType.get((width,), asm.i32())
        return mosaic.array_of([vector.from_elements(kind, registers)], (count,), layout, True)

    def twin(ref: Any, line: Any, row: Any, key: Any) -> np.ndarray:
        seen = np.zeros((WORD, count), np.uint64)
        part = np.asarray(ref).reshape(-1, rows, keys)[int(line)]
        part = part[int(row) : int(row) + WORD, int(key) : int(key) + count]
        seen[: part.shape[0], : part.shape[1]] = part
        bits = (seen << np.arange(WORD, dtype=np.uint64)[:, None]).sum(axis=0)
        return bits.astype(np.uint32).view(np.int32)

    layout = plgpu.Layout.WG_STRIDED((count,), width)
    result = plgpu.ShapeDtypeStruct((count,), jnp.int32, layout=layout)
    args = ref, *(jnp.int32(0) + number for number in (line, row, key))
    types = plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * 3
    return mosaic.inline(code, twin, args, types, result)


# ---- its words, in a kernel over keys ------------------------------------------------------------


def hide(ref: GmemRef, tile: LogitTile, s: RegisterTile) -> RegisterTile:
    """Logits [keys, queries] with -inf where a bit is not set. `tile.query` is a multiple of 32, or
    of the tile's queries where they are fewer.
    """
    assert tile.q_axis == 1
    batches, heads = ref.shape[:2]
    where = tile.batch if batches > 1 else 0, tile.head if heads > 1 else 0
    keys, queries = s.shape
    first, layout = lax.div(tile.query, jnp.int32(WORD)), tile.layout.reduce(1)
    words = [
        mosaic.load(ref.at[*where, first + n, pl.ds(tile.key, keys)], layout)
        for n in range(pl.cdiv(queries, WORD))
    ]
    if queries < WORD:
        within = mosaic.filled((keys,), lax.rem(tile.query, jnp.int32(WORD)), jnp.int32)
        words = [lax.shift_right_logical(words[0], within)]
    if tile.layout == mosaic.TILE:
        return logits.mask_columns(s, None, None, words=tuple(words))
    column = mosaic.positions(s.shape, 1, 0, tile.layout)
    word = mosaic.broadcast_rows(words[0], s.shape)
    for n, other in enumerate(words[1:], 1):
        word = jnp.where(column < n * WORD, word, mosaic.broadcast_rows(other, s.shape))
    shown = lax.shift_right_logical(word, column & (WORD - 1)) & 1
    return jnp.where(shown != 0, s, -jnp.inf)
