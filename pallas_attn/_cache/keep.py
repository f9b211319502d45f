"""`cache.keep`: which rows of a cache stay, and the launch that moves them.

Who moves rows also says how many of them stay: a kernel reads the lengths and the pages anyway, and
every check by XLA would be a launch more than the one that makes the new lengths of its answer.
That one also counts the rows past the path's width, which stay where they are: those of prompts
beside drafts.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._cache import sharded_rows
from pallas_attn._cache import write as _write
from pallas_attn._call import batching, checks, device, dispatch
from pallas_attn._call.problem import (
    MOST_ROWS,
    OVERFLOWS,
    UNCHANGED,
    Caches,
    KeepInputs,
    KeepProblem,
    Kept,
)

Array = jax.Array


def keep(cache: Any, counts: int | Array, path: Array | None, implementation: str | None) -> Any:
    """The method of every cache."""
    checks.kv_cache(cache)
    dispatch.check_name(implementation)
    sequences, new, lengths = cache.num_sequences, cache.new_lengths, cache.lengths
    static = checks.static_int(counts)
    given: Any = counts if static is None else np.int32(min(max(static, 0), MOST_ROWS))
    counts = checks.one_or_each("counts", given, sequences, "rows to keep of each sequence")
    if getattr(given, "shape", None) == ():  # which to spread over the sequences would be a launch
        counts = counts[:1]
    if path is not None:
        wanted = f"int32[{sequences}, p] (the rows to keep, of those that extend took)"
        path = checks.integers("path", path, wanted, (sequences, None))
        path = path if path.shape[1] else None
    problem = _problem_of(cache, path)
    buffers = Caches(cache.k, cache.v, cache.k_scale, cache.v_scale)
    holders = checks.holders(cache)
    inputs = KeepInputs(*buffers, path, lengths, new, counts, cache.page_table, holders)
    if path is None or 0 in path.shape or not cache.num_bytes:
        moved, kept = buffers, dispatch.rows_kept(inputs, problem)
    elif cache.context is not None:
        kept = dispatch.rows_kept(inputs, problem)
        write = functools.partial(_write.rows_into, kind=cache.kind, implementation=implementation)
        moved = sharded_rows.keep(cache.context, cache.held, inputs, kept, write)
    else:
        moved, kept = _moved(inputs, problem, implementation)
    changed, stay = kept >= 0, jnp.clip(counts, 0, new)
    after = jnp.where(kept == OVERFLOWS, MOST_ROWS, lengths)
    return dataclasses.replace(
        cache,
        lengths=jnp.where(changed, lengths - new + stay, after),
        new_lengths=jnp.where(changed, stay, jnp.where(kept == UNCHANGED, new, 0)),
        k=moved.k_cache,
        v=moved.v_cache,
        k_scale=moved.k_scale,
        v_scale=moved.v_scale,
    )


def _problem_of(cache: Any, path: Array | None) -> KeepProblem:
    return KeepProblem(
        gpu=device.gpu_generation(),
        kind=cache.kind,
        cache_dtype=str(cache.dtype),
        sequences=cache.num_sequences,
        width=0 if path is None else path.shape[1],
        kv_heads=cache.kv_heads,
        head_dim=cache.stored_dims[0],
        v_head_dim=None if cache.shared_kv else cache.stored_dims[1],
        capacities=cache.capacities if cache.kind == "per_sequence" else cache.capacities[:1],
        page_size=cache.page_size,
        pages=cache.pages,
        layers=cache.layers,
        quantized=cache.quantized,
    )


def _moved(inputs: KeepInputs, problem: KeepProblem, implementation: str | None) -> Kept:
    chosen = dispatch.select(problem, implementation)
    if chosen.name == "reference":
        return chosen.run(inputs, problem)
    return batching.kept(batching.keep, chosen, problem, inputs)


def copy_page(pool: Array, source: Array, target: Array, axes: int) -> Array:
    """Page `target` = page `source`, of a pool whose last `axes` axes begin with the pages; a
    target outside the pool copies nothing.
    """
    page = jnp.take(pool, source, axis=-axes, mode="clip")
    where = (..., target, *[slice(None)] * (axes - 1))
    return pool.at[where].set(page, mode="drop")
