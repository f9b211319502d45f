"""The Hopper backward of short causal windows: dq, dk and dv by one kernel that adds nothing up in
global memory, so the same bits each time.

Where a tile of 64 keys meets few tiles of 64 queries, a warpgroup can walk down the diagonal and
hold all unfinished sums in registers: dK and dV of its kv tile, and dQ of the query tiles that the
next kv tiles meet too. Each of q, k, v, dO is read once, each gradient written once, and there are
five matmuls a pair of tiles.

Grid: a block is one warpgroup, and two blocks share a multiprocessor: one computes while the other
waits. A block walks over a chunk of one head's tiles. The first kv tiles of a walk belong to the
chunk before: they are there for what they add to the dQ of this one.

A step is a kv tile. Its pairs are taken from the diagonal on, so that the first pair completes a
dQ. Tiles of scores have keys as rows, see `plan`.

Shared memory, which the one warpgroup loads itself:
  k, v [2]           kv tiles; dk and dv are stored from the same places
  q, do [4]          rings of query tiles with their lse and delta: those that a step meets, and the
                     next one, which is being loaded. dq is stored from q
  ds                 of one pair: the left operand of its dQ
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionProblem
from pallas_attn.kernels.attention import plan as attention_plan
from pallas_attn.kernels.attention import score_mod, tma_operands
from pallas_attn.kernels.attention.plan import Context
from pallas_attn.kernels.attention.score_mod import Place
from pallas_attn.kernels.flash_bwd import plan as shared
from pallas_attn.kernels.flash_bwd.plan import ROWS, Gradients, Plan, Refs, per_column
from pallas_attn.kernels.lang import mosaic

MOST_PAIRS = 3  # of a kv tile: dQ of all but one of them is in registers
STAGES = MOST_PAIRS + 1
BLOCKS = 2 * attention_plan.BLOCKS  # at a time
RESERVED = 1024 + 512  # bytes of shared memory of a block beside its buffers, with barriers


class Smem(NamedTuple):
    k: Any
    v: Any
    q: Any
    do: Any
    ds: Any
    lse: Any
    delta: Any
    row_numbers: Any  # 0, 1, .. 63
    kv_ready: Any
    q_ready: Any


def pairs(problem: AttentionProblem) -> int:
    """Query tiles that meet a kv tile, where the mask is causal with a window."""
    width = problem.mask.width
    assert width is not None
    return pl.cdiv(ROWS + width - 1, ROWS)


def takes(problem: AttentionProblem) -> bool:
    """Whether this kernel serves a problem."""
    mask, arrays = problem.mask, set(problem.arrays)
    return (
        mask.is_causal
        and mask.width is not None
        and pairs(problem) <= MOST_PAIRS
        and problem.q_len == problem.kv_len > 0
        and problem.q_offset == 0
        and problem.group == 1
        and arrays <= {"sinks"}
        and max(problem.head_dim, problem.v_head_dim) <= 64
        and problem.dtype != "float32"
        and problem.score_program is None
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
        row_numbers=plgpu.SMEM((ROWS,), jnp.int32),
        kv_ready=barrier(num_arrivals=2, num_barriers=2),
        q_ready=barrier(num_arrivals=4, num_barriers=STAGES),
    )


def buffer_bytes(plan: Plan) -> int:
    return mosaic.bytes_of(scratch(plan))


class Walk(NamedTuple):
    """A block's chunk of a head, in tiles."""

    batch: Any
    head: Any
    begin: Any  # the chunk's
    end: Any
    first: Any  # kv tile that the walk begins with


class Pair(NamedTuple):
    """A tile of keys, and query tile n after the one of the same rows."""

    walk: Walk
    t: Any  # the kv tile
    n: int

    @property
    def q_slot(self) -> Any:
        return shared.ring_slot(self.t + self.n, STAGES)

    @property
    def kv_slot(self) -> Any:
        return shared.ring_slot(self.t, 2)


def chunks(plan: Plan) -> int:
    """Into how many each head is cut: blocks come in waves, and a walk costs some tiles more than
    its own.
    """
    count = plan.kv_tiles
    more = pairs(plan.problem) + 1

    def cost(chunks: int) -> int:
        return pl.cdiv(plan.heads * chunks, BLOCKS) * (pl.cdiv(count, chunks) + more)

    return min(range(1, count + 1), key=cost)


