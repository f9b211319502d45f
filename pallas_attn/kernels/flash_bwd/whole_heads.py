"""The fused Hopper backward of heads that blocks take whole: ViT-L, BERT, pair bias, and attention
to no more than 128 keys. Head dims up to 64, whose query tiles have 128 rows.

A block takes all kv tiles of a head, one after another, and so is alone in adding up its dQ. The
float32 sums of one head a block stay in L2: nothing is set to zero before, and no launch rounds
afterwards. Each thread meets the same numbers of dQ at every kv tile: it stores them at the first,
adds to them at the next ones, and at the last one adds what was loaded during the step to its own,
and writes dq. So warpgroups do not wait for each other, and bits repeat.
"""

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.flash_bwd import sm90_short
from pallas_attn.kernels.flash_bwd.key_tiles import KeyTile, KeyTiling
from pallas_attn.kernels.flash_fwd import tile_scheduler
from pallas_attn.kernels.lang.types import Barrier, Index, Predicate, RegisterTile, SmemRef
from pallas_attn.kernels.mma import mma_rowmajor, mma_sync, thread_pieces

if TYPE_CHECKING:
    from pallas_attn.kernels.flash_bwd.dq_sum import PendingDq
    from pallas_attn.kernels.flash_bwd.plan import KeyPlan
    from pallas_attn.kernels.flash_bwd.work_order import WorkOrder

LINE = 256  # numbers of a line of a piece, as TMA copies it


def takes(tiling: KeyTiling) -> bool:
    """Whether every query of a head meets every key that a mask of keys shows."""
    problem = tiling.problem
    others = {"bias", "mask_array"} if tiling.reads_key_mask else {"bias"}
    arrays = tuple(name for name in problem.arrays if name not in others)
    share = problem.share if problem.arrays else 1
    plain = sm90_short.is_plain(dataclasses.replace(problem, arrays=arrays, share=share))
    fits = max(problem.head_dim, problem.v_head_dim) <= ROWS and tiling.block_q == 2 * ROWS
    return plain and problem.mask.is_full and fits and min(problem.q_len, tiling.kv_tiles) > 0


def schedule(order: "WorkOrder") -> np.ndarray:
    """`tile_scheduler.table_of` heads `block`, `block + grid`, .. of each block."""
    heads, bits = np.arange(order.heads)[:, None], order.code_bits
    codes = (heads << bits) + np.arange(order.tiling.kv_tiles)
    return tile_scheduler.table_of(
        [codes[block :: order.grid].ravel().tolist() for block in range(order.grid)]
    )


def _width(plan: "KeyPlan") -> int:
    """Columns of dQ in shared memory."""
    (width,) = plan.format.qk.panels or (plan.format.qk.width,)
    return width


def outputs(plan: "KeyPlan") -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """dq, and the sums of the blocks' heads, which nothing has to read afterwards: a piece for each
    64 rows, see `thread_pieces`.
    """
    problem, pieces = plan.problem, plan.order.grid * plan.tiling.q_tiles * 2
    shape = problem.batch, problem.q_len, problem.q_heads, problem.head_dim
    sums = jax.ShapeDtypeStruct((pieces, *_piece(plan)), jnp.float32)
    return jax.ShapeDtypeStruct(shape, problem.dtype), sums


def _piece(plan: "KeyPlan") -> tuple[int, int]:
    return ROWS * _width(plan) // LINE, LINE


def staging(plan: "KeyPlan") -> SmemRef:
    """Shared memory for a piece of each warpgroup, or None where heads have one kv tile."""
    return plgpu.SMEM((2, *_piece(plan)), jnp.float32) if plan.tiling.kv_tiles > 1 else None


def barriers(plan: "KeyPlan") -> Barrier | None:
    """Those at which the pieces have arrived in `staging`."""
    several = plan.config.whole_heads and plan.tiling.kv_tiles > 1
    return plgpu.Barrier(num_arrivals=1, num_barriers=2) if several else None


class Turn(NamedTuple):
    """The place of a kv tile in its head."""

    is_first: Predicate
    is_last: Predicate  # of those with a visible key


def turn_of(ctx: KernelContext, batch: Index, tile: Index) -> Turn:
    """The turn of kv tile `tile`. The first tile of a head has steps even if its keys are hidden:
    it begins the sums.
    """
    kv_tiles, codes = ctx.plan.tiling.kv_tiles, ctx.refs.key_tiles
    if codes is None:
        return Turn(tile == 0, tile == kv_tiles - 1)
    row, last = batch if codes.shape[0] > 1 else 0, jnp.int32(0)
    for n in range(1, kv_tiles):
        last = jnp.where(codes[row, 0, n] > 0, n, last)
    return Turn(tile == 0, tile == last)


def _number(ctx: KernelContext, wg: Index, t: Index) -> Index:
    """The piece of a warpgroup's rows of query tile t."""
    return (lax.axis_index("block") * ctx.plan.tiling.q_tiles + t) * 2 + wg


def load_sums(ctx: KernelContext, work: KeyTile, wg: Index, due: "PendingDq") -> None:
    """At the last kv tile of several: issues the load of what the others have added to the dQ of a
    step. Before the first such load, adds of all threads are ordered before it.
    """
    smem, refs = ctx.smem, ctx.refs
    if smem.sums_ready is None:
        return
    assert work.turn is not None
    here = work.turn.is_last & jnp.logical_not(work.turn.is_first)
    pl.when(here & (due.exists == 0))(thread_pieces.order_before_copies)

    @pl.when(here & (due.exists != 0))
    def _() -> None:
        piece = refs.dq_sums.at[_number(ctx, wg, due.t)]
        plgpu.copy_gmem_to_smem(piece, smem.dq.at[wg], smem.sums_ready.at[wg])


def add(ctx: KernelContext, work: KeyTile, wg: Index, due: "PendingDq", dq: RegisterTile) -> None:
    """Adds a warpgroup's rows of the dQ of a step to the sums of its head, or writes dq."""
    plan, refs, smem = ctx
    problem, exists, number = plan.problem, due.exists != 0, _number(ctx, wg, due.t)
    assert work.turn is not None
    is_first, is_last = work.turn
    if smem.sums_ready is not None:
        goes_on = exists & jnp.logical_not(is_last)
        begins, adds = goes_on & is_first, goes_on & jnp.logical_not(is_first)
        thread_pieces.store(refs.dq_sums, number, dq, begins.astype(jnp.int32))
        mma_rowmajor.add(refs.dq_sums, number, dq, adds.astype(jnp.int32))

    def with_sums() -> RegisterTile:
        plgpu.barrier_wait(smem.sums_ready.at[wg])
        total = dq + thread_pieces.load(smem.dq, wg, dq.shape)
        plgpu.commit_smem()  # they have been read, and the next ones will be written there
        return total

    @pl.when(exists & is_last)
    def _() -> None:
        total = dq if smem.sums_ready is None else lax.cond(is_first, lambda: dq, with_sums)
        row = (due.t * 2 + wg) * ROWS
        where = work.batch, due.head, row, problem.q_len - row
        mma_sync.write((total * problem.scale).astype(problem.dtype), refs.dq, where)
