"""Flash attention backward for Hopper, bfloat16, float16 and float32: the choice between kernels.

| problem | dk and dv | dq |
|---|---|---|
| 16-bit floats, head dims up to 128 | `sm90_fused`, five matmuls a tile | added up there |
| the same, bits that must repeat: full and causal masks | `sm90_fused` | added up in `turns` |
| the same, short sequences, or bits that must repeat otherwise | `sm90_fused` | `sm90_dq` |
| head dims above 128, or float32 | `sm90_dkdv` | `sm90_dq`, seven matmuls in all |
| short causal windows, head dims up to 64 | `sm90_window` | `sm90_window` |
| up to 128 keys, head dims up to 64 | `sm90_fused` | written there: `one_key_tile` |
| up to 64 queries and keys; 128 of few heads or masked | `sm90_short` | `sm90_short` |
| many heads whose dq fits in shared memory | `sm90_heads` | `sm90_heads` |
| a table of blocks of 64 keys (`flash_fwd/block_tables.py`) | `sm90_dkdv` | `sm90_dq` |

`sm90_fused`, but in turns, and `sm90_dkdv` divide the steps of few work tiles over more blocks
(`step_parts`).

After any of these, `sm90_dbias` makes the gradient of a bias and the sums for the gradients of a
score function's arrays that no other kernel has made (`aux_sums`). XLA makes the gradient of sinks.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import score_tiles, tile_lists, tiles, tma_operands
from pallas_attn.kernels.flash_bwd import (
    aux_sums,
    dq_sum,
    lockstep,
    one_key_tile,
    operands,
    sm90_dbias,
    sm90_dkdv,
    sm90_dq,
    sm90_fused,
    sm90_heads,
    sm90_short,
    sm90_window,
    statistics,
    step_parts,
    turns,
)
from pallas_attn.kernels.flash_bwd.aux_sums import Part
from pallas_attn.kernels.flash_bwd.key_tiles import KeyTiling
from pallas_attn.kernels.flash_bwd.operands import (
    BackwardRefs,
    Residuals,
    RowStatistics,
    dsinks,
    row_statistics,
)
from pallas_attn.kernels.flash_bwd.plan import KeyPlan, RowFormats, is_wide
from pallas_attn.kernels.flash_bwd.work_order import WorkOrder
from pallas_attn.kernels.flash_fwd import block_tables, shared_memory, tile_scheduler
from pallas_attn.kernels.flash_fwd import sm90 as flash_fwd_sm90
from pallas_attn.kernels.flash_fwd.tile_scheduler import QueryPlan
from pallas_attn.kernels.lang.config import check

ROWS = tiles.ROWS
SMEM_LIMIT = flash_fwd_sm90.SMEM_LIMIT
BARRIERS = shared_memory.BARRIERS


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning only: the result is the same up to rounding."""

    block_q: int = 64
    stages: int = 2
    fused: bool = True  # dq is added up in global memory, where `sm90_fused` can
    l2_heads: int = 0  # kv heads whose work tiles are taken together; 0: see WorkOrder.l2_heads
    grid: int = 132  # blocks; 0: one a work tile
    dq_block_kv: int = 64  # keys of a tile of `sm90_dq`
    dq_stages: int = 2  # kv tiles of its ring
    dq_lag: int = 1  # steps between dS and its dQ: with 2, warpgroups wait less for each other
    dq_warpgroups: int = 2  # its consumers
    # Columns that stay in registers for a work tile: half of K in `sm90_fused`, where head dims are
    # above 64 and query tiles are of 64; else those of `held_columns`, in `sm90_dkdv`.
    k_in_registers: bool = False
    q_in_registers: bool = False  # columns of q and dO likewise, in `sm90_dq`
    window: bool = False  # all by `sm90_window`, which takes few problems
    short: bool = False  # all by `sm90_short`, likewise
    heads: bool = False  # dq, dk and dv by `sm90_heads`
    parts: int = 1  # into which the steps of a work tile of keys are divided: see `step_parts`
    lockstep: bool = False  # blocks are at the same query tile, where `lockstep` applies
    claims: bool = False  # blocks claim work tiles, in `sm90_fused`
    kv_slots: int = 1  # work tiles whose keys are in shared memory, in `sm90_fused`
    one_key_tile: bool = False  # `sm90_fused` writes dq itself, see `one_key_tile`
    turns: bool = False  # kv tiles add to dq in one order, in `sm90_fused`, where `turns` applies
    # dk and dv of 64 keys by `sm90_dkdv`; work tiles of dq have heads of a group: `block_tables`.
    block_table: bool = False

    def __post_init__(self) -> None:
        blocks = (64, 128) if self.fused else (16, 32, 64, 128)
        lags = (1,) if self.block_q == 128 else (1, 2)
        whole = self.window or self.short or self.heads or self.turns
        most_parts = 1 if whole else step_parts.MOST
        check(
            self,
            block_q=(self.block_q in blocks, "64 or 128, or, if it is not fused, 16 or 32"),
            stages=(self.stages >= 2, "at least 2"),
            kv_slots=(self.kv_slots in (1, 2), "1 or 2"),
            parts=(1 <= self.parts <= most_parts, f"from 1 to {most_parts}"),
            l2_heads=(self.l2_heads >= 0, "at least 0"),
            grid=(self.grid >= 0, "at least 0"),
            dq_block_kv=(self.dq_block_kv in (32, 64, 128), "32, 64 or 128"),
            dq_stages=(self.dq_stages >= 2, "at least 2"),
            dq_lag=(self.dq_lag in lags, " or ".join(map(str, lags))),
            dq_warpgroups=(self.dq_warpgroups in (1, 2, 3), "1, 2 or 3"),
            block_table=(not (self.block_table and self.fused), "False if it is fused"),
        )

    @classmethod
    def default(cls, problem: AttentionProblem) -> "Config":
        """The Config of a problem that nobody tuned."""
        if sm90_heads.takes(problem) and sm90_heads.is_faster(problem):
            return cls(heads=True)
        if sm90_short.takes(problem):
            return cls(short=True)
        if sm90_window.takes(problem):
            return cls(window=True)
        if is_wide(problem):
            held = holds_columns(problem)
            full = held and problem.mask.is_full  # positions take registers, too
            wide = cls(fused=False, k_in_registers=held, q_in_registers=full)
            wide = _two_kernels(problem, wide)
            if problem.dtype != "float32":
                wide = _with_dq_warpgroups(problem, wide)
            return _in_parts_and_order(problem, wide)
        if has_block_table(problem):
            heads = block_tables.heads_of_tile(problem, 2)
            tables = cls(fused=False, block_table=True, dq_warpgroups=heads)
            return _in_parts(problem, _two_kernels(problem, tables))
        has_functions = problem.mask_program is not None or problem.score_program is not None
        config = cls(dq_stages=3, dq_lag=2, k_in_registers=not has_functions)
        if one_key_tile.takes(problem):
            return _with_slots(problem, _in_parts(problem, cls(128, one_key_tile=True)))
        if max(problem.head_dim, problem.v_head_dim) <= 64:
            config = cls(128, dq_stages=4, dq_warpgroups=3)
        config = _with_dq_warpgroups(problem, config)
        # A float32 dq is set to 0 before and rounded after, which costs more than it saves where
        # keys meet few query rows, unless blocks take parts or one work tile at most; or blocks add
        # to more of it at a time than L2 holds; or most blocks would have no work tile.
        order = plan_of(problem, _in_order(problem, config)).order
        has_parts = step_parts.default(order, adds_dq=True) > 1
        few_rows = order.tiling.mean_q_rows <= 512 and not (has_parts and config.block_q > ROWS)
        if few_rows and order.work_tiles <= order.blocks:
            alone = dataclasses.replace(config, fused=False)
            apart = plan_of(problem, _in_order(problem, alone)).order
            sizes = ROWS * config.dq_warpgroups, config.dq_block_kv
            few_rows = not step_parts.dq_is_faster_beside(order, apart, *sizes, config.dq_lag)
        idle = 2 * order.work_tiles <= config.grid and not has_parts
        scattered = order.exceeds_l2 and (idle or not order.tiling.follows_mask)
        fused = not (few_rows or scattered)
        config = dataclasses.replace(config, fused=fused)
        if fused and problem.deterministic and not has_parts:
            config = _with_turns(problem, config)
        if fused and dq_sum.has_rest(plan_of(problem, config)):
            config = dataclasses.replace(config, stages=3, dq_lag=1)
        return _with_slots(problem, _in_parts_and_order(problem, config))


