"""`Kernel`, the record by which dispatch knows a kernel, and `Chosen`, which travels on."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from pallas_attn._call.problem import (
    AppendProblem,
    AttentionProblem,
    DecodeProblem,
    KeepProblem,
    QuantizeProblem,
)
from pallas_attn.errors import Limit

Problem = AttentionProblem | AppendProblem | KeepProblem | DecodeProblem | QuantizeProblem
# The inputs of an operation; those of a backward are (inputs, out, lse, d_out, d_lse).
Inputs = Any
Results = Any  # the arrays that an operation returns


class Chosen(Protocol):
    """The implementation that dispatch has chosen for a problem: a static value."""

    @property
    def name(self) -> str: ...

    def run(self, inputs: Inputs, problem: Any) -> Results:
        """The results, for the inputs of one device."""


class Config(Protocol):
    """The tuning of a kernel: a frozen dataclass that checks its own fields."""

    @classmethod
    def default(cls, problem: Any) -> Any:
        """The fastest Config that is known for a problem."""


def never_slower(problem: Problem) -> None:
    """No kernel is known to be faster."""
    del problem


def _never(problem: Problem) -> bool:
    del problem
    return False


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The interface of a kernel: each module that dispatch knows has one, `KERNEL`.

    Required:
      config: the class of its tuning, which changes the result only by rounding.
      limit: why the kernel cannot take a problem, or None; shared memory apart (`config.no_room`).
      smem_bytes: shared memory of a block, in the launch that needs most; a ValueError for a Config
        that the problem rules out.
      run: `run(inputs, problem, config)` -> the results that the operation has.

    Optional:
      slower: why another kernel is faster although this one could take the problem, or None. It is
        asked last. What needs no estimate of times is said in the dispatch table instead, which
        costs no import.
      shares_keys: whether batch rows may read the same k and v (`AttentionProblem.share`).
      reads_zigzag: whether k and v may lie in zigzag order (`AttentionProblem.zigzag`).
      fetches: whether it fetches k and v of other devices (`AttentionProblem.fetches`).
      overlaps: whether its Config has a field `overlaps` (`device.overlapping`).
      reads_lists: whether it takes lists of rows with entries that name none
        (`decode_listed.lists`).
    """

    config: type[Config]
    limit: Callable[[Any], Limit | None]
    smem_bytes: Callable[[Any, Any], int]
    run: Callable[[Any, Any, Any], Results]
    slower: Callable[[Any], Limit | None] = never_slower
    shares_keys: Callable[[AttentionProblem], bool] = _never
    reads_zigzag: Callable[[AttentionProblem], bool] = _never
    fetches: Callable[[AttentionProblem], bool] = _never
    overlaps: bool = False
    reads_lists: bool = False
