"""Work tiles that blocks claim one by one, so that those at work at one time read the same rows: of
long packed documents, of causal rows whose K and V are more than L2 holds, and in the backward.

A list for each block (`tile_scheduler.StaticList`) ends all blocks at one time. But of documents,
blocks at work at one time then have equally long work tiles of all of them, whose K and V are more
than L2 holds. Here neighbouring rows are taken together, which read the same K and V, by whichever
block is free; only the last kv head's go by rank, so that the longest do not begin last.

Without documents a list knows what each work tile costs, but not that some blocks are a little
slower. Blocks that begin together read the same keys; by and by they drift apart, and where K and V
of a head are more than L2 holds, each reads keys from memory that others have read before. Claimed
by kv head, the longest first, the work tiles of a head end with the short ones, and all blocks
begin with the next head together. The matmuls wait a little more, as all blocks ask for the same
keys at once, but at the power limit what is not read from memory is worth more than that. Where L2
holds K and V of a head, a list is faster. The backward reads more a step, and gains more: its
order is `flash_bwd.work_order.schedule`'s.

A block's first work tile follows from its number. Each later one it claims from a counter in global
memory: the producer (`Claiming`), before it loads the one before or, without documents, when two of
its entries are on their way, since consumers load the next q tile during this one and so ask for
one ahead (`Claimed`). It hands the code on in a ring of shared memory, -1 when there is none left.
No one waits to write there: each work tile has two entries of the ring of K and V at least
(`is_possible`), so the producer is at most stages / 2 work tiles ahead of the last consumer, and
its codes one more: fewer than RING. In the backward it waits for the keys of each work tile to be
free, and is no more than one ahead.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call.problem import AttentionProblem
from pallas_attn.kernels.attention import segment_spans, tile_scheduler
from pallas_attn.kernels.attention.tile_scheduler import (
    MOST_STAGES,
    Offsets,
    QueryPlan,
    Start,
    Turn,
)
from pallas_attn.kernels.attention.tiles import KernelContext, QueryTiling, sections_of
from pallas_attn.kernels.lang import thread_program, threads
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.types import Barrier, Carry, GmemRef, Index, Predicate, SmemRef

RING = MOST_STAGES // 2 + 2  # codes


class Smem(NamedTuple):
    """Shared memory."""

    codes: SmemRef  # int32, of which the last RING are the codes
    ready: Barrier  # one for each

    def place(self, slot: Index) -> Index:
        return slot + (self.codes.shape[0] - RING)


def scratch() -> Smem:
    return Smem(codes=plgpu.SMEM((RING,), jnp.int32), ready=barriers())


def barriers() -> Barrier:
    return plgpu.Barrier(num_barriers=RING, num_arrivals=1)


def counter(first: int = 0) -> Any:
    """The number of work tiles of a launch that have been claimed, beside the first of each block.
    `first`: minus the grid, where blocks claim their first ones as well.
    """
    return jax.new_ref(jnp.full((1,), first, jnp.int32))


def is_possible(problem: AttentionProblem, tiling: QueryTiling) -> bool:
    """Whether each work tile is known to take a kv tile."""
    if problem.mask_program is not None:
        return False
    return segment_spans.never_empty(problem) or "empty" not in sections_of(problem, tiling)


# ---- the order ----------------------------------------------------------------------------------


def schedule(plan: QueryPlan, offsets: Offsets = ()) -> np.ndarray:
    """int32[1, n]: how many work tiles there are, and their codes in the order in which blocks
    claim them: one kv head after the other. Where there are segments, each from its last rows to
    its first, and the last kv head by rank. Else the longest first, and if several batch rows share
    K and V, the work tiles of all of them together.
    """
    problem, group, bits = plan.problem, plan.problem.group, plan.order.code_bits
    heads = np.arange(plan.order.heads, dtype=np.int32)
    tiles = np.arange(plan.tiling.q_tiles, dtype=np.int32)
    codes_of = functools.partial(tile_scheduler.codes_of, plan)
    if "q_segment_ids" in problem.arrays:
        codes = [codes_of(some, tiles[::-1]) for some in heads.reshape(-1, group)]
        codes[-1] = codes_of(heads[-group:], tiles)
    else:
        by_kv = heads.reshape(-1, problem.share, problem.kv_heads, group).swapaxes(1, 2)
        codes = [codes_of(some, tiles[::-1]) for some in by_kv.reshape(-1, problem.share * group)]
        costs = tile_scheduler.mask_costs(plan, offsets)
        each = [tile_scheduler.costs_of(code, bits, costs, problem.q_heads) for code in codes]
        codes = [x[np.argsort(-c, kind="stable")] for x, c in zip(codes, each, strict=True)]
    every = np.concatenate(codes)
    return np.append(np.int32(every.size), every)[None]


# ---- claiming -----------------------------------------------------------------------------------


class _Refs(NamedTuple):
    counter: GmemRef
    schedule: GmemRef
    codes: SmemRef


def first_code(ctx: KernelContext, block: Index) -> Index:
    """The code of a block's first work tile. `+ 0` drops the mesh-varying type, so that a loop's
    carry keeps its type.
    """
    return ctx.refs.schedule[0, block + 1] + jnp.int32(0)


def claim(ctx: KernelContext, index: Index) -> Index:
    """The code of the block's work tile `index`, which consumers may read from now on."""
    smem, slot = ctx.smem.claims, lax.rem(index, jnp.int32(RING))
    refs = _Refs(ctx.refs.counter, ctx.refs.schedule, smem.codes)
    threads.each_thread(
        thread_program.in_context(_claim_by_thread, ctx.plan), refs, smem.place(slot)
    )
    plgpu.barrier_arrive(smem.ready.at[slot])
    return smem.codes[smem.place(slot)]


