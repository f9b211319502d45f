"""What a tile of keys adds to the online softmax of a block's warps."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import softmax
from pallas_attn.kernels.decode import logits as decode_logits
from pallas_attn.kernels.decode.logits import ROWS
from pallas_attn.kernels.decode.producer import Smem
from pallas_attn.kernels.decode.scheduler import Piece, Plan
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.mma import mma_rowmajor, mma_sync, mma_tf32

Array = Any


class State(NamedTuple):
    """An online softmax of every warp, carried from tile to tile.

    Over a quantised cache `acc` is a sum of values that are not multiplied by their scales. Their
    weights, probabilities times scales, have a top of their own, so that float16 holds them.
    """

    acc: Array  # [64, Hv]
    total: Array  # [64, PARTS]
    top: Array  # [64]
    peak: Array | None  # [64]: what acc is relative to; None: to top


def nothing(plan: Plan) -> State:
    """Of no key yet."""
    return State(
        mosaic.filled((ROWS, mma_rowmajor.width_of(plan.problem.v_head_dim)), 0.0),
        mosaic.filled((ROWS, softmax.PARTS), 0.0),
        mosaic.filled((ROWS,), -jnp.inf),
        mosaic.filled((ROWS,), -jnp.inf) if plan.problem.quantized else None,
    )


def scores(plan: Plan, smem: Smem, queries: tuple[Any, Array | None], slot: Any) -> Array:
    """Of a tile of keys; `queries`: the rows, and what their scores are to be multiplied by."""
    q, units = queries
    if plan.wide:
        return mma_tf32.scores(q, smem.k, slot, plan.split)
    s = mma_rowmajor.scores(q, smem.k, slot, plan.split)
    if units is None:
        return s
    s = s * mma_rowmajor.of_keys(smem.k_scale, slot, plan.split)
    return s * mosaic.down_rows(units, s.shape)


def attend(plan: Plan, smem: Smem, piece: Piece, at: tuple, carried: tuple) -> State:
    """One tile of keys, from its scores on."""
    (tile, slot), (s, state) = at, carried
    scales = (
        mma_rowmajor.of_keys(smem.v_scale, slot, plan.split) if plan.problem.quantized else None
    )
    logits, weights = decode_logits.logits(plan, piece, tile, (s, scales))
    unit = None if plan.problem.quantized else plan.unit_of_logits
    join = functools.partial(mma_sync.of_both, op="maximum") if plan.folded else None
    new = softmax.step(logits, unit, state.top, guarded=True, join=join)
    if weights is None:

        def scaled():
            return (
                state.acc * mosaic.down_rows(new.shrink, state.acc.shape),
                state.total * mosaic.down_rows(new.shrink, state.total.shape),
            )

        acc, total = lax.cond(new.moved != 0, scaled, lambda: (state.acc, state.total))
        p, peak = new.p, None
    else:
        total = state.total * mosaic.down_rows(new.shrink, state.total.shape)
        heavy = softmax.step(weights, None, state.peak, guarded=True)
        acc = lax.cond(
            heavy.moved != 0,
            lambda: state.acc * mosaic.down_rows(heavy.shrink, state.acc.shape),
            lambda: state.acc,
        )
        p, peak = heavy.p, heavy.top
    if plan.wide:
        acc = mma_tf32.weigh(acc, p, smem.v, slot, plan.split)
    else:
        acc = mma_rowmajor.weigh(acc, p.astype(plan.operands), smem.v, slot, plan.split)
    return State(acc, total + new.total, new.top, peak)
