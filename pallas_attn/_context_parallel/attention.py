"""Attention over rows that several devices have: what each of them computes.

A device's rows are chunks of the sequence (`Context.chunks`), which lie apart in the zigzag order.
They become batch rows of one launch, each with an offset of its own, which share the batch row of k
and v that they read (`AttentionProblem.share`).

The backward starts from this device's q, k, v, out and lse: what others have is fetched again. dk
and dv leave a device in the dtype of k, as the backward kernels round them, half of what float32
would move; what arrives is added up in float32, in the order of the devices, and rounded once.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_attn._autodiff import score_gradients
from pallas_attn._autodiff.score_gradients import Rows
from pallas_attn._call import batching, checks, dispatch, sharding
from pallas_attn._call import device as _device
from pallas_attn._call.problem import AttentionInputs, AttentionProblem, bounds_of
from pallas_attn._context_parallel import layout
from pallas_attn._context_parallel.layout import Split
from pallas_attn._functions import program as _program
from pallas_attn._functions.program import Program
from pallas_attn.context import (
    chunk_numbers,
    chunks_of,
)
from pallas_attn.merge import add_sinks, cotangents_of_part, merge_attention

Array = jax.Array
FLOATS = batching.FLOATS
AUX = ("mask_aux", "score_aux")
MOST_OFFSETS = 16  # for which schedules are made beforehand


def attend(split: Split, inputs: AttentionInputs, plain: Any) -> tuple[Array, Array]:
    """(out, lse) of this device's rows; `plain(problem, inputs)` attends without a context."""
    _check_aux(split)
    if split.context.method == "heads":
        return _by_heads(split, inputs, plain)
    run = functools.partial(_attention, split)
    return score_gradients.attended(run, inputs, functools.partial(_of_score_aux, split))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(split: Split, inputs: AttentionInputs) -> tuple[Array, Array]:
    run = _ring if split.context.method == "ring" else _at_once
    return run(split, inputs)


def _forward(split: Split, inputs: AttentionInputs) -> tuple[Any, Any]:
    out, lse = _attention(split, inputs)
    out = checkpoint_name(out, "flash_attention_out")
    lse = checkpoint_name(lse, "flash_attention_lse")
    return (out, lse), (inputs, out, lse)


def _backward(split: Split, residuals: Any, cotangents: Any) -> tuple[AttentionInputs]:
    inputs, rows = residuals[0], (*residuals[1:], *cotangents)
    run = _ring_backward if split.context.method == "ring" else _at_once_backward
    found = run(split, inputs, rows)
    gradients = {
        name: sharding.gradient_of(x, found[name].astype(x.dtype))
        for name, x in _floats_of(inputs).items()
    }
    nothing: Any = None
    aux = ((nothing,) * len(x) for x in (inputs.mask_aux, inputs.score_aux))
    return (AttentionInputs.of(gradients)._replace(**dict(zip(AUX, aux, strict=True))),)


_attention.defvjp(_forward, _backward)


def _floats_of(inputs: AttentionInputs) -> dict[str, Array]:
    return {name: getattr(inputs, name) for name in FLOATS if getattr(inputs, name) is not None}


# ---- functions of positions ---------------------------------------------------------------------


def _check_aux(split: Split) -> None:
    """Raises where a function reads an array of this device's rows alone at their positions."""
    for what, program in zip(("mask", "score"), split.programs, strict=True):
        if program is not None:
            _check_positions(split, what, program, program.inputs - 2, split.problem.q_len)
            _check_positions(split, what, program, program.inputs - 1, split.problem.kv_len)


def _check_positions(split: Split, what: str, program: Program, number: int, rows: int) -> None:
    for array, axis in _program.reads_at(program, number):
        shape = program.arrays[array][0]
        if shape[axis] == rows:
            raise ValueError(
                f"{what}: expected what a function reads at a position to have all "
                f"{rows * split.shards} rows, since positions are those of the whole sequence, got "
                f"shape {shape}, whose axis {axis} has the {rows} rows of one device; give it whole"
                f", in the order of positions, with in_specs without {split.context.axis!r}"
            )


