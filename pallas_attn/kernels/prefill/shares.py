"""The kv tiles of parts, rows of keys that several sequences share, shared out evenly to blocks:
parts may be many and long, or none at all.

A step is a kv tile of a q tile. The steps of a launch are numbered: sequence after sequence (each
part is one), kv head after kv head, q tile after q tile. Block c of C takes steps
[c*T/C, (c+1)*T/C) of the T that there are, so that all blocks read as much whatever the lengths.
The steps that a block has of one q tile are a unit; it writes a partial. Partials are numbered by q
tile + block, which no two have in common.

Q tiles of one kv head see the same keys, which they should read at the same time: once from memory,
then from L2. Where all sequences have an even number of them, blocks go in pairs, which are dealt
pairs of q tiles: all the above holds for pairs, whose first block takes the first q tile. Where a
kv head then still has several, and whole blocks for each of them are nearly all blocks, the others
stay idle.

Every block counts for itself, from the starts and the lengths; the first one writes the sums down
for `merge_parts`.
"""

from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.decode import scheduler
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.types import GmemRef, Index, SmemRef
from pallas_attn.kernels.prefill import packed_queries
from pallas_attn.kernels.prefill.plan import Plan, divided

LEAST_STEPS = 2  # steps of a block: fewer take no less time
MOST_IDLE = 16  # one of so many blocks may be idle
PAIRED_FROM = 16  # blocks


class Dealing(NamedTuple):
    """How steps are dealt to blocks; as `AT`, where in the table that is written down."""

    groups: Index = 0  # blocks, or pairs of blocks
    paired: Index = 1  # 1 where blocks go in pairs, else 0
    alone: Index = 2  # 1 where no two q tiles of a kv head read the same keys, but those of a pair


AT = Dealing()


class Sums(NamedTuple):
    """Running sums over the sequences before each one, int32[packed_queries.table_size]."""

    q_tiles: SmemRef  # q tiles of a kv head
    steps: SmemRef
    dealing: SmemRef  # int32[3]: `Dealing`


class CountRefs(NamedTuple):
    """PrefillRefs that `count` reads, and those that it writes."""

    starts: GmemRef  # int32[M + 1]
    lengths: GmemRef  # int32[M]
    sums: Sums
    kept: GmemRef  # int32[kept_size]: the sums


def sums_types(plan: Plan) -> Sums:
    sums = plgpu.SMEM((packed_queries.table_size(plan),), jnp.int32)
    return Sums(sums, sums, plgpu.SMEM((len(AT),), jnp.int32))


def kept_size(plan: Plan) -> int:
    return 2 * packed_queries.table_size(plan) + len(AT)


def count(ctx: ThreadContext) -> None:
    """The running sums, by one warp. `ctx.refs`: CountRefs; `ctx.at`: the block."""
    thread, refs, block, plan = ctx
    size, block_kv = packed_queries.table_size(plan), plan.config.block_kv
    lane, mine, each = thread.index % 32, thread.index < 32, packed_queries.lane_sequences(plan)
    last, zero = plan.problem.batch - 1, thread.index * 0
    tiles, steps, odd, totals = zero, zero, zero, []
    over = [zero, zero]  # sequences with more q tiles than one, than two
    for place in [lane * each + i for i in range(each)]:
        m = thread.minimum(place, last)
        rows = thread.load(refs.starts, m + 1, 4) - thread.load(refs.starts, m, 4)
        length = thread.load(refs.lengths, m, 4)
        # At least one kv tile a sequence: what has no key is a partial of none.
        length = thread.maximum(thread.minimum(length, plan.problem.kv_len), 1)
        own = thread.select(place <= last, plan.tiles.q_tiles_of(rows), 0)
        kv_tiles = (length + (block_kv - 1)) // block_kv
        tiles, steps, odd = tiles + own, steps + own * kv_tiles, odd + own % 2
        over = [x + thread.select(own > n, zero + 1, 0) for n, x in enumerate(over, 1)]
        totals.append((tiles, steps))
    before = [thread.running_sum(x) - x for x in (tiles, steps)]
    first, writes = thread.index < 1, block < 1
    for number, sums in enumerate((refs.sums.q_tiles, refs.sums.steps)):
        row = number * size
        for i, total in enumerate(totals):
            value, at = before[number] + total[number], lane * each + (i + 1)
            thread.shared_store(sums, at, value, mine)
            thread.store(refs.kept, thread.to_int64(at + row), value, 4, mine & writes)
        thread.shared_store(sums, zero, zero, first)
        thread.store(refs.kept, thread.to_int64(zero + row), zero, 4, first & writes)
    tiles, steps, odd, *over = (thread.total_of_lanes(x) for x in (tiles, steps, odd, *over))
    paired = thread.select(odd <= 0, zero + int(plan.grid >= PAIRED_FROM), 0)
    alone = thread.select(thread.select(paired >= 1, over[1], over[0]) <= 0, zero + 1, 0)
    for n, x in enumerate(Dealing((zero + plan.grid) >> paired, paired, alone)):
        thread.shared_store(refs.sums.dealing, zero + n, x, first)
        at = thread.to_int64(zero + (2 * size + n))
        thread.store(refs.kept, at, x, 4, first & writes)
    thread.sync()


