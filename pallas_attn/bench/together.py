"""Processes of one benchmark that share a GPU: they compile and check side by side, and each times
while the others wait.

A short case takes seconds to compile and milliseconds to run, so one process would hold the GPU
idle. All processes name the same file. A process holds a shared lock on it but for two moments:
while it times, when its lock is exclusive, and while it waits for that.
"""

import contextlib
import fcntl
from collections.abc import Iterator
from typing import TextIO


class Together:
    """One process of several; of one alone where there is no file."""

    def __init__(self, path: str | None = None):
        self.file: TextIO | None = None
        if path is not None:
            self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115
            fcntl.flock(self.file, fcntl.LOCK_SH)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Within it no other process uses the GPU."""
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
        """Lets the others go on."""
        if self.file is not None:
            self.file.close()
