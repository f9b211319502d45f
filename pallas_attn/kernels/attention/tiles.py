"""Query tiles, kv tiles, and the kv tiles that query rows need.

Kernels whose work tiles are query rows agree on them here. `Mask` says who sees whom; this file
turns that into numbers of tiles, in plain arithmetic on Python numbers or on traced ones.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionProblem, bounds_of, owner_of_chunk
from pallas_attn._functions.program import Program
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import tma_operands
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import GmemRef, Index
from pallas_attn.masks import FULL, Mask

ROWS = 64  # query rows of a warpgroup, which one wgmma takes
# Arrays that decide at run time which keys rows see; without them the mask alone does.
DYNAMIC = {"q_offset", "q_lengths", "kv_lengths", "mask_left", "mask_right"}
DYNAMIC |= {"q_segment_ids", "mask_array"}
# Kinds of spans, whose kv tiles are taken from the last to the first. "empty": there is no kv tile.
# "first_masked": the last kv tile needs a mask. "high": others after those that are visible whole
# need one. "low": some before them do.
SECTIONS = frozenset(("empty", "first_masked", "high", "low"))


class KernelContext(NamedTuple):
    """The first argument, `ctx`, of every function of a kernel."""

    plan: Any  # static values: sizes, formats, the Config
    refs: Any  # global memory
    smem: Any = None  # shared memory


class ForwardRefs(NamedTuple):
    """Global memory of the forward kernels. None: not in this problem."""

    q: GmemRef
    k: GmemRef
    v: GmemRef
    v_edge: Any = None  # [B, block_kv, K, Hv]: the value tile that kv_lengths cuts, 0 behind them
    q_offset: Any = None  # int32[B]
    q_lengths: Any = None
    kv_lengths: Any = None
    mask_left: Any = None  # int32[B], where the bound arrives at run time
    mask_right: Any = None
    q_segment_ids: Any = None  # int32[B, padded rows]
    kv_segment_ids: Any = None  # int32[B, padded keys]
    segment_spans: Any = None  # int32[B, 4, q tiles]: fields of a Span; Hopper: `documents.records`
    bias: Any = None
    mask_array: Any = None
    sinks: Any = None
    schedule: Any = None  # int32[blocks, n]: see `tile_scheduler.schedule`
    q_positions: Any = None  # int32[B, padded rows]
    logit_units: Any = None  # float8: float32[B, N], factor of a head's scores
    q_units: Any = None  # float8: float32[B, N, padded rows], factor of a row's scores
    k_units: Any = None  # float8: float32[B, K, ..], factor of the scores of a key or of a kv tile
    v_units: Any = None  # float8: float32[B, K, ..], factor of the values of a key or of a kv tile
    units: Any = None  # float32[2, B, K]: of scores and of outputs, where q, k and v are terms
    out: Any = None  # written
    lse: Any = None  # written
    mask_aux: Any = ()  # arrays of functions of positions: `functions.operands`
    score_aux: Any = ()
    tiles: Any = None  # see `tile_lists.tiles`
    fetching: Any = None  # see `fetch.Operands`
    counter: Any = None  # int32[1], written: see `claims`
    key_spans: Any = None  # int32[B|1, N|1, 4]: see `key_masks.spans`


class Span(NamedTuple):
    """Kv tiles [lo, hi) that some row sees; every row sees [full_lo, full_hi) whole."""

    lo: Index
    full_lo: Index
    full_hi: Index
    hi: Index

    def within(self, other: "Span") -> "Span":
        """The intersection of two spans."""
        return Span(
            jnp.maximum(self.lo, other.lo),
            jnp.maximum(self.full_lo, other.full_lo),
            jnp.minimum(self.full_hi, other.full_hi),
            jnp.minimum(self.hi, other.hi),
        )

    def sections(self) -> set[str]:
        """The `SECTIONS` of a span of Python numbers, whose tiles are taken from the last on."""
        if self.hi <= self.lo:
            return {"empty"}
        first = self.hi - 1
        occurs = {
            "first_masked": not self.full_lo <= first < self.full_hi,
            "high": self.full_hi < first,
            "low": self.lo < self.full_lo,
        }
        return {name for name, does in occurs.items() if does}


class WorkTile(NamedTuple):
    """Query rows of one head that a block takes at a time."""

    batch: Index
    head: Index
    row: Index  # the first of them
    q_offset: Index
    q_len: Any  # rows that count; None: all do
    kv_len: Index
    mask: Mask


class LogitTile(NamedTuple):
    """The queries and keys of a tile of logits: queries are its rows and keys its columns (`q_axis`
    0), or the other way round (1).
    """

    batch: Index
    head: Index
    query: Index  # the first query row
    key: Index  # the first key
    q_offset: Index
    kv_len: Index
    mask: Mask
    q_axis: int
    numbers: Any = None  # 0, 1, .. of the queries, in shared memory: see `tile_logits.apply_mask`
    # The head and the position of each query, where queries are those of several heads.
    rows: Any = None
    layout: Any = mosaic.TILE
    in_smem: Any = None  # parts of bias and mask_array in shared memory, by name: `score_tiles`


class LoadedTile(NamedTuple):
    """A `tile_lists.Listed` of which one tile is asked for, which was read before."""

    number: Index

    def tile(self, j: Index) -> Index:
        del j
        return self.number


class QueryRows(NamedTuple):
    """Rows of a work tile that share a span, those of a warpgroup as a rule."""

    tile: WorkTile
    row: Index  # the first of them
    wg: Index
    span: Span
    q_slot: Any = None  # the q tile in shared memory that holds them
    segments: Any = None  # `segment_spans.RowSegments`, where there are segment ids
    listed: Any = None  # `tile_lists.Listed`, where kv tiles are numbers in a list
    last: Any = None  # the last kv tile of that list that the rows need
    mapping: Any = None  # says which rows of which heads they are, where not of one: `prefill.plan`

    def with_loaded_tile(self, tile: Index) -> "QueryRows":
        """The same rows where the list's entry for the kv tile at hand was read before."""
        return self._replace(listed=LoadedTile(tile))

    def kv_tile(self, t: Index) -> Index:
        """The kv tile that is number t of the span."""
        return t if self.listed is None else self.listed.tile(t)


