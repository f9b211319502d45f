"""Rows that several sequences share, read once: which pages are found to be shared, that decoding
gives what it gives without sharing, and the Hopper kernel that merges the parts.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import prefixes
from pallas_attn._cache import attend
from pallas_attn.kernels.prefill import sm90 as kernel
from tests.support import budget, hard_data, mosaic, subjects
from tests.support.quantized import quantized

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

SIZE = 4  # rows of a page
HEADS = {"kv_heads": 2, "head_dim": 8}
SINKS = hard_data.sinks_without_end(np.arange(4, dtype=np.float32))


LEAST_SAVED = prefixes.LEAST_SAVED  # rows


@pytest.fixture(autouse=True)
def every_page_counts(monkeypatch):
    """Else tests would need long sequences."""
    monkeypatch.setattr(prefixes, "LEAST_SAVED", 1)


def rows_of(rng, *sizes, dtype=np.float32):
    return jnp.asarray(rng.standard_normal(sizes, np.float32).astype(jnp.dtype(dtype)))


def cache_of(rng, table, lengths, *, page_size=SIZE, pages=40, dtype="float32", **sizes):
    """A cache with these pages, without a program that makes it; NaN in pages of no sequence."""
    table, sizes = np.asarray(table), HEADS | sizes
    shape = (len(table), pages, page_size)
    shapes = jax.eval_shape(
        lambda: pa.PagedCache.create(
            *shape, capacity=table.shape[1] * page_size, dtype=dtype, **sizes
        )
    )
    cache = jax.tree.map(lambda x: jnp.asarray(np.zeros(x.shape, x.dtype)), shapes)
    pools = rng.standard_normal((2, *cache.k.shape), np.float32)
    pools[:, ~np.isin(np.arange(pages), table)] = np.nan
    return dataclasses.replace(
        cache,
        k=jnp.asarray(pools[0].astype(jnp.dtype(dtype))),
        v=jnp.asarray(pools[1].astype(jnp.dtype(dtype))),
        page_table=jnp.asarray(table, jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
    )


_append = jax.jit(lambda cache, new, counts: pa.append_kv(cache, new, -new, new_lengths=counts))
_fork, _free = jax.jit(pa.PagedCache.fork), jax.jit(pa.PagedCache.free)


def forked(rng, tokens):
    """A cache of six sequences after random forks, appends and frees, `tokens` new rows last; NaN
    in free pages.
    """
    cache, most = cache_of(rng, np.full((6, 24), -1), [0] * 6), 24
    cache = dataclasses.replace(
        cache, free_list=jnp.arange(40, dtype=jnp.int32), num_free=jnp.int32(40)
    )
    for step in range(12):
        source, target, emptied = rng.integers(0, 6, 3)
        counts = rng.integers(0, most if step < 4 else 3, 6) * (rng.random(6) < 0.3)
        counts[0] = most if step == 0 else counts[0]
        new = rows_of(rng, 6, most, 2, 8)
        cache = _append(cache, new, jnp.asarray(counts, jnp.int32))
        cache = _fork(cache, jnp.int32(source), jnp.int32(target))
        cache = _free(cache, jnp.int32(emptied)) if rng.random() < 0.2 else cache
    cache = _append(cache, rows_of(rng, 6, most, 2, 8), jnp.full(6, tokens, jnp.int32))
    nobody = (np.asarray(cache.holders) == 0)[:, None, None, None]
    k, v = (jnp.asarray(np.where(nobody, np.nan, np.asarray(x))) for x in (cache.k, cache.v))
    return dataclasses.replace(cache, k=k, v=v)


def unshared(cache):
    """The same rows, each sequence's in an array of its own; 0 where there are none."""
    table = np.asarray(cache.page_table)
    inside = np.where(table >= 0, table, 0)
    live = np.arange(cache.capacities[0]) < np.asarray(cache.lengths)[:, None]
    live &= np.repeat(table >= 0, cache.page_size, axis=1)
    made = {}
    for name in ("k", "v"):
        rows = np.moveaxis(np.asarray(getattr(cache, name))[inside], 2, 1)
        rows = rows.reshape(len(table), cache.kv_heads, -1, rows.shape[-1])
        made[name] = jnp.asarray(np.where(live[:, None, :, None], rows, 0).astype(rows.dtype))
    return pa.StackedCache(**made, lengths=cache.lengths, new_lengths=cache.new_lengths)


def close(got, want, atol=2e-6):
    for mine, other in zip(got, want, strict=True):
        mine, other = (np.asarray(x, np.float32) for x in (mine, other))
        np.testing.assert_allclose(mine, other, atol=atol, rtol=atol, equal_nan=True)


# ---- search for shared prefixes ------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("tokens", "levels"))
def found_by(cache, tokens, levels):
    return cache.shared_prefixes(tokens=tokens, levels=levels)


