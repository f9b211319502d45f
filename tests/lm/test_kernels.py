"""A few rows between two attentions: kernels right in the interpreter, compiled, and right on a
GPU.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_attn._call import config as _config
from pallas_attn._call import device as _device
from pallas_attn._call import dispatch
from pallas_attn._mesh import sharding
from pallas_lm import rows as lm_rows
from pallas_lm.kernels import linear as kernel
from pallas_lm.kernels import norm as norm_kernel
from pallas_lm.rows import Layer, linear, streams
from tests.support import mosaic, subjects
from tests.support import operations as support

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

Config = kernel.Config
KERNELS = next(row for row in subjects.ROWS if row.generation == "sm90")


def drawn(rows, out, inner, dtype="bfloat16", layers=3):
    keys = jax.random.split(jax.random.key(rows))
    shapes = (rows, inner), (layers, out, inner)  # GPUs draw them faster than NumPy
    return [jax.random.normal(*both, dtype) for both in zip(keys, shapes, strict=True)]


def run(x, w, layer, *, problem, config):
    return kernel.run(x, w, layer, problem, config)


def check(problem, config, layer=1):
    """Every element, to the roundings of a sum in float32 and of the result."""
    halves = 1 + problem.gated
    x, w = drawn(problem.rows, halves * problem.out, problem.inner, problem.dtype)
    call = functools.partial(run, problem=problem, config=config)
    partials = jax.jit(call)(x, w, jnp.int32(layer))
    assert partials.shape == (config.splits, problem.rows, problem.out)
    got = np.asarray(partials, np.float64).sum(axis=0)
    x, w = np.asarray(x, np.float64), np.asarray(w[layer], np.float64)
    want, unsure = x @ w.T, 2.0**-20 * (np.abs(x) @ np.abs(w).T)
    if problem.gated:
        (gate, up), (first, second) = (np.split(y, 2, axis=1) for y in (want, unsure))
        silu = gate * np.exp(-np.logaddexp(0, -gate))
        want = silu * up
        # The slope of silu stays below 1.1; exp and the division are of float32.
        unsure = 1.1 * first * np.abs(up) + second * np.abs(silu) + 2.0**-20 * np.abs(want)
    allowed = float(jnp.finfo(partials.dtype).eps) * np.abs(want) + unsure
    assert (np.abs(got - want) <= allowed).all()


def problem(rows, out, inner, dtype="bfloat16", out_dtype="bfloat16", gated=False):
    return kernel.Problem(rows, out, inner, dtype, out_dtype, gated)


@pytest.mark.guards
@pytest.mark.parametrize(
    "problem, config",
    [
        (problem(1, 64, 256), Config(16, 2, stages=4, grid=3)),
        (problem(64, 128, 192), Config(48, 1, stages=2, grid=2)),
        (problem(13, 192, 320, "float16", "float32"), Config(80, 1, 128, 3, 2)),
        (problem(40, 64, 448), Config(64, 4, stages=3, grid=132)),
        (problem(13, 96, 320, gated=True), Config(64, 1, stages=3, grid=2)),
        (problem(64, 128, 256, gated=True), Config(96, 1, 128, stages=2, grid=2)),
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


@pytest.mark.machine_code
@pytest.mark.guards
@pytest.mark.parametrize(
    "problem",
    [
        problem(64, 14336, 4096, gated=True),
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
    report = mosaic.compile_for(call, *arrays, sass=True)
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
        assert streams(64, jnp.bfloat16, None) and not streams(65, jnp.bfloat16, None)
        assert not streams(6, jnp.float32, None) and not streams(6, jnp.bfloat16, "reference")
        got = jax.jit(lambda x, w, n: linear(x, Layer(w, n), jnp.float32))(x, w, jnp.int32(2))
    want = linear(x, w[2], jnp.float32)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    odd = jnp.asarray(np.ones((3, 40, 100)), jnp.bfloat16)  # a size that the kernel does not take
    got = linear(odd[0, :2, :], Layer(odd, 1))
    np.testing.assert_array_equal(got, np.full((2, 40), 100))
    got = lm_rows.gated(odd[0, :2, :], Layer(odd, 1))
    np.testing.assert_array_equal(got, np.full((2, 20), jnp.bfloat16(10000)))


# ---- between matmuls ----------------------------------------------------------------------------


def normal(shape, dtype, seed):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def norm_operands(problem, partials_dtype="float32"):
    shapes = (problem.rows, problem.dim), (problem.partials, problem.rows, problem.dim)
    dtypes = problem.dtype, partials_dtype
    x, partials = (normal(shape, dtype, 1) for shape, dtype in zip(shapes, dtypes, strict=True))
    return x, partials, normal((3, problem.dim), problem.dtype, 2), jnp.int32(2)


def close_to(problem, got, want):
    """Equal, up to the order of sums."""
    eps = float(jnp.finfo(problem.dtype).eps)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours.astype(float), theirs.astype(float), rtol=2 * eps, atol=eps)


def check_norm(problem, partials_dtype="float32"):
    """x to the bit where there is one partial sum."""
    x, partials, weight, layer = norm_operands(problem, partials_dtype)
    got = norm_kernel.run(x, partials, weight, layer, problem)
    want = lm_rows.add_norm(x, partials, weight[2], problem.eps)
    close_to(problem, got, want)
    assert problem.partials > 1 or (got[0] == want[0]).all()


NORMS = [
    norm_kernel.Problem(3, 1024, 4, "bfloat16", 1e-5),
    norm_kernel.Problem(1, 3584, 1, "float16", 1e-6),
]


@pytest.mark.guards
@pytest.mark.parametrize("problem", NORMS, ids=str)
def test_norm_interpreted(problem):
    with mosaic.interpret():
        check_norm(problem)


def norm(*operands, problem):
    return norm_kernel.run(*operands, problem)


@pytest.mark.machine_code
@pytest.mark.guards
def test_machine_code_of_a_norm():
    problem = norm_kernel.Problem(64, 4096, 8, "bfloat16", 1e-5)
    arrays = jax.eval_shape(functools.partial(norm_operands, problem))
    report = mosaic.compile_for(functools.partial(norm, problem=problem), *arrays, sass=True)
    assert (report.launches, report.copies, report.spill_bytes) == (1, 0, 0)
    assert "ACQBULK" in report.sass  # waits for the kernel before it


# ---- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 9, 33, 64])
@pytest.mark.parametrize("out, inner", [*LLAMA, (32000, 4096), (128, 64), (3072, 1024)])
def test_on_the_gpu(rows, out, inner):
    asked = problem(rows, out, inner, out_dtype="float32" if out == 32000 else "bfloat16")
    check(asked, kernel.Config.default(asked), layer=2)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 40, 64])
@pytest.mark.parametrize("out, inner", [(14336, 4096), (18944, 3584), (64, 64)])
def test_gated_on_the_gpu(rows, out, inner):
    asked = problem(rows, out, inner, gated=True)
    check(asked, kernel.Config.default(asked), layer=2)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("dim, partials", [(4096, 8), (4096, 1), (3584, 4), (512, 2)])
def test_norm_on_the_gpu(rows, dim, partials):
    check_norm(norm_kernel.Problem(rows, dim, partials, "bfloat16", 1e-5))
    check_norm(norm_kernel.Problem(rows, dim, partials, "bfloat16", 1e-5), "bfloat16")


# ---- kernels that begin while the one before them ends -------------------------------------------


@pytest.mark.parametrize(
    ("operation", "overlaps"),
    [("flash_forward", {}), ("append", {"overlaps": True}), ("decode", {"overlaps": True})],
)
def test_overlapping_reaches_those_that_know_of_it(monkeypatch, operation, overlaps):
    """And nobody's other settings."""
    problem = support._BASE[operation]
    taken = dispatch.select(problem, None)
    kernel = dataclasses.replace(taken.kernel, run=lambda inputs, problem, config: config)
    monkeypatch.setitem(vars(taken), "kernel", kernel)
    with _device.assume("sm90"):
        plain = taken.run(None, problem)
        with _device.overlapping():
            overlapping = taken.run(None, problem)
    assert plain == _config.choose(taken.name, kernel, problem)
    assert overlapping == dataclasses.replace(plain, **overlaps)


@pytest.mark.parametrize("axes", ["manual", "automatic"])
def test_overlapping_reaches_what_is_lowered_later(axes):
    """Within jax.shard_map, and where XLA says how arrays are split."""
    seen, mesh = [], jax.make_mesh((2,), ("tp",), (jax.sharding.AxisType.Auto,))

    def run(x):
        seen.append(_device.asked_to_overlap.get())
        return (x + 1,)

    def over_devices(x):
        split = sharding.Split((("m",),), (("m",),), free=("m",), writes=(0,))
        with _device.overlapping():
            return sharding.over_devices(run, (x,), split)[0]

    call, x = over_devices, jax.device_put(jnp.zeros(4), jax.NamedSharding(mesh, P("tp")))
    if axes == "manual":
        call = jax.shard_map(over_devices, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
    np.testing.assert_array_equal(jax.jit(call)(x), np.ones(4))
    assert len(seen) >= 2 and all(seen)
