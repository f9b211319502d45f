"""Flash attention forward for every GPU from Ampere on: bfloat16, float16 and float32.

FlashAttention-2 (arXiv 2307.08691) by mma.sync and cp.async, which all of them have.

Grid: one block a work tile (`tile_scheduler.schedule`, longest first), which is `64 * row_blocks`
query rows of one head. A block has 4 warps, or 4 for every 64 rows. A warp has 16 rows of each 64
and all keys of a kv tile, so that warps synchronise only where shared memory changes owners.
Several blocks live on a multiprocessor: the softmax of one runs while another has the tensor cores.

Where registers do not suffice for 32 rows a warp, at head dims above 128, warps stand two by two
(mma/mma_2x2.py; `Config.warp_rows`): 32 rows by half of the keys for scores, by half of the columns
for the output. That takes 104 loads of shared memory for 256 matmuls, where 16 rows a warp take
144. With `Config.scores_ahead` the softmax of a tile is written between the matmuls of another,
since a warp would wait for them otherwise.

Kv tiles are taken from the last to the first, as in sm90.py; masks, softmax and schedule are the
same code. Where a row max is raised the output is rescaled at once (`softmax.step_and_rescale`), so
that nothing but arithmetic stands between exponents and the matmuls with V, and they overlap.

Shared memory holds q, which is the output's on its way out too (mma/epilogue.py), and `stages`
tiles of K and V, which all threads of a block fill by cp.async:

  stages 1   V of a tile is loaded while its scores are computed, from `Config.columns_before_v`
             columns on (matmuls want their operands first), and the next K when they are done: two
             barriers a tile
  stages n   K and V of n - 1 tiles are in flight; one barrier a tile

Rows past a length and columns past a head dim are zeros that cp.async puts there: nothing is padded
beforehand, and V past a length is never read.

float32 is multiplied in bfloat16 terms (mma/mma_sync.py): 3 products good to 2**-16 by default,
better than TF32's 2**-10, and 6 for precision "highest". Where shared memory is too small for 64
such rows of q and a tile of K and V, all three come by some columns at a time
(attention/sm80_column_stream.py; `Config.columns`).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.kernels.attention import (
    functions,
    score_mod,
    sm80_column_stream,
    softmax,
)
from pallas_attn.kernels.attention.plan import Context, Span, has_no_scores, of_no_scores
from pallas_attn.kernels.attention.plan import limit as limit
from pallas_attn.kernels.attention.score_mod import Refs, Rows, Tile
from pallas_attn.kernels.attention.sm80_common import (
    Copy,
    WholePlan,
    copy_async,
    fits,
    warpgroup_arguments,
)
from pallas_attn.kernels.flash_fwd import tile_scheduler
from pallas_attn.kernels.lang import mosaic, warp_vote
from pallas_attn.kernels.lang.config import check
from pallas_attn.kernels.mma import epilogue, mma_2x2, mma_sync


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning only: the result is the same up to rounding."""

    row_blocks: int = 2  # of 64 query rows
    block_kv: int = 64  # keys of a kv tile
    stages: int = 1  # tiles of K and V in shared memory
    q_in_registers: bool = False
    split_rows: bool = False  # each 64 query rows have a warpgroup of their own; else one has all
    warp_rows: int = 4  # warps of a warpgroup one above the other; 2: two by two
    scores_ahead: bool = False  # a tile ahead of exponents; 16-bit numbers with warp_rows 2 alone
    columns_before_v: int = 32  # of the head dim, multiplied before V is loaded, where stages is 1
    l2_heads: int = 0  # heads whose work tiles are taken together; 0: see Plan.l2_heads
    columns: int = 0  # of q, k and v in shared memory at a time; 0: all

    grid = 0  # one block a work tile

    def __post_init__(self):
        even, one_block = self.block_kv % 32 == 0, self.split_rows or self.row_blocks == 1
        by_two = even and one_block and not self.q_in_registers
        by_columns = self.row_blocks == 1 and self.warp_rows == 4 and not self.q_in_registers
        check(
            self,
            row_blocks=(self.row_blocks in (1, 2), "1 or 2"),
            block_kv=(16 <= self.block_kv <= 128 and self.block_kv % 16 == 0, "16, 32, .. 128"),
            stages=(self.stages >= 1, "at least 1"),
            columns_before_v=(
                self.columns_before_v % 16 == 0 <= self.columns_before_v,
                "a multiple of 16",
            ),
            l2_heads=(self.l2_heads >= 0, "at least 0"),
            split_rows=(even or not self.split_rows, "False where block_kv is odd times 16"),
            warp_rows=(
                self.warp_rows == 4 or (self.warp_rows == 2 and by_two),
                "4; or 2 if a warpgroup has 64 rows, block_kv is even times 16, q is in memory",
            ),
            scores_ahead=(
                not self.scores_ahead or (self.warp_rows == 2 and self.stages == 1),
                "False unless warp_rows is 2 and stages is 1",
            ),
            columns=(
                not self.columns or (self.columns % 16 == 0 and by_columns),
                "0; or a multiple of 16 if row_blocks is 1, warp_rows is 4 and q is in memory",
            ),
        )

    @property
    def warpgroups(self) -> int:
        return self.row_blocks

    @classmethod
    def default(cls, problem: AttentionProblem) -> "Config":
        """What serves a problem that nobody tuned: the first that has room."""
        dim, wide = max(problem.head_dim, problem.v_head_dim), problem.dtype == "float32"
        choices = [cls(1, 32), cls(1, 16), cls(1, 32, columns=64)]
        if wide and problem.precision != "highest":
            choices.insert(0, cls(2 if dim <= 64 else 1, 64))
        elif not wide and (dim > 128 or (dim > 64 and problem.gpu == "sm100")):
            choices.insert(0, cls(1, 64))
            if dim > 128 and problem.gpu == "sm90":
                choices[:0] = cls._large_head_dim(problem)
        elif not wide and dim > 64:
            choices.insert(0, cls(2, 64))
        elif not wide:
            choices.insert(0, cls(2, 64, 2 if problem.kv_len <= 2048 else 1, q_in_registers=True))
        return next((one for one in choices if fits(problem, smem_bytes, one)), choices[-1])

    @classmethod
    def _large_head_dim(cls, problem: AttentionProblem) -> "list[Config]":
        """For 16-bit numbers and head dims above 128, as measured on an H200."""
        many = problem.batch * problem.q_heads * problem.q_len >= 2**17
        if many and not problem.mask.bounds_right:
            return [cls(2, 128, split_rows=True, columns_before_v=16)]
        return [cls(1, 64, warp_rows=2, scores_ahead=True)]


