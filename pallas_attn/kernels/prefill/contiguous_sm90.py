"""`flash_attention` of few query rows over many keys, for Hopper, by the prefill kernel.

The dense forward gives a warpgroup 64 query rows of one head: where there are few, rows of its
tiles stay idle and blocks without work. Here rows of a tile are pairs of query heads and query
rows, so that the heads of a group share one pass over K and V, and the keys of a tile may be split
among blocks. All of it is `prefill.sm90`; K and V are read from where they lie.
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.attention import tma_operands
from pallas_attn.kernels.attention.cache_layout import Contiguous
from pallas_attn.kernels.attention.tiles import KernelContext, mask_of
from pallas_attn.kernels.attention.tiles import limit as attention_limit
from pallas_attn.kernels.flash_fwd import sm90 as flash_fwd
from pallas_attn.kernels.lang.mosaic import MULTIPROCESSORS
from pallas_attn.kernels.lang.types import Index
from pallas_attn.kernels.prefill import queries, sm90, tma_producer
from pallas_attn.kernels.prefill.plan import Plan, PrefillRefs, SequenceKeys, bytes_of

Array = jax.Array

ARRAYS = ("q_offset", "q_lengths", "kv_lengths", "sinks", "mask_left", "mask_right")
COPIED = 2.3e6  # bytes that XLA pads in a unit of `sm90.cost`, on an H200
FASTER = 1.07  # how much faster the forward is where both have all blocks at work


@dataclasses.dataclass(frozen=True)
class Config:
    """The tuning of `prefill.sm90`."""

    prefill: sm90.Config = sm90.Config()

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def default(cls, problem: AttentionProblem) -> "Config":
        return cls(sm90.fastest(plan_of(problem, cls()), _keys(problem)))


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
    if problem.functions:
        return Limit("it takes no functions of positions", other)
    if (refused := attention_limit(problem)) is not None:
        return refused
    dims = problem.head_dim, problem.v_head_dim
    if any(tma_operands.width_in_tma(dim) != dim for dim in dims):
        return Limit("head dims above 64: TMA wants multiples of 16", other)
    return None


def slower(problem: AttentionProblem) -> Limit | None:
    """Why the dense forward is faster by the estimates of both, or None."""
    plan = plan_of(problem, Config.default(problem))
    cost = sm90.cost(plan, _keys(problem)) + _copied(problem) / COPIED
    if FASTER * cost < _forward_cost(problem):
        return None
    return Limit("the forward is faster", "leave implementation=None")


def _copied(problem: AttentionProblem) -> int:
    """Bytes of K and V that XLA pads. The forward reads them as they are."""
    if tma_operands.rows_in_tma(problem.kv_len) == problem.kv_len:
        return 0
    row = 2 * problem.kv_heads * (problem.head_dim + problem.v_head_dim)
    return problem.batch // problem.share * problem.kv_len * row


def _forward_cost(problem: AttentionProblem) -> float:
    """The dense forward's time, in the unit of `sm90.cost`."""
    config = flash_fwd.Config.default(problem)
    plan = flash_fwd.plan_of(problem, config)
    rows = pl.cdiv(plan.order.work_tiles, MULTIPROCESSORS) * plan.tiling.row_blocks
    tiles = pl.cdiv(_keys(problem), sm90.COST_TILE) + sm90.COST_OF_UNIT
    return rows / sm90.COST_SPEEDS[config.warpgroups] * tiles


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    return bytes_of(plan_of(problem, config))


def keys_of(ctx: KernelContext, m: Index, rows: Index) -> SequenceKeys:
    """The keys of a sequence, where lengths and positions may be arrays."""
    refs, problem = ctx.refs, ctx.plan.problem
    return SequenceKeys(
        kv_len=problem.kv_len if refs.lengths is None else refs.lengths[m],
        q_offset=problem.q_offset if refs.q_offset is None else refs.q_offset[m],
        q_len=rows if refs.q_lengths is None else refs.q_lengths[m],
        invalid=jnp.bool_(False),
        mask=mask_of(problem, refs, m),
    )


@functools.lru_cache(maxsize=1024)
def plan_of(problem: AttentionProblem, config: Config) -> Plan:
    sizes = (problem.kv_len,), problem.kv_heads, None, problem.batch, problem.kv_len
    return Plan(
        problem,
        config.prefill,
        Contiguous(*sizes),
        queries.QUERIES,
        keys_of,
        tma_producer.producer_of,
    )


@functools.partial(jax.jit, static_argnames=("problem", "config"))
def run(inputs: AttentionInputs, problem: AttentionProblem, config: Config) -> tuple[Array, Array]:
    """out [B, T, N, Hv] in q's dtype, log-sum-exp float32 [B, N, T]. Jitted, so that a model of
    many layers traces it once. XLA copies K and V where S is above 8 and no multiple of 8.
    """
    refs = PrefillRefs(
        q=tma_operands.for_tma(inputs.q),
        k=(tma_operands.for_tma(inputs.k),),
        v=(tma_operands.for_tma(inputs.v),),
        lengths=inputs.kv_lengths,
        sinks=None if inputs.sinks is None else inputs.sinks.astype(jnp.float32),
        mask_left=inputs.mask_left,
        mask_right=inputs.mask_right,
        q_offset=inputs.q_offset,
        q_lengths=inputs.q_lengths,
    )
    return sm90.launch(plan_of(problem, config), refs)


KERNEL = Kernel(Config, limit, smem_bytes, run, slower=slower)
