"""Attention and its tangents in one launch for Hopper: bfloat16 and float16, head dims up to 128.

With the inputs and tangents of some of them, by an online softmax over kv tiles:

    out = P v     lse     out' = P v' + (P o S') v - rowsum(P o S') out     lse' = rowsum(P o S')

It is for `jax.jvp` without gradients around it, which makes the targets of MeanFlow and of
consistency models. On an H200 two launches take 28 % longer at head dim 72 (256 rows), 16 to 25 %
at most other sizes, and 5 % at 128 (1024 rows).

`flash_jvp.sm90` starts from out and lse and computes the scores a second time: with the forward,
seven matmuls a tile, where this kernel has six. A warpgroup holds two accumulators of its 64 rows,
which leaves no registers to overlap two steps: while one warpgroup computes exponentials, the other
uses the tensor cores.

Grid, rings and shared memory are those of `flash_jvp.sm90`; both results leave by its `out`.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.kernels.attention import softmax, tile_scheduler
from pallas_attn.kernels.attention.tile_scheduler import QueryPlan
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext, WorkTile
from pallas_attn.kernels.flash_bwd.producer import store_rows
from pallas_attn.kernels.flash_bwd.sm90_dq import span_of
from pallas_attn.kernels.flash_jvp import operands, sm90
from pallas_attn.kernels.flash_jvp.operands import TangentRefs
from pallas_attn.kernels.flash_jvp.sm90 import Config as TangentConfig
from pallas_attn.kernels.flash_jvp.sm90 import Smem, TangentRows, plan_of
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.mosaic import BARRIERS
from pallas_attn.kernels.lang.types import GmemRef, Index, Ref, RegisterTile, RegisterTiles
from pallas_attn.kernels.mma import wgmma


class Config(TangentConfig):
    """Tuning only: the result is the same up to rounding."""

    @classmethod
    def default(cls, problem: AttentionProblem) -> "Config":
        """All dims fit in shared memory: 128 with all tangents takes the whole of it."""
        narrow = max(problem.head_dim, problem.v_head_dim) <= 64
        return cls(2, 64, 4 if narrow else 2)


def scratch(plan: QueryPlan) -> Smem:
    """Shared memory, described once: `run` launches it, `smem_bytes` adds it up."""
    dots = {f"{name}_dot" for name in plan.problem.tangents if name != "bias"}
    return sm90.buffers(plan, {"q", "k", "v", "out"} | dots)


def smem_bytes(problem: AttentionProblem, config: TangentConfig) -> int:
    need = mosaic.bytes_of(scratch(plan_of(problem, config)))
    return need + BARRIERS + mosaic.REDUCTION_BYTES


class Sums(NamedTuple):
    """The carry from kv tile to kv tile, all relative to `row_max`."""

    out: tuple[RegisterTile, ...]  # [ROWS, columns], one a panel of v: P v
    out_dot: tuple[RegisterTile, ...]  # P v' + (P o S') v
    row_sum: RegisterTile  # [ROWS, PARTIALS]: of P
    dot_sum: RegisterTile  # [ROWS, PARTIALS]: of P o S'
    row_max: RegisterTile  # [ROWS]

    @classmethod
    def nothing(cls, plan: QueryPlan) -> "Sums":
        """Before the first kv tile."""
        acc = tuple(mosaic.filled((ROWS, width), 0.0) for width in sm90.widths(plan))
        row = mosaic.filled((ROWS, softmax.PARTIALS), 0.0)
        return cls(acc, acc, row, row, mosaic.filled((ROWS,), -jnp.inf))


def _step(
    ctx: KernelContext, rows: TangentRows, first: bool, t: Index, carry: tuple[Index, Sums]
) -> tuple[Index, Sums]:
    """Kv tile t."""
    (plan, _, smem), (count, sums) = ctx, carry
    k_ring, v_ring, unit = smem.k_ring, smem.v_ring, plan.logit_rules.unit
    slot = k_ring.slot(count)
    products = len(operands.score_products(plan.problem)) * plan.qk.copies

    def scores(*accs: RegisterTile) -> tuple[Any, ...]:
        k_ring.wait(slot)
        sm90.issue_scores(ctx, rows, slot, accs[0])
        if products:
            sm90.issue_tangent(ctx, rows, slot, accs[1])
        s = plgpu.wgmma_accumulator_load(accs[0], wait_n=products)
        s, slope = sm90.masked_logits(ctx, rows, t, s)
        online = softmax.step if first else softmax.next_step
        new = online(s, unit, sums.row_max, empty_ok=True)
        return new, sm90.weighted_tangent_of_logits(ctx, rows, t, accs[1:], (new.p, slope))

    new, moved = pl.run_scoped(scores, *sm90.score_accumulators(ctx))
    k_ring.release(slot)
    dot_part = None if moved is None else softmax.partials(moved, operator.add)
    p, moved = (None if x is None else x.astype(plan.problem.dtype) for x in (new.p, moved))
    older = *sums.out, *sums.out_dot, sums.row_sum, sums.dot_sum
    *outs, row_sum, dot_sum = softmax.rescaled(new, older)
    out, out_dot = tuple(outs[: len(sums.out)]), tuple(outs[len(sums.out) :])
    v_ring.wait(slot)

    def values(accs: tuple[RegisterTiles, RegisterTiles]) -> None:
        v = panels.tiles(smem.v, slot)
        wgmma.value_panels(accs[0], p, v)
        if smem.v_dot is not None:
            wgmma.value_panels(accs[1], p, panels.tiles(smem.v_dot, slot))
        if moved is not None:
            wgmma.value_panels(accs[1], moved, v)

    accs = jax.tree.map(plgpu.ACC.init, (out, out_dot))
    out, out_dot = pl.run_state(values)(accs)
    v_ring.release(slot)
    dot_sum = dot_sum if dot_part is None else dot_sum + dot_part
    return count + 1, Sums(out, out_dot, row_sum + new.row_sum, dot_sum, new.row_max)


def _consume(ctx: KernelContext, results: tuple[GmemRef, ...], block: Index, wg: Index) -> None:
    """A consumer warpgroup: every work tile of its block."""
    plan, refs, smem = ctx
    count, first = refs.schedule[block, 0], refs.schedule[block, 1]
    sm90.load_queries(ctx, tile_scheduler.work_tile(ctx, first), wg)

    def one_tile(n: Index, carry: tuple[Index, Index]) -> tuple[Index, Index]:
        kv_count, code = carry
        following = refs.schedule[block, n + 2]
        tile = tile_scheduler.work_tile(ctx, code)
        rows = TangentRows(tile, span_of(ctx, tile), tile.row + wg * ROWS, wg, None)
        plgpu.barrier_wait(smem.q_ready.at[wg])

        def attend(kv_count: Index) -> tuple[Index, Sums]:
            step, lo = functools.partial(_step, ctx, rows), rows.span.lo
            start = step(True, lo, (kv_count, Sums.nothing(plan)))
            return lax.fori_loop(lo + 1, rows.span.hi, functools.partial(step, False), start)

        some = rows.span.hi > rows.span.lo
        nothing = lambda kv_count: (kv_count, Sums.nothing(plan))  # noqa: E731
        kv_count, sums = lax.cond(some, attend, nothing, kv_count)

        @pl.when(n + 1 < count)
        def _() -> None:
            plgpu.commit_smem()  # by now all warps have read it, and TMA will write there
            sm90.load_queries(ctx, tile_scheduler.work_tile(ctx, following), wg)

        _epilogue(ctx, results, rows, sums)
        return kv_count, following

    lax.fori_loop(0, count, one_tile, (jnp.int32(0), first))
    plgpu.wait_smem_to_gmem(0)


def _epilogue(
    ctx: KernelContext, results: tuple[GmemRef, ...], rows: TangentRows, sums: Sums
) -> None:
    """Stores out, lse and their tangents."""
    (_, refs, _), tile = ctx, rows.tile
    sink = None if refs.sinks is None else refs.sinks[tile.head]
    factor, lse = softmax.finish(sums.row_max, sums.row_sum, sink)
    moved = sums.dot_sum.sum(axis=1) * factor
    out, out_dot = list(sums.out), list(sums.out_dot)
    for n, x in enumerate(sums.out):
        scaled = x * mosaic.broadcast_rows(factor, x.shape)
        dot = sums.out_dot[n] * mosaic.broadcast_rows(factor, x.shape)
        out[n], out_dot[n] = scaled, dot - scaled * mosaic.broadcast_rows(moved, x.shape)
    if tile.q_len is not None:
        others = (moved, out, out_dot)
        lse, others = softmax.without_dead_rows(lse, others, rows.row, tile.q_len)
        moved, out, out_dot = others
    at = pl.ds(rows.row, ROWS)
    mosaic.store(results[1].at[tile.batch, tile.head, at], lse)
    mosaic.store(results[3].at[tile.batch, tile.head, at], moved)
    for x, to in ((out, results[0]), (out_dot, results[2])):
        _store(ctx, tile, rows, x, to)


def _store(
    ctx: KernelContext, tile: WorkTile, rows: TangentRows, parts: list[RegisterTile], to: GmemRef
) -> None:
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for part, staged in zip(parts, panels.tiles(ctx.smem.out, rows.wg), strict=True):
        staged[...] = part.astype(staged.dtype)
    plgpu.commit_smem()
    store_rows(ctx.smem.out, rows.wg, to, (tile.batch, tile.head, rows.row))


# ---- the kernel and its call --------------------------------------------------------------------


def _kernel(refs: TangentRefs, *rest: Ref, plan: QueryPlan) -> None:
    *results, smem = rest
    ctx, consumers = KernelContext(plan, refs, smem), plan.config.warpgroups
    block, wg = lax.axis_index("block"), lax.axis_index("wg")
    produce = functools.partial(sm90.produce, ctx, block)
    consume = functools.partial(_consume, ctx, tuple(results), block, wg)
    mosaic.share_registers(wg, consumers, produce, consume, sm90.REGISTERS[consumers])


def run(
    arrays: tuple[AttentionInputs, dict[str, jax.Array]],
    problem: AttentionProblem,
    config: Config,
) -> tuple[jax.Array, ...]:
    """(inputs, tangents) -> out, lse and their tangents."""
    plan = plan_of(problem, config)
    out, lse = sm90.results(plan)
    body, size = functools.partial(_kernel, plan=plan), (plan.order.grid, config.warpgroups + 1)
    kernel = mosaic.persistent_kernel(
        body, "flash_dual_sm90", (out, lse, out, lse), scratch(plan), size, barriers=True
    )
    inputs, tangents = arrays
    refs = sm90.operands_of(plan, operands.Residuals(inputs, None, None, tangents))
    rows, columns = problem.q_len, problem.v_head_dim
    results = kernel(refs)
    return tuple(x[:, :rows, :, :columns] if x.ndim == 4 else x[:, :, :rows] for x in results)


KERNEL = Kernel(Config, sm90.limit, smem_bytes, run, shares_keys=sm90.shares_keys)
