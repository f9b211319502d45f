"""The producer of prefill's kernel over a quantised cache: it fills the ring of K and V with rows
in q's dtype, which the mainloop then reads as those of any other cache.

A tile of K or of V comes by cp.async to a slot of 8-bit numbers and their scales. The tiles of a
unit are in one order, K of entry e before the V that goes with it, and each is asked for `slots`
tiles ahead. When it is there, `narrow_rows` widens it. Where there are two producers, one has K and
the other V.

A thread converts the 16 bytes that it asked for, so only scales are shared between threads: all
meet when a tile is there, and again before its slot is asked for anew, which is when they meet for
the next tile, or for the ring's entry. Of a tile that does not exist nothing is asked for: two
copies to one place would not be ordered. Rows past a length come as zeros with a scale of zero.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import cache_layout
from pallas_attn.kernels.attention.plan import Context
from pallas_attn.kernels.decode import producer
from pallas_attn.kernels.flash_fwd.producer import Ring
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.mosaic import THREADS, ThreadContext
from pallas_attn.kernels.lang.threads import Word
from pallas_attn.kernels.mma import narrow_rows
from pallas_attn.kernels.prefill import tile_count
from pallas_attn.kernels.prefill.plan import Plan
from pallas_attn.kernels.prefill.units import Unit, unit_of

# As those of `sm90`, by consumers and producers.
REGISTERS = {
    **{(1, 1): (240, 240), (2, 1): (208, 88), (3, 1): (144, 80)},
    **{(1, 2): (240, 128), (2, 2): (184, 72)},
}


class Slots(NamedTuple):
    """Shared memory: tiles on their way."""

    numbers: Any  # 8 bits, in the order of `narrow_rows.place`
    scales: Any  # float32[slots, block_kv]


def slots(plan: Plan) -> Slots:
    assert plan.cache is not None
    count, rows = plan.config.slots, plan.config.block_kv
    return Slots(
        plgpu.SMEM((count, rows * _widest(plan)), jnp.dtype(plan.cache.cache_dtype)),
        plgpu.SMEM((count, rows), jnp.float32),
    )


def _widest(plan: Plan) -> int:
    return max(plan.problem.head_dim, plan.problem.v_head_dim)


class Tile(NamedTuple):
    """What a slot is to hold: scalars."""

    sequence: Any
    head: Any
    first: Any  # position of its first row
    live: Any  # rows of it that exist; none where it is 0
    slot: Any
    layer: Any  # None: the cache has one layer
    capacity: Any  # of the sequence, where capacities differ


class _Memory(NamedTuple):
    """What `_copy` reads, and what it writes."""

    tables: Any  # `memory.Refs.tables`
    page_table: Any
    to: Slots


def programs(ctx: Context, block_id: Any) -> list[Callable[[], None]]:
    """What each of the producers does."""
    sides = ((0, 1),) if ctx.plan.producers == 1 else ((0,), (1,))
    return [functools.partial(produce, ctx, block_id, some) for some in sides]


def produce(ctx: Context, block_id: Any, sides: tuple[int, ...]) -> None:
    """K (side 0) and V (1), or one of them, of every unit of the block, in the order in which
    consumers use them.
    """
    plan = ctx.plan
    config, ring, units = plan.config, Ring.of(ctx), tile_count.units_of(ctx, block_id)
    ahead = config.slots // 2
    asked = ahead * len(sides)  # tiles

    def one_unit(i, count):
        unit = unit_of(ctx, units.number(i), units.share)
        tiles = unit.span.hi - unit.span.lo
        entries = jnp.where(tiles > 0, tiles + 1, 0)

        def ask(e, side):
            _ask(ctx, unit, side, e - side, lax.rem(e, jnp.int32(ahead)) * 2 + side)

        def entry(e, count):
            slot = lax.rem(count, jnp.int32(config.stages))
            pl.when(count >= config.stages)(lambda: ring.wait_released(slot))
            for n, side in enumerate(sides):
                _wait(plan, asked - 1 - n)
                if n > 0:
                    ask(e + ahead, sides[n - 1])
                narrow = lax.rem(e, jnp.int32(ahead)) * 2 + side

                @pl.when((e < tiles, e > 0)[side])
                def _(side=side, narrow=narrow):
                    _widen(ctx, side, narrow, slot)

            plgpu.commit_smem()
            plgpu.barrier_arrive(ring.ready.at[slot])
            ask(e + ahead, sides[-1])
            return count + 1

        @pl.when(tiles > 0)
        def _():
            for e, side in itertools.product(range(ahead), sides):
                ask(jnp.int32(e), side)

        return lax.fori_loop(0, entries, entry, count)

    lax.fori_loop(0, units.count, one_unit, jnp.int32(0))


def _wait(plan: Plan, left: int) -> None:
    """Until all tiles but the last `left` that were asked for are there."""
    threads.each_thread(mosaic.in_context(producer.meet, plan, left=left), (), ())


def _ask(ctx: Context, unit: Unit, side: int, number: Any, slot: Any) -> None:
    """Asks for the tile of K or V that is `number` before the unit's last, if there is one. The
    copies are a group in any case, since groups are counted.
    """
    plan, refs, smem = ctx
    assert plan.cache is not None
    there = (number >= 0) & (number < unit.span.hi - unit.span.lo)
    first = jnp.where(there, (unit.span.hi - 1 - number) * plan.config.block_kv, 0)
    live = jnp.where(there, unit.tile.kv_len - first, 0)
    layer = capacity = None
    if plan.cache.layers is not None:
        layer = jnp.clip(refs.layer[0], 0, plan.cache.layers - 1)
    if refs.capacities is not None:
        capacity = refs.capacities[unit.m]
    at = Tile(unit.m, unit.kv_head, first, live, slot, layer, capacity)
    memory = _Memory(refs.tables, refs.page_table, smem.narrow)
    copy, each_thread = mosaic.in_context(_copy, plan, side=side), threads.each_thread
    pl.when(there)(lambda: each_thread(copy, memory, at))
    each_thread(lambda thread, *_: thread.commit_copies(), (), ())


def _copy(ctx: ThreadContext, side: int) -> None:
    thread, (tables, page_table, to), at, plan = ctx
    layout = plan.layout
    dim, block = (plan.problem.head_dim, plan.problem.v_head_dim)[side], plan.config.block_kv
    words, slot_words = dim // 16, block * _widest(plan) // 16
    choices = tuple((arrays[side], arrays[2 + side]) for arrays in tables)
    numbers, scales = layout.arrays_of(thread, choices, at.sequence)

    def line(row, below=0):
        """Row `row` of the tile, in the array, for a row `below` it; rows of a page lie apart."""
        position, page = at.first + row, None
        if isinstance(layout, cache_layout.Paged):
            inside = row + below < at.live
            position = at.first + thread.select(inside, row + below, 0)
            page = layout.load_page(thread, page_table, at.sequence, layout.entry(position))
            page = thread.select(layout.has_page(page), page, 0)  # any: the result will be NaN
        given = (position, at.layer, page, at.capacity)
        return layout.number(thread, cache_layout.Row(at.sequence, at.head, *given))

    for number, start, row, below, word in narrow_rows.pieces(thread.index, block, words):
        source = line(row, below) * words + thread.wide(word)
        source = Word(numbers, source, 0 if layout.paged else below * words)
        place = Word(to.numbers, at.slot * slot_words + number, start)
        thread.copy_async(place, source, row + below < at.live)
    row = thread.index
    inside = None if block >= THREADS else row < block
    row = thread.minimum(row, block - 1)
    place = Word(to.scales, at.slot * block + row)
    thread.copy_async(place, Word(scales, line(row)), row < at.live, inside, 4)


def _widen(ctx: Context, side: int, slot: Any, entry: Any) -> None:
    """The tile in a slot, in an entry of the ring."""
    plan, _, smem = ctx
    to, swizzle = ((smem.k, plan.k_swizzle), (smem.v, plan.v_swizzle))[side]
    numbers, scales = smem.narrow
    narrow_rows.widen(numbers, scales, slot, to, entry, swizzle, plan.config.loads)
