"""Which tiles some query sees, and which every query sees whole: by bounds of what a mask function
computes, without computing it for each pair of a query and a key.

A value of a program that depends on queries alone, or on keys alone, is computed for each of them:
the least and the greatest in a tile's rows or columns are its bounds there. What depends on both
has bounds by interval arithmetic, which for a bool are whether every pair is True and whether some
pair may be. Bounds may be wider than what occurs, never narrower: a tile that is empty or whole may
count as seen in part. Where bounds would say little (an operation without a rule, a table that is
read at more than a few places in a tile) there are none, and pairs are to be counted.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._functions import program as _program
from pallas_attn._functions.program import Constant, Operation, Program

LARGEST = np.iinfo(np.int32).max
SURE = 2.0**31 - 2.0**8  # sums and products of int32 that are rounded to less did not wrap
MOST_PLACES = 16  # of a table, read for the bounds of a tile
_WIDE = ("int32", "float32")


class Bounds(NamedTuple):
    """What lies between two values, [B or 1, N or 1, q tiles or 1, kv tiles or 1]."""

    low: Any
    high: Any


class Kinds(NamedTuple):
    """bool[B or 1, N or 1, q tiles, kv tiles]."""

    some: Any  # a query may see a key there
    whole: Any  # every query sees every key


# ---- rules --------------------------------------------------------------------------------------


def _ordered(*values: Any) -> Bounds:
    return Bounds(functools.reduce(jnp.minimum, values), functools.reduce(jnp.maximum, values))


def _counted(function: Callable[..., Any]) -> Callable[..., Bounds]:
    """A rule of int32 that gives up where the same in float32 is too large."""

    def rule(*operands: Bounds) -> Bounds:
        found = function(*operands)
        if found.low.dtype != jnp.int32:
            return found
        rounded = function(*(Bounds(*(x.astype(jnp.float32) for x in b)) for b in operands))
        sure = (rounded.low > -SURE) & (rounded.high < SURE)
        return Bounds(
            jnp.where(sure, found.low, -LARGEST - 1), jnp.where(sure, found.high, LARGEST)
        )

    return rule


def _abs(a: Bounds) -> Bounds:
    least = jnp.maximum(jnp.maximum(a.low, -a.high), jnp.zeros_like(a.low))
    return Bounds(least, jnp.maximum(-a.low, a.high))


def _divided(a: Bounds, b: Bounds) -> Bounds:
    """By one positive number."""
    sure = (b.low == b.high) & (b.low > 0)
    by = jnp.where(sure, b.low, 1)
    low, high = (lax.div(*jnp.broadcast_arrays(x, by)) for x in a)
    return Bounds(jnp.where(sure, low, -LARGEST - 1), jnp.where(sure, high, LARGEST))


def _remainder(a: Bounds, b: Bounds) -> Bounds:
    """Of one positive number; those of a run of numbers that passes no multiple are a run."""
    sure = (b.low == b.high) & (b.low > 0)
    by = jnp.where(sure, b.low, 1)
    low, high, by = jnp.broadcast_arrays(a.low, a.high, by)
    one_sign = (low >= 0) | (high <= 0)
    run = sure & one_sign & (lax.div(low, by) == lax.div(high, by))
    most = jnp.where(sure, by - 1, LARGEST)
    return Bounds(
        jnp.where(run, lax.rem(low, by), jnp.where(low >= 0, 0, -most)),
        jnp.where(run, lax.rem(high, by), jnp.where(high <= 0, 0, most)),
    )


def _both(a: Bounds, b: Bounds) -> Bounds:
    return Bounds(a.low & b.low, a.high & b.high)


def _either(a: Bounds, b: Bounds) -> Bounds:
    return Bounds(a.low | b.low, a.high | b.high)


def _not(a: Bounds) -> Bounds:
    return Bounds(~a.high, ~a.low)


def _differ(a: Bounds, b: Bounds) -> Bounds:
    return _either(_both(a, _not(b)), _both(_not(a), b))


def _equal(a: Bounds, b: Bounds) -> Bounds:
    """Nothing is sure of a NaN: no comparison with it holds."""
    if a.low.dtype == jnp.bool_:
        return _not(_differ(a, b))
    one = (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
    return Bounds(one, ~((a.high < b.low) | (b.high < a.low)))


def _select(which: Bounds, no: Bounds, yes: Bounds) -> Bounds:
    if no.low.dtype == jnp.bool_:
        return _either(_both(which, yes), _both(_not(which), no))
    hull = _ordered(*no, *yes)
    return Bounds(
        jnp.where(which.low, yes.low, jnp.where(which.high, hull.low, no.low)),
        jnp.where(which.low, yes.high, jnp.where(which.high, hull.high, no.high)),
    )


def _each(function: Callable[..., Any]) -> Callable[..., Bounds]:
    """Of a function that grows with each of its operands."""
    return lambda *operands: Bounds(*(function(*side) for side in zip(*operands, strict=True)))


_NUMBERS: dict[str, Callable[..., Bounds]] = {
    "add": _counted(_each(lambda a, b: a + b)),
    "sub": _counted(lambda a, b: Bounds(a.low - b.high, a.high - b.low)),
    "mul": _counted(lambda a, b: _ordered(*(x * y for x in a for y in b))),
    "square": _counted(lambda a: _ordered(*(x * y for x in a for y in a))),
    "neg": _counted(lambda a: Bounds(-a.high, -a.low)),
    "abs": _counted(_abs),
}
_INTEGERS: dict[str, Callable[..., Bounds]] = {
    "div": _divided,
    "rem": _remainder,
    "sign": _each(jnp.sign),
}
_BOOLS: dict[str, Callable[..., Bounds]] = {
    "and": _both,
    "or": _either,
    "not": _not,
    "xor": _differ,
}
_COMPARED: dict[str, Callable[..., Bounds]] = {
    "lt": lambda a, b: Bounds(a.high < b.low, ~(a.low >= b.high)),
    "le": lambda a, b: Bounds(a.high <= b.low, ~(a.low > b.high)),
    "gt": lambda a, b: Bounds(a.low > b.high, ~(a.high <= b.low)),
    "ge": lambda a, b: Bounds(a.low >= b.high, ~(a.high < b.low)),
}
_ANY: dict[str, Callable[..., Bounds]] = {
    "eq": _equal,
    "ne": lambda a, b: _not(_equal(a, b)),
    "select_n": _select,
    "max": _each(jnp.maximum),
    "min": _each(jnp.minimum),
    "clamp": _each(lambda low, x, high: jnp.minimum(jnp.maximum(x, low), high)),
    "copy": lambda a: a,
    "broadcast_in_dim": lambda a: a,
}
RULES: dict[str, Callable[..., Bounds]] = {**_NUMBERS, **_INTEGERS, **_BOOLS, **_COMPARED, **_ANY}


def _has_rule(operation: Operation, given: list[str]) -> bool:
    """Whether there is one; `given`: the types of the operands."""
    name = operation.name
    if name in _ANY:
        return True
    if name in _COMPARED:
        return "bool" not in given
    if name in _BOOLS:
        return set(given) == {"bool"}
    if name == "convert_element_type":
        return given[0] in ("bool", "int32") and operation.dtype in _WIDE
    kinds = {*given, operation.dtype}
    return (
        len(kinds) == 1
        and kinds <= set(("int32",) if name in _INTEGERS else _WIDE)
        and (name in _NUMBERS or name in _INTEGERS)
    )


# ---- what a program needs -----------------------------------------------------------------------


class _Outline(NamedTuple):
    """Of each value of a program: whether the result needs it, its type, and its axes."""

    needed: frozenset[int]
    dtypes: tuple[str, ...]
    axes: tuple[frozenset[int], ...]  # 2: of queries, 3: of keys


@functools.lru_cache(maxsize=256)
def _outline(program: Program) -> _Outline:
    inputs = program.inputs
    dtypes = ["int32"] * inputs
    axes = [frozenset[int]()] * (inputs - 2) + [frozenset((2,)), frozenset((3,))]
    for op in program.operations:
        dtypes.append(op.dtype)
        axes.append(frozenset[int]().union(*(axes[x] for x in op.operands if isinstance(x, int))))
    needed = {program.result} if isinstance(program.result, int) else set()
    for at in reversed(range(len(program.operations))):
        if inputs + at in needed:
            needed |= {x for x in program.operations[at].operands if isinstance(x, int)}
    return _Outline(frozenset(needed), tuple(dtypes), tuple(axes))


def reads_pairs(program: Program) -> bool:
    """Whether an array is read at places that depend on both a query and a key: a table of blocks,
    or of distances.
    """
    outline = _outline(program)
    values = enumerate(program.operations, program.inputs)
    pairs = [op for at, op in values if at in outline.needed and len(outline.axes[at]) == 2]
    return any(op.read is not None for op in pairs)


def _is_bounded(program: Program, grid: "Grid") -> bool:
    outline = _outline(program)
    for at, op in enumerate(program.operations, program.inputs):
        if at not in outline.needed or len(outline.axes[at]) < 2:
            continue
        if op.read is not None:
            found = [_width(program, grid, index) for index in op.operands]
            if None in found or math.prod(n for n in found if n) > MOST_PLACES:
                return False
            continue
        given = [outline.dtypes[x] if isinstance(x, int) else x.dtype for x in op.operands]
        if not _has_rule(op, given):
            return False
    return True


def _width(program: Program, grid: "Grid", index: Any) -> int | None:
    """How many places an index of a read may be at in one tile; None where it is not known before
    anything runs.
    """
    if isinstance(index, Constant):
        return 1
    part = dataclasses.replace(program, result=index)
    needed = _outline(part).needed
    inner = [op for at, op in enumerate(part.operations, part.inputs) if at in needed]
    if not _outline(part).axes[index]:
        return 1
    if grid.offset is None or any(op.read is not None for op in inner):
        return None
    return _width_of(part, grid)


@functools.lru_cache(maxsize=256)
def _width_of(part: Program, grid: "Grid") -> int | None:
    outline, index = _outline(part), part.result
    bare = dataclasses.replace(part, arrays=())
    for at, op in enumerate(part.operations, part.inputs):
        if at in outline.needed and len(outline.axes[at]) == 2:
            given = [outline.dtypes[x] if isinstance(x, int) else x.dtype for x in op.operands]
            if not _has_rule(op, given):
                return None

    def run(first):  # an argument, or XLA would fold everything as it compiles
        found = _Tiles(bare, (), grid, lambda _: None).bounds(grid.numbers(first), index)
        return (found.high - found.low).max()

    return int(_program.computed_now(run, np.array(grid.offset, np.int32))) + 1


# ---- evaluation ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Grid:
    """Tiles of queries and keys."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    rows: int
    block: int
    offset: int | None = 0  # position of the first query; None: it arrives at run time

    @property
    def tiles(self) -> tuple[int, int]:
        return -(-self.q_len // self.rows), -(-self.kv_len // self.block)

    @property
    def first_rows(self) -> np.ndarray:
        return np.arange(self.tiles[0], dtype=np.int32).reshape(1, 1, -1, 1) * self.rows

    @property
    def first_keys(self) -> np.ndarray:
        return np.arange(self.tiles[1], dtype=np.int32).reshape(1, 1, 1, -1) * self.block

    def numbers(self, offset: Any) -> tuple[Any, ...]:
        """Batch row, head, and positions, the last ones again where a tile is not full."""

        def along(axis, n, count):
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

    def ends(self, positions: Any, axis: int) -> Bounds:
        """The first and the last in each tile."""
        size = (self.rows, self.block)[axis - 2]
        split = positions.reshape(*positions.shape[:axis], -1, size, *positions.shape[axis + 1 :])
        firsts, lasts = (
            lax.index_in_dim(split, n, axis + 1, keepdims=False) for n in (0, size - 1)
        )
        return Bounds(firsts, lasts)

    def spread(self, values: Sequence[tuple[Any, int | None]]) -> list[Bounds]:
        """The bounds in each tile of what is known of each query (axis 2), or of each key (axis 3);
        what is known of neither (None) is its own. One reduction finds all that it can: a kernel of
        XLA takes longer to start than to look at some thousand numbers.
        """
        found = [Bounds(x, x) for x, _ in values]
        size = math.gcd(self.rows, self.block)
        alike = size >= 32 and max(self.rows, self.block) <= 4 * size
        groups: dict[Any, list[tuple[int, Any, int]]] = {}
        for n, (x, axis) in enumerate(values):
            if axis is not None:
                kind = np.dtype(np.int32) if x.dtype == jnp.bool_ else x.dtype
                own = size if alike else (self.rows, self.block)[axis - 2]
                groups.setdefault((kind, own), []).append((n, x, axis))
        for (kind, own), members in groups.items():
            lines = [_lines(x, axis, own) for _, x, axis in members]
            flat = [x.reshape(-1, own).astype(kind) for x in lines]
            ends = _extremes(jnp.concatenate(flat))
            stops = np.cumsum([len(x) for x in flat]).tolist()
            for (n, x, axis), line, stop in zip(members, lines, stops, strict=True):
                shape, each = line.shape[:-1], (self.rows, self.block)[axis - 2] // own
                sides = (end[stop - math.prod(shape) : stop].reshape(shape) for end in ends)
                low, high = (_parts(side, axis, each) for side in sides)
                both = functools.reduce(jnp.minimum, low), functools.reduce(jnp.maximum, high)
                found[n] = Bounds(*(side.astype(x.dtype) for side in both))
        return found


def _lines(x: Any, axis: int, size: int) -> Any:
    """[.., numbers]: what is to be bounded, `size` along the axis at a time."""
    shape = (*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis + 1, -1)


def _extremes(lines: Any) -> tuple[Any, Any]:
    """The least and the greatest of each line, [lines]; NaN where there is one."""
    kind: Any = lines.dtype
    ends = (jnp.inf, -jnp.inf)
    if jnp.issubdtype(kind, jnp.integer):
        ends = (jnp.iinfo(kind).max, jnp.iinfo(kind).min)
    starts = tuple(jnp.array(x, kind) for x in ends)

    def both(a, b):
        return jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1])

    return lax.reduce((lines, lines), starts, both, (1,))


