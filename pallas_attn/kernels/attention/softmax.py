"""The softmax, once: the online step over tiles of keys, its end, and the merge of parts.

Inside, exponents are to base 2: the GPU's ex2 is one instruction, and `scale * log2(e)` folds into
the multiply-add that comes before it. Outside, a log-sum-exp is a natural logarithm. This is the
only file that knows of both.

A row's state is its `top`, the largest logit so far in log2 units (-inf: no key yet), and its
`total`, the sum of 2**(logit - top). Totals are kept as 8 partial sums a row, one for each column
modulo 8: adding across the threads that share a row waits for `finish`. Shuffles in every step
are slower.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.lang import mosaic, warp_vote

Array = jax.Array

LOG2_E = math.log2(math.e)
PARTS = 8  # partial sums a row
CHUNK = 32  # columns
PATIENCE = 8.0  # log2 units that a top may lag behind: p reaches 2**8, far from overflow


def to_log2(natural: Any) -> Any:
    """Natural units in log2 units, of tiles and of numbers of one thread."""
    return natural * LOG2_E


def to_natural(log2: Any) -> Any:
    return log2 * (1 / LOG2_E)


def unit_of(scale: float) -> float | None:
    """What turns scores into log2 units; None where that is to be done before the softmax: where
    the largest score is not the largest logit, or the factor, or what a backward divides by it, is
    no float32 (hidden keys would be -inf times 0).
    """
    unit = scale * LOG2_E
    return unit if 2.0**-64 <= unit <= 2.0**64 else None


class Step(NamedTuple):
    """What one tile of logits does to its rows."""

    p: Array  # [rows, keys], float32: 2**(logit - top)
    top: Array  # [rows]
    shrink: Array  # [rows]: what older sums and outputs are to be multiplied by
    total: Array  # [rows, PARTS]: of this tile alone
    moved: Array  # int32: not 0 where a row of this warp has a shrink that is not 1


def step(logits: Array, unit: float | None, top: Array, *, guarded: bool, join: Any = None) -> Step:
    """Takes a tile of logits; `unit` turns them into log2 units (None: they are).

    `guarded`: a row may have no key yet, and its tile none either. A row's top moves only when it
    has to move by more than `PATIENCE`: then the output needs no rescaling in most steps.
    Each row decides for itself and the warp votes at the end,
    off the path from maximum to exponent. `join`: what makes the largest logits of a tile's rows
    those of a row that lies in several of them.
    """
    higher = _higher(logits, unit, top, join)
    base = _base(higher, guarded)
    p, total = _exponents(logits, unit, base)
    moved = warp_vote.any_in_warp(higher - top, 0.0)
    return Step(p, higher, jnp.exp2(top - base), total, moved)


def next_step(
    logits: Array,
    unit: float | None,
    top: Array,
    *,
    guarded: bool,
    early: int = 0,
    chunk: int = CHUNK,
) -> Step:
    """`step` where few tops move: any tile but a row's first. All that most tiles ask is whether
    one of a warp's logits lies above its row's top by more than `PATIENCE`, for which no thread has
    to know what the others of its row hold. Only where one does are maxima shuffled.

    So many quarters of the exponents are `early`: done before whatever comes after this. `chunk`:
    columns that are taken together.
    """
    peaks = _partials(logits, jnp.maximum)
    peaks = peaks if unit is None else peaks * unit
    moved = warp_vote.any_in_warp(peaks - mosaic.down_rows(top, peaks.shape), PATIENCE)

    def some():
        higher = _higher(logits, unit, top)
        return higher, jnp.exp2(top - _base(higher, guarded))

    higher, shrink = lax.cond(moved != 0, some, lambda: (top, mosaic.filled(top.shape, 1.0)))
    base, cut = _base(higher, guarded), logits.shape[1] * early // 4 // PARTS * PARTS
    parts = []
    for start, end in ((0, cut), (cut, logits.shape[1])):
        if start < end:
            columns = _columns(logits, start, end - start)
            parts.append(_exponents(columns, unit, base, chunk))
        if cut and not start:
            warp_vote.seam(moved)
    p, totals = zip(*parts, strict=True)
    total = functools.reduce(operator.add, totals)
    return Step(lax.concatenate(p, 1), higher, shrink, total, moved)


class Settled(NamedTuple):
    """What one tile of logits does to its rows, and to what is older."""

    p: Array  # [rows, keys], float32: 2**(logit - top)
    top: Array  # [rows]
    total: Array  # [rows, PARTS]: of this tile alone
    older: tuple[Array, ...]  # in terms of the new tops


def settled(
    logits: Array, unit: float | None, top: Array, older: tuple[Array, ...], *, guarded: bool
) -> Settled:
    """`next_step` with one branch, which few tiles take: in it tops move, and what is `older` is
    multiplied. After it come exponents, and nothing that keeps them apart from the matmuls that
    follow.
    """
    peaks = _partials(logits, jnp.maximum)
    peaks = peaks if unit is None else peaks * unit
    moved = warp_vote.any_in_warp(peaks - mosaic.down_rows(top, peaks.shape), PATIENCE)

    def some():
        higher = _higher(logits, unit, top)
        shrink = jnp.exp2(top - _base(higher, guarded))
        return higher, tuple(x * mosaic.down_rows(shrink, x.shape) for x in older)

    top, older = lax.cond(moved != 0, some, lambda: (top, older))
    p, total = _exponents(logits, unit, _base(top, guarded))
    return Settled(p, top, total, older)


def _higher(logits: Array, unit: float | None, top: Array, join: Any = None) -> Array:
    peak = logits.max(axis=1)
    peak = peak if join is None else join(peak)
    return _raised(peak, unit, top)


def _raised(peak: Array, unit: float | None, top: Array) -> Array:
    higher = jnp.maximum(top, peak if unit is None else peak * unit)
    return jnp.where(higher - top > PATIENCE, higher, top)


def _base(top: Array, guarded: bool) -> Array:
    """What exponents are taken relative to."""
    return jnp.where(top == -jnp.inf, 0.0, top) if guarded else top


def _exponents(
    logits: Array, unit: float | None, base: Array, chunk: int = CHUNK
) -> tuple[Array, Array]:
    """2**(logits - base), and its sums."""
    parts, sums = [], []
    for start in range(0, logits.shape[1], chunk):  # by chunks: faster
        some = _columns(logits, start, min(chunk, logits.shape[1] - start))
        some = some if unit is None else some * unit
        parts.append(jnp.exp2(some - mosaic.down_rows(base, some.shape)))
        sums.append(_partials(parts[-1], operator.add))
    return lax.concatenate(parts, 1), functools.reduce(operator.add, sums)


def raised(peak: Array, unit: float | None, top: Array, *, guarded: bool) -> tuple[Array, Array]:
    """(the new tops, what exponents are taken from), of a tile's largest logits."""
    higher = _raised(peak, unit, top)
    return higher, _base(higher, guarded)


