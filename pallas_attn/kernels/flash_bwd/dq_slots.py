"""dQ of the fused Hopper kernel, added up in slots of a small float32 array that stays in L2, and
rounded by the kernel itself. The sums of a whole call would be set to zero, written to memory, read
and rounded: a tenth of the time of 600 to 700 keys.

A kv head has slot `head % slots` for the sums of all its query heads. When both warpgroups have
made all their additions of a work tile, each counts the work tile at a counter of the kv head, one
for each half of the rows. The warpgroup that counts the last work tile rounds its half to dq,
leaves zeros, and counts at the slot, whose next kv head may begin when both halves are done: the
producer waits for that before it loads the keys, and the additions of a work tile follow its keys.

No deadlock: blocks claim all their work tiles, in an order in which a kv head's come after all of
the kv head before it in its slot (`number`). Of the work tiles that are not finished, the first
therefore waits for none. It is in work, as its block has finished all that it claimed before. So it
does not matter how many blocks a GPU runs at a time.

Order of memory accesses:

- Additions from registers (`red.global`, relaxed) are ordered before the count by the mbarrier at
  which the warpgroups meet (release and acquire, of the block) and the count itself (acq_rel, of
  the GPU). Those by TMA are in memory when the thread that issued them has waited for its groups.
- The last count acquires what the counts before it released, for all threads of its warpgroup
  after the barrier that follows; loads then find the sums in L2.
- Zeros are ordered before the count at the slot (a barrier, then release), which the producer
  acquires. It orders them before additions by TMA, too (fence.proxy.async); consumers follow by the
  mbarrier of the keys.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention.tiles import ROWS, KernelContext
from pallas_attn.kernels.flash_bwd.key_tiles import KeyTile
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.types import GmemRef, Index, SmemRef

if TYPE_CHECKING:
    from pallas_attn.kernels.flash_bwd.plan import KeyPlan
    from pallas_attn.kernels.flash_bwd.work_order import WorkOrder

HALVES = 2  # of the rows: one a consumer warpgroup
COLUMNS = 8  # of dq in 16 bytes
IN_FLIGHT = 16  # words of 16 bytes that a thread loads before it uses the first
LEAST_HEADS = 0.25  # kv heads a block: the last ones are rounded while other blocks are idle


def applies(order: "WorkOrder") -> bool:
    """Whether blocks take work tiles in the order of L2 groups, and enough of them that few blocks
    are idle while the last sums are rounded.
    """
    tiling, problem = order.tiling, order.problem
    by_heads = tiling.follows_mask and tiling.chunks == 1 and not order.turns
    has_lengths = bool({"q_lengths", "kv_lengths"} & set(problem.arrays))
    many = order.heads >= LEAST_HEADS * order.grid and not order.has_few_work_tiles
    return by_heads and not has_lengths and many and problem.head_dim % COLUMNS == 0


def number(order: "WorkOrder") -> int:
    """Slots for two L2 groups: blocks begin with one while others finish the one before."""
    return min(order.heads, 2 * order.l2_heads)


def counters(order: "WorkOrder") -> Any:
    """Work tiles counted for each half of each kv head, and halves rounded in each slot."""
    return jax.new_ref(jnp.zeros((HALVES * order.heads + number(order),), jnp.int32))


class _Refs(NamedTuple):
    counters: GmemRef
    flags: SmemRef = None  # whose place `flag_place` says whether all work tiles are counted
    sums: GmemRef = None
    dq: GmemRef = None


class _Place(NamedTuple):
    """Half of a kv head's rows."""

    batch: Index
    kv_head: Index
    head: Index  # kv head, over all batch rows
    slot: Index
    half: Index


def _place(ctx: KernelContext, work: KeyTile, half: Index) -> _Place:
    order = ctx.plan.order
    head = work.batch * order.problem.kv_heads + work.kv_head
    slot = lax.rem(head, jnp.int32(number(order)))
    return _Place(work.batch, work.kv_head, head, slot, half)