# ---- shared memory ------------------------------------------------------------------------------


class Smem(NamedTuple):
    """Shared memory, where whole rows of Q, K and V fit. Results leave by way of q's."""

    q: Any  # [64 * row_blocks, ..]
    k: Any  # [stages * block_kv, ..]
    v: Any  # [stages * block_kv, ..]
    p: Any = None  # [64 * row_blocks, ..]; where warps stand two by two
    rows: Any = None  # float32[2, 64 * row_blocks]: what either warp of a row knows of it


def scratch(plan: WholePlan) -> Smem | sm80_column_stream.Smem:
    """Shared memory, described once: `run` launches it, `smem_bytes` adds it up."""
    config, terms = plan.config, plan.terms
    if config.columns:
        return sm80_column_stream.scratch(plan, config.block_kv)

    def buffer(rows, width):
        return plgpu.SMEM((rows, mma_sync.pitch(terms * width)), plan.operand_dtype)

    keys = config.stages * config.block_kv
    return Smem(
        q=buffer(plan.tile_rows, plan.k_width),
        k=buffer(keys, plan.k_width),
        v=buffer(keys, plan.v_width),
        p=buffer(plan.tile_rows, config.block_kv) if config.warp_rows == 2 else None,
        rows=plgpu.SMEM((2, plan.tile_rows), jnp.float32) if config.warp_rows == 2 else None,
    )


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    return mosaic.bytes_of(scratch(WholePlan(problem, config))) + mosaic.REDUCED


# ---- copies to shared memory, which all threads of a block issue --------------------------------


def _q_copy(ctx: Context, rows: Rows) -> Copy:
    """Of a warpgroup's rows of Q."""
    plan, refs, smem = ctx
    live = plan.problem.q_len - rows.row
    at = (rows.tile.batch, rows.tile.head, rows.row, live, rows.wg * plan.own_rows)
    width = plan.terms * plan.k_width
    return Copy((smem.q, refs.q), at, (plan.own_rows, refs.q.shape, width, plan.groups == 1))