def _with_functions(
    split: Split, problem: AttentionProblem, given: AttentionInputs
) -> tuple[AttentionProblem, AttentionInputs]:
    """The problem of a launch whose `given` has `_placed_aux`: segment ids beside a mask function
    become a part of it.
    """
    mask, score = (split.placed(p) for p in (problem.mask_program, problem.score_program))
    q_ids, kv_ids = given.q_segment_ids, given.kv_segment_ids
    if mask is not None and q_ids is not None and kv_ids is not None:
        offset = problem.q_offset if given.q_offset is None else given.q_offset
        segments = checks.of_segments(q_ids, kv_ids, offset)
        mask = _program.joined("and", mask, segments.program)
        given = given._replace(
            q_segment_ids=None, kv_segment_ids=None, mask_aux=(*given.mask_aux, *segments.aux)
        )
    return dataclasses.replace(problem, mask_program=mask, score_program=score), given


def _placed_aux(
    split: Split, inputs: AttentionInputs, starts: Array
) -> dict[str, tuple[Array, ...]]:
    """What the functions of a launch read, by `Split.placed`."""
    found = {}
    for name, program in zip(AUX, split.programs, strict=True):
        given, blocks = getattr(inputs, name), ()
        if name == "mask_aux" and split.problem.mask_blocks is not None:
            given, blocks = given[:-1], given[-1:]
        more = program is not None and len(split.placed(program).arrays) > len(given)
        found[name] = (*given, *((starts,) if more else ()), *blocks)
    return found


def _blocks_at(split: Split, inputs: AttentionInputs, number: Array) -> AttentionInputs:
    """In a ring those of chunk `number` of the keys, where a mask carries blocks."""
    if split.problem.mask_blocks is None:
        return inputs
    *aux, blocks = inputs.mask_aux
    here = lax.dynamic_index_in_dim(blocks, number, keepdims=False)
    return inputs._replace(mask_aux=(*aux, here))


def _of_score_aux(
    split: Split, inputs: AttentionInputs, numbers: list[int], rows: Rows
) -> list[Array]:
    """The gradients of what a score function reads, of this device's rows, in float32."""
    rows = layout.rows_by_chunk(split, rows)

    def of_launch(given: AttentionInputs) -> list[Array]:
        problem, given = _launched(split, "flash_forward", given, ())
        problem, given = _repeated(problem, given)
        some = split.context.method == "ring"
        return score_gradients.of_call(problem, given, numbers, rows, some_keys=some)

    if split.context.method != "ring":
        return of_launch(_given(split, inputs, _floats_moved(split, _floats_of(inputs))))
    moving, fixed = _keys_of(split, inputs), _fixed(split, inputs)

    def step(carry, number):
        sums, moving = carry
        following = _passed_on(split, moving)
        for given in _parts(split, inputs, fixed, moving, number):
            sums = [a + b for a, b in zip(sums, of_launch(given), strict=True)]
        return (sums, following), None

    differ = jax.tree.leaves((moving, rows))
    zeros = [jnp.zeros(inputs.score_aux[n].shape, jnp.float32) for n in numbers]
    sums = [sharding.varying_like(x, *differ) for x in zeros]
    return lax.scan(step, (sums, moving), jnp.arange(split.shards, dtype=jnp.int32))[0][0]


# ---- one launch for all rows --------------------------------------------------------------------


def _at_once(split: Split, inputs: AttentionInputs) -> tuple[Array, Array]:
    if (launch := _fetching(split, inputs)) is not None:
        out, lse = batching.attention(*launch)
        return layout.by_device(split, out), layout.lse_by_device(split, lse)

    def run(split):
        floats, zigzag = _floats_of(inputs), split.chunks == 2 and split.window() is None
        # As the devices have them: who cannot read them so is given others.
        move = _floats_as_they_lie if zigzag else _floats_moved
        given = _given(split, inputs, move(split, floats))
        out, lse = _launch(split, given, _offsets(split), split.shards if zigzag else 1)
        return layout.by_device(split, out), layout.lse_by_device(split, lse)

    return _by_reach(split, inputs, run)


