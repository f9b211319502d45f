"""Matmuls of any GPU from Ampere on: rows that cp.async brought to shared memory are read by
`ldmatrix` and multiplied by `mma.sync`, a warp at a time, on register tiles. Each step carries a
twin that says in NumPy what it means, which is what the interpreter runs.

A row in shared memory takes an odd number of chunks of 16 bytes. So 8 rows lie in different banks
at any one column, as `ldmatrix` reads them, and all that a thread addresses is one register and a
constant, where a swizzle would want a register a column.

`WarpGrid` says which part of a result each warp has: a tile of `64 * m` rows is m blocks of 64, of
which each of 4 warps has 16 rows (`BLOCKS`), or the warps lie some above each other and some side
by side. What a warp loads of the right operand serves all blocks of 16 rows that it has.

A float32 operand is a sum of terms in bfloat16, which lie side by side in its rows: 2 are good to
2**-16, 3 to 2**-24. `PAIRS` says which terms of both operands meet: the others are smaller than
what is lost anyway. Tensor cores round towards 0: of 3 terms they add up one tile alone, and of
scores small products by themselves.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_attn.kernels.lang import asm, mosaic, threads
from pallas_attn.kernels.lang.asm import Int
from pallas_attn.kernels.lang.mosaic import REF, SCALAR
from pallas_attn.kernels.lang.threads import Word
from pallas_attn.kernels.lang.types import Index, Layout
from pallas_attn.kernels.mma import mma_rowmajor

Ref = Any
Array = Any

CHUNK = 8  # 16-bit numbers that are copied together
PAIRS = {  # by number of terms; small products first
    1: ((0, 0),),
    2: ((1, 0), (0, 1), (0, 0)),
    3: ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0)),
}


def pitch(width: int) -> int:
    """Numbers from one row of `width` 16-bit numbers to the next in shared memory."""
    return CHUNK * (width // CHUNK | 1)


class WarpGrid(NamedTuple):
    """The arrangement of the warps of a block around a result."""

    down: int  # warps of a warpgroup one above the other
    groups: int = 1  # warpgroups, side by side
    group: Index = 0  # number of this one
    in_blocks: bool = False  # whether rows are those of `mosaic.TILE`, in blocks of 64

    @property
    def across(self) -> int:
        """Warps of a warpgroup side by side."""
        return 4 // self.down

    @property
    def shares(self) -> int:
        """Shares of a result's columns."""
        return self.across * self.groups

    @property
    def step(self) -> int:
        """Rows from 16 rows of a warp to its next 16."""
        return 64 if self.in_blocks else 16

    def blocks(self, rows: int) -> int:
        """The number of blocks of 16 rows that a warp has of so many rows."""
        return rows // self.down // 16

    def layout(self, shape: tuple[int, int]) -> Layout:
        return mosaic.TILE if self.in_blocks else mosaic.warp_layout(shape, self.down)

    def tile_type(self, shape: tuple[int, int], dtype: Any) -> Any:
        return mosaic.tile_type(shape, dtype, layout=self.layout(shape))

    def tile_with(self, registers: list, shape: tuple[int, int]) -> Any:
        return mosaic.array_of(registers, shape, self.layout(shape))

    def tile_of_sums(self, sums: list, shape: tuple[int, int]) -> Any:
        """Sums as `nothing` has them as a tile of float32."""
        each = [s[n : n + 2] for of_block in sums for s in of_block for n in (0, 2)]
        return self.tile_with([mma_rowmajor.pair_of(*pair) for pair in each], shape)

    def place(self) -> tuple[Int, Int, Int]:
        """(which of the warps down, which across, lane)."""
        warp, lane = warp_and_lane()
        return warp // self.across, warp % self.across, lane

    def share(self, group: Int) -> tuple[Int, Int, Int]:
        """(which of the warps down, lane, which share of the columns)."""
        high, wide, lane = self.place()
        return high, lane, wide if self.groups == 1 else group * self.across + wide

    def top(self, high: Int, rows: int) -> Int:
        """The first of the rows that a warp has."""
        return high * (16 if self.in_blocks else rows // self.down)


BLOCKS = WarpGrid(4, in_blocks=True)


def split(x: Array, terms: int, axis: int = -1) -> Array:
    """float32 -> `terms` bfloat16 arrays side by side, that add up to it. All but the last are cut
    off, not rounded: XLA drops casts to bfloat16 and back, and nothing overflows.
    """
    pieces = []
    for n in range(terms):
        top = x
        if n < terms - 1:
            bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
            top = lax.bitcast_convert_type(bits, jnp.float32)
        pieces.append(top.astype(jnp.bfloat16))
        x = jnp.where(jnp.isfinite(x), x - top, 0.0)
    return jnp.concatenate(pieces, axis=axis)


# ---- copies --------------------------------------------------------------------------------------


class RowsCopy(NamedTuple):
    """The static values of a copy of rows of one head to shared memory."""

    rows: int
    shape: Sequence[int]  # shape of the array in global memory, [B, rows, heads, dim]
    width: int  # width of a row in shared memory
    # Whether the row of shared memory is a constant; None: constants from one address are wanted
    # whatever the width, since registers are few.
    fixed: bool | None = False


def load_rows_async(thread: threads.Thread, refs: tuple[Ref, Ref], at: Any, copy: RowsCopy) -> None:
    """Issues the copies of rows of one head to shared memory; zeros past the `live` ones and past
    `dim`. `refs`: (to, from); `at`: (batch, head, first row, how many live, the row of shared
    memory).
    """
    (to, source), (batch, head, first, live, where) = refs, at
    rows, (_, length, heads, dim), width, fixed = copy
    chunks, wide = width // CHUNK, dim // CHUNK
    line = thread.to_int64(batch) * length + thread.to_int64(first)
    line = (line * heads + thread.to_int64(head)) * wide
    step = pitch(width) // CHUNK
    mine = thread.index
    # The same chunk of rows THREADS // chunks apart: constants from one address, where the compiler
    # cannot find them. Where it can, it knows better: 60 bytes less are spilled.
    if (mosaic.THREADS % chunks == 0 and not fixed) or fixed is None:
        row, chunk, at_once = mine // chunks, mine % chunks, mosaic.THREADS // chunks
        begin = line + thread.to_int64(row * (heads * wide) + chunk)
        place, live = (where + row) * step + chunk, live - row
        for down in range(0, rows, at_once):
            there = live > down
            if wide < chunks:
                there = there & (chunk < wide)
            inside = None
            if down + at_once > rows or mosaic.THREADS % chunks:
                inside = row < min(at_once, rows - down)
            far = down * heads * wide
            thread.copy_async(Word(to, place, down * step), Word(source, begin, far), there, inside)
        return
    for start in range(0, rows * chunks, mosaic.THREADS):
        if mosaic.THREADS % chunks:
            row, chunk = (mine + start) // chunks, (mine + start) % chunks
            begin = line + thread.to_int64(row * (heads * wide) + chunk)
        else:
            row, chunk = mine // chunks + start // chunks, mine % chunks
            begin = line + thread.to_int64(mine // chunks * (heads * wide) + chunk)
            begin = begin + start // chunks * heads * wide
        there = row < live
        if wide < chunks:
            there = there & (chunk < wide)
        inside = None if start + mosaic.THREADS <= rows * chunks else row < rows
        thread.copy_async(
            Word(to, (where + row) * step + chunk), Word(source, begin), there, inside
        )


# ---- tensor cores --------------------------------------------------------------------------------


def ldmatrix(
    address: ir.Value, offset: int, transposed: bool = False, count: int = 4
) -> list[ir.Value]:
    """2 or 4 matrices of 8 by 8; lane 8 * i + j has the address of row j of matrix i."""
    kind = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * count)})>")
    how, to = ".trans" if transposed else "", ", ".join(f"${n}" for n in range(count))
    ptx = f"ldmatrix.sync.aligned.m8n8.x{count}{how}.shared.b16 {{{to}}}, [${count}+{offset}];"
    constraints = "=r," * count + "r,~{memory}"
    words = llvm.inline_asm(kind, [address], ptx, constraints, has_side_effects=True)
    return [llvm.extractvalue(asm.i32(), words, [i]) for i in range(count)]


