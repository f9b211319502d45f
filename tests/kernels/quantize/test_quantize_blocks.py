"""The launch that rounds q, k and v to float8: every byte as the reference says and as NumPy does,
on every way through the kernel, and what its machine code costs.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest

import pallas_attn as pa
from pallas_attn._call import config, device
from pallas_attn._call.problem import QuantizeProblem
from pallas_attn.kernels.quantize import blocks
from tests.support import fuzz, mosaic, subjects
from tests.support.fuzz_float8 import Rounding, run_rounding

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def case(sizes, dtype="bfloat16", to=E4M3, rows=128, lengths=False) -> Rounding:
    """`sizes`: batch, T, S, N, K, H and Hv; `rows` of a scale."""
    return Rounding(*sizes, dtype, to, rows, lengths)


CASES = {
    "blocks": case((1, 256, 384, 2, 1, 128, 64)),
    "short_last": case((1, 257, 301, 1, 1, 64, 24)),
    "each_row": case((2, 9, 10, 3, 3, 72, 64), rows=1),
    "eight_rows": case((1, 24, 40, 4, 2, 80, 16), "float16", E5M2, 8),
    "heads": case((1, 300, 270, 2, 1, 64, 64), rows=None),
    "float32": case((1, 64, 96, 2, 2, 20, 12), "float32", rows=64),
    "odd_dim": case((1, 40, 40, 2, 2, 3, 7), to=E5M2, rows=20),
    "lengths": case((3, 130, 40, 2, 1, 64, 64), "float16", lengths=True),
    "by_hand": case((1, 32, 48, 2, 1, 32, 32), rows=16),  # on a GPU that does not convert
}
REGISTERS = {"heads": {"registers": 16}}


def check(subject, name):
    """Every byte; in a second round with NaN and infinities."""
    forced = contextlib.nullcontext()
    if name in REGISTERS:
        forced = config.forced("quantize_blocks", REGISTERS[name])
    with forced:
        fuzz.prove(run_rounding, CASES[name], subject, rounds=2)


@pytest.mark.parametrize("name", CASES)
def test_reference(name):
    check(subjects.ROWS[0], name)


@pytest.mark.guards
@pytest.mark.parametrize("name", CASES)
def test_interpreted(name):
    gpu = "sm80" if name == "by_hand" else "sm90"
    check(subjects.Subject(gpu, None, generation=gpu), name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in CASES if name != "by_hand"])
def test_on_the_gpu(name):
    check(subjects.Subject("gpu", None), name)


def test_plans():
    """Which blocks of rows are read once, and by whom."""

    def plan_of(rows, dim=128, dtype="bfloat16"):
        sizes = {"batch": 1, "q_len": 8192, "kv_len": 8192, "q_heads": 8, "kv_heads": 8}
        sizes |= {"head_dim": dim, "v_head_dim": dim, "blocks": (8192 // rows,) * 3}
        problem = QuantizeProblem("sm90", dtype, E4M3, **sizes)
        return blocks.Plan.of(problem, 0, blocks.Config.default(problem))

    assert (plan_of(1).share, plan_of(1).steps, plan_of(8).share) == (16, 1, 16)
    assert (plan_of(128).share, plan_of(128).steps, plan_of(128).chunks) == (128, 16, 1)
    for rows, dim, dtype in ((128, 256, "bfloat16"), (128, 128, "float32"), (256, 128, "float16")):
        assert plan_of(rows, dim, dtype).chunks == 1
    assert plan_of(128, 256, "float32").chunks > 1 and plan_of(8192).chunks > 1


def test_has_no_derivative_and_says_what_has():
    x = jnp.ones((1, 8, 1, 64), jnp.float32)
    loss = lambda x: pa.quantize_qkv(x, x, x).k_scale.sum()  # noqa: E731
    with device.assume("sm90"), pytest.raises(pa.UnsupportedError, match="float8=True"):
        jax.eval_shape(jax.grad(loss), x)


# ---- compiled ------------------------------------------------------------------------------------

# Head dims of q and k and of v, dtype, rows of a scale, and the most registers.
COMPILED = {
    "128": (128, 128, "bfloat16", 128, 104),
    "256": (256, 256, "bfloat16", 128, 168),
    "192_128_float16": (192, 128, "float16", 128, 192),
    "float32": (128, 128, "float32", 128, 168),
    "each_row": (128, 128, "bfloat16", 1, 32),
    "heads": (128, 128, "bfloat16", None, 64),
}


@pytest.mark.machine_code
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_without_spills(name):
    """One launch; rows are read 16 bytes at a time."""
    dim, v_dim, dtype, rows, registers = COMPILED[name]
    shapes = [
        jax.ShapeDtypeStruct((1, 4096, heads, n), dtype)
        for heads, n in ((8, dim), (2, dim), (2, v_dim))
    ]
    call = functools.partial(pa.quantize_qkv, rows=rows)
    report = mosaic.compile_for(call, *shapes, sass=True)
    assert (report.launches, report.spill_bytes) == (1, 0)
    assert report.registers <= registers
    assert report.sass.count("LDG.E.128") and "CALL" not in report.sass
