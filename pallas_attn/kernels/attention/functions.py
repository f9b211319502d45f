"""Functions of positions in kernels: masks and scores on a tile of logits in registers, and which
tiles a mask leaves.

A value of a program is computed where it differs: once a block where it depends on batch row and
head alone, once a row or a column where on the positions of queries or of keys alone. What depends
on both is a tile.

The tiles that a mask leaves are listed before the kernel runs, `listed`: for each tile of queries
the tiles of keys (for a backward over keys the other way round), first those that every query sees
whole, then those that need a mask. A kernel walks over the list as it walks over a `Span`; number j
of it stands for tile `Listed.tile(j)`. Tiles that nobody sees are not in it.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn import _program
from pallas_attn._problem import AttentionInputs, AttentionProblem
from pallas_attn._program import Operation
from pallas_attn.kernels.attention import softmax
from pallas_attn.kernels.attention.plan import DYNAMIC, Span
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.gather import gather

OPERATIONS = _program.OPERATIONS | {"tanh": softmax.tanh}


class Value(NamedTuple):
    """A number, a vector along one axis of a tile, or a tile."""

    x: Any
    axes: tuple[int, ...]  # of the tile's


class Registers:
    """Values of a tile in some layout: see `_program.Broadcasting`."""

    def __init__(self, shape: tuple[int, int], layout: Any):
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
        found = {axis for x in operands if isinstance(x, Value) for axis in x.axes}
        axes = tuple(sorted(found))
        given = [self.spread(x, axes) for x in operands]
        return Value(_program.compute(operation, given, OPERATIONS), axes)

    def read(self, ref: Any, kind: Any, indices: Sequence[Any]) -> Value:
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
        found = gather(ref, flat.x, layout) if flat.axes else ref[flat.x]
        if dtype == "bool":
            found = found != 0
        elif jnp.dtype(dtype).itemsize in (2, 4):  # 8 bits are only compared, 64 not for kernels
            found = found.astype(dtype)
        return Value(found, flat.axes)


def _held_in(dtype: Any) -> Any:
    """The type of 32 bits that kernels hold numbers of an array in."""
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32


def _numbers(registers: Registers, place: Any) -> tuple[Value, ...]:
    """Batch row, head and positions of a tile of logits."""
    kv = registers.along(1 - place.q_axis, place.key)
    if place.rows is not None:
        head, q = (Value(x, () if x is None else (place.q_axis,)) for x in place.rows)
        return Value(place.batch, ()), head, q, kv
    q = registers.along(place.q_axis, place.q_offset + place.query, place.numbers)
    return Value(place.batch, ()), Value(place.head, ()), q, kv


def seen(problem: AttentionProblem, refs: Any, place: Any, shape: tuple[int, int]) -> Any:
    """bool, a tile: what the mask function shows."""
    registers = Registers(shape, place.layout)
    return seen_at(problem, refs, _numbers(registers, place), registers)


def seen_at(problem: Any, refs: Any, numbers: Sequence[Value], registers: Registers) -> Any:
    """`seen` of a tile's batch row, head and positions."""
    assert problem.mask_program is not None
    found = _program.evaluate(problem.mask_program, numbers, refs.mask_aux, registers)
    return registers.spread(found, (0, 1))


def score(problem: AttentionProblem, refs: Any, place: Any, s: Any) -> tuple[Any, Any]:
    """What the score function makes of a tile of logits in natural units; and its slope there, in a
    backward, else None.
    """
    registers = Registers(s.shape, place.layout)
    numbers = Value(s, (0, 1)), *_numbers(registers, place)
    program, slope = problem.score_program, None
    assert program is not None
    if problem.op == "flash_backward":
        derivative = _program.derivative(program)
        aux = _program.derivative_arrays(program, refs.score_aux)
        found = _program.evaluate(derivative, numbers, aux, registers)
        slope = registers.spread(found, (0, 1)).astype(jnp.float32)
    found = _program.evaluate(program, numbers, refs.score_aux, registers)
    return registers.spread(found, (0, 1)).astype(jnp.float32), slope


