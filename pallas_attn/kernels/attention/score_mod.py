"""From scores to logits: scale, softcap, bias and every kind of mask, on a tile in registers."""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, vector

from pallas_attn.kernels.attention import functions, softmax
from pallas_attn.kernels.attention.plan import Context, Span
from pallas_attn.kernels.lang import mosaic
from pallas_attn.masks import Mask

Array = jax.Array
LESS, EQUAL = arith.CmpIPredicate.slt, arith.CmpIPredicate.eq


class Refs(NamedTuple):
    """Global memory. None: not in this problem."""

    q: Any
    k: Any
    v: Any
    v_edge: Any  # [B, block_kv, K, Hv]: the value tile that kv_lengths cuts, 0 past the length
    q_offset: Any
    q_lengths: Any
    kv_lengths: Any
    mask_left: Any  # int32[B], where the bound arrives at run time
    mask_right: Any
    q_segment_ids: Any  # [B, q_tiles * tile_rows]
    kv_segment_ids: Any  # [B, kv_tiles * block_kv]
    segment_spans: Any  # int32[B, 4, q tiles]: a Span's fields; or `tile_scheduler.records`
    bias: Any
    mask_array: Any
    sinks: Any
    schedule: Any  # int32[blocks, n]: see `tile_scheduler.schedule`
    q_positions: Any = None  # int32[B, q_tiles * tile_rows]
    units: Any = None  # float32[2, B, K]: of scores and of outputs, where q, k and v are terms
    out: Any = None  # written
    lse: Any = None  # written
    mask_aux: Any = ()  # see `functions.operands`
    score_aux: Any = ()
    tiles: Any = None  # see `tile_lists.tiles`
    fetching: Any = None  # see `flash_fwd.fetch.Operands`
    counter: Any = None  # int32[1], written: see `flash_fwd.claims`


class Tile(NamedTuple):
    """A work tile: query rows of one head."""

    batch: Any
    head: Any
    row: Any  # the block's first query row
    q_offset: Any  # position of query row 0
    q_len: Any  # None: all rows count
    kv_len: Any
    mask: Mask


class Rows(NamedTuple):
    """The query rows of a warpgroup, and the kv tiles that they need."""

    tile: Tile
    row: Any  # the first of them
    wg: Any
    span: Span
    q_slot: Any = None  # which q tile in shared memory is theirs
    ids: Any = None  # int32[64] in shared memory: their segments
    same_segment: Any = None  # kv tiles [first, second) all of whose keys are of the rows' segment
    listed: Any = None  # functions.Listed: kv tiles are numbers in a list
    last: Any = None  # the last kv tile of the span, in a list

    def knowing(self, number: Any) -> "Rows":
        """The same, asked for one kv tile, which has been read; None: it has not."""
        if number is None:
            return self
        return self._replace(listed=functions.Known(number))

    def kv_tile(self, t: Any) -> Any:
        """The kv tile that is number t of the span."""
        return t if self.listed is None else self.listed.tile(t)


class Place(NamedTuple):
    """Which logits a tile holds. Its rows are queries and its columns keys (`q_axis` 0), or the
    other way round (1).
    """

    batch: Any
    head: Any
    query: Any  # the first query row
    key: Any  # the first key
    q_offset: Any
    kv_len: Any
    mask: Mask
    q_axis: int
    numbers: Any = None  # 0, 1, .. of the tile's queries, in shared memory: see `apply_mask`
    # Of each query its head and position, where they are not of one head and one behind the other.
    rows: Any = None
    layout: Any = mosaic.TILE


def logits(
    ctx: Context, rows: Rows, t: Any, s: Any, masked: bool, layout: Any = mosaic.TILE
) -> Any:
    """The scores of kv tile t -> logits, in log2 units if `plan.unit` is None."""
    return logits_and_slope(ctx, _place(ctx, rows, t, layout), s, masked)[0]


def _place(ctx: Context, rows: Rows, t: Any, layout: Any = mosaic.TILE) -> Place:
    """That of a warpgroup's rows and kv tile t."""
    tile = rows.tile
    start = rows.kv_tile(t) * ctx.plan.config.block_kv
    where = (tile.batch, tile.head, rows.row, start, tile.q_offset, tile.kv_len, tile.mask)
    return Place(*where, q_axis=0, layout=layout)


