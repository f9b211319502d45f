"""Attention to listed rows of a cache, for every GPU from Ampere on: `lists` with `decode.sm80`."""

from pallas_attn.kernels.decode import sm80
from pallas_attn.kernels.decode_listed import lists

KERNEL = lists.kernel_with(sm80.KERNEL, fills=True)
