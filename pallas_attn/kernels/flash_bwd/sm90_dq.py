"""dQ of the Hopper backward by a kernel of its own. It adds up nothing in global memory, so bits
repeat, and no array is set to zero before or rounded after. It computes S and dP a second time:
seven matmuls in all where the fused kernel has five.

Grid and orientation are those of the forward: a work tile is 64 query rows a consumer warpgroup,
`tile_scheduler.schedule` says which block takes which, and kv tiles arrive in rings. A step issues
dQ of the kv tile before, then S and dP of its own; P = exp(S - lse) is computed under dP.

Shared memory, and who owns it when:
  q, do [warpgroup]  loaded by TMA at the warpgroup's own request for each work tile; dq is stored
                     from q, but float32, which goes from registers to global memory
  k [stages]         a ring; a tile is released when its part of dQ is done, in the next step
  v [stages - 1]     a ring; a tile is released when dP is done
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionInputs
from pallas_attn.kernels.attention import (
    block_tables,
    key_masks,
    score_tiles,
    segment_spans,
    tile_logits,
    tile_scheduler,
    tma_operands,
)
from pallas_attn.kernels.attention.logits import LogitTile
from pallas_attn.kernels.attention.tile_scheduler import QueryPlan
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext, Span, WorkTile, kv_batch
from pallas_attn.kernels.attention.tma_operands import OperandFormat
from pallas_attn.kernels.flash_bwd import epilogue, operands
from pallas_attn.kernels.flash_bwd.float32 import Units, left_operand, matmul_add, scaled, units_of
from pallas_attn.kernels.flash_bwd.operands import BackwardRefs
from pallas_attn.kernels.flash_bwd.producer import load_rows
from pallas_attn.kernels.flash_fwd import listed
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.panels import Panels, Ring
from pallas_attn.kernels.lang.types import (
    Barrier,
    Carry,
    GmemRef,
    Index,
    Predicate,
    RegisterTile,
    SmemRef,
)
from pallas_attn.kernels.mma import wgmma, wgmma_float32


class DqConfig(NamedTuple):
    """The fields of the backward's Config that are about dQ."""

    warpgroups: int  # consumers
    block_kv: int
    stages: int
    grid: int


class DqSmem(NamedTuple):
    q: Panels
    do: Panels
    k: Panels
    v: Panels
    q_ready: Barrier
    k_ready: Barrier
    v_ready: Barrier
    k_free: Barrier
    v_free: Barrier
    bias_and_mask: Any = None  # bias and mask_array, in the ring of v: `score_tiles`

    @property
    def k_ring(self) -> Ring:
        return Ring(self.k, self.k_ready, self.k_free)

    @property
    def v_ring(self) -> Ring:
        return Ring(self.v, self.v_ready, self.v_free)


def scratch(plan: QueryPlan) -> DqSmem:
    """Shared memory, described once: `dq_of` launches it, `smem_bytes` adds it up."""
    barrier, consumers, block = plgpu.Barrier, plan.config.warpgroups, plan.config.block_kv
    stages, qk, v = plan.config.stages, plan.qk._replace(swizzle=k_swizzle(plan)), plan.v
    return DqSmem(
        q=qk.scratch(consumers, ROWS),
        do=v.scratch(consumers, ROWS),
        k=qk.scratch(stages, block),
        v=v.scratch(stages - 1, block),
        q_ready=barrier(num_barriers=consumers, num_arrivals=qk.copies + v.copies),
        k_ready=barrier(num_barriers=stages, num_arrivals=qk.copies),
        v_ready=barrier(
            num_barriers=stages - 1, num_arrivals=v.copies + score_tiles.copies(plan.score_tiles)
        ),
        k_free=barrier(num_barriers=stages, num_arrivals=consumers),
        v_free=barrier(num_barriers=stages - 1, num_arrivals=consumers),
        bias_and_mask=score_tiles.scratch(plan.score_tiles, stages - 1, plan.tiling.tile_rows),
    )


