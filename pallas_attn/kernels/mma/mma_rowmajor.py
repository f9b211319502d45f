"""Matmuls by mma.sync, a warp at a time, whose operands are rows in shared memory as they lie in
a cache: `queries`, `scores`, `matmul_add` and `store_accumulators` work on register tiles. Each
function has a twin in NumPy, which the interpreter runs.

Bulk copies bring rows of K and V to shared memory as they lie in the cache, without a swizzle or a
tensor map. `ldmatrix` would then read 8 rows from the same banks; padding between the rows would
avoid that, but bulk copies to addresses that are no multiples of 128 bytes are slower. So each lane
loads 16 bytes of a row. The order of columns that results is not that of memory, but it is the same
for both operands of a matmul, whose sum does not depend on it.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_attn.kernels.lang import asm, mosaic, thread_math, threads
from pallas_attn.kernels.lang.asm import Int
from pallas_attn.kernels.lang.mosaic import REF, SCALAR
from pallas_attn.kernels.mma import dequant

Ref = Any
Array = Any

ROW_PADDING = 8  # floats behind a spilled row: without, 8 rows would meet in the same banks
ROWS = 16  # query rows of a warp
UNIT = 128  # bytes of a row: where warps divide the columns, each has whole units of these


class Split:
    """Which query rows and which keys of a kv tile of `keys` keys each warp takes.

    There are `row_blocks` (1, 2 or 4) row blocks of 16 query rows. 4 / row_blocks warps share a row
    block, each with some of the keys. Column c of a warp's scores is key `first_key(warp) + c` of
    the tile.

    `folded`: there are at most 8 query rows. Rows 8 to 15 of the scores then hold the scores of
    rows 0 to 7 with every second group of 8 keys, which halves the numbers of a thread.
    `integers`: how keys of 8 bits become float16 (`dequant.by_integers`).

    `across`: the warps that share a row block have the same keys, and divide the columns of q, K
    and V among them. This is for rows that are too wide for the registers of a warp. A warp's
    scores are then sums over its own columns, which `column_parts.sum_of_parts` adds up.
    """

    def __init__(
        self,
        row_blocks: int,
        keys: int,
        folded: bool = False,
        integers: bool = False,
        across: bool = False,
    ):
        self.row_blocks, self.keys, self.folded = row_blocks, keys, folded
        self.integers = integers
        warps = threads.WARPS // row_blocks  # warps that share a row block
        self.parts = warps if across else 1  # parts of the columns
        self.groups = warps // self.parts  # groups of keys
        self.columns = keys // self.groups
        self.width = self.columns // 2 if folded else self.columns
        # Joins the numbers of both halves of a row's keys.
        self.join = functools.partial(reduce_folded, op="maximum") if folded else None

    def row_block(self, warp: Any) -> Any:
        return warp % self.row_blocks

    def first_key(self, warp: Any) -> Any:
        """The key of a warp's column 0."""
        return warp // self.row_blocks // self.parts * self.columns

    def units(self, nbytes: int) -> int:
        """The number of units of `UNIT` bytes that a warp has of a row of `nbytes` bytes."""
        return -(-nbytes // (UNIT * self.parts))

    def first_unit(self, warp: Int | int, nbytes: int) -> Any:
        """The index of a warp's first unit."""
        return warp // self.row_blocks % self.parts * self.units(nbytes)

    def own_columns(self, rows: np.ndarray, warp: int) -> np.ndarray:
        """A warp's columns of `rows` [.., dim], zeros past the last."""
        dim, size = rows.shape[-1], rows.dtype.itemsize
        if self.parts == 1:
            return rows
        count = self.units(dim * size) * UNIT // size
        first = self.first_unit(warp, dim * size) * UNIT // size
        own = rows[..., first : first + count]
        return np.pad(own, [(0, 0)] * (rows.ndim - 1) + [(0, count - own.shape[-1])])

    def key(self, row: Any, column: Any) -> Any:
        """Which of the warp's keys a row and a column of its scores stand for."""
        return column // 8 * 16 + row // 8 * 8 + column % 8 if self.folded else column

    def query(self, row: Any) -> Any:
        """Which of the warp's 16 query rows a row of its scores stands for."""
        return row % 8 if self.folded else row


def tile_of(shape: tuple[int, int], dtype: Any) -> Any:
    """The type of a register tile."""
    return mosaic.tile_type(shape, dtype, layout=mosaic.TILE)


def warp_and_lane() -> tuple[ir.Value, ir.Value]:
    """(warp of the warpgroup, lane of the warp)."""
    thread = threads.Thread().index.value
    return arith.divui(thread, utils.c(32, asm.i32())), arith.remui(thread, utils.c(32, asm.i32()))


class Queries(NamedTuple):
    """The place of a block's query rows in global memory: query n of `rows` at row
    start + n // group * step + n % group, of `dim` numbers.
    """

    ref: Ref
    start: Any  # the row of query 0
    first: Any  # the query of the block's row 0
    rows: int
    step: int
    group: int
    dim: int
    last: int | None = None  # the last row of all, where `rows` is only a bound


def queries(at: Queries, split: Split) -> Array:
    """The query rows of every warp in registers, [64, H rounded up to a multiple of 32]: row r of
    warp w is query row_block(w) * 16 + r, counted from `at.first`. Rows past the last repeat it.
    Columns are in the order of `words_of_row`, so that only `scores` can use them; where warps
    divide the columns, each has its own.
    """
    ref, dim = at.ref, at.dim
    width = 32 * -(-dim // 32) if split.parts == 1 else split.units(2 * dim) * UNIT // 2
    shape, dtype = (threads.WARPS * ROWS, width), ref.dtype

    def code(ref, first):
        pair = ir.VectorType.get((2,), utils.dtype_to_ir_type(jnp.dtype(dtype)))
        lane, starts = rows_of_lane(first, at, split)
        load = words_of_row if split.parts == 1 else functools.partial(words_of_part, split)
        halves = [load(asm.pointer_of(ref), start, lane, dim) for start in starts]
        return tile_with(
            [llvm.bitcast(pair, w) for both in zip(*halves, strict=True) for w in both], shape
        )

    def twin(ref, first):
        q = ref.reshape(-1, dim)[rows_of_twin(first, at, split)]
        if split.parts > 1:
            return own_columns_of_warps(q, split)
        return np.pad(q, ((0, 0), (0, shape[1] - dim)))

    return mosaic.inline(
        code, twin, (ref, (at.start, at.first)), (REF, (SCALAR, SCALAR)), tile_of(shape, dtype)
    )


def float16_queries(at: Queries, split: Split) -> tuple[Array, Array]:
    """(`queries` in float16, for keys from 8 bits; a factor for each row, [64]). A row is
    divided by this power of two so that no number overflows; its scores are to be multiplied by it.
    """
    ref, dim = at.ref, at.dim
    width = dim if split.parts == 1 else split.units(dim) * UNIT
    shape, dtype = (threads.WARPS * ROWS, width), ref.dtype
    kind = jnp.dtype(jnp.float16)

    def code(ref, first):
        pair = ir.VectorType.get((2,), utils.dtype_to_ir_type(kind))
        lane, starts = rows_of_lane(first, at, split)
        halves, units = [], []
        for start in starts:
            words = _as_narrow_lies(asm.pointer_of(ref), start, lane, dim, split)
            words, unit = dequant.normalised(words, str(jnp.dtype(dtype)))
            halves.append(words)
            units.append(unit)
        words = [llvm.bitcast(pair, w) for both in zip(*halves, strict=True) for w in both]
        return tile_with(words, shape), row_with(units)

    def twin(ref, first):
        q = ref.reshape(-1, dim)[rows_of_twin(first, at, split)]
        if split.parts > 1:
            q = np.pad(q, ((0, 0), (0, split.parts * width - dim)))
            q = own_columns_of_warps(q, split, 1)
        q = q.astype(np.float32)
        bits = np.abs(q).max(axis=1).view(np.int32) & 0x7F800000
        bits = np.minimum(bits, dequant.MOST)
        inverse = (dequant.HIGH - bits).view(np.float32)
        return (q * inverse[:, None]).astype(np.float16), bits.view(np.float32)

    result = (
        tile_of(shape, kind),
        mosaic.tile_type((shape[0],), jnp.float32, layout=mosaic.ROW),
    )
    return mosaic.inline(code, twin, (ref, (at.start, at.first)), (REF, (SCALAR, SCALAR)), result)


def rows_of_lane(
    first: Sequence[Any], at: Queries, split: Split, itemsize: int = 2
) -> tuple[Int, list[Int]]:
    """The lane, and where its two rows begin, in words of 16 bytes. `first`: `at.start` and
    `at.first`, as inlined code has them.
    """
    rows, step, group = at.rows, at.step, at.group
    warp, lane = [Int(x) for x in warp_and_lane()]
    start, skipped = first
    starts = []
    for half in (0, 8):
        n = skipped + lane // 4 + half + split.row_block(warp) * ROWS
        n = n._with(arith.minsi, rows - 1)
        row = start + n // group * step + n % group
        if at.last is not None:
            row = row._with(arith.minsi, at.last)
        starts.append(in_64_bits(row) * (at.dim * itemsize // 16))
    return lane, starts


def rows_of_twin(first: Sequence[Any], at: Queries, split: Split) -> np.ndarray:
    rows, step, group = at.rows, at.step, at.group
    n = np.arange(threads.WARPS * ROWS)
    block, n = split.row_block(n // ROWS), first[1] + n % ROWS
    n = np.minimum(n + block * ROWS, rows - 1)
    row = first[0] + n // group * step + n % group
    return row if at.last is None else np.minimum(row, at.last)


def in_64_bits(x: Int) -> Int:
    """In 64 bits."""
    return Int(arith.extsi(ir.IntegerType.get_signless(64), x.value))


def words_of_row(pointer: ir.Value, start: Int, lane: Int, dim: int, offset: int = 0) -> list:
    """The words that a lane loads of a row of `dim` 16-bit numbers that begins `start` + `offset`
    words of 16 bytes from `pointer`: 4 words of 32 bits of each group of 32 numbers, zeros past the
    row's end.

    The 4 lanes of a row load 8 neighbouring numbers each. A matmul may sum over columns in any
    order that both operands share, so nothing is rearranged.

    Rows of 128 bytes and more begin in the same bank. 8 lanes read two rows at a time; those of the
    odd row read the second of two groups first.
    """
    words, chunks = [], dim // 8
    like = (lambda x: x) if start.value.type == asm.i32() else in_64_bits
    column, odd, zero = lane % 4, lane // 4 % 2, utils.c(0, asm.i32())
    swapped = (odd >= 1).value
    early, late = [start + like(column + n) for n in (odd * 4, odd * -4 + 4)]
    for group in range(0, chunks // 8 * 2, 2):
        early_words = four_words(pointer, early, offset + 4 * group)
        late_words = four_words(pointer, late, offset + 4 * group)
        for pair in ((late_words, early_words), (early_words, late_words)):
            words += [arith.select(swapped, x, y) for x, y in zip(*pair, strict=True)]
    for group in range(chunks // 8 * 2, -(-chunks // 4)):
        left = chunks - 4 * group
        mine = column if left >= 4 else column._with(arith.minsi, left - 1)
        four = four_words(pointer, start + like(mine), offset + 4 * group)
        if left < 4:
            there = (column < left).value
            four = [arith.select(there, word, zero) for word in four]
        words += four
    return words


def words_of_part(
    split: Split, pointer: ir.Value, start: Int, lane: Int, dim: int, offset: int = 0
) -> list:
    """`words_of_row` for the columns of this warp: 8 words of each of its units."""
    return [
        word
        for n in range(split.units(2 * dim))
        for word in words_of_unit(split, pointer, start, (lane, dim, n), offset)
    ]


def words_of_unit(
    split: Split, pointer: ir.Value, start: Int, at: tuple[Int, int, int], offset: int = 0
) -> list:
    """8 words of a unit of this warp; `at`: lane, length of a row in 16-bit numbers, and which of
    the warp's units.
    """
    lane, dim, number = at
    like = (lambda x: x) if start.value.type == asm.i32() else in_64_bits
    chunks, odd = dim // 8, lane // 4 % 2
    first = (split.first_unit(Int(warp_and_lane()[0]), 2 * dim) + number) * 8 + lane % 4
    swapped, zero = (odd >= 1).value, utils.c(0, asm.i32())
    halves = []
    for chunk in (first + odd * 4, first + (odd * -4 + 4)):
        near = chunk
        if chunks % (8 * split.parts):
            near = chunk._with(arith.minsi, chunks - 1)
        four = four_words(pointer, start + like(near), offset)
        if near is not chunk:
            there = (chunk < chunks).value
            four = [arith.select(there, word, zero) for word in four]
        halves.append(four)
    early, late = halves
    pairs = [*zip(late, early, strict=True), *zip(early, late, strict=True)]
    return [arith.select(swapped, x, y) for x, y in pairs]


def own_columns_of_warps(rows: np.ndarray, split: Split, size: int | None = None) -> np.ndarray:
    """Each warp's own columns of its rows of `rows` [64, dim]. `size`: bytes of a number of the
    keys, where it differs from that of `rows`.
    """
    tile = rows.reshape(threads.WARPS, ROWS, -1)
    if size is None:
        return np.concatenate([split.own_columns(x, warp) for warp, x in enumerate(tile)])
    count = rows.shape[1] // split.parts
    firsts = [warp // split.row_blocks % split.parts * count for warp in range(threads.WARPS)]
    return np.concatenate([x[:, n : n + count] for n, x in zip(firsts, tile, strict=True)])


def _as_narrow_lies(pointer: ir.Value, start: Int, lane: Int, dim: int, split: Split) -> list:
    """`words_of_row` in the order of columns of a row of 8-bit numbers, of which a lane loads 16
    neighbouring numbers of each 64; only this warp's columns where warps divide them.
    """
    if split.parts > 1:
        return _part_as_narrow_lies(pointer, start, lane, dim, split)
    first = start + in_64_bits(lane % 4 * 2)
    chunks = range(0, dim // 8, 8)
    return [w for n in chunks for i in range(2) for w in four_words(pointer, first, n + i)]


def _part_as_narrow_lies(pointer: ir.Value, start: Int, lane: Int, dim: int, split: Split) -> list:
    first = split.first_unit(Int(warp_and_lane()[0]), dim) * 16 + lane % 4 * 2
    chunks, zero, words = dim // 8, utils.c(0, asm.i32()), []
    for n in range(0, split.units(dim) * 16, 8):
        for i in range(2):
            chunk = first + (n + i)
            near = in_64_bits(chunk._with(arith.minsi, chunks - 1))
            there = (chunk < chunks).value
            four = four_words(pointer, start + near, 0)
            words += [arith.select(there, word, zero) for word in four]
    return words


def four_words(pointer: ir.Value, index: Int, offset: int, count: int = 4) -> list[ir.Value]:
    """Word `index` + `offset`, of 4 * count bytes, from `pointer`."""
    kind = ir.VectorType.get((count,), asm.i32())
    address = utils.getelementptr(pointer, [index.value], kind)
    address = utils.getelementptr(address, [offset], kind)
    loaded = llvm.load(kind, address, alignment=4 * count)
    return [vector.extract(loaded, [], [i]) for i in range(count)]


def chunk_of(pointer: ir.Value, start: Int, offset: int, odd: Int, half: int) -> list[ir.Value]:
    """The words of a chunk, 2 * `half` of them, that lies `start` + `offset` chunks from `pointer`.

    16 lanes read at a time: 4 chunks of each of 4 rows, which begin in the same bank. `odd` lanes
    read the second half of their chunk first, which makes 2-way bank conflicts of 4-way ones.
    """
    early, late = start * 2 + odd, start * 2 + (odd * -1 + 1)
    first, second = [four_words(pointer, n, 2 * offset, half) for n in (early, late)]
    swapped = (odd >= 1).value
    pairs = [*zip(second, first, strict=True), *zip(first, second, strict=True)]
    return [arith.select(swapped, x, y) for x, y in pairs]


def tile_with(registers: list, shape: tuple[int, int]) -> Any:
    """A register tile of these registers of a thread."""
    return mosaic.array_of(registers, shape, mosaic.TILE)


def row_with(halves: list) -> Any:
    """One number for each of a lane's two rows -> [64]."""
    vectors = [vector.broadcast(ir.VectorType.get((1,), x.type), x) for x in halves]
    return mosaic.array_of(vectors, (threads.WARPS * ROWS,), mosaic.ROW)


def reduce_folded(rows: Array, op: str) -> Array:
    """A number a row of folded scores -> the "maximum" or the "sum" of both halves, in both."""
    shape, code_of = rows.shape, {"maximum": arith.maximumf, "sum": arith.addf}[op]

    def code(rows):
        return row_with([code_of(*map(asm.number_of, rows.registers.flat))] * 2)

    def twin(rows):
        halves = rows.reshape(threads.WARPS, 2, 8)
        both = np.maximum(halves[:, 0], halves[:, 1]) if op == "maximum" else halves.sum(axis=1)
        return np.repeat(both[:, None], 2, axis=1).reshape(shape).astype(np.float32)

    result = mosaic.tile_type(shape, jnp.float32, layout=mosaic.ROW)
    return mosaic.inline(code, twin, (rows,), (mosaic.ROW,), result)


def words_of(array: Any) -> list[ir.Value]:
    """A 16-bit tile's registers as words: [column of 8][upper or lower 8 rows], flat."""
    return [llvm.bitcast(asm.i32(), r) for r in array.registers.flat]


_KINDS = {  # (columns of a, as PTX calls the dtype)
    **{"bfloat16": (16, "bf16"), "float16": (16, "f16"), "tf32": (8, "tf32")},
    **{"float8_e4m3fn": (32, "e4m3"), "float8_e5m2": (32, "e5m2")},
}


def mma(c: Sequence, a: Sequence, b: Sequence, dtype: Any) -> list[ir.Value]:
    """c + a @ b: m16 n8 and the k of `_KINDS`, 4 words of a and 2 of b. `dtype`: of both, "tf32"
    too, or float8 dtypes of each.
    """
    each = dtype if isinstance(dtype, tuple) else (dtype, dtype)
    (k, first), (_, second) = (_KINDS[str(x if x == "tf32" else jnp.dtype(x))] for x in each)
    ptx = (
        f"mma.sync.aligned.m16n8k{k}.row.col.f32.{first}.{second}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$0, $1, $2, $3};"
    )
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["0", "1", "2", "3"])
    struct = ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>")
    four = llvm.inline_asm(struct, [*a, *b, *c], ptx, constraints)
    return [llvm.extractvalue(ir.F32Type.get(), four, [i]) for i in range(4)]


def pair_of(a: ir.Value, b: ir.Value) -> ir.Value:
    """Two float32 as one register of a tile."""
    packed = llvm.mlir_undef(ir.VectorType.get((2,), ir.F32Type.get()))
    return vector.insert(b, vector.insert(a, packed, [], [0]), [], [1])


def scores(q: Array, ref: Ref, slot: Array, split: Split, dim: int | None = None) -> Array:
    """q @ K^T of each warp's own rows and keys, [64, columns], with K in slot `slot` of the ring
    `ref` [slots, keys, columns], in all columns or the first `dim`. Keys of 8 bits are converted to
    float16 in registers.

    Matmuls add to two sums in turn, so that only every second one waits for the one before.
    """
    pitch, dtype, ref_dtype = ref.shape[2], q.dtype, ref.dtype
    dim = dim or pitch
    shape, size = (threads.WARPS * ROWS, split.width), jnp.dtype(ref_dtype).itemsize

    def code(q, ref, slot):
        warp, lane = [Int(x) for x in warp_and_lane()]
        a, pointer, words = words_of(q), asm.pointer_of(ref), pitch * size // 16
        start = slot * (split.keys * words)
        start = start + (split.first_key(warp) + lane // 4) * words
        zero = utils.c(0.0, ir.F32Type.get())
        load = words_of_row if split.parts == 1 else functools.partial(words_of_part, split)
        registers: list[Any] = []
        for column in range(0, split.columns, 8):
            b = load(pointer, start, lane, dim * size // 2, column * words)
            if size == 1:
                b = thread_math.to_16_bits(b, str(jnp.dtype(ref_dtype)), split.integers)
            sums = [[zero] * 4 for _ in range(2)]
            for n in range(len(b) // 2):
                sums[n % 2] = mma(sums[n % 2], a[4 * n : 4 * n + 4], b[2 * n : 2 * n + 2], dtype)
            s = [arith.addf(x, y) for x, y in zip(*sums, strict=True)]
            registers += [pair_of(s[0], s[1])] + [pair_of(s[2], s[3])] * (not split.folded)
        return tile_with(registers, shape)

    def twin(q, ref, slot):
        out = np.zeros(shape, np.float32)
        row, column = np.arange(ROWS)[:, None], np.arange(split.width)
        for warp in range(threads.WARPS):
            here = slice(ROWS * warp, ROWS * (warp + 1))
            keys = ref[slot][split.first_key(warp) + np.arange(split.columns), :dim]
            keys = split.own_columns(keys, warp).astype(np.float32)
            all_scores = q[here, : keys.shape[1]].astype(np.float32) @ keys.T
            out[here] = all_scores[split.query(row), split.key(row, column)]
        return out

    types = (mosaic.TILE, REF, SCALAR)
    return mosaic.inline(code, twin, (q, ref, slot), types, tile_of(shape, jnp.float32))


def number_of_each_key(ref: Ref, slot: Array, split: Split) -> Array:
    """A tile [64, columns] in the order of `scores`: each key's number in slot `slot` of the ring
    `ref` [slots, keys], float32, in every row.
    """
    shape = (threads.WARPS * ROWS, split.columns)

    def code(ref, slot):
        warp, lane = [Int(x) for x in warp_and_lane()]
        at = slot * split.keys + split.first_key(warp) + lane % 4 * 2
        pairs = [
            dequant.pair_of_floats(asm.pointer_of(ref), at + n) for n in range(0, split.columns, 8)
        ]
        return tile_with([pair for pair in pairs for _ in range(2)], shape)

    def twin(ref, slot):
        first = split.first_key(np.arange(threads.WARPS).repeat(ROWS))[:, None]
        return ref[slot][first + np.arange(split.columns)]

    return mosaic.inline(code, twin, (ref, slot), (REF, SCALAR), tile_of(shape, jnp.float32))


def accumulator_width(v_head_dim: int, parts: int = 1) -> int:
    """Columns of a warp's accumulator in `matmul_add`; `parts` warps divide the columns of V."""
    return -(-v_head_dim // (64 * parts)) * 64


def matmul_add(acc: Array, p: Array, ref: Ref, slot: Array, split: Split, first: int = 0) -> Array:
    """acc + p @ V of each warp's own keys, [64, accumulator_width(Hv)], with V in slot `slot` of
    the ring `ref` [slots, keys, columns], whose columns from `first` on are those of V.

    Lane 4 * g + t loads chunk 8 * u + g (8 neighbouring columns) of the keys whose probabilities it
    holds. Accumulator u * 8 + i, of 8 columns, has column i of 8 chunks; `store_accumulators` puts
    the columns in order.
    """
    pitch, dtype, shape = ref.shape[2] // 8, p.dtype, acc.shape
    narrow = str(jnp.dtype(ref.dtype)) if jnp.dtype(ref.dtype).itemsize == 1 else None
    chunks = pitch - first // 8

    def code(acc, p, ref, slot):
        warp, lane = [Int(x) for x in warp_and_lane()]
        a, pointer = words_of(p), asm.pointer_of(ref)
        start = slot * (split.keys * pitch)
        start = start + (split.first_key(warp) + lane % 4 * 2) * pitch
        mine = lane // 4 if split.parts == 1 else lane // 4 + first_chunk(split, shape[1])
        sums = []
        for pairs in acc.registers.reshape(-1, 2):
            sums.append([vector.extract(pair, [], [i]) for pair in pairs for i in range(2)])
        for key in range(0, split.columns, 16):
            of_a = a[key // 4 : key // 4 + 4]
            if split.folded:
                zero = utils.c(0, asm.i32())
                of_a = [a[key // 8], zero, a[key // 8 + 1], zero]
            for u in range(shape[1] // 64):
                chunk = start + (mine + 8 * u)._with(arith.minsi, chunks - 1)
                ahead = [(key + n + i) * pitch + first // 8 for n in (0, 8) for i in range(2)]
                if narrow is not None:
                    rows = [four_words(pointer, chunk, offset, 2) for offset in ahead]
                    pairs_of_rows = [dequant.interleaved(*rows[n : n + 2]) for n in (0, 2)]
                    low, high = (
                        thread_math.to_16_bits(x, narrow, split.integers) for x in pairs_of_rows
                    )
                else:
                    rows = [chunk_of(pointer, chunk, offset, lane % 2, 2) for offset in ahead]
                    low, high = [_columns(*rows[n : n + 2]) for n in (0, 2)]
                for i in range(8):
                    b = [low[i], high[i]]
                    sums[8 * u + i] = mma(sums[8 * u + i], of_a, b, dtype)
        registers = []
        for s in sums:
            registers += [pair_of(s[0], s[1]), pair_of(s[2], s[3])]
        return tile_with(registers, shape)

    def twin(acc, p, ref, slot):
        out = np.array(acc)
        row, column = np.arange(ROWS)[:, None], np.arange(split.width)
        for warp in range(threads.WARPS):
            here = slice(ROWS * warp, ROWS * (warp + 1))
            values = ref[slot][split.first_key(warp) + np.arange(split.columns)]
            own = first + warp // split.row_blocks % split.parts * shape[1]
            values = values[:, own : own + shape[1]]
            weights = np.zeros((ROWS, split.columns), np.float32)
            weights[split.query(row), split.key(row, column)] = p[here]
            out[here, : values.shape[1]] += weights @ values.astype(np.float32)
        return out

    types = (mosaic.TILE, mosaic.TILE, REF, SCALAR)
    return mosaic.inline(code, twin, (acc, p, ref, slot), types, tile_of(shape, jnp.float32))


def first_chunk(split: Split, width: int) -> Int:
    """The first chunk of V of this warp, whose accumulator has `width` columns."""
    warp = Int(warp_and_lane()[0])
    return warp // split.row_blocks % split.parts * (width // 8)


def _columns(first: list, second: list) -> list[ir.Value]:
    """Words of two rows -> for each column a word with the numbers of both."""
    return [
        llvm.inline_asm(asm.i32(), [a, b], f"prmt.b32 $0, $1, $2, {order};", "=r,r,r")
        for a, b in zip(first, second, strict=True)
        for order in ("0x5410", "0x7632")
    ]


def store_accumulators(
    acc: Array, top: Array, total: Array, to: tuple[Ref, Ref, Ref], rows: int, split: Split
) -> None:
    """Stores the first `rows` rows of each warp's accumulator, and their row max and row sum, to
    shared memory: `to` is [WARPS * rows, Hv + ROW_PADDING] and twice [WARPS * rows]. Warps that
    divide the columns of a row store them side by side.
    """
    chunks, words = (to[0].shape[1] - ROW_PADDING) // 8, to[0].shape[1] // 4
    alone, width = split.parts == 1, acc.shape[1]

    def line_of(warp):
        return (warp if alone else split.row_block(warp)) * rows

    def row_of(half, acc, numbers, refs):
        warp, lane = [Int(x) for x in warp_and_lane()]
        line, row = line_of(warp) + lane // 4 + 8 * half, lane // 4 + 8 * half
        for u in range(width // 64):
            for n in range(2):
                chunk = lane % 4 * 2 + (8 * u + n)
                chunk = chunk if alone else chunk + first_chunk(split, width)
                there = ((row < rows) & (chunk < chunks)).value
                eight = [acc.registers.flat[2 * (8 * u + i) + half] for i in range(8)]
                eight = [vector.extract(pair, [], [n]) for pair in eight]
                for k in range(2):
                    index = line * words + chunk * 2 + k
                    store_four(refs[0], index, eight[4 * k : 4 * k + 4], there)
        for ref, row_numbers in zip(refs[1:], numbers, strict=True):
            number = asm.number_of(row_numbers.registers.flat[half])
            mine = row < rows if alone else (row < rows) & (warp < split.row_blocks)
            threads.Thread().shared_store(ref, line, threads.Float(number), mine)

    def code(acc, top, total, refs):
        for half in range(-(-rows // 8)):
            row_of(half, acc, (top, total), refs)

    def twin(acc, top, total, refs):
        for warp in range(threads.WARPS):
            here = slice(ROWS * warp, ROWS * warp + rows)
            lines = slice(line_of(warp), line_of(warp) + rows)
            first = warp // split.row_blocks % split.parts * width
            own = acc[here, : max(min(width, 8 * chunks - first), 0)]
            refs[0][lines, first : first + own.shape[1]] = own
            if alone or warp < split.row_blocks:
                refs[1][lines], refs[2][lines] = top[here], total[here]

    types = (mosaic.TILE, mosaic.ROW, mosaic.ROW, (REF, REF, REF))
    mosaic.inline(code, twin, (acc, top, total, tuple(to)), types, None)


def store_four(ref: Ref, index: Int, values: list, there: ir.Value) -> None:
    """Stores 16 bytes to word `index` of shared memory if `there` holds."""
    ptx = "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p st.shared.v4.b32 [$1], {$2, $3, $4, $5}; }"
    words = [arith.bitcast(asm.i32(), x) for x in values]
    operands = [arith.extui(asm.i32(), there), asm.shared_address(ref, index, 16), *words]
    asm.do(ptx, operands, "r,r,r,r,r,r")
