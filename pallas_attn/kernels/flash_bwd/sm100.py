"""Flash attention backward for datacenter Blackwell (sm_100a, sm_103a): bfloat16 and float16.

It has never run on its GPU: the interpreter computes it and looks for races, and ptxas compiles it.
So a call gets it by name only: `implementation="sm100"`.

Algorithm: FlashAttention-4's (arXiv 2603.05451) of one CTA. A block owns 128 keys of a kv head and
walks over the query tiles that meet them, 128 rows each, of all query heads of the group. Tiles of
scores have keys as rows and queries as columns, S^T = K Q^T. Five matmuls a step, all tcgen05,
whose accumulators lie in tensor memory: dK and dV for all steps of the block, dQ of a step, which
is added up in a float32 array in global memory and rounded by XLA.

Grid: a block for each work tile, the longest first (`work_order.schedule`).

Warpgroups: two, the gradients, compute P and dS, each for half of the queries of a tile, and store
dV or dK at the end; one, of dQ, moves each dQ from tensor memory to shared memory, from where TMA
adds it; in the last one warp 0 issues all loads and warp 1 all matmuls.

The order of the matmuls, for each step i:
  dV += P(i) dO(i)      when P(i) is stored
  S(i + 1)              when dV is done, since it takes the place of P(i)
  dQ(i) = dS(i) K       when dS(i) is stored; where head dims are above 64 in the place of dP(i)
  dK += dS(i) Q(i)
  dP(i + 1)             when dQ(i) is in registers, if it takes its place
So the exponentials of a step overlap dQ and dK of the one before, and dQ's way to global memory
overlaps dK.

Shared memory, and who owns it when:
  k, v            loaded once; when the last matmuls are done, dk and dv on their way out
  q [q_stages]    a ring: `q_ready` when a query tile and its lse and delta have landed, `q_free`
                  when dK has been multiplied
  do [do_stages]  a ring: `do_ready`, and `do_free` when dV has been multiplied
  ds              dS^T, from `ds_ready` until its dQ and dK are done, which is before `dp_ready`
  dq [panels]     32 columns of dQ each, the dQ warpgroup's, from where TMA adds

Tensor memory, 512 columns of 128 lanes, which head dim 128 fills:
  scores          S^T, float32[128 keys, 128 queries], from `s_ready` until both warpgroups have
                  read it (`s_read`); then P^T, in 16 bits, over the first half of its columns,
                  from `p_ready` until `p_free`
  dp              dP^T, from `dp_ready` to `ds_ready`
  dq              dQ, from `dq_ready` to `dq_read`: columns of dp, where there are no others
  dk, dv          the matmuls' until `sums_ready`

A barrier that hands over tensor memory needs tcgen05's fences: `_tensor_memory_barrier` makes it.

Bounds, by the rates of data sheets: 128 x 128 scores of head dim 128 take 2560 cycles of matmuls
and 1024 of exponentials; shared memory moves more bytes than it can in that time.
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
from pallas_attn.kernels.attention import tile_logits, tma_operands
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.flash_bwd import (
    key_tiles,
    operands,
    sm80_dbias,
    statistics,
    work_order,
)
from pallas_attn.kernels.flash_bwd.key_tiles import KeyTile
from pallas_attn.kernels.flash_bwd.operands import BackwardRefs, Gradients, KeyGradients, Residuals
from pallas_attn.kernels.flash_bwd.plan import KeyPlan, RowFormats
from pallas_attn.kernels.flash_bwd.work_order import KeyTiling
from pallas_attn.kernels.flash_fwd import sm100 as flash_fwd_sm100
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.config import check
from pallas_attn.kernels.lang.mosaic import BARRIERS
from pallas_attn.kernels.lang.types import Barrier, GmemRef, Index, Predicate, RegisterTile, SmemRef

TILE = flash_fwd_sm100.TILE  # keys of a work tile, and query rows of a step
CHUNK = flash_fwd_sm100.CHUNK  # columns of tensor memory that are in registers at a time
WARPGROUPS = 2  # warpgroups that compute gradients
OURS = TILE // WARPGROUPS  # queries of a tile that one of them has
TOGETHER = 2  # chunks of dQ that are in registers together
COLUMNS = 512  # columns of tensor memory
LAYOUT = flash_fwd_sm100.STAGED  # swizzled shared memory and tensor memory take it
# Registers of a thread of gradients, of dQ, and of loads and matmuls.
REGISTERS = (176, 176, 88, 72)


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning only: the result is the same up to rounding."""

    q_stages: int = 2  # query tiles of q in shared memory
    do_stages: int = 1  # query tiles of dO
    panels: int = 2  # buffers of 32 columns of dQ on their way to global memory

    block_q = TILE
    dq_block_kv = columns = 0  # fields of the portable Config, which the walk of a bias reads

    def __post_init__(self) -> None:
        check(
            self,
            q_stages=(self.q_stages >= 2, "at least 2"),
            do_stages=(self.do_stages >= 1, "at least 1"),
            panels=(self.panels >= 1, "at least 1"),
        )

    @classmethod
    def default(cls, problem: AttentionProblem) -> "Config":
        """Two query tiles of dO where there is room for them. Nothing was measured."""
        return cls(do_stages=1 if problem.head_dim > 96 else 2)


