"""flash_attention: the definition, by three witnesses, and every row of the table of semantics."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_attn as pa
from pallas_attn import CAUSAL, FULL, Mask, sliding_window
from pallas_attn._call import checks
from tests.support import budget, definition, in_numpy, subjects, witness

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


def draw(rng, *shape, dtype="float32", scale=1.0):
    return jnp.asarray((rng.standard_normal(shape) * scale).astype(jnp.dtype(dtype)))


def qkv(rng, shape, dtype="float32"):
    batch, q_len, kv_len, q_heads, kv_heads, dim, v_dim = shape
    return (
        draw(rng, batch, q_len, q_heads, dim, dtype=dtype),
        draw(rng, batch, kv_len, kv_heads, dim, dtype=dtype),
        draw(rng, batch, kv_len, kv_heads, v_dim, dtype=dtype),
    )


def by_loops(q, k, v, mask=FULL, **options):
    return witness.attention(q, k, v, left=mask.left, right=mask.right, **options)


def in_float64(q, k, v, **options):
    """The public call in float64; any array option that is a float too."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in (q, k, v)]
        arrays = {
            name: jnp.asarray(np.asarray(x), jnp.float64) if name in ("bias", "sinks") else x
            for name, x in options.items()
            if hasattr(x, "shape") or isinstance(x, tuple)
        }
        static = {name: x for name, x in options.items() if name not in arrays}

        def run(wide, arrays):
            return pa.flash_attention_with_lse(*wide, **arrays, **static)

        return [np.asarray(x) for x in in_numpy.call(run, wide, arrays)]


# ---- the oracle against loops written from the definition ----------------------------------------

# Sizes: B, T, S, N, K, H, Hv.
SHAPES = {
    "t_below_s": (2, 5, 7, 4, 2, 8, 6),
    "t_equals_s": (2, 6, 6, 2, 2, 4, 4),
    "t_above_s": (2, 7, 4, 3, 1, 4, 8),
    "groups_of_8": (1, 4, 5, 16, 2, 4, 4),
}


def options(rng, shape):
    """Every argument alone, then together."""
    batch, q_len, kv_len, q_heads = shape[:4]
    ids = rng.integers(0, 2, (batch, q_len)), rng.integers(0, 2, (batch, kv_len))
    arrays = {
        "q_offset": jnp.asarray([3, -2][:batch], jnp.int32),
        "q_lengths": jnp.asarray([q_len, 2][:batch], jnp.int32),
        "kv_lengths": jnp.asarray([0, 3][:batch], jnp.int32),
        "segment_ids": tuple(jnp.asarray(ids_of_side, jnp.int32) for ids_of_side in ids),
        "bias": draw(rng, batch, q_heads, q_len, kv_len),
        "mask_array": jnp.asarray(rng.random((batch, 1, q_len, kv_len)) < 0.7),
        "sinks": draw(rng, q_heads),
    }
    alone = {name: {name: array} for name, array in arrays.items()}
    statics = {
        "nothing": {},
        "causal": {"mask": CAUSAL},
        "strictly_causal": {"mask": Mask(right=-1)},
        "window": {"mask": sliding_window(2), "q_offset": 1},
        "band": {"mask": Mask(1, 2)},
        "lookback": {"mask": Mask(left=0)},
        "offset": {"mask": CAUSAL, "q_offset": kv_len - q_len},
        "scale": {"scale": -1.7},
        "softcap": {"softcap": 0.5, "scale": 3.0},
        "bias_row": {"bias": draw(rng, 1, 1, q_len, 1)},
        "bias_2d": {"bias": draw(rng, q_len, kv_len)},
        "bias_key": {"bias": draw(rng, kv_len)},
        "mask_2d": {"mask_array": arrays["mask_array"][0, 0]},
        "offsets": {"mask": sliding_window(3), "q_offset": arrays["q_offset"]},
        "sinks_without_end": {
            "mask": CAUSAL,
            "q_offset": -1,
            "sinks": arrays["sinks"].at[0].set(np.inf).at[-1].set(-np.inf),
        },
        "sinks_and_empty_rows": {
            "mask": Mask(right=-1),
            "sinks": arrays["sinks"],
            "kv_lengths": arrays["kv_lengths"],
        },
        "everything": {"mask": Mask(3, 1), "scale": 0.9, "softcap": 2.0, **arrays},
    }
    return alone | statics


