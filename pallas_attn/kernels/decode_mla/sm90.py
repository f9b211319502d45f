"""Decode attention over a latent cache, whose V is the first columns of K (MLA), for Hopper.

All query heads share the one kv head: a block takes up to 64 query rows, and each row of the cache
is 1152 bytes that serve as key and as value. With 128 heads that is work for tensor cores rather
than for memory, so kv tiles come by TMA, swizzled for wgmma. An output of 64 x 512 is too much for
the registers of one warpgroup: two share it by columns. A third computes the scores of all rows. It
is a tile ahead of them, and writes its probabilities to where the columns of K lay that are not of
V (those of rope). Half of q stays in its registers, which leaves shared memory for half a tile more
of keys. Up to 32 query rows are for `sm90_few_rows`.

The scheduler is that of decode, but neighbouring blocks have other rows of the same queries and
read the same keys: memory is read once, L2 as often as there are q chunks. Partials of a row are
combined by `decode_mla.combine`.

A warpgroup that multiplies values has a ring of blocks of columns: two tiles and a half where V has
512 columns. Each block is loaded anew as soon as it has been multiplied. Scores take the blocks of
all rings. The first block of a work is q's, on its way to registers. The columns of rope have two
slots; when a tile's scores are there, its probabilities take their place.

Warpgroups, and the barriers that they arrive at:
  0, 1  multiply values, by columns; `free` when a block of columns has been multiplied, also the
        block of q on its way to registers; `p_free` for a tile's probabilities
  2     scores; `q_free` when the last scores of a work are there; `p_ready` when a tile's
        probabilities are, with `row_max` and `row_sum`
  3     the producer: `q_ready`, `ready` and `rope_ready`; it fills the table of lengths first, for
        which all others wait at `table_ready`
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

from pallas_attn._call import gpu_specs
from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import cache_layout, softmax
from pallas_attn.kernels.attention.plan import Context
from pallas_attn.kernels.decode import combine_splits, mainloop, scheduler
from pallas_attn.kernels.decode.combine_splits import Results
from pallas_attn.kernels.decode.mainloop import ROWS
from pallas_attn.kernels.decode.scheduler import Plan, Table, WorkTile
from pallas_attn.kernels.decode_mla import combine_latent as mla_combine
from pallas_attn.kernels.decode_mla import packed, sm90_few_rows
from pallas_attn.kernels.decode_mla import producer as mla_producer
from pallas_attn.kernels.decode_mla.combine_latent import base_of
from pallas_attn.kernels.decode_mla.plan import P_SLOTS, V_WARPGROUPS, LatentPlan, member_of
from pallas_attn.kernels.decode_mla.producer import TILE, WIDTH, Block, Refs
from pallas_attn.kernels.lang import mosaic, threads, warp_vote

Array = Any
Ref = Any
Scalar = Any

SCORES, PRODUCER = V_WARPGROUPS, V_WARPGROUPS + 1  # the other warpgroups


@dataclasses.dataclass(frozen=True)
class Config:
    """`stages`: the ring has room for so many blocks of columns, if not for as many as the kernel
    needs. `grid`: persistent blocks. `split_tiles`: kv tiles of a split where `batch_invariant` is
    asked for.
    """

    stages: int = 6
    grid: int = gpu_specs.multiprocessors(gpu_specs.HOPPER)
    split_tiles: int = 16
    # What `scheduler.Plan` asks of the Config of every decode kernel.
    tile, fewest_stages, q_rows, bulk, many_heads = TILE, 2, ROWS, True, False
    head_overhead, load_first, heads_at_once = 0, False, 1

    def __post_init__(self):
        scheduler.check_config(self)

    @classmethod
    def default(cls, problem: DecodeProblem) -> "Config":
        """As many bytes in flight as there is room for; and so many blocks that all have as much to
        do, where a few less than there are multiprocessors have.
        """
        problem, most = packed.of_rows(problem), cls().grid
        heads = problem.sequences * _plan_of(problem, cls()).chunks
        few = range(most, most - most // 16, -1)
        grid = next((n for n in few if heads % n == 0 or n % heads == 0), most)
        return scheduler.deepest(smem_bytes, problem, cls(grid=grid), scheduler.SMEM_LIMIT)


def limit(problem: DecodeProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    if (refused := packed.limit(problem)) is not None:
        return refused
    problem = packed.of_rows(problem)
    return scheduler.dtype_limit(problem) or _rows_limit(problem) or scheduler.size_limit(problem)


def _rows_limit(problem: DecodeProblem) -> Limit | None:
    """Why it cannot take such rows of V within K, or None."""
    if problem.dtype == "float32":
        return Limit(
            "float32 queries over V within K; it takes bfloat16 and float16",
            "cast q to one of them",
        )
    reference = 'say implementation="reference"'
    if cache_layout.layout_of(problem).separate:
        return Limit(
            "separate arrays of latent rows, which would take a tensor map each",
            "use a StackedCache or a PagedCache",
        )
    if problem.quantized or problem.cache_dtype != problem.dtype:
        return Limit(f"a {problem.cache_dtype} cache with V within K", "keep it in q's dtype")
    if problem.kv_heads != 1:
        return Limit(f"V within K of {problem.kv_heads} kv heads; it takes one", reference)
    rest = problem.head_dim - problem.v_head_dim
    if problem.v_head_dim % (2 * WIDTH) or problem.v_head_dim > 512 or rest not in (0, WIDTH):
        return Limit(
            f"V within K of head dims {problem.head_dim} and {problem.v_head_dim}; it takes "
            "v_head_dim 128, 256, 384 or 512, and head_dim as large or larger by 64",
            reference,
        )
    rows = problem.page_size or max(problem.capacities)
    if rows % 8:
        return Limit(
            f"V within K by {rows} rows; TMA copies 8 at a time",
            "make capacities (or the page size) a multiple of 8",
        )
    if smem_bytes(problem, Config(stages=2)) > scheduler.SMEM_LIMIT:
        reason = f"V within K of {problem.sequences} sequences: no room for their lengths"
        return Limit(reason, "split the sequences over several calls")
    return None


class Smem(NamedTuple):
    q: Any  # [V_WARPGROUPS, ROWS, v_columns - block_columns]: what is not in registers, if anything
    kv: Any  # [V_WARPGROUPS, ring, TILE, block_columns]: each warpgroup's blocks of columns
    q_rope: Any  # [ROWS, rope_columns]; None where there are none
    k_rope: Any  # [P_SLOTS, TILE, rope_columns]
    p: Any  # [P_SLOTS, ROWS, TILE]: probabilities; None where k_rope has room for them
    row_max: Any  # float32[P_SLOTS, ROWS]: after a tile
    row_sum: Any  # likewise, after the last tile of a work
    table: Table
    last: Any  # int32[1]
    q_ready: Any
    q_free: Any
    ready: Any  # of the blocks of both rings
    free: Any
    rope_ready: Any
    p_ready: Any
    p_free: Any
    joined: Any  # all warpgroups that multiply values are there
    table_ready: Any


def scratch(plan: LatentPlan) -> Smem:
    """Shared memory, described once: `run` launches it, `smem_bytes` adds it up."""
    dtype, ring, rope = jnp.dtype(plan.problem.dtype), plan.ring, plan.rope_columns

    def swizzled(*shape):
        return mosaic.swizzled(shape, dtype, 2 * WIDTH) if shape[-1] else None

    def numbers(count):
        return plgpu.SMEM((count,), jnp.int32)

    barrier, stretches = plgpu.Barrier, TILE // plan.page_rows
    return Smem(
        q=swizzled(V_WARPGROUPS, ROWS, plan.v_columns - plan.block_columns),
        kv=swizzled(V_WARPGROUPS, ring, TILE, plan.block_columns),
        q_rope=swizzled(ROWS, rope),
        k_rope=swizzled(P_SLOTS, TILE, rope),
        p=None if rope else swizzled(P_SLOTS, ROWS, TILE),
        row_max=plgpu.SMEM((P_SLOTS, ROWS), jnp.float32),
        row_sum=plgpu.SMEM((P_SLOTS, ROWS), jnp.float32),
        table=scheduler.table_scratch(plan),
        last=numbers(1),
        q_ready=barrier(num_arrivals=max(plan.q_copies, 1)),
        q_free=barrier(),
        ready=barrier(num_barriers=V_WARPGROUPS * ring, num_arrivals=stretches),
        free=barrier(num_barriers=V_WARPGROUPS * ring),
        rope_ready=barrier(num_barriers=P_SLOTS, num_arrivals=stretches),
        p_ready=barrier(num_barriers=P_SLOTS),
        p_free=barrier(num_barriers=P_SLOTS, num_arrivals=V_WARPGROUPS),
        joined=barrier(num_arrivals=V_WARPGROUPS),
        table_ready=barrier(),
    )


def _few(problem: DecodeProblem) -> bool:
    return problem.q_len * problem.q_heads <= sm90_few_rows.MOST


def _plan_of(problem: DecodeProblem, config: Config) -> Plan:
    return (sm90_few_rows.FewPlan if _few(problem) else LatentPlan)(problem, config)


def smem_bytes(problem: DecodeProblem, config: Config) -> int:
    problem = packed.of_rows(problem)
    if _few(problem):
        return sm90_few_rows.smem_bytes(problem, config)
    return scheduler.smem_bytes(scratch(LatentPlan(problem, config)))


# ---- loading -------------------------------------------------------------------------------------


class _RingBlock(NamedTuple):
    """A block of columns in the ring of a warpgroup."""

    ref: Ref  # [TILE, block_columns]
    ready: Ref  # the barrier that the producer's copies complete
    free: Ref  # the one that the warpgroup arrives at when it has multiplied the block


def _ring_block(ctx: Context, wg: Any, number: Scalar) -> _RingBlock:
    """The one that holds the number-th block of the warpgroup's columns since the kernel began."""
    plan, smem = ctx.plan, ctx.smem
    slot = lax.rem(number, jnp.int32(plan.ring))
    entry = wg * plan.ring + slot
    return _RingBlock(smem.kv.at[wg, slot], smem.ready.at[entry], smem.free.at[entry])


