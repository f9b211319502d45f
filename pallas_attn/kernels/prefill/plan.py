"""Static values of a prefill launch: tiles of query rows, the keys they read, the buffers.

Two parts of a plan have a plain case and special ones:

  queries   the query rows that blocks take, a `Queries`: of `queries`, as many of each sequence;
            `packed_queries`; and `shared_parts`, over keys that sequences share
  producer  how K and V come to shared memory, a `Producer`: `tma_producer`; `widening_producer`,
            for a quantised cache; `float8_producer`, for matmuls on 8 bits
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionProblem, DecodeInputs, DecodeProblem
from pallas_attn.kernels.attention import (
    cache_layout,
    functions,
    linear_scores,
    tma_operands,
)
from pallas_attn.kernels.attention.logits import LogitRules
from pallas_attn.kernels.attention.softmax import OutputSums
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext, Span, WorkTile
from pallas_attn.kernels.attention.tma_operands import OperandFormat
from pallas_attn.kernels.flash_fwd.warpgroups import mainloop
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.mosaic import BARRIERS
from pallas_attn.kernels.lang.types import (
    Barrier,
    GmemRef,
    Index,
    Predicate,
    RegisterTile,
    Scalar,
    SmemRef,
)
from pallas_attn.kernels.prefill import mask_functions
from pallas_attn.masks import Mask


def over_contiguous_keys(problem: DecodeProblem) -> AttentionProblem:
    """The same attention over contiguous keys, which is what the forward's mainloop computes."""
    return AttentionProblem(
        op="flash_forward",
        gpu=problem.gpu,
        dtype=problem.dtype,
        batch=problem.sequences,
        q_len=problem.q_len if problem.tokens is None else problem.tokens,
        kv_len=max(problem.capacities),
        q_heads=problem.q_heads,
        kv_heads=problem.kv_heads,
        head_dim=problem.head_dim,
        v_head_dim=problem.v_head_dim,
        mask=problem.mask,
        scale=problem.scale,
        softcap=problem.softcap,
        arrays=("q_offset", "kv_lengths", *(("sinks",) if problem.sinks else ())),
        mask_program=problem.mask_program,
        score_program=problem.score_program,
    )


def unquantized(problem: DecodeProblem) -> DecodeProblem:
    """The same attention over a cache in q's dtype."""
    return dataclasses.replace(problem, quantized=False, cache_dtype=problem.dtype)


def divided(n: Index, by: Index) -> Index:
    """`n // by` for numbers that are not negative: Python's, a thread's, or traced ones."""
    return lax.div(n, jnp.int32(by)) if isinstance(n, jax.Array) else n // by


@dataclasses.dataclass(frozen=True)
class RowTiles:
    """Query rows of the heads that share a kv head, in tiles of 64, one a consumer warpgroup.

    A tile has `tile_heads` query heads with `head_rows` consecutive query rows each: its row r is
    query head r // head_rows and query row r % head_rows, so that all of them share one pass over K
    and V. `head_rows` is a multiple of 8, since TMA writes 8 rows of a swizzled tile at a time:
    groups of 5, 6 and 7 heads leave rows idle.
    """

    group: int  # query heads of a kv head
    q_len: int
    warpgroups: int  # consumers of a block

    @functools.cached_property
    def tile_heads(self) -> int:
        return min(self.group, 8)

    @functools.cached_property
    def head_rows(self) -> int:
        return ROWS // self.tile_heads // 8 * 8

    @functools.cached_property
    def head_chunks(self) -> int:
        """Warpgroup tiles of the same query rows: one where a tile holds the whole head group."""
        return pl.cdiv(self.group, self.tile_heads)

    @functools.cached_property
    def wg_tiles(self) -> int:
        """Warpgroup tiles of a kv head of a sequence."""
        return self.wg_tiles_of(self.q_len)

    @functools.cached_property
    def q_tiles(self) -> int:
        """Q tiles of a kv head of a sequence: what a block works on at a time."""
        return self.q_tiles_of(self.q_len)

    @functools.cached_property
    def padded_wg_tiles(self) -> int:
        return self.q_tiles * self.warpgroups

    def wg_tiles_of(self, rows: Index) -> Index:
        """Warpgroup tiles of so many query rows, a number as in `divided`."""
        return divided(rows + (self.head_rows - 1), self.head_rows) * self.head_chunks

    def q_tiles_of(self, rows: Index) -> Index:
        return divided(self.wg_tiles_of(rows) + (self.warpgroups - 1), self.warpgroups)

    def row_positions(self, rows: int, first: Index) -> RegisterTile:
        """int32[64]: position of each row of a tile, the first of which is at `first`."""
        del rows  # 64
        within = mosaic.filled((ROWS,), self.head_rows - 1, jnp.int32)  # a power of 2, less 1
        return (mosaic.positions((ROWS,), 0, 0) & within) + first

    def row_heads(self) -> RegisterTile:
        """int32[64]: query head of each row, counted from the first of the tile."""
        rows = mosaic.filled((ROWS,), self.head_rows, jnp.int32)
        return lax.div(mosaic.positions((ROWS,), 0, 0), rows)


