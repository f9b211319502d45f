"""A name that other folders still import from here: `tiles.KernelContext`."""

from pallas_attn.kernels.attention.tiles import KernelContext

Context = KernelContext