def logits_by_row_bounds(
    ctx: Context, rows: Rows, t: Any, s: Any, masked: Any, kv_ids: Any, full: Any = None
) -> tuple[Any, Any]:
    """(`logits` of a warpgroup's 64 rows, where the mask is a range of columns in each row; what
    the softmax is to add to them, or None).

    `kv_ids`: the kv tile's segments in shared memory, where there are any. `masked` None: a branch
    masks the tile unless t lies in `full`, which is (first, one after the last).
    """
    offset = None
    if ctx.plan.linear_score:
        given, offset = functions.linear_score(ctx, _place(ctx, rows, t), s)
    else:
        given = logits(ctx, rows, t, s, False)
    cut = functools.partial(_mask_rows, ctx, rows, t, kv_ids)
    if masked is None:
        low, high = full
        return lax.cond((t < low) | (t >= high), cut, lambda s: s, given), offset
    return cut(given) if masked else given, offset


def _mask_rows(ctx: Context, rows: Rows, t: Any, kv_ids: Any, s: Any) -> Any:
    plan, tile, low, high = ctx.plan, rows.tile, None, None
    start = rows.kv_tile(t) * plan.config.block_kv
    if not tile.mask.is_full:  # what nobody uses sends Mosaic on a search for its layout
        if plan.has("q_positions"):
            own = ctx.refs.q_positions.at[tile.batch, pl.ds(rows.row, s.shape[0])]
            position = mosaic.load(own, mosaic.ROW) - start
        else:
            position = plan.row_positions(s.shape[0], tile.q_offset + rows.row - start)
        low, high = tile.mask.row_bounds(position)
    if plan.ragged_keys:
        end = mosaic.filled(s.shape[:1], tile.kv_len - start, jnp.int32)
        high = end if high is None else jnp.minimum(high, end)
    place = _place(ctx, rows, t)
    words = plan.words(ctx.refs, place, s.shape[1]) if plan.is_listed else None
    s = mask_columns(s, low, high, words=words or ())
    if rows.ids is not None:

        def within_segments(s):
            columns = kv_ids.at[pl.ds(0, s.shape[1])]
            ids = (mosaic.load(rows.ids, mosaic.ROW), mosaic.load(columns, mosaic.COLUMN))
            plgpu.commit_smem()  # they have been read, and TMA will write there
            return mask_columns(s, None, None, ids)

        same = (t >= rows.same_segment[0]) & (t < rows.same_segment[1])
        s = lax.cond(same, lambda s: s, within_segments, s)
    if plan.is_listed and words is None:
        seen = functions.seen(ctx, plan.placed(place), s.shape)
        s = jnp.where(seen, s, -jnp.inf)
    if plan.has("mask_array"):
        s = jnp.where(_load_tile(ctx.refs.mask_array, place, s.shape) != 0, s, -jnp.inf)
    return s


def logits_and_slope(ctx: Context, place: Place, s: Any, masked: Any) -> tuple[Any, Any]:
    """(logits, in log2 units if `plan.unit` is None and not `plan.natural`; softcap's derivative
    there, or None). `masked` may be traced: a branch around the mask costs less than a second copy
    of a loop, whose addresses alone spilled 300 bytes a thread.
    """
    (plan, refs, _), slope = ctx, None
    problem = plan.problem
    if plan.unit is None:
        unit = 1.0 if plan.natural else softmax.to_log2(1.0)
        if problem.softcap is None and problem.score_program is None:
            s = s * (problem.scale * unit)
        elif problem.softcap is None:
            s, slope = functions.score(ctx, place, s * problem.scale)
            s = s * unit
        else:
            s = softmax.softcap(s * problem.scale, problem.softcap)
            slope = 1.0 - s * s * (1.0 / problem.softcap**2)
            if problem.score_program is not None:
                s, steeper = functions.score(ctx, place, s)
                slope = slope if steeper is None else slope * steeper
            s = s * unit
        if plan.has("bias"):
            # The sum comes last: a product there would be fused with the subtraction of the row's
            # max, which is rounded. Where all of a row's bias is -1e10 they differ by 2**9.
            s = s + _load_tile(refs.bias, place, s.shape).astype(jnp.float32) * unit
    if isinstance(masked, bool):
        return apply_mask(ctx, place, s) if masked else s, slope
    return lax.cond(masked, lambda s: apply_mask(ctx, place, s), lambda s: s, s), slope


