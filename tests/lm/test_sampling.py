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


# ---- a number for each row ----------------------------------------------------------------------

MIXED = {
    "temperature": [0.0, 0.7, 1.0, 0.0, 2.0, 0.3, 0.7],
    "top_k": [5, 0, 3, 0, 40, 1, 9],
    "top_p": [0.9, 1.0, 0.5, 1.0, 0.8, 1.0, 1e-6],
}


def test_each_row_has_its_own_sampling(rng):
    """Greedy rows beside drawn ones; a row is what it is alone, whatever the others ask for."""
    logits = jnp.asarray(rng.standard_normal((7, 60)) * 2, jnp.float32)
    for n in range(5):
        keys = jax.random.split(jax.random.key(n), 7)
        for names in (["temperature"], ["temperature", "top_k"], list(MIXED)):
            how = {name: MIXED[name] for name in names}
            alone = []
            for m in range(7):
                own = Sampling(**{name: x[m] for name, x in how.items()})
                alone += sample(logits[m : m + 1], keys[m : m + 1], own).tolist()
            for numbers in (list, np.asarray, jnp.asarray):
                arrays = {name: numbers(x) for name, x in how.items()}
                assert sample(logits, keys, Sampling(**arrays)).tolist() == alone
            assert alone[0] == logits[0].argmax() and alone[3] == logits[3].argmax()


@pytest.mark.by_xla
def test_another_number_compiles_nothing(rng):
    traced = []

    @jax.jit
    def draw(logits, keys, sampling):
        traced.append(sampling)
        return sample(logits, keys, sampling)

    logits = jnp.asarray(rng.standard_normal((3, 20)), jnp.float32)
    keys = jax.random.split(jax.random.key(0), 3)
    for n in range(1, 4):
        how = {"temperature": 0.4 * n, "top_k": 6 * n, "top_p": 0.3 * n}
        alone = draw(logits[:1], keys[:1], Sampling(**how))
        rows = {name: [x, 1, 1] for name, x in how.items()}
        assert draw(logits, keys, Sampling(**rows))[0] == alone[0]
    assert len(traced) == 2  # for a number, and for several
    draw(logits, keys, Sampling(0.7))
    assert len(traced) == 3  # without top_k and top_p nothing is sorted
    draw(logits, keys, Sampling())
    assert len(traced) == 4


def test_numbers_that_no_check_sees_have_a_result(rng):
    """The results that the docstring names, of numbers in jax's arrays."""
    logits = jnp.asarray(rng.standard_normal((6, 30)), jnp.float32)
    keys, likeliest = jax.random.split(jax.random.key(0), 6), logits.argmax(-1)
    cold = jnp.asarray([-1.0, np.nan, -np.inf, 1e-45, 0.0, -0.0], jnp.float32)
    np.testing.assert_array_equal(sample(logits, keys, Sampling(cold)), likeliest)
    none = jnp.asarray([0.0, np.nan, -1.0, -np.inf, 1e-45, 0.0], jnp.float32)
    np.testing.assert_array_equal(sample(logits, keys, Sampling(1.0, top_p=none)), likeliest)
    below = jnp.asarray([-1, -(2**31), -7, 0, 2**31 - 1, 30], jnp.int32)
    drawn = sample(logits, keys, Sampling(1.0, top_k=below))
    np.testing.assert_array_equal(drawn, sample(logits, keys, Sampling(1.0)))
    np.testing.assert_array_equal(sample(logits, keys, Sampling(1.0, top_k=2**40)), drawn)


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"temperature": -1.0}, "temperature: expected at least 0, got -1.0"),
        ({"top_k": -1}, "top_k: expected at least 0 (0: all), got -1"),
        ({"top_k": 1.5}, "top_k: expected an int, or a list of them, got 1.5"),
        ({"temperature": "0.7"}, "temperature: expected a number, or a list of them, got '0.7'"),
        ({"top_p": 0.0}, "top_p: expected above 0 and at most 1, got 0.0"),
        ({"top_p": [0.5, 1.5]}, "top_p: expected above 0 and at most 1, got 1.5"),
        ({"temperature": float("nan")}, "temperature: expected at least 0, got nan"),
        ({"temperature": [1.0, None]},
         "temperature: expected a number, or a list of them, got (1.0, None)"),
        ({"temperature": [[1, 2], 3]},
         "temperature: expected a number, or a list of them, got ([1, 2], 3)"),
        ({"temperature": True}, "temperature: expected a number, or a list of them, got True"),
        ({"top_k": np.ones((2, 3), np.int32)},
         "top_k: expected an int, or a list of them, got int32[2, 3]"),
        ({"top_k": jnp.ones(2)}, "top_k: expected an int, or a list of them, got float32[2]"),
    ],
)  # fmt: skip
def test_sampling_refuses(how, message):
    refuses(message, Sampling, **how)


KEYS = jax.random.split(jax.random.key(0), 2)


@pytest.mark.parametrize(
    ("logits", "keys", "sampling", "message"),
    [
        ((2, 5), KEYS[0], Sampling(1.0),
         "keys: expected a key for each of the 2 rows of logits, got key<fry>[]; "
         "jax.random.split(key, 2) makes them"),
        ((3, 5), KEYS, Sampling(1.0),
         "keys: expected a key for each of the 3 rows of logits, got key<fry>[2]; "
         "jax.random.split(key, 3) makes them"),
        ((2, 5), jax.random.PRNGKey(0), Sampling(1.0),
         "keys: expected a key for each of the 2 rows of logits, got uint32[2]; "
         "jax.random.split(key, 2) makes them"),
        ((2, 5), 0, Sampling(1.0),
         "keys: expected a key for each of the 2 rows of logits, got 0; jax.random.split(key, 2) "
         "makes them"),
        ((5,), KEYS, Sampling(1.0), "logits: expected [rows, vocabulary], got float32[5]"),
        ((2, 5), KEYS, 0.7, "sampling: expected a Sampling, got 0.7"),
        ((2, 5), KEYS, Sampling([1.0, 0.5, 0.2]),
         "temperature: expected a number, or one for each of the 2 rows of logits, got 3 of them"),
        ((2, 5), KEYS, Sampling(1.0, top_k=[4]),
         "top_k: expected a number, or one for each of the 2 rows of logits, got 1 of them"),
    ],
)  # fmt: skip
def test_sample_refuses(logits, keys, sampling, message):
    refuses(message, sample, jnp.zeros(logits), keys, sampling)


def test_keys_may_be_of_either_kind():
    logits, how = jnp.zeros((2, 50)), Sampling(1.0)
    old = jax.random.key_data(KEYS)
    assert sample(logits, old, how).tolist() == sample(logits, KEYS, how).tolist()
