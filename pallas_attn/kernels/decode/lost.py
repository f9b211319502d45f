"""Results of decode that XLA makes: which sequences are NaN, for calls whose rows become
sequences of their own (packed rows over a latent cache, tokens by index) or are copied; and all
results over a cache without any row, for which nothing is launched.
"""

import jax
import jax.numpy as jnp

from pallas_attn._call.problem import DecodeInputs, DecodeProblem
from pallas_attn.kernels.lang.types import Operand


def sequences(inputs: DecodeInputs, problem: DecodeProblem) -> jax.Array:
    """bool[M]: sequences longer than their capacity, or without a page that they need, and those
    that were lost before.
    """
    length, table, new = inputs.lengths, inputs.page_table, inputs.new_lengths
    lost = length > jnp.asarray(problem.capacities, jnp.int32)
    if table is not None:
        first = jnp.arange(table.shape[1], dtype=jnp.int32) * (problem.page_size or 1)
        missing = (table < 0) | (table >= (problem.pages or 0))
        lost = lost | (missing & (first[None] < length[:, None])).any(axis=1)
    if new is not None:
        lost = lost | ((length < 1) & (new < 0))
    return lost


def with_layer(inputs: DecodeInputs, problem: DecodeProblem) -> jax.Array:
    """bool[M]: `sequences`, and all of them where the cache does not have the layer."""
    lost = sequences(inputs, problem)
    if problem.layers is not None:
        layer = jnp.asarray(inputs.layer)
        lost = lost | (layer < 0) | (layer >= problem.layers)
    return lost


def results_without_rows(inputs: DecodeInputs, problem: DecodeProblem) -> tuple[Operand, Operand]:
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
