"""Work tiles of `sm90_wide`, 64 query rows or keys, and the tiles that they meet."""

from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import tile_scheduler
from pallas_attn.kernels.attention.logits import LogitTile
from pallas_attn.kernels.attention.tile_scheduler import QueryPlan
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext, Span, WorkTile
from pallas_attn.kernels.flash_bwd import key_tiles, sm90_dq
from pallas_attn.kernels.flash_bwd.key_tiles import KeyTile
from pallas_attn.kernels.flash_bwd.plan import KeyPlan
from pallas_attn.kernels.lang.types import Barrier, GmemRef, Index, Predicate, RegisterTile, SmemRef


class Rows(NamedTuple):
    """64 rows of an array in global memory."""

    batch: Index
    head: Index
    row: Index  # the first
    length: Any  # past which all is NaN, perhaps, and is not to be read; None: all counts


class QueryRows(NamedTuple):
    """A work tile of dQ, and the kv tiles that it meets."""

    tile: WorkTile
    span: Span
    row_stats: tuple[RegisterTile, ...] = ()  # lse and delta

    @property
    def rows(self) -> Rows:
        return Rows(self.tile.batch, self.tile.head, self.tile.row, None)

    @property
    def length(self) -> Any:
        """Rows of the gradient from there on are zeros."""
        return self.tile.q_len

    def steps(self, plan: QueryPlan) -> Index:
        del plan
        return self.span.hi - self.span.lo

    def met(self, plan: QueryPlan, i: Index) -> Rows:
        """The rows of the i-th tile that the work tile meets."""
        tile, head = self.tile, lax.div(self.tile.head, jnp.int32(plan.problem.group))
        length = tile.kv_len if plan.has("kv_lengths") else None
        return Rows(tile.batch, head, (self.span.lo + i) * ROWS, length)

    def logits(self, plan: QueryPlan, i: Index) -> tuple[LogitTile, Predicate]:
        """The i-th tile of logits, and whether it needs a mask."""
        del plan
        tile, t = self.tile, self.span.lo + i
        where = (tile.batch, tile.head, tile.row, t * ROWS, tile.q_offset, tile.kv_len, tile.mask)
        masked = (t < self.span.full_lo) | (t >= self.span.full_hi)
        return LogitTile(*where, q_axis=0), masked


class KeyRows(NamedTuple):
    """A work tile of dV or dK, and the query tiles that it meets."""

    work: KeyTile
    has_lengths: bool
    row_stats: tuple[RegisterTile, ...] = ()
    length: Any = None  # all rows of the gradient count

    @property
    def rows(self) -> Rows:
        work = self.work
        length = work.kv_len if self.has_lengths else None
        return Rows(work.batch, work.kv_head, work.key, length)

    def steps(self, plan: KeyPlan) -> Index:
        first, end = key_tiles.steps_of(plan, self.work)
        return end - first

    def _step(self, plan: KeyPlan, i: Index) -> tuple[Index, Index]:
        return key_tiles.step_of(plan, self.work, key_tiles.steps_of(plan, self.work)[0] + i)

    def met(self, plan: KeyPlan, i: Index) -> Rows:
        g, number = self._step(plan, i)
        head = self.work.kv_head * plan.problem.group + g
        return Rows(self.work.batch, head, self.work.q_tiles.tile(number) * ROWS, self.work.q_len)

    def logits(self, plan: KeyPlan, i: Index) -> tuple[LogitTile, Predicate]:
        g, number = self._step(plan, i)
        head, t = self.work.kv_head * plan.problem.group + g, self.work.q_tiles.tile(number)
        masked = key_tiles.needs_mask(plan.tiling, self.work, t, number)
        return self.work.place(head, t, self.work.key, ROWS), masked


WideRows = QueryRows | KeyRows


def rows_of(ctx: KernelContext, code: Index) -> WideRows:
    """The work tile that a number in the schedule stands for."""
    if isinstance(ctx.plan, KeyPlan):
        return KeyRows(key_tiles.key_tile(ctx, code), ctx.plan.has("kv_lengths"))
    tile = tile_scheduler.work_tile(ctx, code)
    return QueryRows(tile, sm90_dq.span_of(ctx, tile))


def load(
    ctx: KernelContext,
    name: str,
    rows: Rows,
    column: Index,
    to: tuple[SmemRef, Barrier],
    skipped: int = 0,
) -> None:
    """Loads as many rows of an array as there is room for, after `skipped` ones, from a column on;
    rows of its edge, where a length cuts the 64.
    """
    (block, ready), (count, width) = to, to[0].shape

    def copy(ref: GmemRef, first: Index) -> None:
        some = pl.ds(first + skipped, count), rows.head, pl.ds(column, width)
        plgpu.copy_gmem_to_smem(ref.at[rows.batch, *some], block, ready)

    if rows.length is None:
        return copy(getattr(ctx.refs, name), rows.row)
    cut = rows.row + ROWS > rows.length
    pl.when(cut)(lambda: copy(getattr(ctx.refs, f"{name}_edge"), 0))
    return pl.when(jnp.logical_not(cut))(lambda: copy(getattr(ctx.refs, name), rows.row))
