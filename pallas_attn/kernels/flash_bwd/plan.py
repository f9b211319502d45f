"""Static values of the backward kernels over keys, and how rows lie in shared memory on Hopper."""

import dataclasses
import functools
from typing import Any, NamedTuple

from pallas_attn._call.problem import AttentionProblem
from pallas_attn.kernels.attention import tma_operands
from pallas_attn.kernels.attention.logits import LogitRules
from pallas_attn.kernels.attention.tiles import ROWS
from pallas_attn.kernels.attention.tma_operands import OperandFormat
from pallas_attn.kernels.flash_bwd.work_order import KeyTiling, WorkOrder
from pallas_attn.kernels.mma import wgmma_float32


@dataclasses.dataclass(frozen=True)
class KeyPlan:
    """A problem and a Config, and the values that follow from them before anything runs."""

    problem: AttentionProblem
    config: Any  # the kernel's Config
    order: WorkOrder
    format: Any  # `RowFormats`, or `sm80_common.MmaFormat`
    bias_tiles: Any = None  # `score_tiles.BiasOfKeys`, where `sm90_fused` reads a bias by tiles
    dq: Any = None  # how `sm90_fused` adds up dq: see `dq_sum`; None: not at all
    dq_widths: tuple[int, ...] = ()  # columns of dQ that a warpgroup makes, of each accumulator
    key_sums: tuple[Any, ...] = ()  # `aux_sums.KeySum`s that `sm90_fused` makes
    rows_apart: Any = None  # `batch_rows.RowsApart`, where a tile is several batch rows

    @property
    def tiling(self) -> KeyTiling:
        return self.order.tiling

    def has(self, name: str) -> bool:
        return name in self.problem.arrays

    @property
    def ds_slots(self) -> int:
        """Places for dS in shared memory; beside tiles of a bias no more than are needed."""
        return 1 if self.bias_tiles and self.dq is None else 2 * self.config.dq_lag

    @functools.cached_property
    def presets(self) -> bool:
        """Whether S begins with -lse, in its own units, and dP with -delta: what an accumulator
        begins with is read while other matmuls run, and subtracted by no instruction. Where logits
        are scores times a factor; query tiles of 128 gain nothing by it.
        """
        return self.dq is not None and self.dq.by_columns and self.logit_rules.unit is not None

    @functools.cached_property
    def negated_unit(self) -> float | None:
        """The unit in which row statistics are made as accumulators begin with them: where S and dP
        do (`presets`) and nothing else reads them.
        """
        problem = self.problem
        others = problem.bias_shape or problem.learned or "sinks" in problem.arrays
        return self.logit_rules.unit if self.presets and not others else None

    @functools.cached_property
    def exact(self) -> bool:
        """Whether all products are to have float32's accuracy."""
        is_float32 = self.problem.dtype == "float32"
        return is_float32 and wgmma_float32.is_exact(self.problem)

    @functools.cached_property
    def logit_rules(self) -> LogitRules:
        """Exact float32 subtracts the lse in natural units: two numbers multiplied by log2(e) first
        would each lose a rounding of their own size, half of what float32 loses in all.
        """
        return LogitRules.of(self.problem, self.tiling.block_kv, natural=self.exact)


def is_wide(problem: AttentionProblem) -> bool:
    """Whether dK and dV of 64 keys are too much for one warpgroup, or k and v of 128 for shared
    memory.
    """
    return max(problem.head_dim, problem.v_head_dim) > 128 or problem.dtype == "float32"


class RowFormats(NamedTuple):
    """How rows lie in shared memory on Hopper."""

    qk: OperandFormat
    v: OperandFormat  # dO too
    halves: bool = False  # q and k lie in two panels: each warpgroup adds to one of dQ

    @property
    def widths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Columns of q and k in shared memory, and of v, of each panel."""
        return self.qk.panels or (self.qk.width,), self.v.panels or (self.v.width,)

    @classmethod
    def of(cls, problem: AttentionProblem, block_q: int, halves: bool = False) -> "RowFormats":
        """Query tiles of `block_q` rows are multiplied by whole swizzles too. `halves`: q and k
        have at least two panels.
        """
        if tma_operands.takes_panels(problem):
            dims = problem.head_dim, problem.v_head_dim
            qk, v = [tma_operands.in_panels(problem.dtype, dim) for dim in dims]
            if halves and len(qk.panels) == 1:
                width = max(qk.width // 2, 16)
                qk = qk._replace(panels=(width, width), width=2 * width, swizzle=2 * width)
            return cls(qk, v, halves)
        most = tma_operands.swizzle_of(2 * block_q)
        formats = tma_operands.formats_of(problem, ROWS)
        qk, v = [x._replace(swizzle=min(x.swizzle, most)) for x in formats]
        return cls(qk, v)
