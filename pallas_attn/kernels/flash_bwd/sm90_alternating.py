"""The Hopper backward of many heads, too long for their dQ to fit in shared memory: one launch
makes dq, dk and dv, and bits repeat. Five matmuls a tile, as in `sm90_fused`.

Grid: one block a multiprocessor, which takes one head at a time. It goes through the head's kv
tiles of 128 keys, and for each through all query tiles of 64 rows, an even number of them. Two
consumer warpgroups take 64 keys each, and hold k, v, dK and dV of them in registers; a third, the
producer, loads. Tiles of scores have keys as rows, see `key_tiles`; rows past the ends are zeros in
shared memory and are not stored (`panels`).

Step c of a block is a query tile. Its dQ comes at the end of step c + 1, from warpgroup c mod 2,
which makes the dQ of a query tile in every kv tile: the other has had the time of a step for its
half of dS. Sums of dQ lie in global memory, in a piece for each query tile of a block that stays in
L2, as the threads of a warpgroup hold it. The first kv tile of a head stores a sum, the last reads
it and stores dq, and those between add to it, without waiting for the result. Nothing is set to
zero before, and no launch rounds afterwards. `sm90_fused` does both; there each warpgroup makes
half of the columns of each dQ, in whole swizzles: 128 columns for a head dim of 72.

Shared memory, and who owns it when:
  k, v [kv slots, warpgroup]  a kv tile, of which v is read once. Its warpgroup stores dv from v
                     when its steps are done, and dk from k when the other has made its last dQ, too
                     (`dq_done`), and then releases the slot (`kv_free`)
  q, do [stages]     rings of query tiles with their lse and delta, released by both consumers
  ds [2, warpgroup]  dS of two steps. `ds_ready`: both consumers have written theirs; `ds_free`:
                     one of them has multiplied it
  dq [warpgroup]     a tile of dQ on its way to global memory
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionProblem
from pallas_attn.kernels.attention import score_mod
from pallas_attn.kernels.attention.logits import LogitTile
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.flash_bwd import sm90_short
from pallas_attn.kernels.flash_bwd.key_tiles import per_column
from pallas_attn.kernels.flash_bwd.operands import (
    Gradients,
    KeyGradients,
    Residuals,
    RowStatistics,
)
from pallas_attn.kernels.flash_bwd.plan import KeyPlan
from pallas_attn.kernels.flash_bwd.producer import Ring, ring_slot
from pallas_attn.kernels.lang import launch, mosaic, panels
from pallas_attn.kernels.lang.panels import Panels
from pallas_attn.kernels.lang.types import Barrier, GmemRef, Index, RegisterTile, SmemRef
from pallas_attn.kernels.mma import mma_rowmajor, thread_pieces, wgmma

WARPGROUPS = 2  # consumers
KEYS = WARPGROUPS * ROWS  # keys of a kv tile
DS_SLOTS = 2
REGISTERS = 240  # a thread of consumers
WIDEST = 80  # most columns of a key or a value
RESERVED = 2048  # bytes of shared memory for barriers and for alignment
KV_SLOTS = 2


def takes(problem: AttentionProblem) -> bool:
    """Whether this kernel serves a problem."""
    dims = problem.head_dim, problem.v_head_dim
    fits = max(sum(panels.widths(dim)) for dim in dims) <= WIDEST
    rows = min(problem.q_len, problem.kv_len)
    return sm90_short.is_plain(problem) and problem.mask.is_full and rows >= 1 and fits


class AlternatingRefs(NamedTuple):
    """Global memory."""

    q: GmemRef
    k: GmemRef
    v: GmemRef
    do: GmemRef
    lse: GmemRef  # [B, N, padded rows]: see `operands.RowStatistics`
    delta: GmemRef
    sums: GmemRef = None  # float32 pieces of dQ, written: see `thread_pieces`


class AlternatingSmem(NamedTuple):
    k: Panels
    v: Panels
    q: Panels
    do: Panels
    ds: tuple[SmemRef, ...]  # a copy in each swizzle of k: a matmul's operands share it
    dq: Panels
    lse: SmemRef  # [stages, rows]
    delta: SmemRef
    kv_ready: Barrier
    kv_free: Barrier
    q_ready: Barrier
    do_ready: Barrier
    q_free: Barrier
    do_free: Barrier
    ds_ready: Barrier
    ds_free: Barrier
    dq_done: Barrier

    @property
    def q_ring(self) -> Ring:
        return Ring(self.q, self.q_ready, self.q_free, self.lse)

    @property
    def do_ring(self) -> Ring:
        return Ring(self.do, self.do_ready, self.do_free, self.delta)


def _scratch(problem: AttentionProblem) -> AlternatingSmem:
    dtype, barrier = jnp.dtype(problem.dtype), plgpu.Barrier
    qk, v = panels.widths(problem.head_dim), panels.widths(problem.v_head_dim)

    def rows(shape: tuple[int, ...], widths: tuple[int, ...]) -> Panels:
        return tuple(panels.scratch(shape, dtype, width) for width in widths)

    keys, ds = (KV_SLOTS, WARPGROUPS, ROWS), (DS_SLOTS, WARPGROUPS, ROWS, ROWS)
    stages = 2 if max(len(qk), len(v)) > 1 else 4
    ring: dict[str, Any] = {"num_barriers": stages}
    return AlternatingSmem(
        k=rows(keys, qk),
        v=rows(keys, v),
        q=rows((stages, ROWS), qk),
        do=rows((stages, ROWS), v),
        ds=tuple(mosaic.swizzled(ds, dtype, 2 * width) for width in sorted(set(qk))),
        dq=rows((WARPGROUPS, ROWS), qk),
        lse=plgpu.SMEM((stages, ROWS), jnp.float32),
        delta=plgpu.SMEM((stages, ROWS), jnp.float32),
        kv_ready=barrier(num_arrivals=(len(qk) + len(v)) * WARPGROUPS, num_barriers=KV_SLOTS),
        kv_free=barrier(num_arrivals=WARPGROUPS, num_barriers=KV_SLOTS),
        q_ready=barrier(num_arrivals=1 + len(qk), **ring),
        do_ready=barrier(num_arrivals=1 + len(v), **ring),
        q_free=barrier(num_arrivals=WARPGROUPS, **ring),
        do_free=barrier(num_arrivals=WARPGROUPS, **ring),
        ds_ready=barrier(num_arrivals=WARPGROUPS, num_barriers=DS_SLOTS),
        ds_free=barrier(num_arrivals=1, num_barriers=DS_SLOTS),
        dq_done=barrier(num_arrivals=WARPGROUPS),
    )


def buffer_bytes(plan: KeyPlan) -> int:
    return mosaic.bytes_of(_scratch(plan.problem)) + RESERVED


# ---- work of a block ----------------------------------------------------------------------------


class KvTile(NamedTuple):
    """A kv tile of a head."""

    batch: Index
    head: Index
    j: Index


class Walk(NamedTuple):
    """The kv tiles of a block: those of heads `block`, `block + grid`, .. in this order."""

    ctx: KernelContext
    block: Index

    @property
    def tiles(self) -> Index:
        """The number of kv tiles of this block."""
        problem, grid = self.ctx.plan.problem, grid_of(self.ctx.plan)
        heads = problem.batch * problem.q_heads
        own = lax.div(jnp.int32(heads - 1 + grid) - self.block, jnp.int32(grid))
        return own * _kv_tiles(problem)

    def tile(self, n: Index) -> KvTile:
        """The block's kv tile number n."""
        problem, kv_tiles = self.ctx.plan.problem, jnp.int32(_kv_tiles(self.ctx.plan.problem))
        number = self.block + lax.div(n, kv_tiles) * grid_of(self.ctx.plan)
        heads = jnp.int32(problem.q_heads)
        return KvTile(lax.div(number, heads), lax.rem(number, heads), lax.rem(n, kv_tiles))


