"""What the backward kernels over kv tiles share: sizes, the schedule of work tiles, operands, the
producer's loop, and where a tile of scores stands.

Tiles of scores have keys as rows and queries as columns, S^T = K Q^T: so P^T comes out of one
matmul in the registers from which the matmul for dV takes its left operand, and dS^T likewise that
for dK.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import functions, softmax, tile_lists, tma_operands
from pallas_attn.kernels.attention import plan as attention_plan
from pallas_attn.kernels.attention.plan import Context, Span
from pallas_attn.kernels.attention.score_mod import Place
from pallas_attn.kernels.flash_bwd import float32 as bwd_float32
from pallas_attn.kernels.flash_fwd import claims, tile_scheduler
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.mma import wgmma
from pallas_attn.masks import Mask

ROWS = attention_plan.ROWS
L2_BYTES = 32 * 2**20  # of what the heads of an L2 group read and add to: a part of L2
WORK_TILE_OVERHEAD = 1.5  # of a work tile, in steps of one query tile


class Refs(NamedTuple):
    """Global memory. None: not in this problem."""

    q: Any
    k: Any
    v: Any
    do: Any
    lse: Any  # [B, N, padded rows]: see `RowStatistics`
    delta: Any  # [B, N, padded rows]
    q_edge: Any  # [B, block_q, N, H]: the query tile that q_lengths cuts, 0 past the length
    do_edge: Any
    k_edge: Any  # [B, block_kv, K, H]: the kv tile that kv_lengths cuts
    v_edge: Any
    q_offset: Any
    q_lengths: Any
    kv_lengths: Any
    mask_left: Any  # int32[B], where the bound arrives at run time
    mask_right: Any
    q_segment_ids: Any
    kv_segment_ids: Any
    segment_spans: Any  # int32[B, 4, kv_tiles]: a Span's fields, in query tiles
    bias: Any
    mask_array: Any
    schedule: Any  # int32[blocks, n]: see `tile_scheduler.assign`
    dq: Any  # float32: what dQ is added to, in the kernel's own layout
    q_positions: Any = None
    units: Any = None  # float32[6, B, K]: see `bwd_float32.Units`; delta is in those of dS
    mask_aux: Any = ()  # see `functions.operands`
    score_aux: Any = ()
    tiles: Any = None  # see `tile_lists.tiles`
    counter: Any = None  # int32[1], written: see `flash_fwd.claims`


class Residuals(NamedTuple):
    """What a backward pass starts from."""

    inputs: AttentionInputs
    out: Any
    lse: Any
    d_out: Any
    d_lse: Any


class RowStatistics(NamedTuple):
    """Two numbers a query row, float32[B, N, rows]: P = exp(S - lse) and dS = P (dP - delta)."""

    lse: Any  # log2 units (natural ones: Plan.natural); inf for a row without a key
    delta: Any  # rowsum(dO * O) - dLSE; 0 where lse is inf


class KeyGradients(NamedTuple):
    """Of the keys of a work tile, or of all: values, accumulators or arrays."""

    dk: Any
    dv: Any


class Gradients(NamedTuple):
    """Accumulators or arrays."""

    dq: Any
    dk: Any
    dv: Any


class Ring(NamedTuple):
    """Stages of shared memory by which tiles get from the producer to the consumers."""

    tiles: Any  # [stages, rows, columns]
    ready: Any  # barriers, one a stage: the tile has arrived
    free: Any  # barriers, one a stage: all consumers have released it
    row_stats: Any = None  # [stages, rows]: a number for each query, which arrives with the tile

    def slot(self, count: Any) -> Any:
        """The stage of tile number `count` of a block."""
        return ring_slot(count, self.tiles.shape[0])

    def acquire(self, count: Any, slot: Any) -> None:
        """The producer waits until tile number `count` may be loaded."""
        wait = functools.partial(plgpu.barrier_wait, self.free.at[slot])
        pl.when(count >= self.tiles.shape[0])(wait)

    def wait(self, slot: Any) -> None:
        plgpu.barrier_wait(self.ready.at[slot])

    def release(self, slot: Any) -> None:
        plgpu.barrier_arrive(self.free.at[slot])


@dataclasses.dataclass(frozen=True)
class Plan(attention_plan.Plan):
    """A problem and a config, and what follows from them, where work tiles are keys."""

    block_kv: int = 2 * ROWS  # keys of a work tile
    knows_lockstep: bool = False  # whether the kernel knows `lockstep`
    l2_bytes = L2_BYTES

    @property
    def kv_tiles(self) -> int:
        return pl.cdiv(self.problem.kv_len, self.block_kv)

    @property
    def q_tiles(self) -> int:
        return pl.cdiv(self.problem.q_len, self.config.block_q)

    @property
    def padded_rows(self) -> int:
        return self.q_tiles * self.config.block_q

    @property
    def k_swizzle(self) -> int:
        return self._swizzle(self.problem.head_dim)

    @property
    def v_swizzle(self) -> int:
        return self._swizzle(self.problem.v_head_dim)

    def _swizzle(self, dim: int) -> int:
        """Matmuls take query tiles by whole swizzles too."""
        whole = tma_operands.swizzle(dim)
        if self.problem.dtype == "float32":
            whole = tma_operands.swizzle_of(2 * tma_operands.width_in_smem(dim, "float32"))
        return min(whole, tma_operands.swizzle_of(2 * self.config.block_q))

    @property
    def padded_keys(self) -> int:
        return self.kv_tiles * self.block_kv

    @property
    def heads(self) -> int:
        return self.problem.batch * self.problem.kv_heads

    @property
    def code_bits(self) -> int:
        return (self.kv_tiles - 1).bit_length()

    @property
    def list_sizes(self) -> tile_lists.Sizes:
        return self.config.block_q, self.block_kv, True, 1

    @property
    def grid(self) -> int:
        return min(self.config.grid or self.work_tiles, self.work_tiles)

    @property
    def l2_heads(self) -> int:
        """Heads whose work tiles are scheduled together: see `attention_plan.Plan.l2_heads`. Here
        they read q and dO, and add to a float32 dq.
        """
        problem, config = self.problem, self.config
        if config.l2_heads:
            return min(config.l2_heads, self.heads)
        blocks = config.grid or 132
        if self.lockstep:  # which reads little at a time: two waves of blocks, down and up again
            fit = max(1, 2 * blocks // self.kv_tiles)
            return pl.cdiv(self.heads, max(1, self.heads // fit))
        if self.has_few_work_tiles:
            # Long ones that begin late, in a later L2 group, leave other blocks idle. About as many
            # as there are blocks at a time.
            fit = 3 * blocks // (4 * self.kv_tiles)
        elif not (problem.mask.bounds_right or self.is_listed):
            fit = blocks // self.kv_tiles
        else:
            limit = self.l2_bytes * (2 if problem.mask.bounds_left else 1)
            fit = max(limit // self.head_bytes, blocks // self.kv_tiles)
        groups = pl.cdiv(self.heads, max(fit, 1))
        return pl.cdiv(self.heads, groups)

    @property
    def head_bytes(self) -> int:
        """Of what the query heads of one kv head read and add to."""
        problem = self.problem
        return problem.q_len * (6 * problem.head_dim + 2 * problem.v_head_dim) * problem.group

    @property
    def has_few_work_tiles(self) -> bool:
        """Whether a block has so few that its idle time at the end depends on the schedule."""
        return self.work_tiles < 4 * (self.config.grid or 132)

    @property
    def is_packed(self) -> bool:
        """Whether the schedule is `tile_scheduler.assign_packed`'s, in no order of heads. Not where
        dQ is added up in global memory: that gains time at the end, but loses L2.
        """
        no_sum = not self.config.fused or self.problem.deterministic
        several = self.grid < self.work_tiles
        return no_sum and self.has_few_work_tiles and not self.config.l2_heads and several

    @property
    def exceeds_l2(self) -> bool:
        """Whether blocks cannot all be busy with heads that stay in L2 together."""
        return self.has_few_work_tiles and self.heads * self.head_bytes > 8 * L2_BYTES

    @property
    def ragged_keys(self) -> bool:
        return self.has("kv_lengths") or self.problem.kv_len % self.block_kv != 0

    @property
    def follows_mask(self) -> bool:
        """Whether the mask alone says which query tiles a work tile meets."""
        return not (self.has("mask_array") or self.has("q_segment_ids") or self.is_listed)

    @property
    def rotates(self) -> bool:
        """Whether the work tiles of a head begin at different query tiles. Where all of them meet
        all query tiles they run at one time, and would add to the same part of dQ.
        """
        return self.problem.mask.is_full and self.follows_mask and not self.has("q_lengths")

    @property
    def work_tiles(self) -> int:
        return self.heads * self.kv_tiles

    @property
    def claims(self) -> bool:
        """Whether blocks claim their work tiles one by one: see `flash_fwd.claims`."""
        return self.knows_claims and self.config.claims and not self.is_listed

    @property
    def first_ranked_head(self) -> int:
        """Where there are segments, the kv head from which on work tiles go by rank: where blocks
        claim them the last one, if it is a small part of all.
        """
        if not self.claims:
            return 0
        return self.heads - 1 if self.heads > 3 else self.heads

    @property
    def chunks(self) -> int:
        """Chunks of a sequence that are batch rows, where a table knows where each begins."""
        return len(self.problem.offsets[0]) if self.problem.offsets else 1

    @property
    def lockstep(self) -> bool:
        """Whether the blocks at work are at the same query tile at one time, so that one of them
        reads from memory what all of them need. They go down from the last query tile to their own
        keys, so that those of the last keys are done first. The work tiles that follow begin at
        their own keys, when the others arrive there, and go up to the last query tile, where all
        are done together. Of a query tile all heads of the group come one after the other.

        In a table alone blocks drift apart, since some are a little slower, and where rows are more
        than L2 holds each reads them from memory again. With `claims` too they do not.
        """
        if not (self.knows_lockstep and self.config.lockstep) or self.chunks > 1:
            return False
        mask = self.problem.mask
        return self.follows_mask and mask.bounds_right and not mask.bounds_left

    @property
    def head_exceeds_l2(self) -> bool:
        """Whether what the query heads of one kv head read and add to is more than L2 holds, in all
        batch rows that share their keys. At half of it a table was as fast.
        """
        return self.head_bytes * self.problem.share > 2 * L2_BYTES

    @functools.cached_property
    def sections(self) -> frozenset[str]:
        """Which sections of a work tile's span of query tiles occur: "low" and "high" need a mask,
        "full" needs none.
        """
        if self.is_listed:
            return frozenset(("full", "high"))
        if self.has("mask_array"):
            return frozenset(("low",))
        offsets = attention_plan.known_offsets(self.problem)
        if not offsets or self.has("q_segment_ids"):
            return frozenset(("low", "full", "high"))
        found: set[str] = set()
        for span in (span for offset in offsets for span in self.static_spans(offset)):
            named = {
                "low": span.lo < span.full_lo,
                "full": span.full_lo < span.full_hi,
                "high": span.full_hi < span.hi,
            }
            found |= {name for name, there in named.items() if there}
        return frozenset(found)

    @property
    def mean_q_rows(self) -> float:
        """Query rows that a work tile meets, on average, by the mask alone."""
        known = self.problem.offsets or ((self.problem.q_offset,),)
        offsets = [offset for each in known for offset in each]
        found = [span for offset in offsets for span in self.static_spans(offset)]
        return self.config.block_q * sum(span.hi - span.lo for span in found) / len(found)

    def static_spans(self, q_offset: int) -> list[Span]:
        """Of each kv tile, without lengths and offsets that are arrays."""
        problem, rows = self.problem, self.padded_rows
        keys = range(0, problem.kv_len, self.block_kv)
        mask = problem.mask.widest
        return [self.q_span(mask, key, q_offset, rows, problem.kv_len) for key in keys]

    def q_span(self, mask: Mask, key: Any, q_offset: Any, q_len: Any, kv_len: Any) -> Span:
        """The query tiles that meet the keys from `key` on, ordered lo <= full_lo <= full_hi <= hi.

        Rows past T carry an lse of inf: the end of the queries needs no mask.
        """
        low, high = (min, max) if isinstance(key, int) else (jnp.minimum, jnp.maximum)
        mask, block_q = self.span_mask(mask).transposed, self.config.block_q
        span = attention_plan.rows_span(mask, key - q_offset, self.block_kv, q_len, block_q)
        live = kv_len > key
        cut = key + self.block_kv > kv_len
        if isinstance(key, int):
            hi = max(span.lo, span.hi) if live else span.lo
            full_lo = hi if cut else low(high(span.full_lo, span.lo), hi)
        else:
            hi = jnp.where(live, jnp.maximum(span.lo, span.hi), span.lo)
            full_lo = jnp.where(cut, hi, low(high(span.full_lo, span.lo), hi))
        return Span(span.lo, full_lo, low(high(span.full_hi, full_lo), hi), hi)


class WorkTile(NamedTuple):
    """The keys of a kv tile, of one kv head, and the query tiles of each of its query heads."""

    batch: Any
    kv_head: Any
    key: Any  # the first of its keys
    q_offset: Any
    q_len: Any  # None: all rows count
    kv_len: Any
    mask: Mask
    span: Span  # of query tiles
    rotation: Any  # at which query tile of the span a head begins
    listed: Any = None  # functions.Listed or Run: query tiles are numbers in a list
    down: Any = None  # from the last query tile to the first; None: from the first to the last

    @property
    def steps(self) -> Any:
        """Query tiles of one head."""
        return self.span.hi - self.span.lo

    def q_tile(self, i: Any) -> Any:
        """The query tile of step i of a head."""
        if self.listed is not None:
            return self.listed.tile(i)
        if self.down is not None:
            return jnp.where(self.down, self.span.hi - 1 - i, self.span.lo + i)
        t = self.span.lo + i + self.rotation
        static = isinstance(self.rotation, int)
        return t if static else jnp.where(t < self.span.hi, t, t - self.steps)


def per_column(numbers: Any, shape: tuple[int, int]) -> Any:
    """One number a column, the same in all rows of a tile."""
    return lax.broadcast_in_dim(numbers, shape, [1])


def ring_slot(count: Any, size: int) -> Any:
    """count modulo size."""
    return count & (size - 1) if size & (size - 1) == 0 else lax.rem(count, jnp.int32(size))


def work_tile(ctx: Context, code: Any) -> WorkTile:
    """The work tile that a number in `schedule` stands for."""
    plan, refs, _ = ctx
    problem = plan.problem
    head = lax.shift_right_logical(code, jnp.int32(plan.code_bits))
    batch = lax.div(head, jnp.int32(problem.kv_heads))
    tile = code & ((1 << plan.code_bits) - 1)
    key = tile * plan.block_kv
    kv_len: Any = problem.kv_len
    if plan.has("kv_lengths"):
        kv_len = refs.kv_lengths[batch]
    q_offset: Any = refs.q_offset[batch] if plan.has("q_offset") else problem.q_offset
    q_len, rows = None, plan.padded_rows
    if plan.has("q_lengths"):
        block = plan.config.block_q
        q_len = refs.q_lengths[batch]
        rows = lax.div(q_len + (block - 1), jnp.int32(block)) * block
    mask = plan.mask_of(refs, batch)
    span = plan.q_span(mask, key, q_offset, rows, kv_len)
    if plan.has("q_segment_ids"):
        span = span.within(Span(*(refs.segment_spans[batch, i, tile] for i in range(4))))
        span = span._replace(hi=jnp.maximum(span.lo, span.hi))
    if plan.has("mask_array"):
        span = span._replace(full_lo=span.hi, full_hi=span.hi)
    kv_head = lax.rem(head, jnp.int32(problem.kv_heads))
    if plan.is_listed:
        listed = functions.Listed.of(refs.tiles, batch, kv_head, tile)
        where = (batch, kv_head, key, q_offset, q_len, kv_len, mask)
        tiles = functions.Run(listed.tile(0)) if plan.lists_are_runs else listed
        return WorkTile(*where, listed.span, 0, tiles)
    rotation: Any = 0
    if plan.rotates:
        rotation = lax.div(tile * plan.q_tiles, jnp.int32(plan.kv_tiles))
    down = None
    if plan.lockstep:
        wave = lax.div(tile * plan.l2_heads, jnp.int32(plan.grid))
        down = lax.rem(wave, jnp.int32(2)) == 0
    where = (batch, kv_head, key, q_offset, q_len, kv_len, mask)
    return WorkTile(*where, span, rotation, down=down)


def step_of(plan: Plan, work: WorkTile, i: Any) -> tuple[Any, Any]:
    """Step i of a work tile: which head of the group, and which of that head's steps."""
    if plan.lockstep:
        group = jnp.int32(plan.problem.group)
        return lax.rem(i, group), lax.div(i, group)
    g = lax.div(i, work.steps)
    return g, i - g * work.steps


