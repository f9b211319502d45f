"""Tiles that a mask function leaves empty or whole, by bounds instead of every pair.

A value of a program that depends on queries alone, or on keys alone, is computed for each of them:
its extremes in a tile's rows or columns are its bounds there. A value that depends on both has
bounds by interval arithmetic; those of a bool say whether every pair is True, and whether some pair
may be. Bounds may be too wide, never too narrow: an empty or whole tile may count as seen in part.
Where bounds would say little (an operation without a rule, a table read at more than a few places
in a tile) there are none, and pairs have to be counted.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._functions import program as _program
from pallas_attn._functions.program import Constant, Operand, Operation, Program

Array = jax.Array

LARGEST = np.iinfo(np.int32).max
SURE = 2.0**31 - 2.0**8  # int32 sums and products that float32 rounds to less did not wrap
MOST_PLACES = 16  # reads of a table for the bounds of one tile
GRANULE = 64  # queries and keys of a tile whose kind is stored


class Bounds(NamedTuple):
    """The least and the greatest, [B or 1, N or 1, q tiles or 1, kv tiles or 1]."""

    low: Array
    high: Array


class Kinds(NamedTuple):
    """bool[B or 1, N or 1, q tiles, kv tiles]."""

    some: Array  # a query may see a key there
    whole: Array  # every query sees every key


# ---- rules --------------------------------------------------------------------------------------

Rule = Callable[..., Bounds]


def _ordered(*values: Array) -> Bounds:
    return Bounds(functools.reduce(jnp.minimum, values), functools.reduce(jnp.maximum, values))


def _counted(function: Rule) -> Rule:
    """A rule that knows nothing of int32 where the same in float32 is too large."""

    def rule(*operands: Bounds) -> Bounds:
        exact = function(*operands)
        if exact.low.dtype != jnp.int32:
            return exact
        rounded = function(*(Bounds(*(x.astype(jnp.float32) for x in b)) for b in operands))
        return _if_sure((rounded.low > -SURE) & (rounded.high < SURE), exact)

    return rule


def _if_sure(sure: Array, bounds: Bounds) -> Bounds:
    return Bounds(jnp.where(sure, bounds.low, -LARGEST - 1), jnp.where(sure, bounds.high, LARGEST))


def _monotonic(function: Callable[..., Array]) -> Rule:
    """The rule of a function that grows with each of its operands."""
    return lambda *operands: Bounds(*(function(*side) for side in zip(*operands, strict=True)))


def _divisor(b: Bounds) -> tuple[Array, Array]:
    """Whether it is one positive number, and that number, else 1."""
    sure = (b.low == b.high) & (b.low > 0)
    return sure, jnp.where(sure, b.low, 1)


def _divided(a: Bounds, b: Bounds) -> Bounds:
    sure, by = _divisor(b)
    return _if_sure(sure, Bounds(*(lax.div(*jnp.broadcast_arrays(x, by)) for x in a)))


def _remainder(a: Bounds, b: Bounds) -> Bounds:
    """Numbers between two multiples of the divisor have remainders in the same order."""
    sure, by = _divisor(b)
    low, high, by = jnp.broadcast_arrays(a.low, a.high, by)
    one_sign = (low >= 0) | (high <= 0)
    run = sure & one_sign & (lax.div(low, by) == lax.div(high, by))
    most = jnp.where(sure, by - 1, LARGEST)
    return Bounds(
        jnp.where(run, lax.rem(low, by), jnp.where(low >= 0, 0, -most)),
        jnp.where(run, lax.rem(high, by), jnp.where(high <= 0, 0, most)),
    )


def _abs(a: Bounds) -> Bounds:
    least = jnp.maximum(jnp.maximum(a.low, -a.high), jnp.zeros_like(a.low))
    return Bounds(least, jnp.maximum(-a.low, a.high))


_both, _either = _monotonic(lambda a, b: a & b), _monotonic(lambda a, b: a | b)


def _not(a: Bounds) -> Bounds:
    return Bounds(~a.high, ~a.low)


def _differ(a: Bounds, b: Bounds) -> Bounds:
    return _either(_both(a, _not(b)), _both(_not(a), b))


def _equal(a: Bounds, b: Bounds) -> Bounds:
    """A NaN makes nothing sure: no comparison with it holds."""
    if a.low.dtype == jnp.bool_:
        return _not(_differ(a, b))
    same = (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
    return Bounds(same, ~((a.high < b.low) | (b.high < a.low)))


def _select(which: Bounds, no: Bounds, yes: Bounds) -> Bounds:
    if no.low.dtype == jnp.bool_:
        return _either(_both(which, yes), _both(_not(which), no))
    hull = _ordered(*no, *yes)
    return Bounds(
        jnp.where(which.low, yes.low, jnp.where(which.high, hull.low, no.low)),
        jnp.where(which.low, yes.high, jnp.where(which.high, hull.high, no.high)),
    )


_WIDE = frozenset(("int32", "float32"))
_BOOL = frozenset(("bool",))
# Rules by operation, in groups by the operands that they take: numbers (all of one type), int32,
# bools, numbers of any types, anything.
_NUMBERS: dict[str, Rule] = {
    "add": _counted(_monotonic(lambda a, b: a + b)),
    "sub": _counted(lambda a, b: Bounds(a.low - b.high, a.high - b.low)),
    "mul": _counted(lambda a, b: _ordered(*(x * y for x in a for y in b))),
    "square": _counted(lambda a: _ordered(*(x * y for x in a for y in a))),
    "neg": _counted(lambda a: Bounds(-a.high, -a.low)),
    "abs": _counted(_abs),
}
_INTEGERS: dict[str, Rule] = {"div": _divided, "rem": _remainder, "sign": _monotonic(jnp.sign)}
_BOOLS: dict[str, Rule] = {"and": _both, "or": _either, "not": _not, "xor": _differ}
_COMPARISONS: dict[str, Rule] = {
    "lt": lambda a, b: Bounds(a.high < b.low, ~(a.low >= b.high)),
    "le": lambda a, b: Bounds(a.high <= b.low, ~(a.low > b.high)),
    "gt": lambda a, b: Bounds(a.low > b.high, ~(a.high <= b.low)),
    "ge": lambda a, b: Bounds(a.low >= b.high, ~(a.high < b.low)),
}
_ANY: dict[str, Rule] = {
    "eq": _equal,
    "ne": lambda a, b: _not(_equal(a, b)),
    "select_n": _select,
    "max": _monotonic(jnp.maximum),
    "min": _monotonic(jnp.minimum),
    "clamp": _monotonic(lambda low, x, high: jnp.minimum(jnp.maximum(x, low), high)),
    "copy": lambda a: a,
    "broadcast_in_dim": lambda a: a,
}
_RULES = _NUMBERS | _INTEGERS | _BOOLS | _COMPARISONS | _ANY


def _has_rule(operation: Operation, operands: list[str]) -> bool:
    """Whether there is a rule for operands of these types."""
    name, kinds = operation.name, {*operands, operation.dtype}
    if name == "convert_element_type":
        return operands[0] in ("bool", "int32") and operation.dtype in _WIDE
    if name in _BOOLS:
        return _BOOL.issuperset(operands)
    if name in _COMPARISONS:
        return _BOOL.isdisjoint(operands)
    if name in _NUMBERS:
        return len(kinds) == 1 and kinds <= _WIDE
    return name in _ANY or name in _INTEGERS and kinds == {"int32"}


# ---- the values of a program --------------------------------------------------------------------


class _Outline(NamedTuple):
    """Facts of each value of a program: whether the result needs it, its dtype, and the axes that
    it depends on (2: queries, 3: keys).
    """

    needed: frozenset[Operand]
    dtypes: tuple[str, ...]
    axes: tuple[frozenset[int], ...]

    def of_pairs(self, program: Program) -> list[tuple[int, Operation]]:
        """The operations that the result needs and that depend on both queries and keys."""
        lines = enumerate(program.operations, program.inputs)
        return [(at, op) for at, op in lines if at in self.needed and len(self.axes[at]) == 2]


@functools.lru_cache(maxsize=256)
def _outline(program: Program) -> _Outline:
    dtypes = ["int32"] * program.inputs
    axes: list[frozenset[int]] = [frozenset()] * (program.inputs - 2)
    axes += [frozenset((2,)), frozenset((3,))]
    for op in program.operations:
        dtypes.append(op.dtype)
        axes.append(frozenset().union(*(axes[x] for x in op.operands if isinstance(x, int))))
    needed = {program.result}
    for at, op in reversed([*enumerate(program.operations, program.inputs)]):
        needed |= {*op.operands} if at in needed else set()
    return _Outline(frozenset(needed), tuple(dtypes), tuple(axes))


def reads_pairs(program: Program) -> bool:
    """Whether an array is read at places that depend on both a query and a key: a table of blocks,
    or of distances.
    """
    return any(op.read is not None for _, op in _outline(program).of_pairs(program))


def reads_one_place(program: Program, grid: "Grid") -> bool:
    """Whether all pairs of a tile read the same number of each array that is read by pairs."""
    reads = [op for _, op in _outline(program).of_pairs(program) if op.read is not None]
    return all(_places(program, grid, index) == 1 for op in reads for index in op.operands)


def _is_bounded(program: Program, grid: "Grid") -> bool:
    outline = _outline(program)
    for _, op in outline.of_pairs(program):
        if op.read is not None:
            places = [_places(program, grid, index) for index in op.operands]
            if None in places or math.prod(n for n in places if n) > MOST_PLACES:
                return False
            continue
        dtypes = [outline.dtypes[x] if isinstance(x, int) else x.dtype for x in op.operands]
        if not _has_rule(op, dtypes):
            return False
    return True


def _places(program: Program, grid: "Grid", index: Operand) -> int | None:
    """The most values that an index of a read takes in one tile; None if unknown before the call
    runs.
    """
    if isinstance(index, Constant) or not _outline(program).axes[index]:
        return 1
    part = dataclasses.replace(program, result=index)
    needed = _outline(part).needed
    lines = enumerate(part.operations, part.inputs)
    if grid.offset is None or any(op.read is not None for at, op in lines if at in needed):
        return None
    return _places_of(dataclasses.replace(part, arrays=()), grid)


@functools.lru_cache(maxsize=256)
def _places_of(part: Program, grid: "Grid") -> int | None:
    if not _is_bounded(part, grid):
        return None

    def run(first: Array) -> Array:  # an argument, or XLA would fold everything as it compiles
        bounds = _bounds(part, (), grid, grid.numbers(first))
        return (bounds.high - bounds.low).max()

    return int(_program.computed_now(run, np.array(grid.offset, np.int32))) + 1


# ---- tiles --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Grid:
    """Tiles of `rows` queries by `block` keys."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    rows: int
    block: int
    offset: int | None = 0  # position of the first query; None if it arrives at run time

    @property
    def tiles(self) -> tuple[int, int]:
        return -(-self.q_len // self.rows), -(-self.kv_len // self.block)

    @property
    def first_rows(self) -> np.ndarray:
        return np.arange(self.tiles[0], dtype=np.int32).reshape(1, 1, -1, 1) * self.rows

    @property
    def first_keys(self) -> np.ndarray:
        return np.arange(self.tiles[1], dtype=np.int32).reshape(1, 1, 1, -1) * self.block

    def numbers(self, offset: int | Array) -> tuple[Array, ...]:
        """Batch row, head and positions, on axes of their own; tiles that are not full repeat the
        last position.
        """

        def along(axis: int, n: int, count: int) -> Array:
            shape = [1] * 4
            shape[axis] = n
            return jnp.minimum(jnp.arange(n, dtype=jnp.int32), count - 1).reshape(shape)

        q, kv = self.tiles[0] * self.rows, self.tiles[1] * self.block
        return (
            along(0, self.batch, self.batch),
            along(1, self.heads, self.heads),
            along(2, q, self.q_len) + offset,
            along(3, kv, self.kv_len),
        )

    def ends(self, positions: Array, axis: int) -> Bounds:
        """The first and the last position of each tile."""
        split = _split(positions, axis, (self.rows, self.block)[axis - 2])
        return Bounds(*(lax.index_in_dim(split, n, axis + 1, keepdims=False) for n in (0, -1)))

    def extremes(self, values: Sequence[tuple[Array, int | None]]) -> list[Bounds]:
        """Bounds in each tile of values along an axis: queries (2), keys (3), or neither (None).

        Values of a dtype share one reduction, over parts that divide both sizes of a tile: a kernel
        of XLA takes longer to start than to look at some thousand numbers.
        """
        bounds = [Bounds(x, x) for x, _ in values]
        part = math.gcd(self.rows, self.block)
        shared = part >= 32 and max(self.rows, self.block) <= 4 * part
        groups: dict[Any, list[tuple[int, Array, int]]] = {}
        for n, (x, axis) in enumerate(values):
            if axis is not None:
                dtype = np.dtype(np.int32) if x.dtype == jnp.bool_ else x.dtype
                size = part if shared else (self.rows, self.block)[axis - 2]
                groups.setdefault((dtype, size), []).append((n, x, axis))
        for (dtype, size), members in groups.items():
            lines = [jnp.moveaxis(_split(x, axis, size), axis + 1, -1) for _, x, axis in members]
            flat = [x.reshape(-1, size).astype(dtype) for x in lines]
            ends = _least_and_greatest(jnp.concatenate(flat))
            stops = np.cumsum([len(x) for x in flat]).tolist()
            for (n, x, axis), line, stop in zip(members, lines, stops, strict=True):
                shape, parts = line.shape[:-1], (self.rows, self.block)[axis - 2] // size
                low, high = (end[stop - math.prod(shape) : stop].reshape(shape) for end in ends)
                low = functools.reduce(jnp.minimum, _strided(low, axis, parts))
                high = functools.reduce(jnp.maximum, _strided(high, axis, parts))
                bounds[n] = Bounds(low.astype(x.dtype), high.astype(x.dtype))
        return bounds


def _split(x: Array, axis: int, size: int) -> Array:
    """An axis as two: parts, and `size` elements of each."""
    return x.reshape(*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])


