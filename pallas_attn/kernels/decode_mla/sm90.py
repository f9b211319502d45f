"""Decode attention over a latent cache, whose V is the first columns of K (MLA), for Hopper.

All query heads share the one kv head: a block takes up to 64 query rows, and each row of the cache
is 1152 bytes that serve as key and as value. With 128 heads that is work for tensor cores rather
than for memory, so kv tiles come by TMA, swizzled for wgmma. An output of 64 x 512 is too much for
the registers of one warpgroup: two share it by columns. A third computes the scores of all rows. It
is a tile ahead of them, and writes its probabilities over the columns of K that are not of V (those
of rope). Half of q stays in its registers, which leaves shared memory for half a tile more of keys.
Up to 32 query rows are for `sm90_few_rows`. Rows that lists name come by cp.async to where TMA puts
others (`row_gathers`).

The scheduler is that of decode, but neighbouring blocks have other rows of the same queries and
read the same keys: memory is read once, L2 as often as there are q chunks. Partials of a row are
combined by `combine_latent`.

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
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import DecodeProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import softmax
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.decode import combine_splits, mainloop, scheduler
from pallas_attn.kernels.decode.combine_splits import Outputs, Results
from pallas_attn.kernels.decode.plan import ROWS_OF_WARPS as ROWS
from pallas_attn.kernels.decode.plan import Plan
from pallas_attn.kernels.decode.scheduler import Partials, Table, WorkTile
from pallas_attn.kernels.decode_mla import (
    combine_apart,
    combine_latent,
    producer,
    row_gathers,
    sm90_common,
)
from pallas_attn.kernels.decode_mla.producer import TILE, WIDTH, Copy, LatentRefs
from pallas_attn.kernels.decode_mla.sm90_common import P_SLOTS, V_WARPGROUPS, Program
from pallas_attn.kernels.decode_mla.sm90_plan import (
    columns_of,
    combined_apart,
    groups_of,
    member_of,
    neighbours,
    partial_block,
    plan_of,
    scores_first,
)
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.panels import Block
from pallas_attn.kernels.lang.types import (
    Barrier,
    Index,
    RegisterTile,
    SmemRef,
)

OTHER = "leave implementation=None"
SCORES, PRODUCER = V_WARPGROUPS, V_WARPGROUPS + 1  # the other warpgroups


def limit(problem: DecodeProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    if problem.byte_rows:
        return Limit("a latent cache of bytes; it keeps rows in q's dtype", OTHER)
    return sm90_common.limit(problem)


class LatentSmem(NamedTuple):
    q: SmemRef  # [V_WARPGROUPS, ROWS, ..]: columns that are not in registers, if there are any
    kv: SmemRef  # [V_WARPGROUPS, ring, TILE, block]: blocks of columns of each warpgroup
    q_rope: SmemRef  # [ROWS, rope]; None where there are no such columns
    k_rope: SmemRef  # [P_SLOTS, TILE, rope]
    p: SmemRef  # [P_SLOTS, ROWS, TILE]: probabilities; None where k_rope has room for them
    row_max: SmemRef  # float32[P_SLOTS, ROWS]: after a tile
    row_sum: SmemRef  # likewise, after the last tile of a work
    table: Table | None  # None: `row_gathers.with_table`
    last: SmemRef  # int32[1]
    holes: SmemRef | None  # `row_gathers.holes_scratch`
    q_ready: Barrier
    q_free: Barrier
    ready: Barrier  # one a block of both rings
    free: Barrier
    rope_ready: Barrier
    p_ready: Barrier
    p_free: Barrier
    joined: Barrier  # all warpgroups that multiply values are there
    table_ready: Barrier


def scratch(plan: Plan) -> LatentSmem:
    """Shared memory, described once: `run` launches it, `smem_bytes` adds it up."""
    dtype, columns, barrier = jnp.dtype(plan.problem.dtype), columns_of(plan), plgpu.Barrier
    stretches = TILE // plan.keys.page_rows

    def swizzled(*shape):
        return mosaic.swizzled(shape, dtype, 2 * WIDTH) if shape[-1] else None

    return LatentSmem(
        q=swizzled(V_WARPGROUPS, ROWS, columns.v - columns.block),
        kv=swizzled(V_WARPGROUPS, columns.ring, TILE, columns.block),
        q_rope=swizzled(ROWS, columns.rope),
        k_rope=swizzled(P_SLOTS, TILE, columns.rope),
        p=None if columns.rope else swizzled(P_SLOTS, ROWS, TILE),
        row_max=plgpu.SMEM((P_SLOTS, ROWS), jnp.float32),
        row_sum=plgpu.SMEM((P_SLOTS, ROWS), jnp.float32),
        table=row_gathers.table_scratch(plan),
        last=plgpu.SMEM((1,), jnp.int32),
        holes=row_gathers.holes_scratch(plan, columns.ring // columns.blocks),
        q_ready=barrier(num_arrivals=max(columns.q_copies, 1)),
        q_free=barrier(),
        ready=barrier(num_barriers=V_WARPGROUPS * columns.ring, num_arrivals=stretches),
        free=barrier(num_barriers=V_WARPGROUPS * columns.ring),
        rope_ready=barrier(num_barriers=P_SLOTS, num_arrivals=stretches),
        p_ready=barrier(num_barriers=P_SLOTS),
        p_free=barrier(num_barriers=P_SLOTS, num_arrivals=V_WARPGROUPS),
        joined=barrier(num_arrivals=V_WARPGROUPS),
        table_ready=barrier(),
    )


# ---- blocks of columns, and the work of a block -------------------------------------------------


def _ring_block(ctx: KernelContext, wg: Index, number: Index) -> Block:
    """The block that holds the number-th of the warpgroup's columns since the kernel began."""
    ring, smem = columns_of(ctx.plan).ring, ctx.smem
    slot = lax.rem(number, jnp.int32(ring))
    entry = wg * ring + slot
    place = wg, slot
    return Block(smem.kv.at[place], smem.ready.at[entry], smem.free.at[entry], smem.kv, place)


