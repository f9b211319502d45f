"""Decode attention over a latent cache for few query rows: up to 32, for Hopper.

`decode_mla.sm90` gives tensor cores 64 query rows; of 16 heads three quarters would be padding, in
shared memory too, where keys on their way are what counts. Here the rows of a matmul are keys and
its columns are query rows, S' = K q' and O' = V' P': what tensor cores read is the kv tile, twice,
and hardly anything else. One warpgroup computes; the other, the producer, fills a ring of blocks of
columns, each of which is released as soon as it has been multiplied.

A row's max is raised only where a logit of a tile lies above it by more than
`softmax.RESCALE_THRESHOLD`; warps tell each other at the barrier over the probabilities in shared
memory whether one does.

The scheduler is that of decode; partials are combined by `combine_latent`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import selection
from pallas_attn._call.problem import DecodeProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import softmax, tma_operands
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.decode import combine_splits, mainloop, scheduler, score_functions
from pallas_attn.kernels.decode.combine_splits import Outputs, Results
from pallas_attn.kernels.decode.plan import Plan, plan_with, query_rows
from pallas_attn.kernels.decode.scheduler import Share, Table, WorkTile
from pallas_attn.kernels.decode_mla import (
    combine_latent,
    producer,
    row_gathers,
    sm90_common,
)
from pallas_attn.kernels.decode_mla.combine_latent import Ending
from pallas_attn.kernels.decode_mla.producer import TILE, WIDTH, Copy, LatentRefs
from pallas_attn.kernels.decode_mla.sm90_common import Program
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.panels import Block
from pallas_attn.kernels.lang.types import (
    Barrier,
    Index,
    KernelConfig,
    RegisterTile,
    SmemRef,
)


def limit(problem: DecodeProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    return selection.few_latent_rows(problem) or sm90_common.limit(problem)


@functools.lru_cache(maxsize=256)
def plan_of(problem: DecodeProblem, config: KernelConfig) -> Plan:
    """Query rows are a multiple of 8, side by side in one chunk."""
    tiling = sm90_common.tiling_of(config)
    queries = query_rows(problem, tiling.q_rows)
    queries = dataclasses.replace(queries, chunk_rows=tma_operands.round_up(queries.rows, 8))
    plan = plan_with(problem, tiling, queries)
    splits = combine_latent.best_splits(plan, 2 * plan.keys.most_tiles)
    plan = plan_with(problem, tiling, queries, problem.sequences * splits)
    return row_gathers.with_whole_tiles(plan)


class Columns(NamedTuple):
    """Columns of a tile in blocks, each of which is copied, awaited and multiplied at once."""

    block: int  # columns of a block
    ring: int  # blocks that there is room for
    v: tuple[int, ...]  # for each block of a tile: its columns that are V's

    @property
    def blocks(self) -> int:
        return len(self.v)

    @property
    def accs(self) -> list[int]:
        """Columns of V in each block that has any."""
        return [n for n in self.v if n]


@functools.lru_cache(maxsize=256)
def columns_of(plan: Plan) -> Columns:
    head_dim, v_head_dim = plan.problem.head_dim, plan.problem.v_head_dim
    block = WIDTH * next(n for n in (3, 2, 1) if head_dim // WIDTH % n == 0)
    v = tuple(min(max(v_head_dim - start, 0), block) for start in range(0, head_dim, block))
    return Columns(block, max(plan.tiling.stages, len(v)), v)


class FewRowsSmem(NamedTuple):
    q: SmemRef  # [chunk_rows, H]
    kv: SmemRef  # [ring, TILE, block]
    p: SmemRef  # [2, chunk_rows, TILE]: probabilities of two tiles, alternately
    flags: SmemRef  # int32[2 * WARPS]: likewise, whether a warp has a logit that is too high
    table: Table | None  # None: `row_gathers.with_table`
    last: SmemRef  # int32[1]
    holes: SmemRef | None  # `row_gathers.holes_scratch`
    q_ready: Barrier
    q_free: Barrier
    ready: Barrier
    free: Barrier
    table_ready: Barrier


def scratch(plan: Plan) -> FewRowsSmem:
    dtype, rows, columns = jnp.dtype(plan.problem.dtype), plan.queries.chunk_rows, columns_of(plan)
    barrier, ring = plgpu.Barrier, columns.ring
    return FewRowsSmem(
        q=mosaic.swizzled((rows, plan.problem.head_dim), dtype, 2 * WIDTH),
        kv=mosaic.swizzled((ring, TILE, columns.block), dtype, 2 * WIDTH),
        p=mosaic.swizzled((2, rows, TILE), dtype, 2 * WIDTH),
        flags=plgpu.SMEM((2 * threads.WARPS,), jnp.int32),
        table=row_gathers.table_scratch(plan),
        last=plgpu.SMEM((1,), jnp.int32),
        holes=row_gathers.holes_scratch(plan, ring // columns.blocks),
        q_ready=barrier(),
        q_free=barrier(),
        ready=barrier(num_barriers=ring, num_arrivals=TILE // plan.keys.page_rows),
        free=barrier(num_barriers=ring),
        table_ready=barrier(),
    )


# ---- the producer --------------------------------------------------------------------------------


def ring_block(ctx: KernelContext, count: Index, block: int) -> Block:
    """A block of a tile, before which there were `count` tiles since the kernel began."""
    columns, smem = columns_of(ctx.plan), ctx.smem
    slot = lax.rem(count * columns.blocks + block, jnp.int32(columns.ring))
    return Block(smem.kv.at[slot], smem.ready.at[slot], smem.free.at[slot], smem.kv, (slot,))


def _load(ctx: KernelContext, share: Share) -> None:
    """Q and all tiles of the block."""
    plan, columns = ctx.plan, columns_of(ctx.plan)

    def copies_of(count):
        for n in range(columns.blocks):
            own, to = pl.ds(n * columns.block, columns.block), ring_block(ctx, count, n)
            yield Copy(own, to, reused=count * columns.blocks + n >= columns.ring)

    def one_work(work, number, count):
        pl.when(number > 0)(lambda: plgpu.barrier_wait(ctx.smem.q_free))
        _load_q(ctx, work)
        if plan.layout.listed:
            lag = min(row_gathers.LAG, columns.ring - columns.blocks)
            return row_gathers.load(ctx, work, count, copies_of, lag)
        return producer.load(ctx, work, count, copies_of)

    producer.each_work(plan, ctx.smem.table, share, one_work, jnp.int32(0))


def _load_q(ctx: KernelContext, work: WorkTile) -> None:
    chunk_rows, smem = ctx.plan.queries.chunk_rows, ctx.smem
    rows = pl.ds(work.sequence * chunk_rows, chunk_rows)
    plgpu.copy_gmem_to_smem(ctx.refs.q.at[rows], smem.q, smem.q_ready)


# ---- computing -----------------------------------------------------------------------------------


class State(NamedTuple):
    accs: tuple[RegisterTile, ...]  # [columns of V, chunk_rows] each
    # [TILE, chunk_rows]: sums over the tiles' first keys, second keys, ..; in the end [chunk_rows]
    row_sum: RegisterTile
    row_max: RegisterTile  # [chunk_rows]


def down_columns(columns: RegisterTile, shape: Sequence[int]) -> RegisterTile:
    """One number a column, in all rows."""
    return lax.broadcast_in_dim(columns, tuple(shape), [1])


def _positions(ctx: KernelContext, work: WorkTile, tile: Index) -> scheduler.Positions:
    """Queries and keys of a tile of logits."""
    shape = TILE, ctx.plan.queries.chunk_rows
    key, row = mosaic.positions(shape, 0, tile * TILE), mosaic.positions(shape, 1, 0)
    return scheduler.positions_at(ctx.plan, work, row, key)


def logits(ctx: KernelContext, work: WorkTile, tile: Index, s: RegisterTile) -> RegisterTile:
    """Scores -> logits in log2 units, those of invisible keys -inf."""
    plan = ctx.plan
    places = score_functions.places_along(s.shape, mosaic.TILE, 1, lambda: tile * TILE)
    if plan.unit_of_logits is None:
        s = mainloop.logits_of_scores(ctx, work, tile, s, places)
    else:
        s = s * plan.unit_of_logits
    return mainloop.masked(ctx, work, tile, s, _positions)


def put(p: SmemRef, numbers: RegisterTile) -> None:
    p.transpose((1, 0))[...] = numbers.astype(p.dtype)


class _Flag(NamedTuple):
    parity: Index  # parity of the tile's number
    moved: Index  # whether this warp has a logit that is too high


def _set_flag(thread: threads.Thread, flags: SmemRef, at: _Flag) -> None:
    """Tells the other warps."""
    warp = thread.index // 32
    thread.shared_store(flags, at.parity * threads.WARPS + warp, at.moved, thread.index % 32 < 1)


def raised_max(s: RegisterTile, row_max: RegisterTile) -> RegisterTile:
    """The row max, raised where a logit lies too far above it."""
    higher = jnp.maximum(row_max, s.max(axis=0))
    moved = higher - row_max > softmax.RESCALE_THRESHOLD
    return jnp.where(moved, higher, row_max)


def _scores(ctx: KernelContext, blocks: list[Block]) -> RegisterTile:
    """Begins as soon as the first columns are there."""
    plan, smem, width = ctx.plan, ctx.smem, columns_of(ctx.plan).block

    def body(acc):
        for n, block in enumerate(blocks):
            plgpu.barrier_wait(block.ready)
            q = smem.q.at[:, pl.ds(n * width, width)]
            plgpu.wgmma(acc, block.ref, q.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(body, plgpu.ACC((TILE, plan.queries.chunk_rows), jnp.float32))


def _weigh(
    plan: Plan, blocks: list[Block], p: SmemRef, accs: Sequence[RegisterTile]
) -> tuple[RegisterTile, ...]:
    """Adds the values of a tile, and releases it."""
    values = [(b, n) for b, n in zip(blocks, columns_of(plan).v, strict=True) if n]

    def body(refs):
        for (block, width), acc in zip(values, refs, strict=True):
            v = block.ref.at[:, pl.ds(0, width)].transpose((1, 0))
            plgpu.wgmma(acc, v, p.transpose((1, 0)))
        for done, (block, _) in enumerate(values):
            plgpu.wgmma_wait(len(values) - 1 - done)
            plgpu.barrier_arrive(block.free)

    return pl.run_state(body)(tuple(plgpu.ACC.init(acc) for acc in accs))


class _Carry(NamedTuple):
    state: State
    count: Index  # tiles since the kernel began


def _one_tile(ctx: KernelContext, work: WorkTile, tile: Index, carry: _Carry) -> _Carry:
    (plan, _, smem), (state, count), columns = ctx, carry, columns_of(ctx.plan)
    blocks = [ring_block(ctx, count, n) for n in range(columns.blocks)]
    s = _scores(ctx, blocks)
    for block, width in zip(blocks, columns.v, strict=True):
        if not width:
            plgpu.barrier_arrive(block.free)
    pl.when(tile == work.end - 1)(lambda: plgpu.barrier_arrive(smem.q_free))
    live = work.length - tile * TILE

    @pl.when(live < TILE)
    def clear():
        for block, width in zip(blocks, columns.v, strict=True):
            producer.clear(block.ref, width, live)

    s = row_gathers.without_holes(ctx, logits(ctx, work, tile, s), count, mosaic.ROW)
    above = s - down_columns(state.row_max, s.shape)
    moved = mosaic.any_in_warp(above, softmax.RESCALE_THRESHOLD)
    p = jnp.exp2(s - down_columns(softmax.base_of(state.row_max), s.shape))
    parity = lax.rem(count, jnp.int32(2))
    ref = smem.p.at[parity]
    put(ref, p)
    threads.each_thread(_set_flag, smem.flags, _Flag(parity, moved))
    plgpu.commit_smem()
    some = smem.flags[parity * threads.WARPS]
    for warp in range(1, threads.WARPS):
        some = some | smem.flags[parity * threads.WARPS + warp]

    def raised():
        higher = raised_max(s, state.row_max)
        p = jnp.exp2(s - down_columns(softmax.base_of(higher), s.shape))
        put(ref, p)
        plgpu.commit_smem()
        rescale = jnp.exp2(state.row_max - softmax.base_of(higher))
        accs = tuple(acc * down_columns(rescale, acc.shape) for acc in state.accs)
        return State(accs, state.row_sum * down_columns(rescale, s.shape) + p, higher)

    state = lax.cond(some != 0, raised, lambda: state._replace(row_sum=state.row_sum + p))
    return _Carry(state._replace(accs=_weigh(plan, blocks, ref, state.accs)), count + 1)


def _compute(ctx: KernelContext, results: Results, share: Share, block_id: Index) -> None:
    """All work of the block."""
    plan, smem, rows = ctx.plan, ctx.smem, ctx.plan.queries.chunk_rows

    def one_work(work, number, count):
        del number
        plgpu.barrier_wait(smem.q_ready)
        row_max = plgpu.layout_cast(jnp.full((rows,), -jnp.inf, jnp.float32), mosaic.COLUMN)
        accs = tuple(mosaic.filled((n, rows), 0.0) for n in columns_of(plan).accs)
        state = State(accs, mosaic.filled((TILE, rows), 0.0), row_max)
        step = functools.partial(_one_tile, ctx, work)
        state, count = lax.fori_loop(work.tile, work.end, step, _Carry(state, count))
        places, m = scheduler.partials_of(plan, share, work, block_id), work.sequence
        lost = smem.table.lost[m]
        row_sum = combine_latent.with_lost(state.row_sum.sum(axis=0), lost)
        head = combine_splits.Head(m, work.head, lost, places)
        own = Finish(functools.partial(_write, plan, results, m))
        epilogue(ctx, results, head, state._replace(row_sum=row_sum), own)
        return count

    producer.each_work(plan, smem.table, share, one_work, jnp.int32(0))


# ---- epilogue ------------------------------------------------------------------------------------


class Finish(NamedTuple):
    """The share of a warpgroup in the results of a row: as many columns as its state has."""

    write: Callable[[State], None]  # the result of all keys
    leads: bool = True  # whether it writes the numbers of whole rows, and counts the block
    join: Callable[[], None] | None = None  # waits for the other warpgroups that end so


def epilogue(
    ctx: KernelContext, results: Results, head: combine_splits.Head, state: State, own: Finish
) -> None:
    """The result, where the block had all keys. Else a partial to global memory; the last block
    makes the result of all.
    """
    partials = combine_latent.Partials(head.places, ctx.plan.partials_a_block)

    def partial():
        for ref, acc in zip(results.partial_out, state.accs, strict=True):
            combine_latent.store(ref, partials.places.own, acc)
        if own.leads:
            mosaic.store(results.partial_max.at[partials.places.own], state.row_max)
            mosaic.store(results.partial_sum.at[partials.places.own], state.row_sum)

    def of_all():
        own.write(combined(results, partials, [acc.shape for acc in state.accs]))

    end = Ending(functools.partial(own.write, state), partial, of_all, own.leads, own.join)
    combine_latent.finish(ctx, results, head, end)


def combined(
    results: Results, partials: combine_latent.Partials, shapes: Sequence[tuple[int, int]]
) -> State:
    """The state of all blocks' keys, by their partials, whose tiles have these shapes."""
    layout = mosaic.COLUMN
    row_max = combine_latent.row_max_of(results, partials, layout)
    row_sum = combine_latent.row_sum_of(results, partials, row_max, layout)

    def weighed(index, tiles):
        own = combine_latent.load_rows(results.partial_max, index, layout)
        weight = jnp.exp2(own - softmax.base_of(row_max))
        return tuple(
            down_columns(weight, shape) * combine_latent.load(ref, index, shape)
            for ref, shape in tiles
        )

    both = list(zip(results.partial_out, shapes, strict=True))
    at_once = len(both) if shapes[0][1] <= 16 else 1  # more would not fit into registers
    accs: tuple[RegisterTile, ...] = ()
    for start in range(0, len(both), at_once):
        tiles = both[start : start + at_once]
        zeros = tuple(mosaic.filled(shape, 0.0) for _, shape in tiles)
        accs += combine_latent.added(zeros, partials, functools.partial(weighed, tiles=tiles))
    return State(accs, row_sum, row_max)


