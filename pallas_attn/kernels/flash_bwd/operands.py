"""Residuals of a backward pass, and the arrays of its kernels over keys."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionInputs, AttentionProblem, gradients_of_sinks
from pallas_attn.kernels.attention import (
    claims,
    functions,
    key_masks,
    mask_bits,
    segment_spans,
    softmax,
    tile_scheduler,
    tma_operands,
)
from pallas_attn.kernels.attention.tiles import KernelContext
from pallas_attn.kernels.flash_bwd import aux_sums, key_tiles, work_order
from pallas_attn.kernels.flash_bwd import float32 as bwd_float32
from pallas_attn.kernels.flash_bwd.plan import KeyPlan
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import GmemRef, Operand, SmemRef
from pallas_attn.kernels.mma import wgmma_float32


class Residuals(NamedTuple):
    """The inputs of a forward pass, its results, and the cotangents of these."""

    inputs: AttentionInputs
    out: jax.Array
    lse: jax.Array
    d_out: jax.Array
    d_lse: jax.Array


class RowStatistics(NamedTuple):
    """Two numbers a query row, float32[B, N, rows]: P = exp(S - lse) and dS = P (dP - delta)."""

    lse: jax.Array  # log2 units, or natural ones for exact float32; inf for a row without a key
    delta: jax.Array  # rowsum(dO * O) - dLSE; 0 where lse is inf


class BackwardRefs(NamedTuple):
    """Global memory. None: not in this problem, or not of this kernel."""

    q: GmemRef
    k: GmemRef
    v: GmemRef
    do: GmemRef
    out: GmemRef = None  # read by a kernel that makes row statistics itself; d_lse too
    lse: GmemRef = None  # [B, N, padded rows]: see `RowStatistics`
    d_lse: GmemRef = None
    delta: GmemRef = None  # [B, N, padded rows]
    q_edge: GmemRef = None  # [B, block_q, N, H]: the query tile that q_lengths cuts, 0 past it
    do_edge: GmemRef = None
    k_edge: GmemRef = None  # [B, block_kv, K, H]: the kv tile that kv_lengths cuts
    v_edge: GmemRef = None
    q_offset: GmemRef = None
    q_lengths: GmemRef = None
    kv_lengths: GmemRef = None
    mask_left: GmemRef = None  # int32[B], where the bound arrives at run time
    mask_right: GmemRef = None
    q_segment_ids: GmemRef = None
    kv_segment_ids: GmemRef = None
    segment_spans: GmemRef = None  # int32[B, 4, kv_tiles]: a Span's fields, in query tiles
    bias: GmemRef = None
    mask_array: GmemRef = None
    schedule: GmemRef = None  # int32[blocks, n]: see `work_order.schedule`
    dq: GmemRef = None  # float32, added to, in the kernel's own layout; or dq: see `dq_sum.Written`
    aux_sums: GmemRef = None  # float32[reads, B, K, padded keys, n], written: `aux_sums.zero_array`
    q_positions: GmemRef = None
    units: GmemRef = None  # float32[6, B, K]: see `bwd_float32.Units`; delta is in those of dS
    mask_aux: Any = ()  # arrays of functions of positions: `functions.operands`
    score_aux: Any = ()
    tiles: GmemRef = None  # see `tile_lists.tiles`
    counter: GmemRef = None  # int32[1], written: see `attention.claims`
    turns: GmemRef = None  # int32[n], written: see `turns.counters`
    key_tiles: GmemRef = None  # int32[B|1, N|1, kv tiles]: see `key_masks.codes`
    key_spans: GmemRef = None  # int32[B|1, N|1, 4]: see `key_masks.spans`
    mask_bits: GmemRef = None  # mask_array of queries and keys: see `mask_bits.packed`


class KeyGradients(NamedTuple):
    """dK and dV of a work tile, or of all: values, accumulators or arrays."""

    dk: Any
    dv: Any


class Gradients(NamedTuple):
    """Accumulators or arrays."""

    dq: Any
    dk: Any
    dv: Any


# ---- before any kernel, by XLA ------------------------------------------------------------------


def row_statistics(natural: bool, rows: int, residuals: Residuals) -> RowStatistics:
    """Statistics of `rows` rows, more than there are queries. A gradient that arrives through the
    lse adds itself to the gradients of all logits of a row alike, by delta. `natural`: lse is in
    natural units.
    """
    inputs, out, lse, d_out, d_lse = residuals
    q_len, unit = inputs.q.shape[1], 1.0 if natural else softmax.to_log2(1.0)
    delta = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1).swapaxes(1, 2) - d_lse
    dead = lse == -jnp.inf
    if inputs.q_lengths is not None:
        row = jnp.arange(q_len, dtype=jnp.int32)
        dead |= row[None, None] >= inputs.q_lengths[:, None, None]
    pad = ((0, 0), (0, 0), (0, rows - q_len))
    lse = jnp.pad(jnp.where(dead, jnp.inf, lse * unit), pad, constant_values=jnp.inf)
    return RowStatistics(lse, jnp.pad(jnp.where(dead, 0.0, delta), pad))


def cotangents(
    residuals: Residuals, stats: RowStatistics, grads: Gradients, others: dict[str, Any]
) -> AttentionInputs:
    """The cotangents of inputs: dk and dv without what kernels add, and the gradients of sinks and
    of `others`.
    """
    (dq, dk, dv), inputs = grads, residuals.inputs
    rows, dim, v_dim = inputs.k.shape[1], inputs.k.shape[3], inputs.v.shape[3]
    dk, dv = dk[:, :rows, :, :dim], dv[:, :rows, :, :v_dim]
    if inputs.sinks is not None:
        others = others | {"sinks": dsinks(residuals, stats)}
    return AttentionInputs(q=dq, k=dk, v=dv, **others)


def dsinks(residuals: Residuals, stats: RowStatistics) -> jax.Array:
    """The gradient of the sinks."""
    sinks, lse = jnp.asarray(residuals.inputs.sinks), residuals.lse
    delta = stats.delta[:, :, : lse.shape[2]]
    return gradients_of_sinks(sinks, lse, delta).astype(sinks.dtype)


# ---- one launch for all three ------------------------------------------------------------------


def launched(
    body: Callable[..., None],
    name: str,
    refs: BackwardRefs,
    scratch: SmemRef,
    size: tuple[int, int],
) -> Gradients:
    """dq, dk and dv in the sizes of q, k and v, by a launch of `body`. `size`: blocks, and the
    warpgroups of each.
    """
    outs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in refs[:3])
    return Gradients(*mosaic.persistent_kernel(body, name, outs, scratch, size)(refs))


# ---- arrays -------------------------------------------------------------------------------------


def for_tma(plan: KeyPlan, residuals: Residuals, stats: RowStatistics) -> BackwardRefs:
    """The arrays of a Hopper kernel over keys, but for dq. Copied where `tma_operands` says that
    TMA cannot read them; a bias transposed, unless tiles of it are read across (`over_tiles`).
    """
    problem, tiling, form, inputs = plan.problem, plan.tiling, plan.format, residuals.inputs
    fields: dict[str, Any] = stats._asdict()
    powers: dict[str, Any] = {}
    if problem.dtype == "float32":
        powers = bwd_float32.powers_of(problem, inputs, residuals.d_out, stats.delta)
        fields["units"] = bwd_float32.units(problem, powers)
        by = wgmma_float32.inverse(jnp.repeat(powers["ds"], problem.group, axis=1))
        fields["delta"] = stats.delta * by[:, :, None]
    for name, x, rows_as in (
        ("q", inputs.q, form.qk),
        ("k", inputs.k, form.qk),
        ("v", inputs.v, form.v),
        ("do", residuals.d_out, form.v),
    ):
        fields[name] = tma_operands.stored(x, rows_as, powers.get(name))
    fields = over_tiles(plan, inputs) | fields
    fields |= tile_scheduler.table(work_order.schedule, plan.order, inputs)
    if plan.has("q_lengths") or plan.has("kv_lengths"):
        fields |= edges(problem, inputs, fields, (tiling.block_q, tiling.block_kv))
    if plan.key_sums:
        fields["aux_sums"] = jax.new_ref(aux_sums.zero_array(plan))
    if plan.order.claims:
        fields["counter"] = claims.counter(-plan.order.grid if plan.order.turns else 0)
    refs = BackwardRefs(**fields)
    if plan.has("q_segment_ids") and work_order.go_by_rank(plan.order):
        refs = refs._replace(schedule=key_tiles.schedule_by_rank(KernelContext(plan, refs)))
    return refs


def edges(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    arrays: dict[str, Any],
    blocks: tuple[int, int],
) -> dict[str, Any]:
    """The tiles of `arrays` that lengths cut, of (query rows, keys), where there are lengths."""
    results = {}
    for name in [name for name in ("q", "do", "k", "v") if name in arrays]:
        of_keys = name in ("k", "v")
        lengths = inputs.kv_lengths if of_keys else inputs.q_lengths
        if lengths is not None:
            rows = jnp.asarray(lengths)[:: problem.share if of_keys else 1]
            results[f"{name}_edge"] = tma_operands.edge(arrays[name], rows, blocks[of_keys])
    return results


def over_tiles(plan: KeyPlan, inputs: AttentionInputs) -> dict[str, Any]:
    """Arrays that kernels over keys read beside q, k, v, dO, row statistics and the schedule."""
    problem, tiling = plan.problem, plan.tiling
    names = [name for name in problem.arrays if name in BackwardRefs._fields]
    fields: dict[str, Any] = {name: getattr(inputs, name) for name in names}
    if problem.bias_shape is not None or problem.mask_shape is not None:
        fields |= _bias_and_mask(plan, inputs)
    if problem.mask_program is not None or problem.score_program is not None:
        fields |= functions.operands(inputs)
    if plan.has("q_segment_ids"):
        fields |= tma_operands.segment_ids(inputs, tiling.padded_rows, tiling.padded_keys)
        fields["segment_spans"] = segment_spans.spans_of(
            problem, inputs, fields, (tiling.block_kv, tiling.block_q), of_keys=True
        )
    return fields


def _bias_and_mask(plan: KeyPlan, inputs: AttentionInputs) -> dict[str, Any]:
    problem, tiling, fields = plan.problem, plan.tiling, dict[str, Any]()
    rows, keys = tiling.padded_rows, tiling.padded_keys
    if mask_bits.takes(problem.mask_shape):
        fields |= {"mask_array": None, "mask_bits": mask_bits.packed(inputs.mask_array, rows, keys)}
        inputs = inputs._replace(mask_array=None)
    as_it_is = ["mask_array"] if problem.masks_keys else []
    for name, array in tma_operands.bias_and_mask(inputs, rows, keys).items():
        sizes = array.shape[2:]
        if min(sizes) > 1 and sizes != (rows, keys):
            as_it_is.append(name)  # `array_tiles` clips it
        fields[name] = array if name in as_it_is else array.swapaxes(2, 3)
    if tiling.reads_key_mask:
        fields["key_tiles"] = key_masks.codes(fields["mask_array"], tiling.block_kv)
    if plan.bias_tiles is not None:
        fields["bias"] = plan.bias_tiles.operand(inputs.bias)
    return fields


def ordered_after(refs: BackwardRefs, result: Operand) -> BackwardRefs:
    """Operands that are there when another kernel's result is: each kernel fills the GPU, and the
    interpreter simulates one at a time.
    """
    return refs._replace(delta=lax.optimization_barrier((refs.delta, result))[0])
