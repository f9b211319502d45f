"""A few rows by a weight: the kernel right in the interpreter, compiled, and right on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn._linear import Layer, linear, streams
from pallas_attn.kernels import linear_sm90 as kernel
from tests import mosaic, subjects

needs_aot = pytest.mark.skipif(not mosaic.available(), reason="the aot extra is not installed")
Config = kernel.Config
KERNELS = next(row for row in subjects.ROWS if row.generation == "sm90")


def drawn(rows, out, inner, dtype="bfloat16", layers=3):
    rng = np.random.default_rng(rows)
    x, w = (rng.standard_normal(shape) for shape in ((rows, inner), (layers, out, inner)))
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype)


def run(x, w, layer, *, problem, config):
    return kernel.run(x, w, layer, problem, config)


def check(problem, config, layer=1):
    """Every element, to the roundings of a sum in float32 and of the result."""
    x, w = drawn(problem.rows, problem.out, problem.inner, problem.dtype)
    call = functools.partial(run, problem=problem, config=config)
    parts = jax.jit(call)(x, w, jnp.int32(layer))
    assert parts.shape == (config.splits, problem.rows, problem.out)
    got = np.asarray(parts, np.float64).sum(axis=0)
    x, w = np.asarray(x, np.float64), np.asarray(w[layer], np.float64)
    eps = float(jnp.finfo(parts.dtype).eps)
    allowed = eps * np.abs(x @ w.T) + 2.0**-20 * (np.abs(x) @ np.abs(w).T)
    assert (np.abs(got - x @ w.T) <= allowed).all()


def problem(rows, out, inner, dtype="bfloat16", out_dtype="bfloat16"):
    return kernel.Problem(rows, out, inner, dtype, out_dtype)


@pytest.mark.guards
@pytest.mark.parametrize(
    "problem, config",
    [
        (problem(1, 64, 256), Config(16, 2, stages=4, ctas=3)),
        (problem(64, 128, 192), Config(48, 1, stages=2, ctas=2)),
        (problem(13, 192, 320, "float16", "float32"), Config(80, 1, 128, 3, 2)),
        (problem(40, 64, 448), Config(64, 4, stages=3, ctas=132)),
    ],
    ids=str,
)
def test_interpreted(problem, config):
    """Last units and last columns that are only partly there, rows that are padding, rings that go
    on from one unit to the next.
    """
    with mosaic.interpret():
        check(problem, config)


LLAMA = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]


@needs_aot
@pytest.mark.guards
@pytest.mark.parametrize(
    "problem",
    [
        problem(64, 28672, 4096),
        problem(1, 4096, 14336),
        problem(8, 128256, 4096, "float16", "float32"),
    ],
    ids=str,
)
def test_machine_code(problem):
    config = kernel.Config.default(problem)
    shapes = (problem.rows, problem.inner), (4, problem.out, problem.inner), ()
    types = (problem.dtype, problem.dtype, "int32")
    arrays = [jax.ShapeDtypeStruct(*both) for both in zip(shapes, types, strict=True)]
    call = functools.partial(run, problem=problem, config=config)
    report = mosaic.compile_for(call, *arrays)
    assert (report.launches, report.copies, report.spill_bytes) == (1, 0, 0)
    assert "HGMMA" in report.sass


@pytest.mark.parametrize("rows", [1, 8, 33, 64])
@pytest.mark.parametrize("out, inner", [*LLAMA, (128256, 4096), (151936, 2048), (64, 64)])
def test_every_multiprocessor_has_its_share(rows, out, inner):
    """Whatever the size: the busiest reads at most an eighth more than the mean, and shared memory
    holds four parts of it.
    """
    asked = problem(rows, out, inner)
    plan = kernel.Plan(asked, kernel.Config.default(asked))
    config = plan.config
    units = plan.tiles * config.splits
    busiest = -(-units // kernel.SMS) * plan.steps * config.block_in * config.block_out
    if out * inner > 2**20:
        assert busiest <= 1.125 * out * inner / kernel.SMS
    assert kernel.smem_bytes(plan) < 227 * 1024


@pytest.mark.guards
def test_a_layer_of_a_stack_is_what_xla_makes_of_it():
    x, w = drawn(6, 64, 128)
    x = x.reshape(2, 3, 128)
    with KERNELS.active():
        assert streams(32, None) and not streams(33, None) and not streams(6, "reference")
        got = jax.jit(lambda x, w, n: linear(x, Layer(w, n), jnp.float32))(x, w, jnp.int32(2))
    want = linear(x, w[2], jnp.float32)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    odd = jnp.asarray(np.ones((3, 40, 100)), jnp.bfloat16)  # a size that the kernel does not take
    got = linear(odd[0, :2, :], Layer(odd, 1))
    np.testing.assert_array_equal(got, np.full((2, 40), 100))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 33, 64])
@pytest.mark.parametrize("out, inner", [*LLAMA, (32000, 4096), (128, 64), (3072, 1024)])
def test_on_the_gpu(rows, out, inner):
    asked = problem(rows, out, inner, out_dtype="float32" if out == 32000 else "bfloat16")
    check(asked, kernel.Config.default(asked), layer=2)
