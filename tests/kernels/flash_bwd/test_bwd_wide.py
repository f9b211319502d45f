"""The Hopper backward at head dims above 256: right in the interpreter with its races watched, and
compiled ahead of time.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_attn import CAUSAL, FULL
from pallas_attn._call import dispatch
from pallas_attn.kernels.flash_bwd import sm90_wide as kernel
from tests.kernels.flash_bwd.test_flash_bwd import check, problem_of, run
from tests.kernels.flash_fwd.test_flash_fwd import AttentionInputs, arguments_of, shape_of
from tests.kernels.flash_fwd.test_wide import wide
from tests.support import mosaic

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

SMALL = kernel.Config(grid=2)
ROUND = kernel.Config(grid=2, ring=5)  # the ring holds no whole tiles

CASES = {
    "dim512": ("dim512", 512, SMALL),
    "round": ("dim512", 264, ROUND),
    "odd_dims": ("dim72_320", 72, SMALL),
    "window_t_above_s": ("window_t_above_s", 128, SMALL),  # rows without a key
    "sinks": ("sinks_empty_rows", 128, SMALL),
    "parts_of_odd_dims": ("dim72_320", 72, dataclasses.replace(SMALL, parts=2)),
}


@mosaic.here_and_on_a_gpu
@pytest.mark.parametrize("name", CASES)
def test_cases(name, where):
    problem, head_dim, config = CASES[name]
    with where():
        check(wide(problem, head_dim), config)


def test_who_takes_wide_heads():
    problem = problem_of(wide("dim512"), gpu="sm90")
    float32 = dataclasses.replace(problem, dtype="float32")
    biased = problem_of(wide("bias"), gpu="sm90")
    names = [dispatch.select(x, None).name for x in (problem, float32, biased)]
    assert names == ["flash_bwd_sm90_wide", "flash_bwd_sm80", "flash_bwd_sm80"]


def test_a_ring_holds_a_tile():
    """Warpgroup 2 would wait for blocks that the producer could not load."""
    problem = problem_of(wide("dim512"))
    kernel.smem_bytes(problem, kernel.Config(ring=4))
    with pytest.raises(ValueError, match=r"Config\.ring must be at least 4, a tile, for"):
        kernel.smem_bytes(problem, kernel.Config(ring=3))


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=str)
def test_machine_code(mask):
    case = dataclasses.replace(wide("dim512"), q_len=1024, kv_len=1024, mask=mask)
    problem, shape = problem_of(case), jax.ShapeDtypeStruct
    config = kernel.Config.default(problem)
    call = functools.partial(run, problem=problem, config=config)
    inputs = AttentionInputs(**{k: shape_of(x) for k, x in arguments_of(case).items()})
    out = shape((case.batch, case.q_len, case.q_heads, case.v_head_dim), case.dtype)
    lse = shape((case.batch, case.q_heads, case.q_len), jnp.float32)
    report = mosaic.compile_for(call, (inputs, out, lse, out, lse))
    assert config.parts > 1 and report.launches == 4  # one adds up the parts
    assert report.spill_bytes <= 64
