"""Work units, and the query rows of a consumer, where all sequences have as many rows."""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import softmax
from pallas_attn.kernels.attention.softmax import OutputSums
from pallas_attn.kernels.attention.tiles import (
    ROWS,
    KernelContext,
    WorkTile,
    mask_of,
    mask_span,
)
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import Index, Predicate, RegisterTile
from pallas_attn.kernels.prefill import mask_functions
from pallas_attn.kernels.prefill.plan import (
    Ending,
    Plan,
    PrefillSmem,
    Queries,
    SequenceKeys,
    Unit,
    Units,
    WgTile,
    base_scratch,
)


def strided_units(plan: Plan, block_id: Index, units: Index) -> Units:
    """The units of a block, if there are `units` in all. Where the q tiles of several heads are
    taken in turn, blocks count from both ends in turn, so that none has long ones only.
    """
    if plan.together == 1:
        count = lax.div(units - block_id + (plan.grid - 1), jnp.int32(plan.grid))
        return Units(block_id, plan.grid, count)
    units, grid = jnp.int32(units), jnp.int32(plan.grid)
    rounds, more = lax.div(units, grid), lax.rem(units, grid)
    back = plan.grid - 1 - block_id
    count = rounds + (jnp.where(rounds & 1 == 1, back, block_id) < more).astype(jnp.int32)
    return Units(block_id, plan.grid, count, back)


def place_of(plan: Plan, number: Index, q_tiles: Index) -> tuple[Index, Index, Index]:
    """(kv heads before it, q tile, split) of a unit, where a kv head has so many q tiles. Units of
    a kv head, or of `Plan.together` heads, are neighbours; last rows come first, since they see
    most keys.
    """
    if plan.together > 1:
        group, rest = div_rem(number, plan.together * q_tiles * plan.config.splits)
        split, rest = div_rem(rest, plan.together * q_tiles)
        q_tile, head = div_rem(rest, plan.together)
        head = group * plan.together + head
    else:
        head, rest = div_rem(number, q_tiles * plan.config.splits)
        split, q_tile = div_rem(rest, q_tiles)
    return head, q_tiles - 1 - q_tile, split


def div_rem(n: Index, by: Index) -> tuple[Index, Index]:
    return lax.div(n, jnp.int32(by)), lax.rem(n, jnp.int32(by))


def unit_at(
    ctx: KernelContext, m: Index, kv_head: Index, q_tile: Index, split: Index, rows: Index
) -> Unit:
    """The unit of a sequence that has so many query rows."""
    plan, tiles, config = ctx.plan, ctx.plan.tiles, ctx.plan.config
    kv_len, q_offset, q_len, invalid, mask = plan.keys_of(ctx, m, rows)
    first = lax.div(q_tile * config.warpgroups, jnp.int32(tiles.head_chunks))
    last = jnp.minimum((q_tile + 1) * config.warpgroups, tiles.wg_tiles_of(rows)) - 1
    last = lax.div(last, jnp.int32(tiles.head_chunks))
    row = first * tiles.head_rows
    count = jnp.minimum((last + 1) * tiles.head_rows, q_len) - row
    span = mask_span(mask, q_offset + row, count, kv_len, config.block_kv)
    if plan.problem.mask_program is not None:
        drafts = q_offset if plan.tree else None
        span = mask_functions.without_full_tiles(span, drafts, config.block_kv)
    if "q_lengths" in plan.problem.arrays:
        span = span._replace(hi=jnp.where(count > 0, span.hi, 0))
    span = span._replace(hi=jnp.maximum(span.hi, span.lo))
    if config.splits > 1:
        each = lax.div(span.hi - span.lo + (config.splits - 1), jnp.int32(config.splits))
        lo = jnp.minimum(span.lo + split * each, span.hi)
        span = span._replace(lo=lo, hi=jnp.minimum(lo + each, span.hi))
    tile = WorkTile(m, kv_head, row, q_offset, q_len, kv_len, mask)
    return Unit(m, kv_head, q_tile, split, tile, span, invalid, rows)


