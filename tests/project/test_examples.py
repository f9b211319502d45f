"""examples/: each program runs, asserts its own results, and fits a page."""

import pathlib
import runpy
import subprocess
import sys

import jax
import pytest

EXAMPLES = sorted((pathlib.Path(__file__).parents[2] / "examples").glob("*.py"))


def test_the_examples_are_found():
    assert len(EXAMPLES) == 8


def test_the_kernel_to_learn_from_runs():
    """In a process of its own: tests of kernels patch the interpreter of theirs."""
    path = next(path for path in EXAMPLES if path.stem == "one_kernel")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 1 < len(done.stdout.splitlines()) < 10


@pytest.mark.parametrize(
    "path", [x for x in EXAMPLES if x.stem != "one_kernel"], ids=lambda path: path.stem
)
def test_example_runs(path, capsys):
    """With jax's own settings, as for a user: the suite's are stricter."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        precision = jax.config.jax_default_matmul_precision
        try:
            runpy.run_path(str(path), run_name="__main__")
        finally:
            jax.config.update("jax_default_matmul_precision", precision)
    assert 1 < len(capsys.readouterr().out.splitlines()) < 10


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_fits_a_page(path):
    most = 150 if path.stem == "one_kernel" else 120  # a whole kernel takes a page and a half
    assert 60 <= len(path.read_text().splitlines()) <= most