def head_of_sums(plan: "KeyPlan", work: KeyTile, head: Index) -> tuple[Index, Index]:
    """The slot of a work tile, and which of its heads query head `head` is."""
    kv_head = work.batch * plan.problem.kv_heads + work.kv_head
    slot = lax.rem(kv_head, jnp.int32(number(plan.order)))
    return slot, head - work.kv_head * plan.problem.group


# ---- before the first addition of a work tile ---------------------------------------------------


def acquire(ctx: KernelContext, work: KeyTile) -> None:
    """Waits until the slot's kv head before this one is rounded."""
    order = ctx.plan.order
    if number(order) == order.heads:
        return
    at = _place(ctx, work, jnp.int32(0))
    rounds = lax.div(at.head, jnp.int32(number(order)))
    refs = _Refs(ctx.refs.dq_counters)

    def look(_: Index) -> Index:
        return threads.run(_is_free, ctx.plan, refs, (at.slot, rounds), returns="one")

    lax.while_loop(lambda free: free == 0, look, (rounds == 0).astype(jnp.int32))


def _is_free(ctx: ThreadContext) -> Any:
    thread, refs, (slot, rounds), plan = ctx
    return thread.reached(refs.counters, slot + HALVES * plan.order.heads, rounds * HALVES)


# ---- after the last addition of a work tile -----------------------------------------------------


def finish(ctx: KernelContext, work: KeyTile, wg: Index) -> None:
    """Counts a work tile, whose additions are in memory and known to both warpgroups, and rounds
    the warpgroup's half of the rows where it is the kv head's last.
    """
    plan, refs, smem = ctx
    at = _place(ctx, work, wg)
    own = _Refs(refs.dq_counters, smem.row_numbers, refs.dq, refs.dq_rounded)
    threads.run(_count, plan, own._replace(sums=None, dq=None), at)
    is_last = smem.row_numbers[flag_place(plan) + wg] != 0
    pl.when(is_last)(lambda: threads.run(_round, plan, own, at))


def flag_place(plan: "KeyPlan") -> int:
    """The place of both warpgroups' flags in `FusedSmem.row_numbers`."""
    return plan.config.block_q


def _count(ctx: ThreadContext) -> None:
    thread, refs, at, plan = ctx
    counter, tiles = at.head * HALVES + at.half, thread.index * 0 + plan.tiling.kv_tiles
    thread.arrive(refs.counters, counter, tiles, refs.flags, at.half + flag_place(plan))


class _Part(NamedTuple):
    """Columns whose sums lie together: all, or a panel where they lie as threads add them."""

    words: int  # words of 16 bytes before them
    first: int  # their first column, in units of `COLUMNS`
    width: int  # columns, of which some may be past the last
    chunks: int  # units of `COLUMNS` that dq has


class _Chunk(NamedTuple):
    """`COLUMNS` columns of a row of dq, or of two."""

    head: Any  # query head in its group
    rows: list[Any]
    words: list[Any]  # places of their sums


