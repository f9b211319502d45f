"""Gradients: random dO and dLSE against finite differences of loops in NumPy, and jax.nn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import CAUSAL, Mask, sliding_window
from tests.support import budget, definition, in_numpy, subjects, witness
from tests.support.problems import by_name

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

SIZES = {"t_below_s": (5, 7), "t_above_s": (6, 4)}
FLOATS = ("q", "k", "v", "bias", "sinks")
each_subject = pytest.mark.parametrize("subject", subjects.rows("flash_forward", "flash_backward"))


def draw(rng, q_len, kv_len, batch=2, q_heads=4, kv_heads=2, dim=6, v_dim=4):
    return {
        "q": rng.standard_normal((batch, q_len, q_heads, dim)),
        "k": rng.standard_normal((batch, kv_len, kv_heads, dim)),
        "v": rng.standard_normal((batch, kv_len, kv_heads, v_dim)),
    }


def options(rng, q_len, kv_len):
    bias = rng.standard_normal((2, 4, q_len, kv_len))
    hidden = rng.random((2, 4, q_len, kv_len)) < 0.3
    hidden[1, :, 2] = True  # a row that sees nothing
    ids = (
        rng.integers(0, 2, (2, q_len)).astype(np.int32),
        rng.integers(0, 2, (2, kv_len)).astype(np.int32),
    )
    lengths = {
        "q_lengths": np.array([q_len, 2], np.int32),
        "kv_lengths": np.array([3, kv_len], np.int32),
    }
    alone = {
        "nothing": {},
        "causal": {"mask": CAUSAL},
        "window": {"mask": sliding_window(2), "q_offset": 1},
        "offsets": {"mask": CAUSAL, "q_offset": np.array([2, -2], np.int32)},
        "scale_softcap": {"scale": -1.3, "softcap": 0.8},
        "lengths": lengths,
        "segments": {"segment_ids": ids},
        "bias": {"bias": bias},
        "bias_heads": {"bias": bias[:1, :, :1]},
        "bias_rows": {"bias": bias[:, :1, :, :1]},
        "bias_keys": {"bias": bias[0, 0, 0]},
        "bias_minus_infinity": {"bias": np.where(hidden, -np.inf, bias)},
        "mask_array": {"mask_array": ~hidden},
        "sinks": {"sinks": rng.standard_normal(4)},
        "sinks_empty_rows": {"sinks": rng.standard_normal(4), "mask": Mask(right=-2)},
    }
    together = {
        "mask": Mask(4, 1),
        "scale": 0.9,
        "softcap": 2.0,
        "q_offset": np.array([1, 0], np.int32),
        "segment_ids": ids,
        "bias": bias,
        "mask_array": ~hidden,
        "sinks": rng.standard_normal(4),
        **lengths,
    }
    return alone | {"everything": together}


NAMES = tuple(options(np.random.default_rng(0), 5, 7))


def split(arguments):
    """(floats that have gradients, the other arrays, static arguments)"""
    floats = {name: arguments[name] for name in FLOATS if name in arguments}
    static = {n: x for n, x in arguments.items() if not isinstance(x, (np.ndarray, tuple))}
    rest = {n: x for n, x in arguments.items() if n not in floats and n not in static}
    return floats, rest, static


def by_loops(arguments, do, dlse):
    """sum(do * out) + sum(dlse * lse), the rows with no key left out."""
    mask = arguments.get("mask", pa.FULL)
    rest = {name: x for name, x in arguments.items() if name != "mask"}
    out, lse = witness.attention(**rest, left=mask.left, right=mask.right)
    return (do * out).sum() + (dlse * np.where(np.isfinite(lse), lse, 0)).sum()


def gradients(arguments, do, dlse, implementation=None):
    floats, rest, static = split(arguments)

    def loss(floats, rest):
        out, lse = pa.flash_attention_with_lse(
            **floats, **rest, **static, implementation=implementation
        )
        return (do * out).sum() + (dlse * jnp.where(jnp.isfinite(lse), lse, 0)).sum()

    return in_numpy.call(jax.grad(loss), floats, rest)


@pytest.mark.parametrize("name", NAMES)
def test_tangents_of_the_definition(rng, name):
    """In float64, those of finite differences: of all inputs together, and of each alone."""
    arguments = draw(rng, 5, 7) | options(rng, 5, 7)[name]
    floats, rest, static = split(arguments)
    along = {name: rng.standard_normal(x.shape) for name, x in floats.items()}
    for names in (tuple(along), *((name,) for name in along)):
        own = {name: along[name] for name in names}
        got = definition.tangents(floats | rest, own, **static)
        high, low = (
            definition.attention(
                floats | rest | {name: floats[name] + step * own[name] for name in names}, **static
            )
            for step in (1e-5, -1e-5)
        )
        for result in ("out", "lse"):
            with np.errstate(invalid="ignore"):  # -inf of rows without a key
                difference = np.nan_to_num(high[result] - low[result]) / 2e-5
            np.testing.assert_allclose(got[f"{result}_dot"], difference, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "sizes, name",
    [
        *(("t_below_s", name) for name in NAMES),
        *(("t_above_s", name) for name in ("causal", "everything")),
    ],
)
def test_finite_differences(rng, sizes, name):
    """Along random directions, in float64, for one input at a time: the reference's autodiff, and
    the derivatives by hand that budgets are made with.
    """
    q_len, kv_len = SIZES[sizes]
    arguments = draw(rng, q_len, kv_len) | options(rng, q_len, kv_len)[name]
    do, dlse = rng.standard_normal((2, q_len, 4, 4)), rng.standard_normal((2, 4, q_len))
    with jax.enable_x64(True):
        got = jax.tree.map(np.asarray, gradients(arguments, do, dlse))
    assert set(got) == {x for x in FLOATS if x in arguments}
    by_hand = budget.attention(arguments, do, dlse).oracle
    assert {name for name in by_hand if name[0] == "d"} == {f"d{wrt}" for wrt in got}
    for wrt, gradient in got.items():
        value = arguments[wrt]
        assert gradient.shape == value.shape and gradient.dtype == np.float64
        assert np.isfinite(gradient).all()
        np.testing.assert_allclose(by_hand[f"d{wrt}"], gradient, rtol=1e-11, atol=1e-13)
        for _ in range(3):
            direction = rng.standard_normal(value.shape)
            low, high = (
                by_loops(arguments | {wrt: value + step * direction}, do, dlse)
                for step in (-1e-5, 1e-5)
            )
            wanted = (high - low) / 2e-5
            # The error is h**2 times a third derivative, plus the rounding of values of size 10.
            np.testing.assert_allclose((gradient * direction).sum(), wanted, rtol=2e-6, atol=2e-8)


@pytest.mark.parametrize("name", ["nothing", "causal", "bias", "mask", "window"])
def test_jax_nn(rng, name):
    inputs = jax.tree.map(np.float32, draw(rng, 5, 7, v_dim=6))
    do = np.float32(rng.standard_normal((2, 5, 4, 6)))
    arguments = {
        "nothing": {},
        "causal": {"is_causal": True},
        "bias": {"bias": np.float32(rng.standard_normal((2, 4, 5, 7)))},
        "mask": {"mask": rng.random((2, 4, 5, 7)) < 0.8},
        "window": {"local_window_size": (2, 3)},
    }[name]
    if name == "mask":
        arguments["mask"][..., 0] = True
    wanted, got = (
        in_numpy.call(
            jax.grad(lambda x, f=f: (f(x["q"], x["k"], x["v"], **arguments) * do).sum()), inputs
        )
        for f in (jax.nn.dot_product_attention, pa.dot_product_attention)
    )
    for wrt in inputs:
        np.testing.assert_allclose(got[wrt], wanted[wrt], rtol=1e-4, atol=1e-5)


def test_integers_and_booleans_have_no_gradient(rng):
    arguments = jax.tree.map(
        lambda x: np.float32(x) if x.dtype == np.float64 else x, draw(rng, 5, 7)
    )
    arguments |= {"kv_lengths": np.array([3, 7], np.int32), "q_offset": np.array([0, 2], np.int32)}
    arguments["mask_array"] = rng.random((5, 7)) < 0.7
    arguments["segment_ids"] = (np.zeros((2, 5), np.int32), np.zeros((2, 7), np.int32))
    loss = lambda arguments: pa.flash_attention(**arguments).sum()  # noqa: E731
    got = jax.grad(loss, allow_int=True)(arguments)
    for name, gradient in got.items():
        for leaf in jax.tree.leaves(gradient):
            wanted = np.float32 if name in FLOATS else jax.dtypes.float0
            assert leaf.dtype == wanted, name


@each_subject
def test_rows_that_see_nothing_have_exactly_zero_gradients(rng, subject):
    drawn = draw(rng, 40, 70, q_heads=2, kv_heads=1, dim=64, v_dim=64)
    q, k, v = (x.astype(jnp.dtype(subject.dtype)) for x in drawn.values())
    do, dlse = rng.standard_normal((2, 40, 2, 64)), rng.standard_normal((2, 2, 40))
    lengths = np.array([0, 50], np.int32)

    def loss(q, k, v, *, implementation):
        out, lse = pa.flash_attention_with_lse(
            *(q, k, v), mask=CAUSAL, q_offset=-3, kv_lengths=lengths, implementation=implementation
        )
        out = (do.astype(np.float32) * out.astype(jnp.float32)).sum()
        return out + (dlse.astype(np.float32) * jnp.where(lse == -jnp.inf, 0, lse)).sum()

    def grad(*args, implementation):
        return jax.grad(functools.partial(loss, implementation=implementation), (0, 1, 2))(*args)

    dq, dk, dv = (np.asarray(x, np.float32) for x in subject.call(grad, q, k, v))
    assert not dq[0].any() and not dk[0].any() and not dv[0].any()
    assert not dq[1, :3].any()  # before position 0
    assert not dk[1, 37:].any() and not dv[1, 37:].any()  # the last query stands at 36
    for gradient in (dq[1, 4:], dk[1, :37], dv[1, :37]):
        assert np.isfinite(gradient).all() and np.abs(gradient).max(-1).min() > 0


@each_subject
def test_sinks_without_end(rng, subject):
    """A sink of inf has the probability 1: out is 0, lse inf, and follows the sink alone. One of
    -inf is none. Both derivatives, beside rows without a key.
    """
    drawn = draw(rng, 40, 70, batch=1, q_heads=3, kv_heads=3, dim=64, v_dim=64)
    arrays = {name: jnp.asarray(x, subject.dtype) for name, x in drawn.items()}
    arrays["sinks"] = jnp.asarray([np.inf, 0.5, -np.inf], jnp.float32)
    do = jnp.asarray(rng.standard_normal((1, 40, 3, 64)), subject.dtype)
    dlse = jnp.asarray(rng.standard_normal((1, 3, 40)), jnp.float32)
    along = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), arrays)

    def call(arrays, *, implementation):
        def run(arrays):
            how = {"mask": CAUSAL, "q_offset": -3, "implementation": implementation}
            return pa.flash_attention_with_lse(**arrays, **how)

        results, pullback = jax.vjp(run, arrays)
        dots = jax.jvp(lambda arrays: run(arrays), (arrays,), (along,))[1]
        return results, pullback((do, dlse))[0], dots

    (out, lse), gradients, (out_dot, lse_dot) = subject.call(call, arrays)
    how = {"mask": CAUSAL, "q_offset": -3}
    expected = budget.attention(arrays | how, do, dlse, tensor_cores=subject.tensor_cores)
    got = {"out": out, "lse": lse} | {f"d{name}": x for name, x in gradients.items()}
    budget.check(got, expected)
    sees = np.arange(40) >= 3
    np.testing.assert_array_equal(lse[0, 0], np.where(sees, np.inf, -np.inf))
    for x in (out, gradients["q"], gradients["k"], gradients["v"], out_dot):
        x = np.asarray(x, np.float32)
        assert np.isfinite(x).all() and not x[:, :, 0].any() and x[:, :, 1].any()
    np.testing.assert_allclose(gradients["sinks"][0], dlse[0, 0, 3:].sum(), rtol=1e-5)
    assert gradients["sinks"][2] == 0
    np.testing.assert_array_equal(lse_dot[0, 0], np.where(sees, along["sinks"][0], 0))
    alone = {name: x if name == "sinks" else x[:, :, 2:] for name, x in arrays.items()}
    without = subject.call(pa.flash_attention, alone["q"], alone["k"], alone["v"], **how)
    np.testing.assert_array_equal(np.asarray(out)[:, :, 2:], without)


@each_subject
def test_a_sink_of_nan(rng, subject):
    """It reaches the rows of its head that see a key, and no others."""
    drawn = draw(rng, 40, 70, batch=1, q_heads=2, kv_heads=1, dim=64, v_dim=64)
    q, k, v = (jnp.asarray(x, subject.dtype) for x in drawn.values())
    how = {"mask": CAUSAL, "q_offset": -3, "sinks": jnp.asarray([np.nan, 0.5], jnp.float32)}
    out, lse = subject.call(pa.flash_attention_with_lse, q, k, v, **how)
    wanted = np.zeros((2, 40), bool)
    wanted[0, 3:] = True
    np.testing.assert_array_equal(np.isnan(lse)[0], wanted)
    np.testing.assert_array_equal(np.isnan(np.asarray(out, np.float32))[0].all(2).T, wanted)
    np.testing.assert_array_equal(np.isnan(np.asarray(out, np.float32))[0].any(2).T, wanted)


@each_subject
def test_what_lies_past_a_length_is_never_read(rng, subject):
    """The same two sequences three times in a batch: as they are, before NaN and before Inf; in all
    that is read by row or by column, cotangents too.
    """
    dtype, rows, keys = jnp.dtype(subject.dtype), 40, 70
    drawn = draw(rng, rows, keys, q_heads=2, kv_heads=1, dim=64, v_dim=64)
    clean = {name: x.astype(dtype) for name, x in drawn.items()}
    clean["bias"] = np.float32(rng.standard_normal((2, 1, rows, keys)))
    clean["mask_array"] = rng.random((2, 1, rows, keys)) < 0.8
    clean |= {"q_ids": np.ones((2, rows), np.int32), "kv_ids": np.ones((2, keys), np.int32)}
    clean["do"] = rng.standard_normal((2, rows, 2, 64)).astype(dtype)
    clean["dlse"] = np.float32(rng.standard_normal((2, 2, rows)))
    ends = {"q": np.array([rows, 7] * 3, np.int32), "kv": np.array([0, 33] * 3, np.int32)}
    of_rows = {"q": 1, "q_ids": 1, "do": 1, "dlse": 2, "bias": 2, "mask_array": 2}
    of_keys = {"k": 1, "v": 1, "kv_ids": 1, "bias": 3, "mask_array": 3}
    arrays = {name: np.concatenate([x] * 3) for name, x in clean.items()}
    for side, axes in (("q", of_rows), ("kv", of_keys)):
        for name, axis in axes.items():
            for n, fill in zip(range(2, 6), np.repeat([np.nan, np.inf], 2), strict=True):
                row = np.moveaxis(arrays[name][n], axis - 1, 0)
                row[ends[side][n] :] = fill if row.dtype.kind not in "bi" else n % 4

    def call(arrays, *, implementation):
        def run(q, k, v, bias):
            options = {"mask_array": arrays["mask_array"], "implementation": implementation}
            options |= {"segment_ids": (arrays["q_ids"], arrays["kv_ids"]), "bias": bias}
            lengths = {"q_lengths": ends["q"], "kv_lengths": ends["kv"]}
            return pa.flash_attention_with_lse(q, k, v, mask=CAUSAL, **options, **lengths)

        primals = (arrays[name] for name in ("q", "k", "v", "bias"))
        results, pullback = jax.vjp(run, *primals)
        return *results, *pullback((arrays["do"], arrays["dlse"]))

    for x in subject.call(call, arrays):
        x = np.asarray(x, np.float32)
        assert not np.isnan(x).any() and x[:2].any()
        np.testing.assert_array_equal(x, np.concatenate([x[:2]] * 3))


@pytest.mark.parametrize("subject", subjects.rows("flash_backward", but=("reference_on_gpu",)))
@pytest.mark.parametrize("precision", [None, "highest"])
def test_small_gradients_of_float32(rng, subject, precision):
    """Two keys to a row (docs/accuracy.md, float32), one of which has a probability of
    about 1e-9. TF32 scores are off by a few percent of a probability.
    """
    q, k, v, do = (np.float32(rng.standard_normal((1, 64, 1, 64))) for _ in range(4))
    k[:, ::2] = q[:, ::2] + q[:, 1::2]
    of_own = np.einsum("bqnh,bqnh->q", q, np.repeat(k[:, ::2], 2, axis=1)) / 8
    k[:, ::2] *= np.float32(11 / of_own.mean())
    k[:, 1::2] = -k[:, ::2]
    document = (np.arange(64) // 2).astype(np.int32)

    def hide(s, b, h, q, kv, document):
        return jnp.where(document[q] == document[kv], s, -jnp.inf)

    def gradient(k, *, implementation):
        how = {"score": pa.score_fn(hide, document), "softcap": 20.0, "precision": precision}
        run = lambda k: pa.flash_attention(q, k, v, implementation=implementation, **how)  # noqa: E731
        return jax.vjp(run, k)[1](jnp.asarray(do))[0]

    bias = np.where(document[:, None] == document, 0.0, -np.inf)[None, None]
    arrays = {"q": q, "k": k, "v": v, "bias": bias}
    want = definition.attention(arrays, do=do, softcap=20.0)["dk"][:, 1::2]
    error = np.abs(np.float64(subject.call(gradient, k=k))[:, 1::2] - want)
    of_hopper = precision is None and subject.name in ("interpreted", "kernels", "kernels_float32")
    lost = 2.0**-39 * 2 * 64 * np.abs(do).max() * np.abs(v).max() * of_hopper
    rows = np.abs(q).reshape(1, 32, 2, 1, 64).sum(axis=2) / 8
    exact = subject.name == "reference" or precision == "highest"
    assert (error <= (2e-2 if exact else 0.2) * np.abs(want) + lost * rows + 1e-11).all()
    assert 1e-11 < np.median(np.abs(want)) < 1e-7


def test_gradients_of_what_rows_share_beside_nan_past_a_length(rng):
    """A traced scale of jax.nn's signature, and scales of float8, multiply those rows, too."""
    ends = np.array([3, 5], np.int32)
    rows = [np.float32(rng.standard_normal((2, 5, n, 8))) for n in (4, 2, 2)]
    weight = np.float32(rng.standard_normal((2, 5, 4, 8)))

    def gradients(by):
        q, k, v = (jnp.asarray(x).at[0, 3:].set(by) for x in rows)
        narrow = [x.astype(jnp.float8_e4m3fn) for x in (q, k, v)]

        def of_float8(scale):
            scales = dict.fromkeys(("q_scale", "k_scale", "v_scale"), scale)
            lengths = {"q_lengths": ends, "kv_lengths": ends}
            return by_name.flash_attention(*narrow, **scales, **lengths, out_dtype=jnp.float32)

        def of_jax_nn(scale):
            lengths = {"query_seq_lengths": ends, "key_value_seq_lengths": ends}
            return pa.dot_product_attention(q, k, v, scale=scale, **lengths)

        return [
            jax.grad(lambda scale, call=call: (call(scale) * weight).sum())(jnp.float32(0.3))
            for call in (of_float8, of_jax_nn)
        ]

    got, want = gradients(jnp.nan), gradients(0.0)
    assert got == want and min(map(abs, want)) > 1e-2


