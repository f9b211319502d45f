"""What the portable forward has in shared memory, and how a block asks for it."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention.score_mod import Refs, Rows


class Smem(NamedTuple):
    q: Any  # [64 * row_blocks, ..]
    k: Any  # [stages * block_kv, ..]
    v: Any  # [stages * block_kv, ..]
    p: Any = None  # [64 * row_blocks, ..]; where warps stand two by two
    rows: Any = None  # float32[2, 64 * row_blocks]: what either warp of a row says of it


def rows_of_q(plan: Any, refs: Refs, smem: Smem, rows: Rows) -> tuple[Any, ...]:
    live = plan.problem.q_len - rows.row
    at = (rows.tile.batch, rows.tile.head, rows.row, live, rows.wg * plan.own_rows)
    width = plan.parts_of_numbers * plan.k_width
    return (smem.q, refs.q), at, (plan.own_rows, refs.q.shape, width, plan.groups == 1)


def keys(plan: Any, refs: Refs, smem: Smem, rows: Rows, t: Any, which: str) -> Any:
    """The copy of a warpgroup's part of key tile t of K or V; of nothing but zeros where there is
    no such tile.
    """
    block = plan.config.block_kv
    part = block // plan.groups
    begin = rows.wg * part
    ref, tile = getattr(refs, which), rows.tile
    live = jnp.where(t >= rows.span.lo, tile.kv_len - t * block, 0)
    head = lax.div(tile.head, jnp.int32(plan.problem.group))
    slot = slot_of(plan, rows, t)
    at = (tile.batch, head, t * block + begin, live - begin, slot + begin)
    width = plan.k_width if which == "k" else plan.v_width
    width *= plan.parts_of_numbers
    to = getattr(smem, which)
    fixed = plan.groups == plan.config.stages == 1
    return (to, ref), at, (part, ref.shape, width, fixed)


def slot_of(plan: Any, rows: Rows, t: Any) -> Any:
    """The row of shared memory at which key tile t begins."""
    config = plan.config
    if config.stages == 1:
        return jnp.int32(0)
    return lax.rem(rows.span.hi - 1 - t, jnp.int32(config.stages)) * config.block_kv
