"""Functions whose derivative is one linear operation with a transpose of its own, as primitives of
jax.

The derivative of attention is linear in tangents, and kernels compute both it and its transpose.
jax's custom_vjp has no forward mode, and a loop whose gradient is differentiated loses the rule of
its custom_jvp. So `differentiable` binds a primitive, whose derivative is a second primitive, bound
by `call`. jax.vmap maps both directions of it (`Mapped`), transposition swaps them (`Transposed`),
and its derivative along the residuals is that of `definition`, the same function by operations of
jax, which can be differentiated any number of times.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.interpreters.partial_eval import JaxprTracer

from pallas_attn._mesh import sharding

Array = jax.Array
Arrays = tuple[Array, ...]
Types = tuple[Any, ...]  # shape, dtype and sharding of arrays, as jax.typeof says
# Values that jax hands to rules: arrays, tracers, symbolic zeros, undefined primals, axes.
Operand = Any
Operands = Any
Parameter = Any  # a static parameter of a primitive
Jaxpr = Any  # a closed jaxpr
Traced = Any  # a function that is traced when jax asks
Dims = tuple[int | None, ...]  # the mapped axis of each array under vmap; None: not mapped


class Linear(Protocol):
    """An operation that is linear in its second argument: a static, hashable value."""

    def apply(self, residuals: Arrays, linear: Arrays) -> Arrays:
        """The results."""

    def transpose(self, residuals: Arrays, cotangents: Arrays) -> Arrays:
        """The cotangents of `linear`, by those of the results."""

    def definition(self, residuals: Arrays, linear: Arrays) -> Arrays:
        """`apply` by operations that jax differentiates."""

    def definition_of_transpose(self, residuals: Arrays, cotangents: Arrays) -> Arrays:
        """`transpose` by operations that jax differentiates."""

    def result_types(self, residuals: Arrays, linear: Arrays) -> Types:
        """The types of the results."""

    def linear_types(self, residuals: Arrays, cotangents: Arrays) -> Types:
        """The types of `linear`."""


class Dual(Protocol):
    """A function and its derivative along some arrays, in one launch: `dual.Launch`."""

    def mapped(self, function: "MappedFunction", dims: Dims) -> "Dual":
        """The same under jax.vmap, which maps these axes of the tangents."""

    def bind(self, jaxpr: Jaxpr, arrays: Operands, along: Operands) -> tuple[Any, Any]:
        """The results and their tangents. `jaxpr`: the function's."""


class Function(Protocol):
    """A function of arrays: a static, hashable value."""

    def evaluate(self, arrays: Arrays) -> Arrays:
        """The results."""

    def named(self, results: Arrays) -> Arrays:
        """The results with the names by which policies of jax.checkpoint know them."""

    def derivative(self, moving: tuple[int, ...]) -> Linear:
        """The derivative along some of the arrays, by their numbers. Its residuals are all arrays
        and then the results.
        """

    def dual(self, moving: tuple[int, ...]) -> Dual | None:
        """The results and the derivative in one launch, where there is one."""


@dataclasses.dataclass(frozen=True)
class Transposed:
    """The transpose of an operation."""

    of: Linear

    def apply(self, residuals: Arrays, linear: Arrays) -> Arrays:
        return self.of.transpose(residuals, linear)

    def transpose(self, residuals: Arrays, cotangents: Arrays) -> Arrays:
        return self.of.apply(residuals, cotangents)

    def definition(self, residuals: Arrays, linear: Arrays) -> Arrays:
        return self.of.definition_of_transpose(residuals, linear)

    def definition_of_transpose(self, residuals: Arrays, cotangents: Arrays) -> Arrays:
        return self.of.definition(residuals, cotangents)

    def result_types(self, residuals: Arrays, linear: Arrays) -> Types:
        return self.of.linear_types(residuals, linear)

    def linear_types(self, residuals: Arrays, cotangents: Arrays) -> Types:
        return self.of.result_types(residuals, cotangents)


@dataclasses.dataclass(frozen=True)
class Mapped:
    """An operation under jax.vmap: results have the mapped axis in front."""

    of: Linear
    size: int
    residuals: Dims
    linear: Dims

    def apply(self, residuals: Arrays, linear: Arrays) -> Arrays:
        return self._mapped(self.of.apply, self.linear)(residuals, linear)

    def transpose(self, residuals: Arrays, cotangents: Arrays) -> Arrays:
        return self._summed(self.of.transpose, residuals, cotangents)

    def definition(self, residuals: Arrays, linear: Arrays) -> Arrays:
        return self._mapped(self.of.definition, self.linear)(residuals, linear)

    def definition_of_transpose(self, residuals: Arrays, cotangents: Arrays) -> Arrays:
        return self._summed(self.of.definition_of_transpose, residuals, cotangents)

    def result_types(self, residuals: Arrays, linear: Arrays) -> Types:
        return tuple(jax.make_jaxpr(self.apply)(residuals, linear).out_avals)

    def linear_types(self, residuals: Arrays, cotangents: Arrays) -> Types:
        return tuple(jax.make_jaxpr(self.transpose)(residuals, cotangents).out_avals)

    def _mapped(self, run: Callable[..., Arrays], dims: Dims | int) -> Callable[..., Arrays]:
        return jax.vmap(run, (self.residuals, dims), axis_size=self.size)

    def _summed(self, run: Callable[..., Arrays], residuals: Arrays, cotangents: Arrays) -> Arrays:
        """Cotangents of what is not mapped are sums over the mapped axis, in float32."""
        results = self._mapped(run, 0)(residuals, cotangents)
        return tuple(
            x.astype(sharding.sum_dtype(x.dtype)).sum(axis=0).astype(x.dtype)
            if dim is None
            else jnp.moveaxis(x, 0, dim)
            for x, dim in zip(results, self.linear, strict=True)
        )