def _strided(x: Array, axis: int, parts: int) -> list[Array]:
    """The first of `parts` consecutive elements, the second, and so on."""
    return [lax.slice_in_dim(x, n, None, parts, axis) for n in range(parts)]


def _least_and_greatest(lines: Array) -> tuple[Array, Array]:
    """[lines] each, in one reduction; NaN where a line has one."""
    starts: tuple[float, float] = jnp.inf, -jnp.inf
    if jnp.issubdtype(lines.dtype, jnp.integer):
        starts = jnp.iinfo(lines.dtype).max, jnp.iinfo(lines.dtype).min

    def both(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        return jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1])

    return lax.reduce((lines, lines), tuple(jnp.array(x, lines.dtype) for x in starts), both, (1,))


def _bounds(
    program: Program, arrays: Sequence[Array], grid: Grid, numbers: tuple[Array, ...]
) -> Bounds:
    """The bounds of the result in each tile."""
    outline, values = _outline(program), _program.Broadcasting()
    held: list[Any] = [*numbers]  # values that depend on no axis or one, elsewhere None

    def exact(operand: Operand) -> Array:
        if isinstance(operand, int):
            return held[operand]
        return jnp.asarray(operand.value).reshape((1,) * 4)

    for at, op in enumerate(program.operations, program.inputs):
        if at not in outline.needed or len(outline.axes[at]) == 2:
            held.append(None)
        elif op.read is not None:
            operands = [exact(x) for x in op.operands]
            held.append(values.read(arrays[op.read], program.kind(op), operands))
        else:
            held.append(values.compute(op, [exact(x) for x in op.operands]))
    pairs = outline.of_pairs(program)
    used = dict.fromkeys([*(x for _, op in pairs for x in op.operands), program.result])
    known: dict[Operand, Bounds] = {}
    axes: dict[Operand, int | None] = {}
    for x in used:
        on = frozenset[int]() if isinstance(x, Constant) else outline.axes[x]
        if x in (program.inputs - 2, program.inputs - 1):
            known[x] = grid.ends(exact(x), min(on))
        elif len(on) < 2:
            axes[x] = min(on, default=None)
    extremes = grid.extremes([(exact(x), axis) for x, axis in axes.items()])
    known |= dict(zip(axes, extremes, strict=True))
    for at, op in pairs:
        bounds = [known[x] for x in op.operands]
        if op.read is not None:
            places = [range(_places(program, grid, index) or 1) for index in op.operands]
            known[at] = _read(arrays[op.read], program.kind(op), bounds, places)
        elif op.name == "convert_element_type":
            known[at] = Bounds(*(x.astype(op.dtype) for x in bounds[0]))
        else:
            known[at] = _RULES[op.name](*bounds)
    return known[program.result]


