"""Attention to listed rows of a latent cache, for every GPU from Ampere on: `lists` with
`decode_mla.sm80`.
"""

from pallas_attn.kernels.decode_listed import lists
from pallas_attn.kernels.decode_mla import sm80

KERNEL = lists.kernel_with(sm80.KERNEL, fills=True)
