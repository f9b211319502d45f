"""Flash attention backward for every GPU from Ampere on: bfloat16, float16 and float32.

As FlashAttention-2 (arXiv 2307.08691): a block of 4 warps owns 64 keys of one kv head (or 128) and
walks over the query tiles that meet them, of all query heads of the group. Tiles of scores have
keys as rows and queries as columns. The warps of a warpgroup are arranged in one of two ways
(`mma_2x2`):

  warp_rows 4  each has some keys and all queries of a tile: P^T and dS^T, as they come out of one
               matmul, are operands of the next; only for dQ dS^T goes through shared memory
  warp_rows 2  two by two, which takes fewer loads for as many matmuls: P^T and dS^T go through
               shared memory, where every warp reads all of them

dQ: every warp takes some query rows of dS^T, and their product is added to a float32 array in
global memory: five matmuls in all (`fused`); two small kernels clear that array and round dQ.
Head dims above 128 take two warpgroups, each of which makes half of the columns of all gradients;
of the scores one makes P and the other dS (`split_products`) or, where q and v are not equally
wide, each those of half of the queries. With a mask such a block has several work tiles, one after
the other (`grid`): what the next one reads first is loaded while one ends. Where bits must repeat,
or shared memory does not suffice, dQ is a kernel of its own with the forward's grid, which computes
S and dP again, and wide heads have a launch for dK and one for dV; where that is not enough either,
all operands come by some columns at a time (`sm80_column_stream`). A bias that wants a gradient has
a third kernel, the walk of `dbias`.

Shared memory: k, v; q twice, so that the next tile is loaded during this one; dO, twice where there
is room, else the next is loaded when dV is done; P^T and dS^T. A block synchronises two to four
times a step.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import gpu_specs
from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import (
    functions,
    score_mod,
    sm80_column_stream,
    tile_lists,
    tma_operands,
)
from pallas_attn.kernels.attention import plan as attention_plan
from pallas_attn.kernels.attention.plan import Context
from pallas_attn.kernels.attention.sm80_column_stream import Product, Rows, Stream
from pallas_attn.kernels.attention.sm80_common import (
    Copy,
    Widths,
    copy_async,
    fits,
    warpgroup_arguments,
)
from pallas_attn.kernels.flash_bwd import plan as shared
from pallas_attn.kernels.flash_bwd import sm80_dq
from pallas_attn.kernels.flash_bwd.plan import (
    Refs,
    Residuals,
    RowStatistics,
    WorkTile,
    per_column,
)
from pallas_attn.kernels.flash_fwd import sm80 as flash_fwd_sm80
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.config import check
from pallas_attn.kernels.mma import global_accumulate, mma_2x2, mma_sync
from pallas_attn.kernels.mma.mma_2x2 import RightOperand, WarpGrid

ROWS = attention_plan.ROWS
FIXED = {"bias", "sinks"}  # arrays on which no span of query tiles depends


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning only: the result is the same up to rounding."""

    kv_blocks: int = 1  # of 64 keys
    block_q: int = 64
    warp_rows: int = 4  # warps of a warpgroup one above the other; 2: two by two
    warpgroups: int = 1
    do_stages: int = 1  # tiles of dO in shared memory
    fused: bool = True  # dq is added up in global memory; else by a kernel of its own
    l2_heads: int = 0  # heads whose work tiles are scheduled together; 0: see Plan.l2_heads
    split_products: bool = False  # one of two warpgroups makes P, the other dS, where both can
    dq_row_blocks: int = 1  # of 64 query rows, in the kernel for dq alone
    dq_block_kv: int = 64
    dq_stages: int = 2
    columns: int = 0  # of q, k, v and dO in shared memory at a time; 0: all
    grid: int = 0  # blocks, which take several work tiles one after the other; 0: one a work tile

    def __post_init__(self):
        blocks = (32, 64) if self.fused else (16, 32, 64)
        queries = self.block_q * self.warp_rows // (4 * self.warpgroups)  # of a warp
        check(
            self,
            kv_blocks=(self.kv_blocks in (1, 2), "1 or 2"),
            block_q=(self.block_q in blocks, "32 or 64, or, if it is not fused, 16"),
            warpgroups=(self.warpgroups in (1, 2), "1 or 2"),
            warp_rows=(
                self.warp_rows in (2, 4) and queries >= 16,
                "4, or 2 if a warp gets 16 queries",
            ),
            split_products=(
                not self.split_products or self.warp_rows == self.warpgroups == 2,
                "False unless warpgroups and warp_rows are 2",
            ),
            do_stages=(self.do_stages in (1, 2), "1 or 2"),
            l2_heads=(self.l2_heads >= 0, "at least 0"),
            dq_row_blocks=(self.dq_row_blocks in (1, 2), "1 or 2"),
            dq_block_kv=(self.dq_block_kv in (16, 32, 64), "16, 32 or 64"),
            dq_stages=(self.dq_stages in (1, 2), "1 or 2"),
            columns=(
                not self.columns or (self.columns % 16 == 0 and self._takes_columns),
                "0; or a multiple of 16 if it is not fused, kv_blocks and warpgroups are 1 and "
                "warp_rows is 4",
            ),
        )

    @property
    def _takes_columns(self) -> bool:
        return not self.fused and (self.kv_blocks, self.warpgroups, self.warp_rows) == (1, 1, 4)

    @classmethod
    def default(cls, problem: AttentionProblem) -> "Config":
        """What serves a problem that nobody tuned: the first that has room."""
        dim = max(problem.head_dim, problem.v_head_dim)
        choices = []
        if problem.dtype == "float32":
            choices = [cls()] if dim <= 128 else []
        elif dim > 128:
            grid = (
                attention_plan.BLOCKS if problem.gpu == "sm90" and not problem.mask.is_full else 0
            )
            wide = cls(warp_rows=2, warpgroups=2, do_stages=2, split_products=True, grid=grid)
            choices = [wide, cls(block_q=32, warpgroups=2)]
        else:
            choices = [cls(warp_rows=2) if dim > 64 else cls(2, 32), cls()]
        choices = [] if problem.deterministic else choices
        tiles_of_dq = ((64, 2), (32, 2), (16, 2), (32, 1), (16, 1))
        choices += [
            cls(block_q=block, fused=False, dq_block_kv=keys, dq_stages=stages)
            for block in (64, 32, 16)
            for keys, stages in tiles_of_dq
        ]
        choices.append(cls(block_q=32, fused=False, dq_block_kv=32, columns=64))
        return next((one for one in choices if fits(problem, smem_bytes, one)), choices[-1])


