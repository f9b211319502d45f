"""Decode attention over a latent cache in FlashMLA's format, 656 bytes a row, for Hopper.

As in `sm90_few_rows` the rows of a matmul are keys or columns of V, and its columns are query rows.
Nothing is widened to shared memory. Scores are matmuls on float8: q is a sum of two or three terms
of float8 (`mma.byte_rows.split`), and keys are registers as they come. Values become float16 in
registers, by one instruction for two numbers. The scale of a key and a block of columns is a factor
of the key's scores and of its probabilities, which there are four of, one a block, over the power
of two that is next to the tile's largest scale.

A block has up to 32 query rows. More heads are several launches, each of which reads all keys.

Warpgroups, and the barriers that they arrive at:
  0     scores: `q_free`, `free`, and `p_ready` when a tile's probabilities are there, with
        `row_max` and `row_sum`
  1, 2  values, by columns: `free` when a tile's rows are in registers, and `p_free`
  3     the producer: `q_ready`, `ready`, and `table_ready`, for which all others wait
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import selection
from pallas_attn._call.byte_rows import BYTE_DTYPE, BYTE_ROW, SCALE_COLUMNS
from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn._call.selection import MOST_LATENT_ROWS
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import cache_layout, softmax
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.decode import combine_splits, scheduler
from pallas_attn.kernels.decode.combine_splits import Outputs, Results
from pallas_attn.kernels.decode.plan import Plan
from pallas_attn.kernels.decode.scheduler import Share, Table, WorkTile
from pallas_attn.kernels.decode_mla import (
    combine_latent,
    producer,
    sm90_common,
    sm90_few_rows,
)
from pallas_attn.kernels.decode_mla.producer import TILE, WIDTH, Copy, LatentRefs
from pallas_attn.kernels.decode_mla.sm90_common import P_SLOTS, V_WARPGROUPS, Launch, Program
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.panels import Block
from pallas_attn.kernels.lang.types import Barrier, Index, KernelConfig, RegisterTile, SmemRef
from pallas_attn.kernels.mma import byte_rows

BLOCKS = BYTE_ROW.scales  # blocks of V's columns, each with a scale of its own
OWN = BLOCKS // V_WARPGROUPS  # blocks of one of them
# Registers of a thread: scores, values, the producer. Spilled ones are slow to come back, since
# shared memory leaves next to no L1.
REGISTERS_OF_FEW, REGISTERS = (216, 136, 24), (184, 152, 24)


def limit(problem: DecodeProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    if (refused := selection.latent_bytes(problem)) is not None:
        return refused
    if problem.q_len > MOST_LATENT_ROWS:
        return Limit(
            f"{problem.q_len} query rows over a latent cache of bytes; it takes up to "
            f"{MOST_LATENT_ROWS}",
            "pack the rows (starts), which are then sequences of their own",
        )
    if problem.uses_head and of_heads(problem) != problem:
        return Limit(
            "a function of query heads over a latent cache of bytes, whose heads are split",
            f"call it for up to {MOST_LATENT_ROWS // max(problem.q_len, 1)} heads at a time",
        )
    layout = cache_layout.layout_of(problem)
    if not layout.paged and max(problem.capacities) % TILE:
        return Limit(
            f"a latent cache of bytes of {max(problem.capacities)} rows",
            f"make the capacity a multiple of {TILE}",
        )
    return sm90_common.limit(of_heads(problem))


def of_heads(problem: DecodeProblem) -> DecodeProblem:
    """The problem of a launch: some of the heads, the same number in each if they divide so."""
    launches = -(-problem.q_heads // max(MOST_LATENT_ROWS // max(problem.q_len, 1), 1))
    return dataclasses.replace(problem, q_heads=-(-problem.q_heads // launches))


@functools.lru_cache(maxsize=256)
def plan_of(problem: DecodeProblem, config: KernelConfig) -> Plan:
    """The plan of a launch for some of the heads."""
    return sm90_few_rows.plan_of(of_heads(problem), config)


class ByteRowsSmem(NamedTuple):
    q: SmemRef  # [chunk_rows, H], as it lies in memory
    terms: SmemRef  # these three: `byte_rows.Queries`
    q_rest: SmemRef
    q_units: SmemRef
    kv: SmemRef  # uint8[stages, TILE, bytes]: rows as they lie in memory
    p: SmemRef  # float16[P_SLOTS, BLOCKS, chunk_rows, TILE]: probabilities times scales
    units: SmemRef  # float32[P_SLOTS * BLOCKS]: what those are to be multiplied by
    row_max: SmemRef  # float32[P_SLOTS, chunk_rows]: after a tile
    row_sum: SmemRef  # float32[chunk_rows]: after the last tile of a work
    table: Table
    last: SmemRef  # int32[1]
    q_ready: Barrier
    q_free: Barrier
    ready: Barrier
    free: Barrier
    p_ready: Barrier
    p_free: Barrier
    sum_free: Barrier
    joined: Barrier  # both warpgroups that multiply values are there
    table_ready: Barrier


def scratch(plan: Plan) -> ByteRowsSmem:
    problem, rows, barrier = plan.problem, plan.queries.chunk_rows, plgpu.Barrier
    dtype, stages = jnp.dtype(problem.dtype), plan.tiling.stages
    terms = byte_rows.terms_of(problem.dtype) * rows, problem.v_head_dim
    return ByteRowsSmem(
        q=plgpu.SMEM((rows, problem.head_dim), dtype),
        terms=mosaic.swizzled(terms, jnp.dtype(BYTE_DTYPE), byte_rows.SWIZZLE),
        q_rest=mosaic.swizzled((rows, BYTE_ROW.rest), dtype, byte_rows.SWIZZLE),
        q_units=plgpu.SMEM((rows,), jnp.float32),
        kv=plgpu.SMEM((stages, TILE, BYTE_ROW.size), jnp.uint8),
        p=mosaic.swizzled((P_SLOTS, BLOCKS, rows, TILE), jnp.float16, 2 * WIDTH),
        units=plgpu.SMEM((P_SLOTS * BLOCKS,), jnp.float32),
        row_max=plgpu.SMEM((P_SLOTS, rows), jnp.float32),
        row_sum=plgpu.SMEM((rows,), jnp.float32),
        table=scheduler.table_scratch(plan),
        last=plgpu.SMEM((1,), jnp.int32),
        q_ready=barrier(),
        q_free=barrier(),
        ready=barrier(num_barriers=stages, num_arrivals=TILE // plan.keys.page_rows),
        free=barrier(num_barriers=stages, num_arrivals=1 + V_WARPGROUPS),
        p_ready=barrier(num_barriers=P_SLOTS),
        p_free=barrier(num_barriers=P_SLOTS, num_arrivals=V_WARPGROUPS),
        sum_free=barrier(num_arrivals=V_WARPGROUPS),
        joined=barrier(num_arrivals=V_WARPGROUPS),
        table_ready=barrier(),
    )


def few(plan: Plan) -> bool:
    """Whether registers have room for operands and sums of all blocks at once."""
    return plan.queries.chunk_rows <= MOST_LATENT_ROWS // 2


# ---- the producer --------------------------------------------------------------------------------


def _entry(ctx: KernelContext, count: Index) -> Block:
    """The entry of the ring for a tile, before which there were `count` since the kernel began."""
    smem, slot = ctx.smem, lax.rem(count, jnp.int32(ctx.plan.tiling.stages))
    return Block(smem.kv.at[slot], smem.ready.at[slot], smem.free.at[slot], smem.kv, (slot,))


def _raw(entry: Block) -> byte_rows.Raw:
    return byte_rows.Raw(entry.buffer, entry.place[0])


def _load(ctx: KernelContext, share: Share) -> None:
    """Q and all tiles of the block."""
    plan, smem, rows = ctx.plan, ctx.smem, ctx.plan.queries.chunk_rows
    whole_rows = pl.ds(0, BYTE_ROW.size)

    def copies_of(count):
        yield Copy(whole_rows, _entry(ctx, count), count >= plan.tiling.stages, whole=True)

    def one_work(work, number, count):
        pl.when(number > 0)(lambda: plgpu.barrier_wait(smem.q_free))
        q = ctx.refs.q.at[pl.ds(work.sequence * rows, rows)]
        bounds = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
        plgpu.copy_gmem_to_smem(q, smem.q, smem.q_ready, oob_mode=bounds)
        return producer.load(ctx, work, count, copies_of)

    producer.each_work(plan, smem.table, share, one_work, jnp.int32(0))


# ---- scores --------------------------------------------------------------------------------------


def _queries(smem: ByteRowsSmem) -> byte_rows.Queries:
    return byte_rows.Queries(smem.terms, smem.q_rest, smem.q_units)


def _columns(plan: Plan) -> int:
    """Columns of a block's scores: the terms of all query rows."""
    return byte_rows.terms_of(plan.problem.dtype) * plan.queries.chunk_rows


