"""Random calls over pages with K and V interleaved: new rows are written and attended to, with
lengths, pages, first rows and numbers of sequences that may be any int32.
"""

import dataclasses
import random
import zlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

import pallas_attn as pa
from tests.support import fuzz, hard_data
from tests.support.subjects import Subject

NARROW = ("float8_e4m3fn", "float8_e5m2", "int8")
# Errors relative to the largest number of a result.
ERRORS = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 2e-3}
SMALL = ("kv_lens", "page_indices", "cu_q_lens", "num_seqs")


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of a call. `scales`: whether K and V have factors."""

    sequences: int
    tokens: int
    width: int  # pages of a sequence
    page_size: int
    pages: int
    kv_heads: int
    group: int
    head_dim: int
    dtype: str = "bfloat16"
    page_dtype: str | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    scales: bool = False
    sinks: bool = False

    def options(self) -> dict[str, Any]:
        names = ("sliding_window", "soft_cap")
        options = {name: getattr(self, name) for name in names}
        return options | {"sm_scale": self.head_dim**-0.5} | self.factors()

    def factors(self) -> dict[str, float]:
        return {"k_scale": 0.5, "v_scale": 3.0} if self.scales else {}


def draw(seed: int, tiny: bool) -> Case:
    pick = random.Random(f"ragged {seed}")
    dtype = pick.choice(("bfloat16", "bfloat16", "float16", "float32"))
    narrow = pick.choice((None, None, *NARROW)) if dtype != "float32" else None
    size = pick.choice((1, 5, 8, 16, 32, 64, 128))
    most = 96 if tiny else 400
    sequences = pick.choice((1, 2, 5)) if tiny else pick.choice((1, 3, 9, 40))
    width = -(-pick.randint(1, most) // size)
    return Case(
        sequences=sequences,
        tokens=pick.choice((1, sequences, 40) if tiny else (1, sequences, 70, 300)),
        width=width,
        page_size=size,
        pages=max(1, int(sequences * width * pick.choice((0.5, 1.0, 1.2)))),
        kv_heads=pick.choice((1, 2, 3)),
        group=pick.choice((1, 2, 4, 7)),
        head_dim=pick.choice((64, 128) if narrow else (64, 64, 128, 72, 256)),
        dtype=dtype,
        page_dtype=narrow,
        sliding_window=pick.choice((None, None, 1, 30, 10**6)),
        soft_cap=pick.choice((None, None, 5.0, -5.0)),
        scales=pick.random() < 0.4,
        sinks=pick.random() < 0.3,
    )


def simpler(case: Case) -> Iterator[dict[str, Any]]:
    plain = {"sliding_window": None, "soft_cap": None, "scales": False, "sinks": False}
    plain |= {"page_dtype": None, "dtype": "bfloat16", "head_dim": 64, "kv_heads": 1, "group": 1}
    yield from ({name: value} for name, value in plain.items())
    for name in ("sequences", "tokens", "width"):
        if (half := getattr(case, name) // 2) > 0:
            yield {name: half}


def arguments(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    """The arrays of both calls. Pages are in use once, as a server has them, or anything."""
    m, most = case.sequences, case.width * case.page_size

    def spoiled(x: np.ndarray, share: float) -> np.ndarray:
        odd = rng.choice([fuzz.LEAST, -1, 0, 1, most, most + 1, fuzz.MOST], x.shape)
        return np.where(rng.random(x.shape) < share, odd, x).astype(np.int32)

    ends = np.sort(rng.integers(0, case.tokens + 1, m + 1))
    share = rng.choice([0.0, 0.0, 0.15])
    table = np.resize(rng.permutation(case.pages), (m, case.width))
    shape = (case.pages, case.page_size, 2 * case.kv_heads, case.head_dim)
    dtype = jnp.dtype(case.page_dtype or case.dtype)
    numbers = rng.standard_normal(shape, np.float32) * (30 if dtype == jnp.int8 else 1)
    rows = (case.tokens, case.kv_heads, case.head_dim)
    new = {x: rng.standard_normal(rows, np.float32) for x in ("k", "v")}
    heads = case.kv_heads * case.group
    q = rng.standard_normal((case.tokens, heads, case.head_dim), np.float32)
    small = {
        "kv_lens": spoiled(rng.integers(0, most + 1, m), share),
        "page_indices": spoiled(table, share / 2),
        "cu_q_lens": spoiled(ends, share),
        "num_seqs": spoiled(np.array([rng.integers(0, m + 1)]), share),
    }
    arrays = {"q": jnp.asarray(q, case.dtype), "kv_pages": jnp.asarray(numbers).astype(dtype)}
    arrays |= {name: jnp.asarray(x, case.dtype) for name, x in new.items()}
    if case.sinks:
        sinks = rng.standard_normal(heads, np.float32)
        sinks = hard_data.sinks_without_end(sinks) if rng.random() < 0.3 else sinks
        arrays["sinks"] = jnp.asarray(sinks)
    return arrays | {name: jnp.asarray(x) for name, x in small.items()}


def owners(tokens: int, arrays: dict[str, np.ndarray]) -> list[tuple[int, int, int]]:
    """(sequence, its first row, the end of its rows) of those that count."""
    count = int(np.clip(arrays["num_seqs"][0], 0, len(arrays["kv_lens"])))
    starts = np.clip(arrays["cu_q_lens"][: count + 1].astype(np.int64), 0, tokens)
    starts = np.maximum.accumulate(starts)
    return [(m, int(starts[m]), int(starts[m + 1])) for m in range(count)]


def written(arrays: dict[str, np.ndarray], factors: dict[str, float]) -> np.ndarray:
    """The pages after an update. Rows that go to one place are refused by `_of_one_owner`."""
    pages = arrays["kv_pages"].copy()
    rows = []
    for side in "kv":
        x = arrays[side].astype(np.float32) * np.float32(1.0 / factors.get(f"{side}_scale", 1.0))
        rows.append((np.round(x) if pages.dtype == np.int8 else x).astype(pages.dtype))
    table = arrays["page_indices"]
    for m, first, end in owners(len(arrays["k"]), arrays):
        for row in range(first, end):
            position = int(arrays["kv_lens"][m]) - end + row
            slot, within = divmod(position, pages.shape[1])
            if 0 <= slot < table.shape[1] and 0 <= (page := table[m, slot]) < len(pages):
                pages[page, within, 0::2], pages[page, within, 1::2] = (x[row] for x in rows)
    return pages


def attended(case: Case, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The output in float64, and which rows of it are NaN."""
    q = arrays["q"].astype(np.float64)
    out, lost = np.zeros(q.shape), np.zeros(len(q), bool)
    pages = arrays["kv_pages"].astype(np.float32).astype(np.float64)
    factors, window = case.factors(), case.sliding_window or fuzz.MOST
    for m, first, end in owners(len(q), arrays):
        table, length = arrays["page_indices"][m], max(int(arrays["kv_lens"][m]), 0)
        there = (table >= 0) & (table < len(pages))
        if length > np.cumprod(there).sum() * case.page_size:
            lost[first:end] = True
            continue
        keys = pages[np.where(there, table, 0)].reshape(-1, *pages.shape[2:])[:length]
        k, v = (np.repeat(keys[:, n::2], case.group, axis=1) for n in (0, 1))
        logits = np.einsum("qhd,khd->hqk", q[first:end], k) * case.head_dim**-0.5
        logits *= factors.get("k_scale", 1.0)
        if case.soft_cap is not None:
            logits = case.soft_cap * np.tanh(logits / case.soft_cap)
        at = length - end + np.arange(first, end)[:, None] - np.arange(length)
        logits = np.where((at >= 0) & (at < window), logits, -np.inf)
        sinks = arrays.get("sinks", np.full(q.shape[1], -np.inf)).astype(np.float64)
        sinks = np.broadcast_to(sinks[:, None, None], (*logits.shape[:2], 1))
        both = np.concatenate([logits, sinks], axis=-1)
        top = both.max(axis=-1, keepdims=True)
        weights = np.exp(both - np.where(np.isfinite(top), top, 0))
        total = weights.sum(axis=-1, keepdims=True)
        weights = weights[..., :-1] / np.where(total == 0, 1, total)  # 0 beside a sink of inf
        out[first:end] = np.einsum("hqk,khd->qhd", weights, v) * factors.get("v_scale", 1.0)
    return out, lost


