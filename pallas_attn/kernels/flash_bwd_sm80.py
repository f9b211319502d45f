"""Flash attention backward for every GPU from Ampere on: bfloat16, float16 and float32.

As FlashAttention-2 (arXiv 2307.08691): a block of 4 warps owns 64 keys of one kv head (or 128) and
walks over the query tiles that meet them, of all query heads of the group. Tiles of scores have
keys down and queries across. Warps stand in one of two ways (`squares`):

  down 4  each has some keys and all queries of a tile: P^T and dS^T, as they come out of one
          matmul, are operands of the next; only for dQ dS^T goes through shared memory
  down 2  two by two, which takes fewer loads for as many matmuls: P^T and dS^T go through shared
          memory, where all find all of them

dQ: every warp takes some query rows of dS^T, and what they make is added to a float32 array in
global memory: five matmuls in all (`fused`); a small kernel reads dQ out again. Head dims above 128
take two warpgroups, which share out the queries of a tile for scores and the columns of all
gradients. Where bits must repeat, or shared memory does not suffice, dQ is a kernel of its own with
the forward's grid, which computes S and dP again, and wide heads have a launch for dK and one for
dV; where that is not enough either, V is taken by some columns at a time (`flash_bwd_columns`). A
bias that wants a gradient has a third kernel, `flash_bwd_dbias`'s walk.

Shared memory: k, v; q twice, so that the next tile arrives under this one; dO, twice where there is
room, else the next is asked for when dV is done; P^T and dS^T. A block meets two to four times a
step.
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
from pallas_attn.kernels import flash_bwd_columns as columns
from pallas_attn.kernels import (
    flash_bwd_dq_sm80,
    flash_fwd_sm80,
    flash_plan,
    logits,
    matrices,
    operands,
    spans,
    squares,
    tiles,
)
from pallas_attn.kernels import flash_bwd_plan as shared
from pallas_attn.kernels.flash_bwd_plan import Item, Refs, across
from pallas_attn.kernels.flash_fwd_sm80 import Widths, fits, threads, turn
from pallas_attn.kernels.squares import Stand

ROWS = flash_plan.ROWS


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning only: the result is the same up to rounding."""

    row_blocks: int = 1  # of 64 keys
    block_q: int = 64
    down: int = 4  # warps of a warpgroup one above the other: see above
    warpgroups: int = 1
    do_stages: int = 1  # tiles of dO in shared memory
    fused: bool = True  # dq is added up in global memory; else by a kernel of its own
    section: int = 0  # heads whose tiles of work are taken together; 0: see Plan.section
    dq_row_blocks: int = 1  # of the kernel for dq alone: its tiles
    dq_block_kv: int = 64
    dq_stages: int = 2
    v_parts: int = 1  # of V's columns, one after the other: see `flash_bwd_columns`

    ctas = 0  # one block a tile of work

    def __post_init__(self):
        blocks = (32, 64) if self.fused else (16, 32, 64)
        queries = self.block_q * self.down // (4 * self.warpgroups)  # a warp's
        wants = {
            "row_blocks": (self.row_blocks in (1, 2), "1 or 2"),
            "block_q": (self.block_q in blocks, "32 or 64, or, if it is not fused, 16"),
            "warpgroups": (self.warpgroups in (1, 2), "1 or 2"),
            "down": (self.down in (2, 4) and queries >= 16, "4, or 2 if a warp gets 16 queries"),
            "do_stages": (self.do_stages in (1, 2), "1 or 2"),
            "section": (self.section >= 0, "at least 0"),
            "dq_row_blocks": (self.dq_row_blocks in (1, 2), "1 or 2"),
            "dq_block_kv": (self.dq_block_kv in (16, 32, 64), "16, 32 or 64"),
            "dq_stages": (self.dq_stages in (1, 2), "1 or 2"),
            "v_parts": (self.v_parts >= 1, "at least 1"),
        }
        for name, (good, want) in wants.items():
            if not good:
                raise ValueError(f"Config.{name} must be {want}, got {getattr(self, name)}")

    @classmethod
    def default(cls, problem: AttentionProblem) -> "Config":
        """What serves a problem that nobody tuned: the first that has room."""
        dim = max(problem.head_dim, problem.v_head_dim)
        choices = []
        if problem.dtype == "float32":
            choices = [cls()] if dim <= 128 else []
        elif dim > 128:
            choices = [cls(down=2, warpgroups=2, do_stages=2), cls(block_q=32, warpgroups=2)]
        else:
            choices = [cls(down=2) if dim > 64 else cls(2, 32), cls()]
        choices = [] if problem.deterministic else choices
        tiles_of_dq = ((64, 2), (32, 2), (16, 2), (32, 1), (16, 1))
        choices += [
            cls(block_q=block, fused=False, dq_block_kv=keys, dq_stages=stages)
            for block in (64, 32, 16)
            for keys, stages in tiles_of_dq
        ]
        if problem.dtype == "float32":
            choices += [
                cls(block_q=16, fused=False, dq_block_kv=16, dq_stages=stages, v_parts=n)
                for n in (2, 4, 8, 16, 32)
                for stages in (2, 1)
            ]
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
        wide = max(self.problem.head_dim, self.problem.v_head_dim) > 128
        return wide and self.config.warpgroups == 1

    @property
    def unit_of_width(self) -> int:
        return 16 * self.config.warpgroups

    @property
    def rows(self) -> int:
        """Query rows of a tile of scores: a warpgroup's."""
        return self.config.block_q // self.config.warpgroups

    @property
    def dq_parts(self) -> int:
        """Parts of a tile of dq, some columns each. Where two warpgroups share them out, each makes
        its own in two goes, which leaves registers for loads ahead.
        """
        groups = self.config.warpgroups
        return 2 * groups if groups > 1 and self.k_width % 64 == 0 else groups

    @property
    def vectors(self) -> bool:
        """Whether memory adds 4 numbers by one instruction."""
        return int((self.problem.gpu or "sm80")[2:]) >= 90


