"""The oracle: every operation from its definition, in plain jax.numpy.

It is what runs where there is no GPU, and what every kernel is compared with. It computes in
float32 (float64 for float64 inputs) at the highest matmul precision and stores the scores of one
block of query rows at a time. It differentiates by ordinary autodiff, forward and reverse, any
number of times. It shares with the kernels `pallas_attn.masks`, the records of a call, the
evaluation of functions of positions (`program.evaluate`) and `probabilities_of_sinks`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from pallas_attn._call import quantization
from pallas_attn._call.byte_rows import BYTE_DTYPE, BYTE_ROW, SCALE_COLUMNS
from pallas_attn._call.problem import (
    AppendInputs,
    AppendProblem,
    AttentionInputs,
    AttentionProblem,
    Caches,
    DecodeInputs,
    DecodeProblem,
    KeepInputs,
    KeepProblem,
    Kept,
    bounds_of,
    gradients_of_sinks,
    live,
    probabilities_of_sinks,
    rows_of_scale,
)
from pallas_attn._functions.program import Broadcasting, evaluate, of_rows
from pallas_attn.masks import FULL

Array = jax.Array
Layer = int | Array | None
Buffers = Any  # K, V or scales of a cache: of all sequences, or a tuple of each

HIDDEN = -float(np.finfo(np.float32).max) * math.log(2)  # less is -inf to base 2


def attention(
    inputs: AttentionInputs, problem: AttentionProblem, precision: str = "highest"
) -> tuple[Array, Array]:
    """softmax(mask(score(softcap(scale * q k^T)) + bias)) v -> out [B, T, N, Hv] in q's dtype, lse
    [B, N, T].

    Query row i stands at q_offset + i, or at its own of `q_positions` [B, T].

    A row that sees no key (or only keys whose logit is -inf) gives out 0 and lse -inf, and every
    gradient through it is 0. Queries, keys and values past their length are selected away before
    they meet any arithmetic: they may hold NaN, forward and backward. A sink is a logit of its own
    in the denominator of each row that sees a key; one of inf makes out 0 and lse inf.
    `precision`: of matmuls.
    """
    q_len, kv_len = inputs.q.shape[1], inputs.k.shape[1]
    dtype = problem.out_dtype or inputs.q.dtype
    q, k, v, inputs = _heads_first(inputs, problem)
    blocks = _blocks(inputs, problem, q_len, kv_len)
    results = []
    for rows, keys in blocks:
        attend: Callable[..., tuple[Array, Array]] = functools.partial(
            _attend, inputs=inputs, problem=problem, precision=precision, rows=rows, keys=keys
        )
        if len(blocks) > 1:  # a backward computes scores again, from the numbers of each row
            policy = jax.checkpoint_policies.save_only_these_names(_OF_ROWS)
            attend = jax.checkpoint(attend, policy=policy)
        result = attend(q, k, v)
        if len(blocks) > 1:  # XLA would compute all blocks at once, and store the scores of all
            q, k, v, result = lax.optimization_barrier((q, k, v, result))
        results.append(result)
    out, lse = (jnp.concatenate(x, axis=2) for x in zip(*results, strict=True))
    return jnp.swapaxes(out, 1, 2).astype(dtype), lse


def gradients(
    inputs: AttentionInputs,
    problem: AttentionProblem,
    of_rows: tuple[Array, Array, Array, Array],
    names: tuple[str, ...],
    precision: str = "highest",
) -> dict[str, Array]:
    """The gradients of the inputs `names` (`AttentionInputs.named`), from out, lse and their
    cotangents, by the formula that the backward kernels compute. jax differentiates it along all of
    them. The call that made `of_rows` may have seen more keys than are here.
    """
    out, lse, d_out, d_lse = of_rows
    named = inputs.named()

    def operands(some: dict[str, Array]) -> tuple[Array, Array]:
        q, k, v, others = _heads_first(AttentionInputs.of(named | some), problem)
        return _logits(q, k, others, problem, precision, slice(None), slice(None)), v

    (logits, v), back = jax.vjp(operands, {name: named[name] for name in names})
    empty = lse == -jnp.inf  # rows that see no key: their cotangents may be NaN
    d_out = jnp.where(empty[..., None], 0, jnp.swapaxes(d_out, 1, 2).astype(lse.dtype))
    delta = (d_out * jnp.swapaxes(out, 1, 2).astype(lse.dtype)).sum(-1) - d_lse
    delta = jnp.where(empty, 0, delta)
    probs = jnp.exp(logits - jnp.where(empty, jnp.inf, lse)[..., None])
    group = *v.shape[:2], -1, d_out.shape[2]  # B, kv heads, query heads of each, query rows
    d_out, by_kv_head = (x.reshape(*group, x.shape[-1]) for x in (d_out, probs))
    d_probs = _by_kv_head(precision, "bkgth,bksh->bkgts", d_out, v).reshape(probs.shape)
    d_v = jnp.einsum("bkgts,bkgth->bksh", by_kv_head, d_out, precision=precision)
    (own,) = back((probs * (d_probs - delta[..., None]), d_v))
    if "sinks" in names:
        own["sinks"] = gradients_of_sinks(named["sinks"], lse, delta)
    return own


def _heads_first(
    inputs: AttentionInputs, problem: AttentionProblem
) -> tuple[Array, Array, Array, AttentionInputs]:
    """q [B, K, N / K, T, H], k and v [B, K, S, ..] in the dtype of sums, with zeros past lengths;
    the inputs, whose `score_aux` have that dtype, too.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    batch, q_len, q_heads, _ = q.shape
    kv_heads = k.shape[2]
    acc = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    ends = inputs.q_lengths, inputs.kv_lengths, inputs.kv_lengths
    if problem.out_dtype is not None:
        scales = inputs.q_scale, inputs.k_scale, inputs.v_scale
        each = zip((q, k, v), ends, scales, strict=True)
        q, k, v = (_dequantised(live(x, end), scale) for x, end, scale in each)
    q, k, v = (
        jnp.swapaxes(live(x, end), 1, 2).astype(acc)  # heads first: plain matmuls
        for x, end in zip((q, k, v), ends, strict=True)
    )
    q = q.reshape(batch, kv_heads, q_heads // kv_heads, q_len, q.shape[-1])
    floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in inputs.score_aux]
    aux = [x.astype(acc) if y else x for x, y in zip(inputs.score_aux, floats, strict=True)]
    # Reads cast back; gradients are summed in acc.
    return q, k, v, inputs._replace(score_aux=tuple(aux))


