"""Score functions over caches: what they mean, by the public API, over every kind of cache.

Kernels in the interpreter have them at their own sizes in tests/kernels/decode, decode_mla,
decode_listed and prefill.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn._call import device
from tests.caches.test_decode import (
    CAPACITY,
    GROUP,
    KINDS,
    KV_HEADS,
    empty,
    expected,
    holding,
    rows,
)
from tests.support import budget, decode_cases, in_numpy, subjects

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

LENGTHS, HEADS = (CAPACITY, 17, 12, 3, 0), KV_HEADS * GROUP
SLOPES = 2.0 ** -np.arange(1, HEADS + 1, dtype=np.float32)
BY_KEY = np.random.default_rng(0).standard_normal((len(LENGTHS), CAPACITY)).astype(np.float32)
BY_KEY[:, 2::7] = -np.inf


def added(b, h, q, kv, slopes, by_key):
    """A slope a head, a number a sequence and key; some keys are hidden."""
    return by_key[b, kv] - slopes[h] * (q - kv)


SCORE = pa.score_fn(lambda s, *at: s + added(*at), SLOPES, BY_KEY)


def everywhere(lengths, count):
    """`added` for all positions of `count` query rows, [M, N, t, S]."""
    sizes = (len(lengths), HEADS, count, CAPACITY)
    b, h, t, kv = (x.astype(np.int32) for x in np.ogrid[tuple(map(slice, sizes))])
    at = t + (np.asarray(lengths, np.int32) - count)[:, None, None, None]
    return np.broadcast_to(added(b, h, at, kv, SLOPES, BY_KEY), sizes)


@pytest.mark.parametrize("subject", subjects.rows("decode"))
@pytest.mark.parametrize(
    "kind, count, options",
    [
        ("per_sequence", 1, {}),
        ("stacked", 6, {"mask": pa.sliding_window(7), "scale": 0.3}),
        ("paged", 12, {"softcap": 3.0, "sinks": np.linspace(-1, 2, HEADS, dtype=np.float32)}),
    ],
    ids=KINDS,
)
def test_a_score_function(rng, subject, kind, count, options):
    """After scale and softcap, before the mask; one row, a few, and many of a kv head. Packed rows
    have the positions of their sequences.
    """
    _, k, v = rows(rng, len(LENGTHS), CAPACITY, subject.dtype)
    q = rows(rng, len(LENGTHS), count, subject.dtype)[0]
    cache = holding(kind, k, v, LENGTHS, poison=rng)
    out, lse = subject.call(pa.decode_attention_with_lse, q, cache, score=SCORE, **options)
    wanted = {"bias": everywhere(LENGTHS, count), "tensor_cores": subject.tensor_cores}
    budget.check({"out": out, "lse": lse}, expected(q, k, v, LENGTHS, **options, **wanted))
    starts = jnp.arange(len(LENGTHS) + 1, dtype=jnp.int32) * count
    packed = q.reshape(-1, *q.shape[2:])
    more = options | {"starts": starts, "score": SCORE}
    result = subject.call(pa.decode_attention, packed, cache, **more)
    close = 0.02 if subject.dtype == "bfloat16" else 1e-5
    apart = result.reshape(out.shape).astype(jnp.float32)
    np.testing.assert_allclose(apart, out.astype(jnp.float32), atol=close)


def test_a_function_that_adds_nothing(rng):
    """It is given scaled, capped scores, and its result is the logit."""
    q, k, v = rows(rng, 2, CAPACITY, "float32")
    q, lengths = q[:, :3], (CAPACITY, 9)
    cache = holding("stacked", k, v, lengths)
    half = pa.score_fn(lambda s, b, h, q, kv: jnp.where((q - kv) % 2 == 0, s, s * 0.5 + 1))
    options = {"scale": 0.4, "softcap": 2.0}
    got = pa.decode_attention(q, cache, score=half, **options)
    for m, n, t in np.ndindex(2, HEADS, 3):
        at = lengths[m] - 3 + t
        s = np.asarray(k[m, : at + 1, n // GROUP] @ q[m, t, n]) * options["scale"]
        s = options["softcap"] * np.tanh(s / options["softcap"])
        s = np.where((at - np.arange(at + 1)) % 2 == 0, s, s * 0.5 + 1)
        p = np.exp(s - s.max())
        want = p @ np.asarray(v[m, : at + 1, n // GROUP]) / p.sum()
        np.testing.assert_allclose(got[m, t, n], want, atol=1e-5)


# ---- other caches --------------------------------------------------------------------------------

every_kernel = pytest.mark.parametrize(
    "subject", subjects.rows("decode", but=("reference", "kernels_float32"))
)


def alike(subject, q, cache, **options):
    """A kernel's results are those of the reference up to rounding."""
    call, options = pa.decode_attention_with_lse, {"score": SCORE} | options
    got = subject.call(call, q, cache, **options)
    reference = functools.partial(call, implementation="reference", **options)
    want = in_numpy.call(reference, q, cache)
    for g, w in zip(got, want, strict=True):
        decode_cases.close(g, w, 0.03, 0.03)


def drawn(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), "bfloat16")


