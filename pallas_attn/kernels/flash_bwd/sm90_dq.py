"""dQ of the Hopper backward, by a kernel of its own: no sum in global memory, so the same bits each
time, and nothing to set to zero before or to round after. It computes S and dP a second time: seven
matmuls in all where the fused kernel has five.

The forward's grid and orientation: a tile of work is 64 query rows a warpgroup,
`tile_scheduler.schedule` says who takes which, keys pass by in a ring. A step issues dQ of the key
tile before, S and dP of its own; P = exp(S - lse) is computed under dP.

Shared memory, and who owns it when:
  q, do [warpgroup]  filled by TMA at the warpgroup's own request for each tile of work; dq leaves
                     through q, but in float32, where it goes from registers to global memory
  k [stages]         a ring; a key tile is let go of when its part of dQ is done, in the next step
  v [stages - 1]     a ring; let go of when dP is done
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._problem import AttentionInputs
from pallas_attn.kernels.attention import plan as attention_plan
from pallas_attn.kernels.attention import score_mod, tma_operands
from pallas_attn.kernels.attention.plan import ROWS, Plan
from pallas_attn.kernels.attention.score_mod import Place, Tile
from pallas_attn.kernels.flash_bwd.float32 import Units, added, left, times, units_of
from pallas_attn.kernels.flash_bwd.plan import Refs, ring
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


def scratch(plan: Plan) -> Smem:
    config = plan.config
    barrier, computing = plgpu.Barrier, config.warpgroups
    stages, v_stages = config.stages, config.stages - 1
    k_columns, v_columns = plan.scores.terms * plan.k_width, plan.values.terms * plan.v_width
    k_swizzle, v_swizzle = k_swizzle_of(plan), plan.v_swizzle
    k_dtype, v_dtype = plan.scores.dtype, plan.values.dtype
    return Smem(
        q=mosaic.swizzled((computing, ROWS, k_columns), k_dtype, k_swizzle),
        do=mosaic.swizzled((computing, ROWS, v_columns), v_dtype, v_swizzle),
        k=mosaic.swizzled((stages, config.block_kv, k_columns), k_dtype, k_swizzle),
        v=mosaic.swizzled((v_stages, config.block_kv, v_columns), v_dtype, v_swizzle),
        q_ready=barrier(num_barriers=computing, num_arrivals=2),
        k_ready=barrier(num_barriers=stages),
        v_ready=barrier(num_barriers=v_stages),
        k_free=barrier(num_barriers=stages, num_arrivals=computing),
        v_free=barrier(num_barriers=v_stages, num_arrivals=computing),
    )


def k_swizzle_of(plan: Plan) -> int:
    """Matmuls take dS by whole swizzles."""
    if plan.problem.dtype != "float32":
        return plan.k_swizzle
    return min(plan.k_swizzle, tma_operands.swizzle_of(plan.config.block_kv * plan.scores.itemsize))


def buffer_bytes(plan: Plan) -> int:
    buffers = scratch(plan)[:4]
    whole = sum(math.prod(b.shape) * jnp.dtype(b.dtype).itemsize for b in buffers)
    return whole + (mosaic.REDUCTION_BYTES if plan.exact else 0)


def span_of(plan: Plan, refs: Refs, tile: Tile) -> Any:
    """The key tiles of a tile of work, ordered lo <= full_lo <= full_hi <= hi."""
    rows: Any = plan.tile_rows
    if tile.q_len is not None:
        rows = jnp.minimum(rows, tile.q_len - tile.row)
    span = plan.span(tile.q_offset + tile.row, plan.tile_rows, tile.kv_len)
    if plan.has("q_segment_ids"):
        unit = lax.div(tile.row, jnp.int32(plan.tile_rows))
        fields = (refs.segment_spans[tile.batch, i, unit] for i in range(4))
        span = span.within(type(span)(*fields))
    if plan.has("mask_array"):
        span = span._replace(full_hi=span.full_lo)
    hi = jnp.maximum(span.lo, jnp.where(rows > 0, span.hi, span.lo))
    full_lo = jnp.clip(span.full_lo, span.lo, hi)
    return type(span)(span.lo, full_lo, jnp.clip(span.full_hi, full_lo, hi), hi)


# ---- loading ------------------------------------------------------------------------------------


def _load(plan: Plan, refs: Refs, smem: Smem, cta: Any) -> None:
    """The loading warpgroup: K and V of every tile of work, in the order in which they are used."""
    block = plan.config.block_kv

    def one_tile(n, carry):
        count, code = carry
        following = refs.dealt[cta, n + 2]
        tile = tile_scheduler.tile_of(plan, refs, code)
        span = span_of(plan, refs, tile)
        head = lax.div(tile.head, jnp.int32(plan.problem.group))

        def step(t, count):
            for name, to, ready, free in (
                ("k", smem.k, smem.k_ready, smem.k_free),
                ("v", smem.v, smem.v_ready, smem.v_free),
            ):
                stages = to.shape[0]
                slot = ring(count, stages)
                wait = functools.partial(plgpu.barrier_wait, free.at[slot])
                pl.when(count >= stages)(wait)

                def copy(ref, first, to=to.at[slot], ready=ready.at[slot]):
                    columns = mosaic.columns(ref, 0, to.shape[-1], head)
                    there = ref.at[tile.batch, pl.ds(first, block), head, columns]
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

    lax.fori_loop(0, refs.dealt[cta, 0], one_tile, (jnp.int32(0), refs.dealt[cta, 1]))


def _load_rows(plan: Plan, refs: Refs, smem: Smem, tile: Tile, wg: Any) -> None:
    rows = pl.ds(tile.row + wg * ROWS, ROWS)
    for ref, to in ((refs.q, smem.q), (refs.do, smem.do)):
        columns = mosaic.columns(ref, 0, to.shape[-1], tile.head)
        there = ref.at[tile.batch, rows, tile.head, columns]
        plgpu.copy_gmem_to_smem(there, to.at[wg], smem.q_ready.at[wg])


# ---- computing ----------------------------------------------------------------------------------


class Rows(NamedTuple):
    """A warpgroup's rows of a tile of work."""

    tile: Tile
    row: Any
    wg: Any
    lse: Any
    delta: Any
    units: Units