NAMES = tuple(options(np.random.default_rng(0), SHAPES["t_below_s"]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_oracle_is_the_definition(rng, shape, name):
    """The reference, and what budgets are made with."""
    chosen = options(rng, SHAPES[shape])[name]
    arrays = qkv(rng, SHAPES[shape])
    wanted = by_loops(*arrays, **chosen)
    in_numpy = budget.attention(dict(zip("qkv", arrays, strict=True)) | chosen).oracle
    for got in (in_float64(*arrays, **chosen), (in_numpy["out"], in_numpy["lse"])):
        for have, want in zip(got, wanted, strict=True):
            assert have.dtype == np.float64
            np.testing.assert_allclose(have, want, rtol=1e-12, atol=1e-13)


def test_one_segment_array_serves_both_sides(rng):
    arrays = qkv(rng, SHAPES["t_equals_s"])
    ids = jnp.asarray(rng.integers(0, 3, (2, 6)), jnp.int32)
    shared = pa.flash_attention(*arrays, segment_ids=ids)
    np.testing.assert_array_equal(shared, pa.flash_attention(*arrays, segment_ids=(ids, ids)))
    packed = pa.flash_attention(
        *arrays, mask=CAUSAL, segment_ids=jnp.asarray([[0, 0, 1, 1, 1, 2]] * 2)
    )
    for lo, hi in ((0, 2), (2, 5), (5, 6)):  # packed sequences are as good as separate ones
        alone = pa.flash_attention(*(x[:, lo:hi] for x in arrays), mask=CAUSAL)
        np.testing.assert_allclose(packed[:, lo:hi], alone, rtol=1e-5, atol=1e-6)


# ---- by hand -------------------------------------------------------------------------------------


def test_three_by_three_by_hand():
    """q k^T = [[ln 2, 0, 0], [0, ln 3, 0], [0, 0, 0]]: the weights are 1/4, 1/5 and 1/3."""
    q = jnp.asarray([[np.log(2), 0, 0], [0, np.log(3), 0], [0, 0, 0]], jnp.float32)[None, :, None]
    k = jnp.eye(3)[None, :, None]
    v = jnp.asarray([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]])[None, :, None]
    out, lse = pa.flash_attention_with_lse(q, k, v, scale=1.0)
    rows = [(2 * 1 + 2 + 4) / 4, (1 + 3 * 2 + 4) / 5, (1 + 2 + 4) / 3]
    wanted = np.array([[x, 10 * x] for x in rows])
    np.testing.assert_allclose(out[0, :, 0], wanted, rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0], np.log([4, 5, 3]), rtol=1e-6)
    out, lse = pa.flash_attention_with_lse(q, k, v, scale=1.0, mask=CAUSAL)
    rows = [1.0, (1 + 3 * 2) / 4, (1 + 2 + 4) / 3]
    np.testing.assert_allclose(out[0, :, 0], [[x, 10 * x] for x in rows], rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0], np.log([2, 4, 3]), rtol=1e-6)
    # A sink of ln 4 adds 4 to every denominator and nothing to any numerator.
    sinks = jnp.log(jnp.asarray([4.0]))
    out = pa.flash_attention(q, k, v, scale=1.0, sinks=sinks)
    rows = [8 / 8, 11 / 9, 7 / 7]
    np.testing.assert_allclose(out[0, :, 0, 0], rows, rtol=1e-6)


# ---- jax.nn --------------------------------------------------------------------------------------


def test_dot_product_attention_has_jax_nns_signature():
    def arguments(function):
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters]

    assert arguments(pa.dot_product_attention) == arguments(jax.nn.dot_product_attention)