def _fetching(split: Split, inputs: AttentionInputs) -> Any:
    """Kernel, problem and arrays of a launch that fetches k and v of other devices itself; None
    where there is no such kernel, or devices that cannot read each other's memory.
    """
    if not split.context.overlap or not _device.reaches_peers(split.context.axis):
        return None
    split, floats = dataclasses.replace(split, fetched=True), _floats_of(inputs)
    here = {name: floats[name] for name in ("k", "v")}
    given = _given(split, inputs, _floats_beside(split, floats) | here)
    device = lax.axis_index(split.context.axis).astype(jnp.int32)[None]
    given = given._replace(device=device)
    zigzag = split.shards if split.chunks == 2 else 1
    some = dataclasses.replace(split.problem, fetches=split.shards, zigzag=zigzag)
    fetched = dataclasses.replace(split, problem=some)
    problem, given = _launched(fetched, "flash_forward", given, _offsets(split))
    with dispatch.recorded():  # a question: what runs is recorded where it is known
        chosen = dispatch.select(problem, split.implementation)
    if not (dispatch.shares_keys(chosen, problem) and dispatch.fetches(chosen, problem)):
        return None
    return dispatch.select(problem, split.implementation), problem, given


def _by_reach(split: Split, inputs: AttentionInputs, run: Any) -> Any:
    """`run(split)`, by what the documents of this call need where that is asked at run time."""
    windows, ids = split.windows, (inputs.q_segment_ids, inputs.kv_segment_ids)
    if not windows:
        return run(split)
    splits = [*(dataclasses.replace(split, near=near) for near in windows), split]
    ways = [functools.partial(run, split) for split in splits]
    return lax.switch(_narrowest(split, *ids), ways)


def _narrowest(split: Split, q_ids: Any, kv_ids: Any) -> Array:
    """Which of `Split.windows` is the first that holds all that documents let rows see; how many
    there are where none does.

    All devices have all segment ids and find the same. Ids of pieces of the keys are compared with
    those of chunks of the rows by their least and greatest: what is found is enough whatever the
    ids are, and no more than enough where ids of different documents do not interleave.
    """
    windows = split.windows
    size, batch = min((split.keys, *split.reaches)), kv_ids.shape[0]
    pieces = split.all_keys // size
    kv_ids = layout.in_order(split, layout.all_gathered(split, kv_ids), 1).reshape(
        batch, 1, pieces, size
    )
    chunk_ids = q_ids.reshape(batch, split.chunks, split.rows)
    ends = [layout.all_gathered(split, f(chunk_ids, axis=2)) for f in (jnp.min, jnp.max)]
    least, most = (layout.in_order(split, x, 1)[:, :, None] for x in ends)
    meet = ((kv_ids.max(axis=3) >= least) & (kv_ids.min(axis=3) <= most)).any(axis=0)
    chunk, first = np.indices(meet.shape)
    at = first * size - chunk * split.keys  # of a piece, from the chunk's own first key on
    after = windows[-1][1] > split.keys  # else no row sees what lies behind its chunk
    outside = [(at < lo) | ((at >= hi) & after) for lo, hi in windows]
    short = (meet[None] & np.stack(outside)).any(axis=(1, 2))
    return short.sum(dtype=jnp.int32)


def _at_once_backward(split: Split, inputs: AttentionInputs, rows: Any) -> dict[str, Array]:
    return _by_reach(split, inputs, lambda split: _gradients_at_once(split, inputs, rows))


def _gradients_at_once(split: Split, inputs: AttentionInputs, rows: Any) -> dict[str, Array]:
    floats = _floats_of(inputs)
    zigzag = _zigzag_of_backward(split, inputs)
    move = functools.partial(_floats_moved if zigzag == 1 else _floats_as_they_lie, split)
    given = _given(split, inputs, move(floats))
    by_chunk = layout.rows_by_chunk(split, rows)
    found = _launch_backward(split, given, by_chunk, _offsets(split), zigzag)
    if split.window() is not None:  # what neighbours have computed is added up in float32
        floats = {name: x.astype(layout.wide(x.dtype)) for name, x in floats.items()}
    moved, back = jax.vjp(move, floats)
    found = back({name: found[name].astype(x.dtype) for name, x in moved.items()})[0]
    return {name: x.astype(getattr(inputs, name).dtype) for name, x in found.items()}


