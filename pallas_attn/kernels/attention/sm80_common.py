"""What the kernels for every GPU from Ampere on share: the widths of rows in shared memory, and
copies into it, which all threads of a block issue.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_attn._call import gpu_specs
from pallas_attn._call.problem import AttentionProblem
from pallas_attn.kernels.attention import plan as attention_plan
from pallas_attn.kernels.attention import tma_operands
from pallas_attn.kernels.lang import threads
from pallas_attn.kernels.mma import mma_sync


class Widths:
    """What a plan says of numbers and rows in shared memory."""

    problem: AttentionProblem
    config: Any

    @property
    def terms(self) -> int:
        """How many 16-bit terms of a number are multiplied."""
        if self.problem.dtype != "float32":
            return 1
        return 3 if self.problem.precision == "highest" else 2

    @property
    def width_unit(self) -> int:
        return self.config.columns or 16

    @property
    def k_width(self) -> int:
        return tma_operands.round_up(self.problem.head_dim, self.width_unit)

    @property
    def v_width(self) -> int:
        return tma_operands.round_up(self.problem.v_head_dim, self.width_unit)

    @property
    def k_chunks(self) -> int:
        """Of columns of q and k: see sm80_column_stream.py."""
        return self.k_width // (self.config.columns or self.k_width)

    @property
    def v_chunks(self) -> int:
        return self.v_width // (self.config.columns or self.v_width)

    @property
    def operand_dtype(self) -> Any:
        """Of what tensor cores multiply."""
        return jnp.dtype("bfloat16" if self.terms > 1 else self.problem.dtype)

    def operand(self, x: Any) -> Any:
        """q, k, v or dO as the kernel reads it: float32 in terms of whole widths; where columns
        come in chunks, [B, rows, heads * chunks, columns of all terms].
        """
        columns = self.config.columns
        if self.terms == 1 and not columns:
            return x
        x = tma_operands.padded(x, {3: tma_operands.round_up(x.shape[3], columns or 16)})
        if columns:
            x = x.reshape(*x.shape[:2], -1, columns)
        return x if self.terms == 1 else mma_sync.split(x, self.terms)

    def whole_rows(self, x: Any, dim: int) -> Any:
        """[B, rows, heads * chunks, columns] -> [B, rows, heads, dim]."""
        columns = self.config.columns
        if not columns:
            return x
        width = tma_operands.round_up(dim, columns)
        return x.reshape(*x.shape[:2], -1, width)[..., :dim]


class WholePlan(Widths, attention_plan.Plan):
    """Of a block of query rows, all of which take the same kv tiles."""

    @property
    def span_rows(self) -> int:
        return self.tile_rows

    @property
    def groups(self) -> int:
        """Warpgroups of a block, which take the same kv tiles at the same time."""
        return self.config.row_blocks if self.config.split_rows else 1

    @property
    def own_rows(self) -> int:
        """Query rows of a warpgroup."""
        return self.tile_rows // self.groups


def fits(problem: Any, need: Callable[..., int], config: Any) -> bool:
    """Whether the GPU has the shared memory that `need(problem, config)` says."""
    return need(problem, config) <= gpu_specs.shared_memory(problem.gpu)


# ---- copies -------------------------------------------------------------------------------------


class Copy(NamedTuple):
    """A copy of rows from global to shared memory by cp.async; see `mma_sync.load_rows_async`."""

    refs: Any  # (to, from)
    at: Any  # (batch, head, first row, rows that exist, row of shared memory), traced
    shape: Any  # (rows, shape of what is copied from, columns, whether the last of `at` is fixed)


def copy_async(*copies: Copy, pending: int | None, sync: bool = False, groups: int = 1) -> None:
    """Issues copies, all of one call as one group.

    `pending`: first waits until at most so many of the groups before it are under way, and for all
    threads of the block's `groups` warpgroups; None: does not wait. `sync`: waits for all threads
    in any case.
    """
    refs, at, shapes = zip(*copies, strict=True) if copies else ((), (), ())
    issue = functools.partial(_issue, when=(pending, sync, groups), shapes=shapes)
    threads.each_thread(issue, refs, at)


def _issue(thread: threads.Thread, refs: Any, at: Any, *, when: Any, shapes: Any) -> None:
    pending, sync, groups = when
    if pending is not None:
        thread.wait_copies(pending)
    if pending is not None or sync:
        thread.sync(groups)
    for ref, where, shape in zip(refs, at, shapes, strict=True):
        mma_sync.load_rows_async(thread, ref, where, mma_sync.RowsCopy(*shape))
    thread.commit_copies()


def warpgroup_arguments(groups: int) -> dict[str, Any]:
    """The arguments of `plgpu.kernel` for a block of several warpgroups."""
    return {"num_threads": groups, "thread_name": "wg"} if groups > 1 else {}
