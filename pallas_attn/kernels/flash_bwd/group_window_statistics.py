"""Row statistics (lse and delta) for `sm90_group_window`, by a launch that reads out and dO once
and writes the numbers of a tile, 8 heads of 8 query rows, next to each other.

Grid: a block of one warpgroup for each tile of 64 rows.
"""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call.problem import AttentionProblem, probabilities_of_sinks
from pallas_attn.kernels.attention import softmax
from pallas_attn.kernels.attention.group_windows import WIDTH
from pallas_attn.kernels.attention.tiles import ROWS
from pallas_attn.kernels.flash_bwd.operands import Residuals, RowStatistics
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.types import GmemRef, Operand
from pallas_attn.kernels.mma.head_rows import HEADS, QUERIES

NUMBERS = 8  # in 16 bytes, which a thread reads at a time
LANES = WIDTH // NUMBERS  # threads that share a row


def of_tiles(problem: AttentionProblem, residuals: Residuals) -> RowStatistics:
    """float32[B, N / 8, T / 8, 64]: `RowStatistics` of the rows of each tile."""
    heads, tiles = problem.q_heads // HEADS, problem.q_len // QUERIES
    number = jax.ShapeDtypeStruct((problem.batch, heads, tiles, ROWS), jnp.float32)
    kernel = plgpu.kernel(
        functools.partial(_kernel, problem=problem),
        out_type=(number, number),
        **mosaic.grid_of(batch=problem.batch, tile=tiles * heads),
        compiler_params=mosaic.without_barriers(),
        kernel_name="flash_bwd_group_window_statistics",
    )
    _, out, lse, d_out, d_lse = residuals
    return RowStatistics(*kernel((out, d_out, lse, d_lse)))


def dsinks(sinks: Operand, stats: RowStatistics) -> jax.Array:
    """The gradient of the sinks: `operands.dsinks`."""
    _, heads, tiles, _ = stats.lse.shape
    of_heads = softmax.to_log2(sinks).reshape(1, heads, 1, 1, HEADS)
    sizes = -1, heads, tiles, QUERIES, HEADS
    # Rows without a key have an lse of inf here, as those of a sink of inf: but their delta is 0.
    p = probabilities_of_sinks(of_heads, stats.lse.reshape(sizes), jnp.exp2)
    return -(p * stats.delta.reshape(sizes)).sum(axis=(0, 2, 3)).reshape(-1)


def _kernel(
    inputs: tuple[GmemRef, GmemRef, GmemRef, GmemRef],
    lse: GmemRef,
    delta: GmemRef,
    *,
    problem: AttentionProblem,
) -> None:
    batch, number = lax.axis_index("batch"), lax.axis_index("tile")
    threads.run(_write, problem, (*inputs, lse, delta), (batch, number))


def _write(ctx: ThreadContext) -> None:
    """Tiles of the same query rows follow each other: blocks at work at one time read whole rows of
    out and dO.
    """
    thread, (out, do, lse, d_lse, to_lse, to_delta), (batch, number), problem = ctx
    heads, length, eights = problem.q_heads, problem.q_len, problem.q_heads // HEADS
    tile, eight = number // eights, number % eights
    to = ((batch * eights + eight) * (length // QUERIES) + tile) * ROWS
    lane, down = thread.index % LANES, thread.index // LANES
    rows = [down + n for n in range(0, ROWS, mosaic.THREADS // LANES)]
    loads = []
    for row in rows:
        query, head = tile * QUERIES + row // HEADS, eight * HEADS + row % HEADS
        own = (batch * heads + head) * length + query
        line = (batch * length + query) * heads + head
        chunk = thread.to_int64(line) * LANES + thread.to_int64(lane)
        words = [thread.load(ref, chunk, 16) for ref in (out, do)]
        loads.append((words, [thread.load(ref, own, 4) for ref in (lse, d_lse)]))
    for row, (words, (value, cotangent)) in zip(rows, loads, strict=True):
        total = thread.number(0.0)
        for x, y in zip(*(thread.numbers(word, 16, problem.dtype) for word in words), strict=True):
            total = total + x * y
        delta = thread.sum_of_lanes(total, LANES) - thread.as_float(cotangent)
        value = thread.as_float(value)
        never = thread.nothing_yet(value)
        scaled = thread.choose(never, thread.number(np.inf), value * softmax.to_log2(1.0))
        delta = thread.choose(never, thread.number(0.0), delta)
        thread.store_floats(to_lse, to + row, [scaled], lane < 1)
        thread.store_floats(to_delta, to + row, [delta], lane < 1)
