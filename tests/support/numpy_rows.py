"""Rules of `in_numpy` for gather and scatter.

A rule is given an equation and its parameters, and gives the function of its arrays.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax


def _corners(index, sizes, wanted, numbers):
    """Begin of each window along each dimension of the operand, and whether it lies within.

    `numbers`: (which column of `index` says where, by dimension; the operand's batch dimensions
    and those of `index`).
    """
    columns, operand_batch, index_batch = numbers
    shape = index.shape[:-1]
    # Whole windows begin at 0; one number says so for all of them where others have the shape.
    begins = [np.zeros((1,) * len(shape) if columns else shape, np.int64)] * len(sizes)
    within = np.ones(shape, bool)
    for dim, of_index in zip(operand_batch, index_batch, strict=True):
        wide = [1] * len(shape)
        wide[of_index] = shape[of_index]
        begins[dim] = np.arange(shape[of_index]).reshape(wide)
    for column, dim in enumerate(columns):
        begin, last = index[..., column].astype(np.int64), sizes[dim] - wanted[dim]
        within &= (begin >= 0) & (begin <= last)
        begins[dim] = np.minimum(np.maximum(begin, 0), last)
    return begins, within


def _windows(begins, wanted, kept):
    """The index of every element of every window: dimensions of windows, then those `kept`."""
    rank, indices = begins[0].ndim, []
    for dim, (begin, taken) in enumerate(zip(begins, wanted, strict=True)):
        begin = begin.reshape(begin.shape + (1,) * len(kept))
        if dim in kept:
            wide = [1] * (rank + len(kept))
            wide[rank + kept.index(dim)] = taken
            begin = begin + np.arange(taken).reshape(wide)
        indices.append(begin)
    return tuple(indices)


def _filling(dtype):
    """Default for elements that are not there."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.nan
    if np.dtype(dtype).kind == "b":
        return True
    ends = jnp.iinfo(dtype)
    return ends.min if jnp.issubdtype(dtype, jnp.signedinteger) else ends.max


def gather(eqn, dimension_numbers, slice_sizes, mode, fill_value, **_):
    numbers, out = dimension_numbers, eqn.outvars[0].aval
    left_out = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept = [dim for dim in range(len(slice_sizes)) if dim not in left_out]
    rest = [dim for dim in range(out.ndim) if dim not in numbers.offset_dims]
    order = np.argsort([*rest, *numbers.offset_dims])
    which = (
        numbers.start_index_map,
        numbers.operand_batching_dims,
        numbers.start_indices_batching_dims,
    )
    fills = mode == lax.GatherScatterMode.FILL_OR_DROP
    if fills and fill_value is None:
        fill_value = _filling(out.dtype)

    def take(x, index):
        begins, within = _corners(index, x.shape, slice_sizes, which)
        if begins:
            result = x[_windows(begins, slice_sizes, kept)]
        else:  # a number has no dimension to index
            result = np.broadcast_to(x, within.shape)
        if fills:
            within = within.reshape(within.shape + (1,) * len(kept))
            result = np.where(within, result, np.asarray(fill_value, out.dtype))
        return result.transpose(order)

    return take


def scatter(combine):
    """`combine(array, indices, values)` changes the array."""

    def rule(eqn, dimension_numbers, mode, **_):
        numbers, updates = dimension_numbers, eqn.invars[2].aval
        left_out = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        kept = [dim for dim in range(eqn.invars[0].aval.ndim) if dim not in left_out]
        rest = [dim for dim in range(updates.ndim) if dim not in numbers.update_window_dims]
        order = (*rest, *numbers.update_window_dims)
        which = (
            numbers.scatter_dims_to_operand_dims,
            numbers.operand_batching_dims,
            numbers.scatter_indices_batching_dims,
        )
        clips = mode == lax.GatherScatterMode.CLIP

        def place(x, index, values):
            wanted, values = [1] * x.ndim, values.transpose(order)
            for dim, size in zip(kept, values.shape[len(rest) :], strict=True):
                wanted[dim] = size
            begins, within = _corners(index, x.shape, wanted, which)
            result = x.copy()
            if not begins:
                begins, result = [np.zeros(within.shape, np.int64)], result.reshape(1)
                places = tuple(begins)
            else:
                places = _windows(begins, wanted, kept)
            if not clips:
                within = within.reshape(within.shape + (1,) * len(kept))
                some = np.broadcast_to(within, values.shape)
                places = tuple(np.broadcast_to(at, values.shape)[some] for at in places)
                values = values[some]
            combine(result, places, values)
            return result.reshape(x.shape)

        return place

    return rule


def put(array, places, values):
    array[places] = values