def jax_nn_cases(rng):
    lengths = {
        "query_seq_lengths": jnp.asarray([3, 5], jnp.int32),
        "key_value_seq_lengths": jnp.asarray([7, 4], jnp.int32),
    }
    bias = draw(rng, 2, 4, 5, 7)
    mask = jnp.asarray(rng.random((2, 1, 5, 7)) < 0.7).at[..., 0].set(True)
    return {
        "nothing": {},
        "causal": {"is_causal": True},
        "scale": {"scale": 0.3},
        "bias": {"bias": bias},
        "bias_3d": {"bias": bias[0]},
        "bias_heads": {"bias": bias[:1, :, :1]},
        "mask": {"mask": mask},
        "mask_heads": {"mask": jnp.broadcast_to(mask, (2, 4, 5, 7))},
        "lengths": lengths,
        "kv_lengths": {"key_value_seq_lengths": lengths["key_value_seq_lengths"]},
        "window": {"local_window_size": 2},
        "window_pair": {"local_window_size": (1, 3)},
        "window_causal": {"local_window_size": (2, 3), "is_causal": True},
        "bias_of_integers": {"bias": jnp.asarray(rng.integers(-3, 3, (5, 7)), jnp.int32)},
        "traced_scale": {"scale": jnp.float32(0.3)},
        "everything": {
            "bias": bias,
            "mask": mask,
            "scale": 0.5,
            "is_causal": True,
            "key_value_seq_lengths": lengths["key_value_seq_lengths"],
            "local_window_size": (4, 4),
        },
    }


@pytest.mark.parametrize("name", jax_nn_cases(np.random.default_rng(0)))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dot_product_attention_is_jax_nns(rng, dtype, name):
    chosen = jax_nn_cases(rng)[name]
    q, k, v = qkv(rng, (2, 5, 7, 4, 2, 8, 8), dtype)
    if (
        name.startswith("bias") and name != "bias_of_integers"
    ):  # under strict promotion jax.nn wants the bias in the logits' float32
        chosen = chosen | {"bias": chosen["bias"].astype("float32")}
    static = {n: x for n, x in chosen.items() if not hasattr(x, "shape")}
    arrays = {n: x for n, x in chosen.items() if n not in static}

    def both(function):
        run = lambda a: function(q, k, v, return_residual=True, **a, **static)  # noqa: E731
        return [np.asarray(x, np.float32) for x in in_numpy.call(run, arrays)]

    with jax.numpy_dtype_promotion("standard"):
        wanted = both(jax.nn.dot_product_attention)
    got = both(pa.dot_product_attention)
    rows = np.ones((2, 5, 1), bool)
    if "query_seq_lengths" in chosen:  # past q's length jax.nn's residual means nothing
        rows[0, 3:] = False
    tolerance = {"rtol": 2e-5, "atol": 2e-6} if dtype == "float32" else {"rtol": 2e-2, "atol": 1e-2}
    np.testing.assert_allclose(got[0], wanted[0], **tolerance)
    np.testing.assert_allclose(got[1], np.where(rows, wanted[1], -np.inf), **tolerance)


@pytest.mark.parametrize("most", [2**30, 2**31 - 1, np.int64(2**40)])
def test_a_window_beyond_every_key_is_none(rng, most):
    q, k, v = qkv(rng, (1, 5, 7, 4, 2, 8, 8))
    for window, same in ((most, None), ((most, 1), (100, 1)), ((most, most), None)):
        got = pa.dot_product_attention(q, k, v, local_window_size=window)
        want = pa.dot_product_attention(q, k, v, local_window_size=same)
        np.testing.assert_array_equal(got, want)


def test_dot_product_attention_without_a_batch(rng):
    q, k, v = (x[0] for x in qkv(rng, (1, 5, 7, 4, 2, 8, 8)))
    for residual in (False, True):
        got = pa.dot_product_attention(q, k, v, return_residual=residual)
        theirs = functools.partial(jax.nn.dot_product_attention, return_residual=residual)
        wanted = jax.jit(theirs)(q, k, v)
        for have, want in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            assert have.shape == want.shape
            np.testing.assert_allclose(have, want, rtol=2e-5, atol=2e-6)


def test_dot_product_attention_takes_jax_nns_implementations_and_numpy(rng):
    arrays = [np.asarray(x) for x in qkv(rng, SHAPES["t_equals_s"])]
    wanted = pa.dot_product_attention(*arrays)
    assert isinstance(wanted, jax.Array)
    for name in (None, "xla", "cudnn", "reference"):
        np.testing.assert_array_equal(
            pa.dot_product_attention(*arrays, implementation=name), wanted
        )


