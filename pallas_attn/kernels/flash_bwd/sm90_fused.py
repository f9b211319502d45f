"""The fused Hopper backward: dq, dk and dv by one kernel; 16-bit floats, head dims up to 128.

Five matmuls a tile, as FlashAttention-2 (arXiv 2307.08691) orders them: a block owns 128 keys and
walks over the query tiles that meet them, dK and dV stay in registers, and what a tile adds to dQ
goes to a float32 array in global memory, where the blocks that meet a query add it up. XLA sets
that array to zero before, and rounds it after. Without such an array (`refs.dq` is None) the kernel
makes dk and dv alone.

Grid: one block a multiprocessor, which takes the work tiles that `plan.schedule` gives it, or
claims them (`Plan.claims`). A work tile is 128 keys of one kv head, over the query heads of its
group: dk and dv are summed over the group where they are. Two consumer warpgroups have 64 keys
each, one producer warpgroup loads.

At head dim 128 a step reads 32 KB of q and dO and adds 32 KB to dQ: of all blocks together more
than memory gives. So those at work at one time have to meet the same query tiles, which L2 then
holds. Under a causal mask they stay in lockstep (`Plan.lockstep`); else the order of work tiles
brings them together.

A step is one query tile. Tiles of scores have keys as rows and queries as columns, so P^T and dS^T
are register operands of the matmuls for dV and dK; for dQ both warpgroups put their half of dS in
shared memory, and each takes a half of dQ when the other has. A warpgroup has more to do than the
tensor cores and waits for its own instructions, not for them: the matmuls of one have to run under
the arithmetic of the other, so each may be almost a step ahead of the other.

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
                     dk and dv from there
  q, do [stages]     rings of query tiles with their lse and delta, released by both warpgroups
  ds [2 dq_lag, warpgroup]  a ring by steps, so that one wait a step is enough: `ds_ready` says that
                     both warpgroups have written theirs. Where dQ comes at the end `ds_free` says
                     that both have read it. Each is of 64 query rows. dk and dv are stored from
                     there where they fit: see `_store_dk_dv`
  dq [warpgroup]     on its way to global memory, where TMA adds it
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import score_mod, tma_operands
from pallas_attn.kernels.attention.plan import Context
from pallas_attn.kernels.flash_bwd import plan as shared
from pallas_attn.kernels.flash_bwd.plan import (
    ROWS,
    Gradients,
    KeyGradients,
    Plan,
    Refs,
    Ring,
    WorkTile,
    per_column,
)
from pallas_attn.kernels.flash_fwd import claims
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.mma import mma_rowmajor

WARPGROUPS = 2  # consumers
KEYS = WARPGROUPS * ROWS  # of a work tile


class Smem(NamedTuple):
    k: Any
    v: Any
    q: Any
    do: Any
    ds: Any
    dq: Any
    row_stats: Any  # lse and delta of the tiles of q and dO
    row_numbers: Any  # 0, 1, .. of a query tile
    kv_ready: Any
    kv_free: Any
    q_ready: Any
    do_ready: Any
    q_free: Any
    do_free: Any
    ds_ready: Any
    ds_free: Any
    claimed: Any = None  # barriers of `claims`, whose codes follow row_numbers

    @property
    def claims(self) -> claims.Smem:
        return claims.Smem(self.row_numbers, self.claimed)

    @property
    def lse(self) -> Any:
        return self.row_stats.at[0]

    @property
    def delta(self) -> Any:
        return self.row_stats.at[1]

    @property
    def q_ring(self) -> Ring:
        return Ring(self.q, self.q_ready, self.q_free, self.lse)

    @property
    def do_ring(self) -> Ring:
        return Ring(self.do, self.do_ready, self.do_free, self.delta)


def scratch(plan: Plan) -> Smem:
    """Shared memory, described once: `dk_dv` launches it, `smem_bytes` adds it up."""
    config, dtype = plan.config, jnp.dtype(plan.problem.dtype)
    k_width, barrier = qk_width(plan), plgpu.Barrier
    stages, block, ds_stages = config.stages, config.block_q, 2 * config.dq_lag
    ring = {"num_barriers": stages}
    return Smem(
        k=mosaic.swizzled((WARPGROUPS, ROWS, k_width), dtype, plan.k_swizzle),
        v=mosaic.swizzled((WARPGROUPS, ROWS, plan.v_width), dtype, plan.v_swizzle),
        q=mosaic.swizzled((stages, block, k_width), dtype, plan.k_swizzle),
        do=mosaic.swizzled((stages, block, plan.v_width), dtype, plan.v_swizzle),
        ds=mosaic.swizzled(  # as k's
            (ds_stages, WARPGROUPS, block // ROWS, ROWS, ROWS), dtype, plan.k_swizzle
        ),
        dq=_dq_staging(plan),
        row_stats=plgpu.SMEM((2, stages, block), jnp.float32),
        row_numbers=plgpu.SMEM((block + (claims.RING if plan.claims else 0),), jnp.int32),
        kv_ready=barrier(num_arrivals=2 * WARPGROUPS),
        kv_free=barrier(num_arrivals=WARPGROUPS),
        q_ready=barrier(num_arrivals=2, **ring),
        do_ready=barrier(num_arrivals=2, **ring),
        q_free=barrier(num_arrivals=WARPGROUPS, **ring),
        do_free=barrier(num_arrivals=WARPGROUPS, **ring),
        ds_ready=barrier(num_arrivals=WARPGROUPS, num_barriers=config.dq_lag),
        ds_free=barrier(num_arrivals=WARPGROUPS, num_barriers=2),
        claimed=claims.barriers() if plan.claims else None,
    )


def buffer_bytes(plan: Plan) -> int:
    return mosaic.bytes_of(scratch(plan))


# ---- the producer -------------------------------------------------------------------------------


def _produce(ctx: Context, block_id: Any) -> None:
    """The producer warpgroup: keys and query tiles of every work tile, in order."""
    smem = ctx.smem

    def load_keys(n, work):
        pl.when(n > 0)(lambda: plgpu.barrier_wait(smem.kv_free))
        for wg in range(WARPGROUPS):
            for name, to in (("k", smem.k), ("v", smem.v)):
                shared.load_kv_tile(ctx, work, name, wg * ROWS, to.at[wg], smem.kv_ready)

    shared.produce(ctx, block_id, load_keys)


# ---- dQ, and its sum in global memory -----------------------------------------------------------
#
# The two warpgroups share the dQ of a query tile. Of 64 rows each takes half of the columns, puts
# them in shared memory and has TMA add them. Of 128 rows each takes 64 and adds them from
# registers, 16 bytes a thread: the array then holds every half tile in the order in which threads
# hold it, and `rounded_dq` puts it in order. At head dim 64 the way by shared memory takes longer.


class PendingDq(NamedTuple):
    """A step whose dQ is still to be computed."""

    exists: Any  # int32: whether there is such a step
    count: Any  # its number, over all work tiles
    head: Any
    t: Any  # its query tile


def dq_is_split_by_rows(plan: Plan) -> bool:
    """Whether warpgroups share the rows of a dQ, not its columns, and each adds from registers."""
    return plan.config.block_q == WARPGROUPS * ROWS


def qk_width(plan: Plan) -> int:
    """The head dim of q and k in shared memory; where warpgroups share the columns of dQ, both
    halves are whole swizzles.
    """
    if dq_is_split_by_rows(plan):
        return plan.k_width
    return tma_operands.round_up(plan.k_width, plan.k_swizzle)


def _dq_shape(plan: Plan) -> tuple[int, int]:
    """Of a warpgroup's share of the dQ of a query tile."""
    width = qk_width(plan)
    return ROWS, width if dq_is_split_by_rows(plan) else width // WARPGROUPS


