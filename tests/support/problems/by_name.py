"""`flash_attention` with the arrays of its values (`Packed`, `Blocks`, `Float8`, `Rotary.at`) by
names of their own: tests draw, split and compare them one by one.
"""

from typing import Any

import pallas_attn as pa

_SCALES = ("q_scale", "k_scale", "v_scale", "out_dtype")
_NAMES = (*_SCALES, "q_starts", "kv_starts", "rotary_positions", "kv_blocks", "block_size")


def values(named: dict[str, Any]) -> dict[str, Any]:
    """Options with these names as options of `flash_attention`."""
    options = {name: x for name, x in named.items() if name not in _NAMES or x is not None}
    if {"q_starts", "kv_starts"} & options.keys():
        starts = (options.pop(name, None) for name in ("q_starts", "kv_starts"))
        options["packed"] = pa.Packed(*starts)
    if scales := {name: options.pop(name) for name in _SCALES if name in options}:
        options["float8"] = pa.Float8(**scales)
    if "rotary_positions" in options and options.get("rotary") is not None:
        options["rotary"] = options["rotary"].at(options.pop("rotary_positions"))
    if (lists := options.pop("kv_blocks", None)) is not None:
        options["kv_blocks"] = pa.Blocks(lists, options.pop("block_size", 128))
    return options


def flash_attention(*qkv: Any, **named: Any) -> Any:
    return pa.flash_attention(*qkv, **values(named))


def flash_attention_with_lse(*qkv: Any, **named: Any) -> Any:
    return pa.flash_attention_with_lse(*qkv, **values(named))
