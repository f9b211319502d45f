"""What is done between two matmuls of a decoding step on Hopper: the result of one is added to the
rows x, which are then normalised (RMS norm) for the next.

One block a row. It is a kernel because XLA's kernels end before the next one begins, while during
this one the next matmul already fills its ring (see linear.py). It rounds where the model in
jax.numpy does: the sum of partials in float32, the sum with x, the normalised row, and its product
with the weight.

Where several GPUs of one process have a part of the sum each (`Problem.devices`), the kernel is the
all-reduce too. Each GPU adds up a share of the row's columns, in float32 and in the order of GPUs:
the others write their sums of these columns to its receive buffer, and it writes the sum of all to
theirs, all of them rounded. So all have the same bits. A receive buffer holds `threads.SENTINEL` in
every word until a peer writes there, and again when the word has been read: its reader polls the
data itself. A signal behind the data would have to wait until all of that has arrived. No launch
and no barrier stands around the sum, and the next matmul's weight is on its way to shared memory
meanwhile.

What bounds it is NVLink, for many rows. Measured on four H100, not faster: whole rows for everybody
in one step, for any number of rows; signals behind the data; a prefetch of more of the next
matmul's weight into L2 while the kernel waits; and a matmul that sends its result itself, with a
norm that waits for the data instead of the launch.

Receive buffers serve calls in turn, of even and of odd numbers: nobody writes what call n reads
before call n + 2, and before that a GPU has everything that every other sends in call n + 1, which
is sent after call n has ended there. No call waits for one of a greater number, on any GPU. `begin`
has all GPUs arrive before the first call, when every buffer holds nothing but the sentinel.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.mosaic import ThreadContext
from pallas_attn.lm.exchange import Exchange

_STEP = 4 * mosaic.THREADS  # elements that a block reads at once


@dataclasses.dataclass(frozen=True)
class Problem:
    """x + sum of partials, and rms_norm of that by one weight of a stack."""

    rows: int
    dim: int
    partials: int
    dtype: str
    eps: float
    devices: int = 1  # of which each has partials of its own

    @property
    def share(self) -> int:
        """Words of 4 elements that a GPU adds up, of a row; the last may have fewer."""
        return -(-self.dim // (4 * self.devices))


def takes(problem: Problem) -> bool:
    """Whether the kernel serves it; XLA serves the rest."""
    narrow = problem.dtype in ("bfloat16", "float16")
    fits = problem.dim % _STEP == 0 and problem.dim <= 16 * _STEP
    return narrow and fits and problem.devices <= mosaic.MOST_DEVICES


def received_shape(problem: Problem) -> Any:
    """Of `Exchange.received`: of each slot and sender its sums of this GPU's share, and the sums of
    all of the sender's.
    """
    return jax.ShapeDtypeStruct((2 * problem.devices, problem.rows, 4 * problem.share), jnp.int32)


class Refs(NamedTuple):
    x: Any  # [rows, dim]
    partials: Any  # [partials, rows, dim]
    weight: Any  # [layers, dim]
    layer: Any
    exchange: Exchange | None = None


def _kernel(refs: Refs, x_ref: Any, normed_ref: Any, *, problem: Problem) -> None:
    row = lax.axis_index("row")
    dtype = jnp.dtype(problem.dtype)
    plgpu.griddepcontrol_launch_dependents()
    weight = refs.weight[refs.layer[0]]
    plgpu.griddepcontrol_wait()  # for x and its partials
    x = refs.x[row]
    if refs.exchange is not None:
        _exchange(refs.partials, refs.exchange, normed_ref, row, problem)
        added = normed_ref[row]  # it is there until the normalised row is
    else:
        wide = refs.partials[0, row].astype(jnp.float32)
        for n in range(1, problem.partials):
            wide += refs.partials[n, row].astype(jnp.float32)
        added = wide.astype(dtype)
    x = (x.astype(jnp.float32) + added.astype(jnp.float32)).astype(dtype)
    x_ref[row] = x
    wide = x.astype(jnp.float32)
    wide *= lax.rsqrt(jnp.sum(wide * wide) * (1 / problem.dim) + problem.eps)
    normed_ref[row] = wide.astype(dtype) * weight


@functools.partial(jax.jit, static_argnames="problem")
def run(x: Any, partials: Any, weight: Any, layer: Any, problem: Problem) -> tuple[Any, Any]:
    """(x [rows, dim], normed [rows, dim])."""
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    return _call(problem)(Refs(x, partials, weight, layer))


def _call(problem: Problem) -> Any:
    like = jax.ShapeDtypeStruct((problem.rows, problem.dim), problem.dtype)
    return plgpu.kernel(
        functools.partial(_kernel, problem=problem),
        out_type=(like, like),
        grid=(problem.rows,),
        grid_names=("row",),
        compiler_params=mosaic.without_device_barrier() if problem.devices > 1 else None,
        kernel_name="norm_sm90",
    )


# ---- the sum over devices -----------------------------------------------------------------------


class _At(NamedTuple):
    """Where a program is, and what it knows there."""

    row: Any
    device: Any
    slot: Any  # of the two: which serves this call


class _Refs(NamedTuple):
    partials: Any
    received: tuple[Any, ...]  # of the next GPU, of the one after, ..; and of this one
    added: Any  # [rows, dim], written: the sum of all GPUs


def _exchange(partials: Any, exchange: Exchange, added: Any, row: Any, problem: Problem) -> None:
    """The sum of a row over all GPUs."""
    device, slot = exchange.device[0], lax.rem(exchange.calls[0], jnp.int32(2))
    peers = mosaic.on_peers((exchange.received,), device, problem.devices)
    refs = _Refs(partials, (*(peer for (peer,) in peers), exchange.received), added)
    at = _At(row, device, slot)
    threads.each_thread(mosaic.in_context(_all_reduce, problem), refs, at)


def _all_reduce(ctx: ThreadContext) -> None:
    """A reduce-scatter of a row's columns and an all-gather of the sums."""
    thread, refs, at, problem = ctx
    devices = problem.devices
    owners = [*((at.device + away) % devices for away in range(1, devices)), at.device]
    sums: Iterable[list[Any]] = (_sums(ctx, owner) for owner in owners)
    if problem.partials <= 4:  # all are loaded before any is stored, where there are registers
        sums = list(sums)
    for to, owner, words in zip(refs.received, owners, sums, strict=True):
        for word, values in zip(_words(ctx, owner), words, strict=True):
            place = _place(ctx, at.device) + word.of_share
            thread.send_narrow(to, place, values, problem.dtype, word.there)
    mine = _words(ctx, at.device)
    found = [_received(ctx, mine, _place(ctx, sender)) for sender in range(devices)]
    for word, values in zip(mine, _total(found), strict=True):
        place = _place(ctx, at.device) + problem.share + word.of_share
        for to in refs.received:
            thread.send_narrow(to, place, values, problem.dtype, word.there)
    for sender in range(devices):
        words = _words(ctx, sender)
        sent = _received(ctx, words, _place(ctx, sender) + problem.share)
        for word, values in zip(words, sent, strict=True):
            to = at.row * (problem.dim // 4) + word.of_row
            thread.store_narrow(refs.added, to, values, problem.dtype, word.there)
    thread.sync()


def _received(ctx: ThreadContext, words: list["_Word"], first: Any) -> list[Any]:
    """What is sent to these words of a share, which begins at `first`; they are cleared."""
    thread, refs, _, problem = ctx
    here, places = refs.received[-1], [first + word.of_share for word in words]
    found = thread.receive_narrow(here, places, problem.dtype, [word.there for word in words])
    for place, word in zip(places, words, strict=True):
        thread.clear(here, place, 8, word.there)
    return found


class _Word(NamedTuple):
    """4 elements of a row."""

    of_share: Any
    of_row: Any
    there: Any  # whether it lies in the share, and in the row


def _words(ctx: ThreadContext, owner: Any) -> list[_Word]:
    """This thread's, of a GPU's share."""
    thread, share, all_words = ctx.thread, ctx.plan.share, ctx.plan.dim // 4
    found = []
    for start in range(0, share, mosaic.THREADS):
        word = thread.index + start
        there = (word < share) & (word + owner * share < all_words)
        found.append(_Word(word, thread.minimum(word + owner * share, all_words - 1), there))
    return found


def _sums(ctx: ThreadContext, owner: Any) -> list[Any]:
    """This GPU's, of a GPU's share."""
    thread, refs, at, problem = ctx
    words, rows = _words(ctx, owner), [at.row + n * problem.rows for n in range(problem.partials)]
    places = [[row * (problem.dim // 4) + word.of_row for word in words] for row in rows]
    every = [[thread.load_floats(refs.partials, place, 4) for place in some] for some in places]
    return _total(every)


def _place(ctx: ThreadContext, sender: Any) -> Any:
    """In a receive buffer the first word of 8 bytes of what a GPU sends of the row: its sums, and
    behind them those of all.
    """
    _, _, at, problem = ctx
    row = (at.slot * problem.devices + sender) * problem.rows + at.row
    return row * (2 * problem.share)


def _total(parts: list[list[Any]]) -> list[Any]:
    """The sum of the same words of several parts, in order."""
    found = parts[0]
    for part in parts[1:]:
        pairs = zip(found, part, strict=True)
        found = [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]
    return found


@functools.partial(jax.jit, static_argnames="problem")
def run_over_devices(  # noqa: PLR0913
    x: Any, partials: Any, weight: Any, layer: Any, exchange: Exchange, problem: Problem
) -> tuple[Any, Any, Any]:
    """(received, x [rows, dim], normed [rows, dim]); x and normed are the same on all devices."""
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    received: Any = jax.new_ref(exchange.received)
    exchange = exchange._replace(received=received)
    results = _call(problem)(Refs(x, partials, weight, layer, exchange))
    return received[...], *results


@functools.partial(jax.jit, static_argnames="problem")
def begin(x: Any, device: Any, problem: Problem) -> tuple[Any]:
    """(`Exchange.received`), all of it the sentinel on every GPU; all have arrived. `x`: the first
    rows that are added to; an operand, so that XLA moves no beginning of a step out of a loop.
    """
    like = received_shape(problem)
    received = jax.new_ref(jnp.full(like.shape, threads.SENTINEL, like.dtype))
    arrivals = jax.new_ref(jnp.zeros(1, jnp.int32))

    def kernel(x: Any, device: Any, received: Any, arrivals: Any) -> None:
        del x
        peers = mosaic.on_peers((arrivals,), device[0], problem.devices)
        threads.each_thread(mosaic.in_context(_arrive, problem), (received, arrivals, peers), ())

    mosaic.lane_kernel(kernel, grid=1, name="norm_begin_sm90")(x, device, received, arrivals)
    return (received[...],)


def _arrive(ctx: ThreadContext) -> None:
    """XLA has all GPUs arrive before it launches a kernel that reaches others, and this is one. It
    writes to what is received, so that XLA fills that before.
    """
    thread, (received, arrivals, peers), _, problem = ctx
    thread.clear(received, thread.index, 16, thread.index < 1)
    zero = thread.index * 0
    for (there,) in peers:
        thread.signal(there, zero, thread.index < 1, remote=True)
    thread.wait_until(arrivals, zero, zero + (problem.devices - 1), remote=True)
