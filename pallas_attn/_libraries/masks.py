"""Masks of other libraries' layers as arguments of `flash_attention`, without T x S numbers."""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn.errors import described
from pallas_attn.masks import FULL, Combinable, Mask, MaskFunction

Array = jax.Array | np.ndarray

MOST_READ = 2**26  # numbers of the largest known mask that is examined
# Segment ids of queries that see no key, and of keys that no query sees. They are large, since
# padding mostly comes last, and kernels skip tiles by the least and the greatest id in them.
_BLIND, _HIDDEN = 2**31 - 2, 2**31 - 1


@dataclasses.dataclass(frozen=True, eq=False)
class SparseMask(Combinable):
    """A mask `[..., heads or 1, T, S]` as a band or a function of positions, segment ids, lengths,
    the queries and keys that count, and an array for the rest. It is a pytree; `&` combines masks.
    """

    rows: tuple[int, int]  # T, S
    band: Mask | MaskFunction = FULL
    # Integers [..., T] and [..., S]: a query sees keys of its own segment.
    ids: tuple[Array, Array] | None = None
    q_counts: Array | None = None  # bool[..., T]: False for a query that sees nothing
    kv_counts: Array | None = None  # bool[..., S]: False for a key that no query sees
    q_lengths: Array | None = None  # int32[...]
    kv_lengths: Array | None = None
    array: Array | None = None  # bool[..., heads or 1, T or 1, S or 1]

    def __and__(self, other: "AnyMask") -> "SparseMask":
        """The keys that both masks show."""
        other = sparse(other, self.rows)
        if other.rows != self.rows:
            raise ValueError(f"mask: expected T, S = {self.rows} as in the other, got {other.rows}")
        ids, array = self.ids or other.ids, other.array
        if self.ids and other.ids and any(map(operator.is_not, self.ids, other.ids)):
            q_ids, kv_ids = other.ids
            array = _both(array, q_ids[..., None, :, None] == kv_ids[..., None, None, :])
        return SparseMask(
            self.rows,
            self.band & other.band,
            ids,
            _both(self.q_counts, other.q_counts),
            _both(self.kv_counts, other.kv_counts),
            _both(self.q_lengths, other.q_lengths, jnp.minimum),
            _both(self.kv_lengths, other.kv_lengths, jnp.minimum),
            _both(self.array, array),
        )

    __rand__ = __and__

    def options(self, batch: tuple[int, ...]) -> dict[str, Any]:
        """Arguments of `flash_attention` for inputs whose leading axes `batch` become one."""
        arguments: dict[str, Any] = {"mask": self.band}
        ids, counts = self.ids, (self.q_counts, self.kv_counts)
        if any(x is not None for x in counts):
            ids = ids or (np.zeros(self.rows[0], np.int32), np.zeros(self.rows[1], np.int32))
            q_ids, kv_ids = map(_where, counts, ids, (_BLIND, _HIDDEN))
            ids = q_ids, kv_ids
        if ids is not None:
            arguments["segment_ids"] = tuple([over_batch(x, batch, 1) for x in ids])
        for name in ("q_lengths", "kv_lengths"):
            if (lengths := getattr(self, name)) is not None:
                arguments[name] = over_batch(lengths, batch, 0)
        if self.array is not None:
            alike = self.array.ndim <= 3 or set(self.array.shape[:-3]) == {1}
            arguments["mask_array"] = over_batch(self.array, () if alike else batch, 3)
        return arguments


jax.tree_util.register_dataclass(
    SparseMask,
    data_fields=[field.name for field in dataclasses.fields(SparseMask)][1:],
    meta_fields=["rows"],
)


AnyMask = SparseMask | Array | Mask | MaskFunction
Ids = Array | tuple[Array, Array]


def of_segments(ids: Ids, rows: tuple[int, int], beside: AnyMask | None) -> SparseMask:
    """The mask of segment ids, of one array for queries and keys or of two, and another mask."""
    q_ids, kv_ids = ids if isinstance(ids, (tuple, list)) else (ids, ids)
    mask = SparseMask(rows, ids=(q_ids, kv_ids))
    return mask if beside is None else mask & beside


def over_batch(x: Array, batch: tuple[int, ...], inner: int) -> jax.Array:
    """An array whose last `inner` axes follow leading axes that broadcast to `batch`, with one
    batch axis in place of these.
    """
    x = jnp.asarray(x)
    x = x.reshape((1,) * (inner - x.ndim) + x.shape)
    own = x.shape[x.ndim - inner :]
    lead = x.shape[: x.ndim - inner]
    if len(batch) == 1 and lead == batch:
        return x
    if int(np.prod(lead)) == 1 and not batch:
        return x.reshape(1, *own)
    return jnp.broadcast_to(x, (*batch, *own)).reshape(-1, *own)


