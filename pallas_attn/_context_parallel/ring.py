"""Method "ring": keys pass from device to device, and partial results are merged in float32.

dk and dv of the keys that pass are added up in float32 and pass with them.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._autodiff.derivative import Rows
from pallas_attn._call.problem import AttentionInputs, gradients_of_sinks
from pallas_attn._context_parallel import launch as _launch
from pallas_attn._context_parallel import layout
from pallas_attn._context_parallel.launch import Floats, Launch, Offsets
from pallas_attn._context_parallel.layout import Split
from pallas_attn._mesh import sharding
from pallas_attn.context import chunk_numbers, chunks_of
from pallas_attn.merge import add_sinks, merge_attention

Array = jax.Array
Carry = Any  # a tree of arrays that a scan over steps carries
MOST_OFFSETS = 16  # offsets for which schedules are made beforehand


def forward(split: Split, inputs: AttentionInputs) -> tuple[Array, Array]:
    """(out, lse) of this device's rows."""
    moving, fixed = _keys_of(split, inputs), _fixed(split, inputs)
    wide = sharding.sum_dtype(inputs.q.dtype)
    shape = (*fixed.q.shape[:3], split.problem.v_head_dim)
    out = jnp.zeros(shape, wide)
    lse = jnp.full((shape[0], shape[2], shape[1]), -jnp.inf, wide)
    out, lse = (sharding.varying_like(x, *jax.tree.leaves((inputs, moving))) for x in (out, lse))

    def step(carry: Carry, number: Array) -> Any:
        (out, lse), moving = carry
        following = _passed_on(split, moving)
        outs, lses = [out], [lse]
        for part in _parts(split, inputs, fixed, moving, number):
            part_out, part_lse = _launch.forward(split, Launch(part, _offsets(split)))
            outs.append(part_out.astype(wide))
            lses.append(part_lse)
        return (merge_attention(outs, lses), following), None

    ((out, lse), _), _ = lax.scan(step, ((out, lse), moving), _numbers(split))
    if inputs.sinks is not None:
        out, lse = add_sinks(out, lse, inputs.sinks)
    return layout.by_device(split, out.astype(inputs.q.dtype)), layout.lse_by_device(split, lse)


def backward(split: Split, inputs: AttentionInputs, rows: Rows) -> Floats:
    """The gradients of the inputs, by out and lse of this device's rows and their cotangents."""
    moving, fixed = _keys_of(split, inputs), _fixed(split, inputs)
    by_chunk = layout.rows_by_chunk(split, rows)
    sums = {"q": _zeros(fixed.q)}
    if fixed.bias is not None:
        part = _columns(fixed.bias, _source(split, 0)[0], split.keys)  # has the type of the sum
        sums["bias"] = sharding.varying_like(_zeros(fixed.bias), part)
    passing = {name: _zeros(moving[name]) for name in ("k", "v")}

    def step(carry: Carry, number: Array) -> Any:
        sums, passing, moving = dict(carry[0]), dict(carry[1]), carry[2]
        following = _passed_on(split, moving)
        numbers = _source(split, number)
        for slot, part in enumerate(_parts(split, inputs, fixed, moving, number)):
            gradients = _launch.backward(split, Launch(part, _offsets(split)), by_chunk)
            gradients = {
                name: x.astype(sharding.sum_dtype(x.dtype)) for name, x in gradients.items()
            }
            sums["q"] = sums["q"] + gradients["q"]
            for name in ("k", "v"):
                passing[name] = passing[name].at[:, slot].add(gradients[name])
            if "bias" in sums:
                start = numbers[slot] * split.keys
                sums["bias"] = _added_from(sums["bias"], gradients["bias"], start)
        return (sums, _passed_on(split, passing), following), None

    (sums, passing, _), _ = lax.scan(step, (sums, passing, moving), _numbers(split))
    gradients = {name: x.reshape(getattr(inputs, name).shape) for name, x in passing.items()}
    gradients["q"] = layout.by_device(split, sums["q"])
    if inputs.bias is not None:
        own = sharding.varying_like(_zeros(inputs.bias), sums["bias"])
        back = jax.vjp(functools.partial(layout.scores_by_chunk, split), own)[1]
        gradients["bias"] = back(sums["bias"])[0]
    if inputs.sinks is not None:
        out, lse, d_out, d_lse = rows
        delta = (out.astype(lse.dtype) * d_out.astype(lse.dtype)).sum(-1).swapaxes(1, 2) - d_lse
        gradients["sinks"] = gradients_of_sinks(inputs.sinks, lse, delta)
    return gradients


def summed_over_parts(
    split: Split,
    inputs: AttentionInputs,
    of_part: Callable[[AttentionInputs], list[Array]],
    zeros: list[Array],
) -> list[Array]:
    """The sums of `of_part` over the launches of all steps; `zeros`: their shapes and dtypes."""
    moving, fixed = _keys_of(split, inputs), _fixed(split, inputs)

    def step(carry: Carry, number: Array) -> Any:
        sums, moving = carry
        following = _passed_on(split, moving)
        for part in _parts(split, inputs, fixed, moving, number):
            sums = [a + b for a, b in zip(sums, of_part(part), strict=True)]
        return (sums, following), None

    sums = [sharding.varying_like(x, *jax.tree.leaves(moving)) for x in zeros]
    return lax.scan(step, (sums, moving), _numbers(split))[0][0]


