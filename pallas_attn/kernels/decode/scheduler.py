"""Who decodes what: the static facts of a launch, and how the live keys are dealt to its blocks.

The work of a launch is a line of units. Sequence after sequence, kv head after kv head (row chunk
after row chunk), a unit is `unit` tiles of keys that some query row sees; a sequence that has none
gets one empty unit, so that somebody writes its rows. Block c of C takes units [c*T/C, (c+1)*T/C)
of the T there are: all blocks read as much as each other, whatever the lengths. What a block has of
one head of one sequence is a `Piece`.

Where blocks have many heads, units are finer than tiles (`GRAIN` keys), so that last tiles of a few
keys count for a few, and each head has some units more than keys, since turning to a head takes a
block as long as reading some: one with many short heads would finish long after the others. Tiles
stay whole: one belongs to the block in whose share it begins.

Every block works the line out for itself, from lengths on the device: one running sum over a warp.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn import _gpus
from pallas_attn._problem import DecodeProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import cache_layout, softmax
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.mma import dequant, mma_rowmajor
from pallas_attn.kernels.mma.mma_rowmajor import Heads, Split

Ref = Any
Scalar = Any

SMEM_LIMIT = _gpus.shared_memory(_gpus.HOPPER)
RESERVED = 3072  # bytes of a block's shared memory that are Mosaic's and CUDA's own
BLANK = 2048  # bytes of zeros that lie before the counters
GRAIN = 16  # keys of a unit that is less than a tile
# A launch has parameters for as many arrays of K and of V; of the others a thread lays out 63.
MOST_SEQUENCES = 2000


class Piece(NamedTuple):
    """Consecutive units of one head of one sequence, that one block takes."""

    m: Scalar  # the sequence
    head: Scalar  # kv head * chunks + row chunk
    length: Scalar  # keys that exist; 0 where rows were lost
    tile: Scalar  # the next tile of keys
    end: Scalar  # past the last one
    following: Scalar  # the unit where the block's next piece begins
    begin: Scalar  # the unit where this one begins
    of_head: Scalar  # the first unit of its head
    units: Scalar  # of its head


def widest(problem: DecodeProblem) -> int:
    """Keys of the widest tile: a thread copies what lies together in memory, 128 pieces in all."""
    page = problem.page_size or 256
    return next(tile for tile in (256, 128) if tile // math.gcd(page, tile) <= mosaic.THREADS)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static in one launch."""

    problem: DecodeProblem
    config: Any

    def __post_init__(self):
        if self.abreast > 1 and not self._fits_abreast:
            raise ValueError(
                f"Config.abreast is {self.abreast}: it takes as many kv heads or a multiple, of up "
                f"to {mma_rowmajor.ROWS} query rows each, over pages of 16 or 8 bits whose rows "
                f"are a multiple of 8 that divides the {self.tile} keys of a tile"
            )
        if self.bulk and self.lines > (most := widest(self.problem)):
            rows = self.problem.page_size
            raise ValueError(
                f"Config.tile must be at most {most} over pages of {rows} rows, got {self.lines}"
            )
        if self.lines < 64 and not self.wide:
            raise ValueError(f"Config.tile must be at least 64 of 16-bit numbers, got {self.lines}")

    @property
    def _fits_abreast(self) -> bool:
        problem, page = self.problem, self.problem.page_size
        plain = self.bulk and not self.wide
        heads = self.rows <= mma_rowmajor.ROWS and problem.kv_heads % self.abreast == 0
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
    def eager(self) -> bool:
        """Whether the next tile is asked for before the wait for this one; of a single stage, this
        one is.
        """
        return self.config.eager or self.config.stages == 1

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
        """Of them, how many a block takes at once; each chunk reads the keys anew. Those of heads
        side by side lie head by head.
        """
        if self.abreast > 1:
            return self.abreast * self.rows
        return min(self.config.rows, self.row_blocks * mma_rowmajor.ROWS)

    @property
    def most_rows(self) -> int:
        """Rows that a chunk may have."""
        return min(self.abreast * self.rows, self.chunk_rows)

    @property
    def spilled_rows(self) -> int:
        """Rows that a warp may have."""
        return min(self.most_rows // self.abreast, mma_rowmajor.ROWS)

    @property
    def sooner(self) -> bool:
        """Whether a tile's pages are looked up while the one before it is asked for: where streams
        are long.
        """
        eager = self.config.eager and (self.config.many or self.problem.quantized)
        return eager and self.layout.paged and self.bulk

    @property
    def abreast(self) -> int:
        """kv heads that a block takes side by side, each with warps of its own. In a page they lie
        one behind the other: a copy brings all of them, and there are so many times fewer.
        """
        return self.config.abreast

    @property
    def row_blocks(self) -> int:
        if self.wide and self.problem.head_dim + self.problem.v_head_dim > 256:
            return 1  # more queries would leave no room for keys
        blocks = -(-min(self.rows, self.config.rows) // mma_rowmajor.ROWS)
        return 1 if blocks == 1 else 2 if blocks == 2 else 4

    @property
    def chunks(self) -> int:
        return -(-self.abreast * self.rows // self.chunk_rows)

    @property
    def heads(self) -> int:
        """Of the line of units: kv heads, so many side by side, each as often as there are row
        chunks.
        """
        return self.problem.kv_heads // self.abreast * self.chunks

    @functools.cached_property
    def split(self) -> Split:
        integers = dequant.by_integers(self.problem.cache_dtype, self.problem.gpu)
        heads = Heads(self.abreast, self.page_rows) if self.abreast > 1 else None
        blocks = self.row_blocks if heads is None else heads.number
        return Split(blocks, self.tile, self.folded, integers, heads)

    @property
    def folded(self) -> bool:
        """Whether scores of few rows are folded: `mma_rowmajor.Split`."""
        few = self.rows <= 8 and not self.problem.quantized and not self.wide
        return few and self.config.many

    @property
    def grains(self) -> int:
        """Units of a tile, where a unit is less than one: a tile is its block's in whose share it
        begins, and a head counts for `turn` units more than it has keys.
        """
        fine = self.config.many and not self.problem.batch_invariant
        return self.tile // GRAIN if fine else 1

    @property
    def turn(self) -> int:
        return self.config.turn // GRAIN if self.grains > 1 else 0

    @property
    def tile(self) -> int:
        """Keys of a tile, of each head."""
        return self.config.tile // self.abreast

    @property
    def lines(self) -> int:
        """Rows of a tile: keys of all its heads."""
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
    def wide(self) -> bool:
        """Whether numbers are float32: `mma_tf32`."""
        return self.problem.dtype == "float32"

    @property
    def unit(self) -> int:
        """Tiles of a unit."""
        return self.config.fixed if self.problem.batch_invariant else 1

    @property
    def sums(self) -> int:
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
        return -(-self.most_tiles // self.unit)

    @property
    def slots_a_block(self) -> int:
        """Places for partial results: one a unit where units are fixed, else two a block."""
        return 1 if self.problem.batch_invariant else 2

    @property
    def slots(self) -> int:
        if self.problem.batch_invariant:
            return self.problem.sequences * self.heads * self.most_units
        return self.slots_a_block * self.ctas

    @property
    def ctas(self) -> int:
        units = self.heads * sum(
            max(1, -(-capacity // (self.tile * self.unit))) for capacity in self.problem.capacities
        )
        return min(self.config.ctas, units)

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

    def tiles_of(self, length: Any, div: Any) -> tuple[Any, Any]:
        """Tiles [first, end) that hold all keys which some row sees; `length` may be any kind of
        integer, `div` divides those that are not negative.
        """
        lo, hi = self.problem.mask.kv_range(length - self.problem.q_len, length, length)
        first = 0 if isinstance(lo, int) else div(lo, self.tile)
        return first, div(at_least(hi, 0) + (self.tile - 1), self.tile)

    def units_of(self, length: Any, div: Any) -> Any:
        """Of a head; for `div` see `tiles_of`."""
        first, end = self.tiles_of(length, div)
        if self.grains > 1:
            _, hi = self.problem.mask.kv_range(length - self.problem.q_len, length, length)
            keys = at_least(hi - first * self.tile, 0)
            return at_least(div(keys + (GRAIN - 1), GRAIN), 1) + self.turn
        units = at_least(end - first, 1)
        return div(units + (self.unit - 1), self.unit) if self.unit > 1 else units


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


def has_no_rows(problem: DecodeProblem) -> bool:
    """Whether the cache has no row at all: there is nothing to launch."""
    return not max(problem.capacities) or problem.pages == 0


def deepest(smem_bytes: Callable, problem: DecodeProblem, config: Any, room: int) -> Any:
    """The config with as many stages, up to 8, as there is room for; but at least 2."""
    deeper = [dataclasses.replace(config, stages=stages) for stages in range(8, 2, -1)]
    fitting = (one for one in deeper if smem_bytes(problem, one) <= room)
    return next(fitting, dataclasses.replace(config, stages=2))


def at_least(x: Any, bound: int) -> Any:
    return (jnp if isinstance(x, jax.Array) else np).maximum(x, bound)


def _div(x: Scalar, y: Any) -> Scalar:
    return lax.div(x, jnp.int32(y) if isinstance(y, int) else y)


# ---- the line of units ---------------------------------------------------------------------------


class Table(NamedTuple):
    """What the blocks know of the lengths: in shared memory."""

    sums: Ref  # int32[plan.sums]: units of a head in the sequences before this one
    lengths: Ref  # int32[plan.sums]: keys that exist; 0 where rows were lost
    lost: Ref  # int32[plan.sums]: 1 where rows were dropped and the result is NaN


class Lengths(NamedTuple):
    lengths: Ref  # int32[M]
    capacities: Ref | None  # where they differ


def lay_out(
    thread: threads.Thread, refs: tuple[Lengths, Table], usable: Any, plan: Plan, meanwhile: Any
) -> None:
    """Fills the table. `usable`: whether the cache has the layer. `meanwhile` is done while the
    lengths are on their way.
    """
    given, table = refs
    lane, last = thread.index % 32, plan.problem.sequences - 1
    mine = thread.index < 32
    sums, lengths, lost = [], [], []
    total: Any = None
    places = [lane * plan.lane_sequences + i for i in range(plan.lane_sequences)]
    within = [thread.minimum(m, last) for m in places]
    asked = [thread.load(given.lengths, at, 4) for at in within]
    room: list[Any] = [plan.layout.capacity] * len(asked)
    if plan.layout.capacity is None:
        room = [thread.load(given.capacities, at, 4) for at in within]
    meanwhile()
    for m, length, most in zip(places, asked, room, strict=True):
        usable_too = (length <= most) & (usable >= 1)
        lengths.append(thread.select(usable_too, at_least(length, 0), 0))
        lost.append(thread.select(usable_too, m * 0, 1))
        units = plan.units_of(lengths[-1], lambda x, y: x // y)
        units = thread.select(m < plan.problem.sequences, units, 0)
        total = units if total is None else total + units
        sums.append(total)
    before = thread.running_sum(total) - total
    for i, m in enumerate(places):
        thread.shared_store(table.sums, m + 1, before + sums[i], mine)
        thread.shared_store(table.lengths, m, lengths[i], mine)
        thread.shared_store(table.lost, m, lost[i], mine)
    thread.shared_store(table.sums, thread.index * 0, thread.index * 0, thread.index < 1)
    thread.sync()


class Share(NamedTuple):
    """Units [first, end) of a block, and what says which block has a unit."""

    first: Scalar
    end: Scalar
    base: Scalar
    rest: Scalar

    def block_of(self, unit: Scalar) -> Scalar:
        large = self.base + 1
        within = self.rest * large
        # base is 0 only where all units lie within the larger shares
        later = self.rest + lax.div(unit - within, jnp.maximum(self.base, 1))
        return jnp.where(unit < within, lax.div(unit, large), later)


def share_of(plan: Plan, table: Table, cta: Scalar) -> Share:
    total, blocks = table.sums[plan.problem.sequences] * plan.heads, jnp.int32(plan.ctas)
    if plan.grains > 1:  # a tile begins in every share
        blocks = jnp.clip(_div(total, plan.grains), 1, blocks)
    base, rest = lax.div(total, blocks), lax.rem(total, blocks)
    first = cta * base + jnp.minimum(cta, rest)
    end = first + base + (cta < rest).astype(jnp.int32)
    if plan.grains > 1:
        end = jnp.where(cta < blocks, end, first)
    return Share(first, end, base, rest)


def sequence_of(plan: Plan, table: Table, unit: Scalar) -> Scalar:
    """The sequence that a unit belongs to."""
    low = jnp.int32(0)
    last = plan.problem.sequences - 1
    for bit in reversed(range(last.bit_length())):
        at = low + (1 << bit)
        inside = table.sums[jnp.minimum(at, last)] * plan.heads <= unit
        low = jnp.where((at <= last) & inside, at, low)
    return low


def piece_at(plan: Plan, table: Table, share: Share, unit: Scalar, m: Scalar) -> Piece:
    """The block's piece that begins at `unit`, in sequence m or the next."""
    m = jnp.minimum(
        m + (unit >= table.sums[m + 1] * plan.heads).astype(jnp.int32), plan.problem.sequences - 1
    )
    start = table.sums[m]
    units = jnp.maximum(table.sums[m + 1] - start, 1)  # 0 only past the end of the line
    within = unit - start * plan.heads
    head = _div(within, units)
    skipped = within - head * units
    taken = jnp.minimum(share.end - unit, units - skipped)
    if plan.problem.batch_invariant:
        taken = jnp.minimum(taken, 1)
    length = table.lengths[m]
    first, end = plan.tiles_of(length, _div)
    end = jnp.maximum(end, first + 1)
    tile = first + skipped * plan.unit
    stop = tile + taken * plan.unit
    if plan.grains > 1:
        tile, stop = (
            first + _div(past + (plan.grains - 1), plan.grains)
            for past in (skipped, skipped + taken)
        )
    return Piece(
        m=m,
        head=head,
        length=length,
        tile=tile,
        end=jnp.minimum(stop, end),
        following=unit + taken,
        begin=unit,
        of_head=unit - skipped,
        units=units,
    )


def first_query(plan: Plan, piece: Piece) -> tuple[Scalar, Scalar]:
    """Where query 0 of the piece's kv head lies, in rows; and which query the piece begins with."""
    head = lax.div(piece.head, jnp.int32(plan.chunks)) * (plan.abreast * plan.group)
    first = piece.m * (plan.problem.q_len * plan.problem.q_heads) + head
    return first, lax.rem(piece.head, jnp.int32(plan.chunks)) * plan.chunk_rows


def begin_of(plan: Plan, table: Table, share: Share, m: Scalar) -> Scalar:
    """The unit where a share's first piece begins: not behind a head's last tile. It may be past
    the end.
    """
    first = piece_at(plan, table, share, share.first, m)
    return jnp.where(first.tile >= first.end, first.following, share.first)


class Parts(NamedTuple):
    """The partial results that make up one head of a sequence: part p has slot `first` where p is
    0, else `later + p * plan.slots_a_block`.
    """

    count: Scalar
    mine: Scalar  # this block's own slot
    first: Scalar
    later: Scalar


def parts_of(plan: Plan, share: Share, piece: Piece, cta: Scalar) -> Parts:
    """A block has at most two pieces that are not whole: its first, which does not begin its head,
    and its last, which does.
    """
    if plan.problem.batch_invariant:
        return Parts(piece.units, piece.begin, piece.of_head, piece.of_head)
    begins = (piece.begin == piece.of_head).astype(jnp.int32)
    first = share.block_of(piece.of_head)
    last = piece.units - 1
    if plan.grains > 1:
        tiles_before, end = plan.tiles_of(piece.length, _div)
        last = jnp.maximum(end - tiles_before - 1, 0) * plan.grains
    last = share.block_of(piece.of_head + last)
    return Parts(last - first + 1, 2 * cta + begins, 2 * first + 1, 2 * first)
