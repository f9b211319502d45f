"""Many separate caches: a launch for some of them after another, since what compiles a launch takes
more than linear time in its arrays. Launches of as many caches of equal capacities are one kernel,
compiled once.
"""

import dataclasses

import jax.numpy as jnp

from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn.kernels.attention import cache_layout
from pallas_attn.kernels.lang.types import Operand

Results = tuple[Operand, Operand]  # out and lse


def groups(problem: DecodeProblem, most: int) -> list[slice]:
    """The sequences of each launch, up to `most`: as few launches as there can be, or a few more of
    one size. One launch takes all where a function reads their numbers.
    """
    count = problem.sequences
    if not cache_layout.layout_of(problem).separate or count <= most or problem.uses_batch:
        return [slice(0, count)]
    launches = -(-count // most)
    alike = [n for n in range(launches, count * 8 // (most * 5) + 1) if count % n == 0]
    launches = min(alike, default=launches)
    ends = [count * n // launches for n in range(launches + 1)]
    return [slice(*pair) for pair in zip(ends, ends[1:], strict=False)]


def problem_of(problem: DecodeProblem, some: slice) -> DecodeProblem:
    capacities = problem.capacities[some]
    return dataclasses.replace(problem, sequences=len(capacities), capacities=capacities)


def inputs_of(problem: DecodeProblem, inputs: DecodeInputs, some: slice) -> DecodeInputs:
    """The arrays of some sequences; packed rows are those of all, found by `starts`."""

    def cut[T: (Operand, tuple[Operand, ...])](array: T | None) -> T | None:
        return None if array is None else array[some]

    starts = inputs.starts
    return inputs._replace(
        q=inputs.q if problem.packed else inputs.q[some],
        k_cache=cut(inputs.k_cache),
        v_cache=cut(inputs.v_cache),
        k_scale=cut(inputs.k_scale),
        v_scale=cut(inputs.v_scale),
        lengths=cut(inputs.lengths),
        new_lengths=cut(inputs.new_lengths),
        starts=None if starts is None else starts[some.start : some.stop + 1],
    )


def joined(parts: list[Results]) -> Results:
    """Results of all sequences."""
    outs, lses = zip(*parts, strict=True)
    return jnp.concatenate(outs), jnp.concatenate(lses)
