"""The Hopper backward of short causal windows where 8 query heads or more share K and V: gpt-oss, a
window of 128 keys and 64:8 heads of 64. One launch makes dq, dk and dv after one for the row
statistics. Nothing is added up in global memory, so bits repeat.

A step is 64 rows: 8 heads of 8 consecutive query rows. Their keys lie in three tiles of 64, which
are those of three consumer warpgroups. Each computes S^T and dP^T of its keys, adds to its dK and
dV, in registers, and writes dS to shared memory. dQ of the step is then a single matmul over 192
keys, with nothing to add up; consumers take it in turn, a step late, when all have written dS.

Grid: a block takes a chunk of the rows of a kv head, in tiles of 64. It owns dq of these query rows
and dk, dv of the keys at the same positions. It begins with the two kv tiles before, which are
there for dq alone, and ends with the two query tiles after, for dk and dv alone. A consumer takes
every third kv tile, and each for as long as the queries of its own tile and of the next two.

Shared memory, and who owns it when:
  k, v [2, consumer]  kv tiles: `kv_ready`. dv and dk are stored by way of v. The next one is loaded
                      there when all consumers have released a step that comes after
  q, do [stages]      rings of steps with their lse and delta, released by all consumers
  ds [turn, consumer] dS^T. `ds_ready`: all consumers have written theirs. The one whose turn it is
                      stores dQ from there, too: `ds_free`
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import AttentionInputs, AttentionProblem, probabilities_of_sinks
from pallas_attn.kernels.attention import group_windows, softmax, tile_logits
from pallas_attn.kernels.attention.group_windows import WIDTH, Unit
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.flash_bwd import operands, statistics
from pallas_attn.kernels.flash_bwd.operands import (
    BackwardRefs,
    Gradients,
    KeyGradients,
    Residuals,
    RowStatistics,
)
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.config import OneForAll, check
from pallas_attn.kernels.lang.mosaic import MULTIPROCESSORS
from pallas_attn.kernels.lang.panels import Panel, Ring
from pallas_attn.kernels.lang.types import Barrier, GmemRef, Index, Operand, RegisterTile, SmemRef
from pallas_attn.kernels.mma import head_rows
from pallas_attn.kernels.mma.head_rows import HEADS, QUERIES

TILES = 3  # kv tiles that a query tile meets, and consumers
AFTER = TILES - 1  # query tiles after a kv tile that meet it
STEPS = ROWS // QUERIES  # steps of a query tile and 8 heads
REGISTERS = 160  # a thread of a consumer
RESERVED = 2048  # bytes of shared memory for barriers and for alignment


@dataclasses.dataclass(frozen=True)
class Config(OneForAll):
    """Tuning only: the result is the same up to rounding."""

    stages: int = 3  # steps in the ring of q and dO
    chunks: int = 0  # chunks of a kv head's rows; 0: `default_chunks`

    def __post_init__(self):
        check(
            self,
            stages=(2 <= self.stages <= STEPS, f"2 to {STEPS}"),
            chunks=(self.chunks >= 0, "at least 0"),
        )


@dataclasses.dataclass(frozen=True)
class GroupWindowPlan:
    """The static values of a launch."""

    problem: AttentionProblem
    config: Config

    @functools.cached_property
    def width(self) -> int:
        return group_windows.width_of(self.problem)

    @functools.cached_property
    def tiles(self) -> int:
        """Tiles of 64 query rows."""
        return pl.cdiv(self.problem.q_len, ROWS)

    @functools.cached_property
    def eights(self) -> int:
        """Steps of the same query rows: the heads of a group, by 8."""
        return self.problem.group // HEADS

    @functools.cached_property
    def kv_heads(self) -> int:
        return self.problem.batch * self.problem.kv_heads

    @functools.cached_property
    def chunks(self) -> int:
        most = min(self.tiles, (2**31 - 1) // self.tiles)  # `chunk_walk` counts in 32 bits
        return min(self.config.chunks or self.default_chunks, most)

    @property
    def default_chunks(self) -> int:
        """Chunks for which blocks take least time. A chunk costs a tile more than its own."""

        def cost(chunks: int) -> int:
            waves = pl.cdiv(self.kv_heads * chunks, MULTIPROCESSORS)
            return waves * (pl.cdiv(self.tiles, chunks) + 1)

        return min(range(1, self.tiles + 1), key=cost)


class GroupWindowSmem(NamedTuple):
    """Shared memory."""

    k: SmemRef
    v: SmemRef
    q: Panel
    do: Panel
    ds: Panel
    lse: SmemRef  # [stages, 64]
    delta: SmemRef
    kv_ready: Barrier  # [2 * consumers]
    q_ready: Barrier
    do_ready: Barrier
    q_free: Barrier
    do_free: Barrier
    ds_ready: Barrier
    ds_free: Barrier

    @property
    def q_ring(self) -> Ring:
        return Ring(self.q, self.q_ready, self.q_free, self.lse)

    @property
    def do_ring(self) -> Ring:
        return Ring(self.do, self.do_ready, self.do_free, self.delta)


def scratch(plan: GroupWindowPlan) -> GroupWindowSmem:
    dtype, barrier = jnp.dtype(plan.problem.dtype), plgpu.Barrier
    stages = plan.config.stages

    def tiles(*shape: int) -> Any:
        return mosaic.swizzled((*shape, ROWS, WIDTH), dtype, 2 * WIDTH)

    numbers = plgpu.SMEM((stages, ROWS), jnp.float32)
    return GroupWindowSmem(
        k=tiles(2, TILES),
        v=tiles(2, TILES),
        q=group_windows.scratch((stages,), dtype),
        do=group_windows.scratch((stages,), dtype),
        ds=group_windows.scratch((TILES, TILES), dtype),
        lse=numbers,
        delta=numbers,
        kv_ready=barrier(num_barriers=2 * TILES, num_arrivals=2),
        q_ready=barrier(num_barriers=stages, num_arrivals=2),
        do_ready=barrier(num_barriers=stages, num_arrivals=2),
        q_free=barrier(num_barriers=stages, num_arrivals=TILES),
        do_free=barrier(num_barriers=stages, num_arrivals=TILES),
        ds_ready=barrier(num_barriers=TILES, num_arrivals=TILES),
        ds_free=barrier(num_barriers=TILES, num_arrivals=1),
    )


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    return mosaic.bytes_of(scratch(GroupWindowPlan(problem, config))) + RESERVED


# ---- the walk of a block -------------------------------------------------------------------------


class ChunkWalk(NamedTuple):
    """A chunk of the rows of a kv head. Tiles are counted from its first one."""

    plan: GroupWindowPlan
    batch: Index
    kv_head: Index
    begin: Index  # number of its first tile in the head
    own: Index  # number of its tiles
    steps: Index  # steps of its query tiles and of the `AFTER` query tiles after them
    own_steps: Index  # steps of its query tiles

    @property
    def of_tile(self) -> int:
        """Steps of a query tile."""
        return STEPS * self.plan.eights

    @property
    def q_tiles(self) -> Index:
        """Query tiles with a step."""
        return lax.div(self.steps + (self.of_tile - 1), jnp.int32(self.of_tile))

    def steps_of(self, tile: "WindowKeyTile") -> tuple[Index, Index]:
        """First and end of the steps that meet a kv tile."""
        first = jnp.maximum(tile.number - AFTER, 0) * self.of_tile
        return first, jnp.minimum((tile.number + 1) * self.of_tile, self.steps)

    def unit(self, step: Index) -> Unit:
        """The 8 heads and query rows of a step."""
        eights, group = jnp.int32(self.plan.eights), self.plan.problem.group
        row = self.begin * ROWS + lax.div(step, eights) * QUERIES
        head = self.kv_head * group + lax.rem(step, eights) * HEADS
        return Unit(self.batch, head, self.kv_head, row)


def chunk_walk(plan: GroupWindowPlan, block: Index) -> ChunkWalk:
    count = jnp.int32(plan.chunks)
    head, chunk = lax.div(block, count), lax.rem(block, count)
    batch, kv_head = (f(head, jnp.int32(plan.problem.kv_heads)) for f in (lax.div, lax.rem))
    # Chunks differ by a tile at most.
    begin, end = (lax.div(n * plan.tiles, count) for n in (chunk, chunk + 1))
    eights = plan.problem.q_len // QUERIES
    own, steps = (
        (jnp.minimum((end + more) * STEPS, eights) - begin * STEPS) * plan.eights
        for more in (0, AFTER)
    )
    return ChunkWalk(plan, batch, kv_head, begin, end - begin, steps, own)


class WindowKeyTile(NamedTuple):
    """A kv tile of a consumer: tile `number - AFTER` of the chunk, which begins with tiles that lie
    before it.
    """

    number: Index
    wg: Index

    @property
    def slot(self) -> Index:
        """Its place in `GroupWindowSmem.k`."""
        return lax.div(self.number, jnp.int32(TILES)) & 1

    @property
    def barrier(self) -> Index:
        return self.slot * TILES + self.wg


# ---- the producer --------------------------------------------------------------------------------


def _produce(ctx: KernelContext, block: Index) -> None:
    plan, refs, smem = ctx
    walk = chunk_walk(plan, block)

    def load_keys(number: Index) -> None:
        """Kv tile `number - 2`; before the first one of the head that one, which is masked."""
        tile = WindowKeyTile(number, lax.rem(number, jnp.int32(TILES)))
        row = jnp.maximum(walk.begin + number - AFTER, 0) * ROWS
        for source, to in ((refs.k, smem.k), (refs.v, smem.v)):
            there = source.at[walk.batch, pl.ds(row, ROWS), walk.kv_head]
            plgpu.copy_gmem_to_smem(
                there, to.at[tile.slot, tile.wg], smem.kv_ready.at[tile.barrier]
            )

    def step(s: Index, carry: tuple[()]) -> tuple[()]:
        unit, slot = walk.unit(s), smem.q_ring.slot(s)
        at = unit.batch, lax.div(unit.head, jnp.int32(HEADS)), lax.div(unit.row, jnp.int32(QUERIES))
        for source, stats, ring in (
            (refs.q, refs.lse, smem.q_ring),
            (refs.do, refs.delta, smem.do_ring),
        ):
            ring.acquire(s, slot)
            ready = ring.ready.at[slot]
            plgpu.copy_gmem_to_smem(stats.at[at], ring.row_stats.at[slot], ready)
            group_windows.load_rows(source, unit, unit.row, ring.tiles, slot, ready)
        # The kv tile that the next query tile meets first. Its place was in use three query tiles
        # before, which is more steps than the ring has.
        following = lax.div(s, jnp.int32(walk.of_tile)) + TILES
        is_first = lax.rem(s, jnp.int32(walk.of_tile)) == 0
        pl.when(is_first & (following < walk.own + AFTER))(functools.partial(load_keys, following))
        return carry

    for number in range(TILES):
        pl.when(number < walk.own + AFTER)(functools.partial(load_keys, jnp.int32(number)))
    lax.fori_loop(0, walk.steps, step, ())


# ---- consumers -----------------------------------------------------------------------------------


class WindowStep(NamedTuple):
    """A step of a consumer and its kv tile."""

    ctx: KernelContext
    dq: GmemRef
    walk: ChunkWalk
    tile: WindowKeyTile
    s: Index

    @property
    def slot(self) -> Index:
        return self.ctx.smem.q_ring.slot(self.s)

    @property
    def is_own(self) -> Index:
        """Whether its dQ is the block's."""
        return self.s < self.walk.own_steps