def _read(array: Array, kind: _program.Kind, indices: list[Bounds], places: list[range]) -> Bounds:
    """The bounds of an array at every place in the tile."""
    values = []
    for step in itertools.product(*places):
        at = [jnp.minimum(x.low + n, x.high) for x, n in zip(indices, step, strict=True)]
        values.append(_program.Broadcasting().read(array, kind, at))
    if values[0].dtype != jnp.bool_:
        return _ordered(*values)
    return Bounds(
        functools.reduce(jnp.logical_and, values), functools.reduce(jnp.logical_or, values)
    )


def kinds(
    program: Program, arrays: Sequence[Array], grid: Grid, offset: int | Array
) -> Kinds | None:
    """The kinds of the tiles under a mask function, or None where bounds would say little. A tile
    with fewer keys than others is never whole. `offset`: position of the first query, a number or
    [B, 1, 1, 1].
    """
    if not _is_bounded(program, grid):
        return None
    bounds = _bounds(program, arrays, grid, grid.numbers(offset))
    full = grid.first_keys + grid.block <= grid.kv_len
    shape = jnp.broadcast_shapes(bounds.low.shape, (1, 1, *grid.tiles))
    return Kinds(*(jnp.broadcast_to(x, shape) for x in (bounds.high, bounds.low & full)))


