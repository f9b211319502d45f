"""Flash attention forward for every GPU from Ampere on: bfloat16, float16 and float32.

FlashAttention-2 (arXiv 2307.08691) by mma.sync and cp.async, which all of them have. Grid: one
block of 4 warps a work tile (`tile_scheduler.schedule`, longest first), which is `64 * row_blocks`
query rows of one head; a warp has 16 rows of each 64 and all keys of a tile, so that warps meet
only where shared memory changes hands. Several blocks live on a multiprocessor: the softmax of one
runs while another has the tensor cores.

Where registers do not suffice for 32 rows a warp, at head dims above 128, warps stand two by two
(`squares`; `Config.down`): 32 rows by half of the keys for scores, by half of the columns for the
output. That takes 104 loads of shared memory for 256 matmuls, where 16 rows a warp take 144
(`sm80_ahead`).

Keys are taken from the last tile to the first, as in `flash_fwd_sm90`, and masks, softmax and
schedule are the same code. A top that moves takes the output along at once (`softmax.settled`), so
that nothing but arithmetic stands between exponents and the products of V, and they run together.
Results leave by way of q's shared memory (`leaving`). That holds q, then `stages` tiles of K and V:

  stages 1   V of a tile is asked for when its scores have begun (`Config.late`: matmuls want their
             operands first), and the next K when they are done: the block meets twice a tile
  stages n   K and V of n - 1 tiles are under way; one meeting a tile

Rows past a length and columns past a head dim are zeros that cp.async puts there: nothing is padded
beforehand, and V past a length is never read.

float32 is computed by bfloat16 parts (`matrices`): 3 products good to 2**-16 by default, better
than TF32's 2**-10, and 6 for precision "highest". Where shared memory is too small for 64 such rows
of q and a tile of K and V, all three come by some columns at a time (`streams`; `Config.columns`).
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
from pallas_attn.kernels.attention import (
    score_mod,
    sm80_column_stream,
    softmax,
    tma_operands,
)
from pallas_attn.kernels.attention.plan import Span, segment_spans
from pallas_attn.kernels.attention.score_mod import Refs, Rows, Tile
from pallas_attn.kernels.attention.sm80_common import WholePlan, fits, turn, warpgroups_of
from pallas_attn.kernels.flash_fwd import tile_scheduler
from pallas_attn.kernels.lang import mosaic, warp_vote
from pallas_attn.kernels.lang.config import check
from pallas_attn.kernels.mma import epilogue, mma_2x2, mma_sync


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning only: the result is the same up to rounding."""

    row_blocks: int = 2  # of 64 query rows
    block_kv: int = 64
    stages: int = 1  # tiles of K and V in shared memory
    hold_q: bool = False  # in registers
    wide: bool = False  # each 64 query rows have a warpgroup of their own; else one has all
    down: int = 4  # warps of a warpgroup one above the other; 2: two by two
    ahead: bool = False  # scores a tile ahead of exponents, of 16-bit numbers, where down is 2
    late: int = 32  # columns of scores before V is asked for, where stages is 1 and down 4
    section: int = 0  # heads whose tiles of work are taken together; 0: see Plan.section
    columns: int = 0  # of q, k and v in shared memory at a time (`streams`); 0: all

    ctas = 0  # one block a tile of work

    def __post_init__(self):
        even, one_block = self.block_kv % 32 == 0, self.wide or self.row_blocks == 1
        check(
            self,
            row_blocks=(self.row_blocks in (1, 2), "1 or 2"),
            block_kv=(16 <= self.block_kv <= 128 and self.block_kv % 16 == 0, "16, 32, .. 128"),
            stages=(self.stages >= 1, "at least 1"),
            late=(self.late % 16 == 0 <= self.late, "a multiple of 16"),
            section=(self.section >= 0, "at least 0"),
            wide=(even or not self.wide, "False where block_kv is odd times 16"),
            down=(
                self.down == 4 or (self.down == 2 and even and one_block and not self.hold_q),
                "4; or 2 if a warpgroup has 64 rows, block_kv is even times 16, q is not held",
            ),
            ahead=(
                not self.ahead or (self.down == 2 and self.stages == 1),
                "False unless down is 2 and stages is 1",
            ),
            columns=(
                not self.columns or (self.columns % 16 == 0 and self.plain),
                "0; or a multiple of 16 if row_blocks is 1, down is 4 and q is not held",
            ),
        )

    @property
    def plain(self) -> bool:
        return self.row_blocks == 1 and self.down == 4 and not self.hold_q

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
                choices[:0] = cls._wide(problem)
        elif not wide and dim > 64:
            choices.insert(0, cls(2, 64))
        elif not wide:
            choices.insert(0, cls(2, 64, 2 if problem.kv_len <= 2048 else 1, hold_q=True))
        return next((one for one in choices if fits(problem, smem_bytes, one)), choices[-1])

    @classmethod
    def _wide(cls, problem: AttentionProblem) -> "list[Config]":
        """For 16-bit numbers and head dims above 128, as measured on an H200."""
        many = problem.batch * problem.q_heads * problem.q_len >= 2**17
        if many and problem.mask.right is None:
            return [cls(2, 128, wide=True, late=16)]
        return [cls(1, 64, down=2, ahead=True)]


