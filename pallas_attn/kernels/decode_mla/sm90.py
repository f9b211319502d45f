"""Decode attention over a latent cache, whose V is the first columns of K (MLA), for Hopper.

All query heads share the one kv head: up to 64 rows of query are a block's, and each row of the
cache is 1152 bytes that serve as key and as value. With 128 heads that is work for tensor cores
rather than for memory, so tiles come by TMA, swizzled for wgmma. An output of 64 x 512 is too much
for one warpgroup's registers: two share it by columns. A third has the scores of all rows: it is a
tile ahead of them, and leaves its probabilities where the part of the keys lay that is not of V.
Half of q stays in its registers, which leaves shared memory for half a tile more of keys.
Up to 32 rows are `sm90_few_rows`'s.

Dealing is that of `scheduler`, but blocks that have other rows of the same queries lie beside
each other and take the same keys: memory is read once, L2 as often as there are chunks of rows.
Parts of a row are merged by `mla_combine`.

A warpgroup that multiplies values has a ring of blocks of columns, two tiles and a half where V has
512 columns; each block is asked for again as soon as it has been multiplied. Scores take the blocks
of all rings. The first block of a piece is q's, on its way to registers. Columns of K that are not
of V have two slots; when a tile's scores are there, its probabilities take their place.

Warpgroups, and what they own of shared memory:
  0, 1  multiply values, by columns; let go of theirs of a tile (`free`), of its probabilities
        (`spent`), and of q on its way to registers
  2     scores: lets go of q in shared memory when the last scores of a piece are there;
        `weights`: a tile's probabilities, with `tops` and `totals`, are there
  3     loads: `q_ready` for q, `ready` and `rest_ready` for blocks of columns; and lays out the
        table of lengths, which all read after `laid`
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
from pallas_attn.kernels.attention import cache_layout, softmax
from pallas_attn.kernels.decode import combine, mainloop, scheduler
from pallas_attn.kernels.decode.mainloop import ROWS
from pallas_attn.kernels.decode.scheduler import Piece, Plan, Table
from pallas_attn.kernels.decode_mla import combine as mla_combine
from pallas_attn.kernels.decode_mla import producer as mla_producer
from pallas_attn.kernels.decode_mla import sm90_few_rows
from pallas_attn.kernels.decode_mla.combine import base_of
from pallas_attn.kernels.decode_mla.plan import COMPUTING, SLOTS, LatentPlan, place_of
from pallas_attn.kernels.decode_mla.producer import TILE, WIDE, Block, Refs, each_thread
from pallas_attn.kernels.lang import mosaic, warp_vote
from pallas_attn.kernels.lang.config import check

Array = Any
Ref = Any
Scalar = Any

SCORING, LOADING = COMPUTING, COMPUTING + 1  # the other warpgroups


@dataclasses.dataclass(frozen=True)
class Config:
    """`stages`: the ring has room for so many blocks of columns, if not for as many as the kernel
    needs. `ctas`: persistent blocks. `fixed`: tiles of a part where `batch_invariant` is asked for.
    """

    stages: int = 6
    ctas: int = _gpus.multiprocessors(_gpus.HOPPER)
    fixed: int = 16
    # What `scheduler.Plan` asks of the Config of every decode kernel.
    tile, least, rows, bulk, many, turn, eager, abreast = TILE, 2, ROWS, True, False, 0, False, 1

    def __post_init__(self):
        check(
            self,
            stages=(self.stages >= self.least, f"at least {self.least}"),
            ctas=(self.ctas >= 1, "at least 1"),
            fixed=(self.fixed >= 1, "at least 1"),
        )

    @classmethod
    def default(cls, problem: DecodeProblem) -> "Config":
        """As many bytes in flight as there is room for; and so many blocks that all have as much to
        do, where a few less than there are multiprocessors have.
        """
        most = cls().ctas
        heads = problem.sequences * _plan_of(problem, cls()).chunks
        few = range(most, most - most // 16, -1)
        ctas = next((n for n in few if heads % n == 0 or n % heads == 0), most)
        return scheduler.deepest(smem_bytes, problem, cls(ctas=ctas), scheduler.SMEM_LIMIT)


def limit(problem: DecodeProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
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
    if smem_bytes(problem, Config(stages=2)) > scheduler.SMEM_LIMIT:
        reason = f"V within K of {problem.sequences} sequences: no room for their lengths"
        return Limit(reason, "split the sequences over several calls")
    return None


class Smem(NamedTuple):
    q: Any  # [COMPUTING, ROWS, half - part]: what is not in registers; None where all is
    kv: Any  # [COMPUTING, ring, TILE, part]: each warpgroup's blocks of columns
    q_rest: Any  # [ROWS, rest]; None where rest is 0
    k_rest: Any  # [SLOTS, TILE, rest]
    p: Any  # [SLOTS, ROWS, TILE]: probabilities; None where k_rest has room for them
    tops: Any  # float32[SLOTS, ROWS]: after a tile
    totals: Any  # likewise, after the last tile of a piece
    table: Table
    last: Any  # int32[1]
    q_ready: Any
    q_free: Any
    ready: Any  # an entry of a ring
    free: Any
    rest_ready: Any
    weights: Any  # a tile's probabilities are there
    spent: Any  # and not needed any more
    met: Any  # of the computing warpgroups
    laid: Any


def scratch(plan: LatentPlan) -> Smem:
    """Shared memory, described once: `run` launches it, `smem_bytes` adds it up."""
    dtype, ring = jnp.dtype(plan.problem.dtype), plan.ring

    def swizzled(*shape):
        return mosaic.swizzled(shape, dtype, 2 * WIDE) if shape[-1] else None

    def numbers(count):
        return plgpu.SMEM((count,), jnp.int32)

    barrier, stretches = plgpu.Barrier, TILE // plan.page_rows
    return Smem(
        q=swizzled(COMPUTING, ROWS, plan.half - plan.part),
        kv=swizzled(COMPUTING, ring, TILE, plan.part),
        q_rest=swizzled(ROWS, plan.rest),
        k_rest=swizzled(SLOTS, TILE, plan.rest),
        p=None if plan.rest else swizzled(SLOTS, ROWS, TILE),
        tops=plgpu.SMEM((SLOTS, ROWS), jnp.float32),
        totals=plgpu.SMEM((SLOTS, ROWS), jnp.float32),
        table=mla_producer.table_of(plan),
        last=numbers(1),
        q_ready=barrier(num_arrivals=max(plan.q_pieces, 1)),
        q_free=barrier(),
        ready=barrier(num_barriers=COMPUTING * ring, num_arrivals=stretches),
        free=barrier(num_barriers=COMPUTING * ring),
        rest_ready=barrier(num_barriers=SLOTS, num_arrivals=stretches),
        weights=barrier(num_barriers=SLOTS),
        spent=barrier(num_barriers=SLOTS, num_arrivals=COMPUTING),
        met=barrier(num_arrivals=COMPUTING),
        laid=barrier(),
    )


def _few(problem: DecodeProblem) -> bool:
    return problem.q_len * problem.q_heads <= sm90_few_rows.MOST


def _plan_of(problem: DecodeProblem, config: Config) -> Plan:
    return (sm90_few_rows.FewPlan if _few(problem) else LatentPlan)(problem, config)


def smem_bytes(problem: DecodeProblem, config: Config) -> int:
    if _few(problem):
        return sm90_few_rows.smem_bytes(problem, config)
    return scheduler.RESERVED + mosaic.bytes_of(scratch(LatentPlan(problem, config)))


# ---- loading -------------------------------------------------------------------------------------


def _pieces(plan: LatentPlan, smem: Smem, cta: Scalar, body: Any) -> None:
    """`body(piece, number, count)` for each piece of the block; `count` is what it gave before."""
    place = place_of(plan, cta)

    def own(piece, number, count):
        return body(piece._replace(head=piece.head * plan.beside + place.which), number, count)

    share = scheduler.share_of(plan.line, smem.table, place.cta)
    mla_producer.pieces(plan.line, smem.table, share, own, jnp.int32(0))


def _entry_of(plan: LatentPlan, wg: Any, number: Scalar) -> Scalar:
    """Of the number-th block of a warpgroup's columns, since the kernel began, in all rings."""
    return wg * plan.ring + lax.rem(number, jnp.int32(plan.ring))


