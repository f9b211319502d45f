"""Numbers of the rows of a tile that holds 8 query heads of each of 8 query rows: row m of the tile
is head m % 8 of query row m // 8.

Of a warpgroup's 64 rows a thread has numbers 16 w + l / 4 and 8 more, w its warp and l its lane:
one head of two neighbouring query rows.
"""

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_attn.kernels.lang import asm, mosaic, threads
from pallas_attn.kernels.lang.mosaic import REF, SCALAR
from pallas_attn.kernels.lang.types import GmemRef, Index, RegisterTile

HEADS = 8  # heads of a query row
QUERIES = 8  # query rows of a tile


def store(values: RegisterTile, to: GmemRef, batch: Index, head: Index, row: Index) -> None:
    """Writes float32 values [64] to `to` [B, N, T] from a head and a query row on; those of query
    rows past T are dropped.
    """
    _, heads, length = to.shape

    def code(values, to, batch, head, row):
        thread = threads.Thread()
        lane = thread.index % 32
        row, head = row + thread.index // 32 * 2, head + lane // 4
        line = (batch * heads + head) * length + row  # 32 bits count the rows of all heads
        address = asm.address_of(to, line, 4)
        ours = lane % 4 < 1
        for number, register in enumerate(values.registers.flat):
            value = asm.number_of(register)
            inside = (ours & (row + number < length)).value
            asm.do_where(inside, f"st.global.f32 [$1+{4 * number}], $2", [address, value], "l,f")

    def twin(values, to, batch, head, row):
        rows, some = min(QUERIES, max(0, length - int(row))), np.asarray(values)
        some = some.reshape(QUERIES, HEADS)[:rows].T
        to[int(batch), int(head) : int(head) + HEADS, int(row) : int(row) + rows] = some

    types = mosaic.ROW, REF, SCALAR, SCALAR, SCALAR
    args = values, to, *[jnp.int32(0) + x for x in (batch, head, row)]
    mosaic.inline(code, twin, args, types, None)


def load(numbers: GmemRef, head: Index) -> RegisterTile:
    """float32[64]: the number of each row's head, of `numbers` [N] from a head on."""

    def code(numbers, head):
        lane = threads.Thread().index % 32
        address = asm.address_of(numbers, head + lane // 4, 4)
        f32 = ir.F32Type.get()
        number = asm.give(f32, "ld.global.f32 $0, [$1];", [address], "=f,l")
        register = vector.broadcast(ir.VectorType.get((1,), f32), number)
        return mosaic.array_of([register] * 2, (HEADS * QUERIES,), mosaic.ROW)

    def twin(numbers, head):
        own = numbers[int(head) : int(head) + HEADS]
        return np.tile(np.asarray(own, np.float32), QUERIES)

    result = mosaic.tile_type((HEADS * QUERIES,), jnp.float32, layout=mosaic.ROW)
    args = numbers, jnp.int32(0) + head
    return mosaic.inline(code, twin, args, (REF, SCALAR), result)


def mask_queries(s: RegisterTile, low: RegisterTile, high: RegisterTile) -> RegisterTile:
    """A tile of float32 scores [64 keys, 64] whose columns are such rows, with -inf where a query
    row is below its key's `low` or from its `high` on (each int32[64]): a comparison for the 8
    heads, which lie in a thread's pairs of columns.
    """

    def code(s, low, high):
        low, high = (
            [asm.number_of(register) for register in x.registers.flat] for x in (low, high)
        )
        registers, nothing = s.registers.copy(), utils.c(float("-inf"), ir.F32Type.get())
        for at, register in enumerate(s.registers.flat):
            block, row = divmod(at, 2)
            query = utils.c(block, ir.IntegerType.get_signless(32))
            below = arith.cmpi(arith.CmpIPredicate.sge, query, low[row])
            seen = arith.andi(below, arith.cmpi(arith.CmpIPredicate.slt, query, high[row]))
            pair = register
            for i in range(2):
                score = arith.select(seen, vector.extract(register, [], [i]), nothing)
                pair = vector.insert(score, pair, [], [i])
            registers[np.unravel_index(at, registers.shape)] = pair
        return mgpu.FragmentedArray(_registers=registers, _layout=s.layout, _is_signed=None)

    def twin(s, low, high):
        query = jnp.arange(s.shape[1])[None] // HEADS
        return jnp.where((query >= low[:, None]) & (query < high[:, None]), s, -jnp.inf)

    result = mosaic.tile_type(s.shape, jnp.float32, layout=mosaic.TILE)
    types = mosaic.TILE, mosaic.ROW, mosaic.ROW
    return mosaic.inline(code, twin, (s, low, high), types, result, traced=True)


def query_rows() -> jax.Array:
    """int32[64]: the query row of each row of a tile, counted from its first."""
    eight = mosaic.filled((HEADS * QUERIES,), HEADS, jnp.int32)
    return jax.lax.div(mosaic.positions((HEADS * QUERIES,), 0, 0), eight)
