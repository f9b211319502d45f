"""One benchmark by several processes, without a GPU: locks, claims, what is left, and all together
with small cases and a timer that only counts.
"""

import contextlib
import dataclasses
import fcntl
import json
import pathlib
import threading
import time

import pytest

from benchmarks import Options, first_call, record, runner, timing, workers
from benchmarks import first_call_programs as programs
from benchmarks import worker as module
from benchmarks.rows import Provenance, append, is_ours, read
from benchmarks.timing import Sample, Subject
from benchmarks.together import Together
from benchmarks.worker import RENEW, Claims, Plan, Task, Worker, peers_of
from tests.support.problems import cases as known

ROOT = pathlib.Path(__file__).parents[2]
HERE = Provenance("run", "cpu", "0.11.2", "abc", "2026-11-29T10:00:00Z")
TASKS = tuple(
    Task("forward", (name,), 100) for name in ("causal_32x32", "float32_causal", "attention_16x16")
)


def count(subject, times):
    """A timer."""
    subject.wait(subject.launch())
    return [Sample(1.0, 1)] * times


@contextlib.contextmanager
def planned(tmp_path, tasks=TASKS, end=10**10, room=10**9, **options):
    """The folder of a plan."""
    folder, options = tmp_path / "plan", Options(out=str(tmp_path / "out"), **options)
    folder.mkdir()
    Plan(tasks, options, HERE, end, room).save(folder / "plan")
    yield folder


def worked(folder, **changes):
    """A worker in this process, after its run, its status and its lines."""
    lines = []
    worker = Worker(folder, timer=count, say=lines.append)
    for name, value in changes.items():
        setattr(worker, name, value)
    return worker, worker.run(), lines


# ---- locks ---------------------------------------------------------------------------------------


@pytest.fixture
def opened():
    """Makes locks of a file, which are closed in the end."""
    with contextlib.ExitStack() as stack:

        def make(path):
            together = Together(str(path))
            stack.callback(together.close)
            return together

        yield make


