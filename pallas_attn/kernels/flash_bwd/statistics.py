"""Row statistics of a backward, lse and delta, by programs of single threads that read each row of
out and dO once. `of_rows` and `of_tiles` launch a kernel for all query rows; `write` does the same
within a kernel that reads each query tile once (`sm90_short`).

Grid of that launch: a block of one warpgroup for each tile of 64 rows. A block may also set its
share of another array to zero, the sums of dQ, which saves a launch.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call.problem import AttentionProblem
from pallas_attn.kernels.attention import softmax
from pallas_attn.kernels.attention.tiles import ROWS
from pallas_attn.kernels.flash_bwd import operands
from pallas_attn.kernels.flash_bwd.operands import Residuals, RowStatistics
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.types import GmemRef, Index, SmemRef

LANES = 8  # threads that share a row; each reads 16 bytes at a time
NUMBERS = 8  # 16-bit numbers in 16 bytes
_LINE = 256  # zeros in a line of shared memory, from which TMA stores them


class StatisticsRefs(NamedTuple):
    out: GmemRef  # [B, T, N, Hv]
    do: GmemRef
    lse: GmemRef  # float32[B, N, T]
    d_lse: GmemRef
    to_lse: SmemRef  # float32[tiles, ROWS]
    to_delta: SmemRef


class QueryTileAt(NamedTuple):
    batch: Index
    head: Index
    t: Index  # query tile
    slot: Index  # the row of `to_lse` and `to_delta`


def of_rows(
    problem: AttentionProblem,
    residuals: Residuals,
    negated_unit: float | None = None,
    zeros: jax.ShapeDtypeStruct | None = None,
    rows: int = 0,
) -> tuple[RowStatistics, jax.Array | None]:
    """The statistics of 16-bit rows, float32[B, N, rows], and the array of zeros.

    `negated_unit`: -lse / negated_unit and -delta in place of lse and delta. `zeros`: the type of
    an array of zeros to make beside them, for whole query tiles of 128. `rows`: a multiple of 64;
    0: T rounded up to 128. XLA computes all (`operands.row_statistics`) if rows of out and dO are
    not whole words of 16 bytes, or if `q_lengths` ends them before T.
    """
    rows = rows or pl.cdiv(problem.q_len, 2 * ROWS) * 2 * ROWS
    factors = (1.0, 1.0) if negated_unit is None else (-1.0 / negated_unit, -1.0)
    if problem.v_head_dim % NUMBERS or "q_lengths" in problem.arrays:
        lse, delta = operands.row_statistics(False, rows, residuals)
        stats = RowStatistics(lse * factors[0], delta * factors[1])
        return stats, None if zeros is None else jnp.zeros(zeros.shape, zeros.dtype)
    heads = problem.batch, problem.q_heads
    grid = {"tile": rows // ROWS, "row": heads[0] * heads[1]}
    stats, *more = _launched(problem, residuals, (*heads, rows), grid, factors=factors, zeros=zeros)
    return stats, None if zeros is None else more[0].reshape(zeros.shape)


def of_tiles(problem: AttentionProblem, heads: int, residuals: Residuals) -> RowStatistics:
    """The statistics of tiles of 64 / `heads` query rows by `heads` heads: float32[B, N / heads,
    tiles, 64]. Tiles of the same query rows follow each other, so that blocks at work at one time
    read whole rows of out and dO.
    """
    tiles, some = problem.q_len // (ROWS // heads), problem.q_heads // heads
    shape, grid = (problem.batch, some, tiles, ROWS), {"batch": problem.batch, "tile": tiles * some}
    return _launched(problem, residuals, shape, grid, heads)[0]


def _launched(
    problem: AttentionProblem,
    residuals: Residuals,
    shape: tuple[int, ...],
    grid: dict[str, int],
    heads: int = 1,
    factors: tuple[float, float] = (1.0, 1.0),
    zeros: jax.ShapeDtypeStruct | None = None,
) -> tuple[RowStatistics, *tuple[jax.Array, ...]]:
    _, out, lse, d_out, d_lse = residuals
    number, tile = jax.ShapeDtypeStruct(shape, jnp.float32), plgpu.SMEM((1, ROWS), jnp.float32)
    outs, scratch = [number, number], [tile, tile]
    if zeros is not None:
        lines = zeros.size // _LINE
        outs.append(jax.ShapeDtypeStruct((lines, _LINE), zeros.dtype))
        some = math.gcd(lines // math.prod(grid.values()), 8)
        scratch.append(plgpu.SMEM((some, _LINE), zeros.dtype))
    kernel = plgpu.kernel(
        functools.partial(_kernel, problem=problem, heads=heads, factors=factors),
        out_type=tuple(outs),
        scratch_types=tuple(scratch),
        **mosaic.grid_of(**grid),
        compiler_params=mosaic.without_barriers(),
        kernel_name="flash_bwd_statistics",
    )
    own_lse, delta, *more = kernel((out, d_out, lse, d_lse))
    return RowStatistics(own_lse, delta), *more


def _kernel(
    inputs: tuple[GmemRef, GmemRef, GmemRef, GmemRef],
    *rest: GmemRef,
    problem: AttentionProblem,
    heads: int,
    factors: tuple[float, float],
) -> None:
    (lse_ref, delta_ref, *sums), (lse, delta, *zero) = (
        rest[: len(rest) // 2],
        rest[len(rest) // 2 :],
    )
    if heads == 1:
        t, row, count = lax.axis_index("tile"), lax.axis_index("row"), jnp.int32(problem.q_heads)
        batch, head = lax.div(row, count), lax.rem(row, count)
        for zeros in zero:
            zeros[...] = jnp.zeros(zeros.shape, zeros.dtype)
    else:
        batch, number = lax.axis_index("batch"), lax.axis_index("tile")
        count = jnp.int32(problem.q_heads // heads)
        t, head = lax.div(number, count), lax.rem(number, count)
    at = QueryTileAt(batch, head, t, 0 * t)
    write(problem, StatisticsRefs(*inputs, lse, delta), at, heads, factors)
    plgpu.commit_smem()
    for array, zeros in zip(sums, zero, strict=True):
        tiles = lse_ref.shape[2] // ROWS
        lines = array.shape[0] // (problem.batch * problem.q_heads * tiles)
        for line in range(0, lines, zeros.shape[0]):
            some = pl.ds((row * tiles + t) * lines + line, zeros.shape[0])
            plgpu.copy_smem_to_gmem(zeros, array.at[some])
    for tile, to in ((lse, lse_ref), (delta, delta_ref)):
        own = pl.ds(t * ROWS, ROWS) if heads == 1 else t
        plgpu.copy_smem_to_gmem(tile.at[0], to.at[batch, head, own])
    plgpu.wait_smem_to_gmem(0)


def write(
    problem: AttentionProblem,
    refs: StatisticsRefs,
    at: QueryTileAt,
    heads: int = 1,
    factors: tuple[float, float] = (1.0, 1.0),
) -> None:
    """lse in log2 units and delta = rowsum(dO * O) - dLSE of query tile `at.t`, times `factors`, in
    shared memory; inf and 0 in rows that see no key and past T, so that their P and dS are 0. A
    tile may be rows of several heads, which lie next to each other for each query.
    """
    threads.run(_write, (problem, heads, factors), refs, at)


def _write(ctx: ThreadContext) -> None:
    thread, refs, at, (problem, several, (of_lse, of_delta)) = ctx
    chunks, heads, length = problem.v_head_dim // NUMBERS, problem.q_heads, problem.q_len
    lane, down = thread.index % LANES, thread.index // LANES
    rows = [down + n for n in range(0, ROWS, mosaic.THREADS // LANES)]
    if several == 1:
        lines = [(at.batch * length + at.t * ROWS + row) * heads + at.head for row in rows]
        live = [at.t * ROWS + row < length for row in rows]
        own = [(at.batch * heads + at.head) * length + at.t * ROWS + row for row in rows]
    else:
        first, head = at.t * (ROWS // several), at.head * several
        places = [(first + row // several, head + row % several) for row in rows]
        lines = [(at.batch * length + query) * heads + head for query, head in places]
        live = [query < length for query, _ in places]
        own = [(at.batch * heads + head) * length + query for query, head in places]
    lse, d_lse = (
        [thread.load_where(ref, index, 4, there) for index, there in zip(own, live, strict=True)]
        for ref in (refs.lse, refs.d_lse)
    )
    pairs = []
    for line, there in zip(lines, live, strict=True):
        for n in range(pl.cdiv(chunks, LANES)):
            chunk = lane + n * LANES
            inside = there if (n + 1) * LANES <= chunks else there & (chunk < chunks)
            index = thread.to_int64(line) * chunks + thread.to_int64(chunk)
            pairs.append([thread.load_where(ref, index, 16, inside) for ref in (refs.out, refs.do)])
    each = len(pairs) // len(rows)
    for n, row in enumerate(rows):
        total = thread.number(0.0)
        for words in pairs[n * each : (n + 1) * each]:
            out, do = (thread.numbers(word, 16, problem.dtype) for word in words)
            for x, y in zip(out, do, strict=True):
                total = total + x * y
        delta = thread.sum_of_lanes(total, LANES) - thread.as_float(d_lse[n])
        delta = delta if of_delta == 1.0 else delta * of_delta
        value, never = thread.as_float(lse[n]), thread.number(np.inf * np.sign(of_lse))
        scaled = value * (softmax.to_log2(1.0) * of_lse)
        scaled = thread.choose(thread.nothing_yet(value), never, scaled)
        scaled = thread.choose(live[n], scaled, never)
        nothing = thread.number(0.0)
        delta = thread.choose(thread.nothing_yet(value), nothing, delta)
        delta = thread.choose(live[n], delta, nothing)
        for ref, number in ((refs.to_lse, scaled), (refs.to_delta, delta)):
            thread.shared_store(ref, at.slot * ROWS + row, number, lane < 1)
