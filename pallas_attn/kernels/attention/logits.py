"""From scores to logits of the Hopper forward: scale, softcap, bias and every kind of mask, on a
tile of a warpgroup's 64 query rows in registers.

A causal or windowed mask is a range of columns in each row (`mask_columns`). Functions of
positions (`functions`), segments (`segment_spans`), bias and mask_array (`array_tiles`) are
imported where a problem has them.
`tile_logits` has the masks and derivatives of the portable kernels and the backward.
"""

import dataclasses
import functools
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, vector

from pallas_attn._call.problem import AttentionProblem
from pallas_attn._call.special import Special
from pallas_attn.kernels.attention import softmax
from pallas_attn.kernels.attention.tiles import ROWS, KernelContext, LogitTile, QueryRows
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import Index, Layout, RegisterTile

array_tiles = Special("kernels.attention.array_tiles")
functions = Special("kernels.attention.functions")
linear_scores = Special("kernels.attention.linear_scores")
score_tiles = Special("kernels.attention.score_tiles")

LESS, EQUAL = arith.CmpIPredicate.slt, arith.CmpIPredicate.eq


@dataclasses.dataclass(frozen=True)
class LogitRules:
    """How scores become logits."""

    unit: float | None  # turns scores into log2 units, in the softmax; None: logits are in them
    adds: bool  # a bias or a score function adds to scores
    natural: bool = False  # a backward subtracts the lse in natural units
    ragged_keys: bool = False  # the last kv tile may hold rows that are no keys
    linear: bool = False  # the score function is a slope and an offset a row: `linear_scores`

    @classmethod
    def of(
        cls,
        problem: AttentionProblem,
        block_kv: int,
        *,
        natural: bool = False,
        linear: bool = False,
    ) -> "LogitRules":
        """The rules of kv tiles of `block_kv` keys; `natural` and `linear` as the fields."""
        adds = "bias" in problem.arrays or problem.score_program is not None
        unit = None
        if problem.softcap is None and not natural and (linear or not adds):
            unit = softmax.unit_of(problem.scale)
        ragged = "kv_lengths" in problem.arrays or problem.kv_len % block_kv != 0
        return cls(unit, adds, natural, ragged, linear)


def tile_of_rows(
    ctx: KernelContext,
    rows: QueryRows,
    t: Index,
    layout: Layout = mosaic.TILE,
    slot: Index | None = None,
) -> LogitTile:
    """The logits of a warpgroup's rows and kv tile t of their span, which `slot` of the ring holds
    in the Hopper forward.
    """
    tile = rows.tile
    key = rows.kv_tile(t) * ctx.plan.config.block_kv
    where = (tile.batch, tile.head, rows.row, key, tile.q_offset, tile.kv_len, tile.mask)
    in_smem = None
    if slot is not None and ctx.plan.score_tiles:
        in_smem = score_tiles.rows_of(ctx.smem.bias_and_mask, slot, rows.wg)
    return LogitTile(*where, q_axis=0, layout=layout, in_smem=in_smem)


def masked_logits(
    ctx: KernelContext,
    rows: QueryRows,
    t: Index,
    slot: Index,
    s: RegisterTile,
    masked: bool | None,
    whole: tuple[Index, Index] | None = None,
) -> tuple[RegisterTile, RegisterTile | None]:
    """The logits of kv tile t, whose ring entry is `slot`, from its scores `s`, in log2 units if
    `LogitRules.unit` is None; and the `offset` of `softmax.step`, if there is one. `masked` None: a
    branch masks the tile unless t lies in `whole`, (first, one after the last).
    """
    offset = None
    if ctx.plan.logit_rules.linear or ctx.plan.logit_rules.unit is None:
        tile, program = tile_of_rows(ctx, rows, t, slot=slot), ctx.plan.problem.score_program
        if rows.mapping is not None and program is not None:
            tile = rows.mapping.placed(tile, program)
    if ctx.plan.logit_rules.linear:
        s, offset = linear_scores.sloped(ctx, tile, s)
    if ctx.plan.logit_rules.unit is None:
        s, _ = scaled(ctx, tile, s)
    mask = functools.partial(mask_rows, ctx, rows, t, slot)
    if masked is None:
        assert whole is not None
        return lax.cond((t < whole[0]) | (t >= whole[1]), mask, lambda s: s, s), offset
    return (mask(s) if masked else s), offset


