"""Attention of many new rows to a cache, for every GPU from Ampere on: `gathered` with the portable
forward.
"""

from pallas_attn.kernels.flash_fwd import sm80
from pallas_attn.kernels.prefill import gathered

KERNEL = gathered.kernel_with(sm80.KERNEL, most_bytes=2**30)  # small: GPUs may have little memory
