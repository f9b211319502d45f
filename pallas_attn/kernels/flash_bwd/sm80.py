"""Flash attention backward for every GPU from Ampere on: bfloat16, float16 and float32.

As FlashAttention-2 (arXiv 2307.08691): a block of 4 warps owns 64 keys of one kv head (or 128) and
walks over the query tiles that meet them, of all query heads of the group. Tiles of scores have
keys as rows and queries as columns. The warps of a warpgroup are arranged in one of two ways
(`mma_2x2`):

  warp_rows 4  each has some keys and all queries of a tile: P^T and dS^T, as they come out of one
               matmul, are operands of the next; only for dQ dS^T goes through shared memory
  warp_rows 2  two by two, which takes fewer loads for as many matmuls: P^T and dS^T go through
               shared memory, where every warp reads all of them

dQ: every warp takes some query rows of dS^T, and their product is added to a float32 array in
global memory: five matmuls in all; a small kernel rounds dQ.
Head dims above 128 take two warpgroups, each of which makes half of the columns of all gradients,
and the scores of half of the queries.

Where bits must repeat, or shared memory does not suffice, dQ is a kernel of its own (`sm80_dq`),
and wide heads have a launch for dK and one for dV; where that is not enough either, all operands
come by some columns at a time (`sm80_columns`). A bias that wants a gradient has a third kernel
(`sm80_dbias`).

Shared memory: k, v; q twice, so that the next tile is loaded during this one; dO, twice where there
is room, else the next is loaded when dV is done; P^T and dS^T. A block synchronises two to four
times a step.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import gpu_specs
from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn._call.special import Special
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import (
    sm80_column_stream,
    sm80_common,
    tile_lists,
    tile_logits,
    tma_operands,
    wide_heads,
)
from pallas_attn.kernels.attention.sm80_common import Copy, MmaFormat, copy_async
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.flash_bwd import (
    costs,
    key_tiles,
    operands,
    sm80_dbias,
    sm80_dq,
    step_parts,
    work_order,
)
from pallas_attn.kernels.flash_bwd.key_tiles import KeyTile, QueryStep
from pallas_attn.kernels.flash_bwd.operands import BackwardRefs, Residuals, RowStatistics
from pallas_attn.kernels.flash_bwd.plan import KeyPlan
from pallas_attn.kernels.flash_bwd.work_order import KeyTiling
from pallas_attn.kernels.flash_fwd import sm80 as flash_fwd_sm80
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.config import check, first_that_fits
from pallas_attn.kernels.lang.types import GmemRef, Index, RegisterTile, SmemRef
from pallas_attn.kernels.mma import global_accumulate, mma_2x2, mma_sync
from pallas_attn.kernels.mma.mma_2x2 import RightOperand
from pallas_attn.kernels.mma.mma_sync import WarpGrid

sm80_columns = Special("kernels.flash_bwd.sm80_columns")  # rows that do not fit

L2_BYTES = 64 * 2**20  # read and added to by the heads of an L2 group


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning only: the result is the same up to rounding."""

    kv_blocks: int = 1  # 64 keys each
    block_q: int = 64
    warp_rows: int = 4  # warps of a warpgroup one above the other; 2: two by two
    warpgroups: int = 1
    do_stages: int = 1  # tiles of dO in shared memory
    dq_block_kv: int = 0  # keys of a tile of the kernel for dq; 0: dq is added up in global memory
    dq_stages: int = 2
    columns: int = 0  # columns of q, k, v and dO in shared memory at a time; 0: all
    parts: int = 1  # into which the steps of a work tile are divided: see `step_parts`

    def __post_init__(self) -> None:
        blocks = (16, 32, 64) if self.dq_block_kv else (32, 64)
        queries = self.block_q * self.warp_rows // (4 * max(self.warpgroups, 1))  # a warp's
        by_columns = (self.kv_blocks, self.warpgroups, self.warp_rows) == (1, 1, 4)
        by_columns = by_columns and self.dq_block_kv > 0
        most_parts = 1 if self.columns else step_parts.MOST
        check(
            self,
            kv_blocks=(self.kv_blocks in (1, 2), "1 or 2"),
            block_q=(self.block_q in blocks, "32 or 64, or, with dq_block_kv, 16"),
            warpgroups=(self.warpgroups in (1, 2), "1 or 2"),
            warp_rows=(
                self.warp_rows in (2, 4) and queries >= 16,
                "4, or 2 if a warp gets 16 queries",
            ),
            do_stages=(self.do_stages in (1, 2), "1 or 2"),
            dq_block_kv=(self.dq_block_kv in (0, 16, 32, 64), "0, 16, 32 or 64"),
            dq_stages=(self.dq_stages in (1, 2), "1 or 2"),
            parts=(1 <= self.parts <= most_parts, f"from 1 to {most_parts}"),
            columns=(
                not self.columns or (self.columns % 16 == 0 and by_columns),
                "0; or a multiple of 16 with dq_block_kv if kv_blocks and warpgroups are 1 and "
                "warp_rows is 4",
            ),
        )

    @classmethod
    def default(cls, problem: AttentionProblem) -> "Config":
        """The first Config for which the GPU has the shared memory."""
        dim = max(problem.head_dim, problem.v_head_dim)
        if dim > wide_heads.COLUMNS:
            return cls(block_q=32, dq_block_kv=32, columns=64)
        if problem.dtype == "float32":
            choices = [cls()] if dim <= 128 else []
        elif dim > 128:
            wide = cls(warp_rows=2, warpgroups=2, do_stages=2)
            choices = [wide, cls(block_q=32, warpgroups=2)]
        else:
            choices = [cls(warp_rows=2) if dim > 64 else cls(2, 32), cls()]
        choices = [] if problem.deterministic else choices
        tiles_of_dq = ((64, 2), (32, 2), (16, 2), (32, 1), (16, 1))
        choices += [
            cls(block_q=block, dq_block_kv=keys, dq_stages=stages)
            for block in (64, 32, 16)
            for keys, stages in tiles_of_dq
        ]
        streamed = cls(block_q=32, dq_block_kv=32, columns=64)
        config = first_that_fits(problem, smem_bytes, [*choices, streamed])
        blocks = gpu_specs.multiprocessors(problem.gpu)
        parts = 1 if config.columns else costs.parts_of_idle(plan_of(problem, config).order, blocks)
        return dataclasses.replace(config, parts=parts)


