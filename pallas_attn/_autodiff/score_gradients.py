"""Gradients of the arrays that a score function reads: the choice of arrays whose gradients the
backward kernels add up, and the gradients of the others by the reference, some query rows at a
time, while kernels compute those of q, k and v.

Many logits read one element of an array: its gradient is a float32 sum over the rows and keys that
read it. Nothing is computed where these gradients are not asked for.
"""

import functools

import jax

from pallas_attn._autodiff import by_rows
from pallas_attn._autodiff.by_rows import Rows
from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn._functions import reads
from pallas_attn._functions.program import Program

Array = jax.Array


def by_kernels(problem: AttentionProblem, numbers: list[int]) -> tuple[int, ...]:
    """Indices of the arrays of a score function whose gradients the backward kernels add up. Every
    read of such an array has an index that depends on the batch row, the head, and at most one of:
    the query's position, the key's position, their distance.
    """
    whole = problem.share == problem.zigzag == problem.fetches == 1
    if not whole or "q_positions" in problem.arrays or problem.dtype == "float64":
        return ()
    return tuple(n for n in sorted(numbers) if _is_summed(problem.score_program, n))


def _is_summed(program: Program | None, number: int) -> bool:
    assert program is not None
    some = reads.of_array(program, number)
    if any(read.along == reads.BOTH for read in some):
        return False
    try:
        for read in some:
            reads.derivative(program, read)
    except ValueError:  # the derivative has an operation that kernels do not compute
        return False
    return True


def of_call(
    problem: AttentionProblem, inputs: AttentionInputs, numbers: list[int], rows: Rows
) -> list[Array]:
    """The gradients of some of `inputs.score_aux`, in float32; `rows` may be results of more keys
    than are here.
    """
    return _of_call(problem, tuple([f"score_aux{n}" for n in numbers]), inputs, rows)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _of_call(
    problem: AttentionProblem, names: tuple[str, ...], inputs: AttentionInputs, rows: Rows
) -> list[Array]:
    return list(by_rows.gradients(problem, inputs, rows, names).values())
