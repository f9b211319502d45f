"""The Config that a kernel runs with: one that was forced, or tuned, else the kernel's default."""

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from pallas_attn._call import gpu_specs, launches
from pallas_attn._call.kernel import Config, Kernel, Problem
from pallas_attn._call.problem import DecodeProblem
from pallas_attn.errors import Limit


class Choice(NamedTuple):
    """A kernel that a call runs, by its own name, and the problem and Config that it runs with."""

    kernel: str
    problem: Problem
    config: Any


class Observer(NamedTuple):
    """Tests and experiments that say what runs, or look at what is chosen."""

    forced: dict[str, dict[str, Any]]  # fields of a Config, by the kernel's own name
    choices: list[Choice] | None


observer: contextvars.ContextVar[Observer | None] = contextvars.ContextVar(
    "pallas_attn_observer", default=None
)


# The Configs of a file (`tuning.Tuned`), where a call was told to run with them.
tuned: contextvars.ContextVar[Any] = contextvars.ContextVar("pallas_attn_tuned", default=None)


def choose(name: str, kernel: Kernel, problem: Problem) -> Any:
    """The Config to run `problem` with: `default` where nothing is forced or tuned."""
    forced, choices = observer.get() or Observer({}, None)
    config = kernel.config(**forced[name]) if name in forced else default(kernel, problem)
    if name not in forced and (file := tuned.get()) is not None:
        config = file.config_of(name, kernel, problem, config)
    if choices is not None:
        choices.append(Choice(name, problem, config))
    return config


@functools.lru_cache(maxsize=1024)
def default(kernel: Kernel, problem: Problem) -> Any:
    """The kernel's own choice."""
    if not (isinstance(problem, DecodeProblem) and problem.batch_invariant):
        return kernel.config.default(problem)
    config = kernel.config.default(launches.alone(problem))
    while not fits(kernel, problem, config) and (less := config.shallower()) is not None:
        config = less
    return config


def fits(kernel: Kernel, problem: Problem, config: Config) -> bool:
    """Whether its shared memory fits; a kernel refuses a combination by a ValueError."""
    try:
        need = kernel.smem_bytes(problem, config)
    except ValueError:
        return False
    return gpu_specs.fits(need, problem.gpu)


def no_room(kernel: Kernel, problem: Problem) -> Limit | None:
    """Why the kernel's own choice has no room in shared memory, or None."""
    need = kernel.smem_bytes(problem, default(kernel, problem))
    if gpu_specs.fits(need, problem.gpu):
        return None
    remedy = 'leave implementation=None, or say "reference"'
    if isinstance(problem, DecodeProblem):
        remedy = (
            "decode fewer tokens at once, split the sequences over several calls, or use smaller "
            "head dims"
        )
    room = gpu_specs.shared_memory(problem.gpu)
    return Limit(f"a block needs {need} bytes of shared memory; {problem.gpu} has {room}", remedy)


@contextlib.contextmanager
def forced(kernel: str, config: dict[str, Any]) -> Iterator[None]:
    """Within the block, calls that are traced run `kernel`, by its own name, with this
    configuration.
    """
    now = observer.get() or Observer({}, None)
    token = observer.set(now._replace(forced=now.forced | {kernel: config}))
    try:
        yield
    finally:
        observer.reset(token)


@contextlib.contextmanager
def watched() -> Iterator[list[Choice]]:
    """Collects the kernels that calls run within the block, with their problems and Configs."""
    choices: list[Choice] = []
    now = observer.get() or Observer({}, None)
    token = observer.set(now._replace(choices=choices))
    try:
        yield choices
    finally:
        observer.reset(token)
