"""The first call of a program in a fresh process: seconds of tracing, lowering, compiling, and of
the first run, which loads the kernels.

Each timing is a process of its own, which runs `first_call_programs`. With a persistent cache two
processes follow each other: one fills jax's compilation cache and the folder of lowered kernels
beside it, and the other reads them.
"""

import dataclasses
import fnmatch
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import jax

from benchmarks import first_call_programs, rows
from benchmarks.first_call_programs import CASES, OURS, STEPS, Case
from benchmarks.rows import Row
from pallas_lm import gpu_check

OP = "first_call"
TIMEOUT_S = 600
# The path of the file, which is run as a program: as a module it would import the benchmark.
_RUN = "import runpy, sys; sys.path[0] = sys.argv.pop(1); file = sys.argv.pop(1); "
_RUN += "runpy.run_path(file, run_name='__main__')"
States = tuple[str | None, ...]  # no persistent cache of jax's, or an "empty" or "filled" one


def run(wanted: str, peers: str, turns: int, commit: str | None, out: str | None) -> int:
    """Times the cases whose names match; 0 where every process ended well, else 1."""
    chosen = select(wanted)
    known = sorted({impl for case in CASES for impl in case.impls} - {OURS})
    for name in peers.split(","):
        if peers not in ("all", "none") and name.removeprefix("-") not in known:
            raise ValueError(f"peers: expected names of {', '.join(known)}, got {name!r}")
    if jax.devices()[0].platform != "gpu":
        raise ValueError("op: first_call times a GPU and jax found none")
    failed, here = 0, rows.Provenance.here(commit)
    for case, impl, states in every_timing(chosen, peers):
        made = timed(case, impl, states, turns, here)
        failed += not made
        for row in made:
            sys.stdout.write(line_of(row) + "\n")
            sys.stdout.flush()
        if out is not None:
            rows.append(out, made)
    return int(failed > 0)


def every_timing(chosen: list[Case], peers: str) -> Iterator[tuple[Case, str, States]]:
    """Each case with this package and with peers, and with this package and a persistent cache.
    `peers`: "all", "none" or names; names with a - take away from all.
    """
    asked = peers.split(",")
    others = peers == "all" or all(name.startswith("-") for name in asked)  # not named
    for case in chosen:
        for impl in case.impls:
            if impl in (OURS, *asked) or (others and f"-{impl}" not in asked):
                yield case, impl, (None,)
        if case.make is not first_call_programs.imports:
            yield case, OURS, ("empty", "filled")


def select(wanted: str) -> list[Case]:
    """The cases that a list of globs with commas asks for; "grid": all."""
    globs = wanted.split(",")
    chosen = [c for c in CASES if any(x == "grid" or fnmatch.fnmatch(c.name, x) for x in globs)]
    if not chosen:
        raise ValueError(f"cases: {wanted!r} matches none of {', '.join(c.name for c in CASES)}")
    return chosen


def timed(
    case: Case, impl: str, states: States, turns: int, provenance: rows.Provenance
) -> list[Row]:
    """A row for each state of the persistent cache: the median process of `turns`. No rows where a
    process failed or took longer than TIMEOUT_S, which is printed.
    """
    every = [_turn(case, impl, states) for _ in range(turns)]
    if any(seconds is None for turn in every for seconds in turn):
        return []
    made = []
    for state, each in zip(states, zip(*every, strict=True), strict=True):
        median = sorted(each, key=lambda seconds: sum(seconds.values()))[(turns - 1) // 2]
        row: Row = {"op": OP, "case": case.name, "impl": impl, "problem": case.problem()}
        row |= {"persistent_cache": state, "n": turns}
        row |= {name: round(x, 3) for name, x in median.items()}
        row["total_s"] = round(sum(median.values()), 3)
        made.append(row | dataclasses.asdict(provenance))
    return made


def _turn(case: Case, impl: str, states: States) -> list[Any]:
    """Seconds of a process for each state, which share a cache; None of one that failed."""
    with tempfile.TemporaryDirectory() as folder:
        return [_in_a_process(case, impl, folder if state else None) for state in states]


def _in_a_process(case: Case, impl: str, folder: str | None) -> dict[str, float] | None:
    root, file = pathlib.Path(__file__).parents[1], first_call_programs.__file__
    command = [sys.executable, "-c", _RUN, str(root), str(file), case.name, impl, folder or ""]
    seconds, verdict, why = gpu_check.answer(command, TIMEOUT_S)
    if seconds is None:
        sys.stderr.write(f"{case.name}: {impl} {verdict}: {why}\n")
    return seconds


def line_of(row: Row) -> str:
    """`both  pallas_attn  filled  trace 0.53  lower 1.60  compile 0.03  run 0.01  total 2.17 s`"""
    steps = "".join(
        f"  {name.removesuffix('_s')} {row[name]:.2f}"
        for name in ("import_s", *STEPS, "total_s")
        if name in row
    )
    return f"{row['case']:<22}{row['impl']:<13}{row['persistent_cache'] or '':<7}{steps} s"
