"""Hazards between the four warps of a warpgroup, which JAX's race detector takes for one thread.

Two entries of each warpgroup's vector clock record up to which step all of its warps have come
(`Met`). They advance where the warps meet: at `commit_smem`, at a wait for copies out of shared
memory, at `sync` of a program, and at an mbarrier that the warpgroup has arrived at and waited for.
Mosaic's own barriers around stores and before copies count where a kernel has them
(`mosaic.without_barriers` turns them off).

- A write to shared memory, by a thread or by its TMA copy, is ordered after the matmuls of its
  warpgroup only up to the step to which all warps have come: another warp's may still read there.
- Until the next barrier, words that a program of single threads has written may be read only by the
  thread that wrote them, and no other thread may write where a program has read or written.
- Programs and twins of inline code (`Watched`) show JAX's detector what they read and write.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as host
from jax._src.pallas.mosaic_gpu.interpret import shared_memory

TMA_THREADS, WARPGROUPS = 5, 8
CLOCKS = TMA_THREADS + WARPGROUPS  # places of a clock behind those of warpgroups and warps
SHARED = shared_memory.get_memory_space_idx(gpu_core.MemorySpace.SMEM)


class Met(NamedTuple):
    """Entries of a warpgroup's clock: all warps have come to this step, and to this matmul."""

    steps: int = 0
    matmuls: int = 0


class Edge(NamedTuple):
    """Elements of a buffer that a program touched after its last barrier."""

    key: Any
    touched: np.ndarray  # bool, in the buffer's shape
    written: np.ndarray
    step: int  # end of the program, by the clock of the warpgroup


class Warpgroup:
    """The clock of a simulated warpgroup, and up to where its warps have met. It is made anew with
    the clock, for each block.
    """

    def __init__(self, ours: Any, thread: Any):
        self.ours, self.thread, self.met = ours, thread, Met()
        self.edges: list[Edge] = []
        self.program_end = 0
        self.free_stores = 0  # coming stores that need not wait for matmuls
        self.own = ours.thread_to_vc_position(thread)
        self.matmuls = len(ours.all_concurrent_threads) + TMA_THREADS + thread.warpgroup_id

    @classmethod
    def of(cls, ours: Any, thread: Any) -> "Warpgroup":
        """The warpgroup of a thread, which may be one of its warps."""
        if isinstance(thread, shared_memory.Warp):
            place = thread.device_id, thread.cluster_id, thread.block_id, thread.warpgroup_id
            thread = shared_memory.Warpgroup(*place)
        clock = ours.clocks[thread]
        if not hasattr(clock, "warpgroup"):
            clock.warpgroup = cls(ours, thread)
        return clock.warpgroup

    @property
    def clock(self) -> Any:
        return self.ours.clocks[self.thread]

    def seen(self, clock: Any) -> Met:
        """The step and the matmul of this warpgroup that a clock has seen."""
        steps = int(clock.generic_clock.clock[self.own])
        return Met(steps, int(clock.async_smem_clock.clock[self.matmuls]))

    def meet(self, upto: Met | None = None) -> None:
        """Notes that all warps have come to this step, or to the one that is passed."""
        upto = upto or self.seen(self.clock)
        self.met = Met(*map(max, zip(self.met, upto, strict=True)))
        self.edges = [edge for edge in self.edges if edge.step > self.met.steps]

    def matmul_clock(self) -> Any:
        """The clock of a matmul's reads: as of another thread that this one has started."""
        with self.ours.lock:
            self.clock.inc(self.matmuls)
            return self.clock.async_smem_clock.copy()

    def check_edges(self, key: Any, there: Any, writes: bool) -> None:
        for edge in self.edges:
            if edge.key == key:
                touched = edge.touched if writes else edge.written
                if touched[there.range].any():
                    raise RuntimeError(
                        f"RACE DETECTED: {key}[{there.range}] is {'written' if writes else 'read'} "
                        f"by {self.thread} before its warps have met behind a program that "
                        f"{'used' if writes else 'wrote'} it"
                    )