class Unit(NamedTuple):
    """A q tile and some of its kv tiles, which a block takes at a time."""

    m: Index  # sequence
    kv_head: Index
    q_tile: Index
    split: Index
    tile: WorkTile  # its query rows, as the mainloop masks them
    span: Span  # kv tiles; lo == hi where there is none
    invalid: Predicate  # whether the result is NaN
    rows: Index  # query rows of the sequence
    first_row: Index = 0  # first packed row of the sequence
    line: Index | None = None  # number of the q tile among all sequences', where rows are packed


class WgTile(NamedTuple):
    """The rows of one consumer in a unit."""

    exists: Predicate
    head: Index  # its first query head
    heads_left: Index  # query heads from that one to the end of the group
    row: Index  # its first query row
    number: Index  # among the warpgroup tiles of its kv head; where rows are packed, of `line`s


class Ending(NamedTuple):
    """The rows that a result belongs to."""

    unit: Unit
    rows: WgTile
    wg: Index
    spoil: Scalar  # NaN where the result is invalid, else 0: is added to what is stored


class Units(NamedTuple):
    """The units of a block by number: `count` from `first` on, each `step` after the last."""

    first: Index
    step: Index
    count: Index
    back: Index | None = None  # first number of every other one: a long unit before a short one
    share: Any = None  # `shares.Share`, where blocks share out kv tiles

    def number(self, i: Index) -> Index:
        first = self.first if self.back is None else jnp.where(i & 1 == 0, self.first, self.back)
        return first + i * self.step


class SequenceKeys(NamedTuple):
    """The keys of a sequence."""

    kv_len: Index
    q_offset: Index  # position of its first query row among them
    q_len: Index  # query rows that count
    invalid: Predicate  # whether the result is NaN
    mask: Mask


class Queries(NamedTuple):
    """How blocks take query rows."""

    packed: bool  # whether sequences have different numbers of query rows
    scratch: Callable[["Plan"], "PrefillSmem"]  # shared memory of a block
    partial_tiles: Callable[["Plan"], tuple[int, int]]  # sizes of partials: (lines, tiles of each)
    units_of: Callable[[KernelContext, Index], Units]  # the units of a block
    last_unit: Callable[[KernelContext], Index]  # the last number of all units
    unit_of: Callable[[KernelContext, Units, Index], Unit]  # a block's unit of a number
    # `load(ctx, unit, wg, slot, exists)` asks for the rows of a consumer, `wait(ctx, slot)` until
    # they are there, and `store(ctx, end, result)` writes theirs.
    load: Callable[[KernelContext, Unit, Index, Index, Predicate], None]
    wait: Callable[[KernelContext, Index], None]
    store: Callable[[KernelContext, Ending, OutputSums], None]
    # `begin(ctx, wg, block_id)` fills the tables that units are looked up in, if there are any.
    begin: Callable[[KernelContext, Index, Index], None] | None = None


