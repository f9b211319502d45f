"""The Hopper backward of short causal windows: dq, dk and dv by one kernel that adds nothing up in
global memory, so the same bits each time.

Where a tile of 64 keys meets few tiles of 64 queries, a warpgroup can walk down the diagonal and
hold all sums that are under way in registers: dK and dV of its key tile, and dQ of the query tiles
that the next key tiles meet too. Each of q, k, v, dO is read once, each gradient written once, and
there are five matmuls a pair of tiles.

Grid: a block is one warpgroup, and two of them share a multiprocessor: the one computes while the
other waits. It walks a stretch of one head's tiles. The first key tiles of a walk belong to the
stretch before: they are there for what they add to the stretch's dQ.

A step is a key tile; its pairs are taken from the diagonal on, so that the first pair completes a
dQ. Tiles of scores have keys down, see `flash_bwd_plan`.

Shared memory:
  k, v [2]           key tiles; dk and dv leave through the same places
  q, do [4]          rings of query tiles with their lse and delta: those that a step meets, and one
                     that is on its way. dq leaves through q
  ds                 of one pair: the left operand of its dQ
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._problem import AttentionProblem
from pallas_attn.kernels.attention import plan as attention_plan
from pallas_attn.kernels.attention import score_mod, tma_operands
from pallas_attn.kernels.attention.score_mod import Place
from pallas_attn.kernels.flash_bwd import plan as shared
from pallas_attn.kernels.flash_bwd.plan import ROWS, Plan, Refs, across
from pallas_attn.kernels.lang import mosaic

MOST_PAIRS = 3  # of a key tile: dQ of all but one are held in registers
STAGES = MOST_PAIRS + 1
BLOCKS = 2 * attention_plan.BLOCKS  # at a time
RESERVED = 1024 + 512  # bytes of shared memory that a block takes beside its buffers, with barriers


class Smem(NamedTuple):
    k: Any
    v: Any
    q: Any
    do: Any
    ds: Any
    lse: Any
    delta: Any
    numbers: Any
    keys_ready: Any
    queries_ready: Any


def pairs(problem: AttentionProblem) -> int:
    """Query tiles that meet a key tile."""
    assert problem.mask.left is not None
    return (problem.mask.left + ROWS - 1) // ROWS + 1


def takes(problem: AttentionProblem) -> bool:
    mask, arrays = problem.mask, set(problem.arrays)
    return (
        mask.right == 0
        and mask.left is not None
        and pairs(problem) <= MOST_PAIRS
        and problem.q_len == problem.kv_len > 0
        and problem.q_offset == 0
        and problem.group == 1
        and arrays <= {"sinks"}
        and max(problem.head_dim, problem.v_head_dim) <= 64
        and problem.dtype != "float32"
    )


def padded_rows(problem: AttentionProblem) -> int:
    """Rows that lse and delta must have."""
    return (pl.cdiv(problem.q_len, ROWS) + MOST_PAIRS) * ROWS


def scratch(plan: Plan) -> Smem:
    dtype, barrier = jnp.dtype(plan.problem.dtype), plgpu.Barrier
    return Smem(
        k=mosaic.swizzled((2, ROWS, plan.k_width), dtype, plan.k_swizzle),
        v=mosaic.swizzled((2, ROWS, plan.v_width), dtype, plan.v_swizzle),
        q=mosaic.swizzled((STAGES, ROWS, plan.k_width), dtype, plan.k_swizzle),
        do=mosaic.swizzled((STAGES, ROWS, plan.v_width), dtype, plan.v_swizzle),
        ds=mosaic.swizzled((ROWS, ROWS), dtype, plan.k_swizzle),  # as k's
        lse=plgpu.SMEM((STAGES, ROWS), jnp.float32),
        delta=plgpu.SMEM((STAGES, ROWS), jnp.float32),
        numbers=plgpu.SMEM((ROWS,), jnp.int32),
        keys_ready=barrier(num_arrivals=2, num_barriers=2),
        queries_ready=barrier(num_arrivals=4, num_barriers=STAGES),
    )


def buffer_bytes(plan: Plan) -> int:
    return mosaic.bytes_of(scratch(plan))


class Walk(NamedTuple):
    """A block's part of a head, in tiles."""

    batch: Any
    head: Any
    begin: Any  # its own
    end: Any
    first: Any  # key tile


def stretches(plan: Plan) -> int:
    """Into how many each head is cut: blocks come in waves, and a walk costs some tiles more than
    its own.
    """
    count = plan.kv_tiles
    more = pairs(plan.problem) + 1

    def cost(parts: int) -> int:
        return pl.cdiv(plan.heads * parts, BLOCKS) * (pl.cdiv(count, parts) + more)

    return min(range(1, count + 1), key=cost)


