"""The kv tiles that a mask of keys (`key_masks`) leaves in the Hopper forward.

Producer and consumers each read the visible kv tiles of a work tile while the one before is at
work. Between the first and the last visible tile those outside the first run of whole ones are
masked, in loops of their own.
"""

import functools
from collections.abc import Sequence

import jax.numpy as jnp

from pallas_attn._call.problem import AttentionProblem
from pallas_attn.kernels.attention import key_masks, tile_scheduler
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext, QueryRows, Span, WorkTile
from pallas_attn.kernels.lang.types import Index


def never_empty(problem: AttentionProblem) -> bool:
    """Whether rows without a key take the first kv tile all the same, masked whole: a branch around
    the mainloop would cost every work tile a hundred moves of registers.
    """
    return problem.mask.is_full and set(problem.arrays) <= {"mask_array", "bias", "sinks"}


class Ranges(tile_scheduler.Ranges):
    """`tile_scheduler.Ranges` within what a mask of keys leaves."""

    never_empty = staticmethod(never_empty)

    @staticmethod
    def read_for_block(ctx: KernelContext, code: Index) -> tuple[Index, ...]:
        """Words of the visible kv tiles, and a run of whole ones."""
        return key_masks.words_of(ctx, tile_scheduler.work_tile(ctx, code))

    @staticmethod
    def read_for_rows(ctx: KernelContext, code: Index, wg: Index) -> tuple[Index, ...]:
        del wg
        return Ranges.read_for_block(ctx, code)

    @staticmethod
    def of_block(
        ctx: KernelContext, tile: WorkTile, record: Sequence[Index]
    ) -> tuple[Index, Index]:
        plan, visible = ctx.plan, _visible(ctx, record)
        if never_empty(plan.problem):  # consumers without rows need a part of these
            return visible.lo, visible.hi
        of_rows = functools.partial(tile_scheduler.span_of_rows, plan, tile, visible=visible)
        return tile_scheduler.union_of(plan, [of_rows(wg) for wg in range(plan.config.warpgroups)])

    @staticmethod
    def of_rows(
        ctx: KernelContext, tile: WorkTile, wg: Index, q_slot: Index, record: Sequence[Index]
    ) -> tuple[tuple[Index, Index], QueryRows]:
        plan, visible = ctx.plan, _visible(ctx, record)
        span = tile_scheduler.span_of_rows(plan, tile, wg, visible=visible)
        if never_empty(plan.problem):
            span = span._replace(hi=visible.hi)  # the compiler sees that all end alike
        rows = QueryRows(tile, tile.row + wg * ROWS, wg, span, q_slot)
        return Ranges.of_block(ctx, tile, record), rows


def _visible(ctx: KernelContext, record: Sequence[Index]) -> Span:
    """The visible tiles, of which there is one at least where rows are never empty."""
    visible = key_masks.span_in(record)
    if not never_empty(ctx.plan.problem):
        return visible
    none = visible.hi == 0
    return Span(*(jnp.where(none, int(n == 3), x) for n, x in enumerate(visible)))