def plan_of(problem: AttentionProblem, config: Config) -> KeyPlan:
    return KeyPlan(problem, config, ROWS * config.row_blocks)


def limit(problem: AttentionProblem) -> Limit | None:
    return flash_fwd_sm80.limit(problem, Config.default(problem), smem_bytes)


class Smem(NamedTuple):
    k: Any  # [keys, ..]
    v: Any  # [keys, ..]; None where there is no dK
    q: Any  # [2 * block_q, ..]
    do: Any  # [do_stages * block_q, ..]
    p: Any  # [keys, block_q]; None where no warp wants another's
    ds: Any


def scratch(plan: KeyPlan, which: str) -> Smem:
    """Shared memory of the launch for `which`: "k", "v" or "kv", what it makes gradients of."""
    parts, block, shared = plan.parts_of_numbers, plan.config.block_q, _stand(plan).shares > 1

    def buffer(rows, width):
        return plgpu.SMEM((rows, matrices.pitch(parts * width)), plan.operand_dtype)

    return Smem(
        k=buffer(plan.keys, plan.k_width),
        v=buffer(plan.keys, plan.v_width) if "k" in which else None,
        q=buffer(2 * block, plan.k_width),
        do=buffer(plan.config.do_stages * block, plan.v_width),
        p=buffer(plan.keys, block) if "v" in which and shared else None,
        ds=buffer(plan.keys, block) if "k" in which and (plan.fused or shared) else None,
    )


def _stand(plan: KeyPlan, group: Any = 0) -> Stand:
    return Stand(plan.config.down, plan.config.warpgroups, group)


def _launches(plan: KeyPlan) -> tuple[str, ...]:
    return ("v", "k") if plan.split else ("kv",)


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    """Of the kernel that needs most."""
    problem = columns.part_of(problem, config.v_parts)
    plan = plan_of(problem, config)
    most = max(flash_fwd_sm80.buffer_bytes(scratch(plan, which)) for which in _launches(plan))
    if plan.fused:
        return most
    by_rows = flash_bwd_dq_sm80.plan_of(problem, config)
    return max(most, flash_fwd_sm80.buffer_bytes(flash_bwd_dq_sm80.scratch(by_rows)))


# ---- loading ------------------------------------------------------------------------------------


class Copies(NamedTuple):
    """What a warpgroup asks for: its part of the rows of each tile."""

    plan: KeyPlan
    refs: Refs
    smem: Smem
    item: Item
    group: Any

    def keys(self, which: str) -> Any:
        """A tile of work's keys."""
        item, plan = self.item, self.plan
        width = plan.k_width if which == "k" else plan.v_width
        at = (item.batch, item.kv_head, item.key, item.kv_len - item.key, jnp.int32(0))
        return self._copy(which, at, plan.keys, width)

    def queries(self, which: str, step: "Step", slot: Any) -> Any:
        """A query tile of q or dO."""
        plan, block = self.plan, self.plan.config.block_q
        length: Any = plan.problem.q_len if self.item.q_len is None else self.item.q_len
        live = jnp.where(step.there, length - step.t * block, 0)
        width = plan.k_width if which == "q" else plan.v_width
        at = (self.item.batch, step.head, step.t * block, live, slot * block)
        return self._copy(which, at, block, width)

    def _copy(self, which: str, at: Any, rows: int, width: int) -> Any:
        (batch, head, row, live, to), groups = at, self.plan.config.warpgroups
        rows = rows // groups
        begin = self.group * rows
        at = (batch, head, row + begin, live - begin, to + begin)
        ref = getattr(self.refs, which)
        width *= self.plan.parts_of_numbers
        # Whatever is said of addresses: with few registers to spare, constants from one are faster
        # (head dims 128, causal, and 256); at 64 they are slower.
        fixed = _stand(self.plan).shares == 1
        return (getattr(self.smem, which), ref), at, (rows, ref.shape, width, fixed)


