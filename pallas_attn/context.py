"""`Context`: how the rows of a sequence are split over devices."""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._mesh import sharding
from pallas_attn.errors import described

ORDERS = ("contiguous", "zigzag")
METHODS = ("gather", "ring", "heads")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Context:
    """Context parallelism: the rows of q, k and v are split over the devices of a mesh axis.

    Within `jax.shard_map`, `flash_attention(..., context=Context("cp"))` takes this device's rows
    of each array and returns this device's rows of the result. Positions, lengths and offsets are
    those of the whole sequence, whatever the order, also in `mask_fn` and `score_fn`: arrays that
    these read at positions are whole on each device. Static: a jit key by value.

    Args:
      axis: the mesh axis that the rows are split over, one that `shard_map` maps.
      order: the rows of a device. "contiguous": device d of n has the d-th of n parts. "zigzag": it
        has the d-th and the d-th from the end of 2n parts, so that all devices have the same work
        under a causal mask. `reorder` puts an array in this order, `restore` undoes it.
      method: how queries meet the keys of others. "gather": K and V come to every device, under a
        window with static offsets only the rows that it shows; one launch. "ring": K and V pass
        from device to device and no device holds more than two parts of them; partial results are
        merged. "heads": rows and heads change places, and each device attends some heads of the
        whole sequence; kv heads must be a multiple of the devices.
      overlap: whether kernels may reach the memory of other devices. The forward by "gather" then
        fetches K and V of the others while it computes with its own, and decode attention over a
        cache whose rows are split ends with a kernel in which devices exchange partial results.
        Both need Hopper GPUs of one process, up to 8, an axis that is all of the mesh, and a mesh
        that is all GPUs of the process in the order of their ids. The forward also needs 16-bit
        inputs, a multiple of 128 rows a device (256 for "zigzag"), and neither kv_lengths nor mask
        functions. Otherwise collectives move the rows. Say False where GPUs cannot read each
        other's memory, or where the mesh has another order, which jax refuses ("row-major device
        ids").

    Example::

        >>> automatic = jax.sharding.AxisType.Auto
        >>> mesh, rows = jax.make_mesh((1,), ("cp",), (automatic,)), jax.P(None, "cp")
        >>> attend = lambda q: pa.flash_attention(q, q, q, context=pa.Context("cp"))
        >>> split = jax.shard_map(attend, mesh=mesh, in_specs=rows, out_specs=rows)
        >>> jax.jit(split)(jnp.ones((1, 8, 2, 64))).shape
        (1, 8, 2, 64)
    """

    axis: str
    order: str = "contiguous"
    method: str = "gather"
    overlap: bool = True

    def __post_init__(self):
        if not isinstance(self.axis, str) or not self.axis:
            raise ValueError(
                f"Context(axis=...): expected a mesh axis's name, got {described(self.axis)}"
            )
        for name, choices in (("order", ORDERS), ("method", METHODS)):
            value = getattr(self, name)
            if value not in choices:
                wanted = ", ".join(map(repr, choices))
                raise ValueError(
                    f"Context({name}=...): expected one of {wanted}, got {described(value)}"
                )
        if not isinstance(self.overlap, bool):
            raise ValueError(
                f"Context(overlap=...): expected a bool, got {described(self.overlap)}"
            )

    @property
    def chunks(self) -> int:
        """Runs of consecutive rows that a device has."""
        return 2 if self.order == "zigzag" else 1

    def reorder[Array: (jax.Array, np.ndarray)](
        self, x: Array, shards: int, axis: int = 1
    ) -> Array:
        """Put the rows of `axis` in the order in which `shards` devices have them.

        Splitting the result evenly over the mesh axis gives each device its rows: tokens, labels,
        segment ids, the query axis of a bias. NumPy arrays stay NumPy arrays.
        """
        return self._permuted(x, axis, self._order(shards))

    def restore[Array: (jax.Array, np.ndarray)](
        self, x: Array, shards: int, axis: int = 1
    ) -> Array:
        """Undo `reorder`: rows in the order of their positions."""
        return self._permuted(x, axis, np.argsort(self._order(shards)))

    def positions(self, rows: int) -> jax.Array:
        """int32[rows]: positions of this device's `rows` rows, for RoPE; within `jax.shard_map`."""
        size, shards = chunk_rows(self, "rows", rows), shards_of(self)
        firsts = chunk_numbers(self, jax.lax.axis_index(self.axis), shards) * size
        return (firsts[:, None] + jnp.arange(size, dtype=jnp.int32)[None]).reshape(-1)

    def _order(self, shards: int) -> np.ndarray:
        """Chunks of the sequence in the order of the devices."""
        if not isinstance(shards, (int, np.integer)) or shards < 1:
            raise ValueError(f"shards: expected an int of at least 1, got {described(shards)}")
        return np.stack(chunks_of(self, np.arange(shards), shards), axis=1).ravel()

    def _permuted(self, x: Any, axis: int, order: np.ndarray) -> Any:
        x = x if isinstance(x, np.ndarray) else jnp.asarray(x)
        if not -x.ndim <= axis < x.ndim or x.shape[axis] % len(order):
            raise ValueError(
                f"x: expected an axis {axis} of a multiple of {len(order)} rows for "
                f"{len(order) // self.chunks} devices in order {self.order!r}, got {x.shape}"
            )
        if self.chunks == 1:
            return x
        axis %= x.ndim
        take = np.take if isinstance(x, np.ndarray) else jnp.take

        def permuted(x: jax.Array | np.ndarray) -> Any:
            parts = x.reshape(*x.shape[:axis], len(order), -1, *x.shape[axis + 1 :])
            return take(parts, order, axis=axis).reshape(x.shape)

        return sharding.on_automatic_axes(permuted, (x,), sharding.spec_of(x))


