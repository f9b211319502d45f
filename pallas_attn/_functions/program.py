"""Functions of positions as values: traced once, compared by what they compute, and evaluated on
arrays of any kind.

A user's function of scalars becomes a `Program`: a list of operations, frozen and hashable, a jit
key by value. The reference evaluates it on jax arrays that broadcast, a kernel on the tiles, rows,
columns and scalars of its registers. What a function may contain is the table `OPERATIONS`, reads
of its arrays at scalar positions, and jitted functions of these.
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
from jax.extend.core import Literal

Array = Any


@dataclasses.dataclass(frozen=True)
class Constant:
    """A number in a program; `text` names every bit of it, as NaN does not equal itself."""

    dtype: str
    text: str

    @property
    def value(self) -> Any:
        """A scalar of NumPy's."""
        if self.dtype == "bool":
            return np.bool_(self.text == "True")
        number = int(self.text) if "int" in self.dtype else float.fromhex(self.text)
        return jnp.dtype(self.dtype).type(number)


ZERO, NO = Constant("int32", "0"), Constant("bool", "False")
Operand = int | Constant  # the number of a value, or a constant


@dataclasses.dataclass(frozen=True)
class Operation:
    """One line of a program. `read`: which array `operands` are positions in, or None."""

    name: str
    operands: tuple[Operand, ...]
    dtype: str  # of the result
    read: int | None = None
    exponent: int = 0  # of "integer_pow"


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of `inputs` numbers, and of arrays that it reads. Value i is input i, or what
    operation i - inputs gives.
    """

    inputs: int
    operations: tuple[Operation, ...]
    result: Operand
    arrays: tuple[tuple[tuple[int, ...], str], ...] = ()  # shape and dtype of each

    @property
    def result_dtype(self) -> str:
        if isinstance(self.result, Constant):
            return self.result.dtype
        if self.result < self.inputs:
            return "int32" if self.result or self.inputs == 4 else "float32"
        return self.operations[self.result - self.inputs].dtype

    def depends_on(self, number: int) -> bool:
        """Whether the result may change with an input."""
        reached = [i == number for i in range(self.inputs)]

        def touches(operand: Operand) -> bool:
            return isinstance(operand, int) and reached[operand]

        for operation in self.operations:
            reached.append(any(map(touches, operation.operands)))
        return touches(self.result)


def _alike(function: Callable[..., Array]) -> Callable[..., Array]:
    """Of operands whose types may differ in width, as jax.numpy has it."""

    def promoted(*operands: Array) -> Array:
        dtype = jnp.result_type(*operands)
        return function(*(x if x.dtype == dtype else x.astype(dtype) for x in operands))

    return promoted


def _sign(x: Array) -> Array:
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.minimum(jnp.maximum(x, -1), 1)
    return jnp.where(x > 0, 1.0, jnp.where(x < 0, -1.0, x))


def _power(x: Array, exponent: int) -> Array:
    if exponent < 0:
        return 1.0 / _power(x, -exponent)
    found = None
    while exponent:
        if exponent & 1:
            found = x if found is None else found * x
        x, exponent = x * x, exponent >> 1
    return x * 0 + 1 if found is None else found


# What a function may contain, by the names of jax's primitives.
OPERATIONS: dict[str, Callable[..., Array]] = {
    "add": operator.add,
    "add_any": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": _alike(lax.div),
    "rem": _alike(lax.rem),
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
    "shift_left": _alike(lax.shift_left),
    "shift_right_logical": _alike(lax.shift_right_logical),
    "shift_right_arithmetic": _alike(lax.shift_right_arithmetic),
    "select_n": lambda which, no, yes: jnp.where(which, yes, no),
    "convert_element_type": lambda a: a,  # `evaluate` converts
    "copy": lambda a: a,
    "broadcast_in_dim": lambda a: a,
}
# What Mosaic computes in float32 alone: numbers of 16 bits are rounded afterwards.
_OF_FLOAT32 = frozenset(("exp", "exp2", "log", "tanh", "logistic", "sqrt", "rsqrt"))
# What takes numbers of 8 bits as they are; kernels, which hold them in 32, compute no others.
_KEEP_BITS = frozenset(("select_n", "max", "min", "clamp", "copy", "broadcast_in_dim"))
_WITHIN = ("jaxpr", "call_jaxpr", "fun_jaxpr")  # where equations keep a function that they call
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
    """Some of an array: read from `starts` on along its axes, of which `kept` are left, in order.
    An axis that is gone is read at its start.
    """

    array: int
    starts: tuple[Operand, ...]
    kept: tuple[int, ...]


def trace(
    what: str, function: Callable[..., Any], numbers: Sequence[Any], arrays: Sequence[Array]
) -> tuple[Program, list[Array]]:
    """`function(*numbers, *arrays)` as a program, and the arrays that it reads: those given, and
    what it has captured. `numbers`: the dtypes of the first arguments; `what` names it in errors.
    """
    scalars = [jax.ShapeDtypeStruct((), dtype) for dtype in numbers]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        traced = jax.make_jaxpr(function)(*scalars, *shapes)
    captured = list(traced.consts)
    for value in captured:
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
    return _Tracing(what, len(numbers)).program(traced.jaxpr, [*arrays], captured)


class _Tracing:
    """The operations found so far."""

    def __init__(self, what: str, inputs: int):
        self.what, self.inputs = what, inputs
        self.operations: list[Operation] = []
        self.known: dict[Operation, int] = {}
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.dtypes: dict[int, Any] = {}

    def program(self, jaxpr: Any, arrays: list, captured: list) -> tuple[Program, list[Array]]:
        every = [*arrays]
        values: list[Any] = [*range(self.inputs)]
        values += [self.whole(n, x) for n, x in enumerate(every)]
        consts: list[Any] = []
        for x in captured:
            if np.ndim(x) == 0:
                consts.append(_constant(np.asarray(x)[()], x.dtype))
            else:
                consts.append(self.whole(len(every), x))
                every.append(jnp.asarray(x))
        (result,) = self.run(jaxpr, consts, values)
        if isinstance(result, _View):
            result = self.read(result)
        operations, result, used = self.needed(result)
        kept = [every[n] for n in used]
        shapes = tuple((tuple(x.shape), str(x.dtype)) for x in kept)
        return Program(self.inputs, operations, result, shapes), kept

    def needed(self, result: Operand) -> tuple[tuple[Operation, ...], Operand, list[int]]:
        """The operations that the result depends on, the result, and the arrays that they read."""
        wanted = {result}
        for at in reversed(range(len(self.operations))):
            if self.inputs + at in wanted:
                wanted |= set(self.operations[at].operands)
        number: dict[Any, int] = {n: n for n in range(self.inputs)}
        kept = [at for at in range(len(self.operations)) if self.inputs + at in wanted]
        number |= {self.inputs + at: self.inputs + n for n, at in enumerate(kept)}
        chosen = [self.operations[at] for at in kept]
        used = sorted({op.read for op in chosen if op.read is not None})
        operations = tuple(
            dataclasses.replace(
                op,
                operands=tuple(number.get(x, x) for x in op.operands),
                read=None if op.read is None else used.index(op.read),
            )
            for op in chosen
        )
        return operations, number.get(result, result), used

    def whole(self, number: int, array: Array) -> Any:
        axes = len(array.shape)
        self.shapes[number], self.dtypes[number] = tuple(array.shape), array.dtype
        return _View(number, (ZERO,) * axes, tuple(range(axes)))

    def run(self, jaxpr: Any, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        held: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        held |= dict(zip(jaxpr.invars, values, strict=True))

        def of(atom: Any) -> Any:
            if isinstance(atom, Literal):
                aval: Any = atom.aval
                return _constant(atom.val, aval.dtype)
            return held[atom]

        for equation in jaxpr.eqns:
            found = self.one(equation, [of(atom) for atom in equation.invars])
            held |= dict(zip(equation.outvars, found, strict=True))
        return [of(atom) for atom in jaxpr.outvars]

    def one(self, equation: Any, given: list[Any]) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        inner = next((params[key] for key in _WITHIN if key in params), None)
        if inner is not None and name not in _REMEDIES:
            jaxpr = getattr(inner, "jaxpr", inner)
            return self.run(jaxpr, getattr(inner, "consts", ()), given)
        aval: Any = equation.outvars[0].aval
        if isinstance(given[0], _View):
            found = self.part(name, params, given)
            if found is not None:
                return [found]
        if name not in OPERATIONS or aval.shape != ():
            raise self.refused(name, aval)
        given = [self.read(x) if isinstance(x, _View) else x for x in given]
        if name == "select_n" and len(given) != 3:
            raise self.refused(name, aval)
        if is_narrow(aval.dtype) and name not in _KEEP_BITS:
            raise ValueError(
                f"{self.what}: the function computes {aval.dtype} ({name}), and kernels compute "
                "numbers of 16 and 32 bits; cast to one of those before"
            )
        return [
            self.add(Operation(name, tuple(given), str(aval.dtype), exponent=params.get("y", 0)))
        ]

    def part(self, name: str, params: Any, given: list[Any]) -> _View | None:
        """A part of an array, where that is what the equation gives."""
        view, *rest = given
        starts, kept = list(view.starts), view.kept
        if name == "dynamic_slice":
            for axis, start, size in zip(kept, rest, params["slice_sizes"], strict=True):
                if size == 1:
                    starts[axis] = self.sum(starts[axis], start)
                elif size != self.shapes[view.array][axis]:  # one of all begins at 0
                    return None
            return view._replace(starts=tuple(starts))
        if name == "slice" and params["strides"] is None:
            for axis, start in zip(kept, params["start_indices"], strict=True):
                starts[axis] = self.sum(starts[axis], Constant("int32", str(start)))
            return view._replace(starts=tuple(starts))
        if name in ("squeeze", "reshape"):
            shape = params.get("dimensions")
            if name == "reshape":
                if params["new_sizes"] != ():
                    return None
                shape = tuple(range(len(kept)))
            gone = {kept[n] for n in shape}
            return view._replace(kept=tuple(axis for axis in kept if axis not in gone))
        return None

    def sum(self, a: Operand, b: Operand) -> Operand:
        if ZERO in (a, b):
            return b if a == ZERO else a
        return self.add(Operation("add", (a, b), "int32"))

    def read(self, view: _View) -> Operand:
        if view.kept:
            raise ValueError(
                f"{self.what}: the function uses {len(view.kept)} axes of an array whole; read it "
                "at scalar positions: aux[b, q]"
            )
        dtype = str(self.dtypes[view.array])
        return self.add(Operation("read", view.starts, dtype, read=view.array))

    def add(self, operation: Operation) -> Operand:
        given = operation.operands
        if operation.read is None and all(isinstance(x, Constant) for x in given):
            return _folded(operation)
        if operation.name == "lt" and self.is_natural(given[0]) and given[1] == ZERO:
            return NO  # an index from the end
        if operation.name == "select_n" and given[0] == NO:
            return given[1]
        if operation.name == "ne" and given[1] == NO:
            return given[0]
        if operation not in self.known:
            self.known[operation] = self.inputs + len(self.operations)
            self.operations.append(operation)
        return self.known[operation]

    def is_natural(self, operand: Operand) -> bool:
        """Whether it is a batch row, a head or the position of a key, none of which is negative."""
        return operand in (self.inputs - 4, self.inputs - 3, self.inputs - 1)

    def refused(self, name: str, aval: Any) -> ValueError:
        shape = "" if aval.shape == () else f" of shape {list(aval.shape)}"
        remedy = _REMEDIES.get(name, "write it by arithmetic, comparisons, jnp.where and reads "
                                     "of aux")  # fmt: skip
        if aval.shape != ():
            remedy = _REMEDIES.get(name, "read arrays at scalar positions: aux[h, q - kv]")
        return ValueError(
            f"{self.what}: the function contains {name}{shape}, which kernels do not compute; "
            f"{remedy}"
        )


def is_narrow(dtype: Any) -> bool:
    """Whether these are numbers of 8 bits or less."""
    return dtype.itemsize == 1 and dtype != jnp.bool_


def _folded(operation: Operation) -> Constant:
    """An operation of constants."""
    alone = Program(0, (operation,), 0)
    with on_host(), jax.enable_x64(False):
        return _constant(evaluate(alone, (), (), Broadcasting()), operation.dtype)


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Computes now, whatever is being traced, and on the CPU, if jax has one."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(RuntimeError):  # of jax that was told to use GPUs alone
            stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
        stack.enter_context(jax.ensure_compile_time_eval())
        yield


def computed_now(function: Callable[..., Any], *given: np.ndarray) -> np.ndarray:
    """The result of a function of arrays, compiled as one program for the CPU, if jax has one,
    whatever is being traced.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(RuntimeError):  # of jax that was told to use GPUs alone
            stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
        return np.asarray(jax.jit(function).lower(*given).compile()(*given))


