"""The mainloop of the Hopper forward for float32, whose operands are terms of 16 bits or TF32
(mma/wgmma.py).

Up to head dim 64 q and k are TF32 as they are; else they, and v, are multiples of powers of 2, by
which scores and outputs are multiplied again (`ForwardRefs.units`). With precision "highest" all
terms count, and tiles of P V are added up in registers: a tensor core adds with fewer bits.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionInputs
from pallas_attn.kernels.attention import logits, softmax, tma_operands
from pallas_attn.kernels.attention.softmax import OutputSums
from pallas_attn.kernels.attention.tile_scheduler import Meanwhile, QueryPlan
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext, QueryRows, WorkTile
from pallas_attn.kernels.flash_fwd.warpgroups import for_each_kv_tile
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.panels import Ring
from pallas_attn.kernels.lang.types import Index, Operand, RegisterTile, Scalar
from pallas_attn.kernels.mma import wgmma, wgmma_float32

# Scaled probabilities are spread over float16's range; they lie below 2**RESCALE_THRESHOLD.
SPREAD = 2.0 ** (wgmma_float32.EXPONENT + 1 - softmax.RESCALE_THRESHOLD)


def operands(plan: QueryPlan, inputs: AttentionInputs) -> dict[str, Operand]:
    """q, k and v in terms; and where these are scaled the units."""
    powers: dict[str, Any] = {}
    fields = {}
    if not wgmma_float32.is_unscaled(plan.problem):
        powers = wgmma_float32.powers(inputs, plan.problem.group)
        products = (powers["q"] * powers["k"], powers["v"] * (1 / SPREAD))
        fields["units"] = jnp.stack(products)
    for name, form in (("q", plan.qk), ("k", plan.qk), ("v", plan.v)):
        fields[name] = tma_operands.stored(getattr(inputs, name), form, powers.get(name))
    return fields


class _Numbers(NamedTuple):
    """The operands of matmuls, and the units of scores."""

    scores: wgmma.Kind
    values: wgmma.Kind
    swizzle: int  # swizzle of v
    is_exact: bool
    is_scaled: bool
    factor: Scalar | None  # scores are multiplied by it first; None: 1
    unit: Scalar | None  # turns logits into log2 units; None: they are

    @classmethod
    def of(cls, ctx: KernelContext, tile: WorkTile) -> "_Numbers":
        plan, units = ctx.plan, ctx.refs.units
        problem, unit = plan.problem, plan.logit_rules.unit
        factor = None
        if units is not None:
            by = units[0, tile.batch, lax.div(tile.head, jnp.int32(problem.group))]
            factor, unit = (by, None) if unit is None else (None, by * unit)
        return cls(
            plan.qk.kind,
            plan.v.kind,
            plan.v.swizzle,
            wgmma_float32.is_exact(problem),
            units is not None,
            factor,
            unit,
        )

    def scaled(self, s: RegisterTile) -> RegisterTile:
        return s if self.factor is None else s * self.factor

    def terms_of(self, p: RegisterTile) -> tuple[RegisterTile, ...]:
        """Probabilities as the left operand of P V."""
        return wgmma.terms_of_registers(p * SPREAD if self.is_scaled else p, self.values)

    def score_operands(
        self, ctx: KernelContext, rows: QueryRows, slot: Index
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Q and K^T of a tile of scores."""
        at = rows.q_slot
        if ctx.plan.qk.width * self.scores.bytes > 512:
            # Else addresses in q are computed before the loop and spilled.
            at = at + mosaic.opaque_zero(slot)
        q = wgmma.terms_of_smem(ctx.smem.q.at[at], self.scores)
        return q, wgmma.transposed(wgmma.terms_of_smem(ctx.smem.k.at[slot], self.scores))


class _State(NamedTuple):
    """The carry from kv tile to kv tile."""

    acc: RegisterTile  # [ROWS, v width]: the output before it is divided
    row_sum: RegisterTile  # [ROWS, PARTIALS]
    row_max: RegisterTile  # [ROWS]
    p: tuple[RegisterTile, ...]  # [ROWS, block_kv], its terms: of the tile whose V is to come
    rescale: Any = None  # [ROWS]: acc is still to be multiplied by it; None: by nothing


