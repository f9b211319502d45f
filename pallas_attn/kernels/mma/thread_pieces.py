"""Float32 tiles in a vector in global memory, each in a piece of its own, in the order in which the
threads of a warpgroup hold it: `mma_rowmajor.add` adds to a piece, `store` writes it, `load` reads
it. A piece is one of 8 columns after the other, so it is also several pieces of fewer columns.
"""

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_attn.kernels.lang import asm, mosaic, threads
from pallas_attn.kernels.lang.asm import Int
from pallas_attn.kernels.lang.mosaic import REF, SCALAR
from pallas_attn.kernels.lang.types import GmemRef, Index, RegisterTile
from pallas_attn.kernels.mma import mma_rowmajor


def _begin(ref: GmemRef, number: Int, size: int) -> ir.Value:
    """The address of a thread's first 16 bytes in piece `number` of `size` numbers."""
    thread = threads.Thread()
    start = thread.to_int64(number) * (size // 4)
    return asm.address_of(ref, start + thread.to_int64(thread.index), 16)


def store(ref: GmemRef, number: Index, tile: RegisterTile) -> None:
    """Writes a tile to piece `number`."""

    def code(ref, number, tile):
        address, f32 = _begin(ref, number, tile.shape[0] * tile.shape[1]), ir.F32Type.get()
        for n, pair in enumerate(tile.registers.reshape(-1, 2)):
            four = llvm.mlir_undef(ir.VectorType.get((4,), f32))
            for i, register in enumerate(pair):
                for j in range(2):
                    four = vector.insert(vector.extract(register, [], [j]), four, [], [2 * i + j])
            place = utils.getelementptr(address, [n * 4 * mosaic.THREADS], f32)
            llvm.store(four, place, alignment=16)

    def twin(ref, number, tile):
        pieces = tile.reshape(4, 2, 8, -1, 4, 2).transpose(3, 0, 2, 4, 1, 5)
        ref[int(number) * tile.size :][: tile.size] = pieces.ravel()

    mosaic.inline(code, twin, (ref, number, tile), (REF, SCALAR, mosaic.TILE), None)


def load(ref: GmemRef, number: Index, shape: tuple[int, int]) -> RegisterTile:
    """The tile in piece `number`."""
    size = shape[0] * shape[1]

    def code(ref, number):
        address, f32, registers = _begin(ref, number, size), ir.F32Type.get(), []
        for n in range(size // mosaic.THREADS // 4):
            place = utils.getelementptr(address, [n * 4 * mosaic.THREADS], f32)
            four = llvm.load(ir.VectorType.get((4,), f32), place, alignment=16)
            numbers = [vector.extract(four, [], [i]) for i in range(4)]
            registers += [mma_rowmajor.pair_of(*numbers[i : i + 2]) for i in (0, 2)]
        return mma_rowmajor.tile_with(registers, shape)

    def twin(ref, number):
        held = ref[int(number) * size :][:size]
        return held.reshape(-1, 4, 8, 4, 2, 2).transpose(1, 4, 2, 0, 3, 5).reshape(shape)

    result = mosaic.tile_type(shape, jnp.float32, layout=mosaic.TILE)
    return mosaic.inline(code, twin, (ref, number), (REF, SCALAR), result)