def limit(problem: AttentionProblem) -> Limit | None:
    if problem.dtype not in ("bfloat16", "float16", "float32"):
        return Limit(
            f"it takes bfloat16, float16 and float32, not {problem.dtype}",
            "cast q, k and v to one of them",
        )
    if (refused := tma_operands.dims_limit(problem)) is not None:
        return refused
    if problem.batch * problem.q_heads * (problem.q_len + 256) >= 2**31:
        return Limit("it counts query rows of all heads in 32 bits", "split the batch")
    return None


# ---- shared memory ------------------------------------------------------------------------------


class Smem(NamedTuple):
    q: Any  # [64 * row_blocks, ..]
    k: Any  # [stages * block_kv, ..]
    v: Any  # [stages * block_kv, ..]
    p: Any = None  # [64 * row_blocks, ..]; where warps stand two by two
    rows: Any = None  # float32[2, 64 * row_blocks]: what either warp of a row says of it


def scratch(plan: WholePlan) -> Smem | sm80_column_stream.Smem:
    """Shared memory, described once: `run` launches it, `smem_bytes` adds it up."""
    config, parts = plan.config, plan.parts_of_numbers
    if config.columns:
        return sm80_column_stream.scratch(plan, config.block_kv)

    def buffer(rows, width):
        return plgpu.SMEM((rows, mma_sync.pitch(parts * width)), plan.operand_dtype)

    keys = config.stages * config.block_kv
    return Smem(
        q=buffer(plan.tile_rows, plan.k_width),
        k=buffer(keys, plan.k_width),
        v=buffer(keys, plan.v_width),
        p=buffer(plan.tile_rows, config.block_kv) if config.down == 2 else None,
        rows=plgpu.SMEM((2, plan.tile_rows), jnp.float32) if config.down == 2 else None,
    )


REDUCED = 2048  # bytes in which Mosaic reduces over the columns of a tile


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    return mosaic.bytes_of(scratch(WholePlan(problem, config))) + REDUCED


# ---- loads, which all threads of a block issue --------------------------------------------------


def rows_of_q(plan: Any, refs: Refs, smem: Smem, rows: Rows) -> tuple[Any, ...]:
    live = plan.problem.q_len - rows.row
    at = (rows.tile.batch, rows.tile.head, rows.row, live, rows.wg * plan.own_rows)
    width = plan.parts_of_numbers * plan.k_width
    return (smem.q, refs.q), at, (plan.own_rows, refs.q.shape, width, plan.groups == 1)


