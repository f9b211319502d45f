"""dQ of the portable backward by a kernel of its own; and a small kernel that rounds the sums of dQ
which another one adds up.

The grid and the orientation are the forward's: a block owns 64 query rows and walks over
the kv tiles that meet them; the next K and V are loaded under this tile's arithmetic, where there
is room for them. Nothing is added up in global memory: the same bits each time.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn._call.special import Special
from pallas_attn.kernels.attention import (
    key_masks,
    sm80_column_stream,
    tile_logits,
    tile_scheduler,
    wide_heads,
)
from pallas_attn.kernels.attention.sm80_common import Copy, MmaFormat, copy_async
from pallas_attn.kernels.attention.tile_scheduler import QueryPlan
from pallas_attn.kernels.attention.tiles import KernelContext, Span
from pallas_attn.kernels.flash_bwd import operands, sm90_dq
from pallas_attn.kernels.flash_bwd.operands import BackwardRefs, RowStatistics
from pallas_attn.kernels.flash_bwd.plan import KeyPlan
from pallas_attn.kernels.flash_bwd.sm80_scores import (
    ScoreRows,
    ds_of,
    load_statistics,
    logit_tile,
)
from pallas_attn.kernels.flash_fwd import sm80 as flash_fwd_sm80
from pallas_attn.kernels.flash_fwd.listed import list_of
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import (
    GmemRef,
    Index,
    KernelConfig,
    RegisterTile,
    SmemRef,
)
from pallas_attn.kernels.mma import epilogue, global_accumulate, mma_sync
from pallas_attn.kernels.mma.mma_sync import WarpGrid

sm80_columns = Special("kernels.flash_bwd.sm80_columns")  # rows that do not fit


class DqSmem(NamedTuple):
    q: SmemRef  # [rows, ..]
    do: SmemRef
    k: SmemRef  # [stages * block_kv, ..]
    v: SmemRef


def plan_of(problem: AttentionProblem, config: KernelConfig) -> QueryPlan:
    """The plan of the kernel for dq; `config` is that of the backward."""
    sizes = 1, config.dq_block_kv or 64, config.dq_stages
    by_rows = flash_fwd_sm80.Config(*sizes, columns=config.columns)
    return flash_fwd_sm80.plan_of(problem, by_rows)


def scratch(plan: QueryPlan) -> DqSmem | sm80_column_stream.ChunkSmem:
    form, keys = plan.format, plan.config.stages * plan.config.block_kv
    if form.columns:
        return sm80_column_stream.scratch(form, plan.config.block_kv)
    q, do = (form.buffer(plan.tiling.tile_rows, width) for width in (form.k_width, form.v_width))
    return DqSmem(q, do, form.buffer(keys, form.k_width), form.buffer(keys, form.v_width))


# ---- tiles of scores with queries as rows -------------------------------------------------------


def copies_of_rows(ctx: KernelContext, rows: ScoreRows) -> list[Copy]:
    """Copies of q and dO."""
    plan, refs, smem = ctx
    copies = []
    for name in ("q", "do"):
        ref, columns = getattr(refs, name), plan.format.terms * plan.format.width(name)
        at = (rows.batch, rows.head, rows.row, rows.q_len - rows.row, jnp.int32(0))
        shape = (plan.tiling.tile_rows, ref.shape, columns, True)
        copies.append(Copy((getattr(smem, name), ref), at, shape))
    return copies


def copies_of_keys(ctx: KernelContext, rows: ScoreRows, key: Index, slot: Index) -> list[Copy]:
    """Copies of K and V from `key` on; at or past the last key, zeros."""
    plan, refs, smem = ctx
    block, kv_head = plan.config.block_kv, lax.div(rows.head, jnp.int32(plan.problem.group))
    copies = []
    for name in ("k", "v"):
        ref, columns = getattr(refs, name), plan.format.terms * plan.format.width(name)
        at = (rows.batch, kv_head, key, rows.kv_len - key, slot * block)
        copies.append(Copy((getattr(smem, name), ref), at, (block, ref.shape, columns, False)))
    return copies


def product(ctx: KernelContext, rows: str, keys: str, first: Index) -> RegisterTile:
    """S ("q", "k") or dP ("do", "v") of a tile in shared memory whose keys begin at row `first`."""
    plan, _, smem = ctx
    left, right = (getattr(smem, rows), jnp.int32(0)), (getattr(smem, keys), first)
    sizes = (plan.tiling.tile_rows, plan.config.block_kv, plan.format.width(keys))
    return mma_sync.scores(left, right, sizes, plan.format.terms)


# ---- dq -----------------------------------------------------------------------------------------


def _mainloop(
    ctx: KernelContext, rows: ScoreRows, span: Span, stats: RowStatistics
) -> RegisterTile:
    """dQ of a block's rows."""
    (plan, _, smem), form = ctx, ctx.plan.format
    block, ahead = plan.config.block_kv, plan.config.stages > 1
    copies = functools.partial(copies_of_keys, ctx, rows)
    first = [
        *copies_of_rows(ctx, rows),
        *(copies(rows.key(span.lo, block), jnp.int32(0)) if ahead else ()),
    ]
    copy_async(*first, pending=None)

    def step(t: Index, dq: RegisterTile) -> RegisterTile:
        slot = (t - span.lo) & 1 if ahead else jnp.int32(0)
        following = jnp.where(t + 1 < span.hi, rows.key(t + 1, block), rows.kv_len)
        if ahead:
            copy_async(*copies(following, 1 - slot), pending=0)
        else:
            copy_async(*copies(rows.key(t, block), slot), pending=None, sync=True)
            copy_async(pending=0)
        masked, key = (t < span.full_lo) | (t >= span.full_hi), rows.key(t, block)
        s = product(ctx, "q", "k", slot * block)
        p, slope = tile_logits.probabilities(ctx, logit_tile(rows, key), s, stats.lse, masked)
        ds = ds_of(p, product(ctx, "do", "v", slot * block), stats.delta, slope)
        terms = mma_sync.terms_of(ds, form.terms, form.dtype)
        return mma_sync.matmul_add(dq, terms, smem.k, slot * block, form.k_width)

    nothing = mosaic.filled((plan.tiling.tile_rows, form.k_width), 0.0)
    return lax.fori_loop(span.lo, span.hi, step, nothing)


