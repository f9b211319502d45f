"""A launch that makes what matmuls on float8 need of a quantised cache beside K as it lies: V^T,
[M, K, Hv, keys], with keys in the order of `wgmma_float8.ORDER` and zeros past lengths; and three
float32 numbers a key, `Units`.

A thread reads 4 bytes of each of 32 rows (neighbouring threads read neighbouring bytes) and writes
32 bytes, whole sectors, to each of 4 rows of V^T. The threads that share 32 keys share out their
scales.
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
from pallas_attn.kernels.lang.types import GmemRef, Index
from pallas_attn.kernels.mma.wgmma_float8 import ORDER, UNIT

Array = jax.Array

KEYS = 32  # keys of a thread
COLUMNS = 4  # columns of v of a thread: the bytes of a word
PIECE = 8  # bytes of a store
TOGETHER = 8  # rows that lie together in any layout: pages and capacities are multiples of it
# V's scales count as at least this, so that no sum of their reciprocals overflows: values below
# 2**-55 may come out as large as that.
LEAST_SCALE = 2.0**-64


class Units(enum.IntEnum):
    """The numbers of a key."""

    SCORE = 0  # K's scale, which multiplies scores
    VALUE = 1  # log2 of V's scale, which is added to logits in log2 units
    SUM = 2  # 1 / V's scale, which takes it out of the sum of probabilities


@dataclasses.dataclass(frozen=True)
class Transposition:
    """Sizes, and the blocks that share out the rows of a kv head of a sequence."""

    layout: cache_layout.Layout
    v_head_dim: int
    keys: int  # capacity of V^T, in whole kv tiles
    block_kv: int

    @property
    def words(self) -> int:
        """Words of a row of V: the threads that share the same keys."""
        return self.v_head_dim // COLUMNS

    @property
    def share(self) -> int:
        """Blocks of a kv head of a sequence."""
        return pl.cdiv(self.keys // KEYS * self.words, THREADS)


class TransposeRefs(NamedTuple):
    """Global memory."""

    tables: tuple[tuple[GmemRef, ...], ...]  # `Layout.tables`: V, and the scales of K and V
    lengths: GmemRef  # int32[M]
    capacities: GmemRef  # int32[M], where they differ
    page_table: GmemRef
    layer: GmemRef  # int32[1]
    values: GmemRef = None  # written
    units: GmemRef = None  # written


class _Place(NamedTuple):
    """The rows of a block: scalars."""

    sequence: Index
    head: Index
    first: Index  # index of the block's first thread among those of the kv head
    live: Index  # rows of the sequence
    layer: Index | None
    capacity: Index | None  # where capacities differ


def _line(ctx: ThreadContext, position: Index, together: int) -> Index:
    """The number of the row at a position in its array; `together`: of so many rows from there on,
    the number of the first. Positions past the capacity, or of no page, give another row.
    """
    thread, refs, at, plan = ctx
    layout, page = plan.layout, None
    capacity: Index = layout.capacity if at.capacity is None else at.capacity
    position = thread.minimum(position, (at.first * 0 + capacity) - together)
    if isinstance(layout, Paged):
        page = layout.load_page(thread, refs.page_table, at.sequence, layout.entry(position))
        page = thread.select(layout.has_page(page), page, 0)
    row = Row(at.sequence, at.head, position, at.layer, page, at.capacity)
    return layout.number(thread, row)


def _transpose(ctx: ThreadContext) -> None:
    thread, refs, at, plan = ctx
    item = thread.index + at.first
    group, word = item // plan.words, item % plan.words
    first = group * KEYS
    tiles = (at.live + (plan.block_kv - 1)) // plan.block_kv
    exists = first < tiles * plan.block_kv
    v, *scales = plan.layout.arrays_of(thread, refs.tables, at.sequence)
    rows = []
    for start in range(0, KEYS, TOGETHER):
        line = _line(ctx, first + start, TOGETHER) * plan.words + thread.to_int64(word)
        for n in range(TOGETHER):
            number = thread.load(v, line + n * plan.words, COLUMNS)
            rows.append(thread.select(first + (start + n) < at.live, number, 0))
    head = at.sequence * plan.layout.kv_heads + at.head
    _store_columns(ctx, rows, (head, word, group), exists)
    for start in range(0, KEYS, plan.words):
        key = word + start
        _store_units(ctx, scales, (head, first + key), exists & (key < KEYS))


def _store_columns(
    ctx: ThreadContext, rows: list[Index], at: tuple[Index, Index, Index], exists: Index
) -> None:
    """Four columns of V to four rows of V^T; `at`: kv head among all, word and group of keys."""
    (thread, refs, _, plan), (head, word, group) = ctx, at
    begin = thread.to_int64(head) * (plan.v_head_dim * plan.keys // PIECE)
    for n in range(COLUMNS):
        line = begin + thread.to_int64(word * COLUMNS + n) * (plan.keys // PIECE)
        line = line + thread.to_int64(group * (KEYS // PIECE))
        for piece in range(KEYS // PIECE):
            unit, start = divmod(piece * PIECE, UNIT)
            taken = [rows[unit * UNIT + key] for key in ORDER[start : start + PIECE].tolist()]
            together = thread.packed([word >> (8 * n) for word in taken])
            thread.store(refs.values, line + piece, together, PIECE, exists)


def _store_units(
    ctx: ThreadContext, scales: list[GmemRef], at: tuple[Index, Index], exists: Index
) -> None:
    """The `Units` of a key, zeros past the length; `at`: kv head among all, and position."""
    (thread, refs, place, plan), (head, key) = ctx, at
    line, live = _line(ctx, key, 1), key < place.live
    of_k, of_v = [thread.as_float(thread.load(scale, line, 4)) for scale in scales]
    of_v = thread.highest(of_v, LEAST_SCALE)
    numbers = {
        Units.SCORE: of_k,
        Units.VALUE: thread.log2(of_v),
        Units.SUM: thread.number(1.0) / of_v,
    }
    begin = thread.to_int64(head) * (len(Units) * plan.keys) + thread.to_int64(key)
    for unit, number in numbers.items():
        bits = thread.select(live, thread.bits(number), 0)
        thread.store(refs.units, begin + unit * plan.keys, bits, 4, exists)


def _kernel(refs: TransposeRefs, values: GmemRef, units: GmemRef, *, plan: Transposition) -> None:
    layout, block = plan.layout, lax.axis_index("block")
    slab, share = lax.div(block, jnp.int32(plan.share)), lax.rem(block, jnp.int32(plan.share))
    m, head = (f(slab, jnp.int32(layout.kv_heads)) for f in (lax.div, lax.rem))
    capacity = None if refs.capacities is None else refs.capacities[m]
    live = jnp.clip(refs.lengths[m], 0, layout.capacity if capacity is None else capacity)
    layer = None
    if layout.layers is not None:
        layer = jnp.clip(refs.layer[0], 0, layout.layers - 1)
    place = _Place(m, head, share * THREADS, live, layer, capacity)
    program = thread_program.in_context(_transpose, plan)
    threads.each_thread(program, refs._replace(values=values, units=units), place)


def transposed(plan: Transposition, inputs: DecodeInputs) -> tuple[Array, Array]:
    """V^T [M * K, Hv, keys] and `Units` float32[M * K, 3, keys]. Kv tiles past a length are not
    written.
    """
    heads = len(plan.layout.capacities) * plan.layout.kv_heads
    tables = plan.layout.tables(inputs.v_cache, inputs.k_scale, inputs.v_scale)
    kernel = thread_program.lane_kernel(
        functools.partial(_kernel, plan=plan),
        grid=heads * plan.share,
        name="prefill_float8_values",
        out_type=[
            jax.ShapeDtypeStruct((heads, plan.v_head_dim, plan.keys), tables[0][0].dtype),
            jax.ShapeDtypeStruct((heads, len(Units), plan.keys), jnp.float32),
        ],
    )
    refs = TransposeRefs(
        tables,
        inputs.lengths,
        plan.layout.capacities_operand(),
        inputs.page_table,
        cache_layout.scalar_operand(inputs.layer),
    )
    values, units = kernel(refs)
    return values, units