def limit(problem: AttentionProblem) -> Limit | None:
    return flash_fwd_sm80.limit(problem)


# ---- static values ------------------------------------------------------------------------------


def plan_of(problem: AttentionProblem, config: Config) -> KeyPlan:
    tiling = KeyTiling(problem, ROWS * config.kv_blocks, config.block_q)
    order = work_order.WorkOrder(tiling, l2_bytes=L2_BYTES, parts=config.parts)
    form = MmaFormat(problem, config.columns, 16 * config.warpgroups)
    return KeyPlan(problem, config, order, form)


def launches(plan: KeyPlan) -> tuple[str, ...]:
    """The gradients of keys that each launch makes: both, or each by one of its own."""
    wide = max(plan.problem.head_dim, plan.problem.v_head_dim) > 128
    return ("v", "k") if wide and plan.config.warpgroups == 1 else ("kv",)


def is_fused(plan: KeyPlan) -> bool:
    """Whether the launch for dk and dv adds up dq too."""
    alone = len(launches(plan)) > 1 or plan.config.columns or plan.problem.deterministic
    return not (plan.config.dq_block_kv or alone)


def warp_grid(plan: KeyPlan, group: Index = 0) -> WarpGrid:
    """The arrangement of warps around gradients, as warpgroup `group` has it."""
    return WarpGrid(plan.config.warp_rows, plan.config.warpgroups, group)


def dq_slices(plan: KeyPlan) -> int:
    """Slices of a tile of dq, some columns each. Each of two warpgroups makes two of them, one
    after the other, which leaves registers for loads.
    """
    groups = plan.config.warpgroups
    return groups if groups == 1 or plan.format.k_width % 64 else 2 * groups


