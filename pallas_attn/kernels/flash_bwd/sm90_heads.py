"""The Hopper backward of heads of up to 256 queries and keys, head dims up to 64: one launch makes
dq, dk and dv. Every array is read once and every gradient written once; nothing is added up in
global memory, so bits repeat.

Grid: one block a multiprocessor, which takes heads by turns. Two consumer warpgroups have 64 of the
128 keys of a round each; one producer warpgroup loads, and computes the row statistics of the next
head. A round's dK and dV stay in registers, and dQ of all query tiles as long as the head takes.

A unit is two query tiles of 64, taken one after the other: scores, probabilities and dS of a
warpgroup's keys, with keys as rows (see `key_tiles`). Both warpgroups put their dS in shared
memory, and of a unit's dQ each makes one query tile from the dS of both: in the next unit, under
its scores, so that neither waits for the other.

Shared memory, and who owns it when:
  q, do [query tiles]   loaded when both consumers have released those of the head before
  k, v [round, warpgroup]  likewise; dv is stored from v
  ds [2, warpgroup, query tile of the unit]  by units in turn: `ds_ready` says that both warpgroups
                        have written theirs, and so that both have done with the unit before. dq is
                        stored from there
  dk [warpgroup]        on its way to global memory
  lse, delta [2]        of the query tiles of a head, by heads in turn
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionProblem
from pallas_attn.kernels.attention import score_mod, tma_operands
from pallas_attn.kernels.attention.logits import LogitTile
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.flash_bwd import sm90_short, tile_statistics
from pallas_attn.kernels.flash_bwd.key_tiles import per_column
from pallas_attn.kernels.flash_bwd.operands import Gradients, KeyGradients, Residuals
from pallas_attn.kernels.flash_bwd.plan import KeyPlan
from pallas_attn.kernels.flash_bwd.producer import load_rows, store_rows
from pallas_attn.kernels.flash_bwd.sm90_short import ShortRefs
from pallas_attn.kernels.flash_bwd.tile_statistics import QueryTileAt, StatisticsRefs
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.panels import Panels
from pallas_attn.kernels.lang.types import Barrier, Index, Predicate, RegisterTile, SmemRef

WARPGROUPS = 2  # consumers
KEYS = WARPGROUPS * ROWS  # of a round
MOST = 2 * KEYS  # queries, and keys
HALVES = 2  # query tiles of a unit


def takes(problem: AttentionProblem) -> bool:
    """Whether this kernel serves a problem."""
    sizes = problem.q_len, problem.kv_len
    return (
        min(sizes) > 0
        and KEYS < max(sizes) <= MOST
        and max(problem.head_dim, problem.v_head_dim) <= ROWS
        and sm90_short.is_plain(problem)
    )


class HeadsSmem(NamedTuple):
    q: Panels
    do: Panels
    k: Panels
    v: Panels
    ds: Panels
    dk: Panels
    lse: SmemRef
    delta: SmemRef
    q_ready: Barrier
    do_ready: Barrier
    k_ready: Barrier
    v_ready: Barrier
    q_free: Barrier
    kv_free: Barrier
    ds_ready: Barrier
    stats_ready: Barrier
    stats_free: Barrier


def scratch(plan: KeyPlan) -> HeadsSmem:
    problem, dtype, barrier = plan.problem, plan.problem.dtype, plgpu.Barrier
    qk, v = (tma_operands.in_panels(dtype, n) for n in (problem.head_dim, problem.v_head_dim))
    rounds, tiles = plan.tiling.kv_tiles, HALVES * units(plan)
    by_round = (rounds, WARPGROUPS, ROWS)
    stats = plgpu.SMEM((2 * tiles, ROWS), jnp.float32)
    return HeadsSmem(
        q=qk.scratch(tiles, ROWS),
        do=v.scratch(tiles, ROWS),
        k=qk.scratch(*by_round),
        v=v.scratch(*by_round),
        ds=(panels.scratch((2, WARPGROUPS, HALVES, ROWS), dtype, ROWS),),
        dk=qk.scratch(WARPGROUPS, ROWS),
        lse=stats,
        delta=stats,
        q_ready=barrier(num_barriers=tiles),
        do_ready=barrier(num_barriers=tiles),
        k_ready=barrier(num_barriers=rounds, num_arrivals=WARPGROUPS),
        v_ready=barrier(num_barriers=rounds, num_arrivals=WARPGROUPS),
        q_free=barrier(num_barriers=tiles, num_arrivals=WARPGROUPS),
        kv_free=barrier(num_barriers=rounds, num_arrivals=WARPGROUPS),
        ds_ready=barrier(num_barriers=2, num_arrivals=WARPGROUPS),
        stats_ready=barrier(num_barriers=2),
        stats_free=barrier(num_barriers=2, num_arrivals=WARPGROUPS),
    )


def buffer_bytes(plan: KeyPlan) -> int:
    return mosaic.bytes_of(scratch(plan))


def units(plan: KeyPlan) -> int:
    """Units of a round."""
    return pl.cdiv(plan.tiling.q_tiles, HALVES)


class Head(NamedTuple):
    """A head that a block takes."""

    batch: Index
    head: Index
    n: Index  # its number among the block's

    def at(self, row: Index) -> tuple[Index, Index, Index]:
        """A row in global memory, which JAX does not know to lie past the end."""
        return self.batch, self.head, row + 0 * self.n


def grid_of(plan: KeyPlan) -> int:
    """Blocks that are launched."""
    heads = plan.order.heads
    return min(plan.config.grid or heads, heads)


def _head(plan: KeyPlan, block: Index, n: Index) -> Head:
    row, heads = block + n * grid_of(plan), jnp.int32(plan.problem.q_heads)
    return Head(lax.div(row, heads), lax.rem(row, heads), n)


def _heads(plan: KeyPlan, block: Index) -> Index:
    """How many heads a block takes."""
    grid = grid_of(plan)
    return lax.div(plan.order.heads - block + (grid - 1), jnp.int32(grid))


# ---- the producer -------------------------------------------------------------------------------


def _produce(ctx: KernelContext, block: Index) -> None:
    plan, refs, smem = ctx
    rounds, tiles = plan.tiling.kv_tiles, HALVES * units(plan)

    def load_keys(head: Head, j: int) -> None:
        pl.when(head.n > 0)(lambda: plgpu.barrier_wait(smem.kv_free.at[j]))
        for ref, to, ready in ((refs.k, smem.k, smem.k_ready), (refs.v, smem.v, smem.v_ready)):
            for wg in range(WARPGROUPS):
                at = head.at(j * KEYS + wg * ROWS)
                load_rows(ref, at, to, (j, wg), ready.at[j])

    def load_queries(head: Head, t: int) -> None:
        pl.when(head.n > 0)(lambda: plgpu.barrier_wait(smem.q_free.at[t]))
        load_rows(refs.q, head.at(t * ROWS), smem.q, t, smem.q_ready.at[t])
        load_rows(refs.do, head.at(t * ROWS), smem.do, t, smem.do_ready.at[t])

    def load(head: Head) -> None:
        load_keys(head, 0)
        for t in range(tiles):
            load_queries(head, t)
        for j in range(1, rounds):
            load_keys(head, j)

    def body(n: Index, carry: Index) -> Index:
        head, slot = _head(plan, block, n), n & 1
        pl.when(n == 0)(lambda: load(head))
        pl.when(n >= 2)(lambda: plgpu.barrier_wait(smem.stats_free.at[slot]))
        memory = StatisticsRefs(refs.out, refs.do, refs.lse, refs.d_lse, smem.lse, smem.delta)

        def statistics(t: Index, carry: Index) -> Index:
            at = QueryTileAt(head.batch, head.head, t, slot * tiles + t)
            tile_statistics.write(
                plan, memory, at, at_once=int(__import__("os").environ.get("AO", "2"))
            )
            return carry

        lax.fori_loop(0, tiles, statistics, jnp.int32(0))
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.stats_ready.at[slot])
        pl.when(n > 0)(lambda: load(head))
        return carry

    lax.fori_loop(0, _heads(plan, block), body, jnp.int32(0))


# ---- the consumers ------------------------------------------------------------------------------


class Round(NamedTuple):
    """A warpgroup with a round of a head."""

    ctx: KernelContext
    outs: Gradients
    head: Head
    wg: Index
    j: Index

    @property
    def is_first(self) -> Predicate:
        return self.j == 0

    @property
    def is_last(self) -> Predicate:
        return self.j == self.ctx.plan.tiling.kv_tiles - 1

    def zero(self, t: int) -> Index:
        """0, which makes addresses of query tile t no constants: all of them would be computed
        before the first head, and spilled. Compilers know that the round is no negative number.
        """
        return mosaic.opaque_zero(self.head.batch + self.j + t)

    @property
    def key(self) -> Index:
        return self.j * KEYS + self.wg * ROWS

    def slot(self, i: int) -> Index:
        """The place in ds of unit i: units go on from round to round and from head to head."""
        plan, count = self.ctx.plan, units(self.ctx.plan)
        return (self.head.n * (plan.tiling.kv_tiles * count) + self.j * count + i) & 1

    def row_statistic(self, numbers: SmemRef, t: Index) -> RegisterTile:
        tiles = numbers.shape[0] // 2
        return mosaic.load(numbers.at[(self.head.n & 1) * tiles + t], mosaic.COLUMN)

    def needs_mask(self, t: int) -> Predicate:
        """Whether query tile t needs a mask in this round."""
        plan = self.ctx.plan
        spans = plan.tiling.static_spans(plan.problem.q_offset)
        masked = [not span.full_lo <= t < span.full_hi for span in spans]
        if all(masked) or not any(masked):
            return masked[0]
        return self.is_last if masked[-1] else self.is_first

    def multiply_dq(self, i: int, acc: RegisterTile, zero: Index) -> None:
        """Issues dQ of this warpgroup's query tile of unit i, when both have put dS there."""
        smem, slot = self.ctx.smem, self.slot(i)
        plgpu.barrier_wait(smem.ds_ready.at[slot])
        for u in range(WARPGROUPS):
            (ds,) = panels.tiles(smem.ds, slot, u, self.wg)
            (k,) = panels.tiles(smem.k, self.j, u + zero)
            plgpu.wgmma(acc, ds.transpose((1, 0)), k)


