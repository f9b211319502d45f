"""The layer between kernels and jax's transforms, with the reference in a kernel's place.

It holds for whatever has `run(inputs, problem)`, so it is tested where there is no GPU: vmap folds,
shard_map, and jit with sharded inputs (both kinds of mesh axes), compared with native autodiffable
jnp code and, for the shardings, with the collectives of the compiled program.
"""

import dataclasses
import functools
import re

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_attn
from pallas_attn import CAUSAL
from pallas_attn._cache import write
from pallas_attn._call import batching, bind, config, device, dispatch
from pallas_attn._call.problem import AttentionInputs
from pallas_attn._mesh import sharding
from tests.support import in_numpy, mosaic

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

REFERENCE = dispatch.TABLES["flash_forward"][-1]
X, B, T, S, N, K, H, HV = 3, 4, 8, 12, 8, 4, 16, 24
PLAIN = bind.Call(mask=CAUSAL)


def through_layer(q, k, v, **options):
    problem, inputs = bind.attention(q, k, v, PLAIN._replace(**options))
    return batching.attention(REFERENCE, problem, inputs)


def native(q, k, v, **options):
    return pallas_attn.flash_attention_with_lse(q, k, v, mask=CAUSAL, **options)


def wanted(q, k, v, **options):
    return in_numpy.call(functools.partial(native, **options), q, k, v)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def qkv(*lead):
    return normal(0, *lead, T, N, H), normal(1, *lead, S, K, H), normal(2, *lead, S, K, HV)


def assert_same(got, want):
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axes", [(0, 0, 0), (2, None, None)])  # all of them: gradients, below
def test_vmap_over_any_of_q_k_v(axes):
    arrays = [x if axis is not None else x[0] for x, axis in zip(qkv(X, B), axes, strict=True)]
    arrays[0] = jnp.moveaxis(arrays[0], 0, 2) if axes[0] == 2 else arrays[0]
    both = (in_numpy.call(jax.vmap(f, axes), *arrays) for f in (through_layer, native))
    assert_same(*both)


@pytest.mark.parametrize("mapped", [("bias", "kv_lengths"), ("sinks",), ("q_offset",), ()])
def test_vmap_over_optional_arrays(mapped):
    q, k, v = qkv(X, B)
    arguments = {
        "bias": normal(3, X, 1, N, 1, S),
        "kv_lengths": jnp.arange(X * B, dtype=jnp.int32).reshape(X, B),
        "sinks": normal(4, X, N),
        "q_offset": jnp.arange(X * B, dtype=jnp.int32).reshape(X, B) % 5,
        "q_lengths": jnp.arange(X * B, dtype=jnp.int32).reshape(X, B)[:, ::-1] % (T + 1),
    }
    fixed = {name: x[2] for name, x in arguments.items() if name not in mapped}
    moving = {name: arguments[name] for name in mapped}

    def over(function):
        mapped = jax.vmap(lambda q, k, v, some: function(q, k, v, **some, **fixed))
        return in_numpy.call(mapped, q, k, v, moving)

    assert_same(over(through_layer), over(native))


def test_vmap_over_q_alone_folds_into_the_heads():
    q, k, v = qkv(X, B)
    seen = []

    class Spy:
        name = "spy"

        def run(self, inputs, problem):
            seen.append((inputs.q.shape, inputs.k.shape, problem.q_heads))
            return REFERENCE.run(inputs, problem)

    def spied(q_here):
        problem, inputs = bind.attention(q_here, k[0], v[0], PLAIN._replace(sinks=normal(4, N)))
        return batching.attention(Spy(), problem, inputs)

    got = in_numpy.call(jax.vmap(spied), q)
    want = in_numpy.call(jax.vmap(lambda row: native(row, k[0], v[0], sinks=normal(4, N))), q)
    assert_same(got, want)
    assert seen[-1] == ((B, T, X * N, H), (B, S, K, H), X * N)  # keys and values as they were


def test_a_kernel_is_traced_once():
    """In jit and outside, except where somebody watches the choice of a configuration or forces
    one.
    """
    q, k, v = (x[0] for x in qkv(1, B))
    problem, inputs = bind.attention(q, k, v, PLAIN)
    traced = []

    class Spy:
        def run(self, inputs, problem):
            traced.append(problem)
            return REFERENCE.run(inputs, problem)

    call = functools.partial(batching.compiled_once, batching.attention, Spy(), problem)
    assert_same(call(inputs), wanted(q, k, v))
    assert_same(call(inputs._replace(q=q + 1)), wanted(q + 1, k, v))
    jax.jit(lambda inputs: (call(inputs), call(inputs)))(inputs)
    assert len(traced) == 1
    with config.forced("flash_fwd_sm90", {}):
        call(inputs)
    with config.watched():
        call(inputs)
    assert len(traced) == 3


