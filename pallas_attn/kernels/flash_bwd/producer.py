"""The producer of the Hopper kernels over keys, and the loop over the work tiles of a block."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import claims, score_tiles, tiles
from pallas_attn.kernels.attention.tiles import KernelContext, kv_batch
from pallas_attn.kernels.flash_bwd.key_tiles import key_tile, step_of, steps_of
from pallas_attn.kernels.lang import panels
from pallas_attn.kernels.lang.panels import Panels, ring_slot
from pallas_attn.kernels.lang.types import Barrier, GmemRef, Index, Predicate

KeysOfBlock = Any  # `key_tiles.KeyTile`, or `sm90_heads.HeadTile`, which has its fields


class KeyPart(NamedTuple):
    """Keys of a work tile in shared memory."""

    name: str  # "k" or "v"
    first: int  # number of the first key in the work tile
    to: Panels
    place: Any  # in `to`
    ready: Barrier
    column: int = 0  # the first


class KeyBuffers(NamedTuple):
    """Parts of shared memory that consumers release together."""

    free: Barrier
    parts: Sequence[KeyPart]
    slots: int = 1  # work tiles whose keys fit there: the first axis, if there are several


def produce(ctx: KernelContext, block_id: Index, buffers: Sequence[KeyBuffers]) -> None:
    """The producer warpgroup loads the query tiles of every work tile, in order, by the rings
    `smem.q_ring` and `smem.do_ring`, and its keys after the first query tile, since the keys before
    them are in use for longer.
    """
    plan = ctx.plan

    def load_work_tile(n: Index, count: Index, code: Index) -> Index:
        work = key_tile(ctx, code)
        own_keys = functools.partial(load_keys, ctx, buffers, n, work)
        first, end = steps_of(plan, work)

        def step(i: Index, count: Index) -> Index:
            g, number = step_of(plan, work, i)
            head, t = work.kv_head * plan.problem.group + g, work.q_tiles.tile(number)
            load_query_tile(ctx, work, head, t, count)
            pl.when(i == first)(own_keys)
            return count + 1

        count = lax.fori_loop(first, end, step, count)
        pl.when(end == first if plan.order.parts > 1 else work.steps == 0)(own_keys)
        return count

    each_work_tile(ctx, block_id, load_work_tile, claims.claim)


def each_work_tile(
    ctx: KernelContext,
    block_id: Index,
    body: Callable[[Index, Index, Index], Index],
    claim: Callable[[KernelContext, Index], Index] = claims.claimed,
) -> None:
    """`body(n, count, code)` for each work tile of a block, which returns `count`, the number of
    steps so far, for the next. Where blocks claim them `claim(ctx, n)` is the code of number n, and
    -1 after the last.
    """
    schedule, none = ctx.refs.schedule, jnp.int32(0)
    if not ctx.plan.order.claims:

        def scheduled(n: Index, carry: tuple[Index, Index]) -> tuple[Index, Index]:
            following = schedule[block_id, n + 2]  # read long before it is needed
            return body(n, *carry), following

        lax.fori_loop(0, schedule[block_id, 0], scheduled, (none, schedule[block_id, 1]))
        return

    def claimed(carry: tuple[Index, Index, Index]) -> tuple[Index, Index, Index]:
        n, count, code = carry
        count = body(n, count, code)
        return n + 1, count, claim(ctx, n + 1)

    first = claim(ctx, none) if ctx.plan.order.turns else claims.first_code(ctx, block_id)
    start = none, none, first
    lax.while_loop(lambda carry: carry[2] >= 0, claimed, start)


def load_query_tile(
    ctx: KernelContext, work: KeysOfBlock, head: Index, t: Index, count: Index
) -> None:
    """Query tile t of q and dO as number `count` of the rings, with the lse and the delta of its
    rows, and the tile of the bias.
    """
    plan, refs, smem = ctx
    slot, block = smem.q_ring.slot(count), plan.tiling.block_q
    for name, statistic, ring in (("q", "lse", smem.q_ring), ("do", "delta", smem.do_ring)):
        ring.acquire(count, slot)
        ready, some = ring.ready.at[slot], pl.ds(t * block, ring.row_stats.shape[1])
        stats = getattr(refs, statistic).at[work.batch, head, some]
        plgpu.copy_gmem_to_smem(stats, ring.row_stats.at[slot], ready)
        ref, to = getattr(refs, name), (ring.tiles, slot, ready)
        if work.q_len is None:
            load_rows(ref, (work.batch, head, t * block), *to)
            continue
        cut = (t + 1) * block > work.q_len  # only the last tile may be
        edge = getattr(refs, f"{name}_edge")
        pl.when(cut)(functools.partial(load_rows, edge, (work.batch, head, 0), *to))
        whole = lambda ref=ref, to=to: load_rows(ref, (work.batch, head, t * block), *to)  # noqa: E731
        pl.when(jnp.logical_not(cut))(whole)
    if plan.bias_tiles is not None:
        place = score_tiles.Place(work.batch, head, t * block, work.key)
        plan.bias_tiles.load(refs.bias, smem.bias, place, slot, smem.q_ring.ready.at[slot])


def load_keys(
    ctx: KernelContext, buffers: Sequence[KeyBuffers], n: Index, work: KeysOfBlock
) -> None:
    """The keys of work tile n, when those of the one before are no longer in use."""
    for free, parts, slots in buffers:
        if slots > 1:
            slot = ring_slot(n, slots)
            free = free.at[slot]
            parts = [
                part._replace(place=(slot, part.place), ready=part.ready.at[slot]) for part in parts
            ]
        pl.when(n > slots - 1)(functools.partial(plgpu.barrier_wait, free))
        for part in parts:
            _load_key_part(ctx, work, part)


def _load_key_part(ctx: KernelContext, work: KeysOfBlock, part: KeyPart) -> None:
    plan, refs, _ = ctx
    where = kv_batch(plan.problem, work.batch), work.kv_head
    there = part.to, part.place, part.ready, part.column
    ref = getattr(refs, part.name)
    if not plan.has("kv_lengths"):
        first = tiles.kv_row(plan.problem, plan.tiling.block_kv, work.key)
        return load_rows(ref, (*where, first + part.first), *there)
    cut = work.key + plan.tiling.block_kv > work.kv_len
    edge = getattr(refs, f"{part.name}_edge")
    pl.when(cut)(functools.partial(load_rows, edge, (*where, part.first), *there))
    whole = lambda: load_rows(ref, (*where, work.key + part.first), *there)  # noqa: E731
    return pl.when(jnp.logical_not(cut))(whole)


# ---- copies by TMA ------------------------------------------------------------------------------


def load_rows(
    ref: GmemRef,
    at: tuple[Index, ...],
    to: Panels,
    index: Index,
    ready: Barrier,
    column: int = 0,
) -> None:
    """Rows of one head, `at` (batch, head, first row), from a column on, as many as `to` has at
    `index`.
    """
    batch, head, first = at
    rows = panels.tiles(to, index)[0].shape[0]
    panels.load(ref, (batch, pl.ds(first, rows), head), to, index, ready, column)


def store_rows(
    staged: Panels,
    index: Index,
    to: GmemRef,
    at: tuple[Index, ...],
    column: int = 0,
    predicate: Predicate | None = None,
) -> None:
    """Rows in shared memory to `at` (batch, head, first row), from a column on."""
    batch, head, first = at
    rows = panels.tiles(staged, index)[0].shape[0]
    panels.store(staged, index, to, (batch, pl.ds(first, rows), head), column, predicate)
