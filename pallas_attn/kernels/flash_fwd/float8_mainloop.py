"""The mainloop of the Hopper forward for float8 with scales.

Scales of q and k multiply scores, those of v the output. Matmuls on 8 bits take K-major operands
only (mma/wgmma_float8.py), so V is transposed before the launch, with zeros past lengths.

A tensor core adds products of float8 with about 14 bits. The product P V of a kv tile therefore has
an accumulator of its own, which is added to float32 registers (`Config.float32_sums`). Two variants
were no faster on an H200: one accumulator for two or more tiles, and consumers that issue their
matmuls in turn (`alternation`).

Wide values: registers hold a second accumulator only of some columns (`_parts`), and none beside
scores. A step then adds P V of the tile before it part by part, and computes the scores after that;
the tensor cores have the other consumer's matmuls meanwhile. Kv tiles of 64 keys, whose scores were
in flight with the first part, were 12 % slower at head dim 256. At head dim 128 the same with 256
keys a tile gained 1 %.

Scales of k and v that each key has arrive in shared memory beside K (`score_tiles.KeyScales`).
"""

import functools
import math
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionInputs, AttentionProblem, rows_of_scale
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import logits, score_tiles, softmax, tiles, tma_operands
from pallas_attn.kernels.attention.softmax import OutputSums
from pallas_attn.kernels.attention.tile_scheduler import Meanwhile, QueryPlan
from pallas_attn.kernels.attention.tiles import (
    ROWS,
    KernelContext,
    QueryRows,
)
from pallas_attn.kernels.flash_fwd import float8_values
from pallas_attn.kernels.flash_fwd.warpgroups import for_each_kv_tile
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.panels import Ring
from pallas_attn.kernels.lang.types import Index, Operand, RegisterTile, Scalar
from pallas_attn.kernels.mma import wgmma, wgmma_float8

# Probabilities stay below 2**(threshold + offset) = 431; the largest float8_e4m3fn is 448.
EXPONENTS = softmax.Exponents(threshold=2.75, offset=6.0)
SPREAD = 2.0**EXPONENTS.offset
WIDEST = 128  # largest number of columns of the output that registers hold twice
PART = 32  # columns of a part of wider outputs, see `_parts`
LEAST = 2.0**-100  # smallest factor of scores: a factor of 0 would make a hidden -inf NaN


def limit(problem: AttentionProblem) -> Limit | None:
    """Why the kernel cannot take a problem of float8, or None."""
    if (refused := tma_operands.dims_limit(problem)) is not None:
        return refused
    return tiles.sizes_limit(problem)


def operands(plan: QueryPlan, inputs: AttentionInputs) -> dict[str, Operand]:
    """q and k in sizes that TMA reads, V^T, and the factors of scores and of outputs."""
    v = inputs.v
    fields: dict[str, Any] = {}
    for name in "qk":
        x = getattr(inputs, name)
        sizes = {1: tma_operands.rows_in_tma(x.shape[1]), 3: plan.qk.width}
        fields[name] = tma_operands.padded(x, sizes)
    keys = tma_operands.round_up(v.shape[1], math.lcm(plan.tiling.block_kv, float8_values.KEYS))
    fields["v"] = float8_values.transposed(v, inputs.kv_lengths, plan.v.width, keys)
    return fields | units_of(plan, inputs)


def units_of(plan: QueryPlan, inputs: AttentionInputs) -> dict[str, Operand]:
    """The factors of scores and outputs: one for each head, and arrays for scales of blocks of
    rows.
    """
    problem, fields = plan.problem, {}  # type: tuple[AttentionProblem, dict[str, Any]]
    by_head = jnp.ones((problem.batch, problem.q_heads), jnp.float32)
    q, k, v = inputs.q_scale, inputs.k_scale, inputs.v_scale
    if q is not None and q.shape[1] == 1:
        by_head = q[:, 0]
    elif q is not None:
        fields["q_units"] = _by_rows(q, problem.q_len, plan.tiling.padded_rows)
    if k is not None and k.shape[1] == 1:
        by_head = by_head * jnp.repeat(k[:, 0], problem.group, axis=1)
    elif k is not None:
        fields["k_units"] = _by_keys(plan, k, has_tiles(plan, 1))
    of_v = jnp.ones((problem.batch, problem.kv_heads), jnp.float32)
    if v is not None and v.shape[1] > 1:
        by_tile = has_tiles(plan, 2)
        v = _by_keys(plan, v, by_tile)
        if not by_tile:  # multiplied into probabilities before they are rounded to float8
            ends = problem.kv_len if inputs.kv_lengths is None else inputs.kv_lengths[:, None, None]
            v = jnp.where(jnp.arange(v.shape[2], dtype=jnp.int32)[None, None] < ends, v, 0)
            of_v = jnp.maximum(v.max(axis=2), LEAST)
            v = v / of_v[..., None]
        fields["v_units"] = v
    elif v is not None:
        of_v = v[:, 0]
    fields["logit_units"] = jnp.maximum(by_head, LEAST)
    fields["units"] = jnp.stack([of_v, of_v * (1 / SPREAD)])
    return fields


