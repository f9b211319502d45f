"""Work tiles of keys in parts, each of which a block takes: where there are few work tiles, as
those of one sequence, of few keys, or of many heads that share keys.

Of n parts number p takes steps p total / n to (p + 1) total / n of the work tile (`steps_of`), over
all heads of the group; under a causal mask too all parts of a work tile are equally long. A part
without a step has zeros for a sum. Each warpgroup stores its sums in float32 from registers, each
accumulator in a piece of its own (`thread_pieces`): nothing is set to zero before, and nobody
waits. A launch then adds up the pieces in the order of p, so that bits repeat, and rounds.

Grid of that launch: a block of one warpgroup for each 64 keys of a head and each 64 columns. It
also rounds the sums of dQ that lie in pieces, of one part (`dq_sum.ByRows`). TMA stores gradients:
threads take longer.

Tried and slower: `sm90_fused` adds up dq of the heads in work alone, which L2 holds, and the last
work tile of a head rounds it and leaves zeros. SigLIP's backward took 1457 us for 1517, but ViT-L's
767 for 688, and 8 x 2048 rows of 16 heads of 128 1304 for 1206 (`results/special_cases/`).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionProblem
from pallas_attn.kernels.attention import tiles
from pallas_attn.kernels.attention.tiles import ROWS
from pallas_attn.kernels.flash_bwd import work_order
from pallas_attn.kernels.flash_bwd.key_tiles import KeyTile
from pallas_attn.kernels.flash_bwd.operands import KeyGradients
from pallas_attn.kernels.flash_bwd.plan import KeyPlan
from pallas_attn.kernels.flash_bwd.work_order import WorkOrder
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.types import DType, GmemRef, Index, RegisterTile
from pallas_attn.kernels.mma import thread_pieces

MOST = 64
# How many there are by default. A part costs its float32 sums, written and read, and all of them a
# launch; few steps cost as much as loading the keys.
NUMBERS = 2, 3, 4, 6, 8, 12, 16
LEAST_STEPS = 2  # a part's, on average
MOST_BYTES = 2**28  # all sums'
MOST_TILES_A_BLOCK = 4  # on average; with more of them blocks are busy
GAIN = 0.92  # largest part of the time without parts
FLOP_A_MICROSECOND = 5.0e6  # a multiprocessor's; from 4.6 to 5.8 on an H200
LAUNCH_MICROSECONDS = 1.5
BYTES_A_MICROSECOND = 3.5e6
Widths = Sequence[int]  # columns of the accumulators of a gradient


# ---- how many parts ------------------------------------------------------------------------------


def default(order: WorkOrder, adds_dq: bool) -> int:
    """The number of parts with which a launch, with or without dQ, is expected to take the least
    time: that of the busiest block.
    """
    tiling, problem = order.tiling, order.problem
    dims = problem.head_dim, problem.v_head_dim
    columns = (3 if adds_dq else 2) * dims[0] + 2 * dims[1]
    step = 2 * tiling.block_q * tiling.block_kv * columns / FLOP_A_MICROSECOND
    keys, blocks = order.kv_heads * tiling.padded_keys, order.blocks or order.work_tiles

    def microseconds(parts: int) -> float:
        nbytes = 2 * 4 * parts * keys * sum(dims)
        also = LAUNCH_MICROSECONDS + nbytes / BYTES_A_MICROSECOND if parts > 1 else 0.0
        return work_order.busiest(dataclasses.replace(order, parts=parts)) * step + also

    several = _possible(order, MOST_TILES_A_BLOCK * blocks)
    best = min(several, key=microseconds, default=1)
    return best if several and microseconds(best) < GAIN * microseconds(1) else 1


def of_idle(order: WorkOrder, blocks: int) -> int:
    """The number of parts for so many blocks of which none takes a second one."""
    return max(_possible(order, blocks), default=1)


def _possible(order: WorkOrder, most: int) -> list[int]:
    """Numbers of parts, above 1, with which there are at most so many work tiles."""
    tiling, problem = order.tiling, order.problem
    steps = problem.group * tiling.mean_q_rows / tiling.block_q
    nbytes = 4 * order.kv_heads * tiling.padded_keys * (problem.head_dim + problem.v_head_dim)
    largest = min(most / order.work_tiles, steps / LEAST_STEPS, MOST_BYTES / nbytes)
    return [n for n in NUMBERS if n <= largest]


# ---- the pieces ----------------------------------------------------------------------------------


class Pieces(NamedTuple):
    """The order of pieces of gradients, first those of a gradient's first accumulator: by head of
    all batch rows, 64 rows and part.
    """

    problem: AttentionProblem
    heads: int  # heads of a batch row
    rows: int  # rows of a head
    in_head: int  # pieces of a head and a part
    parts: int
    block: int  # rows that lie together: see `tiles.kv_row`; 0: all
    scale: float = 1.0  # factor of gradients

    @property
    def in_all(self) -> int:
        """Pieces of one accumulator."""
        return self.problem.batch * self.heads * self.in_head * self.parts

    def number(self, head: Index, rows: Index, part: Index) -> Index:
        """The piece of a part's sum. `head`: among those of all batch rows; `rows`: which 64."""
        return (head * self.in_head + rows) * self.parts + part


def of_keys(plan: KeyPlan) -> Pieces:
    """The pieces of dk and dv."""
    problem, tiling = plan.problem, plan.tiling
    sizes = problem.kv_heads, problem.kv_len, tiling.padded_keys // ROWS
    return Pieces(problem, *sizes, plan.order.parts, tiling.block_kv)


