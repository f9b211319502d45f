"""Stores of one number a row, such as the log-sum-exp, to an array without padded rows."""

import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_attn.kernels.lang import asm, mosaic
from pallas_attn.kernels.lang.mosaic import REF, SCALAR
from pallas_attn.kernels.lang.thread_program import Thread
from pallas_attn.kernels.lang.types import GmemRef, Index, RegisterTile


def store(values: RegisterTile, to: GmemRef, where: tuple[Index, ...], whole: bool = False) -> None:
    """Writes float32 values [rows], a row in four threads each, to `to` [B, heads, T] from `where`
    (batch, head, row) on; those past T are dropped. `whole`: none of the launch's are past T.
    """
    (batch, head, row), (_, heads, length) = where, to.shape
    if whole:
        return mosaic.store(to.at[batch, head, pl.ds(row, values.shape[0])], values)

    def code(values, to, batch, head, row):
        thread = Thread()
        lane = thread.index % 32
        row = row + thread.index // 32 * 16 + lane // 4
        line = (batch * heads + head) * length + row  # 32 bits count the rows of all heads
        address = asm.address_of(to, line, 4)
        ours = lane % 4 < 1
        for number, register in enumerate(values.registers.flat):
            below = number // 2 * 64 + number % 2 * 8
            value = asm.number_of(register)
            inside = (ours & (row + below < length)).value
            asm.do_where(inside, f"st.global.f32 [$1+{4 * below}], $2", [address, value], "l,f")

    def twin(values, to, batch, head, row):
        some = values[: max(0, length - int(row))]
        to[int(batch), int(head), int(row) : int(row) + len(some)] = some

    types = mosaic.ROW, REF, SCALAR, SCALAR, SCALAR
    args = values, to, *[jnp.int32(0) + x for x in (batch, head, row)]
    return mosaic.inline(code, twin, args, types, None)
