"""Forward mode and second derivatives through kernels, with the reference in their place: what jax
composes, compared with the same of the reference, and <u, J v> = <J^T u, v>.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pallas_attn as pa
from pallas_attn import CAUSAL, Context, Mask
from pallas_attn._autodiff import by_rows
from pallas_attn._call import dispatch
from tests.parallel.test_kernels_batched_and_sharded import (
    REFERENCE,
    BackwardInPlaceOfAKernel,
    InPlaceOfAKernel,
)

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


class DualInPlaceOfAKernel:
    """The reference and its derivative, handed over as a kernel does it."""

    name = implementation = "kernel"

    def takes(self, problem):
        assert problem.op == "flash_dual" and problem.tangents
        return True

    def run(self, arrays, problem):
        inputs, tangents = arrays
        assert tuple(tangents) == problem.tangents
        own = {name: getattr(inputs, name) for name in tangents}
        run = lambda some: REFERENCE.run(inputs._replace(**some), problem)  # noqa: E731
        results, dots = jax.jvp(run, (own,), (tangents,))
        return *results, *dots


@pytest.fixture(autouse=True, params=["apart", "dual"])
def kernels(monkeypatch, request):
    """The reference as a kernel, and by its own name; with tangents by its definition, or in the
    launch of the results.
    """
    forward = InPlaceOfAKernel("flash_forward"), REFERENCE
    dual = (DualInPlaceOfAKernel(),) if request.param == "dual" else ()
    monkeypatch.setitem(dispatch.TABLES, "flash_dual", dual)
    monkeypatch.setitem(dispatch.TABLES, "flash_forward", forward)
    monkeypatch.setitem(dispatch.TABLES, "flash_backward", (BackwardInPlaceOfAKernel(),))


TREES = {"q": (2, 9, 4, 8), "k": (2, 11, 2, 8), "v": (2, 11, 2, 6)}
POLICY = jax.checkpoint_policies.save_only_these_names("flash_attention_out", "flash_attention_lse")


def relative(s, b, h, q, kv, table, slopes):
    return s + table[h, jnp.clip(q - kv + 8, 0, 16)] - slopes[h] * jnp.abs(q - kv)


def options(rng, name):
    """(inputs that have tangents beside q, k and v; other arguments)"""
    floats, rest = {}, {}
    if name in ("bias", "everything"):
        floats["bias"] = rng.standard_normal((1, 4, 9, 11))
    if name in ("sinks", "everything"):
        floats["sinks"] = rng.standard_normal(4)
    if name in ("functions", "everything"):
        floats |= {"table": rng.standard_normal((4, 17)), "slopes": rng.standard_normal(4)}
    if name in ("lengths", "everything"):
        rest["kv_lengths"] = jnp.asarray([7, 11], jnp.int32)
        rest["q_lengths"] = jnp.asarray([9, 4], jnp.int32)
    if name == "everything":
        rest |= {"mask": Mask(6, 2), "softcap": 3.0, "q_offset": jnp.asarray([1, 0], jnp.int32)}
        rest["mask_array"] = jnp.asarray(rng.random((2, 1, 9, 11)) < 0.8)
    floats = {name: rng.standard_normal(shape) for name, shape in TREES.items()} | floats
    return {name: jnp.asarray(x, jnp.float32) for name, x in floats.items()}, rest


NAMES = ("plain", "bias", "sinks", "functions", "lengths", "everything")


def attend(rest, floats, implementation=None):
    floats = dict(floats)
    if "table" in floats:
        rest = rest | {"score": pa.score_fn(relative, floats.pop("table"), floats.pop("slopes"))}
    rest = {"mask": CAUSAL} | rest
    out, lse = pa.flash_attention_with_lse(**floats, **rest, implementation=implementation)
    return out, jnp.where(jnp.isfinite(lse), lse, 0)


def drawn_like(rng, tree):
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), tree)


def both(rng, name="plain", **others):
    """(the call by a kernel, by the reference, its floats, their tangents)"""
    floats, rest = options(rng, name)
    rest |= others
    ours = functools.partial(attend, rest)
    theirs = functools.partial(attend, rest, implementation="reference")
    return ours, theirs, floats, drawn_like(rng, floats)


def assert_same(got, want, tolerance=2e-4):
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    for x, y in pairs:
        assert x.dtype == y.dtype and x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def inner(x, y):
    return sum(map(jnp.vdot, jax.tree.leaves(x), jax.tree.leaves(y)))


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.by_xla if x == "everything" else ()) for x in NAMES]
)
def test_tangents_and_their_transpose(rng, name):
    ours, theirs, floats, along = both(rng, name)
    got, want = (jax.jit(lambda f=f: jax.jvp(f, (floats,), (along,)))() for f in (ours, theirs))
    assert_same(got, want)
    results, linear = jax.linearize(ours, floats)
    assert_same((results, linear(along)), want)
    cotangents = drawn_like(rng, results)
    (gradients,) = jax.vjp(ours, floats)[1](cotangents)
    left, right = inner(cotangents, want[1]), inner(gradients, along)
    np.testing.assert_allclose(left, right, rtol=1e-4)
    (transposed,) = jax.linear_transpose(linear, floats)(cotangents)
    assert_same(transposed, gradients)


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks", "table"])
def test_a_tangent_of_one_input(rng, name):
    ours, theirs, floats, along = both(rng, "everything")
    got, want = (
        jax.jvp(lambda x, f=f: f(floats | {name: x}), (floats[name],), (along[name],))
        for f in (ours, theirs)
    )
    assert_same(got, want)


@pytest.mark.parametrize("precision", [None, "highest"])
@pytest.mark.parametrize("name, rows", [("plain", 128), ("bias", 2), ("everything", 2)])
def test_products_with_a_hessian(rng, monkeypatch, name, rows, precision):
    """Forward over reverse, reverse over forward, of all rows at once, and of two at a time, with
    fewer keys for early rows where the offset is known; from out and lse that are computed again,
    or those of the forward.
    """
    monkeypatch.setattr(by_rows, "ROWS", rows)
    ours, theirs, floats, along = both(rng, name, precision=precision)

    def loss(f, floats):
        out, lse = f(floats)
        return (out**2).sum() + jnp.sin(lse).sum()

    def forward_over_reverse(f):
        return jax.jvp(jax.grad(functools.partial(loss, f)), (floats,), (along,))[1]

    def reverse_over_forward(f):
        def directed(floats):
            return jax.jvp(functools.partial(loss, f), (floats,), (along,))[1]

        return jax.grad(directed)(floats)

    want = jax.jit(forward_over_reverse, static_argnums=0)(theirs)
    for way in (forward_over_reverse, reverse_over_forward):
        assert_same(jax.jit(way, static_argnums=0)(ours), want, 1e-3)


class InTF32(InPlaceOfAKernel):
    """Results that are off by as much as TF32 makes them."""

    def run(self, inputs, problem):
        out, lse = super().run(inputs, problem)
        return out * (1 + 2.0**-10), lse + 2.0**-10


@pytest.mark.parametrize("precision", [None, "highest"])
def test_a_hessian_of_float32_knows_no_tf32(rng, monkeypatch, precision):
    """By default a kernel may multiply in TF32; at the highest precision its results are used."""
    ours, theirs, floats, along = both(rng, "functions", precision=precision)
    monkeypatch.setitem(dispatch.TABLES, "flash_dual", ())
    monkeypatch.setitem(dispatch.TABLES, "flash_forward", (InTF32("flash_forward"), REFERENCE))
    cotangents = drawn_like(rng, theirs(floats))
    gradient = lambda f: jax.grad(lambda x: inner(f(x), cotangents))  # noqa: E731
    got, want = (jax.jvp(gradient(f), (floats,), (along,))[1] for f in (ours, theirs))
    if precision is None:
        assert_same(got, want)
    else:
        with pytest.raises(AssertionError):
            assert_same(got, want)


@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize("policy", [None, POLICY, "none"])
def test_a_training_step_with_a_tangent_in_the_loss(rng, stopped, policy):
    """MeanFlow's: the target has the derivative along time, and takes no gradient as a rule."""
    ours, theirs, floats, along = both(rng)

    def step(f):
        f = f if policy == "none" else jax.checkpoint(f, policy=policy)

        def loss(floats):
            (out, _), (tangent, _) = jax.jvp(f, (floats,), (along,))
            tangent = jax.lax.stop_gradient(tangent) if stopped else tangent
            return ((out - tangent) ** 2).mean()

        return jax.value_and_grad(loss)(floats)

    assert_same(*(jax.jit(step, static_argnums=0)(f) for f in (ours, theirs)), 1e-3)