def _each_work(ctx: Context, block_id: Scalar, body: Callable) -> None:
    """`body(work, number, count)` for each work of the block; `count`: the tiles before, which it
    comes back with, those of this work added.
    """
    plan, table = ctx.plan, ctx.smem.table
    member = member_of(plan, block_id)

    def own(work, number, count):
        head = work.head * plan.neighbours + member.number
        return body(work._replace(head=head), number, count)

    share = scheduler.share_of(plan.groups, table, member.group)
    mla_producer.each_work(plan.groups, table, share, own, jnp.int32(0))


def _q_block(plan: LatentPlan, number: Scalar, count: Scalar) -> Scalar:
    """The number of the ring's block that holds q's, before those of the keys: of work tile
    `number`, before which there were `count` tiles.
    """
    return number + count * plan.blocks_a_tile


def _load(ctx: Context, block_id: Scalar) -> None:
    """The producer."""
    plan, smem = ctx.plan, ctx.smem
    own = member_of(plan, block_id).number

    def prefetches(tile):  # one of the neighbours does
        return lax.rem(tile, jnp.int32(plan.neighbours)) == own

    def one_work(work, number, count):
        _load_q(ctx, work, number, count)

        def blocks_of(count):
            first = _q_block(plan, number, count) + 1
            for n in range(plan.blocks_a_tile):
                for wg in range(V_WARPGROUPS):
                    block = _ring_block(ctx, wg, first + n)
                    start = wg * plan.v_columns + n * plan.block_columns
                    yield Block(
                        columns=pl.ds(start, plan.block_columns),
                        to=block.ref,
                        ready=block.ready,
                        free=block.free,
                        reused=first + n >= plan.ring,
                    )
            if plan.rope_columns:
                slot = lax.rem(count, jnp.int32(P_SLOTS))
                yield Block(
                    columns=pl.ds(plan.problem.v_head_dim, plan.rope_columns),
                    to=smem.k_rope.at[slot],
                    ready=smem.rope_ready.at[slot],
                    free=smem.p_free.at[slot],
                    reused=count >= P_SLOTS,
                )

        ahead = prefetches if plan.scores_first else None
        return mla_producer.load(ctx, work, count, blocks_of, ahead)

    _each_work(ctx, block_id, one_work)


