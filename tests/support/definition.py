"""Attention, its gradients and its tangents from the definition: all scores at once, derivatives
written out by hand.

In float64 it is the oracle of tests and benchmarks; in float32, with the operands of matmuls
rounded as tensor cores need them, it is the naive witness that tolerances come from. It computes in
NumPy, which compiles nothing, or in jax.numpy, where a benchmark calls it for some query rows of
one kv head at a time. It uses nothing of the package but `masks`. Loops, their finite differences
and autodiff prove it (tests/api/test_attention.py, test_gradients.py).
"""

import functools
import math
import operator
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn.masks import FULL, Mask

Array = Any  # a NumPy or a JAX array
ARRAYS = {"q", "k", "v", "bias", "sinks"}  # floating-point arrays, which have gradients
ARRAYS |= {"q_offset", "q_lengths", "kv_lengths", "segment_ids", "mask_array"}


def _unchanged(x: Array) -> Array:
    return x


class Arithmetic(NamedTuple):
    """Sums are in `dtype`; the functions round numbers on their way into a matmul."""

    dtype: type[np.floating] | str
    score: Callable[[Array], Array] = _unchanged  # q and k
    value: Callable[[Array], Array] = _unchanged  # v and dO
    made: Callable[[Array], Array] = _unchanged  # the probabilities, and dS
    stored: Callable[[Array], Array] = _unchanged  # out, as the backward pass reads it
    lse: Any = None  # read by the backward pass and by tangents; None: their own
    out: Any = None  # read by tangents; None: their own
    scores: Callable[[Array, Array], Array] = np.matmul  # q @ k
    of_rows: Callable[[Array, Array], Array] = operator.matmul  # sums over query rows
    tanh: Callable[[Array], Array] | None = None  # for a softcap; None: `xp`'s


SPREAD = 64.0  # factor of probabilities before they are rounded to float8
EXACT = Arithmetic(np.float64)


def naive(dtype: str | None, grid: float = 1.0) -> Arithmetic:
    """Sums in float32 of products in `dtype`. "tf32": scores in TF32, all else in two bfloat16
    terms; "terms": all but scores without the last bit of a float32, which its terms may lose;
    "float8": probabilities in float8_e4m3fn, all else in float32; None: all in float32. Numbers
    that are rounded to fewer bits than float32 has are multiplied by `grid` before.
    """
    if dtype is None:
        return Arithmetic(np.float32)
    if dtype == "float8":
        return Arithmetic(np.float32, made=functools.partial(_in_float8, by=grid * SPREAD))
    if dtype == "terms":
        return Arithmetic(np.float32, value=lambda x: cut(x, 1), made=lambda x: cut(x, 1))
    by = np.float32(grid)

    def terms(x):
        return cut(x * by, 0xFF) / by

    def rounded(x):
        return (x * by).astype(jnp.dtype(dtype)).astype(np.float32) / by

    if dtype == "tf32":
        return Arithmetic(np.float32, nearest, terms, terms)
    return Arithmetic(np.float32, made=rounded, stored=rounded)


def _in_float8(x: Array, by: float) -> Array:
    """Probabilities rounded to float8, relative to the largest of their row."""
    unit = np.float32(by) / x.max(axis=-1, keepdims=True).clip(2.0**-100)
    if isinstance(x, jax.Array):
        return _rounded_by_steps(x * unit) / unit
    return (x * unit).astype(jnp.float8_e4m3fn).astype(np.float32) / unit


def _rounded_by_steps(x: jax.Array) -> jax.Array:
    """Positive float32 up to 448 rounded to float8_e4m3fn: XLA drops casts there and back."""
    bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000
    step = jnp.maximum(lax.bitcast_convert_type(bits, jnp.float32) / 8, 2.0**-9)
    return jnp.round(x / step) * step


def dequantised(arrays: dict[str, Any]) -> dict[str, Any]:
    """Arguments in which float8 q, k and v and their scales become q, k and v in float64."""
    wide = dict(arrays)
    for name in "qkv":
        x = np.asarray(arrays[name]).astype(np.float32).astype(np.float64)
        scale = wide.pop(f"{name}_scale", None)
        if scale is not None:
            scale = np.asarray(scale, np.float64)
            scale = scale.reshape((1,) * (3 - scale.ndim) + scale.shape)
            x = x * np.repeat(scale, rows_of_scale(x, scale), axis=1)[:, : x.shape[1], :, None]
        wide[name] = x
    return wide


def rows_of_scale(x: Array, scale: Array) -> int:
    """Rows of x [B, rows, heads, dim] that share one of the scales [B, n, heads]: all, a multiple
    of 128 of them, or an equal part where those would be too many.
    """
    rows, blocks = x.shape[1], scale.shape[1]
    if 1 < blocks <= math.ceil(rows / 128):
        return math.ceil(rows / blocks / 128) * 128
    return rows // blocks


