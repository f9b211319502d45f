"""The oracle: every operation from its definition, in plain jax.numpy.

It is what runs where there is no GPU, and what every kernel is compared with. It computes in
float32 (float64 for float64 inputs) at the highest matmul precision, stores the whole score matrix,
and shares nothing with the kernels but `pallas_attn.masks`. It differentiates by ordinary autodiff,
forward and reverse, any number of times.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn.masks import Mask

Array = jax.Array


def attention(  # noqa: PLR0913
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Mask,
    scale: float,
    softcap: float | None = None,
    q_offset: int | Array = 0,
    q_lengths: Array | None = None,
    kv_lengths: Array | None = None,
    segment_ids: tuple[Array, Array] | None = None,
    bias: Array | None = None,
    mask_array: Array | None = None,
    sinks: Array | None = None,
) -> tuple[Array, Array]:
    """softmax(mask(softcap(scale * q k^T) + bias)) v -> out [B, T, N, Hv] in q's dtype, lse [B, N,
    T].

    A row that sees no key (or only keys whose logit is -inf) gives out 0 and lse -inf, and every
    gradient through it is 0. Queries, keys and values past their length are selected away before
    they meet any arithmetic: they may hold NaN, forward and backward. A sink is a logit of its own
    in the denominator of each row that sees a key.
    """
    batch, q_len, q_heads, _ = q.shape
    dtype = q.dtype
    kv_len, kv_heads = k.shape[1], k.shape[2]
    acc = jnp.float64 if dtype == jnp.float64 else jnp.float32
    q_rows, kv_pos = jnp.arange(q_len, dtype=jnp.int32), jnp.arange(kv_len, dtype=jnp.int32)
    live_q = _before(q_rows, q_lengths, batch)
    live_kv = _before(kv_pos, kv_lengths, batch)
    q = jnp.where(live_q[:, :, None, None], q, 0).astype(acc)
    k = jnp.where(live_kv[:, :, None, None], k, 0).astype(acc)
    v = jnp.where(live_kv[:, :, None, None], v, 0).astype(acc)

    grouped = q.reshape(batch, q_len, kv_heads, q_heads // kv_heads, q.shape[-1])
    logits = jnp.einsum("btkgh,bskh->bkgts", grouped, k, precision="highest")
    logits = logits.reshape(batch, q_heads, q_len, kv_len) * jnp.asarray(scale, acc)
    if softcap is not None:
        cap = jnp.asarray(softcap, acc)
        logits = cap * jnp.tanh(logits / cap)
    if bias is not None:
        logits = logits + bias.astype(acc)

    q_pos = jnp.broadcast_to(jnp.asarray(q_offset, jnp.int32), (batch,))[:, None] + q_rows[None]
    q_seg, kv_seg = (None, None) if segment_ids is None else segment_ids
    seen = mask.allows(
        q_pos[:, None, :, None],
        kv_pos[None, None, None, :],
        None if kv_lengths is None else kv_lengths[:, None, None, None],
        None if q_seg is None else q_seg[:, None, :, None],
        None if kv_seg is None else kv_seg[:, None, None, :],
    )
    seen = jnp.broadcast_to(seen, logits.shape) & live_q[:, None, :, None]
    if mask_array is not None:
        seen = seen & mask_array

    probs, denominator, top, empty = _softmax(jnp.where(seen, logits, -jnp.inf), sinks)
    probs = probs.reshape(batch, kv_heads, q_heads // kv_heads, q_len, kv_len)
    out = jnp.einsum("bkgts,bskh->btkgh", probs, v, precision="highest")
    out = out.reshape(batch, q_len, q_heads, v.shape[-1])
    keep = ~empty
    out = out / jnp.swapaxes(jnp.where(keep, denominator, 1), 1, 2)[..., None]
    out = jnp.where(jnp.swapaxes(keep, 1, 2)[..., None], out, 0)
    lse = jnp.where(keep, top + jnp.log(jnp.where(keep, denominator, 1)), -jnp.inf)
    return out.astype(dtype), lse


def _before(rows: Array, lengths: Array | None, batch: int) -> Array:
    """bool[B, rows]: which rows lie before their length."""
    if lengths is None:
        return jnp.ones((batch, rows.size), bool)
    return rows[None] < lengths[:, None]


def _softmax(logits: Array, sinks: Array | None) -> tuple[Array, Array, Array, Array]:
    """Unnormalised probabilities, their sum (the sink in it), the logit they are relative to, and
    the empty rows.
    """
    # Not `top == -inf`: XLA's maximum of nothing but NaN is -inf on a CPU.
    empty = (logits == -jnp.inf).all(axis=-1)
    top = lax.stop_gradient(jnp.max(logits, axis=-1, initial=-jnp.inf))
    if sinks is not None:
        sinks = sinks.astype(logits.dtype)[None, :, None]
        top = jnp.maximum(top, lax.stop_gradient(sinks))
    top = jnp.where(empty, 0, top)
    probs = jnp.exp(logits - top[..., None])
    denominator = probs.sum(axis=-1)
    if sinks is not None:
        denominator = denominator + jnp.exp(jnp.where(empty, -jnp.inf, sinks) - top)
    return probs, denominator, top, empty


def decode(  # noqa: PLR0913
    q: Array,
    k: Array | Sequence[Array],
    v: Array | Sequence[Array],
    lengths: Array,
    *,
    mask: Mask,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
    page_table: Array | None = None,
    layer: int | Array | None = None,
) -> tuple[Array, Array]:
    """Attention of q [M, t, N, H] over M caches: row i of a sequence stands at position length - t
    + i.

    A sequence whose length does not fit in its cache (or whose pages are missing) gives NaN: rows
    were lost there. So does everything where a traced layer is none of the cache's.
    """
    layers = 1 if layer is None else jax.tree.leaves(k)[0].shape[0]
    k, v = _select_layer(k, layer), _select_layer(v, layer)
    dense = [_dense_rows(cache, page_table) for cache in (k, v)]
    held = _rows_held(k, page_table, lengths)
    out, lse = attention(
        q,
        *dense,
        mask=mask,
        scale=scale,
        softcap=softcap,
        q_offset=lengths - q.shape[1],
        kv_lengths=lengths,
        sinks=sinks,
    )
    lost = lengths > held
    if layer is not None:
        lost = lost | (layer < 0) | (layer >= layers)
    return (
        jnp.where(lost[:, None, None, None], jnp.nan, out).astype(q.dtype),
        jnp.where(lost[:, None, None], jnp.nan, lse),
    )


def _select_layer(cache, layer):
    if layer is None:
        return cache
    if isinstance(cache, (tuple, list)):
        return tuple(_select_layer(one, layer) for one in cache)
    return lax.dynamic_index_in_dim(cache, layer, keepdims=False)


def _dense_rows(cache: Any, page_table: Array | None) -> Array:
    """Any cache's rows as [M, S, K, H], token by token."""
    if isinstance(cache, (tuple, list)):
        most = max(one.shape[1] for one in cache)
        padded = [jnp.pad(one, ((0, 0), (0, most - one.shape[1]), (0, 0))) for one in cache]
        return jnp.swapaxes(jnp.stack(padded), 1, 2)
    if page_table is None:
        return jnp.swapaxes(cache, 1, 2)
    pages = jnp.take(cache, jnp.clip(page_table, 0, cache.shape[0] - 1), axis=0)
    sequences, width, kv_heads, page_size, dim = pages.shape
    return jnp.moveaxis(pages, 2, 3).reshape(sequences, width * page_size, kv_heads, dim)


