"""Problems for which kernels of prefill and MLA are slower than others of dispatch's tables.

Each function is asked before its kernel is imported: it takes any problem of its operation, and
returns why another kernel is faster, or None. Bounds were measured on an H200. What takes an
estimate of times is `Kernel.slower` of the kernel itself.
"""

from pallas_attn._call import launches
from pallas_attn._call.problem import AttentionProblem, DecodeProblem
from pallas_attn.errors import Limit

FEWEST_KEYS = 4  # keys of a query row, from which on `contiguous_sm90` can gain
# Query rows of a kv head up to which decoding by mma.sync is faster; over a quantised cache too.
DECODED_ROWS, DECODED_ROWS_QUANTIZED = 16, 32
# Pairs of query head and query row that a row of a quantised cache must meet to be worth widening,
# by its dtype: int8 takes longest where the kernel widens it.
FEWEST_PAIRS_WIDENED = {"int8": 512, "float8_e4m3fn": 768, "float8_e5m2": 768}
WIDE = 256  # head dims above which Hopper has a forward of its own
FEWEST_PAIRS_GATHERED = 1024  # the same for a copy of rows by XLA
MOST_LATENT_ROWS = 32  # query rows up to which a kernel for few latent rows serves a sequence

_OTHER = "leave implementation=None"
_FEW = Limit("few query rows are faster without it", _OTHER)


def contiguous_sm90(problem: AttentionProblem) -> Limit | None:
    if problem.kv_len < FEWEST_KEYS * problem.q_len:
        return Limit(f"it is for {FEWEST_KEYS} keys a query row and more", _OTHER)
    return None


def sm90(problem: DecodeProblem) -> Limit | None:
    if not problem.packed:
        return _FEW if problem.q_len * problem.q_heads <= DECODED_ROWS * problem.kv_heads else None
    if problem.merged is None and launches.by_rows(problem)[1] is None:
        return Limit("few packed rows are decoded in one launch", _OTHER)
    return None


def widened_sm90(problem: DecodeProblem, *, keys_are_split: bool = False) -> Limit | None:
    if (slower := sm90(problem)) is not None:
        return slower
    fewest = FEWEST_PAIRS_WIDENED.get(problem.cache_dtype, 0)
    if keys_are_split:
        fewest += fewest // 2
    return _FEW if _pairs(problem) < fewest * stored_rows(problem) else None


def narrow_sm90(problem: DecodeProblem) -> Limit | None:
    rows = problem.q_len * problem.sequences if problem.tokens is None else problem.tokens
    if rows * problem.q_heads <= DECODED_ROWS_QUANTIZED * problem.sequences * problem.kv_heads:
        return _FEW
    return sm90(problem)


def gathered(problem: DecodeProblem) -> Limit | None:
    copied = problem.sequences * max(problem.capacities) * problem.kv_heads
    return _FEW if _pairs(problem) < FEWEST_PAIRS_GATHERED * copied else None


def gathered_packed(problem: DecodeProblem) -> Limit | None:
    if problem.tokens is None or max(problem.head_dim, problem.v_head_dim) <= WIDE:
        return Limit(f"it is for packed rows at head dims above {WIDE}", _OTHER)
    return _FEW if problem.tokens < rows_gathered(problem) else None


def rows_gathered(problem: DecodeProblem) -> int:
    """Query rows of a sequence from which on a copy of its keys by XLA pays."""
    return -(-FEWEST_PAIRS_GATHERED * problem.kv_heads // problem.q_heads)


def _pairs(problem: DecodeProblem) -> int:
    """Pairs of a query row of a head and a key, where every sequence has the most keys."""
    rows = problem.q_len * problem.sequences if problem.tokens is None else problem.tokens
    return rows * problem.q_heads * max(problem.capacities)


def stored_rows(problem: DecodeProblem) -> int:
    """Rows of all kv heads in the buffers of a layer."""
    rows = sum(problem.capacities)
    if problem.pages is not None and problem.page_size is not None:
        rows = problem.pages * problem.page_size
    return rows * problem.kv_heads


def latent_bytes(problem: DecodeProblem) -> Limit | None:
    """Why a kernel for rows of bytes does not take the problem, or None."""
    return None if problem.byte_rows else Limit("it takes latent caches of bytes", _OTHER)


def few_latent_rows(problem: DecodeProblem) -> Limit | None:
    """The same of a kernel for few query rows over a latent cache."""
    rows = problem.q_heads
    if not problem.packed and problem.listed is None:  # else each row is a sequence of its own
        rows *= problem.q_len
    if problem.byte_rows or rows > MOST_LATENT_ROWS:
        return Limit(f"it takes up to {MOST_LATENT_ROWS} query rows in the cache's dtype", _OTHER)
    return None


def many_latent_rows(problem: DecodeProblem) -> Limit | None:
    """The same of a kernel for more of them."""
    return _FEW if few_latent_rows(problem) is None else None
