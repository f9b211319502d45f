"""Decode attention over a latent cache in FlashMLA's format, 656 bytes a row, for Hopper.

`sm90_few_rows` computes. Between it and the producer are two warpgroups that widen: rows come as
they lie in memory, 16 at a time, to a ring of raw rows; each tile is widened to q's dtype, a block
of columns after the other, in the ring from which matmuls read. A number is multiplied by its scale
in float32 and rounded once.

A block has up to 32 query rows. More heads are several launches, each of which reads all keys.

Warpgroups, and the barriers that they arrive at:
  0     computes: `free`, `q_free`
  1, 2  widen: `ready` when a block of columns is wide, `raw.free` when a tile's rows are
  3     the producer: `q_ready`, `raw.ready`, and `table_ready`, for which all others wait
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.byte_rows import BYTE_ROW
from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import cache_layout
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.decode import combine_splits, scheduler
from pallas_attn.kernels.decode.combine_splits import Outputs
from pallas_attn.kernels.decode.plan import Plan
from pallas_attn.kernels.decode.scheduler import Share, WorkTile
from pallas_attn.kernels.decode_mla import producer, sm90_few_rows
from pallas_attn.kernels.decode_mla.producer import TILE, Copy, LatentRefs, RingBlock, Stretch
from pallas_attn.kernels.decode_mla.sm90_few_rows import FewRowsSmem
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import Barrier, Index, KernelConfig, SmemRef
from pallas_attn.kernels.mma import byte_rows

Array = jax.Array

ROWS = 16  # rows of a slot of the raw ring
TILE_SLOTS = TILE // ROWS
WIDENERS = 2  # warpgroups that widen: each has every other block of columns
REGISTERS = 248, 88  # registers of a thread: of the warpgroup that computes, and of the others


def limit(problem: DecodeProblem) -> Limit | None:
    """Why this kernel cannot take rows of bytes, or None. `problem`: rows are not packed."""
    if problem.q_len > sm90_few_rows.MOST:
        return Limit(
            f"{problem.q_len} query rows over a latent cache of bytes; it takes up to "
            f"{sm90_few_rows.MOST}",
            "pack the rows (starts), which are then sequences of their own",
        )
    if problem.uses_head and of_heads(problem) != problem:
        return Limit(
            "a function of query heads over a latent cache of bytes, whose heads are split",
            f"call it for up to {sm90_few_rows.MOST // max(problem.q_len, 1)} heads at a time",
        )
    layout = cache_layout.layout_of(problem)
    if not layout.paged and max(problem.capacities) % TILE:
        return Limit(
            f"a latent cache of bytes of {max(problem.capacities)} rows",
            f"make the capacity a multiple of {TILE}",
        )
    return None


def of_heads(problem: DecodeProblem) -> DecodeProblem:
    """The problem of a launch: some of the heads, the same number in each if they divide so."""
    launches = -(-problem.q_heads // max(sm90_few_rows.MOST // max(problem.q_len, 1), 1))
    return dataclasses.replace(problem, q_heads=-(-problem.q_heads // launches))


@functools.lru_cache(maxsize=256)
def plan_of(problem: DecodeProblem, config: KernelConfig) -> Plan:
    plan = sm90_few_rows.plan_of(problem, config)
    rows = min(plan.keys.page_rows, ROWS)
    return dataclasses.replace(plan, keys=dataclasses.replace(plan.keys, page_rows=rows))


def slots_of(plan: Plan) -> int:
    """Slots of the raw ring: two tiles, if there is room beside queries and blocks of columns."""
    return 2 * TILE_SLOTS - (plan.queries.chunk_rows > sm90_few_rows.MOST // 2)


class Raw(NamedTuple):
    """Rows on their way, as they lie in memory."""

    rows: SmemRef  # uint8[slots, ROWS, bytes]
    ready: Barrier
    free: Barrier


def scratch(plan: Plan) -> FewRowsSmem:
    smem, barrier, slots = sm90_few_rows.scratch(plan), plgpu.Barrier, slots_of(plan)
    raw = Raw(
        plgpu.SMEM((slots, ROWS, BYTE_ROW.size), jnp.uint8),
        barrier(num_barriers=slots, num_arrivals=ROWS // plan.keys.page_rows),
        barrier(num_barriers=slots, num_arrivals=WIDENERS),
    )
    blocks = sm90_few_rows.columns_of(plan).ring
    return smem._replace(ready=barrier(num_barriers=blocks), raw=raw)


def _slot(ctx: KernelContext, number: Index) -> RingBlock:
    """The slot that holds the number-th 16 rows since the kernel began."""
    raw, slot = ctx.smem.raw, lax.rem(number, jnp.int32(slots_of(ctx.plan)))
    at = raw.rows, (slot,)
    return RingBlock(raw.rows.at[slot], raw.ready.at[slot], raw.free.at[slot], *at)


def _load(ctx: KernelContext, share: Share) -> None:
    """Q and the raw rows of all tiles of the block."""
    plan, smem = ctx.plan, ctx.smem
    everything, rows = pl.ds(0, BYTE_ROW.size), plan.keys.page_rows

    def one_work(work, number, count):
        pl.when(number > 0)(lambda: plgpu.barrier_wait(smem.q_free))
        sm90_few_rows.load_q(ctx, work)
        producer.check_skipped_pages(ctx, work)

        def one_tile(tile, carry):
            count, pages = carry
            for n, page in enumerate(pages):
                first = n * rows
                slot_number = count * TILE_SLOTS + first // ROWS
                slot, reused = _slot(ctx, slot_number), slot_number >= slots_of(plan)
                if first % ROWS == 0:
                    pl.when(reused)(functools.partial(plgpu.barrier_wait, slot.free))
                stretch = Stretch(tile * TILE + first, first % ROWS, page)
                copy = Copy(everything, slot, reused, whole=True)
                producer.copy_rows(ctx, work, stretch, copy, finds_missing=True)
            return count + 1, producer.pages_of(ctx, work, tile + 1)

        ahead = producer.pages_of(ctx, work, work.tile)
        return lax.fori_loop(work.tile, work.end, one_tile, (count, ahead))[0]

    producer.each_work(plan, smem.table, share, one_work, jnp.int32(0))


def _widen(ctx: KernelContext, share: Share, member: int) -> None:
    """Some columns of all tiles, from raw rows to blocks of the ring, by one of the warpgroups."""
    columns, smem = sm90_few_rows.columns_of(ctx.plan), ctx.smem

    def one_tile(_, count):
        first = count * TILE_SLOTS
        for n in range(TILE_SLOTS):
            plgpu.barrier_wait(_slot(ctx, first + n).ready)
        for n in range(member, columns.blocks, WIDENERS):
            number = count * columns.blocks + n
            block = sm90_few_rows.ring_block(ctx, count, n)
            reused = number >= columns.ring
            pl.when(reused)(functools.partial(plgpu.barrier_wait, block.free))
            entry = lax.rem(number, jnp.int32(columns.ring))
            tile = byte_rows.Tile(lax.rem(first, jnp.int32(slots_of(ctx.plan))), entry)
            byte_rows.widen(smem.raw.rows, smem.kv, tile, n * columns.block)
            plgpu.commit_smem()
            plgpu.barrier_arrive(block.ready)
        for n in range(TILE_SLOTS):
            plgpu.barrier_arrive(_slot(ctx, first + n).free)
        return count + 1

    def one_work(work: WorkTile, number: Index, count: Index) -> Index:
        del number
        return lax.fori_loop(work.tile, work.end, one_tile, count)

    producer.each_work(ctx.plan, smem.table, share, one_work, jnp.int32(0))


def _kernel(refs: LatentRefs, outputs: Outputs, smem: FewRowsSmem, *, plan: Plan) -> None:
    block_id, wg = lax.axis_index("block"), lax.axis_index("wg")
    results = outputs.results(refs.counters, refs.sinks)
    ctx = KernelContext(plan, refs, smem)

    def share() -> Share:
        return scheduler.share_of(plan, ctx.smem.table, block_id)

    def load():
        producer.fill_table(ctx)
        plgpu.barrier_arrive(smem.table_ready)
        _load(ctx, share())

    def widen(member):
        plgpu.barrier_wait(smem.table_ready)
        _widen(ctx, share(), member)

    def compute():
        plgpu.barrier_wait(smem.table_ready)
        sm90_few_rows.compute(ctx, results, share(), block_id)

    wideners = [functools.partial(widen, member) for member in range(WIDENERS)]
    mosaic.share_registers(wg, 1, [*wideners, load], compute, *REGISTERS)


def launch(
    inputs: DecodeInputs, counters: Array, problem: DecodeProblem, config: KernelConfig
) -> tuple[Array, Array]:
    """out [M, t, N, Hv] in q's dtype, log-sum-exp float32 [M, N, t]."""
    heads, outs, lses = of_heads(problem).q_heads, [], []
    for first in range(0, problem.q_heads, heads):
        some = slice(first, first + heads)
        q, sinks = inputs.q[:, :, some], inputs.sinks
        part = inputs._replace(q=q, sinks=None if sinks is None else sinks[some])
        of_some = dataclasses.replace(problem, q_heads=q.shape[2])
        # Each launch has counters of its own: `combine_splits.counters`.
        own = combine_splits.counters(plan_of(of_some, config)) if first else counters
        out, lse = _launch(part, own, of_some, config)
        outs.append(out)
        lses.append(lse)
    if len(outs) == 1:
        return outs[0], lses[0]
    return jnp.concatenate(outs, axis=2), jnp.concatenate(lses, axis=1)


@functools.partial(jax.jit, static_argnames=("problem", "config"))
def _launch(
    inputs: DecodeInputs, counters: Array, problem: DecodeProblem, config: KernelConfig
) -> tuple[Array, Array]:
    plan = plan_of(problem, config)
    program = sm90_few_rows.Program(_kernel, scratch(plan), 2 + WIDENERS)
    return sm90_few_rows.launched(inputs, counters, plan, program)
