"""dQ of the portable backward by a kernel of its own, or read out of where another kernel added it
up; and the gradient of a bias.

dQ has the forward's grid and orientation: a block owns 64 query rows (or 128) and walks over the kv
tiles that meet them; the next K and V are loaded under this tile's arithmetic, where there is room
for them. Nothing is added up in global memory: the same bits each time.

A bias's gradient is dS, summed over what the bias was broadcast over: the walk of `dbias`, by tiles
of 64 queries by `block_kv` keys.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.kernels.attention import plan as attention_plan
from pallas_attn.kernels.attention import score_mod, sm80_column_stream
from pallas_attn.kernels.attention.plan import Context, Span
from pallas_attn.kernels.attention.score_mod import Place
from pallas_attn.kernels.attention.sm80_common import Copy, WholePlan, copy_async, fits
from pallas_attn.kernels.flash_bwd import dbias, sm90_dq
from pallas_attn.kernels.flash_bwd.dbias import Step, Walk
from pallas_attn.kernels.flash_bwd.plan import Refs, RowStatistics
from pallas_attn.kernels.flash_fwd import sm80 as flash_fwd_sm80
from pallas_attn.kernels.flash_fwd import tile_scheduler
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.mma import epilogue, global_accumulate, mma_2x2, mma_sync
from pallas_attn.kernels.mma.mma_2x2 import WarpGrid
from pallas_attn.masks import Mask

ROWS = attention_plan.ROWS
FEWEST_COLUMNS = 32  # at a time, where nothing else has room


class Smem(NamedTuple):
    q: Any  # [rows, ..]
    do: Any
    k: Any  # [2 * block_kv, ..]
    v: Any


def plan_of(problem: AttentionProblem, config: Any) -> WholePlan:
    by_rows = flash_fwd_sm80.Config(
        config.dq_row_blocks, config.dq_block_kv, config.dq_stages, columns=config.columns
    )
    return WholePlan(problem, by_rows)


def scratch(plan: WholePlan) -> Smem | sm80_column_stream.Smem:
    if plan.config.columns:
        return sm80_column_stream.scratch(plan, plan.config.block_kv)
    terms, keys = plan.terms, plan.config.stages * plan.config.block_kv

    def buffer(rows, width):
        return plgpu.SMEM((rows, mma_sync.pitch(terms * width)), plan.operand_dtype)

    q, do = (buffer(plan.tile_rows, width) for width in (plan.k_width, plan.v_width))
    return Smem(q, do, buffer(keys, plan.k_width), buffer(keys, plan.v_width))


class Rows(NamedTuple):
    """The query rows of a tile of scores."""

    batch: Any
    head: Any
    row: Any
    q_offset: Any
    q_len: Any  # rows from here on are not there
    kv_len: Any
    mask: Mask
    kv_tile: Callable[[Any], Any] = lambda t: t  # that is number t of a span

    def key(self, t: Any, block: int) -> Any:
        """The first of kv tile number t."""
        return self.kv_tile(t) * block


class Tile(NamedTuple):
    """The keys of a tile of scores, and what its rows need."""

    key: Any  # the first
    needs_mask: Any
    lse: Any
    delta: Any


def _copies_of_rows(ctx: Context, rows: Rows) -> list[Copy]:
    """Of q and dO."""
    plan, refs, smem = ctx
    copies = []
    for name, width in (("q", plan.k_width), ("do", plan.v_width)):
        ref, columns = getattr(refs, name), plan.terms * width
        at = (rows.batch, rows.head, rows.row, rows.q_len - rows.row, jnp.int32(0))
        shape = (plan.tile_rows, ref.shape, columns, True)
        copies.append(Copy((getattr(smem, name), ref), at, shape))
    return copies


def _copies_of_keys(ctx: Context, rows: Rows, key: Any, slot: Any) -> list[Copy]:
    """Of K and V from `key` on; at or past the last key, zeros."""
    plan, refs, smem = ctx
    block, kv_head = plan.config.block_kv, lax.div(rows.head, jnp.int32(plan.problem.group))
    copies = []
    for name, width in (("k", plan.k_width), ("v", plan.v_width)):
        ref, columns = getattr(refs, name), plan.terms * width
        at = (rows.batch, kv_head, key, rows.kv_len - key, slot * block)
        copies.append(Copy((getattr(smem, name), ref), at, (block, ref.shape, columns, False)))
    return copies


def _stream(ctx: Context, rows: Rows, with_dq: bool) -> sm80_column_stream.Stream:
    """The operands by some columns at a time; a step is said by its first key."""
    plan = ctx.plan
    kv_head = lax.div(rows.head, jnp.int32(plan.problem.group))

    def rows_of(name, key):
        if name in ("q", "do"):
            return sm80_column_stream.Rows(rows.batch, rows.head, rows.row, rows.q_len - rows.row)
        return sm80_column_stream.Rows(rows.batch, kv_head, key, rows.kv_len - key)

    products = [
        sm80_column_stream.Product("q", "k", plan.k_chunks),
        sm80_column_stream.Product("do", "v", plan.v_chunks),
    ]
    if with_dq:
        products.append(sm80_column_stream.Product(None, "k", plan.k_chunks))
    return sm80_column_stream.Stream(ctx, products, rows_of)


def _products(ctx: Context, first: Any) -> Any:
    """S of a tile in shared memory, then dP; `first`: the row of shared memory of its first key."""
    plan, _, smem = ctx
    terms, shape = plan.terms, (plan.tile_rows, plan.config.block_kv)
    none = jnp.int32(0)
    yield mma_sync.scores((smem.q, none), (smem.k, first), (*shape, plan.k_width), terms)
    yield mma_sync.scores((smem.do, none), (smem.v, first), (*shape, plan.v_width), terms)


def _ds(ctx: Context, products: Any, rows: Rows, tile: Tile) -> tuple[Any, Any]:
    """(dS of a tile, float32; softcap's slope or None). `products`: S, then dP, each made when it
    is wanted.
    """
    plan, refs, _ = ctx
    where = (rows.batch, rows.head, rows.row, tile.key, rows.q_offset, rows.kv_len, rows.mask)
    place = Place(*where, q_axis=0)
    s, masked = next(products), tile.needs_mask
    p, slope = score_mod.probabilities(ctx, place, s, tile.lse, masked)
    return p * (next(products) - mosaic.broadcast_rows(tile.delta, p.shape)), slope


def _row_statistics(ctx: Context, rows: Rows) -> RowStatistics:
    where = pl.ds(rows.row, ctx.plan.tile_rows)
    found = [
        mosaic.load(ref.at[rows.batch, rows.head, where], mosaic.ROW)
        for ref in (ctx.refs.lse, ctx.refs.delta)
    ]
    return RowStatistics(*found)


def _kernel(refs: Refs, dq_ref: Any, smem: Smem, *, plan: WholePlan) -> None:
    ctx = Context(plan, refs, smem)
    tile = tile_scheduler.tile_of(ctx, refs.schedule[lax.axis_index("block"), 1])
    length = jnp.int32(plan.problem.q_len)
    q_len = length if tile.q_len is None else tile.q_len
    kv_tile = functools.partial(sm90_dq.kv_tile_of, ctx, tile)
    where = (tile.batch, tile.head, tile.row, tile.q_offset, q_len, tile.kv_len, tile.mask)
    rows = Rows(*where, kv_tile)
    span, stats = sm90_dq.span_of(ctx, tile), _row_statistics(ctx, rows)

    def ds_of(t, products):
        masked = (t < span.full_lo) | (t >= span.full_hi)
        tile = Tile(rows.key(t, plan.config.block_kv), masked, *stats)
        ds, slope = _ds(ctx, products, rows, tile)
        ds = ds if slope is None else ds * slope
        return mma_sync.terms_of(ds, plan.terms, plan.operand_dtype)

    mainloop = _mainloop_by_columns if plan.config.columns else _mainloop
    dq = mainloop(ctx, rows, span, ds_of)
    dq = jax.tree.map(lambda x: x * plan.problem.scale, dq)
    at = (tile.batch, tile.head, tile.row, length - tile.row)
    if plan.config.columns:
        sm80_column_stream.write(dq, dq_ref, at)
    else:
        mma_sync.write(dq.astype(dq_ref.dtype), dq_ref, at)


def _mainloop(ctx: Context, rows: Rows, span: Span, ds_of: Callable[..., Any]) -> Any:
    """dQ of a block's rows; ds_of(t, products) gives dS of kv tile t."""
    plan, _, smem = ctx
    block, ahead = plan.config.block_kv, plan.config.stages > 1
    copies = functools.partial(_copies_of_keys, ctx, rows)
    first = [
        *_copies_of_rows(ctx, rows),
        *(copies(rows.key(span.lo, block), jnp.int32(0)) if ahead else ()),
    ]
    copy_async(*first, pending=None)

    def step(t, dq):
        slot = (t - span.lo) & 1 if ahead else jnp.int32(0)
        following = jnp.where(t + 1 < span.hi, rows.key(t + 1, block), rows.kv_len)
        if ahead:
            copy_async(*copies(following, 1 - slot), pending=0)
        else:
            copy_async(*copies(rows.key(t, block), slot), pending=None, sync=True)
            copy_async(pending=0)
        ds = ds_of(t, _products(ctx, slot * block))
        return mma_sync.matmul_add(dq, ds, smem.k, slot * block, plan.k_width)

    nothing = mosaic.filled((plan.tile_rows, plan.k_width), 0.0)
    return lax.fori_loop(span.lo, span.hi, step, nothing)


def _mainloop_by_columns(ctx: Context, rows: Rows, span: Span, ds_of: Callable[..., Any]) -> Any:
    """`_mainloop`, where operands come by some columns at a time."""
    plan, block = ctx.plan, ctx.plan.config.block_kv
    stream = _stream(ctx, rows, True)
    stream.begin(rows.key(span.lo, block))

    def step(t, dq):
        following = jnp.where(t + 1 < span.hi, rows.key(t + 1, block), rows.kv_len)
        walk = stream.step(t - span.lo, rows.key(t, block), following)
        ds = ds_of(t, (walk.scores() for _ in range(2)))
        return walk.weigh(dq, ds)

    return lax.fori_loop(span.lo, span.hi, step, sm80_column_stream.zeros(plan, plan.k_chunks))


def dq_of(plan: WholePlan, inputs: AttentionInputs, refs: Refs) -> Any:
    """dq, of the operands of a kernel over kv tiles."""
    problem = plan.problem
    sizes = (problem.batch, problem.q_len, problem.q_heads, problem.head_dim)
    if columns := plan.config.columns:
        sizes = (*sizes[:2], problem.q_heads * plan.k_chunks, columns)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=jax.ShapeDtypeStruct(sizes, problem.dtype),
        scratch_types=(scratch(plan),),
        grid=(plan.grid,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="flash_bwd_dq_sm80",
    )
    return plan.whole_rows(kernel(sm90_dq.by_rows(plan, inputs, refs)), problem.head_dim)


# ---- where it was added up ----------------------------------------------------------------------


CLEARED = 16 * mosaic.THREADS  # words of 16 bytes, by a block


def cleared(sizes: tuple[int, int], after: Any) -> Any:
    """Zeros, float32; XLA's own take longer. Not before `after` is there: the interpreter simulates
    one kernel at a time.
    """
    words = math.prod(sizes) // 4
    kernel = plgpu.kernel(
        functools.partial(_clear, words=words),
        out_type=jax.ShapeDtypeStruct(sizes, jnp.float32),
        grid=(pl.cdiv(words, CLEARED),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="flash_bwd_dq_clear_sm80",
    )
    return kernel(after)


def _clear(after: Any, out: Any, *, words: int) -> None:
    del after

    def program(thread, refs, scalars):
        first = thread.wide(scalars[0]) * CLEARED + thread.wide(thread.index)
        for start in range(0, CLEARED, mosaic.THREADS):
            zeros = [thread.number(0.0)] * 4
            thread.store_floats(refs[0], first + start, zeros, first + start < words)

    threads.each_thread(program, (out,), (lax.axis_index("block"),))


def collected(plan: Any, dq: Any) -> Any:
    """dq from what a kernel over kv tiles added up."""
    problem = plan.problem
    sizes = (problem.batch, problem.q_len, problem.q_heads, problem.head_dim)
    stage: tuple[Any, ...] = ()
    if jnp.dtype(problem.dtype).itemsize == 2:
        width = mma_sync.pitch(plan.k_width // plan.dq_slices)
        stage = (plgpu.SMEM((plan.config.block_q, width), problem.dtype),)
    kernel = plgpu.kernel(
        functools.partial(_collect, plan=plan),
        out_type=jax.ShapeDtypeStruct(sizes, problem.dtype),
        scratch_types=stage,
        grid=(dq.shape[0],),
        grid_names=("slice",),
        kernel_name="flash_bwd_dq_collect_sm80",
    )
    return kernel(dq)


def _collect(dq: Any, out: Any, *stage: Any, plan: Any) -> None:
    """A slice of a tile of dq."""
    problem, slices, block = plan.problem, plan.dq_slices, plan.config.block_q
    number = lax.axis_index("slice")
    tile, own = lax.div(number, jnp.int32(slices)), lax.rem(number, jnp.int32(slices))
    rows = global_accumulate.load(dq, number, (block, plan.k_width // slices), plan.vectors)
    head, t = lax.div(tile, jnp.int32(plan.q_tiles)), lax.rem(tile, jnp.int32(plan.q_tiles))
    heads = jnp.int32(problem.q_heads)
    batch, head = lax.div(head, heads), lax.rem(head, heads)
    at = (batch, head, t * block, problem.q_len - t * block)
    rows = (rows * problem.scale).astype(out.dtype)
    stand = WarpGrid(2, slices, own)
    if stage:
        epilogue.write(rows, out, at, (stage[0], 0), stand)
    else:
        mma_2x2.write(rows, out, at, stand)


# ---- the gradient of a bias ---------------------------------------------------------------------


def _bias_kernel(refs: Refs, out: Any, smem: Smem, *, plan: WholePlan, walk: Walk) -> None:
    ctx = Context(plan, refs, smem)
    block = dbias.Block(lax.axis_index("tile"), lax.axis_index("chunk"))
    shape = (ROWS, plan.config.block_kv)

    def one(i, acc):
        step = dbias.step_of(ctx, walk, block.bias_tile, block.chunk * walk.steps + i)
        return lax.cond(step.live, lambda: acc + _ds_of_step(ctx, step), lambda: acc)

    acc = lax.fori_loop(0, walk.steps, one, mosaic.filled(shape, 0.0))
    mosaic.store(out.at[dbias.store_place(walk, block, shape)], acc)


def _ds_of_step(ctx: Context, step: Step) -> Any:
    plan, q_len = ctx.plan, jnp.int32(0) + step.q_len
    rows = Rows(step.batch, step.head, step.row, step.q_offset, q_len, step.kv_len, step.mask)
    if plan.config.columns:
        stream = _stream(ctx, rows, False)
        stream.begin(step.key, sync=True)
        walk = stream.step(jnp.int32(0), step.key, None)
        products: Any = (walk.scores() for _ in range(2))
    else:
        keys = _copies_of_keys(ctx, rows, step.key, jnp.int32(0))
        copy_async(*_copies_of_rows(ctx, rows), *keys, pending=None, sync=True)
        copy_async(pending=0)
        products = _products(ctx, jnp.int32(0))
    return _ds(ctx, products, rows, Tile(step.key, True, *_row_statistics(ctx, rows)))[0]


def _bias_plan(problem: AttentionProblem, config: Any) -> WholePlan:
    """By the largest tiles that there is room for: a kernel that adds dQ up asks for less."""

    def of(keys: int, columns: int) -> WholePlan:
        return WholePlan(problem, flash_fwd_sm80.Config(1, keys, 1, columns=columns))

    choices = [of(config.dq_block_kv, config.columns), of(32, 0), of(16, 0), of(32, FEWEST_COLUMNS)]
    return next(one for one in choices if fits(problem, _bytes_of, one))


def _bytes_of(problem: AttentionProblem, plan: WholePlan) -> int:
    del problem
    return mosaic.bytes_of(scratch(plan))


def dbias_of(problem: AttentionProblem, config: Any, inputs: AttentionInputs, refs: Refs) -> Any:
    """The cotangent of inputs.bias."""
    plan = _bias_plan(problem, config)
    walk = dbias.walk_of(plan)
    kernel = plgpu.kernel(
        functools.partial(_bias_kernel, plan=plan, walk=walk),
        out_type=jax.ShapeDtypeStruct(dbias.sums_shape(plan, walk), jnp.float32),
        scratch_types=(scratch(plan),),
        **mosaic.grid_of(tile=math.prod(walk.bias_tiles), chunk=walk.chunks),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="flash_bwd_dbias_sm80",
    )
    return dbias.folded(kernel(sm90_dq.by_rows(plan, inputs, refs)), inputs.bias)
