"""Functions of positions as values: traced once, compared by their operations, evaluated anywhere.

A user's function of scalars becomes a `Program`: a list of operations, frozen and hashable, a jit
key by value. The reference evaluates it on jax arrays that broadcast, a kernel on the tiles, rows,
columns and scalars of its registers. A function may contain the `OPERATIONS`, reads of its arrays
at scalar positions, and jitted functions of these.
"""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal
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
    dtype: str  # the result's
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

    def depends_on(self, number: int) -> bool:
        """Whether the result may change with an input."""
        reached: set[Operand] = {number}
        for at, operation in enumerate(self.operations, self.inputs):
            if not reached.isdisjoint(operation.operands):
                reached.add(at)
        return self.result in reached


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
    return x * 0 + 1 if product is None else product


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
_OF_FLOAT32 = frozenset(("exp", "exp2", "log", "tanh", "logistic", "sqrt", "rsqrt"))
# Operations on 8-bit numbers that kernels, which hold them in 32 bits, compute.
_KEEP_BITS = frozenset(("select_n", "max", "min", "clamp", "copy", "broadcast_in_dim"))
_WITHIN = (
    "jaxpr",
    "call_jaxpr",
    "fun_jaxpr",
)  # parameters of an equation that hold a called function
_REMEDIES = {
    "gather": "read arrays at scalar positions: aux[h, q - kv]",
    "floor": "use integers: q // n",
    "iota": "give an array of them as aux, and read it at a position",
    "reduce_sum": "write the sum out, or prepare it as an array and give it as aux",
    "cond": "write jnp.where",
    "while": "write the loop out, or prepare its results as an array and give it as aux",
    "scan": "write the loop out, or prepare its results as an array and give it as aux",
    "erf": "write it by exp and tanh",
    "pow": "write x**n with an int n, or exp of a product",
}


class _View(NamedTuple):
    """A part of an array that begins at `starts`; axes that are not `kept` are read there."""

    array: int
    starts: tuple[Operand, ...]
    kept: tuple[int, ...]


def trace(
    what: str, function: Callable[..., Any], numbers: Sequence[DTypeLike], arrays: Sequence[Value]
) -> tuple[Program, list[Value]]:
    """`function(*numbers, *arrays)` as a program, and the arrays that it reads, captured ones
    included. `numbers`: the dtypes of the first arguments; `what`: the caller's name, for errors.
    """
    scalars = [jax.ShapeDtypeStruct((), dtype) for dtype in numbers]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        traced = jax.make_jaxpr(function)(*scalars, *shapes)
    for value in traced.consts:
        if isinstance(value, jax.core.Tracer):
            raise ValueError(
                f"{what}: the function captures a traced array, {value.dtype}"
                f"{list(value.shape)}; pass it as aux, {what}(f, array), and take it as an "
                "argument of f"
            )
    if len(traced.jaxpr.outvars) != 1 or traced.out_avals[0].shape != ():
        shape = [list(aval.shape) for aval in traced.out_avals]
        raise ValueError(
            f"{what}: expected a function that gives one scalar, got shapes {shape}; positions are "
            "scalars, and arrays are read at them: aux[b, q]"
        )
    return _Tracing(what, len(numbers)).program(traced.jaxpr, arrays, traced.consts)


