"""`flash_attention` on float8 q, k and v with scales, and `quantize_qkv`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn._autodiff.float8 import quantised, rounded
from pallas_attn._call import device
from pallas_attn._call.float8 import blocks_of, cuts
from pallas_attn._call.problem import rows_of_scale
from tests.support import fuzz, fuzz_float8, messages, subjects
from tests.support.float8_cases import CASES, draw
from tests.support.problems import by_name

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


@pytest.mark.parametrize("name", CASES)
def test_reference_is_the_definition(name):
    fuzz.prove(fuzz_float8.run, CASES[name], subjects.ROWS[0])


@pytest.mark.parametrize(
    "shape", [(), (4,), (1, 1, 4), (2, 1, 4), (2, 32, 1), (2, 4, 4), (1, 8, 1)]
)
def test_scales_broadcast(rng, shape):
    """A number, one a head, a row, and blocks of rows are the same scales written out."""
    q, k, v = draw(rng, batch=2, q_len=32, kv_len=32, q_heads=4, kv_heads=4, dim=16)
    scale = jnp.asarray(rng.uniform(0.5, 2, shape), jnp.float32)
    full = np.asarray(scale).reshape((1,) * (3 - scale.ndim) + scale.shape)
    full = np.repeat(full, 32 // full.shape[1], axis=1) * np.ones((2, 1, 4))
    some = dict.fromkeys(("q_scale", "k_scale", "v_scale"), scale)
    every = dict.fromkeys(some, jnp.asarray(full, jnp.float32))
    for a, b in zip(
        by_name.flash_attention_with_lse(q, k, v, **some),
        by_name.flash_attention_with_lse(q, k, v, **every),
        strict=True,
    ):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-6)


def test_rows_of_a_scale(rng):
    """Blocks of a multiple of 128 rows, whether or not so many would divide the rows; equal ones
    where there are more.
    """
    cut = {
        **{(rows, 1): rows for rows in (1, 70, 300)},
        **{(300, 2): 256, (300, 3): 128, (301, 3): 128, (384, 3): 128, (256, 2): 128},
        **{(300, 4): 75, (300, 300): 1, (32, 8): 4, (129, 2): 128, (1000, 4): 256, (0, 0): None},
        **{(600, 4): None, (301, 4): None, (32, 5): None, (300, 0): None},
    }
    for (rows, blocks), wanted in cut.items():
        assert cuts(rows, blocks) == (wanted is not None or rows == 0)
        assert wanted is None or rows_of_scale(rows, blocks) == wanted
    for rows in range(400):  # `quantize_qkv` cuts as `flash_attention` reads
        for most in (1, 5, 127, 128, 200, 256):
            blocks = blocks_of(rows, most)
            assert cuts(rows, blocks) and rows_of_scale(rows, blocks) <= most
    q, k, v = draw(rng, q_len=0)
    empty = by_name.flash_attention(q, k, v, q_scale=jnp.ones((1, 0, 2)))
    assert empty.shape == q.shape


@pytest.mark.parametrize("out_dtype", [None, "bfloat16", jnp.float16, jnp.float32])
def test_out_dtype(rng, out_dtype):
    q, k, v = draw(rng)
    out, lse = by_name.flash_attention_with_lse(q, k, v, out_dtype=out_dtype)
    assert out.dtype == jnp.dtype(out_dtype or "bfloat16") and lse.dtype == jnp.float32
    empty = by_name.flash_attention(q[:, :0], k, v, out_dtype=out_dtype)
    assert empty.dtype == out.dtype and empty.shape[1] == 0


def test_a_scale_of_nan_is_nan_and_none_is_below_the_least(rng):
    q, k, v = draw(rng)
    scale = jnp.float32(np.nan)
    assert np.isnan(np.float32(by_name.flash_attention(q, k, v, v_scale=scale))).all()
    for scale in (0.0, -1.0):
        lse = by_name.flash_attention_with_lse(q, k, v, q_scale=jnp.float32(scale))[1]
        np.testing.assert_allclose(lse, np.log(k.shape[1]), rtol=1e-6)


REFUSED = (
    lambda q, k, v: by_name.flash_attention(
        *(x.astype(jnp.bfloat16) for x in (q, k, v)), k_scale=2.0
    ),
    lambda q, k, v: by_name.flash_attention(
        *(x.astype(jnp.bfloat16) for x in (q, k, v)), out_dtype=jnp.float16
    ),
    lambda q, k, v: by_name.flash_attention(q, k, v, q_scale=jnp.ones((1, 3, 1))),
    lambda q, k, v: by_name.flash_attention(q, k, v, q_scale=jnp.ones((1, 2))),
    lambda q, k, v: by_name.flash_attention(
        q[0], k[0], v[0], q_starts=jnp.array([0, 32]), k_scale=jnp.ones((32, 1))
    ),
    lambda q, k, v: by_name.flash_attention(q, k, v, k_scale=0),
    lambda q, k, v: by_name.flash_attention(q, k, v, v_scale=np.float32(1e-35)),
    lambda q, k, v: by_name.flash_attention(q, k, v, q_scale=float("nan")),
    lambda q, k, v: by_name.flash_attention(q, k, v, v_scale=jnp.ones(1, jnp.int32)),
    lambda q, k, v: by_name.flash_attention(q, k, v, out_dtype="int8"),
    lambda q, k, v: by_name.flash_attention(q, k, v, rotary=pa.Rotary.create(64, 16)),
    lambda q, k, v: pa.quantize_qkv(*(x.astype(jnp.float32) for x in (q, k, v)), dtype=jnp.int8),
    pa.quantize_qkv,
    lambda q, k, v: pa.quantize_qkv(*(x.astype(jnp.float32) for x in (q, k, v)), rows=0),
)


def on_drawn(call):
    return call(*draw(np.random.default_rng(0)))


MESSAGES = {"float8": tuple(functools.partial(on_drawn, call) for call in REFUSED)}


@pytest.mark.parametrize("call, message", messages.cases(MESSAGES))
def test_refusals(call, message):
    messages.check(call, message)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("rows, blocks", [(128, 2), (64, 3), (None, 1), (1, 192)])
def test_quantize_qkv(rng, dtype, rows, blocks):
    """Numbers times scales are close to what was there; each block reaches the largest number."""
    x = [jnp.asarray(rng.standard_normal((2, 192, n, 16)), jnp.float32) for n in (4, 2, 2)]
    got = pa.quantize_qkv(*x, dtype=dtype, rows=rows)
    largest, eps = float(jnp.finfo(dtype).max), float(jnp.finfo(dtype).eps)
    for name, original in zip("qkv", x, strict=True):
        numbers, scale = getattr(got, name), getattr(got, f"{name}_scale")
        assert numbers.dtype == dtype and scale.shape == (2, blocks, original.shape[2])
        each = np.repeat(scale, rows or 192, axis=1)[:, :192, :, None]
        wide = np.asarray(numbers.astype(jnp.float32))
        firsts = range(0, 192, rows or 192)
        top = np.maximum.reduceat(np.abs(wide), firsts, axis=1).max(axis=-1)
        assert (top == largest).all()
        room = eps / 2 * np.abs(original) + each * float(jnp.finfo(dtype).smallest_subnormal)
        assert (np.abs(wide * each - original) <= room).all()


def test_quantize_qkv_leaves_rows_past_lengths_out(rng):
    q, k, v = (jnp.asarray(rng.standard_normal((2, 8, 1, 4)), jnp.float32) for _ in range(3))
    poisoned = [x.at[0, 5:].set(jnp.nan) for x in (q, k, v)]
    ends = jnp.array([5, 8], jnp.int32)
    got = pa.quantize_qkv(*poisoned, q_lengths=ends, kv_lengths=ends)
    wanted = pa.quantize_qkv(*(x.at[0, 5:].set(0) for x in (q, k, v)))
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.float32(a), np.float32(b))
    lost = pa.quantize_qkv(*poisoned)
    assert np.isnan(lost.k_scale[0]).all() and not np.isnan(lost.k_scale[1]).any()


def test_under_vmap_and_packed(rng):
    """vmap over a batch axis and packed rows are the calls that they stand for."""
    q, k, v = draw(rng, batch=2)
    scale = jnp.asarray(rng.uniform(0.5, 2, (2, 32, 1)), jnp.float32)
    whole = by_name.flash_attention(q, k, v, k_scale=scale)

    def of_row(q, k, v, scale):
        return by_name.flash_attention(q[None], k[None], v[None], k_scale=scale[None])[0]

    mapped = jax.vmap(of_row)(q, k, v, scale)
    np.testing.assert_array_equal(np.float32(mapped), np.float32(whole))
    starts = jnp.array([0, 32], jnp.int32)
    for row in range(2):
        rows, of_row = (x[row] for x in (q, k, v)), scale[row, None]
        packed = by_name.flash_attention(*rows, q_starts=starts, k_scale=of_row)
        np.testing.assert_array_equal(np.float32(packed), np.float32(whole[row]))


def test_training_is_16_bit_attention_on_rounded_numbers(rng):
    """Results and gradients of `float8=True`, by the reference; numbers that float8 holds stay."""
    x = [jnp.asarray(rng.standard_normal((2, 48, n, 16)), jnp.bfloat16) for n in (4, 2, 2)]
    kept = [rounded(rows) for rows in x]
    for rows, once in zip(x, kept, strict=True):
        np.testing.assert_array_equal(np.float32(rounded(once)), np.float32(once))
        assert (
            np.abs(np.float32(once) - np.float32(rows)).max() <= np.abs(np.float32(rows)).max() / 16
        )
        numbers, scale = quantised(once)
        wide = numbers.astype(jnp.float32) * np.repeat(scale, 48, axis=1)[..., None]
        np.testing.assert_array_equal(np.float32(once), np.asarray(wide))

    def loss(x, **options):
        return by_name.flash_attention(*x, mask=pa.CAUSAL, **options).astype(jnp.float32).sum()

    value, gradients = jax.value_and_grad(lambda x: loss(x, float8=True))(x)
    wanted, expected = jax.value_and_grad(loss)(kept)
    np.testing.assert_array_equal(value, wanted)
    for a, b in zip(gradients, expected, strict=True):
        np.testing.assert_array_equal(np.float32(a), np.float32(b))


def test_training_refuses_by_name(rng):
    q, k, v = draw(rng)
    with pytest.raises(ValueError, match="float8: expected bfloat16 or float16 q, k and v, got"):
        by_name.flash_attention(q, k, v, float8=True)
    wide = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    with pytest.raises(ValueError, match="precision: expected one of .*, got 'nonsense'"):
        by_name.flash_attention(q, k, v, precision="nonsense")
    with pytest.raises(ValueError, match="float8: expected True or False, got 1"):
        by_name.flash_attention(*wide, float8=1)
    with device.assume("sm80"), pytest.raises(pa.UnsupportedError, match="float8_e4m3fn"):
        jax.eval_shape(lambda: by_name.flash_attention(*wide, float8=True))
    with device.assume("sm90"), pytest.raises(pa.UnsupportedError, match="with float8=True"):
        jax.eval_shape(
            jax.grad(lambda v: by_name.flash_attention(q, k, v).astype(jnp.float32).sum()), v
        )


@pytest.mark.parametrize("dim", [64, 60])
def test_training_lowers_in_jit(dim):
    """Head dims that are no multiple of 8 are padded."""
    x = jax.ShapeDtypeStruct((1, 64, 2, dim), jnp.bfloat16)
    loss = lambda *x: pa.flash_attention(*x, float8=True).astype(jnp.float32).sum()  # noqa: E731
    with device.assume("sm90"):
        lowered = jax.jit(jax.grad(loss)).trace(x, x, x).lower(lowering_platforms=("cuda",))
    assert lowered.out_info.shape == x.shape


@pytest.mark.parametrize("rows, keys", [(0, 4), (4, 0)])
def test_training_on_nothing(rows, keys):
    q, k = jnp.ones((1, rows, 2, 64), jnp.bfloat16), jnp.ones((1, keys, 2, 64), jnp.bfloat16)
    out = by_name.flash_attention(q, k, k, float8=True)
    assert out.shape == q.shape and not out.any()


@pytest.mark.parametrize("exponent", [-140, -100, -20, 0, 15, 120])
def test_scales_of_training_are_powers_of_2(exponent):
    x = jnp.float32(1.75 * 2.0**exponent).reshape(1, 1, 1, 1)
    scale = float(quantised(x)[1][0, 0, 0])
    assert scale == 2.0 ** np.frexp(max(float(x[0, 0, 0, 0]), 2.0**-100) / 448)[1]


@pytest.mark.guards
def test_training_by_kernels(rng):
    """The forward kernel in float8 and the backward in 16 bits, interpreted."""
    hopper = next(row for row in subjects.ROWS if row.name == "interpreted")
    x = [jnp.asarray(rng.standard_normal((1, 64, n, 64)), jnp.bfloat16) for n in (2, 1, 1)]

    def both(q, k, v, implementation):
        def loss(x):
            out = by_name.flash_attention(*x, float8=True, implementation=implementation)
            return out.astype(jnp.float32).sum()

        return jax.value_and_grad(loss)((q, k, v))

    got, wanted = (
        subject.call(both, **dict(zip("qkv", x, strict=True)))
        for subject in (hopper, subjects.ROWS[0])
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        a, b = np.float32(a), np.float32(b)
        assert np.abs(a - b).max() <= 0.1 * np.abs(b).max() + 0.1
