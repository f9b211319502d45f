"""Decode attention over a latent cache for few rows of query: up to 32, for Hopper.

`mla_sm90` gives tensor cores 64 rows of query; of 16 heads three quarters would be padding, in
shared memory too, where keys on their way are what counts. Here keys lie down and queries across,
S' = K q' and O' = V' P': what tensor cores read is the tile of keys, twice, and hardly anything
else. One warpgroup computes; the other fills a ring of column blocks of tiles, each of which is let
go of as soon as it has been multiplied.

A row's max is raised only where a logit of a tile lies above it by more than
`softmax.RESCALE_THRESHOLD`; whether one does, the warps learn at the barrier over the probabilities
in shared memory.

Grid and dealing are those of `scheduler`, merging that of `mla_combine`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._problem import DecodeInputs, DecodeProblem
from pallas_attn.kernels.attention import softmax, tma_operands
from pallas_attn.kernels.decode import combine, mainloop, scheduler
from pallas_attn.kernels.decode.scheduler import Piece, Plan, Share, Table
from pallas_attn.kernels.decode_mla import combine as mla_combine
from pallas_attn.kernels.decode_mla import producer as mla_producer
from pallas_attn.kernels.decode_mla.combine import base_of
from pallas_attn.kernels.decode_mla.producer import TILE, WIDE, Block, Refs, each_thread
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
    def ctas(self) -> int:
        splits = mla_combine.worth(self, 2 * self.most_tiles)
        return min(super().ctas, self.problem.sequences * splits)

    @property
    def width(self) -> int:
        """Columns of a block of a tile."""
        blocks = self.problem.head_dim // WIDE
        return WIDE * next(n for n in (3, 2, 1) if blocks % n == 0)

    @property
    def blocks(self) -> int:
        """Of a tile."""
        return self.problem.head_dim // self.width

    @property
    def ring(self) -> int:
        return max(self.config.stages, self.blocks)

    def values(self, block: int) -> int:
        """Columns of a block that are V's."""
        return min(max(self.problem.v_head_dim - block * self.width, 0), self.width)

    @property
    def stretches(self) -> list[int]:
        """Columns of V in each block that has any."""
        return [n for n in map(self.values, range(self.blocks)) if n]


class Smem(NamedTuple):
    q: Any  # [chunk_rows, H]
    kv: Any  # [ring, TILE, width]
    p: Any  # [2, chunk_rows, TILE]: probabilities of two tiles in turn
    flags: Any  # int32[2 * WARPS]: likewise, whether a warp met a logit that is too high
    table: Table
    last: Any  # int32[1]
    q_ready: Any
    q_free: Any
    ready: Any
    free: Any
    laid: Any


