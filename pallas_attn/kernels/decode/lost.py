"""Which sequences are NaN, by XLA: for calls whose rows become sequences of their own (packed rows
over a latent cache, tokens by index) or are copied.
"""

import jax
import jax.numpy as jnp

from pallas_attn._call.problem import DecodeInputs, DecodeProblem


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
