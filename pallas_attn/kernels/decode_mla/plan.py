"""What is static in a launch of `mla_sm90`, and how its blocks share the work: those that have
other rows of the same queries lie beside each other and take the same keys.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import tma_operands
from pallas_attn.kernels.decode.mainloop import ROWS
from pallas_attn.kernels.decode.scheduler import Plan
from pallas_attn.kernels.decode_mla import combine as mla_combine
from pallas_attn.kernels.decode_mla.producer import WIDE

Scalar = Any

COMPUTING = 2  # warpgroups that have columns of the output
SLOTS = 2  # tiles whose probabilities there is room for


class LatentPlan(Plan):
    """Rows are always taken 64 at a time: what wgmma multiplies."""

    @property
    def row_blocks(self) -> int:
        return ROWS // 16

    @property
    def padded(self) -> int:
        """Query rows of a sequence as they lie in memory: TMA reads from a multiple of 8 only."""
        return tma_operands.round_up(self.rows, 8)

    @property
    def half(self) -> int:
        """Columns of V that a warpgroup has."""
        return self.problem.v_head_dim // COMPUTING

    @property
    def part(self) -> int:
        """Of them, those of one matmul: ptxas gives one no more than 128 registers in all."""
        return min(self.half, 2 * WIDE) if self.half % (2 * WIDE) == 0 else WIDE

    @property
    def rest(self) -> int:
        """Columns of K that are not of V."""
        return self.problem.head_dim - self.problem.v_head_dim

    @property
    def each(self) -> int:
        """Blocks of a tile's columns that a warpgroup has."""
        return self.half // self.part

    @property
    def ring(self) -> int:
        """Blocks that a warpgroup has room for: at least two tiles', and the queries'."""
        return max(self.config.stages, 2 * self.each + 1)

    @property
    def q_pieces(self) -> int:
        """Of a row of q, what lies in shared memory: columns of each warpgroup, and the rest."""
        return COMPUTING * (self.each > 1) + bool(self.rest)

    @property
    def beside(self) -> int:
        """Blocks that read the same keys at the same time, each for other rows of query."""
        return math.gcd(self.chunks, self.config.ctas)

    @property
    def scores_first(self) -> bool:
        """Whether the values of a tile wait for the scores of the next, and tiles are brought to L2
        before they are asked for. Faster where tensor cores have most to do and a tile is one copy
        a block of columns, as of 128 heads; slower of 64, which wait for memory, and over small
        pages.
        """
        return self.beside > 1 and self.page_rows == self.tile

    @property
    def line(self) -> "Line":
        return Line(self.problem, self.config)

    @property
    def ctas(self) -> int:
        return self.line.ctas * self.beside

    @property
    def slots_a_block(self) -> int:
        """As far as parts of a row lie apart."""
        return (1 if self.problem.batch_invariant else 2) * self.beside

    @property
    def slots(self) -> int:
        if self.problem.batch_invariant:
            return super().slots
        return self.slots_a_block * self.line.ctas

    def tile_of(self, slot: Scalar, wg: Scalar, n: Scalar) -> Scalar:
        """Where a part's tile lies: the n-th of those of a warpgroup."""
        return (slot * COMPUTING + wg) * self.each + n


class Line(Plan):
    """How units are dealt: a block stands for all that lie beside it."""

    row_blocks = ROWS // 16

    @property
    def beside(self) -> int:
        return math.gcd(self.chunks, self.config.ctas)

    @property
    def heads(self) -> int:
        return self.chunks // self.beside

    @property
    def ctas(self) -> int:
        units = self.heads * sum(
            max(1, -(-capacity // (self.tile * self.unit))) for capacity in self.problem.capacities
        )
        splits = mla_combine.worth(self, self.most_tiles)
        most = min(units, self.problem.sequences * self.heads * splits)
        return max(1, min(self.config.ctas // self.beside, most))


class Place(NamedTuple):
    """Which of the line's blocks this is, and which of those beside each other."""

    cta: Scalar
    which: Scalar


def place_of(plan: LatentPlan, cta: Scalar) -> Place:
    beside = jnp.int32(plan.beside)
    return Place(lax.div(cta, beside), lax.rem(cta, beside))
