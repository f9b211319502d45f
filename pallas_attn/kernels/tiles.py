"""The thin layer over Mosaic GPU: whatever depends on the JAX version, or on the CPU interpreter, is said here and once.

Kernels say what they move; this file says how the installed JAX wants to hear it.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu

Ref = Any

_store = getattr(plgpu, "store", None)  # new in JAX 0.12, which then refuses a plain `ref[...] = value` for some layouts


def load(ref: Ref, layout: Any = None) -> jax.Array:
    """The tile under `ref` in registers, in `layout`; from global memory too, where no layout has a vectorised load."""
    return plgpu.load(ref, layout=layout, optimized=False)


def store(ref: Ref, value: jax.Array) -> None:
    """Writes a register tile of any layout to global memory."""
    if _store is None:
        ref[...] = value
    else:
        _store(ref, value, optimized=False)
