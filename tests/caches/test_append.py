"""Appending, through the public API: every element of both buffers, in place, in any loop."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import PagedCache, PerSequenceCache, StackedCache
from pallas_attn._call import device, reference
from tests.support import append_cases, subjects
from tests.support.fuzz_caches import Held

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

SENTINEL = -77.0
KINDS = ("per_sequence", "stacked", "paged")
every_kind = pytest.mark.parametrize("kind", KINDS)
each_subject = pytest.mark.parametrize("subject", subjects.rows("append"))


def new_rows(rng, *shape, dtype="float32"):
    return rng.standard_normal(shape).astype(jnp.dtype(dtype))


def same(got, want):
    for have, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        have, wanted = np.asarray(have), np.asarray(wanted)
        assert have.dtype == wanted.dtype
        np.testing.assert_array_equal(have, wanted)


def test_nothing_is_computed_before_the_launch():
    """An operation of XLA's on the lengths would be a launch of its own."""
    shapes = [jax.ShapeDtypeStruct((2, 128, 64), "bfloat16")] * 3
    rows = jax.ShapeDtypeStruct((3, 1, 2, 64), "bfloat16")
    with device.assume("sm90"):
        program = jax.make_jaxpr(lambda caches, k, n: pa.append_kv_arrays(caches, None, k, None, n))
        made = program(shapes, rows, jax.ShapeDtypeStruct((3,), "int32"))
    assert len(made.eqns) == 1


SMALL = [case for case in append_cases.CASES if case.sequences * case.new_rows < 300]


# XLA's older way to LLVM, which conftest.py asks for, may change the bits of a NaN of bfloat16.
NEWER_WAY = {"xla_backend_extra_options": ""}


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_reference_writes_what_the_kernels_must(rng, case):
    inputs = case.draw(rng)
    if case.packed:  # offered with a cache only
        call = functools.partial(reference.append, problem=case.problem)
        got = jax.jit(call, compiler_options=NEWER_WAY)(inputs)
    else:
        call = functools.partial(pa.append_kv_arrays, implementation="reference")
        got = jax.jit(call, compiler_options=NEWER_WAY)(
            inputs.k_cache,
            inputs.v_cache,
            inputs.k,
            inputs.v,
            inputs.end - inputs.new_lengths,
            new_lengths=inputs.new_lengths,
            page_table=inputs.page_table,
            layer=inputs.layer,
        )
    append_cases.assert_same_bytes(got[:2], case.expected(inputs))


@pytest.mark.parametrize("dtype", ["uint32", "int8", "int64", "uint16"])
def test_lengths_of_any_integer_type(rng, dtype):
    cache, rows = np.zeros((2, 1, 4, 2), np.float32), new_rows(rng, 2, 1, 1, 2)
    lengths = np.array([1, 3])
    wanted = pa.append_kv_arrays(cache, None, rows, None, lengths.astype(np.int32))
    got = pa.append_kv_arrays(cache, None, rows, None, lengths.astype(dtype))
    same(got, wanted)
    np.testing.assert_array_equal(np.asarray(got[0])[1, :, 3], rows[1, 0])


def test_a_length_of_more_than_32_bits_writes_nothing(rng):
    cache, rows = np.zeros((2, 1, 4, 2), np.float32), new_rows(rng, 2, 1, 1, 2)
    for wide in (np.array([2**32, 2**32 + 1]), np.array([-(2**32), -(2**63)])):
        assert not pa.append_kv_arrays(cache, None, rows, None, wide)[0].any()
        with jax.enable_x64(True):
            append = jax.jit(lambda at: pa.append_kv_arrays(cache, None, rows, None, at)[0])
            assert not append(wide).any()


def create(kind, layers=None, dtype="float32"):
    """Three sequences of capacity 8 (the first of 6 where capacities may differ), all sentinels."""
    cache = {
        "per_sequence": lambda **x: PerSequenceCache.create((6, 8, 8), 2, 4, **x),
        "stacked": lambda **x: StackedCache.create(3, 8, 2, 4, **x),
        "paged": lambda **x: PagedCache.create(3, 13, 2, 2, 4, capacity=8, **x),
    }[kind](layers=layers, v_head_dim=6, dtype=dtype)
    k, v = jax.tree.map(lambda x: jnp.full(x.shape, SENTINEL, x.dtype), (cache.k, cache.v))
    return type(cache)(**{**vars(cache), "k": k, "v": v})


