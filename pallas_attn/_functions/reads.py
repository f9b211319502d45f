"""Reads of an array by a function of positions: the positions that the index of a read depends on,
and the derivative of the function's result with respect to the value of a read.

The gradient of an element is the sum of dS times this derivative over all logits that read the
element. Where the index depends on few positions, kernels first add up over all the others.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._functions import program as _program
from pallas_attn._functions import tracing
from pallas_attn._functions.folding import Lines
from pallas_attn._functions.program import Constant, Kind, Operand, Operation, Program, Value

# Positions that an index depends on: none, the query's, the key's, their distance, or both.
NONE, ROWS, KEYS, DISTANCE, BOTH = "none", "rows", "keys", "distance", "both"
_COMPARISONS = frozenset(("lt", "le", "gt", "ge", "eq", "ne"))  # depend on a difference alone


class Read(NamedTuple):
    """A read of an array in a program."""

    number: int  # its place among all reads of the program, in order
    array: int
    batch: bool  # whether the index depends on the batch row
    head: bool
    along: str  # positions that the index depends on: NONE, ROWS, KEYS, DISTANCE or BOTH
    known: bool  # whether the index depends on no array


class _Dependence(NamedTuple):
    """The inputs of a program that a value depends on. `linear`: (a, b) where the value is a * q +
    b * kv plus a term that depends on neither position, else None.
    """

    inputs: frozenset[int]
    along: str
    linear: tuple[int, int] | None
    known: bool = True


@functools.lru_cache(maxsize=256)
def of_array(program: Program, array: int) -> tuple[Read, ...]:
    """The reads of an array of a score function."""
    score, batch, head, query, key = range(program.inputs)
    held = [_Dependence(frozenset((n,)), NONE, (0, 0)) for n in (score, batch, head)]
    held += [_Dependence(frozenset((query,)), ROWS, (1, 0))]
    held += [_Dependence(frozenset((key,)), KEYS, (0, 1))]
    reads, number = [], 0
    for op in program.operations:
        value = _of_operation(op, [_of_operand(x, held) for x in op.operands])
        held.append(value if op.read is None else value._replace(known=False))
        if op.read is None:
            continue
        if op.read == array:
            along = BOTH if score in value.inputs else value.along
            by = batch in value.inputs, head in value.inputs
            reads.append(Read(number, array, *by, along, value.known))
        number += 1
    return tuple(reads)


def _of_operand(operand: Operand, held: Sequence[_Dependence]) -> _Dependence:
    if isinstance(operand, Constant):
        return _Dependence(frozenset(), NONE, (0, 0))
    return held[operand]


def _of_operation(op: Operation, operands: Sequence[_Dependence]) -> _Dependence:
    inputs = frozenset[int]().union(*[x.inputs for x in operands])
    known = all(x.known for x in operands)
    linear = _linear(op, [x.linear for x in operands])
    if linear is not None:
        kinds = {(False, False): NONE, (True, False): ROWS, (False, True): KEYS}
        kind = kinds.get((linear[0] != 0, linear[1] != 0), BOTH)
        along = DISTANCE if kind == BOTH and sum(linear) == 0 else kind
        return _Dependence(inputs, along, None if op.name in _COMPARISONS else linear, known)
    kinds_of = {x.along for x in operands} - {NONE}
    along = BOTH if len(kinds_of) > 1 else next(iter(kinds_of), NONE)
    return _Dependence(inputs, along, (0, 0) if along == NONE else None, known)


def _linear(op: Operation, factors: Sequence[tuple[int, int] | None]) -> tuple[int, int] | None:
    if None in factors or op.read is not None:
        return None
    known = [x for x in factors if x is not None]
    if op.dtype != "int32" and op.name not in _COMPARISONS:
        return None
    if op.name == "add":
        return known[0][0] + known[1][0], known[0][1] + known[1][1]
    if op.name == "sub" or op.name in _COMPARISONS:
        return known[0][0] - known[1][0], known[0][1] - known[1][1]
    if op.name == "neg":
        return -known[0][0], -known[0][1]
    if op.name == "mul":
        for operand, other in zip(op.operands, reversed(known), strict=True):
            if isinstance(operand, Constant):
                by = int(operand.value)
                return by * other[0], by * other[1]
    return None


# ---- the derivative with respect to a read -------------------------------------------------------


def derivative(program: Program, read: Read) -> Program:
    """The derivative of the result with respect to the value of a read, a program over the arrays
    `derivative_arrays`.
    """
    return _derivative(program, read.number)[0]


@functools.lru_cache(maxsize=256)
def in_floats(program: Program) -> Program:
    """The same function, with integer sums of positions that it converts to float32 computed in
    float32 from the start: exact for positions below `MOST_IN_FLOATS`. A row or a column of
    positions is then converted in place of a tile; a conversion takes four times as long as an
    addition.
    """
    lines = Lines(["float32"] + ["int32"] * (program.inputs - 1))
    values: list[Operand] = [*range(program.inputs)]
    by_value = dict(enumerate(program.operations, program.inputs))

    def moved(x: Operand) -> Operand:
        return x if isinstance(x, Constant) else values[x]

    @functools.cache
    def terms(x: Operand) -> int:
        """Positions and small constants that make an integer; more than `TERMS`: anything else."""
        if isinstance(x, Constant):
            return 1 if abs(int(x.value)) < MOST_IN_FLOATS else TERMS + 1
        op = by_value.get(x)
        if op is None:
            return 1
        kept = op.name in _KEPT and op.dtype == "int32"
        return sum(map(terms, op.operands)) if kept else TERMS + 1

    def floating(x: Operand) -> Operand:
        op = None if isinstance(x, Constant) else by_value.get(x)
        if op is not None and terms(x) <= TERMS:
            operands = tuple(map(floating, op.operands))
            return lines.add(Operation(op.name, operands, "float32"))
        return lines.add(Operation("convert_element_type", (moved(x),), "float32"))

    for op in program.operations:
        if op.name == "convert_element_type" and op.dtype == "float32":
            values.append(floating(op.operands[0]))
        else:
            operands = tuple(map(moved, op.operands))
            values.append(lines.add(dataclasses.replace(op, operands=operands)))
    return lines.program(moved(program.result), program.arrays)[0]


TERMS = 4  # the most of an integer sum that is computed in float32
MOST_IN_FLOATS = 2**24 // TERMS  # float32 holds all integers up to 2**24
_KEPT = frozenset(("add", "sub", "neg", "max", "min"))  # exact on floats that are integers
# Operations with finite results for finite operands, overflows aside.
_FINITE = frozenset(("add", "sub", "mul", "neg", "abs", "sign", "max", "min", "clamp", "select_n"))
_FINITE |= _COMPARISONS | {"and", "or", "not", "convert_element_type"}


def is_finite(program: Program) -> bool:
    """Whether a program that does not depend on the score is finite at all positions."""
    return all(op.name in _FINITE for op in program.operations) and not program.depends_on(0)


def derivative_arrays(program: Program, read: Read, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The arrays that the program of `derivative` reads, in its order."""
    return tuple(arrays[n] for n in _derivative(program, read.number)[1])


