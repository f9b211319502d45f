"""The Hopper forward of many heads whose keys are one kv tile: windows of 49 or 64 rows (Swin),
short sentences; and frames of a video, where several batch rows share a work tile (`batch_rows`).

A step of the mainloop of `sm90` overlaps two matmuls of neighbouring kv tiles. A head of one kv
tile has no neighbouring tiles, and a block that takes one head at a time mostly waits for loads.
Here each warpgroup takes work tiles of its own, of 64 rows each, loads q, k and v of the next one
while it computes this one, and waits for no other warpgroup.

Grid: one persistent block a multiprocessor. Each of its `Config.warpgroups` warpgroups has a list
of work tiles (`tile_scheduler.schedule`).

Shared memory, each warpgroup's own:
  q, k, v [2]  of this work tile, and of the next one, which arrives meanwhile. It is asked for when
               all warps have multiplied what lay there: they met in the epilogue before
  out          some columns of the output on their way to global memory
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import FLOAT8, AttentionInputs, AttentionProblem
from pallas_attn._call.special import Special
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import logits, softmax, tiles
from pallas_attn.kernels.attention.logits import LogitRules
from pallas_attn.kernels.attention.softmax import OutputSums
from pallas_attn.kernels.attention.tile_scheduler import (
    Distribution,
    QueryPlan,
    StaticList,
    Turn,
    span_of_rows,
    work_tile,
)
from pallas_attn.kernels.attention.tiles import (
    ROWS,
    ForwardRefs,
    KernelContext,
    QueryRows,
    QueryTiling,
)
from pallas_attn.kernels.attention.tma_operands import takes_panels
from pallas_attn.kernels.flash_fwd import (
    batch_rows,
    shared_memory,
    sm90,
    sm90_defaults,
    warpgroups,
)
from pallas_attn.kernels.flash_fwd.shared_memory import Smem
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.config import check, first_that_fits
from pallas_attn.kernels.lang.mosaic import BARRIERS, MULTIPROCESSORS
from pallas_attn.kernels.lang.types import GmemRef, Index
from pallas_attn.kernels.mma import wgmma

linear_scores = Special("kernels.attention.linear_scores")  # a slope and an offset a row

WORK_TILES = StaticList(ahead=2)
SLOTS = 2  # work tiles of a warpgroup in shared memory
MOST_KEYS = 256  # in a kv tile
MOST_NUMBERS = 16384  # elements of K, or of V, in a kv tile: a warpgroup has room for two


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning only: the result is the same up to rounding."""

    warpgroups: int = 4
    block_kv: int = 64  # keys of a kv tile
    l2_heads: int = 0  # see `sm90`
    grid: int = MULTIPROCESSORS  # blocks; 0: one a work tile
    batch_rows: int = 1  # batch rows in a work tile: see `batch_rows`

    def __post_init__(self):
        check(
            self,
            warpgroups=(self.warpgroups in (1, 2, 3, 4), "1, 2, 3 or 4"),
            block_kv=(
                16 <= self.block_kv <= MOST_KEYS and self.block_kv % 8 == 0,
                "16, 24, .. 256",
            ),
            l2_heads=(self.l2_heads >= 0, "at least 0"),
            grid=(self.grid >= 0, "at least 0"),
            batch_rows=(
                self.batch_rows == 1 or (self.batch_rows > 1 and self.block_kv >= ROWS),
                f"1, or more with block_kv >= {ROWS}",
            ),
        )

    @classmethod
    def default(cls, problem: AttentionProblem) -> "Config":
        """The fastest on an H200 of those that fit in registers and shared memory."""
        dim = max(problem.head_dim, problem.v_head_dim)
        joined = batch_rows.most_joined(problem) if _gains_by_joining(problem) else 1
        keys, l2_heads = _tile_of(problem), sm90_defaults.l2_heads(problem, dim)
        warpgroups = range(4 if dim <= 64 else 2, 0, -1)
        choices = [cls(n, keys, l2_heads, batch_rows=joined) for n in warpgroups]
        return first_that_fits(problem, smem_bytes, choices)


