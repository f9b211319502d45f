"""Attention and caches a second time: loops in NumPy and Python, written from the definition.

Nothing here comes from the package, masks included; it is what the oracle itself is compared with.
"""

import dataclasses

import numpy as np


def attention(  # noqa: PLR0913
    q,
    k,
    v,
    *,
    left=None,
    right=None,
    scale=None,
    softcap=None,
    q_offset=0,
    q_lengths=None,
    kv_lengths=None,
    segment_ids=None,
    bias=None,
    mask_array=None,
    sinks=None,
):
    """(out [B, T, N, Hv], lse [B, N, T]) in float64, one query row at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (batch, q_len, q_heads, head_dim), kv_len, kv_heads = q.shape, k.shape[1], k.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    scores = (batch, q_heads, q_len, kv_len)
    bias = np.zeros(scores) if bias is None else np.broadcast_to(np.asarray(bias, float), scores)
    shown = np.broadcast_to(True if mask_array is None else np.asarray(mask_array), scores)
    offsets = np.broadcast_to(q_offset, batch)
    ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    out = np.zeros((batch, q_len, q_heads, v.shape[-1]))
    lse = np.full((batch, q_heads, q_len), -np.inf)
    for b, n, t in np.ndindex(batch, q_heads, q_len):
        if q_lengths is not None and t >= q_lengths[b]:
            continue
        position = int(offsets[b]) + t
        keys = [
            j
            for j in range(kv_len if kv_lengths is None else min(int(kv_lengths[b]), kv_len))
            if (right is None or j <= position + right)
            and (left is None or j >= position - left)
            and (segment_ids is None or ids[0][b, t] == ids[1][b, j])
            and shown[b, n, t, j]
        ]
        logits = k[b, keys, n // (q_heads // kv_heads)] @ q[b, t, n] * scale
        if softcap is not None:
            logits = softcap * np.tanh(logits / softcap)
        logits = logits + bias[b, n, t, keys]
        if not keys or np.all(logits == -np.inf):
            continue
        if sinks is not None and sinks[n] == np.inf:
            lse[b, n, t] = np.inf
            continue
        every = logits if sinks is None else np.append(logits, float(sinks[n]))
        lse[b, n, t] = every.max() + np.log(np.exp(every - every.max()).sum())
        weights = np.exp(logits - lse[b, n, t])
        out[b, t, n] = weights @ v[b, keys, n // (q_heads // kv_heads)]
    return out, lse


@dataclasses.dataclass
class PagedModel:
    """Model of a paged cache, in lists: the rows of each sequence, and the pages that it holds.

    A row is any token. `lost` sequences wanted a page that the pool did not have.
    """

    pages: int
    page_size: int
    width: int
    rows: list[list]
    counts: list[int]  # rows taken, dropped ones included
    held: list[list[int]]  # names of pages; a shared one is in several lists
    lost: list[bool]
    names: int = 0

    @classmethod
    def create(cls, sequences, pages, page_size, width):
        empty = [[] for _ in range(sequences)]
        return cls(
            pages,
            page_size,
            width,
            empty,
            [0] * sequences,
            [[] for _ in range(sequences)],
            [False] * sequences,
        )

    @property
    def in_use(self) -> int:
        return len({page for pages in self.held for page in pages})

    def _missing(self, m, rows):
        if self.lost[m]:
            return 0
        wanted = min(self.counts[m] + rows, self.width * self.page_size)
        return max(-(-wanted // self.page_size) - len(self.held[m]), 0)

    def _take(self, m, count):
        self.held[m] += range(self.names, self.names + count)
        self.names += count

    def allocate(self, rows):
        """Fewest pages first, ties by index; all that a sequence needs, or nothing."""
        room = self.pages - self.in_use
        granted = [False] * len(rows)
        need = [self._missing(m, n) for m, n in enumerate(rows)]
        for m in sorted(range(len(rows)), key=lambda m: (need[m], m)):
            if need[m] <= room:
                room -= need[m]
                self._take(m, need[m])
                fits = self.counts[m] + rows[m] <= self.width * self.page_size
                granted[m] = fits and not self.lost[m]
            else:
                room = -1  # whoever asks for as much or more comes after and gets nothing either
        return granted

    def extend(self, rows):
        self.allocate(rows)
        for m, count in enumerate(rows):
            self.counts[m] += count
            needed = -(-min(self.counts[m], self.width * self.page_size) // self.page_size)
            self.lost[m] |= needed > len(self.held[m])

    def write(self, tokens):
        """tokens[m]: the rows that sequence m just took."""
        for m, new in enumerate(tokens):
            room = len(self.held[m]) * self.page_size
            self.rows[m] += new[: max(room - len(self.rows[m]), 0)]

    def free(self, m):
        self.rows[m], self.counts[m], self.held[m], self.lost[m] = [], 0, [], False

    def fork(self, source, target, length=None):
        length = self.counts[source] if length is None else min(max(length, 0), self.counts[source])
        rows, held = list(self.rows[source][:length]), list(self.held[source])
        self.free(target)
        full, part = divmod(length, self.page_size)
        self.counts[target] = length
        self.held[target] = held[:full]
        self.lost[target] = len(held) < min(-(-length // self.page_size), self.width)
        if part and full < len(held):  # the page that both would go on writing to
            if self.in_use < self.pages:
                self._take(target, 1)
            else:
                self.lost[target] = True
        self.rows[target] = rows[: len(self.held[target]) * self.page_size]

    def overflowed(self, m):
        return self.lost[m] or self.counts[m] > self.width * self.page_size
