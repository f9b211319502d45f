"""The fused Hopper backward: dq, dk and dv by one kernel; 16-bit floats, head dims up to 128.

Five matmuls a tile, as FlashAttention-2 (arXiv 2307.08691) orders them: a block owns 128 keys and
walks over the query tiles that meet them. dK and dV stay in registers, dQ is added up in a float32
array in global memory (`dq_sum`), which a launch before sets to zero and one after rounds. Without
such an array (`refs.dq` is None) the kernel makes dk and dv alone.

Grid: one block a multiprocessor, which takes work tiles in the order of `work_order`: 128 keys of
one kv head, over the query heads of its group. Two consumer warpgroups have 64 keys each, one
producer warpgroup loads.

At head dim 128 a step reads 32 KB of q and dO and adds 32 KB to dQ: in all blocks together, more
than memory bandwidth allows. So blocks at work at one time have to meet the same query tiles, which
L2 then holds: by the order of work tiles or, under a causal mask, in lockstep (`lockstep`).

A step is one query tile. P^T and dS^T, keys by queries, are register operands of the matmuls for dV
and dK; for dQ both warpgroups put their half of dS in shared memory, and each computes a half of
dQ when both halves are there. The matmuls of one warpgroup have to run during the arithmetic of
the other, so either may be almost a step ahead of the other.

Query tiles of 64: dQ of a step comes at the beginning of the next or, where shared memory has room,
of the one after that (`dq_lag`). S begins with -lse and dP with -delta, so neither is waited for.
  issued to the tensor core           |  arithmetic
  dQ of a step before, S of this one  |  dQ added to global memory, under S
  dP                                  |  P = exp(S - lse), under dP
  dV                                  |  dS = P (dP - delta), to shared memory, under dV
  dK                                  |  the wait for the other's dS, under dK
Query tiles of 128: dQ of a step comes at the end of the next. At the beginning of it both
warpgroups waited for each other after S, and did the same at the same time.
  S                                   |
  dP                                  |  P = exp(S - lse), under dP
  dV                                  |  dS = P (dP - delta), to shared memory, under dV
  dQ of the step before, dK           |  dQ added to global memory, under dK

Shared memory, and who owns it when:
  k, v [warpgroup]   loaded for a work tile; `kv_free` when both warpgroups are done, or have stored
                     dk and dv from there. With two slots the next keys are loaded meanwhile
  q, do [stages]     rings of query tiles with their lse and delta, released by both warpgroups
  ds [2 dq_lag, warpgroup]  a ring by steps, so that one wait a step is enough: `ds_ready` says that
                     both warpgroups have written theirs. Where dQ comes at the end `ds_free` says
                     that both have read it. Each is of 64 query rows. dk and dv are stored from
                     there where they fit: see `_store_dk_dv`
  dq [warpgroup]     on its way to global memory, where TMA adds it, in `turns` if bits must repeat
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import score_mod, score_tiles
from pallas_attn.kernels.attention.logits import LogitTile
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.flash_bwd import (
    aux_sums,
    dq_sum,
    key_tiles,
    one_key_tile,
    producer,
    step_parts,
    turns,
)
from pallas_attn.kernels.flash_bwd.dq_sum import WARPGROUPS, PendingDq
from pallas_attn.kernels.flash_bwd.key_tiles import KeyTile, per_column
from pallas_attn.kernels.flash_bwd.operands import BackwardRefs, Gradients, KeyGradients
from pallas_attn.kernels.flash_bwd.plan import KeyPlan, RowFormats
from pallas_attn.kernels.flash_bwd.producer import KeyBuffers, KeyPart, Ring, ring_slot
from pallas_attn.kernels.flash_bwd.tile_pair import d_scores
from pallas_attn.kernels.flash_bwd.work_order import WorkOrder
from pallas_attn.kernels.flash_fwd import claims
from pallas_attn.kernels.flash_fwd.shared_memory import BARRIERS, SMEM_LIMIT
from pallas_attn.kernels.lang import launch, mosaic, panels
from pallas_attn.kernels.lang.panels import Panel, Panels
from pallas_attn.kernels.lang.types import (
    Barrier,
    Carry,
    GmemRef,
    Index,
    Predicate,
    RegisterTile,
    SmemRef,
)
from pallas_attn.kernels.mma import wgmma

KEYS = WARPGROUPS * ROWS  # keys of a work tile


class FusedSmem(NamedTuple):
    keys: Panels  # k; None: it lies in `k_halves`
    k_halves: Panel | None  # [half of the columns, warpgroup, keys, columns], see `dq_sum`, or None
    k_rest: Panels  # see `dq_sum.has_rest`, or None
    v: Panels
    q: Panels
    do: Panels
    ds: tuple[Panels, ...]  # see `dq_sum.ds_scratch`
    dq: Panels
    row_stats: SmemRef  # lse and delta of the tiles of q and dO
    row_numbers: SmemRef  # 0, 1, .. of a query tile
    kv_ready: Barrier
    kv_free: Barrier
    q_ready: Barrier
    do_ready: Barrier
    q_free: Barrier
    do_free: Barrier
    ds_ready: Barrier
    ds_free: Barrier
    claimed: Barrier = None  # barriers of `claims`, whose codes follow row_numbers
    bias: Panels = None  # [stages, ..], in the ring of q: `KeyPlan.bias_tiles`

    @property
    def k(self) -> Panels:
        if self.k_halves is None:
            return self.keys
        first, second = (Panel(tuple(view.at[n] for view in self.k_halves.views)) for n in range(2))
        return (first, *(self.k_rest or (second,)))

    def with_keys_of(self, n: Index, slots: int) -> "FusedSmem":
        """These, with the keys of a block's work tile `n` alone."""
        if slots == 1:
            return self
        slot = ring_slot(n, slots)

        def at(rows: Panels) -> Panels:
            if not isinstance(rows, tuple):
                return rows.at[slot]
            return tuple(Panel(tuple(view.at[slot] for view in panel.views)) for panel in rows)

        halves = self.k_halves
        if halves is not None:
            halves = Panel(tuple(view.at[:, slot] for view in halves.views))
        keys, rest = (x and at(x) for x in (self.keys, self.k_rest))
        ready, free = self.kv_ready.at[slot], self.kv_free.at[slot]
        return self._replace(
            keys=keys, k_halves=halves, k_rest=rest, v=at(self.v), kv_ready=ready, kv_free=free
        )

    @property
    def k_second_half(self) -> Panels:
        assert self.k_halves is not None
        return (Panel(tuple(view.at[1] for view in self.k_halves.views)),)

    @property
    def claims(self) -> claims.Smem:
        return claims.Smem(self.row_numbers, self.claimed)

    @property
    def q_ring(self) -> Ring:
        return Ring(self.q, self.q_ready, self.q_free, self.row_stats.at[0])

    @property
    def do_ring(self) -> Ring:
        return Ring(self.do, self.do_ready, self.do_free, self.row_stats.at[1])