def keys(plan: Any, refs: Refs, smem: Smem, rows: Rows, t: Any, which: str) -> Any:
    """The copy of a warpgroup's part of key tile t of K or V; of nothing but zeros where there is
    no such tile.
    """
    block = plan.config.block_kv
    part = block // plan.groups
    begin = rows.wg * part
    ref, tile = getattr(refs, which), rows.tile
    live = jnp.where(t >= rows.span.lo, tile.kv_len - t * block, 0)
    head = lax.div(tile.head, jnp.int32(plan.problem.group))
    slot = slot_of(plan, rows, t)
    at = (tile.batch, head, t * block + begin, live - begin, slot + begin)
    width = plan.k_width if which == "k" else plan.v_width
    width *= plan.parts_of_numbers
    to = getattr(smem, which)
    fixed = plan.groups == plan.config.stages == 1
    return (to, ref), at, (part, ref.shape, width, fixed)


def slot_of(plan: Any, rows: Rows, t: Any) -> Any:
    """The row of shared memory at which key tile t begins."""
    config = plan.config
    if config.stages == 1:
        return jnp.int32(0)
    return lax.rem(rows.span.hi - 1 - t, jnp.int32(config.stages)) * config.block_kv


# ---- mainloop -----------------------------------------------------------------------------------


class State(NamedTuple):
    """What is carried from key tile to key tile."""

    acc: Any  # [rows, v_width]: the output before it is divided; or its parts by columns
    total: Any  # [rows, PARTS]
    top: Any  # [rows]


def nothing(plan: Any) -> State:
    rows = plan.own_rows
    if plan.config.down == 2:
        acc, total = (
            plgpu.layout_cast(jnp.zeros(shape, jnp.float32), mosaic.standing(shape, 2))
            for shape in ((rows, plan.v_width), (rows, mma_2x2.PARTIALS))
        )
        top = jnp.full((rows,), -jnp.inf, jnp.float32)
        return State(acc, total, plgpu.layout_cast(top, mma_2x2.row_layout(rows)))
    parts: Any = sm80_column_stream.nothing(plan, plan.v_parts) if plan.config.columns else None
    return State(
        mosaic.filled((rows, plan.v_width), 0.0) if parts is None else parts,
        mosaic.filled((rows, softmax.PARTS), 0.0),
        mosaic.filled((rows,), -jnp.inf),
    )


def rescaled(state: State, new: softmax.Step) -> tuple[Any, Any]:
    """Output and sums so far, in terms of the new tops."""

    def scaled():
        sums = (state.acc, state.total)
        return jax.tree.map(lambda x: x * mosaic.down_rows(new.shrink, x.shape), sums)

    return lax.cond(new.moved != 0, scaled, lambda: (state.acc, state.total))


def _attend(plan: WholePlan, refs: Refs, smem: Smem, rows: Rows) -> State:
    """All keys of the block's rows, from the last tile to the first."""
    config, span, parts = plan.config, rows.span, plan.parts_of_numbers
    ask = functools.partial(keys, plan, refs, smem, rows)
    if config.columns:
        stream = _stream(plan, refs, smem, rows)
        stream.begin(span.hi - 1)
    else:
        turn(rows_of_q(plan, refs, smem, rows), ask(span.hi - 1, "k"), wait=None)
    if config.stages > 1 and not config.columns:
        turn(ask(span.hi - 1, "v"), wait=None)
        for e in range(1, config.stages - 1):
            turn(*(ask(span.hi - 1 - e, name) for name in "kv"), wait=None)

    first = rows.wg * plan.own_rows
    q: Any = None if config.columns else smem.q
    if config.hold_q:
        turn(wait=config.stages - 1, groups=plan.groups)
        q = mma_sync.held(smem.q, first, plan.own_rows, parts * plan.k_width)

    def step(masked, i, state):
        t = -1 - i  # loops count up
        if config.columns:
            walk = stream.step(span.hi - 1 - t, t, t - 1)
            return _of_stream(plan, refs, rows, walk, masked, state)
        if config.down == 2:
            return _step_of_pairs(plan, refs, smem, rows, (t, masked), state)
        return _step(plan, refs, smem, rows, (t, masked, (q, first)), state)

    high = jnp.minimum(jnp.maximum(span.full_hi, span.lo), span.hi)  # full tiles end here
    low = jnp.minimum(jnp.maximum(span.full_lo, span.lo), high)  # and begin here
    state = nothing(plan)
    if {"first_masked", "high"} & plan.parts:
        state = lax.fori_loop(-span.hi, -high, functools.partial(step, True), state)
    state = lax.fori_loop(-high, -low, functools.partial(step, False), state)
    if "low" in plan.parts:
        state = lax.fori_loop(-low, -span.lo, functools.partial(step, True), state)
    return state


