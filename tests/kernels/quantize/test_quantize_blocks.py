"""The launch that rounds q, k and v to float8: every byte as the reference says and as NumPy does,
on every way through the kernel, and what its machine code costs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn._call import config, device
from pallas_attn._call.problem import QuantizeProblem
from pallas_attn.kernels.quantize import blocks
from tests.caches.test_quantized import awkward_rows, quantized
from tests.support import mosaic, subjects
from tests.support.append_cases import assert_same_bytes

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"

# Sizes (batch, T, N, H; S, K, Hv), dtype, dtype of the results, rows of a scale, other facts.
CASES = {
    "blocks": ((1, 256, 2, 128, 384, 1, 64), "bfloat16", E4M3, 128, {}),
    "short_last": ((1, 257, 1, 64, 301, 1, 24), "bfloat16", E4M3, 128, {}),
    "each_row": ((2, 9, 3, 72, 10, 3, 64), "bfloat16", E4M3, 1, {}),
    "eight_rows": ((1, 24, 4, 80, 40, 2, 16), "float16", E5M2, 8, {}),
    "heads": ((1, 300, 2, 64, 270, 1, 64), "bfloat16", E4M3, None, {"registers": 16}),
    "float32": ((1, 64, 2, 20, 96, 2, 12), "float32", E4M3, 64, {}),
    "odd_dim": ((1, 40, 2, 3, 40, 2, 7), "bfloat16", E5M2, 20, {}),
    "lengths": ((3, 130, 2, 64, 40, 1, 64), "float16", E4M3, 128, {"lengths": True}),
    "by_hand": ((1, 32, 2, 32, 48, 1, 32), "bfloat16", E4M3, 16, {"gpu": "sm80"}),
}


def case_of(name):
    """The arguments of a case."""
    (batch, q_len, heads, dim, kv_len, kv_heads, v_dim), dtype, to, rows, facts = CASES[name]
    rng = np.random.default_rng(sum(map(ord, name)))
    ties = awkward_rows(rng)[-80:].reshape(-1) / 64  # halfway between two numbers, and beside it

    def draw(*shape):
        x = np.where(rng.random(shape) < 0.5, rng.choice(ties, shape), rng.standard_normal(shape))
        x = x * np.float32(2.0) ** rng.integers(-9, 9, (*shape[:3], 1))
        return jnp.asarray(x, jnp.float32).astype(dtype)

    shapes = ((q_len, heads, dim), (kv_len, kv_heads, dim), (kv_len, kv_heads, v_dim))
    arguments = dict(zip("qkv", [draw(batch, *x) for x in shapes], strict=True))
    arguments["k"] = arguments["k"].at[0, 1, 0, 0].set(jnp.nan)
    arguments["v"] = arguments["v"].at[-1, -1, -1, -1].set(jnp.inf)
    if "lengths" in facts:
        arguments["q_lengths"] = jnp.array([130, 129, 0], jnp.int32)
        arguments["kv_lengths"] = jnp.array([0, 40, 17], jnp.int32)
        for x, ends in (("q", "q_lengths"), ("k", "kv_lengths"), ("v", "kv_lengths")):
            for row, end in enumerate(arguments[ends].tolist()):
                arguments[x] = arguments[x].at[row, end:].set(jnp.nan)
    return arguments, {"dtype": to, "rows": rows}, facts


def cut(x, ends, size):
    """x [B, rows, heads, dim] as [B, n, heads, size * dim], zeros past lengths and sizes."""
    x = np.asarray(x).astype(np.float32)
    for row, end in enumerate(() if ends is None else ends.tolist()):
        x[row, end:] = 0
    batch, rows, heads, dim = x.shape
    padded = np.zeros((batch, -(-rows // size) * size, heads, dim), np.float32)
    padded[:, :rows] = x
    return np.moveaxis(padded.reshape(batch, -1, size, heads, dim), 2, 3).reshape(
        batch, -1, heads, size * dim
    )


def expected(arguments, dtype, rows):
    """Numbers and scales by NumPy."""
    sizes = {}
    for x in "qkv":
        length = arguments[x].shape[1]
        most = min(length, rows or length)
        sizes[x] = most if most % 128 == 0 else length // -(-length // most)
    ends = {"q": "q_lengths", "k": "kv_lengths", "v": "kv_lengths"}
    numbers, scales = [], []
    for name, size in sizes.items():
        x = arguments[name]
        batch, length, heads, dim = x.shape
        made, scale = quantized(cut(x, arguments.get(ends[name]), size), dtype)
        made = made.reshape(batch, -1, heads, size, dim)
        numbers.append(np.moveaxis(made, 3, 2).reshape(batch, -1, heads, dim)[:, :length])
        scales.append(scale)
    return [*numbers, *scales]


def check(subject, name):
    arguments, options, facts = case_of(name)
    more = {"registers": facts["registers"]} if "registers" in facts else None
    if more is None:
        got = subject.call(pa.quantize_qkv, **arguments, **options)
    else:
        with config.forced("quantize_blocks", more):
            got = subject.call(pa.quantize_qkv, **arguments, **options)
    assert_same_bytes(tuple(got), expected(arguments, **options))


@pytest.mark.parametrize("name", CASES)
def test_reference(name):
    check(subjects.ROWS[0], name)


@pytest.mark.guards
@pytest.mark.parametrize("name", CASES)
def test_interpreted(name):
    gpu = CASES[name][-1].get("gpu", "sm90")
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
