"""`pallas-attn tune`: which Configs are tried, which is kept, and the processes that run them."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import pytest

import pallas_attn as pa
from pallas_attn import tuning
from pallas_attn._call import config as _config
from pallas_attn._call import device
from pallas_lm import gpu_check, tune
from pallas_lm.tune import Call, Result, Settings
from tests.support import subjects

FORWARD = Call("forward", (1, 256, 2, 1, 64, 256), "causal", "bfloat16", None, 0)
INTERPRETED = next(row for row in subjects.ROWS if row.name == "interpreted")
SMALL = (1, 64, 2, 1, 64, 64)


def choice_of(call=FORWARD):
    (choice,) = call.choices("sm90")
    return choice


# ---- calls ---------------------------------------------------------------------------------------


def test_calls_are_those_of_shapes_or_of_models():
    (call,) = tune.calls_of(Settings(shape=("1,4096,32,8,128",)))
    assert call.shape == (1, 4096, 32, 8, 128, 4096) and call.kind == "forward"
    shapes = ("2,64,8,2,64", "2,64,8,2,64,128")
    both = tune.calls_of(Settings("backward", shapes))
    assert [x.kind for x in both] == ["forward", "backward"] * 2
    (call,) = tune.calls_of(Settings("decode", model="qwen2_7b"))
    assert call.shape == (32, 1, 28, 4, 128, 4096)
    assert len(tune.calls_of(Settings())) == 4


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"shape": ("1,2,3",)}, "shape: expected B,T,N,K,H or B,T,N,K,H,S"),
        ({"shape": ("1,64,8,2,64",), "op": "decode"}, "shape: expected B,T,N,K,H,S"),
        ({"shape": ("1,64,8,2,x",)}, "got '1,64,8,2,x'"),
        ({"shape": ("0,64,8,2,64",)}, "got '0,64,8,2,64'"),
        ({"shape": ("1,64,8,3,64",)}, "query heads are a multiple of kv heads"),
        ({"shape": ("1,64,8,2,64,32",), "op": "prefill"}, "among the S of the cache"),
        ({"shape": ("1,64,8,2,64",), "model": "llama2_7b"}, "model: --shape has the sizes"),
        ({"model": "deepseek_v2_lite"}, "model: expected one of llama2_7b, "),
        ({"op": "append"}, "op: tune takes forward, backward, decode, prefill, got 'append'"),
        ({"mask": "window:0"}, "mask: expected full, causal or window:N"),
        ({"mask": "diagonal"}, "mask: expected full, causal or window:N"),
    ],
    ids=str,
)
def test_other_calls_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        tune.calls_of(Settings(**settings))


@pytest.mark.parametrize(
    ("kind", "kernel"),
    [
        ("forward", "flash_fwd_sm90"),
        ("backward", "flash_bwd_sm90"),
        ("decode", "decode_sm90"),
        ("prefill", "prefill_sm90"),
    ],
)
def test_a_call_has_the_kernel_of_its_pass(kind, kernel):
    rows = 1 if kind == "decode" else 64
    shape = (1, rows, 2, 1, 64, 64)
    (choice,) = Call(kind, shape, "causal", "bfloat16", None, 0).choices("sm90")
    assert choice.kernel == kernel


# ---- the search ----------------------------------------------------------------------------------


def timed(gain):
    """A timer that says of a Config by how much it is faster."""

    def measure(config, turns):
        fields, factor = dataclasses.asdict(config), gain(config)
        return Result(fields, "ok", factor, 100 / factor, 100.0)

    return measure


def kept(gain):
    lines = []
    best = tune.search(choice_of(), timed(gain), lines.append)
    return best, lines


def test_the_best_of_a_part_is_where_the_next_begins():
    def gain(config):
        good = config.warpgroups == 1, config.block_kv == 32, config.q_slots == 1
        return 0.9 + 0.1 * sum(good)

    best, lines = kept(gain)
    own = choice_of().config
    assert (own.warpgroups, own.block_kv, own.q_slots) != (1, 32, 1)
    fields = best.config
    assert (fields["warpgroups"], fields["block_kv"], fields["q_slots"]) == (1, 32, 1)
    assert fields["l2_heads"] == own.l2_heads and best.gain == pytest.approx(1.2)
    assert len(lines) > 10 and lines[-1] == best.line()


@pytest.mark.parametrize("gain", [0.9, 1.0, 1.05])
def test_less_than_5_percent_is_not_kept(gain):
    assert kept(lambda config: gain)[0] is None


def test_the_best_is_timed_again():
    """Luck is over by then."""
    counts = []

    def measure(config, turns):
        counts.append(turns)
        return timed(lambda config: 1.2 if turns == tune.TURNS else 1.04)(config, turns)

    assert tune.search(choice_of(), measure, lambda line: None) is None
    assert counts.count(tune.TURNS_OF_THE_BEST) == 1 and counts[-1] == tune.TURNS_OF_THE_BEST


def test_what_is_wrong_is_not_kept():
    def measure(config, turns):
        result = timed(lambda config: 2.0)(config, turns)
        return dataclasses.replace(result, verdict="wrong")

    assert tune.search(choice_of(), measure, lambda line: None) is None


def test_a_gain_is_that_of_three_of_four_turns():
    pairs = [(1.0, 2.0), (1.0, 1.5), (1.0, 1.1), (1.0, 0.9)]
    result = tune.judged({}, pairs)
    assert (result.gain, result.microseconds, result.default_microseconds) == (1.1, 1.0, 1.3)


# ---- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_results_agree_up_to_rounding(kind):
    call = dataclasses.replace(FORWARD, kind=kind, implementation="reference")
    function, arrays = call.prepared()
    expected = function(*arrays)
    allowed = tune.Allowed.of(call)
    assert allowed.complaint(expected, expected) is None
    near = [(x.astype(jnp.float32) * (1 + 2**-8)).astype(x.dtype) for x in expected]
    assert allowed.complaint(near, expected) is None
    for n, x in enumerate(expected):
        for spot in (jnp.s_[:, 200:], jnp.s_[0, 255, 0]):
            for wrong in (0.0, jnp.nan):
                others = [*expected]
                others[n] = x.at[spot].set(wrong)
                assert "off by" in allowed.complaint(others, expected), (n, spot, wrong)


@pytest.mark.guards
@pytest.mark.usefixtures("programs_in_numpy")
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_config_is_run_beside_the_default(kind, monkeypatch):
    call = Call(kind, SMALL, "causal", "bfloat16", None, 0)
    monkeypatch.setattr(gpu_check, "microseconds", lambda run, arrays, calls: 10.0)
    with INTERPRETED.active():
        (choice,) = call.choices()
        bench = tune.Bench(call, choice)
        part = tuning.parts(choice)[0]
        config = tuning.around(choice, choice.config, part)[0]
        with _config.watched() as seen:
            result = bench.measure(config, 3)
        assert {x.config for x in seen if x.kernel == choice.kernel} == {config}
        assert (result.verdict, result.gain, result.note) == ("ok", 1.0, "")
        assert result.config == dataclasses.asdict(config) and bench.calls == 1000
        bench.expected = tuple(x + 1 for x in bench.expected)
        assert bench.measure(config, 3).verdict == "wrong"


def test_a_config_that_cannot_be_lowered_is_refused(monkeypatch):
    bench = object.__new__(tune.Bench)

    def refuse(config):
        raise ValueError("no registers\nat all")

    bench._run = refuse
    result = bench.measure(choice_of().config, 3)
    assert (result.verdict, result.note) == ("refused", "no registers")


# ---- processes -----------------------------------------------------------------------------------

ANSWERS = """
import json, os, sys, time
for line in sys.stdin:
    config, turns = json.loads(line)
    if config["grid"] == 1:
        time.sleep(600)
    if config["grid"] == 2:
        raise ValueError("one is odd")
    print("a word", flush=True)
    note = os.environ["CUDA_VISIBLE_DEVICES"]
    row = {"config": config, "verdict": "ok", "gain": turns, "microseconds": os.getpid()}
    print(json.dumps(row | {"note": note}), flush=True)
