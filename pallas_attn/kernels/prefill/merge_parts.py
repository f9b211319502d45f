"""Results of query rows over their own keys merged with partials of the same rows over shared keys.

A block has four heads of one query row: a warp a head, its lanes the columns. The partials of a row
begin with its q tile, whose steps tell which blocks had some of them (`shares`).
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax

from pallas_attn._call.problem import Into
from pallas_attn.kernels.attention import partials, softmax
from pallas_attn.kernels.attention.tiles import ROWS
from pallas_attn.kernels.lang import thread_program, threads
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.threads import FOUR, LANES
from pallas_attn.kernels.lang.types import GmemRef, Index, Scalar
from pallas_attn.kernels.prefill import packed_queries, shares
from pallas_attn.kernels.prefill.plan import Plan

AT_ONCE = 8  # partials that a warp loads together


class MergeRefs(NamedTuple):
    accs: GmemRef  # float32[partials, warpgroups, 64, Hv], not divided
    row_maxes: GmemRef  # float32[partials, warpgroups, 64], in log2 units
    row_sums: GmemRef
    sums: GmemRef  # int32[shares.kept_size]: `shares.Sums`
    starts: GmemRef  # int32[packed sequences + 1]
    parts: GmemRef  # `problem.Into`
    places: GmemRef
    own: GmemRef  # [M, t, N, Hv]
    own_lse: GmemRef  # float32[M, N, t]
    out: GmemRef = None  # written
    lse: GmemRef = None


class _Part(NamedTuple):
    """The packed sequence that has the row, and the packed row; -1 where none has it."""

    number: Index
    place: Index


class _Totals(NamedTuple):
    """Sums over all packed sequences, or over those before one, for one kv head."""

    q_tiles: Index
    steps: Index
    dealing: Any = None  # `shares.Dealing`


class _Partials(NamedTuple):
    """Lines of the partials of a row: number p of `count` at `first + p * pitch`."""

    first: Index
    count: Index
    most: Index  # the most that any head of the block has


class _Merge(NamedTuple):
    """Values of a warp's row that its merging reads at every level."""

    head: Index
    columns: list[Index]
    total: _Totals


def _before(ctx: ThreadContext, m: Index) -> _Totals:
    """Sums over the packed sequences before number m."""
    size = packed_queries.table_size(ctx.plan)
    return _Totals(*(ctx.thread.load(ctx.refs.sums, m + n * size, 4) for n in range(2)))


