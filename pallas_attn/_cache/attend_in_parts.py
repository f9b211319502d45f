"""Attention over caches with rows that several sequences share: each part of the keys by itself.

A part is rows that some sequences share, read once, with all query rows of these sequences packed.
What each sequence has of its own is one more call. Partial results are merged by their log-sum-exp.
Every query sees all shared rows, which lie before the newest ones of each sequence.
"""

import dataclasses
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._cache import attend
from pallas_attn._cache.bind import LEAST_BOUND
from pallas_attn._cache.facts import Cache, check_reached, facts_of
from pallas_attn._call import checks
from pallas_attn._call.problem import DecodeInputs, DecodeProblem, Into
from pallas_attn._mesh import sharding
from pallas_attn.errors import described
from pallas_attn.masks import AT_RUN_TIME, FULL
from pallas_attn.merge import add_sinks, merge_attention
from pallas_attn.prefixes import Members, Now, Prefix, SharedPrefixes, Starts, for_state

Array = jax.Array


class Results(NamedTuple):
    out: Array
    lse: Array


class Call(NamedTuple):
    """A call of decode."""

    problem: DecodeProblem
    inputs: DecodeInputs
    implementation: str | None


def with_shared_prefixes(
    shared: SharedPrefixes, cache: Cache, call: Call, starts: Starts
) -> tuple[Array, Array]:
    """(out, lse) of a call with the argument `shared_prefixes`. `starts`: its argument, as it was
    given.
    """
    problem, inputs, _ = call
    table = getattr(cache.page_table, "shape", None)
    if not isinstance(shared, SharedPrefixes) or shared.own_page_table.shape != table:
        raise ValueError(
            "shared_prefixes: expected what cache.shared_prefixes() gave for this call's "
            f"PagedCache, got {type(shared).__name__} beside a {type(cache).__name__}"
        )
    if shared.page_size != problem.page_size:
        raise ValueError(
            f"shared_prefixes: expected those of a cache with pages of {problem.page_size} rows, "
            f"as this call's, got those of pages of {shared.page_size}; make them by this cache's "
            "shared_prefixes()"
        )
    rows = problem.q_len if problem.tokens is None else problem.tokens
    if rows and (rows, problem.packed) != (shared.tokens, shared.starts is not None):
        wanted, got = (
            f"{count} {'packed rows' if packed else 'tokens'}"
            for count, packed in (
                (rows, problem.packed),
                (shared.tokens, shared.starts is not None),
            )
        )
        raise ValueError(
            f"shared_prefixes: expected those of {wanted}, as many as q has, got those of {got}; "
            f"make them by shared_prefixes(tokens={rows}{', starts=starts' * problem.packed})"
        )
    plain = not (problem.shared_kv or problem.batch_invariant) and problem.score_program is None
    if not (rows and plain and _sees_all_before(problem) and shared.members.number):
        return attend.attend(*call)
    shared = for_state(shared, Now(cache.lengths, cache.page_table, inputs.starts), starts)
    own = inputs._replace(lengths=shared.own_lengths, page_table=shared.own_page_table)
    parts = inputs._replace(lengths=shared.lengths, page_table=shared.page_table, new_lengths=None)
    # Each row that sees a key sees one of its own.
    return _merged(shared.members, call._replace(inputs=own), call._replace(inputs=parts))


def with_prefix(prefix: Prefix, cache: Cache, call: Call, rotates: bool) -> tuple[Array, Array]:
    """(out, lse) of a call with the argument `prefix`; `rotates`: whether it has a rotary, too.
    Sinks are added last: a row may see no key of its own.
    """
    problem, inputs, implementation = call
    other: Cache = getattr(prefix, "cache", None)
    if not isinstance(prefix, Prefix) or not hasattr(other, "kind"):
        got = described(other if isinstance(prefix, Prefix) else prefix)
        got = f"a Prefix of {got}" if isinstance(prefix, Prefix) else got
        raise ValueError(
            f"prefix: expected Prefix(cache, groups) of one of the three caches, got {got}"
        )
    facts = facts_of(other)
    _check_fit(other, cache, problem, rotates)
    wanted = f"int32[{problem.sequences}] (which prefix each sequence has, -1 for none)"
    groups = checks.integers("prefix.groups", prefix.groups, wanted, (problem.sequences,))
    if (known := checks.known(groups)) is not None:
        check_reached("prefix.cache", other, known)
    groups = jnp.where((groups >= 0) & (groups < facts.sequences), groups, -1)
    members = Members.of_equal(groups[None], facts.sequences, problem.q_len)
    parts = inputs._replace(
        k_cache=other.k,
        v_cache=other.v,
        lengths=other.lengths,
        page_table=other.page_table,
        k_scale=other.k_scale,
        v_scale=other.v_scale,
        new_lengths=other.new_lengths,
    )
    of_cache = facts.of_problem()
    del of_cache["sequences"]  # the packed call has its own
    of_prefix = Call(dataclasses.replace(problem, **of_cache), parts, implementation)
    problem = dataclasses.replace(problem, sinks=False)
    own = Call(problem, inputs._replace(sinks=None), implementation)
    return _merged(members, own, of_prefix, inputs.sinks)


