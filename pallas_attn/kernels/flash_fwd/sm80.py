"""Flash attention forward for every GPU from Ampere on: bfloat16, float16 and float32.

FlashAttention-2 (arXiv 2307.08691) by mma.sync and cp.async, which all of these GPUs have.

Grid: a block for each work tile, `64 * row_blocks` query rows of one head, the longest first
(`tile_scheduler.schedule`). A block has 4 warps. A warp has 16 rows of each 64 and all keys of a kv
tile, so warps synchronise only where shared memory changes owners. Several blocks live on a
multiprocessor: the softmax of one runs while another has the tensor cores.

Kv tiles are taken from the last to the first, as in sm90.py; masks, softmax and schedule are the
same code. Where a row max is raised the output is rescaled at once (`_step_and_rescale`), so
that nothing but arithmetic stands between exponents and the matmuls with V, and they overlap.

Shared memory holds q, from where the output leaves too (mma/epilogue.py), and `stages` tiles of K
and V, which all threads of a block fill by cp.async:

  stages 1   V of a tile is loaded while its scores are computed, from `Config.columns_before_v`
             columns on (matmuls want their operands first), and the next K when they are done: two
             barriers a tile
  stages n   K and V of n - 1 tiles are in flight; one barrier a tile

Rows past a length and columns past a head dim are zeros that cp.async puts there: nothing is padded
beforehand, and V past a length is never read.

float32 is multiplied in bfloat16 terms (mma/mma_sync.py): 3 products good to 2**-16 by default,
better than TF32's 2**-10, and 6 for precision "highest". Where shared memory is too small for 64
such rows of q and a tile of K and V, `sm80_columns` has the mainloop (`Config.columns`). Where Hv
is above 256, each launch makes some columns of the output (attention/wide_heads.py).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import (
    functions,
    key_masks,
    segment_spans,
    sm80_column_stream,
    sm80_common,
    softmax,
    tile_logits,
    tile_scheduler,
    tiles,
    tma_operands,
    wide_heads,
)
from pallas_attn.kernels.attention.sm80_common import Copy, MmaFormat, copy_async
from pallas_attn.kernels.attention.softmax import OutputSums
from pallas_attn.kernels.attention.tile_scheduler import QueryPlan
from pallas_attn.kernels.attention.tiles import (
    ROWS,
    ForwardRefs,
    KernelContext,
    QueryRows,
    Span,
    WorkTile,
)
from pallas_attn.kernels.flash_fwd import documents, sm80_columns
from pallas_attn.kernels.flash_fwd.listed import list_of
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.config import check, first_that_fits
from pallas_attn.kernels.lang.types import (
    GmemRef,
    Index,
    Operand,
    RegisterTile,
    RegisterTiles,
    SmemRef,
)
from pallas_attn.kernels.mma import epilogue, mma_sync


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning only: the result is the same up to rounding."""

    row_blocks: int = 2  # 64 query rows each
    block_kv: int = 64  # keys of a kv tile
    stages: int = 1  # tiles of K and V in shared memory
    q_in_registers: bool = False
    columns_before_v: int = 32  # multiplied before V is loaded, where stages is 1
    columns: int = 0  # columns of q, k and v in shared memory at a time; 0: all

    def __post_init__(self) -> None:
        by_columns = self.row_blocks == 1 and not self.q_in_registers
        check(
            self,
            row_blocks=(self.row_blocks in (1, 2), "1 or 2"),
            block_kv=(16 <= self.block_kv <= 128 and self.block_kv % 16 == 0, "16, 32, .. 128"),
            stages=(self.stages >= 1, "at least 1"),
            columns_before_v=(
                self.columns_before_v % 16 == 0 <= self.columns_before_v,
                "a multiple of 16",
            ),
            columns=(
                not self.columns or (self.columns % 16 == 0 and by_columns),
                "0; or a multiple of 16 if row_blocks is 1 and q is in memory",
            ),
        )

    @property
    def warpgroups(self) -> int:
        return self.row_blocks

    @classmethod
    def default(cls, problem: AttentionProblem) -> "Config":
        """The first Config for which the GPU has the shared memory."""
        problem = _of_a_launch(problem)
        dim = max(problem.head_dim, problem.v_head_dim)
        choices = [cls(1, 32), cls(1, 16), cls(1, 32, columns=64)]
        if problem.dtype == "float32":
            if problem.precision != "highest":
                choices.insert(0, cls(2 if dim <= 64 else 1, 64))
        elif dim > 128 or (dim > 64 and problem.gpu == "sm100"):
            choices.insert(0, cls(1, 64))
        elif dim > 64:
            choices.insert(0, cls(2, 64))
        else:
            choices.insert(0, cls(2, 64, 2 if problem.kv_len <= 2048 else 1, q_in_registers=True))
        return first_that_fits(problem, smem_bytes, choices)


