"""dQ of the Hopper backward, by a kernel of its own: no sum in global memory, so the same bits each
time, and nothing to set to zero before or to round after. It computes S and dP a second time: seven
matmuls in all where the fused kernel has five.

The forward's grid and orientation: a work tile is 64 query rows a consumer warpgroup,
`tile_scheduler.schedule` says which block takes which, and kv tiles pass by in rings. A step issues
dQ of the kv tile before, then S and dP of its own; P = exp(S - lse) is computed under dP.

Shared memory, and who owns it when:
  q, do [warpgroup]  loaded by TMA at the warpgroup's own request for each work tile; dq is stored
                     from q, but float32, which goes from registers to global memory
  k [stages]         a ring; a tile is released when its part of dQ is done, in the next step
  v [stages - 1]     a ring; a tile is released when dP is done
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionInputs
from pallas_attn.kernels.attention import score_mod, tma_operands
from pallas_attn.kernels.attention.plan import ROWS, Context, Plan, kv_batch
from pallas_attn.kernels.attention.score_mod import Place, Tile
from pallas_attn.kernels.flash_bwd.float32 import Units, left_operand, matmul_add, scaled, units_of
from pallas_attn.kernels.flash_bwd.plan import Refs, Ring
from pallas_attn.kernels.flash_fwd import tile_scheduler
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.mma import wgmma


class Smem(NamedTuple):
    q: Any
    do: Any
    k: Any
    v: Any
    q_ready: Any
    k_ready: Any
    v_ready: Any
    k_free: Any
    v_free: Any

    @property
    def k_ring(self) -> Ring:
        return Ring(self.k, self.k_ready, self.k_free)

    @property
    def v_ring(self) -> Ring:
        return Ring(self.v, self.v_ready, self.v_free)


def scratch(plan: Plan) -> Smem:
    """Shared memory, described once: `dq_of` launches it, `smem_bytes` adds it up."""
    config = plan.config
    barrier, consumers = plgpu.Barrier, config.warpgroups
    stages, v_stages = config.stages, config.stages - 1
    k_columns, v_columns = plan.scores.terms * plan.k_width, plan.values.terms * plan.v_width
    k_swizzle, v_swizzle = k_swizzle_of(plan), plan.v_swizzle
    k_dtype, v_dtype = plan.scores.dtype, plan.values.dtype
    return Smem(
        q=mosaic.swizzled((consumers, ROWS, k_columns), k_dtype, k_swizzle),
        do=mosaic.swizzled((consumers, ROWS, v_columns), v_dtype, v_swizzle),
        k=mosaic.swizzled((stages, config.block_kv, k_columns), k_dtype, k_swizzle),
        v=mosaic.swizzled((v_stages, config.block_kv, v_columns), v_dtype, v_swizzle),
        q_ready=barrier(num_barriers=consumers, num_arrivals=2),
        k_ready=barrier(num_barriers=stages),
        v_ready=barrier(num_barriers=v_stages),
        k_free=barrier(num_barriers=stages, num_arrivals=consumers),
        v_free=barrier(num_barriers=v_stages, num_arrivals=consumers),
    )


def k_swizzle_of(plan: Plan) -> int:
    """Matmuls take dS by whole swizzles."""
    if plan.problem.dtype != "float32":
        return plan.k_swizzle
    return min(plan.k_swizzle, tma_operands.swizzle_of(plan.config.block_kv * plan.scores.itemsize))


def buffer_bytes(plan: Plan) -> int:
    return mosaic.bytes_of(scratch(plan)) + (mosaic.REDUCTION_BYTES if plan.exact else 0)


def span_of(ctx: Context, tile: Tile) -> Any:
    """The kv tiles of a work tile, ordered lo <= full_lo <= full_hi <= hi."""
    plan, refs, _ = ctx
    if plan.is_listed:
        return tile_scheduler.listed(ctx, tile).span
    rows: Any = plan.tile_rows
    if tile.q_len is not None:
        rows = jnp.minimum(rows, tile.q_len - tile.row)
    span = plan.span(tile.mask, tile.q_offset + tile.row, plan.tile_rows, tile.kv_len)
    if plan.has("q_segment_ids"):
        unit = lax.div(tile.row, jnp.int32(plan.tile_rows))
        fields = (refs.segment_spans[tile.batch, i, unit] for i in range(4))
        span = span.within(type(span)(*fields))
    if plan.has("mask_array"):
        span = span._replace(full_hi=span.full_lo)
    hi = jnp.maximum(span.lo, jnp.where(rows > 0, span.hi, span.lo))
    full_lo = jnp.clip(span.full_lo, span.lo, hi)
    return type(span)(span.lo, full_lo, jnp.clip(span.full_hi, full_lo, hi), hi)


def kv_tile_of(ctx: Context, tile: Tile, t: Any) -> Any:
    """The kv tile that is number t of a span."""
    return tile_scheduler.listed(ctx, tile).tile(t) if ctx.plan.is_listed else t


# ---- the producer -------------------------------------------------------------------------------


def _produce(ctx: Context, block_id: Any) -> None:
    """The producer warpgroup: K and V of every work tile, in the order in which they are used."""
    plan, refs, smem = ctx
    block = plan.config.block_kv

    def one_work_tile(n, carry):
        count, code = carry
        following = refs.schedule[block_id, n + 2]
        tile = tile_scheduler.tile_of(ctx, code)
        span = span_of(ctx, tile)
        head = lax.div(tile.head, jnp.int32(plan.problem.group))
        batch = kv_batch(plan.problem, tile.batch)

        def step(t, count):
            t = kv_tile_of(ctx, tile, t)
            for name, ring in (("k", smem.k_ring), ("v", smem.v_ring)):
                slot = ring.slot(count)
                ring.acquire(count, slot)

                def copy(ref, first, to=ring.tiles.at[slot], ready=ring.ready.at[slot]):
                    columns = mosaic.columns(ref, 0, to.shape[-1], head)
                    there = ref.at[batch, pl.ds(first, block), head, columns]
                    plgpu.copy_gmem_to_smem(there, to, ready)

                whole = functools.partial(copy, getattr(refs, name), t * block)
                if not plan.has("kv_lengths"):
                    whole()
                    continue
                cut = (t + 1) * block > tile.kv_len  # only the last tile may be
                pl.when(cut)(functools.partial(copy, getattr(refs, f"{name}_edge"), 0))
                pl.when(jnp.logical_not(cut))(whole)
            return count + 1

        return lax.fori_loop(span.lo, span.hi, step, count), following

    count, first = refs.schedule[block_id, 0], refs.schedule[block_id, 1]
    lax.fori_loop(0, count, one_work_tile, (jnp.int32(0), first))


def _load_rows(ctx: Context, tile: Tile, wg: Any) -> None:
    """q and dO of a consumer warpgroup's rows."""
    _, refs, smem = ctx
    rows = pl.ds(tile.row + wg * ROWS, ROWS)
    for ref, to in ((refs.q, smem.q), (refs.do, smem.do)):
        columns = mosaic.columns(ref, 0, to.shape[-1], tile.head)
        there = ref.at[tile.batch, rows, tile.head, columns]
        plgpu.copy_gmem_to_smem(there, to.at[wg], smem.q_ready.at[wg])


