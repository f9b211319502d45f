"""The records that `cases` lists: one call each, with its arrays and the work that it is.

Work is counted as the field does it: 4 floating-point operations a visible (query, key) pair, head
and head dimension. Plain causal attention counts exactly half of the full square, and a backward
pass counts 2.5 times its forward pass.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn.masks import CAUSAL, FULL, SIDES, Mask
from pallas_attn.rotary import Rotary
from pallas_attn.scores import ScoreFunction, score_fn
from tests.support.problems.case_functions import Positions, made

SMALL = 2**23  # score elements up to which a quadratic oracle takes well under a second on a CPU


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """One call of `flash_attention`; the same record serves forward and backward."""

    name: str
    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str = "bfloat16"
    mask: Mask = FULL
    scale: float | None = None
    softcap: float | None = None
    precision: str | None = None
    q_offset: int | tuple[int, ...] = 0  # a tuple: one a batch row, handed over as an array
    q_lengths: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    # Lengths of packed documents; an int: ids drawn from range(n); keys of None: as the queries
    segments: tuple[int, ...] | int | None = None
    kv_segments: tuple[int, ...] | int | None = None
    bias_shape: tuple[int, ...] | None = None
    bias_dtype: str = "float32"
    mask_shape: tuple[int, ...] | None = None
    # First and end of the keys that mask_array, of mask_shape [B, 1, 1, S], shows; None: drawn
    shown_keys: tuple[tuple[int, int], ...] | None = None
    sinks: bool = False
    magnitude: float = 1.0  # standard deviation of q; a large one makes the softmax saturate
    deterministic: bool = False
    packed: bool = False  # ours is called with packed rows and q_starts, not with segment ids
    function: tuple[str, int] | None = None  # a name of `case_functions`, in place of the mask
    both: bool = False  # ops "mask" and "shapes": measure forward and backward
    learned: bool = False  # measure gradients of the function's arrays, too
    mask_at_run_time: bool = False  # the mask's bounds are handed over as arrays
    # RoPE: the first column, rotated columns, and whether pairs are neighbours
    rotary: tuple[int, int, bool] | None = None
    rotary_positions: bool = False  # positions of their own; with offsets that no table has
    # Rows that share a scale: of float8 q, k and v, or where they are rounded to it; None: all
    scale_rows: int | None = None
    labels: tuple[str, ...] = ()

    @functools.cached_property
    def tags(self) -> frozenset[str]:
        """The labels, and tags that the fields imply."""
        names = (
            *("q_lengths", "kv_lengths", "segments", "softcap", "precision", "sinks"),
            *("deterministic", "mask_at_run_time", "packed", "rotary"),
        )
        flags = {
            "bias": self.bias_shape,
            "mask_array": self.mask_shape,
            "q_offset": self.q_offset != 0,
            _heads(self.q_heads, self.kv_heads): True,
            _kind(self.mask): True,
        }
        score_elements = self.batch * self.q_heads * self.q_len * self.kv_len
        return _tags(self, names, flags, score_elements)

    def options(self) -> dict[str, Any]:
        """The static keyword arguments of `flash_attention`."""
        names = ("mask", "scale", "softcap", "precision")
        static: dict[str, Any] = {name: getattr(self, name) for name in names}
        if isinstance(self.q_offset, int):
            static["q_offset"] = self.q_offset
        if self.deterministic:
            static["deterministic"] = True
        if self.mask_at_run_time:
            del static["mask"]
        return static

    def arrays(self, seed: int = 0, *, poison: bool = False) -> dict[str, Any]:
        """The array arguments of `flash_attention`. `poison`: past every length NaN, a mask that
        would show a key, and the segment of another row.
        """
        draw = functools.partial(_normal, seed, self.dtype)
        q = draw("q", (self.batch, self.q_len, self.q_heads, self.head_dim), self.magnitude)
        k = draw("k", (self.batch, self.kv_len, self.kv_heads, self.head_dim))
        v = draw("v", (self.batch, self.kv_len, self.kv_heads, self.v_head_dim))
        if poison:
            q = _poison(q, self.q_lengths, axis=1)
            k, v = (_poison(x, self.kv_lengths, axis=1) for x in (k, v))
        arrays: dict[str, Any] = {"q": q, "k": k, "v": v} | self._scales(seed)
        for name in ("q_lengths", "kv_lengths"):
            if getattr(self, name) is not None:
                arrays[name] = jnp.array(getattr(self, name), jnp.int32)
        if not isinstance(self.q_offset, int):
            arrays["q_offset"] = jnp.array(self.q_offset, jnp.int32)
        if self.segments is not None:
            ids = (jnp.array(ids) for ids in self.segment_ids(seed))
            ends = (self.q_lengths, self.kv_lengths) if poison else (None, None)
            arrays["segment_ids"] = tuple(
                _poison(x, some, axis=1, by=0) for x, some in zip(ids, ends, strict=True)
            )
        if self.bias_shape is not None:
            arrays["bias"] = _normal(seed, self.bias_dtype, "bias", self.bias_shape)
        if self.mask_shape is not None:
            arrays["mask_array"] = jnp.array(_mask_array(seed, self.mask_shape, self.shown_keys))
        for name, by in (("bias", math.nan), ("mask_array", True)) if poison else ():
            if name in arrays:
                for live, axis in ((self.q_lengths, 2), (self.kv_lengths, 3)):
                    arrays[name] = _poison(arrays[name], live, axis, by)
        if self.sinks:
            arrays["sinks"] = _normal(seed, "float32", "sinks", (self.q_heads,))
        if self.function is not None:
            arrays["aux"] = tuple(map(jnp.asarray, self.positions().aux))
        if self.rotary is not None:
            arrays |= self._rotation(seed)
        if self.mask_at_run_time:
            bounds = {side: getattr(self.mask, side) for side in SIDES}
            bounds = {side: jnp.int32(x) for side, x in bounds.items() if x is not None}
            arrays["mask"] = self.mask.filled(**bounds)
        return arrays

    def _scales(self, seed: int) -> dict[str, Any]:
        """Scales of float8 numbers: powers of 2, so that their products are exact in bfloat16."""
        if self.scale_rows is None or not self.dtype.startswith("float8"):
            return {}
        rng, scales = np.random.default_rng(seed), {}
        for name in "qkv":
            rows, heads = (self.kv_len, self.kv_heads)
            if name == "q":
                rows, heads = (self.q_len, self.q_heads)
            shape = (self.batch, -(-rows // self.scale_rows), heads)
            scales[f"{name}_scale"] = jnp.asarray(2.0 ** rng.integers(-1, 2, shape), jnp.float32)
        return scales

    def rounded_bytes(self) -> int:
        """Bytes of q, k and v that are read, and of float8 numbers and scales that are written."""
        size, total = jnp.dtype(self.dtype).itemsize, 0
        sides = (
            (self.q_len, self.q_heads, self.head_dim),
            (self.kv_len, self.kv_heads, self.head_dim),
            (self.kv_len, self.kv_heads, self.v_head_dim),
        )
        for rows, heads, dim in sides:
            scales = heads * -(-rows // (self.scale_rows or rows))
            total += self.batch * (rows * heads * dim * (size + 1) + 4 * scales)
        return total

    def _rotation(self, seed: int) -> dict[str, Any]:
        assert self.rotary is not None
        first, dims, interleaved = self.rotary
        how: dict[str, Any] = {"interleaved": interleaved, "first": first}
        if not self.rotary_positions:
            assert isinstance(self.q_offset, int)
            most = max(self.q_offset + self.q_len, self.kv_len, 1)
            return {"rotary": Rotary.create(most, dims, **how)}
        rng, most = np.random.default_rng(seed), 500
        rows = ((self.batch, self.q_len), (self.batch, self.kv_len))
        at = tuple([jnp.asarray(rng.integers(0, most, shape), jnp.int32) for shape in rows])
        return {"rotary": Rotary.create(most, dims, **how), "rotary_positions": at}

    def positions(self) -> Positions:
        """Its function."""
        assert self.function is not None
        return made(*self.function, (self.batch, self.q_heads, self.q_len, self.kv_len))

    def written_out(self) -> dict[str, jax.Array]:
        """The function as arrays of all positions: the mask, and what is added to scores."""
        function, aux = self.positions(), self.arrays()["aux"]
        sizes = (self.batch, self.q_heads, self.q_len, self.kv_len)
        at = [jnp.asarray(x, jnp.int32) for x in np.ogrid[tuple(map(slice, sizes))]]
        arrays = {"mask_array": function.mask(*at, *aux)}
        if function.score is not None:
            with jax.numpy_dtype_promotion("standard"):
                arrays["bias"] = function.score(jnp.zeros((1,) * 4), *at, *aux)
        shape = (self.q_len, self.kv_len)
        return {name: jnp.broadcast_to(x, (*x.shape[:2], *shape)) for name, x in arrays.items()}

    def arguments(self, seed: int = 0, *, poison: bool = False) -> dict[str, Any]:
        """All arguments: `flash_attention(**case.arguments(seed))`."""
        return self.arrays(seed, poison=poison) | self.options()

    def cotangent(self, seed: int = 0) -> jax.Array:
        """A random dO, never ones: ones hide a permutation of the head dimension."""
        shape = (self.batch, self.q_len, self.q_heads, self.v_head_dim)
        return _normal(seed, self.dtype, "do", shape)

    def tangents(self, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Random tangents of q, k and v."""
        dims = (self.head_dim, self.head_dim, self.v_head_dim)
        rows = ((self.q_len, self.q_heads), *[(self.kv_len, self.kv_heads)] * 2)
        named = zip(("q_dot", "k_dot", "v_dot"), rows, dims, strict=True)
        q, k, v = (
            _normal(seed, self.dtype, name, (self.batch, *row, dim)) for name, row, dim in named
        )
        return q, k, v

    def q_starts(self) -> jax.Array:
        """Starts and end of a packed case's documents, which fill its one batch row."""
        assert isinstance(self.segments, tuple) and (self.batch, self.kv_len) == (1, self.q_len)
        return jnp.array(np.cumsum((0, *self.segments)), jnp.int32)

    def segment_ids(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """int32[B, T] and int32[B, S]; packed documents start one further on in each batch row."""
        kv_segments = self.segments if self.kv_segments is None else self.kv_segments
        assert self.segments is not None and kv_segments is not None
        q_ids = _segment_ids(seed, self.segments, self.batch, self.q_len)
        if kv_segments == self.segments and self.q_len == self.kv_len:
            return q_ids, q_ids
        return q_ids, _segment_ids(seed + 1, kv_segments, self.batch, self.kv_len)

    def visible_pairs(self) -> int:
        """(query, key) pairs that mask, lengths and segments leave to one head, over the batch."""
        if self.function is not None:
            return self._pairs_of_function()
        if self.mask == CAUSAL and self.q_len == self.kv_len and not self._trimmed():
            return self.batch * self.q_len * self.kv_len // 2
        return sum(self._row_pairs(row) for row in range(self.batch))

    def _pairs_of_function(self) -> int:
        function, pairs = self.positions(), 0
        keys = np.arange(self.kv_len, dtype=np.int32)[None, None]
        rows = np.arange(self.batch, dtype=np.int32)[:, None, None]
        for start in range(0, self.q_len, 1024):
            slab = np.arange(start, min(start + 1024, self.q_len), dtype=np.int32)[None, :, None]
            seen = np.asarray(function.mask(rows, 0, slab, keys, *function.aux))
            seen = np.broadcast_to(seen, (seen.shape[0], slab.size, self.kv_len))
            pairs += int(seen.sum()) * (self.batch // seen.shape[0])
        return pairs

    def _trimmed(self) -> bool:
        return any((self.q_lengths, self.kv_lengths, self.segments is not None, self.q_offset != 0))

    def _row_pairs(self, row: int) -> int:
        q_len = self.q_len if self.q_lengths is None else self.q_lengths[row]
        kv_len = self.kv_len if self.kv_lengths is None else self.kv_lengths[row]
        offset = self.q_offset if isinstance(self.q_offset, int) else self.q_offset[row]
        if self.segments is None:
            q_pos = np.arange(q_len, dtype=np.int64) + offset
            low, high = self.mask.kv_range(q_pos, q_pos + 1, np.full_like(q_pos, kv_len))
            return int(np.maximum(high - low, 0).sum())
        q_ids, kv_ids = (ids[row] for ids in self.segment_ids())
        pairs = 0
        for start in range(0, q_len, 1024):  # in slabs: the dense mask of a long row would not fit
            slab = np.arange(start, min(start + 1024, q_len))
            keys = np.arange(self.kv_len)
            ids = q_ids[slab][:, None], kv_ids[None]
            pairs += int(self.mask.allows(slab[:, None] + offset, keys[None], kv_len, *ids).sum())
        return pairs

    def flops(self) -> float:
        """Floating-point operations of the forward pass."""
        return 2.0 * (self.head_dim + self.v_head_dim) * self.q_heads * self.visible_pairs()


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    """One call of `decode_attention` over M caches that hold `lengths` rows."""

    name: str
    lengths: tuple[int, ...]
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    capacity: int
    q_len: int = 1
    rows: tuple[int, ...] | None = None  # packed: query rows of each sequence, not q_len
    dtype: str = "bfloat16"
    kind: str = "per_sequence"  # or "stacked", "paged", "interleaved" (`ragged_paged_attention`)
    page_size: int | None = None
    mask: Mask = CAUSAL
    softcap: float | None = None
    sinks: bool = False
    cache_dtype: str | None = None  # quantised; None: rows lie in `dtype`
    shared_kv: bool = False  # V is the first columns of K
    byte_rows: bool = False  # rows lie in FlashMLA's format (`create(scales=128)`)
    scale: float | None = None
    precision: str | None = None
    batch_invariant: bool = False
    tree: bool = False  # the q_len rows are drafts of a tree
    listed: int | None = None  # positions that a query row attends to (`kv_indices`)
    alibi: bool = False  # a score function: a slope a head times the distance
    # Each (sequences, rows): so many sequences in turn have so many rows more in common, from
    # the first on, in pages that they share
    shared: tuple[tuple[int, int], ...] = ()
    finding: bool = False  # shared pages are found in the call that is timed
    labels: tuple[str, ...] = ()

    @functools.cached_property
    def tags(self) -> frozenset[str]:
        """The labels, and tags that the fields imply."""
        names = ("shared_kv", "byte_rows", "tree", "softcap", "precision", "sinks", "alibi")
        flags = {
            self.kind: True,
            _heads(self.q_heads, self.kv_heads): True,
            self.cache_dtype or "": self.cache_dtype,
            "quantized": self.cache_dtype,
            "ragged": len(set(self.lengths)) > 1,
            "chunk": max(self.rows or (self.q_len,)) > 1,
            "packed": self.rows is not None,
            "window": self.mask.left is not None,
            "listed": self.listed is not None,
        }
        score_elements = self.sequences * self.q_heads * self.q_len * self.capacity
        return _tags(self, names, flags, score_elements)

    @property
    def multiplies_float8(self) -> bool:
        """Whether matmuls on the numbers of a float8 cache are allowed."""
        return bool(self.cache_dtype) and str(self.precision).startswith("ANY_F8")

    @property
    def problem_alone(self) -> "DecodeCase":
        """The case but for the kind of its cache, which changes neither arrays nor results."""
        alone = {"kind": "stacked", "page_size": None, "labels": (), "finding": False}
        return dataclasses.replace(self, name="", **alone)  # type: ignore[arg-type]

    @property
    def sequences(self) -> int:
        """M."""
        return len(self.lengths)

    @property
    def each(self) -> tuple[int, ...]:
        """Query rows of every sequence."""
        return (self.q_len,) * self.sequences if self.rows is None else self.rows

    def starts(self) -> jax.Array | None:
        """Starts of packed sequences' rows."""
        return None if self.rows is None else jnp.array(np.cumsum((0, *self.rows)), jnp.int32)

    def parents(self, seed: int = 0) -> np.ndarray | None:
        """int32[M, t], packed int32[tokens]: the draft of a tree that each draft follows, any
        earlier one or none.
        """
        if not self.tree:
            return None
        at, rng = np.concatenate([np.arange(t) for t in self.each]), np.random.default_rng(seed)
        parents = rng.integers(-1, np.maximum(at, 1)).astype(np.int32)
        return parents if self.rows is not None else parents.reshape(self.sequences, self.q_len)

    def indices(self, seed: int = 0) -> np.ndarray | None:
        """int32[M, t, n]: different positions of each query row's sequence, -1 where it has no
        more. Rows are not packed.
        """
        if self.listed is None:
            return None
        rng, shape = np.random.default_rng(seed), (self.sequences, self.q_len, self.listed)
        indices = np.full(shape, -1, np.int32)
        for m, length in enumerate(self.lengths):
            for row in indices[m]:
                some = rng.permutation(length)[: self.listed]
                row[: len(some)] = some
        return indices

    def seen_in_lists(self, seed: int = 0) -> jax.Array:
        """bool[M, 1, t, capacity]: positions that are listed."""
        indices = self.indices(seed)
        assert indices is not None
        seen = np.zeros((self.sequences, 1, self.q_len, self.capacity + 1), bool)
        np.put_along_axis(seen[:, 0], indices % (self.capacity + 1), True, axis=-1)
        return jnp.asarray(seen[..., :-1])

    def score(self) -> ScoreFunction | None:
        """The score function, if there is one."""
        if not self.alibi:
            return None
        function, aux = self._slopes()
        return score_fn(function, *aux)

    def _slopes(self) -> tuple[Callable[..., Any], tuple[np.ndarray, ...]]:
        _, aux, score, _ = made("alibi", 0, (1, self.q_heads, 1, 1))
        assert score is not None
        return score, aux

    def added(self) -> np.ndarray:
        """float32[M, N, t, capacity]: what the score function adds; t as in `seen_in_tree`."""
        function, aux = self._slopes()
        sizes = (self.sequences, self.q_heads, max(self.each, default=0), self.capacity)
        b, h, t, kv = (x.astype(np.int32) for x in np.ogrid[tuple(map(slice, sizes))])
        q = t + np.reshape(np.subtract(self.lengths, self.each), (-1, 1, 1, 1))
        return function(np.float32(0), b, h, q, kv, *aux).astype(np.float32)

    def seen_in_tree(self, seed: int = 0) -> jax.Array:
        """bool[M, 1, t, capacity]: the rows before the drafts, themselves and their ancestors. For
        packed rows t is the most that a sequence has.
        """
        followed_by_row, most = self.parents(seed), max(self.each)
        assert followed_by_row is not None
        parents = np.full((self.sequences, most), -1)
        real = np.arange(most)[None] < np.asarray(self.each)[:, None]
        parents[real] = followed_by_row.reshape(-1)
        seen = np.zeros((self.sequences, most, most), bool)
        for i, at in enumerate(parents.T):
            (followed,) = np.nonzero(at >= 0)
            seen[followed, i] = seen[followed, at[followed]]
            seen[:, i, i] = True
        dense = np.zeros((self.sequences, 1, most, self.capacity), bool)
        for m, (length, t) in enumerate(zip(self.lengths, self.each, strict=True)):
            dense[m, 0, :t, : length - t] = True
            dense[m, 0, :t, length - t : length] = seen[m, :t, :t]
        return jnp.asarray(dense)

    def options(self) -> dict[str, Any]:
        """The static keyword arguments of `decode_attention`."""
        names = ("mask", "scale", "softcap", "precision", "batch_invariant")
        return {name: getattr(self, name) for name in names}

    def arrays(self, seed: int = 0, *, poison: bool = False) -> dict[str, Any]:
        """q `[M, t, N, H]` (packed `[tokens, N, H]`), k and v dense and head-major `[M, K,
        capacity, H]`, not quantised, lengths, sinks.
        """
        m, k_heads = self.sequences, self.kv_heads
        draw = functools.partial(_normal, seed, self.dtype)
        k = draw("k", (m, k_heads, self.capacity, self.head_dim))
        if self.shared_kv:
            v = k[..., : self.v_head_dim]
        else:
            v = draw("v", (m, k_heads, self.capacity, self.v_head_dim))
        if self.shared:
            k, v = (self._in_common(x) for x in (k, v))
        if poison:
            k, v = (_poison(x, self.lengths, axis=2) for x in (k, v))
        new = (m, self.q_len) if self.rows is None else (sum(self.rows),)
        arrays = {
            "q": draw("q", (*new, self.q_heads, self.head_dim)),
            "k": k,
            "v": v,
            "lengths": jnp.array(self.lengths, jnp.int32),
        }
        if self.sinks:
            arrays["sinks"] = _normal(seed, "float32", "sinks", (self.q_heads,))
        return arrays

    def first_with(self, rows: np.ndarray) -> np.ndarray:
        """int[M, rows]: the first sequence that has these rows in common with each sequence."""
        sequences, begin = np.arange(self.sequences)[:, None], 0
        owner = np.broadcast_to(sequences, (self.sequences, len(rows)))
        for size, count in self.shared:
            inside = (rows >= begin) & (rows < begin + count)
            owner = np.where(inside, sequences // size * size, owner)
            begin += count
        return owner

    def _in_common(self, x: jax.Array) -> jax.Array:
        """x [M, K, capacity, ...], the first sequence's rows in all that share them."""
        begin = 0
        for size, count in self.shared:
            rows = (slice(None), slice(None), slice(begin, begin + count))
            first = jnp.repeat(x[rows][::size], size, axis=0)[: self.sequences]
            x, begin = x.at[rows].set(first), begin + count
        return x

    def dense(self) -> AttentionCase:
        """The same as one call of `flash_attention`, over K and V of `capacity` rows; packed rows
        become a batch with `q_lengths`.
        """
        offsets = tuple(length - t for length, t in zip(self.lengths, self.each, strict=True))
        full = self.rows is None and all(length == self.capacity for length in self.lengths)
        names = ("dtype", "mask", "scale", "softcap", "precision", "sinks")
        return AttentionCase(
            *(self.name, self.sequences, max(self.each, default=0), self.capacity),
            *(self.q_heads, self.kv_heads, self.head_dim, self.v_head_dim),
            q_offset=offsets[0] if full and offsets else offsets,
            q_lengths=self.rows,
            kv_lengths=None if full else self.lengths,
            **{name: getattr(self, name) for name in names},
        )

    def live_bytes(self) -> int:
        """Bytes of K and V, and of their scales, that must be read: the rows that the mask and the
        lengths leave.
        """
        rows = 0
        for length, t in zip(self.lengths, self.each, strict=True):
            low, high = self.mask.kv_range(length - t, length, length) if t else (0, 0)
            rows += max(high - low, 0) if self.listed is None else t * min(self.listed, length)
        for size, count in self.shared:  # once for all that have them
            rows -= (self.sequences - -(-self.sequences // size)) * count
        if self.byte_rows:
            return rows * BYTES_OF_A_ROW
        dims = (self.head_dim,) if self.shared_kv else (self.head_dim, self.v_head_dim)
        return rows * self.kv_heads * _row_bytes(dims, self.dtype, self.cache_dtype)


@dataclasses.dataclass(frozen=True)
class AppendCase:
    """One call of `append_kv`: `new_rows` rows into each of M caches that hold `lengths` rows; or
    of `cache.keep`, after it.
    """

    name: str
    lengths: tuple[int, ...]
    kv_heads: int
    head_dim: int
    v_head_dim: int
    capacities: tuple[int, ...]  # per_sequence: one each, else one
    new_rows: int = 1
    new_lengths: tuple[int, ...] | None = None
    dtype: str = "bfloat16"
    kind: str = "per_sequence"
    page_size: int | None = None
    cache_dtype: str | None = None  # quantised; None: rows lie in `dtype`
    kept: int | None = None  # not the append but `cache.keep` is timed, of so many last rows
    labels: tuple[str, ...] = ()

    @functools.cached_property
    def tags(self) -> frozenset[str]:
        """The labels, and tags that the fields imply."""
        flags = {
            self.kind: True,
            f"m{self.sequences}": True,
            self.cache_dtype or "": self.cache_dtype,
            "quantized": self.cache_dtype,
            "ragged": len(set(self.lengths)) > 1 or self.new_lengths is not None,
            "chunk": self.new_rows > 1,
            "kept": self.kept is not None,
        }
        elements = self.sequences * self.kv_heads * max(self.capacities) * self.head_dim
        return _tags(self, (), flags, elements)

    @property
    def sequences(self) -> int:
        """M."""
        return len(self.lengths)

    def arrays(self, seed: int = 0) -> dict[str, Any]:
        """The new rows `[M, t, K, H]` of k and v, lengths before the append, new_lengths."""
        m, t = self.sequences, self.new_rows
        arrays = {
            "k": _normal(seed, self.dtype, "k", (m, t, self.kv_heads, self.head_dim)),
            "v": _normal(seed, self.dtype, "v", (m, t, self.kv_heads, self.v_head_dim)),
            "lengths": jnp.array(self.lengths, jnp.int32),
        }
        if self.new_lengths is not None:
            arrays["new_lengths"] = jnp.array(self.new_lengths, jnp.int32)
        return arrays

    def path(self) -> jax.Array:
        """int32[M, kept]: rows to keep; none is both written and read, so that calls can repeat."""
        assert self.kept is not None
        rows = jnp.arange(self.new_rows - self.kept, self.new_rows, dtype=jnp.int32)
        return jnp.broadcast_to(rows, (self.sequences, self.kept))

    def moved_bytes(self) -> int:
        """Bytes that must move: the new or the kept rows, read once and written once, with their
        scales.
        """
        dims = (self.head_dim, self.v_head_dim)
        written = _row_bytes(dims, self.dtype, self.cache_dtype)
        if self.kept is not None:
            return 2 * self.sequences * self.kept * self.kv_heads * written
        rows = self.sequences * self.new_rows
        if self.new_lengths is not None:
            rows = sum(self.new_lengths)
        return rows * self.kv_heads * (_row_bytes(dims, self.dtype, None) + written)


def _tags(
    case: AttentionCase | DecodeCase | AppendCase,
    names: tuple[str, ...],
    flags: dict[str, Any],
    elements: int,
) -> frozenset[str]:
    """The labels, names of fields that are set, names of flags that are, and tags of all cases."""
    implied = {name for name in names if getattr(case, name)}
    implied |= {name for name, on in flags.items() if on} | {case.dtype, f"h{case.head_dim}"}
    implied |= {"hv"} if case.head_dim != case.v_head_dim else set()
    implied |= {"small"} if elements <= SMALL else set()
    return frozenset(case.labels) | implied


def _heads(q_heads: int, kv_heads: int) -> str:
    if q_heads == kv_heads:
        return "mha"
    return "mqa" if kv_heads == 1 else "gqa"


def _kind(mask: Mask) -> str:
    if mask.is_full or mask == CAUSAL:
        return str(mask)
    return "window" if mask.left is not None else "band"


BYTES_OF_A_ROW = 656  # a latent cache in FlashMLA's format


def _row_bytes(dims: tuple[int, ...], dtype: str, cache_dtype: str | None) -> int:
    """Bytes of a kv head's row, K and V; a quantised one has a float32 scale for each."""
    scales = 4 * len(dims) if cache_dtype else 0
    return sum(dims) * jnp.dtype(cache_dtype or dtype).itemsize + scales


def _normal(
    seed: int, dtype: str, name: str, shape: tuple[int, ...], magnitude: float = 1.0
) -> jax.Array:
    tag = zlib.crc32(name.encode())
    if math.prod(shape) <= 2**20:  # in NumPy: XLA compiles for every shape, 0.1 s each
        values = np.random.default_rng((seed, tag)).standard_normal(shape, np.float32)
        return jnp.array((values * np.float32(magnitude)).astype(jnp.dtype(dtype)))
    return _draw_on_device(jax.random.fold_in(jax.random.key(seed), tag), shape, dtype, magnitude)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _draw_on_device(
    key: jax.Array, shape: tuple[int, ...], dtype: str, magnitude: float
) -> jax.Array:
    return (jax.random.normal(key, shape, jnp.float32) * magnitude).astype(dtype)


def _poison(
    rows: jax.Array, lengths: tuple[int, ...] | None, axis: int, by: float = math.nan
) -> jax.Array:
    """`rows` with `by` past the lengths along an axis; one that is broadcast stays as it is."""
    if lengths is None or rows.shape[axis] == 1:
        return rows
    if len(rows) == 1:  # serves the longest, too
        lengths = (max(lengths),)
    shape = [1] * rows.ndim
    shape[axis] = rows.shape[axis]
    position = np.arange(rows.shape[axis]).reshape(shape)
    past = position >= np.reshape(lengths, (-1,) + (1,) * (rows.ndim - 1))
    if rows.size > 2**20:
        return jnp.where(past, jnp.array(by, rows.dtype), rows)
    return jnp.array(np.where(past, np.array(by, rows.dtype), rows))


def _segment_ids(seed: int, segments: tuple[int, ...] | int, batch: int, length: int) -> np.ndarray:
    if isinstance(segments, int):
        return np.random.default_rng(seed).integers(0, segments, (batch, length)).astype(np.int32)
    rows = []
    for row in range(batch):
        turn = row % len(segments)
        ids = np.repeat(np.arange(len(segments)), segments[turn:] + segments[:turn])[:length]
        rows.append(np.pad(ids, (0, length - len(ids)), constant_values=len(segments)))
    return np.array(rows, np.int32).reshape(batch, length)


def _mask_array(
    seed: int, shape: tuple[int, ...], shown_keys: tuple[tuple[int, int], ...] | None
) -> np.ndarray:
    if shown_keys is not None:
        first, end = np.array(shown_keys).T[:, :, None, None, None]
        at = np.arange(shape[3])
        return (first <= at) & (at < end)
    seen = np.random.default_rng(seed).random(shape) < 0.7
    if shape[2] > 1:
        seen[:, :, 1] = False  # a row that sees nothing
    return seen
