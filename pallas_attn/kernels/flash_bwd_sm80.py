"""Flash attention backward for every GPU from Ampere on: bfloat16, float16 and float32.

As FlashAttention-2 (arXiv 2307.08691): a block of 4 warps owns 64 keys of one kv head (or 128) and
walks over the query tiles that meet them, of all query heads of the group. Tiles of scores have
keys down and queries across, so that P^T and dS^T, as they come out of one matmul, are operands of
the next, and a warp needs nothing from the others for dV and dK, which stay in registers.

dQ: a step puts dS^T in shared memory, where every warp takes 16 query rows of it, and what they
make is added to a float32 array in global memory: five matmuls in all (`fused`). Where bits must
repeat, or registers or shared memory do not suffice, dQ is a kernel of its own with the forward's
grid, which computes S and dP again. Head dims above 128 leave no registers for dK and dV together:
each has its own launch. A bias that wants a gradient has a third kernel, `flash_bwd_dbias`'s walk.

Shared memory: k, v; q twice, so that the next tile arrives under this one; dO, which is asked for
when dV is done; dS^T. A block meets twice a step.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._problem import AttentionInputs, AttentionProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels import (
    flash_bwd_dq_sm80,
    flash_fwd_sm80,
    flash_plan,
    logits,
    matrices,
    operands,
    spans,
    tiles,
)
from pallas_attn.kernels import flash_bwd_plan as shared
from pallas_attn.kernels.flash_bwd_plan import Item, Refs, across
from pallas_attn.kernels.flash_fwd_sm80 import Widths, fits, turn

ROWS = flash_plan.ROWS


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning only: the result is the same up to rounding."""

    row_blocks: int = 1  # of 64 keys
    block_q: int = 64
    fused: bool = True  # dq is added up in global memory; else by a kernel of its own
    section: int = 0  # heads whose tiles of work are taken together; 0: see Plan.section
    dq_row_blocks: int = 1  # of the kernel for dq alone: its tiles
    dq_block_kv: int = 64
    dq_stages: int = 2

    ctas = 0  # one block a tile of work

    def __post_init__(self):
        blocks = (64,) if self.fused else (16, 32, 64)
        wants = {
            "row_blocks": (self.row_blocks in (1, 2), "1 or 2"),
            "block_q": (self.block_q in blocks, "64, or, if it is not fused, 16 or 32"),
            "section": (self.section >= 0, "at least 0"),
            "dq_row_blocks": (self.dq_row_blocks in (1, 2), "1 or 2"),
            "dq_block_kv": (self.dq_block_kv in (16, 32, 64), "16, 32 or 64"),
            "dq_stages": (self.dq_stages in (1, 2), "1 or 2"),
        }
        for name, (good, want) in wants.items():
            if not good:
                raise ValueError(f"Config.{name} must be {want}, got {getattr(self, name)}")

    @classmethod
    def default(cls, problem: AttentionProblem) -> "Config":
        """What serves a problem that nobody tuned: the first that has room."""
        wide = max(problem.head_dim, problem.v_head_dim) > 128
        tiles_of_dq = ((64, 2), (32, 2), (16, 2), (32, 1), (16, 1))
        choices = [
            cls(1, block, False, dq_block_kv=keys, dq_stages=stages)
            for block in (64, 32, 16)
            for keys, stages in tiles_of_dq
        ]
        if not (wide or problem.deterministic):
            choices.insert(0, cls(1, 64, True))
        return next((one for one in choices if fits(problem, smem_bytes, one)), choices[-1])


@dataclasses.dataclass(frozen=True)
class KeyPlan(Widths, shared.Plan):
    """Tiles of work are keys."""

    section_bytes = flash_plan.SECTION_BYTES

    @property
    def fused(self) -> bool:
        return self.config.fused and not self.split and not self.problem.deterministic

    @property
    def split(self) -> bool:
        """Whether dK and dV are made by a launch each."""
        return max(self.problem.head_dim, self.problem.v_head_dim) > 128


def plan_of(problem: AttentionProblem, config: Config) -> KeyPlan:
    return KeyPlan(problem, config, ROWS * config.row_blocks)


def limit(problem: AttentionProblem) -> Limit | None:
    return flash_fwd_sm80.limit(problem, Config.default(problem), smem_bytes)


class Smem(NamedTuple):
    k: Any  # [keys, ..]
    v: Any  # [keys, ..]; None where there is no dK
    q: Any  # [2 * block_q, ..]
    do: Any  # [block_q, ..]
    ds: Any  # [keys, block_q]; None where dQ is made elsewhere


def scratch(plan: KeyPlan, which: str) -> Smem:
    """Shared memory of the launch for `which`: "k", "v" or "kv", what it makes gradients of."""
    parts, block = plan.parts_of_numbers, plan.config.block_q

    def buffer(rows, width):
        return plgpu.SMEM((rows, matrices.pitch(parts * width)), plan.operand_dtype)

    return Smem(
        k=buffer(plan.keys, plan.k_width),
        v=buffer(plan.keys, plan.v_width) if "k" in which else None,
        q=buffer(2 * block, plan.k_width),
        do=buffer(block, plan.v_width),
        ds=buffer(plan.keys, block) if plan.fused else None,
    )


