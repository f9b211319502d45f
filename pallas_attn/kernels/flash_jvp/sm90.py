"""Tangents of attention for Hopper: bfloat16 and float16, head dims up to 128.

From q, k, v, out, lse and the tangents q', k', v' and bias' of some of them, in one launch:

    P = exp(S - lse)      S' = slope o (scale (q' k^T + q k'^T)) + bias'
    out' = P v' + (P o S') v - rowsum(P o S') out      lse' = rowsum(P o S')

where `slope` is the derivative of softcap or of a score function. The lse is known, so a step needs
no row max and no rescale, and both products with values add to one accumulator: at most five
matmuls a tile. Terms of tangents that the call does not have are left out.

Grid and orientation are those of dq (`flash_bwd.sm90_dq`): a work tile is 64 query rows a consumer
warpgroup, and kv tiles pass by in rings. A step issues S, the products of the tile before with
values, and S'; P is computed under the last two.

Shared memory, and who owns it when:
  q, q' [warpgroup]  loaded by TMA at the warpgroup's own request, for the next work tile when all
                     kv tiles of this one are done
  out [warpgroup]    loaded for each work tile; out' is stored from there
  k, k' [stages]     a ring; entries are released when S' is done
  v, v' [stages]     a ring; entries are released in the next step
"""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import AttentionProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import logits, softmax, tile_logits, tile_scheduler, tma_operands
from pallas_attn.kernels.attention.array_tiles import load_tile
from pallas_attn.kernels.attention.logits import LogitTile
from pallas_attn.kernels.attention.tile_scheduler import QueryPlan
from pallas_attn.kernels.attention.tiles import (
    ROWS,
    KernelContext,
    QueryRows,
    Span,
    WorkTile,
    kv_batch,
)
from pallas_attn.kernels.attention.tma_operands import OperandFormat
from pallas_attn.kernels.flash_bwd.producer import load_rows, store_rows
from pallas_attn.kernels.flash_bwd.sm90_dq import kv_tile_of, load_keys, span_of
from pallas_attn.kernels.flash_jvp import operands
from pallas_attn.kernels.flash_jvp.operands import Residuals, TangentRefs
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.config import check
from pallas_attn.kernels.lang.mosaic import BARRIERS, MULTIPROCESSORS
from pallas_attn.kernels.lang.panels import Panels, Ring
from pallas_attn.kernels.lang.types import (
    Barrier,
    GmemRef,
    Index,
    Predicate,
    RegisterTile,
    SmemRef,
)
from pallas_attn.kernels.mma import wgmma