def _step(
    own: Round, t: int, sums: KeyGradients, dqs: Any, s_acc: RegisterTile, dp_acc: RegisterTile
) -> None:
    """Query tile t: adds to dK and dV, whose matmuls still run when this returns. The first of a
    unit adds dQ of the unit before, too.
    """
    (plan, _, smem), head, (i, half) = own.ctx, own.head, divmod(t, HALVES)
    problem, dtype = plan.problem, jnp.dtype(plan.problem.dtype)
    zero = own.zero(t)
    tile, wg = t + zero, own.wg + zero
    (q,), (do,) = panels.tiles(smem.q, tile), panels.tiles(smem.do, tile)
    (k,), (v,) = panels.tiles(smem.k, own.j, wg), panels.tiles(smem.v, own.j, wg)
    pl.when(own.is_first)(lambda: plgpu.barrier_wait(smem.q_ready.at[tile]))
    plgpu.wgmma(s_acc, k, q.transpose((1, 0)))
    adds_dq = i > 0 and half == 0
    if adds_dq:
        own.multiply_dq(i - 1, dqs[i - 1], zero)
    if t == 0:
        plgpu.barrier_wait(smem.v_ready.at[own.j])
    pl.when(own.is_first)(lambda: plgpu.barrier_wait(smem.do_ready.at[tile]))
    plgpu.wgmma(dp_acc, v, do.transpose((1, 0)))
    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1 + WARPGROUPS if adds_dq else 1)
    if t:  # its last matmul is done
        pl.when(own.is_last)(lambda: plgpu.barrier_arrive(smem.q_free.at[tile - 1]))
    where = head.batch, head.head, t * ROWS, own.key, problem.q_offset, problem.kv_len
    place = LogitTile(*where, problem.mask, q_axis=1)
    lse = own.row_statistic(smem.lse, tile)
    p, slope = score_mod.probabilities(own.ctx, place, s, lse, own.needs_mask(t))
    plgpu.wgmma(sums.dv, p.astype(dtype), do)
    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
    ds = p * (dp - per_column(own.row_statistic(smem.delta, tile), dp.shape))
    ds = (ds if slope is None else ds * slope).astype(dtype)
    if t == 0:
        # What was stored from ds, v and dk has left. The keys of a head's last round are released
        # at its end.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        pl.when(own.j > 0)(lambda: plgpu.barrier_arrive(smem.kv_free.at[own.j - 1]))
    (staged,) = panels.tiles(smem.ds, own.slot(i), wg, half)
    staged[...] = ds
    plgpu.wgmma(sums.dk, ds, q)
    if half == HALVES - 1:
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.ds_ready.at[own.slot(i)])


