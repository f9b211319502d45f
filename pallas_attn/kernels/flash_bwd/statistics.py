"""Row statistics (lse and delta) of all query rows, by a launch that reads out and dO once.

Grid: a block of one warpgroup for each tile of 64 rows of a head.
"""

import functools
from typing import Any

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
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import GmemRef
from pallas_attn.kernels.mma import thread_pieces


def _kernel(
    inputs: tuple[GmemRef, GmemRef, GmemRef, GmemRef],
    *rest: GmemRef,
    problem: AttentionProblem,
    pieces: int,
) -> None:
    heads = problem.batch * problem.q_heads
    lse_ref, delta_ref, *zeros, lse, delta = rest
    t, row = lax.axis_index("tile"), lax.axis_index("row")
    batch, head = lax.div(row, jnp.int32(problem.q_heads)), lax.rem(row, jnp.int32(problem.q_heads))
    at = QueryTileAt(batch, head, t, 0 * t)
    tile_statistics.write(problem, StatisticsRefs(*inputs, lse, delta), at)
    plgpu.commit_smem()
    for tile, to in ((lse, lse_ref), (delta, delta_ref)):
        plgpu.copy_smem_to_gmem(tile.at[0], to.at[batch, head, pl.ds(t * ROWS, ROWS)])
    for to in zeros:
        nothing = mosaic.filled((ROWS, to.shape[0] // (heads * pieces * ROWS)), 0.0)
        thread_pieces.store(to, row * pieces + t, nothing, (t < pieces).astype(jnp.int32))
    plgpu.wait_smem_to_gmem(0)


def takes(problem: AttentionProblem) -> bool:
    """Whether rows of out and dO are read in words of 16 bytes, and end at T."""
    whole = problem.v_head_dim % tile_statistics.NUMBERS == 0
    return whole and problem.dtype != "float32" and "q_lengths" not in problem.arrays


def of_rows(problem: AttentionProblem, rows: int, residuals: Residuals) -> RowStatistics:
    """The statistics that `operands.row_statistics` computes, for `rows` rows a head, a multiple of
    64, where `takes` holds.
    """
    return RowStatistics(*_launched(problem, rows, residuals))


def with_zeros(
    problem: AttentionProblem, rows: int, residuals: Residuals, pieces: tuple[int, int]
) -> tuple[RowStatistics, jax.Array]:
    """`of_rows`, and zeros for the sums of dQ: `pieces` of 64 rows a head and columns (`dq_sum`).
    Writing them while others are read takes less time than a launch of its own.
    """
    numbers = problem.batch * problem.q_heads * pieces[0] * ROWS * pieces[1]
    zeros = jax.ShapeDtypeStruct((numbers,), jnp.float32)
    lse, delta, zeros = _launched(problem, rows, residuals, (zeros,), pieces[0])
    return RowStatistics(lse, delta), zeros


def _launched(
    problem: AttentionProblem,
    rows: int,
    residuals: Residuals,
    zeros: tuple[Any, ...] = (),
    pieces: int = 0,
) -> Any:
    heads = problem.batch, problem.q_heads
    number = jax.ShapeDtypeStruct((*heads, rows), jnp.float32)
    tile = plgpu.SMEM((1, ROWS), jnp.float32)
    kernel = plgpu.kernel(
        functools.partial(_kernel, problem=problem, pieces=pieces),
        out_type=(number, number, *zeros),
        scratch_types=(tile, tile),
        **mosaic.grid_of(tile=rows // ROWS, row=heads[0] * heads[1]),
        compiler_params=mosaic.without_barriers(),
        kernel_name="flash_bwd_statistics",
    )
    _, out, lse, d_out, d_lse = residuals
    return kernel((out, d_out, lse, d_lse))