def limit(problem: AttentionProblem) -> Limit | None:
    """Why the kernel cannot take a problem, or None."""
    if problem.deterministic:
        return Limit("blocks add to dq in any order, so bits do not repeat", flash_fwd_sm100.OTHER)
    return flash_fwd_sm100.limit(problem, unequal=())


@functools.lru_cache(maxsize=256)
def plan_of(problem: AttentionProblem, config: Config) -> KeyPlan:
    """The static values of a launch."""
    order = work_order.WorkOrder(KeyTiling(problem, TILE, config.block_q))
    return KeyPlan(problem, config, order, RowFormats(*tma_operands.formats_of(problem, TILE)))


# ---- shared and tensor memory -------------------------------------------------------------------


class Memory(NamedTuple):
    """The buffers of a block, and its barriers."""

    k: SmemRef  # [1, 128, H]
    v: SmemRef
    q: SmemRef  # [q_stages, 128, H]
    do: SmemRef  # [do_stages, 128, H]
    ds: SmemRef  # [128 keys, 128 queries]
    dq_panels: SmemRef  # float32[panels, 128, 32]
    row_stats: SmemRef  # float32[2, q_stages, 128]: lse and delta
    scores: Any  # (S^T, P^T): two views of the same columns of tensor memory
    dp: Any
    dq: Any  # None: columns of dp
    dk: Any
    dv: Any
    k_ready: Barrier
    v_ready: Barrier
    q_ready: Barrier
    do_ready: Barrier
    q_free: Barrier
    do_free: Barrier
    s_ready: Barrier
    s_read: Barrier
    p_ready: Barrier
    p_free: Barrier
    dp_ready: Barrier
    ds_ready: Barrier
    dq_ready: Barrier
    dq_read: Barrier
    sums_ready: Barrier

    @property
    def dq_columns(self) -> Any:
        """dQ in tensor memory."""
        return self.dp.at[:, pl.ds(0, self.dk.shape[1])] if self.dq is None else self.dq


def scratch(plan: KeyPlan) -> Memory:
    """All memory, described once: `run` launches it, `smem_bytes` adds it up."""
    config, dtype, (qk, v, _) = plan.config, jnp.dtype(plan.problem.dtype), plan.format
    barrier, dim = plgpu.Barrier, qk.width

    def accumulator(columns: int) -> Any:
        return plgpu.TMEM((TILE, columns), jnp.float32)

    has_columns = 2 * TILE + 2 * dim + v.width <= COLUMNS
    return Memory(
        k=qk.scratch(1, TILE),
        v=v.scratch(1, TILE),
        q=qk.scratch(config.q_stages, TILE),
        do=v.scratch(config.do_stages, TILE),
        ds=mosaic.swizzled((TILE, TILE), dtype, qk.swizzle),
        dq_panels=mosaic.swizzled((config.panels, TILE, CHUNK), jnp.float32, 4 * CHUNK),
        row_stats=plgpu.SMEM((2, config.q_stages, TILE), jnp.float32),
        scores=plgpu.RefUnion(accumulator(TILE), plgpu.TMEM((TILE, TILE), dtype, packed=True)),
        dp=accumulator(TILE),
        dq=accumulator(dim) if has_columns else None,
        dk=accumulator(dim),
        dv=accumulator(v.width),
        k_ready=barrier(),
        v_ready=barrier(),
        q_ready=barrier(num_arrivals=3, num_barriers=config.q_stages),
        do_ready=barrier(num_barriers=config.do_stages),
        q_free=_tensor_memory_barrier(count=config.q_stages),
        do_free=_tensor_memory_barrier(count=config.do_stages),
        s_ready=_tensor_memory_barrier(),
        s_read=_tensor_memory_barrier(WARPGROUPS),
        p_ready=_tensor_memory_barrier(WARPGROUPS),
        p_free=_tensor_memory_barrier(),
        dp_ready=_tensor_memory_barrier(),
        ds_ready=_tensor_memory_barrier(WARPGROUPS),
        dq_ready=_tensor_memory_barrier(),
        dq_read=_tensor_memory_barrier(),
        sums_ready=_tensor_memory_barrier(),
    )