def _q_block(plan: Plan, number: Index, count: Index) -> Index:
    """The number of the ring's block that holds q's, before those of the keys: of work tile
    `number`, before which there were `count` tiles.
    """
    return number + count * columns_of(plan).blocks


def _each_work(ctx: KernelContext, block_id: Index, body: Callable) -> None:
    """`body(work, number, count)` for each work of the block; `count`: the tiles before, which it
    comes back with, those of this work added.
    """
    plan, table = ctx.plan, ctx.smem.table
    member, groups = member_of(plan, block_id), groups_of(plan)

    def own(work, number, count):
        head = work.head * neighbours(plan) + member.number
        return body(work._replace(head=head), number, count)

    share = scheduler.share_of(groups, table, member.group)
    producer.each_work(groups, table, share, own, jnp.int32(0))


# ---- the producer --------------------------------------------------------------------------------


def _load(ctx: KernelContext, block_id: Index) -> None:
    """Q and all tiles of the block."""
    plan, smem, columns = ctx.plan, ctx.smem, columns_of(ctx.plan)
    member = member_of(plan, block_id)

    def prefetches(tile):  # by one of the neighbours
        return lax.rem(tile, jnp.int32(neighbours(plan))) == member.number

    def one_work(work, number, count):
        _load_q(ctx, work, number, count)

        def copies_of(count):
            first = _q_block(plan, number, count) + 1
            for n in range(columns.blocks):
                for wg in range(V_WARPGROUPS):
                    own = pl.ds(wg * columns.v + n * columns.block, columns.block)
                    to = _ring_block(ctx, wg, first + n)
                    yield Copy(own, to, reused=first + n >= columns.ring)
            if columns.rope:
                own = pl.ds(plan.problem.v_head_dim, columns.rope)
                slot = lax.rem(count, jnp.int32(P_SLOTS))
                refs = smem.k_rope.at[slot], smem.rope_ready.at[slot], smem.p_free.at[slot]
                to = Block(*refs, smem.k_rope, (slot,))
                yield Copy(own, to, reused=count >= P_SLOTS)

        if plan.layout.listed:
            return row_gathers.load(ctx, work, count, copies_of)
        ahead = prefetches if scores_first(plan) else None
        return producer.load(ctx, work, count, copies_of, ahead)

    _each_work(ctx, block_id, one_work)


