"""The scores of query rows in the portable kernels for dQ and for the gradient of a bias."""

from typing import Any, NamedTuple

import jax.experimental.pallas as pl

from pallas_attn.kernels.attention import tile_logits
from pallas_attn.kernels.attention.logits import LogitTile
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.flash_bwd.operands import RowStatistics
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import Index, RegisterTile
from pallas_attn.masks import Mask


class ScoreRows(NamedTuple):
    """The query rows of a tile of scores."""

    batch: Index
    head: Index
    row: Index
    q_offset: Index
    q_len: Index  # rows from here on are not there
    kv_len: Index
    mask: Mask
    listed: Any = None  # functions.Listed, where kv tiles are numbers in a list

    def key(self, t: Index, block: int) -> Index:
        """The first key of kv tile number t of a span; for the t after the last, any key."""
        return (t if self.listed is None else self.listed.tile_ahead(t)) * block


def load_statistics(ctx: KernelContext, rows: ScoreRows) -> RowStatistics:
    where = pl.ds(rows.row, ctx.plan.tiling.tile_rows)
    lse, delta = (
        mosaic.load(ref.at[rows.batch, rows.head, where], mosaic.ROW)
        for ref in (ctx.refs.lse, ctx.refs.delta)
    )
    return RowStatistics(lse, delta)


def logit_tile(rows: ScoreRows, key: Index) -> LogitTile:
    """The tile of logits whose first key is `key`."""
    where = (rows.batch, rows.head, rows.row, key, rows.q_offset, rows.kv_len, rows.mask)
    return LogitTile(*where, q_axis=0)


def ds_of(
    p: RegisterTile, dp: RegisterTile, delta: RegisterTile, slope: RegisterTile | None = None
) -> RegisterTile:
    """`d_scores` of query rows that are the rows of a tile."""
    return tile_logits.d_scores(p, dp, mosaic.broadcast_rows(delta, p.shape), slope)