def _partials(ctx: ThreadContext, merge: _Merge, part: _Part) -> _Partials:
    (thread, refs, _, plan), tiles, (head, _, total) = ctx, ctx.plan.tiles, merge
    problem, m = plan.problem, part.number
    heads, wgs = problem.kv_heads, plan.config.warpgroups
    start, end = (thread.load(refs.starts, m + n, 4) for n in (0, 1))
    own = part.place - start
    kv_head, within = head // problem.group, head % problem.group
    wg_tile = own // tiles.head_rows * tiles.head_chunks + within // tiles.tile_heads
    line = within % tiles.tile_heads * tiles.head_rows + own % tiles.head_rows
    q_tiles_before, before, _ = _before(ctx, m)
    q_tiles = thread.maximum(tiles.q_tiles_of(end - start), 1)
    kv_tiles = (_before(ctx, m + 1).steps - before) // q_tiles
    q_tile, paired = kv_head * q_tiles + (q_tiles - 1 - wg_tile // wgs), total.dealing.paired
    # From here on q tiles are pairs of them, where blocks are paired.
    all_q_tiles, all_steps = ((x * heads) >> paired for x in (total.q_tiles, total.steps))
    blocks = shares.blocks_of(total.dealing, all_q_tiles, all_steps)
    each = thread.maximum(all_steps // blocks, 1)
    more = all_steps - all_steps // blocks * blocks
    step = ((before * heads) >> paired) + (q_tile >> paired) * kv_tiles
    first, last = (_block_of(thread, x, each, more) for x in (step, step + kv_tiles - 1))
    number = q_tiles_before * heads + q_tile + (first << paired)
    line, count = (number * wgs + wg_tile % wgs) * ROWS + line, last - first + 1
    if problem.group % threads.WARPS == 0:  # the heads of a block have one q tile
        return _Partials(line, count, count)
    most = thread.minimum((kv_tiles + (each - 1)) // each + 1, plan.grid)
    return _Partials(line, count, most)


def _merged(ctx: ThreadContext, merge: _Merge, part: _Part, carry: list) -> list:
    """[row max, row sum, columns of the output] with the partials of a part added."""
    (thread, refs, _, plan), columns = ctx, merge.columns
    at, lane = _partials(ctx, merge, part), thread.index % LANES
    zero = thread.number(0.0)
    pitch = lane * 0 + plan.config.warpgroups * ROWS << merge.total.dealing.paired

    def trip(number: Index, carry: list) -> list:
        row_max, row_sum, *sums = carry
        p = number * LANES + lane
        there = p < at.count
        place = thread.select(there, at.first + p * pitch, at.first)

        def load(numbers: list[Index]) -> list:
            lines = [
                thread.to_int64(thread.of_lane(place, n)) * (plan.v.width // FOUR) for n in numbers
            ]
            return [
                sum(
                    (thread.load_floats(refs.accs, x + thread.to_int64(c), FOUR) for c in columns),
                    [],
                )
                for x in lines
            ]

        def added(numbers: list, loaded: list, sums: list) -> list:
            for n, acc in zip(numbers, loaded, strict=True):
                w = thread.of_lane(weight, n)
                none = thread.is_zero(w)  # a partial without a key may hold anything
                acc = [thread.choose(none, zero, x) for x in acc]
                sums = [x + w * y for x, y in zip(sums, acc, strict=True)]
            return sums

        own_max, own_sum = (
            thread.load_floats(ref, thread.to_int64(place), 1)[0]
            for ref in (refs.row_maxes, refs.row_sums)
        )
        at_first = [lane * 0 + i for i in range(AT_ONCE)]
        loaded = load(at_first)  # under way before the weights are known
        new = partials.weighed(thread, own_max, own_sum, there, (row_max, row_sum))
        weight = new.weight
        sums = added(at_first, loaded, [x * new.rescale for x in sums])

        def more(batch: Index, sums: list) -> list:
            numbers = [(batch + 1) * AT_ONCE + i for i in range(AT_ONCE)]
            return added(numbers, load(numbers), sums)

        left = thread.minimum(at.most - number * LANES, LANES)
        batches = (left + (AT_ONCE - 1)) // AT_ONCE - 1
        return [new.row_max, new.row_sum, *thread.loop(batches, sums, more)]

    return thread.loop((at.most + (LANES - 1)) // LANES, carry, trip)


def _block_of(thread: threads.Thread, step: Index, each: Index, more: Index) -> Index:
    """The block that has a step."""
    within = more * (each + 1)
    later = more + thread.maximum(step - within, 0) // each
    return thread.select(step < within, step // (each + 1), later)


def _max_and_sum(thread: threads.Thread, lse: Scalar) -> list[Scalar]:
    """The row max and the row sum of a row that is done, by its log-sum-exp."""
    level, zero = softmax.to_log2(lse), thread.number(0.0)
    empty = thread.nothing_yet(level)
    row_max, base = thread.lowest(level, softmax.LARGEST), thread.choose(empty, zero, level)
    row_sum = thread.exp2(base - thread.lowest(base, softmax.LARGEST))  # 1; inf for an lse of inf
    return [row_max, thread.choose(empty, zero, row_sum)]


def _warp(ctx: ThreadContext) -> None:
    thread, refs, block, plan = ctx
    problem = plan.problem
    levels, sequences, t = plan.merged
    tokens = sequences * t
    across = -(-problem.q_heads // threads.WARPS)
    head = block % across * threads.WARPS + thread.index // LANES
    exists = head < problem.q_heads
    token, head = block // across, thread.minimum(head, problem.q_heads - 1)
    lane, words = thread.index % LANES, problem.v_head_dim // FOUR
    line = (token // t * problem.q_heads + head) * t + token % t
    (own_lse,) = thread.load_floats(refs.own_lse, thread.to_int64(line), 1)
    at = [token + level * tokens for level in range(levels)]
    parts = [_Part(*(thread.load(ref, n, 4) for ref in (refs.parts, refs.places))) for n in at]
    total = _before(ctx, lane * 0 + problem.batch)
    kept = [lane * 0 + (2 * packed_queries.table_size(plan) + n) for n in shares.AT]
    total = total._replace(dealing=shares.Dealing(*(thread.load(refs.sums, x, 4) for x in kept)))
    to = (thread.to_int64(token) * problem.q_heads + thread.to_int64(head)) * words
    columns = [lane + n for n in range(0, words, LANES)]
    inside = [exists & (column < words) for column in columns]
    columns = [thread.minimum(column, words - 1) for column in columns]
    own = [
        thread.load_narrow(refs.own, to + thread.to_int64(column), problem.dtype)
        for column in columns
    ]
    carry = [*_max_and_sum(thread, own_lse), *sum(own, [])]
    merge = _Merge(head, columns, total)
    for part in parts:

        def add_part(_: Index, carry: list, part: _Part = part) -> list:
            return _merged(ctx, merge, part, carry)

        is_read = thread.minimum(thread.maximum(part.number + 1, 0), 1)
        carry = thread.loop(is_read, carry, add_part)
    row_max, row_sum, *sums = carry
    factor, lse = partials.finish_row(thread, row_max, row_sum, None)
    thread.store_floats(refs.lse, thread.to_int64(line), [lse], exists & (lane < 1))
    for n, column in enumerate(columns):
        values = [x * factor for x in sums[n * FOUR : (n + 1) * FOUR]]
        index = to + thread.to_int64(column)
        thread.store_narrow(refs.out, index, values, problem.dtype, inside[n])


def _kernel(refs: MergeRefs, out: GmemRef, lse: GmemRef, *, plan: Plan) -> None:
    refs, block = refs._replace(out=out, lse=lse), lax.axis_index("block")
    threads.run(_warp, plan, refs, block)


def run(
    plan: Plan,
    made: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    starts: jax.Array,
    into: Into,
) -> tuple[jax.Array, jax.Array]:
    """out [M, t, N, Hv] and lse [M, N, t]: `into` merged with what the launch of `plan` wrote,
    accumulators, row maxima, row sums and the sums of its shares.
    """
    assert plan.merged is not None
    _, sequences, t = plan.merged
    refs = MergeRefs(*made, starts, into.parts, into.places, into.out, into.lse)
    kernel = thread_program.lane_kernel(
        functools.partial(_kernel, plan=plan),
        grid=sequences * t * -(-plan.problem.q_heads // threads.WARPS),
        name="prefill_merge",
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (into.out, into.lse)],
    )
    return kernel(refs)