def test_where_dot_product_attention_differs_on_purpose(rng):
    q, k, v = qkv(rng, (1, 4, 4, 1, 1, 8, 8))
    hidden = jnp.ones((1, 1, 4, 4), bool).at[0, 0, 2].set(False)
    theirs = jax.jit(jax.nn.dot_product_attention)(q, k, v, mask=hidden)
    ours, lse = pa.dot_product_attention(q, k, v, mask=hidden, return_residual=True)
    np.testing.assert_allclose(theirs[0, 2], v.mean(1)[0], rtol=1e-5, atol=1e-6)
    assert not ours[0, 2].any() and lse[0, 2, 0] == -jnp.inf

    def gradient(function):
        return jax.jit(jax.grad(lambda q: function(q, k, v, return_residual=True)[1].sum()))(q)

    assert not gradient(jax.nn.dot_product_attention).any()
    assert gradient(lambda *x, **y: pa.dot_product_attention(*x, **y)).any()
    low = [x.astype("bfloat16") for x in (q, k, v)]
    assert pa.dot_product_attention(*low, return_residual=True)[1].dtype == jnp.float32


# ---- duties of every implementation: once for every row of the table -----------------------------

each_subject = pytest.mark.parametrize("subject", subjects.rows("flash_forward"))
READOUTS = [
    FULL,
    CAUSAL,
    sliding_window(1),
    sliding_window(9),
    Mask(3, 5),
    Mask(left=4),
    Mask(right=7),
    Mask(right=-1),
    Mask(-2, 30),
]


# A GPU has all of them on both kernels; in the interpreter each kind of edge once.
INTERPRETED_READOUTS = {
    "interpreted": (CAUSAL, sliding_window(9), Mask(3, 5), Mask(left=4), Mask(right=-1)),
    "portable": (sliding_window(9), Mask(3, 5)),
}


@pytest.mark.parametrize(
    "subject, mask",
    [
        row.param(mask, id=str(mask))
        for row in subjects.ROWS
        if row.exists("flash_forward")
        for mask in INTERPRETED_READOUTS.get(row.name, READOUTS)
    ],
)
def test_mask_readout(subject, mask):
    """q = 0 makes the weights equal, v = 1 makes the output show them; an offset a batch row."""
    offsets, q_len, kv_len, length = (0, 24, -5), 40, 64, 50
    q = jnp.asarray(np.zeros((3, q_len, 1, 64)), subject.dtype)
    k = jnp.asarray(np.ones((3, kv_len, 1, 64)), subject.dtype)
    v = jnp.asarray(np.stack([np.eye(kv_len)[:, None]] * 3), subject.dtype)
    arrays = {"q_offset": np.array(offsets, np.int32), "kv_lengths": np.full(3, length, np.int32)}
    out, lse = subject.call(pa.flash_attention_with_lse, q, k, v, mask=mask, **arrays)
    out = np.asarray(out, np.float32)[:, :, 0]
    for b, offset in enumerate(offsets):
        seen = mask.dense(q_len, kv_len, q_offset=offset, kv_length=length)
        count = seen.sum(1, keepdims=True)
        np.testing.assert_array_equal(out[b] > 0, seen)
        np.testing.assert_allclose(out[b], seen / np.maximum(count, 1), rtol=2**-7, atol=0)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(lse[b, 0], np.log(count[:, 0]), rtol=1e-5, atol=1e-6)


def small(rng, subject, **changes):
    sizes = {
        "batch": 2,
        "q_len": 40,
        "kv_len": 70,
        "q_heads": 2,
        "kv_heads": 1,
        "dim": 64,
        "v_dim": 64,
    }
    return qkv(rng, tuple((sizes | changes).values()), subject.dtype)


