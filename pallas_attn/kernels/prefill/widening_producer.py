"""K and V of a quantised cache in q's dtype, widened on their way to the ring, from where the
mainloop reads them as those of any other cache.

A tile of K or of V comes by cp.async to a slot of 8-bit numbers and their scales. The tiles of a
unit are in one order, K of entry e before the V that goes with it, and each is asked for `slots`
tiles ahead. When it is there, `narrow_rows` widens it. Where there are two producers, one has K and
the other V.

A thread converts the 16 bytes that it asked for, so only scales are shared between threads: all
meet when a tile is there, and again before its slot is asked for anew, which is when they meet for
the next tile, or for the ring's entry. A tile that does not exist is not asked for: two copies to
one place would not be ordered. Rows past a length come as zeros with a scale of zero.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import DecodeInputs
from pallas_attn.kernels.attention.cache_layout import Paged, Row
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.decode import thread_copies
from pallas_attn.kernels.lang import threads
from pallas_attn.kernels.lang.mosaic import THREADS
from pallas_attn.kernels.lang.panels import Ring
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.threads import Word
from pallas_attn.kernels.lang.types import GmemRef, Index, SmemRef
from pallas_attn.kernels.mma import narrow_rows
from pallas_attn.kernels.prefill.plan import Plan, Producer, Unit

# Registers of a thread (consumer, producer), by the numbers of consumers and producers.
REGISTERS = {(1, 1): (240, 240), (2, 1): (208, 88), (3, 1): (144, 80), (1, 2): (240, 128)}
# Words of 16 bytes that a thread loads while it widens others, by the number of producers.
LOADS = {1: 4, 2: 2}


class Widening(NamedTuple):
    """The tuning, as in `narrow_sm90.Config`, and the dtype of the cache."""

    slots: int
    producers: int
    dtype: str


class Slots(NamedTuple):
    """Shared memory: tiles on their way."""

    numbers: SmemRef  # 8 bits, in the order of `narrow_rows.place`
    scales: SmemRef  # float32[slots, block_kv]


def producer_of(plan: Plan) -> Producer:
    slots, rows = plan.widening.slots, plan.config.block_kv
    buffers = Slots(
        plgpu.SMEM((slots, rows * _widest(plan)), jnp.dtype(plan.widening.dtype)),
        plgpu.SMEM((slots, rows), jnp.float32),
    )
    producers = plan.widening.producers
    sides = ((0, 1),) if producers == 1 else ((0,), (1,))
    programs = tuple(functools.partial(_produce, sides=own) for own in sides)
    registers = REGISTERS[plan.config.warpgroups, producers]
    return Producer(operands, programs, producers, registers, buffers)


def operands(plan: Plan, inputs: DecodeInputs) -> dict[str, Any]:
    caches = inputs.k_cache, inputs.v_cache, inputs.k_scale, inputs.v_scale
    return {"tables": plan.layout.tables(*caches)}


def _widest(plan: Plan) -> int:
    return max(plan.problem.head_dim, plan.problem.v_head_dim)


def _produce(ctx: KernelContext, block_id: Index, sides: tuple[int, ...]) -> None:
    """K (side 0) and V (1), or one of them, of every unit of the block, in the order in which
    consumers use them.
    """
    plan = ctx.plan
    ring, units = Ring.of(ctx), plan.queries.units_of(ctx, block_id)
    ahead = plan.widening.slots // 2
    asked = ahead * len(sides)  # tiles

    def one_unit(i, count):
        unit = plan.queries.unit_of(ctx, units, units.number(i))
        tiles = unit.span.hi - unit.span.lo
        entries = jnp.where(tiles > 0, tiles + 1, 0)

        def ask(e, side):
            _ask(ctx, unit, side, e - side, lax.rem(e, jnp.int32(ahead)) * 2 + side)

        def entry(e, count):
            slot = ring.acquire(count)
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
    threads.run(functools.partial(thread_copies.wait_and_meet, left=left), plan, (), ())


class _Tile(NamedTuple):
    """A tile that a slot is to hold: scalars."""

    sequence: Index
    head: Index
    first: Index  # position of its first row
    live: Index  # rows of it that exist; none where it is 0
    slot: Index
    layer: Index | None  # None: the cache has one layer
    capacity: Index | None  # rows of the sequence, where they differ


class _Memory(NamedTuple):
    """PrefillRefs that `_copy` reads, and those that it writes."""

    tables: tuple[tuple[GmemRef, ...], ...]
    page_table: GmemRef
    to: Slots


def _ask(ctx: KernelContext, unit: Unit, side: int, number: Index, slot: Index) -> None:
    """Asks for the tile of K or V that is `number` before the unit's last, if there is one. The
    copies are a group in any case, since groups are counted.
    """
    plan, refs, smem = ctx
    exists = (number >= 0) & (number < unit.span.hi - unit.span.lo)
    first = jnp.where(exists, (unit.span.hi - 1 - number) * plan.config.block_kv, 0)
    live = jnp.where(exists, unit.tile.kv_len - first, 0)
    layer = capacity = None
    if plan.layout.layers is not None:
        layer = jnp.clip(refs.layer[0], 0, plan.layout.layers - 1)
    if refs.capacities is not None:
        capacity = refs.capacities[unit.m]
    tile = _Tile(unit.m, unit.kv_head, first, live, slot, layer, capacity)
    memory = _Memory(refs.tables, refs.page_table, smem.producer)
    copy = functools.partial(_copy, side=side)
    pl.when(exists)(lambda: threads.run(copy, plan, memory, tile))
    threads.each_thread(lambda thread, *_: thread.commit_copies(), (), ())


def _copy(ctx: ThreadContext, side: int) -> None:
    thread, (tables, page_table, to), tile, plan = ctx
    layout = plan.layout
    dim, block = (plan.problem.head_dim, plan.problem.v_head_dim)[side], plan.config.block_kv
    words, slot_words = dim // 16, block * _widest(plan) // 16
    choices = tuple((arrays[side], arrays[2 + side]) for arrays in tables)
    numbers, scales = layout.arrays_of(thread, choices, tile.sequence)

    def line(row, below=0):
        """Row `row` of the tile, in the array, for a row `below` it; rows of a page lie apart."""
        position, page = tile.first + row, None
        if isinstance(layout, Paged):
            inside = row + below < tile.live
            position = tile.first + thread.select(inside, row + below, 0)
            page = layout.load_page(thread, page_table, tile.sequence, layout.entry(position))
            page = thread.select(layout.has_page(page), page, 0)  # any: the result will be NaN
        place = Row(tile.sequence, tile.head, position, tile.layer, page, tile.capacity)
        return layout.number(thread, place)

    for number, start, row, below, word in narrow_rows.pieces(thread.index, block, words):
        source = line(row, below) * words + thread.to_int64(word)
        source = Word(numbers, source, 0 if layout.paged else below * words)
        place = Word(to.numbers, tile.slot * slot_words + number, start)
        thread.copy_async(place, source, row + below < tile.live)
    row = thread.index
    inside = None if block >= THREADS else row < block
    row = thread.minimum(row, block - 1)
    place = Word(to.scales, tile.slot * block + row)
    thread.copy_async(place, Word(scales, line(row)), row < tile.live, inside, 4)


def _widen(ctx: KernelContext, side: int, slot: Index, entry: Index) -> None:
    """The tile in a slot, in an entry of the ring."""
    plan, _, smem = ctx
    to, swizzle = ((smem.k, plan.qk.swizzle), (smem.v, plan.v.swizzle))[side]
    numbers, scales = smem.producer
    loads = LOADS[plan.widening.producers]
    narrow_rows.widen(numbers, scales, slot, to, entry, swizzle, loads)