def k_swizzle(plan: QueryPlan) -> int:
    """Matmuls take dS by whole swizzles."""
    if plan.problem.dtype != "float32":
        return plan.qk.swizzle
    return min(plan.qk.swizzle, tma_operands.swizzle_of(plan.config.block_kv * plan.qk.itemsize))


def buffer_bytes(plan: QueryPlan) -> int:
    exact = wgmma_float32.is_exact(plan.problem)
    return mosaic.bytes_of(scratch(plan)) + (mosaic.REDUCTION_BYTES if exact else 0)


def with_spans(plan: QueryPlan, refs: BackwardRefs) -> BackwardRefs:
    """`key_masks.with_spans`, launched after the kernels before: `operands.ordered_after`
    says why.
    """
    if not plan.skips_keys:
        return refs
    mask, _ = lax.optimization_barrier((refs.mask_array, refs.delta))
    return key_masks.with_spans(KernelContext(plan, refs._replace(mask_array=mask)))


def visible_of(ctx: KernelContext, code: Index) -> Span | None:
    """The kv tiles that a mask of keys leaves of a work tile, read a work tile ahead; None: there
    is no such mask.
    """
    if not ctx.plan.skips_keys:
        return None
    return key_masks.visible_tiles(ctx, tile_scheduler.work_tile(ctx, code))


def span_of(ctx: KernelContext, tile: WorkTile, visible: Span | None = None) -> Span:
    """The kv tiles of a work tile, ordered lo <= full_lo <= full_hi <= hi. `visible`: those that a
    mask of keys leaves; None where all tiles are masked by it.
    """
    plan = ctx.plan
    if plan.is_listed:
        return listed.list_of(ctx, tile).span
    rows: Index = plan.tiling.tile_rows
    if tile.q_len is not None:
        rows = jnp.minimum(rows, tile.q_len - tile.row)
    span = plan.span(tile.mask, tile.q_offset + tile.row, plan.tiling.tile_rows, tile.kv_len)
    span = segment_spans.narrowed(ctx, tile, span, visible)
    hi = jnp.maximum(span.lo, jnp.where(rows > 0, span.hi, span.lo))
    full_lo = jnp.clip(span.full_lo, span.lo, hi)
    return Span(span.lo, full_lo, jnp.clip(span.full_hi, full_lo, hi), hi)


def kv_tile_of(ctx: KernelContext, tile: WorkTile, t: Index) -> Index:
    """The kv tile that is number t of a span."""
    return listed.list_of(ctx, tile).tile(t) if ctx.plan.is_listed else t


# ---- loads --------------------------------------------------------------------------------------


def _produce(ctx: KernelContext, block_id: Index) -> None:
    """The producer warpgroup: K and V of every work tile, in the order in which they are used."""
    plan, refs, _ = ctx

    def load_work_tile(n: Index, carry: Carry) -> Any:
        count, code, visible = carry
        following = refs.schedule[block_id, n + 2]
        tile = tile_scheduler.work_tile(ctx, code)
        span = span_of(ctx, tile, visible)
        visible = visible_of(ctx, following)
        head = lax.div(tile.head, jnp.int32(plan.problem.group))
        batch = kv_batch(plan.problem, tile.batch)

        def step(t: Index, count: Index) -> Index:
            _load_kv_tile(ctx, tile, kv_tile_of(ctx, tile, t), (batch, head), count)
            return count + 1

        return lax.fori_loop(span.lo, span.hi, step, count), following, visible

    count, first = refs.schedule[block_id, 0], refs.schedule[block_id, 1]
    lax.fori_loop(0, count, load_work_tile, (jnp.int32(0), first, visible_of(ctx, first)))


