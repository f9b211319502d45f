"""Flash attention forward for datacenter Blackwell (sm_100a, sm_103a): bfloat16 and float16.

It has never run on its GPU: the interpreter computes it and looks for races, and ptxas compiles it.
So a call gets it by name only: `implementation="sm100"`.

Algorithm: FlashAttention-4's (arXiv 2603.05451) of one CTA. Matmuls are tcgen05, whose accumulators
lie in tensor memory. A maximum is raised, and the output rescaled, only where it moves by more than
`Config.rescale_threshold`, and some exponentials are polynomials, since the units for exponentials
take as long as the matmuls.

Grid: a block for each work tile, `Config.q_tiles` q tiles of 128 rows of one head, the longest
first (`tile_scheduler.schedule`).

Warpgroups: one for each q tile computes its softmax, a row a thread, so that no maximum or sum
crosses threads; one, the correction, rescales the outputs in tensor memory and stores them; in the
last one warp 0 issues all loads and warp 1 all matmuls.

Shared memory, and who owns it when:
  q [q tile]      loaded once; when the last scores of the q tile are done, its output
  k, v [stages]   rings: `k_ready` and `v_ready` when a kv tile has landed, `k_free` and `v_free`
                  when the matmuls that read it are done
  factors [q tile]  float32[128] from the softmax to the correction (`factor_ready`,
                  `factor_free`), which multiplies O by them

Tensor memory, 512 columns of 128 lanes, which two q tiles of head dim 128 fill:
  scores [q tile]  S, float32[128, block_kv], from `s_ready` until the softmax has read it; then P,
                  in 16 bits, over the first half of its columns, from `p_ready` until `o_ready`
  out [q tile]    O, float32[128, Hv]: the matmuls' from `o_scaled` to `o_ready`, else the
                  correction's

Kv tiles are taken from the first to the last. All q tiles of a block begin with the same one, and
each ends with its own. A barrier that hands over tensor memory needs tcgen05's fences:
`_tensor_memory_barriers` makes such barriers.

Bounds, by the rates of data sheets (8192 FLOP of matmuls and 16 exponentials a cycle): 128 x 128
scores of head dim 128 take 1024 cycles of matmuls, and 1024 of exponentials without polynomials.
Head dims 192 and 128 take 1280 of matmuls. With two q tiles the rings have 127 KiB left, and two
stages of 128 keys take 160, of 96 keys 120. Shared memory gives 128 bytes a cycle, and a matmul
reads all 128 rows of q for the keys of a kv tile: so 128 x 128 scores take 1472 cycles by tiles of
96 keys, and 1728 by tiles of 64.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import (
    key_masks,
    softmax,
    tile_logits,
    tile_scheduler,
    tiles,
    tma_operands,
)
from pallas_attn.kernels.attention.logits import LogitRules
from pallas_attn.kernels.attention.tile_scheduler import Distribution, QueryPlan
from pallas_attn.kernels.attention.tiles import (
    ForwardRefs,
    KernelContext,
    LogitTile,
    QueryTiling,
    Span,
    WorkTile,
)
from pallas_attn.kernels.flash_fwd import sm80
from pallas_attn.kernels.flash_fwd.listed import list_of
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.config import check
from pallas_attn.kernels.lang.mosaic import BARRIERS
from pallas_attn.kernels.lang.types import Barrier, GmemRef, Index, RegisterTile, SmemRef

TILE = 128  # rows of a q tile: lanes of tensor memory
CHUNK = 32  # columns of tensor memory that are in registers at a time
NATIVE = plgpu.Layout.TCGEN05_TMEM_NATIVE  # a row a thread
ROW = NATIVE.reduce(1)
STAGED = plgpu.Layout.TCGEN05  # swizzled shared memory takes it
DIMS = (64, 96, 128)  # q, k and v have one of these
UNEQUAL = ((192, 128),)  # q and k have the first, v the second
OTHER = 'leave implementation=None, or say "sm80"'


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning only: the result is the same up to rounding."""

    q_tiles: int = 2  # 128 rows each, in a work tile
    block_kv: int = 128  # keys of a kv tile
    stages: int = 2  # kv tiles in the rings of K and V
    rescale_threshold: float = softmax.RESCALE_THRESHOLD  # log2 units that a maximum may lag behind
    polynomials: int = 1  # chunks of 32 columns of a kv tile whose exponentials are polynomials

    def __post_init__(self) -> None:
        chunks = self.block_kv // CHUNK
        check(
            self,
            q_tiles=(self.q_tiles in (1, 2), "1 or 2"),
            block_kv=(self.block_kv in (64, 96, 128), "64, 96 or 128"),
            stages=(self.stages >= 2, "at least 2"),
            rescale_threshold=(0 <= self.rescale_threshold <= 8, "0 .. 8"),
            polynomials=(0 <= self.polynomials <= chunks, f"0 .. {chunks}"),
        )

    @classmethod
    def default(cls, problem: AttentionProblem) -> "Config":
        """Two q tiles where there are more rows than one has. Nothing was measured."""
        return cls(
            q_tiles=1 if problem.q_len <= TILE else 2,
            block_kv=96 if problem.head_dim > TILE else 128,  # two stages of 128 do not fit
        )


