"""One kv tile of decode: scores, logits, the mask, the online softmax of every warp, and the values
that its probabilities weigh. Rows are packed as `mma_rowmajor.Split` says.

`quantized_mainloop` has the same functions for caches of 8-bit numbers.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._functions.program import Operation, evaluate
from pallas_attn.kernels.attention import functions, softmax
from pallas_attn.kernels.attention.functions import Registers, Value
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.decode import scheduler
from pallas_attn.kernels.decode.plan import Plan
from pallas_attn.kernels.decode.scheduler import WorkTile
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.types import Index, Layout, RegisterTile, SmemRef
from pallas_attn.kernels.mma import column_parts, mma_rowmajor, mma_sync, mma_tf32

ROWS = threads.WARPS * mma_rowmajor.ROWS  # rows of the warps' matrices, one above the other
ADD = Operation("add", (), "int32")


class State(NamedTuple):
    """An online softmax of every warp, carried from tile to tile."""

    acc: RegisterTile  # [64, Hv]
    row_sum: RegisterTile  # [64, softmax.PARTIALS]
    row_max: RegisterTile  # [64]


class TileAt(NamedTuple):
    """A kv tile that has been loaded."""

    tile: Index  # its number in the sequence
    slot: Index  # the entry of the ring


def initial(plan: Plan) -> State:
    """The state before the first key."""
    width = mma_rowmajor.accumulator_width(plan.problem.v_head_dim, plan.split.parts)
    return State(
        mosaic.filled((ROWS, width), 0.0),
        mosaic.filled((ROWS, softmax.PARTIALS), 0.0),
        mosaic.filled((ROWS,), -jnp.inf),
    )


def query_rows(ctx: KernelContext, work: WorkTile) -> mma_rowmajor.Queries:
    """The query rows of a work tile in global memory."""
    plan, problem = ctx.plan, ctx.plan.problem
    first, sizes = scheduler.first_query(plan, work), (problem.q_heads, plan.queries.group)
    last = None if problem.tokens is None else problem.tokens * problem.q_heads - 1
    return mma_rowmajor.Queries(
        ctx.refs.q, *first, plan.queries.rows, *sizes, problem.head_dim, last
    )


def load_queries(ctx: KernelContext, work: WorkTile) -> RegisterTile | SmemRef:
    """The query rows of all warps, in registers; of float32 in shared memory.

    Those in shared memory are written when all threads have met after the last work, and read when
    all have met before a tile.
    """
    rows, plan = query_rows(ctx, work), ctx.plan
    if plan.is_float32:
        mma_tf32.store_queries(rows, plan.split, ctx.smem.q)
        return ctx.smem.q
    return mma_rowmajor.queries(rows, plan.split)


def scores(ctx: KernelContext, queries: RegisterTile | SmemRef, slot: Index) -> RegisterTile:
    """q @ K^T of the kv tile in a slot."""
    plan = ctx.plan
    dim = plan.problem.head_dim
    return of_all_columns(ctx, plan.matmuls.scores(queries, ctx.smem.k, slot, plan.split, dim))


def of_all_columns(ctx: KernelContext, s: RegisterTile) -> RegisterTile:
    """The scores; the sum of the warps' parts `s` where warps divide the columns."""
    split = ctx.plan.split
    return s if split.parts == 1 else column_parts.sum_of_parts(s, ctx.smem.scores, split)


def attend(ctx: KernelContext, work: WorkTile, at: TileAt, s: RegisterTile, state: State) -> State:
    """The state after one more kv tile, from its scores."""
    plan = ctx.plan
    s = masked(ctx, work, at.tile, logits_of_scores(ctx, work, at.tile, s))
    join = functools.partial(mma_sync.reduce_folded, op="maximum") if plan.split.folded else None
    new = softmax.step(s, plan.unit_of_logits, state.row_max, empty_ok=True, join=join)
    acc, row_sum = softmax.rescaled(new, (state.acc, state.row_sum))
    p = new.p.astype(plan.problem.dtype)
    acc = add_values(ctx, acc, p, at)
    return State(acc, row_sum + new.row_sum, new.row_max)


