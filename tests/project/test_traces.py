"""How much of the package a reader has to know for one call: the functions that a warm call runs,
and the files that the plain forward consists of (tests/support/call_trace.py).
"""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.support import call_trace

# Functions and files of a call; "gradients" are those of a plain forward and backward.
MOST = {"forward": (130, 17), "decode": (116, 23), "append": (60, 16), "prefill": (147, 25)}
MOST |= {"gradients": (293, 33)}
MOST_KERNEL_FILES = 6  # files of these in kernels/, beside lang/ and mma/
MOST_LOADED_LINES = 4200

_KERNEL_FILES = """
import sys
from tests.support import call_trace
call_trace.forward()
names = [name for name in sys.modules if name.startswith("pallas_attn.kernels")]
print(*(sys.modules[name].__file__ for name in names), sep="\\n")
"""


@pytest.fixture(scope="module")
def traces():
    return {name: call() for name, call in call_trace.CALLS.items()}


@pytest.mark.parametrize("name", MOST)
def test_functions_and_files_of_a_call(traces, name):
    """`python -m tests.support.call_trace` lists them."""
    (functions, files), called = MOST[name], traces[name]
    assert len(called.functions) <= functions, called.files
    assert len(called.files) <= files, list(called.files)


def test_kernel_files_of_a_forward(traces):
    """The kernel's own files and those of attention/. Layouts, loads and stores (lang/) and matmuls
    (mma/) do what their names say, and are read as one reads a library.
    """
    libraries = ("kernels/lang/", "kernels/mma/")
    files = [name for name in traces["forward"].kernel_files if not name.startswith(libraries)]
    assert len(files) <= MOST_KERNEL_FILES, files


def test_lines_that_the_forward_loads():
    """All files of kernels/ that a plain call loads, with what chooses its Config. A special case
    is loaded where a call needs it.
    """
    environment = os.environ | {"PYTHONPATH": str(call_trace.ROOT.parent)}
    command = [sys.executable, "-c", _KERNEL_FILES]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    files = [pathlib.Path(name) for name in done.stdout.split()]
    lines = {str(path): len(path.read_text().splitlines()) for path in files}
    assert sum(lines.values()) <= MOST_LOADED_LINES, lines