def _round(own: Round, dqs: Any, *accs: RegisterTile) -> None:
    """All query tiles with the keys of a round, and its dK and dV."""
    (plan, _, smem), sums, last = own.ctx, KeyGradients(*accs), units(own.ctx.plan) - 1
    plgpu.barrier_wait(smem.k_ready.at[own.j])
    for t in range(HALVES * units(plan)):
        scores = (plgpu.ACC((ROWS, ROWS), jnp.float32) for _ in range(2))
        pl.run_scoped(functools.partial(_step, own, t, sums, dqs), *scores)
    own.multiply_dq(last, dqs[last], own.zero(HALVES * units(plan)))
    dk, dv = (plgpu.wgmma_accumulator_load(acc, wait_n=WARPGROUPS) for acc in sums)
    release = functools.partial(plgpu.barrier_arrive, smem.q_free.at[HALVES * last + 1])
    pl.when(own.is_last)(release)
    wg = own.wg + own.zero(HALVES * units(plan) + 1)
    (dk_staged,), (dv_staged,) = panels.tiles(smem.dk, wg), panels.tiles(smem.v, own.j, wg)
    plgpu.commit_smem()  # no warp multiplies what lies in v any more
    dk_staged[...] = (dk * plan.problem.scale).astype(dk_staged.dtype)
    dv_staged[...] = dv.astype(dv_staged.dtype)
    plgpu.commit_smem()
    at = own.head.at(own.key)
    store_rows(smem.dk, own.wg, own.outs.dk, at)
    store_rows(smem.v, (own.j, own.wg), own.outs.dv, at)
    plgpu.wgmma_wait(0)