class _Part(NamedTuple):
    """A work whose scores are made."""

    work: WorkTile
    number: Index  # works of the block before it
    q_units: RegisterTile  # [chunk_rows]


class _Ahead(NamedTuple):
    """Scores of a tile whose probabilities are still to be made."""

    s: RegisterTile  # [TILE, chunk_rows]
    of_values: list[RegisterTile]  # these two: `byte_rows.Scales`
    units: list[Index]


def _scores(
    ctx: KernelContext, part: _Part, tile: Index, count: Index, meanwhile: Callable | None
) -> tuple[_Ahead, Any]:
    """(Scores of a tile, the result of `meanwhile`, which runs under the matmuls.)"""
    plan, entry, first = ctx.plan, _entry(ctx, count), meanwhile is None
    plgpu.barrier_wait(entry.ready)
    scales = byte_rows.scales(_raw(entry), part.work.length - tile * TILE)
    room = 128 if few(plan) else 64  # columns of scores that registers have room for
    at_once, scaled = next((n for n in (4, 2) if n * _columns(plan) <= room), 1), []
    (*accs, s), result = _products(ctx, entry, range(at_once), meanwhile or (lambda: None))
    for block in range(at_once, BLOCKS, at_once):
        accs += _products(ctx, entry, range(block, block + at_once))[0]
    if first or at_once < BLOCKS:  # else `meanwhile` has done so
        plgpu.commit_smem()  # all warps have read the rows, and TMA will write there
    plgpu.barrier_arrive(entry.free)
    for acc, scale in zip(accs, scales.of_scores, strict=True):
        acc = byte_rows.folded(acc, s.shape[1])
        scaled.append(acc * mosaic.broadcast_rows(scale, acc.shape))
    s += functools.reduce(jnp.add, scaled) * sm90_few_rows.down_columns(part.q_units, s.shape)
    return _Ahead(s, scales.of_values, scales.units), result