def _block_of(plan: LatentPlan, smem: Smem, wg: Any, number: Scalar) -> Ref:
    return smem.kv.at[wg, lax.rem(number, jnp.int32(plan.ring))]


def _first_of(plan: LatentPlan, number: Scalar, count: Scalar) -> Scalar:
    """The number of the block that holds q's, before those of a piece's keys. `count`: tiles before
    the piece.
    """
    return number + count * plan.each


def _load(plan: LatentPlan, refs: Refs, smem: Smem, cta: Scalar) -> None:
    which = place_of(plan, cta).which

    def bring(tile):  # by one of those beside each other
        return lax.rem(tile, jnp.int32(plan.beside)) == which

    def one_piece(piece, number, count):
        _load_q(plan, refs, smem, piece, number, count)

        def blocks_of(count):
            first = _first_of(plan, number, count) + 1
            for n in range(plan.each):
                for wg in range(COMPUTING):
                    entry = _entry_of(plan, wg, first + n)
                    yield Block(
                        columns=pl.ds(wg * plan.half + n * plan.part, plan.part),
                        to=_block_of(plan, smem, wg, first + n),
                        ready=smem.ready.at[entry],
                        free=smem.free.at[entry],
                        again=first + n >= plan.ring,
                    )
            if plan.rest:
                slot = lax.rem(count, jnp.int32(SLOTS))
                yield Block(
                    columns=pl.ds(plan.problem.v_head_dim, plan.rest),
                    to=smem.k_rest.at[slot],
                    ready=smem.rest_ready.at[slot],
                    free=smem.spent.at[slot],
                    again=count >= SLOTS,
                )

        ahead = bring if plan.scores_first else None
        return mla_producer.load(plan, refs, smem.table, piece, count, blocks_of, ahead)

    _pieces(plan, smem, cta, one_piece)


