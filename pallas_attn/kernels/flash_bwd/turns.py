"""Turns: dq added up in one order by the fused Hopper kernel, for gradients whose bits repeat.

A float32 sum depends on the order of its terms. In turns the kv tiles add to a query tile from the
first to the last: a counter for each query tile and warpgroup, in global memory, says how many have
added. A warpgroup adds when as many have as there are kv tiles before its own, and raises the
counter a step later, when TMA has finished its addition.

No deadlock: blocks claim work tiles, the first of each block too, in an order in which the kv tiles
of a head rise (`work_order.schedule`: causal work tiles of the first keys are the longest). Of the
work tiles that are not finished, the first waits for none. It is in work, as its block has finished
all that it claimed before. So it does not matter how many blocks a GPU runs at a time.

A block that follows another one on the same query tiles stays more than a step behind it. The
blocks of a head that begin together therefore begin one after another; then they wait no more. This
is a small part of the launch, and of a work tile, where `costs.is_short_wait` holds. Causal blocks
go in lockstep, twice as many heads at a time as without turns.

On an H200, backward of 64:8 heads of 128, TFLOP/s, with two kernels and in no order beside it: two
batch rows of 8192, full, 601 (459, 621); 16384, causal, 561 (465, 630). Slower: two steps between
dS and its dQ (541 and 504: registers), a counter read when it is needed (529, 533), a signal that
orders memory (`Thread.signal`, a tenth), and causal rows of 8192 of heads that share no keys or few
(16:16: 430, with two kernels 482; 32:8: 462 and 500).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.flash_bwd import dq_sum
from pallas_attn.kernels.flash_bwd.dq_sum import WARPGROUPS, PendingDq
from pallas_attn.kernels.flash_bwd.key_tiles import KeyTile
from pallas_attn.kernels.flash_bwd.plan import KeyPlan
from pallas_attn.kernels.flash_bwd.work_order import KeyTiling
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.types import GmemRef, Index, RegisterTiles


def applies(tiling: KeyTiling) -> bool:
    """Whether the kv tiles that meet a query tile are all of a head up to some number: then a kv
    tile's turn follows from its own number.
    """
    bounds_left = tiling.problem.mask.bounds_left
    return tiling.follows_mask and tiling.chunks == 1 and not bounds_left


def counters(plan: KeyPlan) -> Any:
    """Additions to each share of the dQ of each query tile."""
    problem = plan.problem
    shares = problem.batch * problem.q_heads * plan.tiling.q_tiles * WARPGROUPS
    return jax.new_ref(jnp.zeros((shares,), jnp.int32))


# ---- steps whose dQ is to come ------------------------------------------------------------------


def packed(plan: KeyPlan, step: PendingDq) -> Any:
    """A step as the mainloop keeps it: one number, since registers are short."""
    return jnp.where(step.exists != 0, step.head * plan.tiling.q_tiles + step.t, -1)


def hidden(steps: Index, count: Index) -> Index:
    """The number of steps of a work tile, unknown to the compiler, which would prepare for one that
    it knows, and spill registers for it.
    """
    return steps + mosaic.opaque_zero(count)


def unpacked(plan: KeyPlan, kept: tuple[Any, ...], first: Index) -> tuple[PendingDq, ...]:
    """The steps that are kept, from number `first` on."""
    return tuple(_unpacked(plan, number, first + m) for m, number in enumerate(kept))


def _unpacked(plan: KeyPlan, number: Index, count: Index) -> PendingDq:
    q_tiles, at = jnp.int32(plan.tiling.q_tiles), jnp.maximum(number, 0)
    head = lax.div(at, q_tiles)
    return PendingDq((number >= 0).astype(jnp.int32), count, head, at - head * q_tiles, number)


# ---- turns --------------------------------------------------------------------------------------


class _Refs(NamedTuple):
    counters: GmemRef


class _Turn(NamedTuple):
    place: Index  # the counter's; negative: none
    least: Index = 0  # additions that it has to show


def _place(ctx: KernelContext, work: KeyTile, wg: Index, number: Index) -> Index:
    """The place of the counter of a query tile."""
    problem, q_tiles = ctx.plan.problem, ctx.plan.tiling.q_tiles
    return (work.batch * (problem.q_heads * q_tiles) + number) * WARPGROUPS + wg


def look(ctx: KernelContext, work: KeyTile, wg: Index, step: PendingDq) -> PendingDq:
    """A step with the counter of its dQ, read while matmuls run; mostly it says that it is the
    step's turn.
    """
    place = _place(ctx, work, wg, jnp.maximum(step.number, 0))
    seen = threads.run(_look, ctx.plan, _Refs(ctx.refs.turns), _Turn(place), returns="one")
    return step._replace(seen=seen)


class InTurns(dq_sum.ByColumns):
    """Kv tiles add to a query tile in one order."""

    def add(
        self, at: tuple[KernelContext, KeyTile, Index], step: PendingDq, parts: RegisterTiles
    ) -> None:
        """After the addition before, which is in memory: see `pass_on`."""
        ctx, work, wg = at
        ctx.smem.dq[wg] = parts[0]
        _wait_for(ctx, work, wg, step)
        self.store(at, step)


def _wait_for(ctx: KernelContext, work: KeyTile, wg: Index, step: PendingDq) -> None:
    """Waits until it is this step's turn."""
    kv_tile = lax.div(work.key, jnp.int32(ctx.plan.tiling.block_kv))
    least = jnp.where(step.number >= 0, kv_tile, 0)
    turn = _Turn(_place(ctx, work, wg, jnp.maximum(step.number, 0)), least)
    until = functools.partial(threads.run, _wait, ctx.plan, _Refs(ctx.refs.turns), turn)
    if step.seen is None:
        until()
    else:
        pl.when(step.seen < least)(until)


def pass_on(ctx: KernelContext, work: KeyTile, wg: Index, number: Index) -> None:
    """The turn at a query tile passes to the next kv tile, when the addition is in memory."""
    plgpu.wait_smem_to_gmem(0)
    place = jnp.where(number >= 0, _place(ctx, work, wg, number), -1)
    threads.run(_signal, ctx.plan, _Refs(ctx.refs.turns), _Turn(place))


def _look(ctx: ThreadContext) -> Any:
    thread, refs, at, _ = ctx
    return thread.peek(refs.counters, at.place)


def _wait(ctx: ThreadContext) -> None:
    thread, refs, at, _ = ctx
    thread.wait_until(refs.counters, at.place, at.least)


def _signal(ctx: ThreadContext) -> None:
    """Without an order of its own: nobody reads what has been added before, and the next addition
    is made where this one has been, in L2.
    """
    thread, refs, at, _ = ctx
    thread.count(refs.counters, at.place, (thread.index < 1) & (at.place >= 0))