def test_nested_vmap():
    q, k, v = qkv(X, B)
    both = jnp.stack([q, q + 1], axis=1)
    nested = [jax.vmap(jax.vmap(function, (0, None, None))) for function in (through_layer, native)]
    assert_same(*(in_numpy.call(function, both, k, v) for function in nested))


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))


@pytest.mark.parametrize(
    ("kind", "kv_heads", "spec"),
    [
        (AxisType.Auto, K, P("x", None, "y")),
        (AxisType.Auto, 1, P("x", None, "y")),
        (AxisType.Auto, N, P(None, None, "y")),
        (AxisType.Explicit, K, P("x", None, "y")),
        (AxisType.Explicit, 1, P(None, None, "y")),
    ],
)
def test_jit_with_sharded_inputs_needs_no_communication(kind, kv_heads, spec):
    mesh = mesh_of(kind)
    q, k, v = normal(0, B, T, N, H), normal(1, B, S, kv_heads, H), normal(2, B, S, kv_heads, HV)
    kv_spec = P(*(spec if kv_heads > 1 else spec[:1]))
    args = [
        jax.device_put(x, NamedSharding(mesh, s))
        for x, s in ((q, spec), (k, kv_spec), (v, kv_spec))
    ]
    lengths = jnp.asarray([3, 0, S, 7], jnp.int32)
    step = jax.jit(lambda q, k, v: through_layer(q, k, v, kv_lengths=lengths))
    compiled = step.lower(*args).compile()
    assert_same(compiled(*args), wanted(q, k, v, kv_lengths=lengths))
    program = compiled.as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
        assert f"{collective}(" not in program


def test_an_axis_that_cannot_be_split_is_gathered_and_right():
    mesh = mesh_of(AxisType.Auto)
    q, k, v = qkv(B)
    args = [jax.device_put(x, NamedSharding(mesh, P(None, "y"))) for x in (q, k, v)]
    assert_same(jax.jit(through_layer)(*args), wanted(q, k, v))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_query_heads_over_more_devices_than_there_are_kv_heads(kind):
    q, k, v = normal(0, B, T, N, H), normal(1, B, S, 2, H), normal(2, B, S, 2, HV)
    split = jax.device_put(q, NamedSharding(mesh_of(kind), P(None, None, "y")))
    whole = jax.device_put((k, v), NamedSharding(mesh_of(kind), P()))
    assert_same(jax.jit(through_layer)(split, *whole), wanted(q, k, v))


# ---- backward -----------------------------------------------------------------------------------


class BackwardInPlaceOfAKernel:
    """The derivative of the reference, handed over as a backward kernel does it."""

    name = implementation = "kernel"

    def takes(self, problem):
        return True

    def run(self, residuals, problem):
        inputs, _, _, *cotangents = residuals
        assert problem.batch == inputs.q.shape[0] > 0
        floats = {
            name: sharding.varying_like(x, inputs.q)  # or vjp adds up over devices by itself
            for name in batching.FLOATS
            if (x := getattr(inputs, name)) is not None
        }
        floats["score_aux"] = {
            n: sharding.varying_like(inputs.score_aux[n].astype(jnp.float32), inputs.q)
            for n in problem.learned
        }

        def forward(floats):
            aux = dict(enumerate(inputs.score_aux)) | floats["score_aux"]
            floats = floats | {"score_aux": tuple(aux.values())}
            return REFERENCE.run(inputs._replace(**floats), problem)

        (gradients,) = jax.vjp(forward, floats)[1](tuple(cotangents))
        count = len(inputs.score_aux)
        gradients["score_aux"] = tuple(gradients["score_aux"].get(n) for n in range(count))
        return AttentionInputs(**dict.fromkeys(("q", "k", "v")) | gradients)


@pytest.fixture
def kernels_that_differentiate(monkeypatch):
    monkeypatch.setitem(dispatch.TABLES, "flash_forward", (InPlaceOfAKernel("flash_forward"),))
    monkeypatch.setitem(dispatch.TABLES, "flash_backward", (BackwardInPlaceOfAKernel(),))


