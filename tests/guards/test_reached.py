"""tests/support/reached.py: which branches a run reached, by names that other edits do not move."""

import importlib.util
import textwrap

import pytest

from tests.support import aot, builds, fuzz, reached, reaching, unreached

PROGRAM = """
    def run(a, b, c, items, n=None, two=lambda: 2):
        for item in items:
            if a and not b or c is None:
                continue
            if item:
                break
        if n is not None:
            a = two()
        for other in ():
            a = other
        least = 1 if n is None else 2
        some = [x for x in items if x and not b]
        later = lambda: least
        def inner():
            return some if a else later()
        while a < 3:
            a += 1
        return inner()

    def alone(a):
        return 1 if a else 2
"""
NOT_REACHED = {
    "run: for other in () is entered",
    "run.<locals>.<lambda>: lambda: least is called",
    "run.<locals>.inner: a is false",
    "alone is called",
}


def watched(folder, *calls):
    """The branches of PROGRAM that calls of `run` reach."""
    path = folder / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    spec = importlib.util.spec_from_file_location("program", path)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    watch = reached.Watch(folder)
    watch.start()
    try:
        for call in calls:
            program.run(*call)
    finally:
        watch.stop()
    watch.write(folder / "runs")


def test_branches_that_no_call_reaches(tmp_path):
    watched(tmp_path, (1, 0, 3, [1]), (0, 0, 3, [0, 1]), (0, 1, 3, [0, 1], 3))
    got = reached.unreached(reached.read(tmp_path / "runs"), tmp_path)
    assert set(got) == {f"program.py {name}" for name in NOT_REACHED}


def test_runs_add_up(tmp_path):
    """A condition that is only ever true in one run, and false in another."""
    watched(tmp_path, (1, 0, 3, [1]))
    names = "program.py run: n is not None is true", "program.py run: n is not None is false"
    first = reached.unreached(reached.read(tmp_path / "runs"), tmp_path)
    assert names[0] in first and names[1] not in first
    watched(tmp_path, (1, 0, 3, [1], 2))
    assert names[0] not in reached.unreached(reached.read(tmp_path / "runs"), tmp_path)


@pytest.mark.machine_code
def test_a_process_that_compiles_writes_too(tmp_path, monkeypatch):
    monkeypatch.setattr(aot, "reached_folder", str(tmp_path))
    monkeypatch.setattr(aot, "_workers", {})
    build = builds.BUILDS["quantize/sm90/h128"]
    aot.compile_for(build.call, *build.shapes, target=build.target)
    aot.close_workers()
    assert "_kernel is called" in reached.read(tmp_path)["quantize/blocks.py"]


def test_equal_conditions_of_a_function_have_numbers():
    text = "def f(a):\n    if a: return 1\n    a = g(a)\n    return 2 if a else 3\n"
    names = [x.name for x in reached.branches_of(text)]
    assert names == ["f is called", "f: a is true", "f: a is false", "f: a #2 is true",
                     "f: a #2 is false"]  # fmt: skip


def test_what_is_wrong_is_said_by_name(tmp_path):
    watched(tmp_path, (1, 0, 3, [1]))
    runs = reached.read(tmp_path / "runs")
    excuses = set(reached.unreached(runs, tmp_path))
    assert not reached.complaints(runs, excuses, tmp_path)
    stale = "program.py run is called"
    excuses = excuses - {"program.py alone is called"} | {stale}
    assert reached.complaints(runs, excuses, tmp_path) == [
        "no test reaches this branch: program.py alone is called",
        f"a test reaches what is excused, or it is no branch: {stale}",
    ]


def test_excuses_are_of_branches():
    """Each once."""
    branches = reached.all_branches()
    names = {f"{file} {branch.name}" for file in branches for branch in branches[file]}
    assert not unreached.EXCUSED - names
    assert sum(map(len, unreached.REASONS.values())) == len(unreached.EXCUSED)


def test_a_folder_without_runs_is_no_success(tmp_path, capsys):
    assert reached.main(str(tmp_path)) == 1
    assert "--reached" in capsys.readouterr().err


@pytest.mark.guards
@pytest.mark.parametrize("word", reaching.words(), ids=lambda word: ":".join(word.split(":")[:2]))
def test_problems_that_reach_more(word):
    reaching.attempt(word)


def test_a_problem_that_no_kernel_takes_reaches_nothing(monkeypatch):
    monkeypatch.setattr(fuzz, "attempt", lambda word, tally: None)
    with pytest.raises(AssertionError, match="no kernel takes"):
        reaching.attempt("attention/lowered:0")
