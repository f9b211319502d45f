"""The oracle: every operation from its definition, in plain jax.numpy.

It is what runs where there is no GPU, and what every kernel is compared with. It computes in
float32 (float64 for float64 inputs) at the highest matmul precision, stores the whole score matrix,
and shares nothing with the kernels but `pallas_attn.masks`. It differentiates by ordinary autodiff,
forward and reverse, any number of times.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._functions.program import Broadcasting, Program, evaluate
from pallas_attn.masks import Mask

Array = jax.Array

HIDDEN = -float(np.finfo(np.float32).max) * math.log(2)  # less is -inf to base 2


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
    q_positions: Array | None = None,
    bias: Array | None = None,
    mask_array: Array | None = None,
    sinks: Array | None = None,
    mask_function: tuple[Program, Sequence[Array]] | None = None,
    score_function: tuple[Program, Sequence[Array]] | None = None,
) -> tuple[Array, Array]:
    """softmax(mask(score(softcap(scale * q k^T)) + bias)) v -> out [B, T, N, Hv] in q's dtype, lse
    [B, N, T].

    Query row i stands at q_offset + i, or at its own of `q_positions` [B, T].

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
    q_pos = q_positions
    if q_pos is None:
        offsets = jnp.broadcast_to(jnp.asarray(q_offset, jnp.int32), (batch,))
        q_pos = offsets[:, None] + q_rows[None]
    row, head = (jnp.arange(n, dtype=jnp.int32) for n in (batch, q_heads))
    at_rows = row[:, None, None, None], head[None, :, None, None], q_pos[:, None, :, None]
    where = (*at_rows, kv_pos[None, None, None, :])
    if score_function is not None:
        program, aux = score_function
        logits = evaluate(program, (logits, *where), aux, Broadcasting()).astype(acc)
        logits = jnp.broadcast_to(logits, (batch, q_heads, q_len, kv_len))
    if bias is not None:
        logits = logits + bias.astype(acc)
    # Whatever logits are made of: on a CPU, XLA makes one rounding of the scale and of the
    # subtraction of the largest where no select stands between them, and two of the largest itself.
    logits = jnp.where(logits < HIDDEN, -jnp.inf, logits)
    q_seg, kv_seg = (None, None) if segment_ids is None else segment_ids
    seen = mask.allows(
        q_pos[:, None, :, None],
        kv_pos[None, None, None, :],
        None if kv_lengths is None else kv_lengths[:, None, None, None],
        None if q_seg is None else q_seg[:, None, :, None],
        None if kv_seg is None else kv_seg[:, None, None, :],
    )
    seen = jnp.broadcast_to(seen, logits.shape) & live_q[:, None, :, None]
    if mask_function is not None:
        program, aux = mask_function
        seen = seen & evaluate(program, where, aux, Broadcasting())
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
    v: Any,
    lengths: Array,
    *,
    mask: Mask,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
    page_table: Array | None = None,
    layer: int | Array | None = None,
    k_scale: Array | Sequence[Array] | None = None,
    v_scale: Array | Sequence[Array] | None = None,
    new_lengths: Array | None = None,
    starts: Array | None = None,
    mask_function: tuple[Program, Sequence[Array]] | None = None,
    tree: bool = False,
) -> tuple[Array, Array]:
    """Attention of q [M, t, N, H] over M caches: row i of a sequence stands at position length - t
    + i. With `starts` (int32[M + 1], ascending, of 0 .. tokens) q is [tokens, N, H]: sequence m
    owns rows starts[m] to starts[m + 1]; rows that none owns give 0.

    v: as k, or an int where V is the first so many columns of K. With scales, a row is its numbers
    times its scale, in float32. A sequence whose length does not fit in its cache (or whose pages
    are missing) gives NaN: rows were lost there. So does an empty sequence whose `new_lengths` is
    negative, which nobody has extended, and everything where a traced layer is none of
    the cache's. `tree`: the mask function counts positions from the newest t rows.
    """
    layers = 1 if layer is None else jax.tree.leaves(k)[0].shape[0]

    def dense(cache: Any, scales: Any) -> Array:
        rows = _dense_rows(_select_layer(cache, layer), page_table)
        if scales is None:
            return rows
        # Laid out as rows of one column, whose dim is added after the layer is chosen.
        columns = jax.tree.map(lambda x: x[..., None], _select_layer(scales, layer))
        return rows.astype(jnp.float32) * _dense_rows(columns, page_table)

    k_rows = dense(k, k_scale)
    v_rows = k_rows[..., :v] if isinstance(v, int) else dense(v, v_scale)
    held = _rows_held(_select_layer(k, layer), page_table, lengths)
    packed = None if starts is None else _Packed.of(starts, q.shape[0])
    begin = lengths - (q.shape[1] if starts is None else jnp.diff(starts))
    mask_array = None
    if mask_function is not None and tree:
        sizes = len(lengths), q.shape[1 if packed is None else 0], k_rows.shape[1]
        row, query, key = (jnp.arange(n, dtype=jnp.int32) for n in sizes)
        key = (key[None] - begin[:, None])[:, None, None]
        where = row[:, None, None, None], 0, query[None, None, :, None], key
        mask_array = evaluate(mask_function[0], where, mask_function[1], Broadcasting())
        mask_function = None
    out, lse = attention(
        q if packed is None else q[packed.rows],
        k_rows,
        v_rows,
        mask=mask,
        scale=scale,
        softcap=softcap,
        q_offset=begin,
        kv_lengths=lengths,
        mask_array=mask_array,
        sinks=sinks,
        mask_function=mask_function,
    )
    lost = lengths > held
    if new_lengths is not None:
        lost = lost | ((lengths < 1) & (new_lengths < 0))
    if layer is not None:
        lost = lost | (layer < 0) | (layer >= layers)
    out = jnp.where(lost[:, None, None, None], jnp.nan, out).astype(q.dtype)
    lse = jnp.where(lost[:, None, None], jnp.nan, lse)
    return (out, lse) if packed is None else (packed.taken(out, 0), packed.taken(lse, -jnp.inf).T)


