"""Masks of keys, mask_array [B|1, N|1, 1, S]: padding masks.

Kernels read the bytes of the boolean array itself. A small launch before them (`spans`, `codes`)
finds which kv tiles are visible whole, in part or not at all: the lanes of a warp load the bytes
and vote. It takes no longer than the conversion of the mask that it replaced. Hidden tiles at
either end are skipped, and whole ones take the path without a mask, so a padding mask costs only
the tile that it cuts. There each thread loads the bytes of its own keys (`shown`).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention.tiles import KernelContext, Span, WorkTile
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.booleans import ROUND, columns, numbers_at, tiles_of
from pallas_attn.kernels.lang.types import (
    GmemRef,
    Index,
    Layout,
    Operand,
    RegisterTile,
)


def row_of(ref: GmemRef, batch: Index, head: Index) -> Index:
    """The index of the row of S bytes that a batch row and head have."""
    batches, heads = ref.shape[:2]
    row: Index = jnp.int32(0)
    if batches > 1:
        row = batch * heads
    return row + head if heads > 1 else row


# ---- tiles ---------------------------------------------------------------------------------------


def _span_of(ref: GmemRef, row: Index, block: int) -> Span:
    """The kv tiles of `block` keys that hold a visible key, lo to hi, and the first run of those
    that are visible whole, where there are more than `ROUND` tiles.
    """
    tiles = -(-ref.shape[3] // block)
    first = _unpacked(tiles_of(ref, row, 0, block, ROUND), 0)

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


def spans(mask: Operand, block: int) -> jax.Array:
    """int32[B|1, N|1, 1 or 4]: for `span_in` the kv tiles of `block` keys that hold a visible key
    and the first run of those that are visible whole. A launch for kernels over query rows. Up to
    `ROUND` tiles are one word: eight rows then share a sector of L2, and fewer reads miss L1.
    """
    tiles = -(-mask.shape[3] // block)

    def kernel(mask: GmemRef, out: GmemRef) -> None:
        batch, head = lax.axis_index("batch"), lax.axis_index("head")
        row = row_of(mask, batch, head)
        if tiles <= ROUND:
            out[batch, head, 0] = tiles_of(mask, row, 0, block, tiles)
            return
        for n, field in enumerate(_span_of(mask, row, block)):
            out[batch, head, n] = field

    batch, heads = mask.shape[:2]
    words = 1 if tiles <= ROUND else 4
    return _launched(kernel, mask, (batch, heads, words), batch=batch, head=heads)


def span_in(words: Sequence[Index]) -> Span:
    """The Span that a row of `spans` holds."""
    return Span(*words) if len(words) > 1 else _unpacked(words[0], 0)


def with_spans(ctx: KernelContext) -> Any:
    """The operands, and the kv tiles that a mask of keys leaves, if there is one."""
    plan, refs, _ = ctx
    if not plan.skips_keys:
        return refs
    return refs._replace(key_spans=spans(refs.mask_array, plan.tiling.block_kv))


def visible_tiles(ctx: KernelContext, tile: WorkTile) -> Span:
    """The kv tiles with a visible key of a work tile's head, and a run of whole ones."""
    return span_in(words_of(ctx, tile))


def words_of(ctx: KernelContext, tile: WorkTile) -> tuple[Index, ...]:
    """The words that `spans` holds for a work tile's head."""
    spans = ctx.refs.key_spans
    batches, heads, words = spans.shape
    batch, head = tile.batch if batches > 1 else 0, tile.head if heads > 1 else 0
    return tuple(spans[batch, head, n] for n in range(words))


def codes(mask: Operand, block: int) -> jax.Array:
    """int32[B|1, N|1, kv tiles]: what a mask shows of each tile of `block` keys, 0 none, 1 some, 2
    all. A launch for kernels over keys.
    """

    def kernel(mask: GmemRef, out: GmemRef) -> None:
        batch, head, tile = (lax.axis_index(name) for name in ("batch", "head", "tile"))
        word = tiles_of(mask, row_of(mask, batch, head), tile, block, 1)
        sees = lax.shift_right_logical(word, jnp.int32(24))  # end of the visible tiles, 0 or 1
        whole = (lax.shift_right_logical(word, jnp.int32(8)) & 255) == 0  # its run begins at 0
        out[batch, head, tile] = sees + whole.astype(jnp.int32)

    sizes = (*mask.shape[:2], -(-mask.shape[3] // block))
    return _launched(kernel, mask, sizes, batch=sizes[0], head=sizes[1], tile=sizes[2])


def _launched(kernel: Any, mask: Operand, sizes: tuple[int, ...], **grid: int) -> jax.Array:
    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(sizes, jnp.int32),
        **mosaic.grid_of(**grid),
        compiler_params=mosaic.without_barriers(),
        kernel_name="key_mask_tiles",
    )
    return call(mask)


# ---- keys within a tile --------------------------------------------------------------------------


def shown(
    ref: GmemRef, row: Index, first: Index, shape: tuple[int, int], axis: int, layout: Layout
) -> RegisterTile:
    """bool `shape`: whether a key is visible; keys lie along `axis` of the tile, from `first` on.
    Keys past S are read as the last one.
    """
    keys, along = ref.shape[3], layout.reduce(1 - axis)
    if keys % shape[axis] == 0 and keys % 2 == 0 and axis == 1 and layout == mosaic.TILE:
        bytes_ = columns(ref, row * keys + first, shape[1])
        return lax.broadcast_in_dim(bytes_, shape, [1]) != 0
    numbers = plgpu.broadcasted_iota(jnp.int32, (shape[axis],), 0, layout=along) + first
    bytes_ = numbers_at(ref, jnp.minimum(numbers, keys - 1) + row * keys, along)
    return lax.broadcast_in_dim(bytes_, shape, [axis]) != 0
