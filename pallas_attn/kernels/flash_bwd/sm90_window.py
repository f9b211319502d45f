"""The Hopper backward of short causal windows: dq, dk and dv by one kernel that adds up nothing in
global memory, so bits repeat. With a window of 128 keys, 32 heads of 64 and two batch
rows of 8192, forward and backward on an H200 take 0.30 ms; by the kernels for any mask 0.51 ms.

Where a tile of 64 keys meets few tiles of 64 queries, a warpgroup can walk down the diagonal and
hold all unfinished sums in registers: dK and dV of its kv tile, and dQ of the query tiles that the
next kv tiles meet too. Each of q, k, v, dO is read once, each gradient written once, and there are
five matmuls a pair of tiles.

Grid: a block is one warpgroup, and two blocks share a multiprocessor: one computes while the other
waits. A block walks over a chunk of one head's tiles. The first kv tiles of a walk belong to the
chunk before: they are there for what they add to the dQ of this one.

A step is a kv tile. Its pairs are taken from the diagonal on, so that the first pair completes a
dQ. Tiles of scores have keys as rows, see `key_tiles`.

Shared memory, which the one warpgroup loads itself:
  k, v [2]           kv tiles; dk and dv are stored from the same places
  q, do [4]          rings of query tiles with their lse and delta: those that a step meets, and the
                     next one, which is being loaded. dq is stored from q
  ds                 of one pair: the left operand of its dQ
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import tile_logits, tiles
from pallas_attn.kernels.attention.logits import LogitTile
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.flash_bwd import epilogue, operands
from pallas_attn.kernels.flash_bwd.operands import BackwardRefs, Gradients, Residuals
from pallas_attn.kernels.flash_bwd.plan import KeyPlan, RowFormats
from pallas_attn.kernels.flash_bwd.producer import load_rows
from pallas_attn.kernels.flash_bwd.work_order import KeyTiling, WorkOrder
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.config import OneForAll
from pallas_attn.kernels.lang.panels import Panels, ring_slot
from pallas_attn.kernels.lang.types import Barrier, Carry, GmemRef, Index, RegisterTile, SmemRef

MOST_PAIRS = 3  # pairs of a kv tile: dQ of all but one of them is in registers
STAGES = MOST_PAIRS + 1
BLOCKS = 2 * mosaic.MULTIPROCESSORS  # blocks at work at a time
RESERVED = 1024 + 512  # bytes of shared memory of a block beside its buffers, with barriers


@dataclasses.dataclass(frozen=True)
class Config(OneForAll):
    """Nothing to tune."""


def limit(problem: AttentionProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    if takes(problem):
        return tiles.limit(problem)
    return Limit(
        f"it takes causal windows of up to {MOST_PAIRS * ROWS - ROWS + 1} keys, as many queries as "
        "keys, heads of up to 64 that share no keys, 16-bit floats, sinks and no other array",
        "leave implementation=None",
    )


def takes(problem: AttentionProblem) -> bool:
    """Whether this kernel serves a problem."""
    mask = problem.mask
    return (
        mask.is_causal
        and mask.width is not None
        and pairs(problem) <= MOST_PAIRS
        and problem.q_len == problem.kv_len > 0
        and problem.q_offset == 0
        and problem.group == 1
        and set(problem.arrays) <= {"sinks"}
        and max(problem.head_dim, problem.v_head_dim) <= 64
        and problem.dtype != "float32"
        and problem.score_program is None
    )


def pairs(problem: AttentionProblem) -> int:
    """Query tiles that meet a kv tile, where the mask is causal with a window."""
    width = problem.mask.width
    assert width is not None
    return pl.cdiv(ROWS + width - 1, ROWS)


def padded_rows(problem: AttentionProblem) -> int:
    """Rows that lse and delta must have."""
    return (pl.cdiv(problem.q_len, ROWS) + MOST_PAIRS) * ROWS


class WindowSmem(NamedTuple):
    k: Panels
    v: Panels
    q: Panels
    do: Panels
    ds: SmemRef
    lse: SmemRef
    delta: SmemRef
    row_numbers: SmemRef  # 0, 1, .. 63
    kv_ready: Barrier
    q_ready: Barrier


def scratch(plan: KeyPlan) -> WindowSmem:
    dtype, (qk, values) = jnp.dtype(plan.problem.dtype), plan.format[:2]
    return WindowSmem(
        k=qk.scratch(2, ROWS),
        v=values.scratch(2, ROWS),
        q=qk.scratch(STAGES, ROWS),
        do=values.scratch(STAGES, ROWS),
        ds=mosaic.swizzled((ROWS, ROWS), dtype, qk.swizzle),
        lse=plgpu.SMEM((STAGES, ROWS), jnp.float32),
        delta=plgpu.SMEM((STAGES, ROWS), jnp.float32),
        row_numbers=plgpu.SMEM((ROWS,), jnp.int32),
        kv_ready=plgpu.Barrier(num_arrivals=2, num_barriers=2),
        q_ready=plgpu.Barrier(num_arrivals=4, num_barriers=STAGES),
    )


def plan_of(problem: AttentionProblem, config: Config) -> KeyPlan:
    order = WorkOrder(KeyTiling(problem, ROWS, ROWS))
    return KeyPlan(problem, config, order, RowFormats.of(problem, ROWS))


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    """Shared memory of a block, of which two share a multiprocessor."""
    return mosaic.bytes_of(scratch(plan_of(problem, config))) + RESERVED


# ---- the walk of a block ------------------------------------------------------------------------


class WindowWalk(NamedTuple):
    """A block's chunk of a head, in tiles."""

    batch: Index
    head: Index
    begin: Index  # first tile of the chunk
    end: Index
    first: Index  # kv tile that the walk begins with


