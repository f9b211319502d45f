"""The fused Hopper backward where all keys of a head are one tile: attention to at most 128 keys,
the cross-attention of diffusion models. The dQ of a step has no other terms, so it is written to dq
at once: nothing is set to zero before, and no launch rounds afterwards.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_attn._call.problem import AttentionProblem
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.flash_bwd import dq_sum
from pallas_attn.kernels.flash_bwd.dq_sum import PendingDq
from pallas_attn.kernels.flash_bwd.key_tiles import KeyTile, KeyTiling
from pallas_attn.kernels.flash_bwd.plan import KeyPlan
from pallas_attn.kernels.lang import panels
from pallas_attn.kernels.lang.panels import Panels
from pallas_attn.kernels.lang.types import Index, RegisterTiles

KEYS = 2 * ROWS


def takes(problem: AttentionProblem) -> bool:
    """Whether one tile of keys meets every query row, of head dims for query tiles of 128 rows."""
    fits = max(problem.head_dim, problem.v_head_dim) <= ROWS and problem.dtype != "float32"
    sees_all = problem.mask.is_full and set(problem.arrays) <= {"bias", "sinks"}
    sees_all = sees_all and problem.zigzag == 1
    functions = problem.mask_program is not None or problem.score_program is not None
    return fits and sees_all and not functions and 0 < problem.kv_len <= KEYS


def applies(tiling: KeyTiling) -> bool:
    """Whether dq is written at once: by query tiles of 128 rows."""
    return tiling.block_q == KEYS and takes(tiling.problem)


class Written(dq_sum.ByRows):
    """dq is written by rows, at once."""

    def staging(self, plan: KeyPlan) -> Panels:
        """Shared memory for the rows of both warpgroups on their way to dq."""
        return tuple(panels.scratch((2, ROWS), plan.problem.dtype, width) for width in plan.share)

    def zeros(self, plan: KeyPlan) -> None:
        """Nothing is added to dq."""

    def output(self, problem: AttentionProblem) -> jax.ShapeDtypeStruct:
        """dq."""
        shape = problem.batch, problem.q_len, problem.q_heads, problem.head_dim
        return jax.ShapeDtypeStruct(shape, problem.dtype)

    def add(
        self, at: tuple[KernelContext, KeyTile, Index], step: PendingDq, parts: RegisterTiles
    ) -> None:
        """Writes a warpgroup's rows of the dQ of a step."""
        (plan, refs, smem), work, wg = at
        row = (step.t * 2 + wg) * ROWS
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        (to,), (dq,) = panels.tiles(smem.dq, wg), parts
        to[...] = (dq * plan.problem.scale).astype(to.dtype)
        plgpu.commit_smem()
        where = work.batch, pl.ds(row, ROWS), step.head
        panels.store(smem.dq, wg, refs.dq, where, predicate=step.exists != 0)