def one_by_one(a: Array, b: Array) -> Array:
    """a @ b, its products added in their order, as a thread of a GPU does. The number of partial
    sums that NumPy makes at a time, and so its error, depends on the machine.
    """
    total = a[..., :1] * b[..., :1, :]
    for n in range(1, a.shape[-1]):
        total += a[..., n : n + 1] * b[..., n : n + 1, :]
    return total


def towards_zero(a: Array, b: Array, some: int = 8) -> Array:
    """a @ b in float32 as a tensor core adds up: `some` products at a time, sums rounded to 0."""
    total = np.zeros((*a.shape[:-1], b.shape[-1]), np.float32)
    for n in range(0, a.shape[-1], some):
        more, other = (
            x.astype(np.float64) for x in (a[..., n : n + some], b[..., n : n + some, :])
        )
        exact = total + more @ other
        near = exact.astype(np.float32)
        lower = np.nextafter(near, np.float32(0))
        total = np.where(np.abs(near) > np.abs(exact), lower, near)
    return total


def tanh_by_exponentials(x: Array) -> Array:
    """tanh as a GPU computes it, which has an instruction for exponentials: off by 2e-7."""
    return 1 - 2 / (np.exp(2 * x) + 1)


def float8_scores(arguments: dict[str, Any]) -> Array:
    """q @ k of float8 numbers with scales, [B, K, N / K, T, S], as Hopper's tensor cores add up:
    each step adds 32 products to the sum so far. All 33 terms are cut to `FLOAT8_BITS` bits below
    the largest exponent (a product's: the sum of its factors'), then the new sum to as many below
    its own. In six problems of the fuzzer an lse is off by as much as on an H200, to a thousandth
    (results/fuzz).
    """
    numbers = {name: np.asarray(arguments[name]).astype(np.float32) for name in "qk"}
    units = {name: np.ones_like(x[..., :1]) for name, x in numbers.items()}
    scales = dequantised({**arguments, **units, "v": units["k"]})
    kv_heads = numbers["k"].shape[2]
    (q, q_scale), (k, k_scale) = (
        (_by_head(numbers[name], kv_heads), _by_head(scales[name], kv_heads)) for name in "qk"
    )
    total = np.zeros((*q.shape[:-1], k.shape[-2]), np.float32)
    for at in np.ndindex(q.shape[:-1]):  # a query's scores: few enough to stay in a CPU's cache
        keys, before = k[at[0], at[1], 0], total[at]
        for n in range(0, q.shape[-1], 32):
            some = q[at][None, n : n + 32], keys[:, n : n + 32]
            largest = np.maximum(sum(map(_exponent, some)).max(axis=1), _exponent(before))
            terms = np.concatenate([some[0] * some[1], before[:, None]], axis=1)
            after = _cut_behind(terms, largest[:, None]).sum(axis=1)
            before = _cut_behind(after, _exponent(after))
        total[at] = before
    return (total * q_scale * k_scale.swapaxes(-1, -2)).astype(np.float32)


FLOAT8_BITS = 13


def _exponent(x: Array) -> Array:
    """floor(log2 |x|); of 0 it is -60, which is never the largest."""
    return np.where(x == 0, -60, np.frexp(x)[1] - 1)


def _cut_behind(x: Array, exponent: Array) -> Array:
    """x towards zero, to `FLOAT8_BITS` bits behind the first bit of a number of that exponent."""
    last = np.ldexp(np.float32(1), exponent - FLOAT8_BITS)
    return np.trunc(x / last) * last


def nearest(x: Array) -> Array:
    """float32 rounded to TF32's 11 bits."""
    bits = x.copy().view(np.int32)
    return cut((bits + 0xFFF + (bits >> 13 & 1)).view(np.float32), 0x1FFF)


def cut(x: Array, bits: int) -> Array:
    """float32 without its last bits."""
    return (x.copy().view(np.int32) & ~bits).view(np.float32)