def _tensor_memory_barrier(arrivals: int = 1, count: int = 1) -> Any:
    """A barrier at which matmuls are done, or tensor memory changes hands."""
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count, orders_tensor_core=True)


TENSOR_MEMORY = dict.fromkeys(("scores", "dp", "dq", "dk", "dv"))


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    """Shared memory of the kernel that needs most."""
    shared = scratch(plan_of(problem, config))._replace(**TENSOR_MEMORY)
    return max(mosaic.bytes_of(shared) + BARRIERS, sm80_dbias.smem_bytes(problem, config))


# ---- a block's work -----------------------------------------------------------------------------


class Step(NamedTuple):
    """A query tile of a head."""

    n: Index  # its number among the block's
    head: Index
    t: Index  # the query tile
    i: Index  # its number among the head's


class Block(NamedTuple):
    ctx: KernelContext
    work: KeyTile
    outs: KeyGradients  # dk and dv in global memory

    @property
    def memory(self) -> Memory:
        memory: Memory = self.ctx.smem
        return memory

    @property
    def steps(self) -> Index:
        end: Index = key_tiles.steps_of(self.ctx.plan, self.work)[1]
        return end

    def step(self, n: Index) -> Step:
        g, i = key_tiles.step_of(self.ctx.plan, self.work, n)
        head = self.work.kv_head * self.ctx.plan.problem.group + g
        return Step(n, head, self.work.q_tiles.tile(i), i)

    def q_slot(self, n: Index) -> Index:
        return lax.rem(n, jnp.int32(self.ctx.plan.config.q_stages))

    def do_slot(self, n: Index) -> Index:
        return lax.rem(n, jnp.int32(self.ctx.plan.config.do_stages))


def _for_steps(block: Block, body: Callable[[Index], None]) -> None:
    def step(n: Index, carry: tuple[()]) -> tuple[()]:
        body(n)
        return carry

    lax.fori_loop(0, block.steps, step, ())


# ---- the warp of loads --------------------------------------------------------------------------


def _load(block: Block) -> None:
    (_, refs, memory), config, wait = block.ctx, block.ctx.plan.config, plgpu.barrier_wait

    def one_step(n: Index) -> None:
        step, slot, do_slot = block.step(n), block.q_slot(n), block.do_slot(n)
        pl.when(n == 0)(functools.partial(_load_keys, block, "k"))
        pl.when(n >= config.q_stages)(lambda: wait(memory.q_free.at[slot]))
        _load_q_tile(block, "q", step, slot)
        rows, ready = pl.ds(step.t * TILE, TILE), memory.q_ready.at[slot]
        for number, statistic in enumerate((refs.lse, refs.delta)):
            own = statistic.at[block.work.batch, step.head, rows]
            plgpu.copy_gmem_to_smem(own, memory.row_stats.at[number, slot], ready)
        pl.when(n == 0)(functools.partial(_load_keys, block, "v"))
        pl.when(n >= config.do_stages)(lambda: wait(memory.do_free.at[do_slot]))
        _load_q_tile(block, "do", step, do_slot)

    _for_steps(block, one_step)


