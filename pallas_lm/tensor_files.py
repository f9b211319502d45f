"""Files in the format of safetensors, by NumPy: 8 bytes with the length of a header, the header of
JSON with the type, the shape and the place of each tensor, then the numbers.
"""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_lm.folder import shown

_TYPES: dict[str, Any] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": jnp.bfloat16, "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2, "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1",
    "BOOL": "?",
}  # fmt: skip
_LONGEST = 10**8  # bytes of a header


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The tensors of a file, mapped into memory. ValueError for one that is not what its header
    says: tensors lie one behind the other, and nothing beside them.
    """
    try:
        return _read(np.memmap(path, np.uint8, "r").view(np.ndarray))
    except RecursionError:
        raise ValueError(f"{path}: header: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {shown(str(error))[1:-1]}") from None


def _read(data: np.ndarray) -> dict[str, np.ndarray]:
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > min(len(data) - 8, _LONGEST):
        raise ValueError(f"header: expected {length} bytes, got {max(len(data) - 8, 0)}")
    try:
        header = json.loads(data[8 : 8 + length].tobytes().decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"header: not JSON: {error}") from None
    if not isinstance(header, dict):
        raise ValueError(f"header: expected an object, got {shown(header)}")
    header.pop("__metadata__", None)
    numbers, places, tensors = data[8 + length :], {}, {}
    for name, entry in header.items():
        match entry:
            case {"dtype": str(kind), "shape": [*sizes], "data_offsets": [int(start), int(end)]}:
                good = kind in _TYPES and all(type(n) is int and n >= 0 for n in sizes)
                if good and end - start == np.dtype(_TYPES[kind]).itemsize * math.prod(sizes):
                    places[name] = start, end, _TYPES[kind], sizes
        if name not in places:
            raise ValueError(f"header: {shown(name)}: no type, shape and place: {shown(entry)}")
    last = 0
    for name, (start, end, kind, sizes) in sorted(places.items(), key=lambda item: item[1][:2]):
        if start != last:
            raise ValueError(f"header: {shown(name)}: expected data_offsets from {last} on")
        tensors[name], last = numbers[start:end], end
        if end <= len(numbers):
            tensors[name] = tensors[name].view(kind).reshape(sizes)
    if last != len(numbers):
        raise ValueError(f"header: expected data_offsets to the end, {len(numbers)}, got {last}")
    return tensors


def write(path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray]) -> None:
    """A file of these tensors."""
    names = {np.dtype(kind): name for name, kind in _TYPES.items()}
    header, end = {}, 0
    for name, x in tensors.items():
        place = {"data_offsets": [end, end + x.nbytes]}
        header[name] = {"dtype": names[x.dtype], "shape": list(x.shape), **place}
        end += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for x in tensors.values():
            file.write(x.tobytes())