def limit(
    problem: AttentionProblem, unequal: tuple[tuple[int, int], ...] = UNEQUAL
) -> Limit | None:
    """Why a kernel cannot take a problem, or None. `unequal`: head dims that it takes beside
    `DIMS`.
    """
    dims = problem.head_dim, problem.v_head_dim
    if problem.dtype not in ("bfloat16", "float16"):
        return Limit(f"it takes bfloat16 and float16, not {problem.dtype}", OTHER)
    if dims not in [*zip(DIMS, DIMS, strict=True), *unequal]:
        names = ", ".join([*map(str, DIMS), *(f"or {qk} and {v}" for qk, v in unequal)])
        reason = f"it takes v in the head dim of q and k, one of {names}, not {dims[0]} and"
        return Limit(f"{reason} {dims[1]}", OTHER)
    return tiles.sizes_limit(problem)


@functools.lru_cache(maxsize=256)
def plan_of(problem: AttentionProblem, config: Config) -> QueryPlan:
    """The static values of a launch."""
    rows, block = config.q_tiles * TILE, config.block_kv
    together = problem.mask_program is not None or "q_segment_ids" in problem.arrays
    span_rows = rows if together else TILE  # lists and records of segments are a work tile's
    tiling = QueryTiling(problem.q_len, problem.kv_len, rows, block, span_rows)
    order = Distribution.of(problem, tiling, (0, 0))
    return QueryPlan(problem, config, tiling, order, LogitRules.of(problem, block))


# ---- shared and tensor memory -------------------------------------------------------------------


class Memory(NamedTuple):
    """The buffers of a block, and its barriers."""

    q: Any  # [q_tiles, 128, H]; where H is not Hv, views of each q tile: see `q_and_out`
    k: SmemRef  # [stages, block_kv, H]
    v: SmemRef  # [stages, block_kv, Hv]
    factors: SmemRef  # float32[q_tiles, 128]
    scores: Any  # (S, P) of each q tile: two views of the same columns of tensor memory
    out: Any  # O of each q tile in tensor memory
    q_ready: Barrier
    k_ready: Barrier
    v_ready: Barrier
    k_free: Barrier
    v_free: Barrier
    s_ready: Barrier
    p_ready: Barrier
    o_ready: Barrier
    o_scaled: Barrier
    factor_ready: Barrier
    factor_free: Barrier

    def q_and_out(self, n: int) -> tuple[SmemRef, SmemRef]:
        """q tile n [128, H], and its output [128, Hv] in the same memory."""
        return self.q[n] if isinstance(self.q, tuple) else (self.q.at[n], self.q.at[n])


