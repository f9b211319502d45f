"""The producer of `flash_fwd.sm90`: one warpgroup, which loads K and V by TMA for all work tiles of
a block, into a ring of entries in shared memory.

Entry e of a work tile holds K of its e-th kv tile from the end and V of the tile before that one: a
work tile of n kv tiles has n + 1 entries, the first without V and the last without K.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.special import Special
from pallas_attn.kernels.attention.tiles import KernelContext, WorkTile, kv_batch, kv_row
from pallas_attn.kernels.flash_fwd.tile_scheduler import Turn, work_tile
from pallas_attn.kernels.lang import panels
from pallas_attn.kernels.lang.types import Barrier, GmemRef, Index

score_tiles = Special("kernels.attention.score_tiles")


class Ring(NamedTuple):
    """The ring of K and V."""

    ready: Barrier  # one an entry: it is filled
    free: Barrier  # one an entry: all consumers have released it
    stages: int

    @classmethod
    def of(cls, ctx: KernelContext) -> "Ring":
        return cls(ctx.smem.ready, ctx.smem.free, ctx.plan.config.stages)

    def wait(self, slot: Index) -> None:
        """A consumer waits until an entry is filled."""
        plgpu.barrier_wait(self.ready.at[slot])

    def release(self, slot: Index) -> None:
        plgpu.barrier_arrive(self.free.at[slot])

    def after(self, slot: Index) -> Index:
        return jnp.where(slot == self.stages - 1, 0, slot + 1)

    def acquire(self, count: Index) -> Index:
        """The producer waits for the slot of an entry before which `count` were loaded."""
        slot = lax.rem(count, jnp.int32(self.stages))
        released = self.free.at[slot]
        pl.when(count >= self.stages)(functools.partial(plgpu.barrier_wait, released))
        return slot


class Loaded(NamedTuple):
    """The state of a producer from work tile to work tile."""

    count: Index  # entries of the ring
    record: Any  # read ahead of the work tile at hand: see `tile_scheduler.MaskRanges`
    claim: Any = None  # the next work tile's code, where it is claimed among entries: `claims`


def produce(ctx: KernelContext, block: Index, load: Callable[..., Any] | None = None) -> None:
    """K and V of all work tiles of a block, in the order in which consumers use them. `load`: loads
    the entries of a work tile in place of `load_entries`.
    """
    load, work_tiles, ranges = load or load_entries, ctx.plan.producer_tiles, ctx.plan.ranges

    def one_tile(turn: Turn, loaded: Loaded) -> Loaded:
        tile = work_tile(ctx, turn.code)
        kv_range = ranges.of_block(ctx, tile, loaded.record)
        record = ranges.read_for_block(ctx, turn.following)
        count, claim = load(ctx, turn, tile, kv_range, loaded.count)
        return Loaded(count, record, claim)

    start = work_tiles.start(ctx, block)
    first = Loaded(jnp.int32(0), ranges.read_for_block(ctx, start.codes[0]))
    work_tiles.for_each_tile(ctx, block, start, one_tile, first)


def load_entries(
    ctx: KernelContext, turn: Turn, tile: WorkTile, kv_range: tuple[Index, Index], count: Index
) -> tuple[Index, Any]:
    """Loads the entries of a work tile, before which `count` were loaded: the new count, and the
    code of the next work tile where it is claimed meanwhile.
    """
    (lo, hi), ring = kv_range, Ring.of(ctx)

    def one_entry(e: Index, carry: tuple[Index, Any]) -> tuple[Index, Any]:
        count, claim = carry
        last, t = hi - lo, hi - 1 - e
        slot = ring.acquire(count)
        load_entry(ctx, tile, Entry(e, last, t, t + 1), slot)
        if turn.claim_index is not None:
            claim = ctx.plan.producer_tiles.claim_among_entries(ctx, turn, e, claim)
        return count + 1, claim

    entries = jnp.where(hi > lo, hi - lo + 1, 0)
    return lax.fori_loop(0, entries, one_entry, (count, turn.claim))


class Entry(NamedTuple):
    """An entry of a work tile: K of kv tile t, and V of the tile before it."""

    number: Index  # 0: without V
    last: Index  # the number of the last, which is without K
    t: Index
    before: Index


def load_entry(  # noqa: PLR0913
    ctx: KernelContext,
    tile: WorkTile,
    entry: Entry,
    slot: Index,
    load: Callable[..., None] | None = None,
) -> None:
    """Issues loads of K and V of an entry, by `load` in place of `load_kv_tile`; a K or V that the
    entry is without counts as arrived at once.
    """
    load, ready = load or load_kv_tile, ctx.smem.ready.at[slot]

    def arrive(copies: int) -> None:
        for _ in range(copies):
            plgpu.barrier_arrive(ready)

    k_copies, v_copies = ctx.plan.copies
    bias_and_mask, score_copies = ctx.plan.score_tiles, 0
    if bias_and_mask:
        score_copies = score_tiles.copies(bias_and_mask)
    segments = ctx.smem.segments

    @pl.when(entry.number < entry.last)
    def _() -> None:
        load(ctx, tile, "k", entry.t, slot)
        if segments is not None:
            segments.load_keys(ctx, tile, entry.t, slot)
        if bias_and_mask:
            column = entry.t * ctx.plan.config.block_kv
            place = score_tiles.Place(tile.batch, tile.head, tile.row, column)
            score_tiles.load(ctx, ctx.smem.bias_and_mask, place, slot, ready)

    @pl.when(entry.number == entry.last)
    def _() -> None:
        arrive(k_copies + (segments is not None) + score_copies)

    pl.when(entry.number > 0)(functools.partial(load, ctx, tile, "v", entry.before, slot))
    pl.when(entry.number == 0)(functools.partial(arrive, v_copies))


def load_kv_tile(ctx: KernelContext, tile: WorkTile, name: str, t: Index, slot: Index) -> None:
    """Issues loads of kv tile t of "k" or "v". A tile of v that a length cuts is `v_edge`."""
    plan, refs = ctx.plan, ctx.refs
    if name == "v" and plan.v.transposed:
        return _load_transposed(ctx, tile, t, slot)
    block, batch = plan.config.block_kv, kv_batch(plan.problem, tile.batch)
    row = kv_row(plan.problem, block, t * block)
    load_whole = functools.partial(
        copy_rows, ctx, tile, name, slot, (getattr(refs, name), batch, row)
    )
    if name == "k" or "kv_lengths" not in plan.problem.arrays:
        return load_whole()
    cut = (t + 1) * block > tile.kv_len  # only the last tile may be
    pl.when(cut)(lambda: copy_rows(ctx, tile, name, slot, (refs.v_edge, batch, 0)))
    return pl.when(jnp.logical_not(cut))(load_whole)


def _load_transposed(ctx: KernelContext, tile: WorkTile, t: Index, slot: Index) -> None:
    """Issues the load of kv tile t of V^T, for float8."""
    plan, smem = ctx.plan, ctx.smem
    head = lax.div(tile.head, jnp.int32(plan.problem.group))
    columns = pl.ds(t * plan.config.block_kv, plan.config.block_kv)
    source = ctx.refs.v.at[tile.batch, head, :, columns]
    plgpu.copy_gmem_to_smem(source, smem.v.at[slot], smem.ready.at[slot])


def copy_rows(
    ctx: KernelContext, tile: WorkTile, name: str, slot: Index, source: tuple[GmemRef, Index, Index]
) -> None:
    """Issues loads of the rows of a kv tile, of the work tile's kv head: `source` is an array, its
    batch row and the first row.
    """
    (ref, batch, first), plan, to = source, ctx.plan, getattr(ctx.smem, name)
    head = lax.div(tile.head, jnp.int32(plan.problem.group))
    load = functools.partial(panels.load, ref, panels=to, barrier=ctx.smem.ready.at[slot])
    block, rows = plan.config.block_kv, plan.value_rows
    if name == "k" or block == rows:
        return load(where=(batch, pl.ds(first, block), head), at=slot)
    load(where=(batch, pl.ds(first, block), head), at=(slot, pl.ds(0, block)))
    # Past the end of an array TMA reads zeros.
    end = ref.shape[1] + 0 * head
    return load(
        where=(batch, pl.ds(end, rows - block), head), at=(slot, pl.ds(block, rows - block))
    )