def _walk(plan: Plan, cta: Any) -> Walk:
    parts = stretches(plan)
    length = pl.cdiv(plan.kv_tiles, parts)
    row, part = lax.div(cta, jnp.int32(parts)), lax.rem(cta, jnp.int32(parts))
    batch, head = (f(row, jnp.int32(plan.problem.q_heads)) for f in (lax.div, lax.rem))
    begin = jnp.minimum(part * length, plan.kv_tiles)
    end = jnp.minimum(begin + length, plan.kv_tiles)
    first = jnp.maximum(begin - (pairs(plan.problem) - 1), 0)
    return Walk(batch, head, begin, end, jnp.where(begin < end, first, end))


# ---- loading ------------------------------------------------------------------------------------


def _load_keys(refs: Refs, smem: Smem, walk: Walk, t: Any) -> None:
    slot = shared.ring(t, 2)
    for ref, to in ((refs.k, smem.k), (refs.v, smem.v)):
        columns = mosaic.columns(ref, 0, to.shape[-1], walk.head)
        there = ref.at[walk.batch, pl.ds(t * ROWS, ROWS), walk.head, columns]
        plgpu.copy_gmem_to_smem(there, to.at[slot], smem.keys_ready.at[slot])


def _load_queries(plan: Plan, refs: Refs, smem: Smem, walk: Walk, t: Any) -> None:
    """Past the last tile, the last one again, whose probabilities an lse of inf makes 0."""
    slot = shared.ring(t, STAGES)
    ready, last = smem.queries_ready.at[slot], jnp.minimum(t, plan.q_tiles - 1)
    for ref, to in ((refs.q, smem.q), (refs.do, smem.do)):
        columns = mosaic.columns(ref, 0, to.shape[-1], walk.head)
        there = ref.at[walk.batch, pl.ds(last * ROWS, ROWS), walk.head, columns]
        plgpu.copy_gmem_to_smem(there, to.at[slot], ready)
    for ref, to in ((refs.lse, smem.lse), (refs.delta, smem.delta)):
        there = ref.at[walk.batch, walk.head, pl.ds(t * ROWS, ROWS)]
        plgpu.copy_gmem_to_smem(there, to.at[slot], ready)


# ---- computing ----------------------------------------------------------------------------------


def _pair(plan: Plan, refs: Refs, smem: Smem, at: Any, sums: Any, under: Any) -> None:
    """One pair of tiles: at is (walk, key tile, n), for query tile n after the key tile's own; sums
    are accumulators of dK, dV, dQ; `under` is done under the first matmuls.
    """
    (walk, t, n), (dk, dv, dq) = at, sums
    dtype, shape = jnp.dtype(plan.problem.dtype), (ROWS, ROWS)
    slot, keys = shared.ring(t + n, STAGES), shared.ring(t, 2)
    q, do, k, v = smem.q.at[slot], smem.do.at[slot], smem.k.at[keys], smem.v.at[keys]

    def pair(s_acc, dp_acc):
        plgpu.wgmma(s_acc, k, q.transpose((1, 0)))
        plgpu.wgmma(dp_acc, v, do.transpose((1, 0)))
        if under is not None:
            under()
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
        place = Place(walk.batch, walk.head, (t + n) * ROWS, t * ROWS, 0, plan.problem.kv_len, 1)
        s, slope = score_mod.logits_and_slope(plan, refs, place, s, False)
        s = s if plan.unit is None else s * plan.unit
        s = s - across(mosaic.load(smem.lse.at[slot], mosaic.COLUMN), shape)
        p = jnp.exp2(_hidden(plan, smem, n, s))
        plgpu.wgmma(dv, p.astype(dtype), do)
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
        ds = p * (dp - across(mosaic.load(smem.delta.at[slot], mosaic.COLUMN), shape))
        ds = (ds if slope is None else ds * slope).astype(dtype)
        plgpu.commit_smem()  # all warps are done with the last pair's
        smem.ds[...] = ds
        plgpu.commit_smem()
        plgpu.wgmma(dk, ds, q)
        plgpu.wgmma(dq, smem.ds.transpose((1, 0)), k)

    pl.run_scoped(pair, *(plgpu.ACC(shape, jnp.float32) for _ in range(2)))


def _hidden(plan: Plan, smem: Smem, n: int, s: Any) -> Any:
    """`score_mod.apply_mask`, where only the places within two tiles matter: one comparison. No key
    is past the end: those who would see it are.
    """
    left, apart = plan.problem.mask.left, n * ROWS  # from the first query back to the first key
    assert left is not None
    q = across(mosaic.load(smem.numbers, mosaic.COLUMN), s.shape)
    if apart < ROWS - 1:
        s = jnp.where(mosaic.positions(s.shape, 0, -apart) <= q, s, -jnp.inf)
    if apart + ROWS - 1 > left:
        s = jnp.where(q <= mosaic.positions(s.shape, 0, left - apart), s, -jnp.inf)
    return s


