"""dQ of the fused Hopper backward: its matmul, and its way into a float32 array in global memory,
where the blocks that meet a query add it up.

The two warpgroups share a query tile's dQ. Of 64 rows each takes half of the columns, stages them
in shared memory and has TMA add them. Of 128 rows each takes 64 and adds them from registers, 16
bytes a thread: the array then holds every half tile in the order in which threads hold it, and what
rounds dQ puts it in order. At head dim 64 staging takes longer.
"""

import math
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import tma_operands
from pallas_attn.kernels.flash_bwd.plan import ROWS, Item, Plan, Refs
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.mma import mma_rowmajor

SHARES = 2  # warpgroups


def by_rows(plan: Plan) -> bool:
    """Whether warpgroups share a query tile's rows, not the columns of its dQ, and each adds from
    registers.
    """
    return plan.config.block_q == SHARES * ROWS


def k_width(plan: Plan) -> int:
    """The head dim of q and k in shared memory; where warpgroups share the columns of dQ, both
    halves are whole swizzles.
    """
    if by_rows(plan):
        return plan.k_width
    return tma_operands.round_up(plan.k_width, plan.k_swizzle)


def share(plan: Plan) -> tuple[int, int]:
    """A warpgroup's part of a query tile's dQ."""
    return ROWS, k_width(plan) if by_rows(plan) else k_width(plan) // SHARES


def staged(plan: Plan) -> Any:
    """Shared memory for `add`, or None."""
    if by_rows(plan):
        return None
    return mosaic.swizzled((SHARES, *share(plan)), jnp.float32, _swizzle(plan))


def _swizzle(plan: Plan) -> int:
    """Bytes, of what is staged."""
    return tma_operands.swizzle_of(4 * share(plan)[1])


def matmuls(plan: Plan, smem: Any, acc: Any, turn: Any, wg: Any) -> None:
    """A warpgroup's share of dS K; `turn`: which of the places for dS."""
    _, columns = share(plan)
    # 0, which only we know: else what tells a matmul of each part of k is kept for all, and spilled
    zero = lax.shift_right_logical(wg, jnp.int32(1))
    for u in range(SHARES):
        if by_rows(plan):
            ds, k = smem.ds.at[turn, u, wg], smem.k.at[u + zero]
        else:
            ds, k = smem.ds.at[turn, u, 0], smem.k.at[u, :, pl.ds(wg * columns, columns)]
        plgpu.wgmma(acc, ds.transpose((1, 0)), k)


def add(plan: Plan, refs: Refs, smem: Any, item: Item, place: tuple[Any, ...], dq: Any) -> None:
    """Sends a warpgroup's share off; place is (wg, head, query tile, whether there is one)."""
    wg, head, t, there = place
    rows, columns = share(plan)
    if by_rows(plan):
        problem = plan.problem
        number = (item.batch * problem.q_heads + head) * _tiles(plan) + t
        mma_rowmajor.add(refs.dq, number * SHARES + wg, dq, there)
        return
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    smem.dq[wg] = dq
    plgpu.commit_smem()
    where = pl.ds(t * rows, rows), head, pl.ds(wg * columns, columns)
    there_in_gmem = refs.dq.at[item.batch, *where]
    plgpu.copy_smem_to_gmem(smem.dq.at[wg], there_in_gmem, there != 0, reduction_op="add")


def zeros(plan: Plan, batch: int) -> Any:
    """What `add` adds into: whole swizzles. TMA leaves out columns past its last."""
    rows, heads = _tiles(plan) * plan.config.block_q, plan.problem.q_heads
    if by_rows(plan):
        return jnp.zeros(math.prod((batch, rows, heads, k_width(plan))))
    width = tma_operands.round_up(plan.problem.head_dim, _swizzle(plan) // 4)
    if width <= share(plan)[1]:  # all of the second share
        width = k_width(plan)
    return jnp.zeros((batch, rows, heads, width))


def rounded(plan: Plan, dq: Any) -> Any:
    """The sums as dq, [B, T, N, H]."""
    problem = plan.problem
    if by_rows(plan):
        # batch, head, tile, share, 8 columns, warp, row, 2 columns, row / 8, column
        parts = (problem.batch, problem.q_heads, _tiles(plan), SHARES)
        dq = dq.reshape(*parts, k_width(plan) // 8, 4, 8, 4, 2, 2)
        dq = dq.transpose((0, 2, 3, 5, 8, 6, 1, 4, 7, 9))
        dq = dq.reshape(problem.batch, -1, problem.q_heads, k_width(plan))
    dq = dq[:, : problem.q_len, :, : problem.head_dim]
    return (dq * problem.scale).astype(problem.dtype)


def _tiles(plan: Plan) -> int:
    """Query tiles of a head: whole ones, of either size."""
    return tma_operands.round_up(plan.problem.q_len, SHARES * ROWS) // plan.config.block_q
