"""The Hopper backward of short sequences: one launch makes dq, dk and dv, each head by one
warpgroup. Every array is read once and every gradient written once; nothing is added up in global
memory, so bits repeat.

Grid: a block is one warpgroup with a head of at most `TILES` tiles of 64 queries and as many of 64
keys. Several blocks share a multiprocessor: one computes while others wait for memory.

Kv tiles come one after the other, each with all query tiles that meet it. dQ of all query tiles
stays in registers throughout, dK and dV for one kv tile. Where that is too much for registers there
is one pair of tiles, whose gradients are made one by one. Tiles of scores have keys as rows, see
`key_tiles`. Rows past the ends are zeros in shared memory and are not stored (`panels`).

Batch rows of at most 32 queries share a tile, as in the forward (`flash_fwd.batch_rows`).

Shared memory:
  q, do [query tiles]  dq is stored from q
  k, v [kv tiles]      dk and dv are stored from the same places
  ds                   of one pair of tiles: the left operand of its dQ
  lse, delta           of all query rows, see `statistics`
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
from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import tile_logits, tiles
from pallas_attn.kernels.attention.logits import LogitTile
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext, Span
from pallas_attn.kernels.flash_bwd import epilogue, operands, statistics
from pallas_attn.kernels.flash_bwd.operands import (
    BackwardRefs,
    Gradients,
    KeyGradients,
    Residuals,
)
from pallas_attn.kernels.flash_bwd.plan import KeyPlan, RowFormats
from pallas_attn.kernels.flash_bwd.statistics import QueryTileAt, StatisticsRefs
from pallas_attn.kernels.flash_bwd.work_order import KeyTiling, WorkOrder
from pallas_attn.kernels.flash_fwd import batch_rows
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.config import OneForAll
from pallas_attn.kernels.lang.mosaic import BARRIERS
from pallas_attn.kernels.lang.types import (
    Barrier,
    GmemRef,
    Index,
    RegisterTile,
    RegisterTiles,
    SmemRef,
)
from pallas_attn.kernels.mma import wgmma

TILES = 2  # most query tiles, and most kv tiles
SUMS = 256  # columns of float32 that a warpgroup holds beside S and dP: 128 registers a thread


@dataclasses.dataclass(frozen=True)
class Config(OneForAll):
    """Nothing to tune."""


def limit(problem: AttentionProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    if takes(problem):
        return tiles.limit(problem)
    return Limit(
        f"it takes 16-bit floats and up to {TILES * ROWS} queries and keys of heads that share no "
        "keys, whose gradients fit in the registers of a warpgroup, with sinks and no other array",
        "leave implementation=None",
    )


def takes(problem: AttentionProblem) -> bool:
    """Whether this kernel serves a problem."""
    q_tiles, kv_tiles = (pl.cdiv(n, ROWS) for n in (problem.q_len, problem.kv_len))
    within = 1 <= q_tiles <= TILES and 1 <= kv_tiles <= TILES
    return within and (holds_all(problem) or _is_pair(problem)) and is_plain(problem)


def holds_all(problem: AttentionProblem) -> bool:
    """Whether registers hold all sums at once."""
    q_tiles = pl.cdiv(problem.q_len, ROWS)
    qk, v = (sum(panels.widths(n)) for n in (problem.head_dim, problem.v_head_dim))
    return (q_tiles + 1) * qk + v <= SUMS


def _is_pair(problem: AttentionProblem) -> bool:
    """Whether a head is one pair of tiles, whose sums registers hold one after the other."""
    qk, v = (sum(panels.widths(n)) for n in (problem.head_dim, problem.v_head_dim))
    return max(problem.q_len, problem.kv_len) <= ROWS and 2 * qk <= SUMS and 2 * v <= SUMS


def is_plain(problem: AttentionProblem) -> bool:
    """Whether it is known at trace time which keys each query of a head sees, and no other head
    shares them.
    """
    return (
        problem.group == problem.share == problem.zigzag == 1
        and set(problem.arrays) <= {"sinks"}
        and not problem.mask.arrives
        and problem.dtype != "float32"
        and problem.mask_program is None
        and problem.score_program is None
    )


class ShortSmem(NamedTuple):
    q: panels.Panels
    do: panels.Panels
    k: panels.Panels
    v: panels.Panels
    ds: tuple[SmemRef, ...]  # a copy for each swizzle of k: both operands of a matmul have one
    lse: SmemRef
    delta: SmemRef
    q_ready: Barrier
    do_ready: Barrier
    k_ready: Barrier
    v_ready: Barrier


def scratch(plan: KeyPlan) -> ShortSmem:
    problem, tiling, dtype = plan.problem, plan.tiling, jnp.dtype(plan.problem.dtype)
    qk, v = panels.widths(problem.head_dim), panels.widths(problem.v_head_dim)

    def rows(tiles: int, widths: tuple[int, ...]) -> panels.Panels:
        return tuple(panels.scratch((tiles, ROWS), dtype, width) for width in widths)

    def barriers(tiles: int, widths: tuple[int, ...]) -> Barrier:
        return plgpu.Barrier(num_arrivals=len(widths), num_barriers=tiles)

    q_tiles, kv_tiles = tiling.q_tiles, tiling.kv_tiles
    return ShortSmem(
        q=rows(q_tiles, qk),
        do=rows(q_tiles, v),
        k=rows(kv_tiles, qk),
        v=rows(kv_tiles, v),
        ds=tuple(mosaic.swizzled((ROWS, ROWS), dtype, 2 * width) for width in sorted(set(qk))),
        lse=plgpu.SMEM((q_tiles, ROWS), jnp.float32),
        delta=plgpu.SMEM((q_tiles, ROWS), jnp.float32),
        q_ready=barriers(q_tiles, qk),
        do_ready=barriers(q_tiles, v),
        k_ready=barriers(kv_tiles, qk),
        v_ready=barriers(kv_tiles, v),
    )


def plan_of(problem: AttentionProblem, config: Config) -> KeyPlan:
    """The plan for as many batch rows as share a tile, with their mask."""
    count, rows_apart = batch_rows.most_joined(problem), None
    if count > 1:
        problem, rows_apart = batch_rows.joined(problem, count)
    order, form = WorkOrder(KeyTiling(problem, ROWS, ROWS)), RowFormats.of(problem, ROWS)
    return KeyPlan(problem, config, order, form, rows_apart=rows_apart)


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    """Shared memory of a block."""
    return mosaic.bytes_of(scratch(plan_of(problem, config))) + BARRIERS


class Head(NamedTuple):
    batch: Index
    head: Index

    def rows(self, t: Any) -> tuple[Any, Any, Index]:
        """Tile t in global memory. JAX refuses to slice past an end that it knows, see
        `mosaic.columns`.
        """
        return self.batch, pl.ds(t * ROWS + 0 * self.head, ROWS), self.head


# ---- loads and stores ---------------------------------------------------------------------------


def _load(ctx: KernelContext, head: Head) -> None:
    """Asks for all tiles, those of the first pair first, and computes the row statistics."""
    plan, refs, smem = ctx
    tiling = plan.tiling

    def load(names: tuple[str, ...], t: int) -> None:
        for name in names:
            to, ready = getattr(smem, name), getattr(smem, f"{name}_ready")
            panels.load(getattr(refs, name), head.rows(t), to, t, ready.at[t])

    load(("k", "q", "v", "do"), 0)
    for t in range(1, tiling.q_tiles):
        load(("q", "do"), t)
    for t in range(1, tiling.kv_tiles):
        load(("k", "v"), t)
    memory = StatisticsRefs(refs.out, refs.do, refs.lse, refs.d_lse, smem.lse, smem.delta)
    for t in range(tiling.q_tiles):
        at = QueryTileAt(*head, jnp.int32(t), jnp.int32(t))
        statistics.write(plan.problem, memory, at)
    plgpu.commit_smem()


def _store(head: Head, *gradients: tuple[epilogue.Staged, GmemRef]) -> None:
    """Gradients of tiles, whose numbers are their places in shared memory, and where they go."""
    plgpu.commit_smem()  # no warp multiplies what lies there any more
    epilogue.write([staged for staged, _ in gradients])
    for staged, to in gradients:
        epilogue.store([staged], to, head.rows(staged.at))


# ---- the mainloop -------------------------------------------------------------------------------


class Pair(NamedTuple):
    """Kv tile j and query tile t of a head."""

    head: Head
    j: int
    t: int

    @property
    def is_first_of_queries(self) -> bool:
        return self.j == 0

    @property
    def is_first_of_keys(self) -> bool:
        return self.t == 0


def _spans(plan: KeyPlan) -> list[Span]:
    """The query tiles of each kv tile."""
    return plan.tiling.static_spans(plan.problem.q_offset)


def _kv_tile(
    ctx: KernelContext, outs: Gradients, head: Head, j: int, dqs: RegisterTiles, *sums: RegisterTile
) -> None:
    """Kv tile j with all query tiles: adds to `dqs`, and stores its dK and dV."""
    plan, _, smem = ctx
    count, span = len(smem.k), _spans(plan)[j]
    grads = KeyGradients(sums[:count], sums[count:])
    for t in range(plan.tiling.q_tiles):
        pair = Pair(head, j, t)
        if not span.lo <= t < span.hi:
            _wait(smem, pair, ("k", "q"))
            _wait(smem, pair, ("v", "do"))
            continue
        add = functools.partial(_add_pair, ctx, pair, Gradients(dqs[t], *grads))
        pl.run_scoped(add, *(plgpu.ACC((ROWS, ROWS), jnp.float32) for _ in range(2)))
    dk = epilogue.Staged([acc[...] * plan.problem.scale for acc in grads.dk], smem.k, j)
    dv = epilogue.Staged([acc[...] for acc in grads.dv], smem.v, j)
    _store(head, (dk, outs.dk), (dv, outs.dv))


def _wait(smem: ShortSmem, pair: Pair, names: tuple[str, str]) -> None:
    """Waits for the keys and the queries of a pair that no pair before has waited for."""
    keys, queries = names
    if pair.is_first_of_keys:
        plgpu.barrier_wait(getattr(smem, f"{keys}_ready").at[pair.j])
    if pair.is_first_of_queries:
        plgpu.barrier_wait(getattr(smem, f"{queries}_ready").at[pair.t])


def _add_pair(
    ctx: KernelContext, pair: Pair, sums: Gradients, s_acc: RegisterTile, dp_acc: RegisterTile
) -> None:
    _, ds = _add_dv(ctx, pair, sums.dv, s_acc, dp_acc)
    _add_dk(ctx, pair, ds, sums.dk)
    _add_dq(ctx, pair, sums.dq)


def _add_dv(
    ctx: KernelContext, pair: Pair, dv: RegisterTiles, s_acc: RegisterTile, dp_acc: RegisterTile
) -> tuple[RegisterTile, RegisterTile]:
    """P, and dS, which is in shared memory, too. Adds to dV if there are accumulators of it."""
    plan, _, smem = ctx
    problem, (head, j, t) = plan.problem, pair
    dtype, span = jnp.dtype(problem.dtype), _spans(plan)[j]
    q, do = panels.tiles(smem.q, t), panels.tiles(smem.do, t)
    k, v = panels.tiles(smem.k, j), panels.tiles(smem.v, j)
    _wait(smem, pair, ("k", "q"))
    wgmma.score_panels(s_acc, k, q)
    _wait(smem, pair, ("v", "do"))
    wgmma.score_panels(dp_acc, v, do)
    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=len(v))
    mask = plan.rows_apart or problem.mask
    place = LogitTile(*head, t * ROWS, j * ROWS, problem.q_offset, problem.kv_len, mask, q_axis=1)
    lse = mosaic.load(smem.lse.at[t], mosaic.COLUMN)
    masked = plan.rows_apart is not None or not span.full_lo <= t < span.full_hi
    p, slope = tile_logits.probabilities(ctx, place, s, lse, masked)
    weights = p.astype(dtype)
    if dv:
        wgmma.value_panels(dv, weights, do)
    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=len(dv))
    delta = mosaic.load_vector(smem.delta.at[t], mosaic.TILE, 1, dp.shape)
    ds = tile_logits.d_scores(p, dp, delta, slope).astype(dtype)
    plgpu.commit_smem()  # all warps have read the dS of the pair before
    for copy in smem.ds:
        copy[...] = ds
    plgpu.commit_smem()
    return weights, ds


def _add_dk(ctx: KernelContext, pair: Pair, ds: RegisterTile, dk: RegisterTiles) -> None:
    wgmma.value_panels(dk, ds, panels.tiles(ctx.smem.q, pair.t))


def _add_dq(ctx: KernelContext, pair: Pair, dq: RegisterTiles) -> None:
    k = panels.tiles(ctx.smem.k, pair.j)
    swizzles = sorted({right.shape[1] for right in k})
    for acc, right in zip(dq, k, strict=True):
        left = ctx.smem.ds[swizzles.index(right.shape[1])]
        plgpu.wgmma(acc, left.transpose((1, 0)), right)


def _pair_alone(ctx: KernelContext, outs: Gradients, head: Head) -> None:
    """The only pair of a head, one gradient after the other."""
    plan, smem, pair = ctx.plan, ctx.smem, Pair(head, 0, 0)
    scale, dtype = plan.problem.scale, jnp.dtype(plan.problem.dtype)

    def add_dv(*dv: RegisterTile) -> None:
        wgmma.value_panels(dv, p, panels.tiles(smem.do, 0))
        _store(head, (epilogue.Staged([acc[...] for acc in dv], smem.v, 0), outs.dv))

    def make_dk(*dk: RegisterTile) -> list[RegisterTile]:
        _add_dk(ctx, pair, ds, dk)
        return [(acc[...] * scale).astype(dtype) for acc in dk]

    def add_dq(*dq: RegisterTile) -> None:
        _add_dq(ctx, pair, dq)
        staged = epilogue.Staged([acc[...] * scale for acc in dq], smem.q, 0)
        _store(head, (epilogue.Staged(dk, smem.k, 0), outs.dk), (staged, outs.dq))

    qk, v = (panels.widths(n) for n in (plan.problem.head_dim, plan.problem.v_head_dim))
    scores = functools.partial(_add_dv, ctx, pair, ())
    p, ds = pl.run_scoped(scores, *_accumulators((ROWS, ROWS)))
    pl.run_scoped(add_dv, *_accumulators(v))
    dk = pl.run_scoped(make_dk, *_accumulators(qk))
    pl.run_scoped(add_dq, *_accumulators(qk))


def _accumulators(widths: tuple[int, ...]) -> list[Any]:
    return [plgpu.ACC((ROWS, width), jnp.float32) for width in widths]


# ---- the kernel and its call --------------------------------------------------------------------


def _kernel(refs: BackwardRefs, *rest: GmemRef, plan: KeyPlan) -> None:
    *written, smem = rest
    outs, ctx = Gradients(*written), KernelContext(plan, refs, smem)
    problem, tiling = plan.problem, plan.tiling
    row, heads = lax.axis_index("block"), jnp.int32(problem.q_heads)
    head = Head(lax.div(row, heads), lax.rem(row, heads))
    _load(ctx, head)
    qk, v = panels.widths(problem.head_dim), panels.widths(problem.v_head_dim)

    def all_tiles(*sums: RegisterTile) -> None:
        dqs = [sums[n : n + len(qk)] for n in range(0, len(sums), len(qk))]
        for j in range(tiling.kv_tiles):
            kv_tile = functools.partial(_kv_tile, ctx, outs, head, j, dqs)
            pl.run_scoped(kv_tile, *_accumulators(qk), *_accumulators(v))
        values = [[acc[...] * problem.scale for acc in accs] for accs in dqs]
        _store(head, *[(epilogue.Staged(x, smem.q, t), outs.dq) for t, x in enumerate(values)])

    if holds_all(problem):
        pl.run_scoped(all_tiles, *_accumulators(qk * tiling.q_tiles))
    else:
        _pair_alone(ctx, outs, head)
    plgpu.wait_smem_to_gmem(0)


def run(residuals: Residuals, problem: AttentionProblem, config: Config) -> AttentionInputs:
    """(inputs, out, lse, d_out, d_lse) -> the cotangents of inputs. Sinks alone need the statistics
    of rows in global memory.
    """
    residuals, plan = Residuals(*residuals), plan_of(problem, config)
    if residuals.inputs.sinks is None:
        return AttentionInputs(*_dq_dk_dv(plan, residuals))
    stats, _ = statistics.of_rows(problem, residuals)
    return operands.cotangents(residuals, stats, _dq_dk_dv(plan, residuals), {})


def _dq_dk_dv(plan: KeyPlan, residuals: Residuals) -> Gradients:
    """dq, dk and dv."""
    shapes = residuals.inputs[:3]
    if plan.rows_apart is not None:
        residuals = _joined_residuals(residuals, plan.problem.q_len // plan.rows_apart.rows)
    inputs, out, lse, d_out, d_lse = residuals
    refs = BackwardRefs(*inputs[:3], d_out, out, lse, d_lse)
    body, size = functools.partial(_kernel, plan=plan), (plan.order.heads, 1)
    grads = operands.launched(body, "flash_bwd_short_sm90", refs, scratch(plan), size)
    return Gradients(*(x.reshape(of.shape) for x, of in zip(grads, shapes, strict=True)))


def _joined_residuals(residuals: Residuals, count: int) -> Residuals:
    """The residuals of `count` batch rows each as of one."""

    def rows(x: jax.Array) -> jax.Array:
        return x.reshape(-1, count * x.shape[1], *x.shape[2:])

    def by_row(x: jax.Array) -> jax.Array:  # [B, N, T]
        batch, heads, length = x.shape
        x = jnp.swapaxes(x.reshape(-1, count, heads, length), 1, 2)
        return x.reshape(batch // count, heads, count * length)

    inputs, out, lse, d_out, d_lse = residuals
    inputs = batch_rows.joined_inputs(inputs, count)
    return Residuals(inputs, rows(out), by_row(lse), rows(d_out), by_row(d_lse))


KERNEL = Kernel(Config, limit, smem_bytes, run)