@pytest.mark.by_xla
@each_subject
def test_rows_that_see_nothing(rng, subject):
    q, k, v = small(rng, subject)
    out, lse = subject.call(
        pa.flash_attention_with_lse,
        *(q, k, v),
        mask=CAUSAL,
        q_offset=-3,
        kv_lengths=jnp.asarray([0, 50], jnp.int32),
    )
    assert not out[0].any() and np.all(lse[0] == -np.inf)
    assert not out[1, :3].any() and np.all(lse[1, :, :3] == -np.inf)
    assert np.asarray(out[1, 3:]).all() and np.isfinite(lse[1, :, 3:]).all()
    assert out.dtype == q.dtype and lse.dtype == jnp.float32


@each_subject
@pytest.mark.parametrize("empty", ["batch", "q_len", "kv_len"])
def test_empty_axes(rng, subject, empty):
    q, k, v = small(rng, subject, **{empty: 0})
    out, lse = subject.call(pa.flash_attention_with_lse, q, k, v, mask=CAUSAL)
    assert out.shape == (*q.shape[:3], 64) and out.dtype == q.dtype
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1]) and lse.dtype == jnp.float32
    assert not out.any() and np.all(lse == -np.inf)


@pytest.mark.by_xla
@each_subject
def test_nan_and_inf_in_live_input_propagate(rng, subject):
    q, k, v = small(rng, subject)

    def out(q, k, v):
        return np.asarray(subject.call(pa.flash_attention, q, k, v), np.float32)

    assert np.isnan(out(q, k.at[0, 5, 0, 3].set(np.nan), v)[0]).all()
    assert np.isfinite(out(q, k.at[0, 5, 0, 3].set(np.nan), v)[1]).all()
    got = out(q.at[1, 4, 1, 0].set(np.nan), k, v)
    assert np.isnan(got[1, 4, 1]).all() and np.isnan(got).sum() == 64
    lse = subject.call(pa.flash_attention_with_lse, q.at[1, 4, 1, 0].set(np.nan), k, v)[1]
    assert np.isnan(lse[1, 1, 4]) and np.isnan(np.asarray(lse)).sum() == 1
    got = out(q, k, v.at[0, 5, 0, 3].set(np.inf))
    assert np.all(got[0, :, :, 3] == np.inf) and np.isfinite(np.delete(got, 3, -1)).all()
    got = out(q, k, v.at[0, 5, 0, 3].set(np.nan))
    assert np.isnan(got[0, :, :, 3]).all() and np.isfinite(np.delete(got, 3, -1)).all()


@pytest.mark.by_xla
@each_subject
def test_huge_logits_under_a_softcap(rng, subject):
    q, k, v = small(rng, subject)
    arguments = {"q": q * 1000, "k": k * 1000, "v": v, "softcap": 5.0, **in_full(subject)}
    out, lse = subject.call(pa.flash_attention_with_lse, **arguments)
    expected = budget.attention(arguments, tensor_cores=subject.tensor_cores)
    budget.check({"out": out, "lse": lse}, expected)


def in_full(subject) -> dict[str, str]:
    """The precision that keeps all bits of a float32 logit: TF32 has 11 bits of each q and k."""
    return {"precision": "highest"} if subject.dtype == "float32" else {}


@pytest.mark.by_xla
@each_subject
def test_huge_logits_without_one_do_not_overflow(rng, subject):
    q, k, v = small(rng, subject)
    arguments = {"q": q * 1000, "k": k * 1000, "v": v, **in_full(subject)}
    out, lse = subject.call(pa.flash_attention_with_lse, **arguments)
    assert np.isfinite(np.asarray(out, np.float32)).all() and np.isfinite(lse).all()
    wanted = (q[..., :] * 1000).astype("float32"), (k * 1000).astype("float32")
    logits = (
        np.einsum("btnh,bsh->bnts", *(np.asarray(x) for x in (wanted[0], wanted[1][:, :, 0]))) / 8
    )
    np.testing.assert_allclose(lse, logits.max(-1), rtol=1e-5)  # one key takes it all