def is_held(path):
    """Whether anybody has a lock on a file."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_who_times_is_alone_and_goes_first(tmp_path, opened):
    said = []
    first, second = [opened(tmp_path / "lock") for _ in range(2)]
    second.while_others_time = lambda: said.append("timed my own")

    def use():
        with second.beside():
            said.append("used")

    with first.alone():
        with first.alone():
            pass  # changes nothing
        thread = threading.Thread(target=use)
        thread.start()
        time.sleep(0.2)
        assert said == ["timed my own"]
    thread.join(10)
    assert said == ["timed my own", "used"]


def test_two_use_the_gpu_beside_each_other_while_a_third_waits_to_time(tmp_path, opened):
    said = []
    first, second, timer, late = [opened(tmp_path / "lock") for _ in range(4)]

    def timing_alone():
        with timer.alone():
            said.append("timed")

    def comes_late():
        with late.beside():
            said.append("late")

    with first.beside(), second.beside():
        threads = [threading.Thread(target=timing_alone)]
        threads[0].start()
        while not is_held(tmp_path / "lock.door"):
            time.sleep(0.01)
        threads.append(threading.Thread(target=comes_late))
        threads[1].start()
        time.sleep(0.1)
        assert said == []
    for thread in threads:
        thread.join(10)
    assert said == ["timed", "late"]


def test_who_meets_another_at_the_door_only_waits(tmp_path, opened):
    together, said = opened(tmp_path / "lock"), []
    together.while_others_time = lambda: said.append("timed")

    def use():
        with together.beside():
            said.append("used")

    with (tmp_path / "lock.door").open() as door:
        fcntl.flock(door, fcntl.LOCK_EX)
        thread = threading.Thread(target=use)
        thread.start()
        time.sleep(0.1)
        assert said == []
    thread.join(10)
    assert said == ["used"]


def test_without_a_file_there_is_no_lock():
    together = Together()
    with together.alone(), together.beside():
        assert not together.shares


# ---- turns that end early ------------------------------------------------------------------------


@pytest.mark.parametrize(("jitter", "n"), [(0.001, 6), (0.1, 15)])
def test_turns_end_once_samples_agree(jitter, n):
    calls = iter(range(1000))

    def timer(subject, times):
        return [Sample(1.0 + jitter * (next(calls) % 3), 1) for _ in range(times)]

    subjects = [Subject(name, lambda: ()) for name in "ab"]
    assert timing.interleave(timer, subjects, settled=0.01)["a"].n == n
    assert timing.interleave(timer, subjects)["a"].n == 15


# ---- the list of work ----------------------------------------------------------------------------


def test_all_has_every_case_of_the_configurations():
    tasks = workers.suite()
    configs = {path.stem.removeprefix("bench_") for path in ROOT.glob("configs/bench_*.cfg")}
    assert configs - {"context", "first_call"} == set(workers.SUITE)
    names = [(task.op, name) for task in tasks for name in task.cases]
    assert len(set(names)) == len(names)
    assert [task.op for task in tasks[:30]] == ["forward"] * 15 + ["backward"] * 15
    assert {task.op for task in tasks} == set(runner.OPS) - {"backward_alone"}
    assert all(2**30 < task.need < 2**37 for task in tasks)


def test_an_operation_is_asked_for_the_peers_that_it_has():
    assert peers_of("forward", "all") == "-xla,-torch_math"
    assert peers_of("forward", "-flex,-tokamax,-xla") == "-tokamax,-xla,-torch_math"
    assert peers_of("jvp", "all") == peers_of("append", "-cudnn") == "all"
    assert peers_of("append", "cudnn") == "none" == peers_of("forward", "none")
    assert peers_of("decode", "cudnn,fa4_jax") == "cudnn"
    assert "xla" not in module.peers.wanted("forward", peers_of("forward", "all"))
    assert module.peers.wanted("decode", peers_of("decode", "-xla")) == ["cudnn", "wide_cache"]


def test_what_this_commit_has_measured_is_not_left(tmp_path):
    row = {"op": "forward", "impl": "pallas_attn/x", "commit": "abc", "gpu": "cpu"}
    row |= {"jax": "0.11.2"}
    made = [row | {"case": "causal_32x32"}, row | {"case": "float32_causal", "commit": "old"}]
    append(tmp_path / "any.jsonl", made)
    assert workers.measured(tmp_path, HERE) == made[:1]
    assert workers.left_of(TASKS, made[:1]) == list(TASKS[1:])
    dirty = dataclasses.replace(HERE, commit="abc-dirty")
    append(tmp_path / "any.jsonl", [row | {"case": "attention_16x16", "commit": "abc-dirty"}])
    assert workers.measured(tmp_path, dirty) == []
    two = Task("forward", ("causal_32x32", "softcap"))
    assert workers.left_of([two], made) == [two]


# ---- a worker ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("programs_in_numpy")
def test_a_worker_measures_all_and_another_finds_nothing(tmp_path):
    with planned(tmp_path, peers="xla") as folder:
        _, status, lines = worked(folder)
        assert (status, len(lines)) == (0, 3)
        made = read(tmp_path / "out")
        assert {(row["case"], row["run"]) for row in made} == {(t.cases[0], "run") for t in TASKS}
        assert {row["n"] for row in made} == {6}  # samples agree
        assert "first_call_s" not in made[0]
        assert any(row["impl"] == "xla" for row in made)
        assert worked(folder)[1:] == (0, [])
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["forward.jsonl"]


def test_after_the_end_nothing_is_begun(tmp_path):
    with planned(tmp_path, end=0) as folder:
        assert worked(folder)[1:] == (0, [])
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("programs_in_numpy")
def test_a_case_that_fails_is_said_and_the_others_go_on(tmp_path, monkeypatch):
    right = module.contest.timed

    def fails(bench, group):
        if group.names == ["float32_causal"]:
            return {"float32_causal": RuntimeError("lost")}
        return right(bench, group)

    monkeypatch.setattr(module.contest, "timed", fails)
    with planned(tmp_path, peers="none") as folder:
        worked(folder)
        why = {"op": "forward", "case": "float32_causal", "why": "RuntimeError: lost"}
        assert read(folder / "failures") == [why]
    assert len(read(tmp_path / "out")) == 2


def test_memory_is_shared_out(tmp_path):
    """The second of three has no room; what a process keeps counts as its own."""
    sizes = [Task("forward", ("causal_32x32",), n) for n in (60, 50, 10)]
    with planned(tmp_path, tuple(sizes), room=120) as folder:
        worker = Worker(folder, timer=count)
        with Claims(folder / "claims").held() as claims:
            claims["bytes"]["0/1"] = 55
        assert worker._next() == sizes[0]
        worker.ready.append((sizes[0], None, None))
        assert worker._next() == "wait"  # 55 + 60 + 10
        Claims(folder / "claims").forget(0, 1)
        assert worker._next() == sizes[1]
        worker._bytes, worker.ready = lambda: 2**31, []
        with Claims(folder / "claims").held() as claims:
            claims["bytes"]["0/1"] = 55
        assert worker.run() == RENEW


def test_the_memory_of_another_gpu_is_free(tmp_path):
    with planned(tmp_path, (Task("forward", ("causal_32x32",), 100),), room=100) as folder:
        with Claims(folder / "claims").held() as claims:
            claims["bytes"]["0/1"] = 60
        first, second = (Worker(folder, timer=count, gpu=gpu) for gpu in (0, 1))
        assert first._next() == "wait"
        assert isinstance(second._next(), Task)
        with first.together.alone(), second.together.alone():  # each times on its own GPU
            pass
        first.together.close()
        second.together.close()


def test_nobody_waits_for_room_that_is_never_there(tmp_path):
    with planned(tmp_path, (Task("forward", ("causal_32x32",), 10**12),), room=100) as folder:
        with Claims(folder / "claims").held() as claims:
            claims["bytes"]["0/1"] = 50
        worker = Worker(folder, timer=count)
        assert isinstance(worker._next(), Task)
        worker.together.close()


# ---- the command ---------------------------------------------------------------------------------

# A worker with another timer, on the CPU.
COUNTING = """\
import sys
from benchmarks import timing, worker
from tests.benchmarks.test_workers import count
timing.CuptiTimer = lambda: count
timing.ceilings = lambda timer: {"matmul": 800.0}
sys.exit(worker.main())
"""


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Runs the command with small cases: its status, its lines, and the rows that there are."""
    monkeypatch.setattr(runner, "require_gpu", lambda: None)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")

    def ask(wanted="causal_32x32,float32_causal", within=None, code=COUNTING, **options):
        lines = []
        options = Options(**{"out": str(tmp_path), "commit": "abc", "peers": "xla"} | options)
        status = workers.run("forward", wanted, options, 2, within, program=code, say=lines.append)
        return status, lines, read(tmp_path)

    return ask


