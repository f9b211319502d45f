"""The Hopper backward by two kernels, seven matmuls a tile in all: one for dk and dv, then
`sm90_dq`. Nothing is added up in global memory, so bits repeat.

| problem | dk and dv |
|---|---|
| head dims above 128, or float32 | `sm90_dkdv` |
| a table of blocks (`attention/block_tables.py`), small ones or of long sequences | `sm90_dkdv` |
| short sequences, and others where `sm90` is slower or its bits do not repeat | `sm90_fused` |

Both divide the steps of few work tiles over more blocks (`step_parts`). After them `sm90_dbias`
makes the gradient of a bias, and the sums for the gradients of a score function's arrays that they
have not made (`aux_sums`).
"""

import dataclasses
from typing import Any

from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import block_tables, score_tiles, tiles, tma_operands
from pallas_attn.kernels.attention.tile_scheduler import QueryPlan
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.flash_bwd import (
    costs,
    operands,
    sm90,
    sm90_dbias,
    sm90_dkdv,
    sm90_dq,
    sm90_fused,
    statistics,
    step_parts,
)
from pallas_attn.kernels.flash_bwd.operands import Gradients, Residuals
from pallas_attn.kernels.flash_bwd.plan import KeyPlan, RowFormats, is_wide
from pallas_attn.kernels.flash_bwd.work_order import KeyTiling, WorkOrder
from pallas_attn.kernels.lang.config import check
from pallas_attn.kernels.lang.mosaic import BARRIERS, MULTIPROCESSORS, SMEM_LIMIT

ROWS = tiles.ROWS


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning only: the result is the same up to rounding."""

    block_q: int = 64
    stages: int = 2
    dq_block_kv: int = 64  # keys of a tile of `sm90_dq`
    dq_stages: int = 2  # kv tiles of its ring
    dq_warpgroups: int = 2  # its consumers
    parts: int = 1  # into which the steps of a work tile of keys are divided: see `step_parts`
    grid: int = MULTIPROCESSORS  # blocks; 0: one a work tile
    l2_heads: int = 0  # kv heads whose work tiles are taken together; 0: see WorkOrder.l2_heads
    lockstep: bool = False  # blocks are at the same query tile, where `lockstep` applies

    def __post_init__(self) -> None:
        check(
            self,
            block_q=(self.block_q in (16, 32, 64, 128), "16, 32, 64 or 128"),
            stages=(self.stages >= 2, "at least 2"),
            parts=(1 <= self.parts <= step_parts.MOST, f"from 1 to {step_parts.MOST}"),
            l2_heads=(self.l2_heads >= 0, "at least 0"),
            grid=(self.grid >= 0, "at least 0"),
            dq_block_kv=(self.dq_block_kv in (32, 64, 128), "32, 64 or 128"),
            dq_stages=(self.dq_stages >= 2, "at least 2"),
            dq_warpgroups=(self.dq_warpgroups in (1, 2, 3), "1, 2 or 3"),
        )

    @classmethod
    def default(cls, problem: AttentionProblem) -> "Config":
        """The Config of a problem that nobody tuned."""
        if is_wide(problem):
            wide = _with_dq_warpgroups(problem, _fitting(problem, cls()))
            return _in_parts_and_order(problem, wide)
        if sm90.has_block_table(problem):
            heads = block_tables.heads_of_tile(problem, 2)
            return _in_parts(problem, _fitting(problem, cls(dq_warpgroups=heads)))
        narrow = max(problem.head_dim, problem.v_head_dim) <= 64
        config = cls(128, dq_stages=4, dq_warpgroups=3) if narrow else cls(dq_stages=3)
        return _in_parts_and_order(problem, _with_dq_warpgroups(problem, config))


def _with_dq_warpgroups(problem: AttentionProblem, config: Config) -> Config:
    """`config`, with fewer query rows in a work tile of dQ where blocks would have none."""
    if problem.dtype == "float32":
        return config
    count = costs.dq_warpgroups(problem, config.dq_warpgroups)
    return dataclasses.replace(config, dq_warpgroups=count)


def _in_parts(problem: AttentionProblem, config: Config) -> Config:
    """`config`, with the steps of few work tiles divided over more blocks."""
    parts = costs.parts(plan_of(problem, config).order, adds_dq=False)
    return dataclasses.replace(config, parts=parts)


def _in_parts_and_order(problem: AttentionProblem, config: Config) -> Config:
    """`config` in parts, or, without them, in lockstep where L2 does not hold a head's rows."""
    order = plan_of(problem, dataclasses.replace(config, lockstep=True)).order
    parts, lockstep, _ = costs.choice(order, adds_dq=False)
    return dataclasses.replace(config, parts=parts, lockstep=lockstep)


# Tiles of `sm90_dkdv` and `sm90_dq`, the best first.
_WIDE_TILES: list[dict[str, Any]] = [{"stages": stages} for stages in (4, 3, 2)]
_WIDE_DQ_TILES: list[dict[str, Any]] = [{"dq_stages": stages} for stages in (3, 2)]
_FLOAT32_TILES: list[dict[str, Any]] = [
    {"block_q": block, "stages": stages}
    for block, stages in ((64, 3), (128, 2), (64, 2), (32, 2), (16, 2))
]
_FLOAT32_DQ_TILES: list[dict[str, Any]] = [
    {"dq_warpgroups": warpgroups, "dq_block_kv": block, "dq_stages": stages}
    for warpgroups, block, stages in ((2, 64, 3), (2, 64, 2), (2, 32, 2), (1, 32, 2))
]