def _load_q(ctx: Context, work: WorkTile, number: Scalar, count: Scalar) -> None:
    """Columns that go to registers come through the rings."""
    plan, refs, smem = ctx.plan, ctx.refs, ctx.smem
    chunk = lax.rem(work.head, jnp.int32(plan.chunks)) * ROWS
    start, first = work.sequence * plan.padded_rows + chunk, _q_block(plan, number, count)

    def copy(column, width, to, ready, row=0, rows=ROWS):
        source = refs.q.at[pl.ds(start + row, rows), pl.ds(column, width)]
        plgpu.copy_gmem_to_smem(source, to, ready)

    for wg in range(V_WARPGROUPS):
        block = _ring_block(ctx, wg, first)
        pl.when(first >= plan.ring)(functools.partial(plgpu.barrier_wait, block.free))
        for row in range(0, ROWS, plan.page_rows):  # as many copies as keys take
            some = block.ref.at[pl.ds(row, plan.page_rows)]
            copy(wg * plan.v_columns, plan.block_columns, some, block.ready, row, plan.page_rows)
    if not plan.q_copies:
        return
    pl.when(number > 0)(lambda: plgpu.barrier_wait(smem.q_free))
    for wg in range(V_WARPGROUPS):
        if smem.q is not None:
            width = plan.v_columns - plan.block_columns
            copy(wg * plan.v_columns + plan.block_columns, width, smem.q.at[wg], smem.q_ready)
    if plan.rope_columns:
        copy(plan.problem.v_head_dim, plan.rope_columns, smem.q_rope, smem.q_ready)


