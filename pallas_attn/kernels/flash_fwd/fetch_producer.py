"""The producer of `flash_fwd.sm90` where other GPUs have a part of K and V.

The first blocks begin by fetching (`fetch`); all then load as `producer` does, from k and v of this
GPU or from the arrays of fetched rows, and wait for rows that are not here yet. Whole kv tiles are
taken in the order in which they arrive where a work tile may take them in any
(`fetch.takes_any_order`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import claims, tile_scheduler
from pallas_attn.kernels.attention.tile_scheduler import QueryPlan, Turn
from pallas_attn.kernels.attention.tiles import KernelContext, WorkTile, kv_batch
from pallas_attn.kernels.flash_fwd import fetch, warpgroups
from pallas_attn.kernels.flash_fwd.fetch import CHUNK_BITS, CHUNKS, Sizes
from pallas_attn.kernels.flash_fwd.warpgroups import Entry
from pallas_attn.kernels.lang.panels import Ring
from pallas_attn.kernels.lang.types import Carry, Index, Predicate

KvRange = tuple[Index, Index]


def produce(ctx: KernelContext, block: Index) -> None:
    """`warpgroups.produce`; the first blocks fetch before."""
    fetching = ctx.refs.fetching
    start = functools.partial(fetch.fetch, ctx, fetching, block)
    pl.when(block < ctx.plan.config.fetchers)(start)
    device = fetching.device[0]
    if fetch.takes_any_order(ctx.plan):
        load = functools.partial(_load_as_they_arrive, device, chunk_order_of(ctx))
    else:
        load = functools.partial(_load_entries, device)
    warpgroups.produce(ctx, block, load)
    pl.when(block == 0)(functools.partial(fetch.wait_for_peers, ctx, fetching))


# ---- the place of the rows of a kv tile ----------------------------------------------------------


class Place(NamedTuple):
    """The place of the rows of a kv tile."""

    owner: Index  # the GPU that has them
    here: Predicate  # whether it is this one
    tile: Index  # which of the owner's kv tiles they are


def _place_of(ctx: KernelContext, device: Index, tile: Index) -> Place:
    tiles = _tiles_of_chunk(ctx)
    chunk = lax.div(tile, tiles)
    first = _first_place(ctx, device, chunk)
    return first._replace(tile=first.tile + tile - chunk * tiles)


def _first_place(ctx: KernelContext, device: Index, chunk: Index) -> Place:
    """The place of the first kv tile of a chunk."""
    owner, which = fetch.owner_in(Sizes.of(ctx.plan), chunk)
    return Place(owner, owner == device, which * _tiles_of_chunk(ctx))


def _tiles_of_chunk(ctx: KernelContext) -> Index:
    return jnp.int32(Sizes.of(ctx.plan).chunk // ctx.plan.config.block_kv)


def _load_from(
    places: dict[str, Place], ctx: KernelContext, tile: WorkTile, name: str, t: Index, slot: Index
) -> None:
    """`warpgroups.load_kv_tile` of rows that are here, or that were fetched."""
    del t
    ref, fetched, place = getattr(ctx.refs, name), getattr(ctx.refs.fetching, name), places[name]
    batch, row = kv_batch(ctx.plan.problem, tile.batch), place.tile * ctx.plan.config.block_kv
    there = place.owner * ref.shape[0] + batch
    copy = functools.partial(warpgroups.copy_rows, ctx, tile, name, slot)
    pl.when(place.here)(lambda: copy((ref, batch, row)))
    pl.when(jnp.logical_not(place.here))(lambda: copy((fetched, there, row)))


def _wait_for(ctx: KernelContext, tile: WorkTile, t: Index, where: Predicate) -> None:
    """Waits for a kv tile if `where` holds; before the ring has room: asking takes time."""
    batch = kv_batch(ctx.plan.problem, tile.batch)
    pl.when(where)(functools.partial(fetch.wait_for, ctx, ctx.refs.fetching, batch, t))


# ---- kv tiles from the last to the first ---------------------------------------------------------


def _load_entries(
    device: Index, ctx: KernelContext, turn: Turn, tile: WorkTile, kv_range: KvRange, count: Index
) -> tuple[Index, Any]:
    """`warpgroups.load_entries`."""
    (lo, hi), ring = kv_range, Ring.of(ctx)
    waits = jnp.logical_not(fetch.is_done(ctx, ctx.refs.fetching))

    def one_entry(e: Index, carry: Carry) -> Any:
        count, before, claim = carry
        t = hi - 1 - e
        place = _place_of(ctx, device, t)
        _wait_for(ctx, tile, t, waits & (e < hi - lo) & jnp.logical_not(place.here))
        load = functools.partial(_load_from, {"k": place, "v": before})
        last, slot = hi - lo, ring.acquire(count)
        warpgroups.load_entry(ctx, tile, Entry(e, last, t, t + 1), slot, load)
        return count + 1, place, claims.claim_next(turn, e, claim)

    start = count, _place_of(ctx, device, jnp.int32(0)), turn.claim
    entries = jnp.where(hi > lo, hi - lo + 1, 0)
    count, _, claim = lax.fori_loop(0, entries, one_entry, start)
    return count, claim


# ---- kv tiles in the order in which they arrive --------------------------------------------------


class ChunkOrder(NamedTuple):
    """`fetch.chunks_in_order`, in registers."""

    count: Index
    words: tuple[Index, Index]  # words of CHUNKS chunks each

    def at(self, number: Index) -> Index:
        word = jnp.where(number < CHUNKS, *self.words)
        bits = lax.rem(number, jnp.int32(CHUNKS)) * CHUNK_BITS
        return lax.shift_right_logical(word, bits) & (1 << CHUNK_BITS) - 1


def chunk_order_of(ctx: KernelContext) -> ChunkOrder:
    """`+ 0` drops the mesh-varying type, so that a loop's carry keeps its type."""
    count, *words = (ctx.refs.fetching.chunks[n] + jnp.int32(0) for n in range(3))
    return ChunkOrder(count, (words[0], words[1]))


