"""Tangents of attention for every GPU from Ampere on: bfloat16, float16 and float32.

The mathematics is that of `flash_jvp.sm90`, with mma.sync and cp.async. Grid and orientation are
those of the portable forward: a block owns 64 query rows of one head and walks over the kv tiles
that they need. K, V and their tangents of the next tile are loaded under this one's arithmetic
where there is room for two (`Config.stages`).

Rows past a length and columns past a head dim are zeros that cp.async puts there. float32 is
multiplied in bfloat16 terms, as in the forward. Where 64 rows of q, q' and a tile of 16 keys do not
fit in shared memory, no kernel takes the problem.
"""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import AttentionProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import softmax, tile_logits, tile_scheduler
from pallas_attn.kernels.attention.array_tiles import load_tile
from pallas_attn.kernels.attention.logits import LogitTile
from pallas_attn.kernels.attention.sm80_common import Copy, MmaFormat, copy_async
from pallas_attn.kernels.attention.tile_scheduler import QueryPlan
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext, Span, WorkTile
from pallas_attn.kernels.flash_bwd.sm90_dq import kv_tile_of, span_of
from pallas_attn.kernels.flash_jvp import operands
from pallas_attn.kernels.flash_jvp.operands import Residuals, TangentRefs
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.config import check, first_that_fits
from pallas_attn.kernels.lang.types import (
    Carry,
    GmemRef,
    Index,
    Predicate,
    RegisterTile,
    SmemRef,
)
from pallas_attn.kernels.mma import mma_sync


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning only: the result is the same up to rounding."""

    block_kv: int = 32  # keys of a kv tile
    stages: int = 2  # kv tiles in shared memory

    warpgroups = 1

    def __post_init__(self) -> None:
        check(
            self,
            block_kv=(16 <= self.block_kv <= 128 and self.block_kv % 16 == 0, "16, 32, .. 128"),
            stages=(self.stages in (1, 2), "1 or 2"),
        )

    @classmethod
    def default(cls, problem: AttentionProblem) -> "Config":
        """The first for which the GPU has the shared memory."""
        choices = [cls(32, 2), cls(32, 1), cls(16, 1)]
        if problem.dtype != "float32" and max(problem.head_dim, problem.v_head_dim) <= 64:
            choices.insert(0, cls(64, 2))
        return first_that_fits(problem, smem_bytes, choices)


@functools.lru_cache(maxsize=256)
def plan_of(problem: AttentionProblem, config: Config) -> QueryPlan:
    """The static values of a launch."""
    return QueryPlan.of(problem, config, form=MmaFormat(problem))


# ---- shared memory ------------------------------------------------------------------------------


class Smem(NamedTuple):
    """Shared memory. None: not in this problem."""

    q: SmemRef  # [64, ..]
    q_dot: SmemRef
    k: SmemRef  # [stages * block_kv, ..]
    k_dot: SmemRef
    v: SmemRef
    v_dot: SmemRef


def scratch(plan: QueryPlan) -> Smem:
    """Shared memory, described once: `run` launches it, `smem_bytes` adds it up."""
    problem, form, keys = plan.problem, plan.format, plan.config.stages * plan.config.block_kv
    names = {"q", "k", *operands.values(problem), *sum(operands.score_products(problem), ())}
    rows = {"q": ROWS, "q_dot": ROWS}
    return Smem(
        *[
            form.buffer(rows.get(name, keys), form.width(name[0])) if name in names else None
            for name in Smem._fields
        ]
    )


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    return mosaic.bytes_of(scratch(plan_of(problem, config))) + mosaic.REDUCTION_BYTES


# ---- copies to shared memory, which all threads of a block issue --------------------------------


def _copies(
    ctx: KernelContext, names: tuple[str, ...], at: tuple[Index, ...], rows: int
) -> list[Copy]:
    """Copies of `rows` rows of those of these arrays that are there; `at`: see `Copy`."""
    plan, refs, smem = ctx
    copies = []
    for name in names:
        if getattr(smem, name) is None:
            continue
        ref, columns = getattr(refs, name), plan.format.terms * plan.format.width(name[0])
        shape = (rows, ref.shape, columns, name[0] == "q")
        copies.append(Copy((getattr(smem, name), ref), at, shape))
    return copies


def _copies_of_queries(ctx: KernelContext, tile: WorkTile) -> list[Copy]:
    live = (ctx.plan.problem.q_len if tile.q_len is None else tile.q_len) - tile.row
    at = (tile.batch, tile.head, tile.row, jnp.int32(0) + live, jnp.int32(0))
    return _copies(ctx, ("q", "q_dot"), at, ROWS)


def _copies_of_keys(ctx: KernelContext, tile: WorkTile, key: Index, slot: Index) -> list[Copy]:
    """The keys from `key` on; at or past the last one, zeros."""
    block, head = ctx.plan.config.block_kv, lax.div(tile.head, jnp.int32(ctx.plan.problem.group))
    at = (tile.batch, head, key, jnp.int32(0) + tile.kv_len - key, slot * block)
    return _copies(ctx, ("k", "k_dot", "v", "v_dot"), at, block)


# ---- mainloop -----------------------------------------------------------------------------------


class Sums(NamedTuple):
    """The carry from kv tile to kv tile."""

    acc: RegisterTile  # [ROWS, v columns]: P v' + (P o S') v
    row_sum: RegisterTile  # [ROWS, PARTIALS]: of P o S'


def _mainloop(ctx: KernelContext, tile: WorkTile, span: Span) -> Sums:
    """All kv tiles of a block's rows."""
    plan, refs, _ = ctx
    block, ahead = plan.config.block_kv, plan.config.stages > 1
    copies = functools.partial(_copies_of_keys, ctx, tile)
    lse = mosaic.load(refs.lse.at[tile.batch, tile.head, pl.ds(tile.row, ROWS)], mosaic.ROW)

    def key_of(t: Index) -> Index:
        return kv_tile_of(ctx, tile, t) * block

    first = copies(key_of(span.lo), jnp.int32(0)) if ahead else []
    copy_async(*_copies_of_queries(ctx, tile), *first, pending=None)

    def step(t: Index, sums: Carry) -> Any:
        slot = (t - span.lo) & 1 if ahead else jnp.int32(0)
        if ahead:
            next_key = key_of(jnp.minimum(t + 1, span.hi - 1))
            following = jnp.where(t + 1 < span.hi, next_key, tile.kv_len)
            copy_async(*copies(following, 1 - slot), pending=0)
        else:
            copy_async(*copies(key_of(t), slot), pending=None, sync=True)
            copy_async(pending=0)
        where = (tile.batch, tile.head, tile.row, key_of(t), tile.q_offset, tile.kv_len, tile.mask)
        masked = (t < span.full_lo) | (t >= span.full_hi)
        return _step(ctx, LogitTile(*where, q_axis=0), slot * block, (lse, masked), sums)

    acc = mosaic.filled((ROWS, plan.format.v_width), 0.0)
    start = Sums(acc, mosaic.filled((ROWS, softmax.PARTIALS), 0.0))
    return lax.fori_loop(span.lo, span.hi, step, start)


