"""The static facts of a decode launch: how query rows and keys are cut into chunks, tiles and
units, and the sizes that follow.

`Plan` is made of two small values. `QueryRows` says how the query rows that share a kv head are
packed into the rows of a tensor core's matrix. `KvTiles` says which kv tiles those rows need, and
how the scheduler counts them.
"""

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call.launches import FOLDED_ROWS
from pallas_attn._call.problem import DecodeProblem
from pallas_attn.kernels.attention import cache_layout, softmax
from pallas_attn.kernels.attention.cache_layout import Layout
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.types import Index
from pallas_attn.kernels.mma import dequant, mma_rowmajor, mma_tf32
from pallas_attn.kernels.mma.mma_rowmajor import ROWS, Split
from pallas_attn.masks import Mask

ZERO_BYTES = 2048  # zeros before the counters in global memory
FINE_UNIT = 16  # keys of a unit that is finer than a kv tile
# Largest number of columns of q, or of the output, in the registers of a warp. Warps divide the
# columns of wider rows; the widest of these leave room in shared memory for tiles of 16 keys only.
COLUMNS_OF_A_WARP = 256


ROWS_OF_WARPS = threads.WARPS * ROWS  # rows of the warps' matrices, one above the other


def div(x: Index, y: Index) -> Index:
    """x // y of numbers that are not negative; `x` is any kind of integer."""
    if isinstance(x, jax.Array):
        return lax.div(x, jnp.int32(y) if isinstance(y, int) else y)
    return x // y


def at_least(x: Index, bound: int) -> Index:
    """The larger of both; `x` is any kind of integer."""
    return (jnp if isinstance(x, jax.Array) else np).maximum(x, bound)


class DecodeTiling(NamedTuple):
    """The fields of a kernel's Config that a plan and its scheduler read."""

    tile: int  # keys of a kv tile
    grid: int  # persistent blocks, at most
    q_rows: int  # query rows that a block takes at once, at most
    split_tiles: int  # kv tiles of a split where `batch_invariant` is asked for
    stages: int  # tiles in the ring
    load_first: bool = False  # the load of the next tile begins before the wait for this one
    many_heads: bool = False  # blocks have several heads each
    head_overhead: int = 0  # keys for which a head counts in addition to its own
    overlaps: bool = False  # begins while the kernel before it ends


class Copies(NamedTuple):
    """How kv tiles come to shared memory: programs of single threads."""

    copy_tile: Callable[..., None]
    load_pages: Callable[..., Index]  # the page that `copy_tile` wants of a thread
    meet: Callable[..., None]  # all threads meet before a slot of the ring is filled again
    wait: Callable[..., None]  # for the tile of a `loads.Phase`
    make_barriers: Callable[..., None]
    bulk: bool = True  # by the GPU; else threads count groups of their own copies


class Steps(NamedTuple):
    """The computations of a mainloop: functions of a module such as `mainloop`."""

    initial: Callable[..., Any]  # the state before the first key
    load_queries: Callable[..., Any]
    scores: Callable[..., Any]
    attend: Callable[..., Any]  # the state after one more tile
    epilogue: Callable[..., None]  # the state of a work tile -> results, or a partial
    # Whether places of partials are computed before the tiles of a work or after: machine code
    # differs.
    places_first: bool = True


