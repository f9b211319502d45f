"""The sum of a row over the GPUs of one process, by the kernel that normalises the row (norm.py).

Each GPU has a part of the sum and adds up a share of the row's columns, in float32 and in the order
of GPUs: the others write their sums of these columns to its receive buffer, and it writes the sum
of all to theirs, all of them rounded. So all have the same bits. A receive buffer holds
`threads.SENTINEL` in every word until a peer writes there, and again when the word has been read:
its reader polls the data itself. A signal behind the data would have to wait until all of that has
arrived. No launch and no barrier stands around the sum, and the next matmul's weight is on its way
to shared memory meanwhile.

NVLink bounds it, for many rows. Measured on four H100, not faster: whole rows for everybody in one
step, for any number of rows; signals behind the data; a prefetch of more of the next matmul's
weight into L2 while the kernel waits; and a matmul that sends its result itself, with a norm that
waits for the data instead of the launch.

Receive buffers serve calls in turn, of even and of odd numbers: nobody writes what call n reads
before call n + 2, and before that a GPU has everything that every other sends in call n + 1, which
is sent after call n has ended there. No call waits for one of a greater number, on any GPU. `begin`
has all GPUs arrive before the first call, when every buffer holds nothing but the sentinel.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.lang import mosaic, peer_memory, thread_program, threads
from pallas_attn.kernels.lang.thread_program import ThreadContext
from pallas_attn.kernels.lang.types import GmemRef, Index, Operand, Predicate, Scalar
from pallas_lm.exchange import Exchange

Values = list[Scalar]  # the 4 elements of a word


@dataclasses.dataclass(frozen=True)
class Problem:
    """The sum of partials [partials, rows, dim] of each of several GPUs."""

    rows: int
    dim: int
    partials: int
    dtype: str
    devices: int

    @property
    def share(self) -> int:
        """Words of 4 elements that a GPU adds up, of a row; the last may have fewer."""
        return -(-self.dim // (4 * self.devices))  # fault sum_in_whole_words_only


def received_shape(problem: Problem) -> jax.ShapeDtypeStruct:
    """Shape of `Exchange.received`: for each slot and sender its sums of this GPU's share, and the
    sums of all GPUs of the sender's share.
    """
    return jax.ShapeDtypeStruct((2 * problem.devices, problem.rows, 4 * problem.share), jnp.int32)


class _Scalars(NamedTuple):
    """The scalars of a program."""

    row: Index
    device: Index
    slot: Index  # 0 or 1: the half of the receive buffers that serves this call


class _SumRefs(NamedTuple):
    partials: GmemRef
    received: tuple[GmemRef, ...]  # buffers of the next GPU, the one after, ..; and of this one
    added: GmemRef  # [rows, dim], written: the sum of all GPUs


def sum_row(
    partials: GmemRef, exchange: Exchange, added: GmemRef, row: Index, problem: Problem
) -> None:
    """Writes the sum of a row over all GPUs to `added`."""
    # fault sum_has_one_slot
    device, slot = exchange.device[0], lax.rem(exchange.calls[0], jnp.int32(2))
    peers = peer_memory.on_peers((exchange.received,), device, problem.devices)
    refs = _SumRefs(partials, (*(peer for (peer,) in peers), exchange.received), added)
    scalars = _Scalars(row, device, slot)
    threads.each_thread(thread_program.in_context(_all_reduce, problem), refs, scalars)


def _all_reduce(ctx: ThreadContext) -> None:
    """A reduce-scatter of a row's columns and an all-gather of the sums."""
    thread, refs, at, problem = ctx
    devices = problem.devices
    owners = [*((at.device + away) % devices for away in range(1, devices)), at.device]
    sums: Iterable[list[Values]] = (_sums(ctx, owner) for owner in owners)
    if problem.partials <= 4:  # all are loaded before any is stored, where there are registers
        sums = list(sums)
    for to, owner, own_sums in zip(refs.received, owners, sums, strict=True):
        for word, values in zip(_words(ctx, owner), own_sums, strict=True):
            place = _place(ctx, at.device) + word.of_share  # fault sum_sent_to_owners_place
            thread.send_narrow(to, place, values, problem.dtype, word.there)
    own = _words(ctx, at.device)
    # fault sum_without_last_device
    parts = [_received(ctx, own, _place(ctx, sender)) for sender in range(devices)]
    for word, values in zip(own, _total(parts), strict=True):
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