def scratch(plan: KeyPlan) -> FusedSmem:
    """Shared memory, described once: `dk_dv` launches it, `smem_bytes` adds it up."""
    config, form, dtype = plan.config, plan.format, jnp.dtype(plan.problem.dtype)
    barrier, stages, block = plgpu.Barrier, config.stages, config.block_q
    ring, takes_claims = {"num_barriers": stages}, plan.order.claims
    qk, v = form.qk, form.v
    if not qk.panels:
        (width,) = dq_sum.qk_widths(plan)
        qk = qk._replace(width=width)
    in_halves, has_rest = form.halves, dq_sum.has_rest(plan)
    slots, bias = config.kv_slots, plan.bias_tiles
    keys = (WARPGROUPS, ROWS) if slots == 1 else (slots, WARPGROUPS, ROWS)
    return FusedSmem(
        keys=None if in_halves else qk.scratch(*keys),
        k_halves=panels.scratch((2, *keys), dtype, qk.panels[0]) if in_halves else None,
        k_rest=(panels.scratch(keys, dtype, qk.panels[1]),) if has_rest else None,
        v=v.scratch(*keys),
        q=qk.scratch(stages, block),
        do=v.scratch(stages, block),
        ds=dq_sum.ds_scratch(plan),
        dq=dq_sum.staging(plan),
        row_stats=plgpu.SMEM((2, stages, block), jnp.float32),
        row_numbers=plgpu.SMEM((block + (claims.RING if takes_claims else 0),), jnp.int32),
        kv_ready=barrier(
            num_arrivals=(qk.copies + has_rest + v.copies) * WARPGROUPS, num_barriers=slots
        ),
        kv_free=barrier(num_arrivals=WARPGROUPS, num_barriers=slots),
        q_ready=barrier(num_arrivals=1 + qk.copies + (bias.copies if bias else 0), **ring),
        do_ready=barrier(num_arrivals=1 + v.copies, **ring),
        q_free=barrier(num_arrivals=WARPGROUPS, **ring),
        do_free=barrier(num_arrivals=WARPGROUPS, **ring),
        ds_ready=barrier(num_arrivals=WARPGROUPS, num_barriers=config.dq_lag),
        ds_free=barrier(num_arrivals=WARPGROUPS, num_barriers=2),
        claimed=claims.barriers() if takes_claims else None,
        bias=bias.scratch(stages) if bias else None,
    )


