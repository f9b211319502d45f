"""Functions of positions as values: traced once, compared by their operations, evaluated anywhere.

A user's function of scalars becomes a `Program` (`tracing.trace`): a list of operations, frozen and
hashable, a jit key by value. The reference evaluates it on jax arrays that broadcast, a kernel on
the tiles, rows, columns and scalars of its registers.
"""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

Value = Any  # a jax or NumPy array, or a tile, row, column or scalar of a kernel
Kind = tuple[tuple[int, ...], str]  # shape and dtype of an array


@dataclasses.dataclass(frozen=True)
class Constant:
    """A number in a program; `text` has every bit of it, since NaN does not equal itself."""

    dtype: str
    text: str

    @property
    def value(self) -> np.generic:
        if self.dtype == "bool":
            return np.bool_(self.text == "True")
        number = int(self.text) if "int" in self.dtype else float.fromhex(self.text)
        return jnp.dtype(self.dtype).type(number)


ZERO, NO = Constant("int32", "0"), Constant("bool", "False")
Operand = int | Constant  # the number of a value, or a constant


@dataclasses.dataclass(frozen=True)
class Operation:
    """One line of a program. `read`: the array that `operands` are positions in, or None."""

    name: str
    operands: tuple[Operand, ...]
    dtype: str  # the result's; of a read the array's, or float32 of a 16-bit float
    read: int | None = None
    exponent: int = 0  # for "integer_pow"

    def renumbered(
        self, value: Callable[[int], int], array: Callable[[int], int] = lambda n: n
    ) -> "Operation":
        """The same with other numbers for the values and the array that it takes."""
        operands = tuple(x if isinstance(x, Constant) else value(x) for x in self.operands)
        read = None if self.read is None else array(self.read)
        return dataclasses.replace(self, operands=operands, read=read)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of `inputs` numbers, and of arrays that it reads. Value i is input i, or the
    result of operation i - inputs.
    """

    inputs: int
    operations: tuple[Operation, ...]
    result: Operand
    arrays: tuple[Kind, ...] = ()

    @property
    def result_dtype(self) -> str:
        if isinstance(self.result, Constant):
            return self.result.dtype
        if self.result < self.inputs:
            return "int32" if self.result or self.inputs == 4 else "float32"
        return self.operations[self.result - self.inputs].dtype

    def kind(self, read: Operation) -> Kind:
        """The shape of the array of a read, and the dtype of the result."""
        assert read.read is not None
        return self.arrays[read.read][0], read.dtype

    def depends_on(self, number: int) -> bool:
        """Whether the result may change with an input."""
        reached: set[Operand] = {number}
        for at, operation in enumerate(self.operations, self.inputs):
            if not reached.isdisjoint(operation.operands):
                reached.add(at)
        return self.result in reached


def check(value: Any, maker: str) -> None:
    """ValueError for what is no program, in a record that `maker` makes."""
    if not isinstance(value, Program):
        raise ValueError(
            f"program: expected that of {maker}, got {type(value).__name__}; write {maker}(f, *aux)"
        )


def _alike(*operands: Value) -> list[Value]:
    """The operands cast to their common dtype, as jax.numpy casts them."""
    dtype = jnp.result_type(*operands)
    return [x if x.dtype == dtype else x.astype(dtype) for x in operands]


def _sign(x: Value) -> Value:
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.minimum(jnp.maximum(x, -1), 1)
    return jnp.where(x > 0, 1.0, jnp.where(x < 0, -1.0, x))


def _power(x: Value, exponent: int) -> Value:
    if exponent < 0:
        return 1.0 / _power(x, -exponent)
    product = None
    while exponent:
        if exponent & 1:
            product = x if product is None else product * x
        x, exponent = x * x, exponent >> 1
    return product


# Operations that a function may contain, by the names of jax's primitives.
OPERATIONS: dict[str, Callable[..., Value]] = {
    "add": operator.add,
    "add_any": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": lambda a, b: lax.div(*_alike(a, b)),
    "rem": lambda a, b: lax.rem(*_alike(a, b)),
    "neg": lambda a: 0 - a,
    "abs": lambda a: jnp.maximum(a, 0 - a),
    "sign": _sign,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "clamp": lambda low, x, high: jnp.minimum(jnp.maximum(x, low), high),
    "square": lambda a: a * a,
    "one_minus_square": lambda a: 1 - a * a,
    "integer_pow": _power,  # with the exponent
    "exp": lambda a: jnp.exp2(a * 1.4426950408889634),
    "exp2": jnp.exp2,
    "log": lambda a: jnp.log2(a) * 0.6931471805599453,
    "log2": jnp.log2,
    "tanh": jnp.tanh,
    "logistic": lambda a: 1.0 / (1.0 + jnp.exp2(a * -1.4426950408889634)),
    "sqrt": jnp.sqrt,
    "rsqrt": lax.rsqrt,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": lambda a: a ^ (True if a.dtype == jnp.bool_ else -1),
    "shift_left": lambda a, b: lax.shift_left(*_alike(a, b)),
    "shift_right_logical": lambda a, b: lax.shift_right_logical(*_alike(a, b)),
    "shift_right_arithmetic": lambda a, b: lax.shift_right_arithmetic(*_alike(a, b)),
    "select_n": lambda which, no, yes: jnp.where(which, yes, no),
    "convert_element_type": lambda a: a,  # `evaluate` converts
    "copy": lambda a: a,
    "broadcast_in_dim": lambda a: a,
}
# Operations that Mosaic computes in float32 alone: 16-bit results are rounded afterwards.
_OF_FLOAT32 = frozenset(("exp", "exp2", "log", "log2", "tanh", "logistic", "sqrt", "rsqrt"))
# Operations on 8-bit numbers that kernels, which hold them in 32 bits, compute.
KEEP_BITS = frozenset(("select_n", "max", "min", "clamp", "copy", "broadcast_in_dim"))


def is_narrow(dtype: np.dtype) -> bool:
    """Whether these are numbers of 8 bits or less."""
    return dtype.itemsize == 1 and dtype != jnp.bool_


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """The default device is the CPU, unless jax was told to use GPUs alone."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(RuntimeError):
            stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
        yield


