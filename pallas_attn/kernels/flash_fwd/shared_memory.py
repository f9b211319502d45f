"""Shared memory of the Hopper forward. The docstring of sm90.py says who owns which buffer when."""

import functools
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_attn._call.special import Special
from pallas_attn.kernels.attention import tma_operands
from pallas_attn.kernels.attention.tile_scheduler import QueryPlan
from pallas_attn.kernels.attention.tiles import ROWS
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.mosaic import BARRIERS, SMEM_LIMIT
from pallas_attn.kernels.lang.types import Barrier, SmemRef

claims = Special("kernels.attention.claims")
documents = Special("kernels.flash_fwd.documents")
fetch = Special("kernels.flash_fwd.fetch")
score_tiles = Special("kernels.attention.score_tiles")


class Smem(NamedTuple):
    """The buffers of a block, and its barriers."""

    q: SmemRef  # [q tiles, ROWS, ..]
    k: SmemRef  # [stages, block_kv, ..]
    v: SmemRef  # [stages, block_kv, ..]
    out: SmemRef  # [warpgroups, ROWS, ..]
    segments: Any  # `documents.Smem`, where there are segment ids
    q_ready: Barrier  # one a q tile
    ready: Barrier  # one an entry of the ring: see `Ring`
    free: Barrier
    fetched: Any = None  # barriers of `fetch`, as words
    claims: Any = None  # `claims.Smem`
    bias_and_mask: Any = None  # [stages, rows, block_kv] of bias and mask_array: `score_tiles`


@functools.lru_cache(maxsize=256)
def scratch(plan: QueryPlan) -> Smem:
    """Shared memory, described once: `run` launches it, `smem_bytes` adds it up."""
    loaded_apart = plan.problem.dtype == "float32" or plan.problem.fetches > 1
    if plan.value_rows != plan.config.block_kv and loaded_apart:
        raise ValueError(
            f"Config.block_kv must be a multiple of {plan.v.swizzle // plan.v.itemsize} where "
            f"v_head_dim is {plan.problem.v_head_dim}, for float32 and for keys of other devices: "
            f"matmuls take probabilities by whole swizzles. Got {plan.config.block_kv}"
        )
    q_slots = _q_slots(plan)
    return _scratch(plan, q_slots, out_widths(plan, _room(plan, q_slots)))


def _scratch(plan: QueryPlan, q_slots: int, widths: tuple[int, ...]) -> Smem:
    problem, config = plan.problem, plan.config
    q_tiles, ring = q_slots * config.warpgroups, (config.stages, config.block_kv)
    segments, fetched, claimed = None, None, None
    if "q_segment_ids" in problem.arrays:
        segments = documents.scratch(q_tiles, *ring)
    if problem.fetches > 1:
        fetched = fetch.scratch()
    if plan.order.claims:
        claimed = claims.scratch()
    bias_and_mask, score_copies = None, 0
    if plan.score_tiles:
        bias_and_mask = score_tiles.scratch(plan.score_tiles, config.stages, plan.tiling.tile_rows)
        score_copies = score_tiles.copies(plan.score_tiles)
    ids, barrier = int(segments is not None), plgpu.Barrier
    entry = sum(plan.copies) + ids + score_copies
    return Smem(
        q=plan.qk.scratch(q_tiles, ROWS),
        k=plan.qk.scratch(*ring),
        v=plan.v.scratch(config.stages, plan.value_rows),
        out=out_scratch(plan, widths),
        segments=segments,
        q_ready=barrier(num_barriers=q_tiles, num_arrivals=plan.copies[0] + 2 * ids),
        ready=barrier(num_barriers=config.stages, num_arrivals=entry),
        free=barrier(num_barriers=config.stages, num_arrivals=config.warpgroups),
        fetched=fetched,
        claims=claimed,
        bias_and_mask=bias_and_mask,
    )


def _room(plan: QueryPlan, q_slots: int) -> int:
    return room_beside(_scratch(plan, q_slots, ()))


def room_beside(others: Smem) -> int:
    """Bytes of shared memory that are left for the output."""
    return SMEM_LIMIT - BARRIERS - mosaic.REDUCTION_BYTES - mosaic.bytes_of(others)


def _q_slots(plan: QueryPlan) -> int:
    """The slots of q: those of the Config where there is room, else one."""
    itemsize = jnp.dtype(plan.problem.result_dtype).itemsize
    whole = plan.config.warpgroups * ROWS * plan.v.width * itemsize
    return plan.config.q_slots if _room(plan, 2) >= whole // 2 else 1


def out_widths(plan: QueryPlan, room: int) -> tuple[int, ...]:
    """Columns of the output in shared memory at a time, by buffer: as many as `room` bytes hold."""
    itemsize = jnp.dtype(plan.problem.result_dtype).itemsize
    row = itemsize * plan.config.warpgroups * ROWS
    if plan.v.panels:
        whole, rest = wide_and_rest(plan.v.panels)
        counts = range(len(whole), 1, -1)
        held = next((n for n in counts if row * sum(whole[:n] + rest) <= room), len(whole[:1]))
        return whole[:held] + rest
    swizzle = _out_swizzle(plan) // itemsize
    widths = [n for n in range(plan.v.width, 0, -swizzle) if plan.v.width % n == 0]
    return (next((n for n in widths if row * n <= room), swizzle),)


def wide_and_rest(widths: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The panels that are as wide as the first one; the narrower last one, if there is one."""
    wide = widths.count(widths[0])
    return widths[:wide], widths[wide:]


def _out_swizzle(plan: QueryPlan) -> int:
    if plan.problem.dtype == plan.problem.result_dtype != "float32":
        return plan.v.swizzle
    itemsize = jnp.dtype(plan.problem.result_dtype).itemsize
    return tma_operands.swizzle_of(plan.v.width * itemsize)


def out_scratch(plan: QueryPlan, widths: tuple[int, ...]) -> Any:
    """Shared memory for the output, by `out_widths`; () where they are not known yet."""
    shape, dtype = (plan.config.warpgroups, ROWS), plan.problem.result_dtype
    if not widths:
        return None
    if plan.v.panels:
        return tuple(panels.scratch(shape, dtype, width) for width in widths)
    return mosaic.swizzled((*shape, *widths), dtype, _out_swizzle(plan))


def bytes_of(plan: QueryPlan) -> int:
    """All of a block's shared memory."""
    return mosaic.bytes_of(scratch(plan)) + BARRIERS + mosaic.REDUCTION_BYTES