def _by_rows(scale: Operand, rows: int, padded_rows: int) -> Operand:
    """Scales of blocks of rows, [B, n, heads], as one a row, [B, heads, padded rows]."""
    size = rows_of_scale(rows, scale.shape[1])
    each = jnp.repeat(scale, size, axis=1)[:, :rows].swapaxes(1, 2)
    return jnp.pad(each, ((0, 0), (0, 0), (0, padded_rows - rows)), mode="edge")


def _by_keys(plan: QueryPlan, scale: Operand, by_tile: bool) -> Any:
    """Scales [B, n, K] as the kernel reads them: [B, K, n] where each kv tile has a single scale
    (`by_tile`), else [B, K, padded keys].
    """
    if by_tile:
        return scale.swapaxes(1, 2)
    return _by_rows(scale, plan.problem.kv_len, plan.tiling.padded_keys)


def has_tiles(plan: QueryPlan, side: int) -> bool:
    """Whether each kv tile has a single scale of k (`side` 1) or of v (2)."""
    return plan.problem.scale_blocks[side] > 1 and not has_keys(plan, side)


def has_keys(plan: QueryPlan, side: int) -> bool:
    """Whether each key has a scale of k or of v of its own."""
    config = plan.config
    return score_tiles.has_key_scales(plan.problem, side, config.block_kv, config.float32_sums)


class Factors(NamedTuple):
    """Factors of scores and values for the rows of a consumer."""

    ctx: KernelContext
    rows: QueryRows
    factor: Any  # scalar or [ROWS]: multiplies scores before masks and functions; None: 1
    unit: softmax.Unit  # factor from logits to log2 units; None: they are in log2 units

    @classmethod
    def of(cls, ctx: KernelContext, rows: QueryRows) -> "Factors":
        tile, refs = rows.tile, ctx.refs
        by = refs.logit_units[tile.batch, tile.head]
        if refs.q_units is not None:
            own = refs.q_units.at[tile.batch, tile.head, pl.ds(rows.row, ROWS)]
            by = mosaic.load(own, mosaic.ROW) * by
        unit = ctx.plan.logit_rules.unit
        return cls(ctx, rows, by, None) if unit is None else cls(ctx, rows, None, by * unit)

    def of_tile(self, side: int, t: Index) -> Scalar | None:
        """The scale of k (`side` 1) or v (2) in kv tile t, where it has a single one. Its load from
        L2 is issued before the matmuls whose results the scale multiplies.
        """
        plan, tile = self.ctx.plan, self.rows.tile
        if not has_tiles(plan, side):
            return None
        units = self.ctx.refs.k_units if side == 1 else self.ctx.refs.v_units
        rows = rows_of_scale(plan.problem.kv_len, units.shape[2])
        tiles_of_block = rows // plan.tiling.block_kv
        block = lax.div(self.rows.kv_tile(t), jnp.int32(tiles_of_block))
        head = lax.div(tile.head, jnp.int32(plan.problem.group))
        return units[tile.batch, head, block]

    def of_scores(
        self, t: Index, slot: Index | None, s: RegisterTile, by: Scalar | None
    ) -> tuple[RegisterTile, softmax.Unit]:
        """Scores of kv tile t times their factors, and the factor from logits to log2 units; `by`:
        the scale of the tile's keys; `slot`: its entry of the ring, of Hopper's kernel.
        """
        factor, unit = self.factor, self.unit
        if by is not None:
            factor, unit = (None, unit * by) if factor is None else (factor * by, None)
        s = self._by_keys(1, t, slot, s)
        if factor is None:
            return s, unit
        spread = mosaic.broadcast_rows if factor.ndim else mosaic.broadcast_scalar
        return s * spread(factor, s.shape), unit

    def of_values(self, t: Index, slot: Index | None, p: RegisterTile) -> RegisterTile:
        """Probabilities of kv tile t times the scales of its values."""
        return self._by_keys(2, t, slot, p)

    def _by_keys(self, side: int, t: Index, slot: Index | None, x: RegisterTile) -> RegisterTile:
        """A tile times the scales of its keys, where each key has one."""
        plan, tile = self.ctx.plan, self.rows.tile
        if not has_keys(plan, side):
            return x
        name = "k_units" if side == 1 else "v_units"
        if slot is not None:
            return x * score_tiles.scales_of(self.ctx.smem.bias_and_mask[name].at[slot], x.shape)
        block, head = plan.config.block_kv, lax.div(tile.head, jnp.int32(plan.problem.group))
        keys = pl.ds(self.rows.kv_tile(t) * block, block)
        scales = getattr(self.ctx.refs, name).at[tile.batch, head, keys]
        return x * score_tiles.scales_of(scales, x.shape)