@pytest.mark.parametrize(
    "subject, dims",
    [
        pytest.param(*row.values, dims, id=f"{row.id}-{dims}", marks=row.marks)
        for row in subjects.rows("flash_forward", "flash_backward")
        for dims in ((20, 13), (36, 1))
        if dims == (20, 13) or row.id != "interpreted"  # both kernels are handed the same columns
    ],
)
def test_head_dims_that_are_no_multiple_of_8(rng, subject, dims):
    """Columns of zeros are added on the way to a kernel; the scale is that of the true dim."""
    drawn = draw(rng, 20, 30, q_heads=2, kv_heads=1, dim=dims[0], v_dim=dims[1])
    arrays = {name: jnp.asarray(x, subject.dtype) for name, x in drawn.items()}
    do = jnp.asarray(rng.standard_normal((2, 20, 2, dims[1])), subject.dtype)
    dlse = jnp.asarray(rng.standard_normal((2, 2, 20)), jnp.float32)

    def call(q, k, v, *, implementation):
        def run(q, k, v):
            return pa.flash_attention_with_lse(
                q, k, v, mask=Mask(5, 3), implementation=implementation
            )

        results, pullback = jax.vjp(run, q, k, v)
        return *results, *pullback((do, dlse))

    got = dict(zip(("out", "lse", "dq", "dk", "dv"), subject.call(call, **arrays), strict=True))
    expected = budget.attention(
        arrays | {"mask": Mask(5, 3)}, do, dlse, tensor_cores=subject.tensor_cores
    )
    budget.check(got, expected)


