"""Progress of a run on the host: each sequence, and how long things took."""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(eq=False)
class Generation:
    """A prompt and the tokens after it."""

    number: int
    prompt: list[int]
    wanted: int  # tokens
    sample: int = 0  # number among the answers to this prompt
    cut: bool = False  # more were asked for than the capacity leaves room for
    tokens: list[int] = dataclasses.field(default_factory=list)
    logits: list[np.ndarray] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)  # one a token
    ended: str = ""  # reason: "stop", "length", "capacity"; "" while it is not over
    times: list[float] = dataclasses.field(default_factory=list)  # seconds: see `Run._read`
    fed: int = 0  # rows of its prompt that the device was told to take
    planned: int = 0  # tokens that the device was told to make, read or not

    @property
    def unfed(self) -> int:
        """Rows of its prompt that are still to come."""
        return len(self.prompt) - self.fed

    @property
    def rows(self) -> int:
        """Rows of cache that it holds: all but its newest token."""
        return self.fed + max(len(self.tokens) - 1, 0)


@dataclasses.dataclass(frozen=True)
class Spread:
    """Seconds that something took, of several times."""

    median: float
    worst: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread | None":
        return cls(float(np.median(seconds)), max(seconds)) if seconds else None

    def __str__(self) -> str:
        median, worst = (
            f"{x:.2f} s" if x >= 1 else f"{x * 1e3:.{int(x < 0.1)}f} ms"
            for x in (self.median, self.worst)
        )
        return f"{median} (worst {worst})"


@dataclasses.dataclass(frozen=True)
class Status:
    """The state of a run after a chunk was read. Rates are those of the time since the last."""

    running: int
    waiting: int
    ended: int
    step: int
    tokens: int
    seconds: float
    tokens_per_second: float
    live_kv_bytes: int
    tb_per_second: float  # weights and live rows, once a step
