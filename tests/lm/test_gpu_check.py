"""`pallas-attn check`: processes under a time limit, verdicts, the report."""

import json
import sys

import pytest

import pallas_attn
from pallas_attn._call import config, device
from pallas_lm import gpu_check, gpu_check_cases
from pallas_lm.gpu_check import Outcome, Settings, Timing
from tests.support import mosaic

REFERENCE = Settings("reference")


def python(program):
    return [sys.executable, "-c", program]


@pytest.mark.parametrize(
    ("program", "verdict", "note"),
    [
        ("import time; time.sleep(600)", "hung", "no answer within 1 s"),
        ("raise ValueError('one is odd')", "failed", "exit status 1: ValueError: one is odd"),
        ("import os; os.abort()", "failed", "exit status -6: there is no answer"),
        ("pass", "failed", "exit status 0: there is no answer"),
        ("print('no JSON')", "failed", "exit status 0: there is no answer"),
    ],
)
def test_a_process_without_an_answer_is_one_row(program, verdict, note):
    limit = 1 if verdict == "hung" else 60
    assert gpu_check.answer(python(program), limit) == (None, verdict, note)


def test_an_answer_is_the_last_line():
    answer = gpu_check.answer(python("print('a word'); print('{\"case\": 1}')"), 60)
    assert answer == ({"case": 1}, "ok", "")


@pytest.mark.parametrize(
    ("before", "gpu", "number"), [(None, 0, "0"), (None, 2, "2"), ("", 1, "1"), ("5,7", 1, "7")]
)
def test_a_process_sees_the_gpu_that_was_asked_for(monkeypatch, before, gpu, number):
    """By its number among those that this process sees."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    program = gpu_check.start(gpu) + "import json; print(json.dumps(dict(os.environ)))"
    answer, verdict, _ = gpu_check.answer(python(program), 60)
    assert verdict == "ok" and answer["CUDA_VISIBLE_DEVICES"] == number


def test_the_report_names_the_gpu(monkeypatch):
    assert gpu_check.machine()["device"] == "cpu"
    monkeypatch.setattr(pallas_attn, "gpu_generation", lambda: "sm90")
    assert gpu_check.machine(1)["device"] == "GPU 1, cpu"
    with pytest.raises(ValueError, match=r"^gpu: jax sees \d+ devices here, from 0 on; got 99$"):
        gpu_check.machine(99)


def test_a_case_runs_in_a_process_of_its_own(monkeypatch):
    monkeypatch.setattr(gpu_check_cases, "CHECKS", gpu_check_cases.CHECKS[:1])
    (ran,) = gpu_check.outcomes(REFERENCE)
    assert (ran.verdict, ran.implementation, ran.note) == ("ok", "reference", "")
    assert 0 < ran.error <= ran.budget


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [((1.0, 1.0), "ok"), ((1.5, 1.0), "wrong"), ((float("nan"), 1.0), "wrong")],
)
def test_an_error_above_the_budget_is_wrong(monkeypatch, figures, verdict):
    def check(how):
        q = how.normal(1, 1, 4, 1, 8)
        pallas_attn.flash_attention(q, q, q, implementation=how.implementation)
        return figures

    monkeypatch.setattr(
        gpu_check_cases, "CHECKS", (gpu_check_cases.Check("sums", "of four", check),)
    )
    assert gpu_check.outcome(0, REFERENCE).verdict == verdict


@pytest.mark.guards
@pytest.mark.usefixtures("programs_in_numpy")
@pytest.mark.parametrize("case", ["dq, dk, dv, random dO", "full, T 129, H 128"])
def test_gradients_are_checked_by_the_kernels_of_a_name(case):
    """--implementation=sm100 on a GPU of it: the forward and the backward for Blackwell."""
    checks = [(x.operation, x.case) for x in gpu_check_cases.CHECKS]
    with device.assume("sm100"), mosaic.interpret(), config.watched() as seen:
        outcome = gpu_check.outcome(checks.index(("gradients", case)), Settings("sm100"))
    assert (outcome.verdict, outcome.implementation) == ("ok", "sm100")
    assert [choice.kernel for choice in seen] == ["flash_fwd_sm100", "flash_bwd_sm100"]


def test_what_no_kernel_takes_is_refused():
    refused = gpu_check.outcome(0, Settings("sm90"))
    assert refused.verdict == "refused" and refused.error is None
    first, why, *_ = refused.note.splitlines()
    assert first.startswith("sm90 does not take flash_forward on a machine without a GPU: ")
    assert why.endswith("_sm90_wide: it needs an NVIDIA GPU, which the default device is not")
    assert refused.line().count("\n") == len(refused.note.splitlines())


def test_ours_is_timed_where_cudnn_is_not(monkeypatch):
    small = (1, 16, 2, 8), (1, 16, 1, 8), gpu_check._forward_and_backward
    monkeypatch.setattr(gpu_check, "_CALLS", {"small": small})
    timed = gpu_check.timing("small", REFERENCE)
    assert timed.ours > 0 and timed.cudnn is None and timed.note.startswith("cuDNN: ")


RAN = {
    0: [Outcome("a", "x", "ok", "sm90", 0.1, 0.2), Outcome("a", "y", "refused", note="too wide")],
    1: [Outcome("a", "x", "ok", "sm90", 0.1, 0.2), Outcome("b", "y", "hung", note="no answer")],
}


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("status", RAN)
def test_the_report_and_the_exit_status(monkeypatch, tmp_path, status, as_json):
    monkeypatch.setattr(gpu_check, "outcomes", lambda settings: iter(RAN[status]))
    monkeypatch.setattr(gpu_check, "timings", lambda settings: iter([Timing("call", 10.0, 20.0)]))
    monkeypatch.setattr(pallas_attn, "gpu_generation", lambda: "sm90")
    said, out = [], tmp_path / "report.json"
    assert gpu_check.run(Settings(), str(out), said.append, as_json) == status
    report = json.loads(out.read_text())
    assert {"pallas_attn", "jax", "driver", "devices", "settings"} <= report.keys()
    assert [case["verdict"] for case in report["cases"]] == [x.verdict for x in RAN[status]]
    assert report["timings"] == [{"call": "call", "ours": 10.0, "cudnn": 20.0, "note": ""}]
    if as_json:
        assert [json.loads(line) for line in said] == [report]
    else:
        assert report["verdict"] in said[-1] and str(out) in said[-1]
        words = "1 refused" if status == 0 else "not well: 1 hung of 2 cases"
        assert words in report["verdict"]


def test_cases_that_are_all_refused_are_not_well():
    cases = [Outcome("a", "x", "refused"), Outcome("a", "y", "refused")]
    assert not gpu_check.is_well(cases, [])
    assert gpu_check.verdict_of(cases, []).endswith("nothing was checked")


def test_a_call_without_a_time_is_not_well():
    cases, times = RAN[0], [Timing("one", 1.0, None), Timing("two", None, None, "hung: ..")]
    assert gpu_check.is_well(cases, times[:1]) and not gpu_check.is_well(cases, times)
    assert gpu_check.verdict_of(cases, times) == "not well: no time of: two"


FAILS_WITHIN_JAX = """
import jax
from pallas_lm import gpu_check, gpu_check_cases

