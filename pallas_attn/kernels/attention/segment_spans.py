"""The kv tiles that segment ids leave of each query tile, by XLA, and the mask within a tile.

Packed documents are segments: a query sees the keys of its own. `segment_spans` gives a `Span` of
each tile of queries, and `RowSegments` masks those tiles of logits in which segments meet.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionInputs, AttentionProblem, bounds_of
from pallas_attn.kernels.attention.logits import mask_columns
from pallas_attn.kernels.attention.tiles import KernelContext, Span, WorkTile
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import Index, Operand, RegisterTile, SmemRef


class RowSegments(NamedTuple):
    """The segments of a warpgroup's query rows."""

    ids: SmemRef  # int32[64]
    kv_ids: SmemRef  # int32[stages, ..]: of the kv tiles in the ring
    whole: (
        Index  # all keys of the kv tiles from this one to the next field are of the rows' segment
    )
    whole_end: Index

    def mask(self, t: Index, slot: Index, s: RegisterTile) -> RegisterTile:
        """Logits of kv tile t, in `slot` of the ring, with -inf where segments differ."""

        def within_segments(s: RegisterTile) -> RegisterTile:
            columns = self.kv_ids.at[slot].at[pl.ds(0, s.shape[1])]
            ids = (mosaic.load(self.ids, mosaic.ROW), mosaic.load(columns, mosaic.COLUMN))
            plgpu.commit_smem()  # they have been read, and TMA will write there
            return mask_columns(s, None, None, ids)

        same = (t >= self.whole) & (t < self.whole_end)
        return lax.cond(same, lambda s: s, within_segments, s)


def never_empty(problem: AttentionProblem) -> bool:
    """Whether rows without a key take one kv tile all the same, which is masked whole, where there
    are segment ids: a branch around the mainloop would cost every work tile a hundred moves of
    registers, and claims (`claims`) ask for a kv tile.
    """
    others = set(problem.arrays) - {"q_offset", "device"}
    return others == {"q_segment_ids", "kv_segment_ids"}


def narrowed(ctx: KernelContext, tile: WorkTile, span: Span, visible: Span | None) -> Span:
    """A block's span within what segment ids leave of its work tile, and within `visible`, what a
    mask of keys leaves. Beside another mask_array no kv tile is whole.
    """
    plan = ctx.plan
    if plan.has("q_segment_ids"):
        unit = lax.div(tile.row, jnp.int32(plan.tiling.tile_rows))
        fields = (ctx.refs.segment_spans[tile.batch, i, unit] for i in range(4))
        span = span.within(Span(*fields))
    if visible is not None:
        return span.within(visible)
    return span._replace(full_hi=span.full_lo) if plan.has("mask_array") else span


def spans_of(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    fields: dict[str, Operand],
    sizes: tuple[int, int],
    *,
    of_keys: bool = False,
) -> jax.Array:
    """`segment_spans` of a kernel's operands, of tiles of `sizes`, (rows, block): of tiles of
    `rows` queries the tiles of `block` keys; or (`of_keys`) of tiles of `rows` keys those of
    `block` queries.
    """
    ids = fields["q_segment_ids"], fields["kv_segment_ids"]
    if not of_keys:
        return segment_spans(*ids, sizes, _seen_tiles(problem, inputs, fields, sizes))
    seen = _seen_tiles(problem, inputs, fields, sizes[::-1])
    transposed = seen and (seen[0].swapaxes(1, 2), seen[1].swapaxes(1, 2))
    return segment_spans(*ids[::-1], sizes, transposed)


def segment_spans(
    q_ids: jax.Array,
    kv_ids: jax.Array,
    sizes: tuple[int, int],
    seen: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """int32[B, 4, tiles of `rows` queries]: the fields of a Span, by segment ids [B, n] in whole
    tiles of `sizes`, (rows, block), and by `seen`: the pairs of tiles that the mask leaves, and
    leaves whole (None: all).

    A tile's ids lie between its least and its greatest: a kv tile is needed where the two intervals
    intersect, and needs no mask where both tiles hold a single id, the same. Exact for packed
    documents, and safe for any ids: where the whole tiles are not contiguous, none counts as whole.
    In as few steps as XLA needs kernels for, since each costs as much as a work tile: one over the
    ids, one over pairs of tiles, one to finish.
    """
    q_least, q_most, kv_least, kv_most = _extremes(q_ids, kv_ids, *sizes)
    q_least, q_most = q_least[:, :, None], q_most[:, :, None]
    kv_least, kv_most = kv_least[:, None, :], kv_most[:, None, :]
    common = (q_least <= kv_most) & (kv_least <= q_most)
    same = (q_least == q_most) & (kv_least == kv_most) & (q_least == kv_least)
    if seen is not None:
        common, same = common & seen[0], same & seen[1]
    begins = same & ~jnp.pad(same[..., :-1], ((0, 0), (0, 0), (1, 0)))
    count = common.shape[-1]
    at = jnp.arange(count, dtype=jnp.int32)[None, None]
    least = jnp.stack(
        [
            jnp.where(common, at, count),
            jnp.where(same, at, count),
            jnp.where(begins, -at, 1),
            jnp.where(same, -1 - at, 0),
            jnp.where(common, -1 - at, 0),
        ]
    ).min(axis=-1)
    lo, full_lo, last_begin, full_hi, hi = least[0], least[1], -least[2], -least[3], -least[4]
    one_run = last_begin == full_lo
    fields = (jnp.minimum(lo, hi), full_lo, jnp.where(one_run, full_hi, full_lo), hi)
    return jnp.stack(fields, axis=1)


def _seen_tiles(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    fields: dict[str, Operand],
    sizes: tuple[int, int],
) -> tuple[jax.Array, jax.Array] | None:
    """The visible tiles where rows have positions of their own: two bool[B, tiles of `rows`
    queries, tiles of `block` keys], whether some query of a tile may see some key, and whether all
    see all, by the mask and the least and greatest position of a tile.
    """
    if "q_positions" not in problem.arrays:
        return None
    (rows, block), keys = sizes, fields["kv_segment_ids"].shape[1]
    positions = fields["q_positions"]
    positions = positions.reshape(positions.shape[0], -1, rows)
    least, end = positions.min(axis=2)[..., None], positions.max(axis=2)[..., None] + 1
    first = jnp.arange(0, keys, block, dtype=jnp.int32)[None, None]
    bounds = {side: x[:, None, None] for side, x in bounds_of(inputs).items()}
    mask = problem.mask.filled(**bounds)
    lo, hi = mask.kv_range(least, end, keys)
    some = jnp.maximum(lo, first) < jnp.minimum(hi, first + block)
    lo, hi = mask.kv_full_range(least, end, keys)
    return some, (lo <= first) & (first + block <= hi)


def _extremes(q_ids: jax.Array, kv_ids: jax.Array, rows: int, block: int) -> list[jax.Array]:
    """Least and greatest id of each tile: of `rows` queries, then of `block` keys."""
    unit = math.gcd(rows, block)
    ids = jnp.concatenate([q_ids, kv_ids], axis=1)
    ids = ids.reshape(ids.shape[0], -1, unit)
    queries = q_ids.shape[1] // unit
    extremes = []
    for part, tile in ((slice(queries), rows), (slice(queries, None), block)):
        step = tile // unit
        for reduce, pick in ((jnp.min, jnp.minimum), (jnp.max, jnp.maximum)):
            units = reduce(ids, axis=-1)[:, part]
            extremes.append(functools.reduce(pick, [units[:, i::step] for i in range(step)]))
    return extremes
