"""Flash attention backward for Hopper, bfloat16, float16 and float32: the choice between kernels.

sm90_fused   dq, dk and dv by one kernel with five matmuls a tile, which adds dq up in global
             memory
sm90_dkdv, sm90_dq   dk and dv by one kernel and dq by another, seven matmuls a tile: head dims
             above 128, float32, short sequences, and where bits must repeat. For bfloat16 and
             float16 of head dims up to 128 `sm90_fused` makes dk and dv, and no dq
sm90_window  dq, dk and dv by one kernel that adds nothing up in global memory: short causal
             windows
dbias        the gradient of a bias, by a kernel of its own, after any of these
"""

import dataclasses
from typing import Any

from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import plan as attention_plan
from pallas_attn.kernels.attention import tma_operands
from pallas_attn.kernels.flash_bwd import dbias, sm90_dkdv, sm90_dq, sm90_fused, sm90_window
from pallas_attn.kernels.flash_bwd import plan as shared
from pallas_attn.kernels.flash_bwd.plan import ROWS, Plan, Residuals
from pallas_attn.kernels.flash_fwd import sm90 as flash_fwd_sm90
from pallas_attn.kernels.lang.config import check

SMEM_LIMIT = flash_fwd_sm90.SMEM_LIMIT
BARRIERS = flash_fwd_sm90.BARRIERS


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning only: the result is the same up to rounding."""

    block_q: int = 64
    stages: int = 2
    fused: bool = True  # dq is added up in global memory, where `sm90_fused` can
    l2_heads: int = 0  # heads whose work tiles are scheduled together; 0: see Plan.l2_heads
    grid: int = 132  # blocks; 0: one a work tile
    dq_block_kv: int = 64  # of `sm90_dq`
    dq_stages: int = 2  # of `sm90_dq`
    dq_lag: int = 1  # steps between dS and its dQ: with 2, warpgroups wait less for each other
    dq_warpgroups: int = 2  # of `sm90_dq`
    k_in_registers: bool = False  # half of K, where head dims are above 64, query tiles of 64
    window: bool = False  # all by `sm90_window`, which takes few problems
    lockstep: bool = False  # blocks are at the same query tile: see `Plan.lockstep`
    claims: bool = False  # blocks claim work tiles, in `sm90_fused`: see `Plan.claims`

    def __post_init__(self):
        blocks = (64, 128) if self.fused else (16, 32, 64, 128)
        lags = (1,) if self.block_q == 128 else (1, 2)
        check(
            self,
            block_q=(self.block_q in blocks, "64 or 128, or, if it is not fused, 16 or 32"),
            stages=(self.stages >= 2, "at least 2"),
            l2_heads=(self.l2_heads >= 0, "at least 0"),
            grid=(self.grid >= 0, "at least 0"),
            dq_block_kv=(self.dq_block_kv in (32, 64, 128), "32, 64 or 128"),
            dq_stages=(self.dq_stages >= 2, "at least 2"),
            dq_lag=(self.dq_lag in lags, " or ".join(map(str, lags))),
            dq_warpgroups=(self.dq_warpgroups in (1, 2, 3), "1, 2 or 3"),
        )

    @classmethod
    def default(cls, problem: AttentionProblem) -> "Config":
        """What serves a problem that nobody tuned."""
        if sm90_window.takes(problem):
            return cls(window=True)
        if problem.dtype == "float32":
            return _in_order(problem, _float32(problem))
        if is_wide(problem):
            return _in_order(problem, _wide(problem))
        listed = problem.mask_program is not None or problem.score_program is not None
        config = cls(dq_stages=3, dq_lag=2, k_in_registers=not listed)
        if max(problem.head_dim, problem.v_head_dim) <= 64:
            config = cls(128, dq_stages=4, dq_warpgroups=3)
        # A float32 dq is set to 0 before and rounded after, which costs more than it saves where
        # keys meet few query rows, or blocks add to more of it at a time than L2 holds, or most
        # blocks would have no work tile.
        plan = plan_of(problem, config)
        idle = 2 * plan.work_tiles <= config.grid
        scattered = plan.exceeds_l2 and (idle or not plan.follows_mask)
        fused = plan.mean_q_rows > 512 and not scattered
        return _in_order(problem, dataclasses.replace(config, fused=fused))


def _in_order(problem: AttentionProblem, config: Config) -> Config:
    """`config`, with the order in which blocks take work tiles and query tiles. In that of a table,
    one L2 group after the other, blocks read rows of heads that share keys from memory, or the long
    work tiles of the last group begin late.
    """
    plan = plan_of(problem, dataclasses.replace(config, lockstep=True, claims=True))
    fused, long = _is_fused(problem, config), plan.head_exceeds_l2
    lockstep = plan.lockstep and (long or (fused and problem.group > 1))
    gains = long or lockstep or plan.chunks > 1
    claims = plan.claims and fused and gains and plan.grid < plan.work_tiles
    return dataclasses.replace(config, lockstep=lockstep, claims=claims)


def is_wide(problem: AttentionProblem) -> bool:
    """Whether dK and dV of 64 keys are too much for one warpgroup, or k and v of 128 for shared
    memory.
    """
    return max(problem.head_dim, problem.v_head_dim) > 128 or problem.dtype == "float32"


def limit(problem: AttentionProblem) -> Limit | None:
    return shared.limit(problem) or flash_fwd_sm90.limit(problem)


def _wide(problem: AttentionProblem) -> Config:
    """As many stages as fit: both warpgroups use a query tile, one after the other."""
    best = Config(fused=False)
    for stages in (3, 4):
        config = dataclasses.replace(best, stages=stages)
        if sm90_dkdv.buffer_bytes(plan_of(problem, config)) + BARRIERS <= SMEM_LIMIT:
            best = config
    config = dataclasses.replace(best, dq_stages=3)
    fits = sm90_dq.buffer_bytes(_dq_plan(problem, config)) + BARRIERS <= SMEM_LIMIT
    return config if fits else best


# Of `sm90_dq` in float32, the largest first: warpgroups, keys of a tile, stages.
_DQ_TILES = ((2, 64, 3), (2, 64, 2), (2, 32, 2), (1, 32, 2))


def _float32(problem: AttentionProblem) -> Config:
    """The largest tiles that fit, of each kernel."""
    found = []
    for block_q, stages in ((64, 3), (128, 2), (64, 2), (32, 2), (16, 2)):
        config = Config(block_q=block_q, stages=stages, fused=False)
        if sm90_dkdv.buffer_bytes(plan_of(problem, config)) + BARRIERS <= SMEM_LIMIT:
            found.append(config)
    for warpgroups, block_kv, stages in _DQ_TILES:
        changes: dict[str, Any] = {
            "dq_block_kv": block_kv,
            "dq_stages": stages,
            "dq_warpgroups": warpgroups,
        }
        config = dataclasses.replace(found[0], **changes)
        fits = sm90_dq.buffer_bytes(_dq_plan(problem, config)) + BARRIERS <= SMEM_LIMIT
        if fits:
            break
    return config


def shares_keys(problem: AttentionProblem) -> bool:
    """Whether batch rows may share k and v; not where dbias.py or float32 units ask for each."""
    return problem.dtype != "float32" and "bias" not in problem.arrays


def reads_zigzag(problem: AttentionProblem) -> bool:
    """Whether k and v may lie in the order zigzag, and their gradients then do: where one kernel
    makes all of them, as the forward's may.
    """
    fused = shares_keys(problem) and _is_fused(problem, Config.default(problem))
    return fused and flash_fwd_sm90.reads_zigzag(problem)


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    """Of the kernel that needs most."""
    plan = plan_of(problem, config)
    if config.window:
        return 2 * (sm90_window.buffer_bytes(plan) + sm90_window.RESERVED)
    most = (sm90_dkdv if is_wide(problem) else sm90_fused).buffer_bytes(plan)
    if not _is_fused(problem, config):
        most = max(most, sm90_dq.buffer_bytes(_dq_plan(problem, config)))
    return most + BARRIERS


def plan_of(problem: AttentionProblem, config: Config) -> Plan:
    if config.window:
        if not sm90_window.takes(problem):
            raise ValueError(f"Config.window must be False for {problem}")
        return Plan(problem, dataclasses.replace(config, block_q=ROWS), ROWS)
    if is_wide(problem):
        return Plan(problem, config, sm90_dkdv.KEYS, knows_lockstep=True)
    return Plan(problem, config, sm90_fused.KEYS, knows_lockstep=True, knows_claims=True)


def _dq_plan(problem: AttentionProblem, config: Config) -> Any:
    by_rows = flash_fwd_sm90.Config(
        config.dq_warpgroups, config.dq_block_kv, config.dq_stages, 0, config.grid
    )
    return attention_plan.Plan(problem, by_rows)


def _is_fused(problem: AttentionProblem, config: Config) -> bool:
    apart = config.window or is_wide(problem) or problem.deterministic
    return config.fused and not apart


# ---- the call -----------------------------------------------------------------------------------


def run(residuals: Any, problem: AttentionProblem, config: Config) -> AttentionInputs:
    """(inputs, out, lse, d_out, d_lse) -> the cotangents of inputs."""
    residuals, plan = Residuals(*residuals), plan_of(problem, config)
    inputs, dq_plan = residuals.inputs, _dq_plan(problem, config)
    # Whole tiles, of either size, and what is read of row statistics beyond the last.
    rows = tma_operands.round_up(problem.q_len + max(0, 32 - config.block_q), 2 * ROWS)
    rows = max(rows, dq_plan.padded_rows)
    if config.window:
        rows = sm90_window.padded_rows(problem)
    stats = shared.row_statistics(plan, rows, residuals)
    refs = shared.operands(plan, residuals, stats)
    dq = None
    if config.window:
        dq, dk, dv = sm90_window.dq_dk_dv(plan, refs)
        dq = dq[:, : problem.q_len, :, : problem.head_dim]
    elif is_wide(problem):
        dk, dv = sm90_dkdv.dk_dv(plan, refs)
    elif _is_fused(problem, config):
        dq, dk, dv = sm90_fused.dq_dk_dv(plan, refs)
    else:
        dk, dv = sm90_fused.dk_dv(plan, refs)
    if dq is None:
        refs = shared.ordered_after(refs, dk)
        dq = sm90_dq.dq_of(dq_plan, sm90_dq.operands_of(dq_plan, inputs, refs))
    dk = dk[:, : problem.kv_len, :, : problem.head_dim]
    dv = dv[:, : problem.kv_len, :, : problem.v_head_dim]
    others = {}
    if inputs.bias is not None:
        bias_plan = dbias.plan_of(problem, flash_fwd_sm90.Config)
        bias_refs = sm90_dq.operands_of(bias_plan, inputs, shared.ordered_after(refs, dq))
        others["bias"] = dbias.dbias_of(bias_plan, inputs, bias_refs)
    if inputs.sinks is not None:
        others["sinks"] = shared.dsinks(residuals, stats)
    return AttentionInputs(q=dq, k=dk, v=dv, **others)
