"""Of packed rows: how many q tiles the sequences have, as the blocks of a launch count them."""

from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention.plan import Context
from pallas_attn.kernels.decode import scheduler
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.mosaic import ThreadContext
from pallas_attn.kernels.prefill import shares

Ref = Any


class Tiles(NamedTuple):
    """What `count` reads, and what it writes."""

    starts: Ref  # int32[M + 1]
    sums: Ref  # int32[plan.table_size]: q tiles of a kv head in the sequences before this one


def count(ctx: ThreadContext) -> None:
    """The running sum of the sequences' q tiles, by one warp. `ctx.refs`: Tiles."""
    thread, refs, _, plan = ctx
    lane, mine, each = thread.index % 32, thread.index < 32, plan.lane_sequences
    last, total, sums = plan.problem.batch - 1, thread.index * 0, []
    for place in [lane * each + i for i in range(each)]:
        m = thread.minimum(place, last)
        count = thread.load(refs.starts, m + 1, 4) - thread.load(refs.starts, m, 4)
        tiles = plan.q_tiles_of(count, lambda x, y: x // y)
        served = (count >= plan.fewest) & (place <= last)
        total = total + thread.select(served, tiles, 0)
        sums.append(total)
    before = thread.running_sum(total) - total
    for i, some in enumerate(sums):
        thread.shared_store(refs.sums, lane * each + (i + 1), before + some, mine)
    thread.shared_store(refs.sums, lane * 0, lane * 0, thread.index < 1)
    thread.sync()


def sum_type(plan: Any) -> Any:
    if plan.merged:
        return shares.sums_type(plan)
    return plgpu.SMEM((plan.table_size,), jnp.int32)


def sums_of(ctx: Context) -> Ref:
    return ctx.smem.sums.q_tiles if ctx.plan.merged else ctx.smem.sums


def sequence_of(ctx: Context, number: Any) -> Any:
    """The sequence of a unit of packed rows."""
    plan, sums = ctx.plan, sums_of(ctx)
    tile = lax.div(number, jnp.int32(plan.problem.kv_heads * plan.config.splits))
    return scheduler.last_within(sums, plan.problem.batch - 1, tile)


def all_units(ctx: Context) -> Any:
    """How many units there are."""
    plan, problem = ctx.plan, ctx.plan.problem
    if not plan.packed:
        return plan.units
    return sums_of(ctx)[problem.batch] * (problem.kv_heads * plan.config.splits)


class Units(NamedTuple):
    """Those of a block: `count` from `first` on, each `step` after the last."""

    first: Any
    step: Any
    count: Any
    share: shares.Share | None = None  # which kv tiles of them, where blocks share out kv tiles
    back: Any = None  # every other one counts from here: whoever has a long unit has a short one

    def number(self, i: Any) -> Any:
        first = self.first if self.back is None else jnp.where(i & 1 == 0, self.first, self.back)
        return first + i * self.step


def units_of(ctx: Context, block_id: Any) -> Units:
    plan = ctx.plan
    if plan.merged:
        share = shares.share_of(ctx, block_id)
        return Units(share.q_tile, 1 + share.paired, share.units, share)
    if plan.together > 1:
        units, grid = jnp.int32(all_units(ctx)), jnp.int32(plan.grid)
        rounds, more = lax.div(units, grid), lax.rem(units, grid)
        back = plan.grid - 1 - block_id
        count = rounds + (jnp.where(rounds & 1 == 1, back, block_id) < more).astype(jnp.int32)
        return Units(block_id, plan.grid, count, back=back)
    count = lax.div(all_units(ctx) - block_id + (plan.grid - 1), jnp.int32(plan.grid))
    return Units(block_id, plan.grid, count)


def fill(ctx: Context, wg: Any, block_id: Any) -> None:
    """The q tiles of each sequence, by one warpgroup for all."""
    plan, refs, smem = ctx

    @pl.when(wg == 0)
    def _():
        if plan.merged:
            program = mosaic.in_context(shares.count, plan)
            own = None if plan.own is None else refs.own.given.lengths
            counted = shares.CountRefs(refs.starts, refs.lengths, smem.sums, refs.results[-1], own)
            threads.each_thread(program, counted, block_id)
        else:
            program, tiles = mosaic.in_context(count, plan), Tiles(refs.starts, smem.sums)
            threads.each_thread(program, tiles, ())
        plgpu.barrier_arrive(smem.counted)

    plgpu.barrier_wait(smem.counted)
