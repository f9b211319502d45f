"""Parts of the kernels for every GPU from Ampere on: how rows lie in shared memory, the copies into
it, which all threads of a block issue, and the loop over kv tiles.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionProblem
from pallas_attn.kernels.attention import tma_operands
from pallas_attn.kernels.attention.tiles import Span
from pallas_attn.kernels.lang import threads
from pallas_attn.kernels.lang.types import (
    Carry,
    GmemRef,
    Index,
    Operand,
    SmemRef,
)
from pallas_attn.kernels.mma import mma_sync


@dataclasses.dataclass(frozen=True)
class MmaFormat:
    """The numbers and widths of rows of q, k, v and dO that mma.sync multiplies."""

    problem: AttentionProblem
    columns: int = 0  # columns of a chunk (sm80_column_stream.py); 0: rows are whole
    unit: int = 16  # columns that the width of a whole row is a multiple of
    # (first, number) of a gradient's chunks that this launch makes (`wide_heads`); None: all
    made: tuple[int, int] | None = None

    @property
    def terms(self) -> int:
        """16-bit terms of a number that are multiplied."""
        if self.problem.dtype != "float32":
            return 1
        return 3 if self.problem.precision == "highest" else 2

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype("bfloat16" if self.terms > 1 else self.problem.dtype)

    @property
    def k_width(self) -> int:
        return tma_operands.round_up(self.problem.head_dim, self.columns or self.unit)

    @property
    def v_width(self) -> int:
        return tma_operands.round_up(self.problem.v_head_dim, self.columns or self.unit)

    def width(self, name: str) -> int:
        """Columns of a term of "q", "k", "v" or "do"."""
        return self.k_width if name in ("q", "k") else self.v_width

    def chunks(self, name: str) -> int:
        """Chunks of columns that a row of "q", "k", "v" or "do" comes in."""
        return self.width(name) // (self.columns or self.width(name))

    def made_chunks(self, name: str) -> range:
        """The chunks of columns of a gradient, and of its right operand, that this launch makes."""
        first, count = self.made or (0, self.chunks(name))
        return range(first, first + count)

    def of_chunks(self, first: int, count: int) -> "MmaFormat":
        """The format of a launch that makes `count` chunks of a gradient, from `first` on."""
        return dataclasses.replace(self, made=(first, count))

    def made_columns(self, dim: int) -> int:
        """The number of columns that this launch makes of a result with `dim` columns."""
        if self.made is None:
            return dim
        first, count = (n * self.columns for n in self.made)
        return min(dim - first, count)

    def buffer(self, rows: int, width: int) -> SmemRef:
        """Shared memory for so many rows of `width` columns."""
        return plgpu.SMEM((rows, mma_sync.pitch(self.terms * width)), self.dtype)

    def operand(self, x: jax.Array) -> Operand:
        """q, k, v or dO as the kernel reads it: float32 in terms of whole widths; where columns
        come in chunks, [B, rows, heads * chunks, columns of all terms].
        """
        columns = self.columns
        if self.terms == 1 and not columns:
            return x
        x = tma_operands.padded(x, {3: tma_operands.round_up(x.shape[3], columns or 16)})
        if columns:
            x = x.reshape(*x.shape[:2], -1, columns)
        return x if self.terms == 1 else mma_sync.split(x, self.terms)

    def result(self, rows: int, heads: int, dim: int) -> jax.ShapeDtypeStruct:
        """A result as the kernel writes it: [B, rows, heads, dim]; where columns come in chunks,
        [B, rows, heads * chunks, columns].
        """
        sizes, dim = (heads, dim), self.made_columns(dim)
        if self.columns:
            sizes = (heads * pl.cdiv(dim, self.columns), self.columns)
        return jax.ShapeDtypeStruct((self.problem.batch, rows, *sizes), self.problem.dtype)

    def whole_rows(self, x: jax.Array, dim: int) -> jax.Array:
        """`result` of a kernel -> [B, rows, heads, dim]."""
        if not self.columns:
            return x
        dim = self.made_columns(dim)
        width = tma_operands.round_up(dim, self.columns)
        return x.reshape(*x.shape[:2], -1, width)[..., :dim]


# ---- copies -------------------------------------------------------------------------------------


class Copy(NamedTuple):
    """A copy of rows from global to shared memory by cp.async; see `mma_sync.load_rows_async`."""

    refs: tuple[SmemRef, GmemRef]  # (to, from)
    at: tuple[Index, ...]  # (batch, head, first row, rows that exist, row of shared memory), traced
    shape: tuple[Any, ...]  # the fields of `mma_sync.RowsCopy`


def copy_async(*copies: Copy, pending: int | None, sync: bool = False, groups: int = 1) -> None:
    """Issues copies, all of one call as one group.

    `pending`: first waits until at most so many of the groups before it are under way, and for all
    threads of the block's `groups` warpgroups; None: does not wait. `sync`: waits for all threads
    in any case.
    """
    refs, at, shapes = zip(*copies, strict=True) if copies else ((), (), ())
    issue = functools.partial(_issue, when=(pending, sync, groups), shapes=shapes)
    threads.each_thread(issue, refs, at)


def _issue(
    thread: threads.Thread,
    refs: tuple[Any, ...],
    at: tuple[Any, ...],
    *,
    when: tuple[int | None, bool, int],
    shapes: tuple[Any, ...],
) -> None:
    pending, sync, groups = when
    if pending is not None:
        thread.wait_copies(pending)
    if pending is not None or sync:
        thread.sync(groups)
    for ref, where, shape in zip(refs, at, shapes, strict=True):
        mma_sync.load_rows_async(thread, ref, where, mma_sync.RowsCopy(*shape))
    thread.commit_copies()


# ---- the loop over kv tiles ---------------------------------------------------------------------


def over_kv_tiles(plan: Any, span: Span, step: Callable[..., Any], carry: Carry) -> Any:
    """`step(masked, t, carry)` of each kv tile of a span, from the last to the first: a loop for
    each of the sections that occur.
    """

    def counted(masked: bool, i: Index, carry: Carry) -> Any:
        return step(masked, -1 - i, carry)  # loops count up

    high = jnp.minimum(jnp.maximum(span.full_hi, span.lo), span.hi)  # full tiles end here
    low = jnp.minimum(jnp.maximum(span.full_lo, span.lo), high)  # and begin here
    if {"first_masked", "high"} & plan.sections:
        carry = lax.fori_loop(-span.hi, -high, functools.partial(counted, True), carry)
    carry = lax.fori_loop(-high, -low, functools.partial(counted, False), carry)
    if "low" in plan.sections:
        carry = lax.fori_loop(-low, -span.lo, functools.partial(counted, True), carry)
    return carry


def warpgroup_arguments(groups: int) -> dict[str, Any]:
    """The arguments of `plgpu.kernel` for a block of several warpgroups."""
    return {"num_threads": groups, "thread_name": "wg"} if groups > 1 else {}