def _kv_copy(ctx: Context, rows: Rows, t: Any, which: str) -> Copy:
    """Of a warpgroup's part of kv tile t of "k" or "v"; zeros where there is no such tile."""
    plan, refs, smem = ctx
    block = plan.config.block_kv
    part = block // plan.groups
    begin = rows.wg * part
    ref, tile = getattr(refs, which), rows.tile
    first = rows.kv_tile(t) * block
    live = jnp.where(t >= rows.span.lo, tile.kv_len - first, 0)
    head = lax.div(tile.head, jnp.int32(plan.problem.group))
    slot = _smem_row(plan, rows, t)
    at = (tile.batch, head, first + begin, live - begin, slot + begin)
    width = plan.k_width if which == "k" else plan.v_width
    width *= plan.terms
    to = getattr(smem, which)
    fixed = plan.groups == plan.config.stages == 1
    return Copy((to, ref), at, (part, ref.shape, width, fixed))


def _smem_row(plan: WholePlan, rows: Rows, t: Any) -> Any:
    """The row of shared memory at which kv tile t begins."""
    config = plan.config
    if config.stages == 1:
        return jnp.int32(0)
    return lax.rem(rows.span.hi - 1 - t, jnp.int32(config.stages)) * config.block_kv


# ---- mainloop -----------------------------------------------------------------------------------


class State(NamedTuple):
    """What is carried from kv tile to kv tile."""

    acc: Any  # [rows, v_width]: the output before it is divided; or its chunks of columns
    row_sum: Any  # [rows, PARTIALS]
    row_max: Any  # [rows]


def _no_keys(plan: WholePlan) -> State:
    """The state before the first tile."""
    rows = plan.own_rows
    if plan.config.warp_rows == 2:
        acc, row_sum = (
            plgpu.layout_cast(jnp.zeros(shape, jnp.float32), mosaic.warp_layout(shape, 2))
            for shape in ((rows, plan.v_width), (rows, mma_2x2.PARTIALS))
        )
        row_max = jnp.full((rows,), -jnp.inf, jnp.float32)
        return State(acc, row_sum, plgpu.layout_cast(row_max, mma_2x2.row_layout(rows)))
    if plan.config.columns:
        acc = sm80_column_stream.zeros(plan, plan.v_chunks)
    else:
        acc = mosaic.filled((rows, plan.v_width), 0.0)
    row_sum = mosaic.filled((rows, softmax.PARTIALS), 0.0)
    return State(acc, row_sum, mosaic.filled((rows,), -jnp.inf))


def _mainloop(ctx: Context, rows: Rows) -> State:
    """All kv tiles of the block's rows, from the last to the first."""
    plan, _, smem = ctx
    config, span, terms = plan.config, rows.span, plan.terms
    copy = functools.partial(_kv_copy, ctx, rows)
    if config.columns:
        stream = _stream(ctx, rows)
        stream.begin(span.hi - 1)
    else:
        copy_async(_q_copy(ctx, rows), copy(span.hi - 1, "k"), pending=None)
    if config.stages > 1 and not config.columns:
        copy_async(copy(span.hi - 1, "v"), pending=None)
        for e in range(1, config.stages - 1):
            copy_async(*(copy(span.hi - 1 - e, name) for name in "kv"), pending=None)

    first = rows.wg * plan.own_rows
    q: Any = None if config.columns else smem.q
    if config.q_in_registers:
        copy_async(pending=config.stages - 1, groups=plan.groups)
        q = mma_sync.load_fragments(smem.q, first, plan.own_rows, terms * plan.k_width)

    def step(masked, i, state):
        t = -1 - i  # loops count up
        if config.columns:
            walk = stream.step(span.hi - 1 - t, t, t - 1)
            return _step_by_columns(ctx, rows, walk, masked, state)
        if config.warp_rows == 2:
            return _step_of_warp_pairs(ctx, rows, t, masked, state)
        return _step(ctx, rows, (q, first), t, masked, state)

    high = jnp.minimum(jnp.maximum(span.full_hi, span.lo), span.hi)  # full tiles end here
    low = jnp.minimum(jnp.maximum(span.full_lo, span.lo), high)  # and begin here
    state = _no_keys(plan)
    if {"first_masked", "high"} & plan.sections:
        state = lax.fori_loop(-span.hi, -high, functools.partial(step, True), state)
    state = lax.fori_loop(-high, -low, functools.partial(step, False), state)
    if "low" in plan.sections:
        state = lax.fori_loop(-low, -span.lo, functools.partial(step, True), state)
    return state


