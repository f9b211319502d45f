"""Packed rows: the query rows of all sequences one behind the other, as many of each as `starts`
say. A block counts the q tiles of each sequence when it begins, and looks its units up there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import launches
from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn.kernels.attention.softmax import OutputSums
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.decode import scheduler
from pallas_attn.kernels.decode import sm90 as decode_sm90
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.types import Index, Predicate, Ref, SmemRef
from pallas_attn.kernels.mma import packed_rows
from pallas_attn.kernels.prefill import queries
from pallas_attn.kernels.prefill.plan import (
    Ending,
    Plan,
    PrefillSmem,
    Queries,
    Unit,
    Units,
    WgTile,
    base_scratch,
)


def decode_few(inputs: DecodeInputs, problem: DecodeProblem) -> tuple[Any, DecodeProblem]:
    """The results of sequences of few rows, by decode's kernel, and the problem of the others."""
    few, rest = launches.by_rows(problem)
    assert rest is not None
    return decode_sm90.launch(inputs, few, decode_sm90.Config.default(few)), rest


def bytes_of_few(problem: DecodeProblem) -> int:
    """Shared memory of the launch of `decode_few`; 0 where rows are not packed."""
    if not problem.packed:
        return 0
    few, _ = launches.by_rows(problem)
    return decode_sm90.bytes_of_launch(few, decode_sm90.Config.default(few))


def lane_sequences(plan: Plan) -> int:
    """Sequences that each lane of the warp counts that fills the tables."""
    return pl.cdiv(plan.problem.batch, 32)


def table_size(plan: Plan) -> int:
    """Entries of a table of running sums, the first of which is 0."""
    return 32 * lane_sequences(plan) + 1


def count(ctx: ThreadContext) -> None:
    """The running sum of the sequences' q tiles, by one warp: int32[table_size], q tiles of a kv
    head in the sequences before each.
    """
    thread, (starts, sums), _, plan = ctx
    lane, mine, each = thread.index % 32, thread.index < 32, lane_sequences(plan)
    last, total, totals = plan.problem.batch - 1, thread.index * 0, []
    for place in [lane * each + i for i in range(each)]:
        m = thread.minimum(place, last)
        rows = thread.load(starts, m + 1, 4) - thread.load(starts, m, 4)
        tiles = plan.tiles.q_tiles_of(rows)
        served = (rows >= plan.fewest) & (place <= last)
        total = total + thread.select(served, tiles, 0)
        totals.append(total)
    before = thread.running_sum(total) - total
    for i, own in enumerate(totals):
        thread.shared_store(sums, lane * each + (i + 1), before + own, mine)
    thread.shared_store(sums, lane * 0, lane * 0, thread.index < 1)
    thread.sync()


def fill(ctx: KernelContext, wg: Index, program: Callable, refs: Sequence[Ref], at: Index) -> None:
    """Runs `program`, which fills the tables, by one warpgroup for all."""

    @pl.when(wg == 0)
    def _():
        threads.run(program, ctx.plan, refs, at)
        plgpu.barrier_arrive(ctx.smem.counted)

    plgpu.barrier_wait(ctx.smem.counted)


def unit_at(ctx: KernelContext, sums: SmemRef, number: Index) -> Unit:
    """The unit of a number among those of all sequences."""
    plan, refs = ctx.plan, ctx.refs
    units_a_tile = plan.problem.kv_heads * plan.config.splits
    tile = lax.div(number, jnp.int32(units_a_tile))
    m = scheduler.last_within(sums, plan.problem.batch - 1, tile)
    before, first = sums[m], refs.starts[m]
    q_tiles = jnp.maximum(sums[m + 1] - before, 1)  # 0 only where there is no unit
    rows = refs.starts[m + 1] - first
    head, q_tile, split = queries.place_of(plan, number - before * units_a_tile, q_tiles)
    line = before + q_tile
    unit = queries.unit_at(ctx, m, head, q_tile, split, rows)
    return unit._replace(first_row=first, line=line)


def load(ctx: KernelContext, unit: Unit, wg: Index, slot: Index, exists: Predicate) -> None:
    """Asks for the rows of a consumer, of none if the unit does not exist: groups of copies are
    counted.
    """
    plan, refs, smem = ctx
    plgpu.commit_smem()  # all warps have read the slot
    unit = unit._replace(rows=jnp.where(exists, unit.rows, 0))
    place = _place_of(plan, unit, queries.wg_tile_of(plan, unit, wg))
    tiles = plan.qk.swizzle, plan.tiles.head_rows
    packed_rows.load(refs.q, smem.q, slot, place, tiles, refs.rows)


def _place_of(plan: Plan, unit: Unit, own: WgTile) -> packed_rows.Place:
    heads = jnp.where(own.exists, jnp.minimum(own.heads_left, plan.tiles.tile_heads), 0)
    return packed_rows.Place(unit.first_row + own.row, unit.rows - own.row, own.head, heads)


def partial_tiles(plan: Plan) -> tuple[int, int]:
    """Sizes of partials: kv heads, each with the q tiles of all sequences, which are never more
    than if each sequence had one beside those of all rows.
    """
    tiles, warpgroups = plan.tiles, plan.config.warpgroups
    most = tiles.wg_tiles // warpgroups + 1
    chunks = plan.problem.batch * (tiles.head_chunks // warpgroups + 2)
    return plan.problem.kv_heads, (most + chunks) * warpgroups


def scratch(plan: Plan) -> PrefillSmem:
    tables = plgpu.SMEM((table_size(plan),), jnp.int32)
    return base_scratch(plan, tables=tables, counted=plgpu.Barrier())


def begin(ctx: KernelContext, wg: Index, block_id: Index) -> None:
    del block_id
    fill(ctx, wg, count, (ctx.refs.starts, ctx.smem.tables), ())


def _units(ctx: KernelContext) -> Index:
    """The number of units of all sequences."""
    plan = ctx.plan
    return ctx.smem.tables[plan.problem.batch] * (plan.problem.kv_heads * plan.config.splits)


def units_of(ctx: KernelContext, block_id: Index) -> Units:
    return queries.strided_units(ctx.plan, block_id, _units(ctx))


def last_unit(ctx: KernelContext) -> Index:
    return jnp.maximum(_units(ctx) - 1, 0)


def unit_of(ctx: KernelContext, units: Units, number: Index) -> Unit:
    del units
    return unit_at(ctx, ctx.smem.tables, number)


def wait(ctx: KernelContext, slot: Index) -> None:
    del slot
    packed_rows.wait(ctx.plan.config.q_slots - 1)


def store(ctx: KernelContext, end: Ending, result: OutputSums) -> None:
    """The output and the log-sum-exp of rows that may begin anywhere, or their partial."""
    if ctx.plan.config.splits > 1:
        return queries.store_partial(ctx, end, end.unit.kv_head, result)
    plan, (out, lse_of_rows) = ctx.plan, ctx.refs.results
    place = _place_of(plan, end.unit, end.rows)
    factor, lse = queries.finished(ctx, end.rows, result)
    packed_rows.store_numbers(lse + end.spoil, lse_of_rows, place, plan.tiles.head_rows)
    acc = result.acc * mosaic.broadcast_rows(factor + end.spoil, result.acc.shape)
    width = plan.v.swizzle // 2
    for column in range(0, plan.v.width, width):
        part = lax.slice(acc, (0, column), (ROWS, column + width)).astype(plan.problem.dtype)
        packed_rows.store(part, out, column, place, plan.tiles.head_rows)
    return None


QUERIES = Queries(
    True, scratch, partial_tiles, units_of, last_unit, unit_of, load, wait, store, begin
)
