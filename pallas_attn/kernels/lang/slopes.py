"""Slopes along the columns of a tile, as numbers in the instructions."""

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir.dialects import math, vector

from pallas_attn.kernels.lang import mosaic

COLUMNS = 8  # neighbours that share a slope: a quad of threads holds two of them each


def add_slopes(s: jax.Array, slope: jax.Array) -> jax.Array:
    """s + slope * (column rounded down to a multiple of `COLUMNS`): float32 [64, keys], [64].

    In jax.numpy the products are computed before the loop over kv tiles, held in 16 registers or
    more, and spilled. Here a logit takes one multiply-add.
    """

    def code(s, slope):
        registers, own = (
            s.registers.copy(),
            [vector.extract(r, [], [0]) for r in slope.registers.flat],
        )
        for at, pair in enumerate(s.registers.flat):
            block, row = divmod(at, 2)
            for i in range(2 if block else 0):
                logit = vector.extract(pair, [], [i])
                column = utils.c(float(COLUMNS * block), logit.type)
                pair = vector.insert(math.fma(own[row], column, logit), pair, [], [i])
            registers[np.unravel_index(at, registers.shape)] = pair
        return mgpu.FragmentedArray(_registers=registers, _layout=s.layout, _is_signed=None)

    def twin(s, slope):
        column = jnp.arange(s.shape[1])[None] // COLUMNS * COLUMNS
        return s + slope[:, None] * column.astype(jnp.float32)

    result = mosaic.tile_type(s.shape, jnp.float32, layout=mosaic.TILE)
    types = mosaic.TILE, mosaic.ROW
    return mosaic.inline(code, twin, (s, slope), types, result, traced=True)
