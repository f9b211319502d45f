"""The tile scheduler: which block takes which work tiles, and which kv tiles each of them needs.

A work tile is `QueryTiling.tile_rows` query rows of one head. `schedule` lists for each block the
work tiles that it takes, in order; the list is made before anything runs, so that a block can read
ahead. It needs no counter in global memory, and a block loads the next q tile during this one.
Measured on an H200 it is faster than one block a work tile, which is faster than a persistent block
that takes every 132nd work tile.

Producer and consumers go through their block's work tiles by `StaticList.for_each_tile`. The list
has a number for each work tile, its code, which `work_tile` decodes. `Ranges.of_block` says which
kv tiles the block loads for a work tile, `Ranges.of_rows` which of them a warpgroup's rows need.

Other schedulers, with the same functions: blocks that claim work tiles (`claims`), and in
`flash_fwd/` packed documents (`documents`), lists of kv tiles by a mask function (`listed`), and
keys in the memory of other GPUs (`fetch`).
"""

import dataclasses
import functools
import heapq
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn._call.special import Special
from pallas_attn.kernels.attention import tma_operands
from pallas_attn.kernels.attention.logits import LogitRules
from pallas_attn.kernels.attention.softmax import OutputSums
from pallas_attn.kernels.attention.tiles import (
    ROWS,
    KernelContext,
    QueryRows,
    QueryTiling,
    Span,
    WorkTile,
    heads_in,
    mask_of,
    mask_span,
    sections_of,
    span_mask,
)
from pallas_attn.kernels.attention.tma_operands import OperandFormat
from pallas_attn.kernels.lang.mosaic import MULTIPROCESSORS
from pallas_attn.kernels.lang.types import Carry, Index, KernelConfig, Predicate
from pallas_attn.masks import Mask

chunk_schedules = Special("kernels.attention.chunk_schedules")
list_tables = Special("kernels.attention.list_tables")
tile_lists = Special("kernels.attention.tile_lists")

if TYPE_CHECKING:
    from pallas_attn.kernels.attention.score_tiles import ScoreTiles

L2_BYTES = 32 * 2**20  # bytes of K and V of the heads of an L2 group: a part of L2
RANKED_L2_BYTES = 8 * 2**20  # the same where blocks at work at one time share no K and V
TILE_OVERHEAD = 1.5  # overhead of a work tile, in steps of one kv tile
STEP_OVERHEAD = 3  # parts of a step: n warpgroups with rows take as long as n + 3 of them
Offsets = tuple[int, ...]  # offsets of the batch rows that follow each other, where they are known
MOST_STAGES = 12  # stages of the ring of K and V where work tiles are claimed: see `claims`
Schedule = Callable[["QueryPlan", Offsets], np.ndarray]  # `schedule`
RANK_SPREAD = 8.0  # the cost of the first rank, above the last one's 1


@dataclasses.dataclass(frozen=True)
class Distribution:
    """The work tiles of a launch, and the blocks that take them."""

    heads: int  # query heads of all batch rows
    work_tiles: int
    grid: int  # lists of work tiles: a block takes one, or each of its consumers does
    l2_heads: int  # heads of an L2 group: see `heads_of_l2_group`
    code_bits: int  # low bits of a work tile's code that say which rows; the others: which head
    claims: bool = False  # blocks claim work tiles: see `claims`
    first_ranked_head: int = 0  # the head of documents from which on work tiles go by rank
    lists: int = 1  # lists of a block
    together: int = 1  # heads of a work tile, one a consumer: see `block_tables`

    @classmethod
    def of(
        cls,
        problem: AttentionProblem,
        tiling: QueryTiling,
        blocks: tuple[int, int],
        claims: bool = False,
        lists: int = 1,
    ) -> "Distribution":
        """`blocks`: lists of a Config's grid, 0: one for each work tile, and l2_heads, 0: as many
        as `heads_of_l2_group` says. `lists`: how many a block has.
        """
        (grid, l2_heads), heads = blocks, problem.batch * problem.q_heads
        work_tiles = heads * tiling.q_tiles
        return cls(
            heads,
            work_tiles,
            tma_operands.round_up(min(grid or work_tiles, work_tiles), lists),
            heads_of_l2_group(problem, tiling, grid, l2_heads),
            (tiling.q_tiles - 1).bit_length(),
            claims,
            heads - problem.group if claims else 0,
            lists,
        )