def _load_q(  # noqa: PLR0913
    plan: LatentPlan, refs: Refs, smem: Smem, piece: Piece, number: Scalar, count: Scalar
) -> None:
    """Columns that go to registers come through the rings."""
    chunk = lax.rem(piece.head, jnp.int32(plan.chunks)) * ROWS
    start, first = piece.m * plan.padded + chunk, _first_of(plan, number, count)

    def copy(column, width, to, ready, row=0, rows=ROWS):
        source = refs.q.at[pl.ds(start + row, rows), pl.ds(column, width)]
        plgpu.copy_gmem_to_smem(source, to, ready)

    for wg in range(COMPUTING):
        entry, to = _entry_of(plan, wg, first), _block_of(plan, smem, wg, first)
        again = functools.partial(plgpu.barrier_wait, smem.free.at[entry])
        pl.when(first >= plan.ring)(again)
        for row in range(0, ROWS, plan.page_rows):  # as many copies as keys take
            some = to.at[pl.ds(row, plan.page_rows)]
            copy(wg * plan.half, plan.part, some, smem.ready.at[entry], row, plan.page_rows)
    if not plan.q_pieces:
        return
    pl.when(number > 0)(lambda: plgpu.barrier_wait(smem.q_free))
    for wg in range(COMPUTING):
        if smem.q is not None:
            width = plan.half - plan.part
            copy(wg * plan.half + plan.part, width, smem.q.at[wg], smem.q_ready)
    if plan.rest:
        copy(plan.problem.v_head_dim, plan.rest, smem.q_rest, smem.q_ready)


# ---- computing -----------------------------------------------------------------------------------


def _probabilities(plan: LatentPlan, smem: Smem, slot: Scalar) -> Ref:
    """Where a tile's are: in place of the part of its keys that is not of V."""
    return smem.k_rest.at[slot] if plan.rest else smem.p.at[slot]


def _queries(plan: LatentPlan, smem: Smem, first: Scalar) -> list[Array]:
    """The columns of q that stay in registers: the first of each warpgroup's."""
    parts = []
    for wg in range(COMPUTING):
        plgpu.barrier_wait(smem.ready.at[_entry_of(plan, wg, first)])
        parts.append(plgpu.load(_block_of(plan, smem, wg, first), layout=mosaic.TILE))
    if plan.q_pieces:
        plgpu.barrier_wait(smem.q_ready)
    return parts


