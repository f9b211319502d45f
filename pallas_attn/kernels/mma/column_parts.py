"""Scores where warps divide the columns among them (`mma_rowmajor.Split.parts`). The scores of a
warp are sums over its own columns of q and K; shared memory passes these parts to the other warps,
and each adds up all of them.

A thread stores its registers, and loads those of the same lane of the other warps, in words of 16
bytes that neighbouring threads have side by side. Parts are added in the order of the warps, so all
warps get the same bits.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxlib.mlir.dialects import arith, vector

from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.mosaic import REF
from pallas_attn.kernels.mma import mma_rowmajor
from pallas_attn.kernels.mma.mma_rowmajor import Split

Ref = Any
Array = Any


def shape(split: Split) -> tuple[int]:
    """The shape of the float32 shared memory that `sum_of_parts` uses."""
    return (threads.WARPS * mma_rowmajor.ROWS * split.width,)


def sum_of_parts(s: Array, to: Ref, split: Split) -> Array:
    """The scores [64, columns]; `s`: each warp's part. All threads of the block meet at a barrier
    in here; they must also have met since `to` was last read.
    """

    def code(s, to):
        thread = threads.Thread()
        floats = [vector.extract(pair, [], [i]) for pair in s.registers.flat for i in range(2)]
        fours, always = len(floats) // 4, (thread.index < mosaic.THREADS).value
        for n in range(fours):
            word = thread.index + n * mosaic.THREADS
            mma_rowmajor.store_four(to, word, floats[4 * n : 4 * n + 4], always)
        thread.sync()
        warp, lane = thread.index // 32, thread.index % 32
        first = split.row_block(warp)  # the warp that has the first part of these rows
        registers = []
        for n in range(fours):
            parts = []
            for part in range(split.parts):
                other = (first + part * split.row_blocks) * 32 + lane
                parts.append(thread.shared_floats(to, other + n * mosaic.THREADS, 4))
            four = [x.value for x in parts[0]]
            for more in parts[1:]:
                four = [arith.addf(x, y.value) for x, y in zip(four, more, strict=True)]
            registers += [mma_rowmajor.pair_of(*four[:2]), mma_rowmajor.pair_of(*four[2:])]
        return mma_rowmajor.tile_with(registers, s.shape)

    def twin(s, to):
        parts = s.reshape(split.parts, split.row_blocks, mma_rowmajor.ROWS, -1)
        total = parts[0]
        for more in parts[1:]:
            total = total + more
        to[:] = 0
        return np.broadcast_to(total, parts.shape).reshape(s.shape)

    result = mma_rowmajor.tile_of(s.shape, jnp.float32)
    return mosaic.inline(code, twin, (s, to), (mosaic.TILE, REF), result)