def _parts(side: Any, axis: int, each: int) -> list[Any]:
    """What is known of the first of `each` parts of every tile, of the second, .."""
    return [lax.slice_in_dim(side, n, None, each, axis) for n in range(each)]


class _Tiles:
    """The evaluation of a program on tiles."""

    def __init__(
        self, program: Program, arrays: Any, grid: Grid, width: Callable[[Any], int | None]
    ):
        self.program, self.arrays, self.grid, self.width = program, arrays, grid, width
        self.outline, self.values = _outline(program), _program.Broadcasting()

    def bounds(self, numbers: Any, result: Any) -> Bounds:
        held: list[Any] = [*numbers]
        axes, inputs = self.outline.axes, self.program.inputs

        def exact(operand):
            if not isinstance(operand, Constant):
                return held[operand]
            return jnp.asarray(operand.value).reshape((1,) * 4)

        operations = [*enumerate(self.program.operations, inputs)]
        for at, op in operations:
            if at not in self.outline.needed or len(axes[at]) == 2:
                held.append(None)
            elif op.read is not None:
                array, kind = self.arrays[op.read], self.program.arrays[op.read]
                held.append(self.values.read(array, kind, [exact(x) for x in op.operands]))
            else:
                held.append(self.values.compute(op, [exact(x) for x in op.operands]))
        pairs = [
            (at, op) for at, op in operations if at in self.outline.needed and len(axes[at]) == 2
        ]
        used = dict.fromkeys([*(x for _, op in pairs for x in op.operands), result])
        known = self.of_tiles(
            [x for x in used if isinstance(x, Constant) or len(axes[x]) < 2], exact
        )
        for at, op in pairs:
            given = [known[x] for x in op.operands]
            known[at] = self.read(op, given) if op.read is not None else self.apply(op, given)
        return known[result]

    def of_tiles(self, used: list[Any], exact: Callable[[Any], Any]) -> dict[Any, Bounds]:
        """The bounds of what depends on queries alone, on keys alone, or on neither."""
        first = self.program.inputs - 2
        known: dict[Any, Bounds] = {}
        rest: dict[Any, int | None] = {}
        for x in used:
            if x in (first, first + 1):
                known[x] = self.grid.ends(exact(x), 2 + x - first)
            else:
                axes = () if isinstance(x, Constant) else self.outline.axes[x]
                rest[x] = min(axes, default=None)
        found = self.grid.spread([(exact(x), axis) for x, axis in rest.items()])
        return known | dict(zip(rest, found, strict=True))

    def apply(self, op: Operation, given: list[Bounds]) -> Bounds:
        if op.name == "convert_element_type":
            return Bounds(*(x.astype(op.dtype) for x in given[0]))
        return RULES[op.name](*given)

    def read(self, op: Operation, given: list[Bounds]) -> Bounds:
        """Every place in the tile is looked up."""
        assert op.read is not None
        array, kind = self.arrays[op.read], self.program.arrays[op.read]
        steps = [range(self.width(index) or 1) for index in op.operands]
        found = []
        for step in itertools.product(*steps):
            at = [jnp.minimum(x.low + n, x.high) for x, n in zip(given, step, strict=True)]
            found.append(self.values.read(array, kind, at))
        if found[0].dtype == jnp.bool_:
            low, high = (
                functools.reduce(jnp.logical_and, found),
                functools.reduce(jnp.logical_or, found),
            )
            return Bounds(low, high)
        return _ordered(*found)


