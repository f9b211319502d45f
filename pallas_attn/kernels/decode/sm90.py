"""Decode attention for Hopper: t query rows a sequence over its cache, each live key read once.

The G query heads of a kv head and their t rows are packed into the 16 rows of a tensor core's
matrix (32 or 64 where they are more), as flash-decoding does (Dao et al., 2023). Work is dealt by
live keys, not by sequences (`scheduler`), to blocks that stay: one warpgroup each, whose 4 warps
share out the keys of a tile and keep an online softmax of their own. Parts of a row are merged in
shared memory, and between blocks by the last to arrive (`combine`): one launch.

All three caches are read alike: by bulk copies from plain pointers, one a tile, or one a page of
it (`producer`). There is no tensor map, which separate arrays would need one each of, and rows
lie in shared memory as in the cache; `warps` says how tensor cores read them so. Only where rows
begin differs between caches (`_source`): in the sequence's own array, in the one array, or a page.

The ring has `stages` slots. A slot's barrier completes when the bytes announced for it are there;
the block meets once a tile, after which the slot of the tile before is filled anew. Nobody else
touches a slot, so there is no other barrier.
"""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn import _gpus
from pallas_attn._problem import DecodeInputs, DecodeProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import tma_operands
from pallas_attn.kernels.decode import combine, mainloop, producer, scheduler
from pallas_attn.kernels.decode.producer import Refs, Smem
from pallas_attn.kernels.decode.scheduler import Piece, Plan, Share, Table
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.config import check
from pallas_attn.kernels.mma import mma_rowmajor, mma_sync, mma_tf32

Array = Any
Ref = Any
Scalar = Any

SMEM_OF_TWO = 233_472 // 2 - 1024  # of each of two blocks on a multiprocessor
MULTIPROCESSORS = _gpus.multiprocessors(_gpus.HOPPER)
TURN = 48 * 1024  # bytes that a block could read while it turns to another head
TURN_OF_TWO = 16 * 1024  # of two blocks on a multiprocessor
LONG = 2048  # keys of a block, from which on it is the stream that counts


