"""Float32 tiles in a vector in global memory, each in a piece of its own, in the order in which the
threads of a warpgroup hold it: `add` adds to a piece, `store` writes it, `load` reads
it. A piece is one of 8 columns after the other, so it is also several pieces of fewer columns.
"""

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

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


def add(ref: GmemRef, number: Index, tile: RegisterTile, where: Index) -> None:
    """Adds a float32 tile in registers to piece `number` of a vector in global memory, by atomic
    adds of 16 bytes, in the order in which threads hold it; does nothing where `where` is 0.
    """
    slots = tile.size // 4  # slots of 16 bytes: two columns of two rows, neighbouring registers

    def code(ref, number, tile, where):
        registers = list(tile.registers.flat)  # by 8 columns, then rows 0-7 and 8-15 of a warp
        i64 = ir.IntegerType.get_signless(64)
        thread = threads.Thread().index.value
        begin = arith.muli(arith.extsi(i64, number.value), utils.c(slots, i64))
        slot = arith.addi(begin, arith.extui(i64, thread))
        sixteen_bytes = ir.VectorType.get((4,), ir.F32Type.get())
        address = utils.getelementptr(utils.memref_ptr(ref), [slot], sixteen_bytes)
        for n in range(len(registers) // 2):
            pair = registers[2 * n : 2 * n + 2]
            four = [vector.extract(x, [], [i]) for x in pair for i in range(2)]
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [where.value, address, *four],
                "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p red.global.add.v4.f32 "
                f"[$1+{16 * mosaic.THREADS * n}], {{$2, $3, $4, $5}}; }}",
                "r,l,f,f,f,f,~{memory}",
                has_side_effects=True,
            )

    def twin(ref, number, tile, where):
        if where:
            # warp, row / 8, row, 8 columns, 2 columns, column
            pieces = tile.reshape(4, 2, 8, -1, 4, 2).transpose(3, 0, 2, 4, 1, 5)
            ref[int(number) * tile.size :][: tile.size] += pieces.ravel()

    types = (REF, SCALAR, mosaic.TILE, SCALAR)
    mosaic.inline(code, twin, (ref, number, tile, where), types, None)


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