def _consume(ctx: KernelContext, outs: Gradients, block: Index, wg: Index) -> None:
    """Every third kv tile of the walk of a block."""
    walk = chunk_walk(ctx.plan, block)

    def kv_tile(n: Index, carry: tuple[()]) -> tuple[()]:
        tile = WindowKeyTile(wg + n * TILES, wg)
        own = tile.number < walk.own + AFTER
        pl.when(own)(functools.partial(_take_tile, ctx, outs, walk, tile))
        pl.when(jnp.logical_not(own))(functools.partial(_pass_steps, ctx, outs, walk, tile))
        return carry

    # Kv tiles that some step of the walk meets.
    count = lax.div(walk.q_tiles + (AFTER - 1) - wg, jnp.int32(TILES)) + 1
    lax.fori_loop(0, count, kv_tile, ())
    end = WindowStep(ctx, outs.dq, walk, WindowKeyTile(wg, wg), walk.steps)
    pl.when(walk.steps == walk.own_steps)(functools.partial(_dq_in_turn, end))
    plgpu.wait_smem_to_gmem(0)


def _take_tile(ctx: KernelContext, outs: Gradients, walk: ChunkWalk, tile: WindowKeyTile) -> None:
    """All steps of a kv tile."""
    plgpu.barrier_wait(ctx.smem.kv_ready.at[tile.barrier])

    def all_steps(dk: RegisterTile, dv: RegisterTile) -> KeyGradients:
        def one_step(s: Index, carry: tuple[()]) -> tuple[()]:
            _step(WindowStep(ctx, outs.dq, walk, tile, s), KeyGradients(dk, dv))
            return carry

        lax.fori_loop(*walk.steps_of(tile), one_step, ())
        return KeyGradients(dk[...], dv[...])

    accs = [plgpu.ACC((ROWS, WIDTH), jnp.float32) for _ in range(2)]
    grads = pl.run_scoped(all_steps, *accs)
    pl.when(tile.number >= AFTER)(functools.partial(_store_dk_dv, ctx, outs, walk, tile, grads))