class _Packed(NamedTuple):
    """Packed rows as rows of a batch."""

    rows: Array  # int32[M, tokens]: row t of sequence m among the packed ones, where it has one
    owner: Array  # int32[tokens]
    within: Array  # int32[tokens]: which of its sequence's rows it is
    owned: Array  # bool[tokens]

    @classmethod
    def of(cls, starts: Array, tokens: int) -> "_Packed":
        at = jnp.arange(tokens, dtype=jnp.int32)
        owner = (starts[None] <= at[:, None]).sum(axis=1) - 1
        owned = (owner >= 0) & (owner < len(starts) - 1)
        owner = jnp.clip(owner, 0, len(starts) - 2)
        rows = jnp.clip(starts[:-1, None] + at[None], 0, tokens - 1)
        return cls(rows, owner, jnp.where(owned, at - starts[owner], 0), owned)

    def taken(self, results: Array, unowned: Any) -> Array:
        """[tokens, ..] of out [M, tokens, N, Hv] or lse [M, N, tokens]."""
        if results.ndim == 3:
            results = jnp.moveaxis(results, 1, 2)
        found = results[self.owner, self.within]
        owned = self.owned.reshape(-1, *(1,) * (found.ndim - 1))
        return jnp.where(owned, found, unowned).astype(found.dtype)


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


_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}


def quantize(rows: Array, dtype: Any) -> tuple[Array, Array]:
    """rows [..., H] as numbers of a narrow dtype [..., H] and one float32 scale each [...]: a row
    is close to numbers * scale.

    In float32, every operation rounded to nearest even and none fused:

        scale   = max(max |x| * (1 / largest), 2**-100)     largest: 448, 57344 or 127
        numbers = convert(x * (1 / scale))

    so that the largest number of a row is the largest of the dtype, and every implementation makes
    the same bits. The floor of the scale keeps subnormals, which XLA flushes on a CPU and not on a
    GPU, out of it: a row of zeros has that scale. A row that holds a NaN or an infinity has the
    scale NaN and zeros for numbers: it is NaN from then on, whatever dtype it lies in.
    """
    x = rows.astype(jnp.float32)
    bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF  # of |x|, which order as |x| does
    top = bits.max(axis=-1)
    finite = top < 0x7F800000
    top = lax.bitcast_convert_type(jnp.where(finite, top, 0), jnp.float32)
    inverse = np.float32(1) / np.float32(_LARGEST[jnp.dtype(dtype).name])
    scale = jnp.maximum(top * inverse, np.float32(2.0**-100))
    scaled = jnp.where(finite[..., None], x, 0) * _reciprocal(scale)[..., None]
    if jnp.dtype(dtype) == jnp.int8:
        scaled = jnp.round(scaled)
    return scaled.astype(dtype), jnp.where(finite, scale, jnp.nan)


