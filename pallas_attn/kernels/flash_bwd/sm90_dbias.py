"""The walks of `dbias` for the Hopper backward: the gradient of a bias, or sums for the gradients
of a score function's arrays (`aux_sums`).

A block has one producer and up to two consumer warpgroups of 64 query rows each, which own a tile
of the bias: it stays in shared memory for the whole walk, its gradient in registers. A step is a
tile of scores: S and dP are issued together, and P = exp(S - lse) is computed while dP runs. The
two warpgroups do not wait for each other, so the matmuls of one overlap with the exponentials of
the other.

A walk of one chunk stores dbias in the bias' dtype; the sums of several chunks are added by XLA.

Shared memory, and who owns it when:
  q, do, k, v [stages]  a ring of tiles of scores, with the lse and delta of their rows
  bias                  the tile of the bias, from where the consumers also store dbias. Where TMA
                        cannot load it (`score_tiles`) threads read it from global memory
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn._functions.reads import Read
from pallas_attn.kernels.attention import key_masks, score_tiles, tile_logits
from pallas_attn.kernels.attention.logits import LogitTile
from pallas_attn.kernels.attention.score_tiles import ScoreTiles
from pallas_attn.kernels.attention.tile_scheduler import QueryPlan
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.attention.tma_operands import takes_panels
from pallas_attn.kernels.flash_bwd import aux_sums, dbias, sm90_dq
from pallas_attn.kernels.flash_bwd.aux_sums import LogitSums
from pallas_attn.kernels.flash_bwd.dbias import BiasBlock, BiasStep, BiasWalk, Walks
from pallas_attn.kernels.flash_bwd.float32 import scaled, units_of
from pallas_attn.kernels.flash_bwd.operands import BackwardRefs
from pallas_attn.kernels.flash_bwd.producer import load_rows
from pallas_attn.kernels.flash_bwd.sm90_dq import DqConfig
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.mosaic import BARRIERS, MULTIPROCESSORS, SMEM_LIMIT
from pallas_attn.kernels.lang.panels import Panels
from pallas_attn.kernels.lang.types import (
    Barrier,
    GmemRef,
    Index,
    Operand,
    RegisterTile,
    SmemRef,
)

SMEM_BYTES = 220 * 1024  # most bytes of two stages or more, but for the last of SIZES
SIZES = ((2, 128), (2, 64), (1, 64), (1, 32))  # consumers and keys of a tile, the best first


class BiasSmem(NamedTuple):
    q: Panels  # [stages, rows, ..]
    do: Panels
    k: Panels  # [stages, block_kv, ..]
    v: Panels
    row_stats: SmemRef  # [2, stages, rows]: lse and delta
    bias: Any  # `score_tiles.scratch` of one stage
    ready: Barrier  # one a stage
    free: Barrier
    bias_ready: Barrier


def tile_of_bias(plan: QueryPlan, read: Read | None) -> tuple[ScoreTiles, ...]:
    """The tile of the bias, if it comes by TMA and stays for the whole walk."""
    if read is not None:
        return ()
    arrays = score_tiles.of_problem(plan.problem, plan.config.block_kv)
    return tuple(array for array in arrays if array.name == "bias")


def scratch(plan: QueryPlan, read: Read | None) -> BiasSmem:
    """Shared memory, described once: `_sums` launches it, `smem_bytes` adds it up."""
    stages, consumers, bias = plan.config.stages, plan.config.warpgroups, tile_of_bias(plan, read)
    rows = plan.tiling.tile_rows
    q, do, k, v = (
        form.scratch(stages, count)
        for count in (rows, plan.config.block_kv)
        for form in (plan.qk, plan.v)
    )
    copies = 2 * (plan.qk.copies + plan.v.copies) + 2
    return BiasSmem(
        *(q, do, k, v),
        row_stats=plgpu.SMEM((2, stages, rows), jnp.float32),
        bias=score_tiles.scratch(bias, 1, rows),
        ready=plgpu.Barrier(num_barriers=stages, num_arrivals=copies),
        free=plgpu.Barrier(num_barriers=stages, num_arrivals=consumers),
        bias_ready=plgpu.Barrier(num_arrivals=max(1, score_tiles.copies(bias))),
    )


def _steps(ctx: KernelContext, walk: BiasWalk, block: BiasBlock, body: Any, carry: Any) -> Any:
    """carry = body(step, carry) for the tiles of scores of a block that may be seen; what a mask of
    keys shows of them is read a step ahead.
    """
    plan, refs, _ = ctx
    first = block.chunk * walk.steps
    count = jnp.minimum(walk.steps, math.prod(walk.readers) - first)

    def seen(n: Index) -> Index | None:
        if refs.key_tiles is None:
            return None
        batch, head, _, key_tile = dbias.place_of(walk, block.bias_tile, n)
        batches, heads, tiles = refs.key_tiles.shape
        key_tile = jnp.clip(key_tile, 0, tiles - 1)  # a diagonal may leave the tiles
        batch = jnp.minimum(batch, batches - 1)
        return refs.key_tiles[batch, head if heads > 1 else 0, key_tile]

    def next_step(i: Index, state: Any) -> Any:
        carry, now = state
        following = seen(first + i + 1)
        step = dbias.bias_step(ctx, walk, block.bias_tile, first + i, now)
        if dbias.sees_all_alike(plan.problem) and walk.diagonals is None:
            return body(step, carry), following
        return lax.cond(step.live, functools.partial(body, step), lambda x: x, carry), following

    return lax.fori_loop(0, count, next_step, (carry, seen(first)))[0]


def _produce(ctx: KernelContext, walk: BiasWalk, block: BiasBlock) -> None:
    plan, refs, smem = ctx
    stages, rows = smem.ready.shape[0], plan.tiling.tile_rows
    batch, head, q_tile, key_tile = dbias.place_of(walk, block.bias_tile, jnp.int32(0))
    key = key_tile * plan.config.block_kv
    bias_place = score_tiles.Place(batch, head, q_tile * rows, key)
    if smem.bias:
        score_tiles.load(ctx, smem.bias, bias_place, jnp.int32(0), smem.bias_ready)

    def load(step: BiasStep, count: Index) -> Index:
        slot = lax.rem(count, jnp.int32(stages))
        pl.when(count >= stages)(lambda: plgpu.barrier_wait(smem.free.at[slot]))
        kv_head, ready = lax.div(step.head, jnp.int32(plan.problem.group)), smem.ready.at[slot]
        queries, keys = (step.batch, step.head, step.row), (step.batch, kv_head, step.key)
        for name, at in (("q", queries), ("do", queries), ("k", keys), ("v", keys)):
            load_rows(getattr(refs, name), at, getattr(smem, name), slot, ready)
        for n, stats in enumerate((refs.lse, refs.delta)):
            some = stats.at[step.batch, step.head, pl.ds(step.row, rows)]
            plgpu.copy_gmem_to_smem(some, smem.row_stats.at[n, slot], ready)
        return count + 1

    _steps(ctx, walk, block, load, jnp.int32(0))


def _consume(ctx: KernelContext, out: GmemRef, walk: BiasWalk, block: BiasBlock, wg: Index) -> None:
    plan, _, smem = ctx
    shape = (ROWS, plan.config.block_kv)
    if smem.bias:
        plgpu.barrier_wait(smem.bias_ready)

    def add(step: BiasStep, carry: tuple[RegisterTile, Index]) -> tuple[RegisterTile, Index]:
        acc, count = carry
        slot = lax.rem(count, jnp.int32(smem.ready.shape[0]))
        plgpu.barrier_wait(smem.ready.at[slot])
        ds = _ds(ctx, walk.read, step, slot, wg)
        plgpu.barrier_arrive(smem.free.at[slot])
        return acc + ds, count + 1

    zeros = mosaic.filled(shape, 0.0), jnp.int32(0)
    acc, _ = _steps(ctx, walk, block, add, zeros)
    _store(ctx, out, walk, block, wg, acc)


def _store(
    ctx: KernelContext,
    out: GmemRef,
    walk: BiasWalk,
    block: BiasBlock,
    wg: Index,
    acc: RegisterTile,
) -> None:
    plan, _, smem = ctx
    rows, keys = plan.tiling.tile_rows, plan.config.block_kv
    if not stores_by_tma(plan, walk):
        chunk, batch, head, row, key = dbias.store_place(walk, block, (rows, keys))
        own = pl.ds(row.start + wg * ROWS, ROWS)
        return mosaic.store(out.at[chunk, batch, head, own, key], acc)
    batch, head, q_tile, key_tile = dbias.place_of(walk, block.bias_tile, jnp.int32(0))
    own, column, first = pl.ds(wg * ROWS, ROWS), key_tile * keys, 0
    plgpu.commit_smem()  # all warps have read the bias
    for panel in smem.bias["bias"]:
        width = panel.tile.shape[-1]
        part = lax.slice(acc, (0, first), (ROWS, first + width))
        panel.tile.at[0, own][...] = part.astype(panel.tile.dtype)
        first += width
    plgpu.commit_smem()
    for panel in smem.bias["bias"]:
        width = panel.tile.shape[-1]
        there = (batch, head, pl.ds(q_tile * rows + wg * ROWS, ROWS), pl.ds(column, width))
        plgpu.copy_smem_to_gmem(panel.for_tma.at[0, own], out.at[there])
        column = column + width
    return plgpu.wait_smem_to_gmem(0)


def stores_by_tma(plan: QueryPlan, walk: BiasWalk) -> bool:
    """Whether a block's sum is the gradient of its tile, stored as the bias lies."""
    return walk.chunks == 1 and bool(tile_of_bias(plan, walk.read))