def _load_kv_tile(
    ctx: KernelContext, tile: WorkTile, t: Index, where: tuple[Index, Index], count: Index
) -> None:
    """Kv tile t of k and v at `where`, (batch, head), as number `count` of the rings."""
    (plan, _, smem), block = ctx, ctx.plan.config.block_kv
    for name, ring in (("k", smem.k_ring), ("v", smem.v_ring)):
        slot = ring.slot(count)
        ring.acquire(count, slot)
        to = ring.tiles, slot, ring.ready.at[slot]
        if name == "v" and plan.score_tiles:
            place = score_tiles.Place(tile.batch, tile.head, tile.row, t * block)
            score_tiles.load(ctx, smem.bias_and_mask, place, slot, ring.ready.at[slot])
        load_keys(ctx, tile, t, name, (*where, *to))


def load_keys(
    ctx: KernelContext, tile: WorkTile, t: Index, name: str, where: tuple[Any, ...]
) -> None:
    """Kv tile t of an array of keys or values; of its edge, where a length cuts the tile. `where`:
    batch row, head, and the arguments of `load_rows` for shared memory.
    """
    (plan, refs, _), block, (batch, head, *to) = ctx, ctx.plan.config.block_kv, where
    whole = functools.partial(load_rows, getattr(refs, name), (batch, head, t * block), *to)
    if not plan.has("kv_lengths"):
        return whole()
    cut = (t + 1) * block > tile.kv_len  # only the last tile may be
    edge = getattr(refs, f"{name}_edge")
    pl.when(cut)(functools.partial(load_rows, edge, (batch, head, 0), *to))
    pl.when(jnp.logical_not(cut))(whole)
    return None


def _load_queries(ctx: KernelContext, tile: WorkTile, wg: Index) -> None:
    """q and dO of a consumer warpgroup's rows."""
    _, refs, smem = ctx
    tile, row = block_tables.own_rows(ctx.plan, tile, wg)
    at = (tile.batch, tile.head, row)
    for ref, to in ((refs.q, smem.q), (refs.do, smem.do)):
        load_rows(ref, at, to, wg, smem.q_ready.at[wg])


# ---- a kv tile ----------------------------------------------------------------------------------


class DqRows(NamedTuple):
    """A warpgroup's rows of a work tile."""

    tile: WorkTile
    span: Span
    row: Index
    wg: Index
    lse: RegisterTile
    delta: RegisterTile
    units: Units

    def needs_mask(self, t: Index) -> Predicate:
        return (t < self.span.full_lo) | (t >= self.span.full_hi)


def multiply_rows(
    acc: RegisterTile, form: OperandFormat, left: tuple[Panels, Any], right: tuple[Panels, Any]
) -> None:
    """Issues acc = rows @ keys^T, of tiles in shared memory, each (buffer, index)."""
    if form.panels:
        return wgmma.score_panels(acc, panels.tiles(*left), panels.tiles(*right))
    rows, keys = (wgmma.terms_of_smem(panels.tiles(*x)[0], form.kind) for x in (left, right))
    return wgmma.multiply(acc, rows, wgmma.transposed(keys))


def matmuls(form: OperandFormat) -> int:
    """How many matmuls `multiply_rows` issues."""
    return form.copies if form.panels else wgmma.products(form.terms, form.terms)


def _multiply(
    ctx: KernelContext, rows: DqRows, count: Index, accs: tuple[RegisterTile, RegisterTile]
) -> int:
    """Issues S and dP of the kv tile that comes as number `count`; the number of matmuls."""
    plan, _, smem = ctx
    # An opaque zero, or addresses would be computed before the loop and spilled.
    wg = rows.wg + mosaic.opaque_zero(count)
    for acc, left, ring, form in (
        (accs[0], smem.q, smem.k_ring, plan.qk),
        (accs[1], smem.do, smem.v_ring, plan.v),
    ):
        slot = ring.slot(count)
        ring.wait(slot)
        multiply_rows(acc, form, (left, wg), (ring.tiles, slot))
    return matmuls(plan.qk) + matmuls(plan.v)


