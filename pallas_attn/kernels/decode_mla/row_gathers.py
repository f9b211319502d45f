"""Rows of a latent cache that a list names (`cache_layout.Listed`), on their way to shared memory:
in place of `producer.load`, which copies rows that lie together by TMA.

The threads of the producer copy rows by cp.async, a tile in the same blocks of columns, a group of
copies each. A block is handed over when the group is there and `LAG` later ones have been issued:
the copies of a few blocks are always under way. Each thread copies parts of four rows of a tile; it
looks their numbers up while the tile before is copied.

An entry of a list that names no row is copied as zeros, and `holes` keeps consumers from counting
it. Lists are whole tiles long, and equally long, so the scheduler needs no table of lengths in
shared memory: a launch takes any number of lists.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.decode import scheduler
from pallas_attn.kernels.decode.plan import Plan
from pallas_attn.kernels.decode.scheduler import Table, WorkTile
from pallas_attn.kernels.decode_mla.producer import TILE, Copy
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.panels import Block
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.types import (
    Index,
    Layout,
    RegisterTile,
    SmemRef,
)
from pallas_attn.kernels.mma import gathered_rows

LAG = 2  # groups of copies that are under way when a block is handed over
REGISTERS = 40, 152  # registers of a thread of `sm90`: producer, scores


def with_whole_tiles(plan: Plan) -> Plan:
    """The plan, in which a tile of listed rows comes in as many parts as one of a large page."""
    if not plan.layout.listed:
        return plan
    return dataclasses.replace(plan, keys=dataclasses.replace(plan.keys, page_rows=TILE))


# ---- the table of lists --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FullLists:
    """`scheduler.Table.sums` where all lists are full."""

    units: int  # units of a list

    def __getitem__(self, m: Index) -> Index:
        return m * self.units


def table_scratch(plan: Plan) -> Table | None:
    return None if plan.layout.listed else scheduler.table_scratch(plan)


def with_table(ctx: KernelContext) -> KernelContext:
    """The context, whose table of listed rows lies in global memory."""
    if not ctx.plan.layout.listed:
        return ctx
    sums = FullLists(ctx.plan.keys.most_units)
    table = Table(sums, ctx.refs.lengths.lengths, ctx.refs.lost)
    return ctx._replace(smem=ctx.smem._replace(table=table))


# ---- entries that name no row --------------------------------------------------------------------


def holes_scratch(plan: Plan, tiles: int) -> SmemRef | None:
    """float32[.., TILE] for each of a few tiles: -inf where an entry names no row, else inf.
    `tiles`: how many may be in shared memory.
    """
    if not plan.layout.listed:
        return None
    return plgpu.SMEM((tiles + 2, TILE), jnp.float32)


def without_holes(
    ctx: KernelContext, s: RegisterTile, count: Index, layout: Layout
) -> RegisterTile:
    """Logits of a tile, -inf where an entry names no row. `count`: tiles before it; `layout`: one
    number a key.
    """
    holes = ctx.smem.holes
    if holes is None:
        return s
    bound = plgpu.load(holes.at[lax.rem(count, jnp.int32(holes.shape[0]))], layout=layout)
    bound = lax.broadcast_in_dim(bound, s.shape, [1 if layout == mosaic.COLUMN else 0])
    if ctx.plan.problem.score_program is not None:  # which may be NaN there
        return jnp.where(bound < 0, -jnp.inf, s)
    return jnp.minimum(s, bound)


# ---- copies --------------------------------------------------------------------------------------


def load(
    ctx: KernelContext,
    work: WorkTile,
    count: Index,
    copies_of: Callable[[Index], Iterable[Copy]],
    lag: int = LAG,
) -> Index:
    """Issues the copies of all tiles of a work, as `producer.load` does. `lag`: fewer than `LAG`
    where the ring has room for no more than a tile and so many blocks.
    """
    lag = min(lag, len(list(copies_of(count))))
    index = jnp.int32(0)
    if ctx.refs.layer is not None:
        index = jnp.clip(ctx.refs.layer[0], 0, ctx.plan.layout.layers - 1)
    layer = gathered_rows.Layer(index, ctx.plan.layout.rows)

    def one_tile(tile, carry):
        count, rows = carry
        following = look_up(ctx, work, tile + 1)
        before, copies = list(copies_of(count - 1)), list(copies_of(count))
        pl.when(tile == work.tile + 2)(functools.partial(_hand_over_last, before, lag))
        for number, copy in enumerate(copies):
            pl.when(copy.reused)(functools.partial(plgpu.barrier_wait, copy.to.free))
            if number == 0:
                note_holes(ctx, rows, count)
            column = copy.columns.start
            gathered_rows.copy(ctx.refs.kv, layer, rows, column, copy.to.buffer, copy.to.place)
            if number >= lag:
                _hand_over(copies[number - lag].to, lag)
            else:
                later = (tile > work.tile) & (tile != work.tile + 2)
                to = before[len(before) - lag + number].to
                pl.when(later)(functools.partial(_hand_over, to, lag))
        return count + 1, following

    start = count, look_up(ctx, work, work.tile)
    count, _ = lax.fori_loop(work.tile, work.end, one_tile, start)
    _hand_over_last(list(copies_of(count - 1)), lag)
    return count


def _hand_over_last(copies: list[Copy], lag: int) -> None:
    """Hands over the last blocks of a tile: at the end of a work, and before its third tile, whose
    first block may take the place of q's, which is free when the second tile has its scores.
    """
    for left in reversed(range(lag)):
        _hand_over(copies[len(copies) - 1 - left].to, left)


def _hand_over(to: Block, left: int) -> None:
    """Hands a block over when all groups of copies but the last `left` are there."""
    threads.each_thread(lambda thread, *_: thread.wait_copies(left), (), ())
    plgpu.commit_smem()
    plgpu.barrier_arrive(to.ready)


class _Tile(NamedTuple):
    sequence: Index
    first: Index  # the entry that the tile begins with


def look_up(ctx: KernelContext, work: WorkTile, tile: Index) -> list[RegisterTile]:
    """int32[128] a row of which a thread copies some: the entry of the list. Past the last tile it
    is any of them.
    """
    last = ctx.plan.layout.entries - TILE
    at = _Tile(work.sequence, jnp.minimum(tile * TILE, last))

    def row(n: int) -> RegisterTile:
        program = functools.partial(_row_number, n=n)
        return threads.run(program, ctx.plan, ctx.refs.page_table, at, returns="each")

    return [row(n) for n in range(gathered_rows.EACH)]


def _row_number(ctx: ThreadContext, n: int) -> Index:
    thread, table, at, plan = ctx
    entry = at.first + gathered_rows.row_of(thread, n)
    return plan.layout.load_page(thread, table, at.sequence, entry)


class _Holes(NamedTuple):
    slot: Index
    rows: list[RegisterTile]


def note_holes(ctx: KernelContext, rows: list[RegisterTile], count: Index) -> None:
    """Writes the tile's part of `holes`."""
    holes = ctx.smem.holes
    at = _Holes(lax.rem(count, jnp.int32(holes.shape[0])), rows)
    threads.run(_note, ctx.plan, holes, at)


def _note(ctx: ThreadContext) -> None:
    thread, holes, (slot, rows), plan = ctx
    writes = thread.index % gathered_rows.ACROSS < 1
    high, low = thread.number(float("inf")), thread.number(float("-inf"))
    for n, row in enumerate(rows):
        place = slot * TILE + gathered_rows.row_of(thread, n)
        thread.shared_store(
            holes, place, thread.choose(plan.layout.has_page(row), high, low), writes
        )
