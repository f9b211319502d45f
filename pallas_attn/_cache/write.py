"""New rows into the buffers of caches, by the implementation that takes the problem."""

from typing import Any

import jax.numpy as jnp

from pallas_attn._cache import bind
from pallas_attn._call import batching, dispatch
from pallas_attn._call.changed_rows import changed
from pallas_attn._call.problem import AppendInputs, AppendProblem, Caches, Change


def rows_into(
    inputs: AppendInputs,
    kind: str,
    implementation: str | None,
    *,
    change: Change | None = None,
) -> Caches:
    """The caches with the new rows in."""
    problem = bind.append(inputs, kind, change=change)
    chosen = dispatch.select(problem, implementation)
    if 0 in (problem.sequences, problem.new_rows):
        return Caches(inputs.k_cache, inputs.v_cache, inputs.k_scale, inputs.v_scale)
    if isinstance(chosen, dispatch.Reference):
        return chosen.run(_changed_first(inputs, problem), problem)
    return batching.compiled_once(batching.append, chosen, problem, inputs)


def _changed_first(inputs: AppendInputs, problem: AppendProblem) -> AppendInputs:
    """Rows of K normed and rotated already, as the kernels do it on their way."""
    if problem.change is None:
        return inputs
    position = inputs.positions
    if position is None:
        assert inputs.end is not None and inputs.new_lengths is not None
        rows = jnp.arange(problem.new_rows, dtype=jnp.int32)
        position = (inputs.end - inputs.new_lengths)[:, None] + rows[None]
    k = inputs.k if problem.quantized else inputs.k.astype(problem.cache_dtype)
    arrays: dict[str, Any] = {
        "cos": inputs.cos,
        "sin": inputs.sin,
        "norm_weight": inputs.norm_weight,
    }
    k = changed(k, position, problem.change, arrays)
    return inputs._replace(k=k, **dict.fromkeys(arrays))