@dataclasses.dataclass(frozen=True)
class QueryTiling:
    """The sizes of a kernel whose work tiles are query rows."""

    q_len: int
    kv_len: int
    tile_rows: int  # query rows of a work tile
    block_kv: int  # keys of a kv tile
    span_rows: int = ROWS  # rows that share a span of kv tiles

    @functools.cached_property
    def q_tiles(self) -> int:
        """Work tiles of a head."""
        return pl.cdiv(self.q_len, self.tile_rows)

    @functools.cached_property
    def padded_rows(self) -> int:
        return self.q_tiles * self.tile_rows

    @functools.cached_property
    def padded_keys(self) -> int:
        return pl.cdiv(self.kv_len, self.block_kv) * self.block_kv

    @functools.cached_property
    def whole_rows(self) -> bool:
        """Whether no work tile has rows past T."""
        return self.padded_rows == self.q_len

    @functools.cached_property
    def has_idle_spans(self) -> bool:
        """Whether some span is of rows past T only."""
        return self.padded_rows - self.q_len >= self.span_rows

    @functools.cached_property
    def row_blocks(self) -> int:
        """Spans of a work tile."""
        return self.tile_rows // self.span_rows

    @functools.cached_property
    def list_sizes(self) -> tuple[int, int, bool, int]:
        """The sizes of `tile_lists.tiles`."""
        return self.tile_rows, self.block_kv, False, self.row_blocks


# ---- the kv tiles that query rows need ----------------------------------------------------------


def mask_span(mask: Mask, position: Index, rows: Index, kv_len: Index, block: int) -> Span:
    """The kv tiles of `block` keys that `rows` queries from a position on need."""
    lo, hi = mask.kv_range(position, position + rows, kv_len)
    full_lo, full_hi = mask.kv_full_range(position, position + rows, kv_len)
    larger = max if isinstance(hi, int) else jnp.maximum
    return Span(
        lo=_divided(lo, block),
        full_lo=_divided(full_lo + block - 1, block),
        full_hi=_divided(larger(full_hi, 0), block),
        hi=_divided(larger(hi, 0) + block - 1, block),
    )


