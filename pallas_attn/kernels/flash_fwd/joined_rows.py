"""Last work tiles that several heads share.

Where the last rows of a head fill few of a work tile's warpgroups, the other warpgroups take those
of the next heads that share K and V: all see the same kv tiles, and a step takes little less time
where warpgroups have no rows. On an H200 8 x 1024 causal rows of 32:8 heads take 0.117 ms, not
0.126.
"""

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionProblem
from pallas_attn.kernels.attention.tiles import ROWS, QueryTiling, WorkTile
from pallas_attn.kernels.flash_fwd.tile_scheduler import QueryPlan
from pallas_attn.kernels.lang.types import Index


def last_warpgroups(tiling: QueryTiling) -> int:
    """Warpgroups that have rows in a head's last work tile."""
    return pl.cdiv(tiling.q_len - (tiling.q_tiles - 1) * tiling.tile_rows, ROWS)


def heads_that_join(problem: AttentionProblem, tiling: QueryTiling) -> int:
    """Heads of a group whose last rows are one work tile: as many as it has room for."""
    if problem.mask_program is not None or "q_segment_ids" in problem.arrays:
        return 1
    room = tiling.tile_rows // ROWS // last_warpgroups(tiling)
    return pl.cdiv(problem.group, pl.cdiv(problem.group, room))


def rows_of_warpgroup(plan: QueryPlan, tile: WorkTile, wg: Index) -> tuple[WorkTile, Index]:
    """`tile_scheduler.rows_of_warpgroup`: in the last work tile those of the next heads."""
    tiling, group = plan.tiling, plan.problem.group
    row, each = tile.row + wg * ROWS, jnp.int32(last_warpgroups(tiling))
    further = lax.div(wg + 0 * tile.row, each)
    within = lax.rem(tile.head, jnp.int32(group)) + further
    last = tile.row == (tiling.q_tiles - 1) * tiling.tile_rows
    joined = last & (further < plan.order.joined_heads) & (within < group)
    head = jnp.where(joined, tile.head + further, tile.head)
    return tile._replace(head=head), row - jnp.where(joined, further * each * ROWS, 0)