def limit(problem: AttentionProblem) -> Limit | None:
    """Why the kernel cannot take a problem, or None."""
    if (refused := tiles.limit(problem)) is not None:
        return refused
    dim = max(problem.head_dim, problem.v_head_dim)
    if _takes(problem, MOST_KEYS) and _tile_of(problem) * dim <= MOST_NUMBERS:
        return None
    return Limit(
        "it takes 16-bit floats and up to 64 keys, 128 up to head dim 128 and 256 up to 64, of this"
        " GPU, which masks and lengths restrict",
        "leave implementation=None",
    )


def _tile_of(problem: AttentionProblem) -> int:
    """Keys of the kv tile that has all keys of a head."""
    return next(keys for keys in (64, 128, MOST_KEYS) if problem.kv_len <= keys)


def _takes(problem: AttentionProblem, block_kv: int) -> bool:
    """Whether the keys of a head are one kv tile, which only the mask and lengths restrict."""
    others = problem.fetches > 1 or problem.zigzag > 1 or problem.mask_program is not None
    segments = "q_segment_ids" in problem.arrays
    others = others or segments or problem.dtype in ("float32", *FLOAT8)
    return not others and problem.kv_len <= block_kv


def slower(problem: AttentionProblem) -> Limit | None:
    """Why `sm90` is faster, or None."""
    dim, rows = max(problem.head_dim, problem.v_head_dim), problem.q_len
    most = 128 if dim <= 32 else 64 if dim <= 64 or rows < 56 else 0
    heads = problem.batch * problem.q_heads * pl.cdiv(rows, ROWS) > MULTIPROCESSORS
    if dim <= 128 and ((heads and _takes(problem, most)) or _gains_by_joining(problem)):
        return None
    return Limit(
        "it is for more heads than there are multiprocessors, of head dims up to 128, and so few "
        "keys that a warpgroup has room for two of them",
        "leave implementation=None",
    )


def _gains_by_joining(problem: AttentionProblem) -> bool:
    """Whether batch rows are to share work tiles."""
    many = problem.batch * problem.q_heads > 4 * MULTIPROCESSORS
    return many and batch_rows.most_joined(problem) > 1


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    return mosaic.bytes_of(scratch(plan_of(problem, config))) + BARRIERS + mosaic.REDUCTION_BYTES


@functools.lru_cache(maxsize=256)
def plan_of(problem: AttentionProblem, config: Config) -> QueryPlan:
    """The static values of a launch."""
    rows_apart, lists = None, config.warpgroups
    if config.batch_rows > 1:
        problem, rows_apart = batch_rows.joined(problem, config.batch_rows)
    if not _takes(problem, config.block_kv):
        raise ValueError(f"Config.block_kv must hold all keys of {problem}, got {config.block_kv}")
    tiling = QueryTiling(problem.q_len, problem.kv_len, ROWS, config.block_kv)
    linear = problem.score_program is not None and linear_scores.takes(problem)
    return QueryPlan(
        problem,
        config,
        tiling,
        Distribution.of(problem, tiling, (config.grid * lists, config.l2_heads), lists=lists),
        LogitRules.of(problem, config.block_kv, linear=linear),
        panels=takes_panels(problem),
        rows_apart=rows_apart,
    )


def scratch(plan: QueryPlan) -> Smem:
    """Shared memory, described once: `run` launches it, `smem_bytes` adds it up."""
    room = shared_memory.room_beside(_scratch(plan, ()))
    return _scratch(plan, shared_memory.out_widths(plan, room))


def _scratch(plan: QueryPlan, out_widths: tuple[int, ...]) -> Smem:
    slots = SLOTS * plan.config.warpgroups
    return Smem(
        q=plan.qk.scratch(slots, ROWS),
        k=plan.qk.scratch(slots, plan.config.block_kv),
        v=plan.v.scratch(slots, plan.value_rows),
        out=shared_memory.out_scratch(plan, out_widths),
        segments=None,
        q_ready=plgpu.Barrier(num_barriers=slots, num_arrivals=plan.copies[0]),
        ready=plgpu.Barrier(num_barriers=slots, num_arrivals=sum(plan.copies)),
        free=None,
    )


# ---- a warpgroup ---------------------------------------------------------------------------------