def _fitting(problem: AttentionProblem, config: Config) -> Config:
    """The first tiles of each kernel that fit."""
    is_float32 = problem.dtype == "float32"
    for sizes in _FLOAT32_TILES if is_float32 else _WIDE_TILES:
        config = dataclasses.replace(config, **sizes)
        if sm90_dkdv.buffer_bytes(plan_of(problem, config)) + BARRIERS <= SMEM_LIMIT:
            break
    for sizes in _FLOAT32_DQ_TILES if is_float32 else _WIDE_DQ_TILES:
        config = dataclasses.replace(config, **sizes)
        if sm90_dq.buffer_bytes(dq_plan(problem, config)) + BARRIERS <= SMEM_LIMIT:
            break
    return config


# ---- static values ------------------------------------------------------------------------------


def by_64_keys(problem: AttentionProblem) -> bool:
    """Whether `sm90_dkdv` makes dk and dv."""
    return is_wide(problem) or sm90.has_block_table(problem)


def _check_tile(problem: AttentionProblem, name: str, size: int) -> None:
    """Raises the ValueError for a tile that wgmma cannot multiply by."""
    if problem.dtype != "float32" and size < ROWS:
        raise ValueError(f"Config.{name} must be at least {ROWS} of 16-bit numbers, got {size}")


def plan_of(problem: AttentionProblem, config: Config) -> KeyPlan:
    """The plan of the kernel that makes dk and dv."""
    _check_tile(problem, "block_q", config.block_q)
    keys = sm90_dkdv.KEYS if by_64_keys(problem) else sm90_fused.KEYS
    tiling = KeyTiling(problem, keys, config.block_q)
    locked = config.lockstep and tiling.allows_lockstep
    order = WorkOrder(tiling, config.grid, config.l2_heads, locked, parts=config.parts)
    if not by_64_keys(problem):
        return sm90_fused.plan_of(sm90_fused.Tuning(config.block_q, config.stages), order)
    return KeyPlan(problem, config, order, RowFormats.of(problem, config.block_q))


def dq_plan(problem: AttentionProblem, config: Config) -> QueryPlan:
    """The plan of `sm90_dq`."""
    _check_tile(problem, "dq_block_kv", config.dq_block_kv)
    sizes = config.dq_warpgroups, config.dq_block_kv, config.dq_stages, config.grid
    plan = QueryPlan.of(problem, sm90_dq.DqConfig(*sizes), (config.grid, 0))
    plan = dataclasses.replace(plan, panels=tma_operands.takes_panels(problem))
    if sm90.has_block_table(problem):
        plan = block_tables.with_heads(plan)
    bias_and_mask = score_tiles.of_problem(problem, config.dq_block_kv)
    if problem.dtype == "float32" or not bias_and_mask:
        return plan
    with_tiles = dataclasses.replace(plan, score_tiles=bias_and_mask)
    fits = sm90_dq.buffer_bytes(with_tiles) + BARRIERS <= SMEM_LIMIT
    return with_tiles if fits else plan


def limit(problem: AttentionProblem) -> Limit | None:
    return tiles.limit(problem)


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    """Shared memory of the kernel that needs most."""
    kernel = sm90_dkdv if by_64_keys(problem) else sm90_fused
    own = kernel.buffer_bytes(plan_of(problem, config))
    most = max(own, sm90_dq.buffer_bytes(dq_plan(problem, config))) + BARRIERS
    return max(most, sm90_dbias.smem_bytes(problem))


# ---- the call -----------------------------------------------------------------------------------


def run(residuals: Residuals, problem: AttentionProblem, config: Config) -> AttentionInputs:
    """(inputs, out, lse, d_out, d_lse) -> the cotangents of inputs."""
    residuals, plan = Residuals(*residuals), plan_of(problem, config)
    by_rows, inputs = dq_plan(problem, config), residuals.inputs
    # Whole query tiles of both kernels. TMA reads the statistics of at least 32 rows at a time.
    rows = tma_operands.round_up(problem.q_len + max(0, 32 - config.block_q), 2 * ROWS)
    rows = max(rows, by_rows.tiling.padded_rows)
    if problem.dtype == "float32":
        stats = operands.row_statistics(plan.exact, rows, residuals)
    else:
        stats, _ = statistics.of_rows(problem, residuals, rows=rows)
    refs, others = operands.for_tma(plan, residuals, stats), {}
    make = sm90_dkdv.dk_dv if by_64_keys(problem) else sm90_fused.gradients
    *_, dk, dv = make(plan, refs)
    refs = operands.ordered_after(refs, dk)
    dq = sm90_dq.dq_of(by_rows, sm90_dq.operands_of(by_rows, inputs, refs))
    if problem.bias_shape or problem.learned:
        refs = operands.ordered_after(refs, dq)
        others = sm90_dbias.gradients(KernelContext(plan, refs), inputs)
    return operands.cotangents(residuals, stats, Gradients(dq, dk, dv), others)


KERNEL = Kernel(Config, limit, smem_bytes, run, shares_keys=sm90.shares_keys)
