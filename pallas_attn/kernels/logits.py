"""From scores to logits: scale, softcap, bias and every kind of mask, on a tile in registers."""

from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels import softmax, tiles
from pallas_attn.kernels.flash_plan import Plan
from pallas_attn.kernels.spans import Span


class Refs(NamedTuple):
    """Global memory. None: not in this problem."""

    q: Any
    k: Any
    v: Any
    v_edge: Any  # [B, block_kv, K, Hv]: the value tile that kv_lengths cuts, 0 past the length
    q_offset: Any
    q_lengths: Any
    kv_lengths: Any
    q_segment_ids: Any  # [B, q_tiles * tile_rows]
    kv_segment_ids: Any  # [B, kv_tiles * block_kv]
    segment_spans: Any  # int32[B, 4, q_tiles * warpgroups]: a Span's fields
    bias: Any
    mask_array: Any
    sinks: Any
    dealt: (
        Any  # int32[blocks, n]: how many tiles of work a block takes, and which: `flash_plan.dealt`
    )


class Tile(NamedTuple):
    """A tile of work."""

    batch: Any
    head: Any
    row: Any  # of the block's first query
    q_offset: Any  # position of query row 0
    q_len: Any  # None: all rows count
    kv_len: Any


class Rows(NamedTuple):
    """Where a warpgroup stands: its tile of work, its rows and its key tiles."""

    tile: Tile
    row: Any
    wg: Any
    span: Span


def of_scores(plan: Plan, refs: Refs, rows: Rows, t: Any, s: Any, masked: bool) -> Any:
    """Scores of key tile t -> logits, in log2 units if `plan.unit` is None."""
    problem, start = plan.problem, t * plan.config.block_kv
    if plan.unit is None:
        s = s * problem.scale
        if problem.softcap is not None:
            s = softmax.capped(s, problem.softcap)
        if plan.has("bias"):
            s = s + _read(refs.bias, rows, start, s.shape).astype(jnp.float32)
        s = s * softmax.LOG2_E
    if not masked:
        return s
    seen = problem.mask.allows(
        tiles.positions(s.shape, 0, rows.tile.q_offset + rows.row),
        tiles.positions(s.shape, 1, start),
        rows.tile.kv_len if plan.ragged_keys else None,
        *_segments(plan, refs, rows, start, s.shape),
    )
    if plan.has("mask_array"):
        given = _read(refs.mask_array, rows, start, s.shape) != 0
        seen = given if seen is True else seen & given
    return s if seen is True else jnp.where(seen, s, -jnp.inf)


def _segments(plan: Plan, refs: Refs, rows: Rows, start: Any, shape: Any) -> tuple[Any, Any]:
    if not plan.has("q_segment_ids"):
        return None, None
    q_ids = refs.q_segment_ids.at[rows.tile.batch, pl.ds(rows.row, shape[0])]
    kv_ids = refs.kv_segment_ids.at[rows.tile.batch, pl.ds(start, shape[1])]
    return (
        lax.broadcast_in_dim(tiles.load(q_ids, tiles.ROW), shape, [0]),
        lax.broadcast_in_dim(tiles.load(kv_ids, tiles.COLUMN), shape, [1]),
    )


def _read(ref: Any, rows: Rows, start: Any, shape: tuple[int, int]) -> Any:
    """The part of a [B|1, N|1, T|1, S|1] array that a tile meets."""
    batch, heads, queries, keys = ref.shape
    where = (rows.tile.batch if batch > 1 else 0, rows.tile.head if heads > 1 else 0)
    down, across = pl.ds(rows.row, shape[0]), pl.ds(start, shape[1])
    if queries > 1 and keys > 1:
        return tiles.load(ref.at[*where, down, across], tiles.TILE)
    if queries > 1:
        return lax.broadcast_in_dim(tiles.load(ref.at[*where, down, 0], tiles.ROW), shape, [0])
    if keys > 1:
        return lax.broadcast_in_dim(tiles.load(ref.at[*where, 0, across], tiles.COLUMN), shape, [1])
    return tiles.spread(ref[*where, 0, 0], shape)
