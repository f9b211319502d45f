"""Bias and mask_array by tiles in shared memory, which TMA brings there beside K.

Out of global memory a warpgroup would load two numbers a thread at a time, a step's scores waiting
for all of them: a bias doubled the time of a forward at head dim 32. Here the producer asks for the
tile of a work tile's rows when it asks for the K of the same keys. A tile lies in panels
(`lang.panels`), so TMA clips it at T and S exactly and no array is padded.

Arrays that broadcast over queries or keys, and rows whose bytes TMA cannot address (no multiple of
16), are read by `logits.load_tile`.
"""

import math
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionProblem
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.types import Barrier, GmemRef, Index, RegisterTile

TMA_ROW = 16  # bytes that every stride of an array is a multiple of


class ScoreTiles(NamedTuple):
    """The tiles of an array [B|1, N|1, T, S]."""

    name: str  # a field of AttentionInputs
    dtype: str
    width: int  # columns of a panel
    count: int  # panels of a tile

    def scratch(self, stages: int, rows: int) -> panels.Panels:
        shape = (stages, rows)
        return tuple(panels.scratch(shape, self.dtype, self.width) for _ in range(self.count))


def of_problem(problem: AttentionProblem, columns: int) -> tuple[ScoreTiles, ...]:
    """The arrays of a problem that come by tiles of so many columns."""
    arrays = (
        ("bias", problem.bias_shape, problem.bias_dtype),
        ("mask_array", problem.mask_shape, "int8"),
    )
    return tuple(
        tiles
        for name, shape, dtype in arrays
        if shape is not None and (tiles := _tiles_of(name, shape, dtype, columns)) is not None
    )


def _tiles_of(name: str, shape: tuple[int, ...], dtype: str, columns: int) -> ScoreTiles | None:
    itemsize = jnp.dtype(dtype).itemsize
    if min(shape[2:]) == 1 or shape[3] * itemsize % TMA_ROW or itemsize > 4:
        return None
    swizzle = math.gcd(columns * itemsize, 128)
    if swizzle < 32:
        return None
    width = swizzle // itemsize
    return ScoreTiles(name, dtype, width, columns // width)


def copies(tiles: tuple[ScoreTiles, ...]) -> int:
    """Copies of an entry, each of which arrives at its barrier."""
    return sum(array.count for array in tiles)


def scratch(tiles: tuple[ScoreTiles, ...], stages: int, rows: int) -> dict[str, panels.Panels]:
    """Shared memory of each array, by name: [stages, rows, columns] in panels."""
    return {array.name: array.scratch(stages, rows) for array in tiles}


class Place(NamedTuple):
    """The tile of scores that an entry of a ring belongs to."""

    batch: Index
    head: Index
    row: Index
    column: Index


def load(
    ctx: KernelContext, buffers: dict[str, panels.Panels], at: Place, slot: Index, ready: Barrier
) -> None:
    """Asks for the tiles of all arrays."""
    for name, buffer in buffers.items():
        array: GmemRef = getattr(ctx.refs, name)
        batch = at.batch if array.shape[0] > 1 else 0 * at.batch
        head = at.head if array.shape[1] > 1 else 0 * at.head
        rows = buffer[0].for_tma.shape[1]
        where = (batch, head, pl.ds(at.row, rows))
        panels.load_columns(array, where, buffer, slot, ready, at.column)


def rows_of(
    buffers: dict[str, panels.Panels], slot: Index, wg: Index
) -> dict[str, tuple[Any, ...]]:
    """The tiles of a warpgroup's rows."""
    return {
        name: tuple(panel.tile.at[slot, pl.ds(wg * ROWS, ROWS)] for panel in buffer)
        for name, buffer in buffers.items()
    }


def read(tile: tuple[Any, ...]) -> RegisterTile:
    """A tile of `rows_of` in registers."""
    parts = [mosaic.load(panel, mosaic.TILE) for panel in tile]
    plgpu.commit_smem()  # they have been read, and TMA will write there
    return parts[0] if len(parts) == 1 else lax.concatenate(parts, 1)