def within(tiles: Kinds, grid: Grid, inputs: Any) -> Kinds:
    """The kinds that lengths and a mask_array leave."""
    some, whole = tiles
    if inputs.kv_lengths is not None:
        length = inputs.kv_lengths.reshape(-1, 1, 1, 1)
        some = some & (grid.first_keys < length)
        whole = whole & (grid.first_keys + grid.block <= length)
    if inputs.q_lengths is not None:
        some = some & (grid.first_rows < inputs.q_lengths.reshape(-1, 1, 1, 1))
    if inputs.mask_array is not None:
        low = high = inputs.mask_array
        for axis, size, count in zip((2, 3), (grid.rows, grid.block), grid.tiles, strict=True):
            if low.shape[axis] > 1:
                low = _filled(low, axis, count, size, True).all(axis + 1)
                high = _filled(high, axis, count, size, False).any(axis + 1)
        some, whole = some & high, whole & low
    shape = jnp.broadcast_shapes(some.shape, whole.shape)
    return Kinds(*(jnp.broadcast_to(x, shape) for x in (some, whole)))


def _filled(x: Array, axis: int, count: int, size: int, fill: bool) -> Array:
    """`_split` of an axis that is filled up to `count` parts of `size`."""
    pads = [(0, 0)] * 4
    pads[axis] = (0, count * size - x.shape[axis])
    return _split(jnp.pad(x, pads, constant_values=fill), axis, size)


