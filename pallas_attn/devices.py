"""The GPU of a call, the implementations that run, and how kernels are launched."""

from pallas_attn._call.device import gpu_generation, overlapping
from pallas_attn._call.dispatch import chosen

__all__ = ["chosen", "gpu_generation", "overlapping"]
