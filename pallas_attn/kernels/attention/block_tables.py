"""Mask functions that read a table of blocks, as `kv_blocks` makes them (NSA, MoBA): tiles that are
shown or hidden whole, and heads of a group in one work tile.

If all pairs of a tile read the same number of the table, a kernel computes exactly the blocks that
the table shows, and masks none but those on the diagonal. Of blocks of 64 query rows each 64 rows
have a list of their own, and two lists have few blocks in common. So a work tile is 64 rows of
several heads of a group, one a consumer: they share the list, and each K and V that is loaded.

T = S = 32768, 32:8 heads of 128, causal, 16 of 512 blocks of 64 keys a block of rows, on an H200:
forward 0.91 ms, with backward 4.6 (`results/listed/`). Tiles of 128 rows and 128 keys took 4.8 and
13.3 ms: they computed the blocks of both lists for all rows, and the other half of each kv tile.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from pallas_attn._call.problem import AttentionProblem
from pallas_attn._functions import tile_bounds
from pallas_attn._functions.program import Constant, Program
from pallas_attn.kernels.attention import tma_operands
from pallas_attn.kernels.attention.tiles import ROWS, QueryTiling, WorkTile
from pallas_attn.kernels.lang.types import Index

# Query rows that have a list of their own, and keys of a tile: the first that fit the blocks.
TILES = ((128, 128), (ROWS, 128), (ROWS, 64))
# Arrays that are the same for all heads, or that consumers read by their own head.
ALLOWED = {"q_lengths", "kv_lengths", "q_offset", "mask_left", "mask_right", "sinks"}


def tile_sizes(problem: AttentionProblem) -> tuple[int, int]:
    """One of `TILES`."""
    program = problem.mask_program
    assert program is not None
    offset = None if "q_offset" in problem.arrays else problem.q_offset
    sizes = problem.batch, problem.q_heads, problem.q_len, problem.kv_len
    grids = {tiles: tile_bounds.Grid(*sizes, *tiles, offset) for tiles in TILES}
    fitting = (x for x, grid in grids.items() if tile_bounds.reads_one_place(program, grid))
    return next(fitting, TILES[0])


def heads_of_tile(problem: AttentionProblem, most: int) -> int:
    """Heads of a group, up to `most`, that a work tile can have."""
    program = problem.mask_program
    apart = problem.score_program is not None or not set(problem.arrays) <= ALLOWED
    apart = apart or problem.fetches > 1 or problem.zigzag > 1 or problem.share > 1
    if program is None or apart:
        return 1
    counts = range(min(most, problem.group), 1, -1)
    fitting = (n for n in counts if problem.group % n == 0 and _shares_lists(program, n))
    return next(fitting, 1)


def heads_of_list(plan: Any) -> int:
    """Query heads that follow each other and share a list of kv tiles."""
    return max(_group_of_list(plan.problem), plan.order.together)


@functools.lru_cache(maxsize=256)
def _group_of_list(problem: AttentionProblem) -> int:
    """The heads of a group where they are known to see the same keys, else 1."""
    program = problem.mask_program
    by_array = problem.mask_shape is not None and problem.mask_shape[1] > 1
    if program is None or by_array or not program.depends_on(1):
        return 1
    return problem.group if _shares_lists(program, problem.group) else 1


def _shares_lists(program: Program, heads: int) -> bool:
    """Whether heads that follow each other, from a multiple of `heads` on, see the same keys."""
    head = program.inputs - 3
    for op in program.operations:
        if head in [x for x in op.operands if isinstance(x, int)]:
            by = op.operands[-1]
            divides = op.name == "div" and op.operands[0] == head
            if not divides or not isinstance(by, Constant) or int(by.value) % heads:
                return False
    return program.result != head


def config_of(problem: AttentionProblem, made: Callable[..., Any]) -> Any:
    """The Config of the forward for head dims up to 128. `made`: makes one."""
    wide = max(problem.head_dim, problem.v_head_dim) > 64
    rows, keys = tile_sizes(problem)
    if rows > ROWS:
        return made(2, block_kv=128, stages=2 if wide else 4)
    heads = heads_of_tile(problem, 3 if wide and keys == 64 else 2 if wide else 4)
    stages = {64: {1: 6, 2: 4, 3: 3, 4: 6}, 128: {1: 3, 2: 2, 3: 2, 4: 2}}[keys][heads]
    return made(heads, keys, stages, heads_together=heads > 1)


def with_heads(plan: Any) -> Any:
    """A `QueryPlan` whose work tiles have rows of as many heads as it has consumers."""
    problem, order, n = plan.problem, plan.order, plan.config.warpgroups
    if n == 1:
        return plan
    if heads_of_tile(problem, n) != n:
        raise ValueError(
            "Config.heads_together must be False (forward), or Config.dq_warpgroups 1, for "
            f"{problem} and {n} warpgroups"
        )
    tiling = QueryTiling(problem.q_len, problem.kv_len, ROWS, plan.tiling.block_kv)
    work_tiles = order.heads // n * tiling.q_tiles
    order = dataclasses.replace(
        order,
        work_tiles=work_tiles,
        grid=min(plan.config.grid or work_tiles, work_tiles),
        l2_heads=tma_operands.round_up(order.l2_heads, n),
        code_bits=(tiling.q_tiles - 1).bit_length(),
        together=n,
    )
    return dataclasses.replace(plan, tiling=tiling, order=order)


def own_rows(plan: Any, tile: WorkTile, wg: Index) -> tuple[WorkTile, Index]:
    """The work tile of a consumer's head, and the first of its rows."""
    if plan.order.together == 1:
        return tile, tile.row + wg * ROWS
    return tile._replace(head=tile.head + wg), tile.row