def scratch(plan: QueryPlan) -> Memory:
    """All memory, described once: `run` launches it, `smem_bytes` adds it up."""
    count, stages, dtype = plan.config.q_tiles, plan.config.stages, jnp.dtype(plan.problem.dtype)
    barrier, keys = plgpu.Barrier, plan.config.block_kv
    # Matmuls take probabilities by whole swizzles of v.
    v = plan.v._replace(swizzle=min(plan.v.swizzle, tma_operands.swizzle_of(2 * keys)))

    def scores_of_a_tile() -> Any:
        packed = plgpu.TMEM((TILE, keys), dtype, packed=True)
        return plgpu.RefUnion(plgpu.TMEM((TILE, keys), jnp.float32), packed)

    q: Any = plan.qk.scratch(count, TILE)
    if plan.qk != plan.v:
        q = tuple(plgpu.RefUnion(plan.qk.scratch(TILE), plan.v.scratch(TILE)) for _ in range(count))
    return Memory(
        q=q,
        k=plan.qk.scratch(stages, keys),
        v=v.scratch(stages, keys),
        factors=plgpu.SMEM((count, TILE), jnp.float32),
        scores=tuple(scores_of_a_tile() for _ in range(count)),
        out=tuple(plgpu.TMEM((TILE, plan.v.width), jnp.float32) for _ in range(count)),
        q_ready=barrier(num_barriers=count),
        k_ready=barrier(num_barriers=stages),
        v_ready=barrier(num_barriers=stages),
        k_free=_tensor_memory_barriers(stages),
        v_free=_tensor_memory_barriers(stages),
        s_ready=_tensor_memory_barriers(count),
        p_ready=_tensor_memory_barriers(count),
        o_ready=_tensor_memory_barriers(count),
        o_scaled=_tensor_memory_barriers(count),
        factor_ready=barrier(num_barriers=count),
        factor_free=barrier(num_barriers=count),
    )


def _tensor_memory_barriers(count: int) -> Any:
    """Barriers at which matmuls are done, or tensor memory changes hands."""
    return plgpu.Barrier(num_barriers=count, orders_tensor_core=True)


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    shared = scratch(plan_of(problem, config))._replace(scores=None, out=None)
    return mosaic.bytes_of(shared) + BARRIERS + mosaic.REDUCTION_BYTES


# ---- a block's work ------------------------------------------------------------------------------


class Block(NamedTuple):
    """A work tile, and the kv tiles that its q tiles take: each from `first` to its own end. They
    are places in a list where there is a mask function.
    """

    ctx: KernelContext
    tile: WorkTile
    first: Index
    spans: tuple[Span, ...]  # [lo, hi) are taken, at least one; [full_lo, full_hi) need no mask
    listed: Any = None  # `tile_lists.Listed`

    @property
    def memory(self) -> Memory:
        memory: Memory = self.ctx.smem
        return memory

    @property
    def steps(self) -> Index:
        """Kv tiles that are loaded."""
        return functools.reduce(jnp.maximum, [span.hi for span in self.spans]) - self.first

    def row(self, n: int) -> Index:
        """The first row of q tile n."""
        return self.tile.row + n * TILE

    def rows(self, n: int) -> tuple[Index, Any, Index]:
        """Batch row, rows and head of q tile n, in q and in the output."""
        return self.tile.batch, pl.ds(self.row(n), TILE), self.tile.head

    def takes(self, n: int, step: Index) -> Any:
        """Whether q tile n has a kv tile at a step."""
        return self.first + step < self.spans[n].hi

    def key(self, t: Index) -> Index:
        """The first key of kv tile t."""
        return (t if self.listed is None else self.listed.tile(t)) * self.ctx.plan.config.block_kv

    def slot(self, step: Index) -> Index:
        return lax.rem(step, jnp.int32(self.ctx.plan.config.stages))


def block_of(ctx: KernelContext, code: Index) -> Block:
    plan, tile, listed = ctx.plan, tile_scheduler.work_tile(ctx, code), None
    if plan.is_listed:
        listed = list_of(ctx, tile)
        spans = [listed.span] * plan.config.q_tiles
    else:
        spans = [_span_of_rows(ctx, tile, n) for n in range(plan.config.q_tiles)]
    lo, hi = tile_scheduler.ends_of_some(spans)
    first = jnp.minimum(lo, hi)

    def taken(span: Span) -> Span:
        end = jnp.maximum(span.hi, first + 1)
        full_lo = jnp.clip(span.full_lo, first, end)
        return Span(first, full_lo, jnp.clip(span.full_hi, full_lo, end), end)

    return Block(ctx, tile, first, tuple(map(taken, spans)), listed)


