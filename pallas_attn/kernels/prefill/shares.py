"""Which block takes what where the results of packed rows are merged with others: rows of keys that
several sequences share, read once for all of them, which may be many and long or none at all.

A step is a kv tile of a q tile. The steps of a launch are numbered: sequence after sequence, kv
head after kv head, q tile after q tile. Block c of C takes steps [c*T/C, (c+1)*T/C) of the T that
there are, so that all blocks read as much whatever the lengths. What a block has of one q tile is a
unit; it writes a partial. Partials are numbered by q tile + block, which no two have in common.

Where whole blocks a q tile are nearly all blocks, the others stay idle: q tiles of one kv head that
are as long then read the same keys at the same time, and from L2.

Every block counts for itself, from the starts and the lengths; the first one writes the sums down
for `merge`.
"""

from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention.plan import Context
from pallas_attn.kernels.decode import scheduler
from pallas_attn.kernels.lang.mosaic import ThreadContext

Ref = Any
Scalar = Any

LEAST_STEPS = 2  # of a block: fewer take no less time
MOST_IDLE = 16  # one of so many blocks may be idle


class Sums(NamedTuple):
    """Of the sequences before each one: int32[plan.table_size]."""

    q_tiles: Ref  # of a kv head
    steps: Ref


class CountRefs(NamedTuple):
    """What `count` reads, and what it writes."""

    starts: Ref  # int32[M + 1]
    lengths: Ref  # int32[M]
    sums: Sums
    kept: Ref  # int32[2, plan.table_size] in global memory: the sums


def sums_type(plan: Any) -> Sums:
    return Sums(*(plgpu.SMEM((plan.table_size,), jnp.int32) for _ in Sums._fields))


def kv_tiles(plan: Any, length: Any) -> Any:
    """Of a sequence, at least one: what has no key is a partial of none. The length is one of a
    thread's integers.
    """
    return (length + (plan.config.block_kv - 1)) // plan.config.block_kv


def count(ctx: ThreadContext) -> None:
    """The running sums, by one warp. `ctx.refs`: CountRefs."""
    thread, refs, block, plan = ctx
    lane, mine, each = thread.index % 32, thread.index < 32, plan.lane_sequences
    last, zero = plan.problem.batch - 1, thread.index * 0
    tiles, steps, found = zero, zero, []
    for place in [lane * each + i for i in range(each)]:
        m = thread.minimum(place, last)
        rows = thread.load(refs.starts, m + 1, 4) - thread.load(refs.starts, m, 4)
        length = thread.load(refs.lengths, m, 4)
        length = thread.maximum(thread.minimum(length, plan.problem.kv_len), 1)
        own = thread.select(place <= last, plan.q_tiles_of(rows, lambda x, y: x // y), 0)
        tiles, steps = tiles + own, steps + own * kv_tiles(plan, length)
        found.append((tiles, steps))
    before = [thread.running_sum(x) - x for x in (tiles, steps)]
    writes = mine & (block < 1)
    for number, sums in enumerate(refs.sums):
        row = number * plan.table_size
        for i, some in enumerate(found):
            value, at = before[number] + some[number], lane * each + (i + 1)
            thread.shared_store(sums, at, value, mine)
            thread.store(refs.kept, thread.wide(at + row), value, 4, writes)
        first = thread.index < 1
        thread.shared_store(sums, zero, zero, first)
        thread.store(refs.kept, thread.wide(zero + row), zero, 4, first & (block < 1))
    thread.sync()


class Share(NamedTuple):
    """Steps [first, end) of a block, and the q tiles that have some of them."""

    block: Scalar
    first: Scalar
    end: Scalar
    q_tile: Scalar  # the first
    units: Scalar  # how many


def share_of(ctx: Context, block: Any) -> Share:
    plan, sums = ctx.plan, ctx.smem.sums
    heads = plan.problem.kv_heads
    q_tiles, total = (x[plan.problem.batch] * heads for x in sums)
    blocks = blocks_of(plan, q_tiles, total, lax.div, jnp.clip)
    each, more = lax.div(total, blocks), lax.rem(total, blocks)
    first = block * each + jnp.minimum(block, more)
    end = jnp.where(block < blocks, first + each + (block < more).astype(jnp.int32), first)
    q_tile = q_tile_of(ctx, first)
    last = q_tile_of(ctx, jnp.maximum(end - 1, first))
    return Share(block, first, end, q_tile, jnp.where(end > first, last - q_tile + 1, 0))


def blocks_of(plan: Any, q_tiles: Any, steps: Any, div: Any, clip: Any) -> Any:
    """How many blocks share so many steps of so many q tiles."""
    grid = plan.grid
    whole = div(q_tiles * 0 + grid, clip(q_tiles, 1, grid)) * q_tiles
    idle = clip(whole * -1 + grid, 0, grid)
    few = clip(idle * -1 + (grid // MOST_IDLE + 1), 0, 1)  # 1 where they are few enough
    most = idle * few * -1 + grid
    return clip(div(steps, steps * 0 + LEAST_STEPS), 1, most)


class _Sequence(NamedTuple):
    """Of a sequence: running sums over all kv heads, and its own numbers of one."""

    q_tiles_before: Scalar
    steps_before: Scalar
    q_tiles: Scalar
    kv_tiles: Scalar


def _sequence(ctx: Context, m: Scalar) -> _Sequence:
    heads, (q_tiles, steps) = ctx.plan.problem.kv_heads, ctx.smem.sums
    own = jnp.maximum(q_tiles[m + 1] - q_tiles[m], 1)  # 0 only where there is no step
    of_each = jnp.maximum(lax.div(steps[m + 1] - steps[m], own), 1)
    return _Sequence(q_tiles[m] * heads, steps[m] * heads, own, of_each)


def q_tile_of(ctx: Context, step: Scalar) -> Scalar:
    """The q tile that has a step, among those of all sequences and kv heads."""
    last, heads = ctx.plan.problem.batch - 1, ctx.plan.problem.kv_heads
    found = _sequence(ctx, scheduler.last_within(ctx.smem.sums.steps, last, step, heads))
    return found.q_tiles_before + lax.div(step - found.steps_before, found.kv_tiles)


def kv_tiles_of(ctx: Context, m: Scalar, q_tile: Scalar, share: Share) -> tuple[Scalar, Scalar]:
    """The kv tiles [lo, hi) of a q tile that a share has."""
    found = _sequence(ctx, m)
    begin = found.steps_before + (q_tile - found.q_tiles_before) * found.kv_tiles
    lo, hi = (jnp.clip(x - begin, 0, found.kv_tiles) for x in (share.first, share.end))
    return lo, hi