def _step(ctx: Context, rows: Rows, q: Any, t: Any, masked: bool, state: State) -> State:
    """Kv tile t, where each row is one warp's. `q`: the left operand of `mma_sync.scores`."""
    plan, _, smem = ctx
    config, terms = plan.config, plan.terms
    copy = functools.partial(_kv_copy, ctx, rows)
    sync_and_copy = functools.partial(copy_async, groups=plan.groups)
    late = 0  # columns of the head dim that are multiplied before V is asked for
    if config.stages == 1 and config.columns_before_v < plan.k_width and terms < 3:
        late = config.columns_before_v
    if config.stages == 1:
        sync_and_copy(*(() if late else (copy(t, "v"),)), pending=0)
    else:
        coming = (copy(t - config.stages + 1, name) for name in "kv")
        sync_and_copy(*coming, pending=config.stages - 2)
    slot = _smem_row(plan, rows, t)
    sizes = (plan.own_rows, config.block_kv, plan.k_width)
    matrix = q, (smem.k, slot), sizes, terms
    if late:
        s = mma_sync.scores(*matrix, (None, 0, late))
        copy_async(copy(t, "v"), pending=None)
        s = mma_sync.scores(*matrix, (s, late, sizes[2]))
    else:
        s = mma_sync.scores(*matrix)
    if config.stages == 1:
        sync_and_copy(copy(t - 1, "k"), pending=0)
    given = score_mod.logits(ctx, rows, t, s, masked)
    empty_ok = masked or plan.adds_to_logits
    new, (acc, row_sum) = softmax.step_and_rescale(
        given, plan.unit, state.row_max, (state.acc, state.row_sum), empty_ok=empty_ok
    )
    p = mma_sync.terms_of(new.p, terms, smem.v.dtype)
    acc = mma_sync.matmul_add(acc, p, smem.v, slot, plan.v_width)
    return State(acc, row_sum + new.row_sum, new.row_max)


# ---- mainloop, operands by some columns at a time -----------------------------------------------


def _stream(ctx: Context, rows: Rows) -> sm80_column_stream.Stream:
    """The operands of kv tiles, by some columns at a time."""
    plan, tile, block = ctx.plan, rows.tile, ctx.plan.config.block_kv
    kv_head = lax.div(tile.head, jnp.int32(plan.problem.group))

    def rows_of(name, t):
        if name == "q":
            return sm80_column_stream.Rows(
                tile.batch, tile.head, rows.row, plan.problem.q_len - rows.row
            )
        first = rows.kv_tile(t) * block
        live = jnp.where(t >= rows.span.lo, tile.kv_len - first, 0)
        return sm80_column_stream.Rows(tile.batch, kv_head, first, live)

    products = (
        sm80_column_stream.Product("q", "k", plan.k_chunks),
        sm80_column_stream.Product(None, "v", plan.v_chunks),
    )
    return sm80_column_stream.Stream(ctx, products, rows_of)


def _step_by_columns(
    ctx: Context, rows: Rows, walk: sm80_column_stream.Step, masked: bool, state: State
) -> State:
    """`_step`, whose operands come by some columns at a time."""
    plan = ctx.plan
    given = score_mod.logits(ctx, rows, walk.where, walk.scores(), masked)
    empty_ok = masked or plan.adds_to_logits
    new = softmax.step(given, plan.unit, state.row_max, empty_ok=empty_ok)
    acc, row_sum = softmax.rescaled(new, (state.acc, state.row_sum))
    p = mma_sync.terms_of(new.p, plan.terms, plan.operand_dtype)
    return State(walk.weigh(acc, p), row_sum + new.row_sum, new.row_max)


# ---- mainloop, warps two by two: each row is shared by two warps ---------------------------------