def _numbers(split: Split) -> Array:
    """int32[devices]: the steps."""
    return jnp.arange(split.shards, dtype=jnp.int32)


def _zeros(x: Array) -> Array:
    """A sum, of nothing yet, of an array's gradients."""
    return jnp.zeros_like(x, sharding.sum_dtype(x.dtype))


def _added_from(total: Array, part: Array, start: Array) -> Array:
    """`part` added to the columns of `total` from `start` on, or to the one that there is."""
    if total.shape[3] == 1:
        return total + part
    columns = lax.dynamic_slice_in_dim(total, start, part.shape[3], 3)
    return lax.dynamic_update_slice_in_dim(total, columns + part, start, 3)


def _keys_of(split: Split, inputs: AttentionInputs) -> dict[str, Array]:
    """The arrays that pass from device to device, [B, chunks, rows of a chunk, ...] each."""
    moving = {"k": inputs.k, "v": inputs.v}
    if inputs.kv_segment_ids is not None:
        moving["kv_segment_ids"] = inputs.kv_segment_ids
    return {
        name: x.reshape(x.shape[0], split.chunks, split.keys, *x.shape[2:])
        for name, x in moving.items()
    }


def _fixed(split: Split, inputs: AttentionInputs) -> AttentionInputs:
    """The arrays that stay, by chunk: q, and bias and mask_array over all keys."""
    bias, mask = inputs.bias, inputs.mask_array
    return inputs._replace(
        q=layout.by_chunk(split, inputs.q),
        bias=None if bias is None else layout.scores_by_chunk(split, bias),
        mask_array=None if mask is None else layout.scores_by_chunk(split, mask),
    )


def _passed_on(split: Split, moving: dict[str, Array]) -> dict[str, Array]:
    pairs = [(number, (number + 1) % split.shards) for number in range(split.shards)]
    return {name: lax.ppermute(x, split.context.axis, pairs) for name, x in moving.items()}


def _source(split: Split, number: int | Array) -> Array:
    """The chunks of keys that are here at a step."""
    device = lax.axis_index(split.context.axis)
    source = lax.rem(device - number + split.shards, split.shards)
    return chunk_numbers(split.context, source, split.shards)


def _parts(
    split: Split,
    inputs: AttentionInputs,
    fixed: AttentionInputs,
    moving: dict[str, Array],
    number: Array,
) -> Iterator[AttentionInputs]:
    """The inputs of the launches of a step, one for each chunk of keys."""
    numbers = _source(split, number)
    for slot in range(split.chunks):
        start = numbers[slot] * split.keys
        floats = {"q": fixed.q, "k": moving["k"][:, slot], "v": moving["v"][:, slot]}
        if fixed.bias is not None:
            floats["bias"] = _columns(fixed.bias, start, split.keys)
        of_chunk = _blocks_at(split, inputs, numbers[slot])
        part = _launch.inputs_of(split, of_chunk, floats, start)
        if fixed.mask_array is not None:
            part = part._replace(mask_array=_columns(fixed.mask_array, start, split.keys))
        if "kv_segment_ids" in moving:
            ids = jnp.repeat(moving["kv_segment_ids"][:, slot], split.chunks, axis=0)
            part = part._replace(kv_segment_ids=ids)
        if inputs.kv_lengths is not None:
            starts = jnp.broadcast_to(start, (split.chunks,))
            lengths = _launch.rows_before(inputs.kv_lengths, starts, split.keys)
            part = part._replace(kv_lengths=lengths)
        yield part


def _blocks_at(split: Split, inputs: AttentionInputs, number: Array) -> AttentionInputs:
    """The inputs with the blocks of chunk `number` of the keys, where a mask carries blocks."""
    if split.problem.mask_blocks is None:
        return inputs
    *aux, blocks = inputs.mask_aux
    here = lax.dynamic_index_in_dim(blocks, number, keepdims=False)
    return inputs._replace(mask_aux=(*aux, here))


def _columns(x: Array, start: Array, size: int) -> Array:
    """Columns of a bias or mask_array over all keys."""
    return x if x.shape[3] == 1 else lax.dynamic_slice_in_dim(x, start, size, 3)


def _offsets(split: Split) -> Offsets:
    """The offsets of any device's rows from any chunk's keys; () where they are many."""
    if "q_offset" in split.problem.arrays or split.problem.mask.is_full:
        return ()
    offsets = set()
    for number in range(split.shards):
        chunks = chunks_of(split.context, number, split.shards)
        rows = [split.problem.q_offset + n * split.rows for n in chunks]
        for there in range(split.shards * split.chunks):
            offsets.add(tuple(split.clamp_offset(row - there * split.keys) for row in rows))
    return tuple(sorted(offsets)) if len(offsets) <= MOST_OFFSETS else ()
