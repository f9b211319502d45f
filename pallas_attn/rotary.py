"""RMS norm and rotation by position (RoPE) of rows of K, by `write_kv` on their way into a cache,
and of q, by `decode_attention`; rotation of q and k by `flash_attention`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call import sharding
from pallas_attn._call.problem import Change
from pallas_attn.errors import described
from pallas_attn.masks import known


@dataclasses.dataclass(frozen=True, eq=False)
class Rotary:
    """RoPE: pairs of columns of a row are rotated by angles that grow with its position. A pytree:
    the tables are its leaves, the rest is static.

    Pair j of the row at position p becomes `(a * cos[p, j] - b * sin[p, j], b * cos[p, j] +
    a * sin[p, j])`. The pairs are columns `first + j` and `first + j + D / 2` of D rotated columns
    ("halves", as in Llama), or, `interleaved`, columns `first + 2 * j` and `first + 2 * j + 1`.
    Columns outside of `first` to `first + D` stay as they are.
    """

    cos: jax.Array  # float32[positions, D / 2]
    sin: jax.Array
    interleaved: bool = False
    first: int = 0

    @classmethod
    def create(
        cls,
        positions: int,
        dims: int,
        *,
        base: float = 10000.0,
        interleaved: bool = False,
        first: int = 0,
    ) -> "Rotary":
        """Tables for positions 0 to `positions` - 1 and `dims` columns: pair j turns by
        `base ** (-2 * j / dims)` radians a position.
        """
        sizes = {"positions": positions, "dims": dims}
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise ValueError(f"{name}: expected an int of at least 1, got {described(value)}")
        if dims % 2:
            raise ValueError(f"dims: expected an even number of columns, got {dims}")
        number = known(base)
        if number is None:
            raise ValueError(
                "base: expected a number that is known now, got a traced "
                f"{jnp.result_type(base)}; write Rotary(cos, sin) with tables of your own"
            )
        if number.ndim or number.dtype.kind not in "iuf" or not number > 0:
            raise ValueError(f"base: expected a positive number, got {described(base)}")
        angles = np.arange(positions)[:, None] * float(base) ** (-np.arange(0, dims, 2) / dims)
        cos, sin = (jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin))
        return cls(cos, sin, interleaved, first)


jax.tree_util.register_dataclass(
    Rotary, data_fields=["cos", "sin"], meta_fields=["interleaved", "first"]
)


@dataclasses.dataclass(frozen=True, eq=False)
class RMSNorm:
    """RMS norm of each row of a head, before its rotation: `x * rsqrt(mean(x * x) + eps) * weight`.
    A pytree: the weight is its leaf.
    """

    weight: jax.Array  # [H]
    eps: float = 1e-6


jax.tree_util.register_dataclass(RMSNorm, data_fields=["weight"], meta_fields=["eps"])


def changed(
    x: jax.Array, position: jax.Array, change: Change, arrays: dict[str, jax.Array]
) -> jax.Array:
    """Norm and rotate rows x [..., heads, H] at positions [...], in float32 (float64 for float64
    rows), not rounded. Positions are clipped to the tables, outside of which no cache has rows.
    """
    run = functools.partial(_changed, change)
    return sharding.on_automatic_axes(run, (x, position, arrays), sharding.spec_of(x))


def _changed(
    change: Change, x: jax.Array, position: jax.Array, arrays: dict[str, jax.Array]
) -> jax.Array:
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    x = x.astype(wide)
    if change.eps is not None:
        squares = jnp.sum(x * x, axis=-1, keepdims=True) * (1 / change.dim)
        weight = arrays["norm_weight"].astype(wide)
        x = x * jax.lax.rsqrt(squares + change.eps) * weight.reshape((1,) * (x.ndim - 1) + (-1,))
    if not change.pairs:
        return x
    at = jnp.clip(position, 0, arrays["cos"].shape[0] - 1)
    return rotated_pairs(x, arrays["cos"][at], arrays["sin"][at], change)


def rotated_pairs(x: jax.Array, cos: jax.Array, sin: jax.Array, change: Change) -> jax.Array:
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