def _span_of_rows(ctx: KernelContext, tile: WorkTile, n: int) -> Span:
    """The kv tiles of q tile n; rows past T take one."""
    tiling, row = ctx.plan.tiling, tile.row + n * TILE
    if not tiling.has_idle_spans:
        return sm80.span_of(ctx, tile._replace(row=row), TILE)
    idle = row >= tiling.q_len
    row, rows = jnp.where(idle, tiling.q_len - 1, row), jnp.where(idle, 1, TILE)
    span = sm80.span_of(ctx, tile._replace(row=row), rows)
    return span._replace(hi=jnp.where(idle, jnp.minimum(span.hi, span.lo + 1), span.hi))


def _for_steps(count: Index, body: Callable[[Index], None], first: int = 0) -> None:
    def step(n: Index, carry: tuple[()]) -> tuple[()]:
        body(n)
        return carry

    lax.fori_loop(first, count, step, ())


# ---- the warp of loads ---------------------------------------------------------------------------


def _load(block: Block) -> None:
    plan, memory = block.ctx.plan, block.memory
    for n in range(plan.config.q_tiles):
        q, ready = memory.q_and_out(n)[0], memory.q_ready.at[n]
        panels.load(block.ctx.refs.q, block.rows(n), q, (), ready)

    def one_tile(step: Index) -> None:
        slot, again = block.slot(step), step >= plan.config.stages
        pl.when(again)(lambda: plgpu.barrier_wait(memory.k_free.at[slot]))
        key = block.key(block.first + step)
        _load_kv_tile(block, "k", key, slot)
        pl.when(again)(lambda: plgpu.barrier_wait(memory.v_free.at[slot]))
        _load_kv_tile(block, "v", key, slot)

    _for_steps(block.steps, one_tile)


def _load_kv_tile(block: Block, name: str, key: Index, slot: Index) -> None:
    """The kv tile of "k" or "v" from a key on. A tile of v that a length cuts is `v_edge`."""
    (plan, refs, memory), tile = block.ctx, block.tile
    head, to = lax.div(tile.head, jnp.int32(plan.problem.group)), getattr(memory, name)
    keys = plan.config.block_kv
    ready = (memory.k_ready if name == "k" else memory.v_ready).at[slot]

    def load(source: GmemRef, row: Index) -> None:
        panels.load(source, (tile.batch, pl.ds(row, keys), head), to, slot, ready)

    whole = functools.partial(load, getattr(refs, name), key)
    if name == "k" or not plan.has("kv_lengths"):
        return whole()
    end = key + keys  # only the last tile may be cut; Mosaic lowers no "not" in a warp
    pl.when(end > tile.kv_len)(functools.partial(load, refs.v_edge, 0))
    return pl.when(end <= tile.kv_len)(whole)


# ---- the warp of matmuls -------------------------------------------------------------------------


def _multiply(block: Block) -> None:
    """S of the first kv tile; then P V of each kv tile, and S of the next, which overwrites P."""
    memory, count = block.memory, block.ctx.plan.config.q_tiles
    wait = plgpu.barrier_wait

    def scores(n: int, slot: Index) -> None:
        keys = memory.k.at[slot].transpose((1, 0))
        plgpu.tcgen05_mma(memory.scores[n][0], memory.q_and_out(n)[0], keys, accumulate=False)
        plgpu.tcgen05_commit_arrive(memory.s_ready.at[n])

    def values(n: int, slot: Index, step: Index) -> None:
        wait(memory.p_ready.at[n])
        wait(memory.o_scaled.at[n])
        probabilities, rows = memory.scores[n][1], memory.v.at[slot]
        plgpu.tcgen05_mma(memory.out[n], probabilities, rows, accumulate=step > 0)
        plgpu.tcgen05_commit_arrive(memory.o_ready.at[n])

    def next_scores(n: int, slot: Index) -> None:
        wait(memory.o_ready.at[n])
        scores(n, slot)

    wait(memory.k_ready.at[0])
    for n in range(count):
        wait(memory.q_ready.at[n])
        scores(n, jnp.int32(0))
    plgpu.tcgen05_commit_arrive(memory.k_free.at[0])
    steps = block.steps

    def one_tile(step: Index) -> None:
        slot, following = block.slot(step), block.slot(step + 1)
        wait(memory.v_ready.at[slot])
        pl.when(step + 1 < steps)(lambda: wait(memory.k_ready.at[following]))
        for n in range(count):
            pl.when(block.takes(n, step))(functools.partial(values, n, slot, step))
            pl.when(block.takes(n, step + 1))(functools.partial(next_scores, n, following))
        plgpu.tcgen05_commit_arrive(memory.v_free.at[slot])
        commit_k = functools.partial(plgpu.tcgen05_commit_arrive, memory.k_free.at[following])
        pl.when(step + 1 < steps)(commit_k)

    _for_steps(steps, one_tile)


