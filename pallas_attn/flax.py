"""Attention of `flax.linen` and `flax.nnx`: pass `attention_fn` to their layers.

    from pallas_attn.flax import attention_fn, make_causal_mask

    layer = linen.MultiHeadDotProductAttention(num_heads=8, attention_fn=attention_fn)
    layer.apply(variables, x, mask=make_causal_mask(tokens))

The functions that make masks have the names and arguments of Flax's, and keep masks sparse under
`jax.jit`, where the numbers of an array are not known. Masks that Flax makes work as well.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_attn._call.checks import Precision
from pallas_attn._libraries.call import attend
from pallas_attn._libraries.masks import AnyMask, Array, Ids, SparseMask, of_segments, over_batch
from pallas_attn.masks import CAUSAL
from pallas_attn.rotary import Rotary

__all__ = ["SparseMask", "attention_fn", "combine_masks", "make_attention_mask", "make_causal_mask"]


def attention_fn(  # noqa: PLR0913
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: AnyMask | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: Precision = None,
    module: object = None,
    force_fp32_for_softmax: bool = True,
    einsum_dot_general: object = None,
    qk_attn_weights_einsum: object = None,
    attn_weights_value_einsum: object = None,
    input_positions: jax.Array | None = None,
    is_causal: bool = False,
    segment_ids: Ids | None = None,
    rotary: Rotary | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """`dot_product_attention` of linen and of nnx, with the same arguments.

    Args:
      query: `[..., T, N, H]`; key and value `[..., S, K, H]`, where K divides N.
      mask: an array `[..., N or 1, T, S]` of bool or of 0 and 1, a `Mask`, a `mask_fn`, or a
        `SparseMask` that the functions below make. Arrays whose numbers are known (made outside of
        `jax.jit`) become bands, lengths and segment ids where they equal these; traced arrays
        become segment ids where T or S is 1.
      dropout_rate: dropout of attention weights; a ValueError unless 0 or `deterministic`.
      module: must be None, since attention weights are never computed as a whole.
      segment_ids: integers `[..., T]`, or a pair for queries and keys: a query sees keys of its own
        segment. No layer passes it: use `functools.partial`, or the mask
        `make_attention_mask(ids, ids, jnp.equal)`, which means the same.
      rotary: RoPE of queries and keys, as in `flash_attention`; by `functools.partial` too.
      input_positions: integers `[..., T]`, positions of queries and keys for `rotary`.
      implementation: as in `flash_attention`.

    linen passes only arguments that the signature names, so it names all of them.
    """
    del broadcast_dropout, dropout_rng, force_fp32_for_softmax
    if dropout_rate and not deterministic:
        raise ValueError(
            f"dropout_rate: {dropout_rate} of attention weights: use 0, or deterministic=True"
        )
    if module is not None:
        raise ValueError("sow_weights: attention weights are never computed as a whole")
    if input_positions is not None and rotary is None:
        raise ValueError("input_positions: expected None without rotary")
    if einsum_dot_general or qk_attn_weights_einsum or attn_weights_value_einsum:
        raise ValueError("einsum: the products of attention are the kernel's own")
    if dtype is not None:
        query, key, value = (x.astype(dtype) for x in (query, key, value))
    if segment_ids is not None:
        mask = of_segments(segment_ids, (query.shape[-3], key.shape[-3]), mask)
    if rotary is not None and input_positions is not None:
        rotary = rotary.at(over_batch(input_positions, query.shape[:-3], 1))
    options = {"rotary": rotary, "precision": precision, "implementation": implementation}
    return attend(query, key, value, mask, bias, is_causal, **options)


def make_attention_mask(
    query_input: Array,
    key_input: Array,
    pairwise_fn: Callable[[Any, Any], Any] = jnp.multiply,
    extra_batch_dims: int = 0,
    dtype: DTypeLike = jnp.float32,
) -> SparseMask | jax.Array:
    """Flax's function of this name. The result is sparse where `pairwise_fn` is `jnp.multiply` or
    `jnp.logical_and` (queries and keys that count) or, for integers, `jnp.equal` (segments); else
    it is the array that Flax makes, of `dtype`.
    """
    rows = query_input.shape[-1], key_input.shape[-1]
    q, kv = (jnp.asarray(x)[(None,) * extra_batch_dims] for x in (query_input, key_input))
    if pairwise_fn in (jnp.multiply, jnp.logical_and, operator.mul):
        return SparseMask(rows, q_counts=q.astype(bool), kv_counts=kv.astype(bool))
    integers = all(jnp.issubdtype(x.dtype, jnp.integer) for x in (q, kv))
    if pairwise_fn in (jnp.equal, operator.eq) and integers:
        return SparseMask(rows, ids=(q, kv))
    return pairwise_fn(q[..., None, :, None], kv[..., None, None, :]).astype(dtype)


def make_causal_mask(
    x: Array, extra_batch_dims: int = 0, dtype: DTypeLike = jnp.float32
) -> SparseMask:
    """Flax's function of this name: each of `x.shape[-1]` queries sees itself and earlier keys."""
    del extra_batch_dims, dtype
    return SparseMask((x.shape[-1], x.shape[-1]), CAUSAL)


def combine_masks(
    *masks: SparseMask | Array | None, dtype: DTypeLike = jnp.float32
) -> SparseMask | Array | None:
    """Flax's function of this name: the keys that all masks show; sparse if any mask is."""
    sparse = [mask for mask in masks if isinstance(mask, SparseMask)]
    arrays = [mask for mask in masks if mask is not None and not isinstance(mask, SparseMask)]
    if sparse:
        return functools.reduce(operator.and_, [*sparse, *arrays])
    return jnp.asarray(functools.reduce(jnp.logical_and, arrays)).astype(dtype) if arrays else None
