"""The caches that append's kernels take."""

from pallas_attn._call.problem import QUANTIZED, AppendProblem, KeepProblem
from pallas_attn.errors import Limit

DTYPES = ("float32", "bfloat16", "float16", *QUANTIZED)  # dtypes of caches


def limit(problem: AppendProblem | KeepProblem) -> Limit | None:
    """Why no kernel here can take caches of this kind, or None."""
    if problem.cache_dtype not in DTYPES:
        return Limit(f"no {problem.cache_dtype} caches", f"use one of {', '.join(DTYPES)}")
    capacity = max(problem.capacities, default=0)
    if capacity >= 2**31:
        return Limit(
            f"capacity {capacity}: positions are int32",
            "split each sequence over several caches of fewer than 2**31 rows",
        )
    return None
