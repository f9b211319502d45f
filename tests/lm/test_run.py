"""run.py as a person meets it: what it prints, and its exit status."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from absl.testing import flagsaver

from pallas_lm import gpu_check_cases
from pallas_lm.cli import driver
from pallas_lm.cli import flags as driver_flags
from tests.lm import witness

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

ROOT = pathlib.Path(__file__).parents[2]


# XLA's flags are those of conftest.py: half of a short run is XLA optimising what runs once, and
# what the tests of this process have compiled is read.
CPU = os.environ | {"JAX_PLATFORMS": "cpu"}


def run(*arguments, stdin=""):
    """(exit status, standard output, standard error) on a machine without a GPU."""
    done = subprocess.run(
        [sys.executable, "run.py", *arguments],
        cwd=ROOT,
        env=CPU,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def called(capsys, monkeypatch):
    """The same without a process: what takes one is to start it."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["run.py"])

    def call(*arguments):
        with flagsaver.flagsaver():
            status = driver.main(["run.py", *arguments])
        return status, *capsys.readouterr()

    return call


# ---- decode -------------------------------------------------------------------------------------


def test_the_demo_prints_text_and_is_checked():
    status, out, error = run("--max_new_tokens=60", "--check")
    assert status == 0, error
    text, table = out.split("6 sequences, 360 tokens in ")
    parts = text.split(" of 6 ---\n")
    assert len(parts) == 7 and parts[1].startswith("ROMEO:\n")
    assert parts[0].splitlines()[0] == (
        "A toy model of Shakespeare's plays (1.8 million numbers) continues 6 prompts; here "
        "the jax.numpy reference runs, on an NVIDIA GPU the kernels do."
    )
    words = [word.strip(".,:;!?'-").lower() for word in text.split()]
    common = {"the", "and", "to", "of", "my", "i", "is", "that", "a", "in", "you", "not", "be"}
    assert sum(word in common for word in words) > len(words) / 8  # it is English
    assert table.splitlines()[1].startswith("likeliest: ") and "budget: " in table.splitlines()[1]
    rows = [line.split() for line in table.splitlines()[3:-1]]
    assert [row[:4] for row in rows] == [[str(n), "60", "60", "0"] for n in range(1, 7)]
    assert table.splitlines()[0].endswith(" on cpu, reference, float32")
    assert all(float(row[4]) <= float(row[6]) for row in rows)
    assert out.splitlines()[-1] == (
        "every step is the reference's: the likeliest token, and logits within the budget"
    )


@pytest.mark.parametrize("how", ["a file", "standard input"])
def test_a_line_is_a_prompt(called, monkeypatch, tmp_path, how):
    """Ended by a new line, and by nothing else that Python takes for the end of a line."""
    path = tmp_path / "prompts.txt"
    path.write_bytes("ROMEO:\\nO\n\nThe\u2028sea\r\n\x0ca\x85\n".encode())
    with path.open(encoding="ascii") as file:
        monkeypatch.setattr(sys, "stdin", file)
        flag = f"--prompt_file={'-' if how == 'standard input' else path}"
        status, out, error = called(flag, "--max_new_tokens=2", "--json")
    assert status == 0, error
    lines = [json.loads(line) for line in out.splitlines()]
    sequences = [line["sequence"] for line in lines if "sequence" in line]
    assert [x["prompt"] for x in sequences] == ["ROMEO:\nO", "The\u2028sea", "\x0ca\x85"]
    assert [x["number"] for x in sequences] == [1, 2, 3]


def test_a_stop_is_a_text(called):
    """It is left out, in text and in JSON, where tokens up to its end have log-probabilities."""
    flags = ["--prompt=The sea", "--max_new_tokens=20", r"--stop=\n", "--stop=of the"]
    status, out, error = called(*flags)
    assert status == 0 and out.startswith("--- 1 of 1 ---\nThe seal \n\n1 sequence, 8 tokens"), (
        error
    )
    status, out, _ = called(*flags, "--json", "--logprobs", "--chunk=1")
    facts = json.loads(out.splitlines()[0])["sequence"]
    assert status == 0 and (facts["text"], facts["ended"]) == ("l ", "stop")
    assert bytes(facts["tokens"]) == b"l of the" and len(facts["logprobs"]) == 8
    assert all(x <= 0 for x in facts["logprobs"])


