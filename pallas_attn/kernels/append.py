"""KV append: one launch writes the new rows of every sequence, K and V, into their caches, in
place.

New rows arrive item-major, `[M, t, K, H]`; a cache is head-major, `[K, capacity, H]`. Row i of
sequence m goes to position start[m] + i of every kv head, if i < new_lengths[m] and the position
exists; whatever has no place is dropped and nothing else is touched. There is no arithmetic on the
rows (a cast to the cache's dtype is left to XLA, which fuses it into whatever made the rows), so
the kernel moves words: the widest of 1 to 16 bytes that a head's row divides into, which is also
what it is aligned to. Any K and H will do, and any dtype.

The grid is flat: sequence x chunk, a chunk being `words` words for each of 128 threads, in the
order in which the new rows lie. A thread reads its words first (the read is always in bounds, so it
needs no length), then takes the base pointers of the sequence's own K and V by one jump, then
writes. A word is written by one thread or by none; threads never wait for each other; there is no
shared memory. The read, the lengths and the jump overlap, which is what a step of one token costs:
one trip to memory.

A launch takes 32764 bytes of parameters, 8 for a cache array: about 2040 sequences with arrays of
their own, K and V. More take as few launches as that allows. Stacked and paged caches always take
one.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_attn._problem import AppendInputs, AppendProblem, Caches
from pallas_attn.errors import Limit
from pallas_attn.kernels import tiles

Array = Any
Ref = Any
Scalar = Any  # int32, of the whole block

_CHUNK_MOST = 16 * tiles.THREADS  # words of a chunk: the last one may count so far past the end
DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class Config:
    """`words`: how many words of K, and as many of V, a thread keeps in flight; short appends use
    fewer. On an H200, 8 sequences of 2048 new rows: 1 word 34.0 us, 2 34.1, 4 35.5, 8 34.9; an
    elementwise pass over as many bytes takes 33.1.
    """

    words: int = 2

    def __post_init__(self):
        if not 1 <= self.words <= 16:
            raise ValueError(
                f"append.Config(words={self.words}): words wants 1 to 16: registers hold them."
            )


def limit(problem: AppendProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    if problem.gpu is None or int(problem.gpu.removeprefix("sm")) < 80:
        here = problem.gpu or "a machine without a GPU"
        return Limit(
            f"Mosaic GPU serves sm80 and later, this is {here}",
            'ask for implementation="reference"',
        )
    if problem.quantized:
        return Limit("quantised caches", 'pass implementation="reference"')
    if problem.cache_dtype not in DTYPES:
        return Limit(f"no {problem.cache_dtype} caches", f"use one of {', '.join(DTYPES)}")
    capacity = max(problem.capacities, default=0)
    if capacity >= 2**31:
        return Limit(
            f"capacity {capacity}: positions are int32",
            "split each sequence over several caches of fewer than 2**31 rows",
        )
    values = problem.new_rows * problem.kv_heads * max(problem.head_dim, problem.v_head_dim or 0)
    if values >= 2**31 - _CHUNK_MOST:
        return Limit(
            f"{values} new values of one sequence: they are counted in int32",
            "append them in several calls",
        )
    if _slabs(problem) * (problem.layers or 1) >= 2**31:
        return Limit(
            f"{_slabs(problem)} x {problem.layers or 1} layers: pages and sequences are int32",
            "use several caches",
        )
    return None


def smem_bytes(problem: AppendProblem, config: Config) -> int:
    """None: words pass through registers."""
    del problem, config
    return 0


def _slabs(problem: AppendProblem) -> int:
    """How many `[K, rows, H]` there are in one layer of one array."""
    slabs = {"per_sequence": 1, "stacked": problem.sequences, "paged": problem.pages or 0}
    return slabs[problem.kind]


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is static in one launch."""

    kind: str
    sequences: int
    new_rows: int
    heads: int
    row_words: tuple[int, ...]  # words in a head's row: of K, and of V
    word_bytes: tuple[int, ...]
    slab_rows: int | None  # of a head in a slab: capacity or page size. None: they differ
    capacity: int | None  # positions of a sequence. None: they differ
    slabs: int  # a layer: 1, or sequences, or pages
    layers: int
    table_width: int
    from_end: bool  # `start` is where the rows end
    in_flight: int  # words a thread
    chunks: int  # a sequence

    @classmethod
    def of(cls, problem: AppendProblem, sides: tuple[str, ...], config: Config) -> "_Plan":
        dims = {"k": problem.head_dim, "v": problem.v_head_dim or 0}
        row_bytes = [dims[side] * jnp.dtype(problem.cache_dtype).itemsize for side in sides]
        word_bytes = tuple(math.gcd(n, 16) for n in row_bytes)
        row_words = tuple(n // word for n, word in zip(row_bytes, word_bytes, strict=True))
        words = problem.new_rows * problem.kv_heads * max(row_words)
        in_flight = min(config.words, pl.cdiv(words, tiles.THREADS))
        capacity = problem.capacities[0] if len(set(problem.capacities)) == 1 else None
        page_size = problem.page_size or 0
        return cls(
            kind=problem.kind,
            sequences=problem.sequences,
            new_rows=problem.new_rows,
            heads=problem.kv_heads,
            row_words=row_words,
            word_bytes=word_bytes,
            slab_rows=page_size or capacity,
            capacity=capacity,
            slabs=_slabs(problem),
            layers=problem.layers or 1,
            table_width=problem.capacities[0] // page_size if page_size else 0,
            from_end=problem.from_end,
            in_flight=in_flight,
            chunks=pl.cdiv(words, tiles.THREADS * in_flight),
        )

    def total(self, array: int) -> int:
        """Words that one sequence brings."""
        return self.new_rows * self.heads * self.row_words[array]


class _Refs(NamedTuple):
    new: tuple[Ref, ...]  # K, and V where there is one
    caches: tuple[tuple[Ref, ...], ...]  # a sequence each, or one for all; K and V within
    start: Ref
    new_lengths: Ref | None
    capacities: Ref | None  # where they differ
    page_table: Ref | None
    layer: Ref | None


class _At(NamedTuple):
    """Where in the grid, and what the lengths say there. Block-wide int32 scalars."""

    sequence: Scalar
    chunk: Scalar
    start: Scalar
    rows: Scalar  # of the new rows, how many have a place
    capacity: Scalar | None
    layer: Scalar | None


class _Place(NamedTuple):
    """Where one thread's word goes, within the K or V array."""

    exists: Any
    slab: Any  # None: the only one
    row: Any
    head: Any
    column: Any


def _locate(refs: _Refs, plan: _Plan) -> _At:
    block = lax.axis_index("block")
    sequence = lax.div(block, jnp.int32(plan.chunks))
    start = refs.start[sequence]
    if plan.from_end:
        assert refs.new_lengths is not None
        start = start - refs.new_lengths[sequence]
    capacity = None if refs.capacities is None else refs.capacities[sequence]
    layer = None if refs.layer is None else refs.layer[0]
    # start + row could pass 2**31, this cannot.
    rows = (plan.capacity if capacity is None else capacity) - start
    rows = jnp.minimum(rows, plan.new_rows)
    if refs.new_lengths is not None:
        rows = jnp.minimum(rows, refs.new_lengths[sequence])
    rows = jnp.where(start >= 0, rows, 0)
    if layer is not None:
        rows = jnp.where((layer >= 0) & (layer < plan.layers), rows, 0)
    return _At(sequence, lax.rem(block, jnp.int32(plan.chunks)), start, rows, capacity, layer)


def _append(thread: tiles.Thread, refs: _Refs, at: _At, *, plan: _Plan) -> None:
    """What one thread does: read all its words, find out where they go, write them."""
    first = at.chunk * (plan.in_flight * tiles.THREADS) + thread.index
    words = [first + i * tiles.THREADS for i in range(plan.in_flight)]
    if plan.kind == "paged" and plan.chunks == 1:
        _expect_page(thread, refs, at, plan)
    arrays = range(len(refs.new))
    held = [[_read(thread, refs, at, word, plan, array) for word in words] for array in arrays]
    if plan.kind == "paged":
        thread.in_order()
    separate = len(refs.caches) > 1
    caches = thread.pick(at.sequence, refs.caches) if separate else refs.caches[0]
    # K and V mostly share the shape of a row, and so their places.
    places = {n: [_place(thread, refs, at, w, plan, n) for w in words] for n in plan.row_words}
    for array in arrays:
        there = places[plan.row_words[array]]
        for place, value in zip(there, held[array], strict=True):
            _write(thread, caches[array], at, place, value, plan, array)


def _expect_page(thread: tiles.Thread, refs: _Refs, at: _At, plan: _Plan) -> None:
    """Which entry of the table it is waits for the length; the lines it may be in need not.

    With the rows read first as well, 128 sequences take 1.18 us where they took 1.38.
    """
    entry = thread.minimum(thread.index * 8, plan.table_width - 1)  # 8 entries a sector of 32 bytes
    row = thread.wide(at.sequence) * plan.table_width
    thread.prefetch(refs.page_table, row + thread.wide(entry), 4)


def _read(thread: tiles.Thread, refs: _Refs, at: _At, word: Any, plan: _Plan, array: int) -> Any:
    total = plan.total(array)
    if total < plan.chunks * plan.in_flight * tiles.THREADS:
        word = thread.minimum(word, total - 1)
    index = thread.wide(at.sequence) * total + thread.wide(word)
    return thread.load(refs.new[array], index, plan.word_bytes[array])


def _place(
    thread: tiles.Thread, refs: _Refs, at: _At, word: Any, plan: _Plan, row_words: int
) -> _Place:
    row = word // (plan.heads * row_words)
    head, column = word // row_words % plan.heads, word % row_words
    exists = row < at.rows  # and so the word is one of this sequence's: at.rows <= new_rows
    position = at.start + row
    slab = None
    if plan.kind == "stacked":
        slab = at.sequence
    if plan.kind == "paged":
        position = thread.select(exists, position, 0)
        entry = thread.wide(at.sequence) * plan.table_width + thread.wide(
            position // plan.slab_rows
        )
        slab = thread.load(refs.page_table, entry, 4)
        exists = exists & (slab >= 0) & (slab < plan.slabs)
        position = position % plan.slab_rows
    if at.layer is not None:
        slab = at.layer if slab is None else at.layer * plan.slabs + slab
    return _Place(exists, slab, position, head, column)


def _write(
    thread: tiles.Thread, cache: Ref, at: _At, place: _Place, value: Any, plan: _Plan, array: int
) -> None:
    slab_rows = plan.slab_rows if at.capacity is None else thread.wide(at.capacity)
    head = thread.wide(place.head)
    if place.slab is not None:
        head = thread.wide(place.slab) * plan.heads + head
    index = (head * slab_rows + thread.wide(place.row)) * plan.row_words[array] + thread.wide(
        place.column
    )
    thread.store(cache, index, value, plan.word_bytes[array], place.exists)


def _kernel(refs: _Refs, plan: _Plan) -> None:
    at = _locate(refs, plan)
    program = functools.partial(_append, plan=plan)
    if refs.new_lengths is None or plan.chunks == 1:
        tiles.each_thread(program, refs, at)
        return
    # Ragged prefill: a block that lies past its sequence's rows reads nothing. One token must not
    # wait for its length.
    row_words = plan.heads * max(plan.row_words)
    first_row = lax.div(at.chunk * (plan.in_flight * tiles.THREADS), jnp.int32(row_words))

    @pl.when(first_row < at.rows)
    def _():
        tiles.each_thread(program, refs, at)


def run(inputs: AppendInputs, problem: AppendProblem, config: Config | None = None) -> Caches:
    """The caches with the new rows in: the same buffers where the caller donates them, inside jit
    without a copy.
    """
    caches = {"k": inputs.k_cache, "v": inputs.v_cache}
    new = {"k": inputs.k, "v": inputs.v}
    bring = [side for side, rows in new.items() if rows is not None and rows.size]
    if bring and any(problem.capacities) and problem.layers != 0 and problem.pages != 0:
        rest = inputs._replace(k_cache=None, v_cache=None, k=None, v=None)
        caches |= _write_into(
            {side: caches[side] for side in bring},
            {side: new[side] for side in bring},
            rest,
            problem,
            config or Config(),
        )
    return Caches(caches["k"], caches["v"])


@functools.partial(jax.jit, static_argnames=("problem", "config"))
def _write_into(
    caches: dict[str, Array],
    new: dict[str, Array],
    rest: AppendInputs,
    problem: AppendProblem,
    config: Config,
) -> dict[str, Array]:
    """`run` where there is something to write. Jitted, so that a model of many layers traces it
    once.
    """
    if problem.kind != "per_sequence":
        one = {side: (cache,) for side, cache in caches.items()}
        return {side: cache for side, (cache,) in _launch(one, new, rest, problem, config).items()}
    most = (tiles.PARAMETER_BYTES // 8 - 8) // len(caches)  # 8: the new rows, lengths and the like
    live = [m for m, capacity in enumerate(problem.capacities) if capacity]
    written = {side: list(cache) for side, cache in caches.items()}
    for some in (live[lo : lo + most] for lo in range(0, len(live), most)):
        capacities = tuple(problem.capacities[m] for m in some)
        lengths = None if rest.new_lengths is None else _rows_of(rest.new_lengths, some)
        done = _launch(
            {side: tuple(cache[m] for m in some) for side, cache in caches.items()},
            {side: _rows_of(rows, some) for side, rows in new.items()},
            rest._replace(start=_rows_of(rest.start, some), new_lengths=lengths),
            dataclasses.replace(problem, sequences=len(some), capacities=capacities),
            config,
        )
        for side, arrays in done.items():
            for m, array in zip(some, arrays, strict=True):
                written[side][m] = array
    return {side: tuple(arrays) for side, arrays in written.items()}


def _rows_of(array: Array, sequences: list[int]) -> Array:
    """`array` itself where these are all of its sequences, as they mostly are."""
    if len(sequences) == array.shape[0]:
        return array
    return array[jnp.asarray(sequences)]


def _launch(
    caches: dict[str, tuple[Array, ...]],
    new: dict[str, Array],
    rest: AppendInputs,
    problem: AppendProblem,
    config: Config,
) -> dict[str, tuple[Array, ...]]:
    """One launch over all of `caches`, which it holds as refs meanwhile: that is what makes it
    write in place.
    """
    plan = _Plan.of(problem, tuple(new), config)
    refs = {side: [jax.new_ref(array) for array in cache] for side, cache in caches.items()}
    operands = _Refs(
        new=tuple(rows.astype(problem.cache_dtype) for rows in new.values()),
        caches=tuple(zip(*refs.values(), strict=True)),
        start=rest.start,
        new_lengths=rest.new_lengths,
        capacities=None
        if plan.capacity is not None
        else jnp.asarray(problem.capacities, jnp.int32),
        page_table=rest.page_table,
        layer=None if rest.layer is None else jnp.asarray(rest.layer, jnp.int32).reshape(1),
    )
    body = functools.partial(_kernel, plan=plan)
    tiles.lane_kernel(body, grid=plan.sequences * plan.chunks, name="append")(operands)
    return {side: tuple(jax.freeze(ref) for ref in held) for side, held in refs.items()}
