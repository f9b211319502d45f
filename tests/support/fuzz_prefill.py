"""Random calls of `decode_attention` over float8 caches whose `precision` allows matmuls on 8 bits,
as `fuzz` runs them. Hopper's kernel rounds q, K and V anew, so its oracle has the rows that it
multiplies (`float8_rows`); that of others has the rows of the cache.
"""

import dataclasses
import functools
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import pallas_attn as pa
from pallas_attn._cache import bind
from pallas_attn._call import dispatch
from pallas_attn.kernels.prefill import float8_sm90
from pallas_attn.masks import CAUSAL, FULL, Mask, sliding_window
from tests.support import budget, float8_rows, fuzz, hard_data
from tests.support.fuzz import LEAST, MOST
from tests.support.subjects import Subject

SUM = jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32
FAST = jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM


@dataclasses.dataclass(frozen=True)
class Case:
    """`capacity`: rows of a sequence; separate ones differ by up to `spread`."""

    kind: str
    dtype: str
    sequences: int
    q_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    capacity: int
    spread: int = 0
    page_size: int | None = None
    layers: int | None = None
    mask: Mask = CAUSAL
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False
    fast: bool = False

    def create(self) -> Any:
        sizes = {"head_dim": self.head_dim, "v_head_dim": self.v_head_dim, "layers": self.layers}
        sizes |= {"kv_heads": self.kv_heads, "dtype": self.dtype}
        if self.kind == "per_sequence":
            each = [self.capacity + m % (self.spread + 1) for m in range(self.sequences)]
            return pa.PerSequenceCache.create(each, **sizes)
        if self.kind == "stacked":
            return pa.StackedCache.create(self.sequences, self.capacity, **sizes)
        pages = self.sequences * -(-self.capacity // self.page_size) + 1
        return pa.PagedCache.create(
            self.sequences, pages, self.page_size, capacity=self.capacity, **sizes
        )


def draw(seed: int, tiny: bool) -> Case:
    pick = random.Random(f"fuzz prefill {seed}")
    kind, kv_heads = pick.choice(("per_sequence", "stacked", "paged")), pick.choice((1, 2))
    page = pick.choice((8, 16, 24, 64, 128)) if kind == "paged" else None
    most, q_lens = (300, (3, 20, 33)) if tiny else (1500, (3, 17, 33, 64, 70, 130, 200))
    unit = page or 8
    rows = pick.choice((unit, 128, 136, pick.randint(1, most)))
    masks = (CAUSAL, CAUSAL, FULL, sliding_window(pick.choice((1, 20, 100))), Mask(None, 2))
    return Case(
        kind=kind,
        dtype=pick.choice(("float8_e4m3fn", "float8_e4m3fn", "float8_e5m2")),
        sequences=pick.choice((1, 2, 3)),
        q_len=pick.choice(q_lens),
        q_heads=kv_heads * pick.choice((8,) if tiny else (1, 4, 7, 8)),
        kv_heads=kv_heads,
        head_dim=pick.choice((64, 64, 128, 192)),
        v_head_dim=pick.choice((64, 128)),
        capacity=-(-rows // unit) * unit,
        spread=pick.choice((0, 8)),
        page_size=page,
        layers=pick.choice((None, 2)),
        mask=pick.choice(masks),
        softcap=pick.choice((None, None, 5.0)),
        scale=pick.choice((None, None, 0.05, 0.3)),
        sinks=pick.random() < 0.3,
        fast=pick.random() < 0.3,
    )


@dataclasses.dataclass
class _Filled:
    """A cache with rows up to every capacity, and where else NaN lies."""

    case: Case
    cache: Any
    layer: int | None
    sinks: Any

    @classmethod
    def of(cls, case: Case) -> "_Filled":
        rng = np.random.default_rng((case.q_len, case.capacity, case.head_dim))
        cache = case.create()
        rows = np.asarray(cache.capacities)
        cache = cache.extend(jnp.asarray(rows, jnp.int32))
        shape = (case.sequences, int(rows.max()), case.kv_heads)
        new = [rng.standard_normal((*shape, dim)) for dim in (case.head_dim, case.v_head_dim)]
        k, v = (float8_rows.off_ties(rng, x) for x in new)
        v = v * jnp.asarray(2.0 ** rng.integers(-9, 9, (*shape[:2], 1, 1)), "bfloat16")
        layer = None if case.layers is None else int(rng.integers(case.layers))
        at = {} if layer is None else {"layer": layer}
        cache = pa.write_kv(cache, k, v, **at, implementation="reference")
        sinks = None
        if case.sinks:
            sinks = hard_data.sinks_without_end(rng.standard_normal(case.q_heads))
            sinks = jnp.asarray(sinks, jnp.float32)
        return cls(case, cache, layer, sinks)

    def arguments(self, turn: int) -> dict[str, Any]:
        """Lengths and layers in and out of range, queries of another turn."""
        case, rng = self.case, np.random.default_rng((turn, 9))
        capacities = np.asarray(self.cache.capacities)
        lengths = np.array([fuzz._edges(rng, 1, int(n))[0] for n in capacities])
        if turn == 0:
            lengths = rng.integers(0, capacities + 1)
        q = rng.standard_normal((case.sequences, case.q_len, case.q_heads, case.head_dim))
        cache = dataclasses.replace(
            self._past(np.clip(lengths, 0, capacities)),
            lengths=jnp.asarray(lengths, jnp.int32),
            new_lengths=jnp.asarray(np.clip(lengths, LEAST, case.q_len), jnp.int32),
        )
        arguments: dict[str, Any] = {
            "q": float8_rows.off_ties(rng, q, float8_rows.PRIMES[:1]),
            "cache": cache,
            "mask": case.mask,
            "softcap": case.softcap,
            "scale": case.scale,
            "sinks": self.sinks,
            "precision": FAST if case.fast else SUM,
        }
        if self.layer is not None:
            beyond = turn % 4 == 3
            arguments["layer"] = jnp.int32([LEAST, -1, 2, MOST][turn % 3] if beyond else self.layer)
        return {name: x for name, x in arguments.items() if x is not None}

    def _past(self, ends: np.ndarray) -> Any:
        """The cache with NaN for all scales past `ends`."""
        changes = {}
        for side in ("k_scale", "v_scale"):
            arrays = [np.array(x) for x in jax.tree.leaves(getattr(self.cache, side))]
            for m, end in enumerate(ends):
                for rows, first in self._rows_of(arrays, m):
                    rows[..., max(end - first, 0) :] = np.nan
            arrays = [jnp.asarray(x) for x in arrays]
            changes[side] = tuple(arrays) if self.case.kind == "per_sequence" else arrays[0]
        return dataclasses.replace(self.cache, **changes)

    def _rows_of(self, arrays: list[np.ndarray], m: int) -> list[tuple[np.ndarray, int]]:
        """Views of a sequence's rows, each with the position of its first row."""
        if self.case.kind == "per_sequence":
            return [(arrays[m], 0)]
        if self.cache.page_table is None:
            return [(arrays[0][..., m, :, :], 0)]
        pages = np.asarray(self.cache.page_table)[m]
        size = self.cache.page_size
        return [(arrays[0][..., page, :, :], n * size) for n, page in enumerate(pages) if page >= 0]

    def lost(self, arguments: dict[str, Any]) -> np.ndarray:
        """bool[M]: sequences whose results are NaN."""
        cache = arguments["cache"]
        lengths, new = np.asarray(cache.lengths), np.asarray(cache.new_lengths)
        if "layer" in arguments and not 0 <= int(arguments["layer"]) < (self.case.layers or 1):
            return np.full(len(lengths), True)
        return (lengths > np.asarray(cache.capacities)) | ((lengths < 1) & (new < 0))

    def expected(
        self, arguments: dict[str, Any], some: np.ndarray, by_8_bits: bool, grids: tuple[float, ...]
    ) -> budget.Expected:
        """Results of the sequences `some`."""
        cache = arguments["cache"]
        lengths = np.clip(np.asarray(cache.lengths), 0, np.asarray(cache.capacities))
        rows = float8_rows.arguments_of(arguments["q"], cache, self.layer, lengths)
        options = {name: getattr(self.case, name) for name in ("mask", "softcap", "scale")}
        options |= {"sinks": self.sinks}
        if by_8_bits:
            own = {name: x[some] for name, x in rows.items()} | options
            return budget.attention(own, random=True, grids=grids)
        plain = {"q": arguments["q"]} | {name: rows[name] for name in ("kv_lengths", "q_offset")}
        for side in "kv":
            numbers, scales = (
                float8_rows.dense(cache, getattr(cache, side + end), self.layer, lengths)
                for end in ("", "_scale")
            )
            plain[side] = numbers.astype(np.float64) * scales[..., None]
        plain = {name: np.asarray(x)[some] for name, x in plain.items()} | options
        return budget.over_quantized(plain, random=True, grids=grids)


def _takes_8_bits(subject: Subject, arguments: dict[str, Any]) -> bool:
    """Whether Hopper's kernel serves the call."""
    if subject.implementation == "reference":
        return False
    options = {name: x for name, x in arguments.items() if name not in ("q", "cache")}
    options |= {"layer": jnp.int32(0)} if "layer" in options else {}  # a known one must be in range
    options = bind.DecodeCall(**options)
    problem, _ = bind.decode(arguments["q"], arguments["cache"], options)
    chosen = dispatch.select(problem, subject.implementation)
    return getattr(chosen, "module", None) == "prefill.float8_sm90"


def attend(*, implementation: str | None, **arguments: Any) -> tuple[Any, Any]:
    return pa.decode_attention_with_lse(**arguments, implementation=implementation)


def run(case: Case, place: fuzz.Place, tally: fuzz.Tally) -> None:
    few = mock.patch.multiple(float8_sm90, FEWEST_PAIRS=0, FEWEST_COLUMNS=0)
    with few:  # small problems
        if not place.lowered:
            return _run(case, place, tally)
        with fuzz.pretended(case, place) as generation:
            arguments = _Filled.of(case).arguments(0)
            fuzz.lower("decode", attend, arguments, generation, tally)
        return None


def _run(case: Case, place: fuzz.Place, tally: fuzz.Tally) -> None:
    filled = _Filled.of(case)
    for turn in fuzz.turns(place, tally):
        arguments = filled.arguments(turn)
        for subject in place.subjects:
            with fuzz.by(subject, turn):
                _try(filled, subject, arguments, tally)


def _try(filled: _Filled, subject: Subject, arguments: dict[str, Any], tally: fuzz.Tally) -> None:
    if not fuzz.takes(subject, "decode", attend, arguments):
        return
    tally.calls[subject.name] += 1
    with subject.active():
        by_8_bits = _takes_8_bits(subject, arguments)
    lost = filled.lost(arguments)
    got = subject.call(attend, **arguments)
    results = {name: np.asarray(x) for name, x in zip(("out", "lse"), got, strict=True)}
    for name, x in results.items():
        assert np.isnan(np.float32(x[lost])).all(), f"a lost sequence is not NaN: {name}"
    some = np.flatnonzero(~lost)
    if some.size:
        expected = functools.partial(filled.expected, arguments, some, by_8_bits)
        fuzz.check({name: x[some] for name, x in results.items()}, expected, tally)


def simpler(case: Case) -> Iterator[dict[str, Any]]:
    plain = {"softcap": None, "sinks": False, "layers": None, "spread": 0, "mask": CAUSAL}
    plain |= {"scale": None, "fast": False, "dtype": "float8_e4m3fn", "sequences": 1}
    plain |= {"head_dim": 64, "v_head_dim": 64, "capacity": -(-case.capacity // 16) * 8}
    yield from ({name: value} for name, value in plain.items())
    yield {"kind": "stacked", "page_size": None}
    yield {"q_heads": case.q_heads // case.kv_heads, "kv_heads": 1}
    yield {"q_len": max(case.q_len // 2, 1)}