def _dq_staging(plan: Plan) -> Any:
    """Shared memory for `_add_dq`, or None."""
    if dq_is_split_by_rows(plan):
        return None
    return mosaic.swizzled((WARPGROUPS, *_dq_shape(plan)), jnp.float32, _dq_swizzle(plan))


def _dq_swizzle(plan: Plan) -> int:
    return tma_operands.swizzle_of(4 * _dq_shape(plan)[1])


def _ds_slot(plan: Plan, count: Any) -> Any:
    """Where the dS of step `count` is."""
    return shared.ring_slot(count, 2 * plan.config.dq_lag)


def _ds_ready(ctx: Context, count: Any) -> Any:
    """The barrier at which both warpgroups have put the dS of step `count` there."""
    return ctx.smem.ds_ready.at[shared.ring_slot(count, ctx.plan.config.dq_lag)]


def _multiply_dq(ctx: Context, acc: Any, slot: Any, wg: Any) -> None:
    """A warpgroup's share of dS K."""
    plan, _, smem = ctx
    _, columns = _dq_shape(plan)
    # Else what describes a matmul of each part of k is kept for all of them, and spilled.
    zero = mosaic.opaque_zero(wg, 1)
    for u in range(WARPGROUPS):
        if dq_is_split_by_rows(plan):
            ds, k = smem.ds.at[slot, u, wg], smem.k.at[u + zero]
        else:
            ds, k = smem.ds.at[slot, u, 0], smem.k.at[u, :, pl.ds(wg * columns, columns)]
        plgpu.wgmma(acc, ds.transpose((1, 0)), k)