def chunks(plan: KeyPlan) -> int:
    """Chunks that each head is cut into: blocks come in waves, and a walk costs some tiles more
    than its own.
    """
    count = plan.tiling.kv_tiles
    more = pairs(plan.problem) + 1

    def cost(chunks: int) -> int:
        return pl.cdiv(plan.order.heads * chunks, BLOCKS) * (pl.cdiv(count, chunks) + more)

    return min(range(1, count + 1), key=cost)


def _walk(plan: KeyPlan, block_id: Index) -> WindowWalk:
    count = chunks(plan)
    length = pl.cdiv(plan.tiling.kv_tiles, count)
    row, chunk = lax.div(block_id, jnp.int32(count)), lax.rem(block_id, jnp.int32(count))
    batch, head = (f(row, jnp.int32(plan.problem.q_heads)) for f in (lax.div, lax.rem))
    begin = jnp.minimum(chunk * length, plan.tiling.kv_tiles)
    end = jnp.minimum(begin + length, plan.tiling.kv_tiles)
    first = jnp.maximum(begin - (pairs(plan.problem) - 1), 0)
    return WindowWalk(batch, head, begin, end, jnp.where(begin < end, first, end))


# ---- loads and stores ---------------------------------------------------------------------------


def _load_kv(ctx: KernelContext, walk: WindowWalk, t: Index) -> None:
    _, refs, smem = ctx
    slot, at = ring_slot(t, 2), (walk.batch, walk.head, t * ROWS)
    for ref, to in ((refs.k, smem.k), (refs.v, smem.v)):
        load_rows(ref, at, to, slot, smem.kv_ready.at[slot])


def _load_q(ctx: KernelContext, walk: WindowWalk, t: Index) -> None:
    """Past the last tile, the last one again, whose probabilities an lse of inf makes 0."""
    plan, refs, smem = ctx
    slot = ring_slot(t, STAGES)
    ready, last = smem.q_ready.at[slot], jnp.minimum(t, plan.tiling.q_tiles - 1)
    for ref, to in ((refs.q, smem.q), (refs.do, smem.do)):
        load_rows(ref, (walk.batch, walk.head, last * ROWS), to, slot, ready)
    for ref, to in ((refs.lse, smem.lse), (refs.delta, smem.delta)):
        there = ref.at[walk.batch, walk.head, pl.ds(t * ROWS, ROWS)]
        plgpu.copy_gmem_to_smem(there, to.at[slot], ready)


