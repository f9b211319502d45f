"""Score functions that add to a logit a multiple of the key's position, and a number of its row:
ALiBi, of BLOOM, MPT and Baichuan.

Such a score is known for a whole tile by a slope and an offset a row. A logit takes one
multiply-add, not a subtraction of positions, a conversion and the products of both; and the number
that a row adds is subtracted with its max. On an H200 2 x 8192 causal rows of 16 heads with ALiBi
take 0.777 ms at head dim 128 and 0.562 ms at 64; by the function itself 0.958 and 0.796.

First the program: whether it is such a function, and its slope and offset. Then the logits of the
Hopper forward.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_attn._call.problem import AttentionProblem
from pallas_attn._functions import program as _program
from pallas_attn._functions.program import Operation, Program
from pallas_attn.kernels.attention import functions, softmax
from pallas_attn.kernels.attention.tiles import KernelContext, LogitTile
from pallas_attn.kernels.lang import mosaic, slopes
from pallas_attn.kernels.lang.types import Ref, RegisterTile


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
        linear = [x if isinstance(x, Linear) else Linear(x) for x in operands]
        rest = self.values.compute(operation, [x.rest for x in linear])
        slopes = [x.slope for x in linear]
        scores = [x.has_score for x in linear]
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
            (factor,) = (x.rest for x in linear if x.slope is None)
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

    def read(self, ref: Ref, kind: Any, indices: Sequence[Any]) -> Any:
        if any(isinstance(index, Linear) for index in indices):
            raise _NotLinear
        return self.values.read(ref, kind, indices)


def evaluated(program: Program, numbers: Sequence[Any], aux: Any, values: Any) -> Linear:
    """The sum that a program adds to its first input. `numbers`: the other inputs, with the
    position of the tile's first key last.
    """
    *others, key = numbers
    score = Linear(np.float32(0.0), None, True)
    inputs = score, *others, Linear(key, np.int32(1))
    result = _program.evaluate(program, inputs, aux, Linears(values))
    if not (isinstance(result, Linear) and result.has_score):
        raise _NotLinear
    return result


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


def takes(problem: AttentionProblem) -> bool:
    """Whether the Hopper forward takes a problem's score function as slopes and offsets of rows."""
    others = problem.softcap is not None or "bias" in problem.arrays or problem.dtype == "float32"
    if problem.score_program is None or others or softmax.unit_of(problem.scale) is None:
        return False
    return is_linear(problem.score_program)


# ---- in the kernel ------------------------------------------------------------------------------


def sloped(
    ctx: KernelContext, tile: LogitTile, s: RegisterTile
) -> tuple[RegisterTile, RegisterTile]:
    """Scores with the part of the function that depends on the key added; and the rest, the
    `offset` of `softmax.step`.
    """
    registers = functions.Registers(s.shape, tile.layout)
    program, rows = ctx.plan.problem.score_program, (tile.q_axis,)
    row_numbers = functions.numbers_of_rows(program, registers, tile)
    numbers = *row_numbers, functions.Value(tile.key, ())
    linear = evaluated(program, numbers, ctx.refs.score_aux, registers)
    shape = (s.shape[0], softmax.PARTIALS)

    def each_row(x: Any) -> RegisterTile:
        return plgpu.layout_cast(registers.spread(x, rows), mosaic.ROW)

    offset = mosaic.broadcast_rows(softmax.to_log2(each_row(linear.rest)), shape)
    if linear.slope is None:
        return s, offset
    slope = each_row(linear.slope)
    column = mosaic.positions(shape, 1, 0).astype(jnp.float32)
    offset = offset + mosaic.broadcast_rows(softmax.to_log2(slope), shape) * column
    s = slopes.add_slopes(s, slope * (1 / ctx.plan.problem.scale))
    return s, offset