# ---- computing -----------------------------------------------------------------------------------


def _probabilities(ctx: Context, slot: Scalar) -> Ref:
    """Where a tile's are: in place of its columns of rope."""
    return ctx.smem.k_rope.at[slot] if ctx.plan.rope_columns else ctx.smem.p.at[slot]


def _queries(ctx: Context, first: Scalar) -> list[Array]:
    """The columns of q that stay in registers: the first of each warpgroup's."""
    found = []
    for wg in range(V_WARPGROUPS):
        block = _ring_block(ctx, wg, first)
        plgpu.barrier_wait(block.ready)
        found.append(plgpu.load(block.ref, layout=mosaic.TILE))
    if ctx.plan.q_copies:
        plgpu.barrier_wait(ctx.smem.q_ready)
    return found


def _scores(
    ctx: Context, q: list[Array], first: Scalar, slot: Scalar, release: Callable[[], None]
) -> Array:
    """Begins as soon as the first columns are there; `release` of the probabilities of the tile
    before is called when all but the last are multiplied.
    """
    plan, smem = ctx.plan, ctx.smem

    def body(acc):
        for n in range(plan.blocks_a_tile):
            for wg in range(V_WARPGROUPS):
                block = _ring_block(ctx, wg, first + n)
                plgpu.barrier_wait(block.ready)
                columns = pl.ds((n - 1) * plan.block_columns, plan.block_columns)
                rows = smem.q.at[wg, :, columns] if n else q[wg]
                plgpu.wgmma(acc, rows, block.ref.transpose((1, 0)))
        if plan.rope_columns:
            plgpu.barrier_wait(smem.rope_ready.at[slot])
            plgpu.wgmma(acc, smem.q_rope, smem.k_rope.at[slot].transpose((1, 0)))
        if plan.scores_first:
            plgpu.wgmma_wait(1)
            release()
        return acc[...]

    return pl.run_scoped(body, plgpu.ACC((ROWS, TILE), jnp.float32))


def _put(ref: Ref, numbers: Array) -> None:
    ref[...] = numbers