def _add_dq(ctx: Context, work: WorkTile, wg: Any, step: PendingDq, dq: Any) -> None:
    """Adds a warpgroup's share to global memory."""
    plan, refs, smem = ctx
    rows, columns = _dq_shape(plan)
    if dq_is_split_by_rows(plan):
        head = work.batch * plan.problem.q_heads + step.head
        number = head * _q_tiles(plan) + step.t
        mma_rowmajor.add(refs.dq, number * WARPGROUPS + wg, dq, step.exists)
        return
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    smem.dq[wg] = dq
    plgpu.commit_smem()
    where = pl.ds(step.t * rows, rows), step.head, pl.ds(wg * columns, columns)
    to = refs.dq.at[work.batch, *where]
    plgpu.copy_smem_to_gmem(smem.dq.at[wg], to, step.exists != 0, reduction_op="add")


def _dq_zeros(plan: Plan, batch: int) -> Any:
    """What `_add_dq` adds to: whole swizzles. TMA leaves out columns past its last."""
    rows, heads = _q_tiles(plan) * plan.config.block_q, plan.problem.q_heads
    if dq_is_split_by_rows(plan):
        return jnp.zeros(math.prod((batch, rows, heads, qk_width(plan))))
    width = tma_operands.round_up(plan.problem.head_dim, _dq_swizzle(plan) // 4)
    if width <= _dq_shape(plan)[1]:  # all of the second share
        width = qk_width(plan)
    return jnp.zeros((batch, rows, heads, width))


def rounded_dq(plan: Plan, dq: Any) -> Any:
    """The sums as dq, [B, T, N, H]."""
    problem = plan.problem
    if dq_is_split_by_rows(plan):
        # batch, head, tile, share, 8 columns, warp, row, 2 columns, row / 8, column
        tiles = (problem.batch, problem.q_heads, _q_tiles(plan), WARPGROUPS)
        dq = dq.reshape(*tiles, qk_width(plan) // 8, 4, 8, 4, 2, 2)
        dq = dq.transpose((0, 2, 3, 5, 8, 6, 1, 4, 7, 9))
        dq = dq.reshape(problem.batch, -1, problem.q_heads, qk_width(plan))
    dq = dq[:, : problem.q_len, :, : problem.head_dim]
    return (dq * problem.scale).astype(problem.dtype)


def _q_tiles(plan: Plan) -> int:
    """Query tiles of a head: whole ones, of either size."""
    return tma_operands.round_up(plan.problem.q_len, WARPGROUPS * ROWS) // plan.config.block_q


# ---- a step: one query tile ---------------------------------------------------------------------


def presets_accumulators(ctx: Context) -> bool:
    """Whether S begins with -lse, in its own units, and dP with -delta: what an accumulator begins
    with is read while other matmuls run, and subtracted by no instruction. Where logits are scores
    times a factor; query tiles of 128 gain nothing by it.
    """
    plan, adds_dq = ctx.plan, ctx.refs.dq is not None
    return adds_dq and plan.config.block_q == ROWS and plan.unit is not None


def has_k_in_registers(ctx: Context) -> bool:
    """Whether half of k is read out of shared memory once a work tile, not once a step."""
    plan = ctx.plan
    whole = qk_width(plan) == 2 * ROWS and plan.k_swizzle == 128
    return plan.config.k_in_registers and whole and presets_accumulators(ctx)


def _with_presets(ctx: Context) -> Refs:
    """The operands, lse and delta as accumulators begin with them, where they do."""
    plan, refs, _ = ctx
    if plan.unit is None or not presets_accumulators(ctx):
        return refs
    return refs._replace(lse=refs.lse * (-1 / plan.unit), delta=-refs.delta)


class Step(NamedTuple):
    """One query tile of a warpgroup."""

    ctx: Context
    work: WorkTile
    wg: Any
    needs_mask: Any
    pending: tuple[PendingDq, ...]  # the steps whose dQ is to come, in order
    own: PendingDq
    k_part: Any  # columns of k in registers, or None

    @property
    def plan(self) -> Plan:
        return self.ctx.plan

    @property
    def smem(self) -> Any:
        return self.ctx.smem

    @property
    def slot(self) -> Any:
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
        return self.ctx.refs.dq is not None and not dq_is_split_by_rows(self.plan)

    @property
    def place(self) -> Any:
        """Where the tile of logits stands."""
        work, own, key = self.work, self.own, self.work.key + self.wg * ROWS
        place = shared.place_of(work, own.head, own.t, key, self.plan.config.block_q)
        return place._replace(numbers=self.smem.row_numbers.at[pl.ds(0, self.shape[1])])

    def row_statistic(self, numbers: Any) -> Any:
        """lse or delta of every query, over the rows of the tile."""
        return per_column(mosaic.load(numbers.at[self.slot], mosaic.COLUMN), self.shape)

    def release_last_q(self) -> None:
        """The matmuls of the step before have read its q."""
        last, ring = self.pending[-1], self.smem.q_ring
        slot = ring.slot(last.count)
        pl.when(last.exists != 0)(lambda: ring.release(slot))

    def multiply_scores(self, acc: Any) -> int:
        """S = K Q^T, as so many groups of matmuls."""
        q, n = self.smem.q.at[self.slot], 0
        if self.k_part is not None:
            n = self.k_part.shape[1]
            plgpu.wgmma(acc, self.k_part, q.at[:, pl.ds(0, n)].transpose((1, 0)))
        rest = pl.ds(n, q.shape[1] - n)
        plgpu.wgmma(acc, self.smem.k.at[self.wg, :, rest], q.at[:, rest].transpose((1, 0)))
        return 1 if self.k_part is None else 2

    def multiply_dp(self, acc: Any) -> None:
        """dP = V dO^T."""
        plgpu.wgmma(acc, self.smem.v.at[self.wg], self.smem.do.at[self.slot].transpose((1, 0)))


def _step(now: Step, sums: KeyGradients) -> None:
    """Adds to `sums`, the accumulators of dK and dV, and adds a dQ to global memory."""
    # Else what follows from wg alone, all addresses in k and v, is computed before the loop and
    # spilled.
    now = now._replace(wg=now.wg + mosaic.opaque_zero(now.own.count))

    order = _step_dq_first
    if not now.dq_comes_first:
        now.smem.q_ring.wait(now.slot)
        order = _step_without_dq if now.ctx.refs.dq is None else _step_dq_last
    pl.run_scoped(functools.partial(order, now, sums), plgpu.ACC(now.shape, jnp.float32))


def _step_dq_first(now: Step, sums: KeyGradients, s_acc: Any) -> None:
    dq_acc = plgpu.ACC(_dq_shape(now.plan), jnp.float32)
    pl.run_scoped(functools.partial(_dq_and_scores, now, s_acc), dq_acc)
    rest = functools.partial(_dv_and_dk, now, sums, s_acc)
    pl.run_scoped(rest, plgpu.ACC(now.shape, jnp.float32))


def _step_without_dq(now: Step, sums: KeyGradients, s_acc: Any) -> None:
    now.multiply_scores(s_acc)
    plgpu.wgmma_wait(1)
    now.release_last_q()
    now.smem.do_ring.wait(now.slot)
    rest = functools.partial(_dv_and_dk, now, sums, s_acc)
    pl.run_scoped(rest, plgpu.ACC(now.shape, jnp.float32))


def _step_dq_last(now: Step, sums: KeyGradients, s_acc: Any) -> None:
    """S, dP and dS, then dQ of the step before: the other warpgroup has had the time of a step for
    its half of that dS. The first step of a work tile has none before it: what it multiplies is
    whatever lies there, which the other warpgroup may be writing, and `_add_dq` adds it nowhere.
    """
    ctx, due = now.ctx, now.pending[0]
    plan, refs, smem = ctx

    def to_ds(logits, slope, dp_acc):
        now.multiply_dp(dp_acc)
        p = score_mod.exponentials(plan, logits, now.row_statistic(smem.lse))
        return _ds(now, sums, dp_acc, p, slope)

    def to_dq(ds, dq_acc):
        slot = _ds_slot(plan, due.count)
        mosaic.results_are_used(due.exists, WARPGROUPS)
        _multiply_dq(ctx, dq_acc, slot, now.wg)
        plgpu.wgmma(sums.dk, ds, smem.q.at[now.slot])
        dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)
        smem.do_ring.release(now.slot)
        pl.when(due.exists != 0)(lambda: plgpu.barrier_arrive(smem.ds_free.at[slot]))
        _add_dq(ctx, now.work, now.wg, due, dq)

    now.multiply_scores(s_acc)
    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0)
    now.release_last_q()
    logits, slope = score_mod.logits_and_slope(ctx, now.place, s, now.needs_mask)
    smem.do_ring.wait(now.slot)
    ds = pl.run_scoped(functools.partial(to_ds, logits, slope), plgpu.ACC(now.shape, jnp.float32))
    pl.run_scoped(functools.partial(to_dq, ds), plgpu.ACC(_dq_shape(plan), jnp.float32))


