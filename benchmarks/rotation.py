"""RoPE as models write it, for peers of `flash_attention(rotary=)` and for its oracle."""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import verify
from pallas_attn.rotary import Rotary


def rotate(x: jax.Array, rotary: Rotary, back: bool = False) -> jax.Array:
    """Rows x [B, rows, heads, H] at positions 0, 1, .. rotated in float32; `back`: by the opposite
    angles.
    """
    cos, sin = (t[None, : x.shape[1], None].astype(jnp.float32) for t in (rotary.cos, rotary.sin))
    sin, pairs = -sin if back else sin, rotary.cos.shape[1]
    columns = jnp.arange(rotary.first, rotary.first + 2 * pairs, dtype=jnp.int32)
    first, second = columns.reshape(-1, 2).T if rotary.interleaved else columns.reshape(2, -1)
    wide = x.astype(jnp.float32)
    a, b = wide[..., first], wide[..., second]
    return wide.at[..., first].set(a * cos - b * sin).at[..., second].set(b * cos + a * sin)


def in_model(
    q: jax.Array, k: jax.Array, rest: dict[str, Any]
) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
    """q and k, rotated if `rest` has a "rotary", and `rest` without it."""
    rest = dict(rest)
    rotary = rest.pop("rotary", None)
    if rotary is None:
        return q, k, rest

    def turned(x: jax.Array) -> jax.Array:
        cos, sin = (
            t[None, : x.shape[1], None].astype(jnp.float32) for t in (rotary.cos, rotary.sin)
        )
        end = rotary.first + 2 * rotary.cos.shape[1]
        part = x[..., rotary.first : end].astype(jnp.float32)
        if rotary.interleaved:
            a, b = part[..., ::2], part[..., 1::2]
        else:
            a, b = jnp.split(part, 2, axis=-1)
        both = a * cos - b * sin, b * cos + a * sin
        join = jnp.stack if rotary.interleaved else jnp.concatenate
        part = join(both, axis=-1).reshape(part.shape).astype(x.dtype)
        return jnp.concatenate([x[..., : rotary.first], part, x[..., end:]], axis=-1)

    return turned(q), turned(k), rest


def expected(arrays: dict[str, Any], options: dict[str, Any], cotangent: jax.Array | None) -> Any:
    """`verify.expected` for q and k that are rotated and rounded once; dq and dk are rotated back.
    The naive dq and dk are rounded before that, since the model stores them.
    """
    arrays = dict(arrays)
    rotary, dtype = arrays.pop("rotary"), arrays["q"].dtype
    arrays |= {name: rotate(arrays[name], rotary).astype(dtype) for name in ("q", "k")}

    def back(results: tuple[jax.Array, ...], stored: bool) -> tuple[jax.Array, ...]:
        if cotangent is None:
            return results
        out, *gradients, dv = results
        if stored:
            gradients = [x.astype(dtype) for x in gradients]
        return (out, *(rotate(x, rotary, back=True) for x in gradients), dv)

    oracle, naive = verify.expected(arrays, options, cotangent)
    return back(oracle, False), back(naive, True)
