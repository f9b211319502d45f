"""The way from a public call to its kernel is short: what a warm call runs before and beside it."""

import pytest

from tests.support import call_trace

# Files whose functions kernels call themselves: they count for the kernel.
OF_KERNELS = ("kernels/", "masks.py", "_functions/", "_call/problem.py", "_call/gpu_specs.py")
# At most so many functions, in so many files.
MOST = {"forward": (35, 8), "decode": (40, 12), "prefill": (40, 12), "append": (35, 12)}


@pytest.mark.parametrize("call", MOST)
def test_the_way_in_is_short(call):
    files = call_trace.CALLS[call]().files
    way_in = {name: files[name] for name in files if not name.startswith(OF_KERNELS)}
    functions, most_files = MOST[call]
    assert sum(map(len, way_in.values())) <= functions, way_in
    assert len(way_in) <= most_files, way_in
