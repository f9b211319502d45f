"""Rows of one layer of a quantised cache in the dtype of the queries: what `widened_sm90` lets
`sm90` read. A number is converted to float32, which is exact, multiplied by its row's scale and
rounded.

Rows past a length are neither read nor written. Which pages of a pool nobody reads is not looked
up: all of its rows are widened.

A slab is the rows of a kv head of a sequence, or all rows of a pool. `Plan.share` blocks share out
its chunks of `Plan.rows` rows. A thread reads 8 numbers of a row at a time, all that it has of K
and V of a chunk before it converts the first, and writes them as one word of 16 bytes, so that both
are coalesced. To read words of 16 bytes, cache hints and other chunks were not faster on an H200.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import gpu_specs
from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn.kernels.attention import cache_layout
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.mosaic import THREADS, ThreadContext

LEAST_ROWS = 16  # of a chunk
NUMBERS = 8  # of a word
BLOCKS = 512 * gpu_specs.multiprocessors(
    gpu_specs.HOPPER
)  # about so many share out all slabs, at most


@dataclasses.dataclass(frozen=True)
class Plan:
    """What follows from a problem: slabs, and which blocks have what of them."""

    problem: DecodeProblem

    @functools.cached_property
    def layout(self) -> cache_layout.Layout:
        """Of the cache; a pool of pages is one slab."""
        problem = self.problem
        if problem.page_size is None:
            return cache_layout.layout_of(problem)
        rows = (problem.pages or 0) * problem.kv_heads * problem.page_size
        return cache_layout.Stacked((rows,), 1, problem.layers, 1, rows)

    @property
    def slabs(self) -> int:
        return len(self.layout.capacities) * self.layout.kv_heads

    @property
    def rows(self) -> int:
        """Of a chunk: few, whose words of K and of V all threads share out evenly."""
        return max(LEAST_ROWS, THREADS // math.gcd(THREADS, self.words(0), self.words(1)))

    @property
    def share(self) -> int:
        """Blocks of a slab."""
        chunks = pl.cdiv(max(self.layout.capacities), self.rows)
        return min(pl.cdiv(BLOCKS, self.slabs), chunks)

    def words(self, side: int) -> int:
        """Of a row of K (side 0) or V (1)."""
        return (self.problem.head_dim, self.problem.v_head_dim)[side] // NUMBERS


class Refs(NamedTuple):
    """Global memory."""

    given: tuple[tuple[Any, ...], ...]  # `Layout.tables`: K, V and their scales
    lengths: Any  # int32[M], but of a pool
    capacities: Any  # int32[M], where they differ
    layer: Any  # int32[1]: one that the cache has
    widened: tuple[tuple[Any, ...], ...] = ()  # written: K and V


class _Chunk(NamedTuple):
    """Which rows a block widens next: scalars."""

    sequence: Any
    head: Any
    first: Any
    live: Any  # rows of the slab that exist, some of them in this chunk
    layer: Any
    capacity: Any


def _widen(ctx: ThreadContext) -> None:
    thread, refs, at, plan = ctx
    layout, problem = plan.layout, plan.problem
    tables = [(*given, *to) for given, to in zip(refs.given, refs.widened, strict=True)]
    arrays = layout.arrays_of(thread, tables, at.sequence)
    numbers, scales, widened = arrays[:2], arrays[2:4], arrays[4:]
    loaded = []
    for side in range(2):
        words = plan.words(side)
        for start in range(0, plan.rows * words, THREADS):
            place = thread.index + start
            position, column = at.first + place // words, thread.wide(place % words)
            there = position < at.live
            position = thread.minimum(position, at.live - 1)
            row = cache_layout.Row(at.sequence, at.head, position, at.layer, None, at.capacity)
            line = layout.number(thread, row)
            to = layout.number(thread, row._replace(layer=None))
            word = thread.load(numbers[side], line * words + column, NUMBERS)
            scale = thread.as_float(thread.load(scales[side], line, 4))
            loaded.append((widened[side], to * words + column, word, scale, there))
    for ref, index, word, scale, there in loaded:
        values = [
            thread.times(x, scale) for x in thread.numbers(word, NUMBERS, problem.cache_dtype)
        ]
        thread.store(ref, index, thread.rounded(values, problem.dtype), 2 * NUMBERS, there)


def _kernel(refs: Refs, *widened: Any, plan: Plan) -> None:
    layout, block = plan.layout, lax.axis_index("block")
    refs = refs._replace(widened=tuple(zip(widened[::2], widened[1::2], strict=True)))
    slab, share = lax.div(block, jnp.int32(plan.share)), lax.rem(block, jnp.int32(plan.share))
    m, head = (f(slab, jnp.int32(layout.kv_heads)) for f in (lax.div, lax.rem))
    capacity = None if refs.capacities is None else refs.capacities[m]
    live: Any = layout.capacity if capacity is None else capacity
    if refs.lengths is not None:
        live = jnp.clip(refs.lengths[m], 0, live)
    live = jnp.int32(live)
    chunks = lax.div(live + (plan.rows - 1), jnp.int32(plan.rows))
    layer = None if refs.layer is None else refs.layer[0]

    def one(i, carry):
        first = (share + i * plan.share) * plan.rows
        chunk = _Chunk(m, head, first, live, layer, capacity)
        mosaic.each_thread(mosaic.in_context(_widen, plan), refs, chunk)
        return carry

    lax.fori_loop(0, lax.div(chunks - share + (plan.share - 1), jnp.int32(plan.share)), one, None)


def run(inputs: DecodeInputs, problem: DecodeProblem, layer: Any) -> tuple[Any, Any]:
    """K and V as the cache holds them, with a single layer if it has several: number `layer`."""
    plan = Plan(problem)
    layers = () if problem.layers is None else (1,)

    def of(array: Any) -> Any:
        return jax.ShapeDtypeStruct((*layers, *array.shape[len(layers) :]), problem.dtype)

    caches = inputs.k_cache, inputs.v_cache, inputs.k_scale, inputs.v_scale
    given = cache_layout.layout_of(problem).tables(*caches)
    refs = Refs(
        given=given,
        lengths=inputs.lengths if problem.page_size is None else None,
        capacities=plan.layout.capacities_operand(),
        layer=None if layer is None else cache_layout.scalar_operand(layer),
    )
    kernel = mosaic.lane_kernel(
        functools.partial(_kernel, plan=plan),
        grid=plan.slabs * plan.share,
        name="prefill_widen",
        out_type=[of(x) for table in given for x in table[:2]],
    )
    found = kernel(refs)
    if isinstance(inputs.k_cache, tuple):
        return tuple(found[::2]), tuple(found[1::2])
    return found[0], found[1]