def _launches(plan: KeyPlan) -> tuple[str, ...]:
    return ("v", "k") if plan.split else ("kv",)


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    """Of the kernel that needs most."""
    plan = plan_of(problem, config)
    most = max(flash_fwd_sm80.buffer_bytes(scratch(plan, which)) for which in _launches(plan))
    if plan.fused:
        return most
    by_rows = flash_bwd_dq_sm80.plan_of(problem, config)
    return max(most, flash_fwd_sm80.buffer_bytes(flash_bwd_dq_sm80.scratch(by_rows)))


# ---- loading ------------------------------------------------------------------------------------


def _keys(plan: KeyPlan, refs: Refs, item: Item, to: Any, which: str) -> Any:
    """The copy of a tile of work's keys."""
    ref = getattr(refs, which)
    at = (item.batch, item.kv_head, item.key, item.kv_len - item.key, jnp.int32(0))
    width = plan.k_width if which == "k" else plan.v_width
    return (to, ref), at, (plan.keys, ref.shape, plan.parts_of_numbers * width)


class Step(NamedTuple):
    """One query tile of one head."""

    head: Any
    t: Any
    there: Any  # whether it is one


def _step_of(plan: KeyPlan, item: Item, i: Any) -> Step:
    g = lax.div(i, jnp.maximum(item.steps, 1))
    t = item.span.lo + i - g * item.steps
    return Step(item.kv_head * plan.problem.group + g, t, i < plan.problem.group * item.steps)


def _queries(plan: KeyPlan, refs: Refs, item: Item, to: Any, step: Any) -> Any:
    """The copy of a query tile of q or dO; step is (its name, a Step, the slot)."""
    which, (head, t, there), slot = step
    ref, block = getattr(refs, which), plan.config.block_q
    length: Any = plan.problem.q_len if item.q_len is None else item.q_len
    live = jnp.where(there, length - t * block, 0)
    at = (item.batch, head, t * block, live, slot * block)
    width = plan.k_width if which == "q" else plan.v_width
    return (to, ref), at, (block, ref.shape, plan.parts_of_numbers * width)


# ---- computing ----------------------------------------------------------------------------------


def _attend(plan: KeyPlan, refs: Refs, smem: Smem, item: Item, which: str) -> tuple[Any, ...]:
    """The gradients of the block's keys over all query tiles."""
    block, parts, dtype = plan.config.block_q, plan.parts_of_numbers, plan.operand_dtype
    shape, none = (plan.keys, block), jnp.int32(0)
    q_of = functools.partial(_queries, plan, refs, item, smem.q)
    do_of = functools.partial(_queries, plan, refs, item, smem.do)

    def one(i, carry):
        grads = dict(zip(which, carry, strict=True))
        step, slot = _step_of(plan, item, i), i & 1
        following = _step_of(plan, item, i + 1)
        turn(q_of(("q", following, 1 - slot)), wait=0)
        rows = pl.ds(step.t * block, block)
        lse, delta = (
            tiles.load(ref.at[item.batch, step.head, rows], tiles.COLUMN)
            for ref in (refs.lse, refs.delta)
        )
        rows_of_q = (smem.q, slot * block)
        s = matrices.scores((smem.k, none), rows_of_q, (*shape, plan.k_width), parts)
        place = shared.place_of(item, step.head, step.t, item.key, block)
        masked = shared.masked(plan, item, step.t)
        p, slope = logits.probabilities(plan, refs, place, s, lse, masked)
        if "v" in which:
            weights = matrices.parts_of(p, parts, dtype)
            grads["v"] = matrices.weigh(grads["v"], weights, smem.do, none, plan.v_width)
        if "k" in which:
            sizes = (*shape, plan.v_width)
            dp = matrices.scores((smem.v, none), (smem.do, none), sizes, parts)
            ds = p * (dp - across(delta, shape))
            ds = matrices.parts_of(ds if slope is None else ds * slope, parts, dtype)
        if plan.fused:
            matrices.put(ds, smem.ds)
        turn(do_of(("do", following, none)), wait=None, meet=True)
        if "k" in which:
            grads["k"] = matrices.weigh(grads["k"], ds, smem.q, slot * block, plan.k_width)
        if plan.fused:
            sizes = (block, plan.keys, plan.k_width)
            dq = matrices.transposed_product(smem.ds, smem.k, sizes, parts)
            of_head = (item.batch * plan.problem.q_heads + step.head) * plan.q_tiles
            matrices.add(dq, refs.dq, of_head + step.t)
        return tuple(grads[name] for name in which)

    first = _step_of(plan, item, none)
    copies = [_keys(plan, refs, item, smem.k, "k"), q_of(("q", first, none))]
    if "k" in which:
        copies.append(_keys(plan, refs, item, smem.v, "v"))
    turn(*copies, do_of(("do", first, none)), wait=None)
    widths = {"k": plan.k_width, "v": plan.v_width}
    nothing = tuple(tiles.filled((plan.keys, widths[name]), 0.0) for name in which)
    return lax.fori_loop(0, plan.problem.group * item.steps, one, nothing)