"""


def test_a_process_answers_until_one_hangs_or_fails(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    worker = tune.Worker(FORWARD, "flash_fwd_sm90", Settings(limit=20, gpu=3))
    worker.command = [sys.executable, "-c", gpu_check.start(3) + ANSWERS]
    own = choice_of().config
    hangs, fails = (dataclasses.replace(own, grid=grid) for grid in (1, 2))
    try:
        first, second = worker.measure(own, 8), worker.measure(own, 9)
        assert (first.verdict, first.gain, second.gain, first.note) == ("ok", 8, 9, "3")
        assert first.microseconds == second.microseconds  # one process
        failed = worker.measure(fails, 8)
        assert (failed.verdict, failed.note) == ("failed", "exit status 1: ValueError: one is odd")
        worker.limit = 1
        hung = worker.measure(hangs, 8)
        assert (hung.verdict, hung.note) == ("hung", "no answer within 1 s")
        worker.limit = 20
        assert worker.measure(own, 8).microseconds not in (0, first.microseconds)
    finally:
        worker.end()
    assert worker.process is None


def test_a_process_that_cannot_begin_says_why():
    """This one has no GPU, and so no kernel to time."""
    worker = tune.Worker(FORWARD, "flash_fwd_sm90", Settings(limit=100))
    result = worker.measure(choice_of().config, 8)
    assert result.verdict == "failed" and "StopIteration" in result.note, result.note


# ---- the command ---------------------------------------------------------------------------------


class Fast:
    """A worker to which one Config is twice as fast."""

    def __init__(self, call, kernel, settings):
        del call, kernel, settings

    def measure(self, config, turns):
        return timed(lambda config: 2.0 if config.block_kv == 32 else 1.0)(config, turns)

    def end(self):
        pass


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(pa, "gpu_generation", lambda: "sm90")
    with device.assume("sm90"):
        yield


@pytest.mark.usefixtures("on_hopper")
def test_the_faster_config_is_kept_and_read(monkeypatch, tmp_path):
    monkeypatch.setattr(tune, "Worker", Fast)
    settings, path, said = Settings(shape=("1,256,2,1,64",)), tmp_path / "tuned.json", []
    assert tune.run(settings, str(path), said.append, as_json=False) == 0
    assert said[-1].startswith("1 of 1 kernels have a faster Config")
    with pa.tuned(path):
        assert choice_of().config.block_kv == 32
    assert choice_of().config.block_kv != 32
    monkeypatch.setattr(Fast, "measure", lambda *some: timed(lambda config: 1.0)(*some[1:]))
    said.clear()
    assert tune.run(settings, str(path), said.append, as_json=True) == 0
    (report,) = map(json.loads, said)
    (row,) = report["kernels"]
    assert row["kept"] is None and row["kernel"] == "flash_fwd_sm90" and len(row["tried"]) > 10
    assert not tuning.read(path).entries  # the entry is gone: it is not faster any more


@pytest.mark.usefixtures("on_hopper")
def test_a_default_without_a_time_is_status_1(monkeypatch, tmp_path):
    monkeypatch.setattr(tune, "Worker", Fast)
    hung = Result({}, "hung", note="no answer within 1 s")
    monkeypatch.setattr(Fast, "measure", lambda *some: hung)
    settings, path = Settings(shape=("1,256,2,1,64",)), tmp_path / "tuned.json"
    assert tune.run(settings, str(path), lambda line: None, as_json=False) == 1
    assert not path.exists()


@pytest.mark.usefixtures("on_hopper")
def test_another_file_is_refused_before_anything_runs(tmp_path):
    path = tmp_path / "tuned.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="path: expected a file of `pallas-attn tune`"):
        tune.run(Settings(shape=("1,256,2,1,64",)), str(path), lambda line: None, as_json=False)


@pytest.mark.parametrize("as_json", [False, True])
def test_without_a_gpu_it_says_what_it_would_time(as_json):
    said = []
    settings = Settings("backward", ("1,256,2,1,64",), implementation="sm80")
    assert tune.run(settings, None, said.append, as_json) == 2
    if as_json:
        (report,) = map(json.loads, said)
        assert [x["kernel"] for x in report["would_time"]] == ["flash_fwd_sm80", "flash_bwd_sm80"]
        assert all(len(x["configs"]) > 1 for x in report["would_time"])
    else:
        assert said[-1].endswith("nothing was timed") and "flash_bwd_sm80 on sm80" in said[2]
    with pytest.raises(ValueError, match="^implementation: the reference has no Configs"):
        tune.run(Settings(implementation="reference"), None, said.append, as_json)
    assert jax.default_backend() == "cpu"