def checked(thread: Any, clock: Any, key: Any, there: Any, writes: bool) -> Any:
    """The clock of an access to memory, after a check that it meets no program's edge. A write, by
    a thread or by TMA, follows matmuls of its warpgroup only up to where all warps have met.
    """
    if key.memory_space_id != SHARED:
        return clock
    warpgroup = Warpgroup.of(host._get_shared_memory(), thread)
    warpgroup.check_edges(key, there, writes)
    if writes and warpgroup.free_stores:
        warpgroup.free_stores -= 1
    elif writes:
        clock = clock.copy()
        clock.clock[warpgroup.matmuls] = warpgroup.met.matmuls
    return clock


# ---- points at which warpgroups meet -------------------------------------------------------------


def _meets(callback: Callable[..., Any]) -> Callable[..., Any]:
    """A callback of JAX's interpreter at whose end the warps of a warpgroup meet."""

    def met(*, thread, **params):
        result = callback(thread=thread, **params)
        Warpgroup.of(host._get_shared_memory(), thread).meet()
        return result

    return met


@host.fail_on_exception
def meet(*, token, thread):
    Warpgroup.of(host._get_shared_memory(), thread).meet()
    return token


@host.fail_on_exception
def let_overwrite(*, token, thread, stores):
    Warpgroup.of(host._get_shared_memory(), thread).free_stores = stores
    return token


def _wait(self, thread, *rest, **more):
    """`Barrier.wait`: those threads of the warpgroup that arrived have come up to there."""
    result = _jax_wait(self, thread, *rest, **more)
    if isinstance(thread, shared_memory.Warpgroup):
        warpgroup = Warpgroup.of(self.shared_memory, thread)
        with self.cv:
            upto = warpgroup.seen(self.clock)
        warpgroup.meet(upto)
    return result


_jax_wait = shared_memory.Barrier.wait


# ---- programs of single threads ------------------------------------------------------------------


class Program:
    """Accesses of a warpgroup's program to shared memory. `arrays`: (key, array) of its refs in
    shared memory.
    """

    def __init__(self, ours: Any, thread: Any, arrays: Any, source_info: Any):
        self.warpgroup = Warpgroup.of(ours, thread)
        self.arrays, self.source_info = arrays, source_info
        self.log: list[tuple[Any, np.ndarray, bool]] = []
        self.behind: list[tuple[Any, np.ndarray, bool]] = []  # since the warps met

    @property
    def has_met(self) -> bool:
        """Whether all warps have met since the last program."""
        return self.warpgroup.met.steps >= self.warpgroup.program_end

    def touch(self, array: np.ndarray, first: np.ndarray, nbytes: int, writes: bool) -> None:
        """Words of so many bytes, from these bytes of an array on."""
        for key, known in self.arrays:
            if known is array and first.size:
                elements = np.unique(first[:, None] + np.arange(0, nbytes, array.itemsize))
                entry = key, elements // array.itemsize, writes
                self.log.append(entry)
                self.behind.append(entry)

    def meet(self) -> None:
        self.behind.clear()
        self.warpgroup.meet()

    def meet_others(self, gate: threading.Barrier) -> None:
        """A barrier of several warpgroups: each sees what the others had done."""
        self.show()
        ours, thread = self.warpgroup.ours, self.warpgroup.thread
        clocks = gate.__dict__.setdefault("clocks", {})
        with ours.lock:
            clocks[thread] = ours.clocks[thread].copy()
        gate.wait()
        with ours.lock:
            for clock in list(clocks.values()):
                ours.clocks[thread].update(clock)

    def show(self) -> None:
        """Shows JAX's detector what was touched until now. At the edges of earlier programs it is
        `threads.Memory` that tells one thread's words from another's.
        """
        warpgroup, races = self.warpgroup, host.get_races()
        edges, warpgroup.edges = warpgroup.edges, []
        warpgroup.program_end = warpgroup.seen(warpgroup.clock).steps + 1
        for key, array in self.arrays:
            for writes in (False, True):
                some = [x for other, x, wrote in self.log if other is key and wrote == writes]
                if not some:
                    continue
                clock = warpgroup.ours.incr_clock(warpgroup.thread).generic_clock
                warpgroup.program_end = int(clock.clock[warpgroup.own])
                check = races.check_write if writes else races.check_read
                for place in _stretches(array.shape, np.concatenate(some)):
                    access = interpret_utils.Access(place)
                    check(warpgroup.thread, clock.copy(), key, access, self.source_info)
        self.log.clear()
        warpgroup.edges = edges

    def end(self) -> None:
        self.show()
        for key, array in self.arrays:
            touched, written = np.zeros((2, array.size), bool)
            for other, elements, writes in self.behind:
                if other is key:
                    touched[elements] = True
                    written[elements] |= writes
            if touched.any():
                maps = (x.reshape(array.shape) for x in (touched, written))
                self.warpgroup.edges.append(Edge(key, *maps, self.warpgroup.program_end))


