"""The forward on float8, for Hopper and portable: right in the interpreter with its races watched,
compiled without spills ahead of time, and right on a GPU.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn._call import config, device
from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.kernels.flash_fwd import float8_values, sm80_float8
from pallas_attn.kernels.flash_fwd import sm90 as kernel
from pallas_attn.kernels.mma import wgmma_float8
from pallas_attn.masks import CAUSAL, FULL
from tests.support import budget, fuzz, fuzz_float8, mosaic, subjects
from tests.support import operations as support
from tests.support.float8_cases import CASES, draw
from tests.support.problems import by_name

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

PORTABLE = next(row for row in subjects.ROWS if row.name == "portable")
FEW = ("plain", "blocks", "blocks_of_128", "rows", "e5m2", "odd", "wide", "lengths", "documents")
FEW += ("sinks",)
HOPPER = next(row for row in subjects.ROWS if row.name == "interpreted")


def check(subject, name):
    fuzz.prove(fuzz_float8.run, CASES[name], subject)


@pytest.mark.guards
@pytest.mark.parametrize("name", CASES)
def test_interpreted(name):
    check(HOPPER, name)


@pytest.mark.guards
@pytest.mark.parametrize("name", FEW)
def test_portable_interpreted(name):
    check(PORTABLE, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_portable_on_the_gpu(name):
    check(subjects.Subject("gpu", "sm80"), name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_the_gpu(name):
    if device.gpu_generation() != "sm90":
        pytest.skip("a kernel for Hopper")
    check(subjects.Subject("gpu", None), name)


@pytest.mark.guards
@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize("v_dim", [32, 136])
def test_sums(sums, v_dim, rng):
    """Sums in registers and on the tensor core, and parts of wide values, which scales of blocks
    multiply.
    """
    arguments = dict(zip("qkv", draw(rng, q_len=64, kv_len=640, dim=32, v_dim=v_dim), strict=True))
    arguments["v_scale"] = jnp.asarray(rng.uniform(0.5, 2, (1, 5, 1)), jnp.float32)
    with config.forced("flash_fwd_sm90", {"block_kv": 64, "float32_sums": sums, "grid": 1}):
        got = HOPPER.call(by_name.flash_attention_with_lse, **arguments)
    budget.check(dict(zip(("out", "lse"), got, strict=True)), budget.attention(arguments))


@pytest.mark.guards
def test_values_lie_as_probabilities_do():
    """V^T has the keys in the order in which threads hold probabilities, zeros past lengths."""
    rng = np.random.default_rng(0)
    v = jnp.asarray(rng.standard_normal((2, 70, 3, 24)), jnp.float32).astype(jnp.float8_e4m3fn)
    lengths = jnp.array([33, 70], jnp.int32)

    def transposed(v, lengths, implementation):
        del implementation
        return float8_values.transposed(v, lengths, 32, 128)

    for ends in (lengths, None):
        got = np.float32(HOPPER.call(transposed, v=v, lengths=ends))
        wanted = np.zeros((2, 3, 32, 128), np.float32)
        for row, end in enumerate((70, 70) if ends is None else (33, 70)):
            wanted[row, :, :24, :end] = np.float32(v)[row, :end].transpose(1, 2, 0)
        p = wgmma_float8.reordered(jnp.asarray(wanted.reshape(-1, 128)))
        np.testing.assert_array_equal(got, np.float32(p).reshape(got.shape))


# ---- compiled ------------------------------------------------------------------------------------


def problem_of(dim: int, mask=FULL, **fields) -> AttentionProblem:
    sizes = {"batch": 1, "q_len": 4096, "kv_len": 4096, "q_heads": 16, "kv_heads": 4}
    dtypes = {"dtype": "float8_e4m3fn", "out_dtype": "bfloat16"}
    dims = {"head_dim": dim, "v_head_dim": dim, "scale": dim**-0.5}
    fields = sizes | dtypes | dims | {"mask": mask} | fields
    return dataclasses.replace(support._BASE["flash_forward"], **fields)


def shapes_of(problem: AttentionProblem) -> tuple[jax.ShapeDtypeStruct, ...]:
    rows = (problem.q_len, problem.q_heads, problem.head_dim)
    keys = [(problem.kv_len, problem.kv_heads, n) for n in (problem.head_dim, problem.v_head_dim)]
    dtype = jnp.dtype(problem.dtype)
    return tuple([jax.ShapeDtypeStruct((problem.batch, *x), dtype) for x in (rows, *keys)])


def run(problem, q, k, v):
    return kernel.run(AttentionInputs(q, k, v), problem, kernel.Config.default(problem))


COMPILED = {
    "128": problem_of(128),
    "128_causal": problem_of(128, CAUSAL),
    "64": problem_of(64),
    "256": problem_of(256),
    "192_128": problem_of(192, v_head_dim=128),
}


# Bytes that are stored once a kv tile at most; other Configs that spill nothing are slower.
SPILLED = {"64": 24, "256": 208}


@pytest.mark.machine_code
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_with_few_spills(name):
    problem = COMPILED[name]
    report = mosaic.compile_for(functools.partial(run, problem), *shapes_of(problem))
    assert report.spill_bytes <= SPILLED.get(name, 0) and not report.notes


def run_portable(problem, q, k, v):
    config = sm80_float8.Config.default(problem)
    return sm80_float8.run(AttentionInputs(q, k, v), problem, config)


@pytest.mark.machine_code
@pytest.mark.parametrize("name", ["64", "128_causal", "256", "192_128"])
def test_portable_compiles_for_ada(name):
    """By matmuls on 8 bits, without spills."""
    problem = dataclasses.replace(COMPILED[name], gpu="sm89")
    call = functools.partial(run_portable, problem)
    report = mosaic.compile_for(call, *shapes_of(problem), target="sm89", sass=True)
    assert report.spill_bytes == 0 and "QMMA" in report.sass


@pytest.mark.parametrize("gpu", ["sm80", "sm86"])
def test_gpus_before_ada_refuse_by_name(gpu):
    q = jax.ShapeDtypeStruct((1, 8, 1, 64), jnp.float8_e4m3fn)
    reason = "flash_fwd_sm80_float8: it is built for sm89 and later"
    with device.assume(gpu), pytest.raises(pa.UnsupportedError, match=reason) as error:
        jax.eval_shape(by_name.flash_attention, q, q, q)
    assert "multiply them by their scales and cast q, k and v to one of them" in str(error.value)


@pytest.mark.guards
def test_a_mask_function_interpreted(rng):
    """It hides what the same mask in an array hides."""
    q, k, v = (
        jnp.asarray(rng.standard_normal((1, rows, 1, 64)), "float8_e4m3fn") for rows in (65, 70, 70)
    )
    seen = pa.mask_fn(lambda b, h, q, kv: kv % 4 == q % 4)
    subject = next(row for row in subjects.ROWS if row.name == "interpreted")
    got = subject.call(pa.flash_attention, q, k, v, mask=seen)
    want = subject.call(pa.flash_attention, q, k, v, mask_array=jnp.asarray(seen.dense(65, 70)))
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, want)), 0.02, 0.02)
