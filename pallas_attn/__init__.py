"""Flash attention, KV-cache append and decode attention for JAX on NVIDIA GPUs.

Training, in place of `jax.nn.dot_product_attention`:

    flash_attention, flash_attention_with_lse    attention, differentiable
    dot_product_attention                        the same with jax.nn's signature
    Mask, FULL, CAUSAL, sliding_window           masks by position
    mask_fn, score_fn                            masks and scores as functions of positions
    Picture                                      what `show` of a mask or a score function draws
    Packed, Blocks, Float8                       packed rows; block lists; scales of 8-bit numbers
    Context                                      rows split over the devices of a mesh axis
    merge_attention                              results over different keys, combined
    quantize_qkv                                 q, k and v in float8, for flash_attention

Serving, inside a jitted step, caches updated in place:

    PerSequenceCache, StackedCache, PagedCache   KV caches: pytrees, each a KVCache
    append_kv; or cache.extend and write_kv      write new rows; the latter for several layers
    cache.keep                                   keep some of the newest rows (drafts)
    decode_attention, decode_attention_with_lse  attention of the newest rows to the cache
    DraftTree                                    drafts of a sequence that form a tree
    Prefix, SharedPrefixes                       rows that several sequences share, read once
    Rotary, RMSNorm                              RoPE and a norm of K and q
    append_kv_arrays                             append to arrays of your own
    ragged_paged_attention, update_kv_pages      pages with K and V interleaved, as in JAX on TPUs

Layers of other libraries: `pallas_attn.flax`, `.keras`, `.equinox` and `.tokamax`, each imported by
itself.

A problem that no implementation takes is an UnsupportedError that names reasons and remedies
(`Limit`); `check_for` raises it without a GPU. Wrong arguments are ValueErrors.
"""

from pallas_attn import _jax_versions  # noqa: F401  # first: it warns of a jax that others may fail on
from pallas_attn.append import append_kv, append_kv_arrays, write_kv
from pallas_attn.attention import (
    dot_product_attention,
    flash_attention,
    flash_attention_with_lse,
)
from pallas_attn.cache import KVCache, PagedCache, PerSequenceCache, StackedCache
from pallas_attn.check import check_for
from pallas_attn.context import Context
from pallas_attn.decode import decode_attention, decode_attention_with_lse
from pallas_attn.devices import chosen, gpu_generation, overlapping
from pallas_attn.errors import Limit, UnsupportedError
from pallas_attn.float8 import QuantizedQKV, quantize_qkv
from pallas_attn.masks import (
    CAUSAL,
    FULL,
    Mask,
    MaskFunction,
    Picture,
    mask_fn,
    sliding_window,
)
from pallas_attn.merge import merge_attention
from pallas_attn.prefixes import Prefix, SharedPrefixes
from pallas_attn.ragged import ragged_paged_attention, update_kv_pages
from pallas_attn.rotary import RMSNorm, Rotary
from pallas_attn.scores import ScoreFunction, score_fn
from pallas_attn.trees import DraftTree
from pallas_attn.tuning import tuned
from pallas_attn.values import Blocks, Float8, Packed

__version__ = "0.2.0"

__all__ = [
    "Blocks",
    "CAUSAL",
    "Context",
    "DraftTree",
    "FULL",
    "Float8",
    "KVCache",
    "Limit",
    "Mask",
    "MaskFunction",
    "Packed",
    "PagedCache",
    "PerSequenceCache",
    "Picture",
    "Prefix",
    "QuantizedQKV",
    "RMSNorm",
    "Rotary",
    "ScoreFunction",
    "SharedPrefixes",
    "StackedCache",
    "UnsupportedError",
    "append_kv",
    "append_kv_arrays",
    "check_for",
    "chosen",
    "decode_attention",
    "decode_attention_with_lse",
    "dot_product_attention",
    "flash_attention",
    "flash_attention_with_lse",
    "gpu_generation",
    "mask_fn",
    "merge_attention",
    "overlapping",
    "quantize_qkv",
    "ragged_paged_attention",
    "score_fn",
    "sliding_window",
    "tuned",
    "update_kv_pages",
    "write_kv",
]
