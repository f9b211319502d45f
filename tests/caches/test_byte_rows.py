"""Latent caches in FlashMLA's format, 656 bytes a row: what is stored, byte for byte; what is read;
what is refused.

What is expected of a row is said a second time, in NumPy: `tests/support/byte_rows.py`.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn._call import config
from tests.support import subjects
from tests.support.byte_rows import as_bytes, as_floats

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
    uneven: bool = False  # columns differ by powers of two, so scales do
    slopes: bool = False  # a score function, ALiBi
    sinks: bool = False

    def cache(self):
        options = FORMAT | {"layers": self.layers}
        if self.kind == "stacked":
            return pa.StackedCache.create(2, 192, 1, **options)
        pages = 2 * 192 // self.page_size + 1
        return pa.PagedCache.create(2, pages, self.page_size, 1, capacity=192, **options)

    def filled(self, rng):
        """The cache with rows up to the lengths, and any bytes behind them."""
        cache, layer = self.cache(), {} if self.layers is None else {"layer": 1}
        k = rng.standard_normal((2, max(self.lengths), 1, 576))
        if self.uneven:
            k *= np.repeat(2.0 ** rng.integers(-12, 2, (*k.shape[:3], 9)), 64, axis=-1)
        k = jnp.asarray(k, jnp.bfloat16)
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
        if self.slopes:
            more["score"] = pa.score_fn(
                lambda s, b, h, q, kv, m: s - m[h] * (q - kv), jnp.linspace(0.01, 1, self.heads)
            )
        if self.sinks:
            more["sinks"] = jnp.linspace(-1, 1, self.heads)
        return {"q": jnp.asarray(q, self.dtype), **more, "mask": self.mask, "softcap": self.softcap}

    def call(self):
        return pa.decode_attention_with_lse, {"cache": self.cache(), **self.arguments()}


DECODES = [
    Decode("stacked"),
    Decode(
        "small_pages_window", "paged", 4, 3, "float16", page_size=8,
        mask=pa.sliding_window(100),
    ),
    Decode("more_heads", "paged", 40, layers=2, page_size=16, sinks=True),
    Decode("packed", "paged", 2, packed=True, softcap=4.0),
    Decode("uneven", heads=8, dtype="float16", uneven=True),
    Decode("alibi", "paged", 8, 2, slopes=True),
    Decode("packed_alibi", packed=True, slopes=True),
]  # fmt: skip


@pytest.mark.parametrize("subject, case", subjects.pairs("decode", DECODES, Decode.call))
def test_what_is_read(rng, subject, case):
    """The reference gets the same rows, without bytes behind them that are no numbers."""
    cache, arguments = case.filled(rng), case.arguments(rng)
    got = subject.call(pa.decode_attention_with_lse, cache=cache, **arguments)
    finite = np.isfinite(as_floats(cache.k)).all(axis=-1, keepdims=True)
    k = jnp.where(finite, cache.k, 0)
    clean = dataclasses.replace(cache, k=k)
    want = pa.decode_attention_with_lse(cache=clean, implementation="reference", **arguments)
    step = 2.0**-7 if case.dtype == "bfloat16" else 2.0**-10
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(*(np.asarray(z, np.float32) for z in (x, y)), step, step)


@pytest.mark.guards
def test_all_tiles_by_one_block(rng):
    """Slots of both rings are used again."""
    case = Decode("stacked", heads=2)
    cache, arguments = case.filled(rng), case.arguments(rng)
    with config.forced("decode_mla_sm90_byte_rows", {"grid": 1, "stages": 3}):
        got = INTERPRETED.call(pa.decode_attention, cache=cache, **arguments)
    want = INTERPRETED.call(pa.decode_attention, cache=cache, **arguments)
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, want)), 0.01, 0.01)


@pytest.mark.guards
def test_packed_rows_of_the_least_length():
    """They are rows without keys: to count back from it would wrap around."""
    cache = create("paged").extend(jnp.array([0, 4], jnp.int32))
    cache = dataclasses.replace(cache, lengths=jnp.array([-(2**31), 4], jnp.int32))
    q = jnp.ones((4, 2, 576), jnp.bfloat16)
    options = {"q": q, "starts": jnp.array([0, 3, 4], jnp.int32)}
    out, _ = INTERPRETED.call(pa.decode_attention_with_lse, cache=cache, **options)
    assert not np.asarray(out, np.float32).any()


# ---- the rest ------------------------------------------------------------------------------------


@every_kind
def test_what_such_a_cache_says_of_itself(kind):
    cache = create(kind, layers=2)
    assert cache.byte_rows and cache.quantized and cache.shared_kv and cache.v is None
    assert (cache.head_dim, cache.v_head_dim, cache.layers, cache.kv_heads) == (576, 512, 2, 1)
    assert cache.dtype == jnp.float8_e4m3fn and cache.k_scale is None
    assert cache.num_bytes == (2 * 64 if kind != "paged" else 8 * 16) * 2 * 656
    assert "float8_e4m3fn with scales of 128 columns" in repr(cache)
    assert not pa.StackedCache.create(1, 8, 1, **SIZES).byte_rows


def test_rows_are_kept_and_forked(rng):
    """Bytes move as they are."""
    cache = pa.append_kv(create("paged"), new_rows(rng, (2, 20)))
    k = new_rows(rng, (2, 3))
    cache = pa.append_kv(cache, k).keep(2, jnp.array([[2, 0], [1, 2]], jnp.int32)).fork(0, 1)
    want = as_bytes(k[0, [2, 0], 0])
    for m in range(2):
        np.testing.assert_array_equal(rows_of(cache)[m, 20:22], want)


@pytest.mark.parametrize(
    "changes",
    [{"dtype": jnp.float8_e5m2}, {"v_head_dim": 384}, {"head_dim": 512}, {"shared_kv": False}],
    ids=str,
)
def test_other_rows_are_refused(changes):
    with pytest.raises(ValueError, match="scales: 128, a scale for so many columns of V, goes"):
        create("stacked", **changes)


def test_other_scales_are_refused():
    with pytest.raises(ValueError, match="scales: expected True or False, got 64"):
        create("stacked", scales=64)
