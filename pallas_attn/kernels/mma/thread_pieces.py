"""Float32 tiles in a vector in global memory, each in a piece of its own, in the order in which the
threads of a warpgroup hold it: `mma_rowmajor.add` adds to a piece, `store` begins one, `load` reads
it.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_attn.kernels.lang import asm, mosaic, threads
from pallas_attn.kernels.lang.thread_program import Int
from pallas_attn.kernels.lang.types import GmemRef, Index, RegisterTile
from pallas_attn.kernels.mma import mma_rowmajor
from pallas_attn.kernels.mma.mma_rowmajor import REF, SCALAR


def _begin(ref: GmemRef, number: RegisterTile, size: int) -> ir.Value:
    """The address of a thread's first 16 bytes in piece `number` of `size` numbers."""
    thread = threads.Thread()
    start = thread.to_int64(Int(number.registers.item())) * (size // 4)
    return asm.address_of(ref, start + thread.to_int64(thread.index), 16)


def store(ref: GmemRef, number: Index, tile: RegisterTile, where: Index) -> None:
    """Writes a tile to piece `number`; does nothing where `where` is 0."""

    def code(ref, number, tile, where):
        address, pairs = _begin(ref, number, tile.shape[0] * tile.shape[1]), tile.registers.flat
        exists = arith.cmpi(arith.CmpIPredicate.ne, where.registers.item(), utils.c(0, asm.i32()))
        numbers = [vector.extract(x, [], [i]) for x in pairs for i in range(2)]
        for n in range(len(numbers) // 4):
            ptx = f"st.global.v4.f32 [$1+{16 * mosaic.THREADS * n}], {{$2, $3, $4, $5}}"
            asm.do_where(exists, ptx, [address, *numbers[4 * n : 4 * n + 4]], "l,f,f,f,f")

    def twin(ref, number, tile, where):
        if where:
            ref[int(number) * tile.size :][: tile.size] = _pieces(tile)

    types = (REF, SCALAR, mosaic.TILE, SCALAR)
    mosaic.inline(code, twin, (ref, number, tile, where), types, None)


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

    result = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=mosaic.TILE)
    return mosaic.inline(code, twin, (ref, number), (REF, SCALAR), result)


def _pieces(tile: RegisterTile) -> RegisterTile:
    """The numbers of a tile in the order of threads, in NumPy."""
    return tile.reshape(4, 2, 8, -1, 4, 2).transpose(3, 0, 2, 4, 1, 5).ravel()
