"""The report of a run of the demo, `--report=FOLDER`: measured where the run ends."""

import pathlib
import time
from typing import Any

import jax

from benchmarks import rows
from benchmarks.decode_loop import findings, report
from pallas_lm.config import Params
from pallas_lm.decode import Run
from pallas_lm.session import Settings
from pallas_lm.views import View


class Report:
    """Measures the model where a run ends. It takes a while: progress goes to standard error, and
    rows to the file at once. The first of several processes writes.
    """

    def __init__(self, settings: Settings, run: Run, params: Params, view: View):
        """Compiles all programs that are to be timed, and those that the run begins with."""
        context = max(len(x.prompt) + x.wanted for x in run.sequences) - 1
        name = settings.model
        if settings.checkpoint is not None:
            name = pathlib.Path(settings.checkpoint).resolve().name
        self._writes = jax.process_index() == 0
        if self._writes:  # a file that cannot be written is an error before a minute's work
            pathlib.Path(str(settings.report)).mkdir(parents=True, exist_ok=True)
        if self._writes and settings.out is not None:
            rows.append(settings.out, [])
        self._settings, self._run, self._view = settings, run, view
        self._subject = report.Subject(name, run.config, params, run.options, context)
        self._start, slots = time.perf_counter(), run.options.batch
        batches = sorted({1, min(8, slots), slots})
        self._asked = report.prepare(self._subject, batches, self._say, [run.prepare])

    def finish(self, summary: dict[str, Any]) -> list[str]:
        """The lines to show. The timed programs have caches of their own: the run's is released."""
        self._run.release()
        measured: list[rows.Row] = []
        out, commit = self._settings.out, self._settings.commit
        for row in report.measure(self._subject, self._asked, commit, self._say):
            measured.append(row)
            self._say(findings.line(row))
            self._view.record("report", row)
            if self._writes and out is not None:
                rows.append(out, [row])
        if not self._writes:
            return []
        cache = self._run.options.cache
        written = findings.write(str(self._settings.report), measured, cache, summary)
        return [*findings.table(measured, summary), *written]

    def _say(self, line: str) -> None:
        self._view.note(f"report, {time.perf_counter() - self._start:.0f} s: {line}")