def _kernel(refs: Refs, outs: Any, smem: Smem, *, plan: KeyPlan, which: str) -> None:
    item = shared.item_of(plan, refs, refs.dealt[lax.axis_index("cta"), 1])
    grads = _attend(plan, refs, smem, item, which)
    for name, grad, out in zip(which, grads, outs, strict=True):
        grad = grad * plan.problem.scale if name == "k" else grad
        at = (item.batch, item.kv_head, item.key, plan.problem.kv_len - item.key)
        matrices.write(grad.astype(out.dtype), out, at)


# ---- the call -----------------------------------------------------------------------------------


def run(residuals: Any, problem: AttentionProblem, config: Config) -> AttentionInputs:
    """(inputs, out, lse, d_out, d_lse) -> the cotangents of inputs."""
    inputs, *rest = residuals
    plan = plan_of(problem, config)
    rows = operands.round_up(problem.q_len, 2 * ROWS)  # whole tiles, of any size
    stats = shared.row_numbers(plan, rows, inputs, rest)
    refs = _operands(plan, inputs, rest[2], stats)
    grads: dict[str, Any] = {}
    if plan.fused:
        heads = problem.batch * problem.q_heads
        sizes = (heads * plan.q_tiles, config.block_q * plan.k_width)
        refs = refs._replace(dq=jax.new_ref(jnp.zeros(sizes, jnp.float32)))
    for which in _launches(plan):
        grads |= _launch(plan, refs, which)
        refs = shared.after(refs, grads[which[0]])
    if plan.fused:
        dq = _dq_of(plan, jax.freeze(refs.dq))
    else:
        dq = flash_bwd_dq_sm80.dq_of(flash_bwd_dq_sm80.plan_of(problem, config), inputs, refs)
    if inputs.bias is not None:
        dbias = flash_bwd_dq_sm80.dbias_of(problem, config, inputs, shared.after(refs, dq))
        grads["bias"] = dbias
    if inputs.sinks is not None:
        lse = stats[1][:, :, : problem.q_len]
        grads["sinks"] = shared.dsinks(inputs.sinks, rest[1], lse)
    return AttentionInputs(q=dq, **grads)


def _dq_of(plan: KeyPlan, parts: Any) -> Any:
    """What has been added up, in q's layout and dtype."""
    problem = plan.problem
    sizes = (problem.batch, problem.q_heads, plan.q_tiles)
    dq = matrices.in_rows(parts.reshape(*sizes, -1)).transpose(0, 2, 3, 1, 4)
    dq = dq.reshape(problem.batch, plan.padded_rows, problem.q_heads, plan.k_width)
    dq = dq[:, : problem.q_len, :, : problem.head_dim]
    return (dq * problem.scale).astype(problem.dtype)


def _launch(plan: KeyPlan, refs: Refs, which: str) -> dict[str, Any]:
    """dk, dv or both, by name."""
    problem = plan.problem
    sizes = (problem.batch, problem.kv_len, problem.kv_heads)
    dims = {"k": problem.head_dim, "v": problem.v_head_dim}
    kernel = plgpu.kernel(
        functools.partial(_kernel_of, plan=plan, which=which),
        out_type=tuple(jax.ShapeDtypeStruct((*sizes, dims[name]), problem.dtype) for name in which),
        scratch_types=(scratch(plan, which),),
        grid=(plan.ctas,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=f"flash_bwd_{which}_sm80",
    )
    return dict(zip(which, kernel(refs), strict=True))


def _kernel_of(refs: Refs, *rest: Any, plan: KeyPlan, which: str) -> None:
    *outs, smem = rest
    _kernel(refs, outs, smem, plan=plan, which=which)


def _operands(plan: KeyPlan, inputs: AttentionInputs, d_out: Any, stats: Any) -> Refs:
    """What a kernel over key tiles reads, but for dq. Copied are float32 arrays, into parts; bias
    and mask_array, to lie with keys down; segment ids.
    """
    problem, config = plan.problem, plan.config
    rows, keys = plan.padded_rows, plan.padded_keys
    fields: dict[str, Any] = {name: getattr(inputs, name) for name in problem.arrays}
    fields |= {name: plan.operand(getattr(inputs, name)) for name in ("q", "k", "v")}
    fields["do"] = plan.operand(d_out)
    fields["lse"], fields["delta"] = stats
    for name in ("bias", "mask_array"):
        if (array := fields.get(name)) is not None:
            array = array.astype(jnp.int8) if name == "mask_array" else array
            fields[name] = operands.padded(array, {2: rows, 3: keys}).swapaxes(2, 3)
    fields["dealt"] = jnp.asarray(shared.dealt(plan))
    if plan.has("q_segment_ids"):
        q_ids = operands.extended(inputs.q_segment_ids, rows)
        kv_ids = operands.extended(inputs.kv_segment_ids, keys)
        fields |= {"q_segment_ids": q_ids, "kv_segment_ids": kv_ids}
        fields["segment_spans"] = spans.of_segments(kv_ids, q_ids, plan.keys, config.block_q)
    return Refs(**{name: fields.get(name) for name in Refs._fields})
