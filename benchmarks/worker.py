"""A worker of `--workers`: takes groups of cases that have room on the GPU, makes a few ready, and
times them alone (`together`).
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from benchmarks import contest, peers, report, rows, runner, timing
from benchmarks.contest import Bench, Checked, Options
from benchmarks.rows import Row
from benchmarks.runner import OPS
from benchmarks.timing import Timer
from benchmarks.together import Together
from tests.support.problems import cases as known

SETTLED = 0.01  # spread of samples that needs no more turns
QUADRATIC = ("xla", "torch_math")  # peers that keep all scores
AHEAD = 3  # groups that a worker makes ready before it times them
RENEW = 75  # exit status of a worker after which a new one is started


@dataclasses.dataclass(frozen=True)
class Task:
    """A group of cases, by name, that share arrays and peers; op "ceiling": the machine's rates."""

    op: str
    cases: tuple[str, ...] = ()
    need: int = 2**34  # bytes on the GPU, about


@dataclasses.dataclass(frozen=True)
class Plan:
    """A command's facts, which all its workers read."""

    tasks: tuple[Task, ...]
    options: Options
    provenance: rows.Provenance
    end: float  # the time after which no group is begun
    room: float  # bytes on a GPU for all its workers

    def save(self, path: pathlib.Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)), "utf-8")

    @classmethod
    def read(cls, path: pathlib.Path) -> "Plan":
        held = json.loads(path.read_text("utf-8"))
        tasks = (Task(**task | {"cases": tuple(task["cases"])}) for task in held.pop("tasks"))
        options, provenance = Options(**held.pop("options")), held.pop("provenance")
        return cls(tuple(tasks), options, rows.Provenance(**provenance), **held)


class Claims:
    """The tasks that workers have taken, and their memory, in a file that one at a time changes."""

    def __init__(self, path: pathlib.Path):
        self.path = path

    @contextlib.contextmanager
    def held(self) -> Iterator[dict[str, Any]]:
        """{"taken": numbers of tasks, "bytes": {"GPU/process": bytes}}, to be changed."""
        with self.path.open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            claims = json.loads(file.read() or '{"taken": [], "bytes": {}}')
            yield claims
            file.seek(0)
            file.truncate()
            json.dump(claims, file)

    def forget(self, gpu: int, process: int) -> None:
        """The memory of a process that ended."""
        with self.held() as claims:
            claims["bytes"].pop(f"{gpu}/{process}", None)


