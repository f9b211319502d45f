"""Arrays and slabs of a quantised cache, for launches that convert its rows."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention.cache_layout import Layout
from pallas_attn.kernels.lang.types import GmemRef, Index


class CacheRefs(NamedTuple):
    """Global memory."""

    tables: tuple[tuple[GmemRef, ...], ...]  # `Layout.tables`: K, V and their scales
    lengths: GmemRef  # int32[M]; None for a pool
    capacities: GmemRef  # int32[M], where they differ
    page_table: GmemRef  # None for a pool, too
    layer: GmemRef  # int32[1], where the cache has layers
    results: tuple[Any, ...] = ()  # written


class Slab(NamedTuple):
    """The rows of a kv head of a sequence, or all rows of a pool: scalars."""

    sequence: Index
    head: Index
    live: Index  # rows that exist
    capacity: Index | None  # rows of the sequence, where capacities differ


def slab_of(layout: Layout, refs: CacheRefs, number: Index) -> Slab:
    """The slab of a number."""
    m, head = (f(number, jnp.int32(layout.kv_heads)) for f in (lax.div, lax.rem))
    capacity = None if refs.capacities is None else refs.capacities[m]
    live: Index = layout.capacity if capacity is None else capacity
    if refs.lengths is not None:
        live = jnp.clip(refs.lengths[m], 0, live)
    return Slab(m, head, jnp.int32(live), capacity)
