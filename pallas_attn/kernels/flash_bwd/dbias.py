"""The gradient of a bias: dS, summed over the axes along which the bias is broadcast.

A kernel of its own makes it (`sm90_dbias`, `sm80_dbias`), which computes S and dP once more, since
the tiles of scores that read the same tile of the bias are far apart in the schedules of the other
kernels. A block owns a tile of queries and keys of the bias and walks over the tiles of scores that
read it: all batch rows, heads, query tiles or kv tiles along which the bias has one element. Their
dS add up in registers in float32, in one order. Where the bias has too few tiles to fill the GPU,
the walk is split into chunks, whose sums XLA adds up; XLA also adds up the rows or columns of a
tile along which the bias has one element. No other array of T x S numbers is stored.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn._functions.reads import DISTANCE, Read
from pallas_attn.kernels.attention.tile_scheduler import QueryPlan
from pallas_attn.kernels.attention.tiles import DYNAMIC, KernelContext, mask_of
from pallas_attn.kernels.flash_bwd import aux_sums, operands
from pallas_attn.kernels.flash_bwd.aux_sums import Diagonals, Far, LogitSums
from pallas_attn.kernels.flash_bwd.operands import BackwardRefs
from pallas_attn.kernels.lang.mosaic import MULTIPROCESSORS
from pallas_attn.kernels.lang.types import Index, Predicate
from pallas_attn.masks import Mask

WAVES = 4  # waves of blocks, at most, into which walks are split
OVERHEAD = 2  # time of a block beside its walk, in tiles of scores


# ---- the walk over tiles of scores --------------------------------------------------------------


class BiasWalk(NamedTuple):
    """The tiles of scores that are added up for each tile of the bias; or, for a read of a score
    function, for each tile of its sums (`aux_sums`), which takes the place of a bias tile.
    """

    bias_tiles: tuple[int, ...]  # batch rows, heads, query tiles, kv tiles of the bias
    readers: tuple[int, ...]  # tiles of scores along each axis that read one tile of the bias
    chunks: int
    read: Read | None = None  # None: the bias
    # Reads by distance: each tile belongs to one distance of query tile and kv tile. The last of
    # bias_tiles is the number of distances, and query tiles count among the readers.
    diagonals: Diagonals | None = None
    far: Far | None = None  # tiles of scores that the walk leaves out

    @property
    def steps(self) -> int:
        """Tiles of scores of a chunk."""
        return pl.cdiv(math.prod(self.readers), self.chunks)


class BiasBlock(NamedTuple):
    """A block's tile of the bias, as a number, and its chunk of the walk."""

    bias_tile: Index
    chunk: Index


class BiasStep(NamedTuple):
    """A tile of scores on a block's walk."""

    batch: Index
    head: Index
    row: Index
    key: Index
    q_offset: Index
    q_len: Index
    kv_len: Index
    mask: Mask
    live: Predicate  # some query may see some key
    whole: Predicate  # all of them see all keys


