"""The Blackwell backward, which has no GPU here: right in the interpreter with its races watched,
and compiled ahead of time for both of its targets.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from pallas_attn import CAUSAL, sliding_window
from pallas_attn._call import dispatch
from pallas_attn._call.problem import AttentionInputs
from pallas_attn.kernels.flash_bwd import sm100 as kernel
from pallas_attn.kernels.lang import mosaic as lang
from tests.kernels.flash_bwd.test_flash_bwd import (
    check,
    lengths_over_scores,
    problem_of,
    run,
)
from tests.kernels.flash_fwd.test_flash_fwd import arguments_of, shape_of, small
from tests.kernels.flash_fwd.test_sm100 import LONG, case
from tests.support import aot, fuzz, fuzz_positions, mosaic, subjects
from tests.support.fuzz_derivatives import Learned, run_learned
from tests.support.problems.case import AttentionCase

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

ALONE = kernel.Config(panels=1)
INTERPRETED = {
    "causal": (case(300, 300, mask=CAUSAL, batch=2), ALONE),
    "group7": (case(130, 260, 64, q_heads=7, mask=CAUSAL, q_offset=130), kernel.Config(3)),
    "float16": (case(384, 100, 96, dtype="float16"), kernel.Config(q_stages=3)),
    "window": (case(400, 400, 64, mask=sliding_window(150)), kernel.Config(panels=3)),
    "keys_without_rows": (case(100, 300, 64, mask=CAUSAL, q_offset=-20), kernel.Config()),
    "offsets": (case(130, 300, 64, mask=CAUSAL, batch=2, q_offset=(170, -20)), kernel.Config()),
    "documents": (case(300, 300, segments=(70, 130, 100), mask=CAUSAL), kernel.Config()),
    "nan_past_lengths": (lengths_over_scores(), kernel.Config(do_stages=2)),
}
NAMED = (
    "band_at_run_time",
    "segments_mixed",
    "bias_shared",
    "padding_ragged",
    "everything",
)
INTERPRETED |= {name: (small(name), kernel.Config()) for name in NAMED}


@pytest.mark.guards
@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name):
    with mosaic.interpret():
        check(*INTERPRETED[name])


BLACKWELL = subjects.Subject("blackwell", "sm100", "sm100")
SIZES = {"q_heads": 2, "kv_heads": 1, "head_dim": 64, "v_head_dim": 64}


@pytest.mark.guards
@pytest.mark.parametrize("name, fields", [
    ("blocks", {"terms": (("and", "blocks"),)}),
    ("documents", {"terms": (("and", "documents"),), "mask": CAUSAL}),
    ("slopes", {"added": "linear", "mask": CAUSAL}),
])  # fmt: skip
def test_functions_of_positions(name, fields):
    """Results and gradients."""
    drawn = fuzz_positions.Case(name, 1, 300, 300, **SIZES, **fields)
    fuzz.prove(fuzz_positions.run, drawn, BLACKWELL)


@pytest.mark.guards
def test_a_learned_score():
    """The portable walk makes the gradient of a score function's array."""
    learned = Learned("learned", 1, 130, 200, **SIZES, mask=CAUSAL, q_offset=70)
    fuzz.prove(run_learned, learned, BLACKWELL)


@pytest.mark.guards
@pytest.mark.parametrize("name", ["documents", "everything"])
def test_lowers(name):
    """Mosaic lowers less than the interpreter computes: whole swizzles, no `not` in a warp."""
    sizes, config = INTERPRETED[name]
    call = functools.partial(run, problem=problem_of(sizes), config=config)
    assert "mosaic_gpu" in mosaic.lower_for_cuda(call, shapes_of(sizes))


def shapes_of(sizes: AttentionCase) -> tuple:
    """The shapes of a kernel's residuals; arrays that are long are not drawn."""
    arguments = jax.eval_shape(functools.partial(arguments_of, sizes))
    inputs = jax.tree.map(shape_of, AttentionInputs(**arguments))
    out = jax.ShapeDtypeStruct(inputs.q.shape, inputs.q.dtype)
    batch, rows, heads, _ = out.shape
    lse = jax.ShapeDtypeStruct((batch, heads, rows), jnp.float32)
    return inputs, out, lse, out, lse


@pytest.mark.parametrize("gpu", ["sm100", "sm103"])
def test_who_takes_the_backward(gpu):
    """The call's own name chooses it; what it refuses goes to the portable kernel."""
    problem = dataclasses.replace(problem_of(case(1024, 1024)), gpu=gpu)
    assert dispatch.select(problem, "sm100").module == "flash_bwd.sm100"
    for changes in ({"deterministic": True}, {"dtype": "float32"}, {"v_head_dim": 64}):
        other = dataclasses.replace(problem, **changes)
        assert dispatch.select(other, "sm100").module == "flash_bwd.sm80"


def test_refusals():
    problem = problem_of(case(1024, 1024))
    assert kernel.limit(problem) is None
    limit = kernel.limit(dataclasses.replace(problem, deterministic=True))
    assert limit.reason == "blocks add to dq in any order, so bits do not repeat"
    limit = kernel.limit(dataclasses.replace(problem, head_dim=192))
    assert "one of 64, 96, 128, not 192 and 128" in limit.reason


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_what_the_interpreter_does_not_see(dim):
    """Registers are no more than a block has, nor columns of tensor memory, and barriers at which
    tensor memory changes hands ask for the fences of tcgen05.
    """
    assert sum(kernel.REGISTERS) * lang.THREADS <= 65536
    problem = problem_of(case(512, 512, dim))
    memory = kernel.scratch(kernel.plan_of(problem, kernel.Config.default(problem)))
    ordered = {n for n in memory._fields if getattr(getattr(memory, n), "orders_tensor_core", 0)}
    assert ordered == {
        *("q_free", "do_free", "s_ready", "s_read", "p_ready", "p_free"),
        *("dp_ready", "ds_ready", "dq_ready", "dq_read", "sums_ready"),
    }
    columns = [x.shape[1] for x in (memory.scores, memory.dp, memory.dq, memory.dk, memory.dv) if x]
    assert sum(columns) <= 512 and (memory.dq is None) == (dim > 64)
    assert kernel.smem_bytes(problem, kernel.Config.default(problem)) <= 232_448


SPILLS = {"causal": 0, "full": 16, "h64": 16, "h96": 0}  # bytes stored: scalars
LONG_CASES = LONG | {"full": case(8192, 8192, q_heads=8, kv_heads=2)}


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize(
    "name, target, arch",
    [*((name, "b200", "sm_100a") for name in SPILLS), ("causal", "b300", "sm_103a")],
)
def test_machine_code(name, target, arch):
    sizes = LONG_CASES[name]
    problem = dataclasses.replace(problem_of(sizes), gpu=aot.GENERATIONS[target])
    config = kernel.Config.default(problem)
    call = functools.partial(run, problem=problem, config=config)
    report = mosaic.compile_for(call, shapes_of(sizes), target=target, sass=True)
    assert report.launches == 2  # row statistics before it
    assert f".target {arch}\n" in report.ptx
    assert report.registers <= 128 and report.spill_bytes <= SPILLS[name]
    steps, rows = sizes.head_dim // 16, 128 // 16
    counts = {w: len(re.findall(rf"\b{w}\b", report.sass)) for w in ("UTCHMMA", "UTMAREDG")}
    # S and dP twice in the code, the first ones apart; dV, dQ and dK over 128 rows or keys.
    assert counts == {"UTCHMMA": 4 * steps + 3 * rows, "UTMAREDG": sizes.head_dim // kernel.CHUNK}