def _q_tiles(problem: AttentionProblem) -> int:
    """Query tiles of a head, an even number."""
    return 2 * pl.cdiv(problem.q_len, 2 * ROWS)


def _kv_tiles(problem: AttentionProblem) -> int:
    return pl.cdiv(problem.kv_len, KEYS)


def grid_of(plan: KeyPlan) -> int:
    """The number of blocks."""
    heads = plan.problem.batch * plan.problem.q_heads
    return min(plan.config.grid or heads, heads)


# ---- the producer -------------------------------------------------------------------------------


def _produce(ctx: KernelContext, walk: Walk) -> None:
    """The producer warpgroup. It loads the keys of a kv tile after the first query tile, since
    their slot is released later than that of the query tile.
    """
    plan, refs, smem = ctx

    def load_keys(n: Index, tile: KvTile) -> None:
        slot = ring_slot(n, KV_SLOTS)
        pl.when(n >= KV_SLOTS)(lambda: plgpu.barrier_wait(smem.kv_free.at[slot]))
        for source, to in ((refs.k, smem.k), (refs.v, smem.v)):
            for wg in range(WARPGROUPS):
                rows = pl.ds(tile.j * KEYS + wg * ROWS, ROWS)
                where = tile.batch, rows, tile.head
                panels.load(source, where, to, (slot, wg), smem.kv_ready.at[slot])

    def kv_tile(n: Index, count: Index) -> Index:
        tile = walk.tile(n)

        def step(t: Index, count: Index) -> Index:
            slot = smem.q_ring.slot(count)
            for source, stats, ring in (
                (refs.q, refs.lse, smem.q_ring),
                (refs.do, refs.delta, smem.do_ring),
            ):
                ring.acquire(count, slot)
                rows, ready = pl.ds(t * ROWS, ROWS), ring.ready.at[slot]
                some = stats.at[tile.batch, tile.head, rows]
                plgpu.copy_gmem_to_smem(some, ring.row_stats.at[slot], ready)
                panels.load(source, (tile.batch, rows, tile.head), ring.tiles, slot, ready)
            pl.when(t == 0)(functools.partial(load_keys, n, tile))
            return count + 1

        return lax.fori_loop(0, _q_tiles(plan.problem), step, count)

    lax.fori_loop(0, walk.tiles, kv_tile, jnp.int32(0))


