"""Tiles of keys and of queries, and the order in which blocks take work tiles of keys: by L2 group
of kv heads, in a table that is made before anything runs, or claimed one by one
(`attention/claims.py`). Where there are segment ids only the GPU knows how many query tiles a work
tile meets: it makes the table (`key_tiles.schedule_by_rank`).

Blocks in lockstep are at the same query tile at one time, so that one of them reads from memory
what all of them need. They go down from the last query tile to their own keys, so that those of the
last keys are done first. The work tiles that follow begin at their own keys, when the others arrive
there, and go up to the last query tile, where all are done together (`key_tiles.DownOrUp`). At a
query tile all heads of the group come one after the other (`key_tiles.step_of`).

In a table alone blocks drift apart, since some are a little slower, and where rows are more than L2
holds each reads them from memory again. With claims too they do not. Forward and backward of two
batch rows of 8192, 32:8 heads of 128 (Llama 3), causal, on an H200: 670 TFLOP/s, 600 without.
"""

import dataclasses
import functools

import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np

from pallas_attn._call.problem import AttentionProblem
from pallas_attn.kernels.attention import chunk_schedules, tile_lists, tile_scheduler
from pallas_attn.kernels.attention.tile_scheduler import L2_BYTES, TILE_OVERHEAD
from pallas_attn.kernels.attention.tiles import Span, known_offsets, mask_span, span_mask
from pallas_attn.kernels.lang.mosaic import MULTIPROCESSORS
from pallas_attn.kernels.lang.types import Index
from pallas_attn.masks import Mask


