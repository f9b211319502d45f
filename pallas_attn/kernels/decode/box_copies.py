"""Copies of a kv tile of interleaved pages to shared memory on Hopper: by TMA, one copy for all
rows of a page. `loads.copy_tile` would issue a copy a row, since other heads lie between two rows
of a head.

A tile that the length cuts is copied row by row: only rows that exist are read, and the rest of the
tile is filled with zeros. These are programs of one thread, each of which has one row of the tile.
"""

from pallas_attn.kernels.decode import loads
from pallas_attn.kernels.decode.loads import live_keys, load_page, place_of
from pallas_attn.kernels.decode.plan import ZERO_BYTES, Plan, at_least
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.threads import Box, Word
from pallas_attn.kernels.lang.types import Index

MOST_COLUMNS = 256  # widest box that TMA copies


def serves(plan: Plan) -> bool:
    """Whether TMA can copy the rows of a page at once, and saves copies by it."""
    columns = plan.problem.head_dim + plan.problem.v_head_dim
    aligned = columns <= MOST_COLUMNS and columns * plan.itemsize % 128 == 0
    keys = plan.keys
    return plan.layout.joined and aligned and keys.contiguous_rows < keys.page_rows


def load_pages(ctx: ThreadContext) -> Index:
    """The page of this thread's row of a tile."""
    row = ctx.thread.index
    return load_page(ctx, row, row < live_keys(ctx))


def copy_tile(ctx: ThreadContext) -> None:
    """Issues the copies of a tile."""
    thread, (refs, smem), at, plan = ctx
    problem, tile, rows, index = plan.problem, plan.keys.tile, plan.keys.page_rows, thread.index
    ((array,),), layout = refs.caches, plan.layout
    (row_bytes,) = plan.row_bytes
    row_words = row_bytes // 16
    live = at_least(live_keys(ctx), 0)
    wanted = at.wanted >= 1
    thread.announce(smem.barriers, at.slot, index * 0 + tile * row_bytes, (index < 1) & wanted)
    place = place_of(ctx, index, index < live)
    to, done = Word(smem.k, (at.slot * tile + index) * row_words), Word(smem.barriers, at.slot)
    begins = (index % rows < 1) & (index < tile)
    shape = layout.box(rows, problem.head_dim + problem.v_head_dim)
    box = Box(array, layout.coordinates(place), shape)
    thread.copy_box(to, box, done, begins & (live >= tile))

    def copy_rows(_: Index, carry: list) -> list:
        line = layout.number(thread, place) * row_words
        nbytes = index * 0 + row_bytes
        thread.copy(to, Word(array, line), nbytes, done, index < live)
        missing = (live * -1 + tile) * row_bytes
        chunk = index * ZERO_BYTES
        zeros = thread.minimum(missing - chunk, ZERO_BYTES)
        end = (at.slot + 1) * (tile * row_words) + chunk // 16 - missing // 16
        source = Word(refs.counters, thread.to_int64(chunk * 0))
        thread.copy(Word(smem.k, end), source, zeros, done, zeros >= 1)
        return carry

    is_cut = wanted & (live < tile)
    thread.loop(thread.select(is_cut, live * 0 + 1, 0), [], copy_rows)


COPIES = loads.COPIES._replace(copy_tile=copy_tile, load_pages=load_pages)