def _pass_steps(ctx: KernelContext, outs: Gradients, walk: ChunkWalk, tile: WindowKeyTile) -> None:
    """The steps of a kv tile past the chunk, which other consumers use."""

    def one_step(s: Index, carry: tuple[()]) -> tuple[()]:
        now = WindowStep(ctx, outs.dq, walk, tile, s)
        for ring in (ctx.smem.q_ring, ctx.smem.do_ring):
            ring.wait(now.slot)
            ring.release(now.slot)
        _dq_in_turn(now)
        return carry

    lax.fori_loop(*walk.steps_of(tile), one_step, ())


def _step(now: WindowStep, sums: KeyGradients) -> None:
    """Adds to the accumulators of dK and dV."""
    score = plgpu.ACC((ROWS, ROWS), jnp.float32)
    pl.run_scoped(functools.partial(_add, now, sums), score, score)
    _dq_in_turn(now)


def _add(now: WindowStep, sums: KeyGradients, s_acc: RegisterTile, dp_acc: RegisterTile) -> None:
    plan, smem, slot, tile = now.ctx.plan, now.ctx.smem, now.slot, now.tile
    dtype, own = jnp.dtype(plan.problem.dtype), (tile.slot, tile.wg)
    q, do = smem.q.tile.at[slot], smem.do.tile.at[slot]
    smem.q_ring.wait(slot)
    plgpu.wgmma(s_acc, smem.k.at[own], q.transpose((1, 0)))
    smem.do_ring.wait(slot)
    plgpu.wgmma(dp_acc, smem.v.at[own], do.transpose((1, 0)))
    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
    unit = softmax.unit_of(plan.problem.scale)
    lse = mosaic.load_vector(smem.lse.at[slot], mosaic.TILE, 1, s.shape)
    s = _masked(now, s)
    p = jnp.exp2(s * unit - lse)
    # dV waits for dP: P in float32 beside its operand would be too much for registers.
    dp = plgpu.wgmma_accumulator_load(dp_acc)
    delta = mosaic.load_vector(smem.delta.at[slot], mosaic.TILE, 1, s.shape)
    ds = tile_logits.d_scores(p, dp, delta).astype(dtype)
    plgpu.wgmma(sums.dv, p.astype(dtype), do)
    plgpu.wgmma(sums.dk, ds, q)
    to = lax.rem(now.s, jnp.int32(TILES))

    @pl.when(now.is_own)
    def _():
        pl.when(now.s >= TILES)(lambda: plgpu.barrier_wait(smem.ds_free.at[to]))
        smem.ds.tile[to, tile.wg] = ds

    plgpu.commit_smem()  # all warps have read the step's statistics, too
    pl.when(now.is_own)(lambda: plgpu.barrier_arrive(smem.ds_ready.at[to]))
    plgpu.wgmma_wait(0)
    smem.q_ring.release(slot)
    smem.do_ring.release(slot)