# ---- a step -------------------------------------------------------------------------------------


class DueDq(NamedTuple):
    """The dQ of the step before."""

    dq: GmemRef
    tile: KvTile
    t: Index
    piece: Index  # of the query tile's sums
    wg: Index
    count: Index  # of the step
    exists: Index  # whether there is such a step, and its dQ is this warpgroup's


class AlternatingStep(NamedTuple):
    """A query tile of a warpgroup."""

    ctx: KernelContext
    tile: KvTile
    wg: Index
    kv_slot: Index
    t: Index
    count: Index  # the number of steps before, over all kv tiles
    k: wgmma.Terms  # the warpgroup's keys, in panels; v likewise
    v: wgmma.Terms
    due: DueDq

    @property
    def slot(self) -> Index:
        return self.ctx.smem.q_ring.slot(self.count)

    @property
    def q(self) -> tuple[SmemRef, ...]:
        return panels.tiles(self.ctx.smem.q, self.slot)

    @property
    def do(self) -> tuple[SmemRef, ...]:
        return panels.tiles(self.ctx.smem.do, self.slot)

    def statistic(self, numbers: SmemRef) -> RegisterTile:
        """lse or delta of every query."""
        return mosaic.load(numbers.at[self.slot], mosaic.COLUMN)

    @property
    def place(self) -> LogitTile:
        problem, tile = self.ctx.plan.problem, self.tile
        key = tile.j * KEYS + self.wg * ROWS
        where = tile.batch, tile.head, self.t * ROWS, key, problem.q_offset, problem.kv_len
        return LogitTile(*where, problem.mask, q_axis=1)

    @property
    def is_masked(self) -> Index | bool:
        """Whether some of the keys lie past the end."""
        kv_len, key = self.ctx.plan.problem.kv_len, self.tile.j * KEYS + self.wg * ROWS
        return key + ROWS > kv_len if kv_len % KEYS else False


def _step(now: AlternatingStep, sums: KeyGradients) -> None:
    """Adds to `sums`, the accumulators of dK and dV; dK still runs when this returns."""
    zero = mosaic.opaque_zero(now.count)
    now = now._replace(kv_slot=now.kv_slot + zero, wg=now.wg + zero)
    pl.run_scoped(functools.partial(_scores, now, sums), plgpu.ACC((ROWS, ROWS), jnp.float32))