# ---- the warpgroups of softmax: a row a thread ---------------------------------------------------


class Rows(NamedTuple):
    """The state of the rows of a q tile."""

    row_max: RegisterTile  # [128], in log2 units
    row_sum: RegisterTile


def _softmax(block: Block, n: int) -> None:
    """P of all kv tiles of q tile n, and its log-sum-exp."""
    (plan, refs, memory), tile, span = block.ctx, block.tile, block.spans[n]
    rows = Rows(*(plgpu.layout_cast(jnp.full((TILE,), x, jnp.float32), ROW) for x in (-jnp.inf, 0)))

    def take(first: Index, end: Index, masked: bool, rows: Rows) -> Rows:
        step = functools.partial(_softmax_of_tile, block, n, masked=masked)
        result: Rows = lax.fori_loop(first, end, step, rows)
        return result

    if "low" in plan.sections or plan.problem.mask.bounds_left:
        rows = take(span.lo, span.full_lo, True, rows)
    rows = take(span.full_lo, span.full_hi, False, rows)
    if {"first_masked", "high", "empty"} & plan.sections:
        rows = take(span.full_hi, span.hi, True, rows)
    sink = refs.sinks[tile.head] if plan.has("sinks") else None
    factor, lse = softmax.finish(rows.row_max, rows.row_sum, sink)
    if tile.q_len is not None:
        inside = mosaic.positions((TILE,), 0, block.row(n), NATIVE) < tile.q_len
        factor, lse = jnp.where(inside, factor, 0.0), jnp.where(inside, lse, -jnp.inf)
    _hand_over(memory, n, factor)
    mosaic.store(refs.lse.at[tile.batch, tile.head, pl.ds(block.row(n), TILE)], lse)


def _hand_over(memory: Memory, n: int, factor: RegisterTile) -> None:
    """Gives the correction the factors of the rows of q tile n."""
    plgpu.barrier_wait(memory.factor_free.at[n])
    memory.factors[n] = factor
    plgpu.barrier_arrive(memory.factor_ready.at[n])


