"""run.py as a person meets it: what it prints, and its exit status."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests import lm_witness

ROOT = pathlib.Path(__file__).parent.parent


CPU = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
# As in conftest.py: half of a short run is XLA optimising what runs once.
QUICK = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)


def run(*arguments, given="", flags=QUICK):
    """(exit status, standard output, standard error) on a machine without a GPU."""
    done = subprocess.run(
        [sys.executable, "run.py", *arguments],
        cwd=ROOT,
        env=CPU | {"XLA_FLAGS": flags},
        input=given,
        capture_output=True,
        text=True,
        timeout=110,
    )
    return done.returncode, done.stdout, done.stderr


# ---- decode -------------------------------------------------------------------------------------


def test_the_demo_prints_text_and_is_checked():
    status, out, error = run(flags="")
    assert status == 0, error
    text, table = out.split("6 sequences, 1200 tokens in ")
    parts = text.split(" of 6 ---\n")
    assert len(parts) == 7 and parts[1].startswith("ROMEO:\n")
    words = [word.strip(".,:;!?'-").lower() for word in text.split()]
    common = {"the", "and", "to", "of", "my", "i", "is", "that", "a", "in", "you", "not", "be"}
    assert sum(word in common for word in words) > len(words) / 8  # it is English
    rows = [line.split() for line in table.splitlines()[2:-1]]
    assert [row[:4] for row in rows] == [[str(n), "200", "200", "0"] for n in range(6)]
    assert all(float(row[4]) <= float(row[6]) for row in rows)
    assert out.splitlines()[-1].startswith("every step is the reference's")


def test_prompts_come_from_flags_before_a_file_and_standard_input(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("ROMEO:\\nO\n\nThe sea\n")
    found = []
    for arguments, given in (
        ([f"--prompt_file={path}"], ""),
        (["--prompt_file=-"], path.read_text()),
        ([f"--prompt_file={path}", "--prompt=Nurse:", "--prompt=ROMEO:"], ""),
    ):
        status, out, error = run("--max_new_tokens=5", "--json", *arguments, given=given)
        assert status == 0, error
        lines = [json.loads(line) for line in out.splitlines()]
        found.append([line["sequence"]["prompt"] for line in lines if "sequence" in line])
    assert found == [["ROMEO:\nO", "The sea"], ["ROMEO:\nO", "The sea"], ["Nurse:", "ROMEO:"]]


def test_control_c_ends_with_what_was_generated():
    command = [sys.executable, "-u", "run.py", "--prompt=ROMEO:", "--max_new_tokens=500"]
    command += ["--chunk=2", "--batch=1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # What a shell starts in the background ignores Ctrl-C, and so would what we start from there.
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


def test_a_checkpoint_that_a_stranger_wrote_is_decoded_and_checked(tmp_path):
    """Of every family: tests/test_lm_model.py."""
    config = lm_witness.CONFIGS["qwen3"] | {"vocab_size": 256, "tokenizer": "bytes"}
    tensors = lm_witness.tensors_of(config, np.random.default_rng(0))
    folder = lm_witness.write(tmp_path / "qwen3", config, tensors, shards=2)
    flags = [f"--checkpoint={folder}", "--prompt=ab", "--prompt=c", "--check", "--batch=1"]
    status, out, error = run(*flags, "--max_new_tokens=9", "--cache=paged", "--page_size=4")
    assert status == 0, out + error
    assert "2 sequences, 18 tokens in " in out


def _broken(folder, how):
    config = lm_witness.CONFIGS["llama3"] | {"vocab_size": 256, "tokenizer": "bytes"}
    tensors = lm_witness.tensors_of(config, np.random.default_rng(0))
    if how == "shape":
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    if how == "architecture":
        config["model_type"] = "gpt2"
    lm_witness.write(folder, config, tensors)
    if how == "truncated":
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    return folder


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("truncated", "model.safetensors: truncated: lm_head.weight ends at byte "),
        ("shape", "model.norm.weight: expected shape [32], got [31] in "),
        ("architecture", "config.json: expected model_type of ('llama', "),
    ],
)
def test_a_broken_checkpoint_is_one_line_and_exit_status_2(tmp_path, how, words):
    status, out, error = run(f"--checkpoint={_broken(tmp_path, how)}", "--prompt=a")
    assert (status, out, error.count("\n")) == (2, "", 1)
    assert words in error and error.endswith("; see python run.py --help\n")


# ---- every flagfile, as far as this machine goes ------------------------------------------------


def test_train_tiny_leaves_a_model_that_decodes(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(b"To be, or not to be. " * 80)
    flags = [f"--text={text}", f"--out={tmp_path}/model", "--steps=2", "--batch=1", "--context=8"]
    status, out, error = run("--flagfile=configs/train_tiny.cfg", *flags)
    assert status == 0, error
    assert out.splitlines()[-1] == (
        f"the model is in {tmp_path}/model: python run.py --checkpoint={tmp_path}/model"
    )
    status, out, error = run(f"--checkpoint={tmp_path}/model", "--prompt=To", "--max_new_tokens=3")
    assert status == 0 and "1 sequence, 3 tokens in " in out, error


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/decode_*.cfg")), ids=lambda p: p.stem)
def test_a_throughput_run_works_with_a_model_of_a_size_for_this_machine(path):
    small = ["--model=tiny", "--random_prompts=3", "--prompt_length=9", "--max_new_tokens=4"]
    status, out, error = run(f"--flagfile={path.relative_to(ROOT)}", *small)
    assert status == 0 and out.startswith("3 sequences, 12 tokens in "), error


def test_the_parity_table_holds():
    status, out, error = run("--flagfile=configs/parity.cfg")
    assert status == 0, error
    lines = out.splitlines()
    assert lines[0].startswith("jax ") and lines[0].endswith("x cpu")
    rows = [line for line in lines if " reference " in line]
    operations = ["flash_attention", "its gradients", *["append_kv"] * 4, *["decode_attention"] * 3]
    assert [row[:18].strip() for row in rows] == operations
    assert all(float(row.split()[-2]) <= float(row.split()[-1]) for row in rows)
    assert lines[-1] == "every operation is within its budget"


def test_a_row_that_cannot_run_is_said_and_fails():
    status, out, _ = run("--task=parity", "--implementation=sm90")
    assert status == 1
    assert out.count("cannot run") == 9
    assert "sm90: it needs an NVIDIA GPU and the default device is none" in out
    assert out.splitlines()[-1] == "9 rows did not hold"


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        (
            "--task=dance",
            "flag --task=dance: value should be one of <decode|parity|bench|tune|train>",
        ),
        (
            "--implementation=cudnn",
            "flag --implementation=cudnn: value should be one of <sm90|sm80|reference>",
        ),
        ("--seed=-1", "flag --seed=-1: -1 is not an integer in the range [0, 4294967295]"),
        ("--op=append", "op: --task=decode does nothing with it"),
        ("--report=/dev/null/here", "report: /dev/null/here: Not a directory"),
        ("--nosuch=1", "Unknown command line flag 'nosuch'"),
        ("extra", "run.py takes flags only, got 'extra'"),
        ("--prompt=", "prompt 0 is empty"),
        (f"--prompt={'a' * 513}", "prompt 0: 513 tokens do not fit in a capacity of 512"),
        ("--prompt_file=configs", "prompt_file: configs: Is a directory"),
        ("--stop_ids=a", "stop_ids: expected numbers, got ['a']"),
        ("--temperature=-1", "temperature: expected at least 0, got -1.0"),
        ("--task=train", "--task=train needs --text=FILE and --out=FOLDER"),
        (
            "--task=bench",
            "a benchmark times a GPU and jax found none; see python run.py for what runs here",
        ),
    ],
)
def test_a_wrong_value_is_one_line_that_says_what_to_do(flag, line):
    assert run(flag) == (2, "", f"{line}; see python run.py --help\n")


FOR_A_GPU = [*ROOT.glob("configs/bench_*.cfg"), *ROOT.glob("configs/tune_*.cfg")]


@pytest.mark.parametrize("path", FOR_A_GPU, ids=lambda path: path.stem)
def test_every_flagfile_for_a_gpu_gets_as_far_as_the_gpu(path):
    """Flags, cases and peers are looked at before the machine is."""
    status, out, error = run(f"--flagfile={path.relative_to(ROOT)}")
    assert (status, out) == (2, "") and "times a GPU and jax found none" in error


def test_help_names_every_flag_of_its_own():
    status, out, error = run("--help")
    assert "Traceback" not in out + error and "python run.py" in out
    assert status in (0, 1)  # absl's choice
    for name in ("task", "implementation", "seed", "dtype", "op", "cases", "out", "plot", "cache"):
        assert f"--{name}" in out or f"--[no]{name}" in out