def _load_q(ctx: KernelContext, work: WorkTile, number: Index, count: Index) -> None:
    """Columns that go to registers come through the rings."""
    plan, refs, smem, columns = ctx.plan, ctx.refs, ctx.smem, columns_of(ctx.plan)
    chunk = lax.rem(work.head, jnp.int32(plan.queries.chunks)) * ROWS
    start, first = work.sequence * producer.padded_rows(plan) + chunk, _q_block(plan, number, count)

    def copy(column, width, to, ready, row=0, rows=ROWS):
        source = refs.q.at[pl.ds(start + row, rows), pl.ds(column, width)]
        plgpu.copy_gmem_to_smem(source, to, ready)

    for wg in range(V_WARPGROUPS):
        block, rows = _ring_block(ctx, wg, first), plan.keys.page_rows
        pl.when(first >= columns.ring)(functools.partial(plgpu.barrier_wait, block.free))
        for row in range(0, ROWS, rows):  # equally many copies as for keys
            to = block.ref.at[pl.ds(row, rows)]
            copy(wg * columns.v, columns.block, to, block.ready, row, rows)
    if not columns.q_copies:
        return
    pl.when(number > 0)(lambda: plgpu.barrier_wait(smem.q_free))
    for wg in range(V_WARPGROUPS):
        if smem.q is not None:
            width = columns.v - columns.block
            copy(wg * columns.v + columns.block, width, smem.q.at[wg], smem.q_ready)
    if columns.rope:
        copy(plan.problem.v_head_dim, columns.rope, smem.q_rope, smem.q_ready)


# ---- scores --------------------------------------------------------------------------------------


def _probabilities(ctx: KernelContext, slot: Index) -> SmemRef:
    """The probabilities of a tile, in place of its columns of rope."""
    return ctx.smem.k_rope.at[slot] if ctx.smem.p is None else ctx.smem.p.at[slot]


def _queries(ctx: KernelContext, first: Index) -> list[RegisterTile]:
    """The columns of q that stay in registers: the first of each warpgroup's."""
    loaded = []
    for wg in range(V_WARPGROUPS):
        block = _ring_block(ctx, wg, first)
        plgpu.barrier_wait(block.ready)
        loaded.append(plgpu.load(block.ref, layout=mosaic.TILE))
    if columns_of(ctx.plan).q_copies:
        plgpu.barrier_wait(ctx.smem.q_ready)
    return loaded


def _scores(
    ctx: KernelContext,
    q: list[RegisterTile],
    first: Index,
    slot: Index,
    release: Callable[[], None],
) -> RegisterTile:
    """Begins as soon as the first columns are there; `release` of the probabilities of the tile
    before is called when all but the last are multiplied.
    """
    plan, smem, columns = ctx.plan, ctx.smem, columns_of(ctx.plan)
    zero = mosaic.opaque_zero(slot)  # else registers keep the addresses of q's columns

    def body(acc):
        for n in range(columns.blocks):
            for wg in range(V_WARPGROUPS):
                block = _ring_block(ctx, wg, first + n)
                plgpu.barrier_wait(block.ready)
                own = pl.ds((n - 1) * columns.block, columns.block)
                rows = smem.q.at[wg + zero, :, own] if n else q[wg]
                plgpu.wgmma(acc, rows, block.ref.transpose((1, 0)))
        if columns.rope:
            plgpu.barrier_wait(smem.rope_ready.at[slot])
            plgpu.wgmma(acc, smem.q_rope, smem.k_rope.at[slot].transpose((1, 0)))
        if scores_first(plan):
            plgpu.wgmma_wait(1)
            release()
        return acc[...]

    return pl.run_scoped(body, plgpu.ACC((ROWS, TILE), jnp.float32))