class _Tracing:
    """The operations of a function so far."""

    def __init__(self, what: str, inputs: int):
        self.what, self.inputs = what, inputs
        self.operations: list[Operation] = []
        self.known: dict[Operation, int] = {}
        self.arrays: list[Value] = []

    def program(
        self, jaxpr: Jaxpr, arrays: Sequence[Value], captured: Sequence[Any]
    ) -> tuple[Program, list[Value]]:
        """The program of the operations that the result needs, and the arrays that it reads."""
        inputs = [*range(self.inputs), *map(self.whole, arrays)]
        consts = [
            self.whole(jnp.asarray(x)) if np.ndim(x) else _constant(np.asarray(x)[()], x.dtype)
            for x in captured
        ]
        result = self.number(self.run(jaxpr, consts, inputs)[0])
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
        read = [self.arrays[n] for n in used]
        kinds = tuple((tuple(x.shape), str(x.dtype)) for x in read)
        return Program(self.inputs, operations, result, kinds), read

    def whole(self, array: Value) -> _View:
        """A view of all of an array."""
        self.arrays.append(array)
        axes = len(array.shape)
        return _View(len(self.arrays) - 1, (ZERO,) * axes, tuple(range(axes)))

    def run(
        self, jaxpr: Jaxpr, consts: Sequence[Operand | _View], values: Sequence[Operand | _View]
    ) -> list[Operand | _View]:
        held: dict[Any, Operand | _View] = dict(zip(jaxpr.constvars, consts, strict=True))
        held |= dict(zip(jaxpr.invars, values, strict=True))

        def lookup(atom: Any) -> Operand | _View:
            if not isinstance(atom, Literal):
                return held[atom]
            aval: Any = atom.aval
            return _constant(atom.val, aval.dtype)

        for equation in jaxpr.eqns:
            results = self.equation(equation, [lookup(atom) for atom in equation.invars])
            held |= dict(zip(equation.outvars, results, strict=True))
        return [lookup(atom) for atom in jaxpr.outvars]

    def equation(
        self, equation: JaxprEqn, inputs: list[Operand | _View]
    ) -> Sequence[Operand | _View]:
        name, params = equation.primitive.name, equation.params
        inner = next((params[key] for key in _WITHIN if key in params), None)
        if inner is not None and name not in _REMEDIES:
            jaxpr = getattr(inner, "jaxpr", inner)
            return self.run(jaxpr, getattr(inner, "consts", ()), inputs)
        aval: Any = equation.outvars[0].aval
        if isinstance(inputs[0], _View):
            part = self.part(name, params, inputs[0], inputs[1:])
            if part is not None:
                return [part]
        if name not in OPERATIONS or aval.shape != ():
            raise self.refused(name, aval.shape)
        operands = tuple(map(self.number, inputs))
        if name == "select_n" and len(operands) != 3:
            raise self.refused(name, aval.shape)
        if is_narrow(aval.dtype) and name not in _KEEP_BITS:
            raise ValueError(
                f"{self.what}: the function computes {aval.dtype} ({name}), and kernels compute "
                "numbers of 16 and 32 bits; cast to one of those before"
            )
        return [self.add(Operation(name, operands, str(aval.dtype), exponent=params.get("y", 0)))]

    def part(
        self, name: str, params: dict[str, Any], view: _View, rest: Sequence[Any]
    ) -> _View | None:
        """The part of an array that an equation gives, if it gives one."""
        starts, kept = list(view.starts), view.kept
        if name == "dynamic_slice":
            for axis, start, size in zip(kept, rest, params["slice_sizes"], strict=True):
                if size == 1:
                    starts[axis] = self.sum(starts[axis], start)
                elif size != self.arrays[view.array].shape[axis]:  # all of an axis begins at 0
                    return None
        elif name == "slice" and params["strides"] is None:
            for axis, start in zip(kept, params["start_indices"], strict=True):
                starts[axis] = self.sum(starts[axis], Constant("int32", str(start)))
        elif name == "squeeze":
            kept = tuple(x for n, x in enumerate(kept) if n not in params["dimensions"])
        elif name == "reshape" and params["new_sizes"] == ():
            kept = ()
        else:
            return None
        return view._replace(starts=tuple(starts), kept=kept)

    def sum(self, a: Operand, b: Operand) -> Operand:
        if ZERO in (a, b):
            return b if a == ZERO else a
        return self.add(Operation("add", (a, b), "int32"))

    def number(self, value: Operand | _View) -> Operand:
        """The operand itself, or the element that a view is of."""
        if not isinstance(value, _View):
            return value
        if value.kept:
            raise ValueError(
                f"{self.what}: the function uses {len(value.kept)} axes of an array whole; read it "
                "at scalar positions: aux[b, q]"
            )
        dtype = str(self.arrays[value.array].dtype)
        return self.add(Operation("read", value.starts, dtype, read=value.array))

    def add(self, operation: Operation) -> Operand:
        """The operation's result; constants are folded, and equal operations are one."""
        operands = operation.operands
        if operation.read is None and all(isinstance(x, Constant) for x in operands):
            return _folded(operation)
        # Batch rows, heads and positions of keys are not negative: no index from the end.
        natural = (self.inputs - 4, self.inputs - 3, self.inputs - 1)
        if operation.name == "lt" and operands[0] in natural and operands[1] == ZERO:
            return NO
        if operation.name == "select_n" and operands[0] == NO:
            return operands[1]
        if operation.name == "ne" and operands[1] == NO:
            return operands[0]
        if operation not in self.known:
            self.known[operation] = self.inputs + len(self.operations)
            self.operations.append(operation)
        return self.known[operation]

    def refused(self, name: str, shape: tuple[int, ...]) -> ValueError:
        remedy = "write it by arithmetic, comparisons, jnp.where and reads of aux"
        if shape:
            remedy = "read arrays at scalar positions: aux[h, q - kv]"
        size = f" of shape {list(shape)}" if shape else ""
        return ValueError(
            f"{self.what}: the function contains {name}{size}, which kernels do not compute; "
            f"{_REMEDIES.get(name, remedy)}"
        )