def checked(value: Any) -> Context | None:
    """Check an argument `context`."""
    if value is None or isinstance(value, Context):
        return value
    raise ValueError(
        f"context: expected a Context, or None where rows are not split, got {described(value)}"
    )


def shards_of(context: Context) -> int:
    """The number of devices that rows are split over; within `jax.shard_map`."""
    shards = mapped_shards(context)
    if shards is None:
        raise ValueError(
            f"context: no mesh axis {context.axis!r} is mapped here; call within jax.shard_map "
            "over a mesh that has it, or leave context out"
        )
    return shards


def mapped_shards(context: Context | None) -> int | None:
    """`shards_of`; None without a context, or outside of `jax.shard_map`."""
    try:
        return None if context is None else jax.lax.axis_size(context.axis)
    except NameError:
        return None


def devices_of(context: Context) -> int:
    """`shards_of` an axis whose shards are devices, which jax.vmap's are not."""
    shards = shards_of(context)
    if context.axis not in jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(
            f"context: {context.axis!r} is an axis of jax.vmap, whose rows no device has; call "
            "within jax.shard_map over a mesh that has it, or leave context out"
        )
    return shards


class Band(Protocol):
    """The bounds of a `Mask`, whose module imports this one."""

    @property
    def left(self) -> Any: ...
    @property
    def right(self) -> Any: ...


def chunk_rows(context: Context, name: str, rows: int) -> int:
    """Rows of a chunk where a device has `rows`."""
    if rows % context.chunks:
        raise ValueError(
            f"{name}: expected an even number of rows a device for order 'zigzag', got {rows}; pad "
            "the sequence and pass q_lengths and kv_lengths"
        )
    return rows // context.chunks


def window_of(
    context: Context, shards: int, band: Band, rows: tuple[int, int], q_offset: int
) -> tuple[int, int] | None:
    """Keys [lo, hi) that a chunk's rows may see under a band, counted from the chunk's first key;
    None where they are not known, or too many to move alone. `rows`: a device's rows of q and of k.
    """
    if not (isinstance(band.left, int) and isinstance(band.right, int)) or rows[0] != rows[1]:
        return None
    first = q_offset - band.left
    end = q_offset + rows[0] // context.chunks + band.right
    return (first, end) if context.chunks * (end - first) < rows[1] * shards else None


def first_keys[Numbers: (int, jax.Array)](
    numbers: Numbers, keys: int, window: tuple[int, int] | None
) -> Numbers:
    """Positions of the first keys that chunks of these numbers are handed; a chunk has `keys`."""
    if window is None:
        return 0 * numbers
    first = numbers * keys + window[0]
    return max(first, 0) if isinstance(first, int) else jnp.maximum(first, 0)


def chunk_numbers(context: Context, device: int | jax.Array, shards: int) -> jax.Array:
    """int32[chunks]: the chunks of the sequence that a device has."""
    return jnp.stack(chunks_of(context, device, shards))


def chunks_of(context: Context, device: Any, shards: int) -> tuple[Any, ...]:
    """The chunks of the sequence that a device has, or each of several:
    `_call.problem.owner_of_chunk` undoes it.
    """
    return (device,) if context.chunks == 1 else (device, 2 * shards - 1 - device)
