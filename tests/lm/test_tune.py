"""`pallas-attn tune`: which Configs are tried, which is kept, and the processes that run them."""

import json

import jax
import jax.numpy as jnp
import pytest

import pallas_attn as pa
from pallas_attn import tuning
from pallas_attn._call import config as _config
from pallas_attn._call import device
from pallas_lm import gpu_check, machine, tune
from pallas_lm.tune import Call, Result, Settings
from tests.support import subjects

FORWARD = Call("forward", (1, 256, 2, 1, 64, 256), Settings())
INTERPRETED = next(row for row in subjects.ROWS if row.name == "interpreted")


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
        ({"shape": ("1,64,8,3,64",)}, "N a multiple of K"),
        ({"shape": ("1,64,8,2,64,32",), "op": "prefill"}, "T up to S"),
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
    assert choice_of(Call(kind, shape, Settings())).kernel == kernel


# ---- the search ----------------------------------------------------------------------------------


def gains(gain):
    """A timer that says of fields by how much they are faster."""

    def measure(fields, turns):
        return Result(fields, "ok", gain(fields), 100 / gain(fields), 100.0)

    return measure


def kept(measure):
    """The Config that is kept, and all that was timed."""
    tried = []

    def recorded(fields, turns):
        tried.append((fields, turns))
        return measure(fields, turns)

    return tune.search(choice_of(), recorded), tried


GOOD = {"warpgroups": 4, "block_kv": 64, "grid": 78}


def test_the_best_of_each_field_are_tried_in_pairs():
    """A third field is not worth one with the second."""
    best, tried = kept(gains(lambda fields: 1 + 0.1 * len(GOOD.items() & fields.items())))
    assert len(GOOD.items() & best.fields.items()) == 2 and best.gain == pytest.approx(1.2)
    pairs = [fields for fields, _ in tried if len(GOOD.items() & fields.items()) == 2]
    assert len(pairs) == 3 + 1 and tried[-1] == (best.fields, tune.TURNS_OF_THE_BEST)


@pytest.mark.parametrize("gain", [0.9, 1.0, 1.05])
def test_less_than_5_percent_is_not_kept(gain):
    assert kept(gains(lambda fields: gain))[0] is None


def test_the_best_is_timed_again():
    """Luck is over by then."""

    def measure(fields, turns):
        return gains(lambda fields: 1.2 if turns == tune.TURNS else 1.04)(fields, turns)

    best, tried = kept(measure)
    assert best is None and [turns for _, turns in tried].count(tune.TURNS_OF_THE_BEST) == 1


def test_what_is_wrong_is_not_kept():
    assert kept(lambda fields, turns: Result(fields, "wrong", 2.0))[0] is None


def test_a_gain_is_that_of_three_of_four_turns():
    pairs = [(1.0, 2.0), (1.0, 1.5), (1.0, 1.1), (1.0, 0.9)]
    result = tune.judged({}, pairs)
    assert (result.gain, result.microseconds, result.default_microseconds) == (1.1, 1.0, 1.3)


# ---- results -------------------------------------------------------------------------------------


def of_the_reference(kind):
    """The default's results, and those in float32."""
    call = FORWARD._replace(kind=kind, settings=Settings(implementation="reference"))
    return [
        function(*arguments) for function, arguments in (call.prepared(), call.prepared(exact=True))
    ]


@pytest.mark.parametrize("kind", ["forward", "backward", "decode", "prefill"])
def test_results_agree_up_to_rounding(kind):
    expected, exact = of_the_reference(kind)
    assert tune.complaint(expected, expected, exact) is None
    near = [(x.astype(jnp.float32) * (1 + 2**-8)).astype(x.dtype) for x in expected]
    assert tune.complaint(near, expected, exact) is None
    assert {x.dtype for x in exact} == {jnp.dtype("float32")}
    for n, x in enumerate(expected):
        for spot in (jnp.s_[:, 200:], jnp.s_[0, 255, 0]):
            for wrong in (0.0, jnp.nan):
                others = [*expected]
                others[n] = x.at[spot].set(wrong)
                said = tune.complaint(others, expected, exact)
                assert f"of result {n} is off by" in said, (n, spot, wrong)


