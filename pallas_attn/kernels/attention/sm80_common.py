"""What the kernels for every GPU from Ampere on share: shared memory and what of it there is, the
widths of rows in it, and copies that all threads of a block ask for.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_attn import _gpus
from pallas_attn._problem import AttentionProblem
from pallas_attn.kernels.attention import plan as attention_plan
from pallas_attn.kernels.attention import tma_operands
from pallas_attn.kernels.lang import threads
from pallas_attn.kernels.mma import mma_sync


class Widths:
    """What a plan says of numbers and rows in shared memory."""

    problem: AttentionProblem
    config: Any

    @property
    def parts_of_numbers(self) -> int:
        """In how many 16-bit parts a number is multiplied."""
        if self.problem.dtype != "float32":
            return 1
        return 3 if self.problem.precision == "highest" else 2

    @property
    def unit_of_width(self) -> int:
        return self.config.columns or 16

    @property
    def k_width(self) -> int:
        return tma_operands.round_up(self.problem.head_dim, self.unit_of_width)

    @property
    def v_width(self) -> int:
        return tma_operands.round_up(self.problem.v_head_dim, self.unit_of_width)

    @property
    def k_parts(self) -> int:
        """Parts in which the columns of q and k come: see `streams`."""
        return self.k_width // (self.config.columns or self.k_width)

    @property
    def v_parts(self) -> int:
        return self.v_width // (self.config.columns or self.v_width)

    @property
    def operand_dtype(self) -> Any:
        """Of what tensor cores multiply."""
        return jnp.dtype("bfloat16" if self.parts_of_numbers > 1 else self.problem.dtype)

    def operand(self, x: Any) -> Any:
        """q, k, v or dO as the kernel reads it: float32 in terms of whole widths; where columns
        come in parts, [B, rows, heads * parts, columns of all terms].
        """
        columns = self.config.columns
        if self.parts_of_numbers == 1 and not columns:
            return x
        x = tma_operands.padded(x, {3: tma_operands.round_up(x.shape[3], columns or 16)})
        if columns:
            x = x.reshape(*x.shape[:2], -1, columns)
        return x if self.parts_of_numbers == 1 else mma_sync.split(x, self.parts_of_numbers)

    def joined(self, x: Any, dim: int) -> Any:
        """[B, rows, heads * parts, columns] -> [B, rows, heads, dim]."""
        columns = self.config.columns
        if not columns:
            return x
        width = tma_operands.round_up(dim, columns)
        return x.reshape(*x.shape[:2], -1, width)[..., :dim]


class WholePlan(Widths, attention_plan.Plan):
    """Of a block of query rows, all of which take the same key tiles."""

    @property
    def span_rows(self) -> int:
        return self.tile_rows

    @property
    def groups(self) -> int:
        """Warpgroups of a block, which take the same key tiles at the same time."""
        return self.config.row_blocks if self.config.split_rows else 1

    @property
    def own_rows(self) -> int:
        """Query rows of a warpgroup."""
        return self.tile_rows // self.groups


# ---- shared memory ------------------------------------------------------------------------------


def fits(problem: Any, need: Callable[..., int], config: Any) -> bool:
    return need(problem, config) <= _gpus.shared_memory(problem.gpu)


# ---- copies -------------------------------------------------------------------------------------


def _load(thread: threads.Thread, refs: Any, at: Any, *, when: Any, shapes: Any) -> None:
    wait, meet, groups = when
    if wait is not None:
        thread.wait_copies(wait)
    if wait is not None or meet:
        thread.meet(groups)
    for ref, where, (rows, *like) in zip(refs, at, shapes, strict=True):
        mma_sync.fetch(thread, ref, where, rows, tuple(like))
    thread.commit_copies()


def turn(*copies: Any, wait: int | None, meet: bool = False, groups: int = 1) -> None:
    """Asks for copies when all but the last `wait` turns' are there; `meet`: when all threads of
    the block's warpgroups are here. A copy is (refs, at, (rows, *like)) of `mma_sync.fetch`.
    """
    refs, at, shapes = zip(*copies, strict=True) if copies else ((), (), ())
    load = functools.partial(_load, when=(wait, meet, groups), shapes=shapes)
    threads.each_thread(load, refs, at)


def warpgroups_of(groups: int) -> dict[str, Any]:
    """What a kernel with more than one warpgroup says."""
    return {"num_threads": groups, "thread_name": "wg"} if groups > 1 else {}