def adds_vectors(problem: AttentionProblem) -> bool:
    """Whether memory adds 4 numbers by one instruction."""
    return gpu_specs.number(problem.gpu or "sm80") >= 90


# ---- shared memory ------------------------------------------------------------------------------


class PortableSmem(NamedTuple):
    k: SmemRef  # [keys, ..]
    v: SmemRef  # [keys, ..]; None where there is no dK
    q: SmemRef  # [2 * block_q, ..]
    do: SmemRef  # [do_stages * block_q, ..]
    p: SmemRef  # [keys, block_q]; None where no warp wants another's
    ds: SmemRef


def scratch(plan: KeyPlan, which: str) -> PortableSmem | sm80_column_stream.ChunkSmem:
    """Shared memory of the launch for `which`: "k", "v" or "kv", what it makes gradients of."""
    form, keys, block = plan.format, plan.tiling.block_kv, plan.config.block_q
    if form.columns:
        return sm80_column_stream.scratch(form, block)
    is_shared = warp_grid(plan).shares > 1
    has_ds = "k" in which and (is_fused(plan) or is_shared)
    return PortableSmem(
        k=form.buffer(keys, form.k_width),
        v=form.buffer(keys, form.v_width) if "k" in which else None,
        q=form.buffer(2 * block, form.k_width),
        do=form.buffer(plan.config.do_stages * block, form.v_width),
        p=form.buffer(keys, block) if "v" in which and is_shared else None,
        ds=form.buffer(keys, block) if has_ds else None,
    )


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    """Shared memory of the kernel that needs most."""
    plan = plan_of(problem, config)
    each = [mosaic.bytes_of(scratch(plan, which)) for which in launches(plan)]
    if not is_fused(plan):
        each.append(mosaic.bytes_of(sm80_dq.scratch(sm80_dq.plan_of(problem, config))))
    return max(*each, sm80_dbias.smem_bytes(problem, config))


# ---- loading ------------------------------------------------------------------------------------


class KeyBlock(NamedTuple):
    """Values of a warpgroup in the mainloop."""

    ctx: KernelContext
    work: KeyTile
    which: str  # gradients that it makes
    warps: WarpGrid

    def sync(self, *copies: Copy) -> None:
        """All threads of the block; then `copies` begin."""
        copy_async(*copies, pending=None, sync=True, groups=self.warps.groups)


def _copy_keys(block: KeyBlock, name: str) -> Copy:
    """The warpgroup's part of a work tile's rows of k or v."""
    work = block.work
    at = (work.batch, work.kv_head, work.key, work.kv_len - work.key, jnp.int32(0))
    return _copy_rows(block, name, at, block.ctx.plan.tiling.block_kv)


def _copy_queries(block: KeyBlock, name: str, step: QueryStep, slot: Index) -> Copy:
    """The warpgroup's part of a query tile of q or dO."""
    plan, work, size = block.ctx.plan, block.work, block.ctx.plan.config.block_q
    length: Index = plan.problem.q_len if work.q_len is None else work.q_len
    live = jnp.where(step.exists, length - step.t * size, 0)
    return _copy_rows(block, name, (work.batch, step.head, step.t * size, live, slot * size), size)


def _copy_rows(block: KeyBlock, name: str, at: tuple[Index, ...], rows: int) -> Copy:
    plan, refs, smem = block.ctx
    (batch, head, row, live, to), groups = at, plan.config.warpgroups
    rows = rows // groups
    begin = block.warps.group * rows
    at = (batch, head, row + begin, live - begin, to + begin)
    ref, width = getattr(refs, name), plan.format.terms * plan.format.width(name)
    # Whatever is said of addresses: with few registers to spare, constants from one are faster
    # (head dims 128, causal, and 256); at 64 they are slower.
    fixed = block.warps.shares == 1
    return Copy((getattr(smem, name), ref), at, (rows, ref.shape, width, fixed))


# ---- the mainloop -------------------------------------------------------------------------------


