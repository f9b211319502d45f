"""Schedules of batch rows that stand at different offsets: the chunks of a sequence that several
GPUs have.

Offsets arrive at run time, but which ones may come is known (`AttentionProblem.offsets`). So a
table is made for each GPU, and each picks its own.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn.kernels.lang.types import Operand

MOST_UNEVEN = 1.001  # time of the last block to end, over the mean
EXCHANGED = 24  # the last work tiles of a block, of which one may change places


def nearest(
    make: Callable[[Any, tuple[int, ...]], np.ndarray], plan: Any, q_offset: Operand
) -> jax.Array:
    """The table, among those of all GPUs, for the offsets nearest to `q_offset`: see
    `tile_scheduler.table`.
    """
    known = plan.problem.offsets
    tables = [make(plan, offsets) for offsets in known]
    width = max(table.shape[1] for table in tables)
    padded = np.stack([np.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in tables])
    away = jnp.abs(jnp.asarray(known, jnp.int32) - q_offset[None, : len(known[0])]).sum(axis=1)
    return lax.dynamic_index_in_dim(jnp.asarray(padded), away.argmin(), keepdims=False)


def join_groups(
    codes: list[np.ndarray], costs: list[np.ndarray], kinds: int
) -> tuple[np.ndarray, np.ndarray]:
    """L2 groups of work tiles as one list, and their costs. Where batch rows are of several kinds,
    the most expensive come first: cheap ones fill the time that is left at the end.
    """
    if kinds > 1:
        orders = [np.argsort(-cost, kind="stable") for cost in costs]
        codes = [code[order] for code, order in zip(codes, orders, strict=True)]
        costs = [cost[order] for cost, order in zip(costs, orders, strict=True)]
        groups = sorted(range(len(codes)), key=lambda n: -costs[n][0])
        codes, costs = [codes[n] for n in groups], [costs[n] for n in groups]
    return np.concatenate(codes), np.concatenate(costs)


def rebalance(assigned: list[list[int]], costs: np.ndarray, ends: dict[int, float]) -> None:
    """The block that ends last gives one of its last work tiles to another, for a cheaper one or
    for nothing, until all end at nearly the same time. Blocks take theirs in the same order.
    """
    mean = sum(ends.values()) / len(ends)
    costs = np.append(costs, 0.0)  # the number -1 is no work tile
    for _ in range(4 * len(assigned)):
        last = max(ends, key=ends.__getitem__)
        ours, others = np.array(assigned[last][-EXCHANGED:], int), [x for x in ends if x != last]
        offers = [(block, n) for block in others for n in (*assigned[block][-EXCHANGED:], -1)]
        if ends[last] <= MOST_UNEVEN * mean or not (ours.size and offers):
            return
        blocks, theirs = np.array(offers).T
        gains = costs[ours][:, None] - costs[theirs][None]
        later = np.maximum(ends[last] - gains, np.array([ends[x] for x in blocks])[None] + gains)
        mine, other = np.unravel_index(later.argmin(), later.shape)
        if later[mine, other] >= ends[last]:
            return
        away, here, block = int(ours[mine]), int(theirs[other]), int(blocks[other])
        assigned[last] = sorted({*assigned[last], here} - {away, -1})
        assigned[block] = sorted({*assigned[block], away} - {here})
        gain = float(gains[mine, other])
        ends[last], ends[block] = ends[last] - gain, ends[block] + gain
