"""The walk of `dbias` for the portable backward, by tiles of 64 queries by `block_kv` keys: the
gradient of a bias, or sums for the gradients of a score function's arrays (`aux_sums`).
"""

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn._call.special import Special
from pallas_attn._functions.reads import Read
from pallas_attn.kernels.attention import tile_logits
from pallas_attn.kernels.attention.sm80_common import copy_async
from pallas_attn.kernels.attention.tile_scheduler import QueryPlan
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.flash_bwd import aux_sums, dbias, sm80_dq, sm80_scores, sm90_dq
from pallas_attn.kernels.flash_bwd.dbias import BiasStep, BiasWalk, Walks
from pallas_attn.kernels.flash_bwd.operands import BackwardRefs
from pallas_attn.kernels.flash_bwd.sm80_dq import DqSmem
from pallas_attn.kernels.flash_bwd.sm80_scores import ScoreRows
from pallas_attn.kernels.flash_fwd import sm80 as flash_fwd_sm80
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.config import first_that_fits
from pallas_attn.kernels.lang.types import GmemRef, Index, KernelConfig, RegisterTile

sm80_columns = Special("kernels.flash_bwd.sm80_columns")  # rows that do not fit

FEWEST_COLUMNS = 32  # at a time, where nothing else has room


def _kernel(
    refs: BackwardRefs, out: GmemRef, smem: DqSmem, *, plan: QueryPlan, walk: BiasWalk
) -> None:
    ctx = KernelContext(plan, refs, smem)
    block = dbias.BiasBlock(lax.axis_index("tile"), lax.axis_index("chunk"))
    shape = (ROWS, plan.config.block_kv)

    def body(i: Index, acc: RegisterTile) -> RegisterTile:
        step = dbias.bias_step(ctx, walk, block.bias_tile, block.chunk * walk.steps + i)
        return lax.cond(step.live, lambda: acc + _ds(ctx, walk.read, step), lambda: acc)

    acc = lax.fori_loop(0, walk.steps, body, mosaic.filled(shape, 0.0))
    mosaic.store(out.at[dbias.store_place(walk, block, shape)], acc)


def _ds(ctx: KernelContext, read: Read | None, step: BiasStep) -> RegisterTile:
    """dS of a tile of scores, whose operands are in shared memory; for a read, times its weight
    (`aux_sums.weight`).
    """
    q_len = jnp.int32(0) + step.q_len
    rows = ScoreRows(step.batch, step.head, step.row, step.q_offset, q_len, step.kv_len, step.mask)
    none = jnp.int32(0)
    if ctx.plan.config.columns:
        stream = sm80_columns.stream_of(ctx, rows, False)
        stream.begin(step.key, sync=True)
        chunks = stream.step(none, step.key, None)
        stats = sm80_scores.load_statistics(ctx, rows)
        s, product = chunks.scores(), chunks.scores
    else:
        keys = sm80_dq.copies_of_keys(ctx, rows, step.key, none)
        copy_async(*sm80_dq.copies_of_rows(ctx, rows), *keys, pending=None, sync=True)
        copy_async(pending=0)
        stats = sm80_scores.load_statistics(ctx, rows)
        s = sm80_dq.product(ctx, "q", "k", none)
        product = functools.partial(sm80_dq.product, ctx, "do", "v", none)
    tile = sm80_scores.logit_tile(rows, step.key)
    p, _ = tile_logits.probabilities(ctx, tile, s, stats.lse, True)
    by = 1.0
    if read is not None:
        by = aux_sums.weight(ctx, tile, read, s, p > 0)
    return aux_sums.times(sm80_scores.ds_of(p, product(), stats.delta), by)


def _plan_of(problem: AttentionProblem, config: KernelConfig) -> QueryPlan:
    """The largest tiles that there is room for: a kernel that adds dQ up asks for less."""

    def of(keys: int, columns: int) -> QueryPlan:
        return flash_fwd_sm80.plan_of(problem, flash_fwd_sm80.Config(1, keys, 1, columns=columns))

    block = config.dq_block_kv or ROWS  # at most as many keys as rows, for `aux_sums.Diagonals`
    choices = [of(block, config.columns), of(32, 0), of(16, 0), of(32, FEWEST_COLUMNS)]
    return first_that_fits(problem, _bytes_of, choices)


def _bytes_of(problem: AttentionProblem, plan: QueryPlan) -> int:
    del problem
    return mosaic.bytes_of(sm80_dq.scratch(plan))


def smem_bytes(problem: AttentionProblem, config: KernelConfig) -> int:
    """Shared memory of the walks of a problem; 0 where it has none."""
    if problem.bias_shape is None and not problem.learned:
        return 0
    return _bytes_of(problem, _plan_of(problem, config))


def gradients(
    problem: AttentionProblem,
    config: KernelConfig,
    inputs: AttentionInputs,
    refs: BackwardRefs,
) -> dict[str, Any]:
    """The gradients of a bias and of a score function's arrays, where there are any, from the
    operands of a kernel over keys.
    """

    def walks_of(read: Read | None) -> Walks:
        del read
        plan = _plan_of(problem, config)
        return Walks(plan, sm90_dq.by_rows(plan, inputs, refs), _sums)

    return dbias.gradients(problem, inputs, [], walks_of)


def _sums(plan: QueryPlan, walk: BiasWalk, refs: BackwardRefs) -> jax.Array:
    """Launches a walk: the sums of all blocks."""
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan, walk=walk),
        out_type=jax.ShapeDtypeStruct(dbias.sums_shape(plan, walk), jnp.float32),
        scratch_types=(sm80_dq.scratch(plan),),
        **mosaic.grid_of(tile=math.prod(walk.bias_tiles), chunk=walk.chunks),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="flash_bwd_dbias_sm80" if walk.read is None else "flash_bwd_daux_sm80",
    )
    return kernel(refs)