def _ds(plan: Plan, refs: Refs, smem: Smem, rows: Rows, at: Any, dp: Any) -> Any:
    """dS of a key tile, float32; at is (t, masked, S), dp gives dP when P is done."""
    t, masked, s = at
    tile, shape = rows.tile, s.shape
    place = Place(
        tile.batch, tile.head, rows.row, t * plan.config.block_kv, tile.q_offset, tile.kv_len, 0
    )
    s = times(s, rows.units.scores)
    p, slope = score_mod.probabilities(plan, refs, place, s, rows.lse, masked)
    ds = p * (times(dp(), rows.units.dp) - mosaic.broadcast_rows(rows.delta, shape))
    return ds if slope is None else ds * slope


def _both(plan: Plan, smem: Smem, wg: Any, count: Any, accs: tuple[Any, Any]) -> int:
    """Issues S and dP of the key tile that comes as number `count`; says how many matmuls."""
    stages, issued = plan.config.stages, 0
    for acc, own, passing, ready, size, kind in (
        (accs[0], smem.q, smem.k, smem.k_ready, stages, plan.scores),
        (accs[1], smem.do, smem.v, smem.v_ready, stages - 1, plan.values),
    ):
        slot, left = ring(count, size), wgmma.terms_of_smem(own.at[wg], kind)
        plgpu.barrier_wait(ready.at[slot])
        wgmma.multiply(acc, left, wgmma.transposed(wgmma.terms_of_smem(passing.at[slot], kind)))
        issued += wgmma.products(kind.terms, kind.terms)
    return issued


def _alone(both: Any) -> None:
    both()


def _attend(plan: Plan, refs: Refs, smem: Smem, rows: Rows, carry: Any) -> Any:
    """All keys of a warpgroup's rows; carry is (span, count). Gives (dq, count)."""
    span, count = carry
    config, scores, values = plan.config, plan.scores, plan.values
    shape, width = (ROWS, config.block_kv), smem.q.shape[-1] // scores.terms
    memory, swizzle = wgmma.terms_of_smem, k_swizzle_of(plan)
    left_of, add = functools.partial(left, plan), functools.partial(added, plan)
    k_slot = functools.partial(ring, size=config.stages)
    v_slot = functools.partial(ring, size=config.stages - 1)

    def masked(t):
        return (t < span.full_lo) | (t >= span.full_hi)

    def tile(t, count, before, after):
        """dS of key tile t, and what `before` gives: called with what issues S and dP, and says how
        many that are, it may issue something first. `after` it is done.
        """

        def run(s_acc, dp_acc):
            # Else addresses are computed before the loop and spilled.
            wg = rows.wg + mosaic.opaque_zero(count)
            both = functools.partial(_both, plan, smem, wg, count, (s_acc, dp_acc))
            first = before(both)
            behind = wgmma.products(values.terms, values.terms)
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=behind)
            after()

            def dp():
                value = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
                plgpu.barrier_arrive(smem.v_free.at[v_slot(count)])
                return value

            return _ds(plan, refs, smem, rows, (t, masked(t), s), dp), first

        both = plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32)
        return pl.run_scoped(run, *both)

    def in_registers(_):
        """As `everything`, with tiles of dQ added up in registers: see `apart`."""

        def step(t, carry):
            count, ds, dq = carry
            last = k_slot(count - 1)

            def before(both):
                return add(dq, ds, memory(smem.k.at[last], scores), swizzle, both)

            release = functools.partial(plgpu.barrier_arrive, smem.k_free.at[last])
            ds, dq = tile(t, count, before, release)
            return count + 1, left_of(ds), dq

        first = left_of(tile(span.lo, count, _alone, lambda: None)[0])
        dq = mosaic.filled((ROWS, width), 0.0)
        end, ds, dq = lax.fori_loop(span.lo + 1, span.hi, step, (count + 1, first, dq))
        dq = add(dq, ds, memory(smem.k.at[k_slot(end - 1)], scores), swizzle)
        plgpu.barrier_arrive(smem.k_free.at[k_slot(end - 1)])
        return dq, end

    def everything(dq):
        def step(t, carry):
            count, ds = carry

            last = k_slot(count - 1)

            def before(both):
                wgmma.multiply(dq, ds, memory(smem.k.at[last], scores))
                both()

            after = functools.partial(plgpu.barrier_arrive, smem.k_free.at[last])
            return count + 1, left_of(tile(t, count, before, after)[0])

        first = left_of(tile(span.lo, count, _alone, lambda: None)[0])
        end, ds = lax.fori_loop(span.lo + 1, span.hi, step, (count + 1, first))
        wgmma.multiply(dq, ds, memory(smem.k.at[k_slot(end - 1)], scores))
        value = dq[...]
        plgpu.barrier_arrive(smem.k_free.at[k_slot(end - 1)])
        return value, end

    if plan.exact:
        return in_registers(None)
    return pl.run_scoped(everything, plgpu.ACC((ROWS, width), jnp.float32))


