"""The epilogue of the Hopper forward: a consumer divides its rows by their sums and stores them.

The output goes through shared memory that belongs to the consumer, as many columns at a time as
there is room for, and from there on by TMA.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import softmax, tma_operands
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext, QueryRows
from pallas_attn.kernels.flash_fwd.tile_scheduler import QueryPlan
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.types import RegisterTile, RegisterTiles
from pallas_attn.kernels.mma import row_numbers


def staged_widths(plan: QueryPlan, room: int) -> tuple[int, ...]:
    """Columns of the output in shared memory at a time, by buffer: as many as `room` bytes hold."""
    itemsize = jnp.dtype(plan.problem.dtype).itemsize
    row = itemsize * plan.config.warpgroups * ROWS
    if plan.v.panels:
        whole, rest = _wide_and_rest(plan.v.panels)
        counts = range(len(whole), 1, -1)
        held = next((n for n in counts if row * sum(whole[:n] + rest) <= room), len(whole[:1]))
        return whole[:held] + rest
    swizzle = _swizzle(plan) // itemsize
    widths = [n for n in range(plan.v.width, 0, -swizzle) if plan.v.width % n == 0]
    return (next((n for n in widths if row * n <= room), swizzle),)


def _wide_and_rest(widths: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The panels that are as wide as the first one, and one that is not."""
    wide = widths.count(widths[0])
    return widths[:wide], widths[wide:]


def _swizzle(plan: QueryPlan) -> int:
    if plan.problem.dtype != "float32":
        return plan.v.swizzle
    return tma_operands.swizzle_of(plan.v.width * 4)


def scratch(plan: QueryPlan, widths: tuple[int, ...]) -> Any:
    """Shared memory for the output, of `staged_widths`; None: not known yet."""
    shape, dtype = (plan.config.warpgroups, ROWS), plan.problem.dtype
    if not widths:
        return None
    if plan.v.panels:
        return tuple(panels.scratch(shape, dtype, width) for width in widths)
    return mosaic.swizzled((*shape, *widths), dtype, _swizzle(plan))


def store(ctx: KernelContext, rows: QueryRows, result: Any) -> None:
    """Divides by the row sums, and stores the output and the log-sum-exp."""
    plan, refs, smem = ctx
    acc, tile = result.acc, rows.tile
    sink = None if refs.sinks is None else refs.sinks[tile.head]
    factor, lse = softmax.finish(result.row_max, result.row_sum, sink)
    if refs.units is not None:  # float32
        head = lax.div(tile.head, jnp.int32(plan.problem.group))
        factor = factor * refs.units[1, tile.batch, head]
    acc = jax.tree.map(lambda x: x * mosaic.broadcast_rows(factor, x.shape), acc)
    if tile.q_len is not None:
        inside = mosaic.positions((ROWS,), 0, rows.row) < tile.q_len
        lse = jnp.where(inside, lse, -jnp.inf)
        acc = jax.tree.map(lambda x: jnp.where(mosaic.broadcast_rows(inside, x.shape), x, 0.0), acc)
    if plan.tiling.padded_rows == plan.problem.q_len:
        mosaic.store(refs.lse.at[tile.batch, tile.head, pl.ds(rows.row, ROWS)], lse)
    else:
        row_numbers.store(lse, refs.lse, tile.batch, tile.head, rows.row)
    if plan.v.panels:
        return _store_panels(ctx, rows, acc)
    return _store_columns(ctx, rows, acc)


def _store_columns(ctx: KernelContext, rows: QueryRows, acc: RegisterTile) -> None:
    """The output from one buffer, which is used in turn."""
    plan, refs, smem = ctx
    width, staged, tile = smem.out.shape[-1], smem.out.at[rows.wg], rows.tile
    for column in range(0, plan.v.width, width):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        part = lax.slice(acc, (0, column), (ROWS, column + width))
        staged[...] = part.astype(staged.dtype)
        plgpu.commit_smem()
        columns = mosaic.columns(refs.out, column, width, tile.head)
        where = (tile.batch, pl.ds(rows.row, ROWS), tile.head, columns)
        plgpu.copy_smem_to_gmem(staged, refs.out.at[where])


def _store_panels(ctx: KernelContext, rows: QueryRows, accs: RegisterTiles) -> None:
    """The output from a buffer for each panel, or from fewer, which are used in turn."""
    plan, refs, smem = ctx
    (wide, rest), tile = _wide_and_rest(plan.v.panels), rows.tile
    held, where = len(smem.out) - len(rest), (tile.batch, pl.ds(rows.row, ROWS), tile.head)
    for first in range(0, len(wide), held):
        count = min(held, len(wide) - first)
        last = first + count == len(wide)
        staged = smem.out[:count] + (smem.out[held:] if last else ())
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        some = accs[first : first + len(staged)]
        for acc, to in zip(some, panels.tiles(staged, rows.wg), strict=True):
            to[...] = acc.astype(to.dtype)
        plgpu.commit_smem()
        panels.store(staged, rows.wg, refs.out, where, first * wide[0])
