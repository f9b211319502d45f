"""Caches whose rows are split over devices: attention to them, and rows that move.

Each device has a block of consecutive rows of every sequence (`blocks`); lengths, new rows and
queries are the same on all of them. Each device attends to the keys of its block, and the partial
results of all are merged by their log-sum-exp, in the order of the devices, so that all have the
same bits. Drafts that stay may have to move to another device: each device gives the rows that it
has to all others, and writes those that belong to its block.

A kernel puts the last query row at the last key that there is, but a sequence may go on in a later
block. Where a query sees every key before it, that changes nothing. Where it does, under windows
and for several rows at once, the bounds of the mask are moved by as many rows as lie beyond: they
arrive at run time, and are the same for all sequences of a launch, so each sequence has a launch.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._cache import blocks
from pallas_attn._cache.attend import attend, implementation_of
from pallas_attn._cache.blocks import Held
from pallas_attn._cache.write import rows_into
from pallas_attn._call import batching, device
from pallas_attn._call.problem import AppendInputs, Caches, DecodeInputs, DecodeProblem, KeepInputs
from pallas_attn._call.special import Special
from pallas_attn._mesh import sharding
from pallas_attn.context import Context, shards_of
from pallas_attn.masks import AT_RUN_TIME, LONGEST, SIDES
from pallas_attn.merge import add_sinks, merge_attention

merge_over_gpus = Special("kernels.decode.merge_over_gpus")

Array = jax.Array
Buffers = Array | tuple[Array, ...]  # K, V or scales of a cache: of all sequences, or of each


# ---- rows that move ------------------------------------------------------------------------------


def keep(
    held: tuple[Context, Held],
    kind: str,
    inputs: KeepInputs,
    rows: Array,
    implementation: str | None,
) -> Caches:
    """The buffers of a `keep` in which `rows` of the newest rows stay (`Kept.rows`).

    The rows that the path names come to every device as bytes, in one sum for K, V, scales and all
    layers, to which the owner of a row alone adds anything. Then each device writes the rows of its
    block: one launch, and one more for scales.
    """
    assert inputs.path is not None
    context, held_rows = held
    blocks.check_split(context, inputs.k_cache)
    begin = jnp.where(rows > 0, inputs.lengths - inputs.new_lengths, 0)[:, None]
    last = jnp.where(rows > 0, inputs.new_lengths - 1, 0)[:, None]
    number = jnp.arange(inputs.path.shape[1], dtype=jnp.int32)[None]
    source = begin + jnp.clip(inputs.path, 0, last)
    target = jnp.where(number < rows[:, None], begin + number, -1)
    caches = Caches(*(getattr(inputs, name) for name in Caches._fields))
    flat = Caches(*(_of_one_layer(x, n >= 2) for n, x in enumerate(caches)))
    separate = isinstance(flat.k_cache, tuple)
    times = 1 if separate else flat.k_cache.shape[0] // len(held_rows)
    owners = jnp.repeat(jnp.arange(times * len(held_rows), dtype=jnp.int32), number.size)
    here, there = (
        blocks.rows_here(context, held_rows * times, owners, jnp.tile(x.reshape(-1), times))
        for x in (source, target)
    )
    parts = [_bytes_at(x, owners, here) for x in flat if x is not None]
    ends = np.cumsum([x.shape[-1] for x in parts]).tolist()
    moving = lax.psum(jnp.concatenate(parts, axis=-1), context.axis)
    moved = iter(jnp.split(moving, ends[:-1], axis=-1))
    new = [None if x is None else _from_bytes(next(moved), x) for x in flat]

    def written(pair: slice) -> tuple[Any, Any]:
        caches: Any = flat[pair]
        (k_cache, v_cache), (k, v) = caches, new[pair]
        if k_cache is None:
            return None, None
        append = AppendInputs(
            k_cache, v_cache, k, v, None, None, None, None, owners=owners, positions=there
        )
        done = rows_into(append, kind, implementation)
        return done.k_cache, done.v_cache

    done = Caches(*written(slice(0, 2)), *written(slice(2, 4)))  # scales as rows of one column
    return jax.tree.map(lambda x, cache: x.reshape(cache.shape), done, caches)


def _of_one_layer(cache: Buffers | None, are_scales: bool) -> Any:
    """Arrays of a cache without an axis of layers, scales as rows of one column. Layers become one
    axis with the axis behind them: there are more sequences, or more heads of separate arrays.
    """
    wanted = 4 - isinstance(cache, tuple)

    def flat(x: Array) -> Array:
        x = x[..., None] if are_scales else x
        return x if x.ndim == wanted else x.reshape(-1, *x.shape[2:])

    return jax.tree.map(flat, cache)


def _bytes_at(cache: Buffers, owners: Array, at: Array) -> Array:
    """uint8[rows, heads, bytes]: rows of a cache without layers; 0 where `at` is negative."""

    def bits(x: Array) -> Array:  # XLA moves float8 on a CPU as float16, which changes NaN's bits
        return x if x.dtype.itemsize > 1 else lax.bitcast_convert_type(x, jnp.uint8)

    if isinstance(cache, tuple):
        each = zip(cache, at.reshape(len(cache), -1), strict=True)
        some = [bits(x).at[:, rows].get(mode="clip") for x, rows in each]
        rows = jnp.swapaxes(jnp.concatenate(some, axis=1), 0, 1)
    else:
        rows = bits(cache).at[owners, :, at].get(mode="clip")
    numbers = lax.bitcast_convert_type(rows, jnp.uint8).reshape(*rows.shape[:2], -1)
    return jnp.where(at[:, None, None] >= 0, numbers, jnp.uint8(0))


def _from_bytes(numbers: Array, cache: Buffers) -> Array:
    """Rows [rows, heads, H] in the dtype of `cache`, from their bytes."""
    dtype = jax.tree.leaves(cache)[0].dtype
    if dtype.itemsize > 1:
        numbers = numbers.reshape(*numbers.shape[:2], -1, dtype.itemsize)
    return lax.bitcast_convert_type(numbers, dtype)


# ---- attention -----------------------------------------------------------------------------------


def decode(
    context: Context, problem: DecodeProblem, inputs: DecodeInputs, implementation: str | None
) -> tuple[Array, Array]:
    """(out, lse) over the rows of all devices, the same on each."""
    if problem.packed:
        raise ValueError(
            "starts: expected None over a cache whose rows are split over devices; pass q as "
            "[M, t, N, H], as many rows for each sequence"
        )
    blocks.check_split(context, inputs.k_cache)
    shards = shards_of(context)
    held = jnp.asarray(problem.capacities, jnp.int32)
    ends = blocks.ends(context, problem.capacities, inputs.lengths)
    # Sequences that were never extended become NaN below.
    local = inputs._replace(lengths=jnp.clip(ends, 0, held), sinks=None, new_lengths=None)
    alone = dataclasses.replace(problem, sinks=False)
    if not problem.sequences or _sees_all(problem):
        out, lse = attend(alone, local, implementation)
    else:
        beyond = jnp.maximum(ends - held, 0)
        parts = [
            attend(*_of_sequence(alone, local, beyond[m], m), implementation)
            for m in range(problem.sequences)
        ]
        out, lse = (jnp.concatenate(x) for x in zip(*parts, strict=True))
    on_hopper = implementation_of(alone, implementation) == "sm90"
    merged, lse = _merged(context, (out, lse), on_hopper)
    if inputs.sinks is not None:
        merged, lse = add_sinks(merged, lse, inputs.sinks)
    lost = inputs.lengths > shards * held
    if inputs.new_lengths is not None:
        # The barrier keeps XLA from computing these again, for which it would copy older lengths.
        new_lengths = lax.optimization_barrier(inputs.new_lengths)
        lost |= (inputs.lengths < 1) & (new_lengths < 0)
    merged = jnp.where(lost[:, None, None, None], jnp.nan, merged)
    return merged.astype(out.dtype), jnp.where(lost[:, None, None], jnp.nan, lse)


def _merged(context: Context, part: tuple[Array, Array], on_hopper: bool) -> tuple[Array, Array]:
    """(out, lse) of all devices by the part of each, in the dtype of sums: of Hopper's kernels by
    another one, where that reaches the memory of the others.
    """
    out, lse = part
    if on_hopper and context.overlap and device.reaches_peers(context.axis):
        sequences, rows, heads, dim = out.shape
        across = context.axis, shards_of(context)
        merge = merge_over_gpus.Problem(sequences, rows, heads, dim, str(out.dtype), *across)
        if merge_over_gpus.takes(merge):
            others = sharding.varying_axes(out) - {context.axis}
            results = batching.merged(merge_over_gpus.run, merge, out, lse)
            merged, lse = (sharding.varying_along(x, others) for x in results)
            return merged, lse
    # Side by side in the dtype of sums, in one collective: of few rows its start takes longest.
    both = jnp.concatenate([out.astype(lse.dtype), lse.swapaxes(1, 2)[..., None]], axis=-1)
    both = lax.all_gather(both, context.axis, to="invarying")
    return merge_attention(both[..., :-1], both[..., -1].swapaxes(2, 3))


def _sees_all(problem: DecodeProblem) -> bool:
    """Whether a query that stands beyond a block sees every key of it."""
    mask = problem.mask
    if mask.left is not None:
        return False
    one_row = problem.q_len == 1 and isinstance(mask.right, int) and mask.right >= 0
    return mask.right is None or one_row


def _of_sequence(
    problem: DecodeProblem, inputs: DecodeInputs, beyond: Array, m: int
) -> tuple[DecodeProblem, DecodeInputs]:
    """Sequence m alone, whose last query row stands `beyond` rows after its last key here."""
    mask, bounds = problem.mask, {}
    for side, sign in zip(SIDES, (-1, 1), strict=True):
        if (bound := getattr(mask, side)) is not None:
            bound = getattr(inputs, f"mask_{side}") if bound is AT_RUN_TIME else bound
            bounds[side] = jnp.clip(bound + sign * beyond, 1 - LONGEST, LONGEST - 1)
    problem = dataclasses.replace(
        problem,
        sequences=1,
        capacities=problem.capacities[m : m + 1],
        mask=mask.filled(**dict.fromkeys(bounds, AT_RUN_TIME)),
    )
    fields: dict[str, Any] = {f"mask_{side}": bound for side, bound in bounds.items()}
    for name in ("q", "lengths", "new_lengths"):
        if (x := getattr(inputs, name)) is not None:
            fields[name] = x[m : m + 1]
    caches = {name: getattr(inputs, name) for name in ("k_cache", "v_cache", "k_scale", "v_scale")}
    if problem.kind == "per_sequence":
        fields |= {name: x and x[m : m + 1] for name, x in caches.items()}
    elif len(inputs.lengths) > 1:  # an array of sequences is one of pages, which hold one each
        pages, size = len(inputs.lengths), problem.capacities[0]
        problem = dataclasses.replace(problem, kind="paged", pages=pages, page_size=size)
        fields["page_table"] = jnp.full((1, 1), m, jnp.int32)
    return problem, inputs._replace(**fields)
