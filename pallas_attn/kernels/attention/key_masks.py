"""Masks of keys, mask_array [B|1, N|1, 1, S]: padding masks.

Kernels read the bytes of the boolean array itself, so XLA launches nothing before them. The lanes
of a warp load these bytes and vote on which kv tiles are visible whole, in part or not at all
(`tiles_of`): hidden tiles at either end are skipped, and whole ones take the path without a mask,
so a padding mask costs only the tile that it cuts. In other tiles each thread loads the bytes of
its own keys (`shown`).
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention.tiles import Span
from pallas_attn.kernels.lang.booleans import ROUND, numbers_at, tiles_of
from pallas_attn.kernels.lang.types import GmemRef, Index, Layout, RegisterTile


def row_of(ref: GmemRef, batch: Index, head: Index) -> Index:
    """The index of the row of S bytes that a batch row and head have."""
    batches, heads = ref.shape[:2]
    row: Index = jnp.int32(0)
    if batches > 1:
        row = batch * heads
    return row + head if heads > 1 else row


# ---- tiles ---------------------------------------------------------------------------------------


def span_of(ref: GmemRef, row: Index, block: int) -> Span:
    """The kv tiles of `block` keys that hold a visible key, lo to hi, and the first run of those
    that are visible whole.
    """
    tiles = -(-ref.shape[3] // block)
    first = _unpacked(tiles_of(ref, row, 0, block, min(tiles, ROUND)), 0)
    if tiles <= ROUND:
        return first

    def following(n: Index, so_far: Span) -> Span:
        base = n * ROUND
        new = _unpacked(tiles_of(ref, row, base, block, ROUND), base)
        lo = jnp.where(so_far.hi > so_far.lo, so_far.lo, new.lo)
        hi = jnp.where(new.hi > base, new.hi, so_far.hi)
        none = so_far.full_hi <= so_far.full_lo
        goes_on = (so_far.full_hi == base) & (new.full_lo == base)
        full_lo = jnp.where(none, new.full_lo, so_far.full_lo)
        full_hi = jnp.where(none | goes_on, new.full_hi, so_far.full_hi)
        return Span(lo, full_lo, full_hi, hi)

    return lax.fori_loop(1, -(-tiles // ROUND), following, first)


def _unpacked(word: Index, base: Index) -> Span:
    fields = (lax.shift_right_logical(word, jnp.int32(8 * i)) & 255 for i in range(4))
    return Span(*(field + base for field in fields))


def sees_any(word: Index) -> Index:
    """Whether the one tile that a word of `tiles_of` is about has a visible key."""
    return lax.shift_right_logical(word, jnp.int32(24)) > 0


def sees_all(word: Index) -> Index:
    """Whether the one tile that a word of `tiles_of` is about is visible whole."""
    return (lax.shift_right_logical(word, jnp.int32(8)) & 255) == 0  # the run begins there


# ---- keys within a tile --------------------------------------------------------------------------


def shown(
    ref: GmemRef, row: Index, first: Index, shape: tuple[int, int], axis: int, layout: Layout
) -> RegisterTile:
    """bool `shape`: whether a key is visible; keys lie along `axis` of the tile, from `first` on.
    Keys past S are read as the last one.
    """
    keys, along = ref.shape[3], layout.reduce(1 - axis)
    numbers = plgpu.broadcasted_iota(jnp.int32, (shape[axis],), 0, layout=along) + first
    bytes_ = numbers_at(ref, jnp.minimum(numbers, keys - 1) + row * keys, along)
    return lax.broadcast_in_dim(bytes_, shape, [axis]) != 0
