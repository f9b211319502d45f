"""`flash_attention(kv_indices=)`: lists of positions over contiguous keys, forward and backward,
against attention to all keys, each of which counts as often as it is listed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from tests.support import in_numpy, subjects
from tests.support.fuzz_listed import times_of, written_out

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

B, T, S, N, K, DIM = 2, 5, 90, 4, 2, 64
SINKS = np.linspace(-1, 2, N, dtype=np.float32)


def arrays(rng, dtype="float32"):
    shapes = (B, T, N, DIM), (B, S, K, DIM), (B, S, K, DIM)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def lists(rng, heads=K, n=40):
    """Positions, some twice, some of none; the last row has none at all."""
    indices = rng.integers(-3, S + 3, (B, heads, T, n))
    odd = rng.choice([-(2**31), 2**31 - 1], indices.shape)
    indices = np.where(rng.random(indices.shape) < 0.1, odd, indices)
    indices[..., -5:] = indices[..., :5]
    indices[-1, -1, -1] = -1
    return indices.astype(np.int32)


def dense(q, k, v, times, **options):
    """Attention to all keys, whose scores are larger by the logarithm of how often they count."""
    options |= written_out(times, N) | {"implementation": "reference", "precision": "highest"}
    return pa.flash_attention_with_lse(q, k, v, **options)


def weighed(call):
    """A function of q, k and v whose gradients depend on both results."""

    def loss(*arrays):
        out, lse = call(*arrays)
        weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return (out.astype(jnp.float32) * weights).sum() + jnp.where(
            jnp.isfinite(lse), jnp.sin(lse), 0
        ).sum()

    return loss


CASES = {
    "by_kv_head": (K, pa.FULL, {}),
    "causal_softcap": (1, pa.CAUSAL, {"q_offset": 60, "softcap": 2.0}),
    "window_lengths": (
        K, pa.sliding_window(50), {"q_offset": 40, "kv_lengths": np.array([44, 90], np.int32)}
    ),
    "sinks": (K, pa.CAUSAL, {"q_offset": 60, "sinks": SINKS}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients(rng, name):
    heads, mask, options = CASES[name]
    options = dict(options)
    q, k, v = arrays(rng)
    indices = lists(rng, heads)
    times = times_of(indices, S)
    sinks = [options.pop("sinks")] if "sinks" in options else []
    options["mask"] = mask

    def listed(q, k, v, sinks=None):
        return pa.flash_attention_with_lse(q, k, v, kv_indices=indices, sinks=sinks, **options)

    def by_all(q, k, v, sinks=None):
        return dense(q, k, v, times, sinks=sinks, **options)

    unread = jnp.asarray(times.reshape(B, -1, S).sum(1) == 0)[..., None, None]
    for call in (lambda f: f, lambda f: jax.grad(weighed(f), range(3 + len(sinks)))):
        hidden = [jnp.where(unread, jnp.nan, x) for x in (k, v)]
        got = in_numpy.call(call(listed), q, *hidden, *sinks)
        for x, y in zip(got, in_numpy.call(call(by_all), q, k, v, *sinks), strict=True):
            np.testing.assert_allclose(x, y, atol=2e-5)


@pytest.mark.parametrize("subject", subjects.rows("flash_forward"))
def test_kernels(rng, subject):
    q, k, v = arrays(rng, subject.dtype)
    indices = lists(rng)
    out, lse = subject.call(pa.flash_attention_with_lse, q, k, v, kv_indices=jnp.asarray(indices))
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    want = in_numpy.call(functools.partial(dense, times=times_of(indices, S)), *wide)
    np.testing.assert_allclose(np.asarray(out, np.float32), want[0], atol=0.02)
    np.testing.assert_allclose(lse, want[1], atol=1e-3)


@pytest.mark.parametrize("subject", subjects.rows("flash_backward"))
def test_gradients_by_kernels(rng, subject):
    q, k, v = arrays(rng, subject.dtype)
    indices = jnp.asarray(lists(rng))

    def with_sinks(q, k, v, sinks, implementation=None):
        options = {"kv_indices": indices, "implementation": implementation}
        return pa.flash_attention_with_lse(q, k, v, sinks=sinks, **options)

    def gradients(*x, implementation=None):
        call = functools.partial(with_sinks, implementation=implementation)
        return jax.grad(weighed(call), range(4))(*x)

    def by_all(*x):
        times = times_of(np.asarray(indices), S)
        call = weighed(lambda q, k, v, sinks: dense(q, k, v, times, sinks=sinks))
        return jax.grad(call, range(4))(*x)

    got = subject.call(gradients, q, k, v, SINKS)
    want = in_numpy.call(by_all, *(x.astype(jnp.float32) for x in (q, k, v)), SINKS)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float32), y, atol=0.02 * np.abs(y).max())


def test_forward_mode_and_second_derivatives(rng, monkeypatch):
    """Some lists at a time."""
    from pallas_attn._autodiff import listed

    monkeypatch.setattr(listed, "GATHERED", 40 * DIM * 7)
    primals, along = ([*arrays(rng), SINKS * sign] for sign in (1, -1))
    indices = lists(rng)
    times = times_of(indices, S)
    calls = (
        lambda *x: pa.flash_attention_with_lse(*x[:3], kv_indices=indices, sinks=x[3]),
        lambda *x: dense(*x[:3], times, sinks=x[3]),
    )
    outs = [lambda *x, call=call: call(*x)[0] for call in calls]
    gradients = [jax.grad(weighed(call), range(4)) for call in calls]
    for functions in (outs, gradients):
        got, want = (
            in_numpy.call(lambda x, dx, f=f: jax.jvp(f, x, dx)[1], primals, along)
            for f in functions
        )
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, atol=2e-4)


@pytest.mark.parametrize("sizes", [(3, 0), (0, 5)], ids=str)
def test_no_rows(sizes):
    """Lists of positions and of blocks."""
    q, k = jnp.zeros((B, sizes[0], N, DIM)), jnp.zeros((B, sizes[1], K, DIM))
    indices = np.zeros((B, 1, sizes[0], 4), np.int32)
    for lists in ({"kv_indices": indices}, {"kv_blocks": pa.Blocks(indices[:, :, :1])}):
        out, lse = pa.flash_attention_with_lse(q, k, k, **lists)
        assert out.shape == q.shape and not np.asarray(out).any()
        assert (np.asarray(lse) == -np.inf).all() and lse.dtype == jnp.float32


def test_a_few_rows_at_a_time(rng, monkeypatch):
    """Steps of the backward, and vmap."""
    from pallas_attn._autodiff import listed

    q, k, v = arrays(rng)
    indices = jnp.asarray(lists(rng))

    def gradient(q, k, v):
        call = lambda q: pa.flash_attention(q, k, v, kv_indices=indices).sum()  # noqa: E731
        return jax.grad(call)(q)

    want = in_numpy.call(gradient, q, k, v)
    monkeypatch.setattr(listed, "GATHERED", 40 * DIM * 7)
    got = in_numpy.call(jax.vmap(gradient, in_axes=(0, None, None)), jnp.stack([q, q]), k, v)
    for x in got:
        np.testing.assert_allclose(x, want, atol=1e-5)


def test_gradients_stay_in_the_rows_of_a_list(rng):
    """A NaN cotangent, of a row with entries of none, reaches no key of another batch row, and one
    of a row without keys reaches nothing.
    """
    q, k, v = arrays(rng)
    indices = np.full((B, 1, T, 3), -1, np.int32)
    indices[0], indices[1, 0, 0] = 4, (-1, 0, 3)
    d_out = np.ones((B, T, N, DIM), np.float32)
    d_out[1] = np.nan

    def results(*x):
        return pa.flash_attention(*x, kv_indices=indices)

    dq, dk, dv = jax.vjp(results, q, k, v)[1](jnp.asarray(d_out))
    for x in (dq, dk, dv):
        assert np.isfinite(x[0]).all()
    assert (np.asarray(dq)[1, 1:] == 0).all() and np.isnan(dk[1, 0]).all()
    assert (np.asarray(dk)[1, 4:] == 0).all() and (np.asarray(dv)[1, 4:] == 0).all()


def test_an_offset_for_each_batch_row(rng):
    q, k, v = arrays(rng)
    indices = lists(rng)
    call = pa.flash_attention_with_lse
    options = {"mask": pa.CAUSAL, "kv_indices": indices}
    got = call(q, k, v, q_offset=jnp.array([7, 60], jnp.int32), **options)
    for b, offset in enumerate((7, 60)):
        want = call(q, k, v, q_offset=offset, **options)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_array_equal(x[b], y[b])


def test_arguments_are_checked_where_there_are_no_rows():
    q, k = jnp.zeros((0, T, N, DIM)), jnp.zeros((0, S, K, DIM))
    indices = jnp.zeros((0, 1, T, 2), jnp.int32)
    for options in ({"implementation": "nope"}, {"softcap": -1.0}, {"q_offset": 2**40}):
        with pytest.raises(ValueError, match=f"^{next(iter(options))}: expected "):
            pa.flash_attention(q, k, k, kv_indices=indices, **options)
