"""The tolerance itself: it lets honest rounding pass, wherever it falls, and no error."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import Mask
from tests.support import budget, definition, fuzz, fuzz_listed
from tests.support.problems import cases
from tests.support.subjects import cotangents

(CASE,) = cases.select(cases.ATTENTION, "bias_by_row")


@pytest.fixture(scope="module")
def expected():
    return budget.attention(CASE.arguments(), *cotangents(CASE))


@pytest.mark.parametrize("grid", [1.27, 1.86])
def test_another_rounding_passes(expected, monkeypatch, grid):
    monkeypatch.setattr(budget, "GRIDS", (grid,))
    budget.check(budget.attention(CASE.arguments(), *cotangents(CASE)).naive, expected)


def test_many_roundings_excuse_no_error(monkeypatch):
    """They allow at least what one does, and no more than what rounding can do."""
    monkeypatch.setattr(budget, "MANY_GRIDS", budget.MANY_GRIDS[::8])
    arguments, cotangents_ = CASE.arguments(), cotangents(CASE)
    once = budget.attention(arguments, *cotangents_, random=True, grids=(1.0,))
    many = budget.attention(arguments, *cotangents_, random=True, grids=budget.MANY_GRIDS)
    for name, exact in many.oracle.items():
        assert (abs(many.naive[name] - exact) >= abs(once.naive[name] - exact)).all(), name
        with pytest.raises(AssertionError, match=name):
            budget.check({name: exact * 1.1}, many)


def test_float32_sums_in_another_order_pass():
    """Large logits of few rows: which error a sum of 192 products has decides about a gradient, on
    whatever machine the sums of the budget are made.
    """
    (case,) = cases.select(cases.ATTENTION, "scale")
    sizes = {"batch": 3, "q_len": 17, "kv_len": 17, "q_heads": 2, "kv_heads": 1, "head_dim": 192}
    case = dataclasses.replace(case, dtype="float32", magnitude=3.0, scale=0.456, **sizes)
    arguments, (do, dlse) = case.arguments(), cotangents(case)
    wanted = budget.attention(arguments, do, dlse, random=True, grids=budget.MANY_GRIDS)
    arrays = {name: arguments[name] for name in ("q", "k", "v")}
    how = functools.partial(definition.attention, dlse=dlse, scale=case.scale)
    for seed in range(100, 108):
        arithmetic = definition.naive(None)._replace(scores=definition.one_by_one)
        got = budget._reordered(arrays, do, seed, call=how, arithmetic=arithmetic)
        budget.check(got, wanted)
    for name, exact in wanted.oracle.items():
        with pytest.raises(AssertionError, match=name):
            budget.check({name: exact * 1.001}, wanted)


def test_where_rows_see_one_key_values_may_lose_their_last_bits_and_no_more():
    """A float32 sum of one product is exact; what tensor cores multiply has 22 bits and more."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 3, 4, 64), np.float32) for _ in range(3))
    arguments = {"q": q, "k": k, "v": v, "mask": Mask(0, 0)}
    wanted = budget.attention(arguments | {"precision": "highest"}, tensor_cores=True)
    for right in (v, definition.cut(v, 0x1), definition.cut(v, 0x3)):
        budget.check({"out": right}, wanted)
    for wrong in (definition.cut(v, 0xF), definition.cut(v, 0xFF), v * 1.000002, v[:, ::-1]):
        with pytest.raises(AssertionError, match="out"):
            budget.check({"out": wrong}, wanted)
    with pytest.raises(AssertionError, match="out"):  # whoever adds up in float32 has no excuse
        budget.check({"out": definition.cut(v, 0x1)}, budget.attention(arguments))


def test_sums_that_round_towards_zero_pass():
    """Tensor cores round so, in 36 steps for the 576 columns of a latent cache: the lse of rows
    that see few keys, which a few naive runs refuse now and then. Nothing larger passes.
    """
    rng, refused = np.random.default_rng(0), 0
    sums = functools.partial(definition.towards_zero, some=16)
    arithmetic = definition.naive("float16")._replace(scores=sums)
    for _ in range(40):
        q = rng.standard_normal((6, 1, 4, 576)).astype(np.float16)
        k = rng.standard_normal((6, 3, 1, 576)).astype(np.float16)
        arrays = {"q": q, "k": k, "v": k[..., :8], "kv_lengths": rng.integers(1, 4, 6)}
        few, many = (
            budget.attention(arrays, tensor_cores=True, grids=grids)
            for grids in (budget.GRIDS, budget.MANY_GRIDS)
        )
        lse = definition.attention(arrays, arithmetic=arithmetic)["lse"]
        budget.check({"lse": lse}, many)
        try:
            budget.check({"lse": lse}, few)
        except AssertionError:
            refused += 1
        with pytest.raises(AssertionError, match="lse"):
            budget.check({"lse": lse + 2e-5}, many)
    assert refused  # or the sums that round towards 0 would be good for nothing


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv", "dbias"])
def test_errors_fail(expected, name):
    exact = expected.oracle[name]
    budget.check({name: exact}, expected)
    one_off = exact.copy()
    one_off[1, -1, -1, -1] += 0.5 * np.sqrt(np.mean(exact**2))
    for wrong in (exact * 1.1, np.roll(exact, 1, axis=2), one_off, exact * np.nan):
        with pytest.raises(AssertionError, match=name):
            budget.check({name: wrong}, expected)