REGISTERS = {1: 240, 2: 240, 3: 160}  # registers of a consumer's thread, by number of consumers


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning only: the result is the same up to rounding."""

    warpgroups: int = 2  # consumers
    block_kv: int = 64  # keys of a kv tile
    stages: int = 2  # entries of each ring
    l2_heads: int = 0  # heads whose work tiles are taken together; 0: `heads_of_l2_group`
    grid: int = MULTIPROCESSORS  # blocks; 0: one a work tile

    def __post_init__(self) -> None:
        check(
            self,
            warpgroups=(self.warpgroups in (1, 2, 3), "1, 2 or 3"),
            block_kv=(16 <= self.block_kv <= 128 and self.block_kv % 16 == 0, "16, 32, .. 128"),
            stages=(self.stages >= 2, "at least 2"),
            l2_heads=(self.l2_heads >= 0, "at least 0"),
            grid=(self.grid >= 0, "at least 0"),
        )

    @classmethod
    def default(cls, problem: AttentionProblem) -> "Config":
        """The largest that fits in registers and shared memory."""
        if max(problem.head_dim, problem.v_head_dim) > 64:
            return cls(2, 64, 2)
        rows = {n: tma_operands.round_up(problem.q_len, ROWS * n) for n in (2, 3)}
        return cls(3 if rows[3] <= 1.1 * rows[2] else 2, 64, 4)


@functools.lru_cache(maxsize=256)
def plan_of(problem: AttentionProblem, config: Config) -> QueryPlan:
    """The static values of a launch."""
    plan = QueryPlan.of(problem, config, (config.grid, config.l2_heads))
    return dataclasses.replace(plan, panels=tma_operands.takes_panels(problem))


# ---- shared memory ------------------------------------------------------------------------------


class Smem(NamedTuple):
    """Shared memory; the head of this file says who owns it when. None: not in this problem."""

    q: Panels
    q_dot: Panels
    out: Panels
    k: Panels
    k_dot: Panels
    v: Panels
    v_dot: Panels
    q_ready: Barrier
    out_ready: Barrier
    k_ready: Barrier
    v_ready: Barrier
    k_free: Barrier
    v_free: Barrier

    @property
    def k_ring(self) -> Ring:
        return Ring(self.k, self.k_ready, self.k_free)

    @property
    def v_ring(self) -> Ring:
        return Ring(self.v if self.v_dot is None else self.v_dot, self.v_ready, self.v_free)


def scratch(plan: QueryPlan) -> Smem:
    """Shared memory, described once: `run` launches it, `smem_bytes` adds it up."""
    products = sum(operands.score_products(plan.problem), ())
    return buffers(plan, {"q", "k", "out", *operands.values(plan.problem), *products})


def buffers(plan: QueryPlan, names: set[str]) -> Smem:
    """Shared memory for these arrays."""
    config, barrier = plan.config, plgpu.Barrier
    consumers, stages = config.warpgroups, config.stages

    def rows(name: str, count: int, size: int, form: OperandFormat) -> Panels:
        return form.scratch(count, size) if name in names else None

    queries, keys, values = (names & {x, f"{x}_dot"} for x in "qkv")
    qk, v = plan.qk.copies, plan.v.copies
    return Smem(
        q=rows("q", consumers, ROWS, plan.qk),
        q_dot=rows("q_dot", consumers, ROWS, plan.qk),
        out=rows("out", consumers, ROWS, plan.v),
        k=rows("k", stages, config.block_kv, plan.qk),
        k_dot=rows("k_dot", stages, config.block_kv, plan.qk),
        v=rows("v", stages, config.block_kv, plan.v),
        v_dot=rows("v_dot", stages, config.block_kv, plan.v),
        q_ready=barrier(num_barriers=consumers, num_arrivals=len(queries) * qk),
        out_ready=barrier(num_barriers=consumers, num_arrivals=v),
        k_ready=barrier(num_barriers=stages, num_arrivals=len(keys) * qk),
        v_ready=barrier(num_barriers=stages, num_arrivals=len(values) * v),
        k_free=barrier(num_barriers=stages, num_arrivals=consumers),
        v_free=barrier(num_barriers=stages, num_arrivals=consumers),
    )


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    return mosaic.bytes_of(scratch(plan_of(problem, config))) + BARRIERS + mosaic.REDUCTION_BYTES


# ---- loads --------------------------------------------------------------------------------------


def produce(ctx: KernelContext, block_id: Index) -> None:
    """The producer warpgroup: the kv tiles of every work tile, in the order in which they are
    used.
    """
    plan, refs, smem = ctx

    def load_work_tile(n: Index, carry: tuple[Index, Index]) -> tuple[Index, Index]:
        count, code = carry
        following = refs.schedule[block_id, n + 2]
        tile = tile_scheduler.work_tile(ctx, code)
        span = span_of(ctx, tile)

        def step(t: Index, count: Index) -> Index:
            t = kv_tile_of(ctx, tile, t)
            _load_kv_tile(ctx, tile, t, smem.k_ring, ("k", "k_dot"), count)
            _load_kv_tile(ctx, tile, t, smem.v_ring, ("v", "v_dot"), count)
            return count + 1

        return lax.fori_loop(span.lo, span.hi, step, count), following

    count, first = refs.schedule[block_id, 0], refs.schedule[block_id, 1]
    lax.fori_loop(0, count, load_work_tile, (jnp.int32(0), first))


def _load_kv_tile(
    ctx: KernelContext, tile: WorkTile, t: Index, ring: Ring, names: tuple[str, ...], count: Index
) -> None:
    """Kv tile t of the arrays of a ring, as its number `count`."""
    plan, _, smem = ctx
    slot = ring.slot(count)
    ring.acquire(count, slot)
    head = lax.div(tile.head, jnp.int32(plan.problem.group))
    where = kv_batch(plan.problem, tile.batch), head
    for name in names:
        if getattr(smem, name) is None:
            continue
        to = getattr(smem, name), slot, ring.ready.at[slot]
        load_keys(ctx, tile, t, name, (*where, *to))


def load_queries(ctx: KernelContext, tile: WorkTile, wg: Index) -> None:
    """q and its tangent of a consumer warpgroup's rows."""
    _, refs, smem = ctx
    at = (tile.batch, tile.head, tile.row + wg * ROWS)
    for ref, to in ((refs.q, smem.q), (refs.q_dot, smem.q_dot)):
        if to is not None:
            load_rows(ref, at, to, wg, smem.q_ready.at[wg])