def kinds(program: Program, arrays: Any, grid: Grid, offset: Any) -> Kinds | None:
    """Of tiles, by a mask function: rows past the last query count as it, and a tile that holds
    fewer keys than others is never whole. None where bounds would not do. `offset`: the position of
    the first query, a number or [B, 1, 1, 1].
    """
    if not _is_bounded(program, grid):
        return None
    width = functools.partial(_width, program, grid)
    found = _Tiles(program, arrays, grid, width).bounds(grid.numbers(offset), program.result)
    full = grid.first_keys + grid.block <= grid.kv_len
    shape = jnp.broadcast_shapes(found.low.shape, (1, 1, *grid.tiles))
    return Kinds(*(jnp.broadcast_to(x, shape) for x in (found.high, found.low & full)))


def within(found: Kinds, grid: Grid, inputs: Any) -> Kinds:
    """What lengths and a mask_array leave of it."""
    some, whole = found
    if inputs.kv_lengths is not None:
        length = inputs.kv_lengths.reshape(-1, 1, 1, 1)
        some = some & (grid.first_keys < length)
        whole = whole & (grid.first_keys + grid.block <= length)
    if inputs.q_lengths is not None:
        some = some & (grid.first_rows < inputs.q_lengths.reshape(-1, 1, 1, 1))
    if inputs.mask_array is not None:
        given = _of_array(inputs.mask_array, grid)
        some, whole = some & given.high, whole & given.low
    shape = jnp.broadcast_shapes(some.shape, whole.shape)
    return Kinds(*(jnp.broadcast_to(x, shape) for x in (some, whole)))


