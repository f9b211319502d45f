"""A launch that rounds float32 sums of dQ, which lie in pieces as threads hold them, to dq.

Grid: a block of one warpgroup for each piece of 64 query rows of a head. dq is stored by TMA, in
whole rows: stored by threads it takes longer.

Tried and slower: `sm90_fused` adds up dq of the heads in work alone, which L2 holds, and the last
work tile of a head rounds it and leaves zeros. SigLIP's backward took 1457 us for 1517, but ViT-L's
767 for 688, and 8 x 2048 rows of 16 heads of 128 1304 for 1206; 8, 16 or 32 loads in flight a
thread made no difference (`results/special_cases/`).
"""

import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from pallas_attn._call.problem import AttentionProblem
from pallas_attn.kernels.attention.tiles import ROWS
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.panels import Panels
from pallas_attn.kernels.lang.types import GmemRef
from pallas_attn.kernels.mma import thread_pieces


class RoundingSmem(NamedTuple):
    rows: Panels  # [1, rows, columns]


def rounded(problem: AttentionProblem, sums: jax.Array, widths: tuple[int, ...]) -> jax.Array:
    """dq of a vector of pieces: first those of the first `widths[0]` columns, in the order of heads
    and rows, then those of the next columns.
    """
    heads = problem.batch, problem.q_heads
    shape = heads[0], problem.q_len, heads[1], problem.head_dim
    rows = tuple(panels.scratch((1, ROWS), problem.dtype, width) for width in widths)
    kernel = plgpu.kernel(
        functools.partial(_kernel, problem=problem, widths=widths),
        out_type=jax.ShapeDtypeStruct(shape, problem.dtype),
        scratch_types=(RoundingSmem(rows),),
        **mosaic.grid_of(tile=pl.cdiv(problem.q_len, ROWS), row=heads[0] * heads[1]),
        compiler_params=mosaic.without_barriers(),
        kernel_name="flash_bwd_rounding",
    )
    return kernel(sums)


def _kernel(
    sums: GmemRef,
    dq: GmemRef,
    smem: RoundingSmem,
    *,
    problem: AttentionProblem,
    widths: tuple[int, ...],
) -> None:
    t, line = lax.axis_index("tile"), lax.axis_index("row")
    pieces, before = sums.shape[0] // ROWS // sum(widths), 0
    number = line * (pieces // (problem.batch * problem.q_heads)) + t
    for width, to in zip(widths, panels.tiles(smem.rows, 0), strict=True):
        tile = thread_pieces.load(sums, number + before * pieces // width, (ROWS, width))
        to[...] = (tile * problem.scale).astype(problem.dtype)
        before += width
    plgpu.commit_smem()
    batch, head = lax.div(line, problem.q_heads), lax.rem(line, problem.q_heads)
    panels.store(smem.rows, 0, dq, (batch, pl.ds(t * ROWS, ROWS), head))
    plgpu.wait_smem_to_gmem(0)
