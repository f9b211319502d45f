"""Attention of many new rows to a cache, for every GPU from Ampere on: `gathered` with the portable
forward.
"""

import dataclasses
import functools

import jax

from pallas_attn._call.kernel import Kernel
from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.flash_fwd import sm80
from pallas_attn.kernels.prefill import gathered

FORWARD = gathered.Forward(
    sm80.KERNEL, most_bytes=2**30
)  # small, since GPUs may have little memory


@dataclasses.dataclass(frozen=True)
class Config:
    """The tuning of the forward."""

    forward: sm80.Config = sm80.Config()

    @classmethod
    def default(cls, problem: DecodeProblem) -> "Config":
        return cls(sm80.Config.default(gathered.contiguous(problem)))


def limit(problem: DecodeProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    return gathered.limit(problem, FORWARD)


def smem_bytes(problem: DecodeProblem, config: Config) -> int:
    return sm80.smem_bytes(gathered.contiguous(problem), config.forward)


@functools.partial(jax.jit, static_argnames=("problem", "config"))
def run(
    inputs: DecodeInputs, problem: DecodeProblem, config: Config
) -> tuple[jax.Array, jax.Array]:
    """out [M, t, N, Hv] in q's dtype, log-sum-exp float32 [M, N, t]."""
    return gathered.run(inputs, problem, FORWARD, config.forward)


KERNEL = Kernel(Config, limit, smem_bytes, run)