def test_control_c_ends_with_what_was_generated():
    command = [sys.executable, "-u", "run.py", "--prompt=ROMEO:", "--max_new_tokens=500"]
    command += ["--chunk=2", "--batch=1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A process that a shell starts in the background ignores Ctrl-C, and so would its own.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        started = subprocess.Popen(command, cwd=ROOT, env=CPU, **pipes)
    finally:
        signal.signal(signal.SIGINT, before)
    with started as process:
        assert process.stdout.readline() == "--- 1 of 1 ---\n"
        process.send_signal(signal.SIGINT)
        out, error = process.stdout.read(), process.stderr.read()
    assert (process.returncode, error) == (130, "")
    assert "ROMEO:" in out and out.splitlines()[-1].endswith("interrupted, 1 not ended")


def _broken(folder, how):
    config = witness.CONFIGS["llama3"] | {"vocab_size": 256, "tokenizer": "bytes"}
    tensors = witness.tensors_of(config, np.random.default_rng(0))
    if how == "shape":
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    if how == "architecture":
        config["model_type"] = "gpt2"
    witness.write(folder, config, tensors)
    if how == "truncated":
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    return folder


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("truncated", "/model.safetensors: header: expected data_offsets to the end, "),
        ("shape", "model.norm.weight: expected shape [32], as config.json has it, got [31]"),
        ("architecture", "/config.json: model_type: expected one of llama, mistral, "),
    ],
)
def test_a_broken_checkpoint_is_one_line_and_exit_status_2(called, tmp_path, how, words):
    status, out, error = called(f"--checkpoint={_broken(tmp_path, how)}", "--prompt=a")
    assert (status, out, error.count("\n")) == (2, "", 1)
    assert words in error and error.endswith("; see python run.py --help\n")


# ---- every flagfile, as far as this machine goes ------------------------------------------------


def test_train_tiny_leaves_a_model_that_decodes(called, tmp_path):
    text = tmp_path / "text"
    text.write_bytes(b"To be, or not to be. " * 80)
    flags = [f"--text={text}", f"--out={tmp_path}/model", "--steps=2", "--batch=1", "--context=8"]
    flags.insert(0, "--flagfile=configs/train_tiny.cfg")
    status, out, error = called(*flags)
    assert status == 0, error
    assert out.splitlines()[-2] == "trained on cpu, reference, float32"
    folder = f"{tmp_path}/model"
    assert out.splitlines()[-1] == f"the model is in {folder}: python run.py --checkpoint={folder}"
    status, out, error = called(f"--checkpoint={folder}", "--prompt=To", "--max_new_tokens=3")
    assert status == 0 and "1 sequence, 3 tokens in " in out, error
    # It was trained on windows of eight bytes, and is for texts of as many.
    status, out, error = called(f"--checkpoint={folder}", "--prompt=To be, or")
    assert status == 2 and "prompt 1: 9 tokens do not fit in a capacity of 8" in error
    # A model is not written over unasked.
    status, out, error = called(*flags)
    assert (status, out) == (2, "") and error.startswith(
        f"out: {folder} holds config.json; name another folder, or say --overwrite"
    )


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/decode_*.cfg")), ids=lambda p: p.stem)
def test_a_throughput_run_works_with_a_model_of_a_size_for_this_machine(called, path):
    small = ["--model=tiny", "--random_prompts=3", "--prompt_length=9", "--max_new_tokens=4"]
    status, out, error = called(f"--flagfile={path.relative_to(ROOT)}", *small)
    assert status == 0 and out.startswith("3 sequences, 12 tokens in "), error


@pytest.mark.parametrize("check", gpu_check_cases.CHECKS, ids=lambda x: f"{x.operation}, {x.case}")
def test_the_cases_of_check_hold(check):
    row = gpu_check_cases.row_of(check, gpu_check_cases.How("reference", "bfloat16", 0))
    assert row.held and row.implementation == "reference", row
    refused = gpu_check_cases.row_of(check, gpu_check_cases.How("sm80", "bfloat16", 0))
    assert not refused.held
    assert "it needs an NVIDIA GPU, which the default device is not" in refused.note


def test_tune_without_a_gpu_says_what_it_would_time(called):
    status, out, error = called("tune", "--shape=1,256,2,1,64", "--mask=window:64")
    assert (status, error) == (2, "") and out.endswith("nothing was timed\n")
    assert out.startswith("would time  forward: B 1, T 256, N 2, K 1, H 64, S 256, window:64")
    assert called("tune", "--shape=1,256", "--json")[2].startswith("shape: expected B,T,N,K,H")


def test_check_is_a_task_by_its_name_alone(called):
    status, out, error = called("check", "--seed=3")
    assert (status, error) == (2, "") and out.endswith("nothing was checked\n")
    assert called("check", "--op=append")[2].startswith("op: --task=check does nothing with it")


