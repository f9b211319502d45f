"""The forward kernel's shared memory on Hopper, and what fills it."""

import functools
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn import _gpus
from pallas_attn._problem import AttentionProblem
from pallas_attn.kernels.attention import score_mod, tma_operands
from pallas_attn.kernels.attention.plan import ROWS, Plan
from pallas_attn.kernels.attention.score_mod import Refs, Tile
from pallas_attn.kernels.flash_fwd import tile_scheduler
from pallas_attn.kernels.lang import mosaic

SMEM_LIMIT = _gpus.shared_memory(_gpus.HOPPER)
BARRIERS = 1024  # bytes kept for them and for alignment
LINE = 1024  # bytes: every buffer begins at a multiple


class Smem(NamedTuple):
    q: Any
    k: Any
    v: Any
    out: Any
    q_ids: Any  # segments of the queries, None where there are none
    kv_ids: Any
    spans: Any  # of a tile of work: see `tile_scheduler.record`
    q_ready: Any
    ready: Any
    free: Any


def scratch(plan: Plan) -> Smem:
    """Shared memory, described once: `run` launches it, `smem_bytes` adds it up."""
    config, out = plan.config, plan.problem.dtype
    whole = plan.v_swizzle // plan.values.itemsize
    if config.block_kv % whole:
        raise ValueError(
            f"Config.block_kv must be a multiple of {whole} where v_head_dim is "
            f"{plan.problem.v_head_dim}: matmuls take probabilities by whole swizzles. "
            f"Got {config.block_kv}"
        )
    barrier = plgpu.Barrier
    k_columns, v_columns = plan.scores.terms * plan.k_width, plan.values.terms * plan.v_width
    q_tiles, ids = _q_slots(plan) * config.warpgroups, plan.has("q_segment_ids")
    return Smem(
        q=mosaic.swizzled((q_tiles, ROWS, k_columns), plan.scores.dtype, plan.k_swizzle),
        k=mosaic.swizzled(
            (config.stages, config.block_kv, k_columns), plan.scores.dtype, plan.k_swizzle
        ),
        v=mosaic.swizzled(
            (config.stages, config.block_kv, v_columns), plan.values.dtype, plan.v_swizzle
        ),
        out=mosaic.swizzled((config.warpgroups, ROWS, _out_width(plan)), out, _out_swizzle(plan)),
        q_ids=plgpu.SMEM((q_tiles, ROWS), jnp.int32) if ids else None,
        kv_ids=plgpu.SMEM((config.stages, _ids_loaded(plan)), jnp.int32) if ids else None,
        spans=plgpu.SMEM((q_tiles, tile_scheduler.RECORD), jnp.int32) if ids else None,
        q_ready=barrier(num_barriers=q_tiles, num_arrivals=3 if ids else 1),
        ready=barrier(num_barriers=config.stages, num_arrivals=3 if ids else 2),
        free=barrier(num_barriers=config.stages, num_arrivals=config.warpgroups),
    )


def _out_swizzle(plan: Plan) -> int:
    if plan.problem.dtype != "float32":
        return plan.v_swizzle
    return tma_operands.swizzle_of(plan.v_width * 4)


def _ids_loaded(plan: Plan) -> int:
    """Of a key tile: TMA writes to whole 128 bytes."""
    return max(plan.config.block_kv, 32)


def _room(plan: Plan, q_slots: int) -> int:
    """Bytes of shared memory that q, k, v, segments and barriers leave for the output."""
    config = plan.config
    q_tiles = q_slots * config.warpgroups
    k_row, v_row = plan.k_width * plan.scores.bytes, plan.v_width * plan.values.bytes
    taken = [q_tiles * ROWS * k_row, *(config.stages * config.block_kv * n for n in (k_row, v_row))]
    if plan.has("q_segment_ids"):
        ids = q_tiles * ROWS, config.stages * _ids_loaded(plan), q_tiles * tile_scheduler.RECORD
        taken += [4 * n for n in ids]
    return SMEM_LIMIT - BARRIERS - sum(tma_operands.round_up(n, LINE) for n in taken)


def _q_slots(plan: Plan) -> int:
    """As many as were asked for, where there is room."""
    whole = plan.config.warpgroups * ROWS * plan.v_width * jnp.dtype(plan.problem.dtype).itemsize
    return plan.config.q_slots if _room(plan, 2) >= whole // 2 else 1


def _out_width(plan: Plan) -> int:
    """Columns of the output that leave at once: as many as there is room for."""
    config, itemsize = plan.config, jnp.dtype(plan.problem.dtype).itemsize
    rest, swizzle = _room(plan, _q_slots(plan)), _out_swizzle(plan) // itemsize
    for width in range(plan.v_width, 0, -swizzle):
        if plan.v_width % width == 0 and itemsize * config.warpgroups * ROWS * width <= rest:
            return width
    return swizzle


