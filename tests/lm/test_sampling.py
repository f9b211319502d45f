"""Sampling: temperature, top-k and top-p."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_lm.sampling import Sampling, sample
from tests.lm.loops import refuses

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


def test_top_k_and_top_p_leave_out_what_they_say(rng):
    logits = rng.standard_normal((1, 20)).astype(np.float32) * 2
    order = np.argsort(-logits[0])
    weights = np.exp(logits[0][order])

    def seen(**how):
        draw = functools.partial(sample, sampling=Sampling(1.0, **how))
        keys = jax.random.split(jax.random.key(0), 4000)
        tokens = draw(jnp.broadcast_to(jnp.asarray(logits), (4000, 20)), keys)
        return np.bincount(np.asarray(tokens), minlength=20)[order] / 4000

    def reach(count, share):
        return 1 + int((np.cumsum(weights[:count] / weights[:count].sum()) < share).sum())

    for how, kept in (
        ({}, 20),
        ({"top_k": 5}, 5),
        ({"top_p": 0.8}, reach(20, 0.8)),
        ({"top_k": 5, "top_p": 0.5}, reach(5, 0.5)),
        ({"top_k": 99, "top_p": 1e-6}, 1),
    ):
        wanted = np.where(np.arange(20) < kept, weights, 0)
        np.testing.assert_allclose(seen(**how), wanted / wanted.sum(), atol=0.03)
        assert (seen(**how)[kept:] == 0).all()


def test_temperature_flattens_and_zero_is_the_largest(rng):
    logits = jnp.asarray(rng.standard_normal((500, 30)), jnp.float32)
    keys = jax.random.split(jax.random.key(0), 500)
    cold, warm, hot = (
        sample(logits, keys, Sampling(t)) == logits.argmax(-1) for t in (0.0, 0.3, 5.0)
    )
    assert cold.all() and not warm.all() and warm.mean() > 2 * hot.mean()


@pytest.mark.parametrize("temperature", [1e-45, 1e-39, 1.2e-38, 1e-30])
@pytest.mark.parametrize("how", [{}, {"top_k": 3}, {"top_p": 0.5}])
def test_next_to_no_temperature_is_greedy(rng, temperature, how):
    logits = jnp.asarray(rng.standard_normal((50, 30)), jnp.float32) * 100
    keys = jax.random.split(jax.random.key(0), 50)
    drawn = sample(logits, keys, Sampling(temperature, **how))
    np.testing.assert_array_equal(drawn, logits.argmax(-1))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"temperature": -1.0}, "temperature: expected at least 0, got -1.0"),
        ({"top_k": -1}, "top_k: expected at least 0 (0: all), got -1"),
        ({"top_k": 1.5}, "top_k: expected an int, got 1.5"),
        ({"temperature": "0.7"}, "temperature: expected a number, got '0.7'"),
        ({"top_p": 0.0}, "top_p: expected above 0 and at most 1, got 0.0"),
    ],
)
def test_sampling_refuses(how, message):
    refuses(message, Sampling, **how)
