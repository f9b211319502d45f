"""A function and its derivative in one launch, where forward mode alone asks for both.

It is for `jax.jvp` without gradients around it, which makes the targets of MeanFlow and of
consistency models: there one launch (`kernels.flash_jvp.sm90_dual`) takes 5 to 22 % less time than
two.

jax computes gradients by the derivative rule too: it evaluates the known part (the results) and
stages the rest (the derivative) for later. An operation that computes both has to be split then.
The rules below do so: where only the results are known, they replace the operation of `bind` by the
function and its derivative (`linear.call`), with the results under the names that policies of
jax.checkpoint know. A second operation, `_choose`, follows these names: it passes on the tangents
of the launch, and where the launch was split it becomes the derivative of the named results.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from pallas_attn._autodiff import linear
from pallas_attn._autodiff.linear import Jaxpr, Operand, Operands, Parameter, Traced
from pallas_attn._mesh import sharding

Array = jax.Array
Tracer = Any  # a tracer of a partial evaluation, or its trace
Policy = Any  # a policy of jax.checkpoint
Equation = Any  # an equation of a jaxpr
# (known equation, staged one, unknown results, results that are there, residuals)
Rule = Any

_dual, _choose = Primitive("pallas_attn_dual"), Primitive("pallas_attn_choose")
_dual.multiple_results = _choose.multiple_results = True


@dataclasses.dataclass(frozen=True)
class Launch:
    """A function and its derivative along some of its arrays, by their numbers: a `linear.Dual`.
    `run`: computes both, by all arrays and the tangents of some.
    """

    function: linear.Function
    moving: tuple[int, ...]
    run: Callable[[Operands, Operands], Any]

    def mapped(self, function: linear.MappedFunction, dims: linear.Dims) -> "Launch":
        run = jax.vmap(self.run, (function.dims, dims), axis_size=function.size)
        return Launch(function, self.moving, run)

    def bind(self, jaxpr: Jaxpr, arrays: Operands, along: Operands) -> tuple[Any, Any]:
        """The results of the function and their tangents. `jaxpr`: the function's."""
        both = self.both(jaxpr, arrays, along)
        results = self.function.named(tuple(both[: len(both) // 2]))
        tangents = both[len(both) // 2 :]
        static = {"function": self.function, "jaxpr": jaxpr, "moving": self.moving}
        return results, _choose.bind(*tangents, *arrays, *results, *along, **static)

    def both(self, jaxpr: Jaxpr, arrays: Operands, along: Operands) -> list[Array]:
        """The results, without names, and their tangents as the launch has them."""
        run, dual = sharding.as_now(self.run), None
        if jax.sharding.get_abstract_mesh().manual_axes:  # unknown where it is lowered
            dual = jax.make_jaxpr(run)(tuple(arrays), tuple(along))
        static = {"function": self.function, "jaxpr": jaxpr, "moving": self.moving}
        return list(_dual.bind(*arrays, *along, run=run, dual=dual, **static))


def _run(
    *arrays: Array, run: Traced, dual: Traced, moving: tuple[int, ...], **static: Parameter
) -> list[Array]:
    del static
    if dual is not None:
        return jaxpr_as_fun(dual)(*arrays)
    count = len(arrays) - len(moving)
    return list(run(arrays[:count], arrays[count:]))


def _chosen(*arrays: Array, jaxpr: Jaxpr, **static: Parameter) -> list[Array]:
    del static
    return list(arrays[: len(jaxpr.out_avals)])


_dual.def_abstract_eval(lambda *_, jaxpr, **static: [*jaxpr.out_avals] * 2)
_choose.def_abstract_eval(lambda *_, jaxpr, **static: [*jaxpr.out_avals])
for primitive, implementation in ((_dual, _run), (_choose, _chosen)):
    primitive.def_impl(implementation)
    mlir.register_lowering(primitive, mlir.lower_fun(implementation, multiple_results=True))


# ---- jvp, transpose and vmap ---------------------------------------------------------------------


def _apart(arrays: Sequence[Array], along: Sequence[Array], static: Parameter) -> list[Array]:
    """The results and the tangents, by two operations."""
    function, moving = static["function"], static["moving"]
    results = linear.bound(function, static["jaxpr"], arrays)
    return [*results, *linear.call(function.derivative(moving), (*arrays, *results), along)]


def _jvp(
    primals: Operands, tangents: Operands, *, run: Traced, dual: Traced, **static: Parameter
) -> Any:
    del run, dual
    count = len(primals) - len(static["moving"])
    some = [n for n, x in enumerate(tangents) if not linear.is_zero(x)]

    def of(*arrays: Array) -> list[Array]:
        every = list(primals)
        for n, x in zip(some, arrays, strict=True):
            every[n] = x
        return _apart(every[:count], every[count:], static)

    return jax.jvp(of, [primals[n] for n in some], [tangents[n] for n in some])


def _jvp_of_choice(
    primals: Operands, tangents: Operands, *, jaxpr: Jaxpr, **static: Parameter
) -> Any:
    del static
    count = len(jaxpr.out_avals)
    return list(primals[:count]), list(tangents[:count])


def _transpose(
    cotangents: Operands, *arrays: Operand, run: Traced, dual: Traced, **static: Parameter
) -> Any:
    del run, dual
    function, moving = static["function"], static["moving"]
    count = len(arrays) - len(moving)
    results = linear.bound(function, static["jaxpr"], arrays[:count])
    cotangents = [ad.instantiate_zeros(x) for x in cotangents[len(results) :]]
    operation = linear.Transposed(function.derivative(moving))
    gradients = linear.call(operation, (*arrays[:count], *results), cotangents)
    wanted = map(ad.is_undefined_primal, arrays[count:])
    return [None] * count + [x if y else None for x, y in zip(gradients, wanted, strict=True)]


def _transpose_of_choice(cotangents: Operands, *arrays: Operand, **static: Parameter) -> Any:
    del static
    count = len(cotangents)
    wanted = map(ad.is_undefined_primal, arrays[:count])
    own = [x if y else None for x, y in zip(cotangents, wanted, strict=True)]
    return own + [None] * (len(arrays) - count)


def _is_alike(moving: tuple[int, ...], dims: Operands, count: int) -> bool:
    """Whether vmap maps each array and its tangent alike."""
    return [dims[n] for n in moving] == list(dims[count:])


def _batch(
    arrays: Operands, dims: Operands, *, run: Traced, dual: Traced, **static: Parameter
) -> Any:
    del run, dual
    function, moving, jaxpr = static["function"], static["moving"], static["jaxpr"]
    count, size = len(arrays) - len(moving), linear.mapped_size(arrays, dims)
    own, along = tuple(dims[:count]), tuple(dims[count:])
    mapped, at = function, None
    if any(dim is not None for dim in own):
        mapped, at = linear.MappedFunction(function, size, own), 0
        jaxpr = jax.make_jaxpr(mapped.evaluate)(tuple(arrays[:count]))
    if _is_alike(moving, dims, count):
        both = mapped.dual(moving).both(jaxpr, arrays[:count], arrays[count:])
        return both, [0] * len(both)
    results = linear.bound(mapped, jaxpr, arrays[:count])
    operation = linear.Mapped(function.derivative(moving), size, (*own, at, at), along)
    tangents = linear.call(operation, (*arrays[:count], *results), arrays[count:])
    return [*results, *tangents], [at] * len(results) + [0] * len(tangents)


def _batch_choice(arrays: Operands, dims: Operands, **static: Parameter) -> Any:
    function, moving, jaxpr = static["function"], static["moving"], static["jaxpr"]
    results = len(jaxpr.out_avals)
    count = len(arrays) - 2 * results - len(moving)
    if not _is_alike(moving, dims[results:][:count] + dims[len(dims) - len(moving) :], count):
        return arrays[:results], dims[:results]  # it has come apart
    size, own = linear.mapped_size(arrays, dims), tuple(dims[results : results + count])
    mapped = linear.MappedFunction(function, size, own)
    primals = arrays[results : results + count]
    jaxpr = jax.make_jaxpr(mapped.evaluate)(tuple(primals))
    at_front = [*range(results), *range(results + count, 2 * results + count)]
    arrays = [
        batching.bdim_at_front(x, dim, size) if n in at_front else x
        for n, (x, dim) in enumerate(zip(arrays, dims, strict=True))
    ]
    chosen = _choose.bind(*arrays, function=mapped, moving=moving, jaxpr=jaxpr)
    return chosen, [0] * results


ad.primitive_jvps[_dual], ad.primitive_jvps[_choose] = _jvp, _jvp_of_choice
ad.primitive_transposes[_dual] = _transpose
ad.primitive_transposes[_choose] = _transpose_of_choice
batching.primitive_batchers[_dual], batching.primitive_batchers[_choose] = _batch, _batch_choice


# ---- under gradients: the launch is split in two -------------------------------------------------


def _derivative_of(static: Parameter, count: int) -> tuple[Primitive, dict[str, Any]]:
    """The derivative by `count` arrays and the results, as an operation to stage."""
    types = tuple(static["jaxpr"].out_avals)
    operation = static["function"].derivative(static["moving"])
    return linear.staged(operation, count + len(types), types)


def _partly(
    trace: Tracer, *tracers: Tracer, run: Traced, dual: Traced, **static: Parameter
) -> list[Any]:
    """The launch where tangents are not known."""
    count = len(tracers) - len(static["moving"])
    whole = {"run": run, "dual": dual, **static}
    if all(x.is_known() for x in tracers) or not all(x.is_known() for x in tracers[:count]):
        return trace.default_process_primitive(_dual, tracers, whole)
    arrays = [x.pval.get_known() for x in tracers[:count]]
    results = linear.bound(static["function"], static["jaxpr"], arrays)
    own = [*tracers[:count], *map(trace.new_const, results)]
    staged = _derivative_of(static, count)
    tangents = trace.default_process_primitive(staged[0], [*own, *tracers[count:]], staged[1])
    return [*results, *tangents]


def _choose_partly(trace: Tracer, *tracers: Tracer, **static: Parameter) -> list[Any]:
    results = len(static["jaxpr"].out_avals)
    known = [x.is_known() for x in tracers]
    count = len(tracers) - 2 * results - len(static["moving"])
    if any(known[:results]) or not all(known[results : 2 * results + count]):
        return trace.default_process_primitive(_choose, tracers, static)
    staged = _derivative_of(static, count)
    return trace.default_process_primitive(staged[0], tracers[results:], staged[1])


def _whole(saveable: Policy, unknown: Sequence[bool], there: Sequence[bool], eqn: Equation) -> Rule:
    """An equation that is not split, as jax treats equations without a rule."""
    count = len(eqn.outvars)
    missing = [x for x, is_there in zip(eqn.invars, there, strict=True) if not is_there]
    if any(unknown):
        return None, eqn, [True] * count, [True] * count, missing
    types = [x.aval for x in eqn.invars]
    if saveable(eqn.primitive, *types, **eqn.params) is True:
        return eqn, None, [False] * count, [False] * count, []
    return eqn, eqn, [False] * count, [True] * count, missing


def _staged(
    saveable: Policy, unknown: Sequence[bool], there: Sequence[bool], eqn: Equation
) -> Rule:
    """The launch in a function under jax.checkpoint, where tangents are not known: the results are
    known, and computed again with the tangents unless a policy saves them. `_staged_choice` makes
    the derivative of the named ones; jax then drops results that nothing reads.
    """
    static = eqn.params
    count, results = len(eqn.invars) - len(static["moving"]), len(static["jaxpr"].out_avals)
    if any(unknown[:count]) or not any(unknown):
        return _whole(saveable, unknown, there, eqn)
    primitive, params = linear.staged_function(static["function"], static["jaxpr"])
    known = eqn.replace(
        primitive=primitive,
        invars=eqn.invars[:count],
        outvars=eqn.outvars[:results],
        params=params,
    )
    missing = [x for x, is_there in zip(eqn.invars, there, strict=True) if not is_there]
    half = [False] * results + [True] * results
    types = [x.aval for x in known.invars]
    if saveable(primitive, *types, **params) is not True:
        return known, eqn, half, [True] * (2 * results), missing
    primitive, params = _derivative_of(static, count)
    own = [*eqn.invars[:count], *known.outvars, *eqn.invars[count:]]
    tangents = eqn.outvars[results:]
    later = eqn.replace(primitive=primitive, invars=own, outvars=tangents, params=params)
    return known, later, half, half, [*missing, *known.outvars]


def _staged_choice(
    saveable: Policy, unknown: Sequence[bool], there: Sequence[bool], eqn: Equation
) -> Rule:
    static = eqn.params
    results = len(static["jaxpr"].out_avals)
    count = len(eqn.invars) - 2 * results - len(static["moving"])
    if not all(unknown[:results]) or any(unknown[results : 2 * results + count]):
        return _whole(saveable, unknown, there, eqn)
    primitive, params = _derivative_of(static, count)
    later = eqn.replace(primitive=primitive, invars=eqn.invars[results:], params=params)
    used = zip(eqn.invars[results:], there[results:], strict=True)
    missing = [x for x, is_there in used if not is_there]
    return None, later, [True] * results, [True] * results, missing


pe.custom_partial_eval_rules[_dual] = _partly
pe.custom_partial_eval_rules[_choose] = _choose_partly
pe.partial_eval_jaxpr_custom_rules[_dual] = _staged
pe.partial_eval_jaxpr_custom_rules[_choose] = _staged_choice
