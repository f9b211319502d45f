"""Rows of drafts that were accepted become the newest ones: one launch for K, V and their scales,
every sequence and every layer, in place.

Row j of sequence m, counted from begin[m], becomes a copy of row path[m, j], for j < count[m].
A column of a head belongs to one thread, which reads it in every row that moves before it writes
any of them, so any path will do. Words are as wide as the registers for so many rows allow. A row
that stays where it is is not written.

Each block finds out by itself whether its sequence changes: by the lengths and, where there are
pages, by the page table and the holders of the pages of the newest rows. Its threads share out the
entries and meet before they write. Loads that do not need each other are on their way together:
entries of the page table with the path, holders with the pages of the rows that move and of their
places, then the rows. The first block of a sequence says how many rows stay.

The grid is flat: layer x sequence x array (K, V, their scales) x chunk, a chunk being 128 words of
a row of all heads.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import OVERFLOWS, UNCHANGED, Caches, KeepInputs, KeepProblem, Kept
from pallas_attn.errors import Limit
from pallas_attn.kernels.append import limits, separate_arrays
from pallas_attn.kernels.append.separate_arrays import Arrays
from pallas_attn.kernels.attention import cache_layout
from pallas_attn.kernels.attention.cache_layout import Layout, Row
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.lang import mosaic, thread_program, threads
from pallas_attn.kernels.lang.config import OneForAll
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.types import GmemRef, Index, Operand, Predicate, SmemRef

ROWS_MOST = 48
HELD_BYTES = 256  # registers of a thread for the rows of one array
LOOKS = 8  # entries of the page table that a thread looks at together


@dataclasses.dataclass(frozen=True)
class Config(OneForAll):
    overlaps: bool = False  # begins while the kernel before it ends: `mosaic.overlap_launches`


def limit(problem: KeepProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    if (refused := limits.limit(problem)) is not None:
        return refused
    if problem.width > ROWS_MOST:
        return Limit(
            f"a path of {problem.width} rows; it takes up to {ROWS_MOST}, which threads hold in "
            "registers",
            f"cut it to path[:, :{ROWS_MOST}]: rows past its width stay what they are",
        )
    if _blocks(problem) >= 2**31:
        return Limit(
            f"{_blocks(problem)} blocks of threads, which are counted in int32",
            "keep sequences or layers in several caches",
        )
    return None


def scratch(problem: KeepProblem) -> list[Any]:
    """Shared memory: two words for what is wrong with the pages. Rows pass through registers."""
    return [plgpu.SMEM((2,), jnp.int32)] if cache_layout.layout_of(problem).paged else []


def smem_bytes(problem: KeepProblem, config: Config) -> int:
    del config
    return mosaic.bytes_of(scratch(problem))


class Words(NamedTuple):
    """The words of a row of a head in an array of a cache."""

    row: int  # how many a row has
    nbytes: int


def _words_of(problem: KeepProblem) -> list[Words]:
    """The words of each array: K, V where there is one, and their scales where there are any."""
    size = jnp.dtype(problem.cache_dtype).itemsize
    dims = [dim for dim in (problem.head_dim, problem.v_head_dim) if dim is not None]
    widest = min(16, 2 ** int(math.log2(HELD_BYTES // max(problem.width, 1))))
    nbytes = [math.gcd(dim * size, widest) for dim in dims]
    rows = [Words(dim * size // n, n) for dim, n in zip(dims, nbytes, strict=True)]
    return rows + [Words(1, 4)] * (len(dims) if problem.quantized else 0)


def _chunks(problem: KeepProblem) -> int:
    most = max(words.row for words in _words_of(problem))
    return pl.cdiv(problem.kv_heads * most, mosaic.THREADS)


def _blocks(problem: KeepProblem) -> int:
    arrays = len(_words_of(problem))
    return (problem.layers or 1) * problem.sequences * arrays * _chunks(problem)


class KeepRefs(NamedTuple):
    """Global memory; the caches are written."""

    # A sequence each, or one for all: K, V where there is one, and their scales where there are.
    caches: tuple[tuple[GmemRef, ...], ...]
    path: GmemRef
    lengths: GmemRef
    new_lengths: GmemRef
    counts: GmemRef
    capacities: GmemRef | None  # int32[M], where they differ
    page_table: GmemRef | None
    holders: GmemRef | None
    kept: GmemRef | None  # int32[M], the result
    bad: SmemRef | None  # int32[2]: whether a page is missing; whether one is shared


class At(NamedTuple):
    """The place of a block in the grid, and its work; int32 scalars."""

    sequence: Index
    layer: Index | None
    chunk: Index
    begin: Index  # position of the first of the newest rows
    last: Index  # number of the last of them; 0 where lengths leave the sequence as it is
    count: Index  # rows that stay; 0 where lengths leave the sequence as it is
    kept: Index  # the same, or UNCHANGED
    pages: Index  # pages that its rows need; 0 where the sequence stays as it is
    answers: Index  # 1 where this block says how many rows stay
    capacity: Index | None


class Plan(NamedTuple):
    """The static facts of one launch."""

    layout: Layout
    words: tuple[Words, ...]  # a row's, for each array
    sequences: int
    heads: int
    width: int
    chunks: int


def _kernel(refs: KeepRefs, kept: GmemRef, *bad: SmemRef, plan: Plan) -> None:
    refs = refs._replace(kept=kept, bad=bad[0] if bad else None)
    block, sizes = lax.axis_index("block"), (plan.chunks, len(plan.words), plan.sequences)
    chunk, array, sequence, layer = _split(block, sizes)
    at = _state(KernelContext(plan, refs), sequence)._replace(
        layer=None if plan.layout.layers is None else layer,
        chunk=chunk,
        answers=jnp.where(chunk + array + layer == 0, 1, 0),
    )
    for number in range(len(plan.words)):
        program = functools.partial(_move, array=number)

        @pl.when(array == number)
        def _(program=program):
            threads.run(program, plan, refs, at)


def _state(ctx: KernelContext, sequence: Index) -> At:
    """The work in a sequence that follows from its lengths."""
    plan, refs, _ = ctx
    length, new = refs.lengths[sequence], refs.new_lengths[sequence]
    capacity = None if refs.capacities is None else refs.capacities[sequence]
    held = plan.layout.capacity if capacity is None else capacity
    changes = (new > 0) & (length >= new) & (length <= held)
    most = jnp.minimum(new, plan.width)
    count = refs.counts[0 if refs.counts.shape == (1,) else sequence]
    count = jnp.where(changes, jnp.clip(count, 0, jnp.maximum(most, 0)), 0)
    pages = jnp.int32(0)
    if plan.layout.paged:  # a length is within the capacity, and the sum within int32
        pages = jnp.where(changes, plan.layout.entry(length - 1) + 1, 0)
    zero = jnp.int32(0)
    begin, last = jnp.where(changes, length - new, 0), jnp.where(changes, new - 1, 0)
    kept = jnp.where(changes, count, UNCHANGED)
    return At(sequence, None, zero, begin, last, count, kept, pages, zero, capacity)


def _split(number: Index, sizes: tuple[int, ...]) -> list[Index]:
    """A number's digits, the lowest first: the first ones count to `sizes`."""
    digits = []
    for size in sizes:
        digits.append(lax.rem(number, jnp.int32(size)))
        number = lax.div(number, jnp.int32(size))
    return [*digits, number]


