"""Tiles of bias and mask_array, and of vectors along one axis, as logits lie in registers."""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.special import Special
from pallas_attn.kernels.attention.tiles import KernelContext, LogitTile
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.gather import gather
from pallas_attn.kernels.lang.types import GmemRef, Index, RegisterTile

key_masks = Special("kernels.attention.key_masks")
score_tiles = Special("kernels.attention.score_tiles")


def shown_keys(ctx: KernelContext, tile: LogitTile, shape: tuple[int, int]) -> RegisterTile:
    """bool: what mask_array shows of a tile of logits."""
    if not ctx.plan.problem.masks_keys:
        return of_array(ctx, "mask_array", tile, shape) != 0
    row = key_masks.row_of(ctx.refs.mask_array, tile.batch, tile.head)
    keys = (tile.key, shape, 1 - tile.q_axis, tile.layout)
    return key_masks.shown(ctx.refs.mask_array, row, *keys)


def of_array(
    ctx: KernelContext, name: str, tile: LogitTile, shape: tuple[int, int]
) -> RegisterTile:
    """The part of bias or mask_array that belongs to a tile of logits."""
    if tile.in_smem and name in tile.in_smem:
        return score_tiles.read(tile.in_smem[name])
    ref, tiling = getattr(ctx.refs, name), ctx.plan.tiling
    whole = (tiling.padded_rows, tiling.padded_keys)
    whole = whole[::-1] if tile.q_axis else whole
    if all(size in (1, most) for size, most in zip(ref.shape[2:], whole, strict=True)):
        return load_tile(ref, tile, shape)
    return _load_clipped(ref, tile, shape)


def load_tile(ref: GmemRef, tile: LogitTile, shape: tuple[int, int]) -> RegisterTile:
    """The part of a [B|1, N|1, T|1, S|1] array that belongs to a tile of logits ([B|1, N|1, S|1,
    T|1] where the tile's rows are keys: Mosaic loads no transposed tile).
    """
    batch, heads, *sizes = ref.shape
    where = (tile.batch if batch > 1 else 0, tile.head if heads > 1 else 0)
    starts = (tile.key, tile.query) if tile.q_axis else (tile.query, tile.key)
    down, across = (pl.ds(start, size) for start, size in zip(starts, shape, strict=True))
    if min(sizes) > 1:
        return mosaic.load(ref.at[*where, down, across], tile.layout)
    if sizes[0] > 1:
        return mosaic.load_vector(ref.at[*where, down, 0], tile.layout, 0, shape)
    if sizes[1] > 1:
        return mosaic.load_vector(ref.at[*where, 0, across], tile.layout, 1, shape)
    return mosaic.broadcast_scalar(ref[*where, 0, 0], shape)


def _load_clipped(ref: GmemRef, tile: LogitTile, shape: tuple[int, int]) -> RegisterTile:
    """`load_tile` of an array that ends within a tile, [.., T, S] also where the tile's rows are
    keys: places past the end read the last number before it, so that no array is padded. Each
    number has an address of its own.
    """
    batches, heads, *sizes = ref.shape
    line = (tile.batch if batches > 1 else 0) * heads + (tile.head if heads > 1 else 0)
    starts = (tile.key, tile.query) if tile.q_axis else (tile.query, tile.key)
    line, strides = line * (sizes[0] * sizes[1]), (sizes[1], 1)
    if tile.q_axis and min(sizes) > 1:
        sizes, strides = sizes[::-1], strides[::-1]
    along = [axis for axis in range(2) if sizes[axis] > 1]
    numbers = {
        axis: _numbers(tile, axis, (starts[axis], shape[axis], sizes[axis])) * strides[axis]
        for axis in along
    }
    if len(along) == 1:
        (axis,) = along
        vector = gather(ref, numbers[axis] + line, tile.layout.reduce(1 - axis))
        return lax.broadcast_in_dim(vector, shape, [axis])
    down, across = numbers[0] + line, numbers[1]
    index = lax.broadcast_in_dim(down, shape, [0]) + lax.broadcast_in_dim(across, shape, [1])
    return gather(ref, index, tile.layout)


def _numbers(tile: LogitTile, axis: int, span: tuple[Index, int, int]) -> RegisterTile:
    """start, start + 1, .. along an axis of a tile, the last of `size` at most."""
    start, count, size = span
    layout = tile.layout.reduce(1 - axis)
    numbers = plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=layout) + start
    return jnp.minimum(numbers, size - 1)