def _scores(  # noqa: PLR0913
    plan: LatentPlan, smem: Smem, q: list[Array], first: Scalar, slot: Scalar, let_go: Any
) -> Array:
    """Begins as soon as the first columns are there; `let_go` of the probabilities of the tile
    before when all but the last are multiplied.
    """

    def body(acc):
        for n in range(plan.each):
            for wg in range(COMPUTING):
                plgpu.barrier_wait(smem.ready.at[_entry_of(plan, wg, first + n)])
                keys = _block_of(plan, smem, wg, first + n).transpose((1, 0))
                columns = pl.ds((n - 1) * plan.part, plan.part)
                plgpu.wgmma(acc, smem.q.at[wg, :, columns] if n else q[wg], keys)
        if plan.rest:
            plgpu.barrier_wait(smem.rest_ready.at[slot])
            plgpu.wgmma(acc, smem.q_rest, smem.k_rest.at[slot].transpose((1, 0)))
        if plan.scores_first:
            plgpu.wgmma_wait(1)
            let_go()
        return acc[...]

    return pl.run_scoped(body, plgpu.ACC((ROWS, TILE), jnp.float32))


def _put(ref: Ref, numbers: Array) -> None:
    ref[...] = numbers


def _score(plan: LatentPlan, smem: Smem, cta: Scalar) -> None:
    """Probabilities of all tiles, and what they are relative to.

    Where scores are first, those of a tile are let go of when the scores of the next are all but
    there: tensor cores do the values of a tile under the softmax of the next.
    """

    def one_piece(piece, number, count):
        q = _queries(plan, smem, _first_of(plan, number, count))

        def one_tile(tile, carry):
            top, total, count = carry
            slot, first = lax.rem(count, jnp.int32(SLOTS)), _first_of(plan, number, count) + 1
            before, last = lax.rem(count + (SLOTS - 1), jnp.int32(SLOTS)), tile == piece.end - 1
            let_go = functools.partial(plgpu.barrier_arrive, smem.weights.at[before])
            s = _scores(plan, smem, q, first, slot, lambda: pl.when(tile > piece.tile)(let_go))
            if plan.q_pieces:
                pl.when(last)(lambda: plgpu.barrier_arrive(smem.q_free))
            live = piece.length - tile * TILE

            @pl.when(live < TILE)
            def _():
                for n in range(plan.each):
                    for wg in range(COMPUTING):
                        block = _block_of(plan, smem, wg, first + n)
                        mla_producer.clear(block, plan.part, live)

            s, _ = mainloop.logits(plan, piece, tile, (s, None))
            new = softmax.next_step(s, plan.unit_of_logits, top, guarded=True)
            total = softmax.rescaled(new, total) + new.row_sum
            # What probabilities are put over were keys: all warps must have their scores.
            each_thread(mla_producer.sync, (), ())
            if not plan.rest:
                again = functools.partial(plgpu.barrier_wait, smem.spent.at[slot])
                pl.when(count >= SLOTS)(again)
            _probabilities(plan, smem, slot)[...] = new.p.astype(plan.problem.dtype)
            smem.tops.at[slot][...] = new.row_max
            pl.when(last)(lambda: _put(smem.totals.at[slot], total.sum(axis=1)))
            plgpu.commit_smem()
            at_once = last if plan.scores_first else True
            pl.when(at_once)(lambda: plgpu.barrier_arrive(smem.weights.at[slot]))
            return new.row_max, total, count + 1

        top = mosaic.filled((ROWS,), -jnp.inf)
        total = mosaic.filled((ROWS, softmax.PARTIALS), 0.0)
        return lax.fori_loop(piece.tile, piece.end, one_tile, (top, total, count))[2]

    _pieces(plan, smem, cta, one_piece)


class State(NamedTuple):
    accs: tuple[Array, ...]  # [ROWS, part] each
    top: Array  # [ROWS]: what they are relative to
    total: Array  # [ROWS]