def _load_q_tile(block: Block, name: str, step: Step, slot: Index) -> None:
    """The query tile of "q" or "do". A tile that a length cuts is `q_edge` or `do_edge`."""
    at = block.work.batch, step.head, step.t * TILE
    _load_tile(block, name, at, slot, block.work.q_len)


def _load_keys(block: Block, name: str) -> None:
    """The keys of "k" or "v"."""
    work = block.work
    length = work.kv_len if block.ctx.plan.has("kv_lengths") else None
    _load_tile(block, name, (work.batch, work.kv_head, work.key), 0, length)


def _load_tile(
    block: Block, name: str, at: tuple[Index, Index, Index], slot: Index, length: Index | None
) -> None:
    """Rows of a head, `at` (batch row, head, first row). `length`: of the rows that count, where
    the last tile may be cut.
    """
    (_, refs, memory), (batch, head, row) = block.ctx, at
    to, ready = getattr(memory, name), getattr(memory, f"{name}_ready")
    ready = ready if name in ("k", "v") else ready.at[slot]

    def load(source: GmemRef, first: Index) -> None:
        panels.load(source, (batch, pl.ds(first, TILE), head), to, slot, ready)

    whole = functools.partial(load, getattr(refs, name), row)
    if length is None:
        return whole()
    end = row + TILE  # Mosaic lowers no "not" in a warp
    pl.when(end > length)(functools.partial(load, getattr(refs, f"{name}_edge"), 0))
    return pl.when(end <= length)(whole)


# ---- the warp of matmuls ------------------------------------------------------------------------


def _multiply(block: Block) -> None:
    memory, wait, done = block.memory, plgpu.barrier_wait, plgpu.tcgen05_commit_arrive
    shares_columns = memory.dq is None
    steps, (s, p), k, v = block.steps, memory.scores, memory.k.at[0], memory.v.at[0]
    none = jnp.int32(0)

    def scores(n: Index) -> None:
        slot = block.q_slot(n)
        wait(memory.q_ready.at[slot])
        plgpu.tcgen05_mma(s, k, memory.q.at[slot].transpose((1, 0)), accumulate=False)
        done(memory.s_ready)

    def next_scores(n: Index) -> None:
        wait(memory.p_free)
        scores(n + 1)

    def dp(n: Index) -> None:
        slot = block.do_slot(n)
        wait(memory.do_ready.at[slot])
        plgpu.tcgen05_mma(memory.dp, v, memory.do.at[slot].transpose((1, 0)), accumulate=False)
        done(memory.dp_ready)

    def next_dp(n: Index) -> None:
        if shares_columns:
            wait(memory.dq_read)
        dp(n + 1)

    def one_step(n: Index) -> None:
        slot, do_slot = block.q_slot(n), block.do_slot(n)
        wait(memory.p_ready)
        plgpu.tcgen05_mma(memory.dv, p, memory.do.at[do_slot], accumulate=n > 0)
        done(memory.do_free.at[do_slot])
        done(memory.p_free)
        pl.when(n + 1 < steps)(functools.partial(next_scores, n))
        wait(memory.ds_ready)
        if not shares_columns:
            pl.when(n > 0)(lambda: wait(memory.dq_read))
        ds = memory.ds
        plgpu.tcgen05_mma(memory.dq_columns, ds.transpose((1, 0)), k, accumulate=False)
        done(memory.dq_ready)
        plgpu.tcgen05_mma(memory.dk, ds, memory.q.at[slot], accumulate=n > 0)
        done(memory.q_free.at[slot])
        pl.when(n + 1 < steps)(functools.partial(next_dp, n))

    @pl.when(steps > 0)
    def _() -> None:
        wait(memory.k_ready)
        scores(none)
        wait(memory.v_ready)
        dp(none)

    _for_steps(block, one_step)
    pl.when(steps > 0)(lambda: done(memory.sums_ready))


# ---- the warpgroups of gradients: P and dS ------------------------------------------------------


def _differentiate(block: Block, own: int) -> None:
    """P^T and dS^T of the queries of warpgroup `own`, and at the end dV (0) or dK (1)."""
    _for_steps(block, functools.partial(_gradients_of_step, block, own))
    _store(block, "v" if own == 0 else "k")


