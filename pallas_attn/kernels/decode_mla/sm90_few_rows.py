"""Decode attention over a latent cache for few query rows: up to 32, for Hopper.

`decode_mla.sm90` gives tensor cores 64 query rows; of 16 heads three quarters would be padding, in
shared memory too, where keys on their way are what counts. Here the rows of a matmul are keys and
its columns are query rows, S' = K q' and O' = V' P': what tensor cores read is the kv tile, twice,
and hardly anything else. One warpgroup computes; the other, the producer, fills a ring of blocks of
columns, each of which is released as soon as it has been multiplied.

A row's max is raised only where a logit of a tile lies above it by more than
`softmax.RESCALE_THRESHOLD`; whether one does, the warps learn at the barrier over the probabilities
in shared memory.

The scheduler is that of decode; partials are combined by `decode_mla.combine`.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn.kernels.attention import softmax, tma_operands
from pallas_attn.kernels.attention.plan import Context
from pallas_attn.kernels.decode import combine_splits, mainloop, scheduler
from pallas_attn.kernels.decode.combine_splits import Results
from pallas_attn.kernels.decode.scheduler import Plan, Share, Table, WorkTile
from pallas_attn.kernels.decode_mla import combine_latent as mla_combine
from pallas_attn.kernels.decode_mla import producer as mla_producer
from pallas_attn.kernels.decode_mla.combine_latent import base_of
from pallas_attn.kernels.decode_mla.producer import TILE, WIDTH, Block, Refs
from pallas_attn.kernels.lang import mosaic, threads, warp_vote

Array = Any
Ref = Any
Scalar = Any

MOST = 32  # rows of query


class FewPlan(Plan):
    """Rows of query are a multiple of 8, side by side."""

    @property
    def chunk_rows(self) -> int:
        return tma_operands.round_up(self.rows, 8)

    @property
    def chunks(self) -> int:
        return 1

    @property
    def grid(self) -> int:
        splits = mla_combine.best_splits(self, 2 * self.most_tiles)
        return min(super().grid, self.problem.sequences * splits)

    @property
    def block_columns(self) -> int:
        """Columns of a block of a tile."""
        blocks = self.problem.head_dim // WIDTH
        return WIDTH * next(n for n in (3, 2, 1) if blocks % n == 0)

    @property
    def blocks_a_tile(self) -> int:
        return self.problem.head_dim // self.block_columns

    @property
    def ring(self) -> int:
        return max(self.config.stages, self.blocks_a_tile)

    def v_columns(self, block: int) -> int:
        """Columns of a block that are V's."""
        start = block * self.block_columns
        return min(max(self.problem.v_head_dim - start, 0), self.block_columns)

    @property
    def acc_columns(self) -> list[int]:
        """Columns of V in each block that has any."""
        return [n for n in map(self.v_columns, range(self.blocks_a_tile)) if n]


class Smem(NamedTuple):
    q: Any  # [chunk_rows, H]
    kv: Any  # [ring, TILE, block_columns]
    p: Any  # [2, chunk_rows, TILE]: probabilities of two tiles, alternately
    flags: Any  # int32[2 * WARPS]: likewise, whether a warp has a logit that is too high
    table: Table
    last: Any  # int32[1]
    q_ready: Any
    q_free: Any
    ready: Any
    free: Any
    table_ready: Any


