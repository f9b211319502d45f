"""The mainloop of prefill over a float8 cache, whose matmuls multiply 8 bits.

A launch before (`float8_tiles`) has made K and V^T with a scale for each tile of keys; a consumer
rounds its rows of q to float8, with a scale a row, when they are there. Scales of q and K multiply
logits in the softmax. V's scale counts as a part of the probabilities, p * v_scale, which are
rounded to float8 in units of the row's largest so far: in log2 units it shifts the row max for the
softmax of a tile, and the tile's sums are divided by it.

A tensor core adds products of float8 with about 14 bits, so P V of a kv tile has an accumulator of
its own, as in `flash_fwd.float8_mainloop`.
"""

import functools
from typing import NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import logits, softmax
from pallas_attn.kernels.attention.softmax import OutputSums
from pallas_attn.kernels.attention.tile_scheduler import Meanwhile
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext, QueryRows
from pallas_attn.kernels.flash_fwd.alternation import Alternation
from pallas_attn.kernels.flash_fwd.float8_mainloop import EXPONENTS
from pallas_attn.kernels.flash_fwd.warpgroups import for_each_kv_tile
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.panels import Ring
from pallas_attn.kernels.lang.types import Index, RegisterTile, Scalar, SmemRef
from pallas_attn.kernels.mma import wgmma, wgmma_float8
from pallas_attn.kernels.prefill.float8_producer import Q_DTYPE
from pallas_attn.kernels.prefill.float8_tiles import KEYS, Units

LARGEST = 448.0  # largest number of Q_DTYPE
LEAST = 2.0**-100  # smallest scale of q


class _State(NamedTuple):
    """The carry of the mainloop from kv tile to kv tile."""

    acc: RegisterTile  # [ROWS, v columns]: output before the division
    row_sum: RegisterTile  # [ROWS, PARTIALS]
    row_max: RegisterTile  # [ROWS]
    p: RegisterTile  # [ROWS, block_kv], float8: P of the tile whose P V is still to be issued


def mainloop(
    ctx: KernelContext,
    rows: QueryRows,
    slot: Index,
    meanwhile: Meanwhile,
    alternation: Alternation | None = None,
) -> tuple[OutputSums, Index]:
    """The counterpart of `flash_fwd.warpgroups.mainloop`, with the same arguments and results."""
    del meanwhile  # None
    ring = Ring.of(ctx)
    factor = _rounded_queries(ctx, rows)
    state = _first_tile(ctx, rows, factor, slot)
    step = functools.partial(_step, ctx, rows, factor, alternation)
    state, slot = for_each_kv_tile(ctx.plan, rows.span, step, (state, ring.after(slot)))
    ring.wait(slot)
    zeros = wgmma_float8.zeros(state.acc.shape)
    acc = state.acc + wgmma.matmul_add(zeros, (state.p,), _values(ctx, slot))
    ring.release(slot)
    # Sums are in units of 2**(row_max - offset).
    return OutputSums(acc, state.row_sum, state.row_max - EXPONENTS.offset), ring.after(slot)


def _rounded_queries(ctx: KernelContext, rows: QueryRows) -> RegisterTile:
    """Stores the consumer's rows of q as float8; returns the factors of their scores, [ROWS]."""
    layout = plgpu.Layout.WGMMA_8BIT
    q = plgpu.load(ctx.smem.q.at[rows.q_slot], layout=layout).astype(jnp.float32)
    scale = jnp.maximum(jnp.abs(q).max(axis=1) * (1 / LARGEST), LEAST)
    q = q * mosaic.broadcast_rows(1.0 / scale, q.shape)
    ctx.smem.producer.q[rows.wg] = q.astype(Q_DTYPE)
    plgpu.commit_smem()
    scale = plgpu.layout_cast(scale, mosaic.ROW)
    unit = ctx.plan.logit_rules.unit
    return scale if unit is None else scale * unit


def _values(ctx: KernelContext, slot: Index) -> tuple[SmemRef, ...]:
    """V, [keys, columns], in an entry of the ring."""
    return wgmma.transposed((ctx.smem.v.at[slot],))


def _unit(ctx: KernelContext, rows: QueryRows, t: Index, unit: Units) -> Scalar:
    """A unit of kv tile t."""
    plan, tile = ctx.plan, rows.tile
    head = tile.batch * plan.problem.kv_heads + lax.div(tile.head, jnp.int32(plan.problem.group))
    number = (
        t if plan.config.block_kv == KEYS else lax.div(t * plan.config.block_kv, jnp.int32(KEYS))
    )
    return ctx.refs.tile_units[head, number, int(unit)]