@dataclasses.dataclass(frozen=True)
class KeyPlan(Widths, shared.Plan):
    """Of work tiles of keys."""

    l2_bytes = 64 * 2**20

    @property
    def fused(self) -> bool:
        alone = self.split or self.config.columns or self.problem.deterministic
        return self.config.fused and not alone

    @property
    def split(self) -> bool:
        """Whether dK and dV are made by a launch each."""
        wide = max(self.problem.head_dim, self.problem.v_head_dim) > 128
        return wide and self.config.warpgroups == 1

    @property
    def stand(self) -> WarpGrid:
        """How warps stand around gradients."""
        return WarpGrid(self.config.warp_rows, self.config.warpgroups)

    @property
    def splits_products(self) -> bool:
        """Whether one warpgroup makes P and the other dS."""
        alike = self.k_width == self.v_width and self.problem.softcap is None
        return self.config.split_products and alike and self.terms == 1 and self.fused

    @property
    def dq_is_late(self) -> bool:
        """Whether warpgroups that split products make a step's dQ in the next one: faster at head
        dim 256 under a causal mask, slower without one.
        """
        return self.splits_products and not self.problem.mask.is_full

    @property
    def is_persistent(self) -> bool:
        """Whether a block has several work tiles: all must have query tiles."""
        known = set(self.problem.arrays) <= FIXED and not self.is_listed
        if not (self.config.grid and self.fused and known):
            return False
        return all(span.hi > span.lo for span in self.static_spans(self.problem.q_offset))

    @property
    def grid(self) -> int:
        work = self.heads * self.kv_tiles
        return min(self.config.grid, work) if self.is_persistent else work

    @property
    def width_unit(self) -> int:
        return self.config.columns or 16 * self.config.warpgroups

    @property
    def rows(self) -> int:
        """Query rows of a tile of scores: a warpgroup's."""
        return self.config.block_q // self.config.warpgroups

    @property
    def dq_slices(self) -> int:
        """Slices of a tile of dq, some columns each. Of two warpgroups each makes two of them, one
        after the other, which leaves registers for loads; not where they split products and dQ is
        not late, which is slower so.
        """
        groups = self.config.warpgroups
        if groups == 1 or self.k_width % 64 or (self.splits_products and not self.dq_is_late):
            return groups
        return 2 * groups

    @property
    def vectors(self) -> bool:
        """Whether memory adds 4 numbers by one instruction."""
        return gpu_specs.number(self.problem.gpu or "sm80") >= 90


