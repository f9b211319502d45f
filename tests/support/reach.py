"""Devices that are taken to reach each other's memory."""

import contextlib
from collections.abc import Iterator

from pallas_attn._call import device


@contextlib.contextmanager
def assumed() -> Iterator[None]:
    """`device.reaches_peers` holds in this block, whatever the devices are, if they are the whole
    mesh.
    """
    token = device.reaching.set(True)
    try:
        yield
    finally:
        device.reaching.reset(token)
