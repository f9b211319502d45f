"""Inputs of each layer beside the residual stream, in Gemma 4's small models (E2B, E4B): an
embedding of the token for each layer, plus a projection of the model's own embedding of it.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from pallas_lm.rows import linear, rms_norm, total

Array = jax.Array
Weights = Mapping[str, Array]


def inputs_of(columns: int, params: Weights, x: Array, tokens: Array, eps: float) -> Array:
    """[layers, M, t, columns] for tokens int32[M, t] whose embedding is x [M, t, D]."""
    known = jnp.take(params["embed_inputs"], tokens, axis=0, mode="clip")
    known *= jnp.asarray(columns**0.5, known.dtype)
    made = linear(x, params["inputs_proj"]) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
    known, made = (rows.reshape(*tokens.shape, -1, columns) for rows in (known, made))
    both = rms_norm(made, params["inputs_norm"], eps) + known
    return jnp.moveaxis(both * jnp.asarray(2**-0.5, both.dtype), -2, 0)


def with_input(x: Array, added: Array, weights: Weights, eps: float) -> tuple[Array, Array]:
    """The residual stream x with `added` and the term that the layer's input adds to it."""
    x += total(added, x.dtype)
    gate = jax.nn.gelu(linear(x, weights["input_gate"]), approximate=True)
    rows = linear(gate * weights["input"], weights["input_out"])
    return x, rms_norm(rows, weights["input_post_norm"], eps)[None]
