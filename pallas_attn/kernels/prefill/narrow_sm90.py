"""Attention of several new rows to a quantised cache, for Hopper.

It is `prefill.sm90`, whose producer reads the rows as they are stored and multiplies them by their
scales on their way to the ring of K and V (`narrow_producer`). Each row is then rounded to q's
dtype, where `decode.sm90` multiplies the numbers as they are stored and scales the scores.

The producer widens a row once for each q tile that reads it, which takes longer than the matmuls of
the tile do: where q tiles are many, `widened_sm90` is faster.
"""

import dataclasses
from typing import Any

from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.flash_fwd.sm90 import SMEM_LIMIT
from pallas_attn.kernels.lang.config import check
from pallas_attn.kernels.mma import dequant, narrow_rows
from pallas_attn.kernels.prefill import memory, sm90
from pallas_attn.kernels.prefill.plan import Plan

FEW_ROWS = 32  # of a kv head of a sequence, up to which decoding is faster: measured on an H200


@dataclasses.dataclass(frozen=True)
class Config(sm90.Config):
    """As `sm90.Config`, whose `together` and `in_turn` stay what they are by default."""

    slots: int = 2  # tiles of K and of V together that are on their way
    loads: int = 4  # 16 bytes of a producer's thread that are being loaded while others are widened
    producers: int = 1  # 2: one has K, the other V

    def __post_init__(self):
        super().__post_init__()
        most = {1: 2, 2: 2, 3: 1}[self.warpgroups]  # there are no registers for more
        check(
            self,
            slots=(self.slots in (2, 4, 6, 8), "2, 4, 6 or 8"),
            loads=(0 <= self.loads <= 8, "0 to 8"),
            producers=(1 <= self.producers <= most, f"1 to {most}"),
        )

    @classmethod
    def default(cls, problem: DecodeProblem) -> "Config":
        """Consumers and splits as over a cache in q's dtype, or one consumer where rows are so wide
        that two leave no room; then more slots, q tiles and stages, in this order. One consumer
        leaves registers for a second producer, except where rows are wide.
        """
        plain = {"together": 1, "in_turn": False}
        like = dataclasses.asdict(sm90.Config.default(_unquantized(problem))) | plain
        one = cls(**(like | {"warpgroups": 1}))
        if max(problem.head_dim, problem.v_head_dim) <= 128:
            one = dataclasses.replace(one, producers=2, loads=2)
        choices = [
            dataclasses.replace(most, slots=slots, q_slots=q, stages=stages)
            for most in (one if like["warpgroups"] == 1 else cls(**like), one)
            for slots in ((8, 6, 4, 2) if most is one else (4, 2))
            for q in range(most.q_slots, 0, -1)
            for stages in (4, 3, 2)
        ]
        fits = (some for some in choices if smem_bytes(problem, some) <= SMEM_LIMIT)
        return next(fits, choices[-1])


def limit(problem: DecodeProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    other = "leave implementation=None"
    if not problem.quantized or problem.cache_dtype not in dequant.DTYPES:
        return Limit("the cache is not quantised", other)
    rows = problem.q_len * problem.sequences if problem.tokens is None else problem.tokens
    if rows * problem.q_heads <= FEW_ROWS * problem.sequences * problem.kv_heads:
        return Limit("few query rows are faster without it", other)
    if problem.merged is not None:
        return Limit("it does not merge results of packed rows with others", other)
    if (refused := sm90.limit(_unquantized(problem))) is not None:
        return refused
    for name, dim in (("head_dim", problem.head_dim), ("v_head_dim", problem.v_head_dim)):
        if dim % narrow_rows.COLUMNS:
            return Limit(f"{name} is {dim}; it takes multiples of 64", other)
    if smem_bytes(problem, Config.default(problem)) > SMEM_LIMIT:
        return Limit("such rows do not fit in shared memory", other)
    return None


def smem_bytes(problem: DecodeProblem, config: Config) -> int:
    return memory.bytes_of(Plan.of(problem, config))


def run(inputs: DecodeInputs, problem: DecodeProblem, config: Config) -> tuple[Any, Any]:
    """As `sm90.run`."""
    return sm90.run(inputs, problem, config)


def _unquantized(problem: DecodeProblem) -> DecodeProblem:
    return dataclasses.replace(problem, quantized=False, cache_dtype=problem.dtype)