def _walk(plan: Plan, block_id: Any) -> Walk:
    count = chunks(plan)
    length = pl.cdiv(plan.kv_tiles, count)
    row, chunk = lax.div(block_id, jnp.int32(count)), lax.rem(block_id, jnp.int32(count))
    batch, head = (f(row, jnp.int32(plan.problem.q_heads)) for f in (lax.div, lax.rem))
    begin = jnp.minimum(chunk * length, plan.kv_tiles)
    end = jnp.minimum(begin + length, plan.kv_tiles)
    first = jnp.maximum(begin - (pairs(plan.problem) - 1), 0)
    return Walk(batch, head, begin, end, jnp.where(begin < end, first, end))


# ---- loads --------------------------------------------------------------------------------------


def _load_kv(ctx: Context, walk: Walk, t: Any) -> None:
    _, refs, smem = ctx
    slot = shared.ring_slot(t, 2)
    for ref, to in ((refs.k, smem.k), (refs.v, smem.v)):
        columns = mosaic.columns(ref, 0, to.shape[-1], walk.head)
        there = ref.at[walk.batch, pl.ds(t * ROWS, ROWS), walk.head, columns]
        plgpu.copy_gmem_to_smem(there, to.at[slot], smem.kv_ready.at[slot])


def _load_q(ctx: Context, walk: Walk, t: Any) -> None:
    """Past the last tile, the last one again, whose probabilities an lse of inf makes 0."""
    plan, refs, smem = ctx
    slot = shared.ring_slot(t, STAGES)
    ready, last = smem.q_ready.at[slot], jnp.minimum(t, plan.q_tiles - 1)
    for ref, to in ((refs.q, smem.q), (refs.do, smem.do)):
        columns = mosaic.columns(ref, 0, to.shape[-1], walk.head)
        there = ref.at[walk.batch, pl.ds(last * ROWS, ROWS), walk.head, columns]
        plgpu.copy_gmem_to_smem(there, to.at[slot], ready)
    for ref, to in ((refs.lse, smem.lse), (refs.delta, smem.delta)):
        there = ref.at[walk.batch, walk.head, pl.ds(t * ROWS, ROWS)]
        plgpu.copy_gmem_to_smem(there, to.at[slot], ready)


# ---- the mainloop -------------------------------------------------------------------------------


def _pair(ctx: Context, pair: Pair, sums: Gradients, overlapped: Any) -> None:
    """Adds one pair of tiles to the accumulators `sums`; `overlapped` is called after the first
    matmuls are issued.
    """
    (plan, _, smem), (walk, t, n) = ctx, pair
    dtype, shape = jnp.dtype(plan.problem.dtype), (ROWS, ROWS)
    slot, keys = pair.q_slot, pair.kv_slot
    q, do, k, v = smem.q.at[slot], smem.do.at[slot], smem.k.at[keys], smem.v.at[keys]

    def of_row(numbers):
        return per_column(mosaic.load(numbers.at[slot], mosaic.COLUMN), shape)

    def matmuls(s_acc, dp_acc):
        plgpu.wgmma(s_acc, k, q.transpose((1, 0)))
        plgpu.wgmma(dp_acc, v, do.transpose((1, 0)))
        if overlapped is not None:
            overlapped()
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
        where = (walk.batch, walk.head, (t + n) * ROWS, t * ROWS, 0, plan.problem.kv_len)
        place = Place(*where, plan.problem.mask, q_axis=1)
        s, slope = score_mod.logits_and_slope(ctx, place, s, False)
        p = _masked(ctx, n, score_mod.exponentials(plan, s, of_row(smem.lse)))
        plgpu.wgmma(sums.dv, p.astype(dtype), do)
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
        ds = p * (dp - of_row(smem.delta))
        ds = (ds if slope is None else ds * slope).astype(dtype)
        plgpu.commit_smem()  # all warps have read the dS of the pair before
        smem.ds[...] = ds
        plgpu.commit_smem()
        plgpu.wgmma(sums.dk, ds, q)
        plgpu.wgmma(sums.dq, smem.ds.transpose((1, 0)), k)

    pl.run_scoped(matmuls, *(plgpu.ACC(shape, jnp.float32) for _ in range(2)))


def _masked(ctx: Context, n: int, p: Any) -> Any:
    """P of a pair with 0 where `Mask` hides a key. Only the places within two tiles matter: one
    comparison. A mask of the logits would stand between the factor and the lse, which are one
    multiply-add. Query rows are numbered from 0 and keys from -64 n. No key is past the end: rows
    that would see it are.
    """
    queries_of, first = ctx.plan.problem.mask.transposed.row_bounds, -n * ROWS
    rows = per_column(mosaic.load(ctx.smem.row_numbers, mosaic.COLUMN), p.shape)
    low, high = queries_of(mosaic.positions(p.shape, 0, first))
    if queries_of(first + ROWS - 1)[0] > 0:  # a query before the first that sees the last key
        p = jnp.where(low <= rows, p, 0.0)
    if queries_of(first)[1] < ROWS:  # a query after the last that sees the first key
        p = jnp.where(rows < high, p, 0.0)
    return p


