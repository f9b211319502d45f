"""One launch of attention over rows that several devices have: its problem, inputs and kernel.

A device's rows are chunks of the sequence (`Context.chunks`), which lie apart in zigzag order. They
become batch rows of one launch, each with an offset of its own, which share the batch row of k and
v that they read (`AttentionProblem.share`).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._autodiff.derivative import Rows
from pallas_attn._call import batching, bind, dispatch
from pallas_attn._call.dispatch import Implementation
from pallas_attn._call.kernel import Chosen
from pallas_attn._call.problem import AttentionInputs, AttentionProblem, bounds_of
from pallas_attn._context_parallel import layout
from pallas_attn._context_parallel.layout import Split
from pallas_attn._functions import folding
from pallas_attn._mesh import sharding
from pallas_attn.context import chunk_numbers
from pallas_attn.merge import cotangents_of_part

Array = jax.Array
Floats = dict[str, Array]  # the inputs that have gradients, by name
Offsets = tuple[tuple[int, ...], ...]  # `AttentionProblem.offsets`
AUX = ("mask_aux", "score_aux")


class Launch(NamedTuple):
    """The arrays of a launch, and the facts of its problem that they do not tell."""

    inputs: AttentionInputs
    offsets: Offsets
    zigzag: int = 1  # `AttentionProblem.zigzag`


def floats_of(inputs: AttentionInputs) -> Floats:
    """The inputs that have gradients."""
    arrays = {name: getattr(inputs, name) for name in batching.FLOATS}
    return {name: x for name, x in arrays.items() if x is not None}


# ---- functions of positions ----------------------------------------------------------------------


def with_functions(
    split: Split, problem: AttentionProblem, inputs: AttentionInputs
) -> tuple[AttentionProblem, AttentionInputs]:
    """The problem of a launch whose inputs have `placed_aux`: segment ids beside a mask function
    become a part of it.
    """
    mask, score = (split.placed(p) for p in (problem.mask_program, problem.score_program))
    q_ids, kv_ids = inputs.q_segment_ids, inputs.kv_segment_ids
    if mask is not None and q_ids is not None and kv_ids is not None:
        offset = problem.q_offset if inputs.q_offset is None else inputs.q_offset
        segments = bind.of_segments(q_ids, kv_ids, offset)
        mask, used = folding.joined("and", mask, segments.program)
        mask_aux = (*inputs.mask_aux, *segments.aux)
        mask_aux = tuple(mask_aux[n] for n in used)
        inputs = inputs._replace(q_segment_ids=None, kv_segment_ids=None, mask_aux=mask_aux)
    return dataclasses.replace(problem, mask_program=mask, score_program=score), inputs


def placed_aux(
    split: Split, inputs: AttentionInputs, starts: Array
) -> dict[str, tuple[Array, ...]]:
    """The arrays that the functions of a launch read: `starts` where `Split.placed` asks for it."""
    placed = {}
    for name, program in zip(AUX, split.programs, strict=True):
        aux, blocks = getattr(inputs, name), ()
        if name == "mask_aux" and split.problem.mask_blocks is not None:
            aux, blocks = aux[:-1], aux[-1:]
        moved = split.placed(program)
        more = (starts,) if moved is not None and len(moved.arrays) > len(aux) else ()
        placed[name] = (*aux, *more, *blocks)
    return placed


# ---- inputs --------------------------------------------------------------------------------------


def inputs_of(
    split: Split, inputs: AttentionInputs, floats: Floats, starts: Array
) -> AttentionInputs:
    """The inputs of a launch but for what describes its keys. `floats`: as the launch takes them;
    `starts`: the position of the first key of each chunk of rows.
    """
    firsts = chunk_numbers(split.context, lax.axis_index(split.context.axis), split.shards)
    firsts = firsts * split.rows
    lengths, offset = inputs.q_lengths, inputs.q_offset
    starts = jnp.broadcast_to(starts, firsts.shape)
    if split.problem.mask.is_full and not split.has_functions:
        offset = None
    else:
        if offset is None:
            offset = jnp.full((split.problem.batch,), split.problem.q_offset, jnp.int32)
        offset = split.clamp_offset(offset[:, None] + (firsts - starts)[None]).reshape(-1)
    mask, ids = inputs.mask_array, inputs.q_segment_ids
    bounds = {side: jnp.repeat(x, split.chunks) for side, x in bounds_of(inputs).items()}
    return AttentionInputs.of(floats)._replace(
        mask_left=bounds.get("left"),
        mask_right=bounds.get("right"),
        **placed_aux(split, inputs, jnp.tile(starts, split.problem.batch)),
        q_offset=offset,
        q_lengths=None if lengths is None else rows_before(lengths, firsts, split.rows),
        q_segment_ids=None if ids is None else layout.by_chunk(split, ids),
        mask_array=None if mask is None else layout.scores_by_chunk(split, mask),
    )


def rows_before(lengths: Array, firsts: Array, size: int) -> Array:
    """int32[B * n]: for each length, of `size` rows from each of n firsts on, the number that lies
    before it.
    """
    return jnp.clip(lengths[:, None] - firsts[None], 0, size).reshape(-1)


# ---- problem and kernel --------------------------------------------------------------------------


def problem_of(split: Split, op: str, launch: Launch) -> tuple[AttentionProblem, AttentionInputs]:
    """The problem and the inputs of a launch, where its kernel takes them as they are."""
    inputs, blocks = launch.inputs, None
    if split.problem.mask_blocks is not None:
        blocks = (inputs.q.shape[1], inputs.k.shape[1], None)
    problem = dataclasses.replace(
        split.problem,
        op=op,
        q_offset=0,
        share=inputs.q.shape[0] // inputs.k.shape[0],
        offsets=() if inputs.q_offset is None else launch.offsets,
        zigzag=launch.zigzag,
        mask_blocks=blocks,
    )
    problem, inputs = with_functions(split, problem, inputs)
    return batching.resized(problem, inputs), inputs


def repeated(
    problem: AttentionProblem, inputs: AttentionInputs
) -> tuple[AttentionProblem, AttentionInputs]:
    """The same with k and v for each batch row, which none shares."""
    if problem.share == 1:
        return problem, inputs
    k, v = (jnp.repeat(x, problem.share, axis=0) for x in (inputs.k, inputs.v))
    return dataclasses.replace(problem, share=1), inputs._replace(k=k, v=v)


def _selected(
    split: Split, op: str, launch: Launch
) -> tuple[Implementation, AttentionProblem, AttentionInputs]:
    """The kernel of a launch, and problem and inputs adapted to it: k and v are repeated where it
    cannot share them, and put in the order of positions where it reads no other.
    """
    problem, inputs = problem_of(split, op, launch)
    chosen = dispatch.select(problem, split.implementation)
    kernel = dispatch.kernel_of(chosen)
    if problem.zigzag > 1 and (kernel is None or not kernel.reads_zigzag(problem)):
        problem = dataclasses.replace(problem, zigzag=1)
        k, v = (layout.in_sequence_order(split, x, 1) for x in (inputs.k, inputs.v))
        inputs = inputs._replace(k=k, v=v)
    if kernel is None or not kernel.shares_keys(problem):
        problem, inputs = repeated(problem, inputs)
    return chosen, problem, inputs


def forward(split: Split, launch: Launch) -> tuple[Array, Array]:
    """(out, lse) of a launch."""
    chosen, problem, inputs = _selected(split, "flash_forward", launch)
    if isinstance(chosen, dispatch.Reference):
        return chosen.run(inputs, problem)
    return batching.compiled_once(batching.attention, chosen, problem, inputs)


def backward(split: Split, launch: Launch, rows: Rows) -> Floats:
    """The gradients of the inputs of `forward`, from out, lse and their cotangents; with the out
    and lse of all keys, whichever are here.
    """
    chosen, problem, inputs = _selected(split, "flash_forward", launch)
    if isinstance(chosen, dispatch.Reference):
        gradients = derivative(chosen, problem, inputs, rows)
    else:
        chosen, problem, inputs = _selected(split, "flash_backward", launch)
        residuals = (inputs, *rows)
        backward = batching.attention_backward
        gradients = batching.compiled_once(backward, chosen, problem, residuals)
    share = launch.inputs.q.shape[0] // launch.inputs.k.shape[0]
    for name in ("k", "v"):  # a sum over the batch rows that have read it
        parts = gradients[name]
        parts = parts.reshape(-1, share, *parts.shape[1:])
        gradients[name] = parts.astype(sharding.sum_dtype(parts.dtype)).sum(axis=1)
    return gradients


def derivative(
    chosen: Chosen, problem: AttentionProblem, inputs: AttentionInputs, rows: Rows
) -> Floats:
    """The gradients that a backward kernel computes, by the derivative of the reference: of its out
    and lse of the keys that are here, weighted as in those of all keys, which are in `rows`.
    """

    def run(floats: dict[str, Any]) -> tuple[Array, Array]:
        return chosen.run(inputs._replace(**floats), problem)

    own, back = jax.vjp(run, floats_of(inputs))
    return back(cotangents_of_part(own, rows))[0]
