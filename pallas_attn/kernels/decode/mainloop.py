"""What a kv tile adds to the online softmax of a block's warps: its scores, made logits and masked,
its probabilities and the values that they weigh. Rows are packed as `mma_rowmajor.Split` says.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import softmax
from pallas_attn.kernels.decode.producer import Smem
from pallas_attn.kernels.decode.scheduler import Piece, Plan
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.mma import mma_rowmajor, mma_sync, mma_tf32

Array = Any
Scalar = Any

ROWS = threads.WARPS * mma_rowmajor.ROWS  # of the warps' matrices, one above the other


class State(NamedTuple):
    """An online softmax of every warp, carried from tile to tile.

    Over a quantised cache `acc` is a sum of values that are not multiplied by their scales. Their
    weights, probabilities times scales, have a top of their own, so that float16 holds them.
    """

    acc: Array  # [64, Hv]
    total: Array  # [64, PARTS]
    top: Array  # [64]
    peak: Array | None  # [64]: what acc is relative to; None: to top


def nothing(plan: Plan) -> State:
    """Of no key yet."""
    return State(
        mosaic.filled((ROWS, mma_rowmajor.accumulator_width(plan.problem.v_head_dim)), 0.0),
        mosaic.filled((ROWS, softmax.PARTIALS), 0.0),
        mosaic.filled((ROWS,), -jnp.inf),
        mosaic.filled((ROWS,), -jnp.inf) if plan.problem.quantized else None,
    )


def scores(plan: Plan, smem: Smem, queries: tuple[Any, Array | None], slot: Any) -> Array:
    """Of a tile of keys; `queries`: the rows, and what their scores are to be multiplied by."""
    q, units = queries
    if plan.wide:
        return mma_tf32.scores(q, smem.k, slot, plan.split)
    s = mma_rowmajor.scores(q, smem.k, slot, plan.split)
    if units is None:
        return s
    s = s * mma_rowmajor.number_of_each_key(smem.k_scale, slot, plan.split)
    return s * mosaic.broadcast_rows(units, s.shape)


def _positions(plan: Plan, piece: Piece, tile: Scalar) -> tuple[Any, Any]:
    """Of the queries and the keys of all warps' logits."""
    split, problem = plan.split, plan.problem
    shape = (ROWS, split.width)
    row, column = mosaic.positions(shape, 0, 0), mosaic.positions(shape, 1, 0)
    warp = row // mma_rowmajor.ROWS
    own = row % mma_rowmajor.ROWS
    key = tile * plan.tile + split.first_key(warp) + split.key(own, column)
    query = split.query(own)
    if plan.abreast == 1:
        query = split.row_block(warp) * mma_rowmajor.ROWS + query
    query = query + lax.rem(piece.head, jnp.int32(plan.chunks)) * plan.chunk_rows
    return piece.length - problem.q_len + token_of(plan, query), key


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


def masked(plan: Plan, piece: Piece, keys: tuple[Scalar, int], numbers: Any, positions: Any) -> Any:
    """Tiles of logits with -inf where a query does not see a key. `keys`: (the first, how many);
    `positions()` of queries and keys are asked for where some are not seen.
    """
    mask, begin, (start, count) = plan.problem.mask, piece.length - plan.problem.q_len, keys
    lo, hi = mask.kv_full_range(begin, piece.length, piece.length)

    def hidden():
        query, key = positions()
        allowed = mask.allows(query, key, piece.length)
        return jax.tree.map(lambda x: jnp.where(allowed, x, -jnp.inf), numbers)

    return lax.cond((start >= lo) & (start + count <= hi), lambda: numbers, hidden)


def logits(plan: Plan, piece: Piece, tile: Scalar, given: tuple) -> tuple[Array, Array | None]:
    """(scores, the scales of the values or None) -> logits, in log2 units if `plan.unit_of_logits`
    is None; and the same of probabilities times scales, in log2 units.
    """
    s, scales = given
    s, weights = logits_of_scores(plan, s), None
    if scales is not None:
        s = s if plan.unit_of_logits is None else s * plan.unit_of_logits
        weights = s + jnp.log2(scales)
    keys = tile * plan.tile, plan.tile
    return masked(plan, piece, keys, (s, weights), lambda: _positions(plan, piece, tile))


def attend(plan: Plan, smem: Smem, piece: Piece, at: tuple, carried: tuple) -> State:
    """One tile of keys, from its scores on."""
    (tile, slot), (s, state) = at, carried
    scales = (
        mma_rowmajor.number_of_each_key(smem.v_scale, slot, plan.split)
        if plan.problem.quantized
        else None
    )
    given, weights = logits(plan, piece, tile, (s, scales))
    unit = None if plan.problem.quantized else plan.unit_of_logits
    join = functools.partial(mma_sync.reduce_folded, op="maximum") if plan.folded else None
    new = softmax.step(given, unit, state.top, guarded=True, join=join)
    if weights is None:
        acc, total = softmax.rescaled(new, (state.acc, state.total))
        p, peak = new.p, None
    else:
        total = state.total * mosaic.broadcast_rows(new.rescale, state.total.shape)
        heavy = softmax.step(weights, None, state.peak, guarded=True)
        acc = softmax.rescaled(heavy, state.acc)
        p, peak = heavy.p, heavy.row_max
    if plan.wide:
        acc = mma_tf32.matmul_add(acc, p, smem.v, slot, plan.split)
    else:
        acc = mma_rowmajor.matmul_add(acc, p.astype(plan.operands), smem.v, slot, plan.split)
    return State(acc, total + new.row_sum, new.row_max, peak)