def _masked(now: WindowStep, s: RegisterTile) -> RegisterTile:
    """Scores with -inf where a query does not see a key."""
    plan, walk = now.ctx.plan, now.walk
    after = lax.div(now.s, jnp.int32(walk.of_tile)) + AFTER - now.tile.number  # tiles
    query = lax.div(now.s, jnp.int32(plan.eights)) * QUERIES  # counted from the chunk's first row
    key = (now.tile.number - AFTER) * ROWS
    exists = walk.begin * ROWS + key >= 0

    def mask(s: RegisterTile) -> RegisterTile:
        # Past the last query row where there are no such keys.
        first = jnp.where(exists, key - query, QUERIES)
        low = mosaic.positions((ROWS,), 0, first)
        return head_rows.mask_queries(s, low, low + plan.width)

    # The largest distance of a pair of tiles that are one apart.
    partly = (after != 1) if plan.width >= 2 * ROWS else jnp.bool_(True)
    return lax.cond(partly | jnp.logical_not(exists), mask, lambda s: s, s)


def _store_dk_dv(
    ctx: KernelContext, outs: Gradients, walk: ChunkWalk, tile: WindowKeyTile, grads: KeyGradients
) -> None:
    """Stores dk and dv by way of the buffer of v, one after the other."""
    plan, _, smem = ctx
    staged = smem.v.at[tile.slot, tile.wg]
    row = (walk.begin + tile.number - AFTER) * ROWS
    for value, to in ((grads.dv, outs.dv), (grads.dk * plan.problem.scale, outs.dk)):
        plgpu.commit_smem()  # all warps have finished what reads the buffer
        staged[...] = value.astype(staged.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, to.at[walk.batch, pl.ds(row, ROWS), walk.kv_head])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _dq_in_turn(now: WindowStep) -> None:
    """dQ of the step before, if it is this consumer's turn."""
    before = now.s - 1
    turn = (before >= 0) & (before < now.walk.own_steps)
    turn = turn & (lax.rem(before, jnp.int32(TILES)) == now.tile.wg)
    pl.when(turn)(functools.partial(_store_dq, now._replace(s=before)))


