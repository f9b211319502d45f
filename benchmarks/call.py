"""A call that peers are asked to make, and the refusal of one."""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

from benchmarks import subjects
from benchmarks.timing import Subject

OPTIONS = ("q_lengths", "kv_lengths", "segments", "bias", "mask_array", "softcap", "sinks",
           "q_offset", "window", "band", "precision", "rotary")  # fmt: skip


class Unavailable(Exception):
    """The reason why a peer is not there for a case."""


def needed(package: str) -> None:
    """Refuses every case where a package is not there."""
    if importlib.util.find_spec(package) is None:
        raise Unavailable(f"{package} is not installed")


@dataclasses.dataclass(frozen=True)
class Call:
    """One case with its arrays, for one operation."""

    case: Any
    arrays: dict[str, Any]
    cotangent: Any
    op: str

    def require(self, *features: str, package: str | None = None, float32: bool = False) -> None:
        """Refuses a case with an option that is not among `features`, or of float32, and any where
        a package is not there.
        """
        if package is not None:
            needed(package)
        self.refuse(*(option for option in OPTIONS if option not in features))
        if self.case.dtype == "float32" and not float32:
            raise Unavailable("no float32")

    def refuse(self, *tags: str) -> None:
        """Refuses a case that has one of these tags."""
        for tag in tags:
            if tag in self.case.tags:
                raise Unavailable(f"no {tag}")

    def launch(self, function: subjects.Function) -> Callable[[], Any]:
        return subjects.attention_launch(function, self.arrays, self.cotangent, self.op)


Peer = Callable[[Call], list[Subject]]
