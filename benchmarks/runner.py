"""The benchmark: each case is checked, then timed in turns with the peers that are right."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks import contest, peers, plots, report, rows, timing
from benchmarks.contest import SHARED, Bench, Options
from benchmarks.timing import Timer
from tests.support.problems import cases as known

# An operation as --op has it, and as rows have it. "backward" times a training step.
OPS = {
    "forward": "forward",
    "backward": "forward+backward",
    "backward_alone": "backward",
    "jvp": "jvp",
    "decode": "decode",
    "prefill": "prefill",
    SHARED: SHARED,
    "append": "append",
    "mask": "mask",
    "shapes": "shapes",
    "few_tiles": "few_tiles",
    "float8": "float8",
    "quantize": "quantize",
}


def say_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def require_gpu() -> None:
    """ValueError where there is none."""
    if jax.devices()[0].platform != "gpu":
        raise ValueError(
            "a benchmark times a GPU and jax found none; see python run.py for what runs here"
        )


def run_bench(
    op: str,
    cases: str | Sequence[known.Case] = "grid",
    options: Options = Options(),  # noqa: B008
    *,
    timer: Timer | None = None,
    ceilings: dict[str, float] | None = None,
    say: Callable[[str], None] = say_line,
) -> int:
    """Runs it; 0 where every case was right and timed beside every peer that takes it, else 1. A
    peer that gives a wrong result is left out, and said; it fails nothing.

    `cases`: tags and globs (`cases.select`), or the cases themselves. `timer` and `ceilings`: by
    default CUPTI on this machine's GPU, and the rates that it measures.
    """
    if op not in OPS:
        raise ValueError(f"op: expected one of {', '.join(OPS)}, got {op!r}")
    chosen: tuple[Any, ...] = tuple(cases)
    if isinstance(cases, str):
        chosen = known.select(known.LISTS.get(op, known.ATTENTION), cases)
    peers.wanted(OPS[op], options.peers)
    if timer is None:
        require_gpu()
    if options.plot:
        plots.ready(options.plot)
    timer = timer or timing.CuptiTimer()
    provenance = rows.Provenance.here(options.commit)
    say(f"{provenance.gpu}, jax {provenance.jax}, commit {provenance.commit}")
    if ceilings is None:
        ceilings = timing.ceilings(timer)
    say(", ".join(f"{name} {value:.4g}" for name, value in ceilings.items()) + " (TFLOP/s, TB/s)")
    flush = timing.cache_flusher() if options.cold else None
    bench = Bench(OPS[op], options, timer, provenance, say, flush)
    if options.out:
        rows.append(options.out, rows.ceiling_rows(ceilings, provenance))
    groups, failures, number = [], {}, 0
    for alike in contest.alike(chosen):
        for name, outcome in contest.measure(bench, alike):
            number += 1
            if isinstance(outcome, Exception):
                failures[name] = contest.complaint_of(outcome)
                say(f"[{number}/{len(chosen)}] {name:<34}  {failures[name]}")
                continue
            say(report.case_line(number, len(chosen), outcome, ceilings))
            groups.append(outcome)
            if options.out:
                rows.append(options.out, outcome)
    for line in report.summary(groups, failures):
        say(line)
    if options.plot and groups:
        plots.bars(groups, ceilings, options.plot)
    peer_failed = any(row.get("failed") for group in groups for row in group)
    return int(bool(failures) or peer_failed)
