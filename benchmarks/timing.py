"""Device time, and fair turns.

Times are what the GPU spent in kernels, as CUPTI reports it: the sum over the kernels of one call,
whoever launched them (jax and torch alike), without launch gaps and without the host. Everything
that is compared takes turns in one process, since an H200 drifts by several percent with its
temperature and from one machine to the next.
"""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

Flush = Callable[[], None]  # overwrites the L2 cache
Produced = Any  # the result of a launch


@dataclasses.dataclass(frozen=True)
class Subject:
    """Something to time: `launch` starts a call and returns what it makes, `wait` blocks for it."""

    name: str
    launch: Callable[[], Produced]
    outputs: Callable[[Produced], tuple[Any, ...]] = lambda produced: produced
    wait: Callable[[Produced], Any] = jax.block_until_ready


@dataclasses.dataclass(frozen=True)
class Sample:
    """One call."""

    ms: float
    kernels: int


@dataclasses.dataclass(frozen=True)
class Timing:
    """The samples of one subject summed up."""

    ms: float  # median
    ms_min: float
    n: int
    kernels: int

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "Timing":
        times = [sample.ms for sample in samples]
        kernels = round(statistics.median(sample.kernels for sample in samples))
        return cls(statistics.median(times), min(times), len(times), kernels)


class TimingError(Exception):
    """One subject could not be timed; the cause says why."""

    def __init__(self, subject: Subject):
        super().__init__(f"{subject.name} could not be timed")
        self.subject = subject


class Timer(Protocol):
    """Times `times` calls of a subject, back to back."""

    def __call__(self, subject: Subject, times: int) -> list[Sample]: ...


class CuptiTimer:
    """Kernel times from the profiler inside jax's Mosaic extension, as `profiler.measure` has them.

    Used directly, since `measure` calls what it times once too often for arguments that are
    donated.
    """

    def __call__(self, subject: Subject, times: int) -> list[Sample]:
        from jax._src.lib import mosaic_gpu

        if mosaic_gpu is None:
            raise RuntimeError("this jaxlib has no CUPTI timer; install the CUDA build of jax")
        extension = mosaic_gpu._mosaic_gpu_ext
        extension._cupti_init()
        try:
            for _ in range(times):
                produced = subject.launch()
            subject.wait(produced)  # one stream: the last is there when all are
        finally:
            # False: stay attached. Detaching costs tens of milliseconds and the next turn comes at
            # once.
            kernels = extension._cupti_get_timings(False)
        if not kernels or len(kernels) % times:
            raise RuntimeError(
                f"{subject.name}: CUPTI saw {len(kernels or ())} kernels in {times} calls; "
                "is another profiler attached, or does the call do different work each time?"
            )
        return split(kernels, times)


def split(kernels: Sequence[tuple[str, float]], times: int) -> list[Sample]:
    """The kernels of `times` equal calls, (name, ms) each, as one sample a call.

    Kernels that several threads launched (torch runs its backward on a thread of its own) come
    grouped by thread, not by call. Then the sum is all there is to know: every call is given the
    mean.
    """
    each = len(kernels) // times
    calls = [kernels[n * each : (n + 1) * each] for n in range(times)]
    names = [[name for name, _ in call] for call in calls]
    total = sum(ms for _, ms in kernels)
    if any(call != names[0] for call in names):
        return [Sample(total / times, each)] * times
    return [Sample(sum(ms for _, ms in call), each) for call in calls]


def interleave(
    timer: Timer,
    subjects: Sequence[Subject],
    *,
    turns: int = 5,
    times: int = 3,
    flush: Flush | None = None,
    settled: float | None = None,
) -> dict[str, Timing]:
    """Every subject's timing, in turns.

    Warm: each turn is one untimed call and `times` timed ones. With `flush` (see `cache_flusher`)
    each timed call comes alone, after the L2 cache was overwritten. With `settled` there are no
    more turns, after two, once the middle half of everybody's samples lies within that share of
    their median.

    Raises TimingError, which says whose turn it was.
    """
    samples: dict[str, list[Sample]] = {subject.name: [] for subject in subjects}
    for turn in range(turns):
        start = turn % len(subjects)  # nobody always runs in the same one's wake
        for subject in (*subjects[start:], *subjects[:start]):
            try:
                samples[subject.name] += _turn(timer, subject, times, flush)
            except Exception as error:
                raise TimingError(subject) from error
        if settled is not None and turn and all(spread(x) <= settled for x in samples.values()):
            break
    return {name: Timing.of(each) for name, each in samples.items()}


def spread(samples: Sequence[Sample]) -> float:
    """The width of the middle half of some samples, as a share of their median."""
    low, median, high = statistics.quantiles([sample.ms for sample in samples], n=4)
    return (high - low) / median


def _turn(timer: Timer, subject: Subject, times: int, flush: Flush | None) -> list[Sample]:
    if flush is None:
        subject.wait(subject.launch())
        return timer(subject, times)
    samples = []
    for _ in range(times):
        flush()
        samples += timer(subject, 1)
    return samples


def quickest(timer: Timer, candidates: Sequence[Subject]) -> Subject:
    """The fastest of several configurations of the same peer, so that it competes at its best."""
    if len(candidates) == 1:
        return candidates[0]

    def ms(subject: Subject) -> float:
        return interleave(timer, [subject], turns=1, times=2)[subject.name].ms

    return min(candidates, key=ms)


def cache_flusher() -> Flush:
    """A call that overwrites the L2 cache (60 MB on an H200) and waits."""
    overwrite = jax.jit(lambda block: block + 1, donate_argnums=0)
    holder = [jnp.zeros(2**26, jnp.float32)]

    def flush() -> None:
        holder[0] = overwrite(holder[0])
        holder[0].block_until_ready()

    return flush


def ceilings(timer: Timer, *, matmul: int = 8192, nbytes: int = 2**32) -> dict[str, float]:
    """Rates of this machine now: bf16 matmul in TFLOP/s, read and copy (both ways) in TB/s."""
    keys = jax.random.split(jax.random.key(0), 3)
    left, right = (jax.random.normal(key, (matmul, matmul), jnp.bfloat16) for key in keys[:2])
    product = jax.jit(lambda a, b: a @ b)
    block = jax.random.normal(keys[2], (nbytes // 4,), jnp.float32)
    # One-kernel forms: a reduction to a few thousand sums, and an elementwise pass.
    total, shifted = jax.jit(lambda x: x.reshape(4096, -1).sum(axis=1)), jax.jit(lambda x: x + 1)
    subjects = [
        Subject("matmul", lambda: product(left, right)),
        Subject("read", lambda: total(block)),
        Subject("copy", lambda: shifted(block)),
    ]
    for subject in subjects:
        subject.wait(subject.launch())
    ms = {name: timing.ms for name, timing in interleave(timer, subjects).items()}
    return {
        "matmul": 2 * matmul**3 / ms["matmul"] / 1e9,
        "read": nbytes / ms["read"] / 1e9,
        "copy": 2 * nbytes / ms["copy"] / 1e9,
    }
