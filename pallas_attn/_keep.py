"""`cache.keep`: which rows of a cache stay, and the launch that moves them.

What is decided from lengths and pages is decided here, by XLA, once for all layers; the kernel
moves rows that are known to exist.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn import _checks, _device, _dispatch, _transforms
from pallas_attn._problem import MOST_ROWS, Caches, KeepInputs, KeepProblem

Array = jax.Array


def keep(cache: Any, counts: int | Array, path: Array | None, implementation: str | None) -> Any:
    """The method of every cache."""
    _checks.kv_cache(cache)
    _dispatch.check_name(implementation)
    sequences, new, lengths = cache.num_sequences, cache.new_lengths, cache.lengths
    static = _checks.static_int(counts)
    given: Any = counts if static is None else np.int32(min(max(static, 0), 2**31 - 1))
    counts = _checks.one_or_each("counts", given, sequences, "rows to keep of each sequence")
    most = new
    if path is not None:
        if cache.context is not None:
            raise ValueError(
                "path: expected None over a cache whose rows are split over devices, where the "
                "first rows can be kept, got an array"
            )
        wanted = f"int32[{sequences}, p] (the rows to keep, of those that extend took)"
        path = _checks.integers("path", path, wanted, (sequences, None))
        most = jnp.minimum(new, path.shape[1])
    kept = jnp.clip(counts, 0, jnp.maximum(most, 0))
    changed = (new > 0) & (lengths >= new) & (lengths <= jnp.asarray(cache.capacities, jnp.int32))
    changed &= kept < new if path is None else True
    begin = lengths - new
    after = begin + kept
    if cache.kind == "paged":
        worst = _worst_page(cache)
        changed &= worst < _MISSING
        after = jnp.where(worst < _SHARED, after, MOST_ROWS)
        kept = jnp.where(worst < _SHARED, kept, 0)
    cut = dataclasses.replace(
        cache,
        lengths=jnp.where(changed, after, lengths),
        new_lengths=jnp.where(changed, kept, new),
    )
    if path is None or 0 in path.shape:
        return cut
    where = jnp.where(changed, begin, 0), new - 1, jnp.where(changed, kept, 0)
    moved = _moved(cache, path, where, implementation)
    return dataclasses.replace(
        cut, k=moved.k_cache, v=moved.v_cache, k_scale=moved.k_scale, v_scale=moved.v_scale
    )


_SHARED, _MISSING = 1, 2


def _worst_page(cache: Any) -> Array:
    """int32[M]: whether a page of a sequence is `_MISSING`; else, whether one with newest rows is
    `_SHARED` with another sequence. One reduction, which XLA makes one kernel of.
    """
    table, size = cache.page_table, cache.page_size
    slots = jnp.arange(table.shape[1], dtype=jnp.int32)[None]
    begin = cache.lengths - cache.new_lengths
    newest = (slots >= (begin // size)[:, None]) & (slots * size < cache.lengths[:, None])
    holders = jnp.take(cache.holders, table, mode="clip")
    shared = jnp.where(newest & (holders > 1), _SHARED, 0)
    return jnp.where(cache._missing, _MISSING, shared).max(axis=1, initial=0)


def _moved(
    cache: Any, path: Array, where: tuple[Array, Array, Array], implementation: str | None
) -> Caches:
    """The buffers with rows moved. `where`: begin, last and count of `KeepInputs`."""
    buffers = Caches(cache.k, cache.v, cache.k_scale, cache.v_scale)
    problem = KeepProblem(
        gpu=_device.gpu_generation(),
        kind=cache.kind,
        cache_dtype=str(cache.dtype),
        sequences=cache.num_sequences,
        width=path.shape[1],
        kv_heads=cache.kv_heads,
        head_dim=cache.stored_dims[0],
        v_head_dim=None if cache.shared_kv else cache.stored_dims[1],
        capacities=cache.held if cache.kind == "per_sequence" else cache.held[:1],
        page_size=cache.page_size,
        pages=cache.pages,
        layers=cache.layers,
        quantized=cache.quantized,
    )
    inputs = KeepInputs(*buffers, path, *where, cache.page_table)
    chosen = _dispatch.select(problem, implementation)
    if chosen.name == "reference":
        return chosen.run(inputs, problem)
    return _transforms.kept(_transforms.keep, chosen, problem, inputs)


def copy_page(pool: Array, source: Array, target: Array, axes: int) -> Array:
    """Page `target` = page `source`, of a pool whose last `axes` axes begin with the pages; a
    target outside the pool copies nothing.
    """
    page = jnp.take(pool, source, axis=-axes, mode="clip")
    where = (..., target, *[slice(None)] * (axes - 1))
    return pool.at[where].set(page, mode="drop")