def apply_mask(ctx: Context, place: Place, s: Any) -> Any:
    """A tile of logits with -inf wherever a query does not see a key.

    Positions that are computed would be computed once, before the loop over the tiles, and held in
    32 registers; `place.numbers` are loaded where they are used.
    """
    (plan, refs, _), q_axis = ctx, place.q_axis
    if plan.has("q_positions"):
        own = refs.q_positions.at[place.batch, pl.ds(place.query, s.shape[q_axis])]
        q_pos = _load_vector(own, place, q_axis, s.shape)
    elif place.numbers is None:
        q_pos = mosaic.positions(s.shape, q_axis, place.q_offset + place.query, place.layout)
    else:
        q_pos = _load_vector(place.numbers, place, q_axis, s.shape) + (place.q_offset + place.query)
    seen = place.mask.allows(
        q_pos,
        mosaic.positions(s.shape, 1 - q_axis, place.key, place.layout),
        place.kv_len if plan.ragged_keys else None,
        *_segments(ctx, place, s.shape),
    )
    if plan.has("mask_array"):
        given = _load_tile(refs.mask_array, place, s.shape) != 0
        seen = given if seen is True else seen & given
    if plan.is_listed:
        given = functions.seen(ctx, place, s.shape)
        seen = given if seen is True else seen & given
    return s if seen is True else jnp.where(seen, s, -jnp.inf)


def probabilities(ctx: Context, place: Place, s: Any, lse: Any, masked: Any) -> tuple[Any, Any]:
    """Scores -> (exp(logits - lse), softcap's derivative or None). `lse` is in the logits' units,
    one a query, inf for one that has no key, or None where it has been subtracted from the scores;
    `masked`: see `logits_and_slope`.
    """
    given, slope = logits_and_slope(ctx, place, s, masked)
    across = None if lse is None else lax.broadcast_in_dim(lse, s.shape, [place.q_axis])
    return exponentials(ctx.plan, given, across), slope


def exponentials(plan: Any, given: Any, lse: Any) -> Any:
    """exp(logits - lse)."""
    if plan.unit is not None:
        given = given * plan.unit
    if lse is not None:
        given = given - lse
    if plan.adds_to_logits:  # -1e10, say, beside which the lse is rounded to a multiple of 2**10
        given = jnp.minimum(given, 0.0)
        if plan.has("q_lengths"):  # past which a bias may hold anything
            given = jnp.where(lse < jnp.inf, given, -jnp.inf)
    return jnp.exp2(softmax.to_log2(given) if plan.natural else given)


def _segments(ctx: Context, place: Place, shape: Any) -> tuple[Any, Any]:
    plan, refs, _ = ctx
    if not plan.has("q_segment_ids"):
        return None, None
    q_ids, kv_ids = (
        _load_vector(ids.at[place.batch, pl.ds(start, shape[axis])], place, axis, shape)
        for ids, start, axis in (
            (refs.q_segment_ids, place.query, place.q_axis),
            (refs.kv_segment_ids, place.key, 1 - place.q_axis),
        )
    )
    return q_ids, kv_ids


def _load_vector(ref: Any, place: Place, axis: int, shape: tuple[int, int]) -> Any:
    """A vector along one axis of a tile, broadcast over the other."""
    loaded = mosaic.load(ref, place.layout.reduce(1 - axis))
    return lax.broadcast_in_dim(loaded, shape, [axis])


def _load_tile(ref: Any, place: Place, shape: tuple[int, int]) -> Any:
    """The part of a [B|1, N|1, T|1, S|1] array that belongs to a tile of logits ([B|1, N|1, S|1,
    T|1] where the tile's rows are keys: Mosaic loads no transposed tile).
    """
    batch, heads, *sizes = ref.shape
    where = (place.batch if batch > 1 else 0, place.head if heads > 1 else 0)
    starts = (place.key, place.query) if place.q_axis else (place.query, place.key)
    down, across = (pl.ds(start, size) for start, size in zip(starts, shape, strict=True))
    if min(sizes) > 1:
        return mosaic.load(ref.at[*where, down, across], place.layout)
    if sizes[0] > 1:
        return _load_vector(ref.at[*where, down, 0], place, 0, shape)
    if sizes[1] > 1:
        return _load_vector(ref.at[*where, 0, across], place, 1, shape)
    return mosaic.broadcast_scalar(ref[*where, 0, 0], shape)


# ---- a mask by a range of columns in each row ---------------------------------------------------


