"""float32 rows for `decode_sm90`: what `fragments` says of rows of 16 bits.

Tensor cores multiply float32 as a sum of bfloat16 terms (`terms`). Keys and values are cut into
theirs in registers, on the way from shared memory, which costs instructions and no bytes; queries
once, into shared memory, where they stay for all tiles: three terms of a row of 256 numbers are too
much for registers. The largest products are added up in registers: a tensor core rounds its sums
towards 0.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

from pallas_attn.kernels import fragments, matrices, tiles, warps
from pallas_attn.kernels.fragments import REF, ROWS, SCALAR, Split
from pallas_attn.kernels.matrices import PAIRS
from pallas_attn.kernels.tiles import Int

Ref = Any
Array = Any
Words = list[ir.Value]

TYPE = "bfloat16"


def width(dim: int) -> int:
    """Columns of a term of the queries."""
    return -(-dim // 16) * 16


def queries_shape(dim: int, rows: int, parts: int) -> tuple[int, int]:
    """Of a block's queries in shared memory, for `put_queries`."""
    return rows, matrices.pitch(parts * width(dim))


def cut(pairs: list[tuple[ir.Value, ir.Value]], parts: int, *, whole: bool = False) -> list[Words]:
    """Pairs of float32, as words -> for each term, pairs of bfloat16, a word each; they add up to
    16 or 24 bits.

    By truncation, one byte permutation a pair; but the second of two, which is rounded. `whole`:
    what is not finite goes to the last term alone, so that it meets no rest that is 0.
    """
    words: list[Words] = []
    for pair in pairs:
        numbers = [arith.bitcast(ir.F32Type.get(), x) for x in pair]
        finite = [_finite(x) if whole else None for x in numbers]
        words.append([])
        for _ in range(parts - 1):
            heads = [_head(x, good) for x, good in zip(numbers, finite, strict=True)]
            words[-1].append(_halves(*heads))
            numbers = [arith.subf(x, y) for x, y in zip(numbers, heads, strict=True)]
        words[-1].append(_rounded(*numbers) if parts == 2 else _halves(*numbers))
    return [list(term) for term in zip(*words, strict=True)]


def _finite(x: ir.Value) -> ir.Value:
    most = utils.c(float("inf"), ir.F32Type.get())
    return arith.cmpf(arith.CmpFPredicate.OLT, math.absf(x), most)


def _head(x: ir.Value, finite: ir.Value | None) -> ir.Value:
    """The first 8 bits of a float32; 0 of one that is not `finite`, where that is asked."""
    bits = arith.andi(_bits(x), utils.c(-(2**16), warps.i32()))
    head = arith.bitcast(ir.F32Type.get(), bits)
    return head if finite is None else arith.select(finite, head, utils.c(0.0, head.type))


def _halves(x: ir.Value, y: ir.Value) -> ir.Value:
    """The upper halves of two float32."""
    code = "prmt.b32 $0, $1, $2, 0x7632;"
    return llvm.inline_asm(warps.i32(), [_bits(x), _bits(y)], code, "=r,r,r")


def _rounded(x: ir.Value, y: ir.Value) -> ir.Value:
    return llvm.inline_asm(warps.i32(), [x, y], "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f")


def _bits(x: ir.Value) -> ir.Value:
    return arith.bitcast(warps.i32(), x)


def _of_numpy(x: np.ndarray, parts: int) -> list[np.ndarray]:
    """The terms of `cut`, as float32."""
    terms = []
    for n in range(parts):
        terms.append(x)
        if n < parts - 1:
            head = (np.ascontiguousarray(x).view(np.int32) & -(2**16)).view(np.float32)
            terms[n] = np.where(np.isfinite(x), head, np.float32(0))
            x = x - terms[n]
    terms[-1] = terms[-1].astype(TYPE).astype(np.float32)
    return terms