def _rows_held(cache, page_table: Array | None, lengths: Array) -> Array:
    """int32[M]: how many rows, counted from 0 without a gap, each sequence has room for."""
    if isinstance(cache, (tuple, list)):
        return jnp.asarray([one.shape[1] for one in cache], lengths.dtype)
    if page_table is None:
        return jnp.full(lengths.shape, cache.shape[2], lengths.dtype)
    there = (page_table >= 0) & (page_table < cache.shape[0])
    return jnp.cumprod(there, axis=1).sum(axis=1).astype(lengths.dtype) * cache.shape[2]


def append(
    k_cache: Array | Sequence[Array],
    v_cache: Array | Sequence[Array] | None,
    k: Array,
    v: Array | None,
    start: Array,
    *,
    new_lengths: Array | None = None,
    page_table: Array | None = None,
    layer: int | Array | None = None,
):
    """New rows k, v [M, t, K, H] into the caches from position `start` on; returns the new caches.

    Row i of sequence m lands at start[m] + i if i < new_lengths[m], start[m] >= 0 and the position
    is within the sequence's own rows; otherwise it is dropped and nothing else is touched.
    """
    rows = jnp.arange(k.shape[1], dtype=jnp.int32)
    position = start[:, None] + rows[None]
    wanted = (start >= 0)[:, None] & (position >= 0)
    if new_lengths is not None:
        wanted &= rows[None] < new_lengths[:, None]
    position = jnp.where(wanted, position, -1)

    def write(cache, new):
        if cache is None:
            return None
        dtype = jax.tree.leaves(cache)[0].dtype
        if dtype.itemsize == 1 and jnp.issubdtype(dtype, jnp.floating):
            # XLA moves float8 on a CPU as float16, which changes the bits of NaN.
            cache, new = jax.tree.map(
                lambda x: lax.bitcast_convert_type(x, jnp.uint8), (cache, new.astype(dtype))
            )
            written = place(cache, new)
            return jax.tree.map(lambda x: lax.bitcast_convert_type(x, dtype), written)
        return place(cache, new)

    def place(cache, new):
        if isinstance(cache, (tuple, list)):
            pairs = zip(cache, new, position, strict=True)
            return tuple(_scatter(one, layer, (pos,), row) for one, row, pos in pairs)
        if page_table is None:
            return _scatter(cache, layer, (position,), new, batched=True)
        return _scatter(cache, layer, _page_and_row(cache, position, page_table), new)

    return write(k_cache, k), write(v_cache, v)