def _step(plan: WholePlan, refs: Refs, smem: Smem, rows: Rows, at: Any, state: State) -> State:
    """Key tile t, whose rows are of one warp each; `at`: (t, whether masked, q)."""
    (t, masked, q), config, parts = at, plan.config, plan.parts_of_numbers
    ask = functools.partial(keys, plan, refs, smem, rows)
    meet = functools.partial(turn, groups=plan.groups)
    late = config.late if config.stages == 1 and config.late < plan.k_width and parts < 3 else 0
    if config.stages == 1:
        meet(*(() if late else (ask(t, "v"),)), wait=0)
    else:
        coming = (ask(t - config.stages + 1, name) for name in "kv")
        meet(*coming, wait=config.stages - 2)
    slot = slot_of(plan, rows, t)
    sizes = (plan.own_rows, config.block_kv, plan.k_width)
    matrix = q, (smem.k, slot), sizes, parts
    if late:
        s = mma_sync.scores(*matrix, (None, 0, late))
        turn(ask(t, "v"), wait=None)
        s = mma_sync.scores(*matrix, (s, late, sizes[2]))
    else:
        s = mma_sync.scores(*matrix)
    if config.stages == 1:
        meet(ask(t - 1, "k"), wait=0)
    given = score_mod.of_scores(plan, refs, rows, t, s, masked)
    guarded = masked or plan.has("bias")
    new = softmax.settled(given, plan.unit, state.top, state[:2], guarded=guarded)
    p = mma_sync.parts_of(new.p, parts, smem.v.dtype)
    acc = mma_sync.weigh(new.older[0], p, smem.v, slot, plan.v_width)
    return State(acc, new.older[1] + new.total, new.top)


def _step_of_pairs(
    plan: WholePlan, refs: Refs, smem: Smem, rows: Rows, at: Any, state: State
) -> State:
    """Key tile t, whose rows two warps share; `at`: (t, whether masked)."""
    (t, masked), config, parts = at, plan.config, plan.parts_of_numbers
    ask = functools.partial(keys, plan, refs, smem, rows)
    meet = functools.partial(turn, groups=plan.groups)
    if config.stages == 1:
        meet(ask(t, "v"), wait=0)
    else:
        coming = (ask(t - config.stages + 1, name) for name in "kv")
        meet(*coming, wait=config.stages - 2)
    slot, first = slot_of(plan, rows, t), rows.wg * plan.own_rows
    sizes = (plan.own_rows, config.block_kv, plan.k_width)
    s = mma_2x2.product((smem.q, first), (smem.k, slot), sizes, parts, 2)
    given = score_mod.of_scores(plan, refs, rows, t, s, masked, mosaic.standing(s.shape, 2))
    mma_2x2.put_rows(given, smem.rows, first, "max")
    if config.stages == 1:
        meet(ask(t - 1, "k"), wait=0)
    else:
        mma_2x2.sync_row_pair(rows.wg)
    return of_pairs(plan, smem, rows, slot, state, (given, masked or plan.has("bias")))


def of_pairs(plan: Any, smem: Smem, rows: Rows, slot: Any, state: State, tile: Any) -> State:
    """A step from (logits, whether a row may have no key) on, whose rows two warps share."""
    (given, guarded), parts = tile, plan.parts_of_numbers
    own, first = plan.own_rows, rows.wg * plan.own_rows
    peak = mma_2x2.rows_of_both(smem.rows, first, own, "max")
    top, base = softmax.raised(peak, plan.unit, state.top, guarded=guarded)
    given = given if plan.unit is None else given * plan.unit
    p = jnp.exp2(given - mosaic.down_rows(base, given.shape))
    moved = warp_vote.any_in_warp(top - state.top, 0.0, mma_2x2.row_layout(own))
    stand = mma_2x2.Stand(2, row=first)
    mma_2x2.put(mma_sync.parts_of(p, parts, smem.v.dtype), smem.p, stand)
    step = softmax.Step(p, top, jnp.exp2(state.top - base), mma_2x2.partial_sums(p), moved)
    acc, total = rescaled(state, step)
    mma_2x2.sync_row_pair(rows.wg)
    sizes = (own, plan.config.block_kv, parts)
    acc = mma_2x2.weigh_shared(acc, smem.p, (smem.v, slot, plan.v_width), sizes, stand)
    return State(acc, total + step.total, top)