def check_append(subject, cache, k, v, lengths=None):
    """The cache after `append_kv`: every byte of its buffers is as it has to be."""
    counts = k.shape[1] if lengths is None else lengths
    wanted = Held.of_cache(cache.extend(jnp.minimum(counts, k.shape[1])))
    wanted.write((k, v))
    got = subject.call(pa.append_kv, cache, k, v, new_lengths=lengths)
    append_cases.assert_same_bytes({"k": got.k, "v": got.v}, wanted.arrays)
    return got


@pytest.mark.by_xla
@each_subject
@every_kind
def test_append_kv_fills_every_kind(rng, subject, kind):
    """Appends, ragged ones among them, until one sequence overflows."""
    cache = create(kind)
    for t, counts in ((1, None), (4, (4, 0, 2)), (3, None), (2, (2, 9, -1))):
        lengths = None if counts is None else np.array(counts, np.int32)
        rows = new_rows(rng, 3, t, 2, 4), new_rows(rng, 3, t, 2, 6)
        cache = check_append(subject, cache, *rows, lengths)
        taken = np.clip(t if counts is None else counts, 0, t)
        np.testing.assert_array_equal(cache.new_lengths, np.broadcast_to(taken, 3))
    np.testing.assert_array_equal(cache.lengths, [10, 6, 6])
    np.testing.assert_array_equal(cache.overflowed, [True, False, False])


@each_subject
@every_kind
def test_rows_are_cast_to_the_caches_dtype(rng, subject, kind):
    rows = new_rows(rng, 3, 1, 2, 4) * 100, new_rows(rng, 3, 1, 2, 6)
    check_append(subject, create(kind, dtype="float16"), *rows)


@every_kind
def test_no_rows_no_change(kind):
    cache = create(kind).extend(0)
    got = pa.append_kv(cache, jnp.zeros((3, 0, 2, 4)), jnp.zeros((3, 0, 2, 6)))
    same(got, cache)


# ---- in place -------------------------------------------------------------------------------


def pointers(tree):
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]


def big(kind):
    """Large enough that a copy of it stands out in the HLO: no other array has its shapes."""
    sizes = {"kv_heads": 2, "head_dim": 16, "layers": 2, "dtype": "float32"}
    if kind == "per_sequence":
        return PerSequenceCache.create((96, 112), **sizes)
    if kind == "stacked":
        return StackedCache.create(2, 112, **sizes)
    return PagedCache.create(2, 56, 4, capacity=112, **sizes)


def step(cache, k, v):
    """One token in both layers."""
    cache = cache.extend(1)
    for layer in range(2):
        cache = pa.write_kv(cache, k, v, layer=layer)
    return cache


def layers(cache, k, v):
    cache = cache.extend(1)
    body = lambda cache, layer: (pa.write_kv(cache, k, v, layer=layer), None)  # noqa: E731
    return jax.lax.scan(body, cache, jnp.arange(2, dtype=jnp.int32))[0]


def steps(cache, k, v):
    return jax.lax.fori_loop(0, 5, lambda _, cache: step(cache, k, v), cache)


@pytest.mark.by_xla
@every_kind
@pytest.mark.parametrize("loop", [step, layers, steps])
def test_donated_buffers_are_updated_in_place(rng, kind, loop):
    cache = big(kind)
    rows = jnp.asarray(new_rows(rng, 2, 1, 2, 16))
    compiled = jax.jit(loop, donate_argnums=0).lower(cache, rows, rows).compile()
    shapes = {",".join(map(str, x.shape)) for x in jax.tree.leaves((cache.k, cache.v))}
    copies = [
        line
        for line in compiled.as_text().splitlines()
        if re.search(rf"= f32\[({'|'.join(shapes)})\]\S* copy\(", line)
    ]
    assert not copies
    before = pointers((cache.k, cache.v))
    lengths = np.asarray(cache.lengths)
    after = compiled(cache, rows, rows)
    assert pointers((after.k, after.v)) == before
    assert all(x.is_deleted() for x in jax.tree.leaves((cache.k, cache.v)))
    np.testing.assert_array_equal(after.lengths, lengths + (5 if loop is steps else 1))


@pytest.mark.by_xla
@every_kind
def test_without_donation_the_callers_cache_is_left_alone(rng, kind):
    """Without donation the buffers are copied, and the pointers show it."""
    cache = big(kind)
    rows = jnp.asarray(new_rows(rng, 2, 1, 2, 16))
    before = pointers((cache.k, cache.v))
    after = jax.jit(step)(cache, rows, rows)
    assert not set(pointers((after.k, after.v))) & set(before)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves((cache.k, cache.v)))
