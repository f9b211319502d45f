"""How a kv tile comes to shared memory on Hopper: by bulk copies, one of K and one of V for each
stretch of rows that lies together in memory. A slot's barrier completes when the bytes announced
for it are there. Programs of one thread; `thread_copies` has the same for GPUs without bulk copies.
"""

from typing import NamedTuple

from pallas_attn.kernels.decode.combine_splits import ZERO_BYTES
from pallas_attn.kernels.decode.memory import live_keys, load_page, row_number
from pallas_attn.kernels.decode.plan import Plan, at_least
from pallas_attn.kernels.lang import threads
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.threads import Thread, Word
from pallas_attn.kernels.lang.types import Index, SmemRef


def make_barriers(thread: Thread, barriers: SmemRef, plan: Plan) -> None:
    """One for each slot of the ring."""
    thread.make_barriers(barriers, plan.config.stages)


def meet(ctx: ThreadContext) -> None:
    """All threads meet: all have read the slot that is filled next."""
    ctx.thread.sync()


def wait(ctx: ThreadContext) -> None:
    """Waits until the tile of a `producer.Phase` is there."""
    ctx.thread.wait(ctx.refs, *ctx.at)


class _Stretch(NamedTuple):
    """Rows of a tile that lie together in memory and are copied by one thread."""

    skipped: Index  # the first of its keys, in the tile
    live: Index  # how many of its keys exist


def _copy_number(thread: Thread) -> Index:
    """The number of this thread's copy in a tile: lanes that issue copies wait for each other, so
    neighbours are in different warps.
    """
    return thread.index % 32 * threads.WARPS + thread.index // 32


def _stretch(ctx: ThreadContext) -> _Stretch:
    thread, rows = ctx.thread, ctx.plan.keys.contiguous_rows
    live = live_keys(ctx)
    skipped = _copy_number(thread) * rows
    return _Stretch(skipped, thread.minimum(live - skipped, rows))


def load_pages(ctx: ThreadContext) -> Index:
    """The page of this thread's stretch of a tile, well before `copy_tile` needs it."""
    stretch = _stretch(ctx)
    return load_page(ctx, stretch.skipped, stretch.live >= 1)


def copy_tile(ctx: ThreadContext) -> None:
    """Issues the copies of a tile. Only rows that exist are read. Rows of V behind them are filled
    with zeros, by copies too: whatever lay there, NaN too, has a weight of 0, and a store would
    have to wait for all copies under way before it lets others follow.
    """
    thread, (refs, smem), at, plan = ctx
    problem, tile = plan.problem, plan.keys.tile
    dims = problem.head_dim, problem.v_head_dim
    k_bytes, v_bytes = (plan.itemsize * dim for dim in dims)
    live = at_least(live_keys(ctx), 0)
    missing = (live * -1 + tile) * v_bytes
    nbytes = live * k_bytes + tile * v_bytes
    if problem.row_scales:
        nbytes = nbytes + _scale_bytes(live) * 2
    thread.announce(smem.barriers, at.slot, nbytes, (thread.index < 1) & (at.wanted >= 1))
    k, v, *scales = plan.layout.arrays_of(thread, refs.caches, at.sequence)
    skipped, here = _stretch(ctx)
    exists = here >= 1
    line = row_number(ctx, skipped, exists)
    row = at.slot * tile + skipped
    done = Word(smem.barriers, at.slot)
    sides = (k, smem.k, k_bytes), (v, smem.v, v_bytes)
    for (array, ring, size), columns in zip(sides, plan.layout.columns(*dims), strict=True):
        to = Word(ring, row * (size // 16))
        source = line * (columns.row * plan.itemsize // 16)
        if columns.first:
            source = source + columns.first * plan.itemsize // 16
        thread.copy(to, Word(array, source), here * size, done, exists)
    chunk = _copy_number(thread) * ZERO_BYTES
    zeros = thread.minimum(missing - chunk, ZERO_BYTES)
    to = (at.slot + 1) * (tile * v_bytes // 16) + chunk // 16 - missing // 16
    some = (zeros >= 1) & (at.wanted >= 1)
    thread.copy(Word(smem.v, to), Word(refs.counters, thread.wide(chunk * 0)), zeros, done, some)
    if problem.row_scales:  # 4 scales a word: capacities, pages and tiles are multiples of 4
        nbytes = _scale_bytes(at_least(here, 0))
        for array, ring in zip(scales, (smem.k_scale, smem.v_scale), strict=True):
            thread.copy(Word(ring, row // 4), Word(array, line // 4), nbytes, done, exists)


def _scale_bytes(rows: Index) -> Index:
    """Bytes of the scales of so many rows, in whole words."""
    return (rows + 3) // 4 * 16