def scratch(plan: FewPlan) -> Smem:
    dtype, rows = jnp.dtype(plan.problem.dtype), plan.chunk_rows

    def numbers(count):
        return plgpu.SMEM((count,), jnp.int32)

    barrier = plgpu.Barrier
    return Smem(
        q=mosaic.swizzled((rows, plan.problem.head_dim), dtype, 2 * WIDE),
        kv=mosaic.swizzled((plan.ring, TILE, plan.width), dtype, 2 * WIDE),
        p=mosaic.swizzled((2, rows, TILE), dtype, 2 * WIDE),
        flags=numbers(2 * threads.WARPS),
        table=mla_producer.table_of(plan),
        last=numbers(1),
        q_ready=barrier(),
        q_free=barrier(),
        ready=barrier(num_barriers=plan.ring, num_arrivals=TILE // plan.page_rows),
        free=barrier(num_barriers=plan.ring),
        laid=barrier(),
    )


def smem_bytes(problem: DecodeProblem, config: Any) -> int:
    return scheduler.RESERVED + mosaic.bytes_of(scratch(FewPlan(problem, config)))


# ---- loading -------------------------------------------------------------------------------------


def _slot(plan: FewPlan, number: Scalar, block: int) -> Scalar:
    """Of a tile's block in the ring."""
    return lax.rem(number * plan.blocks + block, jnp.int32(plan.ring))


def _load(plan: FewPlan, refs: Refs, smem: Smem, share: Share) -> None:
    def blocks_of(number):
        for block in range(plan.blocks):
            slot = _slot(plan, number, block)
            yield Block(
                columns=pl.ds(block * plan.width, plan.width),
                to=smem.kv.at[slot],
                ready=smem.ready.at[slot],
                free=smem.free.at[slot],
                again=number * plan.blocks + block >= plan.ring,
            )

    def one_piece(piece, number, count):
        pl.when(number > 0)(lambda: plgpu.barrier_wait(smem.q_free))
        rows = pl.ds(piece.m * plan.chunk_rows, plan.chunk_rows)
        plgpu.copy_gmem_to_smem(refs.q.at[rows], smem.q, smem.q_ready)
        return mla_producer.load(plan, refs, smem.table, piece, count, blocks_of)

    mla_producer.pieces(plan, smem.table, share, one_piece, jnp.int32(0))


# ---- computing -----------------------------------------------------------------------------------


class State(NamedTuple):
    accs: tuple[Array, ...]  # [values(block), chunk_rows] each
    total: Array  # [TILE, chunk_rows]: of the tiles' first keys, second keys, ...
    top: Array  # [chunk_rows]


def _across(columns: Array, shape: tuple[int, int]) -> Array:
    """One number a column, spread over the rows."""
    return lax.broadcast_in_dim(columns, shape, [1])


def _logits(plan: FewPlan, piece: Piece, tile: Scalar, s: Array) -> Array:
    """Scores -> logits in log2 units, those of invisible keys -inf."""
    s, start = mainloop.logits_of_scores(plan, s), tile * TILE
    s = s if plan.unit_of_logits is None else s * plan.unit_of_logits

    def positions():
        key = mosaic.positions(s.shape, 0, start)
        query = mainloop.token_of(plan, mosaic.positions(s.shape, 1, 0))
        return query + (piece.length - plan.problem.q_len), key

    return mainloop.masked(plan, piece, (start, TILE), s, positions)


def _put(p: Ref, numbers: Array) -> None:
    p.transpose((1, 0))[...] = numbers.astype(p.dtype)


def _tell(thread: threads.Thread, flags: Ref, at: Any) -> None:
    """Whether a warp met a logit that is too high, for the others."""
    parity, moved = at
    warp = thread.index // 32
    thread.shared_store(flags, parity * threads.WARPS + warp, moved, thread.index % 32 < 1)


def _scores(plan: FewPlan, smem: Smem, slots: list[Scalar]) -> Array:
    """Begins as soon as the first columns are there."""

    def body(acc):
        for block, slot in enumerate(slots):
            plgpu.barrier_wait(smem.ready.at[slot])
            columns = pl.ds(block * plan.width, plan.width)
            plgpu.wgmma(acc, smem.kv.at[slot], smem.q.at[:, columns].transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(body, plgpu.ACC((TILE, plan.chunk_rows), jnp.float32))


def _weigh(  # noqa: PLR0913
    plan: FewPlan, smem: Smem, slots: list[Scalar], p: Ref, accs: tuple
) -> tuple:
    """Adds the values of a tile, and lets go of it."""
    some = [block for block in range(plan.blocks) if plan.values(block)]

    def body(refs):
        for block, acc in zip(some, refs, strict=True):
            columns = pl.ds(0, plan.values(block))
            values = smem.kv.at[slots[block], :, columns].transpose((1, 0))
            plgpu.wgmma(acc, values, p.transpose((1, 0)))
        for n, block in enumerate(some):
            plgpu.wgmma_wait(len(some) - 1 - n)
            plgpu.barrier_arrive(smem.free.at[slots[block]])

    return pl.run_state(body)(tuple(plgpu.ACC.init(acc) for acc in accs))


def _one_tile(plan: FewPlan, smem: Smem, piece: Piece, tile: Scalar, carry: tuple) -> tuple:
    state, count = carry
    slots = [_slot(plan, count, block) for block in range(plan.blocks)]
    s = _scores(plan, smem, slots)
    for block, slot in enumerate(slots):
        if not plan.values(block):
            plgpu.barrier_arrive(smem.free.at[slot])
    pl.when(tile == piece.end - 1)(lambda: plgpu.barrier_arrive(smem.q_free))
    live = piece.length - tile * TILE

    @pl.when(live < TILE)
    def _():
        for block, slot in enumerate(slots):
            mla_producer.clear(smem.kv.at[slot], plan.values(block), live)

    s = _logits(plan, piece, tile, s)
    above = s - _across(state.top, s.shape)
    moved = warp_vote.any_in_warp(above, softmax.RESCALE_THRESHOLD)
    p = jnp.exp2(s - _across(base_of(state.top), s.shape))
    parity = lax.rem(count, jnp.int32(2))
    ref = smem.p.at[parity]
    _put(ref, p)
    each_thread(_tell, smem.flags, (parity, moved))
    plgpu.commit_smem()
    some = smem.flags[parity * threads.WARPS]
    for warp in range(1, threads.WARPS):
        some = some | smem.flags[parity * threads.WARPS + warp]

    def raised():
        higher = jnp.maximum(state.top, s.max(axis=0))
        higher = jnp.where(higher - state.top > softmax.RESCALE_THRESHOLD, higher, state.top)
        p = jnp.exp2(s - _across(base_of(higher), s.shape))
        _put(ref, p)
        plgpu.commit_smem()
        shrink = jnp.exp2(state.top - base_of(higher))
        accs = tuple(acc * _across(shrink, acc.shape) for acc in state.accs)
        return State(accs, state.total * _across(shrink, s.shape) + p, higher)

    state = lax.cond(some != 0, raised, lambda: state._replace(total=state.total + p))
    return state._replace(accs=_weigh(plan, smem, slots, ref, state.accs)), count + 1


def _compute(plan: FewPlan, smem: Smem, results: Any, share: Share, cta: Scalar) -> None:
    rows = plan.chunk_rows
    shapes = [(n, rows) for n in plan.stretches]

    def one_piece(piece, number, count):
        del number
        plgpu.barrier_wait(smem.q_ready)
        top = plgpu.layout_cast(jnp.full((rows,), -jnp.inf, jnp.float32), mosaic.COLUMN)
        state = State(
            tuple(mosaic.filled(shape, 0.0) for shape in shapes),
            mosaic.filled((TILE, rows), 0.0),
            top,
        )
        step = functools.partial(_one_tile, plan, smem, piece)
        state, count = lax.fori_loop(piece.tile, piece.end, step, (state, count))
        parts = scheduler.parts_of(plan, share, piece, cta)
        _finish(plan, results, smem, (piece, state, parts))
        return count

    mla_producer.pieces(plan, smem.table, share, one_piece, jnp.int32(0))


def _finish(plan: FewPlan, results: Any, smem: Smem, done: tuple) -> None:
    """The result, where the block had all keys. Else a part to global memory; the last block makes
    the result of all.
    """
    piece, state, parts = done
    lost = smem.table.lost[piece.m]
    total = state.total.sum(axis=0)
    total = total + mosaic.broadcast_scalar(jnp.where(lost == 1, jnp.nan, 0.0), total.shape)
    slots = mla_combine.Slots(parts.count, parts.mine, parts.first, parts.later, plan.slots_a_block)

    @pl.when(slots.count == 1)
    def _():
        _write(plan, results, piece.m, (state.accs, total, state.top))

    @pl.when(slots.count > 1)
    def _():
        for ref, acc in zip(results.parts, state.accs, strict=True):
            mla_combine.leave(ref, slots.mine, acc)
        mosaic.store(results.tops.at[slots.mine], state.top)
        mosaic.store(results.totals.at[slots.mine], total)
        at = combine.Where(piece.m, piece.head, lost, *parts)
        arrive = functools.partial(combine.arrive, plan=plan)
        each_thread(arrive, (results.counters, smem.last), at)

        @pl.when(smem.last[0] == 1)
        def _():
            _write(plan, results, piece.m, _merged(plan, results, slots))


def _merged(plan: FewPlan, results: Any, slots: mla_combine.Slots) -> tuple:
    """(accs, total, top) of everybody's parts."""
    layout, shapes = mosaic.COLUMN, [(n, plan.chunk_rows) for n in plan.stretches]
    top = mla_combine.highest(results.tops, slots, layout)
    total = mla_combine.total((results.tops, results.totals), slots, top, layout)

    def weighed(slot, some):
        own = mla_combine.numbers(results.tops, slot, layout)
        weight = jnp.exp2(own - base_of(top))
        return tuple(
            _across(weight, shape) * mla_combine.fetched(ref, slot, shape) for ref, shape in some
        )

    both = list(zip(results.parts, shapes, strict=True))
    at_once = len(both) if plan.chunk_rows <= 16 else 1  # more would not fit into registers
    accs: tuple = ()
    for start in range(0, len(both), at_once):
        some = both[start : start + at_once]
        zeros = tuple(mosaic.filled(shape, 0.0) for _, shape in some)
        accs += mla_combine.added(zeros, slots, functools.partial(weighed, some=some))
    return accs, total, top


def _write(plan: FewPlan, results: Any, m: Scalar, part: tuple) -> None:
    accs, total, top = part
    sinks = None if results.sinks is None else mosaic.load(results.sinks, mosaic.COLUMN)
    factor, lse = softmax.finish(top, total, sinks)
    mosaic.store(results.lse.at[m], lse)
    rows, start = pl.ds(m * plan.chunk_rows, plan.chunk_rows), 0
    for acc in accs:
        out = (acc * _across(factor, acc.shape)).astype(plan.problem.dtype)
        out = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
        to = results.out.at[rows, pl.ds(start, acc.shape[0])]
        mosaic.store(to.transpose((1, 0)), out)
        start += acc.shape[0]


def _kernel(refs: Refs, results: Any, out: Ref, lse: Ref, parts: Any, smem: Smem, *, plan) -> None:  # noqa: PLR0913
    cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
    results = combine.Results(out, lse, *parts, *results)

    @pl.when(wg == 1)
    def _():
        mla_producer.lay_out(plan, refs, smem.table)
        plgpu.barrier_arrive(smem.laid)
        _load(plan, refs, smem, scheduler.share_of(plan, smem.table, cta))

    @pl.when(wg == 0)
    def _():
        plgpu.barrier_wait(smem.laid)
        _compute(plan, smem, results, scheduler.share_of(plan, smem.table, cta), cta)


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
                tuple(of((plan.slots, n * rows), jnp.float32) for n in plan.stretches),
                of((plan.slots, rows), jnp.float32),
                of((plan.slots, rows), jnp.float32),
            ),
        ),
        scratch_types=(scratch(plan),),
        grid=(plan.ctas,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="wg",
        compiler_params=mla_producer.COMPILER,
        kernel_name="decode_latent_few_sm90",
    )
    out, lse, _ = kernel(refs, (counters, sinks))
    shape = (problem.sequences, problem.q_len, problem.q_heads)
    out = out.reshape(problem.sequences, rows, -1)[:, : plan.rows]
    lse = lse[:, : plan.rows].reshape(shape).swapaxes(1, 2)
    return out.reshape(*shape, -1), lse