def _ds(
    ctx: KernelContext,
    rows: DqRows,
    step: tuple[Index, Index],
    accs: tuple[RegisterTile, RegisterTile],
    done_with_k: Index | None = None,
) -> RegisterTile:
    """dS, float32, of kv tile t whose S and dP have been issued. `step`: (t, its number in the
    rings); `done_with_k`: the slot of k that no matmul reads any more when S is there.
    """
    (plan, _, smem), tile, (t, count) = ctx, rows.tile, step
    s = plgpu.wgmma_accumulator_load(accs[0], wait_n=matmuls(plan.v))
    if done_with_k is not None:
        smem.k_ring.release(done_with_k)
    masked, key = rows.needs_mask(t), kv_tile_of(ctx, tile, t) * plan.config.block_kv
    where = (tile.batch, tile.head, rows.row, key, tile.q_offset, tile.kv_len, tile.mask)
    s, place = scaled(s, rows.units.scores), LogitTile(*where, q_axis=0)
    if plan.score_tiles:
        slot = smem.v_ring.slot(count)  # which `_multiply` has waited for
        place = place._replace(in_smem=score_tiles.rows_of(smem.bias_and_mask, slot, rows.wg))
    p, slope = tile_logits.probabilities(ctx, place, s, rows.lse, masked)
    dp = plgpu.wgmma_accumulator_load(accs[1], wait_n=0)
    smem.v_ring.release(smem.v_ring.slot(count))
    delta = mosaic.broadcast_rows(rows.delta, s.shape)
    return tile_logits.d_scores(p, scaled(dp, rows.units.dp), delta, slope)


# ---- the mainloop -------------------------------------------------------------------------------


def _keys(ctx: KernelContext, slot: Index) -> tuple[SmemRef, ...]:
    return wgmma.terms_of_smem(ctx.smem.k_ring.tiles.at[slot], ctx.plan.qk.kind)


def _scores(ctx: KernelContext) -> list[Any]:
    """The accumulators of S and dP."""
    return [plgpu.ACC((ROWS, ctx.plan.config.block_kv), jnp.float32) for _ in range(2)]


def _first_ds(ctx: KernelContext, rows: DqRows, count: Index) -> tuple[RegisterTile, ...]:
    """dS of the first kv tile, as the matmul of dQ takes it."""

    def body(*accs: RegisterTile) -> RegisterTile:
        _multiply(ctx, rows, count, accs)
        return _ds(ctx, rows, (rows.span.lo, count), accs)

    return left_operand(ctx.plan.problem, pl.run_scoped(body, *_scores(ctx)))


def _mainloop(ctx: KernelContext, rows: DqRows, count: Index) -> tuple[list[RegisterTile], Index]:
    """dQ of a warpgroup's rows, one tile a panel, over all kv tiles, of which there is one at
    least, and the new count of kv tiles.
    """
    if wgmma_float32.is_exact(ctx.plan.problem):
        return _sum_in_registers(ctx, rows, count)
    accumulate = functools.partial(_sum_in_accumulator, ctx, rows, count)
    widths = ctx.plan.qk.panels or (ctx.plan.qk.width,)
    return pl.run_scoped(accumulate, *(plgpu.ACC((ROWS, n), jnp.float32) for n in widths))


def _sum_in_accumulator(
    ctx: KernelContext, rows: DqRows, count: Index, *dq: RegisterTile
) -> tuple[list[RegisterTile], Index]:
    k_ring = ctx.smem.k_ring

    def add(ds: tuple[RegisterTile, ...], slot: Index) -> None:
        if ctx.plan.panels:
            return wgmma.value_panels(dq, ds[0], panels.tiles(ctx.smem.k, slot))
        return wgmma.multiply(dq[0], ds, _keys(ctx, slot))

    def step(t: Index, carry: Carry) -> Any:
        count, ds = carry
        last = k_ring.slot(count - 1)

        def body(*accs: RegisterTile) -> RegisterTile:
            add(ds, last)
            _multiply(ctx, rows, count, accs)
            return _ds(ctx, rows, (t, count), accs, last)

        ds = left_operand(ctx.plan.problem, pl.run_scoped(body, *_scores(ctx)))
        return count + 1, ds

    first = _first_ds(ctx, rows, count)
    end, ds = lax.fori_loop(rows.span.lo + 1, rows.span.hi, step, (count + 1, first))
    add(ds, k_ring.slot(end - 1))
    values = [acc[...] for acc in dq]
    k_ring.release(k_ring.slot(end - 1))
    return values, end


