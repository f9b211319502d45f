"""Latent caches in FlashMLA's format, 656 bytes a row: what is stored, byte for byte; what is read;
what is refused.

What is expected of a row is said here a second time, in NumPy.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from tests.caches.test_quantized import quantized
from tests.support import subjects

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

SIZES = {"head_dim": 576, "v_head_dim": 512, "shared_kv": True}
FORMAT = SIZES | {"dtype": jnp.float8_e4m3fn, "scales": 128}
INTERPRETED = next(x for x in subjects.ROWS if x.name == "interpreted")
every_kind = pytest.mark.parametrize("kind", ["per_sequence", "stacked", "paged"])


def create(kind, **options):
    """Two sequences of 64 rows."""
    options = FORMAT | options
    if kind == "per_sequence":
        return pa.PerSequenceCache.create((64, 64), 1, **options)
    if kind == "stacked":
        return pa.StackedCache.create(2, 64, 1, **options)
    return pa.PagedCache.create(2, 8, 16, 1, capacity=64, **options)


def as_bytes(rows):
    """uint8[.., 656] of rows [.., 576]."""
    rows = np.asarray(rows)
    lead = rows.shape[:-1]
    numbers, scales = quantized(rows[..., :512].reshape(*lead, 4, 128), "float8_e4m3fn")
    rest = np.ascontiguousarray(rows[..., 512:].astype(np.float32).astype(jnp.bfloat16))
    parts = numbers.reshape(*lead, 512), scales.astype("<f4"), rest
    return np.concatenate([x.view(np.uint8).reshape(*lead, -1) for x in parts], axis=-1)


def rows_of(cache):
    """uint8[M, rows, 656], the rows of the sequences as they lie."""
    if isinstance(cache.k, tuple):
        return np.stack([np.asarray(x)[0] for x in cache.k])
    k = np.asarray(cache.k)
    if cache.page_table is None:
        return k[:, 0]
    return k[np.asarray(cache.page_table)][:, :, 0].reshape(2, -1, 656)


def new_rows(rng, shape, dtype=jnp.bfloat16):
    rows = rng.standard_normal((*shape, 1, 576)) * 2.0 ** rng.integers(-9, 9, (*shape, 1, 576))
    return jnp.asarray(rows, dtype)


class Append(NamedTuple):
    name: str  # kind of the cache
    dtype: str

    def call(self):
        new = jnp.zeros((2, 3, 1, 576), self.dtype)
        return pa.append_kv, {"cache": create(self.name), "k": new}


APPENDS = [
    Append("per_sequence", "float32"),
    Append("stacked", "bfloat16"),
    Append("paged", "float16"),
]


@pytest.mark.parametrize("subject, case", subjects.pairs("append", APPENDS, Append.call))
def test_rows_are_written_byte_for_byte(rng, subject, case):
    kind, dtype = case
    k = new_rows(rng, (2, 3), dtype).at[0, 1, 0, 200].set(jnp.nan).at[1, 0, 0, 575].set(jnp.inf)
    before = subject.call(pa.append_kv, create(kind), k=new_rows(rng, (2, 18)))
    cache = subject.call(pa.append_kv, before, k=k)
    got = rows_of(cache)
    np.testing.assert_array_equal(got[:, 18:21], as_bytes(k[:, :, 0]))
    np.testing.assert_array_equal(got[:, :18], rows_of(before)[:, :18])
    assert not got[:, 21:32].any()


@pytest.mark.guards
def test_packed_rows_are_rotated_first(rng):
    """By the kernel as by the reference: rotary of the columns that stay in bfloat16."""
    angles = rng.uniform(0, 6, (64, 32)).astype(np.float32)
    rotary = pa.Rotary(jnp.cos(angles), jnp.sin(angles), first=512)
    k, starts = new_rows(rng, (5,)), jnp.array([0, 2, 5], jnp.int32)
    cache = create("stacked").extend(jnp.array([2, 3], jnp.int32))
    options = {"k": k, "starts": starts, "rotary": rotary}
    want = pa.write_kv(cache, implementation="reference", **options)
    got = INTERPRETED.call(pa.write_kv, cache, **options)
    np.testing.assert_array_equal(rows_of(got), rows_of(want))
    assert rows_of(got)[1, 2].any()


# ---- decode --------------------------------------------------------------------------------------


class Decode(NamedTuple):
    name: str
    kind: str = "stacked"
    heads: int = 16
    rows: int = 1
    dtype: str = "bfloat16"
    lengths: tuple[int, int] = (190, 63)
    page_size: int = 64
    layers: int | None = None
    packed: bool = False
    mask: pa.Mask = pa.CAUSAL
    softcap: float | None = None

    def cache(self):
        options = FORMAT | {"layers": self.layers}
        if self.kind == "stacked":
            return pa.StackedCache.create(2, 192, 1, **options)
        pages = 2 * 192 // self.page_size + 1
        return pa.PagedCache.create(2, pages, self.page_size, 1, capacity=192, **options)

    def filled(self, rng):
        """The cache with rows up to the lengths, and any bytes behind them."""
        cache, layer = self.cache(), {} if self.layers is None else {"layer": 1}
        k = jnp.asarray(rng.standard_normal((2, max(self.lengths), 1, 576)), jnp.bfloat16)
        cache = cache.extend(jnp.array(self.lengths, jnp.int32))
        noise = jnp.asarray(rng.integers(0, 256, cache.k.shape, np.uint8))
        cache = dataclasses.replace(cache, k=noise)
        return pa.write_kv(cache, k, implementation="reference", **layer)

    def arguments(self, rng=None):
        rng = rng or np.random.default_rng(0)
        lead = (3,) if self.packed else (2, self.rows)
        q = rng.standard_normal((*lead, self.heads, 576)) / 8
        more = {"starts": jnp.array([0, 2, 3], jnp.int32)} if self.packed else {}
        more |= {} if self.layers is None else {"layer": jnp.int32(1)}
        return {"q": jnp.asarray(q, self.dtype), **more, "mask": self.mask, "softcap": self.softcap}

    def call(self):
        return pa.decode_attention_with_lse, {"cache": self.cache(), **self.arguments()}


DECODES = [
    Decode("stacked"),
    Decode(
        "small_pages_window", "paged", 4, 3, "float16", page_size=8,
        mask=pa.sliding_window(100),
    ),
    Decode("more_heads", "paged", 40, layers=2, page_size=16),
    Decode("packed", "paged", 2, packed=True, softcap=4.0),
]  # fmt: skip


@pytest.mark.parametrize("subject, case", subjects.pairs("decode", DECODES, Decode.call))
def test_what_is_read(rng, subject, case):
    """As the reference reads it, which is told rows without what lies behind them."""
    cache, arguments = case.filled(rng), case.arguments(rng)
    got = subject.call(pa.decode_attention_with_lse, cache=cache, **arguments)
    k = jnp.where(as_floats(cache.k), cache.k, 0)
    clean = dataclasses.replace(cache, k=k)
    want = pa.decode_attention_with_lse(cache=clean, implementation="reference", **arguments)
    step = 2.0**-7 if case.dtype == "bfloat16" else 2.0**-10
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(*(np.asarray(z, np.float32) for z in (x, y)), step, step)


def as_floats(k):
    """Whether each row of bytes is finite numbers only."""
    numbers = np.asarray(k)
    ends = np.split(numbers, (512, 528), axis=-1)
    views = zip(ends, (jnp.float8_e4m3fn, np.float32, jnp.bfloat16), strict=True)
    finite = [np.isfinite(np.ascontiguousarray(x).view(t).astype(np.float32)) for x, t in views]
    return np.concatenate(finite, axis=-1).all(axis=-1, keepdims=True)