def _weigh(plan: LatentPlan, smem: Smem, results: Any, cta: Scalar, wg: Scalar) -> None:
    """A warpgroup's columns of the values, of all tiles."""

    def one_piece(piece, number, count):
        entry_of_q = _entry_of(plan, wg, _first_of(plan, number, count))
        plgpu.barrier_wait(smem.ready.at[entry_of_q])

        def one_tile(tile, carry):
            state, count = carry
            slot, first = lax.rem(count, jnp.int32(SLOTS)), _first_of(plan, number, count) + 1
            entries = [_entry_of(plan, wg, first + n) for n in range(plan.each)]
            for entry in entries:
                plgpu.barrier_wait(smem.ready.at[entry])
            plgpu.barrier_wait(smem.weights.at[slot])
            # Where there are scores, q is in registers.
            free_q = functools.partial(plgpu.barrier_arrive, smem.free.at[entry_of_q])
            pl.when(tile == piece.tile)(free_q)
            top = plgpu.load(smem.tops.at[slot], layout=mosaic.ROW)
            total = plgpu.load(smem.totals.at[slot], layout=mosaic.ROW)
            shrink = jnp.exp2(state.top - base_of(top))
            accs = lax.cond(
                warp_vote.any_in_warp(top - state.top, 0.0) != 0,
                lambda: tuple(acc * mosaic.broadcast_rows(shrink, acc.shape) for acc in state.accs),
                lambda: state.accs,
            )

            def matmuls(refs):
                p = _probabilities(plan, smem, slot)
                for n, acc in enumerate(refs):
                    plgpu.wgmma(acc, p, _block_of(plan, smem, wg, first + n))
                for n, entry in enumerate(entries):
                    plgpu.wgmma_wait(plan.each - 1 - n)
                    plgpu.barrier_arrive(smem.free.at[entry])

            accs = pl.run_state(matmuls)(tuple(plgpu.ACC.init(acc) for acc in accs))
            plgpu.barrier_arrive(smem.spent.at[slot])
            return State(accs, top, total), count + 1

        rows = (ROWS,)
        accs = tuple(mosaic.filled((ROWS, plan.part), 0.0) for _ in range(plan.each))
        state = State(accs, mosaic.filled(rows, -jnp.inf), mosaic.filled(rows, 0.0))
        state, count = lax.fori_loop(piece.tile, piece.end, one_tile, (state, count))
        _finish(plan, smem, results, (piece, state), (cta, wg))
        return count

    _pieces(plan, smem, cta, one_piece)


def _meet(smem: Smem) -> None:
    plgpu.barrier_arrive(smem.met)
    plgpu.barrier_wait(smem.met)


def _finish(plan: LatentPlan, smem: Smem, results: Any, done: tuple, where: tuple) -> None:
    """The result, where the block had all keys. Else a part to global memory; the last block makes
    the result of all.
    """
    (piece, state), (cta, wg) = done, where
    place = place_of(plan, cta)
    share = scheduler.share_of(plan.line, smem.table, place.cta)
    count, *others = scheduler.parts_of(plan.line, share, piece, place.cta)
    mine, first, later = (slot * plan.beside + place.which for slot in others)
    slots = mla_combine.Slots(count, mine, first, later, plan.slots_a_block)
    lost = smem.table.lost[piece.m]
    total = state.total + mosaic.broadcast_scalar(jnp.where(lost == 1, jnp.nan, 0.0), (ROWS,))

    @pl.when(count == 1)
    def _():
        factor = _factor(plan, results, piece, wg, (state.top, total))
        for n, acc in enumerate(state.accs):
            _write(plan, results, piece, wg, (n, acc, factor))

    @pl.when(count > 1)
    def _():
        for n, acc in enumerate(state.accs):
            mla_combine.leave(results.parts, plan.tile_of(mine, wg, n), acc)

        @pl.when(wg == 0)
        def _():
            mosaic.store(results.tops.at[mine], state.top)
            mosaic.store(results.totals.at[mine], total)

        _meet(smem)

        @pl.when(wg == 0)
        def _():
            at = combine.Where(piece.m, piece.head, lost, count, mine, first, later)
            arrive = functools.partial(combine.arrive, plan=plan)
            each_thread(arrive, (results.counters, smem.last), at)

        _meet(smem)
        pl.when(smem.last[0] == 1)(lambda: _merge(plan, results, piece, wg, slots))
        _meet(smem)  # `last` is read


def _merge(plan: LatentPlan, results: Any, piece: Piece, wg: Scalar, slots: Any) -> None:
    layout, shape = mosaic.ROW, (ROWS, plan.part)
    top = mla_combine.highest(results.tops, slots, layout)
    total = mla_combine.total((results.tops, results.totals), slots, top, layout)
    factor = _factor(plan, results, piece, wg, (top, total))
    for n in range(plan.each):

        def weighed(slot, n=n):
            own = mla_combine.numbers(results.tops, slot, layout)
            weight = mosaic.broadcast_rows(jnp.exp2(own - base_of(top)), shape)
            tile = plan.tile_of(slot, wg, n)
            return (weight * mla_combine.fetched(results.parts, tile, shape),)

        zeros = (mosaic.filled(shape, 0.0),)
        (acc,) = mla_combine.added(zeros, slots, weighed)
        _write(plan, results, piece, wg, (n, acc, factor))


