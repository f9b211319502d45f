"""Results of 16 bits on their way to global memory: through shared memory, where each warp puts its
rows in order, and on by 16 bytes a thread. Out of registers a thread has words of 4 bytes, and 8
rows at a time: four times as many requests, each for half of what memory moves at once.
"""

from typing import Any

import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_attn.kernels.lang import asm, mosaic, threads
from pallas_attn.kernels.lang.asm import Int
from pallas_attn.kernels.lang.mosaic import REF, SCALAR
from pallas_attn.kernels.mma.mma_sync import BLOCKS, WarpGrid

Ref = Any
Array = Any


def write(
    tile: Array, to: Ref, at: tuple[Any, ...], stage: tuple[Ref, Any], grid: WarpGrid = BLOCKS
) -> None:
    """`mma_sync.write` by way of `stage`: (shared memory, the first of the warpgroup's rows there),
    where nobody else reads or writes any more what lies in a warp's rows and columns.
    """
    (_, length, heads, dim), (rows, width), (room, first) = to.shape, tile.shape, stage
    pitch, mine, whole = room.shape[1], width // grid.across, width * grid.groups
    step, chunks, count = grid.step, mine // 8, grid.blocks(rows)
    assert pitch >= width and tile.dtype.itemsize == 2 == room.dtype.itemsize

    def code(tile, to, at, room, first, group):
        thread = threads.Thread()
        high, wide, lane = grid.place()
        batch, head, start, live = at
        top = grid.top(high, rows)
        own = first + top
        begin = (own + lane // 4) * (pitch // 2) + wide * (mine // 2) + lane % 4
        base = asm.shared_address(room, begin, 4)
        for n, register in enumerate(tile.registers.flat):
            below, across = n // (mine // 4) * step + n % 2 * 8, n // 2 % chunks * 8
            word = llvm.bitcast(asm.i32(), register)
            asm.do(f"st.shared.b32 [$0+{2 * (below * pitch + across)}], $1;", [base, word], "r,r")
        asm.do("bar.warp.sync 0xffffffff;", [], "")
        line = thread.to_int64((batch * length + start) * heads + head)  # rows count in 32 bits
        column = group * (width // 8) + wide * chunks
        for index in range(0, 16 * chunks, 32):
            row, chunk = (lane + index) // chunks, (lane + index) % chunks
            if chunks % 32 == 0:
                row, chunk = lane * 0 + index // chunks, lane + index % chunks
            inside = None if dim == whole else column + chunk < dim // 8
            if index + 32 > 16 * chunks:
                inside = _both(inside, lane + index < 16 * chunks)
            source = (own + row) * (pitch // 8) + wide * chunks + chunk
            address = asm.shared_address(room, source, 16)
            target = thread.to_int64((top + row) * (heads * (dim // 8)) + column + chunk)
            pointer = asm.address_of(to, line * (dim // 8) + target, 16)
            for block in range(count):
                there = _both(inside, top + row + block * step < live)
                far = 2 * block * step * pitch, 2 * block * step * heads * dim
                _copy(address, pointer, far, there)

    def twin(tile, to, at, room, first, group):
        batch, head, start, live = map(int, at)
        live, begin = max(0, min(live, rows)), int(group) * width
        some = max(0, min(dim - begin, width))
        room[int(first) : int(first) + rows, :width] = tile
        to[batch, start : start + live, head, begin : begin + some] = tile[:live, :some]

    types = (grid.layout((rows, width)), REF, (SCALAR,) * 4, REF, SCALAR, SCALAR)
    args = (tile, to, tuple(at), room, jnp.int32(first), jnp.int32(grid.group))
    mosaic.inline(code, twin, args, types, None)


def _both(a: Int | None, b: Int) -> Int:
    return b if a is None else a & b


def _copy(source: ir.Value, target: ir.Value, far: tuple[int, int], there: Int) -> None:
    """16 bytes from shared to global memory."""
    ptx = (
        "{ .reg .pred p; .reg .b32 a, b, c, d; setp.ne.b32 p, $0, 0; "
        f"@p ld.shared.v4.b32 {{a, b, c, d}}, [$1+{far[0]}]; "
        f"@p st.global.v4.b32 [$2+{far[1]}], {{a, b, c, d}}; }}"
    )
    asm.do(ptx, [arith.extui(asm.i32(), there.value), source, target], "r,r,l")