def sparse(mask: AnyMask | None, rows: tuple[int, int]) -> SparseMask:
    """A mask of any kind as a sparse one. Known arrays are examined; of traced ones the shape alone
    tells whether they are masks of keys or of queries only.
    """
    if mask is None:
        return SparseMask(rows)
    if isinstance(mask, SparseMask):
        return mask
    if isinstance(mask, (Mask, MaskFunction)):
        return SparseMask(rows, mask)
    if not isinstance(mask, (jax.Array, np.ndarray)):
        raise ValueError(
            "mask: expected an array that broadcasts to [..., heads, T, S], a Mask, a mask_fn or "
            f"None, got {described(mask)}"
        )
    mask = mask.astype(bool)  # flax's are floats of 0 and 1
    mask = mask.reshape((1,) * (3 - mask.ndim) + mask.shape)
    heads, q_len, kv_len = mask.shape[-3:]
    if q_len not in (1, rows[0]) or kv_len not in (1, rows[1]):
        raise ValueError(
            f"mask: expected [..., heads, T, S] with T, S = {rows}, got {list(mask.shape)}"
        )
    if _is_known(mask) and mask.size <= MOST_READ:
        return _read(np.asarray(mask), rows)
    if heads == 1 and q_len == 1:
        return SparseMask(rows, kv_counts=_spread(mask[..., 0, 0, :], rows[1]))
    if heads == 1 and kv_len == 1:
        return SparseMask(rows, q_counts=_spread(mask[..., 0, :, 0], rows[0]))
    return SparseMask(rows, array=mask)


def _spread(x: Array, size: int) -> jax.Array:
    return jnp.broadcast_to(x, (*x.shape[:-1], size))


def _is_known(mask: Array) -> bool:
    if isinstance(mask, np.ndarray):
        return True
    return not isinstance(mask, jax.core.Tracer) and mask.is_fully_addressable


def _read(mask: np.ndarray, rows: tuple[int, int]) -> SparseMask:
    """A known mask as a band, with the queries and keys that count, or as segments within a band;
    the array itself where it is neither.
    """
    if not (mask == mask[..., :1, :, :]).all():
        return SparseMask(rows, array=mask)
    lead = mask.shape[:-3]
    seen = np.broadcast_to(mask[..., 0, :, :], (*lead, *rows)).reshape(-1, *rows)
    q_counts, kv_counts = seen.any(-1), seen.any(-2)
    if not q_counts.any():
        return SparseMask(rows, q_counts=q_counts.reshape(*lead, rows[0]))
    counts = q_counts[:, :, None] & kv_counts[:, None]
    bands = _bands(seen, q_counts)
    for band in bands:
        if (seen == (counts & band.dense(*rows))).all():
            return SparseMask(rows, band, **_counting(q_counts, kv_counts, lead))
    # A query's segment is the first key that it sees, a key's is that of the first query to see it.
    first = np.where(q_counts, seen.argmax(-1), rows[1])
    own = np.take_along_axis(first, seen.argmax(-2), -1)
    kv_first = np.where(kv_counts, own, rows[1] + 1)
    same = first[:, :, None] == kv_first[:, None]
    for band in bands[:2]:
        if (seen == (same & band.dense(*rows))).all():
            q_ids, kv_ids = (x.astype(np.int32).reshape(*lead, -1) for x in (first, kv_first))
            return SparseMask(rows, band, (q_ids, kv_ids))
    return SparseMask(rows, array=mask)


def _bands(seen: np.ndarray, q_counts: np.ndarray) -> list[Mask]:
    """Bands that all of `seen` lies in: everything, the narrowest on the right, left, both."""
    at = np.arange(seen.shape[1])
    last = seen.shape[2] - 1 - seen[:, :, ::-1].argmax(-1)
    right = int((last - at)[q_counts].max())
    left = int((at - seen.argmax(-1))[q_counts].max())
    return [FULL, Mask(None, right), Mask(left, None), Mask(left, right)]


def _counting(q_counts: np.ndarray, kv_counts: np.ndarray, lead: tuple[int, ...]) -> dict[str, Any]:
    """Fields for queries and keys that count: none where all do, lengths where the first do."""
    fields: dict[str, Any] = {}
    for side, counts in (("q", q_counts), ("kv", kv_counts)):
        lengths = counts.sum(-1, dtype=np.int32)
        if counts.all():
            continue
        if (counts == (np.arange(counts.shape[-1]) < lengths[:, None])).all():
            fields[f"{side}_lengths"] = lengths.reshape(lead)
        else:
            fields[f"{side}_counts"] = counts.reshape(*lead, -1)
    return fields


def _both(
    a: Array | None, b: Array | None, combine: Callable[..., jax.Array] = jnp.logical_and
) -> Array | None:
    if a is None or b is None:
        return b if a is None else a
    return combine(*jnp.broadcast_arrays(a, b))


def _where(counts: Array | None, ids: Array, other: int) -> Array:
    """`ids`, with `other` where a row does not count, in a dtype that can hold both."""
    if counts is None:
        return ids
    counts, ids = jnp.broadcast_arrays(counts, ids)
    ids = ids if ids.dtype in (jnp.int32, jnp.int64) else ids.astype(jnp.int32)
    return jnp.where(counts, ids, other)
