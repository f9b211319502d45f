"""The steps of the portable forward whose rows two warps share (`squares`, `pairs`): head dims
above 128, where registers do not suffice for 32 rows a warp. P and the largest numbers of the rows
go through shared memory.

`attend_ahead` makes the scores of a tile before it has the exponents of the one before. What the
softmax has to do stands between matmuls (`beside`), which warps would otherwise wait for.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import score_mod, sm80_column_stream, softmax
from pallas_attn.kernels.attention.score_mod import Refs, Rows
from pallas_attn.kernels.attention.sm80_common import turn
from pallas_attn.kernels.flash_fwd.sm80_load import Smem, keys, rows_of_q
from pallas_attn.kernels.lang import mosaic, warp_vote
from pallas_attn.kernels.mma import mma_2x2, mma_sync


class State(NamedTuple):
    """What is carried from key tile to key tile."""

    acc: Any  # [rows, v_width]: the output before it is divided; or its parts by columns
    total: Any  # [rows, PARTS]
    top: Any  # [rows]


def nothing(plan: Any) -> State:
    rows = plan.own_rows
    if plan.config.down == 2:
        acc, total = (
            plgpu.layout_cast(jnp.zeros(shape, jnp.float32), mosaic.standing(shape, 2))
            for shape in ((rows, plan.v_width), (rows, mma_2x2.PARTIALS))
        )
        top = jnp.full((rows,), -jnp.inf, jnp.float32)
        return State(acc, total, plgpu.layout_cast(top, mma_2x2.row_layout(rows)))
    parts: Any = sm80_column_stream.nothing(plan, plan.v_parts) if plan.config.columns else None
    return State(
        mosaic.filled((rows, plan.v_width), 0.0) if parts is None else parts,
        mosaic.filled((rows, softmax.PARTS), 0.0),
        mosaic.filled((rows,), -jnp.inf),
    )


def of_pairs(plan: Any, smem: Smem, rows: Rows, slot: Any, state: State, tile: Any) -> State:
    """A step from (logits, whether a row may have no key) on, whose rows two warps share."""
    (given, guarded), parts = tile, plan.parts_of_numbers
    own, first = plan.own_rows, rows.wg * plan.own_rows
    peak = mma_2x2.rows_of_both(smem.rows, first, own, "max")
    top, base = softmax.raised(peak, plan.unit, state.top, guarded=guarded)
    given = given if plan.unit is None else given * plan.unit
    p = jnp.exp2(given - mosaic.down_rows(base, given.shape))
    moved = warp_vote.any_in_warp(top - state.top, 0.0, mma_2x2.row_layout(own))
    stand = mma_2x2.Stand(2, row=first)
    mma_2x2.put(mma_sync.parts_of(p, parts, smem.v.dtype), smem.p, stand)
    step = softmax.Step(p, top, jnp.exp2(state.top - base), mma_2x2.partial_sums(p), moved)
    acc, total = rescaled(state, step)
    mma_2x2.sync_row_pair(rows.wg)
    sizes = (own, plan.config.block_kv, parts)
    acc = mma_2x2.weigh_shared(acc, smem.p, (smem.v, slot, plan.v_width), sizes, stand)
    return State(acc, total + step.total, top)


def attend_ahead(plan: Any, refs: Refs, smem: Smem, rows: Rows) -> State:
    """`_attend` for `Config.ahead`: scores of a tile are made between the exponents of the one
    before it, and their maxima found between the products of its values.
    """
    span, own, first = rows.span, plan.own_rows, rows.wg * plan.own_rows
    sizes = (own, plan.config.block_kv, plan.k_width)
    ask = functools.partial(keys, plan, refs, smem, rows)
    meet = functools.partial(turn, groups=plan.groups, wait=0)
    layout, stand = mosaic.standing(sizes[:2], 2), mma_2x2.Stand(2, row=first)
    some_masked = bool({"first_masked", "high", "low"} & plan.parts)
    matrix, none = ((smem.q, first), (smem.k, jnp.int32(0))), jnp.int32(0)

    def begun(t, state):
        """What the tile's maxima say, when V of it has been asked for."""
        meet(ask(t, "v"))
        peak = mma_2x2.rows_of_both(smem.rows, first, own, "max")
        guarded = some_masked or plan.has("bias")
        top, base = softmax.raised(peak, plan.unit, state.top, guarded=guarded)
        moved = warp_vote.any_in_warp(top - state.top, 0.0, mma_2x2.row_layout(own))
        return top, base, moved

    def step(masked, i, carry):
        """Tile t, and the scores of the next."""
        t, (state, given) = -i, carry  # loops count up
        top, base, moved = begun(t, state)
        to = base, smem.p, first
        s, total = mma_2x2.scores_and_exponents(matrix, sizes, given, plan.unit, to)
        coming = score_mod.of_scores(plan, refs, rows, t - 1, s, masked, layout)
        meet(ask(t - 2, "k"))
        shrink = jnp.exp2(state.top - base)
        acc, before = rescaled(state, softmax.Step(s, top, shrink, total, moved))
        values = smem.v, none, plan.v_width
        peaks = coming, smem.rows, first
        acc = mma_2x2.weigh_and_peaks(acc, smem.p, values, sizes[:2], stand, peaks)
        return State(acc, before + total, top), coming

    def last_step(state, given):
        top, base, moved = begun(span.lo, state)
        given = given if plan.unit is None else given * plan.unit
        p = jnp.exp2(given - mosaic.down_rows(base, given.shape))
        mma_2x2.put((p.astype(smem.v.dtype),), smem.p, stand)
        total = mma_2x2.partial_sums(p)
        meet()
        shrink = jnp.exp2(state.top - base)
        acc, before = rescaled(state, softmax.Step(p, top, shrink, total, moved))
        values, both = (smem.v, none, plan.v_width), (*sizes[:2], 1)
        acc = mma_2x2.weigh_shared(acc, smem.p, values, both, stand)
        return State(acc, before + total, top)

    turn(rows_of_q(plan, refs, smem, rows), ask(span.hi - 1, "k"), wait=None)
    meet()
    s = mma_2x2.product(*matrix, sizes, 1, 2)
    given = score_mod.of_scores(plan, refs, rows, span.hi - 1, s, some_masked, layout)
    meet(ask(span.hi - 2, "k"))
    mma_2x2.put_rows(given, smem.rows, first, "max")
    high = jnp.minimum(jnp.maximum(span.full_hi, span.lo), span.hi)
    low = jnp.minimum(jnp.maximum(span.full_lo, span.lo), high)
    begin = 1 - span.hi
    carry = nothing(plan), given
    if {"first_masked", "high"} & plan.parts:
        carry = lax.fori_loop(begin, -high, functools.partial(step, True), carry)
    begins = [jnp.maximum(begin, -end) for end in (high, low)]
    carry = lax.fori_loop(begins[0], -low, functools.partial(step, False), carry)
    if "low" in plan.parts:
        carry = lax.fori_loop(begins[1], -span.lo, functools.partial(step, True), carry)
    return last_step(*carry)


def rescaled(state: State, new: softmax.Step) -> tuple[Any, Any]:
    """Output and sums so far, in terms of the new tops."""

    def scaled():
        sums = (state.acc, state.total)
        return jax.tree.map(lambda x: x * mosaic.down_rows(new.shrink, x.shape), sums)

    return lax.cond(new.moved != 0, scaled, lambda: (state.acc, state.total))
