"""dQ of the fused Hopper kernel: a share for each of its two warpgroups, which is added up in
global memory. `KeyPlan.dq` says how: `ByColumns`, `ByRows`, in turns (`turns.InTurns`), or
`Written` at once.

Tried where the last panel is narrow, and left out: dQ of each warpgroup's own keys, which adds to
every column twice (SigLIP's backward 4 % faster on an H200, 37 % slower on an H100), and two whole
panels of q and k in place of `has_rest` (2 to 16 % slower on an H100; `results/shapes/`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionProblem
from pallas_attn.kernels.attention import tma_operands
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.flash_bwd import step_parts
from pallas_attn.kernels.flash_bwd.key_tiles import KeyTile
from pallas_attn.kernels.flash_bwd.plan import KeyPlan
from pallas_attn.kernels.flash_bwd.step_parts import Sums
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.panels import Panels
from pallas_attn.kernels.lang.types import Index, RegisterTile, RegisterTiles
from pallas_attn.kernels.mma import thread_pieces

WARPGROUPS = 2  # consumers


class PendingDq(NamedTuple):
    """A step whose dQ is still to be computed."""

    exists: Index  # whether there is such a step
    count: Index  # its number, over all work tiles
    head: Index
    t: Index  # its query tile
    number: Any = None  # the query tile's, over all heads; negative: none; see `turns`
    seen: Any = None  # see `turns.look`


def has_rest(plan: KeyPlan) -> bool:
    """Whether the second half of k, whose columns past the head dim are zeros, is wider than the
    second panel of q: then scores are computed from another copy of k.
    """
    widths = plan.format.qk.panels
    return plan.format.halves and widths[1] < widths[0]


def is_written(problem: AttentionProblem) -> bool:
    """Whether one tile of keys meets every query row, of head dims for query tiles of 128 rows:
    attention to at most 128 keys, the cross-attention of diffusion models. The dQ of a step then
    has no other terms, so it is `Written` to dq at once: nothing is set to zero before, and no
    launch rounds afterwards.
    """
    fits = max(problem.head_dim, problem.v_head_dim) <= ROWS and problem.dtype != "float32"
    sees_all = problem.mask.is_full and set(problem.arrays) <= {"bias", "sinks"}
    sees_all = sees_all and problem.zigzag == 1
    functions = problem.mask_program is not None or problem.score_program is not None
    return fits and sees_all and not functions and 0 < problem.kv_len <= WARPGROUPS * ROWS


# ---- dS, and dS K -------------------------------------------------------------------------------


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
        for width in sorted(set(plan.dq_widths), reverse=True)
    )


def multiply_ds(ctx: KernelContext, accs: Sequence[RegisterTile], slot: Index, wg: Index) -> None:
    """Issues a warpgroup's share of dS K, of the dS in `slot`."""
    plan, _, smem = ctx
    # Without the opaque zero the matmul descriptors of all parts of k stay live, and are spilled.
    zero, widths = mosaic.opaque_zero(wg, 1), sorted(set(plan.dq_widths), reverse=True)
    for u in range(WARPGROUPS):
        at = slot, u, 0 if plan.dq.by_columns else wg
        copies = [ref for copy in smem.ds for ref in panels.tiles(copy, at)]
        if not plan.dq.by_columns:
            parts = panels.tiles(smem.k, u + zero)
        elif plan.format.qk.panels:
            parts = (smem.k_halves.tile.at[wg, u],)
        else:
            parts = (smem.k.at[u, :, pl.ds(wg * plan.dq_widths[0], plan.dq_widths[0])],)
        for acc, k in zip(accs, parts, strict=True):
            ds = copies[0 if len(copies) == 1 else widths.index(k.shape[1])]
            plgpu.wgmma(acc, ds.transpose((1, 0)), k)


# ---- the ways of dQ ------------------------------------------------------------------------------