def _softmax_of_tile(block: Block, n: int, t: Index, rows: Rows, *, masked: bool) -> Rows:
    """Kv tile t of q tile n."""
    (plan, _, memory), tile = block.ctx, block.tile
    config, unit, (scores, probabilities) = plan.config, plan.logit_rules.unit, memory.scores[n]
    starts = range(0, config.block_kv, CHUNK)
    plgpu.barrier_wait(memory.s_ready.at[n])
    chunks = [
        plgpu.async_load_tmem(scores.at[:, pl.ds(start, CHUNK)], layout=NATIVE) for start in starts
    ]
    plgpu.wait_load_tmem()
    where, key = (tile.batch, tile.head, block.row(n)), block.key(t)
    for number, start in enumerate(starts):
        facts = (key + start, tile.q_offset, tile.kv_len, tile.mask)
        place = LogitTile(*where, *facts, q_axis=0, layout=NATIVE)
        logits = tile_logits.logits_and_slope(block.ctx, place, chunks[number], masked)
        chunks[number] = logits[0]
    peak = functools.reduce(jnp.maximum, [x.max(axis=1) for x in chunks])
    row_max = softmax.raise_to(peak, unit, rows.row_max, config.rescale_threshold)
    base = softmax.base_of(row_max, empty_ok=True)
    # 1 also of a row without a key, and of one with an infinite logit.
    factor = jnp.where(row_max == rows.row_max, 1.0, jnp.exp2(rows.row_max - base))
    _hand_over(memory, n, factor)
    by_polynomial = 0 if masked or plan.logit_rules.adds else config.polynomials
    total: Any = None
    for number, (start, x) in enumerate(zip(starts, chunks, strict=True)):
        if number < by_polynomial:
            scaled = x if unit is None else x * unit
            p = exp2_by_polynomial(scaled - mosaic.broadcast_rows(base, x.shape))
        else:
            p = softmax.exponentials(x, unit, base)
        to = probabilities.at[:, pl.ds(start, CHUNK)]
        plgpu.async_store_tmem(to, p.astype(plan.problem.dtype))
        total = p if total is None else total + p
    plgpu.commit_tmem()
    plgpu.barrier_arrive(memory.p_ready.at[n])
    return Rows(row_max, rows.row_sum * factor + total.sum(axis=1))


# The least largest relative error between -1/2 and 1/2, the highest power first.
POLYNOMIAL = (0.00132764717, 0.00967554154, 0.0555071328, 0.240221197, 0.693146967, 1.00000007)


def exp2_by_polynomial(x: RegisterTile) -> RegisterTile:
    """2**x for x up to 127 on the FMA units, 2**-125 for what lies below: of degree 5 about the
    nearest integer, with a relative error below 4e-7. A NaN stays one.
    """
    integer_at = 1.5 * 2.0**23 + 127  # from here on floats are integers; their low bits, x + 127
    x = jnp.maximum(x, -125.0)
    # XLA, by which the interpreter computes, would take (x + c) - c for x.
    shifted = lax.optimization_barrier(x + integer_at)
    f = x - (shifted - integer_at)
    p = functools.reduce(lambda p, c: p * f + c, POLYNOMIAL[1:], POLYNOMIAL[0])
    power = lax.bitcast_convert_type(shifted, jnp.int32) << 23
    return p * lax.bitcast_convert_type(power, jnp.float32)


# ---- the warpgroup of corrections ----------------------------------------------------------------


def _correct(block: Block) -> None:
    """Rescales the outputs in tensor memory before each kv tile, and stores them at the end."""
    memory, count = block.memory, block.ctx.plan.config.q_tiles
    for n in range(count):  # the first matmul overwrites
        plgpu.barrier_arrive(memory.factor_free.at[n])
        plgpu.barrier_arrive(memory.o_scaled.at[n])
        plgpu.barrier_wait(memory.factor_ready.at[n])
        plgpu.barrier_arrive(memory.factor_free.at[n])

    def one_tile(step: Index) -> None:
        for n in range(count):
            pl.when(block.takes(n, step))(functools.partial(_rescale, memory, n))

    _for_steps(block.steps, one_tile, first=1)
    for n in range(count):
        _store(block, n)
    plgpu.wait_smem_to_gmem(0)


def _rescale(memory: Memory, n: int) -> None:
    """Multiplies O of q tile n by its factors, if one of them is below 1."""
    plgpu.barrier_wait(memory.factor_ready.at[n])
    factor = plgpu.load(memory.factors.at[n], layout=ROW)
    plgpu.barrier_arrive(memory.factor_free.at[n])
    plgpu.barrier_wait(memory.o_ready.at[n])

    def multiply() -> None:
        for start in range(0, memory.out[n].shape[1], CHUNK):
            columns = memory.out[n].at[:, pl.ds(start, CHUNK)]
            out = plgpu.async_load_tmem(columns, layout=NATIVE)
            plgpu.wait_load_tmem()
            plgpu.async_store_tmem(columns, out * mosaic.broadcast_rows(factor, out.shape))
        plgpu.commit_tmem()

    pl.when(jnp.min(factor) < 1.0)(multiply)
    plgpu.barrier_arrive(memory.o_scaled.at[n])