def _with_dq_warpgroups(problem: AttentionProblem, config: Config) -> Config:
    """`config`, with fewer query rows in a work tile of dQ where blocks would have none."""
    time_of_rows = {3: 1.0, 2: 1.3, 1: 2.0}
    consumers = min(
        range(config.dq_warpgroups, 0, -1),
        key=lambda n: n * time_of_rows[n] * tile_scheduler.rounds(problem, n * ROWS),
    )
    return dataclasses.replace(config, dq_warpgroups=consumers)


def _in_parts(problem: AttentionProblem, config: Config) -> Config:
    """`config`, with the steps of few work tiles divided over more blocks."""
    if config.turns:
        return config
    parts = step_parts.default(plan_of(problem, config).order, is_fused(problem, config))
    return dataclasses.replace(config, parts=parts)


def _in_parts_and_order(problem: AttentionProblem, config: Config) -> Config:
    """`config`, with an order for the parts that blocks take in the order without parts."""
    return _in_order(problem, _in_parts(problem, _in_order(problem, config)))


def _with_slots(problem: AttentionProblem, config: Config) -> Config:
    """`config`, with two slots for keys where they fit beside all else: the keys of a work tile are
    loaded during the one before.
    """
    more = dataclasses.replace(config, kv_slots=2)
    before, plan = plan_of(problem, config), plan_of(problem, more)
    if not is_fused(problem, config) or config.turns or dq_sum.has_rest(plan):
        return config
    same = (before.bias_tiles, before.key_sums) == (plan.bias_tiles, plan.key_sums)
    fits = sm90_fused.buffer_bytes(plan) + BARRIERS <= SMEM_LIMIT
    return more if same and fits else config