class Producer(NamedTuple):
    """How K and V come to the ring."""

    operands: Callable[["Plan", DecodeInputs], dict[str, Any]]  # fields of `PrefillRefs`
    # `program(ctx, block_id)` of each of its warpgroups: K and V of every unit of the block, in the
    # order in which consumers use them.
    programs: tuple[Callable[..., None], ...]
    arrivals: int  # complete the barrier of an entry
    registers: tuple[int, int]  # (a consumer's, a producer's)
    buffers: Any = None  # shared memory beside the ring


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static values; `problem` is one over contiguous keys: `over_contiguous_keys`."""

    problem: AttentionProblem
    config: Any  # sm90.Config
    layout: cache_layout.Layout  # addresses of the keys
    queries: Queries  # see the top of this file, as for `producer_of`
    keys_of: Callable[..., "SequenceKeys"]  # `queries.keys_of`, or `contiguous_sm90.keys_of`
    producer_of: Callable[["Plan"], Producer]
    fewest: int = 1  # packed rows of a sequence that the launch serves, at least
    merged: tuple[int, int, int] | None = None  # `DecodeProblem.merged`
    widening: Any = None  # `widening_producer.Widening`, for a quantised cache
    # The dense forward's, or `float8_mainloop.mainloop`.
    mainloop: Callable[..., tuple[OutputSums, Index]] = mainloop
    tree: bool = False  # whether the mask function is a tree of drafts
    score_tiles = ()  # it takes no bias and no mask_array
    skips_keys = False
    last_keys = 0  # no shorter last kv tile, since sequences end anywhere
    one_loop = False  # tiles that need no mask have a loop of their own in the mainloop

    @functools.cached_property
    def producer(self) -> Producer:
        return self.producer_of(self)

    @functools.cached_property
    def buffers(self) -> "PrefillSmem":
        """Shared memory of a block."""
        return self.queries.scratch(self)

    @functools.cached_property
    def tiles(self) -> RowTiles:
        return RowTiles(self.problem.group, self.problem.q_len, self.config.warpgroups)

    @property
    def packed(self) -> bool:
        """Whether sequences have different numbers of query rows."""
        return self.queries.packed

    @functools.cached_property
    def pads_queries(self) -> bool:
        """Whether XLA copies q into as many rows as TMA reads whole."""
        return (
            not self.packed and tma_operands.rows_in_tma(self.problem.q_len) != self.problem.q_len
        )

    @functools.cached_property
    def qk(self) -> OperandFormat:
        return tma_operands.formats_of(self.problem, self.config.block_kv)[0]

    @functools.cached_property
    def q(self) -> OperandFormat:
        """The format in which q arrives, whose dtype the output has."""
        if self.problem.out_dtype is None:
            return self.qk
        as_given = dataclasses.replace(self.problem, dtype=self.problem.result_dtype)
        return tma_operands.formats_of(as_given, self.config.block_kv)[0]

    @functools.cached_property
    def v(self) -> OperandFormat:
        return tma_operands.formats_of(self.problem, self.config.block_kv)[1]

    @functools.cached_property
    def logit_rules(self) -> LogitRules:
        linear = False
        if self.problem.score_program is not None:
            linear = linear_scores.takes(self.problem)
        return LogitRules.of(self.problem, self.config.block_kv, linear=linear)

    @functools.cached_property
    def sections(self) -> frozenset[str]:
        """All that the mask has: lengths are known at run time only."""
        low = {"low"} if self.problem.mask.bounds_left else set()
        return frozenset({"empty", "first_masked", "high"} | low)

    @functools.cached_property
    def row_mapping(self) -> Any:
        """The heads and positions of a tile's rows, for masks and score functions."""
        if not self.problem.functions:
            return self.tiles
        return mask_functions.RowMapping(self.problem, self.tiles, self.packed, self.tree)

    @functools.cached_property
    def units(self) -> int:
        """Work units: a q tile and one split of its keys each. Packed rows have others."""
        problem = self.problem
        return problem.batch * problem.kv_heads * self.tiles.q_tiles * self.config.splits

    @functools.cached_property
    def grid(self) -> int:
        return self.config.grid if self.packed else min(self.config.grid, self.units)

    @functools.cached_property
    def together(self) -> int:
        """Kv heads whose q tiles are taken in turn, of one sequence where rows are packed."""
        heads = self.problem.kv_heads * (1 if self.packed else self.problem.batch)
        return math.gcd(self.config.together, heads)

    @functools.cached_property
    def page_rows(self) -> int:
        """The number of rows of a kv tile that one TMA copy loads."""
        return self.layout.page_rows(self.config.block_kv)

    @functools.cached_property
    def copies(self) -> int:
        """Copies that bring a tile of K, and as many for V."""
        return self.config.block_kv // self.page_rows

    @functools.cached_property
    def result_rows(self) -> int:
        """Query rows of all heads."""
        sequences = 1 if self.packed else self.problem.batch
        return sequences * self.problem.q_len * self.problem.q_heads


class PrefillSmem(NamedTuple):
    """Shared memory; `sm90` says who owns it when."""

    q: SmemRef = None  # [q tiles, ROWS, ..]
    k: SmemRef = None  # [stages, block_kv, ..]
    v: SmemRef = None  # [stages, block_kv, ..]; V^T [stages, .., block_kv] of float8
    out: SmemRef = None  # [warpgroups, ROWS, ..]; None where rows are packed
    lost: SmemRef = None  # int32[warpgroups]: 1 where a page of the unit's sequence is missing
    q_ready: Barrier = None  # one a q tile; None where rows are packed
    ready: Barrier = None  # one an entry of the ring
    free: Barrier = None
    landed: Barrier = None  # the value tile that the length cuts is there
    alternation: Barrier = None  # one a consumer: `flash_fwd.alternation`
    tables: Any = None  # numbers of q tiles of the sequences, where rows are packed
    counted: Barrier = None  # the tables are filled
    producer: Any = None  # buffers of the producer