def _of_array(array: Any, grid: Grid) -> Bounds:
    """The bounds of a mask_array in each tile."""
    low = high = array
    for axis, (size, count) in enumerate(zip((grid.rows, grid.block), grid.tiles, strict=True), 2):
        if array.shape[axis] > 1:
            pads = [(0, 0)] * 4
            pads[axis] = (0, size * count - array.shape[axis])
            shape = (*low.shape[:axis], count, size, *low.shape[axis + 1 :])
            low = jnp.pad(low, pads, constant_values=True).reshape(shape).all(axis + 1)
            high = jnp.pad(high, pads).reshape(shape).any(axis + 1)
    return Bounds(low, high)


# ---- kinds that are found once ------------------------------------------------------------------

GRANULE = 64  # queries and keys of a tile


def of_blocks(program: Program, arrays: Any, grid: Grid, offset: Any) -> Any:
    """`stored`, of all tiles. `offset`: see `kinds`."""
    found = kinds(program, arrays, grid, offset)
    return stored(_counted_pairs(program, arrays, grid, offset) if found is None else found)


def _counted_pairs(program: Program, arrays: Any, grid: Grid, offset: Any) -> Kinds:
    """`kinds` by every pair of a query and a key, some rows at a time."""
    b, h, q, kv = grid.numbers(offset)
    slabs = jnp.moveaxis(q.reshape(-1, 1, grid.tiles[0], grid.rows, 1), 2, 0)

    def of_rows(rows: Any) -> Kinds:
        seen = _program.evaluate(program, (b, h, rows, kv), arrays, _program.Broadcasting())
        seen = jnp.broadcast_to(seen, (*jnp.shape(seen)[:2], grid.rows, kv.shape[3]))
        seen = seen.reshape(*seen.shape[:3], grid.tiles[1], grid.block)
        return Kinds(seen.any((2, 4)), seen.all((2, 4)))

    found = lax.map(of_rows, slabs)
    full = grid.first_keys + grid.block <= grid.kv_len
    some, whole = (jnp.moveaxis(x, 0, 2) for x in found)
    return Kinds(some, whole & full)