class Step(NamedTuple):
    """One query tile of one head."""

    head: Any
    t: Any
    there: Any  # whether it is one


def _step_of(plan: KeyPlan, item: Item, i: Any) -> Step:
    if plan.problem.group == 1:
        return Step(item.kv_head, item.tile(i), i < item.steps)
    g = lax.div(i, jnp.maximum(item.steps, 1))
    t = item.tile(i - g * item.steps)
    return Step(item.kv_head * plan.problem.group + g, t, i < plan.problem.group * item.steps)


# ---- computing ----------------------------------------------------------------------------------


class Block(NamedTuple):
    """What a warpgroup knows while it walks."""

    plan: KeyPlan
    refs: Refs
    smem: Smem
    item: Item
    which: str  # gradients that it makes
    stand: Stand

    def turn(self, *copies: Any) -> None:
        turn(*copies, wait=None, meet=True, groups=self.stand.groups)


def _attend(block: Block) -> tuple[Any, ...]:
    """The gradients of the block's keys over all query tiles."""
    plan, smem, which = block.plan, block.smem, block.which
    copies = Copies(plan, block.refs, smem, block.item, block.stand.group)

    def one(i, carry):
        grads = dict(zip(which, carry, strict=True))
        step, slot = _step_of(plan, block.item, i), i & 1
        following = _step_of(plan, block.item, i + 1)
        soon, later = [copies.queries("q", following, 1 - slot)], []
        if plan.config.do_stages == 2:
            soon.append(copies.queries("do", following, 1 - slot))
        else:
            later.append(copies.queries("do", following, jnp.int32(0)))
        turn(*soon, wait=0, groups=block.stand.groups)
        first_do = (slot if plan.config.do_stages == 2 else jnp.int32(0)) * plan.config.block_q
        rows = (slot * plan.config.block_q, first_do)
        return _step(block, step, rows, grads, later)

    first = _step_of(plan, block.item, jnp.int32(0))
    begin = [copies.keys(name) for name in ("k", "v") if "k" in which or name == "k"]
    begin += [copies.queries(name, first, jnp.int32(0)) for name in ("q", "do")]
    turn(*begin, wait=None)
    nothing = tuple(_nothing(block, name) for name in which)
    steps = plan.problem.group * block.item.steps
    return lax.fori_loop(0, steps, one, nothing)


def _nothing(block: Block, name: str) -> Any:
    plan, stand = block.plan, block.stand
    shape = (plan.keys, (plan.k_width if name == "k" else plan.v_width) // stand.groups)
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), tiles.standing(shape, stand.down))


def _step(block: Block, step: Step, rows: Any, grads: dict, later: list) -> tuple[Any, ...]:
    """One query tile, of q and dO from `rows` of shared memory on; `later` are the copies that want
    this dO's place.
    """
    plan, smem, which, stand = block.plan, block.smem, block.which, block.stand
    parts = plan.parts_of_numbers
    shape = (plan.keys, plan.config.block_q, parts)
    q, do = (smem.q, rows[0], plan.k_width), (smem.do, rows[1], plan.v_width)
    before = grads if parts == 3 else {}  # tensor cores, which round towards 0, add up one tile
    grads = {name: _nothing(block, name) for name in before} or grads
    probabilities, derivative = _scores(block, step, rows)
    p = matrices.parts_of(probabilities, parts, plan.operand_dtype)
    ds: Any = ()
    if smem.p is not None:
        squares.put(p, smem.p, stand)
    elif "v" in which:
        grads["v"] = squares.weigh(grads["v"], p, do, stand.down)
    if "k" in which:
        ds = matrices.parts_of(derivative(probabilities), parts, plan.operand_dtype)
    if smem.ds is not None:
        squares.put(ds, smem.ds, stand)
    if smem.p is not None:
        block.turn()
        grads["v"] = squares.weigh_shared(grads["v"], smem.p, do, shape, stand)
    if later or (smem.p is None and smem.ds is not None):
        block.turn(*later)
    if "k" in which and stand.shares > 1:
        grads["k"] = squares.weigh_shared(grads["k"], smem.ds, q, shape, stand)
    elif "k" in which:
        grads["k"] = squares.weigh(grads["k"], ds, q, stand.down)
    if plan.fused:
        _add_dq(block, step)
    grads = {name: grads[name] + old for name, old in before.items()} or grads
    return tuple(grads[name] for name in which)