def plan_of(problem: AttentionProblem, config: Config) -> KeyPlan:
    return KeyPlan(problem, config, ROWS * config.kv_blocks)


def limit(problem: AttentionProblem) -> Limit | None:
    return shared.limit(problem) or flash_fwd_sm80.limit(problem)


class Smem(NamedTuple):
    k: Any  # [keys, ..]
    v: Any  # [keys, ..]; None where there is no dK
    q: Any  # [2 * block_q, ..]
    do: Any  # [do_stages * block_q, ..]
    p: Any  # [keys, block_q]; None where no warp wants another's
    ds: Any
    low: Any  # [keys, block_q]: what is left of P rounded, where dQ comes late


def scratch(plan: KeyPlan, which: str) -> Smem | sm80_column_stream.Smem:
    """Shared memory of the launch for `which`: "k", "v" or "kv", what it makes gradients of."""
    if plan.config.columns:
        return sm80_column_stream.scratch(plan, plan.config.block_q)
    terms, block, shared = plan.terms, plan.config.block_q, plan.stand.shares > 1

    def buffer(rows, width):
        return plgpu.SMEM((rows, mma_sync.pitch(terms * width)), plan.operand_dtype)

    return Smem(
        k=buffer(plan.block_kv, plan.k_width),
        v=buffer(plan.block_kv, plan.v_width) if "k" in which else None,
        q=buffer(2 * block, plan.k_width),
        do=buffer(plan.config.do_stages * block, plan.v_width),
        p=buffer(plan.block_kv, block) if "v" in which and shared else None,
        ds=buffer(plan.block_kv, block) if "k" in which and (plan.fused or shared) else None,
        low=buffer(plan.block_kv, block) if plan.dq_is_late else None,
    )


def _launches(plan: KeyPlan) -> tuple[str, ...]:
    return ("v", "k") if plan.split else ("kv",)


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    """Of the kernel that needs most."""
    plan = plan_of(problem, config)
    most = max(mosaic.bytes_of(scratch(plan, which)) for which in _launches(plan))
    if plan.fused:
        return most
    by_rows = sm80_dq.plan_of(problem, config)
    return max(most, mosaic.bytes_of(sm80_dq.scratch(by_rows)))


# ---- loading ------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One query tile of one head."""

    head: Any
    t: Any
    exists: Any
    number: Any = None  # of the head's


def step_of(plan: KeyPlan, work: WorkTile, i: Any) -> Step:
    if plan.problem.group == 1:
        return Step(work.kv_head, work.q_tile(i), i < work.steps, i)
    g = lax.div(i, jnp.maximum(work.steps, 1))
    number = i - g * work.steps
    t, exists = work.q_tile(number), i < plan.problem.group * work.steps
    return Step(work.kv_head * plan.problem.group + g, t, exists, number)