def scaled(
    ctx: KernelContext, tile: LogitTile, s: RegisterTile
) -> tuple[RegisterTile, RegisterTile | None]:
    """Scores -> (logits without a mask, in log2 units but for `LogitRules.natural`; their
    derivative by the scaled score, or None: 1). Where `LogitRules.unit` is a number the softmax
    multiplies by it, and this is not called.
    """
    plan, slope = ctx.plan, None
    problem = plan.problem
    unit = 1.0 if plan.logit_rules.natural else softmax.to_log2(1.0)
    if problem.softcap is None and problem.score_program is None:
        s = s * (problem.scale * unit)
    else:
        s = s * problem.scale
        if problem.softcap is not None:
            s = softmax.softcap(s, problem.softcap)
            slope = 1.0 - s * s * (1.0 / problem.softcap**2)
        if problem.score_program is not None:
            s, by_function = functions.score(ctx, tile, s)
            if slope is None:
                slope = by_function
            elif by_function is not None:
                slope = slope * by_function
        s = s * unit
    if "bias" in problem.arrays:
        # The sum comes last: a product there would be fused with the subtraction of the row's max,
        # which is rounded. Where all of a row's bias is -1e10 they differ by 2**9.
        bias = array_tiles.of_array(ctx, "bias", tile, s.shape)
        s = s + bias.astype(jnp.float32) * unit
    return s, slope


def mask_rows(
    ctx: KernelContext, rows: QueryRows, t: Index, slot: Index, s: RegisterTile
) -> RegisterTile:
    """The logits of kv tile t with -inf wherever a query does not see a key."""
    problem, tile, low, high = ctx.plan.problem, rows.tile, None, None
    start = rows.kv_tile(t) * ctx.plan.config.block_kv
    if not tile.mask.is_full:  # a value that nobody uses sends Mosaic on a search for its layout
        low, high = tile.mask.row_bounds(_positions(ctx, rows, start))
    if ctx.plan.logit_rules.ragged_keys:
        end = mosaic.filled(s.shape[:1], tile.kv_len - start, jnp.int32)
        high = end if high is None else jnp.minimum(high, end)
    if problem.mask_program is not None:
        s = _mask_by_function(ctx, rows, tile_of_rows(ctx, rows, t), s, (low, high))
    else:
        s = mask_columns(s, low, high)
    if rows.segments is not None:
        s = rows.segments.mask(t, slot, s)
    if "mask_array" in problem.arrays:
        shown = array_tiles.shown_keys(ctx, tile_of_rows(ctx, rows, t, slot=slot), s.shape)
        s = jnp.where(shown, s, -jnp.inf)
    return s


def _positions(ctx: KernelContext, rows: QueryRows, start: Index) -> RegisterTile:
    """The position of each query row, less `start`."""
    tile = rows.tile
    if "q_positions" in ctx.plan.problem.arrays:
        own = ctx.refs.q_positions.at[tile.batch, pl.ds(rows.row, ROWS)]
        return mosaic.load(own, mosaic.ROW) - start
    first = tile.q_offset + rows.row - start
    if rows.mapping is not None:
        return rows.mapping.row_positions(ROWS, first)
    return mosaic.positions((ROWS,), 0, first)


def _mask_by_function(
    ctx: KernelContext,
    rows: QueryRows,
    tile: LogitTile,
    s: RegisterTile,
    bounds: tuple[RegisterTile | None, RegisterTile | None],
) -> RegisterTile:
    """`mask_rows` where a function hides keys beside each row's `bounds`, (low, high)."""
    words, mapping = None, rows.mapping
    if mapping is not None:
        words = mapping.words(ctx.refs, tile, s.shape[1])
    s = mask_columns(s, *bounds, words=words or ())
    if words is None:
        program = ctx.plan.problem.mask_program
        tile = tile if mapping is None else mapping.placed(tile, program)
        s = jnp.where(functions.seen(ctx, tile, s.shape), s, -jnp.inf)
    return s


# ---- a mask by a range of columns in each row ---------------------------------------------------