def _in_order(problem: AttentionProblem, config: Config) -> Config:
    """`config`, with the order in which blocks take work tiles and query tiles. A static table
    takes one L2 group after the other: then blocks read rows of heads that share keys from memory,
    not L2, or the long work tiles of the last group begin late. Blocks that take parts are at
    other query tiles anyway: lockstep made them 6 to 14 % slower, claims no faster.
    """
    if config.parts > 1:
        return dataclasses.replace(config, lockstep=False, claims=False)
    order = plan_of(problem, dataclasses.replace(config, lockstep=True, claims=True)).order
    fused, long = is_fused(problem, config), order.head_exceeds_l2
    lockstep = order.lockstep and (long or (fused and problem.group > 1))
    if fused and problem.deterministic:
        return dataclasses.replace(config, lockstep=order.lockstep, claims=True)
    gains = long or lockstep or order.tiling.chunks > 1
    claims = order.claims and fused and gains and order.grid < order.work_tiles
    return dataclasses.replace(config, lockstep=lockstep, claims=claims)


def _with_turns(problem: AttentionProblem, config: Config) -> Config:
    """`config`, in turns where they are faster than two kernels. Registers are short then: with a
    lag of 2, and under a mask with a part of k, what they cannot hold takes longer.
    """
    in_registers = config.k_in_registers and problem.mask.is_full
    lagging = dataclasses.replace(config, turns=True, lockstep=True, dq_lag=1)
    if not takes_turns(problem, lagging):
        return config
    gains = turns.is_short_wait(plan_of(problem, lagging).order)
    lagging = dataclasses.replace(lagging, lockstep=False, k_in_registers=in_registers)
    return lagging if gains else config


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


def has_block_table(problem: AttentionProblem) -> bool:
    """Whether a mask function reads a table of blocks, and these are smaller than 128, or L2 cannot
    hold the dq of a kv head's queries, to which blocks of keys would add in any order.
    """
    if problem.mask_program is None or not tile_lists.reads_pairs(problem.mask_program):
        return False
    small = block_tables.tile_sizes(problem) != block_tables.TILES[0]
    far = WorkOrder(KeyTiling(problem, sm90_fused.KEYS, ROWS)).head_exceeds_l2
    return not problem.learned and (small or far)


