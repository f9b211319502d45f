"""The Hopper forward at head dims above 256: right in the interpreter with its races watched, and
compiled ahead of time.
"""

import dataclasses
import functools

import pytest

from pallas_attn import CAUSAL, FULL
from pallas_attn.kernels.flash_fwd import sm90_wide as kernel
from tests.kernels.flash_fwd.test_flash_fwd import (
    AttentionInputs,
    arguments_of,
    check,
    problem_of,
    run,
    shape_of,
    small,
)
from tests.support import budget, mosaic, subjects
from tests.support.problems import cases

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

SMALL = kernel.Config(grid=2)
ROUND = kernel.Config(grid=2, k_ring=4, v_ring=3)  # rings of no whole tiles


def wide(name: str, head_dim: int = 512) -> cases.AttentionCase:
    """A named problem with wide heads, of few of them."""
    case = small(name)
    v_head_dim = case.v_head_dim if case.v_head_dim > 256 else 512
    return dataclasses.replace(case, head_dim=head_dim, v_head_dim=v_head_dim)


CASES = {
    "dim512": ("dim512", 512, SMALL),
    "round": ("dim512", 512, ROUND),
    "all_in_registers": ("dim512", 256, ROUND),
    "odd_dims": ("dim72_320", 72, ROUND),
    "window_t_above_s": ("window_t_above_s", 128, SMALL),  # rows without a key
}


def test_the_ring_holds_a_tile_of_k():
    problem = problem_of(wide("dim512"))
    with pytest.raises(ValueError, match=r"Config\.k_ring must be at least 4, a kv tile, for"):
        kernel.smem_bytes(problem, kernel.Config(k_ring=3))


@pytest.mark.gpu
def test_gradients_on_the_gpu():
    """This forward and the backward of wide heads, which dispatch chooses."""
    case = wide("dim512")
    do, dlse = subjects.cotangents(case)
    arguments = case.arguments() | {"do": do, "dlse": dlse, "implementation": None}
    got = subjects.forward_and_backward(**arguments)
    wanted = budget.attention(case.arguments(), do, dlse, tensor_cores=True)
    budget.check(got, wanted)


@mosaic.here_and_on_a_gpu
@pytest.mark.parametrize("name", CASES)
def test_cases(name, where):
    problem, head_dim, config = CASES[name]
    with where():
        check(wide(problem, head_dim), config)


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
def test_machine_code(mask):
    case = dataclasses.replace(wide("dim512"), q_len=1024, kv_len=1024, mask=mask)
    problem = problem_of(case)
    call = functools.partial(run, problem=problem, config=kernel.Config.default(problem))
    shapes = AttentionInputs(**{k: shape_of(x) for k, x in arguments_of(case).items()})
    report = mosaic.compile_for(call, shapes)
    assert (report.launches, report.others) == (1, ())
    assert report.spill_bytes <= 64
