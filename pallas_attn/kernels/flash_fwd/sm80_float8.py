"""Flash attention forward on float8 with scales for every GPU from Ada on, by mma.sync on 8 bits.

The kernel of `sm80.py` with one stage and 64 query rows a block. Two float8 lie and are read as a
16-bit number (mma/mma_float8.py). V is transposed before the launch, in tiles (float8_values.py),
since `ldmatrix` transposes 16 bits only, so both matmuls are those of `mma_sync.scores`. The
product P V of a kv tile is added to the others in float32, some columns at a time, so that
registers hold one part of it. Scales are those of float8_mainloop.py.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import FLOAT8, AttentionInputs, AttentionProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import (
    sm80_common,
    softmax,
    tile_logits,
    tiles,
    tma_operands,
)
from pallas_attn.kernels.attention.sm80_common import Copy, MmaFormat, copy_async
from pallas_attn.kernels.attention.softmax import OutputSums
from pallas_attn.kernels.attention.tile_scheduler import QueryPlan
from pallas_attn.kernels.attention.tiles import ROWS, ForwardRefs, KernelContext, QueryRows
from pallas_attn.kernels.flash_fwd import (
    float8_mainloop,
    float8_values,
    sm80,
)
from pallas_attn.kernels.flash_fwd.float8_mainloop import EXPONENTS, SPREAD, Factors
from pallas_attn.kernels.flash_fwd.sm80 import ForwardSmem
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.config import check
from pallas_attn.kernels.lang.types import GmemRef, Index
from pallas_attn.kernels.mma import mma_float8, mma_sync

PART = 64  # columns of P V that are added up at a time
LINE = 16  # bytes that cp.async copies: columns of q and k are a multiple


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning only: the result is the same up to rounding."""

    block_kv: int = 64  # keys of a kv tile

    warpgroups = stages = 1
    float32_sums = True
    columns = 0

    def __post_init__(self) -> None:
        check(self, block_kv=(self.block_kv in (32, 64, 96, 128), "32, 64, 96 or 128"))

    @classmethod
    def default(cls, problem: AttentionProblem) -> "Config":
        """Fewer keys where registers hold a wide output."""
        return cls(32 if max(problem.head_dim, problem.v_head_dim) > 128 else 64)


