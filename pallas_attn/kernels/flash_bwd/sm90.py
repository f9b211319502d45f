"""The fused Hopper backward (`sm90_fused`): 16-bit floats, head dims up to 128; and which tiles and
which order of work it takes.

| problem | dq |
|---|---|
| full and causal masks whose bits must repeat | added up in `turns` |
| up to 128 keys that all queries see, head dims up to 64 | written: `dq_sum.is_written` |
| all others | added up in no order |

It divides the steps of few work tiles over more blocks (`step_parts`), but not in turns. After it
`sm90_dbias` makes the gradient of a bias, and the sums for the gradients of a score function's
arrays that it has not made (`aux_sums`).
"""

import dataclasses

from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import block_tables, tile_lists, tiles
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.flash_bwd import (
    costs,
    dq_sum,
    operands,
    sm90_dbias,
    sm90_fused,
    statistics,
    step_parts,
    turns,
)
from pallas_attn.kernels.flash_bwd.operands import Residuals
from pallas_attn.kernels.flash_bwd.plan import KeyPlan, is_wide
from pallas_attn.kernels.flash_bwd.work_order import KeyTiling, WorkOrder
from pallas_attn.kernels.flash_fwd import sm90 as flash_fwd_sm90
from pallas_attn.kernels.lang.config import check
from pallas_attn.kernels.lang.mosaic import BARRIERS, MULTIPROCESSORS, SMEM_LIMIT