def _check_fit(other: Cache, cache: Cache, problem: DecodeProblem, rotates: bool) -> None:
    """ValueError where a cache holds no prefix of rows of another, or a call takes none."""
    for name in ("kv_heads", "head_dim", "v_head_dim", "layers", "shared_kv"):
        if getattr(other, name) != getattr(cache, name):
            raise ValueError(
                f"prefix: expected a cache whose {name} is that of the sequences' own, "
                f"{getattr(cache, name)}, got {getattr(other, name)}"
            )
    several = cache.context is not None or other.context is not None
    band = "no function and no left bound, and a right bound that is static and not negative,"
    by_fork = "; where drafts form a tree, share rows by PagedCache.fork instead"
    before = "; rotate q and K before, by positions that count the rows of the prefix"
    for refused, argument, wanted, remedy in (
        (problem.packed, "starts", "None", "; pass q as [M, t, N, H]"),
        (problem.tree, "parents", "None", by_fork),
        (rotates, "rotary", "None", before),
        (
            problem.batch_invariant,
            "batch_invariant",
            "False",
            ", whose sequences are decoded together",
        ),
        (several, "context", "caches whose rows one device has", ""),
        (not _sees_all_before(problem), "mask", band, ""),
        (problem.score_program is not None, "score", "None", "; give each sequence all its rows"),
    ):
        if refused:
            raise ValueError(f"{argument}: expected {wanted} beside prefix{remedy}")


def _sees_all_before(problem: DecodeProblem) -> bool:
    """Whether a query sees every key before its own position, and no function hides any."""
    if problem.mask_program is not None:
        return False
    left, right = problem.mask.left, problem.mask.right
    return left is None and (right is None or (right is not AT_RUN_TIME and right >= 0))


def _packed(members: Members, parts: Call, q: Array) -> Call:
    """The call of the packed rows that read the parts."""
    tokens, count = members.rows.size, members.number
    capacities = parts.problem.capacities
    problem = dataclasses.replace(
        parts.problem,
        sequences=count,
        # A cache of pages has room for any number of parts.
        capacities=capacities if parts.problem.kind != "paged" else capacities[:1] * count,
        tokens=tokens,
        q_len=max(tokens, LEAST_BOUND),
        mask=FULL,
        sinks=False,
    )
    packed = parts.inputs._replace(
        q=sharding.whole(q, q.ndim - 2).reshape(-1, *q.shape[-2:]),
        starts=members.starts,
        sinks=None,
        mask_left=None,
        mask_right=None,
    )
    return Call(problem, packed, parts.implementation)


def _merged(
    members: Members, own: Call, parts: Call, sinks: Array | None = None
) -> tuple[Array, Array]:
    """Both calls, the second with the rows of `members`, as one: it merges where a kernel can, else
    XLA does. `sinks`: those that neither call has counted.
    """
    out, lse = attend.attend(*own)
    if not out.size:
        return out, lse
    if not own.problem.packed:
        return _with_parts(members, Results(out, lse), own, parts, sinks)
    # Each packed row is a sequence of one: lse [N, tokens] becomes [tokens, N, 1].
    results = Results(out[:, None], lse.T[:, :, None])
    out, lse = _with_parts(members, results, own, parts, sinks)
    return out[:, 0], lse[:, :, 0].T


def _with_parts(
    members: Members, results: Results, own: Call, parts: Call, sinks: Array | None
) -> tuple[Array, Array]:
    """The results of the call `own`, [M, t, N, Hv] and [M, N, t], and those of the parts as one."""
    # Caches of other dtypes may have other columns of zeros behind those that were asked for.
    out = _columns(results.out, parts.problem.v_head_dim)
    problem, packed, _ = _packed(members, parts, _columns(own.inputs.q, parts.problem.head_dim))
    if sinks is None:
        sizes = len(members.parts), out.shape[0], out.shape[1]
        both = dataclasses.replace(problem, merged=sizes)
        into = Into(out, results.lse, members.parts, members.places)
        more = packed._replace(rows=members.rows, into=into)
        if (merged := attend.attend_merged(both, more, own.implementation)) is not None:
            return merged
    q = packed.q
    q = sharding.on_automatic_axes(operator.getitem, (q, members.rows), sharding.spec_of(q))
    of_parts = attend.attend(problem, packed._replace(q=q), own.implementation)
    arrays = members, (out, results.lse), of_parts, sinks
    specs = sharding.spec_of(out), sharding.spec_of(results.lse)
    return sharding.on_automatic_axes(_merged_by_xla, arrays, specs)


def _columns(x: Array, dim: int) -> Array:
    """`dim` columns: without some that are 0, or with more of them."""
    return checks.widened(x if x.shape[-1] <= dim else x[..., :dim], dim)


def _merged_by_xla(
    members: Members, own: tuple[Array, Array], of_parts: tuple[Array, Array], sinks: Array | None
) -> tuple[Array, Array]:
    """The results of the sequences' own rows and those of packed rows as one."""
    (out, lse), (packed_out, packed_lse) = own, of_parts
    outs, lses = [out], [lse]
    for places in members.places:
        at = jnp.maximum(places, 0)
        by_row = jnp.where(places >= 0, packed_lse[:, at], -jnp.inf)
        outs.append(packed_out[at].reshape(out.shape))
        lses.append(by_row.reshape(-1, *lse.shape[::2]).swapaxes(0, 1))
    sums, total = merge_attention([x.astype(lse.dtype) for x in outs], lses)
    if sinks is not None:
        sums, total = add_sinks(sums, total, sinks)
    return sums.astype(out.dtype), total
