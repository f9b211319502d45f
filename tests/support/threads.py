"""The twin of `lang.thread_program.Thread`: programs of one thread, run in NumPy for a block of
128 at once.
"""

import threading
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_attn.kernels.lang.threads import SENTINEL


class Picked(NamedTuple):
    """Several arrays, of which each thread picked one."""

    which: np.ndarray
    refs: tuple[Any, ...]


class BlockOfThreads:
    """`thread_program.Thread` for the 128 threads of a block at once: a value is an array with an
    element a thread.
    """

    def __init__(self, first: int, memory: "Memory", block: Any = None, touches: Any = None):
        self.index = np.arange(128, dtype=np.int32)
        self.memory, self.block, self.touches = memory, block, touches
        self.ids = first + self.index.astype(np.int64)
        self.stores_in_flight = False  # by TMA, of tiles in shared memory

    def to_int64(self, x):
        return np.asarray(x, np.int64)

    def minimum(self, a, b):
        return np.minimum(a, b)

    def select(self, where, a, b):
        return np.where(where, a, b)

    def maximum(self, a, b):
        return np.maximum(a, b)

    def most_of_lanes(self, a, lanes):
        return np.repeat(a.reshape(-1, lanes).max(axis=1), lanes)

    def numbers(self, word, nbytes, dtype):
        rows = np.ascontiguousarray(word).view(jnp.dtype(dtype)).reshape(128, -1)
        assert rows.shape[1] * jnp.dtype(dtype).itemsize == nbytes
        return list(rows.astype(np.float32).T)

    def narrow(self, values, dtype):
        rows = np.stack(values, axis=1)
        rows = np.rint(rows) if dtype == "int8" else rows
        with np.errstate(invalid="ignore"):  # NaN, which is selected away
            return self._word(rows.astype(jnp.dtype(dtype)))

    def packed(self, values):
        return self._word(np.stack(values, axis=1).astype(np.uint8))

    def _word(self, rows):
        kind = "V16" if rows.shape[1] == 16 else f"i{rows.shape[1]}"
        return np.ascontiguousarray(rows).view(kind).reshape(128)

    def bits(self, number):
        return np.asarray(number, np.float32).view(np.int32)

    def as_float(self, bits):
        return np.asarray(bits, np.int32).view(np.float32)

    def times(self, a, b):
        with np.errstate(over="ignore", invalid="ignore"):
            return a * np.float32(b)

    def plus(self, a, b):
        return a + np.float32(b)

    def reciprocal(self, a):
        return np.float32(1) / a

    def sum_of_lanes(self, a, lanes):
        lane = self.index
        while lanes > 1:
            lanes //= 2
            a = a + a[lane ^ lanes]
        return a

    def rsqrt(self, a):
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.float32(1) / np.sqrt(a, dtype=np.float32)

    def rounded(self, values, dtype):
        with np.errstate(over="ignore", invalid="ignore"):
            rows = np.ascontiguousarray(np.stack(values, axis=1).astype(jnp.dtype(dtype)))
        nbytes = rows.shape[1] * rows.itemsize
        return rows.view("V16" if nbytes == 16 else f"i{nbytes}").reshape(128)

    def pick(self, which, table):
        if len(table) == 1:
            return table[0]
        which = np.broadcast_to(which, 128)
        chosen = set(which.tolist())
        for row in chosen:
            if not 0 <= row < len(table):
                raise IndexError(f"pick: row {row} of a table of {len(table)}")
        if len(chosen) == 1:
            return table[chosen.pop()]
        return tuple(Picked(which, refs) for refs in zip(*table, strict=True))

    def order_loads(self):
        pass

    def prefetch(self, ref, index, nbytes):
        self.memory.prefetch(ref, np.broadcast_to(index, 128), nbytes)

    def load(self, ref, index, nbytes):
        return self.memory.load(ref, np.broadcast_to(index, 128), nbytes, self.ids)

    def load_where(self, ref, index, nbytes, where):
        index, where = np.broadcast_to(index, 128), np.broadcast_to(where, 128)
        words = np.zeros(128, "V16" if nbytes == 16 else f"i{nbytes}")
        words[where] = self.memory.load(ref, index[where], nbytes, self.ids[where])
        return words

    def store(self, ref, index, value, nbytes, where):
        where = np.broadcast_to(where, 128)
        if isinstance(ref, Picked):
            for row, target in enumerate(ref.refs):
                self.store(target, index, value, nbytes, where & (ref.which == row))
            return
        index = np.broadcast_to(index, 128)[where]
        self.memory.store(ref, index, value[where], nbytes, self.ids[where])

    # ---- kernels.lang.threads.Thread ------------------------------------------------------------

    def choose(self, where, a, b):
        return np.where(where, a, b).astype(np.result_type(a))

    def running_sum(self, x):
        return np.cumsum(np.broadcast_to(x, 128).reshape(4, 32), axis=1, dtype=np.int32).reshape(-1)

    def total_of_lanes(self, x):
        return np.repeat(np.broadcast_to(x, 128).reshape(4, 32).sum(axis=1, dtype=np.int32), 32)

    def of_lane(self, x, lane):
        each = np.broadcast_to(x, 128).reshape(4, 32)
        lane = np.broadcast_to(lane, 128).reshape(4, 32)
        return np.take_along_axis(each, lane, axis=1).reshape(-1)

    def warp_highest(self, x):
        return np.repeat(np.broadcast_to(x, 128).reshape(4, 32).max(axis=1), 32)

    def warp_sum(self, x):
        return np.repeat(np.broadcast_to(x, 128).reshape(4, 32).sum(axis=1), 32)

    def exp2(self, x):
        return np.exp2(x, dtype=np.float32)

    def log2(self, x):
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log2(x, dtype=np.float32)

    def highest(self, a, b):
        return np.maximum(a, b)

    def lowest(self, a, b):
        return np.minimum(a, b)

    def is_zero(self, x):
        return x == 0

    def nothing_yet(self, x):
        return x == -np.inf

    def number(self, x):
        return np.float32(x)

    def loop(self, count, carry, body):
        (count,) = set(np.ravel(count).tolist())
        for i in range(count):
            carry = body(np.int32(i), carry)
        return carry

    def load_floats(self, ref, index, count):
        words = self.memory.load(ref, np.broadcast_to(index, 128), 4 * count, self.ids)
        return list(np.ascontiguousarray(words).view(np.float32).reshape(128, count).T)

    def store_floats(self, ref, index, values, where):
        value = np.stack([np.broadcast_to(np.float32(x), 128) for x in values], axis=1)
        word = np.dtype("V16" if len(values) == 4 else "i4")
        value = np.ascontiguousarray(value).view(word).reshape(-1)
        self.store(ref, index, value, 4 * len(values), where)

    def load_narrow(self, ref, index, dtype):
        words = self.memory.load(ref, np.broadcast_to(index, 128), 8, self.ids)
        numbers = np.ascontiguousarray(words).view(jnp.dtype(dtype)).reshape(128, 4)
        return list(numbers.astype(np.float32).T)

    def store_narrow(self, ref, index, values, dtype, where):
        value = np.stack([np.broadcast_to(np.float32(x), 128) for x in values], axis=1)
        value = np.ascontiguousarray(value.astype(jnp.dtype(dtype))).view(np.int64).reshape(-1)
        self.store(ref, index, value, 8, where)

    def shared_floats(self, ref, index, count):
        words = self._shared(ref, np.broadcast_to(index, 128), 4 * count, self.ids)
        return list(np.ascontiguousarray(words).view(np.float32).reshape(128, count).T)

    def shared_load(self, ref, index):
        return self._shared(ref, np.broadcast_to(index, 128), 4, self.ids)

    def shared_store(self, ref, index, value, where):
        where = np.broadcast_to(where, 128)
        value = np.broadcast_to(value, 128)
        if value.dtype != np.float32:
            value = value.astype(np.int32)
        value = np.ascontiguousarray(value).view(np.int32)[where]
        index = np.broadcast_to(index, 128)[where]
        self._shared(ref, index, 4, self.ids[where], value)

    def _shared(self, ref, index, nbytes, ids, value=None):
        if self.touches is not None:
            new = index if value is None else index[self._changed(ref, index, value)]
            self.touches.touch(ref, new.astype(np.int64) * nbytes, nbytes, value is not None)
        return self.memory.shared(ref, index, nbytes, ids, value is not None, value)

    def _changed(self, ref, index, value):
        """Words whose value changes: to write the value that is there is no hazard."""
        words = self.memory._words(ref, index, 4, "written")
        return words[index] != value

    def sync(self, groups=1):
        """With the block's other warpgroups, each of which is one of these."""
        self.memory.meet(int(self.ids[0]))
        if self.touches is not None:
            self.touches.meet()
        if groups > 1:
            self.touches.meet_others(self.memory.gate(self.block, groups))

    def make_barriers(self, ref, count):
        block = int(self.ids[0])
        self.memory.barriers.update({(block, slot): Barrier() for slot in range(count)})

    def announce(self, barriers, slot, nbytes, where):
        for gate, count in self._each(where, slot, nbytes):
            self.memory.barriers[int(self.ids[0]), gate].announce(count)

    def copy(self, to, source, nbytes, done, where):
        """Nothing arrives before its reader waits; until then there are NaNs."""
        to, to_index, source, index = to.ref, to.index, source.ref, source.index
        slot = done.index
        into = self.memory._words(to, np.broadcast_to(to_index, 128)[where], 1, "written")
        words = self.memory._words(source, np.broadcast_to(index, 128)[where], 1, "read")
        for at, first, count, gate in self._each(where, to_index, index, nbytes, slot):
            if count % 16 or count <= 0:
                raise ValueError(f"a bulk copy of {count} bytes")
            at, first = slice(16 * at, 16 * at + count), slice(16 * first, 16 * first + count)
            if at.stop > into.size or first.stop > words.size:
                raise IndexError(f"a bulk copy of bytes {first} of {words.size} to {at}")
            arrived = words[first].copy()
            self.memory.barriers[int(self.ids[0]), gate].begin(into[at], arrived)
            into[at] = -1

    def copy_box(self, to, source, done, where):
        """Copies a box; its bytes arrive as those of `copy` do."""
        into = self.memory._words(to.ref, np.broadcast_to(to.index, 128)[where], 1, "written")
        self.memory._words(source.ref, np.broadcast_to(0, 128)[where], 1, "read")
        box = source.shape
        for at, gate, *begin in self._each(where, to.index, done.index, *source.begin):
            ends = [first + n for first, n in zip((*begin, 0), box, strict=True)]
            if min(begin) < 0 or any(np.greater(ends, source.ref.shape)):
                raise IndexError(f"a box of {box} at {begin} of {source.ref.shape}")
            some = tuple(map(slice, (*begin, 0), ends))
            arrived = np.ascontiguousarray(source.ref[some]).reshape(-1).view(into.dtype)
            place = slice(16 * at, 16 * at + arrived.size)
            self.memory.barriers[int(self.ids[0]), gate].begin(into[place], arrived.copy())
            into[place] = -1

    def wait(self, barriers, slot, parity):
        ((slot, parity),) = set(self._each(True, slot, parity))
        self.memory.barriers[int(self.ids[0]), slot].wait(parity)

    def copy_back(self, to, source, nbytes, where):
        """Copies to global memory; the bytes that arrive are those in shared memory at the wait."""
        into = self.memory._words(to.ref, np.broadcast_to(to.index, 128)[where], 1, "written")
        words = self.memory._words(source.ref, np.broadcast_to(source.index, 128)[where], 1, "read")
        copies = self.memory.copies_back_of(int(self.ids[0]))
        for at, first, count in self._each(where, to.index, source.index, nbytes):
            at, first = slice(16 * at, 16 * at + count), slice(16 * first, 16 * first + count)
            if at.stop > into.size or first.stop > words.size or count % 16:
                raise IndexError(f"a bulk copy of bytes {first} of {words.size} to {at}")
            copies.asked.append(CopyBack(into[at], words[first]))

    def commit_copies_back(self):
        self.memory.copies_back_of(int(self.ids[0])).commit()

    def wait_copies_back(self, left, read=False):
        self.memory.copies_back_of(int(self.ids[0])).wait(left, read)

    def copy_async(self, to, source, there, where=None, size=16):
        """Nothing arrives before its reader waits and all meet; until then there are NaNs."""
        to_index, index = to.index + to.offset, source.index + source.offset
        to, source = to.ref, source.ref
        where = np.broadcast_to(True if where is None else where, 128)
        there = np.broadcast_to(there, 128)[where]
        to_index, index = (np.broadcast_to(x, 128)[where] for x in (to_index, index))
        into = self.memory._words(to, to_index, size, "written")
        words = self.memory._words(source, index[there], size, "read")
        arrived = np.zeros(len(there), into.dtype)
        arrived[there] = words[index[there]]
        into[to_index] = np.full(size, 255, np.uint8).view(into.dtype)
        self.memory.copies_of(int(self.ids[0])).asked.append((into, to_index, arrived))

    def commit_copies(self):
        self.memory.copies_of(int(self.ids[0])).commit()

    def wait_copies(self, left):
        self.memory.copies_of(int(self.ids[0])).wait(left)

    def _each(self, where, *values):
        """One tuple of numbers a thread for which the condition holds."""
        where = np.broadcast_to(where, 128)
        return list(zip(*(np.broadcast_to(x, 128)[where].tolist() for x in values), strict=True))

    def signal(self, counters, index, where, remote=False):
        del remote
        if self.stores_in_flight and np.any(where):
            raise RuntimeError("RACE DETECTED: a signal before what it tells of is in memory")
        done = self.memory.copies_back_of(int(self.ids[0])).done
        with self.memory.lock:
            for (at,) in self._each(where, index):
                counters.reshape(-1)[at] += 1
                self.memory.signalled.setdefault((id(counters), at), []).extend(done)

    def send_floats(self, ref, index, values, where):
        words = [np.broadcast_to(np.float32(x), 128).view(np.int32) for x in values]
        nan = np.int32(0x7FFFFFFF)
        values = [np.where(x == SENTINEL, nan, x).view(np.float32) for x in words]
        self.store_floats(ref, index, values, where)

    def receive_floats(self, ref, indices, wheres):
        return [
            list(self._receive(ref, index, 16, where).view(np.float32).reshape(128, 4).T)
            for index, where in zip(indices, wheres, strict=True)
        ]

    def _receive(self, ref, index, nbytes, where):
        """Blocks run one after the other: nothing more will come."""
        words = np.ascontiguousarray(self.load_where(ref, index, nbytes, where))
        if (words.view(np.int32) == SENTINEL).any():
            raise RuntimeError(f"DEADLOCK: nothing has come to words of {nbytes} bytes")
        return words

    def count(self, counters, index, where):
        """Passes a turn on: blocks run one after the other, so nobody else shows that a turn was
        taken too early. Who passes it on has to have waited for just as many as have counted.
        """
        for (at,) in self._each(where, index):
            turn = int(counters.reshape(-1)[at])
            if (waited := self._turns.pop((id(counters), at), 0)) != turn:
                raise RuntimeError(f"RACE DETECTED: turn {turn} is taken by who waits for {waited}")
        self.memory.added.discard(int(self.ids[0]))
        self.signal(counters, index, where)

    def peek(self, counters, index):
        """The counter, or, every other time, 0, as if nobody had counted yet."""
        ((at,),) = set(self._each(True, index))
        self.memory.peeks += 1
        turn = int(counters.reshape(-1)[at]) if self.memory.peeks % 2 else 0
        self._turns[id(counters), at] = turn
        return np.full(128, turn, np.int32)

    @property
    def _turns(self):
        """The counts for which this warpgroup waited, by counter."""
        return self.memory.turns.setdefault(int(self.ids[0]), {})

    def take(self, counters, index, where):
        taken = np.zeros(128, np.int32)
        with self.memory.lock:
            flat = counters.reshape(-1)
            for thread in np.flatnonzero(np.broadcast_to(where, 128)):
                at = np.broadcast_to(index, 128)[thread]
                taken[thread] = flat[at]
                flat[at] += 1
        return taken

    def wait_until(self, counters, index, least, remote=False):
        """Blocks run one after the other: nobody else will come."""
        if not self._there(counters, index, least, here=not remote):
            raise RuntimeError(f"DEADLOCK: counter {index} has not reached {least}")
        if int(self.ids[0]) in self.memory.added:
            raise RuntimeError("RACE DETECTED: a number is added before its turn")
        for at, turn in self._each(self.index < 1, index, least):
            self._turns[id(counters), at] = turn

    def reached(self, counters, index, least):
        return np.full(128, self._there(counters, index, least), np.int32)

    def _there(self, counters, index, least, here=True):
        """Shows bytes that were copied back before the signals to a reader of them, not before."""
        ((at, wanted),) = set(self._each(True, index, least))
        there = counters.reshape(-1)[at] >= wanted
        if there and here:
            for copy in self.memory.signalled.get((id(counters), at), ()):
                copy.write()
        return there

    def arrive(self, counters, index, count, last):
        self.sync()
        ((index, count),) = set(self._each(True, index, count))
        last.reshape(-1)[0] = self.memory.arrive(counters, index, count, int(self.ids[0]))


