"""The `default` of a kernel's `Config`, and checks of its fields."""

from collections.abc import Callable, Sequence
from typing import Any, Self

from pallas_attn._call import gpu_specs
from pallas_attn._call.kernel import Problem


class OneForAll:
    """A Config whose own defaults are the fastest for every problem."""

    @classmethod
    def default(cls, problem: object) -> Self:
        """The fastest on an H200."""
        del problem
        return cls()


def first_that_fits[Choice](
    problem: Problem, need: Callable[[Any, Choice], int], choices: Sequence[Choice]
) -> Choice:
    """The first choice for which a block of the GPU has the shared memory that `need` says, or the
    last.
    """
    fitting = (x for x in choices if gpu_specs.fits(need(problem, x), problem.gpu))
    return next(fitting, choices[-1])


def check(config: Any, **wants: tuple[bool, str]) -> None:
    """Raises a ValueError that names the first field with a bad value.

    Args:
      config: a dataclass.
      wants: for the name of a field, whether its value is good, and which values are.
    """
    for name, (good, want) in wants.items():
        if not good:
            raise ValueError(f"Config.{name} must be {want}, got {getattr(config, name)}")