@pytest.mark.usefixtures("kernels_that_differentiate")
def test_gradients_outside_of_jit_trace_nothing_anew(monkeypatch):
    """The jaxpr of a call is kept with the kernel and the problem, and its transpose is run at
    once.
    """
    q, k, v = jnp.ones((3, 1, 4, 2, 8))
    gradient = jax.grad(lambda *arrays: pallas_attn.flash_attention(*arrays).sum(), (0, 1, 2))
    expected = gradient(q, k, v)

    def refuse(*_):
        raise AssertionError("traced again")

    monkeypatch.setattr(jax, "make_jaxpr", refuse)
    jax.tree.map(np.testing.assert_array_equal, gradient(q, k, v), expected)


def gradients_of(function, floats, **fixed):
    """Gradients of a random sum over out and lse."""

    def loss(floats):
        out, lse = function(**floats, mask=CAUSAL, **fixed)
        seen = jnp.where(jnp.isfinite(lse), lse, 0)
        return (normal(8, *out.shape) * out).sum() + (normal(9, *lse.shape) * seen).sum()

    return jax.grad(loss)(floats)


ours = functools.partial(gradients_of, pallas_attn.flash_attention_with_lse)
theirs = functools.partial(
    gradients_of,
    functools.partial(pallas_attn.flash_attention_with_lse, implementation="reference"),
)


def theirs_of_the_reference(function, *args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(dispatch.TABLES, "flash_forward", (REFERENCE,))
        return in_numpy.call(lambda: function(*args))


def assert_same_trees(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert_same(jax.tree.leaves(got), jax.tree.leaves(want))


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 0, 0), (2, None, None)])
def test_vmap_of_gradients(kernels_that_differentiate, axes):
    arrays = [x if axis is not None else x[0] for x, axis in zip(qkv(X, B), axes, strict=True)]
    arrays[0] = jnp.moveaxis(arrays[0], 0, 2) if axes[0] == 2 else arrays[0]
    lengths = jnp.asarray([3, 0, S, 7], jnp.int32)

    def over(gradients):
        return jax.vmap(
            lambda q, k, v: gradients({"q": q, "k": k, "v": v}, kv_lengths=lengths), axes
        )(*arrays)

    got = in_numpy.call(lambda: over(ours))
    assert_same_trees(got, theirs_of_the_reference(over, theirs))


@pytest.mark.parametrize("axes", [(0, None, None), (0, 0, 0)])
def test_vmap_over_nothing(kernels_that_differentiate, axes):
    """No kernel is asked for a problem of no batch."""
    arrays = [x[:0] if axis == 0 else x[0] for x, axis in zip(qkv(X, B), axes, strict=True)]

    assert jax.vmap(causal, axes)(*arrays).shape == (0, B, T, N, HV)
    gradient = jax.grad(lambda *arrays: causal(*arrays).sum(), (0, 1, 2))
    gradients = jax.vmap(gradient, axes)(*arrays)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, HV)
    assert [x.shape for x in gradients] == [(0, *shape) for shape in shapes]


@pytest.mark.parametrize("mapped", [("q", "k", "v", "bias", "sinks"), ("q",), ("bias",)])
def test_vmap_of_gradients_that_are_sums(kernels_that_differentiate, mapped):
    q, k, v = qkv(X, B)
    floats = {"q": q, "k": k, "v": v, "bias": normal(3, X, 1, N, 1, S), "sinks": normal(4, X, N)}
    fixed = {name: x[1] for name, x in floats.items() if name not in mapped}
    moving = {name: floats[name] for name in mapped}

    def over(gradients):
        return jax.vmap(lambda some: gradients({**fixed, **some}))(moving)

    got = in_numpy.call(lambda: over(ours))
    assert_same_trees(got, theirs_of_the_reference(over, theirs))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_arrays_that_nobody_placed_on_the_mesh_that_is_set(kernels_that_differentiate, kind):
    """Arrays as in the first step of a model, or in an evaluation."""
    arrays = qkv(B)
    floats = dict(zip("qkv", arrays, strict=True))
    want = theirs_of_the_reference(theirs, floats)
    with jax.set_mesh(mesh_of(kind)):
        out = jax.jit(lambda *arrays: through_layer(*arrays))(*arrays)
        got = jax.jit(lambda floats: ours(floats))(floats)
    assert_same(out, wanted(*arrays))
    assert_same_trees(got, want)