def check(how):
    return jax.jit(lambda x: x @ x)(jax.numpy.ones((2, 3)))

gpu_check_cases.CHECKS = (gpu_check_cases.Check("one", "that fails", check),)
gpu_check.work(["case", "0", "{}"])
"""


def test_an_error_within_jax_has_its_reason():
    """The last line of a traceback is that of the error, not jax's on frames that it leaves out."""
    _, verdict, note = gpu_check.answer(python(FAILS_WITHIN_JAX), 60)
    assert verdict == "failed" and "TypeError: dot_general" in note, note


def test_without_a_gpu_nothing_is_checked(tmp_path):
    said, out = [], tmp_path / "report.json"
    assert gpu_check.run(Settings(), str(out), said.append, as_json=False) == 2
    lines = "\n".join(said)
    assert lines.count("would run") == len(gpu_check_cases.CHECKS) + len(gpu_check._CALLS)
    assert lines.endswith("nothing was checked") and not out.exists()


def test_quantised_buffers_may_be_longer_than_asked(monkeypatch):
    """On a GPU they are: kernels read whole units of rows."""
    create = pallas_attn.StackedCache.create
    longer = lambda m, rows, *args, **options: create(m, rows + 1, *args, **options)  # noqa: E731
    monkeypatch.setattr(pallas_attn.StackedCache, "create", longer)
    (check,) = (x for x in gpu_check_cases.CHECKS if x.case.startswith("float8"))
    row = gpu_check_cases.row_of(check, gpu_check_cases.How("reference", "bfloat16", 0))
    assert (row.error, row.held) == (0.0, True)
