"""How rows of a latent cache come to shared memory: by TMA, swizzled for wgmma, a tile of keys in
blocks of columns, each of which can be waited for and is let go of by itself.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._problem import DecodeInputs
from pallas_attn.kernels.attention import cache_layout
from pallas_attn.kernels.attention.cache_layout import Layout, Row
from pallas_attn.kernels.decode import producer, scheduler
from pallas_attn.kernels.decode.scheduler import Piece, Plan, Share, Table
from pallas_attn.kernels.lang import mosaic, threads

COMPILER = plgpu.CompilerParams(
    approx_math=True,
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    unsafe_no_auto_barriers=True,  # each store says what makes it seen
)

Array = Any
Ref = Any
Scalar = Any

TILE = 64  # keys
WIDE = 64  # columns of a swizzle of 128 bytes
AHEAD = 1  # tiles between one that is asked for and the one that is brought to L2


class Refs(NamedTuple):
    """Global memory that is read."""

    q: Ref  # [M * padded, H]
    kv: Ref  # [layers * sequences or pages, rows, H]
    given: scheduler.Lengths
    page_table: Ref | None
    layer: Ref | None


def refs_of(inputs: DecodeInputs, layout: Layout, rows: int) -> Refs:
    """`rows`: of query that a sequence has in memory; those past its own are zeros."""
    m, *_, width = inputs.q.shape
    q = inputs.q.reshape(m, -1, width)
    if rows > q.shape[1]:
        q = jnp.pad(q, ((0, 0), (0, rows - q.shape[1]), (0, 0)))
    return Refs(
        q=q.reshape(-1, width),
        kv=layout.view(inputs.k_cache),
        given=scheduler.Lengths(inputs.lengths, None),
        page_table=inputs.page_table,
        layer=cache_layout.layer_operand(inputs.layer),
    )


def sinks_of(inputs: DecodeInputs, rows: int) -> Array | None:
    """float32[rows]: of a sequence's rows of query; those past its own are 0."""
    if inputs.sinks is None:
        return None
    sinks = jnp.tile(inputs.sinks.astype(jnp.float32), inputs.q.shape[1])
    return jnp.pad(sinks, (0, rows - sinks.size))


def table_of(plan: Plan) -> Table:
    """Its scratch."""
    return Table(*(plgpu.SMEM((plan.sums,), jnp.int32) for _ in Table._fields))


class Thread(threads.Thread):
    """Of one warpgroup of several."""

    @property
    def index(self) -> mosaic.Int:
        return super().index % mosaic.THREADS


def each_thread(program: Any, refs: Any, scalars: Any) -> None:
    """`mosaic.each_thread`, of one warpgroup."""
    mosaic.each_thread(program, refs, scalars, Thread())


def sync(thread: threads.Thread, refs: Any, scalars: Any) -> None:
    """The warpgroup's threads meet."""
    del refs, scalars
    thread.sync()


def lay_out(plan: Plan, refs: Refs, table: Table) -> None:
    """By one warpgroup, for all."""
    program = functools.partial(scheduler.lay_out, plan=plan, meanwhile=lambda: None)
    each_thread(program, (refs.given, table), producer.usable(plan, refs.layer))


def pieces(plan: Plan, table: Table, share: Share, body: Any, carry: Any) -> Any:
    """`body(piece, number, carry)` for each piece of the block."""

    def one(state):
        unit, m, number, carry = state
        piece = scheduler.piece_at(plan, table, share, unit, m)
        return piece.following, piece.m, number + 1, body(piece, number, carry)

    m = scheduler.sequence_of(plan, table, share.first)
    start = (share.first, m, jnp.int32(0), carry)
    return lax.while_loop(lambda state: state[0] < share.end, one, start)[3]


class Block(NamedTuple):
    """Columns of a tile, and where they go."""

    columns: Any  # of K
    to: Ref  # [TILE, columns]
    ready: Ref  # the barrier that says they are there
    free: Ref | None  # and the one that says that what lay there is not needed any more, which
    again: Any  # has to be asked only where something did


