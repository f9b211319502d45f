"""RoPE and a norm of K on its way into a cache, and of q on its way into attention: against the
definition in float64, on every implementation, and in every cache.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import RMSNorm, Rotary
from pallas_attn._call import device
from tests.api.test_integers import cache_of, filled, normal
from tests.support import mosaic, subjects

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

CAPACITY = 48
LENGTHS, NEW = (0, 5, 40, 43), (3, 0, 2, 7)  # the last overflows by 2


@dataclasses.dataclass(frozen=True)
class Case:
    kind: str = "stacked"
    head_dim: int = 64
    dims: int = 64  # columns that are rotated
    first: int = 0
    interleaved: bool = False
    eps: float | None = None
    cache_dtype: str | None = None  # dtype of a quantised cache
    weight_dtype: str = "float32"
    packed: bool = False

    def arguments(self, rng):
        """`rotary` and `norm`."""
        arguments = {}
        if self.dims:
            options = {"interleaved": self.interleaved, "first": self.first}
            arguments["rotary"] = Rotary.create(CAPACITY + 2, self.dims, base=100.0, **options)
        if self.eps is not None:
            arguments["norm"] = RMSNorm(normal(rng, self.weight_dtype, self.head_dim), self.eps)
        return arguments


CASES = (
    Case(),
    Case(kind="paged", dims=0, eps=1e-6, weight_dtype="bfloat16", packed=True),
    Case(kind="per_sequence", head_dim=72, dims=24, first=8, eps=1e-5),
    Case(kind="stacked", head_dim=40, dims=12, first=4, interleaved=True, eps=0.5, packed=True),
    Case(kind="paged", cache_dtype="int8", interleaved=True, eps=1e-6),
    Case(kind="stacked", head_dim=80, dims=80, cache_dtype="float8_e4m3fn"),
)
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{CASES.index(case)}")


def defined(x, position, rotary=None, norm=None):
    """In float64: x [rows, heads, H] at positions [rows]."""
    x = np.asarray(x, np.float64)
    if norm is not None:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.eps)
        x = x * np.asarray(norm.weight, np.float64)
    if rotary is not None:
        pairs = rotary.cos.shape[1]
        for j in range(pairs):
            a = rotary.first + (2 * j if rotary.interleaved else j)
            b = a + (1 if rotary.interleaved else pairs)
            c, s = (np.asarray(t, np.float64)[position, j, None] for t in (rotary.cos, rotary.sin))
            x[..., a], x[..., b] = x[..., a] * c - x[..., b] * s, x[..., b] * c + x[..., a] * s
    return x


def held_rows(cache, m):
    """K of a sequence, position by position: [capacity, K, H] in float64."""

    def whole(k):
        k = jax.tree.map(lambda x: np.asarray(x, np.float64), k)
        if cache.kind == "stacked":
            return k[m].swapaxes(0, 1)
        if cache.kind == "per_sequence":
            return k[m].swapaxes(0, 1)
        pages = k[np.asarray(cache.page_table)[m]]
        return pages.swapaxes(1, 2).reshape(-1, *pages.shape[1:2], *pages.shape[3:])

    rows = whole(cache.k)
    return rows * whole(cache.k_scale)[..., None] if cache.quantized else rows


def written(k, v, cache, case, arguments, implementation):
    """The cache with NEW rows more of each sequence."""
    call = functools.partial(pa.write_kv, implementation=implementation, **arguments)
    cache = cache.extend(jnp.array(NEW, jnp.int32))
    if not case.packed:
        return call(cache, k, v)
    rows = [jnp.concatenate([x[m, :n] for m, n in enumerate(NEW)]) for x in (k, v)]
    return call(cache, *rows, starts=jnp.array([0, *np.cumsum(NEW)], jnp.int32))


@pytest.mark.parametrize("subject", subjects.rows("append"))
@every_case
def test_written_rows(rng, subject, case):
    dtype = subject.dtype
    options = {"head_dim": case.head_dim}
    cache = cache_of("paged" if case.kind == "paged" else case.kind, 4, CAPACITY,
                     case.cache_dtype or dtype, **options)  # fmt: skip
    cache = filled(rng, cache) if case.cache_dtype is None else with_pages(cache)
    cache = dataclasses.replace(cache, lengths=jnp.array(LENGTHS, jnp.int32))
    k, v = (normal(rng, dtype, 4, 7, 1, case.head_dim) for _ in range(2))
    arguments = case.arguments(rng)
    rest = {"case": case, "arguments": arguments}
    with subject.active():
        call = functools.partial(written, implementation=subject.implementation, **rest)
        got = jax.block_until_ready(jax.jit(call)(k, v, cache))
    plain = jax.jit(
        functools.partial(written, implementation="reference", **rest | {"arguments": {}})
    )
    plain = plain(k, v, cache)
    jax.tree.map(np.testing.assert_array_equal, *((x.v, x.v_scale) for x in (got, plain)))
    step = {"int8": 0.5 / 127, "float8_e4m3fn": 2.0**-4}.get(case.cache_dtype)
    for m, (length, new) in enumerate(zip(LENGTHS, NEW, strict=True)):
        # On a GPU quantised rows may have columns more, of zeros.
        have, before = (held_rows(x, m)[..., : case.head_dim] for x in (got, plain))
        end = min(length + new, CAPACITY)
        want = defined(k[m, : end - length], np.arange(length, end), **arguments)
        size = np.abs(want).max(axis=-1, keepdims=True, initial=0)
        if step is None:
            eps = float(jnp.finfo(dtype).eps)
            allowed = 0.51 * eps * np.abs(want) + 2.0**-21 * size
        else:
            allowed = (step if case.cache_dtype == "int8" else step * 1.1) * size * 1.01
        assert (np.abs(have[length:end] - want) <= allowed).all()
        have[length:end] = before[length:end]
        np.testing.assert_array_equal(have, before)


@pytest.mark.parametrize("subject", subjects.rows("append"))
@pytest.mark.parametrize("cache_dtype", [None, "int8"])
def test_tables_for_the_capacity_that_was_asked_for(rng, subject, cache_dtype):
    """Pages have rows for five more positions: K and q become NaN there, and nowhere else."""
    options = {"capacity": 11, "dtype": cache_dtype or subject.dtype}
    cache = pa.PagedCache.create(3, 6, 8, 1, 64, **options)
    assert cache.capacities == (16,) * 3 and cache.longest == 11
    cache = cache.extend(jnp.array([11, 9, 14], jnp.int32))
    k, v = (normal(rng, subject.dtype, 3, 14, 1, 64) for _ in range(2))
    q = normal(rng, subject.dtype, 3, 2, 64)
    short, long = (Rotary.create(n, 16, first=8) for n in (11, 16))

    def run(cache, k, v, q, rotary, implementation):
        cache = pa.write_kv(cache, k, v, rotary=rotary, implementation=implementation)
        out = pa.decode_attention(q, cache, rotary=rotary, implementation="reference")
        return cache, out

    with subject.active():
        call = functools.partial(jax.jit(run, static_argnums=5), cache, k, v, q)
        (got, out), (want, whole) = jax.block_until_ready(
            [call(rotary, subject.implementation) for rotary in (short, long)]
        )
    assert np.isnan(np.asarray(out[2], np.float32)).all()
    np.testing.assert_array_equal(out[:2], whole[:2])
    have, rows = held_rows(got, 2), held_rows(want, 2)
    columns = np.s_[8:24] if cache_dtype is None else np.s_[:]  # a quantised row is NaN throughout
    rows[11:14, :, columns] = np.nan
    np.testing.assert_array_equal(have, rows)
    with pytest.raises(ValueError, match="positions at least the 11 rows that a sequence of"):
        pa.write_kv(cache, k, v, rotary=Rotary.create(10, 16))


def with_pages(cache):
    if cache.kind != "paged":
        return cache
    table = jnp.arange(cache.pages, dtype=jnp.int32).reshape(cache.page_table.shape)
    return dataclasses.replace(cache, page_table=table)


@pytest.mark.parametrize("packed", [False, True])
def test_queries(rng, packed):
    """Attention of rows that are normed and rotated before it, by the definition."""
    case = Case(dims=32, eps=1e-6)
    arguments, dtype = case.arguments(rng), "float32"
    cache = dataclasses.replace(filled(rng, cache_of("stacked", 4, CAPACITY, dtype, head_dim=64)),
                                lengths=jnp.array((0, 5, 40, 43), jnp.int32))  # fmt: skip
    q = normal(rng, dtype, 4, 3, 2, 64)
    lengths = np.asarray(cache.lengths)
    positions = np.clip(lengths[:, None] - 3 + np.arange(3), 0, None)
    rotated = defined(q.reshape(12, 2, 64), positions.reshape(-1), **arguments).reshape(q.shape)
    want = pa.decode_attention(jnp.asarray(rotated, dtype), cache)
    if packed:
        starts = jnp.arange(0, 15, 3, dtype=jnp.int32)
        got = pa.decode_attention(q.reshape(12, 2, 64), cache, starts=starts, **arguments)
        got = got.reshape(want.shape)
    else:
        got = pa.decode_attention(q, cache, **arguments)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_tables():
    rotary = Rotary.create(9, 6, base=10.0)
    angles = np.arange(9)[:, None] * np.array([1, 10 ** (-1 / 3), 10 ** (-2 / 3)])
    np.testing.assert_allclose(rotary.cos, np.cos(angles), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(rotary.sin, np.sin(angles), rtol=1e-6, atol=1e-7)


@pytest.mark.guards
@pytest.mark.parametrize("case", CASES[2:5], ids=str)
def test_lowers(case):
    """With the layer traced, which the others leave out."""
    dtype = case.cache_dtype or "bfloat16"
    cache = cache_of(case.kind, 4, CAPACITY, dtype, head_dim=case.head_dim, layers=2)
    arguments = case.arguments(np.random.default_rng(0))
    rows = jax.ShapeDtypeStruct((4, 7, 1, case.head_dim), jnp.bfloat16)

    def call(cache, k, v, layer):
        return pa.write_kv(cache.extend(7), k, v, layer=layer, **arguments)

    with device.assume("sm90"):
        text = mosaic.lower_for_cuda(call, cache, rows, rows, jax.ShapeDtypeStruct((), jnp.int32))
    assert text.count("mosaic_gpu") and "append" in text
