"""Which key tiles a tile of queries needs: what the mask says, in tiles.

The schedulers of the attention kernels ask here, and here asks `Mask`, which has the definition.
Everything is plain arithmetic on Python numbers or on traced ones.
"""

import functools
import heapq
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn.masks import Mask


class Span(NamedTuple):
    """Key tiles [lo, hi) that some query sees; [full_lo, full_hi) all of them see whole."""

    lo: Any
    full_lo: Any
    full_hi: Any
    hi: Any

    def within(self, other: "Span") -> "Span":
        """What two spans have in common."""
        return Span(
            jnp.maximum(self.lo, other.lo),
            jnp.maximum(self.full_lo, other.full_lo),
            jnp.minimum(self.full_hi, other.full_hi),
            jnp.minimum(self.hi, other.hi),
        )

    def parts(self) -> set[str]:
        """Of a span of Python numbers, taken from its last tile to its first: what needs a mask."""
        if self.hi <= self.lo:
            return {"empty"}
        first = self.hi - 1
        named = {
            "first_masked": not self.full_lo <= first < self.full_hi,
            "high": self.full_hi < first,
            "low": self.lo < self.full_lo,
        }
        return {name for name, there in named.items() if there}


PARTS = frozenset(("empty", "first_masked", "high", "low"))


def of_rows(mask: Mask, position: Any, rows: Any, kv_len: Any, block: int) -> Span:
    """The key tiles of `rows` queries that start at a position."""
    lo, hi = mask.kv_range(position, position + rows, kv_len)
    full_lo, full_hi = mask.kv_full_range(position, position + rows, kv_len)
    return Span(
        lo=_floor(lo, block),
        full_lo=_floor(full_lo + block - 1, block),
        full_hi=_floor(_at_least(full_hi, 0), block),
        hi=_floor(_at_least(hi, 0) + block - 1, block),
    )


def of_segments(q_ids: Any, kv_ids: Any, rows: int, block: int) -> Any:
    """int32[B, 4, tiles of `rows` queries]: a Span's fields, by segment ids [B, n] in whole tiles.

    A tile's ids lie between its least and its greatest; tiles whose intervals are apart need not
    meet, tiles that both hold one same id need no mask. Exact for packed documents; safe for any:
    where the tiles of one id lie apart, none of them counts as whole. As few steps as XLA needs
    kernels for, since each costs as much as a tile of work: one over the ids, one over pairs of
    tiles, one to finish.
    """
    q_least, q_most, kv_least, kv_most = _extremes(q_ids, kv_ids, rows, block)
    q_least, q_most = q_least[:, :, None], q_most[:, :, None]
    kv_least, kv_most = kv_least[:, None, :], kv_most[:, None, :]
    meet = (q_least <= kv_most) & (kv_least <= q_most)
    same = (q_least == q_most) & (kv_least == kv_most) & (q_least == kv_least)
    begins = same & ~jnp.pad(same[..., :-1], ((0, 0), (0, 0), (1, 0)))
    count = meet.shape[-1]
    at = jnp.arange(count, dtype=jnp.int32)[None, None]
    found = jnp.stack(
        [  # the least of each is what is asked for
            jnp.where(meet, at, count),
            jnp.where(same, at, count),
            jnp.where(begins, -at, 1),
            jnp.where(same, -1 - at, 0),
            jnp.where(meet, -1 - at, 0),
        ]
    ).min(axis=-1)
    lo, full_lo, last_begin, full_hi, hi = found[0], found[1], -found[2], -found[3], -found[4]
    one_run = last_begin == full_lo
    fields = (jnp.minimum(lo, hi), full_lo, jnp.where(one_run, full_hi, full_lo), hi)
    return jnp.stack(fields, axis=1)


def deal(work: np.ndarray, costs: np.ndarray, hands: int) -> np.ndarray:
    """Work, in the order in which it should be begun, dealt to `hands` that each take the next
    piece when they are done with the last: int32[hands, n], how many pieces, which, and zeros: two
    at least, so that a block may read ahead.

    Known beforehand it needs no counter in global memory, and a block can ask for the next queries
    while it is busy with these. Causal, T 8192, head dim 256: 755 TFLOP/s, where every
    multiprocessor took each 132nd piece 605, and one block a piece 709.
    """
    dealt: list[list[int]] = [[] for _ in range(hands)]
    free = [(0.0, hand) for hand in range(hands)]
    for piece, cost in zip(work.tolist(), costs.tolist(), strict=True):
        when, hand = free[0]
        dealt[hand].append(piece)
        heapq.heapreplace(free, (when + cost, hand))
    return _table(dealt)


def pack(work: np.ndarray, costs: np.ndarray, hands: int) -> np.ndarray:
    """As `deal`, in no order but longest first: for so few pieces that what the last ones leave
    idle is much of all. Each goes to the first hand that has room, and room is as little as will
    do (Coffman, Garey and Johnson's MULTIFIT).
    """
    order = np.argsort(-costs, kind="stable")
    work, sizes = work[order], costs[order].tolist()
    least = max(sizes[0], sum(sizes) / hands)
    enough, dealt = 2 * least, None
    for _ in range(12):
        room = (least + enough) / 2
        found = _first_fit(sizes, hands, room)
        least, enough, dealt = (least, room, found) if found else (room, enough, dealt)
    if dealt is None:  # never: twice the least is room for all
        return deal(work, costs[order], hands)
    return _table([work[places].tolist() for places in dealt])


def _first_fit(sizes: list[float], hands: int, room: float) -> list[list[int]] | None:
    """Which pieces each hand takes; None where there is no room for all."""
    rooms = [room] * hands
    dealt: list[list[int]] = [[] for _ in range(hands)]
    for piece, size in enumerate(sizes):
        hand = next((hand for hand, left in enumerate(rooms) if left >= size), None)
        if hand is None:
            return None
        rooms[hand] -= size
        dealt[hand].append(piece)
    return dealt


def _table(dealt: list[list[int]]) -> np.ndarray:
    table = np.zeros((len(dealt), 3 + max(map(len, dealt))), np.int32)
    for row, pieces in zip(table, dealt, strict=True):
        row[: len(pieces) + 1] = [len(pieces), *pieces]
    return table


def _extremes(q_ids: Any, kv_ids: Any, rows: int, block: int) -> list[Any]:
    """Least and greatest id of each tile: of `rows` queries, then of `block` keys."""
    unit = math.gcd(rows, block)
    ids = jnp.concatenate([q_ids, kv_ids], axis=1)
    ids = ids.reshape(ids.shape[0], -1, unit)
    queries = q_ids.shape[1] // unit
    results = []
    for part, tile in ((slice(queries), rows), (slice(queries, None), block)):
        for reduce, pick in ((jnp.min, jnp.minimum), (jnp.max, jnp.maximum)):
            units = reduce(ids, axis=-1)[:, part]
            step = tile // unit
            results.append(functools.reduce(pick, [units[:, i::step] for i in range(step)]))
    return results


def _floor(n: Any, by: int) -> Any:
    return n // by if isinstance(n, int) else lax.div(n, jnp.int32(by))


def _at_least(n: Any, least: int) -> Any:
    return max(n, least) if isinstance(n, int) else jnp.maximum(n, least)