@pytest.mark.by_xla
@pytest.mark.parametrize("dtype, size", [("float16", 6e4), ("float32", 1e9)])
def test_the_largest_logits_are_rounded_once(dtype, size):
    """Not again where the largest is subtracted: 500 more or less is all or nothing to exp."""
    x = jnp.full((1, 4, 2, 8), size, dtype)
    out, lse = jax.jit(pa.flash_attention_with_lse)(x, x, x)
    np.testing.assert_allclose(np.float32(out), np.float32(x), rtol=1e-3)
    np.testing.assert_allclose(lse, np.float32(x[0, 0, 0, 0]) ** 2 * 8**0.5, rtol=1e-3)


@pytest.mark.by_xla
@each_subject
def test_a_scale_that_float32_does_not_hold(rng, subject):
    """A GPU takes it for 0, which a hidden key's -inf is not to meet, nor a divisor to be."""

    def attend(q, k, v, **options):
        run = functools.partial(pa.flash_attention_with_lse, mask=CAUSAL, scale=1e-45, **options)
        (out, lse), pull = jax.vjp(run, q, k, v)
        return out, lse, *pull((out, lse))

    q, k, v = small(rng, subject, batch=1, q_heads=1)
    got = subject.call(attend, q, k, v)
    out, lse, dq, dk, dv = (np.asarray(x, np.float32) for x in got)
    seen = np.arange(1, q.shape[1] + 1)
    means = np.cumsum(np.asarray(v[:, : q.shape[1]], np.float32), axis=1) / seen[:, None, None]
    np.testing.assert_allclose(lse, np.broadcast_to(np.log(seen), lse.shape), atol=1e-5)
    np.testing.assert_allclose(out, np.broadcast_to(means, out.shape), atol=2e-2)
    assert np.abs([dq.max(), dk.max()]).max() < 1e-30 and np.isfinite(dv).all() and dv.any()


@pytest.mark.by_xla
@each_subject
def test_rows_that_a_bias_hides_by_its_size(rng, subject):
    """A bias of -1e10 for padded queries: beside it a float32 keeps no score and no log(keys)."""

    def attend(bias, q, k, v, do, **options):
        run = functools.partial(pa.flash_attention_with_lse, **options)
        (out, lse), pull = jax.vjp(lambda bias, *qkv: run(*qkv, bias=bias), bias, q, k, v)
        return out, lse, *pull((do, jnp.zeros_like(lse)))

    q, k, v = small(rng, subject, batch=1, q_heads=1)
    sizes = jnp.asarray([-1e9, -1e10, -3e37, np.finfo(np.float32).min])
    bias = jnp.zeros((1, 1, q.shape[1], 1), jnp.float32).at[0, 0, 7:11, 0].set(sizes)
    do = jnp.asarray(rng.standard_normal(q.shape), q.dtype).at[:, 7:11].set(0)
    got = subject.call(attend, bias, q, k, v, do)
    out, lse, *gradients = (np.asarray(x, np.float32) for x in got)
    mean = np.asarray(v, np.float32).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(out[:, 7:10], np.broadcast_to(mean, out[:, 7:10].shape), atol=2e-2)
    np.testing.assert_allclose(lse[..., 7:10], np.broadcast_to(sizes[:3], lse[..., 7:10].shape))
    assert not out[:, 10].any() and (lse[..., 10] == -np.inf).all()
    dbias, dq, dk, dv = gradients
    assert not dq[:, 7:11].any() and not dbias[0, 0, 7:11].any()
    rest = np.r_[:7, 11 : q.shape[1]]
    alone = definition.attention({"q": q[:, rest], "k": k, "v": v}, do[:, rest])
    for have, name in ((dq[:, rest], "dq"), (dk, "dk"), (dv, "dv")):
        np.testing.assert_allclose(have, alone[name], atol=0.02 * np.abs(alone[name]).max())


def test_a_bias_of_minus_infinity_hides_a_key(rng):
    q, k, v = qkv(rng, (2, 5, 7, 4, 2, 8, 6))
    hidden = jnp.asarray(rng.random((2, 4, 5, 7)) < 0.3).at[0, 1, 2].set(True)
    bias = jnp.where(hidden, -jnp.inf, 0.0)
    got = pa.flash_attention_with_lse(q, k, v, bias=bias)
    for have, want in zip(got, by_loops(q, k, v, bias=bias), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-6)
    for have, want in zip(
        got, pa.flash_attention_with_lse(q, k, v, mask_array=~hidden), strict=True
    ):
        np.testing.assert_array_equal(have, want)
    assert not got[0][0, 2, 1].any() and got[1][0, 1, 2] == -jnp.inf


