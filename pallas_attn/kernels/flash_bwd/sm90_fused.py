"""Flash attention backward for Hopper, bfloat16, float16 and float32.

Five matmuls a tile, as FlashAttention-2 (arXiv 2307.08691) orders them: a block owns 128 keys and
walks over the query tiles that meet them, dK and dV stay in registers, and what the tile adds to dQ
goes to a float32 array in global memory, see `add_dq`. XLA makes `delta` before and rounds
dQ after.

Grid: one block a multiprocessor, which takes the tiles of work that `plan.dealt` gave it.
A tile of work is 128 keys of one kv head, over the query heads of its group: dk and dv are summed
over the group where they are. Two warpgroups compute, 64 keys each, and one loads.

A step is one query tile. Tiles of scores have keys down and queries across, so
P^T and dS^T are register operands of the matmuls for dV and dK; for dQ both warpgroups put their
half of dS in shared memory, and each takes a half of dQ when the other has. A warpgroup has more to
do than the tensor cores and waits for its own instructions, not for them: one's matmuls have to run
under the other's arithmetic, so each may be almost a step ahead of the other.

Query tiles of 64: dQ of a step comes at the beginning of the next or, where shared memory has room,
of the one after that (`lag`). S begins with -lse and dP with -delta, so neither is waited for.
  dQ of a step before, S of this one  |  dQ off, under S
  dP                                  |  P = exp(S - lse), under dP
  dV                                  |  dS = P (dP - delta), to shared memory, under dV
  dK                                  |  the meeting, under dK
Query tiles of 128: dQ of a step comes at the end of the next. At the beginning of it warpgroups
waited for each other after S and did the same at the same time.
  S                                   |
  dP                                  |  P = exp(S - lse), under dP
  dV                                  |  dS = P (dP - delta), to shared memory, under dV
  dQ of the step before, dK           |  dQ off, under dK

Shared memory, and who owns it when:
  k, v [warpgroup]   filled for a tile of work; `keys_free` when both warpgroups are done, or have
                     sent off dk and dv, where these leave through the same place
  q, do [stages]     rings of query tiles with their lse and delta; `q_ready`, `do_ready` when they
                     have landed, `q_free`, `do_free` when both warpgroups have let go of them
  ds [2 lag, warpgroup]  by turns, so that one meeting a step is enough, but where dQ comes at the
                     end: there `ds_free` says that both warpgroups have read it. Of 64 query rows
                     each. dk and dv leave through them where they fit: see `_store_dk_dv`
  dq [warpgroup]     on its way to global memory, where it goes by way of TMA
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
from pallas_attn.kernels.flash_bwd import plan as shared
from pallas_attn.kernels.flash_bwd.plan import ROWS, Item, Plan, Refs, across
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.mma import mma_rowmajor

WARPGROUPS = 2  # that compute
KEYS = WARPGROUPS * ROWS  # of a tile of work


class Smem(NamedTuple):
    k: Any
    v: Any
    q: Any
    do: Any
    ds: Any
    dq: Any
    rows: Any
    numbers: Any
    keys_ready: Any
    keys_free: Any
    q_ready: Any
    do_ready: Any
    q_free: Any
    do_free: Any
    met: Any
    ds_free: Any

    @property
    def lse(self) -> Any:
        return self.rows.at[0]

    @property
    def delta(self) -> Any:
        return self.rows.at[1]


def scratch(plan: Plan) -> Smem:
    """Shared memory, described once: `run` launches it, `smem_bytes` adds it up."""
    config, dtype = plan.config, jnp.dtype(plan.problem.dtype)
    k_width, barrier = qk_width(plan), plgpu.Barrier
    stages, block, turns = config.stages, config.block_q, 2 * config.lag
    ring = {"num_barriers": stages}
    return Smem(
        k=mosaic.swizzled((WARPGROUPS, ROWS, k_width), dtype, plan.k_swizzle),
        v=mosaic.swizzled((WARPGROUPS, ROWS, plan.v_width), dtype, plan.v_swizzle),
        q=mosaic.swizzled((stages, block, k_width), dtype, plan.k_swizzle),
        do=mosaic.swizzled((stages, block, plan.v_width), dtype, plan.v_swizzle),
        ds=mosaic.swizzled(  # as k's
            (turns, WARPGROUPS, block // ROWS, ROWS, ROWS), dtype, plan.k_swizzle
        ),
        dq=dq_staging(plan),
        rows=plgpu.SMEM((2, stages, block), jnp.float32),
        numbers=plgpu.SMEM((block,), jnp.int32),
        keys_ready=barrier(num_arrivals=2 * WARPGROUPS),
        keys_free=barrier(num_arrivals=WARPGROUPS),
        q_ready=barrier(num_arrivals=2, **ring),
        do_ready=barrier(num_arrivals=2, **ring),
        q_free=barrier(num_arrivals=WARPGROUPS, **ring),
        do_free=barrier(num_arrivals=WARPGROUPS, **ring),
        met=barrier(num_arrivals=WARPGROUPS, num_barriers=config.lag),
        ds_free=barrier(num_arrivals=WARPGROUPS, num_barriers=2),
    )


def buffer_bytes(plan: Plan) -> int:
    buffers = [buffer for buffer in scratch(plan)[:8] if buffer is not None]
    sizes = (math.prod(b.shape) * jnp.dtype(b.dtype).itemsize for b in buffers)
    return sum(tma_operands.round_up(size, 1024) for size in sizes)  # as Mosaic lays them out


# ---- loading ------------------------------------------------------------------------------------


def _load(plan: Plan, refs: Refs, smem: Smem, cta: Any) -> None:
    """The loading warpgroup: keys and query tiles of every tile of work, in order."""

    def keys_of(n, item):
        pl.when(n > 0)(lambda: plgpu.barrier_wait(smem.keys_free))
        for wg in range(WARPGROUPS):
            for name, to in (("k", smem.k), ("v", smem.v)):
                place = (wg * ROWS, to.at[wg], smem.keys_ready)
                shared.load_keys(plan, refs, item, name, place)

    shared.load_all(plan, refs, smem, cta, keys_of)


# ---- dQ, and its way into global memory ---------------------------------------------------------


def dq_by_rows(plan: Plan) -> bool:
    """Whether warpgroups share a query tile's rows, not the columns of its dQ, and each adds from
    registers.
    """
    return plan.config.block_q == WARPGROUPS * ROWS


def qk_width(plan: Plan) -> int:
    """The head dim of q and k in shared memory; where warpgroups share the columns of dQ, both
    halves are whole swizzles.
    """
    if dq_by_rows(plan):
        return plan.k_width
    return tma_operands.round_up(plan.k_width, plan.k_swizzle)


def dq_share(plan: Plan) -> tuple[int, int]:
    """A warpgroup's part of a query tile's dQ."""
    return ROWS, qk_width(plan) if dq_by_rows(plan) else qk_width(plan) // WARPGROUPS


def dq_staging(plan: Plan) -> Any:
    """Shared memory for `add_dq`, or None."""
    if dq_by_rows(plan):
        return None
    return mosaic.swizzled((WARPGROUPS, *dq_share(plan)), jnp.float32, _dq_swizzle(plan))


def _dq_swizzle(plan: Plan) -> int:
    """Bytes, of what is staged."""
    return tma_operands.swizzle_of(4 * dq_share(plan)[1])


def dq_matmuls(plan: Plan, smem: Any, acc: Any, turn: Any, wg: Any) -> None:
    """A warpgroup's share of dS K; `turn`: which of the places for dS."""
    _, columns = dq_share(plan)
    # Else what describes a matmul of each part of k is kept for all of them, and spilled.
    zero = mosaic.opaque_zero(wg, 1)
    for u in range(WARPGROUPS):
        if dq_by_rows(plan):
            ds, k = smem.ds.at[turn, u, wg], smem.k.at[u + zero]
        else:
            ds, k = smem.ds.at[turn, u, 0], smem.k.at[u, :, pl.ds(wg * columns, columns)]
        plgpu.wgmma(acc, ds.transpose((1, 0)), k)


