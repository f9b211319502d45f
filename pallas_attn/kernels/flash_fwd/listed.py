"""Kv tiles by a mask function in the Hopper forward: a work tile's kv tiles are numbers in a list,
which is made before the kernel runs (`tile_lists`), and longer lists come first.

Lists that depend on arrays are made by a small kernel (`listed_tiles`), or by XLA; until then the
schedule has ranks in place of work tiles. Each entry of a list is read an entry ahead.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import block_tables, tile_lists, tile_scheduler
from pallas_attn.kernels.attention.tile_lists import Listed, Run
from pallas_attn.kernels.attention.tile_scheduler import Turn
from pallas_attn.kernels.attention.tiles import KernelContext, QueryRows, Span, WorkTile
from pallas_attn.kernels.flash_fwd import warpgroups
from pallas_attn.kernels.flash_fwd.warpgroups import Entry
from pallas_attn.kernels.lang.panels import Ring
from pallas_attn.kernels.lang.types import Index

# ---- in the kernel ------------------------------------------------------------------------------


def list_of(ctx: KernelContext, tile: WorkTile) -> Listed:
    """The kv tiles that a mask function leaves of a work tile."""
    tiling, head, sharers = ctx.plan.tiling, tile.head, block_tables.heads_of_list(ctx.plan)
    row = lax.div(tile.row, jnp.int32(tiling.tile_rows))
    if sharers > 1:
        head = lax.div(head, jnp.int32(sharers))
    return Listed.of(ctx.refs.tiles, tile.batch, head, row, tiling.row_blocks)


def _list_or_run(ctx: KernelContext, tile: WorkTile, count: Index, last: Index) -> Listed | Run:
    """`list_of`, of so many tiles up to `last`; it is not read where they are known to follow each
    other, as those of a band do.
    """
    if tile_lists.are_known_runs(ctx.plan.problem, ctx.plan.tiling.list_sizes):
        return Run(last - (count - 1))
    return list_of(ctx, tile)


class ListedRows(NamedTuple):
    """The part of a list that a warpgroup's rows need."""

    loaded: Index  # kv tiles that the block loads
    span: Span  # places in the list
    last: Index  # the last kv tile of the span


class Ranges(tile_scheduler.Ranges):
    """`tile_scheduler.Ranges` of listed tiles."""

    @staticmethod
    def read_for_block(ctx: KernelContext, code: Index) -> tuple[Index, Index]:
        """How many tiles the list has, and the last."""
        tiles = list_of(ctx, tile_scheduler.work_tile(ctx, code))
        return tiles.count, tiles.last

    @staticmethod
    def read_for_rows(ctx: KernelContext, code: Index, wg: Index) -> ListedRows:
        tiles = list_of(ctx, tile_scheduler.work_tile(ctx, code))
        return ListedRows(tiles.count, *tiles.of_row_block(wg))

    @staticmethod
    def of_block(
        ctx: KernelContext, tile: WorkTile, record: tuple[Index, Index]
    ) -> tuple[Index, Index]:
        """How many tiles the list has, and the last."""
        del ctx, tile
        return record

    @staticmethod
    def of_rows(
        ctx: KernelContext, tile: WorkTile, wg: Index, q_slot: Index, record: ListedRows
    ) -> tuple[tuple[Index, Index], QueryRows]:
        loaded, span, last = record
        tiles = _list_or_run(ctx, tile, span.hi, last)
        own, row = block_tables.own_rows(ctx.plan, tile, wg)
        return (0, loaded), QueryRows(own, row, wg, span, q_slot, listed=tiles, last=last)


def produce(ctx: KernelContext, block: Index) -> None:
    """`warpgroups.produce` of listed tiles."""
    warpgroups.produce(ctx, block, load_entries)


def load_entries(
    ctx: KernelContext, turn: Turn, tile: WorkTile, listed: tuple[Index, Index], count: Index
) -> tuple[Index, None]:
    """`warpgroups.load_entries` of a list: how many tiles it has, and the last."""
    del turn
    ring, (length, last) = Ring.of(ctx), listed
    tiles = _list_or_run(ctx, tile, length, last)

    def one_entry(e: Index, carry: tuple[Index, Index, Index]) -> tuple[Index, Index, Index]:
        count, before, t = carry
        following = tiles.tile(length - 2 - e)
        warpgroups.load_entry(ctx, tile, Entry(e, length, t, before), ring.acquire(count))
        return count + 1, t, following

    start = (count, jnp.int32(0), last)
    return lax.fori_loop(0, length + 1, one_entry, start)[0], None