def _step(plan: Plan, refs: Refs, smem: Smem, outs: Any, at: Any, due: Any) -> Any:
    """One key tile: at is (walk, t), due what there is of dQ of its query tiles but the last. Gives
    that of the next key tile's.
    """
    walk, t = at
    dq_ref, dk_ref, dv_ref = outs
    count, scale = pairs(plan.problem), plan.problem.scale
    own = t >= walk.begin

    def leave(*gradients):
        """Tile t of each, (value, place in shared memory, ref), which no matmul reads any more."""
        plgpu.commit_smem()  # in no warp
        for value, staged, _ in gradients:
            staged[...] = value.astype(staged.dtype)
        plgpu.commit_smem()
        for _, staged, ref in gradients:
            columns = mosaic.columns(ref, 0, staged.shape[-1], walk.head)
            there = ref.at[walk.batch, pl.ds(t * ROWS, ROWS), walk.head, columns]
            plgpu.copy_smem_to_gmem(staged, there, own)

    def following():
        """What the next step meets first, into the places of the step before."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(t + 1 < walk.end)
        def _():
            _load_keys(refs, smem, walk, t + 1)
            _load_queries(plan, refs, smem, walk, t + count)

    def everything(state):
        dk, dv, *sums = state

        def later():
            following()
            dq = plgpu.wgmma_accumulator_load(sums[0], wait_n=2)
            leave((dq * scale, smem.q.at[shared.ring(t, STAGES)], dq_ref))

        plgpu.barrier_wait(smem.keys_ready.at[shared.ring(t, 2)])
        for n, dq in enumerate(sums):
            if n == count - 1:
                plgpu.barrier_wait(smem.queries_ready.at[shared.ring(t + n, STAGES)])
            _pair(plan, refs, smem, (walk, t, n), (dk, dv, dq), later if n == 1 else None)
        if count == 1:
            plgpu.wgmma_wait(0)
            later()

    widths = (plan.k_width, plan.v_width)
    zeros = [mosaic.filled((ROWS, width), 0.0) for width in (*widths, plan.k_width)]
    fresh = [plgpu.ACC.init(value) for value in (*zeros[:2], *due, zeros[2])]
    dk, dv, _, *due = pl.run_state(everything)(fresh)
    slot = shared.ring(t, 2)
    leave((dk * scale, smem.k.at[slot], dk_ref), (dv, smem.v.at[slot], dv_ref))
    # A sum that changes places: were it copied as it is, ptxas would do so between matmuls in
    # flight, and have them wait for each other. To add 0 is no copy.
    return [dq + 0.0 for dq in due]


def _kernel(refs: Refs, dq_ref: Any, dk_ref: Any, dv_ref: Any, smem: Smem, *, plan: Plan) -> None:
    walk = _walk(plan, lax.axis_index("cta"))
    count = pairs(plan.problem)
    smem.numbers[...] = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=mosaic.COLUMN)
    plgpu.commit_smem()

    @pl.when(walk.first < walk.end)
    def _():
        _load_keys(refs, smem, walk, walk.first)
        for n in range(count):
            _load_queries(plan, refs, smem, walk, walk.first + n)
        for n in range(count - 1):
            plgpu.barrier_wait(smem.queries_ready.at[shared.ring(walk.first + n, STAGES)])

    def step(t, due):
        return _step(plan, refs, smem, (dq_ref, dk_ref, dv_ref), (walk, t), due)

    due = [mosaic.filled((ROWS, plan.k_width), 0.0)] * (count - 1)
    lax.fori_loop(walk.first, walk.end, step, due)
    plgpu.wait_smem_to_gmem(0)


# ---- the call -----------------------------------------------------------------------------------


def dq_dk_dv(plan: Plan, refs: Refs) -> tuple[Any, Any, Any]:
    """Padded as refs.q, refs.k and refs.v are."""
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=tuple(
            jax.ShapeDtypeStruct((*x.shape[:3], tma_operands.width_in_tma(x.shape[3])), x.dtype)
            for x in (refs.q, refs.k, refs.v)
        ),
        scratch_types=(scratch(plan),),
        grid=(plan.heads * stretches(plan),),
        grid_names=("cta",),
        compiler_params=mosaic.without_barriers(),
        kernel_name="flash_bwd_band_sm90",
    )
    return kernel(refs)
