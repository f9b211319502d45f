"""The static facts of a decode launch, and its scheduler: which persistent block takes which keys.

The work of a launch is numbered in units. Sequence after sequence, kv head after kv head (q chunk
after q chunk), a unit is `tiles_a_unit` kv tiles that some query row sees; a sequence that has none
gets one empty unit, so that some block writes its rows. Block c of C takes units
[c*T/C, (c+1)*T/C) of the T that there are: all blocks read the same amount, whatever the lengths
(split-KV). What a block has of one head of one sequence is a `WorkTile`.

Where blocks have many heads, units are finer than kv tiles (`FINE_UNIT` keys), so that a last tile
of a few keys counts for a few. Each head then has some units more than it has keys, because a block
that begins a head takes as long as it takes to read some: a block with many short heads would
finish long after the others. Tiles stay whole: one belongs to the block in whose share it begins.

Every block computes this for itself from the lengths on the device, by one running sum over a warp.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call import gpu_specs
from pallas_attn._call.problem import DecodeInputs, DecodeProblem, bounds_of
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import cache_layout, softmax
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.config import check
from pallas_attn.kernels.lang.mosaic import ThreadContext
from pallas_attn.kernels.mma import dequant, mma_rowmajor
from pallas_attn.kernels.mma.mma_rowmajor import Heads, Split
from pallas_attn.masks import SIDES, Mask

Ref = Any
Scalar = Any

SMEM_LIMIT = gpu_specs.shared_memory(gpu_specs.HOPPER)
RESERVED = 3072  # bytes of a block's shared memory that are Mosaic's and CUDA's own
ZERO_BYTES = 2048  # that lie before the counters in global memory
FEW_ROWS = 8  # of a kv head: up to so many scores can be folded
FINE_UNIT = 16  # keys of a unit that is finer than a kv tile
# A launch has parameters for as many arrays of K and of V; of the others a thread lays out 63.
MOST_SEQUENCES = 2000


class WorkTile(NamedTuple):
    """Consecutive units of one head of one sequence, which one block takes."""

    sequence: Scalar
    head: Scalar  # kv head * chunks + q chunk
    length: Scalar  # keys that exist; 0 where rows were lost
    tile: Scalar  # the next kv tile
    end: Scalar  # past the last kv tile
    first_unit: Scalar
    next_unit: Scalar  # where the block's next work begins
    head_first_unit: Scalar
    head_units: Scalar
    mask: Mask
    # Where rows are packed: how many the sequence has, and the first of them.
    queries: Scalar | None = None
    row: Scalar | None = None


def widest_tile(problem: DecodeProblem) -> int:
    """Keys of the widest kv tile: each of 128 threads copies rows that lie together in memory."""
    page = problem.page_size or 256
    return next(tile for tile in (256, 128) if tile // math.gcd(page, tile) <= mosaic.THREADS)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static in one launch."""

    problem: DecodeProblem
    config: Any

    def __post_init__(self):
        if self.heads_at_once > 1 and not self._fits_heads_at_once:
            raise ValueError(
                f"Config.heads_at_once is {self.heads_at_once}: it takes as many kv heads or a "
                f"multiple, of up to {mma_rowmajor.ROWS} query rows each, over pages of 16 or 8 "
                f"bits whose rows are a multiple of 8 that divides the {self.tile} keys of a tile"
            )
        if self.bulk and self.tile_rows > (most := widest_tile(self.problem)):
            want = f"at most {most} over pages of {self.problem.page_size} rows"
            raise ValueError(f"Config.tile must be {want}, got {self.tile_rows}")
        if self.tile_rows < 64 and not self.is_float32:
            want = "at least 64 of 16-bit numbers"
            raise ValueError(f"Config.tile must be {want}, got {self.tile_rows}")

    @property
    def _fits_heads_at_once(self) -> bool:
        problem, page = self.problem, self.problem.page_size
        plain = self.bulk and not self.is_float32
        heads = self.rows <= mma_rowmajor.ROWS and problem.kv_heads % self.heads_at_once == 0
        whole_pages = page is not None and page % 8 == 0 and self.tile % page == 0
        return plain and heads and whole_pages and not problem.batch_invariant

    @functools.cached_property
    def layout(self) -> Any:
        """Where rows of the cache lie: `cache_layout.Layout`."""
        return cache_layout.layout_of(self.problem)

    @property
    def bulk(self) -> bool:
        """Whether tiles are loaded by bulk copies; else by the threads."""
        return self.config.bulk

    @property
    def load_first(self) -> bool:
        """Whether the load of the next tile begins before the wait for this one; with a single
        stage, it is the load of this one.
        """
        return self.config.load_first or self.config.stages == 1

    @property
    def group(self) -> int:
        """Query heads a kv head."""
        return self.problem.q_heads // self.problem.kv_heads

    @property
    def rows(self) -> int:
        """Query rows that share a kv head's keys."""
        return self.group * self.problem.q_len

    @property
    def chunk_rows(self) -> int:
        """Of them, how many a block takes at once: a q chunk. Each chunk reads the keys again.
        Where a block takes several heads at once, the rows of one head lie after those of another.
        """
        if self.heads_at_once > 1:
            return self.heads_at_once * self.rows
        return min(self.config.q_rows, self.row_blocks * mma_rowmajor.ROWS)

    @property
    def most_rows(self) -> int:
        """Rows that a chunk may have."""
        return min(self.heads_at_once * self.rows, self.chunk_rows)

    @property
    def warp_rows(self) -> int:
        """Query rows that a warp may have."""
        return min(self.most_rows // self.heads_at_once, mma_rowmajor.ROWS)

    @property
    def pages_ahead(self) -> bool:
        """Whether a tile's pages are looked up while the tile before it is loaded: where a block
        reads many keys.
        """
        first = self.config.load_first and (self.config.many_heads or self.problem.quantized)
        return first and self.layout.paged and self.bulk

    @property
    def heads_at_once(self) -> int:
        """kv heads that a block takes at once, each with warps of its own. In a page they lie one
        behind the other, so that one copy brings all of them.
        """
        return self.config.heads_at_once

    @property
    def row_blocks(self) -> int:
        if self.is_float32 and self.problem.head_dim + self.problem.v_head_dim > 256:
            return 1  # more queries would leave no room for keys
        blocks = -(-min(self.rows, self.config.q_rows) // mma_rowmajor.ROWS)
        return 1 if blocks == 1 else 2 if blocks == 2 else 4

    @property
    def chunks(self) -> int:
        return -(-self.heads_at_once * self.rows // self.chunk_rows)

    @property
    def heads(self) -> int:
        """Heads that the scheduler counts: kv heads, or groups of `heads_at_once` of them, each as
        often as there are q chunks; not so where rows are packed, and sequences differ in that.
        """
        chunks = 1 if self.packed else self.chunks
        return self.problem.kv_heads // self.heads_at_once * chunks

    @property
    def packed(self) -> bool:
        return self.problem.packed

    @property
    def lines(self) -> int:
        """q chunks of all sequences, at most."""
        problem = self.problem
        if problem.tokens is None or self.chunks == 1:
            return problem.sequences * self.chunks
        return -(-problem.tokens * self.group // self.chunk_rows) + problem.sequences

    def chunks_of(self, count: Any, div: Any) -> Any:
        """q chunks of a sequence; `count`: its query rows, None where all have the same."""
        if count is None or self.chunks == 1:
            return self.chunks
        return div(count * self.group + (self.chunk_rows - 1), self.chunk_rows)

    def queries_of(self, count: Any) -> Any:
        """Query rows of a sequence."""
        return self.problem.q_len if count is None else count

    @functools.cached_property
    def split(self) -> Split:
        integers = dequant.by_integers(self.problem.cache_dtype, self.problem.gpu)
        heads = Heads(self.heads_at_once, self.page_rows) if self.heads_at_once > 1 else None
        blocks = self.row_blocks if heads is None else heads.number
        return Split(blocks, self.tile, self.folded, integers, heads)

    @property
    def folded(self) -> bool:
        """Whether scores of few rows are folded: `mma_rowmajor.Split`."""
        few = self.rows <= 8 and not self.problem.quantized and not self.is_float32
        return few and self.config.many_heads

    @property
    def units_a_tile(self) -> int:
        """Units of a kv tile, where a unit is finer than a tile; else 1. A tile belongs to the
        block in whose share it begins, and a head counts for `head_overhead` units more than it has
        keys.
        """
        fine = self.config.many_heads and not self.problem.batch_invariant
        return self.tile // FINE_UNIT if fine else 1

    @property
    def head_overhead(self) -> int:
        """Units that a head counts for in addition to those of its keys."""
        return self.config.head_overhead // FINE_UNIT if self.units_a_tile > 1 else 0

    @property
    def tile(self) -> int:
        """Keys of a kv tile, of each head."""
        return self.config.tile // self.heads_at_once

    @property
    def tile_rows(self) -> int:
        """Rows of a tile: the keys of all its heads."""
        return self.config.tile

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the cache."""
        return jnp.dtype(self.problem.cache_dtype).itemsize

    @property
    def operands(self) -> str:
        """What tensor cores multiply: numbers of 8 bits are made float16."""
        return "float16" if self.problem.quantized else self.problem.dtype

    @property
    def is_float32(self) -> bool:
        """Whether numbers are float32: `mma_tf32`."""
        return self.problem.dtype == "float32"

    @property
    def tiles_a_unit(self) -> int:
        """kv tiles of a unit."""
        return self.config.split_tiles if self.problem.batch_invariant else 1

    @property
    def table_size(self) -> int:
        """Entries of the table of running sums, the first of which is 0."""
        return 32 * self.lane_sequences + 1

    @property
    def lane_sequences(self) -> int:
        return -(-self.problem.sequences // 32)

    @property
    def most_tiles(self) -> int:
        """Tiles of the longest sequence."""
        return max(1, -(-max(self.problem.capacities) // self.tile))

    @property
    def most_units(self) -> int:
        """Of a head of the longest sequence."""
        return -(-self.most_tiles // self.tiles_a_unit)

    @property
    def partials_a_block(self) -> int:
        """How many partials a block may write: one a unit where splits are fixed, else two a
        block.
        """
        return 1 if self.problem.batch_invariant else 2

    @property
    def partials(self) -> int:
        if self.problem.batch_invariant:
            return self.problem.kv_heads // self.heads_at_once * self.lines * self.most_units
        return self.partials_a_block * self.grid

    @property
    def grid(self) -> int:
        unit = self.tile * self.tiles_a_unit
        if self.packed:
            return min(self.config.grid, self.heads * self.lines * self.most_units)
        units = self.heads * sum(max(1, -(-rows // unit)) for rows in self.problem.capacities)
        return min(self.config.grid, units)

    @property
    def unit_of_logits(self) -> float | None:
        """What turns scores into log2 units; None where that is done before the softmax, whose
        largest score must be the largest logit.
        """
        return None if self.problem.softcap is not None else softmax.unit_of(self.problem.scale)

    @property
    def page_rows(self) -> int:
        """Rows of a tile that lie together in memory, wherever it begins."""
        return self.layout.contiguous_rows(self.tile)

    @property
    def checks_skipped_pages(self) -> bool:
        """Whether pages before the first tile, which a mask lets a block skip, are looked up: one
        that is missing loses the sequence all the same.
        """
        return self.layout.paged and self.problem.mask.bounds_left

    def tiles_of(self, mask: Mask, length: Any, div: Any, count: Any) -> tuple[Any, Any]:
        """Tiles [first, end) that hold all keys which some row sees; `length` may be any kind of
        integer, `div` divides those that are not negative. `count`: as in `chunks_of`.
        """
        lo, hi = mask.kv_range(length - self.queries_of(count), length, length)
        first = 0 if isinstance(lo, int) else div(lo, self.tile)
        return first, div(at_least(hi, 0) + (self.tile - 1), self.tile)

    def units_of(self, mask: Mask, length: Any, div: Any, count: Any = None) -> Any:
        """Units of a head; for `div` and `count` see `tiles_of`."""
        first, end = self.tiles_of(mask, length, div, count)
        if self.units_a_tile > 1:
            _, hi = mask.kv_range(length - self.queries_of(count), length, length)
            keys = at_least(hi - first * self.tile, 0)
            return at_least(div(keys + (FINE_UNIT - 1), FINE_UNIT), 1) + self.head_overhead
        units = at_least(end - first, 1)
        return (
            div(units + (self.tiles_a_unit - 1), self.tiles_a_unit)
            if self.tiles_a_unit > 1
            else units
        )


def dtype_limit(problem: DecodeProblem) -> Limit | None:
    """Why no decode kernel takes these dtypes, or None."""
    if problem.dtype not in ("bfloat16", "float16", "float32"):
        return Limit(
            f"it takes bfloat16, float16 and float32 q, not {problem.dtype}",
            "cast q to one of them",
        )
    if problem.cache_dtype != problem.dtype and not problem.quantized:
        return Limit(
            f"a {problem.cache_dtype} cache under {problem.dtype} queries",
            "create the cache with q's dtype, or a narrow one with scales; or cast q",
        )
    return None


def size_limit(problem: DecodeProblem) -> Limit | None:
    """Why the scheduler cannot count this problem's tiles, pages or sequences, or None."""
    most = sum(capacity // 64 + 1 for capacity in problem.capacities)
    if problem.packed:  # rows of all sequences, whose q chunks are as many as they or fewer
        most = (max(problem.capacities) // 64 + 1) * (1 + problem.sequences)
    if most * problem.q_heads * problem.q_len >= 2**31 or max(problem.capacities) >= 2**30:
        return Limit("it counts tiles of keys in 32 bits", "split the sequences over several calls")
    slabs = (problem.layers or 1) * (problem.pages or problem.sequences)
    if slabs >= 2**31:
        what = "sequences" if problem.pages is None else "pages"
        return Limit(f"{slabs} {what} of all layers; it counts them in 32 bits", "split the layers")
    scaled = problem.quantized and cache_layout.layout_of(problem).separate
    most = MOST_SEQUENCES // (2 if scaled else 1)
    if problem.sequences > most:
        return Limit(
            f"{problem.sequences} sequences; it takes up to {most}",
            "split them over several calls",
        )
    return None


def smem_bytes(scratch: Any) -> int:
    """Shared memory of a block with these buffers."""
    return RESERVED + mosaic.bytes_of(scratch)


def check_config(config: Any, **wants: tuple[bool, str]) -> None:
    """What every decode kernel wants of its Config, and what one wants beside."""
    check(
        config,
        stages=(config.stages >= config.fewest_stages, f"at least {config.fewest_stages}"),
        grid=(config.grid >= 1, "at least 1"),
        split_tiles=(config.split_tiles >= 1, "at least 1"),
        **wants,
    )


def has_no_rows(problem: DecodeProblem) -> bool:
    """Whether the cache has no row at all: there is nothing to launch."""
    return not max(problem.capacities) or problem.pages == 0


def deepest(smem_bytes: Callable, problem: DecodeProblem, config: Any, room: int) -> Any:
    """The config with as many stages, up to 8, as there is room for; but at least 2."""
    deeper = [dataclasses.replace(config, stages=stages) for stages in range(8, 2, -1)]
    fitting = (one for one in deeper if smem_bytes(problem, one) <= room)
    return next(fitting, dataclasses.replace(config, stages=2))


def of_single_rows(problem: DecodeProblem) -> bool:
    """Of packed rows: whether most sequences can have one at most. Not where bits may not depend on
    how many rows others have.
    """
    assert problem.tokens is not None
    return problem.tokens <= problem.sequences and not problem.batch_invariant


def by_rows(problem: DecodeProblem) -> tuple[DecodeProblem, DecodeProblem | None]:
    """A call of packed rows as two: sequences of few rows, for which a launch is as one that
    decodes a token of each; and the others, if there can be any. A kernel for a single row is
    faster, so few is one where there are no more rows than sequences (`of_single_rows`).
    """
    assert problem.tokens is not None
    few = 1
    if not of_single_rows(problem):
        few = max(FEW_ROWS * problem.kv_heads // problem.q_heads, 1)
    rest = dataclasses.replace(problem, fewest=few + 1) if few < problem.tokens else None
    return dataclasses.replace(problem, q_len=few), rest


def at_least(x: Any, bound: int) -> Any:
    return (jnp if isinstance(x, jax.Array) else np).maximum(x, bound)


def _div(x: Scalar, y: Any) -> Scalar:
    return lax.div(x, jnp.int32(y) if isinstance(y, int) else y)


# ---- units and blocks ----------------------------------------------------------------------------


class Table(NamedTuple):
    """What a block knows of the lengths, in shared memory."""

    sums: Ref  # int32[plan.table_size]: units of a head in the sequences before this one
    lengths: Ref  # int32[plan.table_size]: keys that exist; 0 where rows were lost
    lost: Ref  # int32[plan.table_size]: 1 where rows were dropped and the result is NaN
    bounds: Any = None  # int32[2]: of the mask, where some arrive at run time
    # Where rows are packed, int32[plan.table_size]:
    counts: Ref | None = None  # query rows of the sequence that this launch serves
    rows: Ref | None = None  # the first of them; behind the last sequence, the end of all rows
    following: Ref | None = None  # the next sequence that has a unit


def table_scratch(plan: Plan) -> Table:
    numbers = plgpu.SMEM((plan.table_size,), jnp.int32)
    packed = numbers if plan.packed else None
    bounds = plgpu.SMEM((len(SIDES),), jnp.int32) if plan.problem.mask.arrives else None
    return Table(numbers, numbers, numbers, bounds, packed, packed, packed)


def mask_of(plan: Plan, table: Table) -> Mask:
    """The mask, with the bounds that arrive at run time."""
    mask = plan.problem.mask
    return mask.filled(**{side: table.bounds[SIDES.index(side)] for side in mask.arrives})


class Lengths(NamedTuple):
    """What a block reads first."""

    lengths: Ref  # int32[M]
    new_lengths: Ref | None  # int32[M]: negative where `extend` has not been
    capacities: Ref | None  # where they differ
    mask_left: Ref | None  # int32[1], where the bound arrives at run time
    mask_right: Ref | None
    starts: Ref | None = None  # int32[M + 1], where rows are packed


def lengths_of(inputs: DecodeInputs, capacities: Any) -> Lengths:
    left, right = (cache_layout.scalar_operand(x) for x in (inputs.mask_left, inputs.mask_right))
    given = inputs.lengths, inputs.new_lengths
    return Lengths(*given, capacities, left, right, inputs.starts)


class TableRefs(NamedTuple):
    """What `fill_table` reads and what it writes."""

    given: Lengths
    table: Table


def fill_table(ctx: ThreadContext, meanwhile: Callable[[], None] = lambda: None) -> None:
    """`ctx.refs`: `TableRefs`; `ctx.at`: whether the cache has the layer. `meanwhile` is called
    while the loads of the lengths are under way.
    """
    thread, (given, table), usable, plan = ctx
    lane, last = thread.index % 32, plan.problem.sequences - 1
    mine, lane_is_last = thread.index < 32, lane >= 31
    sums, lengths, lost, have_units = [], [], [], []
    total: Any = None
    places = [lane * plan.lane_sequences + i for i in range(plan.lane_sequences)]
    within = [thread.minimum(m, last) for m in places]
    asked = [thread.load(given.lengths, at, 4) for at in within]
    taken: list[Any] = [None] * len(asked)
    if given.new_lengths is not None:
        taken = [thread.load(given.new_lengths, at, 4) for at in within]
    room: list[Any] = [plan.layout.capacity] * len(asked)
    if plan.layout.capacity is None:
        room = [thread.load(given.capacities, at, 4) for at in within]
    bounds = {side: thread.load(ref, thread.index * 0, 4) for side, ref in bounds_of(given).items()}
    mask = plan.problem.mask.filled(**bounds)
    rows: list[Any] = [None] * len(asked)
    if given.starts is not None:
        rows = [[thread.load(given.starts, at + n, 4) for n in (0, 1)] for at in within]
    meanwhile()
    counts = [None if each is None else _served(ctx, each) for each in rows]
    for m, length, new, most, count in zip(places, asked, taken, room, counts, strict=True):
        usable_too = (length <= most) & (usable >= 1)
        if new is not None:
            usable_too = usable_too & (thread.select(length >= 1, length, new) >= 0)
        lengths.append(thread.select(usable_too, at_least(length, 0), 0))
        lost.append(thread.select(usable_too, m * 0, 1))
        units = plan.units_of(mask, lengths[-1], lambda x, y: x // y, count)
        if count is not None:
            units = units * plan.chunks_of(count, lambda x, y: x // y)
            units = thread.select(count >= 1, units, 0)
        units = thread.select(m < plan.problem.sequences, units, 0)
        total = units if total is None else total + units
        sums.append(total)
        have_units.append(units >= 1)
    before = thread.running_sum(total) - total
    for i, m in enumerate(places):
        thread.shared_store(table.sums, m + 1, before + sums[i], mine)
        thread.shared_store(table.lengths, m, lengths[i], mine)
        thread.shared_store(table.lost, m, lost[i], mine)
        if table.counts is not None:
            thread.shared_store(table.counts, m, counts[i], mine)
            first = thread.select(m < plan.problem.sequences, *rows[i])
            thread.shared_store(table.rows, m, first, mine)
    if table.rows is not None and table.following is not None:
        # The end of all rows where every lane has sequences in all its places; else it lies there.
        thread.shared_store(table.rows, places[-1] + 1, rows[-1][1], lane_is_last & mine)
        for m, following in zip(places, _following(ctx, places, have_units), strict=True):
            thread.shared_store(table.following, m, following, mine)
    thread.shared_store(table.sums, thread.index * 0, thread.index * 0, thread.index < 1)
    for side, bound in bounds.items():
        at = thread.index * 0 + SIDES.index(side)
        thread.shared_store(table.bounds, at, bound, thread.index < 1)
    thread.sync()


def _following(ctx: ThreadContext, places: list[Any], have_units: list[Any]) -> list[Any]:
    """Of each of a lane's sequences the next one that has a unit; the last one of all if none has.
    `have_units`: which of the lane's do.
    """
    thread, last = ctx.thread, ctx.plan.problem.sequences - 1
    lane, first = thread.index % 32, thread.index * 0 + last
    for m, some in reversed(list(zip(places, have_units, strict=True))):
        first = thread.select(some, m, first)
    for distance in (1, 2, 4, 8, 16):  # now the first of this lane and of those behind it
        other = thread.of_lane(first, thread.minimum(lane + distance, 31))
        first = thread.minimum(first, other)
    behind = thread.of_lane(first, thread.minimum(lane + 1, 31))
    after = thread.select(lane <= 30, behind, last)
    found = []
    for m, some in reversed(list(zip(places, have_units, strict=True))):
        found.append(after)
        after = thread.select(some, m, after)
    return found[::-1]


def _served(ctx: ThreadContext, rows: list[Any]) -> Any:
    """The query rows of a sequence, from [start, end); 0 where another launch serves it."""
    count, problem = rows[1] - rows[0], ctx.plan.problem
    return ctx.thread.select((count >= problem.fewest) & (count <= problem.q_len), count, 0)


class Share(NamedTuple):
    """Units [first, end) of a block, and what `block_of` needs to know."""

    first: Scalar
    end: Scalar
    base: Scalar
    rest: Scalar

    def block_of(self, unit: Scalar) -> Scalar:
        """Which block takes a unit."""
        large = self.base + 1
        within = self.rest * large
        # base is 0 only where all units lie within the larger shares
        later = self.rest + lax.div(unit - within, jnp.maximum(self.base, 1))
        return jnp.where(unit < within, lax.div(unit, large), later)


def share_of(plan: Plan, table: Table, block_id: Scalar, blocks: Scalar | None = None) -> Share:
    """`blocks`: how many share the work, if not all."""
    total = table.sums[plan.problem.sequences] * plan.heads
    blocks = jnp.int32(plan.grid) if blocks is None else blocks
    if plan.units_a_tile > 1:  # a tile begins in every share
        blocks = jnp.clip(_div(total, plan.units_a_tile), 1, blocks)
    base, rest = lax.div(total, blocks), lax.rem(total, blocks)
    first = block_id * base + jnp.minimum(block_id, rest)
    end = first + base + (block_id < rest).astype(jnp.int32)
    if plan.units_a_tile > 1:
        end = jnp.where(block_id < blocks, end, first)
    return Share(first, end, base, rest)


def sequence_of(plan: Plan, table: Table, unit: Scalar) -> Scalar:
    """The sequence that a unit belongs to."""
    return last_within(table.sums, plan.problem.sequences - 1, unit, plan.heads)


def last_within(sums: Ref, last: int, most: Scalar, times: int = 1) -> Scalar:
    """The last number up to `last` whose running sum, so many times, is not more than `most`."""
    low = jnp.int32(0)
    for bit in reversed(range(last.bit_length())):
        at = low + (1 << bit)
        sum_at = sums[jnp.minimum(at, last)]
        inside = (sum_at if times == 1 else sum_at * times) <= most
        low = jnp.where((at <= last) & inside, at, low)
    return low


def work_at(plan: Plan, table: Table, share: Share, unit: Scalar, m: Scalar) -> WorkTile:
    """The block's work that begins at `unit`, which is one of sequence m or of the next that has
    any.
    """
    following = jnp.minimum(m + 1, plan.problem.sequences - 1)
    if table.following is not None:
        following = table.following[m]
    m = jnp.where(unit >= table.sums[m + 1] * plan.heads, following, m)
    count = row = None
    if table.counts is not None and table.rows is not None:
        row = table.rows[m]
        count = jnp.int32(1) if plan.problem.q_len == 1 else table.counts[m]
    start = table.sums[m]
    units = table.sums[m + 1] - start
    if count is not None and plan.chunks > 1:
        units = _div(units, jnp.maximum(plan.chunks_of(count, _div), 1))
    units = jnp.maximum(units, 1)  # 0 only past the end of the line
    within = unit - start * plan.heads
    head = _div(within, units)
    skipped = within - head * units
    taken = jnp.minimum(share.end - unit, units - skipped)
    if plan.problem.batch_invariant:
        taken = jnp.minimum(taken, 1)
    length, mask = table.lengths[m], mask_of(plan, table)
    first, end = plan.tiles_of(mask, length, _div, count)
    end = jnp.maximum(end, first + 1)
    tile = first + skipped * plan.tiles_a_unit
    stop = tile + taken * plan.tiles_a_unit
    if plan.units_a_tile > 1:
        tile, stop = (
            first + _div(past + (plan.units_a_tile - 1), plan.units_a_tile)
            for past in (skipped, skipped + taken)
        )
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
        mask=mask,
        queries=count,
        row=row,
    )


def head_and_chunk(plan: Plan, work: WorkTile) -> tuple[Scalar, Scalar]:
    """The kv head of a work tile, or the group of `heads_at_once`; and its q chunk."""
    chunks = plan.chunks_of(work.queries, _div)
    chunks = jnp.int32(chunks) if isinstance(chunks, int) else jnp.maximum(chunks, 1)
    return lax.div(work.head, chunks), lax.rem(work.head, chunks)


class FirstQuery(NamedTuple):
    """Where the query rows of a block's work begin."""

    row: Scalar  # of q [M * t * N, H]: that of query 0 of its kv head
    chunk: Scalar  # the query that its chunk begins with


def first_query(plan: Plan, work: WorkTile) -> FirstQuery:
    head, chunk = head_and_chunk(plan, work)
    head = head * (plan.heads_at_once * plan.group)
    if work.row is not None:
        return FirstQuery(work.row * plan.problem.q_heads + head, chunk * plan.chunk_rows)
    first = work.sequence * (plan.problem.q_len * plan.problem.q_heads) + head
    return FirstQuery(first, chunk * plan.chunk_rows)


def first_unit_of(plan: Plan, table: Table, share: Share, m: Scalar) -> Scalar:
    """The unit where a share's first work begins, which is not past the last tile of a head. It
    may be past the end of the share.
    """
    first = work_at(plan, table, share, share.first, m)
    return jnp.where(first.tile >= first.end, first.next_unit, share.first)


class Partials(NamedTuple):
    """Where the partials of one head of a sequence lie: partial p at `first` where p is 0, else at
    `later + p * plan.partials_a_block`.
    """

    count: Scalar
    own: Scalar  # where this block's lies
    first: Scalar
    later: Scalar


def partials_of(plan: Plan, share: Share, work: WorkTile, block_id: Scalar) -> Partials:
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
    if plan.units_a_tile > 1:
        tiles_before, end = plan.tiles_of(work.mask, work.length, _div, work.queries)
        last = jnp.maximum(end - tiles_before - 1, 0) * plan.units_a_tile
    last = share.block_of(work.head_first_unit + last)
    return Partials(last - first + 1, 2 * block_id + begins, 2 * first + 1, 2 * first)
