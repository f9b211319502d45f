"""The memory of a decode launch, and the kv tile that its producer loads next."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_attn._call.problem import DecodeInputs
from pallas_attn.kernels.attention import cache_layout, functions
from pallas_attn.kernels.attention.cache_layout import Row
from pallas_attn.kernels.decode import combine_splits, scheduler
from pallas_attn.kernels.decode.plan import Plan
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.types import GmemRef, Index, Operand, Predicate, SmemRef


class DecodeSmem(NamedTuple):
    """Shared memory of a block."""

    k: SmemRef  # [stages, tile, H]; [stages, tile, H + Hv] if K and V share one array
    v: SmemRef | None  # [stages, tile, Hv]
    warp_partials: combine_splits.WarpPartials
    table: scheduler.Table
    barriers: SmemRef  # [stages] of 8 bytes
    last: SmemRef  # int32[1]: whether this block is the last of its row's
    k_scale: SmemRef | None = None  # float32[stages, tile], of a quantised cache
    v_scale: SmemRef | None = None
    q: SmemRef | None = None  # queries of float32: `mma_tf32.queries_shape`
    scores: SmemRef | None = None  # `column_parts.shape`, where warps divide the columns


class DecodeRefs(NamedTuple):
    """Global memory that is read."""

    q: GmemRef  # [M, t, N, H]
    caches: tuple[tuple[GmemRef, ...], ...]  # K and V, and their scales if any: `Layout.tables`
    lengths: scheduler.Lengths
    page_table: GmemRef | None
    layer: GmemRef | None
    sinks: GmemRef | None
    counters: GmemRef  # behind `combine_splits.ZERO_BYTES` of zeros
    mask_aux: tuple[GmemRef, ...] = ()  # operands of a function of positions: `functions.flat`
    score_aux: tuple[GmemRef, ...] = ()


def rings_of(ctx: ThreadContext) -> list[tuple[SmemRef, int]]:
    """The rings of K and of V, or of both together, and the bytes of a row of each. `ctx.refs`:
    `Memory`.
    """
    plan, smem = ctx.plan, ctx.refs.smem
    if plan.layout.joined:
        return [(smem.k, plan.row_bytes)]
    k_bytes, v_bytes = (plan.itemsize * n for n in (plan.problem.head_dim, plan.problem.v_head_dim))
    return [(smem.k, k_bytes), (smem.v, v_bytes)]


def refs_of(inputs: DecodeInputs, counters: Operand, plan: Plan) -> DecodeRefs:
    return DecodeRefs(
        q=inputs.q,
        caches=plan.layout.tables(inputs.k_cache, inputs.v_cache, inputs.k_scale, inputs.v_scale),
        lengths=scheduler.lengths_of(inputs, plan.layout.capacities_operand()),
        page_table=inputs.page_table,
        layer=cache_layout.scalar_operand(inputs.layer),
        sinks=inputs.sinks,
        counters=counters,
        mask_aux=functions.flat(inputs.mask_aux) if inputs.mask_aux else (),
        score_aux=functions.flat(inputs.score_aux) if inputs.score_aux else (),
    )


class Memory(NamedTuple):
    """A context's memory, as programs of one thread are handed it."""

    refs: DecodeRefs
    smem: Any  # `DecodeSmem`, or that of a kernel for latent caches


def has_layer(plan: Plan, layer: GmemRef | None) -> Index:
    """1; or 0 where a traced layer is none that the cache has."""
    if layer is None:
        return jnp.int32(1)
    return plan.layout.has_layer(layer[0]).astype(jnp.int32)


class Tile(NamedTuple):
    """A kv tile to be loaded, as int32 scalars."""

    sequence: Index
    head: Index
    row: Index  # its first key
    live: Index  # keys that exist, of those from `row` on; 0 or less: nothing to load
    slot: Index  # the entry of the ring
    wanted: Index  # 0: no tile is left
    layer: Index | None
    page: Index | None = None  # int32[128]: the page that each thread has looked up


def live_keys(ctx: ThreadContext) -> Index:
    """How many keys of the tile `ctx.at` exist; 0 or less where there is nothing to load."""
    thread, _, at, plan = ctx
    return thread.select(at.wanted >= 1, thread.minimum(at.live, plan.keys.tile), 0)


def load_page(ctx: ThreadContext, skipped: Index, exists: Predicate) -> Index:
    """The page of key `skipped` of the tile; of some key of the sequence where it does not exist.
    `ctx.refs`: `DecodeRefs`.
    """
    thread, refs, at, plan = ctx
    row = thread.select(exists, at.row + skipped, 0)
    return plan.layout.load_page(thread, refs.page_table, at.sequence, plan.layout.entry(row))


def place_of(ctx: ThreadContext, skipped: Index, exists: Predicate) -> Row:
    """The place of key `skipped` of the tile. A page that is missing makes its sequence a lost one.
    `ctx.refs`: `Memory`.
    """
    thread, memory, at, plan = ctx
    layout, table = plan.layout, memory.smem.table
    row, page, capacity = at.row + skipped, at.page, None
    if layout.capacity is None:
        capacity = thread.load(memory.refs.lengths.capacities, at.sequence, 4)
    if layout.paged:
        row = thread.select(exists, row, 0)
        good = layout.has_page(page)
        page = thread.select(good, page, 0)  # some page's rows: the result will be NaN
        bad = thread.select(good, thread.index * 0, 1)
        thread.shared_store(table.lost, at.sequence, bad, exists & (bad >= 1))
    return Row(at.sequence, at.head, row, at.layer, page, capacity)
