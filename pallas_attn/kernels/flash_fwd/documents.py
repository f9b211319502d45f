"""Packed documents in the Hopper forward: the kv tiles that segment ids leave of a work tile, and
the order in which blocks take work tiles.

Both follow from arrays. A record for each work tile, made before the kernel runs, has the `Span` of
each warpgroup's rows. The producer reads it a work tile ahead; to consumers TMA brings it with q.
Tiles that one segment fills need no mask.

Packed documents repeat: assigned in the order of rows, a block would take the same rows of every
document, and blocks with late rows would finish last. So the schedule lists ranks, and rank r of a
batch row stands for its work tile with the r-th most kv tiles.

A small kernel (`segments`) makes records and schedule; where it does not fit, XLA (`by_xla`).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call.problem import AttentionInputs
from pallas_attn.kernels.attention import segment_spans, tile_lists, tile_scheduler
from pallas_attn.kernels.attention.tile_scheduler import QueryPlan
from pallas_attn.kernels.attention.tiles import (
    ROWS,
    KernelContext,
    QueryRows,
    Span,
    WorkTile,
)
from pallas_attn.kernels.flash_fwd import segments
from pallas_attn.kernels.flash_fwd.segments import RECORD
from pallas_attn.kernels.lang.types import Index, Operand, SmemRef

LEAST_IDS = 32  # ids of a kv tile in shared memory: TMA writes to whole 128 bytes


# ---- operands -----------------------------------------------------------------------------------


def operands(
    plan: QueryPlan, inputs: AttentionInputs, fields: dict[str, Operand]
) -> dict[str, jax.Array]:
    """The records and the schedule of ranked work tiles, of the kernel's operands."""
    if segments.fits(plan):
        ids = inputs.q_segment_ids, inputs.kv_segment_ids
        made = segments.prepare(plan, mask_bounds(plan), *ids)
    else:
        made = by_xla(plan, inputs, fields)
    return dict(zip(("segment_spans", "schedule"), made, strict=True))


def by_xla(
    plan: QueryPlan, inputs: AttentionInputs, fields: dict[str, Operand]
) -> tuple[jax.Array, jax.Array]:
    """(`records`, `schedule_by_rank`) in jax.numpy, of the kernel's operands."""
    sizes = ROWS, plan.tiling.block_kv
    spans = segment_spans.spans_of(plan.problem, inputs, fields, sizes)
    return records(plan, spans), schedule_by_rank(plan, spans)


def records(plan: QueryPlan, spans: jax.Array) -> jax.Array:
    """int32[B, q_tiles, RECORD]: the fields of a Span for the rows of each warpgroup, then zeros.
    `spans`: `segment_spans.segment_spans` of ROWS rows.
    """
    units, tiles = plan.tiling.row_blocks, plan.tiling.q_tiles
    by_unit = spans.swapaxes(1, 2).reshape(-1, tiles, 4 * units)
    return jnp.pad(by_unit, ((0, 0), (0, 0), (0, RECORD - 4 * units)))


def schedule_by_rank(plan: QueryPlan, spans: jax.Array) -> jax.Array:
    """`tile_scheduler.schedule` with work tiles in place of ranks."""
    bits, first = plan.order.code_bits, plan.order.first_ranked_head
    table = jnp.asarray(tile_scheduler.schedule(plan))
    lo, hi = mask_bounds(plan)[:, None]
    # Units one by one, not a reduction, which would be a launch of its own.
    units = range(plan.tiling.row_blocks)
    firsts, lasts = ([spans[:, i, n :: len(units)] for n in units] for i in (0, 3))
    begin = jnp.maximum(lo, functools.reduce(jnp.minimum, firsts))
    end = jnp.minimum(hi, functools.reduce(jnp.maximum, lasts))
    order = tile_lists.longest_first(end - begin)
    return tile_lists.in_place_of_ranks(table, bits, order, plan.problem.q_heads, first)


def mask_bounds(plan: QueryPlan) -> np.ndarray:
    """int32[2, q_tiles]: the first kv tile of a work tile and the one after its last, by the mask
    alone.
    """
    tiles = range(plan.tiling.q_tiles)
    spans = [tile_scheduler.static_span(plan, plan.problem.q_offset, tile) for tile in tiles]
    return np.array([[span.lo for span in spans], [span.hi for span in spans]], np.int32)


# ---- in the kernel ------------------------------------------------------------------------------


