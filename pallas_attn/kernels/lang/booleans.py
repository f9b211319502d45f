"""Booleans in global memory, which are bytes of 0 and 1: whole arrays as int8 operands, the loads
of single ones, votes of a warp over tiles of them, and words of bits.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_attn.kernels.lang import asm, mosaic
from pallas_attn.kernels.lang.asm import Int
from pallas_attn.kernels.lang.thread_program import Thread
from pallas_attn.kernels.lang.threads import LANES
from pallas_attn.kernels.lang.types import GmemRef, Index, Layout, RegisterTile

_as_bytes = Primitive("booleans_as_bytes")
_as_bytes.def_abstract_eval(lambda x: x.update(dtype=jnp.dtype(jnp.int8)))
_as_bytes.def_impl(lambda x: x.astype(jnp.int8))
mlir.register_lowering(
    _as_bytes, mlir.lower_fun(lambda x: x.astype(jnp.int8), multiple_results=False)
)
mlir.register_lowering(_as_bytes, lambda ctx, x: [x], platform="cuda")


def as_bytes(x: jax.Array) -> jax.Array:
    """A boolean array as an int8 operand of a kernel; no operation of XLA may read the result. On a
    GPU it is the array itself, whose booleans are bytes of 0 and 1. A conversion by XLA would
    read and write the whole mask.
    """
    as_int8: jax.Array = _as_bytes.bind(x)
    return as_int8


ROUND = 32  # tiles whose flags one word holds


def tiles_of(ref: GmemRef, row: Index, first: Index, block: int, count: int) -> jax.Array:
    """Flags of `count` tiles, up to 32, of `block` booleans of a row from tile `first` on, counted
    from there, as four bytes lo, full_lo, full_hi and hi: the first tile with a True one and the
    end of the last, 0 where there is none, and the first run of tiles that are True whole, which
    is empty where there is none. `row`: the number of a row of the last axis.
    """
    keys = ref.shape[3]

    def code(ref, row, first):
        words = _words(ref, row, first, block, count)
        return mgpu.FragmentedArray.splat(words, (), is_signed=True)

    def twin(ref, row, first):
        bytes_ = np.asarray(ref).reshape(-1, keys)[int(row)]
        some = [bytes_[(first + n) * block : (first + n + 1) * block] for n in range(count)]
        seen = [n for n, tile in enumerate(some) if tile.any()]
        whole = [bool(len(tile)) and bool(tile.all()) for tile in some]
        lo, hi = (seen[0], seen[-1] + 1) if seen else (ROUND, 0)
        full_lo = whole.index(True) if any(whole) else ROUND
        full_hi = full_lo
        while full_hi < count and whole[full_hi]:
            full_hi += 1
        return np.uint32(lo | full_lo << 8 | full_hi << 16 | hi << 24).astype(np.int32)

    types = plgpu.RefType(), plgpu.Layout.WG_SPLAT, plgpu.Layout.WG_SPLAT
    args = ref, jnp.int32(0) + row, jnp.int32(0) + first
    return mosaic.inline(code, twin, args, types, mosaic.NUMBER)


def _tiles(ref: Any, row: Int, first: Int, block: int, count: int) -> Iterator[list[Any]]:
    """(address, whether it is within tile and row, bytes) of a lane's loads of each tile."""
    thread, keys = Thread(), ir.MemRefType(ref.type).shape[3]
    lane, start, base = thread.index % LANES, thread.to_int64(row) * keys, asm.pointer_of(ref)
    for n in range(count):
        pieces = []
        for offset, width in _pieces(block, keys):
            key = (first + n) * block + offset + lane * width
            inside = (key < keys) & (lane * width + offset < block)
            where = utils.getelementptr(
                base, [(start + thread.to_int64(key)).value], asm.word_type(1)
            )
            pieces.append((where, inside, width))
        yield pieces


