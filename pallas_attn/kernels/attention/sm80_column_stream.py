"""Operands of any width in little shared memory, for the portable kernels: all of them come in
chunks of `Config.columns` columns, each while the one before it is multiplied, and none stays.

A score is a sum over chunks of the head dim, added up in registers; of an output, or a gradient,
each chunk of columns is made of one chunk of the right operand. So shared memory holds two chunks
of 64 rows for left operands and two of a tile for right ones, whatever the head dims. The price is
that what a block has of its own (queries, or a backward's keys) is read anew for every tile, from
L2: this is for float32 whose terms do not fit otherwise.

In memory the chunks of a head lie beside each other like heads (`sm80_common.Widths.operand`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_attn.kernels.attention.plan import Context
from pallas_attn.kernels.attention.sm80_common import Copy, copy_async
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.mma import mma_sync

ROWS = 64  # of a left operand

Array = Any


class Smem(NamedTuple):
    lhs: Any  # [2 * ROWS, ..]: the chunk that is multiplied, and the one that is being copied
    rhs: Any  # [2 * rows of a tile, ..]


def scratch(plan: Any, tile: int) -> Smem:
    """Shared memory of a kernel whose right operands have `tile` rows."""
    width = mma_sync.pitch(plan.terms * plan.config.columns)
    return Smem(*(plgpu.SMEM((2 * rows, width), plan.operand_dtype) for rows in (ROWS, tile)))


class Product(NamedTuple):
    """A matmul of a step: the names of its operands, of which a left one in registers has none, and
    how many chunks they come in.
    """

    lhs: str | None
    rhs: str
    chunks: int


class Chunk(NamedTuple):
    """One of the chunks of a product's operands."""

    lhs: str | None
    rhs: str
    number: int


class Rows(NamedTuple):
    """Where rows of an operand lie."""

    batch: Any
    head: Any
    first: Any
    live: Any  # how many there are; zeros take the place of the others


class Stream:
    """The chunks of all steps of a block, in the order in which `products` use them.

    `rows_of(name, where)`: the rows of an operand that a step uses; `where` is what `begin` and
    `step` are told of the step.
    """

    def __init__(
        self, ctx: Context, products: Sequence[Product], rows_of: Callable[[str, Any], Rows]
    ):
        (self.plan, self.refs, self.smem), self.rows_of = ctx, rows_of
        self.tile = self.smem.rhs.shape[0] // 2
        self.chunks = [Chunk(*x[:2], n) for x in products for n in range(x.chunks)]
        self.counts = {(x.lhs, x.rhs): x.chunks for x in products}

    def begin(self, where: Any, sync: bool = False) -> None:
        """Issues the copy of the first chunk of the first step."""
        copy_async(*self.copies(self.chunks[0], where, jnp.int32(0)), pending=None, sync=sync)

    def step(self, number: Any, where: Any, following: Any) -> "Step":
        """The step `number`, counted from 0. `following`: the next; None: this is the last."""
        return Step(self, number, where, following)

    def copies(self, chunk: Chunk, where: Any, slot: Any) -> list[Copy]:
        return [
            self._copy(name, chunk.number, where, (to, slot * (to.shape[0] // 2)))
            for name, to in zip(chunk[:2], self.smem, strict=True)
            if name is not None
        ]

    def _copy(self, name: str, number: int, where: Any, place: Any) -> Copy:
        (to, start), ref, rows = place, getattr(self.refs, name), self.rows_of(name, where)
        head = rows.head * _chunks_of_head(self.plan, name) + number
        at = (rows.batch, head, rows.first, rows.live, start)
        return Copy((to, ref), at, (to.shape[0] // 2, ref.shape, ref.shape[3], None))


def _chunks_of_head(plan: Any, name: str) -> int:
    return plan.k_chunks if name in ("q", "k") else plan.v_chunks


class Step:
    """A step: calls of `scores` and `weigh` in the order of the stream's products."""

    def __init__(self, stream: Stream, number: Any, where: Any, following: Any):
        self.stream, self.number, self.where, self.following = stream, number, where, following
        self.taken = 0

    def _slot(self, n: int) -> Any:
        """Of the step's n-th chunk."""
        even = len(self.stream.chunks) % 2 == 0
        return jnp.int32(n & 1) if even else (self.number + n) & 1

    def _next(self) -> Any:
        """Waits for the next chunk, issues the copy of the one after it; the slot of the first."""
        stream, n = self.stream, self.taken
        self.taken += 1
        copies: list[Any] = []
        if n + 1 < len(stream.chunks):
            copies = stream.copies(stream.chunks[n + 1], self.where, self._slot(n + 1))
        elif self.following is not None:
            copies = stream.copies(stream.chunks[0], self.following, self._slot(n + 1))
        copy_async(*copies, pending=0)
        return self._slot(n)

    def scores(self) -> Array:
        """The next product of two operands in memory, [ROWS, tile].

        Tensor cores add the chunks up, though they round towards 0: so do those of the kernels that
        hold whole rows, one of which may have made the lse. Scores that are closer to the truth
        than an lse's own give probabilities that do not add up to 1.
        """
        stream = self.stream
        chunk = stream.chunks[self.taken]
        sums, width, terms = None, stream.plan.config.columns, stream.plan.terms
        for _ in range(stream.counts[chunk.lhs, chunk.rhs]):
            slot = self._next()
            lhs, rhs = (stream.smem.lhs, slot * ROWS), (stream.smem.rhs, slot * stream.tile)
            some = (sums, 0, width)
            sums = mma_sync.scores(lhs, rhs, (ROWS, stream.tile, width), terms, some)
        return sums

    def weigh(self, accs: Sequence[Array], p: Sequence[Array]) -> tuple[Array, ...]:
        """acc + p @ a chunk of the next right operand, for each acc [ROWS, columns]."""
        to, width, found = self.stream.smem.rhs, self.stream.plan.config.columns, []
        for acc in accs:
            found.append(mma_sync.matmul_add(acc, p, to, self._next() * self.stream.tile, width))
        return tuple(found)


def zeros(plan: Any, chunks: int) -> tuple[Array, ...]:
    """Sums to begin with, for `Step.weigh`."""
    return tuple(mosaic.filled((ROWS, plan.config.columns), 0.0) for _ in range(chunks))


def write(accs: Sequence[Array], to: Any, at: Any) -> None:
    """Chunks of a tile's columns to [B, rows, heads * chunks, columns]; `at`: `mma_sync.write`."""
    batch, head, first, live = at
    for n, acc in enumerate(accs):
        where = (batch, head * len(accs) + n, first, live)
        mma_sync.write(acc.astype(to.dtype), to, where)