def _products(
    ctx: KernelContext, entry: Block, blocks: range, meanwhile: Callable | None = None
) -> tuple[list[RegisterTile], Any]:
    """Keys times queries, a sum for each block of columns; and, beside `meanwhile`, that of the
    columns that are not of V.
    """
    dtype, smem, raw = ctx.plan.problem.dtype, ctx.smem, _raw(entry)
    zero = mosaic.opaque_zero(raw.slot)  # else registers keep the addresses of all operands

    def body(refs):
        for block, acc in zip(blocks, refs, strict=False):
            keys = byte_rows.keys(raw, block)
            q = smem.terms.at[:, pl.ds((block + zero) * SCALE_COLUMNS, SCALE_COLUMNS)]
            plgpu.wgmma(acc, keys, q.transpose((1, 0)))
        if meanwhile is not None:
            plgpu.wgmma(refs[-1], byte_rows.rest(raw, dtype), smem.q_rest.transpose((1, 0)))
        result = None if meanwhile is None else meanwhile()
        plgpu.wgmma_wait(0)
        return [acc[...] for acc in refs], result

    sums = [plgpu.ACC((TILE, _columns(ctx.plan)), jnp.float32)] * len(blocks)
    rest = [plgpu.ACC((TILE, ctx.plan.queries.chunk_rows), jnp.float32)]
    return pl.run_scoped(body, sums if meanwhile is None else sums + rest)