class TileRange(NamedTuple):
    """Entries of a work tile one after the other, whose kv tiles follow each other, from the last
    to the first.
    """

    entry: Index  # the first
    count: Index
    tile: Index  # the kv tile of the first
    place: Place  # the place of that tile


class _Load(NamedTuple):
    """The arguments of one work tile's load."""

    ctx: KernelContext
    turn: Turn
    tile: WorkTile
    entries: Index  # with K: one fewer than there are
    waits: Predicate  # whether something may not be here yet


def _load_as_they_arrive(
    device: Index,
    order: ChunkOrder,
    ctx: KernelContext,
    turn: Turn,
    tile: WorkTile,
    kv_range: KvRange,
    count: Index,
) -> tuple[Index, Any]:
    """`warpgroups.load_entries`, whole kv tiles by chunks in `order`."""
    lo, hi = kv_range
    waits = jnp.logical_not(fetch.is_done(ctx, ctx.refs.fetching))
    load = _Load(ctx, turn, tile, hi - lo, waits)
    ends = lo, _whole_end(ctx.plan, tile, kv_range), hi
    start = count, _place_of(ctx, device, jnp.int32(0)), turn.claim
    each_range = functools.partial(_load_range, load)
    count, _, claim = in_order_of_arrival(ctx, (device, order), ends, each_range, start)
    return count, claim


