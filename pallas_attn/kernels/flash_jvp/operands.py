"""Operands of the kernels of tangents: the inputs of a call, its results, and tangents of some
inputs, whose names end in `_dot`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import (
    functions,
    segment_spans,
    softmax,
    tile_scheduler,
    tiles,
    tma_operands,
)
from pallas_attn.kernels.attention.tile_scheduler import QueryPlan
from pallas_attn.kernels.lang.types import GmemRef

MOVING = ("q", "k", "v", "bias")  # inputs whose tangents the kernels take


class Residuals(NamedTuple):
    """The arrays of a launch."""

    inputs: AttentionInputs
    out: Any  # None, like lse, where the launch makes both of them
    lse: Any
    tangents: dict[str, jax.Array]  # by the names of inputs: `AttentionProblem.tangents`


class TangentRefs(NamedTuple):
    """Global memory. None: not in this problem."""

    q: GmemRef
    k: GmemRef
    v: GmemRef
    out: GmemRef = None
    lse: GmemRef = None  # float32[B, N, padded rows], log2 units; inf for a row without a key
    q_dot: GmemRef = None
    k_dot: GmemRef = None
    v_dot: GmemRef = None
    bias_dot: GmemRef = None
    k_edge: GmemRef = None  # [B, block_kv, K, H]: the kv tile that kv_lengths cuts, 0 past them
    v_edge: GmemRef = None
    k_dot_edge: GmemRef = None
    v_dot_edge: GmemRef = None
    q_offset: GmemRef = None
    q_lengths: GmemRef = None
    kv_lengths: GmemRef = None
    mask_left: GmemRef = None
    mask_right: GmemRef = None
    q_segment_ids: GmemRef = None
    kv_segment_ids: GmemRef = None
    segment_spans: GmemRef = None
    q_positions: GmemRef = None
    bias: GmemRef = None
    mask_array: GmemRef = None
    schedule: GmemRef = None
    mask_aux: Any = ()
    score_aux: Any = ()
    tiles: GmemRef = None
    sinks: GmemRef = None  # read by `sm90_dual` alone


def of_call(plan: QueryPlan, residuals: Residuals) -> dict[str, Any]:
    """The operands but for q, k, v, their tangents and out."""
    problem, inputs = plan.problem, residuals.inputs
    sizes = plan.tiling.padded_rows, plan.tiling.padded_keys
    fields: dict[str, Any] = {name: getattr(inputs, name) for name in problem.arrays}
    fields |= functions.operands(inputs) | tile_scheduler.operands(plan, inputs)
    if plan.has("q_segment_ids"):
        tile_sizes = plan.tiling.tile_rows, plan.tiling.block_kv
        fields["segment_spans"] = segment_spans.spans_of(problem, inputs, fields, tile_sizes)
    if "bias" in problem.tangents:
        bias_dot = residuals.tangents["bias"]
        fields["bias_dot"] = tma_operands.padded(bias_dot, {2: sizes[0], 3: sizes[1]})
    return fields if residuals.lse is None else fields | {"lse": _lse_of_rows(plan, residuals)}


def _lse_of_rows(plan: QueryPlan, residuals: Residuals) -> jax.Array:
    lse, q_len = residuals.lse, plan.problem.q_len
    dead = lse == -jnp.inf
    if residuals.inputs.q_lengths is not None:
        row = jnp.arange(q_len, dtype=jnp.int32)
        dead |= row[None, None] >= residuals.inputs.q_lengths[:, None, None]
    pad = ((0, 0), (0, 0), (0, plan.tiling.padded_rows - q_len))
    lse = jnp.where(dead, jnp.inf, softmax.to_log2(lse))
    return jnp.pad(lse, pad, constant_values=jnp.inf)


def plain(problem: AttentionProblem) -> AttentionProblem:
    """The problem of the forward, whose limits are those of its tangents too."""
    return dataclasses.replace(problem, op="flash_forward", tangents=())


def limit(problem: AttentionProblem) -> Limit | None:
    """Why no kernel takes a problem, or None."""
    if set(problem.tangents) - set(MOVING):
        return Limit(f"it takes tangents of {', '.join(MOVING)}", "none is needed: XLA does it")
    return tiles.limit(plain(problem))


def moves_scores(problem: AttentionProblem) -> bool:
    """Whether the logits have a tangent."""
    return bool({"q", "k", "bias"} & set(problem.tangents))


def score_products(problem: AttentionProblem) -> list[tuple[str, str]]:
    """The products whose sum is the tangent of the scores."""
    pairs = {"q": ("q_dot", "k"), "k": ("q", "k_dot")}
    return [pair for name, pair in pairs.items() if name in problem.tangents]


def values(problem: AttentionProblem) -> list[str]:
    """The arrays that P and P o S' are multiplied with, in this order."""
    of_p = ["v_dot"] if "v" in problem.tangents else []
    return of_p + (["v"] if moves_scores(problem) else [])
