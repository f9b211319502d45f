"""Attention of many new rows to a float8 cache by matmuls on 8 bits, for Hopper: `prefill.sm90`
with the mainloop of `float8_mainloop`.

It rounds q and probabilities to float8, which is faster and less accurate than q's dtype, so it
takes calls that ask for it, by `precision`.
"""

import dataclasses
import functools

import jax

from pallas_attn._call import selection
from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import FLOAT8, DecodeInputs, DecodeProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.prefill import float8_mainloop, float8_producer, sm90
from pallas_attn.kernels.prefill.plan import Plan, bytes_of, over_contiguous_keys, unquantized

Array = jax.Array

MOST_BYTES = 2**32  # bytes of K and V of a layer
WIDEST = 128  # largest head dim of v: registers hold two accumulators of the output
# Pairs of query head and query row that a row of the cache must meet to be worth a launch before,
# and head dims of K and V together from which on the matmuls, not the softmax, take most time.
FEWEST_PAIRS, FEWEST_COLUMNS = 768, 256
MANY_UNITS = 8  # units of a block from which on kv heads are taken together
COLUMNS = 64  # head dims are multiples of it
# Three consumers have no registers for two accumulators.
CONFIGS = (sm90.Config(1, q_slots=1), sm90.Config(2))


@dataclasses.dataclass(frozen=True)
class Config:
    """The tuning of `prefill.sm90`."""

    prefill: sm90.Config = sm90.Config()

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def default(cls, problem: DecodeProblem) -> "Config":
        plan = plan_of(problem, cls())
        config = sm90.fastest(plan, max(problem.capacities), configs=CONFIGS)
        config = dataclasses.replace(config, in_turn=False)
        many = plan_of(problem, cls(config)).units >= MANY_UNITS * config.grid
        return cls(dataclasses.replace(config, together=problem.kv_heads if many else 1))


def limit(problem: DecodeProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    other = "leave implementation=None"
    if not problem.quantized or problem.unscaled or problem.cache_dtype not in FLOAT8:
        return Limit("it takes float8 caches with scales", other)
    if problem.packed or problem.merged is not None:
        return Limit("it takes no packed rows", other)
    if problem.score_program is not None:
        return Limit("it has no registers left for a score function", other)
    if (refused := sm90.limit(unquantized(problem))) is not None:
        return refused
    for name, dim in (("head_dim", problem.head_dim), ("v_head_dim", problem.v_head_dim)):
        if dim % COLUMNS:
            return Limit(f"{name} is {dim}; it takes multiples of {COLUMNS}", other)
    if problem.v_head_dim > WIDEST:
        return Limit(f"v_head_dim is {problem.v_head_dim}; it takes up to {WIDEST}", other)
    rows = problem.sequences * problem.kv_heads * max(problem.capacities)
    size = rows * (problem.head_dim + problem.v_head_dim)
    if size > MOST_BYTES:
        return Limit(f"rows of a layer would take {size / 2**30:.1f} GiB", other)
    return None


def slower(problem: DecodeProblem) -> Limit | None:
    """Why another kernel is faster, or None. Bounds were measured on an H200."""
    if problem.head_dim + problem.v_head_dim < FEWEST_COLUMNS:
        return Limit("such head dims are not faster by it", "leave implementation=None")
    fewest = FEWEST_PAIRS * selection.stored_rows(problem)
    pairs = problem.q_len * problem.sequences * problem.q_heads * max(problem.capacities)
    if selection.sm90(problem) is not None or pairs < fewest:
        return Limit("few query rows are faster without it", "leave implementation=None")
    return None


def smem_bytes(problem: DecodeProblem, config: Config) -> int:
    return bytes_of(plan_of(problem, config))


def run(inputs: DecodeInputs, problem: DecodeProblem, config: Config) -> tuple[Array, Array]:
    """The results of `sm90.run`."""
    return sm90.launch_over_cache(plan_of(problem, config), inputs, None)


@functools.lru_cache(maxsize=1024)
def plan_of(problem: DecodeProblem, config: Config) -> Plan:
    contiguous = dataclasses.replace(
        over_contiguous_keys(problem),
        dtype=problem.cache_dtype,
        out_dtype=problem.dtype,
    )
    return dataclasses.replace(
        sm90.plan_of(unquantized(problem), config.prefill),
        problem=contiguous,
        producer_of=float8_producer.producer_of,
        mainloop=float8_mainloop.mainloop,
    )


KERNEL = Kernel(Config, limit, smem_bytes, run, slower=slower)