def _store_dq(now: WindowStep) -> None:
    plan, smem, walk, wg = now.ctx.plan, now.ctx.smem, now.walk, now.tile.wg
    t, three = lax.div(now.s, jnp.int32(walk.of_tile)), jnp.int32(TILES)
    # Kv tile t of the walk and the two after it, by consumer.
    numbers = [t + lax.rem(n + TILES - lax.rem(t, three), three) for n in range(TILES)]
    tiles = [WindowKeyTile(number, n) for n, number in enumerate(numbers)]

    def matmuls(acc: RegisterTile) -> RegisterTile:
        for n, tile in enumerate(tiles):
            plgpu.wgmma(acc, smem.ds.tile.at[wg, n].transpose((1, 0)), smem.k.at[tile.slot, n])
        return acc[...]

    plgpu.barrier_wait(smem.ds_ready.at[wg])
    dq = pl.run_scoped(matmuls, plgpu.ACC((ROWS, WIDTH), jnp.float32))
    staged, unit = smem.ds.tile.at[wg, wg], walk.unit(now.s)
    plgpu.commit_smem()  # all warps have finished the matmul
    staged[...] = (dq * plan.problem.scale).astype(staged.dtype)
    plgpu.commit_smem()
    group_windows.store_rows(smem.ds, (wg, wg), now.dq, unit, unit.row)
    # Released at once: the others wait for it. In the middle of the next step was slower.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(smem.ds_free.at[wg])


# ---- the kernel and its call ---------------------------------------------------------------------


def _kernel(refs: BackwardRefs, *rest: GmemRef, plan: GroupWindowPlan) -> None:
    *outs, smem = rest
    block, wg = lax.axis_index("block"), lax.axis_index("wg")
    ctx = KernelContext(plan, refs, smem)
    mosaic.share_registers(
        wg,
        TILES,
        functools.partial(_produce, ctx, block),
        functools.partial(_consume, ctx, Gradients(*outs), block, wg),
        REGISTERS,
    )


def _dsinks(sinks: Operand, stats: RowStatistics) -> jax.Array:
    """`gradients_of_sinks`, in base 2 and in the layout of these statistics."""
    _, heads, tiles, _ = stats.lse.shape
    of_heads = softmax.to_log2(sinks).reshape(1, heads, 1, 1, HEADS)
    sizes = -1, heads, tiles, QUERIES, HEADS
    # Rows without a key have an lse of inf here, as those of a sink of inf: but their delta is 0.
    p = probabilities_of_sinks(of_heads, stats.lse.reshape(sizes), jnp.exp2)
    return -(p * stats.delta.reshape(sizes)).sum(axis=(0, 2, 3)).reshape(-1)


def run(residuals: Residuals, problem: AttentionProblem, config: Config) -> AttentionInputs:
    """(inputs, out, lse, d_out, d_lse) -> the cotangents of inputs."""
    residuals, plan = Residuals(*residuals), GroupWindowPlan(problem, config)
    inputs = residuals.inputs
    stats = statistics.of_tiles(problem, HEADS, residuals)
    refs = BackwardRefs(*inputs[:3], residuals.d_out, **stats._asdict())
    body, size = functools.partial(_kernel, plan=plan), (plan.kv_heads * plan.chunks, TILES + 1)
    grads = operands.launched(body, "flash_bwd_group_window_sm90", refs, scratch(plan), size)
    sinks = None if inputs.sinks is None else _dsinks(inputs.sinks, stats)
    return AttentionInputs(q=grads.dq, k=grads.dk, v=grads.dv, sinks=sinks)


KERNEL = Kernel(Config, group_windows.limit, smem_bytes, run)