def layers(f, floats, policy=None):
    def layer(x, _):
        out, _ = f(floats | {"q": x})
        return x + jnp.pad(out, ((0, 0), (0, 0), (0, 0), (0, 2))), None

    layer = jax.checkpoint(layer, policy=policy) if policy else layer
    return jax.lax.scan(layer, floats["q"], None, length=2)[0]


@pytest.mark.parametrize("policy", [None, POLICY])
def test_a_scan_over_layers(rng, policy):
    ours, theirs, floats, along = both(rng)

    def run(f):
        attend = functools.partial(layers, f, policy=policy)
        gradient = jax.grad(lambda floats: (attend(floats) ** 2).sum())
        return (
            jax.jvp(attend, (floats,), (along,)),
            gradient(floats),
            jax.jvp(gradient, (floats,), (along,))[1],
        )

    assert_same(*(jax.jit(run, static_argnums=0)(f) for f in (ours, theirs)), 3e-3)


@pytest.mark.parametrize("mapped", ["primals", "tangents", "q", "all"])
def test_vmap(rng, mapped):
    ours, theirs, floats, along = both(rng)
    stack = lambda tree: jax.tree.map(lambda x: jnp.stack([x, 2 * x, -x]), tree)  # noqa: E731
    alone = dict.fromkeys(floats)
    axes = {
        "primals": (dict.fromkeys(floats, 0), alone),
        "tangents": (alone, dict.fromkeys(floats, 0)),
        "q": (alone | {"q": 0}, alone | {"q": 0}),
        "all": (dict.fromkeys(floats, 0),) * 2,
    }[mapped]
    pair = tuple(
        {name: x if axis[name] is None else stack(x) for name, x in tree.items()}
        for tree, axis in zip((floats, along), axes, strict=True)
    )

    def forward(f, floats, along):
        return jax.jvp(f, (floats,), (along,))

    def second(f, floats, along):
        gradient = jax.grad(lambda floats: (f(floats)[0] ** 2).sum())
        return jax.jvp(gradient, (floats,), (along,))

    for way in (forward, second):
        got, want = (jax.vmap(functools.partial(way, f), axes)(*pair) for f in (ours, theirs))
        assert_same(got, want, 1e-3)