def _put(ref: SmemRef, numbers: RegisterTile) -> None:
    ref[...] = numbers


def _score(ctx: KernelContext, block_id: Index) -> None:
    """Probabilities of all tiles, and what they are relative to.

    Where scores are first, those of a tile are released when the scores of the next are all but
    there: tensor cores do the values of a tile under the softmax of the next.
    """
    plan, smem, columns = ctx.plan, ctx.smem, columns_of(ctx.plan)

    def one_work(work, number, count):
        q = _queries(ctx, _q_block(plan, number, count))

        def one_tile(tile, carry):
            row_max, row_sum, count = carry
            slot, first = lax.rem(count, jnp.int32(P_SLOTS)), _q_block(plan, number, count) + 1
            before, last = lax.rem(count + (P_SLOTS - 1), jnp.int32(P_SLOTS)), tile == work.end - 1
            release = functools.partial(plgpu.barrier_arrive, smem.p_ready.at[before])
            s = _scores(ctx, q, first, slot, lambda: pl.when(tile > work.tile)(release))
            if columns.q_copies:
                pl.when(last)(lambda: plgpu.barrier_arrive(smem.q_free))
            live = work.length - tile * TILE

            @pl.when(live < TILE)
            def _():
                for n in range(columns.blocks):
                    for wg in range(V_WARPGROUPS):
                        block = _ring_block(ctx, wg, first + n)
                        producer.clear(block.ref, columns.block, live)

            if plan.unit_of_logits is None:
                s = mainloop.logits_of_scores(ctx, work, tile, s)
            s = mainloop.masked(ctx, work, tile, s)
            s = row_gathers.without_holes(ctx, s, count, mosaic.COLUMN)
            new = softmax.next_step(s, plan.unit_of_logits, row_max, empty_ok=True)
            row_sum = softmax.rescaled(new, row_sum) + new.row_sum
            # Probabilities are put where keys were: all warps must have their scores.
            threads.each_thread(lambda thread, *_: thread.sync(), (), ())
            if not columns.rope:
                wait = functools.partial(plgpu.barrier_wait, smem.p_free.at[slot])
                pl.when(count >= P_SLOTS)(wait)
            _probabilities(ctx, slot)[...] = new.p.astype(plan.problem.dtype)
            smem.row_max.at[slot][...] = new.row_max
            pl.when(last)(lambda: _put(smem.row_sum.at[slot], row_sum.sum(axis=1)))
            plgpu.commit_smem()
            at_once = last if scores_first(plan) else True
            pl.when(at_once)(lambda: plgpu.barrier_arrive(smem.p_ready.at[slot]))
            return new.row_max, row_sum, count + 1

        row_max = mosaic.filled((ROWS,), -jnp.inf)
        row_sum = mosaic.filled((ROWS, softmax.PARTIALS), 0.0)
        return lax.fori_loop(work.tile, work.end, one_tile, (row_max, row_sum, count))[2]

    _each_work(ctx, block_id, one_work)


# ---- values --------------------------------------------------------------------------------------


class State(NamedTuple):
    """A warpgroup's columns of the output, before they are divided."""

    accs: tuple[RegisterTile, ...]  # [ROWS, block] each
    row_max: RegisterTile  # [ROWS]: what they are relative to
    row_sum: RegisterTile  # [ROWS]


class _Own(NamedTuple):
    """A warpgroup that multiplies values, and where its results go."""

    block_id: Index
    wg: Index
    results: Results


