"""`mainloop` over caches of 8-bit numbers with a float32 scale a row: keys and values become
float16 for matmuls, scores are multiplied by the scales of keys, probabilities by those of values.
Without scales the numbers are the values.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp

from pallas_attn.kernels.attention import softmax
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.decode import mainloop
from pallas_attn.kernels.decode.mainloop import ROWS, TileAt
from pallas_attn.kernels.decode.plan import Plan, Steps
from pallas_attn.kernels.decode.scheduler import WorkTile
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import Index, RegisterTile
from pallas_attn.kernels.mma import column_parts, mma_rowmajor


class State(NamedTuple):
    """`mainloop.State`, of which `acc` is a sum of values that are not multiplied by their scales.
    Their weights, probabilities times scales, have a maximum of their own, so that float16 holds
    them.
    """

    acc: RegisterTile  # [64, Hv], relative to weight_max
    row_sum: RegisterTile  # [64, softmax.PARTIALS]
    row_max: RegisterTile  # [64]
    weight_max: RegisterTile  # [64]


class Queries(NamedTuple):
    """The query rows of all warps, as float16."""

    q: RegisterTile
    units: RegisterTile  # [64]: the factors of their scores


class Logits(NamedTuple):
    """In log2 units."""

    logits: RegisterTile
    weights: RegisterTile  # logits of probabilities times the scales of values


def initial(plan: Plan) -> State:
    return State(*mainloop.initial(plan), mosaic.filled((ROWS,), -jnp.inf))


def load_queries(ctx: KernelContext, work: WorkTile) -> Queries:
    return Queries(*mma_rowmajor.float16_queries(mainloop.query_rows(ctx, work), ctx.plan.split))


def scores(ctx: KernelContext, queries: Queries, slot: Index) -> RegisterTile:
    split = ctx.plan.split
    dim = ctx.plan.problem.head_dim
    s = mma_rowmajor.scores(queries.q, ctx.smem.k, slot, split, dim)
    if ctx.plan.scaled:
        s = s * mma_rowmajor.number_of_each_key(ctx.smem.k_scale, slot, split)
    s = s * mosaic.broadcast_rows(queries.units, s.shape)
    return s if split.parts == 1 else column_parts.sum_of_parts(s, ctx.smem.scores, split)


def attend(ctx: KernelContext, work: WorkTile, at: TileAt, s: RegisterTile, state: State) -> State:
    """`mainloop.attend`; without scales, probabilities themselves are the weights."""
    plan, split = ctx.plan, ctx.plan.split
    scales = None
    if plan.scaled:
        scales = mma_rowmajor.number_of_each_key(ctx.smem.v_scale, at.slot, split)
    if plan.unit_of_logits is None:
        s = mainloop.logits_of_scores(ctx, work, at.tile, s)
    else:
        s = s * plan.unit_of_logits
    if scales is None:
        s = mainloop.masked(ctx, work, at.tile, s)
        new = heavy = softmax.step(s, None, state.row_max, empty_ok=True)
        acc, row_sum = softmax.rescaled(new, (state.acc, state.row_sum))
    else:
        tiles = mainloop.masked(ctx, work, at.tile, Logits(s, s + jnp.log2(scales)))
        new = softmax.step(tiles.logits, None, state.row_max, empty_ok=True)
        row_sum = state.row_sum * mosaic.broadcast_rows(new.rescale, state.row_sum.shape)
        heavy = softmax.step(tiles.weights, None, state.weight_max, empty_ok=True)
        acc = softmax.rescaled(heavy, state.acc)
    p, v = heavy.p.astype("float16"), ctx.smem.v
    acc = mma_rowmajor.matmul_add(acc, p, v, at.slot, split, plan.v_column)
    return State(acc, row_sum + new.row_sum, new.row_max, heavy.row_max)


def totals(plan: Plan, state: State) -> tuple[RegisterTile, RegisterTile]:
    row_sum, none = state.row_sum.sum(axis=1), state.weight_max == -jnp.inf
    unit = jnp.exp2(state.weight_max - jnp.where(none, 0.0, state.row_max))
    factor = mosaic.broadcast_rows(jnp.where(none, 0.0, unit), state.acc.shape)
    return state.acc * factor, row_sum


epilogue = functools.partial(mainloop.epilogue, totals=totals)
STEPS = Steps(initial, load_queries, scores, attend, epilogue)
