"""Tests that take long, as `--write-durations` recorded them: the plain suite runs one of each
function, or of each kernel and property (tests/kernels/test_every_kernel.py), where that takes no
more than `MOST`; `-m exhaustive` runs the others.
"""

import functools
import json
import pathlib
from collections.abc import Iterable
from typing import Any

FILE = pathlib.Path(__file__).parents[1] / "recorded" / "durations.json"
LONG = 0.5  # seconds of a test that takes long
MOST = 1.0  # seconds of a long test of the plain suite
EVERY_KERNEL = "tests/kernels/test_every_kernel.py"


@functools.cache
def recorded() -> dict[str, float]:
    """Seconds of the tests that took long, by name."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def _kind(name: str) -> str:
    """The function of a test, and the kernel that a row is about."""
    return name.rpartition("-")[0] if name.startswith(EVERY_KERNEL) else name.partition("[")[0]


def exhaustive(names: Iterable[str]) -> frozenset[str]:
    """The names of tests that take long, but for the shortest of each kind, where it may stay."""
    by_kind: dict[str, list[str]] = {}
    for name in names:
        by_kind.setdefault(_kind(name), []).append(name)
    seconds, chosen = recorded(), list[str]()
    for tests in by_kind.values():
        first, *others = sorted(tests, key=lambda name: seconds.get(name, 0.0))
        stays = seconds.get(first, 0.0) < MOST
        chosen += [name for name in (others if stays else tests) if name in seconds]
    return frozenset(chosen)


def also_elsewhere(names: Iterable[str]) -> frozenset[str]:
    """All but the first two of each function: one version of jax compiles them all."""
    by_function: dict[str, list[str]] = {}
    for name in names:
        by_function.setdefault(name.partition("[")[0], []).append(name)
    return frozenset(name for tests in by_function.values() for name in tests[2:])


def write(reporter: Any) -> None:
    """Records the tests of this run that took long, and keeps what others took."""
    seconds: dict[str, float] = {}
    for outcome in ("passed", "failed"):
        for report in reporter.getreports(outcome):
            seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration
    kept = {name: x for name, x in recorded().items() if name not in seconds}
    long = {name: round(x, 1) for name, x in seconds.items() if x >= LONG}
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(dict(sorted((kept | long).items())), indent=0) + "\n")
