"""The Hopper backward that keeps dQ of a head in shared memory."""

import contextlib
import dataclasses
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.kernels.flash_bwd import sm90 as kernel
from pallas_attn.kernels.flash_bwd import sm90_heads
from pallas_attn.masks import CAUSAL
from tests.kernels.flash_bwd.test_any_size import sized
from tests.kernels.flash_bwd.test_flash_bwd import ONE, check, problem_of
from tests.support import mosaic

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

# One block takes all heads, or each block one.
ALONE, EACH = (kernel.Config(heads=True, grid=grid) for grid in (1, 0))
TWO = {"batch": 2, "q_heads": 2, "kv_heads": 2}
ONE_OF_TWO = TWO | {"batch": 1}
PADDING = TWO | {
    "bias_dtype": "bfloat16",
    "mask_shape": (2, 1, 1, 392),
    "shown_keys": ((0, 90), (140, 300)),
}
HEADS = {
    "one_tile": (sized(49, 100, 32, **ONE), EACH),
    "heads_in_turn": (sized(77, 150, 24, batch=2, q_heads=2, kv_heads=2), ALONE),
    "two_swizzles": (sized(141, 270, 72, v_head_dim=40, dtype="float16", **ONE), EACH),
    "passing_sums": (sized(190, 270, 24, v_head_dim=40, **ONE), EACH),
    "bias": (
        sized(130, 200, 32, bias_shape=(1, 2, 130, 200), bias_dtype="bfloat16", **TWO),
        ALONE,
    ),
    "bias_and_padding": (sized(70, 392, 32, bias_shape=(2, 1, 70, 392), **PADDING), ALONE),
    "bias_float32": (sized(72, 100, 24, bias_shape=(1, 2, 72, 100), **ONE_OF_TWO), EACH),
    "softcap": (sized(130, 200, 64, softcap=20.0, sinks=True, **ONE), EACH),
}
PASSING = ("passing_sums",)


@contextlib.contextmanager
def slots(name):
    """Sums of dQ that pass through shared memory, in some cases."""
    some = [x for x in sm90_heads._SLOTS if x.sums or name not in PASSING]
    with mock.patch.object(sm90_heads, "_SLOTS", some):
        sm90_heads._fitting.cache_clear()
        yield
    sm90_heads._fitting.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("name", HEADS)
def test_heads_on_the_gpu(name):
    with slots(name):
        check(*HEADS[name])


@pytest.mark.guards
@pytest.mark.parametrize("name", HEADS)
def test_heads_interpreted(name):
    with mosaic.interpret(), slots(name):
        check(*HEADS[name])
