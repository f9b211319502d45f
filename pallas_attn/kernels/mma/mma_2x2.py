"""Matmuls by mma.sync of a block whose 4 warps share a result two by two: each warp has half of its
rows and half of its columns, where in mma_sync.py it has a quarter of the rows and all columns.
Each fragment that `ldmatrix` loads then meets more of the other operand: 136 loads for 320 matmuls
of a step of the backward at head dim 128, where quarters take 180.

The price: a tile of P or dS, as it comes out of one matmul, is the left operand of the next for
half of the sum only. So it goes through shared memory, where a warp finds all of it, which also
leaves registers for loads ahead of their matmuls. Taking the own half from registers was slower.

`mma_sync.WarpGrid` says which warp has which part: 4 or 2 warps of a warpgroup one above the other,
and warpgroups side by side, each with a part of the columns. Products of rows in shared memory, and
stores, are those of mma_sync.py. Each function has a twin in NumPy, which the interpreter runs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_attn.kernels.lang import asm, mosaic
from pallas_attn.kernels.lang.mosaic import REF, SCALAR
from pallas_attn.kernels.lang.types import DType, Index, RegisterTile, SmemRef
from pallas_attn.kernels.mma import mma_rowmajor, mma_sync
from pallas_attn.kernels.mma.mma_sync import PAIRS, WarpGrid

PARTIALS = 16  # partial sums a row
TWO_BY_TWO = WarpGrid(2)
BARRIER = 8  # the first of those for two warps; a block's and its warpgroups' come before
_BOTH: dict[str, tuple[Any, Any]] = {  # on the GPU, and along an axis in NumPy
    "max": (arith.maximumf, np.max),
    "sum": (arith.addf, np.sum),
}


class RightOperand(NamedTuple):
    """Rows of a right operand in shared memory, whose terms lie side by side."""

    ref: SmemRef
    first: Index  # row
    width: int  # columns of a term


class _RightRows(NamedTuple):
    """16 rows of a right operand, as one lane loads them."""

    address: ir.Value
    width: int  # columns of a term
    start: int  # place of the first row, in numbers


def multiply_rows(sums: list, a: list, right: _RightRows, width: int, dtype: DType) -> None:
    """sums += a @ `width` columns of 16 rows of the right operand: a [term][block], 4 words."""
    address, whole, start = right
    for column in range(0, width, 16):
        some = min(16, width - column)
        b = [
            mma_sync.ldmatrix(address, 2 * (start + n * whole + column), True, some // 4)
            for n in range(len(a))
        ]
        mma_sync.multiply(sums, column // 8, a, b, dtype)


# ---- matmuls ------------------------------------------------------------------------------------


def matmul_add_shared(
    acc: RegisterTile, p: SmemRef, x: RightOperand, sizes: tuple[int, int, int], grid: WarpGrid
) -> RegisterTile:
    """acc + a warpgroup's columns of p @ x, p as `store_tile` left it in shared memory. `sizes`:
    (rows and columns of p, its terms).
    """
    (x_ref, first, width), (rows, inner, terms) = x, sizes
    steps, dtype, shape = (p.shape[1], x_ref.shape[1]), x_ref.dtype, acc.shape
    blocks, wide = grid.blocks(rows), width // grid.shares
    mine = inner // grid.shares

    def code(acc, p, x_ref, first, group):
        high, lane, share = grid.share(group)
        sums, row = mma_sync.numbers_of(acc, blocks), grid.top(high, rows) + lane % 16
        for other in range(grid.shares):  # each begins with the columns that it put there itself
            begin = (share + other) % grid.shares * mine
            a_base = mma_sync.address_of(p, row, begin // 8 + lane // 16, steps[0])
            of_x, chunk = first + begin + lane % 16, share * (wide // 8)
            base = mma_sync.address_of(x_ref, of_x, chunk + lane // 16, steps[1])
            for key in range(0, mine, 16):
                a = [
                    [
                        mma_sync.ldmatrix(a_base, 2 * (b * 16 * steps[0] + n * inner + key))
                        for b in range(blocks)
                    ]
                    for n in range(terms)
                ]
                right = _RightRows(base, width, key * steps[1])
                multiply_rows(sums, a, right, wide, dtype)
        return grid.tile_of_sums(sums, shape)

    def twin(acc, p, x_ref, first, group):
        left = [p[:rows, n * inner :][:, :inner] for n in range(terms)]
        whole = product_of_numpy(left, x_ref[int(first) :][:inner], width)
        return np.array(acc) + whole[:, int(group) * shape[1] :][:, : shape[1]]

    types = (grid.layout(shape), REF, REF, SCALAR, SCALAR)
    args = (acc, p, x_ref, first, jnp.int32(grid.group))
    return mosaic.inline(code, twin, args, types, grid.tile_type(shape, jnp.float32))


def product_of_numpy(p: Any, x: Any, width: int) -> Any:
    out = np.zeros((p[0].shape[0], width), np.float32)
    for i, j in PAIRS[len(p)]:
        of_x = x[:, j * width :][:, :width].astype(np.float32)
        out += np.asarray(p[i]).astype(np.float32) @ of_x
    return out


def transposed_product(
    left: SmemRef, right: SmemRef, sizes: tuple[int, int, int], terms: int, grid: WarpGrid
) -> RegisterTile:
    """A warpgroup's columns of left^T @ right, [rows, width / groups], its warps two by two: `left`
    holds [keys, rows] as `store_tile` left it, `right` [keys, width]. `sizes`: (rows, keys, width).
    """
    (rows, keys, width), dtype, steps = sizes, right.dtype, (left.shape[1], right.shape[1])
    shape, blocks, grid = (rows, width // grid.groups), rows // 32, grid._replace(down=2)
    wide = width // grid.shares

    def code(left, right, group):
        high, lane, share = grid.share(group)
        # Matrices in the order (rows, keys): (0, 0), (8, 0), (0, 8), (8, 8).
        a_row = lane % 8 + lane // 16 * 8
        a_base = mma_sync.address_of(left, a_row, high * (2 * blocks) + lane // 8 % 2, steps[0])
        chunk = share * (wide // 8) + lane // 16
        b_base = mma_sync.address_of(right, lane % 16, chunk, steps[1])
        sums = mma_sync.nothing(blocks, wide)
        for key in range(0, keys, 16):
            a = [
                [
                    mma_sync.ldmatrix(
                        a_base, 2 * (key * steps[0] + p * rows + b * 16), transposed=True
                    )
                    for b in range(blocks)
                ]
                for p in range(terms)
            ]
            right_rows = _RightRows(b_base, width, key * steps[1])
            multiply_rows(sums, a, right_rows, wide, dtype)
        return grid.tile_of_sums(sums, shape)

    def twin(left, right, group):
        out = np.zeros(shape, np.float32)
        for i, j in PAIRS[terms]:
            a = left[:keys, i * rows : (i + 1) * rows].astype(np.float32)
            start = j * width + int(group) * shape[1]
            out += a.T @ right[:keys, start : start + shape[1]].astype(np.float32)
        return out

    args = (left, right, jnp.int32(grid.group))
    result = grid.tile_type(shape, jnp.float32)
    return mosaic.inline(code, twin, args, (REF, REF, SCALAR), result)


# ---- shared memory ------------------------------------------------------------------------------


def store_tile(tile: Sequence[RegisterTile], to: SmemRef, grid: WarpGrid) -> None:
    """A warpgroup's columns of a tile in its terms, side by side, to shared memory."""
    (rows, columns), step = tile[0].shape, to.shape[1]
    whole, mine = columns * grid.groups, columns // grid.across

    def code(tile, to, group):
        high, lane, share = grid.share(group)
        row = grid.top(high, rows) + lane // 4
        start = row * (step // 2) + share * (mine // 2) + lane % 4
        base = asm.shared_address(to, start, 4)
        for n, term in enumerate(tile):
            for i, word in enumerate(mma_rowmajor.words_of(term)):
                below = i // (mine // 4) * 16 + i % 2 * 8
                across = n * whole + i // 2 % (mine // 8) * 8
                ptx = f"st.shared.b32 [$0+{2 * (below * step + across)}], $1;"
                asm.do(ptx, [base, word], "r,r")

    def twin(tile, to, group):
        for n, term in enumerate(tile):
            start = n * whole + int(group) * columns
            to[:rows, start : start + columns] = term

    types = ((grid.layout((rows, columns)),) * len(tile), REF, SCALAR)
    args = (tuple(tile), to, jnp.int32(grid.group))
    mosaic.inline(code, twin, args, types, None)
    assert to.dtype == tile[0].dtype


# ---- rows whose columns two warps share ---------------------------------------------------------
#
# The row's maximum, or its sum, goes by way of shared memory.


def row_layout(rows: int) -> Any:
    """The layout of one number a row, which both warps of a row have, warps two by two."""
    return TWO_BY_TWO.layout((rows, PARTIALS)).reduce(1)


def store_row_partials(tile: RegisterTile, to: SmemRef, op: str) -> None:
    """The largest ("max") or the sum ("sum") of each row, over the columns that one warp has, to
    shared memory: row r of warp w across to `to[w, r]`.
    """
    (rows, columns), whole, (both, numpy) = tile.shape, to.shape[1], _BOTH[op]

    def code(tile, to):
        high, wide, lane = TWO_BY_TWO.place()
        start = wide * whole + high * (rows // 2) + lane // 4
        base = asm.shared_address(to, start, 4)
        for n, pairs in enumerate(halves(tile, rows)):
            number = _tree(both, [vector.extract(x, [], [i]) for x in pairs for i in range(2)])
            for distance in (1, 2):
                number = both(number, utils.shfl_bfly(number, distance))
            asm.do(f"st.shared.f32 [$0+{32 * n}], $1;", [base, number], "r,f")

    def twin(tile, to):
        of_warps = numpy(np.asarray(tile).reshape(rows, 2, columns // 2), axis=2)
        to[:, :rows] = of_warps.T

    types = (TWO_BY_TWO.layout((rows, columns)), REF)
    mosaic.inline(code, twin, (tile, to), types, None)


def load_row_totals(ref: SmemRef, rows: int, op: str) -> RegisterTile:
    """The partials of both warps of a row that `store_row_partials` stored, as one: [rows]."""
    whole, (both, numpy) = ref.shape[1], _BOTH[op]
    layout = row_layout(rows)

    def code(ref):
        high, _, lane = TWO_BY_TWO.place()
        start, f32 = high * (rows // 2) + lane // 4, ir.F32Type.get()
        base, numbers = asm.address_of(ref, start, 4), []
        for n in range(rows // 16):
            two = [
                llvm.load(f32, utils.getelementptr(base, [8 * n + w * whole], f32))
                for w in range(2)
            ]
            numbers.append(vector.broadcast(ir.VectorType.get((1,), f32), both(*two)))
        return mosaic.array_of(numbers, (rows,), layout)

    def twin(ref):
        return numpy(ref[:, :rows], axis=0).astype(np.float32)

    result = mosaic.tile_type((rows,), jnp.float32, layout=layout)
    return mosaic.inline(code, twin, (ref,), (REF,), result)


def sync_row_pair() -> None:
    """A barrier of the two warps of a block of one warpgroup that have the same rows."""

    def code():
        high, _, _ = TWO_BY_TWO.place()
        asm.do(f"bar.sync $0, {2 * 32};", [(high + BARRIER).value], "r")

    mosaic.inline(code, lambda: None, (), (), None)


def partial_sums(tile: RegisterTile) -> RegisterTile:
    """[rows, columns] -> [rows, PARTIALS]: each thread adds up its numbers of a row, in 2 sums."""
    (rows, columns), shape = tile.shape, (tile.shape[0], PARTIALS)

    def code(tile):
        sums = [_tree(arith.addf, pairs) for pairs in halves(tile, rows)]
        return TWO_BY_TWO.tile_with(sums, shape)

    def twin(tile):
        return np.asarray(tile).reshape(rows, 2, columns // PARTIALS, 8).sum(2).reshape(shape)

    types = (TWO_BY_TWO.layout((rows, columns)),)
    result = TWO_BY_TWO.tile_type(shape, jnp.float32)
    return mosaic.inline(code, twin, (tile,), types, result)


def halves(tile: Any, rows: int) -> list[list[ir.Value]]:
    """A thread's pairs of numbers of each of its rows: 8 apart, from the top."""
    by_block = tile.registers.reshape(rows // 32, -1, 2)
    return [list(block[:, half]) for block in by_block for half in range(2)]


def _tree(op: Any, values: list) -> ir.Value:
    while len(values) > 1:
        pairs = [op(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(values) & ~1 :]
    return values[0]