# ---- kinds that are stored ----------------------------------------------------------------------


def of_blocks(program: Program, arrays: Sequence[Array], grid: Grid, offset: int | Array) -> Array:
    """uint8 of each tile: 0 nobody sees a key there, 1 somebody, 2 everybody."""
    bounded = kinds(program, arrays, grid, offset)
    return stored(_counted_pairs(program, arrays, grid, offset) if bounded is None else bounded)


def stored(tiles: Kinds) -> Array:
    """Kinds as `of_blocks` has them."""
    return tiles.some.astype(jnp.uint8) + (tiles.some & tiles.whole).astype(jnp.uint8)


def _counted_pairs(
    program: Program, arrays: Sequence[Array], grid: Grid, offset: int | Array
) -> Kinds:
    """`kinds` by every pair of a query and a key, one row of tiles at a time."""
    b, h, q, kv = grid.numbers(offset)
    slabs = jnp.moveaxis(_split(q, 2, grid.rows), 2, 0)

    def of_rows(rows: Array) -> Kinds:
        seen = _program.evaluate(program, (b, h, rows, kv), arrays, _program.Broadcasting())
        seen = jnp.broadcast_to(seen, (*jnp.shape(seen)[:2], grid.rows, kv.shape[3]))
        seen = _split(seen, 3, grid.block)
        return Kinds(seen.any((2, 4)), seen.all((2, 4)))

    some, whole = (jnp.moveaxis(x, 0, 2) for x in lax.map(of_rows, slabs))
    return Kinds(some, whole & (grid.first_keys + grid.block <= grid.kv_len))


def taken(kept: Array, grid: Grid) -> Kinds | None:
    """The kinds of a grid's tiles from stored ones of `GRANULE`; None where neither size is a
    multiple of the other. Batch rows repeat where the grid has more.
    """
    if 1 < kept.shape[0] < grid.batch:
        kept = jnp.tile(kept, (grid.batch // kept.shape[0], 1, 1, 1))
    some, whole = kept > 0, kept == 2
    for axis, size, count in zip((2, 3), (grid.rows, grid.block), grid.tiles, strict=True):
        if size % GRANULE and GRANULE % size:
            return None
        if size < GRANULE:
            some, whole = (jnp.repeat(x, GRANULE // size, axis) for x in (some, whole))
            some, whole = (lax.slice_in_dim(x, 0, count, axis=axis) for x in (some, whole))
        else:
            some = _filled(some, axis, count, size // GRANULE, False).any(axis + 1)
            whole = _filled(whole, axis, count, size // GRANULE, axis == 2).all(axis + 1)
    return Kinds(some, whole)
