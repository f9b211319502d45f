"""Operands of any width in little shared memory, for the portable kernels: all of them come by some
`columns` at a time, each part while the one before it is multiplied, and none stays.

A score is a sum over parts of the head dim, added up in registers; of an output, or a gradient,
each part of its columns is made of one part of the right operand's. So shared memory holds two
parts of 64 rows for left operands, two of a tile for right ones, whatever the head dims. The price
is that what a block has of its own (queries, or a backward's keys) is read anew for every tile,
from L2: this is for float32 whose terms do not fit otherwise.

In memory the parts of a head lie beside each other like heads (`sm80_common.Widths.operand`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_attn.kernels.attention.sm80_common import turn
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.mma import mma_sync

ROWS = 64  # of a left operand

Array = Any


class Smem(NamedTuple):
    left: Any  # [2 * ROWS, ..]
    right: Any  # [2 * rows of a tile, ..]


def scratch(plan: Any, tile: int) -> Smem:
    """Shared memory of a kernel whose right operands have `tile` rows."""
    width = mma_sync.pitch(plan.parts_of_numbers * plan.config.columns)
    left, right = (plgpu.SMEM((2 * rows, width), plan.operand_dtype) for rows in (ROWS, tile))
    return Smem(left, right)


class Product(NamedTuple):
    """A matmul of a step: two operands' names, of which a left one in registers has none, and how
    many parts they come in.
    """

    left: str | None
    right: str
    parts: int


class Part(NamedTuple):
    left: str | None
    right: str
    number: int


class Rows(NamedTuple):
    """Where rows of an operand lie."""

    batch: Any
    head: Any
    first: Any
    live: Any  # how many there are; zeros take the place of the others


class Stream:
    """The parts of all of a block's steps, in the order in which `products` take them.

    `rows_of(name, where)`: the rows that a step takes of an operand; `where` is what `begin` and
    `step` say of it.
    """

    def __init__(
        self,
        plan: Any,
        smem: Smem,
        refs: Any,
        products: Sequence[Product],
        rows_of: Callable[[str, Any], Rows],
    ):
        self.plan, self.smem, self.refs, self.rows_of = plan, smem, refs, rows_of
        self.tile = smem.right.shape[0] // 2
        self.parts = [Part(*x[:2], n) for x in products for n in range(x.parts)]
        self.counts = {(x.left, x.right): x.parts for x in products}

    def begin(self, where: Any, meet: bool = False) -> None:
        """Asks for the first part of the first step."""
        turn(*self.copies(self.parts[0], where, jnp.int32(0)), wait=None, meet=meet)

    def step(self, number: Any, where: Any, following: Any) -> "Walk":
        """The step `number`, counted from 0. `following`: the next; None: this is the last."""
        return Walk(self, number, where, following)

    def copies(self, part: Part, where: Any, slot: Any) -> list[Any]:
        return [
            self._copy(name, part.number, where, (to, slot * (to.shape[0] // 2)))
            for name, to in zip(part[:2], self.smem, strict=True)
            if name is not None
        ]

    def _copy(self, name: str, number: int, where: Any, place: Any) -> Any:
        (to, start), ref, rows = place, getattr(self.refs, name), self.rows_of(name, where)
        head = rows.head * _parts_of_head(self.plan, name) + number
        at = (rows.batch, head, rows.first, rows.live, start)
        return (to, ref), at, (to.shape[0] // 2, ref.shape, ref.shape[3], None)


def _parts_of_head(plan: Any, name: str) -> int:
    return plan.k_parts if name in ("q", "k") else plan.v_parts


class Walk:
    """A step: `scores` and `weigh` in the order of the stream's products."""

    def __init__(self, stream: Stream, number: Any, where: Any, following: Any):
        self.stream, self.number, self.where, self.following = stream, number, where, following
        self.taken = 0

    def _slot(self, n: int) -> Any:
        """Of the step's n-th part."""
        even = len(self.stream.parts) % 2 == 0
        return jnp.int32(n & 1) if even else (self.number + n) & 1

    def _next(self) -> Any:
        """Where in shared memory the next part is. It is there; the one after it is asked for."""
        stream, n = self.stream, self.taken
        self.taken += 1
        copies: list[Any] = []
        if n + 1 < len(stream.parts):
            copies = stream.copies(stream.parts[n + 1], self.where, self._slot(n + 1))
        elif self.following is not None:
            copies = stream.copies(stream.parts[0], self.following, self._slot(n + 1))
        turn(*copies, wait=0)
        return self._slot(n)

    def scores(self) -> Array:
        """The next product of two operands that come, [ROWS, tile].

        Tensor cores add the parts up, though they round towards 0: so do those of the kernels that
        hold whole rows, one of which may have made the lse. Scores that are closer to the truth
        than an lse's own give probabilities that do not add up to 1.
        """
        stream = self.stream
        part = stream.parts[self.taken]
        sums, width, parts = None, stream.plan.config.columns, stream.plan.parts_of_numbers
        for _ in range(stream.counts[part.left, part.right]):
            slot = self._next()
            left, right = (stream.smem.left, slot * ROWS), (stream.smem.right, slot * stream.tile)
            some = (sums, 0, width)
            sums = mma_sync.scores(left, right, (ROWS, stream.tile, width), parts, some)
        return sums

    def weigh(self, accs: Sequence[Array], p: Sequence[Array]) -> tuple[Array, ...]:
        """acc + p @ a part of the next right operand, for each acc [ROWS, columns]."""
        to, width, found = self.stream.smem.right, self.stream.plan.config.columns, []
        for acc in accs:
            found.append(mma_sync.weigh(acc, p, to, self._next() * self.stream.tile, width))
        return tuple(found)


def nothing(plan: Any, parts: int) -> tuple[Array, ...]:
    """Sums to begin with, for `Walk.weigh`."""
    return tuple(mosaic.filled((ROWS, plan.config.columns), 0.0) for _ in range(parts))


def write(accs: Sequence[Array], to: Any, at: Any) -> None:
    """Parts of a tile's columns to [B, rows, heads * parts, columns]; `at` as `mma_sync.write`."""
    batch, head, first, live = at
    for n, acc in enumerate(accs):
        where = (batch, head * len(accs) + n, first, live)
        mma_sync.write(acc.astype(to.dtype), to, where)