def _ds(
    ctx: KernelContext, read: Read | None, step: BiasStep, slot: Index, wg: Index
) -> RegisterTile:
    """dS of a warpgroup's rows of a tile of scores; for a read, times its weight."""
    plan, refs, smem = ctx
    shape, own, problem = (ROWS, plan.config.block_kv), pl.ds(wg * ROWS, ROWS), plan.problem
    row = step.row + wg * ROWS
    units = units_of(refs.units, step.batch, lax.div(step.head, jnp.int32(problem.group)))
    where = (step.batch, step.head, row, step.key, step.q_offset, step.kv_len, step.mask)
    tile = LogitTile(*where, q_axis=0)
    if smem.bias:
        tile = tile._replace(in_smem=score_tiles.rows_of(smem.bias, jnp.int32(0), wg))
    masked = True if step.whole is False else ~step.whole
    if dbias.sees_all_alike(problem) and not plan.logit_rules.ragged_keys:
        masked = False

    def of_scores(s_acc: RegisterTile, dp_acc: RegisterTile) -> RegisterTile:
        sm90_dq.multiply_rows(s_acc, plan.qk, (smem.q, (slot, own)), (smem.k, slot))
        sm90_dq.multiply_rows(dp_acc, plan.v, (smem.do, (slot, own)), (smem.v, slot))
        lse, delta = (mosaic.load(x.at[slot, own], mosaic.ROW) for x in _statistics(smem))
        behind = sm90_dq.matmuls(plan.v)
        s = scaled(plgpu.wgmma_accumulator_load(s_acc, wait_n=behind), units.scores)
        p, _ = tile_logits.probabilities(ctx, tile, s, lse, masked)
        by = 1.0 if read is None else aux_sums.weight(ctx, tile, read, s, p > 0)
        if not smem.bias:
            plgpu.commit_smem()  # lse and delta have been read, and TMA will write there
        dp = scaled(plgpu.wgmma_accumulator_load(dp_acc, wait_n=0), units.dp)
        return p, aux_sums.times(
            tile_logits.d_scores(p, dp, mosaic.broadcast_rows(delta, shape)), by
        )

    p, ds = pl.run_scoped(of_scores, *[plgpu.ACC(shape, jnp.float32)] * 2)
    if {"q_lengths", "kv_lengths"} & set(problem.arrays):  # past one s and dp may be NaN
        inside = mosaic.positions(shape, 0, row) < step.q_len
        ds = jnp.where(inside & (p != 0), ds, 0.0)
    return scaled(ds, units.ds)


