"""The Hopper backward that keeps dQ of a head in shared memory."""

import dataclasses

import pytest

from pallas_attn.kernels.flash_bwd import sm90, sm90_heads, sm90_short
from pallas_attn.masks import CAUSAL
from tests.kernels.flash_bwd.test_any_size import sized
from tests.kernels.flash_bwd.test_flash_bwd import ONE, check, default_of, problem_of
from tests.support import mosaic

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

# One block takes all heads, or each block one.
ALONE, EACH = (sm90_heads.Config(grid) for grid in (1, 0))
TWO = {"batch": 2, "q_heads": 2, "kv_heads": 2}
ONE_OF_TWO = TWO | {"batch": 1}
PADDING = TWO | {
    "bias_dtype": "bfloat16",
    "mask_shape": (2, 1, 1, 392),
    "shown_keys": ((0, 90), (140, 300)),
}
HEADS = {
    "one_tile": (sized(49, 100, 32, **ONE), EACH),
    "heads_in_turn": (sized(77, 150, 24, **TWO), ALONE),
    "two_swizzles": (sized(141, 270, 72, v_head_dim=40, dtype="float16", **ONE), EACH),
    "bias_and_padding": (sized(70, 392, 32, bias_shape=(2, 1, 70, 392), **PADDING), ALONE),
    "bias_float32": (sized(72, 100, 24, bias_shape=(1, 2, 72, 100), **ONE_OF_TWO), EACH),
    "softcap": (sized(130, 200, 64, softcap=20.0, sinks=True, **ONE), EACH),
    "dq_beside_dv": (sized(200, 150, 72, **ONE_OF_TWO), ALONE),
    "one_slot_of_k": (sized(330, 150, 72, v_head_dim=40, **ONE_OF_TWO), ALONE),
}


@mosaic.here_and_on_a_gpu
@pytest.mark.parametrize("name", HEADS)
def test_heads(name, where):
    with where():
        check(*HEADS[name])


def test_slots():
    """The cases meet every way in which shared memory is divided."""
    slots = {name: sm90_heads.slots_of(problem_of(case)) for name, (case, _) in HEADS.items()}
    assert slots["heads_in_turn"] == (2, 2, 4, False)
    assert slots["dq_beside_dv"] == (2, 1, 2, True)
    assert slots["one_slot_of_k"] == (1, 1, 2, True)


def test_problems_of_this_kernel():
    """Plain ones whose dQ fits; by default only where there are heads for all blocks."""
    problem = problem_of(sized(197, 197, 64, batch=33, q_heads=8, kv_heads=8))
    assert isinstance(default_of(problem), sm90_heads.Config)
    pairs = dataclasses.replace(problem, q_len=65, kv_len=128)
    assert isinstance(default_of(pairs), sm90_heads.Config)
    assert isinstance(default_of(dataclasses.replace(pairs, q_len=64)), sm90_short.Config)
    for rows, keys, module in ((200, 64, sm90_heads), (128, 64, sm90_short), (400, 128, sm90)):
        few = dataclasses.replace(problem, q_len=rows, kv_len=keys)
        assert isinstance(default_of(few), module.Config), (rows, keys)
    for changes in (
        {"q_len": 577},
        {"kv_heads": 1},
        {"head_dim": 104},
        {"dtype": "float32"},
        {"arrays": ("kv_lengths",)},
        {"mask": CAUSAL},
    ):
        assert not sm90_heads.takes(dataclasses.replace(problem, **changes)), changes
    for changes in ({"batch": 1}, {"batch": 17}, {"q_len": 128, "kv_len": 600}):
        few = dataclasses.replace(problem, **changes)
        assert sm90_heads.takes(few) and sm90_heads.slower(few), changes
        assert not isinstance(default_of(few), sm90_heads.Config), changes
    assert sm90_heads.limit(dataclasses.replace(problem, head_dim=104))