def add_dq(plan: Plan, refs: Refs, smem: Any, item: Item, place: tuple[Any, ...], dq: Any) -> None:
    """Sends a warpgroup's share off; place is (wg, head, query tile, whether there is one)."""
    wg, head, t, there = place
    rows, columns = dq_share(plan)
    if dq_by_rows(plan):
        problem = plan.problem
        number = (item.batch * problem.q_heads + head) * _dq_tiles(plan) + t
        mma_rowmajor.add(refs.dq, number * WARPGROUPS + wg, dq, there)
        return
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    smem.dq[wg] = dq
    plgpu.commit_smem()
    where = pl.ds(t * rows, rows), head, pl.ds(wg * columns, columns)
    there_in_gmem = refs.dq.at[item.batch, *where]
    plgpu.copy_smem_to_gmem(smem.dq.at[wg], there_in_gmem, there != 0, reduction_op="add")


def dq_zeros(plan: Plan, batch: int) -> Any:
    """What `add_dq` adds into: whole swizzles. TMA leaves out columns past its last."""
    rows, heads = _dq_tiles(plan) * plan.config.block_q, plan.problem.q_heads
    if dq_by_rows(plan):
        return jnp.zeros(math.prod((batch, rows, heads, qk_width(plan))))
    width = tma_operands.round_up(plan.problem.head_dim, _dq_swizzle(plan) // 4)
    if width <= dq_share(plan)[1]:  # all of the second share
        width = qk_width(plan)
    return jnp.zeros((batch, rows, heads, width))


def rounded_dq(plan: Plan, dq: Any) -> Any:
    """The sums as dq, [B, T, N, H]."""
    problem = plan.problem
    if dq_by_rows(plan):
        # batch, head, tile, share, 8 columns, warp, row, 2 columns, row / 8, column
        parts = (problem.batch, problem.q_heads, _dq_tiles(plan), WARPGROUPS)
        dq = dq.reshape(*parts, qk_width(plan) // 8, 4, 8, 4, 2, 2)
        dq = dq.transpose((0, 2, 3, 5, 8, 6, 1, 4, 7, 9))
        dq = dq.reshape(problem.batch, -1, problem.q_heads, qk_width(plan))
    dq = dq[:, : problem.q_len, :, : problem.head_dim]
    return (dq * problem.scale).astype(problem.dtype)


def _dq_tiles(plan: Plan) -> int:
    """Query tiles of a head: whole ones, of either size."""
    return tma_operands.round_up(plan.problem.q_len, WARPGROUPS * ROWS) // plan.config.block_q


# ---- one query tile -----------------------------------------------------------------------------


class Last(NamedTuple):
    """The step before: its dQ is still to come."""

    there: Any  # int32: whether there is one
    count: Any  # its number, over all tiles of work
    head: Any
    t: Any


def starts_with_numbers(plan: Plan, refs: Refs) -> bool:
    """Whether S begins with -lse, in its own units, and dP with -delta: what a sum begins with is
    read while other matmuls run, and subtracted by none. Where logits are scores times a factor;
    query tiles of 128 gain nothing by it.
    """
    return refs.dq is not None and plan.config.block_q == ROWS and plan.unit is not None


def holds_keys(plan: Plan, refs: Refs) -> bool:
    """Whether half of k is read out of shared memory once a tile of work, not once a step."""
    whole = qk_width(plan) == 2 * ROWS and plan.k_swizzle == 128
    return plan.config.held and whole and starts_with_numbers(plan, refs)


def start_values(plan: Plan, refs: Refs) -> Refs:
    """lse and delta as `_attend` wants them."""
    if plan.unit is None or not starts_with_numbers(plan, refs):
        return refs
    return refs._replace(lse=refs.lse * (-1 / plan.unit), delta=-refs.delta)


class Step(NamedTuple):
    """One query tile of a warpgroup."""

    plan: Plan
    refs: Refs
    smem: Any
    item: Any
    wg: Any
    masked: Any
    lasts: tuple[Last, ...]  # the steps whose dQ is to come, in order
    new: Last
    held: Any  # columns of k in registers, or None

    @property
    def slot(self) -> Any:
        return shared.ring(self.new.count, self.plan.config.stages)

    @property
    def shape(self) -> tuple[int, int]:
        return ROWS, self.plan.config.block_q

    @property
    def starts(self) -> bool:
        return starts_with_numbers(self.plan, self.refs)

    @property
    def clears(self) -> bool:
        """Whether accumulators are made just before their first matmul, which then clears them."""
        return self.refs.dq is None or dq_by_rows(self.plan)

    @property
    def place(self) -> Any:
        """Where the tile of logits stands."""
        item, new, key = self.item, self.new, self.item.key + self.wg * ROWS
        place = shared.place_of(item, new.head, new.t, key, self.plan.config.block_q)
        return place._replace(numbers=self.smem.numbers)

    def number(self, column: Any) -> Any:
        """lse or delta of every query."""
        return mosaic.load(column.at[self.slot], mosaic.COLUMN)

    def let_go(self) -> None:
        """The last step's matmuls have read its q."""
        q_free = self.smem.q_free.at[shared.ring(self.lasts[-1].count, self.plan.config.stages)]
        pl.when(self.lasts[-1].there != 0)(lambda: plgpu.barrier_arrive(q_free))

    def scores(self, acc: Any) -> int:
        """S = K Q^T, as so many groups of matmuls."""
        q, n = self.smem.q.at[self.slot], 0
        if self.held is not None:
            n = self.held.shape[1]
            plgpu.wgmma(acc, self.held, q.at[:, pl.ds(0, n)].transpose((1, 0)))
        rest = pl.ds(n, q.shape[1] - n)
        plgpu.wgmma(acc, self.smem.k.at[self.wg, :, rest], q.at[:, rest].transpose((1, 0)))
        return 1 if self.held is None else 2


def _step(now: Step, accs: tuple[Any, Any]) -> None:
    # Else what follows from wg alone, all addresses in k and v, is computed before the loop and
    # spilled.
    now = now._replace(wg=now.wg + mosaic.opaque_zero(now.new.count))

    way = _dq_first
    if now.clears:
        plgpu.barrier_wait(now.smem.q_ready.at[now.slot])
        way = _without_dq if now.refs.dq is None else _dq_last
    pl.run_scoped(functools.partial(way, now, accs), plgpu.ACC(now.shape, jnp.float32))


def _dq_first(now: Step, accs: tuple[Any, Any], s_acc: Any) -> None:
    half = plgpu.ACC(dq_share(now.plan), jnp.float32)
    pl.run_scoped(functools.partial(_dq_and_scores, now, s_acc), half)
    rest = functools.partial(_dv_and_dk, now, accs, s_acc)
    pl.run_scoped(rest, plgpu.ACC(now.shape, jnp.float32))


def _without_dq(now: Step, accs: tuple[Any, Any], s_acc: Any) -> None:
    now.scores(s_acc)
    plgpu.wgmma_wait(1)
    now.let_go()
    plgpu.barrier_wait(now.smem.do_ready.at[now.slot])
    rest = functools.partial(_dv_and_dk, now, accs, s_acc)
    pl.run_scoped(rest, plgpu.ACC(now.shape, jnp.float32))


def _dq_last(now: Step, accs: tuple[Any, Any], s_acc: Any) -> None:
    """S, dP and dS, then dQ of the step before: the other warpgroup has had a step's time for its
    half of that dS.
    """
    plan, refs, smem, due = now.plan, now.refs, now.smem, now.lasts[0]

    def to_ds(given, slope, dp_acc):
        plgpu.wgmma(dp_acc, smem.v.at[now.wg], smem.do.at[now.slot].transpose((1, 0)))
        p = score_mod.exponentials(plan, given, across(now.number(smem.lse), now.shape))
        return _ds(now, accs, dp_acc, (p, slope))

    def to_dq(ds, dq_acc):
        turn, _ = _turn(plan, smem, due.count)
        dq_matmuls(plan, smem, dq_acc, turn, now.wg)
        plgpu.wgmma(accs[0], ds, smem.q.at[now.slot])
        dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)
        plgpu.barrier_arrive(smem.do_free.at[now.slot])
        pl.when(due.there != 0)(lambda: plgpu.barrier_arrive(smem.ds_free.at[turn]))
        add_dq(plan, refs, smem, now.item, (now.wg, due.head, due.t, due.there), dq)

    now.scores(s_acc)
    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0)
    now.let_go()
    given, slope = score_mod.logits_and_slope(plan, refs, now.place, s, now.masked)
    plgpu.barrier_wait(smem.do_ready.at[now.slot])
    ds = pl.run_scoped(functools.partial(to_ds, given, slope), plgpu.ACC(now.shape, jnp.float32))
    pl.run_scoped(functools.partial(to_dq, ds), plgpu.ACC(dq_share(plan), jnp.float32))