def holds_columns(problem: AttentionProblem) -> bool:
    """Whether `sm90_dkdv` is faster with k and v in registers, and, without a mask, `sm90_dq` with
    dO: where k and v fit there whole, and nothing but the diagonal masks scores.
    """
    fits = problem.head_dim <= 192 and problem.v_head_dim <= 128
    has_functions = problem.mask_program is not None or problem.score_program is not None
    mask = problem.mask
    shown = mask.is_full or (mask.is_causal and not mask.bounds_left)
    plain = shown and not problem.arrays and not has_functions
    return plain and fits and problem.dtype != "float32"


def _two_kernels(problem: AttentionProblem, config: Config) -> Config:
    """The first tiles of each kernel that fit."""
    is_float32 = problem.dtype == "float32"
    for sizes in _FLOAT32_TILES if is_float32 else _WIDE_TILES:
        config = dataclasses.replace(config, **sizes)
        if sm90_dkdv.buffer_bytes(plan_of(problem, config)) + BARRIERS <= SMEM_LIMIT:
            break
    for sizes in _FLOAT32_DQ_TILES if is_float32 else _WIDE_DQ_TILES:
        config = dataclasses.replace(config, **sizes)
        if sm90_dq.buffer_bytes(_dq_plan(problem, config)) + BARRIERS <= SMEM_LIMIT:
            break
    return config


# ---- which kernel -------------------------------------------------------------------------------


def own_kernel(config: Config) -> tuple[str, Any] | None:
    """The field of `config` that asks for one kernel for all gradients, and that kernel."""
    kernels = {"window": sm90_window, "short": sm90_short, "heads": sm90_heads}
    return next(((name, x) for name, x in kernels.items() if getattr(config, name)), None)


def is_fused(problem: AttentionProblem, config: Config) -> bool:
    """Whether `sm90_fused` adds up dq too."""
    apart = own_kernel(config) is not None or is_wide(problem)
    repeats = not problem.deterministic or config.one_key_tile or takes_turns(problem, config)
    return config.fused and not apart and repeats


def takes_turns(problem: AttentionProblem, config: Config) -> bool:
    """Whether `sm90_fused` adds up dq in one order."""
    by_columns = config.turns and config.block_q == ROWS and own_kernel(config) is None
    tiling = KeyTiling(problem, sm90_fused.KEYS, ROWS)
    return config.fused and by_columns and not is_wide(problem) and turns.applies(tiling)


def by_64_keys(problem: AttentionProblem, config: Config) -> bool:
    """Whether `sm90_dkdv` makes dk and dv."""
    return is_wide(problem) or config.block_table


def plan_of(problem: AttentionProblem, config: Config) -> KeyPlan:
    """The plan of the kernel that makes dk and dv."""
    keys, block_q, wide = sm90_fused.KEYS, config.block_q, by_64_keys(problem, config)
    rows_apart = None
    own_order = own_kernel(config)
    if own_order is not None:
        name, kernel = own_order
        if not kernel.takes(problem):
            raise ValueError(f"Config.{name} must be False for {problem}")
        keys, block_q = sm90_heads.KEYS if config.heads else ROWS, ROWS
        if config.short:
            problem, rows_apart = sm90_short.joined(problem)
    elif wide:
        keys = sm90_dkdv.KEYS
    tiling = KeyTiling(problem, keys, block_q)
    alone = config.fused and block_q == 2 * ROWS and one_key_tile.takes(problem)
    if config.one_key_tile and (own_order or not alone):
        raise ValueError(f"Config.one_key_tile must be False for {problem}")
    in_turns = takes_turns(problem, config)
    claims = in_turns or config.claims
    order = WorkOrder(
        tiling,
        blocks=config.grid,
        heads_together=config.l2_heads,
        lockstep=config.lockstep and own_order is None and lockstep.applies(tiling),
        claims=claims and not (own_order is not None or wide or tiling.is_listed),
        turns=in_turns,
        parts=config.parts,
    )
    config = dataclasses.replace(config, block_q=block_q)
    halves = block_q == ROWS and is_fused(problem, config)
    plan = KeyPlan(problem, config, order, RowFormats.of(problem, block_q, halves))
    if config.short:
        return dataclasses.replace(plan, rows_apart=rows_apart)
    if config.heads:
        return dataclasses.replace(plan, bias_tiles=sm90_heads.bias_tiles(problem))
    if problem.learned and not (own_order or wide):
        with_sums = dataclasses.replace(plan, key_sums=aux_sums.key_sums(problem))
        if sm90_fused.buffer_bytes(with_sums) + BARRIERS <= SMEM_LIMIT:
            plan = with_sums
    if problem.bias_shape is None or own_order or wide:
        return plan
    bias = score_tiles.bias_of_keys(problem, block_q)
    with_tiles = dataclasses.replace(plan, bias_tiles=bias, adds_dq=is_fused(problem, config))
    fits = sm90_fused.buffer_bytes(with_tiles) + BARRIERS <= SMEM_LIMIT
    return with_tiles if fits else plan


