"""A launch that combines the partials of long rows: 128 heads over one sequence of 64k keys, say.

Where a row is split over most of the GPU, its last block would take longer to add up all partials
than the others took to make them. Here a block has 8 or 16 columns of 64 rows, so partials are read
by all multiprocessors. They lie in memory as `combine_latent` stores them, where 8 columns of a
tile are 512 numbers in a line, four of each thread.

The places of a row's partials follow from the lengths, as in the launch that wrote them.
"""

import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.attention import softmax
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.decode import scheduler
from pallas_attn.kernels.decode.plan import ROWS_OF_WARPS as ROWS
from pallas_attn.kernels.decode.plan import Plan
from pallas_attn.kernels.decode.scheduler import Table
from pallas_attn.kernels.decode_mla import combine_latent, producer, row_gathers
from pallas_attn.kernels.decode_mla.sm90_plan import groups_of, neighbours
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import GmemRef, Index, RegisterTile

Array = jax.Array

WORD = 8  # columns that are one word of 16 bytes of each thread
AT_ONCE = 16  # words whose loads are under way together
FEW_BLOCKS = 400  # blocks that are at work at once, about


def columns_of(plan: Plan) -> int:
    """Columns of a block: so many that all blocks are at work at once."""
    lines = plan.problem.sequences * plan.queries.chunks
    return WORD * (1 if lines * plan.problem.v_head_dim // WORD <= FEW_BLOCKS else 2)


class CombineRefs(NamedTuple):
    """Global memory that is read."""

    lengths: scheduler.Lengths
    layer: GmemRef | None
    sinks: GmemRef | None  # float32[rows of a sequence, and some more]
    outs: GmemRef  # float32[partials * v_head_dim // columns, ROWS * columns]
    row_max: GmemRef  # float32[partials, ROWS]
    row_sum: GmemRef
    lost: GmemRef | None  # int32[M], where lists name rows


class CombineSmem(NamedTuple):
    table: Table | None  # None: `row_gathers.with_table`


def _at_once(plan: Plan) -> int:
    """Partials whose loads are under way together."""
    return AT_ONCE * WORD // columns_of(plan)


class _State(NamedTuple):
    row_max: RegisterTile  # [ROWS]
    row_sum: RegisterTile  # [ROWS]
    acc: RegisterTile  # [ROWS, columns]


def _partials_of(ctx: KernelContext, sequence: Index, chunk: Index) -> combine_latent.Partials:
    """The places of the partials of a q chunk of a sequence."""
    plan, table = ctx.plan, ctx.smem.table
    together, groups = jnp.int32(neighbours(plan)), groups_of(plan)
    head, member = lax.div(chunk, together), lax.rem(chunk, together)
    start = table.sums[sequence]
    units = table.sums[sequence + 1] - start
    share = scheduler.share_of(groups, table, jnp.int32(0))
    first_unit = start * groups.heads + head * units
    work = scheduler.work_at(groups, table, share, first_unit, sequence)
    count, *others = scheduler.partials_of(groups, share, work, jnp.int32(0))
    places = scheduler.Partials(count, *(n * together + member for n in others))
    return combine_latent.Partials(places, plan.partials_a_block)


def _some(ctx: KernelContext, partials: combine_latent.Partials, column: Index, n: Index, state):
    """Adds some partials to the state."""
    refs, columns = ctx.refs, columns_of(ctx.plan)
    width, at_once = jnp.int32(ctx.plan.problem.v_head_dim // columns), _at_once(ctx.plan)
    number = [n * at_once + i for i in range(at_once)]
    place = [partials.place(jnp.minimum(p, partials.count - 1)) for p in number]
    row_maxes = [combine_latent.load_rows(refs.row_max, at, mosaic.ROW) for at in place]
    row_sums = [combine_latent.load_rows(refs.row_sum, at, mosaic.ROW) for at in place]
    shape = (ROWS, columns)
    tiles = [combine_latent.load(refs.outs, at * width + column, shape) for at in place]
    row_max = functools.reduce(jnp.maximum, row_maxes, state.row_max)
    base = softmax.base_of(row_max)
    rescale = jnp.exp2(state.row_max - base)
    row_sum = state.row_sum * rescale
    acc = state.acc * mosaic.broadcast_rows(rescale, shape)
    for p, own_max, own_sum, tile in zip(number, row_maxes, row_sums, tiles, strict=True):
        # A place past the last partial is the last once more, which may hold infinities.
        weight, exists = jnp.exp2(own_max - base), (p < partials.count).astype(jnp.float32)
        there = mosaic.broadcast_scalar(exists, (ROWS,)) > 0
        row_sum = row_sum + jnp.where(there, weight * own_sum, 0.0)
        there = mosaic.broadcast_scalar(exists, shape) > 0
        acc = acc + jnp.where(there, mosaic.broadcast_rows(weight, shape) * tile, 0.0)
    return _State(row_max, row_sum, acc)


def _kernel(refs: CombineRefs, out: GmemRef, lse: GmemRef, smem: CombineSmem, *, plan: Plan):
    line, column = lax.axis_index("line"), lax.axis_index("column")
    ctx = row_gathers.with_table(KernelContext(plan, refs, smem))
    producer.fill_table(ctx)
    chunks = jnp.int32(plan.queries.chunks)
    sequence, chunk = lax.div(line, chunks), lax.rem(line, chunks)
    partials = _partials_of(ctx, sequence, chunk)
    columns, at_once = columns_of(plan), _at_once(plan)
    start = _State(
        mosaic.filled((ROWS,), -jnp.inf),
        mosaic.filled((ROWS,), 0.0),
        mosaic.filled((ROWS, columns), 0.0),
    )
    step = functools.partial(_some, ctx, partials, column)
    batches = lax.div(partials.count + (at_once - 1), jnp.int32(at_once))
    state = lax.fori_loop(0, batches, step, start)
    sinks = None
    if refs.sinks is not None:
        sinks = mosaic.load(refs.sinks.at[pl.ds(chunk * ROWS, ROWS)], mosaic.ROW)
    factor, row_lse = softmax.finish(state.row_max, state.row_sum, sinks)
    pl.when(column == 0)(lambda: mosaic.store(lse.at[line], row_lse))
    result = state.acc * mosaic.broadcast_rows(factor, state.acc.shape)
    to = pl.ds(line * ROWS, ROWS), pl.ds(column * columns, columns)
    mosaic.store(out.at[to], result.astype(plan.problem.dtype))


def run(
    plan: Plan, partials: tuple[Array, Array, Array], refs: producer.LatentRefs
) -> tuple[Array, Array]:
    """out [rows of all sequences, Hv] and lse [q chunks of all sequences, ROWS]. `refs`: those of
    the launch that wrote the partials.
    """
    problem, shape = plan.problem, jax.ShapeDtypeStruct
    lines, columns = problem.sequences * plan.queries.chunks, columns_of(plan)
    outs, row_max, row_sum = partials
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=(
            shape((lines * ROWS, problem.v_head_dim), problem.dtype),
            shape((lines, ROWS), jnp.float32),
        ),
        scratch_types=(CombineSmem(row_gathers.table_scratch(plan)),),
        grid=(problem.v_head_dim // columns, lines),
        grid_names=("column", "line"),
        compiler_params=mosaic.without_barriers(by_lane=True),
        kernel_name="combine_latent",
    )
    outs = outs.reshape(-1, ROWS * columns)
    arrays = (refs.lengths, refs.layer, refs.sinks, outs, row_max, row_sum, refs.lost)
    return kernel(CombineRefs(*arrays))
