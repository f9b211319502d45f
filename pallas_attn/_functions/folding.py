"""Operations of a program as they are added: constants are folded, equal operations are one, and
those that change nothing are left out.

Mosaic folds arithmetic of integers and bools too, but keeps the positions that went into it. Where
nothing uses them (`q % 1 == 0`) nothing says their layout, which it then searches for, for a minute
and without success. Each rule of its folds (MLIR's dialect arith) that may lose a position is here.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._functions import program as _program
from pallas_attn._functions.program import NO, ZERO, Constant, Kind, Operand, Operation, Program

YES = Constant("bool", "True")
# Results of an operation on equal operands: that operand (None), or a constant.
_OF_EQUAL = {"and": None, "or": None, "max": None, "min": None, "xor": 0, "sub": 0}
_OF_EQUAL |= {"eq": 1, "le": 1, "ge": 1, "ne": 0, "lt": 0, "gt": 0}
_COMMUTE = frozenset(("add", "mul", "and", "or", "xor", "max", "min"))
_NO_SHIFT = dict.fromkeys(("shift_left", "shift_right_logical", "shift_right_arithmetic"), 0)


class Lines:
    """The operations of a program so far. `inputs`: their dtypes."""

    def __init__(self, inputs: Sequence[str]):
        self.inputs = len(inputs)
        self.dtypes = [*inputs]  # dtypes of all values
        self.operations: list[Operation] = []
        self.known: dict[Operation, int] = {}

    def add(self, operation: Operation) -> Operand:
        """The result of an operation, which is added if it is new and needed."""
        if operation.read is None:
            if all(isinstance(x, Constant) for x in operation.operands):
                return _folded(operation)
            result = self._shorter(operation)
            if result is not None:
                return result
        if operation not in self.known:
            self.known[operation] = self.inputs + len(self.operations)
            self.operations.append(operation)
            self.dtypes.append(operation.dtype)
        return self.known[operation]

    def add_all(self, part: Program, first_array: int) -> Operand:
        """The result of a program of the same inputs, whose arrays count from `first_array`."""
        values: list[Operand] = [*range(self.inputs)]
        for op in part.operations:
            operands = tuple(x if isinstance(x, Constant) else values[x] for x in op.operands)
            read = None if op.read is None else op.read + first_array
            values.append(self.add(Operation(op.name, operands, op.dtype, read, op.exponent)))
        return part.result if isinstance(part.result, Constant) else values[part.result]

    def program(self, result: Operand, arrays: Sequence[Kind]) -> tuple[Program, list[int]]:
        """The program of the operations that a result needs; the numbers of the arrays it reads."""
        lines = [*enumerate(self.operations, self.inputs)]
        needed = {result}
        for at, op in reversed(lines):
            needed |= {*op.operands} if at in needed else set()
        kept = [(at, op) for at, op in lines if at in needed]
        values = {n: n for n in range(self.inputs)}
        values |= {at: n for n, (at, _) in enumerate(kept, self.inputs)}
        used = sorted({op.read for _, op in kept if op.read is not None})
        operations = tuple(op.renumbered(values.__getitem__, used.index) for _, op in kept)
        result = result if isinstance(result, Constant) else values[result]
        return Program(self.inputs, operations, result, tuple(arrays[n] for n in used)), used

    # ---- rules: a value that is there already, a constant, or None ------------------------------

    def _shorter(self, op: Operation) -> Operand | None:
        first, *rest = op.operands
        if op.name == "select_n":
            return self._selected(*op.operands)
        if op.name == "integer_pow" and op.exponent in (0, 1):
            return first if op.exponent else _constant(1, op.dtype)
        dtype = self._dtype(first)
        if op.dtype == "float32" and dtype in ("bfloat16", "float16"):
            return self._wide_read(op, first)
        if op.name in ("copy", "broadcast_in_dim", "convert_element_type"):
            return first if dtype == op.dtype else None
        if "int" not in dtype and dtype != "bool":  # -0.0 and NaN are no numbers to shorten
            return None
        if op.name == "not":
            return self._operands(first, "not")[0]
        if len(rest) != 1:
            return None
        for rule in (self._of_positions, self._of_equal, self._with_constant, self._cancelled):
            result = rule(op, first, rest[0])
            if result is not None:
                return result
        return None

    def _wide_read(self, op: Operation, value: Operand) -> Operand | None:
        """A 16-bit number of an array that becomes float32 is read as that: gradients of the array
        are then added up in float32, without a rounding of each.
        """
        at = value - self.inputs if isinstance(value, int) else -1
        if op.name == "convert_element_type" and at >= 0 and self.operations[at].name == "read":
            return self.add(dataclasses.replace(self.operations[at], dtype=op.dtype))
        return None

    def _selected(self, which: Operand, no: Operand, yes: Operand) -> Operand | None:
        if no == yes or which == NO:
            return no
        if which == YES:
            return yes
        if (no, yes) == (NO, YES):
            return which
        for name, result in (("eq", no), ("ne", yes)):  # either, if equal
            if {*self._operands(which, name)} == {no, yes} and "float" not in self._dtype(no):
                return result
        return None

    def _of_positions(self, op: Operation, a: Operand, b: Operand) -> Operand | None:
        """Batch rows, heads and positions of keys are not negative: no index from the end."""
        natural = (self.inputs - 4, self.inputs - 3, self.inputs - 1)
        if b == ZERO and a in natural and op.name in ("lt", "ge"):
            return NO if op.name == "lt" else YES
        return None

    def _of_equal(self, op: Operation, a: Operand, b: Operand) -> Operand | None:
        if a == b and op.name in _OF_EQUAL:
            number = _OF_EQUAL[op.name]
            return a if number is None else _constant(number, op.dtype)
        if a in self._operands(b, "not") or b in self._operands(a, "not"):
            if op.name == "and":
                return _constant(0, op.dtype)
            if op.name in ("or", "xor"):
                return _ones(op.dtype)
        return None

    def _with_constant(self, op: Operation, a: Operand, b: Operand) -> Operand | None:
        """A neutral number leaves the other operand, a number that absorbs is the result."""
        if isinstance(a, Constant) and op.name in _COMMUTE:
            a, b = b, a
        if not isinstance(b, Constant):
            return None
        if op.name == "ne" and b == NO or op.name == "eq" and b == YES:
            return a
        bits = 0 if op.dtype == "bool" else np.iinfo(b.dtype).min
        least, ones = _constant(bits, b.dtype), _ones(b.dtype)
        most = ones if op.dtype == "bool" else _constant(np.iinfo(b.dtype).max, b.dtype)
        zero, unit = _constant(0, b.dtype), _constant(1, b.dtype)
        neutral = {"add": zero, "sub": zero, "or": zero, "xor": zero, "and": ones, "mul": unit}
        neutral |= {"div": unit, "max": least, "min": most} | dict.fromkeys(_NO_SHIFT, zero)
        absorbing = {"mul": zero, "and": zero, "or": ones, "max": most, "min": least}
        if neutral.get(op.name) == b:
            return a
        if op.name == "rem" and b == unit:
            return zero
        return b if absorbing.get(op.name) == b else None

    def _cancelled(self, op: Operation, a: Operand, b: Operand) -> Operand | None:
        """(x + y) - y, (x - y) + y, x - (x - y), x ^ (x ^ y) and (x - y) - x."""
        for x, other in ((a, b), (b, a)):
            if op.name == "add" and x in self._operands(other, "sub")[1:]:
                return self._operands(other, "sub")[0]
            if op.name == "xor" and x in self._operands(other, "xor"):
                return self._other(other, "xor", x)
        if op.name != "sub":
            return None
        if b in self._operands(a, "add"):
            return self._other(a, "add", b)
        if a in self._operands(b, "sub")[:1]:
            return self._operands(b, "sub")[1]
        if b in self._operands(a, "sub")[:1]:
            taken = self._operands(a, "sub")[1]
            return None if taken is None else self.add(Operation("neg", (taken,), op.dtype))
        return None

    def _operands(self, value: Operand, name: str) -> tuple[Operand | None, ...]:
        """The operands of a value that is the result of such an operation, else None each."""
        if isinstance(value, int) and value >= self.inputs:
            op = self.operations[value - self.inputs]
            if op.name == name:
                return op.operands
        return None, None

    def _other(self, value: Operand, name: str, known: Operand) -> Operand | None:
        first, second = self._operands(value, name)
        return second if first == known else first

    def _dtype(self, value: Operand) -> str:
        return value.dtype if isinstance(value, Constant) else self.dtypes[value]


def joined(name: str, *parts: Program) -> tuple[Program, list[int]]:
    """The operation `name` on the results of programs of the same inputs, and the numbers of the
    arrays that it reads, of all the programs' arrays one after the other.
    """
    (inputs,) = {part.inputs for part in parts}
    lines, arrays = Lines(["int32"] * inputs), tuple[Kind, ...]()
    results: list[Operand] = []
    for part in parts:
        results.append(lines.add_all(part, len(arrays)))
        arrays += part.arrays
    return lines.program(lines.add(Operation(name, tuple(results), "bool")), arrays)


def _folded(operation: Operation) -> Constant:
    """The result of an operation on constants."""
    program = Program(0, (operation,), 0)
    with _program.on_cpu(), jax.ensure_compile_time_eval(), jax.enable_x64(False):
        value = _program.evaluate(program, (), (), _program.Broadcasting())
        return _program.constant(value, operation.dtype)


def _constant(number: int, dtype: str) -> Constant:
    return _program.constant(jnp.dtype(dtype).type(number), dtype)


def _ones(dtype: str) -> Constant:
    """All bits set."""
    return YES if dtype == "bool" else _program.constant(~np.dtype(dtype).type(0), dtype)