@dataclasses.dataclass(frozen=True)
class QueryPlan:
    """The static values of a kernel whose work tiles are query rows."""

    problem: AttentionProblem
    config: Any  # the kernel's Config
    tiling: QueryTiling
    order: Distribution
    logit_rules: LogitRules
    # The Hopper forward's: its sources of work tiles, the class that decides which kv tiles they
    # need, and the functions of its warpgroups.
    producer_tiles: "WorkTiles | None" = None
    consumer_tiles: "WorkTiles | None" = None
    ranges: "type[Ranges] | None" = None
    produce: "Produce | None" = None
    mainloop: "Mainloop | None" = None
    format: Any = None  # `sm80_common.MmaFormat`, of the portable kernels
    # The arrays (bias, mask_array) that TMA loads by tiles.
    score_tiles: "tuple[ScoreTiles, ...]" = ()
    rows_apart: Any = None  # `batch_rows.RowsApart`, where a work tile is several batch rows
    claimed_order: "Schedule | None" = None  # `claims.schedule`, where blocks claim work tiles
    # `fetch.busy_before`, where blocks first fetch keys of other GPUs.
    busy_before: Any = None
    panels: bool = False  # q, k, v and the output lie in panels: `tma_operands.takes_panels`

    @classmethod
    def of(
        cls,
        problem: AttentionProblem,
        config: KernelConfig,
        blocks: tuple[int, int] = (0, 0),
        span_rows: int = ROWS,
        form: Any = None,
    ) -> "QueryPlan":
        """The plan of a kernel that is not the Hopper forward. `config`: warpgroups and block_kv;
        `blocks`: see `Distribution.of`.
        """
        rows = ROWS * config.warpgroups
        tiling = QueryTiling(problem.q_len, problem.kv_len, rows, config.block_kv, span_rows)
        order = Distribution.of(problem, tiling, blocks)
        exact = problem.dtype == "float32" and problem.precision == "highest"
        natural = problem.op == "flash_backward" and exact
        rules = LogitRules.of(problem, config.block_kv, natural=natural)
        return cls(problem, config, tiling, order, rules, format=form)

    @functools.cached_property
    def qk(self) -> OperandFormat:
        """How q and k lie in shared memory."""
        if self.panels:
            return tma_operands.in_panels(self.problem.dtype, self.problem.head_dim)
        return tma_operands.formats_of(self.problem, self.tiling.block_kv)[0]

    @functools.cached_property
    def v(self) -> OperandFormat:
        if self.panels:
            return tma_operands.in_panels(self.problem.dtype, self.problem.v_head_dim)
        return tma_operands.formats_of(self.problem, self.tiling.block_kv)[1]

    @functools.cached_property
    def value_rows(self) -> int:
        """Rows of a kv tile of v in shared memory: those past `block_kv`, zeros, fill the last
        swizzle of probabilities, by which wgmma takes them.
        """
        return tma_operands.round_up(self.tiling.block_kv, self.v.swizzle // self.v.itemsize)

    @functools.cached_property
    def last_keys(self) -> int:
        """Keys of the last kv tile whose scores are computed. Where S cuts the tile and every row
        needs it, those that exist, in eights: 197 keys in tiles of 64 cost 200, not 256. Else, and
        where this saves less than 4 % of the scores (the loop got up to 5 % slower), a whole tile.
        """
        problem, block = self.problem, self.tiling.block_kv
        programs = problem.mask_program is not None or problem.score_program is not None
        arrays = set(problem.arrays) <= {"sinks", "q_lengths", "q_offset"}
        if not problem.mask.is_full or programs or not arrays or problem.fetches > 1:
            return block
        keys = tma_operands.round_up(problem.kv_len % block or block, 8)
        return keys if 25 * (block - keys) >= self.tiling.padded_keys else block

    @functools.cached_property
    def copies(self) -> tuple[int, int]:
        """Copies by TMA that make a kv tile of k, and one of v."""
        whole = self.value_rows == self.tiling.block_kv
        return self.qk.copies, self.v.copies * (1 if whole else 2)

    @functools.cached_property
    def is_padded(self) -> bool:
        """Whether XLA copies q, k and v into sizes that TMA reads whole."""
        return not tma_operands.is_read_as_it_is(self.problem)

    @functools.cached_property
    def sections(self) -> frozenset[str]:
        """The kinds of spans that occur."""
        find = tile_lists.sections_of if self.is_listed else sections_of
        return frozenset(find(self.problem, self.tiling))

    @functools.cached_property
    def one_loop(self) -> bool:
        """Whether one loop goes over all kv tiles, with a branch for those that need a mask, in
        place of a loop each for masked and unmasked tiles: where run-time values decide which tiles
        need one, in any order. One loop is also half the code to compile. Beside a mask of keys
        loops are faster.
        """
        dynamic = {"q_segment_ids", "mask_array"} & set(self.problem.arrays)
        return bool(dynamic) and not (self.is_listed or self.skips_keys)

    @functools.cached_property
    def skips_keys(self) -> bool:
        """Whether a mask of keys decides which kv tiles are whole: see `key_masks`."""
        return self.problem.masks_keys and not (self.is_listed or self.has("q_segment_ids"))

    @functools.cached_property
    def is_listed(self) -> bool:
        """Whether kv tiles are numbers in a list: see `listed`."""
        return self.problem.mask_program is not None

    @functools.cached_property
    def heads(self) -> int:
        return self.order.heads

    @functools.cached_property
    def code_bits(self) -> int:
        return self.order.code_bits

    def span(self, mask: Mask, position: Index, rows: Index, kv_len: Index) -> Span:
        """The kv tiles that query rows from a position on need."""
        mask = span_mask(self.problem, mask)
        return mask_span(mask, position, rows, kv_len, self.tiling.block_kv)

    def has(self, name: str) -> bool:
        """Whether the problem has an optional array."""
        return name in self.problem.arrays


def heads_of_l2_group(
    problem: AttentionProblem, tiling: QueryTiling, grid: int, wanted: int
) -> int:
    """Heads whose work tiles are taken together. Where all tiles cost the same, as many as fill the
    blocks once: those read the same keys at the same time. Else as many as keep their K and V in
    L2, twice as many where rows see a part of them, in groups of one size: a short last one would
    begin with long tiles again. Work tiles in order of rank share no K and V with their neighbours,
    so there L2 holds fewer heads. `wanted`: by a Config; 0: it does not say.

    K and V that come from L2 save energy too, and an H200 at its power limit then runs at a
    higher clock.
    """
    heads, listed = problem.batch * problem.q_heads, problem.mask_program is not None
    qk, v = tma_operands.formats_of(problem, tiling.block_kv)
    row = problem.head_dim * qk.terms * qk.itemsize + problem.v_head_dim * v.terms * v.itemsize
    if "q_segment_ids" in problem.arrays or (listed and _lists(problem, tiling) is None):
        fit = heads_in(RANKED_L2_BYTES, problem, row)
    elif wanted:
        return min(wanted, heads)
    elif not (problem.mask.bounds_right or listed):
        fit = (grid or MULTIPROCESSORS) // tiling.q_tiles
    else:
        in_part = problem.mask.bounds_left or listed
        fit = heads_in(L2_BYTES * (2 if in_part else 1), problem, row)
    groups = pl.cdiv(heads, max(fit, problem.group))
    return pl.cdiv(heads, groups)


def _lists(problem: AttentionProblem, tiling: QueryTiling) -> np.ndarray | None:
    return tile_lists.static(problem, *tiling.list_sizes)


# ---- the list of a block, and the walk over it --------------------------------------------------


class Turn(NamedTuple):
    """A work tile that a block takes, and the next one."""

    index: Index  # work tiles that the block took before
    code: Index  # which it is, for `work_tile`
    following: Index  # the code of the next one; any code if there is none
    has_next: Callable[[], Predicate]  # computed where it is asked, not held in a register
    # Claims the next one among the entries of this one, where blocks do (`claims.Claiming`):
    # `claim_next(number of the entry, code)`, and any code to begin with.
    claim_next: Callable[[Index, Index], Index] | None = None
    claim: Any = None


# Loads K and V of all work tiles of a block: `warpgroups.produce`, or another file's.
Produce = Callable[[KernelContext, Index], None]
Meanwhile = Callable[[], None] | None  # further work during a matmul
# All kv tiles of a consumer's rows: `warpgroups.mainloop`, or another file's.
Mainloop = Callable[[KernelContext, QueryRows, Index, Meanwhile], tuple[OutputSums, Index]]


class Start(NamedTuple):
    """The facts read of a block's work tiles before the first."""

    count: Index
    codes: tuple[Index, ...]


class WorkTiles(Protocol):
    """Hands out the work tiles of a block: StaticList, or `Claiming` and `Claimed` of `claims`."""

    def start(self, ctx: KernelContext, block: Index) -> Start: ...

    def for_each_tile(
        self,
        ctx: KernelContext,
        block: Index,
        start: Start,
        body: Callable[[Turn, Any], Any],
        carry: Carry,
    ) -> None:
        """carry = body(turn, carry) for each work tile of a block."""


@dataclasses.dataclass(frozen=True)
class StaticList:
    """Hands out the work tiles that `schedule` lists for a block. `ahead`: codes that are read
    before a turn; one more is read in it.
    """

    ahead: int

    def start(self, ctx: KernelContext, block: Index) -> Start:
        schedule = ctx.refs.schedule
        count, *codes = [schedule[block, n] for n in range(1 + self.ahead)]
        return Start(count, tuple(codes))

    def for_each_tile(
        self,
        ctx: KernelContext,
        block: Index,
        start: Start,
        body: Callable[[Turn, Any], Any],
        carry: Carry,
    ) -> None:
        def one_tile(i: Index, state: Carry) -> Any:
            carry, codes = state
            # Read long before it is used.
            codes = (*codes, ctx.refs.schedule[block, i + 1 + self.ahead])
            carry = body(Turn(i, codes[0], codes[1], lambda: i + 1 < start.count), carry)
            return carry, codes[1:]

        lax.fori_loop(0, start.count, one_tile, (carry, start.codes))


# ---- which block takes which work tiles ---------------------------------------------------------


@functools.lru_cache(maxsize=64)
def schedule(plan: QueryPlan, offsets: Offsets = ()) -> np.ndarray:
    """int32[blocks, n]: for each block how many work tiles it takes, and their codes for
    `work_tile`; see `assign`. Work tiles are ordered by L2 group of heads, then by rows, then by
    head. Lengths, offsets and bounds that are arrays are not known here: the costs are those of
    none, or of `offsets` (see `chunk_schedules`). Where documents, or lists that are not known yet,
    decide the costs, codes have ranks in place of rows.
    """
    problem, order, tiling = plan.problem, plan.order, plan.tiling
    if plan.claimed_order is not None:
        return plan.claimed_order(plan, offsets)
    q_tiles = np.arange(tiling.q_tiles)
    if problem.mask_program is not None:
        costs = list_costs(plan)[None]
        q_tiles = np.argsort(-costs[0], kind="stable")
    elif "q_segment_ids" in problem.arrays:
        costs = rank_costs(tiling.q_tiles)[None]
    else:
        costs = mask_costs(plan, offsets)
        if problem.mask.bounds_right:
            q_tiles = q_tiles[::-1]  # the last rows see most
    groups = range(0, order.heads, order.l2_heads)
    heads = [np.arange(n, min(n + order.l2_heads, order.heads), order.together) for n in groups]
    codes = [codes_of(plan, some, q_tiles) for some in heads]
    costs_of_codes = [costs_of(code, order.code_bits, costs, problem.q_heads) for code in codes]
    if len(costs) == 1 and plan.busy_before is None:
        return assign(np.concatenate(codes), np.concatenate(costs_of_codes), order.grid)
    # Batch rows of several kinds: the last work tiles are not the cheap ones, and blocks exchange
    # some at the end. Blocks that fetch keys of other GPUs before are busy so long.
    tiles, tile_costs = chunk_schedules.join_groups(codes, costs_of_codes, len(costs))
    known, busy = problem.offsets, ()
    if plan.busy_before is not None:
        busy = plan.busy_before(plan, known.index(offsets) if offsets in known else 0)
    numbers, ends = assigned(tile_costs, order.grid, busy)
    if len(costs) > 1:
        chunk_schedules.rebalance(numbers, tile_costs, ends)
    return table_of([tiles[block].tolist() for block in numbers])


def codes_of(plan: QueryPlan, heads: np.ndarray, q_tiles: np.ndarray) -> np.ndarray:
    """Codes of the work tiles of some heads in the order of `q_tiles`, those of the same rows side
    by side.
    """
    return ((heads[None] << plan.order.code_bits) + q_tiles[:, None]).ravel()


def mask_costs(plan: QueryPlan, offsets: Offsets) -> np.ndarray:
    """[kinds, q_tiles]: the cost of work tiles in steps of one kv tile, by the mask; a kind of
    batch rows for each of `offsets`, or one.
    """
    problem, tiling = plan.problem, plan.tiling
    costs = np.full((max(1, len(offsets)), tiling.q_tiles), TILE_OVERHEAD)
    for n, offset in enumerate(offsets or (problem.q_offset,)):
        for tile in range(tiling.q_tiles):
            span = static_span(plan, offset, tile)
            costs[n, tile] += max(span.hi - span.lo, 0) * step_cost(plan, tile)
    return costs


def static_span(plan: QueryPlan, offset: int, tile: int) -> Span:
    """The span of a work tile's rows, without what arrives at run time."""
    problem, tiling = plan.problem, plan.tiling
    position, rows = offset + tile * tiling.tile_rows, tiling.tile_rows
    return plan.span(problem.mask.widest, position, rows, problem.kv_len)


def step_cost(plan: QueryPlan, tile: int) -> float:
    """The cost of one kv tile of a work tile: 1, or less of the last one, if it has idle
    warpgroups.
    """
    tiling = plan.tiling
    most = busy = tiling.tile_rows // ROWS
    if tile == tiling.q_tiles - 1:
        rows = tiling.q_len - tile * tiling.tile_rows
        busy = pl.cdiv(rows, ROWS)
    return (busy + STEP_OVERHEAD) / (most + STEP_OVERHEAD)


def list_costs(plan: QueryPlan) -> np.ndarray:
    """The cost of each work tile of a head by its list of kv tiles where it is known, else of
    ranks.
    """
    lists = _lists(plan.problem, plan.tiling)
    if lists is None:
        return rank_costs(plan.tiling.q_tiles)
    return TILE_OVERHEAD + lists[..., 0].mean(axis=(0, 1))


def rank_costs(tiles: int) -> np.ndarray:
    """Costs by rank of work tiles whose costs are known at run time only."""
    return 1 + RANK_SPREAD * (1 - np.arange(tiles) / tiles)


def rounds(problem: AttentionProblem, rows: int) -> float:
    """The work of the busiest block, in work tiles of `rows` query rows like the longest of them.
    Of equal ones it is a whole number; where a mask makes some short, blocks end together.
    """
    heads, mask = problem.batch * problem.q_heads, problem.mask.widest
    offset, keys = problem.q_offset, problem.kv_len
    spans = [
        mask.kv_range(offset + n, offset + n + rows, keys)
        for n in range(0, max(problem.q_len, 1), rows)
    ]
    steps = sorted([max(0, int(hi) - int(lo)) for lo, hi in spans], reverse=True)
    # One of n blocks takes m + 1 of the m n + 1 longest work tiles, none shorter than the last.
    taken = range(0, heads * len(steps), MULTIPROCESSORS)
    busiest = max([(n + 1) * steps[at // heads] for n, at in enumerate(taken)], default=0)
    longest = max(*steps, 1)
    return max(1.0, busiest / longest, heads * sum(steps) / (MULTIPROCESSORS * longest))


def costs_of(codes: np.ndarray, bits: int, costs: np.ndarray, heads: int) -> np.ndarray:
    """The costs of work tiles by their codes, from costs [n, tiles] of batch rows that repeat after
    n.
    """
    return costs[(codes >> bits) // heads % len(costs), codes & ((1 << bits) - 1)]


def assign(tiles: np.ndarray, costs: np.ndarray, blocks: int) -> np.ndarray:
    """Work tiles, in the order in which they should begin, each given to the block that is free
    first: `table_of` what each block takes.
    """
    return table_of([tiles[numbers].tolist() for numbers in assigned(costs, blocks)[0]])


def assigned(
    costs: np.ndarray, blocks: int, busy: Sequence[float] = ()
) -> tuple[list[list[int]], dict[int, float]]:
    """The numbers of the work tiles that each block takes, and when each is done. `busy`: how long
    the first blocks are before.
    """
    numbers: list[list[int]] = [[] for _ in range(blocks)]
    free = [(0.0, block) for block in range(len(busy), blocks)]
    free += [(when, block) for block, when in enumerate(busy)]
    heapq.heapify(free)
    for number, cost in enumerate(costs.tolist()):
        when, block = free[0]
        numbers[block].append(number)
        heapq.heapreplace(free, (when + cost, block))
    return numbers, {block: when for when, block in free}


def table_of(codes: list[list[int]]) -> np.ndarray:
    """int32[blocks, n]: how many, which, and zeros, two at least, so that a block may read
    ahead.
    """
    table = np.zeros((len(codes), 3 + max(map(len, codes))), np.int32)
    for row, block in zip(table, codes, strict=True):
        row[: len(block) + 1] = [len(block), *block]
    return table


def table(
    make: Callable[[Any, Offsets], np.ndarray], plan: Any, inputs: AttentionInputs
) -> dict[str, Any]:
    """The operands that assign work tiles to blocks: "schedule", the int32 table `make(plan,
    offsets)` for the offset of the problem; and for a mask function "tiles", the lists of kv tiles
    that it leaves.
    """
    fields: dict[str, Any] = {}
    if plan.problem.mask_program is not None:
        fields = list_tables.tables(make, plan, inputs)
    if "schedule" in fields:  # made from lists that are known at run time
        return fields
    if inputs.q_offset is None or not plan.problem.offsets:
        return fields | {"schedule": jnp.asarray(make(plan, ()))}
    return fields | {"schedule": chunk_schedules.nearest(make, plan, inputs.q_offset)}


def operands(plan: QueryPlan, inputs: AttentionInputs) -> dict[str, Any]:
    """Operands of a kernel whose work tiles are query rows, by tiles: bias, mask_array, segment ids
    in whole tiles, and those of `table`.
    """
    fields = table(schedule, plan, inputs)
    if tma_operands.IN_WHOLE_TILES & set(plan.problem.arrays):
        sizes = plan.tiling.padded_rows, plan.tiling.padded_keys
        in_tiles = {array.name for array in plan.score_tiles}
        fields |= tma_operands.bias_and_mask(inputs, *sizes, in_tiles, only_read=True)
        fields |= tma_operands.segment_ids(inputs, *sizes)
    return fields


# ---- a work tile, its rows, and the kv tiles that they need --------------------------------------


def work_tile(ctx: KernelContext, code: Index) -> WorkTile:
    """The work tile that a code of `schedule` stands for."""
    plan, refs, _ = ctx
    problem, bits = plan.problem, plan.order.code_bits
    arrays, head = problem.arrays, lax.shift_right_logical(code, jnp.int32(bits))
    batch = lax.div(head, jnp.int32(problem.q_heads))
    kv_len: Any = refs.kv_lengths[batch] if "kv_lengths" in arrays else problem.kv_len
    return WorkTile(
        batch=batch,
        head=lax.rem(head, jnp.int32(problem.q_heads)),
        row=(code & ((1 << bits) - 1)) * plan.tiling.tile_rows,
        q_offset=refs.q_offset[batch] if "q_offset" in arrays else problem.q_offset,
        q_len=refs.q_lengths[batch] if "q_lengths" in arrays else None,
        kv_len=kv_len,
        mask=mask_of(problem, refs, batch),
    )


def span_of_rows(
    plan: QueryPlan,
    tile: WorkTile,
    wg: Index,
    read: Callable[[Index], Index] | None = None,
    visible: Span | None = None,
) -> Span:
    """The kv tiles of a warpgroup's rows; lo == hi == 0 where there is none. `read`: reads a field
    of the work tile's record, where segment ids leave less (`documents`); `visible`: what a mask of
    keys leaves (`key_masks`).
    """
    tiling, rows, idle = plan.tiling, ROWS, False  # type: tuple[QueryTiling, Index, Predicate]
    row = tile.row + wg * ROWS
    if tiling.has_idle_spans:  # rows past T only: as the last one, and of one kv tile
        idle = row >= tiling.q_len
        row, rows = jnp.where(idle, tiling.q_len - 1, row), jnp.where(idle, 1, ROWS)
    if tile.q_len is not None:
        rows = jnp.minimum(rows, tile.q_len - row)
    span = plan.span(tile.mask, tile.q_offset + row, rows, tile.kv_len)
    if read is not None:  # rows past T have the last one's id
        span = span.within(Span(*(read(4 * wg + i) for i in range(4))))
    if visible is not None:
        span = span.within(visible)
    elif "mask_array" in plan.problem.arrays:
        span = span._replace(full_hi=span.full_lo)
    if tiling.has_idle_spans:
        span = span._replace(lo=jnp.where(idle, jnp.maximum(span.hi - 1, span.lo), span.lo))
    return empty_as_zero(tile, rows, span) if "empty" in plan.sections else span


def empty_as_zero(tile: WorkTile, rows: Index, span: Span) -> Span:
    """A span of some rows of a work tile, lo == hi == 0 where there are no such keys or rows."""
    none = span.hi <= span.lo
    if tile.q_len is not None:
        none = none | (rows <= 0)
    return span._replace(lo=jnp.where(none, 0, span.lo), hi=jnp.where(none, 0, span.hi))


def union_of(plan: QueryPlan, spans: Sequence[Span]) -> tuple[Index, Index]:
    """Kv tiles [lo, hi) that the rows of some warpgroup need."""
    if "empty" in plan.sections:
        lo, hi = ends_of_some(spans)
        return jnp.minimum(lo, hi), hi
    lo = functools.reduce(jnp.minimum, [span.lo for span in spans])
    return lo, functools.reduce(jnp.maximum, [span.hi for span in spans])


def ends_of_some(spans: Sequence[Span]) -> tuple[Index, Index]:
    """The first kv tile of spans that have one, and the end of all."""
    lows = [jnp.where(span.hi > span.lo, span.lo, 2**30) for span in spans]
    hi = functools.reduce(jnp.maximum, [span.hi for span in spans])
    return functools.reduce(jnp.minimum, lows), hi


class Ranges:
    """The kv tiles of work tiles where the mask and lengths alone decide. Subclasses with the same
    functions are in `documents`, `listed` and `key_mask_ranges`.
    """

    @staticmethod
    def never_empty(problem: AttentionProblem) -> bool:
        """Whether rows without a key take one kv tile all the same, masked whole."""
        del problem
        return False

    @staticmethod
    def read_for_block(ctx: KernelContext, code: Index) -> Any:
        """Read by the producer a work tile ahead: a record that decides the range; here none."""
        del ctx, code

    @staticmethod
    def read_for_rows(ctx: KernelContext, code: Index, wg: Index) -> Any:
        """Read by a consumer a work tile ahead: here nothing."""
        del ctx, code, wg

    @staticmethod
    def of_block(ctx: KernelContext, tile: WorkTile, record: Any) -> tuple[Index, Index]:
        """Kv tiles [lo, hi) that the block loads."""
        del record
        plan = ctx.plan
        spans = [span_of_rows(plan, tile, wg) for wg in range(plan.config.warpgroups)]
        return union_of(plan, spans)

    @staticmethod
    def of_rows(
        ctx: KernelContext, tile: WorkTile, wg: Index, q_slot: Index, record: Any
    ) -> tuple[tuple[Index, Index], QueryRows]:
        """`of_block`, and a warpgroup's rows with the kv tiles that they need."""
        block_range = Ranges.of_block(ctx, tile, record)
        span = span_of_rows(ctx.plan, tile, wg)
        return block_range, QueryRows(tile, tile.row + wg * ROWS, wg, span, q_slot)
