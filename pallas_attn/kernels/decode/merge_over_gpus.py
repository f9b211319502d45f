"""The results of several GPUs, each over some of the keys, merged: with this ends decode attention
over a cache whose rows they share (`_cache/sharded_rows.py`). A warp has a query row of one head,
and its lanes the columns.

Each GPU writes its result and its log-sum-exp, in float32, to a receive buffer of every other one,
and merges what it receives with its own in the order of the GPUs, so that all have the same bits. A
receive buffer holds `threads.SENTINEL` in every word until a peer writes there: its reader polls
the data itself, and is there as soon as that is.

XLA has all GPUs arrive before it launches the kernel, so every buffer has been filled when the
first word is written to it; and a kernel ends when it has read all that is written to its buffer.
Each warp writes before it waits, and waits for the same warp of the others: no block waits for one
of a greater number, on any GPU.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import partials, softmax
from pallas_attn.kernels.lang import peer_memory, thread_program, threads
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.threads import FOUR, LANES, Thread
from pallas_attn.kernels.lang.types import Index, Operand, Predicate


@dataclasses.dataclass(frozen=True)
class Problem:
    """out [sequences, rows, heads, dim] and lse [sequences, heads, rows] on each GPU."""

    sequences: int
    rows: int
    heads: int
    dim: int
    dtype: str  # dtype of out
    axis: str  # axis of the mesh
    devices: int  # along it

    @property
    def lines(self) -> int:
        return self.sequences * self.rows * self.heads

    @property
    def words(self) -> int:
        """Words of 16 bytes that a GPU sends of a line: its columns, and the log-sum-exp."""
        return self.dim // FOUR + 1


def takes(problem: Problem) -> bool:
    """Whether the kernel serves it; XLA serves the rest."""
    fits = 0 < problem.devices * problem.lines * problem.words < 2**31 and problem.dim <= 512
    known = problem.dtype in ("bfloat16", "float16", "float32")
    return (
        known and fits and problem.dim % FOUR == 0 and problem.devices <= peer_memory.MOST_DEVICES
    )


class Refs(NamedTuple):
    out: Any
    lse: Any
    received: tuple[Any, ...]  # buffers of the next GPU, of the one after, ..; and of this one
    merged: Any  # float32, as `out`
    merged_lse: Any


class _At(NamedTuple):
    block: Any
    device: Any


@functools.partial(jax.jit, static_argnames="problem")
def run(out: Operand, lse: Operand, problem: Problem) -> tuple[Any, Any]:
    """(out float32 [sequences, rows, heads, dim], lse), the same on all GPUs."""
    if not takes(problem):  # `jax.vmap` has made one call of many that it takes
        raise ValueError(
            "q: expected results of at most 512 columns, a multiple of 4, whose words of 16 bytes "
            f"on all {problem.devices} devices are fewer than 2**31, got {problem.lines} rows of "
            f"{problem.dim} columns; map fewer calls at once"
        )
    shape = problem.devices, problem.lines, FOUR * problem.words
    return send_and_merge(out, lse, jnp.full(shape, threads.SENTINEL, jnp.int32), problem)


def send_and_merge(
    out: Operand, lse: Operand, received: Operand, problem: Problem
) -> tuple[Any, Any]:
    """`run`. `received`: int32[devices, lines, words of 4 bytes], of whom and which line what has
    been sent to this GPU.
    """

    def kernel(
        out: Operand, lse: Operand, received: Operand, merged: Operand, merged_lse: Operand
    ) -> None:
        device = peer_memory.this_device(problem.axis)
        peers = peer_memory.on_peers((received,), device, problem.devices)
        buffers = *(peer for (peer,) in peers), received
        refs = Refs(out, lse, buffers, merged, merged_lse)
        at = _At(lax.axis_index("block"), device)
        threads.run(_warp, problem, refs, at)

    like = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (out, lse)]
    blocks = -(-problem.lines // threads.WARPS)
    launch = thread_program.lane_kernel(kernel, grid=blocks, name="decode_merge", out_type=like)
    merged, merged_lse = launch(out, lse, jax.new_ref(received))
    return merged, merged_lse


class _Line(NamedTuple):
    """A query row of one head, as a warp has it; of its columns those of one lane."""

    number: Any  # its number in `out`
    place: Any  # its number in `lse`
    exists: Any
    columns: list[Any]  # in words of `FOUR`
    inside: list[Any]


def _line(ctx: ThreadContext) -> _Line:
    thread, _, at, problem = ctx
    number = at.block * threads.WARPS + thread.index // LANES
    exists, number = number < problem.lines, thread.minimum(number, problem.lines - 1)
    token, head = number // problem.heads, number % problem.heads
    place = (token // problem.rows * problem.heads + head) * problem.rows + token % problem.rows
    last = problem.dim // FOUR - 1
    columns = [thread.index % LANES + n for n in range(0, last + 1, LANES)]
    inside = [exists & (column <= last) for column in columns]
    return _Line(number, place, exists, [thread.minimum(x, last) for x in columns], inside)


def _warp(ctx: ThreadContext) -> None:
    thread, refs, at, problem = ctx
    line, first_lane = _line(ctx), thread.index % LANES < 1
    places = [line.number * (problem.dim // FOUR) + column for column in line.columns]
    (own_lse,) = thread.load_floats(refs.lse, line.place, 1)
    own = [
        thread.load_floats(refs.out, place, FOUR)
        if problem.dtype == "float32"
        else thread.load_narrow(refs.out, place, problem.dtype)
        for place in places
    ]
    sent, words = _sent(ctx, line, at.device), problem.words
    for to in refs.received[:-1]:
        thread.send_floats(to, sent + (words - 1), [own_lse] * FOUR, line.exists & first_lane)
        for column, values, there in zip(line.columns, own, line.inside, strict=True):
            thread.send_floats(to, sent + column, values, there)
    lses, columns = _received(ctx, line, own_lse, own)
    levels = [softmax.to_log2(lse) for lse in lses]
    top = functools.reduce(thread.highest, levels)
    zero = thread.number(0.0)
    weights = [thread.exp2(level - partials.base_of(thread, top)) for level in levels]
    factor, lse = partials.finish_row(thread, top, sum(weights[1:], weights[0]), None)
    thread.store_floats(refs.merged_lse, line.place, [lse], line.exists & first_lane)
    for place, parts, there in zip(places, columns, line.inside, strict=True):
        sums = [zero] * FOUR
        for weight, values in zip(weights, parts, strict=True):
            none = thread.is_zero(weight)  # a GPU without a key may give anything
            values = [thread.choose(none, zero, x) for x in values]
            sums = [x + weight * y for x, y in zip(sums, values, strict=True)]
        thread.store_floats(refs.merged, place, [x * factor for x in sums], there)


def _sent(ctx: ThreadContext, line: _Line, sender: Any) -> Any:
    """The first word of what a GPU sends of a line."""
    return (line.number + sender * ctx.plan.lines) * ctx.plan.words


def _received(
    ctx: ThreadContext, line: _Line, own_lse: Operand, own: list[Any]
) -> tuple[list[Any], list[list[Any]]]:
    """The log-sum-exp of all GPUs; and for each column their four numbers."""
    thread, refs, at, problem = ctx
    senders = range(problem.devices)
    others = [(at.device < n) | (at.device > n) for n in senders]
    begins = [_sent(ctx, line, n) for n in senders]

    def words(column: Index, there: Predicate) -> tuple[list[Any], list[Any]]:
        return [begin + column for begin in begins], [there & other for other in others]

    # All that is sent of a row of 128 columns is polled together.
    lse_at, lse_there = words(problem.words - 1, line.exists)
    lses: list[Any] = []
    columns = []
    for n, (column, there) in enumerate(zip(line.columns, line.inside, strict=True)):
        at_words, theres = words(column, there)
        if n == 0:
            at_words, theres = at_words + lse_at, theres + lse_there
        floats = thread.receive_floats(refs.received[-1], at_words, theres)
        if n == 0:
            floats, lses = floats[: problem.devices], [x[0] for x in floats[problem.devices :]]
        columns.append([_choose(thread, *x, own[n]) for x in zip(others, floats, strict=True)])
    return [thread.choose(*x, own_lse) for x in zip(others, lses, strict=True)], columns


def _choose(thread: Thread, where: Any, a: list[Any], b: list[Any]) -> list[Any]:
    return [thread.choose(where, x, y) for x, y in zip(a, b, strict=True)]