def _step_of_warp_pairs(ctx: Context, rows: Rows, t: Any, masked: bool, state: State) -> State:
    """Kv tile t, whose rows two warps share: P and the maxima of the rows go through shared
    memory.
    """
    plan, _, smem = ctx
    config, terms = plan.config, plan.terms
    copy = functools.partial(_kv_copy, ctx, rows)
    sync_and_copy = functools.partial(copy_async, groups=plan.groups)
    if config.stages == 1:
        sync_and_copy(copy(t, "v"), pending=0)
    else:
        coming = (copy(t - config.stages + 1, name) for name in "kv")
        sync_and_copy(*coming, pending=config.stages - 2)
    slot, own, first = _smem_row(plan, rows, t), plan.own_rows, rows.wg * plan.own_rows
    sizes = (own, config.block_kv, plan.k_width)
    s = mma_2x2.product((smem.q, first), (smem.k, slot), sizes, terms, 2)
    given = score_mod.logits(ctx, rows, t, s, masked, mosaic.warp_layout(s.shape, 2))
    mma_2x2.store_row_partials(given, smem.rows, first, "max")
    if config.stages == 1:
        sync_and_copy(copy(t - 1, "k"), pending=0)
    else:
        mma_2x2.sync_row_pair(rows.wg)
    row_max, base = _raise_shared_max(ctx, rows, state, masked or plan.adds_to_logits)
    p = softmax.exponentials(given, plan.unit, base)
    moved = _any_moved(plan, state, row_max)
    grid = mma_2x2.WarpGrid(2, row=first)
    mma_2x2.store_tile(mma_sync.terms_of(p, terms, smem.v.dtype), smem.p, grid)
    rescale = jnp.exp2(state.row_max - base)
    new = softmax.Step(p, row_max, rescale, mma_2x2.partial_sums(p), moved)
    acc, row_sum = softmax.rescaled(new, (state.acc, state.row_sum))
    mma_2x2.sync_row_pair(rows.wg)
    sizes = (own, config.block_kv, terms)
    values = mma_2x2.RightOperand(smem.v, slot, plan.v_width)
    acc = mma_2x2.matmul_add_shared(acc, smem.p, values, sizes, grid)
    return State(acc, row_sum + new.row_sum, row_max)


def _raise_shared_max(ctx: Context, rows: Rows, state: State, empty_ok: bool) -> tuple[Any, Any]:
    """`softmax.raise_max` by the maxima that both warps of a row have put into shared memory."""
    plan, own = ctx.plan, ctx.plan.own_rows
    peak = mma_2x2.load_row_totals(ctx.smem.rows, rows.wg * own, own, "max")
    return softmax.raise_max(peak, plan.unit, state.row_max, empty_ok=empty_ok)


def _any_moved(plan: WholePlan, state: State, row_max: Any) -> Any:
    layout = mma_2x2.row_layout(plan.own_rows)
    return warp_vote.any_in_warp(row_max - state.row_max, 0.0, layout)


