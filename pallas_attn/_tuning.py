"""Which configuration a kernel runs with: measured rows, and the nearest of them for the rest.

`tuning/<gpu>.toml` holds, under each kernel's module name, the problems that were tuned (`run.py
--task=tune`), the configuration that won, and where that is known from: device, jax version,
commit, date, milliseconds. `lookup` takes the row whose problem is nearest and whose configuration
fits in shared memory; where no row comes near enough to trust, the kernel's own default stands.
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib.resources
import math
import tomllib
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from pallas_attn import _gpus
from pallas_attn.masks import CAUSAL, Mask

Facts = dict[str, Any]
Row = dict[str, Any]

# What the choice does not depend on. Shapes of bias and mask arrays only move where their tiles are
# read from.
_IGNORED = frozenset(
    ("op", "gpu", "scale", "q_offset", "bias_shape", "mask_shape", "layers", "pages", "from_end")
)
_SIZES = {  # how much a factor of two in a size counts
    "q_len": 1.0,
    "kv_len": 1.0,
    "capacity": 1.0,
    "new_rows": 1.0,
    "sequences": 1.0,
    "batch": 0.5,
    "q_heads": 0.5,
    "kv_heads": 0.5,
    "page_size": 2.0,
}
_OPTIONS = (
    "softcap",
    "sinks",
    "ragged",
    "batch_invariant",
    "deterministic",
)  # there or not there: what their value is costs nothing
_NARROW = ("bfloat16", "float16")

_forced: contextvars.ContextVar[dict[str, dict[str, Any]] | None] = contextvars.ContextVar(
    "pallas_attn_forced_configs", default=None
)
_watch: contextvars.ContextVar[list["Lookup"] | None] = contextvars.ContextVar(
    "pallas_attn_watched_lookups", default=None
)


class Lookup(NamedTuple):
    """One question and its answer, as `watched` hands them out."""

    kernel: str
    module: ModuleType
    problem: Any
    config: Any


def lookup(module: ModuleType, problem: Any) -> Any:
    """The `module.Config` to run `problem` with."""
    kernel = module.__name__.partition(".kernels.")[2].replace(".", "_")
    config = _choose(kernel, module, problem)
    watch = _watch.get()
    if watch is not None:
        watch.append(Lookup(kernel, module, problem, config))
    return config


def _choose(kernel: str, module: ModuleType, problem: Any) -> Any:
    forced = (_forced.get() or {}).get(kernel)
    if forced is not None:
        return module.Config(**forced)
    if getattr(problem, "batch_invariant", False):
        return _of_one_sequence(kernel, module, problem)
    for row in nearest(rows(problem.gpu, kernel), describe(problem)):
        config = module.Config(**row["config"])
        if fits(module, problem, config):
            return config
    return default(module, problem)


# Keys of the sequence whose configuration serves every batch.
_ROWS_OF_ONE = 8192


def _of_one_sequence(kernel: str, module: ModuleType, problem: Any) -> Any:
    """What a sequence alone would run with: how its keys are cut and summed up may depend neither
    on the others nor on how many they are. Fewer stages, where the others' lengths leave no room
    for as many, change no bits.
    """
    one = {"sequences": 1, "capacities": (_ROWS_OF_ONE,), "batch_invariant": False}
    config = _choose(kernel, module, dataclasses.replace(problem, **one))
    while not fits(module, problem, config) and config.stages > config.least:
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
    return need <= _gpus.shared_memory(problem.gpu)


@contextlib.contextmanager
def forced(kernel: str, config: dict[str, Any]) -> Iterator[None]:
    """Within the block, what is traced runs `kernel` with this configuration: for the tuner."""
    token = _forced.set({**(_forced.get() or {}), kernel: config})
    try:
        yield
    finally:
        _forced.reset(token)


@contextlib.contextmanager
def watched() -> Iterator[list[Lookup]]:
    """Collects what is looked up within the block: which kernels a call runs, with what."""
    found: list[Lookup] = []
    token = _watch.set(found)
    try:
        yield found
    finally:
        _watch.reset(token)


def rows(gpu: str | None, kernel: str) -> tuple[Row, ...]:
    """The tuned rows of a kernel: of this GPU generation, else of the nearest one that has any."""
    tables = {name: table for name, table in _tables().items() if table.get(kernel)}
    if not tables or gpu is None:
        return ()
    nearest_name = min(tables, key=lambda name: (abs(_gpus.number(name) - _gpus.number(gpu)), name))
    return tuple(tables[nearest_name][kernel])


def describe(problem: Any) -> Facts:
    """What a choice may depend on, as TOML can hold it; absent means none, zero or off."""
    facts: Facts = {}
    for field in dataclasses.fields(problem):
        value = getattr(problem, field.name)
        if field.name in _IGNORED or value is None or value == () or value is False:
            continue
        if isinstance(value, Mask):
            value = {side: n for side, n in dataclasses.asdict(value).items() if n is not None}
        name = field.name
        if name == "capacities":
            name, value = "capacity", max(value)
        facts[name] = list(value) if isinstance(value, tuple) else value
    return facts


def nearest(candidates: tuple[Row, ...], facts: Facts) -> list[Row]:
    """The rows that may serve a problem, nearest first."""
    scored = [(distance(row["problem"], facts), n, row) for n, row in enumerate(candidates)]
    return [row for score, _, row in sorted(scored, key=lambda s: s[:2]) if math.isfinite(score)]


def distance(tuned: Facts, facts: Facts) -> float:
    """How far a tuned problem is from another, in factors of two; inf: its choice is no help.

    A head dim takes only rows of its own size or larger: registers and shared memory that sufficed
    there suffice here, and not the other way round.
    """
    if _width(tuned) != _width(facts) or tuned.get("precision") != facts.get("precision"):
        return math.inf
    total = 0.25 * (tuned.get("dtype") != facts.get("dtype")) + 4.0 * (
        tuned.get("kind") != facts.get("kind")
    )
    for name in ("head_dim", "v_head_dim"):
        have, want = (one.get(name, 0) for one in (tuned, facts))
        if have < want:
            return math.inf
        total += 8.0 * math.log2(max(have, 1) / max(want, 1))
    for name, weight in _SIZES.items():
        total += weight * abs(math.log2(max(tuned.get(name, 1), 1) / max(facts.get(name, 1), 1)))
    total += 2.0 * len(set(tuned.get("arrays", ())) ^ set(facts.get("arrays", ())))
    total += sum((name in tuned) != (name in facts) for name in _OPTIONS)
    return total + _mask_distance(tuned.get("mask", {}), facts.get("mask", {}))


def _mask_distance(tuned: Facts, facts: Facts) -> float:
    one, other = Mask(**tuned), Mask(**facts)
    if one == other:
        return 0.0
    if _kind(one) != _kind(other):
        return 3.0
    spans = [1 + abs(mask.left or 0) + abs(mask.right or 0) for mask in (one, other)]
    return abs(math.log2(spans[0] / spans[1]))


def _kind(mask: Mask) -> str:
    if mask.is_full or mask == CAUSAL:
        return str(mask)
    return "window" if mask.left is not None else "band"


def _width(facts: Facts) -> tuple[Any, Any]:
    """16-bit types share their tiles; every other type is a world of its own."""
    names = (facts.get("dtype", ""), facts.get("cache_dtype", facts.get("dtype", "")))
    first, second = ("narrow" if name in _NARROW else str(name) for name in names)
    return first, second


def observed() -> bool:
    """Whether, just now, somebody says what runs, or looks at what is chosen."""
    return bool(_forced.get()) or _watch.get() is not None


def reload() -> None:
    """Forget the files as they were read: they have changed."""
    _read.cache_clear()


def _tables() -> dict[str, dict[str, list[Row]]]:
    return _read()


@functools.cache
def _read() -> dict[str, dict[str, list[Row]]]:
    folder = importlib.resources.files("pallas_attn").joinpath("tuning")
    files = [file for file in folder.iterdir() if file.name.endswith(".toml")]
    return {
        file.name.removesuffix(".toml"): tomllib.loads(file.read_text("utf-8")) for file in files
    }
