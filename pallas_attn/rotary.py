"""RMS norm and rotation by position (RoPE) of rows of K, by `write_kv` on their way into a cache,
and of q, by `decode_attention`; rotation of q and k by `flash_attention`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn.errors import described
from pallas_attn.masks import known

Array = jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Rotary:
    """RoPE: pairs of columns of a row are rotated by angles that grow with its position. A pytree:
    the tables are its leaves, the rest is static.

    Pair j of the row at position p becomes `(a * cos[p, j] - b * sin[p, j], b * cos[p, j] +
    a * sin[p, j])`. The pairs are columns `first + j` and `first + j + D / 2` of D rotated columns
    ("halves", as in Llama), or, `interleaved`, columns `first + 2 * j` and `first + 2 * j + 1`.
    Columns outside of `first` to `first + D` stay as they are.

    Example::

        >>> q = jnp.ones((1, 8, 2, 64))
        >>> rotary = pa.Rotary.create(positions=8, dims=64)
        >>> pa.flash_attention(q, q, q, rotary=rotary).shape
        (1, 8, 2, 64)
    """

    cos: jax.Array  # float32[positions, D / 2]
    sin: jax.Array
    interleaved: bool = False
    first: int = 0
    rows: Array | tuple[Array, Array] | None = None  # see `at`

    def at(self, positions: Array | tuple[Array, Array]) -> "Rotary":
        """The same for rows of q and k at these positions, in place of those that masks count:
        int32[T] or int32[B, T], or a pair (of q, of k); under a `context` those of this device's
        rows. For `flash_attention` alone. A row whose position is known only at run time, and lies
        outside of the tables, becomes NaN.
        """
        return dataclasses.replace(self, rows=positions)

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
    Rotary, data_fields=["cos", "sin", "rows"], meta_fields=["interleaved", "first"]
)


@dataclasses.dataclass(frozen=True, eq=False)
class RMSNorm:
    """RMS norm of each row of a head, before its rotation: `x * rsqrt(mean(x * x) + eps) * weight`.
    A pytree: the weight is its leaf.

    Example::

        >>> cache = pa.StackedCache.create(1, 16, kv_heads=2, head_dim=64)
        >>> rows = jnp.ones((1, 5, 2, 64), cache.k.dtype)
        >>> pa.append_kv(cache, rows, rows, norm=pa.RMSNorm(jnp.ones(64))).lengths
        Array([5], dtype=int32)
    """

    weight: jax.Array  # [H]
    eps: float = 1e-6


jax.tree_util.register_dataclass(RMSNorm, data_fields=["weight"], meta_fields=["eps"])