def _move(ctx: ThreadContext, array: int) -> None:
    """The program of one thread: reads its word of each row that moves, then writes all."""
    thread, refs, at, plan = ctx
    if plan.layout.paged:
        thread.shared_store(refs.bad, thread.index, thread.index * 0, thread.index < 2)
        thread.sync()
    first, words = thread.to_int64(at.sequence) * plan.width, plan.words[array]
    path = [thread.load(refs.path, first + j, 4) for j in range(plan.width)]
    looked = newest = None
    if plan.layout.paged:
        looked = _look(ctx, 0, LOOKS)
        (newest,) = _look(ctx, plan.layout.entry(at.begin), 1)
    cache = plan.layout.arrays_of(thread, refs.caches, at.sequence)[array]
    moves, sources, targets = [], [], []
    for j, source in enumerate(path):
        source = thread.minimum(thread.maximum(source, 0), at.last)
        moves.append((at.count > j) & ((source < j) | (source > j)))
        sources.append(_row(ctx, source))
        place = thread.minimum(thread.index * 0 + j, at.last)  # past it nothing is written
        targets.append(_row(ctx, place))
    holders = None if newest is None else _holders(ctx, newest)
    held = []
    for moving, row in zip(moves, sources, strict=True):
        index, inside = _address(ctx, row, words)
        if row.page is not None:  # whether the sequence has all its pages is not known yet
            inside = inside & plan.layout.has_page(row.page)
        held.append(thread.load_where(cache, index, words.nbytes, moving & inside))
    kept = at.kept
    if looked is not None:
        kept = _by_pages(ctx, looked, holders)
        moves = [moving & (kept > 0) for moving in moves]
    for moving, row, value in zip(moves, targets, held, strict=True):
        index, inside = _address(ctx, row, words)
        thread.store(cache, index, value, words.nbytes, moving & inside)
    answers = (thread.index < 1) & (at.answers >= 1)
    thread.store(refs.kept, at.sequence, kept, 4, answers)


