"""Attention to listed rows of a cache, for Hopper: `lists` with `decode.sm90`."""

from pallas_attn.kernels.decode import sm90
from pallas_attn.kernels.decode_listed import lists

KERNEL = lists.kernel_with(sm90.KERNEL, fills=True)
