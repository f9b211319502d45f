"""The cost model of the backward: into how many parts work tiles are divided, in which order blocks
take them, and which of Hopper's kernels is faster.

A launch ends with its busiest block, so that times are steps of that block (`busiest`) times those
of a step, and what is launched beside. Configs ask `choice` and `parts_of_idle`; dispatch asks the
kernels' `slower`, whose rules are `two_kernels_are_faster`, `is_short_wait` and `fills_blocks`.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax.experimental.pallas as pl

from pallas_attn._call.problem import AttentionProblem
from pallas_attn.kernels.attention import tile_scheduler
from pallas_attn.kernels.attention.tiles import ROWS
from pallas_attn.kernels.flash_bwd import work_order
from pallas_attn.kernels.flash_bwd.work_order import WorkOrder
from pallas_attn.kernels.lang.mosaic import MULTIPROCESSORS

# Numbers of parts that `parts` compares. A part costs its float32 sums, written and read, and all
# of them a launch; few steps cost as much as loading the keys.
NUMBERS = 2, 3, 4, 6, 8, 12, 16
LEAST_STEPS = 2 / 3  # a part of the mean work tile has at least so many; of longer ones, more
MOST_BYTES = 2**28  # sums of all parts take at most so many
MOST_TILES_A_BLOCK = 4  # work tiles, parts counted, on average; with more of them blocks are busy
GAIN = 0.92  # parts are used if the time with them is below this share of that without
# Measured on an H200.
FLOP_A_MICROSECOND = 5.0e6  # one multiprocessor; from 4.6 to 5.8
LAUNCH_MICROSECONDS = 1.5
START_MICROSECONDS = 3.0  # a launch that fills a ring first
BYTES_A_MICROSECOND = 3.5e6
IN_L2 = 40e6, 8.0e6  # (bytes of sums that L2 holds, bytes a microsecond up to there)
FEW_ROWS = 512  # query rows of a work tile, on average, up to which adding up dq costs much
STEPS_BEHIND = 1.5  # steps between the additions of two kv tiles to one query tile in turns
MOST_OF_LAUNCH, MOST_OF_CAUSAL_TILE = 0.15, 0.25  # parts in which blocks may wait for their turns
LEAST_BUSY = 0.75  # least share of blocks with a head, over all waves, where a block takes a head


# ---- time ----------------------------------------------------------------------------------------


def busiest(order: WorkOrder) -> float:
    """Steps that the block with most of them takes, and what its work tiles cost beside them."""
    offsets = order.problem.offsets[0] if order.problem.offsets else ()
    ends = tile_scheduler.assigned(work_order.in_order(order, offsets)[1], order.grid)[1]
    return max(ends.values())


def _step_microseconds(order: WorkOrder, adds_dq: bool) -> float:
    tiling, problem = order.tiling, order.problem
    columns = (3 if adds_dq else 2) * problem.head_dim + 2 * problem.v_head_dim
    return 2 * tiling.block_q * tiling.block_kv * columns / FLOP_A_MICROSECOND


def _microseconds(order: WorkOrder, adds_dq: bool, parts: int) -> float:
    """The expected time of the busiest block, and of the launch that adds up the parts."""
    tiling, problem = order.tiling, order.problem
    dims = problem.head_dim, problem.v_head_dim
    step = _step_microseconds(order, adds_dq)
    nbytes = 2 * 4 * parts * order.kv_heads * tiling.padded_keys * sum(dims)
    rate = IN_L2[1] if nbytes <= IN_L2[0] else BYTES_A_MICROSECOND
    also = LAUNCH_MICROSECONDS + nbytes / rate if parts > 1 else 0.0
    return busiest(dataclasses.replace(order, parts=parts)) * step + also


# ---- parts and order of work tiles ---------------------------------------------------------------


class Choice(NamedTuple):
    """Fields of a Config that are about work tiles."""

    parts: int
    lockstep: bool
    claims: bool


def choice(order: WorkOrder, adds_dq: bool) -> Choice:
    """The fastest of what `order` allows, which says whether blocks may claim work tiles. A static
    table takes one L2 group after the other: then blocks read rows of heads that share keys from
    memory, not L2, or the long work tiles of the last group begin late. Blocks that take parts are
    at other query tiles anyway: lockstep made them 6 to 14 % slower, claims no faster.
    """
    locked = gains_by_lockstep(order, adds_dq)
    several = parts(dataclasses.replace(order, lockstep=locked), adds_dq)
    if several > 1:
        return Choice(several, False, False)
    gains = order.head_exceeds_l2 or locked or order.tiling.chunks > 1
    return Choice(1, locked, order.claims and gains and order.grid < order.work_tiles)


def gains_by_lockstep(order: WorkOrder, adds_dq: bool) -> bool:
    """Whether blocks gain by lockstep: where L2 does not hold the rows of a head, or holds those
    that dq is added to only if blocks meet.
    """
    gains = order.head_exceeds_l2 or (adds_dq and order.problem.group > 1)
    return gains and order.tiling.allows_lockstep


def parts(order: WorkOrder, adds_dq: bool) -> int:
    """The number of parts with which a launch, with or without dQ, is expected to take the least
    time.
    """
    several = _possible(order, MOST_TILES_A_BLOCK * (order.blocks or order.work_tiles))
    time = functools.partial(_microseconds, order, adds_dq)
    best = min(several, key=time, default=1)
    return best if several and time(best) < GAIN * time(1) else 1


def parts_of_idle(order: WorkOrder, blocks: int) -> int:
    """The largest number of parts with which no block of `blocks` takes two work tiles."""
    return max(_possible(order, blocks), default=1)


def _possible(order: WorkOrder, most: int) -> list[int]:
    """Numbers of parts, above 1, with which there are at most `most` work tiles."""
    tiling, problem = order.tiling, order.problem
    steps = problem.group * tiling.mean_q_rows / tiling.block_q
    nbytes = 4 * order.kv_heads * tiling.padded_keys * (problem.head_dim + problem.v_head_dim)
    largest = min(most / order.work_tiles, steps / LEAST_STEPS, MOST_BYTES / nbytes)
    return [n for n in NUMBERS if n <= largest]


def dq_warpgroups(problem: AttentionProblem, most: int) -> int:
    """The number of consumers of `sm90_dq`, up to `most`: fewer, so that there are more work tiles,
    where blocks would have none.
    """
    time_of_rows = {3: 1.0, 2: 1.3, 1: 2.0}
    return min(
        range(most, 0, -1),
        key=lambda n: n * time_of_rows[n] * tile_scheduler.rounds(problem, n * ROWS),
    )


# ---- which kernel --------------------------------------------------------------------------------


def two_kernels_are_faster(order: WorkOrder, lag: int, has_room: bool) -> bool:
    """Whether dQ by a kernel of its own takes less time than one beside dK and dV, which a float32
    array adds up: it is set to 0 before and rounded after. That costs more than it saves

    - where keys meet few query rows, unless blocks take parts, or take at most one work tile each
      and gain by an estimate; with a bias also where its tiles do not fit beside dS (`has_room`);
    - where blocks add to more of it at a time than L2 holds, if most of them have no work tile, or
      if more than the mask says which query tiles keys meet;
    - in turns, where parts would gain.

    `lag`: the steps by which dQ is later than dK.
    """
    problem, tiling = order.problem, order.tiling
    locked = gains_by_lockstep(order, adds_dq=not problem.deterministic)
    order = dataclasses.replace(order, lockstep=locked)
    has_parts = parts(order, adds_dq=True) > 1
    if has_parts and problem.deterministic:
        return True
    few_rows = tiling.mean_q_rows <= FEW_ROWS
    slow = few_rows and not (has_parts and tiling.block_q > ROWS)
    if slow and order.work_tiles <= order.blocks:
        rows = ROWS * dq_warpgroups(problem, 3 if tiling.block_q > ROWS else 2)
        slow = not _dq_is_faster_beside(order, rows, lag)
    idle = 2 * order.work_tiles <= order.blocks and not has_parts
    scattered = order.exceeds_l2 and (idle or not tiling.follows_mask)
    return slow or scattered or (few_rows and not has_room)


def _dq_is_faster_beside(order: WorkOrder, rows: int, lag: int) -> bool:
    """Whether one kernel for dQ, dK and dV takes less time than one for dK and dV and then
    `sm90_dq` with work tiles of `rows` query rows. The estimate is for orders in which no block
    takes two work tiles.
    """
    problem = order.problem
    together, alone = (_microseconds(order, adds, parts(order, adds)) for adds in (True, False))
    heads = problem.batch * problem.q_heads
    nbytes = 2 * 4 * heads * problem.q_len * problem.head_dim
    together += 2 * LAUNCH_MICROSECONDS + nbytes / BYTES_A_MICROSECOND  # zeros, and rounding
    together += (lag - 1) * _step_microseconds(order, adds_dq=True)
    each = math.ceil(problem.q_len / rows)
    seen = min(order.tiling.mean_q_rows / problem.q_len, 1.0) * problem.kv_len / ROWS
    longest = problem.kv_len / ROWS + tile_scheduler.TILE_OVERHEAD
    shared = heads * each * (seen + tile_scheduler.TILE_OVERHEAD) / (order.blocks or heads * each)
    columns = 2 * problem.head_dim + problem.v_head_dim
    step = 2 * rows * ROWS * columns / FLOP_A_MICROSECOND
    return together < alone + START_MICROSECONDS + step * max(longest, shared)


def is_short_wait(order: WorkOrder) -> bool:
    """Whether blocks that add to dQ in turns wait for a small part of the launch and of a work tile
    until the kv tiles of a head have all begun. Causal work tiles wait one by one: there several
    heads have to share keys.
    """
    tiling, causal = order.tiling, order.problem.mask.bounds_right
    work_tile = order.problem.group * tiling.mean_q_rows / tiling.block_q  # its steps
    waiting = STEPS_BEHIND * tiling.kv_tiles
    at_first = STEPS_BEHIND * min(tiling.kv_tiles, order.grid / order.l2_heads)
    launch = work_tile * order.work_tiles / order.grid
    most = MOST_OF_CAUSAL_TILE if causal else 1.0
    return waiting < most * work_tile and at_first < MOST_OF_LAUNCH * launch


def fills_blocks(heads: int) -> bool:
    """Whether most blocks have a head in the last wave, where each takes one at a time."""
    return heads / (MULTIPROCESSORS * pl.cdiv(heads, MULTIPROCESSORS)) >= LEAST_BUSY
