"""What a mask function leaves of blocks of queries by keys where several devices have the rows: of
those that one device has, in the launches that a call with a context makes of them.

Batch rows of a launch are chunks of a device's rows. Its keys are those of the whole sequence, or
of a window around each chunk, or in a ring those of one chunk: see `_context`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._functions import program as _program
from pallas_attn._functions import tile_bounds
from pallas_attn._functions.program import Program
from pallas_attn.context import (
    Context,
    chunk_numbers,
    chunk_rows,
    first_keys,
    shards_of,
    window_of,
)

Array = jax.Array


class Sizes(NamedTuple):
    """Of a call, on one device."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    q_offset: int


def of_call(program: Program, aux: tuple[Array, ...], sizes: Sizes) -> Array | None:
    """`tile_bounds.stored`, of a call without a context; None where the function reads no array."""
    if not program.arrays:
        return None
    uses, offset = program.depends_on, sizes.q_offset
    rows = (sizes.batch if uses(0) else 1, sizes.heads if uses(1) else 1)
    grid = _grid(*rows, (sizes.q_len, sizes.kv_len), offset)
    return tile_bounds.of_blocks(program, aux, grid, offset)


def _grid(batch: int, heads: int, lengths: tuple[int, int], offset: int | None) -> tile_bounds.Grid:
    size = tile_bounds.GRANULE
    return tile_bounds.Grid(batch, heads, *lengths, size, size, offset)


def placed(program: Program, context: Context, rows: int, windows: bool) -> Program:
    """A function as a launch of so many batch rows has it: those are chunks, and its keys, and the
    offsets of its queries, count from the start of what is there, in a ring and where chunks have
    `windows`; or its heads are some of a device's.
    """
    if context.method == "heads":
        return _program.placed(program, 1, (program.inputs - 3,), 1)
    partial = context.method == "ring" or windows
    shifted = (program.inputs - 2, program.inputs - 1) if partial else ()
    return _program.placed(program, context.chunks, shifted, rows)


def of_device(
    program: Program, aux: tuple[Array, ...], band: Any, sizes: Sizes, context: Context
) -> Array | None:
    """`tile_bounds.stored`, uint8[B or 1, N or 1, tiles of rows, tiles of keys], where B counts the
    chunks of a batch row one after the other; in a ring for each chunk of the sequence's keys, on
    an axis before these. None where all is known when a call is traced. `band`: a static one that
    shows all that is seen.
    """
    shards = shards_of(context)
    if context.method == "heads":
        return _of_heads(program, aux, sizes, context, shards)
    given = {"q_len": sizes.q_len, "kv_len": sizes.kv_len}
    rows, keys = (chunk_rows(context, name, n) for name, n in given.items())
    numbers = chunk_numbers(context, lax.axis_index(context.axis), shards)
    is_ring, lengths = context.method == "ring", (sizes.q_len, sizes.kv_len)
    window = None if is_ring else window_of(context, shards, band, lengths, sizes.q_offset)
    repeats = sizes.batch if program.depends_on(0) else 1
    batch = repeats * context.chunks
    local = placed(program, context, batch, window is not None)

    def of_launch(starts: Array, count: int) -> Array:
        offset = jnp.tile(sizes.q_offset + numbers * rows - starts, repeats)
        grid = _grid(batch, sizes.heads, (rows, count), None)
        arrays = (*aux, jnp.tile(starts, repeats))[: len(local.arrays)]
        found = tile_bounds.of_blocks(local, arrays, grid, offset.reshape(-1, 1, 1, 1))
        return jnp.broadcast_to(found, (batch, *found.shape[1:]))

    if is_ring:
        firsts = jnp.arange(shards * context.chunks, dtype=jnp.int32) * keys
        return lax.map(
            lambda first: of_launch(jnp.broadcast_to(first, numbers.shape), keys), firsts
        )
    count = sizes.kv_len * shards if window is None else window[1] - window[0]
    return of_launch(first_keys(numbers, keys, window), count)


def _of_heads(
    program: Program, aux: tuple[Array, ...], sizes: Sizes, context: Context, shards: int
) -> Array | None:
    """Of all rows, and of the heads that this device attends."""
    heads, rest = divmod(sizes.heads, shards)
    if rest and program.depends_on(1):
        raise ValueError(
            f"heads: expected a multiple of the {shards} devices of {context.axis!r} for method "
            f"'heads', got {sizes.heads}; say how many query heads the call has"
        )
    local = placed(program, context, 1, windows=False)
    if not local.arrays:
        return None
    first = (lax.axis_index(context.axis) * heads).astype(jnp.int32)[None]
    lengths = sizes.q_len * shards, sizes.kv_len * shards
    batch = sizes.batch if program.depends_on(0) else 1
    grid = _grid(batch, max(heads, 1), lengths, sizes.q_offset)
    return tile_bounds.of_blocks(local, (*aux, first)[: len(local.arrays)], grid, sizes.q_offset)