# ---- the consumers ------------------------------------------------------------------------------


class Rows(NamedTuple):
    """A warpgroup's rows of a work tile."""

    tile: Tile
    span: Any
    row: Any
    wg: Any
    lse: Any
    delta: Any
    units: Units

    def needs_mask(self, t: Any) -> Any:
        return (t < self.span.full_lo) | (t >= self.span.full_hi)


class Products(NamedTuple):
    """Accumulators of a kv tile."""

    s: Any
    dp: Any


def _ds(ctx: Context, rows: Rows, t: Any, s: Any, dp: Callable[[], Any]) -> Any:
    """dS of kv tile t, float32; `dp` gives dP, and is called when P is done."""
    plan, refs, _ = ctx
    tile, shape, masked = rows.tile, s.shape, rows.needs_mask(t)
    key = kv_tile_of(ctx, tile, t) * plan.config.block_kv
    where = (tile.batch, tile.head, rows.row, key, tile.q_offset, tile.kv_len, tile.mask)
    place = Place(*where, q_axis=0)
    s = scaled(s, rows.units.scores)
    p, slope = score_mod.probabilities(ctx, place, s, rows.lse, masked)
    ds = p * (scaled(dp(), rows.units.dp) - mosaic.broadcast_rows(rows.delta, shape))
    return ds if slope is None else ds * slope