def _scores(now: AlternatingStep, sums: KeyGradients, s_acc: RegisterTile) -> None:
    smem, slot = now.ctx.smem, now.slot
    smem.q_ring.wait(slot)
    wgmma.score_panels(s_acc, now.k, now.q)
    plgpu.wgmma_wait(len(now.k))
    before = smem.q_ring.slot(now.count - 1)
    pl.when(now.count > 0)(lambda: smem.q_ring.release(before))
    smem.do_ring.wait(slot)
    body = functools.partial(_ds, now, sums, s_acc)
    ds = pl.run_scoped(body, plgpu.ACC((ROWS, ROWS), jnp.float32))
    wgmma.value_panels(sums.dk, ds, now.q)
    plgpu.wgmma_wait(len(sums.dk))
    smem.do_ring.release(slot)
    pl.when(now.due.exists)(functools.partial(_add_dq, now.ctx, now.kv_slot, now.due))


def _ds(
    now: AlternatingStep, sums: KeyGradients, s_acc: RegisterTile, dp_acc: RegisterTile
) -> RegisterTile:
    """dS, which is also in shared memory when this returns; dV still runs."""
    plan, _, smem = now.ctx
    dtype, do = jnp.dtype(plan.problem.dtype), now.do
    wgmma.score_panels(dp_acc, now.v, do)
    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=len(do))
    lse = now.statistic(smem.lse)
    p, slope = score_mod.probabilities(now.ctx, now.place, s, lse, now.is_masked)
    wgmma.value_panels(sums.dv, p.astype(dtype), do)
    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=len(do))
    ds = p * (dp - per_column(now.statistic(smem.delta), dp.shape))
    ds = (ds if slope is None else ds * slope).astype(dtype)
    to = now.count & 1
    pl.when(now.count >= DS_SLOTS)(lambda: plgpu.barrier_wait(smem.ds_free.at[to]))
    for copy in smem.ds:
        copy[to, now.wg] = ds
    plgpu.commit_smem()
    plgpu.barrier_arrive(smem.ds_ready.at[to])
    return ds


