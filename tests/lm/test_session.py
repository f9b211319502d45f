"""A session: text, JSON and status lines, Ctrl-C, and the report."""

import io
import json
import re
import signal

import jax
import matplotlib.backends.backend_agg
import matplotlib.figure
import pytest

from benchmarks import rows
from benchmarks.decode_loop import findings, report, step_parts
from pallas_lm import check, decode, session
from tests.lm.loops import options, refuses, shown, small

pytestmark = pytest.mark.usefixtures("programs_in_numpy")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop_ids": (-1,)}, "stop_ids: expected tokens from 0 to 255, got [-1]"),
        ({"out": "x"}, "out: the rows are those of a report; say --report=FOLDER as well"),
        ({"prompts": ("",)}, "prompt 1 is empty"),
        ({"prompts": ("a" * 600,)}, "prompt 1: 600 tokens do not fit in a capacity of 512"),
        ({"model": "gpt"},
         "model: expected one of tiny, llama2_7b, llama3_8b, llama3_70b, llama3.1_8b, mistral_7b, "
         "qwen2_7b, qwen3_8b, deepseek_v2_lite, got 'gpt'"),
    ],
)  # fmt: skip
def test_a_session_refuses(changes, message):
    refuses(message, shown, **changes)


def test_what_does_not_fit_in_memory_is_said_before_it_is_made(monkeypatch):
    monkeypatch.setattr(session, "memory", lambda: 10**9)
    line = "model: weights take 16.1 GB and the cache 0.0 GB as bfloat16, there are 1.0 GB; give"
    with pytest.raises(ValueError, match=re.escape(line)):
        shown(model="llama3_8b", prompts=("1",), dtype="bfloat16")


def test_text_comes_in_the_order_of_the_prompts():
    status, out, err = shown(batch=1)
    first, second = out.split("--- 2 of 2 ---\n")
    assert first.startswith("--- 1 of 2 ---\nROMEO:\n") and second.startswith("The sea")
    assert "2 sequences, 40 tokens in " in second and (status, err) == (0, "")


