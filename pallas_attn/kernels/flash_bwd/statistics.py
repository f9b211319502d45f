"""Row statistics (lse and delta) of all query rows, by a launch that reads out and dO once and also
writes the zeros to which `sm90_fused` adds dq.

Grid: a block of one warpgroup for each tile of 64 rows of a head.
"""

import functools
import math
from typing import Any, NamedTuple

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


def takes(problem: AttentionProblem) -> bool:
    """Whether rows of out and dO are read in words of 16 bytes, and end at T."""
    whole = problem.v_head_dim % tile_statistics.NUMBERS == 0
    return whole and problem.dtype != "float32" and "q_lengths" not in problem.arrays


def clears(zeros: jax.ShapeDtypeStruct) -> bool:
    """Whether `with_zeros` makes such an array: it counts words of 16 bytes in 32 bits, and beyond
    the end, where the last blocks have fewer.
    """
    return _words(zeros) <= 2**30


def _words(array: jax.ShapeDtypeStruct | GmemRef) -> int:
    return math.prod(array.shape) * jnp.dtype(array.dtype).itemsize // 16


def of_rows(problem: AttentionProblem, rows: int, residuals: Residuals) -> RowStatistics:
    """The statistics that `operands.row_statistics` computes, for `rows` rows a head, a multiple of
    64, where `takes` holds.
    """
    return RowStatistics(*_launched(problem, rows, residuals))


def with_zeros(
    problem: AttentionProblem, rows: int, residuals: Residuals, zeros: jax.ShapeDtypeStruct
) -> tuple[RowStatistics, jax.Array]:
    """`of_rows`, and zeros in whole words of 16 bytes. Writing them while others are read takes
    less time than a launch of its own.
    """
    lse, delta, array = _launched(problem, rows, residuals, (zeros,))
    return RowStatistics(lse, delta), array


def _launched(
    problem: AttentionProblem, rows: int, residuals: Residuals, zeros: tuple[Any, ...] = ()
) -> Any:
    heads = problem.batch, problem.q_heads
    number = jax.ShapeDtypeStruct((*heads, rows), jnp.float32)
    tile = plgpu.SMEM((1, ROWS), jnp.float32)
    kernel = plgpu.kernel(
        functools.partial(_kernel, problem=problem),
        out_type=(number, number, *zeros),
        scratch_types=(tile, tile),
        **mosaic.grid_of(tile=rows // ROWS, row=heads[0] * heads[1]),
        compiler_params=mosaic.without_barriers(),
        kernel_name="flash_bwd_statistics",
    )
    _, out, lse, d_out, d_lse = residuals
    return kernel((out, d_out, lse, d_lse))


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
        threads.run(_clear, (_words(zeros[0]), blocks), _Zeros(*zeros), row * tiles + t)
    plgpu.wait_smem_to_gmem(0)


class _Zeros(NamedTuple):
    array: GmemRef


def _clear(ctx: ThreadContext) -> None:
    """A block's part of the zeros."""
    thread, refs, block, (words, blocks) = ctx
    each = pl.cdiv(words, blocks * mosaic.THREADS)
    for n in range(each):
        word = (block * each + n) * mosaic.THREADS + thread.index
        thread.store_floats(refs.array, word, [thread.number(0.0)] * FOUR, word < words)
