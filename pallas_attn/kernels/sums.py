"""Tiles of float32 in global memory that several blocks add to, each number where the thread that
holds it likes it best, and what becomes of them. For the portable backward, whose dQ they are; its
warps stand two by two (`squares`). Each step carries a twin in NumPy for the interpreter.
"""

import threading
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_attn.kernels import fragments, squares, tiles, warps
from pallas_attn.kernels.fragments import REF, SCALAR

Ref = Any
Array = jax.Array


def add(tile: Array, to: Ref, index: Array, vectors: bool) -> None:
    """Adds a tile of float32, warps two by two, to row `index` of `to` [tiles, numbers of a tile],
    as threads hold it, which `collected` undoes: so a warp adds to whole lines. In which order
    blocks meet there is anybody's guess. `vectors`: by 4 numbers, which is one instruction from
    sm90 on.
    """
    (rows, columns), size = tile.shape, to.shape[1]

    def code(tile, to, index):
        for address, four in _lines(tile, to, index, size, vectors):
            if vectors:
                ptx = "red.global.add.v4.f32 [$0], {$1, $2, $3, $4};"
                warps.do(ptx, [address[0], *four], "l,f,f,f,f")
                continue
            for one, value in zip(address, four, strict=True):
                warps.do("red.global.add.f32 [$0], $1;", [one, value], "l,f")

    def twin(tile, to, index):
        with _ADDING:
            to[int(index)] += tile.ravel()

    types = (tiles.standing((rows, columns), 2), REF, SCALAR)
    fragments.inline(code, twin, (tile, to, index), types, None)


_ADDING = threading.Lock()  # the interpreter's blocks are threads


def _lines(tile: Any, to: Any, index: Any, size: int, vectors: bool) -> Any:
    thread = warps.Thread()
    start = thread.wide(squares.int_of(index)) * size
    start = start + thread.wide(thread.index % tiles.THREADS) * (4 if vectors else 1)
    base = tiles.address_of(to, start, 4)
    f32 = ir.F32Type.get()
    for n, pair in enumerate(tile.registers.reshape(-1, 2)):
        four = [vector.extract(x, [], [i]) for x in pair for i in range(2)]
        places = [n * 4 * tiles.THREADS + (0 if vectors else i * tiles.THREADS) for i in range(4)]
        yield [utils.getelementptr(base, [place], f32) for place in places], four


def collected(ref: Ref, index: Array, shape: tuple[int, int], vectors: bool) -> Array:
    """Row `index` as `add` left it: the tile."""
    size = ref.shape[1]

    def code(ref, index):
        thread, f32 = warps.Thread(), ir.F32Type.get()
        start = thread.wide(squares.int_of(index)) * size
        start = start + thread.wide(thread.index % tiles.THREADS) * (4 if vectors else 1)
        base = tiles.address_of(ref, start, 4)
        registers = []
        for n in range(size // tiles.THREADS // 4):
            if vectors:
                address = utils.getelementptr(base, [n * 4 * tiles.THREADS], f32)
                loaded = llvm.load(ir.VectorType.get((4,), f32), address, alignment=16)
                four = [vector.extract(loaded, [], [i]) for i in range(4)]
            else:
                places = [(4 * n + i) * tiles.THREADS for i in range(4)]
                four = [llvm.load(f32, utils.getelementptr(base, [p], f32)) for p in places]
            registers += [fragments.pair_of(*four[:2]), fragments.pair_of(*four[2:])]
        return squares.tile_with(registers, shape, 2)

    def twin(ref, index):
        return ref[int(index)].reshape(shape).copy()

    result = squares.result_of(shape, jnp.float32, 2)
    return fragments.inline(code, twin, (ref, index), (REF, SCALAR), result)
