"""tests/support/in_numpy.py gives the results of XLA, also where NumPy by itself would not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support import in_numpy

EDGES = np.array([-(2**31), -7, -2, -1, 0, 1, 2, 7, 31, 32, 2**31 - 1], np.int32)
FLOATS = np.array([-np.inf, -3e9, -2.5, -0.5, 0, 0.5, 1.5, 2.5, 3e9, np.inf, np.nan], np.float32)


def integers(x, y):
    wide = x.astype(jnp.uint32), y.astype(jnp.uint32)
    pairs = [(x[:, None], y[None]), tuple(a for a in (wide[0][:, None], wide[1][None]))]
    both = (lax.add, lax.mul, lax.shift_left, lax.shift_right_logical, lax.shift_right_arithmetic)
    both += (lax.div, lax.rem, lax.max)
    some = [jnp.broadcast_arrays(*pair) for pair in pairs]
    counted = [f(x) for f in (lax.clz, lax.population_count, lax.sign, lax.neg)]
    return [f(*pair) for f in both for pair in some], counted, jnp.cumsum(x), jnp.argmax(x)


def floats(x):
    to = [x.astype(kind) for kind in ("int32", "uint32", "int8", "bfloat16", "float16", "bool")]
    rounded = [f(x) for f in (lax.floor, lax.ceil, lax.is_finite, lax.abs)]
    both = [f(x, x[::-1]) for f in (lax.max, lax.min, lax.lt, lax.ne)]
    to += [lax.reduce_precision(x, *bits) for bits in ((8, 7), (8, 1), (5, 10))]
    return to, rounded, both, lax.bitcast_convert_type(x, jnp.int16), lax.integer_pow(x, -3)


def shapes(x, at):
    """x: float32[2, 3, 5]; slices that would reach past an end begin earlier."""
    padded = lax.pad(x, 7.0, ((1, 0, 0), (0, 2, 1), (0, 0, 2)))
    cut = (
        lax.pad(x, 7.0, ((0, -1, 0), (-1, 1, 0), (2, -3, 1))),
        lax.pad(x[:0], 7.0, ((0, 1, 2),) * 3),
    )
    part = lax.dynamic_slice(x, (at, at, at), (1, 2, 3))
    put = lax.dynamic_update_slice(x, -part, (at, 1, 4))
    dots = lax.dot_general(x, x[:, ::-1], (((2,), (2,)), ((0,), (0,))))
    halves = lax.dot_general(x[0].astype(jnp.bfloat16), x[1].astype(jnp.bfloat16), (((0,), (0,)), ((), ())))  # noqa: E501 # fmt: skip
    moved = x.transpose(2, 0, 1).reshape(5, 6), jnp.flip(x, 1), x[:, ::2, 1:4:2], x[:, None]
    sums = x.sum(axis=(0, 2)), x.max(axis=1), (x > 2).any(axis=0), (x > 2).sum(dtype=jnp.int32)
    joined = jnp.concatenate([x, lax.broadcasted_iota(jnp.float32, (2, 1, 5), 2)], axis=1)
    return padded, cut, part, put, dots, halves, moved, sums, joined, lax.clamp(1.0, x, 9.0)


def control(n, x):
    """A loop of as many steps as `n` says, a scan with results, branches out of range."""
    powers = lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 3), (0, jnp.int32(1)))
    total, seen = lax.scan(lambda c, row: (c + row, c.sum()), jnp.zeros(3), x, reverse=True)
    branches = [lambda x: x, lambda x: -x, lambda x: 2 * x]
    chosen = [lax.switch(which, branches, x) for which in (n - 9, n - 1, n + 9)]
    return powers, total, seen, chosen, jnp.where(x > 1, x, n.astype(jnp.float32))


def rows(x, index):
    """x: float32[4, 5, 6]; indices from the end, past it, and in every dimension."""
    read = x[index], x[:, index], x[index, :, index], x.at[index].get(mode="clip")
    read += x.at[index].get(mode="fill"), index.at[index].get(mode="fill"), x.at[index, 1, 2].get()
    put = (
        x.at[index].set(2.0),
        x.at[:, index].add(1.0),
        x.at[index, 1].max(0.3),
        x.at[1, 2, 3].set(9),
    )
    put += (
        x.at[index, :, index].set(5.0),
        x.at[index].multiply(2.0, mode="clip"),
        x.at[index].min(0),
    )
    ends = jnp.clip(index[:4], 0, 4)
    mapped = [
        jax.vmap(function)(x, ends)
        for function in (
            lambda row, at: row[at],
            lambda row, at: row.at[at].set(1.0),
            lambda row, at: lax.dynamic_slice(row, (at, 0), (2, 3)),
            lambda row, at: lax.dynamic_update_slice(row, 2 * row[:2], (at, 0)),
        )
    ]
    half = jnp.round(x).astype(jnp.bfloat16)  # many are equal
    sorts = jnp.sort(x, 1), jnp.argsort(half, 0), jnp.searchsorted(jnp.sort(index), ends)
    sorts += (*lax.top_k(half, 3), *lax.sort((half, x), dimension=1, num_keys=1))
    return read, put, mapped, sorts, lax.cumprod(x, 1), jnp.tile(x, (2, 1, 1)), jnp.split(x, 2, 2)


def numbers(words):
    key = jax.random.wrap_key_data(words)
    several = jax.random.split(key, 4)
    moved = several.reshape(2, 2)[1], several.at[1].set(key), jnp.where(words[0] > 1, several, key)
    _, drawn = lax.scan(
        lambda key, n: (jax.random.fold_in(key, n), jax.random.bits(key)), key, jnp.arange(4)
    )
    mapped = jax.vmap(lambda n: jax.random.bits(jax.random.fold_in(key, n), (3,)))(jnp.arange(3))
    keys = [jax.random.key_data(x) for x in moved]
    shuffled = jax.random.permutation(key, 9), jax.random.randint(key, (7,), 0, 9)
    return keys, drawn, mapped, shuffled, jax.random.bits(key, (3, 5), "uint8")


@pytest.mark.parametrize(
    "function, args",
    [
        (integers, (EDGES, EDGES)),
        (floats, (FLOATS,)),
        (shapes, (np.arange(30, dtype=np.float32).reshape(2, 3, 5), np.int32(3))),
        (control, (np.int32(2), np.arange(12, dtype=np.float32).reshape(4, 3))),
        (rows, (np.sin(np.arange(120, dtype=np.float32)).reshape(4, 5, 6), EDGES)),
        (numbers, (np.array([1, 2**32 - 3], np.uint32),)),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_as_xla(function, args):
    traced = jax.make_jaxpr(function)(*args)
    wanted = jax.tree.leaves(jax.jit(function)(*args))
    got = in_numpy.run(traced, traced.consts, *args)
    for have, want, var in zip(got, wanted, traced.jaxpr.outvars, strict=True):
        assert (have.shape, have.dtype) == (want.shape, want.dtype), var
        np.testing.assert_array_equal(*(x.astype(np.float64) for x in (have, np.asarray(want))))


def test_a_function_as_jit_gives_it():
    """Trees, what is mapped or differentiated by rules of its own, refs, and 64 bits."""

    @jax.custom_batching.custom_vmap
    def twice(x):
        return 2 * jnp.tanh(x)

    twice.def_vmap(lambda size, batched, x: (twice(x), batched[0]))

    def function(arrays):
        ref = jax.new_ref(arrays["x"])
        ref[0] += 1
        loss = lambda x: (lax.stop_gradient(x) * jnp.tanh(x) @ arrays["y"]).sum()  # noqa: E731
        return {
            "grad": jax.grad(loss)(arrays["x"]),
            "ref": jax.freeze(ref),
            "y": twice(arrays["y"]),
        }

    with jax.enable_x64(True):
        tree = {"x": np.linspace(-1, 1, 6).reshape(2, 3), "y": np.arange(6.0).reshape(3, 2)}
        got, want = in_numpy.call(function, tree), jax.jit(function)(tree)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for have, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert have.dtype == wanted.dtype == np.float64
            np.testing.assert_allclose(have, wanted, rtol=1e-14)


def test_what_has_no_rule_jax_computes():
    eye, several = (np.eye(2, dtype=np.float32) + n for n in range(2))
    traced = jax.make_jaxpr(lambda x, y: (lax.erf(x), *lax.top_k(y, 1)))(eye, several)
    got = in_numpy.run(traced, traced.consts, eye, several)
    for have, want in zip(got, (lax.erf(eye), *lax.top_k(several, 1)), strict=True):
        np.testing.assert_array_equal(have, want)


def test_instead_of_xla():
    """A number without a type, what is donated, a ref, a key; what is of several devices XLA
    compiles.
    """
    compiled = []
    events = jax.monitoring.register_event_duration_secs_listener
    events(lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None)
    step = jax.jit(lambda x, n: (jax.freeze(jax.new_ref(x + n)), x.sum()), donate_argnums=0)
    x, key = jax.device_put(np.ones((77, 3), np.float32)), jax.random.key(3)
    with in_numpy.instead_of_xla():
        compiled.clear()
        after, total = step(x, 2)
        drawn = jax.random.uniform(jax.random.fold_in(key, 1), (77,))
        assert jnp.asarray(2.0).weak_type and not after.weak_type
        assert not compiled and x.is_deleted() and total == 231 and (after == 3).all()
        mesh = jax.make_mesh((2,), ("x",))
        split = jax.device_put(np.arange(78.0), jax.NamedSharding(mesh, jax.P("x")))
        assert (split + 1).sharding == split.sharding and compiled
    wanted = jax.random.uniform(jax.random.fold_in(key, 1), (77,))
    np.testing.assert_allclose(drawn, wanted, rtol=1e-6)
