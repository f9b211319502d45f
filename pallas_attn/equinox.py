"""Equinox: `MultiheadAttention`, and `dot_product_attention` for layers of your own.

from pallas_attn.equinox import MultiheadAttention

layer = MultiheadAttention(num_heads=8, query_size=512, key=key)
layer(x, x, x, is_causal=True)
"""

from collections.abc import Callable

import jax

try:
    import equinox as eqx
except ImportError as error:
    raise ImportError("pallas_attn.equinox: expected Equinox: pip install equinox") from error

from pallas_attn._libraries.call import attend
from pallas_attn._libraries.masks import AnyMask, Ids, of_segments

__all__ = ["MultiheadAttention", "dot_product_attention"]


class MultiheadAttention(eqx.nn.MultiheadAttention):
    """`eqx.nn.MultiheadAttention` with `flash_attention` inside: it has the same arguments, and the
    same parameters for a key. Dropout of attention weights is a ValueError except in inference.
    """

    def __call__(  # noqa: PLR0913
        self,
        query: jax.Array,
        key_: jax.Array,
        value: jax.Array,
        mask: AnyMask | None = None,
        *,
        key: jax.Array | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Callable | None = None,
        is_causal: bool = False,
        segment_ids: Ids | None = None,
    ) -> jax.Array:
        """The arguments of Equinox's layer, and those of `dot_product_attention` below."""
        inference = inference if deterministic is None else deterministic
        pairs = ((self.query_proj, query), (self.key_proj, key_), (self.value_proj, value))
        heads = [jax.vmap(proj)(x).reshape(len(x), self.num_heads, -1) for proj, x in pairs]
        if process_heads is not None:
            shapes = [x.shape for x in heads]
            heads = process_heads(*heads)
            if [x.shape for x in heads] != shapes:
                raise ValueError("process_heads must not change the shape of the heads.")
        q, k, v = heads
        out = dot_product_attention(
            q,
            k,
            v,
            mask,
            self.dropout,
            key=key,
            inference=inference,
            is_causal=is_causal,
            segment_ids=segment_ids,
        )
        return jax.vmap(self.output_proj)(out.reshape(len(query), -1))


def dot_product_attention(  # noqa: PLR0913
    query: jax.Array,
    key_: jax.Array,
    value: jax.Array,
    mask: AnyMask | None = None,
    dropout: "eqx.nn.Dropout | None" = None,
    *,
    key: jax.Array | None = None,
    inference: bool | None = None,
    is_causal: bool = False,
    segment_ids: Ids | None = None,
) -> jax.Array:
    """The attention function within Equinox's layer, for one head `[T, H]`, which may be under
    `jax.vmap`, or for queries `[T, N, H]` and keys `[S, K, H]`, where K divides N.

    Args:
      mask: an array `[T, S]` or `[N, T, S]`, or a `Mask` or `mask_fn`. A known array (not traced)
        becomes a band, lengths or segment ids where it equals one.
      dropout: the layer's; a ValueError unless its p is 0 or `inference` holds.
      segment_ids: integers `[T]`, or a pair for queries and keys.
    """
    del key
    if dropout is not None:
        inference = dropout.inference if inference is None else inference
        if dropout.p and not inference:
            raise ValueError(
                f"dropout_p: {dropout.p} of attention weights: use 0, or inference=True"
            )
    one_head = query.ndim == 2
    q, k, v = (x[:, None] if one_head else x for x in (query, key_, value))
    if segment_ids is not None:
        mask = of_segments(segment_ids, (len(q), len(k)), mask)
    out = attend(q, k, v, mask, None, is_causal)
    return out[:, 0] if one_head else out