def _mainloop_scores_ahead(ctx: Context, rows: Rows) -> State:
    """`_mainloop` for `Config.scores_ahead`: the exponents of a tile are computed between the
    matmuls for the scores of the next, and the maxima of those between the matmuls for the values.
    """
    plan, _, smem = ctx
    span, own, first = rows.span, plan.own_rows, rows.wg * plan.own_rows
    sizes = (own, plan.config.block_kv, plan.k_width)
    copy = functools.partial(_kv_copy, ctx, rows)
    sync_and_copy = functools.partial(copy_async, groups=plan.groups, pending=0)
    layout, grid = mosaic.warp_layout(sizes[:2], 2), mma_2x2.WarpGrid(2, row=first)
    some_masked = bool({"first_masked", "high", "low"} & plan.sections)
    matrix, none = ((smem.q, first), (smem.k, jnp.int32(0))), jnp.int32(0)

    def raise_max(t, state):
        sync_and_copy(copy(t, "v"))
        row_max, base = _raise_shared_max(ctx, rows, state, some_masked or plan.adds_to_logits)
        return row_max, base, _any_moved(plan, state, row_max)

    def step(masked, i, carry):
        """Tile t, and the scores of the next."""
        t, (state, given) = -i, carry  # loops count up
        row_max, base, moved = raise_max(t, state)
        work = mma_2x2.Exponents(given, plan.unit, base, smem.p, first)
        s, row_sum = mma_2x2.scores_and_exponents(*matrix, sizes, work)
        coming = score_mod.logits(ctx, rows, t - 1, s, masked, layout)
        sync_and_copy(copy(t - 2, "k"))
        new = softmax.Step(s, row_max, jnp.exp2(state.row_max - base), row_sum, moved)
        acc, before = softmax.rescaled(new, (state.acc, state.row_sum))
        values = mma_2x2.RightOperand(smem.v, none, plan.v_width)
        peaks = mma_2x2.RowMax(coming, smem.rows, first)
        acc = mma_2x2.matmul_add_and_row_max(acc, smem.p, values, sizes[:2], grid, peaks)
        return State(acc, before + row_sum, row_max), coming

    def last_step(state, given):
        row_max, base, moved = raise_max(span.lo, state)
        p = softmax.exponentials(given, plan.unit, base)
        mma_2x2.store_tile((p.astype(smem.v.dtype),), smem.p, grid)
        row_sum = mma_2x2.partial_sums(p)
        sync_and_copy()
        new = softmax.Step(p, row_max, jnp.exp2(state.row_max - base), row_sum, moved)
        acc, before = softmax.rescaled(new, (state.acc, state.row_sum))
        values, both = mma_2x2.RightOperand(smem.v, none, plan.v_width), (*sizes[:2], 1)
        acc = mma_2x2.matmul_add_shared(acc, smem.p, values, both, grid)
        return State(acc, before + row_sum, row_max)

    copy_async(_q_copy(ctx, rows), copy(span.hi - 1, "k"), pending=None)
    sync_and_copy()
    s = mma_2x2.product(*matrix, sizes, 1, 2)
    given = score_mod.logits(ctx, rows, span.hi - 1, s, some_masked, layout)
    sync_and_copy(copy(span.hi - 2, "k"))
    mma_2x2.store_row_partials(given, smem.rows, first, "max")
    high = jnp.minimum(jnp.maximum(span.full_hi, span.lo), span.hi)
    low = jnp.minimum(jnp.maximum(span.full_lo, span.lo), high)
    begin = 1 - span.hi
    carry = _no_keys(plan), given
    if {"first_masked", "high"} & plan.sections:
        carry = lax.fori_loop(begin, -high, functools.partial(step, True), carry)
    begins = [jnp.maximum(begin, -end) for end in (high, low)]
    carry = lax.fori_loop(begins[0], -low, functools.partial(step, False), carry)
    if "low" in plan.sections:
        carry = lax.fori_loop(begins[1], -span.lo, functools.partial(step, True), carry)
    return last_step(*carry)


# ---- epilogue -----------------------------------------------------------------------------------


def _epilogue(ctx: Context, rows: Rows, state: State) -> None:
    """Divides by the row sums, and stores the output and the log-sum-exp."""
    plan, refs, smem = ctx
    tile, row_sum, grid = rows.tile, state.row_sum, None
    sink = refs.sinks[tile.head] if plan.has("sinks") else None
    if plan.config.warp_rows == 2:
        first, grid = rows.wg * plan.own_rows, mma_2x2.WarpGrid(2)
        mma_2x2.store_row_partials(row_sum, smem.rows, first, "sum")
        mma_2x2.sync_row_pair(rows.wg)
        row_sum = mma_2x2.load_row_totals(smem.rows, first, plan.own_rows, "sum")
    factor, lse = softmax.finish(state.row_max, row_sum, sink)
    acc = jax.tree.map(lambda x: x * mosaic.broadcast_rows(factor, x.shape), state.acc)
    if tile.q_len is not None:
        layout = mosaic.TILE if grid is None else mosaic.warp_layout(acc.shape, 2)
        inside = mosaic.positions(lse.shape, 0, rows.row, layout) < tile.q_len
        lse = jnp.where(inside, lse, -jnp.inf)
        acc = jax.tree.map(lambda x: jnp.where(mosaic.broadcast_rows(inside, x.shape), x, 0.0), acc)
    mosaic.store(refs.lse.at[tile.batch, tile.head, pl.ds(rows.row, plan.own_rows)], lse)
    live = plan.problem.q_len - rows.row
    at = (tile.batch, tile.head, rows.row, live)
    if plan.config.columns:
        return sm80_column_stream.write(acc, refs.out, at)
    result = acc.astype(refs.out.dtype)
    if plan.terms == 1 and plan.v_width <= plan.k_width:
        return epilogue.write(result, refs.out, at, (smem.q, rows.wg * plan.own_rows), grid)
    if grid is None:
        return mma_sync.write(result, refs.out, at)
    return mma_2x2.write(result, refs.out, at, grid)


