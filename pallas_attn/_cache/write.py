"""New rows into the buffers of caches: which problem that is, and the launch that writes them."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._call import batching, device, dispatch
from pallas_attn._call.problem import AppendInputs, AppendProblem, Caches, Change
from pallas_attn.rotary import changed

Array = jax.Array


def sample_of(cache: Any) -> Array:
    """An array of a cache that has one for all sequences, or one for each."""
    return cache[0] if isinstance(cache, tuple) else cache


def rows_into(
    inputs: AppendInputs,
    kind: str,
    implementation: str | None,
    *,
    from_end: bool = False,
    change: Change | None = None,
) -> Caches:
    """The caches with the new rows in, by whoever takes the problem."""
    sample = sample_of(inputs.k_cache)
    separate = isinstance(inputs.k_cache, tuple)
    capacities: tuple[int, ...]
    if inputs.page_table is not None:
        capacities = (inputs.page_table.shape[1] * sample.shape[-2],)
    else:
        capacities = tuple(x.shape[-2] for x in (inputs.k_cache if separate else (sample,)))
    new_rows, kv_heads, head_dim = inputs.k.shape[-3:]
    packed = inputs.owners is not None
    if inputs.page_table is not None:
        sequences = inputs.page_table.shape[0]
    else:
        sequences = len(inputs.k_cache) if separate else sample.shape[-4]
    problem = AppendProblem(
        gpu=device.gpu_generation(),
        kind=kind,
        dtype=str(inputs.k.dtype),
        cache_dtype=str(sample.dtype),
        sequences=sequences,
        new_rows=new_rows,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=None if inputs.v is None else inputs.v.shape[-1],
        capacities=capacities,
        page_size=sample.shape[-2] if kind == "paged" else None,
        pages=sample.shape[-4] if kind == "paged" else None,
        layers=None if inputs.layer is None else sample.shape[0],
        ragged=inputs.new_lengths is not None,
        from_end=from_end,
        quantized=inputs.k_scale is not None,
        packed=packed,
        change=change,
    )
    chosen = dispatch.select(problem, implementation)
    if 0 in (sequences, new_rows):
        return Caches(inputs.k_cache, inputs.v_cache, inputs.k_scale, inputs.v_scale)
    if chosen.name == "reference":
        return chosen.run(_changed_first(inputs, problem), problem)
    return batching.kept(batching.append, chosen, problem, inputs)


def _changed_first(inputs: AppendInputs, problem: AppendProblem) -> AppendInputs:
    """Rows of K normed and rotated already, as the kernels do it on their way."""
    if problem.change is None:
        return inputs
    names = ("cos", "sin", "norm_weight")
    position = inputs.start
    if not problem.packed:
        assert inputs.new_lengths is not None
        rows = jnp.arange(problem.new_rows, dtype=jnp.int32)
        position = (position - inputs.new_lengths)[:, None] + rows[None]
    k = inputs.k if problem.quantized else inputs.k.astype(problem.cache_dtype)
    k = changed(k, position, problem.change, {name: getattr(inputs, name) for name in names})
    return inputs._replace(k=k, **dict.fromkeys(names))
