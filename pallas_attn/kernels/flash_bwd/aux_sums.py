"""Gradients of the arrays that a score function reads. The gradient of an element is the sum, over
all logits that read it, of dS times a weight: the derivative of the score with respect to the value
of the read.

The index of a read depends on few positions (`_functions.reads`), so kernels first add up over all
other positions, in float32 and in a fixed order; XLA then adds up these sums by element. There are
two kinds of sums:

- The walk of `dbias`, a launch that computes S and dP again. A block owns a tile of sums. Where the
  index depends on no position, the query's or the key's, the sums are those of the gradient of a
  bias [B|1, N|1, T|1, S|1]. Where it depends on their distance (T5), the tile belongs to one
  distance of query tile and kv tile, and all pairs of tiles at this distance are added to it.
- Sums for each key, which `sm90_fused` makes beside dK and dV, since a walk would be a quarter of a
  training step: of reads whose index depends on no position (ALiBi's slopes) or on the key's, and
  of the far tiles of reads by distance, in which the index is the same from some distance on (T5's
  last bucket). The walk then takes the band of the other tiles.

No array of T x S numbers is stored. Reads that depend on both positions in another way are left to
`_autodiff.score_gradients`.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn._functions import reads
from pallas_attn._functions.program import Constant
from pallas_attn._functions.reads import DISTANCE, KEYS, NONE, ROWS, Read
from pallas_attn.kernels.attention import functions, softmax, tiles
from pallas_attn.kernels.attention.logits import LogitTile
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.flash_bwd.key_tiles import KeyTile
from pallas_attn.kernels.flash_bwd.plan import KeyPlan
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import Index, RegisterTile

MOST_COMPARED = 2**27  # largest number of sums times elements to compare; above, sums are sorted
GRAIN = 128  # rows and keys of a tile that counts as far or not


class Far(NamedTuple):
    """Far tiles, of GRAIN rows by GRAIN keys, in which all logits read the same element: those
    whose row tile - key tile is at most `low`, and those where it is at least `high`.
    """

    low: int
    high: int


class KeySum(NamedTuple):
    """A sum for each key, made by the kernel of dK and dV. `side`: 0 for the sum over all queries;
    -1 for the far tiles with queries before the keys, 1 for those with queries after the keys.
    """

    read: Read
    side: int = 0


class LogitSums(NamedTuple):
    """Sums over logits, which XLA adds up by element. `values`: [B|1, N|1, T|1, S|1], or for reads
    by distance [B|1, N|1, diagonals, rows of a tile, keys of a tile].
    """

    values: jax.Array
    read: Read
    side: int = 0  # side of the KeySum that they come from
    far: Far | None = None  # tiles that the sums leave out


class Diagonals(NamedTuple):
    """The distances, query tile - kv tile counted in kv tiles, at which some query may see a key:
    `first` and the `tiles - 1` that follow.
    """

    first: int
    tiles: int
    ratio: int  # kv tiles with as many keys as a query tile has rows


def all_reads(problem: AttentionProblem) -> list[Read]:
    """The reads of all arrays whose gradients a backward computes."""
    program = problem.score_program
    assert program is not None
    return [read for n in problem.learned for read in reads.of_array(program, n)]


def key_sums(problem: AttentionProblem) -> tuple[KeySum, ...]:
    """The sums for each key that the kernel of dK and dV makes, over all queries of a kv head."""
    program = problem.score_program
    assert program is not None
    results = []
    for read in all_reads(problem):
        if read.head and problem.group > 1 or reads.derivative(program, read).depends_on(0):
            continue
        if read.along in (NONE, KEYS):
            results.append(KeySum(read))
        elif read.along == DISTANCE:
            results += [KeySum(read, side) for side in far_sides(problem, read)]
    return tuple(results)


def far_of(problem: AttentionProblem, read: Read) -> Far | None:
    """The far tiles of a read by distance; None where they are unknown at trace time."""
    known = read.known and not read.batch and "q_offset" not in problem.arrays
    if not known or problem.score_program is None:
        return None
    offset, heads = problem.q_offset, problem.q_heads if read.head else 1
    first, count = offset + 1 - problem.kv_len, problem.q_len + problem.kv_len - 1
    at = reads.by_distance(problem.score_program, read, heads, first, count)
    differs = np.flatnonzero((at[:, 1:] != at[:, :-1]).any(axis=0))
    if not differs.size:  # all logits read one element
        differs = np.array([count - 1])
    last_low, first_high = first + int(differs[0]), first + int(differs[-1]) + 1
    low, high = last_low - offset - (GRAIN - 1), first_high - offset + GRAIN - 1
    return Far(low // GRAIN, -(-high // GRAIN))


def distances(problem: AttentionProblem) -> tuple[int, int]:
    """The least and the largest row - key that the masks show, as far as known at trace time."""
    middle = 2**30  # further from both ends than any key
    least, most = -middle, middle
    for mask in (problem.mask, problem.mask_within):
        if not mask.arrives:
            low, high = mask.kv_range(middle, middle + 1, 2 * middle)
            least = max(least, middle - (int(high) - 1) - problem.q_offset)
            most = min(most, middle - int(low) - problem.q_offset)
    return least, most


def far_sides(problem: AttentionProblem, read: Read) -> tuple[int, ...]:
    """The sides (-1, 1: see `KeySum`) on which some query sees keys of far tiles."""
    far = far_of(problem, read)
    if far is None:
        return ()
    least, most = distances(problem)
    nearest, furthest = (least - (GRAIN - 1)) // GRAIN, (most + GRAIN - 1) // GRAIN
    nearest = max(nearest, -((problem.kv_len - 1) // GRAIN))
    furthest = min(furthest, (problem.q_len - 1) // GRAIN)
    return (-1,) * (nearest <= far.low) + (1,) * (furthest >= far.high)


def shape_of_sums(problem: AttentionProblem, read: Read) -> tuple[int, ...]:
    """The shape [B|1, N|1, T|1, S|1] of the sums of a read whose index depends on no distance."""
    batch, heads = separate_heads(problem, read)
    rows = problem.q_len if read.along == ROWS else 1
    return batch, heads, rows, problem.kv_len if read.along == KEYS else 1


def separate_heads(problem: AttentionProblem, read: Read) -> tuple[int, int]:
    """Numbers of batch rows and of heads that have sums of their own; 1 where all share them."""
    by_batch = read.batch or ("q_offset" in problem.arrays and read.along in (ROWS, DISTANCE))
    return problem.batch if by_batch else 1, problem.q_heads if read.head else 1


def diagonals(problem: AttentionProblem, rows: int, keys: int, far: Far | None = None) -> Diagonals:
    """The distances of query tiles of `rows` rows and kv tiles of `keys` keys that are not covered
    by far tiles.
    """
    ratio = rows // keys
    first, end = 1 - -(-problem.kv_len // keys), (-(-problem.q_len // rows) - 1) * ratio + 1
    if far is not None:
        least, most = (far.low + 1) * GRAIN, (far.high - 1) * GRAIN
        first = max(first, -(-(least - (GRAIN - 1) - rows + 1) // keys))
        end = min(end, (most + GRAIN - 1 + keys - 1) // keys + 1)
    if "q_offset" not in problem.arrays:
        nearest, furthest = distances(problem)
        first = max(first, -(-(nearest - rows + 1) // keys))
        end = min(end, (furthest + keys - 1) // keys + 1)
    return Diagonals(first, max(1, end - first), ratio)


def weight(
    ctx: KernelContext, place: LogitTile, read: Read, s: RegisterTile | None, seen: RegisterTile
) -> RegisterTile | float:
    """The derivative of the score function with respect to a read, on a tile of logits. `s`: scores
    before the scale; None where the derivative does not depend on the score. `seen`: the logits
    whose dS may be other than 0.
    """
    problem = ctx.plan.problem
    program = problem.score_program
    assert program is not None
    slope = reads.derivative(program, read)
    if isinstance(slope.result, Constant):
        return float(slope.result.value)
    if "q_offset" not in problem.arrays and _last_position(problem) < reads.MOST_IN_FLOATS:
        slope = reads.in_floats(slope)
    aux = reads.derivative_arrays(program, read, ctx.refs.score_aux)
    if s is not None:
        s = s * problem.scale
        if problem.softcap is not None:
            s = softmax.softcap(s, problem.softcap)
    by = functions.on_tile(slope, aux, place, s, seen.shape)
    # At queries and keys past the end, dS is 0 and a weight may be infinite or NaN.
    return by if reads.is_finite(slope) else jnp.where(seen, by, 0.0)


def _last_position(problem: AttentionProblem) -> int:
    return max(abs(problem.q_offset) + problem.q_len, problem.kv_len)


def times(ds: RegisterTile, by: RegisterTile | float) -> RegisterTile:
    """dS times a weight, without a multiplication for a weight of 1."""
    return ds if isinstance(by, float) and by == 1.0 else ds * by


# ---- sums for each key, in the kernel of dK and dV -----------------------------------------------


def empty_sums(plan: KeyPlan) -> tuple[RegisterTile, ...]:
    """Zeros for the partial sums of a warpgroup's keys, [ROWS, PARTIALS] for each KeySum. XLA adds
    up the partial sums of a key: a reduction in the kernel would take shared memory, of which none
    is left.
    """
    return (mosaic.filled((tiles.ROWS, softmax.PARTIALS), 0.0),) * len(plan.key_sums)


def add_tile(
    ctx: KernelContext, place: LogitTile, sums: tuple[RegisterTile, ...], ds: RegisterTile
) -> tuple[RegisterTile, ...]:
    """The sums of a warpgroup's keys, with a tile of dS [keys, queries] added to them."""
    results = []
    for (read, side), before in zip(ctx.plan.key_sums, sums, strict=True):
        more = softmax.partials(times(ds, weight(ctx, place, read, None, ds != 0)), operator.add)
        if side:
            far = far_of(ctx.plan.problem, read)
            assert far is not None
            away = lax.div(place.query, jnp.int32(GRAIN)) - lax.div(place.key, jnp.int32(GRAIN))
            counts = away >= far.high if side > 0 else away <= far.low
            more = more * jnp.where(counts, 1.0, 0.0)
        results.append(before + more)
    return tuple(results)


