"""Experts beside the MLP (Gemma 4), computed plainly: all of them for every row, weighted by a
router that gives a share to a few and 0 to the others.

The router sees the residual stream, the experts another norm of it; their sum and the result of the
MLP are normalised apart and added up.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from pallas_lm.experts import in_blocks, largest
from pallas_lm.gemma4 import Experts
from pallas_lm.rows import linear, rms_norm

Array = jax.Array


def with_experts(
    experts: Experts, x: Array, result: Array, weights: Mapping[str, Array], eps: float
) -> Array:
    """`result` of the MLP, with that of the experts for rows x [M, t, D] of the residual stream."""
    rows = x.reshape(-1, x.shape[-1])
    added = in_blocks(lambda rows: _experts(experts, rows, weights, eps), rows).reshape(x.shape)
    result = rms_norm(result, weights["mlp_own_norm"], eps)
    return result + rms_norm(added, weights["experts_post_norm"], eps)


def _experts(experts: Experts, x: Array, weights: Mapping[str, Array], eps: float) -> Array:
    shares = _shares(experts, x, weights, eps)
    normed = rms_norm(x, weights["experts_norm"], eps)
    inner = jnp.einsum("rd,ecd->rec", normed, weights["experts_gate_up"])
    gate, up = jnp.split(inner, 2, axis=-1)
    inner = (jax.nn.gelu(gate, approximate=True) * up * shares[..., None]).astype(x.dtype)
    return jnp.einsum("rec,edc->erd", inner, weights["experts_down"]).sum(axis=0)


def _shares(experts: Experts, x: Array, weights: Mapping[str, Array], eps: float) -> Array:
    """float32[rows, experts]: the shares of those that are chosen add up to 1, before each is
    multiplied by its expert's factor.
    """
    scale = weights["router_scale"] * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
    scores = linear(rms_norm(x, scale, eps), weights["router"]).astype(jnp.float32)
    shares = jax.nn.softmax(scores, axis=-1)
    shares = jnp.where(largest(shares, experts.active), shares, 0.0)
    shares /= shares.sum(axis=-1, keepdims=True)
    return shares * weights["expert_scale"][None].astype(jnp.float32)
