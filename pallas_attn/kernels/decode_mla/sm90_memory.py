"""Shared memory of `mla_sm90`, and how it is filled.

A warpgroup that multiplies values has a ring of blocks of columns, two tiles and a half where V has
512 columns; each block is asked for again as soon as it has been multiplied. Scores take the blocks
of all rings. The first block of a piece is q's, on its way to registers.
Columns of K that are not of V have two slots; when a tile's scores are there, its probabilities
take their place.
"""

import functools
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.decode import scheduler
from pallas_attn.kernels.decode.logits import ROWS
from pallas_attn.kernels.decode.scheduler import Piece, Table
from pallas_attn.kernels.decode_mla import producer as mla_producer
from pallas_attn.kernels.decode_mla.plan import COMPUTING, SLOTS, LatentPlan, place_of
from pallas_attn.kernels.decode_mla.producer import TILE, WIDE, Block, Refs
from pallas_attn.kernels.lang import mosaic

Ref = Any
Scalar = Any


class Smem(NamedTuple):
    q: Any  # [COMPUTING, ROWS, half - part]: what is not in registers; None where all is
    kv: Any  # [COMPUTING, ring, TILE, part]: each warpgroup's blocks of columns
    q_rest: Any  # [ROWS, rest]; None where rest is 0
    k_rest: Any  # [SLOTS, TILE, rest]
    p: Any  # [SLOTS, ROWS, TILE]: probabilities; None where k_rest has room for them
    tops: Any  # float32[SLOTS, ROWS]: after a tile
    totals: Any  # likewise, after the last tile of a piece
    table: Table
    last: Any  # int32[1]
    q_ready: Any
    q_free: Any
    ready: Any  # an entry of a ring
    free: Any
    rest_ready: Any
    weights: Any  # a tile's probabilities are there
    spent: Any  # and not needed any more
    met: Any  # of the computing warpgroups
    laid: Any


def scratch(plan: LatentPlan) -> Smem:
    dtype, ring = jnp.dtype(plan.problem.dtype), plan.ring

    def swizzled(*shape):
        return mosaic.swizzled(shape, dtype, 2 * WIDE) if shape[-1] else None

    def numbers(count):
        return plgpu.SMEM((count,), jnp.int32)

    barrier, stretches = plgpu.Barrier, TILE // plan.page_rows
    return Smem(
        q=swizzled(COMPUTING, ROWS, plan.half - plan.part),
        kv=swizzled(COMPUTING, ring, TILE, plan.part),
        q_rest=swizzled(ROWS, plan.rest),
        k_rest=swizzled(SLOTS, TILE, plan.rest),
        p=None if plan.rest else swizzled(SLOTS, ROWS, TILE),
        tops=plgpu.SMEM((SLOTS, ROWS), jnp.float32),
        totals=plgpu.SMEM((SLOTS, ROWS), jnp.float32),
        table=mla_producer.table_of(plan),
        last=numbers(1),
        q_ready=barrier(num_arrivals=max(plan.q_pieces, 1)),
        q_free=barrier(),
        ready=barrier(num_barriers=COMPUTING * ring, num_arrivals=stretches),
        free=barrier(num_barriers=COMPUTING * ring),
        rest_ready=barrier(num_barriers=SLOTS, num_arrivals=stretches),
        weights=barrier(num_barriers=SLOTS),
        spent=barrier(num_barriers=SLOTS, num_arrivals=COMPUTING),
        met=barrier(num_arrivals=COMPUTING),
        laid=barrier(),
    )


def pieces(plan: LatentPlan, smem: Smem, cta: Scalar, body: Any) -> None:
    """`body(piece, number, count)` for each piece of the block; `count` is what it gave before."""
    place = place_of(plan, cta)

    def own(piece, number, count):
        return body(piece._replace(head=piece.head * plan.beside + place.which), number, count)

    share = scheduler.share_of(plan.line, smem.table, place.cta)
    mla_producer.pieces(plan.line, smem.table, share, own, jnp.int32(0))


def entry_of(plan: LatentPlan, wg: Any, number: Scalar) -> Scalar:
    """Of the number-th block of a warpgroup's columns, since the kernel began, in all rings."""
    return wg * plan.ring + lax.rem(number, jnp.int32(plan.ring))


def block_of(plan: LatentPlan, smem: Smem, wg: Any, number: Scalar) -> Ref:
    return smem.kv.at[wg, lax.rem(number, jnp.int32(plan.ring))]


def first_of(plan: LatentPlan, number: Scalar, count: Scalar) -> Scalar:
    """The number of the block that holds q's, before those of a piece's keys. `count`: tiles before
    the piece.
    """
    return number + count * plan.each


def load(plan: LatentPlan, refs: Refs, smem: Smem, cta: Scalar) -> None:
    which = place_of(plan, cta).which

    def bring(tile):  # by one of those beside each other
        return lax.rem(tile, jnp.int32(plan.beside)) == which

    def one_piece(piece, number, count):
        _load_q(plan, refs, smem, piece, number, count)

        def blocks_of(count):
            first = first_of(plan, number, count) + 1
            for n in range(plan.each):
                for wg in range(COMPUTING):
                    entry = entry_of(plan, wg, first + n)
                    yield Block(
                        columns=pl.ds(wg * plan.half + n * plan.part, plan.part),
                        to=block_of(plan, smem, wg, first + n),
                        ready=smem.ready.at[entry],
                        free=smem.free.at[entry],
                        again=first + n >= plan.ring,
                    )
            if plan.rest:
                slot = lax.rem(count, jnp.int32(SLOTS))
                yield Block(
                    columns=pl.ds(plan.problem.v_head_dim, plan.rest),
                    to=smem.k_rest.at[slot],
                    ready=smem.rest_ready.at[slot],
                    free=smem.spent.at[slot],
                    again=count >= SLOTS,
                )

        ahead = bring if plan.scores_first else None
        return mla_producer.load(plan, refs, smem.table, piece, count, blocks_of, ahead)

    pieces(plan, smem, cta, one_piece)


def _load_q(  # noqa: PLR0913
    plan: LatentPlan, refs: Refs, smem: Smem, piece: Piece, number: Scalar, count: Scalar
) -> None:
    """Columns that go to registers come through the rings."""
    chunk = lax.rem(piece.head, jnp.int32(plan.chunks)) * ROWS
    start, first = piece.m * plan.padded + chunk, first_of(plan, number, count)

    def copy(column, width, to, ready, row=0, rows=ROWS):
        source = refs.q.at[pl.ds(start + row, rows), pl.ds(column, width)]
        plgpu.copy_gmem_to_smem(source, to, ready)

    for wg in range(COMPUTING):
        entry, to = entry_of(plan, wg, first), block_of(plan, smem, wg, first)
        again = functools.partial(plgpu.barrier_wait, smem.free.at[entry])
        pl.when(first >= plan.ring)(again)
        for row in range(0, ROWS, plan.page_rows):  # as many copies as keys take
            some = to.at[pl.ds(row, plan.page_rows)]
            copy(wg * plan.half, plan.part, some, smem.ready.at[entry], row, plan.page_rows)
    if not plan.q_pieces:
        return
    pl.when(number > 0)(lambda: plgpu.barrier_wait(smem.q_free))
    for wg in range(COMPUTING):
        if smem.q is not None:
            width = plan.half - plan.part
            copy(wg * plan.half + plan.part, width, smem.q.at[wg], smem.q_ready)
    if plan.rest:
        copy(plan.problem.v_head_dim, plan.rest, smem.q_rest, smem.q_ready)