class _Softmax(NamedTuple):
    """The state of the warpgroup that has the scores."""

    row_sum: RegisterTile  # [TILE, chunk_rows], to be added up over the keys
    row_max: RegisterTile  # [chunk_rows]
    count: Index  # tiles since the kernel began


def _one_tile(
    ctx: KernelContext, part: _Part, tile: Index, ahead: _Ahead, state: _Softmax
) -> _Softmax:
    """Probabilities of a tile."""
    smem, count, work = ctx.smem, state.count, part.work
    slot = lax.rem(count, jnp.int32(P_SLOTS))
    s = sm90_few_rows.logits(ctx, work, tile, ahead.s)
    above = s - sm90_few_rows.down_columns(state.row_max, s.shape)
    some = byte_rows.any_above(above, softmax.RESCALE_THRESHOLD)

    def raised():
        row_max = sm90_few_rows.raised_max(s, state.row_max)
        rescale = jnp.exp2(state.row_max - softmax.base_of(row_max))
        return row_max, state.row_sum * sm90_few_rows.down_columns(rescale, s.shape)

    row_max, row_sum = lax.cond(some != 0, raised, lambda: (state.row_max, state.row_sum))
    p = jnp.exp2(s - sm90_few_rows.down_columns(softmax.base_of(row_max), s.shape))
    state = _Softmax(row_sum + p, row_max, count + 1)
    pl.when(count >= P_SLOTS)(lambda: plgpu.barrier_wait(smem.p_free.at[slot]))
    for block, scale in enumerate(ahead.of_values):
        numbers = p * mosaic.broadcast_rows(scale, p.shape)
        sm90_few_rows.put(smem.p.at[slot, block], numbers)
    smem.row_max.at[slot][...] = state.row_max
    byte_rows.store_units(smem.units, slot, ahead.units)

    @pl.when(tile == work.end - 1)
    def _():
        pl.when(part.number > 0)(lambda: plgpu.barrier_wait(smem.sum_free))
        smem.row_sum[...] = state.row_sum.sum(axis=0)

    plgpu.commit_smem()
    plgpu.barrier_arrive(smem.p_ready.at[slot])
    return state


def _score(ctx: KernelContext, share: Share) -> None:
    """Probabilities of all tiles of the block. The scores of a tile are made under the softmax of
    the one before.
    """
    plan, smem, rows = ctx.plan, ctx.smem, ctx.plan.queries.chunk_rows

    def one_work(work, number, count):
        plgpu.barrier_wait(smem.q_ready)
        byte_rows.split(smem.q, _queries(smem))
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.q_free)
        q_units = plgpu.load(smem.q_units, layout=mosaic.COLUMN)
        row_max = plgpu.layout_cast(jnp.full((rows,), -jnp.inf, jnp.float32), mosaic.COLUMN)
        part = _Part(work, number, q_units)

        def one_tile(tile, carry):
            ahead, state = carry
            meanwhile = functools.partial(_one_tile, ctx, part, tile, ahead, state)
            return _scores(ctx, part, tile + 1, state.count + 1, meanwhile)

        state = _Softmax(mosaic.filled((TILE, rows), 0.0), row_max, count)
        ahead, _ = _scores(ctx, part, work.tile, count, None)
        ahead, state = lax.fori_loop(work.tile, work.end - 1, one_tile, (ahead, state))
        return _one_tile(ctx, part, work.end - 1, ahead, state).count

    producer.each_work(plan, smem.table, share, one_work, jnp.int32(0))