class _State(NamedTuple):
    """The carry of the mainloop from kv tile to kv tile."""

    acc: tuple[
        RegisterTile, ...
    ]  # [ROWS, columns], one of each of `_parts`: output before the division
    row_sum: RegisterTile  # [ROWS, PARTIALS]
    row_max: RegisterTile  # [ROWS]
    p: RegisterTile  # [ROWS, block_kv], float8: P of the tile whose P V is still to be issued


def mainloop(
    ctx: KernelContext, rows: QueryRows, slot: Index, meanwhile: Meanwhile
) -> tuple[OutputSums, Index]:
    """The counterpart of `warpgroups.mainloop`, with the same arguments and results."""
    ring, factors = Ring.of(ctx), Factors.of(ctx, rows)
    state = _first_tile(ctx, rows, factors, slot, meanwhile)
    step = functools.partial(_step, ctx, rows, factors)
    state, slot = for_each_kv_tile(ctx.plan, rows.span, step, (state, ring.after(slot)))
    ring.wait(slot)
    accs = _with_values(ctx, factors.of_tile(2, rows.span.lo), state, _values(ctx, slot))
    ring.release(slot)
    row_sum = state.row_sum * (1 / SPREAD)
    acc = lax.concatenate(accs, 1) if len(accs) > 1 else accs[0]
    return OutputSums(acc, row_sum, state.row_max), ring.after(slot)


def _parts(plan: QueryPlan) -> tuple[tuple[int, int], ...]:
    """(first column, number of columns) of the parts of V, which are multiplied one after the
    other: one part of all columns, or parts of `PART` where registers do not hold a second
    accumulator.
    """
    width = plan.v.width
    if not plan.config.float32_sums or width <= WIDEST:
        return ((0, width),)
    return tuple([(n, min(PART, width - n)) for n in range(0, width, PART)])


def _start(ctx: KernelContext, acc: RegisterTile) -> RegisterTile:
    """The initial accumulator of the next P V: zeros, or `acc` without `float32_sums`."""
    return wgmma_float8.zeros(acc.shape) if ctx.plan.config.float32_sums else acc


def _values(ctx: KernelContext, slot: Index) -> tuple[Any, ...]:
    """The `_parts` of V, [keys, columns], in an entry of the ring."""
    views = [ctx.smem.v.at[slot, pl.ds(*part)] for part in _parts(ctx.plan)]
    return wgmma.transposed(views)


def _added(
    ctx: KernelContext, by: Scalar | None, acc: RegisterTile, out: RegisterTile
) -> RegisterTile:
    """The output with P V of a kv tile added; `out`: the accumulator of that product, `by`: the
    scale of its values.
    """
    if not ctx.plan.config.float32_sums:
        return out
    out = out if by is None else out * by
    return acc + out if len(_parts(ctx.plan)) == 1 else wgmma_float8.added(acc, out)


def _with_values(
    ctx: KernelContext, by: Scalar | None, state: _State, v: tuple[Any, ...]
) -> tuple[RegisterTile, ...]:
    """The output with P V of a kv tile added, part by part."""
    accs = []
    for acc, part in zip(state.acc, v, strict=True):
        out = wgmma.matmul_add(_start(ctx, acc), (state.p,), (part,))
        accs.append(_added(ctx, by, acc, out))
    return tuple(accs)


