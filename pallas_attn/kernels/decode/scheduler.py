"""The scheduler of decode: which persistent block takes which keys of which sequence (split-KV).

The work of a launch is numbered in units. Sequence after sequence, kv head after kv head (q chunk
after q chunk), a unit is `tiles_a_unit` kv tiles that some query row sees; a sequence that has none
gets one empty unit, so that some block writes its rows. Block c of C takes units
[c*T/C, (c+1)*T/C) of the T that there are: all blocks read the same amount, whatever the lengths.
The part that a block takes of one head of one sequence is a `WorkTile`.

Where blocks have many heads, units are finer than kv tiles (`plan.FINE_UNIT` keys), so that a last
tile of a few keys counts for a few. Each head then has some units more than it has keys, because a
block that begins a head takes as long as it takes to read some: a block with many short heads would
finish long after the others. Tiles stay whole: one belongs to the block in whose share it begins.

Every block computes this for itself from the lengths on the device: one warp makes a table of all
sequences, with a running sum of their units.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import DecodeProblem, bounds_of
from pallas_attn.kernels.decode import packed
from pallas_attn.kernels.decode.packed import PackedTable
from pallas_attn.kernels.decode.plan import Plan, at_least, div
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.threads import LANES
from pallas_attn.kernels.lang.types import GmemRef, Index, Layout, RegisterTile, SmemRef
from pallas_attn.masks import SIDES, Mask

# ---- the table of sequences ----------------------------------------------------------------------


class Table(NamedTuple):
    """int32 numbers of each sequence, in shared memory."""

    sums: SmemRef  # units of a head in the sequences before this one
    lengths: SmemRef  # keys that exist; 0 where rows were lost
    lost: SmemRef  # 1 where rows were dropped and the result is NaN
    bounds: SmemRef | None = None  # int32[2]: of the mask, where some arrive at run time
    packed: PackedTable | None = None


def table_scratch(plan: Plan) -> Table:
    numbers = plgpu.SMEM((LANES * plan.lane_sequences + 1,), jnp.int32)  # the first sum is 0
    bounds = plgpu.SMEM((len(SIDES),), jnp.int32) if plan.problem.mask.arrives else None
    rows = PackedTable(numbers, numbers, numbers) if plan.problem.packed else None
    return Table(numbers, numbers, numbers, bounds, rows)


class Lengths(NamedTuple):
    """Arrays in global memory from which the table is made."""

    lengths: GmemRef  # int32[M]
    new_lengths: GmemRef | None  # int32[M]: negative where `extend` has not been
    capacities: GmemRef | None  # int32[M], where they differ
    mask_left: GmemRef | None  # int32[1], where the bound arrives at run time
    mask_right: GmemRef | None
    starts: GmemRef | None  # int32[M + 1], where rows are packed


class TableRefs(NamedTuple):
    """Memory that `fill_table` reads and writes, and barriers for `meanwhile`."""

    arrays: Lengths
    table: Table
    barriers: SmemRef | None = None


def fill_table(ctx: ThreadContext, meanwhile: Callable[..., None] | None = None) -> None:
    """Fills the table of `ctx.refs`, by the lanes of a warp, each of which has consecutive
    sequences; `ctx.at`: 1 where the cache has the layer, else 0. `meanwhile` runs while the loads
    of the lengths are under way.
    """
    thread, (arrays, table, _), has_layer, plan = ctx
    sequences, writes, zero = plan.problem.sequences, thread.index < LANES, thread.index * 0
    lane, count = thread.index % LANES, plan.lane_sequences
    places = [lane * count + n for n in range(count)]
    inside = [thread.minimum(m, sequences - 1) for m in places]
    lengths = [thread.load(arrays.lengths, m, 4) for m in inside]
    added: list[Any] = [None] * count
    if arrays.new_lengths is not None:
        added = [thread.load(arrays.new_lengths, m, 4) for m in inside]
    room: list[Any] = [plan.layout.capacity] * count
    if plan.layout.capacity is None:
        room = [thread.load(arrays.capacities, m, 4) for m in inside]
    mask, bounds, ends = plan.problem.mask, {}, None
    if table.bounds is not None:
        bounds = {side: thread.load(ref, zero, 4) for side, ref in bounds_of(arrays).items()}
        mask = mask.filled(**bounds)
    counts: list[Any] = [None] * count
    if arrays.starts is not None:
        ends = [packed.load_ends(thread, arrays.starts, m) for m in inside]
    if meanwhile is not None:
        meanwhile(ctx)
    if ends is not None:
        counts = [packed.served(ctx, x) for x in ends]
    sums, lost, have_units = [], [], []
    total: Any = None
    for n, m in enumerate(places):
        good = (lengths[n] <= room[n]) & (has_layer >= 1)
        if added[n] is not None:
            good = good & (thread.select(lengths[n] >= 1, lengths[n], added[n]) >= 0)
        lengths[n] = thread.select(good, at_least(lengths[n], 0), 0)
        lost.append(thread.select(good, m * 0, 1))
        units = plan.keys.units_of(mask, lengths[n], plan.queries_of(counts[n]))
        if counts[n] is not None:
            units = units * plan.queries.chunks_of(counts[n])
            units = thread.select(counts[n] >= 1, units, 0)
        units = thread.select(m < sequences, units, 0)
        total = units if total is None else total + units
        sums.append(total)
        have_units.append(units >= 1)
    before = thread.running_sum(total) - total
    for n, m in enumerate(places):
        thread.shared_store(table.sums, m + 1, before + sums[n], writes)
        thread.shared_store(table.lengths, m, lengths[n], writes)
        thread.shared_store(table.lost, m, lost[n], writes)
        if ends is not None:
            packed.store(ctx, table.packed, m, counts[n], ends[n])
    if ends is not None:
        packed.finish(ctx, table.packed, places, have_units, ends[-1])
    thread.shared_store(table.sums, zero, zero, thread.index < 1)
    for side, bound in bounds.items():
        thread.shared_store(table.bounds, zero + SIDES.index(side), bound, thread.index < 1)
    thread.sync()


# ---- units and blocks ----------------------------------------------------------------------------


class WorkTile(NamedTuple):
    """Consecutive units of one head of one sequence, which one block takes."""

    sequence: Index
    head: Index  # kv head * chunks + q chunk
    length: Index  # keys that exist; 0 where rows were lost
    tile: Index  # the next kv tile
    end: Index  # past the last kv tile
    first_unit: Index
    next_unit: Index  # the unit with which the block's next work begins
    head_first_unit: Index
    head_units: Index
    # Bounds of the mask where some arrive at run time: static ones have no place in a loop's carry.
    bounds: tuple[Index, ...] | None = None
    queries: Index | None = None  # packed query rows of the sequence
    row: Index | None = None  # the first of them

    def mask_with_bounds(self, problem: DecodeProblem) -> Mask:
        assert self.bounds is not None
        return problem.mask.filled(**dict(zip(problem.mask.arrives, self.bounds, strict=True)))


class Share(NamedTuple):
    """Units [first, end) of a block, and what `block_of` needs to know."""

    first: Index
    end: Index
    base: Index
    rest: Index

    def block_of(self, unit: Index) -> Index:
        """The block that takes a unit."""
        large = self.base + 1
        within = self.rest * large
        # base is 0 only where all units lie within the larger shares
        later = self.rest + lax.div(unit - within, jnp.maximum(self.base, 1))
        return jnp.where(unit < within, lax.div(unit, large), later)


def share_of(plan: Plan, table: Table, block_id: Index) -> Share:
    total, blocks = table.sums[plan.problem.sequences] * plan.heads, jnp.int32(plan.grid)
    fine = plan.keys.units_a_tile > 1
    if fine:  # a tile begins in every share
        blocks = jnp.clip(div(total, plan.keys.units_a_tile), 1, blocks)
    base, rest = lax.div(total, blocks), lax.rem(total, blocks)
    first = block_id * base + jnp.minimum(block_id, rest)
    end = first + base + (block_id < rest).astype(jnp.int32)
    if fine:
        end = jnp.where(block_id < blocks, end, first)
    return Share(first, end, base, rest)


def last_within(sums: SmemRef, last: int, most: Index, times: int = 1) -> Index:
    """The last number up to `last` whose running sum, so many times, is not more than `most`."""
    if last == 0:
        return most * 0  # a value: Pallas lowers no loop state that holds a constant
    low = jnp.int32(0)
    for bit in reversed(range(last.bit_length())):
        at = low + (1 << bit)
        sum_at = sums[jnp.minimum(at, last)]
        inside = (sum_at if times == 1 else sum_at * times) <= most
        low = jnp.where((at <= last) & inside, at, low)
    return low


def work_at(plan: Plan, table: Table, share: Share, unit: Index, m: Index) -> WorkTile:
    """The block's work that begins at `unit`, which is one of sequence m or of the next that has
    any.
    """
    keys, rows, heads = plan.keys, table.packed, plan.heads
    following = jnp.minimum(m + 1, plan.problem.sequences - 1)
    if rows is not None:
        following = rows.following[m]
    m = jnp.where(unit >= table.sums[m + 1] * heads, following, m)
    count = row = None
    if rows is not None:
        row = rows.first[m]
        count = jnp.int32(1) if plan.problem.q_len == 1 else rows.counts[m]
    start = table.sums[m]
    units = table.sums[m + 1] - start
    if count is not None and plan.queries.chunks > 1:
        units = div(units, jnp.maximum(plan.queries.chunks_of(count), 1))
    units = jnp.maximum(units, 1)  # 0 only past the end of all units
    within = unit - start * heads
    head = div(within, units)
    skipped = within - head * units
    taken = jnp.minimum(share.end - unit, units - skipped)
    if plan.problem.batch_invariant:
        taken = jnp.minimum(taken, 1)
    length, mask, bounds = table.lengths[m], plan.problem.mask, None
    if table.bounds is not None:
        bounds = tuple([table.bounds[SIDES.index(side)] for side in mask.arrives])
        mask = mask.filled(**dict(zip(mask.arrives, bounds, strict=True)))
    first, end = keys.tiles_of(mask, length, plan.queries_of(count))
    end = jnp.maximum(end, first + 1)
    tile = first + skipped * keys.tiles_a_unit
    stop = tile + taken * keys.tiles_a_unit
    if (fine := keys.units_a_tile) > 1:
        tile = first + div(skipped + (fine - 1), fine)
        stop = first + div(skipped + taken + (fine - 1), fine)
    return WorkTile(
        sequence=m,
        head=head,
        length=length,
        tile=tile,
        end=jnp.minimum(stop, end),
        first_unit=unit,
        next_unit=unit + taken,
        head_first_unit=unit - skipped,
        head_units=units,
        bounds=bounds,
        queries=count,
        row=row,
    )


def begin(plan: Plan, table: Table, share: Share) -> tuple[Share, Index]:
    """The share, and the sequence that it begins with. Units finer than a tile may begin past the
    last tile of a head, which the block before has, and past the end of the share.
    """
    m = last_within(table.sums, plan.problem.sequences - 1, share.first, plan.heads)
    if plan.keys.units_a_tile > 1:
        first = work_at(plan, table, share, share.first, m)
        unit = jnp.where(first.tile >= first.end, first.next_unit, share.first)
        share = share._replace(first=unit)
    return share, m


def head_and_chunk(plan: Plan, work: WorkTile) -> tuple[Index, Index]:
    """The kv head of a work tile, and its q chunk."""
    chunks = plan.queries.chunks_of(work.queries)
    chunks = jnp.int32(chunks) if isinstance(chunks, int) else jnp.maximum(chunks, 1)
    return lax.div(work.head, chunks), lax.rem(work.head, chunks)


def token_of(plan: Plan, query: RegisterTile) -> RegisterTile:
    """query // group, by multiplication: LLVM makes a division of small numbers one of 16 bits,
    which that of JAX 0.12 then does not know for this GPU.
    """
    group, bits, rows = plan.queries.group, 20, plan.queries.chunks * plan.queries.chunk_rows
    factor = -(-(2**bits) // group)
    if group & (group - 1) == 0 or rows * group >= 2**bits or rows * factor >= 2**31:
        return query // group
    return query * factor // 2**bits


class Positions(NamedTuple):
    """The query, the key and the query head of each logit of a tile; positions in the sequence."""

    query: RegisterTile
    key: RegisterTile
    head: RegisterTile | None = None  # only where the mask function asks for it
    layout: Layout = mosaic.TILE


def positions_at(
    plan: Plan,
    work: WorkTile,
    row: RegisterTile,
    key: RegisterTile,
    layout: Layout = mosaic.TILE,
) -> Positions:
    """Positions of logits, by query rows of the q chunk and keys."""
    kv_head, chunk = head_and_chunk(plan, work)
    row, group = row + chunk * plan.queries.chunk_rows, plan.queries.group
    token, head = token_of(plan, row), None
    if plan.problem.mask_program is not None and plan.problem.mask_uses_head:
        head = kv_head * group + (row - token * group)
    return Positions(work.length - plan.queries_of(work.queries) + token, key, head, layout)


class FirstQuery(NamedTuple):
    """The place at which the query rows of a block's work begin."""

    row: Index  # row of q [M * t * N, H]: query 0 of the kv head
    chunk: Index  # the query that its chunk begins with