class Share(NamedTuple):
    """Steps [first, end) of a block or a pair of blocks, and the q tiles that have some of them:
    from `q_tile` on every one, or every other one where blocks are paired.
    """

    block: Index  # the first of the pair
    first: Index
    end: Index
    q_tile: Index
    units: Index  # how many
    paired: Index


def share_of(ctx: KernelContext, block: Index) -> Share:
    plan, sums = ctx.plan, ctx.smem.tables
    heads, dealing = plan.problem.kv_heads, Dealing(*(sums.dealing[n] for n in AT))
    paired = dealing.paired
    q_tiles, total = ((x[plan.problem.batch] * heads) >> paired for x in (sums.q_tiles, sums.steps))
    pair = block >> paired
    blocks = blocks_of(dealing, q_tiles, total)
    each, more = lax.div(total, blocks), lax.rem(total, blocks)
    first = pair * each + jnp.minimum(pair, more)
    end = jnp.where(pair < blocks, first + each + (pair < more).astype(jnp.int32), first)
    q_tile = _q_tile_of(ctx, first, paired)
    last = _q_tile_of(ctx, jnp.maximum(end - 1, first), paired)
    units = jnp.where(end > first, last - q_tile + 1, 0)
    of_pair = block & paired
    return Share(block - of_pair, first, end, (q_tile << paired) + of_pair, units, paired)


def blocks_of(dealing: Dealing, q_tiles: Index, steps: Index) -> Index:
    """How many blocks, or pairs of them, share so many steps of so many q tiles, or pairs."""
    grid = dealing.groups
    whole = divided(grid, _clip(q_tiles, 1, grid)) * q_tiles
    idle = _clip(whole * -1 + grid, 0, grid)
    # 1 where so few blocks are idle that it pays, else 0.
    few = _clip(idle * -1 + (divided(grid, MOST_IDLE) + 1), 0, 1)
    most = idle * few * (dealing.alone * -1 + 1) * -1 + grid
    return _clip(divided(steps, LEAST_STEPS), 1, most)


def _clip(n: Index, low: Index, high: Index) -> Index:
    """Clips numbers as in `divided`."""
    if isinstance(n, jax.Array):
        return jnp.clip(n, low, high)
    return np.minimum(np.maximum(n, low), high)


class _SequenceSteps(NamedTuple):
    """Running sums of a sequence over all kv heads, and numbers of one kv head. Q tiles are pairs
    of them where blocks are paired.
    """

    q_tiles_before: Index
    steps_before: Index
    kv_tiles: Index


def _sequence(ctx: KernelContext, m: Index, paired: Index) -> _SequenceSteps:
    heads, (q_tiles, steps, _) = ctx.plan.problem.kv_heads, ctx.smem.tables
    own = jnp.maximum(q_tiles[m + 1] - q_tiles[m], 1)  # 0 only where there is no step
    kv_tiles = jnp.maximum(lax.div(steps[m + 1] - steps[m], own), 1)
    return _SequenceSteps((q_tiles[m] * heads) >> paired, (steps[m] * heads) >> paired, kv_tiles)


def _q_tile_of(ctx: KernelContext, step: Index, paired: Index) -> Index:
    """The q tile, or the pair, that has a step, among those of all sequences and kv heads."""
    last, heads = ctx.plan.problem.batch - 1, ctx.plan.problem.kv_heads
    m = scheduler.last_within(ctx.smem.tables.steps, last, step << paired, heads)
    sequence = _sequence(ctx, m, paired)
    return sequence.q_tiles_before + lax.div(step - sequence.steps_before, sequence.kv_tiles)


def kv_tiles_of(ctx: KernelContext, m: Index, q_tile: Index, share: Share) -> tuple[Index, Index]:
    """The kv tiles [lo, hi) of a q tile that a share has."""
    sequence = _sequence(ctx, m, share.paired)
    number = (q_tile >> share.paired) - sequence.q_tiles_before
    begin = sequence.steps_before + number * sequence.kv_tiles
    lo, hi = (jnp.clip(x - begin, 0, sequence.kv_tiles) for x in (share.first, share.end))
    return lo, hi
