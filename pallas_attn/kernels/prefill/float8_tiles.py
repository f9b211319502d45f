"""A launch that makes what matmuls on float8 multiply of one layer of a quantised cache: K, and V
transposed with keys in the order of `wgmma_float8.ORDER`, both with one scale for each `KEYS` keys
of a kv head, the largest that a row among them has. Rows past a length are zeros.

A number times the ratio of both scales is rounded to float8 again; where scales are powers of 2
that changes nothing but what becomes subnormal. A row whose scale is NaN is NaN, and counts in no
scale.

A block has one such tile of keys. For V a thread reads 4 bytes of each of 32 rows (neighbouring
threads read neighbouring bytes) and writes 32 bytes, a whole sector, to each of 4 rows of V^T.
"""

import dataclasses
import enum
import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import DecodeInputs
from pallas_attn.kernels.attention import cache_layout
from pallas_attn.kernels.attention.cache_layout import Paged, Row
from pallas_attn.kernels.lang import thread_program, threads
from pallas_attn.kernels.lang.mosaic import THREADS
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.threads import FOUR, LANES, Float
from pallas_attn.kernels.lang.types import GmemRef, Index
from pallas_attn.kernels.mma.wgmma_float8 import ORDER, UNIT
from pallas_attn.kernels.prefill import slabs
from pallas_attn.kernels.prefill.slabs import CacheRefs

Array = jax.Array

KEYS = 128  # keys that share a scale
NUMBERS = 8  # numbers of K of a word
GROUP = 32  # keys of V of a thread
COLUMNS = 4  # columns of V of a thread: the bytes of a word
TOGETHER = 8  # rows that lie together in any layout: pages and capacities are multiples of it
LEAST_SCALE = 2.0**-64  # smaller scales of a tile count as this
FINITE = 3e38


