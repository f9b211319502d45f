"""Work tiles that blocks claim one by one, so that those at work at one time read the same rows: of
long packed documents, of causal rows whose K and V are more than L2 holds, and in the backward.

A table that deals ranks to blocks (`tile_scheduler.schedule_by_rank`) ends them all at one time,
but what they do at one time are equally long work tiles of all documents, whose K and V are more
than L2 holds. Here neighbouring rows are taken together, which read the same K and V, by whichever
block is free (`tile_scheduler.claimed`); only the last kv head's go by rank, so that the longest do
not begin last.

Without documents a table knows what each work tile costs, but not that some blocks are a little
slower. Blocks that begin together read the same keys; by and by they drift apart, and where K and V
of a head are more than L2 holds, each reads keys from memory that others have read before. Claimed
by kv head, the longest first, the work tiles of a head end with the short ones, and all blocks
begin with the next head together. The matmuls wait a little more, as all blocks ask for the same
keys at once, but at the power limit what is not read from memory is worth more than that. Where L2
holds K and V of a head, a table is faster. The backward reads more a step, and gains more: its
order is `flash_bwd.plan.schedule`'s.

A block's first work tile follows from its number. Each later one it claims from a counter in global
memory: the producer (`produce`), before it loads the one before or, without documents, when two of
its entries are on their way, since consumers load the next q tile during this one and so ask for
one ahead (`consume`). It hands the code on in a ring of shared memory, -1 when there is none left.
No one waits to write there: each work tile has two entries of the ring of K and V at least
(`Plan.claims`), so the producer is at most stages / 2 work tiles ahead of the last consumer, and
its codes one more: fewer than RING. In the backward it waits for the keys of each work tile to be
free, and is no more than one ahead.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention.plan import Context
from pallas_attn.kernels.flash_fwd import tile_scheduler
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.mosaic import ThreadContext

RING = 8  # codes
MOST_STAGES = 2 * (RING - 2)  # of the ring of K and V


class Smem(NamedTuple):
    """Shared memory."""

    codes: Any  # int32, of which the last RING are the codes
    ready: Any  # barriers, one for each

    def place(self, slot: Any) -> Any:
        return slot + (self.codes.shape[0] - RING)


def scratch() -> Smem:
    return Smem(codes=plgpu.SMEM((RING,), jnp.int32), ready=barriers())


def barriers() -> Any:
    return plgpu.Barrier(num_barriers=RING, num_arrivals=1)


def counter() -> Any:
    """How many work tiles of a launch have been claimed."""
    return jax.new_ref(jnp.zeros((1,), jnp.int32))


class _Refs(NamedTuple):
    counter: Any
    schedule: Any
    codes: Any


def first_code(ctx: Context, block: Any) -> Any:
    """The code of a block's first work tile. A sum: within `jax.shard_map` the type of what is read
    says that it varies over the mesh, that of what is computed does not, and the carry of a loop
    has to keep its type.
    """
    return ctx.refs.schedule[0, block + 1] + jnp.int32(0)


def claim(ctx: Context, index: Any) -> Any:
    """The code of the block's work tile `index`, which consumers may read from now on."""
    smem = ctx.smem.claims
    slot = lax.rem(index, jnp.int32(RING))
    refs = _Refs(ctx.refs.counter, ctx.refs.schedule, smem.codes)
    threads.each_thread(mosaic.in_context(_one_claim, ctx.plan), refs, smem.place(slot))
    plgpu.barrier_arrive(smem.ready.at[slot])
    return smem.codes[smem.place(slot)]


def claimed(ctx: Context, index: Any) -> Any:
    """What `claim` has found, for consumers, when it has."""
    smem, slot = ctx.smem.claims, lax.rem(index, jnp.int32(RING))
    plgpu.barrier_wait(smem.ready.at[slot])
    return smem.codes[smem.place(slot)]


def _one_claim(ctx: ThreadContext) -> None:
    thread, refs, slot, plan = ctx
    first, most = thread.index < 1, plan.work_tiles - 1
    number = thread.take(refs.counter, thread.index * 0, first) + plan.grid
    code = thread.load(refs.schedule, thread.minimum(number, most) + 1, 4)
    code = thread.select(number < plan.work_tiles, code, -1)
    thread.shared_store(refs.codes, slot, code, first)
    thread.sync()


def produce(ctx: Context, block: Any, how: Any) -> None:
    """All work tiles of a block. `how`: what is read of the work tile of a code, long before it is
    used; which kv tiles that leaves; and what loads them, counting entries.
    """
    ends_of, span_of, entries = how

    def one_tile(carry):
        index, code, count, ends = carry
        # What documents leave of a work tile is read long before it is used: it is claimed first.
        following = None if ends is None else claim(ctx, index + 1)
        tile = tile_scheduler.tile_of(ctx, code)
        span = span_of(tile, ends)
        if following is None:
            late = functools.partial(claim, ctx, index + 1)
            count, following = entries(tile, span, count, late, code)
        else:
            ends = ends_of(jnp.maximum(following, 0))
            count, _ = entries(tile, span, count)
        return index + 1, following, count, ends

    code = first_code(ctx, block)
    start = jnp.int32(0), code, jnp.int32(0), ends_of(code)
    lax.while_loop(lambda carry: carry[1] >= 0, one_tile, start)


def consume(ctx: Context, block: Any, first_q: Any, compute: Any) -> None:
    """All work tiles of a block, by functions of `sm90`."""
    code = first_code(ctx, block)
    first_q(code)

    def one_tile(carry):
        index, code, slot = carry
        following = claimed(ctx, index + 1)
        next_one = jnp.maximum(following, 0), lambda: following >= 0
        slot, _ = compute(index, code, None, slot, next_one)
        return index + 1, following, slot

    lax.while_loop(lambda carry: carry[1] >= 0, one_tile, (jnp.int32(0), code, jnp.int32(0)))
