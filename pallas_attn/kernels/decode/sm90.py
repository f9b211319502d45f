"""Decode attention for Hopper: t query rows a sequence over its cache, each live key read once.

The G query heads of a kv head and their t rows are packed into the 16 rows of a tensor core's
matrix (32 or 64 where they are more), as flash-decoding does (Dao et al., 2023). Live keys, not
sequences, are shared out (`scheduler`) to persistent blocks of one warpgroup each, whose 4 warps
share out the keys of a tile and keep an online softmax of their own. Partials of a row are
combined in shared memory, and between blocks by the last to arrive (`combine_splits`): one launch.

All three caches are read alike: by bulk copies from plain pointers, one a kv tile, or one a page of
it (`producer`). There is no tensor map, which separate arrays would need one each of, and rows lie
in shared memory as in the cache; `mma_rowmajor` says how tensor cores read them so. Only where rows
begin differs between caches (`cache_layout`).

The ring has `stages` slots. A slot's barrier completes when the bytes announced for it are there.
The block's threads meet once a tile, after which the slot of the tile before is free and is filled
again. There is no producer warp, so there is no other barrier.
"""

import contextlib
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
from pallas_attn.kernels.attention import tma_operands
from pallas_attn.kernels.attention.plan import Context
from pallas_attn.kernels.decode import combine_splits, mainloop, producer, scheduler
from pallas_attn.kernels.decode.combine_splits import Results
from pallas_attn.kernels.decode.mainloop import Queries, State, TileAt
from pallas_attn.kernels.decode.producer import Phase, Position, Refs, Smem
from pallas_attn.kernels.decode.scheduler import Plan, Share, WorkTile
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.mosaic import ThreadContext
from pallas_attn.kernels.mma import mma_rowmajor, mma_sync, mma_tf32

Array = Any
Ref = Any
Scalar = Any

SMEM_OF_TWO = 233_472 // 2 - 1024  # of each of two blocks on a multiprocessor
MULTIPROCESSORS = gpu_specs.multiprocessors(gpu_specs.HOPPER)
HEAD_OVERHEAD = 48 * 1024  # bytes that a block could read while it begins a head
HEAD_OVERHEAD_OF_TWO = 16 * 1024  # of two blocks on a multiprocessor
LONG = 2048  # keys of a block, from which on memory bandwidth counts more than latency


