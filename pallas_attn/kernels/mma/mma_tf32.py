"""Matmuls of float32 rows for the decode kernels: what mma_rowmajor.py does for rows of 16 bits.

Tensor cores multiply TF32, the first 11 bits of a float32. Each number is split into two terms, its
first 11 bits and the rest. A product of two matrices is three matmuls of their terms; that of the
two rests is left out, which makes a relative error of about 2**-21. Decode waits for memory, under
which three matmuls take no time: float32 is decoded at this precision whatever was asked for.

K and V are split in registers, on their way from shared memory to the tensor cores. The queries
stay in shared memory for all kv tiles of a work tile, since registers cannot hold rows of 256
numbers. The largest products are added up by float32 additions in registers: a tensor core rounds
its sums towards 0.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_attn.kernels.lang import asm, mosaic, threads
from pallas_attn.kernels.lang.asm import Int
from pallas_attn.kernels.lang.mosaic import REF, SCALAR
from pallas_attn.kernels.mma import mma_rowmajor, mma_sync
from pallas_attn.kernels.mma.mma_rowmajor import ROWS, Split

Ref = Any
Array = Any
Words = Sequence[ir.Value]

KEPT = -(2**13)  # the bits of a float32 that a tensor core takes; it cuts off the others
# A number is multiplied by this before its bits are cut off, which makes that nearly a rounding: it
# adds half of the last bit that is kept. The rest is then half as large, and of either sign: the
# error of a product is 1.5e-7 of the values' RMS, not 7e-7.
UP = 1 + 2.0**-11.5


def queries_shape(dim: int, rows: int, parts: int = 1) -> tuple[int, int]:
    """The shape [rows, numbers of a row] of a block's queries in shared memory, for
    `store_queries`: both terms side by side where rows are few and short, else the float32 numbers.
    A row has an odd number of chunks of 16 bytes, so that `ldmatrix` finds 8 rows in different
    banks. `parts`: warps that divide the columns, of which each has whole units.
    """
    terms = 2 if rows <= ROWS and dim <= 128 else 1
    return rows, terms * _width(dim, parts) + 4


def _width(dim: int, parts: int) -> int:
    unit = 16 if parts == 1 else mma_rowmajor.UNIT // 4 * parts
    return unit * -(-dim // unit)


def _terms(word: ir.Value, *, whole: bool = False) -> tuple[ir.Value, ir.Value]:
    """The two terms of a float32: nearly the nearest number of 11 bits, and the rest. `whole`: a
    number that is not finite is all rest, so that it is not multiplied by a rest that is 0.
    """
    x = _float(word)
    near = arith.mulf(x, utils.c(UP, x.type))
    bits = arith.andi(_bits(near), utils.c(KEPT, asm.i32()))
    if whole:  # x * 0 + 0: no bits at all or, of what is not finite, all but the sign
        code = "fma.rn.f32 $0, $1, 0f00000000, 0f00000000;"
        odd = llvm.inline_asm(x.type, [x], code, "=f,f")
        bits = arith.andi(bits, arith.xori(_bits(odd), utils.c(-1, asm.i32())))
    return bits, _bits(arith.subf(x, _float(bits)))


def _bits(number: ir.Value) -> ir.Value:
    return arith.bitcast(asm.i32(), number)


def _float(word: ir.Value) -> ir.Value:
    return arith.bitcast(ir.F32Type.get(), word)


def _terms_of_numpy(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    def kept(x):
        return (np.ascontiguousarray(x).view(np.int32) & KEPT).view(np.float32)

    first = np.where(np.isfinite(x), kept(x * np.float32(UP)), np.float32(0))
    return first, kept(x - first)


def _product_of_numpy(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    (a, rest_of_a), (b, rest_of_b) = _terms_of_numpy(a), _terms_of_numpy(b)
    return (rest_of_a @ b + a @ rest_of_b) + a @ b


_mma = functools.partial(mma_rowmajor.mma, dtype="tf32")


def _zeros() -> list[ir.Value]:
    return [utils.c(0.0, ir.F32Type.get())] * 4


def _sum(a: Words, b: Words) -> list[ir.Value]:
    return [arith.addf(x, y) for x, y in zip(a, b, strict=True)]


def store_queries(at: mma_rowmajor.Queries, split: Split, to: Ref) -> None:
    """Copies the query rows of all row blocks from global to shared memory, in terms if `to` has
    room for both.

    A lane loads 4 of each 16 columns, the same that it loads of a key in `scores`, and stores them
    where `ldmatrix` returns them to it. The warps of a row block share out the columns.
    """
    ref, dim = at.ref, at.dim
    width, (most, pitch) = _width(dim, split.parts), to.shape
    steps, both = width // 16, pitch > width + 4
    sharing = threads.WARPS // split.row_blocks  # warps that share a row block

    def code(ref, first, to):
        lane, starts = mma_rowmajor.rows_of_lane(first, at, split, itemsize=4)
        warp, column, pointer = (
            Int(mma_rowmajor.warp_and_lane()[0]),
            lane % 4,
            asm.pointer_of(ref),
        )
        row = split.row_block(warp) * ROWS + lane // 4
        count = -(-steps // sharing)
        turns = [warp // split.row_blocks + n * sharing for n in range(count)]
        chunks = [  # all loads are issued before the first is waited for
            [_chunk_of_query(pointer, start, n * 4 + column, dim) for start in starts]
            for n in turns
        ]
        for n, halves in zip(turns, chunks, strict=True):
            address = asm.shared_address(to, row * pitch + n * 16 + column, 4)
            for half, four in enumerate(halves):
                where = (n < steps) & (row + 8 * half < most)
                terms = list(zip(*map(_terms, four), strict=True)) if both else [four]
                for i, word in enumerate(itertools.chain(*terms)):
                    offset = i // 4 * width + i % 4 * 4 + 8 * half * pitch
                    ptx = f"st.shared.b32 [$1+{4 * offset}], $2"
                    asm.do_where(where.value, ptx, [address, word], "r,r")

    def twin(ref, first, to):
        taken = mma_rowmajor.rows_of_twin(first, at, split)
        q = ref.reshape(-1, dim)[taken[:most]]
        to[:] = 0
        for n, term in enumerate(_terms_of_numpy(q) if both else [q]):
            to[:, n * width : n * width + dim] = term

    args = (ref, (at.start, at.first), to)
    mosaic.inline(code, twin, args, (REF, (SCALAR, SCALAR), REF), None)


def _chunk_of_query(pointer: ir.Value, start: Int, chunk: Int, dim: int) -> Words:
    """4 numbers of a row; 0 past its end."""
    near = mma_rowmajor.in_64_bits(chunk._with(arith.minsi, dim // 4 - 1))
    inside, zero = (chunk < dim // 4).value, utils.c(0, asm.i32())
    four = mma_rowmajor.four_words(pointer, start + near, 0)
    return [arith.select(inside, word, zero) for word in four]


def scores(q: Ref, ref: Ref, slot: Array, split: Split, dim: int | None = None) -> Array:
    """`mma_rowmajor.scores` of the queries that `store_queries` left."""
    row_dim, (most, pitch) = ref.shape[2], q.shape
    dim = dim or row_dim
    shape, columns = (threads.WARPS * ROWS, split.columns), range(0, split.columns, 8)
    width, steps = _width(dim, split.parts), -(-dim // 16)
    if split.parts > 1:
        steps = 2 * split.units(4 * dim)
    both = pitch > width + 4

    def code(q, ref, slot):
        warp, lane = (Int(x) for x in mma_rowmajor.warp_and_lane())
        pointer, words = asm.pointer_of(ref), row_dim // 4
        start = slot * (split.keys * words)
        start = start + (split.first_key(warp) + lane // 4) * words
        row = (split.row_block(warp) * ROWS + lane % 16)._with(arith.minsi, most - 1)
        place = row * (pitch // 4) + lane // 16
        if split.parts > 1:
            place = place + split.first_unit(warp, 4 * dim) * 8
        base = asm.shared_address(q, place, 16)
        sums = [[_zeros() for _ in range(3)] for _ in columns]
        for n in range(steps):
            if n % 2 == 0:  # the keys' words come for two steps at a time
                keys = [words_of(pointer, start, lane, n, column * words) for column in columns]
            a = [_query_terms(base, 16 * n + 8 * half, both and width) for half in range(2)]
            for of_column, key in zip(sums, keys, strict=True):
                _add_products(of_column, a, key[n % 2 * 4 :][:4])
        registers = []
        for of_column in sums:
            s = functools.reduce(_sum, of_column[::-1])
            registers += [mma_rowmajor.pair_of(s[0], s[1]), mma_rowmajor.pair_of(s[2], s[3])]
        return mma_rowmajor.tile_with(registers, shape)

    def words_of(pointer, start, lane, n, offset):
        if split.parts > 1:
            at = lane, 2 * dim, n // 2
            return mma_rowmajor.words_of_unit(split, pointer, start, at, offset)
        here = 2 * min(32, dim - 16 * n)
        return mma_rowmajor.words_of_row(pointer, start, lane, here, offset + 4 * n)

    def twin(q, ref, slot):
        out = np.zeros(shape, np.float32)
        for warp in range(threads.WARPS):
            rows = np.minimum(ROWS * split.row_block(warp) + np.arange(ROWS), most - 1)
            keys = ref[slot][split.first_key(warp) :][: split.columns, :dim]
            mine = q[rows, :dim] + (q[rows, width:][:, :dim] if both else 0)
            mine, keys = (split.own_columns(x, warp) for x in (mine, keys))
            out[ROWS * warp : ROWS * (warp + 1)] = _product_of_numpy(mine, keys.T)
        return out

    types, result = (REF, REF, SCALAR), mma_rowmajor.tile_of(shape, np.float32)
    return mosaic.inline(code, twin, (q, ref, slot), types, result)


def _query_terms(base: ir.Value, column: int, step: int) -> list[Words]:
    """Both terms of 8 columns of queries. `step`: columns from the one to the other in shared
    memory; 0 where it holds float32 numbers.
    """
    words = mma_sync.ldmatrix(base, 4 * column)
    if step:
        return [words, mma_sync.ldmatrix(base, 4 * (column + step))]
    return list(zip(*map(_terms, words), strict=True))


def _add_products(sums: list, a: list, key: Words) -> None:
    """Adds the products of 16 columns to three sums that do not depend on each other; the largest
    go to the first.
    """
    b = [list(zip(*map(_terms, key[n : n + 2]), strict=True)) for n in (0, 2)]
    largest = _zeros()
    for (left, rest_of_left), (right, rest_of_right) in zip(a, b, strict=True):
        sums[2] = _mma(sums[2], rest_of_left, right)
        sums[1] = _mma(sums[1], left, rest_of_right)
        largest = _mma(largest, left, right)
    sums[0] = _sum(sums[0], largest)


def matmul_add(acc: Array, p: Array, ref: Ref, slot: Array, split: Split, first: int = 0) -> Array:
    """`mma_rowmajor.matmul_add` of float32."""
    shape, pitch = acc.shape, ref.shape[2] // 8
    chunks = pitch - first // 8

    def code(acc, p, ref, slot):
        warp, lane = (Int(x) for x in mma_rowmajor.warp_and_lane())
        pointer, of_p = asm.pointer_of(ref), []
        for column in p.registers.reshape(-1, 2):  # keys 2t and 2t + 1 of rows g and g + 8
            four = [vector.extract(pair, [], [n]) for n in range(2) for pair in column]
            words = [arith.bitcast(asm.i32(), x) for x in four]
            of_p.append(list(zip(*map(_terms, words), strict=True)))
        start = slot * (split.keys * pitch)
        start = start + (split.first_key(warp) + lane % 4 * 2) * pitch
        mine = lane // 4
        if split.parts > 1:
            mine = mine + mma_rowmajor.first_chunk(split, shape[1])
        registers: list[Any] = []
        for u in range(shape[1] // 64):
            chunk = start + (mine + 8 * u)._with(arith.minsi, chunks - 1)
            before = acc.registers.flat[16 * u : 16 * u + 16]
            numbers = [vector.extract(pair, [], [n]) for pair in before for n in range(2)]
            sums = [numbers[n : n + 4] for n in range(0, 32, 4)]
            for key in range(0, split.columns, 16):
                ahead = (0, 1, 8, 9)[: min(4, (split.columns - key) // 4)]
                at = [(key + n) * pitch + first // 8 for n in ahead]
                rows = [mma_rowmajor.chunk_of(pointer, chunk, n, lane % 2, 4) for n in at]
                a = of_p[key // 8 : key // 8 + 2]
                products = [_weighed(a, column) for column in zip(*rows, strict=True)]
                sums = [_sum(*both) for both in zip(sums, products, strict=True)]
            for s in sums:
                registers += [mma_rowmajor.pair_of(s[0], s[1]), mma_rowmajor.pair_of(s[2], s[3])]
        return mma_rowmajor.tile_with(registers, shape)

    def twin(acc, p, ref, slot):
        out = np.array(acc)
        for warp in range(threads.WARPS):
            here = slice(ROWS * warp, ROWS * (warp + 1))
            own = first + warp // split.row_blocks % split.parts * shape[1]
            values = ref[slot][split.first_key(warp) :][: split.columns, own : own + shape[1]]
            out[here, : values.shape[1]] += _product_of_numpy(p[here], values)
        return out

    types = (mosaic.TILE, mosaic.TILE, REF, SCALAR)
    result = mma_rowmajor.tile_of(shape, np.float32)
    return mosaic.inline(code, twin, (acc, p, ref, slot), types, result)


def _weighed(a: list, column: Words) -> list[ir.Value]:
    """a @ b, where b is a column of 8 or 16 values."""
    terms = [_terms(word, whole=True) for word in column]
    b = [list(zip(*terms[n : n + 2], strict=True)) for n in range(0, len(terms), 2)]
    s = _zeros()
    for (left, rest_of_left), (right, rest_of_right) in zip(a, b, strict=True):
        s = _mma(_mma(s, rest_of_left, right), left, rest_of_right)
    for (left, _), (right, _) in zip(a, b, strict=True):
        s = _mma(s, left, right)
    return s
