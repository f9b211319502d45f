"""A program traces and lowers a kernel once, however many layers call it.

Kernels are counted in what is traced for a Hopper GPU, where a kernel of an inner `jax.jit` counts
once however often that function is called: jax lowers it once, and XLA compiles one.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import pallas_attn as pa
from pallas_attn._call import device, sharding
from tests.support.mosaic import lower_for_cuda

FEW, MANY = 2, 5  # layers
Q = jax.ShapeDtypeStruct((2, 256, 8, 64), jnp.bfloat16)
SLOPES = jax.ShapeDtypeStruct((8,), jnp.float32)
BATCH = PartitionSpec("x")
SEQUENCES, KV_HEADS, HEAD_DIM = 4, 2, 64

Layers = Callable[..., jax.Array]


@pytest.fixture(autouse=True)
def _hopper():
    with device.assume("sm90"):
        yield


def layers_of(number: int, body: Callable[..., jax.Array]) -> Layers:
    """A model that adds `body(x, *rest)` to x once a layer."""

    def model(x: jax.Array, *rest: Any) -> jax.Array:
        for _ in range(number):
            x = x + body(x, *rest)
        return x

    return model


def plain(x: jax.Array) -> jax.Array:
    return pa.flash_attention(x, x, x, mask=pa.CAUSAL)


def masked(x: jax.Array) -> jax.Array:
    """With a function that each layer makes anew."""
    return pa.flash_attention(x, x, x, mask=pa.mask_fn(lambda b, h, q, k: (q - k) % 3 == 0))


def scored(x: jax.Array, slopes: jax.Array) -> jax.Array:
    function = pa.score_fn(lambda s, b, h, q, k, slopes: s + slopes[h] * (k - q), slopes)
    return pa.flash_attention(x, x, x, score=function)


def documents(x: jax.Array) -> jax.Array:
    ids = jnp.cumsum(x[:, :, 0, 0] > 1, axis=1)
    return pa.flash_attention(x, x, x, mask=pa.CAUSAL, segment_ids=ids)


def over_devices(model: Layers, spec: PartitionSpec = BATCH) -> Layers:
    """`jax.shard_map` over two devices."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    return jax.shard_map(model, mesh=mesh, in_specs=spec, out_specs=spec)


def repeated(model: Layers) -> Layers:
    return lambda x: jax.lax.scan(lambda x, _: (model(x), None), x, length=3)[0]


def gradients(model: Layers) -> Layers:
    return jax.grad(lambda *arrays: model(*arrays).astype(jnp.float32).sum())


def kernels(jaxpr: core.Jaxpr, seen: set[int]) -> Iterator[Any]:
    """The kernels of a jaxpr and of the functions that it calls, those of one function once."""
    if id(jaxpr) in seen:
        return
    seen.add(id(jaxpr))
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("pallas_call", "mpmd_map"):
            yield equation
            continue
        for value in jax.tree.leaves(list(equation.params.values())):
            if isinstance(value, core.ClosedJaxpr):
                yield from kernels(value.jaxpr, seen)
            elif isinstance(value, core.Jaxpr):
                yield from kernels(value, seen)


def traced(function: Callable[..., Any], *shapes: Any) -> int:
    """Kernels of the traced function."""
    return len(list(kernels(jax.jit(function).trace(*shapes).jaxpr.jaxpr, set())))


def same_for_any_depth(program: Callable[[int], tuple[Any, ...]]) -> None:
    """`program(layers)` -> a function and its shapes."""
    few, many = (traced(*program(number)) for number in (FEW, MANY))
    assert few == many > 0


BODIES = {
    "plain": (plain,),
    "remat": (jax.checkpoint(plain),),
    "inside_jit": (jax.jit(plain),),
    "mask_function": (masked,),
    "score_function": (scored, SLOPES),
    "documents": (documents,),
}


@pytest.mark.parametrize("name", BODIES)
def test_layers_with_gradients(name):
    body, *rest = BODIES[name]
    same_for_any_depth(lambda number: (gradients(layers_of(number, body)), Q, *rest))


