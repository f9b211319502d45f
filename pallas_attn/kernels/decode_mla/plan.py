"""What is static in a launch of `decode_mla.sm90`, and how its blocks share the work: neighbouring
blocks have different rows of the same queries and read the same keys.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import tma_operands
from pallas_attn.kernels.decode.mainloop import ROWS
from pallas_attn.kernels.decode.scheduler import Plan
from pallas_attn.kernels.decode_mla import combine_latent as mla_combine
from pallas_attn.kernels.decode_mla.producer import WIDTH

Scalar = Any

V_WARPGROUPS = 2  # that have columns of the output
P_SLOTS = 2  # tiles whose probabilities there is room for


class LatentPlan(Plan):
    """Query rows are always taken 64 at a time: what wgmma multiplies."""

    @property
    def row_blocks(self) -> int:
        return ROWS // 16

    @property
    def padded_rows(self) -> int:
        """Query rows of a sequence as they lie in memory: TMA reads from a multiple of 8 only."""
        return tma_operands.round_up(self.rows, 8)

    @property
    def v_columns(self) -> int:
        """Columns of V that a warpgroup has."""
        return self.problem.v_head_dim // V_WARPGROUPS

    @property
    def block_columns(self) -> int:
        """Of them, those of one matmul: ptxas gives one no more than 128 registers in all."""
        return min(self.v_columns, 2 * WIDTH) if self.v_columns % (2 * WIDTH) == 0 else WIDTH

    @property
    def rope_columns(self) -> int:
        """Columns of K that are not of V."""
        return self.problem.head_dim - self.problem.v_head_dim

    @property
    def blocks_a_tile(self) -> int:
        """Blocks of a tile's columns that a warpgroup has."""
        return self.v_columns // self.block_columns

    @property
    def ring(self) -> int:
        """Blocks that a warpgroup has room for: at least two tiles', and the queries'."""
        return max(self.config.stages, 2 * self.blocks_a_tile + 1)

    @property
    def q_copies(self) -> int:
        """Of q to shared memory where it stays: columns of each warpgroup, and those of rope."""
        return V_WARPGROUPS * (self.blocks_a_tile > 1) + bool(self.rope_columns)

    @property
    def neighbours(self) -> int:
        """Blocks that read the same keys at the same time, each for other query rows."""
        return math.gcd(self.chunks, self.config.grid)

    @property
    def scores_first(self) -> bool:
        """Whether the values of a tile wait for the scores of the next, and tiles are prefetched to
        L2. Faster where tensor cores have most to do and a tile is one copy a block of columns, as
        with 128 heads; slower with 64, which wait for memory, and over small pages.
        """
        return self.neighbours > 1 and self.page_rows == self.tile

    @property
    def groups(self) -> "GroupPlan":
        return GroupPlan(self.problem, self.config)

    @property
    def grid(self) -> int:
        return self.groups.grid * self.neighbours

    @property
    def partials_a_block(self) -> int:
        """How far apart the partials of a row lie."""
        return (1 if self.problem.batch_invariant else 2) * self.neighbours

    @property
    def partials(self) -> int:
        if self.problem.batch_invariant:
            return super().partials
        return self.partials_a_block * self.groups.grid

    def partial_block(self, partial: Scalar, wg: Scalar, n: Scalar) -> Scalar:
        """Where a block of columns of a partial lies: the n-th of those of a warpgroup."""
        return (partial * V_WARPGROUPS + wg) * self.blocks_a_tile + n


class GroupPlan(Plan):
    """What the scheduler works with: one of its blocks stands for a group of neighbours."""

    row_blocks = ROWS // 16

    @property
    def neighbours(self) -> int:
        return math.gcd(self.chunks, self.config.grid)

    @property
    def heads(self) -> int:
        return self.chunks // self.neighbours

    @property
    def grid(self) -> int:
        unit = self.tile * self.tiles_a_unit
        units = self.heads * sum(max(1, -(-rows // unit)) for rows in self.problem.capacities)
        splits = mla_combine.best_splits(self, self.most_tiles)
        most = min(units, self.problem.sequences * self.heads * splits)
        return max(1, min(self.config.grid // self.neighbours, most))


class Member(NamedTuple):
    """Which of the groups a block belongs to, and its number among the neighbours."""

    group: Scalar
    number: Scalar


def member_of(plan: LatentPlan, block_id: Scalar) -> Member:
    neighbours = jnp.int32(plan.neighbours)
    return Member(lax.div(block_id, neighbours), lax.rem(block_id, neighbours))