def add_values(ctx: KernelContext, acc: RegisterTile, p: RegisterTile, at: TileAt) -> RegisterTile:
    """acc + p @ V of the kv tile."""
    plan, smem = ctx.plan, ctx.smem
    values, first = (smem.k, plan.problem.head_dim) if plan.layout.joined else (smem.v, 0)
    return plan.matmuls.matmul_add(acc, p, values, at.slot, plan.split, first)


def totals(plan: Plan, state: State) -> tuple[RegisterTile, RegisterTile]:
    """(acc relative to the row max, row sum [64]) when all tiles have been taken."""
    row_sum = state.row_sum.sum(axis=1)
    if plan.split.folded:
        row_sum = mma_sync.reduce_folded(row_sum, "sum")
    return state.acc, row_sum


def logits_of_scores(
    ctx: KernelContext,
    work: WorkTile,
    tile: Index,
    s: RegisterTile,
    places: "Places | None" = None,
) -> RegisterTile:
    """Logits in log2 units if `plan.unit_of_logits` is None; else the scores, of that unit.
    `places`: where they lie otherwise than `mma_rowmajor.scores` leaves them.
    """
    plan = ctx.plan
    if plan.unit_of_logits is not None:
        return s
    s = s * plan.problem.scale
    if plan.problem.softcap is not None:
        s = softmax.softcap(s, plan.problem.softcap)
    if plan.problem.score_program is not None:
        s = _scored(ctx, work, places or _places_of(plan, tile), s)
    return softmax.to_log2(s)


# ---- score functions -----------------------------------------------------------------------------


class Places(NamedTuple):
    """The query rows and keys of a tile of logits. Those that a function does not ask for are not
    made: see `functions.numbers_of_rows`.
    """

    registers: Registers
    q_axis: int
    row: Callable[[], RegisterTile]  # query rows of the q chunk, along that axis
    key: Callable[[], Value]


def places_along(
    shape: tuple[int, int], layout: Layout, q_axis: int, first: Callable[[], Index]
) -> Places:
    """Places of a tile that has the rows of a chunk along one axis, and keys from `first` on along
    the other.
    """
    registers = Registers(shape, layout)
    return Places(
        registers,
        q_axis,
        row=lambda: registers.along(q_axis, 0).x,
        key=lambda: registers.along(1 - q_axis, first()),
    )


def _places_of(plan: Plan, tile: Index) -> Places:
    """Places of the logits of all warps."""
    split, own = plan.split, mma_rowmajor.ROWS
    registers = Registers((ROWS, split.width), mosaic.TILE)

    def warp_and_row() -> tuple[RegisterTile, RegisterTile]:
        row = registers.along(0, 0).x
        return row // own, row % own

    def query_row() -> RegisterTile:
        warp, row = warp_and_row()
        return split.row_block(warp) * own + split.query(row)

    def key() -> Value:
        warp, row = warp_and_row()
        first = tile * plan.keys.tile + split.first_key(warp) + split.key(row, 0)
        column = split.key(0, registers.along(1, 0).x)
        return registers.compute(ADD, (Value(first, (0,)), Value(column, (1,))))

    return Places(registers, 0, query_row, key)


def _scored(ctx: KernelContext, work: WorkTile, places: Places, s: RegisterTile) -> RegisterTile:
    """The result of the score function for a tile of logits in natural units."""
    plan, registers, program = ctx.plan, places.registers, ctx.plan.problem.score_program
    head = query = key = Value(None, ())
    of_head, of_query, of_key = (program.depends_on(program.inputs - n) for n in (3, 2, 1))
    if of_head or of_query:
        kv_head, chunk = scheduler.head_and_chunk(plan, work)
        group, row = plan.queries.group, places.row() + chunk * plan.queries.chunk_rows
        token = token_of(plan, row)
        if of_head:
            head = Value(kv_head * group + (row - token * group), (places.q_axis,))
        if of_query:
            begin = work.length - plan.queries_of(work.queries)
            query = Value(begin + token, (places.q_axis,))
    if of_key:
        key = places.key()
    numbers = Value(s, (0, 1)), Value(work.sequence, ()), head, query, key
    result = evaluate(program, numbers, ctx.refs.score_aux, registers)
    return registers.spread(result, (0, 1)).astype(jnp.float32)