def _multiply(ctx: Context, wg: Any, count: Any, accs: Products) -> int:
    """Issues S and dP of the kv tile that comes as number `count`; says how many matmuls."""
    (plan, _, smem), issued = ctx, 0
    for acc, rows, ring, kind in (
        (accs.s, smem.q, smem.k_ring, plan.scores),
        (accs.dp, smem.do, smem.v_ring, plan.values),
    ):
        slot, left = ring.slot(count), wgmma.terms_of_smem(rows.at[wg], kind)
        ring.wait(slot)
        right = wgmma.transposed(wgmma.terms_of_smem(ring.tiles.at[slot], kind))
        wgmma.multiply(acc, left, right)
        issued += wgmma.products(kind.terms, kind.terms)
    return issued


def _without_dq(both: Callable[[], int]) -> None:
    both()


def _mainloop(ctx: Context, rows: Rows, count: Any) -> tuple[Any, Any]:
    """dQ of a warpgroup's rows over all kv tiles, of which there is one at least, and the new count
    of kv tiles.
    """
    (plan, _, smem), span = ctx, rows.span
    scores, values, swizzle = plan.scores, plan.values, k_swizzle_of(plan)
    shape, width = (ROWS, plan.config.block_kv), smem.q.shape[-1] // scores.terms
    k_ring, v_ring, to_left = smem.k_ring, smem.v_ring, functools.partial(left_operand, plan)

    def keys(slot):
        return wgmma.terms_of_smem(k_ring.tiles.at[slot], scores)

    def tile(t, count, before, after):
        """dS of kv tile t, and what `before` gives: it is called with what issues S and dP, and may
        issue something first. `after` is called when S is done.
        """

        def run(s_acc, dp_acc):
            # Else addresses are computed before the loop and spilled.
            wg = rows.wg + mosaic.opaque_zero(count)
            both = functools.partial(_multiply, ctx, wg, count, Products(s_acc, dp_acc))
            first = before(both)
            behind = wgmma.products(values.terms, values.terms)
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=behind)
            after()

            def dp():
                value = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
                v_ring.release(v_ring.slot(count))
                return value

            return _ds(ctx, rows, t, s, dp), first

        both = plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32)
        return pl.run_scoped(run, *both)

    def first_tile():
        return to_left(tile(span.lo, count, _without_dq, lambda: None)[0])

    def in_registers():
        """Tiles of dQ are added up in registers: see `wgmma.exact_matmul_add`."""

        def step(t, carry):
            count, ds, dq = carry
            last = k_ring.slot(count - 1)

            def before(both):
                return matmul_add(plan, dq, ds, keys(last), swizzle, both)

            ds, dq = tile(t, count, before, functools.partial(k_ring.release, last))
            return count + 1, to_left(ds), dq

        first = first_tile()
        dq = mosaic.filled((ROWS, width), 0.0)
        end, ds, dq = lax.fori_loop(span.lo + 1, span.hi, step, (count + 1, first, dq))
        dq = matmul_add(plan, dq, ds, keys(k_ring.slot(end - 1)), swizzle)
        k_ring.release(k_ring.slot(end - 1))
        return dq, end

    def in_accumulator(dq):
        def step(t, carry):
            count, ds = carry
            last = k_ring.slot(count - 1)

            def before(both):
                wgmma.multiply(dq, ds, keys(last))
                both()

            after = functools.partial(k_ring.release, last)
            return count + 1, to_left(tile(t, count, before, after)[0])

        first = first_tile()
        end, ds = lax.fori_loop(span.lo + 1, span.hi, step, (count + 1, first))
        wgmma.multiply(dq, ds, keys(k_ring.slot(end - 1)))
        value = dq[...]
        k_ring.release(k_ring.slot(end - 1))
        return value, end

    if plan.exact:
        return in_registers()
    return pl.run_scoped(in_accumulator, plgpu.ACC((ROWS, width), jnp.float32))


