"""Partial results of split keys combined into results: a warp a query row, lanes over its columns.

Each lane reads the maxima and sums of one split; the weights go around the warp; then all splits'
accumulators are read, which are independent loads, and added.
"""

import functools
import math
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import partials
from pallas_attn.kernels.attention.tiles import ROWS
from pallas_attn.kernels.lang import thread_program, threads
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.threads import FOUR, LANES
from pallas_attn.kernels.lang.types import GmemRef, Index, Predicate
from pallas_attn.kernels.prefill.plan import Plan, PrefillRefs

Results = tuple[jax.Array, jax.Array]  # out and lse
Partials = tuple[jax.Array, jax.Array, jax.Array]  # accumulators, row maxima, row sums


class CombineRefs(NamedTuple):
    accs: GmemRef  # float32[splits, *partial_tiles, 64, Hv], not divided
    row_maxes: GmemRef  # float32[splits, *partial_tiles, 64], in log2 units
    row_sums: GmemRef
    sinks: GmemRef  # float32[N]
    starts: GmemRef  # int32[M + 1], where rows are packed
    out: GmemRef = None  # written: [M, t, N, Hv]
    lse: GmemRef = None  # float32[M, N, t]


def _row(ctx: ThreadContext) -> None:
    """The partials of one query row and head -> that row of the result."""
    (thread, refs, block, plan), problem, tiles = ctx, ctx.plan.problem, ctx.plan.tiles
    zero, lane = thread.number(0.0), thread.index % LANES
    number = block * threads.WARPS + thread.index // LANES
    row = thread.minimum(number, plan.result_rows - 1)
    conditions = [number < plan.result_rows] if plan.result_rows % threads.WARPS else []
    q_head, row = row % problem.q_heads, row // problem.q_heads
    token, m = row % problem.q_len, row // problem.q_len
    kv_head, within = q_head // problem.group, q_head % problem.group
    to_token, heads, tiles_before = token, kv_head, 0
    if refs.starts is not None:
        token, tiles_before, served = _own_row(ctx, token)
        conditions.append(served)
    else:
        heads = m * problem.kv_heads + kv_head
    tile = token // tiles.head_rows * tiles.head_chunks + within // tiles.tile_heads
    partial_tiles = plan.queries.partial_tiles(plan)
    line = heads * partial_tiles[1] + tile + tiles_before
    line = line * ROWS + within % tiles.tile_heads * tiles.head_rows + token % tiles.head_rows

    splits, lines = plan.config.splits, math.prod(partial_tiles) * ROWS
    exists = lane < splits
    place = thread.to_int64(thread.minimum(lane, splits - 1)) * lines + thread.to_int64(line)
    (row_max,) = thread.load_floats(refs.row_maxes, place, 1)
    (row_sum,) = thread.load_floats(refs.row_sums, place, 1)
    whole, sink = partials.weighed(thread, row_max, row_sum, exists), None
    if refs.sinks is not None:
        (sink,) = thread.load_floats(refs.sinks, q_head, 1)
    factor, value = partials.finish_row(thread, whole.row_max, whole.row_sum, sink)
    to = (thread.to_int64(m) * problem.q_heads + thread.to_int64(q_head)) * problem.q_len
    store = functools.reduce(operator.and_, conditions, lane < 1)
    thread.store_floats(refs.lse, to + thread.to_int64(to_token), [value], store)

    to = (thread.to_int64(m) * problem.q_len + thread.to_int64(to_token)) * problem.q_heads
    to = to + thread.to_int64(q_head)
    for first in range(0, problem.v_head_dim, LANES * FOUR):
        column = lane + first // FOUR
        inside = functools.reduce(operator.and_, conditions, column < problem.v_head_dim // FOUR)
        column = thread.minimum(column, problem.v_head_dim // FOUR - 1)
        sums = [zero] * FOUR
        for split in range(splits):
            start = (thread.to_int64(thread.index * 0 + split) * lines + thread.to_int64(line)) * (
                plan.v.width // FOUR
            )
            part = thread.load_floats(refs.accs, start + thread.to_int64(column), FOUR)
            w = thread.of_lane(whole.weight, thread.index * 0 + split)
            none = thread.is_zero(w)  # a split without a key may hold anything
            part = [thread.choose(none, zero, x) for x in part]
            sums = [x + w * y for x, y in zip(sums, part, strict=True)]
        values = [x * factor for x in sums]
        index = to * (problem.v_head_dim // FOUR) + thread.to_int64(column)
        thread.store_narrow(refs.out, index, values, problem.result_dtype, inside)


def _own_row(ctx: ThreadContext, token: Index) -> tuple[Index, Index, Predicate]:
    """The number of a packed row among its sequence's, the warpgroup tiles of the sequences before,
    and whether this launch serves the sequence. Each lane looks at some sequences.
    """
    (thread, refs, _, plan), fewest = ctx, ctx.plan.fewest
    lane, last, none = thread.index % LANES, plan.problem.batch, -(2**30)

    def look(i: Index, carry: list[Index]) -> list[Index]:
        first, end, tiles = carry  # the latest start up to the row, the next (negative), q tiles
        at = i * LANES + lane
        exists = at <= last
        start = thread.load(refs.starts, thread.minimum(at, last), 4)
        after = thread.load(refs.starts, thread.minimum(at + 1, last), 4)
        begun, count = exists & (start <= token), after - start
        first = thread.maximum(first, thread.select(begun, start, none))
        end = thread.maximum(end, thread.select(exists & (start > token), start * -1, none))
        over = exists & (after <= token) & (count >= fewest)
        mine = thread.select(over, plan.tiles.q_tiles_of(count), 0)
        return [first, end, tiles + mine]

    zero = lane * 0
    carry = thread.loop(last // LANES + 1, [zero + none, zero + none, zero], look)
    first, end = (thread.most_of_lanes(x, LANES) for x in carry[:2])
    tiles = thread.total_of_lanes(carry[2]) * plan.config.warpgroups
    served = (first >= 0) & (end > none) & (end * -1 - first >= fewest)
    return thread.select(served, token - first, 0), tiles, served


def _kernel(refs: CombineRefs, out: GmemRef, lse: GmemRef, *, plan: Plan) -> None:
    refs, block = refs._replace(out=out, lse=lse), lax.axis_index("block")
    threads.run(_row, plan, refs, block)


def run(plan: Plan, made: Partials, refs: PrefillRefs, into: Results | None = None) -> Results:
    """out [M, t, N, Hv] and lse [M, N, t] by the partials that a launch of `plan` wrote:
    accumulators, row maxima and row sums. Packed rows go to `into`, where other rows are.
    """
    problem, shape = plan.problem, jax.ShapeDtypeStruct
    out_type = (
        shape(
            (problem.batch, problem.q_len, problem.q_heads, problem.v_head_dim),
            problem.result_dtype,
        ),
        shape((problem.batch, problem.q_heads, problem.q_len), jnp.float32),
    )
    kernel = thread_program.lane_kernel(
        functools.partial(_kernel, plan=plan),
        grid=-(-plan.result_rows // threads.WARPS),
        name="prefill_combine",
        out_type=out_type if into is None else (),
    )
    combined = CombineRefs(*made, refs.sinks, refs.starts)
    if into is None:
        return kernel(combined)
    out, lse = (jax.new_ref(x) for x in into)
    kernel(combined, out, lse)
    return jax.freeze(out), jax.freeze(lse)
