"""Tiles of float32 in registers, each row of which is added to another row of an array in global
memory: a scatter-add by atomic adds.

Four neighbouring threads hold 8 columns of a row, and a warp 8 rows of each 8 columns. Adds of 32
bytes a row were slow: before, threads swap columns with those of other rows, so that half a warp
adds 128 bytes of a row, a whole line of L2.
"""

import threading

import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_attn.kernels.lang import asm, mosaic, threads
from pallas_attn.kernels.lang.asm import Int
from pallas_attn.kernels.lang.mosaic import REF
from pallas_attn.kernels.lang.types import GmemRef, RegisterTile

LINE = 32  # float32 numbers of 128 bytes
BLOCKS = 4  # blocks of 8 columns of a line


def add(to: GmemRef, rows: RegisterTile, column: int, tile: RegisterTile) -> None:
    """Adds row i of `tile` [64, columns], whole lines, to `to[rows[i]]`, from `column` on, for each
    i; nothing where rows[i] is negative. Blocks add in any order.
    """
    pitch = to.shape[1]

    def code(to, rows, tile):
        thread = threads.Thread()
        lane, registers = thread.index % 32, list(tile.registers.flat)
        for half, number in enumerate(rows.registers.flat):
            own = Int(vector.extract(number, [], [0]))
            pairs = [
                [vector.extract(pair, [], [i]) for i in range(2)] for pair in registers[half::2]
            ]
            lines = [_by_lines(lane, pairs[n : n + BLOCKS]) for n in range(0, len(pairs), BLOCKS)]
            # Entry n of a line has row 2 n in half of the warp's threads, 2 n + 1 in the other.
            for n in range(BLOCKS):
                row = thread.of_lane(own, (lane // 4 % 2 + 2 * n) * 4)
                place = lane // 8 * 8 + lane % 4 * 2 + column
                at = thread.to_int64(row) * pitch + thread.to_int64(place)
                address, there = asm.address_of(to, at, 4), (row >= 0).value
                for number_of_line, line in enumerate(lines):
                    ptx = f"red.global.add.v2.f32 [$1+{4 * LINE * number_of_line}], {{$2, $3}}"
                    asm.do_where(there, ptx, [address, *line[n]], "l,f,f")

    def twin(to, rows, tile):
        there = rows >= 0
        with _ADDING:
            np.add.at(to[:, column : column + tile.shape[1]], rows[there], tile[there])

    mosaic.inline(code, twin, (to, rows, tile), (REF, mosaic.ROW, mosaic.TILE), None)


def _by_lines(lane: Int, pairs: list[list[ir.Value]]) -> list[list[ir.Value]]:
    """Transposes 8 rows of 4 blocks of 8 columns in a warp. A thread has two numbers of each block,
    all of row `lane // 4`; it gets two of each pair of rows, all of block `lane // 8`. Each shuffle
    exchanges a bit of the row's number with one of the block's.
    """
    for bit, apart in ((16, 2), (8, 1)):
        upper = (lane // bit % 2 >= 1).value
        swapped = list(pairs)
        for n in range(BLOCKS):
            if n & apart:
                continue
            low, high = pairs[n], pairs[n + apart]
            sent = [arith.select(upper, x, y) for x, y in zip(low, high, strict=True)]
            got = [utils.shfl_bfly(x, bit) for x in sent]
            swapped[n] = [arith.select(upper, x, y) for x, y in zip(got, low, strict=True)]
            swapped[n + apart] = [arith.select(upper, x, y) for x, y in zip(high, got, strict=True)]
        pairs = swapped
    return pairs


_ADDING = threading.Lock()  # the interpreter's blocks are threads