class ByColumns:
    """Query tiles of 64 rows: each warpgroup takes half of the columns, puts them in shared memory,
    and TMA adds them.
    """

    by_columns = True

    def staging(self, plan: KeyPlan) -> Panels:
        """Shared memory for `add`."""
        shape = WARPGROUPS, ROWS, *plan.dq_widths
        return mosaic.swizzled(shape, jnp.float32, tma_operands.swizzle_of(4 * plan.dq_widths[0]))

    def zeros(self, plan: KeyPlan) -> jax.ShapeDtypeStruct:
        """The array to which dQ is added: whole swizzles. TMA leaves out columns past its last."""
        problem, columns = plan.problem, plan.dq_widths[0]
        rows = tma_operands.round_up(problem.q_len, WARPGROUPS * ROWS)
        width = tma_operands.round_up(problem.head_dim, tma_operands.swizzle_of(4 * columns) // 4)
        if width <= columns:  # the second share is past the last column
            width = sum(plan.format.widths[0])
        return jax.ShapeDtypeStruct((problem.batch, rows, problem.q_heads, width), jnp.float32)

    def add(
        self, at: tuple[KernelContext, KeyTile, Index], step: PendingDq, parts: RegisterTiles
    ) -> None:
        """Adds a warpgroup's share. `at`: work tile and warpgroup."""
        ctx, _, wg = at
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        ctx.smem.dq[wg] = parts[0]
        self.store(at, step)

    def store(self, at: tuple[KernelContext, KeyTile, Index], step: PendingDq) -> None:
        """Adds what lies in shared memory."""
        (plan, refs, smem), work, wg = at
        plgpu.commit_smem()
        columns = pl.ds(wg * plan.dq_widths[0], plan.dq_widths[0])
        to = refs.dq.at[work.batch, pl.ds(step.t * ROWS, ROWS), step.head, columns]
        plgpu.copy_smem_to_gmem(smem.dq.at[wg], to, step.exists != 0, reduction_op="add")

    def finished(self, plan: KeyPlan, some: Sequence[Sums], dq: jax.Array) -> list[jax.Array]:
        """The gradients of `some` other sums, and dq, [B, T, N, H]."""
        problem, others = plan.problem, list[jax.Array]()
        if some:  # they are read first: L2 may still hold them
            others = step_parts.added(some)
            dq, *_ = lax.optimization_barrier((dq, *others))
        dq = dq[:, : problem.q_len, :, : problem.head_dim]
        return [*others, (dq * problem.scale).astype(problem.dtype)]


class ByRows:
    """Query tiles of 128 rows: each warpgroup takes 64 and adds them from registers, 16 bytes a
    thread. The array holds every half tile in the order in which threads hold it, and a launch
    reorders it (`step_parts`). At head dim 64 adding through shared memory takes longer.
    """

    by_columns = False

    def staging(self, plan: KeyPlan) -> Panels:
        del plan
        return None

    def zeros(self, plan: KeyPlan) -> jax.ShapeDtypeStruct | None:
        """The array to which dq is added."""
        numbers = self._pieces(plan) * ROWS * sum(plan.dq_widths)
        return jax.ShapeDtypeStruct((numbers,), jnp.float32)

    def _tiles(self, plan: KeyPlan) -> int:
        """Query tiles of a head."""
        return pl.cdiv(plan.problem.q_len, plan.config.block_q)

    def _pieces(self, plan: KeyPlan) -> int:
        """Shares of all query tiles."""
        return plan.problem.batch * plan.problem.q_heads * self._tiles(plan) * WARPGROUPS

    def add(
        self, at: tuple[KernelContext, KeyTile, Index], step: PendingDq, parts: RegisterTiles
    ) -> None:
        (plan, refs, _), work, wg = at
        head, before = work.batch * plan.problem.q_heads + step.head, 0
        number = (head * self._tiles(plan) + step.t) * WARPGROUPS + wg
        for dq in parts:
            first = before * self._pieces(plan) // dq.shape[1]
            thread_pieces.add(refs.dq, number + first if first else number, dq, step.exists)
            before += dq.shape[1]

    def finished(self, plan: KeyPlan, some: Sequence[Sums], dq: jax.Array) -> list[jax.Array]:
        in_head = self._tiles(plan) * WARPGROUPS
        sums = step_parts.of_dq(plan.problem, dq, plan.dq_widths, in_head)
        return step_parts.added([*some, sums])


class Written(ByRows):
    """dq is written by rows, at once."""

    def staging(self, plan: KeyPlan) -> Panels:
        """Shared memory for the rows of both warpgroups on their way to dq."""
        dtype = plan.problem.dtype
        return tuple(panels.scratch((2, ROWS), dtype, width) for width in plan.dq_widths)

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