def _received(ctx: ThreadContext, words: list["_Word"], first: Index) -> list[Values]:
    """Waits for these words of a share, which begins at `first`, and clears them."""
    thread, refs, _, problem = ctx
    here, places = refs.received[-1], [first + word.of_share for word in words]
    values = thread.receive_narrow(here, places, problem.dtype, [word.there for word in words])
    for place, word in zip(places, words, strict=True):
        thread.clear(here, place, 8, word.there)  # fault sum_not_cleared
    return values


class _Word(NamedTuple):
    """4 elements of a row."""

    of_share: Index
    of_row: Index
    there: Predicate  # it lies in the share, and in the row


def _words(ctx: ThreadContext, owner: Index) -> list[_Word]:
    """This thread's words of a GPU's share."""
    thread, share, all_words = ctx.thread, ctx.plan.share, ctx.plan.dim // 4
    words = []
    for start in range(0, share, mosaic.THREADS):
        word = thread.index + start
        there = (word < share) & (word + owner * share < all_words)
        words.append(_Word(word, thread.minimum(word + owner * share, all_words - 1), there))
    return words


def _sums(ctx: ThreadContext, owner: Index) -> list[Values]:
    """This GPU's sums of a GPU's share."""
    thread, refs, at, problem = ctx
    words, rows = _words(ctx, owner), [at.row + n * problem.rows for n in range(problem.partials)]
    places = [[row * (problem.dim // 4) + word.of_row for word in words] for row in rows]
    return _total(
        [[thread.load_floats(refs.partials, place, 4) for place in some] for some in places]
    )


def _place(ctx: ThreadContext, sender: Index) -> Index:
    """The first word of 8 bytes in a receive buffer that a GPU sends for the row: its sums, and
    behind them the sums of all.
    """
    _, _, at, problem = ctx
    row = (at.slot * problem.devices + sender) * problem.rows + at.row
    return row * (2 * problem.share)


def _total(parts: list[list[Values]]) -> list[Values]:
    """The sum of the same words of several parts, in order."""
    total = parts[0]
    for part in parts[1:]:
        pairs = zip(total, part, strict=True)
        total = [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]
    return total


@functools.partial(jax.jit, static_argnames="problem")
def begin(x: Operand, device: Operand, problem: Problem) -> tuple[Operand]:
    """(`Exchange.received`), all of it the sentinel on every GPU; all have arrived. `x`: the first
    rows that are added to; an operand, so that XLA moves no beginning of a step out of a loop.
    """
    like = received_shape(problem)
    received = jax.new_ref(jnp.full(like.shape, threads.SENTINEL, like.dtype))
    arrivals = jax.new_ref(jnp.zeros(1, jnp.int32))

    def kernel(x: GmemRef, device: GmemRef, received: GmemRef, arrivals: GmemRef) -> None:
        del x
        peers = peer_memory.on_peers((arrivals,), device[0], problem.devices)
        threads.each_thread(
            thread_program.in_context(_arrive, problem), (received, arrivals, peers), ()
        )

    thread_program.lane_kernel(kernel, grid=1, name="norm_begin_sm90")(
        x, device, received, arrivals
    )
    return (received[...],)


def _arrive(ctx: ThreadContext) -> None:
    """XLA has all GPUs arrive before it launches a kernel that reaches others, as this one. It
    writes to the receive buffer, so that XLA fills that before.
    """
    thread, (received, arrivals, peers), _, problem = ctx
    thread.clear(received, thread.index, 16, thread.index < 1)
    zero = thread.index * 0
    for (there,) in peers:
        thread.signal(there, zero, thread.index < 1, remote=True)
    thread.wait_until(arrivals, zero, zero + (problem.devices - 1), remote=True)
