"""What is done between two matmuls of a decoding step on Hopper: the result of one is added to the
rows x, which are then normalised (RMS norm) for the next.

One block a row. It is a kernel because XLA's kernels end before the next one begins, while during
this one the next matmul already fills its ring (see linear.py). It rounds where the model in
jax.numpy does: the sum of partials in float32, the sum with x, the normalised row, and its product
with the weight.

Where several GPUs of one process have a part of the sum each (`Problem.devices`), the kernel is the
all-reduce too. A block writes its GPU's sum of a row to a receive buffer of every GPU
(`Exchange.received`), signals that it is there, waits for the signals of the others, and adds up
what it then has, in the order of GPUs: all find the same bits. So a row crosses NVLink once, no
launch and no barrier stands around it, and the next matmul's weight is on its way to shared memory
meanwhile.

Receive buffers and signals serve calls in turn, of even and of odd numbers: nobody writes what call
n reads before call n + 2, and before that a GPU has seen every other's signal of call n + 1, which
is sent after call n has ended there. No call waits for one of a greater number, on any GPU. `begin`
has all GPUs arrive before the first call, when everybody's signals are zeros.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.mosaic import ThreadContext
from pallas_attn.lm.exchange import Exchange

MOST_SENT = 2**23  # bytes in a call; a ring, as NCCL's, sends less, in more steps
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


def takes(problem: Problem) -> bool:
    """Whether the kernel serves it; XLA serves the rest."""
    narrow = problem.dtype in ("bfloat16", "float16")
    fits = problem.dim % _STEP == 0 and problem.dim <= 16 * _STEP
    sent = 4 * problem.rows * problem.dim * (problem.devices - 1)
    return narrow and fits and problem.devices <= mosaic.MOST_DEVICES and sent <= MOST_SENT


def shapes(problem: Problem) -> tuple[Any, Any]:
    """Of an Exchange's received and signals."""
    received = (2 * problem.devices, problem.rows, problem.dim)
    return (
        jax.ShapeDtypeStruct(received, jnp.float32),
        jax.ShapeDtypeStruct((2 * problem.rows + 1,), jnp.int32),
    )


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
    partials, first, count = refs.partials, 0 * row, problem.partials
    if refs.exchange is not None:
        first = _exchange(refs.partials, refs.exchange, row, problem)
        partials, count = refs.exchange.received, problem.devices
    added = partials[first, row].astype(jnp.float32)
    for n in range(1, count):
        added += partials[first + n, row].astype(jnp.float32)
    x = (refs.x[row].astype(jnp.float32) + added.astype(dtype).astype(jnp.float32)).astype(dtype)
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
    signals: Any  # of the row, when all others have signalled


class _Refs(NamedTuple):
    partials: Any
    received: Any
    signals: Any
    peers: tuple[tuple[Any, Any], ...]  # received and signals of the next GPU, the one after, ..


def _exchange(partials: Any, exchange: Exchange, row: Any, problem: Problem) -> Any:
    """Sends this GPU's sum of a row and waits for those of the others: the first of them in
    `Exchange.received`, where they follow in the order of GPUs.
    """
    call, others = exchange.calls[0], problem.devices - 1
    device, slot = exchange.device[0], lax.rem(call, jnp.int32(2))
    peers: Any = mosaic.on_peers(exchange[:2], device, problem.devices)
    refs = _Refs(partials, exchange.received, exchange.signals, peers)
    at = _At(row, device, slot, (lax.div(call, jnp.int32(2)) + 1) * others)
    threads.each_thread(mosaic.in_context(_send, problem), refs, at)
    return slot * problem.devices


def _send(ctx: ThreadContext) -> None:
    thread, refs, at, problem = ctx
    words, everywhere = problem.dim // 4, thread.index >= 0

    def part(start: int, n: int) -> Any:
        word = (at.row + n * problem.rows) * words + thread.index + start
        return thread.load_floats(refs.partials, word, 4)

    first = ((at.slot * problem.devices + at.device) * problem.rows + at.row) * words
    buffers = [*(received for received, _ in refs.peers), refs.received]  # the longest way first
    starts = range(0, words, mosaic.THREADS)
    for some in itertools.batched(starts, 16 if problem.partials == 1 else 8):
        sums = [part(start, 0) for start in some]  # all are loaded before any is stored
        for n in range(1, problem.partials):
            more = [part(start, n) for start in some]
            pairs = zip(sums, more, strict=True)
            sums = [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]
        for buffer in buffers:
            for start, values in zip(some, sums, strict=True):
                thread.store_floats(buffer, first + thread.index + start, values, everywhere)
    thread.sync()
    signal = at.slot * problem.rows + at.row
    for _, signals in refs.peers:
        thread.signal(signals, signal, thread.index < 1, remote=True)
    thread.wait_until(refs.signals, signal, at.signals, remote=True)


@functools.partial(jax.jit, static_argnames="problem")
def run_over_devices(  # noqa: PLR0913
    x: Any, partials: Any, weight: Any, layer: Any, exchange: Exchange, problem: Problem
) -> tuple[Any, Any, Any, Any]:
    """(received, signals, x [rows, dim], normed [rows, dim]); x and normed are the same on all
    devices.
    """
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    received: Any = jax.new_ref(exchange.received)
    signals: Any = jax.new_ref(exchange.signals)
    exchange = exchange._replace(received=received, signals=signals)
    results = _call(problem)(Refs(x, partials, weight, layer, exchange))
    return received[...], signals[...], *results


@functools.partial(jax.jit, static_argnames="problem")
def begin(x: Any, device: Any, problem: Problem) -> tuple[Any, Any]:
    """(received, signals) of an Exchange whose GPUs have all arrived. The receive buffer is a
    result that is not written: XLA would fill it later, maybe after a peer has written there.
    `x`: the first rows that are added to; an operand, so that XLA moves no step's beginning out of
    a loop of steps.
    """
    received, signals = shapes(problem)
    zeros = jax.new_ref(jnp.zeros(signals.shape, signals.dtype))

    def kernel(x: Any, device: Any, signals: Any, received: Any) -> None:
        del x, received
        peers = mosaic.on_peers((signals,), device[0], problem.devices)
        threads.each_thread(mosaic.in_context(_arrive, problem), (signals, peers), ())

    arrive = mosaic.lane_kernel(kernel, grid=1, name="norm_begin_sm90", out_type=(received,))
    (made,) = arrive(x, device, zeros)
    return made, zeros[...]


def _arrive(ctx: ThreadContext) -> None:
    """XLA has all GPUs arrive before it launches a kernel that reaches others, and this is one."""
    thread, (signals, peers), _, problem = ctx
    last = thread.index * 0 + 2 * problem.rows
    for (there,) in peers:
        thread.signal(there, last, thread.index < 1, remote=True)
    thread.wait_until(signals, last, last * 0 + (problem.devices - 1), remote=True)