def computed_now(function: Callable[..., Any], *inputs: np.ndarray) -> np.ndarray:
    """The result of a function of arrays, compiled as one program for the CPU, if jax has one,
    whatever is being traced.
    """
    with on_cpu():
        return np.asarray(jax.jit(function).lower(*inputs).compile()(*inputs))


def constant(value: Any, dtype: DTypeLike) -> Constant:
    """A number as a constant."""
    kind = np.dtype(dtype)
    if kind == np.bool_:
        return Constant("bool", str(bool(value)))
    if np.issubdtype(kind, np.integer):
        return Constant(str(kind), str(int(value)))
    return Constant(str(kind), float(value).hex())


# ---- programs made of programs ------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def placed(program: Program, rows: int, shifted: tuple[int, ...], starts: int) -> Program:
    """The function with inputs that count within a part of the whole: `rows` batch rows are one of
    the whole, and to the inputs `shifted` is added a number of one more array, int32[starts]: one a
    batch row, or one for all. The array is the last, and absent if the result depends on none.
    """
    batch, values = program.inputs - 4, list(range(program.inputs))
    before: list[Operation] = []

    def do(name: str, *operands: Operand, read: int | None = None) -> int:
        before.append(Operation(name, operands, "int32", read))
        return program.inputs + len(before) - 1

    shifted = tuple(n for n in shifted if program.depends_on(n))
    arrays = program.arrays + ((((starts,), "int32"),) if shifted else ())
    if shifted:
        start = do("read", batch if starts > 1 else ZERO, read=len(program.arrays))
        for n in shifted:
            values[n] = do("add", n, start)
    if rows > 1 and program.depends_on(batch):
        values[batch] = do("div", batch, Constant("int32", str(rows)))
    return of_values(program, before, values, arrays)


@functools.lru_cache(maxsize=256)
def of_rows(program: Program, rows: int, tree: bool = False, entries: int | None = None) -> Program:
    """The function where each query row is a batch row. It reads int32[rows] of the batch row that
    a row is of, of the row's position, and of the position that counts as 0 where `tree`. Of rows
    with lists of `entries` keys, key n is entry n, and int32[rows, entries] has its position.
    """
    batch, q, kv = (program.inputs - n for n in (4, 2, 1))
    first, count = len(program.arrays), 3 if tree else 2
    before = [Operation("read", (batch,), "int32", first + n) for n in range(count)]
    values, arrays = list(range(program.inputs)), [*program.arrays]
    arrays += [((rows,), "int32")] * count
    values[batch], values[q] = program.inputs, program.inputs + 1
    if tree:
        before.append(Operation("sub", (kv, program.inputs + 2), "int32"))
        values[kv] = program.inputs + 3
    if entries is not None:
        arrays.append(((rows, entries), "int32"))
        if program.depends_on(kv):
            before.append(Operation("read", (batch, kv), "int32", first + count))
            values[kv] = program.inputs + count
    return of_values(program, before, values, arrays)


