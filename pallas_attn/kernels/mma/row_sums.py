"""Tiles of float32 in registers, each row of which is added to another row of an array in global
memory: a scatter-add by atomic adds of 8 bytes. Four neighbouring threads add 32 bytes of a row.
"""

import threading

import numpy as np
from jaxlib.mlir.dialects import vector

from pallas_attn.kernels.lang import asm, mosaic, threads
from pallas_attn.kernels.lang.thread_program import Int
from pallas_attn.kernels.lang.types import GmemRef, RegisterTile
from pallas_attn.kernels.mma.mma_rowmajor import REF


def add(to: GmemRef, rows: RegisterTile, column: int, tile: RegisterTile) -> None:
    """Adds row i of `tile` [64, columns] to `to[rows[i]]`, from `column` on, for each i; nothing
    where rows[i] is negative. Blocks add in any order.
    """
    pitch = to.shape[1]

    def code(to, rows, tile):
        thread = threads.Thread()
        for half, number in enumerate(rows.registers.flat):
            row = Int(vector.extract(number, [], [0]))
            line = thread.to_int64(row) * pitch + thread.to_int64(thread.index % 4 * 2 + column)
            address, there = asm.address_of(to, line, 4), (row >= 0).value
            for block, pair in enumerate(list(tile.registers.flat)[half::2]):
                two = [vector.extract(pair, [], [i]) for i in range(2)]
                ptx = f"red.global.add.v2.f32 [$1+{32 * block}], {{$2, $3}}"
                asm.do_where(there, ptx, [address, *two], "l,f,f")

    def twin(to, rows, tile):
        there = rows >= 0
        with _ADDING:
            np.add.at(to[:, column : column + tile.shape[1]], rows[there], tile[there])

    mosaic.inline(code, twin, (to, rows, tile), (REF, mosaic.ROW, mosaic.TILE), None)


_ADDING = threading.Lock()  # the interpreter's blocks are threads