def test_jacobians(rng):
    ours, theirs, floats, _ = both(rng)
    small = {name: x[:1, :3, :2, :4] for name, x in floats.items()}
    first = lambda f: lambda x: f(x)[0]  # noqa: E731
    want = jax.jacrev(first(theirs))(small)
    for jacobian in (jax.jacfwd, jax.jacrev):
        assert_same(jax.jit(jacobian(first(ours)))(small), want)
    loss = lambda f: lambda q: (f(small | {"q": q})[0] ** 3).sum()  # noqa: E731
    got, want = (jax.hessian(loss(f))(small["q"]) for f in (ours, theirs))
    assert_same(got, want, 1e-3)


@pytest.mark.parametrize("check_vma", [True, False])
def test_within_a_shard_map(rng, check_vma):
    """Batch rows over devices, keys and values the same on all."""
    ours, theirs, floats, along = both(rng)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    shared = {name: floats[name][:1] for name in "kv"}

    def run(f, q, shared, dq, d_shared):
        def loss(q, shared):
            keys = {name: jnp.broadcast_to(x, (len(q), *x.shape[1:])) for name, x in shared.items()}
            return f({"q": q} | keys)

        primals, tangents = (q, shared), (dq, d_shared)
        out = jax.jvp(loss, primals, tangents)

        def gradient(q):
            return jax.grad(lambda q: (loss(q, shared)[0] ** 2).sum())(q)

        return out, jax.jvp(gradient, (q,), (dq,))

    d_shared = {name: along[name][:1] for name in "kv"}
    arrays = floats["q"], shared, along["q"], d_shared
    over = jax.shard_map(
        functools.partial(run, ours),
        mesh=mesh,
        in_specs=(P("data"), P(), P("data"), P()),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    assert_same(jax.jit(over)(*arrays), run(theirs, *arrays), 1e-3)


@pytest.mark.parametrize("method", ["gather", "ring"])
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_rows_over_devices(rng, monkeypatch, method, order):
    monkeypatch.setitem(dispatch.TABLES, "flash_forward", (REFERENCE,))
    ours, theirs = (
        functools.partial(pa.flash_attention_with_lse, mask=CAUSAL, implementation=name)
        for name in (None, "reference")
    )
    arrays = [rng.standard_normal((1, 16, n, 8)) for n in (4, 2, 2) * 2]
    arrays = [jnp.asarray(x, jnp.float32) for x in arrays]
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))
    context = Context("rows", order=order, method=method)
    order = functools.partial(context.reorder, shards=2)

    def run(f, q, k, v, *along):
        results = jax.jvp(f, (q, k, v), along)
        gradient = jax.grad(lambda q: (f(q, k, v)[0] ** 2).sum())
        return results, jax.jvp(gradient, (q,), along[:1])[1]

    here = functools.partial(ours, context=context)
    rows = P(None, "rows")
    specs = ((rows, P(None, None, "rows")),) * 2, rows
    over = jax.shard_map(
        functools.partial(run, here), mesh=mesh, in_specs=(rows,) * 6, out_specs=specs
    )
    got = jax.jit(over)(*[order(x, axis=1) for x in arrays])
    (results, tangents), gradients = run(theirs, *arrays)
    pairs = [(order(out, axis=1), order(lse, axis=2)) for out, lse in (results, tangents)]
    assert_same(got, (tuple(pairs), order(gradients, axis=1)), 1e-3)