def attend_ahead(plan: Any, refs: Refs, smem: Smem, rows: Rows) -> State:
    """`_attend` for `Config.ahead`: scores of a tile are made between the exponents of the one
    before it, and their maxima found between the products of its values.
    """
    span, own, first = rows.span, plan.own_rows, rows.wg * plan.own_rows
    sizes = (own, plan.config.block_kv, plan.k_width)
    ask = functools.partial(keys, plan, refs, smem, rows)
    meet = functools.partial(turn, groups=plan.groups, wait=0)
    layout, stand = mosaic.standing(sizes[:2], 2), mma_2x2.Stand(2, row=first)
    some_masked = bool({"first_masked", "high", "low"} & plan.parts)
    matrix, none = ((smem.q, first), (smem.k, jnp.int32(0))), jnp.int32(0)

    def begun(t, state):
        """What the tile's maxima say, when V of it has been asked for."""
        meet(ask(t, "v"))
        peak = mma_2x2.rows_of_both(smem.rows, first, own, "max")
        guarded = some_masked or plan.has("bias")
        top, base = softmax.raised(peak, plan.unit, state.top, guarded=guarded)
        moved = warp_vote.any_in_warp(top - state.top, 0.0, mma_2x2.row_layout(own))
        return top, base, moved

    def step(masked, i, carry):
        """Tile t, and the scores of the next."""
        t, (state, given) = -i, carry  # loops count up
        top, base, moved = begun(t, state)
        to = base, smem.p, first
        s, total = mma_2x2.scores_and_exponents(matrix, sizes, given, plan.unit, to)
        coming = score_mod.of_scores(plan, refs, rows, t - 1, s, masked, layout)
        meet(ask(t - 2, "k"))
        shrink = jnp.exp2(state.top - base)
        acc, before = rescaled(state, softmax.Step(s, top, shrink, total, moved))
        values = smem.v, none, plan.v_width
        peaks = coming, smem.rows, first
        acc = mma_2x2.weigh_and_peaks(acc, smem.p, values, sizes[:2], stand, peaks)
        return State(acc, before + total, top), coming

    def last_step(state, given):
        top, base, moved = begun(span.lo, state)
        given = given if plan.unit is None else given * plan.unit
        p = jnp.exp2(given - mosaic.down_rows(base, given.shape))
        mma_2x2.put((p.astype(smem.v.dtype),), smem.p, stand)
        total = mma_2x2.partial_sums(p)
        meet()
        shrink = jnp.exp2(state.top - base)
        acc, before = rescaled(state, softmax.Step(p, top, shrink, total, moved))
        values, both = (smem.v, none, plan.v_width), (*sizes[:2], 1)
        acc = mma_2x2.weigh_shared(acc, smem.p, values, both, stand)
        return State(acc, before + total, top)

    turn(rows_of_q(plan, refs, smem, rows), ask(span.hi - 1, "k"), wait=None)
    meet()
    s = mma_2x2.product(*matrix, sizes, 1, 2)
    given = score_mod.of_scores(plan, refs, rows, span.hi - 1, s, some_masked, layout)
    meet(ask(span.hi - 2, "k"))
    mma_2x2.put_rows(given, smem.rows, first, "max")
    high = jnp.minimum(jnp.maximum(span.full_hi, span.lo), span.hi)
    low = jnp.minimum(jnp.maximum(span.full_lo, span.lo), high)
    begin = 1 - span.hi
    carry = nothing(plan), given
    if {"first_masked", "high"} & plan.parts:
        carry = lax.fori_loop(begin, -high, functools.partial(step, True), carry)
    begins = [jnp.maximum(begin, -end) for end in (high, low)]
    carry = lax.fori_loop(begins[0], -low, functools.partial(step, False), carry)
    if "low" in plan.parts:
        carry = lax.fori_loop(begins[1], -span.lo, functools.partial(step, True), carry)
    return last_step(*carry)