@pytest.mark.by_xla
def test_gradients_in_a_shard_map(kernels_that_differentiate):
    """A bias and sinks that are whole on each device get the sum over the devices."""
    spec = P("x", None, "y")
    floats = dict(zip("qkv", qkv(B), strict=True))
    floats |= {"bias": normal(3, 1, N, T, S), "sinks": normal(4, N)}
    specs = {"q": spec, "k": spec, "v": spec, "bias": P(None, "y"), "sinks": P("y")}
    mesh = mesh_of(AxisType.Auto)

    def gradients(floats, implementation=None):
        def loss(floats):
            out = pallas_attn.flash_attention(**floats, mask=CAUSAL, implementation=implementation)
            return (out * jnp.cos(out)).sum()

        return jax.grad(loss)(floats)

    got = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=(specs,), out_specs=specs))(floats)
    assert_same_trees(got, theirs_of_the_reference(gradients, floats, "reference"))


M, CAPACITY = 4, 24
CACHES = {
    "per_sequence": lambda **options: pallas_attn.PerSequenceCache.create(
        [CAPACITY, 8, 16, CAPACITY], K, H, **options
    ),
    "stacked": lambda **options: pallas_attn.StackedCache.create(M, CAPACITY, K, H, **options),
    "paged": lambda **options: pallas_attn.PagedCache.create(
        M, 12, 8, K, H, capacity=CAPACITY, **options
    ),
}
# Kinds of rows: plain ones, rows with scales, and rows of K that V is a part of.
HELD = {
    "float32": {"dtype": jnp.float32, "v_head_dim": HV},
    "int8": {"dtype": jnp.int8, "v_head_dim": HV},
    "shared": {"dtype": jnp.float32, "shared_kv": True, "v_head_dim": 10},
    "shared_float8": {"dtype": jnp.float8_e4m3fn, "shared_kv": True, "v_head_dim": 10},
}


class InPlaceOfAKernel:
    """The reference under another name, so that the public functions treat it as a kernel. It holds
    what it writes as refs, as kernels may.
    """

    name = implementation = "kernel"

    def __init__(self, table):
        self.reference = dispatch.TABLES[table][-1].run

    def run(self, inputs, problem):
        assert getattr(problem, "batch", 1) > 0
        if problem.op == "append":  # a kernel norms and rotates rows itself
            inputs = write._changed_first(inputs, problem)
        results = self.reference(inputs, problem)
        return jax.tree.map(lambda x: jax.freeze(jax.new_ref(x)), results)

    def takes(self, problem):
        return True


def as_kernels(monkeypatch):
    of_decode = ("decode", "decode_quantized", "decode_mla", "decode_listed", "decode_listed_mla")
    for table in ("append", *of_decode):
        monkeypatch.setitem(dispatch.TABLES, table, (InPlaceOfAKernel(table),))


def step(cache, k, v, q, layer):
    cache = cache.extend(jnp.asarray([2, 0, 3, 1], jnp.int32))
    cache = pallas_attn.write_kv(cache, k, None if cache.shared_kv else v, layer=layer)
    sinks = np.linspace(-2, 2, q.shape[2], dtype=np.float32)
    return cache, pallas_attn.decode_attention_with_lse(q, cache, layer=layer, sinks=sinks)


def step_arrays():
    return normal(5, M, 3, K, H), normal(6, M, 3, K, HV), normal(7, M, 2, N, H)


def cache_spec(kind, layered):
    """The kv heads of every array over the four devices of `y`."""
    lead = (None,) * ((0 if kind == "per_sequence" else 1) + layered)
    return P(*lead, "y")