def test_the_lse_alone_has_gradients(rng):
    inputs = draw(rng, 5, 7)
    dlse = rng.standard_normal((2, 4, 5))
    with jax.enable_x64(True):
        got = gradients(inputs, np.zeros((2, 5, 4, 4)), dlse)
        assert not np.asarray(got["v"]).any()
        assert np.asarray(got["q"]).all() and np.asarray(got["k"]).all()


def test_second_derivatives(rng):
    """The gradient of <gradient, u> along w is the one of <gradient, w> along u."""
    inputs = draw(rng, 3, 4, q_heads=2, kv_heads=1)
    u, w = ({name: rng.standard_normal(x.shape) for name, x in inputs.items()} for _ in range(2))
    do = rng.standard_normal((2, 3, 2, 4))
    with jax.enable_x64(True):
        loss = lambda x: (pa.flash_attention(**x, mask=CAUSAL) * do).sum()  # noqa: E731

        @jax.jit
        def hessian(u, w):
            along = lambda x: sum(jax.tree.leaves(jax.tree.map(jnp.vdot, jax.grad(loss)(x), u)))  # noqa: E731
            return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, jax.grad(along)(inputs), w)))

        np.testing.assert_allclose(hessian(u, w), hessian(w, u), rtol=1e-9)
        assert abs(hessian(u, w)) > 1e-3


