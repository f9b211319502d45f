"""Small models, and runs of the decode loop that tests share."""

import dataclasses
import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_lm import decode, model, session
from pallas_lm.config import random_params
from pallas_lm.hf_config import config_from
from tests.lm import witness

LENGTHS = (5, 12, 1, 16, 9, 3)  # all padded to 16: programs are what takes time here
forward = jax.jit(model.forward, static_argnums=0)


@functools.cache
def small(family="qwen3"):
    """(config, params) of weights that make a model say different things."""
    config = config_from(witness.CONFIGS[family])
    params = random_params(config, 0, jnp.float32)
    return config, jax.tree.map(lambda x: x * 4 if x.ndim > 2 else x, params)


def prompts(lengths=LENGTHS):
    rng = np.random.default_rng(1)
    return tuple(tuple(rng.integers(0, 96, n).tolist()) for n in lengths)


def options(**changes):
    sizes = {"batch": 3, "capacity": 48, "page_size": 8, "chunk": 4, "dtype": "float32"}
    return decode.Options(**sizes | changes)


def run(texts, how, wanted=10, seed=0):
    """(the run, its statuses)."""
    return _run(texts, how, how.sampling, wanted, seed)


@functools.cache
def _run(texts, how, sampling, wanted, seed):
    del sampling  # which is no part of what makes two options equal
    made = decode.Run(*small(), how, texts, wanted, seed)
    return made, list(made)


def plain_run(wanted=10, **changes):
    """A run of all prompts."""
    return run(prompts(), options(**changes), wanted)[0]


def tokens(made):
    return [sequence.tokens for sequence in made.sequences]


def ends(made):
    return [(sequence.tokens, sequence.ended) for sequence in made.sequences]


def times_are_known(made):
    """Each token has a time, in order."""
    for sequence in made.sequences:
        assert len(sequence.times) == len(sequence.tokens)
        assert sequence.times == sorted(sequence.times)


def shown(stdout=None, stderr=None, **changes):
    """(exit status, standard output, standard error) of a session."""
    stdout, stderr = stdout or io.StringIO(), stderr or io.StringIO()
    settings = {"prompts": ("ROMEO:\n", "The sea"), "max_new_tokens": 20, "chunk": 4} | changes
    names = {field.name for field in dataclasses.fields(session.Settings)}
    own = {name: settings.pop(name) for name in names & set(settings)}
    status = session.decode(session.Settings(settings, **own), stdout, stderr)
    return status, stdout.getvalue(), stderr.getvalue()


def refusal(call, *arguments, **fields):
    """The one line that a call is refused with."""
    with pytest.raises(ValueError) as caught:
        call(*arguments, **fields)
    line = str(caught.value)
    assert len(line) < 600 and line.isprintable()
    return line


def refuses(message, call, *arguments, **fields):
    """The call is refused with just this message."""
    assert refusal(call, *arguments, **fields) == message
