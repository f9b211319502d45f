"""Masks and scores as functions: against dense arrays, by the reference; what is static about them,
and what they refuse.
"""

import contextlib
import dataclasses
import fractions
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn._autodiff import by_rows
from pallas_attn._call import device, dispatch
from pallas_attn._functions import program as _program
from pallas_attn._functions import tracing
from pallas_attn._libraries import masks
from pallas_attn.kernels.attention import linear_scores
from tests.parallel.test_kernels_batched_and_sharded import (
    BackwardInPlaceOfAKernel,
    InPlaceOfAKernel,
)
from tests.support import in_numpy, messages

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

B, T, S, N, K, H = 2, 13, 17, 4, 2, 8
rng = np.random.default_rng(5)


def operands(dtype="float32"):
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def attended(*qkv, **options):
    return in_numpy.call(functools.partial(pa.flash_attention, **options), *qkv)


def random_mask(draw, depth=3):
    """A mask of random parts, with its value at arrays of positions."""
    if depth == 0:
        a, b, c = (int(x) for x in draw.integers(1, 9, 3))
        ids = draw.integers(0, 3, (B, S + 9)).astype(np.int32)
        table = draw.integers(0, 2, (N, S)).astype(bool)
        return [
            lambda: pa.mask_fn(lambda b_, h, q, kv: (q // a + kv) % (b + 1) < c // 2),
            lambda: pa.mask_fn(lambda b_, h, q, kv, i: i[b_, q] == i[b_, kv], ids),
            lambda: pa.mask_fn(lambda b_, h, q, kv, t: t[h, jnp.clip(q - kv, 0, S - 1)], table),
            lambda: pa.mask_fn(lambda b_, h, q, kv: (h + b_ + q * a) % 3 != kv % 2),
            lambda: pa.Mask(a, b),
        ][draw.integers(5)]()
    first, other = random_mask(draw, depth - 1), random_mask(draw, depth - 1)
    return [lambda: first & other, lambda: first | other, lambda: ~first][draw.integers(3)]()


def dense(mask, q_offset=0):
    if isinstance(mask, pa.Mask):
        return np.broadcast_to(mask.dense(T, S, q_offset=q_offset), (B, N, T, S))
    return mask.dense(T, S, q_offset=q_offset, batch=B, heads=N)


@pytest.mark.parametrize("seed", range(8))
def test_random_masks_are_their_dense_arrays(seed):
    mask = random_mask(np.random.default_rng(seed))
    q, k, v = operands()
    offset = [0, 5][seed % 2]
    ids = rng.integers(0, 2, (B, S)).astype(np.int32)
    segments = {"segment_ids": (ids[:, :T], ids)} if seed % 3 == 0 else {}
    want = attended(q, k, v, mask_array=dense(mask, offset), q_offset=offset, **segments)
    got = attended(q, k, v, mask=mask, q_offset=offset, **segments)
    np.testing.assert_array_equal(got, want)
    offsets = jnp.full(B, offset)
    got = attended(q, k, v, mask=mask, q_offset=offsets, **segments)
    np.testing.assert_array_equal(got, want)


def test_arrays_made_inside_are_those_of_jax():
    """Constants without an input, tables of them, and a few numbers side by side."""
    few = np.array([3, 5, 9])
    functions = [
        lambda b, h, q, kv: jnp.isin(kv, jnp.arange(3)),
        lambda b, h, q, kv: jnp.isin(kv, few) | (q == kv),
        lambda b, h, q, kv: (kv == jnp.array([3, 5, 9])).any() & (q > jnp.array([2, 4])).all(),
        lambda b, h, q, kv: jnp.stack([q > kv, q > 3]).all(),
        lambda b, h, q, kv: jnp.arange(0, 99, 3)[kv] > q,
        lambda b, h, q, kv: jnp.tril(jnp.ones((S, S), bool), -2)[q, kv],
        lambda b, h, q, kv: jnp.array([[q, kv], [h, b]]).sum() % 3 == 0,
    ]
    at = [x.astype(np.int32).ravel() for x in np.indices((B, N, T, S))]
    for f in functions:
        want = jax.vmap(f)(*at).reshape(B, N, T, S)
        np.testing.assert_array_equal(dense(pa.mask_fn(f)), want)


EVEN = pa.mask_fn(lambda b, h, q, kv: (q + kv) % 2 == 0)
EVERYTHING = {
    "or full": lambda: EVEN | pa.FULL,
    "modulo 1": lambda: pa.mask_fn(lambda b, h, q, kv: q % 1 == 0),
    "difference": lambda: pa.mask_fn(lambda b, h, q, kv: (q + kv) - kv <= q),
    "product": lambda: pa.mask_fn(lambda b, h, q, kv: (q * 0 == 0) & (kv // 1 == kv)),
    "keys": lambda: pa.mask_fn(lambda b, h, q, kv: kv >= 0),
    "either": lambda: EVEN | ~EVEN,
    "chosen": lambda: pa.mask_fn(lambda b, h, q, kv: jnp.where(q == kv, q, kv) == kv),
    "not hidden": lambda: ~(EVEN & ~pa.FULL),
}


@pytest.mark.parametrize("name", EVERYTHING)
def test_a_mask_that_shows_everything_is_full(name):
    """It calls the kernels that have no function; its complement reads no array and no position."""
    mask = EVERYTHING[name]()
    assert mask.is_full and not mask.program.operations
    assert (~mask).program == pa.mask_fn(lambda b, h, q, kv: False).program
    asked = []
    q, k, v = operands()

    def select(problem, _):
        asked.append(problem)
        raise StopIteration

    with pytest.MonkeyPatch.context() as changed, contextlib.suppress(StopIteration):
        changed.setattr(dispatch, "select", select)
        pa.flash_attention(q, k, v, mask=mask)
    assert asked[0].mask_program is None and asked[0].mask == pa.FULL


def test_shorter_programs_compute_the_same():
    """Integers at which arithmetic wraps; floats, whose NaN and signed zeros are not shortened."""
    functions = [
        lambda x, y: (x - y) + y + ((x + y) - x) * 7 + ((x - y) - x) * 11 + (x - (x - y)) * 13,
        lambda x, y: (x ^ (x ^ y)) + (x & ~x) * 3 + (x | ~x) * 5 + (x ^ ~x) * 17 + (x << 0),
        lambda x, y: jnp.where(x == y, x, y) + jnp.where(x != y, x, y) * 3 + (x | 0) + (y & -1),
        lambda x, y: jnp.maximum(x, -(2**31)) + jnp.minimum(y, 2**31 - 1) * 3 + x % 1 + y // 1,
        lambda x, y: jax.lax.integer_pow(x, 0) + jax.lax.integer_pow(y, 1) * 5 + x * 1 + y * 0,
        lambda x, y: jnp.where((x <= x) & ~(y < y) & (x > y), x, y) + jnp.maximum(x, x),
    ]
    numbers = [-(2**31), -(2**31) + 1, -7, -1, 0, 1, 3, 2**31 - 1]
    x, y = (
        jnp.asarray(side, "int32") for side in np.array([*itertools.product(numbers, repeat=2)]).T
    )
    for f in functions:
        program, _ = tracing.trace("f", f, ("int32",) * 2, ())
        got = _program.evaluate(program, (x, y), (), _program.Broadcasting())
        np.testing.assert_array_equal(got, f(x, y))
    x = jnp.asarray([np.nan, -0.0, 0.0, np.inf, 1.5], "float32")
    for f in (lambda x: x - x, lambda x: x * 0, lambda x: x + 0.0, lambda x: jnp.float32(x == x)):
        program, _ = tracing.trace("f", f, ("float32",), ())
        got = _program.evaluate(program, (x,), (), _program.Broadcasting())
        np.testing.assert_array_equal(got, f(x))
        np.testing.assert_array_equal(np.signbit(got), np.signbit(f(x)))


def test_masks_combine_as_sets_of_keys():
    window, even = pa.sliding_window(3), pa.mask_fn(lambda b, h, q, kv: kv % 2 == 0)
    for combined, want in (
        (window & even, dense(window) & dense(even)),
        (even | pa.CAUSAL, dense(even) | dense(pa.CAUSAL)),
        (~pa.CAUSAL, ~dense(pa.CAUSAL)),
        (pa.CAUSAL | pa.Mask(0, 2), dense(pa.CAUSAL) | dense(pa.Mask(0, 2))),
        (~even & pa.FULL, ~dense(even)),
    ):
        np.testing.assert_array_equal(dense(combined), want)


def test_what_nobody_sees_gives_zeros():
    q, k, v = operands()
    nothing = pa.mask_fn(lambda b, h, q, kv: q < 0)
    out, lse = pa.flash_attention_with_lse(q, k, v, mask=nothing)
    assert not out.any() and (lse == -jnp.inf).all()


def alibi_with_a_table(slopes, table):
    def score(s, b, h, q, kv, slopes, table):
        near = jnp.clip(q - kv + 8, 0, 15)
        return 9 * jnp.tanh((s - slopes[h] * (q - kv)) / 9) + table[h, near]

    return pa.score_fn(score, slopes, table)


def test_scores_and_their_gradients():
    q, k, v = operands()
    slopes = jnp.asarray(rng.standard_normal(N), jnp.float32)
    table = jnp.asarray(rng.standard_normal((N, 16)), jnp.float32)

    def ours(q, k, slopes, table):
        score = alibi_with_a_table(slopes, table)
        return (pa.flash_attention(q, k, v, score=score, mask=pa.CAUSAL) ** 2).sum()

    def written_out(q, k, slopes, table):
        distance = (jnp.arange(T)[:, None] - jnp.arange(S)[None])[None]
        logits = jnp.einsum("btkgh,bskh->bkgts", q.reshape(B, T, K, N // K, H), k)
        logits = logits.reshape(B, N, T, S) * H**-0.5 - slopes[:, None, None] * distance.astype(
            "float32"
        )
        logits = 9 * jnp.tanh(logits / 9) + table[:, jnp.clip(distance[0] + 8, 0, 15)]
        probs = jax.nn.softmax(jnp.where(distance >= 0, logits, -jnp.inf))
        probs = probs.reshape(B, K, N // K, T, S)
        return (jnp.einsum("bkgts,bskh->btkgh", probs, v) ** 2).sum()

    arguments = q, k, slopes, table
    with jax.default_matmul_precision("highest"), jax.numpy_rank_promotion("allow"):
        wanted = in_numpy.call(jax.grad(written_out, range(4)), *arguments)
    result = in_numpy.call(jax.grad(ours, range(4)), *arguments)
    for got, want in zip(result, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


LINEAR = {
    "alibi": lambda s, b, h, q, kv, m: s - m[h] * (q - kv),
    "key alone": lambda s, b, h, q, kv, m: s - m[h] * kv,
    "of a difference": lambda s, b, h, q, kv, m: m[h] * (7 - kv) + s,
    "negated": lambda s, b, h, q, kv, m: s + -(m[h] * (kv - q)) - 0.5 * q,
    "two slopes": lambda s, b, h, q, kv, m: m[h] * kv + s - m[q] * kv - m[b],
    "row alone": lambda s, b, h, q, kv, m: s + m[h] * (q + b),
}
OTHER = {
    "scaled": lambda s, b, h, q, kv, m: 2 * s + m[h] * kv,
    "taken away": lambda s, b, h, q, kv, m: m[h] * kv - s,
    "twice": lambda s, b, h, q, kv, m: s + s,
    "square": lambda s, b, h, q, kv, m: s + m[h] * kv * kv,
    "read": lambda s, b, h, q, kv, m: s + m[kv],
    "rounded": lambda s, b, h, q, kv, m: s + (0.3 * kv).astype(jnp.int32),
    "may wrap": lambda s, b, h, q, kv, m: s + kv * 2**20,
    "chosen": lambda s, b, h, q, kv, m: jnp.where(kv > 4, s, m[h]),
    "without a score": lambda s, b, h, q, kv, m: m[h] * kv,
}


def test_scores_that_are_a_slope_and_an_offset_a_row():
    """Hopper's forward recognises them, with the function's values, and recognises no others."""
    table = np.linspace(-1, 2, 16, dtype=np.float32)
    row, first = (np.int32(1), np.int32(2), np.int32(9)), np.int32(64)
    column, s = np.arange(16, dtype=np.int32), np.float32(0.25)
    for name, f in LINEAR.items():
        program = pa.score_fn(f, table).program
        assert linear_scores.is_linear(program), name
        values, arrays = _program.Broadcasting(), (jnp.asarray(table),)
        result = linear_scores.evaluated(program, (*row, first), arrays, values)
        slope = np.asarray(0 if result.slope is None else result.slope)
        got = np.asarray(result.rest) + slope * column + s
        want = _program.evaluate(program, (s, *row, first + column), arrays, values)
        np.testing.assert_allclose(got, np.asarray(want), rtol=1e-5, err_msg=name)
    for name, f in OTHER.items():
        assert not linear_scores.is_linear(pa.score_fn(f, table).program), name


def test_the_derivative_of_a_program_is_one():
    score = alibi_with_a_table(jnp.arange(4.0), jnp.ones((4, 16)))
    slope = tracing.derivative(score.program)
    assert slope.inputs == 5 and len(slope.arrays) == 1  # the table is gone
    aux = tracing.derivative_arrays(score.program, score.aux)
    values = jnp.float32(1.5), 0, 2, jnp.int32(7), jnp.int32(3)
    got = _program.evaluate(slope, values, aux, _program.Broadcasting())
    assert got == pytest.approx(1 - np.tanh((1.5 - 2 * 4) / 9) ** 2, rel=1e-5)


SLOPES = {
    "log": lambda s, b, h, q, kv: s * jnp.log(q + 2.0) + jnp.log(s * s + 1),
    "log2": lambda s, b, h, q, kv: jnp.log2(s * s + 1) * jnp.log2(q + 2.0),
    "exp": lambda s, b, h, q, kv: jnp.exp(s) + jnp.exp2(s * 0.5) + jax.nn.sigmoid(s),
    "roots": lambda s, b, h, q, kv: jnp.sqrt(s * s + 1) + jax.lax.rsqrt(s * s + 2) + s**3 + s**-2,
    "ends": lambda s, b, h, q, kv: (
        jnp.clip(s, -2, 2) * jnp.abs(s) + jnp.maximum(s, 0) * jnp.sign(s)
    ),
    "chosen": lambda s, b, h, q, kv: jnp.where(q > kv, s, -jnp.inf) + jnp.square(s) / (q + 1),
    "beside": lambda s, b, h, q, kv: (s * jnp.array([1.0, 2.0, 3.0])).sum(),
}


@pytest.mark.parametrize("name", SLOPES)
def test_derivatives_are_those_of_jax(name):
    f, at = SLOPES[name], (0, 2, jnp.int32(7), jnp.int32(3))
    slope = tracing.derivative(pa.score_fn(f).program)
    for s in (0.5, -1.5, 2.5):
        got = _program.evaluate(slope, (jnp.float32(s), *at), (), _program.Broadcasting())
        with jax.numpy_dtype_promotion("standard"):
            want = float(jax.grad(f)(jnp.float32(s), *at))
        assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.by_xla
def test_jit_goes_by_what_functions_compute():
    q, k, v = operands()
    attend = jax.jit(lambda mask: pa.flash_attention(q, k, v, mask=mask))
    for n in (3, 5, 3):
        want = pa.flash_attention(q, k, v, mask_array=np.arange(S) < n)
        got = attend(pa.mask_fn(lambda b, h, q, kv, n=n: kv < n))
        np.testing.assert_allclose(got, want, atol=1e-6)
    assert attend._cache_size() == 2
    for n in (3, 5):
        attend(pa.mask_fn(lambda b, h, q, kv, n: kv < n[b], jnp.full(B, n)))
    assert attend._cache_size() == 3
    assert pa.score_fn(lambda s, *_: s + 0.1).program != (
        pa.score_fn(lambda s, *_: s + np.nextafter(np.float32(0.1), 1)).program
    )


def test_vmap_scan_and_remat():
    q, k, v = operands()
    limits = jnp.asarray([3, 9])

    def attend(n, q):
        mask = pa.mask_fn(lambda b, h, q, kv, n: kv < n, n) & pa.CAUSAL
        return pa.flash_attention(q, k, v, mask=mask)

    want = [attend(n, q) for n in limits]
    np.testing.assert_allclose(jax.vmap(attend, (0, None))(limits, q), want, atol=1e-6)
    got = jax.lax.scan(lambda _, n: (None, attend(n, q)), None, limits)[1]
    np.testing.assert_allclose(got, want, atol=1e-6)
    loss = lambda f: jax.grad(lambda q: (f(limits[0], q) ** 2).sum())  # noqa: E731
    np.testing.assert_allclose(loss(jax.checkpoint(attend))(q), loss(attend)(q), atol=1e-6)


IDS = np.zeros((2, 5), np.int32)
ERRORS = (
    lambda: pa.mask_fn(5),
    lambda: pa.mask_fn(lambda b, h, q, kv: jnp.floor(q / 2) > kv),
    lambda: pa.mask_fn(lambda b, h, q, kv, ids: ids[b].sum() > kv, IDS),
    lambda: pa.mask_fn(lambda b, h, q, kv: q - kv),
    lambda: pa.mask_fn(lambda b, h, q, kv, ids: ids[b] == kv, IDS),
    lambda: pa.mask_fn(lambda b, h, q, kv, x: x[q] > kv, np.zeros(0, "float32")),
    lambda: pa.mask_fn(lambda b, h, q, kv, x: x[q] == 1, np.zeros(2, "complex64")),
    lambda: pa.mask_fn(lambda b, h, q, kv: (q * kv).astype(jnp.int8) > 0),
    lambda: pa.mask_fn(lambda b, h, q, kv, x: q > kv, "abc"),
    lambda: jax.jit(lambda x: pa.mask_fn(lambda b, h, q, kv: q < x).aux)(jnp.float32(1)),
    lambda: pa.mask_fn(lambda b, h, q, kv: q >= kv and kv > 3),
    lambda: pa.score_fn(lambda s, b, h, q, kv: s + math.sqrt(q)),
    lambda: pa.mask_fn(lambda b, h, q, kv: np.logical_and(q > kv, q < 3)),
    lambda: pa.mask_fn(lambda b, h, q, kv: [True, False][h]),
    lambda: pa.mask_fn(lambda b, h, q, kv: q < 2**40),
    lambda: pa.mask_fn(lambda q, kv: q >= kv),
    lambda: pa.score_fn(lambda s, b, h, q, kv: s, np.ones(2)),
    lambda: pa.mask_fn(lambda b, h, q, kv: None),
    lambda: pa.mask_fn(lambda b, h, q, kv: (jax.debug.print("{}", q), q > kv)[1]),
    lambda: pa.mask_fn(lambda b, h, q, kv: (q * 1j).real > kv),
    lambda: pa.mask_fn(lambda b, h, q, kv: (kv == jnp.arange(1000)).any()),
    lambda: pa.mask_fn(lambda b, h, q, kv, ids: jnp.isin(kv, ids[0]), IDS),
    lambda: pa.ScoreFunction(lambda s, b, h, q, kv: s),
    lambda: pa.MaskFunction(lambda b, h, q, kv: q > kv),
    lambda: EVEN.blocks("8", 8),
    lambda: EVEN.blocks(8, 8, heads=0),
    lambda: EVEN.dense(8, 8.5),
    lambda: pa.CAUSAL.dense(8, 8, q_offset=None),
    lambda: pa.mask_fn(fractions.Fraction),
    lambda: pa.score_fn(lambda s, b, h, q, kv: q > kv),
)


MESSAGES = {"functions": ERRORS}


@pytest.mark.parametrize("call, message", messages.cases(MESSAGES))
def test_wrong_functions(call, message):
    messages.check(call, message)


@pytest.mark.parametrize("sizes", [(0, S, B), (T, 0, B), (T, S, 0)])
def test_no_rows_beside_segment_ids(sizes):
    """Nothing is seen; the ids are no arrays that a function could read."""
    rows, keys, batch = sizes
    q, k, v = operands()
    ids = jnp.zeros((batch, rows), jnp.int32), jnp.zeros((batch, keys), jnp.int32)
    out, lse = pa.flash_attention_with_lse(
        q[:batch, :rows], k[:batch, :keys], v[:batch, :keys], mask=EVEN, segment_ids=ids
    )
    assert out.shape == (batch, rows, N, H) and not out.any() and (lse == -jnp.inf).all()


READS = {  # a function, and a part of the message of jax
    "float": (lambda s, b, h, q, kv, x: s + x[q / 2, 0], "float32"),
    "number": (lambda s, b, h, q, kv, x: s + x[1.5, 0], "float"),
    "many": (lambda s, b, h, q, kv, x: s + x[b, h, q], "Too many indices"),
    "bool": (lambda s, b, h, q, kv, x: s + x[q > kv, 0], "boolean"),
    "slice": (lambda s, b, h, q, kv, x: s + x[q : q + 1].sum(), "slice"),
}


@pytest.mark.parametrize("name", READS)
def test_reads_that_jax_refuses(name):
    function, part = READS[name]
    with pytest.raises(ValueError) as caught:
        pa.score_fn(function, jnp.ones((2, 3)))
    begin = "score_fn: <lambda>(s, b, h, q, kv, x) reads an array in a way that jax refuses ("
    end = "); arrays are read at int32 scalars, one an axis: aux[h, q - kv], "
    end += "aux[x.astype(jnp.int32)]"
    message = str(caught.value)
    assert message.startswith(begin) and message.endswith(end) and part in message
    with pytest.raises(TypeError, match="unsupported operand"):  # the function's own
        pa.score_fn(lambda s, b, h, q, kv: s + "1")


def test_python_does_not_combine_masks_and_scores():
    """`and` would give the second one alone, `or` the first, `not` False."""
    for mask in (EVEN, pa.CAUSAL, pa.FULL, masks.SparseMask((4, 4), pa.CAUSAL)):
        for combine in (lambda m: m and EVEN, lambda m: m or EVEN, lambda m: not m):
            with pytest.raises(ValueError) as caught:
                combine(mask)
            assert str(caught.value) == (
                "mask: a mask is neither true nor false; say &, | and ~ for and, or and not"
            )
    score = pa.score_fn(lambda s, b, h, q, kv: -s)
    with pytest.raises(ValueError) as caught:
        bool(score and score)
    assert str(caught.value) == (
        "score: a score function is neither true nor false; write one function that does the work "
        "of both"
    )


PAIRS = {
    "int32": list(itertools.product((-7, 3, 0, 12), repeat=2)),
    "float32": list(itertools.product((-2.5, 0.3, 1.7, 3.0), repeat=2)),
}


@pytest.mark.by_xla
def test_operations_have_jax_meaning():
    """Each operation of the table computes what jax computes."""
    functions = {
        "int32": [
            lambda x, y: (x // 3) * 100 + x % 5 + jnp.sign(x) + abs(x) + (-y),
            lambda x, y: ((x << 2) ^ (y >> 1)) | (x & 6) + jnp.clip(y, -2, 2) + ~x,
            lambda x, y: jnp.where((x > y) & ~(x == 3) | (y != 0), x, jnp.minimum(x, y)) ** 2,
        ],
        "float32": [
            lambda x, y: jnp.exp(x) + jnp.log(y * y + 1) + jnp.tanh(x) + jax.nn.sigmoid(y),
            lambda x, y: jnp.sqrt(x * x) / (y**2 + 1) + jax.lax.rsqrt(y * y + 1) + x**3 + y**-2,
            lambda x, y: jnp.maximum(x, y) - jnp.exp2(x) + jnp.abs(y) + jnp.sign(x) + jnp.square(y),
        ],
    }
    for dtype, some in functions.items():
        x, y = (jnp.asarray(side, dtype) for side in zip(*PAIRS[dtype], strict=True))
        for f in some:
            program, _ = tracing.trace("f", f, (dtype,) * 2, ())
            got = _program.evaluate(program, (x, y), (), _program.Broadcasting())
            np.testing.assert_allclose(got, f(x, y), rtol=1e-5, atol=1e-5)


def test_reads_from_the_end_and_past_it():
    """Indices below 0 count from the end, as NumPy's; what is still outside is clipped."""
    numbers, at = np.arange(5, dtype=np.int32), np.arange(-9, 9)
    mask = pa.mask_fn(lambda b, h, q, kv, x: x[q - 9] == kv, numbers)
    index = np.clip(np.where(at < 0, at + 5, at), 0, 4)
    want = numbers[index][:, None] == np.arange(5)
    np.testing.assert_array_equal(mask.dense(18, 5)[0, 0], want)
    q, k = np.zeros((1, 18, 1, 8), np.float32), np.zeros((1, 5, 1, 8), np.float32)
    v = np.eye(8, dtype=np.float32)[None, :5, None]
    got = pa.flash_attention(q, k, v, mask=mask)
    np.testing.assert_array_equal(np.asarray(got)[0, :, 0, :5] > 0, want)


def read_at(name, *shape):
    """A mask and a score that read an array at one of their numbers."""
    x = np.zeros(shape, np.int32)
    at = "bhqkv".index
    mask = pa.mask_fn(lambda *where: where[-1][where[min(at(name), 3)]] == 0, x)
    return mask, pa.score_fn(lambda s, *where: s + where[-1][where[min(at(name), 3)]], x)


@pytest.mark.parametrize("name, size", [("b", 2), ("h", 4), ("q", 8), ("k", 7)])
def test_arrays_that_end_before_the_axis_that_reads_them(name, size):
    q, k = np.zeros((2, 5, 4, 8), np.float32), np.zeros((2, 7, 2, 8), np.float32)
    full = {"kv": size} if name == "k" else {name: size}
    (full_name,) = full
    for argument, of_size, shorter in zip(
        ("mask", "score"), read_at(name, size), read_at(name, size - 1), strict=True
    ):
        pa.flash_attention(q, k, k, q_offset=3, **{argument: of_size})
        with pytest.raises(ValueError) as caught:
            pa.flash_attention(q, k, k, q_offset=3, **{argument: shorter})
        assert str(caught.value) == (
            f"{argument}: expected what the function reads at {full_name} to have {size} numbers "
            f"there, one for each {full_name}, got shape [{size - 1}], whose axis 0 has "
            f"{size - 1}; give it whole, or read it at jnp.minimum({full_name}, {size - 2})"
        )
    few = np.zeros(3, np.int32)
    for clipped in (
        pa.mask_fn(lambda b, h, q, kv, x: x[jnp.minimum(q, 2)] == 0, few),
        pa.mask_fn(lambda b, h, q, kv, x: x[jnp.where(q > 2, 2, q)] == 0, few),
        pa.mask_fn(lambda b, h, q, kv, x: x[q // 4] == 0, few),
    ):
        pa.flash_attention(q, k, k, q_offset=3, mask=clipped)


def test_over_a_cache_heads_and_sequences_are_known():
    cache = pa.StackedCache.create(2, 6, 2, 8, dtype="float32").extend(1)
    q = np.zeros((2, 1, 4, 8), np.float32)
    for name, size in (("b", 2), ("h", 4)):
        pa.decode_attention(q, cache, mask=read_at(name, size)[0])
        with pytest.raises(ValueError, match=f"reads at {name} to have {size} numbers there"):
            pa.decode_attention(q, cache, mask=read_at(name, size - 1)[0])
    pa.decode_attention(q, cache, mask=read_at("k", 1)[0])


@pytest.mark.by_xla
def test_integers_of_64_bits():
    """Refused as aux where int32 does not hold them, compared by all bits as segment ids."""
    wide = np.array([[1, 1, 2**32 + 1, 2**32 + 1, -(2**40), 1]])
    said = (
        "mask_fn: aux: expected integers that int32 holds, got int64[1, 6] as number 0, from "
        "-1099511627776 to 4294967297; np.unique(x, return_inverse=True)[1] are smaller ones that "
        "are equal where these are"
    )
    with pytest.raises(ValueError) as caught:
        pa.mask_fn(lambda b, h, q, kv, i: i[b, q] == i[b, kv], wide)
    assert str(caught.value) == said
    with pytest.raises(ValueError, match="aux: expected arrays, got list"):
        pa.mask_fn(lambda b, h, q, kv, i: i[b, q] == i[b, kv], [[2**70]])
    assert pa.mask_fn(lambda b, h, q, kv, i: i[q] == kv, wide[0, :2]).aux[0].dtype == jnp.int32
    q = np.zeros((1, 6, 1, 8), np.float32)
    v = np.eye(8, dtype=np.float32)[None, :6, None]

    def seen(*ids):
        ids = ids[0] if len(ids) == 1 else ids
        return np.asarray(pa.flash_attention(q, q, v, segment_ids=ids))[0, :, 0, :6] > 0

    want = wide[0][:, None] == wide[0][None]
    shifted = wide[:, ::-1].copy()
    of_pair = wide[0][:, None] == shifted[0][None]
    np.testing.assert_array_equal(seen(wide), want)
    np.testing.assert_array_equal(seen(wide, shifted), of_pair)
    np.testing.assert_array_equal(seen(wide.view(np.uint64)), want)
    np.testing.assert_array_equal(seen(wide % 2**31), (wide[0] % 2**31)[:, None] == wide[0] % 2**31)
    with jax.enable_x64(True):
        for ids in (wide, wide % 7):
            equal, ids = ids[0][:, None] == ids[0][None], jnp.asarray(ids.copy())
            for call in (seen, lambda *ids: np.asarray(jax.jit(attend_ids)(*ids))[0, :, 0, :6] > 0):
                np.testing.assert_array_equal(call(ids), equal)
        both = (jnp.asarray(x.copy()) for x in (wide, shifted))
        np.testing.assert_array_equal(seen(*both), of_pair)


def attend_ids(ids):
    q = jnp.zeros((1, 6, 1, 8), jnp.float32)
    v = jnp.eye(8, dtype=jnp.float32)[None, :6, None]
    return pa.flash_attention(q, q, v, segment_ids=ids)


def test_kernels_refuse_arrays_that_they_cannot_count():
    q = jax.ShapeDtypeStruct((1, 16, 4, 64), jnp.bfloat16)
    seen = pa.mask_fn(lambda b, h, q, kv, t: t[h, q, kv] != 0, np.ones((4, 16, 16), np.int8))
    arrays = (((4, 2**15, 2**14), "int32"),)
    large = dataclasses.replace(seen.program, arrays=arrays)
    aux = (jax.ShapeDtypeStruct(arrays[0][0], jnp.int32),)
    with device.assume("sm90"), pytest.raises(pa.UnsupportedError, match="reads in 32 bits"):
        attend = lambda q, mask: pa.flash_attention(q, q, q, mask=mask)  # noqa: E731
        jax.eval_shape(attend, q, pa.MaskFunction(large, aux))


def test_kernels_derive_functions_and_a_bias_beside_them():
    q, slopes = jnp.zeros((2, 16, 4, 64), jnp.bfloat16), jnp.ones(4)

    def attend(q, slopes, bias=None, **options):
        score = pa.score_fn(lambda s, b, h, q, kv, m: s - m[h] * (q - kv), slopes)
        out = pa.flash_attention(q, q, q, score=score, bias=bias, **options)
        return out.astype(jnp.float32).sum()

    bias = jnp.zeros((1, 4, 16, 16))
    with device.assume("sm90"):
        assert jax.eval_shape(jax.grad(attend), q, slopes).shape == q.shape
        assert jax.eval_shape(jax.grad(attend, 1), q, slopes).shape == slopes.shape
        assert jax.eval_shape(jax.grad(attend, 2), q, slopes, bias).shape == bias.shape


@pytest.mark.by_xla
def test_gradients_of_16_bits_are_summed_in_float32():
    """The reference adds up what many logits give a number."""
    draw = np.random.default_rng(0)
    q, k, v = (jnp.asarray(draw.standard_normal((1, 512, 2, 8)), jnp.float32) for _ in range(3))
    table = jnp.asarray(draw.standard_normal(4), jnp.bfloat16)

    def loss(table):
        score = pa.score_fn(lambda s, b, h, q, kv, t: s + t[kv % 4], table)
        out = pa.flash_attention(q, k, v, score=score, implementation="reference")
        return (out * v).sum()

    want = jax.grad(loss)(table.astype(jnp.float32))
    got = jax.grad(loss)(table)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=2**-8)


@pytest.mark.by_xla
@pytest.mark.parametrize("facts", [{}, {"q_lengths": (9, 13), "bias": True, "q_offset": (3, 0)}])
def test_gradients_of_what_a_score_reads(monkeypatch, facts):
    """Slab by slab, and of bfloat16 summed in float32, beside those of the reference as a whole."""
    q, k, v = operands()
    options = {"mask": pa.CAUSAL}
    if facts:
        options["q_lengths"] = np.array(facts["q_lengths"], np.int32)
        options["q_offset"] = np.array(facts["q_offset"], np.int32)
        options["bias"] = jnp.asarray(rng.standard_normal((1, N, T, S)), jnp.float32)
    slopes = jnp.asarray(rng.standard_normal(N), jnp.float32)
    table = jnp.asarray(rng.standard_normal((N, 16)), jnp.bfloat16)
    monkeypatch.setattr(by_rows, "MOST_LOGITS", 5 * B * N * S)
    weights = jnp.asarray(rng.standard_normal((B, N, T)), jnp.float32)

    def loss(results):
        out, lse = results
        return (out**2).sum() + jnp.where(lse > -jnp.inf, lse * weights, 0).sum()

    def attend(slopes, table, q):
        score = alibi_with_a_table(slopes, table)
        return loss(pa.flash_attention_with_lse(q, k, v, score=score, **options))

    wide = table.astype(jnp.float32)
    wanted = in_numpy.call(jax.grad(attend, (0, 1, 2)), slopes, wide, q)
    forward, backward = InPlaceOfAKernel("flash_forward"), BackwardInPlaceOfAKernel()
    monkeypatch.setitem(dispatch.TABLES, "flash_forward", (forward,))
    monkeypatch.setitem(dispatch.TABLES, "flash_backward", (backward,))
    result = in_numpy.call(jax.grad(attend, (0, 1, 2)), slopes, table, q)
    assert result[1].dtype == jnp.bfloat16
    for got, want, tolerance in zip(result, wanted, (1e-4, 1e-2, 1e-4), strict=True):
        np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=tolerance, atol=tolerance)


@pytest.mark.by_xla
def test_a_score_without_a_value_past_the_last_row(monkeypatch):
    """The last slab of rows is shorter, and no row past the end is computed in it."""
    q, k, v = operands()
    monkeypatch.setattr(by_rows, "ROWS", 5)
    monkeypatch.setattr(by_rows, "RUNS", 1)

    def hessian(implementation):
        def loss(k):
            score = pa.score_fn(lambda s, b, h, q, kv, last: s / (last - q), jnp.float32(T))
            out = pa.flash_attention(q, k, v, score=score, implementation=implementation)
            return (out**2).sum()

        return jax.jvp(jax.grad(loss), (k,), (k,))[1]

    want = hessian("reference")
    monkeypatch.setitem(dispatch.TABLES, "flash_forward", (InPlaceOfAKernel("flash_forward"),))
    monkeypatch.setitem(dispatch.TABLES, "flash_backward", (BackwardInPlaceOfAKernel(),))
    np.testing.assert_allclose(hessian(None), want, rtol=1e-4, atol=1e-4)