def _add_dq(block: Block, step: Step) -> None:
    plan, stand, smem = block.plan, block.stand, block.smem
    sizes = (plan.config.block_q, plan.keys, plan.k_width)
    of_head = (block.item.batch * plan.problem.q_heads + step.head) * plan.q_tiles
    each = plan.dq_parts // stand.groups
    for n in range(each):
        part = stand._replace(groups=plan.dq_parts, group=stand.group * each + n)
        dq = squares.transposed_product(smem.ds, smem.k, sizes, plan.parts_of_numbers, part)
        index = (of_head + step.t) * plan.dq_parts + part.group
        squares.add(dq, block.refs.dq, index, plan.vectors)


def _scores(block: Block, step: Step, first: Any) -> tuple[Any, Any]:
    """(P of a warpgroup's queries; dS as a function of it)."""
    plan, refs, smem, stand = block.plan, block.refs, block.smem, block.stand
    shape, none, begin = (plan.keys, plan.rows), jnp.int32(0), stand.group * plan.rows
    layout, size = tiles.standing(shape, stand.down), plan.config.block_q
    rows = pl.ds(step.t * size + begin, plan.rows)

    def of_rows(ref):
        return tiles.load(ref.at[block.item.batch, step.head, rows], layout.reduce(0))

    lse = of_rows(refs.lse)
    how = (plan.parts_of_numbers, stand.down)
    s = squares.product((smem.k, none), (smem.q, first[0] + begin), (*shape, plan.k_width), *how)
    place = shared.place_of(block.item, step.head, step.t, block.item.key, size, layout)
    place = place._replace(query=place.query + begin)
    masked = shared.masked(plan, block.item, step.t)
    p, slope = logits.probabilities(plan, refs, place, s, lse, masked)

    def derivative(p):
        delta = of_rows(refs.delta)
        dp = squares.product(
            (smem.v, none), (smem.do, first[1] + begin), (*shape, plan.v_width), *how
        )
        ds = p * (dp - across(delta, shape))
        return ds if slope is None else ds * slope

    return p, derivative


def _kernel(refs: Refs, outs: Any, smem: Smem, *, plan: KeyPlan, which: str) -> None:
    item = shared.item_of(plan, refs, refs.dealt[lax.axis_index("cta"), 1])
    groups = plan.config.warpgroups
    group = lax.axis_index("wg") if groups > 1 else jnp.int32(0)
    stand = _stand(plan, group)
    grads = _attend(Block(plan, refs, smem, item, which, stand))
    for name, grad, out in zip(which, grads, outs, strict=True):
        grad = grad * plan.problem.scale if name == "k" else grad
        at = (item.batch, item.kv_head, item.key, plan.problem.kv_len - item.key)
        squares.write(grad.astype(out.dtype), out, at, stand)


# ---- the call -----------------------------------------------------------------------------------


def run(residuals: Any, problem: AttentionProblem, config: Config) -> AttentionInputs:
    """(inputs, out, lse, d_out, d_lse) -> the cotangents of inputs."""
    if (parts := config.v_parts) > 1:
        one = functools.partial(run, config=dataclasses.replace(config, v_parts=1))
        return columns.run(residuals, problem, parts, one)
    inputs, *rest = residuals
    plan = plan_of(problem, config)
    rows = operands.round_up(problem.q_len, 2 * ROWS)  # whole tiles, of any size
    stats = shared.row_numbers(plan, rows, inputs, rest)
    refs = _operands(plan, inputs, rest[2], stats)
    grads: dict[str, Any] = {}
    if plan.fused:
        heads, parts = problem.batch * problem.q_heads, plan.dq_parts
        sizes = (heads * plan.q_tiles * parts, config.block_q * plan.k_width // parts)
        refs = refs._replace(dq=jax.new_ref(jnp.zeros(sizes, jnp.float32)))
    for which in _launches(plan):
        grads |= _launch(plan, refs, which)
        refs = shared.after(refs, grads[which[0]])
    if plan.fused:
        dq = flash_bwd_dq_sm80.collected(plan, jax.freeze(refs.dq))
    else:
        dq = flash_bwd_dq_sm80.dq_of(flash_bwd_dq_sm80.plan_of(problem, config), inputs, refs)
    if inputs.bias is not None:
        dbias = flash_bwd_dq_sm80.dbias_of(problem, config, inputs, shared.after(refs, dq))
        grads["bias"] = dbias
    if inputs.sinks is not None:
        lse = stats[1][:, :, : problem.q_len]
        grads["sinks"] = shared.dsinks(inputs.sinks, rest[1], lse)
    return AttentionInputs(q=dq, **grads)


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
        **threads(plan.config.warpgroups),
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
