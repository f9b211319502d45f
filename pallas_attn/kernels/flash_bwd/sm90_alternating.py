"""The Hopper backward of full attention of head dims above 64 up to 80: dq, dk and dv by one
kernel, in which two warpgroups make the dQ of query tiles alternately.

Five matmuls a tile, as in `sm90_fused`, with dQ added up in float32 in global memory. There, at
query tiles of 64 rows, each warpgroup makes half of the columns of each dQ, in whole swizzles: 128
columns for a head dim of 72. Here a warpgroup makes all columns, of every second query tile, and
adds them from its registers. It holds k and v of its keys in registers.

Grid: one block a multiprocessor, which takes tiles of 128 keys of a head; blocks that run at one
time have the same heads. Two consumer warpgroups take 64 keys each and go through all query tiles
of 64 rows, an even number of them; a third warpgroup, the producer, loads. Tiles of scores have
keys as rows, see `key_tiles`; rows past the ends are zeros in shared memory and are not stored
(`panels`).

Step c is a query tile. dQ of step c comes at the end of step c + 1, from warpgroup c mod 2: the
other warpgroup has had the time of a step for its half of dS.

Shared memory, and who owns it when:
  k, v [kv slots, warpgroup]  a kv tile, of which v is read once. Its warpgroup stores dv from v
                     when its steps are done, and dk from k when the other has made its last dQ, too
                     (`dq_done`), and then releases the slot (`kv_free`)
  q, do [stages]     rings of query tiles with their lse and delta, released by both consumers
  ds [2, warpgroup]  dS of two steps. `ds_ready`: both consumers have written theirs; `ds_free`:
                     one of them has multiplied it
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call import gpu_specs
from pallas_attn._call.problem import AttentionProblem
from pallas_attn.kernels.attention import score_mod
from pallas_attn.kernels.attention.logits import LogitTile
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.flash_bwd import dq_rounding, sm90_short, statistics
from pallas_attn.kernels.flash_bwd.key_tiles import per_column
from pallas_attn.kernels.flash_bwd.operands import Gradients, KeyGradients, Residuals
from pallas_attn.kernels.flash_bwd.plan import KeyPlan
from pallas_attn.kernels.flash_bwd.producer import Ring, ring_slot
from pallas_attn.kernels.lang import launch, mosaic, panels
from pallas_attn.kernels.lang.panels import Panels
from pallas_attn.kernels.lang.types import Barrier, GmemRef, Index, RegisterTile, SmemRef
from pallas_attn.kernels.mma import mma_rowmajor, wgmma

WARPGROUPS = 2  # consumers
KEYS = WARPGROUPS * ROWS  # keys of a kv tile
DS_SLOTS = 2
REGISTERS = 240  # a thread of consumers
WIDEST = 80  # columns of a key or a value
RESERVED = 2048  # bytes of shared memory for barriers and for alignment
import os

_V = os.environ.get("ALT", "2,3,kv,1").split(",")
KV_SLOTS, STAGES, KEEPS, ROTATES = int(_V[0]), int(_V[1]), _V[2], _V[3] == "1"


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
    dq: GmemRef  # float32 sums in pieces, see `dq_sum`


class AlternatingSmem(NamedTuple):
    k: Panels
    v: Panels
    q: Panels
    do: Panels
    ds: tuple[SmemRef, ...]  # a copy in each swizzle of k: a matmul's operands share it
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
    ring: dict[str, Any] = {"num_barriers": STAGES}
    return AlternatingSmem(
        k=rows(keys, qk),
        v=rows(keys, v),
        q=rows((STAGES, ROWS), qk),
        do=rows((STAGES, ROWS), v),
        ds=tuple(mosaic.swizzled(ds, dtype, 2 * width) for width in sorted(set(qk))),
        lse=plgpu.SMEM((STAGES, ROWS), jnp.float32),
        delta=plgpu.SMEM((STAGES, ROWS), jnp.float32),
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
    rotation: Index  # the first query tile: those that run at one time add to different parts of dQ


class Walk(NamedTuple):
    """The kv tiles of a block: numbers `block`, `block + grid`, .. over all heads."""

    ctx: KernelContext
    block: Index

    @property
    def tiles(self) -> Index:
        """The number of kv tiles of this block."""
        problem, grid = self.ctx.plan.problem, grid_of(self.ctx.plan)
        every = problem.batch * problem.q_heads * _kv_tiles(problem)
        return lax.div(jnp.int32(every - 1 + grid) - self.block, jnp.int32(grid))

    def tile(self, n: Index) -> KvTile:
        """The block's kv tile number n."""
        problem = self.ctx.plan.problem
        number, kv_tiles = self.block + n * grid_of(self.ctx.plan), jnp.int32(_kv_tiles(problem))
        head, j = lax.div(number, kv_tiles), lax.rem(number, kv_tiles)
        heads = jnp.int32(problem.q_heads)
        rotation = lax.div(j * (q_tiles(problem) // 2), kv_tiles) * 2 if ROTATES else 0
        return KvTile(lax.div(head, heads), lax.rem(head, heads), j, rotation)

    def q_tile(self, tile: KvTile, i: Index) -> Index:
        """The query tile of step i of a kv tile."""
        t, steps = i + tile.rotation, q_tiles(self.ctx.plan.problem)
        return jnp.where(t < steps, t, t - steps)


def q_tiles(problem: AttentionProblem) -> int:
    """Query tiles of a head, an even number."""
    return 2 * pl.cdiv(problem.q_len, 2 * ROWS)


def _kv_tiles(problem: AttentionProblem) -> int:
    return pl.cdiv(problem.kv_len, KEYS)


def grid_of(plan: KeyPlan) -> int:
    """The number of blocks."""
    work_tiles = plan.problem.batch * plan.problem.q_heads * _kv_tiles(plan.problem)
    return min(plan.config.grid or work_tiles, work_tiles)


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

        def step(i: Index, count: Index) -> Index:
            slot, t = smem.q_ring.slot(count), walk.q_tile(tile, i)
            for source, stats, ring in (
                (refs.q, refs.lse, smem.q_ring),
                (refs.do, refs.delta, smem.do_ring),
            ):
                ring.acquire(count, slot)
                rows, ready = pl.ds(t * ROWS, ROWS), ring.ready.at[slot]
                some = stats.at[tile.batch, tile.head, rows]
                plgpu.copy_gmem_to_smem(some, ring.row_stats.at[slot], ready)
                panels.load(source, (tile.batch, rows, tile.head), ring.tiles, slot, ready)
            pl.when(i == 0)(functools.partial(load_keys, n, tile))
            return count + 1

        return lax.fori_loop(0, q_tiles(plan.problem), step, count)

    lax.fori_loop(0, walk.tiles, kv_tile, jnp.int32(0))


# ---- a step -------------------------------------------------------------------------------------


class DueDq(NamedTuple):
    """The dQ of the step before."""

    number: Index  # of its query tile, over all heads
    slot: Index  # of its dS
    exists: Index  # whether there is such a step, and its dQ is this warpgroup's


class AlternatingStep(NamedTuple):
    """A query tile of a warpgroup."""

    ctx: KernelContext
    tile: KvTile
    wg: Index
    kv_slot: Index
    t: Index
    count: Index  # the number of steps before, over all kv tiles
    parity: Index  # of count
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
    now = now._replace(kv_slot=now.kv_slot + zero, wg=now.wg + zero, parity=now.parity + zero)
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
    due = now.due
    pl.when(due.exists != 0)(functools.partial(_dq, now.ctx, now.kv_slot, due))


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
    pl.when(now.count >= DS_SLOTS)(lambda: plgpu.barrier_wait(smem.ds_free.at[now.parity]))
    for copy in smem.ds:
        copy[now.parity, now.wg] = ds
    plgpu.commit_smem()
    plgpu.barrier_arrive(smem.ds_ready.at[now.parity])
    return ds


def _dq(ctx: KernelContext, kv_slot: Index, due: DueDq) -> None:
    """A dQ, whose step both warpgroups have done or will have done."""

    def matmuls(*accs: RegisterTile) -> list[RegisterTile]:
        _multiply_dq(ctx, kv_slot, due.slot, accs)
        return [acc[...] for acc in accs]

    widths = panels.widths(ctx.plan.problem.head_dim)
    plgpu.barrier_wait(ctx.smem.ds_ready.at[due.slot])
    dq = pl.run_scoped(matmuls, *[plgpu.ACC((ROWS, width), jnp.float32) for width in widths])
    plgpu.barrier_arrive(ctx.smem.ds_free.at[due.slot])
    _add_dq(ctx, due, dq)


def _multiply_dq(
    ctx: KernelContext, kv_slot: Index, slot: Index, accs: tuple[RegisterTile, ...]
) -> None:
    """Issues dS K of the step whose dS is in `slot`."""
    smem = ctx.smem
    swizzles = sorted(set(panels.widths(ctx.plan.problem.head_dim)))
    for wg in range(WARPGROUPS):
        for acc, k in zip(accs, panels.tiles(smem.k, (kv_slot, wg)), strict=True):
            ds = smem.ds[swizzles.index(k.shape[1])].at[slot, wg]
            plgpu.wgmma(acc, ds.transpose((1, 0)), k)


def _add_dq(ctx: KernelContext, due: DueDq, parts: list[RegisterTile]) -> None:
    """Adds a dQ to its pieces, one a panel: see `dq_sum`."""
    pieces, before = ctx.plan.problem.batch * ctx.plan.problem.q_heads * q_tiles(ctx.plan.problem), 0
    for part in parts:
        first = before * pieces // part.shape[1]
        mma_rowmajor.add(ctx.refs.dq, due.number + first, part, jnp.int32(1))
        before += part.shape[1]


# ---- a kv tile ----------------------------------------------------------------------------------


def _consume(ctx: KernelContext, outs: KeyGradients, walk: Walk, wg: Index) -> None:
    problem, smem = ctx.plan.problem, ctx.smem
    widths = panels.widths(problem.head_dim), panels.widths(problem.v_head_dim)

    def kv_tile(n: Index, count: Index) -> Index:
        tile, slot = walk.tile(n), ring_slot(n, KV_SLOTS)
        plgpu.barrier_wait(smem.kv_ready.at[slot])
        k, v = (
            [mosaic.load(x, mosaic.TILE) if name in KEEPS else x for x in panels.tiles(rows, (slot, wg))]
            for name, rows in (("k", smem.k), ("v", smem.v))
        )
        steps = q_tiles(problem)
        first_piece = (tile.batch * problem.q_heads + tile.head) * steps

        def all_steps(*accs: RegisterTile) -> list[list[RegisterTile]]:
            sums = KeyGradients(accs[: len(widths[0])], accs[len(widths[0]) :])

            def due(i: Index, count: Index) -> DueDq:
                number = first_piece + walk.q_tile(tile, i - 1)
                parity = (count - 1) & 1
                return DueDq(number, parity, ((parity == wg) & (i > 0)).astype(jnp.int32))

            def step(i: Index, count: Index) -> Index:
                t = walk.q_tile(tile, i)
                at = AlternatingStep(ctx, tile, wg, slot, t, count, count & 1, k, v, due(i, count))
                _step(at, sums)
                return count + 1

            lax.fori_loop(0, steps, step, count)
            last = due(steps, count + steps)
            pl.when(last.exists != 0)(functools.partial(_dq, ctx, slot, last))
            return [[acc[...] for acc in accs] for accs in sums]

        accs = [plgpu.ACC((ROWS, width), jnp.float32) for width in widths[0] + widths[1]]
        grads = KeyGradients(*pl.run_scoped(all_steps, *accs))
        _store_dk_dv(ctx, outs, tile, (slot, wg), grads)
        return count + steps

    lax.fori_loop(0, walk.tiles, kv_tile, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _store_dk_dv(
    ctx: KernelContext, outs: KeyGradients, tile: KvTile, at: tuple[Index, Index], grads: KeyGradients
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
    dk_ref, dv_ref, smem = rest
    ctx, wg = KernelContext(plan, refs, smem), lax.axis_index("wg")
    walk = Walk(ctx, lax.axis_index("block"))

    consume = functools.partial(_consume, ctx, KeyGradients(dk_ref, dv_ref), walk, wg)
    mosaic.share_registers(wg, WARPGROUPS, functools.partial(_produce, ctx, walk), consume, REGISTERS)


def dq_dk_dv(plan: KeyPlan, residuals: Residuals, rows: int) -> Gradients:
    """dq, dk and dv, from the statistics of `rows` rows on."""
    inputs, d_out, problem = residuals.inputs, residuals.d_out, plan.problem
    widths = panels.widths(problem.head_dim)
    stats, zeros = statistics.with_zeros(problem, rows, residuals, (q_tiles(problem), sum(widths)))
    dq = jax.new_ref(zeros)
    kernel = launch.persistent_kernel(
        functools.partial(_kernel, plan=plan),
        "flash_bwd_alternating_sm90",
        tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (inputs.k, inputs.v)),
        _scratch(problem),
        (grid_of(plan), WARPGROUPS + 1),
    )
    refs = AlternatingRefs(inputs.q, inputs.k, inputs.v, d_out, *stats, dq)
    dk, dv = kernel(refs)
    return Gradients(dq_rounding.rounded(problem, jax.freeze(dq), widths), dk, dv)
