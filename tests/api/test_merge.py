"""Partial results combined, against one call that sees all keys: forward and both derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import pallas_attn as pa
from pallas_attn.merge import add_sinks
from tests.support import messages

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

B, T, S, N, K, H = 2, 5, 12, 4, 2, 8


def qkv(dtype=jnp.float32):
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H)
    return [jax.random.normal(jax.random.key(i), shape, dtype) for i, shape in enumerate(shapes)]


def in_parts(q, k, v, ends, **options):
    """Causal attention of rows at 3 .. 7 to the keys of each part alone: the outs, the lses."""
    results, start = [], 0
    for end in ends:
        some = slice(start, end)
        offset = 3 - start
        results.append(
            pa.flash_attention_with_lse(
                q, k[:, some], v[:, some], mask=pa.CAUSAL, q_offset=offset, **options
            )
        )
        start = end
    return zip(*results, strict=True)


@pytest.mark.parametrize("ends", [(S,), (4, S), (0, 1, 5, 7, S)])
def test_parts_together_are_one_call(ends):
    q, k, v = qkv()

    def whole_call(q, k, v):
        return pa.flash_attention_with_lse(q, k, v, mask=pa.CAUSAL, q_offset=3)

    def merged(q, k, v):
        return pa.merge_attention(*in_parts(q, k, v, ends))

    want, of_one = jax.vjp(whole_call, q, k, v)
    got, of_parts = jax.vjp(merged, q, k, v)
    cotangents = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape), want)
    cotangents = jax.tree.map(lambda x: x.astype(jnp.float32), cotangents)
    for g, w in zip((*got, *of_parts(cotangents)), (*want, *of_one(cotangents)), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


@pytest.mark.by_xla
def test_rows_that_see_nothing_and_what_nobody_saw():
    """The third row sees nothing; where a part saw nothing its out is not looked at."""
    lses = jnp.log(jnp.asarray([[1.0, 0, 0], [3.0, 2, 0]]))[:, None, None]  # [parts, B, N, T]
    outs = jnp.asarray([[4.0, jnp.nan, jnp.nan], [8.0, 6, jnp.inf]])[:, None, :, None, None]

    def merged(outs, lses):
        return pa.merge_attention(outs, lses)

    (out, lse), back = jax.vjp(merged, outs, lses)
    np.testing.assert_allclose(out[0, :, 0, 0], [7, 6, 0], rtol=1e-6)
    np.testing.assert_allclose(
        lse[0, 0], np.log([4, 2, 1e-300])[[0, 1, 1]].tolist()[:2] + [-np.inf]
    )
    d_outs, d_lses = back((jnp.ones_like(out), jnp.ones_like(lse)))
    np.testing.assert_allclose(d_outs[:, 0, :, 0, 0], [[0.25, 0, 0], [0.75, 1, 0]], rtol=1e-6)
    # The log-sum-exp's own part, and that of the mean of 4 and 8 by weights of 1/4 and 3/4.
    np.testing.assert_allclose(d_lses[:, 0, 0], [[-0.5, 0, 0], [1.5, 1, 0]], rtol=1e-5, atol=1e-6)


@pytest.mark.by_xla
def test_a_part_whose_lse_is_inf_has_all_the_weight():
    """Beside a part with a finite lse, beside another one of inf, and beside one without a key."""
    lses = jnp.asarray([[2.0, np.inf, -np.inf], [np.inf, np.inf, np.inf]])[:, None, None]
    outs = jnp.asarray([[4.0, 4.0, np.nan], [8.0, 6.0, 0.0]])[:, None, :, None, None]
    (out, lse), back = jax.vjp(pa.merge_attention, outs, lses)
    np.testing.assert_array_equal(out[0, :, 0, 0], [8, 5, 0])
    np.testing.assert_array_equal(lse[0, 0], [np.inf] * 3)
    d_outs, d_lses = back((jnp.ones_like(out), jnp.ones_like(lse)))
    np.testing.assert_array_equal(d_outs[:, 0, :, 0, 0], [[0, 0.5, 0], [1, 0.5, 1]])
    np.testing.assert_array_equal(d_lses[:, 0, 0, ::2], [[0, 0], [1, 1]])


@pytest.mark.by_xla
def test_sinks_that_are_added_last():
    """The way of `prefix` and of rows split over devices; inf and -inf; gradients, too."""
    q, k, v = qkv()
    sinks = jnp.asarray([np.inf, 1.0, -np.inf, 0.0])

    def in_two(q, k, v, sinks):
        outs, lses = in_parts(q, k, v, (5, S))
        return add_sinks(*pa.merge_attention(outs, lses), sinks)

    def at_once(q, k, v, sinks):
        return pa.flash_attention_with_lse(q, k, v, mask=pa.CAUSAL, q_offset=3, sinks=sinks)

    (got, back), (want, of_one) = (jax.vjp(f, q, k, v, sinks) for f in (in_two, at_once))
    cotangents = jax.tree.map(lambda x: jnp.ones_like(x), want)
    for g, w in zip((*got, *back(cotangents)), (*want, *of_one(cotangents)), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


def test_derivatives_of_both_modes_and_orders():
    draw = functools.partial(jax.random.normal, dtype=jnp.float32)
    outs = [draw(jax.random.key(i), (1, 3, 2, 4)) for i in range(3)]
    lses = [draw(jax.random.key(i), (1, 2, 3)) for i in range(3, 6)]
    check_grads(lambda *x: pa.merge_attention(*x), (outs, lses), 2, rtol=1e-2, atol=1e-2)


def test_dtypes_and_one_token():
    outs = [jnp.full((2, 4, 8), x, jnp.bfloat16) for x in (1, 3)]
    out, lse = pa.merge_attention(outs, [jnp.zeros((2, 4))] * 2)
    assert (out.dtype, out.shape, lse.dtype, lse.shape) == (
        jnp.bfloat16,
        (2, 4, 8),
        "float32",
        (2, 4),
    )
    np.testing.assert_array_equal(out.astype(jnp.float32), 2)
    np.testing.assert_allclose(lse, np.log(2), rtol=1e-6)


REFUSED = (
    ([], []),
    ([jnp.zeros((1, 2, 3, 4))], []),
    (None, []),
    ([], jnp.zeros(())),
    ([jnp.zeros((2, 3))], [jnp.zeros(2)]),
    ([jnp.zeros((1, 2, 3, 4))], [jnp.zeros((1, 2, 3))]),
    ([jnp.zeros((1, 2, 4), int)], [jnp.zeros((1, 2))]),
)
MESSAGES = {"merge": tuple(functools.partial(pa.merge_attention, *x) for x in REFUSED)}


@pytest.mark.parametrize("call, message", messages.cases(MESSAGES))
def test_what_is_refused(call, message):
    messages.check(call, message)
