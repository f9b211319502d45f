"""Copies of a kv tile to shared memory on Hopper: bulk copies, one of K and one of V for each
stretch of rows that lies together in memory, or one of both where K and V lie side by side. A
slot's barrier completes when the bytes announced for it are there. Programs of one thread;
`thread_copies` has the same for GPUs without bulk copies.
"""

from typing import NamedTuple

from pallas_attn.kernels.decode.combine_splits import ZERO_BYTES
from pallas_attn.kernels.decode.memory import live_keys, load_page, place_of, rings_of
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
    problem, tile, rings = plan.problem, plan.keys.tile, rings_of(ctx)
    scaled = problem.quantized and not problem.unscaled
    k_bytes, (v_ring, v_bytes) = (rings[0][1] if len(rings) > 1 else 0), rings[-1]
    live = at_least(live_keys(ctx), 0)
    missing = (live * -1 + tile) * v_bytes
    nbytes = live * k_bytes + tile * v_bytes
    if scaled:
        nbytes = nbytes + _scale_bytes(live) * 2
    thread.announce(smem.barriers, at.slot, nbytes, (thread.index < 1) & (at.wanted >= 1))
    arrays = plan.layout.arrays_of(thread, refs.caches, at.sequence)
    skipped, here = _stretch(ctx)
    exists = here >= 1
    line = plan.layout.number(thread, place_of(ctx, skipped, exists))
    row = at.slot * tile + skipped
    done = Word(smem.barriers, at.slot)
    for array, (ring, size) in zip(arrays, rings, strict=False):
        words = size // 16
        thread.copy(Word(ring, row * words), Word(array, line * words), here * size, done, exists)
    chunk = _copy_number(thread) * ZERO_BYTES
    zeros = thread.minimum(missing - chunk, ZERO_BYTES)
    to = (at.slot + 1) * (tile * v_bytes // 16) + chunk // 16 - missing // 16
    some = (zeros >= 1) & (at.wanted >= 1)
    thread.copy(
        Word(v_ring, to), Word(refs.counters, thread.to_int64(chunk * 0)), zeros, done, some
    )
    if scaled:  # 4 scales a word: capacities, pages and tiles are multiples of 4
        nbytes = _scale_bytes(at_least(here, 0))
        for array, ring in zip(arrays[2:], (smem.k_scale, smem.v_scale), strict=True):
            thread.copy(Word(ring, row // 4), Word(array, line // 4), nbytes, done, exists)


def _scale_bytes(rows: Index) -> Index:
    """Bytes of the scales of so many rows, in whole words."""
    return (rows + 3) // 4 * 16