def _gradients_of_step(block: Block, own: int, n: Index) -> None:
    (plan, _, memory), step = block.ctx, block.step(n)
    (s, p), dtype, slot = memory.scores, jnp.dtype(plan.problem.dtype), block.q_slot(n)
    starts = range(own * OURS, (own + 1) * OURS, CHUNK)
    masked = key_tiles.needs_mask(plan.tiling, block.work, step.t, step.i)
    plgpu.barrier_wait(memory.q_ready.at[slot])
    plgpu.barrier_wait(memory.s_ready)
    chunks = [plgpu.async_load_tmem(s.at[:, pl.ds(at, CHUNK)], layout=LAYOUT) for at in starts]
    plgpu.wait_load_tmem()
    plgpu.barrier_arrive(memory.s_read)
    for number, at in enumerate(starts):
        x, slope = _probabilities(block, step, at, chunks[number], masked)
        if number == 0:
            plgpu.barrier_wait(memory.s_read)  # the other has read the columns that P takes
        plgpu.async_store_tmem(p.at[:, pl.ds(at, CHUNK)], x.astype(dtype))
        chunks[number] = x if slope is None else x * slope
    plgpu.commit_tmem()
    plgpu.barrier_arrive(memory.p_ready)
    plgpu.barrier_wait(memory.dp_ready)
    for number, at in enumerate(starts):
        dp = plgpu.async_load_tmem(memory.dp.at[:, pl.ds(at, CHUNK)], layout=LAYOUT)
        plgpu.wait_load_tmem()
        delta = _statistic(block, 1, slot, at, dp.shape)
        chunks[number] = tile_logits.d_scores(chunks[number], dp, delta).astype(dtype)
    memory.ds[:, pl.ds(own * OURS, OURS)] = jnp.concatenate(chunks, axis=1)  # whole swizzles
    plgpu.commit_smem()  # delta has been read, too, and TMA will write there
    plgpu.barrier_arrive(memory.ds_ready)


def _probabilities(
    block: Block, step: Step, at: int, s: RegisterTile, masked: Predicate
) -> tuple[RegisterTile, RegisterTile | None]:
    """P of queries from number `at` of a tile on, and `tile_logits.logits_and_slope`'s slope."""
    plan, work = block.ctx.plan, block.work
    place = work.place(step.head, step.t, work.key, plan.config.block_q, LAYOUT)
    place = place._replace(query=place.query + at)
    logits, slope = tile_logits.logits_and_slope(block.ctx, place, s, masked)
    lse = _statistic(block, 0, block.q_slot(step.n), at, s.shape)
    return tile_logits.exponentials(plan, logits, lse), slope


def _statistic(
    block: Block, number: int, slot: Index, at: int, shape: tuple[int, ...]
) -> RegisterTile:
    """lse (0) or delta (1) of queries from number `at` of a tile on, over the rows of a chunk."""
    own = block.memory.row_stats.at[number, slot, pl.ds(at, shape[1])]
    return mosaic.load_vector(own, LAYOUT, 1, shape)


def _store(block: Block, name: str) -> None:
    """dk or dv, by way of the shared memory of k or v, which all matmuls have read."""
    (plan, _, memory), work = block.ctx, block.work
    sums, to, form = memory.dk, memory.k, plan.format.qk
    if name == "v":
        sums, to, form = memory.dv, memory.v, plan.format.v
    width, has_steps = form.swizzle // 2, block.steps > 0
    pl.when(has_steps)(lambda: plgpu.barrier_wait(memory.sums_ready))
    for start in range(0, sums.shape[1], width):
        x = plgpu.async_load_tmem(sums.at[:, pl.ds(start, width)], layout=LAYOUT)
        plgpu.wait_load_tmem()
        x = x * plan.problem.scale if name == "k" else x
        x = jnp.where(mosaic.broadcast_scalar(has_steps, x.shape), x, 0.0)
        to[0, :, pl.ds(start, width)] = x.astype(to.dtype)
    plgpu.commit_smem()
    at = work.batch, pl.ds(work.key, TILE), work.kv_head
    panels.store(to, 0, getattr(block.outs, f"d{name}"), at)
    plgpu.wait_smem_to_gmem(0)


