"""The tiles that a mask function leaves, in lists that are made before a kernel runs.

For each tile of queries the tiles of keys (for a backward over keys the other way round) that some
query sees, in order; but those that every query sees whole follow each other. A kernel walks over
the list as it walks over a `Span`; number j of it stands for tile `Listed.tile(j)`. Tiles
that nobody sees are not in it.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn._functions import program as _program
from pallas_attn._functions import tile_bounds
from pallas_attn.kernels.attention.tiles import DYNAMIC, SECTIONS, QueryTiling, Span
from pallas_attn.kernels.lang.types import GmemRef, Index, Operand

reads_pairs = tile_bounds.reads_pairs
Sizes = tuple[int, int, bool, int]  # rows, block, by_keys and row_blocks of `tiles`
MOST_READ = 2**22  # numbers that `_Once` keeps
HEADER = 4  # numbers of a list before what is said of row blocks
ROW_BLOCK = 5  # numbers for each row block, where there are several


def first(row_blocks: int) -> int:
    """The place in a list where the tiles begin."""
    return HEADER + (ROW_BLOCK * row_blocks if row_blocks > 1 else 0)


def tiles(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    rows: int,
    block: int,
    by_keys: bool = False,
    row_blocks: int = 1,
) -> Any:
    """int32[B or 1, N or 1, tiles, n], a list for each tile of `rows` queries: how many tiles of
    `block` keys some of them see; from which to which all queries see them whole; the last tile.
    Then, where the rows are several `row_blocks`, the fields of a `Span` for each, and its last
    tile. Then the tiles, in order, but that those which need no mask follow each other. From and to
    are places in the list. `by_keys`: for each tile of keys those of queries, of kv heads.
    """
    fixed = static(problem, rows, block, by_keys, row_blocks)
    if fixed is not None:
        return jnp.asarray(fixed, jnp.int32)
    seen_kinds = kinds(problem, inputs, (rows, block, by_keys, row_blocks))
    return of_kinds(seen_kinds, never_empty=not by_keys)


def of_kinds(seen_kinds: Any, *, never_empty: bool) -> Any:
    """`tiles` of what `kinds` gives."""
    return _lists(jnp, *seen_kinds, never_empty=never_empty)


def codes(seen_kinds: Any) -> Any:
    """The result of `kinds` as one number a pair of tiles, int32[B or 1, N or 1, tiles, n]: bits 2r
    and 2r + 1 say that row block r sees some of it, and that it sees all.
    """
    number = 0
    for r in range(seen_kinds.shape[-2]):
        some, whole = seen_kinds[..., r, :].astype(jnp.int32)
        number = number | some << 2 * r | whole << 2 * r + 1
    return number


def static(
    problem: AttentionProblem, rows: int, block: int, by_keys: bool = False, row_blocks: int = 1
) -> np.ndarray | None:
    """`tiles` where they are known before anything runs, else None."""
    if problem.mask_program is None or problem.mask_program.arrays:
        return None
    if DYNAMIC & set(problem.arrays):
        return None
    facts: dict[str, Any] = {"score_program": None, "softcap": None, "mask_blocks": None}
    alone = dataclasses.replace(problem, op="flash_forward", **facts)
    return _static(alone, (rows, block, by_keys, row_blocks))


def sections_of(problem: AttentionProblem, tiling: QueryTiling) -> frozenset[str]:
    """`tiles.sections_of` where kv tiles are listed: no list is empty."""
    lists = static(problem, *tiling.list_sizes)
    if lists is None:
        return SECTIONS - {"empty"}
    fields = spans(lists, tiling.row_blocks).tolist()
    return frozenset(section for span in fields for section in Span(*span).sections())


def spans(lists: np.ndarray, row_blocks: int) -> np.ndarray:
    """int[.., 4]: the different spans of all row blocks, of what `static` gives."""
    if row_blocks == 1:
        count, full_lo, full_hi = (lists[..., i] for i in range(3))
        fields = np.stack([0 * count, full_lo, full_hi, count], axis=-1)
    else:
        shape = *lists.shape[:-1], row_blocks, ROW_BLOCK
        fields = lists[..., HEADER : first(row_blocks)].reshape(shape)[..., :4]
    return np.unique(fields.reshape(-1, 4), axis=0)


@functools.lru_cache(maxsize=64)
def are_known_runs(problem: AttentionProblem, sizes: Sizes) -> bool:
    """Whether the tiles of each list are known to follow each other, as those of a band do."""
    lists = static(problem, *sizes)
    return lists is not None and are_runs(lists, sizes[-1])


def are_runs(lists: np.ndarray, row_blocks: int) -> bool:
    """Whether the tiles of each list follow each other, of what `static` gives."""
    listed = lists[..., first(row_blocks) :]
    at = np.arange(listed.shape[-1])
    return bool((listed == listed[..., :1] + at)[at < lists[..., :1]].all())


@functools.lru_cache(maxsize=64)
def _static(problem: AttentionProblem, sizes: Sizes) -> np.ndarray:
    nothing: Any = None
    assert problem.mask_program is not None
    by_batch = problem.mask_program.depends_on(0)

    def run(first):  # an argument, or XLA would fold everything as it compiles
        held = dataclasses.replace(problem, arrays=("q_offset",), batch=first.size)
        inputs = AttentionInputs(nothing, nothing, nothing, first)
        return kinds(held, inputs, sizes)

    each = np.full(problem.batch if by_batch else 1, problem.q_offset, np.int32)
    seen_kinds = _program.computed_now(run, each)
    return _lists(np, *seen_kinds, never_empty=not sizes[2])


def kinds(problem: AttentionProblem, inputs: AttentionInputs, sizes: Sizes) -> Any:
    """bool[2, B or 1, N or 1, tiles, row_blocks, n]: `tile_bounds.Kinds` by work tile."""
    rows, block, by_keys, row_blocks = sizes
    seen_kinds = _bounds(problem, inputs, rows // row_blocks, block)
    if seen_kinds is None:
        count, live = _seen_of_tiles(problem, inputs, rows // row_blocks, block)
        seen_kinds = tile_bounds.Kinds(count > 0, (count == live * block) & (count > 0))
    if by_keys:
        some, whole = seen_kinds
        if some.shape[1] > 1:  # query heads
            heads = (some.shape[0], problem.kv_heads, problem.group)
            some = some.reshape(*heads, *some.shape[2:]).any(2)
            whole = whole.reshape(*heads, *whole.shape[2:]).all(2)
        return jnp.stack([x.swapaxes(2, 3)[:, :, :, None] for x in (some, whole)])
    q_tiles, n = pl.cdiv(problem.q_len, rows), seen_kinds.some.shape[3]
    pads = ((0, 0), (0, 0), (0, q_tiles * row_blocks - seen_kinds.some.shape[2]), (0, 0))
    padded = jnp.pad(seen_kinds.some, pads), jnp.pad(seen_kinds.whole, pads, constant_values=True)
    return jnp.stack([x.reshape(*x.shape[:2], q_tiles, row_blocks, n) for x in padded])


def _bounds(
    problem: AttentionProblem, inputs: AttentionInputs, rows: int, block: int
) -> tile_bounds.Kinds | None:
    """By `tile_bounds`, or by what the caller has found; None where pairs are to be counted."""
    program, seen_kinds = problem.mask_program, None
    assert program is not None
    offset: Any = problem.q_offset if inputs.q_offset is None else None
    sizes = (problem.batch, problem.q_heads, problem.q_len, problem.kv_len, rows, block)
    grid = tile_bounds.Grid(*sizes, offset)
    if problem.mask_blocks == (problem.q_len, problem.kv_len, offset):
        seen_kinds = tile_bounds.taken(inputs.mask_aux[-1], grid)
    if seen_kinds is None:
        at = offset if inputs.q_offset is None else inputs.q_offset.reshape(-1, 1, 1, 1)
        seen_kinds = tile_bounds.kinds(program, inputs.mask_aux, grid, at)
    return None if seen_kinds is None else tile_bounds.within(seen_kinds, grid, inputs)


def numbers(shape: tuple[int, ...]) -> Any:
    """0, 1, .., along the one axis that is not of 1."""
    return np.arange(max(shape), dtype=np.int32).reshape(shape)


def _lists(xp: Any, some: Any, whole: Any, *, never_empty: bool) -> Any:
    """The result of `tiles`, of bool[.., row_blocks, n]: which tiles some query of a row block
    sees, and which all see whole. `xp`: numpy or jax.numpy. `never_empty`: rows without a key take
    one tile all the same, masked.
    """
    row_blocks, n = some.shape[-2:]
    at = numbers((1, 1, 1, n))
    every = some.any(-2)
    whole = whole & every[..., None, :]
    wholes = whole.all(-2)
    begin = xp.where(wholes, at, n).min(-1, keepdims=True)
    order = xp.where(wholes, 1, xp.where(at < begin, 0, 2))
    order = xp.where(every, order, 3) * n + at
    rank, listed = _sorted(xp, order)
    full_lo = xp.where(wholes, rank, n).min(-1, keepdims=True)
    full_hi = xp.where(wholes, rank + 1, 0).max(-1, keepdims=True)
    count = every.sum(-1, keepdims=True, dtype=np.int32)
    count = xp.maximum(count, 1) if never_empty else count
    last = xp.where(rank == count - 1, at, 0).max(-1, keepdims=True)
    header = [count, xp.minimum(full_lo, full_hi), full_hi, last]  # 0, 0 where there is none
    if row_blocks > 1:
        header.append(_spans_of_row_blocks(xp, some, whole, rank, header))
    return xp.concatenate([*header, listed], axis=-1)


def _sorted(xp: Any, order: Any) -> tuple[Any, Any]:
    """The place of each of different numbers when they are sorted, and the number at each place."""
    if xp is np:
        listed = order.argsort(-1)
        return listed.argsort(-1).astype(np.int32), listed.astype(np.int32)
    return sorted_places(order[..., None, :] < order[..., :, None])


def longest_first(count: jax.Array) -> jax.Array:
    """The work tiles of a head in the order in which they come, along the last axis, by how many
    steps each takes.
    """
    n, axes = count.shape[-1], (1,) * (count.ndim - 1)
    down, across = (numbers((*axes, *shape)) for shape in ((n, 1), (1, n)))
    longer = count[..., None, :] > count[..., :, None]
    tie = (count[..., None, :] == count[..., :, None]) & (across < down)
    return sorted_places(longer | tie)[1]


def in_place_of_ranks(
    table: jax.Array, bits: int, order: jax.Array, heads: int, first: int
) -> jax.Array:
    """A table of codes, with work tiles in place of the ranks of heads from `first` on. `order`:
    `longest_first` of each batch row, which has so many heads.
    """
    head, low = table >> bits, (1 << bits) - 1
    codes = (table & ~low) | order[head // heads, table & low]
    codes = jnp.where(head >= first, codes, table) if first else codes
    return jnp.concatenate([table[:, :1], codes[:, 1:]], axis=1)


def sorted_places(before: Any) -> tuple[Any, Any]:
    """The place of each of n numbers when they are sorted, and the number at each place. `before`,
    bool[.., n, n]: whether the second one comes before the first. A sort by XLA would be several
    kernels.
    """
    n, axes = before.shape[-1], (1,) * (before.ndim - 2)
    down, across = (numbers((*axes, *shape)) for shape in ((n, 1), (1, n)))
    rank = before.sum(-1, dtype=np.int32)
    listed = jnp.where(rank[..., None, :] == down, across, 0).sum(-1, dtype=np.int32)
    return rank, listed


def _spans_of_row_blocks(xp: Any, some: Any, whole: Any, rank: Any, header: list[Any]) -> Any:
    """The fields of a Span for each row block, and its last tile. Tiles that one sees whole and
    that do not follow each other in the list do not count, but for those that all see whole.
    """
    n, rank = some.shape[-1], rank[..., None, :]
    count, full_lo, full_hi, last = (x[..., None] for x in header)
    at = numbers((1, 1, 1, 1, n))
    lo = xp.where(some, rank, n).min(-1, keepdims=True)
    hi = xp.where(some, rank + 1, 0).max(-1, keepdims=True)
    own_lo = xp.where(whole, rank, n).min(-1, keepdims=True)
    own_hi = xp.where(whole, rank + 1, 0).max(-1, keepdims=True)
    one_run = own_hi - own_lo == whole.sum(-1, keepdims=True, dtype=np.int32)
    own_lo, own_hi = xp.where(one_run, own_lo, full_lo), xp.where(one_run, own_hi, full_hi)
    none = hi == 0  # one tile, masked
    fields = [
        xp.where(none, count - 1, lo),
        xp.where(none, count - 1, xp.where(own_hi > own_lo, own_lo, lo)),
        xp.where(none, count - 1, xp.where(own_hi > own_lo, own_hi, lo)),
        xp.where(none, count, hi),
        xp.where(none, last, xp.where(rank == hi - 1, at, 0).max(-1, keepdims=True)),
    ]
    joined = xp.concatenate(fields, -1)
    return joined.reshape(*joined.shape[:-2], -1)


class _Once(_program.Broadcasting):
    """Reads by row or by column, done before their result is spread over all pairs of them."""

    def read(self, array: Operand, kind: Any, indices: Sequence[Any]) -> Any:
        elements = super().read(array, kind, indices)
        return lax.optimization_barrier(elements) if elements.size <= MOST_READ else elements


def _seen_of_tiles(
    problem: AttentionProblem, inputs: AttentionInputs, rows: int, block: int
) -> tuple[Any, Any]:
    """How many keys are seen in each pair of tiles, int32[B or 1, N or 1, q tiles, kv tiles], and
    how many rows of the q tile there are, int32[B or 1, 1, q tiles, 1].
    """
    program = problem.mask_program
    assert program is not None
    by_batch = program.depends_on(0) or set(problem.arrays) & (DYNAMIC - {"mask_array"})
    batches, heads = (
        problem.batch if by_batch else 1,
        problem.q_heads if program.depends_on(1) else 1,
    )
    hidden = inputs.mask_array
    if hidden is not None:
        batches, heads = max(batches, hidden.shape[0]), max(heads, hidden.shape[1])
    q_tiles, kv_tiles = pl.cdiv(problem.q_len, rows), pl.cdiv(problem.kv_len, block)

    def axis(n, number):
        shape = [1] * 5
        shape[number] = n
        return jnp.arange(n, dtype=jnp.int32).reshape(shape)

    def each(x):  # one number a batch row
        return x.reshape(-1, 1, 1, 1, 1)

    b, h, row = axis(batches, 0), axis(heads, 1), axis(q_tiles * rows, 2)
    key = axis(kv_tiles, 3) * block + axis(block, 4)
    offset = problem.q_offset if inputs.q_offset is None else each(inputs.q_offset)
    q_len = problem.q_len if inputs.q_lengths is None else each(inputs.q_lengths)
    kv_len = problem.kv_len if inputs.kv_lengths is None else each(inputs.kv_lengths)
    numbers = b, h, row + offset, key
    shown = _program.evaluate(program, numbers, inputs.mask_aux, _Once())
    shown = shown & (row < q_len) & (key < kv_len)
    if hidden is not None:
        whole = zip(hidden.shape[2:], (q_tiles * rows, kv_tiles * block), strict=True)
        pads = [(0, size - n if n > 1 else 0) for n, size in whole]
        hidden = jnp.pad(hidden, ((0, 0), (0, 0), *pads))
        columns = (kv_tiles, block) if hidden.shape[3] > 1 else (1, 1)
        shown = shown & hidden.reshape(*hidden.shape[:3], *columns)
    sizes = (batches, heads, q_tiles * rows, kv_tiles, block)
    by_row = jnp.broadcast_to(shown, sizes).sum(-1, dtype=jnp.int32)
    by_row = lax.optimization_barrier(by_row)  # one sum over both is slower by far
    count = by_row.reshape(batches, heads, q_tiles, rows, kv_tiles).sum(3, dtype=jnp.int32)
    first = jnp.arange(q_tiles, dtype=jnp.int32).reshape(1, 1, -1, 1) * rows
    length = q_len if isinstance(q_len, int) else q_len[..., 0]
    return count, jnp.clip(length - first, 0, rows)


# ---- a list, as kernels read it ------------------------------------------------------------------


class Listed(NamedTuple):
    """The tiles that a work tile needs, by number."""

    ref: GmemRef  # see `tiles`
    batch: Index
    head: Index
    row: Index  # the work tile
    row_blocks: int = 1  # see `tiles`

    @classmethod
    def of(
        cls, ref: GmemRef, batch: Index, head: Index, row: Index, row_blocks: int = 1
    ) -> "Listed":
        batches, heads = ref.shape[:2]
        return cls(ref, batch if batches > 1 else 0, head if heads > 1 else 0, row, row_blocks)

    def read(self, i: Index) -> Index:
        return self.ref[self.batch, self.head, self.row, i]

    @property
    def count(self) -> Index:
        """Tiles of the list."""
        return self.read(0)

    @property
    def span(self) -> Span:
        """The places in the list that all rows of the work tile need."""
        return Span(0, self.read(1), self.read(2), self.count)

    @property
    def last(self) -> Index:
        """The last tile."""
        return self.read(3)

    def of_row_block(self, number: Index) -> tuple[Span, Index]:
        """The span of one block of the rows, and the last of its tiles."""
        if self.row_blocks == 1:
            return self.span, self.last
        at = HEADER + ROW_BLOCK * number
        *fields, last = (self.read(at + i) for i in range(ROW_BLOCK))
        return Span(*fields), last

    def tile(self, j: Index) -> Index:
        """The tile at place j of the list; j may lie before the first."""
        at = max(j, 0) if isinstance(j, int) else jnp.maximum(j, 0)
        return self.read(at + first(self.row_blocks))

    def tile_ahead(self, j: Index) -> Index:
        """`tile(j)`; any tile where j lies past the end of the lists' memory."""
        return self.tile(jnp.minimum(j, self.ref.shape[3] - 1 - first(self.row_blocks)))


class Run(NamedTuple):
    """A `Listed` whose tiles follow each other, so that none is read."""

    first: Index

    def tile(self, j: Index) -> Index:
        return self.first + j
