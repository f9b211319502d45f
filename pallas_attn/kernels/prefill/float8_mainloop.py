"""The mainloop of prefill over a float8 cache, whose matmuls multiply 8 bits.

K is the cache's numbers as they lie, V^T comes from a launch before (`float8_values`), and a
consumer rounds its rows of q to float8, with a scale a row, when they are there. No scale is
rounded: those of q and K multiply scores. V's scale is added to logits as its logarithm, so that
probabilities hold it before they are rounded to float8, in units of the row's largest product of
both; the sum of a row takes it out again:

    x = score * q_scale * k_scale * scale * log2(e) + log2(v_scale)     a multiplication and a fma
    p = 2**(x - row_max)                                                row_max: largest x so far
    row_sum += p / v_scale                                              a fma
    out += float8(p) @ v

A tensor core adds products of float8 with about 14 bits, so P V of a kv tile has an accumulator of
its own, as in `flash_fwd.float8_mainloop`; with precision "fast_accum" it adds up all tiles.
"""

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import logits, softmax
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext, QueryRows
from pallas_attn.kernels.flash_fwd.float8_mainloop import EXPONENTS
from pallas_attn.kernels.flash_fwd.producer import Ring
from pallas_attn.kernels.flash_fwd.sm90 import Result, for_each_kv_tile
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.types import Index, RegisterTile
from pallas_attn.kernels.mma import wgmma, wgmma_float8
from pallas_attn.kernels.prefill.float8_producer import Q_DTYPE
from pallas_attn.kernels.prefill.float8_values import Units
from pallas_attn.kernels.prefill.kernel import Turns

LARGEST = 448.0  # of Q_DTYPE
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
    meanwhile: Callable[[], None] | None,
    turns: Turns | None = None,
) -> tuple[Result, Index]:
    """The counterpart of `flash_fwd.sm90.mainloop`, with the same arguments and results."""
    del meanwhile  # None
    ring = Ring.of(ctx)
    factor = _rounded_queries(ctx, rows)
    state = _first_tile(ctx, rows, factor, slot)
    step = functools.partial(_step, ctx, rows, factor, turns)
    state, slot = for_each_kv_tile(ctx.plan, rows.span, step, (state, ring.after(slot)))
    ring.wait(slot)
    out = wgmma.matmul_add(_start(ctx, state.acc), (state.p,), _values(ctx, slot))
    acc = _added(ctx, state.acc, out)
    ring.release(slot)
    # Sums are in units of 2**(row_max - offset).
    return Result(acc, state.row_sum, state.row_max - EXPONENTS.offset), ring.after(slot)


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


def _start(ctx: KernelContext, acc: RegisterTile) -> RegisterTile:
    """The initial accumulator of the next P V: zeros, or `acc` if the tensor core adds up all."""
    fast = ctx.plan.problem.precision == "fast_accum"
    return acc if fast else wgmma_float8.zeros(acc.shape)


def _added(ctx: KernelContext, acc: RegisterTile, out: RegisterTile) -> RegisterTile:
    """The output with P V of a kv tile added; `out`: the accumulator of that product."""
    return out if ctx.plan.problem.precision == "fast_accum" else acc + out


def _values(ctx: KernelContext, slot: Index) -> tuple:
    """V, [keys, columns], in an entry of the ring."""
    return wgmma.transposed((ctx.smem.v.at[slot],))


def _unit(ctx: KernelContext, slot: Index, unit: Units, start: int) -> RegisterTile:
    """A unit of `CHUNK` keys of a ring entry, spread over all rows."""
    keys = ctx.smem.producer.units.at[slot, int(unit), pl.ds(start, softmax.CHUNK)]
    numbers = mosaic.load(keys, mosaic.COLUMN)
    return lax.broadcast_in_dim(numbers, (ROWS, softmax.CHUNK), [1])


def _release(ring: Ring, slot: Index) -> None:
    """Releases an entry whose units registers have read, where TMA will write."""
    plgpu.commit_smem()
    ring.release(slot)


def _logits(  # noqa: PLR0913
    ctx: KernelContext,
    rows: QueryRows,
    factor: RegisterTile,
    t: Index,
    slot: Index,
    s: RegisterTile,
    masked: bool | None,
) -> RegisterTile:
    """Logits of kv tile t in log2 units, with the logarithms of V's scales added."""
    factor = mosaic.broadcast_rows(factor, (ROWS, softmax.CHUNK))
    pieces = []
    for start in range(0, s.shape[1], softmax.CHUNK):
        piece = lax.slice(s, (0, start), (ROWS, start + softmax.CHUNK))
        piece = piece * _unit(ctx, slot, Units.SCORE, start) * factor
        if ctx.plan.logit_rules.unit is None:
            piece, _ = logits.scaled(ctx, logits.tile_of_rows(ctx, rows, t), piece)
        pieces.append(piece + _unit(ctx, slot, Units.VALUE, start))
    s = lax.concatenate(pieces, 1)
    return logits.mask_rows(ctx, rows, t, slot, s) if masked else s


