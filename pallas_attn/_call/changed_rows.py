"""The norm and the rotation of rows by XLA: `Change` says which, in float32."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import Change
from pallas_attn._mesh import sharding

Array = jax.Array


def changed(x: Array, position: Array, change: Change, arrays: dict[str, Array]) -> Array:
    """Norm and rotate rows x [..., heads, H] at positions [...], in float32 (float64 for float64
    rows), not rounded. Positions are clipped to the tables, outside of which no cache has rows.
    """
    run = functools.partial(_changed, change)
    return sharding.on_automatic_axes(run, (x, position, arrays), sharding.spec_of(x))


def _changed(change: Change, x: Array, position: Array, arrays: dict[str, Array]) -> Array:
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    x = x.astype(wide)
    if change.eps is not None:
        squares = jnp.sum(x * x, axis=-1, keepdims=True) * (1 / change.dim)
        weight = arrays["norm_weight"].astype(wide)
        x = x * lax.rsqrt(squares + change.eps) * weight.reshape((1,) * (x.ndim - 1) + (-1,))
    if not change.pairs:
        return x
    at = jnp.clip(position, 0, arrays["cos"].shape[0] - 1)
    return rotated_pairs(x, arrays["cos"][at], arrays["sin"][at], change)


def rotated_pairs(x: Array, cos: Array, sin: Array, change: Change) -> Array:
    """Rotate rows x [..., heads, H] by the rows [..., pairs] of the tables, in float32 (float64 for
    float64 rows), not rounded.
    """
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    x = x.astype(wide)
    cos, sin = (table[..., None, :].astype(wide) for table in (cos, sin))
    # The derivative of a split is a concatenation; of slices it is a sum of padded arrays, which
    # took XLA twice as long.
    sizes = change.first, change.first + 2 * change.pairs
    before, part, after = jnp.split(x, sizes, axis=-1)
    if change.interleaved:
        each = jnp.split(part.reshape(*part.shape[:-1], change.pairs, 2), 2, axis=-1)
        a, b = (half[..., 0] for half in each)
    else:
        a, b = jnp.split(part, 2, axis=-1)
    both = a * cos - b * sin, b * cos + a * sin
    if change.interleaved:
        part = jnp.stack(both, axis=-1).reshape(part.shape)
    else:
        part = jnp.concatenate(both, axis=-1)
    return jnp.concatenate([before, part, after], axis=-1)
