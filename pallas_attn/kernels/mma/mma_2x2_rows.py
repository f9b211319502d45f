"""What the two warps that share rows of a tile tell each other, where warps stand two by two
(`squares`): the largest number of a row, or its sum, by way of shared memory. Each step carries a
twin in NumPy for the interpreter.
"""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.mma import mma_2x2, mma_rowmajor
from pallas_attn.kernels.mma.mma_rowmajor import REF, SCALAR

Ref = Any
Array = jax.Array

PARTS = 16  # partial sums a row
_BOTH: dict[str, tuple[Any, Any]] = {  # of two numbers on the GPU, and of an axis in NumPy
    "max": (arith.maximumf, np.max),
    "sum": (arith.addf, np.sum),
}


def row_layout(rows: int) -> Any:
    """Of one number a row of tiles whose warps stand two by two: both of a row have it."""
    return mosaic.standing((rows, PARTS), 2).reduce(1)


def put_rows(tile: Array, to: Ref, first: Any, op: str) -> None:
    """The largest ("max") or the sum ("sum") of each row, over the columns that one warp has, to
    shared memory: row r of warp w across to `to[w, first + r]`.
    """
    (rows, columns), whole, (both, numpy) = tile.shape, to.shape[1], _BOTH[op]

    def code(tile, to, first):
        high, wide, lane = mma_2x2.place_of_warp(2)
        start = wide * whole + mma_2x2.int_of(first) + high * (rows // 2) + lane // 4
        base = threads.shared_address(to, start, 4)
        for n, pairs in enumerate(halves(tile, rows)):
            number = _tree(both, [vector.extract(x, [], [i]) for x in pairs for i in range(2)])
            for distance in (1, 2):
                number = both(number, utils.shfl_bfly(number, distance))
            threads.do(f"st.shared.f32 [$0+{32 * n}], $1;", [base, number], "r,f")

    def twin(tile, to, first):
        of_warps = numpy(np.asarray(tile).reshape(rows, 2, columns // 2), axis=2)
        to[:, int(first) : int(first) + rows] = of_warps.T

    types = (mosaic.standing((rows, columns), 2), REF, SCALAR)
    mma_rowmajor.inline(code, twin, (tile, to, jnp.int32(first)), types, None)


def rows_of_both(ref: Ref, first: Any, rows: int, op: str) -> Array:
    """What `put_rows` left of both warps of a row, as one: [rows]."""
    whole, (both, numpy) = ref.shape[1], _BOTH[op]
    layout = row_layout(rows)

    def code(ref, first):
        high, _, lane = mma_2x2.place_of_warp(2)
        start, f32 = mma_2x2.int_of(first) + high * (rows // 2) + lane // 4, ir.F32Type.get()
        base, numbers = mosaic.address_of(ref, start, 4), []
        for n in range(rows // 16):
            two = [
                llvm.load(f32, utils.getelementptr(base, [8 * n + w * whole], f32))
                for w in range(2)
            ]
            numbers.append(vector.broadcast(ir.VectorType.get((1,), f32), both(*two)))
        kind, filled = layout.to_mgpu(), np.empty(len(numbers), object)
        filled[:] = numbers
        return mgpu.FragmentedArray(
            _registers=filled.reshape(kind.registers_shape((rows,))), _layout=kind, _is_signed=None
        )

    def twin(ref, first):
        return numpy(ref[:, int(first) : int(first) + rows], axis=0).astype(np.float32)

    result = plgpu.ShapeDtypeStruct((rows,), jnp.float32, layout=layout)
    return mma_rowmajor.inline(code, twin, (ref, jnp.int32(first)), (REF, SCALAR), result)


BARRIER = 8  # the first of theirs; a block's and its warpgroups' come before


def meet(group: Any) -> None:
    """The two warps of the same rows of warpgroup `group` meet."""

    def code(group):
        high, _, _ = mma_2x2.place_of_warp(2)
        number = mma_2x2.int_of(group) * 2 + high + BARRIER
        threads.do(f"bar.sync $0, {2 * 32};", [number.value], "r")

    mma_rowmajor.inline(code, lambda group: None, (jnp.int32(group),), (SCALAR,), None)


def partial_sums(tile: Array) -> Array:
    """[rows, columns] -> [rows, PARTS]: each thread adds up what it has of a row, in two sums."""
    (rows, columns), shape = tile.shape, (tile.shape[0], PARTS)

    def code(tile):
        return mma_2x2.tile_with(
            [_tree(arith.addf, pairs) for pairs in halves(tile, rows)], shape, 2
        )

    def twin(tile):
        return np.asarray(tile).reshape(rows, 2, columns // PARTS, 8).sum(2).reshape(shape)

    types = (mosaic.standing((rows, columns), 2),)
    return mma_rowmajor.inline(code, twin, (tile,), types, mma_2x2.result_of(shape, jnp.float32, 2))


def halves(tile: Any, rows: int) -> list[list[ir.Value]]:
    """A thread's pairs of numbers of each of its rows: 8 apart, from the top."""
    by_block = tile.registers.reshape(rows // 32, -1, 2)
    return [list(block[:, half]) for block in by_block for half in range(2)]


def _tree(op: Any, values: list) -> ir.Value:
    while len(values) > 1:
        pairs = [op(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(values) & ~1 :]
    return values[0]
