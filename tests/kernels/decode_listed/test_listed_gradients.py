"""Gradients of attention to listed rows by their kernel, against the definition in float64, NaN in
all rows that no list names.
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
from tests.support import definition, fuzz_listed, mosaic

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
        d_lse = rng.standard_normal((self.rows, self.heads)).astype(np.float32)
        arrays = q, k, v, rows.astype(np.int32), d_out, d_lse, d_out, d_lse
        right = self.wanted(ListedResiduals(*arrays))
        out, lse = right["out"][0].astype(d_out.dtype), np.float32(right["lse"][0].T)
        return ListedResiduals(*map(jnp.asarray, (*arrays[:4], out, lse, d_out, d_lse)))

    def wanted(self, residuals: ListedResiduals) -> dict[str, np.ndarray]:
        """Results and gradients by definition, each key as often as a list names it."""
        q, k, v, rows, _, _, d_out, d_lse = (
            np.nan_to_num(np.asarray(x, np.float64)) for x in residuals
        )
        times = fuzz_listed.times_of(rows[None, None].astype(int), self.keys)
        arrays = {"q": q[None], "k": k[None, :, None], "v": v[None, :, None]}
        arrays |= fuzz_listed.written_out(times, self.heads)
        return definition.attention(arrays, d_out[None], d_lse.T[None], softcap=self.softcap)


CASES = {
    "heads4_low": Case(3, 4, 90, 100, low=True),
    "heads12_softcap": Case(4, 12, 70, 70, (128, 64), softcap=2.0, kv_heads=2),
    "odd_dims_float16": Case(2, 64, 40, 10, (72, 96), "float16"),
}


def check(case: Case, **config) -> None:
    residuals, problem = case.residuals(), case.problem
    config = gradients_sm90.Config(**config)
    run = functools.partial(gradients_sm90.run, problem=problem, config=config)
    wanted = case.wanted(residuals)
    for got, name in zip(jax.jit(run)(residuals), ("dq", "dk", "dv"), strict=True):
        want = wanted[name][0].reshape(got.shape)
        np.testing.assert_allclose(
            np.asarray(got, np.float64), want, atol=0.012 * np.abs(want).max()
        )


@mosaic.here_and_on_a_gpu
@pytest.mark.parametrize("name", CASES)
def test_cases(name, where):
    """One block: consumers take rows in turn."""
    with where():
        check(CASES[name], grid=1)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [Case(300, 16, 700, 200, (128, 128))], ids=["many"])
def test_many_lists_on_the_gpu(case):
    check(case)
