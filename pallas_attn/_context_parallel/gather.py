"""Method "gather": one launch for all rows of a device, with the keys that they may see."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._autodiff.derivative import Rows
from pallas_attn._call import batching, device, dispatch
from pallas_attn._call.problem import AttentionInputs
from pallas_attn._context_parallel import launch as _launch
from pallas_attn._context_parallel import layout
from pallas_attn._context_parallel.launch import Floats, Launch, Offsets, floats_of
from pallas_attn._context_parallel.layout import Split
from pallas_attn._mesh import sharding
from pallas_attn.context import chunk_numbers, chunks_of

Array = jax.Array


def forward(split: Split, inputs: AttentionInputs) -> tuple[Array, Array]:
    """(out, lse) of this device's rows."""
    results = _fetched(split, inputs) or _by_reach(split, inputs, functools.partial(_out, inputs))
    out, lse = results
    return layout.by_device(split, out), layout.lse_by_device(split, lse)


def backward(split: Split, inputs: AttentionInputs, rows: Rows) -> Floats:
    """The gradients of the inputs, by out and lse of this device's rows and their cotangents."""
    return _by_reach(split, inputs, functools.partial(_gradients, inputs, rows))


def launch_of_all(split: Split, inputs: AttentionInputs) -> AttentionInputs:
    """The inputs of a launch whose keys are in the order of positions, by operations that jax
    differentiates.
    """
    floats, window = floats_of(inputs), split.window()
    for name in ("k", "v"):
        x = floats[name]
        if window is None:
            floats[name] = layout.in_sequence_order(split, layout.all_gathered(split, x), 1)
        else:
            floats[name] = layout.near(split, x, window)
    beside = _moved_beside(split, floats)
    return _inputs_of(split, inputs, floats | beside)


def without_blocks(split: Split, inputs: AttentionInputs) -> tuple[Split, AttentionInputs]:
    """The same call by the method "gather", and without the blocks of a mask, which are those of a
    method's launches.
    """
    problem, context = split.problem, dataclasses.replace(split.context, method="gather")
    if problem.mask_blocks is not None:
        inputs = inputs._replace(mask_aux=inputs.mask_aux[:-1])
        problem = dataclasses.replace(problem, mask_blocks=None)
    return dataclasses.replace(split, problem=problem, context=context), inputs


def _out(inputs: AttentionInputs, split: Split) -> tuple[Array, Array]:
    zigzag = split.shards if split.chunks == 2 and split.window() is None else 1
    # Rows in zigzag order stay so where the kernel may read them; else `launch` puts them in order.
    move = _moved if zigzag == 1 else _moved_as_they_lie
    moved = _inputs_of(split, inputs, move(split, floats_of(inputs)))
    return _launch.forward(split, Launch(moved, _offsets(split), zigzag))


def _gradients(inputs: AttentionInputs, rows: Rows, split: Split) -> Floats:
    floats, zigzag = floats_of(inputs), _zigzag_of_backward(split, inputs)
    move = functools.partial(_moved if zigzag == 1 else _moved_as_they_lie, split)
    launch = Launch(_inputs_of(split, inputs, move(floats)), _offsets(split), zigzag)
    gradients = _launch.backward(split, launch, layout.rows_by_chunk(split, rows))
    if split.window() is not None:  # sums of neighbours are added up in float32
        floats = {name: x.astype(sharding.sum_dtype(x.dtype)) for name, x in floats.items()}
    moved, back = jax.vjp(move, floats)
    gradients = back({name: gradients[name].astype(x.dtype) for name, x in moved.items()})[0]
    return {name: x.astype(getattr(inputs, name).dtype) for name, x in gradients.items()}


def _fetched(split: Split, inputs: AttentionInputs) -> tuple[Array, Array] | None:
    """(out, lse) by a kernel that fetches k and v of other devices itself; None where there is no
    such kernel, or devices cannot read each other's memory.
    """
    if not split.context.overlap or not device.reaches_peers(split.context.axis):
        return None
    split, floats = dataclasses.replace(split, fetched=True), floats_of(inputs)
    here = {name: floats[name] for name in ("k", "v")}
    held = _inputs_of(split, inputs, _moved_beside(split, floats) | here)
    number = lax.axis_index(split.context.axis).astype(jnp.int32)[None]
    problem = dataclasses.replace(split.problem, fetches=split.shards)
    launch = Launch(
        held._replace(device=number), _offsets(split), split.shards if split.chunks == 2 else 1
    )
    split = dataclasses.replace(split, problem=problem)
    problem, held = _launch.problem_of(split, "flash_forward", launch)
    with dispatch.chosen():  # a question: reports show what runs
        kernel = dispatch.kernel_of(dispatch.select(problem, split.implementation))
    if kernel is None or not (kernel.shares_keys(problem) and kernel.fetches(problem)):
        return None
    chosen = dispatch.select(problem, split.implementation)
    return batching.compiled_once(batching.attention, chosen, problem, held)


# ---- how far keys move ---------------------------------------------------------------------------


def _by_reach[Result](
    split: Split, inputs: AttentionInputs, run: Callable[[Split], Result]
) -> Result:
    """`run(split)`, with the keys that the documents of this call need where that is asked at run
    time.
    """
    windows, q_ids, kv_ids = split.windows, inputs.q_segment_ids, inputs.kv_segment_ids
    if not windows or q_ids is None or kv_ids is None:
        return run(split)
    splits = [*(dataclasses.replace(split, near=near) for near in windows), split]
    ways = [functools.partial(run, split) for split in splits]
    return lax.switch(_narrowest(split, q_ids, kv_ids), ways)