def smem_bytes(problem: AttentionProblem, config: Any) -> int:
    return mosaic.bytes_of(scratch(Plan(problem, config))) + BARRIERS


def next_slot(plan: Plan, slot: Any) -> Any:
    return jnp.where(slot == plan.config.stages - 1, 0, slot + 1)


def load(plan: Plan, refs: Refs, smem: Smem, cta: Any) -> None:
    """The loading warpgroup: K and V of every tile of work, in the order in which they are used."""

    def known(code):
        return tile_scheduler.ends(plan, refs, score_mod.tile_of(plan, refs, code))

    def one_tile(i, carry):
        count, code, ends = carry
        following = refs.dealt[cta, i + 2]
        tile = score_mod.tile_of(plan, refs, code)
        record = None if ends is None else lambda i: ends.get(i, 0)
        lo, hi = tile_scheduler.block_span(plan, record, tile)
        ends = known(following)  # asked for long before it is needed

        def entry(e, count):
            slot = lax.rem(count, jnp.int32(plan.config.stages))
            pl.when(count >= plan.config.stages)(lambda: plgpu.barrier_wait(smem.free.at[slot]))
            _load_entry(plan, refs, smem, tile, (e, hi - lo, hi - 1 - e, slot))
            return count + 1

        count = lax.fori_loop(0, jnp.where(hi > lo, hi - lo + 1, 0), entry, count)
        return count, following, ends

    first = refs.dealt[cta, 1]
    lax.fori_loop(0, refs.dealt[cta, 0], one_tile, (jnp.int32(0), first, known(first)))


def _load_entry(plan: Plan, refs: Refs, smem: Smem, tile: Tile, entry: tuple[Any, ...]) -> None:
    """Key tile t and the value tile before it; the first entry has no values, the last no keys."""
    e, last, t, slot = entry
    block, ready = plan.config.block_kv, smem.ready.at[slot]
    head = lax.div(tile.head, jnp.int32(plan.problem.group))

    def copy(ref, first, width, to):
        src = ref.at[tile.batch, pl.ds(first, block), head, mosaic.columns(ref, 0, width, head)]
        plgpu.copy_gmem_to_smem(src, to, ready)

    k_columns, v_columns = (ref.shape[-1] for ref in (smem.k, smem.v))

    def values():
        if not plan.has("kv_lengths"):
            return copy(refs.v, (t + 1) * block, v_columns, smem.v.at[slot])
        cut = (t + 2) * block > tile.kv_len  # only the last tile may be
        pl.when(cut)(lambda: copy(refs.v_edge, 0, v_columns, smem.v.at[slot]))
        whole = functools.partial(copy, refs.v, (t + 1) * block, v_columns, smem.v.at[slot])
        return pl.when(jnp.logical_not(cut))(whole)

    nothing = functools.partial(plgpu.barrier_arrive, ready)

    @pl.when(e < last)
    def _():
        copy(refs.k, t * block, k_columns, smem.k.at[slot])
        if smem.kv_ids is not None:
            ids = refs.kv_segment_ids.at[tile.batch, pl.ds(t * block, smem.kv_ids.shape[1])]
            plgpu.copy_gmem_to_smem(ids, smem.kv_ids.at[slot], ready)

    @pl.when(e == last)
    def _():
        nothing()
        if smem.kv_ids is not None:
            nothing()

    pl.when(e > 0)(values)
    pl.when(e == 0)(nothing)


def load_q(plan: Plan, refs: Refs, smem: Smem, tile: Tile, to: tuple[Any, Any]) -> None:
    """The rows of a warpgroup, and what is known of them."""
    wg, slot = to
    at, ready = smem.q.at[slot], smem.q_ready.at[slot]
    rows = pl.ds(tile.row + wg * ROWS, ROWS)
    columns = mosaic.columns(refs.q, 0, smem.q.shape[-1], tile.head)
    plgpu.copy_gmem_to_smem(refs.q.at[tile.batch, rows, tile.head, columns], at, ready)
    if smem.q_ids is not None:
        ids = refs.q_segment_ids.at[tile.batch, rows]
        plgpu.copy_gmem_to_smem(ids, smem.q_ids.at[slot], ready)
        number = lax.div(tile.row, jnp.int32(plan.tile_rows))
        record = refs.segment_spans.at[tile.batch, number]
        plgpu.copy_gmem_to_smem(record, smem.spans.at[slot], ready)
