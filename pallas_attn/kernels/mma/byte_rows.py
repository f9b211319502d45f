"""Operands of matmuls from latent rows of bytes (`_call/byte_rows.py`), which lie in shared memory
as in the cache; and the queries that such keys are multiplied with.

Nothing is widened to shared memory: each thread loads the words of its own part of an operand. Rows
are 164 words of 4 bytes, so that the words that a warp loads at once lie in different banks.

  keys    stay in 8 bits: a left operand [64 keys, 128 columns]
  values  become float16, transposed: left operands [64 columns, 64 keys]. A thread has 4
          neighbouring columns, which are rows of two operands (`COLUMNS`)
  scales  are factors of scores and of probabilities, since they belong to keys
"""

import functools
from typing import NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_attn._call.byte_rows import BYTE_DTYPE, BYTE_ROW, REST_DTYPE, SCALE_COLUMNS
from pallas_attn.kernels.lang import asm, mosaic, thread_math, threads
from pallas_attn.kernels.lang.asm import Int
from pallas_attn.kernels.lang.mosaic import REF, SCALAR
from pallas_attn.kernels.lang.threads import Float
from pallas_attn.kernels.lang.types import DType, GmemRef, Index, RegisterTile, Scalar, SmemRef
from pallas_attn.kernels.mma import dequant, mma_rowmajor, packed_rows

KEYS = 64  # keys of a tile
BLOCKS = BYTE_ROW.scales  # blocks of columns that share a scale
ROW_WORDS = BYTE_ROW.size // 4
SWIZZLE = 128  # bytes
# Columns of a block that are the rows of its two operands: row 16 w + 8 u + g of operand h.
COLUMNS = np.array(
    [
        [32 * w + 4 * g + 2 * h + u for w in range(4) for u in range(2) for g in range(8)]
        for h in range(2)
    ]
)
# Exponents of float32. Factors of probabilities reach 2**PEAK; numbers of q, 2**(Q_PEAK + 1).
PEAK, Q_PEAK = 6, 7
LEAST, INFINITE = 32 << 23, 0x7F800000


class Raw(NamedTuple):
    """A tile in shared memory: `ref` uint8 [slots, KEYS, bytes], and its slot."""

    ref: SmemRef
    slot: Index


class _Lane(NamedTuple):
    """The place of a thread in the operands of its warp."""

    warp: Int
    group: Int  # 0 to 7
    member: Int  # 0 to 3