@dataclasses.dataclass(frozen=True)
class Config:
    """`tile`: keys of a kv tile; 32 of float32 only. `stages`: tiles of K and V in the ring.
    `grid`: persistent blocks. `split_tiles`: kv tiles of a split where `batch_invariant` is asked
    for. `many_heads`: blocks have several heads each, and do what would slow down a block with one:
    queries are loaded a head ahead, scores of few rows are folded, and keys are shared out in units
    finer than tiles (`scheduler`), a head as `head_overhead` keys more than it has: what a block
    could read while it begins a head. `load_first`: the load of the next tile begins before the
    wait for this one, not under its matmuls: where blocks read many keys. `heads_at_once`: kv heads
    of a page that a block takes at once (1, 2 or 4); `tile` counts the keys of all of them.
    """

    tile: int = 64
    stages: int = 6
    grid: int = MULTIPROCESSORS
    split_tiles: int = 16
    overlaps: bool = False  # begins while the kernel before it ends: `mosaic.overlap_launches`
    many_heads: bool = False
    head_overhead: int = 0
    load_first: bool = False
    heads_at_once: int = 1
    bulk, fewest_stages = True, 2  # tiles come by bulk copies; see `decode.sm80`
    q_rows = 4 * mma_rowmajor.ROWS  # that a block takes at once, at most

    def __post_init__(self):
        scheduler.check_config(
            self,
            tile=(self.tile in (32, 64, 128, 256), "32, 64, 128 or 256"),
            heads_at_once=(self.heads_at_once in (1, 2, 4), "1, 2 or 4"),
            head_overhead=(
                self.head_overhead % scheduler.FINE_UNIT == 0 <= self.head_overhead,
                "a multiple of 16",
            ),
        )

    @classmethod
    def default(cls, problem: DecodeProblem) -> "Config":
        """What serves a problem that nobody tuned: as many bytes in flight as there is room for.

        A tile of twice the keys costs a block less than two tiles, where it gets a few. Where the
        heads can be shared out evenly over all multiprocessors but a few, these stay idle: there is
        nothing to combine.
        Keys of 8 bits keep a warp busy for longer than their bytes take to come, and heads end
        often where they are many and short: of two blocks one computes while the other waits.
        """
        return _with_heads_at_once(problem, cls._of_single_heads(problem))

    @classmethod
    def beside_others(cls, problem: DecodeProblem, warpgroups: int, room: int) -> "Config | None":
        """The same where a multiprocessor has one block, so many warpgroups of which decode, each
        as a block of its own, with `room` bytes of shared memory for all. None: they do not fit.
        """
        plan, room = Plan(problem, cls()), room // warpgroups
        config: Config | None
        if warpgroups == 1:
            config = cls._of_single_heads(problem, room)
        elif (config := _two_blocks(plan, problem.sequences * plan.heads)) is not None:
            config = scheduler.deepest(smem_bytes, problem, config, room)
        if config is None or smem_bytes(problem, config) > room:
            return None
        return _with_heads_at_once(problem, config)

    @classmethod
    def _of_single_heads(cls, problem: DecodeProblem, alone: int | None = None) -> "Config":
        """`alone`: of a block that has its multiprocessor alone, its shared memory."""
        plan = Plan(problem, cls())
        heads = problem.sequences * plan.heads
        keys = max(problem.capacities) * heads
        if problem.quantized and keys >= 2 * MULTIPROCESSORS * 8 * 128:
            for tile in (128, 64):
                config = cls(tile=tile, stages=2, grid=_even_pairs(heads), load_first=True)
                if smem_bytes(problem, config) <= SMEM_OF_TWO:
                    return scheduler.deepest(smem_bytes, problem, config, SMEM_OF_TWO)
        some_keys = alone is None and LONG * MULTIPROCESSORS <= keys <= 5 * 2**19
        if some_keys and (two := _two_blocks(plan, heads)) is not None:
            return two
        even = [n for n in range(MULTIPROCESSORS, MULTIPROCESSORS - 9, -1) if heads % n == 0]
        most = MULTIPROCESSORS // heads * heads
        even += [most] if most > MULTIPROCESSORS - 9 else []
        grid = even[0] if even else MULTIPROCESSORS
        row = plan.itemsize * (problem.head_dim + problem.v_head_dim) + 8 * problem.quantized
        narrow = problem.head_dim + problem.v_head_dim <= 256  # else it takes too many registers
        many_heads = heads >= grid and narrow and not problem.quantized and not plan.is_float32
        overhead = _whole_units(HEAD_OVERHEAD // row) if many_heads else 0
        load_first = keys >= LONG * grid and not plan.is_float32
        tile, most_bytes = 64, 2**16 if plan.row_blocks == 1 else 0
        share = 4 if problem.quantized or plan.is_float32 else 2
        most = min(scheduler.widest_tile(problem), keys // grid // share, most_bytes // row)
        while 2 * tile <= most:
            tile *= 2
        choices, room = [], alone or scheduler.SMEM_LIMIT
        while tile >= (32 if plan.is_float32 else 64):
            one = cls(
                tile=tile,
                stages=2,
                grid=grid,
                many_heads=many_heads,
                head_overhead=overhead,
                load_first=load_first,
            )
            choices.append(scheduler.deepest(smem_bytes, problem, one, room))
            tile //= 2
        # 8 keys a warp, of tiles of 32, are few to hide latency behind: two larger ones are faster.
        least = 2 if plan.is_float32 and plan.row_blocks == 1 else 3
        enough = (
            one for one in choices if one.stages >= least and smem_bytes(problem, one) <= room
        )
        return next(enough, choices[-1])


def _two_blocks(plan: Plan, heads: int) -> Config | None:
    """Two blocks a multiprocessor for 16-bit numbers: where each has several heads, of rows not so
    narrow that tiles would have many keys. Heads should not be so long that to begin one is
    nothing.
    """
    problem = plan.problem
    row = 2 * (problem.head_dim + problem.v_head_dim)
    fits = plan.row_blocks == 1 and not plan.is_float32 and not problem.quantized
    if not fits or heads < 256 or not 2**14 < 64 * row <= 2**15:
        return None
    grid = _even_pairs(heads)
    overhead = _whole_units(HEAD_OVERHEAD_OF_TWO // row)
    config = Config(
        tile=64,
        stages=2,
        grid=grid,
        many_heads=True,
        head_overhead=overhead,
        load_first=True,
    )
    return config if smem_bytes(problem, config) <= SMEM_OF_TWO else None


def _whole_units(keys: int) -> int:
    return keys // scheduler.FINE_UNIT * scheduler.FINE_UNIT


def _even_pairs(heads: int) -> int:
    """Blocks, two a multiprocessor, that share the heads out evenly if that leaves few idle."""
    most = 2 * MULTIPROCESSORS
    return next((n for n in range(most, most - 17, -1) if heads % n == 0), most)


def _with_heads_at_once(problem: DecodeProblem, config: Config) -> Config:
    """The same, with several heads of a page at once where it is faster: blocks still have whole
    ones if all sequences are full, and heads are long; else there is more to combine.
    """
    choices = (4, 2) if problem.quantized else (4,) if config.many_heads else ()
    for heads in choices if max(problem.capacities) >= 2 * LONG else ():
        wider = dataclasses.replace(config, heads_at_once=heads)
        if problem.sequences * problem.kv_heads // heads % config.grid == 0:
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
    rows = threads.WARPS * plan.warp_rows
    out = plgpu.SMEM((rows, problem.v_head_dim + mma_rowmajor.ROW_PADDING), jnp.float32)
    queries = mma_tf32.queries_shape(problem.head_dim, plan.most_rows)
    return Smem(
        k=ring(problem.head_dim),
        v=ring(problem.v_head_dim),
        warp_partials=combine_splits.WarpPartials(
            out, numbers(rows, jnp.float32), numbers(rows, jnp.float32)
        ),
        table=scheduler.table_scratch(plan),
        barriers=plgpu.SMEM((config.stages, 2), jnp.int32),
        last=numbers(1),
        q=plgpu.SMEM(queries, jnp.float32) if plan.is_float32 else None,
        **dict.fromkeys(("k_scale", "v_scale"), scales),
    )


def smem_bytes(problem: DecodeProblem, config: Config) -> int:
    return scheduler.smem_bytes(scratch(Plan(problem, config)))


# ---- computing -----------------------------------------------------------------------------------


class _Ahead(NamedTuple):
    """Where loading stands: the work tile, and where pages are looked up ahead also the kv tile
    that is next.
    """

    work: WorkTile
    tile: producer.Tile | None


def _prologue(ctx: Context, look: Callable, first: WorkTile, share: Share) -> _Ahead:
    """Loads tiles until all slots but one are taken. `look(position)` gives the next tile."""
    plan, stages = ctx.plan, ctx.plan.config.stages
    most = (share.end - share.first) * plan.tiles_a_unit if plan.bulk else stages
    count = jnp.minimum(stages - 1, most)
    load = functools.partial(producer.load, ctx)
    if not plan.layout.paged or not plan.bulk:
        one = lambda slot, work: load(look(Position(work, slot)))  # noqa: E731
        return _Ahead(lax.fori_loop(0, count, one, first), None)

    def loaded(slot, ahead):
        work, _ = ahead
        after = work._replace(tile=jnp.minimum(work.tile + 1, work.end))
        later = look(Position(after, slot + 1))  # its pages come while this one's are awaited
        load(ahead)
        return later

    ahead = lax.fori_loop(0, count, loaded, look(Position(first, jnp.int32(0))))
    return _Ahead(ahead.work, ahead.tile if plan.pages_ahead else None)


def _mainloop(ctx: Context, results: Results, share: Share, block_id: Scalar) -> None:
    """All work of a block, and the loads that run ahead of it."""
    plan, refs, smem = ctx
    stages = plan.config.stages
    m = scheduler.sequence_of(plan, smem.table, share.first)
    if plan.units_a_tile > 1:
        share = share._replace(first=scheduler.first_unit_of(plan, smem.table, share, m))
    first = scheduler.work_at(plan, smem.table, share, share.first, m)
    copied = None if plan.bulk or stages == 1 else stages - 2
    sync = mosaic.in_context(producer.meet, plan, left=copied)
    wait = mosaic.in_context(producer.wait, plan)
    look = functools.partial(producer.next_tile, ctx, share)
    ahead = _prologue(ctx, look, first, share)
    queries_ahead = plan.config.many_heads and not plan.is_float32

    def queries_at(unit, m):
        unit = jnp.minimum(unit, share.end - 1)
        return _queries(ctx, scheduler.work_at(plan, smem.table, share, unit, m))

    def one_work(carry):
        unit, m, count, ahead, queries = carry
        work = scheduler.work_at(plan, smem.table, share, unit, m)
        partials = scheduler.partials_of(plan, share, work, block_id)
        own = queries if queries_ahead else _queries(ctx, work)
        producer.check_skipped_pages(ctx, work)
        state = mainloop.initial(plan)

        def one_tile(tile, carry):
            state, count, ahead = carry
            slot = lax.rem(count, jnp.int32(stages))
            parity = lax.rem(lax.div(count, jnp.int32(stages)), jnp.int32(2))
            threads.each_thread(sync, (), ())
            before = jnp.where(slot == 0, stages - 1, slot - 1)

            def loaded(following):
                work = producer.load(ctx, following)
                return (
                    _Ahead(*look(Position(work, slot))) if plan.pages_ahead else _Ahead(work, None)
                )

            following = ahead if plan.pages_ahead else look(Position(ahead.work, before))
            if plan.load_first:
                ahead = loaded(following)
            threads.each_thread(wait, smem.barriers, Phase(slot, parity))
            s = mainloop.scores(ctx, own, slot)
            if not plan.load_first:  # while the matmuls are under way
                ahead = loaded(following)
            state = mainloop.attend(ctx, work, TileAt(tile, slot), s, state)
            return state, count + 1, ahead

        state, count, ahead = lax.fori_loop(work.tile, work.end, one_tile, (state, count, ahead))
        # The next ones are on their way while the partials of this work tile are combined.
        queries = queries_at(work.next_unit, work.sequence) if queries_ahead else None
        _epilogue(ctx, results, work, state, partials)
        return work.next_unit, work.sequence, count, ahead, queries

    queries = queries_at(share.first, m) if queries_ahead else None
    start = (share.first, m, jnp.int32(0), ahead, queries)
    lax.while_loop(lambda carry: carry[0] < share.end, one_work, start)


def _queries(ctx: Context, work: WorkTile) -> Queries:
    """The query rows of a work.

    Those in shared memory are written when all threads have met after the last work, and read when
    all have met before a tile.
    """
    plan, problem = ctx.plan, ctx.plan.problem
    first, sizes = scheduler.first_query(plan, work), (problem.q_heads, plan.group)
    last = None if problem.tokens is None else problem.tokens * problem.q_heads - 1
    rows = mma_rowmajor.Queries(ctx.refs.q, *first, plan.rows, *sizes, problem.head_dim, last)
    if problem.quantized:
        return Queries(*mma_rowmajor.float16_queries(rows, plan.split))
    if plan.is_float32:
        mma_tf32.store_queries(rows, plan.split, ctx.smem.q)
        return Queries(ctx.smem.q, None)
    return Queries(mma_rowmajor.queries(rows, plan.split), None)


def _epilogue(
    ctx: Context, results: Results, work: WorkTile, state: State, partials: scheduler.Partials
) -> None:
    """The warps' partials -> the result, or a partial in global memory."""
    plan, smem = ctx.plan, ctx.smem
    lost = smem.table.lost[work.sequence]
    at = combine_splits.Head(work.sequence, work.head, lost, *partials, work.queries, work.row)
    row_sum, acc = state.row_sum.sum(axis=1), state.acc
    if plan.folded:
        row_sum = mma_sync.reduce_folded(row_sum, "sum")
    if state.weight_max is not None:
        none = state.weight_max == -jnp.inf
        unit = jnp.exp2(state.weight_max - jnp.where(none, 0.0, state.row_max))
        acc = acc * mosaic.broadcast_rows(jnp.where(none, 0.0, unit), acc.shape)
    mma_rowmajor.store_accumulators(acc, state.row_max, row_sum, smem.warp_partials, plan.warp_rows)
    refs = combine_splits.ResultRefs(smem.warp_partials, results, smem.last)

    @pl.when(partials.count == 1)
    def _():
        threads.each_thread(mosaic.in_context(combine_splits.write_result, plan), refs, at)

    @pl.when(partials.count > 1)
    def _():
        threads.each_thread(mosaic.in_context(combine_splits.write_partial, plan), refs, at)

        @pl.when(smem.last[0] == 1)
        def _():
            threads.each_thread(mosaic.in_context(combine_splits.combine, plan), results, at)


class _StartRefs(NamedTuple):
    given: scheduler.Lengths
    smem: Smem


def _start(ctx: ThreadContext) -> None:
    given, smem = ctx.refs
    barriers = functools.partial(producer.make_barriers, ctx.thread, smem.barriers, ctx.plan)
    scheduler.fill_table(ctx._replace(refs=scheduler.TableRefs(given, smem.table)), barriers)


def _kernel(
    refs: Refs, out: Ref, lse: Ref, partials: tuple[Ref, Ref, Ref], smem: Smem, *, plan: Plan
) -> None:
    block_id = lax.axis_index("block")
    if plan.config.overlaps:
        mosaic.overlap_launches()
    results = Results(out, lse, *partials, refs.counters, refs.sinks)
    decode_block(Context(plan, refs, smem), results, block_id)


def decode_block(ctx: Context, results: Results, block_id: Scalar, blocks: Any = None) -> None:
    """The work of one block, of `blocks` if that is not the grid, by its first warpgroup."""
    plan, refs, smem = ctx
    usable = producer.usable(plan, refs.layer)
    threads.each_thread(mosaic.in_context(_start, plan), _StartRefs(refs.given, smem), usable)
    share = scheduler.share_of(plan, smem.table, block_id, blocks)
    if (firsts := smem.table.rows) is not None and plan.problem.fewest == 1:
        program = mosaic.in_context(combine_splits.write_unowned, plan)
        ends = firsts[0], firsts[plan.problem.sequences]
        threads.each_thread(
            program, results, combine_splits.Owned(*ends, block_id, jnp.int32(plan.grid))
        )
    pl.when(share.first < share.end)(lambda: _mainloop(ctx, results, share, block_id))


# ---- the call ------------------------------------------------------------------------------------


def run(inputs: DecodeInputs, problem: DecodeProblem, config: Config) -> tuple[Array, Array]:
    """out [M, t, N, Hv] in q's dtype, log-sum-exp float32 [M, N, t]; of packed rows [tokens, N, Hv]
    and [N, tokens].
    """
    if scheduler.has_no_rows(problem):
        return combine_splits.of_no_rows(inputs, problem)
    if not problem.packed:
        return launch(inputs, problem, config)
    few, rest = scheduler.by_rows(problem)
    own = dataclasses.replace(_of_few(few, type(config)), overlaps=config.overlaps)
    results = launch(inputs, few, own)
    return results if rest is None else launch(inputs, rest, config, results)


def _of_few(few: DecodeProblem, kind: Any) -> Any:
    """The Config for sequences of few packed rows; of one alone where it may not depend on others.
    Fewer stages change no bits.
    """
    one = few
    if few.batch_invariant:
        one = dataclasses.replace(few, sequences=1, capacities=(8192,), batch_invariant=False)
    config, room = kind.default(one), gpu_specs.shared_memory(few.gpu)
    while smem_bytes(few, config) > room and config.stages > config.fewest_stages:
        config = dataclasses.replace(config, stages=config.stages - 1)
    return config


def launch(
    inputs: DecodeInputs, problem: DecodeProblem, config: Config, into: Any = None
) -> tuple[Array, Array]:
    """One launch. Of packed rows, those of sequences that the problem asks for, and 0 for rows that
    no sequence owns; anything for the rest, or what `into` has.
    """
    return _launch(inputs, combine_splits.counters(Plan(problem, config)), into, problem, config)


@functools.partial(jax.jit, static_argnames=("problem", "config"))
def _launch(
    inputs: DecodeInputs, counters: Array, into: Any, problem: DecodeProblem, config: Config
) -> tuple[Array, Array]:
    """Jitted, so that a model of many layers traces it once. `into`: results of other rows, where
    these go too.
    """
    plan = Plan(problem, config)
    refs = producer.refs_of(inputs, counters, plan)
    out_type = combine_splits.out_types(plan)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=out_type if into is None else out_type[2:],
        scratch_types=(scratch(plan),),
        grid=(plan.grid,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name="decode_sm90" if plan.bulk else "decode_sm80",
    )
    if into is None:
        out, lse, _ = kernel(refs)
        return out, lse
    out, lse = (jax.new_ref(x) for x in into)
    kernel(refs, out, lse)
    return jax.freeze(out), jax.freeze(lse)