def _release(ctx: KernelContext, ring: Ring, slot: Index) -> None:
    """Releases an entry of the ring, whose scales of keys have been read."""
    if any(has_keys(ctx.plan, side) for side in (1, 2)):
        plgpu.commit_smem()  # TMA will write where they lie
    ring.release(slot)


def _first_tile(
    ctx: KernelContext,
    rows: QueryRows,
    factors: Factors,
    slot: Index,
    meanwhile: Meanwhile,
) -> _State:
    """The state after the first tile in order, the last of the span. Its scores overlap with
    nothing but `meanwhile`.
    """
    ring, smem = Ring.of(ctx), ctx.smem
    q, k = panels.tiles(smem.q, rows.q_slot), panels.tiles(smem.k, slot)
    ring.wait(slot)
    s = wgmma.matmul((ROWS, ctx.plan.config.block_kv), q, k, meanwhile, wgmma.score_panels)
    read_later = rows.segments is not None or ctx.plan.score_tiles
    if not read_later:
        ring.release(slot)
    masked: bool | None = "first_masked" in ctx.plan.sections
    first_rows, whole = rows, None
    if rows.last is not None:
        first_rows = rows.with_loaded_tile(rows.last)
    if ctx.plan.skips_keys:
        masked, whole = None, (rows.span.full_lo, rows.span.full_hi)
    last = rows.span.hi - 1
    own = factors._replace(rows=first_rows)
    s, unit = own.of_scores(last, slot, s, own.of_tile(1, last))
    s, _ = logits.masked_logits(ctx, first_rows, last, slot, s, masked, whole)
    nothing = mosaic.filled((ROWS,), -jnp.inf)
    new = softmax.step(s, unit, nothing, empty_ok=True, exponents=EXPONENTS)
    p = wgmma_float8.probabilities(own.of_values(last, slot, new.p))
    if read_later:
        _release(ctx, ring, slot)
    acc = tuple([mosaic.filled((ROWS, columns), 0.0) for _, columns in _parts(ctx.plan)])
    return _State(acc, new.row_sum, new.row_max, p)


def _step(
    ctx: KernelContext,
    rows: QueryRows,
    factors: Factors,
    whole: tuple[Index, Index],
    masked: bool | None,
    t: Index,
    carry: tuple[_State, Index],
) -> tuple[_State, Index]:
    """Kv tile t: the softmax of its scores S runs while P V of the tile before it is in flight."""
    (state, slot), smem, ring = carry, ctx.smem, Ring.of(ctx)
    of_keys, of_values = factors.of_tile(1, t), factors.of_tile(2, t + 1)
    ring.wait(slot)
    q, k = panels.tiles(smem.q, rows.q_slot), panels.tiles(smem.k, slot)
    v = _values(ctx, slot)

    def matmuls(scores: RegisterTile, out: RegisterTile) -> None:
        wgmma.score_panels(scores, q, k)
        wgmma.multiply(out, (state.p,), v)

    def softmax_of(s: RegisterTile) -> softmax.Step:
        s, unit = factors.of_scores(t, slot, s, of_keys)
        s, _ = logits.masked_logits(ctx, rows, t, slot, s, masked, whole)
        new = softmax.next_step(
            s,
            unit,
            state.row_max,
            empty_ok=masked is not False or ctx.plan.logit_rules.adds,
            exponents=EXPONENTS,
        )
        return new._replace(p=factors.of_values(t, slot, new.p))

    shape = ROWS, ctx.plan.config.block_kv
    if len(v) == 1:
        like = softmax.Step.like(shape[1], state.row_max, state.row_sum, slot)
        out, new = wgmma.overlapped(_start(ctx, state.acc[0]), like, matmuls, softmax_of)
        acc: tuple[RegisterTile, ...] = (_added(ctx, of_values, state.acc[0], out),)
    else:  # registers hold scores or the product of a part, not both
        acc = _with_values(ctx, of_values, state, v)
        new = softmax_of(wgmma.matmul(shape, q, k, None, wgmma.score_panels))
    _release(ctx, ring, slot)
    acc, row_sum = softmax.rescaled(new, (acc, state.row_sum))
    # P is rounded after the wait: see `warpgroups`.
    p = wgmma_float8.probabilities(new.p)
    return _State(acc, row_sum + new.row_sum, new.row_max, p), ring.after(slot)