def put_queries(place: tuple, to: Ref, parts: int) -> None:
    """The query rows of all row blocks, term beside term, to shared memory. `place`: what
    `fragments.queries` is given.

    Lanes take the columns that `scores` has them take of the keys; `ldmatrix` gives each its own
    back. The warps of a row block share out the columns.
    """
    ref, first, rows, split, (step, group, dim) = place
    steps, (most, pitch) = width(dim) // 16, to.shape

    def code(ref, first, to):
        lane, starts = fragments._rows_of_lane(first, rows, split, (step, group, 2 * dim))
        warp, column = Int(fragments._lane()[0]), lane % 4
        row = split.row_block(warp) * ROWS + lane // 4
        base = row * (pitch // 2) + column
        turns = [
            warp // split.row_blocks + n * split.groups for n in range(-(-steps // split.groups))
        ]
        pointer = tiles._pointer(ref)
        chunks = [  # all are asked for before any is waited for
            [_chunk_of_query(pointer, start, n * 4 + column, dim) for start in starts]
            for n in turns
        ]
        for n, of_rows in zip(turns, chunks, strict=True):
            address = warps.shared_address(to, base + n * 8, 4)
            for half, four in enumerate(of_rows):
                for k, word in enumerate(sum(cut(_pairs(four), parts), [])):
                    offset = k // 2 * width(dim) + k % 2 * 8 + half * 8 * pitch
                    _store_word(address, 2 * offset, word, (n < steps) & (row + 8 * half < most))

    def twin(ref, first, to):
        taken = fragments._rows_of_twin(first, rows, split, (step, group))
        q = ref.reshape(-1, dim)[taken[:most]]
        to[:] = 0
        for p, term in enumerate(_of_numpy(q, parts)):
            to[:, p * width(dim) : p * width(dim) + dim] = term

    fragments._inline(code, twin, (ref, first, to), (REF, (SCALAR, SCALAR), REF), None)


def _chunk_of_query(pointer: ir.Value, start: Int, chunk: Int, dim: int) -> Words:
    """4 numbers of a row; 0 past its end."""
    near = fragments._wide(chunk._with(arith.minsi, dim // 4 - 1))
    inside, zero = (chunk < dim // 4).value, utils.c(0, warps.i32())
    four = fragments._four_words(pointer, start + near, 0)
    return [arith.select(inside, word, zero) for word in four]


def _store_word(address: ir.Value, offset: int, word: ir.Value, where: Int) -> None:
    ptx = f"{{ .reg .pred p; setp.ne.b32 p, $0, 0; @p st.shared.b32 [$1+{offset}], $2; }}"
    warps.do(ptx, [arith.extui(warps.i32(), where.value), address, word], "r,r,r")


def _pairs(words: Sequence[ir.Value]) -> list[tuple[ir.Value, ir.Value]]:
    return list(zip(words[::2], words[1::2], strict=True))


def scores(q: Ref, ref: Ref, slot: Array, split: Split, parts: int) -> Array:
    """`fragments.scores` of the queries that `put_queries` left."""
    dim, (most, step) = ref.shape[2], q.shape
    shape, columns = (warps.WARPS * ROWS, split.columns), range(0, split.columns, 8)
    steps = width(dim) // 16
    chains = min(len(PAIRS[parts]), max(2, min(4, 64 // split.columns)))

    def code(q, ref, slot):
        warp, lane = (Int(x) for x in fragments._lane())
        pointer, words = tiles._pointer(ref), dim // 4
        start = Int(slot.registers.item()) * (split.keys * words)
        start = start + (split.first(warp) + lane // 4) * words
        row = split.row_block(warp) * ROWS + lane % 16
        base = matrices._address(q, row._with(arith.minsi, most - 1), lane // 16, step)
        sums = [[_zeros() for _ in range(chains)] for _ in columns]
        for n in range(steps):
            if n % 2 == 0:  # the keys' words come for two steps at a time
                here = 2 * min(32, dim - 16 * n)
                at = [column * words + 4 * n for column in columns]
                keys = [fragments._words_of_row(pointer, start, lane, here, x) for x in at]
            a = [matrices._ldmatrix(base, 2 * (p * width(dim) + 16 * n)) for p in range(parts)]
            for of_column, key in zip(sums, keys, strict=True):
                _add_products(of_column, a, cut(_pairs(key[n % 2 * 4 :][:4]), parts))
        registers = []
        for of_column in sums:
            s = functools.reduce(_sum, of_column[::-1])
            registers += [fragments._pair(s[0], s[1]), fragments._pair(s[2], s[3])]
        return fragments._tile(registers, shape)

    def twin(q, ref, slot):
        out = np.zeros(shape, np.float32)
        for warp in range(warps.WARPS):
            here = slice(ROWS * warp, ROWS * (warp + 1))
            rows = np.minimum(ROWS * split.row_block(warp) + np.arange(ROWS), most - 1)
            keys = ref[slot][split.first(warp) :][: split.columns]
            terms = _of_numpy(keys, parts)
            for i, j in PAIRS[parts]:
                mine = q[rows, i * width(dim) : i * width(dim) + dim]
                out[here] += mine.astype(np.float32) @ terms[j].T
        return out

    types, result = (REF, REF, SCALAR), fragments._tile_of(shape, np.float32)
    return fragments._inline(code, twin, (q, ref, slot), types, result)


def _add_products(sums: list, a: list[Words], b: list[Words]) -> None:
    """The largest products to the first sum, the others in turn to the others, which so do not wait
    for each other.
    """
    for n, (i, j) in enumerate(reversed(PAIRS[len(a)])):
        if n == 0:
            sums[0] = _sum(sums[0], fragments._mma(_zeros(), a[i], b[j], TYPE))
        else:
            chain = 1 + (n - 1) % (len(sums) - 1)
            sums[chain] = fragments._mma(sums[chain], a[i], b[j], TYPE)


def _zeros() -> list[ir.Value]:
    return [utils.c(0.0, ir.F32Type.get())] * 4


def _sum(a: Sequence[ir.Value], b: Sequence[ir.Value]) -> list[ir.Value]:
    return [arith.addf(x, y) for x, y in zip(a, b, strict=True)]


def weigh(acc: Array, p: tuple[Array, ...], ref: Ref, slot: Array, split: Split) -> Array:
    """`fragments.weigh` with p in its terms."""
    shape, parts, chunks = acc.shape, len(p), ref.shape[2] // 8

    def code(acc, p, ref, slot):
        warp, lane = (Int(x) for x in fragments._lane())
        pointer, of_p = tiles._pointer(ref), [fragments._words(part) for part in p]
        start = Int(slot.registers.item()) * (split.keys * chunks)
        start = start + (split.first(warp) + lane % 4 * 2) * chunks
        registers: list[Any] = []
        for u in range(shape[1] // 64):
            chunk = start + (lane // 4 + 8 * u)._with(arith.minsi, chunks - 1)
            before = acc.registers.flat[16 * u : 16 * u + 16]
            numbers = [vector.extract(pair, [], [n]) for pair in before for n in range(2)]
            sums = [numbers[n : n + 4] for n in range(0, 32, 4)]
            for key in range(0, split.columns, 16):
                ahead = (0, 1, 8, 9)[: min(4, (split.columns - key) // 4)]
                rows = [_eight_words(pointer, chunk, (key + n) * chunks, lane % 2) for n in ahead]
                a = [words[key // 4 : key // 4 + 4] for words in of_p]
                found = [_weighed(a, column) for column in zip(*rows, strict=True)]
                sums = [_sum(*both) for both in zip(sums, found, strict=True)]
            for s in sums:
                registers += [fragments._pair(s[0], s[1]), fragments._pair(s[2], s[3])]
        return fragments._tile(registers, shape)

    def twin(acc, p, ref, slot):
        out = np.array(acc)
        for warp in range(warps.WARPS):
            here = slice(ROWS * warp, ROWS * (warp + 1))
            values = ref[slot][split.first(warp) :][: split.columns, : shape[1]]
            terms, added = _of_numpy(values, parts), np.float32(0)
            for i, j in PAIRS[parts]:
                added = added + p[i][here].astype(np.float32) @ terms[j]
            out[here, : values.shape[1]] += added
        return out

    types = (tiles.TILE, (tiles.TILE,) * parts, REF, SCALAR)
    result = fragments._tile_of(shape, np.float32)
    return fragments._inline(code, twin, (acc, tuple(p), ref, slot), types, result)


def _weighed(a: list[Words], column: Sequence[ir.Value]) -> list[ir.Value]:
    """a @ b, b the terms of a column of 16 values; or of 8, beside zeros."""
    b, s = cut(_pairs(column), len(a), whole=True), _zeros()
    if len(b[0]) == 1:
        none = [utils.c(0, warps.i32())]
        a, b = [words + none * 2 for words in a], [words + none for words in b]
    for i, j in PAIRS[len(a)]:
        s = fragments._mma(s, a[i], b[j], TYPE)
    return s


def _eight_words(pointer: ir.Value, start: Int, offset: int, odd: Int) -> Words:
    """The words of a chunk of 32 bytes, `start` + `offset` chunks from `pointer`; `odd` lanes take
    the second half first, as in `fragments._chunk`.
    """
    early, late = start * 2 + odd, start * 2 + (odd * -1 + 1)
    one, two = (fragments._four_words(pointer, half, 2 * offset) for half in (early, late))
    swapped = (odd >= 1).value
    pairs = [*zip(two, one, strict=True), *zip(one, two, strict=True)]
    return [arith.select(swapped, x, y) for x, y in pairs]
