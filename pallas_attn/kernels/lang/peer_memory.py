"""Kernels that reach the memory of the other GPUs of a mesh."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.lang.types import GmemRef

MOST_DEVICES = 8  # GPUs of a mesh whose memory a kernel reaches


def on_peer(ref: GmemRef, device: jax.Array) -> GmemRef:
    """The twin of `ref`, an operand of the kernel, on GPU `device` of the mesh: for programs of
    `each_thread`. The mesh must have one axis (others of length 1) and be all GPUs that the process
    sees, in their order. XLA has all of them arrive before it launches the kernel on any.
    """
    axes = max(len(jax.sharding.get_abstract_mesh().axis_names), 1)
    place: Any = (*[jnp.int32(0)] * (axes - 1), device)
    return plgpu.remote_ref(ref, place)


def on_peers(
    refs: Sequence[GmemRef], device: jax.Array, devices: int
) -> tuple[tuple[GmemRef, ...], ...]:
    """The twins of refs on every other GPU of the mesh, from the one after `device` on."""
    others = (lax.rem(device + away, jnp.int32(devices)) for away in range(1, devices))
    return tuple(tuple(on_peer(ref, other) for ref in refs) for other in others)


def this_device(axis: str) -> jax.Array:
    """The number of this GPU along an axis of the mesh, in a kernel that reaches others
    (`on_peer`). As an operand it would be made by a launch of XLA's.
    """
    return lax.axis_index(axis)