# ---- the mask ------------------------------------------------------------------------------------


class Positions(NamedTuple):
    """The query, the key and the query head of each logit of a tile; positions in the sequence."""

    query: RegisterTile
    key: RegisterTile
    head: RegisterTile | None = None  # only where the mask function asks for it
    layout: Layout = mosaic.TILE


def positions_of(ctx: KernelContext, work: WorkTile, tile: Index) -> Positions:
    """Positions of the logits of all warps."""
    plan, split, queries = ctx.plan, ctx.plan.split, ctx.plan.queries
    shape = (ROWS, split.width)
    row, column = mosaic.positions(shape, 0, 0), mosaic.positions(shape, 1, 0)
    warp = row // mma_rowmajor.ROWS
    own = row % mma_rowmajor.ROWS
    key = tile * plan.keys.tile + split.first_key(warp) + split.key(own, column)
    query = split.row_block(warp) * mma_rowmajor.ROWS + split.query(own)
    kv_head, chunk = scheduler.head_and_chunk(plan, work)
    query = query + chunk * queries.chunk_rows
    token, head = token_of(plan, query), None
    if plan.problem.mask_uses_head:
        head = kv_head * queries.group + (query - token * queries.group)
    return Positions(work.length - plan.queries_of(work.queries) + token, key, head)


def masked(
    ctx: KernelContext,
    work: WorkTile,
    tile: Index,
    logits: RegisterTile,
    positions: Callable[[KernelContext, WorkTile, Index], Positions] = positions_of,
) -> Any:
    """A tree of tiles of logits, with -inf where a query does not see a key. `positions`: where
    they lie otherwise than `mma_rowmajor.scores` leaves them.
    """
    plan, problem, mask = ctx.plan, ctx.plan.problem, work.mask
    start, begin = tile * plan.keys.tile, work.length - plan.queries_of(work.queries)
    lo, hi = mask.kv_full_range(begin, work.length, work.length)

    def hidden():
        at = positions(ctx, work, tile)
        allowed = mask.allows(at.query, at.key, work.length)
        if problem.mask_program is not None:
            allowed = allowed & _seen(ctx, work, at, begin if problem.tree else 0)
        return jax.tree.map(lambda x: jnp.where(allowed, x, -jnp.inf), logits)

    if problem.tree:  # which hides none of the rows before the drafts
        hi = jnp.minimum(hi, begin)
    elif problem.mask_program is not None:
        return hidden()
    whole = (start >= lo) & (start + plan.keys.tile <= hi)
    return lax.cond(whole, lambda: logits, hidden)


def token_of(plan: Plan, query: RegisterTile) -> RegisterTile:
    """query // group, by multiplication: LLVM makes a division of small numbers one of 16 bits,
    which that of JAX 0.12 then does not know for this GPU.
    """
    group, bits, rows = plan.queries.group, 20, plan.queries.chunks * plan.queries.chunk_rows
    factor = -(-(2**bits) // group)
    if group & (group - 1) == 0 or rows * group >= 2**bits or rows * factor >= 2**31:
        return query // group
    return query * factor // 2**bits


def _seen(ctx: KernelContext, work: WorkTile, at: Positions, begin: Index) -> RegisterTile:
    """Whether the mask function shows the keys of a tile; it counts positions from `begin`."""
    positions = (at.head, at.query - begin, at.key - begin)
    values = [Value(jnp.int32(0), ()) if x is None else Value(x, (0, 1)) for x in positions]
    numbers = (Value(work.sequence, ()), *values)
    return functions.seen_at(ctx, numbers, functions.Registers(at.key.shape, at.layout))