@dataclasses.dataclass(frozen=True)
class QueryRows:
    """The query rows of a kv head, which a block takes a q chunk at a time. Each chunk reads the
    keys again.
    """

    group: int  # query heads a kv head
    rows: int  # query rows that share a kv head's keys: all tokens of all heads of the group
    row_blocks: int  # 16-row matrices of a chunk
    chunk_rows: int  # query rows of a chunk

    @functools.cached_property
    def most_rows(self) -> int:
        """Query rows that a chunk may have."""
        return min(self.rows, self.chunk_rows)

    @functools.cached_property
    def warp_rows(self) -> int:
        """Query rows that a warp may have."""
        return min(self.most_rows, ROWS)

    @functools.cached_property
    def chunks(self) -> int:
        """q chunks of a kv head of the sequence with the most rows."""
        return -(-self.rows // self.chunk_rows)

    def chunks_of(self, count: Index | None) -> Index:
        """q chunks of a sequence of `count` packed rows; None: rows are not packed."""
        if count is None or self.chunks == 1:
            return self.chunks
        return div(count * self.group + (self.chunk_rows - 1), self.chunk_rows)


def is_wide(problem: DecodeProblem) -> bool:
    """Whether warps divide the columns of rows among them, and not the keys."""
    return max(problem.head_dim, problem.v_head_dim) > COLUMNS_OF_A_WARP


def query_rows(problem: DecodeProblem, most: int, row_blocks: int | None = None) -> QueryRows:
    """`most`: rows that a block takes at once. `row_blocks`: where the kernel always takes as many;
    None: 1, 2 or 4, as rows need.
    """
    group = problem.q_heads // problem.kv_heads
    rows = group * problem.q_len
    if row_blocks is None:
        row_blocks = -(-min(rows, most) // ROWS)
        row_blocks = row_blocks if row_blocks <= 2 else 2 if is_wide(problem) else 4
        if problem.dtype == "float32" and problem.head_dim + problem.v_head_dim > 256:
            row_blocks = 1  # more queries would leave no room for keys
    return QueryRows(group, rows, row_blocks, min(most, row_blocks * ROWS))


@dataclasses.dataclass(frozen=True)
class KvTiles:
    """The kv tiles of a sequence, and the units in which the `scheduler` counts them."""

    tile: int  # keys of a kv tile
    page_rows: int  # rows of a tile that are sure to lie in one slab
    contiguous_rows: int  # rows of a tile that are sure to be contiguous in memory
    most_tiles: int  # tiles of the longest sequence
    tiles_a_unit: int = 1  # more where splits are fixed (`batch_invariant`)
    units_a_tile: int = 1  # more where a unit is `FINE_UNIT` keys
    head_overhead: int = 0  # units that a head counts for in addition to those of its keys

    @property
    def most_units(self) -> int:
        """Units of a head of the longest sequence."""
        return -(-self.most_tiles // self.tiles_a_unit)

    def tiles_of(self, mask: Mask, length: Index, queries: Index) -> tuple[Index, Index]:
        """Tiles [first, end) that hold all keys which some of the last `queries` rows see."""
        lo, hi = mask.kv_range(length - queries, length, length)
        first = 0 if isinstance(lo, int) else div(lo, self.tile)
        return first, div(at_least(hi, 0) + (self.tile - 1), self.tile)

    def units_of(self, mask: Mask, length: Index, queries: Index) -> Index:
        """Units of a head."""
        first, end = self.tiles_of(mask, length, queries)
        if self.units_a_tile > 1:
            _, hi = mask.kv_range(length - queries, length, length)
            keys = at_least(hi - first * self.tile, 0)
            return at_least(div(keys + (FINE_UNIT - 1), FINE_UNIT), 1) + self.head_overhead
        units = at_least(end - first, 1)
        if self.tiles_a_unit > 1:
            units = div(units + (self.tiles_a_unit - 1), self.tiles_a_unit)
        return units


def kv_tiles(problem: DecodeProblem, tiling: DecodeTiling, layout: Layout) -> KvTiles:
    tile, fine = tiling.tile, tiling.many_heads and not problem.batch_invariant
    return KvTiles(
        tile=tile,
        page_rows=layout.page_rows(tile),
        contiguous_rows=layout.contiguous_rows(tile),
        most_tiles=max(1, -(-max(problem.capacities) // tile)),
        tiles_a_unit=tiling.split_tiles if problem.batch_invariant else 1,
        units_a_tile=tile // FINE_UNIT if fine else 1,
        head_overhead=tiling.head_overhead // FINE_UNIT if fine else 0,
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static facts of one launch."""

    problem: DecodeProblem
    tiling: DecodeTiling
    layout: Layout  # the places of the cache's rows
    queries: QueryRows
    keys: KvTiles
    heads: int  # heads that the scheduler counts: kv heads, once for each q chunk unless packed
    grid: int  # persistent blocks
    partials: int  # partials of a row that fit in global memory, over all rows
    partials_a_block: int  # 2, or 1 a unit where splits are fixed
    # These: of the kernels whose mainloop is that of `decode.sm90`.
    copies: Any = None  # `Copies`
    steps: Any = None  # `Steps`
    scratch: Any = None  # makes `buffers`
    name: str = ""  # the launch's
    lowering: Any = plgpu.LoweringSemantics.Lane

    @functools.cached_property
    def lines(self) -> int:
        """q chunks of all sequences, at most."""
        return _lines(self.problem, self.queries)

    @functools.cached_property
    def is_float32(self) -> bool:
        return self.problem.dtype == "float32"

    @functools.cached_property
    def matmuls(self) -> ModuleType:
        """The module that has `scores` and `matmul_add` for q's dtype."""
        return mma_tf32 if self.is_float32 else mma_rowmajor

    @functools.cached_property
    def itemsize(self) -> int:
        """Bytes of a number in the cache."""
        return jnp.dtype(self.problem.cache_dtype).itemsize

    @functools.cached_property
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes of a row of K and of V, or of both where they lie in one array."""
        k, v = (self.itemsize * n for n in (self.problem.head_dim, self.problem.v_head_dim))
        return (k + v,) if self.layout.joined else (k, v)

    @functools.cached_property
    def v_column(self) -> int:
        """The first column of V in its array."""
        return self.problem.head_dim if self.layout.joined else 0

    @functools.cached_property
    def buffers(self) -> Any:
        """Shared memory of a block."""
        return self.scratch(self)

    @functools.cached_property
    def out_types(self) -> tuple[Any, ...]:
        """The results of a launch: out, lse, and partials (`combine_splits.Results`)."""
        problem, array = self.problem, jax.ShapeDtypeStruct
        rows = (self.partials, self.queries.chunk_rows)
        sums = array(rows, jnp.float32)
        return (
            array((*problem.out_shape, problem.v_head_dim), problem.dtype),
            array(problem.lse_shape, jnp.float32),
            (array((*rows, problem.v_head_dim), jnp.float32), sums, sums),
        )

    @functools.cached_property
    def scaled(self) -> bool:
        """Whether rows of the cache have scales."""
        return self.problem.quantized and not self.problem.unscaled

    @functools.cached_property
    def lane_sequences(self) -> int:
        """Sequences that each lane of the warp that makes the scheduler's table counts."""
        return -(-self.problem.sequences // threads.LANES)

    @functools.cached_property
    def queries_ahead(self) -> bool:
        """Whether queries are loaded while the work before is finished."""
        return self.tiling.many_heads and not self.is_float32

    @functools.cached_property
    def pages_ahead(self) -> bool:
        """Whether the pages of a tile are looked up while the tile before it is loaded."""
        tiling = self.tiling
        many = tiling.load_first and (tiling.many_heads or self.problem.quantized)
        return many and self.layout.paged and self.copies.bulk

    @functools.cached_property
    def skips_pages(self) -> bool:
        """Whether the mask may let a block skip pages."""
        return self.layout.paged and self.problem.mask.bounds_left

    @functools.cached_property
    def unit_of_logits(self) -> float | None:
        """The factor from scores to log2 units; None where they are converted before the softmax,
        whose largest score must be the largest logit.
        """
        if self.problem.softcap is not None or self.problem.score_program is not None:
            return None
        return softmax.unit_of(self.problem.scale)

    @functools.cached_property
    def split(self) -> Split:
        """Query rows and keys of each warp."""
        problem = self.problem
        few = self.queries.rows <= FOLDED_ROWS and not problem.quantized and not self.is_float32
        integers = dequant.by_integers(problem.cache_dtype, problem.gpu)
        blocks, folded = self.queries.row_blocks, few and self.tiling.many_heads
        return Split(blocks, self.keys.tile, folded, integers, is_wide(problem))

    @functools.cached_property
    def load_first(self) -> bool:
        """Whether the load of the next tile begins before the wait for this one; with a single
        stage, it is the load of this one.
        """
        return self.tiling.load_first or self.tiling.stages == 1

    def queries_of(self, count: Index | None) -> Index:
        """Query rows of a sequence; `count`: where rows are packed, how many it has."""
        return self.problem.q_len if count is None else count


def _lines(problem: DecodeProblem, queries: QueryRows) -> int:
    if problem.tokens is None or queries.chunks == 1:
        return problem.sequences * queries.chunks
    return -(-problem.tokens * queries.group // queries.chunk_rows) + problem.sequences


def plan_with(
    problem: DecodeProblem,
    tiling: DecodeTiling,
    queries: QueryRows,
    most_blocks: int | None = None,
    **parts: Any,
) -> Plan:
    """The plan of a kernel that takes query rows so; `most_blocks`: where more would be slower.
    `parts`: the last fields of a `Plan`.
    """
    layout = cache_layout.layout_of(problem)
    keys = kv_tiles(problem, tiling, layout)
    heads = problem.kv_heads * (1 if problem.packed else queries.chunks)
    lines = _lines(problem, queries)
    units = heads * (lines * keys.most_units if problem.packed else units_of_full(problem, keys))
    grid = min(tiling.grid, units, most_blocks or units)
    each, partials = 2, 2 * grid
    if problem.batch_invariant:
        each, partials = 1, problem.kv_heads * lines * keys.most_units
    return Plan(problem, tiling, layout, queries, keys, heads, grid, partials, each, **parts)


_calls = itertools.count(1)


def counters(plan: Plan) -> np.ndarray:
    """A zero for every head of every sequence, in which its partials are counted
    (`combine_splits`), behind `ZERO_BYTES` of zeros that are only read (`loads.copy_tile`).

    Each launch leaves them as it found them, so they are a constant: XLA has nothing to clear,
    which would be a launch of its own. The number behind them is that of this problem and trace,
    of another process too (`_call/store.py`): launches of one call would otherwise share one
    constant, and must not if XLA ever ran them side by side. (Calls that share a trace,
    `batching.compiled_once`, still do.) It also keeps XLA from making the zeros itself.
    """
    zeros = ZERO_BYTES // 4 + plan.problem.kv_heads * plan.lines
    number = (zlib.crc32(repr(plan.problem).encode()) ^ next(_calls)) % 2**31
    return np.append(np.zeros(zeros, np.int32), np.int32(number or 1))


def units_of_full(problem: DecodeProblem, keys: KvTiles) -> int:
    """Units of a head of all sequences, where these are full."""
    unit = keys.tile * keys.tiles_a_unit
    return sum(max(1, -(-rows // unit)) for rows in problem.capacities)


def widest_tile(problem: DecodeProblem) -> int:
    """Keys of the widest kv tile: 128 threads copy a tile, each of them rows that lie in a line."""
    layout = cache_layout.layout_of(problem)
    return 256 if 256 // layout.contiguous_rows(256) <= mosaic.THREADS else 128


def check_tile(problem: DecodeProblem, tile: int, bulk: bool) -> None:
    """Raises a ValueError where `decode.sm90`, or `decode.sm80`, has no such tiles."""
    if bulk and tile > (most := widest_tile(problem)):
        want = f"at most {most} over pages of {problem.page_size} rows"
        raise ValueError(f"Config.tile must be {want}, got {tile}")
    if is_wide(problem):
        return
    if tile < 32:
        raise ValueError(f"Config.tile must be at least 32 for head dims up to 256, got {tile}")
    if tile < 64 and problem.dtype != "float32":
        raise ValueError(f"Config.tile must be at least 64 of 16-bit numbers, got {tile}")