@dataclasses.dataclass(frozen=True)
class Config:
    """`tile`: keys of a tile; 32 of float32 only. `stages`: tiles of K and V in the ring. `ctas`:
    blocks that stay. `fixed`: tiles of a part where `batch_invariant` is asked for. `many`: blocks
    have several heads each, and what a single one would only be slower with: queries are asked for
    a head ahead, scores of few rows are folded, and keys are dealt finely (`scheduler`), a head
    as `turn` keys more than it has: what a block could read while it turns to it. `eager`: the next
    tile is asked for before the wait for this one, not under its matmuls: for long streams.
    `abreast`: kv heads of a page that a block takes at once (1, 2 or 4); `tile` counts all theirs.
    """

    tile: int = 64
    stages: int = 6
    ctas: int = MULTIPROCESSORS
    fixed: int = 16
    overlaps: bool = False  # begins while the kernel before it ends: `mosaic.overlap_launches`
    many: bool = False
    turn: int = 0
    eager: bool = False
    abreast: int = 1
    bulk, least = True, 2  # copies of whole tiles; the least stages; see `decode_sm80`
    rows = 4 * mma_rowmajor.ROWS  # of queries, that a block takes at once, at most

    def __post_init__(self):
        check(
            self,
            tile=(self.tile in (32, 64, 128, 256), "32, 64, 128 or 256"),
            stages=(self.stages >= self.least, f"at least {self.least}"),
            ctas=(self.ctas >= 1, "at least 1"),
            fixed=(self.fixed >= 1, "at least 1"),
            abreast=(self.abreast in (1, 2, 4), "1, 2 or 4"),
            turn=(self.turn % scheduler.GRAIN == 0 <= self.turn, "a multiple of 16"),
        )

    @classmethod
    def default(cls, problem: DecodeProblem) -> "Config":
        """What serves a problem that nobody tuned: as many bytes in flight as there is room for.

        A tile of twice the keys costs a block less than two, where it gets a few. Where the heads
        can be shared out evenly over all multiprocessors but a few, these stay idle: there is
        nothing to merge.
        Keys of 8 bits keep a warp busy for longer than their bytes take to come, and heads end
        often where they are many and short: of two blocks one computes while the other waits.
        """
        return _side_by_side(problem, cls._of_single_heads(problem))

    @classmethod
    def _of_single_heads(cls, problem: DecodeProblem) -> "Config":
        plan = Plan(problem, cls())
        heads = problem.sequences * plan.heads
        keys = max(problem.capacities) * heads
        if problem.quantized and keys >= 2 * MULTIPROCESSORS * 8 * 128:
            for tile in (128, 64):
                config = cls(tile=tile, stages=2, ctas=_even_pairs(heads), eager=True)
                if smem_bytes(problem, config) <= SMEM_OF_TWO:
                    return scheduler.deepest(smem_bytes, problem, config, SMEM_OF_TWO)
        if (two := _of_two(plan, heads, keys)) is not None:
            return two
        even = [n for n in range(MULTIPROCESSORS, MULTIPROCESSORS - 9, -1) if heads % n == 0]
        most = MULTIPROCESSORS // heads * heads
        even += [most] if most > MULTIPROCESSORS - 9 else []
        ctas = even[0] if even else MULTIPROCESSORS
        row = plan.itemsize * (problem.head_dim + problem.v_head_dim) + 8 * problem.quantized
        narrow = problem.head_dim + problem.v_head_dim <= 256  # else it takes too many registers
        many = heads >= ctas and narrow and not problem.quantized and not plan.wide
        turn = TURN // row // scheduler.GRAIN * scheduler.GRAIN if many else 0
        eager = keys >= LONG * ctas and not plan.wide
        tile, most_bytes = 64, 2**16 if plan.row_blocks == 1 else 0
        share = 4 if problem.quantized or plan.wide else 2
        most = min(scheduler.widest(problem), keys // ctas // share, most_bytes // row)
        while 2 * tile <= most:
            tile *= 2
        choices, room = [], scheduler.SMEM_LIMIT
        while tile >= (32 if plan.wide else 64):
            one = cls(tile=tile, stages=2, ctas=ctas, many=many, turn=turn, eager=eager)
            choices.append(scheduler.deepest(smem_bytes, problem, one, room))
            tile //= 2
        # 8 keys a warp, of tiles of 32, are few to hide latency behind: two larger ones are faster.
        least = 2 if plan.wide and plan.row_blocks == 1 else 3
        enough = (
            one for one in choices if one.stages >= least and smem_bytes(problem, one) <= room
        )
        return next(enough, choices[-1])


def _of_two(plan: Plan, heads: int, keys: int) -> Config | None:
    """Two blocks a multiprocessor for 16-bit numbers: where each has several heads, which are not
    so long that turning to them is nothing, of rows not so narrow that tiles would have many keys.
    """
    problem = plan.problem
    row = 2 * (problem.head_dim + problem.v_head_dim)
    fits = plan.row_blocks == 1 and not plan.wide and not problem.quantized
    fits = fits and 2**14 < 64 * row <= 2**15 and LONG * MULTIPROCESSORS <= keys <= 5 * 2**19
    if not fits or heads < 256:
        return None
    ctas = _even_pairs(heads)
    turn = TURN_OF_TWO // row // scheduler.GRAIN * scheduler.GRAIN
    config = Config(tile=64, stages=2, ctas=ctas, many=True, turn=turn, eager=True)
    return config if smem_bytes(problem, config) <= SMEM_OF_TWO else None


def _even_pairs(heads: int) -> int:
    """Blocks, two a multiprocessor, that share the heads out evenly if that leaves few idle."""
    most = 2 * MULTIPROCESSORS
    return next((n for n in range(most, most - 17, -1) if heads % n == 0), most)


def _side_by_side(problem: DecodeProblem, config: Config) -> Config:
    """The same, with several heads of a page at once where it is faster: blocks still have whole
    ones if all sequences are full, and heads are long: else there is more to merge.
    """
    choices = (4, 2) if problem.quantized else (4,) if config.many else ()
    for heads in choices if max(problem.capacities) >= 2 * LONG else ():
        wider = dataclasses.replace(config, abreast=heads)
        if problem.sequences * problem.kv_heads // heads % config.ctas == 0:
            with contextlib.suppress(ValueError):
                return Plan(problem, wider).config
    return config


def limit(problem: DecodeProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    if (refused := scheduler.dtype_limit(problem)) is not None:
        return refused
    if problem.quantized and (refused := producer.narrow_limit(problem)) is not None:
        return refused
    wide = problem.dtype == "float32"
    if wide and problem.quantized:
        return Limit(
            "float32 queries over a quantised cache; it takes bfloat16 and float16",
            "cast q to one of them",
        )
    if (refused := tma_operands.dims_limit(problem) or scheduler.size_limit(problem)) is not None:
        return refused
    if wide and smem_bytes(problem, Config.default(problem)) > scheduler.SMEM_LIMIT:
        return Limit(
            f"such rows do not fit in shared memory beside {problem.sequences} lengths",
            "decode fewer tokens at once, or split the sequences over several calls",
        )
    return None


def scratch(plan: Plan) -> Smem:
    """Shared memory, described once: `run` launches it, `smem_bytes` adds it up."""
    problem, config = plan.problem, plan.config
    dtype = jnp.dtype(problem.cache_dtype)

    def ring(dim):
        return plgpu.SMEM((config.stages, config.tile, dim), dtype)

    def numbers(count, dtype=jnp.int32):
        return plgpu.SMEM((count,), dtype)

    scales = None
    if problem.quantized:
        scales = plgpu.SMEM((config.stages, config.tile), jnp.float32)
    rows = threads.WARPS * plan.spilled_rows
    out = plgpu.SMEM((rows, problem.v_head_dim + mma_rowmajor.ROW_PADDING), jnp.float32)
    queries = mma_tf32.queries_shape(problem.head_dim, plan.most_rows)
    return Smem(
        k=ring(problem.head_dim),
        v=ring(problem.v_head_dim),
        spilled=combine.Spilled(out, numbers(rows, jnp.float32), numbers(rows, jnp.float32)),
        table=Table(numbers(plan.sums), numbers(plan.sums), numbers(plan.sums)),
        barriers=plgpu.SMEM((config.stages, 2), jnp.int32),
        last=numbers(1),
        q=plgpu.SMEM(queries, jnp.float32) if plan.wide else None,
        **dict.fromkeys(("k_scale", "v_scale"), scales),
    )


def smem_bytes(problem: DecodeProblem, config: Config) -> int:
    return scheduler.RESERVED + mosaic.bytes_of(scratch(Plan(problem, config)))


# ---- computing -----------------------------------------------------------------------------------


def _begin(plan: Plan, refs: Refs, smem: Smem, look: Any, start: tuple[Piece, Share]) -> Any:
    """Asks for tiles until all slots but one are taken; where loading stands then: a piece, and
    where pages are looked up sooner, the tile after.
    """
    (first, share), stages = start, plan.config.stages
    most = (share.end - share.first) * plan.unit if plan.bulk else stages
    count = jnp.minimum(stages - 1, most)
    ask = functools.partial(producer.ask, plan, refs, smem)
    if not plan.layout.paged or not plan.bulk:
        return lax.fori_loop(0, count, lambda slot, piece: ask(look((piece, slot))), first)

    def asked(slot, ahead):
        piece, _ = ahead
        after = piece._replace(tile=jnp.minimum(piece.tile + 1, piece.end))
        later = look((after, slot + 1))  # its pages are on their way while this one's are awaited
        ask(ahead)
        return later

    ahead = lax.fori_loop(0, count, asked, look((first, jnp.int32(0))))
    return ahead if plan.sooner else ahead[0]


def _compute(plan: Plan, refs: Refs, smem: Smem, results: Any, share: Share, cta: Scalar) -> None:
    """All pieces of a block, and the loading that runs ahead of them."""
    stages = plan.config.stages
    m = scheduler.sequence_of(plan, smem.table, share.first)
    if plan.grains > 1:
        share = share._replace(first=scheduler.begin_of(plan, smem.table, share, m))
    first = scheduler.piece_at(plan, smem.table, share, share.first, m)
    sync, wait = (functools.partial(f, plan=plan) for f in (producer.sync, producer.wait))
    look = functools.partial(producer.next_tile, plan, refs, smem, share)
    ahead = _begin(plan, refs, smem, look, (first, share))
    soon = plan.config.many and not plan.wide

    def queries_at(unit, m):
        unit = jnp.minimum(unit, share.end - 1)
        piece = scheduler.piece_at(plan, smem.table, share, unit, m)
        return _queries(plan, refs, smem, piece)

    def one_piece(carry):
        unit, m, count, ahead, queries = carry
        piece = scheduler.piece_at(plan, smem.table, share, unit, m)
        parts = scheduler.parts_of(plan, share, piece, cta)
        own = queries if soon else _queries(plan, refs, smem, piece)
        producer.check_skipped_pages(plan, refs, smem.table, piece)
        state = mainloop.nothing(plan)

        def one_tile(tile, carry):
            state, count, ahead = carry
            slot = lax.rem(count, jnp.int32(stages))
            parity = lax.rem(lax.div(count, jnp.int32(stages)), jnp.int32(2))
            threads.each_thread(sync, (), ())
            before = jnp.where(slot == 0, stages - 1, slot - 1)

            def asked(following):
                ahead = producer.ask(plan, refs, smem, following)
                return look((ahead, slot)) if plan.sooner else ahead

            following = ahead if plan.sooner else look((ahead, before))
            if plan.eager:
                ahead = asked(following)
            threads.each_thread(wait, smem.barriers, (slot, parity))
            s = mainloop.scores(plan, smem, own, slot)
            if not plan.eager:  # while the matmuls are under way
                ahead = asked(following)
            state = mainloop.attend(plan, smem, piece, (tile, slot), (s, state))
            return state, count + 1, ahead

        state, count, ahead = lax.fori_loop(piece.tile, piece.end, one_tile, (state, count, ahead))
        # The next ones are on their way while this piece's parts become one.
        queries = queries_at(piece.following, piece.m) if soon else None
        _finish(plan, smem, results, (piece, state), parts)
        return piece.following, piece.m, count, ahead, queries

    queries = queries_at(share.first, m) if soon else None
    start = (share.first, m, jnp.int32(0), ahead, queries)
    lax.while_loop(lambda carry: carry[0] < share.end, one_piece, start)


def _queries(plan: Plan, refs: Refs, smem: Smem, piece: Piece) -> tuple[Any, Array | None]:
    """The query rows, and what their scores are to be multiplied by, if anything.

    Those in shared memory are written when all have met after the last piece, and read when all
    have met before a tile.
    """
    problem = plan.problem
    stride = (problem.q_heads, plan.group, problem.head_dim)
    place = (refs.q, scheduler.first_query(plan, piece), plan.rows, plan.split, stride)
    if problem.quantized:
        return mma_rowmajor.float16_queries(*place)
    if plan.wide:
        mma_tf32.store_queries(place, smem.q)
        return smem.q, None
    return mma_rowmajor.queries(*place), None


def _finish(plan: Plan, smem: Smem, results: Any, done: tuple, parts: scheduler.Parts) -> None:
    piece, state = done
    at = combine.Where(piece.m, piece.head, smem.table.lost[piece.m], *parts)
    total, acc = state.total.sum(axis=1), state.acc
    if plan.folded:
        total = mma_sync.reduce_folded(total, "sum")
    if state.peak is not None:
        none = state.peak == -jnp.inf
        unit = jnp.where(none, 0.0, jnp.exp2(state.peak - jnp.where(none, 0.0, state.top)))
        acc = acc * mosaic.broadcast_rows(unit, acc.shape)
    mma_rowmajor.store_accumulators(acc, state.top, total, smem.spilled, plan.spilled_rows)

    @pl.when(parts.count == 1)
    def _():
        program = functools.partial(combine.whole, plan=plan)
        threads.each_thread(program, (smem.spilled, results), at)

    @pl.when(parts.count > 1)
    def _():
        program = functools.partial(combine.publish, plan=plan)
        threads.each_thread(program, (smem.spilled, results, smem.last), at)

        @pl.when(smem.last[0] == 1)
        def _():
            program = functools.partial(combine.merge, plan=plan)
            threads.each_thread(program, results, at)


def _start(thread: threads.Thread, refs: Any, usable: Any, plan: Plan) -> None:
    given, smem = refs
    barriers = functools.partial(producer.make_barriers, thread, smem.barriers, plan)
    scheduler.lay_out(thread, (given, smem.table), usable, plan, barriers)


def _kernel(refs: Refs, out: Ref, lse: Ref, parts: Any, smem: Smem, *, plan: Plan) -> None:
    cta = lax.axis_index("cta")
    if plan.config.overlaps:
        mosaic.overlap_launches()
    usable = producer.usable(plan, refs.layer)
    threads.each_thread(functools.partial(_start, plan=plan), (refs.given, smem), usable)
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
    return _launch(inputs, combine.counters(Plan(problem, config)), problem, config)


@functools.partial(jax.jit, static_argnames=("problem", "config"))
def _launch(
    inputs: DecodeInputs, counters: Array, problem: DecodeProblem, config: Config
) -> tuple[Array, Array]:
    """Jitted, so that a model of many layers traces it once."""
    plan = Plan(problem, config)
    refs = producer.refs_of(inputs, counters, plan)
    of, rows = jax.ShapeDtypeStruct, (problem.sequences, problem.q_len, problem.q_heads)
    parts = (plan.slots, plan.chunk_rows)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=(
            of((*rows, problem.v_head_dim), problem.dtype),
            of((rows[0], rows[2], rows[1]), jnp.float32),
            (
                of((*parts, problem.v_head_dim), jnp.float32),
                of(parts, jnp.float32),
                of(parts, jnp.float32),
            ),
        ),
        scratch_types=(scratch(plan),),
        grid=(plan.ctas,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name="decode_sm90" if plan.bulk else "decode_sm80",
    )
    out, lse, _ = kernel(refs)
    return out, lse