def claimed(ctx: KernelContext, index: Index) -> Index:
    """The result of `claim`, for consumers, when it is there."""
    smem, slot = ctx.smem.claims, lax.rem(index, jnp.int32(RING))
    plgpu.barrier_wait(smem.ready.at[slot])
    return smem.codes[smem.place(slot)]


def _claim_by_thread(ctx: ThreadContext) -> None:
    thread, refs, slot, plan = ctx
    work_tiles, grid = plan.order.work_tiles, plan.order.grid
    first = thread.index < 1
    number = thread.take(refs.counter, thread.index * 0, first) + grid
    code = thread.load(refs.schedule, thread.minimum(number, work_tiles - 1) + 1, 4)
    code = thread.select(number < work_tiles, code, -1)
    thread.shared_store(refs.codes, slot, code, first)
    thread.sync()


# ---- the walk over a block's work tiles ----------------------------------------------------------


def claim_next(turn: Turn, entry: Index, code: Index) -> Index:
    """`turn.claim_next`, or `code` where the next work tile is known before."""
    return code if turn.claim_next is None else turn.claim_next(entry, code)


def _claim_among_entries(ctx: KernelContext, index: Index, entry: Index, code: Index) -> Index:
    """Claims work tile `index` when two entries of the one before are on their way; else `code`."""
    return lax.cond(entry == 1, lambda: claim(ctx, index), lambda: code)


@dataclasses.dataclass(frozen=True)
class Claiming:
    """`tile_scheduler.StaticList` of a producer that claims: before a work tile's entries
    (`early`), for what documents leave of the next one is read long before it is used; else among
    them, and the carry of its loop has the code in the field `claim`.
    """

    early: bool

    def start(self, ctx: KernelContext, block: Index) -> Start:
        return Start(-1, (first_code(ctx, block),))

    def for_each_tile(
        self,
        ctx: KernelContext,
        block: Index,
        start: Start,
        body: Callable[[Turn, Any], Any],
        carry: Carry,
    ) -> None:
        del block

        def one_tile(state: Carry) -> Any:
            index, code, carry = state
            following = claim(ctx, index + 1) if self.early else code
            turn = _turn(index, code, following)
            if not self.early:
                among = functools.partial(_claim_among_entries, ctx, index + 1)
                turn = turn._replace(claim_next=among, claim=code)
            carry = body(turn, carry)
            if not self.early:
                following, carry = carry.claim, carry._replace(claim=None)
            return index + 1, following, carry

        lax.while_loop(_has_code, one_tile, (jnp.int32(0), start.codes[0], carry))


class Claimed:
    """`tile_scheduler.StaticList` of consumers: the work tiles that their producer claims."""

    @staticmethod
    def start(ctx: KernelContext, block: Index) -> Start:
        return Start(-1, (first_code(ctx, block),))

    @staticmethod
    def for_each_tile(
        ctx: KernelContext,
        block: Index,
        start: Start,
        body: Callable[[Turn, Any], Any],
        carry: Carry,
    ) -> None:
        del block

        def one_tile(state: Carry) -> Any:
            index, code, carry = state
            following = claimed(ctx, index + 1)
            return index + 1, following, body(_turn(index, code, following), carry)

        lax.while_loop(_has_code, one_tile, (jnp.int32(0), start.codes[0], carry))


def _turn(index: Index, code: Index, following: Index) -> Turn:
    return Turn(index, code, jnp.maximum(following, 0), lambda: following >= 0)


def _has_code(state: Carry) -> Predicate:
    return state[1] >= 0