def _words(ref: Any, row: Int, first: Int, block: int, count: int) -> ir.Value:
    """All loads come before the first vote, so that they are in flight together."""
    keys, tiles = ir.MemRefType(ref.type).shape[3], list(_tiles(ref, row, first, block, count))
    values = iter([_load(*piece) for tile in tiles for piece in tile])
    some, whole = _word(0), _word(0)
    for n, pieces in enumerate(tiles):
        seen, hidden, exists = _word(0), _word(0), (first + n) * block < keys
        for _, inside, width in pieces:
            value, ones = next(values), _word(sum(1 << 8 * i for i in range(width)))
            seen = arith.ori(seen, value)
            lacks = arith.andi(inside.value, arith.cmpi(arith.CmpIPredicate.ne, value, ones))
            hidden = arith.ori(hidden, arith.extui(asm.i32(), lacks))
        some = arith.ori(some, _vote(seen, 1 << n))
        none_hidden = arith.xori(_vote(hidden, 1 << n), _word(1 << n))
        whole = arith.ori(whole, arith.select(exists.value, none_hidden, _word(0)))
    return asm.give(asm.i32(), _PACK, [some, whole], "=r,r,r")


# lo | full_lo << 8 | full_hi << 16 | hi << 24 of the words of visible and of whole tiles.
_PACK = """{ .reg .b32 lo, hi, a, b;
  brev.b32 lo, $1; clz.b32 lo, lo; clz.b32 hi, $1; sub.s32 hi, 32, hi;
  brev.b32 a, $2; clz.b32 a, a; shr.u32 b, $2, a; not.b32 b, b; brev.b32 b, b; clz.b32 b, b;
  add.s32 b, b, a;
  shl.b32 a, a, 8; shl.b32 b, b, 16; shl.b32 hi, hi, 24;
  or.b32 lo, lo, a; or.b32 lo, lo, b; or.b32 $0, lo, hi; }"""


def _pieces(block: int, keys: int) -> Iterator[tuple[int, int]]:
    """(first key, bytes a lane) of the loads of a warp that make up a tile."""
    offset = 0
    while offset < block:
        widths = (width for width in (4, 2) if keys % width == 0 and block % (width * LANES) == 0)
        width = next(widths, 1)
        yield offset, width
        offset += width * LANES


def _load(address: ir.Value, inside: Int, width: int) -> ir.Value:
    """Bytes, or 0 where not inside, as an int32."""
    kind = {1: "u8", 2: "u16", 4: "u32"}[width]
    ptx = (
        f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.nc.{kind} $0, [$1]; }}"
    )
    return asm.give(asm.i32(), ptx, [address, arith.extui(asm.i32(), inside.value)], "=&r,l,r")


def _vote(value: ir.Value, bit: int) -> ir.Value:
    """`bit` where a lane's value is not 0, else 0."""
    ptx = (
        "{ .reg .pred p, q; setp.ne.b32 p, $1, 0; vote.sync.any.pred q, p, 0xffffffff;"
        " selp.b32 $0, $2, 0, q; }"
    )
    return asm.give(asm.i32(), ptx, [value, _word(bit)], "=r,r,r")


def _word(number: int) -> ir.Value:
    return utils.c(number - (number >> 31 << 32), asm.i32())


def numbers_at(ref: GmemRef, index: RegisterTile, layout: Layout) -> RegisterTile:
    """int32: bytes of a boolean array, as a flat one, at `index`."""

    def code(ref, index):
        byte, base = asm.word_type(1), asm.pointer_of(ref)
        registers = index.registers.copy()

        def load(place):
            return arith.extui(asm.i32(), llvm.load(byte, utils.getelementptr(base, [place], byte)))

        for at, register in np.ndenumerate(index.registers):  # vectors
            count = ir.VectorType(register.type).shape[0]
            values = [load(vector.extract(register, [], [i])) for i in range(count)]
            registers[at] = vector.from_elements(register.type, values)
        return mgpu.FragmentedArray(_registers=registers, _layout=index.layout, _is_signed=True)

    def twin(ref, index):
        return np.asarray(ref).ravel()[index].astype(np.int32)

    result = mosaic.tile_type(index.shape, jnp.int32, layout=layout)
    return mosaic.inline(code, twin, (ref, index), (plgpu.RefType(), layout), result)