def _score(ctx: Context, block_id: Scalar) -> None:
    """Probabilities of all tiles, and what they are relative to.

    Where scores are first, those of a tile are released when the scores of the next are all but
    there: tensor cores do the values of a tile under the softmax of the next.
    """
    plan, smem = ctx.plan, ctx.smem

    def one_work(work, number, count):
        q = _queries(ctx, _q_block(plan, number, count))

        def one_tile(tile, carry):
            row_max, row_sum, count = carry
            slot, first = lax.rem(count, jnp.int32(P_SLOTS)), _q_block(plan, number, count) + 1
            before, last = lax.rem(count + (P_SLOTS - 1), jnp.int32(P_SLOTS)), tile == work.end - 1
            release = functools.partial(plgpu.barrier_arrive, smem.p_ready.at[before])
            s = _scores(ctx, q, first, slot, lambda: pl.when(tile > work.tile)(release))
            if plan.q_copies:
                pl.when(last)(lambda: plgpu.barrier_arrive(smem.q_free))
            live = work.length - tile * TILE

            @pl.when(live < TILE)
            def _():
                for n in range(plan.blocks_a_tile):
                    for wg in range(V_WARPGROUPS):
                        block = _ring_block(ctx, wg, first + n)
                        mla_producer.clear(block.ref, plan.block_columns, live)

            s, _ = mainloop.logits(ctx, work, tile, s, None)
            new = softmax.next_step(s, plan.unit_of_logits, row_max, empty_ok=True)
            row_sum = softmax.rescaled(new, row_sum) + new.row_sum
            # What probabilities are put over were keys: all warps must have their scores.
            threads.each_thread(lambda thread, *_: thread.sync(), (), ())
            if not plan.rope_columns:
                wait = functools.partial(plgpu.barrier_wait, smem.p_free.at[slot])
                pl.when(count >= P_SLOTS)(wait)
            _probabilities(ctx, slot)[...] = new.p.astype(plan.problem.dtype)
            smem.row_max.at[slot][...] = new.row_max
            pl.when(last)(lambda: _put(smem.row_sum.at[slot], row_sum.sum(axis=1)))
            plgpu.commit_smem()
            at_once = last if plan.scores_first else True
            pl.when(at_once)(lambda: plgpu.barrier_arrive(smem.p_ready.at[slot]))
            return new.row_max, row_sum, count + 1

        row_max = mosaic.filled((ROWS,), -jnp.inf)
        row_sum = mosaic.filled((ROWS, softmax.PARTIALS), 0.0)
        return lax.fori_loop(work.tile, work.end, one_tile, (row_max, row_sum, count))[2]

    _each_work(ctx, block_id, one_work)


class State(NamedTuple):
    accs: tuple[Array, ...]  # [ROWS, block_columns] each
    row_max: Array  # [ROWS]: what they are relative to
    row_sum: Array  # [ROWS]


class _Own(NamedTuple):
    """Which block and which warpgroup this is."""

    block_id: Scalar
    wg: Scalar


def _weigh(ctx: Context, results: Results, own: _Own) -> None:
    """A warpgroup's columns of the values, of all tiles."""
    plan, smem, wg = ctx.plan, ctx.smem, own.wg

    def one_work(work, number, count):
        q_block = _ring_block(ctx, wg, _q_block(plan, number, count))
        plgpu.barrier_wait(q_block.ready)

        def one_tile(tile, carry):
            state, count = carry
            slot, first = lax.rem(count, jnp.int32(P_SLOTS)), _q_block(plan, number, count) + 1
            blocks = [_ring_block(ctx, wg, first + n) for n in range(plan.blocks_a_tile)]
            for block in blocks:
                plgpu.barrier_wait(block.ready)
            plgpu.barrier_wait(smem.p_ready.at[slot])
            # Where there are scores, q is in registers.
            free_q = functools.partial(plgpu.barrier_arrive, q_block.free)
            pl.when(tile == work.tile)(free_q)
            row_max = plgpu.load(smem.row_max.at[slot], layout=mosaic.ROW)
            row_sum = plgpu.load(smem.row_sum.at[slot], layout=mosaic.ROW)
            rescale = jnp.exp2(state.row_max - base_of(row_max))
            accs = lax.cond(
                warp_vote.any_in_warp(row_max - state.row_max, 0.0) != 0,
                lambda: tuple(
                    acc * mosaic.broadcast_rows(rescale, acc.shape) for acc in state.accs
                ),
                lambda: state.accs,
            )

            def matmuls(refs):
                p = _probabilities(ctx, slot)
                for acc, block in zip(refs, blocks, strict=True):
                    plgpu.wgmma(acc, p, block.ref)
                for n, block in enumerate(blocks):
                    plgpu.wgmma_wait(plan.blocks_a_tile - 1 - n)
                    plgpu.barrier_arrive(block.free)

            accs = pl.run_state(matmuls)(tuple(plgpu.ACC.init(acc) for acc in accs))
            plgpu.barrier_arrive(smem.p_free.at[slot])
            return State(accs, row_max, row_sum), count + 1

        shape = (ROWS, plan.block_columns)
        accs = tuple(mosaic.filled(shape, 0.0) for _ in range(plan.blocks_a_tile))
        state = State(accs, mosaic.filled((ROWS,), -jnp.inf), mosaic.filled((ROWS,), 0.0))
        state, count = lax.fori_loop(work.tile, work.end, one_tile, (state, count))
        _epilogue(ctx, results, work, state, own)
        return count

    _each_work(ctx, own.block_id, one_work)


