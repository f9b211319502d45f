"""dQ of the fused Hopper kernel, added up in slots of a small float32 array that stays in L2, and
rounded by the kernel itself. The sums of a whole call would be set to zero, written to memory, read
and rounded: a tenth of the time of 600 to 700 keys.

A kv head has slot `head % slots` for the sums of all its query heads. When all additions of a work
tile to half of the rows are made, a warpgroup counts the work tile at a counter of the kv head, one
for each half. The warpgroup that counts the last work tile rounds its half to dq,
leaves zeros, and counts at the slot, whose next kv head may begin when both halves are done: the
producer waits for that before it loads the keys, and the additions of a work tile follow its keys.

No deadlock: blocks claim all their work tiles, in an order in which a kv head's come after all of
the kv head before it in its slot (`number`). Of the work tiles that are not finished, the first
therefore waits for none. It is in work, as its block has finished all that it claimed before. So it
does not matter how many blocks a GPU runs at a time.

Order of memory accesses:

- Additions from registers (`red.global`, relaxed), by the warpgroup that counts, are ordered before
  the count by a barrier of its threads and the count itself (acq_rel, of the GPU).
- Additions by TMA are in memory when the thread that issued them has waited for its groups; the
  warpgroups, each of which adds some columns, then meet at an mbarrier.
- The last count acquires what the counts before it released, for all threads of its warpgroup
  after the barrier that follows; loads then find the sums in L2.
- Zeros are ordered before the count at the slot (a barrier, then release), which the producer
  acquires. It orders them before additions by TMA, too (fence.proxy.async); consumers follow by the
  mbarrier of the keys.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.flash_bwd.key_tiles import KeyTile
from pallas_attn.kernels.lang import threads
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.types import GmemRef, Index, Predicate, SmemRef

if TYPE_CHECKING:
    from pallas_attn.kernels.flash_bwd.plan import KeyPlan
    from pallas_attn.kernels.flash_bwd.work_order import WorkOrder

HALVES = 2  # halves of the rows: one a consumer warpgroup
COLUMNS = 8  # columns of dq in 16 bytes, which a thread stores
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
    """Slots for three L2 groups: blocks begin with one while others round the one before the last.
    With two they waited.
    """
    return min(order.heads, 3 * order.l2_heads)


def counters(order: "WorkOrder") -> jax.ShapeDtypeStruct:
    """Work tiles counted for each half of each kv head, and halves rounded in each slot: zeros at
    first, a multiple of 4.
    """
    count = HALVES * order.heads + number(order)
    return jax.ShapeDtypeStruct((-(-count // 4) * 4,), jnp.int32)


class SlotPlace(NamedTuple):
    """Half of the rows of a kv head."""

    batch: Index
    kv_head: Index
    head: Index  # the kv head's number, over all batch rows
    slot: Index
    half: Index


def place(order: "WorkOrder", work: KeyTile, half: Index) -> SlotPlace:
    head = work.batch * order.problem.kv_heads + work.kv_head
    slot = lax.rem(head, jnp.int32(number(order)))
    return SlotPlace(work.batch, work.kv_head, head, slot, half)


class _Refs(NamedTuple):
    counters: GmemRef
    flags: SmemRef = None


# ---- before the first addition of a work tile ---------------------------------------------------


def acquire(ctx: KernelContext, work: KeyTile) -> None:
    """Waits until the slot's kv head before this one is rounded."""
    order = ctx.plan.order
    if number(order) == order.heads:
        return
    at = place(order, work, jnp.int32(0))
    rounds = lax.div(at.head, jnp.int32(number(order)))
    refs = _Refs(ctx.refs.dq_counters)

    def look(_: Index) -> Index:
        return threads.run(_is_free, ctx.plan, refs, (at.slot, rounds), returns="one")

    lax.while_loop(lambda free: free == 0, look, (rounds == 0).astype(jnp.int32))


def _is_free(ctx: ThreadContext) -> Any:
    thread, refs, (slot, rounds), plan = ctx
    return thread.reached(refs.counters, slot + HALVES * plan.order.heads, rounds * HALVES)


# ---- after the last addition of a work tile -----------------------------------------------------


def is_last(ctx: KernelContext, at: SlotPlace) -> Predicate:
    """Counts a work tile at half of a kv head: whether it is the last to be counted."""
    flags = ctx.smem.row_numbers
    threads.run(_count, ctx.plan, _Refs(ctx.refs.dq_counters, flags), at)
    return flags[_flag(ctx.plan, at)] != 0


def _flag(plan: "KeyPlan", at: SlotPlace) -> Index:
    """The place of a warpgroup's flag in `FusedSmem.row_numbers`, behind the numbers."""
    return at.half + plan.config.block_q


def _count(ctx: ThreadContext) -> None:
    thread, refs, at, plan = ctx
    tiles = thread.index * 0 + plan.tiling.kv_tiles
    thread.arrive(refs.counters, at.head * HALVES + at.half, tiles, refs.flags, _flag(plan, at))


def pass_on(ctx: ThreadContext) -> None:
    """Tells, in a program of threads, that half of a kv head is rounded. `ctx`: refs with
    `counters`, and a `SlotPlace`.
    """
    thread, refs, at, plan = ctx
    thread.sync()
    thread.signal(refs.counters, at.slot + HALVES * plan.order.heads, thread.index < 1)