def _consume(ctx: KernelContext, block: Index, wg: Index) -> None:
    """All work tiles of a warpgroup."""
    plan, smem = ctx.plan, ctx.smem
    own = block * plan.config.warpgroups + wg
    start = WORK_TILES.start(ctx, own)

    def slot_of(i: Index) -> Index:
        return wg * SLOTS + (i & 1)

    def load(code: Index, i: Index) -> None:
        tile, slot = work_tile(ctx, code), slot_of(i)
        warpgroups.load_q(ctx, tile, jnp.int32(0), slot)
        for name in "kv":
            warpgroups.load_kv_tile(ctx, tile, name, jnp.int32(0), slot)

    def no_keys() -> OutputSums:
        return OutputSums.nothing(warpgroups.no_values(plan.v), ROWS)

    def one_tile(turn: Turn, carry: tuple[()]) -> tuple[()]:
        # All warps have read the slot: they met in the epilogue of the work tile before.
        pl.when(turn.has_next())(lambda: load(turn.following, turn.index + 1))
        tile, slot = work_tile(ctx, turn.code), slot_of(turn.index)
        rows = QueryRows(tile, tile.row, wg, span_of_rows(plan, tile, jnp.int32(0)), slot)
        plgpu.barrier_wait(smem.q_ready.at[slot])
        plgpu.barrier_wait(smem.ready.at[slot])
        attend = functools.partial(_attend, ctx, rows)
        if "empty" in plan.sections:
            has_keys = rows.span.hi > rows.span.lo
            result = lax.cond(has_keys, attend, no_keys)
        else:
            result = attend()
        warpgroups.store_result(ctx, rows, result)
        return carry

    pl.when(start.count > 0)(lambda: load(start.codes[0], jnp.int32(0)))
    WORK_TILES.for_each_tile(ctx, own, start, one_tile, ())
    plgpu.wait_smem_to_gmem(0)


def _attend(ctx: KernelContext, rows: QueryRows) -> OutputSums:
    """The rows' only kv tile."""
    plan, smem, slot = ctx.plan, ctx.smem, rows.q_slot
    q, k, v = (panels.tiles(x, slot) for x in (smem.q, smem.k, smem.v))
    s = wgmma.matmul((ROWS, k[0].shape[0]), q, k, issue=wgmma.score_panels)
    masked = "first_masked" in plan.sections
    if plan.rows_apart is not None:
        masked, rows = True, rows._replace(tile=rows.tile._replace(mask=plan.rows_apart))
    s, offset = logits.masked_logits(ctx, rows, 0, slot, s, masked)
    nothing = mosaic.filled((ROWS,), -jnp.inf)
    new = softmax.step(s, plan.logit_rules.unit, nothing, empty_ok=True, offset=offset)
    p = warpgroups.widened(new.p.astype(plan.v.dtype), v)
    acc = wgmma.add_value_panels(warpgroups.no_values(plan.v), p, v)
    return OutputSums(acc, new.row_sum, new.row_max)


# ---- the kernel and its call --------------------------------------------------------------------


def _kernel(refs: ForwardRefs, out: GmemRef, lse: GmemRef, smem: Smem, *, plan: QueryPlan) -> None:
    ctx = KernelContext(plan, refs._replace(out=out, lse=lse), smem)
    _consume(ctx, lax.axis_index("block"), lax.axis_index("wg"))


def run(
    inputs: AttentionInputs, problem: AttentionProblem, config: Config
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, N, Hv] in q's dtype, log-sum-exp float32 [B, N, T]."""
    plan = plan_of(problem, config)
    if config.batch_rows > 1:
        inputs = batch_rows.joined_inputs(inputs, config.batch_rows)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=sm90.results(plan),
        scratch_types=(scratch(plan),),
        grid=(plan.order.grid // plan.order.lists,),
        grid_names=("block",),
        num_threads=config.warpgroups,
        thread_name="wg",
        compiler_params=mosaic.without_barriers(),
        kernel_name="flash_fwd_sm90_one_tile",
    )
    out, lse = kernel(sm90.operands(plan, inputs))
    out = out[:, : plan.problem.q_len, :, : problem.v_head_dim]
    return (out, lse) if config.batch_rows == 1 else batch_rows.split(out, lse, config.batch_rows)


KERNEL = Kernel(Config, limit, smem_bytes, run, slower, shares_keys=sm90.shares_keys)