def mask_of(problem: AttentionProblem, refs: Any, batch: Index) -> Mask:
    """The mask of a batch row, with the bounds that arrive at run time."""
    if not problem.mask.arrives:
        return problem.mask
    bounds = {side: ref[batch] for side, ref in bounds_of(refs).items()}
    return problem.mask.filled(**bounds)


def span_mask(problem: AttentionProblem, mask: Mask) -> Mask:
    """The mask by which spans follow from row numbers: none where rows have positions of their own,
    whose spans are in `segment_spans`.
    """
    return FULL if "q_positions" in problem.arrays else mask


def known_offsets(problem: AttentionProblem) -> set[int]:
    """Every offset that rows may have; none where an array decides which keys rows see."""
    if DYNAMIC & set(problem.arrays) == {"q_offset"}:
        return {offset for offsets in problem.offsets for offset in offsets}
    return set() if DYNAMIC & set(problem.arrays) else {problem.q_offset}


@functools.lru_cache(maxsize=256)
def sections_of(problem: AttentionProblem, tiling: QueryTiling) -> frozenset[str]:
    """The `SECTIONS` that occur among the spans of all rows, where no kv tiles are listed."""
    offsets = known_offsets(problem)
    if not offsets:
        return SECTIONS
    mask, rows = span_mask(problem, problem.mask), tiling.span_rows
    places = [(row, rows) for row in range(0, tiling.q_len, rows)]
    if tiling.has_idle_spans:
        places.append((tiling.q_len - 1, 1))
    spans = (
        mask_span(mask, offset + row, count, tiling.kv_len, tiling.block_kv)
        for offset in offsets
        for row, count in places
    )
    return frozenset().union(*(span.sections() for span in spans))


# ---- batch rows and heads that share K and V ----------------------------------------------------


def heads_in(nbytes: int, problem: AttentionProblem, row_bytes: int) -> int:
    """Query heads whose K and V, of `row_bytes` a row, take `nbytes`; at least those of a kv
    head.
    """
    return max(nbytes // max(problem.kv_len * row_bytes, 1), 1) * problem.group


def kv_batch(problem: AttentionProblem, batch: Index) -> Index:
    """The batch row of k and v that one of q reads."""
    return batch if problem.share == 1 else lax.div(batch, jnp.int32(problem.share))


def kv_row(problem: AttentionProblem, block: int, position: Index) -> Index:
    """The row of k and v that has the first key of a kv tile of `block`, by its position."""
    devices = problem.zigzag
    if devices == 1:
        return position
    size = problem.kv_len // (2 * devices)
    if size % block:
        raise ValueError(
            f"Config.block_kv must divide the {size} keys of a chunk where k and v lie in the "
            f"order zigzag, got {block}"
        )
    chunk = lax.div(position, jnp.int32(size))
    owner, which = owner_of_chunk(chunk, devices)
    return position + (2 * owner + which - chunk) * size


# ---- problems -----------------------------------------------------------------------------------


def limit(problem: AttentionProblem, widest: int = 256) -> Limit | None:
    """Why a kernel that takes head dims up to `widest` refuses a problem, or None."""
    if problem.dtype not in ("bfloat16", "float16", "float32"):
        how = "multiply them by their scales and " if problem.out_dtype else ""
        return Limit(
            f"it takes bfloat16, float16 and float32, not {problem.dtype}",
            f"{how}cast q, k and v to one of them",
        )
    return tma_operands.dims_limit(problem, widest) or sizes_limit(problem)


def sizes_limit(problem: AttentionProblem) -> Limit | None:
    """Why there are too many rows, or too large arrays of functions, or None."""
    if problem.batch * problem.q_heads * (problem.q_len + 256) >= 2**31:
        return Limit("it counts query rows of all heads in 32 bits", "split the batch")
    return arrays_limit(problem.functions)


def arrays_limit(functions: Sequence[Program]) -> Limit | None:
    """Why arrays that functions of positions read are too large, or None."""
    read = [shape for function in functions for shape, _ in function.arrays]
    if any([math.prod(shape) >= 2**31 for shape in read]):
        return Limit(
            "it counts numbers of an array that a function reads in 32 bits",
            "give each batch row or head a call of its own, or compute more of it in the function",
        )
    return None


def _divided(n: Index, by: int) -> Index:
    return n // by if isinstance(n, int) else lax.div(n, jnp.int32(by))
