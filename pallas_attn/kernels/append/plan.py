"""Which caches a launch takes; and where the rows of an append go: what is static of a launch, and
the arithmetic from a row to its place in a cache.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import gpu_specs
from pallas_attn._call.problem import QUANTIZED, AppendProblem, Change, KeepProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import cache_layout
from pallas_attn.kernels.attention.cache_layout import Row
from pallas_attn.kernels.attention.plan import Context
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.mosaic import ThreadContext

Array = Any
Ref = Any
Scalar = Any  # int32, of the whole block

IN_FLIGHT_MOST = 16  # words that a thread may hold
DTYPES = ("float32", "bfloat16", "float16", *QUANTIZED)  # of caches
CHUNK_MOST = IN_FLIGHT_MOST * mosaic.THREADS  # words of a chunk: the last may count so far too far


# ---- the caches of a launch ---------------------------------------------------------------------


def limit(problem: AppendProblem | KeepProblem) -> Limit | None:
    """Why no kernel here can take caches of this kind, or None."""
    if problem.cache_dtype not in DTYPES:
        return Limit(f"no {problem.cache_dtype} caches", f"use one of {', '.join(DTYPES)}")
    capacity = max(problem.capacities, default=0)
    if capacity >= 2**31:
        return Limit(
            f"capacity {capacity}: positions are int32",
            "split each sequence over several caches of fewer than 2**31 rows",
        )
    return None


def most_arrays(each: int) -> int:
    """Sequences with so many arrays each that a launch has parameters for."""
    return (mosaic.PARAMETER_BYTES // 8 - 8) // each  # 8: the new rows, lengths and the like


def by_launches(
    caches: dict[str, Any], problem: Any, launch: Callable[..., dict[str, tuple[Array, ...]]]
) -> dict[str, Any]:
    """The caches after `launch(caches, problem, of)`, which is called for as many sequences as a
    launch has parameters for: with the arrays of their caches in tuples, and with what takes their
    rows of an array [M, ..].
    """
    if not cache_layout.layout_of(problem).separate:
        one = {name: (cache,) for name, cache in caches.items()}
        done = launch(one, problem, lambda array: array)
        return {name: cache for name, (cache,) in done.items()}
    most = most_arrays(len(caches))
    live = [m for m, capacity in enumerate(problem.capacities) if capacity]
    written = {name: list(cache) for name, cache in caches.items()}
    for some in (live[lo : lo + most] for lo in range(0, len(live), most)):
        capacities = tuple(problem.capacities[m] for m in some)
        done = launch(
            {name: tuple(cache[m] for m in some) for name, cache in caches.items()},
            dataclasses.replace(problem, sequences=len(some), capacities=capacities),
            functools.partial(_rows_of, some),
        )
        for name, arrays in done.items():
            for m, array in zip(some, arrays, strict=True):
                written[name][m] = array
    return {name: tuple(arrays) for name, arrays in written.items()}


def _rows_of(sequences: list[int], array: Array) -> Array:
    """`array` itself where these are all of its sequences, as they mostly are."""
    if len(sequences) == array.shape[0]:
        return array
    return array[jnp.asarray(sequences)]


# ---- the rows of an append ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static in one launch."""

    layout: Any  # cache_layout.Layout
    sequences: int  # blocks are shared out over them; all packed rows count as one
    new_rows: int
    heads: int
    row_words: tuple[int, ...]  # words in a head's new row: of K, and of V
    word_bytes: tuple[int, ...]
    from_end: bool  # `start` is where the rows end
    lanes: int  # neighbouring threads that share a row, to compute; 0: words are moved
    in_flight: int  # words a thread, or rows where they are shared
    chunks: int  # a sequence
    new_dtype: str
    cache_dtype: str
    float8: bool  # whether this GPU converts to float8 by itself
    quantized: bool  # a scale lies beside each row
    packed: bool  # each row has a sequence and a position of its own
    change: Change | None  # of the rows of K: then rows are shared too

    @classmethod
    def of(cls, problem: AppendProblem, sides: tuple[str, ...], words: int) -> "Plan":
        """`words`: how many words (or rows, where they are quantised) a thread may hold of an
        array.
        """
        dims = {"k": problem.head_dim, "v": problem.v_head_dim or 0}
        new_dtype = problem.dtype if problem.quantized else problem.cache_dtype
        size = jnp.dtype(new_dtype).itemsize
        row_bytes = [dims[side] * size for side in sides]
        word_bytes = tuple(
            math.gcd(n, 16, *(columns * size for columns in _whole_words(side, problem.change)))
            for side, n in zip(sides, row_bytes, strict=True)
        )
        row_words = tuple(n // word for n, word in zip(row_bytes, word_bytes, strict=True))
        shared = problem.quantized or problem.change is not None
        lanes = lanes_of(max(row_words)) if shared else 0
        if shared:  # counted in rows from here on
            items, at_once = problem.new_rows * problem.kv_heads, mosaic.THREADS // lanes
            words = max(words // pl.cdiv(max(row_words), lanes), 1)
        else:
            items, at_once = problem.new_rows * problem.kv_heads * max(row_words), mosaic.THREADS
        in_flight = min(words, pl.cdiv(items, at_once))
        return cls(
            layout=cache_layout.layout_of(problem),
            sequences=1 if problem.packed else problem.sequences,
            new_rows=problem.new_rows,
            heads=problem.kv_heads,
            row_words=row_words,
            word_bytes=word_bytes,
            from_end=problem.from_end,
            lanes=lanes,
            in_flight=in_flight,
            chunks=pl.cdiv(items, at_once * in_flight),
            new_dtype=new_dtype,
            cache_dtype=problem.cache_dtype,
            float8=problem.gpu is None or gpu_specs.number(problem.gpu) >= 89,
            quantized=problem.quantized,
            packed=problem.packed,
            change=problem.change,
        )

    def total(self, array: int) -> int:
        """Words that one sequence brings."""
        return self.new_rows * self.heads * self.row_words[array]

    @property
    def chunk_items(self) -> int:
        """What a chunk holds: words, or rows of a head where threads share them."""
        return self.in_flight * mosaic.THREADS // (self.lanes or 1)

    @property
    def row_items(self) -> int:
        """What a new row has of them."""
        return self.heads * (1 if self.lanes else max(self.row_words))


def _whole_words(side: str, change: Change | None) -> tuple[int, ...]:
    """Numbers of columns that are whole words: those before the first that is rotated, and those
    of each half, or of all pairs.
    """
    if change is None or side == "v" or not change.pairs:
        return ()
    return change.first, (2 if change.interleaved else 1) * change.pairs


def lanes_of(row_words: int) -> int:
    """How many threads share a row of so many words: a power of two, of one warp."""
    return min(32, 2 ** (row_words - 1).bit_length())


class Refs(NamedTuple):
    new: tuple[Ref, ...]  # K, and V where there is one
    # A sequence each, or one for all: K and V, and the scales of K and of V where they have any.
    caches: tuple[tuple[Ref, ...], ...]
    start: Ref
    new_lengths: Ref | None
    capacities: Ref | None  # where they differ
    page_table: Ref | None
    layer: Ref | None
    owners: Ref | None = None  # where rows are packed
    cos: Ref | None = None  # what `Plan.change` reads
    sin: Ref | None = None
    norm_weight: Ref | None = None


class At(NamedTuple):
    """Where in the grid, and what the lengths say there. Block-wide int32 scalars."""

    sequence: Scalar
    chunk: Scalar
    start: Scalar | None  # None where rows are packed, and each has its own
    rows: Scalar  # of the new rows, how many have a place; packed: may have
    capacity: Scalar | None
    layer: Scalar | None


class Place(NamedTuple):
    """Where one thread's word goes, within the K or V array."""

    exists: Any
    row: Row  # of the cache
    column: Any


def block_at(ctx: Context) -> At:
    plan, refs, _ = ctx
    block = lax.axis_index("block")
    sequence = lax.div(block, jnp.int32(plan.chunks))
    layer = None if refs.layer is None else refs.layer[0]
    if plan.packed:
        rows = jnp.int32(plan.new_rows)
        rows = rows if layer is None else jnp.where(plan.layout.has_layer(layer), rows, 0)
        return At(sequence, block, None, rows, None, layer)
    start = given = refs.start[sequence]
    if plan.from_end:
        assert refs.new_lengths is not None
        start = given - refs.new_lengths[sequence]  # wraps only where `given` is negative
    capacity = None if refs.capacities is None else refs.capacities[sequence]
    # start + row could pass 2**31, this cannot.
    rows = (plan.layout.capacity if capacity is None else capacity) - start
    rows = jnp.minimum(rows, plan.new_rows)
    if refs.new_lengths is not None:
        rows = jnp.minimum(rows, refs.new_lengths[sequence])
    rows = jnp.where(start | given >= 0 if plan.from_end else start >= 0, rows, 0)
    if layer is not None:
        rows = jnp.where(plan.layout.has_layer(layer), rows, 0)
    return At(sequence, lax.rem(block, jnp.int32(plan.chunks)), start, rows, capacity, layer)


def read_all(ctx: ThreadContext, read: Callable[..., Any], items: list[Any]) -> list[list[Any]]:
    """`read(ctx, item, array)` of each item of a thread, a list an array: all loads are issued
    before anything else.
    """
    plan = ctx.plan
    if plan.layout.paged and plan.chunks == 1 and not plan.packed:
        _prefetch_page_table(ctx)
    found = [[read(ctx, item, array) for item in items] for array in range(len(ctx.refs.new))]
    if plan.layout.paged:
        ctx.thread.in_order()
    return found


def _prefetch_page_table(ctx: ThreadContext) -> None:
    """Prefetches the page table while the length is still being loaded: which entry is needed
    depends on the length, but the lines that may hold it do not.
    """
    thread, refs, at, plan = ctx
    # 8 entries a sector of 32 bytes
    entry = thread.minimum(thread.index * 8, plan.layout.entries - 1)
    thread.prefetch(refs.page_table, plan.layout.entry_index(thread, at.sequence, entry), 4)


def place(ctx: ThreadContext, word: Any, row_words: int) -> Place:
    """Of a word, of which a row of a head has so many."""
    thread, refs, at, plan = ctx
    row = word // (plan.heads * row_words)
    head, column = word // row_words % plan.heads, word % row_words
    exists = row < at.rows  # and so the word is one of this sequence's: at.rows <= new_rows
    sequence, capacity, page = at.sequence, at.capacity, None
    if plan.packed:
        sequence = packed_row(ctx, refs.owners, row)
        position = packed_row(ctx, refs.start, row)
        if plan.layout.capacity is None:
            capacity = thread.load(refs.capacities, sequence, 4)
        most = plan.layout.capacity if capacity is None else capacity
        exists = exists & (position >= 0) & (position < most)
    else:
        position = at.start + row
    if plan.layout.paged:
        position = thread.select(exists, position, 0)
        entry = plan.layout.entry(position)
        page = plan.layout.load_page(thread, refs.page_table, sequence, entry)
        exists = exists & plan.layout.has_page(page)
    return Place(exists, Row(sequence, head, position, at.layer, page, capacity), column)


def arrays_of(ctx: ThreadContext, words: list[Any]) -> dict[int, list[tuple[Ref, ...]]]:
    """The caches that each of a thread's words goes to, by the words that a head's row has; of rows
    that are shared (`Plan.lanes`), which are counted instead, by 1.
    """
    thread, refs, at, plan = ctx
    of = functools.partial(plan.layout.arrays_of, thread, refs.caches)
    sizes = (1,) if plan.lanes else plan.row_words
    if not plan.packed or len(refs.caches) == 1:
        return dict.fromkeys(sizes, [of(at.sequence)] * len(words))
    rows = {size: [word // (plan.heads * size) for word in words] for size in sizes}
    return {
        size: [of(packed_row(ctx, refs.owners, row)) for row in each] for size, each in rows.items()
    }


def packed_row(ctx: ThreadContext, ref: Ref, row: Any) -> Any:
    """What an array has of a packed row, or of the last where there are no more."""
    return ctx.thread.load(ref, ctx.thread.minimum(row, ctx.plan.new_rows - 1), 4)
