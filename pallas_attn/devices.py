"""The GPU of a call, the implementations that run, how kernels are launched, and what kernels of
your own need: facts of a GPU, and how a call splits over devices.
"""

from pallas_attn._call.device import gpu_generation, overlapping, reaches_peers
from pallas_attn._call.dispatch import chosen
from pallas_attn._call.gpu_specs import multiprocessors, shared_memory
from pallas_attn._mesh.sharding import Split, over_devices, sealed, varying_like

__all__ = [
    "Split",
    "chosen",
    "gpu_generation",
    "multiprocessors",
    "over_devices",
    "overlapping",
    "reaches_peers",
    "sealed",
    "shared_memory",
    "varying_like",
]
