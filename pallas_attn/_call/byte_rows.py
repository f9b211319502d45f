"""Rows of a latent cache in FlashMLA's format: its sizes.

A row is 656 bytes, all numbers little-endian:

    bytes 0 to 511     columns 0 to 511, those of V: float8_e4m3fn, to be multiplied by a scale
    bytes 512 to 527   four float32, scales: of columns 0 to 127, 128 to 255, and so on
    bytes 528 to 655   columns 512 to 575, those of rope: bfloat16
"""

from typing import NamedTuple

BYTE_DTYPE = "float8_e4m3fn"  # dtype of V's numbers in a row of bytes
REST_DTYPE = "bfloat16"  # dtype of the columns that are not of V
SCALE_COLUMNS = 128  # columns of V that share a scale in a row of bytes


class ByteRow(NamedTuple):
    """Bytes of a row of a latent cache in FlashMLA's format: the columns of V in float8_e4m3fn; a
    float32 scale for each `SCALE_COLUMNS` of them; the other columns of K in bfloat16.
    """

    v_head_dim: int
    rest: int  # columns of K that are not of V: those of rope

    @property
    def scales(self) -> int:
        """Scales of a row."""
        return self.v_head_dim // SCALE_COLUMNS

    @property
    def rest_begins(self) -> int:
        """The byte with which the other columns begin."""
        return self.v_head_dim + 4 * self.scales

    @property
    def size(self) -> int:
        """Bytes of a row."""
        return self.rest_begins + 2 * self.rest


BYTE_ROW = ByteRow(512, 64)  # 656 bytes
