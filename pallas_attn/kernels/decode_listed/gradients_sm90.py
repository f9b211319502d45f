"""Gradients of attention to listed rows (`flash_attention(kv_indices=)`), for Hopper: 16-bit
floats, up to 64 query heads that share a list, head dims up to 128.

A query row is a sequence of `group` heads with one list of rows of k and v. A step takes 64 entries
of a list: the rows are gathered once for all heads, and give five matmuls whose left operands have
the 64 keys as rows, as in `flash_bwd/sm90_fused.py`:

    S^T = K Q^T    dP^T = V dO^T    dV = P^T dO    dK = dS^T Q    dQ += dS K

dQ stays in registers until the list ends. dV and dK of the 64 keys are sums over the heads already;
they are added to float32 arrays in global memory, each row to the row that the list names, in any
order (`mma/row_sums.py`). These additions, 1 KiB an entry at head dim 128 and twice what is
gathered, bound the kernel: without them it takes a quarter of the time (`results/listed/`).

Grid: one persistent block a multiprocessor. Two consumer warpgroups take query rows of their own,
neighbours of one kv head (query row r is of head r % kv_heads). One producer warpgroup gathers for
both in turn, by cp.async.

Shared memory of each consumer, and who owns it when:
  q, do          64 rows, zeros past the heads: loaded by TMA for a query row; dq is stored from q
  k, v [STAGES]  a ring of gathered tiles, zeros where an entry names no row
  ds             dS^T, the consumer's own, on its way to be an operand
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
from pallas_attn._call.problem import DecodeProblem, ListedResiduals
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import softmax, tile_logits, tma_operands
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.lang import mosaic, panels, thread_program, threads
from pallas_attn.kernels.lang.config import OneForAll, check
from pallas_attn.kernels.lang.panels import Panels
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.types import Barrier, GmemRef, Index, RegisterTile, SmemRef
from pallas_attn.kernels.mma import gathered_rows, row_sums, wgmma
from pallas_attn.kernels.mma.gathered_rows import TILE

WARPGROUPS = 2  # consumers
STAGES = 2  # tiles of the ring of a consumer
MOST_HEADS = 64
REGISTERS = 224, 56  # a thread of consumers, of the producer
WIDTH = panels.WIDEST


@dataclasses.dataclass(frozen=True)
class Config(OneForAll):
    """Tuning only: the result is the same up to rounding."""

    grid: int = mosaic.MULTIPROCESSORS  # blocks

    def __post_init__(self) -> None:
        check(self, grid=(self.grid >= 1, "at least 1"))


class ListPlan(NamedTuple):
    """The static values of a launch."""

    problem: DecodeProblem
    config: Config

    @property
    def heads(self) -> int:
        """Columns of a tile of scores."""
        return tma_operands.round_up(self.problem.q_heads, 8)

    @property
    def entries(self) -> int:
        """Entries of a list, in whole tiles."""
        return tma_operands.round_up(self.problem.listed or 0, TILE)


class ListRefs(NamedTuple):
    """Global memory; `R` query rows, `S` rows of k and v."""

    q: GmemRef  # [R, group, 1, H]
    do: GmemRef  # [R, group, 1, Hv]
    k: GmemRef  # [1, S, H]; H and Hv are multiples of 64 here
    v: GmemRef
    rows: GmemRef  # int32[R, n], n a multiple of TILE; -1 for none
    steps: GmemRef  # int32[R]: tiles of a list that name rows
    lse: GmemRef  # float32[R, heads], in log2 units; inf where a head sees nothing
    delta: GmemRef
    dk: GmemRef  # float32[S, H], added to
    dv: GmemRef
    dq: Any = None  # like q, written


class ListSmem(NamedTuple):
    q: Panels  # [consumer, rows, ..]
    do: Panels
    k: tuple[SmemRef, ...]  # a panel each: [consumer, STAGES, TILE, WIDTH]
    v: tuple[SmemRef, ...]
    ds: SmemRef  # [consumer, TILE, MOST_HEADS]
    q_ready: Barrier  # one a consumer
    q_free: Barrier
    ready: Barrier  # [consumer * STAGES]
    free: Barrier


def limit(problem: DecodeProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    remedy = "leave implementation=None"
    if problem.dtype not in ("bfloat16", "float16"):
        return Limit(f"it takes bfloat16 and float16, not {problem.dtype}", remedy)
    if max(problem.head_dim, problem.v_head_dim) > 128:
        return Limit("gradients of lists at head dims above 128", remedy)
    if problem.q_heads > MOST_HEADS:
        return Limit(f"gradients of more than {MOST_HEADS} query heads a kv head", remedy)
    rows = problem.q_len
    if (
        max(rows * ListPlan(problem, Config()).entries, rows * MOST_HEADS, problem.capacities[0])
        >= 2**31
    ):
        return Limit("it counts entries of lists in 32 bits", "split the rows over several calls")
    return None


def _widths(problem: DecodeProblem) -> tuple[int, int]:
    """Columns of k and of v in whole panels."""
    dims = problem.head_dim, problem.v_head_dim
    return tuple(tma_operands.round_up(dim, WIDTH) for dim in dims)  # type: ignore[return-value]


def _scratch(problem: DecodeProblem) -> ListSmem:
    dtype, (qk, v) = jnp.dtype(problem.dtype), _widths(problem)
    counts = qk // WIDTH, v // WIDTH
    rings: dict[str, Any] = {"num_barriers": WARPGROUPS * STAGES}

    def rows(count: int) -> Panels:
        return tuple(panels.scratch((WARPGROUPS, TILE), dtype, WIDTH) for _ in range(count))

    def ring(count: int) -> tuple[SmemRef, ...]:
        shape = WARPGROUPS, STAGES, TILE, WIDTH
        return tuple(mosaic.swizzled(shape, dtype, 2 * WIDTH) for _ in range(count))

    return ListSmem(
        q=rows(counts[0]),
        do=rows(counts[1]),
        k=ring(counts[0]),
        v=ring(counts[1]),
        ds=mosaic.swizzled((WARPGROUPS, TILE, MOST_HEADS), dtype, 2 * MOST_HEADS),
        q_ready=plgpu.Barrier(num_barriers=WARPGROUPS, num_arrivals=sum(counts)),
        q_free=plgpu.Barrier(num_barriers=WARPGROUPS),
        ready=plgpu.Barrier(**rings),
        free=plgpu.Barrier(**rings),
    )


def smem_bytes(problem: DecodeProblem, config: Config) -> int:
    del config
    return mosaic.bytes_of(_scratch(problem)) + 1024


# ---- query rows ---------------------------------------------------------------------------------


class QueryRow(NamedTuple):
    """A query row of a consumer: its number, and the tiles of its list."""

    number: Index
    exists: Index
    steps: Index

    @classmethod
    def of(cls, ctx: KernelContext, block: Index, i: Index, wg: Index) -> "QueryRow":
        """The i-th one of a consumer."""
        rows, grid = ctx.plan.problem.q_len, _grid(ctx.plan)
        place = WARPGROUPS * (block + i * grid) + wg
        exists = place < rows
        number = _in_order_of_heads(ctx.plan.problem, jnp.minimum(place, rows - 1))
        return cls(number, exists, jnp.where(exists, ctx.refs.steps[number], 0))


def _in_order_of_heads(problem: DecodeProblem, place: Index) -> Index:
    """The number of the query row at a place in the order in which blocks take them: one kv head
    after the other, whose gradients L2 then holds.
    """
    heads = problem.kv_heads
    if heads == 1:
        return place
    each = jnp.int32(problem.q_len // heads)
    return lax.rem(place, each) * heads + lax.div(place, each)


def _grid(plan: ListPlan) -> int:
    return min(plan.config.grid, pl.cdiv(plan.problem.q_len, WARPGROUPS))


def _rounds(plan: ListPlan) -> int:
    """Query rows that a consumer takes, at most."""
    return pl.cdiv(plan.problem.q_len, WARPGROUPS * _grid(plan))


# ---- the producer -------------------------------------------------------------------------------


def _produce(ctx: KernelContext, block: Index) -> None:
    """Gathers the tiles of the lists of both consumers, in turn, and loads q and dO."""

    def one_round(i: Index, counts: tuple[Index, ...]) -> tuple[Index, ...]:
        rows = [QueryRow.of(ctx, block, i, jnp.int32(wg)) for wg in range(WARPGROUPS)]
        for wg, row in enumerate(rows):
            pl.when(row.exists)(functools.partial(_load_queries, ctx, row, wg, i))

        def step(n: Index, counts: tuple[Index, ...]) -> tuple[Index, ...]:
            for wg, row in enumerate(rows):
                pl.when(n < row.steps)(functools.partial(_gather, ctx, row, wg, n, counts[wg]))
            return tuple(
                count + (n < row.steps).astype(jnp.int32)
                for count, row in zip(counts, rows, strict=True)
            )

        most = functools.reduce(jnp.maximum, [row.steps for row in rows])
        return lax.fori_loop(0, most, step, counts)

    lax.fori_loop(0, _rounds(ctx.plan), one_round, (jnp.int32(0),) * WARPGROUPS)


def _load_queries(ctx: KernelContext, row: QueryRow, wg: int, i: Index) -> None:
    refs, smem = ctx.refs, ctx.smem
    pl.when(i > 0)(lambda: plgpu.barrier_wait(smem.q_free.at[wg]))
    heads = pl.ds(0 * row.number, MOST_HEADS)
    for source, to in ((refs.q, smem.q), (refs.do, smem.do)):
        panels.load(source, (row.number, heads, 0), to, wg, smem.q_ready.at[wg])


def _gather(ctx: KernelContext, row: QueryRow, wg: int, n: Index, count: Index) -> None:
    """Tile n of a list, the `count`-th of the consumer."""
    refs, smem = ctx.refs, ctx.smem
    slot = lax.rem(count, jnp.int32(STAGES))
    barrier = wg * STAGES + slot
    program = functools.partial(thread_program.in_context, _row_number, ctx.plan)
    numbers = [
        threads.each_thread(program(n=part), refs.rows, (row.number, n * TILE), returns="each")
        for part in range(gathered_rows.EACH)
    ]
    pl.when(count >= STAGES)(lambda: plgpu.barrier_wait(smem.free.at[barrier]))
    for source, parts in ((refs.k, smem.k), (refs.v, smem.v)):
        layer = gathered_rows.Layer(jnp.int32(0), source.shape[1])
        for part, to in enumerate(parts):
            gathered_rows.copy(source, layer, numbers, part * WIDTH, to, (jnp.int32(wg), slot))
    threads.each_thread(lambda thread, *_: thread.wait_copies(0), (), ())
    plgpu.commit_smem()
    plgpu.barrier_arrive(smem.ready.at[barrier])


def _row_number(ctx: ThreadContext, n: int) -> Index:
    """The entry of a list that a thread copies a part of."""
    thread, rows, (row, first), plan = ctx
    entry = row * plan.entries + first + gathered_rows.row_of(thread, n)
    return thread.load(rows, entry, 4)


# ---- the consumers ------------------------------------------------------------------------------


class Tiles(NamedTuple):
    """Operands of a step, in panels."""

    k: tuple[SmemRef, ...]
    v: tuple[SmemRef, ...]
    q: tuple[SmemRef, ...]
    do: tuple[SmemRef, ...]
    ds: SmemRef


class Statistics(NamedTuple):
    """One number a head, float32[heads]."""

    lse: RegisterTile
    delta: RegisterTile


def _consume(ctx: KernelContext, block: Index, wg: Index) -> None:
    plan, refs, smem = ctx
    widths = [WIDTH] * len(smem.k)

    def one_round(i: Index, count: Index) -> Index:
        row = QueryRow.of(ctx, block, i, wg)

        def attend(*dq: RegisterTile) -> tuple[Index, list[RegisterTile]]:
            of_row = (mosaic.load(x.at[row.number], mosaic.COLUMN) for x in (refs.lse, refs.delta))
            step = functools.partial(_step, ctx, row, wg, Statistics(*of_row), dq)
            end = lax.fori_loop(0, row.steps, step, count)
            return end, [acc[...] for acc in dq]

        def some(count: Index) -> Index:
            del count
            plgpu.barrier_wait(smem.q_ready.at[wg])
            accs = [plgpu.ACC((TILE, width), jnp.float32) for width in widths]
            end, parts = pl.run_scoped(attend, *accs)
            for part, to in zip(parts, panels.tiles(smem.q, wg), strict=True):
                to[...] = (part * plan.problem.scale).astype(to.dtype)
            plgpu.commit_smem()
            heads = pl.ds(0 * row.number, MOST_HEADS)
            panels.store(smem.q, wg, refs.dq, (row.number, heads, 0))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(smem.q_free.at[wg])
            return end

        return lax.cond(row.exists, some, lambda count: count, count)

    lax.fori_loop(0, _rounds(plan), one_round, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _step(
    ctx: KernelContext,
    row: QueryRow,
    wg: Index,
    stats: Statistics,
    dq: tuple[RegisterTile, ...],
    n: Index,
    count: Index,
) -> Index:
    """Adds to dQ, in accumulators, and to dK and dV of the rows of tile n of a list."""
    plan, refs, smem = ctx
    slot = lax.rem(count, jnp.int32(STAGES))
    barrier = wg * STAGES + slot
    k, v = (tuple(panel.at[wg, slot] for panel in x) for x in (smem.k, smem.v))
    tiles = Tiles(k, v, panels.tiles(smem.q, wg), panels.tiles(smem.do, wg), smem.ds.at[wg])
    rows = mosaic.load(refs.rows.at[row.number, pl.ds(n * TILE, TILE)], mosaic.ROW)
    plgpu.barrier_wait(smem.ready.at[barrier])
    p, ds = _p_and_ds(plan, tiles, rows, stats)
    tiles.ds[...] = ds
    plgpu.commit_smem()
    _add_rows(refs.dv, rows, p, tiles.do)
    for acc, keys in zip(dq, k, strict=True):
        plgpu.wgmma(acc, tiles.ds.transpose((1, 0)), keys)
    _add_rows(refs.dk, rows, ds, tiles.q)
    plgpu.wgmma_wait(0)
    plgpu.commit_smem()  # all warps have read dS
    plgpu.barrier_arrive(smem.free.at[barrier])
    return count + 1


def _p_and_ds(
    plan: ListPlan, tiles: Tiles, rows: RegisterTile, stats: Statistics
) -> tuple[RegisterTile, RegisterTile]:
    """P^T and dS^T of a tile [TILE, MOST_HEADS], in 16 bits, zeros past the heads."""
    problem, shape = plan.problem, (TILE, plan.heads)
    q, do = (tuple(x.at[pl.ds(0, plan.heads)] for x in each) for each in (tiles.q, tiles.do))

    def body(s_acc: RegisterTile, dp_acc: RegisterTile) -> tuple[RegisterTile, RegisterTile]:
        wgmma.score_panels(s_acc, tiles.k, q)
        wgmma.score_panels(dp_acc, tiles.v, do)
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=len(do))
        return s, plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)

    def of_head(x: RegisterTile) -> RegisterTile:
        return lax.broadcast_in_dim(x, shape, [1])

    s, dp = pl.run_scoped(body, *[plgpu.ACC(shape, jnp.float32)] * 2)
    s, slope = s * problem.scale, None
    if problem.softcap is not None:
        s = softmax.softcap(s, problem.softcap)
        slope = 1.0 - s * s * (1.0 / problem.softcap**2)
    s = jnp.where(mosaic.broadcast_rows(rows >= 0, shape), softmax.to_log2(s), -jnp.inf)
    p = jnp.exp2(s - of_head(stats.lse))
    ds = tile_logits.d_scores(p, dp, of_head(stats.delta), slope)
    return _whole(p, problem.dtype), _whole(ds, problem.dtype)


def _whole(x: RegisterTile, dtype: str) -> RegisterTile:
    """A tile in 16 bits, with zeros up to MOST_HEADS columns."""
    x = x.astype(dtype)
    if x.shape[1] == MOST_HEADS:
        return x
    nothing = mosaic.filled((TILE, MOST_HEADS - x.shape[1]), 0, x.dtype)
    return lax.concatenate([x, nothing], 1)


def _add_rows(
    to: GmemRef, rows: RegisterTile, left: RegisterTile, right: tuple[SmemRef, ...]
) -> None:
    """Adds left @ right to the rows that a tile of a list names, one panel of columns after the
    other: registers hold no more beside dQ.
    """
    for n, values in enumerate(right):
        part = wgmma.matmul((TILE, WIDTH), left, (values,), issue=_multiply)
        row_sums.add(to, rows, n * WIDTH, part)


def _multiply(acc: RegisterTile, left: RegisterTile, right: tuple[SmemRef, ...]) -> None:
    wgmma.value_panels((acc,), left, right)


# ---- the kernel and its call --------------------------------------------------------------------


def _kernel(refs: ListRefs, dq: GmemRef, smem: ListSmem, *, plan: ListPlan) -> None:
    ctx = KernelContext(plan, refs._replace(dq=dq), smem)
    block, wg = lax.axis_index("block"), lax.axis_index("wg")
    produce = functools.partial(_produce, ctx, block)
    consume = functools.partial(_consume, ctx, block, wg)
    ours, loader = REGISTERS
    mosaic.share_registers(wg, WARPGROUPS, produce, consume, ours, loader)


def run(
    residuals: ListedResiduals, problem: DecodeProblem, config: Config
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq [R, heads, H], and dk and dv of all rows [S, ..]."""
    q, k, v, rows, out, lse, d_out, d_lse = residuals
    plan, dtype, width = ListPlan(problem, config), jnp.dtype(problem.dtype), _widths(problem)
    rows = _columns(rows, plan.entries, -1)
    entry = jnp.arange(TILE, rows.shape[1] + TILE, dtype=jnp.int32) // TILE
    steps = jnp.where(rows >= 0, entry[None], 0).max(axis=1)
    # Everything is 0 for a head that sees no key.
    empty = lse == -jnp.inf
    delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - d_lse
    lse, delta = jnp.where(empty, jnp.inf, softmax.to_log2(lse)), jnp.where(empty, 0, delta)
    d_out = jnp.where(empty[..., None], 0, d_out).astype(dtype)
    sizes = [(len(x), n) for x, n in zip((k, v), width, strict=True)]
    sums = [jax.new_ref(jnp.zeros(size, jnp.float32)) for size in sizes]
    refs = ListRefs(
        q=_columns(q, width[0])[:, :, None],
        do=_columns(d_out, width[1])[:, :, None],
        k=_columns(k, width[0])[None],
        v=_columns(v, width[1])[None],
        rows=rows,
        steps=steps,
        lse=_columns(lse, plan.heads, jnp.inf),
        delta=_columns(delta, plan.heads),
        dk=sums[0],
        dv=sums[1],
    )
    kernel = mosaic.persistent_kernel(
        functools.partial(_kernel, plan=plan),
        "listed_gradients_sm90",
        jax.ShapeDtypeStruct(refs.q.shape, dtype),
        _scratch(problem),
        (_grid(plan), WARPGROUPS + 1),
    )
    dq = kernel(refs)[:, :, 0, : problem.head_dim]
    dk, dv = (jax.freeze(x) for x in sums)
    dk, dv = dk[:, : problem.head_dim] * problem.scale, dv[:, : problem.v_head_dim]
    return dq, dk.astype(dtype), dv.astype(dtype)


def _columns(x: jax.Array, count: int, fill: float = 0) -> jax.Array:
    """`x`, whose last axis is padded to `count` columns."""
    pads = ((0, 0),) * (x.ndim - 1) + ((0, count - x.shape[-1]),)
    return jnp.pad(x, pads, constant_values=fill) if count > x.shape[-1] else x


KERNEL = Kernel(Config, limit, smem_bytes, run)