def mask_columns(
    s: RegisterTile,
    low: RegisterTile | None,
    high: RegisterTile | None,
    ids: tuple[RegisterTile, RegisterTile] | None = None,
    words: tuple[RegisterTile, ...] = (),
) -> RegisterTile:
    """A tile of float32 logits [64, keys] with -inf in columns below `low` and from `high` on (each
    int32[64], one a row), where the two `ids`, int32[64] and int32[keys], differ, and where a row's
    bit is not set: bit c of word w, int32[64], is of column 32 * w + c.

    Said in jax.numpy a mask compares two tiles of positions. They do not depend on the kv tile but
    for one sum, so that LLVM computes them before the loop over kv tiles and holds them: 32
    registers or more, spilled where there were none left. Here a row's bounds are made relative to
    the columns of the thread that holds it, and columns are numbers in the instructions: a
    comparison and a select for each logit and bound, nothing to hold.
    """
    operands = {"low": low, "high": high, "rows": None, "columns": None}
    if ids is not None:
        operands["rows"], operands["columns"] = ids
    operands |= {f"word{n}": word for n, word in enumerate(words)}
    operands = {name: x for name, x in operands.items() if x is not None}
    if not operands:
        return s
    kinds = {name: mosaic.COLUMN if name == "columns" else mosaic.ROW for name in operands}
    names = tuple(operands)

    def code(s, *args):
        return _cut(s, dict(zip(names, args, strict=True)))

    def twin(s, *args):
        operands, column = dict(zip(names, args, strict=True)), jnp.arange(s.shape[1])[None]
        hidden = jnp.zeros(s.shape, bool)
        if "low" in operands:
            hidden |= column < operands["low"][:, None]
        if "high" in operands:
            hidden |= column >= operands["high"][:, None]
        if "rows" in operands:
            hidden |= operands["rows"][:, None] != operands["columns"][None]
        if words:
            each = jnp.stack([operands[f"word{n}"] for n in range(len(words))], axis=1)
            hidden |= (jnp.repeat(each, 32, axis=1)[:, : s.shape[1]] >> column % 32) & 1 == 0
        return jnp.where(hidden, -jnp.inf, s)

    result = plgpu.ShapeDtypeStruct(s.shape, s.dtype, layout=mosaic.TILE)
    args, types = (s, *operands.values()), (mosaic.TILE, *kinds.values())
    return mosaic.inline(code, twin, args, types, result, traced=True)


def _cut(s: RegisterTile, operands: dict[str, Any]) -> Any:
    """A thread holds two neighbouring columns of each 8, of two rows that are 8 apart."""
    number = ir.IntegerType.get_signless(32)
    thread = arith.index_cast(number, gpu.thread_id(gpu.Dimension.x))
    first = arith.muli(arith.remui(thread, utils.c(4, number)), utils.c(2, number))
    operands = {name: [_each(r) for r in x.registers.flat] for name, x in operands.items()}
    for name in [name for name in ("low", "high") if name in operands]:  # a set has no order
        operands[name] = [arith.subi(bound, first) for (bound,) in operands[name]]
    for word in [name for name in operands if name.startswith("word")]:
        operands[word] = [arith.shrui(bits, first) for (bits,) in operands[word]]
    registers, nothing = s.registers.copy(), utils.c(float("-inf"), ir.F32Type.get())
    for at, register in enumerate(s.registers.flat):
        pair, (block, row) = register, divmod(at, 2)
        for i, logit in enumerate(_each(register)):
            column, terms = utils.c(8 * block + i, number), []
            if "high" in operands:
                terms.append(arith.cmpi(LESS, column, operands["high"][row]))
            if "low" in operands:
                terms.append(arith.cmpi(arith.CmpIPredicate.sge, column, operands["low"][row]))
            if "rows" in operands:
                own, other = operands["rows"][row][0], operands["columns"][block][i]
                terms.append(arith.cmpi(EQUAL, own, other))
            if "word0" in operands:
                bit = utils.c(1 << 8 * (block % 4) + i, number)
                word = arith.andi(operands[f"word{block // 4}"][row], bit)
                terms.append(arith.cmpi(arith.CmpIPredicate.ne, word, utils.c(0, number)))
            seen = functools.reduce(arith.andi, terms)
            pair = vector.insert(arith.select(seen, logit, nothing), pair, [], [i])
        registers[np.unravel_index(at, registers.shape)] = pair
    return mgpu.FragmentedArray(_registers=registers, _layout=s.layout, _is_signed=None)


def _each(register: ir.Value) -> list[ir.Value]:
    return [vector.extract(register, [], [i]) for i in range(ir.VectorType(register.type).shape[0])]