def _add_dq(ctx: KernelContext, kv_slot: Index, due: DueDq) -> None:
    """A dQ, when both warpgroups have done its step: it begins a sum, or is added to one, or the
    sum with it is stored.
    """
    plan, refs, smem = ctx
    problem, slot = plan.problem, due.count & 1
    widths, swizzles = panels.widths(problem.head_dim), sorted(set(panels.widths(problem.head_dim)))
    is_first, is_last = due.tile.j == 0, due.tile.j == _kv_tiles(problem) - 1
    pieces, before = [], 0
    for width in widths:
        pieces.append(due.piece + before * grid_of(plan) * _q_tiles(problem) // width)
        before += width

    def nothing() -> list[RegisterTile]:
        return [mosaic.filled((ROWS, width), 0.0) for width in widths]

    def so_far() -> list[RegisterTile]:
        places = zip(pieces, widths, strict=True)
        return [thread_pieces.load(refs.sums, n, (ROWS, width)) for n, width in places]

    def matmuls(accs: list[RegisterTile]) -> None:
        for wg in range(WARPGROUPS):
            for acc, k in zip(accs, panels.tiles(smem.k, (kv_slot, wg)), strict=True):
                ds = smem.ds[swizzles.index(k.shape[1])].at[slot, wg]
                plgpu.wgmma(acc, ds.transpose((1, 0)), k)

    initial = lax.cond(is_last & jnp.logical_not(is_first), so_far, nothing)
    plgpu.barrier_wait(smem.ds_ready.at[slot])
    parts = pl.run_state(matmuls)([plgpu.ACC.init(x) for x in initial])
    plgpu.barrier_arrive(smem.ds_free.at[slot])
    begins = (is_first & jnp.logical_not(is_last)).astype(jnp.int32)
    adds = jnp.logical_not(is_first | is_last).astype(jnp.int32)
    for part, piece in zip(parts, pieces, strict=True):
        thread_pieces.store(refs.sums, piece, part, begins)
        mma_rowmajor.add(refs.sums, piece, part, adds)

    @pl.when(is_last)
    def _():
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for part, to in zip(parts, panels.tiles(smem.dq, due.wg), strict=True):
            to[...] = (part * problem.scale).astype(to.dtype)
        plgpu.commit_smem()
        where = due.tile.batch, pl.ds(due.t * ROWS, ROWS), due.tile.head
        panels.store(smem.dq, due.wg, due.dq, where)


# ---- a kv tile ----------------------------------------------------------------------------------


def _consume(ctx: KernelContext, outs: Gradients, walk: Walk, wg: Index) -> None:
    problem, smem = ctx.plan.problem, ctx.smem
    widths = [panels.widths(dim) for dim in (problem.head_dim, problem.v_head_dim)]
    steps = _q_tiles(problem)

    def kv_tile(n: Index, count: Index) -> Index:
        tile, slot = walk.tile(n), ring_slot(n, KV_SLOTS)
        plgpu.barrier_wait(smem.kv_ready.at[slot])
        k, v = (
            [mosaic.load(x, mosaic.TILE) for x in panels.tiles(rows, (slot, wg))]
            for rows in (smem.k, smem.v)
        )

        def all_steps(*accs: RegisterTile) -> list[list[RegisterTile]]:
            sums = KeyGradients(accs[: len(widths[0])], accs[len(widths[0]) :])

            def due(t: Index, count: Index) -> DueDq:
                piece, own = walk.block * steps + (t - 1), ((count - 1) & 1) == wg
                return DueDq(outs.dq, tile, t - 1, piece, wg, count - 1, own & (t > 0))

            def step(t: Index, count: Index) -> Index:
                before = due(t, count)
                _step(AlternatingStep(ctx, tile, wg, slot, t, count, k, v, before), sums)
                return count + 1

            lax.fori_loop(0, steps, step, count)
            last = due(steps + 0 * count, count + steps)
            pl.when(last.exists)(functools.partial(_add_dq, ctx, slot, last))
            return [[acc[...] for acc in accs] for accs in sums]

        accs = [plgpu.ACC((ROWS, width), jnp.float32) for width in widths[0] + widths[1]]
        grads = KeyGradients(*pl.run_scoped(all_steps, *accs))
        _store_dk_dv(ctx, outs, tile, (slot, wg), grads)
        return count + steps

    lax.fori_loop(0, walk.tiles, kv_tile, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _store_dk_dv(
    ctx: KernelContext, outs: Gradients, tile: KvTile, at: tuple[Index, Index], grads: KeyGradients
) -> None:
    """Stores dk and dv of a warpgroup's keys by way of the buffers of k and v."""
    plan, _, smem = ctx
    where = tile.batch, pl.ds(tile.j * KEYS + at[1] * ROWS, ROWS), tile.head

    def stage(parts: RegisterTile, scale: float, staged: Panels) -> None:
        for part, to in zip(parts, panels.tiles(staged, at), strict=True):
            part = part if scale == 1.0 else part * scale
            to[...] = part.astype(to.dtype)

    plgpu.barrier_arrive(smem.dq_done)
    plgpu.commit_smem()  # all warps have finished matmuls that read these buffers
    stage(grads.dv, 1.0, smem.v)
    plgpu.barrier_wait(smem.dq_done)
    stage(grads.dk, plan.problem.scale, smem.k)
    plgpu.commit_smem()
    panels.store(smem.v, at, outs.dv, where)
    panels.store(smem.k, at, outs.dk, where)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(smem.kv_free.at[at[0]])


# ---- the kernel and its call --------------------------------------------------------------------


def _kernel(refs: AlternatingRefs, *rest: GmemRef, plan: KeyPlan) -> None:
    dq_ref, dk_ref, dv_ref, sums_ref, smem = rest
    ctx, wg = KernelContext(plan, refs._replace(sums=sums_ref), smem), lax.axis_index("wg")
    walk, outs = Walk(ctx, lax.axis_index("block")), Gradients(dq_ref, dk_ref, dv_ref)
    produce = functools.partial(_produce, ctx, walk)
    consume = functools.partial(_consume, ctx, outs, walk, wg)
    mosaic.share_registers(wg, WARPGROUPS, produce, consume, REGISTERS)


def dq_dk_dv(plan: KeyPlan, residuals: Residuals, stats: RowStatistics) -> Gradients:
    """dq, dk and dv, by one launch."""
    inputs, problem = residuals.inputs, plan.problem
    outs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (inputs.q, inputs.k, inputs.v)]
    sums = grid_of(plan) * _q_tiles(problem) * ROWS * sum(panels.widths(problem.head_dim))
    kernel = launch.persistent_kernel(
        functools.partial(_kernel, plan=plan),
        "flash_bwd_alternating_sm90",
        (*outs, jax.ShapeDtypeStruct((sums,), jnp.float32)),
        _scratch(problem),
        (grid_of(plan), WARPGROUPS + 1),
    )
    refs = AlternatingRefs(inputs.q, inputs.k, inputs.v, residuals.d_out, *stats)
    return Gradients(*kernel(refs)[:3])