def test_one_visible_key_leaves_nothing_to_derive(rng):
    """The logit of a row's only key changes nothing: its derivatives are 0, to the bit."""
    inputs = jax.tree.map(np.float32, draw(rng, 37, 64, v_dim=6))
    inputs["bias"] = np.float32(rng.standard_normal((1, inputs["q"].shape[2], 1, 1)))
    along = {name: np.float32(rng.standard_normal(x.shape)) for name, x in inputs.items()}
    do = np.float32(rng.standard_normal(inputs["q"].shape))
    loss = lambda x: (pa.flash_attention(**x, mask=pa.Mask(left=0, right=0)) * do).sum()  # noqa: E731
    first, second = jax.jvp(jax.grad(loss), [inputs], [along])
    for name in ("q", "k", "bias"):
        np.testing.assert_array_equal(first[name], 0, err_msg=name)
        np.testing.assert_array_equal(second[name], 0, err_msg=name)
    assert np.abs(first["v"]).max() > 1


def test_gradients_through_a_cache(rng):
    """Append and decode on the reference have the gradients of flash_attention."""
    inputs = jax.tree.map(np.float32, draw(rng, 3, 3))
    do = np.float32(rng.standard_normal((2, 3, 4, 4)))

    def through_cache(x):
        cache = pa.StackedCache.create(2, 8, 2, 6, v_head_dim=4, dtype="float32")
        cache = pa.append_kv(cache, x["k"], x["v"])
        return (pa.decode_attention(x["q"], cache) * do).sum()

    plain = lambda x: (pa.flash_attention(**x, mask=CAUSAL) * do).sum()  # noqa: E731
    got, wanted = (jax.jit(jax.grad(f))(inputs) for f in (through_cache, plain))
    for name in inputs:
        np.testing.assert_allclose(got[name], wanted[name], rtol=1e-4, atol=1e-5)


