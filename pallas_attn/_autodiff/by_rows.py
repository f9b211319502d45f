"""Attention by the reference, some query rows at a time, for derivatives that no kernel computes:
jax differentiates it any number of times.

A few copies of the scores of `ROWS` query rows are in memory at a time, and a backward computes
them again: memory grows with the rows and the keys, not with their product. Sums over rows are
taken in float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import batching, reference, sharding
from pallas_attn._call.problem import AttentionInputs, AttentionProblem

Array = jax.Array
ROWS = 128  # query rows that the reference computes as one block
MOST_LOGITS = 2**26  # largest number of logits of a block; ROWS is cut to it


def attention(problem: AttentionProblem, inputs: AttentionInputs) -> tuple[Array, Array]:
    """(out, lse) of a call."""
    return batching.by_xla(_attention, inputs, batching.resized(problem, inputs))


def _attention(inputs: AttentionInputs, problem: AttentionProblem) -> tuple[Array, Array]:
    q_len = inputs.q.shape[1]
    rows = max(1, min(ROWS, MOST_LOGITS // (problem.batch * problem.q_heads * problem.kv_len)))
    if q_len <= rows:
        return reference.attention(inputs, problem)
    inputs = _in_sum_dtype(inputs)
    count = -(-q_len // rows)

    def slab(first: Array, fields: dict[str, Array]) -> tuple[Array, Array]:
        offset = problem.q_offset if inputs.q_offset is None else inputs.q_offset
        at = jnp.broadcast_to(jnp.asarray(offset + first, jnp.int32), (problem.batch,))
        by_row: Any = fields
        some = inputs._replace(q_offset=at, **by_row)
        if inputs.q_lengths is not None:
            some = some._replace(q_lengths=jnp.clip(inputs.q_lengths - first, 0, rows))
        return reference.attention(some, batching.resized(problem, some))

    firsts = jnp.arange(count, dtype=jnp.int32) * rows
    slabs = firsts, _by_row(inputs, count, rows)
    out, lse = lax.map(lambda x: jax.checkpoint(slab)(*x), slabs)
    out = jnp.moveaxis(out, 0, 1).reshape(problem.batch, count * rows, *out.shape[3:])
    lse = jnp.moveaxis(lse, 0, 2).reshape(*lse.shape[1:3], count * rows)
    return out[:, :q_len], lse[:, :, :q_len]


def _in_sum_dtype(inputs: AttentionInputs) -> AttentionInputs:
    """The arrays that many rows read, in the dtype of sums of their gradients."""
    every = {
        name: x.astype(sharding.sum_dtype(x.dtype))
        for name, x in inputs.named().items()
        if name != "q" and "mask" not in name and jnp.issubdtype(x.dtype, jnp.floating)
    }
    return AttentionInputs.of(inputs.named() | every)


def _by_row(inputs: AttentionInputs, count: int, rows: int) -> dict[str, Any]:
    """The arrays with an axis of query rows, in `count` slabs of `rows`."""
    axes = {"q": 1, "q_segment_ids": 1, "q_positions": 1, "bias": 2, "mask_array": 2}
    slabs = {}
    for name, axis in axes.items():
        x = getattr(inputs, name)
        if x is None or (name != "q" and x.shape[axis] == 1 < inputs.q.shape[1]):
            continue
        pads = [(0, 0)] * x.ndim
        pads[axis] = (0, count * rows - x.shape[axis])
        shape = (*x.shape[:axis], count, rows, *x.shape[axis + 1 :])
        slabs[name] = jnp.moveaxis(jnp.pad(x, pads).reshape(shape), axis, 0)
    return slabs
