"""Loads of bias and mask_array where an array ends within a tile: places past the end read the last
number before it, so that no array is padded. Each number has an address of its own.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention.tiles import LogitTile
from pallas_attn.kernels.lang.gather import gather
from pallas_attn.kernels.lang.types import GmemRef, Index, RegisterTile


def load_tile(ref: GmemRef, tile: LogitTile, shape: tuple[int, int]) -> RegisterTile:
    """`array_tiles.load_tile` of an array whose last two axes have any length; [.., T, S] also
    where the tile's rows are keys.
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
