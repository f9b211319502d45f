"""The fuzzer: `python -m pytest -m fuzz --seconds=N --seed=S`, on a GPU with `-m "fuzz and gpu"`,
in several processes with `-n`; `--case=...` repeats what a failure says.

The plain suite runs a few of its problems, and proves that it finds a fault.
"""

import dataclasses
import os
import shlex

import numpy as np
import pytest

from pallas_attn import Mask
from tests.support import (
    append_cases,
    budget,
    definition,
    float8_rows,
    fuzz,
    fuzz_caches,
    fuzz_derivatives,
)

PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
each_process = pytest.mark.parametrize("process", range(PROCESSES))


def _run(request, process, places):
    word = request.config.getoption("--case")
    if word:
        wrong = fuzz.attempt(word, fuzz.Tally()) if process == 0 else None
        assert wrong is None, f"{fuzz.command(word)}\n    {wrong}"
        return
    tally = fuzz.run(
        places,
        seed=request.config.getoption("--seed"),
        seconds=request.config.getoption("--seconds"),
        first=process,
        step=PROCESSES,
    )
    request.node.user_properties.append(("fuzz", str(tally)))
    assert not tally.failures, "\n\n".join(["", *tally.failures])


@pytest.mark.fuzz
@each_process
def test_fuzz(request, process):
    _run(request, process, fuzz.ON_CPU)


@pytest.mark.fuzz
@pytest.mark.gpu
@each_process
def test_fuzz_on_a_gpu(request, process):
    _run(request, process, fuzz.ON_GPU)


# ---- tests of the fuzzer -------------------------------------------------------------------------


def test_a_few_problems(seed):
    tally = fuzz.run(("cpu",), seed=seed, most=2)
    assert not tally.failures, "\n\n".join(["", *tally.failures])
    assert tally.problems == {"attention": 1, "cache": 1} and tally.calls["reference"] >= 6


def _strictly_causal(monkeypatch):
    """An oracle that hides the query's own key."""
    right = definition.attention

    def wrong(arrays, *rest, mask, **options):
        return right(arrays, *rest, mask=Mask(mask.left, -1), **options)

    monkeypatch.setattr(definition, "attention", wrong)


def _one_row_less(monkeypatch):
    """A model of write_kv that drops the last of several rows."""
    right = append_cases.rows_from
    monkeypatch.setattr(
        append_cases, "rows_from", lambda start, counts: right(start, counts - (counts > 1))
    )


def _every_number_a_group(monkeypatch):
    """A model of prefixes that has every number name a group."""
    right = fuzz_caches.group_of
    monkeypatch.setattr(fuzz_caches, "group_of", lambda groups, count: right(groups % count, count))


def _more_of_a_tangent(monkeypatch):
    """An oracle that takes tangents for a twentieth longer than they are."""
    right = definition.tangents

    def wrong(arrays, along, **options):
        return right(arrays, {name: 1.05 * x for name, x in along.items()}, **options)

    monkeypatch.setattr(definition, "tangents", wrong)


def _a_longer_way(monkeypatch):
    """An oracle whose differences are a hundredth longer than they say."""
    monkeypatch.setattr(fuzz_derivatives, "STEP", _LongerOneWay(fuzz_derivatives.STEP))


class _LongerOneWay(float):
    def __neg__(self):
        return -1.02 * float(self)


def _no_last_key(monkeypatch):
    """An oracle whose arrays have no gradient by the last key."""
    right = fuzz_derivatives._summed

    def wrong(case, at, ds):
        return right(case, at, np.where(np.arange(ds.shape[-1]) == ds.shape[-1] - 1, 0, ds))

    monkeypatch.setattr(fuzz_derivatives, "_summed", wrong)


@pytest.mark.parametrize(
    "fault, first", [(_strictly_causal, 0), (_one_row_less, 1)], ids=["oracle", "model"]
)
def test_a_fault_is_found_and_one_line_repeats_it(monkeypatch, fault, first):
    with monkeypatch.context() as inside:
        fault(inside)
        inside.setattr(fuzz, "SHRINKING", 0.5)
        inside.setattr(budget, "MANY_GRIDS", (1.0, 1.3))
        tally = fuzz.run(("cpu",), most=1, first=first)
        (failure,) = tally.failures
        line, wrong = failure.split("\n", 1)
        word = shlex.split(line)[-1].removeprefix("--case=")
        assert line == fuzz.command(word) and "reference, round" in wrong
        again = fuzz.attempt(word, fuzz.Tally())
        assert again is not None and "reference, round" in again
    assert fuzz.attempt(word, fuzz.Tally()) is None


@pytest.mark.parametrize(
    "fault, word",
    [
        (_more_of_a_tangent, "tangents/cpu:7:rounds=1"),
        (_no_last_key, "learned/cpu:7:rounds=1"),
        (_a_longer_way, "second/cpu:7:rounds=1"),
    ],
    ids=["tangents", "learned", "second"],
)
def test_a_fault_of_derivatives_is_found(monkeypatch, fault, word):
    with monkeypatch.context() as inside:
        fault(inside)
        inside.setattr(budget, "MANY_GRIDS", (1.0, 1.3))
        wrong = fuzz.attempt(word, fuzz.Tally())
        assert wrong is not None and "reference, round" in wrong
    assert fuzz.attempt(word, fuzz.Tally()) is None


WITH_PREFIX = "cache/cpu:117:lengths=(3,0,64,65,9,1,0,2),q_len=1,layers=None,keeps=None,rounds=2"


def test_a_fault_of_prefixes_is_found(monkeypatch):
    with monkeypatch.context() as inside:
        _every_number_a_group(inside)
        inside.setattr(budget, "MANY_GRIDS", (1.0, 1.3))
        wrong = fuzz.attempt(WITH_PREFIX, fuzz.Tally())
        assert wrong is not None and "reference, round" in wrong
    assert fuzz.attempt(WITH_PREFIX, fuzz.Tally()) is None


OF_8_BITS = (
    "prefill/interpreted:5:kind='stacked',page_size=None,layers=None,sequences=1,q_len=3,q_heads=8,"
    "kv_heads=1,capacity=64,spread=0,head_dim=64,v_head_dim=64,softcap=None,sinks=False,rounds=1"
)


@pytest.mark.guards
def test_a_fault_of_prefill_by_8_bits_is_found(monkeypatch):
    """An oracle whose rows have scales that are a tenth larger."""
    right = float8_rows.of_tiles

    def wrong(numbers, scales):
        numbers, largest = right(numbers, scales)
        return numbers, 1.1 * largest

    monkeypatch.setattr(float8_rows, "of_tiles", wrong)
    monkeypatch.setattr(budget, "MANY_GRIDS", (1.0, 1.3))
    wrong_result = fuzz.attempt(OF_8_BITS, fuzz.Tally())
    assert wrong_result is not None and "interpreted, round" in wrong_result


def test_a_simpler_problem_has_a_word_of_its_own():
    kind, place, drawn = fuzz.parsed("attention/cpu:3")
    for fields in kind.simpler(drawn):
        case = dataclasses.replace(drawn, **fuzz.fields_of(drawn, fields))
        word = fuzz.word_of("attention/cpu:3", place, case)
        assert fuzz.parsed(word)[2] == case and (":3:" in word) == (case != drawn)