def _dq_plan(problem: AttentionProblem, config: Config) -> QueryPlan:
    sizes = config.dq_warpgroups, config.dq_block_kv, config.dq_stages, config.grid
    by_rows = sm90_dq.DqConfig(*sizes, config.q_in_registers)
    in_panels = tma_operands.takes_panels(problem)
    plan = dataclasses.replace(QueryPlan.of(problem, by_rows), panels=in_panels)
    if config.block_table:
        plan = block_tables.with_heads(plan)
    bias_and_mask = score_tiles.of_problem(problem, config.dq_block_kv)
    if problem.dtype == "float32" or not bias_and_mask:
        return plan
    with_tiles = dataclasses.replace(plan, score_tiles=bias_and_mask)
    fits = sm90_dq.buffer_bytes(with_tiles) + BARRIERS <= SMEM_LIMIT
    return with_tiles if fits else plan


def limit(problem: AttentionProblem) -> Limit | None:
    return tiles.limit(problem)


def shares_keys(problem: AttentionProblem) -> bool:
    """Whether batch rows may share k and v; not where dbias or float32 units ask for each."""
    return problem.dtype != "float32" and "bias" not in problem.arrays


def reads_zigzag(problem: AttentionProblem) -> bool:
    """Whether k and v may lie in the order zigzag, and their gradients then do: where one kernel
    makes all of them, as the forward's may.
    """
    fused = shares_keys(problem) and is_fused(problem, Config.default(problem))
    return fused and flash_fwd_sm90.reads_zigzag(problem)


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    """Shared memory of the kernel that needs most."""
    return max(_bytes_of_rows(problem, config), sm90_dbias.smem_bytes(problem))


def _bytes_of_rows(problem: AttentionProblem, config: Config) -> int:
    """Shared memory of the kernels for dq, dk and dv."""
    plan = plan_of(problem, config)
    if config.window:
        return 2 * (sm90_window.buffer_bytes(plan) + sm90_window.RESERVED)
    if config.short:
        return sm90_short.buffer_bytes(plan) + BARRIERS
    if config.heads:
        return sm90_heads.buffer_bytes(plan)
    most = (sm90_dkdv if by_64_keys(problem, config) else sm90_fused).buffer_bytes(plan)
    if not is_fused(problem, config):
        most = max(most, sm90_dq.buffer_bytes(_dq_plan(problem, config)))
    return most + BARRIERS


# ---- the call -----------------------------------------------------------------------------------


def run(residuals: Residuals, problem: AttentionProblem, config: Config) -> AttentionInputs:
    """(inputs, out, lse, d_out, d_lse) -> the cotangents of inputs."""
    residuals = Residuals(*residuals)
    plan = plan_of(problem, config)
    inputs = residuals.inputs
    if config.short or config.heads:
        return _by_one_launch(residuals, problem, plan)
    dq_plan = _dq_plan(problem, config)
    # Whole tiles, of either size, and what is read of row statistics beyond the last.
    rows = tma_operands.round_up(problem.q_len + max(0, 32 - config.block_q), 2 * ROWS)
    reads_more = problem.bias_shape is not None or bool(problem.learned)
    if not is_fused(problem, config) or reads_more:
        rows = max(rows, dq_plan.tiling.padded_rows)
    if config.window:
        rows = sm90_window.padded_rows(problem)
    stats, zeros = _statistics(plan, rows, residuals)
    refs = operands.for_tma(plan, residuals, stats)._replace(dq=zeros)
    dq, parts = None, list[Part]()
    if plan.key_sums:
        refs = refs._replace(aux_sums=jax.new_ref(aux_sums.zero_array(plan)))
    if config.window:
        dq, dk, dv = sm90_window.dq_dk_dv(plan, refs)
        dq = dq[:, : problem.q_len]
    elif by_64_keys(problem, config):
        dk, dv = sm90_dkdv.dk_dv(plan, refs)
    elif is_fused(problem, config):
        dq, dk, dv = sm90_fused.dq_dk_dv(plan, refs)
    else:
        dk, dv = sm90_fused.dk_dv(plan, refs)
    if plan.key_sums:
        parts = aux_sums.parts_of_keys(plan, jax.freeze(refs.aux_sums))
        refs = refs._replace(aux_sums=None)
    if dq is None:
        refs = operands.ordered_after(refs, dk)
        dq = sm90_dq.dq_of(dq_plan, sm90_dq.operands_of(dq_plan, inputs, refs))
    dk = dk[:, : problem.kv_len, :, : problem.head_dim]
    dv = dv[:, : problem.kv_len, :, : problem.v_head_dim]
    others = _others(residuals, problem, stats, operands.ordered_after(refs, dq), parts)
    return AttentionInputs(q=dq, k=dk, v=dv, **others)