class Copies(NamedTuple):
    """What a warpgroup loads: its part of the rows of each tile."""

    ctx: Context
    work: WorkTile
    group: Any  # which warpgroup

    def keys(self, which: str) -> Copy:
        """A work tile's rows of k or v."""
        work, plan = self.work, self.ctx.plan
        width = plan.k_width if which == "k" else plan.v_width
        at = (work.batch, work.kv_head, work.key, work.kv_len - work.key, jnp.int32(0))
        return self._copy(which, at, plan.block_kv, width)

    def keys_of(self, which: str) -> list[Copy]:
        """K, and V where there is to be a dK."""
        return [self.keys(name) for name in ("k", "v") if "k" in which or name == "k"]

    def first_queries(self) -> list[Copy]:
        first = step_of(self.ctx.plan, self.work, jnp.int32(0))
        return [self.queries(name, first, jnp.int32(0)) for name in ("q", "do")]

    def of_next(self, after: WorkTile, following: Step, last: Any) -> tuple["Copies", Step]:
        """(these, the step that follows): where it is the `last`, those of the next work tile and
        its first.
        """
        first = step_of(self.ctx.plan, after, jnp.int32(0))
        pairs = zip((first.head, first.t), (following.head, following.t), strict=True)
        head, t = (jnp.where(last, a, b) for a, b in pairs)
        batch = jnp.where(last, after.batch, self.work.batch)
        return self._replace(work=self.work._replace(batch=batch)), Step(head, t, True)

    def queries(self, which: str, step: Step, slot: Any) -> Copy:
        """A query tile of q or dO."""
        plan, block = self.ctx.plan, self.ctx.plan.config.block_q
        length: Any = plan.problem.q_len if self.work.q_len is None else self.work.q_len
        live = jnp.where(step.exists, length - step.t * block, 0)
        width = plan.k_width if which == "q" else plan.v_width
        at = (self.work.batch, step.head, step.t * block, live, slot * block)
        return self._copy(which, at, block, width)

    def _copy(self, which: str, at: Any, rows: int, width: int) -> Copy:
        plan, refs, smem = self.ctx
        (batch, head, row, live, to), groups = at, plan.config.warpgroups
        rows = rows // groups
        begin = self.group * rows
        at = (batch, head, row + begin, live - begin, to + begin)
        ref = getattr(refs, which)
        width *= plan.terms
        # Whatever is said of addresses: with few registers to spare, constants from one are faster
        # (head dims 128, causal, and 256); at 64 they are slower.
        fixed = plan.stand.shares == 1
        return Copy((getattr(smem, which), ref), at, (rows, ref.shape, width, fixed))


# ---- the mainloop --------------------------------------------------------------------------------


class Block(NamedTuple):
    """What a warpgroup knows in the mainloop."""

    ctx: Context
    work: WorkTile
    which: str  # gradients that it makes
    stand: WarpGrid

    @property
    def copies(self) -> Copies:
        return Copies(self.ctx, self.work, self.stand.group)

    def sync(self, *copies: Copy) -> None:
        """All threads of the block; then `copies` begin."""
        copy_async(*copies, pending=None, sync=True, groups=self.stand.groups)


class Following(NamedTuple):
    """A work tile of a block that has several."""

    steps_before: Any  # of the block's earlier work tiles
    next_work: WorkTile  # whose first query tile is loaded after the last of this one


def _mainloop(block: Block, following: Following | None = None) -> tuple[Any, ...]:
    """The gradients of the block's keys over all query tiles."""
    (plan, _, _), work, which = block.ctx, block.work, block.which
    copies, groups = block.copies, block.stand.groups
    steps = plan.problem.group * work.steps
    before = 0 if following is None else following.steps_before

    def one(i, carry):
        grads = dict(zip(which, carry, strict=True))
        step, slot = step_of(plan, work, i), (before + i) & 1
        coming, next_step = copies, step_of(plan, work, i + 1)
        if following is not None:
            coming, next_step = copies.of_next(following.next_work, next_step, i + 1 == steps)
        soon, later = [coming.queries("q", next_step, 1 - slot)], []
        if plan.config.do_stages == 2:
            soon.append(coming.queries("do", next_step, 1 - slot))
        else:
            later.append(coming.queries("do", next_step, jnp.int32(0)))
        copy_async(*soon, pending=0, groups=groups)
        first_do = (slot if plan.config.do_stages == 2 else jnp.int32(0)) * plan.config.block_q
        rows = FirstRows(slot * plan.config.block_q, first_do)
        if plan.splits_products:
            return _split_step(block, i, rows, grads, later)
        return _step(block, step, rows, grads, later)

    if following is None:
        copy_async(*copies.keys_of(which), *copies.first_queries(), pending=None)
    nothing = tuple(_nothing(block, name) for name in which)
    grads = lax.fori_loop(0, steps, one, nothing)
    if plan.dq_is_late:
        last = step_of(plan, work, steps - 1)
        pl.when(steps > 0)(functools.partial(_add_dq, block, last))
    return grads