def run(case: Case, place: fuzz.Place, tally: fuzz.Tally) -> None:
    rng = np.random.default_rng(zlib.crc32(str(case).encode()))
    options, factors = case.options(), case.factors()
    drawn = arguments(case, rng)
    read, write = _split(drawn)
    if place.lowered:
        with fuzz.pretended(case, place) as generation:
            fuzz.lower("append", pa.update_kv_pages, write | factors, generation, tally)
            fuzz.lower("decode", pa.ragged_paged_attention, read | options, generation, tally)
        return
    for turn in fuzz.turns(place, tally):
        drawn = arguments(case, rng) if turn else drawn
        for subject in place.subjects:
            with fuzz.by(subject, turn):
                _call(case, subject, drawn, tally)


def _call(case: Case, subject: Subject, drawn: dict[str, Any], tally: fuzz.Tally) -> None:
    """Both calls by one implementation, where it takes them."""
    small = {name: np.asarray(x) for name, x in drawn.items()}
    read, write = _split(drawn)
    factors = case.factors()
    update, attend = pa.update_kv_pages, pa.ragged_paged_attention
    if _of_one_owner(case, small) and fuzz.takes(subject, "append", update, write | factors):
        got = np.asarray(subject.call(update, **write, **factors))
        tally.calls[subject.name] += 1
        right = written(small, factors).view(np.uint8)
        assert (got.view(np.uint8) == right).all(), "other bytes in the pages"
    if fuzz.takes(subject, "decode", attend, read | case.options()):
        got = subject.call(attend, **read, **case.options())
        tally.calls[subject.name] += 1
        _check(case, np.asarray(got).astype(np.float64), *attended(case, small))


def _split(drawn: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of attention and those of an update."""
    small = {name: drawn[name] for name in ("kv_pages", *SMALL)}
    read = {name: drawn[name] for name in ("q", "sinks") if name in drawn}
    return read | small, small | {"k": drawn["k"], "v": drawn["v"]}


def _of_one_owner(case: Case, arrays: dict[str, np.ndarray]) -> bool:
    """Whether no two sequences have a page in common, so that no row is written twice."""
    pages = arrays["page_indices"].reshape(-1)
    pages = pages[(pages >= 0) & (pages < case.pages)]
    return len(np.unique(pages)) == len(pages)


def _check(case: Case, got: np.ndarray, want: np.ndarray, lost: np.ndarray) -> None:
    assert np.isnan(got[lost]).all(), "a lost sequence is not NaN"
    size = max(np.abs(want).max(initial=0.0), 1e-3)
    error = np.abs(got - want)[~lost].max(initial=0.0) / size
    assert error <= ERRORS[case.dtype], f"off by {error:.2g} of the largest number"