def assert_covers(cache, shared):
    """Parts and own rows of each sequence are its rows, in order, and the newest are its own."""
    table, lengths = np.asarray(cache.page_table), np.asarray(cache.lengths)
    sequences = len(lengths)
    members = jax.tree.map(np.asarray, shared.members)
    assert (np.diff(members.starts) >= 0).all()
    for m in range(sequences):
        entries, length = [], 0
        for level in range(len(members.parts)):
            at = slice(m * shared.tokens, (m + 1) * shared.tokens)
            part, places = members.parts[level][at], members.places[level][at]
            assert (part == part[0]).all()
            if part[0] < 0:
                assert (places < 0).all()
                continue
            start, end = members.starts[part[0] : part[0] + 2]
            assert ((places >= start) & (places < end)).all()
            assert (members.rows[places] == np.arange(at.start, at.stop)).all()
            assert end - start >= 2 * shared.tokens
            rows = int(shared.lengths[part[0]])
            assert rows % SIZE == 0
            entries += list(np.asarray(shared.page_table)[part[0], : rows // SIZE])
            length += rows
        own = int(shared.own_lengths[m])
        assert length + own == lengths[m] and (not length or own >= shared.tokens)
        left = -(-max(own, 0) // SIZE)
        entries += list(np.asarray(shared.own_page_table)[m, :left])
        np.testing.assert_array_equal(entries, table[m, : len(entries)])
    return int((np.asarray(shared.lengths) > 0).sum())


def test_any_table_is_covered(rng):
    """Pages that recur anywhere, entries that are no pages, lengths of all of int32."""
    sequences, width = 7, 9
    cache = pa.PagedCache.create(sequences, 12, SIZE, 1, 8, capacity=width * SIZE)
    parts = 0
    for trial in range(24):
        table = rng.integers(-2, 14, (sequences, width))
        if trial % 2:  # runs that begin alike
            table[:] = rng.integers(0, 12, width)
            for _ in range(rng.integers(1, 9)):
                m, at = rng.integers(0, sequences), rng.integers(0, width)
                table[m:, at:] = rng.integers(-1, 12, width - at)
        near = rng.integers(-2, width * SIZE + 6, sequences)
        lengths = np.where(rng.random(sequences) < 0.1, rng.choice([2**31 - 1, -(2**31)]), near)
        held = dataclasses.replace(
            cache,
            page_table=jnp.asarray(table, jnp.int32),
            lengths=jnp.asarray(lengths, jnp.int32),
        )
        parts += assert_covers(held, found_by(held, 1 + trial % 3 % 2, 1 + trial % 3))
    assert parts > 24


def test_what_is_shared_is_found():
    """A system prompt, two groups beyond it, one sequence alone; and nothing but from the start."""
    cache = pa.PagedCache.create(6, 40, SIZE, 1, 8, capacity=6 * SIZE)
    table = np.arange(36).reshape(6, 6)
    table[:5, :2] = table[0, :2]
    table[1:3, 2:4] = table[1, 2:4]
    table[3:5, 2] = table[3, 2]
    held = dataclasses.replace(
        cache,
        page_table=jnp.asarray(table, jnp.int32),
        lengths=jnp.asarray([20, 20, 17, 20, 20, 20], jnp.int32),
    )
    shared = found_by(held, 1, 2)
    assert_covers(held, shared)
    np.testing.assert_array_equal(shared.lengths, [8, 0, 0, 8, 4, 0])
    np.testing.assert_array_equal(shared.own_lengths, [12, 4, 1, 8, 8, 20])
    assert_covers(held, found_by(held, 2, 2))  # one page less of the third
    table[:, 0] = range(6)
    held = dataclasses.replace(held, page_table=jnp.asarray(table, jnp.int32))
    assert not np.asarray(found_by(held, 1, 2).lengths).any()


# ---- decoding ------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("levels", "tokens", "mask"))
def both(q, cache, copy, *, levels, tokens=1, **options):
    shared = cache.shared_prefixes(tokens=tokens, levels=levels)
    return (
        pa.decode_attention_with_lse(q, cache, shared_prefixes=shared, **options),
        pa.decode_attention_with_lse(q, copy, **options),
        shared,
    )


@pytest.mark.parametrize(
    "tokens, levels, options",
    [(1, 2, {"sinks": SINKS}), (3, 3, {"mask": pa.FULL})],
)
def test_decoding_equals_that_of_an_unshared_copy(rng, tokens, levels, options):
    """Pages that nobody holds are NaN; sequences that overflow are NaN in both."""
    parts = 0
    for _ in range(4):
        cache = forked(rng, tokens)
        q = rows_of(rng, 6, tokens, 4, 8)
        got, want, shared = both(q, cache, unshared(cache), levels=levels, tokens=tokens, **options)
        lost = np.asarray(cache.overflowed)
        close([x[~lost] for x in got], [x[~lost] for x in want])
        assert all(np.isnan(np.asarray(x)[lost]).all() for x in got)
        parts += assert_covers(cache, shared)
    assert parts


def test_all_the_same_and_one_alone(rng):
    for sequences in (1, 5):
        table = np.repeat(np.arange(6)[None], sequences, axis=0)
        table[:, 5] = range(5, 5 + sequences)
        cache = cache_of(rng, table, [21] * sequences)
        q = rows_of(rng, sequences, 1, 4, 8)
        got, want, shared = both(q, cache, unshared(cache), levels=1)
        assert sum(np.asarray(shared.lengths)) == (20 if sequences > 1 else 0)
        close(got, want)


def test_where_every_sequence_reads_its_own(rng):
    """Windows, bits that do not depend on others: the call is one without."""
    cache = cache_of(rng, [[0, 1, 2], [0, 1, 3], [0, 4, 5]], [9, 10, 11])
    shared, q = found_by(cache, 1, 2), rows_of(rng, 3, 4, 8)

    def calls(options):
        call = functools.partial(pa.decode_attention, q, cache, **options)
        traced = [jax.make_jaxpr(call)(**x) for x in ({}, {"shared_prefixes": shared})]
        return [str(program).count("exp ") for program in traced]

    for options in (
        {"mask": pa.sliding_window(9)},
        {"mask": pa.Mask(right=-1)},
        {"batch_invariant": True},
    ):
        plain, sharing = calls(options)
        assert plain == sharing > 0
    plain, sharing = calls({})
    assert sharing > plain


@pytest.mark.by_xla
def test_transforms(rng):
    """A scan over layers with what was found once, and vmap over queries."""
    cache = cache_of(rng, [[0, 1, 2], [0, 1, 3], [0, 4, 5]], [9, 10, 11])
    q = rows_of(rng, 2, 3, 4, 8)

    @jax.jit
    def scanned(q, cache):
        shared = cache.shared_prefixes()
        pools = [jnp.stack([x, -x]) for x in (cache.k, cache.v)]
        layered = dataclasses.replace(cache, k=pools[0], v=pools[1])

        def of_layer(carry, each):
            rows, layer = each
            out = pa.decode_attention(rows, layered, layer=layer, shared_prefixes=shared)
            return carry, out

        each = jax.vmap(lambda q: pa.decode_attention(q, cache, shared_prefixes=shared))(q)
        plain = jax.vmap(lambda q: pa.decode_attention(q, cache))(jnp.concatenate([q, -q[1:]]))
        return jax.lax.scan(of_layer, 0, (q, jnp.arange(2, dtype=jnp.int32)))[1], each, plain

    layers, each, plain = scanned(q, cache)
    close(each, plain[:2])
    close(layers, [plain[0], -plain[2]])


# ---- packed rows ---------------------------------------------------------------------------------


def draw_starts(rng, sequences, rows):
    """Rows of each sequence, some of which have none or many; a few rows belong to nobody."""
    counts = rng.integers(0, 4, sequences) * (rng.random(sequences) < 0.8)
    counts[rng.integers(0, sequences)] += rows // 3
    counts = np.minimum(counts, np.maximum(rows - np.cumsum(counts) + counts - 1, 0))
    return np.cumsum([int(rng.integers(0, 2)), *counts]).astype(np.int32)


@functools.partial(jax.jit, static_argnames=("levels", "tokens"))
def both_packed(q, cache, copy, starts, *, levels, tokens, **options):
    shared = cache.shared_prefixes(tokens=tokens, levels=levels, starts=starts)
    options |= {"starts": starts}
    return (
        pa.decode_attention_with_lse(q, cache, shared_prefixes=shared, **options),
        pa.decode_attention_with_lse(q, copy, **options),
        shared,
    )


def test_packed_rows_equal_those_of_an_unshared_copy(rng):
    """A token of some, many rows of others, none of the rest; up to three levels, and sinks."""
    parts, tokens = 0, 20
    for trial in range(12):
        cache, starts = forked(rng, tokens // 3 + 3), draw_starts(rng, 6, tokens)
        q = rows_of(rng, tokens, 4, 8)
        options = {"sinks": jnp.asarray(SINKS)} if trial % 2 else {}
        got, want, shared = both_packed(
            q, cache, unshared(cache), jnp.asarray(starts), levels=1 + trial % 3, tokens=tokens,
            **options,
        )  # fmt: skip
        lost = np.asarray(cache.overflowed)
        owner = np.searchsorted(starts, np.arange(tokens), side="right") - 1
        owned = (owner >= 0) & (owner < 6)
        lost = owned & lost[np.clip(owner, 0, 5)]
        for n, axis in enumerate((0, 1)):
            mine, other = (np.moveaxis(np.asarray(x[n]), axis, 0) for x in (got, want))
            close([mine[~lost]], [other[~lost]])
            assert np.isnan(mine[lost]).all()
        members = jax.tree.map(np.asarray, shared.members)
        for level, places in enumerate(members.places):
            there = places >= 0
            assert (members.rows[places[there]] == np.flatnonzero(there)).all()
            assert (members.parts[level][there] >= 0).all() and owned[there].all()
            parts += len(set(members.parts[level][there]))
    assert parts > 5


def test_packed_tokens_are_shared_as_unpacked_ones(rng):
    """One row of each sequence: the same parts, members and own rows."""
    cache = forked(rng, 1)
    plain = found_by(cache, 1, 2)
    starts = jnp.asarray(np.arange(7, dtype=np.int32))
    packed = cache.shared_prefixes(tokens=6, levels=2, starts=starts)
    for name in ("lengths", "page_table", "own_lengths", "own_page_table", "covered"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(packed, name))
    used = int(plain.members.starts[-1])
    assert used
    for mine, other in zip(plain.members, packed.members, strict=True):
        if mine is plain.members.rows:
            mine, other = mine[:used], other[:used]
        np.testing.assert_array_equal(mine, other)


def test_packed_rows_of_another_state(rng):
    """Sequences with other rows than those that were searched read all that they have."""
    table = [[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 6, 7], [0, 1, 8, 9]]
    cache = cache_of(rng, table, [12, 13, 14, 15])
    before = jnp.asarray([0, 1, 4, 6, 7], np.int32)

    @jax.jit
    def call(q, cache, starts):
        shared = cache.shared_prefixes(tokens=9, levels=1, starts=before)
        now = prefixes.Now(cache.lengths, cache.page_table, starts)
        return (
            pa.decode_attention(q, cache, starts=starts, shared_prefixes=shared),
            pa.decode_attention(q, cache, starts=starts),
            prefixes.for_state(shared, now, starts).covered,
        )

    q = rows_of(rng, 9, 4, 8)
    for starts, covered in (
        ([0, 1, 4, 6, 7], [2, 2, 2, 2]),
        ([0, 1, 4, 6, 9], [2, 2, 2, 0]),
        ([0, 0, 4, 6, 7], [0, 0, 2, 2]),
        ([1, 1, 1, 1, 1], [0, 0, 0, 0]),
    ):
        got, want, kept = call(q, cache, jnp.asarray(starts, jnp.int32))
        close([got], [want])
        assert list(np.asarray(kept)) == covered


@functools.partial(jax.jit, static_argnames="tokens")
def of_another_state(q, before, after, copy, *, tokens):
    """With what was found in the state `before`, and without sharing."""
    shared = before.shared_prefixes(tokens=tokens)
    return (
        pa.decode_attention_with_lse(q, after, shared_prefixes=shared),
        pa.decode_attention_with_lse(q, copy),
        prefixes.for_state(shared, prefixes.Now(after.lengths, after.page_table)),
    )


@pytest.mark.parametrize("tokens", [1, 2])
def test_prefixes_of_another_state(rng, tokens):
    """Sequences that grew keep their parts; those that were freed, forked anew, cut, or that
    overflow read all that they have.
    """
    table = np.full((6, 8), -1)
    table[:, :3] = [[0, 1, 2], [0, 1, 3], [0, 1, 4], [0, 1, 5], [0, 1, 6], [7, 8, 9]]
    before = cache_of(rng, table, [10, 10, 11, 12, 12, 9])
    before = dataclasses.replace(
        before,
        free_list=jnp.asarray(np.arange(39, -1, -1, dtype=np.int32)),
        num_free=jnp.int32(30),
        holders=jnp.asarray(np.bincount(table[table >= 0], minlength=40), jnp.int32),
    )
    grown = _append(before, rows_of(rng, 6, 9, 2, 8), jnp.asarray([1, 9, 0, 4, 2, 3], jnp.int32))
    other = _fork(_fork(grown, jnp.int32(5), jnp.int32(0)), jnp.int32(5), jnp.int32(3))
    other = _append(_free(other, jnp.int32(2)), rows_of(rng, 6, 9, 2, 8), jnp.full(6, tokens))
    cut = dataclasses.replace(grown, lengths=jnp.asarray([8, 9, 1, 10, 40, 0], jnp.int32))
    q = rows_of(rng, 6, tokens, 4, 8)
    kept = []
    for after in (before, grown, other, cut):
        copy = unshared(after)
        got, want, shared = of_another_state(q, before, after, copy, tokens=tokens)
        close(got, want)
        kept.append(list(np.asarray(shared.covered)))
    assert kept == [
        [2, 2, 2, 2, 2, 0],
        [2, 2, 2, 2, 2, 0],
        [0, 2, 0, 0, 2, 0],
        [0, 2 if tokens == 1 else 0, 0, 2, 0, 0],
    ]


def test_layers_of_a_step_compare_nothing(rng):
    """The arrays that were searched are those of the call: no operation but decoding's."""
    cache = cache_of(rng, [[0, 1, 2], [0, 1, 3], [0, 4, 5]], [9, 10, 11])
    shared, written = cache.shared_prefixes(), dataclasses.replace(cache, k=cache.v)
    now = prefixes.Now(written.lengths, written.page_table)
    assert prefixes.for_state(shared, now) is shared
    assert prefixes.for_state(shared, now._replace(lengths=cache.lengths + 1)) is not shared
    starts = jnp.asarray(np.arange(4, dtype=np.int32))
    packed, same = cache.shared_prefixes(tokens=3, starts=starts), now._replace(starts=starts)
    assert prefixes.for_state(packed, same, starts) is packed
    assert prefixes.for_state(packed, same, starts + 0) is not packed
    donated = jax.jit(lambda cache: cache.extend(1), donate_argnums=0)(cache)
    q = rows_of(rng, 3, 4, 8)
    close(*(pa.decode_attention_with_lse(q, donated, shared_prefixes=x) for x in (None, shared)))


def step_of_a_model(q, rows, cache):
    """Layers in a loop that carries the cache, with the prefixes that were found before it."""
    shared = cache.shared_prefixes()

    def layer(cache, number):
        cache = pa.write_kv(cache, rows, rows, layer=number)
        return cache, pa.decode_attention(q, cache, layer=number, shared_prefixes=shared)

    return jax.lax.scan(layer, cache, jnp.arange(4, dtype=jnp.int32))


@pytest.mark.machine_code
@pytest.mark.guards
def test_layers_in_a_loop_compare_nothing():
    """XLA knows that the arrays that a loop carries are those that were searched: it launches
    nothing of `_renewed`. The append, own rows, shared ones and their merging are launches.
    """
    make = functools.partial(pa.PagedCache.create, 4, 64, 64, 2, 128, capacity=1024, layers=4)
    q, rows = (jax.ShapeDtypeStruct((4, heads, 128), jnp.bfloat16) for heads in (8, 2))
    report = mosaic.compile_for(step_of_a_model, q, rows, jax.eval_shape(make))
    loop = report.hlo[: report.hlo.index("\nENTRY")]
    assert report.launches == 4 and "while/body" in loop
    assert not re.findall(r" fusion\(.*jit\(_renewed\)", loop)


# ---- a prefix by hand ----------------------------------------------------------------------------


@jax.jit
def with_prefix(q, own, prefix, joined, options):
    return (
        pa.decode_attention_with_lse(q, own, prefix=prefix, **options),
        pa.decode_attention_with_lse(q, joined, **options),
    )


def filled(rng, kind, lengths, dtype="float32", capacity=24):
    count = len(lengths)
    if kind == "paged":
        cache = pa.PagedCache.create(count, 40, SIZE, **HEADS, capacity=capacity, dtype=dtype)
    elif kind == "stacked":
        cache = pa.StackedCache.create(count, capacity, **HEADS, dtype=dtype)
    else:
        cache = pa.PerSequenceCache.create([capacity + 4 * m for m in range(count)], **HEADS,
                                           dtype=dtype)  # fmt: skip
    k, v = (rows_of(rng, count, max(lengths), 2, 8) for _ in range(2))
    return pa.append_kv(cache, k, v, new_lengths=jnp.asarray(lengths, jnp.int32)), k, v


def wider(cache):
    """With columns of zeros behind those that were asked for, as kernels want some caches."""
    k, v = (
        jax.tree.map(lambda x, n=n: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, n)]), side)
        for side, n in ((cache.k, 8), (cache.v, 4))
    )
    return dataclasses.replace(cache, k=k, v=v, dims=(8, 8))


@pytest.mark.parametrize("kind", ["per_sequence", "stacked"])
def test_a_prefix_stands_before_the_rows_of_a_sequence(rng, kind):
    """The result is that of one cache with both, also if one of them is empty or there is no
    prefix; one of the two has more columns.
    """
    groups = np.array([1, -1, 0, 1, 2, 2**31 - 1, 1])
    first, second = [0, 24, 13], [5, 1, 0, 2, 24, 7, 0]
    prefix, *of_prefix = filled(rng, kind, first)
    own, *of_own = filled(rng, {"per_sequence": "stacked", "stacked": "paged"}[kind], second)
    own, prefix = (own, wider(prefix)) if kind == "stacked" else (wider(own), prefix)
    rows = [np.zeros((7, 60, 2, 8), np.float32) for _ in range(2)]
    lengths = []
    for m, group in enumerate(groups):
        n = first[group] if 0 <= group < 3 else 0
        for both, left, other in zip(rows, of_prefix, of_own, strict=True):
            both[m, :n] = left[group if n else 0, :n]
            both[m, n : n + second[m]] = other[m, : second[m]]
        lengths.append(n + second[m])
    joined = pa.StackedCache.create(7, 60, **HEADS, dtype="float32")
    joined = pa.append_kv(joined, *rows, new_lengths=jnp.asarray(lengths, jnp.int32))
    q, named = rows_of(rng, 7, 4, 8), pa.Prefix(prefix, jnp.asarray(groups, jnp.int32))
    options = {"sinks": jnp.asarray(SINKS)}
    close(*with_prefix(q, own, named, joined, options))
    lost = dataclasses.replace(prefix, lengths=jnp.asarray([0, 99, 13], jnp.int32))
    named = pa.Prefix(lost, jnp.asarray(groups, jnp.int32))
    (out, _), _ = with_prefix(q, own, named, joined, options)
    np.testing.assert_array_equal(np.isnan(out).all(axis=(1, 2)), groups == 1)


@pytest.mark.parametrize("subject", subjects.rows("decode", but=("kernels_float32",)))
def test_a_quantised_prefix(rng, subject):
    """33 rows of int8 pages: the kernel reads them rounded to q's dtype. lse is as far off as that
    makes it, and no farther than docs/accuracy.md says.
    """
    sizes, lengths, groups = (1, 256), (83, 3), np.array([1, 0])
    rows = [rng.standard_normal((2, 83, 1, 256), np.float32) for _ in "kv"]
    prefix = pa.PagedCache.create(2, 24, 8, *sizes, capacity=88, dtype="int8")
    prefix = pa.append_kv(
        prefix, *rows, new_lengths=jnp.asarray(lengths), implementation="reference"
    )
    own = [rows_of(rng, 2, 33, 1, 256, dtype=subject.dtype) for _ in "kv"]
    cache = pa.StackedCache.create(2, 40, *sizes, dtype=subject.dtype)
    cache = pa.append_kv(cache, *own, implementation="reference")
    q = rows_of(rng, 2, 33, 4, 256, dtype=subject.dtype)

    def call(q, cache, prefix, *, implementation):
        named = pa.Prefix(prefix, jnp.asarray(groups, jnp.int32))
        how = {"prefix": named, "implementation": implementation}
        return pa.decode_attention_with_lse(q, cache, **how)

    out, lse = subject.call(call, q=q, cache=cache, prefix=prefix)
    first = np.arange(83) < np.array(lengths)[groups][:, None]
    near = np.broadcast_to(np.tri(33, dtype=bool), (2, 33, 33))
    seen = np.concatenate([np.repeat(first[:, None], 33, axis=1), near], axis=2)
    arguments = {"q": q, "mask_array": seen[:, None]}
    for name, x, mine in zip("kv", rows, own, strict=True):
        numbers, scales = quantized(x, "int8")
        x = (numbers * np.float64(1) * scales[..., None])[groups]
        arguments[name] = np.concatenate([x, np.asarray(mine, np.float64)], axis=1)
    expected = budget.over_quantized(arguments)
    budget.check({"out": out, "lse": lse}, expected)
    assert np.abs(lse - expected.oracle["lse"]).max() < 8e-3


def test_what_is_not_taken(rng):
    cache, q = cache_of(rng, [[0, 1], [0, 2]], [5, 6]), rows_of(rng, 2, 4, 8)
    other, groups = unshared(cache), jnp.asarray(np.zeros(2, np.int32))
    angles = jnp.asarray(np.zeros((60, 4), np.float32))
    shared, prefix = found_by(cache, 1, 1), pa.Prefix(other, groups)
    arguments, score = {"prefix": prefix}, pa.score_fn(lambda s, b, h, q, kv: s - (q - kv))
    wrong = dataclasses.replace(other, k=other.k[:, :1], v=other.v[:, :1])
    starts = jnp.asarray(np.arange(3, dtype=np.int32))
    for text, options in {
        "starts: expected None beside prefix; pass q": arguments | {"starts": starts},
        "rotary: expected None beside prefix; rotate": arguments
        | {"rotary": pa.Rotary(angles, angles)},
        "batch_invariant: expected False beside prefix,": arguments | {"batch_invariant": True},
        "mask: expected no function and no left bound": arguments | {"mask": pa.sliding_window(3)},
        "score: expected None beside prefix; give": arguments | {"score": score},
        "parents: expected None beside prefix; where": arguments | {"parents": groups[:, None]},
        "shared_prefixes: expected None beside prefix": arguments | {"shared_prefixes": shared},
        r"prefix: expected Prefix\(cache, groups\)": {"prefix": other},
        r"prefix: expected Prefix.*, got a Prefix of float32\[64, 64\]$": {
            "prefix": pa.Prefix(jnp.ones((64, 64)), groups)
        },
        r"prefix.groups: expected int32\[2\]": {"prefix": pa.Prefix(other, groups[:1])},
        "prefix: expected a cache whose kv_heads": {"prefix": pa.Prefix(wrong, groups)},
    }.items():
        with pytest.raises(ValueError, match=text):
            pa.decode_attention(q, cache, **options)
    two = jnp.asarray(np.zeros((2, 2, 4, 8), np.float32))
    packed = cache.shared_prefixes(tokens=2, starts=starts)
    for text, rows, made, options in (
        (r"2 tokens, as many as q has, got those of 1 tokens; .*\(tokens=2\)", two, shared, {}),
        (r"1 tokens, as many as q has, got those of 2 packed rows; .*\(tokens=1\)", q, packed, {}),
        (r"2 packed rows, .*got those of 1 tokens; .*\(tokens=2, starts=starts\)", q, shared,
         {"starts": starts}),
        (r"4 packed rows, .*got those of 2 packed rows", two.reshape(4, 4, 8), packed,
         {"starts": starts}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"shared_prefixes: expected those of {text}"):
            pa.decode_attention(rows, cache, shared_prefixes=made, **options)
    with pytest.raises(ValueError, match=r"starts: expected int32\[3\]"):
        cache.shared_prefixes(tokens=2, starts=starts[:2])
    with pytest.raises(ValueError, match="shared_prefixes: expected what cache.shared_p"):
        pa.decode_attention(q, other, shared_prefixes=shared)
    for options in (arguments, {"shared_prefixes": shared}):  # no rows share no prefix
        assert pa.decode_attention(q[:, None][:, :0], cache, **options).shape == (2, 0, 4, 8)
    with pytest.raises(ValueError, match="levels: expected an int of at least 1"):
        cache.shared_prefixes(levels=0)


def test_what_saves_little_is_not_shared(rng, monkeypatch):
    """By the threshold that users have: two sequences read `LEAST_SAVED` rows once."""
    monkeypatch.setattr(prefixes, "LEAST_SAVED", LEAST_SAVED)
    size = 64
    enough = LEAST_SAVED // size
    for pages, saved in ((enough, enough), (enough - 1, 0)):
        table = np.arange(2 * (enough + 1)).reshape(2, enough + 1)
        table[1, :pages] = table[0, :pages]
        cache = cache_of(rng, table, [size * (enough + 1)] * 2, page_size=size)
        shared = cache.shared_prefixes(tokens=1, levels=1)  # not `found_by`, which may be traced
        assert list(np.asarray(shared.lengths)) == [saved * size]


# ---- the kernel ----------------------------------------------------------------------------------


def by_kernel(config, launches):
    """In place of `attend.attend_merged`: shared parts by the kernel, in the interpreter, which
    appends to `launches`.
    """

    def merge(problem, inputs, implementation):
        problem = dataclasses.replace(problem, gpu="sm90")
        assert kernel.limit(problem) is None
        launches.append(problem.merged)
        with mosaic.interpret():
            return jax.block_until_ready(kernel.run(inputs, problem, config))

    return merge


@pytest.mark.guards
@pytest.mark.parametrize(
    "tokens, heads, warpgroups, grid", [(3, 12, 2, 2), (1, 4, 2, 2), (2, 5, 2, 2), (3, 12, 1, 16)]
)
def test_interpreted(rng, monkeypatch, tokens, heads, warpgroups, grid):
    """Two levels, q tiles of both consumers and of one, lengths that end within a tile; in pairs of
    blocks, where they are 16.
    """
    launches: list[tuple] = []
    config = kernel.Config(warpgroups, block_kv=64, q_slots=1, grid=grid)
    table = np.arange(100).reshape(5, 20)
    table[:4, :10] = table[0, :10]
    table[1:3, :12] = table[1, :12]
    table[1:3, 10:12] = table[1, 10:12]
    sizes = {"kv_heads": 1, "head_dim": 64, "page_size": 8, "pages": 101, "dtype": "bfloat16"}
    cache = cache_of(rng, table, [84, 120, 100 + tokens, 83, 5], **sizes)
    q = rows_of(rng, 5, tokens, heads, 64, dtype="bfloat16")
    shared = found_by(cache, tokens, 2)
    assert list(np.asarray(shared.lengths)) == [80, 0, 16, 0]
    monkeypatch.setattr(attend, "attend_merged", by_kernel(config, launches))
    sinks = jnp.asarray(hard_data.sinks_without_end(np.arange(heads, dtype=np.float32)))
    got = pa.decode_attention_with_lse(q, cache, shared_prefixes=shared, sinks=sinks)
    want = pa.decode_attention_with_lse(q, cache, sinks=sinks)
    assert len(launches) == 1
    close(got[:1], want[:1], 2 * 2.0**-7)
    close(got[1:], want[1:], 1e-5)


@pytest.mark.guards
def test_packed_rows_interpreted(rng, monkeypatch):
    """A token, a chunk of a prompt, none and three rows; one row belongs to nobody."""
    launches: list[tuple] = []
    config = kernel.Config(2, block_kv=64, q_slots=1, grid=2)
    table = np.arange(80).reshape(4, 20)
    table[:4, :10] = table[0, :10]
    table[1:4, 10:12] = table[1, 10:12]
    sizes = {"kv_heads": 1, "head_dim": 64, "page_size": 8, "pages": 101, "dtype": "bfloat16"}
    cache = cache_of(rng, table, [84, 120, 100, 110], **sizes)
    starts = jnp.asarray(np.array([0, 1, 20, 20, 23], np.int32))
    q = rows_of(rng, 24, 5, 64, dtype="bfloat16")
    shared = cache.shared_prefixes(tokens=24, starts=starts)
    assert list(np.asarray(shared.lengths)) == [80, 0, 16, 0]
    monkeypatch.setattr(attend, "attend_merged", by_kernel(config, launches))
    got = pa.decode_attention_with_lse(q, cache, shared_prefixes=shared, starts=starts)
    want = pa.decode_attention_with_lse(q, cache, starts=starts)
    assert launches == [(2, 24, 1)]
    close(got[:1], want[:1], 2 * 2.0**-7)
    close(got[1:], want[1:], 1e-5)


@pytest.mark.guards
def test_many_partials_interpreted(rng, monkeypatch):
    """A part of which eleven blocks, or more, have two tiles each."""
    launches: list[tuple] = []
    config = kernel.Config(1, block_kv=64, q_slots=1, grid=26)
    table = np.arange(72).reshape(3, 24)
    table[:, :23] = table[0, :23]
    sizes = {"kv_heads": 1, "head_dim": 64, "page_size": 64, "pages": 72, "dtype": "bfloat16"}
    cache = cache_of(rng, table, [1500, 1510, 1490], **sizes)
    q = rows_of(rng, 3, 1, 4, 64, dtype="bfloat16")
    shared = found_by(cache, 1, 1)
    assert list(np.asarray(shared.lengths)) == [23 * 64]
    monkeypatch.setattr(attend, "attend_merged", by_kernel(config, launches))
    got = pa.decode_attention_with_lse(q, cache, shared_prefixes=shared)
    want = pa.decode_attention_with_lse(q, cache)
    assert len(launches) == 1
    close(got[:1], want[:1], 2 * 2.0**-7)
    close(got[1:], want[1:], 1e-5)


# ---- on a GPU ------------------------------------------------------------------------------------

ON_GPU = {  # sequences, kv heads, query heads, head dim, rows of a page, tokens, dtype
    "pages16": (33, 2, 8, 128, 16, 1, "bfloat16"),
    "pages64_tokens3": (9, 1, 8, 128, 64, 3, "bfloat16"),
    "group7_float16": (12, 4, 28, 64, 8, 2, "float16"),
    "head_dim256": (7, 2, 48, 256, 32, 1, "bfloat16"),
    "many": (140, 1, 4, 64, 16, 1, "bfloat16"),
    "float32": (6, 2, 8, 64, 16, 2, "float32"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_on_a_gpu(rng, name, packed):
    """Random tries of pages, lengths that end anywhere; one page is missing, one sequence has its
    own rows alone. Packed: single tokens, chunks of prompts and sequences without rows; some rows
    belong to nobody. All combinations of levels and sinks, each by one program.
    """
    number = list(ON_GPU).index(name)
    count, kv_heads, heads, dim, size, tokens, dtype = ON_GPU[name]
    width, parts, tokens = 1024 // size, 0, 400 if packed else tokens
    sizes = {"kv_heads": kv_heads, "head_dim": dim, "page_size": size, "dtype": dtype}
    for trial in range(4):
        table = rng.permutation(count * width).reshape(count, width)
        for _ in range(0 if trial == 3 else count):
            first, at = rng.integers(0, count), rng.integers(0, width)
            table[rng.integers(first, count, 3), :at] = table[first, :at]
        lengths = rng.integers(300 if packed else tokens, 1025, count)
        if not packed:
            lengths[0] = tokens
            table[1, lengths[1] // size - 1] = -2
        cache = cache_of(rng, table, lengths, pages=count * width, **sizes)
        rows = (tokens,) if packed else (count, tokens)
        q = rows_of(rng, *rows, heads, dim, dtype=dtype)
        sinks = rows_of(rng, heads) if number % 2 else None
        how = {"levels": 1 + number % 3, "tokens": tokens, "sinks": sinks}
        if packed:
            starts = jnp.asarray(draw_starts(rng, count, tokens))
            got, want, shared = both_packed(q, cache, cache, starts, **how)
        else:
            got, want, shared = both(q, cache, cache, **how)
        close(got[:1], want[:1], 2.0**-6 if dtype != "float32" else 2e-5)
        close(got[1:], want[1:], 1e-4)
        parts += int((np.asarray(shared.lengths) > 0).sum())
    assert parts