class Barrier:
    """An mbarrier with one arrival a phase."""

    def __init__(self):
        self.phase, self.announced, self.coming = 0, None, []
        self.in_use = False  # some thread may still read what came last

    def begin(self, to, arrived):
        if self.in_use:
            raise RuntimeError("RACE DETECTED: a slot is filled anew before its readers have met")
        self.coming.append((to, arrived))

    def announce(self, nbytes):
        if self.announced is not None:
            raise RuntimeError("RACE DETECTED: a slot is filled anew before anyone waited for it")
        self.announced = nbytes

    def wait(self, parity):
        there = sum(arrived.nbytes for _, arrived in self.coming)
        if self.announced != there or parity != self.phase % 2:
            which = f"parity {parity} in phase {self.phase}"
            raise RuntimeError(f"DEADLOCK: {which}, {there} bytes of {self.announced}")
        for to, arrived in self.coming:
            to[...] = arrived
        self.phase, self.announced, self.coming = self.phase + 1, None, []
        self.in_use = True


class Copies:
    """Copies of a block's threads, in groups."""

    def __init__(self):
        self.asked, self.groups, self.awaited = [], [], []

    def commit(self):
        self.groups.append(self.asked)
        self.asked = []

    def wait(self, left):
        while len(self.groups) > left:
            self.awaited += self.groups.pop(0)

    def meet(self):
        for into, index, arrived in self.awaited:
            into[index] = arrived
        self.awaited = []