def scratch(plan: FewPlan) -> Smem:
    dtype, rows = jnp.dtype(plan.problem.dtype), plan.chunk_rows

    def numbers(count):
        return plgpu.SMEM((count,), jnp.int32)

    barrier = plgpu.Barrier
    return Smem(
        q=mosaic.swizzled((rows, plan.problem.head_dim), dtype, 2 * WIDTH),
        kv=mosaic.swizzled((plan.ring, TILE, plan.block_columns), dtype, 2 * WIDTH),
        p=mosaic.swizzled((2, rows, TILE), dtype, 2 * WIDTH),
        flags=numbers(2 * threads.WARPS),
        table=scheduler.table_scratch(plan),
        last=numbers(1),
        q_ready=barrier(),
        q_free=barrier(),
        ready=barrier(num_barriers=plan.ring, num_arrivals=TILE // plan.page_rows),
        free=barrier(num_barriers=plan.ring),
        table_ready=barrier(),
    )


def smem_bytes(problem: DecodeProblem, config: Any) -> int:
    return scheduler.smem_bytes(scratch(FewPlan(problem, config)))


# ---- loading -------------------------------------------------------------------------------------


class _RingBlock(NamedTuple):
    """A block of columns in the ring."""

    ref: Ref  # [TILE, block_columns]
    ready: Ref  # the barrier that the producer's copies complete
    free: Ref  # the one that the computing warpgroup arrives at when it has multiplied the block


def _ring_block(ctx: Context, count: Scalar, block: int) -> _RingBlock:
    """That of a tile, before which there were `count` since the kernel began."""
    slot = lax.rem(count * ctx.plan.blocks_a_tile + block, jnp.int32(ctx.plan.ring))
    return _RingBlock(ctx.smem.kv.at[slot], ctx.smem.ready.at[slot], ctx.smem.free.at[slot])


def _load(ctx: Context, share: Share) -> None:
    """The producer."""
    plan, refs, smem = ctx.plan, ctx.refs, ctx.smem

    def blocks_of(count):
        for n in range(plan.blocks_a_tile):
            block = _ring_block(ctx, count, n)
            yield Block(
                columns=pl.ds(n * plan.block_columns, plan.block_columns),
                to=block.ref,
                ready=block.ready,
                free=block.free,
                reused=count * plan.blocks_a_tile + n >= plan.ring,
            )

    def one_work(work, number, count):
        pl.when(number > 0)(lambda: plgpu.barrier_wait(smem.q_free))
        rows = pl.ds(work.sequence * plan.chunk_rows, plan.chunk_rows)
        plgpu.copy_gmem_to_smem(refs.q.at[rows], smem.q, smem.q_ready)
        return mla_producer.load(ctx, work, count, blocks_of)

    mla_producer.each_work(plan, smem.table, share, one_work, jnp.int32(0))


# ---- computing -----------------------------------------------------------------------------------


class State(NamedTuple):
    accs: tuple[Array, ...]  # [acc_columns, chunk_rows] each
    row_sum: (
        Array  # [TILE, chunk_rows]: of the tiles' first keys, second keys, ...; or [chunk_rows]
    )
    row_max: Array  # [chunk_rows]


def _down_columns(columns: Array, shape: Sequence[int]) -> Array:
    """One number a column, in all rows."""
    return lax.broadcast_in_dim(columns, tuple(shape), [1])


def _logits(ctx: Context, work: WorkTile, tile: Scalar, s: Array) -> Array:
    """Scores -> logits in log2 units, those of invisible keys -inf."""
    plan = ctx.plan
    s, start = mainloop.logits_of_scores(plan, s), tile * TILE
    s = s if plan.unit_of_logits is None else s * plan.unit_of_logits

    def positions():
        key = mosaic.positions(s.shape, 0, start)
        row = mosaic.positions(s.shape, 1, 0)
        token = mainloop.token_of(plan, row)
        query = token + (work.length - plan.problem.q_len)
        return mainloop.Positions(query, key, lambda: row - token * plan.group)

    return mainloop.masked(ctx, work, start, s, positions)


def _put(p: Ref, numbers: Array) -> None:
    p.transpose((1, 0))[...] = numbers.astype(p.dtype)


class _Flag(NamedTuple):
    parity: Scalar  # of the tile
    moved: Scalar  # whether this warp has a logit that is too high


def _set_flag(thread: threads.Thread, flags: Ref, at: _Flag) -> None:
    """For the other warps."""
    warp = thread.index // 32
    thread.shared_store(flags, at.parity * threads.WARPS + warp, at.moved, thread.index % 32 < 1)


def _scores(ctx: Context, blocks: list[_RingBlock]) -> Array:
    """Begins as soon as the first columns are there."""
    plan, smem = ctx.plan, ctx.smem

    def body(acc):
        for n, block in enumerate(blocks):
            plgpu.barrier_wait(block.ready)
            columns = pl.ds(n * plan.block_columns, plan.block_columns)
            plgpu.wgmma(acc, block.ref, smem.q.at[:, columns].transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(body, plgpu.ACC((TILE, plan.chunk_rows), jnp.float32))


def _weigh(
    plan: FewPlan, blocks: list[_RingBlock], p: Ref, accs: Sequence[Array]
) -> tuple[Array, ...]:
    """Adds the values of a tile, and releases it."""
    some = [n for n in range(plan.blocks_a_tile) if plan.v_columns(n)]

    def body(refs):
        for n, acc in zip(some, refs, strict=True):
            columns = pl.ds(0, plan.v_columns(n))
            values = blocks[n].ref.at[:, columns].transpose((1, 0))
            plgpu.wgmma(acc, values, p.transpose((1, 0)))
        for done, n in enumerate(some):
            plgpu.wgmma_wait(len(some) - 1 - done)
            plgpu.barrier_arrive(blocks[n].free)

    return pl.run_state(body)(tuple(plgpu.ACC.init(acc) for acc in accs))


class _Carry(NamedTuple):
    state: State
    count: Scalar  # tiles since the kernel began


def _one_tile(ctx: Context, work: WorkTile, tile: Scalar, carry: _Carry) -> _Carry:
    (plan, _, smem), (state, count) = ctx, carry
    blocks = [_ring_block(ctx, count, n) for n in range(plan.blocks_a_tile)]
    s = _scores(ctx, blocks)
    for n, block in enumerate(blocks):
        if not plan.v_columns(n):
            plgpu.barrier_arrive(block.free)
    pl.when(tile == work.end - 1)(lambda: plgpu.barrier_arrive(smem.q_free))
    live = work.length - tile * TILE

    @pl.when(live < TILE)
    def clear():
        for n, block in enumerate(blocks):
            mla_producer.clear(block.ref, plan.v_columns(n), live)

    s = _logits(ctx, work, tile, s)
    above = s - _down_columns(state.row_max, s.shape)
    moved = warp_vote.any_in_warp(above, softmax.RESCALE_THRESHOLD)
    p = jnp.exp2(s - _down_columns(base_of(state.row_max), s.shape))
    parity = lax.rem(count, jnp.int32(2))
    ref = smem.p.at[parity]
    _put(ref, p)
    threads.each_thread(_set_flag, smem.flags, _Flag(parity, moved))
    plgpu.commit_smem()
    some = smem.flags[parity * threads.WARPS]
    for warp in range(1, threads.WARPS):
        some = some | smem.flags[parity * threads.WARPS + warp]

    def raised():
        higher = jnp.maximum(state.row_max, s.max(axis=0))
        moved = higher - state.row_max > softmax.RESCALE_THRESHOLD
        higher = jnp.where(moved, higher, state.row_max)
        p = jnp.exp2(s - _down_columns(base_of(higher), s.shape))
        _put(ref, p)
        plgpu.commit_smem()
        rescale = jnp.exp2(state.row_max - base_of(higher))
        accs = tuple(acc * _down_columns(rescale, acc.shape) for acc in state.accs)
        return State(accs, state.row_sum * _down_columns(rescale, s.shape) + p, higher)

    state = lax.cond(some != 0, raised, lambda: state._replace(row_sum=state.row_sum + p))
    return _Carry(state._replace(accs=_weigh(plan, blocks, ref, state.accs)), count + 1)


def _compute(ctx: Context, results: Results, share: Share, block_id: Scalar) -> None:
    plan, smem, rows = ctx.plan, ctx.smem, ctx.plan.chunk_rows

    def one_work(work, number, count):
        del number
        plgpu.barrier_wait(smem.q_ready)
        row_max = plgpu.layout_cast(jnp.full((rows,), -jnp.inf, jnp.float32), mosaic.COLUMN)
        state = State(
            tuple(mosaic.filled((n, rows), 0.0) for n in plan.acc_columns),
            mosaic.filled((TILE, rows), 0.0),
            row_max,
        )
        step = functools.partial(_one_tile, ctx, work)
        state, count = lax.fori_loop(work.tile, work.end, step, _Carry(state, count))
        _epilogue(ctx, results, work, state, scheduler.partials_of(plan, share, work, block_id))
        return count

    mla_producer.each_work(plan, smem.table, share, one_work, jnp.int32(0))


def _epilogue(
    ctx: Context, results: Results, work: WorkTile, state: State, found: scheduler.Partials
) -> None:
    """The result, where the block had all keys. Else a partial to global memory; the last block
    makes the result of all.
    """
    plan, smem = ctx.plan, ctx.smem
    lost = smem.table.lost[work.sequence]
    row_sum = state.row_sum.sum(axis=0)
    row_sum = row_sum + mosaic.broadcast_scalar(jnp.where(lost == 1, jnp.nan, 0.0), row_sum.shape)
    partials = mla_combine.Partials(*found, plan.partials_a_block)

    @pl.when(partials.count == 1)
    def _():
        _write(plan, results, work.sequence, state._replace(row_sum=row_sum))

    @pl.when(partials.count > 1)
    def _():
        for ref, acc in zip(results.partial_out, state.accs, strict=True):
            mla_combine.store(ref, partials.own, acc)
        mosaic.store(results.partial_max.at[partials.own], state.row_max)
        mosaic.store(results.partial_sum.at[partials.own], row_sum)
        at = combine_splits.Head(work.sequence, work.head, lost, *found)
        arrive = mosaic.in_context(combine_splits.arrive, plan)
        counter = combine_splits.CounterRefs(results.counters, smem.last)
        threads.each_thread(arrive, counter, at)

        @pl.when(smem.last[0] == 1)
        def _():
            _write(plan, results, work.sequence, _combined(plan, results, partials))


def _combined(plan: FewPlan, results: Results, partials: mla_combine.Partials) -> State:
    """Of the partials of all blocks."""
    layout, shapes = mosaic.COLUMN, [(n, plan.chunk_rows) for n in plan.acc_columns]
    sums = mla_combine.Sums(results.partial_max, results.partial_sum)
    row_max = mla_combine.row_max_of(sums, partials, layout)
    row_sum = mla_combine.row_sum_of(sums, partials, row_max, layout)

    def weighed(index, some):
        own = mla_combine.load_rows(results.partial_max, index, layout)
        weight = jnp.exp2(own - base_of(row_max))
        return tuple(
            _down_columns(weight, shape) * mla_combine.load(ref, index, shape)
            for ref, shape in some
        )

    both = list(zip(results.partial_out, shapes, strict=True))
    at_once = len(both) if plan.chunk_rows <= 16 else 1  # more would not fit into registers
    accs: tuple[Array, ...] = ()
    for start in range(0, len(both), at_once):
        some = both[start : start + at_once]
        zeros = tuple(mosaic.filled(shape, 0.0) for _, shape in some)
        accs += mla_combine.added(zeros, partials, functools.partial(weighed, some=some))
    return State(accs, row_sum, row_max)


def _write(plan: FewPlan, results: Results, m: Scalar, whole: State) -> None:
    """The result of a sequence."""
    sinks = None if results.sinks is None else mosaic.load(results.sinks, mosaic.COLUMN)
    factor, lse = softmax.finish(whole.row_max, whole.row_sum, sinks)
    mosaic.store(results.lse.at[m], lse)
    rows, start = pl.ds(m * plan.chunk_rows, plan.chunk_rows), 0
    for acc in whole.accs:
        out = (acc * _down_columns(factor, acc.shape)).astype(plan.problem.dtype)
        out = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
        to = results.out.at[rows, pl.ds(start, acc.shape[0])]
        mosaic.store(to.transpose((1, 0)), out)
        start += acc.shape[0]


def _kernel(  # noqa: PLR0913
    refs: Refs, given: Any, out: Ref, lse: Ref, partials: Any, smem: Smem, *, plan: FewPlan
) -> None:
    block_id, wg = lax.axis_index("block"), lax.axis_index("wg")
    results, ctx = Results(out, lse, *partials, *given), Context(plan, refs, smem)

    @pl.when(wg == 1)
    def _():
        mla_producer.fill_table(ctx)
        plgpu.barrier_arrive(smem.table_ready)
        _load(ctx, scheduler.share_of(plan, smem.table, block_id))

    @pl.when(wg == 0)
    def _():
        plgpu.barrier_wait(smem.table_ready)
        _compute(ctx, results, scheduler.share_of(plan, smem.table, block_id), block_id)


# ---- the call ------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("problem", "config"))
def launch(
    inputs: DecodeInputs, counters: Array, problem: DecodeProblem, config: Any
) -> tuple[Array, Array]:
    """out [M, t, N, Hv] in q's dtype, log-sum-exp float32 [M, N, t]."""
    plan = FewPlan(problem, config)
    refs = mla_producer.refs_of(inputs, plan.layout, plan.chunk_rows)
    sinks = mla_producer.sinks_of(inputs, plan.chunk_rows)
    of, rows = jax.ShapeDtypeStruct, plan.chunk_rows
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=(
            of((problem.sequences * rows, problem.v_head_dim), problem.dtype),
            of((problem.sequences, rows), jnp.float32),
            (
                tuple(of((plan.partials, n * rows), jnp.float32) for n in plan.acc_columns),
                of((plan.partials, rows), jnp.float32),
                of((plan.partials, rows), jnp.float32),
            ),
        ),
        scratch_types=(scratch(plan),),
        grid=(plan.grid,),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        compiler_params=mla_producer.COMPILER,
        kernel_name="decode_latent_few_sm90",
    )
    out, lse, _ = kernel(refs, (counters, sinks))
    return mla_combine.of_sequences(plan, out, lse)
