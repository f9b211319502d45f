"""Caches whose rows several devices have: who writes a row, who has one that moves, and how
partial results become one.

Each device has a block of consecutive rows of every sequence; lengths, new rows and queries are the
same on all of them. A row is written by the device in whose block it lies. Each device attends to
the keys of its block, and the partial results of all are merged by their log-sum-exp, in the order
of the devices, so that all have the same bits. Drafts that stay may have to move to another device:
each one gives those that it has, and writes those that belong to it.

A kernel puts the last query row at the last key that there is, but a sequence may go on in a later
block. Where a query sees every key before it, that changes nothing. Where it does, under windows
and for several rows at once, the bounds of the mask are moved by as many rows as lie beyond: they
arrive at run time, and are the same for all sequences of a launch, so each sequence has a launch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call import batching, device, sharding
from pallas_attn._call.problem import AppendInputs, Caches, DecodeInputs, DecodeProblem, KeepInputs
from pallas_attn.context import Context, shards_of
from pallas_attn.masks import AT_RUN_TIME, LONGEST, SIDES
from pallas_attn.merge import add_sinks, merge_attention

Array = jax.Array
Run = Callable[[DecodeProblem, DecodeInputs], tuple[Array, Array]]
Write = Callable[[AppendInputs], Caches]


def own(context: Context, held: tuple[int, ...], owners: Array, positions: Array) -> Array:
    """int32[rows]: where in this device's block each row lies, -1 where it lies in another's.

    `held`: rows of each sequence on a device; `owners`, `positions`: of each row, int32[rows].
    """
    shards_of(context)  # a message of ours where nothing is mapped
    size = jnp.asarray(held, jnp.int32)[owners]
    within = positions - lax.axis_index(context.axis) * size
    return jnp.where((positions >= 0) & (within >= 0) & (within < size), within, -1)


def keep(
    context: Context, held: tuple[int, ...], inputs: KeepInputs, rows: Array, write: Write
) -> Caches:
    """The buffers of a `keep` in which `rows` of the newest rows stay (`Kept.rows`).

    What the path names comes to every device as bytes, in one sum for K, V, scales and all layers,
    to which the owner of a row alone adds anything. Then each device writes what lies in its block:
    one launch, and one more for scales.
    """
    assert inputs.path is not None
    begin = jnp.where(rows > 0, inputs.lengths - inputs.new_lengths, 0)[:, None]
    last = jnp.where(rows > 0, inputs.new_lengths - 1, 0)[:, None]
    number = jnp.arange(inputs.path.shape[1], dtype=jnp.int32)[None]
    source = begin + jnp.clip(inputs.path, 0, last)
    target = jnp.where(number < rows[:, None], begin + number, -1)
    caches = Caches(*(getattr(inputs, name) for name in Caches._fields))
    flat = Caches(*(_of_one_layer(x, n < 2) for n, x in enumerate(caches)))
    separate = isinstance(flat.k_cache, tuple)
    times = 1 if separate else flat.k_cache.shape[0] // len(held)
    owners = jnp.repeat(jnp.arange(times * len(held), dtype=jnp.int32), number.size)
    here, there = (
        own(context, held * times, owners, jnp.tile(x.reshape(-1), times)) for x in (source, target)
    )
    parts = [_bytes_at(x, owners, here) for x in flat if x is not None]
    ends = np.cumsum([x.shape[-1] for x in parts]).tolist()
    moving = lax.psum(jnp.concatenate(parts, axis=-1), context.axis)
    moved = iter(jnp.split(moving, ends[:-1], axis=-1))
    new = [None if x is None else _from_bytes(next(moved), x) for x in flat]

    def written(some: slice) -> tuple[Any, Any]:
        pairs: Any = flat[some], new[some]
        (k_cache, v_cache), (k, v) = pairs
        if k_cache is None:
            return None, None
        done = write(AppendInputs(k_cache, v_cache, k, v, there, None, None, None, owners=owners))
        return done.k_cache, done.v_cache

    done = Caches(*written(slice(0, 2)), *written(slice(2, 4)))  # scales: numbers of one column
    return jax.tree.map(lambda x, given: x.reshape(given.shape), done, caches)


def _of_one_layer(cache: Any, numbers: bool) -> Any:
    """Arrays of a cache, or rows of one column that are scales, without an axis of layers. It
    becomes one with the axis behind it: there are more sequences, or more heads of separate ones.
    """
    wanted = 4 - isinstance(cache, tuple)

    def flat(x: Array) -> Array:
        x = x if numbers else x[..., None]
        return x if x.ndim == wanted else x.reshape(-1, *x.shape[2:])

    return jax.tree.map(flat, cache)


def _bytes_at(cache: Any, owners: Array, at: Array) -> Array:
    """uint8[rows, heads, bytes]: rows of a cache without layers; 0 where `at` is negative."""

    def bits(x: Array) -> Array:  # XLA moves float8 on a CPU as float16, which changes NaN's bits
        return x if x.dtype.itemsize > 1 else lax.bitcast_convert_type(x, jnp.uint8)

    if isinstance(cache, tuple):
        each = zip(cache, at.reshape(len(cache), -1), strict=True)
        some = [bits(x).at[:, rows].get(mode="clip") for x, rows in each]
        found = jnp.swapaxes(jnp.concatenate(some, axis=1), 0, 1)
    else:
        found = bits(cache).at[owners, :, at].get(mode="clip")
    found = lax.bitcast_convert_type(found, jnp.uint8).reshape(*found.shape[:2], -1)
    return jnp.where(at[:, None, None] >= 0, found, jnp.uint8(0))


def _from_bytes(found: Array, cache: Any) -> Array:
    """Rows [rows, heads, H] as `cache` keeps them, of their bytes."""
    dtype = jax.tree.leaves(cache)[0].dtype
    if dtype.itemsize > 1:
        found = found.reshape(*found.shape[:2], -1, dtype.itemsize)
    return lax.bitcast_convert_type(found, dtype)


def begins(
    context: Context, held: tuple[int, ...], lengths: Array, rows: int
) -> tuple[Array, Array]:
    """Where the newest `rows` rows of each sequence begin, int32[M] each: among the positions that
    `decode` gives to this device's queries, and among its keys.
    """
    ends = _ends(context, held, lengths)
    return jnp.clip(ends, 0, jnp.asarray(held, jnp.int32)) - rows, ends - rows


def _ends(context: Context, held: tuple[int, ...], lengths: Array) -> Array:
    """int32[M]: where sequences end, counted from this device's first row."""
    size = jnp.asarray(held, jnp.int32)
    return jnp.clip(lengths, 0, shards_of(context) * size) - lax.axis_index(context.axis) * size


