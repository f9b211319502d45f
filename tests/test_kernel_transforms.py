"""The layer between kernels and jax's transforms, with the reference in a kernel's place.

It holds for whatever has `run(inputs, problem)`, so it is tested where there is no GPU: vmap folds,
shard_map, and jit with sharded inputs (both kinds of mesh axes), compared with native autodiffable
jnp code and, for the shardings, with the collectives of the compiled program.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_attn
from pallas_attn import CAUSAL, _checks, _dispatch, _transforms

REFERENCE = _dispatch.TABLES["flash_forward"][-1]
X, B, T, S, N, K, H, HV = 3, 4, 8, 12, 8, 4, 16, 24
ARGUMENTS = ("q_lengths", "kv_lengths", "bias", "mask_array", "softcap", "sinks", "precision")


def through_layer(q, k, v, *, segment_ids=None, q_offset=0, **given):
    options = {"mask": CAUSAL, "scale": None, **dict.fromkeys(ARGUMENTS), **given}
    problem, inputs = _checks.attention(
        q, k, v, q_offset=q_offset, segment_ids=segment_ids, options=options
    )
    return _transforms.attention(REFERENCE, problem, inputs)


def native(q, k, v, **given):
    return pallas_attn.flash_attention_with_lse(q, k, v, mask=CAUSAL, **given)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def qkv(*lead):
    return normal(0, *lead, T, N, H), normal(1, *lead, S, K, H), normal(2, *lead, S, K, HV)


def assert_same(got, want):
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 0, 0), (2, None, None)])
def test_vmap_over_any_of_q_k_v(axes):
    arrays = [x if axis is not None else x[0] for x, axis in zip(qkv(X, B), axes, strict=True)]
    arrays[0] = jnp.moveaxis(arrays[0], 0, 2) if axes[0] == 2 else arrays[0]
    assert_same(jax.vmap(through_layer, axes)(*arrays), jax.vmap(native, axes)(*arrays))


@pytest.mark.parametrize("mapped", [("bias", "kv_lengths"), ("sinks",), ("q_offset",), ()])
def test_vmap_over_optional_arrays(mapped):
    q, k, v = qkv(X, B)
    given = {
        "bias": normal(3, X, 1, N, 1, S),
        "kv_lengths": jnp.arange(X * B, dtype=jnp.int32).reshape(X, B),
        "sinks": normal(4, X, N),
        "q_offset": jnp.arange(X * B, dtype=jnp.int32).reshape(X, B) % 5,
        "q_lengths": jnp.arange(X * B, dtype=jnp.int32).reshape(X, B)[:, ::-1] % (T + 1),
    }
    fixed = {name: x[2] for name, x in given.items() if name not in mapped}
    moving = {name: given[name] for name in mapped}

    def over(function):
        return jax.vmap(lambda q, k, v, some: function(q, k, v, **some, **fixed))

    assert_same(over(through_layer)(q, k, v, moving), over(native)(q, k, v, moving))


def test_vmap_over_q_alone_folds_into_the_heads():
    q, k, v = qkv(X, B)
    seen = []

    class Spy:
        name = "spy"

        def run(self, inputs, problem):
            seen.append((inputs.q.shape, inputs.k.shape, problem.q_heads))
            return REFERENCE.run(inputs, problem)

    def spied(one):
        options = {"mask": CAUSAL, "scale": None, **dict.fromkeys(ARGUMENTS)}
        options["sinks"] = normal(4, N)
        problem, inputs = _checks.attention(
            one, k[0], v[0], q_offset=0, segment_ids=None, options=options
        )
        return _transforms.attention(Spy(), problem, inputs)

    got = jax.vmap(spied)(q)
    want = jax.vmap(lambda one: native(one, k[0], v[0], sinks=normal(4, N)))(q)
    assert_same(got, want)
    assert seen[-1] == ((B, T, X * N, H), (B, S, K, H), X * N)  # keys and values as they were


def test_nested_vmap():
    q, k, v = qkv(X, B)
    both = jnp.stack([q, q + 1], axis=1)
    nested = [jax.vmap(jax.vmap(function, (0, None, None))) for function in (through_layer, native)]
    assert_same(nested[0](both, k, v), nested[1](both, k, v))


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))


def test_shard_map_checks_and_splits():
    q, k, v = qkv(B)
    spec = P("x", None, "y")
    mapped = jax.shard_map(
        through_layer,
        mesh=mesh_of(AxisType.Auto),
        in_specs=spec,
        out_specs=(spec, P("x", "y")),
    )
    assert_same(jax.jit(mapped)(q, k, v), native(q, k, v))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("kv_heads", [K, 1, N])
@pytest.mark.parametrize("spec", [P("x", None, "y"), P("x"), P(None, None, "y"), P()])
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
    assert_same(compiled(*args), native(q, k, v, kv_lengths=lengths))
    program = compiled.as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
        assert f"{collective}(" not in program


def test_an_axis_that_cannot_be_split_is_gathered_and_right():
    mesh = mesh_of(AxisType.Auto)
    q, k, v = qkv(B)
    args = [jax.device_put(x, NamedSharding(mesh, P(None, "y"))) for x in (q, k, v)]
    assert_same(jax.jit(through_layer)(*args), native(q, k, v))
