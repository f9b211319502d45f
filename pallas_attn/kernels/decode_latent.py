"""Decode attention over a latent cache, whose V is the first columns of K (MLA), for Hopper.

All query heads share the one kv head: up to 64 rows of query are a block's, and each row of the
cache is 1152 bytes that serve as key and as value. With 128 heads that is work for tensor cores
rather than for memory, so tiles come by TMA, swizzled for wgmma. An output of 64 x 512 is too much
for one warpgroup's registers: two share it by columns. Each computes all scores, which spares
them an exchange of maxima and probabilities: half as many matmuls more, and no waiting.

Grid, dealing and merging are those of `decode_plan` and `decode_merge`; every part of a row goes
to global memory, and the last block to arrive makes the result of them.

Warpgroups, and what they own of shared memory:
  0, 1  compute; let go of q when the last scores of a piece are there, of a tile after its values
  2     loads: `q_ready` for q, `ready` a tile of the ring; and lays out the table of lengths,
        which all read after `laid`
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._problem import DecodeInputs, DecodeProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels import (
    decode_load,
    decode_logits,
    decode_merge,
    decode_plan,
    operands,
    softmax,
    tiles,
    warps,
)
from pallas_attn.kernels.decode_logits import ROWS
from pallas_attn.kernels.decode_plan import Piece, Plan, Share, Table

Array = Any
Ref = Any
Scalar = Any

COMPUTING = 2  # warpgroups
TILE = 64  # keys
WIDE = 64  # columns of a swizzle of 128 bytes


def limit(problem: DecodeProblem, least: Any) -> Limit | None:
    """Why this kernel cannot take the problem even with the `least` Config, or None."""
    reference = 'say implementation="reference"'
    if problem.kind == "per_sequence":
        return Limit(
            "separate arrays of latent rows, which would take a tensor map each",
            "use a StackedCache or a PagedCache",
        )
    if problem.quantized or problem.cache_dtype != problem.dtype:
        return Limit(f"a {problem.cache_dtype} cache with V within K", "keep it in q's dtype")
    if problem.kv_heads != 1:
        return Limit(f"V within K of {problem.kv_heads} kv heads; it takes one", reference)
    rest = problem.head_dim - problem.v_head_dim
    if problem.v_head_dim % (2 * WIDE) or problem.v_head_dim > 512 or rest not in (0, WIDE):
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
    if smem_bytes(problem, least) > decode_plan.SMEM_LIMIT:
        reason = f"V within K of {problem.sequences} sequences: no room for their lengths"
        return Limit(reason, "split the sequences over several calls")
    return None


class LatentPlan(Plan):
    """Rows are always taken 64 at a time: what wgmma multiplies."""

    @property
    def row_blocks(self) -> int:
        return ROWS // 16

    @property
    def padded(self) -> int:
        """Query rows of a sequence as they lie in memory: TMA reads from a multiple of 8 only."""
        return operands.round_up(self.rows, 8)

    @property
    def half(self) -> int:
        """Columns of V that a warpgroup has."""
        return self.problem.v_head_dim // COMPUTING

    @property
    def rest(self) -> int:
        """Columns of K that are not of V."""
        return self.problem.head_dim - self.problem.v_head_dim

    @property
    def copies(self) -> int:
        """That fill a slot."""
        return (COMPUTING + bool(self.rest)) * (TILE // self.page_rows)


class Smem(NamedTuple):
    q: Any  # [COMPUTING, ROWS, half]
    kv: Any  # [COMPUTING, stages, TILE, half]
    q_rest: Any  # [ROWS, rest]; None where rest is 0
    k_rest: Any  # [stages, TILE, rest]
    table: Table
    last: Any  # int32[1]
    q_ready: Any
    q_free: Any
    ready: Any
    free: Any
    met: Any  # of the computing warpgroups
    laid: Any


class Refs(NamedTuple):
    q: Ref  # [M * padded, H]
    kv: Ref  # [layers * sequences or pages, rows, H]
    given: decode_plan.Lengths
    page_table: Ref | None
    layer: Ref | None


def scratch(plan: LatentPlan) -> Smem:
    dtype, stages = jnp.dtype(plan.problem.dtype), plan.config.stages

    def swizzled(*shape):
        return tiles.swizzled(shape, dtype, 2 * WIDE) if shape[-1] else None

    def numbers(count):
        return plgpu.SMEM((count,), jnp.int32)

    barrier = plgpu.Barrier
    return Smem(
        q=swizzled(COMPUTING, ROWS, plan.half),
        kv=swizzled(COMPUTING, stages, TILE, plan.half),
        q_rest=swizzled(ROWS, plan.rest),
        k_rest=swizzled(stages, TILE, plan.rest),
        table=Table(numbers(plan.sums), numbers(plan.sums), numbers(plan.sums)),
        last=numbers(1),
        q_ready=barrier(num_arrivals=COMPUTING + bool(plan.rest)),
        q_free=barrier(num_arrivals=COMPUTING),
        ready=barrier(num_barriers=stages, num_arrivals=plan.copies),
        free=barrier(num_barriers=stages, num_arrivals=COMPUTING),
        met=barrier(num_arrivals=COMPUTING),
        laid=barrier(),
    )


def smem_bytes(problem: DecodeProblem, config: Any) -> int:
    buffers = jax.tree.leaves(scratch(LatentPlan(problem, config))[:6], is_leaf=_is_buffer)
    sizes = (math.prod(b.shape) * jnp.dtype(b.dtype).itemsize for b in buffers)
    return 3072 + sum(operands.round_up(size, 1024) for size in sizes)


def _is_buffer(x: Any) -> bool:
    return hasattr(x, "dtype")


class Thread(warps.Thread):
    """Of one warpgroup of several."""

    @property
    def index(self) -> tiles.Int:
        return super().index % tiles.THREADS


def _each_thread(program: Any, refs: Any, scalars: Any) -> None:
    tiles.each_thread(program, refs, scalars, Thread())


# ---- loading -------------------------------------------------------------------------------------


def _pieces(plan: LatentPlan, table: Table, share: Share, body: Any, carry: Any) -> Any:
    """`body(piece, number, carry)` for each piece of the block."""

    def one(state):
        unit, m, number, carry = state
        piece = decode_plan.piece_at(plan, table, share, unit, m)
        return piece.following, piece.m, number + 1, body(piece, number, carry)

    m = decode_plan.sequence_of(plan, table, share.first)
    start = (share.first, m, jnp.int32(0), carry)
    return lax.while_loop(lambda state: state[0] < share.end, one, start)[3]


def _load(plan: LatentPlan, refs: Refs, smem: Smem, share: Share) -> None:
    def one_piece(piece, number, count):
        pl.when(number > 0)(lambda: plgpu.barrier_wait(smem.q_free))
        _load_q(plan, refs, smem, piece)
        if plan.problem.kind == "paged" and plan.problem.mask.left is not None:
            before = lax.div(piece.tile * TILE, jnp.int32(plan.problem.page_size))
            check = functools.partial(decode_load.check_pages, plan=plan)
            _each_thread(check, (refs, smem.table), (piece.m, before))

        def one_tile(tile, carry):
            count, pages = carry
            slot = lax.rem(count, jnp.int32(plan.config.stages))
            pl.when(count >= plan.config.stages)(lambda: plgpu.barrier_wait(smem.free.at[slot]))
            for n, page in enumerate(pages):
                first = n * plan.page_rows
                _load_rows(plan, refs, smem, piece, (tile * TILE + first, first, slot, page))
            return count + 1, _pages(plan, refs, piece, tile + 1)

        ahead = _pages(plan, refs, piece, piece.tile)
        return lax.fori_loop(piece.tile, piece.end, one_tile, (count, ahead))[0]

    _pieces(plan, smem.table, share, one_piece, jnp.int32(0))


def _pages(plan: LatentPlan, refs: Refs, piece: Piece, tile: Scalar) -> list[Scalar]:
    """Of each stretch of a tile that lies together in memory; asked for a tile ahead."""
    rows = [tile * TILE + first for first in range(0, TILE, plan.page_rows)]
    if plan.problem.kind == "stacked":
        return [piece.m for _ in rows]
    table: Any = refs.page_table
    last = jnp.maximum(piece.length - 1, 0)
    size = jnp.int32(plan.problem.page_size)
    return [table[piece.m, lax.div(jnp.minimum(row, last), size)] for row in rows]


def _load_q(plan: LatentPlan, refs: Refs, smem: Smem, piece: Piece) -> None:
    chunk = lax.rem(piece.head, jnp.int32(plan.chunks)) * ROWS
    rows = pl.ds(piece.m * plan.padded + chunk, ROWS)
    for wg in range(COMPUTING):
        columns = pl.ds(wg * plan.half, plan.half)
        plgpu.copy_gmem_to_smem(refs.q.at[rows, columns], smem.q.at[wg], smem.q_ready)
    if plan.rest:
        columns = pl.ds(plan.problem.v_head_dim, plan.rest)
        plgpu.copy_gmem_to_smem(refs.q.at[rows, columns], smem.q_rest, smem.q_ready)


def _load_rows(plan: LatentPlan, refs: Refs, smem: Smem, piece: Piece, place: tuple) -> None:
    """What lies together in memory: of a tile, or of a page of it."""
    (row, first, slot, page), problem = place, plan.problem
    ready = smem.ready.at[slot]
    layer = jnp.int32(0) if refs.layer is None else refs.layer[0]
    if problem.layers is not None:  # any, where there is no such layer: the result is NaN
        layer = jnp.clip(layer, 0, problem.layers - 1)

    def copy(slab, row):
        rows, to = pl.ds(row, plan.page_rows), pl.ds(first, plan.page_rows)
        for wg in range(COMPUTING):
            src = refs.kv.at[slab, rows, pl.ds(wg * plan.half, plan.half)]
            plgpu.copy_gmem_to_smem(src, smem.kv.at[wg, slot, to], ready)
        if plan.rest:
            src = refs.kv.at[slab, rows, pl.ds(problem.v_head_dim, plan.rest)]
            plgpu.copy_gmem_to_smem(src, smem.k_rest.at[slot, to], ready)

    if problem.kind == "stacked":
        return copy(layer * problem.sequences + page, row)

    @pl.when(row < piece.length)
    def _():
        bad = (page < 0) | (page >= problem.pages)
        good = jnp.where(bad, 0, page)  # some page's rows: the result will be NaN
        pl.when(bad)(lambda: _each_thread(_lose, smem.table.lost, piece.m))
        copy(layer * problem.pages + good, lax.rem(row, jnp.int32(problem.page_size)))

    @pl.when(row >= piece.length)
    def _():
        for _ in range(COMPUTING + bool(plan.rest)):
            plgpu.barrier_arrive(ready)

    return None


def _lose(thread: warps.Thread, lost: Ref, m: Any) -> None:
    thread.shared_store(lost, m, thread.index * 0 + 1, thread.index < 1)


# ---- computing -----------------------------------------------------------------------------------


class State(NamedTuple):
    acc: Array  # [ROWS, half]
    total: Array  # [ROWS, PARTS]
    top: Array  # [ROWS]


def _scores(plan: LatentPlan, smem: Smem, slot: Scalar) -> Array:
    def body(acc):
        for wg in range(COMPUTING):
            plgpu.wgmma(acc, smem.q.at[wg], smem.kv.at[wg, slot].transpose((1, 0)))
        if plan.rest:
            plgpu.wgmma(acc, smem.q_rest, smem.k_rest.at[slot].transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(body, plgpu.ACC((ROWS, TILE), jnp.float32))


def _meet(smem: Smem) -> None:
    plgpu.barrier_arrive(smem.met)
    plgpu.barrier_wait(smem.met)


def _clear(plan: LatentPlan, smem: Smem, slot: Scalar, wg: Scalar, live: Scalar) -> None:
    """Zeros over the warpgroup's values past the last key: whatever lies there, NaN too, has a
    weight of 0. The other one must have its scores, for which they are keys.
    """
    _meet(smem)
    inside = tiles.positions((TILE, WIDE), 0, 0) < live
    for column in range(0, plan.half, WIDE):
        ref = smem.kv.at[wg, slot, :, pl.ds(column, WIDE)]
        ref[...] = jnp.where(inside, plgpu.load(ref, layout=tiles.TILE), 0)
    plgpu.commit_smem()


def _compute(  # noqa: PLR0913
    plan: LatentPlan, refs: Refs, smem: Smem, results: Any, share: Share, place: tuple
) -> None:
    cta, wg = place
    stages = plan.config.stages

    def one_piece(piece, number, count):
        del number
        plgpu.barrier_wait(smem.q_ready)

        def one_tile(tile, carry):
            state, count = carry
            slot = lax.rem(count, jnp.int32(stages))
            plgpu.barrier_wait(smem.ready.at[slot])
            s = _scores(plan, smem, slot)
            pl.when(tile == piece.end - 1)(lambda: plgpu.barrier_arrive(smem.q_free))
            live = piece.length - tile * TILE
            pl.when(live < TILE)(lambda: _clear(plan, smem, slot, wg, live))
            s, _ = decode_logits.logits(plan, piece, tile, (s, None))
            new = softmax.step(s, plan.unit_of_logits, state.top, guarded=True)

            def scaled():
                return (
                    state.acc * tiles.down_rows(new.shrink, state.acc.shape),
                    state.total * tiles.down_rows(new.shrink, state.total.shape),
                )

            acc, total = lax.cond(new.moved != 0, scaled, lambda: (state.acc, state.total))
            p = new.p.astype(plan.problem.dtype)
            acc = tiles.added(acc, (p,), (smem.kv.at[wg, slot],))
            plgpu.barrier_arrive(smem.free.at[slot])
            return State(acc, total + new.total, new.top), count + 1

        state = State(
            tiles.filled((ROWS, plan.half), 0.0),
            tiles.filled((ROWS, softmax.PARTS), 0.0),
            tiles.filled((ROWS,), -jnp.inf),
        )
        state, count = lax.fori_loop(piece.tile, piece.end, one_tile, (state, count))
        parts = decode_plan.parts_of(plan, share, piece, cta)
        _finish(plan, smem, results, (piece, state, parts), wg)
        return count

    _pieces(plan, smem.table, share, one_piece, jnp.int32(0))


def _finish(plan: LatentPlan, smem: Smem, results: Any, done: tuple, wg: Scalar) -> None:
    """A part to global memory; the last block's first warpgroup makes the result of all."""
    piece, state, parts = done
    lost = smem.table.lost[piece.m]
    columns = pl.ds(wg * plan.half, plan.half)
    _meet(smem)  # the first one may still read the part before, in the same place
    tiles.store(results.parts.at[parts.mine, :, columns], state.acc)

    @pl.when(wg == 0)
    def _():
        total = state.total.sum(axis=1)
        total = total + tiles.spread(jnp.where(lost == 1, jnp.nan, 0.0), total.shape)
        tiles.store(results.tops.at[parts.mine], state.top)
        tiles.store(results.totals.at[parts.mine], total)

    _meet(smem)

    @pl.when(wg == 0)
    def _():
        at = decode_merge.Where(
            m=piece.m,
            head=piece.head,
            lost=lost,
            count=parts.count,
            mine=parts.mine,
            first=parts.first,
            later=parts.later,
        )
        arrive = functools.partial(decode_merge.arrive, plan=plan)
        _each_thread(arrive, (results.counters, smem.last), at)

        @pl.when(smem.last[0] == 1)
        def _():
            _each_thread(functools.partial(decode_merge.merge, plan=plan), results, at)


