"""The buffers of a cache: their sizes, as kernels can read them, and arrays of zeros."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._call import checks, device
from pallas_attn._call.byte_rows import BYTE_DTYPE, BYTE_ROW, SCALE_COLUMNS
from pallas_attn._call.problem import MOST_ROWS, QUANTIZED
from pallas_attn._mesh import sharding
from pallas_attn.context import Context, checked, mapped_shards

Array = jax.Array

BYTE_ROWS_UNIT = 64  # rows of a kv tile, which come whole to where rows of bytes are read


@dataclasses.dataclass(frozen=True)
class Buffers:
    """The arguments of `create` about the rows of a cache, and the buffers that follow."""

    head_dim: int
    v_head_dim: int | None
    layers: int | None
    dtype: Any
    scales: bool | int | None
    shared_kv: bool
    context: Context | None = None

    def __post_init__(self):
        context = checked(self.context)
        if context is not None and context.order != "contiguous":
            raise ValueError(
                f"context: expected order 'contiguous' for a cache, whose rows arrive one after "
                f"the other, got {context.order!r}"
            )
        checks.positive(head_dim=self.head_dim)
        checks.positive(none=True, v_head_dim=self.v_head_dim, layers=self.layers)
        checks.cache_dtype("dtype", self.dtype)
        checks.boolean("shared_kv", self.shared_kv)
        if self.byte_rows:
            self._check_byte_rows()
        elif self.scales is not None:
            checks.boolean("scales", self.scales)
        if self.scales and jnp.dtype(self.dtype).name not in QUANTIZED:
            raise ValueError(
                f"scales: expected a dtype of {', '.join(QUANTIZED)} to go with them, got "
                f"{jnp.dtype(self.dtype)}; leave scales out"
            )
        if self.shared_kv and (self.v_head_dim or 0) > self.head_dim:
            raise ValueError(
                f"v_head_dim: expected at most head_dim = {self.head_dim} where V is part of K "
                f"(shared_kv), got {self.v_head_dim}"
            )

    @property
    def byte_rows(self) -> bool:
        """Whether a row is the bytes of `BYTE_ROW`."""
        return type(self.scales) is int and self.scales == SCALE_COLUMNS

    def _check_byte_rows(self) -> None:
        row, dtype = BYTE_ROW, jnp.dtype(self.dtype).name
        got = dtype, self.head_dim, self.v_head_dim, bool(self.shared_kv)
        if got != (BYTE_DTYPE, row.v_head_dim + row.rest, row.v_head_dim, True):
            raise ValueError(
                f"scales: {SCALE_COLUMNS}, a scale for so many columns of V, goes with dtype "
                f"{BYTE_DTYPE}, head_dim {row.v_head_dim + row.rest}, v_head_dim "
                f"{row.v_head_dim} and shared_kv=True (FlashMLA's rows of {row.size} bytes), got "
                f"{got[0]}, {got[1]}, {got[2]} and shared_kv={got[3]}; leave scales out for a "
                "scale a row"
            )

    @property
    def quantized(self) -> bool:
        if self.scales is None:
            return jnp.dtype(self.dtype).name in QUANTIZED
        return bool(self.scales)

    @property
    def static(self) -> dict[str, Any]:
        """The fields v_columns and dims."""
        dims = self.head_dim, self.v_head_dim or self.head_dim
        return ({} if self.context is None else {"context": self.context}) | {
            "v_columns": dims[1] if self.shared_kv else None,
            "dims": None if dims == self._stored and not self.byte_rows else dims,
        }

    @property
    def _stored(self) -> tuple[int, int]:
        """Columns of K and of V, in units that kernels read where a GPU is the default device."""
        dims = self.head_dim, self.v_head_dim or self.head_dim
        if self.shared_kv or device.gpu_generation() is None:
            return dims
        k_unit, v_unit = (64, 16) if self.quantized else (8, 8)
        return _round_up(dims[0], k_unit), _round_up(dims[1], v_unit)

    def block(self, name: str, capacity: int) -> int:
        """Rows of a sequence of this capacity in the buffers: within shard_map, of one device."""
        shards = mapped_shards(self.context) or 1
        if capacity > MOST_ROWS:
            raise ValueError(
                f"{name}: expected at most {MOST_ROWS} rows, which an int32 counts, got {capacity}"
            )
        if capacity % shards:
            raise ValueError(
                f"{name}: expected a multiple of the {shards} devices that rows are split over, "
                f"got {capacity}"
            )
        wanted = capacity // shards
        if device.gpu_generation() is None:
            return wanted
        unit = 8 if self.shared_kv else 4 if self.quantized else 1
        if self.byte_rows and name != "page_size":
            unit = BYTE_ROWS_UNIT
        return _round_up(wanted, unit)

    def arrays(self, *shape: int) -> dict[str, Array]:
        """Zeros for the fields k, v, k_scale and v_scale that the cache has; `shape` has no layers
        and no head dim.
        """
        shape = shape if self.layers is None else (self.layers, *shape)
        k_dim, v_dim = self._stored
        if self.byte_rows:
            buffers = {"k": jnp.zeros((*shape, BYTE_ROW.size), jnp.uint8)}
        else:
            buffers = {"k": jnp.zeros((*shape, k_dim), self.dtype)}
        if not self.shared_kv:
            buffers["v"] = jnp.zeros((*shape, v_dim), self.dtype)
        if self.quantized and not self.byte_rows:
            sides = tuple(buffers)
            buffers |= {f"{side}_scale": jnp.zeros(shape, jnp.float32) for side in sides}
        if self.context is None or mapped_shards(self.context) is None:
            return buffers
        axes = frozenset({self.context.axis})  # a loop's carry must keep its type
        return {name: sharding.varying_along(x, axes) for name, x in buffers.items()}


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
