"""`--workers`: one command whose processes share the cases of a benchmark, and the GPUs that there
are.

A short case takes seconds to compile and milliseconds to run, so a single process would leave the
GPU idle. The command lists the work as groups of cases and starts workers (`worker`), which write
rows as they come, so that the same command goes on where it was cut.
"""

import collections
import concurrent.futures
import math
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from benchmarks import contest, first_call, peers, report, rows, runner
from benchmarks.contest import Options
from benchmarks.rows import Row
from benchmarks.runner import OPS
from benchmarks.worker import AHEAD, RENEW, Claims, Plan, Task
from pallas_lm import gpu_check
from tests.support.problems import cases as known
from tests.support.problems.case import AppendCase, AttentionCase, DecodeCase

ROOT = pathlib.Path(__file__).parents[1]
ALL = "all"
# The files configs/bench_NAME.cfg that op "all" runs, those of README's table first.
SUITE: tuple[str, ...]
SUITE = ("forward", "backward", "shapes", "decode", "few_tiles", "prefill", "float8", "mask", "jvp")
SUITE += ("append", "decode_more", "shared_prefix", "quantize")
GRACE_S = 45  # seconds after the end of --within, for groups that are begun
FIRST_CALLS_AT_ONCE = 5
# The program of a worker, which is given the folder of the plan and the number of its GPU.
WORKER = "import sys; from benchmarks.worker import main; sys.exit(main())"


# ---- the list of work ----------------------------------------------------------------------------


def suite() -> list[Task]:
    """All tasks of op "all", those of the cases tagged "grid" first: shapes of which every flash
    attention publishes figures.
    """
    tasks = []
    for name in SUITE:
        lines = (ROOT / "configs" / f"bench_{name}.cfg").read_text("utf-8").splitlines()
        flags = dict(line[2:].split("=", 1) for line in lines if line.startswith("--"))
        tasks += tasks_of(flags["op"], flags["cases"])
    published = {case.name for case in known.ATTENTION if "grid" in case.tags}
    first = [task for task in tasks if published & {*task.cases}]
    return first + [task for task in tasks if task not in first]


def tasks_of(op: str, wanted: str) -> list[Task]:
    """The groups of the cases that tags and globs ask for."""
    if op not in OPS:
        raise ValueError(f"op: expected one of {', '.join(OPS)} or {ALL}, got {op!r}")
    groups = contest.alike(known.select(known.LISTS.get(op, known.ATTENTION), wanted))
    return [Task(op, tuple(case.name for case in each), needed(each)) for each in groups]


def needed(group: Sequence[known.Case]) -> int:
    """Bytes on the GPU of a group with its peers and its oracle, about, and rather too many."""
    case, base = group[0], 2**31 + 2**30
    if isinstance(case, AttentionCase):
        by_row = case.head_dim + case.v_head_dim
        numbers = case.batch * (case.q_len * case.q_heads + case.kv_len * case.kv_heads) * by_row
        shapes = (case.bias_shape or (), case.mask_shape or ())
        written = sum(math.prod(shape) for shape in shapes if shape)
        return base + 24 * numbers + 16 * written
    sizes = case.kv_heads * (case.head_dim + case.v_head_dim)
    if isinstance(case, AppendCase):
        return base + 16 * case.sequences * max(case.capacities) * sizes
    assert isinstance(case, DecodeCase)
    each = 14 + 2 * len(group) + 8 * bool(case.cache_dtype)
    asked = 24 * sum(case.each) * case.q_heads * (case.head_dim + case.v_head_dim)
    return base + each * case.sequences * case.capacity * sizes + asked


def _refuse_unknown(names: str) -> None:
    every = {name for table in peers.PEERS.values() for name in table}
    for name in names.split(","):
        if name.removeprefix("-") not in every | {"all", "none"}:
            raise ValueError(f"peers: expected names of {', '.join(sorted(every))}, got {name!r}")


def measured(out: pathlib.Path, here: rows.Provenance) -> list[Row]:
    """The rows in a folder that this commit gave on this kind of GPU with this jax."""
    if not out.is_dir() or here.commit.endswith(("unknown", "-dirty")):
        return []  # a commit that can name two trees is begun anew
    same = ("commit", "gpu", "jax")
    wanted = tuple(getattr(here, name) for name in same)
    return [row for row in rows.read(out) if tuple(row[name] for name in same) == wanted]


def left_of(tasks: Iterable[Task], done: Iterable[Row]) -> list[Task]:
    """The tasks of which a case has no row."""
    have = {(row["op"], row["case"]) for row in done if rows.is_ours(row)}
    return [task for task in tasks if any((OPS[task.op], case) not in have for case in task.cases)]


# ---- the command ---------------------------------------------------------------------------------