def load_out(ctx: KernelContext, tile: WorkTile, wg: Index) -> None:
    if operands.moves_scores(ctx.plan.problem):
        at = (tile.batch, tile.head, tile.row + wg * ROWS)
        load_rows(ctx.refs.out, at, ctx.smem.out, wg, ctx.smem.out_ready.at[wg])


# ---- a kv tile ----------------------------------------------------------------------------------


class TangentRows(NamedTuple):
    """A warpgroup's rows of a work tile."""

    tile: WorkTile
    span: Span
    row: Index
    wg: Index
    lse: RegisterTile

    def needs_mask(self, t: Index) -> Predicate:
        return (t < self.span.full_lo) | (t >= self.span.full_hi)


class Weights(NamedTuple):
    """The numbers of a kv tile by which values are multiplied."""

    by_value: tuple[RegisterTile, ...]  # left operands, one for each of `operands.values`
    row_sum: RegisterTile  # [ROWS, PARTIALS]: of P o S', of all tiles so far


def issue_scores(ctx: KernelContext, rows: TangentRows, slot: Index, acc: RegisterTile) -> None:
    wgmma.score_panels(acc, _of_rows(ctx, rows, "q", slot), panels.tiles(ctx.smem.k, slot))


def issue_tangent(ctx: KernelContext, rows: TangentRows, slot: Index, acc: RegisterTile) -> None:
    for left, right in operands.score_products(ctx.plan.problem):
        own = _of_rows(ctx, rows, left, slot)
        wgmma.score_panels(acc, own, panels.tiles(getattr(ctx.smem, right), slot))


def _of_rows(ctx: KernelContext, rows: TangentRows, name: str, slot: Index) -> tuple[SmemRef, ...]:
    # An opaque zero, or addresses would be computed before the loop and spilled.
    return panels.tiles(getattr(ctx.smem, name), rows.wg + mosaic.opaque_zero(slot))


def _issue_values(
    ctx: KernelContext,
    slot: Index,
    accs: tuple[RegisterTile, ...],
    left: tuple[RegisterTile, ...],
) -> None:
    """accs, one a panel, += P v' + (P o S') v of a kv tile in `slot`."""
    for x, name in zip(left, operands.values(ctx.plan.problem), strict=True):
        wgmma.value_panels(accs, x, panels.tiles(getattr(ctx.smem, name), slot))


def _weights(
    ctx: KernelContext,
    rows: TangentRows,
    t: Index,
    accs: tuple[RegisterTile, ...],
    behind: int,
    row_sum: RegisterTile,
) -> Weights:
    """The weights of kv tile t, whose S, and then `behind` other matmuls with S' last, have been
    issued; all matmuls are done then.
    """
    problem = ctx.plan.problem
    s = plgpu.wgmma_accumulator_load(accs[0], wait_n=behind)
    s, slope = masked_logits(ctx, rows, t, s)
    p = tile_logits.exponentials(ctx.plan, s, mosaic.broadcast_rows(rows.lse, s.shape))
    left: list[RegisterTile] = [p] if "v" in problem.tangents else []
    moved = weighted_tangent_of_logits(ctx, rows, t, accs[1:], (p, slope))
    if moved is not None:
        row_sum = row_sum + softmax.partials(moved, operator.add)
        left.append(moved)
    return Weights(tuple([x.astype(problem.dtype) for x in left]), row_sum)


