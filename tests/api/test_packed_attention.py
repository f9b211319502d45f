"""Packed rows: `flash_attention(packed=)` is attention of each sequence by itself.

The oracle is that of sequences in batch rows of their own, filled up to one length: see `Packed`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import CAUSAL, FULL, Mask, sliding_window
from tests.support import budget, subjects
from tests.support.problems import by_name

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

LEAST, MOST = -(2**31), 2**31 - 1
FLOATS = ("q", "k", "v", "sinks")


@dataclasses.dataclass(frozen=True)
class Packed:
    """A call, by what `starts` mean; `told` are those of the call, where they differ."""

    q_starts: tuple[int, ...]
    kv_starts: tuple[int, ...] | None = None
    rows: int = 200  # rows of q
    keys: int = 200
    q_offset: int | tuple[int, ...] = 0
    sinks: bool = False
    heads: tuple[int, int] = (2, 1)
    dim: int = 64
    static: tuple = ()
    told: tuple = ()

    @property
    def both(self):
        return self.q_starts, self.q_starts if self.kv_starts is None else self.kv_starts

    def arrays(self, dtype: str, seed: int = 0) -> dict:
        """Inputs, NaN past the last start."""
        rng, (n, k) = np.random.default_rng(seed), self.heads
        sizes = {"q": (self.rows, n), "k": (self.keys, k), "v": (self.keys, k)}
        results = {}
        for name, size in sizes.items():
            x = rng.standard_normal((*size, self.dim)).astype(np.float32)
            x[self.both[name != "q"][-1] :] = np.nan
            results[name] = jnp.asarray(x, dtype)
        if self.sinks:
            results["sinks"] = jnp.asarray(rng.standard_normal(n), jnp.float32)
        return results

    def starts(self) -> dict:
        q_starts, kv_starts = self.told or (self.q_starts, self.kv_starts)
        results = {"q_starts": q_starts, "kv_starts": kv_starts}
        if not isinstance(self.q_offset, int):
            results["q_offset"] = self.q_offset
        return {n: jnp.asarray(x, jnp.int32) for n, x in results.items() if x is not None}

    def options(self) -> dict:
        static = dict(self.static)
        return static | {"q_offset": self.q_offset} if isinstance(self.q_offset, int) else static

    def by_sequence(self, name: str, x) -> np.ndarray:
        """[rows, ..] -> [M, the longest, ..], with 0 past each end."""
        starts, x = self.both[name in ("k", "v")], np.asarray(x)
        counts = np.diff(starts)
        padded = np.zeros((len(counts), max((*counts, 1)), *x.shape[1:]), x.dtype)
        for i, count in enumerate(counts):
            padded[i, :count] = x[starts[i] : starts[i] + count]
        return padded

    def cotangents(self, dtype: str, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Cotangents of out, in numbers of the dtype, and of lse."""
        rng = np.random.default_rng((seed, self.rows))
        do = rng.standard_normal((self.rows, self.heads[0], self.dim)).astype(np.float32)
        dlse = rng.standard_normal((self.heads[0], self.rows)).astype(np.float32)
        return np.array(jnp.asarray(do, dtype), np.float32), dlse

    def spoilt(self, do, dlse) -> tuple[np.ndarray, np.ndarray]:
        """Cotangents with NaN past the last start."""
        do, dlse = do.copy(), dlse.copy()
        for x in (do, dlse.T):
            x[self.q_starts[-1] :] = np.nan
        return do, dlse

    def results_by_sequence(self, got: dict) -> dict:
        """Results of sequences by themselves; rows of none are 0, and their lse -inf."""
        parts = {}
        for name, x in got.items():
            if name == "dsinks":
                parts[name] = x
                continue
            rows = x.T if name == "lse" else x
            starts = self.both[name in ("dk", "dv")]
            for free in (rows[: starts[0]], rows[starts[-1] :]):
                np.testing.assert_array_equal(free, -np.inf if name == "lse" else 0.0, err_msg=name)
            own = self.by_sequence("k" if name in ("dk", "dv") else "q", rows)
            if name == "lse":
                own[np.arange(own.shape[1])[None] >= np.diff(starts)[:, None]] = -np.inf
            parts[name] = np.swapaxes(own, 1, 2) if name == "lse" else own
        return parts

    def expected(
        self, arrays: dict, do, dlse, random: bool = False, grids=budget.GRIDS
    ) -> budget.Expected:
        args = {name: self.by_sequence(name, x) for name, x in arrays.items() if name != "sinks"}
        lengths = {"q_lengths": self.both[0], "kv_lengths": self.both[1]}
        args |= {name: np.diff(starts).astype(np.int32) for name, starts in lengths.items()}
        if self.sinks:
            args["sinks"] = arrays["sinks"]
        if not isinstance(self.q_offset, int):
            args["q_offset"] = np.asarray(self.q_offset, np.int32)
        do, dlse = self.by_sequence("q", do), np.swapaxes(self.by_sequence("q", dlse.T), 1, 2)
        static = {name: x for name, x in self.options().items() if name != "deterministic"}
        how = {"tensor_cores": True, "random": random, "grids": grids}
        return budget.attention(args | static, do, dlse, **how)