def _constant(value: Any, dtype: Any) -> Constant:
    kind = np.dtype(dtype)
    if kind == np.bool_:
        return Constant("bool", str(bool(value)))
    if np.issubdtype(kind, np.integer):
        return Constant(str(kind), str(int(value)))
    return Constant(str(kind), float(value).hex())


# ---- programs made of programs ------------------------------------------------------------------


def joined(name: str, *parts: Program) -> Program:
    """The operation `name` of the results of programs of the same inputs; their arrays follow each
    other.
    """
    (inputs,) = {part.inputs for part in parts}
    operations: list[Operation] = []
    arrays: list[Any] = []
    results: list[Operand] = []
    for part in parts:
        shift, first = len(operations), len(arrays)

        def moved(operand, shift=shift):
            later = isinstance(operand, int) and operand >= inputs
            return operand + shift if later else operand

        for op in part.operations:
            read = None if op.read is None else op.read + first
            operands = tuple(map(moved, op.operands))
            operations.append(dataclasses.replace(op, operands=operands, read=read))
        arrays += part.arrays
        results.append(moved(part.result))
    operations.append(Operation(name, tuple(results), "bool"))
    return Program(inputs, tuple(operations), inputs + len(operations) - 1, tuple(arrays))


@functools.lru_cache(maxsize=256)
def placed(program: Program, rows: int, shifted: tuple[int, ...], starts: int) -> Program:
    """The same function, of a part of what it was of: `rows` batch rows of the part are one of the
    whole, and the inputs `shifted` count from a number of one more array, int32[starts], which has
    one a batch row, or one for all. It is the last, and absent where the result depends on none.
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
    program: Program, before: Sequence[Operation], values: Sequence[int], arrays: Sequence[Any]
) -> Program:
    """The same function, of inputs from which the operations `before` make its own: input n is
    `values[n]`. `arrays` are all that it reads then, its own ones first.
    """

    def moved(operand: Operand) -> Operand:
        if isinstance(operand, Constant):
            return operand
        return values[operand] if operand < program.inputs else operand + len(before)

    after = (
        dataclasses.replace(op, operands=tuple(map(moved, op.operands)))
        for op in program.operations
    )
    return Program(program.inputs, (*before, *after), moved(program.result), tuple(arrays))


def reads_at(program: Program, number: int) -> list[tuple[int, int]]:
    """(array, axis) of what is read at an input itself; as jax.numpy has it, from the end where
    that is negative.
    """

    def is_input(operand: Operand) -> bool:
        if not isinstance(operand, int) or operand < program.inputs:
            return operand == number
        op = program.operations[operand - program.inputs]
        return op.name == "select_n" and op.operands[1] == number

    return [
        (op.read, axis)
        for op in program.operations
        if op.read is not None
        for axis, operand in enumerate(op.operands)
        if is_input(operand)
    ]


@functools.lru_cache(maxsize=256)
def derivative(program: Program) -> Program:
    """Of the result by the first input. It has the arrays of `program` that it reads: see
    `derivative_arrays`.
    """
    return _derivative(program)[0]


@functools.lru_cache(maxsize=256)
def _derivative(program: Program) -> tuple[Program, tuple[int, ...]]:
    arrays = [np.zeros(shape, dtype) for shape, dtype in program.arrays]

    def function(score, *rest):
        numbers, given = rest[: program.inputs - 1], rest[program.inputs - 1 :]

        def of(score):
            return evaluate(program, (score, *numbers), given, Broadcasting())

        return jax.grad(of)(score)

    numbers = [jnp.float32] + [jnp.int32] * (program.inputs - 1)
    found, kept = trace("score_fn", function, numbers, arrays)
    numbers_of = tuple(next(n for n, x in enumerate(arrays) if x is one) for one in kept)
    return found, numbers_of


def derivative_arrays(program: Program, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Those of a program's arrays that its derivative reads, in its order."""
    return tuple(arrays[n] for n in _derivative(program)[1])


