"""What the three KV caches share: lengths, sizes read off the arrays, and how buffers are made."""

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn import _checks, _device, _sharding
from pallas_attn._problem import QUANTIZED

Array = jax.Array

NOT_EXTENDED = -1  # in new_lengths


class KVCache:
    """What the three caches share, and what a function that takes any of them says it takes.

    A pytree: `lengths` int32[M] are the rows taken in each sequence, `new_lengths` those that the
    latest `extend` took; `k`, `v` and their scales are the buffers, laid out as each cache says.
    """

    kind: ClassVar[str]
    k: Any
    v: Any  # None where V is the first `v_columns` columns of K
    k_scale: Any  # float32, as k without its last axis: a row is its numbers times its scale;
    v_scale: Any  # None where numbers are stored as they come (and v_scale where v is)
    v_columns: int | None
    dims: tuple[int, int] | None  # head dims of K and V where the buffers are wider, else None
    lengths: Array  # int32[M]: the rows taken in each sequence now, written or not
    # int32[M]: the rows that the latest extend took, which write_kv fills; NOT_EXTENDED where no
    # extend has been since the sequence was made or emptied
    new_lengths: Array
    page_table: Any  # int32[M, W] of a PagedCache; None in the others

    def __repr__(self) -> str:
        """Sizes alone: the numbers may be gigabytes, or not known yet."""
        try:
            return f"{type(self).__name__}({', '.join(self._facts())})"
        except (AttributeError, IndexError, TypeError):  # leaves that are no arrays
            return f"{type(self).__name__}(...)"

    def _facts(self) -> list[str]:
        least, most = min(self.capacities), max(self.capacities)
        rows = f"{most} rows" if least == most else f"{least} to {most} rows"
        dims = str(self.head_dim)
        if self.v_head_dim != self.head_dim or self.shared_kv:
            dims += f", V of {self.v_head_dim}" + (" within K" if self.shared_kv else "")
        return [
            f"{self.num_sequences} sequences of {rows}",
            *([] if self.layers is None else [f"{self.layers} layers"]),
            f"{self.kv_heads} kv heads of {dims}",
            str(self.dtype) + (" with scales" if self.quantized else ""),
            *([] if self.pages is None else [f"{self.pages} pages of {self.page_size} rows"]),
        ]

    @property
    def _k_arrays(self) -> tuple[Array, ...]:
        return self.k if isinstance(self.k, tuple) else (self.k,)

    def _with(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    @property
    def page_size(self) -> Any:
        """Rows of a page; None where there are no pages."""
        return None

    @property
    def pages(self) -> Any:
        """Pages of the pool; None where there is none."""
        return None

    @property
    def num_sequences(self) -> int:
        return self.lengths.shape[0]

    @property
    def layers(self) -> int | None:
        """How many layers the buffers hold; None where they have no layer axis."""
        sample = self._k_arrays[0]
        plain = 3 if isinstance(self.k, tuple) else 4
        return None if sample.ndim == plain else sample.shape[0]

    @property
    def kv_heads(self) -> int:
        return self._k_arrays[0].shape[-3]

    @property
    def head_dim(self) -> int:
        return self.stored_dims[0] if self.dims is None else self.dims[0]

    @property
    def v_head_dim(self) -> int:
        return self.stored_dims[1] if self.dims is None else self.dims[1]

    @property
    def stored_dims(self) -> tuple[int, int]:
        """Columns of the buffers of K and V: `create` may make more than head_dim and v_head_dim,
        which then hold zeros.
        """
        k_dim = self._k_arrays[0].shape[-1]
        if self.v_columns is not None:
            return k_dim, self.v_columns
        return k_dim, (self.v[0] if isinstance(self.v, tuple) else self.v).shape[-1]

    @property
    def shared_kv(self) -> bool:
        """Whether V is part of K (`create(shared_kv=True)`)."""
        return self.v_columns is not None

    @property
    def quantized(self) -> bool:
        """Whether rows are stored as narrow numbers with a scale each."""
        return self.k_scale is not None

    @property
    def dtype(self) -> Any:
        """Of the numbers stored; scales are float32."""
        return self._k_arrays[0].dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers of K, V and scales, used or not."""
        buffers = (self.k, self.v, self.k_scale, self.v_scale)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(buffers))

    @property
    def capacities(self) -> tuple[int, ...]:
        """Rows that each sequence can hold (of a PagedCache: if the pool has the pages)."""
        raise NotImplementedError

    @property
    def overflowed(self) -> Array:
        """bool[M]: sequences that were given more rows than fit. Their rows were dropped; decoding
        them gives NaN.
        """
        return self.lengths > jnp.asarray(self.capacities, jnp.int32)

    def extend(self, rows: int | Array) -> Self:
        """Take `rows` new rows in every sequence: an int, or int32[M] (0 included; a negative count
        takes none, and no length passes 2**31 - 1).

        An int that no sequence's whole capacity could hold is a ValueError; rows past a length
        known only at run time are dropped by the write, counted by `lengths` and shown by
        `overflowed`.
        """
        # Inside shard_map, what a loop carries must not change its type: counts are often the same
        # on every device where lengths are not.
        taken = _sharding.varying_like(self._rows(rows), self.lengths)
        return self._with(lengths=self.lengths + taken, new_lengths=taken)

    def _rows(self, rows: int | Array) -> Array:
        static = _checks.static_int(rows)
        if static is None:
            rows = _checks.one_or_each("rows", rows, self.num_sequences, "one count a sequence")
        else:
            self._fits(static)
        # No more than a length can count: past that it would be negative, and not overflowed.
        most = jnp.iinfo(jnp.int32).max - jnp.maximum(self.lengths, 0)
        return jnp.clip(jnp.broadcast_to(jnp.asarray(rows, jnp.int32), most.shape), 0, most)

    def _fits(self, static: int) -> None:
        """ValueError where no sequence could ever take so many rows."""
        if static < 0:
            raise ValueError(f"rows: expected at least 0, got {static}")
        for sequence, capacity in enumerate(self.capacities):
            if static > capacity:
                raise ValueError(
                    f"rows: {static} new rows do not fit in sequence {sequence}, whose capacity "
                    f"is {capacity}; "
                    "create the cache with a larger capacity or append fewer rows"
                )

    def reset(self, sequences: int | Array) -> Self:
        """Empty some sequences: an index (traced or not), an int array of indices (those that are
        no sequence's count for nothing), or bool[M]. Buffers stay as they are.
        """
        chosen = self._chosen(sequences)
        return self._with(
            lengths=jnp.where(chosen, 0, self.lengths),
            new_lengths=jnp.where(chosen, NOT_EXTENDED, self.new_lengths),
        )

    def _chosen(self, sequences: int | Array) -> Array:
        """bool[M] from an index, an array of indices or bool[M]."""
        static = _checks.static_int(sequences)
        if static is not None and not 0 <= static < self.num_sequences:
            raise ValueError(f"sequences: expected 0 to {self.num_sequences - 1}, got {static}")
        if isinstance(sequences, (list, tuple)) and not sequences:
            sequences = np.zeros(0, np.int32)  # jax would take it for floats
        try:
            index = jnp.asarray(_checks.saturated(sequences))
        except (TypeError, ValueError, OverflowError):
            raise ValueError(
                f"sequences: expected an index, indices or bool[M], got {type(sequences).__name__}"
            ) from None
        if index.dtype == jnp.bool_:
            if index.shape != (self.num_sequences,):
                raise ValueError(
                    f"sequences: expected bool[{self.num_sequences}], got bool{list(index.shape)}"
                )
            return index
        if not jnp.issubdtype(index.dtype, jnp.integer):
            raise ValueError(f"sequences: expected an index, indices or bool[M], got {index.dtype}")
        here = jnp.arange(self.num_sequences, dtype=jnp.int32)
        return (here[:, None] == _checks.saturated(index).reshape(1, -1)).any(axis=1)


@dataclasses.dataclass(frozen=True)
class Rows:
    """What `create` is told about the rows of a cache, and the buffers that follow from it."""

    head_dim: int
    v_head_dim: int | None
    layers: int | None
    dtype: Any
    scales: bool | None
    shared_kv: bool

    def __post_init__(self):
        positive(head_dim=self.head_dim, v_head_dim=self.v_head_dim, layers=self.layers)
        if not _is_real(self.dtype):
            raise ValueError(
                f"dtype: expected a floating-point or integer dtype, got {self.dtype!r}"
            )
        _checks.boolean("shared_kv", self.shared_kv)
        if self.scales is not None:
            _checks.boolean("scales", self.scales)
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
    def quantized(self) -> bool:
        return jnp.dtype(self.dtype).name in QUANTIZED if self.scales is None else self.scales

    @property
    def static(self) -> dict[str, Any]:
        """The fields v_columns and dims."""
        dims = self.head_dim, self.v_head_dim or self.head_dim
        return {
            "v_columns": dims[1] if self.shared_kv else None,
            "dims": None if dims == self._stored else dims,
        }

    @property
    def _stored(self) -> tuple[int, int]:
        """Columns of K and of V, and as the kernels that read them on a GPU want them."""
        dims = self.head_dim, self.v_head_dim or self.head_dim
        if self.shared_kv or _device.gpu_generation() is None:
            return dims
        k_unit, v_unit = (64, 16) if self.quantized else (8, 8)
        return _round_up(dims[0], k_unit), _round_up(dims[1], v_unit)

    def rows(self, wanted: int) -> int:
        """Rows that lie together: what one sequence or one page holds, if so many are wanted."""
        if _device.gpu_generation() is None:
            return wanted
        return _round_up(wanted, 8 if self.shared_kv else 4 if self.quantized else 1)

    def arrays(self, *shape: int) -> dict[str, Array]:
        """Zeros for the fields k, v, k_scale and v_scale, or those of them that the cache has, of
        arrays `shape` but for layers and head dim.
        """
        shape = shape if self.layers is None else (self.layers, *shape)
        k_dim, v_dim = self._stored
        made = {"k": jnp.zeros((*shape, k_dim), self.dtype)}
        if not self.shared_kv:
            made["v"] = jnp.zeros((*shape, v_dim), self.dtype)
        if self.quantized:
            made |= {f"{side}_scale": jnp.zeros(shape, jnp.float32) for side in tuple(made)}
        return made


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _is_real(dtype: Any) -> bool:
    if dtype is None:  # which NumPy takes for float64
        return False
    try:
        return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
    except TypeError:
        return False


def no_rows(size: int) -> dict[str, Array]:
    """The fields lengths and new_lengths of an empty cache."""
    return {
        "lengths": jnp.zeros(size, jnp.int32),
        "new_lengths": jnp.full(size, NOT_EXTENDED, jnp.int32),
    }


def positive(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if size is not None and (_checks.static_int(size) is None or size < 1):
            raise ValueError(f"{name}: expected an int of at least 1, got {size!r}")