def _kernel(refs: BackwardRefs, dq_ref: GmemRef, smem: DqSmem, *, plan: QueryPlan) -> None:
    ctx = KernelContext(plan, refs, smem)
    tile = tile_scheduler.work_tile(ctx, refs.schedule[lax.axis_index("block"), 1])
    length = jnp.int32(plan.problem.q_len)
    q_len = length if tile.q_len is None else tile.q_len
    listed = list_of(ctx, tile) if plan.is_listed else None
    where = (tile.batch, tile.head, tile.row, tile.q_offset, q_len, tile.kv_len, tile.mask)
    rows = ScoreRows(*where, listed)
    visible = key_masks.visible_tiles(ctx, tile) if ctx.plan.skips_keys else None
    span, stats = sm90_dq.span_of(ctx, tile, visible), load_statistics(ctx, rows)
    at, scale = (tile.batch, tile.head, tile.row, length - tile.row), plan.problem.scale
    if plan.config.columns:
        chunks = sm80_columns.dq_mainloop(ctx, rows, span, stats)
        sm80_column_stream.write([x * scale for x in chunks], dq_ref, at)
    else:
        dq = _mainloop(ctx, rows, span, stats) * scale
        mma_sync.write(dq.astype(dq_ref.dtype), dq_ref, at)


def dq_of(plan: QueryPlan, inputs: AttentionInputs, refs: BackwardRefs) -> jax.Array:
    """dq, from the operands of a kernel over keys."""

    def make(form: MmaFormat, before: jax.Array | None) -> jax.Array:
        after = refs if before is None else operands.ordered_after(refs, before)
        return _launch(KernelContext(dataclasses.replace(plan, format=form), after), inputs)

    return wide_heads.by_parts(plan.format, "k", make)


def _launch(ctx: KernelContext, inputs: AttentionInputs) -> jax.Array:
    (plan, refs, _), problem = ctx, ctx.plan.problem
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=plan.format.result(problem.q_len, problem.q_heads, problem.head_dim),
        scratch_types=(scratch(plan),),
        grid=(plan.order.grid,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="flash_bwd_dq_sm80",
    )
    return plan.format.whole_rows(
        kernel(sm90_dq.with_spans(plan, sm90_dq.by_rows(plan, inputs, refs))), problem.head_dim
    )


# ---- dq that another kernel adds up -------------------------------------------------------------


def dq_sums_shape(plan: KeyPlan, slices: int) -> tuple[int, int]:
    """The shape of the sums: each tile of dq in `slices`, as threads hold them."""
    tiles = plan.problem.batch * plan.problem.q_heads * plan.tiling.q_tiles
    return tiles * slices, plan.config.block_q * plan.format.k_width // slices


def collected(plan: KeyPlan, sums: jax.Array, slices: int, vectors: bool) -> jax.Array:
    """dq from the sums. `vectors`: see `global_accumulate`."""
    problem = plan.problem
    sizes = (problem.batch, problem.q_len, problem.q_heads, problem.head_dim)
    stage: tuple[SmemRef, ...] = ()
    if jnp.dtype(problem.dtype).itemsize == 2:
        width = mma_sync.pitch(plan.format.k_width // slices)
        stage = (plgpu.SMEM((plan.config.block_q, width), problem.dtype),)
    kernel = plgpu.kernel(
        functools.partial(_collect, plan=plan, slices=slices, vectors=vectors),
        out_type=jax.ShapeDtypeStruct(sizes, problem.dtype),
        scratch_types=stage,
        grid=(sums.shape[0],),
        grid_names=("slice",),
        kernel_name="flash_bwd_dq_collect_sm80",
    )
    return kernel(sums)


def _collect(
    sums: GmemRef, out: GmemRef, *stage: SmemRef, plan: KeyPlan, slices: int, vectors: bool
) -> None:
    """A slice of a tile of dq."""
    problem, block, q_tiles = plan.problem, plan.config.block_q, plan.tiling.q_tiles
    number = lax.axis_index("slice")
    tile, own = lax.div(number, jnp.int32(slices)), lax.rem(number, jnp.int32(slices))
    shape = (block, plan.format.k_width // slices)
    rows = global_accumulate.load(sums, number, shape, vectors)
    head, t = lax.div(tile, jnp.int32(q_tiles)), lax.rem(tile, jnp.int32(q_tiles))
    heads = jnp.int32(problem.q_heads)
    batch, head = lax.div(head, heads), lax.rem(head, heads)
    at = (batch, head, t * block, problem.q_len - t * block)
    rows = (rows * problem.scale).astype(out.dtype)
    warps = WarpGrid(2, slices, own)
    if stage:
        epilogue.write(rows, out, at, (stage[0], 0), warps)
    else:
        mma_sync.write(rows, out, at, warps)