def step_after(plan: Plan, work: WorkTile, g: Any, i: Any) -> tuple[Any, Any]:
    """The step that follows step i of head g, as `step_of` has it."""
    group = plan.problem.group
    if group == 1:
        return g, i + 1
    if plan.lockstep:
        over = g + 1 == group
        return jnp.where(over, 0, g + 1), i + over.astype(jnp.int32)
    over = i + 1 == work.steps
    return g + over.astype(jnp.int32), jnp.where(over, 0, i + 1)


def place_of(
    work: WorkTile, head: Any, t: Any, key: Any, block_q: int, layout: Any = mosaic.TILE
) -> Place:
    """Where the tile of logits of keys from `key` on and query tile t stands."""
    where = (work.batch, head, t * block_q, key, work.q_offset, work.kv_len, work.mask)
    return Place(*where, q_axis=1, layout=layout)


@functools.lru_cache(maxsize=64)
def schedule(plan: Plan, offsets: tuple[int, ...] = ()) -> np.ndarray:
    """int32[blocks, n]: for each block how many work tiles it takes, and their codes for
    `work_tile`: by L2 group, then longest first. `offsets`: see `tile_scheduler.table`. Where there
    are segments all cost the same here: see `schedule_by_rank`.
    """
    problem = plan.problem
    costs = np.full((max(1, len(offsets)), plan.kv_tiles), WORK_TILE_OVERHEAD)
    found = plan.static_lists
    if found is not None:
        costs += problem.group * found[..., 0].mean(axis=(0, 1))
    elif plan.is_listed:  # of ranks: see `tile_scheduler.table`
        costs += tile_scheduler.RANK_SPREAD * (1 - np.arange(plan.kv_tiles) / plan.kv_tiles)
    elif not plan.has("q_segment_ids"):
        for n, offset in enumerate(offsets or (problem.q_offset,)):
            costs[n] += [problem.group * (span.hi - span.lo) for span in plan.static_spans(offset)]
    order = np.argsort(-costs.sum(axis=0), kind="stable")
    codes = []
    for first in range(0, plan.heads, plan.l2_heads):
        heads = np.arange(first, min(first + plan.l2_heads, plan.heads))
        codes.append(((heads[None] << plan.code_bits) + order[:, None]).ravel())
    each = [
        tile_scheduler.costs_of(code, plan.code_bits, costs, problem.kv_heads) for code in codes
    ]
    ordered = tile_scheduler.in_order(codes, each, len(costs))
    if plan.claims:
        return _claimed(plan, *ordered)
    assign = tile_scheduler.assign_packed if plan.is_packed else tile_scheduler.assign
    return assign(*ordered, plan.grid)


