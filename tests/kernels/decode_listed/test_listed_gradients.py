"""Gradients of attention to listed rows by their kernel, against loops in float64, with NaN in all
rows that no list names.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import FULL
from pallas_attn._call.problem import DecodeProblem, ListedResiduals
from pallas_attn.kernels.decode_listed import gradients_sm90
from tests.support import builds, mosaic

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


@dataclasses.dataclass(frozen=True)
class Case:
    """`rows` lists of `listed` entries, for `heads` query heads each, of `keys` rows."""

    rows: int
    heads: int
    keys: int
    listed: int
    dims: tuple[int, int] = (64, 64)
    dtype: str = "bfloat16"
    softcap: float | None = None
    kv_heads: int = 1
    low: bool = False  # logits so far below 0 that their distance to 0 has no exponential

    @property
    def problem(self) -> DecodeProblem:
        return DecodeProblem(
            gpu="sm90",
            kind="stacked",
            dtype=self.dtype,
            cache_dtype=self.dtype,
            sequences=1,
            q_len=self.rows,
            q_heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.dims[0],
            v_head_dim=self.dims[1],
            capacities=(self.keys,),
            mask=FULL,
            scale=self.dims[0] ** -0.5,
            softcap=self.softcap,
            listed=self.listed,
            op="listed_backward",
        )

    def residuals(self) -> ListedResiduals:
        """Entries of none, twice the same, a list of none, and one that ends early."""
        rng = np.random.default_rng(self.rows)
        rows = rng.integers(-2, self.keys, (self.rows, self.listed)).clip(-1)
        rows[:, 1:2] = rows[:, :1]
        rows[0, self.listed // 3 :] = -1
        rows[-1] = -1

        def draw(*shape):
            return np.asarray(rng.standard_normal(shape), jnp.dtype(self.dtype))

        q, d_out = (draw(self.rows, self.heads, dim) for dim in self.dims)
        k, v = (draw(self.keys, dim) for dim in self.dims)
        if self.low:
            q, k = 8 * np.abs(q), -8 * np.abs(k)
        unnamed = ~np.isin(np.arange(self.keys), rows)
        k[unnamed] = v[unnamed] = np.nan
        d_out[-1, 0] = np.nan
        out, lse = np.zeros_like(d_out), np.full((self.rows, self.heads), -np.inf, np.float32)
        for r, line in enumerate(rows):
            if (line >= 0).any():
                p, lse[r], _ = self.probabilities(q[r], k[line[line >= 0]])
                out[r] = p @ v[line[line >= 0]].astype(np.float64)
        d_lse = rng.standard_normal(lse.shape).astype(np.float32)
        arrays = q, k, v, rows.astype(np.int32), out, lse, d_out, d_lse
        return ListedResiduals(*map(jnp.asarray, arrays))

    def probabilities(self, q, k):
        """P, the log-sum-exp, and the slope of the logits."""
        s = q.astype(np.float64) @ k.astype(np.float64).T * self.problem.scale
        bent, slope = s, self.problem.scale
        if self.softcap is not None:
            bent = self.softcap * np.tanh(s / self.softcap)
            slope = slope * (1 - (bent / self.softcap) ** 2)
        lse = np.log(np.exp(bent).sum(-1))
        return np.exp(bent - lse[:, None]), lse, slope

    def wanted(self, residuals):
        """dq, dk and dv, one list after the other."""
        q, k, v, rows, _, _, d_out, d_lse = (np.asarray(x) for x in residuals)
        dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
        for r, line in enumerate(rows):
            at = line[line >= 0]
            if not at.size:
                continue
            p, _, slope = self.probabilities(q[r], k[at])
            dp = d_out[r].astype(np.float64) @ v[at].astype(np.float64).T
            ds = p * (dp - (p * dp).sum(-1, keepdims=True) + d_lse[r][:, None]) * slope
            dq[r] = ds @ k[at].astype(np.float64)
            np.add.at(dk, at, ds.T @ q[r].astype(np.float64))
            np.add.at(dv, at, p.T @ d_out[r].astype(np.float64))
        return dq, dk, dv


CASES = {
    "heads4_low": Case(3, 4, 90, 100, low=True),
    "heads12_softcap": Case(4, 12, 70, 70, (128, 64), softcap=2.0, kv_heads=2),
    "odd_dims_float16": Case(2, 64, 40, 10, (72, 96), "float16"),
}


def check(case: Case, **config) -> None:
    residuals, problem = case.residuals(), case.problem
    config = gradients_sm90.Config(**config)
    run = functools.partial(gradients_sm90.run, problem=problem, config=config)
    for got, want in zip(jax.jit(run)(residuals), case.wanted(residuals), strict=True):
        np.testing.assert_allclose(
            np.asarray(got, np.float64), want, atol=0.012 * np.abs(want).max()
        )


@pytest.mark.guards
@pytest.mark.parametrize("name", CASES)
def test_interpreted(name):
    """One block: consumers take rows in turn."""
    with mosaic.interpret():
        check(CASES[name], grid=1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_the_gpu(name):
    check(CASES[name], grid=2)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [Case(300, 16, 700, 200, (128, 128))], ids=["many"])
def test_many_lists_on_the_gpu(case):
    check(case)


@pytest.mark.machine_code
@pytest.mark.guards
def test_machine_code():
    """Nothing is spilled."""
    build = builds.BUILDS["decode_listed/sm90/gradients"]
    report = mosaic.compile_for(build.call, *build.shapes, target=build.target)
    assert report.launches == 1 and report.spill_bytes == 0