@pytest.mark.parametrize(
    ("kind", "layers", "axis_type", "held"),
    [
        ("per_sequence", 2, AxisType.Explicit, "float32"),
        ("paged", 2, AxisType.Auto, "float32"),
        ("per_sequence", 2, AxisType.Auto, "int8"),
        ("stacked", None, AxisType.Explicit, "int8"),
        ("per_sequence", None, AxisType.Explicit, "shared"),
        ("stacked", 2, AxisType.Auto, "shared_float8"),
        ("paged", None, AxisType.Auto, "shared_float8"),
    ],
)
def test_sharded_caches_need_no_communication(monkeypatch, kind, layers, axis_type, held):
    layer = 0 if layers is None else jnp.asarray(1, jnp.int32)
    k, v, q = step_arrays()
    cache = CACHES[kind](layers=layers, **HELD[held])
    want_cache, want = in_numpy.call(lambda: step(cache, k, v, q, layer))
    as_kernels(monkeypatch)
    mesh = mesh_of(axis_type)

    def place(x, spec):
        return jax.device_put(x, NamedSharding(mesh, spec))

    sharded = {
        name: jax.tree.map(
            lambda x: place(x, cache_spec(kind, layers is not None)), getattr(cache, name)
        )
        for name in ("k", "v", "k_scale", "v_scale")
    }
    cache = dataclasses.replace(cache, **sharded)
    heads = P(None, None, "y")
    args = (cache, place(k, heads), place(v, heads), place(q, heads), layer)
    static = () if layers is not None else (4,)
    compiled = jax.jit(step, static_argnums=static).lower(*args).compile()
    got_cache, got = compiled(*args[: 5 - len(static)])
    assert_same(jax.tree.leaves(got_cache), jax.tree.leaves(want_cache))
    assert_same(got, want)
    program = compiled.as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
        assert f"{collective}(" not in program


@pytest.mark.parametrize(
    ("kind", "held"),
    [
        ("per_sequence", "float32"),
        ("stacked", "int8"),
        ("paged", "float32"),
        ("stacked", "shared"),
        ("per_sequence", "shared_float8"),
    ],
)
def test_vmap_of_cache_operations(monkeypatch, kind, held):
    k, v, q = (jnp.stack([x, 2 * x]) for x in step_arrays())
    many = jax.tree.map(lambda x: jnp.stack([x, x]), CACHES[kind](**HELD[held]))
    batched = jax.vmap(lambda *args: step(*args, 0))
    want = in_numpy.call(batched, many, k, v, q)
    as_kernels(monkeypatch)
    got = in_numpy.call(jax.vmap(lambda *args: step(*args, 0)), many, k, v, q)
    assert_same(jax.tree.leaves(got), jax.tree.leaves(want))


def test_a_constant_of_a_kernel_without_jit():
    """A call without jit, as in a search for a mistake."""

    def run(x):
        return (x + jnp.asarray(np.arange(8, dtype=np.float32)),)

    with jax.disable_jit():
        split = sharding.Split((("a",),), (("a",),), free=("a",))
        got = sharding.over_devices(run, [jnp.ones(8)], split)
    assert_same(got, [np.arange(1, 9)])


# ---- the real kernels: lowered here, run on a GPU ------------------------------------------------


def causal(q, k, v):
    return pallas_attn.flash_attention(q, k, v, mask=CAUSAL)


def half(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


Q, KV = half(8, 2048, 8, 64), half(8, 2048, 4, 64)
BY_BATCH_AND_HEAD = P("x", None, "y")


def sharded(kind):
    where = NamedSharding(mesh_of(kind), BY_BATCH_AND_HEAD)
    return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where) for x in (Q, KV, KV)]


def over_a_mesh(check_vma):
    spec = BY_BATCH_AND_HEAD
    mesh = mesh_of(AxisType.Auto)
    return jax.shard_map(causal, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)


@pytest.mark.guards
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (jax.vmap(causal, (0, None, None)), (half(3, *Q.shape), KV, KV)),
        (jax.vmap(causal, (0, 0, None)), (half(3, *Q.shape), half(3, *KV.shape), KV)),
        (lambda *args: over_a_mesh(check_vma=True)(*args), (Q, KV, KV)),
        (lambda *args: over_a_mesh(check_vma=False)(*args), (Q, KV, KV)),
    ],
    ids=["vmap q", "vmap q and k", "shard_map", "shard_map unchecked"],
)
def test_the_hopper_kernel_lowers_under_a_transform(function, shapes):
    with device.assume("sm90"):
        assert "mosaic_gpu" in mosaic.lower_for_cuda(function, *shapes)


@pytest.mark.guards
def test_the_hopper_kernel_lowers_on_a_mesh_with_explicit_axes():
    with device.assume("sm90"):
        assert "mosaic_gpu" in mosaic.lower_for_cuda(causal, *sharded(AxisType.Explicit))