def load(  # noqa: PLR0913
    plan: Plan,
    refs: Refs,
    table: Table,
    piece: Piece,
    count: Scalar,
    blocks_of: Callable,
    bring: Callable | None = None,
) -> Scalar:
    """All tiles of a piece; `blocks_of(number of the tile)` since the kernel began. Comes back with
    the number after the last. `bring(tile)`: whether this block has a tile brought to L2 before it
    is asked for.
    """
    producer.check_skipped_pages(plan, refs, table, piece, each_thread)

    def one_tile(tile, carry):
        count, pages = carry
        if bring is not None:
            later = tile + AHEAD
            wanted = bring(later) & (later < piece.end)
            pl.when(wanted)(functools.partial(_bring, plan, refs, piece, later))
        for number, block in enumerate(blocks_of(count)):
            if block.free is not None:
                pl.when(block.again)(functools.partial(plgpu.barrier_wait, block.free))
            for n, page in enumerate(pages):
                first = n * plan.page_rows
                place = (tile * TILE + first, first, page)
                lost = table.lost if number == 0 else None
                _rows(plan, refs, lost, piece, place, block)
        return count + 1, _pages(plan, refs, piece, tile + 1)

    ahead = _pages(plan, refs, piece, piece.tile)
    return lax.fori_loop(piece.tile, piece.end, one_tile, (count, ahead))[0]


def _pages(plan: Plan, refs: Refs, piece: Piece, tile: Scalar) -> list[Scalar | None]:
    """Of each stretch of a tile that lies together in memory; asked for a tile ahead."""
    rows = [tile * TILE + first for first in range(0, TILE, plan.page_rows)]
    if not plan.layout.paged:
        return [None for _ in rows]
    table: Any = refs.page_table
    last = jnp.maximum(piece.length - 1, 0)
    return [table[piece.m, plan.layout.entry(jnp.minimum(row, last))] for row in rows]


def _bring(plan: Plan, refs: Refs, piece: Piece, tile: Scalar) -> None:
    """A tile to L2."""
    blocks = plan.problem.head_dim // WIDE
    width = WIDE * next(n for n in (4, 3, 2, 1) if blocks % n == 0)
    for n, page in enumerate(_pages(plan, refs, piece, tile)):
        slab, row = _place(plan, refs, piece, tile * TILE + n * plan.page_rows, page)
        for column in range(0, plan.problem.head_dim, width):
            columns = pl.ds(column, width)
            plgpu.async_prefetch(refs.kv.at[slab, pl.ds(row, plan.page_rows), columns])


def _place(
    plan: Plan, refs: Refs, piece: Piece, position: Scalar, page: Scalar | None
) -> tuple[Scalar, Scalar]:
    """Where a row lies in the view of the cache; if its layer or page is missing, another's: the
    result will be NaN.
    """
    layout, layer = plan.layout, None
    if refs.layer is not None:
        layer = jnp.clip(refs.layer[0], 0, layout.layers - 1)
    if page is not None:
        page = jnp.where(layout.lacks_page(page), 0, page)
    return layout.slice_of(Row(piece.m, 0, position, layer, page))


def _rows(  # noqa: PLR0913
    plan: Plan, refs: Refs, lost: Ref | None, piece: Piece, place: tuple, block: Block
) -> None:
    """A block's columns of what lies together in memory: of a tile, or of a page of it."""
    row, first, page = place

    def copy():
        slab, within = _place(plan, refs, piece, row, page)
        source = refs.kv.at[slab, pl.ds(within, plan.page_rows), block.columns]
        to = block.to.at[pl.ds(first, plan.page_rows)]
        plgpu.copy_gmem_to_smem(source, to, block.ready)

    if page is None:
        return copy()

    @pl.when(row < piece.length)
    def _():
        if lost is not None:
            missing = plan.layout.lacks_page(page)
            pl.when(missing)(lambda: each_thread(_lose, lost, piece.m))
        copy()

    pl.when(row >= piece.length)(lambda: plgpu.barrier_arrive(block.ready))
    return None


def _lose(thread: threads.Thread, lost: Ref, m: Any) -> None:
    thread.shared_store(lost, m, thread.index * 0 + 1, thread.index < 1)


def clear(tile: Ref, columns: int, live: Scalar) -> None:
    """Zeros over values past the last key: whatever lies there, NaN too, has a weight of 0."""
    inside = mosaic.positions((TILE, WIDE), 0, 0) < live
    for column in range(0, columns, WIDE):
        ref = tile.at[:, pl.ds(column, WIDE)]
        ref[...] = jnp.where(inside, plgpu.load(ref, layout=mosaic.TILE), 0)
