"""Operands of any width in little shared memory, for the portable kernels: all of them come in
chunks of `Config.columns` columns, each while the one before it is multiplied, and none stays.

A score is a sum over chunks of the head dim, added up in registers; of an output, or a gradient,
each chunk of columns is made of one chunk of the right operand. So shared memory holds two chunks
of 64 rows for left operands and two of a tile for right ones, whatever the head dims. The price is
that what a block has of its own (queries, or a backward's keys) is read anew for every tile, from
L2. This is for float32 whose terms do not fit otherwise: at head dim 256 and precision "highest" 64
rows of q alone take 97 KiB, and a block of the smaller GPUs has 99.

In memory the chunks of a head lie beside each other like heads (`sm80_common.MmaFormat`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_attn.kernels.attention.sm80_common import Copy, MmaFormat, copy_async
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import GmemRef, Index, RegisterTile, SmemRef
from pallas_attn.kernels.mma import mma_sync

ROWS = 64  # rows of a left operand


class ChunkSmem(NamedTuple):
    lhs: SmemRef  # [2 * ROWS, ..]: the chunk that is multiplied, and the one that is being copied
    rhs: SmemRef  # [2 * rows of a tile, ..]


def scratch(form: MmaFormat, tile: int) -> ChunkSmem:
    """Shared memory of a kernel whose right operands have `tile` rows."""
    return ChunkSmem(*(form.buffer(2 * rows, form.columns) for rows in (ROWS, tile)))


class Product(NamedTuple):
    """A matmul of a step, by the names of its operands; a left one in registers has none."""

    lhs: str | None
    rhs: str


class Chunk(NamedTuple):
    """One of the chunks of a product's operands."""

    lhs: str | None
    rhs: str
    number: int


class HeadRows(NamedTuple):
    """Rows of an operand in memory."""

    batch: Index
    head: Index
    first: Index
    live: Index  # rows that are there; zeros take the place of the others


class Stream:
    """The chunks of all steps of a block, in the order in which `products` use them.

    `rows_of(name, where)`: the rows of an operand that a step uses; `where` is what names the step
    to `begin` and `step`.
    """

    def __init__(
        self,
        ctx: KernelContext,
        products: Sequence[Product],
        rows_of: Callable[[str, Any], HeadRows],
    ):
        (plan, self.refs, self.smem), self.rows_of = ctx, rows_of
        self.format: MmaFormat = plan.format
        self.tile = self.smem.rhs.shape[0] // 2
        self.chunks = [Chunk(*x, n) for x in products for n in self._chunks_of(x)]

    def _chunks_of(self, product: Product) -> range:
        """The chunks of columns that a product reads: all for scores, and for an output those that
        this launch makes.
        """
        name = product.rhs
        whole = product.lhs is not None
        return range(self.format.chunks(name)) if whole else self.format.made_chunks(name)

    def begin(self, where: Any, sync: bool = False) -> None:
        """Issues the copy of the first chunk of the first step."""
        copy_async(*self.copies(self.chunks[0], where, jnp.int32(0)), pending=None, sync=sync)

    def step(self, number: Index, where: Any, following: Any) -> "Step":
        """The step `number`, counted from 0. `following`: the next; None: this is the last."""
        return Step(self, number, where, following)

    def copies(self, chunk: Chunk, where: Any, slot: Index) -> list[Copy]:
        return [
            self._copy(name, chunk.number, where, (to, slot * (to.shape[0] // 2)))
            for name, to in zip(chunk[:2], self.smem, strict=True)
            if name is not None
        ]

    def _copy(self, name: str, number: int, where: Any, place: tuple[SmemRef, Index]) -> Copy:
        (to, start), ref, rows = place, getattr(self.refs, name), self.rows_of(name, where)
        head = rows.head * self.format.chunks(name) + number
        at = (rows.batch, head, rows.first, rows.live, start)
        return Copy((to, ref), at, (to.shape[0] // 2, ref.shape, ref.shape[3], None))


class Step:
    """A step: calls of `scores` and `weigh` in the order of the stream's products."""

    def __init__(self, stream: Stream, number: Index, where: Any, following: Any):
        self.stream, self.number, self.where, self.following = stream, number, where, following
        self.taken = 0

    def _slot(self, n: int) -> Index:
        """The half of shared memory that has the step's n-th chunk."""
        even = len(self.stream.chunks) % 2 == 0
        return jnp.int32(n & 1) if even else (self.number + n) & 1

    def _next(self) -> Index:
        """Waits for the next chunk, issues the copy of the one after it; the slot of the first."""
        stream, n = self.stream, self.taken
        self.taken += 1
        copies: list[Copy] = []
        if n + 1 < len(stream.chunks):
            copies = stream.copies(stream.chunks[n + 1], self.where, self._slot(n + 1))
        elif self.following is not None:
            copies = stream.copies(stream.chunks[0], self.following, self._slot(n + 1))
        copy_async(*copies, pending=0)
        return self._slot(n)

    def scores(self) -> RegisterTile:
        """The next product of two operands in memory, [ROWS, tile].

        Tensor cores add the chunks up, though they round towards 0: so do those of the kernels that
        hold whole rows, one of which may have made the lse. Scores that are closer to the truth
        than an lse's own give probabilities that do not add up to 1.
        """
        stream = self.stream
        sums, width, terms = None, stream.format.columns, stream.format.terms
        for _ in range(stream.format.chunks(stream.chunks[self.taken].rhs)):
            slot = self._next()
            lhs, rhs = (stream.smem.lhs, slot * ROWS), (stream.smem.rhs, slot * stream.tile)
            some = (sums, 0, width)
            sums = mma_sync.scores(lhs, rhs, (ROWS, stream.tile, width), terms, some)
        return sums

    def weigh(
        self, accs: Sequence[RegisterTile], p: Sequence[RegisterTile]
    ) -> tuple[RegisterTile, ...]:
        """acc + p @ a chunk of the next right operand, for each acc [ROWS, columns]."""
        to, width, tile = self.stream.smem.rhs, self.stream.format.columns, self.stream.tile
        return tuple(mma_sync.matmul_add(acc, p, to, self._next() * tile, width) for acc in accs)


def zeros(form: MmaFormat, name: str) -> tuple[RegisterTile, ...]:
    """Sums to begin with, for `Step.weigh`, of as many columns as "k" or "v" has."""
    chunks = form.made_chunks(name)
    return tuple(mosaic.filled((ROWS, form.columns), 0.0) for _ in chunks)


def write(accs: Sequence[RegisterTile], to: GmemRef, at: tuple[Index, ...]) -> None:
    """Chunks of a tile's columns to [B, rows, heads * chunks, columns]; `at`: `mma_sync.write`."""
    batch, head, first, live = at
    for n, acc in enumerate(accs):
        where = (batch, head * len(accs) + n, first, live)
        mma_sync.write(acc.astype(to.dtype), to, where)
