"""Decode attention over a latent cache, whose V is the first columns of K (MLA), for every GPU from
Ampere on: copies by threads and matmuls of warps where `decode_mla.sm90` has TMA and wgmma.

A block of 4 warps takes 32 query rows of one kv head. Warps stand two by two (`mma_2x2`): 16 rows
each, by half of the keys for scores and half of the columns for the output, which is 128 numbers a
thread where V has 512 columns. A row of the cache lies in shared memory once and is read as key and
as value. The scheduler is that of decode. Every partial of a row goes to global memory, and the
last block to arrive combines them (`decode.combine`).

A tile is there when each thread's own copies are and all threads have met, which they do once a
tile; two warps that share rows meet twice more, over the row maxima and over P. With one stage,
where shared memory has room for no more, a tile is loaded when it is needed.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import gpu_specs
from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import softmax, tma_operands
from pallas_attn.kernels.attention.plan import Context
from pallas_attn.kernels.attention.sm80_common import fits
from pallas_attn.kernels.decode import combine_splits, mainloop, producer, scheduler
from pallas_attn.kernels.decode.combine_splits import Results
from pallas_attn.kernels.decode.mainloop import TileAt
from pallas_attn.kernels.decode.producer import Memory, Position, Refs
from pallas_attn.kernels.decode.scheduler import Plan, Share, Table, WorkTile
from pallas_attn.kernels.decode_mla import packed
from pallas_attn.kernels.lang import mosaic, threads, warp_vote
from pallas_attn.kernels.lang.mosaic import ThreadContext
from pallas_attn.kernels.lang.threads import Word
from pallas_attn.kernels.mma import mma_2x2, mma_sync

Array = Any
Ref = Any
Scalar = Any

ROWS = 32  # of query, of a block
WARPS_2X2 = mma_2x2.WarpGrid(2)
COPYING = 8  # threads that copy a row


@dataclasses.dataclass(frozen=True)
class Config:
    """`tile`: keys of a tile. `stages`: tiles in the ring; with a single one nothing arrives under
    the matmuls of a tile. `grid`: persistent blocks. `split_tiles`: kv tiles of a split where
    `batch_invariant` is asked for.
    """

    tile: int = 64
    stages: int = 6
    grid: int = gpu_specs.multiprocessors(gpu_specs.HOPPER)
    split_tiles: int = 16
    # What `scheduler.Plan` asks of the Config of every decode kernel.
    fewest_stages, q_rows, bulk, many_heads = 1, 64, False, False
    head_overhead, load_first, heads_at_once = 0, False, 1

    def __post_init__(self):
        scheduler.check_config(
            self,
            tile=(self.tile in (32, 64), "32 or 64 of V within K"),
        )

    @classmethod
    def default(cls, problem: DecodeProblem) -> "Config":
        """As many bytes in flight as there is room for."""
        problem = packed.of_rows(problem)
        grid = gpu_specs.multiprocessors(problem.gpu)
        sizes = [(64, n) for n in (6, 5, 4, 3, 2)] + [(32, n) for n in (3, 2, 1)]
        choices = [cls(tile=tile, stages=stages, grid=grid) for tile, stages in sizes]
        return next((one for one in choices if fits(problem, smem_bytes, one)), choices[-1])


def limit(problem: DecodeProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    if (refused := packed.limit(problem)) is not None:
        return refused
    problem = packed.of_rows(problem)
    refused = (
        _rows_limit(problem) or scheduler.dtype_limit(problem) or scheduler.size_limit(problem)
    )
    if refused is None and not fits(problem, smem_bytes, Config.default(problem)):
        return Limit(
            "such rows do not fit in the shared memory of this GPU",
            "decode fewer tokens at once, or use smaller head dims",
        )
    return refused


def _rows_limit(problem: DecodeProblem) -> Limit | None:
    """Why it cannot take such rows of V within K, or None."""
    if problem.quantized or problem.cache_dtype != problem.dtype:
        return Limit(f"a {problem.cache_dtype} cache with V within K", "keep it in q's dtype")
    if problem.dtype == "float32":
        return Limit("float32 queries over V within K; it takes bfloat16 and float16", "cast q")
    if problem.head_dim % 8 or problem.v_head_dim % 16 or problem.v_head_dim > 512:
        return Limit(
            f"V within K of head dims {problem.head_dim} and {problem.v_head_dim}; it takes "
            "multiples of 8, and for V of 16 up to 512",
            'say implementation="reference"',
        )
    return None


class LatentPlan(Plan):
    def __post_init__(self):
        """Config has checked itself."""

    @property
    def row_blocks(self) -> int:
        return ROWS // 16

    @property
    def width(self) -> int:
        """Of a row of the cache in shared memory."""
        return tma_operands.round_up(self.problem.head_dim, 16)


class Smem(NamedTuple):
    q: Any  # [ROWS, ..]
    kv: Any  # [stages * tile, ..]
    p: Any  # [ROWS, ..]
    rows: Any  # float32[2, ROWS]: the maximum or the sum of a row in each of its two warps
    table: Table
    last: Any  # int32[1]


def scratch(plan: LatentPlan) -> Smem:
    """Shared memory, described once: `launch` launches it, `smem_bytes` adds it up."""
    dtype, config = jnp.dtype(plan.problem.dtype), plan.config

    def buffer(rows, width):
        return plgpu.SMEM((rows, mma_sync.pitch(width)), dtype)

    def numbers(count):
        return plgpu.SMEM((count,), jnp.int32)

    return Smem(
        q=buffer(ROWS, plan.width),
        kv=buffer(config.stages * config.tile, plan.width),
        p=buffer(ROWS, config.tile),
        rows=plgpu.SMEM((2, ROWS), jnp.float32),
        table=scheduler.table_scratch(plan),
        last=numbers(1),
    )


def smem_bytes(problem: DecodeProblem, config: Any) -> int:
    problem = packed.of_rows(problem)
    return scheduler.smem_bytes(scratch(LatentPlan(problem, config)))


# ---- loading -------------------------------------------------------------------------------------


class _Copy(NamedTuple):
    """A row to be copied."""

    to: Ref  # in shared memory
    row: Any  # of it
    source: Ref
    line: Any  # the row of it, in 64 bits


def _copy_row(ctx: ThreadContext, copy: _Copy, exists: Any) -> None:
    """This thread's share of a row: each eighth chunk of 16 bytes. Zeros where the row does not
    exist, and past its end.
    """
    thread, plan = ctx.thread, ctx.plan
    column = thread.index % COPYING
    chunks, whole = plan.problem.head_dim // 8, plan.width // 8
    place = copy.row * (mma_sync.pitch(plan.width) // 8) + column
    begin = copy.line * chunks + thread.wide(column)
    for n in range(0, whole, COPYING):
        inside = None if n + COPYING <= whole else column < whole - n
        live = exists if n + COPYING <= chunks else exists & (column < chunks - n)
        thread.copy_async(Word(copy.to, place, n), Word(copy.source, begin, n), live, inside)


def _copy_tile(ctx: ThreadContext) -> None:
    thread, memory, at, plan = ctx
    live = producer.live_keys(ctx)
    (cache,) = plan.layout.arrays_of(thread, memory.refs.caches, at.sequence)
    number_of = producer.row_numbers(ctx, live)
    for first in range(0, plan.tile, mosaic.THREADS // COPYING):
        row = thread.index // COPYING + first
        copy = _Copy(memory.smem.kv, at.slot * plan.tile + row, cache, number_of(row))
        _copy_row(ctx, copy, row < live)
    thread.commit_copies()


class _QueryRefs(NamedTuple):
    q: Ref
    to: Ref


def _copy_queries(ctx: ThreadContext) -> None:
    """The query rows of a work; all threads have met after the last one's."""
    thread, refs, at, plan = ctx
    for down in range(0, ROWS, mosaic.THREADS // COPYING):
        row = thread.index // COPYING + down
        n = thread.minimum(at.chunk + row, plan.rows - 1)
        line = at.row + n // plan.group * plan.problem.q_heads + n % plan.group
        copy = _Copy(refs.to, row, refs.q, thread.wide(line))
        _copy_row(ctx, copy, at.chunk + row < plan.rows)
    thread.commit_copies()


# ---- computing -----------------------------------------------------------------------------------


class State(NamedTuple):
    acc: Array  # [ROWS, Hv]
    row_sum: Array  # [ROWS, mma_2x2.PARTIALS]
    row_max: Array  # [ROWS]


def _logits(ctx: Context, work: WorkTile, tile: Scalar, s: Array) -> Array:
    """In log2 units if `plan.unit_of_logits` is None."""
    plan = ctx.plan
    layout, start = mosaic.warp_layout(s.shape, 2), tile * plan.tile

    def positions():
        row = mosaic.positions(s.shape, 0, 0, layout)
        kv_head, chunk = scheduler.head_and_chunk(plan, work)
        row = row + chunk * plan.chunk_rows
        token = mainloop.token_of(plan, row)
        query = work.length - plan.problem.q_len + token
        key = mosaic.positions(s.shape, 1, start, layout)

        def head():
            return row + (kv_head - token) * plan.group

        return mainloop.Positions(query, key, head, layout)

    return mainloop.masked(ctx, work, start, mainloop.logits_of_scores(plan, s), positions)


def _attend(ctx: Context, work: WorkTile, at: TileAt, state: State) -> State:
    """One kv tile."""
    plan, smem, none = ctx.plan, ctx.smem, jnp.int32(0)
    first, sizes = at.slot * plan.tile, (ROWS, plan.tile, plan.width)
    s = mma_2x2.product((smem.q, none), (smem.kv, first), sizes, 1, 2)
    given = _logits(ctx, work, at.tile, s)
    mma_2x2.store_row_partials(given, smem.rows, 0, "max")
    mma_2x2.sync_row_pair(0)
    peak = mma_2x2.load_row_totals(smem.rows, 0, ROWS, "max")
    row_max, base = softmax.raise_max(peak, plan.unit_of_logits, state.row_max, empty_ok=True)
    given = given if plan.unit_of_logits is None else given * plan.unit_of_logits
    p = jnp.exp2(given - mosaic.broadcast_rows(base, given.shape))
    rescale = jnp.exp2(state.row_max - base)
    moved = warp_vote.any_in_warp(row_max - state.row_max, 0.0, mma_2x2.row_layout(ROWS))
    mma_2x2.store_tile((p.astype(plan.problem.dtype),), smem.p, WARPS_2X2)

    def rescaled():
        older = state.acc, state.row_sum
        return tuple(x * mosaic.broadcast_rows(rescale, x.shape) for x in older)

    acc, row_sum = lax.cond(moved != 0, rescaled, lambda: (state.acc, state.row_sum))
    mma_2x2.sync_row_pair(0)
    values = mma_2x2.RightOperand(smem.kv, first, plan.problem.v_head_dim)
    acc = mma_2x2.matmul_add_shared(acc, smem.p, values, (ROWS, plan.tile, 1), WARPS_2X2)
    return State(acc, row_sum + mma_2x2.partial_sums(p), row_max)


def _initial(plan: LatentPlan) -> State:
    """Of no key yet."""
    acc, row_sum = (
        plgpu.layout_cast(jnp.zeros(shape, jnp.float32), mosaic.warp_layout(shape, 2))
        for shape in ((ROWS, plan.problem.v_head_dim), (ROWS, mma_2x2.PARTIALS))
    )
    row_max = jnp.full((ROWS,), -jnp.inf, jnp.float32)
    return State(acc, row_sum, plgpu.layout_cast(row_max, mma_2x2.row_layout(ROWS)))


def _mainloop(ctx: Context, results: Results, share: Share, block_id: Scalar) -> None:
    """All work of a block, and the loads that run ahead of it."""
    plan, refs, smem = ctx
    stages = plan.config.stages
    m = scheduler.sequence_of(plan, smem.table, share.first)
    first = scheduler.work_at(plan, smem.table, share, share.first, m)

    def load(slot, work):
        work, tile = producer.next_tile(ctx, share, Position(work, slot))
        threads.each_thread(mosaic.in_context(_copy_tile, plan), Memory(refs, smem), tile)
        return work._replace(tile=jnp.minimum(work.tile + 1, work.end))

    def meet(left):
        threads.each_thread(mosaic.in_context(producer.meet, plan, left=left), (), ())

    ahead = lax.fori_loop(0, stages - 1, load, first)

    def one_work(carry):
        unit, m, count, ahead = carry
        work = scheduler.work_at(plan, smem.table, share, unit, m)
        meet(None)
        queries = mosaic.in_context(_copy_queries, plan)
        place = scheduler.first_query(plan, work)
        threads.each_thread(queries, _QueryRefs(refs.q, smem.q), place)
        producer.check_skipped_pages(ctx, work)
        meet(0)

        def one_tile(tile, carry):
            state, count, ahead = carry
            slot = lax.rem(count, jnp.int32(stages))
            meet(max(stages - 2, 0))
            ahead = load(jnp.where(slot == 0, stages - 1, slot - 1), ahead)
            if stages == 1:
                meet(0)
            return _attend(ctx, work, TileAt(tile, slot), state), count + 1, ahead

        carry = _initial(plan), count, ahead
        state, count, ahead = lax.fori_loop(work.tile, work.end, one_tile, carry)
        _epilogue(ctx, results, work, state, scheduler.partials_of(plan, share, work, block_id))
        return work.next_unit, work.sequence, count, ahead

    start = (share.first, m, jnp.int32(0), ahead)
    lax.while_loop(lambda carry: carry[0] < share.end, one_work, start)


def _epilogue(
    ctx: Context, results: Results, work: WorkTile, state: State, partials: scheduler.Partials
) -> None:
    """A partial to global memory; the last block makes the result of all."""
    plan, smem = ctx.plan, ctx.smem
    lost = smem.table.lost[work.sequence]
    mma_2x2.store_row_partials(state.row_sum, smem.rows, 0, "sum")
    mma_2x2.sync_row_pair(0)
    row_sum = mma_2x2.load_row_totals(smem.rows, 0, ROWS, "sum")
    row_sum = row_sum + mosaic.broadcast_scalar(jnp.where(lost == 1, jnp.nan, 0.0), row_sum.shape)
    mosaic.store(results.partial_out.at[partials.own], state.acc)
    mosaic.store(results.partial_max.at[partials.own], state.row_max)
    mosaic.store(results.partial_sum.at[partials.own], row_sum)
    at = combine_splits.Head(work.sequence, work.head, lost, *partials)
    arrive = mosaic.in_context(combine_splits.arrive, plan)
    threads.each_thread(arrive, combine_splits.CounterRefs(results.counters, smem.last), at)

    @pl.when(smem.last[0] == 1)
    def _():
        threads.each_thread(mosaic.in_context(combine_splits.combine, plan), results, at)


def _kernel(
    refs: Refs, out: Ref, lse: Ref, partials: tuple[Ref, Ref, Ref], smem: Smem, *, plan: LatentPlan
) -> None:
    block_id, usable = lax.axis_index("block"), producer.usable(plan, refs.layer)
    program = mosaic.in_context(scheduler.fill_table, plan)
    threads.each_thread(program, scheduler.TableRefs(refs.given, smem.table), usable)
    share = scheduler.share_of(plan, smem.table, block_id)
    results = Results(out, lse, *partials, refs.counters, refs.sinks)
    ctx = Context(plan, refs, smem)
    pl.when(share.first < share.end)(lambda: _mainloop(ctx, results, share, block_id))


# ---- the call ------------------------------------------------------------------------------------


def run(inputs: DecodeInputs, problem: DecodeProblem, config: Config) -> tuple[Array, Array]:
    """out [M, t, N, Hv] in q's dtype, log-sum-exp float32 [M, N, t]; of packed rows [tokens, N, Hv]
    and [N, tokens].
    """

    def launch(inputs, one):
        return _launch(inputs, combine_splits.counters(LatentPlan(one, config)), one, config)

    return packed.run(launch, inputs, problem)


@functools.partial(jax.jit, static_argnames=("problem", "config"))
def _launch(
    inputs: DecodeInputs, counters: Array, problem: DecodeProblem, config: Config
) -> tuple[Array, Array]:
    """Jitted, so that a model of many layers traces it once."""
    plan = LatentPlan(problem, config)
    refs = producer.refs_of(inputs, counters, plan)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=combine_splits.out_types(plan),
        scratch_types=(scratch(plan),),
        grid=(plan.grid,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="decode_latent_sm80",
    )
    out, lse, _ = kernel(refs)
    return out, lse
