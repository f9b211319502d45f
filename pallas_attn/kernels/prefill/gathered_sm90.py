"""Attention of many new rows to a cache at head dims above 256, for Hopper: `gathered` with
`flash_fwd.sm90_wide`.
"""

from pallas_attn.kernels.flash_fwd import sm90_wide
from pallas_attn.kernels.prefill import gathered

KERNEL = gathered.kernel_with(sm90_wide.KERNEL, most_bytes=2**32)