def _dequantised(x: Array, scale: Array | None) -> Array:
    """float8 x [B, rows, heads, dim] times scales [B, n, heads] of `rows_of_scale` each."""
    x = x.astype(jnp.float32)
    if scale is None:
        return x
    size = rows_of_scale(x.shape[1], scale.shape[1])
    return x * jnp.repeat(scale, size, axis=1)[:, : x.shape[1], :, None]


_OF_ROWS = "reference_rows"  # name of numbers of query rows that a backward reads


def _blocks(
    inputs: AttentionInputs, problem: AttentionProblem, q_len: int, kv_len: int
) -> list[tuple[slice, slice]]:
    """Query rows that are computed together, with the keys that the mask may show to one of them:
    8 blocks, of 128 to 512 rows. XLA compiles each.
    """
    symbolic = not isinstance(q_len, int) or not isinstance(kv_len, int)
    if symbolic or q_len <= 128:
        return [(slice(None), slice(None))]
    size = min(max(128, -(-q_len // 8)), 512)
    starts = range(0, q_len, size)
    rows = [slice(start, min(start + size, q_len)) for start in starts]
    if inputs.q_offset is not None or inputs.q_positions is not None:
        return [(block, slice(None)) for block in rows]
    blocks = []
    for block in rows:
        first, end = (problem.q_offset + at for at in (block.start, block.stop))
        bands = problem.mask.widest, problem.mask_within
        ranges = [band.kv_range(first, end, kv_len) for band in bands]
        low = min(max(low for low, _ in ranges), kv_len - 1)
        high = max(min(high for _, high in ranges), low + 1)  # a hidden key where none is seen
        blocks.append((block, slice(low, high)))
    return blocks


def _attend(
    q: Array,
    k: Array,
    v: Array,
    inputs: AttentionInputs,
    problem: AttentionProblem,
    precision: str,
    rows: slice,
    keys: slice,
) -> tuple[Array, Array]:
    """out [B, N, rows, Hv] and lse of some rows of q [B, K, N / K, T, H], which see no keys but
    `keys` of k and v [B, K, S, ..].
    """
    logits = _logits(q, k, inputs, problem, precision, rows, keys)
    probs, lse = _softmax(logits, inputs.sinks)
    by_kv_head = *q.shape[:3], *probs.shape[2:]
    out = _by_kv_head(precision, "bkgts,bksh->bkgth", probs.reshape(by_kv_head), v[:, :, keys])
    empty = lse == -jnp.inf  # selected away: cotangents of such rows may be NaN
    out = jnp.where(empty[..., None], 0, out.reshape(*probs.shape[:3], v.shape[3]))
    return out, jnp.where(empty, -jnp.inf, lse)


def _logits(
    q: Array,
    k: Array,
    inputs: AttentionInputs,
    problem: AttentionProblem,
    precision: str,
    rows: slice,
    keys: slice,
) -> Array:
    """The logits [B, N, rows, keys] of some rows of q and keys of k; -inf where one is hidden."""
    q_numbers = jnp.arange(q.shape[3], dtype=jnp.int32)[rows]
    kv_pos = jnp.arange(k.shape[2], dtype=jnp.int32)[keys]
    q, k = q[:, :, :, rows], k[:, :, keys]
    batch, kv_heads, group, q_len, _ = q.shape
    shape = batch, kv_heads * group, q_len, k.shape[2]

    logits = _by_kv_head(precision, "bkgth,bksh->bkgts", q, k).reshape(shape)
    logits = logits * jnp.asarray(problem.scale, q.dtype)
    if problem.softcap is not None:
        cap = jnp.asarray(problem.softcap, q.dtype)
        logits = cap * jnp.tanh(logits / cap)
    if inputs.q_positions is not None:
        q_pos = inputs.q_positions[:, rows]
    else:
        offset = problem.q_offset if inputs.q_offset is None else inputs.q_offset
        q_pos = jnp.asarray(offset, jnp.int32).reshape(-1, 1) + q_numbers[None]
    row, head = (jnp.arange(n, dtype=jnp.int32) for n in shape[:2])
    at_rows = row[:, None, None, None], head[None, :, None, None], q_pos[:, None, :, None]
    where = (*at_rows, kv_pos[None, None, None, :])
    if problem.score_program is not None:
        operands = (logits, *where)
        logits = evaluate(problem.score_program, operands, inputs.score_aux, Broadcasting())
        logits = jnp.broadcast_to(logits.astype(q.dtype), shape)
    if inputs.bias is not None:
        logits = logits + _tile(inputs.bias, rows, keys).astype(q.dtype)
    # Also where nothing is hidden: on a CPU, XLA makes one rounding of the scale and of the
    # subtraction of the largest where no select stands between them, and two of the largest itself.
    seen = ~(logits < HIDDEN) & _seen(inputs, problem, where, rows, keys)
    if inputs.q_lengths is not None:
        seen &= (q_numbers[None] < inputs.q_lengths[:, None])[:, None, :, None]

    return jnp.where(seen, logits, -jnp.inf)


def _by_kv_head(precision: str, equation: str, x: Array, y: Array) -> Array:
    """An einsum of x [B, K, N / K, rows, ..] in which the query heads of a kv head are rows of one
    matmul: XLA transposes no scores for it on a CPU, backward either.
    """
    *kv_heads, group, rows, width = x.shape
    x = x.reshape(*kv_heads, group * rows, width)
    result = jnp.einsum(equation.replace("g", ""), x, y, precision=precision)
    return result.reshape(*kv_heads, group, rows, result.shape[-1])


def _tile(x: Array, rows: slice, keys: slice) -> Array:
    """Some rows and keys of x [.., T or 1, S or 1]."""
    x = x if x.shape[-2] == 1 else x[..., rows, :]
    return x if x.shape[-1] == 1 else x[..., keys]


def _seen(
    inputs: AttentionInputs,
    problem: AttentionProblem,
    where: tuple[Array, ...],
    rows: slice,
    keys: slice,
) -> Any:
    """bool, broadcasts to [B, N, rows, keys]: keys that a query sees. `where`: batch row, head,
    position of the query and of the key.
    """
    lengths, q_ids, kv_ids = inputs.kv_lengths, inputs.q_segment_ids, inputs.kv_segment_ids
    mask = problem.mask.filled(**{n: x[:, None, None, None] for n, x in bounds_of(inputs).items()})
    seen = mask.allows(
        where[2],
        where[3],
        None if lengths is None else lengths[:, None, None, None],
        None if q_ids is None else q_ids[:, None, rows, None],
        None if kv_ids is None else kv_ids[:, None, None, keys],
    )
    if problem.mask_program is not None:
        seen = seen & evaluate(problem.mask_program, where, inputs.mask_aux, Broadcasting())
    return seen if inputs.mask_array is None else seen & _tile(inputs.mask_array, rows, keys)


@jax.custom_jvp
def _softmax(logits: Array, sinks: Array | None) -> tuple[Array, Array]:
    """Probabilities (less than 1 in all where there is a sink, 0 where it is inf), and the
    log-sum-exp of each row.

    Its derivative is given, since autodiff adds up equal terms in different orders: where a row
    sees one key, the gradient of its logit and all higher derivatives are exactly 0 by this one.
    """
    top = lax.stop_gradient(jnp.max(logits, axis=-1, initial=-jnp.inf))
    nothing = top == -jnp.inf  # or NaN: XLA's maximum of nothing but NaN is -inf on a CPU
    if sinks is not None:
        sinks = sinks.astype(logits.dtype)[None, :, None]
        finite = jnp.where(sinks == jnp.inf, jnp.finfo(sinks.dtype).max, sinks)
        top = jnp.maximum(top, lax.stop_gradient(finite))
    top = checkpoint_name(jnp.where(nothing, 0, top), _OF_ROWS)
    probs = jnp.exp(logits - top[..., None])
    denominator = checkpoint_name(probs.sum(axis=-1), _OF_ROWS)
    empty = nothing & (denominator == 0)
    if sinks is not None:
        denominator = denominator + jnp.exp(jnp.where(empty, -jnp.inf, finite) - top)
        top = top + jnp.where(sinks == jnp.inf, jnp.inf, 0)
    denominator = jnp.where(empty, 1, denominator)
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(denominator))
    return probs / denominator[..., None], lse


@_softmax.defjvp
def _softmax_jvp(primals: Any, tangents: Any) -> Any:
    (logits, sinks), (logits_dot, sinks_dot) = primals, tangents
    probs, lse = _softmax(logits, sinks)
    lse_dot = jnp.sum(probs * logits_dot, axis=-1)
    if sinks is not None:
        of_rows = (x.astype(lse.dtype)[None, :, None] for x in (sinks, sinks_dot))
        sinks, sinks_dot = of_rows
        lse_dot += probabilities_of_sinks(sinks, lse) * sinks_dot
    return (probs, lse), (probs * (logits_dot - lse_dot[..., None]), lse_dot)


def decode(inputs: DecodeInputs, problem: DecodeProblem) -> tuple[Array, Array]:
    """Attention of q [M, t, N, H] over M caches: row i of a sequence stands at position length - t
    + i. With `starts` (int32[M + 1], ascending, of 0 .. tokens) q is [tokens, N, H]: sequence m
    owns rows starts[m] to starts[m + 1]; rows that none owns give 0.

    A quantised row is its numbers times its scale, in float32. A sequence whose length does not fit
    in its cache (or whose pages are missing) gives NaN: rows were lost there. So does an empty
    sequence whose `new_lengths` is negative, which nobody has extended, and everything where a
    traced layer is none of the cache's.
    """
    if problem.kind == "interleaved":
        inputs = _separated(inputs, problem)
    q, lengths = inputs.q, inputs.lengths
    k, v = _keys_and_values(inputs, problem)
    packed = None if inputs.starts is None else _Packed.of(inputs.starts, q.shape[0])
    begin = lengths - (q.shape[1] if inputs.starts is None else jnp.diff(inputs.starts))
    q = q if packed is None else q[packed.rows]
    of_tree = None
    if problem.tree:  # its function counts positions from the newest rows
        row, query, key = (jnp.arange(n, dtype=jnp.int32) for n in (*q.shape[:2], k.shape[1]))
        key = (key[None] - begin[:, None])[:, None, None]
        where = row[:, None, None, None], 0, query[None, None, :, None], key
        assert problem.mask_program is not None
        of_tree = evaluate(problem.mask_program, where, inputs.mask_aux, Broadcasting())
    bounds = {side: jnp.broadcast_to(x, len(lengths)) for side, x in bounds_of(inputs).items()}
    rows = AttentionInputs(
        q,
        k,
        v,
        q_offset=begin,
        kv_lengths=lengths,
        mask_array=of_tree,
        sinks=inputs.sinks,
        mask_left=bounds.get("left"),
        mask_right=bounds.get("right"),
        mask_aux=inputs.mask_aux,
        score_aux=inputs.score_aux,
    )
    facts = AttentionProblem(
        op="flash_forward",
        gpu=None,
        dtype=problem.dtype,
        batch=q.shape[0],
        q_len=q.shape[1],
        kv_len=k.shape[1],
        q_heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=k.shape[3],
        v_head_dim=v.shape[3],
        mask=problem.mask,
        scale=problem.scale,
        softcap=problem.softcap,
        mask_program=None if problem.tree else problem.mask_program,
        score_program=problem.score_program,
    )
    out, lse = attention(rows, facts)
    lost = _lost(inputs)
    out = jnp.where(lost[:, None, None, None], jnp.nan, out).astype(q.dtype)
    lse = jnp.where(lost[:, None, None], jnp.nan, lse)
    return (out, lse) if packed is None else (packed.taken(out, 0), packed.taken(lse, -jnp.inf).T)


def decode_listed(inputs: DecodeInputs, problem: DecodeProblem) -> tuple[Array, Array]:
    """`decode` where a query row attends to the positions `kv_indices` [M, t, n] (of packed rows
    [tokens, n]) alone: to each as often as it is listed, if the sequence has it and the mask shows
    it to the row.
    """
    k, v = _keys_and_values(inputs, problem)
    lengths, shape = inputs.lengths, inputs.q.shape
    q, indices = inputs.q.reshape(-1, *shape[-2:]), inputs.kv_indices
    assert indices is not None
    indices, at = indices.reshape(len(q), -1), jnp.arange(len(q), dtype=jnp.int32)
    if inputs.starts is None:
        owner, owned = at // shape[1], jnp.ones(len(q), bool)
        position = lengths[owner] - shape[1] + at % shape[1]
    else:
        packed = _Packed.of(inputs.starts, len(q))
        owner, owned = packed.owner, packed.owned
        position = lengths[owner] - (inputs.starts[owner + 1] - at)
    exists = (indices >= 0) & (indices < k.shape[1]) & owned[:, None]
    key = jnp.where(exists, indices, 0)
    mask = problem.mask.filled(**bounds_of(inputs))
    row, query = (x[:, None, None, None] for x in (owner, position))
    seen = mask.allows(query, key[:, None, None], lengths[owner][:, None, None, None])
    seen = jnp.broadcast_to(seen & exists[:, None, None], (len(q), 1, 1, indices.shape[1]))
    if problem.mask_program is not None:
        head = jnp.arange(shape[-2], dtype=jnp.int32)[None, :, None, None]
        numbers = row, head, query, key[:, None, None]
        seen &= evaluate(problem.mask_program, numbers, inputs.mask_aux, Broadcasting())
    hidden = ~seen.any(axis=(1, 2))[..., None, None]
    k, v = (jnp.where(hidden, 0, x[owner[:, None], key]) for x in (k, v))
    rows = AttentionInputs(q[:, None], k, v, mask_array=seen, sinks=inputs.sinks)
    score = problem.score_program
    if score is not None:
        score = of_rows(score, len(q), entries=indices.shape[1])
        rows = rows._replace(score_aux=(*inputs.score_aux, owner, position, key))
    facts = AttentionProblem(
        op="flash_forward",
        gpu=None,
        dtype=problem.dtype,
        batch=len(q),
        q_len=1,
        kv_len=indices.shape[1],
        q_heads=q.shape[1],
        kv_heads=k.shape[2],
        head_dim=k.shape[3],
        v_head_dim=v.shape[3],
        mask=FULL,
        scale=problem.scale,
        softcap=problem.softcap,
        score_program=score,
    )
    out, lse = attention(rows, facts)
    lost = _lost(inputs)[owner] & owned
    out = jnp.where(lost[:, None, None, None], jnp.nan, out).astype(q.dtype)
    out = out.reshape(*shape[:-1], out.shape[-1])
    lse = jnp.where(lost[:, None, None], jnp.nan, lse)[..., 0]
    return out, jnp.swapaxes(lse.reshape(shape[:-1]), -1, -2)


def _keys_and_values(inputs: DecodeInputs, problem: DecodeProblem) -> tuple[Array, Array]:
    """K and V of the layer, [M, S, K, H] and [.., Hv]."""
    layer = inputs.layer

    def dense(cache: Buffers, scales: Buffers) -> Array:
        rows = _dense_rows(_select_layer(cache, layer), inputs.page_table)
        if scales is None:
            return rows
        # Laid out as rows of one column, whose dim is added after the layer is chosen.
        columns = jax.tree.map(lambda x: x[..., None], _select_layer(scales, layer))
        return rows.astype(jnp.float32) * _dense_rows(columns, inputs.page_table)

    k = dense(inputs.k_cache, inputs.k_scale)
    k = from_bytes(k) if problem.byte_rows else k
    if problem.shared_kv:
        return k, k[..., : problem.v_head_dim]
    return k, dense(inputs.v_cache, inputs.v_scale)


def _lost(inputs: DecodeInputs) -> Array:
    """bool[M]: sequences whose result is NaN."""
    lengths, layer = inputs.lengths, inputs.layer
    lost = lengths > _rows_held(_select_layer(inputs.k_cache, layer), inputs.page_table, lengths)
    if inputs.new_lengths is not None:
        lost = lost | ((lengths < 1) & (inputs.new_lengths < 0))
    if layer is not None:
        lost = lost | (layer < 0) | (layer >= jax.tree.leaves(inputs.k_cache)[0].shape[0])
    return lost


def to_bytes(rows: Array) -> Array:
    """uint8[.., 656]: rows [.., 576] as `BYTE_ROW` says, each 128 columns of V quantised as
    `quantize` says.
    """
    v, rest = rows[..., : BYTE_ROW.v_head_dim], rows[..., BYTE_ROW.v_head_dim :]
    v = v.reshape(*v.shape[:-1], BYTE_ROW.scales, SCALE_COLUMNS)
    numbers, scales = quantization.quantize(v, BYTE_DTYPE)
    parts = numbers.reshape(rest.shape[:-1] + (-1,)), scales, rest.astype(jnp.bfloat16)
    as_bytes = [lax.bitcast_convert_type(x, jnp.uint8) for x in parts]
    return jnp.concatenate([x.reshape(*rest.shape[:-1], -1) for x in as_bytes], axis=-1)


def from_bytes(rows: Array) -> Array:
    """float32[.., 576] of rows uint8[.., 656]."""
    row, lead = BYTE_ROW, rows.shape[:-1]
    ends = (row.v_head_dim, row.rest_begins)
    v, scales, rest = jnp.split(rows, ends, axis=-1)
    v = lax.bitcast_convert_type(v, BYTE_DTYPE).astype(jnp.float32)
    scales = lax.bitcast_convert_type(scales.reshape(*lead, -1, 4), jnp.float32)
    rest = lax.bitcast_convert_type(rest.reshape(*lead, -1, 2), jnp.bfloat16)
    v = v.reshape(*lead, row.scales, SCALE_COLUMNS) * scales[..., None]
    return jnp.concatenate([v.reshape(*lead, -1), rest.astype(jnp.float32)], axis=-1)


def _separated(inputs: DecodeInputs, problem: DecodeProblem) -> DecodeInputs:
    """Inputs with interleaved pages [.., pages, rows, K, H + Hv] split into pages of K and of V,
    [.., pages, K, rows, H].
    """
    pages = jnp.swapaxes(inputs.k_cache, -3, -2)
    k, v = pages[..., : problem.head_dim], pages[..., problem.head_dim :]
    return inputs._replace(k_cache=k, v_cache=v)


class _Packed(NamedTuple):
    """Packed rows as rows of a batch."""

    rows: Array  # int32[M, tokens]: row t of sequence m among the packed ones, where it has one
    owner: Array  # int32[tokens]
    within: Array  # int32[tokens]: number of the row in its sequence
    owned: Array  # bool[tokens]

    @classmethod
    def of(cls, starts: Array, tokens: int) -> "_Packed":
        at = jnp.arange(tokens, dtype=jnp.int32)
        owner = (starts[None] <= at[:, None]).sum(axis=1) - 1
        owned = (owner >= 0) & (owner < len(starts) - 1)
        owner = jnp.clip(owner, 0, len(starts) - 2)
        rows = jnp.clip(starts[:-1, None] + at[None], 0, tokens - 1)
        return cls(rows, owner, jnp.where(owned, at - starts[owner], 0), owned)

    def taken(self, results: Array, unowned: float) -> Array:
        """[tokens, ..] of out [M, tokens, N, Hv] or lse [M, N, tokens]."""
        if results.ndim == 3:
            results = jnp.moveaxis(results, 1, 2)
        packed = results[self.owner, self.within]
        owned = self.owned.reshape(-1, *(1,) * (packed.ndim - 1))
        return jnp.where(owned, packed, unowned).astype(packed.dtype)


def _select_layer(cache: Buffers, layer: Layer) -> Any:
    if layer is None:
        return cache
    if isinstance(cache, (tuple, list)):
        return tuple(lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in cache)
    return lax.dynamic_index_in_dim(cache, layer, keepdims=False)


def _dense_rows(cache: Buffers, page_table: Array | None) -> Array:
    """Any cache's rows as [M, S, K, H], token by token."""
    if isinstance(cache, (tuple, list)):
        most = max(x.shape[1] for x in cache)
        padded = [jnp.pad(x, ((0, 0), (0, most - x.shape[1]), (0, 0))) for x in cache]
        return jnp.swapaxes(jnp.stack(padded), 1, 2)
    if page_table is None:
        return jnp.swapaxes(cache, 1, 2)
    pages = jnp.take(cache, jnp.clip(page_table, 0, cache.shape[0] - 1), axis=0)
    sequences, width, kv_heads, page_size, dim = pages.shape
    return jnp.moveaxis(pages, 2, 3).reshape(sequences, width * page_size, kv_heads, dim)


def _rows_held(cache: Buffers, page_table: Array | None, lengths: Array) -> Array:
    """int32[M]: the rows that each sequence has room for, counted from 0 without a gap."""
    if isinstance(cache, (tuple, list)):
        return jnp.asarray([x.shape[1] for x in cache], lengths.dtype)
    if page_table is None:
        return jnp.full(lengths.shape, cache.shape[2], lengths.dtype)
    there = (page_table >= 0) & (page_table < cache.shape[0])
    return jnp.cumprod(there, axis=1).sum(axis=1).astype(lengths.dtype) * cache.shape[2]


def append(inputs: AppendInputs, problem: AppendProblem) -> Caches:
    """New rows k, v [M, t, K, H] into the caches, quantised as `quantize` says where the cache has
    scales.

    The rows of sequence m begin at start[m], or at end[m] - new_lengths[m]. Row i lands at
    start + i if i < new_lengths[m], neither start nor end[m] is negative, and the position is
    within the sequence's own rows; otherwise it is dropped and nothing else is touched. With
    `owners`, packed rows k, v [tokens, K, H]: row i lands at positions[i] of sequence owners[i].
    """
    if problem.kind == "interleaved":
        return _append_joined(inputs, problem)
    position: Any = inputs.positions
    if position is None:
        first = inputs.start
        if first is None:
            assert inputs.end is not None and inputs.new_lengths is not None
            first = jnp.where(inputs.end >= 0, inputs.end - inputs.new_lengths, -1)
        start = first[:, None]
        number = jnp.arange(inputs.k.shape[1], dtype=jnp.int32)[None]
        wanted = (start >= 0) & (start + number >= 0)
        if inputs.new_lengths is not None:
            wanted &= number < inputs.new_lengths[:, None]
        position = jnp.where(wanted, start + number, -1)

    def write(cache: Buffers, new: Array | None) -> Any:
        if cache is None or new is None:
            return cache
        if new.ndim == inputs.k.ndim - 1:  # scales, as rows of one column
            columns = jax.tree.map(lambda x: x[..., None], cache)
            return jax.tree.map(lambda x: x[..., 0], place(columns, new[..., None]))
        dtype = jax.tree.leaves(cache)[0].dtype
        cache, (new,) = _as_moved(cache), _as_moved((new.astype(dtype),))
        return _as_kept(place(cache, new), dtype)

    def place(cache: Buffers, new: Array) -> Any:
        layer, table = inputs.layer, inputs.page_table
        if inputs.owners is not None:
            return _place_packed(cache, layer, (inputs.owners, position), new, table)
        if isinstance(cache, (tuple, list)):
            each = zip(cache, new, position, strict=True)
            return tuple(_scatter(x, layer, (at,), row) for x, row, at in each)
        if table is None:
            return _scatter(cache, layer, (position,), new, batched=True)
        return _scatter(cache, layer, _page_and_row(cache, position, table), new)

    rows: list[Any] = [(inputs.k, None), (inputs.v, None)]
    if problem.byte_rows:
        rows[0] = to_bytes(inputs.k), None
    elif problem.quantized:
        dtype = problem.cache_dtype
        quantize = quantization.quantize
        rows = [(None, None) if x is None else quantize(x, dtype) for x in (inputs.k, inputs.v)]
    caches = inputs.k_cache, inputs.v_cache, inputs.k_scale, inputs.v_scale
    new = [pair[n] for n in (0, 1) for pair in rows]
    return Caches(*(write(cache, x) for cache, x in zip(caches, new, strict=True)))


def _append_joined(inputs: AppendInputs, problem: AppendProblem) -> Caches:
    """`append` into interleaved pages [.., pages, rows, K, H + Hv]: K and V of a new row are joined
    and written as one row.
    """
    assert inputs.v is not None
    both = jnp.concatenate([inputs.k, inputs.v], axis=-1)
    pages = jnp.swapaxes(inputs.k_cache, -3, -2)
    rows = inputs._replace(k_cache=pages, k=both, v=None)
    written = append(rows, dataclasses.replace(problem, kind="paged"))
    return written._replace(k_cache=jnp.swapaxes(written.k_cache, -3, -2))


def _as_moved(cache: Buffers) -> Any:
    """float8 as bytes: XLA moves it on a CPU as float16, which changes the bits of NaN."""

    def moved(x: Array) -> Array:
        narrow = x.dtype.itemsize == 1 and jnp.issubdtype(x.dtype, jnp.floating)
        return lax.bitcast_convert_type(x, jnp.uint8) if narrow else x

    return jax.tree.map(moved, cache)


def _as_kept(cache: Buffers, dtype: DTypeLike) -> Any:
    """`_as_moved` undone."""
    return jax.tree.map(
        lambda x: x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype), cache
    )


def rows_kept(inputs: KeepInputs, problem: KeepProblem) -> Array:
    """int32[M]: `Kept.rows`, the newest rows of each sequence that stay, at most the path's width;
    -1 where the sequence stays as it is, -2 where it overflows, since another one holds a page of
    those rows.

    A sequence without newest rows, or that has overflowed, stays as it is; and, where no row moves
    (there is no path), one whose rows all stay.
    """
    lengths, new, table = inputs.lengths, inputs.new_lengths, inputs.page_table
    moves, holders = inputs.path is not None, inputs.holders
    most = jnp.minimum(new, problem.width) if moves else new
    kept = jnp.clip(inputs.counts, 0, jnp.maximum(most, 0))
    changes = (new > 0) & (lengths >= new)
    changes &= lengths <= jnp.asarray(problem.capacities, jnp.int32)
    changes &= True if moves else kept < new
    if table is not None and holders is not None:
        page_size = problem.page_size or 0
        slots = jnp.arange(table.shape[1], dtype=jnp.int32)[None]
        needed = slots * page_size < lengths[:, None]
        newest = slots >= ((lengths - new) // page_size)[:, None]
        there = (table >= 0) & (table < holders.shape[0])
        shared = needed & newest & (jnp.take(holders, table, mode="clip") > 1)
        kept = jnp.where(shared.any(axis=1), -2, kept)
        changes &= ~(needed & ~there).any(axis=1)
    return jnp.where(changes, kept, -1)


def keep(inputs: KeepInputs, problem: KeepProblem) -> Kept:
    """The caches where row j of the newest rows of sequence m is the row that path[m, j] of them
    was, for j below the number of rows that stay; `path` is held to those that there are.
    """
    count, new, table = rows_kept(inputs, problem), inputs.new_lengths, inputs.page_table
    assert inputs.path is not None
    path = jnp.clip(inputs.path, 0, jnp.maximum(new - 1, 0)[:, None])
    rows = jnp.arange(path.shape[1], dtype=jnp.int32)[None]
    moves, begin = count > 0, jnp.where(count > 0, inputs.lengths - new, 0)
    source = begin[:, None] + jnp.where(moves[:, None], path, 0)
    target = jnp.where(rows < count[:, None], begin[:, None] + rows, -1)

    def moved(cache: Buffers) -> Any:
        if isinstance(cache, (tuple, list)):
            three = zip(cache, source, target, strict=True)
            return tuple(within(x[None], at[None], to[None])[0] for x, at, to in three)
        return within(cache, source, target)

    def within(cache: Array, source: Array, target: Array) -> Array:
        """Rows moved in an array [slabs, K, rows, H], whose slabs are pages or sequences."""
        if table is None:
            held = jnp.take_along_axis(cache, source[:, None, :, None], axis=2, mode="clip")
            return _scatter(cache, None, (target,), jnp.swapaxes(held, 1, 2), batched=True)
        page, row = _page_and_row(cache, source, table)
        held = cache.at[page, :, row].get(mode="clip")
        return _scatter(cache, None, _page_and_row(cache, target, table), held)

    def over_layers(cache: Buffers, scales: bool = False) -> Any:
        if cache is None:
            return None
        dtype = jax.tree.leaves(cache)[0].dtype
        columns = jax.tree.map(lambda x: x[..., None] if scales else x, _as_moved(cache))
        done = (moved if problem.layers is None else jax.vmap(moved))(columns)
        done = jax.tree.map(lambda x: x[..., 0] if scales else x, done)
        return _as_kept(done, dtype)

    numbers = over_layers(inputs.k_cache), over_layers(inputs.v_cache)
    scales = over_layers(inputs.k_scale, True), over_layers(inputs.v_scale, True)
    return Kept(Caches(*numbers, *scales), count)


def _place_packed(
    cache: Buffers,
    layer: Layer,
    where: tuple[Array, Array],
    new: Array,
    page_table: Array | None,
) -> Any:
    """Packed rows, each at its position of its sequence; negative: dropped."""
    owners, position = where
    if isinstance(cache, (tuple, list)):
        own = [jnp.where(owners == m, position, -1) for m in range(len(cache))]
        return tuple(_scatter(x, layer, (at,), new) for x, at in zip(cache, own, strict=True))
    if page_table is None:
        return _scatter(cache, layer, (jnp.where(position < 0, -1, owners), position), new)
    page, row = _page_and_row(cache, position[:, None], page_table[owners])
    return _scatter(cache, layer, (page[:, 0], row[:, 0]), new)


def _scatter(
    cache: Array, layer: Layer, index: tuple[Array, ...], new: Array, batched: bool = False
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
    """The page and the row of each position in the pool; page -1 where there is none."""
    pages, page_size = cache.shape[-4], cache.shape[-2]
    slot = position // page_size
    page = jnp.take_along_axis(
        page_table, jnp.clip(slot, 0, page_table.shape[1] - 1), axis=1, mode="clip"
    )
    there = (position >= 0) & (slot < page_table.shape[1]) & (page >= 0) & (page < pages)
    return jnp.where(there, page, -1), position % page_size