class _Tile(NamedTuple):
    """A kv tile and its `Units`, whose loads from L2 are issued before the matmuls whose results
    they multiply.
    """

    number: Index
    slot: Index
    masked: bool
    score: Scalar
    value: Scalar
    sum: Scalar


def _tile(ctx: KernelContext, rows: QueryRows, t: Index, slot: Index, masked: bool) -> _Tile:
    return _Tile(t, slot, masked, *[_unit(ctx, rows, t, unit) for unit in Units])


def _softmax(
    ctx: KernelContext,
    rows: QueryRows,
    factor: RegisterTile,
    tile: _Tile,
    s: RegisterTile,
    row_max: RegisterTile,
) -> softmax.Step:
    """The step of a kv tile, whose row maxima are those of probabilities times V's scale."""
    unit = factor * tile.score
    if ctx.plan.logit_rules.unit is None:
        s = s * mosaic.broadcast_rows(unit, s.shape)
        s, _ = logits.scaled(ctx, logits.tile_of_rows(ctx, rows, tile.number), s)
        unit = None
    if tile.masked:
        s = logits.mask_rows(ctx, rows, tile.number, tile.slot, s)
    before = row_max - tile.value
    new = softmax.next_step(s, unit, before, empty_ok=tile.masked, exponents=EXPONENTS)
    higher = jnp.where(new.row_max == before, row_max, new.row_max + tile.value)
    return new._replace(row_max=higher, row_sum=new.row_sum * tile.sum)


def _first_tile(ctx: KernelContext, rows: QueryRows, factor: RegisterTile, slot: Index) -> _State:
    """The state after the first tile in order, the last of the span, whose scores overlap with
    nothing.
    """
    ring, smem = Ring.of(ctx), ctx.smem
    q, k = panels.tiles(smem.producer.q, rows.wg), panels.tiles(smem.k, slot)
    tile = _tile(ctx, rows, rows.span.hi - 1, slot, masked=True)
    ring.wait(slot)
    s = wgmma.matmul((ROWS, ctx.plan.config.block_kv), q, k, None, wgmma.score_panels)
    ring.release(slot)
    new = _softmax(ctx, rows, factor, tile, s, mosaic.filled((ROWS,), -jnp.inf))
    acc = mosaic.filled((ROWS, ctx.plan.v.width), 0.0)
    return _State(acc, new.row_sum, new.row_max, wgmma_float8.probabilities(new.p))


def _step(
    ctx: KernelContext,
    rows: QueryRows,
    factor: RegisterTile,
    alternation: Alternation | None,
    whole: tuple[Index, Index],
    masked: bool | None,
    t: Index,
    carry: tuple[_State, Index],
) -> tuple[_State, Index]:
    """Kv tile t: the softmax of its scores S runs while P V of the tile before it is in flight."""
    del whole
    (state, slot), smem, ring = carry, ctx.smem, Ring.of(ctx)
    tile = _tile(ctx, rows, t, slot, masked=masked is not False)
    ring.wait(slot)
    if alternation is not None:
        alternation.take()
    q, k = panels.tiles(smem.producer.q, rows.wg), panels.tiles(smem.k, slot)

    def matmuls(scores: RegisterTile, out: RegisterTile) -> None:
        wgmma.score_panels(scores, q, k)
        wgmma.multiply(out, (state.p,), _values(ctx, slot))
        if alternation is not None:
            alternation.give()

    def softmax_of(s: RegisterTile) -> softmax.Step:
        return _softmax(ctx, rows, factor, tile, s, state.row_max)

    like = softmax.Step.like(ctx.plan.config.block_kv, state.row_max, state.row_sum, slot)
    zeros = wgmma_float8.zeros(state.acc.shape)
    out, new = wgmma.overlapped(zeros, like, matmuls, softmax_of)
    acc = state.acc + out
    ring.release(slot)
    acc, row_sum = softmax.rescaled(new, (acc, state.row_sum))
    # P is rounded after the wait: see `flash_fwd.warpgroups`.
    p = wgmma_float8.probabilities(new.p)
    return _State(acc, row_sum + new.row_sum, new.row_max, p), ring.after(slot)
