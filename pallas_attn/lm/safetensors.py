"""The safetensors format in NumPy: a header of JSON, then the bytes of every tensor.

Eight bytes give the header's length; the header maps a name to a type, a shape and where its bytes
lie after the header. Reading maps the file, so that a tensor costs nothing until it is looked at.
"""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

# numpy has no bfloat16 of its own; jax brings one that it understands.
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": jnp.dtype(jnp.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Every tensor of a file by name, mapped. A ValueError says what is wrong with the file."""
    path = pathlib.Path(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        if size < 8 or start > size:
            raise ValueError(f"{path}: truncated: its header ends at byte {start}, it has {size}")
        header = _header(path, file.read(start - 8))
    buffer = np.memmap(path, np.uint8, "r", start) if size > start else np.zeros(0, np.uint8)
    return {name: _tensor(path, name, entry, buffer) for name, entry in header.items()}


def _header(path: pathlib.Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
    except (ValueError, AttributeError):
        raise ValueError(f"{path}: its header is not the JSON of a safetensors file") from None
    return header


def _tensor(path: pathlib.Path, name: str, entry: Any, buffer: np.ndarray) -> np.ndarray:
    try:
        kind, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path}: {name} has no dtype, shape and data_offsets") from None
    if kind not in _DTYPES:
        raise ValueError(f"{path}: {name} is of type {kind}; read are {', '.join(_DTYPES)}")
    dtype = _DTYPES[kind]
    if last > buffer.size:
        raise ValueError(
            f"{path}: truncated: {name} ends at byte {last} of the data, which has {buffer.size}"
        )
    wanted = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    if first < 0 or last - first != wanted:
        raise ValueError(
            f"{path}: {name} of type {kind} and shape {list(shape)} takes {wanted} bytes, got "
            f"{last - first}"
        )
    return buffer[first:last].view(dtype).reshape(shape)


def write(
    path: str | os.PathLike[str],
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Tensors into a file, in the order that they come."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        shape, kind = list(tensor.shape), _NAMES[tensor.dtype]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    with pathlib.Path(path).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).tobytes())