def plan_of(config: Any, order: WorkOrder, adds_dq: bool) -> KeyPlan:
    """The plan, with sums for a score function's arrays and tiles of a bias where they fit."""
    problem, block_q = order.problem, config.block_q
    form = RowFormats.of(problem, block_q, halves=adds_dq and block_q == ROWS)
    plan = KeyPlan(problem, config, order, form, adds_dq=adds_dq)
    if problem.learned:
        plan = _if_it_fits(plan, key_sums=aux_sums.key_sums(problem))
    if problem.bias_shape is not None:
        plan = _if_it_fits(plan, bias_tiles=score_tiles.bias_of_keys(problem, block_q))
    return plan


def _if_it_fits(plan: KeyPlan, **fields: Any) -> KeyPlan:
    more = dataclasses.replace(plan, **fields)
    return more if buffer_bytes(more) + BARRIERS <= SMEM_LIMIT else plan


def buffer_bytes(plan: KeyPlan) -> int:
    return mosaic.bytes_of(scratch(plan))


# ---- the producer -------------------------------------------------------------------------------


def _produce(ctx: KernelContext, block_id: Index) -> None:
    """The producer warpgroup: keys and query tiles of every work tile, in order."""
    smem = ctx.smem
    parts = [
        KeyPart(name, wg * ROWS, to, wg, smem.kv_ready)
        for wg in range(WARPGROUPS)
        for name, to in (("k", smem.k), ("v", smem.v))
    ]
    if dq_sum.has_rest(ctx.plan):
        (width,), half = dq_sum.share_widths(ctx.plan), smem.k_second_half
        parts += [
            KeyPart("k", wg * ROWS, half, wg, smem.kv_ready, width) for wg in range(WARPGROUPS)
        ]
    buffers = KeyBuffers(smem.kv_free, parts, ctx.plan.config.kv_slots)
    producer.produce(ctx, block_id, [buffers])


# ---- the mainloop -------------------------------------------------------------------------------


def _mainloop(
    ctx: KernelContext, work: KeyTile, wg: Index, count: Index
) -> tuple[KeyGradients, Any, Index]:
    """All query tiles of a warpgroup's keys; `count`: steps done before, for other work tiles.
    Returns the gradients of the keys, their sums for a score function's arrays, and the new count.
    """
    plan, refs, smem = ctx
    group, lag, k_part, widths = plan.problem.group, plan.config.dq_lag, None, _widths(plan)
    if has_k_in_registers(ctx):
        k_part = mosaic.load(_columns_of(smem.k, wg, 0, ROWS)[0], mosaic.TILE)
    first_head = work.kv_head * group

    def all_steps(*accs: RegisterTile) -> tuple[KeyGradients, Any, Index]:
        dk_accs, dv_accs = accs[: len(widths.dk)], accs[len(widths.dk) :]

        def step(n: Index, carry: Carry) -> Any:
            (g, i), kept, added, of_aux = carry
            pending, t = turns.unpacked(plan, kept, count, n), work.q_tile(i)
            own = PendingDq(jnp.int32(1), pending[-1].count + 1, first_head + g, t)
            masked = key_tiles.needs_mask(plan.tiling, work, t, i)
            now = FusedStep(ctx, work, wg, masked, pending, own, k_part, of_aux, added)
            of_aux = _step(now, KeyGradients(dk_accs, dv_accs))
            kept = (*kept[1:], turns.packed(plan, own))
            return key_tiles.step_after(plan, work, g, i), kept, now.due.number, of_aux

        nothing = PendingDq(jnp.int32(0), count - 1, first_head, jnp.int32(0))
        none = turns.packed(plan, nothing)
        added = none if plan.order.turns else None
        first = jnp.int32(0), jnp.int32(0)
        if plan.order.parts > 1:
            first = key_tiles.step_of(plan, work, key_tiles.steps_of(plan, work)[0])
        start = first, (none,) * lag, added, aux_sums.empty_sums(plan)
        kept, added, of_aux = lax.fori_loop(0, turns.trip_count(plan, work, count), step, start)[1:]
        pending = turns.unpacked_last(plan, kept, count, work)
        last = pending[-1]
        if plan.adds_dq:
            for n, due in enumerate(pending, 1 - lag):
                turns.pass_on(ctx, work, wg, added)
                _last_dq(ctx, work, wg, due, last.count + n)
                added = due.number
            turns.pass_on(ctx, work, wg, added)
        results = [[acc[...] for acc in accs] for accs in (dk_accs, dv_accs)]

        @pl.when(last.exists != 0)
        def _():
            smem.q_ring.release(smem.q_ring.slot(last.count))

        return KeyGradients(*results), of_aux, last.count + 1

    return pl.run_scoped(all_steps, *_accumulators(widths.dk + widths.dv))


