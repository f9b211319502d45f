"""The order of work tiles of keys where there are segment ids: only the GPU knows how many query
tiles each of them meets.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn.kernels.attention import tile_lists
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.flash_bwd.key_tiles import key_tile
from pallas_attn.kernels.flash_bwd.work_order import WorkOrder, schedule
from pallas_attn.kernels.flash_fwd import tile_scheduler
from pallas_attn.kernels.lang.types import Operand


@functools.lru_cache(maxsize=64)
def dealt(order: WorkOrder) -> np.ndarray:
    """`work_order.schedule` of ranks: rank r of a head stands for its kv tile with the r-th most
    query tiles. Heads are dealt one after the other, forth and back over the blocks; of two heads
    that follow each other one the other way round, and each pair from another block on: what a
    block has more than the mean of one head it has less of others, whatever the lengths.
    """
    grid, heads, kv_tiles = order.grid, order.problem.kv_heads, order.tiling.kv_tiles
    pairs = max(heads // 2, 1)
    turn, place = np.divmod(np.arange(kv_tiles), grid)
    assigned: list[list[int]] = [[] for _ in range(grid)]
    for first in range(0, order.heads, order.l2_heads):
        group = np.arange(first, min(first + order.l2_heads, order.heads))
        batch, head = np.divmod(group, heads)
        shift = head // 2 * grid // pairs + batch * grid // (2 * pairs)
        back = (turn[:, None] + group) % 2 == 1
        block = (np.where(back, grid - 1 - place[:, None], place[:, None]) + shift) % grid
        codes = (group << order.tiling.code_bits) + np.arange(kv_tiles)[:, None]
        for n, code in zip(block.ravel().tolist(), codes.ravel().tolist(), strict=True):
            assigned[n].append(code)
    return tile_scheduler.table_of(assigned)


def go_by_rank(order: WorkOrder) -> bool:
    """Whether `schedule_by_rank` makes the schedule where there are segment ids."""
    return order.first_ranked_head < order.heads and order.grid < order.work_tiles


def schedule_by_rank(ctx: KernelContext) -> Operand:
    """`dealt`, with kv tiles in place of ranks; or `work_order.schedule`, with the heads that go by
    rank. Documents that are packed repeat: dealt in the order of keys a block would take the same
    keys of many of them, and those with early keys would finish last.
    """
    order, problem = ctx.plan.order, ctx.plan.problem
    bits, kv_tiles = order.tiling.code_bits, order.tiling.kv_tiles
    batch, heads = problem.batch, order.heads // problem.batch
    first = order.first_ranked_head
    table = jnp.asarray(schedule(order) if order.claims else dealt(order))
    rows = np.arange(batch, dtype=np.int32)[:, None] * heads << bits
    of_codes = jax.vmap(jax.vmap(lambda code: key_tile(ctx, code).steps))
    steps = of_codes(jnp.asarray(rows + np.arange(kv_tiles, dtype=np.int32)[None]))
    ranks = tile_lists.longest_first(steps)
    low, head = (1 << bits) - 1, table >> bits
    codes = (table & ~low) | ranks[head // heads, table & low]
    codes = jnp.where(head >= first, codes, table) if first else codes
    return jnp.concatenate([table[:, :1], codes[:, 1:]], axis=1)
