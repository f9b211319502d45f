"""Numbers that are computed where they are used, and not before."""

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.asm import give, i32


def late(number: jax.Array) -> jax.Array:
    """`number`, an int32, after a shuffle within each warp. The compiler moves no shuffle ahead of
    a wait for a barrier, so addresses that follow from the result are computed behind it. From
    `number` itself, or with `mosaic.opaque_zero`, it computes those of all blocks of a loop's body
    at its beginning, and spills them.
    """

    def code(number):
        ptx = "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;"
        value = give(i32(), ptx, [number.value], "=r,r")
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    splat = plgpu.Layout.WG_SPLAT
    result = mosaic.tile_type((), jnp.int32, layout=splat)
    return mosaic.inline(code, lambda number: number, (number,), (splat,), result)