def _stretches(shape: tuple[int, ...], elements: np.ndarray) -> Iterator[tuple[Any, ...]]:
    """Ranges that hold these elements: of each row of the first axis those from the first to the
    last; of a vector all that lie together.
    """
    elements = np.unique(elements)
    if len(shape) == 1:
        for run in np.split(elements, np.flatnonzero(np.diff(elements) > 1) + 1):
            yield (slice(int(run[0]), int(run[-1]) + 1),)
        return
    places = np.stack(np.unravel_index(elements, shape), 1)
    for row in np.unique(places[:, 0]):
        some = places[places[:, 0] == row]
        ends = zip(some.min(0).tolist(), some.max(0).tolist(), strict=True)
        yield tuple(slice(low, high + 1) for low, high in ends)


# ---- twins of inline code ------------------------------------------------------------------------


class Watched:
    """An array in memory as a twin gets it. Reads give a copy that cannot be written to, and writes
    go to memory. Both count as accesses of the warpgroup.
    """

    def __init__(self, array: np.ndarray, key: Any, place: tuple[int, ...], who: dict[str, Any]):
        self._array, self._key, self._place, self._who = array, key, place, who
        self.shape, self.dtype = array.shape, array.dtype
        self.ndim, self.size = array.ndim, array.size

    def _show(self, index: Any, writes: bool) -> None:
        thread, ours = self._who["thread"], host._get_shared_memory()
        first = tuple(slice(n, n + 1) for n in self._place)
        access = interpret_utils.Access((*first, *_range_of(index, self.shape)))
        clock = ours.incr_clock(thread).generic_clock
        check = host.get_races().check_write if writes else host.get_races().check_read
        check(thread, clock, self._key, access, self._who["source_info"])

    def __getitem__(self, index: Any) -> np.ndarray:
        self._show(index, False)
        taken = np.array(self._array[index])
        taken.flags.writeable = False  # or what is written there would be lost
        return taken

    def __setitem__(self, index: Any, value: Any) -> None:
        self._show(index, True)
        self._array[index] = value


def _range_of(index: Any, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Slices of all axes that hold what an index takes."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is Ellipsis for part in parts):
        at = next(n for n, part in enumerate(parts) if part is Ellipsis)
        parts[at : at + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    parts += [slice(None)] * (len(shape) - len(parts))
    places = []
    for part, size in zip(parts, shape, strict=True):
        numbers = np.arange(size)[part]
        low, high = (int(numbers.min()), int(numbers.max()) + 1) if numbers.size else (0, 0)
        places.append(slice(low, high))
    return tuple(places)


def _next_tma_thread(self):
    """Behind them are the places of matmuls."""
    with self.lock:
        number = self.next_tma_thread_id
        self.next_tma_thread_id = (number + 1) % TMA_THREADS
    return len(self.all_concurrent_threads) + number


def teach() -> None:
    """Makes JAX's interpreter note where warpgroups meet."""
    host.commit_smem = _meets(host.commit_smem)
    host.wait_smem_to_gmem = _meets(host.wait_smem_to_gmem)
    shared_memory.Barrier.wait = _wait
    shared_memory.GPUSharedMemory.get_next_tma_thread_id = _next_tma_thread
