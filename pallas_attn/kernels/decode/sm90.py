"""Decode attention for Hopper: t query rows a sequence over its cache, each live key read once.

The G query heads of a kv head and their t rows are packed into the 16 rows of a tensor core's
matrix (32 or 64 where they are more), as flash-decoding does (Dao et al., 2023). Live keys, not
sequences, are shared out (`scheduler`) to persistent blocks of one warpgroup each, whose 4 warps
share out the keys of a tile and keep an online softmax of their own (`mainloop`). Partials of a row
are combined in shared memory, and between blocks by the last to arrive (`combine_splits`): one
launch.

All three caches are read alike: by bulk copies from plain pointers, one a kv tile, or one a page of
it (`loads`). There is no tensor map, which separate arrays would need one each of, and rows
lie in shared memory as in the cache; `mma_rowmajor` says how tensor cores read them so. Only where
rows begin differs between caches (`cache_layout`).

The ring has `stages` slots. A slot's barrier completes when the bytes announced for it are there.
The block's threads meet once a tile, after which the slot of the tile before is free and is filled
again. There is no producer warp, so there is no other barrier.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import gpu_specs, launches
from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import separate_caches, tma_operands
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.decode import (
    box_copies,
    combine_splits,
    limits,
    loads,
    mainloop,
    packed,
    quantized_mainloop,
    scheduler,
)
from pallas_attn.kernels.decode.combine_splits import Results
from pallas_attn.kernels.decode.loads import DecodeRefs, DecodeSmem, Phase
from pallas_attn.kernels.decode.mainloop import TileAt
from pallas_attn.kernels.decode.plan import (
    FINE_UNIT,
    Copies,
    DecodeTiling,
    Plan,
    check_tile,
    counters,
    is_wide,
    plan_with,
    query_rows,
    widest_tile,
)
from pallas_attn.kernels.decode.scheduler import Share, WorkTile
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.config import check
from pallas_attn.kernels.lang.mosaic import MULTIPROCESSORS
from pallas_attn.kernels.lang.types import GmemRef, Index, KernelConfig, Operand
from pallas_attn.kernels.mma import column_parts, mma_rowmajor, mma_tf32

SMEM_OF_TWO = 233_472 // 2 - 1024  # bytes of each of two blocks on a multiprocessor
HEAD_OVERHEAD = 48 * 1024  # bytes that a block could read while it begins a head
CACHES_OF_A_LAUNCH = 256  # separate ones; `append.separate_arrays` says why
Q_ROWS = 4 * mma_rowmajor.ROWS  # query rows that a block takes at once, at most
SHORT = 2048  # keys of a sequence up to which idle rows of its last tile count
LONG = 2048  # keys of a block, from which on memory bandwidth counts more than latency


@dataclasses.dataclass(frozen=True)
class Config(limits.RingConfig):
    """`tile`: keys of a kv tile; 32 only for float32 or head dims above 256, 16 only for the
    latter. `many_heads`: blocks have several heads each, and do what would slow down a block with
    one: queries are loaded a head ahead, scores of few rows are folded, and keys are shared out in
    units finer than tiles (`scheduler`), a head as `head_overhead` keys more than it has: as many
    as a block could read while it begins a head. `load_first`: the load of the next tile begins
    before the wait for this one, not under its matmuls: where blocks read many keys.
    """

    tile: int = 64
    overlaps: bool = False  # begins while the kernel before it ends: `mosaic.overlap_launches`
    many_heads: bool = False
    head_overhead: int = 0
    load_first: bool = False

    def __post_init__(self):
        super().__post_init__()
        overhead = self.head_overhead
        check(
            self,
            tile=(self.tile in (16, 32, 64, 128, 256), "16, 32, 64, 128 or 256"),
            head_overhead=(overhead % FINE_UNIT == 0 <= overhead, "a multiple of 16"),
        )

    @classmethod
    def default(cls, problem: DecodeProblem) -> "Config":
        """The most bytes in flight that there is room for.

        A tile of twice the keys costs a block less than two tiles, where it gets a few. Where the
        heads can be shared out evenly over all multiprocessors but a few, these stay idle: there is
        nothing to combine.
        """
        rows = query_rows(problem, Q_ROWS)
        heads = problem.sequences * problem.kv_heads * (1 if problem.packed else rows.chunks)
        keys = max(problem.capacities) * heads
        if problem.quantized and keys >= 2 * MULTIPROCESSORS * 8 * 128:
            # Keys of 8 bits keep a warp busy for longer than their bytes take to come: of two
            # blocks on a multiprocessor one computes while the other waits.
            widths = (128, 64, 32) if is_wide(problem) else (256, 128, 64)
            for tile in [tile for tile in widths if tile <= widest_tile(problem)]:
                config = cls(tile=tile, stages=2, grid=_even_pairs(heads), load_first=True)
                if bytes_of_launch(problem, config) <= SMEM_OF_TWO:
                    return limits.deepest(bytes_of_launch, problem, config, SMEM_OF_TWO)
        grid, is_float32 = _even_grid(heads), problem.dtype == "float32"
        dims = problem.head_dim + problem.v_head_dim
        row = jnp.dtype(problem.cache_dtype).itemsize * dims + 8 * problem.quantized
        # Wider rows than 256 take too many registers.
        many_heads = heads >= grid and dims <= 256 and not problem.quantized and not is_float32
        config = cls(
            grid=grid,
            many_heads=many_heads,
            head_overhead=HEAD_OVERHEAD // row // FINE_UNIT * FINE_UNIT if many_heads else 0,
            load_first=keys >= LONG * grid and not is_float32,
        )
        if many_heads and max(problem.capacities) <= SHORT:
            # Half of a head's last tile is idle. Six stages were 9 % slower than three.
            return dataclasses.replace(config, tile=64, stages=3)
        share = 4 if problem.quantized or is_float32 else 2
        few_rows = rows.row_blocks == 1
        most = min(widest_tile(problem), keys // grid // share, 2**16 // row if few_rows else 0)
        tiles = [tile for tile in (256, 128, 64, 32) if tile <= max(most, 64)]
        if is_wide(problem):
            tiles = [64, 32, 16] if few_rows else [32, 16]
        elif not is_float32:
            tiles = tiles[:-1]
        choices = [
            limits.deepest(
                bytes_of_launch, problem, dataclasses.replace(config, tile=tile), mosaic.SMEM_LIMIT
            )
            for tile in tiles
        ]
        # 8 keys a warp, of tiles of 32, are few to hide latency behind: two larger ones are faster,
        # and so are two tiles of 32 wide keys that several blocks of rows share.
        least = 2 if (is_float32 if few_rows else is_wide(problem)) else 3
        for config in choices:
            if config.stages >= least and bytes_of_launch(problem, config) <= mosaic.SMEM_LIMIT:
                return config
        return choices[-1]

    def plan(self, problem: DecodeProblem) -> Plan:
        return plan_of(problem, self)


def _even_grid(heads: int) -> int:
    """Blocks that share the heads out evenly if that leaves few multiprocessors idle."""
    few = range(MULTIPROCESSORS, MULTIPROCESSORS - 9, -1)
    even = [n for n in few if heads % n == 0]
    most = MULTIPROCESSORS // heads * heads
    even += [most] if most in few else []
    return even[0] if even else MULTIPROCESSORS


def _even_pairs(heads: int) -> int:
    """The same of two blocks a multiprocessor."""
    most = 2 * MULTIPROCESSORS
    return next((n for n in range(most, most - 17, -1) if heads % n == 0), most)


def limit(problem: DecodeProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    if problem.kind == "listed" and problem.quantized and not problem.unscaled:
        reason = "kv_indices over a quantised cache: it copies scales four at a time"
        return Limit(reason, "leave implementation=None")
    return limit_of_any_copies(problem)


def limit_of_any_copies(problem: DecodeProblem) -> Limit | None:
    """The limit that does not depend on how tiles come."""
    refused = limits.dtype_limit(problem)
    if refused is None and problem.quantized:
        refused = limits.quantized_limit(problem)
    return (
        refused
        or tma_operands.dims_limit(problem, tma_operands.WIDEST)
        or limits.size_limit(problem)
    )


@functools.lru_cache(maxsize=1024)
def plan_of(problem: DecodeProblem, config: Config) -> Plan:
    """The plan of one launch."""
    tiling = DecodeTiling(q_rows=Q_ROWS, **vars(config))
    plan = plan_for(problem, tiling, loads.COPIES, "decode_sm90")
    return dataclasses.replace(plan, copies=box_copies.COPIES) if box_copies.serves(plan) else plan


def plan_for(problem: DecodeProblem, tiling: DecodeTiling, copies: Copies, name: str) -> Plan:
    """The plan of this kernel with tiles that come so."""
    check_tile(problem, tiling.tile, copies.bulk)
    queries = query_rows(problem, tiling.q_rows)
    steps = quantized_mainloop.STEPS if problem.quantized else mainloop.STEPS
    return plan_with(
        problem, tiling, queries, copies=copies, steps=steps, scratch=scratch, name=name
    )


def scratch(plan: Plan) -> DecodeSmem:
    """Shared memory, described once: `run` launches it, `smem_bytes` adds it up."""
    problem, ring, queries = plan.problem, (plan.tiling.stages, plan.keys.tile), plan.queries
    split, dtype = plan.split, jnp.dtype(problem.cache_dtype)
    rows = threads.WARPS // split.parts * queries.warp_rows
    out = plgpu.SMEM((rows, problem.v_head_dim + mma_rowmajor.ROW_PADDING), jnp.float32)
    sums = plgpu.SMEM((rows,), jnp.float32)
    scales = plgpu.SMEM(ring, jnp.float32) if plan.scaled else None
    q = None
    if plan.is_float32:
        shape = mma_tf32.queries_shape(problem.head_dim, queries.most_rows, split.parts)
        q = plgpu.SMEM(shape, jnp.float32)
    joined, dims = plan.layout.joined, (problem.head_dim, problem.v_head_dim)
    return DecodeSmem(
        k=plgpu.SMEM((*ring, sum(dims) if joined else dims[0]), dtype),
        v=None if joined else plgpu.SMEM((*ring, dims[1]), dtype),
        warp_partials=combine_splits.WarpPartials(out, sums, sums),
        table=scheduler.table_scratch(plan),
        barriers=plgpu.SMEM((plan.tiling.stages, 2), jnp.int32),
        last=plgpu.SMEM((1,), jnp.int32),
        k_scale=scales,
        v_scale=scales,
        q=q,
        scores=plgpu.SMEM(column_parts.shape(split), jnp.float32) if split.parts > 1 else None,
    )


def bytes_of_launch(problem: DecodeProblem, config: KernelConfig) -> int:
    return limits.smem_bytes(config.plan(problem).buffers)


def smem_bytes(problem: DecodeProblem, config: KernelConfig) -> int:
    """Shared memory of the launch that needs most."""
    return max(bytes_of_launch(*each) for each in _launches_of(problem, config))


# ---- computing -----------------------------------------------------------------------------------


def _mainloop(ctx: KernelContext, results: Results, share: Share, block_id: Index) -> None:
    """All work of a block, and the loads that run ahead of it. Machine code depends on the order of
    these statements.
    """
    plan, table, steps = ctx.plan, ctx.smem.table, ctx.plan.steps
    share, m = scheduler.begin(plan, table, share)
    first = scheduler.work_at(plan, table, share, share.first, m)
    loading = loads.fill_ring(ctx, share, first)

    def queries_at(unit, m):
        unit = jnp.minimum(unit, share.end - 1)
        return steps.load_queries(ctx, scheduler.work_at(plan, table, share, unit, m))

    def one_work(carry):
        unit, m, count, loading, queries = carry
        work = scheduler.work_at(plan, table, share, unit, m)
        places = None
        if steps.places_first:
            places = scheduler.partials_of(plan, share, work, block_id)
        if not plan.queries_ahead:
            queries = steps.load_queries(ctx, work)
        if plan.skips_pages:
            loads.check_skipped_pages(ctx, work)
        one_tile = functools.partial(_one_tile, ctx, share, work, queries)
        carry = steps.initial(plan), count, loading
        state, count, loading = lax.fori_loop(work.tile, work.end, one_tile, carry)
        # The next ones are on their way while the partials of this work tile are combined.
        queries = queries_at(work.next_unit, work.sequence) if plan.queries_ahead else None
        if places is None:
            places = scheduler.partials_of(plan, share, work, block_id)
        steps.epilogue(ctx, results, work, state, places)
        return work.next_unit, work.sequence, count, loading, queries

    queries = queries_at(share.first, m) if plan.queries_ahead else None
    start = (share.first, m, jnp.int32(0), loading, queries)
    lax.while_loop(lambda carry: carry[0] < share.end, one_work, start)


def _one_tile(
    ctx: KernelContext,
    share: Share,
    work: WorkTile,
    queries: Any,
    tile: Index,
    carry: tuple[Any, ...],
) -> tuple[Any, ...]:
    """One kv tile; under it another is loaded, to the slot of the tile before."""
    (plan, _, smem), (state, count, loading) = ctx, carry
    copies, steps, stages = plan.copies, plan.steps, plan.tiling.stages
    slot = lax.rem(count, jnp.int32(stages))
    parity = lax.rem(lax.div(count, jnp.int32(stages)), jnp.int32(2))
    threads.run(copies.meet, plan, (), ())
    before = jnp.where(slot == 0, stages - 1, slot - 1)
    if loading.tile is None:
        loading = loads.next_tile(ctx, share, loading.work, before)
    if plan.load_first:
        loading = _load(ctx, share, loading, slot)
    if copies.bulk or stages == 1:  # else the tile is there since all have met
        threads.run(copies.wait, plan, smem.barriers, Phase(slot, parity))
    s = steps.scores(ctx, queries, slot)
    if not plan.load_first:  # while the matmuls are under way
        loading = _load(ctx, share, loading, slot)
    state = steps.attend(ctx, work, TileAt(tile, slot), s, state)
    return state, count + 1, loading


def _load(ctx: KernelContext, share: Share, target: loads.Loading, slot: Index) -> loads.Loading:
    """Issues the copies of a tile, and looks up the pages of the one after it, which is for `slot`,
    where they are looked up ahead.
    """
    work = loads.load(ctx, target)
    if ctx.plan.pages_ahead:
        return loads.next_tile(ctx, share, work, slot)
    return loads.Loading(work, None)


def _kernel(
    refs: DecodeRefs,
    out: GmemRef,
    lse: GmemRef,
    partials: combine_splits.PartialRefs,
    smem: DecodeSmem,
    *,
    plan: Plan,
) -> None:
    block_id = lax.axis_index("block")
    if plan.layout.joined:
        smem = smem._replace(v=smem.k)
    if plan.tiling.overlaps:
        mosaic.overlap_launches()
    results = Results(out, lse, *partials, refs.counters, refs.sinks)
    has_layer = loads.has_layer(plan, refs.layer)
    fill_table = functools.partial(scheduler.fill_table, meanwhile=plan.copies.make_barriers)
    table_refs = scheduler.TableRefs(refs.lengths, smem.table, smem.barriers)
    threads.run(fill_table, plan, table_refs, has_layer)
    share = scheduler.share_of(plan, smem.table, block_id)
    if smem.table.packed is not None:
        packed.begin(plan, smem.table.packed, results, block_id)
    ctx = KernelContext(plan, refs, smem)
    work = functools.partial(_mainloop, ctx, results, share, block_id)
    pl.when(share.first < share.end)(work)


# ---- the call ------------------------------------------------------------------------------------


def run(
    inputs: DecodeInputs, problem: DecodeProblem, config: KernelConfig
) -> tuple[Operand, Operand]:
    """out [M, t, N, Hv] in q's dtype, log-sum-exp float32 [M, N, t]; of packed rows [tokens, N, Hv]
    and [N, tokens].
    """
    if not problem.packed:
        some = launch if problem.sequences <= CACHES_OF_A_LAUNCH else _by_launches
        return some(inputs, problem, config)
    results = None
    for each in _launches_of(problem, config):
        results = launch(inputs, *each, results)
    assert results is not None
    return results


def _launches_of(
    problem: DecodeProblem, config: KernelConfig
) -> list[tuple[DecodeProblem, KernelConfig]]:
    """The problem and the Config of each launch."""
    if not problem.packed:
        return [(problem, config)]
    few, rest = launches.by_rows(problem)
    of_few = dataclasses.replace(_config_of_few(few, type(config)), overlaps=config.overlaps)
    return [(few, of_few)] if rest is None else [(few, of_few), (rest, config)]


def _by_launches(
    inputs: DecodeInputs, problem: DecodeProblem, config: KernelConfig
) -> tuple[Operand, Operand]:
    """One launch; over very many separate caches several."""
    some = separate_caches.groups(problem, CACHES_OF_A_LAUNCH)
    if len(some) == 1:
        return launch(inputs, problem, config)
    return separate_caches.joined(
        [
            launch(
                separate_caches.inputs_of(problem, inputs, group),
                separate_caches.problem_of(problem, group),
                config,
            )
            for group in some
        ]
    )


def _config_of_few(few: DecodeProblem, config_type: Any) -> Any:
    """The Config for sequences of few packed rows."""
    config, room = config_type.default(launches.alone(few)), gpu_specs.shared_memory(few.gpu)
    while bytes_of_launch(few, config) > room and (less := config.shallower()) is not None:
        config = less
    return config


def launch(
    inputs: DecodeInputs,
    problem: DecodeProblem,
    config: KernelConfig,
    into: tuple[Operand, Operand] | None = None,
) -> tuple[Operand, Operand]:
    """One launch. Of packed rows, those of sequences that the problem asks for, and 0 for rows that
    no sequence owns; anything for the rest, or what `into` has.
    """
    plan = config.plan(problem)
    return launch_plan(inputs, counters(plan), into, plan)


@functools.partial(jax.jit, static_argnames="plan")
def launch_plan(
    inputs: DecodeInputs, counters: Operand, into: tuple[Operand, Operand] | None, plan: Plan
) -> tuple[Operand, Operand]:
    """Jitted, so that a model of many layers traces it once. `into`: results of other rows, beside
    which these are written.
    """
    refs = loads.refs_of(inputs, counters, plan)
    out_type = plan.out_types
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=out_type if into is None else out_type[2:],
        scratch_types=(plan.buffers,),
        grid=(plan.grid,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plan.lowering),
        kernel_name=plan.name,
    )
    if into is None:
        out, lse, _ = kernel(refs)
        return out, lse
    out, lse = (jax.new_ref(x) for x in into)
    kernel(refs, out, lse)
    return jax.freeze(out), jax.freeze(lse)


KERNEL = Kernel(Config, limit, smem_bytes, run, overlaps=True)
