"""Attention to listed rows of a latent cache, for Hopper: `lists` with `decode_mla.sm90`."""

from pallas_attn.kernels.decode_listed import lists
from pallas_attn.kernels.decode_mla import sm90

KERNEL = lists.kernel_with(sm90.KERNEL, fills=False)
