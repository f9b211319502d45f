"""The Hopper forward of short windows where 8 heads or more share K and V."""

import dataclasses

import pytest

from pallas_attn.kernels.flash_fwd import sm90_group_window as kernel
from pallas_attn.masks import CAUSAL, sliding_window
from tests.kernels.flash_bwd.test_any_size import sized
from tests.kernels.flash_fwd.test_flash_fwd import check, problem_of
from tests.support import mosaic

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


def windowed(rows: int, width: int, heads: tuple[int, int] = (8, 1), **changes):
    return dataclasses.replace(
        sized(rows, rows, 64, q_heads=heads[0], kv_heads=heads[1], **changes),
        mask=sliding_window(width),
    )


CASES = {
    # Rows past the last one, rows without 128 keys before them, and a block of several units.
    "window128": (windowed(152, 128, sinks=True, batch=1), kernel.Config(4, grid=3)),
    "window65": (windowed(168, 65, (16, 2), batch=1), kernel.Config(2, grid=5)),
    "window8": (windowed(88, 8, (16, 1), dtype="float16", batch=2), kernel.Config(3, 3, grid=4)),
    "window100": (windowed(144, 100, sinks=True, batch=1), kernel.Config(3, 2, grid=2)),
}


@mosaic.here_and_on_a_gpu
@pytest.mark.parametrize("name", CASES)
def test_cases(name, where):
    with where():
        check(*CASES[name])


def test_problems_of_this_kernel():
    problem = problem_of(windowed(512, 128, (64, 8), sinks=True))
    assert kernel.KERNEL.limit(problem) is None
    for changes in (
        {"mask": CAUSAL},
        {"mask": sliding_window(129)},
        {"mask": sliding_window(7)},
        {"kv_heads": 16},
        {"head_dim": 128},
        {"q_len": 504},
        {"q_offset": 8},
        {"dtype": "float32"},
        {"arrays": ("kv_lengths",)},
        {"softcap": 20.0},
        {"share": 2},
        {"scale": 1e-30},
    ):
        refused = kernel.KERNEL.limit(dataclasses.replace(problem, **changes))
        assert refused and refused.remedy == "leave implementation=None", changes