def address_of(ref: Ref, row: Int, chunk: Int, step: int) -> ir.Value:
    """The address of a 16-byte chunk of a row of shared memory; rows are `step` bytes apart."""
    return asm.shared_address(ref, row * (step // CHUNK) + chunk, 16)


def warp_and_lane() -> tuple[Int, Int]:
    """(warp of the warpgroup, lane of the warp)."""
    warp, lane = (Int(x) for x in mma_rowmajor.warp_and_lane())
    return warp % threads.WARPS, lane


def load_fragments(ref: Ref, first: Array, rows: int, width: int) -> Array:
    """Rows of shared memory from `first` on in registers, [rows, width], as `scores` wants them."""
    step, dtype = ref.shape[1], ref.dtype
    shape = (rows, width)

    def code(ref, first):
        warp, lane = warp_and_lane()
        base = address_of(ref, first + warp * 16 + lane % 16, lane // 16, step)
        pair = ir.VectorType.get((2,), utils.dtype_to_ir_type(jnp.dtype(dtype)))
        registers = []
        for block in range(BLOCKS.blocks(rows)):
            for column in range(0, width, 16):
                words = ldmatrix(base, 2 * (block * BLOCKS.step * step + column))
                registers += [llvm.bitcast(pair, word) for word in words]
        return mma_rowmajor.tile_with(registers, shape)

    def twin(ref, first):
        return ref[int(first) : int(first) + rows, :width].copy()

    types = (REF, SCALAR)
    return mosaic.inline(code, twin, (ref, first), types, mma_rowmajor.tile_of(shape, dtype))


def scores(
    q: tuple[Array, Array],
    k: tuple[Ref, Array],
    sizes: tuple[int, int, int],
    terms: int,
    some: tuple[Array | None, int, int] | None = None,
    narrow: tuple[str, str] | None = None,
    grid: WarpGrid = BLOCKS,
) -> Array:
    """q @ K^T, [rows, keys]: of (rows, the first of them), in shared memory; q may be in registers
    (`load_fragments`). `narrow`: float8 dtypes of q and k, where each 16-bit number of either is a
    pair of float8. `sizes`: (rows, keys, the width of a term). `some`: (what is to be added to, the
    first column, the one after the last), where not all columns are taken.
    """
    before, begin, end = some or (None, 0, sizes[2])
    (left_rows, q_first), (k_rows, first) = q, k
    (rows, keys, width), dtype, step = sizes, k_rows.dtype, k_rows.shape[1]
    shape, blocks, mine = (rows, keys), grid.blocks(rows), keys // grid.across
    in_registers = isinstance(left_rows, jax.Array)
    q_step = left_rows.shape[1]

    def left(q, base, column):
        """[term][block] -> 4 words."""
        if in_registers:
            words = mma_rowmajor.words_of(q)
            starts = [
                [(b * terms * width + p * width + column) // 4 for b in range(blocks)]
                for p in range(terms)
            ]
            return [[words[start : start + 4] for start in part] for part in starts]
        return [
            [
                ldmatrix(base, 2 * (b * grid.step * q_step + p * width + column))
                for b in range(blocks)
            ]
            for p in range(terms)
        ]

    def code(q, q_first, k, first, *before):
        (high, wide, lane), base = grid.place(), None

        def left_address(high, lane):
            row = q_first + grid.top(high, rows) + lane % 16
            return address_of(q, row, lane // 16, q_step)

        if not grid.in_blocks:  # ptxas is sensitive to which address is computed first
            base = left_address(high, lane)
        row = first + wide * mine + lane % 8 + lane // 16 * 8
        right = address_of(k, row, lane // 8 % 2, step)
        if grid.in_blocks and not in_registers:
            high, _, lane = grid.place()
            base = left_address(high, lane)
        sums = numbers_of(before[0], blocks) if before else nothing(blocks, mine)
        small = nothing(blocks, mine) if terms == 3 else None
        for column in range(begin, end, 16):
            a = left(q, base, column)
            for key in range(0, mine, 16):
                b = [ldmatrix(right, 2 * (key * step + p * width + column)) for p in range(terms)]
                multiply(sums, key // 8, a, b, narrow or dtype, small)
        if small is not None:
            plus(sums, small, 0)
        return grid.tile_of_sums(sums, shape)

    def twin(q, q_first, k, first, *before):
        out = np.array(before[0]) if before else np.zeros(shape, np.float32)
        q = q if in_registers else q[int(q_first) : int(q_first) + rows]
        for i, j in PAIRS[terms]:
            mine, theirs = (slice(n * width + begin, n * width + end) for n in (i, j))
            pair: Any = q[:, mine], k[int(first) : int(first) + keys, theirs]
            if narrow is not None:
                each = zip(pair, narrow, strict=True)
                pair = tuple(np.ascontiguousarray(x).view(jnp.dtype(kind)) for x, kind in each)
            out += pair[0].astype(np.float32) @ pair[1].astype(np.float32).T
        return out

    types: tuple[Any, ...] = (mosaic.TILE if in_registers else REF, SCALAR, REF, SCALAR)
    args: tuple[Any, ...] = (left_rows, q_first, k_rows, first)
    if before is not None:
        types, args = (*types, mosaic.TILE), (*args, before)
    return mosaic.inline(code, twin, args, types, grid.tile_type(shape, jnp.float32))


def matmul_add(
    acc: Array,
    p: Sequence[Array],
    v: Ref,
    first: Array,
    width: int,
    grid: WarpGrid = BLOCKS,
) -> Array:
    """acc + p @ V, [rows, width], V from row `first` of `v` on; p in as many terms as V has. Warps
    lie one above the other. Of three terms `acc` is 0 but in `BLOCKS`.
    """
    (rows, keys), dtype, step, terms = p[0].shape, v.dtype, v.shape[1], len(p)
    shape, blocks = (rows, width), grid.blocks(rows)
    apart = terms == 3 and grid.in_blocks  # tensor cores round towards 0
    assert grid.down == 4

    def code(acc, p, v, first):
        _, lane = warp_and_lane()
        right = address_of(v, first + lane % 16, lane // 16, step)
        sums = numbers_of(acc, blocks)
        words = [mma_rowmajor.words_of(term) for term in p]

        def add(sums, at, column, key):
            starts = [(block * keys + key) // 4 for block in range(blocks)]
            a = [[term[start : start + 4] for start in starts] for term in words]
            b = [
                ldmatrix(right, 2 * (key * step + n * width + column), transposed=True)
                for n in range(terms)
            ]
            multiply(sums, at, a, b, dtype)

        for key in range(0, keys, 16) if not apart else ():
            for column in range(0, width, 16):
                add(sums, column // 8, column, key)
        for column in range(0, width, 16) if apart else ():
            alone = nothing(blocks, 16)
            for key in range(0, keys, 16):
                add(alone, 0, column, key)
            plus(sums, alone, column // 8)
        return grid.tile_of_sums(sums, shape)

    def twin(acc, p, v, first):
        out = np.array(acc)
        for i, j in PAIRS[terms]:
            of_v = v[int(first) : int(first) + keys, j * width : j * width + width]
            out += p[i].astype(np.float32) @ of_v.astype(np.float32)
        return out

    types = (grid.layout(shape), (grid.layout((rows, keys)),) * terms, REF, SCALAR)
    args = (acc, tuple(p), v, first)
    return mosaic.inline(code, twin, args, types, grid.tile_type(shape, jnp.float32))


def multiply(sums: list, n: int, a: list, b: list, dtype: Any, small: Any = None) -> None:
    """Two columns of 8, the n-th and next, of every block: a [term][block], b [term], 4 words (or
    2, of one column). Products of other terms than the first go to `small`, if it is given.
    """
    for i, j in PAIRS[len(b)]:
        for block, of_block in enumerate(sums if small is None or i + j == 0 else small):
            for half in range(len(b[j]) // 2):
                pair = b[j][2 * half : 2 * half + 2]
                of_block[n + half] = mma_rowmajor.mma(of_block[n + half], a[i][block], pair, dtype)


def nothing(blocks: int, columns: int) -> list:
    """Sums to begin with: [block][8 columns], 4 numbers each."""
    zero = utils.c(0.0, ir.F32Type.get())
    return [[[zero] * 4 for _ in range(columns // 8)] for _ in range(blocks)]


def numbers_of(tile: Any, blocks: int) -> list:
    """A tile of float32 in registers as `nothing` has it."""
    return [
        [[vector.extract(x, [], [i]) for x in pair for i in range(2)] for pair in pairs]
        for pairs in tile.registers.reshape(blocks, -1, 2)
    ]


def plus(sums: list, others: list, n: int) -> None:
    """sums += others, whose columns begin at the n-th 8."""
    for of_block, some in zip(sums, others, strict=True):
        for i, four in enumerate(some):
            pairs = zip(of_block[n + i], four, strict=True)
            of_block[n + i] = [arith.addf(a, b) for a, b in pairs]


def terms_of(p: Array, terms: int, dtype: Any) -> tuple[Array, ...]:
    """A tile of float32 in registers as its terms."""
    pieces = []
    for n in range(terms):
        pieces.append(p.astype(dtype))
        if n < terms - 1:
            p = p - pieces[-1].astype(jnp.float32)
    return tuple(pieces)


# ---- results -------------------------------------------------------------------------------------


def write(tile: Array, to: Ref, at: tuple[Any, ...], grid: WarpGrid = BLOCKS) -> None:
    """The first `live` rows of a warpgroup's part of a tile, and as many columns as there are, to
    [B, rows, heads, dim]. `at`: (batch, head, first row, live), int32 scalars.
    """
    _, length, heads, dim = to.shape
    dtype, shape = tile.dtype, tile.shape
    bits, mine = 2 * 8 * jnp.dtype(dtype).itemsize, shape[1] // grid.across

    def code(tile, to, at, group):
        thread = threads.Thread()
        high, lane, share = grid.share(group)
        batch, head, first, live = at
        start = thread.to_int64(batch) * length + thread.to_int64(first)
        row, column = grid.top(high, shape[0]) + lane // 4, share * mine
        start = (start * heads + thread.to_int64(head)) * (dim // 2)
        start = start + thread.to_int64(row * (heads * dim // 2) + column // 2 + lane % 4)
        for n, register in enumerate(tile.registers.flat):
            right = n // 2 % (mine // 8) * 8
            below = n // 2 // (mine // 8) * grid.step + n % 2 * 8
            if grid.shares == 1 and right >= dim:
                continue
            there = None if grid.in_blocks else row + below < live
            if there is not None and grid.shares > 1 and dim < shape[1] * grid.groups:
                there = there & (column + right < dim)
            word = Int(llvm.bitcast(ir.IntegerType.get_signless(bits), register))
            index = start + (below * (heads * dim // 2) + right // 2)
            there = row + below < live if there is None else there
            thread.store(to, index, word, bits // 8, there)

    def twin(tile, to, at, group):
        batch, head, first, live = map(int, at)
        live, start = max(0, min(live, shape[0])), int(group) * shape[1]
        some = max(0, min(dim - start, shape[1]))
        to[batch, first : first + live, head, start : start + some] = tile[:live, :some]

    types = (grid.layout(shape), REF, (SCALAR,) * 4, SCALAR)
    args = (tile, to, tuple(at), jnp.int32(grid.group))
    mosaic.inline(code, twin, args, types, None)
