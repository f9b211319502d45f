"""Programs that one process compiles and another runs (docs/recipes/first_call.md)."""

import os
import subprocess
import sys

import pytest

from tests.support import saved_program


def process(what, way, folder, platform):
    environment = os.environ | {"JAX_PLATFORMS": platform}
    if way != "cache":
        environment |= {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    else:
        environment |= {
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    command = [sys.executable, "-m", "tests.support.saved_program", what, way, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("way", saved_program.WAYS)
def test_another_process_runs_what_one_has_saved(way, tmp_path):
    """The same bits as where it was compiled."""
    process("save", way, tmp_path, "cpu")
    process("run", way, tmp_path, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("way", saved_program.WAYS)
def test_another_process_runs_saved_kernels(way, tmp_path):
    process("save", way, tmp_path, "cuda")
    process("run", way, tmp_path, "cuda")