def wg_tile_of(plan: Plan, unit: Unit, wg: Index) -> WgTile:
    tiles, number = plan.tiles, unit.q_tile * plan.config.warpgroups + wg
    wg_tiles = tiles.wg_tiles_of(unit.rows)
    row_block, chunk = div_rem(jnp.minimum(number, wg_tiles - 1), tiles.head_chunks)
    first, group = chunk * tiles.tile_heads, plan.problem.group
    head = unit.kv_head * group + first
    exists, row = number < wg_tiles, row_block * tiles.head_rows
    if unit.line is not None:
        number = unit.line * plan.config.warpgroups + wg
    return WgTile(exists, head, group - first, row, number)


def store_partial(ctx: KernelContext, end: Ending, line: Index, result: OutputSums) -> None:
    """The accumulator, the row max and the row sum, for `combine_partials` or `merge_parts`."""
    accs, row_maxes, row_sums = ctx.refs.results[:3]
    at = (end.unit.split, line, end.rows.number)
    mosaic.store(accs.at[at], result.acc)
    mosaic.store(row_maxes.at[at], result.row_max)
    mosaic.store(row_sums.at[at], result.row_sum.sum(axis=1) + end.spoil)


def finished(
    ctx: KernelContext, own: WgTile, result: OutputSums
) -> tuple[RegisterTile, RegisterTile]:
    """Factor of the accumulator, and log-sum-exp, of each row."""
    sink = None if ctx.refs.sinks is None else _row_sinks(ctx, own)
    return softmax.finish(result.row_max, result.row_sum, sink)


def _row_sinks(ctx: KernelContext, rows: WgTile) -> RegisterTile:
    """float32[64]: the sink of each row's query head."""
    plan, sinks = ctx.plan, ctx.refs.sinks
    head, row_sinks = plan.tiles.row_heads(), mosaic.filled((ROWS,), 0.0)
    for n in range(plan.tiles.tile_heads):
        sink = sinks[jnp.minimum(rows.head + n, plan.problem.q_heads - 1)]
        row_sinks = jnp.where(head == n, mosaic.broadcast_scalar(sink, (ROWS,)), row_sinks)
    return row_sinks


# ---- sequences that have equally many rows -------------------------------------------------------


def keys_of(ctx: KernelContext, m: Index, rows: Index) -> SequenceKeys:
    """The keys of a sequence of a cache, at the last of which the last query stands. The result is
    NaN where they are too many, never extended, or of a layer that does not exist.
    """
    plan, refs = ctx.plan, ctx.refs
    capacity = plan.problem.kv_len if refs.capacities is None else refs.capacities[m]
    kv_len = refs.lengths[m]
    invalid = kv_len > capacity
    if refs.new_lengths is not None:
        invalid = invalid | ((kv_len <= 0) & (refs.new_lengths[m] < 0))
    if refs.layer is not None:
        invalid = invalid | ~plan.layout.has_layer(refs.layer[0])
    kv_len = jnp.where(invalid, 0, jnp.maximum(kv_len, 0))
    return SequenceKeys(kv_len, kv_len - rows, rows, invalid, mask_of(plan.problem, refs, 0))


def partial_tiles(plan: Plan) -> tuple[int, int]:
    """Sizes of partials: (sequences and kv heads, warpgroup tiles of each)."""
    return plan.problem.batch * plan.problem.kv_heads, plan.tiles.padded_wg_tiles


def scratch(plan: Plan) -> PrefillSmem:
    """Shared memory of a block."""
    swizzle = (plan.q if plan.v.transposed else plan.v).swizzle
    out = plan.config.warpgroups, ROWS, swizzle // 2
    q_tiles = plan.config.q_slots * plan.config.warpgroups
    return base_scratch(
        plan,
        out=mosaic.swizzled(out, plan.q.dtype, swizzle),
        q_ready=plgpu.Barrier(num_barriers=q_tiles, num_arrivals=plan.tiles.tile_heads),
    )


def units_of(ctx: KernelContext, block_id: Index) -> Units:
    """The units of a block."""
    return strided_units(ctx.plan, block_id, ctx.plan.units)


def last_unit(ctx: KernelContext) -> Index:
    """The last number of all units."""
    return ctx.plan.units - 1