@functools.lru_cache(maxsize=256)
def _derivative(program: Program, number: int) -> tuple[Program, tuple[int, ...]]:
    arrays = [np.zeros(shape, dtype) for shape, dtype in program.arrays]

    def slope(*arguments: jax.Array) -> Any:
        numbers, read = arguments[: program.inputs], arguments[program.inputs :]

        def shifted(by: jax.Array) -> Any:
            return _program.evaluate(program, numbers, read, _ShiftedRead(number, by))

        return jax.grad(shifted)(jnp.float32(0.0))

    dtypes = [jnp.float32] + [jnp.int32] * (program.inputs - 1)
    traced, kept = tracing.trace("score_fn", slope, dtypes, arrays)
    identities = [id(x) for x in arrays]
    return traced, tuple(identities.index(id(x)) for x in kept)


class _ShiftedRead(_program.Broadcasting):
    """Evaluates a program with `by` added to the value of one read."""

    def __init__(self, number: int, by: jax.Array):
        self.left, self.by = number, by

    def read(self, array: Value, kind: Kind, indices: Sequence[Value]) -> Value:
        elements = super().read(array, kind, indices)
        self.left -= 1
        return elements + self.by.astype(elements.dtype) if self.left == -1 else elements


# ---- the index of a read -------------------------------------------------------------------------


class _RecordedRead(_program.Broadcasting):
    """Evaluates a program and records the indices of one read."""

    def __init__(self, number: int):
        self.left = number
        self.indices: Any = None

    def read(self, array: Value, kind: Kind, indices: Sequence[Value]) -> Value:
        self.left -= 1
        if self.left == -1:
            self.indices = tuple(indices)
        return super().read(array, kind, indices)


def index(
    program: Program, read: Read, numbers: Sequence[Any], arrays: Sequence[jax.Array]
) -> jax.Array:
    """int32: the flat index of the element that each logit reads. `numbers`: batch rows, heads,
    positions of queries and of keys, which broadcast.
    """
    values = _RecordedRead(read.number)
    _program.evaluate(program, (jnp.float32(0.0), *numbers), arrays, values)
    flat: Any = jnp.int32(0)
    for at, size in zip(values.indices, program.arrays[read.array][0], strict=True):
        flat = flat * size + jnp.clip(at, 0, size - 1)
    return flat


@functools.lru_cache(maxsize=64)
def by_distance(
    program: Program, read: Read, heads: int, first: int, count: int
) -> np.ndarray[Any, Any]:
    """int32[heads, count]: the flat index of a read at the distances q - kv = first, first + 1, ..;
    the index depends on no array and no batch row.
    """
    head = np.arange(heads, dtype=np.int32)[:, None]
    distance = np.arange(first, first + count, dtype=np.int32)[None]
    zero = np.zeros((1, 1), np.int32)
    with _program.on_cpu(), jax.ensure_compile_time_eval(), jax.enable_x64(False):
        arrays = [jnp.zeros(shape, dtype) for shape, dtype in program.arrays]
        at = index(program, read, [jnp.asarray(x) for x in (zero, head, distance, zero)], arrays)
        return np.broadcast_to(np.asarray(at), (heads, count))