class CopyBack:
    """A bulk copy from shared to global memory: what lies there when it is waited for arrives."""

    def __init__(self, to, source):
        self.to, self.source, self.content = to, source, None

    def read(self):
        self.content = self.source.copy() if self.content is None else self.content

    def write(self):
        self.to[...] = self.content


class CopiesBack:
    """Copies back of a block's thread, in groups."""

    def __init__(self):
        self.asked, self.groups, self.done = [], [], []

    def commit(self):
        self.groups.append(self.asked)
        self.asked = []

    def wait(self, left, read):
        count = max(len(self.groups) - left, 0)
        for copy in (copy for group in self.groups[:count] for copy in group):
            copy.read()
        if not read:
            self.done += [copy for group in self.groups[:count] for copy in group]
            self.groups = self.groups[count:]


class Memory:
    """The arrays of one launch as bytes. Who wrote and who read each byte is kept: nobody may meet
    another there.
    """

    NOBODY, SEVERAL = -1, -2

    def __init__(self):
        self.lock = threading.Lock()
        self.touched: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.blocks: dict[Any, int] = {}
        self.barriers: dict[tuple[int, int], Barrier] = {}
        self.copies: dict[int, Copies] = {}  # by block
        self.copies_back: dict[int, CopiesBack] = {}
        self.signalled: dict[tuple[int, int], list[CopyBack]] = {}  # by counter
        self.since_meeting: dict[int, dict[Any, tuple[set, bool]]] = {}  # by block and byte
        self.arrived: dict[tuple[int, int], set[int]] = {}
        self.complete: set[tuple[int, int]] = set()  # counters at which all have arrived
        self.gates: dict[Any, threading.Barrier] = {}
        # By the first thread of a warpgroup: counts that it has waited for, and whether it has
        # added to global memory since it counted.
        self.turns: dict[int, dict[tuple[int, int], int]] = {}
        self.added: set[int] = set()
        self.peeks = 0

    def block(self, *coordinates) -> int:
        """The number of a block's first thread."""
        with self.lock:
            return 128 * self.blocks.setdefault(coordinates, len(self.blocks))

    def gate(self, block, groups) -> threading.Barrier:
        with self.lock:
            return self.gates.setdefault(block, threading.Barrier(groups))

    def prefetch(self, ref, index, nbytes):
        self._words(ref, index, nbytes, "prefetched")

    def load(self, ref, index, nbytes, threads):
        words = self._words(ref, index, nbytes, "read")
        with self.lock:
            wrote, read = self._who(ref, nbytes)
            if not ((wrote[index] == self.NOBODY) | (wrote[index] == threads[:, None])).all():
                raise RuntimeError(
                    "RACE DETECTED: a thread reads what another one writes in the same launch"
                )
            alone = (read[index] == self.NOBODY) | (read[index] == threads[:, None])
            read[index] = np.where(alone, threads[:, None], self.SEVERAL)
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

    def shared(self, ref, index, nbytes, threads, writes, value=None):
        """Shared memory: who met whom there since the block's threads last met."""
        words = self._words(ref, index, nbytes, "written" if writes else "read")
        block = int(threads[0]) // 128 * 128 if len(threads) else 0
        touched = self.since_meeting.setdefault(block, {})
        values = np.broadcast_to(value, len(threads)) if writes else threads
        for thread, word, new in zip(
            threads.tolist(), np.ravel(index).tolist(), values, strict=True
        ):
            place = (ref.ctypes.data, word * nbytes // 4)
            who, wrote = touched.get(place, (set(), False))
            agreed = writes and wrote and words[word] == new  # all of them write the same
            if (writes or wrote) and who - {thread} and not agreed:
                raise RuntimeError("RACE DETECTED: threads meet in a word of shared memory")
            touched[place] = (who | {thread}, wrote or writes)
            if writes:
                words[word] = new
        if writes:
            return None
        return words[index].copy()

    def copies_of(self, block):
        return self.copies.setdefault(block, Copies())

    def copies_back_of(self, block):
        return self.copies_back.setdefault(block, CopiesBack())

    def meet(self, block):
        self.since_meeting.pop(block, None)
        for (own, _), barrier in self.barriers.items():
            barrier.in_use = barrier.in_use and own != block
        self.copies_of(block).meet()

    def arrive(self, counters, index, count, block) -> bool:
        """Whether all have arrived; what they wrote until then is anybody's to read. Blocks run one
        after the other here, and would not notice that others count at their counter.
        """
        with self.lock:
            if (id(counters), index) in self.complete:
                raise RuntimeError("RACE DETECTED: a counter counts what belongs to two results")
            here = self.arrived.setdefault((id(counters), index), set())
            here.add(block)
            flat = counters.reshape(-1)
            if flat[index] != count - 1:
                flat[index] += 1
                return False
            flat[index] = 0
            self.complete.add((id(counters), index))
            for wrote, _ in self.touched.values():
                wrote[np.isin(wrote // 128 * 128, list(here)) & (wrote >= 0)] = self.NOBODY
            here.clear()
            return True

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


class Ledger:
    """`Memory` of any size, by names of arrays: loads give the numbers `held`, or zeros. What is
    loaded or stored is written down: (array, index, bytes of a word).
    """

    def __init__(self, held: dict[str, int] | None = None):
        self.held = held or {}
        self.loaded: list[tuple[str, int, int]] = []
        self.stored: list[tuple[str, int, int]] = []

    def prefetch(self, ref, index, nbytes):
        assert ref in self.held

    def load(self, ref, index, nbytes, threads):
        self.loaded += [(ref, int(i), nbytes) for i in index]
        if ref in self.held:
            return np.full(len(index), self.held[ref], np.int32)
        return np.zeros(len(index), "V16" if nbytes == 16 else f"i{nbytes}")

    def store(self, ref, index, value, nbytes, threads):
        self.stored += [(ref, int(i), nbytes) for i in index]

    def shared(self, ref, index, nbytes, threads, writes, value=None):
        return None if writes else np.zeros(len(index), np.int32)

    def _words(self, ref, index, nbytes, verb):
        """The words that a copy begun by threads reads or writes."""
        (self.loaded if verb == "read" else self.stored).extend(
            (ref, int(i), nbytes) for i in index
        )
        return _Anything(np.dtype("V16" if nbytes == 16 else f"i{nbytes}"))

    def copies_of(self, block):
        return Copies()


class _Anything(NamedTuple):
    """An array of any size, of zeros."""

    dtype: np.dtype

    def __getitem__(self, index):
        return np.zeros(len(index), self.dtype)

    def __setitem__(self, index, value):
        pass
