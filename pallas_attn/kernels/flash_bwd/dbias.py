"""The gradient of a bias, for the Hopper backward: dS, summed over what the bias is broadcast over.

A kernel of its own that computes S and dP once more, since the tiles of scores that read the same
tile of the bias are far apart in the schedules of the other kernels. A block owns one tile of 64
queries by 64 keys of the bias and walks over the tiles of scores that read it: all batch rows,
heads, query tiles or kv tiles along which the bias has one element. Their dS add up in registers in
float32, in one order. Where the bias has too few tiles to fill the GPU, the walk is split into
chunks, which XLA adds up, as it does the 64 rows or columns of a tile that stand for one element.
Nothing else quadratic is stored. It is not fast: each tile of scores loads four tiles, so a bias
that wants a gradient about doubles the time of a backward pass.

Shared memory: q, do, k and v of a tile of scores, in a ring of `stages`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.kernels.attention import score_mod, tma_operands
from pallas_attn.kernels.attention.logits import LogitTile
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext, mask_of
from pallas_attn.kernels.flash_bwd.float32 import scaled, units_of
from pallas_attn.kernels.flash_bwd.operands import BackwardRefs
from pallas_attn.kernels.flash_bwd.producer import load_rows
from pallas_attn.kernels.flash_fwd import tile_scheduler
from pallas_attn.kernels.flash_fwd.tile_scheduler import QueryPlan
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.panels import Panels
from pallas_attn.kernels.lang.types import (
    Barrier,
    GmemRef,
    Index,
    KernelConfig,
    Predicate,
    RegisterTile,
)
from pallas_attn.kernels.mma import wgmma
from pallas_attn.masks import Mask

BLOCKS = 2 * tile_scheduler.BLOCKS  # enough to fill the GPU
RING_BYTES = 200 * 1024  # bytes of shared memory for the ring


# ---- the walk over tiles of scores --------------------------------------------------------------


class BiasWalk(NamedTuple):
    """The tiles of scores over which each tile of the bias is summed."""

    bias_tiles: tuple[int, ...]  # batch rows, heads, query tiles, kv tiles of the bias
    readers: tuple[int, ...]  # tiles of scores along each axis that read one tile of the bias
    chunks: int

    @property
    def steps(self) -> int:
        """Tiles of scores of a chunk."""
        return pl.cdiv(math.prod(self.readers), self.chunks)


class BiasBlock(NamedTuple):
    """A block's tile of the bias, as a number, and its chunk of the walk."""

    bias_tile: Index
    chunk: Index


class BiasStep(NamedTuple):
    """A tile of scores on a block's walk."""

    batch: Index
    head: Index
    row: Index
    key: Index
    q_offset: Index
    q_len: Index
    kv_len: Index
    mask: Mask
    live: Predicate  # some query may see some key


