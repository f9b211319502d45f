"""Consumers that issue their matmuls in turn: while one computes its softmax, the tensor cores have
another's matmuls. Without it consumers begin to issue them at the same time, and where exponents
take as long as the matmuls (float8, prefill of few rows) tensor cores then idle.
"""

from typing import NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_attn.kernels.lang.types import Barrier, Index


class Turns(NamedTuple):
    """Consumers of as many steps each. Barrier n completes when consumer n may issue the matmuls of
    its next step; the first consumer begins.
    """

    barriers: Barrier
    wg: Index
    consumers: int = 2

    def begin(self) -> None:
        """Done once, before all steps of a launch."""
        pl.when(self.wg == self.consumers - 1)(self.give)

    def take(self) -> None:
        plgpu.barrier_wait(self.barriers.at[self.wg])

    def give(self) -> None:
        if self.consumers == 2:
            following = 1 - self.wg
        else:
            following = jnp.where(self.wg == self.consumers - 1, 0, self.wg + 1)
        plgpu.barrier_arrive(self.barriers.at[following])