class FirstRows(NamedTuple):
    """The rows of shared memory from which on the tiles of q and dO lie."""

    q: Index
    do: Index


def _mainloop(block: KeyBlock) -> tuple[RegisterTile, ...]:
    """The gradients of the block's keys over all query tiles, or over those of a part."""
    (plan, _, _), work, which = block.ctx, block.work, block.which
    begin, end = key_tiles.steps_of(plan, work)

    def body(i: Index, carry: tuple[RegisterTile, ...]) -> tuple[RegisterTile, ...]:
        grads = dict(zip(which, carry, strict=True))
        step = key_tiles.query_step(plan, work, i)
        following = key_tiles.query_step(plan, work, i + 1)
        slot = (i - begin) & 1
        soon, later = [_copy_queries(block, "q", following, 1 - slot)], []
        if plan.config.do_stages == 2:
            soon.append(_copy_queries(block, "do", following, 1 - slot))
        else:
            later.append(_copy_queries(block, "do", following, jnp.int32(0)))
        copy_async(*soon, pending=0, groups=block.warps.groups)
        first_do = (slot if plan.config.do_stages == 2 else jnp.int32(0)) * plan.config.block_q
        rows = FirstRows(slot * plan.config.block_q, first_do)
        return _step(block, step, rows, grads, later)

    none = jnp.int32(0)
    first = key_tiles.query_step(plan, work, begin + none)
    keys = [_copy_keys(block, name) for name in ("k", "v") if "k" in which or name == "k"]
    queries = [_copy_queries(block, name, first, none) for name in ("q", "do")]
    copy_async(*keys, *queries, pending=None)
    return lax.fori_loop(begin, end, body, tuple(_no_gradient(block, name) for name in which))


def _no_gradient(block: KeyBlock, name: str) -> RegisterTile:
    plan, warps = block.ctx.plan, block.warps
    shape = (plan.tiling.block_kv, plan.format.width(name) // warps.groups)
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), mosaic.warp_layout(shape, warps.down))


def _step(
    block: KeyBlock,
    step: QueryStep,
    rows: FirstRows,
    grads: dict[str, RegisterTile],
    later: list[Copy],
) -> tuple[RegisterTile, ...]:
    """One query tile; `later` are the copies that take the place of this dO."""
    (plan, _, smem), which, warps = block.ctx, block.which, block.warps
    form, terms = plan.format, plan.format.terms
    shape = (plan.tiling.block_kv, plan.config.block_q, terms)
    q = RightOperand(smem.q, rows.q, form.k_width)
    do = RightOperand(smem.do, rows.do, form.v_width)
    before = grads if terms == 3 else {}  # tensor cores, which round towards 0, add up one tile
    grads = {name: _no_gradient(block, name) for name in before} or grads
    probabilities, derivative = _scores(block, step, rows)
    p = mma_sync.terms_of(probabilities, terms, form.dtype)
    ds: tuple[RegisterTile, ...] = ()
    if smem.p is not None:
        mma_2x2.store_tile(p, smem.p, warps)
    elif "v" in which:
        grads["v"] = mma_sync.matmul_add(grads["v"], p, *do, warps)
    if "k" in which:
        ds = mma_sync.terms_of(derivative(probabilities), terms, form.dtype)
    if smem.ds is not None:
        mma_2x2.store_tile(ds, smem.ds, warps)
    if smem.p is not None:
        block.sync()
        grads["v"] = mma_2x2.matmul_add_shared(grads["v"], smem.p, do, shape, warps)
    if later or (smem.p is None and smem.ds is not None):
        block.sync(*later)
    if "k" in which and warps.shares > 1:
        grads["k"] = mma_2x2.matmul_add_shared(grads["k"], smem.ds, q, shape, warps)
    elif "k" in which:
        grads["k"] = mma_sync.matmul_add(grads["k"], ds, *q, warps)
    if is_fused(plan):
        _add_dq(block, step)
    grads = {name: grads[name] + old for name, old in before.items()} or grads
    return tuple(grads[name] for name in which)