def _statistics(smem: BiasSmem) -> tuple[SmemRef, SmemRef]:
    return smem.row_stats.at[0], smem.row_stats.at[1]


def _kernel(
    refs: BackwardRefs, out: GmemRef, smem: BiasSmem, *, plan: QueryPlan, walk: BiasWalk
) -> None:
    ctx = KernelContext(plan, refs, smem)
    block = BiasBlock(lax.axis_index("tile"), lax.axis_index("chunk"))
    wg = lax.axis_index("wg")
    produce = functools.partial(_produce, ctx, walk, block)
    consume = functools.partial(_consume, ctx, out, walk, block, wg)
    mosaic.share_registers(wg, plan.config.warpgroups, produce, consume, 240)


def plan_of(problem: AttentionProblem, read: Read | None = None) -> QueryPlan:
    """By the first of SIZES of which two stages fit; else by the last, of which one stage always
    does. The plan is for the bias, or for a read of a score function.
    """

    def of(consumers: int, block: int, stages: int) -> QueryPlan:
        config = DqConfig(consumers, block, stages, MULTIPROCESSORS)
        plan = QueryPlan.of(problem, config, (config.grid, 0))
        return dataclasses.replace(plan, panels=takes_panels(problem))

    sizes = SIZES[2:] if problem.dtype == "float32" else SIZES
    for consumers, block in sizes:
        if read is not None and block > ROWS:  # a score function takes registers of its own
            continue
        for stages in (3, 2):
            plan = of(consumers, block, stages)
            if _buffer_bytes(plan, read) <= SMEM_BYTES:
                return plan
    return plan if _buffer_bytes(plan, read) + BARRIERS <= SMEM_LIMIT else of(*SIZES[-1], 1)


