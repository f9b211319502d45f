"""A launch that transposes V for matmuls on float8: [B, S, K, Hv] -> [B, K, width, keys], with keys
in the order of `wgmma_float8.ORDER` and zeros past lengths and sizes.

A thread reads 4 bytes of each of 16 rows and writes 16 bytes to each of 4 rows of V^T. 8 threads of
a warp read 32 bytes side by side, and 4 write 64: whole sectors both ways. Stores of a quarter of a
sector took three times as long.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.lang import thread_program, threads
from pallas_attn.kernels.lang.mosaic import THREADS
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.types import GmemRef, Index, Operand
from pallas_attn.kernels.mma.wgmma_float8 import ORDER, UNIT

COLUMNS = 4  # columns of v of a thread: the bytes of a word
WORDS = 8  # threads of a warp side by side in a row of v
UNITS = 4  # threads of a warp side by side in a row of V^T, a unit of keys each
KEYS = UNITS * UNIT  # keys of a warp


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of v and of V^T."""

    batch: int
    rows: int
    heads: int
    dim: int
    width: int
    keys: int

    @property
    def across(self) -> int:
        """Warps that share the same keys."""
        return pl.cdiv(self.width, WORDS * COLUMNS)

    @property
    def share(self) -> int:
        """Blocks of a head."""
        return pl.cdiv(self.keys // KEYS * self.across * WORDS * UNITS, THREADS)


class Refs(NamedTuple):
    """Global memory."""

    v: GmemRef
    lengths: Any  # int32[B], or None
    out: Any = None  # written


class _Place(NamedTuple):
    """The batch row, head and first thread of a block, as scalars."""

    batch: Index
    head: Index
    first: Index  # index of its first thread among those of the head
    live: Index  # rows of v before the length


def _transpose(ctx: ThreadContext) -> None:
    thread, refs, at, sizes = ctx
    item = thread.index + at.first
    warp, lane = item // (WORDS * UNITS), item % (WORDS * UNITS)
    group, across = warp // sizes.across, warp % sizes.across
    unit = group * UNITS + lane // WORDS
    column = across * WORDS + lane % WORDS
    inside = column < sizes.dim // COLUMNS
    row_words = sizes.heads * (sizes.dim // COLUMNS)
    begin = thread.to_int64(at.batch) * (sizes.rows * row_words)
    read = at.head * (sizes.dim // COLUMNS) + thread.select(inside, column, 0)
    begin = begin + thread.to_int64(read)
    words = []
    for n in range(UNIT):
        key = unit * UNIT + n
        row = thread.minimum(key, sizes.rows - 1)
        word = thread.load(refs.v, begin + thread.to_int64(row) * row_words, COLUMNS)
        words.append(thread.select(inside & (key < at.live), word, 0))
    head = thread.to_int64(at.batch * sizes.heads + at.head) * (sizes.width * sizes.keys // UNIT)
    exists = (unit < sizes.keys // UNIT) & (column < sizes.width // COLUMNS)
    taken = [words[key] for key in ORDER.tolist()]
    for n in range(COLUMNS):
        line = head + thread.to_int64(column * COLUMNS + n) * (sizes.keys // UNIT)
        together = thread.packed([word >> (8 * n) for word in taken])
        thread.store(refs.out, line + thread.to_int64(unit), together, UNIT, exists)


def _kernel(refs: Refs, out: GmemRef, *, sizes: Sizes) -> None:
    block = lax.axis_index("block")
    head = lax.div(block, jnp.int32(sizes.share))
    batch, head_of_row = (f(head, jnp.int32(sizes.heads)) for f in (lax.div, lax.rem))
    live = jnp.int32(sizes.rows) if refs.lengths is None else refs.lengths[batch]
    first = lax.rem(block, jnp.int32(sizes.share)) * THREADS
    place = _Place(batch, head_of_row, first, live)
    program = thread_program.in_context(_transpose, sizes)
    threads.each_thread(program, refs._replace(out=out), place)


def transposed(v: Operand, lengths: Operand | None, width: int, keys: int) -> jax.Array:
    """V^T of v. `lengths` int32[B]: rows from there on count as zeros, whatever they hold."""
    batch, rows, heads, dim = v.shape
    sizes = Sizes(batch, rows, heads, dim, width, keys)
    kernel = thread_program.lane_kernel(
        functools.partial(_kernel, sizes=sizes),
        grid=batch * heads * sizes.share,
        name="flash_fwd_float8_values",
        out_type=[jax.ShapeDtypeStruct((batch, heads, width, keys), v.dtype)],
    )
    return kernel(Refs(v, lengths))[0]