def _softmax(
    ctx: KernelContext, slot: Index, s: RegisterTile, row_max: RegisterTile, *, empty_ok: bool
) -> softmax.Step:
    """`softmax.next_step`, whose sums are those of probabilities without V's scales."""
    base = mosaic.broadcast_rows(row_max, (ROWS, softmax.PARTIALS))
    peaks = softmax.partials(s, jnp.maximum) - base
    moved = mosaic.any_in_warp(peaks, EXPONENTS.threshold)

    def raised():
        higher = softmax.raise_to(s.max(axis=1), None, row_max, EXPONENTS.threshold)
        return higher, jnp.exp2(row_max - softmax.base_of(higher, empty_ok))

    def kept():
        return row_max, mosaic.filled(row_max.shape, 1.0)

    row_max, rescale = lax.cond(moved != 0, raised, kept)
    base = softmax.base_of(row_max, empty_ok) - EXPONENTS.offset
    pieces, sums = [], []
    for start in range(0, s.shape[1], softmax.CHUNK):
        piece = lax.slice(s, (0, start), (ROWS, start + softmax.CHUNK))
        pieces.append(softmax.exponentials(piece, None, base))
        parts = pieces[-1] * _unit(ctx, slot, Units.SUM, start)
        sums.append(softmax.partials(parts, operator.add))
    row_sum = functools.reduce(operator.add, sums)
    return softmax.Step(lax.concatenate(pieces, 1), row_max, rescale, row_sum, moved)


def _first_tile(ctx: KernelContext, rows: QueryRows, factor: RegisterTile, slot: Index) -> _State:
    """The state after the first tile in order, the last of the span, whose scores overlap with
    nothing.
    """
    ring, smem = Ring.of(ctx), ctx.smem
    q, k = panels.tiles(smem.producer.q, rows.wg), panels.tiles(smem.k, slot)
    ring.wait(slot)
    s = wgmma.matmul((ROWS, ctx.plan.config.block_kv), q, k, None, wgmma.score_panels)
    masked = "first_masked" in ctx.plan.sections
    s = _logits(ctx, rows, factor, rows.span.hi - 1, slot, s, masked)
    new = _softmax(ctx, slot, s, mosaic.filled((ROWS,), -jnp.inf), empty_ok=True)
    _release(ring, slot)
    acc = mosaic.filled((ROWS, ctx.plan.v.width), 0.0)
    return _State(acc, new.row_sum, new.row_max, wgmma_float8.probabilities(new.p))


def _step(  # noqa: PLR0913
    ctx: KernelContext,
    rows: QueryRows,
    factor: RegisterTile,
    turns: Turns | None,
    whole: tuple[Index, Index],
    masked: bool | None,
    t: Index,
    carry: tuple[_State, Index],
) -> tuple[_State, Index]:
    """Kv tile t: the softmax of its scores S runs while P V of the tile before it is in flight."""
    del whole
    (state, slot), smem, ring = carry, ctx.smem, Ring.of(ctx)
    ring.wait(slot)
    if turns is not None:
        turns.take()
    q, k = panels.tiles(smem.producer.q, rows.wg), panels.tiles(smem.k, slot)

    def matmuls(scores: RegisterTile, out: RegisterTile) -> None:
        wgmma.score_panels(scores, q, k)
        wgmma.multiply(out, (state.p,), _values(ctx, slot))
        if turns is not None:
            turns.give()

    def softmax_of(s: RegisterTile) -> softmax.Step:
        s = _logits(ctx, rows, factor, t, slot, s, masked)
        return _softmax(ctx, slot, s, state.row_max, empty_ok=masked is not False)

    scores_like = mosaic.filled((ROWS, ctx.plan.config.block_kv), 0.0)
    like = softmax.Step(
        scores_like, state.row_max, state.row_max, state.row_sum, jnp.int32(0) + slot
    )
    out, new = wgmma.overlapped(_start(ctx, state.acc), like, matmuls, softmax_of)
    acc = _added(ctx, state.acc, out)
    _release(ring, slot)
    acc, row_sum = softmax.rescaled(new, (acc, state.row_sum))
    # P is rounded after the wait: see `flash_fwd.sm90`.
    p = wgmma_float8.probabilities(new.p)
    return _State(acc, row_sum + new.row_sum, new.row_max, p), ring.after(slot)
