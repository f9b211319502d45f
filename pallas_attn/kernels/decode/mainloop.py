"""What a kv tile adds to the online softmax of a block's warps: its scores, made logits and masked,
its probabilities and the values that they weigh. Rows are packed as `mma_rowmajor.Split` says.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import functions, softmax
from pallas_attn.kernels.attention.functions import Value
from pallas_attn.kernels.attention.plan import Context
from pallas_attn.kernels.decode import scheduler
from pallas_attn.kernels.decode.scheduler import Plan, WorkTile
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.mma import mma_rowmajor, mma_sync, mma_tf32

Array = Any
Scalar = Any

ROWS = threads.WARPS * mma_rowmajor.ROWS  # of the warps' matrices, one above the other


class State(NamedTuple):
    """An online softmax of every warp, carried from tile to tile.

    Over a quantised cache `acc` is a sum of values that are not multiplied by their scales. Their
    weights, probabilities times scales, have a maximum of their own, so that float16 holds them.
    """

    acc: Array  # [64, Hv]
    row_sum: Array  # [64, softmax.PARTIALS]
    row_max: Array  # [64]
    weight_max: Array | None  # [64]: what acc is relative to; None: to row_max


class Queries(NamedTuple):
    """The query rows of all warps."""

    q: Any  # in registers; of float32 in shared memory
    units: Array | None  # what their scores are to be multiplied by


class TileAt(NamedTuple):
    """A kv tile that has been loaded."""

    tile: Scalar  # its number in the sequence
    slot: Scalar  # of the ring


class Logits(NamedTuple):
    """In log2 units if `plan.unit_of_logits` is None, else in that unit."""

    logits: Array
    weights: Array | None  # of probabilities times the scales of values, in log2 units


def initial(plan: Plan) -> State:
    """Of no key yet."""
    return State(
        mosaic.filled((ROWS, mma_rowmajor.accumulator_width(plan.problem.v_head_dim)), 0.0),
        mosaic.filled((ROWS, softmax.PARTIALS), 0.0),
        mosaic.filled((ROWS,), -jnp.inf),
        mosaic.filled((ROWS,), -jnp.inf) if plan.problem.quantized else None,
    )


def scores(ctx: Context, queries: Queries, slot: Scalar) -> Array:
    """Of the kv tile in a slot."""
    (plan, _, smem), (q, units) = ctx, queries
    if plan.is_float32:
        return mma_tf32.scores(q, smem.k, slot, plan.split)
    s = mma_rowmajor.scores(q, smem.k, slot, plan.split)
    if units is None:
        return s
    s = s * mma_rowmajor.number_of_each_key(smem.k_scale, slot, plan.split)
    return s * mosaic.broadcast_rows(units, s.shape)


class Positions(NamedTuple):
    """Of a tile of logits, each a tile; positions in the sequence."""

    query: Any
    key: Any
    head: Callable[[], Any]  # query heads, for who asks
    layout: Any = mosaic.TILE


def _positions(plan: Plan, work: WorkTile, tile: Scalar) -> Positions:
    """Of the queries and the keys of all warps' logits."""
    split = plan.split
    shape = (ROWS, split.width)
    row, column = mosaic.positions(shape, 0, 0), mosaic.positions(shape, 1, 0)
    warp = row // mma_rowmajor.ROWS
    own = row % mma_rowmajor.ROWS
    key = tile * plan.tile + split.first_key(warp) + split.key(own, column)
    query = split.query(own)
    if plan.heads_at_once == 1:
        query = split.row_block(warp) * mma_rowmajor.ROWS + query
    kv_head, chunk = scheduler.head_and_chunk(plan, work)
    query = query + chunk * plan.chunk_rows
    token = token_of(plan, query)

    def head():
        first = kv_head
        if plan.heads_at_once > 1:
            first = first * plan.heads_at_once + split.row_block(warp)
        return first * plan.group + (query - token * plan.group)

    return Positions(work.length - plan.queries_of(work.queries) + token, key, head)