class Worker:
    """One process: takes tasks, and times a few at a time."""

    def __init__(
        self,
        folder: pathlib.Path,
        timer: Timer | None = None,
        say: Callable[[str], None] = runner.say_line,
        gpu: int = 0,
    ):
        self.plan, self.folder, self.say = Plan.read(folder / "plan"), folder, say
        self.gpu = gpu
        self.timer = timer or timing.CuptiTimer()
        self.claims = Claims(folder / "claims")
        self.together = Together(str(folder / f"lock{gpu}"))
        self.together.while_others_time = self.time
        self.ready: list[tuple[Task, Bench, Checked]] = []
        self.benches: dict[str, Bench] = {}
        self.spoiled = False  # an error of the GPU's may be that of all later work

    def run(self) -> int:
        """The exit status: 0 where there is nothing left to take."""
        try:
            return self._run()
        finally:
            self.together.close()

    def _run(self) -> int:
        while not self.spoiled:
            task = self._next()
            if isinstance(task, Task):
                self._prepare(task)
                if len(self.ready) >= AHEAD:
                    self.time()
            elif self.ready:
                self.time()
            elif task == "done":
                return 0
            elif self._bytes() > 2**30:
                return RENEW  # only the end of a process gives memory back to the others
            else:
                time.sleep(0.5)
        self.time()
        return RENEW

    def _next(self) -> Task | str:
        """The first task with room for it, which nobody else will take; else "wait" or "done"."""
        tasks, others = self.plan.tasks, 0
        held, own = self._bytes(), sum(task.need for task, *_ in self.ready)
        me = f"{self.gpu}/{os.getpid()}"
        with self.claims.held() as claims:
            claims["bytes"][me] = max(held, own)
            if time.time() > self.plan.end or len(claims["taken"]) == len(tasks):
                return "done"
            for process, size in claims["bytes"].items():
                beside = process != me and process.startswith(f"{self.gpu}/")
                others += size if beside else 0
            for number, task in enumerate(tasks):
                need = max(held, own + min(task.need, self.plan.room / 2))
                if number not in claims["taken"] and others + need <= self.plan.room:
                    claims["taken"].append(number)
                    claims["bytes"][me] = need
                    return task
        return "wait"

    def _bytes(self) -> int:
        stats = jax.local_devices()[0].memory_stats() or {}
        return stats.get("pool_bytes", 0)

    def _prepare(self, task: Task) -> None:
        if task.op == "ceiling":
            with self.together.alone():
                rates = timing.ceilings(self.timer)
            self._write(task, rows.ceiling_rows(rates, self.plan.provenance))
            return
        bench = self._bench(task.op)
        listed = known.LISTS.get(task.op, known.ATTENTION)
        by_name = {case.name: case for case in listed if case.name in task.cases}
        group = contest.checked(bench, [by_name[name] for name in task.cases])
        self.ready.append((task, bench, group))

    def _bench(self, op: str) -> Bench:
        if op not in self.benches:
            names = peers_of(op, self.plan.options.peers)
            options = dataclasses.replace(self.plan.options, peers=names, settled=SETTLED)
            flush = timing.cache_flusher() if options.cold else None
            facts = OPS[op], options, self.timer, self.plan.provenance, self.say, flush
            self.benches[op] = Bench(*facts, together=self.together)
        return self.benches[op]

    def time(self) -> None:
        """Times what is ready, and gives its memory back."""
        if not self.ready:
            return
        with self.together.alone():
            while self.ready:
                task, bench, group = self.ready.pop(0)
                for name, outcome in contest.timed(bench, group).items():
                    self._done(task, name, outcome)
                del group
        contest.release()

    def _done(self, task: Task, name: str, outcome: contest.Outcome) -> None:
        place = self.plan.tasks.index(task), len(self.plan.tasks) - 1
        if isinstance(outcome, Exception):
            self.spoiled |= isinstance(outcome, jax.errors.JaxRuntimeError)
            why = contest.complaint_of(outcome)
            self.say(f"[{place[0]}/{place[1]}] {task.op} {name}  {why}")
            with self.claims.held():
                rows.append(self.folder / "failures", [{"op": task.op, "case": name, "why": why}])
            return
        self.say(report.case_line(*place, outcome, {}))
        self._write(task, outcome)

    def _write(self, task: Task, made: list[Row]) -> None:
        assert self.plan.options.out is not None
        with self.claims.held():  # one at a time, so that lines stay whole
            rows.append(pathlib.Path(self.plan.options.out) / f"{task.op}.jsonl", made)


def peers_of(op: str, names: str) -> str:
    """`--peers` for an operation: those that it has. "all", and all but some, leave out attention
    that keeps all scores, where another peer takes most cases.
    """
    table, asked = peers.PEERS[OPS[op]], names.split(",")
    if names == "none":
        return names
    if names == "all" or all(name.startswith("-") for name in asked):
        asked += [f"-{name}" for name in QUADRATIC if "attention_mgpu" in table]
        away = [name for name in asked if name.removeprefix("-") in table]
        return ",".join(dict.fromkeys(away)) or "all"
    return ",".join(name for name in asked if name in table) or "none"


def main() -> int:
    """The exit status of a worker, which the command line gives the folder of the plan and the
    number of its GPU.
    """
    folder, gpu = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    # Lowered kernels are kept between cases; programs are not.
    jax.config.update("jax_compilation_cache_dir", str(folder / "kernels"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    return Worker(folder, gpu=gpu).run()