def _dq_and_scores(now: Step, s_acc: Any, dq_acc: Any) -> None:
    """dQ of a step before, on its way when this returns, and S of this one, which still runs."""
    plan, smem, wg, due = now.plan, now.smem, now.wg, now.lasts[0]
    pl.when(due.there != 0)(lambda: plgpu.barrier_wait(_turn(plan, smem, now.new.count)[1]))
    dq_matmuls(plan, smem, dq_acc, _turn(plan, smem, now.new.count - plan.config.lag)[0], wg)
    if now.starts:  # S begins in registers out of which dK was made
        plgpu.wgmma_wait(WARPGROUPS)
        now.let_go()
    plgpu.barrier_wait(smem.q_ready.at[now.slot])
    if now.starts:
        s_acc[...] = across(now.number(smem.lse), now.shape)
    groups = now.scores(s_acc)
    dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=groups)  # and dK of the last step is done
    if not now.starts:
        now.let_go()
    add_dq(plan, now.refs, smem, now.item, (wg, due.head, due.t, due.there), dq)


def _dv_and_dk(now: Step, accs: tuple[Any, Any], s_acc: Any, dp_acc: Any) -> None:
    """Adds to dV and dK, which still runs when this returns."""
    plan, smem = now.plan, now.smem
    if not now.clears:
        plgpu.barrier_wait(smem.do_ready.at[now.slot])
    if now.starts:
        dp_acc[...] = across(now.number(smem.delta), now.shape)
    plgpu.wgmma(dp_acc, smem.v.at[now.wg], smem.do.at[now.slot].transpose((1, 0)))
    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
    lse, place = None if now.starts else now.number(smem.lse), now.place
    found = score_mod.probabilities(plan, now.refs, place, s, lse, now.masked)
    _from_p(now, accs, dp_acc, found)


