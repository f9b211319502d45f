"""`cache.keep`: which rows of a cache stay, and the launch that moves them.

The kernel that moves rows also says how many of them stay: it reads the lengths and the pages
anyway, and each check by XLA would be a launch more than the one that makes the new lengths of its
answer. That one also counts the rows past the path's width, which stay where they are: those of
prompts beside drafts.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_attn._cache import bind, sharded_rows
from pallas_attn._cache.facts import Cache
from pallas_attn._call import batching, dispatch, reference
from pallas_attn._call.problem import (
    MOST_ROWS,
    OVERFLOWS,
    UNCHANGED,
    Caches,
    KeepInputs,
    KeepProblem,
    Kept,
)
from pallas_attn._mesh import sharding

Array = jax.Array


def keep(
    cache: Cache, counts: int | Array, path: Array | None, implementation: str | None
) -> Cache:
    """The method of every cache."""
    if implementation is not None:
        dispatch.check_name(implementation)
    problem, inputs = bind.keep(cache, counts, path)
    buffers = Caches(*inputs[: len(Caches._fields)])
    if inputs.path is None or not problem.sequences or not cache.num_bytes:
        moved, kept = buffers, reference.rows_kept(inputs, problem)
    elif cache.context is not None:
        kept = reference.rows_kept(inputs, problem)
        held = (cache.context, cache.held)
        moved = sharded_rows.keep(held, cache.kind, inputs, kept, implementation)
    else:
        moved, kept = _moved(inputs, problem, implementation)
    new, lengths = inputs.new_lengths, inputs.lengths
    kept = sharding.placed_like(kept, lengths)
    changes, stay = kept >= 0, jnp.clip(inputs.counts, 0, new)
    after = jnp.where(kept == OVERFLOWS, MOST_ROWS, lengths)
    return dataclasses.replace(
        cache,
        lengths=jnp.where(changes, lengths - new + stay, after),
        new_lengths=jnp.where(changes, stay, jnp.where(kept == UNCHANGED, new, 0)),
        k=moved.k_cache,
        v=moved.v_cache,
        k_scale=moved.k_scale,
        v_scale=moved.v_scale,
    )


def _moved(inputs: KeepInputs, problem: KeepProblem, implementation: str | None) -> Kept:
    chosen = dispatch.select(problem, implementation)
    if isinstance(chosen, dispatch.Reference):
        return chosen.run(inputs, problem)
    return batching.compiled_once(batching.keep, chosen, problem, inputs)
