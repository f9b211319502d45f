"""The portable backward where rows of q, k, v and dO do not fit in shared memory: float32 at wide
head dims. All of them come by some columns at a time (attention/sm80_column_stream.py).

For dK and dV a block of 4 warps owns 64 keys, which are the left operand of both products of a
step, and reads their terms again with every query tile. P^T and dS^T stay in registers. What a tile
adds to a gradient is added up by itself: tensor cores round towards 0.
"""

import functools
from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import sm80_column_stream, tile_logits
from pallas_attn.kernels.attention.sm80_column_stream import HeadRows, Product, Stream
from pallas_attn.kernels.attention.tiles import KernelContext, Span
from pallas_attn.kernels.flash_bwd import key_tiles
from pallas_attn.kernels.flash_bwd.key_tiles import KeyTile, QueryStep
from pallas_attn.kernels.flash_bwd.operands import BackwardRefs, RowStatistics
from pallas_attn.kernels.flash_bwd.plan import KeyPlan
from pallas_attn.kernels.flash_bwd.sm80_scores import ScoreRows, ds_of, logit_tile
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import Index, RegisterTile
from pallas_attn.kernels.mma import mma_sync

Chunks = tuple[RegisterTile, ...]  # columns of a gradient


# ---- dk and dv ----------------------------------------------------------------------------------


def dk_dv_kernel(refs: BackwardRefs, *rest: Any, plan: KeyPlan, which: str) -> None:
    """The gradients of 64 keys over all query tiles: "k", "v" or "kv"."""
    *outs, smem = rest
    ctx = KernelContext(plan, refs, smem)
    work = key_tiles.key_tile(ctx, refs.schedule[lax.axis_index("block"), 1])
    stream = _key_stream(ctx, work, which)
    stream.begin(key_tiles.query_step(plan, work, jnp.int32(0)))
    nothing = tuple(sm80_column_stream.zeros(plan.format, name) for name in which)
    step = functools.partial(_step, ctx, work, which, stream)
    grads = lax.fori_loop(0, plan.problem.group * work.steps, step, nothing)
    at = (work.batch, work.kv_head, work.key, plan.problem.kv_len - work.key)
    for name, grad, out in zip(which, grads, outs, strict=True):
        scale = plan.problem.scale if name == "k" else 1.0
        sm80_column_stream.write([x * scale for x in grad], out, at)


def _key_stream(ctx: KernelContext, work: KeyTile, which: str) -> Stream:
    """The operands of all query tiles, in the order of `_step`."""
    plan, block = ctx.plan, ctx.plan.config.block_q
    length: Index = plan.problem.q_len if work.q_len is None else work.q_len

    def rows_of(name: str, step: QueryStep) -> HeadRows:
        if name in ("k", "v"):
            live = jnp.where(step.exists, work.kv_len - work.key, 0)
            return HeadRows(work.batch, work.kv_head, work.key, live)
        live = jnp.where(step.exists, length - step.t * block, 0)
        return HeadRows(work.batch, step.head, step.t * block, live)

    products = [Product("k", "q")]
    if "v" in which:
        products.append(Product(None, "do"))
    if "k" in which:
        products += [Product("v", "do"), Product(None, "q")]
    return Stream(ctx, products, rows_of)


def _step(
    ctx: KernelContext,
    work: KeyTile,
    which: str,
    stream: Stream,
    i: Index,
    carry: tuple[Chunks, ...],
) -> tuple[Chunks, ...]:
    """One query tile."""
    plan, refs, form = ctx.plan, ctx.refs, ctx.plan.format
    grads, step = dict(zip(which, carry, strict=True)), key_tiles.query_step(plan, work, i)
    block = plan.config.block_q
    chunks = stream.step(i, step, key_tiles.query_step(plan, work, i + 1))
    rows = pl.ds(step.t * block, block)
    lse, delta = (
        mosaic.load(ref.at[work.batch, step.head, rows], mosaic.COLUMN)
        for ref in (refs.lse, refs.delta)
    )
    place = work.place(step.head, step.t, work.key, block)
    masked = key_tiles.needs_mask(plan.tiling, work, step.t, step.number)
    p, slope = tile_logits.probabilities(ctx, place, chunks.scores(), lse, masked)
    if "v" in which:
        grads["v"] = chunks.weigh(grads["v"], mma_sync.terms_of(p, form.terms, form.dtype))
    if "k" in which:
        ds = tile_logits.d_scores(p, chunks.scores(), key_tiles.per_column(delta, p.shape), slope)
        grads["k"] = chunks.weigh(grads["k"], mma_sync.terms_of(ds, form.terms, form.dtype))
    return tuple(grads[name] for name in which)


# ---- dq, and dbias ------------------------------------------------------------------------------


def stream_of(ctx: KernelContext, rows: ScoreRows, with_dq: bool) -> Stream:
    """Operands by some columns at a time; a step is named by its first key."""
    kv_head = lax.div(rows.head, jnp.int32(ctx.plan.problem.group))

    def rows_of(name: str, key: Index) -> HeadRows:
        if name in ("q", "do"):
            return HeadRows(rows.batch, rows.head, rows.row, rows.q_len - rows.row)
        return HeadRows(rows.batch, kv_head, key, rows.kv_len - key)

    products = [Product("q", "k"), Product("do", "v")]
    return Stream(ctx, products + [Product(None, "k")] * with_dq, rows_of)


def dq_mainloop(ctx: KernelContext, rows: ScoreRows, span: Span, stats: RowStatistics) -> Chunks:
    """dQ of a block's rows, in chunks of columns."""
    block, form = ctx.plan.config.block_kv, ctx.plan.format
    stream = stream_of(ctx, rows, True)
    stream.begin(rows.key(span.lo, block))

    def step(t: Index, dq: Chunks) -> Chunks:
        following = jnp.where(t + 1 < span.hi, rows.key(t + 1, block), rows.kv_len)
        chunks = stream.step(t - span.lo, rows.key(t, block), following)
        masked = (t < span.full_lo) | (t >= span.full_hi)
        key = rows.key(t, block)
        place = logit_tile(rows, key)
        p, slope = tile_logits.probabilities(ctx, place, chunks.scores(), stats.lse, masked)
        ds = ds_of(p, chunks.scores(), stats.delta, slope)
        return chunks.weigh(dq, mma_sync.terms_of(ds, form.terms, form.dtype))

    return lax.fori_loop(span.lo, span.hi, step, sm80_column_stream.zeros(form, "k"))