def _consume(ctx: Context, dq_ref: Any, block_id: Any, wg: Any) -> None:
    """A consumer warpgroup: every work tile of its block."""
    plan, refs, smem = ctx
    count, first = refs.schedule[block_id, 0], refs.schedule[block_id, 1]
    _load_rows(ctx, tile_scheduler.tile_of(ctx, first), wg)

    def one_work_tile(n, carry):
        kv_count, code = carry
        following = refs.schedule[block_id, n + 2]
        tile = tile_scheduler.tile_of(ctx, code)
        row = tile.row + wg * ROWS
        lse, delta = (
            mosaic.load(ref.at[tile.batch, tile.head, pl.ds(row, ROWS)], mosaic.ROW)
            for ref in (refs.lse, refs.delta)
        )
        kv_head = lax.div(tile.head, jnp.int32(plan.problem.group))
        units = units_of(refs, tile.batch, kv_head)
        rows = Rows(tile, span_of(ctx, tile), row, wg, lse, delta, units)
        plgpu.barrier_wait(smem.q_ready.at[wg])

        def some(kv_count):
            return _mainloop(ctx, rows, kv_count)

        def none(kv_count):
            return mosaic.filled((ROWS, smem.q.shape[-1] // plan.scores.terms), 0.0), kv_count

        dq, kv_count = lax.cond(rows.span.hi > rows.span.lo, some, none, kv_count)
        _store(ctx, dq_ref, rows, dq)

        @pl.when(n + 1 < count)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            _load_rows(ctx, tile_scheduler.tile_of(ctx, following), wg)

        return kv_count, following

    lax.fori_loop(0, count, one_work_tile, (jnp.int32(0), first))
    plgpu.wait_smem_to_gmem(0)


def _store(ctx: Context, dq_ref: Any, rows: Rows, dq: Any) -> None:
    """Rows past a query length may have met NaN: they are selected away."""
    plan, _, smem = ctx
    tile, staged = rows.tile, smem.q.at[rows.wg]
    dq = dq * (plan.problem.scale if rows.units.dq is None else rows.units.dq)
    if tile.q_len is not None:
        inside = mosaic.positions((ROWS,), 0, rows.row) < tile.q_len
        dq = jnp.where(mosaic.broadcast_rows(inside, dq.shape), dq, 0.0)
    if plan.problem.dtype == "float32":
        plgpu.commit_smem()  # q and dO have been read, and TMA will write there
        where = (tile.batch, pl.ds(rows.row, ROWS), tile.head, pl.ds(0, dq.shape[1]))
        return mosaic.store(dq_ref.at[where], dq)
    staged[...] = dq.astype(staged.dtype)
    plgpu.commit_smem()
    columns = mosaic.columns(dq_ref, 0, staged.shape[-1], tile.head)
    there = dq_ref.at[tile.batch, pl.ds(rows.row, ROWS), tile.head, columns]
    return plgpu.copy_smem_to_gmem(staged, there)


def _kernel(refs: Refs, dq_ref: Any, smem: Smem, *, plan: Plan) -> None:
    ctx, block_id, wg = Context(plan, refs, smem), lax.axis_index("block"), lax.axis_index("wg")
    produce = functools.partial(_produce, ctx, block_id)
    consume = functools.partial(_consume, ctx, dq_ref, block_id, wg)
    registers = 160 if plan.config.warpgroups == 3 else 240
    mosaic.share_registers(wg, plan.config.warpgroups, produce, consume, registers)


# ---- the call -----------------------------------------------------------------------------------


def operands_of(plan: Plan, inputs: AttentionInputs, refs: Refs) -> Refs:
    """The operands of a kernel over kv tiles, made those of this one."""
    refs = by_rows(plan, inputs, refs)
    if plan.has("kv_lengths"):
        lengths = jnp.asarray(inputs.kv_lengths)[:: plan.problem.share]
        for name in ("k", "v"):
            edge = tma_operands.edge(getattr(refs, name), lengths, plan.config.block_kv)
            refs = refs._replace(**{f"{name}_edge": edge})
    return refs


def by_rows(plan: Plan, inputs: AttentionInputs, refs: Refs) -> Refs:
    """The operands of a kernel over kv tiles, which may add dq up, made those of one over query
    rows: what comes by tiles is by its own.
    """
    fields = tile_scheduler.operands(plan, inputs)
    if plan.has("q_segment_ids"):
        fields["segment_spans"] = plan.segment_spans(inputs, fields, *plan.tile_sizes)
    return refs._replace(**fields, dq=None)


def dq_of(plan: Plan, refs: Refs) -> Any:
    """dq, from the operands that `operands_of` gives."""
    problem = plan.problem
    padded = (*refs.q.shape[:3], tma_operands.width_in_tma(problem.head_dim))
    if problem.dtype == "float32":
        padded = (padded[0], plan.padded_rows, padded[2], plan.k_width)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=jax.ShapeDtypeStruct(padded, problem.dtype),
        scratch_types=(scratch(plan),),
        grid=(plan.grid,),
        grid_names=("block",),
        num_threads=plan.config.warpgroups + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="flash_bwd_dq_sm90",
    )
    return kernel(refs)[:, : problem.q_len, :, : problem.head_dim]
