"""Partial results of a query row that become one, in programs of single threads.

A partial is what some of the row's keys give: an output that is not yet divided, the row max that
it is relative to (in log2 units), and the sum of its weights.
"""

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

from pallas_attn.kernels.attention import softmax
from pallas_attn.kernels.lang.threads import Float, Thread
from pallas_attn.kernels.lang.types import Predicate


class Partial(NamedTuple):
    """A partial, with some columns of its output."""

    row_max: Float
    row_sum: Float
    out: list[Float]


class Weighed(NamedTuple):
    """Partials of a row that lanes have one each of, relative to a common row max."""

    row_max: Float
    row_sum: Float
    weight: Float  # for what this lane has
    rescale: Float | None  # the factor of what there was before


def base_of(thread: Thread, row_max: Float) -> Float:
    """The number that is subtracted from exponents: the row max, or 0 where there is no key."""
    return thread.choose(thread.nothing_yet(row_max), thread.number(0.0), row_max)


def weighed(
    thread: Thread,
    own_max: Float,
    own_sum: Float,
    there: Predicate,
    before: tuple[Float, Float] | None = None,
) -> Weighed:
    """The partials of a warp's lanes, those that are `there`. `before`: the row max and the row sum
    of others.
    """
    own_max = thread.choose(there, own_max, thread.number(float("-inf")))
    own_sum = thread.choose(there, own_sum, thread.number(0.0))
    row_max = thread.warp_highest(own_max)
    if before is None:
        weight = thread.exp2(own_max - base_of(thread, row_max))
        return Weighed(row_max, thread.warp_sum(weight * own_sum), weight, None)
    row_max = thread.highest(before[0], row_max)
    base = base_of(thread, row_max)
    rescale, weight = thread.exp2(before[0] - base), thread.exp2(own_max - base)
    return Weighed(
        row_max, before[1] * rescale + thread.warp_sum(weight * own_sum), weight, rescale
    )


def joined(thread: Thread, partials: Sequence[Partial]) -> Partial:
    """Partials that one thread has as one."""
    row_max = functools.reduce(thread.highest, [partial.row_max for partial in partials])
    base = base_of(thread, row_max)
    weights = [thread.exp2(partial.row_max - base) for partial in partials]
    pairs = list(zip(weights, partials, strict=True))
    row_sum = functools.reduce(operator.add, [w * x.row_sum for w, x in pairs])
    columns = range(len(partials[0].out))
    out = [functools.reduce(operator.add, [w * x.out[i] for w, x in pairs]) for i in columns]
    return Partial(row_max, row_sum, out)


def finish_row(
    thread: Thread, row_max: Float, row_sum: Float, sink: Float | None
) -> tuple[Float, Float]:
    """`softmax.finish` of a row that one thread holds."""
    unit, zero = thread.number(1.0), thread.number(0.0)
    empty = thread.nothing_yet(row_max) & thread.is_zero(row_sum)
    base = thread.choose(empty, zero, row_max)
    higher = base
    if sink is not None:
        sink = softmax.to_log2(sink)
        higher = thread.lowest(thread.highest(base, sink), softmax.LARGEST)
        row_sum = row_sum * thread.exp2(base - higher) + thread.exp2(sink - higher)
    row_sum = thread.choose(empty, unit, row_sum)
    factor = thread.choose(empty, zero, thread.exp2(base - higher) / row_sum)
    lse = (higher + thread.log2(row_sum)) * (1 / softmax.to_log2(1.0))
    return factor, thread.choose(empty, thread.number(float("-inf")), lse)
