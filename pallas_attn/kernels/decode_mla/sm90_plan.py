"""Static values of `decode_mla.sm90` beside those of decode's plan.

Columns are taken in blocks. The blocks of the grid are in groups of neighbours, which have
different rows of the same queries and read the same keys.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import DecodeProblem
from pallas_attn.kernels.decode.plan import ROWS_OF_WARPS as ROWS
from pallas_attn.kernels.decode.plan import Plan, plan_with, query_rows, units_of_full
from pallas_attn.kernels.decode_mla import combine_latent, row_gathers
from pallas_attn.kernels.decode_mla.producer import WIDTH
from pallas_attn.kernels.decode_mla.sm90_common import V_WARPGROUPS, tiling_of
from pallas_attn.kernels.lang.types import Index, KernelConfig

APART = 4  # splits of a row from which on `combine_apart` combines its partials


@functools.lru_cache(maxsize=256)
def plan_of(problem: DecodeProblem, config: KernelConfig) -> Plan:
    """Query rows are always taken 64 at a time, which wgmma multiplies."""
    plan = plan_with(problem, tiling_of(config), query_rows(problem, ROWS, ROWS // 16))
    plan = row_gathers.with_whole_tiles(plan)
    together = neighbours(plan)
    heads = plan.queries.chunks // together
    lines = problem.sequences * heads
    apart = config.grid // together >= APART * lines
    splits = combine_latent.best_splits(plan, plan.keys.most_tiles, apart)
    most = min(heads * units_of_full(problem, plan.keys), lines * splits)
    groups = max(1, min(config.grid // together, most))
    stride = plan.partials_a_block * together  # how far apart the partials of a row lie
    return dataclasses.replace(
        plan,
        grid=groups * together,
        partials_a_block=stride,
        partials=plan.partials if problem.batch_invariant else stride * groups,
    )


def combined_apart(plan: Plan) -> bool:
    """Whether partials are combined by a launch of their own: where most rows have many. Elsewhere
    the last block of a row combines them, always in one way where results may not depend on the
    other sequences.
    """
    together = neighbours(plan)
    lines = plan.problem.sequences * plan.queries.chunks // together
    return not plan.problem.batch_invariant and plan.grid // together >= APART * lines


def neighbours(plan: Plan) -> int:
    """Blocks that read the same keys at the same time, each for other query rows."""
    return math.gcd(plan.queries.chunks, plan.tiling.grid)


def groups_of(plan: Plan) -> Plan:
    """The plan of the scheduler, each of whose blocks stands for a group."""
    together = neighbours(plan)
    heads = plan.queries.chunks // together
    return dataclasses.replace(plan, heads=heads, grid=plan.grid // together)


class Member(NamedTuple):
    """The group of a block, and its number among the neighbours."""

    group: Index
    number: Index


def member_of(plan: Plan, block_id: Index) -> Member:
    together = jnp.int32(neighbours(plan))
    return Member(lax.div(block_id, together), lax.rem(block_id, together))


def scores_first(plan: Plan) -> bool:
    """Whether the values of a tile wait for the scores of the next. Faster where tensor cores have
    most to do and a tile is one copy a block of columns, as with 128 heads; slower with 64, which
    wait for memory, and over small pages. Tiles are prefetched to L2 there.
    """
    return neighbours(plan) > 1 and plan.keys.page_rows == plan.keys.tile


class Columns(NamedTuple):
    """Columns of a row, of which each warpgroup that multiplies values has some, in blocks."""

    v: int  # columns of V that a warpgroup has
    block: int  # columns of one matmul: ptxas gives one no more than 128 registers in all
    rope: int  # columns of K that are not of V
    blocks: int  # blocks of a tile that a warpgroup has
    ring: int  # blocks that a warpgroup has room for: at least two tiles', and the queries'
    q_copies: int  # copies of q to shared memory where it stays: of each warpgroup, and of rope


@functools.lru_cache(maxsize=256)
def columns_of(plan: Plan) -> Columns:
    v = plan.problem.v_head_dim // V_WARPGROUPS
    block = min(v, 2 * WIDTH) if v % (2 * WIDTH) == 0 else WIDTH
    rope, blocks = plan.problem.head_dim - plan.problem.v_head_dim, v // block
    ring = max(plan.tiling.stages, 2 * blocks + 1)
    return Columns(v, block, rope, blocks, ring, V_WARPGROUPS * (blocks > 1) + bool(rope))


def partial_block(plan: Plan, partial: Index, wg: Index, n: Index) -> Index:
    """The place of a block of columns of a partial: the n-th of those of a warpgroup."""
    return (partial * V_WARPGROUPS + wg) * columns_of(plan).blocks + n
