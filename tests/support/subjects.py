"""The implementations under test: one row each. A new kernel is tested by adding its row.

`rows` is for tests that run once for every row; `pairs` gives the pairs (row, case)
that the row does not refuse, decided while tests are collected, so that no test passes or skips by
a refusal: what is refused is what the support matrix in docs/support.md says.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn._call import device, dispatch
from pallas_attn._mesh import sharding
from tests.support import in_numpy
from tests.support.problems import by_name


@dataclasses.dataclass(frozen=True)
class Subject:
    """One implementation, and the place it runs in."""

    name: str
    implementation: str | None  # None: the kernels, whichever is fastest
    generation: str | None = None  # GPU that is assumed: kernels run interpreted
    marks: tuple[str, ...] = ()
    dtype: str = "float32"  # for tests that do not care: one that the implementation takes
    but: tuple[str, ...] = ()  # operations that another row runs the same way

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Public calls made in here with `implementation=self.implementation` reach it."""
        with contextlib.ExitStack() as stack:
            if self.generation is not None:
                from tests.support import mosaic

                stack.enter_context(device.assume(self.generation))
                stack.enter_context(mosaic.interpret())
                # The interpreter uses ordered callbacks, which custom_partitioning cannot carry.
                whole = mock.patch.object(sharding, "over_devices", _on_one_device)
                stack.enter_context(whole)
            yield

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`function(*args, implementation=..., **kwargs)`, computed to the end: jitted, or, with
        kernels that are interpreted, in NumPy as these are.
        """
        static, arrays = split(kwargs)
        run = _fresh if self.generation else _kept  # interpreted kernels are traced each time
        with self.active():
            jitted = run(function, self.implementation, tuple(static.items()))
            if self.generation:
                return in_numpy.call(jitted, args, arrays)
            return jax.block_until_ready(jitted(args, arrays))

    def takes(self, operation: str, function: Callable[..., Any], **kwargs: Any) -> bool:
        """Whether kernels take the call, and the `operation` that follows from it. Only limits are
        asked: nothing is traced past the dispatch.
        """
        asked: list[Any] = []

        def select(problem, implementation):
            del implementation
            asked.append(problem)
            raise _AskedError

        static, arrays = split(kwargs)
        call = functools.partial(function, implementation=self.implementation, **static)
        with contextlib.ExitStack() as stack:
            if self.generation is not None:
                stack.enter_context(device.assume(self.generation))
            stack.enter_context(mock.patch.object(dispatch, "select", select))
            stack.enter_context(contextlib.suppress(_AskedError))
            jax.eval_shape(lambda arrays: call(**arrays), arrays)
        return all(
            any(row.takes(problem) for row in self._kernels(dispatch.table_of(problem)))
            for problem in (
                dataclasses.replace(problem_asked, op=op)
                for problem_asked in asked
                for op in {problem_asked.op, operation}
            )
        )

    @property
    def tensor_cores(self) -> bool:
        """Whether float32 is multiplied on them: see `budget.attention`."""
        return self.implementation != "reference"

    def exists(self, operation: str) -> bool:
        """Whether the operation has an implementation in this row by now."""
        if self.implementation == "reference":
            return True
        return operation not in self.but and bool(self._kernels(dispatch.TABLES[operation]))

    def _kernels(self, table: tuple[Any, ...]) -> list[Any]:
        rows = [x for x in table if isinstance(x, dispatch.Candidate)]
        return [x for x in rows if self.implementation in (None, x.implementation)]

    def somewhere(self) -> bool:
        """Whether this machine can run it, or pretend to."""
        return self.implementation == "reference" or bool(
            self.generation or device.gpu_generation()
        )

    def param(self, *others: Any, id: str = "") -> Any:
        marks = [getattr(pytest.mark, name) for name in self.marks]
        return pytest.param(self, *others, id="-".join(filter(None, (self.name, id))), marks=marks)


ROWS = (
    Subject("reference", "reference"),
    Subject("interpreted", None, generation="sm90", marks=("guards",), dtype="bfloat16"),
    Subject("portable", "sm80", "sm90", ("guards",), "bfloat16", but=("append", "keep", "decode")),
    Subject("reference_on_gpu", "reference", marks=("gpu",)),
    Subject("kernels", None, marks=("gpu",), dtype="bfloat16"),
    Subject("portable_kernels", "sm80", None, ("gpu",), "bfloat16", but=("append", "keep")),
    Subject("kernels_float32", None, marks=("gpu",), dtype="float32"),
)


def rows(*operations: str, but: tuple[str, ...] = ()) -> list[Any]:
    """For `pytest.mark.parametrize("subject", ...)`: who has all of these operations.

    `but`: rows that another test serves. The reference on a GPU is one: XLA compiles there what it
    compiles here, for which the pairs of each operation and the fuzzer are enough.
    """
    but += ("reference_on_gpu",)
    return [row.param() for row in _chosen(but) if all(row.exists(name) for name in operations)]


def pairs(
    operation: str,
    cases: Iterable[Any],
    call: Callable[[Any], tuple[Any, dict[str, Any]]],
    but: tuple[str, ...] = (),
    interpreted: Iterable[Any] | None = None,
    reference: Iterable[Any] | None = None,
) -> list[Any]:
    """For `parametrize("subject, case", ...)`; `call(case)` is the function and its arguments.

    `but`: rows that another test serves; "interpreted" is every row that is. `interpreted`: the
    cases that the interpreter runs, where all of them would take it minutes and say the same.
    `reference`: those that the reference runs, which knows no tiles, dims or alignments. Cases
    have dtypes of their own: rows that differ in theirs are one. Rows of a case follow each other,
    in one process, which then makes the oracle once.
    """
    chosen = [row for row in _chosen(but) if row.exists(operation) and row.somewhere()]
    apart = {(row.implementation, row.generation, row.marks): row for row in reversed(chosen)}
    chosen = list(reversed(apart.values()))
    cases = tuple(cases)

    def cases_of(row):
        if row.implementation == "reference":
            return cases if reference is None else reference
        return cases if interpreted is None or not row.generation else interpreted

    call = functools.cache(call)  # rows share what is drawn

    def takes(row, case):
        with device.assume(None):  # caches are filled where they are made
            function, arguments = call(case)
        return row.takes(operation, function, **arguments)

    taken = [
        row.param(case, id=case.name)
        for row in chosen
        for case in cases_of(row)
        if row.implementation == "reference" or takes(row, case)
    ]
    order = {case.name: number for number, case in enumerate(cases)}
    return sorted(taken, key=lambda param: order.get(param.values[1].name, len(order)))


def _chosen(but: tuple[str, ...]) -> list[Subject]:
    interpreted = "interpreted" not in but
    return [row for row in ROWS if row.name not in but and (interpreted or not row.generation)]


class _AskedError(Exception):
    """The dispatch was reached."""


def _on_one_device(run, arrays, *axes, **split):
    del axes, split
    return run(*arrays)


def _fresh(function, implementation, static):
    bound = functools.partial(function, implementation=implementation, **dict(static))
    return jax.jit(lambda args, arrays: bound(*args, **arrays))


_kept = functools.lru_cache(maxsize=None)(_fresh)


def forget() -> None:
    """The programs that `Subject.call` keeps."""
    _kept.cache_clear()


def split(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The static arguments and the arrays (and trees of them)."""
    arrays = {
        name: value
        for name, value in kwargs.items()
        if (leaves := jax.tree.leaves(value)) and all(hasattr(leaf, "shape") for leaf in leaves)
    }
    return {name: value for name, value in kwargs.items() if name not in arrays}, arrays


# ---- arguments -----------------------------------------------------------------------------------

GRADIENTS = ("q", "k", "v", "bias", "sinks")


def cotangents(case, seed=0):
    rng = np.random.default_rng(seed)
    dlse = rng.standard_normal((case.batch, case.q_heads, case.q_len)).astype(np.float32)
    return case.cotangent(seed), jnp.asarray(dlse)


def forward_and_backward(*, do, dlse, implementation, **arguments):
    """out, lse and a gradient for each floating-point array."""
    wanted = {name: arguments[name] for name in GRADIENTS if arguments.get(name) is not None}

    def run(some):
        return by_name.flash_attention_with_lse(**(arguments | some), implementation=implementation)

    (out, lse), pullback = jax.vjp(run, wanted)
    (gradients,) = pullback((do, dlse))
    return {"out": out, "lse": lse} | {f"d{name}": x for name, x in gradients.items()}
