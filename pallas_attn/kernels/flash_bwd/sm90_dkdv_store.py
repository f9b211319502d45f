"""How dk and dv of the fused Hopper backward leave at the end of a tile of work, and when the next
keys may come.

Through k and v they leave after both warpgroups' last step, and TMA must have read them before the
next keys are loaded. Where dS takes as much room they leave through that instead: it is free by
then and not wanted before the next tile of work's first dS, and the next keys come at once.
"""

from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from pallas_attn.kernels.flash_bwd import sm90_dq_sum as sums
from pallas_attn.kernels.flash_bwd.plan import ROWS, Plan
from pallas_attn.kernels.lang import mosaic


def meet(smem: Any) -> None:
    """Both warpgroups are here."""
    plgpu.barrier_arrive(smem.met.at[0])
    plgpu.barrier_wait(smem.met.at[0])


def leave(plan: Plan, smem: Any, outs: Any, at: Any, results: Any) -> None:
    """dk and dv of a warpgroup's keys; at is (item, wg)."""
    item, wg = at
    meet(smem)  # the other has no more use for k, nor for dS
    by_ds = leaves_by_ds(plan)
    if by_ds:
        plgpu.barrier_arrive(smem.keys_free)
    places = _places(plan, smem, wg) if by_ds else ([smem.k.at[wg]], [smem.v.at[wg]])
    for value, staged, out in zip(results, places, outs, strict=True):
        columns = value.shape[1] // len(staged)
        for n, to in enumerate(staged):
            part = lax.slice(value, (0, n * columns), (ROWS, (n + 1) * columns))
            to[...] = part.astype(to.dtype)
        plgpu.commit_smem()
        for n, to in enumerate(staged):
            where = mosaic.columns(out, n * columns, columns, wg)
            there = out.at[item.batch, pl.ds(item.key + wg * ROWS, ROWS), item.kv_head, where]
            plgpu.copy_smem_to_gmem(to, there)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if not by_ds:
        plgpu.barrier_arrive(smem.keys_free)


def leaves_by_ds(plan: Plan) -> bool:
    """Whether dk and dv fit where dS is, by swizzles of 64 columns. Query tiles of 64 rows, at head
    dim 128, gain nothing by it; there k may be wider than dk, too, and TMA would wrap around.
    """
    places = 2 * plan.config.lag * (plan.config.block_q // ROWS)
    whole = plan.k_swizzle == plan.v_swizzle == 128
    fit = sums.k_width(plan) // ROWS + plan.v_width // ROWS <= places
    return whole and fit and sums.by_rows(plan)


def _places(plan: Plan, smem: Any, wg: Any) -> tuple[list[Any], list[Any]]:
    """Parts of ds of 64 columns: for dk, and for dv."""
    halves, wanted = plan.config.block_q // ROWS, sums.k_width(plan) // ROWS
    numbers = range(wanted + plan.v_width // ROWS)
    found = [smem.ds.at[n // halves, wg, n % halves] for n in numbers]
    return found[:wanted], found[wanted:]