def _weigh(ctx: KernelContext, own: _Own) -> None:
    """A warpgroup's columns of the values, of all tiles."""
    plan, smem, wg, columns = ctx.plan, ctx.smem, own.wg, columns_of(ctx.plan)

    def one_work(work, number, count):
        q_block = _ring_block(ctx, wg, _q_block(plan, number, count))
        plgpu.barrier_wait(q_block.ready)

        def one_tile(tile, carry):
            state, count = carry
            slot, first = lax.rem(count, jnp.int32(P_SLOTS)), _q_block(plan, number, count) + 1
            blocks = [_ring_block(ctx, wg, first + n) for n in range(columns.blocks)]
            for block in blocks:
                plgpu.barrier_wait(block.ready)
            plgpu.barrier_wait(smem.p_ready.at[slot])
            # Scores exist, so q is in registers.
            free_q = functools.partial(plgpu.barrier_arrive, q_block.free)
            pl.when(tile == work.tile)(free_q)
            row_max = plgpu.load(smem.row_max.at[slot], layout=mosaic.ROW)
            row_sum = plgpu.load(smem.row_sum.at[slot], layout=mosaic.ROW)
            rescale = jnp.exp2(state.row_max - softmax.base_of(row_max))
            accs = lax.cond(
                mosaic.any_in_warp(row_max - state.row_max, 0.0) != 0,
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
                    plgpu.wgmma_wait(columns.blocks - 1 - n)
                    plgpu.barrier_arrive(block.free)

            accs = pl.run_state(matmuls)(tuple(plgpu.ACC.init(acc) for acc in accs))
            plgpu.barrier_arrive(smem.p_free.at[slot])
            return State(accs, row_max, row_sum), count + 1

        shape = (ROWS, columns.block)
        accs = tuple(mosaic.filled(shape, 0.0) for _ in range(columns.blocks))
        state = State(accs, mosaic.filled((ROWS,), -jnp.inf), mosaic.filled((ROWS,), 0.0))
        state, count = lax.fori_loop(work.tile, work.end, one_tile, (state, count))
        _epilogue(ctx, own, work, state)
        return count

    _each_work(ctx, own.block_id, one_work)


# ---- epilogue ------------------------------------------------------------------------------------


def _epilogue(ctx: KernelContext, own: _Own, work: WorkTile, state: State) -> None:
    """The result, where the block had all keys. Else a partial to global memory; the last block
    makes the result of all, if no launch of its own does.
    """
    plan, smem, results, wg = ctx.plan, ctx.smem, own.results, own.wg
    member, groups = member_of(plan, own.block_id), groups_of(plan)
    share = scheduler.share_of(groups, smem.table, member.group)
    count, *others = scheduler.partials_of(groups, share, work, member.group)
    places = Partials(count, *(n * neighbours(plan) + member.number for n in others))
    lost = smem.table.lost[work.sequence]
    head = combine_splits.Head(work.sequence, work.head, lost, places)
    state = state._replace(row_sum=combine_latent.with_lost(state.row_sum, lost))
    if combined_apart(plan):
        return _write_partial(plan, own, places.own, state)

    def result():
        factor = _factor(plan, own, work, state.row_max, state.row_sum)
        for n, acc in enumerate(state.accs):
            _write(plan, own, work, n, acc * mosaic.broadcast_rows(factor, acc.shape))

    partial = functools.partial(_write_partial, plan, own, places.own, state)
    partials = combine_latent.Partials(places, plan.partials_a_block)
    of_all = functools.partial(_combine, plan, own, work, partials)
    join = functools.partial(combine_latent.join, smem.joined)
    end = combine_latent.Ending(result, partial, of_all, wg == 0, join)
    return combine_latent.finish(ctx, results, head, end)


def _write_partial(plan: Plan, own: _Own, index: Index, state: State) -> None:
    results, wg = own.results, own.wg
    for n, acc in enumerate(state.accs):
        combine_latent.store(results.partial_out, partial_block(plan, index, wg, n), acc)

    @pl.when(wg == 0)
    def _():
        mosaic.store(results.partial_max.at[index], state.row_max)
        mosaic.store(results.partial_sum.at[index], state.row_sum)


def _combine(plan: Plan, own: _Own, work: WorkTile, partials: combine_latent.Partials) -> None:
    """The partials of all blocks -> the result."""
    layout, shape, results = mosaic.ROW, (ROWS, columns_of(plan).block), own.results
    row_max = combine_latent.row_max_of(results, partials, layout)
    row_sum = combine_latent.row_sum_of(results, partials, row_max, layout)
    factor = _factor(plan, own, work, row_max, row_sum)
    for n in range(columns_of(plan).blocks):

        def weighed(index, n=n):
            own_max = combine_latent.load_rows(results.partial_max, index, layout)
            weight = mosaic.broadcast_rows(jnp.exp2(own_max - softmax.base_of(row_max)), shape)
            tile = partial_block(plan, index, own.wg, n)
            return (weight * combine_latent.load(results.partial_out, tile, shape),)

        zeros = (mosaic.filled(shape, 0.0),)
        (acc,) = combine_latent.added(zeros, partials, weighed)
        _write(plan, own, work, n, acc * mosaic.broadcast_rows(factor, acc.shape))


def _factor(
    plan: Plan, own: _Own, work: WorkTile, row_max: RegisterTile, row_sum: RegisterTile
) -> RegisterTile:
    """The factor of all columns; it writes the log-sum-exp."""
    sinks, chunk = own.results.sinks, lax.rem(work.head, jnp.int32(plan.queries.chunks))
    at = pl.ds(chunk * ROWS, ROWS)
    sinks = None if sinks is None else mosaic.load(sinks.at[at], mosaic.ROW)
    factor, lse = softmax.finish(row_max, row_sum, sinks)
    line = work.sequence * plan.queries.chunks + chunk
    pl.when(own.wg == 0)(lambda: mosaic.store(own.results.lse.at[line], lse))
    return factor


def _write(plan: Plan, own: _Own, work: WorkTile, n: int, out: RegisterTile) -> None:
    """Block n of a warpgroup's columns, by the warps that have rows of the output."""
    columns, chunks = columns_of(plan), plan.queries.chunks
    line = work.sequence * chunks + lax.rem(work.head, jnp.int32(chunks))
    row = mosaic.positions((ROWS,), 0, 0)
    wanted = mosaic.any_in_warp((plan.queries.most_rows - row).astype(jnp.float32), 0.0)
    out = out.astype(plan.problem.dtype)
    start = own.wg * columns.v + n * columns.block
    to = pl.ds(line * ROWS, ROWS), pl.ds(start, columns.block)
    pl.when(wanted != 0)(lambda: mosaic.store(own.results.out.at[to], out))


# ---- the kernel and its call ---------------------------------------------------------------------


def _kernel(refs: LatentRefs, outputs: Outputs, smem: LatentSmem, *, plan: Plan) -> None:
    block_id, wg = lax.axis_index("block"), lax.axis_index("wg")
    results = outputs.results(refs.counters, refs.sinks)
    ctx = row_gathers.with_table(KernelContext(plan, refs, smem))

    @pl.when(wg == PRODUCER)
    def _():
        loader = row_gathers.REGISTERS[0] if plan.layout.listed else 24
        plgpu.set_max_registers(loader, action="decrease")
        producer.fill_table(ctx)
        plgpu.barrier_arrive(smem.table_ready)
        _load(ctx, block_id)

    @pl.when(wg == SCORES)
    def _():
        scorer = row_gathers.REGISTERS[1] if plan.layout.listed else 168
        plgpu.set_max_registers(scorer, action="increase")
        plgpu.barrier_wait(smem.table_ready)
        _score(ctx, block_id)

    @pl.when(wg < V_WARPGROUPS)
    def _():
        plgpu.set_max_registers(160, action="increase")
        plgpu.barrier_wait(smem.table_ready)
        _weigh(ctx, _Own(block_id, wg, results))


def _partials(plan: Plan) -> jax.ShapeDtypeStruct:
    shape = partial_block(plan, plan.partials, 0, 0), ROWS * columns_of(plan).block
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _combine_of(plan: Plan) -> Callable | None:
    return combine_apart.run if combined_apart(plan) else None


PROGRAM = Program(_kernel, scratch, V_WARPGROUPS + 2, _partials, _combine_of)
_KERNEL = sm90_common.kernel_with(plan_of, PROGRAM, limit)
KERNEL = dataclasses.replace(_KERNEL, reads_lists=True)
Config = KERNEL.config
