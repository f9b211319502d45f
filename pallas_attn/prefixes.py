"""The rows that several sequences have in common, which attention reads once for all of them.

It then reads the keys of a sequence in parts (`_cache/attend_in_parts.py`).
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from pallas_attn._call import checks
from pallas_attn._call.problem import owned_rows
from pallas_attn._mesh import sharding

Array = jax.Array
Cache = Any  # a `KVCache`, whose module imports this one
Starts = Array | np.ndarray | Sequence[int] | None  # packed rows' starts, as a call has them

LEAST_SAVED = 512  # rows that need not be read again, from which on a shared part pays for itself


class Members(NamedTuple):
    """The shared rows that each query row reads. Packed rows are the queries of one part after
    those of another; t is the number of query rows of a sequence.
    """

    starts: Array  # int32[parts + 1]: where the packed rows of each part begin
    rows: Array  # int32[levels * M * t]: the row of q, [M * t], that a packed row is
    parts: Array  # int32[levels, M * t]: the part that a row of q reads, -1 where none
    places: Array  # int32[levels, M * t]: its number among the packed rows, -1 where it has none

    @property
    def number(self) -> int:
        """Number of parts, some of which may have no reader."""
        return self.starts.size - 1

    @classmethod
    def of(cls, parts: Array, count: int, starts: Array, rows: int) -> "Members":
        """`parts`: int32[levels, M], the one of `count` parts that a sequence reads, or -1. q has
        `rows`, of which sequence m has those from starts[m] to starts[m + 1].
        """
        run = functools.partial(cls._of, count, rows)
        return sharding.on_automatic_axes(run, (parts, starts), PartitionSpec())

    @classmethod
    def _of(cls, count: int, rows: int, parts: Array, starts: Array) -> "Members":
        levels, sequences = parts.shape
        flat, at = parts.reshape(-1), jnp.arange(parts.size, dtype=jnp.int32)
        there, new = flat >= 0, jnp.tile(jnp.diff(starts), levels)
        before = (flat[None] < flat[:, None]) | (
            (flat[None] == flat[:, None]) & (at[None] < at[:, None])
        )
        first = jnp.where(before & there[None], new[None], 0).sum(axis=1, dtype=jnp.int32)
        number = jnp.arange(count + 1, dtype=jnp.int32)
        fewer = there[None] & (flat[None] < number[:, None])
        begins = jnp.where(fewer, new[None], 0).sum(axis=1, dtype=jnp.int32)
        owner, owned = owned_rows(starts, rows)
        row = jnp.arange(rows, dtype=jnp.int32)
        part = jnp.where(owned[None], parts[:, owner], -1)
        place = first.reshape(levels, sequences)[:, owner] + (row - starts[owner])[None]
        place = jnp.where(part >= 0, place, -1)
        # The sequence that has a packed row.
        packed = jnp.arange(levels * rows, dtype=jnp.int32)[:, None]
        has = there[None] & (first[None] <= packed) & (packed < (first + new)[None])
        row = packed + (jnp.tile(starts[:-1], levels) - first)[None]
        return cls(begins, jnp.where(has, row, 0).sum(axis=1, dtype=jnp.int32), part, place)

    @classmethod
    def of_equal(cls, parts: Array, count: int, tokens: int) -> "Members":
        """The same where each sequence has so many rows."""
        sequences = parts.shape[1]
        starts = jnp.arange(sequences + 1, dtype=jnp.int32) * tokens
        return cls.of(parts, count, starts, sequences * tokens)


@functools.partial(jax.tree_util.register_dataclass, drop_fields=("searched",))
@dataclasses.dataclass(frozen=True)
class SharedPrefixes:
    """The pages of a PagedCache that several sequences have in common from their first one on, as
    `cache.shared_prefixes(tokens=1, levels=2)` finds them on the device by comparing page tables.
    `decode_attention(shared_prefixes=)` then reads them once for all of these sequences.

    It is made once in a step, after `extend`, and serves all layers. `tokens`: the t of q; only
    whole pages before these newest rows count. For packed rows it is made by
    `shared_prefixes(tokens=n, starts=starts)`: q has n rows, and sequences without a row share
    nothing. `levels`: how many times sequences may diverge: 1 finds the pages that the forks of one
    sequence share, 2 also a system prompt that stands before groups of forks.
    Whatever the page tables say, decoding gives the same up to rounding, also over another state of
    the cache: a sequence that no longer has the shared pages before its newest rows, or has other
    packed rows, reads all that it has by itself.

    Example::

        >>> cache = pa.PagedCache.create(2, 64, 16, kv_heads=2, head_dim=64)
        >>> rows = jnp.ones((2, 640, 2, 64), cache.k.dtype)
        >>> cache = pa.append_kv(cache, rows, rows, new_lengths=jnp.array([640, 0]))
        >>> cache = cache.fork(source=0, target=1)
        >>> cache = pa.append_kv(cache, rows[:, 0], rows[:, 0])
        >>> cache.shared_prefixes().lengths.max()
        Array(640, dtype=int32)
    """

    members: Members
    lengths: Array  # int32[parts]: rows of each part
    page_table: Array  # int32[parts, W]
    own_lengths: Array  # int32[M]: rows of each sequence that are in no part
    own_page_table: Array  # int32[M, W]
    covered: Array  # int32[M]: entries of each sequence's page table that its parts have
    # Copies of the arrays that were searched, which may be donated.
    of_lengths: Array  # int32[M]
    of_page_table: Array  # int32[M, W]
    tokens: int = dataclasses.field(metadata={"static": True})
    page_size: int = dataclasses.field(metadata={"static": True})
    starts: Array | None = None  # int32[M + 1] of packed rows
    # Lengths, page table and starts that were searched, to know them again within a step. No
    # leaves.
    searched: tuple[Array, Array, Starts] | None = None


@dataclasses.dataclass(frozen=True)
class Prefix:
    """Rows of another cache that stand before those of a sequence: `decode_attention(prefix=)`.

    Args:
      cache: a cache of G sequences, of the same kv heads, head dims and layers.
      groups: int32[M], traced or not: the one of them that stands before each sequence; a number
        that is none of 0 .. G - 1 is no prefix.

    Example::

        >>> prompts, answers = (pa.StackedCache.create(n, 16, 2, 64) for n in (1, 2))
        >>> rows = jnp.ones((2, 5, 2, 64), answers.k.dtype)
        >>> prompts = pa.append_kv(prompts, rows[:1], rows[:1])
        >>> answers = pa.append_kv(answers, rows, rows)
        >>> prefix = pa.Prefix(prompts, groups=jnp.zeros(2, jnp.int32))
        >>> pa.decode_attention(rows[:, 0], answers, prefix=prefix).shape
        (2, 2, 64)
    """

    cache: Cache
    groups: Array


jax.tree_util.register_dataclass(Prefix, data_fields=["cache", "groups"], meta_fields=[])


# ---- finding shared pages ------------------------------------------------------------------------


class _Level(NamedTuple):
    """The pages that sequences share beyond the levels before."""

    leader: Array  # int32[M]: the first sequence of those that share; M where none does
    first: Array  # int32[M]: the first entry of the page table that they share
    entries: Array  # int32[M]: how many they share


def find(cache: Cache, tokens: int, levels: int, starts: Starts = None) -> SharedPrefixes:
    """`PagedCache.shared_prefixes`."""
    checks.positive(tokens=tokens, levels=levels)
    table, sequences, size = cache.page_table, cache.num_sequences, cache.page_size
    width, most = table.shape[1], sequences // 2
    bounds = None if starts is None else checks.row_starts("starts", starts, tokens, sequences)
    fits, new = cache.lengths <= cache.capacities[0], jnp.int32(tokens)
    if bounds is not None:
        new = jnp.diff(bounds)
        fits &= new > 0
    whole = jnp.where(fits & (cache.lengths > new), (cache.lengths - new) // size, 0)
    every, skipped = _levels(_common(table, whole, cache.pages), size, levels)
    numbers, parts, chosen = jnp.arange(most, dtype=jnp.int32), [], []
    at = jnp.arange(sequences, dtype=jnp.int32)
    for number, level in enumerate(every):
        leads = level.leader == at
        part = (leads[None] & (at[None] < level.leader[:, None])).sum(axis=1, dtype=jnp.int32)
        part = jnp.where(level.leader < sequences, part, -1)
        parts.append(jnp.where(part >= 0, part + number * most, -1))
        mine = leads[None] & (part[None] == numbers[:, None])  # [parts, M], one at most
        chosen.append(
            [jnp.where(mine, x[None], 0).max(axis=1) for x in (at, level.first, level.entries)]
        )
    leader, first, count = (jnp.concatenate(x) for x in zip(*chosen, strict=True))
    if bounds is None:
        members = Members.of_equal(jnp.stack(parts), levels * most, tokens)
    else:
        members = Members.of(jnp.stack(parts), levels * most, bounds, tokens)
    return SharedPrefixes(
        members,
        count * size,
        _shifted(table[leader], first, count),
        cache.lengths - skipped * size,
        _shifted(table, skipped, jnp.full(sequences, width, jnp.int32)),
        skipped,
        jnp.copy(cache.lengths),
        jnp.copy(table),
        tokens,
        size,
        bounds,
        (cache.lengths, table, starts),
    )


class Now(NamedTuple):
    """The state of a cache in a call."""

    lengths: Array
    page_table: Array
    starts: Array | None = None  # packed rows' starts, checked


def for_state(shared: SharedPrefixes, now: Now, unchecked: Starts = None) -> SharedPrefixes:
    """The shared prefixes for a state of the cache: the layers of a step have the arrays that were
    searched, any others are compared with them. `unchecked`: starts as the call has them.
    """
    arrays = (now.lengths, now.page_table, unchecked)
    same = shared.searched is not None and all(map(operator.is_, shared.searched, arrays))
    may_change = isinstance(unchecked, (np.ndarray, list))
    if same and not may_change:
        return shared
    return _renewed(shared, now)


@jax.jit
def _renewed(shared: SharedPrefixes, now: Now) -> SharedPrefixes:
    """Sequences keep their parts where these are still the first pages of their page table and
    lie before their newest rows; the others have none. Packed rows have to be the same.

    A loop over layers has other tracers of lengths and page table than those that were searched,
    but XLA knows that they are equal. `unchanged` is then constant there, and no launch is left.
    """
    lengths, page_table, starts = now
    (sequences, width), size = page_table.shape, shared.page_size
    entry = jnp.arange(width, dtype=jnp.int32)
    beyond = entry[None] >= shared.covered[:, None]
    equal = page_table == shared.of_page_table
    unchanged = (lengths == shared.of_lengths) & equal.all(axis=1)
    new = jnp.int32(shared.tokens) if starts is None else jnp.diff(starts)
    kept = (beyond | equal).all(axis=1)
    kept &= lengths - new >= shared.covered * size  # both at least 0, or covered is 0
    kept &= lengths <= width * size
    kept |= unchanged
    if starts is not None and shared.starts is not None:
        same = starts == shared.starts
        kept &= same[:-1] & same[1:]
        unchanged &= kept
        owners, owned = owned_rows(starts, shared.tokens)
        by_row = kept[owners] & owned
    else:
        by_row = jnp.broadcast_to(kept[:, None], (sequences, shared.tokens)).reshape(-1)
    covered = jnp.where(kept, shared.covered, 0)
    pages = _shifted(page_table, covered, jnp.full(sequences, width, jnp.int32))
    members = shared.members
    return dataclasses.replace(
        shared,
        members=members._replace(
            parts=jnp.where(by_row, members.parts, -1),
            places=jnp.where(by_row, members.places, -1),
        ),
        own_lengths=jnp.where(unchanged, shared.own_lengths, lengths - covered * size),
        own_page_table=jnp.where(unchanged[:, None], shared.own_page_table, pages),
        covered=covered,
    )


def _common(table: Array, whole: Array, pages: int) -> Array:
    """int32[M, M]: the number of entries of the page table that two sequences have in common from
    the first on, within the first `whole` of each; 0 for a sequence and itself.
    """
    sequences, width = table.shape
    at, entry = jnp.arange(sequences, dtype=jnp.int32), jnp.arange(width, dtype=jnp.int32)
    there = (table >= 0) & (table < pages) & (entry[None] < whole[:, None])
    own = jnp.where(there, table, -1 - at[:, None])  # entries that are no page differ from all
    differ = (own[:, None] != own[None]) | (at[:, None] == at[None])[:, :, None]
    return jnp.where(differ, entry[None, None], width).min(axis=2, initial=width)


def _levels(common: Array, size: int, levels: int) -> tuple[list[_Level], Array]:
    """The levels, and the number of entries of each sequence that they cover.

    Sequences that have more in common than `beyond` are a group: a trie's node. They have the same
    minimum of `common` and end together, whatever the page table says, because what two have in
    common with a third they have in common.
    """
    sequences = common.shape[0]
    at = jnp.arange(sequences, dtype=jnp.int32)
    beyond = begun = jnp.zeros(sequences, jnp.int32)
    every = []
    for _ in range(levels):
        joined = common > beyond[:, None]
        others = joined.sum(axis=1, dtype=jnp.int32)
        end = jnp.where(joined, common, 2**30).min(axis=1, initial=2**30)
        some = others > 0
        worth = some & (others * (end - begun) >= -(-LEAST_SAVED // size))
        leader = jnp.where(joined, at[None], sequences).min(axis=1, initial=sequences)
        leader = jnp.where(worth, jnp.minimum(leader, at), sequences)
        every.append(_Level(leader, begun, jnp.where(worth, end - begun, 0)))
        beyond = jnp.where(some, end, beyond)
        begun = jnp.where(worth, end, begun)
    return every, begun


def _shifted(table: Array, first: Array, count: Array) -> Array:
    """`count` entries of each row of a page table from entry `first` on, then no pages."""
    entry = jnp.arange(table.shape[1], dtype=jnp.int32)
    at = entry[None] + first[:, None]
    inside = (entry[None] < count[:, None]) & (at < table.shape[1])
    moved = jnp.take_along_axis(table, jnp.minimum(at, table.shape[1] - 1), axis=1)
    return jnp.where(inside, moved, -1)
