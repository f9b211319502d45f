"""Masks whose bounds arrive at run time: over all of int32, alike in every implementation, and the
same as static ones, bit for bit where both walk over the same tiles.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import CAUSAL, FULL, Mask, sliding_window
from pallas_attn.kernels.flash_fwd import sm90 as flash_fwd_sm90
from pallas_attn.masks import AT_RUN_TIME
from tests.api.test_integers import cache_of, filled, normal, with_gradients
from tests.kernels.decode_mla import test_decode_mla as latent
from tests.kernels.flash_fwd import test_flash_fwd as forward
from tests.support import budget, definition, mosaic, subjects

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

LEAST, MOST = -(2**31), 2**31 - 1
FARTHEST = 2**30 - 1
# Left and right: narrow, wide, unbounded, and where no query sees a key.
BOUNDS = [(3, 50), (70, 0), (MOST, 50), (FARTHEST + 1, MOST), (MOST, -40), (-20, 40)]
BOUNDS += [(-1, 0), (LEAST, MOST)]
LEFT, RIGHT = (np.array(side, np.int32) for side in zip(*BOUNDS, strict=True))
EMPTY = LEFT.astype(np.int64) + RIGHT < 0

attending = pytest.mark.parametrize("subject", subjects.rows("flash_forward", "flash_backward"))
decoding = pytest.mark.parametrize("subject", subjects.rows("decode"))


def each_row(q, k, v, do, left, right, *, implementation, **options):
    """A call with bounds of its own for each batch row, under vmap."""

    def of_row(q, k, v, do, left, right):
        rows = (x[None] for x in (q, k, v, do))
        mask = Mask(left=left, right=right)
        return with_gradients(*rows, implementation=implementation, mask=mask, **options)

    results = jax.vmap(of_row)(q, k, v, do, left, right)
    return jax.tree.map(lambda x: x[:, 0], results)


def known(left, right) -> Mask:
    """The mask of all batch rows, for the oracle."""
    sides = (np.clip(x, -FARTHEST, FARTHEST) for x in (left, right))
    left, right = (x.reshape(-1, 1, 1, 1) for x in sides)
    return CAUSAL.filled(left=left, right=right)


@attending
def test_attention(rng, subject):
    rows, keys, dim = 20, 127, 16
    arrays = {
        name: normal(rng, subject.dtype, len(BOUNDS), length, 1, dim)
        for name, length in (("q", rows), ("k", keys), ("v", keys))
    }
    do = normal(rng, subject.dtype, len(BOUNDS), rows, 1, dim)
    got = subject.call(each_row, *arrays.values(), do, LEFT, RIGHT, q_offset=60)
    plain = arrays | {"q_offset": np.full(len(BOUNDS), 60)}
    mask = known(LEFT, RIGHT)
    seen = definition.attention(plain, mask=mask)["lse"] != -np.inf
    assert not seen[EMPTY].any() and seen[~EMPTY].all()
    arguments, dlse = plain | {"mask": mask}, seen.astype(np.float32)
    expected = budget.attention(arguments, do, dlse, tensor_cores=subject.tensor_cores)
    budget.check(got, expected)


@pytest.mark.guards
def test_the_same_bits_as_a_static_window():
    """Several kv tiles on either side of the window, by one walk over them."""
    sizes = {"batch": 1, "q_len": 64, "kv_len": 130, "q_heads": 1, "kv_heads": 1, "q_offset": 40}
    case = dataclasses.replace(forward.case_named("band"), **sizes)
    problem, inputs = (
        forward.problem_of(case),
        forward.AttentionInputs(**forward.arguments_of(case)),
    )
    bounds = {f"mask_{side}": jnp.array([getattr(case.mask, side)]) for side in ("left", "right")}
    arriving = FULL.filled(left=AT_RUN_TIME, right=AT_RUN_TIME)
    at_run_time = dataclasses.replace(problem, mask=arriving, arrays=tuple(bounds))
    config = flash_fwd_sm90.Config(warpgroups=1, block_kv=64, stages=2, grid=3)
    run = functools.partial(forward.run, config=config)
    with mosaic.interpret():
        want = jax.jit(functools.partial(run, problem=problem))(inputs)
        got = jax.jit(functools.partial(run, problem=at_run_time))(inputs._replace(**bounds))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def decoded(q, cache, left, right, *, implementation, **options):
    """The results of each pair of bounds."""
    call = functools.partial(pa.decode_attention_with_lse, q, cache, **options)

    def of_bounds(bounds):
        return call(mask=Mask(*bounds), implementation=implementation)

    return jax.lax.map(of_bounds, (left, right))


@decoding
@pytest.mark.parametrize("t", [2, 40])
def test_decode(rng, subject, t):
    """By the kernels for few rows, and for many."""
    lengths, bounds = jnp.array([0, 77, 200], jnp.int32), [1, 4]
    left, right = LEFT[bounds], RIGHT[bounds]
    cache = filled(rng, cache_of("paged", 3, 200, subject.dtype))
    cache = dataclasses.replace(cache, lengths=lengths, new_lengths=lengths * 0)
    q = normal(rng, subject.dtype, 3, t, 1, 16)
    got = subject.call(decoded, q, cache, left, right)
    reference = functools.partial(decoded, implementation="reference")
    want = jax.jit(reference)(*jax.tree.map(jnp.asarray, (q, cache, left, right)))
    order = 1e-5  # sums of float32 in another order
    steps = (max(float(jnp.finfo(q.dtype).eps), order), order)
    for have, wanted, eps in zip(got, want, steps, strict=True):
        have, wanted = (np.asarray(x, np.float32) for x in (have, wanted))
        np.testing.assert_allclose(have, wanted, rtol=2 * eps, atol=2 * eps)


@pytest.mark.guards
def test_decode_over_latent_caches():
    """The bits of a static window."""
    case, config = latent.OF_WARPS["separate"]
    arriving = dataclasses.replace(case.problem, mask=CAUSAL.filled(left=AT_RUN_TIME))
    inputs = case.inputs(0, np.nan)
    run = functools.partial(forward.run, config=config)
    with mosaic.interpret():
        want = jax.jit(functools.partial(run, problem=case.problem))(inputs)
        windowed = jax.jit(functools.partial(run, problem=arriving))
        got = windowed(inputs._replace(mask_left=jnp.int32(49)))
    jax.tree.map(np.testing.assert_array_equal, got, want)


WINDOWS = (3, MOST, 20)


def stack(x, windows, k, v):
    """A scan over layers whose windows alternate, under remat."""

    @jax.checkpoint
    def layer(x, window):
        return pa.flash_attention(x, k, v, mask=sliding_window(window)), None

    return jax.lax.scan(layer, x, windows)[0]


def test_a_scan_over_layers_alternates_windows(rng):
    x, k, v = (normal(rng, "float32", 2, 30, 2, 8) for _ in range(3))

    def one_by_one(x, k, v):
        for window in WINDOWS:
            mask = CAUSAL if window == MOST else sliding_window(window)
            x = pa.flash_attention(x, k, v, mask=mask)
        return x

    loss = lambda f: lambda *arrays: jnp.sum(f(*arrays) ** 2)  # noqa: E731
    scanned = lambda x, k, v: stack(x, jnp.array(WINDOWS, jnp.int32), k, v)  # noqa: E731
    got, want = (jax.jit(jax.value_and_grad(loss(f), (0, 1, 2)))(x, k, v)
                 for f in (scanned, one_by_one))  # fmt: skip
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


def test_dot_product_attention(rng):
    q, k, v = (normal(rng, "float32", 2, 30, 2, 8) for _ in range(3))
    call = functools.partial(pa.dot_product_attention, q, k, v)
    for window in (4, (2, 5), (MOST, 1)):
        got = jax.jit(lambda w: call(local_window_size=w))(window)
        np.testing.assert_allclose(got, call(local_window_size=window), rtol=1e-5, atol=1e-6)


def test_what_a_mask_of_arrays_says_of_itself():
    def ask(left, n):
        mask = Mask(left=left)
        assert (mask.bounds_left, mask.bounds_right, mask.is_full) == (True, False, False)
        assert (mask.is_causal, mask.width, str(mask & CAUSAL)) == (
            False,
            None,
            "left=at run time, right=0",
        )
        static = mask.static
        assert hash(static) == hash(Mask(left=left + 1).static) and static == static.filled()
        assert static.widest == Mask() and static.arrives == ("left",)
        assert mask.transposed.static == FULL.filled(right=AT_RUN_TIME)
        return mask, sliding_window(n) & sliding_window(5), mask & Mask(left=2)

    for bound, clipped in ((7, 7), (MOST, FARTHEST), (LEAST, -FARTHEST)):
        mask, window, tighter = jax.jit(ask)(jnp.int32(bound), jnp.int32(bound))
        assert (int(mask.left), int(tighter.left)) == (clipped, min(clipped, 2))
        assert int(window.left) == min(max(clipped, 0) - 1, 4) and window.right == 0
    wide = jax.jit(lambda n: Mask(right=n))(np.uint8(200))
    assert int(wide.right) == 200 and wide.right.dtype == jnp.int32


def test_a_mask_of_arrays_combines_with_a_function():
    @jax.jit
    def dense(n):
        either = sliding_window(n) | pa.mask_fn(lambda b, h, q, kv: kv < 2)
        return either.allows(0, 0, jnp.arange(6)[:, None], jnp.arange(9)[None])

    want = sliding_window(3).dense(6, 9) | (np.arange(9) < 2)[None]
    np.testing.assert_array_equal(dense(3), want)


def test_a_mask_is_an_argument(rng):
    """A mask of ints is static, a mask of arrays is traced."""
    traces = []

    @jax.jit
    def dense(mask):
        traces.append(mask)
        return jnp.asarray(mask.allows(jnp.arange(6)[:, None], jnp.arange(9)[None]))

    for n in (1, 3):
        np.testing.assert_array_equal(dense(sliding_window(n)), sliding_window(n).dense(6, 9))
    assert len(traces) == 2
    for n in (1, 3):
        mask = CAUSAL.filled(left=jnp.int32(n - 1))
        np.testing.assert_array_equal(dense(mask), sliding_window(n).dense(6, 9))
    assert len(traces) == 3
