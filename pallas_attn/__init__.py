"""Flash attention, KV-cache append and decode attention for JAX."""

from pallas_attn.errors import Limit, UnsupportedError
from pallas_attn.masks import CAUSAL, FULL, Mask, sliding_window

__all__ = ["CAUSAL", "FULL", "Limit", "Mask", "UnsupportedError", "sliding_window"]
