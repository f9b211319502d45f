"""Buffers through which the kernels between two matmuls add up over several GPUs."""

from typing import NamedTuple

import jax


class Exchange(NamedTuple):
    """Memory of each GPU of a mesh axis, and how many calls have used it: see `kernels.norm`."""

    received: jax.Array  # int32[2 * devices, rows, ..], written by other GPUs, cleared here
    device: jax.Array  # int32[1]: which of the GPUs this is
    calls: jax.Array  # int32[1]: how many were before