@dataclasses.dataclass(frozen=True)
class KeyTiling:
    """Kv tiles, which are work tiles here, and the query tiles that meet them."""

    problem: AttentionProblem
    block_kv: int  # keys of a work tile
    block_q: int  # query rows of a step

    @property
    def kv_tiles(self) -> int:
        return pl.cdiv(self.problem.kv_len, self.block_kv)

    @property
    def q_tiles(self) -> int:
        return pl.cdiv(self.problem.q_len, self.block_q)

    @property
    def padded_rows(self) -> int:
        return self.q_tiles * self.block_q

    @property
    def padded_keys(self) -> int:
        return self.kv_tiles * self.block_kv

    @property
    def code_bits(self) -> int:
        """Low bits of a work tile's code, which say which keys; the others say which kv head."""
        return (self.kv_tiles - 1).bit_length()

    @property
    def is_listed(self) -> bool:
        """Whether query tiles are numbers in a list: see `tile_lists.tiles`."""
        return self.problem.mask_program is not None

    @property
    def list_sizes(self) -> tile_lists.Sizes:
        return self.block_q, self.block_kv, True, 1

    @property
    def follows_mask(self) -> bool:
        """Whether the mask alone says which query tiles a work tile meets."""
        return not ({"mask_array", "q_segment_ids"} & set(self.problem.arrays) or self.is_listed)

    @property
    def allows_lockstep(self) -> bool:
        """Whether blocks can stay in lockstep: work tiles end at the last query."""
        mask = self.problem.mask
        one_sided = mask.bounds_right and not mask.bounds_left
        return self.chunks == 1 and self.follows_mask and one_sided

    @property
    def reads_key_mask(self) -> bool:
        """Whether a mask of keys says which work tiles are hidden or whole: see `key_masks`."""
        problem = self.problem
        mixed = self.is_listed or "q_segment_ids" in problem.arrays
        of_all_heads = problem.mask_shape is not None and problem.mask_shape[1] == 1
        return problem.masks_keys and of_all_heads and not mixed

    @property
    def rotates(self) -> bool:
        """Whether the work tiles of a head begin at different query tiles. Where all of them meet
        all query tiles they run at one time, and would add to the same part of dQ.
        """
        has_lengths = "q_lengths" in self.problem.arrays
        return self.problem.mask.is_full and self.follows_mask and not has_lengths

    @property
    def chunks(self) -> int:
        """Chunks of a sequence that are batch rows, where a table knows where each begins."""
        return len(self.problem.offsets[0]) if self.problem.offsets else 1

    @functools.cached_property
    def sections(self) -> frozenset[str]:
        """The sections of spans of query tiles that occur where these are not listed: "low" and
        "high" need a mask, "full" needs none.
        """
        arrays = self.problem.arrays
        if "mask_array" in arrays and not self.reads_key_mask:
            return frozenset(("low",))
        offsets = known_offsets(self.problem)
        if not offsets or "q_segment_ids" in arrays:
            return frozenset(("low", "full", "high"))
        names: set[str] = set()
        for span in [span for offset in offsets for span in self.static_spans(offset)]:
            occurs = {
                "low": span.lo < span.full_lo,
                "full": span.full_lo < span.full_hi,
                "high": span.full_hi < span.hi,
            }
            names |= {name for name, does in occurs.items() if does}
        return frozenset(names)

    @property
    def mean_q_rows(self) -> float:
        """Query rows that a work tile meets, on average, by the mask alone."""
        known = self.problem.offsets or ((self.problem.q_offset,),)
        spans = [span for each in known for offset in each for span in self.static_spans(offset)]
        return self.block_q * sum(span.hi - span.lo for span in spans) / len(spans)

    def static_spans(self, q_offset: int) -> list[Span]:
        """The query tiles of each kv tile, without lengths and offsets that are arrays."""
        problem, rows = self.problem, self.padded_rows
        keys = range(0, problem.kv_len, self.block_kv)
        mask = problem.mask.widest
        return [self.q_span(mask, key, q_offset, rows, problem.kv_len) for key in keys]

    def q_span(self, mask: Mask, key: Index, q_offset: Index, q_len: Index, kv_len: Index) -> Span:
        """The query tiles that meet the keys from `key` on, ordered lo <= full_lo <= full_hi <= hi.

        Rows past T carry an lse of inf: the end of the queries needs no mask.
        """
        low, high = (min, max) if isinstance(key, int) else (jnp.minimum, jnp.maximum)
        mask = span_mask(self.problem, mask).transposed
        span = mask_span(mask, key - q_offset, self.block_kv, q_len, self.block_q)
        live = kv_len > key
        cut = key + self.block_kv > kv_len
        if isinstance(key, int):
            hi = max(span.lo, span.hi) if live else span.lo
            full_lo = hi if cut else low(high(span.full_lo, span.lo), hi)
        else:
            hi = jnp.where(live, jnp.maximum(span.lo, span.hi), span.lo)
            full_lo = jnp.where(cut, hi, low(high(span.full_lo, span.lo), hi))
        return Span(span.lo, full_lo, low(high(span.full_hi, full_lo), hi), hi)


