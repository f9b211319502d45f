"""run.py as a person meets it: what it prints, and its exit status."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def run(*arguments):
    """(exit status, standard output, standard error) on a machine without a GPU."""
    done = subprocess.run(
        [sys.executable, "run.py", *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=110,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_demo_prints_a_parity_table_and_holds():
    status, out, error = run("--flagfile=configs/demo.cfg")
    assert status == 0, error
    lines = out.splitlines()
    assert lines[0].startswith("jax ") and lines[0].endswith("x cpu")
    rows = [line for line in lines if " reference " in line]
    operations = ["flash_attention", "its gradients", *["append_kv"] * 3, *["decode_attention"] * 3]
    assert [row[:18].strip() for row in rows] == operations
    assert all(float(row.split()[-2]) <= float(row.split()[-1]) for row in rows)
    assert lines[-1] == "every operation is within its budget"


def test_a_row_that_cannot_run_is_said_and_fails():
    status, out, _ = run("--implementation=sm90")
    assert status == 1
    assert out.count("cannot run") == 8
    assert "sm90: it needs an NVIDIA GPU and the default device is none" in out
    assert out.splitlines()[-1] == "8 rows did not hold"


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--task=dance", "flag --task=dance: value should be one of <parity|bench|tune>"),
        (
            "--implementation=cudnn",
            "flag --implementation=cudnn: value should be one of <sm90|sm80|reference>",
        ),
        ("--seed=-1", "flag --seed=-1: -1 is not a non-negative integer"),
        ("--nosuch=1", "Unknown command line flag 'nosuch'"),
        ("extra", "run.py takes flags only, got 'extra'"),
        (
            "--task=bench",
            "a benchmark times a GPU and jax found none; see python run.py for what runs here",
        ),
    ],
)
def test_a_wrong_value_is_one_line_that_says_what_to_do(flag, line):
    assert run(flag) == (2, "", f"{line}; see python run.py --help\n")


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/[bt]*.cfg")), ids=lambda path: path.stem)
def test_every_flagfile_gets_as_far_as_the_gpu(path):
    """Flags, cases and peers are looked at before the machine is."""
    status, out, error = run(f"--flagfile={path.relative_to(ROOT)}")
    assert (status, out) == (2, "") and "times a GPU and jax found none" in error


def test_help_names_every_flag_of_its_own():
    status, out, error = run("--help")
    assert "Traceback" not in out + error and "python run.py" in out
    assert status in (0, 1)  # absl's choice
    for name in ("task", "implementation", "seed", "dtype", "op", "cases", "out", "plot"):
        assert f"--{name}" in out or f"--[no]{name}" in out
