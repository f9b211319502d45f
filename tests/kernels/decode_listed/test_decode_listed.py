"""Attention to the positions that `kv_indices` lists: the reference and every kernel against loops
in NumPy, with any int32 for a position and NaN in all rows that no list names.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import FULL, sliding_window
from pallas_attn._call import dispatch, reference
from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn.kernels.decode_listed import lists
from tests.kernels.decode.test_decode_kernel import ADDED, ALIBI
from tests.support import decode_cases, in_numpy, mosaic, subjects

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

NONE = (-1, -(2**31), 2**31 - 1, 10**6)  # positions that no sequence has


@dataclasses.dataclass(frozen=True)
class Case(decode_cases.Case):
    """A decode call with lists of `listed` positions; rows are packed where `starts` are given."""

    listed: int = 70
    latent: bool = False
    starts: tuple[int, ...] | None = None

    @property
    def problem(self) -> DecodeProblem:
        rows = {} if self.starts is None else {"tokens": self.starts[-1] + 2, "q_len": 64}
        problem = super().problem
        return dataclasses.replace(problem, listed=self.listed, shared_kv=self.latent, **rows)

    def inputs(self, seed: int = 0, fill: float | None = None) -> DecodeInputs:
        inputs, rng = super().inputs(seed), np.random.default_rng(seed)
        rows = inputs.q.shape[:2]
        if self.starts is not None:
            rows = (self.starts[-1] + 2,)
            q = rng.standard_normal((*rows, self.q_heads, self.head_dim))
            starts = jnp.asarray(self.starts, jnp.int32)
            inputs = inputs._replace(q=jnp.asarray(q, inputs.q.dtype), starts=starts)
        inputs = inputs._replace(v_cache=None) if self.latent else inputs
        indices = rng.integers(-20, max(self.lengths) + 20, (*rows, self.listed))
        indices = np.where(
            rng.random(indices.shape) < 0.1, rng.choice(NONE, indices.shape), indices
        )
        indices[..., -3:] = indices[..., :3]  # listed twice
        indices[-1:] = np.where(np.arange(self.listed) < self.listed // 3, indices[-1:], -1)
        inputs = inputs._replace(kv_indices=jnp.asarray(indices.astype(np.int32)))
        return inputs if fill is None else self.poisoned(inputs, fill)

    def poisoned(self, inputs: DecodeInputs, fill: float) -> DecodeInputs:
        """`fill` in all rows that no query row attends to."""
        named = {(m, key) for _, (m, _), keys, _ in self.query_rows(inputs) for key in keys}

        def filled(cache):
            kept = np.full_like(cache, fill)
            for m, key in named:
                place = self.place(inputs, m, key)
                kept[place] = np.asarray(cache)[place]
            return jnp.asarray(kept)

        k, v = inputs.k_cache, inputs.v_cache
        return inputs._replace(k_cache=filled(k), v_cache=None if v is None else filled(v))

    def place(self, inputs: DecodeInputs, m: int, key: int) -> tuple[Any, ...]:
        layer = () if self.layers is None else (int(inputs.layer),)
        if self.kind == "paged":
            page = int(inputs.page_table[m, key // self.page_size])
            return *layer, page, slice(None), key % self.page_size
        return *layer, m, slice(None), key

    def query_rows(self, inputs: DecodeInputs):
        """Each query row: its place in q, its sequence and position there, the keys that it sees,
        and whether the result is NaN.
        """
        indices, lengths = np.asarray(inputs.kv_indices), np.asarray(inputs.lengths)
        for row in np.ndindex(inputs.q.shape[:-2]):
            if self.starts is None:
                m, at = row[0], lengths[row[0]] - self.q_len + row[1]
            else:
                m = int(np.searchsorted(self.starts, row[0], side="right")) - 1
                if not 0 <= m < len(lengths):
                    yield row, (0, 0), [], False
                    continue
                at = lengths[m] - (self.starts[m + 1] - row[0])
            lost = lengths[m] > self.capacities[m]
            keys = [int(x) for x in indices[row] if 0 <= x < lengths[m] and not lost]
            keys = [x for x in keys if self.hides is None or x % 3 != m]
            yield row, (m, at), [x for x in keys if self.mask.allows(at, x)], lost


def wanted(case: Case, inputs: DecodeInputs) -> tuple[np.ndarray, np.ndarray]:
    shape = inputs.q.shape[:-1]
    out = np.zeros((*shape, case.v_head_dim))
    lse = np.full(shape, -np.inf)
    group = case.q_heads // case.kv_heads
    for row, (m, at), keys, lost in case.query_rows(inputs):
        if lost:
            out[row], lse[row] = np.nan, np.nan
        if not keys:
            continue
        k, v = (
            np.stack([np.asarray(x[case.place(inputs, m, key)], np.float64) for key in keys], 1)
            for x in (inputs.k_cache, inputs.k_cache if case.latent else inputs.v_cache)
        )
        k, v = (np.repeat(x, group, axis=0) for x in (k, v[..., : case.v_head_dim]))
        s = np.einsum("nh,nsh->ns", np.asarray(inputs.q[row], np.float64), k) * case.head_dim**-0.5
        s = case.softcap * np.tanh(s / case.softcap) if case.softcap else s
        if case.adds:
            function, *arrays = case.adds
            s = s + function(m, np.arange(case.q_heads)[:, None], at, np.array(keys), *arrays)
        sinks = np.asarray(inputs.sinks, np.float64)[:, None] if case.sinks else s[:, :0]
        endless = (sinks == np.inf).any(axis=1)
        s = np.concatenate([s, np.where(sinks == np.inf, 1e4, sinks)], 1)
        top = s.max(axis=1, keepdims=True)
        p = np.exp(s - top)
        total = p.sum(axis=1, keepdims=True)
        out[row] = np.einsum("ns,nsh->nh", (p / total)[:, : len(keys)], v)
        lse[row] = np.where(endless, np.inf, (top + np.log(total))[:, 0])
    return out, lse.swapaxes(-1, -2)


KERNELS = {
    row.module: row.kernel
    for name in ("decode_listed", "decode_listed_mla")
    for row in dispatch.TABLES[name]
    if isinstance(row, dispatch.Candidate)
}


def check(case: Case, module: str, seed: int = 0, **config: Any) -> None:
    kernel = KERNELS[f"decode_listed.{module}"]
    assert kernel.limit(case.problem) is None
    chosen = kernel.config.default(case.problem)
    inner = dataclasses.replace(chosen.of_lists, **config)
    run = functools.partial(kernel.run, problem=case.problem, config=kernel.config(inner))
    inputs = case.inputs(seed, np.nan)
    on_gpu = jax.default_backend() == "gpu"
    result = jax.jit(run)(inputs) if on_gpu else in_numpy.call(run, inputs)
    step = 2 * float(jnp.finfo(case.dtype).eps)
    for got, other, budget in zip(result, wanted(case, inputs), (step, 1e-5), strict=True):
        decode_cases.close(got, other, budget, budget)


LATENT = {"latent": True, "kv_heads": 1, "head_dim": 192, "v_head_dim": 128}
SMALL, FEW_ROWS = {"stages": 2, "grid": 3}, "latent_sm90_few_rows"
INTERPRETED = {
    "pages": ("sm90", Case("paged", (5, 130, 0)), {"grid": 3}),
    "packed_layers": (
        "sm90",
        Case("stacked", (100, 300, 9), layers=2, starts=(1, 3, 4, 9), mask=FULL),
        {"grid": 2},
    ),
    "function": (
        "sm80",
        Case("paged", (70, 130), hides=pa.mask_fn(lambda b, h, q, kv: kv % 3 != b), mask=FULL),
        SMALL,
    ),
    "threads": ("sm80", Case("paged", (70, 130), q_len=3, mask=sliding_window(50)), SMALL),
    "latent_pages": (
        FEW_ROWS, Case("paged", (200, 0), q_len=2, listed=130, sinks=True, **LATENT), SMALL
    ),
    "latent_neighbours": (
        "latent_sm90",
        Case(
            "paged", (208,), q_heads=128, listed=300, latent=True, kv_heads=1,
            head_dim=576, v_head_dim=512,
        ),
        {"stages": 2, "grid": 4},
    ),
    "latent_neighbours_no_rest": (
        "latent_sm90",
        Case(
            "stacked", (208, 90), q_heads=128, listed=140, latent=True, kv_heads=1,
            head_dim=256, v_head_dim=256,
        ),
        {"stages": 2, "grid": 4},
    ),
    "latent_combined_apart": (
        "latent_sm90",
        Case(
            "stacked", (208,), q_heads=128, listed=500, latent=True, kv_heads=1,
            head_dim=256, v_head_dim=256,
        ),
        {"stages": 2, "grid": 16},
    ),
    "latent_packed": (
        FEW_ROWS,
        Case("paged", (150, 70), listed=66, starts=(0, 3, 5), mask=sliding_window(99), **LATENT),
        {"stages": 5, "grid": 3},
    ),
    "latent_invariant": (
        FEW_ROWS,
        Case("stacked", (200, 77), listed=200, batch_invariant=True, **LATENT),
        {"stages": 2, "grid": 3, "split_tiles": 2},
    ),
    "scores": (
        "sm90", Case("paged", (130, 40), q_len=2, adds=ADDED, sinks=True), {"grid": 3}
    ),
    "latent_scores": (
        FEW_ROWS, Case("paged", (200, 70), listed=66, starts=(0, 3, 5), adds=ADDED, **LATENT),
        SMALL,
    ),
    "threads_scores": (
        "sm80", Case("stacked", (70, 130), q_len=3, softcap=3.0, adds=ADDED), SMALL
    ),
    "latent_threads_alibi": (
        "latent_sm80", Case("paged", (90, 40), q_len=2, adds=ALIBI, **LATENT), SMALL
    ),
}  # fmt: skip


@mosaic.here_and_on_a_gpu
@pytest.mark.parametrize("name", INTERPRETED)
def test_cases(name, where):
    module, case, config = INTERPRETED[name]
    with where():
        check(case, module, **config)


@pytest.mark.guards
@pytest.mark.parametrize("most", [2, 3], ids=["in_a_loop", "one_by_one"])
def test_several_launches(monkeypatch, most):
    monkeypatch.setattr(lists, "ROWS_AT_ONCE", 4)
    monkeypatch.setattr(lists, "MOST_LAUNCHES", most)
    with mosaic.interpret():
        check(Case("paged", (70, 30, 9), q_len=3, listed=20), "sm90", grid=3)


@pytest.mark.parametrize(
    "name", ["pages", "packed_layers", "threads", "latent_packed", "scores", "latent_scores"]
)
def test_reference(name):
    _, case, _ = INTERPRETED[name]
    inputs = case.inputs(0, np.nan)
    result = in_numpy.call(functools.partial(reference.decode_listed, problem=case.problem), inputs)
    for got, other, budget in zip(result, wanted(case, inputs), (0.01, 1e-5), strict=True):
        decode_cases.close(got, other, budget, budget)


@pytest.mark.parametrize("subject", subjects.rows("decode"))
@pytest.mark.parametrize("kind, dtype", [("paged", "int8"), ("stacked", "bfloat16")])
def test_all_positions_in_any_order_are_plain_attention(rng, subject, kind, dtype):
    """The call that a user makes, for a token without t."""
    sizes = {"kv_heads": 2, "head_dim": 64, "dtype": dtype}
    cache = pa.StackedCache.create(2, 40, **sizes)
    if kind == "paged":
        cache = pa.PagedCache.create(2, 10, 8, capacity=40, **sizes)
    k, v, q = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
        for shape in ((2, 33, 2, 64), (2, 33, 2, 64), (2, 4, 64))
    )
    cache = in_numpy.call(pa.append_kv, cache, k, v)
    indices = np.stack([rng.permutation(40), rng.permutation(40)]).astype(np.int32)
    plain, listed = (
        subject.call(pa.decode_attention_with_lse, q, cache, **more)
        for more in ({}, {"kv_indices": jnp.asarray(indices)})
    )
    for got, other, budget in zip(listed, plain, (0.02, 1e-4), strict=True):
        assert got.shape == other.shape
        decode_cases.close(got, other, budget, budget)