def _factor(plan: LatentPlan, results: Any, piece: Piece, wg: Scalar, whole: tuple) -> Array:
    """What all columns are to be multiplied by; and the log-sum-exp."""
    (top, total), chunk = whole, lax.rem(piece.head, jnp.int32(plan.chunks))
    at = pl.ds(chunk * ROWS, ROWS)
    sinks = None if results.sinks is None else mosaic.load(results.sinks.at[at], mosaic.ROW)
    factor, lse = softmax.finish(top, total, sinks)
    line = piece.m * plan.chunks + chunk
    pl.when(wg == 0)(lambda: mosaic.store(results.lse.at[line], lse))
    return factor


def _write(plan: LatentPlan, results: Any, piece: Piece, wg: Scalar, some: tuple) -> None:
    """Some columns of the output, by the warps that have rows of it."""
    n, acc, factor = some
    line = piece.m * plan.chunks + lax.rem(piece.head, jnp.int32(plan.chunks))
    row = mosaic.positions((ROWS,), 0, 0)
    wanted = warp_vote.any_in_warp((plan.most_rows - row).astype(jnp.float32), 0.0)
    out = (acc * mosaic.broadcast_rows(factor, acc.shape)).astype(plan.problem.dtype)
    to = pl.ds(line * ROWS, ROWS), pl.ds(wg * plan.half + n * plan.part, plan.part)
    pl.when(wanted != 0)(lambda: mosaic.store(results.out.at[to], out))


def _kernel(refs: Refs, results: Any, out: Ref, lse: Ref, parts: Any, smem: Smem, *, plan) -> None:  # noqa: PLR0913
    cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
    results = combine.Results(out, lse, *parts, *results)

    @pl.when(wg == LOADING)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        mla_producer.lay_out(plan, refs, smem.table)
        plgpu.barrier_arrive(smem.laid)
        _load(plan, refs, smem, cta)

    @pl.when(wg == SCORING)
    def _():
        plgpu.set_max_registers(168, action="increase")
        plgpu.barrier_wait(smem.laid)
        _score(plan, smem, cta)

    @pl.when(wg < COMPUTING)
    def _():
        plgpu.set_max_registers(160, action="increase")
        plgpu.barrier_wait(smem.laid)
        _weigh(plan, smem, results, cta, wg)


# ---- the call ------------------------------------------------------------------------------------


def run(inputs: DecodeInputs, problem: DecodeProblem, config: Config) -> tuple[Array, Array]:
    """out [M, t, N, Hv] in q's dtype, log-sum-exp float32 [M, N, t]."""
    if scheduler.has_no_rows(problem):
        return combine.of_no_rows(inputs, problem)
    launch = sm90_few_rows.launch if _few(problem) else _launch
    return launch(inputs, combine.counters(_plan_of(problem, config)), problem, config)


@functools.partial(jax.jit, static_argnames=("problem", "config"))
def _launch(
    inputs: DecodeInputs, counters: Array, problem: DecodeProblem, config: Config
) -> tuple[Array, Array]:
    """Jitted, so that a model of many layers traces it once."""
    plan = LatentPlan(problem, config)
    refs = mla_producer.refs_of(inputs, plan.layout, plan.padded)
    sinks = mla_producer.sinks_of(inputs, plan.chunks * ROWS)
    lines = problem.sequences * plan.chunks
    of, kept = jax.ShapeDtypeStruct, plan.tile_of(plan.slots, 0, 0)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=(
            of((lines * ROWS, problem.v_head_dim), problem.dtype),
            of((lines, ROWS), jnp.float32),
            (
                of((kept, ROWS * plan.part), jnp.float32),
                of((plan.slots, ROWS), jnp.float32),
                of((plan.slots, ROWS), jnp.float32),
            ),
        ),
        scratch_types=(scratch(plan),),
        grid=(plan.ctas,),
        grid_names=("cta",),
        num_threads=COMPUTING + 2,
        thread_name="wg",
        compiler_params=mla_producer.COMPILER,
        kernel_name="decode_latent_sm90",
    )
    out, lse, _ = kernel(refs, (counters, sinks))
    shape = (problem.sequences, problem.q_len, problem.q_heads)
    out = out.reshape(problem.sequences, plan.chunks * ROWS, -1)[:, : plan.rows]
    lse = lse.reshape(problem.sequences, -1)[:, : plan.rows].reshape(shape).swapaxes(1, 2)
    return out.reshape(*shape, -1), lse