def _kernel(refs: Refs, results: Any, out: Ref, lse: Ref, parts: Any, smem: Smem, *, plan) -> None:  # noqa: PLR0913
    cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
    results = decode_merge.Results(out, lse, *parts, *results)

    @pl.when(wg == COMPUTING)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        usable = jnp.int32(1)
        if refs.layer is not None:
            layer = refs.layer[0]
            usable = ((layer >= 0) & (layer < plan.problem.layers)).astype(jnp.int32)
        lay_out = functools.partial(decode_plan.lay_out, plan=plan, meanwhile=lambda: None)
        _each_thread(lay_out, (refs.given, smem.table), usable)
        plgpu.barrier_arrive(smem.laid)
        _load(plan, refs, smem, decode_plan.share_of(plan, smem.table, cta))

    @pl.when(wg < COMPUTING)
    def _():
        plgpu.set_max_registers(240, action="increase")
        plgpu.barrier_wait(smem.laid)
        share = decode_plan.share_of(plan, smem.table, cta)
        _compute(plan, refs, smem, results, share, (cta, wg))


# ---- the call ------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("problem", "config"))
def launch(
    inputs: DecodeInputs, counters: Array, problem: DecodeProblem, config: Any
) -> tuple[Array, Array]:
    """out [M, t, N, Hv] in q's dtype, log-sum-exp float32 [M, N, t]."""
    plan = LatentPlan(problem, config)
    rows = (problem.sequences, problem.q_len, problem.q_heads)
    q = inputs.q.reshape(problem.sequences, -1, problem.head_dim)
    q = jnp.pad(q, ((0, 0), (0, plan.padded - plan.rows), (0, 0))).reshape(-1, problem.head_dim)
    refs = Refs(
        q=q,
        kv=inputs.k_cache.reshape(-1, *inputs.k_cache.shape[-2:]),
        given=decode_plan.Lengths(inputs.lengths, None),
        page_table=inputs.page_table,
        layer=None if inputs.layer is None else jnp.asarray(inputs.layer, jnp.int32).reshape(1),
    )
    of = jax.ShapeDtypeStruct
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
        num_threads=COMPUTING + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name="decode_latent_sm90",
    )
    out, lse, _ = kernel(refs, (counters, inputs.sinks))
    return out, lse