def test_two_processes_share_the_cases_and_go_on(asked, tmp_path):
    status, lines, made = asked("causal_32x32")
    assert status == 0, lines
    assert "1 of 1 groups" in lines[0]
    status, lines, made = asked()
    assert status == 0, lines
    assert "1 of 2 groups" in lines[0]
    assert lines[-1].startswith("forward: 1.000x xla (geomean of 2)")
    ours = [row for row in made if is_ours(row)]
    assert [row["case"] for row in ours] == ["causal_32x32", "float32_causal"]
    assert len({row["run"] for row in ours}) == 2
    assert len([row for row in made if row["op"] == "ceiling"]) == 2  # one a command
    status, lines, _ = asked()
    assert (status, lines[0].rpartition(": ")[2]) == (0, "0 of 2 groups")
    assert {path.name for path in tmp_path.iterdir()} == {"forward.jsonl", "ceiling.jsonl"}


def test_workers_share_the_gpus(asked, tmp_path, monkeypatch):
    """Each sees one, by its number among those that the command sees."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setattr(workers.jax, "local_devices", lambda **_: [Device(), Device()])
    code = f"""\
import os, pathlib, sys
seen = pathlib.Path({str(tmp_path / "seen")!r})
seen.mkdir(exist_ok=True)
(seen / "_".join((sys.argv[2], os.environ["CUDA_VISIBLE_DEVICES"]))).touch()
"""
    asked(code=code)
    assert {path.name for path in (tmp_path / "seen").iterdir()} == {"0_4", "1_6"}


class Device:
    """A device of which nothing is known."""

    def memory_stats(self):
        return None


def test_what_is_left_is_listed(asked, monkeypatch):
    monkeypatch.setattr(workers, "GRACE_S", 0)
    status, lines, made = asked(within=1, code="import time; time.sleep(60)")
    assert status == 1 and made == []
    assert "2 workers were ended 0 s after the end of --within" in lines
    assert len([line for line in lines if "ended" in line]) == 1
    assert lines[-2:] == [
        "left: forward: causal_32x32, float32_causal",
        "the same command with the same --out goes on with what is left",
    ]


def test_a_worker_that_dies_is_followed_by_another(asked):
    dies = f"""\