def _head_of(ctx: KernelContext, outs: Gradients, head: Head, wg: Index, *dqs: Any) -> None:
    """All rounds of a head, and its dQ."""
    plan, _, smem = ctx
    rounds, slot = plan.tiling.kv_tiles, head.n & 1
    widths = [x[0].for_tma.shape[-1] for x in (smem.k, smem.v)]
    plgpu.barrier_wait(smem.stats_ready.at[slot])

    def body(j: Index, carry: Index) -> Index:
        accs = (plgpu.ACC((ROWS, width), jnp.float32) for width in widths)
        pl.run_scoped(functools.partial(_round, Round(ctx, outs, head, wg, j), dqs), *accs)
        return carry

    lax.fori_loop(0, rounds, body, jnp.int32(0))
    plgpu.barrier_arrive(smem.stats_free.at[slot])
    values = [acc[...] * plan.problem.scale for acc in dqs]
    # Both have done with the unit before the last.
    free = 1 - Round(ctx, outs, head, wg, jnp.int32(rounds - 1)).slot(units(plan) - 1)
    for i, value in enumerate(values):
        (staged,) = panels.tiles(smem.ds, free, wg, i)
        if value.shape[1] < ROWS:
            nothing = mosaic.filled((ROWS, ROWS - value.shape[1]), 0.0)
            value = lax.concatenate([value, nothing], 1)
        staged[...] = value.astype(staged.dtype)
    plgpu.commit_smem()
    for i in range(len(values)):
        at = head.at((HALVES * i + wg) * ROWS)
        store_rows(smem.ds, (free, wg, i), outs.dq, at)
    plgpu.wait_smem_to_gmem(len(values), wait_read_only=True)  # dk and dv have left
    plgpu.barrier_arrive(smem.kv_free.at[rounds - 1])


def _consume(ctx: KernelContext, outs: Gradients, block: Index, wg: Index) -> None:
    plan = ctx.plan
    (width,) = panels.widths(plan.problem.head_dim)

    def body(n: Index, carry: Index) -> Index:
        dqs = (plgpu.ACC((ROWS, width), jnp.float32) for _ in range(units(plan)))
        head = _head(plan, block, n)
        pl.run_scoped(functools.partial(_head_of, ctx, outs, head, wg), *dqs)
        return carry

    lax.fori_loop(0, _heads(plan, block), body, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


# ---- the kernel and its call --------------------------------------------------------------------


def _kernel(refs: ShortRefs, *rest: Any, plan: KeyPlan) -> None:
    *outs, smem = rest
    ctx, block, wg = KernelContext(plan, refs, smem), lax.axis_index("block"), lax.axis_index("wg")
    produce = functools.partial(_produce, ctx, block)
    consume = functools.partial(_consume, ctx, Gradients(*outs), block, wg)
    import os

    R = tuple(map(int, os.environ.get("RR", "224,56").split(",")))
    mosaic.share_registers(wg, WARPGROUPS, produce, consume, *R)


def dq_dk_dv(plan: KeyPlan, residuals: Residuals) -> Gradients:
    """dq, dk and dv."""
    inputs, out, lse, d_out, d_lse = residuals
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=tuple(
            jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (inputs.q, inputs.k, inputs.v)
        ),
        scratch_types=(scratch(plan),),
        grid=(grid_of(plan),),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=mosaic.without_barriers(),
        kernel_name="flash_bwd_heads_sm90",
    )
    return Gradients(*kernel(ShortRefs(inputs.q, inputs.k, inputs.v, d_out, out, lse, d_lse)))
