"""The fused Hopper backward whose blocks take whole heads."""

import dataclasses

import pytest

from pallas_attn.kernels.flash_bwd import sm90 as kernel
from pallas_attn.kernels.flash_bwd import whole_heads, work_order
from pallas_attn.masks import CAUSAL
from tests.kernels.flash_bwd.test_any_size import sized
from tests.kernels.flash_bwd.test_flash_bwd import SMALL, check, problem_of
from tests.support import mosaic

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

# Two blocks, of which one takes two of three heads.
TWO = {"batch": 2, "q_heads": 2, "kv_heads": 2}
THREE = {"batch": 1, "q_heads": 3, "kv_heads": 3}
ROWS = dataclasses.replace(SMALL, block_q=128, whole_heads=True, grid=2)
SLOTS = dataclasses.replace(ROWS, kv_slots=2)
BIAS = TWO | {"bias_dtype": "bfloat16"}
PADDING = {"mask_shape": (2, 1, 1, 520), "shown_keys": ((140, 390), (130, 200))}
HIDDEN = {"mask_shape": (1, 1, 1, 300), "shown_keys": ((0, 0),)}
CASES = {
    "two_slots": (sized(200, 300, 64, **THREE), SLOTS),
    "softcap": (sized(77, 260, 40, softcap=20.0, sinks=True, **THREE), SLOTS),
    "one_tile": (sized(150, 100, 64, v_head_dim=24, dtype="float16", **THREE), ROWS),
    "bias": (sized(130, 200, 64, bias_shape=(1, 2, 130, 200), **BIAS), ROWS),
    "bias_and_padding": (sized(70, 520, 32, bias_shape=(2, 1, 70, 520), **BIAS, **PADDING), SLOTS),
    "chunks": (
        sized(258, 77, 40, batch=2, q_heads=1, kv_heads=1),
        dataclasses.replace(ROWS, q_chunks=2, grid=3),
    ),
    "all_hidden": (sized(70, 300, 64, **THREE, **HIDDEN), ROWS),
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
    """Every query meets every key that a mask of keys shows; head dims up to 64."""
    problem = problem_of(sized(577, 577, 64, **THREE))
    assert whole_heads.takes(kernel.plan_of(problem, ROWS).tiling)
    for changes in (
        {"kv_heads": 1},
        {"head_dim": 72},
        {"dtype": "float32"},
        {"arrays": ("kv_lengths",)},
        {"mask": CAUSAL},
    ):
        other = dataclasses.replace(problem, **changes)
        with pytest.raises(ValueError, match=r"^Config\.whole_heads must be False for "):
            kernel.plan_of(other, ROWS)


def test_bits_repeat():
    problem = dataclasses.replace(problem_of(CASES["two_slots"][0]), deterministic=True)
    assert kernel.is_fused(problem, ROWS)