def run(
    op: str,
    wanted: str,
    options: Options,
    workers: int,
    within: int | None,
    *,
    program: str = WORKER,
    say: Callable[[str], None] = runner.say_line,
) -> int:
    """Runs it; 0 where every case has a row beside every peer that takes it, else 1.

    `program` is a worker's, which is given the folder of the plan and the number of its GPU.
    """
    begun = time.time()
    if options.out is None:
        raise ValueError("out: --workers needs --out=FOLDER, for a file of rows an operation")
    if options.plot is not None:
        raise ValueError("plot: --workers draws none; leave it out")
    _refuse_unknown(options.peers)
    tasks, out = suite() if op == ALL else tasks_of(op, wanted), pathlib.Path(options.out)
    runner.require_gpu()
    here = rows.Provenance.here(options.commit)
    out.mkdir(parents=True, exist_ok=True)
    todo, end = left_of(tasks, measured(out, here)), begun + (within or math.inf)
    say(f"{here.gpu}, jax {here.jax}, commit {here.commit}: {len(todo)} of {len(tasks)} groups")
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan((Task("ceiling"), *todo), options, here, end, _room())
        if todo:
            gpus = len(jax.local_devices())
            _Pool(plan, pathlib.Path(folder), program, say, gpus).run(workers)
        failures = _failures(pathlib.Path(folder))
    waiting = first_calls(out, plan, say) if op == ALL else []
    done = measured(out, here) or [row for row in rows.read(out) if row["run"] == here.run]
    return _said(tasks, done, failures, waiting, say)


def _room() -> float:
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", math.inf)


def _failures(folder: pathlib.Path) -> dict[str, dict[str, str]]:
    """{op: {case: reason}}."""
    reasons: dict[str, dict[str, str]] = collections.defaultdict(dict)
    path = folder / "failures"
    for row in rows.read(path) if path.exists() else ():
        reasons[row["op"]][row["case"]] = row["why"]
    return reasons


def _said(
    tasks: list[Task],
    done: list[Row],
    failures: dict[str, dict[str, str]],
    waiting: list[str],
    say: Callable[[str], None],
) -> int:
    groups = report.latest([row for row in done if row["op"] != first_call.OP])
    for op in dict.fromkeys(task.op for task in tasks):
        own = groups.get(OPS[op], [])
        for line in report.summary(own, failures.get(op, {})):
            say(f"{op}: {line}")
    left = left_of(tasks, done)
    missing: dict[str, list[str]] = collections.defaultdict(list)
    for task in left:
        lost = failures.get(task.op, {})
        missing[task.op] += [case for case in task.cases if case not in lost]
    for op, names in [*missing.items(), (first_call.OP, waiting)]:
        if names:
            say(f"left: {op}: {', '.join(names)}")
    if left or waiting:
        say("the same command with the same --out goes on with what is left")
    shown = [row for each in groups.values() for group in each for row in group]
    return int(bool(left or waiting) or any(row.get("failed") for row in shown))


class _Pool:
    """The workers of a command."""

    def __init__(
        self,
        plan: Plan,
        folder: pathlib.Path,
        program: str,
        say: Callable[[str], None],
        gpus: int,
    ):
        plan.save(folder / "plan")
        self.plan, self.folder, self.program, self.say = plan, folder, program, say
        self.claims, self.gpus = Claims(folder / "claims"), gpus

    def run(self, workers: int) -> None:
        """Returns when all workers have ended."""
        numbers = range(min(workers, len(self.plan.tasks)))
        running = {self._started(n % self.gpus): n % self.gpus for n in numbers}
        renewals = 4 * workers + len(self.plan.tasks) // AHEAD  # workers that may be started again
        while running:
            time.sleep(0.1)
            for process in [x for x in running if x.poll() is not None]:
                gpu = running.pop(process)
                self.claims.forget(gpu, process.pid)
                if process.returncode not in (0, RENEW):
                    self.say(f"a worker ended with status {process.returncode}")
                on_time = time.time() < self.plan.end
                if process.returncode and on_time and renewals and self._work_is_left():
                    running[self._started(gpu)] = gpu
                    renewals -= 1
            if running and time.time() > self.plan.end + GRACE_S:
                for process in running:
                    process.kill()
                    process.wait()
                self.say(f"{len(running)} workers were ended {GRACE_S} s after the end of --within")
                return

    def _started(self, gpu: int) -> subprocess.Popen[bytes]:
        """A worker that sees one GPU."""
        program = gpu_check.start(gpu) + self.program
        arguments = [sys.executable, "-c", program, str(self.folder), str(gpu)]
        return subprocess.Popen(arguments, cwd=ROOT)

    def _work_is_left(self) -> bool:
        with self.claims.held() as claims:
            return len(claims["taken"]) < len(self.plan.tasks)


# ---- first calls ---------------------------------------------------------------------------------


def first_calls(out: pathlib.Path, plan: Plan, say: Callable[[str], None]) -> list[str]:
    """Times first calls, one process each, a few side by side on cores that do nothing else.
    Returns the names of those that failed, or for which --within was too short.
    """
    have = {
        (row["case"], row["impl"], row["persistent_cache"])
        for row in measured(out, plan.provenance)
        if row["op"] == first_call.OP
    }
    every = first_call.every_timing(first_call.select("grid"), plan.options.peers)
    asked = [x for x in every if (x[0].name, x[1], x[2][0]) not in have]

    def timed(case: Any, impl: str, states: first_call.States) -> list[Row]:
        if time.time() > plan.end:
            return []
        made = first_call.timed(case, impl, states, 1, plan.provenance)
        return [row | {"side_by_side": FIRST_CALLS_AT_ONCE} for row in made]

    left = []
    with concurrent.futures.ThreadPoolExecutor(FIRST_CALLS_AT_ONCE) as pool:
        begun = {pool.submit(timed, *some): some for some in asked}
        for future in concurrent.futures.as_completed(begun):
            case, impl, states = begun[future]
            for row in future.result():
                say(first_call.line_of(row))
                rows.append(out / f"{first_call.OP}.jsonl", [row])
            if not future.result():
                left.append(f"{case.name} of {impl}{' with a persistent cache' * bool(states[0])}")
    return left
