"""Which Config a kernel runs with: what was forced, else the kernel's own default."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from pallas_attn._call import gpu_specs

_forced: contextvars.ContextVar[dict[str, dict[str, Any]] | None] = contextvars.ContextVar(
    "pallas_attn_forced_configs", default=None
)
_watch: contextvars.ContextVar[list["Choice"] | None] = contextvars.ContextVar(
    "pallas_attn_watched_choices", default=None
)


class Choice(NamedTuple):
    """A kernel that a call runs, for which problem, and its Config, as `watched` collects them."""

    kernel: str
    module: ModuleType
    problem: Any
    config: Any


def choose(module: ModuleType, problem: Any) -> Any:
    """The `module.Config` to run `problem` with."""
    kernel = module.__name__.partition(".kernels.")[2].replace(".", "_")
    forced = (_forced.get() or {}).get(kernel)
    if forced is not None:
        config = module.Config(**forced)
    elif getattr(problem, "batch_invariant", False):
        config = _of_one_sequence(module, problem)
    else:
        config = default(module, problem)
    watch = _watch.get()
    if watch is not None:
        watch.append(Choice(kernel, module, problem, config))
    return config


# Keys of the sequence whose configuration serves every batch.
_ROWS_OF_ONE = 8192


def _of_one_sequence(module: ModuleType, problem: Any) -> Any:
    """What a sequence alone would run with: how its keys are cut and summed up may depend neither
    on the others nor on how many they are. Fewer stages, where the others' lengths leave no room
    for as many, change no bits.
    """
    one = {"sequences": 1, "capacities": (_ROWS_OF_ONE,), "batch_invariant": False}
    config = default(module, dataclasses.replace(problem, **one))
    while not fits(module, problem, config) and config.stages > config.fewest_stages:
        config = dataclasses.replace(config, stages=config.stages - 1)
    return config


def default(module: ModuleType, problem: Any) -> Any:
    """The kernel's own choice: `Config.default(problem)` where it has one, else `Config()`."""
    chooser = getattr(module.Config, "default", None)
    return module.Config() if chooser is None else chooser(problem)


def fits(module: ModuleType, problem: Any, config: Any) -> bool:
    """Whether its shared memory fits; a kernel refuses a combination by a ValueError."""
    try:
        need = module.smem_bytes(problem, config)
    except ValueError:
        return False
    return need <= gpu_specs.shared_memory(problem.gpu)


@contextlib.contextmanager
def forced(kernel: str, config: dict[str, Any]) -> Iterator[None]:
    """Within the block, what is traced runs `kernel`, a module's path with underscores, with this
    configuration: for tests and experiments.
    """
    token = _forced.set({**(_forced.get() or {}), kernel: config})
    try:
        yield
    finally:
        _forced.reset(token)


@contextlib.contextmanager
def watched() -> Iterator[list[Choice]]:
    """Collects what is chosen within the block: which kernels a call runs, with what."""
    found: list[Choice] = []
    token = _watch.set(found)
    try:
        yield found
    finally:
        _watch.reset(token)


def observed() -> bool:
    """Whether, just now, somebody says what runs, or looks at what is chosen."""
    return bool(_forced.get()) or _watch.get() is not None