def _scatter(
    cache: Array, layer, index: tuple[Array, ...], new: Array, batched: bool = False
) -> Array:
    """cache[layer, *index[:-1], :, index[-1]] = new; an index outside of the cache drops its row.

    `batched`: the axis after the layers is that of the sequences, and of the first axis of
    `index` and `new`. Said as one scatter whose windows are heads: XLA then splits it over devices
    without communication, which it cannot do where heads or sequences are indexed by arrays.
    """
    operand = cache[None] if layer is None else cache
    layer = jnp.asarray(0 if layer is None else layer, jnp.int32)
    indices = [jnp.broadcast_to(layer, index[0].shape), *index]
    axes = (0, *range(1, len(index)), operand.ndim - 2)
    dims = lax.ScatterDimensionNumbers(
        update_window_dims=(new.ndim - 2, new.ndim - 1),
        inserted_window_dims=axes,
        scatter_dims_to_operand_dims=axes,
        operand_batching_dims=(1,) if batched else (),
        scatter_indices_batching_dims=(0,) if batched else (),
    )
    written = lax.scatter(
        operand,
        jnp.stack([x.astype(jnp.int32) for x in indices], axis=-1),
        new.astype(cache.dtype),
        dims,
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )
    return written.reshape(cache.shape)


def _page_and_row(cache: Array, position: Array, page_table: Array) -> tuple[Array, Array]:
    """Where in the pool each position is; page -1 where it is nowhere."""
    pages, page_size = cache.shape[-4], cache.shape[-2]
    slot = position // page_size
    page = jnp.take_along_axis(
        page_table, jnp.clip(slot, 0, page_table.shape[1] - 1), axis=1, mode="clip"
    )
    there = (position >= 0) & (slot < page_table.shape[1]) & (page >= 0) & (page < pages)
    return jnp.where(there, page, -1), position % page_size
