"""Matmuls by mma.sync of a block whose 4 warps share a result two by two: each warp has half of its
rows and half of its columns, where in mma_sync.py it has a quarter of the rows and all columns.
Each fragment that `ldmatrix` loads then meets more of the other operand: 136 loads for 320 matmuls
of a step of the backward at head dim 128, where quarters take 180.

The price: a tile of P or dS, as it comes out of one matmul, is the left operand of the next for
half of the sum only. So it goes through shared memory, where a warp finds all of it, which also
leaves registers for loads ahead of their matmuls. Taking the own half from registers was slower.

`WarpGrid` says which warp has which part: 4 or 2 warps of a warpgroup one above the other, and
warpgroups side by side, each with a part of the columns. Each function has a twin in NumPy, which
the interpreter runs.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.lang.mosaic import Int
from pallas_attn.kernels.mma import mma_rowmajor, mma_sync
from pallas_attn.kernels.mma.mma_rowmajor import REF, SCALAR
from pallas_attn.kernels.mma.mma_sync import PAIRS

Ref = Any
Array = Any

PARTIALS = 16  # partial sums a row
BARRIER = 8  # the first of those for two warps; a block's and its warpgroups' come before
_BOTH: dict[str, tuple[Any, Any]] = {  # of two numbers on the GPU, and of an axis in NumPy
    "max": (arith.maximumf, np.max),
    "sum": (arith.addf, np.sum),
}


class RightOperand(NamedTuple):
    """Rows of a right operand in shared memory, whose terms lie side by side."""

    ref: Ref
    first: Any  # row, an int32 scalar
    width: int  # of a term


class RowMax(NamedTuple):
    """The maxima of a tile's rows on their way to shared memory: see `store_row_partials`."""

    tile: Array
    to: Ref
    first: Any


class Exponents(NamedTuple):
    """2**(given * unit - base) of a tile, on its way to shared memory."""

    given: Array
    unit: float | None  # None: 1
    base: Array  # one number a row
    to: Ref
    first: Any  # row of `to`


class _RightRows(NamedTuple):
    """16 rows of a right operand, as one lane loads them."""

    address: ir.Value
    width: int  # of a term
    start: int  # where the first row lies, in numbers


class WarpGrid(NamedTuple):
    """Which warp of a block has which part of a result."""

    down: int  # warps of a warpgroup one above the other
    groups: int = 1  # warpgroups, side by side
    group: Any = 0  # which one this is, an int32 scalar
    row: Any = 0  # where its rows begin in what a warpgroup puts in shared memory for itself

    @property
    def across(self) -> int:
        """Warps of a warpgroup side by side."""
        return 4 // self.down

    @property
    def shares(self) -> int:
        """Into how many shares a result's columns fall."""
        return self.across * self.groups


def result_of(shape: tuple[int, int], dtype: Any, down: int) -> Any:
    return plgpu.ShapeDtypeStruct(shape, jnp.dtype(dtype), layout=mosaic.warp_layout(shape, down))


def tile_with(registers: list, shape: tuple[int, int], down: int) -> Any:
    return mosaic.array_of(registers, shape, mosaic.warp_layout(shape, down))


def tile_of_sums(sums: list, shape: tuple[int, int], down: int) -> Any:
    pairs = [
        mma_rowmajor.pair_of(s[2 * half], s[2 * half + 1])
        for of_block in sums
        for s in of_block
        for half in range(2)
    ]
    return tile_with(pairs, shape, down)


def place_of_warp(down: int) -> tuple[Int, Int, Int]:
    """(which of the warps down, which across, lane)."""
    warp, lane = mma_sync.warp_and_lane()
    return warp // (4 // down), warp % (4 // down), lane


def int_of(scalar: Any) -> Int:
    return Int(scalar.registers.item())