def _zigzag_of_backward(split: Split, inputs: AttentionInputs) -> int:
    """`AttentionProblem.zigzag` of a backward of all keys: 1 where they go in order."""
    if split.chunks == 1 or split.window() is not None:
        return 1

    problems: list[AttentionProblem] = []

    def launches(inputs: AttentionInputs) -> None:
        given = _given(split, inputs, _floats_as_they_lie(split, _floats_of(inputs)))
        for op in ("flash_forward", "flash_backward"):
            problem, _ = _launched(split, op, given, _offsets(split))
            problems.append(dataclasses.replace(problem, zigzag=split.shards))

    jax.eval_shape(launches, inputs)  # a question: nothing is gathered for it
    with dispatch.recorded():
        for problem in problems:
            chosen = dispatch.select(problem, split.implementation)
            if not dispatch.reads_zigzag(chosen, problem):
                return 1
    return split.shards


def _floats_as_they_lie(split: Split, floats: dict[str, Array]) -> dict[str, Array]:
    """`_floats_moved`, but for k and v, which lie as the devices have them; linear."""
    moved = {name: layout.gathered_as_they_lie(split, floats[name]) for name in ("k", "v")}
    return moved | _floats_beside(split, floats)


def _floats_moved(split: Split, floats: dict[str, Array]) -> dict[str, Array]:
    """As a launch takes them; linear."""
    moved = {name: layout.moved(split, floats[name]) for name in ("k", "v")}
    return moved | _floats_beside(split, floats)


def _floats_beside(split: Split, floats: dict[str, Array]) -> dict[str, Array]:
    """All but k and v."""
    moved = {"q": layout.by_chunk(split, floats["q"])}
    if "bias" in floats:
        moved["bias"] = layout.scores_by_chunk(split, floats["bias"])
    return moved | {name: x for name, x in floats.items() if name == "sinks"}


