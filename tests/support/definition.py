"""Attention and its gradients in NumPy, from the definition: all scores at once, derivatives
written out by hand.

In float64 it is the oracle that `budget` holds every subject to; in float32, with what tensor cores
multiply rounded on its way there, it is the naive witness. Of the package it knows `masks` alone.
Loops, their finite differences and autodiff prove it (tests/api/test_attention.py,
test_gradients.py). NumPy compiles nothing: with XLA a test of new shapes spends most of its time on
that.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn.masks import FULL, Mask

Array = np.ndarray
ARRAYS = {"q", "k", "v", "bias", "sinks"}  # numbers, which have gradients
ARRAYS |= {"q_offset", "q_lengths", "kv_lengths", "segment_ids", "mask_array"}


def _as_it_is(x: Array) -> Array:
    return x


class Arithmetic(NamedTuple):
    """Sums are in `dtype`; the rest is what becomes of numbers on their way into a matmul."""

    dtype: Any
    score: Callable[[Array], Array] = _as_it_is  # q and k
    value: Callable[[Array], Array] = _as_it_is  # v and dO
    made: Callable[[Array], Array] = _as_it_is  # the probabilities, and dS
    stored: Callable[[Array], Array] = _as_it_is  # out, as the backward pass finds it
    lse: Any = None  # that the backward pass is handed; None: its own
    scores: Callable[[Array, Array], Array] = np.matmul  # q @ k


EXACT = Arithmetic(np.float64)


def naive(dtype: str | None, grid: float = 1.0) -> Arithmetic:
    """Sums in float32 of products in `dtype`. "tf32": scores in TF32, all else in two bfloat16
    terms; "terms": all but scores without the last bit of a float32, which its terms may lose;
    None: all in float32. Where more than that is lost, a number is rounded as `grid` times itself.
    """
    if dtype is None:
        return Arithmetic(np.float32)
    if dtype == "terms":
        return Arithmetic(np.float32, value=lambda x: cut(x, 1), made=lambda x: cut(x, 1))
    by = np.float32(grid)

    def terms(x):
        return cut(x * by, 0xFF) / by

    def rounded(x):
        return (x * by).astype(jnp.dtype(dtype)).astype(np.float32) / by

    if dtype == "tf32":
        return Arithmetic(np.float32, nearest, lambda x: cut(x, 0xFF), terms)
    return Arithmetic(np.float32, made=rounded, stored=rounded)


def one_by_one(a: Array, b: Array) -> Array:
    """a @ b, its products added in their order, as a thread of a GPU does. How many partial sums
    NumPy makes at a time, and so how well it adds up, depends on the machine.
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


def nearest(x: Array) -> Array:
    """float32 rounded to TF32's 11 bits."""
    bits = np.ascontiguousarray(x).view(np.int32)
    return cut((bits + 0xFFF + (bits >> 13 & 1)).view(np.float32), 0x1FFF)


def cut(x: Array, bits: int) -> Array:
    """float32 without its last bits."""
    return (np.ascontiguousarray(x).view(np.int32) & ~bits).view(np.float32)


