"""K and V of a cache in q's dtype, by TMA from where they lie: a copy a kv tile, or a page."""

import functools
from typing import NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import DecodeInputs
from pallas_attn.kernels.attention.cache_layout import Layout, Paged, Row
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.panels import Ring
from pallas_attn.kernels.lang.types import Barrier, GmemRef, Index, Operand, SmemRef
from pallas_attn.kernels.prefill.plan import Plan, Producer, Unit

# Registers of a thread, by consumer warpgroups: (consumer, producer). A producer that looks up
# pages, or chooses between arrays, needs more.
REGISTERS = {1: (240, 32), 2: (232, 40), 3: (160, 32)}
REGISTERS_OF_TABLES = {1: (240, 64), 2: (224, 56), 3: (152, 56)}


def producer_of(plan: Plan) -> Producer:
    simple = not plan.layout.paged and not plan.layout.separate
    registers = (REGISTERS if simple else REGISTERS_OF_TABLES)[plan.config.warpgroups]
    return Producer(operands, (_produce,), 2 * plan.copies, registers)


def operands(plan: Plan, inputs: DecodeInputs) -> dict[str, tuple[Operand, ...]]:
    view, tables = plan.layout.view, plan.layout.tables(inputs.k_cache, inputs.v_cache)
    k, v = [view(table[0]) for table in tables], [view(table[-1]) for table in tables]
    return {"k": tuple(k), "v": tuple(v)}


class Target(NamedTuple):
    """Arrays to copy a tile from, and where to."""

    arrays: tuple[GmemRef, ...]  # K or V
    to: SmemRef  # [block_kv, columns]
    landed: Barrier  # counts the copies
    first_column: int = 0  # first column to read in a row of the array


def _produce(ctx: KernelContext, block_id: Index) -> None:
    """K and V of every unit of the block, in the order in which consumers use them."""
    (plan, refs, smem), ring = ctx, Ring.of(ctx)
    units = plan.queries.units_of(ctx, block_id)
    values_from = plan.problem.head_dim if plan.layout.joined else 0

    def one_unit(i, count):
        unit = plan.queries.unit_of(ctx, units, units.number(i))
        tiles = unit.span.hi - unit.span.lo

        def entry(e, count):
            slot, t = ring.acquire(count), unit.span.hi - 1 - e
            ready = ring.ready.at[slot]
            nothing = functools.partial(_arrive, ready, plan.copies)
            keys = Target(refs.k, smem.k.at[slot], ready)
            pl.when(e < tiles)(functools.partial(_copy_tile, ctx, unit, keys, t))
            pl.when(e == tiles)(nothing)
            values = Target(refs.v, smem.v.at[slot], ready, values_from)
            if "kv_lengths" in plan.problem.arrays:
                cut = (e == 1) & ((t + 2) * plan.config.block_kv > unit.tile.kv_len)
                pl.when((e > 0) & ~cut)(lambda: _copy_tile(ctx, unit, values, t + 1))
                pl.when(cut)(lambda: _copy_cut_values(ctx, unit, values, t + 1))
            else:
                pl.when(e > 0)(lambda: _copy_tile(ctx, unit, values, t + 1))
            pl.when(e == 0)(nothing)
            return count + 1

        return lax.fori_loop(0, jnp.where(tiles > 0, tiles + 1, 0), entry, count)

    lax.fori_loop(0, units.count, one_unit, jnp.int32(0))


def _arrive(barrier: Barrier, times: int) -> None:
    def arrive(_, carry):
        plgpu.barrier_arrive(barrier)
        return carry

    lax.fori_loop(0, times, arrive, None)


def _copy_tile(ctx: KernelContext, unit: Unit, target: Target, t: Index) -> None:
    """Asks for kv tile t of K or of V."""
    layout, layer = ctx.plan.layout, None
    if layout.layers is not None:
        layer = jnp.clip(ctx.refs.layer[0], 0, layout.layers - 1)
    row = Row(unit.m, unit.kv_head, t * ctx.plan.config.block_kv, layer)
    copies = [functools.partial(_copy, layout, array, row, target) for array in target.arrays]
    if isinstance(layout, Paged):
        _copy_pages(ctx, unit, target, row)
    elif layout.separate:
        lax.switch(unit.m, copies)
    else:
        copies[0]()


def _copy(layout: Layout, array: GmemRef, row: Row, target: Target) -> None:
    """Issues one TMA copy of the target's rows, all of one slab of the cache."""
    first, width = target.first_column, target.to.shape[-1]
    columns = mosaic.columns(array, first, width, row.position)
    source = array.at[*layout.rows_from(row, target.to.shape[0]), columns]
    plgpu.copy_gmem_to_smem(source, target.to, target.landed)


def _copy_pages(ctx: KernelContext, unit: Unit, target: Target, row: Row) -> None:
    """A kv tile, page by page, which the producer's warps share out: a copy costs each warp that
    asks for it some 45 instructions and an arrival of every thread. A page of which no row exists
    is not read.
    """
    plan, layout, size = ctx.plan, ctx.plan.layout, ctx.plan.page_rows
    length, last = unit.tile.kv_len, jnp.maximum(unit.tile.kv_len - 1, 0)

    @pl.kernel(out_type=(), mesh=plgpu.WarpMesh(axis_name="warp"))
    def copies():
        warp = lax.axis_index("warp")
        numbers = [warp + n for n in range(0, plan.copies, threads.WARPS)]
        starts = [row.position + n * size for n in numbers]
        entries = [layout.entry(jnp.clip(start, 0, last)) for start in starts]
        pages = [ctx.refs.page_table[unit.m, entry] for entry in entries]
        for n, start, page in zip(numbers, starts, pages, strict=True):
            page = jnp.where(layout.lacks_page(page), 0, page)  # any: the result will be NaN
            to = target._replace(to=target.to.at[pl.ds(n * size, size)])
            page_row = row._replace(position=start, page=page)

            @pl.when(n < plan.copies)
            def _(start=start, row=page_row, to=to):
                copy = functools.partial(_copy, layout, target.arrays[0], row, to)
                pl.when(start < length)(copy)
                pl.when(start >= length)(functools.partial(plgpu.barrier_arrive, target.landed))

    copies()


def _copy_cut_values(ctx: KernelContext, unit: Unit, target: Target, t: Index) -> None:
    """`_copy_tile` of the value tile that the length cuts, with zeros in place of rows past it:
    whatever lies there, NaN too, has a probability of 0.
    """
    plan, landed = ctx.plan, ctx.smem.landed
    _copy_tile(ctx, unit, target._replace(landed=landed), t)
    plgpu.barrier_wait(landed)
    wide = plan.v.swizzle // 2
    for row in range(0, plan.config.block_kv, ROWS):
        live = unit.tile.kv_len - t * plan.config.block_kv - row
        for column in range(0, plan.v.width, wide):
            part = target.to.at[pl.ds(row, ROWS), pl.ds(column, wide)]
            inside = mosaic.positions((ROWS, wide), 0, 0) < live
            part[...] = jnp.where(inside, plgpu.load(part, layout=mosaic.TILE), 0)
    plgpu.commit_smem()
    _arrive(target.landed, plan.copies)