def token_of(plan: Plan, query: Array) -> Array:
    """query // group, by multiplication: LLVM makes a division of small numbers one of 16 bits,
    which that of JAX 0.12 then does not know for this GPU.
    """
    group, bits, rows = plan.group, 20, plan.chunks * plan.chunk_rows
    factor = -(-(2**bits) // group)
    if group & (group - 1) == 0 or rows * group >= 2**bits or rows * factor >= 2**31:
        return query // group
    return query * factor // 2**bits


def logits_of_scores(plan: Plan, s: Array) -> Array:
    """Logits in log2 units if `plan.unit_of_logits` is None; else the scores, of that unit."""
    if plan.unit_of_logits is not None:
        return s
    s = s * plan.problem.scale
    if plan.problem.softcap is not None:
        s = softmax.softcap(s, plan.problem.softcap)
    return softmax.to_log2(s)


def masked(ctx: Context, work: WorkTile, start: Scalar, given: Any, positions: Any) -> Any:
    """Tiles of logits with -inf where a query does not see a key. `start`: the first key of the
    tile; `positions()` gives those of queries and keys, where some are not seen.
    """
    plan, problem = ctx.plan, ctx.plan.problem
    mask, begin, count = work.mask, work.length - plan.queries_of(work.queries), plan.tile
    lo, hi = mask.kv_full_range(begin, work.length, work.length)

    def hidden():
        at = positions()
        allowed = mask.allows(at.query, at.key, work.length)
        if problem.mask_program is not None:
            allowed = allowed & _seen(ctx, work, at, begin if problem.tree else 0)
        return jax.tree.map(lambda x: jnp.where(allowed, x, -jnp.inf), given)

    if problem.tree:  # which hides none of the rows before the drafts
        hi = jnp.minimum(hi, begin)
    elif problem.mask_program is not None:
        return hidden()
    return lax.cond((start >= lo) & (start + count <= hi), lambda: given, hidden)


def _seen(ctx: Context, work: WorkTile, at: Positions, begin: Any) -> Any:
    """What the mask function shows of a tile; positions count from `begin`."""
    problem, shape = ctx.plan.problem, at.key.shape
    given = (at.head() if problem.uses_head else None, at.query - begin, at.key - begin)
    head, query, key = (Value(jnp.int32(0), ()) if x is None else Value(x, (0, 1)) for x in given)
    numbers = Value(work.sequence, ()), head, query, key
    registers = functions.Registers(shape, at.layout)
    return functions.seen_at(ctx, numbers, registers)


def logits(ctx: Context, work: WorkTile, tile: Scalar, s: Array, scales: Array | None) -> Logits:
    """Scores, and the scales of the values over a quantised cache, made logits and masked."""
    plan = ctx.plan
    s, weights = logits_of_scores(plan, s), None
    if scales is not None:
        s = s if plan.unit_of_logits is None else s * plan.unit_of_logits
        weights = s + jnp.log2(scales)
    start = tile * plan.tile
    return masked(ctx, work, start, Logits(s, weights), lambda: _positions(plan, work, tile))


def attend(ctx: Context, work: WorkTile, at: TileAt, s: Array, state: State) -> State:
    """One kv tile, from its scores on."""
    (plan, _, smem), (tile, slot) = ctx, at
    scales = (
        mma_rowmajor.number_of_each_key(smem.v_scale, slot, plan.split)
        if plan.problem.quantized
        else None
    )
    given, weights = logits(ctx, work, tile, s, scales)
    unit = None if plan.problem.quantized else plan.unit_of_logits
    join = functools.partial(mma_sync.reduce_folded, op="maximum") if plan.folded else None
    new = softmax.step(given, unit, state.row_max, empty_ok=True, join=join)
    if weights is None:
        acc, row_sum = softmax.rescaled(new, (state.acc, state.row_sum))
        p, weight_max = new.p, None
    else:
        row_sum = state.row_sum * mosaic.broadcast_rows(new.rescale, state.row_sum.shape)
        assert state.weight_max is not None
        heavy = softmax.step(weights, None, state.weight_max, empty_ok=True)
        acc = softmax.rescaled(heavy, state.acc)
        p, weight_max = heavy.p, heavy.row_max
    if plan.is_float32:
        acc = mma_tf32.matmul_add(acc, p, smem.v, slot, plan.split)
    else:
        acc = mma_rowmajor.matmul_add(acc, p.astype(plan.operands), smem.v, slot, plan.split)
    return State(acc, row_sum + new.row_sum, new.row_max, weight_max)