def _stream(plan: WholePlan, refs: Refs, smem: Any, rows: Rows) -> sm80_column_stream.Stream:
    """The operands of key tiles, by some columns at a time."""
    tile, block = rows.tile, plan.config.block_kv
    kv_head = lax.div(tile.head, jnp.int32(plan.problem.group))

    def rows_of(name, t):
        if name == "q":
            return sm80_column_stream.Rows(
                tile.batch, tile.head, rows.row, plan.problem.q_len - rows.row
            )
        live = jnp.where(t >= rows.span.lo, tile.kv_len - t * block, 0)
        return sm80_column_stream.Rows(tile.batch, kv_head, t * block, live)

    products = (
        sm80_column_stream.Product("q", "k", plan.k_parts),
        sm80_column_stream.Product(None, "v", plan.v_parts),
    )
    return sm80_column_stream.Stream(plan, smem, refs, products, rows_of)


def _of_stream(
    plan: WholePlan,
    refs: Refs,
    rows: Rows,
    walk: sm80_column_stream.Walk,
    masked: bool,
    state: State,
) -> State:
    """A step whose operands come by some columns at a time."""
    given = score_mod.of_scores(plan, refs, rows, walk.where, walk.scores(), masked)
    new = softmax.step(given, plan.unit, state.top, guarded=masked or plan.has("bias"))
    acc, total = rescaled(state, new)
    p = mma_sync.parts_of(new.p, plan.parts_of_numbers, plan.operand_dtype)
    return State(walk.weigh(acc, p), total + new.total, new.top)


def _span(plan: WholePlan, refs: Refs, tile: Tile) -> Span:
    """The key tiles of the block's rows; lo == hi == 0 where there is none."""
    rows: Any = plan.tile_rows
    if tile.q_len is not None:
        rows = jnp.minimum(rows, tile.q_len - tile.row)
    span = plan.span(tile.q_offset + tile.row, rows, tile.kv_len)
    if plan.has("q_segment_ids"):
        unit = lax.div(tile.row, jnp.int32(plan.tile_rows))
        span = span.within(Span(*(refs.segment_spans[tile.batch, i, unit] for i in range(4))))
    if plan.has("mask_array"):
        span = span._replace(full_hi=span.full_lo)
    return tile_scheduler.empty_as_zero(plan, tile, rows, span)


# ---- epilogue -----------------------------------------------------------------------------------


def _finish(plan: WholePlan, refs: Refs, outs: Any, smem: Smem, rows: Rows, state: State) -> None:
    (out_ref, lse_ref), tile = outs, rows.tile
    sink = refs.sinks[tile.head] if plan.has("sinks") else None
    total, stand = state.total, None
    if plan.config.down == 2:
        first, stand = rows.wg * plan.own_rows, mma_2x2.Stand(2)
        mma_2x2.put_rows(total, smem.rows, first, "sum")
        mma_2x2.sync_row_pair(rows.wg)
        total = mma_2x2.rows_of_both(smem.rows, first, plan.own_rows, "sum")
    factor, lse = softmax.finish(state.top, total, sink)
    acc = jax.tree.map(lambda x: x * mosaic.down_rows(factor, x.shape), state.acc)
    if tile.q_len is not None:
        layout = mosaic.TILE if stand is None else mosaic.standing(acc.shape, 2)
        inside = mosaic.positions(lse.shape, 0, rows.row, layout) < tile.q_len
        lse = jnp.where(inside, lse, -jnp.inf)
        acc = jax.tree.map(lambda x: jnp.where(mosaic.down_rows(inside, x.shape), x, 0.0), acc)
    mosaic.store(lse_ref.at[tile.batch, tile.head, pl.ds(rows.row, plan.own_rows)], lse)
    live = plan.problem.q_len - rows.row
    at = (tile.batch, tile.head, rows.row, live)
    if plan.config.columns:
        return sm80_column_stream.write(acc, out_ref, at)
    result = acc.astype(out_ref.dtype)
    if plan.parts_of_numbers == 1 and plan.v_width <= plan.k_width:
        return epilogue.write(result, out_ref, at, (smem.q, rows.wg * plan.own_rows), stand)
    if stand is None:
        return mma_sync.write(result, out_ref, at)
    return mma_2x2.write(result, out_ref, at, stand)


