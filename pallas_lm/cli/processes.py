"""`--coordinator`: this process becomes one of several, which the first of them brings together."""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator

import jax

WAIT = 300.0  # seconds for the others to come
SILENT = 2.0  # seconds until a process says what it waits for


def join(coordinator: str, count: int, number: int) -> None:
    """Joins process `number` of `count` to the others; ValueError where they do not come."""
    if number >= count:
        raise ValueError(f"process: expected 0 to {count - 1} of {count} --processes, got {number}")
    host, port = _address(coordinator)
    if number:
        _reach(host, port, coordinator)
    with _waiting(f"{count - 1} other{'s' * (count > 2)} of {count} processes at {coordinator}"):
        try:
            # XLA ends a process whose wait is over by a stack trace: ours ends before.
            jax.distributed.initialize(
                coordinator, count, number, initialization_timeout=int(WAIT) + 60
            )
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(
                f"coordinator: cannot listen at {coordinator}: {str(error).splitlines()[0]}; name "
                "a free port of this machine"
            ) from None


def _address(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise ValueError(
            f"coordinator: expected HOST:PORT, such as localhost:1234, got {coordinator!r}"
        )
    try:
        socket.getaddrinfo(host, int(port))
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"coordinator: {host}: {why}") from None
    return host, int(port)


def _reach(host: str, port: int, coordinator: str) -> None:
    """Until somebody listens there."""
    end = time.monotonic() + WAIT
    with _waiting(f"the coordinator at {coordinator}", ends=False):
        while (why := _refusal(host, port)) is not None:
            if time.monotonic() > end:
                raise ValueError(
                    f"coordinator: nobody listens at {coordinator} after {WAIT:.0f} s ({why}); "
                    "start --process=0 on that machine"
                )
            time.sleep(0.5)


def _refusal(host: str, port: int) -> str | None:
    """The reason why nobody can be reached, or None."""
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


@contextlib.contextmanager
def _waiting(awaited: str, ends: bool = True) -> Iterator[None]:
    """Says on standard error what a long wait is for; `ends`: and ends the process where nobody
    comes, which is then within XLA.
    """
    done = threading.Event()

    def watch() -> None:
        if done.wait(SILENT):
            return
        _say(f"waiting for {awaited}, {WAIT:.0f} s at most")
        if ends and not done.wait(WAIT - SILENT):
            _say(f"coordinator: no sign of {awaited} after {WAIT:.0f} s")
            os._exit(2)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
