"""The end of a work tile: gradients leave registers by way of shared memory, from where TMA stores
them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_attn.kernels.lang import panels
from pallas_attn.kernels.lang.panels import Panels
from pallas_attn.kernels.lang.types import GmemRef, Index, Predicate, RegisterTile

Place = Index | tuple[Index, ...]  # in shared memory


class Staged(NamedTuple):
    """Columns of a gradient, an accumulator a panel, and where they are stored from."""

    parts: Sequence[RegisterTile]
    rows: Panels
    at: Place


def write(some: Sequence[Staged]) -> None:
    """To shared memory, which no matmul reads any more."""
    for parts, rows, at in some:
        for part, to in zip(parts, panels.tiles(rows, at), strict=True):
            to[...] = part.astype(to.dtype)
    plgpu.commit_smem()


def store(
    some: Sequence[Staged],
    to: GmemRef,
    where: tuple[Any, Any, Index],
    predicate: Predicate | None = None,
) -> None:
    """From there to `where`, (batch row, rows, head) of a gradient: its columns, in order."""
    column = 0
    for parts, rows, at in some:
        panels.store(rows, at, to, where, column, predicate)
        column += sum([part.shape[1] for part in parts])