@dataclasses.dataclass(frozen=True)
class WorkOrder:
    """The distribution of work tiles over blocks."""

    tiling: KeyTiling
    blocks: int = 0  # at most; 0: one a work tile
    heads_together: int = 0  # `l2_heads`; 0: chosen
    lockstep: bool = False
    claims: bool = False  # blocks claim work tiles
    turns: bool = False  # kv tiles add to dQ in one order: see `turns`
    parts: int = 1  # into which the steps of a work tile are divided: see `step_parts`
    l2_bytes: int = L2_BYTES

    @property
    def problem(self) -> AttentionProblem:
        return self.tiling.problem

    @property
    def code_bits(self) -> int:
        return self.tiling.code_bits

    @property
    def kv_heads(self) -> int:
        """Kv heads of all batch rows."""
        return self.problem.batch * self.problem.kv_heads

    @property
    def heads(self) -> int:
        """Kv heads of all batch rows, each once for each part of its work tiles: parts of a work
        tile are work tiles of their own here.
        """
        return self.kv_heads * self.parts

    @property
    def work_tiles(self) -> int:
        return self.heads * self.tiling.kv_tiles

    @property
    def grid(self) -> int:
        """Blocks that are launched."""
        return min(self.blocks or self.work_tiles, self.work_tiles)

    @property
    def l2_heads(self) -> int:
        """Kv heads of an L2 group, whose work tiles are taken together: L2 holds the rows of q and
        dO that these read, and the float32 dq that they add to.
        """
        mask, blocks = self.problem.mask, self.blocks or MULTIPROCESSORS
        if self.heads_together:
            return min(self.heads_together, self.heads)
        if self.parts > 1:  # work tiles are few: blocks take parts of all of them at one time
            return self.heads
        if self.lockstep:
            # Heads for two waves of blocks, down and up again; in turns twice as many.
            fit = max(1, 2 * blocks // self.tiling.kv_tiles)
            heads = pl.cdiv(self.heads, max(1, self.heads // fit))
            return min(2 * heads, self.heads) if self.turns else heads
        if self.has_few_work_tiles:
            # Long ones that begin late, in a later L2 group, leave other blocks idle. About as many
            # as there are blocks at a time.
            fit = 3 * blocks // (4 * self.tiling.kv_tiles)
        elif not (mask.bounds_right or self.tiling.is_listed):
            fit = blocks // self.tiling.kv_tiles
        else:
            limit = self.l2_bytes * (2 if mask.bounds_left else 1)
            fit = max(limit // self.head_bytes, blocks // self.tiling.kv_tiles)
        groups = pl.cdiv(self.heads, max(fit, 1))
        return pl.cdiv(self.heads, groups)

    @property
    def head_bytes(self) -> int:
        """Bytes that the query heads of one kv head read and add to."""
        problem = self.problem
        return problem.q_len * (6 * problem.head_dim + 2 * problem.v_head_dim) * problem.group

    @property
    def has_few_work_tiles(self) -> bool:
        """Whether a block has so few that its idle time at the end depends on the schedule."""
        return self.work_tiles < 4 * (self.blocks or MULTIPROCESSORS)

    @property
    def exceeds_l2(self) -> bool:
        """Whether blocks cannot all be busy with heads that stay in L2 together."""
        return self.has_few_work_tiles and self.kv_heads * self.head_bytes > 8 * L2_BYTES

    @property
    def head_exceeds_l2(self) -> bool:
        """Whether what the query heads of one kv head read and add to is more than L2 holds, in all
        batch rows that share their keys. At half of it a table was as fast.
        """
        return self.head_bytes * self.problem.share > 2 * L2_BYTES

    @property
    def first_ranked_head(self) -> int:
        """The kv head from which on work tiles of documents go by rank: where blocks claim them the
        last one, if it is a small part of all.
        """
        if not self.claims:
            return 0
        return self.heads - 1 if self.heads > 3 else self.heads


@functools.lru_cache(maxsize=64)
def schedule(order: WorkOrder, offsets: tuple[int, ...] = ()) -> np.ndarray:
    """int32[blocks, n]: for each block how many work tiles it takes, and their codes for
    `key_tiles.key_tile`: by L2 group, then longest first; one row where blocks claim them.
    `offsets`: see `tile_scheduler.table`. Where there are segments all cost the same here: see
    `key_tiles.schedule_by_rank`.
    """
    tiles, costs = in_order(order, offsets)
    if order.claims:
        return _claimed(order, tiles, costs)
    return tile_scheduler.assign(tiles, costs, order.grid)


def in_order(order: WorkOrder, offsets: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The codes of work tiles as blocks should begin them, and their costs in steps."""
    problem, tiling = order.problem, order.tiling
    costs = np.full((max(1, len(offsets)), tiling.kv_tiles), TILE_OVERHEAD)
    lists, steps = tile_lists.static(problem, *tiling.list_sizes), problem.group / order.parts
    if lists is not None:
        costs += steps * lists[..., 0].mean(axis=(0, 1))
    elif tiling.is_listed:  # the costs of ranks: see `tile_scheduler.table`
        costs += tile_scheduler.rank_costs(tiling.kv_tiles) - 1
    elif "q_segment_ids" not in problem.arrays:
        for n, offset in enumerate(offsets or (problem.q_offset,)):
            spans = tiling.static_spans(offset)
            costs[n] += [steps * (span.hi - span.lo) for span in spans]
    longest_first = np.argsort(-costs.sum(axis=0), kind="stable")
    codes = []
    for first in range(0, order.heads, order.l2_heads):
        heads = np.arange(first, min(first + order.l2_heads, order.heads))
        codes.append(((heads[None] << tiling.code_bits) + longest_first[:, None]).ravel())
    in_row = order.heads // problem.batch
    each = [tile_scheduler.costs_of(code, tiling.code_bits, costs, in_row) for code in codes]
    return chunk_schedules.join_groups(codes, each, len(costs))


def _claimed(order: WorkOrder, tiles: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """int32[1, n]: how many work tiles there are, and their codes in the order in which blocks
    claim them. `tiles`: by L2 group, then longest first; that order remains, but

    - work tiles of packed documents are taken in the order of keys: neighbours meet the same rows.
      The last head's go by rank (`key_tiles.schedule_by_rank`), so that the longest do not begin
      last;
    - of the chunks of a sequence those come first, head by head, that meet all rows of a chunk:
      they take equally long, and blocks stay at the same rows. Then the others, longest first, of
      as many heads at a time as make two waves of blocks: the last ones are short.
    """
    bits, kv_tiles = order.tiling.code_bits, order.tiling.kv_tiles
    if "q_segment_ids" in order.problem.arrays:
        head, tile = np.divmod(np.arange(order.work_tiles), kv_tiles)
        tiles = (head << bits) + tile
    elif order.tiling.chunks > 1:
        head, whole = tiles >> bits, costs == costs.max()
        others = int((~whole & (costs > TILE_OVERHEAD)).sum())
        together = max(2, 2 * order.grid * order.heads // max(1, others))
        group = np.where(whole, head - order.heads, head // together)
        tiles = tiles[np.lexsort((head, -costs, group))]
    return np.append(np.int32(tiles.size), tiles).astype(np.int32)[None]


# ---- documents: the GPU ranks work tiles by the query tiles that they meet ----------------------


@functools.lru_cache(maxsize=64)
def dealt(order: WorkOrder) -> np.ndarray:
    """`schedule` of ranks: rank r of a head stands for its kv tile with the r-th most
    query tiles. Heads are dealt one after the other, forth and back over the blocks; of two heads
    that follow each other one the other way round, and each pair from another block on: what a
    block has more than the mean of one head it has less of others, whatever the lengths.
    """
    grid, heads, kv_tiles = order.grid, order.problem.kv_heads, order.tiling.kv_tiles
    pairs = max(heads // 2, 1)
    turn, place = np.divmod(np.arange(kv_tiles), grid)
    assigned: list[list[int]] = [[] for _ in range(grid)]
    for first in range(0, order.heads, order.l2_heads):
        group = np.arange(first, min(first + order.l2_heads, order.heads))
        batch, head = np.divmod(group, heads)
        shift = head // 2 * grid // pairs + batch * grid // (2 * pairs)
        back = (turn[:, None] + group) % 2 == 1
        block = (np.where(back, grid - 1 - place[:, None], place[:, None]) + shift) % grid
        codes = (group << order.tiling.code_bits) + np.arange(kv_tiles)[:, None]
        for n, code in zip(block.ravel().tolist(), codes.ravel().tolist(), strict=True):
            assigned[n].append(code)
    return tile_scheduler.table_of(assigned)


def go_by_rank(order: WorkOrder) -> bool:
    """Whether `key_tiles.schedule_by_rank` makes the schedule where there are segment ids."""
    return order.first_ranked_head < order.heads and order.grid < order.work_tiles