def _dq_and_scores(now: Step, s_acc: Any, dq_acc: Any) -> None:
    """dQ of a step before, which is being added when this returns, and S of this one, which still
    runs.
    """
    ctx, wg, due, count = now.ctx, now.wg, now.pending[0], now.own.count
    plan, smem = now.plan, now.smem
    pl.when(due.exists != 0)(lambda: plgpu.barrier_wait(_ds_ready(ctx, count)))
    _multiply_dq(ctx, dq_acc, _ds_slot(plan, count - plan.config.dq_lag), wg)
    if now.presets:  # S begins in registers out of which dK was made
        plgpu.wgmma_wait(WARPGROUPS)
        now.release_last_q()
    smem.q_ring.wait(now.slot)
    if now.presets:
        s_acc[...] = now.row_statistic(smem.lse)
    groups = now.multiply_scores(s_acc)
    dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=groups)  # and dK of the last step is done
    if not now.presets:
        now.release_last_q()
    _add_dq(ctx, now.work, wg, due, dq)


def _dv_and_dk(now: Step, sums: KeyGradients, s_acc: Any, dp_acc: Any) -> None:
    """Adds to dV and dK, which still runs when this returns."""
    smem = now.smem
    if now.dq_comes_first:
        smem.do_ring.wait(now.slot)
    if now.presets:
        dp_acc[...] = now.row_statistic(smem.delta)
    now.multiply_dp(dp_acc)
    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
    lse = None
    if not now.presets:
        lse = mosaic.load(smem.lse.at[now.slot], mosaic.COLUMN)
    p, slope = score_mod.probabilities(now.ctx, now.place, s, lse, now.needs_mask)
    ds = _ds(now, sums, dp_acc, p, slope)
    if not now.presets:
        plgpu.wgmma(sums.dk, ds, smem.q.at[now.slot])
    plgpu.wgmma_wait(1)
    smem.do_ring.release(now.slot)