def _narrowest(split: Split, q_ids: Array, kv_ids: Array) -> Array:
    """The first of `Split.windows` that holds all that documents let rows see; their number where
    none does.

    All devices have all segment ids and find the same. Ids of pieces of the keys are compared with
    those of chunks of the rows by their least and greatest: the window is enough whatever the ids
    are, and no more than enough where ids of different documents do not interleave.
    """
    windows = split.windows
    size, batch = min((split.keys, *split.reaches)), kv_ids.shape[0]
    pieces = split.all_keys // size
    kv_ids = layout.in_sequence_order(split, layout.all_gathered(split, kv_ids), 1)
    kv_ids = kv_ids.reshape(batch, 1, pieces, size)
    chunk_ids = q_ids.reshape(batch, split.chunks, split.rows)
    ends = [layout.all_gathered(split, f(chunk_ids, axis=2)) for f in (jnp.min, jnp.max)]
    least, most = (layout.in_sequence_order(split, x, 1)[:, :, None] for x in ends)
    meet = ((kv_ids.max(axis=3) >= least) & (kv_ids.min(axis=3) <= most)).any(axis=0)
    chunk, first = np.indices(meet.shape)
    at = first * size - chunk * split.keys  # a piece's first key, from the chunk's own on
    after = windows[-1][1] > split.keys  # else no row sees what lies behind its chunk
    outside = [(at < lo) | ((at >= hi) & after) for lo, hi in windows]
    short = (meet[None] & np.stack(outside)).any(axis=(1, 2))
    return short.sum(dtype=jnp.int32)


def _zigzag_of_backward(split: Split, inputs: AttentionInputs) -> int:
    """`AttentionProblem.zigzag` of a backward of all keys: 1 where they go in order."""
    if split.chunks == 1 or split.window() is not None:
        return 1
    problems = []

    def launches(inputs: AttentionInputs) -> None:
        moved = _inputs_of(split, inputs, _moved_as_they_lie(split, floats_of(inputs)))
        launch = Launch(moved, _offsets(split), split.shards)
        for op in ("flash_forward", "flash_backward"):
            problems.append(_launch.problem_of(split, op, launch)[0])

    jax.eval_shape(launches, inputs)  # a question: nothing is gathered for it
    with dispatch.chosen():
        for problem in problems:
            kernel = dispatch.kernel_of(dispatch.select(problem, split.implementation))
            if kernel is None or not kernel.reads_zigzag(problem):
                return 1
    return split.shards


# ---- inputs --------------------------------------------------------------------------------------


def _moved(split: Split, floats: Floats) -> Floats:
    """The arrays as a launch takes them; linear."""
    moved = {name: layout.moved(split, floats[name]) for name in ("k", "v")}
    return moved | _moved_beside(split, floats)


def _moved_as_they_lie(split: Split, floats: Floats) -> Floats:
    """`_moved`, but k and v lie as the devices have them; linear."""
    moved = {name: layout.gathered_as_they_lie(split, floats[name]) for name in ("k", "v")}
    return moved | _moved_beside(split, floats)


def _moved_beside(split: Split, floats: Floats) -> Floats:
    """All arrays but k and v."""
    moved = {"q": layout.by_chunk(split, floats["q"])}
    if "bias" in floats:
        moved["bias"] = layout.scores_by_chunk(split, floats["bias"])
    return moved | {name: x for name, x in floats.items() if name == "sinks"}


def _inputs_of(split: Split, inputs: AttentionInputs, floats: Floats) -> AttentionInputs:
    """The inputs of the launch."""
    numbers = chunk_numbers(split.context, lax.axis_index(split.context.axis), split.shards)
    starts = split.starts(numbers)
    launched = _launch.inputs_of(split, inputs, floats, starts)
    kv_ids, batch = inputs.kv_segment_ids, launched.q.shape[0]
    if kv_ids is not None:
        kv_ids = layout.moved(split, kv_ids)
        kv_ids = jnp.repeat(kv_ids, batch // kv_ids.shape[0], axis=0)
    lengths, window = inputs.kv_lengths, split.window()
    if window is not None and lengths is None and window[1] > split.keys:
        lengths = jnp.full((split.problem.batch,), split.all_keys, jnp.int32)
    if lengths is not None:
        lengths = _launch.rows_before(lengths, starts, launched.k.shape[1])
        if window is not None:  # rows behind the window belong to nobody
            ends = numbers * split.keys + window[1] - starts
            lengths = jnp.minimum(lengths, jnp.tile(ends, split.problem.batch))
    return launched._replace(kv_segment_ids=kv_ids, kv_lengths=lengths)


def _offsets(split: Split) -> Offsets:
    """The offsets of each device's chunks, or () where they are not known. A mask function needs
    none: it says by itself what rows see.
    """
    if "q_offset" in split.problem.arrays or split.problem.mask_program is not None:
        return ()
    offsets = []
    for number in range(split.shards):
        chunks = chunks_of(split.context, number, split.shards)
        first = split.problem.q_offset
        offsets.append(tuple(first + n * split.rows - split.starts(n) for n in chunks))
    return tuple(offsets)
