"""Method "heads": rows and heads change places, and each device attends some heads of the whole
sequence.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import batching
from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn._context_parallel import layout
from pallas_attn._context_parallel.launch import placed_aux, with_functions
from pallas_attn._context_parallel.layout import Split

Array = jax.Array


def by_heads(split: Split, inputs: AttentionInputs) -> tuple[AttentionProblem, AttentionInputs]:
    """The problem and the inputs of this device's heads, of all rows."""
    problem, shards = split.problem, split.shards
    if problem.kv_heads % shards:
        raise ValueError(
            f"context: method 'heads': expected a number of kv heads that the {shards} devices of "
            f"{split.context.axis!r} divide, got K = {problem.kv_heads}; take 'gather' or 'ring'"
        )
    arrays: dict[str, Any] = {
        name: layout.in_sequence_order(split, _swapped(split, getattr(inputs, name), 2, 1), 1)
        for name in ("q", "k", "v")
    }
    for name in ("q_segment_ids", "kv_segment_ids"):
        if (ids := getattr(inputs, name)) is not None:
            arrays[name] = layout.gathered(split, ids)
    for name in ("bias", "mask_array"):
        if (x := getattr(inputs, name)) is not None:
            arrays[name] = _scores_by_heads(split, x)
    if inputs.sinks is not None:
        arrays["sinks"] = _own_heads(split, inputs.sinks, 0)
    first = lax.axis_index(split.context.axis) * (problem.q_heads // shards)
    arrays |= placed_aux(split, inputs, first.astype(jnp.int32)[None])
    if problem.mask_blocks is not None:
        lengths = (problem.q_len * shards, problem.kv_len * shards)
        problem = dataclasses.replace(problem, mask_blocks=(*lengths, problem.q_offset))
    problem, inputs = with_functions(split, problem, inputs._replace(**arrays))
    return batching.resized(problem, inputs), inputs


def by_rows(split: Split, out: Array, lse: Array) -> tuple[Array, Array]:
    """out and lse of this device's rows, of all heads, from those of its heads."""
    out = _swapped(split, layout.as_devices_have_it(split, out, 1), 1, 2)
    return out, _swapped(split, layout.as_devices_have_it(split, lse, 2), 2, 1)


def _swapped(split: Split, x: Array, from_axis: int, to_axis: int) -> Array:
    """An axis that was whole is split over the devices, and one that was split is whole."""
    return lax.all_to_all(x, split.context.axis, from_axis, to_axis, tiled=True)


def _own_heads(split: Split, x: Array, axis: int) -> Array:
    size = x.shape[axis] // split.shards
    start = lax.axis_index(split.context.axis) * size
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def _scores_by_heads(split: Split, x: Array) -> Array:
    """A bias or mask_array of this device's rows -> one of its heads, of all rows."""
    heads, rows = x.shape[1:3]
    if rows < split.problem.q_len:
        return x if heads == 1 else _own_heads(split, x, 1)
    if heads == 1:
        x = lax.all_gather(x, split.context.axis, axis=2, tiled=True)
    else:
        x = _swapped(split, x, 1, 2)
    return layout.in_sequence_order(split, x, 2)