def _step(
    ctx: KernelContext,
    tile: LogitTile,
    first: Index,
    how: tuple[RegisterTile, Predicate],
    sums: Sums,
) -> Sums:
    """A kv tile that lies in shared memory from row `first` on. `how`: the lse, and whether to
    mask.
    """
    (plan, refs, smem), (lse, masked) = ctx, how
    problem, form = plan.problem, plan.format
    sizes = (ROWS, plan.config.block_kv, form.k_width)

    def product(left: str, right: str, before: RegisterTile | None = None) -> RegisterTile:
        a, b = (getattr(smem, left), jnp.int32(0)), (getattr(smem, right), first)
        return mma_sync.scores(a, b, sizes, form.terms, (before, 0, sizes[2]))

    p, slope = tile_logits.probabilities(ctx, tile, product("q", "k"), lse, masked)
    weights, s_dot = ([p] if "v" in problem.tangents else []), None
    for left, right in operands.score_products(problem):
        s_dot = product(left, right, s_dot)
    if s_dot is not None:
        s_dot = s_dot * problem.scale
        s_dot = s_dot if slope is None else s_dot * slope
    if "bias" in problem.tangents:
        bias_dot = load_tile(refs.bias_dot, tile, p.shape).astype(jnp.float32)
        s_dot = bias_dot if s_dot is None else s_dot + bias_dot
        s_dot = jnp.where(p > 0, s_dot, 0.0)  # past a length it may hold anything
    row_sum, acc = sums.row_sum, sums.acc
    if s_dot is not None:
        weights.append(p * s_dot)
        row_sum = row_sum + softmax.partials(weights[-1], operator.add)
    for x, name in zip(weights, operands.values(problem), strict=True):
        terms = mma_sync.terms_of(x, form.terms, form.dtype)
        acc = mma_sync.matmul_add(acc, terms, getattr(smem, name), first, form.v_width)
    return Sums(acc, row_sum)