def _results(q, k, v, do, *, implementation):
    """At the highest precision: out, lse and gradients, and the last rows of out by a cache."""
    how = {"scale": 0.3, "precision": "highest", "implementation": implementation}

    def attend(q, k, v):
        return pa.flash_attention_with_lse(q, k, v, mask=CAUSAL, **how)

    out, back = jax.vjp(attend, q, k, v)
    cache = pa.StackedCache.create(len(q), 256, k.shape[2], q.shape[3], dtype="float32")
    cache = pa.append_kv(cache, k, v, implementation=implementation and "reference")
    decoded = pa.decode_attention(q[:, -4:], cache, **how)
    names = ("out", "lse", "dq", "dk", "dv", "decoded")
    return dict(zip(names, (*out, *back((do, 0 * out[1])), decoded), strict=True))


@pytest.mark.parametrize(
    "subject",
    subjects.rows("decode", but=("interpreted", "reference", "reference_on_gpu", "kernels")),
)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_highest_is_at_worst_twice_as_far_off_as_plain_float32(rng, subject, dim):
    """Forward, backward and decode, to the letter, with no rounding beside."""
    q, k, v, do = (np.float32(rng.standard_normal((2, 200, n, dim))) for n in (4, 2, 2, 4))
    attend = functools.partial(
        definition.attention, {"q": q, "k": k, "v": v}, do, mask=CAUSAL, scale=0.3
    )
    exact, plain = attend(), attend(arithmetic=definition.naive(None))
    for results in (exact, plain):
        results["decoded"] = results["out"][:, -4:]
    for name, got in subject.call(_results, q, k, v, do).items():
        ours, theirs = (np.abs(x - exact[name]).max() for x in (got, plain[name]))
        assert ours <= 2 * theirs, f"{name}: {ours:.2e}, plain float32 {theirs:.2e}"
