"""dQ of the fused Hopper kernel: a share for each warpgroup, added up in global memory.

The two warpgroups share the dQ of a query tile. In a tile of 64 rows each computes half of the
columns over all keys, or all columns over its own keys (`KeyPlan.has_own_keys`), and puts them in
shared memory, from where TMA adds them to global memory. In a tile of 128 rows each takes 64 rows
and adds them from registers, 16 bytes a thread: the array then holds every half tile in the order
in which threads hold it, and `rounded` reorders it. At head dim 64 adding through shared memory
takes longer.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_attn.kernels.attention import tma_operands
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.flash_bwd import dq_rounding, one_key_tile, turns
from pallas_attn.kernels.flash_bwd.key_tiles import KeyTile
from pallas_attn.kernels.flash_bwd.plan import KeyPlan
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.panels import Panels
from pallas_attn.kernels.lang.types import Index, RegisterTile, SmemRef
from pallas_attn.kernels.mma import mma_rowmajor, wgmma_swizzles

WARPGROUPS = 2  # consumers


class PendingDq(NamedTuple):
    """A step whose dQ is still to be computed."""

    exists: Index  # whether there is such a step
    count: Index  # its number, over all work tiles
    head: Index
    t: Index  # its query tile
    number: Index | None = None  # the query tile's, over all heads; negative: none; see `turns`


def is_split_by_rows(plan: KeyPlan) -> bool:
    """Whether warpgroups share the rows of a dQ, not its columns, and each adds from registers."""
    return plan.config.block_q == WARPGROUPS * ROWS


def matmuls(plan: KeyPlan) -> int:
    """Groups of matmuls that `multiply` issues."""
    return 1 if plan.has_own_keys else WARPGROUPS


def qk_widths(plan: KeyPlan) -> tuple[int, ...]:
    """Columns of q and k in shared memory, of each panel; where warpgroups share the columns of dQ,
    both halves are whole swizzles.
    """
    form = plan.format.qk
    if form.panels:
        return form.panels
    if is_split_by_rows(plan):
        return (form.width,)
    return (tma_operands.round_up(form.width, form.swizzle),)


def share_widths(plan: KeyPlan) -> tuple[int, ...]:
    """Columns of a warpgroup's share of the dQ of a query tile, of each accumulator: all columns,
    or half of them.
    """
    widths = qk_widths(plan)
    if is_split_by_rows(plan) or plan.has_own_keys:
        return widths
    return widths[:1] if plan.format.qk.panels else (widths[0] // WARPGROUPS,)


def accumulator(plan: KeyPlan) -> Any:
    """The accumulator of `multiply`."""
    return plgpu.ACC((ROWS, share_widths(plan)[0]), jnp.float32)


def staging(plan: KeyPlan) -> Panels:
    """Shared memory for `add`, or None."""
    if plan.config.one_key_tile:
        return one_key_tile.staging(plan)
    if is_split_by_rows(plan):
        return None
    return tuple(
        mosaic.swizzled((WARPGROUPS, ROWS, width), jnp.float32, _swizzle(width))
        for width in share_widths(plan)
    )


def _swizzle(width: int) -> int:
    return tma_operands.swizzle_of(4 * width)


def ds_scratch(plan: KeyPlan) -> Panels:
    """Shared memory [slot, warpgroup, 64 query rows, keys, query rows] for dS, in the swizzle of
    k's first panel. TMA takes blocks of 64 columns, too.
    """
    config, dtype, form = plan.config, jnp.dtype(plan.problem.dtype), plan.format.qk
    halves = (plan.ds_slots, WARPGROUPS, config.block_q // ROWS, ROWS)
    if form.panels and form.panels[0] == ROWS:
        return (panels.scratch(halves, dtype, ROWS),)
    return mosaic.swizzled((*halves, ROWS), dtype, form.swizzle)


def ds_tile(ctx: KernelContext, *at: Index) -> SmemRef:
    (tile,) = panels.tiles(ctx.smem.ds, at)
    return tile


def multiply(ctx: KernelContext, acc: RegisterTile, slot: Index, wg: Index) -> list[RegisterTile]:
    """Issues a warpgroup's share of dS K, of the dS in `slot`: into `acc` by the first panel of k.
    Returns the products by the others, which are there when `acc` is.
    """
    plan, _, smem = ctx
    # Without the opaque zero the matmul descriptors of all parts of k stay live, and are spilled.
    zero = mosaic.opaque_zero(wg, 1)

    def operands(u: Index) -> wgmma_swizzles.Pair:
        if is_split_by_rows(plan):
            return wgmma_swizzles.Pair(ds_tile(ctx, slot, u, wg), panels.tiles(smem.k, u + zero))
        ds = ds_tile(ctx, slot, u, 0)
        if plan.has_own_keys:
            return wgmma_swizzles.Pair(ds, panels.tiles(smem.k, u))
        return wgmma_swizzles.Pair(ds, (_half_of_k(ctx, u, wg),))

    keys = [wg] if plan.has_own_keys else range(WARPGROUPS)
    sums = [mosaic.filled((ROWS, width), 0.0) for width in share_widths(plan)[1:]]
    sums = wgmma_swizzles.issue_rest(sums, map(operands, keys))
    for ds, k in map(operands, keys):
        plgpu.wgmma(acc, ds.transpose((1, 0)), k[0])
    return sums


def _half_of_k(ctx: KernelContext, u: int, wg: Index) -> SmemRef:
    """A warpgroup's half of the columns of the keys of warpgroup u."""
    plan, _, smem = ctx
    if plan.format.qk.panels:
        return smem.k_halves.tile.at[wg, u]
    (columns,) = share_widths(plan)
    return smem.k.at[u, :, pl.ds(wg * columns, columns)]


