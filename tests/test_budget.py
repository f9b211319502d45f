"""The tolerance itself: it lets honest rounding pass, wherever it falls, and no error."""

import numpy as np
import pytest

from pallas_attn import cases
from tests import budget
from tests.test_cases import cotangents

(CASE,) = cases.select(cases.ATTENTION, "bias_by_row")


@pytest.fixture(scope="module")
def expected():
    return budget.attention(CASE.arguments(), *cotangents(CASE))


@pytest.mark.parametrize("grid", [1.27, 1.86])
def test_another_rounding_passes(expected, monkeypatch, grid):
    monkeypatch.setattr(budget, "GRIDS", (grid,))
    budget.check(budget.attention(CASE.arguments(), *cotangents(CASE)).naive, expected)


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv", "dbias"])
def test_errors_fail(expected, name):
    exact = expected.oracle[name]
    budget.check({name: exact}, expected)
    one_off = exact.copy()
    one_off[1, -1, -1, -1] += 0.5 * np.sqrt(np.mean(exact**2))
    for wrong in (exact * 1.1, np.roll(exact, 1, axis=2), one_off, exact * np.nan):
        with pytest.raises(AssertionError, match=name):
            budget.check({name: wrong}, expected)