def stored(found: Kinds) -> Any:
    """uint8: 0 nobody, 1 somebody, 2 everybody."""
    return found.some.astype(jnp.uint8) + (found.some & found.whole).astype(jnp.uint8)


def taken(kept: Any, grid: Grid) -> Kinds | None:
    """`Kinds` of other tiles than `GRANULE`; None where neither size is a multiple of the other.
    Where the grid has more batch rows they repeat.
    """
    if 1 < kept.shape[0] < grid.batch:
        kept = jnp.tile(kept, (grid.batch // kept.shape[0], 1, 1, 1))
    some, whole = kept > 0, kept == 2
    for axis, size, count in zip((2, 3), (grid.rows, grid.block), grid.tiles, strict=True):
        if size % GRANULE and GRANULE % size:
            return None
        if size < GRANULE:
            each = GRANULE // size
            some, whole = (
                lax.slice_in_dim(jnp.repeat(x, each, axis), 0, count, axis=axis)
                for x in (some, whole)
            )
            continue
        pads, n = [(0, 0)] * 4, size // GRANULE
        pads[axis] = (0, count * n - kept.shape[axis])
        some, whole = jnp.pad(some, pads), jnp.pad(whole, pads, constant_values=axis == 2)
        shape = (*some.shape[:axis], count, n, *some.shape[axis + 1 :])
        some, whole = some.reshape(shape).any(axis + 1), whole.reshape(shape).all(axis + 1)
    return Kinds(some, whole)