# ---- the kernel and its call --------------------------------------------------------------------


def _kernel(
    refs: TangentRefs, out_dot: GmemRef, lse_dot: GmemRef, smem: Smem, *, plan: QueryPlan
) -> None:
    ctx = KernelContext(plan, refs, smem)
    tile = tile_scheduler.work_tile(ctx, refs.schedule[lax.axis_index("block"), 1])
    acc, row_sum = _mainloop(ctx, tile, span_of(ctx, tile))
    total, rows = row_sum.sum(axis=1), pl.ds(tile.row, ROWS)
    if operands.moves_scores(plan.problem):
        out = mosaic.load(refs.out.at[tile.batch, tile.head, rows], mosaic.TILE)
        acc = acc - out.astype(jnp.float32) * mosaic.broadcast_rows(total, acc.shape)
    if tile.q_len is not None:
        inside = mosaic.positions((ROWS,), 0, tile.row) < tile.q_len
        total = jnp.where(inside, total, 0.0)
        acc = jnp.where(mosaic.broadcast_rows(inside, acc.shape), acc, 0.0)
    mosaic.store(lse_dot.at[tile.batch, tile.head, rows], total)
    at = (tile.batch, tile.head, tile.row, plan.problem.q_len - tile.row)
    mma_sync.write(acc.astype(out_dot.dtype), out_dot, at)


def run(
    residuals: Residuals, problem: AttentionProblem, config: Config
) -> tuple[jax.Array, jax.Array]:
    """The tangents of out [B, T, N, Hv], in q's dtype, and of lse, float32 [B, N, T]."""
    plan, residuals = plan_of(problem, config), Residuals(*residuals)
    batch, heads, q_len = problem.batch, problem.q_heads, problem.q_len
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=(
            plan.format.result(q_len, heads, problem.v_head_dim),
            jax.ShapeDtypeStruct((batch, heads, plan.tiling.padded_rows), jnp.float32),
        ),
        scratch_types=(scratch(plan),),
        grid=(plan.order.grid,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="flash_jvp_sm80",
    )
    out_dot, lse_dot = kernel(_operands(plan, residuals))
    return out_dot, lse_dot[:, :, :q_len]


def _operands(plan: QueryPlan, residuals: Residuals) -> TangentRefs:
    """Global memory that the kernel reads. Copied are: float32, into terms; out, by head and in
    whole tiles; bias and mask_array where T or S is no multiple of a tile; segment ids.
    """
    inputs, fields = residuals.inputs, operands.of_call(plan, residuals)
    arrays = {name: getattr(inputs, name) for name in "qkv"}
    arrays |= {f"{name}_dot": x for name, x in residuals.tangents.items() if name != "bias"}
    fields |= {name: plan.format.operand(x) for name, x in arrays.items()}
    sizes = {2: plan.tiling.padded_rows, 3: plan.format.v_width}
    out = residuals.out.swapaxes(1, 2)
    pads = [(0, sizes.get(axis, n) - n) for axis, n in enumerate(out.shape)]
    fields["out"] = jnp.pad(out, pads)
    return TangentRefs(**{name: fields[name] for name in TangentRefs._fields if name in fields})


def limit(problem: AttentionProblem) -> Limit | None:
    """Why the kernel cannot take a problem, or None."""
    if (refused := operands.limit(problem)) is not None:
        return refused
    if problem.share > 1:
        return Limit("batch rows that read the same k and v", "none is needed: XLA does it")
    return None


KERNEL = Kernel(Config, limit, smem_bytes, run)
