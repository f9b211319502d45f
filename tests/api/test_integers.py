"""Integers that arrive at run time mean something over the whole range of int32, and the same to
every implementation: lengths, offsets, counts, page tables and layers at -1, 0, the end, past it
and at both ends of int32.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import CAUSAL, PagedCache, PerSequenceCache, StackedCache
from pallas_attn._call import checks, problem
from tests.support import budget, definition, subjects

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

LEAST, MOST = -(2**31), 2**31 - 1
FARTHEST = 2**29  # largest position of a query

attending = pytest.mark.parametrize("subject", subjects.rows("flash_forward", "flash_backward"))
decoding = pytest.mark.parametrize("subject", subjects.rows("decode"))
appending = pytest.mark.parametrize("subject", subjects.rows("append"))


def about(end: int) -> np.ndarray:
    return np.array([LEAST, -1, 0, end - 1, end, end + 1, end + 70, MOST], np.int32)


def normal(rng, dtype, *shape):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def with_gradients(q, k, v, do, *, implementation, mask, **arrays):
    """out, lse and the gradients of sum(out * do) and of sum(lse) where it is finite."""

    def loss(q, k, v):
        call = functools.partial(pa.flash_attention_with_lse, implementation=implementation)
        out, lse = call(q, k, v, mask=mask, **arrays)
        total = jnp.sum(out.astype(jnp.float32) * do.astype(jnp.float32))
        return total + jnp.where(lse == -jnp.inf, 0, lse).sum(), (out, lse)

    gradients, (out, lse) = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))


@attending
@pytest.mark.parametrize("name", ["kv_lengths", "q_lengths", "q_offset"])
def test_attention(rng, subject, name):
    """S is 1 less than whole tiles, which operands that TMA reads are padded to."""
    rows, keys, dim = 20, 127, 16
    ends = {"kv_lengths": keys, "q_lengths": rows, "q_offset": keys}
    clipped = {"kv_lengths": (0, keys), "q_lengths": (0, rows), "q_offset": (-FARTHEST, FARTHEST)}
    numbers = about(ends[name])
    mask = pa.Mask(left=2**30 - 1, right=2**30 - 1) if name == "q_offset" else CAUSAL
    arrays = {
        "q": normal(rng, subject.dtype, numbers.size, rows, 2, dim),
        "k": normal(rng, subject.dtype, numbers.size, keys, 1, dim),
        "v": normal(rng, subject.dtype, numbers.size, keys, 1, dim),
    }
    fixed = {} if name == "q_offset" else {"q_offset": np.full(numbers.size, keys - rows, np.int32)}
    do = normal(rng, subject.dtype, numbers.size, rows, 2, dim)
    got = subject.call(
        with_gradients, *arrays.values(), do, mask=mask, **{name: jnp.asarray(numbers)}, **fixed
    )
    plain = arrays | fixed | {name: np.clip(numbers, *clipped[name])}
    seen = definition.attention(plain, mask=mask)["lse"] != -np.inf
    expected = budget.attention(
        plain | {"mask": mask}, do, seen.astype(np.float32), tensor_cores=subject.tensor_cores
    )
    budget.check(got, expected)


def cache_of(kind, sequences, capacity, dtype, **options):
    sizes = {"kv_heads": 1, "head_dim": 16, "dtype": dtype, **options}
    if kind == "per_sequence":
        return PerSequenceCache.create((capacity,) * sequences, **sizes)
    if kind == "stacked":
        return StackedCache.create(sequences, capacity, **sizes)
    return PagedCache.create(sequences, sequences * capacity // 8, 8, capacity=capacity, **sizes)


def filled(rng, cache):
    """Numbers in every row, and in a paged cache a page in every place."""
    numbers = {
        side: jax.tree.map(lambda x: normal(rng, x.dtype, *x.shape), getattr(cache, side))
        for side in ("k", "v")
    }
    if cache.kind == "paged":
        numbers["page_table"] = jnp.arange(cache.pages, dtype=jnp.int32).reshape(
            cache.page_table.shape
        )
    return dataclasses.replace(cache, **numbers).extend(0)


@decoding
@pytest.mark.parametrize("kind", ["per_sequence", "stacked", "paged"])
def test_decode_lengths(rng, subject, kind):
    """Nothing held: 0. More than fits: NaN. Between them: as where every length is in range."""
    capacity = 64
    lengths = about(capacity)
    cache = filled(rng, cache_of(kind, lengths.size, capacity, subject.dtype))
    q = normal(rng, subject.dtype, lengths.size, 2, 2, 16)
    there = lengths <= capacity
    plain = dataclasses.replace(cache, lengths=jnp.asarray(np.where(there, lengths.clip(0), 0)))
    wild = dataclasses.replace(cache, lengths=jnp.asarray(lengths))
    np.testing.assert_array_equal(wild.overflowed, ~there)
    got = subject.call(pa.decode_attention_with_lse, q, wild)
    want = subject.call(pa.decode_attention_with_lse, q, plain)
    for have, wanted in zip(got, want, strict=True):
        have, wanted = (np.asarray(x, np.float32) for x in (have, wanted))
        np.testing.assert_array_equal(have[there], wanted[there])
        assert np.isnan(have[~there]).all()
    assert (np.asarray(got[0], np.float32)[lengths <= 0] == 0).all()


@pytest.mark.by_xla
@decoding
def test_decode_pages_and_layers(rng, subject):
    cache = filled(rng, cache_of("paged", 3, 64, subject.dtype, layers=2))
    q = normal(rng, subject.dtype, 3, 1, 2, 16)
    held = dataclasses.replace(cache, lengths=jnp.asarray([20, 20, 20], jnp.int32))
    want = np.asarray(subject.call(pa.decode_attention, q, held, layer=jnp.int32(1)), np.float32)
    for entry in (LEAST, -1, cache.pages, MOST):
        table = held.page_table.at[0, 3:].set(entry).at[1, 1].set(entry)
        wild = dataclasses.replace(held, page_table=table)
        np.testing.assert_array_equal(wild.overflowed, [False, True, False])
        got = np.asarray(subject.call(pa.decode_attention, q, wild, layer=jnp.int32(1)))
        got = got.astype(np.float32)
        np.testing.assert_array_equal(got[[0, 2]], want[[0, 2]])  # no row of theirs is there
        assert np.isnan(got[1]).all()
    for layer in (LEAST, -1, 2, MOST):
        got = subject.call(pa.decode_attention, q, held, layer=jnp.int32(layer))
        assert np.isnan(np.asarray(got, np.float32)).all()


def rows_written(before, after) -> list[list[int]]:
    """Which positions of each sequence of a stacked cache differ."""
    differ = (np.asarray(before.k) != np.asarray(after.k)).any(axis=(1, 3))
    return [np.flatnonzero(row).tolist() for row in differ]


@pytest.mark.by_xla
@appending
def test_rows_that_end_at_a_length(rng, subject):
    """`write_kv` fills rows lengths - new_lengths .. lengths, those of them that there are."""
    capacity, ends = 8, (LEAST, LEAST + 1, -1, 0, 1, 8, 9, MOST)
    counts = (LEAST, -1, 0, 1, 3, MOST - 1, MOST)
    lengths, new = (x.ravel().astype(np.int32) for x in np.meshgrid(ends, counts))
    cache = filled(rng, cache_of("stacked", lengths.size, capacity, subject.dtype))
    cache = dataclasses.replace(cache, lengths=jnp.asarray(lengths), new_lengths=jnp.asarray(new))
    rows = normal(rng, subject.dtype, lengths.size, 4, 1, 16) + 9
    got = rows_written(cache, subject.call(pa.write_kv, cache, rows, rows))
    for end, count, written in zip(lengths.tolist(), new.tolist(), got, strict=True):
        first = end - count
        wanted = range(first, first + min(count, 4)) if end >= 0 and first >= 0 else ()
        assert written == [row for row in wanted if row < capacity], (end, count)


@pytest.mark.by_xla
@appending
def test_rows_that_begin_at_a_length(rng, subject):
    capacity = 8
    starts, counts = np.meshgrid(about(capacity), (LEAST, -1, 0, 3, 4, 5, MOST))
    starts, counts = (x.ravel().astype(np.int32) for x in (starts, counts))
    cache = filled(rng, cache_of("stacked", starts.size, capacity, subject.dtype))
    rows = normal(rng, subject.dtype, starts.size, 4, 1, 16) + 9
    k, _ = subject.call(
        pa.append_kv_arrays, cache.k, cache.v, rows, rows, starts, new_lengths=counts
    )
    got = rows_written(cache, dataclasses.replace(cache, k=k))
    for start, count, written in zip(starts.tolist(), counts.tolist(), got, strict=True):
        wanted = range(start, start + min(count, 4)) if start >= 0 else ()
        assert written == [row for row in wanted if row < capacity], (start, count)


@pytest.mark.by_xla
@appending
def test_writes_to_layers_and_pages_that_there_are_not(rng, subject):
    cache = filled(rng, cache_of("paged", 2, 16, subject.dtype, layers=2)).extend(3)
    rows = normal(rng, subject.dtype, 2, 3, 1, 16)
    for layer in (LEAST, -1, 2, MOST):
        got = subject.call(pa.write_kv, cache, rows, rows, layer=jnp.int32(layer))
        np.testing.assert_array_equal(got.k, cache.k)
    for entry in (LEAST, -1, cache.pages, MOST):
        wild = dataclasses.replace(cache, page_table=jnp.full((2, 2), entry, jnp.int32))
        got = subject.call(pa.write_kv, wild, rows, rows, layer=jnp.int32(1))
        np.testing.assert_array_equal(got.k, cache.k)


@pytest.mark.parametrize("kind", ["per_sequence", "stacked", "paged"])
@pytest.mark.parametrize("traced", [False, True])
def test_counts(kind, traced):
    """A number of rows moves lengths as an array of it does: past 2**31 - 1 none is taken."""
    held = np.array([MOST, MOST - 1, 5], np.int32)
    cache = dataclasses.replace(cache_of(kind, 3, 16, "float32"), lengths=jnp.asarray(held))
    for count in (0, 1, 3):
        got = cache.extend(jnp.int32(count) if traced else count)
        taken = np.minimum(count, MOST - held.astype(np.int64))
        np.testing.assert_array_equal(got.new_lengths, taken)
        np.testing.assert_array_equal(got.lengths, held + taken)
        assert np.asarray(got.overflowed)[:2].all()
    row = jnp.zeros((3, 1, 1, 16))
    lengths = pa.append_kv(pa.append_kv(cache, row, row), row, row).lengths
    np.testing.assert_array_equal(lengths, [MOST, MOST, 7])
    for count, wanted in ((LEAST, 0), (-1, 0), (MOST, MOST - 5)):
        got = cache.extend(jnp.int32(count))
        np.testing.assert_array_equal(got.new_lengths[2], wanted)


@pytest.mark.parametrize("integer", [np.int64(2**32), np.int64(-(2**32)), np.uint32(2**32 - 3)])
def test_an_index_of_more_bits_is_no_other_one(integer):
    cache = cache_of("stacked", 3, 16, "float32").extend(2)
    np.testing.assert_array_equal(cache.reset(np.array([integer])).lengths, [2, 2, 2])
    np.testing.assert_array_equal(cache.reset(np.array([integer, 1])).lengths, [2, 0, 2])


@pytest.mark.parametrize(
    "numbers",
    [(0, 3, 3, 9), (2, 0, 5, 4), (LEAST, MOST, 1), (MOST,), (-1, 9, 10, LEAST), (4, 6, 6, 8)],
)
def test_starts_give_each_row_one_owner(numbers):
    """Clipped, then never below an earlier one; rows before the first belong to none."""
    rows = 9
    starts = checks.row_starts("q_starts", np.array(numbers, np.int32), rows, len(numbers) - 1)
    want = np.maximum.accumulate(np.clip(numbers, 0, rows))
    np.testing.assert_array_equal(starts, want)
    owners = np.asarray(problem.owner_of_rows(starts, rows))
    for row, owner in enumerate(owners):
        if 0 <= owner < len(numbers) - 1:
            assert want[owner] <= row < want[owner + 1]
        else:
            assert row < want[0] and owner == -1 or row >= want[-1] and owner == len(numbers) - 1