def limit(problem: AttentionProblem) -> Limit | None:
    return tiles.limit(problem, tma_operands.WIDEST)


def plan_of(problem: AttentionProblem, config: Config) -> QueryPlan:
    """The plan of a block's query rows, all of which take the same kv tiles."""
    form = MmaFormat(problem, config.columns)
    return QueryPlan.of(problem, config, span_rows=ROWS * config.warpgroups, form=form)


# ---- shared memory ------------------------------------------------------------------------------


class ForwardSmem(NamedTuple):
    """Shared memory, where whole rows of Q, K and V fit. The output leaves by way of q's."""

    q: SmemRef  # [64 * row_blocks, ..]
    k: SmemRef  # [stages * block_kv, ..]
    v: SmemRef  # [stages * block_kv, ..]


def scratch(plan: QueryPlan) -> ForwardSmem | sm80_column_stream.ChunkSmem:
    """Shared memory, described once: `run` launches it, `smem_bytes` adds it up."""
    config, form = plan.config, plan.format
    if config.columns:
        return sm80_column_stream.scratch(form, config.block_kv)
    keys = config.stages * config.block_kv
    return ForwardSmem(
        q=form.buffer(plan.tiling.tile_rows, form.k_width),
        k=form.buffer(keys, form.k_width),
        v=form.buffer(keys, form.v_width),
    )


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    plan = plan_of(_of_a_launch(problem), config)
    return mosaic.bytes_of(scratch(plan)) + mosaic.REDUCTION_BYTES


def _of_a_launch(problem: AttentionProblem, columns: slice | None = None) -> AttentionProblem:
    """The problem of a launch that makes `columns` of the output; None: the widest such launch."""
    if problem.v_head_dim <= wide_heads.COLUMNS:
        return problem
    columns = columns or wide_heads.value_columns(problem.v_head_dim)[0]
    return dataclasses.replace(problem, v_head_dim=columns.stop - columns.start)


# ---- copies to shared memory, which all threads of a block issue --------------------------------


def q_copy(ctx: KernelContext, rows: QueryRows) -> Copy:
    plan, refs, smem = ctx
    tile, live = rows.tile, plan.problem.q_len - rows.row
    at = (tile.batch, tile.head, rows.row, live, jnp.int32(0))
    shape = (plan.tiling.tile_rows, refs.q.shape, plan.format.terms * plan.format.k_width, True)
    return Copy((smem.q, refs.q), at, shape)


def kv_copy(ctx: KernelContext, rows: QueryRows, t: Index, which: str) -> Copy:
    """Kv tile t of "k" or "v"; zeros where there is no such tile."""
    plan, refs, smem = ctx
    block, tile = plan.config.block_kv, rows.tile
    first = rows.kv_tile(t) * block
    live = jnp.where(t >= rows.span.lo, tile.kv_len - first, 0)
    head = lax.div(tile.head, jnp.int32(plan.problem.group))
    at = (tile.batch, head, first, live, _smem_row(plan, rows, t))
    ref, columns = getattr(refs, which), plan.format.terms * plan.format.width(which)
    shape = (block, ref.shape, columns, plan.config.stages == 1)
    return Copy((getattr(smem, which), ref), at, shape)


