"""Attention of several new rows to a quantised cache, for Hopper.

It is `prefill.sm90` with another producer, which widens rows to q's dtype on their way to the ring
of K and V, once for each q tile that reads them. That takes longer than the matmuls of the tile do:
where q tiles are many, `widened_sm90` is faster.
"""

import dataclasses
import functools

import jax

from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.lang.config import check
from pallas_attn.kernels.lang.mosaic import SMEM_LIMIT
from pallas_attn.kernels.mma import dequant, narrow_rows
from pallas_attn.kernels.prefill import packed_queries, sm90, widening_producer
from pallas_attn.kernels.prefill.plan import Plan, bytes_of, unquantized

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning only: the result is the same up to rounding."""

    prefill: sm90.Config = sm90.Config()
    slots: int = 2  # tiles of K and V together that are on their way
    producers: int = 1  # 2: one has K, the other V

    def __post_init__(self):
        most = 2 if self.prefill.warpgroups == 1 else 1  # there are no registers for more
        check(
            self,
            slots=(self.slots in (2, 4, 6, 8), "2, 4, 6 or 8"),
            producers=(1 <= self.producers <= most, f"1 to {most}"),
        )

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def default(cls, problem: DecodeProblem) -> "Config":
        """Consumers and splits as over a cache in q's dtype, or one consumer where rows are so wide
        that two leave no room; then more slots, q tiles and stages, in this order. One consumer
        leaves registers for a second producer, except where rows are wide.
        """
        like = sm90.Config.default(unquantized(problem))
        like = dataclasses.replace(like, together=1, in_turn=False)
        two = max(problem.head_dim, problem.v_head_dim) <= 128
        choices = [
            cls(
                dataclasses.replace(like, warpgroups=consumers, q_slots=q_slots, stages=stages),
                slots,
                producers=2 if consumers == 1 and two else 1,
            )
            for consumers in (like.warpgroups, 1)
            for slots in ((8, 6, 4, 2) if consumers == 1 else (4, 2))
            for q_slots in range(like.q_slots, 0, -1)
            for stages in (4, 3, 2)
        ]
        fits = (config for config in choices if bytes_of(plan_of(problem, config)) <= SMEM_LIMIT)
        return next(fits, choices[-1])


def limit(problem: DecodeProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    other = "leave implementation=None"
    if not problem.quantized or problem.cache_dtype not in dequant.DTYPES:
        return Limit("the cache is not quantised", other)
    if problem.unscaled:
        return Limit("it takes 8-bit caches with scales only", other)
    if problem.merged is not None:
        return Limit("it does not merge results of packed rows with others", other)
    if (refused := sm90.limit(unquantized(problem))) is not None:
        return refused
    for name, dim in (("head_dim", problem.head_dim), ("v_head_dim", problem.v_head_dim)):
        if dim % narrow_rows.COLUMNS:
            return Limit(f"{name} is {dim}; it takes multiples of 64", other)
    return None


def smem_bytes(problem: DecodeProblem, config: Config) -> int:
    """Shared memory of the launch that needs most."""
    return max(bytes_of(plan_of(problem, config)), packed_queries.bytes_of_few(problem))


def run(inputs: DecodeInputs, problem: DecodeProblem, config: Config) -> tuple[Array, Array]:
    """The results of `sm90.run`."""
    into = None
    if problem.packed:
        into, problem = packed_queries.decode_few(inputs, problem)
    return sm90.launch_over_cache(plan_of(problem, config), inputs, into)


@functools.lru_cache(maxsize=1024)
def plan_of(problem: DecodeProblem, config: Config) -> Plan:
    return dataclasses.replace(
        sm90.plan_of(problem, config.prefill),
        producer_of=widening_producer.producer_of,
        widening=widening_producer.Widening(config.slots, config.producers, problem.cache_dtype),
    )


KERNEL = Kernel(Config, limit, smem_bytes, run)