def _scores(
    block: KeyBlock, step: QueryStep, first: FirstRows
) -> tuple[RegisterTile, Callable[[RegisterTile], RegisterTile]]:
    """(P of a warpgroup's queries; dS as a function of it)."""
    (plan, refs, smem), warps, form = block.ctx, block.warps, block.ctx.plan.format
    size, none = plan.config.block_q, jnp.int32(0)
    queries = size // warps.groups
    shape, begin = (plan.tiling.block_kv, queries), warps.group * queries
    layout = mosaic.warp_layout(shape, warps.down)
    rows = pl.ds(step.t * size + begin, queries)

    def of_rows(ref: GmemRef) -> RegisterTile:
        return mosaic.load(ref.at[block.work.batch, step.head, rows], layout.reduce(0))

    def product(keys: SmemRef, tile: SmemRef, first_row: Index, width: int) -> RegisterTile:
        right = tile, first_row + begin
        return mma_sync.scores((keys, none), right, (*shape, width), form.terms, grid=warps)

    lse = of_rows(refs.lse)
    s = product(smem.k, smem.q, first.q, form.k_width)
    place = block.work.place(step.head, step.t, block.work.key, size, layout)
    place = place._replace(query=place.query + begin)
    masked = key_tiles.needs_mask(plan.tiling, block.work, step.t, step.number)
    p, slope = tile_logits.probabilities(block.ctx, place, s, lse, masked)

    def derivative(p: RegisterTile) -> RegisterTile:
        delta = of_rows(refs.delta)
        dp = product(smem.v, smem.do, first.do, form.v_width)
        return tile_logits.d_scores(p, dp, key_tiles.per_column(delta, shape), slope)

    return p, derivative


def _add_dq(block: KeyBlock, step: QueryStep) -> None:
    """Adds the warpgroup's slices of a query tile's dQ to global memory."""
    (plan, refs, smem), warps, slices = block.ctx, block.warps, dq_slices(block.ctx.plan)
    sizes = (plan.config.block_q, plan.tiling.block_kv, plan.format.k_width)
    tile = (block.work.batch * plan.problem.q_heads + step.head) * plan.tiling.q_tiles + step.t
    each = slices // warps.groups
    for n in range(each):
        own = warps._replace(groups=slices, group=warps.group * each + n)
        dq = mma_2x2.transposed_product(smem.ds, smem.k, sizes, plan.format.terms, own)
        vectors = adds_vectors(plan.problem)
        global_accumulate.add(dq, refs.dq, tile * slices + own.group, vectors)


def _store(block: KeyBlock, outs: Sequence[GmemRef], grads: Sequence[RegisterTile]) -> None:
    plan, work = block.ctx.plan, block.work
    row = work.batch if plan.order.parts == 1 else work.batch * plan.order.parts + work.part
    for name, grad, out in zip(block.which, grads, outs, strict=True):
        grad = grad * plan.problem.scale if name == "k" else grad
        at = (row, work.kv_head, work.key, plan.problem.kv_len - work.key)
        mma_sync.write(grad.astype(out.dtype), out, at, block.warps)


# ---- the kernel and its call --------------------------------------------------------------------


def _kernel(refs: BackwardRefs, *rest: Any, plan: KeyPlan, which: str) -> None:
    *outs, smem = rest
    ctx = KernelContext(plan, refs, smem)
    group = lax.axis_index("wg") if plan.config.warpgroups > 1 else jnp.int32(0)
    work = key_tiles.key_tile(ctx, refs.schedule[lax.axis_index("block"), 1])
    block = KeyBlock(ctx, work, which, warp_grid(plan, group))
    _store(block, outs, _mainloop(block))