def walk_of(plan: QueryPlan, read: Read | None = None, far: Far | None = None) -> BiasWalk:
    """The walk of the bias, or of a read of a score function without its far tiles."""
    problem = plan.problem
    key_tiles = pl.cdiv(problem.kv_len, plan.config.block_kv)
    scores = (problem.batch, problem.q_heads, plan.tiling.q_tiles, key_tiles)
    if read is not None and read.along == DISTANCE:
        batch, heads = aux_sums.separate_heads(problem, read)
        some = aux_sums.diagonals(problem, plan.tiling.tile_rows, plan.config.block_kv, far)
        own = (batch, heads, 1, some.tiles)
        rest = (scores[0] // batch, scores[1] // heads, plan.tiling.q_tiles, 1)
        return BiasWalk(own, rest, _chunks(math.prod(own), math.prod(rest)), read, some, far)
    shape = problem.bias_shape if read is None else aux_sums.shape_of_sums(problem, read)
    assert shape is not None
    tiles = tuple(1 if n == 1 else m for n, m in zip(shape, scores, strict=True))
    readers = tuple(m // n for n, m in zip(tiles, scores, strict=True))
    return BiasWalk(tiles, readers, _chunks(math.prod(tiles), math.prod(readers)), read)


def _chunks(tiles: int, readers: int) -> int:
    """The number of chunks by which blocks, in waves, are done first."""
    most = min(readers, max(1, WAVES * MULTIPROCESSORS // tiles))

    def time(chunks: int) -> int:
        return pl.cdiv(tiles * chunks, MULTIPROCESSORS) * (pl.cdiv(readers, chunks) + OVERHEAD)

    return min(range(1, most + 1), key=time)


def sees_all_alike(problem: AttentionProblem) -> bool:
    """Whether every query sees every key, as far as arrays and functions of positions say."""
    others = problem.mask_program is not None or DYNAMIC & set(problem.arrays)
    return problem.mask.is_full and not others


def place_of(walk: BiasWalk, bias_tile: Index, n: Index) -> tuple[Index, ...]:
    """Batch row, head, query tile and kv tile of tile of scores n of a tile of the bias."""
    where, rest = [], bias_tile
    for count in reversed(walk.bias_tiles):
        where.append(lax.rem(rest, jnp.int32(count)))
        rest = lax.div(rest, jnp.int32(count))
    rest = n
    for axis, count in enumerate(reversed(walk.readers)):
        where[axis] = where[axis] * 1 if count == 1 else lax.rem(rest, jnp.int32(count))
        rest = lax.div(rest, jnp.int32(count))
    key_tile, q_tile, head, batch = where
    if walk.diagonals is not None:
        key_tile = q_tile * walk.diagonals.ratio - (key_tile + walk.diagonals.first)
    return batch, head, q_tile, key_tile


def bias_step(
    ctx: KernelContext, walk: BiasWalk, bias_tile: Index, n: Index, seen: Index | None = None
) -> BiasStep:
    """Tile of scores n of a tile of the bias. `seen`: what a mask of keys shows of its keys, 0
    none, 2 all.
    """
    plan, refs, _ = ctx
    problem = plan.problem
    batch, head, q_tile, key_tile = place_of(walk, bias_tile, n)
    q_offset: Index = refs.q_offset[batch] if plan.has("q_offset") else problem.q_offset
    kv_len: Index = refs.kv_lengths[batch] if plan.has("kv_lengths") else problem.kv_len
    q_len: Index = refs.q_lengths[batch] if plan.has("q_lengths") else problem.q_len
    rows = plan.tiling.tile_rows
    row = q_tile * rows
    mask, key = mask_of(problem, refs, batch), key_tile * plan.config.block_kv
    span = plan.span(mask, q_offset + row, rows, kv_len)
    live = (n < math.prod(walk.readers)) & (row < q_len)
    live = live & (key_tile >= span.lo) & (key_tile < span.hi)
    if walk.far is not None:
        away = lax.div(row, jnp.int32(aux_sums.GRAIN)) - lax.div(key, jnp.int32(aux_sums.GRAIN))
        live = live & (away > walk.far.low) & (away < walk.far.high)
    whole = (key_tile >= span.full_lo) & (key_tile < span.full_hi)
    if seen is not None:
        live, whole = live & (seen > 0), whole & (seen == 2)
    elif plan.is_listed or {"mask_array", "q_segment_ids"} & set(problem.arrays):
        whole = False
    return BiasStep(batch, head, row, key, q_offset, q_len, kv_len, mask, live, whole)


def sums_shape(plan: QueryPlan, walk: BiasWalk) -> tuple[int, ...]:
    """[chunks, batch rows, heads, rows, keys] of the blocks' sums."""
    *heads, q_tiles, key_tiles = walk.bias_tiles
    rows, keys = plan.tiling.tile_rows, plan.config.block_kv
    if walk.diagonals is not None:
        return walk.chunks, *heads, key_tiles * rows, keys
    return walk.chunks, *heads, q_tiles * rows, key_tiles * keys


def store_place(walk: BiasWalk, block: BiasBlock, shape: tuple[int, int]) -> tuple[Any, ...]:
    """The place of a block's sum, of so many rows and keys, in an array of `sums_shape`."""
    where, rest = [], block.bias_tile
    for count, size in zip(reversed(walk.bias_tiles), (*reversed(shape), 1, 1), strict=True):
        where.append(lax.rem(rest, jnp.int32(count)) * size)
        rest = lax.div(rest, jnp.int32(count))
    key, row, head, batch = where
    if walk.diagonals is not None:
        row = lax.div(key, jnp.int32(shape[1])) * shape[0]
        return block.chunk, batch, head, pl.ds(row, shape[0]), pl.ds(0, shape[1])
    return block.chunk, batch, head, pl.ds(row, shape[0]), pl.ds(key, shape[1])


def folded(sums: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Adds up the chunks, and the rows or columns along axes of length 1 in `shape`, the shape of
    the bias.
    """
    dbias = sums[0] if sums.shape[0] == 1 else sums.sum(axis=0)
    for axis in (2, 3):
        if shape[axis] == 1:
            dbias = dbias.sum(axis=axis, keepdims=True)
    return dbias[:, :, : shape[2], : shape[3]]


# ---- gradients -----------------------------------------------------------------------------------


class Walks(NamedTuple):
    """A kernel that makes the sums of walks."""

    plan: QueryPlan
    refs: BackwardRefs  # the operands of a kernel over query rows
    sums: Callable[[QueryPlan, BiasWalk, BackwardRefs], jax.Array]


def gradients(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    parts: list[LogitSums],
    walks_of: Callable[[Read | None], Walks],
) -> dict[str, Any]:
    """The gradients of a bias and of a score function's arrays, where there are any. `parts`: those
    that the kernel of dK and dV has made; `walks_of`: the kernel for the bias (None), or for reads.
    """
    results = dict[str, Any]()
    if (bias := inputs.bias) is not None and problem.bias_shape is not None:
        plan, refs, sums = walks_of(None)
        made = sums(plan, walk_of(plan), refs)
        is_whole = made.ndim == bias.ndim  # stored as the bias lies
        results["bias"] = made if is_whole else folded(made, bias.shape).astype(bias.dtype)
    if problem.learned:
        plan, refs, sums = walks_of(aux_sums.all_reads(problem)[0])
        for read, far in aux_sums.rest_of(problem, parts):  # a launch each
            walk = walk_of(plan, read, far)
            parts.append(_part_of(plan, walk, sums(plan, walk, refs)))
            refs = operands.ordered_after(refs, parts[-1].values)
        results["score_aux"] = aux_sums.gradients(problem, inputs, parts)
    return results


def _part_of(plan: QueryPlan, walk: BiasWalk, sums: jax.Array) -> LogitSums:
    """The part that the walk of a read makes; `sums`: those of all blocks."""
    assert walk.read is not None
    if walk.diagonals is None:
        return LogitSums(folded(sums, aux_sums.shape_of_sums(plan.problem, walk.read)), walk.read)
    sizes = walk.diagonals.tiles, plan.tiling.tile_rows, plan.config.block_kv
    values = sums.sum(axis=0).reshape(*walk.bias_tiles[:2], *sizes)
    return LogitSums(values, walk.read, far=walk.far)