def _lane() -> _Lane:
    index = threads.Thread().index
    return _Lane(index // 32, index % 32 // 4, index % 4)


def _word(raw: ir.Value, slot: Int, row: Int, word: Int | int) -> ir.Value:
    """A pointer to a word of 4 bytes of a row."""
    return asm.address_of(raw, (slot * KEYS + row) * ROW_WORDS + word, 4)


def _load(address: ir.Value, words: int) -> ir.Value:
    """The word so many words behind an address."""
    return llvm.load(asm.i32(), utils.getelementptr(address, [words], asm.i32()), alignment=4)


def _tile(raw: SmemRef, slot: Index) -> np.ndarray:
    return np.asarray(raw[int(slot)])


def _viewed(rows: np.ndarray, first: int, last: int, dtype: DType) -> np.ndarray:
    return np.ascontiguousarray(rows[:, first:last]).view(dtype)


def keys(raw: Raw, block: int) -> RegisterTile:
    """A block of columns of all keys, float8 [KEYS, SCALE_COLUMNS]."""
    layout, shape = plgpu.Layout.WGMMA_8BIT, (KEYS, SCALE_COLUMNS)

    def code(raw, slot):
        lane = _lane()
        first = lane.member + block * (SCALE_COLUMNS // 4)
        address = _word(raw, slot, lane.warp * 16 + lane.group, first)
        kind = ir.VectorType.get((4,), ir.Float8E4M3FNType.get())
        words = [
            utils.bitcast(_load(address, 8 * half * ROW_WORDS + 4 * n), kind)
            for n in range(SCALE_COLUMNS // 16)
            for half in range(2)
        ]
        return mosaic.array_of(words, shape, layout)

    def twin(raw, slot):
        first = block * SCALE_COLUMNS
        return _viewed(_tile(raw, slot), first, first + SCALE_COLUMNS, BYTE_DTYPE)

    result = mosaic.tile_type(shape, BYTE_DTYPE, layout=layout)
    return mosaic.inline(code, twin, (raw.ref, raw.slot), (REF, SCALAR), result)


def rest(raw: Raw, dtype: str) -> RegisterTile:
    """The columns that are not of V, of all keys, in `dtype` [KEYS, columns]."""
    shape = KEYS, BYTE_ROW.rest

    def code(raw, slot):
        lane = _lane()
        first = lane.member + BYTE_ROW.rest_begins // 4
        address = _word(raw, slot, lane.warp * 16 + lane.group, first)
        kind = ir.VectorType.get((2,), utils.dtype_to_ir_type(jnp.dtype(dtype)))
        words = [
            _load(address, 8 * half * ROW_WORDS + 4 * n)
            for n in range(BYTE_ROW.rest // 8)
            for half in range(2)
        ]
        if dtype != REST_DTYPE:
            floats = [thread_math.from_word(x, 4, REST_DTYPE) for x in words]
            words = [thread_math.rounded(x, dtype) for x in floats]
        return mma_rowmajor.tile_with([utils.bitcast(x, kind) for x in words], shape)

    def twin(raw, slot):
        numbers = _viewed(_tile(raw, slot), BYTE_ROW.rest_begins, BYTE_ROW.size, REST_DTYPE)
        return numbers.astype(np.float32).astype(jnp.dtype(dtype))

    result = mma_rowmajor.tile_of(shape, dtype)
    return mosaic.inline(code, twin, (raw.ref, raw.slot), (REF, SCALAR), result)


class Scales(NamedTuple):
    """Scales of a tile, for each block of columns; zeros past the last key."""

    of_scores: list[RegisterTile]  # [KEYS]
    of_values: list[RegisterTile]  # [KEYS]: divided by `units`, below 2**(PEAK + 1)
    units: list[Scalar]  # powers of two


def scales(raw: Raw, live: Index) -> Scales:
    """The scales of a tile that has `live` keys."""
    made = flat_scales(raw, live)
    return Scales(*(list(made[n : n + BLOCKS]) for n in range(0, 3 * BLOCKS, BLOCKS)))


def flat_scales(raw: Raw, live: Index) -> tuple[RegisterTile, ...]:
    """The fields of `Scales`, one behind the other."""
    count, first = BLOCKS, BYTE_ROW.v_head_dim // 4

    def code(raw, slot, live):
        lane, thread = _lane(), threads.Thread()
        kind = ir.VectorType.get((count,), ir.F32Type.get())

        def of_row(row):
            there = llvm.load(kind, _word(raw, slot, row, first), alignment=16)
            numbers = [vector.extract(there, [], [n]) for n in range(count)]
            inside = (row < live).value
            return [arith.select(inside, x, utils.c(0.0, x.type)) for x in numbers]

        halves = [of_row(lane.warp * 16 + lane.group + 8 * half) for half in range(2)]
        sizes = [of_row(thread.index % 32 + 32 * half) for half in range(KEYS // 32)]
        units, inverses = [], []
        for of_block in zip(*sizes, strict=True):
            masked = [
                arith.andi(thread_math.as_bits(x), utils.c(INFINITE, asm.i32())) for x in of_block
            ]
            most = thread_math.over_warp(arith.maxsi(*masked), "max")
            unit, inverse = _unit(most, PEAK)
            units.append(unit)
            inverses.append(inverse)
        rows = list(zip(*halves, strict=True))
        scaled = [[arith.mulf(x, i) for x in both] for both, i in zip(rows, inverses, strict=True)]
        return (
            *[mma_rowmajor.row_with(list(both)) for both in rows],
            *[mma_rowmajor.row_with(both) for both in scaled],
            *[mgpu.FragmentedArray.splat(x, ()) for x in units],
        )

    def twin(raw, slot, live):
        numbers = _viewed(_tile(raw, slot), 4 * first, 4 * (first + count), np.float32)
        numbers = np.where(np.arange(KEYS)[:, None] < int(live), numbers, np.float32(0))
        bits = (np.ascontiguousarray(numbers).view(np.int32) & INFINITE).max(axis=0)
        units, inverses = _units_of(bits, PEAK)
        return *numbers.T, *(numbers * inverses).T, *units

    row = mosaic.tile_type((KEYS,), jnp.float32, layout=mosaic.ROW)
    unit_type = mosaic.tile_type((), jnp.float32, layout=SCALAR)
    result = *[row] * (2 * count), *[unit_type] * count
    kinds = REF, SCALAR, SCALAR
    return mosaic.inline(code, twin, (raw.ref, raw.slot, live), kinds, result)


def store_units(to: SmemRef, entry: Index, units: list[Scalar]) -> None:
    """Writes the units of a tile to an entry of `to` float32[entries * BLOCKS]."""

    def code(to, entry, *units):
        thread = threads.Thread()
        for n, unit in enumerate(units):
            number = Float(unit.value)
            thread.shared_store(to, entry * BLOCKS + n, number, thread.index < 1)

    def twin(to, entry, *units):
        to[int(entry) * BLOCKS : (int(entry) + 1) * BLOCKS] = np.stack(units)

    mosaic.inline(code, twin, (to, entry, *units), (REF, *[SCALAR] * (1 + len(units))), None)


def _unit(bits: ir.Value, peak: int) -> tuple[ir.Value, ir.Value]:
    """(A power of two, its inverse): numbers whose largest has these bits of the exponent, times
    the inverse, are below 2**(peak + 1).
    """

    def of(number: int) -> ir.Value:
        return utils.c(number, asm.i32())

    bits = arith.minsi(arith.maxsi(bits, of(LEAST)), of(dequant.MOST))
    bits = arith.subi(bits, of(peak << 23))
    return thread_math.as_float(bits), thread_math.as_float(arith.subi(of(dequant.HIGH), bits))


def _units_of(bits: np.ndarray, peak: int) -> tuple[np.ndarray, np.ndarray]:
    """`_unit` in NumPy."""
    bits = np.clip(bits, LEAST, dequant.MOST).astype(np.int32) - (peak << 23)
    return bits.view(np.float32), (dequant.HIGH - bits).astype(np.int32).view(np.float32)


def values(raw: Raw, block: int, live: Index) -> tuple[RegisterTile, RegisterTile]:
    """A block of columns of all keys, transposed: float16 [KEYS, KEYS] twice, whose rows are
    `COLUMNS`; zeros past the last key.
    """
    shape = SCALE_COLUMNS // 2, KEYS

    def code(raw, slot, live):
        lane = _lane()
        first = lane.warp * 8 + lane.group + block * (SCALE_COLUMNS // 4)
        address = _word(raw, slot, lane.member * 2, first)
        kind = ir.VectorType.get((2,), ir.F16Type.get())
        left, zero = live - lane.member * 2, utils.c(0, asm.i32())
        tiles: tuple[list, list] = [], []
        for key in range(0, KEYS, 8):
            words = [_load(address, (key + n) * ROW_WORDS) for n in range(2)]
            words = [arith.select((left > key + n).value, x, zero) for n, x in enumerate(words)]
            pairs = dequant.interleaved(words[:1], words[1:])
            wide = [utils.bitcast(x, kind) for x in thread_math.to_16_bits(pairs, BYTE_DTYPE)]
            tiles[0].extend(wide[:2])
            tiles[1].extend(wide[2:])
        return tuple(mma_rowmajor.tile_with(x, shape) for x in tiles)

    def twin(raw, slot, live):
        first = block * SCALE_COLUMNS
        v = _viewed(_tile(raw, slot), first, first + SCALE_COLUMNS, BYTE_DTYPE)
        v = np.where(np.arange(KEYS)[:, None] < int(live), v.astype(np.float16), np.float16(0))
        return tuple(np.ascontiguousarray(v[:, columns].T) for columns in COLUMNS)

    result = mma_rowmajor.tile_of(shape, jnp.float16)
    kinds = REF, SCALAR, SCALAR
    return mosaic.inline(code, twin, (raw.ref, raw.slot, live), kinds, (result, result))


def store_columns(out: GmemRef, row: Index, block: int, tiles: tuple[RegisterTile, ...]) -> None:
    """Writes the columns of a block, float32 [COLUMNS, rows], to rows from `row` on."""
    rows = tiles[0].shape[1]
    width, dtype = out.shape[1], str(out.dtype)

    def code(out, row, *tiles):
        lane, thread = _lane(), threads.Thread()
        first = thread.to_int64(row + lane.member * 2) * (width // 4)
        first = first + thread.to_int64(lane.warp * 8 + lane.group + block * (SCALE_COLUMNS // 4))
        address = asm.address_of(out, first, 8)
        for n in range(rows // 8):
            four = [tile.registers.flat[2 * n + half] for tile in tiles for half in range(2)]
            for i in range(2):
                word = thread_math.rounded([vector.extract(x, [], [i]) for x in four], dtype)
                place = (8 * n + i) * (width // 4)
                llvm.store(word, utils.getelementptr(address, [place], word.type), alignment=8)

    def twin(out, row, *tiles):
        for columns, tile in zip(COLUMNS, tiles, strict=True):
            at = slice(int(row), int(row) + rows), block * SCALE_COLUMNS + columns
            out[at] = tile.T.astype(out.dtype)

    mosaic.inline(code, twin, (out, row, *tiles), (REF, SCALAR, mosaic.TILE, mosaic.TILE), None)


def folded(tile: RegisterTile, columns: int) -> RegisterTile:
    """The sum of groups of so many neighbouring columns."""
    shape = tile.shape[0], columns

    def code(tile):
        registers = [list(x) for x in tile.registers.reshape(-1, columns // 4)]
        return mma_rowmajor.tile_with(functools.reduce(_added, registers), shape)

    def twin(tile):
        return tile.reshape(shape[0], -1, columns).sum(axis=1)

    result = mma_rowmajor.tile_of(shape, jnp.float32)
    return mosaic.inline(code, twin, (tile,), (mosaic.TILE,), result)


def _added(a: list[ir.Value], b: list[ir.Value]) -> list[ir.Value]:
    return [arith.addf(x, y) for x, y in zip(a, b, strict=True)]


def any_above(tile: RegisterTile, bound: float) -> Index:
    """int32: 1 where a number of the tile, in any warp, lies above `bound`, else 0. One barrier of
    the warpgroup tells all warps.
    """

    def code(tile):
        numbers = [vector.extract(x, [], [i]) for x in tile.registers.flat for i in range(2)]
        # A row without a key is -inf minus -inf, NaN: it must not silence its thread's others.
        highest = functools.reduce(arith.maxnumf, numbers)
        limit = utils.c(float(bound), highest.type)
        above = arith.extui(asm.i32(), arith.cmpf(arith.CmpFPredicate.OGT, highest, limit))
        ptx = (
            "{ .reg .pred p, q; setp.ne.s32 p, $1, 0; "
            f"bar.red.or.pred q, $2, {mosaic.THREADS}, p; selp.s32 $0, 1, 0, q; }}"
        )
        barrier = utils.warpgroup_barrier_idx(sync=False)
        answer = asm.give(asm.i32(), ptx, [above, barrier], "=r,r,r")
        return mgpu.FragmentedArray.splat(answer, (), is_signed=True)

    def twin(tile):
        return np.int32((tile > bound).any())

    result = mosaic.tile_type((), jnp.int32, layout=SCALAR)
    return mosaic.inline(code, twin, (tile,), (mosaic.TILE,), result)


class Queries(NamedTuple):
    """Query rows in shared memory, for keys in 8 bits."""

    # float8 [terms * rows, v_head_dim]: rows of the first terms, of the second terms, ..; their sum
    # is q of V's columns over `units`
    terms: SmemRef
    rest: SmemRef  # [rows, rest]: q of the other columns
    units: SmemRef  # float32[rows]: powers of two; NaN where q is not finite


def terms_of(dtype: str) -> int:
    """Terms of float8 that a number of q is the sum of: each has 4 bits, or more by its sign."""
    return 2 if dtype == "bfloat16" else 3


def split(q: SmemRef, to: Queries) -> None:
    """Splits q [rows, columns] into terms, each of which is what the ones before leave."""
    rows, columns = q.shape
    chunks, rest_chunks = BYTE_ROW.v_head_dim // 16, BYTE_ROW.rest // 8
    parts = mosaic.THREADS // next(n for n in (8, 16, 32) if n >= rows)
    count, dtype = to.terms.shape[0] // rows, str(q.dtype)
    word = asm.word_type

    def code(q, terms, rest, units):
        thread = threads.Thread()
        row, part = thread.minimum(thread.index // parts, rows - 1), thread.index % parts

        def load(chunk):  # 8 numbers
            address = asm.address_of(q, row * (columns // 8) + chunk, 16)
            return llvm.load(word(16), address, alignment=16)

        def floats(n):  # 16 numbers, those of the thread's n-th chunk
            words = [load((part + n * parts) * 2 + i) for i in range(2)]
            return [x for each in words for x in thread_math.from_word(each, 16, dtype)]

        size = utils.c(0, asm.i32())
        for n in range(chunks // parts):
            for x in floats(n):
                bits = arith.andi(thread_math.as_bits(x), utils.c(0x7FFFFFFF, asm.i32()))
                size = arith.maxsi(size, bits)
        bits = thread_math.most_of_lanes(size, parts)
        bits = arith.andi(bits, utils.c(INFINITE, asm.i32()))
        unit, inverse = _unit(bits, Q_PEAK)
        infinite = Int(bits) >= INFINITE
        nan = utils.c(float("nan"), unit.type)
        unit = arith.select(infinite.value, nan, unit)
        thread.shared_store(units, row, Float(unit), part < 1)
        for n in range(chunks // parts):
            left = [arith.mulf(x, inverse) for x in floats(n)]
            place = packed_rows.swizzled_place(row, part + n * parts, chunks, SWIZZLE // 16)
            for term in range(count):
                narrow = [thread_math.to_word(left[i : i + 4], BYTE_DTYPE) for i in range(0, 16, 4)]
                taken = [y for x in narrow for y in thread_math.from_word(x, 4, BYTE_DTYPE)]
                left = [arith.subf(x, y) for x, y in zip(left, taken, strict=True)]
                four = llvm.mlir_undef(word(16))
                for i, x in enumerate(narrow):
                    four = vector.insert(x, four, [], [i])
                to = asm.address_of(terms, place + term * rows * chunks, 16)
                llvm.store(four, to, alignment=16)
        for n in range(max(rest_chunks // parts, 1)):
            chunk = (part + n * parts) % rest_chunks
            place = packed_rows.swizzled_place(row, chunk, rest_chunks, SWIZZLE // 16)
            to = asm.address_of(rest, place, 16)
            llvm.store(load(chunk + BYTE_ROW.v_head_dim // 8), to, alignment=16)

    def twin(q, terms, rest, units):
        numbers = np.asarray(q[:]).astype(np.float32)
        left = np.ascontiguousarray(numbers[:, : BYTE_ROW.v_head_dim])
        bits = (np.abs(left).view(np.int32)).max(axis=1) & INFINITE
        unit, inverse = _units_of(bits, Q_PEAK)
        units[:] = np.where(bits >= INFINITE, np.float32("nan"), unit)
        left = left * inverse[:, None]
        for term in range(count):
            narrow = left.astype(BYTE_DTYPE)
            terms[term * rows : (term + 1) * rows] = narrow
            left = left - narrow.astype(np.float32)
        rest[:] = numbers[:, BYTE_ROW.v_head_dim :].astype(rest.dtype)

    kinds = [plgpu.RefType(mosaic.swizzle_transforms(x.dtype, SWIZZLE)) for x in to[:2]]
    mosaic.inline(code, twin, (q, *to), (REF, *kinds, REF), None)