def _join(smem: Smem) -> None:
    plgpu.barrier_arrive(smem.joined)
    plgpu.barrier_wait(smem.joined)


def _epilogue(ctx: Context, results: Results, work: WorkTile, state: State, own: _Own) -> None:
    """The result, where the block had all keys. Else a partial to global memory; the last block
    makes the result of all.
    """
    plan, smem, wg = ctx.plan, ctx.smem, own.wg
    member = member_of(plan, own.block_id)
    share = scheduler.share_of(plan.groups, smem.table, member.group)
    count, *others = scheduler.partials_of(plan.groups, share, work, member.group)
    index, first, later = (n * plan.neighbours + member.number for n in others)
    partials = mla_combine.Partials(count, index, first, later, plan.partials_a_block)
    lost = smem.table.lost[work.sequence]
    row_sum = state.row_sum + mosaic.broadcast_scalar(jnp.where(lost == 1, jnp.nan, 0.0), (ROWS,))

    @pl.when(count == 1)
    def _():
        factor = _factor(plan, results, work, wg, state._replace(row_sum=row_sum))
        for n, acc in enumerate(state.accs):
            _write(plan, results, work, _Columns(wg, n, acc), factor)

    @pl.when(count > 1)
    def _():
        for n, acc in enumerate(state.accs):
            mla_combine.store(results.partial_out, plan.partial_block(index, wg, n), acc)

        @pl.when(wg == 0)
        def _():
            mosaic.store(results.partial_max.at[index], state.row_max)
            mosaic.store(results.partial_sum.at[index], row_sum)

        _join(smem)

        @pl.when(wg == 0)
        def _():
            at = combine_splits.Head(work.sequence, work.head, lost, count, index, first, later)
            arrive = mosaic.in_context(combine_splits.arrive, plan)
            counter = combine_splits.CounterRefs(results.counters, smem.last)
            threads.each_thread(arrive, counter, at)

        _join(smem)
        pl.when(smem.last[0] == 1)(lambda: _combine(plan, results, work, wg, partials))
        _join(smem)  # `last` is read


def _combine(
    plan: LatentPlan, results: Results, work: WorkTile, wg: Scalar, partials: mla_combine.Partials
) -> None:
    """The partials of all blocks -> the result."""
    layout, shape = mosaic.ROW, (ROWS, plan.block_columns)
    sums = mla_combine.Sums(results.partial_max, results.partial_sum)
    row_max = mla_combine.row_max_of(sums, partials, layout)
    row_sum = mla_combine.row_sum_of(sums, partials, row_max, layout)
    factor = _factor(plan, results, work, wg, State((), row_max, row_sum))
    for n in range(plan.blocks_a_tile):

        def weighed(index, n=n):
            own = mla_combine.load_rows(results.partial_max, index, layout)
            weight = mosaic.broadcast_rows(jnp.exp2(own - base_of(row_max)), shape)
            tile = plan.partial_block(index, wg, n)
            return (weight * mla_combine.load(results.partial_out, tile, shape),)

        zeros = (mosaic.filled(shape, 0.0),)
        (acc,) = mla_combine.added(zeros, partials, weighed)
        _write(plan, results, work, _Columns(wg, n, acc), factor)


def _factor(plan: LatentPlan, results: Results, work: WorkTile, wg: Scalar, whole: State) -> Array:
    """What all columns are to be multiplied by; it writes the log-sum-exp."""
    chunk = lax.rem(work.head, jnp.int32(plan.chunks))
    at = pl.ds(chunk * ROWS, ROWS)
    sinks = None if results.sinks is None else mosaic.load(results.sinks.at[at], mosaic.ROW)
    factor, lse = softmax.finish(whole.row_max, whole.row_sum, sinks)
    line = work.sequence * plan.chunks + chunk
    pl.when(wg == 0)(lambda: mosaic.store(results.lse.at[line], lse))
    return factor