def _look(ctx: ThreadContext, first: Index, count: int) -> list[Index]:
    """The pages of every 128th of `count` times 128 entries that the sequence needs, from `first`
    on: the last one again where there are no more, the first one of the table where it needs none.
    These loads wait for the length alone, and for no predicate.
    """
    thread, refs, at, plan = ctx
    pages = []
    for n in range(count):
        entry = thread.minimum(thread.index + first + n * mosaic.THREADS, at.pages - 1)
        entry = thread.maximum(entry, 0)
        pages.append(plan.layout.load_page(thread, refs.page_table, at.sequence, entry))
    return pages


def _holders(ctx: ThreadContext, page: Index) -> Index:
    """How many sequences have a page; 0 where the sequence stays as it is."""
    there = (ctx.at.pages > 0) & ctx.plan.layout.has_page(page)
    return ctx.thread.load_where(ctx.refs.holders, page, 4, there)


def _by_pages(ctx: ThreadContext, looked: list[Index], holders: Index) -> Index:
    """`at.kept`, unless a page of the sequence is missing, or one of its newest rows is another
    sequence's too. The thread has read some already, ahead of the rows: pages that the sequence
    needs, and the holders of one of its newest.
    """
    thread, refs, at, plan = ctx
    layout, step = plan.layout, LOOKS * mosaic.THREADS
    zero = thread.index * 0
    first = zero + 1

    def note_missing(pages: list[Index]) -> None:
        bad = thread.index < 0
        for page in pages:
            bad = bad | layout.lacks_page(page)
        thread.shared_store(refs.bad, zero, first, bad)

    def note_shared(holders: Index) -> None:
        thread.shared_store(refs.bad, first, first, holders > 1)

    def more_pages(i: Index, carry: list) -> list:
        note_missing(_look(ctx, (i + 1) * step, LOOKS))
        return carry

    def more_newest(i: Index, carry: list) -> list:
        begin = layout.entry(at.begin) + (i + 1) * mosaic.THREADS
        (page,) = _look(ctx, begin, 1)
        note_shared(_holders(ctx, page))
        return carry

    note_missing(looked)
    note_shared(holders)
    newest = at.pages - layout.entry(at.begin)
    thread.loop((newest + (mosaic.THREADS - 1)) // mosaic.THREADS - 1, [], more_newest)
    thread.loop((at.pages + (step - 1)) // step - 1, [], more_pages)
    thread.sync()
    missed, held = (thread.shared_load(refs.bad, thread.index * 0 + n) for n in range(2))
    kept = thread.select(held >= 1, thread.index * 0 + OVERFLOWS, at.kept)
    return thread.select(missed >= 1, thread.index * 0 + UNCHANGED, kept)


def _address(ctx: ThreadContext, row: Row, words: Words) -> tuple[Index, Predicate]:
    """(the place of this thread's word of a row in its array, whether it has one)."""
    thread, _, at, plan = ctx
    word = at.chunk * mosaic.THREADS + thread.index
    head, column = word // words.row, word % words.row
    number = plan.layout.number(thread, row._replace(head=head))
    return number * words.row + thread.to_int64(column), head < plan.heads


def _row(ctx: ThreadContext, number: Index) -> Row:
    """The newest row of this number, 0 .. at.last, without its head."""
    thread, refs, at, plan = ctx
    position, page = at.begin + number, None
    if plan.layout.paged:
        entry = plan.layout.entry(position)
        page = plan.layout.load_page(thread, refs.page_table, at.sequence, entry)
    return Row(at.sequence, None, position, at.layer, page, at.capacity)


def run(inputs: KeepInputs, problem: KeepProblem, config: Config | None = None) -> Kept:
    """The caches with their rows moved: the same buffers where the caller donates them, inside jit
    without a copy.
    """
    caches = {name: getattr(inputs, name) for name in Caches._fields}
    arrays = {name: cache for name, cache in caches.items() if cache is not None}
    rest = inputs._replace(**dict.fromkeys(caches))
    moved, rows = _move_in(arrays, rest, problem, config)
    return Kept(Caches(**caches | moved), rows)


@functools.partial(jax.jit, static_argnames=("problem", "config"))
def _move_in(
    caches: dict[str, Operand], rest: KeepInputs, problem: KeepProblem, config: Config | None
) -> tuple[dict[str, Operand], Operand]:
    """`run` of the arrays that there are."""
    rows = []

    def launch(caches, problem, rows_of):
        counts = rest.counts if rest.counts.shape == (1,) else rows_of(rest.counts)
        names = ("path", "lengths", "new_lengths")
        own = rest._replace(counts=counts, **{n: rows_of(getattr(rest, n)) for n in names})
        written, kept = _launch(caches, own, problem, config)
        rows.append(kept)
        return written

    moved = separate_arrays.by_launches(caches, problem, launch)
    kept = rows[0] if len(rows) == 1 else jnp.concatenate(rows)
    if kept.size < problem.sequences:  # the others have no rows that could be the newest
        live = np.flatnonzero(np.array(problem.capacities)).astype(np.int32)
        kept = jnp.full(problem.sequences, UNCHANGED, jnp.int32).at[live].set(kept)
    return moved, kept


def _launch(
    caches: Arrays,
    rest: KeepInputs,
    problem: KeepProblem,
    config: Config | None,
) -> tuple[Arrays, Operand]:
    """One launch over all of `caches`, which it holds as refs meanwhile: that is what makes it
    write in place. And `Kept.rows`.
    """
    layout = cache_layout.layout_of(problem)
    plan = Plan(
        layout,
        tuple(_words_of(problem)),
        problem.sequences,
        problem.kv_heads,
        problem.width,
        _chunks(problem),
    )
    names = [name for name in Caches._fields if name in caches]  # jit has sorted them
    refs = {name: [jax.new_ref(array) for array in caches[name]] for name in names}
    operands = KeepRefs(
        caches=tuple(zip(*refs.values(), strict=True)),
        path=rest.path,
        lengths=rest.lengths,
        new_lengths=rest.new_lengths,
        counts=rest.counts,
        capacities=layout.capacities_operand(),
        page_table=rest.page_table,
        holders=rest.holders,
        kept=None,
        bad=None,
    )
    kernel = thread_program.lane_kernel(
        functools.partial(_kernel, plan=plan),
        grid=_blocks(problem),
        name="keep",
        early=config is not None and config.overlaps,
        out_type=[jax.ShapeDtypeStruct((problem.sequences,), jnp.int32)],
        scratch=scratch(problem),
    )
    (kept,) = kernel(operands)
    return {name: tuple(jax.freeze(ref) for ref in each) for name, each in refs.items()}, kept


KERNEL = Kernel(Config, limit, smem_bytes, run, overlaps=True)
