"""What a block of prefill's kernel has in shared memory, and what it reads and writes in global
memory.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_attn._call.problem import DecodeProblem
from pallas_attn.kernels.attention.plan import ROWS
from pallas_attn.kernels.decode import sm90 as decode_sm90
from pallas_attn.kernels.flash_fwd.sm90 import BARRIERS
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.prefill import narrow_producer, tile_count
from pallas_attn.kernels.prefill.plan import Plan


class Smem(NamedTuple):
    """Shared memory; `sm90` says who owns it when."""

    q: Any  # [q tiles, ROWS, ..]
    k: Any  # [stages, block_kv, ..]
    v: Any  # [stages, block_kv, ..]
    out: Any  # [warpgroups, ROWS, ..]
    lost: Any  # int32[warpgroups]: 1 where a page of the unit's sequence is missing
    q_ready: Any  # barriers, one a q tile
    ready: Any  # barriers, one an entry of the ring
    free: Any
    landed: Any  # a barrier: the value tile that the length cuts is there
    turns: Any = None  # barriers, one a consumer: it may issue its matmuls
    # Where rows are packed:
    sums: Any = None  # int32: `tile_count.Tiles`
    counted: Any = None  # a barrier: they are there
    kv_ids: Any = None  # segments, which the mainloop asks for
    narrow: Any = None  # of a quantised cache: `narrow_producer.Slots`


def scratch(plan: Plan) -> Any:
    """Shared memory, described once: `run` launches it, `smem_bytes` adds it up. Where blocks of
    the launch may decode, (`Smem` without tiles, its tiles or what each warpgroup then has).
    """
    smem = _scratch(plan)
    if plan.own is None:
        return smem
    tiles, (own, warpgroups) = (smem.q, smem.k, smem.v), plan.own
    buffers = decode_sm90.scratch(own)
    of_each = jax.tree.map(lambda x: plgpu.SMEM((warpgroups, *x.shape), x.dtype), buffers)
    union = plgpu.RefUnion(tiles, of_each)
    return smem._replace(q=None, k=None, v=None), union


def _scratch(plan: Plan) -> Smem:
    config, dtype, barrier = plan.config, plan.problem.dtype, plgpu.Barrier
    q_tiles, ring = config.q_slots * config.warpgroups, (config.stages, config.block_kv)
    out = (config.warpgroups, ROWS, plan.v_swizzle // 2)
    copies, packed = barrier(num_barriers=q_tiles, num_arrivals=plan.tile_heads), plan.packed
    arrivals = plan.producers if plan.quantized else 2 * plan.copies
    return Smem(
        q=mosaic.swizzled((q_tiles, ROWS, plan.k_width), dtype, plan.k_swizzle),
        k=mosaic.swizzled((*ring, plan.k_width), dtype, plan.k_swizzle),
        v=mosaic.swizzled((*ring, plan.v_width), dtype, plan.v_swizzle),
        out=None if packed else mosaic.swizzled(out, dtype, plan.v_swizzle),
        lost=plgpu.SMEM((config.warpgroups,), jnp.int32),
        q_ready=None if packed else copies,
        ready=barrier(num_barriers=config.stages, num_arrivals=arrivals),
        free=barrier(num_barriers=config.stages, num_arrivals=config.warpgroups),
        landed=barrier(num_barriers=1, num_arrivals=plan.copies),
        turns=barrier(num_barriers=config.warpgroups) if config.in_turn else None,
        sums=tile_count.sum_type(plan) if packed else None,
        counted=barrier(num_barriers=1, num_arrivals=1) if packed else None,
        narrow=narrow_producer.slots(plan) if plan.quantized else None,
    )


def smem_bytes(problem: DecodeProblem, config: Any) -> int:
    return bytes_of(Plan.of(problem, config))


def bytes_of(plan: Plan) -> int:
    return mosaic.bytes_of(scratch(plan)) + BARRIERS + mosaic.REDUCED


class Refs(NamedTuple):
    """Global memory."""

    q: Any  # [M, t, N, H]; packed [tokens, N, H]
    k: tuple[Any, ...]  # in the form of `Layout.view`: of each sequence, or one of all
    v: tuple[Any, ...]
    lengths: Any  # int32[M]
    new_lengths: Any  # int32[M]: negative where `extend` has not been
    capacities: Any  # int32[M], where they differ
    page_table: Any
    layer: Any  # int32[1]
    sinks: Any  # float32[N]
    mask_left: Any  # int32[1], where the bound arrives at run time; [M] of contiguous keys
    mask_right: Any
    q_offset: Any = None  # int32[M]: of contiguous keys, as the next
    q_lengths: Any = None  # int32[M]
    starts: Any = None  # int32[M + 1], where rows are packed
    rows: Any = None  # int32[tokens]: of q, where packed rows are copies of them
    own: Any = None  # `decode.producer.Refs`, where other blocks of the launch decode
    tables: Any = None  # of a quantised cache, in place of k and v: `Layout.tables`
    results: tuple[Any, ...] = ()  # written: out and lse, or partials
    units: Any = None  # powers of 2, which the mainloop asks for
    mask_aux: Any = ()  # what a function of positions reads: `functions.flat`