@dataclasses.dataclass(frozen=True)
class MappedFunction:
    """A function under jax.vmap: results have the mapped axis in front."""

    of: Function
    size: int
    dims: Dims

    def evaluate(self, arrays: Arrays) -> Arrays:
        return jax.vmap(self.of.evaluate, (self.dims,), axis_size=self.size)(arrays)

    def named(self, results: Arrays) -> Arrays:
        return self.of.named(results)

    def derivative(self, moving: tuple[int, ...]) -> Linear:
        dims, of = self.dims, self.of.derivative(moving)
        return Mapped(of, self.size, (*dims, 0, 0), tuple(dims[n] for n in moving))

    def dual(self, moving: tuple[int, ...]) -> Dual | None:
        launch = self.of.dual(moving)
        return None if launch is None else launch.mapped(self, tuple(self.dims[n] for n in moving))


# ---- the primitive of a function -----------------------------------------------------------------

_function = Primitive("pallas_attn_function")
_function.multiple_results = True


def differentiable(
    function: Callable[..., Function],
    call: Operand,
    inputs: Operands,
    traced: Callable[[Operands], Jaxpr] | None = None,
) -> tuple[Array, ...]:
    """The results of `call.run(inputs)` for a tree of arrays, differentiated and mapped by the
    rules that `function(call, structure of inputs)` returns. `traced`: returns the jaxpr of
    `call.run` from a cache.
    """
    arrays, tree = jax.tree.flatten(inputs)
    if not any([isinstance(x, jax.core.Tracer) for x in arrays]):
        return call.run(inputs)
    # Traced here, where meshes and context variables are those of the call.
    jaxpr = (traced or jax.make_jaxpr(call.run))(inputs)
    return tuple(_function.bind(*arrays, function=function(call, tree), jaxpr=jaxpr))


def _run(*arrays: Array, function: Function, jaxpr: Jaxpr) -> list[Array]:
    del function
    return jaxpr_as_fun(jaxpr)(*arrays)


@_function.def_abstract_eval
def _(*arrays: Array, function: Function, jaxpr: Jaxpr) -> list[Any]:
    del arrays, function
    return list(jaxpr.out_avals)


_function.def_impl(_run)
mlir.register_lowering(_function, mlir.lower_fun(_run, multiple_results=True))


def _jvp_of_function(
    primals: Operands, tangents: Operands, *, function: Function, jaxpr: Jaxpr
) -> Any:
    moving = tuple([n for n, x in enumerate(tangents) if not is_zero(x)])
    along = [tangents[n] for n in moving]
    alone = not any([isinstance(x, JaxprTracer) for x in along])  # nobody wants a gradient
    if moving and alone and (launch := function.dual(moving)) is not None:
        return launch.bind(jaxpr, primals, along)
    results = bound(function, jaxpr, primals)
    if not moving:
        return results, [ad.Zero(jax.typeof(x)) for x in results]
    return results, call(function.derivative(moving), (*primals, *results), along)


def bound(function: Function, jaxpr: Jaxpr, arrays: Sequence[Array]) -> Arrays:
    """The results of a function that was traced before."""
    return function.named(tuple(_function.bind(*arrays, function=function, jaxpr=jaxpr)))


def _batch_function(
    arrays: Sequence[Array], dims: Operands, *, function: Function, jaxpr: Jaxpr
) -> Any:
    del jaxpr
    mapped = MappedFunction(function, mapped_size(arrays, dims), tuple(dims))
    jaxpr = jax.make_jaxpr(mapped.evaluate)(tuple(arrays))
    results = _function.bind(*arrays, function=mapped, jaxpr=jaxpr)
    return results, [0] * len(results)


def mapped_size(arrays: Sequence[Array], dims: Operands) -> int:
    """The size of the axis that vmap maps."""
    return next(x.shape[dim] for x, dim in zip(arrays, dims, strict=True) if dim is not None)


ad.primitive_jvps[_function] = _jvp_of_function
batching.primitive_batchers[_function] = _batch_function


