"""dQ of the fused Hopper kernel: a share for each warpgroup, added up in global memory.

The two warpgroups share the dQ of a query tile. Of 64 rows each takes half of the columns, puts
them in shared memory and has TMA add them. Of 128 rows each takes 64 and adds them from registers,
16 bytes a thread: the array then holds every half tile in the order in which threads hold it, and
`rounded` puts it in order. At head dim 64 the way by shared memory takes longer.
"""

import math
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_attn.kernels.attention import tma_operands
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.flash_bwd.key_tiles import KeyTile
from pallas_attn.kernels.flash_bwd.plan import KeyPlan
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import Index, RegisterTile, SmemRef
from pallas_attn.kernels.mma import mma_rowmajor

WARPGROUPS = 2  # consumers


class PendingDq(NamedTuple):
    """A step whose dQ is still to be computed."""

    exists: Index  # whether there is such a step
    count: Index  # its number, over all work tiles
    head: Index
    t: Index  # its query tile


def is_split_by_rows(plan: KeyPlan) -> bool:
    """Whether warpgroups share the rows of a dQ, not its columns, and each adds from registers."""
    return plan.config.block_q == WARPGROUPS * ROWS


def qk_width(plan: KeyPlan) -> int:
    """The head dim of q and k in shared memory; where warpgroups share the columns of dQ, both
    halves are whole swizzles.
    """
    if is_split_by_rows(plan):
        return plan.format.qk.width
    return tma_operands.round_up(plan.format.qk.width, plan.format.qk.swizzle)


def share_shape(plan: KeyPlan) -> tuple[int, int]:
    """The shape of a warpgroup's share of the dQ of a query tile."""
    width = qk_width(plan)
    return ROWS, width if is_split_by_rows(plan) else width // WARPGROUPS


def staging(plan: KeyPlan) -> SmemRef:
    """Shared memory for `add`, or None."""
    if is_split_by_rows(plan):
        return None
    return mosaic.swizzled((WARPGROUPS, *share_shape(plan)), jnp.float32, _swizzle(plan))


def _swizzle(plan: KeyPlan) -> int:
    return tma_operands.swizzle_of(4 * share_shape(plan)[1])


def multiply(ctx: KernelContext, acc: RegisterTile, slot: Index, wg: Index) -> None:
    """Issues a warpgroup's share of dS K, of the dS in `slot`."""
    plan, _, smem = ctx
    _, columns = share_shape(plan)
    # Else what describes a matmul of each part of k is kept for all of them, and spilled.
    zero = mosaic.opaque_zero(wg, 1)
    for u in range(WARPGROUPS):
        if is_split_by_rows(plan):
            ds, k = smem.ds.at[slot, u, wg], smem.k.at[u + zero]
        else:
            ds, k = smem.ds.at[slot, u, 0], smem.k.at[u, :, pl.ds(wg * columns, columns)]
        plgpu.wgmma(acc, ds.transpose((1, 0)), k)


def add(ctx: KernelContext, work: KeyTile, wg: Index, step: PendingDq, dq: RegisterTile) -> None:
    """Adds a warpgroup's share to global memory."""
    plan, refs, smem = ctx
    rows, columns = share_shape(plan)
    if is_split_by_rows(plan):
        head = work.batch * plan.problem.q_heads + step.head
        number = head * _q_tiles(plan) + step.t
        mma_rowmajor.add(refs.dq, number * WARPGROUPS + wg, dq, step.exists)
        return
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    smem.dq[wg] = dq
    plgpu.commit_smem()
    where = pl.ds(step.t * rows, rows), step.head, pl.ds(wg * columns, columns)
    to = refs.dq.at[work.batch, *where]
    plgpu.copy_smem_to_gmem(smem.dq.at[wg], to, step.exists != 0, reduction_op="add")


def zeros(plan: KeyPlan, batch: int) -> jax.Array:
    """The array that `add` adds to: whole swizzles. TMA leaves out columns past its last."""
    rows, heads = _q_tiles(plan) * plan.config.block_q, plan.problem.q_heads
    if is_split_by_rows(plan):
        return jnp.zeros(math.prod((batch, rows, heads, qk_width(plan))))
    width = tma_operands.round_up(plan.problem.head_dim, _swizzle(plan) // 4)
    if width <= share_shape(plan)[1]:  # all of the second share
        width = qk_width(plan)
    return jnp.zeros((batch, rows, heads, width))


def rounded(plan: KeyPlan, dq: jax.Array) -> jax.Array:
    """The sums as dq, [B, T, N, H]."""
    problem = plan.problem
    if is_split_by_rows(plan):
        # batch, head, tile, share, 8 columns, warp, row, 2 columns, row / 8, column
        tiles = (problem.batch, problem.q_heads, _q_tiles(plan), WARPGROUPS)
        dq = dq.reshape(*tiles, qk_width(plan) // 8, 4, 8, 4, 2, 2)
        dq = dq.transpose((0, 2, 3, 5, 8, 6, 1, 4, 7, 9))
        dq = dq.reshape(problem.batch, -1, problem.q_heads, qk_width(plan))
    dq = dq[:, : problem.q_len, :, : problem.head_dim]
    return (dq * problem.scale).astype(problem.dtype)


def _q_tiles(plan: KeyPlan) -> int:
    """Query tiles of a head: whole ones, of either size."""
    return tma_operands.round_up(plan.problem.q_len, WARPGROUPS * ROWS) // plan.config.block_q
