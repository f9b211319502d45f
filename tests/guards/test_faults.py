"""The list of faults is one that can be tried: `python -m tests.guards.faults` tries them, which
takes minutes.
"""

import shlex

import pytest

from tests.guards import faults


@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_fault_has_its_place(name):
    """The file with the fault is another one, and Python; the test's file exists."""
    fault = faults.FAULTS[name]
    text = fault.text()
    assert text != (faults.ROOT / fault.file).read_text()
    compile(text, fault.file, "exec")
    assert (faults.ROOT / shlex.split(fault.test)[0]).is_file()


def test_faults_are_in_every_folder_of_kernels():
    folders = {fault.file.rsplit("/", 1)[0] for fault in faults.FAULTS.values()}
    kernels = faults.ROOT / "pallas_attn" / "kernels"
    assert {
        f"pallas_attn/kernels/{x.parent.name}" for x in kernels.glob("*/__init__.py")
    } <= folders