# ---- the primitive of its derivative -------------------------------------------------------------

_linear = Primitive("pallas_attn_linear")
_linear.multiple_results = True


def call(operation: Linear, residuals: Sequence[Array], linear: Sequence[Array]) -> list[Array]:
    """`operation.apply(residuals, linear)`, which jax differentiates and maps."""
    residuals, linear = tuple(residuals), tuple(linear)
    if not any([isinstance(x, jax.core.Tracer) for x in (*residuals, *linear)]):
        return list(operation.apply(residuals, linear))
    # The context variables of this call decide, wherever jax evaluates the operation.
    run, jaxpr = sharding.as_now(operation.apply), None
    if isinstance(linear[0], JaxprTracer):  # usually only transposed; tracing takes time
        types = operation.result_types(residuals, linear)
    else:
        jaxpr = jax.make_jaxpr(run)(residuals, linear)
        types = tuple(jaxpr.out_avals)
    static: dict[str, Any] = {"operation": operation, "count": len(residuals), "types": types}
    return list(_linear.bind(*residuals, *linear, **static, jaxpr=jaxpr, run=run))


def staged(operation: Linear, count: int, types: Types) -> tuple[Primitive, dict[str, Any]]:
    """The primitive of a call, and its parameters, where it is traced when it is lowered."""
    static: dict[str, Any] = {"operation": operation, "count": count, "types": types}
    return _linear, static | {"jaxpr": None, "run": sharding.as_now(operation.apply)}


def staged_function(function: Function, jaxpr: Jaxpr) -> tuple[Primitive, dict[str, Any]]:
    """The primitive of a function that was traced before, and its parameters."""
    return _function, {"function": function, "jaxpr": jaxpr}


def apply(
    *arrays: Array, operation: Linear, count: int, types: Types, jaxpr: Jaxpr, run: Traced
) -> list[Array]:
    """The results of a call."""
    del operation, types
    if jaxpr is not None:
        return jaxpr_as_fun(jaxpr)(*arrays)
    return list(run(arrays[:count], arrays[count:]))


@_linear.def_abstract_eval
def _(*arrays: Array, types: Types, **static: Parameter) -> list[Any]:
    del arrays, static
    return list(types)


_linear.def_impl(apply)
mlir.register_lowering(_linear, mlir.lower_fun(apply, multiple_results=True))


def _jvp(
    primals: Operands, tangents: Operands, *, operation: Linear, count: int, **static: Parameter
) -> Any:
    results = _linear.bind(*primals, operation=operation, count=count, **static)
    residuals, linear = primals[:count], primals[count:]
    moving = [n for n, x in enumerate(tangents[:count]) if not is_zero(x)]
    parts = []
    if not all(map(is_zero, tangents[count:])):
        along = [ad.instantiate_zeros(x) for x in tangents[count:]]
        parts.append(call(operation, residuals, along))
    if moving:
        along = [tangents[n] for n in moving]
        parts.append(_along_residuals(operation, tuple(moving), residuals, linear, along))
    if not parts:
        return results, [ad.Zero(jax.typeof(x)) for x in results]
    return results, [sum(each[1:], each[0]) for each in zip(*parts, strict=True)]


def is_zero(tangent: Operand) -> bool:
    """Whether a tangent is a symbolic zero, or that of integers."""
    return type(tangent) is ad.Zero or tangent.dtype == jax.dtypes.float0


@jax.jit(static_argnums=(0, 1))
def _along_residuals(
    operation: Linear, moving: tuple[int, ...], residuals: Arrays, linear: Arrays, along: Arrays
) -> Arrays:
    """The derivative of the definition along some of the residuals, by their numbers."""

    def of(*some: Array) -> Arrays:
        every = dict(enumerate(residuals)) | dict(zip(moving, some, strict=True))
        return tuple(operation.definition(tuple(every.values()), tuple(linear)))

    return jax.jvp(of, [residuals[n] for n in moving], list(along))[1]


def _transpose(
    cotangents: Operands, *arrays: Operand, operation: Linear, count: int, **static: Parameter
) -> list[Any]:
    del static
    residuals, linear = arrays[:count], arrays[count:]
    results = call(Transposed(operation), residuals, [ad.instantiate_zeros(x) for x in cotangents])
    # A known array is no argument of the function that is transposed.
    wanted = map(ad.is_undefined_primal, linear)
    return [None] * count + [x if y else None for x, y in zip(results, wanted, strict=True)]


def _batch(
    arrays: Sequence[Array], dims: Operands, *, operation: Linear, count: int, **static: Parameter
) -> Any:
    del static
    mapped = Mapped(operation, mapped_size(arrays, dims), tuple(dims[:count]), tuple(dims[count:]))
    results = call(mapped, arrays[:count], arrays[count:])
    return results, [0] * len(results)


ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transpose
batching.primitive_batchers[_linear] = _batch
