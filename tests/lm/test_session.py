"""A session: text, JSON and status lines, Ctrl-C, and the report."""

import io
import json
import re
import signal

import jax
import pytest

from benchmarks import decode_loop, rows
from pallas_lm import decode, decode_check, session
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


def test_a_report_has_a_row_for_each_step(tmp_path, monkeypatch):
    freed, release, ours = [], decode.Run.release, decode_loop.our_chunk

    def released(run):
        release(run)
        freed.extend(x.is_deleted() for x in jax.tree.leaves(run.cache))

    def first_of_all(*how):
        assert freed and all(freed)  # the run's cache would take the place of those that are timed
        return ours(*how)

    monkeypatch.setattr(decode.Run, "release", released)
    monkeypatch.setattr(decode_loop, "our_chunk", first_of_all)
    paths = {"report": str(tmp_path / "out"), "out": str(tmp_path / "rows.jsonl")}
    status, out, err = shown(commit="abc", batch=1, check=True, **paths)
    assert status == 0
    written = json.loads((tmp_path / "out" / "report.json").read_text())
    assert rows.read(tmp_path / "rows.jsonl") == written["rows"]
    names = [f"tiny_{kind}_b1_s26" for kind in ("per_sequence", "stacked")]
    assert [row["case"] for row in written["rows"]] == names
    for row in written["rows"]:
        assert not set(rows.REQUIRED) - row.keys()
        assert row["roofline"] is None  # memory is not measured without a GPU
        assert (row["op"], row["commit"], row["checked"]) == ("decode_loop", "abc", True)
    assert "%" not in out and "TB/s" not in out + err
    table = [line for line in out.splitlines() if line.startswith("pallas_attn/")]
    assert [line.split()[-1] for line in table] == ["-", "-"]
    assert decode_loop.NO_GPU in out and f"wrote {tmp_path}/out/report.json" in out
    assert all(written["run"][name]["worst"] > 0 for name in decode_loop.WAITS.values())
    assert "from one token of a sequence to the next: median " in out
    assert all(line.startswith("report, ") for line in err.splitlines())
    assert err.count(" s: pallas_attn/") == len(names)


def test_a_wrong_decode_is_not_measured(monkeypatch):
    monkeypatch.setattr(decode_check, "_ROUNDINGS", 0)
    subject = decode_loop.Subject("small", *small(), options(cache="stacked"), 20)
    with pytest.raises(ValueError, match="report: the stacked cache decodes wrongly, nothing"):
        list(decode_loop._measure(subject, [2]))
