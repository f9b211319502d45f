"""The derivative of a call of attention: one linear operation (`linear.call`) from the tangents of
its inputs to those of out and lse. The transpose of this operation gives the gradients.

With P = softmax(S) and S' the tangent of the logits S:

    out' = (P o S') V + P V' - rowsum(P o S') out        lse' = rowsum(P o S')

Both directions start from the inputs, out and lse; a `Call` computes them for one kind of call.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.tree_util import PyTreeDef

from pallas_attn._autodiff import by_rows, linear, score_gradients
from pallas_attn._autodiff.by_rows import Rows
from pallas_attn._call import batching, dispatch
from pallas_attn._call.batching import Named
from pallas_attn._call.kernel import Chosen
from pallas_attn._call.problem import AttentionInputs, AttentionProblem, probabilities_of_sinks
from pallas_attn._call.special import Special
from pallas_attn._mesh import sharding

dual = Special("_autodiff.dual")  # results and tangents in one launch

Array = jax.Array
Arrays = tuple[Array, ...]
Results = tuple[Array, Array]  # out and lse, or their tangents or cotangents
MOVING = ("q", "k", "v", "bias")  # inputs along which kernels compute tangents


class Call(Protocol):
    """A call of attention: a static, hashable value."""

    def run(self, inputs: AttentionInputs) -> Results:
        """(out, lse), by kernels."""

    def tangents(self, inputs: AttentionInputs, results: Results, tangents: Named) -> Results:
        """The tangents of out and lse, by those of some inputs."""

    def dual(self, names: tuple[str, ...]) -> Callable[..., Arrays] | None:
        """Computes (out, lse, tangents of out and lse) by the inputs and tangents of some, in one
        launch; None where there is no such launch.
        """

    def gradients(self, inputs: AttentionInputs, rows: Rows, names: tuple[str, ...]) -> Named:
        """Gradients of at least the inputs `names`; those of `score_aux` are float32."""

    def definition(self, inputs: AttentionInputs) -> Results:
        """(out, lse), by operations that jax differentiates."""

    def definition_of_gradients(
        self, inputs: AttentionInputs, rows: Rows, names: tuple[str, ...]
    ) -> Named:
        """`gradients`, by operations that jax differentiates; if they use out and lse, along them,
        too.
        """


@dataclasses.dataclass(frozen=True)
class Attention:
    """A call as a function of the leaves of its inputs."""

    call: Call
    tree: PyTreeDef  # structure of the inputs

    def evaluate(self, arrays: Arrays) -> Results:
        return self.call.run(jax.tree.unflatten(self.tree, arrays))

    def named(self, results: Arrays) -> Results:
        """The results by their names. Where both are saved, no kernel of the forward runs again."""
        out, lse = results
        out = checkpoint_name(out, "flash_attention_out")
        return out, checkpoint_name(lse, "flash_attention_lse")

    def derivative(self, moving: tuple[int, ...]) -> "Derivative":
        numbers = jax.tree.unflatten(self.tree, range(self.tree.num_leaves))
        names = {number: name for name, number in numbers.named().items()}
        return Derivative(self.call, self.tree, tuple([names[number] for number in moving]))

    def dual(self, moving: tuple[int, ...]) -> linear.Dual | None:
        names = self.derivative(moving).names
        both = self.call.dual(names)
        if both is None:
            return None

        def run(arrays: Arrays, along: Arrays) -> Arrays:
            inputs = jax.tree.unflatten(self.tree, arrays)
            return both(inputs, dict(zip(names, along, strict=True)))

        launch: linear.Dual = dual.Launch(self, moving, run)
        return launch


@dataclasses.dataclass(frozen=True)
class Derivative:
    """The derivative of a call along the inputs of some names (`AttentionInputs.named`). Its
    residuals are the leaves of the inputs, out and lse.
    """

    call: Call
    tree: PyTreeDef  # structure of the inputs
    names: tuple[str, ...]

    def apply(self, residuals: Arrays, tangents: Arrays) -> Arrays:
        inputs, out, lse = self._residuals(residuals)
        return self.call.tangents(inputs, (out, lse), self._named(tangents))

    def transpose(self, residuals: Arrays, cotangents: Arrays) -> Arrays:
        (inputs, out, lse), (d_out, d_lse) = self._residuals(residuals), cotangents
        named = self.call.gradients(inputs, (out, lse, d_out, d_lse), self.names)
        for n in numbers_of_aux(self.names):
            name, array = f"score_aux{n}", inputs.score_aux[n]
            named[name] = sharding.gradient_of(array, named[name]).astype(array.dtype)
        return tuple([named[name] for name in self.names])

    def definition(self, residuals: Arrays, tangents: Arrays) -> Arrays:
        run, own = of_names(self.call, self._residuals(residuals)[0], self.names)
        return jax.jvp(run, [own], [self._named(tangents)])[1]

    def definition_of_transpose(self, residuals: Arrays, cotangents: Arrays) -> Arrays:
        inputs, out, lse = self._residuals(residuals)
        d_out, d_lse = cotangents
        rows = out, lse, d_out, d_lse
        gradients = self.call.definition_of_gradients(inputs, rows, self.names)
        pairs = [(inputs.named()[name], gradients[name]) for name in self.names]
        return tuple([sharding.gradient_of(x, y).astype(x.dtype) for x, y in pairs])

    def result_types(self, residuals: Arrays, tangents: Arrays) -> linear.Types:
        del tangents
        return tuple(map(jax.typeof, residuals[-2:]))

    def linear_types(self, residuals: Arrays, cotangents: Arrays) -> linear.Types:
        del cotangents
        named = self._residuals(residuals)[0].named()
        return tuple(jax.typeof(named[name]) for name in self.names)

    def _residuals(self, leaves: Arrays) -> tuple[AttentionInputs, Array, Array]:
        *of_inputs, out, lse = leaves
        return jax.tree.unflatten(self.tree, of_inputs), out, lse

    def _named(self, arrays: Sequence[Array]) -> Named:
        return dict(zip(self.names, arrays, strict=True))


def of_names(
    call: Call, inputs: AttentionInputs, names: Iterable[str]
) -> tuple[Callable[[Named], Results], Named]:
    """The definition of a call as a function of the inputs of these names, and their values."""
    named = inputs.named()

    def run(some: Named) -> Results:
        return call.definition(AttentionInputs.of(named | some))

    return run, {name: named[name] for name in names}


def numbers_of_aux(names: Sequence[str]) -> list[int]:
    """Indices into `score_aux` of the names that stand for its arrays: 3 for "score_aux3"."""
    return [int(name.removeprefix("score_aux")) for name in names if "score_aux" in name]


# ---- a call on one device, or over arrays that jax splits ----------------------------------------


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """A call that a kernel computes. `implementation`: the argument of the call, which also chooses
    the kernels of its derivatives. `forward`: a function that computes the results instead.
    """

    problem: AttentionProblem
    implementation: str | None
    chosen: Chosen
    forward: Callable[[AttentionProblem, str | None, AttentionInputs], Results] | None = None

    def run(self, inputs: AttentionInputs) -> Results:
        if self.forward is not None:
            return self.forward(self.problem, self.implementation, inputs)
        return batching.compiled_once(batching.attention, self.chosen, self.problem, inputs)

    def tangents(self, inputs: AttentionInputs, results: Results, tangents: Named) -> Results:
        by_kernel = {name: x for name, x in tangents.items() if name in MOVING}
        inputs_of_kernel = inputs._replace(sinks=None)  # the lse says what they do
        problem = dataclasses.replace(self.problem, tangents=tuple(sorted(by_kernel)))
        problem = batching.resized(dataclasses.replace(problem, op="flash_jvp"), inputs_of_kernel)
        chosen = dispatch.of_derivative(problem, self.implementation) if by_kernel else None
        if chosen is None:
            return by_definition(self, inputs, tangents)
        residuals = (inputs_of_kernel, *results, by_kernel)
        first = batching.compiled_once(batching.attention_tangents, chosen, problem, residuals)
        return self._with_others(inputs, results, tangents, first)

    def _with_others(
        self, inputs: AttentionInputs, results: Results, tangents: Named, first: Results
    ) -> Results:
        """The tangents along all inputs, by those along `MOVING`."""
        parts = [first]
        if "sinks" in tangents:
            parts.append(_along_sinks(inputs, results, tangents["sinks"]))
        if rest := {name: x for name, x in tangents.items() if name not in (*MOVING, "sinks")}:
            parts.append(by_definition(self, inputs, rest))
        out, lse = (sum(each[1:], each[0]) for each in zip(*parts, strict=True))
        return out, lse

    def dual(self, names: tuple[str, ...]) -> Callable[..., Arrays] | None:
        moving = tuple(sorted(set(names) & set(MOVING)))
        problem = dataclasses.replace(self.problem, op="flash_dual", tangents=moving)
        chosen = dispatch.of_derivative(problem, self.implementation) if moving else None
        if chosen is None:
            return None

        def run(inputs: AttentionInputs, tangents: Named) -> Arrays:
            arrays = inputs, {name: tangents[name] for name in moving}
            both = batching.compiled_once(batching.attention_tangents, chosen, problem, arrays)
            results, first = both[:2], both[2:]
            return *results, *self._with_others(inputs, results, tangents, first)

        return run

    def gradients(self, inputs: AttentionInputs, rows: Rows, names: tuple[str, ...]) -> Named:
        numbers, named = numbers_of_aux(names), dict[str, Array]()
        learned = score_gradients.by_kernels(self.problem, numbers) if numbers else ()
        if learned or len(numbers) < len(names):
            problem = dataclasses.replace(self.problem, op="flash_backward", learned=learned)
            chosen = dispatch.select(problem, self.implementation)
            backward, residuals = batching.attention_backward, (inputs, *rows)
            named = batching.compiled_once(backward, chosen, problem, residuals)
        rest = [n for n in numbers if n not in learned]
        if rest:
            rows = by_rows.exact_rows(self.problem, inputs, rows)
            gradients = score_gradients.of_call(self.problem, inputs, rest, rows)
            named |= {f"score_aux{n}": x for n, x in zip(rest, gradients, strict=True)}
        return named

    def definition(self, inputs: AttentionInputs) -> Results:
        return by_rows.attention(self.problem, inputs)

    def definition_of_gradients(
        self, inputs: AttentionInputs, rows: Rows, names: tuple[str, ...]
    ) -> Named:
        rows = by_rows.exact_rows(self.problem, inputs, rows)
        return by_rows.gradients(self.problem, inputs, rows, names)


def _along_sinks(inputs: AttentionInputs, results: Results, along: Array) -> Results:
    """Tangents of out and lse along the sinks: a sink is one more logit without a value row."""
    out, lse = results
    sinks, along = (jnp.asarray(x, lse.dtype)[None, :, None] for x in (inputs.sinks, along))
    moved = probabilities_of_sinks(sinks, lse) * along
    by_row = moved.swapaxes(1, 2)[..., None]
    return -(by_row * out.astype(lse.dtype)).astype(out.dtype), moved


@functools.partial(jax.jit, static_argnums=0)
def by_definition(call: Call, inputs: AttentionInputs, tangents: Named) -> Results:
    """The tangents of out and lse by those of some inputs, by operations of jax."""
    run, own = of_names(call, inputs, tangents)
    return jax.jvp(run, [own], [tangents])[1]