def weighted_tangent_of_logits(
    ctx: KernelContext,
    rows: TangentRows,
    t: Index,
    accs: tuple[RegisterTile, ...],
    of_scores: tuple[RegisterTile, RegisterTile | None],
) -> RegisterTile | None:
    """P o S' of kv tile t, if there is an S', whose products have been issued; waits for all
    matmuls. `of_scores`: P, and the derivative of `masked_logits`.
    """
    problem, (p, slope) = ctx.plan.problem, of_scores
    s_dot: RegisterTile = None
    if accs:
        s_dot = plgpu.wgmma_accumulator_load(accs[0], wait_n=0) * problem.scale
        s_dot = s_dot if slope is None else s_dot * slope
    else:
        plgpu.wgmma_wait(0)
    if "bias" in problem.tangents:
        bias_dot = load_tile(ctx.refs.bias_dot, _logit_tile(ctx, rows, t), p.shape)
        bias_dot = bias_dot.astype(jnp.float32)
        s_dot = bias_dot if s_dot is None else s_dot + bias_dot
        s_dot = jnp.where(p > 0, s_dot, 0.0)  # past a length it may hold anything
    return None if s_dot is None else p * s_dot


def _logit_tile(ctx: KernelContext, rows: TangentRows, t: Index) -> LogitTile:
    tile, key = rows.tile, kv_tile_of(ctx, rows.tile, t) * ctx.plan.config.block_kv
    where = (tile.batch, tile.head, rows.row, key, tile.q_offset, tile.kv_len, tile.mask)
    return LogitTile(*where, q_axis=0)


def masked_logits(
    ctx: KernelContext, rows: TangentRows, t: Index, s: RegisterTile
) -> tuple[RegisterTile, RegisterTile | None]:
    """Scores of kv tile t -> logits, and their derivative by the scaled score, or None: 1."""
    plan, slope, logit_tile = ctx.plan, None, _logit_tile(ctx, rows, t)
    if plan.logit_rules.unit is None:
        s, slope = logits.scaled(ctx, logit_tile, s)
    mask = functools.partial(tile_logits.apply_mask, ctx, logit_tile)
    if not (plan.is_listed or plan.has("q_segment_ids")):
        own = QueryRows(rows.tile, rows.row, rows.wg, rows.span)
        mask = functools.partial(logits.mask_rows, ctx, own, t, None)
    if {"first_masked", "high", "low"} & plan.sections:
        s = lax.cond(rows.needs_mask(t), mask, lambda s: s, s)
    return s, slope


# ---- the mainloop -------------------------------------------------------------------------------


def score_accumulators(ctx: KernelContext) -> list[Any]:
    """The accumulators of S and of its tangent."""
    count = 2 if operands.score_products(ctx.plan.problem) else 1
    return [plgpu.ACC((ROWS, ctx.plan.config.block_kv), jnp.float32) for _ in range(count)]


def widths(plan: QueryPlan) -> tuple[int, ...]:
    """Columns of the accumulators of P v, one a panel of v."""
    return plan.v.panels or (plan.v.width,)


def _mainloop(
    ctx: KernelContext, rows: TangentRows, count: Index, *acc: RegisterTile
) -> tuple[list[RegisterTile], RegisterTile, Index]:
    """All kv tiles of the rows, of which there is at least one. Returns the accumulators of values,
    one a panel, the partial row sums of P o S', and the new count of kv tiles.
    """
    plan, k_ring, v_ring = ctx.plan, ctx.smem.k_ring, ctx.smem.v_ring
    products = len(operands.score_products(plan.problem)) * plan.qk.copies
    values = len(operands.values(plan.problem)) * plan.v.copies

    def first(*accs: RegisterTile) -> Weights:
        slot = k_ring.slot(count)
        k_ring.wait(slot)
        issue_scores(ctx, rows, slot, accs[0])
        if products:
            issue_tangent(ctx, rows, slot, accs[1])
        nothing = mosaic.filled((ROWS, softmax.PARTIALS), 0.0)
        weights = _weights(ctx, rows, rows.span.lo, accs, products, nothing)
        k_ring.release(slot)
        return weights

    def step(t: Index, carry: tuple[Index, Weights]) -> tuple[Index, Weights]:
        count, weights = carry

        def body(*accs: RegisterTile) -> Weights:
            slot, last = k_ring.slot(count), v_ring.slot(count - 1)
            k_ring.wait(slot)
            issue_scores(ctx, rows, slot, accs[0])
            v_ring.wait(last)
            _issue_values(ctx, last, acc, weights.by_value)
            if products:
                issue_tangent(ctx, rows, slot, accs[1])
            new = _weights(ctx, rows, t, accs, values + products, weights.row_sum)
            k_ring.release(slot)
            v_ring.release(last)
            return new

        return count + 1, pl.run_scoped(body, *score_accumulators(ctx))

    start = count + 1, pl.run_scoped(first, *score_accumulators(ctx))
    end, weights = lax.fori_loop(rows.span.lo + 1, rows.span.hi, step, start)
    last = v_ring.slot(end - 1)
    v_ring.wait(last)
    _issue_values(ctx, last, acc, weights.by_value)
    value = [x[...] for x in acc]
    v_ring.release(last)
    return value, weights.row_sum, end


