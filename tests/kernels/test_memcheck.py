"""Every kernel that writes memory, once, under compute-sanitizer: no access outside of an array.

A process for three tests of a file, so that `-n 8` runs them side by side. Each array is an
allocation of its own there: in XLA's pool an access past one array's end would meet another.
"""

import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tests.support import gpu_cases

ROOT = pathlib.Path(__file__).parents[2]
SANITIZER = shutil.which("compute-sanitizer")
GROUPS = {
    f"{file}-{number}": tests
    for file, all_tests in gpu_cases.by_file().items()
    for number, tests in enumerate(itertools.batched(all_tests, 3))
}
MEMCHECK = ("--tool", "memcheck", "--error-exitcode", "9")
# A process in which XLA starts ptxas would hang with it.
MEMCHECK += ("--target-processes", "application-only")


@pytest.mark.memcheck
@pytest.mark.timeout(300)
@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not on PATH")
@pytest.mark.parametrize("group", GROUPS)
def test_no_access_out_of_bounds(group):
    assert SANITIZER is not None
    command = [SANITIZER, *MEMCHECK, sys.executable, "-m", "pytest", "-q", "-m", "gpu"]
    command += ["--no-skips", "-p", "no:xdist", "-p", "no:cacheprovider", *GROUPS[group]]
    allocator = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    of_here = ("PYTEST_XDIST", "PYTEST_CURRENT")
    environment = {name: x for name, x in os.environ.items() if not name.startswith(of_here)}
    environment.pop("JAX_PLATFORMS", None)
    done = subprocess.run(
        command, cwd=ROOT, env=environment | allocator, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert f"{len(GROUPS[group])} passed" in done.stdout
    assert "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr


# Files that define launches and make none.
DEFINITIONS = {
    "kernels/lang/thread_program.py",
    "kernels/lang/mosaic.py",
    "kernels/flash_bwd/operands.py",
}


def test_every_launch_has_a_small_test():
    launches = {
        str(path.relative_to(ROOT)).removeprefix("pallas_attn/")
        for package in ("pallas_attn", "pallas_lm")
        for path in (ROOT / package).rglob("*.py")
        if re.search(
            r"(plgpu\.kernel|lane_kernel|persistent_kernel|operands\.launched)\(",
            path.read_text("utf-8"),
        )
    }
    launches -= gpu_cases.OF_SEVERAL_GPUS | gpu_cases.BLACKWELL | DEFINITIONS
    assert launches <= set(gpu_cases.QUICK), launches - set(gpu_cases.QUICK)
    for name in gpu_cases.QUICK:
        assert (ROOT / "pallas_attn" / name).is_file() or (ROOT / name).is_file(), name


def test_the_small_tests_exist(request):
    """Checks the files that are collected now; a GPU has more rows of tests/support/subjects.py."""
    seen = request.config.stash[gpu_cases.COLLECTED]
    files = {name.partition("::")[0] for name in seen}
    wanted = {test for test in gpu_cases.ALL_QUICK if test.partition("::")[0] in files}
    missing = {test for test in wanted - seen if "kernels" not in test.partition("[")[2]}
    functions = {name.partition("[")[0] for name in seen}
    assert not missing and {test.partition("[")[0] for test in wanted} <= functions