def _smem_row(plan: QueryPlan, rows: QueryRows, t: Index) -> Index:
    """The row of shared memory at which kv tile t begins."""
    config = plan.config
    if config.stages == 1:
        return jnp.int32(0)
    return lax.rem(rows.span.hi - 1 - t, jnp.int32(config.stages)) * config.block_kv


# ---- mainloop -----------------------------------------------------------------------------------


def _mainloop(ctx: KernelContext, rows: QueryRows) -> OutputSums:
    """All kv tiles of the block's rows, from the last to the first."""
    plan, _, smem = ctx
    config, last = plan.config, rows.span.hi - 1
    copy = functools.partial(kv_copy, ctx, rows)
    copy_async(q_copy(ctx, rows), copy(last, "k"), pending=None)
    if config.stages > 1:
        copy_async(copy(last, "v"), pending=None)
        for e in range(1, config.stages - 1):
            copy_async(*(copy(last - e, name) for name in "kv"), pending=None)
    q = smem.q
    if config.q_in_registers:
        copy_async(pending=config.stages - 1)
        width = plan.format.terms * plan.format.k_width
        q = mma_sync.load_fragments(smem.q, jnp.int32(0), plan.tiling.tile_rows, width)
    step = functools.partial(_step, ctx, rows, q)
    return sm80_common.over_kv_tiles(plan, rows.span, step, _no_keys(plan))


def _no_keys(plan: QueryPlan) -> OutputSums:
    rows = plan.tiling.tile_rows
    return OutputSums.nothing(mosaic.filled((rows, plan.format.v_width), 0.0), rows)


def _step(
    ctx: KernelContext,
    rows: QueryRows,
    q: SmemRef | RegisterTile,
    masked: bool,
    t: Index,
    sums: OutputSums,
) -> OutputSums:
    """Kv tile t. `q`: in shared memory, or fragments."""
    plan, _, smem = ctx
    config, form, terms = plan.config, plan.format, plan.format.terms
    copy = functools.partial(kv_copy, ctx, rows)
    late = 0  # columns of the head dim that are multiplied before V is asked for
    if config.stages == 1 and config.columns_before_v < form.k_width and terms < 3:
        late = config.columns_before_v
    if config.stages == 1:
        copy_async(*(() if late else (copy(t, "v"),)), pending=0)
    else:
        coming = (copy(t - config.stages + 1, name) for name in "kv")
        copy_async(*coming, pending=config.stages - 2)
    slot = _smem_row(plan, rows, t)
    sizes = (plan.tiling.tile_rows, config.block_kv, form.k_width)
    matrix = (q, jnp.int32(0)), (smem.k, slot), sizes, terms
    if late:
        s = mma_sync.scores(*matrix, (None, 0, late))
        copy_async(copy(t, "v"), pending=None)
        s = mma_sync.scores(*matrix, (s, late, sizes[2]))
    else:
        s = mma_sync.scores(*matrix)
    if config.stages == 1:
        copy_async(copy(t - 1, "k"), pending=0)
    logits = tile_logits.logits(ctx, rows, t, s, masked)
    empty_ok = masked or plan.logit_rules.adds
    new, (acc, row_sum) = _step_and_rescale(
        logits, plan.logit_rules.unit, sums.row_max, (sums.acc, sums.row_sum), empty_ok=empty_ok
    )
    p = mma_sync.terms_of(new.p, terms, smem.v.dtype)
    acc = mma_sync.matmul_add(acc, p, smem.v, slot, form.v_width)
    return OutputSums(acc, row_sum + new.row_sum, new.row_max)


