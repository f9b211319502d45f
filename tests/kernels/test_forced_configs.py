"""Configs that tests force on a GPU fit into its shared memory, which needs no GPU to know."""

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import pytest

from pallas_attn._call import gpu_specs
from tests.kernels.decode import test_decode_kernel
from tests.kernels.decode_mla import test_decode_mla
from tests.kernels.flash_bwd import (
    test_any_size,
    test_bwd_wide,
    test_flash_bwd,
    test_one_key_tile,
    test_step_parts,
)
from tests.kernels.flash_bwd import test_group_window as test_bwd_group_window
from tests.kernels.flash_fwd import test_flash_fwd, test_group_window, test_wide
from tests.kernels.prefill import test_prefill, test_prefill_contiguous

MODULES = (
    *(test_flash_fwd, test_flash_bwd, test_any_size, test_decode_kernel, test_decode_mla),
    *(test_prefill, test_prefill_contiguous, test_wide, test_bwd_wide, test_one_key_tile),
    *(test_group_window, test_bwd_group_window, test_step_parts),
)
SHARED_MEMORY = gpu_specs.shared_memory("sm90")


def too_large(problem_of: Callable[..., Any] | None, case: Any, config: Any, **changes: Any) -> str:
    """The bytes of a Config beyond shared memory, in words; or nothing."""
    problem = problem_of(case, **changes) if problem_of else case.problem
    module = sys.modules[type(config).__module__]
    need = module.smem_bytes(problem, config)
    return f"{need} bytes of {SHARED_MEMORY}: {config}" if need > SHARED_MEMORY else ""


def names_of(mark: pytest.Mark) -> tuple[str, ...]:
    """Arguments that a mark `parametrize` sets."""
    names = mark.args[0]
    return tuple(names.replace(" ", "").split(",")) if isinstance(names, str) else tuple(names)


def calls_of(test: FunctionType) -> Iterator[dict[str, Any]]:
    """Arguments of each case of a parametrised test."""
    marks = [mark for mark in test.pytestmark if mark.name == "parametrize"]
    for values in itertools.product(*(mark.args[1] for mark in marks)):
        arguments = {"seed": 0} if "seed" in inspect.signature(test).parameters else {}
        for mark, value in zip(marks, values, strict=True):
            names = names_of(mark)
            row = getattr(value, "values", value)  # pytest.param has values
            row = [value] if len(names) == 1 and row is value else row
            arguments |= dict(zip(names, row, strict=True))
        yield arguments


def gpu_tests(module: ModuleType) -> Iterator[FunctionType]:
    """Tests on a GPU that launch by the module's `check` alone, with no fixture but `seed`."""
    for test in vars(module).values():
        if not isinstance(test, FunctionType) or test.__module__ != module.__name__:
            continue
        marks = getattr(test, "pytestmark", [])
        arguments = set(inspect.signature(test).parameters) - {"seed"}
        for mark in marks:
            if mark.name == "parametrize":
                arguments -= set(names_of(mark))
        on_gpu, text = any(mark.name == "gpu" for mark in marks), inspect.getsource(test)
        if on_gpu and not arguments and " check(" in text and "launched(" not in text:
            yield test


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.split(".")[-1])
def test_configs_fit(module, monkeypatch):
    problem_of, wrong, tried = getattr(module, "problem_of", None), [], 0

    def fits(case, config=None, seed=0, **changes):
        nonlocal tried
        if config is not None:
            tried += 1
            wrong.append(too_large(problem_of, case, config, **changes))

    monkeypatch.setattr(module, "check", fits)
    for test in gpu_tests(module):
        for arguments in calls_of(test):
            test(**arguments)
    assert tried and not any(wrong), "\n".join(filter(None, wrong))


def test_a_config_that_is_too_large_is_found():
    case = test_flash_fwd.case_named("everything")
    find = functools.partial(too_large, test_flash_fwd.problem_of, case)
    assert not find(test_flash_fwd.SMALL)
    assert find(test_flash_fwd.kernel.Config(3, 64, 3)).startswith("251904 bytes of 232448: Config")