# ---- values --------------------------------------------------------------------------------------


class _Own(NamedTuple):
    """A warpgroup that multiplies values, and where its results go."""

    block_id: Index
    member: int
    results: Results
    share: Share


class _State(NamedTuple):
    accs: tuple[RegisterTile, ...]  # [TILE columns, chunk_rows] each: two a block of columns
    row_max: RegisterTile  # [chunk_rows]: what they are relative to
    count: Index  # tiles since the kernel began


def _weighed(
    p: SmemRef, values: tuple[RegisterTile, ...], shape: tuple[int, int]
) -> list[RegisterTile]:
    """A block's columns of V times its probabilities."""

    def body(refs):
        for acc, v in zip(refs, values, strict=True):
            plgpu.wgmma(acc, v, p.transpose((1, 0)))
        plgpu.wgmma_wait(0)
        return [acc[...] for acc in refs]

    return pl.run_scoped(body, [plgpu.ACC(shape, jnp.float32)] * len(values))


def _weigh(ctx: KernelContext, own: _Own) -> None:
    """A warpgroup's columns of the values, of all tiles."""
    plan, smem, rows = ctx.plan, ctx.smem, ctx.plan.queries.chunk_rows
    blocks, shape = range(own.member * OWN, (own.member + 1) * OWN), (TILE, rows)

    def one_tile(work, tile, state):
        entry, slot = _entry(ctx, state.count), lax.rem(state.count, jnp.int32(P_SLOTS))
        live = work.length - tile * TILE

        def load(block):
            values = byte_rows.values(_raw(entry), block, live)
            if block == blocks[-1]:
                plgpu.commit_smem()  # all warps have read the rows, and TMA will write there
                plgpu.barrier_arrive(entry.free)
            return values

        plgpu.barrier_wait(entry.ready)
        values = [load(block) for block in blocks] if few(plan) else []
        plgpu.barrier_wait(smem.p_ready.at[slot])
        row_max = plgpu.load(smem.row_max.at[slot], layout=mosaic.COLUMN)
        rescale = jnp.exp2(state.row_max - softmax.base_of(row_max))
        accs: list[RegisterTile] = []
        for n, block in enumerate(blocks):
            unit = smem.units[slot * BLOCKS + block]
            v = values[n] if few(plan) else load(block)
            p, at_once = smem.p.at[slot, block], len(v) if few(plan) else 1
            added = [
                x for i in range(0, len(v), at_once) for x in _weighed(p, v[i : i + at_once], shape)
            ]
            for acc, more in zip(state.accs[2 * n : 2 * n + 2], added, strict=True):
                accs.append(acc * sm90_few_rows.down_columns(rescale, shape) + more * unit)
        plgpu.barrier_arrive(smem.p_free.at[slot])
        return _State(tuple(accs), row_max, state.count + 1)

    def one_work(work, number, count):
        del number
        row_max = plgpu.layout_cast(jnp.full((rows,), -jnp.inf, jnp.float32), mosaic.COLUMN)
        accs = tuple(mosaic.filled(shape, 0.0) for _ in range(2 * OWN))
        step = functools.partial(one_tile, work)
        state = _State(accs, row_max, count)
        state = lax.fori_loop(work.tile, work.end, step, state)
        row_sum = plgpu.load(smem.row_sum, layout=mosaic.COLUMN)
        plgpu.commit_smem()  # all warps have it
        plgpu.barrier_arrive(smem.sum_free)
        whole = sm90_few_rows.State(state.accs, row_sum, state.row_max)
        _epilogue(ctx, own, work, whole)
        return state.count

    producer.each_work(plan, smem.table, own.share, one_work, jnp.int32(0))


# ---- epilogue ------------------------------------------------------------------------------------