def _write(plan: Plan, results: Results, m: Index, whole: State) -> None:
    """The result of a sequence."""
    sinks = None if results.sinks is None else mosaic.load(results.sinks, mosaic.COLUMN)
    factor, lse = softmax.finish(whole.row_max, whole.row_sum, sinks)
    mosaic.store(results.lse.at[m], lse)
    rows, start = pl.ds(m * plan.queries.chunk_rows, plan.queries.chunk_rows), 0
    for acc in whole.accs:
        out = (acc * down_columns(factor, acc.shape)).astype(plan.problem.dtype)
        out = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
        to = results.out.at[rows, pl.ds(start, acc.shape[0])]
        mosaic.store(to.transpose((1, 0)), out)
        start += acc.shape[0]


# ---- the kernel and its call ---------------------------------------------------------------------


def _kernel(refs: LatentRefs, outputs: Outputs, smem: FewRowsSmem, *, plan: Plan) -> None:
    block_id, wg = lax.axis_index("block"), lax.axis_index("wg")
    results = outputs.results(refs.counters, refs.sinks)
    ctx = row_gathers.with_table(KernelContext(plan, refs, smem))

    @pl.when(wg == 1)
    def _():
        producer.fill_table(ctx)
        plgpu.barrier_arrive(smem.table_ready)
        _load(ctx, scheduler.share_of(plan, ctx.smem.table, block_id))

    @pl.when(wg == 0)
    def _():
        plgpu.barrier_wait(smem.table_ready)
        _compute(ctx, results, scheduler.share_of(plan, ctx.smem.table, block_id), block_id)


def _partials(plan: Plan) -> tuple[jax.ShapeDtypeStruct, ...]:
    return partials_of_tiles(plan, columns_of(plan).accs)


def partials_of_tiles(plan: Plan, accs: Sequence[int]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """`accs`: columns of V in each tile of a partial."""
    rows, array = plan.queries.chunk_rows, jax.ShapeDtypeStruct
    return tuple(array((plan.partials, n * rows), jnp.float32) for n in accs)


PROGRAM = Program(_kernel, scratch, 2, _partials)
_KERNEL = sm90_common.kernel_with(plan_of, PROGRAM, limit)
KERNEL = dataclasses.replace(_KERNEL, reads_lists=True)
Config = KERNEL.config
