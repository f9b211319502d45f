"""Rows of drafts that were accepted become the newest ones: one launch for K, V and their scales,
every sequence and every layer, in place.

Row j of sequence m, counted from begin[m], becomes what row path[m, j] was, for j < count[m].
A column of a head belongs to one thread, which reads it in every row that moves before it writes
any of them: any path will do, and threads never wait for each other. Words are as wide as the
registers for so many rows allow. A row that stays where it is is not written.

The grid is flat: layer x sequence x array (K, V, their scales) x chunk, a chunk being 128 words of
a row of all heads.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_attn._problem import Caches, KeepInputs, KeepProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.append import copy as append_copy
from pallas_attn.kernels.attention import cache_layout
from pallas_attn.kernels.attention.cache_layout import Row
from pallas_attn.kernels.lang import mosaic

Array = Any
Ref = Any
Scalar = Any

ROWS_MOST = 48
HELD_BYTES = 256  # of the registers of a thread, for the rows of one array


@dataclasses.dataclass(frozen=True)
class Config:
    overlaps: bool = False  # begins while the kernel before it ends: `mosaic.overlap_launches`


def limit(problem: KeepProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    if problem.cache_dtype not in append_copy.DTYPES:
        dtypes = ", ".join(append_copy.DTYPES)
        return Limit(f"no {problem.cache_dtype} caches", f"use one of {dtypes}")
    if problem.width > ROWS_MOST:
        return Limit(
            f"a path of {problem.width} rows: a thread holds a column of all of them",
            f"cut it to the most that are kept: path[:, :{ROWS_MOST}]",
        )
    if max(problem.capacities, default=0) >= 2**31:
        return Limit(
            f"capacity {max(problem.capacities)}: positions are int32",
            "split each sequence over several caches of fewer than 2**31 rows",
        )
    if _blocks(problem) >= 2**31:
        return Limit(f"{_blocks(problem)} blocks: they are int32", "use several caches")
    return None


def smem_bytes(problem: KeepProblem, config: Config) -> int:
    """None: rows pass through registers."""
    del problem, config
    return 0


class Words(NamedTuple):
    """How a row of a head lies in an array of a cache."""

    row: int  # how many
    nbytes: int  # of each


def _words_of(problem: KeepProblem) -> list[Words]:
    """Of each array: K, V where there is one, and their scales where there are any."""
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


class Refs(NamedTuple):
    # A sequence each, or one for all: K, V where there is one, and their scales where there are.
    caches: tuple[tuple[Ref, ...], ...]
    path: Ref
    begin: Ref
    last: Ref
    count: Ref
    capacities: Ref | None  # where they differ
    page_table: Ref | None


class At(NamedTuple):
    """Where in the grid, and what is to be done there. Block-wide int32 scalars."""

    sequence: Scalar
    layer: Scalar | None
    chunk: Scalar
    begin: Scalar
    last: Scalar  # of the newest rows
    count: Scalar
    capacity: Scalar | None


class Plan(NamedTuple):
    """What is static in one launch."""

    layout: Any  # cache_layout.Layout
    words: tuple[Words, ...]  # of each array
    sequences: int
    heads: int
    width: int
    chunks: int


def _kernel(refs: Refs, plan: Plan) -> None:
    block, sizes = lax.axis_index("block"), (plan.chunks, len(plan.words), plan.sequences)
    chunk, array, sequence, layer = _split(block, sizes)
    at = At(
        sequence,
        None if plan.layout.layers is None else layer,
        chunk,
        refs.begin[sequence],
        refs.last[sequence],
        refs.count[sequence],
        None if refs.capacities is None else refs.capacities[sequence],
    )
    for number in range(len(plan.words)):
        program = functools.partial(_move, plan=plan, array=number)

        @pl.when(array == number)
        def _(program=program):
            mosaic.each_thread(program, refs, at)


def _split(number: Scalar, sizes: tuple[int, ...]) -> list[Scalar]:
    """A number's digits, the lowest first: the first ones count to `sizes`."""
    digits = []
    for size in sizes:
        digits.append(lax.rem(number, jnp.int32(size)))
        number = lax.div(number, jnp.int32(size))
    return [*digits, number]