def mask_columns(
    s: Array,
    low: Array | None,
    high: Array | None,
    ids: tuple[Array, Array] | None = None,
    words: tuple[Array, ...] = (),
) -> Array:
    """A tile of float32 logits [64, keys] with -inf in columns below `low` and from `high` on (each
    int32[64], one a row), where the two `ids`, int32[64] and int32[keys], differ, and where a row's
    bit is not set: bit c of word w, int32[64], is of column 32 * w + c.

    Said in jax.numpy a mask compares two tiles of positions. They do not depend on the kv tile but
    for one sum, so that LLVM computes them before the loop over kv tiles and holds them: 32
    registers or more, spilled where there were none left. Here a row's bounds are made relative to
    the columns of the thread that holds it, and columns are numbers in the instructions: a
    comparison and a select for each logit and bound, nothing to hold.
    """
    given = {"low": low, "high": high, "rows": None, "columns": None}
    if ids is not None:
        given["rows"], given["columns"] = ids
    given |= {f"word{n}": word for n, word in enumerate(words)}
    given = {name: x for name, x in given.items() if x is not None}
    if not given:
        return s
    kinds = {name: mosaic.COLUMN if name == "columns" else mosaic.ROW for name in given}
    names = tuple(given)

    def code(_, s, *args):
        return _cut(s, dict(zip(names, args, strict=True)))

    def values(s, *args):  # what the interpreter runs
        given, column = dict(zip(names, args, strict=True)), jnp.arange(s.shape[1])[None]
        hidden = jnp.zeros(s.shape, bool)
        if "low" in given:
            hidden |= column < given["low"][:, None]
        if "high" in given:
            hidden |= column >= given["high"][:, None]
        if "rows" in given:
            hidden |= given["rows"][:, None] != given["columns"][None]
        if words:
            each = jnp.stack([given[f"word{n}"] for n in range(len(words))], axis=1)
            hidden |= (jnp.repeat(each, 32, axis=1)[:, : s.shape[1]] >> column % 32) & 1 == 0
        return jnp.where(hidden, -jnp.inf, s)

    inline: Any = code
    inline.values = values
    result = plgpu.ShapeDtypeStruct(s.shape, jnp.float32, layout=mosaic.TILE)
    call = plgpu.inline_mgpu(arg_types=(mosaic.TILE, *kinds.values()), return_type=result)
    return call(inline)(s, *given.values())


def _cut(s: Any, given: dict[str, Any]) -> Any:
    """A thread holds two neighbouring columns of each 8, of two rows that are 8 apart."""
    number = ir.IntegerType.get_signless(32)
    thread = arith.index_cast(number, gpu.thread_id(gpu.Dimension.x))
    first = arith.muli(arith.remui(thread, utils.c(4, number)), utils.c(2, number))
    given = {name: [_each(r) for r in x.registers.flat] for name, x in given.items()}
    for name in [name for name in ("low", "high") if name in given]:  # a set has no order
        given[name] = [arith.subi(bound, first) for (bound,) in given[name]]
    for word in [name for name in given if name.startswith("word")]:
        given[word] = [arith.shrui(bits, first) for (bits,) in given[word]]
    registers, nothing = s.registers.copy(), utils.c(float("-inf"), ir.F32Type.get())
    for at, register in enumerate(s.registers.flat):
        pair, (block, row) = register, divmod(at, 2)
        for i, logit in enumerate(_each(register)):
            column, terms = utils.c(8 * block + i, number), []
            if "high" in given:
                terms.append(arith.cmpi(LESS, column, given["high"][row]))
            if "low" in given:
                terms.append(arith.cmpi(arith.CmpIPredicate.sge, column, given["low"][row]))
            if "rows" in given:
                own, other = given["rows"][row][0], given["columns"][block][i]
                terms.append(arith.cmpi(EQUAL, own, other))
            if "word0" in given:
                bit = utils.c(1 << 8 * (block % 4) + i, number)
                word = arith.andi(given[f"word{block // 4}"][row], bit)
                terms.append(arith.cmpi(arith.CmpIPredicate.ne, word, utils.c(0, number)))
            seen = functools.reduce(arith.andi, terms)
            pair = vector.insert(arith.select(seen, logit, nothing), pair, [], [i])
        registers[np.unravel_index(at, registers.shape)] = pair
    return mgpu.FragmentedArray(_registers=registers, _layout=s.layout, _is_signed=None)


def _each(register: ir.Value) -> list[ir.Value]:
    return [vector.extract(register, [], [i]) for i in range(ir.VectorType(register.type).shape[0])]