def _step_and_rescale(
    logits: RegisterTile,
    unit: float | None,
    row_max: RegisterTile,
    older: RegisterTiles,
    *,
    empty_ok: bool,
) -> tuple[softmax.Step, Any]:
    """`softmax.next_step` and `softmax.rescaled` in one branch, which few tiles take. After it come
    exponents, and nothing that separates them from the matmuls that follow. Nothing is left to
    rescale: the step's `rescale` is None.
    """
    peaks = softmax.peaks_of(logits, unit)
    above = peaks - mosaic.broadcast_rows(row_max, peaks.shape)
    moved = mosaic.any_in_warp(above, softmax.RESCALE_THRESHOLD)

    def raised():
        higher = softmax.raise_to(logits.max(axis=1), unit, row_max)
        rescale = jnp.exp2(row_max - softmax.base_of(higher, empty_ok))
        return higher, softmax.scaled(older, rescale)

    row_max, older = lax.cond(moved != 0, raised, lambda: (row_max, older))
    p, row_sum = softmax.exponentials_and_sums(logits, unit, softmax.base_of(row_max, empty_ok))
    return softmax.Step(p, row_max, None, row_sum, moved), older


# ---- epilogue -----------------------------------------------------------------------------------


def finished(ctx: KernelContext, rows: QueryRows, sums: OutputSums) -> Any:
    """The output, divided by the row sums; stores the log-sum-exp."""
    plan, refs, _ = ctx
    tile = rows.tile
    sink = refs.sinks[tile.head] if plan.has("sinks") else None
    factor, lse = softmax.finish(sums.row_max, sums.row_sum, sink)
    acc = jax.tree.map(lambda x: x * mosaic.broadcast_rows(factor, x.shape), sums.acc)
    if tile.q_len is not None:
        lse, acc = softmax.without_dead_rows(lse, acc, rows.row, tile.q_len)
    where = tile.batch, tile.head, rows.row
    mosaic.store_rows(lse, refs.lse, where, plan.tiling.whole_rows)
    return acc


def _epilogue(ctx: KernelContext, rows: QueryRows, sums: OutputSums) -> None:
    """Divides by the row sums, and stores the output and the log-sum-exp."""
    plan, refs, smem = ctx
    tile, acc = rows.tile, finished(ctx, rows, sums)
    at = (tile.batch, tile.head, rows.row, plan.problem.q_len - rows.row)
    if plan.config.columns:
        return sm80_column_stream.write(acc, refs.out, at)
    result = acc.astype(refs.out.dtype)
    form = plan.format
    if form.terms == 1 and form.v_width <= form.k_width:
        return epilogue.write(result, refs.out, at, (smem.q, jnp.int32(0)))
    return mma_sync.write(result, refs.out, at)


# ---- the kernel and its call --------------------------------------------------------------------


def _kernel(
    refs: ForwardRefs, out: GmemRef, lse: GmemRef, smem: ForwardSmem, *, plan: QueryPlan
) -> None:
    ctx = KernelContext(plan, refs._replace(out=out, lse=lse), smem)
    mainloop, no_keys = _mainloop, _no_keys
    if plan.config.columns:
        mainloop, no_keys = sm80_columns.mainloop, sm80_columns.no_keys
    rows = rows_of_block(ctx)
    _epilogue(ctx, rows, sums_of(ctx, rows, mainloop, no_keys))


def rows_of_block(ctx: KernelContext) -> QueryRows:
    """The work tile of this block."""
    tile = tile_scheduler.work_tile(ctx, ctx.refs.schedule[lax.axis_index("block"), 1])
    if ctx.plan.is_listed:
        listed = list_of(ctx, tile)
        return QueryRows(tile, tile.row, jnp.int32(0), listed.span, listed=listed)
    return QueryRows(tile, tile.row, jnp.int32(0), span_of(ctx, tile))


def sums_of(
    ctx: KernelContext,
    rows: QueryRows,
    mainloop: Callable[[KernelContext, QueryRows], OutputSums],
    no_keys: Callable[[QueryPlan], OutputSums],
) -> OutputSums:
    """The sums of a block's rows: `mainloop` over their kv tiles, if there are any."""
    loop = functools.partial(mainloop, ctx, rows)
    if "empty" not in ctx.plan.sections:
        return loop()
    nothing = functools.partial(no_keys, ctx.plan)
    sums: OutputSums = lax.cond(rows.span.hi > rows.span.lo, loop, nothing)
    return sums