def multiply_rows(
    sums: list, a: list, right: _RightRows, width: int, dtype: Any, after: Any = lambda: None
) -> None:
    """sums += a @ `width` columns of 16 rows of the right operand: a [term][block], 4 words.
    `after` is called after each 16 columns.
    """
    address, whole, start = right
    for column in range(0, width, 16):
        some = min(16, width - column)
        b = [
            mma_sync.ldmatrix(address, 2 * (start + n * whole + column), True, some // 4)
            for n in range(len(a))
        ]
        mma_sync.multiply(sums, column // 8, a, b, dtype)
        after()


# ---- matmuls ------------------------------------------------------------------------------------


def product(
    left: tuple[Ref, Array],
    right: tuple[Ref, Array],
    sizes: Sequence[int],
    terms: int,
    down: int,
) -> Array:
    """left @ right^T of rows in shared memory, (ref, the first of them). `sizes`: (rows of the
    left, rows of the right, the width of a term).
    """
    return either_product(((left, right),), 0, sizes, terms, down)


def either_product(
    pairs: Sequence[Any], which: Any, sizes: Sequence[int], terms: int, down: int
) -> Array:
    """`product` of the `which`-th of one or two pairs (left, right), whose rows are alike."""
    (rows, columns, width), (a_ref, b_ref) = sizes, (x[0] for x in pairs[0])
    dtype, steps, shape = a_ref.dtype, (a_ref.shape[1], b_ref.shape[1]), (rows, columns)
    blocks, mine = rows // down // 16, columns * down // 4
    assert all((a[0].shape[1], b[0].shape[1]) == steps for a, b in pairs)

    def bases(a, b):
        """A lane's addresses in both operands."""
        high, wide, lane = place_of_warp(down)
        row = int_of(a[1]) + high * (16 * blocks) + lane % 16
        left = mma_sync.address_of(a[0], row, lane // 16, steps[0])
        row = int_of(b[1]) + wide * mine + lane % 8 + lane // 16 * 8
        return left, mma_sync.address_of(b[0], row, lane // 8 % 2, steps[1])

    def code(pairs, which):
        found = [bases(*pair) for pair in pairs]
        if len(found) > 1:
            second = (int_of(which) >= 1).value
            found = [[arith.select(second, b, a) for a, b in zip(*found, strict=True)]]
        a_base, b_base = found[0]
        sums = mma_sync.nothing(blocks, mine)
        small = mma_sync.nothing(blocks, mine) if terms == 3 else None
        for column in range(0, width, 16):
            a = [
                [
                    mma_sync.ldmatrix(a_base, 2 * (b * 16 * steps[0] + p * width + column))
                    for b in range(blocks)
                ]
                for p in range(terms)
            ]
            for key in range(0, mine, 16):
                b = [
                    mma_sync.ldmatrix(b_base, 2 * (key * steps[1] + p * width + column))
                    for p in range(terms)
                ]
                mma_sync.multiply(sums, key // 8, a, b, dtype, small)
        if small is not None:
            mma_sync.plus(sums, small, 0)
        return tile_of_sums(sums, shape, down)

    def twin(pairs, which):
        (a_ref, a_first), (b_ref, b_first) = pairs[int(which)]
        a, b = a_ref[int(a_first) :][:rows], b_ref[int(b_first) :][:columns]
        out = np.zeros(shape, np.float32)
        for i, j in PAIRS[terms]:
            of_a, of_b = (x[:, n * width :][:, :width] for x, n in ((a, i), (b, j)))
            out += of_a.astype(np.float32) @ of_b.astype(np.float32).T
        return out

    types = (((REF, SCALAR), (REF, SCALAR)),) * len(pairs), SCALAR
    args = (tuple(pairs), jnp.int32(which))
    return mma_rowmajor.inline(code, twin, args, types, result_of(shape, jnp.float32, down))


def matmul_add(acc: Array, p: Sequence[Array], x: RightOperand, down: int) -> Array:
    """acc + p @ x, p in registers, for warps one above the other: each has whole rows."""
    assert down == 4
    (x_ref, first, width), (rows, inner) = x, p[0].shape
    step, dtype, blocks = x_ref.shape[1], x_ref.dtype, rows // 64

    def code(acc, p, x_ref, first):
        _, _, lane = place_of_warp(down)
        base = mma_sync.address_of(x_ref, int_of(first) + lane % 16, lane // 16, step)
        sums, words = mma_sync.numbers_of(acc, blocks), [mma_rowmajor.words_of(term) for term in p]
        for key in range(0, inner, 16):
            starts = [(block * inner + key) // 4 for block in range(blocks)]
            a = [[term[start : start + 4] for start in starts] for term in words]
            multiply_rows(sums, a, _RightRows(base, width, key * step), width, dtype)
        return tile_of_sums(sums, (rows, width), down)

    def twin(acc, p, x_ref, first):
        return np.array(acc) + product_of_numpy(p, x_ref[int(first) :][:inner], width)

    kind = mosaic.warp_layout((rows, width), down)
    types = (kind, (mosaic.warp_layout((rows, inner), down),) * len(p), REF, SCALAR)
    result = result_of((rows, width), jnp.float32, down)
    return mma_rowmajor.inline(code, twin, (acc, tuple(p), x_ref, first), types, result)


def matmul_add_shared(
    acc: Array, p: Ref, x: RightOperand, sizes: tuple[int, int, int], grid: WarpGrid
) -> Array:
    """acc + a warpgroup's columns of p @ x, p as `store_tile` left it in shared memory. `sizes`:
    (rows and columns of p, its terms).
    """
    (x_ref, first, width), (rows, inner, terms) = x, sizes
    steps, dtype, shape = (p.shape[1], x_ref.shape[1]), x_ref.dtype, acc.shape
    blocks, wide = rows // grid.down // 16, width // grid.shares
    mine = inner // grid.shares

    def code(acc, p, x_ref, first, group, row):
        high, lane, share = _share(grid, group)
        sums, row = mma_sync.numbers_of(acc, blocks), int_of(row) + high * (16 * blocks) + lane % 16
        for other in range(grid.shares):  # each begins with the columns that it put there itself
            begin = (share + other) % grid.shares * mine
            a_base = mma_sync.address_of(p, row, begin // 8 + lane // 16, steps[0])
            of_x, chunk = int_of(first) + begin + lane % 16, share * (wide // 8)
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
        return tile_of_sums(sums, shape, grid.down)

    def twin(acc, p, x_ref, first, group, row):
        left = [p[int(row) :][:rows, n * inner :][:, :inner] for n in range(terms)]
        whole = product_of_numpy(left, x_ref[int(first) :][:inner], width)
        return np.array(acc) + whole[:, int(group) * shape[1] :][:, : shape[1]]

    types = (mosaic.warp_layout(shape, grid.down), REF, REF, SCALAR, SCALAR, SCALAR)
    args = (acc, p, x_ref, first, jnp.int32(grid.group), jnp.int32(grid.row))
    return mma_rowmajor.inline(code, twin, args, types, result_of(shape, jnp.float32, grid.down))


def product_of_numpy(p: Any, x: Any, width: int) -> Any:
    out = np.zeros((p[0].shape[0], width), np.float32)
    for i, j in PAIRS[len(p)]:
        of_x = x[:, j * width :][:, :width].astype(np.float32)
        out += np.asarray(p[i]).astype(np.float32) @ of_x
    return out


def _share(grid: WarpGrid, group: Any) -> tuple[Int, Int, Int]:
    """(which of the warps down, lane, which share of the columns)."""
    high, wide, lane = place_of_warp(grid.down)
    return high, lane, wide if grid.groups == 1 else int_of(group) * grid.across + wide


def transposed_product(
    left: Ref, right: Ref, sizes: tuple[int, int, int], terms: int, grid: WarpGrid
) -> Array:
    """A warpgroup's columns of left^T @ right, [rows, width / groups], its warps two by two: `left`
    holds [keys, rows] as `store_tile` left it, `right` [keys, width]. `sizes`: (rows, keys, width).
    """
    (rows, keys, width), dtype, steps = sizes, right.dtype, (left.shape[1], right.shape[1])
    shape, blocks, grid = (rows, width // grid.groups), rows // 32, grid._replace(down=2)
    wide = width // grid.shares

    def code(left, right, group):
        high, lane, share = _share(grid, group)
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
        return tile_of_sums(sums, shape, 2)

    def twin(left, right, group):
        out = np.zeros(shape, np.float32)
        for i, j in PAIRS[terms]:
            a = left[:keys, i * rows : (i + 1) * rows].astype(np.float32)
            start = j * width + int(group) * shape[1]
            out += a.T @ right[:keys, start : start + shape[1]].astype(np.float32)
        return out

    args = (left, right, jnp.int32(grid.group))
    result = result_of(shape, jnp.float32, 2)
    return mma_rowmajor.inline(code, twin, args, (REF, REF, SCALAR), result)


# ---- shared memory ------------------------------------------------------------------------------


def store_tile(tile: Sequence[Array], to: Ref, grid: WarpGrid) -> None:
    """A warpgroup's columns of a tile in its terms, side by side, to shared memory."""
    (rows, columns), step = tile[0].shape, to.shape[1]
    whole, mine = columns * grid.groups, columns // grid.across

    def code(tile, to, group, first):
        high, lane, share = _share(grid, group)
        row = int_of(first) + high * (rows // grid.down) + lane // 4
        start = row * (step // 2) + share * (mine // 2) + lane % 4
        base = threads.shared_address(to, start, 4)
        for n, term in enumerate(tile):
            for i, word in enumerate(mma_rowmajor.words_of(term)):
                below = i // (mine // 4) * 16 + i % 2 * 8
                across = n * whole + i // 2 % (mine // 8) * 8
                ptx = f"st.shared.b32 [$0+{2 * (below * step + across)}], $1;"
                threads.do(ptx, [base, word], "r,r")

    def twin(tile, to, group, first):
        for n, term in enumerate(tile):
            start = n * whole + int(group) * columns
            to[int(first) :][:rows, start : start + columns] = term

    types = ((mosaic.warp_layout((rows, columns), grid.down),) * len(tile), REF, SCALAR, SCALAR)
    args = (tuple(tile), to, jnp.int32(grid.group), jnp.int32(grid.row))
    mma_rowmajor.inline(code, twin, args, types, None)
    assert to.dtype == tile[0].dtype


def load_tile(ref: Ref, shape: tuple[int, int], down: int) -> Array:
    """What one warpgroup's `store_tile` left of a tile of one term."""
    (rows, columns), step, dtype = shape, ref.shape[1], ref.dtype
    mine = columns * down // 4

    def code(ref):
        high, wide, lane = place_of_warp(down)
        start = (high * (rows // down) + lane // 4) * (step // 2) + wide * (mine // 2) + lane % 4
        base, registers = mosaic.address_of(ref, start, 4), []
        pair = ir.VectorType.get((2,), utils.dtype_to_ir_type(jnp.dtype(dtype)))
        for i in range(rows // down // 16 * (mine // 8) * 2):
            below, right = i // (mine // 4) * 16 + i % 2 * 8, i // 2 % (mine // 8) * 8
            place = utils.getelementptr(base, [(below * step + right) // 2], threads.i32())
            registers.append(llvm.load(pair, place, alignment=4))
        return tile_with(registers, shape, down)

    def twin(ref):
        return ref[:rows, :columns].copy()

    return mma_rowmajor.inline(code, twin, (ref,), (REF,), result_of(shape, dtype, down))


# ---- results -------------------------------------------------------------------------------------


def write(tile: Array, to: Ref, at: tuple[Any, ...], grid: WarpGrid) -> None:
    """The first `live` rows of a warpgroup's part of a tile, and as many columns as there are, to
    [B, rows, heads, dim]. `at`: (batch, head, first row, live), int32 scalars.
    """
    _, length, heads, dim = to.shape
    dtype, shape = tile.dtype, tile.shape
    bits, mine = 2 * 8 * jnp.dtype(dtype).itemsize, shape[1] // grid.across

    def code(tile, to, at, group):
        thread = threads.Thread()
        high, lane, share = _share(grid, group)
        batch, head, first, live = (int_of(x) for x in at)
        start = thread.wide(batch) * length + thread.wide(first)
        row, column = high * (shape[0] // grid.down) + lane // 4, share * mine
        start = (start * heads + thread.wide(head)) * (dim // 2)
        start = start + thread.wide(row * (heads * dim // 2) + column // 2 + lane % 4)
        for n, register in enumerate(tile.registers.flat):
            right, below = n // 2 % (mine // 8) * 8, n // (mine // 4) * 16 + n % 2 * 8
            there = row + below < live
            if dim < shape[1] * grid.groups:
                there = there & (column + right < dim)
            word = Int(llvm.bitcast(ir.IntegerType.get_signless(bits), register))
            index = start + (below * (heads * dim // 2) + right // 2)
            thread.store(to, index, word, bits // 8, there)

    def twin(tile, to, at, group):
        batch, head, first, live = map(int, at)
        live, start = max(0, min(live, shape[0])), int(group) * shape[1]
        some = max(0, min(dim - start, shape[1]))
        to[batch, first : first + live, head, start : start + some] = tile[:live, :some]

    types = (mosaic.warp_layout(shape, grid.down), REF, (SCALAR,) * 4, SCALAR)
    args = (tile, to, tuple(at), jnp.int32(grid.group))
    mma_rowmajor.inline(code, twin, args, types, None)


# ---- rows whose columns two warps share ---------------------------------------------------------
#
# The row's maximum, or its sum, goes by way of shared memory.


def row_layout(rows: int) -> Any:
    """Of one number a row of tiles whose warps grid two by two: both of a row have it."""
    return mosaic.warp_layout((rows, PARTIALS), 2).reduce(1)


def store_row_partials(tile: Array, to: Ref, first: Any, op: str) -> None:
    """The largest ("max") or the sum ("sum") of each row, over the columns that one warp has, to
    shared memory: row r of warp w across to `to[w, first + r]`.
    """
    (rows, columns), whole, (both, numpy) = tile.shape, to.shape[1], _BOTH[op]

    def code(tile, to, first):
        high, wide, lane = place_of_warp(2)
        start = wide * whole + int_of(first) + high * (rows // 2) + lane // 4
        base = threads.shared_address(to, start, 4)
        for n, pairs in enumerate(halves(tile, rows)):
            number = _tree(both, [vector.extract(x, [], [i]) for x in pairs for i in range(2)])
            for distance in (1, 2):
                number = both(number, utils.shfl_bfly(number, distance))
            threads.do(f"st.shared.f32 [$0+{32 * n}], $1;", [base, number], "r,f")

    def twin(tile, to, first):
        of_warps = numpy(np.asarray(tile).reshape(rows, 2, columns // 2), axis=2)
        to[:, int(first) : int(first) + rows] = of_warps.T

    types = (mosaic.warp_layout((rows, columns), 2), REF, SCALAR)
    mma_rowmajor.inline(code, twin, (tile, to, jnp.int32(first)), types, None)


def load_row_totals(ref: Ref, first: Any, rows: int, op: str) -> Array:
    """What `store_row_partials` left of both warps of a row, as one: [rows]."""
    whole, (both, numpy) = ref.shape[1], _BOTH[op]
    layout = row_layout(rows)

    def code(ref, first):
        high, _, lane = place_of_warp(2)
        start, f32 = int_of(first) + high * (rows // 2) + lane // 4, ir.F32Type.get()
        base, numbers = mosaic.address_of(ref, start, 4), []
        for n in range(rows // 16):
            two = [
                llvm.load(f32, utils.getelementptr(base, [8 * n + w * whole], f32))
                for w in range(2)
            ]
            numbers.append(vector.broadcast(ir.VectorType.get((1,), f32), both(*two)))
        return mosaic.array_of(numbers, (rows,), layout)

    def twin(ref, first):
        return numpy(ref[:, int(first) : int(first) + rows], axis=0).astype(np.float32)

    result = plgpu.ShapeDtypeStruct((rows,), jnp.float32, layout=layout)
    return mma_rowmajor.inline(code, twin, (ref, jnp.int32(first)), (REF, SCALAR), result)


def sync_row_pair(group: Any) -> None:
    """A barrier of the two warps of warpgroup `group` that have the same rows."""

    def code(group):
        high, _, _ = place_of_warp(2)
        number = int_of(group) * 2 + high + BARRIER
        threads.do(f"bar.sync $0, {2 * 32};", [number.value], "r")

    mma_rowmajor.inline(code, lambda group: None, (jnp.int32(group),), (SCALAR,), None)


def partial_sums(tile: Array) -> Array:
    """[rows, columns] -> [rows, PARTIALS]: each thread adds up its numbers of a row, in 2 sums."""
    (rows, columns), shape = tile.shape, (tile.shape[0], PARTIALS)

    def code(tile):
        return tile_with([_tree(arith.addf, pairs) for pairs in halves(tile, rows)], shape, 2)

    def twin(tile):
        return np.asarray(tile).reshape(rows, 2, columns // PARTIALS, 8).sum(2).reshape(shape)

    types = (mosaic.warp_layout((rows, columns), 2),)
    return mma_rowmajor.inline(code, twin, (tile,), types, result_of(shape, jnp.float32, 2))


def halves(tile: Any, rows: int) -> list[list[ir.Value]]:
    """A thread's pairs of numbers of each of its rows: 8 apart, from the top."""
    by_block = tile.registers.reshape(rows // 32, -1, 2)
    return [list(block[:, half]) for block in by_block for half in range(2)]


def _tree(op: Any, values: list) -> ir.Value:
    while len(values) > 1:
        pairs = [op(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(values) & ~1 :]
    return values[0]


# ---- matmuls with pieces of the softmax between their instructions -------------------------------
#
# ptxas leaves instructions about where it finds them: so the exponents of one tile are written
# between the matmuls of the next tile's scores, and the next tile's row maxima between those of the
# first tile's values. What the base and the unit of an exponent are, attention/softmax.py says.
# 16-bit numbers alone.


def _few(work: Iterator, count: int) -> None:
    for _ in range(count):
        next(work, None)


def scores_and_exponents(
    left: tuple[Ref, Array], right: tuple[Ref, Array], sizes: Sequence[int], work: Exponents
) -> tuple[Array, Array]:
    """`product` of the next tile, and the exponents of this one: to shared memory as `store_tile`
    leaves them; and their `partial_sums`.
    """
    (a_ref, a_first), (b_ref, b_first), exponents = left, right, work
    given, unit, base, p_ref, p_first = exponents
    (rows, columns, width), dtype = sizes, a_ref.dtype
    shape = (rows, columns)
    steps, blocks, mine = (a_ref.shape[1], b_ref.shape[1]), rows // 32, columns // 2
    assert p_ref.dtype == dtype
    p_step = p_ref.shape[1]

    def code(a_ref, a_first, b_ref, b_first, given, base, p_ref, p_first):
        high, wide, lane = place_of_warp(2)
        row = int_of(a_first) + high * (16 * blocks) + lane % 16
        a_base = mma_sync.address_of(a_ref, row, lane // 16, steps[0])
        row = int_of(b_first) + wide * mine + lane % 8 + lane // 16 * 8
        b_base = mma_sync.address_of(b_ref, row, lane // 8 % 2, steps[1])
        totals: dict[int, list] = {}
        row = int_of(p_first) + high * (rows // 2) + lane // 4
        start = row * (p_step // 2) + wide * (mine // 2) + lane % 4
        inside = Exponents(given, unit, base, threads.shared_address(p_ref, start, 4), p_step)
        work = _exponents(inside, mine, totals, str(jnp.dtype(dtype)))
        sums, count = mma_sync.nothing(blocks, mine), len(given.registers.flat)
        slots = width // 16 * (mine // 16)
        done = 0
        for column in range(0, width, 16):
            a = [
                [mma_sync.ldmatrix(a_base, 2 * (b * 16 * steps[0] + column)) for b in range(blocks)]
            ]
            for key in range(0, mine, 16):
                b = [mma_sync.ldmatrix(b_base, 2 * (key * steps[1] + column))]
                mma_sync.multiply(sums, key // 8, a, b, dtype)
                done += 1
                _few(work, done * count // slots - (done - 1) * count // slots)
        _few(work, count)
        total = [mma_rowmajor.pair_of(*totals[n]) for n in range(2 * blocks)]
        total = tile_with(total, (rows, PARTIALS), 2)
        return tile_of_sums(sums, shape, 2), total

    def twin(a_ref, a_first, b_ref, b_first, given, base, p_ref, p_first):
        a, b = a_ref[int(a_first) :][:rows, :width], b_ref[int(b_first) :][:columns, :width]
        p = np.exp2(given * np.float32(unit or 1) - base[:, None]).astype(np.float32)
        p_ref[int(p_first) :][:rows, :columns] = p.astype(p_ref.dtype)
        total = p.reshape(rows, 2, columns // PARTIALS, 8).sum(2).reshape(rows, PARTIALS)
        return a.astype(np.float32) @ b.astype(np.float32).T, total

    tile = mosaic.warp_layout(shape, 2)
    types = (REF, SCALAR, REF, SCALAR, tile, row_layout(rows), REF, SCALAR)
    args = (a_ref, a_first, b_ref, b_first, given, base, p_ref, jnp.int32(p_first))
    results = (
        result_of(shape, jnp.float32, 2),
        result_of((rows, PARTIALS), jnp.float32, 2),
    )
    return mma_rowmajor.inline(code, twin, args, types, results)


def _exponents(of_thread: Exponents, mine: int, totals: dict, dtype: str) -> Iterator:
    """A register's pair of numbers at a time, and its word to shared memory: `to` is a thread's
    address there, `first` the numbers from one row to the next.
    """
    given, unit, base, address, step = of_thread
    f32 = ir.F32Type.get()
    bases = [vector.extract(x, [], [0]) for x in base.registers.flat]
    kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype]
    for i, pair in enumerate(given.registers.flat):
        n = i // (mine // 4) * 2 + i % 2
        two = []
        for j in range(2):
            x = vector.extract(pair, [], [j])
            if unit is None:
                x = arith.subf(x, bases[n])
            else:
                code = "{ .reg .f32 m; neg.f32 m, $3; fma.rn.f32 $0, $1, $2, m; }"
                x = llvm.inline_asm(f32, [x, utils.c(unit, f32), bases[n]], code, "=f,f,f,f")
            two.append(llvm.inline_asm(f32, [x], "ex2.approx.ftz.f32 $0, $1;", "=f,f"))
        before = totals.get(n)
        totals[n] = [arith.addf(*x) for x in zip(before, two, strict=True)] if before else two
        word = llvm.inline_asm(
            threads.i32(), [two[1], two[0]], f"cvt.rn.{kind}.f32 $0, $1, $2;", "=r,f,f"
        )
        below, across = i // (mine // 4) * 16 + i % 2 * 8, i // 2 % (mine // 8) * 8
        threads.do(f"st.shared.b32 [$0+{2 * (below * step + across)}], $1;", [address, word], "r,r")
        yield


def matmul_add_and_row_max(
    acc: Array, p: Ref, x: RightOperand, sizes: Sequence[int], grid: WarpGrid, coming: RowMax
) -> Array:
    """`matmul_add_shared`, and `store_row_partials` of the maxima of another tile. `sizes`: (rows
    and columns of p).
    """
    (x_ref, first, width), (rows, inner), (tile, to, to_first) = x, sizes, coming
    steps, dtype, shape = (p.shape[1], x_ref.shape[1]), x_ref.dtype, (rows, width)
    blocks, wide, mine, whole = rows // 32, width // 2, inner // 2, to.shape[1]

    def code(acc, p, x_ref, first, row, tile, to, to_first):
        high, share, lane = place_of_warp(2)
        sums = mma_sync.numbers_of(acc, blocks)
        row = int_of(row) + high * (16 * blocks) + lane % 16
        start = share * whole + int_of(to_first) + high * (rows // 2) + lane // 4
        work = _peaks(halves(tile, rows), threads.shared_address(to, start, 4))
        for other in range(2):
            begin = (share + other) % 2 * mine
            a_base = mma_sync.address_of(p, row, begin // 8 + lane // 16, steps[0])
            of_x, chunk = int_of(first) + begin + lane % 16, share * (wide // 8)
            base = mma_sync.address_of(x_ref, of_x, chunk + lane // 16, steps[1])
            for key in range(0, mine, 16):
                a = [
                    [
                        mma_sync.ldmatrix(a_base, 2 * (b * 16 * steps[0] + key))
                        for b in range(blocks)
                    ]
                ]
                right = _RightRows(base, width, key * steps[1])
                multiply_rows(sums, a, right, wide, dtype, lambda: _few(work, 2))
        for _ in work:
            pass
        return tile_of_sums(sums, shape, 2)

    def twin(acc, p, x_ref, first, row, tile, to, to_first):
        left = [p[int(row) :][:rows, :inner]]
        out = np.array(acc) + product_of_numpy(left, x_ref[int(first) :][:inner], width)
        peaks = np.asarray(tile).reshape(rows, 2, inner // 2).max(axis=2)
        to[:, int(to_first) : int(to_first) + rows] = peaks.T
        return out

    layout = mosaic.warp_layout((rows, inner), 2)
    types = (mosaic.warp_layout(shape, 2), REF, REF, SCALAR, SCALAR, layout, REF, SCALAR)
    args = (acc, p, x_ref, first, jnp.int32(grid.row), tile, to, jnp.int32(to_first))
    return mma_rowmajor.inline(code, twin, args, types, result_of(shape, jnp.float32, 2))


def _peaks(halves: list, address: Any) -> Iterator:
    tops = []
    for pairs_of in halves:
        values = [vector.extract(x, [], [i]) for x in pairs_of for i in range(2)]
        while len(values) > 1:
            joined = []
            for a, b in zip(values[::2], values[1::2], strict=False):
                joined.append(arith.maximumf(a, b))
                yield
            values = joined + values[len(values) & ~1 :]
        tops.append(values[0])
    for distance in (1, 2):
        for n, top in enumerate(tops):
            tops[n] = arith.maximumf(top, utils.shfl_bfly(top, distance))
            yield
    for n, top in enumerate(tops):
        threads.do(f"st.shared.f32 [$0+{32 * n}], $1;", [address, top], "r,f")
        yield