def attention(  # noqa: PLR0913
    arrays: dict[str, Any],
    do: Array | None = None,
    dlse: Array | None = None,
    *,
    mask: Mask = FULL,
    scale: float | None = None,
    softcap: float | None = None,
    q_offset: int = 0,
    arithmetic: Arithmetic = EXACT,
    xp: ModuleType = np,
) -> dict[str, Array]:
    """out [B, T, N, Hv] and lse [B, N, T]; where `do` or `dlse` is given, dq, dk, dv, dbias and
    dsinks too. `arrays`: as `flash_attention` takes them, finite also past their lengths. `xp`:
    numpy or jax.numpy.
    """
    do, dlse = (_as_wide(x, arithmetic, xp) for x in (do, dlse))
    f = _forward(arrays, mask, scale, softcap, q_offset, arithmetic, xp)
    results = {"out": f.out, "lse": f.lse}
    if do is None and dlse is None:
        return results

    probs, weights, grouped = f.probs, f.weights, f.weights.shape
    if arithmetic.lse is not None:
        probs = xp.exp(f.logits - xp.where(f.lse == -np.inf, 0, arithmetic.lse)[..., None])
        weights = arithmetic.made(probs).reshape(grouped)
    do = xp.zeros_like(f.out) if do is None else do
    delta = (do * arithmetic.stored(f.out)).sum(axis=-1).swapaxes(1, 2)
    row = (0 if dlse is None else dlse) - delta  # [B, N, T]; d lse / d logit is the probability
    do = arithmetic.value(_by_head(do, f.k.shape[1]))
    dlogits = probs * ((do @ f.v.swapaxes(-1, -2)).reshape(probs.shape) + row[..., None])
    ds = arithmetic.made(dlogits.reshape(grouped) * f.slope)
    over_rows = lambda x, y: arithmetic.of_rows(x.swapaxes(-1, -2), y)  # noqa: E731
    results["dq"] = _by_position(ds @ f.k)
    results["dk"] = _by_position(over_rows(ds, f.q).sum(axis=2, keepdims=True))
    results["dv"] = _by_position(over_rows(weights, do).sum(axis=2, keepdims=True))
    if "bias" in arrays:
        results["dbias"] = _summed_to(np.shape(arrays["bias"]), dlogits)
    if "sinks" in arrays:
        results["dsinks"] = (f.sink * row).sum(axis=(0, 2))
    return results


def tangents(
    arrays: dict[str, Any],
    along: dict[str, Any],
    *,
    mask: Mask = FULL,
    scale: float | None = None,
    softcap: float | None = None,
    q_offset: int = 0,
    arithmetic: Arithmetic = EXACT,
) -> dict[str, Array]:
    """Tangents out_dot [B, T, N, Hv] and lse_dot [B, N, T], by the tangents `along` of some of q,
    k, v, bias and sinks, in NumPy.
    """
    f = _forward(arrays, mask, scale, softcap, q_offset, arithmetic, np)
    if arithmetic.lse is not None:
        finite = np.where(f.lse == -np.inf, 0, arithmetic.lse)
        probs = np.exp(f.logits - finite[..., None])
        weights = arithmetic.made(probs).reshape(f.weights.shape)
        f = f._replace(probs=probs, weights=weights)
    along = _as_wide(along, arithmetic, np)
    heads = {name: _by_head(along[name], f.k.shape[1]) for name in "qkv" if name in along}
    logits = np.zeros_like(f.weights)
    if "q" in along:
        logits += arithmetic.scores(arithmetic.score(heads["q"]), f.k.swapaxes(-1, -2))
    if "k" in along:
        logits += arithmetic.scores(f.q, arithmetic.score(heads["k"]).swapaxes(-1, -2))
    moved = f.probs * ((logits * f.slope).reshape(f.probs.shape) + along.get("bias", 0))
    sinks = along.get("sinks", np.zeros(f.probs.shape[1], moved.dtype))
    row = moved.sum(axis=-1) + f.sink * sinks[:, None]  # tangent of lse
    out = arithmetic.made(moved).reshape(f.weights.shape) @ f.v
    if "v" in along:
        out = out + f.weights @ arithmetic.value(heads["v"])
    stored = arithmetic.stored(f.out) if arithmetic.out is None else arithmetic.out
    less = row.swapaxes(1, 2)[..., None] * stored
    return {"out_dot": _by_position(out) - less, "lse_dot": row}


class _Forward(NamedTuple):
    """The forward pass: what its derivatives read. Axes of heads are [K, N / K], where q, k, v and
    weights are concerned.
    """

    q: Array  # rounded for matmuls, as k and v are
    k: Array
    v: Array
    slope: Array  # derivative of a logit by the product of query and key
    logits: Array  # [B, N, T, S]
    probs: Array  # [B, N, T, S]
    weights: Array  # probabilities as they meet v
    sink: Array  # probabilities of the sinks, [B, N, T]
    out: Array  # [B, T, N, Hv]
    lse: Array  # [B, N, T]