def _accumulators(widths: tuple[int, ...]) -> list[Any]:
    return [plgpu.ACC((ROWS, width), jnp.float32) for width in widths]


def _widths(plan: KeyPlan) -> KeyGradients:
    """Columns of the accumulators of dK and dV."""
    v = plan.format.v
    return KeyGradients(dq_sum.qk_widths(plan), v.panels or (v.width,))


def _columns_of(rows: Panels, at: Index, first: int, count: int | None = None) -> list[SmemRef]:
    """Columns of a tile in shared memory from a number on, a ref for each panel."""
    if isinstance(rows, tuple):
        tiles = panels.tiles(rows, at)
        last = None if count is None else (first + count) // ROWS
        return list(tiles[first // ROWS : last])
    return [rows.at[at, :, pl.ds(first, count or rows.shape[-1] - first)]]


def _last_dq(ctx: KernelContext, work: KeyTile, wg: Index, due: PendingDq, count: Index) -> None:
    """dQ of step `count`, after the last step of a work tile."""
    plan, smem = ctx.plan, ctx.smem
    slot, ready = _ds_slot(plan, count), _ds_ready(ctx, count)

    def matmuls(*accs: RegisterTile) -> list[RegisterTile]:
        dq_sum.multiply(ctx, accs, slot, wg)
        return [acc[...] for acc in accs]

    @pl.when(due.exists != 0)
    def _():
        plgpu.barrier_wait(ready)
        dq = pl.run_scoped(matmuls, *_accumulators(dq_sum.share_widths(plan)))
        if dq_sum.is_split_by_rows(plan):
            plgpu.barrier_arrive(smem.ds_free.at[slot])
        dq_sum.add(ctx, work, wg, due, dq)


def has_k_in_registers(ctx: KernelContext) -> bool:
    """Whether half of k is read from shared memory once a work tile, not once a step."""
    plan = ctx.plan
    whole = sum(dq_sum.qk_widths(plan)) == 2 * ROWS and plan.format.qk.swizzle == 128
    return plan.config.k_in_registers and whole and presets_accumulators(ctx)


# ---- a step: one query tile ---------------------------------------------------------------------


def _ds_slot(plan: KeyPlan, count: Index) -> Index:
    """The place in shared memory of the dS of step `count`."""
    return ring_slot(count, 2 * plan.config.dq_lag)


def _ds_ready(ctx: KernelContext, count: Index) -> Barrier:
    """The barrier at which both warpgroups have put the dS of step `count` there."""
    return ctx.smem.ds_ready.at[ring_slot(count, ctx.plan.config.dq_lag)]


def presets_accumulators(ctx: KernelContext) -> bool:
    """Whether S begins with -lse, in its own units, and dP with -delta: what an accumulator begins
    with is read while other matmuls run, and subtracted by no instruction. Where logits are scores
    times a factor; query tiles of 128 gain nothing by it.
    """
    plan = ctx.plan
    return plan.adds_dq and plan.config.block_q == ROWS and plan.logit_rules.unit is not None


Sums = tuple[RegisterTile, ...]  # sums for each key, for a score function's arrays: `aux_sums`


class FusedStep(NamedTuple):
    """One query tile of a warpgroup."""

    ctx: KernelContext
    work: KeyTile
    wg: Index
    masked: Predicate
    pending: tuple[PendingDq, ...]  # the steps whose dQ is to come, in order
    own: PendingDq
    k_part: RegisterTile  # columns of k in registers, or None
    of_aux: Sums  # up to the step before
    added: Index | None  # the number of the dQ that was added last: see `turns`

    @property
    def plan(self) -> KeyPlan:
        return self.ctx.plan

    @property
    def smem(self) -> FusedSmem:
        return self.ctx.smem

    @property
    def due(self) -> PendingDq:
        """The step whose dQ is next."""
        return self.pending[0]

    @property
    def slot(self) -> Index:
        """The stage of q and dO."""
        return self.smem.q_ring.slot(self.own.count)

    @property
    def shape(self) -> tuple[int, int]:
        return ROWS, self.plan.config.block_q

    @property
    def presets(self) -> bool:
        return presets_accumulators(self.ctx)

    @property
    def dq_comes_first(self) -> bool:
        """Before this step's S; then no accumulator is made just before its first matmul."""
        return self.plan.adds_dq and not dq_sum.is_split_by_rows(self.plan)

    @property
    def place(self) -> LogitTile:
        """The tile of logits."""
        work, own, key = self.work, self.own, self.work.key + self.wg * ROWS
        place = work.place(own.head, own.t, key, self.plan.config.block_q)
        if self.plan.bias_tiles is not None:
            tile = self.plan.bias_tiles.of_warpgroup(self.smem.bias, self.slot, self.wg)
            place = place._replace(in_smem={"bias": tile})
        return place._replace(numbers=self.smem.row_numbers.at[pl.ds(0, self.shape[1])])

    def row_statistic(self, ring: Ring) -> RegisterTile:
        """lse (of q's ring) or delta (dO's) of every query, over the rows of the tile."""
        return per_column(mosaic.load(ring.row_stats.at[self.slot], mosaic.COLUMN), self.shape)

    def release_last_q(self) -> None:
        """The matmuls of the step before have read its q."""
        last, ring = self.pending[-1], self.smem.q_ring
        slot = ring.slot(last.count)
        pl.when(last.exists != 0)(lambda: ring.release(slot))

    def multiply_scores(self, acc: RegisterTile) -> int:
        """Issues S = K Q^T, as so many groups of matmuls."""
        smem, slot, n = self.smem, self.slot, 0
        if self.k_part is not None:
            n = self.k_part.shape[1]
            (q,) = _columns_of(smem.q, slot, 0, n)
            plgpu.wgmma(acc, self.k_part, q.transpose((1, 0)))
        k, q = _columns_of(smem.k, self.wg, n), _columns_of(smem.q, slot, n)
        wgmma.score_panels(acc, k, q)
        return len(k) + (self.k_part is not None)

    def multiply_dp(self, acc: RegisterTile) -> None:
        """Issues dP = V dO^T."""
        do = panels.tiles(self.smem.do, self.slot)
        wgmma.score_panels(acc, panels.tiles(self.smem.v, self.wg), do)


def _step(now: FusedStep, sums: KeyGradients) -> Sums:
    """Adds to `sums`, the accumulators of dK and dV, and adds a dQ to global memory. Returns the
    new sums for a score function's arrays.
    """
    # An opaque zero, or all values that follow from wg alone (addresses in k and v) would be
    # computed before the loop and spilled.
    now = now._replace(wg=now.wg + mosaic.opaque_zero(now.own.count))

    order = _step_dq_first
    if not now.dq_comes_first:
        now.smem.q_ring.wait(now.slot)
        order = _step_dq_last if now.plan.adds_dq else _step_without_dq
    return pl.run_scoped(functools.partial(order, now, sums), plgpu.ACC(now.shape, jnp.float32))


def _step_dq_first(now: FusedStep, sums: KeyGradients, s_acc: RegisterTile) -> Sums:
    dq_accs = _accumulators(dq_sum.share_widths(now.plan))
    pl.run_scoped(functools.partial(_dq_and_scores, now, s_acc), *dq_accs)
    rest = functools.partial(_dv_and_dk, now, sums, s_acc)
    return pl.run_scoped(rest, plgpu.ACC(now.shape, jnp.float32))


def _step_without_dq(now: FusedStep, sums: KeyGradients, s_acc: RegisterTile) -> Sums:
    plgpu.wgmma_wait(now.multiply_scores(s_acc))
    now.release_last_q()
    now.smem.do_ring.wait(now.slot)
    rest = functools.partial(_dv_and_dk, now, sums, s_acc)
    return pl.run_scoped(rest, plgpu.ACC(now.shape, jnp.float32))


def _step_dq_last(now: FusedStep, sums: KeyGradients, s_acc: RegisterTile) -> Sums:
    """S, dP and dS, then dQ of the step before: the other warpgroup has had the time of a step for
    its half of that dS. The first step of a work tile has none before it: what it multiplies is
    whatever lies there, which the other warpgroup may be writing, and `dq_sum.add` adds it nowhere.
    """
    ctx, due = now.ctx, now.due
    plan, smem = now.plan, now.smem

    def to_ds(logits: RegisterTile, slope: RegisterTile, dp_acc: RegisterTile) -> Any:
        now.multiply_dp(dp_acc)
        p = score_mod.exponentials(plan, logits, now.row_statistic(smem.q_ring))
        return _ds(now, sums, dp_acc, p, slope)

    def to_dq(ds: RegisterTile, *dq_accs: RegisterTile) -> None:
        slot = _ds_slot(plan, due.count)
        mosaic.results_are_used(due.exists, dq_sum.matmuls(plan))
        dq_sum.multiply(ctx, dq_accs, slot, now.wg)
        wgmma.value_panels(sums.dk, ds, panels.tiles(smem.q, now.slot))
        dq = [plgpu.wgmma_accumulator_load(acc, wait_n=len(sums.dk)) for acc in dq_accs]
        smem.do_ring.release(now.slot)
        pl.when(due.exists != 0)(lambda: plgpu.barrier_arrive(smem.ds_free.at[slot]))
        dq_sum.add(ctx, now.work, now.wg, due, dq)

    now.multiply_scores(s_acc)
    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0)
    now.release_last_q()
    logits, slope = score_mod.logits_and_slope(ctx, now.place, s, now.masked)
    smem.do_ring.wait(now.slot)
    to_ds = functools.partial(to_ds, logits, slope)
    ds, of_aux = pl.run_scoped(to_ds, plgpu.ACC(now.shape, jnp.float32))
    pl.run_scoped(functools.partial(to_dq, ds), *_accumulators(dq_sum.share_widths(plan)))
    return of_aux


def _dq_and_scores(now: FusedStep, s_acc: RegisterTile, *dq_accs: RegisterTile) -> None:
    """dQ of a step before, which is being added when this returns, and S of this one, which still
    runs.
    """
    ctx, wg, due, count = now.ctx, now.wg, now.due, now.own.count
    plan, smem = now.plan, now.smem
    turns.pass_on(ctx, now.work, wg, now.added)
    seen = turns.look(ctx, now.work, wg, due)
    pl.when(due.exists != 0)(lambda: plgpu.barrier_wait(_ds_ready(ctx, count)))
    dq_sum.multiply(ctx, dq_accs, _ds_slot(plan, count - plan.config.dq_lag), wg)
    if now.presets:  # S begins in registers out of which dK was made
        plgpu.wgmma_wait(dq_sum.matmuls(plan))
        now.release_last_q()
    smem.q_ring.wait(now.slot)
    if now.presets:
        s_acc[...] = now.row_statistic(smem.q_ring)
    groups = now.multiply_scores(s_acc)
    # And dK of the last step is done.
    dq = [plgpu.wgmma_accumulator_load(acc, wait_n=groups) for acc in dq_accs]
    if not now.presets:
        now.release_last_q()
    dq_sum.add(ctx, now.work, wg, due, dq, seen)


def _dv_and_dk(
    now: FusedStep, sums: KeyGradients, s_acc: RegisterTile, dp_acc: RegisterTile
) -> Sums:
    """Adds to dV and dK, which still runs when this returns."""
    smem = now.smem
    if now.dq_comes_first:
        smem.do_ring.wait(now.slot)
    if now.presets:
        dp_acc[...] = now.row_statistic(smem.do_ring)
    now.multiply_dp(dp_acc)
    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=len(sums.dv))
    lse = None
    if not now.presets:
        lse = mosaic.load(smem.q_ring.row_stats.at[now.slot], mosaic.COLUMN)
    p, slope = score_mod.probabilities(now.ctx, now.place, s, lse, now.masked)
    ds, of_aux = _ds(now, sums, dp_acc, p, slope)
    if not now.presets:
        wgmma.value_panels(sums.dk, ds, panels.tiles(smem.q, now.slot))
    plgpu.wgmma_wait(len(sums.dk))
    smem.do_ring.release(now.slot)
    return of_aux