class Units(enum.IntEnum):
    """The numbers of a tile of keys."""

    SCORE = 0  # K's scale
    VALUE = 1  # log2 of V's scale
    SUM = 2  # 1 / V's scale


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Sizes of K and V of a layer."""

    layout: cache_layout.Layout
    dtype: str
    dims: tuple[int, int]  # head dims of K and V

    @functools.cached_property
    def tiles(self) -> int:
        """Tiles of a kv head of a sequence, or blocks."""
        return pl.cdiv(max(self.layout.capacities), KEYS)

    @property
    def keys(self) -> int:
        return self.tiles * KEYS

    @property
    def heads(self) -> int:
        """Kv heads of all sequences."""
        return len(self.layout.capacities) * self.layout.kv_heads


class _Place(NamedTuple):
    """The tile of a block: scalars."""

    sequence: Index
    head: Index
    tile: Index
    live: Index  # rows of the sequence, at least one of them in the tile
    layer: Index | None
    capacity: Index | None  # rows of the sequence, where capacities differ


def _line(ctx: ThreadContext, position: Index, together: int) -> Index:
    """The number of the row at a position in its array; `together`: of so many rows from there on,
    the number of the first. Positions past the capacity, or of no page, give another row.
    """
    thread, refs, at, plan = ctx
    layout, page = plan.layout, None
    capacity: Index = layout.capacity if at.capacity is None else at.capacity
    position = thread.minimum(position, (at.tile * 0 + capacity) - together)
    if isinstance(layout, Paged):
        page = layout.load_page(thread, refs.page_table, at.sequence, layout.entry(position))
        page = thread.select(layout.has_page(page), page, 0)
    row = Row(at.sequence, at.head, position, at.layer, page, at.capacity)
    return layout.number(thread, row)


def _make(ctx: ThreadContext) -> None:
    """One tile."""
    thread, refs, at, plan = ctx
    k, v, *scales = plan.layout.arrays_of(thread, refs.tables, at.sequence)
    largest = [_largest(ctx, scale) for scale in scales]
    head = thread.to_int64(at.sequence * plan.layout.kv_heads + at.head)
    of_k, of_v = [thread.number(1.0) / x for x in largest]
    _convert_keys(ctx, (k, scales[0]), of_k, head)
    _convert_values(ctx, (v, scales[1]), of_v, head)
    numbers = [largest[0], thread.log2(largest[1]), of_v, of_v]
    place = head * plan.tiles + thread.to_int64(at.tile)
    thread.store_floats(refs.results[2], place, numbers, thread.index < 1)


def _largest(ctx: ThreadContext, scale: GmemRef) -> Float:
    """The scale of a tile: each lane of a warp looks at 4 rows."""
    thread, _, at, _ = ctx
    position = at.tile * KEYS + thread.index % LANES * FOUR
    numbers = thread.load_floats(scale, _line(ctx, position, FOUR) // FOUR, FOUR)
    top = thread.number(LEAST_SCALE)
    for n, x in enumerate(numbers):
        counts = (position + n < at.live) & (x <= FINITE)
        top = thread.highest(top, thread.choose(counts, x, thread.number(0.0)))
    return thread.warp_highest(top)


def _convert_keys(
    ctx: ThreadContext, arrays: tuple[GmemRef, GmemRef], inverse: Float, head: Index
) -> None:
    (thread, refs, at, plan), (numbers, scales) = ctx, arrays
    words, loaded = plan.dims[0] // NUMBERS, []
    for start in range(0, KEYS * words, THREADS):
        item = thread.index + start
        key, word = item // words, item % words
        line = _line(ctx, at.tile * KEYS + key, 1)
        number = thread.load(numbers, line * words + thread.to_int64(word), NUMBERS)
        loaded.append((key, word, number, thread.as_float(thread.load(scales, line, 4))))
    for key, word, number, scale in loaded:
        ratio, position = scale * inverse, at.tile * KEYS + key
        values = [x * ratio for x in thread.numbers(number, NUMBERS, plan.dtype)]
        narrow = thread.narrow(values, plan.dtype)
        narrow = thread.select(position < at.live, narrow, 0)
        row = head * plan.keys + thread.to_int64(position)
        place = row * words + thread.to_int64(word)
        thread.store(refs.results[0], place, narrow, NUMBERS, thread.index >= 0)


def _convert_values(
    ctx: ThreadContext, arrays: tuple[GmemRef, GmemRef], inverse: Float, head: Index
) -> None:
    thread, _, at, plan = ctx
    words = plan.dims[1] // COLUMNS
    for start in range(0, KEYS // GROUP * words, THREADS):
        item = thread.index + start
        group, word = item // words, item % words
        first = at.tile * KEYS + thread.minimum(group, KEYS // GROUP - 1) * GROUP
        columns = _columns(ctx, arrays, inverse, (first, word))
        _store_columns(ctx, columns, (head, word, first), group < KEYS // GROUP)


def _columns(
    ctx: ThreadContext,
    arrays: tuple[GmemRef, GmemRef],
    inverse: Float,
    place: tuple[Index, Index],
) -> list[list[Float]]:
    """A word of each of 32 rows as numbers, by row; `place`: the first row and the word."""
    (thread, _, at, plan), (numbers, scales), (first, word) = ctx, arrays, place
    words = plan.dims[1] // COLUMNS
    loaded: list[tuple[Index, Float]] = []
    for start in range(0, GROUP, TOGETHER):
        line = _line(ctx, first + start, TOGETHER)
        number = line * words + thread.to_int64(word)
        loads = [thread.load(numbers, number + n * words, COLUMNS) for n in range(TOGETHER)]
        ratios = [
            x * inverse
            for n in range(TOGETHER // FOUR)
            for x in thread.load_floats(scales, line // FOUR + n, FOUR)
        ]
        loaded += zip(loads, ratios, strict=True)
    rows = []
    for n, (number, ratio) in enumerate(loaded):
        live = first + n < at.live
        ratio = thread.choose(live, ratio, thread.number(0.0))
        number = thread.select(live, number, 0)
        rows.append([x * ratio for x in thread.numbers(number, COLUMNS, plan.dtype)])
    return rows


def _store_columns(
    ctx: ThreadContext, rows: list[list[Float]], at: tuple[Index, Index, Index], exists: Index
) -> None:
    """Four columns of V to four rows of V^T; `at`: kv head among all, word and first key."""
    (thread, refs, _, plan), (head, word, first) = ctx, at
    for n in range(COLUMNS):
        line = head * plan.dims[1] + thread.to_int64(word * COLUMNS + n)
        line = line * (plan.keys // UNIT) + thread.to_int64(first // UNIT)
        for unit in range(GROUP // UNIT):
            column = [rows[unit * UNIT + key][n] for key in ORDER.tolist()]
            pieces = [column[k : k + COLUMNS] for k in range(0, UNIT, COLUMNS)]
            parts = [thread.as_float(thread.narrow(piece, plan.dtype)) for piece in pieces]
            together = thread.rounded(parts, "float32")
            thread.store(refs.results[1], line + unit, together, UNIT, exists)


def _kernel(refs: CacheRefs, *results: GmemRef, plan: Tiles) -> None:
    layout, block = plan.layout, lax.axis_index("block")
    slab, tile = lax.div(block, jnp.int32(plan.tiles)), lax.rem(block, jnp.int32(plan.tiles))
    m, head, live, capacity = slabs.slab_of(layout, refs, slab)
    layer = None
    if layout.layers is not None:
        layer = jnp.clip(refs.layer[0], 0, layout.layers - 1)
    place = _Place(m, head, tile, live, layer, capacity)
    refs = refs._replace(results=results)

    @pl.when(tile * KEYS < live)
    def _():
        threads.run(_make, plan, refs, place)


def tiles_of(plan: Tiles, inputs: DecodeInputs) -> tuple[Array, Array, Array]:
    """K [M * K, keys, H], V^T [M * K, Hv, keys] and float32[M * K, tiles, 4], which begins with the
    `Units`. Tiles past a length are not written.
    """
    dtype, shape = plan.dtype, jax.ShapeDtypeStruct
    caches = inputs.k_cache, inputs.v_cache, inputs.k_scale, inputs.v_scale
    kernel = thread_program.lane_kernel(
        functools.partial(_kernel, plan=plan),
        grid=plan.heads * plan.tiles,
        name="prefill_float8_tiles",
        out_type=[
            shape((plan.heads, plan.keys, plan.dims[0]), dtype),
            shape((plan.heads, plan.dims[1], plan.keys), dtype),
            shape((plan.heads, plan.tiles, FOUR), jnp.float32),
        ],
    )
    refs = CacheRefs(
        plan.layout.tables(*caches),
        inputs.lengths,
        plan.layout.capacities_operand(),
        inputs.page_table,
        cache_layout.scalar_operand(inputs.layer),
    )
    k, v, units = kernel(refs)
    return k, v, units