def operands(inputs: AttentionInputs) -> dict[str, Any]:
    """The arrays that functions read, as kernels want them."""
    return {"mask_aux": flat(inputs.mask_aux), "score_aux": flat(inputs.score_aux)}


def flat(arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Arrays of one axis, of 32 bits."""
    return tuple(x.astype(_held_in(x.dtype)).reshape(-1) for x in arrays)


# ---- which tiles a mask leaves ------------------------------------------------------------------


class Listed(NamedTuple):
    """The tiles that a work tile needs, by number."""

    ref: Any  # see `tiles`
    batch: Any
    head: Any
    row: Any

    @classmethod
    def of(cls, ref: Any, batch: Any, head: Any, row: Any) -> "Listed":
        batches, heads = ref.shape[:2]
        return cls(ref, batch if batches > 1 else 0, head if heads > 1 else 0, row)

    @property
    def span(self) -> Span:
        whole, every = (self.ref[self.batch, self.head, self.row, i] for i in (0, 1))
        return Span(0, 0, whole, every)

    def tile(self, j: Any) -> Any:
        """The tile that number j of the list is; j may lie before the first."""
        at = max(j, 0) if isinstance(j, int) else jnp.maximum(j, 0)
        return self.ref[self.batch, self.head, self.row, at + 2]


MOST_READ = 2**22  # numbers that `_Once` keeps


def tiles(
    problem: AttentionProblem, inputs: AttentionInputs, rows: int, block: int, by_keys: bool = False
) -> Any:
    """int32[B or 1, N or 1, tiles, 2 + n]: for each tile of `rows` queries how many tiles of
    `block` keys all of them see whole, how many some of them see, then these and the others that
    are seen. `by_keys`: for each tile of keys those of queries, of kv heads.
    """
    fixed = static(problem, rows, block, by_keys)
    if fixed is not None:
        return jnp.asarray(fixed)
    return _tiles(problem, inputs, rows, block, by_keys)


def static(problem: AttentionProblem, rows: int, block: int, by_keys: bool) -> np.ndarray | None:
    """`tiles` where they are known before anything runs, else None."""
    if problem.mask_program is None or problem.mask_program.arrays:
        return None
    return None if DYNAMIC & set(problem.arrays) else _static(problem, rows, block, by_keys)


@functools.lru_cache(maxsize=64)
def _static(problem: AttentionProblem, rows: int, block: int, by_keys: bool) -> np.ndarray:
    nothing: Any = None

    def run(first):  # an argument, or XLA would fold everything as it compiles
        held = dataclasses.replace(problem, arrays=("q_offset",), batch=first.size)
        inputs = AttentionInputs(nothing, nothing, nothing, first)
        return _tiles(held, inputs, rows, block, by_keys)

    with _program.on_host():
        each = np.full(problem.batch if problem.uses_batch else 1, problem.q_offset, np.int32)
        return np.asarray(jax.jit(run)(each))


def _tiles(
    problem: AttentionProblem, inputs: AttentionInputs, rows: int, block: int, by_keys: bool
) -> Any:
    count, live = _seen_of_tiles(problem, inputs, rows, block)
    full = live * block
    if by_keys:
        if count.shape[1] > 1:  # query heads
            count = count.reshape(count.shape[0], problem.kv_heads, problem.group, *count.shape[2:])
            count, full = count.sum(2), full * problem.group
        count, full = count.swapaxes(2, 3), full.swapaxes(2, 3)
    whole, some = (count == full) & (count > 0), count > 0
    order = jnp.where(whole, 0, jnp.where(some, 1, 2))
    n = count.shape[3]
    one, other = (
        jnp.arange(n, dtype=jnp.int32).reshape(1, 1, 1, *side) for side in ((n, 1), (1, n))
    )
    before = (order[..., None, :] < order[..., :, None]) | (
        (order[..., None, :] == order[..., :, None]) & (other < one)
    )
    rank = before.sum(-1, dtype=jnp.int32)
    listed = jnp.where((rank[..., None, :] == one) & some[..., None, :], other, 0)
    listed = listed.sum(-1, dtype=jnp.int32)
    wholes, every = (x.sum(-1, keepdims=True, dtype=jnp.int32) for x in (whole, some))
    if not by_keys:  # rows without a key take one tile all the same, which is masked whole
        every = jnp.maximum(every, 1)
    return jnp.concatenate([wholes, every, listed], axis=-1)


class _Once(_program.Broadcasting):
    """What is read by row or by column is read before it is spread over all pairs of them."""

    def read(self, array: Any, kind: Any, indices: Sequence[Any]) -> Any:
        found = super().read(array, kind, indices)
        return lax.optimization_barrier(found) if found.size <= MOST_READ else found


def _seen_of_tiles(
    problem: AttentionProblem, inputs: AttentionInputs, rows: int, block: int
) -> tuple[Any, Any]:
    """How many keys are seen in each pair of tiles, int32[B or 1, N or 1, q tiles, kv tiles], and
    how many rows of the q tile there are, int32[B or 1, 1, q tiles, 1].
    """
    given = set(problem.arrays)
    by_batch = problem.uses_batch or given & (DYNAMIC - {"mask_array"})
    batches, heads = problem.batch if by_batch else 1, problem.q_heads if problem.uses_head else 1
    hidden = inputs.mask_array
    if hidden is not None:
        batches, heads = max(batches, hidden.shape[0]), max(heads, hidden.shape[1])
    q_tiles, kv_tiles = pl.cdiv(problem.q_len, rows), pl.cdiv(problem.kv_len, block)

    def axis(n, number):
        shape = [1] * 5
        shape[number] = n
        return jnp.arange(n, dtype=jnp.int32).reshape(shape)

    def each(x):  # one number a batch row
        return x.reshape(-1, 1, 1, 1, 1)

    b, h, row = axis(batches, 0), axis(heads, 1), axis(q_tiles * rows, 2)
    key = axis(kv_tiles, 3) * block + axis(block, 4)
    offset = problem.q_offset if inputs.q_offset is None else each(inputs.q_offset)
    q_len = problem.q_len if inputs.q_lengths is None else each(inputs.q_lengths)
    kv_len = problem.kv_len if inputs.kv_lengths is None else each(inputs.kv_lengths)
    numbers = b, h, row + offset, key
    program = problem.mask_program
    assert program is not None
    found = _program.evaluate(program, numbers, inputs.mask_aux, _Once())
    found = jnp.reshape(found, (1,) * 5) if jnp.ndim(found) == 0 else found
    found = found & (row < q_len) & (key < kv_len)
    if hidden is not None:
        whole = zip(hidden.shape[2:], (q_tiles * rows, kv_tiles * block), strict=True)
        pads = [(0, size - n if n > 1 else 0) for n, size in whole]
        hidden = jnp.pad(hidden, ((0, 0), (0, 0), *pads))
        columns = (kv_tiles, block) if hidden.shape[3] > 1 else (1, 1)
        found = found & hidden.reshape(*hidden.shape[:3], *columns)
    sizes = (batches, heads, q_tiles * rows, kv_tiles, block)
    by_row = jnp.broadcast_to(found, sizes).sum(-1, dtype=jnp.int32)
    by_row = lax.optimization_barrier(by_row)  # one sum over both is slower by far
    count = by_row.reshape(batches, heads, q_tiles, rows, kv_tiles).sum(3, dtype=jnp.int32)
    first = jnp.arange(q_tiles, dtype=jnp.int32).reshape(1, 1, -1, 1) * rows
    length = q_len if isinstance(q_len, int) else q_len[..., 0]
    return count, jnp.clip(length - first, 0, rows)
