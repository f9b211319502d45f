"""Decode attention over a latent cache, whose V is the first columns of K (MLA), for every GPU from
Ampere on: copies by threads and matmuls of warps where `decode_mla.sm90` has TMA and wgmma.

A block of 4 warps takes 32 query rows of one kv head. Warps stand two by two (`mma_2x2`): 16 rows
each, by half of the keys for scores and half of the columns for the output, which is 128 numbers a
thread where V has 512 columns. A row of the cache lies in shared memory once and is read as key and
as value. All else is that of `decode.sm90`, which is given other copies and steps. Every partial of
a row goes to global memory, and the last block to arrive combines them (`decode.combine_splits`).

A tile is there when each thread's own copies are and all threads have met, which they do once a
tile; two warps that share rows meet twice more, over the row maxima and over P. With one stage,
where shared memory has room for no more, a tile is loaded when it is needed.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import gpu_specs
from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import softmax, tma_operands
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.decode import (
    combine_splits,
    limits,
    mainloop,
    scheduler,
    score_functions,
    thread_copies,
)
from pallas_attn.kernels.decode import sm90 as decode_sm90
from pallas_attn.kernels.decode.combine_splits import Results
from pallas_attn.kernels.decode.loads import live_keys
from pallas_attn.kernels.decode.mainloop import State, TileAt
from pallas_attn.kernels.decode.plan import DecodeTiling, Plan, Steps, plan_with, query_rows
from pallas_attn.kernels.decode.scheduler import Partials, Table, WorkTile
from pallas_attn.kernels.decode_mla import rows_as_sequences
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.config import check, first_that_fits
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.threads import Word
from pallas_attn.kernels.lang.types import (
    GmemRef,
    Index,
    KernelConfig,
    Operand,
    Predicate,
    RegisterTile,
    SmemRef,
)
from pallas_attn.kernels.mma import mma_2x2, mma_sync
from pallas_attn.kernels.mma.mma_2x2 import TWO_BY_TWO

ROWS = 32  # query rows of a block
COPYING = 8  # threads that copy a row


@dataclasses.dataclass(frozen=True)
class Config(limits.RingConfig):
    """`tile`: keys of a tile."""

    tile: int = 64
    fewest_stages = 1

    def __post_init__(self):
        super().__post_init__()
        check(self, tile=(self.tile in (32, 64), "32 or 64 of V within K"))

    @classmethod
    def default(cls, problem: DecodeProblem) -> "Config":
        """The choice with most bytes in flight that fits in shared memory."""
        problem = rows_as_sequences.of_rows(problem)
        grid = gpu_specs.multiprocessors(problem.gpu)
        sizes = [(64, n) for n in (6, 5, 4, 3, 2)] + [(32, n) for n in (3, 2, 1)]
        choices = [cls(tile=tile, stages=stages, grid=grid) for tile, stages in sizes]
        return first_that_fits(problem, smem_bytes, choices)

    def plan(self, problem: DecodeProblem) -> Plan:
        return plan_of(problem, self)


def limit(problem: DecodeProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    if (refused := rows_as_sequences.limit(problem)) is not None:
        return refused
    problem = rows_as_sequences.of_rows(problem)
    return _rows_limit(problem) or limits.dtype_limit(problem) or limits.size_limit(problem)


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


@functools.lru_cache(maxsize=256)
def plan_of(problem: DecodeProblem, config: KernelConfig) -> Plan:
    tiling = DecodeTiling(q_rows=ROWS, load_first=True, **vars(config))
    return plan_with(
        problem,
        tiling,
        query_rows(problem, ROWS, ROWS // 16),
        copies=COPIES,
        steps=STEPS,
        scratch=scratch,
        name="decode_latent_sm80",
        lowering=plgpu.LoweringSemantics.Warpgroup,  # layouts are inferred
    )


def _width(plan: Plan) -> int:
    """Columns of a row of the cache in shared memory."""
    return tma_operands.round_up(plan.problem.head_dim, 16)


class LatentSmem(NamedTuple):
    q: SmemRef  # [ROWS, ..]
    kv: SmemRef  # [stages * tile, ..]
    p: SmemRef  # [ROWS, ..]
    rows: SmemRef  # float32[2, ROWS]: the maximum or the sum of a row in each of its two warps
    table: Table
    last: SmemRef  # int32[1]
    barriers: SmemRef | None = None  # copies by threads need none


def scratch(plan: Plan) -> LatentSmem:
    """Shared memory, described once: the launch allocates it, `smem_bytes` adds it up."""
    dtype, tiling = jnp.dtype(plan.problem.dtype), plan.tiling

    def buffer(rows, width):
        return plgpu.SMEM((rows, mma_sync.pitch(width)), dtype)

    return LatentSmem(
        q=buffer(ROWS, _width(plan)),
        kv=buffer(tiling.stages * tiling.tile, _width(plan)),
        p=buffer(ROWS, tiling.tile),
        rows=plgpu.SMEM((2, ROWS), jnp.float32),
        table=scheduler.table_scratch(plan),
        last=plgpu.SMEM((1,), jnp.int32),
    )


def smem_bytes(problem: DecodeProblem, config: KernelConfig) -> int:
    problem = rows_as_sequences.of_rows(problem)
    return limits.smem_bytes(scratch(plan_of(problem, config)))


# ---- loading -------------------------------------------------------------------------------------


class _Copy(NamedTuple):
    """A row to be copied."""

    to: SmemRef
    row: Index  # a row of `to`
    source: GmemRef
    line: Index  # a row of `source`, in 64 bits


def _copy_row(ctx: ThreadContext, copy: _Copy, exists: Predicate) -> None:
    """This thread's share of a row: each eighth chunk of 16 bytes. Zeros where the row does not
    exist, and past its end.
    """
    thread, width = ctx.thread, _width(ctx.plan)
    column = thread.index % COPYING
    chunks, whole = ctx.plan.problem.head_dim // 8, width // 8
    place = copy.row * (mma_sync.pitch(width) // 8) + column
    begin = copy.line * chunks + thread.to_int64(column)
    for n in range(0, whole, COPYING):
        inside = None if n + COPYING <= whole else column < whole - n
        live = exists if n + COPYING <= chunks else exists & (column < chunks - n)
        thread.copy_async(Word(copy.to, place, n), Word(copy.source, begin, n), live, inside)


def _copy_tile(ctx: ThreadContext) -> None:
    thread, memory, at, plan = ctx
    live = live_keys(ctx)
    (cache,) = plan.layout.arrays_of(thread, memory.refs.caches, at.sequence)
    number_of = thread_copies.row_numbers(ctx, live)
    for first in range(0, plan.keys.tile, mosaic.THREADS // COPYING):
        row = thread.index // COPYING + first
        copy = _Copy(memory.smem.kv, at.slot * plan.keys.tile + row, cache, number_of(row))
        _copy_row(ctx, copy, row < live)
    thread.commit_copies()


def _copy_queries(ctx: ThreadContext) -> None:
    """The query rows of a work; all threads have met after the last one's."""
    thread, (q, to), at, plan = ctx
    rows, group = plan.queries.rows, plan.queries.group
    for down in range(0, ROWS, mosaic.THREADS // COPYING):
        row = thread.index // COPYING + down
        n = thread.minimum(at.chunk + row, rows - 1)
        line = at.row + n // group * plan.problem.q_heads + n % group
        _copy_row(ctx, _Copy(to, row, q, thread.to_int64(line)), at.chunk + row < rows)
    thread.commit_copies()


# ---- computing -----------------------------------------------------------------------------------


# A `State` has acc [ROWS, Hv], row_sum [ROWS, mma_2x2.PARTIALS] and row_max [ROWS].


def _load_queries(ctx: KernelContext, work: WorkTile) -> None:
    """The query rows of a work come to shared memory."""
    plan, first = ctx.plan, scheduler.first_query(ctx.plan, work)
    _meet(plan, None)
    threads.run(_copy_queries, plan, (ctx.refs.q, ctx.smem.q), first)
    _meet(plan, 0)


def _meet(plan: Plan, left: int | None) -> None:
    threads.run(functools.partial(thread_copies.wait_and_meet, left=left), plan, (), ())


def _positions(ctx: KernelContext, work: WorkTile, tile: Index) -> scheduler.Positions:
    """Queries and keys of a tile of logits."""
    plan, shape = ctx.plan, (ROWS, ctx.plan.keys.tile)
    layout, start = mosaic.warp_layout(shape, 2), tile * plan.keys.tile
    row, key = mosaic.positions(shape, 0, 0, layout), mosaic.positions(shape, 1, start, layout)
    return scheduler.positions_at(plan, work, row, key, layout)


def _scores(ctx: KernelContext, queries: None, slot: Index) -> RegisterTile:
    del queries
    plan, smem, none = ctx.plan, ctx.smem, jnp.int32(0)
    sizes = ROWS, plan.keys.tile, _width(plan)
    keys = smem.kv, slot * plan.keys.tile
    return mma_sync.scores((smem.q, none), keys, sizes, 1, grid=TWO_BY_TWO)


def _attend(ctx: KernelContext, work: WorkTile, at: TileAt, s: RegisterTile, state: State) -> State:
    """The state after one more kv tile."""
    plan, smem, first = ctx.plan, ctx.smem, at.slot * ctx.plan.keys.tile
    layout = mosaic.warp_layout(s.shape, 2)
    places = score_functions.places_along(s.shape, layout, 0, lambda: at.tile * plan.keys.tile)
    if plan.unit_of_logits is None:
        s = mainloop.logits_of_scores(ctx, work, at.tile, s, places)
    logits = mainloop.masked(ctx, work, at.tile, s, _positions)
    mma_2x2.store_row_partials(logits, smem.rows, "max")
    mma_2x2.sync_row_pair()
    peak = mma_2x2.load_row_totals(smem.rows, ROWS, "max")
    row_max = softmax.raise_to(peak, plan.unit_of_logits, state.row_max)
    base = softmax.base_of(row_max, empty_ok=True)
    p = softmax.exponentials(logits, plan.unit_of_logits, base)
    rescale = jnp.exp2(state.row_max - base)
    moved = mosaic.any_in_warp(row_max - state.row_max, 0.0, mma_2x2.row_layout(ROWS))
    mma_2x2.store_tile((p.astype(plan.problem.dtype),), smem.p, TWO_BY_TWO)

    def rescaled():
        older = state.acc, state.row_sum
        return tuple(x * mosaic.broadcast_rows(rescale, x.shape) for x in older)

    acc, row_sum = lax.cond(moved != 0, rescaled, lambda: (state.acc, state.row_sum))
    mma_2x2.sync_row_pair()
    values = mma_2x2.RightOperand(smem.kv, first, plan.problem.v_head_dim)
    acc = mma_2x2.matmul_add_shared(acc, smem.p, values, (ROWS, plan.keys.tile, 1), TWO_BY_TWO)
    return State(acc, row_sum + mma_2x2.partial_sums(p), row_max)


def _initial(plan: Plan) -> State:
    """The state before the first key."""
    acc, row_sum = (
        plgpu.layout_cast(jnp.zeros(shape, jnp.float32), mosaic.warp_layout(shape, 2))
        for shape in ((ROWS, plan.problem.v_head_dim), (ROWS, mma_2x2.PARTIALS))
    )
    row_max = jnp.full((ROWS,), -jnp.inf, jnp.float32)
    return State(acc, row_sum, plgpu.layout_cast(row_max, mma_2x2.row_layout(ROWS)))


def _epilogue(
    ctx: KernelContext, results: Results, work: WorkTile, state: State, partials: Partials
) -> None:
    """A partial to global memory; the last block makes the result of all."""
    plan, smem = ctx.plan, ctx.smem
    lost = smem.table.lost[work.sequence]
    mma_2x2.store_row_partials(state.row_sum, smem.rows, "sum")
    mma_2x2.sync_row_pair()
    row_sum = mma_2x2.load_row_totals(smem.rows, ROWS, "sum")
    row_sum = row_sum + mosaic.broadcast_scalar(jnp.where(lost == 1, jnp.nan, 0.0), row_sum.shape)
    mosaic.store(results.partial_out.at[partials.own], state.acc)
    mosaic.store(results.partial_max.at[partials.own], state.row_max)
    mosaic.store(results.partial_sum.at[partials.own], row_sum)
    head = combine_splits.Head(work.sequence, work.head, lost, partials)
    counter = combine_splits.CounterRefs(results.counters, smem.last)
    threads.run(combine_splits.arrive, plan, counter, head)

    @pl.when(smem.last[0] == 1)
    def _():
        threads.run(combine_splits.combine, plan, results, head)


COPIES = thread_copies.COPIES._replace(copy_tile=_copy_tile)
STEPS = Steps(_initial, _load_queries, _scores, _attend, _epilogue, places_first=False)


# ---- the call ------------------------------------------------------------------------------------


def run(inputs: DecodeInputs, problem: DecodeProblem, config: Config) -> tuple[Operand, Operand]:
    """out [M, t, N, Hv] in q's dtype, log-sum-exp float32 [M, N, t]; of packed rows [tokens, N, Hv]
    and [N, tokens].
    """
    return rows_as_sequences.run(decode_sm90.launch, inputs, problem, config)


KERNEL = Kernel(Config, limit, smem_bytes, run)
