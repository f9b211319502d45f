"""An implementation for `tokamax.dot_product_attention`:

from pallas_attn.tokamax import implementation

tokamax.dot_product_attention(q, k, v, is_causal=True, implementation=[implementation])
tokamax.dot_product_attention(q, k, v, implementation=[implementation, "mosaic", "xla"])
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._call.checks import Argument
from pallas_attn._libraries.call import attend
from pallas_attn._libraries.masks import SparseMask, sparse
from pallas_attn.masks import Mask

__all__ = ["implementation"]

# Arguments of tokamax's operation that are not supported, with the values by which they are unused.
_UNUSED: dict[str, Any] = {
    "dropout_mask": None,
    "dropout_rate": 0.0,
    "paging_info": None,
    "q_sharding": None,
    "k_sharding": None,
    "q_indices": None,
    "k_indices": None,
    "normalize_output": True,
    "return_residuals": False,
}


def implementation(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    bias: jax.Array | None = None,
    mask: Argument = None,
    logits_soft_cap: float | None = None,
    logits_scale: float | type | None = None,
    **options: Argument,
) -> jax.Array:
    """One of the `implementation`s of `tokamax.dot_product_attention`.

    A problem that no kernel takes is a NotImplementedError, at which tokamax goes on to the next in
    the list. So are quantised arrays, `q_sharding` (kernels are split as their arrays are), and a
    `logits_soft_cap` beside a bias: tokamax adds the bias before the softcap, kernels after it.
    """
    for name, x in (("query", q), ("key", k), ("value", v)):
        if not isinstance(x, jax.Array):
            raise NotImplementedError(f"{name}: expected an array, got {type(x).__name__}")
    precision = options.pop("precision", None)
    for name, value in options.items():
        if name != "logits_dtype" and (name not in _UNUSED or value != _UNUSED[name]):
            raise NotImplementedError(f"{name}: not supported by pallas_attn")
    if bias is not None and logits_soft_cap is not None:
        raise NotImplementedError("logits_soft_cap: not supported by pallas_attn beside a bias")
    rows = q.shape[-3], k.shape[-3]
    return attend(
        q,
        k,
        v,
        _mask(mask, rows),
        bias,
        scale=None if isinstance(logits_scale, type) else logits_scale,  # a class says "auto"
        softcap=logits_soft_cap,
        precision=precision,
    )


def _mask(mask: Argument, rows: tuple[int, int]) -> SparseMask:
    """A `Mask` of tokamax as a sparse one: its band, its lengths where all heads and rows have the
    same, and an array for the rest.
    """
    if mask is None or isinstance(mask, jax.Array):
        return sparse(mask, rows)
    mask, band, array = mask.take("causal_mask", "bool_mask")
    kept = sparse(array, rows)
    if band is not None:
        left = None if band.window_size is None else band.window_size - 1 - band.offset
        kept &= Mask(left, band.offset)
    for end, lengths in (("q_end", "q_lengths"), ("k_end", "kv_lengths")):
        value = getattr(mask, end)
        if value is not None and jnp.shape(value)[-2:] == (1, 1):
            mask, value = mask.take(end)
            kept &= SparseMask(rows, **{lengths: value[..., 0, 0]})
    return kept & mask.as_array(*rows) if mask else kept