def walk_of(plan: QueryPlan) -> BiasWalk:
    problem = plan.problem
    assert problem.bias_shape is not None
    key_tiles = pl.cdiv(problem.kv_len, plan.config.block_kv)
    scores = (problem.batch, problem.q_heads, plan.tiling.q_tiles, key_tiles)
    tiles = tuple(1 if n == 1 else m for n, m in zip(problem.bias_shape, scores, strict=True))
    readers = tuple(m // n for n, m in zip(tiles, scores, strict=True))
    chunks = min(math.prod(readers), pl.cdiv(BLOCKS, math.prod(tiles)))
    return BiasWalk(tiles, readers, chunks)


def step_of(ctx: KernelContext, walk: BiasWalk, bias_tile: Index, n: Index) -> BiasStep:
    """Tile of scores n of a tile of the bias."""
    plan, refs, _ = ctx
    problem, where, rest = plan.problem, [], bias_tile
    for count in reversed(walk.bias_tiles):
        where.append(lax.rem(rest, jnp.int32(count)))
        rest = lax.div(rest, jnp.int32(count))
    rest = n
    for axis, count in enumerate(reversed(walk.readers)):
        where[axis] = where[axis] * 1 if count == 1 else lax.rem(rest, jnp.int32(count))
        rest = lax.div(rest, jnp.int32(count))
    key_tile, q_tile, head, batch = where
    q_offset: Index = refs.q_offset[batch] if plan.has("q_offset") else problem.q_offset
    kv_len: Index = refs.kv_lengths[batch] if plan.has("kv_lengths") else problem.kv_len
    q_len: Index = refs.q_lengths[batch] if plan.has("q_lengths") else problem.q_len
    row = q_tile * ROWS
    mask, key = mask_of(problem, refs, batch), key_tile * plan.config.block_kv
    span = plan.span(mask, q_offset + row, ROWS, kv_len)
    live = (n < math.prod(walk.readers)) & (row < q_len)
    live = live & (key_tile >= span.lo) & (key_tile < span.hi)
    return BiasStep(batch, head, row, key, q_offset, q_len, kv_len, mask, live)


def sums_shape(plan: QueryPlan, walk: BiasWalk) -> tuple[int, ...]:
    """[chunks, batch rows, heads, rows, keys] of the blocks' sums."""
    *heads, q_tiles, key_tiles = walk.bias_tiles
    return walk.chunks, *heads, q_tiles * ROWS, key_tiles * plan.config.block_kv


def store_place(walk: BiasWalk, block: BiasBlock, shape: tuple[int, int]) -> tuple[Any, ...]:
    """The place of a block's sum in an array of `sums_shape`."""
    where, rest = [], block.bias_tile
    for count, size in zip(reversed(walk.bias_tiles), (*reversed(shape), 1, 1), strict=True):
        where.append(lax.rem(rest, jnp.int32(count)) * size)
        rest = lax.div(rest, jnp.int32(count))
    key, row, head, batch = where
    return block.chunk, batch, head, pl.ds(row, shape[0]), pl.ds(key, shape[1])


def folded(sums: jax.Array, bias: jax.Array) -> jax.Array:
    """The chunks, and the rows or columns that stand for one element, added up."""
    dbias = sums[0] if sums.shape[0] == 1 else sums.sum(axis=0)
    for axis in (2, 3):
        if bias.shape[axis] == 1:
            dbias = dbias.sum(axis=axis, keepdims=True)
    return dbias[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)


# ---- the kernel ---------------------------------------------------------------------------------


class BiasSmem(NamedTuple):
    q: Panels
    do: Panels
    k: Panels
    v: Panels
    ready: Barrier
    free: Barrier


def scratch(plan: QueryPlan) -> BiasSmem:
    stages = 2 if 2 * _tile_bytes(plan) <= RING_BYTES else 1
    q, do, k, v = (
        form.scratch(stages, rows)
        for rows in (ROWS, plan.config.block_kv)
        for form in (plan.qk, plan.v)
    )
    copies = 2 * (plan.qk.copies + plan.v.copies)
    ready = plgpu.Barrier(num_barriers=stages, num_arrivals=copies)
    return BiasSmem(q, do, k, v, ready, plgpu.Barrier(num_barriers=stages))


def _tile_bytes(plan: QueryPlan) -> int:
    """Bytes of the four tiles that a tile of scores is made of."""
    rows = ROWS + plan.config.block_kv
    return rows * sum(form.columns * form.itemsize for form in (plan.qk, plan.v))


def _produce(ctx: KernelContext, walk: BiasWalk, block: BiasBlock) -> None:
    plan, refs, smem = ctx
    stages = smem.ready.shape[0]

    def body(i: Index, count: Index) -> Index:
        step = step_of(ctx, walk, block.bias_tile, block.chunk * walk.steps + i)

        @pl.when(step.live)
        def _():
            slot = lax.rem(count, jnp.int32(stages))
            pl.when(count >= stages)(lambda: plgpu.barrier_wait(smem.free.at[slot]))
            kv_head = lax.div(step.head, jnp.int32(plan.problem.group))
            queries, keys = (step.batch, step.head, step.row), (step.batch, kv_head, step.key)
            for name, at in (("q", queries), ("do", queries), ("k", keys), ("v", keys)):
                to = getattr(smem, name), slot, smem.ready.at[slot]
                load_rows(getattr(refs, name), at, *to)

        return count + step.live.astype(jnp.int32)

    lax.fori_loop(0, walk.steps, body, jnp.int32(0))


def _consume(ctx: KernelContext, out: GmemRef, walk: BiasWalk, block: BiasBlock) -> None:
    plan, _, smem = ctx
    shape = (ROWS, plan.config.block_kv)

    def body(i: Index, carry: tuple[RegisterTile, Index]) -> tuple[RegisterTile, Index]:
        step = step_of(ctx, walk, block.bias_tile, block.chunk * walk.steps + i)

        def add(carry: tuple[RegisterTile, Index]) -> tuple[RegisterTile, Index]:
            acc, count = carry
            slot = lax.rem(count, jnp.int32(smem.ready.shape[0]))
            plgpu.barrier_wait(smem.ready.at[slot])
            ds = _ds(ctx, step, slot)
            plgpu.barrier_arrive(smem.free.at[slot])
            return acc + ds, count + 1

        return lax.cond(step.live, add, lambda carry: carry, carry)

    acc, _ = lax.fori_loop(0, walk.steps, body, (mosaic.filled(shape, 0.0), jnp.int32(0)))
    mosaic.store(out.at[store_place(walk, block, shape)], acc)


def _ds(ctx: KernelContext, step: BiasStep, slot: Index) -> RegisterTile:
    plan, refs, smem = ctx
    shape = (ROWS, plan.config.block_kv)
    kinds = (plan.qk.kind, plan.v.kind) * 2
    issue: Callable[..., None] = wgmma.score_panels
    q, do, k, v = (panels.tiles(rows, slot) for rows in smem[:4])
    if not plan.panels:
        q, do, k, v = (
            wgmma.terms_of_smem(ref.at[slot], kind)
            for ref, kind in zip(smem[:4], kinds, strict=True)
        )
        issue, k, v = wgmma.multiply, wgmma.transposed(k), wgmma.transposed(v)
    kv_head = lax.div(step.head, jnp.int32(plan.problem.group))
    units = units_of(refs.units, step.batch, kv_head)
    s = scaled(wgmma.matmul(shape, q, k, issue=issue), units.scores)
    dp = scaled(wgmma.matmul(shape, do, v, issue=issue), units.dp)
    where = (step.batch, step.head, step.row, step.key, step.q_offset, step.kv_len, step.mask)
    lse, delta = (
        mosaic.load(ref.at[step.batch, step.head, pl.ds(step.row, ROWS)], mosaic.ROW)
        for ref in (refs.lse, refs.delta)
    )
    p, _ = score_mod.probabilities(ctx, LogitTile(*where, q_axis=0), s, lse, True)
    ds = p * (dp - mosaic.broadcast_rows(delta, shape))
    # Past a length there may be NaN in s and in dp.
    inside = mosaic.positions(shape, 0, step.row) < step.q_len
    return scaled(jnp.where(inside & (p != 0), ds, 0.0), units.ds)


def _kernel(
    refs: BackwardRefs, out: GmemRef, smem: BiasSmem, *, plan: QueryPlan, walk: BiasWalk
) -> None:
    ctx = KernelContext(plan, refs, smem)
    block = BiasBlock(lax.axis_index("tile"), lax.axis_index("chunk"))
    wg = lax.axis_index("wg")
    pl.when(wg == 1)(lambda: _produce(ctx, walk, block))
    pl.when(wg == 0)(lambda: _consume(ctx, out, walk, block))


def plan_of(problem: AttentionProblem, config: KernelConfig) -> QueryPlan:
    """By tiles of 64 by 64, or 32 where four such do not fit; `config` is the forward's class."""
    for block in (ROWS, ROWS // 2):
        plan = QueryPlan.of(problem, config(warpgroups=1, block_kv=block))
        plan = dataclasses.replace(plan, panels=tma_operands.takes_panels(problem))
        if _tile_bytes(plan) <= RING_BYTES:
            break
    return plan


def dbias_of(plan: QueryPlan, inputs: AttentionInputs, refs: BackwardRefs) -> jax.Array:
    """The cotangent of inputs.bias."""
    walk, bias = walk_of(plan), inputs.bias
    assert bias is not None
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan, walk=walk),
        out_type=jax.ShapeDtypeStruct(sums_shape(plan, walk), jnp.float32),
        scratch_types=(scratch(plan),),
        **mosaic.grid_of(tile=math.prod(walk.bias_tiles), chunk=walk.chunks),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="flash_bwd_dbias_sm90",
    )
    return folded(kernel(refs), bias)
