"""dQ of the portable backward by a kernel of its own, or read out of where another kernel added it
up; and the gradient of a bias.

dQ has the forward's grid and orientation: a block owns 64 query rows (or 128) and walks over the
key tiles that meet them; the next K and V arrive under this tile's arithmetic, where there is room
for them. Nothing is added up in global memory: the same bits each time.

A bias's gradient is dS, summed over what the bias was broadcast over: the walk of
`dbias`, by tiles of 64 queries by `block_kv` keys.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._problem import AttentionInputs, AttentionProblem
from pallas_attn.kernels.attention import plan as attention_plan
from pallas_attn.kernels.attention import score_mod, sm80_column_stream, tma_operands
from pallas_attn.kernels.attention.score_mod import Place
from pallas_attn.kernels.attention.sm80_common import WholePlan, copy_async, fits
from pallas_attn.kernels.flash_bwd import dbias, sm90_dq
from pallas_attn.kernels.flash_bwd.dbias import Step, Walk
from pallas_attn.kernels.flash_bwd.plan import Refs
from pallas_attn.kernels.flash_fwd import sm80 as flash_fwd_sm80
from pallas_attn.kernels.flash_fwd import tile_scheduler
from pallas_attn.kernels.lang import mosaic, threads
from pallas_attn.kernels.mma import epilogue, global_accumulate, mma_2x2, mma_sync
from pallas_attn.kernels.mma.mma_2x2 import WarpGrid

ROWS = attention_plan.ROWS
STREAMED = 32  # columns at a time, where nothing else has room


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
    parts, keys = plan.terms, plan.config.stages * plan.config.block_kv

    def buffer(rows, width):
        return plgpu.SMEM((rows, mma_sync.pitch(parts * width)), plan.operand_dtype)

    q, do = (buffer(plan.tile_rows, width) for width in (plan.k_width, plan.v_width))
    return Smem(q, do, buffer(keys, plan.k_width), buffer(keys, plan.v_width))


class Cell(NamedTuple):
    """Where a tile of scores stands."""

    batch: Any
    head: Any
    row: Any
    q_offset: Any
    q_len: Any  # rows from here on are not there
    kv_len: Any


def _copies(plan: WholePlan, refs: Refs, smem: Smem, cell: Cell, key: Any, slot: Any) -> Any:
    """(of q and dO, of K and V from `key` on); `key` is at or past the last: zeros."""
    parts, block = plan.terms, plan.config.block_kv
    kv_head = lax.div(cell.head, jnp.int32(plan.problem.group))
    rows, keys = [], []
    for name, width in (("q", plan.k_width), ("do", plan.v_width)):
        ref = getattr(refs, name)
        at = (cell.batch, cell.head, cell.row, cell.q_len - cell.row, jnp.int32(0))
        rows.append(
            ((getattr(smem, name), ref), at, (plan.tile_rows, ref.shape, parts * width, True))
        )
    for name, width in (("k", plan.k_width), ("v", plan.v_width)):
        ref = getattr(refs, name)
        at = (cell.batch, kv_head, key, cell.kv_len - key, slot * block)
        keys.append(((getattr(smem, name), ref), at, (block, ref.shape, parts * width, False)))
    return rows, keys


def _stream(
    plan: WholePlan, refs: Refs, smem: Any, cell: Cell, with_dq: bool
) -> sm80_column_stream.Stream:
    """The operands by some columns at a time; a step is said by its first key."""
    kv_head = lax.div(cell.head, jnp.int32(plan.problem.group))

    def rows_of(name, key):
        if name in ("q", "do"):
            return sm80_column_stream.Rows(cell.batch, cell.head, cell.row, cell.q_len - cell.row)
        return sm80_column_stream.Rows(cell.batch, kv_head, key, cell.kv_len - key)

    products = [
        sm80_column_stream.Product("q", "k", plan.k_chunks),
        sm80_column_stream.Product("do", "v", plan.v_chunks),
    ]
    if with_dq:
        products.append(sm80_column_stream.Product(None, "k", plan.k_chunks))
    return sm80_column_stream.Stream(plan, smem, refs, products, rows_of)


def _products(plan: WholePlan, smem: Smem, first: Any) -> Any:
    """S of a tile in shared memory, then dP; `first`: the row of shared memory of its first key."""
    parts, shape = plan.terms, (plan.tile_rows, plan.config.block_kv)
    none = jnp.int32(0)
    yield mma_sync.scores((smem.q, none), (smem.k, first), (*shape, plan.k_width), parts)
    yield mma_sync.scores((smem.do, none), (smem.v, first), (*shape, plan.v_width), parts)


def _ds(plan: WholePlan, refs: Refs, products: Any, cell: Cell, at: Any) -> Any:
    """(dS of a tile, float32; softcap's slope or None). `products`: S, then dP, each made when it
    is wanted; at is (key, masked, lse, delta).
    """
    key, masked, lse, delta = at
    place = Place(cell.batch, cell.head, cell.row, key, cell.q_offset, cell.kv_len, 0)
    p, slope = score_mod.probabilities(plan, refs, place, next(products), lse, masked)
    return p * (next(products) - mosaic.broadcast_rows(delta, p.shape)), slope


def _numbers(plan: WholePlan, refs: Refs, cell: Cell) -> list[Any]:
    rows = pl.ds(cell.row, plan.tile_rows)
    return [
        mosaic.load(ref.at[cell.batch, cell.head, rows], mosaic.ROW)
        for ref in (refs.lse, refs.delta)
    ]


def _kernel(refs: Refs, dq_ref: Any, smem: Smem, *, plan: WholePlan) -> None:
    tile = tile_scheduler.tile_of(plan, refs, refs.dealt[lax.axis_index("cta"), 1])
    length = jnp.int32(plan.problem.q_len)
    q_len = length if tile.q_len is None else tile.q_len
    cell = Cell(tile.batch, tile.head, tile.row, tile.q_offset, q_len, tile.kv_len)
    span, numbers = sm90_dq.span_of(plan, refs, tile), _numbers(plan, refs, cell)

    def ds_of(t, products):
        masked = (t < span.full_lo) | (t >= span.full_hi)
        at = (t * plan.config.block_kv, masked, *numbers)
        ds, slope = _ds(plan, refs, products, cell, at)
        ds = ds if slope is None else ds * slope
        return mma_sync.parts_of(ds, plan.terms, plan.operand_dtype)

    walk = _walk_of_streams if plan.config.columns else _walk
    dq = walk(plan, refs, smem, (cell, span), ds_of)
    dq = jax.tree.map(lambda x: x * plan.problem.scale, dq)
    at = (tile.batch, tile.head, tile.row, length - tile.row)
    if plan.config.columns:
        sm80_column_stream.write(dq, dq_ref, at)
    else:
        mma_sync.write(dq.astype(dq_ref.dtype), dq_ref, at)


def _walk(plan: WholePlan, refs: Refs, smem: Smem, where: Any, ds_of: Any) -> Any:
    (cell, span), block = where, plan.config.block_kv
    copies = functools.partial(_copies, plan, refs, smem, cell)
    rows, keys = copies(span.lo * block, jnp.int32(0))
    ahead = plan.config.stages > 1
    copy_async(*rows, *(keys if ahead else ()), pending=None)

    def step(t, dq):
        slot = (t - span.lo) & 1 if ahead else jnp.int32(0)
        following = jnp.where(t + 1 < span.hi, (t + 1) * block, cell.kv_len)
        if ahead:
            copy_async(*copies(following, 1 - slot)[1], pending=0)
        else:
            copy_async(*copies(t * block, slot)[1], pending=None, sync=True)
            copy_async(pending=0)
        ds = ds_of(t, _products(plan, smem, slot * block))
        return mma_sync.matmul_add(dq, ds, smem.k, slot * block, plan.k_width)

    nothing = mosaic.filled((plan.tile_rows, plan.k_width), 0.0)
    return lax.fori_loop(span.lo, span.hi, step, nothing)


def _walk_of_streams(plan: WholePlan, refs: Refs, smem: Any, where: Any, ds_of: Any) -> Any:
    (cell, span), block = where, plan.config.block_kv
    stream = _stream(plan, refs, smem, cell, True)
    stream.begin(span.lo * block)

    def step(t, dq):
        following = jnp.where(t + 1 < span.hi, (t + 1) * block, cell.kv_len)
        walk = stream.step(t - span.lo, t * block, following)
        ds = ds_of(t, (walk.scores() for _ in range(2)))
        return walk.weigh(dq, ds)

    return lax.fori_loop(span.lo, span.hi, step, sm80_column_stream.zeros(plan, plan.k_chunks))


def dq_of(plan: WholePlan, inputs: AttentionInputs, refs: Refs) -> Any:
    """dq, of the operands of a kernel over key tiles."""
    problem = plan.problem
    sizes = (problem.batch, problem.q_len, problem.q_heads, problem.head_dim)
    if columns := plan.config.columns:
        sizes = (*sizes[:2], problem.q_heads * plan.k_chunks, columns)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=jax.ShapeDtypeStruct(sizes, problem.dtype),
        scratch_types=(scratch(plan),),
        grid=(plan.ctas,),
        grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="flash_bwd_dq_sm80",
    )
    return plan.whole_rows(kernel(_by_rows(plan, inputs, refs)), problem.head_dim)


def _by_rows(plan: WholePlan, inputs: AttentionInputs, refs: Refs) -> Refs:
    """The operands of a kernel over key tiles, made those of one over query tiles."""
    problem, block = plan.problem, plan.config.block_kv
    rows, keys = plan.padded_rows, tma_operands.round_up(problem.kv_len, block)
    fields: dict[str, Any] = {"dealt": jnp.asarray(tile_scheduler.schedule(plan)), "dq": None}
    fields |= tma_operands.over_scores(inputs, rows, keys) | tma_operands.segment_ids(
        inputs, rows, keys
    )
    if plan.has("q_segment_ids"):
        ids = fields["q_segment_ids"], fields["kv_segment_ids"]
        fields["segment_spans"] = attention_plan.segment_spans(*ids, plan.tile_rows, block)
    return refs._replace(**fields)


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
    """dq from what a kernel over key tiles has added up."""
    problem = plan.problem
    sizes = (problem.batch, problem.q_len, problem.q_heads, problem.head_dim)
    stage: tuple[Any, ...] = ()
    if jnp.dtype(problem.dtype).itemsize == 2:
        width = mma_sync.pitch(plan.k_width // plan.dq_parts)
        stage = (plgpu.SMEM((plan.config.block_q, width), problem.dtype),)
    kernel = plgpu.kernel(
        functools.partial(_collect, plan=plan),
        out_type=jax.ShapeDtypeStruct(sizes, problem.dtype),
        scratch_types=stage,
        grid=(dq.shape[0],),
        grid_names=("part",),
        kernel_name="flash_bwd_dq_collect_sm80",
    )
    return kernel(dq)


def _collect(dq: Any, out: Any, *stage: Any, plan: Any) -> None:
    """A part of a tile of dq."""
    problem, parts, block = plan.problem, plan.dq_parts, plan.config.block_q
    number = lax.axis_index("part")
    tile, part = lax.div(number, jnp.int32(parts)), lax.rem(number, jnp.int32(parts))
    rows = global_accumulate.load(dq, number, (block, plan.k_width // parts), plan.vectors)
    head, t = lax.div(tile, jnp.int32(plan.q_tiles)), lax.rem(tile, jnp.int32(plan.q_tiles))
    heads = jnp.int32(problem.q_heads)
    batch, head = lax.div(head, heads), lax.rem(head, heads)
    at = (batch, head, t * block, problem.q_len - t * block)
    rows = (rows * problem.scale).astype(out.dtype)
    stand = WarpGrid(2, parts, part)
    if stage:
        epilogue.write(rows, out, at, (stage[0], 0), stand)
    else:
        mma_2x2.write(rows, out, at, stand)


# ---- the gradient of a bias ---------------------------------------------------------------------


def _bias_kernel(refs: Refs, out: Any, smem: Smem, *, plan: WholePlan, walk: Walk) -> None:
    number, part = lax.axis_index("cell"), lax.axis_index("part")
    shape = (ROWS, plan.config.block_kv)

    def one(i, acc):
        step = dbias.step_of(plan, refs, walk, number, part * walk.steps + i)
        return lax.cond(step.live, lambda: acc + _of_step(plan, refs, smem, step), lambda: acc)

    acc = lax.fori_loop(0, walk.steps, one, mosaic.filled(shape, 0.0))
    batch, head, row, key = dbias.corner_of(walk, number, shape)
    mosaic.store(out.at[part, batch, head, pl.ds(row, ROWS), pl.ds(key, shape[1])], acc)


def _of_step(plan: WholePlan, refs: Refs, smem: Smem, step: Step) -> Any:
    q_len = jnp.int32(0) + step.q_len
    cell = Cell(step.batch, step.head, step.row, step.q_offset, q_len, step.kv_len)
    if plan.config.columns:
        stream = _stream(plan, refs, smem, cell, False)
        stream.begin(step.key, sync=True)
        walk = stream.step(jnp.int32(0), step.key, None)
        products: Any = (walk.scores() for _ in range(2))
    else:
        rows, keys = _copies(plan, refs, smem, cell, step.key, jnp.int32(0))
        copy_async(*rows, *keys, pending=None, sync=True)
        copy_async(pending=0)
        products = _products(plan, smem, jnp.int32(0))
    at = (step.key, True, *_numbers(plan, refs, cell))
    return _ds(plan, refs, products, cell, at)[0]


def _bias_plan(problem: AttentionProblem, config: Any) -> WholePlan:
    """By the largest tiles that there is room for: a kernel that adds dQ up asks for less."""

    def of(keys: int, columns: int) -> WholePlan:
        return WholePlan(problem, flash_fwd_sm80.Config(1, keys, 1, columns=columns))

    choices = [of(config.dq_block_kv, config.columns), of(32, 0), of(16, 0), of(32, STREAMED)]
    return next(one for one in choices if fits(problem, _bytes_of, one))


def _bytes_of(problem: AttentionProblem, plan: WholePlan) -> int:
    del problem
    return mosaic.bytes_of(scratch(plan))


def dbias_of(problem: AttentionProblem, config: Any, inputs: AttentionInputs, refs: Refs) -> Any:
    """The cotangent of inputs.bias."""
    plan = _bias_plan(problem, config)
    walk = dbias.walk_of(plan)
    q_tiles, key_tiles = walk.cells[2:]
    sizes = (walk.parts, *walk.cells[:2], q_tiles * ROWS, key_tiles * plan.config.block_kv)
    kernel = plgpu.kernel(
        functools.partial(_bias_kernel, plan=plan, walk=walk),
        out_type=jax.ShapeDtypeStruct(sizes, jnp.float32),
        scratch_types=(scratch(plan),),
        grid=(math.prod(walk.cells), walk.parts),
        grid_names=("cell", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="flash_bwd_dbias_sm80",
    )
    return dbias.folded(kernel(_by_rows(plan, inputs, refs)), inputs.bias)
