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
    if problem.has_no_rows:
        return batching.by_xla(_without_rows, inputs, problem)
    chosen = dispatch.select(problem, implementation)
    if isinstance(chosen, dispatch.Reference):
        return chosen.run(inputs, problem)
    return batching.compiled_once(batching.decode, chosen, problem, inputs)


def _without_rows(inputs: DecodeInputs, problem: DecodeProblem) -> tuple[Array, Array]:
    """out and lse over a cache without any row: NaN for a sequence that should have rows, and for
    all where a traced layer is none of the cache's.
    """
    lost = inputs.lengths > 0
    if inputs.new_lengths is not None:
        lost |= inputs.new_lengths < 0
    if inputs.layer is not None:
        layer = jnp.asarray(inputs.layer)
        lost |= (layer < 0) | (layer >= (problem.layers or 1))
    if inputs.starts is not None:  # whether a row is one of a sequence that is lost
        row = jnp.arange(problem.tokens, dtype=jnp.int32)[:, None]
        begin, end = inputs.starts[None, :-1], inputs.starts[None, 1:]
        lost = ((begin <= row) & (row < end) & lost[None]).any(axis=1)
    lost_rows = lost[:, None, None] if inputs.starts is None else lost[:, None]
    out = jnp.zeros((*problem.out_shape, problem.v_head_dim), problem.dtype)
    lse = jnp.full(problem.lse_shape, -jnp.inf, problem.lse_dtype)
    lost_lse = lost_rows if inputs.starts is None else lost
    return jnp.where(lost_rows[..., None], jnp.nan, out), jnp.where(lost_lse, jnp.nan, lse)


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