def _buffer_bytes(plan: QueryPlan, read: Read | None) -> int:
    return mosaic.bytes_of(scratch(plan, read))


def smem_bytes(problem: AttentionProblem) -> int:
    """Shared memory of the walks of a problem; 0 where it has none."""
    reads: list[Read | None] = [None] if problem.bias_shape is not None else []
    if problem.learned:  # all reads have the same buffers
        reads.append(aux_sums.all_reads(problem)[0])
    each = [_buffer_bytes(plan_of(problem, read), read) + BARRIERS for read in reads]
    return max(each, default=0)


def gradients(ctx: KernelContext, inputs: AttentionInputs) -> dict[str, Any]:
    """The gradients of a bias and of a score function's arrays. `ctx`: that of a kernel over keys,
    which may have made sums for such arrays.
    """
    plan, refs, _ = ctx
    problem, parts = plan.problem, list[LogitSums]()
    if plan.key_sums:
        parts = aux_sums.sums_of_keys(plan, jax.freeze(refs.aux_sums))

    def walks_of(read: Read | None) -> Walks:
        plan = plan_of(problem, read)
        sums = functools.partial(_sums, inputs.bias)
        return Walks(plan, sm90_dq.operands_of(plan, inputs, refs), sums)

    return dbias.gradients(problem, inputs, parts, walks_of)


def _sums(bias: Operand | None, plan: QueryPlan, walk: BiasWalk, refs: BackwardRefs) -> jax.Array:
    """Launches a walk: the sums of all blocks, or the gradient of the bias."""
    out = jax.ShapeDtypeStruct(dbias.sums_shape(plan, walk), jnp.float32)
    if bias is not None and stores_by_tma(plan, walk):
        out = jax.ShapeDtypeStruct(bias.shape, bias.dtype)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan, walk=walk),
        out_type=out,
        scratch_types=(scratch(plan, walk.read),),
        **mosaic.grid_of(tile=math.prod(walk.bias_tiles), chunk=walk.chunks),
        num_threads=plan.config.warpgroups + 1,
        thread_name="wg",
        compiler_params=mosaic.without_barriers(),
        kernel_name="flash_bwd_dbias_sm90" if walk.read is None else "flash_bwd_daux_sm90",
    )
    return kernel(refs._replace(key_tiles=_codes(KernelContext(plan, refs))))


def _codes(ctx: KernelContext) -> jax.Array | None:
    """`key_masks.codes`, those of the kernel before if its tiles have as many keys."""
    plan, refs, _ = ctx
    if not plan.skips_keys:
        return None
    block, codes = plan.config.block_kv, refs.key_tiles
    if codes is not None and codes.shape[2] == -(-plan.problem.kv_len // block):
        return codes
    mask, _ = lax.optimization_barrier((refs.mask_array, refs.delta))
    return key_masks.codes(mask, block)