def _reciprocal(x: Array) -> Array:
    """1 / x for float32 x from 2**-126 to 2**125, correctly rounded: by long division of integers,
    since XLA's own division is not on a GPU.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    divisor = bits & 0x7FFFFF | 0x800000  # 2**23 to 2**24
    remainder = jnp.full(bits.shape, 2**23, jnp.uint32)
    quotient = jnp.zeros(bits.shape, jnp.uint32)  # of 2**47, in the end: 2**23 to 2**24
    for _ in range(3):
        remainder = remainder << 8
        quotient = (quotient << 8) + remainder // divisor
        remainder = remainder % divisor
    # Halfway cannot be: that takes a divisor of which 2**48 is an odd multiple.
    quotient = quotient + (2 * remainder > divisor).astype(jnp.uint32)
    # A power of two has the quotient 2**24, which carries into the exponent as it should.
    return lax.bitcast_convert_type(((252 - (bits >> 23)) << 23) + quotient, jnp.float32)


def append(  # noqa: PLR0913
    k_cache: Array | Sequence[Array],
    v_cache: Array | Sequence[Array] | None,
    k: Array,
    v: Array | None,
    start: Array,
    *,
    new_lengths: Array | None = None,
    page_table: Array | None = None,
    layer: int | Array | None = None,
    k_scale: Array | Sequence[Array] | None = None,
    v_scale: Array | Sequence[Array] | None = None,
    owners: Array | None = None,
):
    """New rows k, v [M, t, K, H] into the caches from position `start` on; returns the new caches,
    and the new scales where the caches have any: rows are then stored as `quantize` says.

    Row i of sequence m lands at start[m] + i if i < new_lengths[m], start[m] >= 0 and the position
    is within the sequence's own rows; otherwise it is dropped and nothing else is touched. With
    `owners`, packed rows k, v [tokens, K, H]: row i lands at start[i] of sequence owners[i].
    """
    if owners is None:
        rows = jnp.arange(k.shape[1], dtype=jnp.int32)
        position = start[:, None] + rows[None]
        wanted = (start >= 0)[:, None] & (position >= 0)
        if new_lengths is not None:
            wanted &= rows[None] < new_lengths[:, None]
        position = jnp.where(wanted, position, -1)
    else:
        position = start

    def write(cache, new):
        if cache is None:
            return None
        if new.ndim == k.ndim - 1:  # scales, as rows of one column
            columns = jax.tree.map(lambda x: x[..., None], cache)
            return jax.tree.map(lambda x: x[..., 0], place(columns, new[..., None]))
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
        if owners is not None:
            return _place_packed(cache, layer, (owners, position), new, page_table)
        if isinstance(cache, (tuple, list)):
            pairs = zip(cache, new, position, strict=True)
            return tuple(_scatter(one, layer, (pos,), row) for one, row, pos in pairs)
        if page_table is None:
            return _scatter(cache, layer, (position,), new, batched=True)
        return _scatter(cache, layer, _page_and_row(cache, position, page_table), new)

    if k_scale is None:
        return write(k_cache, k), write(v_cache, v), None, None
    numbers, scales = {}, {}
    for side, cache, new in (("k", k_cache, k), ("v", v_cache, v)):
        if new is not None:
            numbers[side], scales[side] = quantize(new, jax.tree.leaves(cache)[0].dtype)
    return (
        write(k_cache, numbers["k"]),
        write(v_cache, numbers.get("v")),
        write(k_scale, scales["k"]),
        write(v_scale, scales.get("v")),
    )


def rows_kept(  # noqa: PLR0913
    lengths: Array,
    new_lengths: Array,
    counts: Array,
    width: int | None,
    capacities: Sequence[int],
    *,
    page_table: Array | None = None,
    page_size: int = 0,
    holders: Array | None = None,
) -> Array:
    """int32[M]: how many of the newest rows of each sequence stay, at most `width`; -1 where the
    sequence stays as it is, -2 where it overflows, since another one holds a page of those rows.

    A sequence without newest rows, or that has overflowed, stays as it is; and, where `width` is
    None, which says that no row moves, one whose rows all stay.
    """
    most = new_lengths if width is None else jnp.minimum(new_lengths, width)
    kept = jnp.clip(counts, 0, jnp.maximum(most, 0))
    changes = (new_lengths > 0) & (lengths >= new_lengths)
    changes &= lengths <= jnp.asarray(capacities, jnp.int32)
    changes &= kept < new_lengths if width is None else True
    if page_table is not None and holders is not None:
        slots = jnp.arange(page_table.shape[1], dtype=jnp.int32)[None]
        needed = slots * page_size < lengths[:, None]
        newest = slots >= ((lengths - new_lengths) // page_size)[:, None]
        there = (page_table >= 0) & (page_table < holders.shape[0])
        shared = needed & newest & (jnp.take(holders, page_table, mode="clip") > 1)
        kept = jnp.where(shared.any(axis=1), -2, kept)
        changes &= ~(needed & ~there).any(axis=1)
    return jnp.where(changes, kept, -1)


def keep(  # noqa: PLR0913
    k_cache: Array | Sequence[Array],
    v_cache: Array | Sequence[Array] | None,
    k_scale: Array | Sequence[Array] | None,
    v_scale: Array | Sequence[Array] | None,
    path: Array,
    lengths: Array,
    new_lengths: Array,
    count: Array,
    page_table: Array | None,
    *,
    layers: bool = False,
):
    """The caches where row j of the newest rows of sequence m is what row path[m, j] of them was,
    for j < count[m]; `path` is held to those that there are.
    """
    path = jnp.clip(path, 0, jnp.maximum(new_lengths - 1, 0)[:, None])
    rows = jnp.arange(path.shape[1], dtype=jnp.int32)[None]
    moves, begin = count > 0, jnp.where(count > 0, lengths - new_lengths, 0)
    source = begin[:, None] + jnp.where(moves[:, None], path, 0)
    target = jnp.where(rows < count[:, None], begin[:, None] + rows, -1)

    def moved(cache):
        if isinstance(cache, (tuple, list)):
            three = zip(cache, source, target, strict=True)
            return tuple(once(one[None], at[None], to[None])[0] for one, at, to in three)
        return once(cache, source, target)

    def once(cache, source, target):
        """Of an array [slabs, K, rows, H], the page table's or one a sequence."""
        if page_table is None:
            held = jnp.take_along_axis(cache, source[:, None, :, None], axis=2, mode="clip")
            return _scatter(cache, None, (target,), jnp.swapaxes(held, 1, 2), batched=True)
        page, row = _page_and_row(cache, source, page_table)
        held = cache.at[page, :, row].get(mode="clip")
        return _scatter(cache, None, _page_and_row(cache, target, page_table), held)

    def over_layers(cache, scales=False):
        if cache is None:
            return None
        dtype = jax.tree.leaves(cache)[0].dtype
        if dtype.itemsize == 1 and jnp.issubdtype(dtype, jnp.floating):
            # XLA moves float8 on a CPU as float16, which changes the bits of NaN.
            cache = jax.tree.map(lambda x: lax.bitcast_convert_type(x, jnp.uint8), cache)
        columns = jax.tree.map(lambda x: x[..., None] if scales else x, cache)
        done = (jax.vmap(moved) if layers else moved)(columns)
        done = jax.tree.map(lambda x: x[..., 0] if scales else x, done)
        return jax.tree.map(lambda x: lax.bitcast_convert_type(x, dtype), done)

    numbers = over_layers(k_cache), over_layers(v_cache)
    return (*numbers, over_layers(k_scale, True), over_layers(v_scale, True))


def _place_packed(cache, layer, where: tuple[Array, Array], new: Array, page_table: Array | None):
    """Packed rows, each at its position of its sequence; negative: dropped."""
    owners, position = where
    if isinstance(cache, (tuple, list)):
        own = [jnp.where(owners == m, position, -1) for m in range(len(cache))]
        return tuple(_scatter(one, layer, (at,), new) for one, at in zip(cache, own, strict=True))
    if page_table is None:
        return _scatter(cache, layer, (jnp.where(position < 0, -1, owners), position), new)
    page, row = _page_and_row(cache, position[:, None], page_table[owners])
    return _scatter(cache, layer, (page[:, 0], row[:, 0]), new)


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