def _store(block: Block, n: int) -> None:
    """The output of q tile n, by way of the shared memory of its q, which all matmuls have read."""
    (plan, refs, memory), width = block.ctx, block.ctx.plan.v.swizzle // 2
    staged = memory.q_and_out(n)[1]
    plgpu.barrier_wait(memory.factor_ready.at[n])
    factor = plgpu.load(memory.factors.at[n], layout=STAGED.reduce(1))
    plgpu.barrier_wait(memory.o_ready.at[n])
    for start in range(0, memory.out[n].shape[1], width):
        out = plgpu.async_load_tmem(memory.out[n].at[:, pl.ds(start, width)], layout=STAGED)
        result = out * mosaic.broadcast_rows(factor, out.shape)
        if plan.has("q_lengths"):  # rows of q past a length may hold anything
            counted = mosaic.broadcast_rows(factor, out.shape) != 0
            result = jnp.where(counted, result, 0.0)
        staged[:, pl.ds(start, width)] = result.astype(staged.dtype)
    plgpu.commit_smem()
    panels.store(staged, (), refs.out, block.rows(n))


# ---- the kernel and its call --------------------------------------------------------------------

# Registers of a thread of softmax, of correction, and of loads and matmuls, by number of q tiles.
REGISTERS = {1: (240, 104, 64), 2: (200, 64, 48)}


def _kernel(
    refs: ForwardRefs, out: GmemRef, lse: GmemRef, memory: Memory, *, plan: QueryPlan
) -> None:
    ctx, wg = KernelContext(plan, refs._replace(out=out, lse=lse), memory), lax.axis_index("wg")
    block = block_of(ctx, refs.schedule[lax.axis_index("block"), 1])
    count = plan.config.q_tiles

    def issue() -> None:
        @plgpu.warp_map
        def _(warp: Index) -> None:
            pl.when(warp == 0)(functools.partial(_load, block))
            pl.when(warp == 1)(functools.partial(_multiply, block))

    roles = [functools.partial(_softmax, block, n) for n in range(count)]
    mosaic.take_roles(wg, [*roles, functools.partial(_correct, block), issue], registers_of(count))


def registers_of(q_tiles: int) -> tuple[int, ...]:
    """Registers of a thread, by warpgroup."""
    ours, correction, issue = REGISTERS[q_tiles]
    return (*[ours] * q_tiles, correction, issue)


def run(
    inputs: AttentionInputs, problem: AttentionProblem, config: Config
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, N, H] in q's dtype, log-sum-exp float32 [B, N, T]."""
    plan = plan_of(problem, config)
    rows, heads = tma_operands.rows_in_tma(problem.q_len), problem.q_heads
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=(
            jax.ShapeDtypeStruct((problem.batch, rows, heads, plan.v.width), problem.dtype),
            jax.ShapeDtypeStruct((problem.batch, heads, plan.tiling.padded_rows), jnp.float32),
        ),
        scratch_types=(scratch(plan),),
        grid=(plan.order.grid,),
        grid_names=("block",),
        num_threads=config.q_tiles + 2,
        thread_name="wg",
        compiler_params=mosaic.without_barriers(),
        kernel_name="flash_fwd_sm100",
    )
    out, lse = kernel(_operands(plan, inputs))
    return out[:, : problem.q_len], lse[:, :, : problem.q_len]


def _operands(plan: QueryPlan, inputs: AttentionInputs) -> ForwardRefs:
    """Global memory that the kernel reads. XLA copies q, k and v where their rows are no multiple
    of 8, the value tile in which each sequence ends where there are kv_lengths, and what it copies
    for the portable kernels.
    """
    fields = {name: tma_operands.for_tma(getattr(inputs, name)) for name in "qkv"}
    if plan.has("kv_lengths"):
        lengths = jnp.asarray(inputs.kv_lengths)
        fields["v_edge"] = tma_operands.edge(fields["v"], lengths, plan.config.block_kv)
    refs = sm80.operands(plan, inputs, fields)
    return key_masks.with_spans(KernelContext(plan, refs))


KERNEL = Kernel(Config, limit, smem_bytes, run)