class FirstRows(NamedTuple):
    """From where in shared memory on the tiles of q and dO lie."""

    q: Any
    do: Any


def _nothing(block: Block, name: str) -> Any:
    plan, stand = block.ctx.plan, block.stand
    shape = (plan.block_kv, (plan.k_width if name == "k" else plan.v_width) // stand.groups)
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), mosaic.warp_layout(shape, stand.down))


def _step(
    block: Block, step: Step, rows: FirstRows, grads: dict[str, Any], later: list[Copy]
) -> tuple[Any, ...]:
    """One query tile; `later` are the copies that take the place of this dO."""
    (plan, _, smem), which, stand = block.ctx, block.which, block.stand
    terms = plan.terms
    shape = (plan.block_kv, plan.config.block_q, terms)
    q = RightOperand(smem.q, rows.q, plan.k_width)
    do = RightOperand(smem.do, rows.do, plan.v_width)
    before = grads if terms == 3 else {}  # tensor cores, which round towards 0, add up one tile
    grads = {name: _nothing(block, name) for name in before} or grads
    probabilities, derivative = _scores(block, step, rows)
    p = mma_sync.terms_of(probabilities, terms, plan.operand_dtype)
    ds: Any = ()
    if smem.p is not None:
        mma_2x2.store_tile(p, smem.p, stand)
    elif "v" in which:
        grads["v"] = mma_2x2.matmul_add(grads["v"], p, do, stand.down)
    if "k" in which:
        ds = mma_sync.terms_of(derivative(probabilities), terms, plan.operand_dtype)
    if smem.ds is not None:
        mma_2x2.store_tile(ds, smem.ds, stand)
    if smem.p is not None:
        block.sync()
        grads["v"] = mma_2x2.matmul_add_shared(grads["v"], smem.p, do, shape, stand)
    if later or (smem.p is None and smem.ds is not None):
        block.sync(*later)
    if "k" in which and stand.shares > 1:
        grads["k"] = mma_2x2.matmul_add_shared(grads["k"], smem.ds, q, shape, stand)
    elif "k" in which:
        grads["k"] = mma_2x2.matmul_add(grads["k"], ds, q, stand.down)
    if plan.fused:
        _add_dq(block, step)
    grads = {name: grads[name] + old for name, old in before.items()} or grads
    return tuple(grads[name] for name in which)


def _split_step(
    block: Block, i: Any, first: FirstRows, grads: dict[str, Any], later: list[Copy]
) -> tuple[Any, ...]:
    """`_step` i where one warpgroup makes P and the other dS: scores of whole tiles take two loads
    for four matmuls, of halves of a tile three. P is passed on in two terms, good to 2**-16.

    Where dQ is late, one makes its half of the last step's when P is done, the other before dP: so
    tensor cores have work during the exponents.
    """
    (plan, refs, smem), stand = block.ctx, block.stand
    size, none, step = plan.config.block_q, jnp.int32(0), step_of(plan, block.work, i)
    shape, whole = (plan.block_kv, size), WarpGrid(2)
    layout, second = mosaic.warp_layout(shape, 2), stand.group == 1
    rows = pl.ds(step.t * size, size)

    def of_rows(ref):
        return mosaic.load(ref.at[block.work.batch, step.head, rows], layout.reduce(0))

    def last_dq(where):
        if plan.dq_is_late:
            before = step_of(plan, block.work, jnp.maximum(i - 1, 0))
            pl.when(where & (i > 0))(functools.partial(_add_dq, block, before))

    numbers = lax.cond(second, lambda: of_rows(refs.delta), lambda: of_rows(refs.lse))
    q = RightOperand(smem.q, first.q, plan.k_width)
    do = RightOperand(smem.do, first.do, plan.v_width)
    pairs = ((smem.k, none), q[:2]), ((smem.v, none), do[:2])
    last_dq(second)
    product = mma_2x2.either_product(pairs, stand.group, (*shape, plan.k_width), 1, 2)
    place = shared.place_of(block.work, step.head, step.t, block.work.key, size, layout)
    masked, rest = (
        shared.needs_mask(plan, block.work, step.t, step.number),
        smem.low if plan.dq_is_late else smem.ds,
    )

    @pl.when(jnp.logical_not(second))
    def _():
        p, _ = score_mod.probabilities(block.ctx, place, product, numbers, masked)
        high, low = mma_sync.terms_of(p, 2, plan.operand_dtype)
        mma_2x2.store_tile((high,), smem.p, whole)
        mma_2x2.store_tile((low,), rest, whole)

    last_dq(jnp.logical_not(second))
    block.sync()

    @pl.when(second)
    def _():
        high, low = (mma_2x2.load_tile(ref, shape, 2).astype(jnp.float32) for ref in (smem.p, rest))
        ds = (high + low) * (product - per_column(numbers, shape))
        mma_2x2.store_tile((ds.astype(plan.operand_dtype),), smem.ds, whole)

    sizes = (*shape, 1)
    grads["v"] = mma_2x2.matmul_add_shared(grads["v"], smem.p, do, sizes, stand)
    block.sync(*later)
    grads["k"] = mma_2x2.matmul_add_shared(grads["k"], smem.ds, q, sizes, stand)
    if not plan.dq_is_late:
        _add_dq(block, step)
    return tuple(grads[name] for name in block.which)


