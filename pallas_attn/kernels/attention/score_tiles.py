"""Tiles of bias and mask_array that TMA loads into shared memory beside K.

By loads from global memory a thread gets two numbers at a time, and the scores of a step wait for
all of them: a bias doubled the time of a forward at head dim 32. Here the producer loads the tile
of a work tile's rows together with K of the same keys. A tile lies in panels (`lang.panels`), so
TMA clips it at T and S exactly and no array is padded.

Scales of float8 that each key has (`KeyScales`) arrive in the same way, a row of a kv head.

Arrays that broadcast over queries or keys, and rows whose bytes TMA cannot address (no multiple of
16), are read by `array_tiles.load_tile`.
"""

import math
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionProblem, rows_of_scale
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.types import Barrier, GmemRef, Index, RegisterTile, SmemRef

TMA_ROW = 16  # bytes; every stride of an array is to be a multiple


class ScoreTiles(NamedTuple):
    """The tiles of an array [B|1, N|1, T, S]."""

    name: str  # a field of AttentionInputs
    dtype: str
    width: int  # columns of a panel
    panel_count: int

    def scratch(self, stages: int, rows: int) -> panels.Panels:
        shape = (stages, rows)
        return tuple(panels.scratch(shape, self.dtype, self.width) for _ in range(self.panel_count))


class KeyScales(NamedTuple):
    """The scales of a tile of keys, of an array float32[B, K, padded keys]."""

    name: str  # a field of ForwardRefs
    keys: int
    panel_count: int = 1

    def scratch(self, stages: int, rows: int) -> Any:
        del rows
        return plgpu.SMEM((stages, self.keys), jnp.float32)


def has_key_scales(problem: AttentionProblem, side: int, columns: int, float32_sums: bool) -> bool:
    """Whether each key has a scale of k (`side` 1) or of v (2) in tiles of `columns` keys. A single
    one of v for a tile multiplies the tile's P V, which needs `float32_sums`.
    """
    blocks = problem.scale_blocks[side]
    whole = rows_of_scale(problem.kv_len, blocks) % columns == 0
    return blocks > 1 and not (whole and (side == 1 or float32_sums))