def _sum_in_registers(
    ctx: KernelContext, rows: DqRows, count: Index
) -> tuple[list[RegisterTile], Index]:
    """Exact float32: tiles of dQ are added up in registers (`wgmma_float32.exact_matmul_add`)."""
    plan, k_ring, swizzle = ctx.plan, ctx.smem.k_ring, k_swizzle(ctx.plan)

    def step(t: Index, carry: Carry) -> Any:
        count, ds, dq = carry
        last = k_ring.slot(count - 1)

        def body(*accs: RegisterTile) -> tuple[RegisterTile, RegisterTile]:
            behind = functools.partial(_multiply, ctx, rows, count, accs)
            new_dq = matmul_add(plan.problem, dq, ds, _keys(ctx, last), swizzle, behind)
            return _ds(ctx, rows, (t, count), accs, last), new_dq

        ds, dq = pl.run_scoped(body, *_scores(ctx))
        return count + 1, left_operand(plan.problem, ds), dq

    first = _first_ds(ctx, rows, count)
    start = count + 1, first, mosaic.filled((ROWS, plan.qk.width), 0.0)
    end, ds, dq = lax.fori_loop(rows.span.lo + 1, rows.span.hi, step, start)
    dq = matmul_add(plan.problem, dq, ds, _keys(ctx, k_ring.slot(end - 1)), swizzle)
    k_ring.release(k_ring.slot(end - 1))
    return [dq], end


# ---- the consumers ------------------------------------------------------------------------------


def _consume(ctx: KernelContext, dq_ref: GmemRef, block_id: Index, wg: Index) -> None:
    """A consumer warpgroup: every work tile of its block."""
    plan, refs, smem = ctx
    count, first = refs.schedule[block_id, 0], refs.schedule[block_id, 1]
    _load_queries(ctx, tile_scheduler.work_tile(ctx, first), wg)

    def work_tile(n: Index, carry: Carry) -> Any:
        kv_count, code, visible = carry
        following = refs.schedule[block_id, n + 2]
        rows = _rows(ctx, tile_scheduler.work_tile(ctx, code), wg, visible)
        plgpu.barrier_wait(smem.q_ready.at[wg])

        def no_keys(kv_count: Index) -> tuple[list[RegisterTile], Index]:
            widths = plan.qk.panels or (plan.qk.width,)
            return [mosaic.filled((ROWS, width), 0.0) for width in widths], kv_count

        mainloop = functools.partial(_mainloop, ctx, rows)
        dq, kv_count = lax.cond(rows.span.hi > rows.span.lo, mainloop, no_keys, kv_count)
        visible = visible_of(ctx, following)
        _store(ctx, dq_ref, rows, dq)

        @pl.when(n + 1 < count)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            _load_queries(ctx, tile_scheduler.work_tile(ctx, following), wg)

        return kv_count, following, visible

    lax.fori_loop(0, count, work_tile, (jnp.int32(0), first, visible_of(ctx, first)))
    plgpu.wait_smem_to_gmem(0)


def _rows(ctx: KernelContext, tile: WorkTile, wg: Index, visible: Span | None) -> DqRows:
    refs, span = ctx.refs, span_of(ctx, tile, visible)
    tile, row = block_tables.own_rows(ctx.plan, tile, wg)
    lse, delta = (
        mosaic.load(ref.at[tile.batch, tile.head, pl.ds(row, ROWS)], mosaic.ROW)
        for ref in (refs.lse, refs.delta)
    )
    kv_head = lax.div(tile.head, jnp.int32(ctx.plan.problem.group))
    units = units_of(refs.units, tile.batch, kv_head)
    return DqRows(tile, span, row, wg, lse, delta, units)


