"""Rows of 16-bit numbers in shared memory, in panels of columns that TMA clips exactly.

A tile for wgmma lies in blocks of 8 rows and one swizzle. A copy by TMA to a buffer that Pallas
tiles so takes the array in global memory by the same blocks, and Mosaic rounds its sizes down to
whole ones: rows past the last multiple of 8 and columns past the last swizzle are never read. A
panel is as wide as its swizzle, so that untiled rows are the same bytes. Its buffer has two views:
TMA copies through the untiled one, and then fills with zeros, or leaves unwritten, exactly what
lies past the end of an array; matmuls and registers use the tiled one.

All functions take a plain buffer, too, which is one tiled panel of all columns.
"""

from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu

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
    tiled = mosaic.swizzled((*shape, width), dtype, 2 * width)
    untiled = plgpu.SMEM(tiled.shape, dtype, transforms=tiled.transforms[1:])
    return Panel(plgpu.RefUnion(untiled, tiled))


def tiles(panels: Panels, *at: Index) -> tuple[SmemRef, ...]:
    """The views of matmuls, of all panels at an index."""
    views = [x.tile for x in panels] if isinstance(panels, tuple) else [panels]
    return tuple(view.at[at] for view in views)


def copies(panels: Panels) -> int:
    """The number of copies of `load`, each of which arrives at the barrier."""
    return len(panels) if isinstance(panels, tuple) else 1


def load(  # noqa: PLR0913
    source: GmemRef,
    where: tuple[Any, Any, Index],
    panels: Panels,
    at: Index,
    barrier: Barrier,
    column: int = 0,
) -> None:
    """Asks for rows of one head, from a column on. `where`: batch, rows and head in `source`
    [B, rows, heads, dim]; past its ends lie zeros. `at`: the index in the panels.
    """
    for view, columns in _by_columns(source, panels, where[-1], column):
        plgpu.copy_gmem_to_smem(source.at[(*where, columns)], view.at[at], barrier)


def store(
    panels: Panels,
    at: Index,
    target: GmemRef,
    where: tuple[Any, Any, Index],
    column: int = 0,
    predicate: Predicate | None = None,
) -> None:
    """Writes rows of one head, from a column on, after `commit_smem`, if at all; what lies past the
    ends of `target` is left.
    """
    for view, columns in _by_columns(target, panels, where[-1], column):
        plgpu.copy_smem_to_gmem(view.at[at], target.at[(*where, columns)], predicate)


def _by_columns(
    array: GmemRef, panels: Panels, traced: Index, first: int = 0
) -> list[tuple[SmemRef, Any]]:
    """The views for TMA, and the columns of an array in global memory that each holds."""
    views = [x.for_tma for x in panels] if isinstance(panels, tuple) else [panels]
    starts = [first + sum(view.shape[-1] for view in views[:n]) for n in range(len(views))]
    columns = (
        mosaic.columns(array, start, view.shape[-1], traced)
        for start, view in zip(starts, views, strict=True)
    )
    return list(zip(views, columns, strict=True))
