"""Mainloop of the portable forward where shared memory does not hold 64 rows of q and a tile of K
and V: float32 at wide head dims, on GPUs with 99 KiB a block above all. All three come by some
columns at a time (attention/sm80_column_stream.py).
"""

import functools

import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import sm80_column_stream, softmax, tile_logits
from pallas_attn.kernels.attention.sm80_column_stream import HeadRows, Product, Stream
from pallas_attn.kernels.attention.sm80_common import over_kv_tiles
from pallas_attn.kernels.attention.softmax import OutputSums
from pallas_attn.kernels.attention.tile_scheduler import QueryPlan
from pallas_attn.kernels.attention.tiles import KernelContext, QueryRows
from pallas_attn.kernels.lang.types import Index
from pallas_attn.kernels.mma import mma_sync


def mainloop(ctx: KernelContext, rows: QueryRows) -> OutputSums:
    """All kv tiles of the block's rows, from the last to the first; `acc` is chunks of columns."""
    plan, stream = ctx.plan, _stream(ctx, rows)
    stream.begin(rows.span.hi - 1)
    step = functools.partial(_step, ctx, rows, stream)
    return over_kv_tiles(plan, rows.span, step, no_keys(plan))


def no_keys(plan: QueryPlan) -> OutputSums:
    """The sums before the first kv tile."""
    return OutputSums.nothing(sm80_column_stream.zeros(plan.format, "v"), plan.tiling.tile_rows)


def _stream(ctx: KernelContext, rows: QueryRows) -> Stream:
    """The operands of all kv tiles; a step is named by its kv tile."""
    plan, tile, block = ctx.plan, rows.tile, ctx.plan.config.block_kv
    kv_head = lax.div(tile.head, jnp.int32(plan.problem.group))

    def rows_of(name: str, t: Index) -> HeadRows:
        if name == "q":
            return HeadRows(tile.batch, tile.head, rows.row, plan.problem.q_len - rows.row)
        first = rows.kv_tile(t) * block
        live = jnp.where(t >= rows.span.lo, tile.kv_len - first, 0)
        return HeadRows(tile.batch, kv_head, first, live)

    return Stream(ctx, (Product("q", "k"), Product(None, "v")), rows_of)


def _step(
    ctx: KernelContext, rows: QueryRows, stream: Stream, masked: bool, t: Index, sums: OutputSums
) -> OutputSums:
    """Kv tile t."""
    plan = ctx.plan
    chunks = stream.step(rows.span.hi - 1 - t, t, t - 1)
    logits = tile_logits.logits(ctx, rows, t, chunks.scores(), masked)
    empty_ok = masked or plan.logit_rules.adds
    new = softmax.step(logits, plan.logit_rules.unit, sums.row_max, empty_ok=empty_ok)
    acc, row_sum = softmax.rescaled(new, (sums.acc, sums.row_sum))
    p = mma_sync.terms_of(new.p, plan.format.terms, plan.format.dtype)
    return OutputSums(chunks.weigh(acc, p), row_sum + new.row_sum, new.row_max)
