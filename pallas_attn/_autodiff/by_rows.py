"""Attention and its gradients by the reference, some query rows at a time, for derivatives that no
kernel computes: jax differentiates both any number of times.

About a dozen arrays of the scores of `ROWS` query rows are in memory at a time, and a backward
computes them again: memory grows with the rows and the keys, not with their product. Sums over rows
are taken in float32.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import axes, batching, reference
from pallas_attn._call.batching import Named
from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn._mesh import sharding

Array = jax.Array
Rows = tuple[Array, Array, Array, Array]  # out, lse and their cotangents
ROWS = 512  # query rows that the reference computes as one block
MOST_LOGITS = 2**26  # largest number of logits of a block; ROWS is cut to it
RUNS = 8  # runs of query rows, each of which leaves out the keys that none of its rows may see


def attention(problem: AttentionProblem, inputs: AttentionInputs) -> tuple[Array, Array]:
    """(out, lse) of a call.

    Products of 16-bit inputs have the precision that jax takes by default: TF32 on a GPU, which
    holds every number of such an input, and more bits of probabilities than a kernel's operands.
    """
    return batching.by_xla(_attention, inputs, batching.resized(problem, inputs))


def gradients(
    problem: AttentionProblem, inputs: AttentionInputs, of_rows: Rows, names: tuple[str, ...]
) -> Named:
    """`reference.gradients` of the inputs `names`, in the dtype of sums."""
    problem, operands = batching.resized(problem, inputs), (inputs, *of_rows)

    def run(operands: Any) -> tuple[Array, ...]:
        named = _gradients(problem, operands[0], operands[1:], names)
        return tuple([named[name] for name in names])

    arrays, flat, _ = sharding.on_arrays(run, operands)
    tree, shapes = jax.tree.structure(operands), tuple([x.shape for x in arrays])
    split = axes.of_attention(problem, tree, shapes, axes.ROWS, names)
    return dict(zip(names, sharding.by_xla(flat, arrays, split), strict=True))


def exact_rows(problem: AttentionProblem, inputs: AttentionInputs, of_rows: Rows) -> Rows:
    """`of_rows`, with out and lse as exact as the logits of `gradients`: by default a kernel
    multiplies q and k of float32 in TF32, and the reference does not.
    """
    if problem.dtype != "float32" or problem.precision is not None:
        return of_rows
    return *attention(problem, inputs), *of_rows[2:]


def _precision(problem: AttentionProblem) -> str:
    return "default" if jnp.dtype(problem.dtype).itemsize == 2 else "highest"


def _rows_at_a_time(problem: AttentionProblem) -> int:
    return max(1, min(ROWS, MOST_LOGITS // (problem.batch * problem.q_heads * problem.kv_len)))


def _attention(inputs: AttentionInputs, problem: AttentionProblem) -> tuple[Array, Array]:
    q_len, rows = inputs.q.shape[1], _rows_at_a_time(problem)
    if q_len <= rows:
        return reference.attention(inputs, problem, _precision(problem))
    inputs = _in_sum_dtype(inputs)
    results = []
    for start, end, keys in _runs(problem, inputs, rows):
        some = _cut(inputs, slice(start, end), slice(0, keys))
        results.append(_attend(problem, some, start, min(rows, end - start)))
    out, lse = zip(*results, strict=True)
    return jnp.concatenate(out, axis=1), jnp.concatenate(lse, axis=2)


def _gradients(
    problem: AttentionProblem, inputs: AttentionInputs, of_rows: Rows, names: tuple[str, ...]
) -> Named:
    every = jax.tree.leaves((inputs, of_rows))
    named, of_rows = jax.tree.map(
        lambda x: sharding.varying_like(x, *every), (inputs.named(), of_rows)
    )
    own = {name: named[name].astype(sharding.sum_dtype(named[name].dtype)) for name in names}
    inputs = AttentionInputs.of(named | own)
    q_len, rows = inputs.q.shape[1], _rows_at_a_time(problem)
    if q_len <= rows:
        return reference.gradients(inputs, problem, of_rows, names, _precision(problem))
    sums = {name: jnp.zeros_like(x) for name, x in own.items()}
    for start, end, keys in _runs(problem, inputs, rows):
        some = _cut(inputs, slice(start, end), slice(0, keys))
        part = [lax.slice_in_dim(x, start, end, axis=n) for n, x in _with_axes(of_rows)]
        of_run = _add_up(problem, some, part, start, min(rows, end - start), names)
        places = _places(inputs, slice(start, end), slice(0, keys))
        sums = {name: x + _padded(of_run[name], places.get(name), x) for name, x in sums.items()}
    return sums


def _with_axes(of_rows: Sequence[Array]) -> list[tuple[int, Array]]:
    """out, lse, d_out and d_lse with their axes of query rows."""
    return list(zip((1, 2, 1, 2), of_rows, strict=True))


def _padded(x: Array, places: tuple[slice, ...] | None, like: Array) -> Array:
    """x in an array of zeros of another's shape, at some places; None: at all."""
    if places is None:
        return x
    ranges = [range(n)[at] for at, n in zip(places, like.shape, strict=True)]
    return jnp.pad(x, [(r.start, n - r.stop) for r, n in zip(ranges, like.shape, strict=True)])


