"""Problems of the Hopper kernels for short causal windows where 8 query heads or more share K and
V: `flash_fwd.sm90_group_window` and `flash_bwd.sm90_group_window`. Dispatch asks this for every
problem, so it imports nothing of Pallas.
"""

from pallas_attn._call.problem import AttentionProblem
from pallas_attn.errors import Limit

EIGHT = 8  # heads and query rows of a tile: `mma.head_rows`
WIDTH = 64  # head dim
LEAST_KEYS, MOST_KEYS = 8, 128  # keys that a query row sees, itself included

OTHERS = Limit(
    f"it takes causal windows of {LEAST_KEYS} to {MOST_KEYS} keys, as many queries as keys, in "
    f"eights, heads of {WIDTH} of which a multiple of {EIGHT} share K and V, bfloat16 and float16, "
    "with sinks and no other array",
    "leave implementation=None",
)


def others(problem: AttentionProblem) -> Limit | None:
    """Why a problem is not one of these, or None."""
    mask, plain = problem.mask, problem.softcap is None and problem.score_program is None
    plain = plain and problem.mask_program is None and set(problem.arrays) <= {"sinks"}
    here = problem.share == problem.zigzag == problem.fetches == 1
    takes = (
        plain
        and here
        and problem.head_dim == problem.v_head_dim == WIDTH
        and problem.group % EIGHT == 0
        and problem.q_len == problem.kv_len > 0 == problem.q_len % EIGHT
        and problem.batch * problem.q_heads > 0
        and problem.q_offset == 0
        and mask.is_causal
        and mask.width is not None
        and LEAST_KEYS <= mask.width <= MOST_KEYS
        and problem.dtype in ("bfloat16", "float16")
        and problem.out_dtype is None
    )
    return None if takes else OTHERS