def store_key_sums(
    ctx: KernelContext, work: KeyTile, first: Index, sums: tuple[RegisterTile, ...]
) -> None:
    """Stores the sums of a warpgroup's keys, from key `first` of a work tile on."""
    keys, column = pl.ds(work.key + first, tiles.ROWS), work.part * softmax.PARTIALS
    for n, total in enumerate(sums):
        own = work.batch, work.kv_head, keys, pl.ds(column, softmax.PARTIALS)
        mosaic.store(ctx.refs.aux_sums.at[n, *own], total)


def zero_array(plan: KeyPlan) -> jax.Array:
    """Zeros for the sums of all keys, since keys without a work tile are not stored."""
    problem = plan.problem
    sizes = (len(plan.key_sums), problem.batch, problem.kv_heads, plan.tiling.padded_keys)
    return jnp.zeros((*sizes, plan.order.parts * softmax.PARTIALS), jnp.float32)


def sums_of_keys(plan: KeyPlan, sums: jax.Array) -> list[LogitSums]:
    """The parts that the sums for each key make; `sums`: the array that the kernel has filled."""
    problem, results = plan.problem, []
    sums = sums[..., : problem.kv_len, :].sum(axis=-1)
    for (read, side), each in zip(plan.key_sums, sums, strict=True):
        shape = (*separate_heads(problem, read), 1, 1) if side else shape_of_sums(problem, read)
        over = tuple(n for n, size in enumerate((shape[0], shape[1], shape[3])) if size == 1)
        results.append(LogitSums(each.sum(axis=over).reshape(shape), read, side))
    return results