def columns(ref: GmemRef, start: Index, count: int) -> RegisterTile:
    """int32[count], one a column of a tile: booleans of a flat array from `start` on, an even
    number, all of them within the array. A thread has one address for all of its own.
    """

    def code(ref, start):
        thread = Thread()
        own = thread.to_int64(start) + thread.to_int64(thread.index % 4 * 2)
        base = utils.getelementptr(asm.pointer_of(ref), [own.value], asm.word_type(1))
        registers = []
        for block in range(count // 8):
            place = utils.getelementptr(base, [8 * block], asm.word_type(1))
            both = llvm.load(asm.word_type(2), place, alignment=2)
            both = arith.extui(asm.i32(), both)
            pair = [arith.andi(both, _word(1)), arith.shrui(both, _word(8))]
            registers.append(vector.from_elements(ir.VectorType.get((2,), asm.i32()), pair))
        return mosaic.array_of(registers, (count,), mosaic.COLUMN, signed=True)

    def twin(ref, start):
        return np.asarray(ref).ravel()[int(start) : int(start) + count].astype(np.int32)

    result = mosaic.tile_type((count,), jnp.int32, layout=mosaic.COLUMN)
    args = ref, jnp.int32(0) + start
    return mosaic.inline(code, twin, args, (plgpu.RefType(), plgpu.Layout.WG_SPLAT), result)


# ---- words of bits -------------------------------------------------------------------------------

WORD = 32  # rows whose booleans are the bits of a word


def keys_of_words(keys: int) -> int:
    """The keys of which a warpgroup makes words at a time, in rows of `keys` booleans."""
    return mosaic.THREADS * _bytes_of_load(keys)


def _bytes_of_load(keys: int) -> int:
    return next(width for width in (4, 2, 1) if keys % width == 0)


def words(ref: GmemRef, line: Index, row: Index, key: Index) -> RegisterTile:
    """int32[`keys_of_words`]: for each key from `key` on a word whose bit i is the boolean of row
    `row` + i; 0 past the ends. `ref`: [.., rows, keys], of which `line` counts the first axes.
    """
    *_, rows, keys = ref.shape
    width, count = _bytes_of_load(keys), keys_of_words(keys)
    layout = plgpu.Layout.WG_STRIDED((count,), width)

    def code(ref, line, row, key):
        thread = Thread()
        own = key + thread.index * width
        first = thread.to_int64(line) * (rows * keys) + thread.to_int64(row) * keys
        place, byte = [(first + thread.to_int64(own)).value], asm.word_type(1)
        base, loaded = utils.getelementptr(asm.pointer_of(ref), place, byte), []
        for i in range(WORD):
            inside = (own < keys) & (row + i < rows)
            loaded.append(Int(_load(utils.getelementptr(base, [i * keys], byte), inside, width)))
        eights = []  # byte j of each: eight rows of key j
        for group in range(0, WORD, 8):
            eight = loaded[group]
            for i in range(1, 8):
                eight = eight | loaded[group + i] << i
            eights.append(eight)
        registers = []
        for j in range(width):
            parts = [((eight >> 8 * j) & 255) << 8 * n for n, eight in enumerate(eights)]
            registers.append((parts[0] | parts[1] | parts[2] | parts[3]).value)
        pair = vector.from_elements(ir.VectorType.get((width,), asm.i32()), registers)
        return mosaic.array_of([pair], (count,), layout, signed=True)

    def twin(ref, line, row, key):
        seen = np.zeros((WORD, count), np.uint64)
        part = np.asarray(ref).reshape(-1, rows, keys)[int(line)]
        part = part[int(row) : int(row) + WORD, int(key) : int(key) + count]
        seen[: part.shape[0], : part.shape[1]] = part
        bits = (seen << np.arange(WORD, dtype=np.uint64)[:, None]).sum(axis=0)
        return bits.astype(np.uint32).view(np.int32)

    result = mosaic.tile_type((count,), jnp.int32, layout=layout)
    args = ref, *(jnp.int32(0) + number for number in (line, row, key))
    types = plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * 3
    return mosaic.inline(code, twin, args, types, result)
