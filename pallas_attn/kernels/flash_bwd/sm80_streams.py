"""dK and dV of the portable backward where shared memory has room for few columns at a time
(`streams`): a block of 4 warps owns 64 keys, which are the left operand of both products of a step,
and comes upon their parts again with every query tile. P^T and dS^T stay in registers.

What a tile adds to a gradient is added up by itself: tensor cores round towards 0.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import score_mod, sm80_column_stream
from pallas_attn.kernels.attention.sm80_column_stream import ROWS, Product, Rows, Stream
from pallas_attn.kernels.flash_bwd import plan as shared
from pallas_attn.kernels.flash_bwd.plan import Item, Refs, across
from pallas_attn.kernels.flash_bwd.sm80_load import KeyPlan, step_of
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.mma import mma_sync


def _stream(plan: KeyPlan, refs: Refs, smem: Any, item: Item, which: str) -> Stream:
    length: Any = plan.problem.q_len if item.q_len is None else item.q_len
    block, (k_parts, v_parts) = plan.config.block_q, (plan.k_parts, plan.v_parts)

    def rows_of(name, step):
        if name in ("k", "v"):
            live = jnp.where(step.there, item.kv_len - item.key, 0)
            return Rows(item.batch, item.kv_head, item.key, live)
        live = jnp.where(step.there, length - step.t * block, 0)
        return Rows(item.batch, step.head, step.t * block, live)

    products = [Product("k", "q", k_parts)]
    if "v" in which:
        products.append(Product(None, "do", v_parts))
    if "k" in which:
        products += [Product("v", "do", v_parts), Product(None, "q", k_parts)]
    return Stream(plan, smem, refs, products, rows_of)


def _kernel(refs: Refs, *rest: Any, plan: KeyPlan, which: str) -> None:
    *outs, smem = rest
    item = shared.item_of(plan, refs, refs.dealt[lax.axis_index("cta"), 1])
    stream = _stream(plan, refs, smem, item, which)
    shape, parts = (ROWS, plan.config.block_q), plan.parts_of_numbers
    steps = plan.problem.group * item.steps
    stream.begin(step_of(plan, item, jnp.int32(0)))

    def one(i, grads):
        grads, step = dict(zip(which, grads, strict=True)), step_of(plan, item, i)
        walk = stream.step(i, step, step_of(plan, item, i + 1))
        rows = pl.ds(step.t * shape[1], shape[1])
        lse, delta = (
            mosaic.load(ref.at[item.batch, step.head, rows], mosaic.COLUMN)
            for ref in (refs.lse, refs.delta)
        )
        place = shared.place_of(item, step.head, step.t, item.key, shape[1])
        masked = shared.masked(plan, item, step.t)
        p, slope = score_mod.probabilities(plan, refs, place, walk.scores(), lse, masked)
        if "v" in which:
            of_p = mma_sync.parts_of(p, parts, plan.operand_dtype)
            grads["v"] = walk.weigh(grads["v"], of_p)
        if "k" in which:
            ds = p * (walk.scores() - across(delta, shape))
            ds = ds if slope is None else ds * slope
            of_ds = mma_sync.parts_of(ds, parts, plan.operand_dtype)
            grads["k"] = walk.weigh(grads["k"], of_ds)
        return tuple(grads[name] for name in which)

    counts = {"k": plan.k_parts, "v": plan.v_parts}
    nothing = tuple(sm80_column_stream.nothing(plan, counts[name]) for name in which)
    found = lax.fori_loop(0, steps, one, nothing)
    at = (item.batch, item.kv_head, item.key, plan.problem.kv_len - item.key)
    for name, grad, out in zip(which, found, outs, strict=True):
        scale = plan.problem.scale if name == "k" else 1.0
        sm80_column_stream.write([x * scale for x in grad], out, at)


def launch(plan: KeyPlan, refs: Refs, which: str) -> dict[str, Any]:
    """dk, dv or both, by name."""
    problem = plan.problem
    counts = {"k": plan.k_parts, "v": plan.v_parts}
    dims = {"k": problem.head_dim, "v": problem.v_head_dim}
    shapes = {
        name: (problem.batch, problem.kv_len, problem.kv_heads * counts[name], plan.config.columns)
        for name in which
    }
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan, which=which),
        out_type=tuple(jax.ShapeDtypeStruct(shapes[name], problem.dtype) for name in which),
        scratch_types=(sm80_column_stream.scratch(plan, plan.config.block_q),),
        grid=(plan.ctas,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=f"flash_bwd_{which}_streams_sm80",
    )
    found = zip(which, kernel(refs), strict=True)
    return {name: plan.joined(x, dims[name]) for name, x in found}
