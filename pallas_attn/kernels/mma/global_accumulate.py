"""Tiles of float32 in global memory that several blocks add to, each number where the thread that
holds it likes it best, and what becomes of them. For the portable backward, whose dQ they are; its
warps stand two by two (`mma_2x2`). Each step carries a twin in NumPy for the interpreter.
"""

import threading
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_attn.kernels.lang import asm, mosaic, threads
from pallas_attn.kernels.lang.mosaic import REF, SCALAR
from pallas_attn.kernels.mma import mma_rowmajor
from pallas_attn.kernels.mma.mma_2x2 import TWO_BY_TWO

Ref = Any
Array = jax.Array


def add(tile: Array, to: Ref, index: Array, vectors: bool) -> None:
    """Adds a tile of float32, warps two by two, to row `index` of `to` [tiles, numbers of a tile],
    as threads hold it, which `load` undoes: so a warp adds to whole lines. In which order
    blocks meet there is anybody's guess. `vectors`: by 4 numbers, which is one instruction from
    sm90 on.
    """
    (rows, columns), size = tile.shape, to.shape[1]

    def code(tile, to, index):
        for address, four in _lines(tile, to, index, size, vectors):
            if vectors:
                ptx = "red.global.add.v4.f32 [$0], {$1, $2, $3, $4};"
                asm.do(ptx, [address[0], *four], "l,f,f,f,f")
                continue
            for target, value in zip(address, four, strict=True):
                asm.do("red.global.add.f32 [$0], $1;", [target, value], "l,f")

    def twin(tile, to, index):
        with _ADDING:
            to[int(index)] += tile.ravel()

    types = (TWO_BY_TWO.layout((rows, columns)), REF, SCALAR)
    mosaic.inline(code, twin, (tile, to, index), types, None)


_ADDING = threading.Lock()  # the interpreter's blocks are threads


def _lines(tile: Any, to: Any, index: Any, size: int, vectors: bool) -> Any:
    thread = threads.Thread()
    start = thread.to_int64(index) * size
    start = start + thread.to_int64(thread.index) * (4 if vectors else 1)
    base = asm.address_of(to, start, 4)
    f32 = ir.F32Type.get()
    for n, pair in enumerate(tile.registers.reshape(-1, 2)):
        four = [vector.extract(x, [], [i]) for x in pair for i in range(2)]
        places = [n * 4 * mosaic.THREADS + (0 if vectors else i * mosaic.THREADS) for i in range(4)]
        yield [utils.getelementptr(base, [place], f32) for place in places], four


def load(ref: Ref, index: Array, shape: tuple[int, int], vectors: bool) -> Array:
    """Row `index` as `add` left it: the tile."""
    size = ref.shape[1]

    def code(ref, index):
        thread, f32 = threads.Thread(), ir.F32Type.get()
        start = thread.to_int64(index) * size
        start = start + thread.to_int64(thread.index) * (4 if vectors else 1)
        base = asm.address_of(ref, start, 4)
        registers = []
        for n in range(size // mosaic.THREADS // 4):
            if vectors:
                address = utils.getelementptr(base, [n * 4 * mosaic.THREADS], f32)
                loaded = llvm.load(ir.VectorType.get((4,), f32), address, alignment=16)
                four = [vector.extract(loaded, [], [i]) for i in range(4)]
            else:
                places = [(4 * n + i) * mosaic.THREADS for i in range(4)]
                four = [llvm.load(f32, utils.getelementptr(base, [p], f32)) for p in places]
            registers += [mma_rowmajor.pair_of(*four[:2]), mma_rowmajor.pair_of(*four[2:])]
        return TWO_BY_TWO.tile_with(registers, shape)

    def twin(ref, index):
        return ref[int(index)].reshape(shape).copy()

    result = TWO_BY_TWO.tile_type(shape, jnp.float32)
    return mosaic.inline(code, twin, (ref, index), (REF, SCALAR), result)