def _from_p(now: Step, accs: tuple[Any, Any], dp_acc: Any, found: tuple[Any, Any]) -> None:
    """`_dv_and_dk` from P and softcap's slope, or None, on."""
    ds, q = _ds(now, accs, dp_acc, found), now.smem.q.at[now.slot]
    if not now.starts:
        plgpu.wgmma(accs[0], ds, q)
    plgpu.wgmma_wait(1)
    plgpu.barrier_arrive(now.smem.do_free.at[now.slot])


def _ds(now: Step, accs: tuple[Any, Any], dp_acc: Any, found: tuple[Any, Any]) -> Any:
    """dV is on its way when this returns, and dS in shared memory."""
    (plan, refs, smem, _, wg, _, lasts, new, _), (dk, dv), (p, slope) = now, accs, found
    dtype, starts = jnp.dtype(plan.problem.dtype), now.starts
    q, do = smem.q.at[now.slot], smem.do.at[now.slot]
    turn, met = _turn(plan, smem, new.count)
    plgpu.wgmma(dv, p.astype(dtype), do)
    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
    ds = p * (dp if starts else dp - across(now.number(smem.delta), now.shape))
    ds = (ds if slope is None else ds * slope).astype(dtype)
    if refs.dq is not None:
        if dq_by_rows(plan):
            pl.when(new.count >= 2)(lambda: plgpu.barrier_wait(smem.ds_free.at[turn]))
            pl.when(lasts[-1].there != 0)(lambda: plgpu.barrier_wait(met))
        for half in range(plan.config.block_q // ROWS):
            part = lax.slice(ds, (0, half * ROWS), (ROWS, (half + 1) * ROWS))
            smem.ds[turn, wg, half] = part
    if starts:
        plgpu.wgmma(dk, ds, q)
    plgpu.commit_smem()  # lse and delta have been read, too, and TMA will write there
    if refs.dq is not None:
        plgpu.barrier_arrive(met)
    return ds


def _turn(plan: Plan, smem: Any, count: Any) -> tuple[Any, Any]:
    """(the place of a step's dS, the barrier at which both warpgroups have put it there)"""
    lag = plan.config.lag
    return shared.ring(count, 2 * lag), smem.met.at[shared.ring(count, lag)]


def _attend(plan: Plan, refs: Refs, smem: Any, at: Any, count: Any) -> Any:
    """All query tiles of a warpgroup's keys; at is (item, wg). Gives (dk, dv, count)."""
    item, wg = at
    group, lag, held = plan.problem.group, plan.config.lag, None
    if holds_keys(plan, refs):
        held = mosaic.load(smem.k.at[wg, :, pl.ds(0, ROWS)], mosaic.TILE)
    first_head = item.kv_head * group

    def everything(dk_acc, dv_acc):
        def one_tile(n, carry):
            (g, i), lasts = carry
            t = item.tile(i)
            new = Last(jnp.int32(1), lasts[-1].count + 1, first_head + g, t)
            masked = shared.masked(plan, item, t)
            now = Step(plan, refs, smem, item, wg, masked, lasts, new, held)
            _step(now, (dk_acc, dv_acc))
            if group == 1:
                return (g, i + 1), (*lasts[1:], new)
            over = i + 1 == item.steps
            return (g + over.astype(jnp.int32), jnp.where(over, 0, i + 1)), (*lasts[1:], new)

        nothing = Last(jnp.int32(0), count - 1, first_head, jnp.int32(0))
        start = (jnp.int32(0), jnp.int32(0)), (nothing,) * lag
        lasts = lax.fori_loop(0, group * item.steps, one_tile, start)[1]
        last = lasts[-1]
        if refs.dq is not None:
            for n, due in enumerate(lasts, 1 - lag):
                _late_dq(plan, refs, smem, at, due, last.count + n)
        results = dk_acc[...], dv_acc[...]

        @pl.when(last.there != 0)
        def _():
            plgpu.barrier_arrive(smem.q_free.at[shared.ring(last.count, plan.config.stages)])

        return *results, last.count + 1

    widths = (qk_width(plan), plan.v_width)
    return pl.run_scoped(everything, *(plgpu.ACC((ROWS, n), jnp.float32) for n in widths))


def _late_dq(plan: Plan, refs: Refs, smem: Any, at: Any, due: Last, count: Any) -> None:
    """After a tile of work's last step."""
    item, wg = at
    turn, met = _turn(plan, smem, count)

    def matmuls(acc):
        dq_matmuls(plan, smem, acc, turn, wg)
        return acc[...]

    @pl.when(due.there != 0)
    def _():
        plgpu.barrier_wait(met)
        dq = pl.run_scoped(matmuls, plgpu.ACC(dq_share(plan), jnp.float32))
        if dq_by_rows(plan):
            plgpu.barrier_arrive(smem.ds_free.at[turn])
        add_dq(plan, refs, smem, item, (wg, due.head, due.t, due.there), dq)


# ---- dk and dv leave ----------------------------------------------------------------------------


def _meet(smem: Any) -> None:
    """Both warpgroups are here."""
    plgpu.barrier_arrive(smem.met.at[0])
    plgpu.barrier_wait(smem.met.at[0])


def _store_dk_dv(plan: Plan, smem: Any, outs: Any, at: Any, results: Any) -> None:
    """dk and dv of a warpgroup's keys; at is (item, wg)."""
    item, wg = at
    _meet(smem)  # the other has no more use for k, nor for dS
    by_ds = _leaves_by_ds(plan)
    if by_ds:
        plgpu.barrier_arrive(smem.keys_free)
    places = _ds_places(plan, smem, wg) if by_ds else ([smem.k.at[wg]], [smem.v.at[wg]])
    for value, staged, out in zip(results, places, outs, strict=True):
        columns = value.shape[1] // len(staged)
        for n, to in enumerate(staged):
            part = lax.slice(value, (0, n * columns), (ROWS, (n + 1) * columns))
            to[...] = part.astype(to.dtype)
        plgpu.commit_smem()
        for n, to in enumerate(staged):
            where = mosaic.columns(out, n * columns, columns, wg)
            there = out.at[item.batch, pl.ds(item.key + wg * ROWS, ROWS), item.kv_head, where]
            plgpu.copy_smem_to_gmem(to, there)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if not by_ds:
        plgpu.barrier_arrive(smem.keys_free)


def _leaves_by_ds(plan: Plan) -> bool:
    """Whether dk and dv fit where dS is, by swizzles of 64 columns. Query tiles of 64 rows, at head
    dim 128, gain nothing by it; there k may be wider than dk, too, and TMA would wrap around.
    """
    places = 2 * plan.config.lag * (plan.config.block_q // ROWS)
    whole = plan.k_swizzle == plan.v_swizzle == 128
    fit = qk_width(plan) // ROWS + plan.v_width // ROWS <= places
    return whole and fit and dq_by_rows(plan)


def _ds_places(plan: Plan, smem: Any, wg: Any) -> tuple[list[Any], list[Any]]:
    """Parts of ds of 64 columns: for dk, and for dv."""
    halves, wanted = plan.config.block_q // ROWS, qk_width(plan) // ROWS
    numbers = range(wanted + plan.v_width // ROWS)
    found = [smem.ds.at[n // halves, wg, n % halves] for n in numbers]
    return found[:wanted], found[wanted:]


# ---- computing ----------------------------------------------------------------------------------


def _compute(plan: Plan, refs: Refs, smem: Smem, outs: Any, place: tuple[Any, Any]) -> None:
    """A computing warpgroup: every tile of work of its block."""
    cta, wg = place

    @pl.when(wg == 0)
    def _():
        block = (plan.config.block_q,)
        smem.numbers[...] = plgpu.broadcasted_iota(jnp.int32, block, 0, layout=mosaic.COLUMN)
        plgpu.commit_smem()

    _meet(smem)

    def one_item(n, carry):
        count, code = carry
        following = refs.dealt[cta, n + 2]  # asked for long before it is needed
        item = shared.item_of(plan, refs, code)
        plgpu.barrier_wait(smem.keys_ready)
        dk, dv, count = _attend(plan, refs, smem, (item, wg), count)
        _store_dk_dv(plan, smem, outs, (item, wg), (dk * plan.problem.scale, dv))
        return count, following

    lax.fori_loop(0, refs.dealt[cta, 0], one_item, (jnp.int32(0), refs.dealt[cta, 1]))
    plgpu.wait_smem_to_gmem(0)


def _kernel(refs: Refs, dk_ref: Any, dv_ref: Any, smem: Smem, *, plan: Plan) -> None:
    cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
    load = functools.partial(_load, plan, refs, smem, cta)
    compute = functools.partial(_compute, plan, refs, smem, (dk_ref, dv_ref), (cta, wg))
    mosaic.share_registers(wg, WARPGROUPS, load, compute, 240)


# ---- the call -----------------------------------------------------------------------------------


def dq_dk_dv(plan: Plan, refs: Refs) -> tuple[Any, Any, Any]:
    """dq, and dk and dv padded as refs.k and refs.v are."""
    refs = refs._replace(dq=jax.new_ref(dq_zeros(plan, refs.q.shape[0])))
    dk, dv = dk_dv(plan, start_values(plan, refs))
    return rounded_dq(plan, jax.freeze(refs.dq)), dk, dv


def dk_dv(plan: Plan, refs: Refs) -> tuple[Any, Any]:
    """dk and dv, padded as refs.k and refs.v are; adds to refs.dq, if there is one."""
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=tuple(
            jax.ShapeDtypeStruct((*x.shape[:3], tma_operands.width_in_tma(x.shape[3])), x.dtype)
            for x in (refs.k, refs.v)
        ),
        scratch_types=(scratch(plan),),
        grid=(plan.ctas,),
        grid_names=("cta",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=mosaic.without_barriers(),
        kernel_name="flash_bwd_sm90",
    )
    return kernel(refs)