@pytest.mark.guards
def test_the_backward_lowers_under_transforms():
    def loss(q, k, v):
        return causal(q, k, v).astype(jnp.float32).sum()

    gradients = jax.grad(loss, (0, 1, 2))
    mapped = jax.vmap(gradients, (0, None, None)), (half(3, *Q.shape), KV, KV)
    explicit = gradients, sharded(AxisType.Explicit)
    again = jax.value_and_grad(jax.checkpoint(loss), (0, 1, 2)), (Q, KV, KV)
    with device.assume("sm90"):
        for function, shapes in (mapped, explicit, again):
            assert mosaic.lower_for_cuda(function, *shapes).count("@mosaic_gpu") >= 2


@pytest.mark.guards
def test_kernels_lower_where_jax_counts_in_64_bits():
    """Python's numbers are 64 bits wide then, and Mosaic adds no two integers of two widths."""

    def loss(q, k, v, lengths, bias):
        out = pallas_attn.flash_attention(q, k, v, mask=CAUSAL, kv_lengths=lengths, bias=bias)
        return out.astype(jnp.float32).sum()

    def step(cache, q, k, layer):
        cache = pallas_attn.write_kv(cache.extend(1), k, k, layer=layer)
        return cache, pallas_attn.decode_attention(q, cache, layer=layer)

    with jax.enable_x64(True), device.assume("sm90"):
        lengths, bias = jnp.zeros(8, jnp.int64), jnp.zeros((1, 2048), jnp.float64)
        gradients = jax.grad(loss, (0, 1, 2, 4))
        text = mosaic.lower_for_cuda(gradients, Q, KV, KV, lengths, bias)
        assert text.count("@mosaic_gpu") >= 3  # forward, backward, dbias
        cache = pallas_attn.StackedCache.create(8, 64, 2, 64, layers=2, dtype="int8")
        rows = half(8, 1, 8, 64), half(8, 1, 2, 64)
        traced = jax.jit(step, donate_argnums=0).trace(cache, *rows, jnp.int64(1))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("@mosaic_gpu") == 2 and text.count("tf.aliasing_output") >= 4
        assert "mosaic_gpu" in mosaic.lower_for_cuda(over_a_mesh(check_vma=True), Q, KV, KV)


@pytest.mark.parametrize("implementation", ["sm90", "sm80"])
@pytest.mark.parametrize("asked", ["bias", "mask"])
def test_grids_are_ones_that_cuda_launches(asked, implementation, monkeypatch):
    """The gradient of a bias of 2**17 tiles, and a mask of 70,000 batch rows: CUDA's y and z have
    room for 65535 blocks.
    """

    def biased(q, bias):
        return pallas_attn.flash_attention(q, q, q, bias=bias, implementation=implementation)

    def masked(q, shown):
        mask = pallas_attn.mask_fn(lambda b, h, q, kv, shown: shown[b, kv] > 0, shown)
        return pallas_attn.flash_attention(q, q, q, mask=mask, implementation=implementation)

    def launched(*args, **options):
        grids[options["kernel_name"]] = options["grid"]
        return kernel(*args, **options)

    grids, kernel = {}, plgpu.kernel
    monkeypatch.setattr(plgpu, "kernel", launched)
    of_bias = f"flash_bwd_dbias_{implementation}"
    call, name, shapes = {
        "bias": (biased, of_bias, [(1, 4096, 96, 64), (96, 4096, 4096)]),
        "mask": (masked, "listed_tiles", [(70_000, 64, 1, 64), (70_000, 64)]),
    }[asked]
    with device.assume("sm90"):
        jax.eval_shape(jax.grad(lambda *x: call(*x).sum(), (0, 1)), *(half(*x) for x in shapes))
    assert max(grids[name]) > 65535
    assert all(n <= 65535 for grid in grids.values() for n in grid[:-1]), grids


@pytest.mark.parametrize("implementation", ["sm90", "sm80"])
def test_nothing_but_inputs_and_results_is_kept_for_the_backward(implementation):
    attend = functools.partial(
        pallas_attn.flash_attention_with_lse, mask=CAUSAL, implementation=implementation
    )
    out, lse = half(*Q.shape), jax.ShapeDtypeStruct((8, 8, 2048), jnp.float32)
    with device.assume("sm90"):
        kept = jax.eval_shape(lambda *qkv: jax.vjp(attend, *qkv)[1], Q, KV, KV)
    result = [(x.shape, x.dtype) for x in jax.tree.leaves(kept)]
    assert result == [(x.shape, x.dtype) for x in (Q, KV, KV, out, lse)]


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_backward_is_told_what_the_call_said(deterministic):
    def loss(q, k, v):
        options = {"mask": CAUSAL, "softcap": 5.0, "scale": 0.5, "deterministic": deterministic}
        return pallas_attn.flash_attention(q, k, v, **options).astype(jnp.float32).sum()

    with device.assume("sm90"), config.watched() as configs:
        jax.eval_shape(jax.grad(loss), Q, KV, KV)
    forward, backward = (configs[0].problem, configs[-1].problem)
    assert backward == dataclasses.replace(forward, op="flash_backward")
    told = backward.mask, backward.softcap, backward.scale, backward.deterministic
    assert told == (CAUSAL, 5.0, 0.5, deterministic)