def _ds(
    now: FusedStep,
    sums: KeyGradients,
    dp_acc: RegisterTile,
    p: RegisterTile,
    slope: RegisterTile | None,
) -> tuple[RegisterTile, Sums]:
    """dS, which is also in shared memory when this returns, while dV still runs, and the new sums
    for a score function's arrays. `slope`: the derivative of softcap or of the score function.
    """
    plan, refs, smem = now.ctx
    dtype = jnp.dtype(plan.problem.dtype)
    slot, ready = _ds_slot(plan, now.own.count), _ds_ready(now.ctx, now.own.count)
    wgmma.value_panels(sums.dv, p.astype(dtype), panels.tiles(smem.do, now.slot))
    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=len(sums.dv))
    ds = d_scores(p, dp, None if now.presets else now.row_statistic(smem.do_ring))
    of_aux = aux_sums.add_tile(now.ctx, now.place, now.of_aux, ds)
    ds = (ds if slope is None else ds * slope).astype(dtype)
    if plan.adds_dq:
        if dq_sum.is_split_by_rows(plan):
            pl.when(now.own.count >= 2)(lambda: plgpu.barrier_wait(smem.ds_free.at[slot]))
            pl.when(now.pending[-1].exists != 0)(lambda: plgpu.barrier_wait(ready))
        for half in range(plan.config.block_q // ROWS):
            part = lax.slice(ds, (0, half * ROWS), (ROWS, (half + 1) * ROWS))
            for copy in dq_sum.ds_tiles(now.ctx, slot, now.wg, half):
                copy[...] = part
    if now.presets:
        wgmma.value_panels(sums.dk, ds, panels.tiles(smem.q, now.slot))
    plgpu.commit_smem()  # lse and delta have been read, too, and TMA will write there
    if plan.adds_dq:
        plgpu.barrier_arrive(ready)
    return ds, of_aux


# ---- the epilogue: dk and dv --------------------------------------------------------------------
#
# Stored from k and v, they have to wait for the last step of both warpgroups, and TMA must have
# read them before the next keys are loaded. Where dS takes as much room they are stored from there:
# it is free by then and not needed before the first dS of the next work tile, and the next keys are
# loaded at once.


def _sync_warpgroups(smem: FusedSmem) -> None:
    plgpu.barrier_arrive(smem.ds_ready.at[0])
    plgpu.barrier_wait(smem.ds_ready.at[0])


def _store_dk_dv(
    ctx: KernelContext, outs: KeyGradients, work: KeyTile, wg: Index, grads: KeyGradients
) -> None:
    """dk and dv of a warpgroup's keys."""
    plan, _, smem = ctx
    _sync_warpgroups(smem)  # the other has no more use for k, nor for dS
    from_ds = stores_from_ds(plan)
    if from_ds:
        plgpu.barrier_arrive(smem.kv_free)
    staging = KeyGradients(Staging(smem.k, wg), Staging(smem.v, wg))
    if from_ds:
        staging = _ds_staging(ctx, wg)
    at = work.batch, work.kv_head, producer.kv_row(plan, work.key) + wg * ROWS
    for parts, staged, out in zip(grads, staging, outs, strict=True):
        staged.store(parts, out, at)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if not from_ds:
        plgpu.barrier_arrive(smem.kv_free)


def _store_part(
    ctx: KernelContext, outs: KeyGradients, work: KeyTile, wg: Index, grads: KeyGradients
) -> None:
    """A part of the sums of dk and dv, from registers."""
    plgpu.commit_smem()  # k has been read, and TMA will write there
    plgpu.barrier_arrive(ctx.smem.kv_free)
    for out, sums in zip(outs, grads, strict=True):
        step_parts.store(ctx.plan, out, work, wg * ROWS, sums)


class Staging(NamedTuple):
    """Shared memory from where a gradient is stored: rows of all columns, or blocks of dS."""

    rows: Panels
    index: Any  # or a list of them, one a block of 64 columns

    def store(self, parts: Sequence[RegisterTile], out: GmemRef, at: tuple[Index, ...]) -> None:
        """A gradient, in an accumulator or one a panel; `at`: batch, head and first row."""
        if not isinstance(self.index, list):
            for part, to in zip(parts, panels.tiles(self.rows, self.index), strict=True):
                to[...] = part.astype(to.dtype)
            plgpu.commit_smem()
            return producer.store_rows(self.rows, self.index, out, at)
        blocks = [
            lax.slice(part, (0, n), (ROWS, n + ROWS))
            for part in parts
            for n in range(0, part.shape[1], ROWS)
        ]
        for block, index in zip(blocks, self.index, strict=True):
            (to,) = panels.tiles(self.rows, index)
            to[...] = block.astype(to.dtype)
        plgpu.commit_smem()
        for n, index in enumerate(self.index):
            producer.store_rows(self.rows, index, out, at, n * ROWS)
        return None


def stores_from_ds(plan: KeyPlan) -> bool:
    """Whether dk and dv fit where dS is, by swizzles of 64 columns. Query tiles of 64 rows, at head
    dim 128, gain nothing by it; there k may be wider than dk, too, and TMA would wrap around.
    """
    form, places = plan.format, plan.ds_slots * (plan.config.block_q // ROWS)
    whole = form.qk.swizzle == form.v.swizzle == 128
    widths = _widths(plan)
    whole = whole and all(width % ROWS == 0 for width in widths.dk + widths.dv)
    fit = sum(widths.dk) // ROWS + sum(widths.dv) // ROWS <= places
    return whole and fit and dq_sum.is_split_by_rows(plan)


def _ds_staging(ctx: KernelContext, wg: Index) -> KeyGradients:
    """Blocks of ds of 64 columns for dk and for dv."""
    plan, _, smem = ctx
    halves, widths = plan.config.block_q // ROWS, _widths(plan)
    of_dk = sum(widths.dk) // ROWS
    blocks = [(n // halves, wg, n % halves) for n in range(of_dk + sum(widths.dv) // ROWS)]
    rows = smem.ds[0]
    return KeyGradients(Staging(rows, blocks[:of_dk]), Staging(rows, blocks[of_dk:]))


# ---- the kernel and its call --------------------------------------------------------------------


def _consume(ctx: KernelContext, outs: KeyGradients, block_id: Index, wg: Index) -> None:
    """A consumer warpgroup: every work tile of its block."""
    plan, smem = ctx.plan, ctx.smem

    @pl.when(wg == 0)
    def _():
        block = plan.config.block_q
        numbers = plgpu.broadcasted_iota(jnp.int32, (block,), 0, layout=mosaic.COLUMN)
        smem.row_numbers[pl.ds(0, block)] = numbers
        plgpu.commit_smem()

    _sync_warpgroups(smem)

    def work_tile(n: Index, count: Index, code: Index) -> Index:
        work = key_tiles.key_tile(ctx, code)
        own = ctx._replace(smem=smem.with_keys_of(n, plan.config.kv_slots))
        plgpu.barrier_wait(own.smem.kv_ready)
        grads, of_aux, count = _mainloop(own, work, wg, count)
        grads = grads._replace(dk=[part * plan.problem.scale for part in grads.dk])
        aux_sums.store(ctx, work, wg * ROWS, of_aux)
        store = _store_dk_dv if plan.order.parts == 1 else _store_part
        store(own, outs, work, wg, grads)
        return count

    producer.each_work_tile(ctx, block_id, work_tile)
    plgpu.wait_smem_to_gmem(0)


def _kernel(refs: BackwardRefs, *rest: GmemRef, plan: KeyPlan) -> None:
    dk_ref, dv_ref, *of_dq, smem = rest
    if of_dq:
        refs = refs._replace(dq=of_dq[0])
    ctx = KernelContext(plan, refs, smem)
    block_id, wg = lax.axis_index("block"), lax.axis_index("wg")
    produce = functools.partial(_produce, ctx, block_id)
    consume = functools.partial(_consume, ctx, KeyGradients(dk_ref, dv_ref), block_id, wg)
    mosaic.share_registers(wg, WARPGROUPS, produce, consume, 240)


def dq_dk_dv(plan: KeyPlan, refs: BackwardRefs) -> Gradients:
    """dq, and dk and dv in the sizes of refs.k and refs.v."""
    if one_key_tile.applies(plan.tiling):
        dk, dv, dq = _call_kernel(plan, _with_presets(KernelContext(plan, refs)))
        return Gradients(dq, dk, dv)
    sums = dq_sum.sums(plan)
    refs = refs._replace(dq=jax.new_ref(jnp.zeros(sums.shape, sums.dtype)))
    if plan.order.turns:
        refs = refs._replace(turns=turns.counters(plan))
    grads = dk_dv(plan, _with_presets(KernelContext(plan, refs)))
    dq = jax.freeze(refs.dq)
    if plan.order.parts > 1:  # the sums of parts are read first: L2 may have them still
        dq, _ = lax.optimization_barrier((dq, grads.dk))
    return Gradients(dq_sum.rounded(plan, dq), *grads)


def _with_presets(ctx: KernelContext) -> BackwardRefs:
    """The operands, lse and delta as accumulators begin with them, where they do."""
    plan, refs, _ = ctx
    if plan.logit_rules.unit is None or not presets_accumulators(ctx):
        return refs
    return refs._replace(lse=refs.lse * (-1 / plan.logit_rules.unit), delta=-refs.delta)


def dk_dv(plan: KeyPlan, refs: BackwardRefs) -> KeyGradients:
    """dk and dv, in the sizes of refs.k and refs.v; adds to refs.dq, if there is one."""
    return KeyGradients(*_call_kernel(plan, refs))


def _call_kernel(plan: KeyPlan, refs: BackwardRefs) -> Any:
    """dk, dv, and dq where all keys are one tile."""
    outs, in_parts = [], plan.order.parts > 1
    for x in (refs.k, refs.v):  # a gradient for each batch row of q
        outs.append(jax.ShapeDtypeStruct((plan.problem.batch, *x.shape[1:]), x.dtype))
    if in_parts:
        outs = step_parts.outputs(plan, _widths(plan))
    if one_key_tile.applies(plan.tiling):
        outs.append(one_key_tile.output(plan.problem))
    body, size = functools.partial(_kernel, plan=plan), (plan.order.grid, WARPGROUPS + 1)
    kernel = launch.persistent_kernel(body, "flash_bwd_sm90", tuple(outs), scratch(plan), size)
    dk, dv, *dq = kernel(refs)
    if in_parts:
        dk, dv = step_parts.added(plan, (dk, dv), _widths(plan))
    return dk, dv, *dq
