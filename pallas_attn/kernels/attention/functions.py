"""Functions of positions in kernels: masks and scores on a tile of logits in registers.

A value of a program is computed where it differs: once a block where it depends on batch row and
head alone, once a row or a column where on the positions of queries or of keys alone. What depends
on both is a tile.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._call.problem import AttentionInputs
from pallas_attn._functions import program as _program
from pallas_attn._functions import tracing
from pallas_attn._functions.program import Operation, Program
from pallas_attn.kernels.attention import softmax
from pallas_attn.kernels.attention.tiles import KernelContext as Context
from pallas_attn.kernels.attention.tiles import LogitTile
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.gather import gather
from pallas_attn.kernels.lang.types import DType, Layout, Ref, RegisterTile

OPERATIONS = _program.OPERATIONS | {"tanh": softmax.tanh}


class Value(NamedTuple):
    """A number, a vector along one axis of a tile, or a tile."""

    x: Any
    axes: tuple[int, ...]  # axes of the tile that it has


class Registers:
    """Values of a tile in some layout: see `_program.Broadcasting`."""

    def __init__(self, shape: tuple[int, int], layout: Layout):
        self.shape, self.layout = shape, layout

    def along(self, axis: int, start: Any, numbers: Any = None) -> Value:
        """start, start + 1, .. along one axis. `numbers`: 0, 1, .. in shared memory, to be read
        where they are used.
        """
        layout = self.layout.reduce(1 - axis)
        if numbers is not None:
            return Value(mosaic.load(numbers, layout) + start, (axis,))
        size = (self.shape[axis],)
        counted = plgpu.broadcasted_iota(jnp.int32, size, 0, layout=layout)
        return Value(counted + start, (axis,))

    def spread(self, value: Any, axes: tuple[int, ...]) -> Any:
        """A value over more axes of the tile."""
        shape = tuple(self.shape[axis] for axis in axes)
        if not isinstance(value, Value):  # a constant
            if _program.is_narrow(value.dtype):
                value = value.astype(_held_in(value.dtype))
            return jnp.full(shape, value, value.dtype) if axes else jnp.asarray(value)
        if value.axes == axes:
            return value.x
        return lax.broadcast_in_dim(value.x, shape, [axes.index(axis) for axis in value.axes])

    def compute(self, operation: Operation, operands: Sequence[Any]) -> Value:
        used = {axis for x in operands if isinstance(x, Value) for axis in x.axes}
        axes = tuple(sorted(used))
        spread = [self.spread(x, axes) for x in operands]
        return Value(_program.compute(operation, spread, OPERATIONS), axes)

    def read(self, ref: Ref, kind: Any, indices: Sequence[Any]) -> Value:
        """`ref` is the array, flat, of 32 bits."""
        shape, dtype = kind

        def do(name, *operands):
            return self.compute(Operation(name, (), "int32"), operands)

        flat: Any = Value(jnp.int32(0), ())
        for index, size in zip(indices, shape, strict=True):
            inside = do("clamp", np.int32(0), index, np.int32(size - 1))
            flat = do("add", do("mul", flat, np.int32(size)), inside)
        layout = self.layout
        if len(flat.axes) == 1:
            layout = layout.reduce(1 - flat.axes[0])
        elements = gather(ref, flat.x, layout) if flat.axes else ref[flat.x]
        if dtype == "bool":
            elements = elements != 0
        elif jnp.dtype(dtype).itemsize in (2, 4):  # 8 bits are only compared, 64 not for kernels
            elements = elements.astype(dtype)
        return Value(elements, flat.axes)


def _held_in(dtype: DType) -> Any:
    """The type of 32 bits that kernels hold numbers of an array in."""
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32


def _numbers(program: Program, registers: Registers, place: Any) -> tuple[Value, ...]:
    """Batch row, head and positions of a tile of logits."""
    kv = Value(None, ())
    if program.depends_on(program.inputs - 1):
        kv = registers.along(1 - place.q_axis, place.key)
    return *numbers_of_rows(program, registers, place), kv


def numbers_of_rows(program: Program, registers: Registers, place: Any) -> tuple[Value, ...]:
    """All but the positions of keys. What nobody uses is not made: it sends Mosaic on a search for
    its layout, which may not end.
    """
    if place.rows is not None:
        head, q = (Value(x, () if x is None else (place.q_axis,)) for x in place.rows)
        return Value(place.batch, ()), head, q
    q = Value(None, ())
    if program.depends_on(program.inputs - 2):
        q = registers.along(place.q_axis, place.q_offset + place.query, place.numbers)
    return Value(place.batch, ()), Value(place.head, ()), q


def seen(ctx: Context, place: Any, shape: tuple[int, int]) -> Any:
    """bool, a tile: what the mask function shows."""
    program, registers = ctx.plan.problem.mask_program, Registers(shape, place.layout)
    return seen_at(ctx, _numbers(program, registers, place), registers)


def seen_at(ctx: Context, numbers: Sequence[Value], registers: Registers) -> Any:
    """`seen` of a tile's batch row, head and positions."""
    program = ctx.plan.problem.mask_program
    assert program is not None
    shown = _program.evaluate(program, numbers, ctx.refs.mask_aux, registers)
    return registers.spread(shown, (0, 1))


def score(ctx: Context, place: Any, s: RegisterTile) -> tuple[Any, Any]:
    """The result of the score function for a tile of logits in natural units; and its slope there,
    where it is differentiated, else None.
    """
    registers = Registers(s.shape, place.layout)
    (plan, refs, _), slope = ctx, None
    program = plan.problem.score_program
    assert program is not None
    numbers = Value(s, (0, 1)), *_numbers(program, registers, place)
    if plan.problem.op != "flash_forward":
        derivative = tracing.derivative(program)
        aux = tracing.derivative_arrays(program, refs.score_aux)
        derived = _program.evaluate(derivative, numbers, aux, registers)
        slope = registers.spread(derived, (0, 1)).astype(jnp.float32)
    scored = _program.evaluate(program, numbers, refs.score_aux, registers)
    return registers.spread(scored, (0, 1)).astype(jnp.float32), slope


def on_tile(
    program: Program,
    aux: Sequence[Any],
    place: LogitTile,
    s: RegisterTile | None,
    shape: tuple[int, int],
) -> RegisterTile:
    """A program of a score and its positions, evaluated in float32 on a tile of logits. `s`: the
    scores; None where the program does not read them.
    """
    registers, score = Registers(shape, place.layout), Value(s, (0, 1))
    numbers = score, *_numbers(program, registers, place)
    result = _program.evaluate(program, numbers, aux, registers)
    return registers.spread(result, (0, 1)).astype(jnp.float32)


def operands(inputs: AttentionInputs) -> dict[str, Any]:
    """The arrays that functions read, as kernels want them."""
    return {"mask_aux": flat(inputs.mask_aux), "score_aux": flat(inputs.score_aux)}


def flat(arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Arrays of one axis, of 32 bits; none of 8, which are blocks (`MaskFunction.blocks`)."""
    return tuple(x.astype(_held_in(x.dtype)).reshape(-1) for x in arrays if x.dtype != jnp.uint8)