def attention(  # noqa: PLR0913
    arrays: dict[str, Any],
    do: Any = None,
    dlse: Any = None,
    *,
    mask: Mask = FULL,
    scale: float | None = None,
    softcap: float | None = None,
    q_offset: int = 0,
    arithmetic: Arithmetic = EXACT,
) -> dict[str, Array]:
    """out [B, T, N, Hv] and lse [B, N, T]; where `do` or `dlse` is given, dq, dk, dv, dbias and
    dsinks too. `arrays`: as `flash_attention` takes them, finite also past their lengths.
    """
    assert set(arrays) <= ARRAYS, f"unknown: {set(arrays) - ARRAYS}"
    arrays, do, dlse = jax.tree.map(lambda x: _wide(x, arithmetic.dtype), (arrays, do, dlse))
    kv_heads = arrays["k"].shape[2]
    q, k, v = (_by_head(arrays[name], kv_heads) for name in ("q", "k", "v"))
    q, k, v = arithmetic.score(q), arithmetic.score(k), arithmetic.value(v)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    grouped = (*q.shape[:-1], k.shape[-2])  # [B, K, N / K, T, S]
    shape = (len(q), q.shape[1] * q.shape[2], *grouped[3:])  # [B, N, T, S]
    logits, slope = _capped(arithmetic.scores(q, k.swapaxes(-1, -2)) * scale, softcap)
    logits = logits.reshape(shape) + arrays.get("bias", 0)
    logits = np.where(_seen(arrays, shape, mask, q_offset), logits, -np.inf)
    probs, lse, sink = _softmax(logits, arrays.get("sinks"))
    weights = arithmetic.made(probs).reshape(grouped)
    results = {"out": _by_position(weights @ v), "lse": lse}
    if do is None and dlse is None:
        return results

    if arithmetic.lse is not None:
        probs = np.exp(logits - np.where(lse == -np.inf, 0, arithmetic.lse)[..., None])
        weights = arithmetic.made(probs).reshape(grouped)
    do = np.zeros_like(results["out"]) if do is None else do
    delta = (do * arithmetic.stored(results["out"])).sum(axis=-1).swapaxes(1, 2)
    row = (0 if dlse is None else dlse) - delta  # [B, N, T]; d lse / d logit is the probability
    do = arithmetic.value(_by_head(do, kv_heads))
    dlogits = probs * ((do @ v.swapaxes(-1, -2)).reshape(shape) + row[..., None])
    ds = arithmetic.made(dlogits.reshape(grouped) * (slope * scale))
    results["dq"] = _by_position(ds @ k)
    results["dk"] = _by_position((ds.swapaxes(-1, -2) @ q).sum(axis=2, keepdims=True))
    results["dv"] = _by_position((weights.swapaxes(-1, -2) @ do).sum(axis=2, keepdims=True))
    if "bias" in arrays:
        results["dbias"] = _summed_to(arrays["bias"].shape, dlogits)
    if "sinks" in arrays:
        results["dsinks"] = (sink * row).sum(axis=(0, 2))
    return results


def _wide(x: Any, dtype: Any) -> Array:
    x = np.asarray(x)
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _by_head(x: Array, kv_heads: int) -> Array:
    """[B, L, N, H] -> [B, K, N / K, L, H]"""
    x = x.reshape(*x.shape[:2], kv_heads, x.shape[2] // kv_heads, x.shape[3])
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1, 4))


def _by_position(x: Array) -> Array:
    """[B, K, N / K, L, H] -> [B, L, N, H]"""
    batch, kv_heads, group, length, dim = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * group, dim)


def _capped(logits: Array, softcap: float | None) -> tuple[Array, Any]:
    """The logits, and their slope."""
    if softcap is None:
        return logits, 1
    share = np.tanh(logits / float(softcap))
    return float(softcap) * share, 1 - share * share


def _seen(arrays: dict[str, Any], shape: tuple[int, ...], mask: Mask, q_offset: int) -> Array:
    """bool[B, N, T, S]"""

    def column(name):
        return None if name not in arrays else arrays[name][:, None, None, None]

    rows, keys = np.arange(shape[2])[:, None], np.arange(shape[3])
    offset = np.reshape(arrays.get("q_offset", q_offset), (-1, 1, 1, 1))
    ids = arrays.get("segment_ids")
    ids = (None, None) if ids is None else (ids[0][:, None, :, None], ids[1][:, None, None])
    seen = mask.allows(offset + rows, keys, column("kv_lengths"), *ids)
    if "q_lengths" in arrays:
        seen = seen & (rows < column("q_lengths"))
    return np.broadcast_to(seen & arrays.get("mask_array", np.True_), shape)


def _softmax(logits: Array, sinks: Array | None) -> tuple[Array, Array, Array]:
    """Probabilities [B, N, T, S], lse [B, N, T], and the probability of the sink [B, N, T]. A row
    without a key, or with logits of -inf alone, has only zeros and the lse -inf.
    """
    top = logits.max(axis=-1, initial=-np.inf)
    empty = top == -np.inf
    sink = np.full_like(top, -np.inf) if sinks is None else np.where(empty, -np.inf, sinks[:, None])
    top = np.where(empty, 0, np.maximum(top, sink))
    total = np.exp(logits - top[..., None]).sum(axis=-1) + np.exp(sink - top)
    lse = np.where(empty, -np.inf, top + np.log(np.where(empty, 1, total)))
    finite = np.where(empty, 0, lse)
    return np.exp(logits - finite[..., None]), lse, np.exp(sink - finite)


def _summed_to(shape: tuple[int, ...], x: Array) -> Array:
    """What reaches an array of this shape that was broadcast to x."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    axes = [axis for axis, size in enumerate(shape) if size == 1]
    return x.sum(axis=tuple(axes), keepdims=True)
