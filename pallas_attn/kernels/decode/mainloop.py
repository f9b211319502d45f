"""One kv tile of decode: scores, logits, the mask, the online softmax of every warp, and the values
that its probabilities weigh. Rows are packed as `mma_rowmajor.Split` says.

`quantized_mainloop` has the same functions for caches of 8-bit numbers.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import softmax
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.decode import combine_splits, scheduler, score_functions
from pallas_attn.kernels.decode.combine_splits import Results
from pallas_attn.kernels.decode.plan import ROWS_OF_WARPS, Plan, Steps
from pallas_attn.kernels.decode.scheduler import Partials, Positions, WorkTile
from pallas_attn.kernels.decode.score_functions import Places, places_of
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.types import Index, RegisterTile, SmemRef
from pallas_attn.kernels.mma import column_parts, mma_rowmajor, mma_tf32

ROWS = ROWS_OF_WARPS


class State(NamedTuple):
    """An online softmax of every warp, carried from tile to tile."""

    acc: RegisterTile  # [64, Hv]
    row_sum: RegisterTile  # [64, softmax.PARTIALS]
    row_max: RegisterTile  # [64]


class TileAt(NamedTuple):
    """A kv tile that has been loaded."""

    tile: Index  # its number in the sequence
    slot: Index  # the entry of the ring


def initial(plan: Plan) -> State:
    """The state before the first key."""
    width = mma_rowmajor.accumulator_width(plan.problem.v_head_dim, plan.split.parts)
    return State(
        mosaic.filled((ROWS, width), 0.0),
        mosaic.filled((ROWS, softmax.PARTIALS), 0.0),
        mosaic.filled((ROWS,), -jnp.inf),
    )


def query_rows(ctx: KernelContext, work: WorkTile) -> mma_rowmajor.Queries:
    """The query rows of a work tile in global memory."""
    plan, problem = ctx.plan, ctx.plan.problem
    first, sizes = scheduler.first_query(plan, work), (problem.q_heads, plan.queries.group)
    last = None if problem.tokens is None else problem.tokens * problem.q_heads - 1
    return mma_rowmajor.Queries(
        ctx.refs.q, *first, plan.queries.rows, *sizes, problem.head_dim, last
    )


def load_queries(ctx: KernelContext, work: WorkTile) -> RegisterTile | SmemRef:
    """The query rows of all warps, in registers; of float32 in shared memory.

    Those in shared memory are written when all threads have met after the last work, and read when
    all have met before a tile.
    """
    rows, plan = query_rows(ctx, work), ctx.plan
    if plan.is_float32:
        mma_tf32.store_queries(rows, plan.split, ctx.smem.q)
        return ctx.smem.q
    return mma_rowmajor.queries(rows, plan.split)


def scores(ctx: KernelContext, queries: RegisterTile | SmemRef, slot: Index) -> RegisterTile:
    """q @ K^T of the kv tile in a slot."""
    plan = ctx.plan
    s = plan.matmuls.scores(queries, ctx.smem.k, slot, plan.split, plan.problem.head_dim)
    if plan.split.parts > 1:  # warps divide the columns
        s = column_parts.sum_of_parts(s, ctx.smem.scores, plan.split)
    return s


def attend(ctx: KernelContext, work: WorkTile, at: TileAt, s: RegisterTile, state: State) -> State:
    """The state after one more kv tile, from its scores."""
    plan = ctx.plan
    if plan.unit_of_logits is None:
        s = logits_of_scores(ctx, work, at.tile, s)
    s = masked(ctx, work, at.tile, s)
    join = plan.split.join
    new = softmax.step(s, plan.unit_of_logits, state.row_max, empty_ok=True, join=join)
    acc, row_sum = softmax.rescaled(new, (state.acc, state.row_sum))
    p = new.p.astype(plan.problem.dtype)
    acc = plan.matmuls.matmul_add(acc, p, ctx.smem.v, at.slot, plan.split, plan.v_column)
    return State(acc, row_sum + new.row_sum, new.row_max)


def totals(plan: Plan, state: State) -> tuple[RegisterTile, RegisterTile]:
    """(acc relative to the row max, row sum [64]) when all tiles have been taken."""
    row_sum = state.row_sum.sum(axis=1)
    if plan.split.folded:
        row_sum = mma_rowmajor.reduce_folded(row_sum, "sum")
    return state.acc, row_sum


def logits_of_scores(
    ctx: KernelContext,
    work: WorkTile,
    tile: Index,
    s: RegisterTile,
    places: Places | None = None,
) -> RegisterTile:
    """Logits in log2 units, where `plan.unit_of_logits` is None: else scores are logits of that
    unit. `places`: where they lie otherwise than `mma_rowmajor.scores` leaves them.
    """
    plan = ctx.plan
    s = s * plan.problem.scale
    if plan.problem.softcap is not None:
        s = softmax.softcap(s, plan.problem.softcap)
    if plan.problem.score_program is not None:
        s = score_functions.scored(ctx, work, places or places_of(plan, tile), s)
    return softmax.to_log2(s)


# ---- the mask ------------------------------------------------------------------------------------


def positions_of(ctx: KernelContext, work: WorkTile, tile: Index) -> Positions:
    """Positions of the logits of all warps."""
    plan, split = ctx.plan, ctx.plan.split
    shape = (ROWS, split.width)
    row, column = mosaic.positions(shape, 0, 0), mosaic.positions(shape, 1, 0)
    warp = row // mma_rowmajor.ROWS
    own = row % mma_rowmajor.ROWS
    key = tile * plan.keys.tile + split.first_key(warp) + split.key(own, column)
    query = split.row_block(warp) * mma_rowmajor.ROWS + split.query(own)
    return scheduler.positions_at(plan, work, query, key)


def masked(
    ctx: KernelContext,
    work: WorkTile,
    tile: Index,
    logits: RegisterTile,
    positions: Callable[[KernelContext, WorkTile, Index], Positions] = positions_of,
) -> Any:
    """A tree of tiles of logits, with -inf where a query does not see a key. `positions`: where
    they lie otherwise than `mma_rowmajor.scores` leaves them.
    """
    plan, problem, mask = ctx.plan, ctx.plan.problem, ctx.plan.problem.mask
    if work.bounds is not None:
        mask = work.mask_with_bounds(problem)
    start, begin = tile * plan.keys.tile, work.length - plan.queries_of(work.queries)
    lo, hi = mask.kv_full_range(begin, work.length, work.length)

    def hidden():
        at = positions(ctx, work, tile)
        allowed = mask.allows(at.query, at.key, work.length)
        if problem.mask_program is not None:
            allowed = allowed & score_functions.seen(ctx, work, at, begin if problem.tree else 0)
        leaves, tree = jax.tree.flatten(logits)
        return jax.tree.unflatten(tree, [jnp.where(allowed, x, -jnp.inf) for x in leaves])

    if problem.tree:  # which hides none of the rows before the drafts
        hi = jnp.minimum(hi, begin)
    elif problem.mask_program is not None:
        return hidden()
    whole = (start >= lo) & (start + plan.keys.tile <= hi)
    return lax.cond(whole, lambda: logits, hidden)


# ---- results -------------------------------------------------------------------------------------


def epilogue(
    ctx: KernelContext,
    results: Results,
    work: WorkTile,
    state: Any,
    places: Partials,
    totals: Callable[..., Any] = totals,
) -> None:
    """The warps' partials -> the result, or a partial in global memory."""
    plan, smem = ctx.plan, ctx.smem
    lost = smem.table.lost[work.sequence]
    at = combine_splits.Head(work.sequence, work.head, lost, places, work.queries, work.row)
    acc, row_sum = totals(plan, state)
    to, rows = smem.warp_partials, plan.queries.warp_rows
    mma_rowmajor.store_accumulators(acc, state.row_max, row_sum, to, rows, plan.split)
    refs = combine_splits.ResultRefs(to, results, smem.last)
    write_result = functools.partial(threads.run, combine_splits.write_result, plan, refs, at)
    pl.when(places.count == 1)(write_result)

    @pl.when(places.count > 1)
    def _():
        threads.run(combine_splits.write_partial, plan, refs, at)
        combine = functools.partial(threads.run, combine_splits.combine, plan, results, at)
        pl.when(smem.last[0] == 1)(combine)


STEPS = Steps(initial, load_queries, scores, attend, epilogue)
