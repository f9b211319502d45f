"""Plain jit with a sequence that is split over devices: each computes its own rows, and says so."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_attn as pa
from pallas_attn._call import batching, dispatch
from pallas_attn._call.problem import OPTIONAL
from pallas_attn._context_parallel import launch
from pallas_attn._mesh import sharding
from tests.parallel.test_kernels_batched_and_sharded import (
    REFERENCE,
    InPlaceOfAKernel,
    assert_same_trees,
    mesh_of,
)

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

B, T, S, N, K, H = 2, 16, 24, 8, 4, 8


class Backward:
    """Results of a backward kernel, by the derivative of the reference."""

    name = implementation = "kernel"

    def takes(self, problem):
        return True

    def run(self, residuals, problem):
        inputs, *rows = residuals
        varying = {  # or vjp adds up over devices by itself
            name: sharding.varying_like(x, inputs.q)
            for name in batching.FLOATS
            if (x := getattr(inputs, name)) is not None
        }
        inputs = inputs._replace(**varying)
        result = launch.derivative(REFERENCE, problem, inputs, rows)
        return inputs._replace(**dict.fromkeys(OPTIONAL) | result)


@pytest.fixture
def seen(monkeypatch):
    """Kernels that differentiate; and the problems that they were handed."""
    problems = []

    class Forward(InPlaceOfAKernel):
        def run(self, inputs, problem):
            problems.append(problem)
            return super().run(inputs, problem)

    monkeypatch.setitem(dispatch.TABLES, "flash_forward", (Forward("flash_forward"),))
    monkeypatch.setitem(dispatch.TABLES, "flash_backward", (Backward(),))
    return problems


def normal(seed, *shape):
    """By NumPy: jax's would be compiled into every program that draws."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


FLOATS = {
    "q": normal(0, B, T, N, H),
    "k": normal(1, B, S, K, H),
    "v": normal(2, B, S, K, H),
    "bias": normal(3, 1, N, T, S),
    "sinks": normal(4, N),
}
IDS = jnp.asarray(np.arange(T)[None] // 6 + np.zeros((B, 1)), jnp.int32)
KV_IDS = jnp.asarray(np.arange(S)[None] // 9 + np.zeros((B, 1)), jnp.int32)
LENGTHS = {
    "q_lengths": jnp.asarray([T - 1, 3], jnp.int32),
    "kv_lengths": jnp.asarray([S, 7], jnp.int32),
}
OPTIONS = {
    "causal": {"mask": pa.CAUSAL, "q_offset": 3},
    "offsets": {"mask": pa.sliding_window(5), "q_offset": jnp.asarray([2, -3], jnp.int32)},
    "everything": {"mask": pa.CAUSAL, "segment_ids": (IDS, KV_IDS), **LENGTHS},
}


def loss(floats, options):
    out, lse = pa.flash_attention_with_lse(**floats, **options)
    finite = jnp.where(jnp.isfinite(lse), lse, 0)
    return (normal(8, *out.shape) * out).sum() + (normal(9, *lse.shape) * finite).sum(), out


gradients = functools.partial(jax.grad, has_aux=True)(loss)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (AxisType.Auto, "causal"),
        (AxisType.Auto, "everything"),
        (AxisType.Explicit, "offsets"),
        (AxisType.Explicit, "everything"),
    ],
)
def test_each_device_computes_its_own_rows(seen, kind, name):
    floats = dict(FLOATS) if name == "everything" else {n: FLOATS[n] for n in "qkv"}
    options = OPTIONS[name]
    static = {n: x for n, x in options.items() if n in ("mask", "q_offset") and np.ndim(x) == 0}
    arrays = {n: x for n, x in options.items() if n not in static}

    def both(floats, arrays):
        return gradients(floats, static | arrays)

    want = jax.jit(both)(floats, arrays)
    assert {problem.q_len for problem in seen} == {T}
    seen.clear()
    mesh = mesh_of(kind)
    rows, heads = P("x", "y"), P()
    specs = {"q": rows, "k": rows, "v": rows, "bias": P(None, None, "y"), "sinks": heads}
    place = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in floats.items()}
    there = jax.device_put(arrays, NamedSharding(mesh, P("x")))
    compiled = jax.jit(both).lower(place, there).compile()
    got = compiled(place, there)
    assert_same_trees(got, want)
    assert {problem.q_len for problem in seen if problem.batch == B // 2} == {T // 4}
    assert f"f32[{B // 2},{T // 4},{N},{H}]" in compiled.as_text()  # a device's out
    if name == "causal":
        assert seen[-1].offsets == tuple((3 + n,) for n in range(0, T, T // 4))
