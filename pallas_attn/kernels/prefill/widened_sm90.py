"""Attention of many new rows to a quantised cache, for Hopper.

A first launch writes the rows of one layer in q's dtype, to a buffer that lives as long as the
call, and `prefill.sm90` reads that. It pays where there are enough queries
(`selection.widened_sm90`); where they are fewer, `narrow_sm90` widens rows in the kernel, once for
each q tile.

A number is converted to float32, which is exact, multiplied by its row's scale and rounded. Rows
past a length are neither read nor written; of a pool of pages all rows are widened. A slab is the
rows of a kv head of a sequence, or all rows of a pool; `Widening.share` blocks share out its chunks
of `Widening.rows` rows. A thread reads 8 numbers of a row at a time, all that it has of K and V of
a chunk before it converts the first, and writes them as one word of 16 bytes, so that both are
coalesced. Words of 16 bytes, cache hints and other chunks were not faster on an H200. Rows without
scales are widened by XLA.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import selection
from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import cache_layout
from pallas_attn.kernels.lang import mosaic, thread_program, threads
from pallas_attn.kernels.lang.mosaic import THREADS
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.types import GmemRef, Index
from pallas_attn.kernels.prefill import slabs, sm90
from pallas_attn.kernels.prefill.slabs import CacheRefs

Array = jax.Array

MOST_BYTES = 2**32  # bytes of the buffer
LEAST_ROWS = 16  # rows of a chunk
NUMBERS = 8  # numbers of a word
# About as many blocks share out all slabs, at most.
BLOCKS = 512 * mosaic.MULTIPROCESSORS


@dataclasses.dataclass(frozen=True)
class Config:
    """The tuning of the second launch."""

    prefill: sm90.Config = sm90.Config()

    @classmethod
    def default(cls, problem: DecodeProblem) -> "Config":
        return cls(sm90.Config.default(_widened(problem)))


def limit(problem: DecodeProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    other = "leave implementation=None"
    if (refused := sm90.limit(_widened(problem))) is not None:
        return refused
    size = selection.stored_rows(problem) * (problem.head_dim + problem.v_head_dim) * 2
    if size > MOST_BYTES:
        return Limit(f"rows in {problem.dtype} would take {size / 2**30:.1f} GiB", other)
    return None


def slower(problem: DecodeProblem) -> Limit | None:
    """Why another kernel is faster, or None: where keys are split, it takes more query rows."""
    keys_are_split = Config.default(problem).prefill.splits > 1
    return selection.widened_sm90(problem, keys_are_split=keys_are_split)


def smem_bytes(problem: DecodeProblem, config: Config) -> int:
    return sm90.smem_bytes(_widened(problem), config.prefill)


@functools.partial(jax.jit, static_argnames=("problem", "config"))
def run(inputs: DecodeInputs, problem: DecodeProblem, config: Config) -> tuple[Array, Array]:
    """The results of `sm90.run`."""
    layer = index = None
    if problem.layers is not None:
        index = jnp.clip(inputs.layer, 0, problem.layers - 1)
        layer = jnp.where(inputs.layer == index, 0, -1)  # one that the cache lacks stays one
    if problem.unscaled:  # interleaved pages, which have no layers and no array of V
        k, v = inputs.k_cache.astype(problem.dtype), None
    else:
        k, v = widen(inputs, problem, index)
    widened = inputs._replace(k_cache=k, v_cache=v, k_scale=None, v_scale=None, layer=layer)
    return sm90.run(widened, _widened(problem), config.prefill)


def _widened(problem: DecodeProblem) -> DecodeProblem:
    layers = None if problem.layers is None else 1
    changes: dict[str, Any] = {"quantized": False, "unscaled": False, "layers": layers}
    return dataclasses.replace(problem, cache_dtype=problem.dtype, **changes)


# ---- the launch that widens ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Widening:
    """Slabs, and the blocks that widen them."""

    problem: DecodeProblem

    @functools.cached_property
    def layout(self) -> cache_layout.Layout:
        """The layout of the cache, in which a pool of pages is one slab."""
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
        """Rows of a chunk: few, whose words of K and of V all threads share out evenly."""
        return max(LEAST_ROWS, THREADS // math.gcd(THREADS, self.words(0), self.words(1)))

    @property
    def share(self) -> int:
        """Blocks of a slab."""
        chunks = pl.cdiv(max(self.layout.capacities), self.rows)
        return min(pl.cdiv(BLOCKS, self.slabs), chunks)

    def words(self, side: int) -> int:
        """Words of a row of K (side 0) or V (1)."""
        return (self.problem.head_dim, self.problem.v_head_dim)[side] // NUMBERS


class _Chunk(NamedTuple):
    """Rows that a block widens next: scalars."""

    sequence: Index
    head: Index
    first: Index
    live: Index  # rows of the slab that exist, some of them in this chunk
    layer: Index | None
    capacity: Index | None


def _widen(ctx: ThreadContext) -> None:
    thread, refs, at, plan = ctx
    layout, problem = plan.layout, plan.problem
    tables = [(*read, *written) for read, written in zip(refs.tables, refs.results, strict=True)]
    arrays = layout.arrays_of(thread, tables, at.sequence)
    numbers, scales, widened = arrays[:2], arrays[2:4], arrays[4:]
    loaded = []
    for side in range(2):
        words = plan.words(side)
        for start in range(0, plan.rows * words, THREADS):
            place = thread.index + start
            position, column = at.first + place // words, thread.to_int64(place % words)
            exists = position < at.live
            position = thread.minimum(position, at.live - 1)
            row = cache_layout.Row(at.sequence, at.head, position, at.layer, None, at.capacity)
            line = layout.number(thread, row)
            to = layout.number(thread, row._replace(layer=None))
            word = thread.load(numbers[side], line * words + column, NUMBERS)
            scale = thread.as_float(thread.load(scales[side], line, 4))
            loaded.append((widened[side], to * words + column, word, scale, exists))
    for ref, index, word, scale, exists in loaded:
        values = [x * scale for x in thread.numbers(word, NUMBERS, problem.cache_dtype)]
        thread.store(ref, index, thread.rounded(values, problem.dtype), 2 * NUMBERS, exists)


def _kernel(refs: CacheRefs, *widened: GmemRef, plan: Widening) -> None:
    block = lax.axis_index("block")
    refs = refs._replace(results=tuple(zip(widened[::2], widened[1::2], strict=True)))
    slab, share = lax.div(block, jnp.int32(plan.share)), lax.rem(block, jnp.int32(plan.share))
    m, head, live, capacity = slabs.slab_of(plan.layout, refs, slab)
    chunks = lax.div(live + (plan.rows - 1), jnp.int32(plan.rows))
    layer = None if refs.layer is None else refs.layer[0]

    def widen_chunk(i, carry):
        first = (share + i * plan.share) * plan.rows
        chunk = _Chunk(m, head, first, live, layer, capacity)
        threads.run(_widen, plan, refs, chunk)
        return carry

    count = lax.div(chunks - share + (plan.share - 1), jnp.int32(plan.share))
    lax.fori_loop(0, count, widen_chunk, None)


def widen(
    inputs: DecodeInputs, problem: DecodeProblem, layer: Array | None
) -> tuple[Array | tuple[Array, ...], Array | tuple[Array, ...]]:
    """K and V in the form in which the cache holds them, with a single layer if it has several:
    number `layer`.
    """
    plan = Widening(problem)
    layers = () if problem.layers is None else (1,)

    def widened(array: Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*layers, *array.shape[len(layers) :]), problem.dtype)

    caches = inputs.k_cache, inputs.v_cache, inputs.k_scale, inputs.v_scale
    tables = cache_layout.layout_of(problem).tables(*caches)
    refs = CacheRefs(
        tables=tables,
        lengths=inputs.lengths if problem.page_size is None else None,
        capacities=plan.layout.capacities_operand(),
        page_table=None,
        layer=None if layer is None else cache_layout.scalar_operand(layer),
    )
    kernel = thread_program.lane_kernel(
        functools.partial(_kernel, plan=plan),
        grid=plan.slabs * plan.share,
        name="prefill_widen",
        out_type=[widened(x) for table in tables for x in table[:2]],
    )
    arrays = kernel(refs)
    if isinstance(inputs.k_cache, tuple):
        return tuple(arrays[::2]), tuple(arrays[1::2])
    return arrays[0], arrays[1]


KERNEL = Kernel(Config, limit, smem_bytes, run, slower=slower)