import pathlib, sys
first = pathlib.Path(sys.argv[1]) / "first"
try:
    first.touch(exist_ok=False)
except FileExistsError:
    pass
else:
    sys.exit(3)
{COUNTING}"""
    status, lines, made = asked("causal_32x32", code=dies)
    assert status == 0, lines
    assert "a worker ended with status 3" in lines
    assert sum(map(is_ours, made)) == 1


def test_a_command_that_cannot_be_is_refused(asked):
    with pytest.raises(ValueError, match="out: --workers needs --out=FOLDER"):
        asked(out=None)
    with pytest.raises(ValueError, match="plot: --workers draws none"):
        asked(plot="a.svg")
    with pytest.raises(ValueError, match="peers: expected names of .*, got '-cudn'"):
        asked(peers="-cudn")
    with pytest.raises(ValueError, match="op: expected one of forward, .* or all, got 'context'"):
        workers.tasks_of("context", "grid")


def test_first_calls_stop_at_the_end_and_go_on(tmp_path, monkeypatch):
    asked = []

    def timed(case, impl, states, turns, here):
        asked.append((case.name, impl, states))
        row = {"op": "first_call", "case": case.name, "impl": impl, "n": turns, "total_s": 1.0}
        more = {"problem": {}, **dataclasses.asdict(here)}
        return [row | more | {"persistent_cache": state} for state in states]

    monkeypatch.setattr(first_call, "timed", timed)
    plan = Plan((), Options(), HERE, time.time() + 600, 0)
    every = list(first_call.every_timing(programs.CASES, "all"))
    assert workers.first_calls(tmp_path, plan, lambda line: None) == []
    assert len(asked) == len(every)
    assert read(tmp_path)[0]["side_by_side"] == workers.FIRST_CALLS_AT_ONCE
    assert workers.first_calls(tmp_path, plan, lambda line: None) == []
    assert len(asked) == len(every)
    late = dataclasses.replace(plan, end=0)
    (tmp_path / "first_call.jsonl").unlink()
    left = workers.first_calls(tmp_path, late, lambda line: None)
    assert len(left) == len(every) and "both of pallas_attn with a persistent cache" in left


def test_a_plan_is_read_as_it_was_written(tmp_path):
    plan = Plan(TASKS, Options(peers="xla"), HERE, 10.0, 5.0)
    plan.save(tmp_path / "plan")
    assert Plan.read(tmp_path / "plan") == plan
    assert json.loads((tmp_path / "plan").read_text())["end"] == 10.0
    assert {case for task in TASKS for case in task.cases} <= {x.name for x in known.ATTENTION}


def test_rows_are_added_to_the_files_of_results_once(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    ops = ("forward+backward", "few_tiles", "first_call", "ceiling")
    made = [{"op": op, "case": "x", "gpu": "NVIDIA H200"} for op in ops]
    append(tmp_path / "rows.jsonl", made)
    files = [tmp_path / "rows.jsonl"] * 2
    assert set(record.record(files).values()) == {1}
    assert set(record.record(files).values()) == {0}
    written = {
        str(x.relative_to(tmp_path / "results")) for x in tmp_path.glob("results/**/*.jsonl")
    }
    names = {f"{name}_h200.jsonl" for name in ("backward", "few_tiles", "ceiling")}
    assert written == names | {"first_call/h200.jsonl"}
