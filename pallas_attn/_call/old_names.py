"""Earlier keywords of `flash_attention`, from before values had what belongs together."""

import pathlib
import warnings
from typing import Any, TypedDict

from pallas_attn._call.bind import Call
from pallas_attn.errors import described
from pallas_attn.values import Blocks, Float8, Packed

_PACKAGE = (str(pathlib.Path(__file__).parents[1]),)


class Old(TypedDict, total=False):
    """The keywords, each with the type of the field that it became."""

    q_starts: Any
    kv_starts: Any
    block_size: Any
    rotary_positions: Any
    q_scale: Any
    k_scale: Any
    v_scale: Any
    out_dtype: Any


# The new spelling by the argument that has the value, and the keywords that it replaces.
_NOW: dict[str, tuple[str, tuple[str, ...]]] = {
    "packed": ("packed=pa.Packed(q_starts, kv_starts)", ("q_starts", "kv_starts")),
    "kv_blocks": ("kv_blocks=pa.Blocks(kv_blocks, block_size)", ("block_size",)),
    "rotary": ("rotary=rotary.at(positions)", ("rotary_positions",)),
    "float8": (
        "float8=pa.Float8(q_scale=.., k_scale=.., v_scale=.., out_dtype=..)",
        ("q_scale", "k_scale", "v_scale", "out_dtype"),
    ),
}


def renamed(call: Call, old: Old) -> Call:
    """The call with values in place of old keywords, each of which warns."""
    known = [name for _, names in _NOW.values() for name in names]
    for name in old:
        if name not in known:
            raise TypeError(f"flash_attention() got an unexpected keyword argument {name!r}")
    said: dict[str, Any] = {name: x for name, x in old.items() if x is not None}
    for argument, (now, names) in _NOW.items():
        some: dict[str, Any] = {name: said[name] for name in names if name in said}
        value, first = getattr(call, argument), next(iter(some), argument)
        of_array = argument == "kv_blocks" and value is not None and not isinstance(value, Blocks)
        if not (some or of_array):
            continue
        if argument in ("kv_blocks", "rotary") and value is None:
            raise ValueError(
                f"{first}: expected None without {argument}, got {described(some[first])}"
            )
        if isinstance(value, (Packed, Blocks, Float8)) or value is True:
            raise ValueError(f"{first}: expected None beside {argument}, got both; write {now}")
        text = f"flash_attention: {first} is an old keyword, which goes; write {now}"
        warnings.warn(text, DeprecationWarning, skip_file_prefixes=_PACKAGE)
        if argument == "packed":
            starts: list[Any] = [some.get(name) for name in names]
            value = Packed(*starts)
        elif argument == "kv_blocks":
            value = Blocks(value, some.get("block_size", 128))
        else:
            value = value.at(*some.values()) if argument == "rotary" else Float8(**some)
        call = call._replace(**{argument: value})
    return call
