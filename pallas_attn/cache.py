"""KV caches: frozen pytrees that live inside jit, are donated, and are updated in place.

Three layouts, one way to use them:

- `PerSequenceCache`: an array a sequence, each with its own capacity. Sequences come and go without
  moving the others.
- `StackedCache`: one array for all sequences, one capacity.
- `PagedCache`: a pool of pages that sequences take as they grow and may share (`fork`).

Each step takes rows once and fills them once a layer:

    cache = cache.extend(t)                         # lengths move, overflow is decided, pages taken
    for layer in range(layers):                     # or a lax.scan over layers
        cache = write_kv(cache, k, v, layer=layer)  # one launch, K and V of all sequences, in place
        out = decode_attention(q, cache, layer=layer)

`write_kv` fills what the latest `extend` took, and without one nothing: outside of jit that is a
ValueError, inside it decoding a sequence that is still empty gives NaN.

Sequences with different numbers of new rows are packed, one behind the other, and `starts` says
where each begins: a prompt, a chunk of one and single tokens in one step.

    cache = cache.extend(jnp.diff(starts))
    cache = write_kv(cache, k, v, starts=starts, layer=layer)      # k, v: [tokens, K, H]
    out = decode_attention(q, cache, starts=starts, layer=layer)   # q: [tokens, N, H]

`append_kv` is extend and write_kv in one, for a cache of one layer. A row past a sequence's
capacity is dropped: nothing else is touched, the length still counts it, `cache.overflowed` says
so, and decoding that sequence gives NaN.

On a GPU `create` makes buffers that the kernels can read: head dims are padded to a multiple of 8
(of a quantised cache, K to 64 and V to 16; with V within K not at all) with columns of zeros that
no method shows. Capacities and page sizes of a quantised cache are rounded up to a multiple of 4,
those of one with V within K to 8; capacities (not page sizes) in FlashMLA's format to 64.

Options of `create`:

- `dtype=jnp.float8_e4m3fn` (or float8_e5m2, int8) makes a quantised cache: `write_kv` stores each
  row of a kv head with a float32 scale, so that its largest number is the dtype's largest, and
  `decode_attention` multiplies the scale back. A row with a NaN or an infinity in it is NaN
  throughout. `scales=False` stores numbers as they come.
- `dtype=jnp.float8_e4m3fn, scales=128` beside `kv_heads=1, head_dim=576, v_head_dim=512,
  shared_kv=True` makes a latent cache in FlashMLA's format: `cache.k` is uint8, and a row of it 656
  bytes: 512 numbers of V in float8, 4 float32 scales, each of 128 of them, and the other 64 columns
  of K in bfloat16.
- `shared_kv=True` keeps one array for both, where V is the first `v_head_dim` columns of K: the
  latent cache of multi-head latent attention is `kv_heads=1, head_dim=576, v_head_dim=512,
  shared_kv=True`. Rows are written by `write_kv(cache, k)`; `cache.v` is None.
- `context=Context("cp")`, of stacked and separate caches, splits the rows of each sequence over the
  devices of a mesh axis, in blocks of consecutive rows. Within `jax.shard_map` (its specs:
  `cache.specs()`) everything above holds: lengths and new rows are the same on all devices, each
  writes the rows of its block, and decoding combines their results.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from pallas_attn import prefixes
from pallas_attn._cache import keep as _keep
from pallas_attn._cache.buffers import Buffers
from pallas_attn._cache.facts import of_live
from pallas_attn._call import checks
from pallas_attn._call.byte_rows import BYTE_DTYPE, SCALE_COLUMNS
from pallas_attn._call.problem import MOST_ROWS
from pallas_attn._mesh import sharding
from pallas_attn.context import Context, mapped_shards
from pallas_attn.errors import described
from pallas_attn.masks import saturated
from pallas_attn.prefixes import SharedPrefixes

Array = jax.Array
MeshAxes = str | tuple[str, ...] | None

NO_PAGE = -1  # in a page table: nothing here yet
LOST = -2  # a page was needed here and the pool had none; it sticks until the sequence is freed
NOT_EXTENDED = -1  # in new_lengths


def _static() -> Any:
    """A field that is no leaf of the pytree."""
    return dataclasses.field(default=None, metadata={"static": True})


@dataclasses.dataclass(frozen=True, repr=False)
class KVCache:
    """The base of the three caches: what they share, and the type of any of them.

    A pytree: `lengths` int32[M] are the rows taken in each sequence, `new_lengths` those that the
    latest `extend` took; `k`, `v` and their scales are the buffers, laid out as each cache says.
    """

    kind: ClassVar[str]
    k: Any
    v: Any  # None where V is the first `v_columns` columns of K
    lengths: Array  # int32[M]: rows taken in each sequence now, written or not
    # int32[M]: rows that the latest extend took, which write_kv fills; NOT_EXTENDED where no extend
    # has been since the sequence was made or emptied
    new_lengths: Array
    # float32, as k without its last axis: a row is its numbers times its scale; None where numbers
    # are stored as they come (and v_scale where v is)
    k_scale: Any = None
    v_scale: Any = None
    v_columns: int | None = _static()
    # head dims of K and V where the buffers are wider, else None
    dims: tuple[int, int] | None = _static()
    # rows of the longest sequence where the buffers hold more, else None
    longest: int | None = _static()
    context: Context | None = _static()  # devices that the rows of a sequence are split over
    page_table: ClassVar[Any] = None  # a field of PagedCache, int32[M, W]

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
            str(self.dtype)
            + (" with scales" if self.quantized else "")
            + (f" of {SCALE_COLUMNS} columns" if self.byte_rows else ""),
            *([] if self.pages is None else [f"{self.pages} pages of {self.page_size} rows"]),
            *([] if self.context is None else [f"rows split over {self.context.axis!r}"]),
        ]

    @property
    def _k_arrays(self) -> tuple[Array, ...]:
        return self.k if isinstance(self.k, tuple) else (self.k,)

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
        """Layers that the buffers hold; None where they have no layer axis."""
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
        and fill them with zeros.
        """
        if self.byte_rows:
            return self.head_dim, self.v_head_dim
        k_dim = self._k_arrays[0].shape[-1]
        if self.v_columns is not None:
            return k_dim, self.v_columns
        return k_dim, (self.v[0] if isinstance(self.v, tuple) else self.v).shape[-1]

    @property
    def shared_kv(self) -> bool:
        """Whether V is part of K (`create(shared_kv=True)`)."""
        return self.v_columns is not None

    @property
    def byte_rows(self) -> bool:
        """Whether rows are bytes in FlashMLA's format (`create(scales=128)`)."""
        return self.v_columns is not None and self.dims is not None

    @property
    def quantized(self) -> bool:
        """Whether rows are stored as narrow numbers with a scale each, or a few."""
        return self.k_scale is not None or self.byte_rows

    @property
    def dtype(self) -> Any:
        """The dtype of the numbers stored; scales are float32."""
        return jnp.dtype(BYTE_DTYPE) if self.byte_rows else self._k_arrays[0].dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers of K, V and scales, used or not."""
        buffers = (self.k, self.v, self.k_scale, self.v_scale)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(buffers))

    @property
    def capacities(self) -> tuple[int, ...]:
        """Rows that each sequence can hold (of a PagedCache: if the pool has the pages), on all
        devices together: those that `create` was asked for, rounded up to what the buffers hold,
        as whole pages.
        """
        if self.context is None:
            return self.held
        shards = mapped_shards(self.context) or 1
        return tuple(shards * rows for rows in self.held)

    @property
    def held(self) -> tuple[int, ...]:
        """Rows of each sequence that lie in these buffers: less than its capacity within
        `jax.shard_map`, where its rows are split.
        """
        raise NotImplementedError

    @property
    @of_live
    def overflowed(self) -> Array:
        """bool[M]: sequences that were given more rows than fit. Their rows were dropped; decoding
        them gives NaN.
        """
        return self.lengths > jnp.asarray(self.capacities, jnp.int32)

    def specs(self, heads: MeshAxes = None, sequences: MeshAxes = None) -> Self:
        """The PartitionSpecs of a cache like this one, in its own tree: for `jax.shard_map` and
        shardings. A cache of shapes (`jax.eval_shape`) will do.

        Args:
          heads: the mesh axis, or axes, that kv heads are split over.
          sequences: those that the sequences of a StackedCache are split over.

        Rows are split as the cache's `context` says, all else is whole on each device.
        """
        for name, axes in (("heads", heads), ("sequences", sequences)):
            several = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
            if not all([isinstance(axis, str) and axis for axis in several]):
                raise ValueError(
                    f"{name}: expected a mesh axis's name, a tuple of names or None, got {axes!r}"
                )
        if sequences is not None and self.kind != "stacked":
            raise ValueError(
                f"sequences: expected None for a {type(self).__name__}, whose sequences are no "
                f"axis of an array, got {described(sequences)}"
            )
        rows = None if self.context is None else self.context.axis
        buffers = (() if self.layers is None else (None,)) + (
            (heads, rows) if self.kind == "per_sequence" else (sequences, heads, rows)
        )
        fields = {name: getattr(self, name) for name in ("k", "v", "k_scale", "v_scale")}
        split = jax.tree.map(lambda _: PartitionSpec(*buffers), fields)
        whole = jax.tree.map(lambda _: PartitionSpec(), self)
        small = PartitionSpec(sequences) if sequences is not None else PartitionSpec()
        return dataclasses.replace(whole, **split, lengths=small, new_lengths=small)

    @of_live
    def extend(self, rows: int | Array) -> Self:
        """Take `rows` new rows in every sequence: an int, or int32[M] (0 included; a negative count
        takes none, and no length passes 2**31 - 1).

        An int that no sequence's whole capacity could hold is a ValueError; rows past a length
        known only at run time are dropped by the write, counted by `lengths` and shown by
        `overflowed`.
        """
        # Inside shard_map, a loop's carry must keep its type: counts are often the same on every
        # device where lengths are not.
        taken = sharding.typed_like(self._rows(rows), self.lengths)
        return dataclasses.replace(self, lengths=self.lengths + taken, new_lengths=taken)

    def _rows(self, rows: int | Array) -> Array:
        """int32[M]: the argument of `extend`, clipped to counts that lengths can take."""
        static = checks.static_int(rows)
        if static is None:
            rows = checks.one_or_each("rows", rows, self.num_sequences, "one count a sequence")
            rows = sharding.placed_like(rows, self.lengths)
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

    @of_live
    def keep(
        self, counts: int | Array, path: Array | None = None, *, implementation: str | None = None
    ) -> Self:
        """Keep `counts` of the rows that the latest `extend` took, and drop the others: drafts.

        Args:
          counts: int32[M] or an int: how many, held to 0 .. new_lengths.
          path: int32[M, p]: row j of those kept becomes what row path[m, j], held to the newest,
            was; rows from p on, as of a prompt beside drafts, stay. Default: the first ones stay.
          implementation: "sm80", "reference" or None.

        Returns:
          The cache, lengths cut, rows moved in every layer: one launch, in place as in `write_kv`,
          none without `path`. Sequences that have overflowed or took no rows stay as they are.
          Where rows are split over devices, the rows of the path come to all of them in one sum.
          Pages stay with their sequence. One that was forked from since `extend`, into a sequence
          that has some of those rows, overflows: keep first, fork then.
        """
        return _keep.keep(self, counts, path, implementation)

    @of_live
    def reset(self, sequences: int | Array) -> Self:
        """Empty some sequences: an index (traced or not), an int array of indices (those that are
        no sequence's count for nothing), or bool[M]. Buffers stay as they are.
        """
        chosen = self._chosen(sequences)
        return dataclasses.replace(
            self,
            lengths=jnp.where(chosen, 0, self.lengths),
            new_lengths=jnp.where(chosen, NOT_EXTENDED, self.new_lengths),
        )

    def _chosen(self, sequences: int | Array) -> Array:
        """bool[M] from an index, an array of indices or bool[M]."""
        static = checks.static_int(sequences)
        if static is not None and not 0 <= static < self.num_sequences:
            raise ValueError(f"sequences: expected 0 to {self.num_sequences - 1}, got {static}")
        if isinstance(sequences, (list, tuple)) and not sequences:  # jax takes it for floats
            sequences = np.zeros(0, np.int32)
        try:
            index = jnp.asarray(saturated(sequences))
        except (TypeError, ValueError, OverflowError):
            raise ValueError(
                f"sequences: expected an index, indices or bool[M], got {type(sequences).__name__}"
            ) from None
        if index.dtype == jnp.bool_:
            if index.shape != (self.num_sequences,):
                raise ValueError(
                    f"sequences: expected bool[{self.num_sequences}], got bool{list(index.shape)}"
                )
            return sharding.placed_like(index, self.lengths)
        if not jnp.issubdtype(index.dtype, jnp.integer):
            raise ValueError(f"sequences: expected an index, indices or bool[M], got {index.dtype}")
        here = jnp.arange(self.num_sequences, dtype=jnp.int32)
        index = sharding.whole(saturated(index)).reshape(1, -1)
        return (here[:, None] == index).any(axis=1)


# ---- the three layouts ---------------------------------------------------------------------------


def _no_rows(size: int) -> dict[str, Array]:
    """The fields lengths and new_lengths of an empty cache."""
    return {
        "lengths": jnp.zeros(size, jnp.int32),
        "new_lengths": jnp.full(size, NOT_EXTENDED, jnp.int32),
    }


def _told[Cache: KVCache](cache: Cache, longest: int) -> Cache:
    """The cache with the rows that its longest sequence was to have, where it holds more."""
    if longest == max(cache.capacities):
        return cache
    return dataclasses.replace(cache, longest=int(longest))


def not_a_cache(value: checks.Argument) -> ValueError:
    """The error of a call that wants a cache."""
    return ValueError(
        "cache: expected a PerSequenceCache, StackedCache or PagedCache, got "
        f"{type(value).__name__}"
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class PerSequenceCache(KVCache):
    """M separate arrays of K and M of V, `[K, capacity_i, H]` each (`[L, K, capacity_i, H]` with
    layers).

    Example::

        >>> len(pa.PerSequenceCache.create([16, 32], kv_heads=2, head_dim=64).k)
        2
    """

    kind: ClassVar[str] = "per_sequence"

    @classmethod
    def create(  # noqa: PLR0913
        cls,
        capacities: Sequence[int],
        kv_heads: int,
        head_dim: int,
        *,
        v_head_dim: int | None = None,
        layers: int | None = None,
        dtype: DTypeLike = jnp.bfloat16,
        scales: bool | int | None = None,
        shared_kv: bool = False,
        context: Context | None = None,
    ) -> "PerSequenceCache":
        """An empty cache with one sequence for each capacity given.

        Args:
          capacities: rows that each sequence can hold.
          kv_heads, head_dim: K, and H of a row of K.
          v_head_dim: H of a row of V; default head_dim.
          layers: number of layers that the buffers hold, on an axis before all others; default one
            layer, without that axis.
          dtype: of the numbers stored: bfloat16, float16, float32 or float64; float8_e4m3fn,
            float8_e5m2 and int8 make a quantised cache.
          scales: False stores their numbers as they come, without scales; 128 makes rows of a
            latent cache in FlashMLA's format.
          shared_kv: V is the first v_head_dim columns of K, and is not stored.
          context: rows of each sequence are split over the devices of its mesh axis, in order
            "contiguous" (its method plays no part). Capacities count the rows of all devices: made
            within `jax.shard_map`, the buffers are those of this device.
        """
        if not isinstance(capacities, (Sequence, np.ndarray)) or not len(capacities):
            raise ValueError(
                "capacities: expected a sequence of ints, one capacity a sequence, got "
                f"{described(capacities)}"
            )
        for capacity in capacities:
            checks.positive(capacities=capacity)
        checks.positive(kv_heads=kv_heads)
        buffers = Buffers(head_dim, v_head_dim, layers, dtype, scales, shared_kv, context)
        each = [buffers.arrays(kv_heads, buffers.block("capacities", n)) for n in capacities]
        fields: dict[str, Any] = {name: tuple(x[name] for x in each) for name in each[0]}
        cache = cls(
            **{"v": None} | fields | _no_rows(len(capacities)),
            **buffers.static,
        )
        return _told(cache, max(capacities))

    @property
    def held(self) -> tuple[int, ...]:
        return tuple([x.shape[-2] for x in self.k])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class StackedCache(KVCache):
    """All sequences in one array of K and one of V, `[M, K, capacity, H]` (`[L, M, K, capacity, H]`
    with layers).

    Example::

        >>> pa.StackedCache.create(2, 16, kv_heads=2, head_dim=64).lengths
        Array([0, 0], dtype=int32)
    """

    kind: ClassVar[str] = "stacked"

    @classmethod
    def create(  # noqa: PLR0913
        cls,
        num_sequences: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        *,
        v_head_dim: int | None = None,
        layers: int | None = None,
        dtype: DTypeLike = jnp.bfloat16,
        scales: bool | int | None = None,
        shared_kv: bool = False,
        context: Context | None = None,
    ) -> "StackedCache":
        """An empty cache of sequences that can hold `capacity` rows each. The other arguments are
        those of `PerSequenceCache.create`.
        """
        checks.positive(num_sequences=num_sequences, capacity=capacity, kv_heads=kv_heads)
        buffers = Buffers(head_dim, v_head_dim, layers, dtype, scales, shared_kv, context)
        fields: dict[str, Any] = buffers.arrays(
            num_sequences, kv_heads, buffers.block("capacity", capacity)
        )
        cache = cls(**{"v": None} | fields | _no_rows(num_sequences), **buffers.static)
        return _told(cache, capacity)

    @property
    def held(self) -> tuple[int, ...]:
        return (self.k.shape[-2],) * self.lengths.shape[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class PagedCache(KVCache):
    """A pool of pages `[pages, K, page_size, H]` (`[L, pages, ...]` with layers) and a table of the
    pages that each sequence holds.

    Every method is a pure function that works under jit. The pool is a stack of free page ids and a
    reference count a page; a full page may be held by several sequences (`fork`), the page being
    filled never is.

    Attributes:
      page_table: int32[M, W], the page ids of each sequence in order; negative where it holds none.
      num_free: int32, pages that no sequence holds: what a server may still admit.
      holders: int32[pages], the number of sequences that hold a page.
      lengths: int32[M], rows of each sequence.

    Example::

        >>> pa.PagedCache.create(2, 8, 16, kv_heads=2, head_dim=64).num_free
        Array(8, dtype=int32)
    """

    kind: ClassVar[str] = "paged"
    context: ClassVar[None] = None  # type: ignore[misc]
    _: dataclasses.KW_ONLY
    # int32[M, W]: page ids in order; NO_PAGE, or LOST where the pool had none to give
    page_table: Array  # type: ignore[misc]
    free_list: Array  # int32[pages]: the first num_free entries are free page ids
    num_free: Array  # int32
    holders: Array  # int32[pages]: number of sequences that hold a page

    @classmethod
    def create(  # noqa: PLR0913
        cls,
        num_sequences: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        capacity: int | None = None,
        v_head_dim: int | None = None,
        layers: int | None = None,
        dtype: DTypeLike = jnp.bfloat16,
        scales: bool | int | None = None,
        shared_kv: bool = False,
    ) -> "PagedCache":
        """An empty cache over a pool of `pages` pages of `page_size` rows. `capacity`: rows that
        one sequence can hold at most (default: the whole pool, less than 2**31 rows of it), rounded
        up to whole pages: `capacities` tells. The other arguments are those of
        `PerSequenceCache.create`.
        """
        checks.positive(
            num_sequences=num_sequences, pages=pages, page_size=page_size, kv_heads=kv_heads
        )
        checks.positive(none=True, capacity=capacity)
        buffers = Buffers(head_dim, v_head_dim, layers, dtype, scales, shared_kv)
        page_size = buffers.block("page_size", page_size)
        most = MOST_ROWS // page_size  # pages of a sequence whose length an int32 counts
        width = min(pages, most) if capacity is None else -(-capacity // page_size)
        if width > most:
            size = f"{most * page_size} rows, which an int32 counts, in pages of {page_size}"
            raise ValueError(f"capacity: expected at most {size}, got {capacity}")
        fields: dict[str, Any] = buffers.arrays(pages, kv_heads, page_size)
        cache = cls(
            **{"v": None} | fields | _no_rows(num_sequences),
            **buffers.static,
            page_table=jnp.full((num_sequences, width), NO_PAGE, jnp.int32),
            free_list=jnp.arange(pages - 1, -1, -1, dtype=jnp.int32),
            num_free=jnp.asarray(pages, jnp.int32),
            holders=jnp.zeros(pages, jnp.int32),
        )
        return cache if capacity is None else _told(cache, capacity)

    @property
    def page_size(self) -> int:
        return self.k.shape[-2]

    @property
    def pages(self) -> int:
        return self.k.shape[-4]

    @property
    def held(self) -> tuple[int, ...]:
        return (self.page_table.shape[1] * self.page_size,) * self.num_sequences

    @property
    @of_live
    def overflowed(self) -> Array:
        slots = jnp.arange(self.page_table.shape[1], dtype=jnp.int32)
        needed = slots[None] * self.page_size < self.lengths[:, None]
        there = (self.page_table >= 0) & (self.page_table < self.pages)
        return super().overflowed | (needed & ~there).any(axis=1)

    @of_live
    def allocate(self, rows: int | Array) -> tuple["PagedCache", Array]:
        """Take the pages for `rows` more rows of every sequence, lengths unmoved: (cache, granted
        bool[M]).

        A sequence gets all that it needs or nothing. Where the pool runs short the sequences that
        ask for the fewest pages come first, so one long prompt cannot starve the others. One that
        asks for more than its capacity is refused, and gets pages up to its capacity.
        """
        self._check_whole()
        taken = self._rows(rows)  # none where a length cannot count more
        wanted = self.lengths + taken
        table, slots = self.page_table, jnp.arange(self.page_table.shape[1], dtype=jnp.int32)
        last = -(-jnp.minimum(wanted, self.capacities[0]) // self.page_size)
        lost = (table == LOST).any(axis=1)
        asks = (taken > 0) & ~lost
        missing = (table == NO_PAGE) & (slots[None] < last[:, None]) & asks[:, None]
        need = missing.sum(axis=1, dtype=jnp.int32)
        order = jnp.arange(self.num_sequences, dtype=jnp.int32)
        first = (need[None] < need[:, None]) | (
            (need[None] == need[:, None]) & (order[None] < order[:, None])
        )
        before = jnp.where(first, need[None], 0).sum(axis=1, dtype=jnp.int32)
        granted = before + need <= self.num_free
        rank = before[:, None] + jnp.cumsum(missing, axis=1, dtype=jnp.int32) - 1
        fills = missing & granted[:, None]
        page = jnp.take(self.free_list, self.num_free - 1 - rank, mode="clip")
        used = jnp.where(granted, need, 0).sum(dtype=jnp.int32)
        cache = dataclasses.replace(
            self,
            page_table=jnp.where(fills, page, table),
            num_free=self.num_free - used,
            holders=self.holders.at[jnp.where(fills, page, self.pages)].add(1, mode="drop"),
        )
        return cache, granted & ~lost & (wanted <= self.capacities[0])

    @of_live
    def extend(self, rows: int | Array) -> "PagedCache":
        """`KVCache.extend`; the pages come from the pool. A sequence that gets none overflows
        (`overflowed`).
        """
        cache, _ = self.allocate(rows)
        cache = super(PagedCache, cache).extend(rows)
        slots = jnp.arange(cache.page_table.shape[1], dtype=jnp.int32)
        needed = slots[None] * cache.page_size < cache.lengths[:, None]
        table = jnp.where(needed & (cache.page_table == NO_PAGE), LOST, cache.page_table)
        return dataclasses.replace(cache, page_table=table)

    @of_live
    def free(self, sequences: int | Array) -> "PagedCache":
        """Empty some sequences and give back the pages that nobody else holds. `sequences` as in
        `reset`.
        """
        self._check_whole()
        chosen = self._chosen(sequences)
        held = jnp.where(chosen[:, None] & (self.page_table >= 0), self.page_table, self.pages)
        drops = jnp.zeros(self.pages, jnp.int32).at[held].add(1, mode="drop")
        holders = self.holders - drops
        freed = (drops > 0) & (holders <= 0)
        place = jnp.where(freed, self.num_free + jnp.cumsum(freed, dtype=jnp.int32) - 1, self.pages)
        cache = dataclasses.replace(
            self,
            page_table=jnp.where(chosen[:, None], NO_PAGE, self.page_table),
            free_list=self.free_list.at[place].set(
                jnp.arange(self.pages, dtype=jnp.int32), mode="drop"
            ),
            num_free=self.num_free + freed.sum(dtype=jnp.int32),
            holders=jnp.maximum(holders, 0),
        )
        return super(PagedCache, cache).reset(chosen)

    @of_live
    def reset(self, sequences: int | Array) -> "PagedCache":
        """The same as `free`: an empty sequence holds no page."""
        return self.free(sequences)

    @of_live
    def fork(
        self, source: int | Array, target: int | Array, length: int | Array | None = None
    ) -> "PagedCache":
        """Make sequence `target` a copy of the first `length` rows (default: all) of sequence
        `source`.

        The rows that `target` held are freed; `target` may be `source`, then cut to `length`. Full
        pages are shared, a page only partly within `length` is copied (in every layer) since both
        will write to it. Where the pool has no page for that copy, or `source` lost rows before
        `length`, `overflowed[target]` says so. Where a traced `source` or `target` is no sequence,
        nothing changes.
        """
        self._check_whole()
        source, target = (
            self._index(name, x) for name, x in (("source", source), ("target", target))
        )
        ends = jnp.stack([source, target])
        exist = ((ends >= 0) & (ends < self.num_sequences)).all()
        source = jnp.where(exist, source, 0)
        target = jnp.where(exist, target, self.num_sequences)  # every update is dropped there
        held = self.lengths[source]
        if length is None:
            length = held
        else:
            length = jnp.clip(checks.integers("length", length, "an int", ()), 0, held)
        full, part = length // self.page_size, length % self.page_size
        width = self.page_table.shape[1]
        slots = jnp.arange(width, dtype=jnp.int32)
        row = self.page_table[source]
        shared = jnp.where((slots < full) & exist, row, NO_PAGE)
        kept = jnp.where(shared >= 0, shared, self.pages)
        # Pages are held once more before they are freed: `target` may be `source`.
        cache = dataclasses.replace(self, holders=self.holders.at[kept].add(1, mode="drop"))
        cache = cache.free(jnp.arange(self.num_sequences, dtype=jnp.int32) == target)
        from_page = jnp.take(row, full, mode="clip")
        wanted = (part > 0) & (full < width) & exist
        granted = wanted & (from_page >= 0) & (cache.num_free > 0)
        fresh = jnp.take(cache.free_list, cache.num_free - 1, mode="clip")
        row_of_target = jnp.where((slots == full) & wanted, jnp.where(granted, fresh, LOST), shared)
        into_page = jnp.where(granted, fresh, self.pages)
        pools = {name: getattr(cache, name) for name in ("k", "v", "k_scale", "v_scale")}
        copied: dict[str, Any] = {
            name: _copy_page(pool, from_page, into_page, axes=4 - name.endswith("scale"))
            for name, pool in pools.items()
            if pool is not None
        }
        return dataclasses.replace(
            cache,
            **copied,
            page_table=cache.page_table.at[target].set(row_of_target, mode="drop"),
            num_free=cache.num_free - granted.astype(jnp.int32),
            holders=cache.holders.at[into_page].add(1, mode="drop"),
            lengths=cache.lengths.at[target].set(length, mode="drop"),
            new_lengths=cache.new_lengths.at[target].set(NOT_EXTENDED, mode="drop"),
        )

    @of_live
    def shared_prefixes(
        self, *, tokens: int = 1, levels: int = 2, starts: prefixes.Starts = None
    ) -> SharedPrefixes:
        """The pages that several sequences share now, found on the device: `SharedPrefixes`.

        Args:
          tokens: rows of each sequence in q; with `starts` all rows of q.
          levels: how many times sequences with a common prefix may diverge.
          starts: the starts of the call, int32[M + 1], where its rows are packed.
        """
        self._check_whole()
        return prefixes.find(self, tokens, levels, starts)

    def pages_for(self, rows: int) -> int:
        """Pages that a sequence of so many rows takes: admission compares them with `num_free`."""
        count = checks.static_int(rows)
        if count is None or count < 0:
            raise ValueError(f"rows: expected an int of at least 0, got {described(rows)}")
        return -(-count // self.page_size)

    def _check_whole(self) -> None:
        """ValueError where explicit mesh axes split what pages are found by."""
        for name in ("lengths", "new_lengths", "page_table", "free_list", "num_free", "holders"):
            x = getattr(self, name)
            if any(spec := sharding.spec_of(x)):
                raise ValueError(
                    f"cache.{name}: expected numbers that all devices have whole, got "
                    f"int32{list(x.shape)} split as {spec}; place the cache by cache.specs()"
                )

    def _index(self, name: str, value: int | Array) -> Array:
        index, number = checks.scalar(name, value, "the index of a sequence")
        if number is not None and not 0 <= number < self.num_sequences:
            raise ValueError(f"{name}: expected 0 to {self.num_sequences - 1}, got {number}")
        return jnp.asarray(index, jnp.int32)


def _copy_page(pool: Array, source: Array, target: Array, axes: int) -> Array:
    """Page `target` = page `source`, of a pool whose last `axes` axes begin with the pages; a
    target outside the pool copies nothing.
    """
    page = jnp.take(pool, source, axis=-axes, mode="clip")
    where = (..., target, *[slice(None)] * (axes - 1))
    return pool.at[where].set(page, mode="drop")
