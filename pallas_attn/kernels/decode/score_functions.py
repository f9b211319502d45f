"""Functions of positions in decode: scores that a function changes, keys that a mask function or a
tree of drafts shows.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from pallas_attn._functions.program import Operation, evaluate
from pallas_attn.kernels.attention import functions
from pallas_attn.kernels.attention.functions import Registers, Value
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.decode import scheduler
from pallas_attn.kernels.decode.plan import ROWS_OF_WARPS, Plan
from pallas_attn.kernels.decode.scheduler import WorkTile
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import Index, Layout, RegisterTile
from pallas_attn.kernels.mma import mma_rowmajor

ADD = Operation("add", (), "int32")


class Places(NamedTuple):
    """The query rows and keys of a tile of logits. Those that a function does not ask for are not
    made: see `functions.numbers_of_rows`.
    """

    registers: Registers
    q_axis: int
    row: Callable[[], RegisterTile]  # query rows of the q chunk, along that axis
    key: Callable[[], Value]


def places_along(
    shape: tuple[int, int], layout: Layout, q_axis: int, first: Callable[[], Index]
) -> Places:
    """Places of a tile that has the rows of a chunk along one axis, and keys from `first` on along
    the other.
    """
    registers = Registers(shape, layout)
    return Places(
        registers,
        q_axis,
        row=lambda: registers.along(q_axis, 0).x,
        key=lambda: registers.along(1 - q_axis, first()),
    )


def places_of(plan: Plan, tile: Index) -> Places:
    """Places of the logits of all warps."""
    split, own = plan.split, mma_rowmajor.ROWS
    registers = Registers((ROWS_OF_WARPS, split.width), mosaic.TILE)

    def warp_and_row() -> tuple[RegisterTile, RegisterTile]:
        row = registers.along(0, 0).x
        return row // own, row % own

    def query_row() -> RegisterTile:
        warp, row = warp_and_row()
        return split.row_block(warp) * own + split.query(row)

    def key() -> Value:
        warp, row = warp_and_row()
        first = tile * plan.keys.tile + split.first_key(warp) + split.key(row, 0)
        column = split.key(0, registers.along(1, 0).x)
        return registers.compute(ADD, (Value(first, (0,)), Value(column, (1,))))

    return Places(registers, 0, query_row, key)


def scored(ctx: KernelContext, work: WorkTile, places: Places, s: RegisterTile) -> RegisterTile:
    """The result of the score function for a tile of logits in natural units."""
    plan, registers, program = ctx.plan, places.registers, ctx.plan.problem.score_program
    head = query = key = Value(None, ())
    of_head, of_query, of_key = (program.depends_on(program.inputs - n) for n in (3, 2, 1))
    kv_head, chunk = scheduler.head_and_chunk(plan, work)
    group = plan.queries.group
    if of_query or (of_head and group > 1):
        row = places.row() + chunk * plan.queries.chunk_rows
        token = scheduler.token_of(plan, row)
        if of_head:
            head = Value(kv_head * group + (row - token * group), (places.q_axis,))
        if of_query:
            begin = work.length - plan.queries_of(work.queries)
            query = Value(begin + token, (places.q_axis,))
    elif of_head:  # rows that nothing uses: see `functions.numbers_of_rows`
        head = Value(kv_head, ())
    if of_key:
        key = places.key()
    numbers = Value(s, (0, 1)), Value(work.sequence, ()), head, query, key
    result = evaluate(program, numbers, ctx.refs.score_aux, registers)
    return registers.spread(result, (0, 1)).astype(jnp.float32)


def seen(ctx: KernelContext, work: WorkTile, at: scheduler.Positions, begin: Index) -> RegisterTile:
    """Whether the mask function shows the keys of a tile; it counts positions from `begin`."""
    positions = (at.head, at.query - begin, at.key - begin)
    values = [Value(jnp.int32(0), ()) if x is None else Value(x, (0, 1)) for x in positions]
    numbers = (Value(work.sequence, ()), *values)
    return functions.seen_at(ctx, numbers, functions.Registers(at.key.shape, at.layout))