def of_values(
    program: Program, before: Sequence[Operation], values: Sequence[int], arrays: Sequence[Kind]
) -> Program:
    """The function with input n computed by the operations `before`, as value `values[n]`.
    `arrays`: all that are then read, the program's own first.
    """

    def moved(n: int) -> int:
        return values[n] if n < program.inputs else n + len(before)

    after = (op.renumbered(moved) for op in program.operations)
    result = program.result if isinstance(program.result, Constant) else moved(program.result)
    return Program(program.inputs, (*before, *after), result, tuple(arrays))


def reads_at(program: Program, number: int) -> list[tuple[int, int]]:
    """(array, axis) of reads at an input itself, or at it counted from the end where it is
    negative, as jax.numpy reads.
    """

    def is_input(operand: Operand) -> bool:
        if not isinstance(operand, int) or operand < program.inputs:
            return operand == number
        op = program.operations[operand - program.inputs]
        if op.name != "select_n" or op.operands[1] != number:
            return False
        which = op.operands[0]
        negative = Operation("lt", (number, ZERO), "bool")
        at = which - program.inputs if isinstance(which, int) else -1
        return at >= 0 and program.operations[at] == negative

    return [
        (op.read, axis)
        for op in program.operations
        if op.read is not None
        for axis, operand in enumerate(op.operands)
        if is_input(operand)
    ]


def check_reads(argument: str, program: Program, sizes: tuple[int | None, ...]) -> None:
    """ValueError where a function of positions reads an array past its end by a batch row, a head
    or a position itself. `sizes`: those of b, h, q and kv, None where they are not known.
    """
    for number, (name, size) in enumerate(zip(("b", "h", "q", "kv"), sizes, strict=True)):
        for array, axis in reads_at(program, program.inputs - 4 + number):
            shape = program.arrays[array][0]
            if size is not None and shape[axis] < size:
                raise ValueError(
                    f"{argument}: expected what the function reads at {name} to have {size} "
                    f"numbers there, one for each {name}, got shape {list(shape)}, whose axis "
                    f"{axis} has {shape[axis]}; give it whole, or read it at "
                    f"jnp.minimum({name}, {shape[axis] - 1})"
                )


# ---- evaluation ---------------------------------------------------------------------------------


def compute(
    operation: Operation,
    operands: Sequence[Value],
    table: dict[str, Callable[..., Value]] = OPERATIONS,
) -> Value:
    """An operation, not a read, on values that jax.numpy takes together."""
    if operation.name == "convert_element_type":
        return operands[0].astype(operation.dtype)
    if operation.name == "integer_pow":
        return _power(operands[0], operation.exponent)
    if operation.name in _OF_FLOAT32 and operands[0].dtype.itemsize == 2:
        wide = (x.astype(jnp.float32) for x in operands)
        return table[operation.name](*wide).astype(operation.dtype)
    return table[operation.name](*operands)


class Broadcasting:
    """Operations and reads on jax or NumPy arrays, which broadcast."""

    def compute(self, operation: Operation, operands: Sequence[Value]) -> Value:
        return compute(operation, jnp.broadcast_arrays(*operands))

    def read(self, array: Value, kind: Kind, indices: Sequence[Value]) -> Value:
        """The elements at some positions, clipped to the array."""
        shape, dtype = kind
        clipped = [jnp.clip(at, 0, size - 1) for at, size in zip(indices, shape, strict=True)]
        return jnp.asarray(array)[tuple(clipped)].astype(dtype)


def evaluate(
    program: Program, numbers: Sequence[Value], arrays: Sequence[Value], values: Any
) -> Value:
    """The result of a program. `values` computes and reads: `Broadcasting`, or a kernel's own."""
    held: list[Value] = [*numbers]

    def lookup(operand: Operand) -> Value:
        return operand.value if isinstance(operand, Constant) else held[operand]

    for op in program.operations:
        operands = [lookup(operand) for operand in op.operands]
        if op.read is not None:
            held.append(values.read(arrays[op.read], program.kind(op), operands))
        else:
            held.append(values.compute(op, operands))
    return lookup(program.result)
