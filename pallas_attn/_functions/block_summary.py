"""Kinds of a mask function's blocks, kept in the mask (`mask.blocks`): for a call on one device, or
for one device's rows in the launches that a call with a `Context` makes.

Batch rows of such a launch are chunks of the device's rows. Its keys are those of the whole
sequence, of a window around each chunk, or in a ring of one chunk.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._functions import program as _program
from pallas_attn._functions import tile_bounds
from pallas_attn._functions.program import Program
from pallas_attn.context import (
    Band,
    Context,
    chunk_numbers,
    chunk_rows,
    first_keys,
    shards_of,
    window_of,
)

Array = jax.Array


class Sizes(NamedTuple):
    """Sizes of a call on one device."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    q_offset: int

    def grid(self, batch: int, heads: int, lengths: tuple[int, int]) -> tile_bounds.Grid:
        size = tile_bounds.GRANULE
        return tile_bounds.Grid(batch, heads, *lengths, size, size, self.q_offset)


def of_call(program: Program, aux: tuple[Array, ...], sizes: Sizes) -> Array | None:
    """`tile_bounds.of_blocks` without a context; None where the function reads no array."""
    if not program.arrays:
        return None
    batch = sizes.batch if program.depends_on(0) else 1
    heads = sizes.heads if program.depends_on(1) else 1
    grid = sizes.grid(batch, heads, (sizes.q_len, sizes.kv_len))
    return tile_bounds.of_blocks(program, aux, grid, sizes.q_offset)


def placed(program: Program, context: Context, rows: int, windows: bool) -> Program:
    """The function in a launch of `rows` batch rows, which are chunks. Positions count from the
    launch's first key in a ring and where chunks have `windows`; by method "heads", heads count
    from the device's first.
    """
    if context.method == "heads":
        return _program.placed(program, 1, (program.inputs - 3,), 1)
    partial = context.method == "ring" or windows
    shifted = (program.inputs - 2, program.inputs - 1) if partial else ()
    return _program.placed(program, context.chunks, shifted, rows)


def of_device(
    program: Program, aux: tuple[Array, ...], band: Band, sizes: Sizes, context: Context
) -> Array | None:
    """`tile_bounds.of_blocks` for a device's rows, [B or 1, N or 1, tiles of rows, tiles of keys],
    with the chunks of a batch row one after the other on B. A ring has an axis in front, for each
    chunk of the sequence's keys. None where all is known when a call is traced. `band`: a static
    mask that shows all that the function shows.
    """
    shards = shards_of(context)
    if context.method == "heads":
        return _of_heads(program, aux, sizes, context, shards)
    rows = chunk_rows(context, "q_len", sizes.q_len)
    keys = chunk_rows(context, "kv_len", sizes.kv_len)
    numbers = chunk_numbers(context, lax.axis_index(context.axis), shards)
    is_ring, lengths = context.method == "ring", (sizes.q_len, sizes.kv_len)
    window = None if is_ring else window_of(context, shards, band, lengths, sizes.q_offset)
    repeats = sizes.batch if program.depends_on(0) else 1
    batch = repeats * context.chunks
    local = placed(program, context, batch, window is not None)

    def of_launch(starts: Array, count: int) -> Array:
        offset = jnp.tile(sizes.q_offset + numbers * rows - starts, repeats)
        grid = dataclasses.replace(sizes.grid(batch, sizes.heads, (rows, count)), offset=None)
        arrays = (*aux, jnp.tile(starts, repeats))[: len(local.arrays)]
        blocks = tile_bounds.of_blocks(local, arrays, grid, offset.reshape(-1, 1, 1, 1))
        return jnp.broadcast_to(blocks, (batch, *blocks.shape[1:]))

    if is_ring:
        firsts = jnp.arange(shards * context.chunks, dtype=jnp.int32) * keys
        return lax.map(lambda x: of_launch(jnp.broadcast_to(x, numbers.shape), keys), firsts)
    count = sizes.kv_len * shards if window is None else window[1] - window[0]
    return of_launch(first_keys(numbers, keys, window), count)


def _of_heads(
    program: Program, aux: tuple[Array, ...], sizes: Sizes, context: Context, shards: int
) -> Array | None:
    """`of_device` by method "heads": all rows, and the heads that this device attends."""
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
    batch = sizes.batch if program.depends_on(0) else 1
    grid = sizes.grid(batch, max(heads, 1), (sizes.q_len * shards, sizes.kv_len * shards))
    return tile_bounds.of_blocks(local, (*aux, first)[: len(local.arrays)], grid, sizes.q_offset)
