"""Flash attention, KV-cache append and decode attention for JAX on NVIDIA GPUs.

Training, in place of `jax.nn.dot_product_attention`:

    flash_attention, flash_attention_with_lse    attention, differentiable
    dot_product_attention                        the same with jax.nn's signature
    Mask, FULL, CAUSAL, sliding_window           who sees whom
    mask_fn, score_fn                            the same, and what becomes of scores, by functions
    Context                                      rows split over the devices of a mesh axis
    merge_attention                              results of some keys each, combined

Serving, inside a jitted step, caches updated in place:

    PerSequenceCache, StackedCache, PagedCache   KV caches: pytrees, each a KVCache
    append_kv; or cache.extend and write_kv      new rows into them; the latter for several layers
    cache.keep                                   of the newest rows, drafts, those that stay
    decode_attention, decode_attention_with_lse  attention of the newest rows to all that is held
    DraftTree                                    drafts of a sequence that form a tree
    Prefix, SharedPrefixes                       rows that several sequences share, read once
    Rotary, RMSNorm                              RoPE and a norm of K and q, on their way
    append_kv_arrays                             the append for those who keep their own arrays

What no implementation takes is an UnsupportedError: who refused, why, and what to do (`Limit`).
Wrong arguments are ValueErrors.
"""

from pallas_attn.append import append_kv, append_kv_arrays, write_kv
from pallas_attn.attention import (
    dot_product_attention,
    flash_attention,
    flash_attention_with_lse,
)
from pallas_attn.cache import KVCache, PagedCache, PerSequenceCache, StackedCache
from pallas_attn.context import Context
from pallas_attn.decode import decode_attention, decode_attention_with_lse
from pallas_attn.errors import Limit, UnsupportedError
from pallas_attn.masks import CAUSAL, FULL, Mask, MaskFunction, mask_fn, sliding_window
from pallas_attn.merge import merge_attention
from pallas_attn.prefixes import Prefix, SharedPrefixes
from pallas_attn.rotary import RMSNorm, Rotary
from pallas_attn.scores import ScoreFunction, score_fn
from pallas_attn.trees import DraftTree

__version__ = "0.1.0"

__all__ = [
    "CAUSAL",
    "Context",
    "DraftTree",
    "FULL",
    "KVCache",
    "Limit",
    "Mask",
    "MaskFunction",
    "PagedCache",
    "PerSequenceCache",
    "Prefix",
    "RMSNorm",
    "Rotary",
    "ScoreFunction",
    "SharedPrefixes",
    "StackedCache",
    "UnsupportedError",
    "append_kv",
    "append_kv_arrays",
    "decode_attention",
    "decode_attention_with_lse",
    "dot_product_attention",
    "flash_attention",
    "flash_attention_with_lse",
    "mask_fn",
    "merge_attention",
    "score_fn",
    "sliding_window",
    "write_kv",
]
