"""Tiles of 64 rows that are 8 heads of 8 consecutive query rows, as `mma/head_rows` numbers them:
their loads and stores, and the units of work of `flash_fwd.sm90_group_window`.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import SHORT_WINDOW, AttentionProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import softmax
from pallas_attn.kernels.attention.tiles import ROWS
from pallas_attn.kernels.attention.tiles import limit as attention_limit
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.panels import Panel
from pallas_attn.kernels.lang.types import Barrier, DType, GmemRef, Index
from pallas_attn.kernels.mma.head_rows import HEADS, QUERIES

WIDTH = 64  # head dim
LEAST_KEYS, MOST_KEYS = 8, SHORT_WINDOW  # keys that a query row sees, itself included


def limit(problem: AttentionProblem) -> Limit | None:
    """Why the kernels cannot take a problem, or None."""
    if (refused := attention_limit(problem)) is not None:
        return refused
    mask, plain = problem.mask, problem.softcap is None and problem.score_program is None
    plain = plain and problem.mask_program is None and set(problem.arrays) <= {"sinks"}
    here = problem.share == problem.zigzag == problem.fetches == 1
    takes = (
        plain
        and here
        and mask.is_causal
        and mask.width is not None
        and LEAST_KEYS <= mask.width <= MOST_KEYS
        and problem.q_len == problem.kv_len > 0
        and problem.q_len % QUERIES == 0
        and problem.batch * problem.q_heads > 0
        and problem.group % HEADS == 0
        and problem.q_offset == 0
        and problem.head_dim == problem.v_head_dim == WIDTH
        and problem.dtype in ("bfloat16", "float16")
        and problem.out_dtype is None
        and softmax.unit_of(problem.scale) is not None
    )
    if takes:
        return None
    return Limit(
        f"it takes causal windows of {LEAST_KEYS} to {MOST_KEYS} keys, as many queries as keys, in "
        f"eights, heads of {WIDTH} of which a multiple of {HEADS} share K and V, bfloat16 and "
        "float16, with sinks and no other array",
        "leave implementation=None",
    )


class Unit(NamedTuple):
    """Consecutive query rows of 8 heads, which a block takes at a time."""

    batch: Index
    head: Index  # the first of them
    kv_head: Index
    row: Index  # the first query row


def width_of(problem: AttentionProblem) -> int:
    """Keys that a query row sees, itself included."""
    assert problem.mask.width is not None
    return problem.mask.width


@dataclasses.dataclass(frozen=True)
class GroupWindow:
    """The units of a problem, and their keys."""

    problem: AttentionProblem
    rows: int  # query rows of a unit

    @functools.cached_property
    def width(self) -> int:
        return width_of(self.problem)

    @functools.cached_property
    def reach(self) -> int:
        """Keys of a tile that come before its first query row: `width` - 1, in whole 64s."""
        return pl.cdiv(self.width - 1, 64) * 64

    @functools.cached_property
    def units(self) -> int:
        problem = self.problem
        return problem.batch * pl.cdiv(problem.q_len, self.rows) * (problem.q_heads // HEADS)

    def unit(self, number: Index) -> Unit:
        """Units of the same rows follow each other."""
        eights, rows = self.problem.q_heads // HEADS, pl.cdiv(self.problem.q_len, self.rows)
        line, eight = lax.div(number, jnp.int32(eights)), lax.rem(number, jnp.int32(eights))
        batch, row = lax.div(line, jnp.int32(rows)), lax.rem(line, jnp.int32(rows))
        kv_head = lax.div(eight, jnp.int32(self.problem.group // HEADS))
        return Unit(batch, eight * HEADS, kv_head, row * self.rows)

    def count(self, block: Index, grid: int) -> Index:
        """Units of a block: numbers block, block + grid, .."""
        return lax.div(self.units - 1 - block, jnp.int32(grid)) + 1

    def first_key(self, row: Index) -> Index:
        """The first key of a tile whose first query row is `row`."""
        return jnp.maximum(row - self.reach, 0)


def scratch(shape: tuple[int, ...], dtype: DType) -> Panel:
    """Shared memory for tiles [*shape, ROWS, WIDTH], which TMA sees as [.., QUERIES, HEADS, WIDTH]:
    the same bytes, since rows are as wide as the swizzle.
    """
    tiled = mosaic.swizzled((*shape, ROWS, WIDTH), dtype, 2 * WIDTH)
    box = (*shape, QUERIES, HEADS, WIDTH)
    return Panel(plgpu.RefUnion(plgpu.SMEM(box, dtype, transforms=tiled.transforms[1:]), tiled))


def load_rows(
    source: GmemRef, unit: Unit, row: Index, to: Panel, at: Index, ready: Barrier
) -> None:
    """Issues the load of 8 heads of 8 query rows from `row` on; past T, of other rows."""
    rows = pl.ds(jnp.minimum(row, source.shape[1] - QUERIES), QUERIES)
    heads = source.at[unit.batch, rows, pl.ds(unit.head, HEADS)]
    plgpu.copy_gmem_to_smem(heads, to.for_tma.at[at], ready)


def store_rows(
    staged: Panel, at: Index | tuple[Index, ...], to: GmemRef, unit: Unit, row: Index
) -> None:
    """Issues the store of 8 heads of those query rows, if they exist."""
    rows = pl.ds(jnp.minimum(row, to.shape[1] - QUERIES), QUERIES)
    heads = to.at[unit.batch, rows, pl.ds(unit.head, HEADS)]
    plgpu.copy_smem_to_gmem(staged.for_tma.at[at], heads, predicate=row < to.shape[1])
