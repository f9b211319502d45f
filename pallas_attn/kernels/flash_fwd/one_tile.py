"""The Hopper forward where the keys of a head are one kv tile: windows of 49 or 64 rows (Swin),
short sentences.

A step of the usual mainloop overlaps two matmuls of neighbouring kv tiles. A head of one kv tile
has no neighbouring tiles, and a block that takes one head at a time mostly waits for loads. Here
each consumer warpgroup takes work tiles of its own, of 64 rows each, loads q, k and v of the next
one while it computes this one, and waits for no other warpgroup.
"""

import functools

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import FLOAT8, AttentionProblem
from pallas_attn.kernels.attention import logits, softmax
from pallas_attn.kernels.attention.softmax import OutputSums
from pallas_attn.kernels.attention.tile_scheduler import (
    StaticList,
    Turn,
    span_of_rows,
    work_tile,
)
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext, QueryRows
from pallas_attn.kernels.flash_fwd import warpgroups
from pallas_attn.kernels.flash_fwd.shared_memory import SLOTS_APART
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.types import Index
from pallas_attn.kernels.mma import wgmma

WORK_TILES = StaticList(ahead=2)


def takes(problem: AttentionProblem, block_kv: int) -> bool:
    """Whether the keys of a head are one kv tile, which only the mask and lengths restrict."""
    others = problem.fetches > 1 or problem.zigzag > 1 or problem.mask_program is not None
    segments = "q_segment_ids" in problem.arrays
    others = others or segments or problem.dtype in ("float32", *FLOAT8)
    return not others and problem.kv_len <= block_kv


def check(problem: AttentionProblem, block_kv: int) -> None:
    """Raises the ValueError for a Config that makes consumers independent where they cannot be."""
    if not takes(problem, block_kv):
        raise ValueError(f"Config.independent must be False for {problem} and block_kv {block_kv}")


def consume(ctx: KernelContext, block: Index, wg: Index) -> None:
    """All work tiles of a warpgroup."""
    plan, smem = ctx.plan, ctx.smem
    own = block * plan.config.warpgroups + wg
    start = WORK_TILES.start(ctx, own)

    def slot_of(i: Index) -> Index:
        return wg * SLOTS_APART + (i & 1)

    def load(code: Index, i: Index) -> None:
        tile, slot = work_tile(ctx, code), slot_of(i)
        warpgroups.load_q(ctx, tile, jnp.int32(0), slot)
        for name in "kv":
            warpgroups.load_kv_tile(ctx, tile, name, jnp.int32(0), slot)

    def no_keys() -> OutputSums:
        return OutputSums.nothing(warpgroups.no_values(plan.v), ROWS)

    def one_tile(turn: Turn, carry: tuple[()]) -> tuple[()]:
        # All warps have read the slot: they met in the epilogue of the work tile before.
        pl.when(turn.has_next())(lambda: load(turn.following, turn.index + 1))
        tile, slot = work_tile(ctx, turn.code), slot_of(turn.index)
        rows = QueryRows(tile, tile.row, wg, span_of_rows(plan, tile, jnp.int32(0)), slot)
        plgpu.barrier_wait(smem.q_ready.at[slot])
        plgpu.barrier_wait(smem.ready.at[slot])
        attend = functools.partial(_attend, ctx, rows)
        if "empty" in plan.sections:
            has_keys = rows.span.hi > rows.span.lo
            result = lax.cond(has_keys, attend, no_keys)
        else:
            result = attend()
        warpgroups.store_result(ctx, rows, result)
        return carry

    pl.when(start.count > 0)(lambda: load(start.codes[0], jnp.int32(0)))
    WORK_TILES.for_each_tile(ctx, own, start, one_tile, ())
    plgpu.wait_smem_to_gmem(0)


def _attend(ctx: KernelContext, rows: QueryRows) -> OutputSums:
    """The rows' only kv tile."""
    plan, smem, slot = ctx.plan, ctx.smem, rows.q_slot
    q, k, v = (panels.tiles(x, slot) for x in (smem.q, smem.k, smem.v))
    s = wgmma.matmul((ROWS, k[0].shape[0]), q, k, issue=wgmma.score_panels)
    masked = "first_masked" in plan.sections
    if plan.rows_apart is not None:
        masked, rows = True, rows._replace(tile=rows.tile._replace(mask=plan.rows_apart))
    s, offset = logits.masked_logits(ctx, rows, 0, slot, s, masked)
    nothing = mosaic.filled((ROWS,), -jnp.inf)
    new = softmax.step(s, plan.logit_rules.unit, nothing, empty_ok=True, offset=offset)
    p = warpgroups.widened(new.p.astype(plan.v.dtype), v)
    acc = wgmma.add_value_panels(warpgroups.no_values(plan.v), p, v)
    return OutputSums(acc, new.row_sum, new.row_max)