# ---- evaluation ---------------------------------------------------------------------------------


def compute(
    operation: Operation,
    operands: Sequence[Any],
    table: dict[str, Callable[..., Array]] = OPERATIONS,
) -> Any:
    """One operation, but for reads, of values that jax.numpy takes together."""
    if operation.name == "convert_element_type":
        return operands[0].astype(operation.dtype)
    if operation.name == "integer_pow":
        return _power(operands[0], operation.exponent)
    if operation.name in _OF_FLOAT32 and operands[0].dtype.itemsize == 2:
        wide = (x.astype(jnp.float32) for x in operands)
        return table[operation.name](*wide).astype(operation.dtype)
    return table[operation.name](*operands)


class Broadcasting:
    """What values are: jax arrays, or NumPy's, which broadcast by themselves."""

    def compute(self, operation: Operation, operands: Sequence[Any]) -> Any:
        return compute(operation, jnp.broadcast_arrays(*operands))

    def read(self, array: Array, kind: Any, indices: Sequence[Any]) -> Any:
        """The numbers at some positions; those outside of the array are clipped. `kind`: its shape
        and dtype.
        """
        shape, dtype = kind
        clipped = [jnp.clip(at, 0, size - 1) for at, size in zip(indices, shape, strict=True)]
        return jnp.asarray(array)[tuple(clipped)].astype(dtype)


def evaluate(program: Program, numbers: Sequence[Any], arrays: Sequence[Any], values: Any) -> Any:
    """The result of a program. `values` knows what values are: see `Broadcasting`."""
    held: list[Any] = [*numbers]

    def of(operand: Operand) -> Any:
        return operand.value if isinstance(operand, Constant) else held[operand]

    for op in program.operations:
        given = [of(operand) for operand in op.operands]
        if op.read is not None:
            held.append(values.read(arrays[op.read], program.arrays[op.read], given))
        else:
            held.append(values.compute(op, given))
    return of(program.result)