def _step(ctx: Context, outs: Gradients, walk: Walk, t: Any, open_dq: Any) -> Any:
    """One kv tile. `open_dq`: what there is of dQ of its query tiles but the last. Gives that of
    the next kv tile.
    """
    plan, _, smem = ctx
    count, scale = pairs(plan.problem), plan.problem.scale
    own = t >= walk.begin
    q_slot, kv_slot = shared.ring_slot(t, STAGES), shared.ring_slot(t, 2)

    def store(*gradients):
        """Tile t of each, (value, place in shared memory, ref), which no matmul reads any more."""
        plgpu.commit_smem()  # in no warp
        for value, staged, _ in gradients:
            staged[...] = value.astype(staged.dtype)
        plgpu.commit_smem()
        for _, staged, ref in gradients:
            columns = mosaic.columns(ref, 0, staged.shape[-1], walk.head)
            there = ref.at[walk.batch, pl.ds(t * ROWS, ROWS), walk.head, columns]
            plgpu.copy_smem_to_gmem(staged, there, own)

    def load_next():
        """What the next step meets first, into the places of the step before."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(t + 1 < walk.end)
        def _():
            _load_kv(ctx, walk, t + 1)
            _load_q(ctx, walk, t + count)

    def all_pairs(state):
        dk, dv, *dqs = state

        def store_dq():
            load_next()
            dq = plgpu.wgmma_accumulator_load(dqs[0], wait_n=2)
            store((dq * scale, smem.q.at[q_slot], outs.dq))

        plgpu.barrier_wait(smem.kv_ready.at[kv_slot])
        for n, dq in enumerate(dqs):
            pair = Pair(walk, t, n)
            if n == count - 1:
                plgpu.barrier_wait(smem.q_ready.at[pair.q_slot])
            _pair(ctx, pair, Gradients(dq, dk, dv), store_dq if n == 1 else None)
        if count == 1:
            plgpu.wgmma_wait(0)
            store_dq()

    widths = (plan.k_width, plan.v_width)
    zeros = [mosaic.filled((ROWS, width), 0.0) for width in (*widths, plan.k_width)]
    fresh = [plgpu.ACC.init(value) for value in (*zeros[:2], *open_dq, zeros[2])]
    dk, dv, _, *open_dq = pl.run_state(all_pairs)(fresh)
    store((dk * scale, smem.k.at[kv_slot], outs.dk), (dv, smem.v.at[kv_slot], outs.dv))
    # A sum that changes places: were it copied as it is, ptxas would do so between matmuls in
    # flight, and have them wait for each other. To add 0 is no copy.
    return [dq + 0.0 for dq in open_dq]


def _kernel(refs: Refs, dq_ref: Any, dk_ref: Any, dv_ref: Any, smem: Smem, *, plan: Plan) -> None:
    ctx, outs = Context(plan, refs, smem), Gradients(dq_ref, dk_ref, dv_ref)
    walk = _walk(plan, lax.axis_index("block"))
    count = pairs(plan.problem)
    smem.row_numbers[...] = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=mosaic.COLUMN)
    plgpu.commit_smem()

    @pl.when(walk.first < walk.end)
    def _():
        _load_kv(ctx, walk, walk.first)
        for n in range(count):
            _load_q(ctx, walk, walk.first + n)
        for n in range(count - 1):
            plgpu.barrier_wait(smem.q_ready.at[shared.ring_slot(walk.first + n, STAGES)])

    step = functools.partial(_step, ctx, outs, walk)
    open_dq = [mosaic.filled((ROWS, plan.k_width), 0.0)] * (count - 1)
    lax.fori_loop(walk.first, walk.end, step, open_dq)
    plgpu.wait_smem_to_gmem(0)


# ---- the call -----------------------------------------------------------------------------------


def dq_dk_dv(plan: Plan, refs: Refs) -> Gradients:
    """dq, dk and dv, padded as refs.q, refs.k and refs.v are."""
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=tuple(
            jax.ShapeDtypeStruct((*x.shape[:3], tma_operands.width_in_tma(x.shape[3])), x.dtype)
            for x in (refs.q, refs.k, refs.v)
        ),
        scratch_types=(scratch(plan),),
        grid=(plan.heads * chunks(plan),),
        grid_names=("block",),
        compiler_params=mosaic.without_barriers(),
        kernel_name="flash_bwd_window_sm90",
    )
    return Gradients(*kernel(refs))
