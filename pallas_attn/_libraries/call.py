"""`flash_attention` with the arguments that layers of other libraries pass."""

import jax
import jax.numpy as jnp

from pallas_attn._call.checks import Argument
from pallas_attn._libraries.masks import AnyMask, over_batch, sparse
from pallas_attn.attention import flash_attention
from pallas_attn.masks import CAUSAL


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: AnyMask | None = None,
    bias: jax.Array | None = None,
    is_causal: bool = False,
    **options: Argument,
) -> jax.Array:
    """Attention of query `[..., T, N, H]` to key `[..., S, K, H]`, with any leading axes."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 3 or x.shape[:-3] != query.shape[:-3]:
            raise ValueError(
                f"{name}: expected [..., rows, heads, head dim] with leading axes as in query, got "
                f"{list(x.shape)} beside query {list(query.shape)}"
            )
    batch, rows = query.shape[:-3], (query.shape[-3], key.shape[-3])
    seen = sparse(mask, rows)
    seen = seen & CAUSAL if is_causal else seen
    if bias is not None:
        alike = bias.ndim <= 3 or set(bias.shape[:-3]) == {1}
        bias = over_batch(bias, () if alike else batch, 3)
    if not query.dtype == key.dtype == value.dtype:
        dtype = jnp.result_type(query, key, value)
        query, key, value = (x.astype(dtype) for x in (query, key, value))
    q, k, v = (over_batch(x, batch, 3) for x in (query, key, value))
    out = flash_attention(q, k, v, bias=bias, **seen.options(batch), **options)
    return out.reshape(*batch, *out.shape[1:])
