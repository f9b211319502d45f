"""Random problems of attention with functions of positions, and of attention over packed rows, as
`fuzz` runs them.

The oracle of functions evaluates them in NumPy for all positions: a mask becomes an array, what a
score function adds becomes a bias. Packed rows are sequences in batch rows of their own
(`tests.api.test_packed_attention.Packed`).
"""

import dataclasses
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_attn as pa
from pallas_attn.masks import CAUSAL, FULL, Mask, sliding_window
from tests.api import test_packed_attention as packed_rows
from tests.support import budget, fuzz, subjects
from tests.support.problems import case as _case

POSITIONS = 1024  # more than any query or key has


class Round(NamedTuple):
    """A call with its inputs, and what is expected: `expected(tensor_cores, grids=..)`, of the
    results as `results` shows them.
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]
    expected: Callable[..., budget.Expected]
    turn: int
    results: Callable[[Any], Any] = lambda got: got
    operation: str = "flash_backward"  # the last that follows from the call

    def try_each(self, place: fuzz.Place, tally: fuzz.Tally) -> None:
        for subject in place.subjects:
            if not fuzz.takes(subject, self.operation, self.function, self.arguments):
                continue
            tally.calls[subject.name] += 1
            with fuzz.by(subject, self.turn):
                got = jax.tree.map(np.array, subject.call(self.function, **self.arguments))
                expected = functools.partial(self.expected, subject.tensor_cores)
                fuzz.check(self.results(got), expected, tally)


# ---- functions of positions ----------------------------------------------------------------------


def _part(number: Any, size: int) -> Any:
    """The number of the part of `size` that has a row, as `kv_blocks` computes it."""
    if isinstance(number, np.ndarray):
        return number // size
    return lax.div(number, np.int32(size))


def _bytes(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Which of two numbers of 8 bits it is."""
    return jnp.where(q % 4 < kv % 5, jnp.uint8(3), jnp.uint8(200)) == jnp.uint8(3)


def _narrow(b: Any, h: Any, q: Any, kv: Any, x: Any, y: Any) -> Any:
    """Each term in arithmetic that numbers of another type would do otherwise."""
    captured = jnp.asarray(BYTES)
    return (x[q] + x[kv] > 0) ^ (y[q] - y[kv] < y[kv]) ^ (captured[q] > captured[kv])