def _add_dq(block: Block, step: Step) -> None:
    (plan, refs, smem), stand = block.ctx, block.stand
    sizes = (plan.config.block_q, plan.block_kv, plan.k_width)
    of_head = (block.work.batch * plan.problem.q_heads + step.head) * plan.q_tiles
    each = plan.dq_slices // stand.groups
    for n in range(each):
        own = stand._replace(groups=plan.dq_slices, group=stand.group * each + n)
        dq = mma_2x2.transposed_product(smem.ds, smem.k, sizes, plan.terms, own)
        index = (of_head + step.t) * plan.dq_slices + own.group
        global_accumulate.add(dq, refs.dq, index, plan.vectors)


def _scores(block: Block, step: Step, first: FirstRows) -> tuple[Any, Any]:
    """(P of a warpgroup's queries; dS as a function of it)."""
    (plan, refs, smem), stand = block.ctx, block.stand
    shape, none, begin = (plan.block_kv, plan.rows), jnp.int32(0), stand.group * plan.rows
    layout, size = mosaic.warp_layout(shape, stand.down), plan.config.block_q
    rows = pl.ds(step.t * size + begin, plan.rows)

    def of_rows(ref):
        return mosaic.load(ref.at[block.work.batch, step.head, rows], layout.reduce(0))

    lse = of_rows(refs.lse)
    how = (plan.terms, stand.down)
    s = mma_2x2.product((smem.k, none), (smem.q, first.q + begin), (*shape, plan.k_width), *how)
    place = shared.place_of(block.work, step.head, step.t, block.work.key, size, layout)
    place = place._replace(query=place.query + begin)
    masked = shared.needs_mask(plan, block.work, step.t, step.number)
    p, slope = score_mod.probabilities(block.ctx, place, s, lse, masked)

    def derivative(p):
        delta = of_rows(refs.delta)
        dp = mma_2x2.product(
            (smem.v, none), (smem.do, first.do + begin), (*shape, plan.v_width), *how
        )
        ds = p * (dp - per_column(delta, shape))
        return ds if slope is None else ds * slope

    return p, derivative


def _kernel(ctx: Context, outs: Any, which: str) -> None:
    plan, refs, _ = ctx
    block_id, groups = lax.axis_index("block"), plan.config.warpgroups
    group = lax.axis_index("wg") if groups > 1 else jnp.int32(0)
    stand = plan.stand._replace(group=group)

    def block_of(n):
        work = shared.work_tile(ctx, refs.schedule[block_id, n + 1])
        return Block(ctx, work, which, stand)

    if plan.is_persistent:
        return _all_work_tiles(block_of, refs.schedule[block_id, 0], outs)
    return _store(block_of(0), outs, _mainloop(block_of(0)))


def _all_work_tiles(block_of: Callable[[Any], Block], count: Any, outs: Any) -> None:
    """A block's work tiles: what the next one reads first is loaded while one ends."""
    first = block_of(0).copies
    copy_async(*first.keys_of(block_of(0).which), *first.first_queries(), pending=None)

    def one(n, steps_before):
        block, after = block_of(n), block_of(n + 1)
        grads = _mainloop(block, Following(steps_before, after.work))
        block.sync(*after.copies.keys_of(block.which))
        _store(block, outs, grads)
        return steps_before + block.ctx.plan.problem.group * block.work.steps

    lax.fori_loop(0, count, one, jnp.int32(0))