def _store(walk: WindowWalk, t: Index, *gradients: tuple[epilogue.Staged, GmemRef]) -> None:
    """Gradients of tile t, from where no matmul reads any more, and where they go."""
    plgpu.commit_smem()  # in no warp
    epilogue.write([staged for staged, _ in gradients])
    for staged, to in gradients:
        where = walk.batch, pl.ds(t * ROWS, ROWS), walk.head
        epilogue.store([staged], to, where, t >= walk.begin)


def _load_next_and_store_dq(
    ctx: KernelContext, walk: WindowWalk, t: Index, acc: RegisterTile, to: GmemRef
) -> None:
    """Loads the first tiles of the next step into the places of the step before, and stores the dQ
    that the first pair completed.
    """
    plan, smem = ctx.plan, ctx.smem
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(t + 1 < walk.end)
    def _():
        _load_kv(ctx, walk, t + 1)
        _load_q(ctx, walk, t + pairs(plan.problem))

    dq = plgpu.wgmma_accumulator_load(acc, wait_n=2)
    _store(walk, t, (epilogue.Staged([dq * plan.problem.scale], smem.q, ring_slot(t, STAGES)), to))


# ---- the mainloop -------------------------------------------------------------------------------


def _step(
    ctx: KernelContext, outs: Gradients, walk: WindowWalk, t: Index, open_dq: Sequence[RegisterTile]
) -> list[RegisterTile]:
    """Kv tile t. `open_dq`: the unfinished dQ of its query tiles but the last. Gives that of the
    next kv tile.
    """
    plan, _, smem = ctx
    count, kv_slot, (qk, values) = pairs(plan.problem), ring_slot(t, 2), plan.format[:2]

    def all_pairs(state: Carry) -> None:
        dk, dv, *dqs = state
        finish_dq = functools.partial(_load_next_and_store_dq, ctx, walk, t, dqs[0], outs.dq)
        plgpu.barrier_wait(smem.kv_ready.at[kv_slot])
        for n, dq in enumerate(dqs):
            if n == count - 1:
                plgpu.barrier_wait(smem.q_ready.at[ring_slot(t + n, STAGES)])
            with_first_matmuls = [finish_dq] if n == 1 else []
            _pair(ctx, walk, (t, n), Gradients(dq, dk, dv), with_first_matmuls)
        if count == 1:
            plgpu.wgmma_wait(0)
            finish_dq()

    zeros = [mosaic.filled((ROWS, x.width), 0.0) for x in (qk, values, qk)]
    fresh = [plgpu.ACC.init(value) for value in (*zeros[:2], *open_dq, zeros[2])]
    dk, dv, _, *open_dq = pl.run_state(all_pairs)(fresh)
    dk = epilogue.Staged([dk * plan.problem.scale], smem.k, kv_slot)
    _store(walk, t, (dk, outs.dk), (epilogue.Staged([dv], smem.v, kv_slot), outs.dv))
    # A sum that changes places: were it copied as it is, ptxas would do so between matmuls in
    # flight, and have them wait for each other. To add 0 is no copy.
    return [dq + 0.0 for dq in open_dq]