def first_query(plan: Plan, work: WorkTile) -> FirstQuery:
    problem = plan.problem
    head, chunk = head_and_chunk(plan, work)
    head, chunk = head * plan.queries.group, chunk * plan.queries.chunk_rows
    if work.row is not None:
        return FirstQuery(work.row * problem.q_heads + head, chunk)
    return FirstQuery(work.sequence * (problem.q_len * problem.q_heads) + head, chunk)


class Partials(NamedTuple):
    """Places of the partials of one head of a sequence: partial p at `first` where p is 0, else at
    `later + p * plan.partials_a_block`.
    """

    count: Index
    own: Index  # the place of this block's
    first: Index
    later: Index


def partials_of(plan: Plan, share: Share, work: WorkTile, block_id: Index) -> Partials:
    """A block has at most two work tiles that are not a whole head: its first, which does not begin
    its head, and its last, which does.
    """
    if plan.problem.batch_invariant:
        return Partials(
            work.head_units, work.first_unit, work.head_first_unit, work.head_first_unit
        )
    begins = (work.first_unit == work.head_first_unit).astype(jnp.int32)
    first = share.block_of(work.head_first_unit)
    last = work.head_units - 1
    if (fine := plan.keys.units_a_tile) > 1:
        queries, mask = plan.queries_of(work.queries), plan.problem.mask
        if work.bounds is not None:
            mask = work.mask_with_bounds(plan.problem)
        tiles_before, end = plan.keys.tiles_of(mask, work.length, queries)
        last = jnp.maximum(end - tiles_before - 1, 0) * fine
    last = share.block_of(work.head_first_unit + last)
    return Partials(last - first + 1, 2 * block_id + begins, 2 * first + 1, 2 * first)
