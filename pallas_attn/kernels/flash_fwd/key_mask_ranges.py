"""The kv tiles that a mask of keys (`key_masks`) leaves in the Hopper forward.

Producer and consumers each read the visible kv tiles of a work tile while the one before is at
work. Between the first and the last visible tile those outside the first run of whole ones are
masked, in loops of their own.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionProblem
from pallas_attn.kernels.attention import key_masks
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext, QueryRows, Span, WorkTile
from pallas_attn.kernels.flash_fwd import tile_scheduler
from pallas_attn.kernels.flash_fwd.tile_scheduler import QueryPlan
from pallas_attn.kernels.lang.types import Carry, Index


def with_spans(ctx: KernelContext) -> Any:
    """The operands, and the kv tiles that a mask of keys leaves, if there is one."""
    plan, refs, _ = ctx
    if not plan.skips_keys:
        return refs
    return refs._replace(key_spans=key_masks.spans(refs.mask_array, plan.tiling.block_kv))


def visible_tiles(ctx: KernelContext, tile: WorkTile) -> Span:
    """The kv tiles with a visible key of a work tile's head, and a run of whole ones."""
    spans = ctx.refs.key_spans
    batches, heads, _ = spans.shape
    batch, head = tile.batch if batches > 1 else 0, tile.head if heads > 1 else 0
    return Span(*(spans[batch, head, n] for n in range(4)))


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
        """The visible kv tiles, and a run of whole ones."""
        return visible_tiles(ctx, tile_scheduler.work_tile(ctx, code))

    @staticmethod
    def read_for_rows(ctx: KernelContext, code: Index, wg: Index) -> Span:
        del wg
        return Ranges.read_for_block(ctx, code)

    @staticmethod
    def of_block(ctx: KernelContext, tile: WorkTile, record: Span) -> tuple[Index, Index]:
        return _of_block(ctx, tile, _visible(ctx, record))

    @staticmethod
    def of_rows(
        ctx: KernelContext, tile: WorkTile, wg: Index, q_slot: Index, record: Span
    ) -> tuple[tuple[Index, Index], QueryRows]:
        visible = _visible(ctx, record)
        span = tile_scheduler.span_of_rows(ctx.plan, tile, wg, visible=visible)
        rows = QueryRows(tile, tile.row + wg * ROWS, wg, span, q_slot)
        plan = ctx.plan
        if plan.logit_rules.ragged_keys and plan.problem.mask.is_full:
            # The last tile is masked even where all its keys are visible.
            rows = rows._replace(shown=(visible.full_lo, visible.full_hi))
        return _of_block(ctx, tile, visible), rows


def _visible(ctx: KernelContext, visible: Span) -> Span:
    """The visible tiles, of which there is one at least where rows are never empty."""
    if not never_empty(ctx.plan.problem):
        return visible
    none = visible.hi == 0
    return Span(*(jnp.where(none, int(n == 3), x) for n, x in enumerate(visible)))


def _of_block(ctx: KernelContext, tile: WorkTile, visible: Span) -> tuple[Index, Index]:
    plan = ctx.plan
    of_rows = functools.partial(tile_scheduler.span_of_rows, plan, tile, visible=visible)
    if never_empty(plan.problem):
        span = of_rows(0)  # equal for all consumers with rows, which release nothing for each other
        return span.lo, span.hi
    spans = [of_rows(wg) for wg in range(plan.config.warpgroups)]
    return tile_scheduler.union_of(plan, spans)


def last_or_whole(plan: QueryPlan, end: Index, state_of: Callable[[int], Carry]) -> Carry:
    """`state_of(keys)` of the last kv tile before `end`: of all its keys, unless the end of S cuts
    it.
    """
    block = plan.tiling.block_kv
    is_last = end * block == plan.tiling.padded_keys
    return lax.cond(is_last, lambda: state_of(plan.last_keys), lambda: state_of(block))
