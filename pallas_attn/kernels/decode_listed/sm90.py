"""Attention to listed rows of a cache, for Hopper: `lists` with `decode.sm90`."""

import dataclasses

from pallas_attn._call.problem import DecodeProblem
from pallas_attn.errors import Limit
from pallas_attn.kernels.decode import sm90
from pallas_attn.kernels.decode_listed import lists


def limit(problem: DecodeProblem) -> Limit | None:
    """Why this kernel cannot take the problem, or None."""
    if problem.quantized and not problem.unscaled:
        reason = "kv_indices over a quantised cache: it copies scales four at a time"
        return Limit(reason, "leave implementation=None")
    return _BASE.limit(problem)


_BASE = lists.kernel_with(sm90.KERNEL, fills=True)
KERNEL = dataclasses.replace(_BASE, limit=limit)