def with_gradients(arrays, starts, do, dlse, *, implementation, **static):
    """out and lse, and the gradients of what counts of them."""
    call = functools.partial(by_name.flash_attention_with_lse, implementation=implementation)
    floats = {name: arrays[name] for name in FLOATS if name in arrays}
    (out, lse), pull = jax.vjp(lambda floats: call(**floats, **starts, **static), floats)
    (grads,) = pull((do.astype(out.dtype), dlse))
    return {"out": out, "lse": lse} | {f"d{name}": x for name, x in grads.items()}


ALIKE = (3, 3, 40, 105, 105, 190)
OTHER = (0, 60, 61, 61, 150, 188)
CASES = {
    "causal": Packed(ALIKE, static=(("mask", CAUSAL),)),
    "sinks_softcap": Packed(
        ALIKE, sinks=True, static=(("mask", sliding_window(30)), ("softcap", 20.0))
    ),
    "other_keys": Packed(ALIKE, OTHER, static=(("mask", FULL),)),
    "offsets": Packed(
        *((0, 20, 21, 90, 180), (0, 75, 170, 230, 290)),
        keys=300,
        q_offset=(55, 94, -9, 2),
        static=(("mask", CAUSAL),),
    ),
    "window_offsets": Packed(
        *((0, 20, 21, 90, 180), (4, 75, 170, 230, 290)),
        keys=300,
        q_offset=30,
        sinks=True,
        static=(("mask", Mask(60, 3)), ("deterministic", True)),
    ),
}
# Any int32 in starts: what it means, and what the call says.
WILD = {
    "descending": Packed((5, 5, 90, 90, 200), told=((5, 2, 90, LEAST, MOST), None)),
    "outside": Packed((0, 200, 200), (0, 0, 150), 200, 150, told=((-7, 201, 3), (LEAST, -1, MOST))),
    "nobody": Packed((0, 0, 0), told=((LEAST, -1, 0), None)),
    "no_sequence": Packed((100, 100), told=((100,), None)),
}
BOTH = "flash_forward", "flash_backward"


def check(subject, packed: Packed):
    arrays = packed.arrays(subject.dtype)
    do, dlse = packed.cotangents(subject.dtype)
    expected = packed.expected(arrays, do, dlse)
    handed = map(jnp.asarray, packed.spoilt(do, dlse))
    got = subject.call(with_gradients, arrays, packed.starts(), *handed, **packed.options())
    budget.check(packed.results_by_sequence(jax.tree.map(np.array, got)), expected)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("subject", subjects.rows(*BOTH, but=("interpreted",)))
def test_each_sequence_by_itself(subject, name):
    check(subject, CASES[name])


@pytest.mark.guards
@pytest.mark.parametrize("name", ["sinks_softcap", "window_offsets"])  # the kernels' two ways
@pytest.mark.parametrize(
    "subject", [x for x in subjects.ROWS if x.generation], ids=lambda x: x.name
)
def test_interpreted(subject, name):
    check(subject, CASES[name])


@pytest.mark.parametrize("name", WILD)
@pytest.mark.parametrize("subject", subjects.rows(*BOTH, but=("interpreted",)))
def test_any_starts(subject, name):
    check(subject, dataclasses.replace(WILD[name], static=(("mask", CAUSAL),)))