# ---- the warpgroup of dQ ------------------------------------------------------------------------


def _add_dq(block: Block) -> None:
    """Adds dQ of each step to global memory."""
    _, refs, memory = block.ctx
    dq, count = memory.dq_columns, block.ctx.plan.config.panels
    starts = range(0, dq.shape[1], CHUNK)

    def one_step(n: Index) -> None:
        step = block.step(n)
        rows = pl.ds(step.t * TILE, TILE)
        plgpu.barrier_wait(memory.dq_ready)
        for some in filter(len, (starts[:TOGETHER], starts[TOGETHER:])):
            chunks = [
                plgpu.async_load_tmem(dq.at[:, pl.ds(at, CHUNK)], layout=LAYOUT) for at in some
            ]
            plgpu.wait_load_tmem()
            if some[-1] == starts[-1]:
                plgpu.barrier_arrive(memory.dq_read)
            for at, chunk in zip(some, chunks, strict=True):
                panel = lax.rem(n * len(starts) + at // CHUNK, jnp.int32(count))
                plgpu.wait_smem_to_gmem(count - 1, wait_read_only=True)
                memory.dq_panels[panel] = chunk
                plgpu.commit_smem()
                to = refs.dq.at[block.work.batch, rows, step.head, pl.ds(at, CHUNK)]
                plgpu.copy_smem_to_gmem(memory.dq_panels.at[panel], to, reduction_op="add")

    _for_steps(block, one_step)
    plgpu.wait_smem_to_gmem(0)


# ---- the kernel and its call --------------------------------------------------------------------


def _kernel(refs: BackwardRefs, dk: GmemRef, dv: GmemRef, memory: Memory, *, plan: KeyPlan) -> None:
    ctx = KernelContext(plan, refs, memory)
    work = key_tiles.key_tile(ctx, refs.schedule[lax.axis_index("block"), 1])
    block = Block(ctx, work, KeyGradients(dk, dv))

    def issue() -> None:
        @plgpu.warp_map
        def _(warp: Index) -> None:
            pl.when(warp == 0)(functools.partial(_load, block))
            pl.when(warp == 1)(functools.partial(_multiply, block))

    roles = [functools.partial(_differentiate, block, own) for own in range(WARPGROUPS)]
    roles.append(functools.partial(_add_dq, block))
    mosaic.take_roles(lax.axis_index("wg"), [*roles, issue], REGISTERS)


def gradients(plan: KeyPlan, refs: BackwardRefs) -> Gradients:
    """dk and dv in the sizes of refs.k and refs.v, and dq, to whose zeros, refs.dq, blocks add."""
    problem, refs = plan.problem, refs._replace(dq=jax.new_ref(refs.dq))
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (refs.k, refs.v)),
        scratch_types=(scratch(plan),),
        grid=(plan.order.grid,),
        grid_names=("block",),
        num_threads=len(REGISTERS),
        thread_name="wg",
        compiler_params=mosaic.without_barriers(),
        kernel_name="flash_bwd_sm100",
    )
    dk, dv = kernel(refs)
    dq = jax.freeze(refs.dq)[:, : problem.q_len]
    return Gradients((dq * problem.scale).astype(problem.dtype), dk, dv)


def run(residuals: Residuals, problem: AttentionProblem, config: Config) -> AttentionInputs:
    """(inputs, out, lse, d_out, d_lse) -> the cotangents of inputs."""
    residuals, plan = Residuals(*residuals), plan_of(problem, config)
    sums = problem.batch, plan.tiling.padded_rows, problem.q_heads, plan.format.qk.width
    zeros = jax.ShapeDtypeStruct(sums, jnp.float32)
    stats, dq = statistics.of_rows(problem, residuals, zeros=zeros)
    refs = operands.for_tma(plan, residuals, stats)
    grads, others = gradients(plan, refs._replace(dq=dq)), {}
    if problem.bias_shape or problem.learned:
        refs = operands.ordered_after(refs, grads.dq)
        others = sm80_dbias.gradients(problem, config, residuals.inputs, refs)
    return operands.cotangents(residuals, stats, grads, others)


KERNEL = Kernel(Config, limit, smem_bytes, run)
