"""A launch that rounds float32 sums of dQ, which lie in pieces as threads hold them, to dq.

Grid: a block of one warpgroup for each piece of 64 query rows of a head.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from pallas_attn._call.problem import AttentionProblem
from pallas_attn.kernels.attention.tiles import ROWS
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import GmemRef, Index
from pallas_attn.kernels.mma import mma_sync, thread_pieces


def write(  # noqa: PLR0913
    problem: AttentionProblem,
    sums: jax.Array,
    to: GmemRef,
    head: tuple[Index, Index],
    row: Index,
    column: Index,
) -> None:
    """Rounds a tile of sums [64, columns] to dq [B, T, N, H]. `head`: batch and head."""
    rounded = (sums * problem.scale).astype(problem.dtype)
    mma_sync.write(rounded, to, (*head, row, problem.q_len - row, column))


def rounded(problem: AttentionProblem, sums: jax.Array, widths: tuple[int, ...]) -> jax.Array:
    """dq of a vector of pieces: first those of the first `widths[0]` columns, in the order of heads
    and rows, then those of the next columns.
    """
    heads = problem.batch, problem.q_heads
    shape = heads[0], problem.q_len, heads[1], problem.head_dim
    kernel = plgpu.kernel(
        functools.partial(_kernel, problem=problem, widths=widths),
        out_type=jax.ShapeDtypeStruct(shape, problem.dtype),
        **mosaic.grid_of(tile=pl.cdiv(problem.q_len, ROWS), row=heads[0] * heads[1]),
        compiler_params=mosaic.without_barriers(),
        kernel_name="flash_bwd_rounding",
    )
    return kernel(sums)


def _kernel(
    sums: GmemRef, dq: GmemRef, *, problem: AttentionProblem, widths: tuple[int, ...]
) -> None:
    t, line = lax.axis_index("tile"), lax.axis_index("row")
    pieces = sums.shape[0] // ROWS // sum(widths)
    of_head = pieces // (problem.batch * problem.q_heads)
    head = lax.div(line, problem.q_heads), lax.rem(line, problem.q_heads)
    before = 0
    for width in widths:
        number = before * pieces // width + line * of_head + t
        tile = thread_pieces.load(sums, number, (ROWS, width))
        write(problem, tile, dq, head, t * ROWS, 0 * t + before)
        before += width