def _pair(
    ctx: KernelContext,
    walk: WindowWalk,
    tile: tuple[Index, int],
    sums: Gradients,
    overlapped: list[Any],
) -> None:
    """Adds one pair of tiles to the accumulators `sums`. `tile`: (t, n), kv tile t and query tile n
    after the one of the same rows. `overlapped` is done after the first matmuls are issued.
    """
    (plan, _, smem), (t, n) = ctx, tile
    dtype, shape = jnp.dtype(plan.problem.dtype), (ROWS, ROWS)
    slot, keys = ring_slot(t + n, STAGES), ring_slot(t, 2)
    (q,), (do,) = (panels.tiles(x, slot) for x in (smem.q, smem.do))
    (k,), (v,) = (panels.tiles(x, keys) for x in (smem.k, smem.v))

    def row_statistic(numbers: SmemRef) -> RegisterTile:
        return mosaic.load_vector(numbers.at[slot], mosaic.TILE, 1, shape)

    def matmuls(s_acc: RegisterTile, dp_acc: RegisterTile) -> None:
        plgpu.wgmma(s_acc, k, q.transpose((1, 0)))
        plgpu.wgmma(dp_acc, v, do.transpose((1, 0)))
        for work in overlapped:
            work()
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
        where = (walk.batch, walk.head, (t + n) * ROWS, t * ROWS, 0, plan.problem.kv_len)
        logits = LogitTile(*where, plan.problem.mask, q_axis=1)
        s, slope = tile_logits.logits_and_slope(ctx, logits, s, False)
        p = _masked(ctx, n, tile_logits.exponentials(plan, s, row_statistic(smem.lse)))
        plgpu.wgmma(sums.dv, p.astype(dtype), do)
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
        ds = tile_logits.d_scores(p, dp, row_statistic(smem.delta), slope).astype(dtype)
        plgpu.commit_smem()  # all warps have read the dS of the pair before
        smem.ds[...] = ds
        plgpu.commit_smem()
        plgpu.wgmma(sums.dk, ds, q)
        plgpu.wgmma(sums.dq, smem.ds.transpose((1, 0)), k)

    pl.run_scoped(matmuls, *(plgpu.ACC(shape, jnp.float32) for _ in range(2)))


def _masked(ctx: KernelContext, n: int, p: RegisterTile) -> RegisterTile:
    """P of a pair with 0 where `Mask` hides a key. Only the places within two tiles matter: one
    comparison. A mask of the logits would stand between the factor and the lse, which are one
    multiply-add. Query rows are numbered from 0 and keys from -64 n. No key is past the end: rows
    that would see it are.
    """
    queries_of, first = ctx.plan.problem.mask.transposed.row_bounds, -n * ROWS
    rows = mosaic.load_vector(ctx.smem.row_numbers, mosaic.TILE, 1, p.shape)
    low, high = queries_of(mosaic.positions(p.shape, 0, first))
    if queries_of(first + ROWS - 1)[0] > 0:  # a query before the first that sees the last key
        p = jnp.where(low <= rows, p, 0.0)
    if queries_of(first)[1] < ROWS:  # a query after the last that sees the first key
        p = jnp.where(rows < high, p, 0.0)
    return p


# ---- the kernel and its call --------------------------------------------------------------------


def _kernel(refs: BackwardRefs, *rest: GmemRef, plan: KeyPlan) -> None:
    *outs, smem = rest
    ctx, walk = KernelContext(plan, refs, smem), _walk(plan, lax.axis_index("block"))
    count = pairs(plan.problem)
    smem.row_numbers[...] = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=mosaic.COLUMN)
    plgpu.commit_smem()

    @pl.when(walk.first < walk.end)
    def _():
        _load_kv(ctx, walk, walk.first)
        for n in range(count):
            _load_q(ctx, walk, walk.first + n)
        for n in range(count - 1):
            plgpu.barrier_wait(smem.q_ready.at[ring_slot(walk.first + n, STAGES)])

    step = functools.partial(_step, ctx, Gradients(*outs), walk)
    open_dq = [mosaic.filled((ROWS, plan.format.qk.width), 0.0)] * (count - 1)
    lax.fori_loop(walk.first, walk.end, step, open_dq)
    plgpu.wait_smem_to_gmem(0)


def run(residuals: Residuals, problem: AttentionProblem, config: Config) -> AttentionInputs:
    """(inputs, out, lse, d_out, d_lse) -> the cotangents of inputs."""
    residuals, plan = Residuals(*residuals), plan_of(problem, config)
    stats = operands.row_statistics(plan.exact, padded_rows(problem), residuals)
    refs, size = operands.for_tma(plan, residuals, stats), (plan.order.heads * chunks(plan), 1)
    body = functools.partial(_kernel, plan=plan)
    grads = operands.launched(body, "flash_bwd_window_sm90", refs, scratch(plan), size)
    grads = grads._replace(dq=grads.dq[:, : problem.q_len])
    return operands.cotangents(residuals, stats, grads, {})


KERNEL = Kernel(Config, limit, smem_bytes, run)