BYTES = np.random.default_rng(11).integers(-128, 128, POSITIONS).astype(np.int8)
# Tiles of 128 keys of the first 128 queries are seen in part, and of the others whole or not.
BLOCKS = np.bool([[1, 0, 1], [0, 1, 1], [1, 1, 0]])[:, np.arange(64) % 3]
BLOCKS = np.resize(np.concatenate([BLOCKS, BLOCKS[:, ::-1]]), (64, 64))
# Functions of batch row, query head, query and key, and the names of the arrays that they read.
MASKS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "documents": (lambda b, h, q, kv, ids: ids[b, q] == ids[b, kv], ("ids",)),
    "prefix": (lambda b, h, q, kv, n: kv < n[b], ("ends",)),
    "signs": (lambda b, h, q, kv, t: t[h, q - kv + POSITIONS], ("signs",)),
    "near": (lambda b, h, q, kv, n: q - kv < n[h], ("widths",)),
    "blocks": (lambda b, h, q, kv: (q // 32 >= kv // 32) & ((q + kv) % 3 != h % 2), ()),
    "dilated": (lambda b, h, q, kv: kv % 4 == q % 4, ()),
    "causal": (lambda b, h, q, kv: q >= kv, ()),
    "batch": (lambda b, h, q, kv: (kv < 70 * b + 30) | (q - kv > 64), ()),
    "distant": (lambda b, h, q, kv: (kv % 16 == q % 16) & (abs(q - kv) > 3), ()),
    "narrow": (_narrow, ("bytes", "unsigned")),
    "bytes": (_bytes, ()),
    "tiles": (lambda b, h, q, kv, t: t[q // 64, kv // 64], ("blocks",)),
    "nothing": (lambda b, h, q, kv: q < -kv - 10, ()),
    # Block lists, as `kv_blocks` makes them
    "lists": (lambda b, h, q, kv, seen: seen[b, h // 2, q // 64, kv // 32], ("seen",)),
    "pairs": (
        lambda b, h, q, kv, seen: seen[b, _part(h, 2), _part(q, 64), _part(kv, 64)],
        ("seen",),
    ),
}
# Functions whose results are added to a score, likewise.
ADDED: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "alibi": (lambda b, h, q, kv, slope: -slope[h] * abs(q - kv), ("slopes",)),
    "linear": (lambda b, h, q, kv, slope: slope[h] * (kv - q), ("slopes",)),
    "table": (lambda b, h, q, kv, t: t[h, q - kv + POSITIONS], ("table",)),
    "keys": (lambda b, h, q, kv, t: t[kv % 16], ("few",)),
    "of_rows": (lambda b, h, q, kv, slope: 0.25 * q - slope[h] * (q - kv), ("slopes",)),
    "queries": (lambda b, h, q, kv, slope: slope[h] * q, ("slopes",)),
}
BEND = 20.0
JOINED: dict[str, Callable[[Any, Any], Any]] = {
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "and not": lambda x, y: x & ~y,
}


@dataclasses.dataclass(frozen=True)
class Case(_case.AttentionCase):
    """`terms`: names of masks, each with how it joins those before it; `added`: of a score. `bent`:
    the function caps the score, too, at `BEND`.
    """

    terms: tuple[tuple[str, str], ...] = ()
    added: str | None = None
    bent: bool = False


def draw(seed: int, tiny: bool) -> Case:
    drawn, pick = fuzz.draw_attention(seed, tiny), random.Random(f"fuzz functions {seed}")
    fields = {f.name: getattr(drawn, f.name) for f in dataclasses.fields(drawn) if f.init}
    offset = drawn.q_offset if isinstance(drawn.q_offset, int) else 0
    added = pick.choice((None, *ADDED))
    names = pick.sample(tuple(MASKS), pick.randint(1 if added is None else 0, 3))
    fields |= {"rotary": None, "rotary_positions": False, "q_offset": max(offset, 0)}
    fields |= {"bias_shape": None, "mask": pick.choice((FULL, drawn.mask))}
    terms = tuple((pick.choice(tuple(JOINED)), name) for name in names)
    bent = added is not None and drawn.softcap is None and pick.random() < 0.3
    return Case(**fields, terms=terms, added=added, bent=bent)


def arrays_of(case: Case, turn: int) -> dict[str, np.ndarray]:
    """The arrays that functions read."""
    rng, rows, heads = np.random.default_rng((turn, 7)), case.batch, case.q_heads
    normal = functools.partial(rng.standard_normal, dtype=np.float32)
    edges = rng.choice(np.int32([-1, 0, 1, 64, fuzz.MOST, fuzz.LEAST]), rows)
    ends = np.where(rng.random(rows) < 0.3, edges, rng.integers(0, case.kv_len + 1, rows))
    ids = rng.integers(0, 4, (rows, POSITIONS)).astype(np.int32)
    return {
        "ids": np.sort(ids, axis=1) if turn % 2 else ids,
        "ends": ends.astype(np.int32),
        "seen": rng.random((rows, heads, POSITIONS // 64, POSITIONS // 32)) < 0.4,
        "signs": rng.random((heads, 2 * POSITIONS)) < 0.7,
        "widths": rng.integers(-2, 300, heads).astype(np.int32),
        "slopes": rng.random(heads, dtype=np.float32) / 8,
        "table": normal((heads, 2 * POSITIONS)),
        "few": normal(16),
        "bytes": BYTES,
        "unsigned": rng.integers(0, 2**32, POSITIONS).astype(np.uint32),
        "blocks": BLOCKS,
    }


def functions(case: Case, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """The arguments `mask` and `score`."""
    mask: Any = case.mask
    for how, name in case.terms:
        function, names = MASKS[name]
        mask = JOINED[how](mask, pa.mask_fn(function, *(arrays[n] for n in names)))
    if case.added is None:
        return {"mask": mask}
    function, names = ADDED[case.added]
    capped = lambda s: BEND * jnp.tanh(s / BEND) if case.bent else s  # noqa: E731
    added = lambda s, b, h, q, kv, *aux: capped(s) + function(b, h, q, kv, *aux)  # noqa: E731
    return {"mask": mask, "score": pa.score_fn(added, *(arrays[n] for n in names))}


def _written_out(case: Case, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The functions as arrays, by NumPy."""
    assert isinstance(case.q_offset, int)
    sizes = (case.batch, case.q_heads, case.q_len, case.kv_len)
    b, h, q, kv = (x.astype(np.int32) for x in np.ogrid[tuple(map(slice, sizes))])
    q = q + case.q_offset
    # Functions read integers of fewer bits as int32.
    arrays = {n: x.astype(np.int32) if x.dtype == np.int8 else x for n, x in arrays.items()}
    seen = np.broadcast_to(case.mask.allows(q, kv), sizes)
    for how, name in case.terms:
        function, names = MASKS[name]
        seen = JOINED[how](seen, function(b, h, q, kv, *(arrays[n] for n in names)))
    dense = {"mask_array": np.broadcast_to(seen, sizes)}
    if case.added is not None:
        function, names = ADDED[case.added]
        added = function(b, h, q, kv, *(arrays[n] for n in names))
        dense["bias"] = np.broadcast_to(np.asarray(added, np.float32), sizes)
    return dense | ({"softcap": BEND} if case.bent else {})


def run(case: Case, place: fuzz.Place, tally: fuzz.Tally) -> None:
    options = {name: x for name, x in case.options().items() if x is not None}
    function = subjects.forward_and_backward
    if place.lowered:
        with fuzz.pretended(case, place) as generation:
            arguments = fuzz.attention_inputs(case, 0)[0] | options
            arguments |= functions(case, arrays_of(case, 0))
            fuzz.lower("flash_backward", function, arguments, generation, tally)
        return
    for turn in fuzz.turns(place, tally):
        arrays = arrays_of(case, turn)
        handed, plain = fuzz.attention_inputs(case, turn)
        dense = _written_out(case, arrays)
        dense["mask_array"] = dense["mask_array"] & np.asarray(plain.get("mask_array", True))
        if "bias" in plain:
            dense["bias"] = dense.get("bias", np.float32(0)) + np.asarray(plain["bias"], np.float32)
        arguments = handed | options | functions(case, arrays)
        wanted = functools.partial(fuzz.attention_expected, plain | dense, options | {"mask": FULL})
        round_ = Round(function, arguments, functools.cache(wanted), turn)
        round_.try_each(place, tally)


def simpler(case: Case) -> Iterator[dict[str, Any]]:
    for number in range(len(case.terms)):
        yield {"terms": case.terms[:number] + case.terms[number + 1 :]}
    yield {"added": None}
    yield from fuzz.simpler_attention(case)


# ---- packed rows ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rows:
    """Packed rows of `count` sequences. `apart`: keys have starts of their own; `offsets`: those of
    queries are an array.
    """

    seed: int
    count: int
    rows: int
    keys: int
    heads: tuple[int, int]
    dim: int
    dtype: str = "bfloat16"
    mask: Mask = FULL
    softcap: float | None = None
    precision: str | None = None
    sinks: bool = False
    apart: bool = False
    offsets: bool = False
    deterministic: bool = False

    def drawn(self, turn: int) -> packed_rows.Packed:
        """The starts of a round, with some that are out of order or out of range."""
        rng = np.random.default_rng((self.seed, turn))
        sizes = (self.rows, self.keys) if self.apart else (self.rows,)
        meant = [np.sort(rng.integers(0, size + 1, self.count + 1)) for size in sizes]
        told = [starts.astype(np.int64) for starts in meant]
        for starts, size in zip(told, sizes, strict=True):
            if turn % 3 == 2:  # below 0 is 0, beyond the rows is their number
                starts[starts == starts[0]] = np.where(starts[0] == 0, fuzz.LEAST, starts[0])
                starts[starts == size] = fuzz.MOST
        rest = [None] * (not self.apart)
        offsets = rng.integers(-20, self.keys + 1, self.count)
        static = {"mask": self.mask, "softcap": self.softcap, "precision": self.precision}
        static |= {"deterministic": self.deterministic or None}
        return packed_rows.Packed(
            *[tuple(x.tolist()) for x in meant],
            rows=self.rows,
            keys=self.keys if self.apart else self.rows,
            q_offset=tuple(offsets.tolist()) if self.offsets else 0,
            sinks=self.sinks,
            heads=self.heads,
            dim=self.dim,
            static=tuple((name, x) for name, x in static.items() if x is not None),
            told=(*(tuple(x.tolist()) for x in told), *rest),
        )


def draw_rows(seed: int, tiny: bool) -> Rows:
    pick = random.Random(f"fuzz packed {seed}")
    kv_heads, dtype = (
        pick.randint(1, 2),
        pick.choice(("bfloat16", "bfloat16", "float16", "float32")),
    )
    most = (40, 70) if tiny else (1, 64, 129, 200, 333, 500)
    window = pick.choice((1, 30, 100))
    masks = (FULL, CAUSAL, CAUSAL, sliding_window(window), Mask(window, 3), Mask(None, window))
    return Rows(
        seed,
        count=pick.choice((1, 2, 3, 8, 20)),
        rows=pick.choice(most),
        keys=pick.choice(most),
        heads=(kv_heads * pick.choice((1, 1, 2, 4)), kv_heads),
        dim=pick.choice((8, 64) if tiny else (8, 64, 64, 72, 128, 192)),
        dtype=dtype,
        mask=pick.choice(masks),
        softcap=pick.choice((None, None, 20.0)),
        precision=pick.choice((None, "highest")) if dtype == "float32" else None,
        sinks=pick.random() < 0.25,
        apart=pick.random() < 0.4,
        offsets=pick.random() < 0.3,
        deterministic=pick.random() < 0.25,
    )


def run_rows(case: Rows, place: fuzz.Place, tally: fuzz.Tally) -> None:
    function = packed_rows.with_gradients
    for turn in range(1) if place.lowered else fuzz.turns(place, tally):
        packed = case.drawn(turn)
        arrays = packed.arrays(case.dtype, seed=turn)
        do, dlse = packed.cotangents(case.dtype, seed=turn)
        options = packed.options()
        arguments = {"arrays": arrays, "starts": packed.starts(), **options}
        handed = packed.spoilt(do, dlse)
        arguments |= dict(zip(("do", "dlse"), map(jnp.asarray, handed), strict=True))
        if place.lowered:
            with fuzz.pretended(case, place) as generation:
                fuzz.lower("flash_backward", function, arguments, generation, tally)
            return
        finite = {name: jnp.nan_to_num(x) for name, x in arrays.items()}
        wanted = lambda cores, grids: packed.expected(finite, do, dlse, True, grids)  # noqa: E731,B023
        round_ = Round(
            function, arguments, functools.cache(wanted), turn, packed.results_by_sequence
        )
        round_.try_each(place, tally)


def simpler_rows(case: Rows) -> Iterator[dict[str, Any]]:
    plain = {"softcap": None, "precision": None, "sinks": False, "apart": False, "offsets": False}
    plain |= {"deterministic": False, "mask": FULL, "dtype": "bfloat16", "dim": 64}
    yield from ({name: value} for name, value in plain.items())
    yield from ({"count": 1}, {"heads": (1, 1)}, {"rows": 64}, {"keys": 64})