def add(  # noqa: PLR0913
    ctx: KernelContext,
    work: KeyTile,
    wg: Index,
    step: PendingDq,
    parts: Sequence[RegisterTile],
    seen: Index | None = None,
) -> None:
    """Adds a warpgroup's share to global memory. `seen`: see `turns.wait`."""
    plan, refs, smem = ctx
    if plan.config.one_key_tile:
        return one_key_tile.write(ctx, work, wg, step, *parts)
    if is_split_by_rows(plan):
        head = work.batch * plan.problem.q_heads + step.head
        number = (head * _q_tiles(plan) + step.t) * WARPGROUPS + wg
        for before, dq in zip(_columns_before(plan), parts, strict=True):
            first = before * _pieces(plan) // dq.shape[1]
            mma_rowmajor.add(refs.dq, number + first if first else number, dq, step.exists)
        return None
    widths = share_widths(plan)
    if not plan.order.turns:  # or the addition before is in memory
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for staged, dq in zip(smem.dq, parts, strict=True):
        staged[wg] = dq
    turns.wait(ctx, work, wg, step, seen)
    plgpu.commit_smem()
    rows, column = pl.ds(step.t * ROWS, ROWS), 0 if plan.has_own_keys else wg * sum(widths)
    for staged, width in zip(smem.dq, widths, strict=True):
        to = refs.dq.at[work.batch, rows, step.head, pl.ds(column, width)]
        plgpu.copy_smem_to_gmem(staged.at[wg], to, step.exists != 0, reduction_op="add")
        column += width
    return None


def sums(plan: KeyPlan) -> jax.ShapeDtypeStruct:
    """The array that `add` adds to, zeros at first: whole swizzles. TMA leaves out columns past its
    last.
    """
    problem, rows = plan.problem, _q_tiles(plan) * plan.config.block_q
    if is_split_by_rows(plan):
        numbers = _pieces(plan) * ROWS * sum(qk_widths(plan))
        return jax.ShapeDtypeStruct((numbers,), jnp.float32)
    share = share_widths(plan)[0]
    width = tma_operands.round_up(problem.head_dim, _swizzle(share) // 4)
    if width <= share:  # the second share is past the last column
        width = sum(qk_widths(plan))
    return jax.ShapeDtypeStruct((problem.batch, rows, problem.q_heads, width), jnp.float32)


def rounded(plan: KeyPlan, dq: jax.Array) -> jax.Array:
    """The sums as dq, [B, T, N, H]."""
    problem = plan.problem
    if is_split_by_rows(plan):
        return dq_rounding.rounded(problem, dq, qk_widths(plan))
    dq = dq[:, : problem.q_len, :, : problem.head_dim]
    return (dq * problem.scale).astype(problem.dtype)


def _pieces(plan: KeyPlan) -> int:
    """Shares of all query tiles, where each has rows of its own."""
    return plan.problem.batch * plan.problem.q_heads * _q_tiles(plan) * WARPGROUPS


def _columns_before(plan: KeyPlan) -> list[int]:
    """Columns of the panels before each panel."""
    widths = qk_widths(plan)
    return [sum(widths[:n]) for n in range(len(widths))]


def _q_tiles(plan: KeyPlan) -> int:
    """Query tiles of a head: whole ones, of either size."""
    return tma_operands.round_up(plan.problem.q_len, WARPGROUPS * ROWS) // plan.config.block_q
