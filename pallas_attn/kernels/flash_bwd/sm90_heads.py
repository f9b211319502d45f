"""The Hopper backward of heads of up to 256 queries and keys, head dims up to 64: one launch makes
dq, dk and dv. Every array is read once and every gradient written once; nothing is added up in
global memory, so bits repeat.

Grid: one block a multiprocessor, which takes heads by turns. Two consumer warpgroups have 64 of the
128 keys of a round each; one producer warpgroup loads, and computes the row statistics of the next
head. A round's dK and dV stay in registers, and dQ of all query tiles as long as the head takes.

A unit is two query tiles of 64, taken one after the other: scores, probabilities and dS of a
warpgroup's keys, with keys as rows (see `key_tiles`). Both warpgroups put their dS in shared
memory, and of a unit's dQ each makes one query tile from the dS of both: in the next unit, under
its scores, so that neither waits for the other.

Shared memory, and who owns it when:
  q, do [query tiles]   loaded when both consumers have released those of the head before
  k, v [round, warpgroup]  likewise; dv is stored from v
  ds [2, warpgroup, query tile of the unit]  by units in turn: `ds_ready` says that both warpgroups
                        have written theirs, and so that both have done with the unit before. dq is
                        stored from there
  dk [warpgroup]        on its way to global memory
  lse, delta [2]        of the query tiles of a head, by heads in turn
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionProblem
from pallas_attn.kernels.attention import score_mod, tma_operands
from pallas_attn.kernels.attention.logits import LogitTile
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.flash_bwd import sm90_short, tile_statistics
from pallas_attn.kernels.flash_bwd.key_tiles import KeyTiling, per_column
from pallas_attn.kernels.flash_bwd.operands import Gradients, KeyGradients, Residuals
from pallas_attn.kernels.flash_bwd.plan import KeyPlan
from pallas_attn.kernels.flash_bwd.producer import load_rows, store_rows
from pallas_attn.kernels.flash_bwd.sm90_short import ShortRefs
from pallas_attn.kernels.flash_bwd.tile_statistics import QueryTileAt, StatisticsRefs
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.panels import Panels
from pallas_attn.kernels.lang.types import Barrier, Index, Predicate, RegisterTile, SmemRef

WARPGROUPS = 2  # consumers
KEYS = WARPGROUPS * ROWS  # of a round
MOST = 2 * KEYS  # queries, and keys
HALVES = 2  # query tiles of a unit


def takes(problem: AttentionProblem) -> bool:
    """Whether this kernel serves a problem."""
    sizes = problem.q_len, problem.kv_len
    return (
        min(sizes) > 0
        and KEYS < max(sizes) <= MOST
        and max(problem.head_dim, problem.v_head_dim) <= ROWS
        and sm90_short.is_plain(problem)
        and _are_all_met(problem)
    )


def _are_all_met(problem: AttentionProblem) -> bool:
    """Whether each round of keys and each unit of queries meets some of the others: no gradient is
    to be 0 without a step.
    """
    tiling = KeyTiling(problem, KEYS, HALVES * ROWS)
    spans = tiling.static_spans(problem.q_offset)
    met = {t for span in spans for t in range(span.lo, span.hi)}
    return all(span.lo < span.hi for span in spans) and len(met) == tiling.q_tiles


class HeadsSmem(NamedTuple):
    q: Panels
    do: Panels
    k: Panels
    v: Panels
    ds: Panels
    dk: Panels
    lse: SmemRef
    delta: SmemRef
    q_ready: Barrier
    do_ready: Barrier
    k_ready: Barrier
    v_ready: Barrier
    q_free: Barrier
    kv_free: Barrier
    ds_ready: Barrier
    stats_ready: Barrier
    stats_free: Barrier


def scratch(plan: KeyPlan) -> HeadsSmem:
    problem, dtype, barrier = plan.problem, plan.problem.dtype, plgpu.Barrier
    qk, v = (tma_operands.in_panels(dtype, n) for n in (problem.head_dim, problem.v_head_dim))
    rounds, tiles = plan.tiling.kv_tiles, HALVES * units(plan)
    by_round = (rounds, WARPGROUPS, ROWS)
    stats = plgpu.SMEM((2 * tiles, ROWS), jnp.float32)
    return HeadsSmem(
        q=qk.scratch(tiles, ROWS),
        do=v.scratch(tiles, ROWS),
        k=qk.scratch(*by_round),
        v=v.scratch(*by_round),
        ds=(panels.scratch((2, WARPGROUPS, HALVES, ROWS), dtype, ROWS),),
        dk=qk.scratch(WARPGROUPS, ROWS),
        lse=stats,
        delta=stats,
        q_ready=barrier(num_barriers=tiles),
        do_ready=barrier(num_barriers=tiles),
        k_ready=barrier(num_barriers=rounds, num_arrivals=WARPGROUPS),
        v_ready=barrier(num_barriers=rounds, num_arrivals=WARPGROUPS),
        q_free=barrier(num_barriers=tiles, num_arrivals=WARPGROUPS),
        kv_free=barrier(num_barriers=rounds, num_arrivals=WARPGROUPS),
        ds_ready=barrier(num_barriers=2, num_arrivals=WARPGROUPS),
        stats_ready=barrier(num_barriers=2),
        stats_free=barrier(num_barriers=2, num_arrivals=WARPGROUPS),
    )


def buffer_bytes(plan: KeyPlan) -> int:
    return mosaic.bytes_of(scratch(plan))


def units(plan: KeyPlan) -> int:
    """Units of a round."""
    return pl.cdiv(plan.tiling.q_tiles, HALVES)


class Unit(NamedTuple):
    """Query tiles of a round that are taken together."""

    round: int
    i: int  # the unit's number among those of all rounds' query rows
    slot: int  # in ds

    @property
    def tiles(self) -> tuple[int, ...]:
        return tuple(range(HALVES * self.i, HALVES * (self.i + 1)))


def units_of(plan: KeyPlan) -> list[Unit]:
    """The units of a head in their order, without those that the mask leaves empty."""
    spans, all_units = plan.tiling.static_spans(plan.problem.q_offset), []
    for j, span in enumerate(spans):
        for i in range(units(plan)):
            if span.lo < HALVES * (i + 1) and HALVES * i < span.hi:
                all_units.append(Unit(j, i, len(all_units) % 2))
    return all_units


class Head(NamedTuple):
    """A head that a block takes."""

    batch: Index
    head: Index
    n: Index  # its number among the block's

    def at(self, row: Index) -> tuple[Index, Index, Index]:
        """A row in global memory, which JAX does not know to lie past the end."""
        return self.batch, self.head, row + 0 * self.n


def grid_of(plan: KeyPlan) -> int:
    """Blocks that are launched."""
    heads = plan.order.heads
    return min(plan.config.grid or heads, heads)


def _head(plan: KeyPlan, block: Index, n: Index) -> Head:
    row, heads = block + n * grid_of(plan), jnp.int32(plan.problem.q_heads)
    return Head(lax.div(row, heads), lax.rem(row, heads), n)


def _heads(plan: KeyPlan, block: Index) -> Index:
    """How many heads a block takes."""
    grid = grid_of(plan)
    return lax.div(plan.order.heads - block + (grid - 1), jnp.int32(grid))


# ---- the producer -------------------------------------------------------------------------------


def _produce(ctx: KernelContext, block: Index) -> None:
    plan, refs, smem = ctx
    rounds, tiles = plan.tiling.kv_tiles, HALVES * units(plan)

    def load_keys(head: Head, j: int) -> None:
        pl.when(head.n > 0)(lambda: plgpu.barrier_wait(smem.kv_free.at[j]))
        for ref, to, ready in ((refs.k, smem.k, smem.k_ready), (refs.v, smem.v, smem.v_ready)):
            for wg in range(WARPGROUPS):
                at = head.at(j * KEYS + wg * ROWS)
                load_rows(ref, at, to, (j, wg), ready.at[j])

    def load_queries(head: Head, t: int) -> None:
        pl.when(head.n > 0)(lambda: plgpu.barrier_wait(smem.q_free.at[t]))
        load_rows(refs.q, head.at(t * ROWS), smem.q, t, smem.q_ready.at[t])
        load_rows(refs.do, head.at(t * ROWS), smem.do, t, smem.do_ready.at[t])

    def load(head: Head) -> None:
        load_keys(head, 0)
        for t in range(tiles):
            load_queries(head, t)
        for j in range(1, rounds):
            load_keys(head, j)

    def body(n: Index, carry: Index) -> Index:
        head, slot = _head(plan, block, n), n & 1
        pl.when(n == 0)(lambda: load(head))
        pl.when(n >= 2)(lambda: plgpu.barrier_wait(smem.stats_free.at[slot]))
        memory = StatisticsRefs(refs.out, refs.do, refs.lse, refs.d_lse, smem.lse, smem.delta)

        def statistics(t: Index, carry: Index) -> Index:
            at = QueryTileAt(head.batch, head.head, t, slot * tiles + t)
            tile_statistics.write(plan, memory, at, at_once=2)
            return carry

        lax.fori_loop(0, tiles, statistics, jnp.int32(0))
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.stats_ready.at[slot])
        pl.when(n > 0)(lambda: load(head))
        return carry

    lax.fori_loop(0, _heads(plan, block), body, jnp.int32(0))


# ---- the consumers ------------------------------------------------------------------------------


class Consumer(NamedTuple):
    """A warpgroup with a head."""

    ctx: KernelContext
    outs: Gradients
    head: Head
    wg: Index

    def release_queries(self, t: int) -> None:
        plgpu.barrier_arrive(self.ctx.smem.q_free.at[t])

    def row_statistic(self, numbers: SmemRef, t: int) -> RegisterTile:
        tiles = numbers.shape[0] // 2
        return mosaic.load(numbers.at[(self.head.n & 1) * tiles + t], mosaic.COLUMN)


class Step(NamedTuple):
    """A query tile of a unit."""

    own: Consumer
    unit: Unit
    t: int
    before: Unit | None  # the unit whose dQ is still to come
    done: int | None  # the query tile that the matmuls in flight are the last to read
    first: bool  # of the round
    masked: Predicate


def _step(step: Step, sums: KeyGradients, dqs: Any, *accs: RegisterTile) -> None:
    """Adds to dK and dV, whose matmuls still run when this returns, and to dQ of the unit before,
    which do not.
    """
    own, unit, t, before, done, first, masked = step
    (plan, _, smem), head, wg = own.ctx, own.head, own.wg
    (s_acc, dp_acc), dtype, problem = accs, jnp.dtype(plan.problem.dtype), plan.problem
    (q,), (do,) = panels.tiles(smem.q, t), panels.tiles(smem.do, t)
    at = unit.round, wg + mosaic.opaque_zero(head.n)
    (k,), (v,) = panels.tiles(smem.k, *at), panels.tiles(smem.v, *at)
    if first:
        plgpu.barrier_wait(smem.k_ready.at[unit.round])
    if is_first_of_tile(plan, unit):
        plgpu.barrier_wait(smem.q_ready.at[t])
    plgpu.wgmma(s_acc, k, q.transpose((1, 0)))
    if before is not None:
        _multiply_dq(own, before, dqs[before.i])
    if first:
        plgpu.barrier_wait(smem.v_ready.at[unit.round])
    if is_first_of_tile(plan, unit):
        plgpu.barrier_wait(smem.do_ready.at[t])
    plgpu.wgmma(dp_acc, v, do.transpose((1, 0)))
    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1 if before is None else 1 + WARPGROUPS)
    if done is not None:
        own.release_queries(done)
    key = unit.round * KEYS + wg * ROWS
    where = head.batch, head.head, t * ROWS, key, problem.q_offset, problem.kv_len, problem.mask
    lse = own.row_statistic(smem.lse, t)
    p, slope = score_mod.probabilities(own.ctx, LogitTile(*where, q_axis=1), s, lse, masked)
    plgpu.wgmma(sums.dv, p.astype(dtype), do)
    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
    ds = p * (dp - per_column(own.row_statistic(smem.delta, t), dp.shape))
    ds = (ds if slope is None else ds * slope).astype(dtype)
    rounds = _rounds(plan)
    number = rounds.index(unit.round)
    if first:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was stored from ds, v and dk
    if first and number:
        plgpu.barrier_arrive(smem.kv_free.at[rounds[number - 1]])
    (staged,) = panels.tiles(smem.ds, unit.slot, wg, t % HALVES)
    staged[...] = ds
    plgpu.wgmma(sums.dk, ds, q)
    if t % HALVES == HALVES - 1:
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.ds_ready.at[unit.slot])


def is_first_of_tile(plan: KeyPlan, unit: Unit) -> bool:
    """Whether no unit before has the same query tiles."""
    return unit == next(other for other in units_of(plan) if other.i == unit.i)


def _rounds(plan: KeyPlan) -> list[int]:
    """The rounds that have units."""
    return sorted({unit.round for unit in units_of(plan)})


def _multiply_dq(own: Consumer, unit: Unit, acc: RegisterTile) -> None:
    """Issues dQ of the unit's query tile that is this warpgroup's."""
    smem, wg = own.ctx.smem, own.wg
    plgpu.barrier_wait(smem.ds_ready.at[unit.slot])
    for u in range(WARPGROUPS):
        (ds,), (k,) = panels.tiles(smem.ds, unit.slot, u, wg), panels.tiles(smem.k, unit.round, u)
        plgpu.wgmma(acc, ds.transpose((1, 0)), k)


def _round(own: Consumer, j: int, dqs: Any, *accs: RegisterTile) -> None:
    """All units of a round, and its dK and dV."""
    (plan, _, smem), order = own.ctx, units_of(own.ctx.plan)
    sums, span = KeyGradients(*accs), plan.tiling.static_spans(plan.problem.q_offset)[j]
    last_of = {unit.i: unit for unit in order}
    done, first = None, True
    for number, unit in enumerate(order):
        if unit.round != j:
            continue
        for t in unit.tiles:
            before = order[number - 1] if number and t == unit.tiles[0] else None
            masked = not span.full_lo <= t < span.full_hi
            step = Step(own, unit, t, before, done, first, masked)
            scores = (plgpu.ACC((ROWS, ROWS), jnp.float32) for _ in range(2))
            pl.run_scoped(functools.partial(_step, step, sums, dqs), *scores)
            done, first = t if last_of[unit.i] == unit else None, False
    dk, dv = (acc[...] for acc in sums)
    if done is not None:
        own.release_queries(done)
    (dk_staged,), (dv_staged,) = panels.tiles(smem.dk, own.wg), panels.tiles(smem.v, j, own.wg)
    plgpu.commit_smem()  # no warp multiplies what lies in v any more
    dk_staged[...] = (dk * plan.problem.scale).astype(dk_staged.dtype)
    dv_staged[...] = dv.astype(dv_staged.dtype)
    plgpu.commit_smem()
    at = own.head.at(j * KEYS + own.wg * ROWS)
    store_rows(smem.dk, own.wg, own.outs.dk, at)
    store_rows(smem.v, (j, own.wg), own.outs.dv, at)


def _all_rounds(own: Consumer, *dqs: RegisterTile) -> None:
    """A head."""
    (plan, _, smem), head, wg = own.ctx, own.head, own.wg
    slot = head.n & 1
    widths = [x[0].for_tma.shape[-1] for x in (smem.k, smem.v)]
    plgpu.barrier_wait(smem.stats_ready.at[slot])
    for j in _rounds(plan):
        accs = (plgpu.ACC((ROWS, width), jnp.float32) for width in widths)
        pl.run_scoped(functools.partial(_round, own, j, dqs), *accs)
    plgpu.barrier_arrive(smem.stats_free.at[slot])
    last = units_of(plan)[-1]
    _multiply_dq(own, last, dqs[last.i])
    values = [acc[...] * plan.problem.scale for acc in dqs]
    free = 1 - last.slot
    for i, value in enumerate(values):
        (staged,) = panels.tiles(smem.ds, free, wg, i)
        if value.shape[1] < ROWS:
            nothing = mosaic.filled((ROWS, ROWS - value.shape[1]), 0.0)
            value = lax.concatenate([value, nothing], 1)
        staged[...] = value.astype(staged.dtype)
    plgpu.commit_smem()
    for i in range(len(values)):
        at = head.at((HALVES * i + wg) * ROWS)
        store_rows(smem.ds, (free, wg, i), own.outs.dq, at)
    plgpu.wait_smem_to_gmem(len(values), wait_read_only=True)  # dk and dv have left
    plgpu.barrier_arrive(smem.kv_free.at[_rounds(plan)[-1]])
    if last.slot == 0:  # the first unit of the next head takes the place of the last
        plgpu.barrier_arrive(smem.ds_ready.at[free])
        plgpu.barrier_wait(smem.ds_ready.at[free])


def _consume(ctx: KernelContext, outs: Gradients, block: Index, wg: Index) -> None:
    plan = ctx.plan
    (width,) = panels.widths(plan.problem.head_dim)

    def body(n: Index, carry: Index) -> Index:
        own = Consumer(ctx, outs, _head(plan, block, n), wg)
        dqs = (plgpu.ACC((ROWS, width), jnp.float32) for _ in range(units(plan)))
        pl.run_scoped(functools.partial(_all_rounds, own), *dqs)
        return carry

    lax.fori_loop(0, _heads(plan, block), body, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


# ---- the kernel and its call --------------------------------------------------------------------


def _kernel(refs: ShortRefs, *rest: Any, plan: KeyPlan) -> None:
    *outs, smem = rest
    ctx, block, wg = KernelContext(plan, refs, smem), lax.axis_index("block"), lax.axis_index("wg")
    produce = functools.partial(_produce, ctx, block)
    consume = functools.partial(_consume, ctx, Gradients(*outs), block, wg)
    mosaic.share_registers(wg, WARPGROUPS, produce, consume, 224, 56)


def dq_dk_dv(plan: KeyPlan, residuals: Residuals) -> Gradients:
    """dq, dk and dv."""
    inputs, out, lse, d_out, d_lse = residuals
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=tuple(
            jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (inputs.q, inputs.k, inputs.v)
        ),
        scratch_types=(scratch(plan),),
        grid=(grid_of(plan),),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=mosaic.without_barriers(),
        kernel_name="flash_bwd_heads_sm90",
    )
    return Gradients(*kernel(ShortRefs(inputs.q, inputs.k, inputs.v, d_out, out, lse, d_lse)))
