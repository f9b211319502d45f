"""dQ of the fused Hopper kernel: a share for each warpgroup, added up in global memory.

The two warpgroups share the dQ of a query tile. In a tile of 64 rows each takes half of the
columns, puts them in shared memory, and TMA adds them to global memory. In a tile of 128 rows each
takes 64 and adds them from registers, 16 bytes a thread: the array then holds every half tile in
the order in which threads hold it, and `rounded` reorders it. At head dim 64 adding through shared
memory takes longer.

Tried where the last panel is narrow, and left out: dQ of each warpgroup's own keys, which adds to
every column twice (SigLIP's backward 4 % faster on an H200, 37 % slower on an H100), and two whole
panels of q and k in place of `has_rest` (2 to 16 % slower on an H100; `results/shapes/`).
"""

from collections.abc import Sequence
from typing import NamedTuple

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
from pallas_attn.kernels.mma import mma_rowmajor

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
    """Columns of a warpgroup's share of the dQ of a query tile, of each accumulator: all columns of
    its rows, or half of them.
    """
    widths = qk_widths(plan)
    if is_split_by_rows(plan):
        return widths
    return widths[:1] if plan.format.qk.panels else (widths[0] // WARPGROUPS,)


def has_rest(plan: KeyPlan) -> bool:
    """Whether the second half of k, whose columns past the head dim are zeros, is wider than the
    second panel of q: then scores are computed from another copy of k.
    """
    widths = plan.format.qk.panels
    return plan.format.halves and widths[1] < widths[0]


def staging(plan: KeyPlan) -> Panels:
    """Shared memory for `add`, or None."""
    if one_key_tile.applies(plan.tiling):
        return one_key_tile.staging(plan)
    if is_split_by_rows(plan):
        return None
    return mosaic.swizzled((WARPGROUPS, ROWS, *share_widths(plan)), jnp.float32, _swizzle(plan))


def _swizzle(plan: KeyPlan) -> int:
    return tma_operands.swizzle_of(4 * share_widths(plan)[0])


def ds_scratch(plan: KeyPlan) -> tuple[Panels, ...]:
    """Shared memory [slot, warpgroup, 64 query rows, keys, query rows] for dS: a copy for each
    swizzle of k, as both operands of a matmul have one. TMA takes blocks of 64 columns, too.
    """
    config, dtype, form = plan.config, jnp.dtype(plan.problem.dtype), plan.format.qk
    halves = (plan.ds_slots, WARPGROUPS, config.block_q // ROWS, ROWS)
    if not form.panels:
        return (mosaic.swizzled((*halves, ROWS), dtype, form.swizzle),)
    return tuple(
        (panels.scratch(halves, dtype, ROWS),)
        if width == ROWS
        else mosaic.swizzled((*halves, ROWS), dtype, 2 * width)
        for width in _swizzled_widths(plan)
    )


def _swizzled_widths(plan: KeyPlan) -> list[int]:
    return sorted(set(share_widths(plan)), reverse=True)


def ds_tiles(ctx: KernelContext, *at: Index) -> list[SmemRef]:
    """The copies of a tile of dS."""
    return [ref for copy in ctx.smem.ds for ref in panels.tiles(copy, at)]


def matmuls(plan: KeyPlan) -> int:
    """Matmuls that `multiply` issues."""
    return WARPGROUPS * len(share_widths(plan))


def multiply(ctx: KernelContext, accs: Sequence[RegisterTile], slot: Index, wg: Index) -> None:
    """Issues a warpgroup's share of dS K, of the dS in `slot`."""
    plan, _, smem = ctx
    # Without the opaque zero the matmul descriptors of all parts of k stay live, and are spilled.
    zero, widths = mosaic.opaque_zero(wg, 1), _swizzled_widths(plan)
    for u in range(WARPGROUPS):
        if is_split_by_rows(plan):
            copies, parts = ds_tiles(ctx, slot, u, wg), panels.tiles(smem.k, u + zero)
        else:
            copies, parts = ds_tiles(ctx, slot, u, 0), (_half_of_k(ctx, u, wg),)
        for acc, k in zip(accs, parts, strict=True):
            ds = copies[0 if len(copies) == 1 else widths.index(k.shape[1])]
            plgpu.wgmma(acc, ds.transpose((1, 0)), k)


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
    if one_key_tile.applies(plan.tiling):
        return one_key_tile.write(ctx, work, wg, step, *parts)
    if is_split_by_rows(plan):
        head = work.batch * plan.problem.q_heads + step.head
        number = (head * _q_tiles(plan) + step.t) * WARPGROUPS + wg
        for before, dq in zip(_columns_before(plan), parts, strict=True):
            first = before * _pieces(plan) // dq.shape[1]
            mma_rowmajor.add(refs.dq, number + first if first else number, dq, step.exists)
        return None
    (dq,), (columns,), rows = parts, share_widths(plan), ROWS
    if not plan.order.turns:  # or the addition before is in memory
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    smem.dq[wg] = dq
    turns.wait(ctx, work, wg, step, seen)
    plgpu.commit_smem()
    where = pl.ds(step.t * rows, rows), step.head, pl.ds(wg * columns, columns)
    to = refs.dq.at[work.batch, *where]
    plgpu.copy_smem_to_gmem(smem.dq.at[wg], to, step.exists != 0, reduction_op="add")
    return None


def sums(plan: KeyPlan) -> jax.ShapeDtypeStruct:
    """The array that `add` adds to, zeros at first: whole swizzles. TMA leaves out columns past its
    last.
    """
    problem, rows = plan.problem, _q_tiles(plan) * plan.config.block_q
    if is_split_by_rows(plan):
        numbers = _pieces(plan) * ROWS * sum(qk_widths(plan))
        return jax.ShapeDtypeStruct((numbers,), jnp.float32)
    width = tma_operands.round_up(problem.head_dim, _swizzle(plan) // 4)
    if width <= share_widths(plan)[0]:  # the second share is past the last column
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