@pytest.mark.by_xla
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes(rng, dtype):
    with jax.enable_x64(dtype == "float64"):
        q, k, v = (jnp.asarray(np.asarray(x), dtype) for x in qkv(rng, (1, 4, 5, 2, 1, 8, 4)))
        out, lse = pa.flash_attention_with_lse(q, k, v)
        assert out.dtype == dtype
        assert lse.dtype == ("float64" if dtype == "float64" else "float32")


def test_numbers_that_are_wider_than_a_kernels(rng):
    """Lengths past int32 are longer than everything, not what is left of their bits; float64 beside
    narrower queries is float32, and its gradient float64.
    """
    q, k, v = qkv(rng, (2, 4, 5, 2, 1, 8, 4))
    lengths = np.array([2**40, 2**32 + 1])
    wanted = pa.flash_attention(q, k, v)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    close(pa.flash_attention(q, k, v, kv_lengths=lengths), wanted)
    run = lambda q, k, v, bias, sinks, lengths: pa.flash_attention(  # noqa: E731
        q, k, v, bias=bias, sinks=sinks, kv_lengths=lengths, q_offset=lengths, mask=CAUSAL
    )
    bias, sinks = rng.standard_normal((4, 5)), rng.standard_normal(2)
    narrow = [jnp.asarray(x, jnp.float32) for x in (bias, sinks)]
    wanted = run(q, k, v, *narrow, jnp.full(2, 9, jnp.int32))
    with jax.enable_x64(True):
        close(jax.jit(run)(q, k, v, bias, sinks, lengths), wanted)
        for unsigned in (np.full(2, 2**32 - 1, np.uint32), np.full(2, 2**64 - 1, np.uint64)):
            close(jax.jit(run)(q, k, v, bias, sinks, unsigned), wanted)
        gradient = jax.grad(lambda bias: run(q, k, v, bias, sinks, lengths).sum())(bias)
        assert gradient.dtype == jnp.float64


@pytest.mark.by_xla
@pytest.mark.parametrize("value", ["default", "highest", "float32", "tensorfloat32", None])
def test_precision_is_read_as_jax_reads_it(rng, value):
    arrays = qkv(rng, (1, 4, 5, 2, 1, 8, 4))
    wanted = pa.flash_attention(*arrays)
    np.testing.assert_array_equal(pa.flash_attention(*arrays, precision=value), wanted)
    with jax.default_matmul_precision("highest"):
        np.testing.assert_array_equal(pa.flash_attention(*arrays, precision=value), wanted)


def test_precision_means_what_jax_means_by_it():
    """On a GPU "high" is TF32 there, as the default is; a name of jax's for more bits has more."""
    wanted = {name: lax.Precision(name) for name in ("default", "high", "bfloat16_3x", "highest")}
    wanted |= {precision: precision for precision in lax.Precision}
    for argument, meant in wanted.items():
        want = "highest" if meant is lax.Precision.HIGHEST else None
        assert checks.precision(argument, jnp.float32) == want
        assert checks.precision(argument, jnp.bfloat16) is None
    more = ("F32_F32_F32", "TF32_TF32_F32_X3", "BF16_BF16_F32_X3", "BF16_BF16_F32_X6")
    for name, want in {**dict.fromkeys(more, "highest"), "TF32_TF32_F32": None}.items():
        with jax.default_matmul_precision(name):
            assert checks.precision(None, jnp.float32) == want
            assert checks.precision("default", jnp.float32) is None
        for argument in (name, lax.DotAlgorithmPreset[name]):
            assert checks.precision(argument, jnp.float32) == want


def test_same_inputs_same_bits(rng):
    arrays = qkv(rng, (2, 5, 7, 4, 2, 8, 6), "bfloat16")
    run = jax.jit(lambda *arrays: pa.flash_attention_with_lse(*arrays, mask=CAUSAL))
    for first, other in zip(run(*arrays), run(*arrays), strict=True):
        np.testing.assert_array_equal(first, other)
