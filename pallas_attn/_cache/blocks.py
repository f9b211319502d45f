"""The block of consecutive rows that a device has of each sequence, where rows are split over
devices: where rows lie in it, and where sequences end.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._mesh import sharding
from pallas_attn.context import Context, shards_of

Array = jax.Array
Held = tuple[int, ...]  # rows of each sequence in the block


def check_split(context: Context, buffers: Array | tuple[Array, ...]) -> None:
    """ValueError for buffers of a cache that came whole into `jax.shard_map`."""
    shards_of(context)  # a clear message where no axis is mapped
    sharding.check_split(context.axis, "cache", buffers, "split it by in_specs, cache.specs()")


def rows_here(context: Context, held: Held, owners: Array, positions: Array) -> Array:
    """int32[rows]: the place of each row in this device's block, -1 where another device has it.
    `owners`, `positions`: the sequence of each row and its position there, int32[rows].
    """
    size = jnp.asarray(held, jnp.int32)[owners]
    within = positions - lax.axis_index(context.axis) * size
    return jnp.where((positions >= 0) & (within >= 0) & (within < size), within, -1)


def ends(context: Context, held: Held, lengths: Array) -> Array:
    """int32[M]: where sequences end, counted from this device's first row."""
    size = jnp.asarray(held, jnp.int32)
    return jnp.clip(lengths, 0, shards_of(context) * size) - lax.axis_index(context.axis) * size


def begins(context: Context, held: Held, lengths: Array, rows: int) -> tuple[Array, Array]:
    """int32[M], twice: begin of the newest `rows` rows of each sequence among the positions that
    `sharded_rows.decode` gives to this device's queries, and among its keys.
    """
    end = ends(context, held, lengths)
    return jnp.clip(end, 0, jnp.asarray(held, jnp.int32)) - rows, end - rows
