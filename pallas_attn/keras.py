"""Layers of Keras 3, with the backend jax: `MultiHeadAttention` and `GroupQueryAttention`.

    from pallas_attn.keras import MultiHeadAttention

They have the arguments and the weights of Keras's layers and are saved in the same way. Masks that
Keras makes (padding, `use_causal_mask`, `sliding_window`) never become T x S numbers.
"""

import jax
import numpy as np

try:
    import keras
except ImportError as error:
    raise ImportError(
        "pallas_attn.keras: expected Keras 3 with the backend jax: pip install keras, and set "
        "KERAS_BACKEND=jax before keras is imported"
    ) from error

from pallas_attn._libraries.call import attend
from pallas_attn._libraries.masks import AnyMask, Array, SparseMask, sparse
from pallas_attn.masks import CAUSAL, Mask

__all__ = ["GroupQueryAttention", "MultiHeadAttention"]

if keras.backend.backend() != "jax":
    raise ImportError(
        f'pallas_attn.keras: expected the backend "jax", got "{keras.backend.backend()}"; set '
        "KERAS_BACKEND=jax before keras is imported"
    )


@keras.saving.register_keras_serializable("pallas_attn")
class MultiHeadAttention(keras.layers.MultiHeadAttention):
    """`keras.layers.MultiHeadAttention` with `flash_attention` inside. Dropout of attention weights
    in training, attention scores and several attention axes are ValueErrors.
    """

    def _compute_attention_mask(self, query, value, attention_mask=None, **masks):
        window = getattr(self, "_sliding_window", None)
        return _mask(query, value, attention_mask, window, **masks)

    def _compute_attention(
        self,
        query,
        key,
        value,
        attention_mask=None,
        training=None,
        return_attention_scores=False,
        use_causal_mask=False,
    ):
        _refuse(self._dropout, training, return_attention_scores)
        if len(query.shape) != 4:
            raise ValueError(f"attention_axes: expected one axis, got {self._attention_axes}")
        scale = self._inverse_sqrt_key_dim
        return attend(query, key, value, attention_mask, None, use_causal_mask, scale=scale), None


@keras.saving.register_keras_serializable("pallas_attn")
class GroupQueryAttention(keras.layers.GroupQueryAttention):
    """`keras.layers.GroupQueryAttention` with `flash_attention` inside, limited as
    `MultiHeadAttention` is.
    """

    def _compute_attention_mask(self, query, value, attention_mask=None, **masks):
        window = getattr(self, "sliding_window", None)
        return _mask(query, value, attention_mask, window, **masks)

    def _compute_attention(
        self, query, key, value, attention_mask=None, training=None, use_causal_mask=False
    ):
        _refuse(self.dropout, training, self._return_attention_scores)
        # Keras repeats K and V for all query heads; kernels share them.
        key, value = (x[:, :, :: self.num_repeats] for x in (key, value))
        scale = self._inverse_sqrt_head_dim
        return attend(query, key, value, attention_mask, None, use_causal_mask, scale=scale), None


def _mask(
    query: jax.Array,
    value: jax.Array,
    attention_mask: AnyMask | None,
    window: int | None,
    query_mask: Array | None = None,
    value_mask: Array | None = None,
    key_mask: Array | None = None,
    use_causal_mask: bool = False,
) -> SparseMask:
    """The masks of a layer, combined. `window`: a query sees keys closer than this, before and
    after it.
    """
    rows = query.shape[1], value.shape[1]
    if isinstance(attention_mask, (jax.Array, np.ndarray)) and attention_mask.ndim == 3:
        attention_mask = attention_mask[:, None]  # [B, T, S], for all heads
    mask = sparse(attention_mask, rows)
    if query_mask is not None:
        mask &= SparseMask(rows, q_counts=keras.ops.cast(query_mask, "bool"))
    for counts in (value_mask, key_mask):
        if counts is not None:
            mask &= SparseMask(rows, kv_counts=keras.ops.cast(counts, "bool"))
    mask = mask & CAUSAL if use_causal_mask else mask
    return mask if window is None else mask & Mask(window - 1, window - 1)


def _refuse(dropout: float, training: bool | None, return_attention_scores: bool) -> None:
    if dropout and training:
        raise ValueError(f"dropout: {dropout} of attention weights in training: use 0")
    if return_attention_scores:
        raise ValueError("return_attention_scores: they are never computed as a whole")
