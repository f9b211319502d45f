"""Matmuls of warps that stand two by two (`squares`), and what of the softmax a warp has to do
between them: exponents of one tile under the scores of the next, the next one's maxima under the
values of the first. ptxas leaves instructions about where it finds them, so they are written there.
Each step carries a twin in NumPy for the interpreter. 16-bit numbers alone.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.mma import mma_2x2, mma_2x2_rows, mma_rowmajor, mma_sync
from pallas_attn.kernels.mma.mma_rowmajor import REF, SCALAR

Ref = Any
Array = jax.Array


def _few(work: Iterator, count: int) -> None:
    for _ in range(count):
        next(work, None)


def scores_and_exponents(
    matrix: tuple, sizes: tuple, given: Array, unit: float | None, to: tuple
) -> tuple[Array, Array]:
    """`mma_2x2.product` of the next tile, and 2**(given * unit - base) of this one: to shared
    memory as `mma_2x2.put` leaves it, and its `mma_2x2_rows.partial_sums`. `matrix`: (left, right)
    of `product`; `to`: (base, P in shared memory, its first row).
    """
    ((a_ref, a_first), (b_ref, b_first)), (base, p_ref, p_first) = matrix, to
    (rows, columns, width), dtype, shape = sizes, a_ref.dtype, sizes[:2]
    steps, blocks, mine = (a_ref.shape[1], b_ref.shape[1]), rows // 32, columns // 2
    assert p_ref.dtype == dtype
    p_step = p_ref.shape[1]

    def code(a_ref, a_first, b_ref, b_first, given, base, p_ref, p_first):
        high, wide, lane = mma_2x2.place_of_warp(2)
        row = mma_2x2.int_of(a_first) + high * (16 * blocks) + lane % 16
        a_base = mma_sync.address_of(a_ref, row, lane // 16, steps[0])
        row = mma_2x2.int_of(b_first) + wide * mine + lane % 8 + lane // 16 * 8
        b_base = mma_sync.address_of(b_ref, row, lane // 8 % 2, steps[1])
        totals: dict[int, list] = {}
        row = mma_2x2.int_of(p_first) + high * (rows // 2) + lane // 4
        start = row * (p_step // 2) + wide * (mine // 2) + lane % 4
        place = threads.shared_address(p_ref, start, 4), p_step
        work = _exponents((given, base, unit), place, mine, totals, str(jnp.dtype(dtype)))
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
        total = mma_2x2.tile_with(total, (rows, mma_2x2_rows.PARTS), 2)
        return mma_2x2.tile_of_sums(sums, shape, 2), total

    def twin(a_ref, a_first, b_ref, b_first, given, base, p_ref, p_first):
        a, b = a_ref[int(a_first) :][:rows, :width], b_ref[int(b_first) :][:columns, :width]
        p = np.exp2(given * np.float32(unit or 1) - base[:, None]).astype(np.float32)
        p_ref[int(p_first) :][:rows, :columns] = p.astype(p_ref.dtype)
        total = (
            p.reshape(rows, 2, columns // mma_2x2_rows.PARTS, 8)
            .sum(2)
            .reshape(rows, mma_2x2_rows.PARTS)
        )
        return a.astype(np.float32) @ b.astype(np.float32).T, total

    tile = mosaic.standing(shape, 2)
    types = (REF, SCALAR, REF, SCALAR, tile, mma_2x2_rows.row_layout(rows), REF, SCALAR)
    args = (a_ref, a_first, b_ref, b_first, given, base, p_ref, jnp.int32(p_first))
    results = (
        mma_2x2.result_of(shape, jnp.float32, 2),
        mma_2x2.result_of((rows, mma_2x2_rows.PARTS), jnp.float32, 2),
    )
    return mma_rowmajor.inline(code, twin, args, types, results)


def _exponents(tile: tuple, place: tuple, mine: int, totals: dict, dtype: str) -> Iterator:
    """A register's pair of numbers at a time, and its word to shared memory."""
    (given, base, unit), (address, step) = tile, place
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


def weigh_and_peaks(acc: Array, p: Ref, x: tuple, sizes: tuple, stand: Any, coming: tuple) -> Array:
    """`mma_2x2.weigh_shared`, and `mma_2x2_rows.put_rows` of the maxima of another tile: `coming`
    is (the tile, where to, the first of its rows).
    """
    (x_ref, first, width), (rows, inner), (tile, to, to_first) = x, sizes, coming
    steps, dtype, shape = (p.shape[1], x_ref.shape[1]), x_ref.dtype, (rows, width)
    blocks, wide, mine, whole = rows // 32, width // 2, inner // 2, to.shape[1]

    def code(acc, p, x_ref, first, row, tile, to, to_first):
        high, share, lane = mma_2x2.place_of_warp(2)
        sums = mma_sync.numbers_of(acc, blocks)
        row = mma_2x2.int_of(row) + high * (16 * blocks) + lane % 16
        start = share * whole + mma_2x2.int_of(to_first) + high * (rows // 2) + lane // 4
        work = _peaks(mma_2x2_rows.halves(tile, rows), threads.shared_address(to, start, 4))
        for other in range(2):
            begin = (share + other) % 2 * mine
            a_base = mma_sync.address_of(p, row, begin // 8 + lane // 16, steps[0])
            of_x, chunk = mma_2x2.int_of(first) + begin + lane % 16, share * (wide // 8)
            base = mma_sync.address_of(x_ref, of_x, chunk + lane // 16, steps[1])
            for key in range(0, mine, 16):
                a = [
                    [
                        mma_sync.ldmatrix(a_base, 2 * (b * 16 * steps[0] + key))
                        for b in range(blocks)
                    ]
                ]
                right = base, width, key * steps[1]
                mma_2x2.multiply_rows(sums, a, right, wide, dtype, lambda: _few(work, 2))
        for _ in work:
            pass
        return mma_2x2.tile_of_sums(sums, shape, 2)

    def twin(acc, p, x_ref, first, row, tile, to, to_first):
        left = [p[int(row) :][:rows, :inner]]
        out = np.array(acc) + mma_2x2.product_of_numpy(left, x_ref[int(first) :][:inner], width)
        peaks = np.asarray(tile).reshape(rows, 2, inner // 2).max(axis=2)
        to[:, int(to_first) : int(to_first) + rows] = peaks.T
        return out

    layout = mosaic.standing((rows, inner), 2)
    types = (mosaic.standing(shape, 2), REF, REF, SCALAR, SCALAR, layout, REF, SCALAR)
    args = (acc, p, x_ref, first, jnp.int32(stand.row), tile, to, jnp.int32(to_first))
    return mma_rowmajor.inline(code, twin, args, types, mma_2x2.result_of(shape, jnp.float32, 2))


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
