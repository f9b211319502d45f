"""Row statistics (lse and delta) of all query rows, by a launch that reads out and dO once; it also
sets arrays of a later launch to zero.

Grid: a block of one warpgroup for each tile of 64 rows of a head.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionProblem
from pallas_attn.kernels.attention.tiles import ROWS
from pallas_attn.kernels.flash_bwd import tile_statistics
from pallas_attn.kernels.flash_bwd.operands import Residuals, RowStatistics
from pallas_attn.kernels.flash_bwd.tile_statistics import QueryTileAt, StatisticsRefs
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.threads import FOUR
from pallas_attn.kernels.lang.types import GmemRef


class _Zeros(NamedTuple):
    arrays: tuple[GmemRef, ...]  # numbers of 4 bytes


def takes(problem: AttentionProblem) -> bool:
    """Whether rows of out and dO are read in words of 16 bytes, and end at T."""
    whole = problem.v_head_dim % tile_statistics.NUMBERS == 0
    return whole and problem.dtype != "float32" and "q_lengths" not in problem.arrays


def of_rows(problem: AttentionProblem, rows: int, residuals: Residuals) -> RowStatistics:
    """The statistics that `operands.row_statistics` computes, for `rows` rows a head, a multiple of
    64, where `takes` holds.
    """
    return with_zeros(problem, rows, residuals, ())[0]


def with_zeros(
    problem: AttentionProblem,
    rows: int,
    residuals: Residuals,
    shapes: Sequence[jax.ShapeDtypeStruct],
) -> tuple[RowStatistics, list[jax.Array]]:
    """`of_rows`, and arrays of zeros, of 4 bytes a number and whole words of 16 bytes. Writing them
    while others are read takes less time than a launch of its own.
    """
    heads = problem.batch, problem.q_heads
    number = jax.ShapeDtypeStruct((*heads, rows), jnp.float32)
    tile = plgpu.SMEM((1, ROWS), jnp.float32)
    kernel = plgpu.kernel(
        functools.partial(_kernel, problem=problem),
        out_type=(number, number, *shapes),
        scratch_types=(tile, tile),
        **mosaic.grid_of(tile=rows // ROWS, row=heads[0] * heads[1]),
        compiler_params=mosaic.without_barriers(),
        kernel_name="flash_bwd_statistics",
    )
    _, out, lse, d_out, d_lse = residuals
    lse, delta, *zeros = kernel((out, d_out, lse, d_lse))
    return RowStatistics(lse, delta), zeros


def _kernel(
    inputs: tuple[GmemRef, GmemRef, GmemRef, GmemRef], *rest: GmemRef, problem: AttentionProblem
) -> None:
    lse_ref, delta_ref, *zeros, lse, delta = rest
    t, row = lax.axis_index("tile"), lax.axis_index("row")
    batch, head = lax.div(row, jnp.int32(problem.q_heads)), lax.rem(row, jnp.int32(problem.q_heads))
    at = QueryTileAt(batch, head, t, 0 * t)
    tile_statistics.write(problem, StatisticsRefs(*inputs, lse, delta), at)
    plgpu.commit_smem()
    for tile, to in ((lse, lse_ref), (delta, delta_ref)):
        plgpu.copy_smem_to_gmem(tile.at[0], to.at[batch, head, pl.ds(t * ROWS, ROWS)])
    if zeros:
        tiles = lse_ref.shape[2] // ROWS
        blocks = problem.batch * problem.q_heads * tiles
        words = [math.prod(x.shape) // FOUR for x in zeros]
        threads.run(_clear, (words, blocks), _Zeros(tuple(zeros)), row * tiles + t)
    plgpu.wait_smem_to_gmem(0)


def _clear(ctx: ThreadContext) -> None:
    """A part of each array."""
    thread, refs, block, (words, blocks) = ctx
    nothing = [thread.number(0.0)] * FOUR
    for array, count in zip(refs.arrays, words, strict=True):
        each = pl.cdiv(count, blocks * mosaic.THREADS)
        for n in range(each):
            word = (block * each + n) * mosaic.THREADS + thread.index
            thread.store_floats(array, word, nothing, word < count)
