"""Scores that add to a logit a multiple of the key's position, and a number of its row: ALiBi, say.

Such a score is known for a whole tile by a slope and an offset a row. So a logit takes one
multiply-add, not a subtraction of positions, a conversion and the products of both; and what a row
adds is subtracted with its max.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._functions import program as _program
from pallas_attn._functions.program import Operation, Program


class Linear(NamedTuple):
    """rest + slope * column (+ the score), where the two are of rows alone."""

    rest: Any
    slope: Any = None  # None: 0
    has_score: bool = False


class _NotLinear(Exception):
    pass


class Linears:
    """Values of this kind, of values of another: see `_program.Broadcasting`."""

    def __init__(self, values: Any):
        self.values = values

    def compute(self, operation: Operation, operands: Sequence[Any]) -> Any:
        if not any(isinstance(x, Linear) for x in operands):
            return self.values.compute(operation, operands)
        given = [x if isinstance(x, Linear) else Linear(x) for x in operands]
        rest = self.values.compute(operation, [x.rest for x in given])
        slopes = [x.slope for x in given]
        scores = [x.has_score for x in given]
        convert = operation.name == "convert_element_type"
        if operation.dtype != "float32" and (convert or any(scores) or operation.name == "mul"):
            raise _NotLinear
        if operation.name in ("add", "sub") and sum(scores) < 2:
            return Linear(rest, self._joined(operation, slopes), self._score(operation, scores))
        if any(scores) or None not in slopes and len(slopes) > 1:
            raise _NotLinear
        if operation.name in ("neg", "convert_element_type"):
            return Linear(rest, self.values.compute(operation, slopes))
        if operation.name == "mul":
            (factor,) = (x.rest for x in given if x.slope is None)
            (slope,) = (slope for slope in slopes if slope is not None)
            return Linear(rest, self.values.compute(operation, [slope, factor]))
        raise _NotLinear

    def _joined(self, operation: Operation, slopes: list[Any]) -> Any:
        first, second = slopes
        if second is None:
            return first
        if first is None:
            first = np.zeros((), operation.dtype)[()]
        return self.values.compute(operation, [first, second])

    def _score(self, operation: Operation, scores: list[bool]) -> bool:
        if operation.name == "sub" and scores[1]:
            raise _NotLinear
        return any(scores)

    def read(self, ref: Any, kind: Any, indices: Sequence[Any]) -> Any:
        if any(isinstance(index, Linear) for index in indices):
            raise _NotLinear
        return self.values.read(ref, kind, indices)


def evaluated(program: Program, numbers: Sequence[Any], aux: Any, values: Any) -> Linear:
    """What a program adds to its first input. `numbers`: the other inputs, with the position of the
    tile's first key last.
    """
    *others, key = numbers
    score = Linear(np.float32(0.0), None, True)
    given = score, *others, Linear(key, np.int32(1))
    found = _program.evaluate(program, given, aux, Linears(values))
    if not (isinstance(found, Linear) and found.has_score):
        raise _NotLinear
    return found


@functools.lru_cache(maxsize=256)
def is_linear(program: Program) -> bool:
    """Whether kernels may take a score function as `Linear`."""
    number = jax.ShapeDtypeStruct((), jnp.int32)
    arrays = [jax.ShapeDtypeStruct(*kind) for kind in program.arrays]

    def of(numbers: Any, arrays: Any) -> Any:
        return evaluated(program, numbers, arrays, _program.Broadcasting())[:2]

    try:
        jax.eval_shape(of, [number] * (program.inputs - 1), arrays)
    except _NotLinear:
        return False
    return True
