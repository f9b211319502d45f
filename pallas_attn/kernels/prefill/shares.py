"""Which block takes what where the results of packed rows are merged with others: rows of keys that
several sequences share, read once for all of them, which may be many and long or none at all.

A step is a kv tile of a q tile. The steps of a launch are numbered: sequence after sequence, kv
head after kv head, q tile after q tile. Block c of C takes steps [c*T/C, (c+1)*T/C) of the T that
there are, so that all blocks read as much whatever the lengths. What a block has of one q tile is a
unit; it writes a partial. Partials are numbered by q tile + block, which no two have in common.

Q tiles of one kv head see the same keys, which they should read at the same time: once from memory,
then from L2. Where all sequences have an even number of them, blocks go in pairs, which are dealt
pairs of q tiles: all the above holds of pairs, whose first block takes the first q tile. Where a kv
head then still has several, and whole blocks for each of them are nearly all blocks, the others
stay idle.

Every block counts for itself, from the starts and the lengths; the first one writes down for
`merge` what it found.

Where the rows of the sequences' own lie in the same cache, the first blocks decode those, by
`decode.sm90`'s code: that waits for memory while the others keep the tensor cores busy. How many
they are (`_decoding`) follows from how much there is of both.
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
# Own keys that a block reads in the time of a step of 128 shared keys, and while it begins a head.
STEP_KEYS = 176
HEAD_KEYS = 64
UNIT = 16  # keys that are counted as one
PAIRED_FROM = 16  # blocks


class Dealing(NamedTuple):
    """What a block finds of all sequences together, and where."""

    decoding: Any = 0  # blocks that decode rows of the sequences' own
    paired: Any = 1  # 1 where blocks go in pairs, else 0
    alone: Any = 2  # 1 where no two q tiles of a kv head read the same keys, but those of a pair


AT = Dealing()


class Sums(NamedTuple):
    q_tiles: Ref  # int32[plan.table_size]: of a kv head, in the sequences before each one
    steps: Ref  # the same of steps
    dealing: Ref  # int32[3]: `Dealing`


class CountRefs(NamedTuple):
    """What `count` reads, and what it writes."""

    starts: Ref  # int32[M + 1]
    lengths: Ref  # int32[M]
    sums: Sums
    kept: Ref  # int32[2 * plan.table_size + 3] in global memory: the sums
    own_lengths: Any = None  # int32[M]: of the rows of the sequences' own


def sums_type(plan: Any) -> Sums:
    numbers = plgpu.SMEM((plan.table_size,), jnp.int32)
    return Sums(numbers, numbers, plgpu.SMEM((len(AT),), jnp.int32))


def kept_size(plan: Any) -> int:
    return 2 * plan.table_size + len(AT)


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
    tiles, steps, odd, found = zero, zero, zero, []
    over = [zero, zero]  # sequences with more q tiles than one, than two
    for place in [lane * each + i for i in range(each)]:
        m = thread.minimum(place, last)
        rows = thread.load(refs.starts, m + 1, 4) - thread.load(refs.starts, m, 4)
        length = thread.load(refs.lengths, m, 4)
        length = thread.maximum(thread.minimum(length, plan.problem.kv_len), 1)
        own = thread.select(place <= last, plan.q_tiles_of(rows, lambda x, y: x // y), 0)
        tiles, steps, odd = tiles + own, steps + own * kv_tiles(plan, length), odd + own % 2
        over = [x + thread.select(own > n, zero + 1, 0) for n, x in enumerate(over, 1)]
        found.append((tiles, steps))
    before = [thread.running_sum(x) - x for x in (tiles, steps)]
    first, writes = thread.index < 1, block < 1
    for number, sums in enumerate((refs.sums.q_tiles, refs.sums.steps)):
        row = number * plan.table_size
        for i, some in enumerate(found):
            value, at = before[number] + some[number], lane * each + (i + 1)
            thread.shared_store(sums, at, value, mine)
            thread.store(refs.kept, thread.wide(at + row), value, 4, mine & writes)
        thread.shared_store(sums, zero, zero, first)
        thread.store(refs.kept, thread.wide(zero + row), zero, 4, first & writes)
    tiles, steps, odd, *over = (thread.total_of_lanes(x) for x in (tiles, steps, odd, *over))
    paired = thread.select(odd <= 0, zero + int(plan.grid >= PAIRED_FROM), 0)
    alone = thread.select(thread.select(paired >= 1, over[1], over[0]) <= 0, zero + 1, 0)
    dealing = Dealing(zero, paired, alone)
    if plan.own is not None:
        dealing = dealing._replace(decoding=_decoding(ctx, tiles, steps, dealing))
    for n, x in enumerate(dealing):
        thread.shared_store(refs.sums.dealing, zero + n, x, first)
        at = thread.wide(zero + (2 * plan.table_size + n))
        thread.store(refs.kept, at, x, 4, first & writes)
    thread.sync()


def _decoding(ctx: ThreadContext, q_tiles: Any, steps: Any, dealing: Dealing) -> Any:
    """How many blocks read the rows of the sequences' own, while the others read what they share:
    as many as are done at the same time, where whole pairs, or whole blocks a q tile, are left.
    """
    thread, refs, _, plan = ctx
    own, lane, heads = plan.own.plan, thread.index % 32, plan.problem.kv_heads
    sequences, keys = own.problem.sequences, thread.index * 0
    for start in range(0, sequences, 32):
        m = thread.minimum(lane + start, sequences - 1)
        length = thread.load(refs.own_lengths, m, 4)
        length = thread.maximum(thread.minimum(length, max(own.problem.capacities)), 0)
        keys = keys + thread.select(lane + start < sequences, length + HEAD_KEYS, 0) // UNIT
    keys = thread.total_of_lanes(keys) * heads
    shared = steps * heads * (plan.config.block_kv * STEP_KEYS // (128 * UNIT))
    most, grid, paired = min(plan.own.most_blocks, plan.grid), plan.grid, dealing.paired
    each = thread.maximum((keys + shared + (grid - 1)) // grid, 1)
    left = thread.maximum((keys + each // 2) // each * -1 + grid, 1)
    left = thread.minimum((left + paired) >> paired, (paired * 0 + (grid - 1)) >> paired)
    each = thread.maximum((q_tiles * heads) >> paired, 1)
    whole = thread.minimum(
        (left + each // 2) // each, ((paired * 0 + (grid - 1)) >> paired) // each
    )
    whole = whole * each
    near = (dealing.alone <= 0) & (whole * 8 >= left * 7) & (whole * 8 <= left * 9)
    blocks = (thread.select(near, whole, left) << paired) * -1 + grid
    left = 2 if grid >= PAIRED_FROM else 1  # to the others, at least
    blocks = thread.minimum(thread.maximum(blocks, 1), min(most, grid - left))
    return thread.select(steps >= 1, blocks, most)


class Share(NamedTuple):
    """Steps [first, end) of a pair of blocks, or a block, and the q tiles that have some of them:
    from `q_tile` on every one, or every other one where blocks are paired.
    """

    block: Scalar  # the first of the pair
    first: Scalar
    end: Scalar
    q_tile: Scalar
    units: Scalar  # how many
    paired: Scalar


def share_of(ctx: Context, block: Any) -> Share:
    plan, sums = ctx.plan, ctx.smem.sums
    heads, dealing = plan.problem.kv_heads, Dealing(*(sums.dealing[n] for n in AT))
    paired = dealing.paired
    q_tiles, total = ((x[plan.problem.batch] * heads) >> paired for x in (sums.q_tiles, sums.steps))
    pair = block >> paired
    blocks = blocks_of(plan, dealing, q_tiles, total, lax.div, jnp.clip)
    each, more = lax.div(total, blocks), lax.rem(total, blocks)
    first = pair * each + jnp.minimum(pair, more)
    end = jnp.where(pair < blocks, first + each + (pair < more).astype(jnp.int32), first)
    q_tile = _q_tile_of(ctx, first, paired)
    last = _q_tile_of(ctx, jnp.maximum(end - 1, first), paired)
    units = jnp.where(end > first, last - q_tile + 1, 0)
    of_pair = block & paired
    return Share(block - of_pair, first, end, (q_tile << paired) + of_pair, units, paired)


def blocks_of(  # noqa: PLR0913
    plan: Any, dealing: Dealing, q_tiles: Any, steps: Any, div: Any, clip: Any
) -> Any:
    """How many blocks, or pairs of them, share so many steps of so many q tiles, or pairs."""
    grid = (dealing.decoding * -1 + plan.grid) >> dealing.paired
    whole = div(grid, clip(q_tiles, 1, grid)) * q_tiles
    idle = clip(whole * -1 + grid, 0, grid)
    few = clip(idle * -1 + (div(grid, grid * 0 + MOST_IDLE) + 1), 0, 1)  # 1: they are few enough
    most = idle * few * (dealing.alone * -1 + 1) * -1 + grid
    return clip(div(steps, steps * 0 + LEAST_STEPS), 1, most)


class _Sequence(NamedTuple):
    """Of a sequence: running sums over all kv heads, and its own numbers of one. Of pairs of q
    tiles, where blocks are paired.
    """

    q_tiles_before: Scalar
    steps_before: Scalar
    q_tiles: Scalar
    kv_tiles: Scalar


def _sequence(ctx: Context, m: Scalar, paired: Scalar) -> _Sequence:
    heads, (q_tiles, steps, _) = ctx.plan.problem.kv_heads, ctx.smem.sums
    own = jnp.maximum(q_tiles[m + 1] - q_tiles[m], 1)  # 0 only where there is no step
    of_each = jnp.maximum(lax.div(steps[m + 1] - steps[m], own), 1)
    own = jnp.maximum(own >> paired, 1)
    return _Sequence((q_tiles[m] * heads) >> paired, (steps[m] * heads) >> paired, own, of_each)


def _q_tile_of(ctx: Context, step: Scalar, paired: Scalar) -> Scalar:
    """The q tile, or the pair, that has a step, among those of all sequences and kv heads."""
    last, heads = ctx.plan.problem.batch - 1, ctx.plan.problem.kv_heads
    m = scheduler.last_within(ctx.smem.sums.steps, last, step << paired, heads)
    found = _sequence(ctx, m, paired)
    return found.q_tiles_before + lax.div(step - found.steps_before, found.kv_tiles)


def kv_tiles_of(ctx: Context, m: Scalar, q_tile: Scalar, share: Share) -> tuple[Scalar, Scalar]:
    """The kv tiles [lo, hi) of a q tile that a share has."""
    found = _sequence(ctx, m, share.paired)
    number = (q_tile >> share.paired) - found.q_tiles_before
    begin = found.steps_before + number * found.kv_tiles
    lo, hi = (jnp.clip(x - begin, 0, found.kv_tiles) for x in (share.first, share.end))
    return lo, hi
