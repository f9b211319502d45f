"""The Hopper backward that keeps dQ of a head in shared memory."""

import dataclasses
from contextlib import nullcontext
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
HEADS = {
    "one_tile": (sized(49, 100, 32, **ONE), EACH),
    "heads_in_turn": (sized(77, 150, 24, batch=2, q_heads=2, kv_heads=2), ALONE),
    "two_swizzles": (sized(141, 270, 72, v_head_dim=40, dtype="float16", **ONE), EACH),
    "passing_sums": (sized(190, 270, 24, v_head_dim=40, **ONE), EACH),
    "softcap": (sized(130, 200, 64, softcap=20.0, sinks=True, **ONE), EACH),
}
PASSING = ("passing_sums",)


@pytest.mark.guards
@pytest.mark.parametrize("name", HEADS)
def test_heads_interpreted(name):
    passing = [slots for slots in sm90_heads._SLOTS if slots.sums]
    patch = mock.patch.object(sm90_heads, "_SLOTS", passing) if name in PASSING else nullcontext()
    sm90_heads._fitting.cache_clear()
    with mosaic.interpret(), patch:
        check(*HEADS[name])
    sm90_heads._fitting.cache_clear()
