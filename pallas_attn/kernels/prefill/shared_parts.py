"""Keys that several sequences share, read once for all of them, and merged with other results.

A part is a sequence of shared keys whose packed rows are the queries of all that share it
(`DecodeProblem.merged`). Blocks share out the kv tiles of all parts evenly (`shares`) and write
partials; `merge_parts` merges these with the results of the same queries over their own keys,
which another launch made (`Into.out`).
"""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_attn._call.problem import DecodeInputs
from pallas_attn.kernels.attention.softmax import OutputSums
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.lang.types import Index
from pallas_attn.kernels.prefill import kernel, merge_parts, packed_queries, queries, shares
from pallas_attn.kernels.prefill.plan import (
    Ending,
    Plan,
    PrefillSmem,
    Unit,
    Units,
    base_scratch,
    kernel_of,
    operands,
    partial_types,
)


def partial_tiles(plan: Plan) -> tuple[int, int]:
    """Sizes of partials: one for each q tile and each block, at most."""
    return 1, (most_q_tiles(plan) + plan.grid) * plan.config.warpgroups


def scratch(plan: Plan) -> PrefillSmem:
    return base_scratch(plan, tables=shares.sums_types(plan), counted=plgpu.Barrier())


def begin(ctx: KernelContext, wg: Index, block_id: Index) -> None:
    refs = ctx.refs
    counted = shares.CountRefs(refs.starts, refs.lengths, ctx.smem.tables, refs.results[-1])
    packed_queries.fill(ctx, wg, shares.count, counted, block_id)


def units_of(ctx: KernelContext, block_id: Index) -> Units:
    """The q tiles that have some of the block's steps."""
    share = shares.share_of(ctx, block_id)
    return Units(share.q_tile, 1 + share.paired, share.units, share=share)


def last_unit(ctx: KernelContext) -> Index:
    plan = ctx.plan
    return jnp.maximum(ctx.smem.tables.q_tiles[plan.problem.batch] * plan.problem.kv_heads - 1, 0)


def unit_of(ctx: KernelContext, units: Units, number: Index) -> Unit:
    """A q tile, and the kv tiles of it that a share has; its partial's number is no other's."""
    unit, share = packed_queries.unit_at(ctx, ctx.smem.tables.q_tiles, number), units.share
    lo, hi = (jnp.minimum(x, unit.span.hi) for x in shares.kv_tiles_of(ctx, unit.m, number, share))
    return unit._replace(span=unit.span._replace(lo=lo, hi=hi), line=number + share.block)


def store(ctx: KernelContext, end: Ending, result: OutputSums) -> None:
    queries.store_partial(ctx, end, 0, result)


QUERIES = packed_queries.QUERIES._replace(
    scratch=scratch,
    partial_tiles=partial_tiles,
    units_of=units_of,
    last_unit=last_unit,
    unit_of=unit_of,
    store=store,
    begin=begin,
)


def most_q_tiles(plan: Plan) -> int:
    """Q tiles of all sequences and kv heads, where each has as many idle rows as can be."""
    tiles, problem = plan.tiles, plan.problem
    block, chunks = tiles.head_rows * tiles.warpgroups, tiles.head_chunks
    idle = (tiles.head_rows - 1) * chunks + block - tiles.head_rows
    rows = problem.q_len * chunks + problem.batch * idle
    return problem.kv_heads * (rows // block)


@functools.partial(jax.jit, static_argnames=("plan",))
def run(plan: Plan, inputs: DecodeInputs) -> tuple[jax.Array, jax.Array]:
    """out [M, t, N, Hv] and log-sum-exp float32 [M, N, t], over own and shared keys. Jitted, so
    that a model of many layers traces it once.
    """
    refs, kept = operands(plan, inputs), (shares.kept_size(plan),)
    results = *partial_types(plan), jax.ShapeDtypeStruct(kept, jnp.int32)
    made = kernel_of(plan, kernel.block, results)(refs)
    return merge_parts.run(plan, made, refs.starts, inputs.into)