def _store(block: Block, outs: Any, grads: Sequence[Any]) -> None:
    plan, work = block.ctx.plan, block.work
    for name, grad, out in zip(block.which, grads, outs, strict=True):
        grad = grad * plan.problem.scale if name == "k" else grad
        at = (work.batch, work.kv_head, work.key, plan.problem.kv_len - work.key)
        mma_2x2.write(grad.astype(out.dtype), out, at, block.stand)


# ---- operands by some columns at a time ----------------------------------------------

#
# A block of 4 warps owns 64 keys, which are the left operand of both products of a step, and reads
# their terms again with every query tile. P^T and dS^T stay in registers. What a tile adds to
# a gradient is added up by itself: tensor cores round towards 0.


def _column_stream(ctx: Context, work: WorkTile, which: str) -> Stream:
    plan = ctx.plan
    length: Any = plan.problem.q_len if work.q_len is None else work.q_len
    block, (k_chunks, v_chunks) = plan.config.block_q, (plan.k_chunks, plan.v_chunks)

    def rows_of(name, step):
        if name in ("k", "v"):
            live = jnp.where(step.exists, work.kv_len - work.key, 0)
            return Rows(work.batch, work.kv_head, work.key, live)
        live = jnp.where(step.exists, length - step.t * block, 0)
        return Rows(work.batch, step.head, step.t * block, live)

    products = [Product("k", "q", k_chunks)]
    if "v" in which:
        products.append(Product(None, "do", v_chunks))
    if "k" in which:
        products += [Product("v", "do", v_chunks), Product(None, "q", k_chunks)]
    return Stream(ctx, products, rows_of)


def _column_kernel(refs: Refs, *rest: Any, plan: KeyPlan, which: str) -> None:
    *outs, smem = rest
    ctx = Context(plan, refs, smem)
    work = shared.work_tile(ctx, refs.schedule[lax.axis_index("block"), 1])
    stream = _column_stream(ctx, work, which)
    shape, terms = (ROWS, plan.config.block_q), plan.terms
    steps = plan.problem.group * work.steps
    stream.begin(step_of(plan, work, jnp.int32(0)))

    def one(i, grads):
        grads, step = dict(zip(which, grads, strict=True)), step_of(plan, work, i)
        walk = stream.step(i, step, step_of(plan, work, i + 1))
        rows = pl.ds(step.t * shape[1], shape[1])
        lse, delta = (
            mosaic.load(ref.at[work.batch, step.head, rows], mosaic.COLUMN)
            for ref in (refs.lse, refs.delta)
        )
        place = shared.place_of(work, step.head, step.t, work.key, shape[1])
        masked = shared.needs_mask(plan, work, step.t, step.number)
        p, slope = score_mod.probabilities(ctx, place, walk.scores(), lse, masked)
        if "v" in which:
            of_p = mma_sync.terms_of(p, terms, plan.operand_dtype)
            grads["v"] = walk.weigh(grads["v"], of_p)
        if "k" in which:
            ds = p * (walk.scores() - per_column(delta, shape))
            ds = ds if slope is None else ds * slope
            of_ds = mma_sync.terms_of(ds, terms, plan.operand_dtype)
            grads["k"] = walk.weigh(grads["k"], of_ds)
        return tuple(grads[name] for name in which)

    counts = {"k": plan.k_chunks, "v": plan.v_chunks}
    nothing = tuple(sm80_column_stream.zeros(plan, counts[name]) for name in which)
    found = lax.fori_loop(0, steps, one, nothing)
    at = (work.batch, work.kv_head, work.key, plan.problem.kv_len - work.key)
    for name, grad, out in zip(which, found, outs, strict=True):
        scale = plan.problem.scale if name == "k" else 1.0
        sm80_column_stream.write([x * scale for x in grad], out, at)