ROWS = tiles.ROWS


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning only: the result is the same up to rounding."""

    block_q: int = 64
    stages: int = 2
    dq_lag: int = 1  # steps between dS and its dQ: with 2, warpgroups wait less for each other
    k_in_registers: bool = False  # half of K, with query tiles of 64 and head dims above 64
    kv_slots: int = 1  # work tiles whose keys are in shared memory
    parts: int = 1  # into which the steps of a work tile are divided: see `step_parts`
    grid: int = MULTIPROCESSORS  # blocks; 0: one a work tile
    l2_heads: int = 0  # kv heads whose work tiles are taken together; 0: see WorkOrder.l2_heads
    lockstep: bool = False  # blocks are at the same query tile, where `lockstep` applies
    claims: bool = False  # blocks claim work tiles

    def __post_init__(self) -> None:
        lags = (1,) if self.block_q == 128 else (1, 2)
        check(
            self,
            block_q=(self.block_q in (64, 128), "64 or 128"),
            stages=(self.stages >= 2, "at least 2"),
            kv_slots=(self.kv_slots in (1, 2), "1 or 2"),
            parts=(1 <= self.parts <= step_parts.MOST, f"from 1 to {step_parts.MOST}"),
            l2_heads=(self.l2_heads >= 0, "at least 0"),
            grid=(self.grid >= 0, "at least 0"),
            dq_lag=(self.dq_lag in lags, " or ".join(map(str, lags))),
        )

    @classmethod
    def default(cls, problem: AttentionProblem) -> "Config":
        """The Config of a problem that nobody tuned. In turns registers are short: with a lag of 2,
        and under a mask with a part of k, what they cannot hold takes longer.
        """
        if dq_sum.is_written(problem):
            order = order_of(problem, cls(128))
            return _with_slots(problem, cls(128, parts=costs.parts(order, adds_dq=True)))
        config = tiles_of(problem)
        if problem.deterministic:
            in_registers = config.k_in_registers and problem.mask.is_full
            config = dataclasses.replace(config, dq_lag=1, k_in_registers=in_registers)
        if dq_sum.has_rest(plan_of(problem, config)):
            config = dataclasses.replace(config, stages=3, dq_lag=1)
        return _with_slots(problem, _in_order(problem, config))


def tiles_of(problem: AttentionProblem) -> Config:
    """The tiles that are fastest for head dims, before anything else is known."""
    if max(problem.head_dim, problem.v_head_dim) <= 64:
        return Config(128)
    has_functions = problem.mask_program is not None or problem.score_program is not None
    return Config(dq_lag=2, k_in_registers=not has_functions)


def _with_slots(problem: AttentionProblem, config: Config) -> Config:
    """`config`, with two slots for keys where they fit beside all else: the keys of a work tile are
    loaded during the one before.
    """
    more = dataclasses.replace(config, kv_slots=2)
    before, plan = plan_of(problem, config), plan_of(problem, more)
    if plan.order.turns or dq_sum.has_rest(plan):
        return config
    same = (before.bias_tiles, before.key_sums) == (plan.bias_tiles, plan.key_sums)
    fits = sm90_fused.buffer_bytes(plan) + BARRIERS <= SMEM_LIMIT
    return more if same and fits else config


def _in_order(problem: AttentionProblem, config: Config) -> Config:
    """`config`, with the parts in which blocks take work tiles, and in which order."""
    order = order_of(problem, dataclasses.replace(config, lockstep=True, claims=True))
    if order.turns:
        return dataclasses.replace(config, lockstep=order.lockstep, claims=True)
    return dataclasses.replace(config, **costs.choice(order, adds_dq=True)._asdict())


# ---- which kernel -------------------------------------------------------------------------------


def has_block_table(problem: AttentionProblem) -> bool:
    """Whether a mask function reads a table of blocks, and these are smaller than the 128 keys of a
    work tile, or L2 cannot hold the dq of a kv head's queries, to which blocks of keys would add in
    any order.
    """
    program = problem.mask_program
    if is_wide(problem) or program is None or not tile_lists.reads_pairs(program):
        return False
    small = block_tables.tile_sizes(problem) != block_tables.TILES[0]
    far = WorkOrder(KeyTiling(problem, sm90_fused.KEYS, ROWS)).head_exceeds_l2
    return not problem.learned and (small or far)


def limit(problem: AttentionProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    if (refused := tiles.limit(problem)) is not None:
        return refused
    remedy = "leave implementation=None"
    if is_wide(problem):
        return Limit("it takes 16-bit floats of head dims up to 128", remedy)
    if has_block_table(problem):
        return Limit("a table has smaller blocks than its 128 keys, or dq exceeds L2", remedy)
    if problem.deterministic and not (dq_sum.is_written(problem) or _may_take_turns(problem)):
        return Limit("its bits repeat where kv tiles take turns, or where there is one", remedy)
    return None


def _may_take_turns(problem: AttentionProblem) -> bool:
    tiling = KeyTiling(problem, sm90_fused.KEYS, tiles_of(problem).block_q)
    return tiling.block_q == ROWS and turns.applies(tiling)


def slower(problem: AttentionProblem) -> Limit | None:
    """Why two kernels are faster, or None."""
    if dq_sum.is_written(problem):
        return None
    config = tiles_of(problem)
    tiling = KeyTiling(problem, sm90_fused.KEYS, config.block_q)
    order = WorkOrder(tiling, config.grid)
    has_room = problem.bias_shape is None
    has_room = has_room or not sm90_fused.lacks_room_for_bias(plan_of(problem, config))
    waits = False
    if problem.deterministic:
        in_turns = dataclasses.replace(config, lockstep=True, dq_lag=1)
        waits = not costs.is_short_wait(order_of(problem, in_turns))
    if not waits and not costs.two_kernels_are_faster(order, config.dq_lag, has_room):
        return None
    return Limit("two kernels are faster: dq is added up in float32", "leave implementation=None")


# ---- static values ------------------------------------------------------------------------------


def order_of(problem: AttentionProblem, config: Config) -> WorkOrder:
    tiling = KeyTiling(problem, sm90_fused.KEYS, config.block_q)
    in_turns = problem.deterministic and not (config.block_q > ROWS and dq_sum.is_written(problem))
    if in_turns and (config.block_q != ROWS or config.parts > 1):
        raise ValueError(
            f"Config.block_q must be {ROWS} and Config.parts 1 for {problem}, got "
            f"{config.block_q} and {config.parts}"
        )
    return WorkOrder(
        tiling,
        blocks=config.grid,
        heads_together=config.l2_heads,
        lockstep=config.lockstep and tiling.allows_lockstep,
        claims=in_turns or (config.claims and not tiling.is_listed),
        turns=in_turns,
        parts=config.parts,
    )


def plan_of(problem: AttentionProblem, config: Config) -> KeyPlan:
    order = order_of(problem, config)
    dq: dq_sum.ByColumns | dq_sum.ByRows = dq_sum.ByColumns()
    if order.turns:
        dq = turns.InTurns()
    elif config.block_q > ROWS:
        dq = dq_sum.Written() if dq_sum.is_written(problem) else dq_sum.ByRows()
    return sm90_fused.plan_of(config, order, dq)


def shares_keys(problem: AttentionProblem) -> bool:
    """Whether batch rows may share k and v; not where dbias or float32 units ask for each."""
    return problem.dtype != "float32" and "bias" not in problem.arrays


def reads_zigzag(problem: AttentionProblem) -> bool:
    """Whether k and v may lie in the order zigzag, and their gradients then do: where the forward's
    may.
    """
    return shares_keys(problem) and flash_fwd_sm90.reads_zigzag(problem)


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    """Shared memory of the kernel that needs most."""
    own = sm90_fused.buffer_bytes(plan_of(problem, config)) + BARRIERS
    return max(own, sm90_dbias.smem_bytes(problem))


# ---- the call -----------------------------------------------------------------------------------


def run(residuals: Residuals, problem: AttentionProblem, config: Config) -> AttentionInputs:
    """(inputs, out, lse, d_out, d_lse) -> the cotangents of inputs."""
    residuals, plan = Residuals(*residuals), plan_of(problem, config)
    zeros = plan.dq.zeros(plan)
    stats, dq = statistics.of_rows(problem, residuals, plan.negated_unit, zeros)
    refs = operands.for_tma(plan, residuals, stats)
    grads, others = sm90_fused.gradients(plan, refs._replace(dq=dq)), {}
    if problem.bias_shape or problem.learned:
        ctx = KernelContext(plan, operands.ordered_after(refs, grads.dq))
        others = sm90_dbias.gradients(ctx, residuals.inputs)
    return operands.cotangents(residuals, stats, grads, others)


KERNEL = Kernel(
    Config, limit, smem_bytes, run, slower, shares_keys=shares_keys, reads_zigzag=reads_zigzag
)