class Rest(NamedTuple):
    """A read of which a walk adds up what the sums for each key leave out."""

    read: Read
    far: Far | None  # tiles that the walk leaves out


def rest_of(problem: AttentionProblem, parts: Sequence[LogitSums]) -> list[Rest]:
    """The reads that need a walk; `parts`: sums that the kernel of dK and dV has made."""
    results = []
    for read in all_reads(problem):
        sides = {part.side for part in parts if part.read == read}
        if 0 in sides:
            continue
        has_far_tiles = read.along == DISTANCE and sides.issuperset(far_sides(problem, read))
        results.append(Rest(read, far_of(problem, read) if has_far_tiles else None))
    return results


# ---- sums by element, by XLA ---------------------------------------------------------------------


def gradients(
    problem: AttentionProblem, inputs: AttentionInputs, parts: Sequence[LogitSums]
) -> tuple[Any, ...]:
    """The float32 gradients of `inputs.score_aux`; None for arrays that are not in `learned`."""
    program = problem.score_program
    assert program is not None
    totals: dict[int, Any] = dict.fromkeys(problem.learned)
    for part in parts:
        shape = program.arrays[part.read.array][0]
        numbers, values = _numbers_of(problem, inputs, part)
        at = reads.index(program, part.read, numbers, inputs.score_aux)
        at = jnp.broadcast_to(at, values.shape).reshape(-1)
        total = sums_by_element(values.reshape(-1), at, math.prod(shape)).reshape(shape)
        before = totals[part.read.array]
        totals[part.read.array] = total if before is None else before + total
    return tuple(totals.get(n) for n in range(len(inputs.score_aux)))