def _forward(
    arrays: dict[str, Any],
    mask: Mask,
    scale: float | None,
    softcap: float | None,
    q_offset: int,
    arithmetic: Arithmetic,
    xp: ModuleType,
) -> _Forward:
    assert set(arrays) <= ARRAYS, f"unknown: {set(arrays) - ARRAYS}"
    arrays = _as_wide(arrays, arithmetic, xp)
    kv_heads = arrays["k"].shape[2]
    q, k, v = (_by_head(arrays[name], kv_heads) for name in ("q", "k", "v"))
    q, k, v = arithmetic.score(q), arithmetic.score(k), arithmetic.value(v)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    grouped = (*q.shape[:-1], k.shape[-2])  # [B, K, N / K, T, S]
    shape = (len(q), q.shape[1] * q.shape[2], *grouped[3:])  # [B, N, T, S]
    tanh = arithmetic.tanh or xp.tanh
    logits, slope = _capped(arithmetic.scores(q, k.swapaxes(-1, -2)) * scale, softcap, tanh)
    logits = logits.reshape(shape) + arrays.get("bias", 0)
    logits = xp.where(_seen(arrays, shape, mask, q_offset, xp), logits, -np.inf)
    probs, lse, sink = _softmax(logits, arrays.get("sinks"), xp)
    weights = arithmetic.made(probs).reshape(grouped)
    out = _by_position(weights @ v)
    return _Forward(q, k, v, slope * scale, logits, probs, weights, sink, out, lse)


def _as_wide(tree: Any, arithmetic: Arithmetic, xp: ModuleType) -> Any:
    return jax.tree.map(lambda x: _wide(xp.asarray(x), arithmetic.dtype), tree)


def _wide(x: Array, dtype: type[np.floating] | str) -> Array:
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _by_head(x: Array, kv_heads: int) -> Array:
    """[B, L, N, H] -> [B, K, N / K, L, H]"""
    x = x.reshape(*x.shape[:2], kv_heads, x.shape[2] // kv_heads, x.shape[3])
    return x.transpose(0, 2, 3, 1, 4).copy()


def _by_position(x: Array) -> Array:
    """[B, K, N / K, L, H] -> [B, L, N, H]"""
    batch, kv_heads, group, length, dim = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * group, dim)


def _capped(logits: Array, softcap: float | None, tanh: Any) -> tuple[Array, Any]:
    """The logits, and their slope."""
    if softcap is None:
        return logits, 1
    share = tanh(logits / float(softcap))
    return float(softcap) * share, 1 - share * share


def _seen(
    arrays: dict[str, Any], shape: tuple[int, ...], mask: Mask, q_offset: int, xp: ModuleType
) -> Array:
    """bool[B, N, T, S]"""

    def column(name):
        return None if name not in arrays else arrays[name][:, None, None, None]

    rows, keys = (xp.arange(n, dtype=np.int32).reshape(1, 1, -1, 1) for n in shape[2:])
    keys = keys.swapaxes(2, 3)
    offset = xp.reshape(arrays.get("q_offset", q_offset), (-1, 1, 1, 1))
    ids = arrays.get("segment_ids")
    ids = (None, None) if ids is None else (ids[0][:, None, :, None], ids[1][:, None, None])
    seen = mask.allows(offset + rows, keys, column("kv_lengths"), *ids)
    if "q_lengths" in arrays:
        seen = seen & (rows < column("q_lengths"))
    if "mask_array" in arrays:
        seen = seen & arrays["mask_array"]
    return xp.broadcast_to(seen, shape)


def _softmax(logits: Array, sinks: Array | None, xp: ModuleType) -> tuple[Array, Array, Array]:
    """Probabilities [B, N, T, S], lse [B, N, T], and the probability of the sink [B, N, T]. A row
    without a key, or with logits of -inf alone, has only zeros and the lse -inf. A sink of inf has
    the probability 1 in any other row, whose lse is inf.
    """
    top = logits.max(axis=-1, initial=-np.inf)
    empty = top == -np.inf
    sink = xp.full_like(top, -np.inf)
    if sinks is not None:
        sink = xp.where(empty, -np.inf, sinks[None, :, None])
    endless = sink == np.inf
    sink = xp.where(endless, 0, sink)
    top = xp.where(empty, 0, xp.maximum(top, sink))
    total = xp.exp(logits - top[..., None]).sum(axis=-1) + xp.exp(sink - top)
    lse = xp.where(empty, -np.inf, top + xp.log(xp.where(empty, 1, total)))
    lse = xp.where(endless, np.inf, lse)
    finite = xp.where(empty | endless, 0, lse)
    probs = xp.where(endless[..., None], 0, xp.exp(logits - finite[..., None]))
    return probs, lse, xp.where(endless, 1, xp.exp(sink - finite))


def _summed_to(shape: tuple[int, ...], x: Array) -> Array:
    """The sum of x over the axes along which an array of this shape was broadcast to it."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    axes = [axis for axis, size in enumerate(shape) if size == 1]
    return x.sum(axis=tuple(axes), keepdims=True)
