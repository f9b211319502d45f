"""The fused Hopper backward whose blocks take whole heads."""

import dataclasses

import pytest

from pallas_attn.kernels.flash_bwd import sm90 as kernel
from pallas_attn.kernels.flash_bwd import whole_heads, work_order
from pallas_attn.masks import CAUSAL
from tests.kernels.flash_bwd.test_any_size import sized
from tests.kernels.flash_bwd.test_flash_bwd import ONE, SMALL, check, problem_of
from tests.support import mosaic

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

# Two blocks, of which one takes two of three heads.
TWO = {"batch": 2, "q_heads": 2, "kv_heads": 2}
THREE = {"batch": 1, "q_heads": 3, "kv_heads": 3}
WHOLE = dataclasses.replace(SMALL, whole_heads=True, grid=2)
ROWS = dataclasses.replace(WHOLE, block_q=128)
CASES = {
    "rows": (sized(200, 300, 64, **THREE), dataclasses.replace(ROWS, kv_slots=2)),
    "rows_of_two_swizzles": (sized(141, 150, 72, v_head_dim=24, dtype="float16", **ONE), ROWS),
    "halves": (sized(77, 260, 40, softcap=20.0, sinks=True, **THREE), WHOLE),
    "halves_with_rest": (
        sized(141, 130, 72, **ONE),
        dataclasses.replace(WHOLE, stages=3, dq_lag=1, kv_slots=2),
    ),
    "bias": (
        sized(
            130,
            200,
            64,
            bias_shape=(1, 2, 130, 200),
            bias_dtype="bfloat16",
            batch=2,
            q_heads=2,
            kv_heads=2,
        ),
        dataclasses.replace(ROWS, stages=2),
    ),
    "bias_and_padding": (
        sized(
            70,
            520,
            32,
            bias_shape=(2, 1, 70, 520),
            bias_dtype="bfloat16",
            batch=2,
            q_heads=2,
            kv_heads=2,
            mask_shape=(2, 1, 1, 520),
            shown_keys=((140, 390), (130, 200)),
        ),
        ROWS,
    ),
    "all_hidden": (
        sized(70, 300, 64, **THREE, mask_shape=(1, 1, 1, 300), shown_keys=((0, 0),)),
        WHOLE,
    ),
    "one_tile": (sized(70, 100, 64, **THREE), ROWS),
    "halves_late": (sized(70, 130, 128, **ONE), dataclasses.replace(WHOLE, dq_lag=2)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_whole_heads_on_the_gpu(name):
    check(*CASES[name])


@pytest.mark.guards
@pytest.mark.parametrize("name", CASES)
def test_whole_heads_interpreted(name):
    with mosaic.interpret():
        check(*CASES[name])


def test_heads_of_blocks():
    """Each block takes all kv tiles of its heads, one head after another."""
    problem = problem_of(sized(200, 300, 64, **THREE))
    order = kernel.plan_of(problem, ROWS).order
    assert order.grid == 2
    table = work_order.schedule(order)
    assert table[0, :7].tolist() == [6, 0, 1, 2, 8, 9, 10]
    assert table[1, :4].tolist() == [3, 4, 5, 6]


def test_problems_of_whole_heads():
    """Those whose kv tiles all meet all query tiles."""
    problem = problem_of(sized(577, 577, 64, **THREE))
    assert whole_heads.takes(kernel.plan_of(problem, SMALL).tiling)
    for changes in (
        {"kv_heads": 1},
        {"head_dim": 136},
        {"dtype": "float32"},
        {"arrays": ("kv_lengths",)},
        {"mask": CAUSAL},
    ):
        other = dataclasses.replace(problem, **changes)
        with pytest.raises(ValueError, match=r"^Config\.whole_heads must be False for "):
            kernel.plan_of(other, ROWS)


def test_bits_repeat():
    problem = dataclasses.replace(problem_of(CASES["rows"][0]), deterministic=True)
    assert kernel.is_fused(problem, ROWS)