# ---- the consumers ------------------------------------------------------------------------------


def _consume(ctx: KernelContext, results: tuple[GmemRef, GmemRef], block: Index, wg: Index) -> None:
    """A consumer warpgroup: every work tile of its block."""
    plan, refs, smem = ctx
    count, first = refs.schedule[block, 0], refs.schedule[block, 1]
    first_tile = tile_scheduler.work_tile(ctx, first)
    load_queries(ctx, first_tile, wg)
    load_out(ctx, first_tile, wg)

    def one_tile(n: Index, carry: tuple[Index, Index]) -> tuple[Index, Index]:
        kv_count, code = carry
        following = refs.schedule[block, n + 2]
        rows = _rows(ctx, tile_scheduler.work_tile(ctx, code), wg)
        plgpu.barrier_wait(smem.q_ready.at[wg])

        def attend(kv_count: Index) -> tuple[list[RegisterTile], RegisterTile, Index]:
            mainloop = functools.partial(_mainloop, ctx, rows, kv_count)
            accs = [plgpu.ACC((ROWS, width), jnp.float32) for width in widths(plan)]
            return pl.run_scoped(mainloop, *accs)

        def no_keys(kv_count: Index) -> tuple[list[RegisterTile], RegisterTile, Index]:
            sums = mosaic.filled((ROWS, softmax.PARTIALS), 0.0)
            nothing = [mosaic.filled((ROWS, width), 0.0) for width in widths(plan)]
            return nothing, sums, kv_count

        some = rows.span.hi > rows.span.lo
        acc, row_sum, kv_count = lax.cond(some, attend, no_keys, kv_count)
        next_tile = tile_scheduler.work_tile(ctx, following)

        @pl.when(n + 1 < count)
        def _() -> None:
            plgpu.commit_smem()  # by now all warps have read it, and TMA will write there
            load_queries(ctx, next_tile, wg)

        _epilogue(ctx, results, rows, acc, row_sum)

        @pl.when(n + 1 < count)
        def _() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            load_out(ctx, next_tile, wg)

        return kv_count, following

    lax.fori_loop(0, count, one_tile, (jnp.int32(0), first))
    plgpu.wait_smem_to_gmem(0)


def _rows(ctx: KernelContext, tile: WorkTile, wg: Index) -> TangentRows:
    row = tile.row + wg * ROWS
    lse = mosaic.load(ctx.refs.lse.at[tile.batch, tile.head, pl.ds(row, ROWS)], mosaic.ROW)
    return TangentRows(tile, span_of(ctx, tile), row, wg, lse)


def _epilogue(
    ctx: KernelContext,
    results: tuple[GmemRef, GmemRef],
    rows: TangentRows,
    acc: list[RegisterTile],
    row_sum: RegisterTile,
) -> None:
    """Stores the tangents of out and lse. Rows past a query length may have met NaN: they are
    replaced by zeros.
    """
    (plan, _, smem), tile = ctx, rows.tile
    staged, total = panels.tiles(smem.out, rows.wg), row_sum.sum(axis=1)
    if operands.moves_scores(plan.problem):
        plgpu.barrier_wait(smem.out_ready.at[rows.wg])
        outs = [mosaic.load(x, mosaic.TILE).astype(jnp.float32) for x in staged]
        pairs = zip(acc, outs, strict=True)
        acc = [x - out * mosaic.broadcast_rows(total, x.shape) for x, out in pairs]
    if tile.q_len is not None:
        inside = mosaic.positions((ROWS,), 0, rows.row) < tile.q_len
        total = jnp.where(inside, total, 0.0)
        acc = [jnp.where(mosaic.broadcast_rows(inside, x.shape), x, 0.0) for x in acc]
    mosaic.store(results[1].at[tile.batch, tile.head, pl.ds(rows.row, ROWS)], total)
    for x, to in zip(acc, staged, strict=True):
        to[...] = x.astype(to.dtype)
    plgpu.commit_smem()
    store_rows(smem.out, rows.wg, results[0], (tile.batch, tile.head, rows.row))