class _Columns(NamedTuple):
    """Columns of the output."""

    wg: Scalar  # whose
    n: int  # which of its blocks
    acc: Array  # [ROWS, block_columns]


def _write(
    plan: LatentPlan, results: Results, work: WorkTile, columns: _Columns, factor: Array
) -> None:
    """By the warps that have rows of the output."""
    wg, n, acc = columns
    line = work.sequence * plan.chunks + lax.rem(work.head, jnp.int32(plan.chunks))
    row = mosaic.positions((ROWS,), 0, 0)
    wanted = warp_vote.any_in_warp((plan.most_rows - row).astype(jnp.float32), 0.0)
    out = (acc * mosaic.broadcast_rows(factor, acc.shape)).astype(plan.problem.dtype)
    start = wg * plan.v_columns + n * plan.block_columns
    to = pl.ds(line * ROWS, ROWS), pl.ds(start, plan.block_columns)
    pl.when(wanted != 0)(lambda: mosaic.store(results.out.at[to], out))


def _kernel(  # noqa: PLR0913
    refs: Refs, given: Any, out: Ref, lse: Ref, partials: Any, smem: Smem, *, plan: LatentPlan
) -> None:
    block_id, wg = lax.axis_index("block"), lax.axis_index("wg")
    results, ctx = Results(out, lse, *partials, *given), Context(plan, refs, smem)

    @pl.when(wg == PRODUCER)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        mla_producer.fill_table(ctx)
        plgpu.barrier_arrive(smem.table_ready)
        _load(ctx, block_id)

    @pl.when(wg == SCORES)
    def _():
        plgpu.set_max_registers(168, action="increase")
        plgpu.barrier_wait(smem.table_ready)
        _score(ctx, block_id)

    @pl.when(wg < V_WARPGROUPS)
    def _():
        plgpu.set_max_registers(160, action="increase")
        plgpu.barrier_wait(smem.table_ready)
        _weigh(ctx, results, _Own(block_id, wg))


# ---- the call ------------------------------------------------------------------------------------


def run(inputs: DecodeInputs, problem: DecodeProblem, config: Config) -> tuple[Array, Array]:
    """out [M, t, N, Hv] in q's dtype, log-sum-exp float32 [M, N, t]; of packed rows [tokens, N, Hv]
    and [N, tokens].
    """

    def launch(inputs, one):
        call = sm90_few_rows.launch if _few(one) else _launch
        return call(inputs, combine_splits.counters(_plan_of(one, config)), one, config)

    return packed.run(launch, inputs, problem)


@functools.partial(jax.jit, static_argnames=("problem", "config"))
def _launch(
    inputs: DecodeInputs, counters: Array, problem: DecodeProblem, config: Config
) -> tuple[Array, Array]:
    """Jitted, so that a model of many layers traces it once."""
    plan = LatentPlan(problem, config)
    refs = mla_producer.refs_of(inputs, plan.layout, plan.padded_rows)
    sinks = mla_producer.sinks_of(inputs, plan.chunks * ROWS)
    lines = problem.sequences * plan.chunks
    of, kept = jax.ShapeDtypeStruct, plan.partial_block(plan.partials, 0, 0)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=(
            of((lines * ROWS, problem.v_head_dim), problem.dtype),
            of((lines, ROWS), jnp.float32),
            (
                of((kept, ROWS * plan.block_columns), jnp.float32),
                of((plan.partials, ROWS), jnp.float32),
                of((plan.partials, ROWS), jnp.float32),
            ),
        ),
        scratch_types=(scratch(plan),),
        grid=(plan.grid,),
        grid_names=("block",),
        num_threads=V_WARPGROUPS + 2,
        thread_name="wg",
        compiler_params=mla_producer.COMPILER,
        kernel_name="decode_latent_sm90",
    )
    out, lse, _ = kernel(refs, (counters, sinks))
    return mla_combine.of_sequences(plan, out, lse)
