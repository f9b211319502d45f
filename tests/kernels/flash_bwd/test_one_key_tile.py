"""The fused Hopper backward: one tile of keys, in parts too, and two slots of keys."""

import dataclasses

import pytest

from pallas_attn.kernels.flash_bwd import dq_sum
from pallas_attn.kernels.flash_bwd import sm90 as kernel
from pallas_attn.masks import CAUSAL
from tests.kernels.flash_bwd.test_any_size import sized
from tests.kernels.flash_bwd.test_flash_bwd import ONE, SMALL, check, default_of, problem_of
from tests.support import mosaic

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

THREE = {"batch": 1, "q_heads": 3, "kv_heads": 3}
ROWS = dataclasses.replace(SMALL, block_q=128, grid=2)
BIAS = {"bias_shape": (1, 1, 150, 100), "bias_dtype": "float16"}
CASES = {
    "one_tile": (sized(150, 100, 64, v_head_dim=24, dtype="float16", **ONE, **BIAS), ROWS),
    "group": (sized(256, 64, 16, sinks=True, batch=1, q_heads=4, kv_heads=2), ROWS),
    "parts": (sized(300, 77, 40, **ONE), dataclasses.replace(ROWS, parts=2)),
    "parts_of_a_group": (
        sized(258, 128, 64, batch=1, q_heads=3, kv_heads=1),
        dataclasses.replace(ROWS, parts=4),
    ),
    "two_slots": (sized(200, 300, 64, **THREE), dataclasses.replace(ROWS, kv_slots=2)),
}


@mosaic.here_and_on_a_gpu
@pytest.mark.parametrize("name", CASES)
def test_cases(name, where):
    with where():
        check(*CASES[name])


def test_problems_of_one_key_tile():
    """Every query row meets the one tile; by default parts give most blocks one."""
    cross = problem_of(sized(4096, 77, 40, batch=8, q_heads=8, kv_heads=8))
    config = default_of(cross)
    assert config.parts == 2 and isinstance(kernel.plan_of(cross, config).dq, dq_sum.Written)
    assert kernel.Config.default(dataclasses.replace(cross, batch=33)).parts == 1
    for changes in (
        {"kv_len": 129},
        {"head_dim": 72},
        {"dtype": "float32"},
        {"arrays": ("kv_lengths",)},
        {"mask": CAUSAL},
    ):
        other = dataclasses.replace(cross, **changes)
        assert not dq_sum.is_written(other)


def test_bits_of_one_key_tile_repeat():
    problem = dataclasses.replace(problem_of(CASES["one_tile"][0]), deterministic=True)
    assert kernel.limit(problem) is None and not kernel.plan_of(problem, ROWS).order.turns
