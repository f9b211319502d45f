"""Decode over a cache without any row, for which nothing is launched."""

import jax.numpy as jnp

from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn.kernels.lang.types import Operand


def has_no_rows(problem: DecodeProblem) -> bool:
    return not max(problem.capacities) or problem.pages == 0


def results_of(inputs: DecodeInputs, problem: DecodeProblem) -> tuple[Operand, Operand]:
    """out and lse: NaN for a sequence that should have rows."""
    lost = inputs.lengths > 0
    if inputs.new_lengths is not None:
        lost |= inputs.new_lengths < 0
    if inputs.starts is not None:  # whether a row is one of a sequence that is lost
        row = jnp.arange(problem.tokens, dtype=jnp.int32)[:, None]
        lost = ((inputs.starts[:-1] <= row) & (row < inputs.starts[1:]) & lost).any(axis=1)
    lost_rows = lost[:, None, None] if inputs.starts is None else lost[:, None]
    out = jnp.zeros((*problem.out_shape, problem.v_head_dim))
    out = jnp.where(lost_rows[..., None], jnp.nan, out)
    lse = jnp.full(problem.lse_shape, -jnp.inf)
    lse = jnp.where(lost_rows if inputs.starts is None else lost, jnp.nan, lse)
    return out.astype(problem.dtype), lse.astype(jnp.float32)
