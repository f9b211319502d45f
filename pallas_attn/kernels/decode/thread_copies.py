"""How a kv tile comes to shared memory where there are no bulk copies: by cp.async, 16 bytes a
thread at a time. A tile is there when each thread's own copies are and all threads have met.
"""

from collections.abc import Callable

from pallas_attn.kernels.decode.loads import live_keys, load_page, place_of
from pallas_attn.kernels.decode.plan import Copies
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.threads import Word
from pallas_attn.kernels.lang.types import Index


def make_barriers(ctx: ThreadContext) -> None:
    """None is needed: threads wait for their own copies."""


def wait_and_meet(ctx: ThreadContext, left: int | None) -> None:
    """All threads meet, when all but the last `left` groups of their copies are there; None:
    without a wait.
    """
    if left is not None:
        ctx.thread.wait_copies(left)
    ctx.thread.sync()


def meet(ctx: ThreadContext) -> None:
    """All threads meet: the next tile is there, and the slot that is filled next has been read.
    With a single stage, only the latter.
    """
    stages = ctx.plan.tiling.stages
    wait_and_meet(ctx, None if stages == 1 else stages - 2)


def wait(ctx: ThreadContext) -> None:
    """Waits for the tile that threads have just begun to copy, with a single stage."""
    wait_and_meet(ctx, 0)


def load_pages(ctx: ThreadContext) -> Index:
    """The page of a stretch of the tile: every warp looks up all of them, a lane each."""
    live, skipped = live_keys(ctx), ctx.thread.index % 32 * ctx.plan.keys.page_rows
    return load_page(ctx, skipped, live - skipped >= 1)


def copy_tile(ctx: ThreadContext) -> None:
    """Issues the copies of a tile; zeros where there is no row."""
    thread, (refs, smem), at, plan = ctx
    tile = plan.keys.tile
    live = live_keys(ctx)
    arrays = plan.layout.arrays_of(thread, refs.caches, at.sequence)
    start = at.slot * tile
    number_of = row_numbers(ctx, live)
    for array, ring, nbytes in zip(arrays, (smem.k, smem.v), plan.row_bytes, strict=False):
        words = nbytes // 16
        for first in range(0, tile * words, 128):
            index = thread.index + first
            row, word = index // words, index % words
            inside = None if first + 128 <= tile * words else row < tile
            source = number_of(thread.minimum(row, tile - 1)) * words + thread.to_int64(word)
            to = Word(ring, (start + row) * words + word)
            thread.copy_async(to, Word(array, source), row < live, inside)
    rings = (smem.k_scale, smem.v_scale) if plan.scaled else ()
    for array, ring in zip(arrays[2:], rings, strict=True):
        for first in range(0, tile, 128):
            row = thread.index + first
            inside = None if first + 128 <= tile else row < tile
            source = number_of(thread.minimum(row, tile - 1))
            thread.copy_async(Word(ring, start + row), Word(array, source), row < live, inside, 4)
    thread.commit_copies()


def row_numbers(ctx: ThreadContext, live: Index) -> Callable[[Index], Index]:
    """Row of the tile, of which `live` exist -> its number in the cache's array."""
    thread, memory, at, plan = ctx
    rows = plan.keys.page_rows
    if not plan.layout.paged:
        begin = plan.layout.number(thread, place_of(ctx, thread.index * 0, live >= 1))
        return lambda row: begin + thread.to_int64(row)

    def number_of(row: Index) -> Index:
        stretch = row // rows
        if plan.keys.tile // rows <= 32:
            page = thread.of_lane(at.page, stretch)
        else:
            page = load_page(ctx._replace(refs=memory.refs), row, row < live)
        place = place_of(ctx._replace(at=at._replace(page=page)), row, row < live)
        return plan.layout.number(thread, place)

    return number_of


COPIES = Copies(copy_tile, load_pages, meet, wait, make_barriers, bulk=False)