def _runs(
    problem: AttentionProblem, inputs: AttentionInputs, rows: int
) -> list[tuple[int, int, int]]:
    """(first query row, end, number of keys) of runs of rows: a row sees no later keys. A run is a
    multiple of `rows`, or the last rows of the call, which are fewer.
    """
    q_len, kv_len = inputs.q.shape[1], inputs.k.shape[1]
    anywhere = inputs.q_offset is not None or inputs.q_positions is not None
    size = q_len if anywhere else -(-q_len // (rows * RUNS)) * rows
    starts = sorted({*range(0, q_len, size), q_len // rows * rows} - {q_len})
    runs = []
    for start, end in zip(starts, [*starts[1:], q_len], strict=True):
        at = problem.q_offset + start, problem.q_offset + end
        bands = problem.mask.widest, problem.mask_within
        keys = kv_len if anywhere else min(int(x.kv_range(*at, kv_len)[1]) for x in bands)
        runs.append((start, end, max(keys, 1)))  # a hidden key where none is seen
    return runs


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


def _places(inputs: AttentionInputs, rows: slice, keys: slice) -> dict[str, tuple[slice, ...]]:
    """For each array with query rows or keys, the index that cuts out these rows and keys."""
    wanted = (inputs.q.shape[1], rows), (inputs.k.shape[1], keys)

    def places_of(name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        places = [slice(None)] * len(shape)
        for axis, (size, some) in zip(_AXES[name], wanted, strict=True):
            if axis is not None and shape[axis] == size:  # not 1, for all
                places[axis] = some
        return tuple(places)

    return {name: places_of(name, x.shape) for name, x in inputs.named().items() if name in _AXES}


def _cut(inputs: AttentionInputs, rows: slice, keys: slice) -> AttentionInputs:
    """The arrays of some query rows and some keys; the rows count from the first of them."""
    places = _places(inputs, rows, keys)
    fields: dict[str, Any] = {name: getattr(inputs, name)[at] for name, at in places.items()}
    if inputs.q_lengths is not None:
        fields["q_lengths"] = jnp.clip(inputs.q_lengths - rows.start, 0, rows.stop - rows.start)
    return inputs._replace(**fields)


def _attend(
    problem: AttentionProblem, inputs: AttentionInputs, start: int, rows: int
) -> tuple[Array, Array]:
    """(out, lse) of a run of query rows, `rows` at a time; the first is row `start` of the call."""

    def slab(first: Array, fields: Named) -> tuple[Array, Array]:
        some = _slab(problem, inputs, start, first, rows, fields)
        return reference.attention(some, batching.resized(problem, some), _precision(problem))

    out, lse = lax.map(lambda x: jax.checkpoint(slab)(*x), _slabs(inputs, rows))
    return _joined(out, 1), _joined(lse, 2)


def _add_up(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    of_rows: Sequence[Array],
    start: int,
    rows: int,
    names: tuple[str, ...],
) -> Named:
    """The gradients of one run of query rows, a slab of `rows` at a time; the first is row `start`
    of the call.
    """
    slabs = _slabs(inputs, rows)
    row_axes = {name: _AXES[name][0] or 0 for name in names if name in slabs[1]}
    cut = [_split(x, axis, rows) for axis, x in _with_axes(of_rows)]

    @jax.checkpoint
    def step(sums: Named, slab: Any) -> tuple[Named, Named]:
        (first, fields), part = slab
        some = _slab(problem, inputs, start, first, rows, fields)
        at_sizes = batching.resized(problem, some)
        own = reference.gradients(some, at_sizes, part, names, _precision(problem))
        sums = {name: x + own[name] for name, x in sums.items()}
        return sums, {name: own[name] for name in row_axes}

    named = inputs.named()
    zeros = {name: jnp.zeros_like(named[name]) for name in names if name not in row_axes}
    sums = {name: sharding.varying_like(x, *jax.tree.leaves(slabs)) for name, x in zeros.items()}
    sums, parts = lax.scan(step, sums, (slabs, cut))
    return sums | {name: _joined(x, row_axes[name]) for name, x in parts.items()}


def _slab(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    start: int,
    first: Array,
    rows: int,
    fields: Named,
) -> AttentionInputs:
    """The inputs of one slab: `rows` query rows from row `first` of a run on, which begins at row
    `start` of the call. `fields`: arrays that are cut to the slab already.
    """
    offset = problem.q_offset if inputs.q_offset is None else inputs.q_offset
    at = jnp.broadcast_to(jnp.asarray(offset + start + first, jnp.int32), (problem.batch,))
    by_row: Any = fields
    some = inputs._replace(q_offset=at, **by_row)
    if inputs.q_lengths is not None:
        some = some._replace(q_lengths=jnp.clip(inputs.q_lengths - first, 0, rows))
    return some


def _in_sum_dtype(inputs: AttentionInputs) -> AttentionInputs:
    """The arrays that many rows read, in the dtype of sums of their gradients."""
    every = {
        name: x.astype(sharding.sum_dtype(x.dtype))
        for name, x in inputs.named().items()
        if name != "q" and "mask" not in name and jnp.issubdtype(x.dtype, jnp.floating)
    }
    return AttentionInputs.of(inputs.named() | every)


def _slabs(inputs: AttentionInputs, rows: int) -> tuple[Array, Named]:
    """The first rows of slabs of `rows` query rows, and the arrays with query rows, by slabs."""
    q_len = inputs.q.shape[1]
    slabs: Named = {}
    for name, (axis, _) in _AXES.items():
        x = getattr(inputs, name)
        if x is None or axis is None or (name != "q" and x.shape[axis] == 1 < q_len):
            continue
        slabs[name] = _split(x, axis, rows)
    return jnp.arange(q_len // rows, dtype=jnp.int32) * rows, slabs


def _split(x: Array, axis: int, rows: int) -> Array:
    """x in slabs of `rows` along an axis: their number comes first."""
    shape = (*x.shape[:axis], x.shape[axis] // rows, rows, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _joined(slabs: Array, axis: int) -> Array:
    """Undoes `_split`."""
    x = jnp.moveaxis(slabs, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
