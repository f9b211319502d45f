"""Masks of keys, mask_array [B|1, N|1, 1, S]: padding masks.

Kernels read the bytes of the boolean array as they are: XLA launches nothing before. Which kv tiles
are visible whole, in part or not at all follows from votes of a warp over bytes that its lanes load
(`tiles_of`): hidden tiles at either end are skipped, and visible ones take the path without a mask,
so a padding mask costs its one cut tile. In other tiles each thread loads the bytes of its own keys
(`shown`).
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_attn.kernels.attention.tiles import Span
from pallas_attn.kernels.lang import asm, mosaic
from pallas_attn.kernels.lang.thread_program import Int, Thread
from pallas_attn.kernels.lang.types import GmemRef, Index, Layout, RegisterTile

LANES = 32
ROUND = 32  # kv tiles whose visibility one word holds


def row_of(ref: GmemRef, batch: Index, head: Index) -> Index:
    """The number of the bytes of a batch row and head, in rows of S bytes."""
    batches, heads = ref.shape[:2]
    row: Index = jnp.int32(0)
    if batches > 1:
        row = batch * heads
    return row + head if heads > 1 else row


# ---- tiles ---------------------------------------------------------------------------------------


def span_of(ref: GmemRef, row: Index, block: int) -> Span:
    """The kv tiles of `block` keys that hold a visible key, lo to hi, and the first run of those
    that are visible whole.
    """
    tiles = -(-ref.shape[3] // block)
    first = _unpacked(tiles_of(ref, row, 0, block, min(tiles, ROUND)), 0)
    if tiles <= ROUND:
        return first

    def following(n: Index, so_far: Span) -> Span:
        base = n * ROUND
        new = _unpacked(tiles_of(ref, row, base, block, ROUND), base)
        lo = jnp.where(so_far.hi > so_far.lo, so_far.lo, new.lo)
        hi = jnp.where(new.hi > base, new.hi, so_far.hi)
        none = so_far.full_hi <= so_far.full_lo
        goes_on = (so_far.full_hi == base) & (new.full_lo == base)
        full_lo = jnp.where(none, new.full_lo, so_far.full_lo)
        full_hi = jnp.where(none | goes_on, new.full_hi, so_far.full_hi)
        return Span(lo, full_lo, full_hi, hi)

    return lax.fori_loop(1, -(-tiles // ROUND), following, first)


def _unpacked(word: Index, base: Index) -> Span:
    fields = (lax.shift_right_logical(word, jnp.int32(8 * i)) & 255 for i in range(4))
    return Span(*(field + base for field in fields))


def sees_any(word: Index) -> Index:
    """Whether the one tile that a word of `tiles_of` is about has a visible key."""
    return lax.shift_right_logical(word, jnp.int32(24)) > 0


def sees_all(word: Index) -> Index:
    """Whether the one tile that a word of `tiles_of` is about is visible whole."""
    return (lax.shift_right_logical(word, jnp.int32(8)) & 255) == 0  # the run begins there


def tiles_of(ref: GmemRef, row: Index, first: Index, block: int, count: int) -> jax.Array:
    """The visibility of `count` kv tiles, up to 32, of `block` keys from tile `first` on, counted
    from there: four bytes lo, full_lo, full_hi and hi; hi is 0 where none is visible, and the run
    of whole ones is empty where there is none.
    """
    keys = ref.shape[3]

    def code(ref, row, first):
        row, first = (Int(x.registers.item()) for x in (row, first))
        words = _words(ref, row, first, block, count, keys)
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

    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)
    types = plgpu.RefType(), plgpu.Layout.WG_SPLAT, plgpu.Layout.WG_SPLAT
    args = ref, jnp.int32(0) + row, jnp.int32(0) + first
    return mosaic.inline(code, twin, args, types, result)


def _words(ref: Any, row: Int, first: Int, block: int, count: int, keys: int) -> ir.Value:
    """All loads come before the first vote, so that they are in flight together."""
    thread = Thread()
    lane, start = thread.index % LANES, thread.wide(row) * keys
    base, tiles = asm.pointer_of(ref), []
    for n in range(count):
        tile = first + n
        pieces = []
        for offset, width in _pieces(block, keys):
            key = tile * block + offset + lane * width
            inside = (key < keys) & (lane * width + offset < block)
            where = utils.getelementptr(base, [(start + thread.wide(key)).value], asm.word_type(1))
            pieces.append((_load(where, inside, width), inside, width))
        tiles.append((pieces, tile * block < keys))
    some, whole = _word(0), _word(0)
    for n, (pieces, exists) in enumerate(tiles):
        seen, hidden = _word(0), _word(0)
        for value, inside, width in pieces:
            ones = _word(sum(1 << 8 * i for i in range(width)))
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
    return arith.constant(asm.i32(), ir.IntegerAttr.get(asm.i32(), number - (number >> 31 << 32)))


# ---- keys within a tile --------------------------------------------------------------------------


def shown(
    ref: GmemRef, row: Index, first: Index, shape: tuple[int, int], axis: int, layout: Layout
) -> RegisterTile:
    """bool `shape`: whether a key is visible; keys lie along `axis` of the tile, from `first` on.
    The last key stands for those past S.
    """
    keys, along = ref.shape[3], layout.reduce(1 - axis)
    numbers = plgpu.broadcasted_iota(jnp.int32, (shape[axis],), 0, layout=along) + first
    bytes_ = _bytes(ref, jnp.minimum(numbers, keys - 1) + row * keys, along)
    return lax.broadcast_in_dim(bytes_, shape, [axis]) != 0


def _bytes(ref: GmemRef, index: RegisterTile, layout: Layout) -> RegisterTile:
    """int32: bytes of a boolean array, as a flat one, at `index`."""

    def code(ref, index):
        byte, base = asm.word_type(1), asm.pointer_of(ref)
        registers = index.registers.copy()

        def load(place):
            return arith.extui(asm.i32(), llvm.load(byte, utils.getelementptr(base, [place], byte)))

        for at, register in np.ndenumerate(index.registers):
            if isinstance(register.type, ir.VectorType):
                count = ir.VectorType(register.type).shape[0]
                values = [load(vector.extract(register, [], [i])) for i in range(count)]
                registers[at] = vector.from_elements(register.type, values)
            else:
                registers[at] = load(register)
        return mgpu.FragmentedArray(_registers=registers, _layout=index.layout, _is_signed=True)

    def twin(ref, index):
        return np.asarray(ref).ravel()[index].astype(np.int32)

    result = plgpu.ShapeDtypeStruct(index.shape, jnp.int32, layout=layout)
    return mosaic.inline(code, twin, (ref, index), (plgpu.RefType(), layout), result)
