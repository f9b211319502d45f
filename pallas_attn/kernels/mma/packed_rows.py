"""Packed rows of a warpgroup's tile, between global memory and where matmuls have them. Sequences
begin at any row, and TMA moves only rows that begin at a multiple of 8; so threads move them: query
rows by cp.async, 16 bytes at a time, to where swizzled shared memory has them; results as they lie
in registers. Nothing is read or written of a row that is not the sequence's own.
"""

from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_attn.kernels.lang import asm, mosaic, threads
from pallas_attn.kernels.lang.asm import Int
from pallas_attn.kernels.lang.mosaic import REF, SCALAR
from pallas_attn.kernels.lang.threads import Word

Ref = Any
Scalar = Any

ROWS = 64  # rows of a warpgroup's tile


class Place(NamedTuple):
    """The places of a tile's rows: row r is query head `head` + r // head_rows, if below `heads`,
    and query row `row` + r % head_rows, if that is one of `live`.
    """

    row: Scalar
    live: Scalar
    head: Scalar
    heads: Scalar


def load(
    q: Ref, to: Ref, slot: Scalar, at: Place, tiles: tuple[int, int], rows: Ref | None = None
) -> None:
    """Asks for the tile's rows of q [tokens, N, H] in slot `slot` of `to`, zeros where there are
    none. They are there when `wait` says so. `tiles`: bytes of a swizzle of `to`, and query rows of
    a head. `rows`: int32[tokens], which row of q each one is.
    """
    width, (swizzle, head_rows) = to.shape[-1], tiles
    (_, q_heads, dim), chunks, across = q.shape, width // 8, swizzle // 16

    def code(q, to, slot, at, *rows):
        thread = threads.Thread()
        at = Place(*at)
        for first in range(0, ROWS * chunks, mosaic.THREADS):
            number = thread.index + first
            row, chunk = number // chunks, number % chunks
            own, head = row % head_rows, row // head_rows
            there = (own < at.live) & (head < at.heads) & (chunk < dim // 8)
            token = thread.select(there, at.row + own, 0)
            token = thread.load(rows[0], token, 4) if rows else token
            head = thread.select(there, at.head + head, 0)
            source = (thread.to_int64(token) * q_heads + thread.to_int64(head)) * (dim // 8)
            source = source + thread.to_int64(thread.select(there, chunk, 0))
            place = swizzled_place(row, chunk, chunks, across)
            thread.copy_async(Word(to, slot * (ROWS * chunks) + place), Word(q, source), there)
        thread.commit_copies()

    def twin(q, to, slot, at, *rows):
        row, live, head, heads = map(int, at)
        tile = np.zeros((ROWS, width), to.dtype)
        for r in range(ROWS):
            if r % head_rows < live and r // head_rows < heads:
                token = row + r % head_rows
                token = int(rows[0][token]) if rows else token
                tile[r, :dim] = q[token, head + r // head_rows]
        to[int(slot)] = tile

    room = plgpu.RefType(mosaic.swizzle_transforms(to.dtype, swizzle))
    row_numbers = () if rows is None else (rows,)
    kinds = (REF, room, SCALAR, (SCALAR,) * 4, *(REF for _ in row_numbers))
    mosaic.inline(code, twin, (q, to, slot, tuple(at), *row_numbers), kinds, None)


def swizzled_place(row: Any, chunk: Any, chunks: int, across: int) -> Any:
    """The place where TMA would put 16 bytes of a row of `chunks` such: tiles of 8 rows and the
    `across` chunks of a swizzle.
    """
    tile = row // 8 * (chunks // across) + chunk // across
    place = (tile * 8 + row % 8) * across + chunk % across
    moved = place // 8 & (across - 1)
    return place + moved - (place & moved) * 2  # exclusive or


def wait(left: int) -> None:
    """Until what this warpgroup asked for is there, but for the last `left` times."""

    def code():
        threads.Thread().wait_copies(left)

    mosaic.inline(code, lambda: None, (), (), None)
    plgpu.commit_smem()


def store(tile: Any, to: Ref, column: int, at: Place, head_rows: int) -> None:
    """The tile's rows, of 16-bit numbers, to columns of `to` [tokens, N, Hv] from `column` on."""
    (_, q_heads, dim), (_, width) = to.shape, tile.shape

    def code(tile, to, at):
        thread = threads.Thread()
        at, lane = Place(*at), thread.index % 32
        starts = _rows_of_thread(thread, at, head_rows)
        lines = [
            (thread.to_int64(token) * q_heads + thread.to_int64(head)) * (dim // 2)
            + thread.to_int64(lane % 4 + column // 2)
            for token, head, _ in starts
        ]
        for n, register in enumerate(tile.registers.flat):
            half, beside = n % 2, n // 2 * 8
            if column + beside < dim:
                word = Int(llvm.bitcast(ir.IntegerType.get_signless(32), register))
                thread.store(to, lines[half] + beside // 2, word, 4, starts[half][2])

    def twin(tile, to, at):
        some = min(width, dim - column)
        for r, token, head in _rows_of_twin(at, head_rows):
            to[token, head, column : column + some] = tile[r, :some]

    mosaic.inline(code, twin, (tile, to, tuple(at)), (mosaic.TILE, REF, (SCALAR,) * 4), None)


def store_numbers(rows: Any, to: Ref, at: Place, head_rows: int) -> None:
    """A float32 for each of the tile's rows, to `to` [N, tokens]."""
    tokens = to.shape[1]

    def code(rows, to, at):
        thread = threads.Thread()
        at, first = Place(*at), thread.index % 4 < 1
        for register, (token, head, exists) in zip(
            rows.registers.flat, _rows_of_thread(thread, at, head_rows), strict=True
        ):
            number = threads.Float(asm.number_of(register))
            index = thread.to_int64(head) * tokens + thread.to_int64(token)
            thread.store_floats(to, index, [number], exists & first)

    def twin(rows, to, at):
        for r, token, head in _rows_of_twin(at, head_rows):
            to[head, token] = rows[r]

    mosaic.inline(code, twin, (rows, to, tuple(at)), (mosaic.ROW, REF, (SCALAR,) * 4), None)


def _rows_of_thread(thread: threads.Thread, at: Place, head_rows: int) -> list[tuple]:
    """Query row, head and whether it exists, of the two rows of a result that a thread has."""
    rows = []
    for half in (0, 8):
        row = thread.index // 32 * 16 + thread.index % 32 // 4 + half
        own, head = row % head_rows, row // head_rows
        exists = (own < at.live) & (head < at.heads)
        rows.append((at.row + own, at.head + head, exists))
    return rows


def _rows_of_twin(at: Any, head_rows: int) -> list[tuple[int, int, int]]:
    row, live, head, heads = map(int, at)
    return [
        (r, row + r % head_rows, head + r // head_rows)
        for r in range(ROWS)
        if r % head_rows < live and r // head_rows < heads
    ]
