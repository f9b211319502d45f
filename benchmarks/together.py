"""Several processes of one benchmark on one GPU: they compile side by side, check side by side, and
take turns to time kernels.

All processes name the same lock file. One that uses the GPU holds a shared lock on it; one that
times holds an exclusive lock. Compiling takes no lock, since a kernel's time on the GPU does not
depend on it. A second file, the door, lets those that time go first: they hold a shared lock on it
while they wait and time, and whoever wants to use the GPU must get through.
"""

import contextlib
import fcntl
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

import jax.numpy as jnp


class Together:
    """The lock of one process among several; without a file it does nothing."""

    def __init__(self, path: str | None = None):
        self.files: tuple[TextIO, TextIO] | None = None
        self.is_alone = False
        self.while_others_time: Callable[[], None] = lambda: None
        if path is not None:
            self.files = (open(path, "a"), open(f"{path}.door", "a"))  # noqa: SIM115

    @property
    def shares(self) -> bool:
        """Whether there may be other processes."""
        return self.files is not None

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """A context for work on the GPU, beside that of others, while nobody times. Where somebody
        does, `while_others_time` is called first. The work is done when it ends.
        """
        if self.files is None:
            yield
            return
        gpu, door = self.files
        try:
            fcntl.flock(door, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if _is_shared(door):  # else another one is on its way through
                self.while_others_time()
            fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(gpu, fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            with contextlib.suppress(Exception):  # a GPU that failed: the work itself has said so
                _finish()
            fcntl.flock(gpu, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """A context in which no other process uses the GPU; within itself it changes nothing."""
        if self.files is None or self.is_alone:
            yield
            return
        gpu, door = self.files
        fcntl.flock(door, fcntl.LOCK_SH)
        fcntl.flock(gpu, fcntl.LOCK_EX)
        self.is_alone = True
        try:
            yield
        finally:
            self.is_alone = False
            fcntl.flock(gpu, fcntl.LOCK_UN)
            fcntl.flock(door, fcntl.LOCK_UN)

    def close(self) -> None:
        """Closes the files."""
        for file in self.files or ():
            file.close()


def _is_shared(door: TextIO) -> bool:
    """Whether nobody holds the door but those that time."""
    try:
        fcntl.flock(door, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(door, fcntl.LOCK_UN)
    return True


def _finish() -> None:
    """Waits for the GPU: launches of a stream run one after another."""
    (jnp.zeros((), jnp.float32) + 1).block_until_ready()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.synchronize()