def _store(
    ctx: KernelContext, dq_ref: GmemRef, rows: DqRows, parts: Sequence[RegisterTile]
) -> None:
    """Stores dQ. Rows past a query length may have met NaN: zeros are selected in their place."""
    plan, _, smem = ctx
    tile = rows.tile
    unit = plan.problem.scale if rows.units.dq is None else rows.units.dq
    parts = [part * unit for part in parts]
    if tile.q_len is not None:
        inside = mosaic.positions((ROWS,), 0, rows.row) < tile.q_len
        parts = [jnp.where(mosaic.broadcast_rows(inside, part.shape), part, 0.0) for part in parts]
    if plan.problem.dtype == "float32":
        (dq,) = parts
        plgpu.commit_smem()  # q and dO have been read, and TMA will write there
        where = (tile.batch, pl.ds(rows.row, ROWS), tile.head, pl.ds(0, dq.shape[1]))
        return mosaic.store(dq_ref.at[where], dq)
    staged = [epilogue.Staged(parts, smem.q, rows.wg)]
    epilogue.write(staged)
    return epilogue.store(staged, dq_ref, (tile.batch, pl.ds(rows.row, ROWS), tile.head))


# ---- the kernel and its call --------------------------------------------------------------------


def _kernel(refs: BackwardRefs, dq_ref: GmemRef, smem: DqSmem, *, plan: QueryPlan) -> None:
    ctx = KernelContext(plan, refs, smem)
    block_id, wg = lax.axis_index("block"), lax.axis_index("wg")
    produce = functools.partial(_produce, ctx, block_id)
    consume = functools.partial(_consume, ctx, dq_ref, block_id, wg)
    registers = 160 if plan.config.warpgroups == 3 else 240
    mosaic.share_registers(wg, plan.config.warpgroups, produce, consume, registers)


def dq_of(plan: QueryPlan, refs: BackwardRefs) -> jax.Array:
    """dq, from the operands that `operands_of` gives."""
    problem = plan.problem
    padded = refs.q.shape
    if problem.dtype == "float32":
        padded = (padded[0], plan.tiling.padded_rows, padded[2], plan.qk.width)
    body, size = (
        functools.partial(_kernel, plan=plan),
        (plan.order.grid, plan.config.warpgroups + 1),
    )
    kernel = mosaic.persistent_kernel(
        body,
        "flash_bwd_dq_sm90",
        jax.ShapeDtypeStruct(padded, problem.dtype),
        scratch(plan),
        size,
        barriers=True,
    )
    return kernel(with_spans(plan, refs))[:, : problem.q_len, :, : problem.head_dim]


def operands_of(plan: QueryPlan, inputs: AttentionInputs, refs: BackwardRefs) -> BackwardRefs:
    """The operands of a kernel over keys, made those of this one."""
    refs = by_rows(plan, inputs, refs)
    keys = {"k": refs.k, "v": refs.v}
    blocks = ROWS, plan.config.block_kv
    return refs._replace(**operands.edges(plan.problem, inputs, keys, blocks))


def by_rows(plan: QueryPlan, inputs: AttentionInputs, refs: BackwardRefs) -> BackwardRefs:
    """The operands of a kernel over keys, which may add dq up, made those of one over query rows:
    what comes by tiles is by its own.
    """
    fields = tile_scheduler.operands(plan, inputs)
    if plan.has("q_segment_ids"):
        sizes = plan.tiling.tile_rows, plan.tiling.block_kv
        fields["segment_spans"] = segment_spans.spans_of(plan.problem, inputs, fields, sizes)
    return refs._replace(**fields, dq=None, aux_sums=None, mask_bits=None)
