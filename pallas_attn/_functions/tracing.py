"""A user's function of scalars as a `Program`.

It may contain `program.OPERATIONS`, reads of its arrays at scalar positions, jitted functions of
these, and arrays that it makes of constants: those are computed here, and read like captured ones.
A few numbers side by side (`jnp.isin(kv, jnp.array([3, 5]))`) are as many scalars.
"""

import functools
import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.typing import DTypeLike

from pallas_attn._functions import program as _program
from pallas_attn._functions.folding import Lines
from pallas_attn._functions.program import OPERATIONS, ZERO, Constant, Operand, Operation, Program

_ABOUT_AN_INDEX = re.compile(r"\bind(ex|ices)", re.IGNORECASE)  # TypeErrors of jax's arrays
MOST_SIDE_BY_SIDE = 64  # scalars of one array: each is a few instructions a logit
# Parameters of an equation that hold a called function.
_WITHIN = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_REMEDIES = {
    "gather": "read arrays at scalar positions: aux[h, q - kv]",
    "floor": "use integers: q // n",
    "cond": "write jnp.where",
    "while": "write the loop out, or prepare its results as an array and give it as aux",
    "scan": "write the loop out, or prepare its results as an array and give it as aux",
    "erf": "write it by exp and tanh",
    "pow": "write x**n with an int n, or exp of a product",
    "is_finite": "write jnp.abs(x) < jnp.inf",
    "debug_callback": "print mask.dense(T, S), which is the mask as an array",
    "debug_print": "print mask.dense(T, S), which is the mask as an array",
}
_TO_A_TABLE = "write the sum out, or prepare it as an array and give it as aux"
# Reductions of scalars side by side, by the operation of two.
_REDUCTIONS = {"reduce_or": "or", "reduce_and": "and", "reduce_sum": "add", "reduce_prod": "mul"}
_REDUCTIONS |= {"reduce_max": "max", "reduce_min": "min"}
_REMEDIES |= dict.fromkeys(_REDUCTIONS, _TO_A_TABLE)
# jax's errors about Python and NumPy that meet a traced scalar: what does it, and the remedy.
_CONVERSIONS: tuple[tuple[type[Exception], str], ...] = (
    (
        jax.errors.TracerBoolConversionError,
        "decides in Python (and, or, not, if, in, max, min, 0 <= q < 4) by a number that is known "
        "only in the kernel; use &, |, ~, jnp.where, jnp.maximum, jnp.minimum, "
        "(0 <= q) & (q < 4)",
    ),
    (
        jax.errors.TracerArrayConversionError,
        "hands a number that is known only in the kernel to NumPy; use jax.numpy (jnp.where, "
        "jnp.maximum), and read a NumPy table as a jax array: jnp.asarray(table)[kv]",
    ),
    (
        jax.errors.ConcretizationTypeError,
        "makes a Python number (int, float, math) of one that is known only in the kernel; use "
        "x.astype(jnp.int32), x.astype(jnp.float32) and jax.numpy",
    ),
    (
        jax.errors.TracerIntegerConversionError,
        "uses a number that is known only in the kernel as an index or a count in Python; read "
        "jax arrays, jnp.asarray(table)[kv], and compare instead of range",
    ),
    (OverflowError, "has a Python int beyond int32; positions and all integers are int32"),
)


class _View(NamedTuple):
    """A part of an array that begins at `starts`; axes that are not `kept` are read there."""

    array: int
    starts: tuple[Operand, ...]
    kept: tuple[int, ...]


class _Known(NamedTuple):
    """An array that depends on no input."""

    array: jax.Array | np.ndarray


Traced = Operand | _View | _Known | np.ndarray  # an array of objects: operands side by side