def mainloop(
    ctx: KernelContext, rows: QueryRows, slot: Index, meanwhile: Meanwhile
) -> tuple[OutputSums, Index]:
    """`warpgroups.mainloop`."""
    ring, numbers = Ring.of(ctx), _Numbers.of(ctx, rows.tile)
    state = _first_tile(ctx, rows, numbers, slot, meanwhile)
    step = functools.partial(_step, ctx, rows, numbers)
    state, slot = for_each_kv_tile(ctx.plan, rows.span, step, (state, ring.after(slot)))
    ring.wait(slot)
    values = wgmma.terms_of_smem(ctx.smem.v.at[slot], numbers.values)
    if numbers.is_exact:
        factors = (state.rescale, None)
        acc = wgmma_float32.exact_matmul_add(state.acc, state.p, values, numbers.swizzle, factors)
    else:
        acc = wgmma.matmul_add(state.acc, state.p, values)
    ring.release(slot)
    return OutputSums(acc, state.row_sum, state.row_max), ring.after(slot)


def _first_tile(
    ctx: KernelContext,
    rows: QueryRows,
    numbers: _Numbers,
    slot: Index,
    meanwhile: Meanwhile,
) -> _State:
    """The last kv tile, whose scores overlap with nothing but `meanwhile`."""
    ring, shape = Ring.of(ctx), (ROWS, ctx.plan.config.block_kv)
    ring.wait(slot)
    s = wgmma.matmul(shape, *numbers.score_operands(ctx, rows, slot), meanwhile)
    if rows.segments is None:
        ring.release(slot)
    masked = "first_masked" in ctx.plan.sections
    first_rows = rows if rows.last is None else rows.with_loaded_tile(rows.last)
    s, _ = logits.masked_logits(ctx, first_rows, rows.span.hi - 1, slot, numbers.scaled(s), masked)
    if rows.segments is not None:
        ring.release(slot)
    new = softmax.step(s, numbers.unit, mosaic.filled((ROWS,), -jnp.inf), empty_ok=True)
    acc = mosaic.filled((ROWS, ctx.plan.v.width), 0.0)
    rescale = new.rescale if numbers.is_exact else None
    return _State(acc, new.row_sum, new.row_max, numbers.terms_of(new.p), rescale)


def _step(
    ctx: KernelContext,
    rows: QueryRows,
    numbers: _Numbers,
    whole: tuple[Index, Index],
    masked: bool | None,
    t: Index,
    carry: tuple[_State, Index],
) -> tuple[_State, Index]:
    """Kv tile t: the softmax of its scores S runs while P V of the tile before it is in flight, or
    where tiles are added up in registers behind it.
    """
    (state, slot), ring, shape = carry, Ring.of(ctx), (ROWS, ctx.plan.config.block_kv)
    ring.wait(slot)
    values = wgmma.terms_of_smem(ctx.smem.v.at[slot], numbers.values)
    score_operands = functools.partial(numbers.score_operands, ctx, rows, slot)

    def softmax_of(s: RegisterTile) -> softmax.Step:
        s, _ = logits.masked_logits(ctx, rows, t, slot, numbers.scaled(s), masked, whole)
        return softmax.next_step(
            s,
            numbers.unit,
            state.row_max,
            empty_ok=masked is not False or ctx.plan.logit_rules.adds,
        )

    if numbers.is_exact:
        acc, s = wgmma_float32.exact_matmul_add_overlapped(
            state.acc,
            state.p,
            values,
            numbers.swizzle,
            (state.rescale, None),
            shape,
            score_operands,
        )
        new = softmax_of(s)
        row_sum = state.row_sum * mosaic.broadcast_rows(new.rescale, state.row_sum.shape)
        ring.release(slot)
        state = _State(acc, row_sum, new.row_max, state.p, new.rescale)
    else:

        def matmuls(scores: RegisterTile, out: RegisterTile) -> None:
            wgmma.multiply(scores, *score_operands())
            wgmma.multiply(out, state.p, values)

        like = softmax.Step.like(shape[1], state.row_max, state.row_sum, slot)
        behind = wgmma.products(numbers.values.terms, numbers.values.terms)
        acc, new = wgmma.overlapped(state.acc, like, matmuls, softmax_of, behind)
        ring.release(slot)
        acc, row_sum = softmax.rescaled(new, (acc, state.row_sum))
        state = _State(acc, row_sum, new.row_max, state.p)
    # P is rounded after the wait: see `warpgroups`.
    state = state._replace(p=numbers.terms_of(new.p), row_sum=state.row_sum + new.row_sum)
    return state, ring.after(slot)
