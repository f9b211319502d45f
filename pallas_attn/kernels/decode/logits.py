"""Scores made logits, and the mask, for rows that are packed as `mma_rowmajor.Split` says."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import softmax
from pallas_attn.kernels.decode.scheduler import Piece, Plan
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.mma import mma_rowmajor

Array = Any
Scalar = Any

ROWS = threads.WARPS * mma_rowmajor.ROWS


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
    return piece.length - problem.q_len + divided(plan, query), key


def divided(plan: Plan, query: Array) -> Array:
    """query // group, by multiplication: LLVM makes a division of small numbers one of 16 bits,
    which that of JAX 0.12 then does not know for this GPU.
    """
    group, bits, rows = plan.group, 20, plan.chunks * plan.chunk_rows
    factor = -(-(2**bits) // group)
    if group & (group - 1) == 0 or rows * group >= 2**bits or rows * factor >= 2**31:
        return query // group
    return query * factor // 2**bits


def of_scores(plan: Plan, s: Array) -> Array:
    """Logits in log2 units if `plan.unit_of_logits` is None; else the scores, of that unit."""
    if plan.unit_of_logits is not None:
        return s
    s = s * plan.problem.scale
    if plan.problem.softcap is not None:
        s = softmax.capped(s, plan.problem.softcap)
    return s * softmax.LOG2_E


def seen(plan: Plan, piece: Piece, keys: tuple[Scalar, int], numbers: Any, positions: Any) -> Any:
    """Tiles of logits with -inf where a query does not see a key. `keys`: (the first, how many);
    `positions()` of queries and keys are asked for where some are not seen.
    """
    mask, begin, (start, count) = plan.problem.mask, piece.length - plan.problem.q_len, keys
    lo, hi = mask.kv_full_range(begin, piece.length, piece.length)

    def masked():
        query, key = positions()
        allowed = mask.allows(query, key, piece.length)
        return jax.tree.map(lambda x: jnp.where(allowed, x, -jnp.inf), numbers)

    return lax.cond((start >= lo) & (start + count <= hi), lambda: numbers, masked)


def logits(plan: Plan, piece: Piece, tile: Scalar, given: tuple) -> tuple[Array, Array | None]:
    """(scores, the scales of the values or None) -> logits, in log2 units if `plan.unit_of_logits`
    is None; and the same of probabilities times scales, in log2 units.
    """
    s, scales = given
    s, weights = of_scores(plan, s), None
    if scales is not None:
        s = s if plan.unit_of_logits is None else s * plan.unit_of_logits
        weights = s + jnp.log2(scales)
    keys = tile * plan.tile, plan.tile
    return seen(plan, piece, keys, (s, weights), lambda: _positions(plan, piece, tile))