def _move(thread: mosaic.Thread, refs: Refs, at: At, *, plan: Plan, array: int) -> None:
    """What one thread does: its word of each row that moves, read, then written."""
    first, words = thread.wide(at.sequence) * plan.width, plan.words[array]
    given = [thread.load(refs.path, first + j, 4) for j in range(plan.width)]
    cache = plan.layout.arrays_of(thread, refs.caches, at.sequence)[array]
    moves, held = [], []
    for j, source in enumerate(given):
        source = thread.minimum(thread.maximum(source, 0), at.last)
        moves.append((at.count > j) & ((source < j) | (source > j)))
        row = _row(thread, refs, at, source, moves[j], plan)
        index, inside = _address(thread, at, row, words, plan)
        held.append(thread.load_where(cache, index, words.nbytes, moves[j] & inside))
    for j, (moving, value) in enumerate(zip(moves, held, strict=True)):
        row = _row(thread, refs, at, thread.index * 0 + j, moving, plan)
        index, inside = _address(thread, at, row, words, plan)
        thread.store(cache, index, value, words.nbytes, moving & inside)


def _address(thread: mosaic.Thread, at: At, row: Row, words: Words, plan: Plan) -> tuple[Any, Any]:
    """Which of the words of an array this thread's is in a row, and whether it has one."""
    word = at.chunk * mosaic.THREADS + thread.index
    head, column = word // words.row, word % words.row
    number = plan.layout.number(thread, row._replace(head=head))
    return number * words.row + thread.wide(column), head < plan.heads


def _row(thread: mosaic.Thread, refs: Refs, at: At, number: Any, exists: Any, plan: Plan) -> Row:
    """Of the newest rows that of this number, but for its head."""
    position, page = at.begin + number, None
    if plan.layout.paged:
        index = plan.layout.entry_index(thread, at.sequence, plan.layout.entry(position))
        page = thread.load_where(refs.page_table, index, 4, exists)
    return Row(at.sequence, None, position, at.layer, page, at.capacity)


def run(inputs: KeepInputs, problem: KeepProblem, config: Config | None = None) -> Caches:
    """The caches with their rows moved: the same buffers where the caller donates them, inside jit
    without a copy.
    """
    caches = {name: getattr(inputs, name) for name in Caches._fields}
    given = {name: cache for name, cache in caches.items() if cache is not None}
    sizes = (problem.sequences, problem.width, problem.kv_heads, problem.layers, problem.pages)
    if 0 not in sizes and problem.head_dim and any(problem.capacities):
        caches |= _move_in(given, inputs._replace(**dict.fromkeys(caches)), problem, config)
    return Caches(**caches)


@functools.partial(jax.jit, static_argnames=("problem", "config"))
def _move_in(
    caches: dict[str, Array], rest: KeepInputs, problem: KeepProblem, config: Config | None
) -> dict[str, Array]:
    """`run` where there are rows."""
    names = [name for name in Caches._fields if name in caches]  # jit has sorted them
    if not cache_layout.layout_of(problem).separate:
        one = {name: (caches[name],) for name in names}
        done = _launch(one, rest, problem, config)
        return {name: cache for name, (cache,) in done.items()}
    most = append_copy.most_arrays(len(caches))
    live = [m for m, capacity in enumerate(problem.capacities) if capacity]
    moved = {name: list(caches[name]) for name in names}
    for some in (live[lo : lo + most] for lo in range(0, len(live), most)):
        of = functools.partial(append_copy.rows_of, sequences=some)
        done = _launch(
            {name: tuple(caches[name][m] for m in some) for name in names},
            rest._replace(
                path=of(rest.path),
                begin=of(rest.begin),
                last=of(rest.last),
                count=of(rest.count),
            ),
            dataclasses.replace(
                problem,
                sequences=len(some),
                capacities=tuple(problem.capacities[m] for m in some),
            ),
            config,
        )
        for name, arrays in done.items():
            for m, array in zip(some, arrays, strict=True):
                moved[name][m] = array
    return {name: tuple(arrays) for name, arrays in moved.items()}


def _launch(
    caches: dict[str, tuple[Array, ...]],
    rest: KeepInputs,
    problem: KeepProblem,
    config: Config | None,
) -> dict[str, tuple[Array, ...]]:
    """One launch over all of `caches`, which it holds as refs meanwhile: that is what makes it
    write in place.
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
    refs = {name: [jax.new_ref(array) for array in arrays] for name, arrays in caches.items()}
    operands = Refs(
        caches=tuple(zip(*refs.values(), strict=True)),
        path=rest.path,
        begin=rest.begin,
        last=rest.last,
        count=rest.count,
        capacities=layout.capacities_operand(),
        page_table=rest.page_table,
    )
    body = functools.partial(_kernel, plan=plan)
    early = config is not None and config.overlaps
    mosaic.lane_kernel(body, grid=_blocks(problem), name="keep", early=early)(operands)
    return {name: tuple(jax.freeze(ref) for ref in each) for name, each in refs.items()}
