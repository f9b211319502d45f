"""Launches over caches of separate arrays, of which one launch has parameters for so many."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_attn.kernels.attention import cache_layout
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import Operand

Arrays = dict[str, tuple[Operand, ...]]  # by name, those of each sequence or one of all


# XLA looks through the text of a launch for each of its operands: 512 arrays compile in 3 s, 1536
# in 27 s.
ARRAYS_OF_A_LAUNCH = 512


def most_arrays(each: int) -> int:
    """Sequences with so many arrays each that a launch has parameters for."""
    return (mosaic.PARAMETER_BYTES // 8 - 8) // each  # 8: the new rows, lengths and the like


def by_launches(
    caches: dict[str, Any],
    problem: Any,
    launch: Callable[[Arrays, Any, Callable[[Operand], Operand]], Arrays],
) -> dict[str, Any]:
    """The caches after `launch(arrays, problem, rows_of)`, called for some sequences after
    another. `rows_of` takes the rows of these sequences from an array [M, ..].
    """
    if not cache_layout.layout_of(problem).separate:
        written = launch({name: (x,) for name, x in caches.items()}, problem, lambda array: array)
        return {name: x for name, (x,) in written.items()}
    most = ARRAYS_OF_A_LAUNCH // len(caches)
    live = [m for m, capacity in enumerate(problem.capacities) if capacity]
    results = {name: list(arrays) for name, arrays in caches.items()}
    launches = -(-len(live) // most)  # equal sizes are one kernel
    ends = [len(live) * n // launches for n in range(launches + 1)]
    for some in (live[lo:hi] for lo, hi in itertools.pairwise(ends)):
        capacities = tuple(problem.capacities[m] for m in some)
        written = launch(
            {name: tuple(arrays[m] for m in some) for name, arrays in caches.items()},
            dataclasses.replace(problem, sequences=len(some), capacities=capacities),
            functools.partial(_rows_of, some),
        )
        for name, arrays in written.items():
            for m, array in zip(some, arrays, strict=True):
                results[name][m] = array
    return {name: tuple(arrays) for name, arrays in results.items()}


def _rows_of(sequences: list[int], array: Operand) -> Operand:
    """`array` itself where these are all of its sequences, as they mostly are. No slice: XLA would
    fuse it with the launch, and take more than linear time in the arrays of a fusion.
    """
    if len(sequences) == array.shape[0]:
        return array
    return array[jnp.asarray(sequences)]
