"""Attention over a cache by the implementation that takes the problem."""

import jax
import jax.numpy as jnp

from pallas_attn._call import batching, dispatch
from pallas_attn._call.problem import DecodeInputs, DecodeProblem

Array = jax.Array


def attend(
    problem: DecodeProblem, inputs: DecodeInputs, implementation: str | None
) -> tuple[Array, Array]:
    """(out, lse)."""
    if implementation is not None:
        dispatch.check_name(implementation)
    if 0 in problem.out_shape:
        out = jnp.zeros((*problem.out_shape, problem.v_head_dim), problem.dtype)
        return out, jnp.zeros(problem.lse_shape, problem.lse_dtype)
    chosen = dispatch.select(problem, implementation)
    if isinstance(chosen, dispatch.Reference):
        return chosen.run(inputs, problem)
    return batching.compiled_once(batching.decode, chosen, problem, inputs)


def attend_merged(
    problem: DecodeProblem, inputs: DecodeInputs, implementation: str | None
) -> tuple[Array, Array] | None:
    """The results of `inputs.into` with those of packed rows merged in; None where no kernel merges
    them itself.
    """
    if 0 in problem.out_shape or (chosen := dispatch.merging(problem, implementation)) is None:
        return None
    return batching.compiled_once(batching.decode, chosen, problem, inputs)


def implementation_of(problem: DecodeProblem, implementation: str | None) -> str:
    """The implementation that would take the problem; reports on what ran do not show it."""
    with dispatch.chosen():
        return dispatch.select(problem, implementation).implementation
