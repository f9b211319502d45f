"""The work units of prefill's kernel: which rows, keys and kv tiles the number of a unit means,
from lengths that are known at run time.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention.plan import Context, Span
from pallas_attn.kernels.attention.score_mod import Tile
from pallas_attn.kernels.mma import packed_rows
from pallas_attn.kernels.prefill import shares, tile_count
from pallas_attn.kernels.prefill.plan import Plan


class Unit(NamedTuple):
    """A q tile and some of its kv tiles."""

    m: Any  # the sequence
    kv_head: Any
    q_tile: Any
    split: Any
    tile: Tile
    span: Span  # kv tiles; lo == hi where there is none
    bad: Any  # whether the result is NaN: too long, never extended, or no such layer
    # Where rows are packed: the first of the sequence, how many it has, and the unit's q tile
    # among those of all sequences.
    first: Any = None
    count: Any = None
    line: Any = None


def _divided(n: Any, by: Any) -> tuple[Any, Any]:
    return lax.div(n, jnp.int32(by)), lax.rem(n, jnp.int32(by))


def unit_of(ctx: Context, number: Any, share: shares.Share | None = None) -> Unit:
    plan, refs = ctx.plan, ctx.refs
    problem, config = plan.problem, plan.config
    q_tiles: Any = plan.q_tiles
    q_len: Any = problem.q_len
    packed, unit = {}, number
    if plan.packed:
        m, sums = tile_count.sequence_of(ctx, number), tile_count.sums_of(ctx)
        before, first = sums[m], refs.starts[m]
        q_tiles = jnp.maximum(sums[m + 1] - before, 1)  # 0 only where there is no unit
        q_len = refs.starts[m + 1] - first
        number = number - before * (problem.kv_heads * config.splits)
    if plan.together > 1:
        some, rest = _divided(number, plan.together * q_tiles * config.splits)
        split, rest = _divided(rest, plan.together * q_tiles)
        q_tile, head = _divided(rest, plan.together)
        head = some * plan.together + head
    else:
        head, rest = _divided(number, q_tiles * config.splits)
        split, q_tile = _divided(rest, q_tiles)
    q_tile = q_tiles - 1 - q_tile  # the last rows see most
    if plan.packed:
        kv_head = head
        line = before + q_tile if share is None else unit + share.block
        packed = {"first": first, "count": q_len, "line": line}
    else:
        m, kv_head = _divided(head, problem.kv_heads)
    length, bad = _keys_of(ctx, m)
    first = lax.div(q_tile * config.warpgroups, jnp.int32(plan.head_chunks))
    last = jnp.minimum((q_tile + 1) * config.warpgroups, _wg_tiles(plan, q_len)) - 1
    last = lax.div(last, jnp.int32(plan.head_chunks))
    row = first * plan.head_rows
    q_len = refs.q_lengths[m] if plan.has("q_lengths") else q_len
    rows = jnp.minimum((last + 1) * plan.head_rows, q_len) - row
    q_offset: Any = problem.q_offset
    if plan.cache is not None:
        q_offset = length - q_len
    elif plan.has("q_offset"):
        q_offset = refs.q_offset[m]
    mask = plan.mask_of(refs, m if plan.cache is None else 0)
    span = plan.unmasked(plan.span(mask, q_offset + row, rows, length), q_offset)
    if plan.has("q_lengths"):
        span = span._replace(hi=jnp.where(rows > 0, span.hi, 0))
    span = span._replace(hi=jnp.maximum(span.hi, span.lo))
    if config.splits > 1:
        each = lax.div(span.hi - span.lo + (config.splits - 1), jnp.int32(config.splits))
        lo = jnp.minimum(span.lo + split * each, span.hi)
        span = span._replace(lo=lo, hi=jnp.minimum(lo + each, span.hi))
    if share is not None:
        lo, hi = (jnp.minimum(x, span.hi) for x in shares.kv_tiles_of(ctx, m, unit, share))
        span = span._replace(lo=lo, hi=hi)
    tile = Tile(m, kv_head, row, q_offset, q_len, length, mask)
    return Unit(m, kv_head, q_tile, split, tile, span, bad, **packed)


def _keys_of(ctx: Context, m: Any) -> tuple[Any, Any]:
    """How many keys of a sequence count, and whether its result is NaN."""
    plan, refs, problem = ctx.plan, ctx.refs, ctx.plan.problem
    if plan.cache is None:
        return refs.lengths[m] if plan.has("kv_lengths") else problem.kv_len, jnp.bool_(False)
    capacity: Any = problem.kv_len if refs.capacities is None else refs.capacities[m]
    length = refs.lengths[m]
    bad = length > capacity
    if refs.new_lengths is not None:
        bad = bad | ((length <= 0) & (refs.new_lengths[m] < 0))
    if refs.layer is not None:
        bad = bad | ~plan.layout.has_layer(refs.layer[0])
    length = jnp.where(bad, 0, jnp.maximum(length, 0))
    return length, bad


def _wg_tiles(plan: Plan, count: Any) -> Any:
    """Warpgroup tiles of a kv head of a sequence that has `count` query rows."""
    if not plan.packed:
        return plan.wg_tiles
    return plan.wg_tiles_of(count, lambda x, y: lax.div(x, jnp.int32(y)))


class WgTile(NamedTuple):
    """The rows of one consumer."""

    number: Any  # of the warpgroup tiles of its kv head
    there: Any  # whether there are such rows
    head: Any  # its first query head
    heads_left: Any  # query heads from that one to the end of the group
    row: Any  # its first query row


def wg_tile_of(plan: Plan, unit: Unit, wg: Any) -> WgTile:
    number, wg_tiles = unit.q_tile * plan.config.warpgroups + wg, _wg_tiles(plan, unit.count)
    row_block, chunk = _divided(jnp.minimum(number, wg_tiles - 1), plan.head_chunks)
    first, group = chunk * plan.tile_heads, plan.problem.group
    head = unit.kv_head * group + first
    there, row = number < wg_tiles, row_block * plan.head_rows
    if plan.packed:
        number = unit.line * plan.config.warpgroups + wg
    return WgTile(number, there, head, group - first, row)


def place_of(plan: Plan, unit: Unit, own: WgTile) -> packed_rows.Place:
    """Where the rows of a consumer lie, where rows are packed."""
    heads = jnp.where(own.there, jnp.minimum(own.heads_left, plan.tile_heads), 0)
    return packed_rows.Place(unit.first + own.row, unit.count - own.row, own.head, heads)