class PrefillRefs(NamedTuple):
    """Global memory."""

    q: GmemRef  # [M, t, N, H]; packed [tokens, N, H]
    k: tuple[GmemRef, ...] = ()  # in the form of `Layout.view`: of each sequence, or one of all
    v: tuple[GmemRef, ...] = ()
    lengths: GmemRef = None  # int32[M]
    new_lengths: GmemRef = None  # int32[M]: negative where `extend` has not been
    capacities: GmemRef = None  # int32[M], where they differ
    page_table: GmemRef = None
    layer: GmemRef = None  # int32[1]
    sinks: GmemRef = None  # float32[N]
    mask_left: GmemRef = None  # int32[1] if it arrives at run time; [M] for contiguous keys
    mask_right: GmemRef = None
    q_offset: GmemRef = None  # int32[M], for contiguous keys
    q_lengths: GmemRef = None  # int32[M], for contiguous keys
    starts: GmemRef = None  # int32[M + 1], where rows are packed
    rows: GmemRef = None  # int32[tokens]: rows of q that packed rows are copies of
    tables: Any = None  # `Layout.tables` of a quantised cache, in place of k and v
    tile_units: GmemRef = None  # float32[M * K, tiles, 4]: `float8_tiles.Units`
    results: tuple[GmemRef, ...] = ()  # written: out and lse, or partials
    mask_aux: tuple[GmemRef, ...] = ()  # arrays of a function of positions: `functions.flat`
    score_aux: tuple[GmemRef, ...] = ()


def operands(plan: Plan, inputs: DecodeInputs) -> PrefillRefs:
    """Arrays that the kernel reads. q is copied where t is above 8 and no multiple of 8, which
    Mosaic's TMA would clip.
    """
    return PrefillRefs(
        q=tma_operands.for_tma(inputs.q) if plan.pads_queries else inputs.q,
        **plan.producer.operands(plan, inputs),
        lengths=inputs.lengths,
        new_lengths=inputs.new_lengths,
        capacities=plan.layout.capacities_operand(),
        page_table=inputs.page_table,
        layer=cache_layout.scalar_operand(inputs.layer),
        sinks=None if inputs.sinks is None else inputs.sinks.astype(jnp.float32),
        mask_left=cache_layout.scalar_operand(inputs.mask_left),
        mask_right=cache_layout.scalar_operand(inputs.mask_right),
        starts=inputs.starts,
        mask_aux=functions.flat(inputs.mask_aux) if inputs.mask_aux else (),
        score_aux=functions.flat(inputs.score_aux) if inputs.score_aux else (),
        rows=inputs.rows,
    )


def base_scratch(plan: Plan, **buffers: Any) -> PrefillSmem:
    """Shared memory of a block, described once; `buffers`: those of the query rows."""
    config, barrier = plan.config, plgpu.Barrier
    ring = config.stages, config.block_kv
    q = config.q_slots * config.warpgroups, ROWS, plan.q.width
    v = (*ring, plan.v.width)
    if plan.v.transposed:
        v = config.stages, plan.v.width, config.block_kv
    fields = {
        "q": mosaic.swizzled(q, plan.q.dtype, plan.q.swizzle),
        "k": mosaic.swizzled((*ring, plan.qk.width), plan.qk.dtype, plan.qk.swizzle),
        "v": mosaic.swizzled(v, plan.v.dtype, plan.v.swizzle),
        "lost": plgpu.SMEM((config.warpgroups,), jnp.int32),
        "ready": barrier(num_barriers=config.stages, num_arrivals=plan.producer.arrivals),
        "free": barrier(num_barriers=config.stages, num_arrivals=config.warpgroups),
        "landed": barrier(num_barriers=1, num_arrivals=plan.copies),
        "alternation": barrier(num_barriers=config.warpgroups) if config.in_turn else None,
        "producer": plan.producer.buffers,
    }
    return PrefillSmem(**fields, **buffers)


def bytes_of(plan: Plan) -> int:
    """Shared memory of a block."""
    return mosaic.bytes_of(plan.buffers) + BARRIERS + mosaic.REDUCTION_BYTES


def kernel_of(plan: Plan, body: Callable[..., None], results: Sequence[Any]) -> Callable[..., Any]:
    """The launch of `body(refs, *results, smem)` on all blocks."""
    return mosaic.persistent_kernel(
        functools.partial(body, plan=plan),
        "prefill_sm90",
        tuple(results),
        plan.buffers,
        (plan.grid, plan.config.warpgroups + len(plan.producer.programs)),
    )


def partial_types(plan: Plan) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Accumulators, row maxima and row sums in global memory."""
    slots = (plan.config.splits, *plan.queries.partial_tiles(plan), ROWS)
    shapes = ((*slots, plan.v.width), slots, slots)
    return tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
