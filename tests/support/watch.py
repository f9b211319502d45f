"""Ends a simulated kernel that stands still, and says what its threads wait for."""

import contextlib
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from jax._src import source_info_util


class Watch:
    """Calls `end` with an error once `seconds` have passed in which every thread slept, whenever it
    was looked at. A machine that is busy with something else does not count.
    """

    def __init__(self, seconds: float, end: Callable[[Exception], None]):
        self.seconds, self.end = seconds, end
        self._over = threading.Event()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        looking = threading.Thread(target=self._look, daemon=True)
        looking.start()
        try:
            yield
        finally:
            self._over.set()
            looking.join()

    def _look(self) -> None:
        since = time.monotonic()
        while not self._over.wait(self.seconds / 20):
            if _somebody_runs():
                since = time.monotonic()
            elif time.monotonic() - since > self.seconds:
                if waiting := "; ".join(_waiting()):
                    self.end(RuntimeError(f"DEADLOCK: {self.seconds:g} s, {waiting}"))
                since = time.monotonic()


def _somebody_runs() -> bool:
    """Whether a thread of this process but the caller is not asleep; True where nobody can tell."""
    threads = pathlib.Path("/proc/self/task")
    if not threads.exists():
        return True
    for thread in threads.iterdir():
        with contextlib.suppress(OSError):
            state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "S" and thread.name != str(threading.get_native_id()):
                return True
    return False


def _waiting() -> list[str]:
    """The threads in callbacks, and their lines of the kernel."""
    lines = []
    for frame in sys._current_frames().values():
        here = frame
        while here is not None and not {"mesh_location", "thread"} <= here.f_locals.keys():
            here = here.f_back
        if here is not None:
            known = here.f_locals
            where = known.get("source_info")
            place = f" at {source_info_util.summarize(where)}" if where else ""
            lines.append(f"{known['thread']} is in {here.f_code.co_name}{place}")
    return sorted(lines)
