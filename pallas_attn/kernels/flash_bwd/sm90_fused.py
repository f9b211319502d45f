"""The fused Hopper backward: dq, dk and dv by one kernel; 16-bit floats, head dims up to 128.

Five matmuls a tile, as FlashAttention-2 (arXiv 2307.08691) orders them: a block owns 128 keys and
walks over the query tiles that meet them. dK and dV stay in registers, dQ is added up in a float32
array in global memory, or written (`dq_sum`). Where `KeyPlan.dq` is None the kernel makes dk and dv
alone.

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
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import claims, score_tiles, tile_logits, tiles
from pallas_attn.kernels.attention.logits import LogitTile
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.attention.tma_operands import round_up
from pallas_attn.kernels.flash_bwd import (
    aux_sums,
    dq_sum,
    epilogue,
    key_tiles,
    producer,
    step_parts,
    turns,
)
from pallas_attn.kernels.flash_bwd.dq_sum import WARPGROUPS, PendingDq
from pallas_attn.kernels.flash_bwd.key_tiles import KeyTile
from pallas_attn.kernels.flash_bwd.operands import BackwardRefs, Gradients, KeyGradients
from pallas_attn.kernels.flash_bwd.plan import KeyPlan, RowFormats
from pallas_attn.kernels.flash_bwd.producer import KeyBuffers, KeyPart
from pallas_attn.kernels.flash_bwd.work_order import WorkOrder
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.mosaic import BARRIERS, SMEM_LIMIT
from pallas_attn.kernels.lang.panels import Panel, Panels, Ring, ring_slot
from pallas_attn.kernels.lang.types import (
    Barrier,
    Carry,
    GmemRef,
    Index,
    KernelConfig,
    Predicate,
    RegisterTile,
    SmemRef,
)
from pallas_attn.kernels.mma import wgmma

KEYS = WARPGROUPS * ROWS  # keys of a work tile
Sums = tuple[RegisterTile, ...]  # sums for each key, for a score function's arrays: `aux_sums`


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
    """Shared memory, described once: `gradients` launches it, `buffer_bytes` adds it up."""
    config, form, dtype = plan.config, plan.format, jnp.dtype(plan.problem.dtype)
    barrier, stages, block = plgpu.Barrier, config.stages, config.block_q
    ring, takes_claims = {"num_barriers": stages}, plan.order.claims
    qk, v = form.qk, form.v
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
        ds=dq_sum.ds_scratch(plan) if plan.dq or block > ROWS else (),
        dq=plan.dq and plan.dq.staging(plan),
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


class Tuning(NamedTuple):
    """The fields of `sm90.Config` that the kernel reads, for one that has not all of them."""

    block_q: int
    stages: int
    dq_lag: int = 1
    k_in_registers: bool = False
    kv_slots: int = 1


def plan_of(config: KernelConfig, order: WorkOrder, dq: Any = None) -> KeyPlan:
    """The plan, with sums for a score function's arrays and tiles of a bias where they fit. `dq`:
    where dq goes (`dq_sum`), if the kernel makes it.
    """
    problem, block_q = order.problem, config.block_q
    form = RowFormats.of(problem, block_q, halves=dq is not None and block_q == ROWS)
    (qk, _, _), widths = form, form.widths[0]
    if block_q == ROWS:  # warpgroups share the columns of dQ: both halves are whole swizzles
        if not qk.panels:
            form = form._replace(qk=qk._replace(width=round_up(qk.width, qk.swizzle)))
        widths = qk.panels[:1] or (form.qk.width // WARPGROUPS,)
    plan = KeyPlan(problem, config, order, form, dq=dq, dq_widths=widths)
    if problem.learned:
        plan = _if_it_fits(plan, key_sums=aux_sums.key_sums(problem))
    if problem.bias_shape is not None:
        plan = _if_it_fits(plan, bias_tiles=score_tiles.bias_of_keys(problem, block_q))
    return plan


def lacks_room_for_bias(plan: KeyPlan) -> bool:
    """Whether XLA transposes a bias whose tiles TMA could load."""
    tiles_of_bias = score_tiles.bias_of_keys(plan.problem, plan.config.block_q)
    return plan.bias_tiles is None and tiles_of_bias is not None


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
        (width,), half = ctx.plan.dq_widths, smem.k_second_half
        parts += [
            KeyPart("k", wg * ROWS, half, wg, smem.kv_ready, width) for wg in range(WARPGROUPS)
        ]
    buffers = KeyBuffers(smem.kv_free, parts, ctx.plan.config.kv_slots)
    producer.produce(ctx, block_id, [buffers])


# ---- the mainloop -------------------------------------------------------------------------------


def _mainloop(
    ctx: KernelContext, work: KeyTile, wg: Index, count: Index
) -> tuple[KeyGradients, Sums, Index]:
    """All query tiles of a warpgroup's keys; `count`: steps done before, for other work tiles.
    Returns the gradients of the keys, their sums for a score function's arrays, and the new count.
    """
    plan, _, smem = ctx
    group, lag, k_part, widths = plan.problem.group, plan.config.dq_lag, None, plan.format.widths
    in_turns = plan.order.turns
    is_whole = sum(widths[0]) == 2 * ROWS and plan.format.qk.swizzle == 128
    if plan.config.k_in_registers and is_whole and plan.presets:
        k_part = mosaic.load(_columns_of(smem.k, wg, 0, ROWS)[0], mosaic.TILE)
    first_head = work.kv_head * group

    def all_steps(*accs: RegisterTile) -> tuple[KeyGradients, Sums, Index]:
        sums = KeyGradients(accs[: len(widths[0])], accs[len(widths[0]) :])

        def step(n: Index, carry: Carry) -> Any:
            (g, i), kept, added, of_aux = carry
            pending = turns.unpacked(plan, kept, count + n - lag) if in_turns else kept
            t = work.q_tiles.tile(i)
            own = PendingDq(jnp.int32(1), pending[-1].count + 1, first_head + g, t)
            masked = key_tiles.needs_mask(plan.tiling, work, t, i)
            now = FusedStep(ctx, work, wg, masked, pending, own, k_part, of_aux, added)
            of_aux = _step(now, sums)
            kept = (*kept[1:], turns.packed(plan, own) if in_turns else own)
            return key_tiles.step_after(plan, work, g, i), kept, pending[0].number, of_aux

        nothing = PendingDq(jnp.int32(0), count - 1, first_head, jnp.int32(0))
        none = turns.packed(plan, nothing) if in_turns else nothing
        first = jnp.int32(0), jnp.int32(0)
        if plan.order.parts > 1:
            first = key_tiles.step_of(plan, work, key_tiles.steps_of(plan, work)[0])
        of_aux = aux_sums.empty_sums(plan) if plan.key_sums else ()
        start = first, (none,) * lag, none if in_turns else None, of_aux
        begin, end = key_tiles.steps_of(plan, work)
        steps = turns.hidden(end, count) if in_turns else end - begin
        pending, added, of_aux = lax.fori_loop(0, steps, step, start)[1:]
        if in_turns:
            pending = turns.unpacked(plan, pending, count + turns.hidden(end, count) - lag)
        last = pending[-1]
        if plan.dq is not None:
            for n, due in enumerate(pending, 1 - lag):
                if in_turns:
                    turns.pass_on(ctx, work, wg, added)
                _last_dq(ctx, work, wg, due, last.count + n)
                added = due.number
            if in_turns:
                turns.pass_on(ctx, work, wg, added)
        results = [[acc[...] for acc in each] for each in sums]

        _release_q(smem.q_ring, last)
        return KeyGradients(*results), of_aux, last.count + 1

    return pl.run_scoped(all_steps, *_accumulators(widths[0] + widths[1]))


def _accumulators(widths: tuple[int, ...]) -> list[Any]:
    return [plgpu.ACC((ROWS, width), jnp.float32) for width in widths]


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
        dq_sum.multiply_ds(ctx, accs, slot, wg)
        return [acc[...] for acc in accs]

    @pl.when(due.exists != 0)
    def _() -> None:
        plgpu.barrier_wait(ready)
        dq = pl.run_scoped(matmuls, *_accumulators(plan.dq_widths))
        if not plan.dq.by_columns:
            plgpu.barrier_arrive(smem.ds_free.at[slot])
        plan.dq.add((ctx, work, wg), due, dq)


# ---- a step: one query tile ---------------------------------------------------------------------


def _ds_slot(plan: KeyPlan, count: Index) -> Index:
    """The place in shared memory of the dS of step `count`."""
    return ring_slot(count, 2 * plan.config.dq_lag)


def _ds_ready(ctx: KernelContext, count: Index) -> Barrier:
    """The barrier at which both warpgroups have put the dS of step `count` there."""
    return ctx.smem.ds_ready.at[ring_slot(count, ctx.plan.config.dq_lag)]


def _release_q(ring: Ring, step: PendingDq) -> None:
    """The matmuls of a step have read its q."""
    slot = ring.slot(step.count)
    pl.when(step.exists != 0)(functools.partial(ring.release, slot))


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
    def shape(self) -> tuple[int, int]:
        return ROWS, self.ctx.plan.config.block_q

    @property
    def slot(self) -> Index:
        """The stage of q and dO."""
        return self.ctx.smem.q_ring.slot(self.own.count)

    @property
    def place(self) -> LogitTile:
        """The tile of logits."""
        (plan, _, smem), work, own = self.ctx, self.work, self.own
        place = work.place(own.head, own.t, work.key + self.wg * ROWS, plan.config.block_q)
        if plan.bias_tiles is not None:
            tile = plan.bias_tiles.of_warpgroup(smem.bias, self.slot, self.wg)
            place = place._replace(in_smem={"bias": tile})
        return place._replace(numbers=smem.row_numbers.at[pl.ds(0, self.shape[1])])

    def row_statistic(self, ring: Ring) -> RegisterTile:
        """lse (of q's ring) or delta (dO's) of every query, over the rows of the tile."""
        return mosaic.load_vector(ring.row_stats.at[self.slot], mosaic.TILE, 1, self.shape)

    def multiply_scores(self, acc: RegisterTile) -> int:
        """Issues S = K Q^T, as so many groups of matmuls."""
        smem, slot, n = self.ctx.smem, self.slot, 0
        if self.k_part is not None:
            n = self.k_part.shape[1]
            (q,) = _columns_of(smem.q, slot, 0, n)
            plgpu.wgmma(acc, self.k_part, q.transpose((1, 0)))
        k, q = _columns_of(smem.k, self.wg, n), _columns_of(smem.q, slot, n)
        wgmma.score_panels(acc, k, q)
        return len(k) + (self.k_part is not None)

    def multiply_dp(self, acc: RegisterTile) -> None:
        """Issues dP = V dO^T."""
        do = panels.tiles(self.ctx.smem.do, self.slot)
        wgmma.score_panels(acc, panels.tiles(self.ctx.smem.v, self.wg), do)


def _step(now: FusedStep, sums: KeyGradients) -> Sums:
    """Adds to `sums`, the accumulators of dK and dV, and adds a dQ to global memory. Returns the
    new sums for a score function's arrays.
    """
    # An opaque zero, or all values that follow from wg alone (addresses in k and v) would be
    # computed before the loop and spilled.
    now = now._replace(wg=now.wg + mosaic.opaque_zero(now.own.count))

    order, dq = _step_dq_first, now.ctx.plan.dq
    if dq is None or not dq.by_columns:
        now.ctx.smem.q_ring.wait(now.slot)
        order = _step_without_dq if dq is None else _step_dq_last
    return pl.run_scoped(functools.partial(order, now, sums), plgpu.ACC(now.shape, jnp.float32))


def _step_dq_first(now: FusedStep, sums: KeyGradients, s_acc: RegisterTile) -> Sums:
    dq_accs = _accumulators(now.ctx.plan.dq_widths)
    pl.run_scoped(functools.partial(_dq_and_scores, now, s_acc), *dq_accs)
    rest = functools.partial(_dv_and_dk, now, sums, s_acc)
    return pl.run_scoped(rest, plgpu.ACC(now.shape, jnp.float32))


def _step_without_dq(now: FusedStep, sums: KeyGradients, s_acc: RegisterTile) -> Sums:
    plgpu.wgmma_wait(now.multiply_scores(s_acc))
    _release_q(now.ctx.smem.q_ring, now.pending[-1])
    now.ctx.smem.do_ring.wait(now.slot)
    rest = functools.partial(_dv_and_dk, now, sums, s_acc)
    return pl.run_scoped(rest, plgpu.ACC(now.shape, jnp.float32))


def _step_dq_last(now: FusedStep, sums: KeyGradients, s_acc: RegisterTile) -> Sums:
    """S, dP and dS, then dQ of the step before: the other warpgroup has had the time of a step for
    its half of that dS. The first step of a work tile has none before it: what it multiplies is
    whatever lies there, which the other warpgroup may be writing, and `dq_sum.add` adds it nowhere.
    """
    ctx, due = now.ctx, now.pending[0]
    plan, _, smem = ctx

    def to_ds(logits: RegisterTile, slope: RegisterTile, dp_acc: RegisterTile) -> Any:
        now.multiply_dp(dp_acc)
        p = tile_logits.exponentials(plan, logits, now.row_statistic(smem.q_ring))
        return _ds(now, sums, dp_acc, p, slope)

    def to_dq(ds: RegisterTile, *dq_accs: RegisterTile) -> None:
        slot = _ds_slot(plan, due.count)
        mosaic.results_are_used(due.exists, WARPGROUPS * len(plan.dq_widths))
        dq_sum.multiply_ds(ctx, dq_accs, slot, now.wg)
        wgmma.value_panels(sums.dk, ds, panels.tiles(smem.q, now.slot))
        dq = [plgpu.wgmma_accumulator_load(acc, wait_n=len(sums.dk)) for acc in dq_accs]
        smem.do_ring.release(now.slot)
        pl.when(due.exists != 0)(lambda: plgpu.barrier_arrive(smem.ds_free.at[slot]))
        plan.dq.add((ctx, now.work, now.wg), due, dq)

    now.multiply_scores(s_acc)
    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0)
    _release_q(smem.q_ring, now.pending[-1])
    logits, slope = tile_logits.logits_and_slope(ctx, now.place, s, now.masked)
    smem.do_ring.wait(now.slot)
    to_ds = functools.partial(to_ds, logits, slope)
    ds, of_aux = pl.run_scoped(to_ds, plgpu.ACC(now.shape, jnp.float32))
    pl.run_scoped(functools.partial(to_dq, ds), *_accumulators(plan.dq_widths))
    return of_aux


def _dq_and_scores(now: FusedStep, s_acc: RegisterTile, *dq_accs: RegisterTile) -> None:
    """dQ of a step before, which is being added when this returns, and S of this one, which still
    runs.
    """
    ctx, wg, due, count = now.ctx, now.wg, now.pending[0], now.own.count
    plan, _, smem = ctx
    if plan.order.turns:
        turns.pass_on(ctx, now.work, wg, now.added)
        due = turns.look(ctx, now.work, wg, due)
    ready = _ds_ready(ctx, count)
    pl.when(due.exists != 0)(functools.partial(plgpu.barrier_wait, ready))
    dq_sum.multiply_ds(ctx, dq_accs, _ds_slot(plan, count - plan.config.dq_lag), wg)
    if plan.presets:  # S begins in registers out of which dK was made
        plgpu.wgmma_wait(WARPGROUPS * len(plan.dq_widths))
        _release_q(smem.q_ring, now.pending[-1])
    smem.q_ring.wait(now.slot)
    if plan.presets:
        s_acc[...] = now.row_statistic(smem.q_ring)
    groups = now.multiply_scores(s_acc)
    # And dK of the last step is done.
    dq = [plgpu.wgmma_accumulator_load(acc, wait_n=groups) for acc in dq_accs]
    if not plan.presets:
        _release_q(smem.q_ring, now.pending[-1])
    plan.dq.add((ctx, now.work, wg), due, dq)


def _dv_and_dk(
    now: FusedStep, sums: KeyGradients, s_acc: RegisterTile, dp_acc: RegisterTile
) -> Sums:
    """Adds to dV and dK, which still runs when this returns."""
    plan, _, smem = now.ctx
    if plan.dq is not None:  # and comes first
        smem.do_ring.wait(now.slot)
    if plan.presets:
        dp_acc[...] = now.row_statistic(smem.do_ring)
    now.multiply_dp(dp_acc)
    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=len(sums.dv))
    lse = None
    if not plan.presets:
        lse = mosaic.load(smem.q_ring.row_stats.at[now.slot], mosaic.COLUMN)
    p, slope = tile_logits.probabilities(now.ctx, now.place, s, lse, now.masked)
    ds, of_aux = _ds(now, sums, dp_acc, p, slope)
    if not plan.presets:
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
    ds = tile_logits.d_scores(p, dp, None if plan.presets else now.row_statistic(smem.do_ring))
    of_aux = now.of_aux
    if plan.key_sums:
        of_aux = aux_sums.add_tile(now.ctx, now.place, of_aux, ds)
    ds = (ds if slope is None else ds * slope).astype(dtype)
    if plan.dq is not None:
        if not plan.dq.by_columns:
            pl.when(now.own.count >= 2)(lambda: plgpu.barrier_wait(smem.ds_free.at[slot]))
            pl.when(now.pending[-1].exists != 0)(lambda: plgpu.barrier_wait(ready))
        for half in range(plan.config.block_q // ROWS):
            part = lax.slice(ds, (0, half * ROWS), (ROWS, (half + 1) * ROWS))
            at = slot, now.wg, half
            for to in itertools.chain(*[panels.tiles(copy, at) for copy in smem.ds]):
                to[...] = part
    if plan.presets:
        wgmma.value_panels(sums.dk, ds, panels.tiles(smem.q, now.slot))
    plgpu.commit_smem()  # lse and delta have been read, too, and TMA will write there
    if plan.dq is not None:
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
    from_ds = plan.config.block_q > ROWS and stores_from_ds(plan)
    if from_ds:
        plgpu.barrier_arrive(smem.kv_free)
        staged = _from_ds(ctx, wg, grads)
    else:
        staged = KeyGradients(
            [epilogue.Staged(grads.dk, smem.k, wg)],
            [epilogue.Staged(grads.dv, smem.v, wg)],
        )
    row = tiles.kv_row(plan.problem, plan.tiling.block_kv, work.key) + wg * ROWS
    at = work.batch, pl.ds(row, ROWS), work.kv_head
    for some, out in zip(staged, outs, strict=True):
        epilogue.write(some)
        epilogue.store(some, out, at)
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
        step_parts.store_part(ctx.plan, out, work, wg * ROWS, sums)


def stores_from_ds(plan: KeyPlan) -> bool:
    """Whether dk and dv fit where dS is, by swizzles of 64 columns. Query tiles of 64 rows, at head
    dim 128, gain nothing by it; there k may be wider than dk, too, and TMA would wrap around.
    """
    (dk, dv), (qk, v, _) = plan.format.widths, plan.format
    whole = qk.swizzle == v.swizzle == 128 and all(width % ROWS == 0 for width in dk + dv)
    places = plan.ds_slots * (plan.config.block_q // ROWS)
    return whole and sum(dk) // ROWS + sum(dv) // ROWS <= places


def _from_ds(ctx: KernelContext, wg: Index, grads: KeyGradients) -> KeyGradients:
    """Blocks of 64 columns of dk and dv, in dS."""
    halves, places = ctx.plan.config.block_q // ROWS, itertools.count()

    def blocks(parts: Sequence[RegisterTile]) -> list[epilogue.Staged]:
        blocks = [
            lax.slice(part, (0, n), (ROWS, n + ROWS))
            for part in parts
            for n in range(0, part.shape[1], ROWS)
        ]
        return [
            epilogue.Staged([block], ctx.smem.ds[0], (n // halves, wg, n % halves))
            for block, n in zip(blocks, places, strict=False)
        ]

    return KeyGradients(*map(blocks, grads))


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
        if plan.key_sums:
            aux_sums.store_key_sums(ctx, work, wg * ROWS, of_aux)
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


def gradients(plan: KeyPlan, refs: BackwardRefs) -> Gradients:
    """Launches the kernel: dk and dv in the sizes of refs.k and refs.v, and dq, or None if the plan
    makes none. Where S and dP begin with lse and delta (`KeyPlan.presets`), the kernel is given
    both negated, and lse in the unit of S.
    """
    dq, outs, in_parts = plan.dq, list[jax.ShapeDtypeStruct](), plan.order.parts > 1
    is_written = isinstance(dq, dq_sum.Written)
    for x in (refs.k, refs.v):  # a gradient for each batch row of q
        outs.append(jax.ShapeDtypeStruct((plan.problem.batch, *x.shape[1:]), x.dtype))
    if in_parts:
        outs = step_parts.outputs(plan, plan.format.widths)
    if is_written:
        outs.append(dq.output(plan.problem))
    elif dq is not None:
        refs = refs._replace(dq=jax.new_ref(refs.dq))
    if plan.order.turns:
        refs = refs._replace(turns=turns.counters(plan))
    own = refs
    if plan.presets and plan.logit_rules.unit is not None and plan.negated_unit is None:
        own = refs._replace(lse=refs.lse * (-1 / plan.logit_rules.unit), delta=-refs.delta)
    body, size = functools.partial(_kernel, plan=plan), (plan.order.grid, WARPGROUPS + 1)
    kernel = mosaic.persistent_kernel(body, "flash_bwd_sm90", tuple(outs), scratch(plan), size)
    dk, dv, *written = kernel(own)
    some = step_parts.of_dk_dv(plan, (dk, dv), plan.format.widths) if in_parts else []
    if dq is None or is_written:
        dk, dv = step_parts.added(some) if in_parts else (dk, dv)
        return Gradients(written[0] if written else None, dk, dv)
    *added, total = dq.finished(plan, some, jax.freeze(refs.dq))
    return Gradients(total, *(added or (dk, dv)))
