"""Logits, masks and probabilities on a tile of any layout: for the portable kernels and the
backward. A mask compares the positions of queries and keys; `logits` has the Hopper forward's.
"""

import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.special import Special
from pallas_attn.kernels.attention import logits as row_logits
from pallas_attn.kernels.attention import softmax
from pallas_attn.kernels.attention.logits import tile_of_rows
from pallas_attn.kernels.attention.tiles import KernelContext, LogitTile, QueryRows
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import (
    Index,
    Layout,
    Predicate,
    RegisterTile,
)

array_tiles = Special("kernels.attention.array_tiles")
functions = Special("kernels.attention.functions")
mask_bits = Special("kernels.attention.mask_bits")


def logits(
    ctx: KernelContext,
    rows: QueryRows,
    t: Index,
    s: RegisterTile,
    masked: bool,
    layout: Layout = mosaic.TILE,
) -> RegisterTile:
    """The scores of kv tile t -> logits, in log2 units if `LogitRules.unit` is None."""
    return logits_and_slope(ctx, tile_of_rows(ctx, rows, t, layout), s, masked)[0]


def logits_and_slope(
    ctx: KernelContext, tile: LogitTile, s: RegisterTile, masked: Predicate
) -> tuple[RegisterTile, RegisterTile | None]:
    """Scores -> (logits, in log2 units if `LogitRules.unit` is None and not `natural`; their
    derivative by the scaled score, or None: 1). `masked` may be traced: a branch around the mask
    costs less than a second copy of a loop, whose addresses alone spilled 300 bytes a thread.
    """
    slope = None
    if ctx.plan.logit_rules.unit is None:
        s, slope = row_logits.scaled(ctx, tile, s)
    if isinstance(masked, bool):
        return apply_mask(ctx, tile, s) if masked else s, slope
    return lax.cond(masked, functools.partial(apply_mask, ctx, tile), lambda s: s, s), slope


def apply_mask(ctx: KernelContext, tile: LogitTile, s: RegisterTile) -> RegisterTile:
    """A tile of logits with -inf wherever a query does not see a key.

    Positions that are computed would be computed once, before the loop over the tiles, and held in
    32 registers; `LogitTile.numbers` are loaded where they are used.
    """
    (plan, refs, _), q_axis = ctx, tile.q_axis
    arrays = plan.problem.arrays
    if "q_positions" in arrays:
        own = refs.q_positions.at[tile.batch, pl.ds(tile.query, s.shape[q_axis])]
        q_pos = mosaic.load_vector(own, tile.layout, q_axis, s.shape)
    elif tile.numbers is None:
        q_pos = mosaic.positions(s.shape, q_axis, tile.q_offset + tile.query, tile.layout)
    else:
        numbers = mosaic.load_vector(tile.numbers, tile.layout, q_axis, s.shape)
        q_pos = numbers + (tile.q_offset + tile.query)
    seen = tile.mask.allows(
        q_pos,
        mosaic.positions(s.shape, 1 - q_axis, tile.key, tile.layout),
        tile.kv_len if plan.logit_rules.ragged_keys else None,
        *(_segments(ctx, tile, s.shape) if "q_segment_ids" in arrays else ()),
    )
    bits = getattr(refs, "mask_bits", None)
    if "mask_array" in arrays and bits is None:
        shown = array_tiles.shown_keys(ctx, tile, s.shape)
        seen = shown if seen is True else seen & shown
    if plan.problem.mask_program is not None:
        shown = functions.seen(ctx, tile, s.shape)
        seen = shown if seen is True else seen & shown
    if bits is not None:
        s = mask_bits.hide(bits, tile, s)
    return s if seen is True else jnp.where(seen, s, -jnp.inf)


def probabilities(
    ctx: KernelContext,
    tile: LogitTile,
    s: RegisterTile,
    lse: RegisterTile | None,
    masked: Predicate,
) -> tuple[RegisterTile, RegisterTile | None]:
    """Scores -> (exp(logits - lse), the derivative of `logits_and_slope`). `lse` is in the logits'
    units, one a query, inf for one that has no key, or None where it has been subtracted from the
    scores; `masked`: see `logits_and_slope`.
    """
    s, slope = logits_and_slope(ctx, tile, s, masked)
    across = None if lse is None else lax.broadcast_in_dim(lse, s.shape, [tile.q_axis])
    return exponentials(ctx.plan, s, across), slope


def exponentials(plan: Any, s: RegisterTile, lse: RegisterTile | None) -> RegisterTile:
    """exp(logits - lse); a lse of None is 0."""
    rules = plan.logit_rules
    if rules.unit is not None:
        s = s * rules.unit
    if lse is not None:
        s = s - lse
    if rules.adds:  # -1e10, say, beside which the lse is rounded to a multiple of 2**10
        s = jnp.minimum(s, 0.0)
        if lse is not None and "q_lengths" in plan.problem.arrays:
            # Past a length a bias may hold anything.
            s = jnp.where(lse < jnp.inf, s, -jnp.inf)
    return jnp.exp2(softmax.to_log2(s) if rules.natural else s)


def _segments(ctx: KernelContext, tile: LogitTile, shape: tuple[int, int]) -> list[RegisterTile]:
    """The ids of queries and of keys."""
    return [
        mosaic.load_vector(ids.at[tile.batch, pl.ds(start, shape[axis])], tile.layout, axis, shape)
        for ids, start, axis in (
            (ctx.refs.q_segment_ids, tile.query, tile.q_axis),
            (ctx.refs.kv_segment_ids, tile.key, 1 - tile.q_axis),
        )
    ]


def d_scores(
    p: RegisterTile,
    dp: RegisterTile,
    delta: RegisterTile | None,
    slope: RegisterTile | None = None,
) -> RegisterTile:
    """dS = P (dP - delta), and times the derivative of softcap or of the score function, `slope`,
    if there is one: the gradient of scores, else of logits. `delta` has the shape of dP; None: dP
    has begun with -delta.
    """
    ds = p * (dp if delta is None else dp - delta)
    return ds if slope is None else ds * slope
