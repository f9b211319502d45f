"""How many rows of a packed call decode's kernel takes, and which rows it leaves to prefill's; the
problem whose Config a decode runs with.
"""

import dataclasses

from pallas_attn._call.problem import DecodeProblem

FOLDED_ROWS = 8  # rows of a kv head up to which their scores can be folded
KEYS_OF_ONE = 8192  # keys of the sequence whose Config serves every batch: `alone`


def of_single_rows(problem: DecodeProblem) -> bool:
    """Whether most sequences of a packed call can have one row at most. Never where bits may not
    depend on how many rows others have.
    """
    assert problem.tokens is not None
    return problem.tokens <= problem.sequences and not problem.batch_invariant


def by_rows(problem: DecodeProblem) -> tuple[DecodeProblem, DecodeProblem | None]:
    """A packed call as two launches: the sequences of few rows, served like single tokens, and the
    others, if there can be any. A kernel for a single row is faster, so "few" is one where there
    are no more rows than sequences (`of_single_rows`).
    """
    assert problem.tokens is not None
    few = 1
    if not of_single_rows(problem):
        few = max(FOLDED_ROWS * problem.kv_heads // problem.q_heads, 1)
    rest = dataclasses.replace(problem, fewest=few + 1) if few < problem.tokens else None
    return dataclasses.replace(problem, q_len=few), rest


def alone(problem: DecodeProblem) -> DecodeProblem:
    """The problem that a kernel chooses a Config for. Where bits may not depend on other sequences
    it is that of a single one, so that its keys are cut and summed up as if it were alone. Where
    other lengths leave no room for as many stages, the caller takes fewer, which changes no bits.
    """
    if not problem.batch_invariant:
        return problem
    return dataclasses.replace(
        problem, sequences=1, capacities=(KEYS_OF_ONE,), batch_invariant=False
    )
