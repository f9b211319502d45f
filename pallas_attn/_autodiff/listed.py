"""Attention of contiguous keys by lists of positions (`flash_attention(kv_indices=)`), and its
gradients.

Rows of k and v [B, S, K, ..] are those of one kv head of one sequence, [B * S * K, ..], as they
lie; each query row and kv head is a query row of N / K heads, with a list of such rows. So the
forward is decode by lists. The backward gathers the rows of some lists at a time, and adds to
gradients of k and v in float32, by XLA: its memory is that of the gradients and of these rows.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._cache.attend import attend
from pallas_attn._call import bind, checks, device
from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn.errors import described
from pallas_attn.masks import FULL, Mask

Array = jax.Array

GATHERED = 2**24  # numbers of k or v that a step of the backward gathers, about


class Facts(NamedTuple):
    """Static facts of a call."""

    scale: float
    softcap: float | None
    precision: str | None
    implementation: str | None


class Lists(NamedTuple):
    """Rows of queries, keys and values, and the lists."""

    q: Array  # [R, N / K, H]
    k: Array  # [B * S * K, H]
    v: Array  # [B * S * K, Hv]
    rows: Array  # int32[R, n], -1 for none


def attention(
    arrays: tuple[Array, Array, Array], indices: checks.Argument, options: dict[str, Any]
) -> tuple[Array, Array]:
    """out [B, T, N, Hv] and lse [B, N, T] of q, k, v. `options`: arguments of `flash_attention`."""
    q, k, v = bind.operands(*arrays)
    _check(q, options)
    batch, q_len, q_heads, dim = q.shape
    kv_len, kv_heads, v_dim = *k.shape[1:3], v.shape[3]
    wanted = (
        f"int32[{batch}, heads, {q_len}, n], heads {kv_heads} or 1 (n >= 1 positions a query row, "
        "-1 for none)"
    )
    indices = checks.integers("kv_indices", indices, wanted, (batch, None, q_len, None))
    if indices.shape[1] not in (1, kv_heads) or not indices.shape[3]:
        raise ValueError(f"kv_indices: expected {wanted}, got int32{list(indices.shape)}")
    rows = _rows(indices, (kv_len, kv_heads), options)
    if odd := -dim % 8:
        q, k = (jnp.pad(x, ((0, 0),) * 3 + ((0, odd),)) for x in (q, k))
    if odd := -v_dim % 8:
        v = jnp.pad(v, ((0, 0),) * 3 + ((0, odd),))
    scale, softcap = options["scale"], options["softcap"]
    facts = Facts(
        dim**-0.5 if scale is None else checks.scale(scale),
        None if softcap is None else checks.softcap(softcap),
        checks.precision(options["precision"], q.dtype),
        options["implementation"],
    )
    if 0 in (batch, q_len, kv_len):
        wide = jnp.promote_types(q.dtype, jnp.float32)
        out = jnp.zeros((batch, q_len, q_heads, v_dim), q.dtype)
        return out, jnp.full((batch, q_heads, q_len), -jnp.inf, wide)
    q = q.reshape(-1, q_heads // kv_heads, q.shape[3])
    k, v = (x.reshape(-1, x.shape[3]) for x in (k, v))
    out, lse = _attend(facts, Lists(q, k, v, rows))
    out = out.reshape(batch, q_len, q_heads, -1)[..., :v_dim]
    return out, jnp.swapaxes(lse.reshape(batch, q_len, q_heads), 1, 2)


def _check(q: Array, options: dict[str, Any]) -> None:
    """ValueError for arguments that do not go with lists."""
    for name in REFUSED:
        value, default = options[name], REFUSED[name]
        if value is not default:
            got = described(value)
            raise ValueError(f"{name}: expected {default} beside kv_indices, got {got}; leave it")
    if not isinstance(options["mask"], Mask):
        raise ValueError(
            "mask: expected a Mask beside kv_indices, got "
            f"{type(options['mask']).__name__}; leave hidden positions out of the lists"
        )
    if q.dtype.itemsize < 2 or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(
            "q, k, v: expected floating-point numbers of 16 bits or more beside kv_indices, got "
            f"{q.dtype}; cast them"
        )


# Arguments that lists do not go with, and their defaults.
REFUSED: dict[str, Any] = dict.fromkeys(
    ("score", "q_lengths", "segment_ids", "q_starts", "kv_starts", "bias", "mask_array", "sinks")
    + ("context", "rotary_positions", "q_scale", "k_scale", "v_scale", "out_dtype", "kv_blocks")
)
REFUSED |= {"float8": False, "deterministic": False, "rotary": None}


def _rows(indices: Array, sizes: tuple[int, int], options: dict[str, Any]) -> Array:
    """int32[B * T * K, n]: rows of k that a list names and the mask shows, -1 for none."""
    kv_len, kv_heads = sizes
    batch, _, q_len, n = indices.shape
    lengths = checks.lengths("kv_lengths", options["kv_lengths"], batch, kv_len)
    end = jnp.full(batch, kv_len, jnp.int32) if lengths is None else lengths
    static, traced = checks.offset(options["q_offset"], batch)
    offset = jnp.int32(static) if traced is None else traced.reshape(-1, 1, 1, 1)
    query = offset + jnp.arange(q_len, dtype=jnp.int32).reshape(1, 1, -1, 1)
    exists = (indices >= 0) & (indices < end.reshape(-1, 1, 1, 1))
    key = jnp.where(exists, indices, 0)
    mask = options["mask"]
    mask = mask.static.filled(**checks.mask_bounds(mask))
    first = (jnp.arange(batch, dtype=jnp.int32) * kv_len).reshape(-1, 1, 1, 1)
    head = jnp.arange(kv_heads, dtype=jnp.int32).reshape(1, -1, 1, 1)
    rows = jnp.where(exists & mask.allows(query, key), (first + key) * kv_heads, -1)
    rows = jnp.where(rows >= 0, rows + head, -1)  # [B, K, T, n]
    return jnp.swapaxes(rows, 1, 2).reshape(-1, n)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(facts: Facts, lists: Lists) -> tuple[Array, Array]:
    """out [R, N / K, Hv] and lse [R, N / K]."""
    q, k, v, rows = lists
    inputs = DecodeInputs(
        q[None],
        k[None, None],
        v[None, None],
        jnp.full(1, k.shape[0], jnp.int32),
        None,
        None,
        kv_indices=rows[None],
    )
    problem = DecodeProblem(
        gpu=device.gpu_generation(),
        kind="stacked",
        dtype=str(q.dtype),
        cache_dtype=str(k.dtype),
        sequences=1,
        q_len=q.shape[0],
        q_heads=q.shape[1],
        kv_heads=1,
        head_dim=q.shape[2],
        v_head_dim=v.shape[1],
        capacities=(k.shape[0],),
        mask=FULL,
        scale=facts.scale,
        softcap=facts.softcap,
        precision=facts.precision,
        listed=rows.shape[1],
    )
    out, lse = attend(problem, inputs, facts.implementation)
    return out[0], lse[0].T


def _forward(facts: Facts, lists: Lists) -> tuple[tuple[Array, Array], tuple[Lists, Array, Array]]:
    out, lse = _attend(facts, lists)
    return (out, lse), (lists, out, lse)


def _backward(
    facts: Facts, kept: tuple[Lists, Array, Array], cotangents: tuple[Array, Array]
) -> tuple[Lists]:
    lists, out, lse = kept
    q, k, v, rows = lists
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    d_out, d_lse = (x.astype(wide) for x in cotangents)
    # Everything is 0 for a row that sees no key.
    delta = (d_out * out.astype(wide)).sum(-1) - d_lse
    empty = lse == -jnp.inf
    lse, delta = jnp.where(empty, jnp.inf, lse), jnp.where(empty, 0, delta)
    d_out = jnp.where(empty[..., None], 0, d_out)
    size = max(1, GATHERED // (rows.shape[1] * max(k.shape[1], v.shape[1])))
    steps = -(-len(q) // size)
    size = -(-len(q) // steps) if steps else 1

    def cut(x: Array, fill: float = 0) -> Array:
        pads = ((0, steps * size - len(x)),) + ((0, 0),) * (x.ndim - 1)
        return jnp.pad(x, pads, constant_values=fill).reshape(steps, size, *x.shape[1:])

    def step(sums: tuple[Array, Array], some: tuple[Array, ...]) -> tuple[Any, Array]:
        q, d_out, lse, delta, rows = some
        there, at = (rows >= 0)[..., None], jnp.maximum(rows, 0)
        to = jnp.where(rows >= 0, rows, len(k))  # past the end: nothing is added
        keys, values = (jnp.where(there, x[at], 0).astype(wide) for x in (k, v))
        q = q.astype(wide)
        dot = functools.partial(jnp.einsum, precision="highest")
        logits = dot("rgh,rnh->rgn", q, keys) * facts.scale
        slope = jnp.asarray(facts.scale, wide)
        if facts.softcap is not None:
            bent = jnp.tanh(logits / facts.softcap)
            logits, slope = bent * facts.softcap, (1 - bent * bent) * facts.scale
        seen = (rows >= 0)[:, None]
        p = jnp.where(seen, jnp.exp(logits - lse[..., None]), 0)
        dp = dot("rgh,rnh->rgn", d_out, values) - delta[..., None]
        ds = jnp.where(seen, p * dp * slope, 0)
        dk, dv = sums
        dk = dk.at[to].add(dot("rgn,rgh->rnh", ds, q), mode="drop")
        dv = dv.at[to].add(dot("rgn,rgh->rnh", p, d_out), mode="drop")
        return (dk, dv), dot("rgn,rnh->rgh", ds, keys)

    each = cut(q), cut(d_out), cut(lse, jnp.inf), cut(delta), cut(rows, -1)
    zeros = jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide)
    (dk, dv), dq = lax.scan(step, zeros, each)
    dq = dq.reshape(-1, *q.shape[1:])[: len(q)]
    none: Any = jnp.zeros(rows.shape, jax.dtypes.float0)
    return (Lists(dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), none),)


_attend.defvjp(_forward, _backward)