def capped(logits: Array, cap: float) -> Array:
    """cap * tanh(logits / cap), good to 2e-7 everywhere: tanh.approx is good to 5e-4, and the form
    with ex2 alone loses the small ones.
    """
    y = logits * (1 / cap)
    u = y * y
    odd = ((0.01564048 * u - 0.05223111) * u + 0.13313521) * u - 0.33332622  # fitted up to 0.6
    far = 1.0 - 2.0 / (jnp.exp2(y * (2 * LOG2_E)) + 1.0)
    return cap * jnp.where(jnp.abs(y) < 0.6, y + y * u * odd, far)


def finish(top: Array, total: Array, sink: Array | None) -> tuple[Array, Array]:
    """(factor for the output, log-sum-exp) of rows whose keys have all been taken; `total` may have
    been added up.

    `sink`: a logit more in the denominator (one number, in natural units), except in a row that
    has no key: its output stays 0 and its log-sum-exp -inf.
    """
    total = total.sum(axis=1) if total.ndim == 2 else total
    # A NaN never moves the top: a row of nothing else is not empty, and its total says so.
    empty = jnp.where(total != 0, False, top == -jnp.inf)
    higher = top
    if sink is not None:
        sink = sink * LOG2_E
        higher = jnp.maximum(top, sink)
        total = total * jnp.exp2(top - higher) + jnp.exp2(sink - higher)
    base = jnp.where(empty, 0.0, top)
    factor = jnp.exp2(base - jnp.where(empty, 0.0, higher)) / jnp.where(empty, 1.0, total)
    lse = (higher + jnp.log2(total)) * (1 / LOG2_E)
    return jnp.where(empty, 0.0, factor), jnp.where(empty, -jnp.inf, lse)


def finish_row(thread: Any, top: Any, total: Any, sink: Any | None) -> tuple[Any, Any]:
    """`finish` of a row that one thread holds (`threads.Thread`)."""
    one, zero = thread.number(1.0), thread.number(0.0)
    empty = thread.nothing_yet(top) & thread.is_zero(total)
    base = thread.choose(empty, zero, top)
    higher = base
    if sink is not None:
        sink = to_log2(sink)
        higher = thread.highest(base, sink)
        total = total * thread.exp2(base - higher) + thread.exp2(sink - higher)
    total = thread.choose(empty, one, total)
    factor = thread.choose(empty, zero, thread.exp2(base - higher) / total)
    lse = to_natural(higher + thread.log2(total))
    return factor, thread.choose(empty, thread.number(float("-inf")), lse)


def merge(outs: Array, lses: Array) -> tuple[Array, Array]:
    """Attention over parts of the keys, made one: outs [P, ..., Hv], lses [P, ...], both float32.

    Parts without a key (lse -inf) count for nothing, whatever their output holds.
    """
    top = lses.max(axis=0)
    weights = jnp.exp(lses - jnp.where(top == -jnp.inf, 0.0, top)[None])
    total = weights.sum(axis=0)
    some = ~(total <= 0)  # NaN is something
    parts = jnp.where((weights == 0)[..., None], 0.0, outs * weights[..., None])
    out = parts.sum(axis=0) / jnp.where(some, total, 1.0)[..., None]
    return out, jnp.where(some, top + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)


def _partials(x: Array, join: Callable[[Array, Array], Array]) -> Array:
    """[rows, keys] -> [rows, PARTS], within each thread: a tree, so that the operations overlap."""
    parts = [_columns(x, start, PARTS) for start in range(0, x.shape[1], PARTS)]
    while len(parts) > 1:
        pairs = [join(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[len(parts) & ~1 :]
    return parts[0]


def _columns(x: Array, start: int, count: int) -> Array:
    return lax.slice(x, (0, start), (x.shape[0], start + count))
