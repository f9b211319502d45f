"""The partial results of split keys combined: one warp a query row, lanes over its columns.

A partial of a row is an accumulator that is not yet divided, the row max that it is relative to (in
log2 units) and the row sum. Each lane reads the maxima and sums of one split; the weights go around
the warp; then all splits' accumulators are read, which are independent loads, and added.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import softmax
from pallas_attn.kernels.attention.plan import ROWS
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.mosaic import ThreadContext
from pallas_attn.kernels.lang.threads import FOUR, LANES
from pallas_attn.kernels.prefill.plan import Plan


class Refs(NamedTuple):
    accs: Any  # float32[splits, *Plan.partial_tiles, 64, Hv], not divided
    row_maxes: Any  # float32[splits, *Plan.partial_tiles, 64], in log2 units
    row_sums: Any
    sinks: Any  # float32[N]
    starts: Any  # int32[M + 1], where rows are packed
    out: Any = None  # [M, t, N, Hv]
    lse: Any = None  # float32[M, N, t]


def _row(ctx: ThreadContext) -> None:
    """The partials of one query row and head -> that row of the result."""
    (thread, refs, block, plan), problem = ctx, ctx.plan.problem
    zero, nothing = thread.number(0.0), thread.number(float("-inf"))
    lane = thread.index % LANES
    number = block * threads.WARPS + thread.index // LANES
    row = thread.minimum(number, plan.rows - 1)
    own = (number < plan.rows,) if plan.rows % threads.WARPS else ()  # else every warp has a row
    q_head, row = row % problem.q_heads, row // problem.q_heads
    token, m = row % problem.q_len, row // problem.q_len
    kv_head, within = q_head // problem.group, q_head % problem.group
    to_token, heads, tiles_before = token, kv_head, 0
    if refs.starts is not None:
        token, tiles_before, served = _own_row(ctx, token)
        own = (*own, served)
    else:
        heads = m * problem.kv_heads + kv_head
    tile = token // plan.head_rows * plan.head_chunks + within // plan.tile_heads
    line = heads * plan.partial_tiles[1] + tile + tiles_before
    line = line * ROWS + within % plan.tile_heads * plan.head_rows + token % plan.head_rows

    splits = plan.config.splits
    lines = plan.partial_tiles[0] * plan.partial_tiles[1] * ROWS
    exists = lane < splits
    place = thread.wide(thread.minimum(lane, splits - 1)) * lines + thread.wide(line)
    (row_max,) = thread.load_floats(refs.row_maxes, place, 1)
    (row_sum,) = thread.load_floats(refs.row_sums, place, 1)
    row_max = thread.choose(exists, row_max, nothing)
    row_sum = thread.choose(exists, row_sum, zero)
    highest = thread.warp_highest(row_max)
    base = thread.choose(thread.nothing_yet(highest), zero, highest)
    weight = thread.exp2(row_max - base)
    sink = None
    if refs.sinks is not None:
        (sink,) = thread.load_floats(refs.sinks, q_head, 1)
    factor, value = softmax.finish_row(thread, highest, thread.warp_sum(weight * row_sum), sink)
    to = (thread.wide(m) * problem.q_heads + thread.wide(q_head)) * problem.q_len
    store = functools.reduce(operator.and_, own, lane < 1)
    thread.store_floats(refs.lse, to + thread.wide(to_token), [value], store)

    to = (thread.wide(m) * problem.q_len + thread.wide(to_token)) * problem.q_heads
    to = to + thread.wide(q_head)
    for first in range(0, problem.v_head_dim, LANES * FOUR):
        column = lane + first // FOUR
        inside = functools.reduce(operator.and_, own, column < problem.v_head_dim // FOUR)
        column = thread.minimum(column, problem.v_head_dim // FOUR - 1)
        sums = [zero] * FOUR
        for split in range(splits):
            start = (thread.wide(thread.index * 0 + split) * lines + thread.wide(line)) * (
                plan.v_width // FOUR
            )
            part = thread.load_floats(refs.accs, start + thread.wide(column), FOUR)
            w = thread.of_lane(weight, thread.index * 0 + split)
            none = thread.is_zero(w)  # what a split without a key left may be anything
            part = [thread.choose(none, zero, x) for x in part]
            sums = [x + w * y for x, y in zip(sums, part, strict=True)]
        values = [x * factor for x in sums]
        index = to * (problem.v_head_dim // FOUR) + thread.wide(column)
        thread.store_narrow(refs.out, index, values, problem.dtype, inside)


def _own_row(ctx: ThreadContext, token: Any) -> tuple[Any, Any, Any]:
    """Of a packed row: which of its sequence's it is, the warpgroup tiles of the sequences before,
    and whether the sequence's rows were split at all. Each lane looks at some sequences.
    """
    thread, refs, _, plan = ctx
    lane, last, none = thread.index % LANES, plan.problem.batch, -(2**30)

    def some(i: Any, carry: list) -> list:
        first, end, tiles = carry  # the latest start up to the row, the next (negative), q tiles
        at = i * LANES + lane
        exists = at <= last
        start = thread.load(refs.starts, thread.minimum(at, last), 4)
        after = thread.load(refs.starts, thread.minimum(at + 1, last), 4)
        begun, count = exists & (start <= token), after - start
        first = thread.maximum(first, thread.select(begun, start, none))
        end = thread.maximum(end, thread.select(exists & (start > token), start * -1, none))
        over = exists & (after <= token) & (count >= plan.fewest)
        mine = thread.select(over, plan.q_tiles_of(count, lambda x, y: x // y), 0)
        return [first, end, tiles + mine]

    zero = lane * 0
    carry = thread.loop(last // LANES + 1, [zero + none, zero + none, zero], some)
    first, end = (thread.most_of_lanes(x, LANES) for x in carry[:2])
    tiles = thread.total_of_lanes(carry[2]) * plan.config.warpgroups
    served = (first >= 0) & (end > none) & (end * -1 - first >= plan.fewest)
    return thread.select(served, token - first, 0), tiles, served


def _kernel(refs: Refs, out: Any, lse: Any, *, plan: Plan) -> None:
    refs, block = refs._replace(out=out, lse=lse), lax.axis_index("block")
    threads.each_thread(mosaic.in_context(_row, plan), refs, block)


def run(plan: Plan, partial: Any, given: Any, into: Any = None) -> tuple[Any, Any]:
    """out [M, t, N, Hv], and lse [M, N, t], of what the launch of `plan` left: accumulators, row
    maxima and row sums; of packed rows, `into` with these rows in it. `given`: what it read.
    """
    problem, of = plan.problem, jax.ShapeDtypeStruct
    out_type = (
        of((problem.batch, problem.q_len, problem.q_heads, problem.v_head_dim), problem.dtype),
        of((problem.batch, problem.q_heads, problem.q_len), jnp.float32),
    )
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=out_type if into is None else (),
        grid=(-(-plan.rows // threads.WARPS),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        kernel_name="prefill_combine",
    )
    accs, row_maxes, row_sums = partial
    refs = Refs(accs, row_maxes, row_sums, given.sinks, given.starts)
    if into is None:
        return kernel(refs)
    out, lse = (jax.new_ref(x) for x in into)
    kernel(refs, out, lse)
    return jax.freeze(out), jax.freeze(lse)