@pytest.mark.guards
@pytest.mark.usefixtures("programs_in_numpy")
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_config_is_run_beside_the_default(kind, monkeypatch):
    call, asked = Call(kind, (1, 64, 2, 1, 64, 64), Settings()), []
    monkeypatch.setattr(
        gpu_check, "microseconds", lambda run, arrays, calls: asked.append((run, calls)) or 10.0
    )
    with INTERPRETED.active():
        (choice,) = call.choices()
        fields = tuning.singles(choice)[0]
        with _config.watched() as seen:
            result = tune.timed(call, choice.kernel, fields, 4)
        assert result == Result(fields, "ok", 1.0, 10.0, 10.0)
        configs = [x.config for x in seen if x.kernel == choice.kernel]
        assert {*configs} == {choice.config, tuning.changed(choice.config, fields)}
        (default, _), *turns = asked
        assert [run is default for run, _ in turns] == [True, False, False, True] * 2
        assert {calls for _, calls in turns} == {1000}
        monkeypatch.setattr(tune, "complaint", lambda *some: f"{len(some)} are off")
        wrong = tune.timed(call, choice.kernel, fields, 4)
        assert (wrong.verdict, wrong.note) == ("wrong", "3 are off")


# ---- the command ---------------------------------------------------------------------------------


def test_a_process_that_cannot_begin_says_why():
    """This one has no GPU, and so no kernel to time."""
    result = tune.measured(FORWARD, "flash_fwd_sm90", {"grid": 78}, 8)
    assert result.verdict == "failed" and "StopIteration" in result.note, result.note
    hung = tune.measured(FORWARD._replace(settings=Settings(limit=0)), "", {"grid": 78}, 8)
    assert hung == Result({"grid": 78}, "hung", note="no answer within 0 s")


def test_a_process_is_asked_for_one_config(monkeypatch, capsys):
    """It keeps its programs where this one does."""
    made, folders = [], []
    monkeypatch.setattr(machine, "keep_programs", folders.append)
    monkeypatch.setattr(tune, "timed", lambda *asked: made.append(asked) or Result({}, "ok", 1.5))

    def answer(process, limit):
        assert process[:-1] == gpu_check.command(3, "tune") and limit == 7
        tune.work(process[-1:])
        return json.loads(capsys.readouterr().out), "ok", ""

    monkeypatch.setattr(gpu_check, "answer", answer)
    call = FORWARD._replace(settings=Settings(shape=[], limit=7, gpu=3))
    assert tune.measured(call, "kernel", {"grid": 78}, 8) == Result({}, "ok", 1.5)
    assert made == [(call, "kernel", {"grid": 78}, 8)]
    assert folders == [jax.config.jax_compilation_cache_dir]


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(pa, "gpu_generation", lambda: "sm90")
    with device.assume("sm90"):
        yield


def told(monkeypatch, path, result, as_json=False):
    """The status of a command to which this is the result of each Config, and what it said."""
    said = []
    monkeypatch.setattr(tune, "measured", lambda call, kernel, *asked: result(*asked))
    status = tune.run(Settings(shape=("1,256,2,1,64",)), str(path), said.append, as_json)
    return status, said


@pytest.mark.usefixtures("on_hopper")
def test_the_faster_config_is_kept_and_read(monkeypatch, tmp_path):
    path = tmp_path / "tuned.json"
    fast = gains(lambda fields: 2.0 if fields.get("block_kv") == 32 else 1.0)
    status, said = told(monkeypatch, path, fast)
    assert status == 0 and said[-1].startswith("1 of 1 kernels have a faster Config")
    with pa.tuned(path):
        assert choice_of().config.block_kv == 32
    assert choice_of().config.block_kv != 32
    status, (report,) = told(monkeypatch, path, gains(lambda fields: 1.0), as_json=True)
    (row,) = json.loads(report)["kernels"]
    assert row["kept"] is None and row["kernel"] == "flash_fwd_sm90" and len(row["tried"]) > 10
    assert status == 0 and not tuning.read(path).entries  # it is not faster any more


@pytest.mark.usefixtures("on_hopper")
def test_a_default_without_a_time_is_status_1(monkeypatch, tmp_path):
    status, said = told(
        monkeypatch, tmp_path / "x", lambda fields, turns: Result(fields, "hung", note="1 s")
    )
    assert status == 1 and not [*tmp_path.iterdir()] and "hung     the default: 1 s" in said[2]


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
        assert said[-1].endswith("nothing was timed") and "flash_bwd_sm80: Config(" in said[2]
    with pytest.raises(ValueError, match="^implementation: the reference has no Configs"):
        tune.run(Settings(implementation="reference"), None, said.append, as_json)
    assert jax.default_backend() == "cpu"