def decode(
    context: Context,
    problem: DecodeProblem,
    inputs: DecodeInputs,
    run: Run,
    chosen: Callable[[DecodeProblem], str],
) -> tuple[Array, Array]:
    """(out, lse) of all devices' rows, the same on each; `run` decodes this device's alone, by the
    implementation whose name `chosen` tells.
    """
    if problem.packed:
        raise ValueError(
            "starts: expected None over a cache whose rows are split over devices; pass q as "
            "[M, t, N, H], as many rows for each sequence"
        )
    shards = shards_of(context)
    held = jnp.asarray(problem.capacities, jnp.int32)
    ends = _ends(context, problem.capacities, inputs.lengths)
    # Who was never extended is told below.
    local = inputs._replace(lengths=jnp.clip(ends, 0, held), sinks=None, new_lengths=None)
    alone = dataclasses.replace(problem, sinks=False)
    if not problem.sequences or _sees_all(problem):
        out, lse = run(alone, local)
    else:
        beyond = jnp.maximum(ends - held, 0)
        parts = [run(*_of_sequence(alone, local, beyond[m], m)) for m in range(problem.sequences)]
        out, lse = (jnp.concatenate(x) for x in zip(*parts, strict=True))
    merged, lse = _merged(context, (out, lse), chosen(alone) == "sm90")
    if inputs.sinks is not None:
        merged, lse = add_sinks(merged, lse, inputs.sinks)
    lost = inputs.lengths > shards * held
    if inputs.new_lengths is not None:
        # Kept: XLA would compute it again, from the lengths before, which it copies for that.
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
        from pallas_attn.kernels.decode import merge_over_gpus

        sequences, rows, heads, dim = out.shape
        across = context.axis, shards_of(context)
        asked = merge_over_gpus.Problem(sequences, rows, heads, dim, str(out.dtype), *across)
        if merge_over_gpus.takes(asked):
            others = sharding.varying_axes(out) - {context.axis}
            found = batching.merged(merge_over_gpus.run, asked, out, lse)
            merged, lse = (sharding.varying_along(x, others) for x in found)
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
    one = problem.q_len == 1 and isinstance(mask.right, int) and mask.right >= 0
    return mask.right is None or one


def _of_sequence(
    problem: DecodeProblem, inputs: DecodeInputs, beyond: Array, m: int
) -> tuple[DecodeProblem, DecodeInputs]:
    """One sequence alone, whose last query row stands `beyond` rows after its last key here."""
    mask, bounds = problem.mask, {}
    for side, sign in zip(SIDES, (-1, 1), strict=True):
        if (bound := getattr(mask, side)) is not None:
            given = getattr(inputs, f"mask_{side}") if bound is AT_RUN_TIME else bound
            bounds[side] = jnp.clip(given + sign * beyond, 1 - LONGEST, LONGEST - 1)
    problem = dataclasses.replace(
        problem,
        sequences=1,
        capacities=problem.capacities[m : m + 1],
        mask=mask.filled(**dict.fromkeys(bounds, AT_RUN_TIME)),
    )
    of_one: dict[str, Any] = {f"mask_{side}": bound for side, bound in bounds.items()}
    for name in ("q", "lengths", "new_lengths"):
        if (x := getattr(inputs, name)) is not None:
            of_one[name] = x[m : m + 1]
    caches = {name: getattr(inputs, name) for name in ("k_cache", "v_cache", "k_scale", "v_scale")}
    if problem.kind == "per_sequence":
        of_one |= {name: x and x[m : m + 1] for name, x in caches.items()}
    elif len(inputs.lengths) > 1:  # an array of sequences is one of pages, which hold one each
        pages, size = len(inputs.lengths), problem.capacities[0]
        problem = dataclasses.replace(problem, kind="paged", pages=pages, page_size=size)
        of_one["page_table"] = jnp.full((1, 1), m, jnp.int32)
    return problem, inputs._replace(**of_one)