def _compute(plan: Plan, refs: Refs, smem: Smem, dq_ref: Any, place: tuple[Any, Any]) -> None:
    """A computing warpgroup: every tile of work of its block."""
    cta, wg = place
    count, first = refs.dealt[cta, 0], refs.dealt[cta, 1]
    _load_rows(plan, refs, smem, tile_scheduler.tile_of(plan, refs, first), wg)

    def one_tile(n, carry):
        entries, code = carry
        following = refs.dealt[cta, n + 2]
        tile = tile_scheduler.tile_of(plan, refs, code)
        row = tile.row + wg * ROWS
        lse, delta = (
            mosaic.load(ref.at[tile.batch, tile.head, pl.ds(row, ROWS)], mosaic.ROW)
            for ref in (refs.lse, refs.delta)
        )
        kv_head = lax.div(tile.head, jnp.int32(plan.problem.group))
        rows = Rows(tile, row, wg, lse, delta, units_of(refs, tile.batch, kv_head))
        span = span_of(plan, refs, tile)
        plgpu.barrier_wait(smem.q_ready.at[wg])

        def some(entries):
            return _attend(plan, refs, smem, rows, (span, entries))

        def none(entries):
            return mosaic.filled((ROWS, smem.q.shape[-1] // plan.scores.terms), 0.0), entries

        dq, entries = lax.cond(span.hi > span.lo, some, none, entries)
        _finish(plan, smem, dq_ref, rows, dq)

        @pl.when(n + 1 < count)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            _load_rows(plan, refs, smem, tile_scheduler.tile_of(plan, refs, following), wg)

        return entries, following

    lax.fori_loop(0, count, one_tile, (jnp.int32(0), first))
    plgpu.wait_smem_to_gmem(0)


def _finish(plan: Plan, smem: Smem, dq_ref: Any, rows: Rows, dq: Any) -> None:
    """What lies past a query length may have met NaN: it is selected away."""
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
    cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
    load = functools.partial(_load, plan, refs, smem, cta)
    compute = functools.partial(_compute, plan, refs, smem, dq_ref, (cta, wg))
    ours = 160 if plan.config.warpgroups == 3 else 240
    mosaic.share_registers(wg, plan.config.warpgroups, load, compute, ours)


# ---- the call -----------------------------------------------------------------------------------


def operands_of(plan: Plan, inputs: AttentionInputs, refs: Refs) -> Refs:
    """The operands of a kernel over key tiles, made those of this one."""
    problem, block = plan.problem, plan.config.block_kv
    rows, keys = plan.padded_rows, tma_operands.round_up(problem.kv_len, block)
    fields: dict[str, Any] = {"dealt": jnp.asarray(tile_scheduler.schedule(plan))}
    fields |= tma_operands.over_scores(inputs, rows, keys) | tma_operands.segment_ids(
        inputs, rows, keys
    )
    if plan.has("q_segment_ids"):
        ids = fields["q_segment_ids"], fields["kv_segment_ids"]
        fields["segment_spans"] = attention_plan.segment_spans(*ids, plan.tile_rows, block)
    if plan.has("kv_lengths"):
        for name in ("k", "v"):
            fields[f"{name}_edge"] = tma_operands.edge(
                getattr(refs, name), inputs.kv_lengths, block
            )
    return refs._replace(**fields)


def dq_of(plan: Plan, refs: Refs) -> Any:
    """dq, padded as refs.q is, from the operands of a plan by rows."""
    problem = plan.problem
    padded = (*refs.q.shape[:3], tma_operands.width_in_tma(problem.head_dim))
    if problem.dtype == "float32":
        padded = (padded[0], plan.padded_rows, padded[2], plan.k_width)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=jax.ShapeDtypeStruct(padded, problem.dtype),
        scratch_types=(scratch(plan),),
        grid=(plan.ctas,),
        grid_names=("cta",),
        num_threads=plan.config.warpgroups + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="flash_bwd_dq_sm90",
    )
    return kernel(refs)[:, : problem.q_len, :, : problem.head_dim]
