"""The kv tiles that a mask of keys leaves in the Hopper forward (`key_masks`): padded batches.

Producer and consumers each read the visibility of a work tile's kv tiles while the one before is
at work. Between the first and the last visible tile those outside the first run of whole ones are
masked, in loops of their own.
"""

import jax.numpy as jnp

from pallas_attn._call.problem import AttentionProblem
from pallas_attn.kernels.attention import key_masks
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext, QueryRows, Span, WorkTile
from pallas_attn.kernels.flash_fwd import tile_scheduler
from pallas_attn.kernels.lang.types import Index


def visible_tiles(ctx: KernelContext, tile: WorkTile) -> Span:
    """The kv tiles with a visible key of a work tile's head, and a run of whole ones."""
    mask = ctx.refs.mask_array
    row = key_masks.row_of(mask, tile.batch, tile.head)
    return key_masks.span_of(mask, row, ctx.plan.tiling.block_kv)


def never_empty(problem: AttentionProblem) -> bool:
    """Whether rows without a key take the first kv tile all the same, masked whole: a branch around
    the mainloop would cost every work tile a hundred moves of registers.
    """
    return problem.mask.is_full and set(problem.arrays) <= {"mask_array", "bias", "sinks"}


class Ranges:
    """`tile_scheduler.MaskRanges` within what a mask of keys leaves."""

    never_empty = staticmethod(never_empty)

    @staticmethod
    def read_for_block(ctx: KernelContext, code: Index) -> Span:
        visible = visible_tiles(ctx, tile_scheduler.work_tile(ctx, code))
        if not never_empty(ctx.plan.problem):
            return visible
        none = visible.hi == 0
        return Span(*(jnp.where(none, int(n == 3), x) for n, x in enumerate(visible)))

    @staticmethod
    def read_for_rows(ctx: KernelContext, code: Index, wg: Index) -> Span:
        del wg
        return Ranges.read_for_block(ctx, code)

    @staticmethod
    def of_block(ctx: KernelContext, tile: WorkTile, record: Span) -> tuple[Index, Index]:
        plan = ctx.plan
        spans = [_span(ctx, tile, wg, record) for wg in range(plan.config.warpgroups)]
        return tile_scheduler.union_of(plan, spans)

    @staticmethod
    def of_rows(
        ctx: KernelContext, tile: WorkTile, wg: Index, q_slot: Index, record: Span
    ) -> tuple[tuple[Index, Index], QueryRows]:
        span = _span(ctx, tile, wg, record)
        rows = QueryRows(tile, tile.row + wg * ROWS, wg, span, q_slot)
        return Ranges.of_block(ctx, tile, record), rows


def _span(ctx: KernelContext, tile: WorkTile, wg: Index, visible: Span) -> Span:
    return tile_scheduler.span_of_rows(ctx.plan, tile, wg, visible=visible)
