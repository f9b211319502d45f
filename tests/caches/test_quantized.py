"""Quantised caches, and those that keep V within K: what is stored, bit for bit; what is never lost
where it is read. tests/api/test_cases.py compares what is read with float64.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_attn as pa
from pallas_attn import CAUSAL, PagedCache, PerSequenceCache, StackedCache
from pallas_attn._call import quantization
from tests.support import append_cases, messages, subjects
from tests.support.fuzz_caches import Held
from tests.support.quantized import LARGEST, awkward_rows, quantized

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

KINDS = ("per_sequence", "stacked", "paged")
every_kind = pytest.mark.parametrize("kind", KINDS)
every_dtype = pytest.mark.parametrize("dtype", LARGEST)


# ---- a row ---------------------------------------------------------------------------------------


@pytest.mark.by_xla
@every_dtype
def test_a_row_bit_for_bit(rng, dtype):
    rows = awkward_rows(rng)
    got = jax.jit(quantization.quantize, static_argnums=1)(rows, dtype)
    append_cases.assert_same_bytes(got, quantized(rows, dtype))


@every_dtype
@pytest.mark.parametrize("rows_dtype", ["bfloat16", "float16"])
def test_a_row_of_another_dtype(rng, dtype, rows_dtype):
    rows = rng.standard_normal((99, 24)).astype(jnp.dtype(rows_dtype))
    got = jax.jit(quantization.quantize, static_argnums=1)(rows, dtype)
    append_cases.assert_same_bytes(got, quantized(rows, dtype))


@every_dtype
def test_what_comes_back_of_a_row(rng, dtype):
    """The largest number is exact; every other within half a step; zeros are zeros, NaN is NaN."""
    rows = awkward_rows(rng)
    numbers, scales = quantized(rows, dtype)
    back = numbers.astype(np.float32) * scales[:, None]
    finite = np.isfinite(rows).all(axis=1)
    assert np.isnan(back[~finite]).all() and not np.isnan(back[finite]).any()
    top = np.abs(rows[finite]).max(axis=1, keepdims=True)
    steps = {"float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3, "int8": 0}[dtype]
    floor = np.maximum(top.astype(np.float64) / LARGEST[dtype], 2.0**-100)
    smallest = {"float8_e4m3fn": 2.0**-10, "float8_e5m2": 2.0**-17, "int8": 0.5}[dtype]
    allowed = (steps * np.abs(rows[finite]) + smallest * floor) * (1 + 1e-6)
    assert (np.abs(back[finite].astype(np.float64) - rows[finite]) <= allowed).all()
    large = top[:, 0] > 2.0**-80
    kept = np.abs(back[finite]).max(axis=1, keepdims=True)[large]
    np.testing.assert_allclose(kept, top[large], rtol=3e-7)


@pytest.mark.by_xla
def test_the_reciprocal_is_rounded_correctly(rng):
    x = rng.integers(2**23, 252 * 2**23, 2**18, np.int32).view(np.float32)
    powers = np.float32(2.0) ** np.arange(-126, 125, dtype=np.float32)
    x = np.concatenate([x, powers, np.nextafter(powers, np.float32(np.inf))])
    got = jax.jit(quantization.reciprocal)(x)
    np.testing.assert_array_equal(got, np.float32(1) / x)


# ---- the caches ----------------------------------------------------------------------------------


def create(kind, dtype, *, dims=(24, 16), **options):
    """Three sequences; of 12, 14 and 16 rows where capacities may differ."""
    options |= {"dtype": dtype, "v_head_dim": dims[1]}
    return {
        "per_sequence": lambda: PerSequenceCache.create((12, 14, 16), 2, dims[0], **options),
        "stacked": lambda: StackedCache.create(3, 12, 2, dims[0], **options),
        "paged": lambda: PagedCache.create(3, 11, 4, 2, dims[0], capacity=12, **options),
    }[kind]()


def buffers(cache):
    held = {name: getattr(cache, name) for name in ("k", "v", "k_scale", "v_scale")}
    return {name: x for name, x in held.items() if x is not None}


def marked(cache, rng):
    """The cache with random bits in every buffer."""

    def noise(x):
        return jnp.asarray(append_cases.random_bits(rng, x.shape, x.dtype))

    return dataclasses.replace(cache, **jax.tree.map(noise, buffers(cache)))


def new_rows(rng, t, dims=(24, 16), dtype="float32"):
    rows = [rng.standard_normal((3, t, 2, dim)) * 3 for dim in dims]
    rows[0][1, 0, 1, 2], rows[1][2, -1, 0, 0] = np.nan, np.inf
    return [jnp.asarray(x.astype(jnp.dtype(dtype))) for x in rows]


@dataclasses.dataclass(frozen=True)
class Append:
    kind: str
    dtype: str
    shared: bool = False
    layers: int | None = None
    rows_dtype: str = "bfloat16"

    @property
    def name(self):
        facts = (self.kind, self.dtype, "shared" * self.shared, "layers" * bool(self.layers))
        return "-".join(filter(None, (*facts, self.rows_dtype)))

    def cache(self):
        return create(self.kind, self.dtype, layers=self.layers, shared_kv=self.shared)

    def arguments(self, rng=None, t=1):
        k, v = new_rows(rng or np.random.default_rng(0), t, dtype=self.rows_dtype)
        return {"k": k} if self.shared else {"k": k, "v": v}

    def call(self):
        layer = {} if self.layers is None else {"layer": jnp.int32(1)}
        return pa.write_kv, {"cache": self.cache(), **self.arguments(), **layer}


APPENDS = [
    *(Append(kind, dtype) for kind in KINDS for dtype in (*LARGEST, "bfloat16")),
    *(
        Append(kind, "float8_e4m3fn", rows_dtype=x)
        for kind in KINDS
        for x in ("float32", "float16")
    ),
    *(Append(kind, "float8_e5m2", layers=3) for kind in KINDS),
    *(Append(kind, dtype, shared=True) for kind in KINDS for dtype in ("bfloat16", "int8")),
]


# Rows are quantised before anybody asks what kind of cache it is; the kernel has every kind and
# dtype interpreted in tests/kernels/append/test_append_quantized.py.
FEW = [
    *(Append(kind, dtype) for kind, dtype in zip(KINDS, LARGEST, strict=True)),
    *(x for x in APPENDS if x.layers or (x.shared and x.kind != "stacked")),
    *(x for x in APPENDS if x.kind == "paged" and x.rows_dtype != "bfloat16"),
]


@pytest.mark.parametrize(
    "subject, case",
    subjects.pairs("append", APPENDS, Append.call, interpreted=FEW, reference=FEW),
)
def test_every_byte_of_every_buffer(rng, subject, case):
    """Appends of 1 row, of ragged chunks, and past the capacity: what was written, and that nothing
    else was.
    """
    cache = marked(case.cache(), rng)
    layer = None if case.layers is None else 1
    at = {} if layer is None else {"layer": jnp.int32(layer)}
    for t, counts in ((1, (1, 1, 1)), (7, (5, 0, 3)), (7, (7, 1, 6)), (7, (4, 2, 2))):
        cache = cache.extend(jnp.asarray(counts, jnp.int32))
        new, wanted = case.arguments(rng, t), Held.of_cache(cache)
        wanted.write(tuple(map(np.asarray, new.values())), layer)
        cache = subject.call(pa.write_kv, cache, **new, **at)
        append_cases.assert_same_bytes(buffers(cache), wanted.arrays)
    assert np.asarray(cache.overflowed)[0]


@every_kind
def test_arrays_with_scales(rng, kind):
    """append_kv_arrays: scales in, scales out."""
    cache = create(kind, "int8")
    k, v = new_rows(rng, 2)
    whole = pa.append_kv(cache, k, v)
    got = pa.append_kv_arrays(
        cache.k,
        cache.v,
        k,
        v,
        cache.lengths,
        page_table=cache.extend(2).page_table,
        k_scales=cache.k_scale,
        v_scales=cache.v_scale,
    )
    append_cases.assert_same_bytes(got, (whole.k, whole.v, whole.k_scale, whole.v_scale))


@every_kind
@every_dtype
@pytest.mark.parametrize("layers", [None, 3])
def test_what_a_quantised_cache_says_of_itself(kind, dtype, layers):
    cache = create(kind, dtype, layers=layers)
    assert cache.quantized and cache.dtype == dtype and not cache.shared_kv
    assert (cache.layers, cache.kv_heads, cache.head_dim, cache.v_head_dim) == (layers, 2, 24, 16)
    for side in "kv":
        pairs = [jax.tree.leaves(getattr(cache, name)) for name in (side, f"{side}_scale")]
        for numbers, scales in zip(*pairs, strict=True):
            assert scales.shape == numbers.shape[:-1] and scales.dtype == jnp.float32
    assert cache.num_bytes == sum(x.nbytes for x in jax.tree.leaves(buffers(cache)))
    rows = {"per_sequence": 42, "stacked": 36, "paged": 44}[kind] * (layers or 1)
    assert cache.num_bytes == rows * 2 * (24 + 16 + 2 * 4)
    bare = create(kind, dtype, layers=layers, scales=False)
    assert not bare.quantized and bare.k_scale is None and bare.v_scale is None
    assert not create(kind, "bfloat16").quantized
    assert jax.tree.structure(jax.tree.map(lambda x: x, cache)) == jax.tree.structure(cache)


@every_kind
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_what_a_cache_with_v_in_k_says_of_itself(kind, dtype):
    cache = create(kind, dtype, shared_kv=True)
    assert cache.shared_kv and cache.v is None and cache.v_scale is None
    assert (cache.head_dim, cache.v_head_dim) == (24, 16)
    assert cache.num_bytes == sum(x.nbytes for x in jax.tree.leaves((cache.k, cache.k_scale)))
    same = jax.tree.unflatten(jax.tree.structure(cache), jax.tree.leaves(cache))
    assert same.v_head_dim == 16


@every_kind
def test_numbers_without_scales_are_as_they_come(rng, kind):
    """scales=False: int8 rows go in as they are, and are read as the numbers they are."""
    k, v = (rng.integers(-9, 9, (3, 2, 2, dim)).astype(np.int8) for dim in (24, 16))
    cache = pa.append_kv(create(kind, "int8", scales=False), k, v)
    q = jnp.asarray(rng.standard_normal((3, 2, 2, 24)), jnp.float32)
    got = pa.decode_attention(q, cache)
    wanted = pa.flash_attention(q, *(x.astype(np.float32) for x in (k, v)), mask=CAUSAL)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_a_fork_copies_scales_with_their_page(rng):
    cache = create("paged", "float8_e4m3fn", layers=2)
    k, v = new_rows(rng, 6)
    cache = cache.extend(jnp.asarray([6, 1, 0], jnp.int32))
    for layer in range(2):
        cache = pa.write_kv(cache, k + layer, v - layer, layer=layer)
    forked = cache.fork(0, 2)
    shared, copied = np.asarray(forked.page_table)[[0, 2]][:, 1]
    assert shared != copied
    for name, pool in buffers(forked).items():
        pool = np.asarray(pool).view(np.uint8 if pool.dtype.itemsize == 1 else np.int32)
        assert pool[:, shared].any(), name
        np.testing.assert_array_equal(pool[:, copied], pool[:, shared], err_msg=name)


@pytest.mark.by_xla
@every_kind
def test_donated_scales_are_updated_in_place(rng, kind):
    cache = create(kind, "float8_e4m3fn", layers=2)
    k, v = new_rows(rng, 1)

    def step(cache):
        cache = cache.extend(1)
        body = lambda cache, layer: (pa.write_kv(cache, k, v, layer=layer), None)  # noqa: E731
        return jax.lax.scan(body, cache, jnp.arange(2, dtype=jnp.int32))[0]

    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(buffers(cache))]
    after = jax.jit(step, donate_argnums=0)(cache)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(buffers(after))] == before


# ---- decode --------------------------------------------------------------------------------------


@pytest.mark.parametrize("subject", subjects.rows("decode", but=("portable_kernels",)))
def test_small_numbers_of_out(rng, subject):
    """A second key (docs/accuracy.md) has a weight of about 1e-8, and alone has
    numbers where the first stores 0.
    """
    q, k, v = (rng.standard_normal((32, 2, 64)) for _ in range(3))
    q = k[:, 1:] + 0.3 * q
    gap = np.einsum("mnh,mh->mn", q, k[:, 1] - k[:, 0]) / 8
    q = jnp.asarray(q * 18.4 / gap.mean(), jnp.bfloat16)[:, None]
    cache = StackedCache.create(32, 8, 1, 64, dtype="int8")
    cache = pa.append_kv(cache, *(jnp.asarray(x, jnp.bfloat16)[:, :, None] for x in (k, v)),
                         implementation="reference")  # fmt: skip
    out = np.float64(subject.call(pa.decode_attention, q, cache))[:, 0]
    k_scale, v_scale = (np.float64(x)[:, 0, :2, None] for x in (cache.k_scale, cache.v_scale))
    k, numbers = (np.float64(x)[:, 0, :2] for x in (cache.k, cache.v))
    k, v = k * k_scale, numbers * v_scale
    logits = np.einsum("mnh,mkh->mnk", np.float64(q)[:, 0], k) / 8
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    want, sizes = p @ v, p @ np.abs(v)
    allowed = 2.0**-8 * np.abs(want) + 2.0**-10 * sizes
    if subject.name != "reference":  # weights are relative to the largest
        least = 2.0**-25 * v_scale.max(axis=1, keepdims=True)
        allowed += least * np.abs(numbers).sum(axis=1, keepdims=True)
    assert (np.abs(out - want) <= allowed).all()
    assert (np.abs(want) < 1e-5).sum() > 10 and np.median(np.abs(want)) > 0.1


@pytest.mark.by_xla
@pytest.mark.parametrize("kind, dtype", list(zip(KINDS, LARGEST, strict=True)))
def test_nan_and_infinity_are_never_lost(rng, kind, dtype):
    """A row with one NaN (or infinity) in it is NaN, and with it the head that reads it."""
    cache = create(kind, dtype)
    k, v = (jnp.asarray(rng.standard_normal((3, 5, 2, dim)), jnp.float32) for dim in (24, 16))
    k = k.at[1, 2, 1, 7].set(jnp.nan)
    v = v.at[2, 4, 0, 3].set(-jnp.inf)
    out = pa.decode_attention(jnp.ones((3, 4, 24)), pa.append_kv(cache, k, v))
    np.testing.assert_array_equal(
        np.isnan(out).all(axis=-1),
        [[False] * 4, [False, False, True, True], [True, True, False, False]],
    )
    assert np.isfinite(np.asarray(out[0])).all()


# ---- errors --------------------------------------------------------------------------------------


def _stacked(dtype="int8", **options):
    return StackedCache.create(2, 6, 2, 8, dtype=dtype, **options)


_ROW = np.zeros((2, 2, 8), np.float32)
_ARRAY, _SCALES = np.zeros((2, 2, 6, 8), np.int8), np.zeros((2, 2, 6), np.float32)

ERRORS = (
    lambda: _stacked("bfloat16", scales=True),
    lambda: _stacked(shared_kv=True, v_head_dim=9),
    lambda: pa.append_kv(_stacked(), _ROW.astype("int8"), _ROW),
    lambda: pa.append_kv_arrays(
        _ARRAY.astype("float32"), None, _ROW, None, [0, 0], k_scales=_SCALES
    ),
    lambda: pa.append_kv_arrays(_ARRAY, _ARRAY, _ROW, _ROW, [0, 0], k_scales=_SCALES),
    lambda: pa.append_kv_arrays(
        _ARRAY, _ARRAY, _ROW, _ROW, [0, 0], k_scales=_SCALES, v_scales=_SCALES[..., :5]
    ),
    lambda: pa.append_kv_arrays([_ARRAY[0]], None, _ROW[:1], None, [0], k_scales=[_SCALES[0]] * 2),
    lambda: pa.append_kv(_stacked(shared_kv=True), _ROW, _ROW),
    lambda: pa.append_kv(_stacked(), _ROW),
    lambda: pa.append_kv(dataclasses.replace(_stacked(), v=None), _ROW),
    lambda: pa.append_kv(dataclasses.replace(_stacked(), v_scale=None), _ROW, _ROW),
)


MESSAGES = {"quantized": ERRORS}


@pytest.mark.parametrize("call, message", messages.cases(MESSAGES))
def test_wrong_arguments(call, message):
    messages.check(call, message)
