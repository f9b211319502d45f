"""Consumers that issue their matmuls one after the other."""

from typing import NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_attn.kernels.lang.types import Barrier, Index


class Alternation(NamedTuple):
    """Two consumers that have as many steps issue their matmuls in turn: while one computes its
    softmax, the tensor cores have the other's matmuls. Barrier n completes when consumer n may
    issue those of its next step; the first consumer begins.
    """

    barriers: Barrier
    wg: Index

    def begin(self) -> None:
        """Done once, before all steps of a launch."""
        pl.when(self.wg == 1)(self.give)

    def take(self) -> None:
        plgpu.barrier_wait(self.barriers.at[self.wg])

    def give(self) -> None:
        plgpu.barrier_arrive(self.barriers.at[1 - self.wg])