def _claimed(plan: Plan, tiles: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """int32[1, n]: how many work tiles there are, and their codes in the order in which blocks
    claim them. `tiles`: by L2 group, then longest first; so they remain, but

    - those of packed documents are taken in the order of keys: neighbours meet the same rows.
      The last head's go by rank (`schedule_by_rank`), so that the longest do not begin last;
    - of the chunks of a sequence those come first, head by head, that meet all rows of a chunk:
      they take equally long, and blocks stay at the same rows. Then the others, longest first, of
      as many heads at a time as make two waves of blocks: the last ones are short.
    """
    if plan.has("q_segment_ids"):
        head, tile = np.divmod(np.arange(plan.work_tiles), plan.kv_tiles)
        tiles = (head << plan.code_bits) + tile
    elif plan.chunks > 1:
        head, whole = tiles >> plan.code_bits, costs == costs.max()
        others = int((~whole & (costs > WORK_TILE_OVERHEAD)).sum())
        together = max(2, 2 * plan.grid * plan.heads // max(1, others))
        group = np.where(whole, head - plan.heads, head // together)
        tiles = tiles[np.lexsort((head, -costs, group))]
    return np.append(np.int32(tiles.size), tiles).astype(np.int32)[None]


@functools.lru_cache(maxsize=64)
def dealt(plan: Plan) -> np.ndarray:
    """`schedule` where segments say on the GPU alone how long a work tile is: rank r of a head
    stands for its kv tile with the r-th most query tiles, see `schedule_by_rank`. Heads are dealt
    one after the other, forth and back over the blocks; of two heads that follow each other one
    the other way round, and each pair from another block on: what a block has more than the mean
    of one head it has less of others, whatever the lengths.
    """
    grid, heads = plan.grid, plan.problem.kv_heads
    pairs = max(heads // 2, 1)
    turn, place = np.divmod(np.arange(plan.kv_tiles), grid)
    assigned: list[list[int]] = [[] for _ in range(grid)]
    for first in range(0, plan.heads, plan.l2_heads):
        group = np.arange(first, min(first + plan.l2_heads, plan.heads))
        batch, head = np.divmod(group, heads)
        shift = head // 2 * grid // pairs + batch * grid // (2 * pairs)
        back = (turn[:, None] + group) % 2 == 1
        block = (np.where(back, grid - 1 - place[:, None], place[:, None]) + shift) % grid
        codes = (group << plan.code_bits) + np.arange(plan.kv_tiles)[:, None]
        for n, code in zip(block.ravel().tolist(), codes.ravel().tolist(), strict=True):
            assigned[n].append(code)
    return tile_scheduler.table_of(assigned)


def schedule_by_rank(ctx: Context) -> Any:
    """`dealt`, of the kv tiles themselves; or `schedule`, of the heads that go by rank. Documents
    that are packed repeat: dealt in the order of keys a block would take the same keys of many of
    them, and those with early keys would finish last.
    """
    plan, problem = ctx.plan, ctx.plan.problem
    batch, heads, first = problem.batch, problem.kv_heads, plan.first_ranked_head
    table = jnp.asarray(schedule(plan) if plan.claims else dealt(plan))
    rows = np.arange(batch, dtype=np.int32)[:, None] * heads << plan.code_bits
    of_codes = jax.vmap(jax.vmap(lambda code: work_tile(ctx, code).steps))
    steps = of_codes(jnp.asarray(rows + np.arange(plan.kv_tiles, dtype=np.int32)[None]))
    order = tile_scheduler.longest_first(steps)
    low, head = (1 << plan.code_bits) - 1, table >> plan.code_bits
    codes = (table & ~low) | order[head // heads, table & low]
    codes = jnp.where(head >= first, codes, table) if first else codes
    return jnp.concatenate([table[:, :1], codes[:, 1:]], axis=1)


def needs_mask(plan: Plan, work: WorkTile, t: Any, i: Any) -> Any:
    """Whether query tile t, of step i of a head, needs a mask: True, False, or traced where it
    depends on the tile.
    """
    if plan.is_listed:
        return (i < work.span.full_lo) | (i >= work.span.full_hi)
    if "full" not in plan.sections or len(plan.sections) == 1:
        return "full" not in plan.sections
    return (t < work.span.full_lo) | (t >= work.span.full_hi)


def row_statistics(plan: Plan, rows: int, residuals: Residuals) -> RowStatistics:
    """Of `rows` rows, which are more than there are queries: by XLA, of out, lse and their
    cotangents. A gradient that arrives through the lse adds itself to the gradients of all logits
    of a row alike, by delta.
    """
    inputs, out, lse, d_out, d_lse = residuals
    problem, unit = plan.problem, 1.0 if plan.natural else softmax.to_log2(1.0)
    delta = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1).swapaxes(1, 2) - d_lse
    dead = lse == -jnp.inf
    if inputs.q_lengths is not None:
        row = jnp.arange(problem.q_len, dtype=jnp.int32)
        dead |= row[None, None] >= inputs.q_lengths[:, None, None]
    pad = ((0, 0), (0, 0), (0, rows - problem.q_len))
    lse = jnp.pad(jnp.where(dead, jnp.inf, lse * unit), pad, constant_values=jnp.inf)
    return RowStatistics(lse, jnp.pad(jnp.where(dead, 0.0, delta), pad))


def dsinks(residuals: Residuals, stats: RowStatistics) -> Any:
    """The gradient of the sinks. A sink is one more logit with a probability of its own and no
    value: its dS is P (0 - delta), in every row that sees a key.
    """
    sinks, lse = jnp.asarray(residuals.inputs.sinks), residuals.lse
    delta = stats.delta[:, :, : lse.shape[2]]
    p = jnp.where(lse == -jnp.inf, 0.0, jnp.exp(sinks.astype(jnp.float32)[None, :, None] - lse))
    return -(p * delta).sum(axis=(0, 2)).astype(sinks.dtype)


def operands(plan: Plan, residuals: Residuals, stats: RowStatistics) -> Refs:
    """What a kernel over kv tiles reads, but for dq. Copied where `tma_operands` says it must be;
    bias and mask_array always, transposed, since Mosaic loads no transposed tile.
    """
    problem, config, inputs = plan.problem, plan.config, residuals.inputs
    rows, keys = plan.padded_rows, plan.padded_keys
    fields: dict[str, Any] = {name: getattr(inputs, name) for name in problem.arrays}
    fields |= stats._asdict()
    powers: dict[str, Any] = {}
    if problem.dtype == "float32":
        powers = bwd_float32.powers_of(problem, inputs, residuals.d_out, stats.delta)
        fields["units"] = bwd_float32.units(plan, powers)
        by = wgmma.inverse(jnp.repeat(powers["ds"], problem.group, axis=1))
        fields["delta"] = stats.delta * by[:, :, None]
    for name, x, kind, width in (
        ("q", inputs.q, plan.scores, plan.k_width),
        ("k", inputs.k, plan.scores, plan.k_width),
        ("v", inputs.v, plan.values, plan.v_width),
        ("do", residuals.d_out, plan.values, plan.v_width),
    ):
        fields[name] = tma_operands.stored(x, kind, width, powers.get(name))
    given = tma_operands.over_scores(inputs, rows, keys)
    fields |= {name: array.swapaxes(2, 3) for name, array in given.items()}
    fields |= tma_operands.segment_ids(inputs, rows, keys)
    fields |= functions.operands(inputs) | tile_scheduler.table(schedule, plan, inputs)
    if plan.has("q_segment_ids"):
        sizes = plan.block_kv, config.block_q
        fields["segment_spans"] = plan.segment_spans(inputs, fields, *sizes, of_keys=True)
    for name, lengths, block in (
        ("q", "q_lengths", config.block_q),
        ("do", "q_lengths", config.block_q),
        ("k", "kv_lengths", plan.block_kv),
        ("v", "kv_lengths", plan.block_kv),
    ):
        if plan.has(lengths):
            rows = getattr(inputs, lengths)
            rows = rows[:: problem.share] if lengths == "kv_lengths" else rows
            fields[f"{name}_edge"] = tma_operands.edge(fields[name], rows, block)
    if plan.claims:
        fields["counter"] = claims.counter()
    refs = Refs(**{name: fields.get(name) for name in Refs._fields})
    ranked = plan.has("q_segment_ids") and plan.first_ranked_head < plan.heads
    if ranked and plan.grid < plan.work_tiles:
        refs = refs._replace(schedule=schedule_by_rank(Context(plan, refs)))
    return refs


def limit(problem: AttentionProblem) -> Limit | None:
    """Why the backward kernels cannot take a problem that the forward takes, or None."""
    if "bias" in problem.arrays and (problem.mask_program or problem.score_program):
        return Limit(
            "it makes no gradient of a bias beside functions of positions",
            'say implementation="reference", or read the bias in score_fn, under stop_gradient',
        )
    return None


def ordered_after(refs: Refs, result: Any) -> Refs:
    """Operands that are there when another kernel's result is: each kernel fills the GPU, and the
    interpreter simulates one at a time.
    """
    return refs._replace(delta=lax.optimization_barrier((refs.delta, result))[0])


# ---- the producer -------------------------------------------------------------------------------


def produce(ctx: Context, block_id: Any, load_keys: Callable[[Any, WorkTile], None]) -> None:
    """The producer warpgroup loads the query tiles of every work tile, in order, by the rings
    `smem.q_ring` and `smem.do_ring`. load_keys(n, work) loads the keys of work tile n; it is called
    after the first query tile, since the keys before them are in use for longer.
    """
    plan, refs, smem = ctx
    group = plan.problem.group

    def one_work_tile(n, count, code):
        work = work_tile(ctx, code)

        def step(i, count):
            g, number = step_of(plan, work, i)
            head, t = work.kv_head * group + g, work.q_tile(number)
            slot = smem.q_ring.slot(count)
            for name, ring in (("q", smem.q_ring), ("do", smem.do_ring)):
                ring.acquire(count, slot)
                _load_q_tile(ctx, work, name, ring, slot, head, t)
            pl.when(i == 0)(functools.partial(load_keys, n, work))
            return count + 1

        count = lax.fori_loop(0, group * work.steps, step, count)
        pl.when(work.steps == 0)(functools.partial(load_keys, n, work))
        return count

    each_work_tile(ctx, block_id, one_work_tile, claims.claim)


def each_work_tile(
    ctx: Context,
    block_id: Any,
    one: Callable[[Any, Any, Any], Any],
    claim: Callable[[Context, Any], Any],
) -> None:
    """`one(n, count, code)` for each work tile of a block, which returns `count`, the number of
    steps so far, for the next. Where blocks claim them `claim(ctx, n)` is the code of number n, and
    -1 after the last.
    """
    schedule, none = ctx.refs.schedule, jnp.int32(0)
    if not ctx.plan.claims:

        def listed(n, carry):
            following = schedule[block_id, n + 2]  # read long before it is needed
            return one(n, *carry), following

        lax.fori_loop(0, schedule[block_id, 0], listed, (none, schedule[block_id, 1]))
        return

    def claimed(carry):
        n, count, code = carry
        count = one(n, count, code)
        return n + 1, count, claim(ctx, n + 1)

    start = none, none, claims.first_code(ctx, block_id)
    lax.while_loop(lambda carry: carry[2] >= 0, claimed, start)


def _load_q_tile(
    ctx: Context, work: WorkTile, name: str, ring: Ring, slot: Any, head: Any, t: Any
) -> None:
    """Query tile t of q or dO, and with it the lse or the delta of its rows."""
    block, to, ready = ctx.plan.config.block_q, ring.tiles.at[slot], ring.ready.at[slot]
    ref, stats = getattr(ctx.refs, name), getattr(ctx.refs, {"q": "lse", "do": "delta"}[name])
    some = pl.ds(t * block, ring.row_stats.shape[1])
    plgpu.copy_gmem_to_smem(stats.at[work.batch, head, some], ring.row_stats.at[slot], ready)

    def copy(ref, first):
        columns = mosaic.columns(ref, 0, to.shape[-1], head)
        plgpu.copy_gmem_to_smem(ref.at[work.batch, pl.ds(first, block), head, columns], to, ready)

    if work.q_len is None:
        return copy(ref, t * block)
    cut = (t + 1) * block > work.q_len  # only the last tile may be
    pl.when(cut)(lambda: copy(getattr(ctx.refs, f"{name}_edge"), 0))
    return pl.when(jnp.logical_not(cut))(lambda: copy(ref, t * block))


def kv_row(plan: Plan, position: Any) -> Any:
    """Of k and v, and of their gradients, the row of a work tile's first key."""
    return attention_plan.kv_row(plan.problem, plan.block_kv, position)


def load_kv_tile(ctx: Context, work: WorkTile, name: str, first: int, to: Any, ready: Any) -> None:
    """The keys of k or v from number `first` of a work tile on, as many as `to` has rows."""
    plan, refs, _ = ctx
    batch = attention_plan.kv_batch(plan.problem, work.batch)

    def copy(ref, start):
        rows = pl.ds(start + first, to.shape[0])
        columns = mosaic.columns(ref, 0, to.shape[-1], work.kv_head)
        plgpu.copy_gmem_to_smem(ref.at[batch, rows, work.kv_head, columns], to, ready)

    if not plan.has("kv_lengths"):
        return copy(getattr(refs, name), kv_row(plan, work.key))
    cut = work.key + plan.block_kv > work.kv_len
    pl.when(cut)(lambda: copy(getattr(refs, f"{name}_edge"), 0))
    return pl.when(jnp.logical_not(cut))(lambda: copy(getattr(refs, name), work.key))
