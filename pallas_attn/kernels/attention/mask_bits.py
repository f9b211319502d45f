"""Masks of queries and keys, mask_array [B|1, N|1, T, S], as bits: for kernels whose tiles of
scores have keys as rows.

A thread of such a kernel holds scores of two keys, whose booleans for neighbouring queries are S
bytes apart. A launch before it (`packed`) reads the boolean array itself and makes words of 32
queries, with the keys side by side: an eighth of the bytes, which all heads that share the mask
read once a tile. A tile of 64 queries takes two words a key (`hide`).
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention.logits import mask_columns
from pallas_attn.kernels.attention.tiles import LogitTile
from pallas_attn.kernels.lang import booleans, mosaic
from pallas_attn.kernels.lang.booleans import WORD
from pallas_attn.kernels.lang.types import GmemRef, Operand, RegisterTile


def takes(shape: tuple[int, ...] | None) -> bool:
    """Whether a mask differs from query to query and from key to key."""
    return shape is not None and min(shape[2:]) > 1


# ---- the launch ----------------------------------------------------------------------------------


def packed(mask: Operand, rows: int, keys: int) -> jax.Array:
    """int32[B|1, N|1, words, `keys` or more]: bit i of word w is of query 32 * w + i; 0 past the
    ends of the mask. `rows`: queries that are read at most.
    """
    count = booleans.keys_of_words(mask.shape[3])
    words, blocks = pl.cdiv(rows, WORD), pl.cdiv(keys, count)

    def kernel(mask: GmemRef, out: GmemRef) -> None:
        batch, head, word, block = (lax.axis_index(n) for n in ("batch", "head", "word", "block"))
        line = batch * mask.shape[1] + head
        bits = booleans.words(mask, line, word * WORD, block * count)
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
        return mask_columns(s, None, None, words=tuple(words))
    column = mosaic.positions(s.shape, 1, 0, tile.layout)
    word = mosaic.broadcast_rows(words[0], s.shape)
    for n, other in enumerate(words[1:], 1):
        word = jnp.where(column < n * WORD, word, mosaic.broadcast_rows(other, s.shape))
    shown = lax.shift_right_logical(word, column & (WORD - 1)) & 1
    return jnp.where(shown != 0, s, -jnp.inf)
