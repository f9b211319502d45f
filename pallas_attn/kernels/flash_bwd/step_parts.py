"""Work tiles of keys in parts, each of which a block takes: where there are few work tiles, as
those of one sequence, of few keys, or of many heads that share keys (`costs.parts` says how many).

Of n parts number p takes steps p total / n to (p + 1) total / n of the work tile (`steps_of`), over
all heads of the group; under a causal mask too all parts of a work tile are equally long. A part
without a step has zeros for a sum. Each warpgroup stores its sums in float32 from registers, each
accumulator in a piece of its own (`thread_pieces`): nothing is set to zero before, and nobody
waits. A launch then adds up the pieces in the order of p, so that bits repeat, and rounds.

That launch has a block of one warpgroup for each 64 keys of a head and each 64 columns. It also
rounds the sums of dQ that lie in pieces, of one part (`dq_sum.ByRows`). TMA stores gradients:
threads take longer.

Tried and slower: `sm90_fused` adds up dq of the heads in work alone, which L2 holds, and the last
work tile of a head rounds it and leaves zeros. SigLIP's backward took 1457 us, not 1517; but that
of ViT-L took 767, not 688, and that of 8 x 2048 rows of 16 heads of 128 took 1304, not 1206
(`results/special_cases/`).
"""

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
from pallas_attn.kernels.flash_bwd.key_tiles import KeyTile
from pallas_attn.kernels.flash_bwd.plan import KeyPlan
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.types import DType, GmemRef, Index, RegisterTile
from pallas_attn.kernels.mma import thread_pieces

MOST = 64  # parts that a Config may ask for
Widths = Sequence[int]  # columns of the accumulators of a gradient


# ---- the pieces ----------------------------------------------------------------------------------


class Pieces(NamedTuple):
    """How the pieces of one gradient lie: all of its first accumulator, then all of the next. Those
    of an accumulator go by head (of all batch rows), then by 64 rows, then by part.
    """

    problem: AttentionProblem
    heads: int  # heads of a batch row
    rows: int  # rows of a head
    in_head: int  # pieces of one part of a head, of one accumulator
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


def store_part(
    plan: KeyPlan,
    out: GmemRef,
    work: KeyTile,
    first: Index,
    sums: Sequence[RegisterTile],
    before: Index = 0,
) -> None:
    """Stores what a warpgroup has added up of a gradient: 64 keys from key `first` of its work tile
    on, and columns from `before` on, which are those of whole accumulators.
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
    """Neighbouring columns of a gradient, of accumulators of one width; blocks divide them."""

    first: int  # the first of these columns
    blocks: int  # blocks that take them
    width: int  # columns of a block
    of: int  # columns of an accumulator


def _columns(dtype: DType, dim: int, widths: Widths) -> Iterator[Columns]:
    """Columns of all accumulators, up to a head dim."""
    first = 0
    for width, same in itertools.groupby(widths):
        some = math.gcd(width, 128 // jnp.dtype(dtype).itemsize)
        count = sum(same)
        yield Columns(first, min(count // some, pl.cdiv(dim - first, some)), some, width)
        first += count


class Sums(NamedTuple):
    """A gradient's sums, and how they lie."""

    pieces: Pieces
    array: Any
    dim: int  # columns of the gradient
    widths: Widths

    def columns(self) -> list[Columns]:
        return list(_columns(self.pieces.problem.dtype, self.dim, self.widths))

    def blocks(self) -> int:
        """How many blocks add them up."""
        each, problem = sum(x.blocks for x in self.columns()), self.pieces.problem
        return each * pl.cdiv(self.pieces.rows, ROWS) * problem.batch * self.pieces.heads


def of_dk_dv(plan: KeyPlan, pieces: Sequence[jax.Array], widths: Sequence[Widths]) -> list[Sums]:
    """The parts' sums of dk and dv."""
    dims = plan.problem.head_dim, plan.problem.v_head_dim
    return [Sums(of_keys(plan), *each) for each in zip(pieces, dims, widths, strict=True)]