def _numbers_of(
    problem: AttentionProblem, inputs: AttentionInputs, part: LogitSums
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """(batch rows, heads, positions of queries and of keys) at which a part's sums were read, and
    the sums; the former broadcast to the latter. Sums by distance are added up along the diagonals
    of their tiles.
    """
    values = part.values

    def along(axis: int, x: jax.Array) -> jax.Array:
        return jnp.expand_dims(x, tuple(n for n in range(4) if n != axis))

    def counted(axis: int) -> jax.Array:
        return along(axis, jnp.arange(values.shape[axis], dtype=jnp.int32))

    zero = jnp.zeros((1,) * 4, jnp.int32)
    offset = along(0, jnp.atleast_1d(jnp.asarray(problem.q_offset, jnp.int32)))
    if inputs.q_offset is not None and values.shape[0] == problem.batch:
        offset = along(0, inputs.q_offset)
    if part.side:
        furthest = problem.q_len - 1 if part.side > 0 else 1 - problem.kv_len
        return (counted(0), counted(1), offset + furthest, zero), values
    if part.read.along != DISTANCE:
        return (counted(0), counted(1), offset + counted(2), counted(3)), values
    *_, rows, keys = values.shape
    values = along_diagonals(values)
    tile = along(2, jnp.arange(values.shape[2], dtype=jnp.int32))
    tile = (tile + diagonals(problem, rows, keys, part.far).first) * keys
    distance = tile + along(3, jnp.arange(values.shape[3], dtype=jnp.int32)) - (keys - 1)
    return (counted(0), counted(1), offset + distance, zero), values


def along_diagonals(sums: jax.Array) -> jax.Array:
    """[.., rows, keys] -> [.., rows + keys - 1]: sums along row - key = 1 - keys, 2 - keys, .."""
    *axes, rows, keys = sums.shape
    width = rows + keys
    pads = [(0, 0)] * (len(axes) + 1) + [(0, rows)]
    flat = jnp.pad(sums[..., ::-1], pads).reshape(*axes, rows * width)
    skewed = flat[..., : rows * (width - 1)].reshape(*axes, rows, width - 1)  # row r shifted by r
    return skewed.sum(axis=-2)


def sums_by_element(values: jax.Array, at: jax.Array, size: int) -> jax.Array:
    """float32[size]: for each element, the sum of the values with its index in `at`, in order."""
    if values.size * size <= MOST_COMPARED:
        places = jnp.arange(size, dtype=jnp.int32)
        return jnp.where(at[None] == places[:, None], values[None], 0.0).sum(axis=1)
    at, values = lax.sort((at, values), num_keys=1, is_stable=True)

    def combine(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        (place, total), (after, more) = a, b
        return after, jnp.where(place == after, total, 0.0) + more

    _, totals = lax.associative_scan(combine, (at, values))
    is_last = jnp.concatenate([at[1:] != at[:-1], jnp.ones(1, bool)])
    places = jnp.where(is_last, at, size)
    return jnp.zeros(size, values.dtype).at[places].set(totals, mode="drop")
