"""Decode attention over a latent cache, whose V is the first columns of K (MLA), for every GPU from
Ampere on: `mla_sm90` with copies by threads and matmuls of warps.

A block of 4 warps takes 32 rows of query of one kv head. Warps stand two by two (`squares`): 16
rows each, by half of the keys for scores and half of the columns for the output, which is 128
numbers a thread where V has 512 columns. A row of the cache lies in shared memory once and is read
as key and as value. Grid, dealing and merging are those of `scheduler` and `combine`; every
part of a row goes to global memory, and the last block to arrive makes the result of them.

A tile is there when each thread's own copies are and all have met, which they do once a tile; two
warps that share rows meet twice more, over the rows' largest logits and over P. With one stage,
where shared memory has room for no more, a tile is asked for when it is wanted.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn import _gpus
from pallas_attn._problem import DecodeInputs, DecodeProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import softmax, tma_operands
from pallas_attn.kernels.attention.sm80_common import fits
from pallas_attn.kernels.decode import combine, mainloop, producer, scheduler
from pallas_attn.kernels.decode.producer import Refs
from pallas_attn.kernels.decode.scheduler import Piece, Plan, Share, Table
from pallas_attn.kernels.lang import mosaic, threads, warp_vote
from pallas_attn.kernels.lang.config import check
from pallas_attn.kernels.mma import mma_2x2, mma_sync

Array = Any
Ref = Any
Scalar = Any

ROWS = 32  # of query, of a block
STAND = mma_2x2.WarpGrid(2)
ABREAST = 8  # threads that copy a row


@dataclasses.dataclass(frozen=True)
class Config:
    """`tile`: keys of a tile. `stages`: tiles in the ring; with a single one nothing arrives under
    the matmuls of a tile. `ctas`: persistent blocks. `fixed`: tiles of a part where
    `batch_invariant` is asked for.
    """

    tile: int = 64
    stages: int = 6
    ctas: int = _gpus.multiprocessors(_gpus.HOPPER)
    fixed: int = 16
    # What `scheduler.Plan` asks of the Config of every decode kernel.
    least, rows, bulk, many, turn, eager, abreast = 1, 64, False, False, 0, False, 1

    def __post_init__(self):
        check(
            self,
            tile=(self.tile in (32, 64), "32 or 64 of V within K"),
            stages=(self.stages >= self.least, f"at least {self.least}"),
            ctas=(self.ctas >= 1, "at least 1"),
            fixed=(self.fixed >= 1, "at least 1"),
        )

    @classmethod
    def default(cls, problem: DecodeProblem) -> "Config":
        """As many bytes in flight as there is room for."""
        ctas = _gpus.multiprocessors(problem.gpu)
        sizes = [(64, n) for n in (6, 5, 4, 3, 2)] + [(32, n) for n in (3, 2, 1)]
        choices = [cls(tile=tile, stages=stages, ctas=ctas) for tile, stages in sizes]
        return next((one for one in choices if fits(problem, smem_bytes, one)), choices[-1])


def limit(problem: DecodeProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
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
    rows: Any  # float32[2, ROWS]: what either warp of a row says of it
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
        table=Table(numbers(plan.sums), numbers(plan.sums), numbers(plan.sums)),
        last=numbers(1),
    )


def smem_bytes(problem: DecodeProblem, config: Any) -> int:
    return scheduler.RESERVED + mosaic.bytes_of(scratch(LatentPlan(problem, config)))


# ---- loading -------------------------------------------------------------------------------------


def _copy_row(thread: threads.Thread, refs: tuple, at: tuple, there: Any, plan: LatentPlan) -> None:
    """This thread's share of a row: each eighth chunk of 16 bytes. `at`: (the row of shared memory,
    the row in global memory); zeros where it is not `there`, and past its end.
    """
    (to, source), (row, line) = refs, at
    column = thread.index % ABREAST
    chunks, whole = plan.problem.head_dim // 8, plan.width // 8
    place = row * (mma_sync.pitch(plan.width) // 8) + column
    begin = line * chunks + thread.wide(column)
    for n in range(0, whole, ABREAST):
        inside = None if n + ABREAST <= whole else column < whole - n
        live = there if n + ABREAST <= chunks else there & (column < chunks - n)
        thread.copy_async((to, place, n), (source, begin, n), live, inside)


def _fetch(thread: threads.Thread, refs: tuple[Refs, Smem], at: Any, plan: LatentPlan) -> None:
    given, smem = refs
    live = thread.select(at.wanted >= 1, thread.minimum(at.live, plan.tile), 0)
    (cache,) = plan.layout.arrays_of(thread, given.caches, at.m)
    find = producer.finder(thread, (given, smem.table), at, live, plan)
    for first in range(0, plan.tile, mosaic.THREADS // ABREAST):
        row = thread.index // ABREAST + first
        place = at.slot * plan.tile + row, find(row)
        _copy_row(thread, (smem.kv, cache), place, row < live, plan)
    thread.commit_copies()


def _fetch_queries(thread: threads.Thread, refs: tuple[Ref, Ref], at: tuple, plan: LatentPlan):
    """The queries of a piece; all have met after the last one's."""
    (q, to), (first, chunk) = refs, at
    for down in range(0, ROWS, mosaic.THREADS // ABREAST):
        row = thread.index // ABREAST + down
        n = thread.minimum(chunk + row, plan.rows - 1)
        line = first + n // plan.group * plan.problem.q_heads + n % plan.group
        _copy_row(thread, (to, q), (row, thread.wide(line)), chunk + row < plan.rows, plan)
    thread.commit_copies()


def _meet(thread: threads.Thread, refs: Any, at: Any, *, left: int | None) -> None:
    """All threads, when all but the last `left` of their copies are there."""
    del refs, at
    if left is not None:
        thread.wait_copies(left)
    thread.sync()


# ---- computing -----------------------------------------------------------------------------------


class State(NamedTuple):
    acc: Array  # [ROWS, Hv]
    total: Array  # [ROWS, pairs.PARTS]
    top: Array  # [ROWS]


def _logits(plan: LatentPlan, piece: Piece, tile: Scalar, s: Array) -> Array:
    """In log2 units if `plan.unit_of_logits` is None."""
    layout, start = mosaic.warp_layout(s.shape, 2), tile * plan.tile

    def positions():
        row = mosaic.positions(s.shape, 0, 0, layout)
        row = row + lax.rem(piece.head, jnp.int32(plan.chunks)) * plan.chunk_rows
        query = piece.length - plan.problem.q_len + mainloop.token_of(plan, row)
        return query, mosaic.positions(s.shape, 1, start, layout)

    given = mainloop.logits_of_scores(plan, s)
    return mainloop.masked(plan, piece, (start, plan.tile), given, positions)


def _attend(plan: LatentPlan, smem: Smem, piece: Piece, at: tuple, state: State) -> State:
    """One tile of keys."""
    (tile, slot), none = at, jnp.int32(0)
    first, sizes = slot * plan.tile, (ROWS, plan.tile, plan.width)
    s = mma_2x2.product((smem.q, none), (smem.kv, first), sizes, 1, 2)
    given = _logits(plan, piece, tile, s)
    mma_2x2.store_row_partials(given, smem.rows, 0, "max")
    mma_2x2.sync_row_pair(0)
    peak = mma_2x2.load_row_totals(smem.rows, 0, ROWS, "max")
    top, base = softmax.raise_max(peak, plan.unit_of_logits, state.top, guarded=True)
    given = given if plan.unit_of_logits is None else given * plan.unit_of_logits
    p = jnp.exp2(given - mosaic.broadcast_rows(base, given.shape))
    shrink = jnp.exp2(state.top - base)
    moved = warp_vote.any_in_warp(top - state.top, 0.0, mma_2x2.row_layout(ROWS))
    mma_2x2.store_tile((p.astype(plan.problem.dtype),), smem.p, STAND)

    def scaled():
        return (
            state.acc * mosaic.broadcast_rows(shrink, state.acc.shape),
            state.total * mosaic.broadcast_rows(shrink, state.total.shape),
        )

    acc, total = lax.cond(moved != 0, scaled, lambda: (state.acc, state.total))
    mma_2x2.sync_row_pair(0)
    values = smem.kv, first, plan.problem.v_head_dim
    acc = mma_2x2.matmul_add_shared(acc, smem.p, values, (ROWS, plan.tile, 1), STAND)
    return State(acc, total + mma_2x2.partial_sums(p), top)


def _nothing(plan: LatentPlan) -> State:
    acc, total = (
        plgpu.layout_cast(jnp.zeros(shape, jnp.float32), mosaic.warp_layout(shape, 2))
        for shape in ((ROWS, plan.problem.v_head_dim), (ROWS, mma_2x2.PARTIALS))
    )
    top = jnp.full((ROWS,), -jnp.inf, jnp.float32)
    return State(acc, total, plgpu.layout_cast(top, mma_2x2.row_layout(ROWS)))


def _compute(
    plan: LatentPlan, refs: Refs, smem: Any, results: Any, share: Share, cta: Scalar
) -> None:
    """All pieces of a block, and the loading that runs ahead of them."""
    stages = plan.config.stages
    m = scheduler.sequence_of(plan, smem.table, share.first)
    first = scheduler.piece_at(plan, smem.table, share, share.first, m)

    def ask(slot, piece):
        piece, tile = producer.next_tile(plan, refs, smem, share, (piece, slot))
        threads.each_thread(functools.partial(_fetch, plan=plan), (refs, smem), tile)
        return piece._replace(tile=jnp.minimum(piece.tile + 1, piece.end))

    def meet(left):
        threads.each_thread(functools.partial(_meet, left=left), (), ())

    ahead = lax.fori_loop(0, stages - 1, ask, first)

    def one_piece(carry):
        unit, m, count, ahead = carry
        piece = scheduler.piece_at(plan, smem.table, share, unit, m)
        meet(None)
        queries = functools.partial(_fetch_queries, plan=plan)
        threads.each_thread(queries, (refs.q, smem.q), scheduler.first_query(plan, piece))
        producer.check_skipped_pages(plan, refs, smem.table, piece)
        meet(0)

        def one_tile(tile, carry):
            state, count, ahead = carry
            slot = lax.rem(count, jnp.int32(stages))
            meet(max(stages - 2, 0))
            ahead = ask(jnp.where(slot == 0, stages - 1, slot - 1), ahead)
            if stages == 1:
                meet(0)
            return _attend(plan, smem, piece, (tile, slot), state), count + 1, ahead

        carry = _nothing(plan), count, ahead
        state, count, ahead = lax.fori_loop(piece.tile, piece.end, one_tile, carry)
        _finish(plan, smem, results, (piece, state), scheduler.parts_of(plan, share, piece, cta))
        return piece.following, piece.m, count, ahead

    start = (share.first, m, jnp.int32(0), ahead)
    lax.while_loop(lambda carry: carry[0] < share.end, one_piece, start)


def _finish(plan: LatentPlan, smem: Smem, results: Any, done: tuple, parts: Any) -> None:
    """A part to global memory; the last block makes the result of all."""
    piece, state = done
    lost = smem.table.lost[piece.m]
    mma_2x2.store_row_partials(state.total, smem.rows, 0, "sum")
    mma_2x2.sync_row_pair(0)
    total = mma_2x2.load_row_totals(smem.rows, 0, ROWS, "sum")
    total = total + mosaic.broadcast_scalar(jnp.where(lost == 1, jnp.nan, 0.0), total.shape)
    mosaic.store(results.parts.at[parts.mine], state.acc)
    mosaic.store(results.tops.at[parts.mine], state.top)
    mosaic.store(results.totals.at[parts.mine], total)
    at = combine.Where(piece.m, piece.head, lost, *parts)
    arrive = functools.partial(combine.arrive, plan=plan)
    threads.each_thread(arrive, (results.counters, smem.last), at)

    @pl.when(smem.last[0] == 1)
    def _():
        threads.each_thread(functools.partial(combine.merge, plan=plan), results, at)


def _lay_out(thread: threads.Thread, refs: Any, usable: Any, plan: LatentPlan) -> None:
    scheduler.lay_out(thread, refs, usable, plan, lambda: None)


def _kernel(refs: Refs, out: Ref, lse: Ref, parts: Any, smem: Smem, *, plan: LatentPlan) -> None:
    cta, usable = lax.axis_index("cta"), producer.usable(plan, refs.layer)
    threads.each_thread(functools.partial(_lay_out, plan=plan), (refs.given, smem.table), usable)
    share = scheduler.share_of(plan, smem.table, cta)
    outs, tops, totals = parts
    results = combine.Results(out, lse, outs, tops, totals, refs.counters, refs.sinks)

    @pl.when(share.first < share.end)
    def _():
        _compute(plan, refs, smem, results, share, cta)


# ---- the call ------------------------------------------------------------------------------------


def run(inputs: DecodeInputs, problem: DecodeProblem, config: Config) -> tuple[Array, Array]:
    """out [M, t, N, Hv] in q's dtype, log-sum-exp float32 [M, N, t]."""
    if scheduler.has_no_rows(problem):
        return combine.of_no_rows(inputs, problem)
    return _launch(inputs, combine.counters(LatentPlan(problem, config)), problem, config)


@functools.partial(jax.jit, static_argnames=("problem", "config"))
def _launch(
    inputs: DecodeInputs, counters: Array, problem: DecodeProblem, config: Config
) -> tuple[Array, Array]:
    """Jitted, so that a model of many layers traces it once."""
    plan, of = LatentPlan(problem, config), jax.ShapeDtypeStruct
    rows = (problem.sequences, problem.q_len, problem.q_heads)
    refs = producer.refs_of(inputs, counters, plan)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=(
            of((*rows, problem.v_head_dim), problem.dtype),
            of((rows[0], rows[2], rows[1]), jnp.float32),
            (
                of((plan.slots, ROWS, problem.v_head_dim), jnp.float32),
                of((plan.slots, ROWS), jnp.float32),
                of((plan.slots, ROWS), jnp.float32),
            ),
        ),
        scratch_types=(scratch(plan),),
        grid=(plan.ctas,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="decode_latent_sm80",
    )
    out, lse, _ = kernel(refs)
    return out, lse