def _epilogue(ctx: KernelContext, own: _Own, work: WorkTile, state: sm90_few_rows.State) -> None:
    plan, results, m = ctx.plan, own.results, work.sequence
    places = scheduler.partials_of(plan, own.share, work, own.block_id)
    lost = ctx.smem.table.lost[m]
    state = state._replace(row_sum=combine_latent.with_lost(state.row_sum, lost))
    accs = results.partial_out[2 * OWN * own.member :][: 2 * OWN]
    write = functools.partial(_write, plan, own, m)
    join = functools.partial(combine_latent.join, ctx.smem.joined)
    end = sm90_few_rows.Finish(write, own.member == 0, join)
    head = combine_splits.Head(m, work.head, lost, places)
    sm90_few_rows.epilogue(ctx, results._replace(partial_out=accs), head, state, end)


def _write(plan: Plan, own: _Own, m: Index, whole: sm90_few_rows.State) -> None:
    """A warpgroup's columns of the result of a sequence."""
    results, rows = own.results, plan.queries.chunk_rows
    sinks = None if results.sinks is None else mosaic.load(results.sinks, mosaic.COLUMN)
    factor, lse = softmax.finish(whole.row_max, whole.row_sum, sinks)
    if own.member == 0:
        mosaic.store(results.lse.at[m], lse)
    outs = [acc * sm90_few_rows.down_columns(factor, acc.shape) for acc in whole.accs]
    for n in range(OWN):
        block = own.member * OWN + n
        byte_rows.store_columns(results.out, m * rows, block, tuple(outs[2 * n : 2 * n + 2]))


# ---- the kernel and its call ---------------------------------------------------------------------


def _kernel(refs: LatentRefs, outputs: Outputs, smem: ByteRowsSmem, *, plan: Plan) -> None:
    block_id, wg = lax.axis_index("block"), lax.axis_index("wg")
    results = outputs.results(refs.counters, refs.sinks)
    ctx = KernelContext(plan, refs, smem)
    scorer, weigher, loader = REGISTERS_OF_FEW if few(plan) else REGISTERS

    def share() -> Share:
        return scheduler.share_of(plan, smem.table, block_id)

    @pl.when(wg == 1 + V_WARPGROUPS)
    def _():
        plgpu.set_max_registers(loader, action="decrease")
        producer.fill_table(ctx)
        plgpu.barrier_arrive(smem.table_ready)
        _load(ctx, share())

    @pl.when(wg == 0)
    def _():
        plgpu.set_max_registers(scorer, action="increase")
        plgpu.barrier_wait(smem.table_ready)
        _score(ctx, share())

    for member in range(V_WARPGROUPS):

        @pl.when(wg == 1 + member)
        def _(member=member):
            plgpu.set_max_registers(weigher, action="increase")
            plgpu.barrier_wait(smem.table_ready)
            _weigh(ctx, _Own(block_id, member, results, share()))


def _by_heads(launch: Launch) -> Launch:
    """Several launches, each for some of the heads."""

    def run(
        inputs: DecodeInputs, problem: DecodeProblem, config: KernelConfig
    ) -> tuple[jax.Array, jax.Array]:
        heads, results = of_heads(problem).q_heads, []
        for first in range(0, problem.q_heads, heads):
            some = slice(first, first + heads)
            q, sinks = inputs.q[:, :, some], inputs.sinks
            part = inputs._replace(q=q, sinks=None if sinks is None else sinks[some])
            of_some = dataclasses.replace(problem, q_heads=q.shape[2])
            results.append(launch(part, of_some, config))
        if len(results) == 1:
            return results[0]
        outs, lses = zip(*results, strict=True)
        return jnp.concatenate(outs, axis=2), jnp.concatenate(lses, axis=1)

    return run


def _partials(plan: Plan) -> tuple[jax.ShapeDtypeStruct, ...]:
    return sm90_few_rows.partials_of_tiles(plan, (TILE,) * (2 * BLOCKS))


PROGRAM = Program(_kernel, scratch, 2 + V_WARPGROUPS, _partials)
KERNEL = sm90_common.kernel_with(plan_of, PROGRAM, limit, _by_heads)
Config = KERNEL.config