def of_dq(problem: AttentionProblem, sums: jax.Array, widths: Widths, in_head: int) -> Sums:
    """The sums of dq to which `dq_sum.ByRows` adds."""
    pieces = Pieces(problem, problem.q_heads, problem.q_len, in_head, 1, 0, problem.scale)
    return Sums(pieces, sums, problem.head_dim, widths)


def added(sums: Sequence[Sums]) -> list[jax.Array]:
    """The gradients, by one launch. The first sums, which L2 may have still, are read first."""
    problem = sums[0].pieces.problem
    every = sorted({x.width for each in sums for x in each.columns()})
    static = [each._replace(array=None) for each in sums]
    kernel = plgpu.kernel(
        functools.partial(_kernel, sums=static, widths=every),
        out_type=tuple(
            jax.ShapeDtypeStruct((problem.batch, each.rows, each.heads, dim), problem.dtype)
            for each, _, dim, _ in sums
        ),
        scratch_types=(tuple(panels.scratch((1, ROWS), problem.dtype, n) for n in every),),
        **mosaic.grid_of(block=sum(each.blocks() for each in sums)),
        compiler_params=mosaic.without_barriers(),
        kernel_name="flash_bwd_sums",
    )
    return list(kernel(tuple(each.array for each in sums)))


def _kernel(arrays: tuple[GmemRef, ...], *rest: Any, sums: Sequence[Sums], widths: Widths) -> None:
    *outs, smem = rest
    own = lax.axis_index("block")
    for ref, out, each in zip(arrays, outs, sums, strict=True):
        pieces = each.pieces
        heads = jnp.int32(pieces.problem.batch * pieces.heads)
        rows = jnp.int32(pl.cdiv(pieces.rows, ROWS))
        head, of_rows = lax.rem(own, heads), lax.div(own, heads)
        block, place = lax.div(of_rows, rows), (head, lax.rem(of_rows, rows))
        for some in each.columns():
            staged = smem[widths.index(some.width)]
            add = functools.partial(_add, pieces, (ref, out, staged), some, block, place)
            # lax.div rounds towards 0: block alone does not tell a negative own.
            pl.when((block >= 0) & (own >= 0) & (block < some.blocks))(add)
            block = block - some.blocks
        own = own - each.blocks()
    plgpu.wait_smem_to_gmem(0)


def _add(
    pieces: Pieces,
    where: tuple[GmemRef, GmemRef, panels.Panel],
    columns: Columns,
    block: Index,
    place: tuple[Index, Index],
) -> None:
    """Some columns of 64 rows: the sum over all parts. `where`: the pieces, the gradient, and
    shared memory; `place`: the head, among those of all batch rows, and which 64 rows.
    """
    (ref, out, staged), (first, _, width, of), problem = where, columns, pieces.problem
    head, rows = place
    blocks = of // width
    acc = lax.div(block, jnp.int32(blocks))
    number = acc * pieces.in_all + first * pieces.in_all // of + pieces.number(head, rows, 0)
    number = number * blocks + (block - acc * blocks)
    total = thread_pieces.load(ref, number, (ROWS, width))
    for part in range(1, pieces.parts):
        total = total + thread_pieces.load(ref, number + part * blocks, (ROWS, width))
    total = total if pieces.scale == 1.0 else total * pieces.scale
    staged.tile[0] = total.astype(staged.tile.dtype)
    plgpu.commit_smem()
    batch, own_head = lax.div(head, pieces.heads), lax.rem(head, pieces.heads)
    row = rows * ROWS
    if pieces.block:
        within = lax.rem(row, jnp.int32(pieces.block))
        row = tiles.kv_row(problem, pieces.block, row - within) + within
    at = batch, pl.ds(row, ROWS), own_head, pl.ds(first + block * width, width)
    plgpu.copy_smem_to_gmem(staged.for_tma.at[0], out.at[at])