@pytest.mark.guards
def test_a_policy_of_checkpoint_says_what_is_computed_again():
    policies = jax.checkpoint_policies
    both = policies.save_only_these_names("flash_attention_out", "flash_attention_lse")
    launches = {policies.nothing_saveable: 3, both: 2}

    def loss(q, k, v):
        return causal(2 * q, k, v).astype(jnp.float32).sum()

    for policy, wanted in launches.items():
        run = jax.value_and_grad(jax.checkpoint(loss, policy=policy), (0, 1, 2))
        with device.assume("sm90"):
            text = mosaic.lower_for_cuda(run, Q, KV, KV)
        assert len(re.findall(r"call @_program\w*\(", text)) == wanted


@pytest.mark.parametrize("derivative", [jax.jacfwd, jax.jacrev])
def test_a_cache_operation_that_is_differentiated_says_what_to_do(derivative):
    cache = pallas_attn.StackedCache.create(2, 8, 2, 64)

    def rows(new):
        return pallas_attn.append_kv(cache, new, new).k.astype(jnp.float32)

    with device.assume("sm90"), pytest.raises(pallas_attn.UnsupportedError) as refused:
        jax.jit(derivative(rows)).trace(jnp.zeros((2, 1, 2, 64), jnp.bfloat16))
    assert str(refused.value) == (
        "append is differentiated: append on sm90: bfloat16 k[2,1,2,64] into stacked bfloat16 "
        "caches of 8 rows\n"
        "  append: kernels over caches have no derivative\n"
        '    -> pass implementation="reference"'
    )


def test_programs_with_kernels_are_exported():
    """On one device and within shard_map; jax checks what it can read again elsewhere."""
    for call in (jax.grad(lambda *x: causal(*x).astype(jnp.float32).sum()), over_a_mesh(True)):
        with device.assume("sm90"):
            exported = jax.export.export(jax.jit(call), platforms=("cuda",))(Q, KV, KV)
        assert "mosaic_gpu" in exported.mlir_module()


def test_sizes_that_are_not_known_are_refused():
    (batch,) = jax.export.symbolic_shape("b")
    with device.assume("sm90"), pytest.raises(pallas_attn.UnsupportedError) as refused:
        jax.export.export(jax.jit(causal), platforms=("cuda",))(*[half(batch, 16, 2, 64)] * 3)
    assert refused.value.limits["flash_fwd_sm90"] == pallas_attn.Limit(
        "it is compiled for sizes that are known",
        'export a program for each size, or say implementation="reference"',
    )


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", [None, "sm80"])
def test_64_bits_change_nothing(implementation):
    """Inside jit and outside of it, cache in place or not."""
    normal = np.random.default_rng(0).standard_normal
    q, k, v = (jnp.asarray(normal((2, 200, n, 64)), jnp.bfloat16) for n in (8, 2, 2))

    def loss(q, k, v):
        out = pallas_attn.flash_attention(
            q, k, v, mask=CAUSAL, deterministic=True, implementation=implementation
        )
        return out.astype(jnp.float32).sum()

    def step(q, k, v):
        cache = pallas_attn.append_kv(pallas_attn.PagedCache.create(2, 40, 16, 2, 64), k, v)
        return pallas_attn.decode_attention_with_lse(
            q[:, -3:], cache, mask=pallas_attn.sliding_window(70), implementation=implementation
        )

    gradients = jax.value_and_grad(loss, (0, 1, 2))
    want = jax.jit(gradients)(q, k, v), jax.jit(step)(q, k, v)
    with jax.enable_x64(True):
        for run in (jax.jit, lambda function: function):
            got = run(gradients)(q, k, v), run(step)(q, k, v)
            for have, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                wide = np.asarray(have, np.float32), np.asarray(wanted, np.float32)
                np.testing.assert_allclose(*wide, rtol=1e-6)
