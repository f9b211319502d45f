"""The fused Hopper backward of heads that blocks take whole: ViT-L, SigLIP, and other encoders of
some hundred rows and many heads.

A block takes all kv tiles of a head, one after another, and so is alone in adding up its dQ. The
float32 sums of one head a block stay in L2: nothing is set to zero before, and no launch rounds
afterwards. Each thread meets the same numbers of dQ at every kv tile: it stores them at the first,
adds to them at the next ones, and at the last one reads them, adds its own, and writes dq. So no
thread waits for another, and bits repeat.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.flash_bwd import dq_rounding, sm90_short
from pallas_attn.kernels.flash_bwd.key_tiles import KeyTile, KeyTiling
from pallas_attn.kernels.flash_fwd import tile_scheduler
from pallas_attn.kernels.lang.types import Index, Predicate, RegisterTile
from pallas_attn.kernels.mma import mma_rowmajor, thread_pieces

if TYPE_CHECKING:
    from pallas_attn.kernels.flash_bwd.dq_sum import PendingDq
    from pallas_attn.kernels.flash_bwd.plan import KeyPlan
    from pallas_attn.kernels.flash_bwd.work_order import WorkOrder


def takes(tiling: KeyTiling) -> bool:
    """Whether every query of a head meets every key that a mask of keys shows."""
    problem = tiling.problem
    others = {"bias", "mask_array"} if tiling.reads_key_mask else {"bias"}
    arrays = tuple(name for name in problem.arrays if name not in others)
    plain = sm90_short.is_plain(dataclasses.replace(problem, arrays=arrays))
    widest = max(problem.head_dim, problem.v_head_dim)
    return plain and problem.mask.is_full and widest <= 128 and tiling.kv_tiles > 0


def schedule(order: "WorkOrder") -> np.ndarray:
    """`tile_scheduler.table_of` heads `block`, `block + grid`, .. of each block."""
    heads, bits = np.arange(order.heads)[:, None], order.code_bits
    codes = (heads << bits) + np.arange(order.tiling.kv_tiles)
    return tile_scheduler.table_of(
        [codes[block :: order.grid].ravel().tolist() for block in range(order.grid)]
    )


def outputs(plan: "KeyPlan") -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """dq, and the sums of the blocks' heads, which nothing has to read afterwards."""
    problem = plan.problem
    shape = problem.batch, problem.q_len, problem.q_heads, problem.head_dim
    sums = jax.ShapeDtypeStruct((_parts(plan)[1],), jnp.float32)
    return jax.ShapeDtypeStruct(shape, problem.dtype), sums


class Turn(NamedTuple):
    """The place of a kv tile among those of its head that have steps."""

    is_first: Predicate
    is_last: Predicate


def turn_of(ctx: KernelContext, batch: Index, tile: Index) -> Turn:
    """The turn of kv tile `tile`. Of a head whose keys are all hidden tile 0 writes dq."""
    kv_tiles, codes = ctx.plan.tiling.kv_tiles, ctx.refs.key_tiles
    if codes is None:
        return Turn(tile == 0, tile == kv_tiles - 1)
    row = batch if codes.shape[0] > 1 else 0
    first, last = jnp.int32(kv_tiles), jnp.int32(0)
    for n in range(kv_tiles):
        shows = codes[row, 0, n] > 0
        first = jnp.where(shows & (first == kv_tiles), n, first)
        last = jnp.where(shows, n, last)
    return Turn(tile == jnp.where(first == kv_tiles, 0, first), tile == last)


class Share(NamedTuple):
    """Columns of a part of a warpgroup's dQ of a query tile, where `exists`."""

    part: int
    first: int  # column of the part
    width: int
    number: Index  # its piece among those of its width: see `thread_pieces`
    row: Index  # of dq, as `column`
    column: Index
    exists: Predicate


def _parts(plan: "KeyPlan") -> tuple[list[tuple[int, int, int, int]], int]:
    """Part, first column, number of columns, and first piece of that width, of each share of a
    warpgroup; and the size of all pieces. Where warpgroups share the columns of dQ the second one
    has only those up to the head dim.
    """
    from pallas_attn.kernels.flash_bwd import dq_sum

    pieces = plan.order.grid * plan.tiling.q_tiles * 2  # those of all query tiles, for each block
    parts, size = list[tuple[int, int, int, int]](), 0
    for part, width in enumerate(dq_sum.share_widths(plan)):
        both = (
            width
            if plan.config.block_q > ROWS
            else max(0, min(width, plan.problem.head_dim - width))
        )
        for first, count in ((0, both), (both, width - both)):
            if count > 0:
                start = pl.cdiv(size, ROWS * count)
                parts.append((part, first, count, start))
                size = (start + pieces) * ROWS * count
    return parts, size


def _shares(ctx: KernelContext, wg: Index, t: Index) -> list[Share]:
    plan = ctx.plan
    number = (lax.axis_index("block") * plan.tiling.q_tiles + t) * 2 + wg
    by_rows = plan.config.block_q > ROWS
    row, shares, before = (t * 2 + wg) * ROWS if by_rows else t * ROWS, list[Share](), 0
    parts = _parts(plan)[0]
    whole = sum(width for _, _, width, _ in parts)  # columns of a warpgroup
    for part, first, width, start in parts:
        column = jnp.int32(before) if by_rows else wg * whole + first
        exists = column < plan.problem.head_dim
        shares.append(Share(part, first, width, number + start, row, column, exists))
        before += width
    return shares


def add(
    ctx: KernelContext, work: KeyTile, wg: Index, due: "PendingDq", parts: Sequence[RegisterTile]
) -> None:
    """Adds a warpgroup's share of the dQ of a step to the sums of its head, or writes dq. The sums
    are loaded behind a branch: on their way during the matmuls before they would be spilled.
    """
    plan, refs, _ = ctx
    problem = plan.problem
    assert work.turn is not None
    is_first, is_last = work.turn
    for share in _shares(ctx, wg, due.t):
        last = share.first + share.width
        dq, exists = lax.slice(parts[share.part], (0, share.first), (ROWS, last)), due.exists != 0
        exists = exists & share.exists
        goes_on = exists & jnp.logical_not(is_last)
        begins, adds = goes_on & is_first, goes_on & jnp.logical_not(is_first)
        thread_pieces.store(refs.dq_sums, share.number, dq, begins.astype(jnp.int32))
        mma_rowmajor.add(refs.dq_sums, share.number, dq, adds.astype(jnp.int32))

        def with_sums(share: Share = share, dq: RegisterTile = dq) -> RegisterTile:
            return dq + thread_pieces.load(refs.dq_sums, share.number, (ROWS, share.width))

        def write(share: Share = share, dq: RegisterTile = dq, rest: Any = with_sums) -> None:
            total, head = lax.cond(is_first, lambda: dq, rest), (work.batch, due.head)
            dq_rounding.write(problem, total, refs.dq, head, share.row, share.column)

        pl.when(exists & is_last)(write)