def trace(
    what: str,
    function: Callable[..., Any],
    numbers: Sequence[DTypeLike],
    arrays: Sequence[jax.Array | np.ndarray],
    names: str = "",
) -> tuple[Program, list[Any]]:
    """`function(*numbers, *arrays)` as a program, and the arrays that it reads, captured ones
    included. `numbers`: the dtypes of the first arguments, with `names`, for errors; `what`: the
    caller's name.
    """
    scalars = [jax.ShapeDtypeStruct((), dtype) for dtype in numbers]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    _check_arity(what, function, names, len(numbers), len(arrays))

    def scalar(*arguments: jax.Array) -> Any:
        result = function(*arguments)
        if isinstance(result, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
            return result
        hint = "; is there a return?" if result is None else ""
        raise ValueError(
            f"{what}: expected {_said(function)} to give one scalar, got "
            f"{type(result).__name__}{hint}"
        )

    try:
        with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
            traced = jax.make_jaxpr(scalar)(*scalars, *shapes)
    except tuple(kind for kind, _ in _CONVERSIONS) as error:
        why = next(text for kind, text in _CONVERSIONS if isinstance(error, kind))
        raise ValueError(f"{what}: {_said(function)} {why}") from error
    except (IndexError, TypeError) as error:
        if not (isinstance(error, IndexError) or _ABOUT_AN_INDEX.search(str(error))):
            raise  # the function's own
        first = str(error).splitlines()[0].rstrip(".")
        raise ValueError(
            f"{what}: {_said(function)} reads an array in a way that jax refuses ({first}); arrays "
            "are read at int32 scalars, one an axis: aux[h, q - kv], aux[x.astype(jnp.int32)]"
        ) from error
    for value in traced.consts:
        if isinstance(value, jax.core.Tracer):
            raise ValueError(
                f"{what}: the function captures a traced array, {value.dtype}"
                f"{list(value.shape)}; pass it as aux, {what}(f, array), and take it as an "
                "argument of f"
            )
    if traced.out_avals[0].shape != ():
        shape = [list(aval.shape) for aval in traced.out_avals]
        raise ValueError(
            f"{what}: expected a function that gives one scalar, got shapes {shape}; positions are "
            "scalars, and arrays are read at them: aux[b, q]"
        )
    dtypes = [str(jnp.dtype(dtype)) for dtype in numbers]
    return _Tracing(what, dtypes).program(traced.jaxpr, arrays, traced.consts)


def _said(function: Callable[..., Any]) -> str:
    """The name of a function and its arguments."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        return f"{name}{inspect.signature(function)}"
    except (TypeError, ValueError):  # a builtin
        return name


def _check_arity(
    what: str, function: Callable[..., Any], names: str, numbers: int, arrays: int
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*range(numbers + arrays))
    except TypeError:
        wanted = f"a function of ({names or numbers})"
        if arrays:
            wanted += f" and the {arrays} array{'s' * (arrays > 1)} of aux"
        raise ValueError(
            f"{what}: expected {wanted}, {numbers + arrays} arguments in this order, got "
            f"{_said(function)}"
        ) from None


class _Tracing:
    """The operations of a function so far. `inputs`: the dtypes of its numbers."""

    def __init__(self, what: str, inputs: Sequence[str]):
        self.what, self.lines = what, Lines(inputs)
        self.arrays: list[Any] = []
        self.views: dict[int, _View] = {}  # views of known arrays, by identity

    def program(
        self, jaxpr: Jaxpr, arrays: Sequence[Any], captured: Sequence[Any]
    ) -> tuple[Program, list[Any]]:
        """The program of the operations that the result needs, and the arrays that it reads."""
        inputs = [*range(self.lines.inputs), *map(self.whole, arrays)]
        consts = [_Known(x) if np.ndim(x) else self.known(x) for x in captured]
        result = self.number(self.run(jaxpr, consts, inputs)[0])
        kinds = [(tuple(x.shape), str(x.dtype)) for x in self.arrays]
        program, used = self.lines.program(result, kinds)
        return program, [self.arrays[n] for n in used]

    def whole(self, array: Any) -> _View:
        """A view of all of an array."""
        self.arrays.append(array)
        axes = len(array.shape)
        return _View(len(self.arrays) - 1, (ZERO,) * axes, tuple(range(axes)))

    def view(self, array: _View | _Known) -> _View:
        if isinstance(array, _View):
            return array
        if id(array.array) not in self.views:
            self.views[id(array.array)] = self.whole(jnp.asarray(array.array))
        return self.views[id(array.array)]

    def known(self, value: Any, dtype: DTypeLike | None = None) -> Constant | _Known:
        """A number that depends on no input."""
        dtype = value.dtype if dtype is None else dtype
        if not _is_real(dtype):
            return _Known(value if hasattr(value, "dtype") else jnp.asarray(value, dtype))
        return _program.constant(np.asarray(value)[()], dtype)

    def run(self, jaxpr: Jaxpr, consts: Sequence[Traced], values: Sequence[Traced]) -> list[Traced]:
        held: dict[Any, Traced] = dict(zip(jaxpr.constvars, consts, strict=True))
        held |= dict(zip(jaxpr.invars, values, strict=True))

        def lookup(atom: Any) -> Traced:
            if not isinstance(atom, Literal):
                return held[atom]
            aval: Any = atom.aval
            return self.known(atom.val, aval.dtype)

        for equation in jaxpr.eqns:
            results = self.equation(equation, [lookup(atom) for atom in equation.invars])
            held |= dict(zip(equation.outvars, results, strict=True))
        return [lookup(atom) for atom in jaxpr.outvars]

    def equation(self, equation: JaxprEqn, inputs: list[Traced]) -> Sequence[Traced]:
        name, params = equation.primitive.name, equation.params
        inner = next((params[key] for key in _WITHIN if key in params), None)
        if inner is not None and name not in _REMEDIES:
            jaxpr = getattr(inner, "jaxpr", inner)
            return self.run(jaxpr, getattr(inner, "consts", ()), inputs)
        avals: list[Any] = [x.aval for x in equation.outvars]
        if len(avals) != 1 or equation.effects:
            raise self.refused(name, ())
        (aval,) = avals
        if all(isinstance(x, (Constant, _Known)) for x in inputs):
            return [self.computed(equation, inputs, aval)]
        if inputs and isinstance(inputs[0], (_View, _Known)):
            part = self.part(name, params, inputs[0], inputs[1:])
            if part is not None:
                return [part]
        if jnp.issubdtype(aval.dtype, jnp.complexfloating):
            raise ValueError(
                f"{self.what}: the function computes {aval.dtype} ({name}), and kernels compute "
                "real numbers; write the real and the imaginary part out, each a real number"
            )
        if name not in OPERATIONS or aval.shape != ():
            return [self.side_by_side(name, params, inputs, aval)]
        return [self.operation(name, params, tuple(map(self.number, inputs)), aval.dtype)]

    def operation(
        self, name: str, params: dict[str, Any], operands: tuple[Operand, ...], dtype: np.dtype
    ) -> Operand:
        """An operation on scalars."""
        if name == "select_n" and len(operands) != 3:
            raise self.refused(name, ())
        if _program.is_narrow(dtype) and name not in _program.KEEP_BITS:
            raise ValueError(
                f"{self.what}: the function computes {dtype} ({name}), and kernels compute "
                "numbers of 16 and 32 bits; cast to one of those before"
            )
        exponent = params.get("y", 0)
        return self.lines.add(Operation(name, operands, str(dtype), exponent=exponent))

    def computed(self, equation: JaxprEqn, inputs: Sequence[Any], aval: Any) -> Traced:
        """The result of an equation that depends on no input."""
        name = equation.primitive.name
        if name in _REMEDIES and name not in _REDUCTIONS:
            raise self.refused(name, aval.shape)
        if aval.shape == () and name in OPERATIONS and all(isinstance(x, Constant) for x in inputs):
            return self.operation(name, equation.params, tuple(inputs), aval.dtype)
        with _program.on_cpu(), jax.ensure_compile_time_eval(), jax.enable_x64(False):
            values = [x.array if isinstance(x, _Known) else jnp.asarray(x.value) for x in inputs]
            result: Any = equation.primitive.bind(*values, **equation.params)
        return _Known(result) if aval.shape else self.known(result)

    def part(
        self, name: str, params: dict[str, Any], array: _View | _Known, rest: Sequence[Any]
    ) -> _View | None:
        """The part of an array that an equation gives, if it gives one."""
        if name not in ("dynamic_slice", "slice", "squeeze", "reshape"):
            return None
        if name == "reshape" and params["new_sizes"]:
            return None
        view = self.view(array)
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
        elif name == "reshape":
            kept = ()
        else:
            return None
        return view._replace(starts=tuple(starts), kept=kept)

    def sum(self, a: Operand, b: Operand) -> Operand:
        return self.lines.add(Operation("add", (a, b), "int32"))

    def number(self, value: Traced) -> Operand:
        """The operand itself, or the element that a view is of."""
        if isinstance(value, np.ndarray):
            return value.item()
        if isinstance(value, _Known):
            raise ValueError(
                f"{self.what}: the function computes {value.array.dtype}, and kernels compute real "
                "numbers"
            )
        if not isinstance(value, _View):
            return value
        if value.kept:
            raise ValueError(
                f"{self.what}: the function uses {len(value.kept)} axes of an array whole; read it "
                "at scalar positions: aux[b, q]"
            )
        dtype = str(self.arrays[value.array].dtype)
        return self.lines.add(Operation("read", value.starts, dtype, read=value.array))

    # ---- a few scalars side by side -------------------------------------------------------------

    def side_by_side(
        self, name: str, params: dict[str, Any], inputs: Sequence[Traced], aval: Any
    ) -> np.ndarray:
        """An equation on arrays of a few scalars, as operations on each."""
        whole = any(isinstance(x, _View) and x.kept for x in inputs)
        if whole or not (name in OPERATIONS or name in _REDUCTIONS or name in _MOVES):
            raise self.refused(name, aval.shape)
        count = max(math.prod(x.shape) for x in (aval, *map(_array, inputs)))
        if count > MOST_SIDE_BY_SIDE:
            raise ValueError(
                f"{self.what}: the function computes {count} numbers side by side ({name}), and a "
                f"kernel up to {MOST_SIDE_BY_SIDE}; make a table of the results, give it as aux, "
                "and read it at a position: aux[kv]"
            )
        values = [self.scalars(x) for x in inputs]
        if name in OPERATIONS and name != "broadcast_in_dim":
            result = np.empty(aval.shape, object)
            spread = [np.broadcast_to(x, aval.shape) for x in values]
            for at in np.ndindex(*aval.shape):
                operands = tuple(x.item(*at) for x in spread)
                result[at] = self.operation(name, params, operands, aval.dtype)
            return result
        if name in _REDUCTIONS:
            return self.reduced(_REDUCTIONS[name], values[0], params["axes"], aval)
        return _moved(name, params, values, aval.shape)

    def scalars(self, value: Traced) -> np.ndarray:
        """The operands of a value, of its shape."""
        if isinstance(value, np.ndarray):
            return value
        if not isinstance(value, _Known) or not value.array.shape:
            result = np.empty((), object)
            result[()] = self.number(value)
            return result
        numbers = np.asarray(value.array)
        result = np.empty(numbers.shape, object)
        for at in np.ndindex(*numbers.shape):
            result[at] = self.number(self.known(numbers[at]))
        return result

    def reduced(
        self, operation: str, values: np.ndarray, axes: Sequence[int], aval: Any
    ) -> np.ndarray:
        rest = [n for n in range(values.ndim) if n not in axes]
        lines = values.transpose(*rest, *axes).reshape(*aval.shape, -1)
        result = np.empty(aval.shape, object)
        for at in np.ndindex(*aval.shape):
            pair = lambda a, b: self.operation(operation, {}, (a, b), aval.dtype)  # noqa: E731
            result[at] = functools.reduce(pair, lines[at])
        return result

    def refused(self, name: str, shape: tuple[int, ...]) -> ValueError:
        remedy = "write it by arithmetic, comparisons, jnp.where and reads of aux"
        if shape:
            remedy = "read arrays at scalar positions: aux[h, q - kv]"
        size = f" of shape {list(shape)}" if shape else ""
        return ValueError(
            f"{self.what}: the function contains {name}{size}, which kernels do not compute; "
            f"{_REMEDIES.get(name, remedy)}"
        )


_MOVES = frozenset(
    ("broadcast_in_dim", "reshape", "squeeze", "concatenate", "stack", "transpose", "slice")
)


def _moved(
    name: str, params: dict[str, Any], values: Sequence[np.ndarray], shape: tuple[int, ...]
) -> np.ndarray:
    """One of `_MOVES` on arrays of objects."""
    first = values[0]
    if name == "broadcast_in_dim":
        sizes = [1] * len(shape)
        for axis, size in zip(params["broadcast_dimensions"], first.shape, strict=True):
            sizes[axis] = size
        return np.broadcast_to(first.reshape(sizes), shape)
    if name == "concatenate":
        return np.concatenate(values, axis=params["dimension"])
    if name == "stack":
        return np.stack(values, axis=params["axis"])
    if name == "transpose":
        return first.transpose(params["permutation"])
    if name == "slice":
        strides = params["strides"] or (1,) * first.ndim
        ends = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
        return first[tuple(slice(*x) for x in ends)]
    return first.reshape(shape)


def _is_real(dtype: Any) -> bool:
    """Whether these are numbers or bools that a program may have."""
    number = jnp.issubdtype(dtype, jnp.number) and not jnp.issubdtype(dtype, jnp.complexfloating)
    return number or dtype == jnp.bool_


def _array(value: Traced) -> Any:
    """The array of a value that has one, or a number."""
    if isinstance(value, _Known):
        return value.array
    return value if isinstance(value, np.ndarray) else np.empty(())


# ---- derivatives --------------------------------------------------------------------------------


def derivative(program: Program) -> Program:
    """The derivative of the result by the first input, which reads `derivative_arrays`."""
    return _derivative(program)[0]


def derivative_arrays(program: Program, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The arrays of a program that its derivative reads, in its order."""
    return tuple(arrays[n] for n in _derivative(program)[1])


@functools.lru_cache(maxsize=256)
def _derivative(program: Program) -> tuple[Program, tuple[int, ...]]:
    arrays = [np.zeros(shape, dtype) for shape, dtype in program.arrays]

    def slope(score, *rest):
        numbers, read = rest[: program.inputs - 1], rest[program.inputs - 1 :]
        return jax.grad(
            lambda x: _program.evaluate(program, (x, *numbers), read, _program.Broadcasting())
        )(score)

    dtypes = [jnp.float32] + [jnp.int32] * (program.inputs - 1)
    traced, read = trace("score_fn", slope, dtypes, arrays)
    identities = [id(x) for x in arrays]
    return traced, tuple(identities.index(id(x)) for x in read)
