"""Tests that take long, as `--write-durations` recorded them: the plain suite runs one of each
function, `-m exhaustive` the others.
"""

import functools
import json
import pathlib
from collections.abc import Iterable
from typing import Any

FILE = pathlib.Path(__file__).parents[1] / "recorded" / "durations.json"
LONG = 0.5  # seconds of a test that takes long


@functools.cache
def recorded() -> dict[str, float]:
    """Seconds of the tests that took long, by name."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def exhaustive(names: Iterable[str]) -> frozenset[str]:
    """The names of tests that take long, but for the shortest of each function."""
    by_function: dict[str, list[str]] = {}
    for name in names:
        by_function.setdefault(name.partition("[")[0], []).append(name)
    seconds, chosen = recorded(), list[str]()
    for tests in by_function.values():
        tests = sorted(tests, key=lambda name: seconds.get(name, 0.0))
        chosen += [name for name in tests[1:] if name in seconds]
    return frozenset(chosen)


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
