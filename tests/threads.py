"""The twin of `tiles.Thread`: programs of one thread, run in NumPy for a block of 128 at once."""

import threading
from typing import Any

import numpy as np


class BlockOfThreads:
    """`tiles.Thread` for the 128 threads of a block at once: a value is an array with an element a
    thread.
    """

    def __init__(self, first: int, memory: "Memory"):
        self.index = np.arange(128, dtype=np.int32)
        self.memory = memory
        self.ids = first + self.index.astype(np.int64)

    def wide(self, x):
        return np.asarray(x, np.int64)

    def minimum(self, a, b):
        return np.minimum(a, b)

    def select(self, where, a, b):
        return np.where(where, a, b)

    def pick(self, which, table):
        if len(table) == 1:
            return table[0]
        (row,) = set(np.broadcast_to(which, 128).tolist())
        if not 0 <= row < len(table):
            raise IndexError(f"pick: row {row} of a table of {len(table)}")
        return table[row]

    def in_order(self):
        pass

    def prefetch(self, ref, index, nbytes):
        self.memory.prefetch(ref, np.broadcast_to(index, 128), nbytes)

    def load(self, ref, index, nbytes):
        return self.memory.load(ref, np.broadcast_to(index, 128), nbytes, self.ids)

    def store(self, ref, index, value, nbytes, where):
        where = np.broadcast_to(where, 128)
        index = np.broadcast_to(index, 128)[where]
        self.memory.store(ref, index, value[where], nbytes, self.ids[where])


class Memory:
    """The arrays of one launch as bytes. Who wrote and who read each byte is kept: nobody may meet
    another there.
    """

    NOBODY, SEVERAL = -1, -2

    def __init__(self):
        self.lock = threading.Lock()
        self.touched: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.blocks: dict[Any, int] = {}

    def block(self, *coordinates) -> int:
        """The number of a block's first thread."""
        with self.lock:
            return 128 * self.blocks.setdefault(coordinates, len(self.blocks))

    def prefetch(self, ref, index, nbytes):
        self._words(ref, index, nbytes, "prefetched")

    def load(self, ref, index, nbytes, threads):
        words = self._words(ref, index, nbytes, "read")
        with self.lock:
            wrote, read = self._who(ref, nbytes)
            if not np.isin(wrote[index], self.NOBODY).all():
                raise RuntimeError(
                    "RACE DETECTED: a thread reads what another one writes in the same launch"
                )
            read[index] = np.where(read[index] == self.NOBODY, threads[:, None], self.SEVERAL)
            return words[index].copy()

    def store(self, ref, index, value, nbytes, threads):
        words = self._words(ref, index, nbytes, "written")
        with self.lock:
            wrote, read = self._who(ref, nbytes)
            alone = len(np.unique(index)) == len(index) and (wrote[index] == self.NOBODY).all()
            if not alone:
                raise RuntimeError("RACE DETECTED: a word is written twice in one launch")
            if not ((read[index] == self.NOBODY) | (read[index] == threads[:, None])).all():
                raise RuntimeError(
                    "RACE DETECTED: a thread writes what another one reads in the same launch"
                )
            wrote[index] = threads[:, None]
            words[index] = value

    def _words(self, ref, index, nbytes, verb):
        words = ref.reshape(-1).view(np.dtype("V16" if nbytes == 16 else f"i{nbytes}"))
        if not np.shares_memory(words, ref) and ref.size:
            raise ValueError("the array is not contiguous")
        if index.size and not (index.min() >= 0 and index.max() < words.size):
            raise IndexError(
                f"a word of {nbytes} bytes is {verb} at {index.min()}..{index.max()} of "
                f"{words.size}"
            )
        return words

    def _who(self, ref, nbytes):
        fresh = lambda: np.full(ref.nbytes, self.NOBODY, np.int64)  # noqa: E731
        if id(ref) not in self.touched:
            self.touched[id(ref)] = fresh(), fresh()
        return [who.reshape(-1, nbytes) for who in self.touched[id(ref)]]
