"""The warpgroups of `sm90`: one producer, which loads K and V by TMA for all work tiles of a block,
into a ring of entries in shared memory; and consumers, which load their rows of q, compute
and store. `sm90` says in which order, and who owns which buffer when.

Entry e of a work tile holds K of its e-th kv tile from the end and V of the tile before that one: a
work tile of n kv tiles has n + 1 entries, the first without V and the last without K.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.special import Special
from pallas_attn.kernels.attention import logits, softmax, tile_scheduler, tiles
from pallas_attn.kernels.attention.softmax import OutputSums
from pallas_attn.kernels.attention.tile_scheduler import Meanwhile, QueryPlan, Turn, work_tile
from pallas_attn.kernels.attention.tiles import (
    ROWS,
    KernelContext,
    QueryRows,
    WorkTile,
    kv_batch,
    kv_row,
)
from pallas_attn.kernels.attention.tma_operands import OperandFormat
from pallas_attn.kernels.flash_fwd import shared_memory
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.panels import Ring
from pallas_attn.kernels.lang.types import (
    Carry,
    GmemRef,
    Index,
    RegisterTile,
    RegisterTiles,
    SmemRef,
)
from pallas_attn.kernels.mma import wgmma

if TYPE_CHECKING:
    from pallas_attn.kernels.flash_fwd.alternation import Alternation

score_tiles = Special("kernels.attention.score_tiles")


class Loaded(NamedTuple):
    """The state of a producer from work tile to work tile."""

    count: Index  # entries of the ring
    record: Any  # read ahead of the work tile at hand: see `tile_scheduler.Ranges`
    claim: Any = None  # the next work tile's code, where it is claimed among entries: `claims`


def produce(ctx: KernelContext, block: Index, load: Callable[..., Any] | None = None) -> None:
    """K and V of all work tiles of a block, in the order in which consumers use them. `load`: loads
    the entries of a work tile in place of `load_entries`.
    """
    load = load or load_entries
    work_tiles: tile_scheduler.WorkTiles = ctx.plan.producer_tiles
    ranges: type[tile_scheduler.Ranges] = ctx.plan.ranges

    def one_tile(turn: Turn, loaded: Loaded) -> Loaded:
        tile = work_tile(ctx, turn.code)
        kv_range = ranges.of_block(ctx, tile, loaded.record)
        record = ranges.read_for_block(ctx, turn.following)
        count, claim = load(ctx, turn, tile, kv_range, loaded.count)
        return Loaded(count, record, claim)

    start = work_tiles.start(ctx, block)
    first = Loaded(jnp.int32(0), ranges.read_for_block(ctx, start.codes[0]))
    work_tiles.for_each_tile(ctx, block, start, one_tile, first)


def load_entries(
    ctx: KernelContext, turn: Turn, tile: WorkTile, kv_range: tuple[Index, Index], count: Index
) -> tuple[Index, Any]:
    """Loads the entries of a work tile, before which `count` were loaded: the new count, and the
    code of the next work tile where it is claimed meanwhile.
    """
    (lo, hi), ring = kv_range, Ring.of(ctx)

    def one_entry(e: Index, carry: tuple[Index, Any]) -> tuple[Index, Any]:
        count, claim = carry
        last, t = hi - lo, hi - 1 - e
        slot = ring.acquire(count)
        load_entry(ctx, tile, Entry(e, last, t, t + 1), slot)
        if turn.claim_next is not None:
            claim = turn.claim_next(e, claim)
        return count + 1, claim

    entries = jnp.where(hi > lo, hi - lo + 1, 0)
    return lax.fori_loop(0, entries, one_entry, (count, turn.claim))


class Entry(NamedTuple):
    """An entry of a work tile: K of kv tile t, and V of the tile before it."""

    number: Index  # 0: without V
    last: Index  # the number of the last, which is without K
    t: Index
    before: Index


def load_entry(
    ctx: KernelContext,
    tile: WorkTile,
    entry: Entry,
    slot: Index,
    load: Callable[..., None] | None = None,
) -> None:
    """Issues loads of K and V of an entry, by `load` in place of `load_kv_tile`; a K or V that the
    entry is without counts as arrived at once.
    """
    load, ready = load or load_kv_tile, ctx.smem.ready.at[slot]

    def arrive(copies: int) -> None:
        for _ in range(copies):
            plgpu.barrier_arrive(ready)

    k_copies, v_copies = ctx.plan.copies
    bias_and_mask, score_copies = ctx.plan.score_tiles, 0
    if bias_and_mask:
        score_copies = score_tiles.copies(bias_and_mask)
    segments = ctx.smem.segments

    @pl.when(entry.number < entry.last)
    def _() -> None:
        load(ctx, tile, "k", entry.t, slot)
        if segments is not None:
            segments.load_keys(ctx, tile, entry.t, slot)
        if bias_and_mask:
            column = entry.t * ctx.plan.config.block_kv
            place = score_tiles.Place(tile.batch, tile.head, tile.row, column)
            score_tiles.load(ctx, ctx.smem.bias_and_mask, place, slot, ready)

    @pl.when(entry.number == entry.last)
    def _() -> None:
        arrive(k_copies + (segments is not None) + score_copies)

    pl.when(entry.number > 0)(functools.partial(load, ctx, tile, "v", entry.before, slot))
    pl.when(entry.number == 0)(functools.partial(arrive, v_copies))


def load_kv_tile(ctx: KernelContext, tile: WorkTile, name: str, t: Index, slot: Index) -> None:
    """Issues loads of kv tile t of "k" or "v". A tile of v that a length cuts is `v_edge`."""
    plan, refs = ctx.plan, ctx.refs
    if name == "v" and plan.v.transposed:
        return _load_transposed(ctx, tile, t, slot)
    block, batch = plan.config.block_kv, kv_batch(plan.problem, tile.batch)
    row = kv_row(plan.problem, block, t * block)
    load_whole = functools.partial(
        copy_rows, ctx, tile, name, slot, (getattr(refs, name), batch, row)
    )
    if name == "k" or "kv_lengths" not in plan.problem.arrays:
        return load_whole()
    cut = (t + 1) * block > tile.kv_len  # only the last tile may be
    pl.when(cut)(lambda: copy_rows(ctx, tile, name, slot, (refs.v_edge, batch, 0)))
    return pl.when(jnp.logical_not(cut))(load_whole)


def _load_transposed(ctx: KernelContext, tile: WorkTile, t: Index, slot: Index) -> None:
    """Issues the load of kv tile t of V^T, for float8."""
    plan, smem = ctx.plan, ctx.smem
    head = lax.div(tile.head, jnp.int32(plan.problem.group))
    columns = pl.ds(t * plan.config.block_kv, plan.config.block_kv)
    source = ctx.refs.v.at[tile.batch, head, :, columns]
    plgpu.copy_gmem_to_smem(source, smem.v.at[slot], smem.ready.at[slot])


def copy_rows(
    ctx: KernelContext, tile: WorkTile, name: str, slot: Index, source: tuple[GmemRef, Index, Index]
) -> None:
    """Issues loads of the rows of a kv tile, of the work tile's kv head: `source` is an array, its
    batch row and the first row.
    """
    (ref, batch, first), plan, to = source, ctx.plan, getattr(ctx.smem, name)
    head = lax.div(tile.head, jnp.int32(plan.problem.group))
    load = functools.partial(panels.load, ref, panels=to, barrier=ctx.smem.ready.at[slot])
    block, rows = plan.config.block_kv, plan.value_rows
    if name == "k" or block == rows:
        return load(where=(batch, pl.ds(first, block), head), at=slot)
    load(where=(batch, pl.ds(first, block), head), at=(slot, pl.ds(0, block)))
    # Past the end of an array TMA reads zeros.
    end = ref.shape[1] + 0 * head
    return load(
        where=(batch, pl.ds(end, rows - block), head), at=(slot, pl.ds(block, rows - block))
    )


# ---- consumers: their rows of q ------------------------------------------------------------------


def load_q(ctx: KernelContext, tile: WorkTile, wg: Index, slot: Index) -> None:
    """The rows of a consumer."""
    refs, smem, alone = ctx.refs, ctx.smem, ctx.plan.order.together == 1
    row, head = (tile.row + wg * ROWS, tile.head) if alone else (tile.row, tile.head + wg)
    where = tile.batch, pl.ds(row, ROWS), head
    panels.load(refs.q, where, smem.q, slot, smem.q_ready.at[slot])
    if smem.segments is not None:
        smem.segments.load_rows(ctx, tile, row, slot)


# ---- mainloop -----------------------------------------------------------------------------------


class State(NamedTuple):
    """The carry from kv tile to kv tile."""

    acc: RegisterTiles  # [ROWS, v columns], or each panel's: the output before it is divided
    row_sum: RegisterTile  # [ROWS, PARTIALS]
    row_max: RegisterTile  # [ROWS]
    p: RegisterTile  # [ROWS, block_kv]: P of the tile whose P V is still to be issued


def no_values(v: OperandFormat) -> RegisterTiles:
    """The accumulator of the output, or that of each panel."""
    if v.panels:
        return tuple([mosaic.filled((ROWS, width), 0.0) for width in v.panels])
    return mosaic.filled((ROWS, v.width), 0.0)


def mainloop(
    ctx: KernelContext,
    rows: QueryRows,
    slot: Index,
    meanwhile: Meanwhile,
    alternation: "Alternation | None" = None,
) -> tuple[OutputSums, Index]:
    """All kv tiles of a consumer's rows, from the last to the first, and the slot after them. Kv
    tiles that are fetched from other GPUs may come in another order: then nothing reads the number
    of one that needs no mask.
    `meanwhile`: further work, done under the first matmul. `alternation`: how two consumers
    issue their matmuls; None: each whenever it can.
    """
    ring, smem = Ring.of(ctx), ctx.smem
    state = _first_tile(ctx, rows, slot, meanwhile)
    step = functools.partial(_step, ctx, rows, alternation)
    state, slot = for_each_kv_tile(ctx.plan, rows.span, step, (state, ring.after(slot)))
    ring.wait(slot)
    v = panels.tiles(smem.v, slot)
    acc = wgmma.add_value_panels(state.acc, widened(state.p, v), v)
    ring.release(slot)
    return OutputSums(acc, state.row_sum, state.row_max), ring.after(slot)


def _first_tile(ctx: KernelContext, rows: QueryRows, slot: Index, meanwhile: Meanwhile) -> State:
    """The last kv tile, whose scores overlap with nothing but `meanwhile`."""
    ring, smem = Ring.of(ctx), ctx.smem
    q, k = panels.tiles(smem.q, rows.q_slot), panels.tiles(smem.k, slot)
    block, keys = k[0].shape[0], ctx.plan.last_keys or k[0].shape[0]
    if keys < block:
        k = tuple(panel.at[pl.ds(0, keys)] for panel in k)
    ring.wait(slot)
    s = wgmma.matmul((ROWS, keys), q, k, meanwhile, wgmma.score_panels)
    read_later = rows.segments is not None or ctx.plan.score_tiles
    if not read_later:
        ring.release(slot)
    masked: bool | None = "first_masked" in ctx.plan.sections
    first_rows, whole = rows if rows.last is None else rows.with_loaded_tile(rows.last), None
    if ctx.plan.skips_keys:
        masked, whole = None, (rows.span.full_lo, rows.span.full_hi)
    s, offset = logits.masked_logits(ctx, first_rows, rows.span.hi - 1, slot, s, masked, whole)
    if read_later:
        ring.release(slot)
    unit, nothing = ctx.plan.logit_rules.unit, mosaic.filled((ROWS,), -jnp.inf)
    new = softmax.step(s, unit, nothing, empty_ok=True, offset=offset)
    p = new.p.astype(ctx.plan.v.dtype)
    p = with_zeros(p, block) if keys < block else p
    return State(no_values(ctx.plan.v), new.row_sum, new.row_max, p)


def _step(
    ctx: KernelContext,
    rows: QueryRows,
    alternation: "Alternation | None",
    whole: tuple[Index, Index],
    masked: bool | None,
    t: Index,
    carry: tuple[State, Index],
) -> tuple[State, Index]:
    """Kv tile t: the softmax of its scores S runs while P V of the tile before it is in flight."""
    (state, slot), smem, ring = carry, ctx.smem, Ring.of(ctx)
    ring.wait(slot)
    if alternation is not None:
        alternation.take()
    q = panels.tiles(smem.q, rows.q_slot)
    k, v = panels.tiles(smem.k, slot), panels.tiles(smem.v, slot)

    def matmuls(scores: RegisterTile, out: RegisterTiles) -> None:
        wgmma.score_panels(scores, q, k)
        wgmma.value_panels(out, widened(state.p, v), v)
        if alternation is not None:
            alternation.give()

    def softmax_of(s: RegisterTile) -> softmax.Step:
        s, offset = logits.masked_logits(ctx, rows, t, slot, s, masked, whole)
        return softmax.next_step(
            s,
            ctx.plan.logit_rules.unit,
            state.row_max,
            empty_ok=masked is not False or ctx.plan.logit_rules.adds,
            offset=offset,
        )

    like = softmax.Step.like(k[0].shape[0], state.row_max, state.row_sum, slot)
    acc, new = wgmma.overlapped(state.acc, like, matmuls, softmax_of, behind=len(v))
    ring.release(slot)
    acc, row_sum = softmax.rescaled(new, (acc, state.row_sum))
    # P is rounded after the wait: before it, ptxas takes the registers for operands of the matmul
    # in flight and serialises both (C7513).
    p = new.p.astype(ctx.plan.v.dtype)
    return State(acc, row_sum + new.row_sum, new.row_max, p), ring.after(slot)


def widened(p: RegisterTile, v: tuple[SmemRef, ...]) -> RegisterTile:
    """Probabilities with a zero for each row of v past the kv tile: `QueryPlan.value_rows`."""
    return p if p.shape[1] == v[0].shape[0] else with_zeros(p, v[0].shape[0])


def with_zeros(p: RegisterTile, keys: int) -> RegisterTile:
    """Probabilities extended by zeros to `keys` keys."""
    return lax.concatenate([p, mosaic.filled((ROWS, keys - p.shape[1]), 0, p.dtype)], 1)


def for_each_kv_tile(plan: Any, span: tiles.Span, step: Callable[..., Any], carry: Carry) -> Any:
    """carry = step(whole, masked, t, carry) for all kv tiles of a span but its last, from the end:
    `whole` is (first, end) of the tiles that need no mask, `masked` None where a branch asks for
    that.
    """
    first = span.hi - 1
    high = jnp.minimum(jnp.maximum(span.full_hi, span.lo), first)  # whole tiles end here
    low = jnp.minimum(jnp.maximum(span.full_lo, span.lo), high)  # and begin here

    def counted(masked: bool | None, i: Index, carry: Carry) -> Any:
        return step((low, high), masked, -1 - i, carry)  # loops count up

    if plan.one_loop:
        return lax.fori_loop(-first, -span.lo, functools.partial(counted, None), carry)
    if "high" in plan.sections:
        carry = lax.fori_loop(-first, -high, functools.partial(counted, True), carry)
    carry = lax.fori_loop(-high, -low, functools.partial(counted, False), carry)
    if "low" in plan.sections:
        carry = lax.fori_loop(-low, -span.lo, functools.partial(counted, True), carry)
    return carry


# ---- epilogue -----------------------------------------------------------------------------------


def store_result(ctx: KernelContext, rows: QueryRows, result: OutputSums) -> None:
    """Divides by the row sums, and stores the output and the log-sum-exp."""
    plan, refs, smem = ctx
    acc, tile = result.acc, rows.tile
    sink = None if refs.sinks is None else refs.sinks[tile.head]
    factor, lse = softmax.finish(result.row_max, result.row_sum, sink)
    if refs.units is not None:  # float32, float8
        head = lax.div(tile.head, jnp.int32(plan.problem.group))
        factor = factor * refs.units[1, tile.batch, head]
    acc = softmax.scaled(acc, factor)
    if tile.q_len is not None:
        lse, acc = softmax.without_dead_rows(lse, acc, rows.row, tile.q_len)
    where = tile.batch, tile.head, rows.row
    mosaic.store_rows(lse, refs.lse, where, plan.tiling.whole_rows)
    for column, parts, staged in _parts_of_output(plan, acc, smem.out):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for part, to in zip(parts, panels.tiles(staged, rows.wg), strict=True):
            to[...] = part.astype(to.dtype)
        plgpu.commit_smem()
        where = tile.batch, pl.ds(rows.row, ROWS), tile.head
        panels.store(staged, rows.wg, refs.out, where, column)


def _parts_of_output(
    plan: QueryPlan, acc: RegisterTiles, out: SmemRef
) -> list[tuple[int, tuple[RegisterTile, ...], SmemRef]]:
    """(first column, register tiles, their buffers) of what is stored at a time: columns of the
    accumulator, or panels of it, as many as shared memory holds.
    """
    if not plan.v.panels:
        width = out.shape[-1]
        starts = range(0, plan.v.width, width)
        return [(n, (lax.slice(acc, (0, n), (ROWS, n + width)),), out) for n in starts]
    wide, rest = shared_memory.wide_and_rest(plan.v.panels)
    held, parts = len(out) - len(rest), []
    for first in range(0, len(wide), held):
        last = first + held >= len(wide)
        staged = out[: min(held, len(wide) - first)] + (out[held:] if last else ())
        parts.append((first * wide[0], acc[first : first + len(staged)], staged))
    return parts
