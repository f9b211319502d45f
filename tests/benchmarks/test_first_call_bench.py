"""The benchmark of first calls: its programs run, processes are taken by their median, and the page
shows the newest of each.
"""

import json
import pathlib
import subprocess

import jax
import pytest

from benchmarks import first_call, pages, rows
from benchmarks import first_call_programs as programs

HERE = rows.Provenance("r", "NVIDIA H200", "0.11.2", "c", "2026-11-27T10:00:00Z")
TINY = {
    "fwd": {"layers": 1, "both": False, "shape": (1, 8, 2, 64)},
    "docs": {"layers": 2, "both": True, "documents": True, "shape": (1, 8, 2, 64)},
    **{
        f"{kind}_{n}": {"kind": kind, "sequences": 2, "rows": n, "room": 128}
        for kind, n in (("stacked", 1), ("paged", 3), ("separate", 1))
    },
}


@pytest.mark.parametrize("name", TINY)
def test_a_program_is_timed_step_by_step(name):
    make = programs.cache if "kind" in TINY[name] else programs.attention
    impls = ("pallas_attn",) if make is programs.cache else ("pallas_attn", "xla")
    for impl in impls:
        with jax.numpy_dtype_promotion("standard"):  # jax.nn wants it
            seconds = programs.measure(programs.Case(name, make, TINY[name]), impl)
        assert tuple(seconds) == programs.STEPS and min(seconds.values()) > 0


def test_the_median_process_and_both_of_a_persistent_cache(monkeypatch):
    timings = iter([(3.0, "empty"), (0.3, "filled"), (1.0, "empty"), (0.1, "filled"),
                      (2.0, "empty"), (0.2, "filled")])  # fmt: skip
    folders = []

    def process(command, **_):
        seconds, _ = next(timings)
        assert (pathlib.Path(command[3]) / "pallas_attn").is_dir()  # imports come from there
        folders.append(command[-1])
        line = json.dumps(dict.fromkeys(programs.STEPS, seconds / 4))
        return subprocess.CompletedProcess(command, 0, f"a warning\n{line}\n", "")

    monkeypatch.setattr(subprocess, "run", process)
    (case,) = first_call.select("both")
    empty, filled = first_call.timed(case, "pallas_attn", ("empty", "filled"), 3, HERE)
    assert (empty["total_s"], filled["total_s"]) == (2.0, 0.2)
    assert (empty["persistent_cache"], filled["persistent_cache"]) == ("empty", "filled")
    assert empty["n"] == 3 and empty["problem"]["program"] == "attention"
    assert folders[0::2] == folders[1::2] and len(set(folders)) == 3


def test_a_process_that_fails_has_no_row(monkeypatch, capsys):
    def process(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "no cuDNN")

    monkeypatch.setattr(subprocess, "run", process)
    (case,) = first_call.select("fwd")
    assert first_call.timed(case, "cudnn", (None,), 2, HERE) == []
    assert "fwd: cudnn failed: exit status 1: no cuDNN" in capsys.readouterr().err

    def hangs(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", hangs)
    assert first_call.timed(case, "cudnn", (None,), 1, HERE) == []
    assert "fwd: cudnn hung: no answer within 600 s" in capsys.readouterr().err


def test_every_timing():
    everything = list(first_call.every_timing(first_call.select("grid"), "all"))
    chosen = first_call.select("both,docs")
    assert {case.name for case, _, _ in everything} == {case.name for case in programs.CASES}
    assert [(case.name, impl, states) for case, impl, states in first_call.every_timing(
        chosen, "xla")] == [
        ("both", "pallas_attn", (None,)),
        ("both", "xla", (None,)),
        ("both", "pallas_attn", ("empty", "filled")),
        ("docs", "pallas_attn", (None,)),
        ("docs", "xla", (None,)),
        ("docs", "pallas_attn", ("empty", "filled")),
    ]  # fmt: skip
    for names, left in (("-xla", {"cudnn", "jax"}), ("-xla,-jax", {"cudnn"}), ("none", set())):
        timings = first_call.every_timing(programs.CASES, names)
        assert {impl for _, impl, _ in timings} == left | {"pallas_attn"}
    with pytest.raises(ValueError, match="cases: 'x' matches none of import, fwd"):
        first_call.select("x")


def test_the_page_shows_the_newest():
    def row(case, impl, total, state=None, day="27", **steps):
        where = {"gpu": HERE.gpu, "jax": HERE.jax, "date": f"2026-11-{day}T10:00:00Z"}
        return {"case": case, "impl": impl, "persistent_cache": state, "total_s": total} | (
            where | steps
        )

    text = "\n".join(
        pages.section_of_first_calls(
            [
                row("fwd", "pallas_attn", 2.0, trace_s=0.5, lower_s=0.5, compile_s=0.9, run_s=0.1),
                row("fwd", "pallas_attn", 3.0, day="26", trace_s=1.0),
                row("fwd", "pallas_attn", 1.1, "filled"),
                row("fwd", "cudnn", 0.84),
                row("import", "jax", 0.8),
            ]
        )
    )
    assert "| `fwd` | **2.00** | 0.90 | 1.10 | 0.84 |" in text
    assert "| `import` |" in text
    assert pages.section_of_first_calls([]) == []


@pytest.mark.parametrize("peers", ["typo", "cudnn,typo", "-typo"])
def test_an_unknown_peer_is_refused(peers):
    with pytest.raises(ValueError) as caught:
        first_call.run("grid", peers, 1, None, None)
    name = peers.rpartition(",")[2]
    assert str(caught.value) == f"peers: expected names of cudnn, jax, xla, got {name!r}"
