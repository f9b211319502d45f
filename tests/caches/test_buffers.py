"""Buffers as `create` makes them on a GPU: what can be appended to can be decoded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import PagedCache, PerSequenceCache, StackedCache
from pallas_attn._call import device, dispatch
from tests.support import subjects

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

KINDS = ("per_sequence", "stacked", "paged")
QUANTIZED = ("int8", "float8_e4m3fn", "float8_e5m2")


def create(kind, rows, kv_heads, dims, **options):
    options |= {"v_head_dim": dims[1]}
    if kind == "per_sequence":
        return PerSequenceCache.create((rows, rows + 3), kv_heads, dims[0], **options)
    if kind == "stacked":
        return StackedCache.create(2, rows, kv_heads, dims[0], **options)
    return PagedCache.create(2, 8, rows, kv_heads, dims[0], **options)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("gpu", ["sm80", "sm90"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_append_takes_decode_takes(kind, gpu, seed):
    rng = np.random.default_rng(seed)

    def draw():
        dims = rng.integers(1, 257, 2).tolist()
        dtype = rng.choice(["bfloat16", "float16", *QUANTIZED])
        return create(kind, int(rng.integers(1, 40)), 2, dims, dtype=dtype), dims, dtype

    with device.assume(gpu):
        for _ in range(4):
            cache, dims, dtype = draw()
            assert [cache.head_dim, cache.v_head_dim] == dims
            q = jax.ShapeDtypeStruct((2, 4, dims[0]), dtype if dtype == "float16" else "bfloat16")
            with dispatch.chosen() as names:
                out = jax.eval_shape(lambda *arguments: pa.decode_attention(*arguments), q, cache)
            assert out.shape == (2, 4, dims[1]) and names[0].startswith("sm"), (cache, names)


@pytest.mark.parametrize("subject", subjects.rows("append", "decode"))
@pytest.mark.parametrize(
    "kind, dtype, dims, rows",
    [
        ("per_sequence", "int8", (40, 72), 18),
        ("stacked", "float8_e4m3fn", (80, 80), 6),
        ("paged", "float8_e5m2", (96, 20), 3),
        ("paged", None, (20, 36), 5),
    ],
)
def test_rows_of_odd_sizes(rng, subject, kind, dtype, dims, rows):
    """Results of a cache whose buffers are as wide as its rows, by the reference."""
    q_dtype = "bfloat16" if dtype else subject.dtype  # no kernel takes float32 over quantised rows
    dtype = dtype or subject.dtype
    k, v, q = (
        jnp.asarray(rng.standard_normal((2, 5, heads, dim)), q_dtype)
        for heads, dim in ((2, dims[0]), (2, dims[1]), (4, dims[0]))
    )
    plain = pa.append_kv(create(kind, rows, 2, dims, dtype=dtype), k, v, implementation="reference")
    with subject.active():
        cache = create(kind, rows, 2, dims, dtype=dtype)
    assert (cache.head_dim, cache.v_head_dim) == dims
    cache = subject.call(pa.append_kv, cache, k, v)
    np.testing.assert_array_equal(cache.lengths, plain.lengths)
    got = subject.call(pa.decode_attention_with_lse, q[:, -2:], cache)
    want = pa.decode_attention_with_lse(q[:, -2:], plain, implementation="reference")
    for have, wanted in zip(got, want, strict=True):
        assert have.shape == wanted.shape and have.dtype == wanted.dtype
        have, wanted = (np.asarray(x, np.float32) for x in (have, wanted))
        np.testing.assert_allclose(have, wanted, rtol=2e-2, atol=2e-2)


def test_a_fork_of_wide_buffers_keeps_its_dims(rng):
    with device.assume("sm90"):
        cache = create("paged", 3, 2, (20, 20), dtype="bfloat16")
    rows = jnp.asarray(rng.standard_normal((2, 5, 2, 20)), "bfloat16")
    cache = pa.append_kv(cache, rows, rows, implementation="reference").fork(0, 1)
    leaves, tree = jax.tree.flatten(cache)
    again = jax.tree.unflatten(tree, leaves)
    assert again.head_dim == cache.head_dim == 20 and cache.stored_dims == (24, 24)
    assert dataclasses.replace(cache, dims=None).head_dim == 24


@pytest.mark.parametrize(
    ("options", "unit"),
    [({}, 1), ({"dtype": "int8"}, 4), ({"shared_kv": True}, 8)],
    ids=["plain", "quantised", "latent"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_create_makes_on_a_gpu(kind, options, unit):
    """docs/semantics.md: capacities and page sizes are rounded up; head dims of V within K stay."""
    with device.assume("sm90"):
        cache = create(kind, 17, 1, (36, 20), **options)
    sizes = [cache.page_size] if kind == "paged" else cache.capacities
    wanted = {"per_sequence": [17, 20], "stacked": [17, 17], "paged": [17]}[kind]
    assert [*sizes] == [-(-n // unit) * unit for n in wanted]
    dims = {1: (40, 24), 4: (64, 32), 8: (36, 20)}[unit]
    assert cache.stored_dims == dims and (cache.head_dim, cache.v_head_dim) == (36, 20)
    assert create(kind, 17, 1, (36, 20), **options).stored_dims == (36, 20)  # without one
