"""Rows that several sequences have in common, read once for all of them.

The keys of a sequence are then read in parts: rows that it shares, each part with all query rows of
the sequences that share it, and the rows of its own. A part is attention over a cache whose
sequences are the shared rows and whose query rows are packed; partial results are merged by their
log-sum-exp. Every query sees all shared rows, which lie before the newest ones of each sequence.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._call import checks
from pallas_attn._call.problem import DecodeInputs, DecodeProblem, Into, Own
from pallas_attn.masks import AT_RUN_TIME, FULL
from pallas_attn.merge import add_sinks, merge_attention

Array = jax.Array

LEAST_SAVED = 512  # rows that need not be read again, from which on a shared part pays for itself
# Packed rows of a sequence are up to all that there are, and up to at least so many: kernels then
# take them alike whatever else is in the batch.
LEAST_BOUND = 64


class Call(NamedTuple):
    """A call of decode."""

    problem: DecodeProblem
    inputs: DecodeInputs


class Run(NamedTuple):
    """How a call is made: (out, lse)."""

    alone: Callable[[DecodeProblem, DecodeInputs], tuple[Array, Array]]
    # Its results merged into those of another, `DecodeInputs.into`; None: no kernel does that.
    merged: Callable[[DecodeProblem, DecodeInputs], tuple[Array, Array] | None]


class Members(NamedTuple):
    """Which query rows read which shared rows. Packed rows are the queries of one part after those
    of another; `t` is how many each sequence has.
    """

    starts: Array  # int32[parts + 1]: where the packed rows of each part begin
    rows: Array  # int32[levels * M * t]: which row of q, [M * t], a packed row is
    parts: Array  # int32[levels, M * t]: which part a row of q reads, -1 where none
    places: Array  # int32[levels, M * t]: which packed row it is there, -1 where it is none

    @property
    def number(self) -> int:
        """Of parts, some of which nobody reads."""
        return self.starts.size - 1

    @classmethod
    def of(cls, parts: Array, count: int, tokens: int) -> "Members":
        """`parts`: int32[levels, M], which of `count` parts a sequence reads, -1 where none."""
        levels, sequences = parts.shape
        flat, at = parts.reshape(-1), jnp.arange(parts.size, dtype=jnp.int32)
        there = flat >= 0
        before = (flat[None] < flat[:, None]) | (
            (flat[None] == flat[:, None]) & (at[None] < at[:, None])
        )
        place = (before & there[None]).sum(axis=1, dtype=jnp.int32)
        place = jnp.where(there, place, -1)
        owner = jnp.where(place[None] == at[:, None], at % sequences, 0).max(axis=1)
        number = jnp.arange(count + 1, dtype=jnp.int32)
        starts = (there[None] & (flat[None] < number[:, None])).sum(axis=1, dtype=jnp.int32)
        within = jnp.arange(tokens, dtype=jnp.int32)
        places = jnp.where(there[:, None], place[:, None] * tokens + within[None], -1)
        rows = (owner[:, None] * tokens + within[None]).reshape(-1)
        by_row = levels, sequences * tokens
        parts = jnp.broadcast_to(flat[:, None], places.shape).reshape(by_row)
        return cls(starts * tokens, rows, parts, places.reshape(by_row))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedPrefixes:
    """Which pages of a PagedCache several sequences have in common from their first one on, as
    `cache.shared_prefixes(tokens=1, levels=2)` finds it on the device by comparing the page tables:
    what `decode_attention(shared_prefixes=)` then reads once for all of them.

    It is made once in a step, after `extend`, and serves all layers. `tokens`: the t of q; only
    whole pages before these newest rows count. `levels`: how many times sequences may part: 1 finds
    what the forks of one sequence share, 2 also a system prompt that stands before groups of them.
    Whatever the page tables say, decoding gives the same up to rounding.
    """

    members: Members
    lengths: Array  # int32[parts]: rows of each part
    page_table: Array  # int32[parts, W]
    own_lengths: Array  # int32[M]: rows of each sequence that are in no part
    own_page_table: Array  # int32[M, W]
    tokens: int = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Prefix:
    """Rows of another cache that stand before those of a sequence: `decode_attention(prefix=)`.

    Args:
      cache: a cache of G sequences, of the same kv heads, head dims and layers.
      groups: int32[M], traced or not: which of them stands before each sequence; a number that is
        none of 0 .. G - 1 is no prefix.
    """

    cache: Any
    groups: Any


jax.tree_util.register_dataclass(Prefix, data_fields=["cache", "groups"], meta_fields=[])


# ---- which pages are shared ----------------------------------------------------------------------


class _Level(NamedTuple):
    """What the sequences share beyond the levels before."""

    leader: Array  # int32[M]: the first sequence of those that share; M where nobody does
    first: Array  # int32[M]: the first entry of the page table that they share
    entries: Array  # int32[M]: how many they share


def find(cache: Any, tokens: int, levels: int) -> SharedPrefixes:
    """`PagedCache.shared_prefixes`."""
    checks.positive(tokens=tokens, levels=levels)
    table, sequences, size = cache.page_table, cache.num_sequences, cache.page_size
    width, most = table.shape[1], sequences // 2
    fits = (cache.lengths <= cache.capacities[0]) & (cache.lengths > tokens)
    whole = jnp.where(fits, (cache.lengths - tokens) // size, 0)
    found, skipped = _levels(_common(table, whole, cache.pages), size, levels)
    numbers, parts, chosen = jnp.arange(most, dtype=jnp.int32), [], []
    at = jnp.arange(sequences, dtype=jnp.int32)
    for number, level in enumerate(found):
        leads = level.leader == at
        part = (leads[None] & (at[None] < level.leader[:, None])).sum(axis=1, dtype=jnp.int32)
        part = jnp.where(level.leader < sequences, part, -1)
        parts.append(jnp.where(part >= 0, part + number * most, -1))
        mine = leads[None] & (part[None] == numbers[:, None])  # [parts, M], one at most
        chosen.append(
            [jnp.where(mine, x[None], 0).max(axis=1) for x in (at, level.first, level.entries)]
        )
    leader, first, count = (jnp.concatenate(x) for x in zip(*chosen, strict=True))
    return SharedPrefixes(
        Members.of(jnp.stack(parts), levels * most, tokens),
        count * size,
        _shifted(table[leader], first, count),
        cache.lengths - skipped * size,
        _shifted(table, skipped, jnp.full(sequences, width, jnp.int32)),
        tokens,
    )


def _common(table: Array, whole: Array, pages: int) -> Array:
    """int32[M, M]: how many entries of the page table two sequences have in common from the first
    on, of the first `whole` of each. 0 of a sequence with itself.
    """
    sequences, width = table.shape
    at, entry = jnp.arange(sequences, dtype=jnp.int32), jnp.arange(width, dtype=jnp.int32)
    there = (table >= 0) & (table < pages) & (entry[None] < whole[:, None])
    own = jnp.where(there, table, -1 - at[:, None])  # what is no page is nobody else's
    differ = (own[:, None] != own[None]) | (at[:, None] == at[None])[:, :, None]
    return jnp.where(differ, entry[None, None], width).min(axis=2, initial=width)


def _levels(common: Array, size: int, levels: int) -> tuple[list[_Level], Array]:
    """The levels, and how many entries of each sequence they have.

    Sequences that have more in common than `beyond` are a group: a trie's node. They have the same
    minimum of `common` and end together, whatever the page table says, because what two have in
    common with a third they have in common.
    """
    sequences = common.shape[0]
    at = jnp.arange(sequences, dtype=jnp.int32)
    beyond = begun = jnp.zeros(sequences, jnp.int32)
    found = []
    for _ in range(levels):
        joined = common > beyond[:, None]
        others = joined.sum(axis=1, dtype=jnp.int32)
        end = jnp.where(joined, common, 2**30).min(axis=1, initial=2**30)
        some = others > 0
        worth = some & (others * (end - begun) >= -(-LEAST_SAVED // size))
        leader = jnp.where(joined, at[None], sequences).min(axis=1, initial=sequences)
        leader = jnp.where(worth, jnp.minimum(leader, at), sequences)
        found.append(_Level(leader, begun, jnp.where(worth, end - begun, 0)))
        beyond = jnp.where(some, end, beyond)
        begun = jnp.where(worth, end, begun)
    return found, begun


def _shifted(table: Array, first: Array, count: Array) -> Array:
    """`count` entries of each row of a page table from entry `first` on, then no pages."""
    entry = jnp.arange(table.shape[1], dtype=jnp.int32)
    at = entry[None] + first[:, None]
    inside = (entry[None] < count[:, None]) & (at < table.shape[1])
    moved = jnp.take_along_axis(table, jnp.minimum(at, table.shape[1] - 1), axis=1)
    return jnp.where(inside, moved, -1)


# ---- attention in parts --------------------------------------------------------------------------


def applies(shared: SharedPrefixes, cache: Any, problem: DecodeProblem) -> bool:
    """Whether a call reads its shared rows once; else it reads all rows of every sequence."""
    if not isinstance(shared, SharedPrefixes) or shared.own_page_table.shape != getattr(
        cache.page_table, "shape", None
    ):
        raise ValueError(
            "shared_prefixes: expected what cache.shared_prefixes() gave for this call's "
            f"PagedCache, got {type(shared).__name__} beside a {type(cache).__name__}"
        )
    if not problem.packed and problem.q_len not in (0, shared.tokens):
        raise ValueError(
            f"shared_prefixes: expected those of {problem.q_len} tokens, as many as q has, got "
            f"those of {shared.tokens}; make them by shared_prefixes(tokens={problem.q_len})"
        )
    plain = not (problem.packed or problem.shared_kv or problem.batch_invariant)
    return plain and _sees_all_before(problem) and shared.members.number > 0


def _sees_all_before(problem: DecodeProblem) -> bool:
    """Whether a query sees every key before its own position, and no function hides any."""
    if problem.mask_program is not None:
        return False
    left, right = problem.mask.left, problem.mask.right
    return left is None and (right is None or (right is not AT_RUN_TIME and right >= 0))


def checked(prefix: Any, cache: Any, problem: DecodeProblem, rotary: Any) -> Prefix:
    """The argument `prefix` of a call with its groups as int32[M], or a ValueError."""
    other: Any = getattr(prefix, "cache", None)
    if not isinstance(prefix, Prefix) or not hasattr(other, "kind"):
        raise ValueError(
            f"prefix: expected Prefix(cache, groups) of one of the three caches, got {prefix!r}"
        )
    checks.kv_cache(other)
    facts = ("kv_heads", "head_dim", "v_head_dim", "layers", "shared_kv")
    for name in facts:
        if getattr(other, name) != getattr(cache, name):
            raise ValueError(
                f"prefix: expected a cache whose {name} is that of the sequences' own, "
                f"{getattr(cache, name)}, got {getattr(other, name)}"
            )
    refused = {
        "starts": problem.packed,
        "parents": problem.tree,
        "rotary": rotary is not None,
        "batch_invariant": problem.batch_invariant,
        "context": cache.context is not None or other.context is not None,
        "mask": not _sees_all_before(problem),
    }
    for name, given in refused.items():
        if given:
            wanted, remedy = _WANTED[name]
            raise ValueError(f"{name}: expected {wanted} beside prefix{remedy}")
    groups = checks.integers(
        "prefix.groups",
        prefix.groups,
        f"int32[{problem.sequences}] (which prefix each sequence has, -1 for none)",
        (problem.sequences,),
    )
    return Prefix(other, groups)


_WANTED = {
    "starts": ("None", "; pass q as [M, t, N, H]"),
    "parents": ("None", "; where drafts form a tree, share rows by PagedCache.fork instead"),
    "rotary": ("None", "; rotate q and K before, by positions that count the rows of the prefix"),
    "batch_invariant": ("False", ", whose sequences are decoded together"),
    "context": ("caches whose rows one device has", ""),
    "mask": (
        "no function and no left bound, and a right bound that is static and not negative,",
        "",
    ),
}


def over_shared(
    shared: SharedPrefixes, problem: DecodeProblem, inputs: DecodeInputs, run: Run
) -> tuple[Array, Array]:
    """(out, lse) of a call over a PagedCache."""
    own = inputs._replace(lengths=shared.own_lengths, page_table=shared.own_page_table)
    parts = inputs._replace(lengths=shared.lengths, page_table=shared.page_table, new_lengths=None)
    # Each row that sees a key sees one of its own.
    return _merged(shared.members, Call(problem, own), Call(problem, parts), run)


def over_prefix(
    prefix: Prefix, problem: DecodeProblem, inputs: DecodeInputs, run: Run
) -> tuple[Array, Array]:
    """(out, lse) of a call with a prefix. Sinks are added last: a row may see no key of its own."""
    cache, groups = prefix.cache, prefix.groups
    groups = jnp.where((groups >= 0) & (groups < cache.num_sequences), groups, -1)
    members = Members.of(groups[None], cache.num_sequences, problem.q_len)
    of_prefix = dataclasses.replace(
        problem,
        kind=cache.kind,
        cache_dtype=str(cache.dtype),
        head_dim=cache.stored_dims[0],
        v_head_dim=cache.stored_dims[1],
        capacities=cache.held,
        page_size=cache.page_size,
        pages=cache.pages,
        quantized=cache.quantized,
    )
    parts = inputs._replace(
        k_cache=cache.k,
        v_cache=cache.v,
        lengths=cache.lengths,
        page_table=cache.page_table,
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
        new_lengths=cache.new_lengths,
    )
    own = Call(dataclasses.replace(problem, sinks=False), inputs._replace(sinks=None))
    return _merged(members, own, Call(of_prefix, parts), run, inputs.sinks)


def _capacities(problem: DecodeProblem, parts: int) -> tuple[int, ...]:
    """Of each part: as many as the problem has sequences, or any number of parts of pages."""
    return problem.capacities if problem.kind != "paged" else problem.capacities[:1] * parts


def _columns(x: Array, dim: int) -> Array:
    """`dim` columns: without some that are 0, or with more of them."""
    return checks.widened(x[..., :dim], dim)


def _packed(members: Members, parts: Call, q: Array) -> Call:
    """The call of the rows that parts are read by."""
    tokens = members.rows.size
    problem = dataclasses.replace(
        parts.problem,
        sequences=members.number,
        capacities=_capacities(parts.problem, members.number),
        tokens=tokens,
        q_len=max(tokens, LEAST_BOUND),
        mask=FULL,
        sinks=False,
    )
    packed = parts.inputs._replace(
        q=q.reshape(-1, *q.shape[2:]),
        starts=members.starts,
        sinks=None,
        mask_left=None,
        mask_right=None,
    )
    return Call(problem, packed)


def _in_one_launch(
    members: Members, own: Call, parts: Call, run: Run
) -> tuple[Array, Array] | None:
    """Both calls over one cache, by a kernel that reads own rows beside shared ones."""
    q = own.inputs.q
    problem, packed = _packed(members, parts, q)
    merged = len(members.parts), q.shape[0], q.shape[1]
    both = dataclasses.replace(problem, merged=merged, own=own.problem)
    inputs = own.inputs
    rest = Own(inputs.lengths, inputs.page_table, inputs.new_lengths, inputs.sinks)
    into = Into(None, None, members.parts, members.places)
    return run.merged(both, packed._replace(rows=members.rows, into=into, own=rest))


def _merged(
    members: Members, own: Call, parts: Call, run: Run, sinks: Array | None = None
) -> tuple[Array, Array]:
    """Both calls, the second with the rows of `members`, as one. `sinks`: what neither has counted
    and the result is to.
    """
    same = own.inputs.k_cache is parts.inputs.k_cache and sinks is None
    if (
        own.inputs.q.size
        and same
        and (done := _in_one_launch(members, own, parts, run)) is not None
    ):
        return done
    out, lse = run.alone(*own)
    if not out.size:
        return out, lse
    # Caches of other dtypes may have other columns of zeros behind those that were asked for.
    out, q = _columns(out, parts.problem.v_head_dim), _columns(own.inputs.q, parts.problem.head_dim)
    problem, packed = _packed(members, parts, q)
    if sinks is None:
        into = Into(out, lse, members.parts, members.places)
        both = dataclasses.replace(problem, merged=(len(members.parts), q.shape[0], q.shape[1]))
        if (done := run.merged(both, packed._replace(rows=members.rows, into=into))) is not None:
            return done
    found, found_lse = run.alone(problem, packed._replace(q=packed.q[members.rows]))
    outs, lses = [out], [lse]
    for places in members.places:
        at = jnp.maximum(places, 0)
        by_row = jnp.where(places >= 0, found_lse[:, at], -jnp.inf)
        outs.append(found[at].reshape(out.shape))
        lses.append(by_row.reshape(-1, *lse.shape[::2]).swapaxes(0, 1))
    sums, total = merge_attention([x.astype(lse.dtype) for x in outs], lses)
    if sinks is not None:
        sums, total = add_sinks(sums, total, sinks)
    return sums.astype(out.dtype), total