def _load_range(load: _Load, tiles: TileRange, carry: Carry) -> Any:
    """The entries of a range. The first may have no V, or no K; the others have both, of the same
    GPU, and ask nothing else: what a producer does beside its copies delays them, and takes issue
    slots from the consumers.
    """
    ctx, turn, tile, entries, waits = load
    (count, before, claim), ring = carry, Ring.of(ctx)
    there, here = tiles.count > 0, tiles.place.here
    asks = waits & jnp.logical_not(here) & (tiles.entry < entries)

    @pl.when(there)
    def _() -> None:
        _wait_for(ctx, tile, tiles.tile, asks)
        slot = ring.acquire(count)
        entry = Entry(tiles.entry, entries, tiles.tile, tiles.tile + 1)
        source = functools.partial(_load_from, {"k": tiles.place, "v": before})
        warpgroups.load_entry(ctx, tile, entry, slot, source)

    def one_entry(i: Index, claim: Index) -> Any:
        t, number, owner = tiles.tile - i, tiles.place.tile - i, tiles.place.owner
        _wait_for(ctx, tile, t, asks & fetch.begins_tile(ctx, t))
        slot = ring.acquire(count + i)
        pl.when(here)(lambda: _load_both(ctx, tile, slot, number))
        pl.when(jnp.logical_not(here))(lambda: _load_both(ctx, tile, slot, number, owner))
        return claims.claim_next(turn, tiles.entry + i, claim)

    claim = claims.claim_next(turn, jnp.where(there, tiles.entry, -1), claim)
    claim = lax.fori_loop(1, tiles.count, one_entry, claim)
    last = tiles.place._replace(tile=tiles.place.tile - (tiles.count - 1))
    before = jax.tree.map(lambda new, old: jnp.where(there, new, old), last, before)
    return count + tiles.count, before, claim


def _load_both(
    ctx: KernelContext, tile: WorkTile, slot: Index, number: Index, owner: Index | None = None
) -> None:
    """An entry of K of a kv tile and V of the one behind it, both of the same GPU, where the first
    has that `number`. `owner`: the GPU, where it is another one.
    """
    block, batch, refs = ctx.plan.config.block_kv, kv_batch(ctx.plan.problem, tile.batch), ctx.refs
    if owner is not None:
        batch, refs = owner * refs.k.shape[0] + batch, refs.fetching
    for name, at in (("k", number), ("v", number + 1)):
        warpgroups.copy_rows(ctx, tile, name, slot, (getattr(refs, name), batch, at * block))


def _whole_end(plan: QueryPlan, tile: WorkTile, kv_range: KvRange) -> Index:
    """The end of the kv tiles which all of a block's rows see whole; where there are no segments
    and no mask is bounded on the left.
    """
    warpgroups = range(plan.config.warpgroups)
    spans = [tile_scheduler.span_of_rows(plan, tile, wg) for wg in warpgroups]
    whole = [jnp.where(span.hi > span.lo, span.full_hi, kv_range[1]) for span in spans]
    return jnp.clip(functools.reduce(jnp.minimum, whole), *kv_range)


def in_order_of_arrival(
    ctx: KernelContext,
    chunks: tuple[Index, ChunkOrder],
    ends: tuple[Index, Index, Index],
    one_range: Callable[[TileRange, Any], Any],
    carry: Carry,
) -> Any:
    """`one_range(range, carry)` for all entries of a work tile, by TileRanges. `chunks`: which GPU
    this is, and the order. `ends`: the first kv tile, the end of the whole ones, and the end of
    all. First those behind the whole ones, from the last on, then the whole ones by chunks, of each
    from its last on. The last entry, a range of its own, has no tile.
    """
    (lo, whole, hi), (device, order), tiles = ends, chunks, _tiles_of_chunk(ctx)
    last = lax.div(hi - 1, tiles)
    behind = jnp.where(hi > whole, last - lax.div(whole, tiles) + 1, 0)  # ranges, of a chunk each

    def body(number: Index, state: Carry) -> Any:
        entry, carry = state
        is_behind, is_last = number < behind, number == behind + order.count
        chunk = jnp.where(is_behind, last - number, order.at(number - behind))
        begin, place = chunk * tiles, _first_place(ctx, device, chunk)
        first = jnp.maximum(jnp.where(is_behind, whole, lo), begin)
        end = jnp.minimum(jnp.where(is_behind, hi, whole), begin + tiles)
        count = jnp.where(is_last, jnp.where(hi > lo, 1, 0), jnp.maximum(end - first, 0))
        place = place._replace(tile=place.tile + end - 1 - begin)
        return entry + count, one_range(TileRange(entry, count, end - 1, place), carry)

    return lax.fori_loop(0, behind + order.count + 1, body, (jnp.int32(0), carry))[-1]