def _parts(plan: "KeyPlan") -> list[_Part]:
    from pallas_attn.kernels.flash_bwd import dq_sum

    chunks = plan.problem.head_dim // COLUMNS
    if not dq_sum.is_split_by_rows(plan):
        return [_Part(0, 0, dq_sum.columns(plan), chunks)]
    parts, before = [], 0
    rows = number(plan.order) * plan.problem.group * dq_sum.rows_of_head(plan)
    for width in dq_sum.qk_widths(plan):
        left = min(width // COLUMNS, chunks - before // COLUMNS)
        parts.append(_Part(before * rows // 4, before // COLUMNS, width, left))
        before += width
    return parts


def _chunk_in_rows(plan: "KeyPlan", part: _Part, at: _Place, item: Any) -> _Chunk:
    """Item `item` of a half, of sums in rows [slots, rows, group, columns]."""
    from pallas_attn.kernels.flash_bwd import dq_sum

    group, rows = plan.problem.group, dq_sum.rows_of_head(plan)
    chunk, line = item % part.chunks, item // part.chunks
    head, row = line % group, line // group + at.half * (rows // HALVES)
    word = ((at.slot * rows + row) * group + head) * (part.width // 4) + chunk * 2
    return _Chunk(head, [row], [word, word + 1])


def _chunk_in_pieces(plan: "KeyPlan", part: _Part, at: _Place, item: Any) -> _Chunk:
    """Likewise of sums in pieces of 64 rows, as `mma_rowmajor.add` leaves them: 16 bytes are two
    columns of two rows.
    """
    from pallas_attn.kernels.flash_bwd import dq_sum

    group, pieces = plan.problem.group, dq_sum.rows_of_head(plan) // ROWS
    chunk, lane, piece = item % part.chunks, item // part.chunks % 32, item // part.chunks // 32
    head, piece = piece // (pieces // HALVES), piece % (pieces // HALVES)
    piece = piece + at.half * (pieces // HALVES)
    row = piece * ROWS + lane // 8 * 16 + lane % 8
    word = ((at.slot * group + head) * pieces + piece) * (ROWS * part.width // 4)
    word = word + part.words + chunk * mosaic.THREADS + lane * 4
    return _Chunk(head, [row, row + 8], [word + n for n in range(4)])


def _by_row(words: list[list[Any]]) -> list[list[Any]]:
    """The numbers of a `_Chunk`, by row."""
    if len(words) * 4 == COLUMNS:
        return [words[0] + words[1]]
    return [[x for word in words for x in word[n : n + 2]] for n in (0, 2)]


def _round(ctx: ThreadContext) -> None:
    """A thread reads `IN_FLIGHT` words before it waits for the first."""
    from pallas_attn.kernels.flash_bwd import dq_sum

    thread, refs, at, plan = ctx
    problem, zeros = plan.problem, [thread.number(0.0)] * 4
    by_rows = dq_sum.is_split_by_rows(plan)
    chunk_of, words = (_chunk_in_pieces, 4) if by_rows else (_chunk_in_rows, 2)
    lines = problem.group * dq_sum.rows_of_head(plan) // HALVES * 2 // words

    def store(chunk: _Chunk, part: _Part, item: Any, numbers: list[Any]) -> None:
        for word in chunk.words:
            thread.store_floats(refs.sums, word, zeros, item < lines * part.chunks)
        for row, eight in zip(chunk.rows, _by_row(numbers), strict=True):
            line = (at.batch * problem.q_len + row) * problem.q_heads + chunk.head
            line = thread.to_int64(line + at.kv_head * problem.group)
            column = thread.to_int64(item % part.chunks + part.first)
            value = thread.rounded([x * problem.scale for x in eight], problem.dtype)
            there = (item < lines * part.chunks) & (row < problem.q_len)
            to = line * (problem.head_dim // COLUMNS) + column
            thread.store(refs.dq, to, value, 2 * COLUMNS, there)

    for part in _parts(plan):
        together, items = IN_FLIGHT // words, lines * part.chunks

        def some(n: Any, carry: list[Any], part: _Part = part) -> list[Any]:
            own = [thread.index + (n * together + m) * mosaic.THREADS for m in range(together)]
            chunks = [chunk_of(plan, part, at, item) for item in own]
            loaded = [
                [thread.load_where(refs.sums, x, 16, item < items) for x in chunk.words]
                for item, chunk in zip(own, chunks, strict=True)
            ]
            for item, chunk, words in zip(own, chunks, loaded, strict=True):
                store(chunk, part, item, [thread.numbers(x, 16, "float32") for x in words])
            return carry

        thread.loop(pl.cdiv(items, together * mosaic.THREADS), [], some)
    thread.sync()
    thread.signal(refs.counters, at.slot + HALVES * plan.order.heads, thread.index < 1)