def _launch(plan: KeyPlan, refs: BackwardRefs, which: str) -> dict[str, jax.Array]:
    """dk, dv or both, by name. Those of parts are float32, as batch rows, and added up by XLA."""
    problem, parts = plan.problem, plan.order.parts
    kernel, name = _kernel, f"flash_bwd_{which}_sm80"
    if plan.config.columns:
        kernel, name = sm80_columns.dk_dv_kernel, f"flash_bwd_{which}_streams_sm80"
    dims = {"k": problem.head_dim, "v": problem.v_head_dim}
    results = [plan.format.result(problem.kv_len, problem.kv_heads, dims[name]) for name in which]
    if parts > 1:
        sizes = [(problem.batch * parts, *x.shape[1:]) for x in results]
        results = [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]
    call = plgpu.kernel(
        functools.partial(kernel, plan=plan, which=which),
        out_type=tuple(results),
        scratch_types=(scratch(plan, which),),
        grid=(plan.order.grid,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
        **sm80_common.warpgroup_arguments(plan.config.warpgroups),
    )
    made = call(refs)
    if parts > 1:
        made = [x.reshape(problem.batch, parts, *x.shape[1:]).sum(1) for x in made]
        made = [x.astype(problem.dtype) for x in made]
    grads = zip(which, made, strict=True)
    return {name: plan.format.whole_rows(x, dims[name]) for name, x in grads}


def _by_parts(ctx: KernelContext, which: str) -> jax.Array:
    """dk or dv, by as many launches as `wide_heads` needs."""
    plan, refs, _ = ctx

    def make(form: MmaFormat, before: jax.Array | None) -> jax.Array:
        part = dataclasses.replace(plan, format=form)
        after = refs if before is None else operands.ordered_after(refs, before)
        return _launch(part, after, which)[which]

    return wide_heads.by_parts(plan.format, which, make)


def run(residuals: Residuals, problem: AttentionProblem, config: Config) -> AttentionInputs:
    """(inputs, out, lse, d_out, d_lse) -> the cotangents of inputs."""
    residuals, plan = Residuals(*residuals), plan_of(problem, config)
    inputs, fused = residuals.inputs, is_fused(plan)
    rows = tma_operands.round_up(problem.q_len, 2 * ROWS)  # whole tiles, of any size
    stats = operands.row_statistics(plan.exact, rows, residuals)
    refs = _operands(plan, residuals, stats)
    grads: dict[str, Any] = {}
    if fused:
        sums = sm80_dq.dq_sums_shape(plan, dq_slices(plan))
        refs = refs._replace(dq=jax.new_ref(jnp.zeros(sums, jnp.float32)))
    for which in launches(plan):
        if len(which) > 1:
            grads |= _launch(plan, refs, which)
        else:
            grads[which] = _by_parts(KernelContext(plan, refs), which)
        refs = operands.ordered_after(refs, grads[which[0]])
    if fused:
        vectors = adds_vectors(problem)
        dq = sm80_dq.collected(plan, jax.freeze(refs.dq), dq_slices(plan), vectors)
    else:
        dq = sm80_dq.dq_of(sm80_dq.plan_of(problem, config), inputs, refs)
    if inputs.bias is not None or problem.learned:
        refs = operands.ordered_after(refs, dq)
        grads |= sm80_dbias.gradients(problem, config, inputs, refs)
    if inputs.sinks is not None:
        grads["sinks"] = operands.dsinks(residuals, stats)
    return AttentionInputs(q=dq, **grads)


def _operands(plan: KeyPlan, residuals: Residuals, stats: RowStatistics) -> BackwardRefs:
    """The arrays of a kernel over keys, but for dq. Copied are float32 arrays, into terms; a bias,
    transposed; a mask of queries and keys, as bits; segment ids.
    """
    inputs, operand = residuals.inputs, plan.format.operand
    fields: dict[str, Any] = operands.over_tiles(plan, inputs) | stats._asdict()
    fields |= {name: operand(getattr(inputs, name)) for name in ("q", "k", "v")}
    fields["do"] = operand(residuals.d_out)
    fields["schedule"] = jnp.asarray(work_order.schedule(plan.order))
    if plan.tiling.is_listed:
        fields["tiles"] = tile_lists.tiles(plan.problem, inputs, *plan.tiling.list_sizes)
    return BackwardRefs(**fields)


KERNEL = Kernel(Config, limit, smem_bytes, run)