def is_narrow(dtype: np.dtype) -> bool:
    """Whether these are numbers of 8 bits or less."""
    return dtype.itemsize == 1 and dtype != jnp.bool_


def _folded(operation: Operation) -> Constant:
    """The result of an operation on constants."""
    program = Program(0, (operation,), 0)
    with _on_cpu(), jax.ensure_compile_time_eval(), jax.enable_x64(False):
        return _constant(evaluate(program, (), (), Broadcasting()), operation.dtype)


@contextlib.contextmanager
def _on_cpu() -> Iterator[None]:
    """The default device is the CPU, unless jax was told to use GPUs alone."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(RuntimeError):
            stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
        yield


def computed_now(function: Callable[..., Any], *inputs: np.ndarray) -> np.ndarray:
    """The result of a function of arrays, compiled as one program for the CPU, if jax has one,
    whatever is being traced.
    """
    with _on_cpu():
        return np.asarray(jax.jit(function).lower(*inputs).compile()(*inputs))


def _constant(value: Any, dtype: DTypeLike) -> Constant:
    kind = np.dtype(dtype)
    if kind == np.bool_:
        return Constant("bool", str(bool(value)))
    if np.issubdtype(kind, np.integer):
        return Constant(str(kind), str(int(value)))
    return Constant(str(kind), float(value).hex())


# ---- programs made of programs ------------------------------------------------------------------


def joined(name: str, *parts: Program) -> Program:
    """The operation `name` on the results of programs of the same inputs; their arrays follow one
    another.
    """
    (inputs,) = {part.inputs for part in parts}
    operations: list[Operation] = []
    arrays: tuple[Kind, ...] = ()
    results: list[Operand] = []
    for part in parts:
        shift, first = len(operations), len(arrays)

        def later(n: int, shift: int = shift) -> int:
            return n + shift if n >= inputs else n

        operations += [op.renumbered(later, first.__add__) for op in part.operations]
        arrays += part.arrays
        results.append(part.result if isinstance(part.result, Constant) else later(part.result))
    operations.append(Operation(name, tuple(results), "bool"))
    return Program(inputs, tuple(operations), inputs + len(operations) - 1, arrays)


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


def derivative(program: Program) -> Program:
    """The derivative of the result by the first input, which reads `derivative_arrays`."""
    return _derivative(program)[0]


def derivative_arrays(program: Program, arrays: Sequence[Value]) -> tuple[Value, ...]:
    """The arrays of a program that its derivative reads, in its order."""
    return tuple(arrays[n] for n in _derivative(program)[1])


@functools.lru_cache(maxsize=256)
def _derivative(program: Program) -> tuple[Program, tuple[int, ...]]:
    arrays = [np.zeros(shape, dtype) for shape, dtype in program.arrays]

    def slope(score, *rest):
        numbers, read = rest[: program.inputs - 1], rest[program.inputs - 1 :]
        return jax.grad(lambda x: evaluate(program, (x, *numbers), read, Broadcasting()))(score)

    dtypes = [jnp.float32] + [jnp.int32] * (program.inputs - 1)
    traced, read = trace("score_fn", slope, dtypes, arrays)
    identities = [id(x) for x in arrays]
    return traced, tuple(identities.index(id(x)) for x in read)


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
            held.append(values.read(arrays[op.read], program.arrays[op.read], operands))
        else:
            held.append(values.compute(op, operands))
    return lookup(program.result)
