"""What runs, and where: the GPU of a call, the implementations that were chosen, launches."""

from pallas_attn._call.device import gpu_generation, overlapping
from pallas_attn._call.dispatch import chosen

__all__ = ["chosen", "gpu_generation", "overlapping"]