def _ds(now: Step, sums: KeyGradients, dp_acc: Any, p: Any, slope: Any) -> Any:
    """dS, which is also in shared memory when this returns, while dV still runs. `slope`: that of
    softcap, or None.
    """
    plan, refs, smem = now.ctx
    dtype = jnp.dtype(plan.problem.dtype)
    q, do = smem.q.at[now.slot], smem.do.at[now.slot]
    slot, ready = _ds_slot(plan, now.own.count), _ds_ready(now.ctx, now.own.count)
    plgpu.wgmma(sums.dv, p.astype(dtype), do)
    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
    ds = p * (dp if now.presets else dp - now.row_statistic(smem.delta))
    ds = (ds if slope is None else ds * slope).astype(dtype)
    if refs.dq is not None:
        if dq_is_split_by_rows(plan):
            pl.when(now.own.count >= 2)(lambda: plgpu.barrier_wait(smem.ds_free.at[slot]))
            pl.when(now.pending[-1].exists != 0)(lambda: plgpu.barrier_wait(ready))
        for half in range(plan.config.block_q // ROWS):
            part = lax.slice(ds, (0, half * ROWS), (ROWS, (half + 1) * ROWS))
            smem.ds[slot, now.wg, half] = part
    if now.presets:
        plgpu.wgmma(sums.dk, ds, q)
    plgpu.commit_smem()  # lse and delta have been read, too, and TMA will write there
    if refs.dq is not None:
        plgpu.barrier_arrive(ready)
    return ds


# ---- the mainloop -------------------------------------------------------------------------------


def _mainloop(ctx: Context, work: WorkTile, wg: Any, count: Any) -> tuple[KeyGradients, Any]:
    """All query tiles of a warpgroup's keys, `count` steps having been done for other work tiles:
    the gradients of the keys, and the new count.
    """
    plan, refs, smem = ctx
    group, lag, k_part = plan.problem.group, plan.config.dq_lag, None
    if has_k_in_registers(ctx):
        k_part = mosaic.load(smem.k.at[wg, :, pl.ds(0, ROWS)], mosaic.TILE)
    first_head = work.kv_head * group

    def all_steps(dk_acc, dv_acc):
        def step(n, carry):
            (g, i), pending = carry
            t = work.q_tile(i)
            own = PendingDq(jnp.int32(1), pending[-1].count + 1, first_head + g, t)
            masked = shared.needs_mask(plan, work, t, i)
            now = Step(ctx, work, wg, masked, pending, own, k_part)
            _step(now, KeyGradients(dk_acc, dv_acc))
            return shared.step_after(plan, work, g, i), (*pending[1:], own)

        nothing = PendingDq(jnp.int32(0), count - 1, first_head, jnp.int32(0))
        start = (jnp.int32(0), jnp.int32(0)), (nothing,) * lag
        pending = lax.fori_loop(0, group * work.steps, step, start)[1]
        last = pending[-1]
        if refs.dq is not None:
            for n, due in enumerate(pending, 1 - lag):
                _last_dq(ctx, work, wg, due, last.count + n)
        results = dk_acc[...], dv_acc[...]

        @pl.when(last.exists != 0)
        def _():
            smem.q_ring.release(smem.q_ring.slot(last.count))

        return KeyGradients(*results), last.count + 1

    widths = (qk_width(plan), plan.v_width)
    return pl.run_scoped(all_steps, *(plgpu.ACC((ROWS, n), jnp.float32) for n in widths))


def _last_dq(ctx: Context, work: WorkTile, wg: Any, due: PendingDq, count: Any) -> None:
    """dQ of step `count`, after the last step of a work tile."""
    plan, smem = ctx.plan, ctx.smem
    slot, ready = _ds_slot(plan, count), _ds_ready(ctx, count)

    def matmuls(acc):
        _multiply_dq(ctx, acc, slot, wg)
        return acc[...]

    @pl.when(due.exists != 0)
    def _():
        plgpu.barrier_wait(ready)
        dq = pl.run_scoped(matmuls, plgpu.ACC(_dq_shape(plan), jnp.float32))
        if dq_is_split_by_rows(plan):
            plgpu.barrier_arrive(smem.ds_free.at[slot])
        _add_dq(ctx, work, wg, due, dq)


# ---- the epilogue: dk and dv --------------------------------------------------------------------
#
# Stored from k and v, they have to wait for the last step of both warpgroups, and TMA must have
# read them before the next keys are loaded. Where dS takes as much room they are stored from there:
# it is free by then and not needed before the first dS of the next work tile, and the next keys are
# loaded at once.


def _sync_warpgroups(smem: Smem) -> None:
    plgpu.barrier_arrive(smem.ds_ready.at[0])
    plgpu.barrier_wait(smem.ds_ready.at[0])


def _store_dk_dv(
    ctx: Context, outs: KeyGradients, work: WorkTile, wg: Any, grads: KeyGradients
) -> None:
    """dk and dv of a warpgroup's keys."""
    plan, _, smem = ctx
    _sync_warpgroups(smem)  # the other has no more use for k, nor for dS
    from_ds = stores_from_ds(plan)
    if from_ds:
        plgpu.barrier_arrive(smem.kv_free)
    staging = KeyGradients([smem.k.at[wg]], [smem.v.at[wg]])
    if from_ds:
        staging = _ds_staging(ctx, wg)
    rows = pl.ds(shared.kv_row(plan, work.key) + wg * ROWS, ROWS)
    for value, staged, out in zip(grads, staging, outs, strict=True):
        columns = value.shape[1] // len(staged)
        for n, to in enumerate(staged):
            part = lax.slice(value, (0, n * columns), (ROWS, (n + 1) * columns))
            to[...] = part.astype(to.dtype)
        plgpu.commit_smem()
        for n, to in enumerate(staged):
            where = mosaic.columns(out, n * columns, columns, wg)
            there = out.at[work.batch, rows, work.kv_head, where]
            plgpu.copy_smem_to_gmem(to, there)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if not from_ds:
        plgpu.barrier_arrive(smem.kv_free)


def stores_from_ds(plan: Plan) -> bool:
    """Whether dk and dv fit where dS is, by swizzles of 64 columns. Query tiles of 64 rows, at head
    dim 128, gain nothing by it; there k may be wider than dk, too, and TMA would wrap around.
    """
    places = 2 * plan.config.dq_lag * (plan.config.block_q // ROWS)
    whole = plan.k_swizzle == plan.v_swizzle == 128
    fit = qk_width(plan) // ROWS + plan.v_width // ROWS <= places
    return whole and fit and dq_is_split_by_rows(plan)


def _ds_staging(ctx: Context, wg: Any) -> KeyGradients:
    """Blocks of ds of 64 columns: lists of them for dk and for dv."""
    plan, _, smem = ctx
    halves, wanted = plan.config.block_q // ROWS, qk_width(plan) // ROWS
    numbers = range(wanted + plan.v_width // ROWS)
    found = [smem.ds.at[n // halves, wg, n % halves] for n in numbers]
    return KeyGradients(found[:wanted], found[wanted:])


def _consume(ctx: Context, outs: KeyGradients, block_id: Any, wg: Any) -> None:
    """A consumer warpgroup: every work tile of its block."""
    plan, refs, smem = ctx

    @pl.when(wg == 0)
    def _():
        block = plan.config.block_q
        numbers = plgpu.broadcasted_iota(jnp.int32, (block,), 0, layout=mosaic.COLUMN)
        smem.row_numbers[pl.ds(0, block)] = numbers
        plgpu.commit_smem()

    _sync_warpgroups(smem)

    def one_work_tile(n, count, code):
        work = shared.work_tile(ctx, code)
        plgpu.barrier_wait(smem.kv_ready)
        grads, count = _mainloop(ctx, work, wg, count)
        grads = grads._replace(dk=grads.dk * plan.problem.scale)
        _store_dk_dv(ctx, outs, work, wg, grads)
        return count

    shared.each_work_tile(ctx, block_id, one_work_tile, claims.claimed)
    plgpu.wait_smem_to_gmem(0)


def _kernel(refs: Refs, dk_ref: Any, dv_ref: Any, smem: Smem, *, plan: Plan) -> None:
    ctx, block_id, wg = Context(plan, refs, smem), lax.axis_index("block"), lax.axis_index("wg")
    produce = functools.partial(_produce, ctx, block_id)
    consume = functools.partial(_consume, ctx, KeyGradients(dk_ref, dv_ref), block_id, wg)
    mosaic.share_registers(wg, WARPGROUPS, produce, consume, 240)


# ---- the call -----------------------------------------------------------------------------------


def dq_dk_dv(plan: Plan, refs: Refs) -> Gradients:
    """dq, and dk and dv padded as refs.k and refs.v are."""
    refs = refs._replace(dq=jax.new_ref(_dq_zeros(plan, refs.q.shape[0])))
    grads = dk_dv(plan, _with_presets(Context(plan, refs)))
    return Gradients(rounded_dq(plan, jax.freeze(refs.dq)), *grads)


def dk_dv(plan: Plan, refs: Refs) -> KeyGradients:
    """dk and dv, padded as refs.k and refs.v are; adds to refs.dq, if there is one."""
    outs = []
    for x in (refs.k, refs.v):  # of each batch row of q
        sizes = (plan.problem.batch, *x.shape[1:3], tma_operands.width_in_tma(x.shape[3]))
        outs.append(jax.ShapeDtypeStruct(sizes, x.dtype))
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=tuple(outs),
        scratch_types=(scratch(plan),),
        grid=(plan.grid,),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=mosaic.without_barriers(),
        kernel_name="flash_bwd_sm90",
    )
    return KeyGradients(*kernel(refs))