def outputs(plan: KeyPlan, widths: Sequence[Widths]) -> list[jax.ShapeDtypeStruct]:
    """The vectors of pieces, first those of a gradient's first accumulator."""
    sizes = [of_keys(plan).in_all * ROWS * sum(each) for each in widths]
    return [jax.ShapeDtypeStruct((size,), jnp.float32) for size in sizes]


def store(  # noqa: PLR0913
    plan: KeyPlan,
    out: GmemRef,
    work: KeyTile,
    first: Index,
    sums: Sequence[RegisterTile],
    before: Index = 0,
) -> None:
    """Stores what a warpgroup has added up of a gradient of 64 keys, from number `first` of a work
    tile on, `before` columns of whole accumulators.
    """
    head = work.batch * plan.problem.kv_heads + work.kv_head
    rows = lax.div(work.key + first, jnp.int32(ROWS))
    pieces = of_keys(plan)
    piece = pieces.number(head, rows, work.part)
    for tile in sums:
        width = tile.shape[1]
        thread_pieces.store(out, piece + before * pieces.in_all // width, tile)
        before += width


# ---- the launch that adds up the pieces ----------------------------------------------------------


class Columns(NamedTuple):
    """Columns of accumulators of one width, which blocks take by fewer."""

    first: int  # the gradient's
    blocks: int
    width: int  # a block's
    of: int  # an accumulator's width


def _columns(dtype: DType, dim: int, widths: Widths) -> Iterator[Columns]:
    """Columns of all accumulators, up to a head dim."""
    first = 0
    for width, same in itertools.groupby(widths):
        some = math.gcd(width, 128 // jnp.dtype(dtype).itemsize)
        count = sum(same)
        yield Columns(first, min(count // some, pl.cdiv(dim - first, some)), some, width)
        first += count


def added(plan: KeyPlan, pieces: Sequence[jax.Array], widths: Sequence[Widths]) -> KeyGradients:
    """dk and dv of their pieces."""
    dims = plan.problem.head_dim, plan.problem.v_head_dim
    return KeyGradients(*_added(of_keys(plan), pieces, dims, widths))


def rounded(problem: AttentionProblem, sums: jax.Array, widths: Widths, in_head: int) -> jax.Array:
    """dq of the pieces to which `dq_sum.ByRows` adds."""
    order = Pieces(problem, problem.q_heads, problem.q_len, in_head, 1, 0, problem.scale)
    return _added(order, [sums], [problem.head_dim], [widths], "flash_bwd_rounding")[0]


def _added(
    order: Pieces,
    pieces: Sequence[jax.Array],
    dims: Sequence[int],
    widths: Sequence[Widths],
    name: str = "flash_bwd_parts",
) -> Any:
    problem, rows, heads = order.problem, order.rows, order.heads
    shapes = [(problem.batch, rows, heads, dim) for dim in dims]
    columns = [tuple(_columns(problem.dtype, *each)) for each in zip(dims, widths, strict=True)]
    every = sorted({x.width for each in columns for x in each})
    blocks = sum(x.blocks for each in columns for x in each)
    kernel = plgpu.kernel(
        functools.partial(_kernel, order=order, columns=columns, widths=every),
        out_type=tuple(jax.ShapeDtypeStruct(shape, problem.dtype) for shape in shapes),
        scratch_types=(tuple(panels.scratch((1, ROWS), problem.dtype, n) for n in every),),
        **mosaic.grid_of(column=blocks, rows=pl.cdiv(rows, ROWS), head=problem.batch * heads),
        compiler_params=mosaic.without_barriers(),
        kernel_name=name,
    )
    return kernel(tuple(pieces))


def _kernel(
    pieces: tuple[GmemRef, ...],
    *rest: Any,
    order: Pieces,
    columns: Sequence[tuple[Columns, ...]],
    widths: Widths,
) -> None:
    *outs, smem = rest
    block, before = lax.axis_index("column"), 0
    for ref, out, each in zip(pieces, outs, columns, strict=True):
        for some in each:
            own, staged = block - before, smem[widths.index(some.width)]
            add = functools.partial(_add, order, (ref, out, staged), some, own)
            pl.when((own >= 0) & (own < some.blocks))(add)
            before += some.blocks
    plgpu.wait_smem_to_gmem(0)


def _add(
    order: Pieces, where: tuple[GmemRef, GmemRef, panels.Panel], columns: Columns, block: Index
) -> None:
    """Some columns of 64 rows: the sum over all parts. `where`: the pieces, the gradient, and
    shared memory.
    """
    (ref, out, staged), (first, _, width, of), problem = where, columns, order.problem
    rows, head = lax.axis_index("rows"), lax.axis_index("head")
    blocks = of // width
    acc = lax.div(block, jnp.int32(blocks))
    number = acc * order.in_all + first * order.in_all // of + order.number(head, rows, 0)
    number = number * blocks + (block - acc * blocks)
    total = thread_pieces.load(ref, number, (ROWS, width))
    for part in range(1, order.parts):
        total = total + thread_pieces.load(ref, number + part * blocks, (ROWS, width))
    total = total if order.scale == 1.0 else total * order.scale
    staged.tile[0] = total.astype(staged.tile.dtype)
    plgpu.commit_smem()
    batch, own_head = lax.div(head, order.heads), lax.rem(head, order.heads)
    row = rows * ROWS
    if order.block:
        within = lax.rem(row, jnp.int32(order.block))
        row = tiles.kv_row(problem, order.block, row - within) + within
    at = batch, pl.ds(row, ROWS), own_head, pl.ds(first + block * width, width)
    plgpu.copy_smem_to_gmem(staged.for_tma.at[0], out.at[at])
