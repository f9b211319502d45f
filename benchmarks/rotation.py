"""RoPE as models write it, for peers of `flash_attention(rotary=)` and for its oracle."""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import verify
from pallas_attn.rotary import Rotary


def rotate(x: jax.Array, rotary: Rotary, back: bool = False) -> jax.Array:
    """float32: rows x [B, rows, heads, H] at positions 0, 1, .. rotated; `back`: by the opposite
    angles.
    """
    cos, sin = (t[None, : x.shape[1], None].astype(jnp.float32) for t in (rotary.cos, rotary.sin))
    sin, end = -sin if back else sin, rotary.first + 2 * rotary.cos.shape[1]
    wide = x.astype(jnp.float32)
    part = wide[..., rotary.first : end]
    if rotary.interleaved:
        a, b = part[..., ::2], part[..., 1::2]
    else:
        a, b = jnp.split(part, 2, axis=-1)
    both = a * cos - b * sin, b * cos + a * sin
    join = jnp.stack if rotary.interleaved else jnp.concatenate
    part = join(both, axis=-1).reshape(part.shape)
    return jnp.concatenate([wide[..., : rotary.first], part, wide[..., end:]], axis=-1)


def in_model(
    q: jax.Array, k: jax.Array, rest: dict[str, Any]
) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
    """q and k, rotated if `rest` has a "rotary", and `rest` without it."""
    rest = dict(rest)
    rotary = rest.pop("rotary", None)
    if rotary is not None:
        q, k = (rotate(x, rotary).astype(x.dtype) for x in (q, k))
    return q, k, rest


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