def test_a_handed_lse_excuses_nothing_but_its_own_rounding():
    """A gradient in float32 with logits of 20: exact sums pass, fewer bits anywhere do not."""
    (case,) = cases.select(cases.ATTENTION, "scale")
    case = dataclasses.replace(case, dtype="float32", precision="highest", q_len=130)
    arguments, cotangent = case.arguments(), case.cotangent(1)
    expected = budget.attention(arguments, cotangent, tensor_cores=True, handed=True)
    arrays = {name: arguments[name] for name in ("q", "k", "v")}

    def gradients(**arithmetic):
        how = definition.Arithmetic(lse=expected.lse, **arithmetic)
        result = definition.attention(arrays, cotangent, scale=case.scale, arithmetic=how)
        return {name: result[name] for name in ("dq", "dk", "dv")}

    budget.check(gradients(dtype=np.float64), expected)
    budget.check(gradients(dtype=np.float32), expected)
    terms, tf32 = (lambda x: definition.cut(x, 0xFF)), (lambda x: definition.cut(x, 0x1FFF))
    for fewer in ({"score": tf32}, {"score": terms}, {"value": terms}, {"made": terms}):
        wrong = gradients(dtype=np.float32, **fewer)
        with pytest.raises(AssertionError, match="off by"):
            budget.check(wrong, expected)


def test_scores_of_float8_lose_what_tensor_cores_cut():
    """Beside 256 each term below 2**-5 is cut, in these 32 columns and in the next. What counts of
    the largest product is the sum of its exponents: 24 * 24 is like 16 * 16. The sum is cut, too.
    """

    def error(small: float, columns: int, large: float = 16) -> float:
        q, k = (np.full((1, 1, 1, columns), small, np.float32) for _ in "qk")
        q[..., 0] = k[..., 0] = large
        numbers = {n: jnp.asarray(x, jnp.float8_e4m3fn) for n, x in (("q", q), ("k", k))}
        scales = {"q_scale": np.full((1, 1, 1), 3.0), "k_scale": np.ones((1, 1, 1))}
        got = definition.float8_scores(numbers | scales)
        exact = 3 * (large**2 + (columns - 1) * small**2)
        return exact - float(got.squeeze())

    assert error(0.125, 32) == 3 * 31 * 0.125**2
    assert error(0.1875, 32) == 3 * 31 * (0.1875**2 - 2**-5)
    assert error(0.25, 32) == 0
    assert error(0.1875, 2, 24) == 3 * 0.1875**2  # 576 has a bit more than 256
    assert error(0.1875, 3, 24) == 3 * 2 * (0.1875**2 - 2**-5)
    assert error(0.125, 64) == 3 * 63 * 0.125**2


def test_a_tanh_of_exponentials_is_within_the_budget():
    """dk of a problem of the fuzzer was so far off on a GPU (results/fuzz, fuzz-17)."""
    _, _, case = fuzz.parsed("listed/gpu:18965032075268")
    _, plain = fuzz.attention_inputs(case, 8)
    options = {name: x for name, x in case.options().items() if x is not None}
    options.pop("deterministic", None)
    wanted = fuzz_listed.wanted(case, options, plain, fuzz_listed.lists_of(case, 8))
    _may_be_off(wanted(True, budget.MANY_GRIDS), "dk", 2.780e-5)


def test_scores_of_16_bits_are_within_a_budget_of_tf32():
    """The only score of a problem of the fuzzer is near by chance in TF32 (fuzz-17)."""
    _, _, case = fuzz.parsed("packed/gpu:20216562057264:sinks=False")
    packed = case.drawn(95)
    arrays = packed.arrays(case.dtype, seed=95)
    d_out, d_lse = packed.cotangents(case.dtype, seed=95)
    with np.errstate(invalid="ignore"):
        expected = packed.expected(arrays, d_out, d_lse, True, budget.MANY_GRIDS)
    _may_be_off(expected, "lse", 7.931e-6)


def _may_be_off(expected: budget.Expected, name: str, error: float) -> None:
    """A result with one error passes, and one with a hundred times more does not."""
    got = expected.oracle[name].copy()
    place = tuple(np.argwhere(np.isfinite(got))[-1])
    got[place] += error
    budget.check({name: got}, expected)
    got[place] += 100 * error
    with pytest.raises(AssertionError, match="off by"):
        budget.check({name: got}, expected)