def _given(split: Split, inputs: AttentionInputs, floats: dict[str, Array]) -> AttentionInputs:
    """The arrays of the launch."""
    numbers = chunk_numbers(split.context, lax.axis_index(split.context.axis), split.shards)
    given = _rows_given(split, inputs, floats, split.starts(numbers))
    kv_ids, batch = inputs.kv_segment_ids, given.q.shape[0]
    if kv_ids is not None:
        kv_ids = layout.moved(split, kv_ids)
        kv_ids = jnp.repeat(kv_ids, batch // kv_ids.shape[0], axis=0)
    lengths, window = inputs.kv_lengths, split.window()
    if window is not None and lengths is None and window[1] > split.keys:
        lengths = jnp.full((split.problem.batch,), split.all_keys, jnp.int32)
    if lengths is not None:
        starts = split.starts(numbers)
        lengths = _from_row(lengths, starts, given.k.shape[1])
        if window is not None:  # behind these are rows of nobody
            ends = numbers * split.keys + window[1] - starts
            lengths = jnp.minimum(lengths, jnp.tile(ends, split.problem.batch))
    return given._replace(kv_segment_ids=kv_ids, kv_lengths=lengths)


def _rows_given(
    split: Split, inputs: AttentionInputs, floats: dict[str, Array], starts: Array
) -> AttentionInputs:
    """What says nothing of the keys but where they start: `starts`, one position a chunk."""
    firsts = chunk_numbers(split.context, lax.axis_index(split.context.axis), split.shards)
    firsts = firsts * split.rows
    lengths, offset = inputs.q_lengths, inputs.q_offset
    starts = jnp.broadcast_to(starts, firsts.shape)
    if split.problem.mask.is_full and not split.has_functions:
        offset = None
    else:
        if offset is None:
            offset = jnp.full((split.problem.batch,), split.problem.q_offset, jnp.int32)
        offset = split.telling(offset[:, None] + (firsts - starts)[None]).reshape(-1)
    mask, ids = inputs.mask_array, inputs.q_segment_ids
    bounds: dict[str, Any] = {
        f"mask_{side}": jnp.repeat(x, split.chunks) for side, x in bounds_of(inputs).items()
    }
    return AttentionInputs.of(floats)._replace(
        **bounds,
        **_placed_aux(split, inputs, jnp.tile(starts, split.problem.batch)),
        q_offset=offset,
        q_lengths=None if lengths is None else _from_row(lengths, firsts, split.rows),
        q_segment_ids=None if ids is None else layout.by_chunk(split, ids),
        mask_array=None if mask is None else layout.scores_by_chunk(split, mask),
    )


def _from_row(lengths: Array, firsts: Array, size: int) -> Array:
    """int32[B * n]: of `size` rows from each of n firsts on, how many lie before the length."""
    return jnp.clip(lengths[:, None] - firsts[None], 0, size).reshape(-1)


def _offsets(split: Split) -> tuple[tuple[int, ...], ...]:
    """`AttentionProblem.offsets`: of each device, those of its chunks. A mask function says by
    itself what rows see.
    """
    if "q_offset" in split.problem.arrays or split.problem.mask_program is not None:
        return ()
    found = []
    for device in range(split.shards):
        numbers = chunks_of(split.context, device, split.shards)
        found.append(
            tuple(split.problem.q_offset + n * split.rows - split.starts(n) for n in numbers)
        )
    return tuple(found)


def _launch(
    split: Split, given: AttentionInputs, offsets: Any, zigzag: int = 1
) -> tuple[Array, Array]:
    """`zigzag`: see `AttentionProblem`."""
    chosen, problem, given = _chosen(split, "flash_forward", given, offsets, zigzag)
    if chosen.name == "reference":
        return chosen.run(given, problem)
    return batching.attention(chosen, problem, given)


def _launch_backward(
    split: Split, given: AttentionInputs, rows: Rows, offsets: Any, zigzag: int = 1
) -> dict[str, Array]:
    """The gradients of what the forward was given, from out, lse and their cotangents; with the
    out and lse of all keys, whichever are given here.
    """
    chosen, problem, repeated = _chosen(split, "flash_forward", given, offsets, zigzag)
    if chosen.name == "reference":
        found = _derivative(chosen, problem, repeated, rows)
    else:
        chosen, problem, repeated = _chosen(split, "flash_backward", given, offsets, zigzag)
        found = batching.attention_backward(chosen, problem, (repeated, *rows)).named()
    for name in ("k", "v"):  # a sum over the batch rows that have read it
        parts = found[name]
        parts = parts.reshape(-1, given.q.shape[0] // given.k.shape[0], *parts.shape[1:])
        found[name] = parts.astype(layout.wide(parts.dtype)).sum(axis=1)
    return found


def _chosen(split: Split, op: str, given: AttentionInputs, offsets: Any, zigzag: int = 1) -> Any:
    """Who computes it, and problem and arrays as they go there: with k and v repeated where a
    kernel cannot share them, and in the order of positions where it reads no other.
    """
    problem, given = _launched(split, op, given, offsets)
    problem = dataclasses.replace(problem, zigzag=zigzag)
    chosen = dispatch.select(problem, split.implementation)
    if zigzag > 1 and not dispatch.reads_zigzag(chosen, problem):
        problem = dataclasses.replace(problem, zigzag=1)
        k, v = (layout.in_order(split, x, 1) for x in (given.k, given.v))
        given = given._replace(k=k, v=v)
    if not dispatch.shares_keys(chosen, problem):
        problem, given = _repeated(problem, given)
    return chosen, problem, given


def _launched(split: Split, op: str, given: AttentionInputs, offsets: Any) -> Any:
    """Problem and arrays of a launch."""
    share, blocks = given.q.shape[0] // given.k.shape[0], None
    if split.problem.mask_blocks is not None:
        blocks = (given.q.shape[1], given.k.shape[1], None)
    problem = dataclasses.replace(split.problem, op=op, q_offset=0, share=share, mask_blocks=blocks)
    if given.q_offset is not None:
        problem = dataclasses.replace(problem, offsets=offsets)
    problem, given = _with_functions(split, problem, given)
    return batching.resized(problem, given), given


def _repeated(problem: AttentionProblem, given: AttentionInputs) -> Any:
    """The same, with k and v of each batch row's own."""
    if problem.share == 1:
        return problem, given
    k, v = (jnp.repeat(x, problem.share, axis=0) for x in (given.k, given.v))
    return dataclasses.replace(problem, share=1), given._replace(k=k, v=v)


def _derivative(
    chosen: Any, problem: AttentionProblem, given: AttentionInputs, rows: Rows
) -> dict[str, Array]:
    """What a backward kernel computes, by the derivative of the reference: of its out and lse, of
    the keys that are given, with their weights in those of all keys, which are in `rows`.
    """

    def run(floats):
        return chosen.run(given._replace(**floats), problem)

    own, back = jax.vjp(run, _floats_of(given))
    return back(cotangents_of_part(own, rows))[0]


# ---- the ring -----------------------------------------------------------------------------------


def _ring(split: Split, inputs: AttentionInputs) -> tuple[Array, Array]:
    """Keys pass from device to device; what each of them gives is merged in float32."""
    moving = _keys_of(split, inputs)
    fixed = _fixed(split, inputs)
    wide = layout.wide(inputs.q.dtype)
    shape = (*fixed.q.shape[:3], split.problem.v_head_dim)
    out = jnp.zeros(shape, wide)
    lse = jnp.full((shape[0], shape[2], shape[1]), -jnp.inf, wide)
    out, lse = (sharding.varying_like(x, *jax.tree.leaves((inputs, moving))) for x in (out, lse))

    def step(carry, number):
        (out, lse), moving = carry
        following = _passed_on(split, moving)
        outs, lses = [out], [lse]
        for given in _parts(split, inputs, fixed, moving, number):
            part, part_lse = _launch(split, given, _ring_offsets(split))
            outs.append(part.astype(wide))
            lses.append(part_lse)
        return (merge_attention(outs, lses), following), None

    numbers = jnp.arange(split.shards, dtype=jnp.int32)
    ((out, lse), _), _ = lax.scan(step, ((out, lse), moving), numbers)
    if inputs.sinks is not None:
        out, lse = add_sinks(out, lse, inputs.sinks)
    return layout.by_device(split, out.astype(inputs.q.dtype)), layout.lse_by_device(split, lse)


def _ring_backward(split: Split, inputs: AttentionInputs, rows: Any) -> dict[str, Array]:
    """As `_ring`, with dk and dv of the keys that pass, in float32, passing with them."""
    moving, fixed = _keys_of(split, inputs), _fixed(split, inputs)
    by_chunk = layout.rows_by_chunk(split, rows)
    sums = {"q": _zeros(fixed.q)}
    if fixed.bias is not None:
        part = _columns(fixed.bias, _source(split, 0)[0], split.keys)  # says how they differ
        sums["bias"] = sharding.varying_like(_zeros(fixed.bias), part)
    passing = {name: _zeros(moving[name]) for name in ("k", "v")}

    def step(carry, number):
        sums, passing, moving = dict(carry[0]), dict(carry[1]), carry[2]
        following = _passed_on(split, moving)
        numbers = _source(split, number)
        for slot, given in enumerate(_parts(split, inputs, fixed, moving, number)):
            found = _launch_backward(split, given, by_chunk, _ring_offsets(split))
            found = {name: x.astype(layout.wide(x.dtype)) for name, x in found.items()}
            sums["q"] = sums["q"] + found["q"]
            for name in ("k", "v"):
                passing[name] = passing[name].at[:, slot].add(found[name])
            if "bias" in sums:
                start = numbers[slot] * split.keys
                sums["bias"] = _added_from(sums["bias"], found["bias"], start)
        return (sums, _passed_on(split, passing), following), None

    numbers = jnp.arange(split.shards, dtype=jnp.int32)
    (sums, passing, _), _ = lax.scan(step, (sums, passing, moving), numbers)
    found = {name: x.reshape(getattr(inputs, name).shape) for name, x in passing.items()}
    found["q"] = layout.by_device(split, sums["q"])
    if inputs.bias is not None:
        own = sharding.varying_like(_zeros(inputs.bias), sums["bias"])
        back = jax.vjp(functools.partial(layout.scores_by_chunk, split), own)[1]
        found["bias"] = back(sums["bias"])[0]
    if inputs.sinks is not None:
        found["sinks"] = _d_sinks(inputs.sinks, rows)
    return found


def _zeros(x: Array) -> Array:
    """To add up what an array's gradient consists of."""
    return jnp.zeros_like(x, layout.wide(x.dtype))


def _added_from(total: Array, part: Array, start: Any) -> Array:
    """`part` added to the columns of `total` from `start` on, or to the one that there is."""
    if total.shape[3] == 1:
        return total + part
    columns = lax.dynamic_slice_in_dim(total, start, part.shape[3], 3)
    return lax.dynamic_update_slice_in_dim(total, columns + part, start, 3)


def _d_sinks(sinks: Array, rows: Any) -> Array:
    """A sink is one more logit, of no value: its dS is P (0 - delta) where a row sees a key."""
    out, lse, d_out, d_lse = rows
    delta = (out.astype(lse.dtype) * d_out.astype(lse.dtype)).sum(-1).swapaxes(1, 2) - d_lse
    seen = lse != -jnp.inf
    p = jnp.exp(sinks.astype(lse.dtype)[None, :, None] - jnp.where(seen, lse, 0))
    return -jnp.where(seen, p * delta, 0).sum(axis=(0, 2))


def _keys_of(split: Split, inputs: AttentionInputs) -> dict[str, Array]:
    """What passes from device to device: [B, chunks, rows of a chunk, ...] each."""
    moving = {"k": inputs.k, "v": inputs.v}
    if inputs.kv_segment_ids is not None:
        moving["kv_segment_ids"] = inputs.kv_segment_ids
    return {
        name: x.reshape(x.shape[0], split.chunks, split.keys, *x.shape[2:])
        for name, x in moving.items()
    }


def _fixed(split: Split, inputs: AttentionInputs) -> AttentionInputs:
    """What stays, by chunk: q, and bias and mask_array over all keys."""
    bias, mask = inputs.bias, inputs.mask_array
    return inputs._replace(
        q=layout.by_chunk(split, inputs.q),
        bias=None if bias is None else layout.scores_by_chunk(split, bias),
        mask_array=None if mask is None else layout.scores_by_chunk(split, mask),
    )


def _passed_on(split: Split, moving: dict[str, Array]) -> dict[str, Array]:
    pairs = [(device, (device + 1) % split.shards) for device in range(split.shards)]
    return {name: lax.ppermute(x, split.context.axis, pairs) for name, x in moving.items()}


def _source(split: Split, number: Any) -> Array:
    """Which chunks the keys are that are here at a step."""
    device = lax.axis_index(split.context.axis)
    return chunk_numbers(
        split.context, lax.rem(device - number + split.shards, split.shards), split.shards
    )


def _parts(split, inputs, fixed, moving, number):
    """The arrays of the launches of a step, one for each chunk of keys."""
    numbers = _source(split, number)
    for slot in range(split.chunks):
        start = numbers[slot] * split.keys
        floats = {"q": fixed.q, "k": moving["k"][:, slot], "v": moving["v"][:, slot]}
        if fixed.bias is not None:
            floats["bias"] = _columns(fixed.bias, start, split.keys)
        given = _rows_given(split, _blocks_at(split, inputs, numbers[slot]), floats, start)
        if fixed.mask_array is not None:
            given = given._replace(mask_array=_columns(fixed.mask_array, start, split.keys))
        if "kv_segment_ids" in moving:
            ids = jnp.repeat(moving["kv_segment_ids"][:, slot], split.chunks, axis=0)
            given = given._replace(kv_segment_ids=ids)
        if inputs.kv_lengths is not None:
            starts = jnp.broadcast_to(start, (split.chunks,))
            given = given._replace(kv_lengths=_from_row(inputs.kv_lengths, starts, split.keys))
        yield given


def _columns(x: Array, start: Any, size: int) -> Array:
    """Of a bias or mask_array over all keys."""
    return x if x.shape[3] == 1 else lax.dynamic_slice_in_dim(x, start, size, 3)


def _ring_offsets(split: Split) -> tuple[tuple[int, ...], ...]:
    """`AttentionProblem.offsets`, of any device's rows and any chunk's keys; none if many."""
    if "q_offset" in split.problem.arrays or split.problem.mask.is_full:
        return ()
    found = set()
    for device in range(split.shards):
        numbers = chunks_of(split.context, device, split.shards)
        rows = [split.problem.q_offset + n * split.rows for n in numbers]
        for there in range(split.shards * split.chunks):
            found.add(tuple(split.telling(row - there * split.keys) for row in rows))
    return tuple(sorted(found)) if len(found) <= MOST_OFFSETS else ()


# ---- rows and heads change places ---------------------------------------------------------------


def _by_heads(split: Split, inputs: AttentionInputs, plain: Any) -> tuple[Array, Array]:
    problem, shards = split.problem, split.shards
    if problem.kv_heads % shards:
        raise ValueError(
            f"context: method 'heads' wants a number of kv heads that the {shards} devices of "
            f"{split.context.axis!r} divide, got K = {problem.kv_heads}; take 'gather' or 'ring'"
        )
    given: dict[str, Any] = {
        name: layout.in_order(split, _swapped(split, getattr(inputs, name), 2, 1), 1)
        for name in ("q", "k", "v")
    }
    for name in ("q_segment_ids", "kv_segment_ids"):
        if (ids := getattr(inputs, name)) is not None:
            given[name] = layout.gathered(split, ids)
    for name in ("bias", "mask_array"):
        if (x := getattr(inputs, name)) is not None:
            given[name] = _scores_by_heads(split, x)
    if inputs.sinks is not None:
        given["sinks"] = _own_heads(split, inputs.sinks, 0)
    first = lax.axis_index(split.context.axis) * (problem.q_heads // shards)
    given |= _placed_aux(split, inputs, first.astype(jnp.int32)[None])
    if problem.mask_blocks is not None:
        lengths = (problem.q_len * shards, problem.kv_len * shards)
        problem = dataclasses.replace(problem, mask_blocks=(*lengths, problem.q_offset))
    problem, by_heads = _with_functions(split, problem, inputs._replace(**given))
    out, lse = plain(batching.resized(problem, by_heads), by_heads)
    out = _swapped(split, layout.as_devices_have_it(split, out, 1), 1, 2)
    return out, _swapped(split, layout.as_devices_have_it(split, lse, 2), 2, 1)


def _swapped(split: Split, x: Array, from_axis: int, to_axis: int) -> Array:
    """An axis that was whole split over the devices, and one that was split whole."""
    return lax.all_to_all(x, split.context.axis, from_axis, to_axis, tiled=True)


def _own_heads(split: Split, x: Array, axis: int) -> Array:
    size = x.shape[axis] // split.shards
    start = lax.axis_index(split.context.axis) * size
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def _scores_by_heads(split: Split, x: Array) -> Array:
    """A bias or mask_array of this device's rows -> of its heads, and of all rows."""
    heads, rows = x.shape[1:3]
    if rows < split.problem.q_len:
        return x if heads == 1 else _own_heads(split, x, 1)
    if heads == 1:
        x = lax.all_gather(x, split.context.axis, axis=2, tiled=True)
    else:
        x = _swapped(split, x, 1, 2)
    return layout.in_order(split, x, 2)
