"""Several processes of one benchmark on one GPU: they compile and check side by side, and take
turns to time kernels.

A short case takes seconds to compile and milliseconds to run, so a single process would leave the
GPU idle. All processes name the same lock file. A process that compiles or checks holds a shared
lock on it; to time, it gives that up, waits for an exclusive lock, and returns to a shared one.
"""

import contextlib
import fcntl
from collections.abc import Iterator
from typing import TextIO


class Together:
    """The lock of one process among several; without a file it does nothing."""

    def __init__(self, path: str | None = None):
        self.file: TextIO | None = None
        if path is not None:
            self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115
            fcntl.flock(self.file, fcntl.LOCK_SH)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """A context in which no other process uses the GPU."""
        if self.file is None:
            yield
            return
        fcntl.flock(self.file, fcntl.LOCK_UN)
        fcntl.flock(self.file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self.file, fcntl.LOCK_UN)
            fcntl.flock(self.file, fcntl.LOCK_SH)

    def close(self) -> None:
        """Releases the lock."""
        if self.file is not None:
            self.file.close()