# ---- the kernel and its call --------------------------------------------------------------------


def _kernel(
    refs: TangentRefs, out_dot: GmemRef, lse_dot: GmemRef, smem: Smem, *, plan: QueryPlan
) -> None:
    ctx, consumers = KernelContext(plan, refs, smem), plan.config.warpgroups
    block, wg = lax.axis_index("block"), lax.axis_index("wg")
    load = functools.partial(produce, ctx, block)
    consume = functools.partial(_consume, ctx, (out_dot, lse_dot), block, wg)
    mosaic.share_registers(wg, consumers, load, consume, REGISTERS[consumers])


def run(
    residuals: Residuals, problem: AttentionProblem, config: Config
) -> tuple[jax.Array, jax.Array]:
    """The tangents of out [B, T, N, Hv], in q's dtype, and of lse, float32 [B, N, T]."""
    plan = plan_of(problem, config)
    body, size = functools.partial(_kernel, plan=plan), (plan.order.grid, config.warpgroups + 1)
    kernel = mosaic.persistent_kernel(
        body, "flash_jvp_sm90", results(plan), scratch(plan), size, barriers=True
    )
    out_dot, lse_dot = kernel(operands_of(plan, Residuals(*residuals)))
    return out_dot[:, : problem.q_len, :, : problem.v_head_dim], lse_dot[:, :, : problem.q_len]


def results(plan: QueryPlan) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Shapes of out and lse, or of their tangents. Without panels out is padded to sizes that TMA
    writes whole.
    """
    problem = plan.problem
    rows, width = problem.q_len, problem.v_head_dim
    if not plan.panels:
        rows, width = tma_operands.rows_in_tma(rows), tma_operands.width_in_tma(width)
    out = (problem.batch, rows, problem.q_heads, width)
    lse = (problem.batch, problem.q_heads, plan.tiling.padded_rows)
    return jax.ShapeDtypeStruct(out, problem.dtype), jax.ShapeDtypeStruct(lse, jnp.float32)


def operands_of(plan: QueryPlan, residuals: Residuals) -> TangentRefs:
    """The operands of a kernel. XLA copies none of them, as in the forward."""
    inputs, fields = residuals.inputs, operands.of_call(plan, residuals)
    arrays = {name: getattr(inputs, name) for name in "qkv"}
    if residuals.out is not None:
        arrays["out"] = residuals.out
    arrays |= {f"{name}_dot": x for name, x in residuals.tangents.items() if name != "bias"}
    forms = {name: plan.v if name in ("v", "v_dot", "out") else plan.qk for name in arrays}
    fields |= {name: tma_operands.stored(x, forms[name]) for name, x in arrays.items()}
    if plan.has("kv_lengths"):
        lengths = jnp.asarray(inputs.kv_lengths)[:: plan.problem.share]
        for name in ("k", "v", "k_dot", "v_dot"):
            if name in fields:
                edge = tma_operands.edge(fields[name], lengths, plan.config.block_kv)
                fields[f"{name}_edge"] = edge
    return TangentRefs(**{name: fields[name] for name in TangentRefs._fields if name in fields})


def limit(problem: AttentionProblem) -> Limit | None:
    if problem.dtype == "float32" or max(problem.head_dim, problem.v_head_dim) > 128:
        return Limit("it takes 16-bit dtypes and head dims up to 128", "none is needed")
    return operands.limit(problem)


def shares_keys(problem: AttentionProblem) -> bool:
    """Whether batch rows may share k and v."""
    del problem
    return True


KERNEL = Kernel(Config, limit, smem_bytes, run, shares_keys=shares_keys)