PAGES = (
    "page_size: expected none, since only cache='paged' has pages, got 8; give it as well, or "
    "leave page_size out; see python run.py --help\n"
)
WRONG = [
    ("--task=dance",
     "flag --task=dance: value should be one of <decode|train|check|tune|bench>"),
    ("--implementation=cudnn",
     "flag --implementation=cudnn: value should be one of <sm90|sm80|sm100|reference>"),
    ("--seed=-1", "flag --seed=-1: -1 is not an integer in the range [0, 4294967295]"),
    ("--op=append", "op: --task=decode does nothing with it"),
    ("--report=/dev/null/here", "report: /dev/null/here: Not a directory"),
    ("--nosuch=1", "Unknown command line flag 'nosuch'; see"),
    ("--helpfull", "Unknown command line flag 'helpfull'; did you mean --help?; see"),
    ("--max_new_token=3",
     "Unknown command line flag 'max_new_token'; did you mean --max_new_tokens"),
    ("--check=7", "flag --check=7: expected --check or --nocheck, without a value; see"),
    ("--max_new_tokens=0", "max_new_tokens: expected at least 1, got 0; see"),
    ("--chunk=65537", "chunk: expected at most 65536, got 65537; see"),
    ("--stop=", "stop: expected a text or a list of texts, none of them empty, got ('',); tokens "),
    ("--mesh=", "mesh: expected a value after --mesh=; leave the flag out for its default"),
    ("--mesh=cp:2", "mesh: expected tp:N, N at least 1, got 'cp:2'; see"),
    ("--checkpoint=org/name", "checkpoint: expected a folder with config.json, weights and "),
    ("--report=", "report: expected a value after --report=; leave the flag out for its default"),
    ("--task=train --text=LICENSE --out=", "out: expected a value after --out=; leave the flag"),
    ("--mesh=tp:2 --coordinator=nope --processes=2",
     "coordinator: expected HOST:PORT, such as localhost:1234, got 'nope'"),
    ("--mesh=tp:2 --coordinator=localhost:99999",
     "coordinator: expected HOST:PORT, such as localhost:1234, got 'localhost:99999'"),
    ("--mesh=tp:2 --coordinator=no.such.host.invalid:1 --processes=2 --process=1",
     "coordinator: no.such.host.invalid:1: "),
    ("extra",
     "expected flags, or one of decode, train, check, tune, bench as the first "
     "argument, got 'extra'"),
    ("--prompt=", "prompt 1 is empty"),
    (f"--prompt={'a' * 513}", "prompt 1: 513 tokens do not fit in a capacity of 512"),
    ("--prompt_file=configs", "prompt_file: configs: Is a directory"),
    ("--prompt_file=/bin/true", "prompt_file: /bin/true: 'utf-8' codec can't decode byte "),
    ("--flagfile=/bin/true", "flagfile: not a file of text"),
    ("--flagfile=configs", "Unable to open flagfile: [Errno 21] Is a directory: 'configs'"),
    ("--stop_ids=a", "stop_ids: expected numbers, got ['a']"),
    ("--temperature=-1", "temperature: expected at least 0, got -1.0"),
    ("--batch=1048577",
     "flag --batch=1048577: 1048577 is not an integer in the range [1, 1048576]"),
    ("--task=train", "--task=train needs --text=FILE and --out=FOLDER"),
    ("--task=train --text=LICENSE --out=/dev/null/x --batch=1000000",
     "batch: 1000000 windows of 512 bytes take more than "),
    ("--task=train --text=LICENSE --out=/dev/null/x", "out: /dev/null/x: Not a directory"),
    ("--task=bench",
     "a benchmark times a GPU and jax found none; see python run.py for what runs here"),
    # Flags that another one leaves nothing to do.
    ("--checkpoint=x --model=tiny", "model: --checkpoint is the model; give one of the two"),
    ("--page_size=8", PAGES),
    ("--pages=8 --cache=stacked",
     "pages: expected none, since only cache='paged' has pages, got 8; give it as well, or"),
    ("--prompt_length=9", "prompt_length: only --random_prompts draws prompts of a length"),
    ("--random_prompts=1 --prompt=a",
     "prompt: --random_prompts takes no other prompts; give one of the two"),
    ("--prompt=a --prompt_file=-", "prompt_file: --prompt is given; give one of the two"),
    ("--top_k=4",
     "top_k: expected none, since nothing is drawn without a temperature, got 4; give one as"),
    ("--top_p=0.4 --temperature=0",
     "top_p: expected none, since nothing is drawn without a temperature, got 0.4; give one as"),
    ("--drafts=4",
     "drafts: expected none, since no step checks drafts without draft='ngram', got 4; give it"),
    ("--logprobs", "logprobs: only --json shows them"),
    ("--random_prompts=1 --chat", "chat: --random_prompts are no messages"),
    ("--chat", "prompt 1: chat: the model's folder has no chat template, neither chat_template."),
    ("--prefill=9 --prefill_chunk=9",
     "prefill: expected none, since prefill_chunk says how many rows of prompts a step takes, "),
    ("--commit=abc", "commit: its rows are those of a --report=FOLDER"),
    ("--out=x", "out: its rows are those of a --report=FOLDER"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "line"), WRONG, ids=lambda x: x[:40])
