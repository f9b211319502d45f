"""Flash attention, KV-cache append and decode attention for JAX on NVIDIA GPUs."""

from pallas_attn.append import append_kv, append_kv_arrays, write_kv
from pallas_attn.attention import (
    dot_product_attention,
    flash_attention,
    flash_attention_with_lse,
)
from pallas_attn.cache import PagedCache, PerSequenceCache, StackedCache
from pallas_attn.decode import decode_attention, decode_attention_with_lse
from pallas_attn.errors import Limit, UnsupportedError
from pallas_attn.masks import CAUSAL, FULL, Mask, sliding_window

__all__ = [
    "CAUSAL",
    "FULL",
    "Limit",
    "Mask",
    "PagedCache",
    "PerSequenceCache",
    "StackedCache",
    "UnsupportedError",
    "append_kv",
    "append_kv_arrays",
    "decode_attention",
    "decode_attention_with_lse",
    "dot_product_attention",
    "flash_attention",
    "flash_attention_with_lse",
    "sliding_window",
    "write_kv",
]
