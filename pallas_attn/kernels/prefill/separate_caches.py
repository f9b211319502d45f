"""Many separate caches: a launch for a few of them after another.

A cache takes two tensor maps, and the host code of a launch loads all maps as one array of bytes,
which LLVM splits in more than linear time: 18 maps compile in a second, 66 in half a minute.
Launches of as many caches of equal capacities are one kernel, compiled once.
"""

import dataclasses
from typing import Any

from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn.kernels.attention import cache_layout

MOST = 8  # caches of a launch
FEWEST = 5  # the same, where launches of one size are more than have to be


def groups(problem: DecodeProblem) -> list[slice]:
    """The sequences of each launch; one launch takes all where a function reads their numbers."""
    count = problem.sequences
    if not cache_layout.layout_of(problem).separate or count <= MOST or problem.uses_batch:
        return [slice(0, count)]
    launches = -(-count // MOST)
    alike = [n for n in range(launches, count // FEWEST + 1) if count % n == 0]
    launches = min(alike, default=launches)
    ends = [count * n // launches for n in range(launches + 1)]
    return [slice(*pair) for pair in zip(ends, ends[1:], strict=False)]


def problem_of(problem: DecodeProblem, some: slice) -> DecodeProblem:
    capacities = problem.capacities[some]
    return dataclasses.replace(problem, sequences=len(capacities), capacities=capacities)


def inputs_of(problem: DecodeProblem, inputs: DecodeInputs, some: slice) -> DecodeInputs:
    """The arrays of some sequences; packed rows are those of all, found by `starts`."""

    def cut(array: Any) -> Any:
        return None if array is None else array[some]

    starts = inputs.starts
    return inputs._replace(
        q=inputs.q if problem.packed else inputs.q[some],
        k_cache=cut(inputs.k_cache),
        v_cache=cut(inputs.v_cache),
        lengths=cut(inputs.lengths),
        new_lengths=cut(inputs.new_lengths),
        starts=None if starts is None else starts[some.start : some.stop + 1],
    )
