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

from pallas_attn._call import batching, reference
from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn._mesh import sharding

Array = jax.Array
ROWS = 512  # query rows that the reference computes as one block
MOST_LOGITS = 2**26  # largest number of logits of a block; ROWS is cut to it
RUNS = 8  # runs of query rows, each of which leaves out the keys that none of its rows may see


def attention(problem: AttentionProblem, inputs: AttentionInputs) -> tuple[Array, Array]:
    """(out, lse) of a call.

    Products of 16-bit inputs have the precision that jax takes by default: TF32 on a GPU, which
    holds every number of such an input, and more bits of probabilities than a kernel's operands.
    """
    return batching.by_xla(_attention, inputs, batching.resized(problem, inputs))


def _attention(inputs: AttentionInputs, problem: AttentionProblem) -> tuple[Array, Array]:
    q_len = inputs.q.shape[1]
    precision = "default" if jnp.dtype(problem.dtype).itemsize == 2 else "highest"
    rows = max(1, min(ROWS, MOST_LOGITS // (problem.batch * problem.q_heads * problem.kv_len)))
    if q_len <= rows:
        return reference.attention(inputs, problem, precision)
    inputs = _in_sum_dtype(inputs)
    results = []
    for start, end, keys in _runs(problem, inputs, rows):
        some = _cut(inputs, slice(start, end), slice(0, keys))
        results.append(_attend(problem, some, start, min(rows, end - start), precision))
    out, lse = zip(*results, strict=True)
    return jnp.concatenate(out, axis=1), jnp.concatenate(lse, axis=2)


def _runs(
    problem: AttentionProblem, inputs: AttentionInputs, rows: int
) -> list[tuple[int, int, int]]:
    """(first query row, end, number of keys) of runs of rows: a row sees no later keys."""
    q_len, kv_len = inputs.q.shape[1], inputs.k.shape[1]
    if inputs.q_offset is not None or inputs.q_positions is not None:
        return [(0, q_len, kv_len)]
    size = -(-q_len // (rows * RUNS)) * rows
    runs = []
    for start in range(0, q_len, size):
        end = min(start + size, q_len)
        at = problem.q_offset + start, problem.q_offset + end
        bands = problem.mask.widest, problem.mask_within
        keys = min(int(band.kv_range(*at, kv_len)[1]) for band in bands)
        runs.append((start, end, max(keys, 1)))  # a hidden key where none is seen
    return runs


def _cut(inputs: AttentionInputs, rows: slice, keys: slice) -> AttentionInputs:
    """The arrays of some query rows and some keys; the rows count from the first of them."""
    fields = {}
    for name, axes in _AXES.items():
        x = getattr(inputs, name)
        for axis, of, size in zip(axes, (rows, keys), _sizes(inputs), strict=True):
            if x is not None and axis is not None and x.shape[axis] == size:
                x = jax.lax.slice_in_dim(x, of.start, of.stop, axis=axis)
        fields[name] = x
    if inputs.q_lengths is not None:
        fields["q_lengths"] = jnp.clip(inputs.q_lengths - rows.start, 0, rows.stop - rows.start)
    return inputs._replace(**fields)


def _attend(
    problem: AttentionProblem, inputs: AttentionInputs, start: int, rows: int, precision: str
) -> tuple[Array, Array]:
    """(out, lse) of a run of query rows, `rows` at a time; the first is row `start` of the call."""
    q_len = inputs.q.shape[1]
    count = -(-q_len // rows)

    def slab(first: Array, fields: dict[str, Array]) -> tuple[Array, Array]:
        offset = problem.q_offset if inputs.q_offset is None else inputs.q_offset
        at = jnp.broadcast_to(jnp.asarray(offset + start + first, jnp.int32), (problem.batch,))
        by_row: Any = fields
        some = inputs._replace(q_offset=at, **by_row)
        if inputs.q_lengths is not None:
            some = some._replace(q_lengths=jnp.clip(inputs.q_lengths - first, 0, rows))
        return reference.attention(some, batching.resized(problem, some), precision)

    firsts = jnp.arange(count, dtype=jnp.int32) * rows
    slabs = firsts, _by_row(inputs, count, rows)
    out, lse = lax.map(lambda x: jax.checkpoint(slab)(*x), slabs)
    out = jnp.moveaxis(out, 0, 1).reshape(problem.batch, count * rows, *out.shape[3:])
    lse = jnp.moveaxis(lse, 0, 2).reshape(*lse.shape[1:3], count * rows)
    return out[:, :q_len], lse[:, :, :q_len]


# Axes of query rows and of keys, where an array has them.
_AXES: dict[str, tuple[int | None, int | None]] = {
    "q": (1, None),
    "k": (None, 1),
    "v": (None, 1),
    "q_segment_ids": (1, None),
    "kv_segment_ids": (None, 1),
    "q_positions": (1, None),
    "bias": (2, 3),
    "mask_array": (2, 3),
}


def _sizes(inputs: AttentionInputs) -> tuple[int, int]:
    return inputs.q.shape[1], inputs.k.shape[1]


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
    slabs = {}
    for name, (axis, _) in _AXES.items():
        x = getattr(inputs, name)
        if x is None or axis is None or (name != "q" and x.shape[axis] == 1 < inputs.q.shape[1]):
            continue
        pads = [(0, 0)] * x.ndim
        pads[axis] = (0, count * rows - x.shape[axis])
        shape = (*x.shape[:axis], count, rows, *x.shape[axis + 1 :])
        slabs[name] = jnp.moveaxis(jnp.pad(x, pads).reshape(shape), axis, 0)
    return slabs
