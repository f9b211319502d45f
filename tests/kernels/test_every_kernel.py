"""Every kernel of dispatch (tests/support/kernels.py) on data that hurts (row maxima that rise and
fall by `2**12`, logits on one side of 0) and at boundaries: lengths on both sides of a tile's edge,
shared and missing pages, integers at the ends of int32, NaN past every length.
"""

import itertools
import pathlib

import pytest

from pallas_attn._call import device, dispatch
from pallas_attn._call.config import fits
from tests.support import addresses, aot, builds, kernels, mosaic, pairs

pytestmark = pytest.mark.usefixtures("programs_in_numpy")

ROWS = {row.module: row for row in kernels.KERNELS}
TABLES = itertools.chain(*dispatch.TABLES.values())
MODULES = list(dict.fromkeys(x.module for x in TABLES if isinstance(x, dispatch.Candidate)))
HARD = [(row.module, plan) for row in kernels.KERNELS for plan in row.hard]
ENDS = [(row.module, plan) for row in kernels.KERNELS for plan in row.ends]
# A build for one GPU of each folder and generation: the last, which has most options.
ALONE = {name: build for name, build in builds.BUILDS.items() if "x" not in build.target}
BUILDS = {name.rpartition("/")[0]: build for name, build in ALONE.items() if name[:2] != "lm"}

GENERATIONS = "sm90", "sm80", "sm100"


@pytest.mark.parametrize("module", MODULES)
def test_every_kernel_has_a_row(module):
    """Each property has a call, or another test by name."""
    assert module in ROWS, f"{module} has no row in tests/support/kernels.py"
    row = ROWS[module]
    assert row.lacks == set(row.excused), row.lacks
    for test in row.excused.values():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (pathlib.Path(__file__).parents[1] / file).read_text(), test


def test_every_row_has_a_kernel():
    assert len(ROWS) == len(kernels.KERNELS) and set(ROWS) <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_addresses_of_every_kernel_are_proven(module):
    """In each file whose programs of single threads it runs."""
    for file in sorted(addresses.programs_of(module)):
        assert file in addresses.PROGRAMS, f"{module}: {file} has no line in {addresses.__name__}"


@pytest.mark.parametrize("file", addresses.FILES)
def test_addresses_of_every_program_are_proven(file):
    """Launches that are no Candidate's, too; by a test that there is, or by a reason."""
    where, _, test = addresses.PROGRAMS[file].rpartition(" ")[2].partition("::")
    if test:
        assert f"def {test}(" in (pathlib.Path(__file__).parents[1] / where).read_text(), test


@pytest.mark.parametrize("module", ROWS)
def test_configs_are_ones_that_kernels_take(module):
    """There is room for them in shared memory."""
    kernel = ROWS[module].kernel
    for case, config in [*ROWS[module].hard.values(), *ROWS[module].ends.values()]:
        if isinstance(config, kernel.config):
            problem = kernels.problem_of(ROWS[module], case)
            assert kernel.limit(problem) is None and fits(kernel, problem, config), (case, config)


@pytest.mark.guards
@pytest.mark.parametrize("module, plan", HARD)
def test_hard_data(module, plan):
    row = ROWS[module]
    with mosaic.interpret():
        row.check(*row.hard[plan])


@pytest.mark.guards
@pytest.mark.parametrize("module, plan", ENDS)
def test_boundaries(module, plan):
    row = ROWS[module]
    with mosaic.interpret():
        row.check(*row.ends[plan])


@pytest.mark.guards
@pytest.mark.parametrize("number", range(pairs.FIRST))
@pytest.mark.parametrize("module", pairs.MODULES)
def test_pairs_of_options(module, number):
    with mosaic.interpret():
        ROWS[module].check(*next(itertools.islice(pairs.space_of(module).calls(), number, None)))


@pytest.mark.guards
@pytest.mark.parametrize("number", range(pairs.FIRST))
@pytest.mark.parametrize("module", pairs.MODULES)
def test_pairs_of_options_lower(module, number):
    """Layouts, shared memory and shapes of matmuls, of which the interpreter knows nothing."""
    row = ROWS[module]
    with device.assume(next(filter(row.runs_on, GENERATIONS))), mosaic.lowered_alone():
        row.check(*next(itertools.islice(pairs.space_of(module).calls(), number, None)))


@pytest.mark.guards
@pytest.mark.parametrize("kind", BUILDS)
def test_lowers(kind):
    build = BUILDS[kind]
    with device.assume(aot.GENERATIONS.get(build.target, build.target)):
        text = mosaic.lower_for_cuda(lambda shapes: build.call(*shapes), build.shapes)
    assert "mosaic_gpu" in text


ON_A_GPU = 6  # pairs of options of each kernel
HERE = {name for name, row in ROWS.items() if row.runs_on(device.gpu_generation())}


@pytest.mark.gpu
@pytest.mark.parametrize("module, plan", [x for x in [*HARD, *ENDS] if x[0] in HERE])
def test_on_a_gpu(module, plan):
    row = ROWS[module]
    row.check(*(row.hard | row.ends)[plan])


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(ON_A_GPU))
@pytest.mark.parametrize("module", [x for x in pairs.MODULES if x in HERE])
def test_pairs_of_options_on_a_gpu(module, number):
    ROWS[module].check(*next(itertools.islice(pairs.space_of(module).calls(), number, None)))
