"""The softmax: the online step over kv tiles, and its end.

Inside, exponents are to base 2: the GPU's ex2 is one instruction, and `scale * log2(e)` folds into
the multiply-add that comes before it. Outside, a log-sum-exp is a natural logarithm: `to_log2`,
`finish` and `partials.finish_row` convert. Files that call exp2 rely on the base.

The state of a row is its `row_max`, the largest logit so far in log2 units (-inf: no key yet), and
its `row_sum`, the sum of 2**(logit - row_max). A sum is kept as 8 partial sums a row, one for each
column modulo 8, and `finish` adds across the threads that share a row: shuffles in every step are
slower.

A row max is raised only where it has to move by more than `exponents.threshold`. In most tiles none
of a warp's rows does, and the output needs no rescaling.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import RegisterTiles, Scalar

Array = jax.Array
Unit = Scalar | Array | None  # factor of logits: a scalar, one a row [rows], or None for 1

_LOG2_E = math.log2(math.e)
LARGEST = float(np.finfo(np.float32).max)
PARTIALS = 8  # partial sums a row
CHUNK = 32  # columns whose exponents are computed together: faster than all at once
RESCALE_THRESHOLD = 8.0  # log2 units that a row max may lag behind: p reaches 2**8, no overflow


class Exponents(NamedTuple):
    """The range of probabilities, for the dtype that they are rounded to."""

    threshold: float = RESCALE_THRESHOLD  # log2 units by which a logit may exceed the row max kept
    offset: float = 0.0  # probabilities and their sums are multiplied by 2**offset


WIDE = Exponents()  # float32, bfloat16, float16


def to_log2(x: Scalar) -> Any:
    """A logit or a logarithm in natural units -> in log2 units."""
    return x * _LOG2_E


def unit_of(scale: float) -> float | None:
    """The factor that turns scores into log2 units; None where that is to be done before the
    softmax: where the largest score is not the largest logit, or the factor, or what a backward
    divides by it, is no float32 (hidden keys would be -inf times 0).
    """
    unit = to_log2(scale)
    return unit if 2.0**-64 <= unit <= 2.0**64 else None


class Step(NamedTuple):
    """The effect of one tile of logits on its rows."""

    p: Array  # [rows, keys], float32: 2**(logit - row_max)
    row_max: Array  # [rows]
    rescale: Any  # [rows]: what older sums and outputs are to be multiplied by
    row_sum: Array  # [rows, PARTIALS]: of this tile alone
    moved: Array  # int32: not 0 where a row of this warp has a rescale that is not 1

    @classmethod
    def like(cls, keys: int, row_max: Array, row_sum: Array, number: Scalar) -> "Step":
        """The form of a step over so many keys, which `wgmma.overlapped` asks for; any `number`."""
        p = mosaic.filled((row_max.shape[0], keys), 0.0)
        return cls(p, row_max, row_max, row_sum, jnp.int32(0) + number)


class OutputSums(NamedTuple):
    """The softmax and the output of rows, carried from kv tile to kv tile."""

    acc: RegisterTiles  # [rows, v columns], or parts of them: the output before it is divided
    row_sum: Array  # [rows, PARTIALS]
    row_max: Array  # [rows]

    @classmethod
    def nothing(cls, acc: RegisterTiles, rows: int) -> "OutputSums":
        """The state of rows that have met no key; `acc` is zeros."""
        row_sum = mosaic.filled((rows, PARTIALS), 0.0)
        return cls(acc, row_sum, mosaic.filled((rows,), -jnp.inf))


def step(
    logits: Array,
    unit: Unit,
    row_max: Array,
    *,
    empty_ok: bool,
    join: Callable[[Array], Array] | None = None,
    exponents: Exponents = WIDE,
    offset: Array | None = None,
) -> Step:
    """The step of any tile; `unit` turns its logits into log2 units (None: they are).

    `empty_ok`: a row may have no key yet, and its tile none either; False saves a select a row.
    Each row decides for itself whether its max is raised, and the warp votes at the end, off the
    path from maximum to exponent. `join`: where a row lies in several rows of the tile, makes their
    maxima those of the whole row. `offset`, float32 [rows, PARTIALS]: in log2 units, is still to be
    added to the logits, by their column modulo PARTIALS.
    """
    if offset is None:
        peak = logits.max(axis=1)
        higher = raise_to(peak if join is None else join(peak), unit, row_max, exponents.threshold)
    else:
        higher = raise_to(peaks_of(logits, unit, offset).max(axis=1), None, row_max)
    base = base_of(higher, empty_ok)
    base_of_p = base - exponents.offset if exponents.offset else base
    p, row_sum = exponentials_and_sums(logits, unit, base_of_p, offset)
    moved = mosaic.any_in_warp(higher - row_max, 0.0)
    return Step(p, higher, jnp.exp2(row_max - base), row_sum, moved)


def next_step(
    logits: Array,
    unit: Unit,
    row_max: Array,
    *,
    empty_ok: bool,
    exponents: Exponents = WIDE,
    offset: Array | None = None,
) -> Step:
    """`step` where few maxima are raised: any tile but a row's first. All that most tiles ask is
    whether one of a warp's logits lies above its row's max by more than `RESCALE_THRESHOLD`, for
    which no thread has to know what the others of its row hold. Only where one does are maxima
    shuffled.
    """
    peaks = peaks_of(logits, unit, offset)
    above = peaks - mosaic.broadcast_rows(row_max, peaks.shape)
    moved = mosaic.any_in_warp(above, exponents.threshold)

    def raised():
        if offset is None:
            higher = raise_to(logits.max(axis=1), unit, row_max, exponents.threshold)
        else:
            higher = raise_to(peaks_of(logits, unit, offset).max(axis=1), None, row_max)
        return higher, jnp.exp2(row_max - base_of(higher, empty_ok))

    higher, rescale = lax.cond(
        moved != 0, raised, lambda: (row_max, mosaic.filled(row_max.shape, 1.0))
    )
    base = base_of(higher, empty_ok)
    base = base - exponents.offset if exponents.offset else base
    p, row_sum = exponentials_and_sums(logits, unit, base, offset)
    return Step(p, higher, rescale, row_sum, moved)


def rescaled(new: Step, older: RegisterTiles) -> RegisterTiles:
    """Sums and outputs of the tiles before, a tree of [rows, ..], in terms of the new row max."""
    to_new_max = functools.partial(scaled, older, new.rescale)
    return lax.cond(new.moved != 0, to_new_max, lambda: older)


def scaled(tiles: RegisterTiles, factor: Array) -> RegisterTiles:
    """A tree of [rows, ..] times a number a row."""
    leaves, tree = jax.tree.flatten(tiles)
    leaves = [x * mosaic.broadcast_rows(factor, x.shape) for x in leaves]
    return jax.tree.unflatten(tree, leaves)


def exponentials(logits: Array, unit: Unit, base: Array, offset: Array | None = None) -> Array:
    """[rows, keys], float32: 2**(logit - base), of one base a row; `offset`: see `step`."""
    if offset is not None:
        relative = mosaic.broadcast_rows(base, offset.shape) - offset
        tiled = lax.concatenate([relative] * (logits.shape[1] // PARTIALS), 1)
        assert unit is not None
        return jnp.exp2(logits * unit - tiled)
    if isinstance(unit, Array) and unit.ndim:
        unit = mosaic.broadcast_rows(unit, logits.shape)
    logits = logits if unit is None else logits * unit
    return jnp.exp2(logits - mosaic.broadcast_rows(base, logits.shape))


def raise_to(
    peak: Array, unit: Unit, row_max: Array, threshold: float = RESCALE_THRESHOLD
) -> Array:
    """The row max after a tile with the largest logit `peak`."""
    higher = jnp.maximum(row_max, peak if unit is None else peak * unit)
    return jnp.where(higher - row_max > threshold, higher, row_max)


def base_of(row_max: Array, empty_ok: bool = True) -> Array:
    """The number that logits are taken relative to in exponents. `empty_ok`: 0 where there is no
    key; else all rows are known to have one.
    """
    return jnp.where(row_max == -jnp.inf, 0.0, row_max) if empty_ok else row_max


def partials(x: Array, join: Callable[[Array, Array], Array]) -> Array:
    """[rows, keys] -> [rows, PARTIALS], within each thread: a tree, so that operations overlap."""
    rows, keys = x.shape
    pieces = [lax.slice(x, (0, n), (rows, n + PARTIALS)) for n in range(0, keys, PARTIALS)]
    while len(pieces) > 1:
        pairs = [join(a, b) for a, b in zip(pieces[::2], pieces[1::2], strict=False)]
        pieces = pairs + pieces[len(pieces) & ~1 :]
    return pieces[0]


def exponentials_and_sums(
    logits: Array, unit: Unit, base: Array, offset: Array | None = None
) -> tuple[Array, Array]:
    """(`exponentials` of logits, their partial sums), some columns at a time."""
    (rows, keys), pieces, sums = logits.shape, [], []
    for start in range(0, keys, CHUNK):
        columns = lax.slice(logits, (0, start), (rows, min(start + CHUNK, keys)))
        pieces.append(exponentials(columns, unit, base, offset))
        sums.append(partials(pieces[-1], operator.add))
    return lax.concatenate(pieces, 1), functools.reduce(operator.add, sums)


def peaks_of(logits: Array, unit: Unit, offset: Array | None = None) -> Array:
    """[rows, PARTIALS]: the largest of every 8th column, in log2 units; `offset`: see `step`."""
    peaks = partials(logits, jnp.maximum)
    if isinstance(unit, Array) and unit.ndim:
        unit = mosaic.broadcast_rows(unit, peaks.shape)
    peaks = peaks if unit is None else peaks * unit
    return peaks if offset is None else peaks + offset


def softcap(logits: Array, cap: float) -> Array:
    """cap * tanh(logits / cap), good to 2e-7 everywhere: tanh.approx is good to 5e-4, and the form
    with ex2 alone loses the small ones.
    """
    return cap * tanh(logits * (1 / cap))


def tanh(y: Array) -> Array:
    """Good to 2e-7 everywhere: see `softcap`."""
    u = y * y
    odd = ((0.01564048 * u - 0.05223111) * u + 0.13313521) * u - 0.33332622  # fitted up to 0.6
    far = 1.0 - 2.0 / (jnp.exp2(y * (2 * _LOG2_E)) + 1.0)
    return jnp.where(jnp.abs(y) < 0.6, y + y * u * odd, far)


def finish(row_max: Array, row_sum: Array, sink: Array | None) -> tuple[Array, Array]:
    """(factor for the output, log-sum-exp) of rows all of whose keys have been taken; `row_sum` is
    partial sums, or their sum.

    `sink`: a logit more in the denominator (one number, in natural units), except in a row that
    has no key: its output stays 0 and its log-sum-exp -inf. A sink of inf makes the sum inf: the
    factor is 0 and the log-sum-exp inf.
    """
    row_sum = row_sum.sum(axis=1) if row_sum.ndim == 2 else row_sum
    # A NaN never raises the max: a row of nothing else is not empty, and its sum says so.
    empty = jnp.where(row_sum != 0, False, row_max == -jnp.inf)
    higher = row_max
    if sink is not None:
        sink = to_log2(sink)
        higher = jnp.minimum(jnp.maximum(row_max, sink), LARGEST)
        row_sum = row_sum * jnp.exp2(row_max - higher) + jnp.exp2(sink - higher)
    base = jnp.where(empty, 0.0, row_max)
    factor = jnp.exp2(base - jnp.where(empty, 0.0, higher)) / jnp.where(empty, 1.0, row_sum)
    lse = (higher + jnp.log2(row_sum)) * (1 / _LOG2_E)
    return jnp.where(empty, 0.0, factor), jnp.where(empty, -jnp.inf, lse)


def without_dead_rows(
    lse: Array, acc: RegisterTiles, row: Scalar, q_len: Scalar
) -> tuple[Array, RegisterTiles]:
    """lse and output, -inf and 0 in rows from `q_len` on; `row`: the number of the first."""
    inside = mosaic.positions(lse.shape, 0, row) < q_len
    lse = jnp.where(inside, lse, -jnp.inf)
    return lse, jax.tree.map(
        lambda x: jnp.where(mosaic.broadcast_rows(inside, x.shape), x, 0.0), acc
    )