class Smem(NamedTuple):
    """Shared memory; the consumers own `q_ids` and `spans` as they own q, the ring `kv_ids`."""

    q_ids: SmemRef  # int32[q tiles, ROWS]
    kv_ids: SmemRef  # int32[stages, ..]
    spans: SmemRef  # int32[q tiles, RECORD]

    def load_rows(self, ctx: KernelContext, tile: WorkTile, row: Index, slot: Index) -> None:
        """The ids of a consumer's rows, and the record of their work tile; they arrive with q."""
        refs, ready = ctx.refs, ctx.smem.q_ready.at[slot]
        ids = refs.q_segment_ids.at[tile.batch, pl.ds(row, ROWS)]
        plgpu.copy_gmem_to_smem(ids, self.q_ids.at[slot], ready)
        number = lax.div(tile.row, jnp.int32(ctx.plan.tiling.tile_rows))
        record = refs.segment_spans.at[tile.batch, number]
        plgpu.copy_gmem_to_smem(record, self.spans.at[slot], ready)

    def load_keys(self, ctx: KernelContext, tile: WorkTile, t: Index, slot: Index) -> None:
        """The ids of kv tile t; they arrive with its K."""
        to = self.kv_ids.at[slot]
        first = t * ctx.plan.config.block_kv
        ids = ctx.refs.kv_segment_ids.at[tile.batch, pl.ds(first, to.shape[0])]
        plgpu.copy_gmem_to_smem(ids, to, ctx.smem.ready.at[slot])


def scratch(q_tiles: int, stages: int, block_kv: int) -> Smem:
    return Smem(
        q_ids=plgpu.SMEM((q_tiles, ROWS), jnp.int32),
        kv_ids=plgpu.SMEM((stages, max(block_kv, LEAST_IDS)), jnp.int32),
        spans=plgpu.SMEM((q_tiles, RECORD), jnp.int32),
    )


class Ranges(tile_scheduler.Ranges):
    """`tile_scheduler.Ranges` within what segment ids leave."""

    never_empty = staticmethod(segment_spans.never_empty)

    @staticmethod
    def read_for_block(ctx: KernelContext, code: Index) -> dict[int, Index]:
        """The first and last kv tile of each warpgroup, by their place in the record."""
        tile = tile_scheduler.work_tile(ctx, code)
        at = lax.div(tile.row, jnp.int32(ctx.plan.tiling.tile_rows))
        fields = [4 * wg + field for wg in range(ctx.plan.config.warpgroups) for field in (0, 3)]
        return {field: ctx.refs.segment_spans[tile.batch, at, field] for field in fields}

    @staticmethod
    def read_for_rows(ctx: KernelContext, code: Index, wg: Index) -> None:
        del ctx, code, wg

    @staticmethod
    def of_block(
        ctx: KernelContext, tile: WorkTile, record: dict[int, Index]
    ) -> tuple[Index, Index]:
        return _block_range(ctx.plan, tile, lambda i: record.get(i, 0))

    @staticmethod
    def of_rows(
        ctx: KernelContext, tile: WorkTile, wg: Index, q_slot: Index, record: None
    ) -> tuple[tuple[Index, Index], QueryRows]:
        del record
        plan, smem = ctx.plan, ctx.smem.segments

        def read(i: Index) -> Index:
            return smem.spans[q_slot, i]

        whole = read(4 * wg + 1), read(4 * wg + 2)
        lo, hi = _block_range(plan, tile, read)
        span = tile_scheduler.span_of_rows(plan, tile, wg, read)
        if segment_spans.never_empty(plan.problem):
            span = _at_least_one(span, hi)
        ids = segment_spans.RowSegments(smem.q_ids.at[q_slot], smem.kv_ids, *whole)
        return (lo, hi), QueryRows(tile, tile.row + wg * ROWS, wg, span, q_slot, ids)


def _block_range(
    plan: QueryPlan, tile: WorkTile, read: Callable[[Index], Index]
) -> tuple[Index, Index]:
    """Kv tiles [lo, hi) that the block loads; `read` reads a field of the record."""
    warpgroups = range(plan.config.warpgroups)
    spans = [tile_scheduler.span_of_rows(plan, tile, wg, read) for wg in warpgroups]
    if not segment_spans.never_empty(plan.problem):
        return tile_scheduler.union_of(plan, spans)
    lo, hi = tile_scheduler.ends_of_some(spans)
    hi = jnp.maximum(hi, 1)
    return jnp.minimum(lo, hi - 1), hi


def _at_least_one(span: Span, hi: Index) -> Span:
    """A span, or where it is empty the last kv tile before `hi`, masked."""
    none = span.hi <= span.lo
    picked = (span.lo, hi - 1), (span.full_lo, hi), (span.full_hi, 0), (span.hi, hi)
    return Span(*(jnp.where(none, there, own) for own, there in picked))