@every_kernel
@pytest.mark.parametrize(
    "dtype, count, options",
    [
        ("int8", 1, {}),
        ("float8_e4m3fn", 3, {"softcap": 2.0}),
        ("int8", 20, {"mask": pa.sliding_window(9)}),
        ("float8_e5m2", 20, {"starts": np.array([0, 1, 5, 20], np.int32)}),
    ],
    ids=["int8", "float8_softcap", "int8_many_rows", "float8_packed"],
)
def test_over_a_quantised_cache(rng, subject, dtype, count, options):
    cache = pa.PagedCache.create(3, 9, 8, KV_HEADS, 64, capacity=CAPACITY, dtype=dtype)
    cache = cache.extend(jnp.array((CAPACITY, 17, 9), jnp.int32))
    new = drawn(rng, 3, CAPACITY, KV_HEADS, 64), drawn(rng, 3, CAPACITY, KV_HEADS, 64)
    cache = pa.write_kv(cache, *new, implementation="reference")
    rows_of_q = (count,) if "starts" in options else (3, count)
    alike(subject, drawn(rng, *rows_of_q, HEADS, 64), cache, **options)


@every_kernel
@pytest.mark.parametrize("count, packed", [(1, False), (20, False), (5, True)])
def test_over_a_latent_cache(rng, subject, count, packed):
    """Few rows, many, and packed ones, each of which is a sequence of its own."""
    sizes = {"kv_heads": 1, "head_dim": 192, "v_head_dim": 128, "shared_kv": True}
    cache = pa.StackedCache.create(2, CAPACITY, **sizes).extend(jnp.array((22, 9), jnp.int32))
    cache = pa.write_kv(cache, drawn(rng, 2, 22, 1, 192), implementation="reference")
    options = {"starts": np.array([0, 2, 4], np.int32)} if packed else {}
    rows_of_q = (count,) if packed else (2, count)
    alike(subject, drawn(rng, *rows_of_q, HEADS, 192), cache, **options)


@pytest.mark.parametrize("subject", subjects.rows("decode"))
def test_all_positions_in_a_list(rng, subject):
    """A function is given positions, wherever a list has them."""
    _, k, v = rows(rng, len(LENGTHS), CAPACITY, subject.dtype)
    q = rows(rng, len(LENGTHS), 2, subject.dtype)[0]
    cache = holding("paged", k, v, LENGTHS, poison=rng)
    order = np.broadcast_to(rng.permutation(CAPACITY), (len(LENGTHS), 2, CAPACITY))
    listed, plain = (
        subject.call(pa.decode_attention_with_lse, q, cache, score=SCORE, **more)
        for more in ({"kv_indices": order.astype(np.int32)}, {})
    )
    for got, want in zip(listed, plain, strict=True):
        decode_cases.close(got, want, 0.02, 0.02)


def test_shared_pages_are_read_by_each_sequence(rng):
    cache = pa.PagedCache.create(2, 8, 4, KV_HEADS, 64, capacity=16, dtype="float32")
    new = (jnp.asarray(rng.standard_normal((2, 9, KV_HEADS, 64)), "float32") for _ in range(2))
    cache = pa.append_kv(cache, *new).fork(0, 1)
    q = jnp.asarray(rng.standard_normal((2, HEADS, 64)), "float32")
    shared = pa.decode_attention(q, cache, score=SCORE, shared_prefixes=cache.shared_prefixes())
    np.testing.assert_allclose(shared, pa.decode_attention(q, cache, score=SCORE), atol=1e-6)


def test_arrays_may_be_mapped_and_differentiated(rng):
    """By the reference."""
    q, k, v = rows(rng, 2, 8, "float32")
    cache = holding("stacked", k, v, (8, 5))

    def attend(slopes):
        score = pa.score_fn(lambda s, b, h, q, kv, m: s - m[h] * (q - kv), slopes)
        return pa.decode_attention(q[:, -1], cache, score=score, implementation="reference")

    both = jnp.stack([SLOPES, 2 * SLOPES])
    np.testing.assert_allclose(jax.vmap(attend)(both)[1], attend(2 * SLOPES), atol=1e-6)
    along = jax.jvp(attend, (jnp.asarray(SLOPES),), (jnp.ones(HEADS),))[1]
    step = (attend(SLOPES + 1e-2) - attend(SLOPES - 1e-2)) / 2e-2
    np.testing.assert_allclose(along, step, atol=1e-3)


def test_kernels_refuse_arrays_that_they_cannot_count(rng):
    """Arrays of masks and of scores, in kernels for few rows and for many."""
    large = jax.ShapeDtypeStruct((4, 2**15, 2**14), jnp.float32)
    cache = jax.eval_shape(lambda: empty("stacked", 2, "bfloat16"))

    def with_mask(q, cache, x):
        mask = pa.mask_fn(lambda b, h, q, kv, x: x[h, q, kv] > 0, x)
        return pa.decode_attention(q, cache, mask=mask)

    def with_score(q, cache, x):
        score = pa.score_fn(lambda s, b, h, q, kv, x: s + x[h, q, kv], x)
        return pa.decode_attention(q, cache, score=score)

    for call, count in itertools.product((with_mask, with_score), (1, 40)):
        q = jax.ShapeDtypeStruct((2, count, HEADS, 64), jnp.bfloat16)
        with device.assume("sm90"), pytest.raises(pa.UnsupportedError, match="reads in 32 bits"):
            jax.eval_shape(call, q, cache, large)