def limit(problem: AttentionProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    if problem.dtype not in FLOAT8:
        return Limit(f"it takes float8, not {problem.dtype}", 'say implementation="reference"')
    return tma_operands.dims_limit(problem) or tiles.sizes_limit(problem)


def plan_of(problem: AttentionProblem, config: Config) -> QueryPlan:
    """The plan, in which q and k have a 16-bit number for two float8."""
    dim = tma_operands.round_up(problem.head_dim, LINE) // 2
    paired = dataclasses.replace(problem, dtype="bfloat16", head_dim=dim)
    return QueryPlan.of(paired, config, form=MmaFormat(paired))


def scratch(plan: QueryPlan) -> ForwardSmem:
    """Rows of q and k, and columns of v (V^T), in pairs of float8."""
    form, keys = plan.format, plan.config.block_kv
    return ForwardSmem(
        q=form.buffer(ROWS, form.k_width),
        k=form.buffer(keys, form.k_width),
        v=form.buffer(form.v_width, keys // 2),
    )


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    return mosaic.bytes_of(scratch(plan_of(problem, config))) + mosaic.REDUCTION_BYTES


# ---- copies --------------------------------------------------------------------------------------


def _v_copy(ctx: KernelContext, rows: QueryRows, t: Index) -> Copy:
    """Kv tile t of V^T, a row a column of v."""
    plan, refs, smem = ctx
    block, width = plan.config.block_kv, plan.format.v_width
    tiles_of_head = refs.v.shape[1] // (width * plan.problem.kv_heads)
    first = (_kv_head(ctx, rows) * tiles_of_head + rows.kv_tile(t)) * width
    at = (rows.tile.batch, jnp.int32(0), first, jnp.int32(width), jnp.int32(0))
    return Copy((smem.v, refs.v), at, (width, refs.v.shape, block // 2, True))


def _kv_head(ctx: KernelContext, rows: QueryRows) -> Index:
    return lax.div(rows.tile.head, jnp.int32(ctx.plan.problem.group))


# ---- mainloop ------------------------------------------------------------------------------------


def _mainloop(ctx: KernelContext, rows: QueryRows, kind: str) -> OutputSums:
    """All kv tiles of the block's rows, from the last to the first. `kind`: dtype of q, k and v."""
    copy_async(sm80.q_copy(ctx, rows), sm80.kv_copy(ctx, rows, rows.span.hi - 1, "k"), pending=None)
    step = functools.partial(_step, ctx, rows, Factors.of(ctx, rows), kind)
    return sm80_common.over_kv_tiles(ctx.plan, rows.span, step, _no_keys(ctx.plan))


def _no_keys(plan: QueryPlan) -> OutputSums:
    width = plan.format.v_width
    acc: Any = tuple(
        [mosaic.filled((ROWS, min(PART, width - n)), 0.0) for n in range(0, width, PART)]
    )
    return OutputSums.nothing(acc, ROWS)


def _step(
    ctx: KernelContext,
    rows: QueryRows,
    factors: Factors,
    kind: str,
    masked: bool,
    t: Index,
    sums: OutputSums,
) -> OutputSums:
    """Kv tile t."""
    plan, _, smem = ctx
    form, block, zero = plan.format, plan.config.block_kv, jnp.int32(0)
    of_keys, of_values = factors.of_tile(1, t), factors.of_tile(2, t)
    copy_async(_v_copy(ctx, rows, t), pending=0)
    sizes = (ROWS, block, form.k_width)
    s = mma_sync.scores((smem.q, zero), (smem.k, zero), sizes, 1, narrow=(kind, kind))
    copy_async(sm80.kv_copy(ctx, rows, t - 1, "k"), pending=0)
    s, unit = factors.of_scores(t, None, s, of_keys)
    logits = tile_logits.logits(ctx, rows, t, s, masked)
    empty_ok = masked or plan.logit_rules.adds
    new = softmax.next_step(logits, unit, sums.row_max, empty_ok=empty_ok, exponents=EXPONENTS)
    acc, row_sum = softmax.rescaled(new, (sums.acc, sums.row_sum))
    p = mma_float8.probabilities(factors.of_values(t, None, new.p))
    narrow, parts = (mma_float8.PROBABILITIES, kind), []
    for n, part in enumerate(acc):
        sizes = (ROWS, part.shape[1], block // 2)
        out = mma_sync.scores((p, zero), (smem.v, jnp.int32(n * PART)), sizes, 1, narrow=narrow)
        parts.append(part + (out if of_values is None else out * of_values))
    return OutputSums(tuple(parts), row_sum + new.row_sum, new.row_max)


# ---- the kernel and its call ---------------------------------------------------------------------


def _kernel(
    refs: ForwardRefs,
    out: GmemRef,
    lse: GmemRef,
    smem: ForwardSmem,
    *,
    plan: QueryPlan,
    kind: str,
) -> None:
    ctx = KernelContext(plan, refs._replace(out=out, lse=lse), smem)
    rows = sm80.rows_of_block(ctx)
    tile = rows.tile
    sums = sm80.sums_of(ctx, rows, functools.partial(_mainloop, kind=kind), _no_keys)
    by = refs.units[1, tile.batch, _kv_head(ctx, rows)]
    acc = lax.concatenate([part * by for part in sums.acc], 1)
    acc = sm80.finished(ctx, rows, OutputSums(acc, sums.row_sum * (1 / SPREAD), sums.row_max))
    at = (tile.batch, tile.head, rows.row, plan.problem.q_len - rows.row)
    mma_sync.write(acc.astype(out.dtype), out, at)


def run(
    inputs: AttentionInputs, problem: AttentionProblem, config: Config
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, N, Hv], log-sum-exp float32 [B, N, T]."""
    plan = plan_of(problem, config)
    sizes = problem.batch, problem.q_len, problem.q_heads, problem.v_head_dim
    out = jax.ShapeDtypeStruct(sizes, problem.result_dtype)
    ctx = KernelContext(plan, _operands(plan, inputs), scratch(plan))
    kernel = functools.partial(_kernel, kind=problem.dtype)
    return sm80.launched(kernel, ctx, out, "flash_fwd_sm80_float8")


def _operands(plan: QueryPlan, inputs: AttentionInputs) -> ForwardRefs:
    """Arrays that the kernel reads: q and k in pairs, V^T in tiles, and all factors."""
    fields: dict[str, Any] = {}
    for name in "qk":
        x = getattr(inputs, name)
        x = tma_operands.padded(x, {3: tma_operands.round_up(x.shape[3], LINE)})
        fields[name] = mma_float8.paired(x)
    fields["v"] = _tiles_of_values(plan, inputs)
    return sm80.operands(plan, inputs, fields | float8_mainloop.units_of(plan, inputs))


def _tiles_of_values(plan: QueryPlan, inputs: AttentionInputs) -> jax.Array:
    """V^T in pairs: [B, K * kv tiles * width, 1, block_kv / 2]."""
    width, block = plan.format.v_width, plan.config.block_kv
    keys = tma_operands.round_up(plan.problem.kv_len, math.lcm(block, float8_values.KEYS))
    v = float8_values.transposed(inputs.v, inputs.kv_lengths, width, keys)
    v = v.reshape(*v.shape[:3], keys // block, block).swapaxes(2, 3)
    return mma_float8.paired(v.reshape(v.shape[0], -1, 1, block))


KERNEL = Kernel(Config, limit, smem_bytes, run)