def test_a_terminal_gets_a_status_line_beneath_the_text(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    status, out, err = shown(Terminal(), Terminal())
    _, plain, _ = shown()
    assert status == 0 and out.rsplit("\n", 2)[0] == plain.rsplit("\n", 2)[0]  # but for the rates
    assert re.search(r"\| first token \S+ m?s \(worst .*\) \| between \S+ ms", err)
    line = err.split("\r\x1b[K")[2]
    assert line.startswith("2 running, 0 waiting, 0 done | step ") and "tokens/s" in line
    assert err.endswith("\r\x1b[K")  # and leaves nothing behind


def test_ctrl_c_waits_for_a_chunk_and_the_second_does_not():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with session._asked_to_stop() as stopped:
            assert not stopped()
            signal.raise_signal(signal.SIGINT)
            assert stopped()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_json_is_an_object_a_line():
    status, out, _ = shown(json=True, check=True)
    facts = [next(iter(json.loads(line).items())) for line in out.splitlines()]
    assert status == 0
    assert sorted(kind for kind, _ in facts) == ["check"] * 2 + ["sequence"] * 2 + ["summary"]
    for kind, fields in facts:
        if kind == "sequence":
            assert fields["text"] == bytes(fields["tokens"]).decode()
            assert fields["ended"] == "length"
        assert kind != "check" or fields["held"]


def test_random_prompts_show_no_text():
    status, out, _ = shown(random_prompts=2, prompt_length=7, check=True)
    lines = out.splitlines()
    assert lines[0].startswith("2 sequences, 40 tokens in ") and "---" not in lines[0]
    assert len(lines) == 6 and lines[-1].startswith("every step is the reference's")
    assert status == 0


# ---- the report ---------------------------------------------------------------------------------


def test_a_report_says_where_the_time_goes(tmp_path, monkeypatch):
    freed, release, filled = [], decode.Run.release, step_parts.filled

    def released(run):
        release(run)
        freed.extend(x.is_deleted() for x in jax.tree.leaves(run.cache))

    def first_of_all(*how):
        assert freed and all(freed)  # the run's cache would take the place of those that are timed
        return filled(*how)

    monkeypatch.setattr(decode.Run, "release", released)
    monkeypatch.setattr(step_parts, "filled", first_of_all)
    paths = {"report": str(tmp_path / "out"), "out": str(tmp_path / "rows.jsonl")}
    status, out, err = shown(commit="abc", batch=1, check=True, **paths)
    assert status == 0
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    assert rows.read(tmp_path / "rows.jsonl") == written["rows"]
    steps = [row for row in written["rows"] if row["op"] == "decode_loop"]
    names = [f"tiny_{kind}_b1_s26" for kind in ("per_sequence", "stacked")]
    assert [row["case"] for row in steps] == names
    for row in steps:
        assert not set(rows.REQUIRED) - row.keys()
        # The host is not measured without a GPU, and no part is longer than the step.
        assert set(row["parts"]) == {"append", "attention", "matmuls", "sampling"}
        assert (
            abs(sum(row["parts"].values()) - row["ms"]) < 1e-3 and min(row["parts"].values()) >= 0
        )
        assert row["roofline"] is row["kv_roofline"] is None
        assert row["commit"] == "abc" and row["checked"]
    assert {row["op"] for row in written["rows"]} == {"decode_loop"}
    assert "%" not in out and "TB/s" not in out + err
    table = [line for line in out.splitlines() if line.startswith("pallas_attn/")]
    assert [line.split()[4] for line in table] == [line.split()[-1] for line in table] == ["-", "-"]
    assert findings.NO_GPU in out
    assert (tmp_path / "out" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert f"wrote {tmp_path}/out/report.png" in out
    assert all(written["run"][name]["worst"] > 0 for name in findings.WAITS.values())
    assert "from one token of a sequence to the next: median " in out
    assert all(line.startswith("report, ") for line in err.splitlines())
    assert err.count(" s: pallas_attn/") == len(steps)


@pytest.mark.parametrize("share", [0.8, 2.453, None])
@pytest.mark.parametrize("batches", [[1], [256], [1, 8, 64], [1, 2, 8, 32, 64]], ids=str)
def test_the_rates_can_be_read_off_a_report(batches, share):
    """There are numbers beside the axis, and all points and words lie within it, words beside one
    another; where the share of memory's rate is unknown, and where what is read lies in caches.
    """
    rate = {"roofline": share}
    steps = [{"problem": {"batch": n}, "tokens_per_second": 188.0 * n} | rate for n in batches]
    figure = matplotlib.figure.Figure((10, 4.2), layout="constrained", dpi=150)
    _, axis = figure.subplots(1, 2)
    findings._draw_rates(axis, steps)
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure).draw()
    low, high = axis.get_ylim()
    ticks = [tick for tick in axis.yaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    seen = [tick.label1.get_text() for tick in ticks]
    assert seen and all(re.fullmatch(r"[\d,]+", text) for text in seen)
    drawn = [y for line in axis.lines for y in line.get_ydata()]
    assert len(drawn) == len(batches) * (1 if share is None else 2)
    assert all(low < y < high for y in drawn)
    within = axis.get_window_extent()
    boxes = [text.get_window_extent() for text in axis.texts]
    for n, box in enumerate(boxes):
        assert within.x0 < box.x0 and box.x1 < within.x1 and within.y0 < box.y0
        assert not any(box.overlaps(other) for other in boxes[:n])


def test_a_wrong_decode_is_not_measured(monkeypatch):
    monkeypatch.setattr(check, "_ROUNDINGS", 0)
    monkeypatch.setattr(report, "_compile", lambda *_: None)
    subject = report.Subject("small", *small(), options(cache="stacked"), 20)
    with pytest.raises(ValueError, match="report: the stacked cache decodes wrongly, nothing"):
        report.prepare(subject, [2])
