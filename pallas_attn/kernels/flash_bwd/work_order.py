"""The order in which blocks take work tiles of keys: by L2 group of kv heads, in a table that is
made before anything runs, or claimed one by one (`flash_fwd/claims.py`). `documents` has the order
where there are segment ids, `lockstep` that in which blocks meet the same query rows.
"""

import dataclasses
import functools

import jax.experimental.pallas as pl
import numpy as np

from pallas_attn._call.problem import AttentionProblem
from pallas_attn.kernels.attention import tile_lists
from pallas_attn.kernels.flash_bwd import lockstep
from pallas_attn.kernels.flash_bwd.key_tiles import KeyTiling
from pallas_attn.kernels.flash_fwd import chunk_schedules, tile_scheduler

L2_BYTES = 32 * 2**20  # read and added to by the heads of an L2 group: a part of L2
USUAL_BLOCKS = 132
WORK_TILE_OVERHEAD = 1.5  # steps of one query tile that a work tile costs beside its own


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
    def list_sizes(self) -> tile_lists.Sizes:
        return self.tiling.list_sizes

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
        mask, blocks = self.problem.mask, self.blocks or USUAL_BLOCKS
        if self.heads_together:
            return min(self.heads_together, self.heads)
        if self.parts > 1:  # work tiles are few: blocks take parts of all of them at one time
            return self.heads
        if self.lockstep:
            heads = lockstep.l2_heads(self.heads, self.tiling.kv_tiles, blocks)
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
        return self.work_tiles < 4 * (self.blocks or USUAL_BLOCKS)

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


def stays_in_lockstep(order: WorkOrder, adds_dq: bool) -> bool:
    """Whether blocks gain by lockstep: where L2 does not hold the rows of a head, or holds those
    that dq is added to only if blocks meet.
    """
    gains = order.head_exceeds_l2 or (adds_dq and order.problem.group > 1)
    return gains and lockstep.applies(order.tiling)


@functools.lru_cache(maxsize=64)
def schedule(order: WorkOrder, offsets: tuple[int, ...] = ()) -> np.ndarray:
    """int32[blocks, n]: for each block how many work tiles it takes, and their codes for
    `key_tiles.key_tile`: by L2 group, then longest first; one row where blocks claim them.
    `offsets`: see `tile_scheduler.table`. Where there are segments all cost the same here: see
    `documents.schedule_by_rank`.
    """
    tiles, costs = _in_order(order, offsets)
    if order.claims:
        return _claimed(order, tiles, costs)
    return tile_scheduler.assign(tiles, costs, order.grid)


def busiest(order: WorkOrder) -> float:
    """Steps that the block with most of them takes, and what its work tiles cost beside them."""
    offsets = order.problem.offsets[0] if order.problem.offsets else ()
    ends = tile_scheduler.assigned(_in_order(order, offsets)[1], order.grid)[1]
    return max(ends.values())


def _in_order(order: WorkOrder, offsets: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The codes of work tiles as blocks should begin them, and their costs in steps."""
    problem, tiling = order.problem, order.tiling
    costs = np.full((max(1, len(offsets)), tiling.kv_tiles), WORK_TILE_OVERHEAD)
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
      The last head's go by rank (`documents.schedule_by_rank`), so that the longest do not begin
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
        others = int((~whole & (costs > WORK_TILE_OVERHEAD)).sum())
        together = max(2, 2 * order.grid * order.heads // max(1, others))
        group = np.where(whole, head - order.heads, head // together)
        tiles = tiles[np.lexsort((head, -costs, group))]
    return np.append(np.int32(tiles.size), tiles).astype(np.int32)[None]