def of_problem(
    problem: AttentionProblem, columns: int, float32_sums: bool = True
) -> tuple[Any, ...]:
    """The arrays of a problem that TMA can load, in tiles of `columns` columns: `ScoreTiles` and
    `KeyScales`.
    """
    arrays = (
        ("bias", problem.bias_shape, problem.bias_dtype),
        ("mask_array", problem.mask_shape, "int8"),
    )
    scales = [
        KeyScales(name, columns)
        for side, name in ((1, "k_units"), (2, "v_units"))
        if has_key_scales(problem, side, columns, float32_sums)
    ]
    return (
        *(
            tiles
            for name, shape, dtype in arrays
            if shape is not None and (tiles := _tiles_of(name, shape, dtype, columns)) is not None
        ),
        *scales,
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


def copies(tiles: tuple[ScoreTiles | KeyScales, ...]) -> int:
    """Copies of an entry, each of which arrives at its barrier."""
    return sum(array.panel_count for array in tiles)


def scratch(tiles: tuple[ScoreTiles | KeyScales, ...], stages: int, rows: int) -> dict[str, Any]:
    """Shared memory of each array by name: [stages, rows, columns] in panels, or [stages, keys]."""
    return {array.name: array.scratch(stages, rows) for array in tiles}


class Place(NamedTuple):
    """The tile of scores that an entry of a ring belongs to."""

    batch: Index
    head: Index
    row: Index
    column: Index


def load(
    ctx: KernelContext, buffers: dict[str, Any], at: Place, slot: Index, ready: Barrier
) -> None:
    """Issues the loads of the tiles of all arrays."""
    for name, buffer in buffers.items():
        array: GmemRef = getattr(ctx.refs, name)
        if not isinstance(buffer, tuple):  # `KeyScales`
            keys = pl.ds(at.column, buffer.shape[1])
            kv_head = lax.div(at.head, jnp.int32(ctx.plan.problem.group))
            plgpu.copy_gmem_to_smem(array.at[at.batch, kv_head, keys], buffer.at[slot], ready)
            continue
        batch = at.batch if array.shape[0] > 1 else 0 * at.batch
        head = at.head if array.shape[1] > 1 else 0 * at.head
        rows = buffer[0].for_tma.shape[1]
        where = (batch, head, pl.ds(at.row, rows))
        panels.load_columns(array, where, buffer, slot, ready, at.column)


def rows_of(buffers: dict[str, Any], slot: Index, wg: Index) -> dict[str, tuple[Any, ...]]:
    """The tiles of a warpgroup's rows."""
    return {
        name: tuple(panel.tile.at[slot, pl.ds(wg * ROWS, ROWS)] for panel in buffer)
        for name, buffer in buffers.items()
        if isinstance(buffer, tuple)
    }


def read(tile: tuple[Any, ...]) -> RegisterTile:
    """A tile of `rows_of` in registers."""
    parts = [mosaic.load(panel, mosaic.TILE) for panel in tile]
    plgpu.commit_smem()  # they have been read, and TMA will write there
    return parts[0] if len(parts) == 1 else lax.concatenate(parts, 1)


def scales_of(scales: SmemRef | GmemRef, shape: tuple[int, ...]) -> RegisterTile:
    """The scales of a tile's keys, broadcast to all rows."""
    return lax.broadcast_in_dim(mosaic.load(scales, mosaic.COLUMN), shape, [1])


# ---- for kernels whose tiles of scores have keys as rows ----------------------------------------

KEYS = 64  # keys of a warpgroup


class BiasOfKeys(NamedTuple):
    """The tile of a bias [B|1, N|1, T, S] for the keys of two warpgroups. A 16-bit tile lies as in
    global memory and is transposed on its way to registers; a float32 bias is transposed by XLA
    beforehand, as no instruction transposes 32-bit numbers.
    """

    dtype: str
    rows: int  # queries

    @property
    def in_16_bits(self) -> bool:
        return jnp.dtype(self.dtype).itemsize == 2

    @property
    def copies(self) -> int:
        return 2 if self.in_16_bits else self.rows // _WIDTH

    def scratch(self, stages: int) -> panels.Panels:
        if self.in_16_bits:
            return (panels.scratch((stages, 2, self.rows), self.dtype, KEYS),)
        shape = stages, 2 * KEYS
        return tuple(panels.scratch(shape, self.dtype, _WIDTH) for _ in range(self.copies))

    def operand(self, bias: Any) -> Any:
        return bias if self.in_16_bits else bias.swapaxes(2, 3)

    def load(
        self, bias: GmemRef, buffer: panels.Panels, at: Place, slot: Index, ready: Barrier
    ) -> None:
        """Issues the loads of the tile: `at.row` is its first query, `at.column` its first key."""
        batch = at.batch if bias.shape[0] > 1 else 0 * at.batch
        head = at.head if bias.shape[1] > 1 else 0 * at.head
        if not self.in_16_bits:
            where = batch, head, pl.ds(at.column, 2 * KEYS)
            return panels.load_columns(bias, where, buffer, slot, ready, at.row)
        where = batch, head, pl.ds(at.row, self.rows)
        for wg in range(2):
            to = buffer[0].for_tma.at[slot, wg]
            some = bias.at[(*where, pl.ds(at.column + wg * KEYS, KEYS))]
            plgpu.copy_gmem_to_smem(some, to, ready)
        return None

    def of_warpgroup(self, buffer: panels.Panels, slot: Index, wg: Index) -> tuple[Any, ...]:
        """The tile [keys, queries] of a warpgroup, for `read`."""
        if not self.in_16_bits:
            return rows_of({"bias": buffer}, slot, wg)["bias"]
        return (buffer[0].tile.at[slot, wg].transpose((1, 0)),)


_WIDTH = 32  # columns of a panel of float32


def bias_of_keys(problem: AttentionProblem, rows: int) -> BiasOfKeys | None:
    """The tile of `rows` queries, or None where TMA cannot load it."""
    shape, dtype = problem.bias_shape, problem.bias_dtype
    if shape is None or min(shape[2:]) == 1 or problem.dtype == "float32" or rows % _WIDTH:
        return None
    itemsize = jnp.dtype(dtype).itemsize
    line = shape[3] if itemsize == 2 else shape[2]
    return BiasOfKeys(dtype, rows) if line * itemsize % TMA_ROW == 0 and itemsize <= 4 else None