def span_of(ctx: KernelContext, tile: WorkTile, rows: Index | None = None) -> Span:
    """The kv tiles of so many rows from `tile.row` on, those of the work tile as a rule; lo == hi
    == 0 where there is none.
    """
    plan = ctx.plan
    rows = plan.tiling.tile_rows if rows is None else rows
    if tile.q_len is not None:
        rows = jnp.minimum(rows, tile.q_len - tile.row)
    span = plan.span(tile.mask, tile.q_offset + tile.row, rows, tile.kv_len)
    visible = key_masks.visible_tiles(ctx, tile) if plan.skips_keys else None
    span = segment_spans.narrowed(ctx, tile, span, visible)
    return tile_scheduler.empty_as_zero(tile, rows, span) if "empty" in plan.sections else span


def run(
    inputs: AttentionInputs, problem: AttentionProblem, config: Config
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, N, Hv] in q's dtype, log-sum-exp float32 [B, N, T]."""
    if problem.v_head_dim <= wide_heads.COLUMNS:
        return _launch(inputs, problem, config)
    results: list[tuple[jax.Array, jax.Array]] = []
    for columns in wide_heads.value_columns(problem.v_head_dim):
        part = inputs._replace(v=inputs.v[..., columns])
        if results:  # an order between launches: the interpreter simulates one kernel at a time
            part = part._replace(q=lax.optimization_barrier((part.q, results[-1]))[0])
        results.append(_launch(part, _of_a_launch(problem, columns), config))
    outs, lses = zip(*results, strict=True)
    return jnp.concatenate(outs, axis=-1), lses[0]


def _launch(
    inputs: AttentionInputs, problem: AttentionProblem, config: Config
) -> tuple[jax.Array, jax.Array]:
    plan = plan_of(problem, config)
    fields = {name: plan.format.operand(getattr(inputs, name)) for name in ("q", "k", "v")}
    ctx = KernelContext(plan, operands(plan, inputs, fields), scratch(plan))
    result = plan.format.result(problem.q_len, problem.q_heads, problem.v_head_dim)
    out, lse = launched(_kernel, ctx, result, "flash_fwd_sm80")
    return plan.format.whole_rows(out, problem.v_head_dim), lse


def launched(
    kernel: Callable[..., None], ctx: KernelContext, out: jax.ShapeDtypeStruct, name: str
) -> tuple[jax.Array, jax.Array]:
    """A block for each work tile: `out` and the log-sum-exp. `ctx`: the operands, and
    the shared memory that blocks need.
    """
    problem = ctx.plan.problem
    lse = jax.ShapeDtypeStruct((problem.batch, problem.q_heads, problem.q_len), jnp.float32)
    call = plgpu.kernel(
        functools.partial(kernel, plan=ctx.plan),
        out_type=(out, lse),
        scratch_types=(ctx.smem,),
        grid=(ctx.plan.order.grid,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
    )
    results: tuple[jax.Array, jax.Array] = call(key_masks.with_spans(ctx))
    return results


def operands(plan: QueryPlan, inputs: AttentionInputs, rows: dict[str, Operand]) -> ForwardRefs:
    """Arrays that the kernel reads; `rows`: q, k and v, and what belongs to them. Copied are:
    mask_array, to int8, unless it masks keys; segment ids.
    """
    fields: dict[str, Any] = {name: getattr(inputs, name) for name in plan.problem.arrays}
    fields |= rows
    fields |= functions.operands(inputs) | tile_scheduler.operands(plan, inputs)
    if plan.has("q_segment_ids"):
        sizes = plan.tiling.tile_rows, plan.tiling.block_kv
        fields["segment_spans"] = segment_spans.spans_of(plan.problem, inputs, fields, sizes)
        fields["schedule"] = documents.schedule_by_rank(plan, fields["segment_spans"])
    return ForwardRefs(**{name: fields.get(name) for name in ForwardRefs._fields})


KERNEL = Kernel(Config, limit, smem_bytes, run)
