"""Which key tiles a forward kernel's warpgroups, and so its block, take of a tile of work."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention.plan import ROWS, Plan
from pallas_attn.kernels.attention.score_mod import Refs, Tile
from pallas_attn.kernels.attention.tile_range import Span

RECORD = 32  # int32 a tile of work; TMA writes to whole 128 bytes


def records(plan: Plan, segment_spans: Any) -> Any:
    """What segments leave of each tile of work: int32[B, q_tiles, RECORD], the fields of a Span for
    the rows of each warpgroup, then zeros. `segment_spans`: `tile_range.of_segments`.
    """
    units = plan.config.warpgroups
    by_unit = segment_spans.swapaxes(1, 2).reshape(-1, plan.q_tiles, 4 * units)
    return jnp.pad(by_unit, ((0, 0), (0, 0), (0, RECORD - 4 * units)))


def ends(plan: Plan, refs: Refs, tile: Tile) -> Any:
    """What `block_span` wants of a tile's record, from global memory; None where there is none."""
    if not plan.has("q_segment_ids"):
        return None
    at = lax.div(tile.row, jnp.int32(plan.tile_rows))
    fields = [4 * wg + field for wg in range(plan.config.warpgroups) for field in (0, 3)]
    return {field: refs.segment_spans[tile.batch, at, field] for field in fields}


def fills(plan: Plan) -> bool:
    """Whether rows without a key take one tile of keys all the same, hidden from them whole: a
    branch around the rest would cost every tile of work a hundred moves of registers.
    """
    return plan.problem.arrays == ("q_segment_ids", "kv_segment_ids")


def own_span(plan: Plan, record: Any, tile: Tile, wg: Any) -> Span:
    """The key tiles of one warpgroup's rows; lo == hi == 0 where there is none."""
    row: Any = tile.row + wg * ROWS
    rows: Any = ROWS
    if plan.idle_rows:  # all of them past T: as if they were the last one, and of one key tile only
        idle = row >= plan.problem.q_len
        row, rows = jnp.where(idle, plan.problem.q_len - 1, row), jnp.where(idle, 1, ROWS)
    if tile.q_len is not None:
        rows = jnp.minimum(rows, tile.q_len - row)
    span = plan.span(tile.q_offset + row, rows, tile.kv_len)
    if record is not None:  # rows past T have the last one's id
        span = span.within(Span(*(record(4 * wg + i) for i in range(4))))
    if plan.has("mask_array"):
        span = span._replace(full_hi=span.full_lo)
    if plan.idle_rows:
        span = span._replace(lo=jnp.where(idle, jnp.maximum(span.hi - 1, span.lo), span.lo))
    return or_none(plan, tile, rows, span)


def or_none(plan: Plan, tile: Tile, rows: Any, span: Span) -> Span:
    """The key tiles of some rows of a tile; lo == hi == 0 where there are no such keys or rows."""
    if "empty" not in plan.parts:
        return span
    none = span.hi <= span.lo
    if tile.q_len is not None:
        none = none | (rows <= 0)
    return span._replace(lo=jnp.where(none, 0, span.lo), hi=jnp.where(none, 0, span.hi))


def block_span(plan: Plan, record: Any, tile: Tile) -> tuple[Any, Any]:
    """Key tiles [lo, hi) that the block loads: all that some warpgroup wants."""
    spans = [own_span(plan, record, tile, wg) for wg in range(plan.config.warpgroups)]
    if "empty" not in plan.parts:
        lo = functools.reduce(jnp.minimum, [span.lo for span in spans])
        return lo, functools.reduce(jnp.maximum, [span.hi for span in spans])
    lows = [jnp.where(span.hi > span.lo, span.lo, 2**30) for span in spans]
    hi = functools.reduce(jnp.maximum, [span.hi for span in spans])
    if fills(plan):
        hi = jnp.maximum(hi, 1)
        return jnp.minimum(functools.reduce(jnp.minimum, lows), hi - 1), hi
    return jnp.minimum(functools.reduce(jnp.minimum, lows), hi), hi


def filled(plan: Plan, span: Span, hi: Any) -> Span:
    """`own_span`, or where that is empty and `fills` says so the last tile of those to `hi`."""
    if not fills(plan):
        return span
    none = span.hi <= span.lo
    picked = (span.lo, hi - 1), (span.full_lo, hi), (span.full_hi, 0), (span.hi, hi)
    return Span(*(jnp.where(none, there, own) for own, there in picked))
