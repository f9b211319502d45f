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
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.kernels.attention import plan as attention_plan
from pallas_attn.kernels.attention import score_mod
from pallas_attn.kernels.attention.plan import ROWS, Context, Plan
from pallas_attn.kernels.attention.score_mod import Place
from pallas_attn.kernels.flash_bwd.float32 import scaled, units_of
from pallas_attn.kernels.flash_bwd.plan import Refs
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.mma import wgmma
from pallas_attn.masks import Mask

BLOCKS = 2 * attention_plan.BLOCKS  # that fill the GPU
RING_BYTES = 200 * 1024  # of shared memory


class Smem(NamedTuple):
    q: Any
    do: Any
    k: Any
    v: Any
    ready: Any
    free: Any


class Walk(NamedTuple):
    """Over which tiles of scores each tile of the bias is summed."""

    bias_tiles: tuple[int, ...]  # batch rows, heads, query tiles, kv tiles of the bias
    readers: tuple[int, ...]  # tiles of scores along each axis that read one tile of the bias
    chunks: int

    @property
    def steps(self) -> int:
        """Tiles of scores of a chunk."""
        return pl.cdiv(math.prod(self.readers), self.chunks)


def walk_of(plan: Plan) -> Walk:
    problem = plan.problem
    assert problem.bias_shape is not None
    key_tiles = pl.cdiv(problem.kv_len, plan.config.block_kv)
    scores = (problem.batch, problem.q_heads, plan.q_tiles, key_tiles)
    tiles = tuple(1 if n == 1 else m for n, m in zip(problem.bias_shape, scores, strict=True))
    readers = tuple(m // n for n, m in zip(tiles, scores, strict=True))
    chunks = min(math.prod(readers), pl.cdiv(BLOCKS, math.prod(tiles)))
    return Walk(tiles, readers, chunks)


def scratch(plan: Plan) -> Smem:
    block, kinds = plan.config.block_kv, (plan.scores, plan.values)
    stages = 2 if 2 * _tile_bytes(plan) <= RING_BYTES else 1
    swizzles = plan.k_swizzle, plan.v_swizzle
    widths = plan.k_width, plan.v_width
    (q, do), (k, v) = (
        [
            mosaic.swizzled((stages, rows, kind.terms * width), kind.dtype, swizzle)
            for kind, width, swizzle in zip(kinds, widths, swizzles, strict=True)
        ]
        for rows in (ROWS, block)
    )
    barrier = plgpu.Barrier
    return Smem(
        q=q,
        do=do,
        k=k,
        v=v,
        ready=barrier(num_barriers=stages, num_arrivals=4),
        free=barrier(num_barriers=stages),
    )


def _tile_bytes(plan: Plan) -> int:
    """Of the four tiles that a tile of scores is made of."""
    rows = ROWS + plan.config.block_kv
    return rows * (plan.scores.bytes * plan.k_width + plan.values.bytes * plan.v_width)


class Block(NamedTuple):
    """A block's tile of the bias, as a number, and its chunk of the walk."""

    bias_tile: Any
    chunk: Any


class Step(NamedTuple):
    """A tile of scores on a block's walk."""

    batch: Any
    head: Any
    row: Any
    key: Any
    q_offset: Any
    q_len: Any
    kv_len: Any
    mask: Mask
    live: Any  # whether there is anything to see


def step_of(ctx: Context, walk: Walk, bias_tile: Any, n: Any) -> Step:
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
    q_offset: Any = refs.q_offset[batch] if plan.has("q_offset") else problem.q_offset
    kv_len: Any = problem.kv_len
    if plan.has("kv_lengths"):
        kv_len = refs.kv_lengths[batch]
    q_len: Any = problem.q_len
    if plan.has("q_lengths"):
        q_len = refs.q_lengths[batch]
    row = q_tile * ROWS
    mask, key = plan.mask_of(refs, batch), key_tile * plan.config.block_kv
    span = plan.span(mask, q_offset + row, ROWS, kv_len)
    live = (n < math.prod(walk.readers)) & (row < q_len)
    live = live & (key_tile >= span.lo) & (key_tile < span.hi)
    return Step(batch, head, row, key, q_offset, q_len, kv_len, mask, live)


def _produce(ctx: Context, walk: Walk, block: Block) -> None:
    plan, refs, smem = ctx
    stages = smem.q.shape[0]

    def one(i, count):
        step = step_of(ctx, walk, block.bias_tile, block.chunk * walk.steps + i)

        @pl.when(step.live)
        def _():
            slot = lax.rem(count, jnp.int32(stages))
            pl.when(count >= stages)(lambda: plgpu.barrier_wait(smem.free.at[slot]))
            kv_head = lax.div(step.head, jnp.int32(plan.problem.group))
            for ref, to, first, head in (
                (refs.q, smem.q, step.row, step.head),
                (refs.do, smem.do, step.row, step.head),
                (refs.k, smem.k, step.key, kv_head),
                (refs.v, smem.v, step.key, kv_head),
            ):
                columns = mosaic.columns(ref, 0, to.shape[-1], head)
                rows = pl.ds(first, to.shape[1])
                there = ref.at[step.batch, rows, head, columns]
                plgpu.copy_gmem_to_smem(there, to.at[slot], smem.ready.at[slot])

        return count + step.live.astype(jnp.int32)

    lax.fori_loop(0, walk.steps, one, jnp.int32(0))


def _ds(ctx: Context, step: Step, slot: Any) -> Any:
    plan, refs, smem = ctx
    shape = (ROWS, plan.config.block_kv)
    kinds = (plan.scores, plan.values) * 2
    q, do, k, v = (
        wgmma.terms_of_smem(ref.at[slot], kind) for ref, kind in zip(smem[:4], kinds, strict=True)
    )
    head = lax.div(step.head, jnp.int32(plan.problem.group))
    units = units_of(refs, step.batch, head)
    s = scaled(wgmma.matmul(shape, q, wgmma.transposed(k)), units.scores)
    dp = scaled(wgmma.matmul(shape, do, wgmma.transposed(v)), units.dp)
    where = (step.batch, step.head, step.row, step.key, step.q_offset, step.kv_len, step.mask)
    place = Place(*where, q_axis=0)
    lse, delta = (
        mosaic.load(ref.at[step.batch, step.head, pl.ds(step.row, ROWS)], mosaic.ROW)
        for ref in (refs.lse, refs.delta)
    )
    p, _ = score_mod.probabilities(ctx, place, s, lse, True)
    ds = p * (dp - mosaic.broadcast_rows(delta, shape))
    # What lies past a length may be NaN in s and in dp.
    inside = mosaic.positions(shape, 0, step.row) < step.q_len
    return scaled(jnp.where(inside & (p != 0), ds, 0.0), units.ds)


def _consume(ctx: Context, out: Any, walk: Walk, block: Block) -> None:
    plan, refs, smem = ctx
    shape = (ROWS, plan.config.block_kv)

    def one(i, carry):
        step = step_of(ctx, walk, block.bias_tile, block.chunk * walk.steps + i)

        def some(carry):
            acc, count = carry
            slot = lax.rem(count, jnp.int32(smem.q.shape[0]))
            plgpu.barrier_wait(smem.ready.at[slot])
            ds = _ds(ctx, step, slot)
            plgpu.barrier_arrive(smem.free.at[slot])
            return acc + ds, count + 1

        return lax.cond(step.live, some, lambda carry: carry, carry)

    acc, _ = lax.fori_loop(0, walk.steps, one, (mosaic.filled(shape, 0.0), jnp.int32(0)))
    mosaic.store(out.at[store_place(walk, block, shape)], acc)


def store_place(walk: Walk, block: Block, shape: tuple[int, int]) -> tuple[Any, ...]:
    """Where a block's sum lies in [chunks, batch rows, heads, rows, keys]."""
    where, rest = [], block.bias_tile
    for count, size in zip(reversed(walk.bias_tiles), (*reversed(shape), 1, 1), strict=True):
        where.append(lax.rem(rest, jnp.int32(count)) * size)
        rest = lax.div(rest, jnp.int32(count))
    key, row, head, batch = where
    return block.chunk, batch, head, pl.ds(row, shape[0]), pl.ds(key, shape[1])


def _kernel(refs: Refs, out: Any, smem: Smem, *, plan: Plan, walk: Walk) -> None:
    ctx, block = Context(plan, refs, smem), Block(lax.axis_index("tile"), lax.axis_index("chunk"))
    wg = lax.axis_index("wg")
    pl.when(wg == 1)(lambda: _produce(ctx, walk, block))
    pl.when(wg == 0)(lambda: _consume(ctx, out, walk, block))


def plan_of(problem: AttentionProblem, config: Any) -> Plan:
    """By tiles of 64 by 64, or 32 where four such do not fit; `config` is the forward's class."""
    plan = attention_plan.Plan(problem, config(warpgroups=1, block_kv=ROWS))
    if _tile_bytes(plan) <= RING_BYTES:
        return plan
    return dataclasses.replace(plan, config=config(warpgroups=1, block_kv=ROWS // 2))


def dbias_of(plan: Plan, inputs: AttentionInputs, refs: Refs) -> Any:
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


def sums_shape(plan: Plan, walk: Walk) -> tuple[int, ...]:
    """Of what the blocks store."""
    *heads, q_tiles, key_tiles = walk.bias_tiles
    return walk.chunks, *heads, q_tiles * ROWS, key_tiles * plan.config.block_kv


def folded(dbias: Any, bias: Any) -> Any:
    """The chunks, and the rows or columns that stand for one element, added up."""
    dbias = dbias[0] if dbias.shape[0] == 1 else dbias.sum(axis=0)
    for axis in (2, 3):
        if bias.shape[axis] == 1:
            dbias = dbias.sum(axis=axis, keepdims=True)
    return dbias[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)