def test_a_wrong_value_is_one_line_that_says_what_to_do(called, words, line):
    status, out, error = called(*words.split())
    assert (status, out, error.count("\n")) == (2, "", 1)
    assert error.startswith(line) and error.endswith("; see python run.py --help\n")


def test_a_wrong_value_of_a_process_is_exit_status_2():
    assert run("--page_size=8") == (2, "", PAGES)


@pytest.mark.parametrize("platform", ["tpu", "nope"])
def test_a_platform_without_a_device_is_one_line(platform):
    status, said = shell("$RUN --prompt=a", JAX_PLATFORMS=platform)
    assert (status, said.count("\n")) == (2, 1)
    assert said.startswith(f"JAX_PLATFORMS={platform}: jax finds no such device here")
    assert said.endswith("; leave it out, or say cpu; see python run.py --help\n")


def test_a_flagfile_may_say_more_than_is_used(called, tmp_path):
    path = tmp_path / "x.cfg"
    path.write_text("--page_size=8\n--model=tiny\n--top_k=3\n")
    status, out, error = called(f"--flagfile={path}", "--prompt=a", "--max_new_tokens=2")
    assert status == 0 and "1 sequence, 2 tokens in " in out, error


FOR_A_GPU = [*ROOT.glob("configs/bench_*.cfg")]


@pytest.mark.parametrize("path", FOR_A_GPU, ids=lambda path: path.stem)
def test_every_flagfile_for_a_gpu_gets_as_far_as_the_gpu(called, path):
    """Flags, cases and peers are looked at before the machine is."""
    status, out, error = called(f"--flagfile={path.relative_to(ROOT)}")
    assert (status, out) == (2, "") and "times a GPU and jax found none" in error


def test_help_names_every_flag_of_its_own(called):
    status, out, error = called("--help")
    assert (status, error) == (0, "") and "python run.py --task=bench" in out
    for name in driver_flags.NAMES:
        assert f"--{name}=" in out or f"--[no]{name}" in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("arguments", [("check", "--help"), ("--task=check", "-h")])
def test_help_of_a_task_has_its_flags_alone(called, arguments):
    status, out, error = called(*arguments)
    assert (status, error) == (0, "") and out.startswith("python run.py check takes these flags")
    for flag in driver_flags.FLAGS:
        named = f"  --{flag.name}=" in out or f"  --[no]{flag.name}" in out
        assert named == ("check" in flag.tasks), flag.name


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("9 GiB"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory: 9 GiB\n"),
    ],
    ids=repr,
)
def test_no_memory_is_one_line(called, monkeypatch, error):
    def fails():
        raise error

    monkeypatch.setattr(driver, "_train", fails)
    status, out, said = called("--task=train")
    assert (status, out, said.count("\n")) == (2, "", 1)
    assert said.startswith("out of memory: ") and "a smaller --batch takes less; see" in said


def test_what_is_no_fault_of_the_flags_is_a_traceback(called, monkeypatch):
    def fails():
        raise jax.errors.JaxRuntimeError("INTERNAL: no such kernel")

    monkeypatch.setattr(driver, "_train", fails)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no such kernel"):
        called("--task=train")


# ---- the process --------------------------------------------------------------------------------


def shell(line, **environment):
    """(exit status, standard output and error) of a line of a shell in which $RUN is run.py."""
    environment = CPU | {"RUN": f"{sys.executable} run.py"} | environment
    done = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, env=environment, capture_output=True, timeout=600
    )
    return done.returncode, (done.stdout + done.stderr).decode("utf-8", "surrogateescape")


SHORT = "--prompt=a --max_new_tokens=2"


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        (f"$RUN {SHORT} <&- >&- 2>&-", (0,), ""),
        (f"$RUN {SHORT} > /dev/full", (2,), "No space left on device"),
        ("PYTHONIOENCODING=ascii $RUN --prompt=$'\\u20ac' --max_new_tokens=2", (0,), "\\u20ac"),
    ],
)
def test_streams_that_are_closed_or_full_or_of_other_bytes(line, status, words):
    code, said = shell(line)
    assert code in status and words in said and "Traceback" not in said, said
    assert "Exception ignored" not in said


def test_compiled_programs_are_kept_unless_a_flag_says_no(called, monkeypatch):
    asked = []
    monkeypatch.setattr(driver, "_keep_programs", lambda: asked.append("keep"))
    monkeypatch.setattr(driver, "_decode", lambda: 0)
    assert called("--nocompile_cache")[0] == 0 and not asked
    assert called()[0] == 0 and asked == ["keep"]


def test_where_nothing_can_be_written_no_program_is_kept(monkeypatch, tmp_path, capfd):
    """And nothing is said."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        driver._keep_programs()
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert capfd.readouterr() == ("", "")
