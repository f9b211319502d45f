"""Work tiles of keys, and the query tiles that meet each of them.

Tiles of scores have keys as rows and queries as columns, S^T = K Q^T: so one matmul leaves P^T in
the registers from which the matmul for dV takes its left operand, and dS^T is in those for dK.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn.kernels.attention import tile_lists
from pallas_attn.kernels.attention.logits import LogitTile
from pallas_attn.kernels.attention.tiles import KernelContext, Span, mask_of
from pallas_attn.kernels.flash_bwd import work_order
from pallas_attn.kernels.flash_bwd.plan import KeyPlan
from pallas_attn.kernels.flash_bwd.work_order import KeyTiling, WorkOrder
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import Index, Layout, Operand, Predicate, RegisterTile
from pallas_attn.masks import Mask


class QTilesFrom(NamedTuple):
    """The query tiles of a span, in order from number `rotation` on, and then those before it."""

    span: Span
    rotation: Index

    def tile(self, i: Index) -> Index:
        t = self.span.lo + i + self.rotation
        if isinstance(self.rotation, int):
            return t
        return jnp.where(t < self.span.hi, t, t - (self.span.hi - self.span.lo))


class DownOrUp(NamedTuple):
    """The query tiles of a span, from the last to the first or from the first to the last."""

    span: Span
    down: Predicate

    @classmethod
    def of(cls, order: WorkOrder, span: Span, tile: Index) -> "DownOrUp":
        """The query tiles of kv tile `tile` in lockstep: blocks go down in every other wave."""
        wave = lax.div(tile * order.l2_heads, jnp.int32(order.grid))
        return cls(span, lax.rem(wave, jnp.int32(2)) == 0)

    def tile(self, i: Index) -> Index:
        return jnp.where(self.down, self.span.hi - 1 - i, self.span.lo + i)


class KeyTile(NamedTuple):
    """A work tile: the keys of a kv tile, of one kv head, and the query tiles of each of its query
    heads.
    """

    batch: Index
    kv_head: Index
    key: Index  # the first of its keys
    q_offset: Index
    q_len: Any  # None: all rows count
    kv_len: Index
    mask: Mask
    span: Span  # query tiles, or places in the list of them
    # QTilesFrom, DownOrUp, tile_lists.Listed or Run: `tile(i)` is that of step i.
    q_tiles: Any
    part: Index = 0  # which part of its steps: see `steps_of`

    @property
    def steps(self) -> Index:
        """Query tiles of one head."""
        return self.span.hi - self.span.lo

    def place(
        self, head: Index, t: Index, key: Index, block_q: int, layout: Layout = mosaic.TILE
    ) -> LogitTile:
        """The tile of logits of keys from `key` on and query tile t."""
        where = (self.batch, head, t * block_q, key, self.q_offset, self.kv_len, self.mask)
        return LogitTile(*where, q_axis=1, layout=layout)


def key_tile(ctx: KernelContext, code: Index) -> KeyTile:
    """The work tile, or the part of one, that a number in `schedule` stands for."""
    parts, bits = ctx.plan.order.parts, ctx.plan.tiling.code_bits
    if parts == 1:
        return _key_tile(ctx, code)
    line, low = lax.shift_right_logical(code, jnp.int32(bits)), code & ((1 << bits) - 1)
    head = lax.div(line, jnp.int32(parts))
    return _key_tile(ctx, (head << bits) | low)._replace(part=line - head * parts)


def _key_tile(ctx: KernelContext, code: Index) -> KeyTile:
    plan, refs, _ = ctx
    problem, tiling = plan.problem, plan.tiling
    head = lax.shift_right_logical(code, jnp.int32(tiling.code_bits))
    batch = lax.div(head, jnp.int32(problem.kv_heads))
    tile = code & ((1 << tiling.code_bits) - 1)
    key = tile * tiling.block_kv
    kv_len: Index = problem.kv_len
    if plan.has("kv_lengths"):
        kv_len = refs.kv_lengths[batch]
    q_offset: Index = refs.q_offset[batch] if plan.has("q_offset") else problem.q_offset
    q_len, rows = None, tiling.padded_rows
    if plan.has("q_lengths"):
        block = tiling.block_q
        q_len = refs.q_lengths[batch]
        rows = lax.div(q_len + (block - 1), jnp.int32(block)) * block
    mask = mask_of(problem, refs, batch)
    span = tiling.q_span(mask, key, q_offset, rows, kv_len)
    if plan.has("q_segment_ids"):
        span = span.within(Span(*(refs.segment_spans[batch, i, tile] for i in range(4))))
        span = span._replace(hi=jnp.maximum(span.lo, span.hi))
    if tiling.reads_key_mask:
        span = _of_visible_keys(ctx, span, batch, tile)
    elif plan.has("mask_array"):
        span = span._replace(full_lo=span.hi, full_hi=span.hi)
    kv_head = lax.rem(head, jnp.int32(problem.kv_heads))
    where = (batch, kv_head, key, q_offset, q_len, kv_len, mask)
    if tiling.is_listed:
        listed = tile_lists.Listed.of(refs.tiles, batch, kv_head, tile)
        known = tile_lists.are_known_runs(problem, tiling.list_sizes)
        return KeyTile(*where, listed.span, tile_lists.Run(listed.tile(0)) if known else listed)
    if plan.order.lockstep:
        return KeyTile(*where, span, DownOrUp.of(plan.order, span, tile))
    rotation: Index = 0
    if tiling.rotates and not plan.order.turns:
        rotation = lax.div(tile * tiling.q_tiles, jnp.int32(tiling.kv_tiles))
    return KeyTile(*where, span, QTilesFrom(span, rotation))


def _of_visible_keys(ctx: KernelContext, span: Span, batch: Index, tile: Index) -> Span:
    """The query tiles of keys: none where a mask hides all, and all masked where it hides some."""
    codes = ctx.refs.key_tiles
    code = codes[batch if codes.shape[0] > 1 else 0, 0, tile]
    hi, whole = jnp.where(code > 0, span.hi, span.lo), code == 2
    full_lo, full_hi = (jnp.where(whole, x, hi) for x in (span.full_lo, span.full_hi))
    return Span(span.lo, full_lo, full_hi, hi)


def steps_of(plan: KeyPlan, work: KeyTile) -> tuple[Index, Index]:
    """The steps that a block takes, from and to: all of the group's, or those of a part, of which
    each has as many, up to one.
    """
    steps, parts = plan.problem.group * work.steps, plan.order.parts
    if parts == 1:
        return 0, steps
    first, end = (lax.div(n * steps, jnp.int32(parts)) for n in (work.part, work.part + 1))
    return first, end


def step_of(plan: KeyPlan, work: KeyTile, i: Index) -> tuple[Index, Index]:
    """Step i of a work tile: which head of the group, and which of that head's steps. One head
    comes after the other; in lockstep all heads come at each query tile.
    """
    if plan.order.lockstep:
        group = jnp.int32(plan.problem.group)
        return lax.rem(i, group), lax.div(i, group)
    g = lax.div(i, work.steps if plan.order.parts == 1 else jnp.maximum(work.steps, 1))
    return g, i - g * work.steps


def step_after(plan: KeyPlan, work: KeyTile, g: Index, i: Index) -> tuple[Index, Index]:
    """The step that follows step i of head g, in the order of `step_of`."""
    group = plan.problem.group
    if group == 1:
        return g, i + 1
    if plan.order.lockstep:
        over = g + 1 == group
        return jnp.where(over, 0, g + 1), i + over.astype(jnp.int32)
    over = i + 1 == work.steps
    return g + over.astype(jnp.int32), jnp.where(over, 0, i + 1)


class QueryStep(NamedTuple):
    """A step of a portable kernel: one query tile of one head."""

    head: Index
    t: Index
    exists: Predicate
    number: Index  # among the head's


def query_step(plan: KeyPlan, work: KeyTile, i: Index) -> QueryStep:
    """Step i of a work tile, one head of the group after the other; there may be none, or it may be
    another part's.
    """
    end = steps_of(plan, work)[1]
    if plan.problem.group == 1:
        listed = isinstance(work.q_tiles, tile_lists.Listed)
        t = work.q_tiles.tile_ahead(i) if listed else work.q_tiles.tile(i)
        return QueryStep(work.kv_head, t, i < end, i)
    g = lax.div(i, jnp.maximum(work.steps, 1))
    number = i - g * work.steps
    return QueryStep(
        work.kv_head * plan.problem.group + g, work.q_tiles.tile(number), i < end, number
    )


def needs_mask(tiling: KeyTiling, work: KeyTile, t: Index, i: Index) -> Predicate:
    """Whether query tile t, of step i of a head, needs a mask: True, False, or traced where it
    depends on the tile.
    """
    if tiling.is_listed:
        return (i < work.span.full_lo) | (i >= work.span.full_hi)
    if "full" not in tiling.sections or len(tiling.sections) == 1:
        return "full" not in tiling.sections
    return (t < work.span.full_lo) | (t >= work.span.full_hi)


def per_column(numbers: RegisterTile, shape: tuple[int, int]) -> RegisterTile:
    """One number a column, the same in all rows of a tile."""
    return lax.broadcast_in_dim(numbers, shape, [1])


def schedule_by_rank(ctx: KernelContext) -> Operand:
    """`work_order.dealt`, with kv tiles in place of ranks; or `work_order.schedule`, with the heads
    that go by rank. Documents that are packed repeat: dealt in the order of keys a block would take
    the same keys of many of them, and those with early keys would finish last.
    """
    order, problem = ctx.plan.order, ctx.plan.problem
    bits, kv_tiles = order.tiling.code_bits, order.tiling.kv_tiles
    batch, heads = problem.batch, order.heads // problem.batch
    first = order.first_ranked_head
    table = jnp.asarray(work_order.schedule(order) if order.claims else work_order.dealt(order))
    rows = np.arange(batch, dtype=np.int32)[:, None] * heads << bits
    of_codes = jax.vmap(jax.vmap(lambda code: key_tile(ctx, code).steps))
    steps = of_codes(jnp.asarray(rows + np.arange(kv_tiles, dtype=np.int32)[None]))
    by_rank = tile_lists.longest_first(steps)
    return tile_lists.in_place_of_ranks(table, bits, by_rank, heads, first)
