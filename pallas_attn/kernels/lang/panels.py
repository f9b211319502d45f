"""Rows of 16-bit numbers in shared memory, in panels of columns that TMA clips exactly.

wgmma takes a tile in blocks of 8 rows by one swizzle. For a TMA copy to a buffer that Pallas tiles
in this way, Mosaic divides the array in global memory into the same blocks and rounds its sizes
down to whole blocks: rows past the last multiple of 8 and columns past the last swizzle are never
read. A panel is as wide as its swizzle, so that its tiled and untiled layouts are the same bytes.
Its buffer has two views. TMA copies through the untiled view, and so treats exactly the places past
the end of an array as out of bounds: it loads zeros there, and stores nothing. Matmuls and
registers use the tiled view.

All functions also take a plain buffer, which is one tiled panel of all columns.

Buffers that pass from a producer to consumers and back are slots of a `Ring`: each has a barrier
that it is filled, and one that all consumers have released it.
"""

import functools
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import Barrier, DType, GmemRef, Index, Predicate, SmemRef

WIDEST = 64  # columns of a swizzle of 128 bytes


def widths(dim: int) -> tuple[int, ...]:
    """Columns of the panels for rows of `dim` numbers: 64 each, and 16, 32 or 64 for the rest."""
    whole, rest = divmod(dim, WIDEST)
    last = [next(width for width in (16, 32, 64) if rest <= width)] if rest else []
    return (*[WIDEST] * whole, *last)


class Panel(NamedTuple):
    """A buffer [.., rows, columns]."""

    views: Any  # untiled and tiled: the same bytes

    @property
    def for_tma(self) -> SmemRef:
        return self.views[0]

    @property
    def tile(self) -> SmemRef:
        """The view of matmuls and registers."""
        return self.views[1]


Panels = tuple[Panel, ...] | SmemRef


def scratch(shape: tuple[int, ...], dtype: DType, width: int) -> Panel:
    """A panel of `width` columns as shared memory; `shape`: [.., rows]."""
    tiled = mosaic.swizzled((*shape, width), dtype, jnp.dtype(dtype).itemsize * width)
    untiled = plgpu.SMEM(tiled.shape, dtype, transforms=tiled.transforms[1:])
    return Panel(plgpu.RefUnion(untiled, tiled))


def tiles(panels: Panels, at: Any) -> tuple[SmemRef, ...]:
    """The views of matmuls, of all panels at an index, or at a tuple of them."""
    views = [x.tile for x in panels] if isinstance(panels, tuple) else [panels]
    return tuple([view.at[at] for view in views])


def load(
    source: GmemRef,
    where: tuple[Any, Any, Index],
    panels: Panels,
    at: Index,
    barrier: Barrier,
    column: int = 0,
) -> None:
    """Issues loads of rows of one head, from a column on. `where`: batch, rows and head in `source`
    [B, rows, heads, dim], past whose ends zeros are loaded. `at`: the index in the panels.
    """
    for view, columns in _by_columns(source, panels, where[-1], column):
        plgpu.copy_gmem_to_smem(source.at[(*where, columns)], view.at[at], barrier)


def load_columns(
    source: GmemRef,
    where: tuple[Any, ...],
    panels: tuple[Panel, ...],
    at: Index,
    barrier: Barrier,
    column: Index,
) -> None:
    """Issues loads of columns of `source[*where]` from a traced one on; zeros past the end."""
    for panel in panels:
        width = panel.for_tma.shape[-1]
        some = source.at[(*where, pl.ds(column, width))]
        plgpu.copy_gmem_to_smem(some, panel.for_tma.at[at], barrier)
        column = column + width


def store(
    panels: Panels,
    at: Any,
    target: GmemRef,
    where: tuple[Any, Any, Index],
    column: int = 0,
    predicate: Predicate | None = None,
) -> None:
    """Issues stores of rows of one head, from a column on, if `predicate` holds; `commit_smem`
    comes before. Places past the ends of `target` are not written.
    """
    for view, columns in _by_columns(target, panels, where[-1], column):
        plgpu.copy_smem_to_gmem(view.at[at], target.at[(*where, columns)], predicate)


def _by_columns(
    array: GmemRef, panels: Panels, traced: Index, first: int = 0
) -> list[tuple[SmemRef, Any]]:
    """The views for TMA, and the columns of an array in global memory that each holds."""
    views = [x.for_tma for x in panels] if isinstance(panels, tuple) else [panels]
    columns = []
    for view in views:
        columns.append((view, mosaic.columns(array, first, view.shape[-1], traced)))
        first += view.shape[-1]
    return columns


# ---- rings ---------------------------------------------------------------------------------------


class Ring(NamedTuple):
    """Slots that are filled one after the other."""

    tiles: Panels | None  # [slots, rows, columns]; None where the kernel finds them itself
    ready: Barrier  # one a slot: it is filled
    free: Barrier  # one a slot: all consumers have released it
    row_stats: SmemRef = None  # [slots, rows]: a number for each query, arrives with the tile

    @classmethod
    def of(cls, ctx: Any) -> "Ring":
        """The ring of a kernel that has one."""
        return cls(None, ctx.smem.ready, ctx.smem.free)

    def slot(self, count: Index) -> Index:
        """The slot of what comes after `count` others."""
        return ring_slot(count, self.ready.shape[0])

    def after(self, slot: Index) -> Index:
        return jnp.where(slot == self.ready.shape[0] - 1, 0, slot + 1)

    def acquire(self, count: Index, slot: Index | None = None) -> Index:
        """The producer waits until it may fill a slot for the first time after `count` others.
        `slot`: its number as `slot` gives it; None: by a division, as the forward always has it.
        """
        if slot is None:
            slot = lax.rem(count, jnp.int32(self.ready.shape[0]))
        released = self.free.at[slot]
        pl.when(count >= self.ready.shape[0])(functools.partial(plgpu.barrier_wait, released))
        return slot

    def wait(self, slot: Index) -> None:
        """A consumer waits until a slot is filled."""
        plgpu.barrier_wait(self.ready.at[slot])

    def release(self, slot: Index) -> None:
        plgpu.barrier_arrive(self.free.at[slot])


def ring_slot(count: Index, size: int) -> Index:
    """count modulo size."""
    return count & (size - 1) if size & (size - 1) == 0 else lax.rem(count, jnp.int32(size))


class Block(NamedTuple):
    """A slot of a ring, such as a block of columns of a tile."""

    ref: SmemRef  # [rows, columns]
    ready: Barrier  # the producer's copies complete it
    free: Barrier  # consumers arrive when they have multiplied the block
    buffer: SmemRef = None  # the buffer that has the block
    place: tuple[Index, ...] = ()  # its indices there

    def acquire(self, reused: Predicate) -> None:
        """The producer waits until the block is released, if it was used before."""
        pl.when(reused)(functools.partial(plgpu.barrier_wait, self.free))

    def wait(self) -> None:
        plgpu.barrier_wait(self.ready)

    def release(self) -> None:
        plgpu.barrier_arrive(self.free)
