"""One device's part of a model that is split over a mesh axis, within jax.shard_map.

Heads, columns of the MLP and rows of the vocabulary are split (`mesh`); rows of activations are
whole on every device.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_lm.rows import total

Array = jax.Array


def embedded(axis: str, vocab: int, embed: Array, tokens: Array) -> Array:
    """Rows [..., D] of the embedding. A device has zeros for the words of others, so that the sum
    is exact.
    """
    count = embed.shape[0]
    row = jnp.clip(tokens, 0, vocab - 1) - lax.axis_index(axis) * count
    own = (row >= 0) & (row < count)
    rows = jnp.take(embed, row, axis=0, mode="clip")
    return lax.psum(jnp.where(own[..., None], rows, 0), axis)


def summed(axis: str, partials: Array, dtype: DTypeLike) -> Array:
    """The sum over devices, float32, of each device's sum of its partials, rounded to `dtype`."""
    return lax.psum(total(partials, dtype).astype(jnp.float32), axis)


def all_logits(axis: str, vocab: int, logits: Array) -> Array:
    """The logits [..., vocab] of all devices."""
    gathered = lax.all_gather(logits, axis, axis=logits.ndim - 1, tiled=True, to="invarying")
    return gathered[..., :vocab]
