"""The reference takes query rows in blocks: it skips keys that no row of a block sees, stores the
scores of one block at a time, and its derivatives of every kind are those of all rows at once.

Results over several blocks are compared with the oracle by the cases of test_cases.py.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import pallas_attn as pa
from pallas_attn._call import reference

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

ALL = (slice(None), slice(None))  # one block: all rows and keys


def attend(q, k, v, **options):
    return pa.flash_attention(q, k, v, implementation="reference", **options)


def gradients(q, k, v, **options):
    return jax.grad(lambda *x: attend(*x, **options).sum(), argnums=(0, 1, 2))(q, k, v)


def multiplications(function, length):
    """Multiplications in the matmuls of a function of q, k and v [1, length, 2, 8]."""
    x = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)

    def of(jaxpr):
        total = 0
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                (contracted, _), _ = eqn.params["dimension_numbers"]
                shape = eqn.invars[0].aval.shape
                total += eqn.outvars[0].aval.size * math.prod(shape[n] for n in contracted)
            inner = (getattr(x, "jaxpr", x) for x in eqn.params.values())
            total += sum(of(x) for x in inner if hasattr(x, "eqns"))
        return total

    return of(jax.make_jaxpr(function)(x, x, x).jaxpr)


@pytest.mark.parametrize(
    "options, part",
    [
        ({}, 1),
        ({"mask": pa.CAUSAL}, sum(range(1, 9)) / 8**2),
        ({"mask": pa.CAUSAL, "q_offset": -1024}, sum(range(1, 5)) / 8**2),
        ({"mask": pa.sliding_window(257)}, 15 / 8**2),
        ({"mask": pa.Mask(left=-1792)}, 1 / 8**2),
        ({"mask": pa.mask_fn(lambda b, h, q, kv: q != kv) & pa.CAUSAL}, sum(range(1, 9)) / 8**2),
    ],
    ids=["full", "causal", "offset", "window", "lookahead", "function"],
)
def test_keys_that_a_block_does_not_see_are_skipped(options, part):
    """A backward has five matmuls, q k^T of the forward once more among them."""
    whole = 2048**2 * 2 * 8
    few = 8 * 256 * 2 * 8 * 2  # blocks that see no key are given one
    forward = multiplications(functools.partial(attend, **options), 2048)
    assert 2 * part * whole <= forward <= 2 * part * whole + few
    both = multiplications(functools.partial(gradients, **options), 2048)
    assert both == forward * 7 / 2


@pytest.mark.parametrize("options", [{}, {"mask": pa.CAUSAL}], ids=["full", "causal"])
def test_scores_of_one_block_are_in_memory_at_a_time(options):
    """A block has an eighth of all scores, float32 [4, 2048, 2048]."""
    x = jax.ShapeDtypeStruct((1, 2048, 4, 32), jnp.float32)
    scores = 4 * 2048**2 * 4

    def temporary(function):
        compiled = jax.jit(functools.partial(function, **options)).lower(x, x, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(attend) < scores / 3
    assert temporary(gradients) < scores * 0.8


MASKS = [
    {"mask": pa.CAUSAL, "q_offset": 3, "kv_lengths": jnp.asarray([150, 0], jnp.int32)},
    {"mask": pa.sliding_window(7), "softcap": 2.0, "q_lengths": jnp.asarray([260, 131])},
    {"bias": np.random.default_rng(0).standard_normal((2, 1, 260, 1)).astype(np.float32)},
]


@pytest.mark.parametrize("options", MASKS, ids=["lengths", "window", "bias"])
def test_derivatives_of_every_kind_are_those_of_one_block(options, monkeypatch):
    rng = np.random.default_rng(1)
    arrays = [
        jnp.asarray(rng.standard_normal((2, 260, n, 8)), jnp.float32) for n in (4, 2, 2, 4, 2, 2)
    ]

    def results(primals, tangents):
        def loss(q, k, v):
            return (attend(q, k, v, **options) ** 2).sum()

        forward = jax.jvp(functools.partial(attend, **options), primals, tangents)
        second = jax.jvp(jax.grad(loss, argnums=(0, 1, 2)), primals, tangents)
        each = jax.vmap(lambda q: loss(q, *primals[1:]))(jnp.stack([primals[0], tangents[0]]))
        return forward, second, each

    def computed():
        jax.clear_caches()  # the blocks are no key of jit's
        return jax.jit(results)(tuple(arrays[:3]), tuple(arrays[3:]))

    got = computed()
    monkeypatch.setattr(reference, "_blocks", lambda *_: [ALL])
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4), got, computed()
    )
    jax.clear_caches()


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_explicit_mesh_axes_may_split_any_axis_of_q(axis):
    """Rows that they split stay one block, in whatever sizes."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    rng = np.random.default_rng(2)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 262, n, 8)), jnp.float32) for n in (4, 2, 2))
    want = attend(q, k, v, mask=pa.CAUSAL), gradients(q, k, v, mask=pa.CAUSAL)
    spec = [None] * 4
    spec[axis] = "x"
    rows = [None] * 4 if axis == 1 else spec
    with jax.set_mesh(mesh):
        q = jax.device_put(q, NamedSharding(mesh, PartitionSpec(*spec)))
        k, v = (jax.device_put(x, NamedSharding(mesh, PartitionSpec(*rows))) for x in (k, v))
        got = jax.jit(lambda *x: (attend(*x, mask=pa.CAUSAL), gradients(*x, mask=pa.CAUSAL)))(
            q, k, v
        )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, want)
