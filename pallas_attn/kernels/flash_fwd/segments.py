"""A small kernel that makes the records and the schedule of `documents`.

`documents.by_xla` computes the same in jax.numpy, of which XLA makes six kernels. Here one block
for each batch row does it all, in four programs of single threads, with a barrier for all threads
of the block between them:

  extremes  the least and the greatest id of the rows of each warpgroup and of each kv tile; 16
            threads or fewer a tile
  spans     a warp for each work tile goes over all kv tiles: a `Span` for the rows of each
            warpgroup, and how many kv tiles the work tile needs
  ranks     a warp for each work tile: how many of them cost more
  codes     a thread for each entry of `tile_scheduler.schedule`: the work tile of a rank

Each program loads from global memory before it computes, so that it waits once.

The workload is training on packed documents: the forward of 8 documents of 1024 rows takes 76 us on
an H200, and 96 where XLA prepares them (`results/forward_h200.jsonl`).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn.kernels.attention import tile_scheduler
from pallas_attn.kernels.attention.tile_scheduler import QueryPlan
from pallas_attn.kernels.attention.tiles import ROWS
from pallas_attn.kernels.lang import mosaic, thread_program, threads
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.threads import LANES
from pallas_attn.kernels.lang.types import Index, Operand, Ref

MOST_PAIRS = 2**18  # pairs of units and kv tiles; for more, many blocks, and so XLA, are faster
LINE = 32  # words of memory that arrive together
RECORD = 32  # int32 a work tile; TMA writes to whole 128 bytes


class _Sizes(NamedTuple):
    """How many there are of each, and where they lie in shared memory."""

    units: int  # units of ROWS queries
    keys: int  # kv tiles
    tiles: int  # work tiles
    warpgroups: int  # warpgroups of this kernel

    @classmethod
    def of(cls, plan: QueryPlan) -> "_Sizes":
        units = plan.tiling.padded_rows // ROWS
        keys = -(-plan.problem.kv_len // plan.config.block_kv)
        return cls(units, keys, plan.tiling.q_tiles, min(-(-(units + keys) // 32), 8))

    @property
    def key_extremes(self) -> int:
        return 2 * self.units

    @property
    def costs(self) -> int:
        return self.key_extremes + 2 * self.keys

    @property
    def order(self) -> int:
        return self.costs + self.tiles

    @property
    def words(self) -> int:
        return self.order + self.tiles


class _Refs(NamedTuple):
    q_ids: Any  # [B, T]
    kv_ids: Any  # [B, S]
    bounds: Any  # int32[2, tiles]: `documents.mask_bounds`
    schedule: Any  # `tile_scheduler.schedule`, with ranks for rows
    records: Any = None  # int32[B, tiles, RECORD], written
    codes: Any = None  # like schedule, written
    memory: Any = None  # shared: see `_Sizes`


class _Block(NamedTuple):
    """The block that runs a program."""

    batch: Any
    wg: Any


def fits(plan: QueryPlan) -> bool:
    """Whether `prepare` takes the problem."""
    sizes = _Sizes.of(plan)
    few = sizes.units * sizes.keys <= MOST_PAIRS and sizes.words <= 50_000
    return few and "q_positions" not in plan.problem.arrays


def prepare(
    plan: QueryPlan, bounds: np.ndarray, q_ids: Operand, kv_ids: Operand
) -> tuple[jax.Array, jax.Array]:
    """(`documents.records`, `documents.schedule_by_rank`) of `documents.mask_bounds` and of ids
    [B, T], [B, S]. Past the end the last id counts.
    """
    sizes, table = _Sizes.of(plan), tile_scheduler.schedule(plan)
    batch = plan.problem.batch
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=(
            jax.ShapeDtypeStruct((batch, sizes.tiles, RECORD), jnp.int32),
            jax.ShapeDtypeStruct(table.shape, jnp.int32),
        ),
        scratch_types=(
            plgpu.SMEM((sizes.words,), jnp.int32),
            plgpu.Barrier(num_barriers=len(PROGRAMS) - 1, num_arrivals=sizes.warpgroups),
        ),
        grid=(batch,),
        grid_names=("batch",),
        num_threads=sizes.warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="segments",
    )
    return kernel(_Refs(q_ids, kv_ids, jnp.asarray(bounds), jnp.asarray(table)))


def _kernel(refs: _Refs, records: Operand, codes: Operand, *scratch: Any, plan: QueryPlan) -> None:
    (memory, barriers), wg = scratch, lax.axis_index("wg")
    refs = refs._replace(records=records, codes=codes, memory=memory)
    batch = lax.axis_index("batch")
    sizes = _Sizes.of(plan)
    for number, program in enumerate(PROGRAMS):
        threads.each_thread(thread_program.in_context(program, plan), refs, _Block(batch, wg))
        if number < len(PROGRAMS) - 1 and sizes.warpgroups > 1:
            plgpu.barrier_arrive(barriers.at[number])
            plgpu.barrier_wait(barriers.at[number])


def _each(ctx: ThreadContext, count: int, lanes: int, finish: Any, load: Any = None) -> None:
    """`threads.each_item` of all warpgroups of the block."""
    warpgroups = _Sizes.of(ctx.plan).warpgroups
    threads.each_item(ctx.thread, ctx.at.wg, count, lanes, warpgroups, finish, load)


def _inverse(x: Operand) -> Any:
    """Orders the other way round, without overflow."""
    return x * -1 - 1


def _extremes(ctx: ThreadContext) -> None:
    thread, refs, (_, wg), plan = ctx
    problem, sizes = plan.problem, _Sizes.of(plan)
    mine = thread.index + wg * mosaic.THREADS
    counts = 2 * sizes.tiles, math.prod(tile_scheduler.schedule(plan).shape)
    for table, words in zip((refs.bounds, refs.schedule), counts, strict=True):  # read later
        for first in range(0, words, LINE * sizes.warpgroups * mosaic.THREADS):
            word = thread.minimum(mine * LINE + first, words - 1)
            thread.prefetch(table, word, 4)
    for ids, length, size, count, start in (
        (refs.q_ids, problem.q_len, ROWS, sizes.units, 0),
        (refs.kv_ids, problem.kv_len, plan.config.block_kv, sizes.keys, sizes.key_extremes),
    ):
        words = size // 4
        lanes = min(words & -words, 16)  # a power of two

        def load(number, lane, ids=ids, length=length, size=size, lanes=lanes):
            places = ((number * size) + (lane * 4 + step) for step in range(0, size, 4 * lanes))
            loaded = [_four(ctx, ids, length, place) for place in places]
            return [x for some in loaded for x in some]

        def finish(number, lane, there, loaded, count=count, start=start, lanes=lanes):
            most = functools.reduce(thread.maximum, loaded)
            least = functools.reduce(thread.maximum, map(_inverse, loaded))
            first = there & (lane < 1)
            for offset, x in ((0, most), (count, least)):
                x = thread.most_of_lanes(x, lanes)
                thread.shared_store(refs.memory, number + (start + offset), x, first)

        _each(ctx, count, lanes, finish, load)
    thread.sync()


def _four(ctx: ThreadContext, ref: Ref, length: int, place: Any) -> list[Any]:
    """Four ids of [B, length] from a place on that is a multiple of four; past the end the last."""
    thread, batch = ctx.thread, ctx.at.batch
    if length % 4:
        places = [thread.minimum(place + i, length - 1) for i in range(4)]
        return [thread.load(ref, batch * length + place, 4) for place in places]
    words = length // 4
    word = thread.load(ref, batch * words + thread.minimum(place // 4, words - 1), 16)
    four = [thread.bits(x) for x in thread.numbers(word, 16, "float32")]
    return [thread.select(place < length, x, four[3]) for x in four]


def _spans(ctx: ThreadContext) -> None:
    thread, refs, (batch, _), plan = ctx
    each, sizes = plan.config.warpgroups, _Sizes.of(plan)

    def bounds(number, _):
        return [thread.load(refs.bounds, number + n, 4) for n in (0, sizes.tiles)]

    def write_records(number, lane, there, bounds):
        unit_spans = [_span(ctx, number * each + i, lane) for i in range(each)]
        fields = [field for span in unit_spans for field in span]
        record = lane * 0
        for n, field in enumerate(fields):
            record = thread.select((lane <= n) & (lane >= n), field, record)
        place = (batch * sizes.tiles + number) * RECORD + lane
        thread.store(refs.records, place, record, 4, there)
        begin = thread.maximum(functools.reduce(thread.minimum, fields[0::4]), bounds[0])
        end = thread.minimum(functools.reduce(thread.maximum, fields[3::4]), bounds[1])
        thread.shared_store(refs.memory, number + sizes.costs, end - begin, there & (lane < 1))

    _each(ctx, sizes.tiles, LANES, write_records, bounds)
    thread.sync()


def _span(ctx: ThreadContext, unit: Index, lane: Index) -> tuple[Any, ...]:
    """A `Span` of the rows of one warpgroup, by the 32 threads of a warp."""
    thread, memory, sizes = ctx.thread, ctx.refs.memory, _Sizes.of(ctx.plan)
    keys, start = sizes.keys, sizes.key_extremes
    most = thread.shared_load(memory, unit)
    least = _inverse(thread.shared_load(memory, unit + sizes.units))
    alike = least >= most

    def some(i, carry):
        lo, full_lo, full_hi, hi, count = carry
        key = lane + i * LANES
        inside = thread.minimum(key, keys - 1)
        key_most = thread.shared_load(memory, inside + start)
        key_least = _inverse(thread.shared_load(memory, inside + (start + keys)))
        common = (key < keys) & (key_most >= least) & (key_least <= most)
        same = common & alike & (key_least >= key_most)
        left = key * -1 + keys
        return [
            thread.maximum(lo, thread.select(common, left, 0)),
            thread.maximum(full_lo, thread.select(same, left, 0)),
            thread.maximum(full_hi, thread.select(same, key + 1, 0)),
            thread.maximum(hi, thread.select(common, key + 1, 0)),
            count + thread.select(same, lane * 0 + 1, 0),
        ]

    nothing = [lane * 0 for _ in range(5)]
    *ends, count = threads.repeat(thread, -(-keys // LANES), nothing, some)
    lo, full_lo, full_hi, hi = (thread.most_of_lanes(x, LANES) for x in ends)
    count = thread.total_of_lanes(count)
    lo, full_lo = lo * -1 + keys, full_lo * -1 + keys
    lo = thread.select(lo < hi, lo, hi)
    full_hi = thread.select(full_hi - full_lo <= count, full_hi, full_lo)
    full_hi = thread.select(full_hi < full_lo, full_lo, full_hi)
    return lo, full_lo, full_hi, hi


def _ranks(ctx: ThreadContext) -> None:
    threads.order_by_cost(ctx.thread, ctx.refs.memory, ctx.at.wg, _Sizes.of(ctx.plan))


def _codes(ctx: ThreadContext) -> None:
    """Each block writes the entries of its batch row; the first one the counts, too. What lies
    behind a block's work tiles stands for the first of all, and is never taken.
    """
    thread, refs, (batch, _), plan = ctx
    sizes = _Sizes.of(plan)
    rows, width = tile_scheduler.schedule(plan).shape
    unit = 1 << plan.order.code_bits

    def load(number, _):
        return thread.load(refs.schedule, number, 4)

    def finish(number, _, there, value):
        head, rank = value // unit, value % unit
        tile = thread.shared_load(refs.memory, thread.minimum(rank, sizes.tiles - 1) + sizes.order)
        owner = head // plan.problem.q_heads
        counts = number % width < 1
        ours = thread.select(counts, number * 0, owner - batch)
        ours = (ours <= 0) & (ours >= 0) & (thread.select(counts, number * 0 + batch, 0) < 1)
        known = counts
        if plan.order.first_ranked_head:
            known = counts | (head < plan.order.first_ranked_head)
        code = thread.select(known, value, head * unit + tile)
        thread.store(refs.codes, number, code, 4, there & ours)

    _each(ctx, rows * width, 1, finish, load)


PROGRAMS = (_extremes, _spans, _ranks, _codes)
