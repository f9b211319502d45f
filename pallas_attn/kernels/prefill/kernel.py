"""A block of prefill's kernel, and its consumers: warpgroups of 64 query rows each."""

import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention.softmax import OutputSums
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext, QueryRows
from pallas_attn.kernels.flash_fwd.alternation import Alternation
from pallas_attn.kernels.flash_fwd.warpgroups import no_values
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.types import Index, Predicate, RegisterTile
from pallas_attn.kernels.prefill.plan import Ending, Plan, PrefillRefs, Unit, WgTile
from pallas_attn.kernels.prefill.queries import wg_tile_of


def block(refs: PrefillRefs, *rest: Any, plan: Plan) -> None:
    """The work of one block: the kernel's body."""
    *results, smem = rest
    block_id, wg = lax.axis_index("block"), lax.axis_index("wg")
    ctx = KernelContext(plan, refs._replace(results=tuple(results)), smem)
    if plan.queries.begin is not None:
        plan.queries.begin(ctx, wg, block_id)
    produce = [functools.partial(program, ctx, block_id) for program in plan.producer.programs]
    work = functools.partial(consume, ctx, block_id, wg)
    registers = plan.producer.registers
    mosaic.share_registers(wg, plan.config.warpgroups, produce, work, *registers)


def consume(ctx: KernelContext, block_id: Index, wg: Index) -> None:
    """All units of a block."""
    plan, queries, config = ctx.plan, ctx.plan.queries, ctx.plan.config
    units = queries.units_of(ctx, block_id)

    def q_slot(i):
        return wg if config.q_slots == 1 else wg + (i & 1) * config.warpgroups

    def load_q(i):
        number = jnp.minimum(units.number(i), queries.last_unit(ctx))
        unit = queries.unit_of(ctx, units, number)
        queries.load(ctx, unit, wg, q_slot(i), i < units.count)

    load_q(jnp.int32(0))
    alternation = Alternation(ctx.smem.alternation, wg) if config.in_turn else None
    if alternation is not None:
        alternation.begin()

    def one_unit(i, slot):
        unit = queries.unit_of(ctx, units, units.number(i))
        own, invalid = wg_tile_of(plan, unit, wg), unit.invalid
        if plan.layout.paged:
            invalid = invalid | _lacks_a_page(ctx, unit, wg)
        if config.q_slots > 1:
            load_q(i + 1)
        q = q_slot(i)
        queries.wait(ctx, q)
        tile, mapping = unit.tile._replace(head=own.head), plan.row_mapping
        rows = QueryRows(tile, own.row, wg, unit.span, q, mapping=mapping)

        def attend(slot):
            # Warps that store no result do not meet before their rows are loaded anew.
            mosaic.results_are_used(own.exists.astype(jnp.int32))
            return plan.mainloop(ctx, rows, slot, None, alternation)

        def skip(slot):
            return OutputSums.nothing(no_values(plan.v), ROWS), slot

        result, slot = lax.cond(unit.span.hi > unit.span.lo, attend, skip, slot)
        if config.q_slots == 1:
            plgpu.commit_smem()  # by now all warps have read it, and TMA will write there
            load_q(i + 1)
        if "q_lengths" in plan.problem.arrays:
            result = _without_idle_rows(ctx, unit, own, result)
        end = Ending(unit, own, wg, jnp.where(invalid, jnp.nan, 0.0))
        pl.when(own.exists)(functools.partial(queries.store, ctx, end, result))
        return slot

    lax.fori_loop(0, units.count, one_unit, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _without_idle_rows(
    ctx: KernelContext, unit: Unit, own: WgTile, result: OutputSums
) -> OutputSums:
    """The result, in which rows that do not count, which may be NaN, see no key."""
    plan = ctx.plan
    live = plan.tiles.row_positions(ROWS, own.row) < unit.tile.q_len
    none = OutputSums.nothing(no_values(plan.v), ROWS)

    def chosen(some: RegisterTile, nothing: RegisterTile) -> RegisterTile:
        inside = live if some.ndim == 1 else mosaic.broadcast_rows(live, some.shape)
        return jnp.where(inside, some, nothing)

    return OutputSums(*(chosen(*both) for both in zip(result, none, strict=True)))


def _lacks_a_page(ctx: KernelContext, unit: Unit, wg: Index) -> Predicate:
    """Whether the unit's sequence lacks a page."""
    plan, refs, smem = ctx
    pages = plan.layout.entry(unit.tile.kv_len + (plan.layout.page_size - 1))
    threads.run(_note_missing, plan, (refs.page_table, smem.lost), (unit.m, wg, pages))
    return smem.lost[wg] == 1


def _note_missing(ctx: ThreadContext) -> None:
    """lost[wg] becomes 1 where one of the first `pages` of a sequence is missing, else 0."""
    thread, (table, lost), (m, wg, pages), plan = ctx
    thread.shared_store(lost, wg, thread.index * 0, thread.index < 1)
    thread.sync()
    plan.layout.note_missing(thread, table, m, pages, (lost, wg))
    thread.sync()
