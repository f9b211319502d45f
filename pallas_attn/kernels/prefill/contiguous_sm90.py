"""`flash_attention` of few query rows over many keys, for Hopper, by the prefill kernel.

The dense forward gives a warpgroup 64 query rows of one head: where there are few, rows of its
tiles stay idle and blocks without work. Here rows of a tile are pairs of query heads and query
rows, so that the heads of a group share one pass over K and V, and the keys of a tile may be split
among blocks.
All of it is `prefill.sm90`; K and V are read from where they lie.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import tma_operands
from pallas_attn.kernels.attention.plan import limit as attention_limit
from pallas_attn.kernels.flash_fwd import sm90 as flash_fwd
from pallas_attn.kernels.prefill import memory, sm90
from pallas_attn.kernels.prefill.plan import BLOCKS, Plan

FEWEST_KEYS = 4  # a query row
ARRAYS = ("q_offset", "q_lengths", "kv_lengths", "sinks", "mask_left", "mask_right")
FASTER = 1.07  # how much faster the forward is where both have all blocks at work


class Config(sm90.Config):
    """Tuning only: the result is the same up to rounding."""

    @classmethod
    def default(cls, problem: AttentionProblem) -> "Config":  # type: ignore[override]
        """See `sm90.fastest`."""
        found = sm90.fastest(functools.partial(Plan, problem), _keys(problem))
        return cls(**dataclasses.asdict(found))


def _keys(problem: AttentionProblem) -> int:
    """How many keys some query row sees, by the mask. A position that is known at run time only is
    taken to be that of the last rows.
    """
    dynamic = "q_offset" in problem.arrays
    first = problem.kv_len - problem.q_len if dynamic else problem.q_offset
    low, high = problem.mask.widest.kv_range(first, first + problem.q_len, problem.kv_len)
    return max(high - low, 1)


def limit(problem: AttentionProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    other = "leave implementation=None"
    if problem.dtype not in ("bfloat16", "float16"):
        return Limit(f"it takes bfloat16 and float16, not {problem.dtype}", other)
    if set(problem.arrays) - set(ARRAYS):
        return Limit("it takes no bias, segment ids and mask_array", other)
    if problem.mask_program is not None or problem.score_program is not None:
        return Limit("it takes no functions of positions", other)
    if (refused := attention_limit(problem)) is not None:
        return refused
    dims = problem.head_dim, problem.v_head_dim
    if any(tma_operands.width_in_tma(dim) != dim for dim in dims):
        return Limit("head dims above 64: TMA wants multiples of 16", other)
    if problem.kv_len < FEWEST_KEYS * problem.q_len:
        return Limit(f"it is for {FEWEST_KEYS} keys a query row and more", other)
    plan = Plan(problem, Config.default(problem))
    if FASTER * sm90.cost(plan, _keys(problem)) >= _forward_cost(problem):
        return Limit("the forward is faster", other)
    return None


def _forward_cost(problem: AttentionProblem) -> float:
    """The dense forward's time, in the unit of `sm90.cost`."""
    config = flash_fwd.Config.default(problem)
    tiles, warpgroups = flash_fwd.plan_of(problem, config).work_tiles, config.warpgroups
    speed = {1: 0.75, 2: 1.0, 3: 1.08, 4: 1.08}[warpgroups]
    return pl.cdiv(tiles, BLOCKS) * warpgroups / speed * (pl.cdiv(_keys(problem), 128) + 1.5)


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    return memory.bytes_of(Plan(problem, config))


def run(inputs: AttentionInputs, problem: AttentionProblem, config: Config) -> tuple[Any, Any]:
    """out [B, T, N, Hv] in q's dtype, log-sum-exp float32 [B, N, T]."""
    return _launch(inputs, problem, config)


@functools.partial(jax.jit, static_argnames=("problem", "config"))
def _launch(inputs: AttentionInputs, problem: Any, config: Any) -> tuple[Any, Any]:
    """Jitted, so that a model of many layers traces it once. XLA copies K and V where S is above 8
    and no multiple of 8.
    """
    refs = memory.Refs(
        q=tma_operands.for_tma(inputs.q),
        k=(tma_operands.for_tma(inputs.k),),
        v=(tma_operands.for_tma(inputs.v),),
        lengths=inputs.kv_lengths,
        new_lengths=None,
        capacities=None,
        page_table=None,
        layer=None,
        sinks=None if inputs.sinks is None else inputs.sinks.astype(jnp.float32),
        mask_left=inputs.mask_left,
        mask_right=inputs.mask_right,
        q_offset=inputs.q_offset,
        q_lengths=inputs.q_lengths,
    )
    return sm90.launch(Plan(problem, config), refs)