# ---- the kernel and its call --------------------------------------------------------------------


def _kernel(refs: Refs, out: Any, lse: Any, smem: Smem, *, plan: WholePlan) -> None:
    ctx = Context(plan, refs._replace(out=out, lse=lse), smem)
    tile = tile_scheduler.tile_of(ctx, refs.schedule[lax.axis_index("block"), 1])
    wg = lax.axis_index("wg") if plan.groups > 1 else jnp.int32(0)
    if plan.is_listed:
        listed = tile_scheduler.listed(ctx, tile)
        rows = Rows(tile, tile.row + wg * plan.own_rows, wg, listed.span, listed=listed)
    else:
        rows = Rows(tile, tile.row + wg * plan.own_rows, wg, _span(ctx, tile))
    ahead = plan.config.scores_ahead and plan.terms == 1
    loop = functools.partial(_mainloop_scores_ahead if ahead else _mainloop, ctx, rows)
    if "empty" in plan.sections:
        none = functools.partial(_no_keys, plan)
        state = lax.cond(rows.span.hi > rows.span.lo, loop, none)
    else:
        state = loop()
    _epilogue(ctx, rows, state)


def _span(ctx: Context, tile: Tile) -> Span:
    """The kv tiles of the block's rows; lo == hi == 0 where there is none."""
    plan, refs, _ = ctx
    rows: Any = plan.tile_rows
    if tile.q_len is not None:
        rows = jnp.minimum(rows, tile.q_len - tile.row)
    span = plan.span(tile.mask, tile.q_offset + tile.row, rows, tile.kv_len)
    if plan.has("q_segment_ids"):
        unit = lax.div(tile.row, jnp.int32(plan.tile_rows))
        span = span.within(Span(*(refs.segment_spans[tile.batch, i, unit] for i in range(4))))
    if plan.has("mask_array"):
        span = span._replace(full_hi=span.full_lo)
    return tile_scheduler.empty_as_zero(plan, tile, rows, span)


def run(inputs: AttentionInputs, problem: AttentionProblem, config: Config) -> tuple[Any, Any]:
    """out [B, T, N, Hv] in q's dtype, log-sum-exp float32 [B, N, T]."""
    batch, q_len = problem.batch, problem.q_len
    if has_no_scores(problem):
        return of_no_scores(problem)
    plan = WholePlan(problem, config)
    refs = _operands(plan, inputs)
    out_shape = (batch, q_len, problem.q_heads, problem.v_head_dim)
    in_chunks = (batch, q_len, problem.q_heads * plan.v_chunks, config.columns)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=(
            jax.ShapeDtypeStruct(in_chunks if config.columns else out_shape, problem.dtype),
            jax.ShapeDtypeStruct((batch, problem.q_heads, plan.padded_rows), jnp.float32),
        ),
        scratch_types=(scratch(plan),),
        grid=(plan.grid,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="flash_fwd_sm80",
        **warpgroup_arguments(plan.groups),
    )
    out, lse = kernel(refs)
    return plan.whole_rows(out, problem.v_head_dim), lse[:, :, :q_len]


def _operands(plan: WholePlan, inputs: AttentionInputs) -> Refs:
    """What the kernel reads. Copied are: q, k and v where they are float32, into terms; bias and
    mask_array where T or S is no multiple of a tile; segment ids.
    """
    fields = {name: getattr(inputs, name) for name in plan.problem.arrays}
    fields |= {name: plan.operand(getattr(inputs, name)) for name in ("q", "k", "v")}
    fields |= functions.operands(inputs) | tile_scheduler.operands(plan, inputs)
    if plan.has("q_segment_ids"):
        fields["segment_spans"] = plan.segment_spans(inputs, fields, *plan.tile_sizes)
        fields["schedule"] = tile_scheduler.schedule_by_rank(plan, fields["segment_spans"])
    return Refs(**{name: fields.get(name) for name in Refs._fields})
