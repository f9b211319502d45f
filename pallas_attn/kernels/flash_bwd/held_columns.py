"""Left operands of which registers hold some columns: k and v of a work tile of keys, or q and dO
of query rows, whose products with every tile of a ring are S and dP.

A matmul of 64 x 64 with both operands in shared memory is bound by reading them. So a warpgroup
reads the first columns, as many as fit into registers, once a work tile. 128 heads of 192/128, 8192
rows, full, on an H200: dK and dV 18.5 ms, from shared memory 20.0; dQ 11.6 and 13.0
(`results/shapes/`). At head dims of 256 a fourth of k and v fits, and gains nothing.
"""

from typing import NamedTuple

import jax.experimental.pallas as pl

from pallas_attn.kernels.attention.tma_operands import OperandFormat
from pallas_attn.kernels.lang import mosaic, panels
from pallas_attn.kernels.lang.types import SmemRef
from pallas_attn.kernels.mma import wgmma


class HeldColumns(NamedTuple):
    """Columns of 64 rows of 16-bit numbers that a warpgroup holds."""

    form: OperandFormat
    columns: int  # all, or a multiple of `panels.WIDEST`

    @property
    def in_parts(self) -> bool:
        """Whether each matmul of a product takes some of the columns."""
        return bool(self.form.panels) or self.columns > 0

    @property
    def matmuls(self) -> int:
        """Matmuls of a product: one for each part."""
        is_cut = not self.form.panels and 0 < self.columns < self.form.width
        return self.form.copies + is_cut

    def parts(self, tiles: tuple[SmemRef, ...]) -> tuple[SmemRef, ...]:
        """The parts of a tile of either operand: its panels, or the first columns and the rest."""
        if self.matmuls == self.form.copies:
            return tiles
        (tile,), rest = tiles, self.form.width - self.columns
        return tile.at[:, pl.ds(0, self.columns)], tile.at[:, pl.ds(self.columns, rest)]

    def read(self, tiles: tuple[SmemRef, ...]) -> wgmma.Terms:
        """The parts of a tile of the left operand that registers hold."""
        count = pl.cdiv(self.columns, panels.WIDEST) if self.form.panels else min(self.columns, 1)
        return [mosaic.load(part, mosaic.TILE) for part in self.parts(tiles)[:count]]

    def operand(self, first: wgmma.Terms, tiles: tuple[SmemRef, ...]) -> wgmma.Terms:
        """The left operand: the parts that `read` gave, and the others in shared memory."""
        return [*first, *self.parts(tiles)[len(first) :]]


def fitting(form: OperandFormat, registers: int) -> HeldColumns:
    """The columns that fit into `registers` of a thread, each of which holds 4 of them."""
    columns = 4 * max(registers, 0) // panels.WIDEST * panels.WIDEST
    return HeldColumns(form, min(columns, form.width))
