"""The producer of `flash_fwd.sm90`: one warpgroup, which loads K and V by TMA for all work tiles of
a block, into a ring of entries in shared memory.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention.plan import Context, kv_batch, kv_row
from pallas_attn.kernels.attention.score_mod import Tile
from pallas_attn.kernels.flash_fwd import claims, fetch, tile_scheduler
from pallas_attn.kernels.lang import mosaic


class Ring(NamedTuple):
    """The ring of K and V."""

    ready: Any  # barriers, one an entry: it is filled
    free: Any  # barriers, one an entry: all consumers have released it
    stages: int

    @classmethod
    def of(cls, ctx: Context) -> "Ring":
        return cls(ctx.smem.ready, ctx.smem.free, ctx.plan.config.stages)

    def wait(self, slot: Any) -> None:
        plgpu.barrier_wait(self.ready.at[slot])

    def release(self, slot: Any) -> None:
        plgpu.barrier_arrive(self.free.at[slot])

    def wait_released(self, slot: Any) -> None:
        plgpu.barrier_wait(self.free.at[slot])

    def acquire(self, count: Any) -> Any:
        """The slot of an entry before which `count` were loaded, when it is free."""
        slot = lax.rem(count, jnp.int32(self.stages))
        pl.when(count >= self.stages)(lambda: self.wait_released(slot))
        return slot

    def after(self, slot: Any) -> Any:
        return jnp.where(slot == self.stages - 1, 0, slot + 1)


def produce(ctx: Context, block_id: Any) -> None:
    """K and V of all work tiles of a block, in the order in which consumers use them."""
    plan, refs, _ = ctx
    fetched = None
    if plan.fetches:
        start = functools.partial(fetch.fetch, ctx, refs.fetching, block_id)
        pl.when(block_id < plan.config.fetchers)(start)
        fetched = _Fetched(refs.fetching.device[0], fetch.chunk_order_of(ctx))

    def ends_of(code):
        return tile_scheduler.record_ends(ctx, tile_scheduler.tile_of(ctx, code))

    def one_tile(i, carry):
        count, code, ends = carry
        following = refs.schedule[block_id, i + 2]
        tile = tile_scheduler.tile_of(ctx, code)
        if plan.is_listed:
            after = ends_of(following)  # read long before it is used
            return _produce_listed(ctx, tile, count, ends), following, after
        span = span_of(tile, ends)
        after = ends_of(following)  # read long before it is used
        return entries(tile, span, count)[0], following, after

    def span_of(tile, ends):
        record = None if ends is None else lambda i: ends.get(i, 0)
        return tile_scheduler.block_span(plan, record, tile)

    def entries(tile, span, count, claim=None, claimed=None):
        """Loads the entries of a work tile, `count` having been loaded before: the new count, and
        what `claim()` returned, if it is given; it is called when two entries are on their way.
        `claimed`: anything of its type.
        """

        def claimed_at(e, claimed):
            return claimed if claim is None else lax.cond(e == 1, claim, lambda: claimed)

        if fetched is not None and fetched.chunks is not None:
            return _produce_as_they_arrive(ctx, fetched, tile, span, (count, claimed_at, claimed))
        (lo, hi), ring = span, Ring.of(ctx)
        waits = fetched and jnp.logical_not(fetch.is_done(ctx, refs.fetching))

        def one_entry(e, carry):
            count, before, claimed = carry
            t, place = hi - 1 - e, None
            if fetched is not None:
                place = fetch.place_of(ctx, fetched.device, t)
                where = waits & (e < hi - lo) & jnp.logical_not(place.here)
                _wait_for(ctx, tile, t, where)
            entry = _Entry(e, hi - lo, t, ring.acquire(count))
            _load_entry(ctx, tile, entry, (place, before))
            return count + 1, place, claimed_at(e, claimed)

        nowhere = fetched and fetch.place_of(ctx, fetched.device, jnp.int32(0))
        start = count, nowhere, claimed
        found = lax.fori_loop(0, jnp.where(hi > lo, hi - lo + 1, 0), one_entry, start)
        return found[0], found[2]

    if plan.claims:
        claims.produce(ctx, block_id, (ends_of, span_of, entries))
    else:
        first = refs.schedule[block_id, 1]
        carry = jnp.int32(0), first, ends_of(first)
        lax.fori_loop(0, refs.schedule[block_id, 0], one_tile, carry)
    if plan.fetches:
        pl.when(block_id == 0)(functools.partial(fetch.wait_for_peers, ctx, refs.fetching))


class _Fetched(NamedTuple):
    """K and V of which a part is fetched."""

    device: Any
    chunks: fetch.ChunkOrder | None  # None: kv tiles are taken from the last to the first


def _wait_for(ctx: Context, tile: Tile, t: Any, where: Any) -> None:
    """For a kv tile, if `where` holds; before the ring has room, since it takes time to ask."""
    batch = kv_batch(ctx.plan.problem, tile.batch)
    pl.when(where)(functools.partial(fetch.wait_for, ctx, ctx.refs.fetching, batch, t))


def _produce_as_they_arrive(
    ctx: Context, fetched: _Fetched, tile: Tile, span: tuple[Any, Any], carry: tuple[Any, Any, Any]
) -> tuple[Any, Any]:
    """The entries of a work tile by `fetch.in_order_of_arrival`. Of a range the first may have no
    V, or no K; the others have both, of the same GPU, and ask nothing else: what a producer does
    beside its copies delays them, and takes issue slots from the consumers.
    """
    (lo, hi), ring = span, Ring.of(ctx)
    count, claimed_at, claimed = carry
    assert fetched.chunks is not None
    waits = jnp.logical_not(fetch.is_done(ctx, ctx.refs.fetching))

    def one_range(some, carry):
        count, before, claimed = carry
        there, here = some.count > 0, some.place.here
        asks = waits & jnp.logical_not(here) & (some.entry < hi - lo)

        @pl.when(there)
        def _():
            _wait_for(ctx, tile, some.tile, asks)
            entry = _Entry(some.entry, hi - lo, some.tile, ring.acquire(count))
            _load_entry(ctx, tile, entry, (some.place, before))

        def one_entry(i, claimed):
            t, number, owner = some.tile - i, some.place.tile - i, some.place.owner
            _wait_for(ctx, tile, t, asks & fetch.begins_tile(ctx, t))
            slot = ring.acquire(count + i)
            pl.when(here)(lambda: _load_both(ctx, tile, slot, number))
            pl.when(jnp.logical_not(here))(lambda: _load_both(ctx, tile, slot, number, owner))
            return claimed_at(some.entry + i, claimed)

        claimed = claimed_at(jnp.where(there, some.entry, -1), claimed)
        claimed = lax.fori_loop(1, some.count, one_entry, claimed)
        last = some.place._replace(tile=some.place.tile - (some.count - 1))
        before = jax.tree.map(lambda new, old: jnp.where(there, new, old), last, before)
        return count + some.count, before, claimed

    ends = lo, tile_scheduler.block_whole(ctx.plan, tile, span), hi
    given = fetched.device, fetched.chunks
    start = count, fetch.place_of(ctx, fetched.device, jnp.int32(0)), claimed
    count, _, claimed = fetch.in_order_of_arrival(ctx, given, ends, one_range, start)
    return count, claimed


def _produce_listed(ctx: Context, tile: Tile, count: Any, ends: tuple[Any, Any]) -> Any:
    """The kv tiles of a work tile, of a list of them, each of which is read an entry ahead. `ends`:
    how many there are, and the last.
    """
    ring, (hi, last) = Ring.of(ctx), ends
    listed = tile_scheduler.listed(ctx, tile, (hi, last))

    def one_entry(e, carry):
        count, before, t = carry
        following = listed.tile(hi - 2 - e)
        _load_entry(ctx, tile, _Entry(e, hi, t, ring.acquire(count), before))
        return count + 1, t, following

    start = (count, jnp.int32(0), last)
    return lax.fori_loop(0, hi + 1, one_entry, start)[0]


class _Entry(NamedTuple):
    """An entry of the ring, of a work tile: K of kv tile t and V of the tile before it, which is
    t + 1 where tiles are not listed.
    """

    number: Any  # the first entry has no V
    last: Any  # the number of the last, which has no K
    t: Any
    slot: Any
    before: Any = None  # the tile before it, in a list


def _load_entry(ctx: Context, tile: Tile, entry: _Entry, places: Any = (None, None)) -> None:
    """`places`: where the rows of K are, and those of V, if they may be fetched ones."""
    plan, refs, smem = ctx
    e, last, t, slot, before = entry
    before = t + 1 if before is None else before
    block, ready = plan.config.block_kv, smem.ready.at[slot]
    batch = kv_batch(plan.problem, tile.batch)

    def copy(ref, first, to, batch=batch):
        _copy(ctx, tile, (ref, batch, first), to, ready)

    def copy_at(name, position, place, to):
        """Of k or v, from a position on, which `place` says where it is given."""
        ref = getattr(refs, name)
        if place is None:
            return copy(ref, kv_row(plan.problem, plan.config.block_kv, position), to)
        fetched = getattr(refs.fetching, name)
        there, row = place.owner * ref.shape[0] + batch, place.tile * block
        pl.when(place.here)(lambda: copy(ref, row, to))
        return pl.when(jnp.logical_not(place.here))(lambda: copy(fetched, row, to, there))

    def values():
        if not plan.has("kv_lengths"):
            return copy_at("v", before * block, places[1], smem.v.at[slot])
        cut = (before + 1) * block > tile.kv_len  # only the last tile may be
        pl.when(cut)(lambda: copy(refs.v_edge, 0, smem.v.at[slot]))
        whole = functools.partial(copy, refs.v, before * block, smem.v.at[slot])
        return pl.when(jnp.logical_not(cut))(whole)

    nothing = functools.partial(plgpu.barrier_arrive, ready)

    @pl.when(e < last)
    def _():
        copy_at("k", t * block, places[0], smem.k.at[slot])
        if smem.kv_ids is not None:
            ids = refs.kv_segment_ids.at[tile.batch, pl.ds(t * block, smem.kv_ids.shape[1])]
            plgpu.copy_gmem_to_smem(ids, smem.kv_ids.at[slot], ready)

    @pl.when(e == last)
    def _():
        nothing()
        if smem.kv_ids is not None:
            nothing()

    pl.when(e > 0)(values)
    pl.when(e == 0)(nothing)


def _load_both(ctx: Context, tile: Tile, slot: Any, number: Any, owner: Any = None) -> None:
    """An entry of K of a kv tile and V of the one behind it, both of the same GPU; `number`: which
    of its kv tiles. `owner`: the GPU, where it is another one.
    """
    plan, refs, smem = ctx
    block, batch = plan.config.block_kv, kv_batch(plan.problem, tile.batch)
    if owner is not None:
        batch, refs = owner * refs.k.shape[0] + batch, refs.fetching
    for ref, ring, at in ((refs.k, smem.k, number), (refs.v, smem.v, number + 1)):
        _copy(ctx, tile, (ref, batch, at * block), ring.at[slot], smem.ready.at[slot])


def _copy(ctx: Context, tile: Tile, source: tuple[Any, Any, Any], to: Any, ready: Any) -> None:
    """Of the work tile's kv head, rows of a kv tile. `source`: k or v, the batch row and the first
    row.
    """
    (ref, batch, first), problem = source, ctx.plan.problem
    head = lax.div(tile.head, jnp.int32(problem.group))
    columns = mosaic.columns(ref, 0, to.shape[-1], head)
    rows = ref.at[batch, pl.ds(first, ctx.plan.config.block_kv), head, columns]
    plgpu.copy_gmem_to_smem(rows, to, ready)