# ---- the kernel and its call --------------------------------------------------------------------


def _kernel(refs: Refs, out_ref: Any, lse_ref: Any, smem: Smem, *, plan: WholePlan) -> None:
    tile = tile_scheduler.tile_of(plan, refs, refs.schedule[lax.axis_index("cta"), 1])
    wg = lax.axis_index("wg") if plan.groups > 1 else jnp.int32(0)
    rows = Rows(tile, tile.row + wg * plan.own_rows, wg, _span(plan, refs, tile))
    ahead = plan.config.ahead and plan.parts_of_numbers == 1
    attend = functools.partial(attend_ahead if ahead else _attend, plan, refs, smem, rows)
    if "empty" in plan.parts:
        none = functools.partial(nothing, plan)
        state = lax.cond(rows.span.hi > rows.span.lo, attend, none)
    else:
        state = attend()
    _finish(plan, refs, (out_ref, lse_ref), smem, rows, state)


def run(inputs: AttentionInputs, problem: AttentionProblem, config: Config) -> tuple[Any, Any]:
    """out [B, T, N, Hv] in q's dtype, log-sum-exp float32 [B, N, T]."""
    batch, q_len = problem.batch, problem.q_len
    out_shape = (batch, q_len, problem.q_heads, problem.v_head_dim)
    if 0 in (batch, q_len, problem.kv_len, problem.q_heads):
        lse = jnp.full((batch, problem.q_heads, q_len), -jnp.inf, jnp.float32)
        return jnp.zeros(out_shape, problem.dtype), lse
    plan = WholePlan(problem, config)
    refs = _operands(plan, inputs)
    in_parts = (batch, q_len, problem.q_heads * plan.v_parts, config.columns)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=(
            jax.ShapeDtypeStruct(in_parts if config.columns else out_shape, problem.dtype),
            jax.ShapeDtypeStruct((batch, problem.q_heads, plan.padded_rows), jnp.float32),
        ),
        scratch_types=(scratch(plan),),
        grid=(plan.ctas,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="flash_fwd_sm80",
        **warpgroups_of(plan.groups),
    )
    out, lse = kernel(refs)
    return plan.joined(out, problem.v_head_dim), lse[:, :, :q_len]


def _operands(plan: WholePlan, inputs: AttentionInputs) -> Refs:
    """What the kernel reads. Copied are: q, k and v where they are float32, into parts; bias and
    mask_array where T or S is no multiple of a tile; segment ids.
    """
    problem, block = plan.problem, plan.config.block_kv
    rows, keys = plan.padded_rows, tma_operands.round_up(problem.kv_len, block)
    fields = {name: getattr(inputs, name) for name in problem.arrays}
    fields |= {name: plan.operand(getattr(inputs, name)) for name in ("q", "k", "v")}
    fields |= tma_operands.over_scores(inputs, rows, keys) | tma_operands.segment_ids(
        inputs, rows, keys
    )
    fields["schedule"] = jnp.asarray(tile_scheduler.schedule(plan))
    if plan.has("q_segment_ids"):
        ids = fields["q_segment_ids"], fields["kv_segment_ids"]
        fields["segment_spans"] = segment_spans(*ids, plan.tile_rows, block)
        fields["schedule"] = tile_scheduler.schedule_by_rank(plan, fields["segment_spans"])
    return Refs(**{name: fields.get(name) for name in Refs._fields})