def _statistics(
    plan: KeyPlan, rows: int, residuals: Residuals
) -> tuple[RowStatistics, jax.Array | None]:
    """The statistics of `rows` rows, and the zeros to which `sm90_fused` adds dq where the same
    launch writes them; else None.
    """
    problem, config = plan.problem, plan.config
    if not (is_fused(problem, config) and statistics.takes(problem)):
        return row_statistics(plan.exact, rows, residuals), None
    if config.one_key_tile:
        return statistics.of_rows(problem, rows, residuals), None
    sums = dq_sum.sums(plan)
    if not statistics.clears(sums):
        return statistics.of_rows(problem, rows, residuals), None
    return statistics.with_zeros(problem, rows, residuals, sums)


def _by_one_launch(
    residuals: Residuals, problem: AttentionProblem, plan: KeyPlan
) -> AttentionInputs:
    """The gradients, with dq, dk and dv by one kernel; `sm90_short` computes row statistics too."""
    inputs = residuals.inputs
    if plan.config.short and inputs.sinks is None:
        return AttentionInputs(*sm90_short.dq_dk_dv(plan, residuals))
    rows, refs = tma_operands.round_up(problem.q_len, 2 * ROWS), None
    stats = statistics.of_rows(problem, rows, residuals)
    if plan.config.heads:
        grads = sm90_heads.dq_dk_dv(plan, residuals, stats)
    else:
        grads = sm90_short.dq_dk_dv(plan, residuals)
    if inputs.bias is not None:
        refs = operands.ordered_after(operands.for_tma(plan, residuals, stats), grads.dq)
    return AttentionInputs(*grads, **_others(residuals, problem, stats, refs))


def _others(
    residuals: Residuals,
    problem: AttentionProblem,
    stats: RowStatistics,
    refs: BackwardRefs | None,
    parts: Sequence[Part] = (),
) -> dict[str, Any]:
    """The gradients of bias, of a score function's arrays and of sinks; all but the last need
    `refs`. `parts`: sums for a score function's arrays that the kernel of dK and dV has made.
    """
    inputs = residuals.inputs
    others: dict[str, Any] = {}
    if inputs.bias is not None:
        assert refs is not None
        plan = sm90_dbias.plan_of(problem)
        others["bias"] = sm90_dbias.dbias_of(plan, inputs, sm90_dq.operands_of(plan, inputs, refs))
    if problem.learned:
        assert refs is not None
        rest = aux_sums.rest_of(problem, parts)
        plan = sm90_dbias.plan_of(problem, aux_sums.all_reads(problem)[0])
        walk = sm90_dbias.parts_of(plan, sm90_dq.operands_of(plan, inputs, refs), rest)
        every = [*parts, *walk]
        sums = aux_sums.sums_of_ds(residuals, stats)
        every += aux_sums.remainders(problem, sums, rest, every)
        others["score_aux"] = aux_sums.gradients(problem, inputs, every)
    if inputs.sinks is not None:
        others["sinks"] = dsinks(residuals, stats)
    return others


KERNEL = Kernel(Config, limit, smem_bytes, run, shares_keys=shares_keys, reads_zigzag=reads_zigzag)
