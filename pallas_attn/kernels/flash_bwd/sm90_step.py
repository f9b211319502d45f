"""The steps of the Hopper backward, `flash_bwd_sm90`: one query tile each, of a tile of work."""

import functools
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import score_mod
from pallas_attn.kernels.flash_bwd import plan as shared
from pallas_attn.kernels.flash_bwd import sm90_dq_sum as sums
from pallas_attn.kernels.flash_bwd.plan import ROWS, Plan, Refs, across
from pallas_attn.kernels.lang import mosaic


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
    whole = sums.k_width(plan) == 2 * ROWS and plan.k_swizzle == 128
    return plan.config.held and whole and starts_with_numbers(plan, refs)


def numbers(plan: Plan, refs: Refs) -> Refs:
    """lse and delta as `attend` wants them."""
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
        return self.refs.dq is None or sums.by_rows(self.plan)

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
    # 0, which only we know: or else what follows from wg alone, all addresses in k and v, would be
    # computed before the loop and spilled.
    now = now._replace(wg=now.wg + lax.shift_right_logical(now.new.count, jnp.int32(31)))

    way = _dq_first
    if now.clears:
        plgpu.barrier_wait(now.smem.q_ready.at[now.slot])
        way = _without_dq if now.refs.dq is None else _dq_last
    pl.run_scoped(functools.partial(way, now, accs), plgpu.ACC(now.shape, jnp.float32))


def _dq_first(now: Step, accs: tuple[Any, Any], s_acc: Any) -> None:
    half = plgpu.ACC(sums.share(now.plan), jnp.float32)
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
        sums.matmuls(plan, smem, dq_acc, turn, now.wg)
        plgpu.wgmma(accs[0], ds, smem.q.at[now.slot])
        dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)
        plgpu.barrier_arrive(smem.do_free.at[now.slot])
        pl.when(due.there != 0)(lambda: plgpu.barrier_arrive(smem.ds_free.at[turn]))
        sums.add(plan, refs, smem, now.item, (now.wg, due.head, due.t, due.there), dq)

    now.scores(s_acc)
    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0)
    now.let_go()
    given, slope = score_mod.of_any_tile(plan, refs, now.place, s, now.masked)
    plgpu.barrier_wait(smem.do_ready.at[now.slot])
    ds = pl.run_scoped(functools.partial(to_ds, given, slope), plgpu.ACC(now.shape, jnp.float32))
    pl.run_scoped(functools.partial(to_dq, ds), plgpu.ACC(sums.share(plan), jnp.float32))


def _dq_and_scores(now: Step, s_acc: Any, dq_acc: Any) -> None:
    """dQ of a step before, on its way when this returns, and S of this one, which still runs."""
    plan, smem, wg, due = now.plan, now.smem, now.wg, now.lasts[0]
    pl.when(due.there != 0)(lambda: plgpu.barrier_wait(_turn(plan, smem, now.new.count)[1]))
    sums.matmuls(plan, smem, dq_acc, _turn(plan, smem, now.new.count - plan.config.lag)[0], wg)
    if now.starts:  # S begins in registers out of which dK was made
        plgpu.wgmma_wait(sums.SHARES)
        now.let_go()
    plgpu.barrier_wait(smem.q_ready.at[now.slot])
    if now.starts:
        s_acc[...] = across(now.number(smem.lse), now.shape)
    groups = now.scores(s_acc)
    dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=groups)  # and dK of the last step is done
    if not now.starts:
        now.let_go()
    sums.add(plan, now.refs, smem, now.item, (wg, due.head, due.t, due.there), dq)


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
        if sums.by_rows(plan):
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


def attend(plan: Plan, refs: Refs, smem: Any, at: Any, count: Any) -> Any:
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

    widths = (sums.k_width(plan), plan.v_width)
    return pl.run_scoped(everything, *(plgpu.ACC((ROWS, n), jnp.float32) for n in widths))


def _late_dq(plan: Plan, refs: Refs, smem: Any, at: Any, due: Last, count: Any) -> None:
    """After a tile of work's last step."""
    item, wg = at
    turn, met = _turn(plan, smem, count)

    def matmuls(acc):
        sums.matmuls(plan, smem, acc, turn, wg)
        return acc[...]

    @pl.when(due.there != 0)
    def _():
        plgpu.barrier_wait(met)
        dq = pl.run_scoped(matmuls, plgpu.ACC(sums.share(plan), jnp.float32))
        if sums.by_rows(plan):
            plgpu.barrier_arrive(smem.ds_free.at[turn])
        sums.add(plan, refs, smem, item, (wg, due.head, due.t, due.there), dq)