def unit_of(ctx: KernelContext, units: Units, number: Index) -> Unit:
    """The unit of a number, which is one of the block's units."""
    del units
    plan = ctx.plan
    head, q_tile, split = place_of(plan, number, plan.tiles.q_tiles)
    m, kv_head = div_rem(head, plan.problem.kv_heads)
    return unit_at(ctx, m, kv_head, q_tile, split, plan.problem.q_len)


def load(ctx: KernelContext, unit: Unit, wg: Index, slot: Index, exists: Predicate) -> None:
    """Asks for the rows of a consumer, if the unit exists."""
    config = ctx.plan.config
    if config.splits > 1 and config.q_slots > 1:
        # All warps have read the slot then. Elsewhere they meet where a result is stored, or
        # before the only slot is loaded again.
        plgpu.commit_smem()
    pl.when(exists)(functools.partial(_load, ctx, unit, wg, slot))


def wait(ctx: KernelContext, slot: Index) -> None:
    """Until the rows in a slot are there."""
    plgpu.barrier_wait(ctx.smem.q_ready.at[slot])


def store(ctx: KernelContext, end: Ending, result: OutputSums) -> None:
    """The result of a consumer's rows, divided by the row sums, and the log-sum-exp; or its
    partial.
    """
    if ctx.plan.config.splits > 1:
        line = end.unit.kv_head + end.unit.m * ctx.plan.problem.kv_heads
        return store_partial(ctx, end, line, result)
    plan, smem, (out, lse_of_tiles) = ctx.plan, ctx.smem, ctx.refs.results
    unit, own, tiles = end.unit, end.rows, plan.tiles
    factor, lse = finished(ctx, own, result)
    mosaic.store(lse_of_tiles.at[unit.m, unit.kv_head, own.number], lse + end.spoil)
    acc = result.acc * mosaic.broadcast_rows(factor + end.spoil, result.acc.shape)
    width, staged, rows = smem.out.shape[-1], smem.out.at[end.wg], tiles.head_rows
    for column in range(0, plan.v.width, width):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        part = lax.slice(acc, (0, column), (ROWS, column + width))
        staged[...] = part.astype(staged.dtype)
        plgpu.commit_smem()
        for n in range(tiles.tile_heads):
            columns = mosaic.columns(out, column, width, unit.m)
            to = out.at[unit.m, pl.ds(own.row, rows), own.head + n, columns]
            source = staged.at[pl.ds(n * rows, rows)]
            exists = plan.problem.group % tiles.tile_heads == 0 or n < own.heads_left
            pl.when(exists)(functools.partial(plgpu.copy_smem_to_gmem, source, to))
    return None


def _load(ctx: KernelContext, unit: Unit, wg: Index, slot: Index) -> None:
    """A copy for each query head of the tile."""
    plan, refs, smem = ctx
    own, rows = wg_tile_of(plan, unit, wg), plan.tiles.head_rows
    for n in range(plan.tiles.tile_heads):
        head = jnp.minimum(own.head + n, plan.problem.q_heads - 1)
        columns = mosaic.columns(refs.q, 0, plan.q.width, head)
        source = refs.q.at[unit.m, pl.ds(own.row, rows), head, columns]
        to = smem.q.at[slot, pl.ds(n * rows, rows)]
        plgpu.copy_gmem_to_smem(source, to, smem.q_ready.at[slot])


def rows_of_tiles(plan: Plan, lse: jax.Array) -> jax.Array:
    """[M, K, warpgroup tiles, 64] -> [M, N, t]."""
    (m, kv_heads), tiles = lse.shape[:2], plan.tiles
    heads, rows, chunks = tiles.tile_heads, tiles.head_rows, tiles.head_chunks
    lse = lse[:, :, : tiles.wg_tiles, : heads * rows]
    lse = lse.reshape(m, kv_heads, -1, chunks, heads, rows)
    lse = lse.transpose(0, 1, 3, 4, 2, 5).reshape(m, kv_heads, chunks * heads, -1)
    return lse[:, :, : tiles.group, : tiles.q_len].reshape(m, -1, tiles.q_len)


QUERIES = Queries(False, scratch, partial_tiles, units_of, last_unit, unit_of, load, wait, store)