TRANSFORMS = {
    "vmap": (jax.vmap, (3, *Q.shape)),
    "scan": (repeated, Q.shape),
    "shard_map": (over_devices, Q.shape),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_layers_with_gradients_within(name):
    transform, sizes = TRANSFORMS[name]
    x = jax.ShapeDtypeStruct(sizes, Q.dtype)
    same_for_any_depth(lambda number: (gradients(transform(layers_of(number, plain))), x))


def test_layers_over_an_explicit_mesh():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    split = NamedSharding(mesh, BATCH)
    x = jax.ShapeDtypeStruct(Q.shape, Q.dtype, sharding=split)
    with jax.set_mesh(mesh):
        same_for_any_depth(lambda number: (gradients(layers_of(number, plain)), x))


def test_layers_over_an_automatic_mesh(monkeypatch):
    """XLA asks how each call is split; what runs on a device is lowered once."""
    split = NamedSharding(jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,)), BATCH)
    lowered, lower = [], sharding.mlir.lower_fun

    def counted(function):
        lowered.append(function)
        return lower(function)

    monkeypatch.setattr(sharding.mlir, "lower_fun", counted)

    @jax.jit
    def attend(x):
        axes = (("b", "t"),)
        return sharding.over_devices(lambda x: (x * 2,), [x], sharding.Split(axes, axes, ("b",)))[0]

    model, x = jax.jit(layers_of(MANY, attend)), jnp.ones((4, 3))
    result = model(jax.device_put(x, split))
    assert (result == 3**MANY).all() and result.sharding == split
    assert len(lowered) == 1


@pytest.mark.parametrize("method", ["gather", "ring", "heads"])
def test_layers_over_a_context(method):
    context = pa.Context("x", method=method)

    def attend(x):
        return pa.flash_attention(x, x, x, mask=pa.CAUSAL, context=context)

    rows = PartitionSpec(None, "x")
    same_for_any_depth(lambda n: (gradients(over_devices(layers_of(n, attend), rows)), Q))


def caches(kind: str) -> pa.KVCache:
    """Caches of `MANY` layers; separate ones have a single layer, which all layers of the test
    write.
    """
    kinds = {
        "stacked": lambda: pa.StackedCache.create(SEQUENCES, 256, KV_HEADS, HEAD_DIM, layers=MANY),
        "paged": lambda: pa.PagedCache.create(SEQUENCES, 32, 64, KV_HEADS, HEAD_DIM, layers=MANY),
        "fp8": lambda: pa.PagedCache.create(
            SEQUENCES, 32, 64, KV_HEADS, HEAD_DIM, layers=MANY, dtype=jnp.float8_e4m3fn
        ),
        "separate": lambda: pa.PerSequenceCache.create([256] * SEQUENCES, KV_HEADS, HEAD_DIM),
        "latent": lambda: pa.PagedCache.create(
            SEQUENCES, 32, 64, 1, 192, v_head_dim=128, shared_kv=True, layers=MANY
        ),
    }
    return jax.eval_shape(kinds[kind])


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("kind", ["stacked", "paged", "fp8", "separate", "latent"])
def test_layers_over_a_cache(kind, rows):
    """Also where every layer has a number of its own."""
    heads, dim = (1, 192) if kind == "latent" else (KV_HEADS, HEAD_DIM)
    new = jax.ShapeDtypeStruct((SEQUENCES, rows, heads, dim), jnp.bfloat16)
    q = jax.ShapeDtypeStruct((SEQUENCES, rows, 8, dim), jnp.bfloat16)

    def program(number):
        def step(q, new, cache):
            cache = cache.extend(rows)
            for n in range(number):
                layer = {} if kind == "separate" else {"layer": n}
                cache = pa.write_kv(cache, new, None if kind == "latent" else new, **layer)
                out = pa.decode_attention(q, cache, **layer)
                q = q + out.sum(axis=-1, keepdims=True)
            return q, cache

        return step, q, new, caches(kind)

    same_for_any_depth(program)


def test_what_is_traced_once_is_lowered_once():
    few, many = (
        lower_for_cuda(gradients(layers_of(number, plain)), Q).count("@mosaic_gpu")
        for number in (FEW, MANY)
    )
    assert few == many == traced(gradients(layers_of(FEW, plain)), Q)