def _launch_by_columns(plan: KeyPlan, refs: Refs, which: str) -> dict[str, Any]:
    """dk, dv or both, by name."""
    problem = plan.problem
    counts = {"k": plan.k_chunks, "v": plan.v_chunks}
    dims = {"k": problem.head_dim, "v": problem.v_head_dim}
    shapes = {
        name: (problem.batch, problem.kv_len, problem.kv_heads * counts[name], plan.config.columns)
        for name in which
    }
    kernel = plgpu.kernel(
        functools.partial(_column_kernel, plan=plan, which=which),
        out_type=tuple(jax.ShapeDtypeStruct(shapes[name], problem.dtype) for name in which),
        scratch_types=(sm80_column_stream.scratch(plan, plan.config.block_q),),
        grid=(plan.grid,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=f"flash_bwd_{which}_streams_sm80",
    )
    found = zip(which, kernel(refs), strict=True)
    return {name: plan.whole_rows(x, dims[name]) for name, x in found}


# ---- the call -----------------------------------------------------------------------------------


def run(residuals: Any, problem: AttentionProblem, config: Config) -> AttentionInputs:
    """(inputs, out, lse, d_out, d_lse) -> the cotangents of inputs."""
    residuals, plan = Residuals(*residuals), plan_of(problem, config)
    inputs = residuals.inputs
    rows = tma_operands.round_up(problem.q_len, 2 * ROWS)  # whole tiles, of any size
    stats = shared.row_statistics(plan, rows, residuals)
    refs = _operands(plan, residuals, stats)
    grads: dict[str, Any] = {}
    if plan.fused:
        heads, slices = problem.batch * problem.q_heads, plan.dq_slices
        sizes = (heads * plan.q_tiles * slices, config.block_q * plan.k_width // slices)
        refs = refs._replace(dq=jax.new_ref(sm80_dq.cleared(sizes, refs.delta)))
    launch = _launch_by_columns if config.columns else _launch
    for which in _launches(plan):
        grads |= launch(plan, refs, which)
        refs = shared.ordered_after(refs, grads[which[0]])
    if plan.fused:
        dq = sm80_dq.collected(plan, jax.freeze(refs.dq))
    else:
        dq = sm80_dq.dq_of(sm80_dq.plan_of(problem, config), inputs, refs)
    if inputs.bias is not None:
        refs = shared.ordered_after(refs, dq)
        grads["bias"] = sm80_dq.dbias_of(problem, config, inputs, refs)
    if inputs.sinks is not None:
        grads["sinks"] = shared.dsinks(residuals, stats)
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
        grid=(plan.grid,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=f"flash_bwd_{which}_sm80",
        **warpgroup_arguments(plan.config.warpgroups),
    )
    return dict(zip(which, kernel(refs), strict=True))


def _kernel_of(refs: Refs, *rest: Any, plan: KeyPlan, which: str) -> None:
    *outs, smem = rest
    _kernel(Context(plan, refs, smem), outs, which)


def _operands(plan: KeyPlan, residuals: Residuals, stats: RowStatistics) -> Refs:
    """What a kernel over kv tiles reads, but for dq. Copied are float32 arrays, into terms; bias
    and mask_array, transposed; segment ids.
    """
    problem, config, inputs = plan.problem, plan.config, residuals.inputs
    rows, keys = plan.padded_rows, plan.padded_keys
    fields: dict[str, Any] = {name: getattr(inputs, name) for name in problem.arrays}
    fields |= {name: plan.operand(getattr(inputs, name)) for name in ("q", "k", "v")}
    fields["do"] = plan.operand(residuals.d_out)
    fields |= stats._asdict()
    given = tma_operands.over_scores(inputs, rows, keys)
    fields |= {name: array.swapaxes(2, 3) for name, array in given.items()}
    fields |= tma_operands.segment_ids(inputs, rows, keys)
    fields["schedule"] = jnp.asarray(shared.schedule(plan))
    fields |= functions.operands(inputs)
    if plan.is_listed:
        fields["tiles"] = tile_lists.tiles(plan.problem, inputs, *plan.list_sizes)
    if plan.has("q_segment_ids"):
        sizes = plan.block_kv, config.block_q
        fields["segment_spans"] = plan.segment_spans(inputs, fields, *sizes, of_keys=True)
    return Refs(**{name: fields.get(name) for name in Refs._fields})
