"""The end of a work tile: gradients leave registers by way of shared memory, from where TMA stores
them, a panel of columns at a time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_attn.kernels.lang import panels
from pallas_attn.kernels.lang.panels import Panel
from pallas_attn.kernels.lang.types import GmemRef, Index, Predicate, RegisterTile

Place = Index | tuple[Index, ...]  # in a panel


class Staged(NamedTuple):
    """A panel of a gradient, and the shared memory from which it is stored."""

    part: RegisterTile
    panel: Panel
    at: Place


def staged(parts: Sequence[RegisterTile], buffers: Sequence[tuple[Panel, Place]]) -> list[Staged]:
    return [Staged(part, *buffer) for part, buffer in zip(parts, buffers, strict=True)]


def write(some: Sequence[Staged]) -> None:
    """To shared memory, which no matmul reads any more."""
    for part, panel, index in some:
        (to,) = panels.tiles((panel,), index)
        to[...] = part.astype(to.dtype)
    plgpu.commit_smem()


def store(
    some: Sequence[Staged],
    to: GmemRef,
    where: tuple[Any, ...],
    predicate: Predicate | None = None,
) -> None:
    """From there to `where` (batch row, rows, head) of a gradient, whose panels these are."""
    column = 0
    for part, panel, index in some:
        panels.store((panel,), index, to, where, column, predicate)
        column += part.shape[1]
