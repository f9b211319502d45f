"""New rows into KV caches: one launch for K and V of every sequence, in place under donation."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn import trees
from pallas_attn._cache import blocks, facts
from pallas_attn._cache.bind import change_of
from pallas_attn._cache.facts import CacheFacts, facts_of, of_live
from pallas_attn._cache.write import rows_into
from pallas_attn._call import checks
from pallas_attn._call.changed_rows import changed
from pallas_attn._call.checks import Argument
from pallas_attn._call.problem import QUANTIZED, AppendInputs, Change, owned_rows
from pallas_attn._mesh import sharding
from pallas_attn.cache import KVCache, not_a_cache
from pallas_attn.rotary import RMSNorm, Rotary
from pallas_attn.trees import DraftTree

Array = jax.Array


@of_live
def write_kv[Cache: KVCache](  # noqa: PLR0913
    cache: Cache,
    k: Array,
    v: Array | None = None,
    *,
    starts: Array | None = None,
    parents: Array | DraftTree | None = None,
    layer: int | Array | None = None,
    rotary: Rotary | None = None,
    norm: RMSNorm | None = None,
    implementation: str | None = None,
) -> Cache:
    """Fill the rows that the latest `extend` took, in one layer.

    Args:
      cache: the cache after `extend`. Where no `extend` has been since a sequence was made, emptied
        or forked into, nothing is written: a ValueError outside of jit; inside it, decoding that
        sequence while it is empty gives NaN.
      k, v: `[M, t, K, H]` and `[M, t, K, Hv]`, or without t for one token. Where `extend` took
        fewer than t rows in a sequence, its first rows count and the rest is ignored; where it took
        more, that is a ValueError outside of jit, and inside it the last ones stay as they are.
        Another float type is cast to the cache's; a quantised cache stores each row of a head as
        narrow numbers and a float32 scale (a row with a NaN or an infinity in it becomes NaN
        throughout). No v where the cache keeps V within K (`shared_kv`). With `starts`, packed rows
        `[tokens, K, H]` and `[tokens, K, Hv]`.
      starts: int32[M + 1], traced or not: sequence i owns rows starts[i] to starts[i + 1], as in
        `decode_attention`; `cache.extend(jnp.diff(starts))` takes them. Other numbers than `extend`
        took are a ValueError where both are known. Rows that no sequence owns are ignored.
      parents: where the rows are drafts that form a tree, the draft that each follows, as in
        `decode_attention`: `rotary` turns a draft by its position in the tree. Rows are written one
        behind the other all the same.
      layer: which layer: an int or an int32 (traced, and outside of the cache's layers: nothing is
        written). It may be left out where the cache has one.
      rotary, norm: applied to the rows of K on their way, in the same launch: first the norm, then
        the rotation by each row's position in its sequence; in float32, and rounded once, to the
        cache's dtype. `decode_attention` takes the same for q.
      implementation: "sm80", "reference" or None.

    Returns:
      The cache with those rows written and nothing else touched. Inside jit, with the cache donated
      or in a loop's carry, the buffers are updated in place.

    Example::

        >>> cache = pa.StackedCache.create(2, 16, kv_heads=2, head_dim=64, layers=3).extend(5)
        >>> rows = jnp.ones((2, 5, 2, 64), cache.k.dtype)
        >>> for layer in range(3):
        ...     cache = pa.write_kv(cache, rows, rows, layer=layer)
        >>> bool((cache.k[:, :, :, :5] == 1).all())
        True
    """
    rows, unchecked = _rows(cache, k, v, packed=starts is not None), starts
    if starts is not None:
        starts = checks.row_starts("starts", starts, rows.k.shape[0], cache.num_sequences)
    options = _Options(starts, parents, layer, rotary, norm, implementation, unchecked)
    return _write(cache, rows, options, extended=False)


class _Rows(NamedTuple):
    """New rows of K and of V, with the columns that the cache has, and its facts."""

    k: Array  # [M, t, K, H], or packed [tokens, K, H]
    v: Array | None
    facts: CacheFacts


class _Options(NamedTuple):
    """The other arguments of `write_kv`."""

    starts: Array | None
    parents: Array | DraftTree | None
    layer: int | Array | None
    rotary: Rotary | None
    norm: RMSNorm | None
    implementation: str | None
    unchecked: Array | None  # starts before they were checked


def _write[Cache: KVCache](
    cache: Cache, rows: _Rows, options: _Options, *, extended: bool
) -> Cache:
    """`write_kv` of rows and starts that are checked. `extended`: the cache by as many rows."""
    count = rows.k.shape[1]
    change, arrays = change_of(cache, options.rotary, options.norm, rows.facts.head_dim)
    if options.parents is not None:
        k = _in_tree(cache, rows.k, options, (change, arrays))
        rows, change, arrays = rows._replace(k=k), None, {}
    end: Array | None = cache.lengths
    new_lengths: Array | None = cache.new_lengths
    owners: Array | None = None
    positions: Array | None = None
    if options.starts is not None or cache.context is not None:
        rows, owners, positions, change = _placed(cache, rows, options.starts, (change, arrays))
        end, new_lengths, arrays = None, None, arrays if change is not None else {}
    inputs = AppendInputs(
        cache.k,
        cache.v,
        rows.k,
        rows.v,
        end,
        new_lengths,
        cache.page_table,
        checks.layer(options.layer, rows.facts.layers),
        cache.k_scale,
        cache.v_scale,
        owners,
        positions,
        **arrays,
    )
    if not (extended or isinstance(cache.new_lengths, jax.core.Tracer)):
        facts.check_taken(cache, count if options.starts is None else options.starts)
    new = rows_into(inputs, cache.kind, options.implementation, change=change)
    return dataclasses.replace(
        cache, k=new.k_cache, v=new.v_cache, k_scale=new.k_scale, v_scale=new.v_scale
    )


def _in_tree(
    cache: KVCache, k: Array, options: _Options, by: tuple[Change | None, dict[str, Array]]
) -> Array:
    """Rows of K that are drafts of a tree, normed and rotated by their places in it."""
    parents: Any = options.parents
    starts, wrong, (change, arrays) = options.starts, None, by
    begin = cache.lengths - jnp.maximum(cache.new_lengths, 0)
    if starts is None:
        tree, begin = trees.of(parents, *k.shape[:2]), begin[:, None]
    else:
        tree = trees.of_packed(parents, starts, k.shape[0], options.unchecked)
        wrong = trees.of_other_rows(tree, starts, options.unchecked)
        begin = begin[owned_rows(starts, k.shape[0])[0]]
    if change is None:
        return k
    if wrong is not None:
        k = jnp.where(wrong[:, None, None], jnp.nan, k)
    return changed(_as_kept(cache, k), begin + tree.depth, change, arrays)


def _as_kept(cache: KVCache, k: Array) -> Array:
    """Rows in the dtype in which the cache keeps them, but for quantised ones."""
    return k if cache.quantized else k.astype(cache.dtype)


def _placed(
    cache: KVCache,
    rows: _Rows,
    starts: Array | None,
    by: tuple[Change | None, dict[str, Array]],
) -> tuple[_Rows, Array, Array, Change | None]:
    """Packed rows, the sequence of each and its position, int32[rows] each, and the change that is
    left to do. A position is -1 where the row is dropped: past a length, or in the block of another
    device. Nothing but rows depends on the layer, so a program finds places once a step.
    """
    change, arrays = by
    owned: Array | bool = True
    if starts is None:
        # Constants: of an iota and a comparison XLA makes kernels, which run at every call.
        numbers, each = np.arange(cache.num_sequences + 1, dtype=np.int32), rows.k.shape[1]
        starts = jnp.asarray(numbers * each)
        owners = jnp.asarray(np.repeat(numbers[:-1], each))
        k, v = (None if x is None else x.reshape(-1, *x.shape[2:]) for x in rows[:2])
        rows = _Rows(k, v, rows.facts)  # type: ignore[arg-type]
    else:
        owners, owned = owned_rows(starts, rows.k.shape[0])
    lengths, new_lengths = sharding.whole((cache.lengths, cache.new_lengths))
    new, end = new_lengths[owners], lengths[owners]
    within = jnp.arange(owners.size, dtype=jnp.int32) - starts[owners]
    begins = jnp.where((end >= 0) & (new >= 0), end - new, -1)
    exists = owned & (within < new) & (begins >= 0)
    positions = jnp.where(exists, begins + within, -1)
    if cache.context is not None:
        blocks.check_split(cache.context, cache.k)
        if change is not None:  # by positions in the sequence, not those in a device's block
            k = changed(_as_kept(cache, rows.k), positions, change, arrays)
            rows, change = rows._replace(k=k), None
        positions = blocks.rows_here(cache.context, cache.held, owners, positions)
    return rows, owners, positions, change


@of_live
def append_kv[Cache: KVCache](  # noqa: PLR0913
    cache: Cache,
    k: Array,
    v: Array | None = None,
    *,
    starts: Array | None = None,
    parents: Array | DraftTree | None = None,
    new_lengths: Array | None = None,
    rotary: Rotary | None = None,
    norm: RMSNorm | None = None,
    implementation: str | None = None,
) -> Cache:
    """`extend` and `write_kv` in one, for a cache of one layer: append rows to every sequence.

    Args:
      cache: a cache without layers, or of one.
      k, v: `[M, t, K, H]` and `[M, t, K, Hv]`, or without t for one token; as in `write_kv`.
      starts: as in `write_kv`: each sequence takes the packed rows that it owns.
      parents: as in `write_kv`.
      new_lengths: int32[M], how many of the t rows each sequence takes (counts are held to 0 .. t);
        default all t. Not with `starts`, whose differences are the counts.
      rotary, norm, implementation: as in `write_kv`.

    Returns:
      The cache, its lengths moved and the rows in it, in place as in `write_kv`. Rows past a
      sequence's capacity are dropped and counted: `cache.overflowed`.

    Example::

        >>> cache = pa.StackedCache.create(2, 16, kv_heads=2, head_dim=64)
        >>> rows = jnp.ones((2, 5, 2, 64), cache.k.dtype)
        >>> pa.append_kv(cache, rows, rows).lengths
        Array([5, 5], dtype=int32)
    """
    rows, unchecked = _rows(cache, k, v, packed=starts is not None), starts
    if rows.facts.layers not in (None, 1):
        raise checks.no_layer(
            rows.facts.layers,
            "take the rows once with cache.extend(t), then write_kv(cache, k, v, layer=l) for each "
            "layer",
        )
    taken: int | Array
    if starts is not None:
        if new_lengths is not None:
            raise ValueError(
                "new_lengths: expected None beside starts, whose differences are the counts"
            )
        starts = checks.row_starts("starts", starts, rows.k.shape[0], cache.num_sequences)
        taken = jnp.diff(starts)
    elif new_lengths is None:
        taken = rows.k.shape[1]
    else:
        sequences, meaning = cache.num_sequences, "rows of each sequence"
        counts = checks.int_vector("new_lengths", new_lengths, sequences, meaning)
        assert counts is not None
        taken = jnp.minimum(counts, rows.k.shape[1])
    options = _Options(starts, parents, None, rotary, norm, implementation, unchecked)
    return _write(cache.extend(taken), rows, options, extended=True)


def append_kv_arrays(  # noqa: PLR0913
    k_caches: Array | Sequence[Array],
    v_caches: Array | Sequence[Array] | None,
    k: Array,
    v: Array | None,
    lengths_before: Array,
    *,
    new_lengths: Array | None = None,
    page_table: Array | None = None,
    layer: int | Array | None = None,
    k_scales: Array | Sequence[Array] | None = None,
    v_scales: Array | Sequence[Array] | None = None,
    implementation: str | None = None,
) -> tuple[Any, ...]:
    """The append on bare arrays, for those who keep their own state.

    Args:
      k_caches, v_caches: M arrays `[K, capacity_i, H]` in a tuple or list, one array `[M, K,
        capacity, H]`, or, with `page_table`, a pool `[pages, K, page_size, H]`; each with a leading
        axis of layers where `layer` is given. `v_caches` (with `v`) may be None: one array alone is
        served.
      k, v: the new rows, `[M, t, K, H]` or `[M, K, H]`.
      lengths_before: int32[M], rows held before the append: row i of sequence m goes to
        lengths_before[m] + i. A negative length drops the sequence's rows.
      new_lengths: int32[M], how many of the t rows count (held to 0 .. t); default all.
      page_table: int32[M, W], page ids; rows whose page is outside of the pool are dropped.
      layer: an int or a traced int32.
      k_scales, v_scales: float32, shaped as the caches without H: rows are then quantised as into a
        quantised cache (float8_e4m3fn, float8_e5m2 and int8). Without them numbers go in as they
        come, cast to the caches' float type.
      implementation: as in `write_kv`.

    Returns:
      (k_caches, v_caches), of the kind that came, followed by (k_scales, v_scales) where they were
      given. No row past a capacity is written, and nothing else is touched.

    Example::

        >>> k, rows = jnp.zeros((2, 2, 16, 64)), jnp.ones((2, 1, 2, 64))
        >>> k, v = pa.append_kv_arrays(k, k, rows, rows, jnp.array([3, 0]))
        >>> k[:, 0, :5, 0]
        Array([[0., 0., 0., 1., 0.],
               [1., 0., 0., 0., 0.]], dtype=float32)
    """
    if (v_caches is None) != (v is None):
        raise ValueError("v_caches, v: give both, or neither to append to one array alone")
    separate = isinstance(k_caches, (tuple, list))
    kind = "per_sequence" if separate else "stacked" if page_table is None else "paged"
    caches = [_bare("k_caches", k_caches, kind, layer)]
    caches.append(None if v_caches is None else _bare("v_caches", v_caches, kind, layer))
    facts.check_twins("k_caches", caches[0], "v_caches", caches[1])
    sequences = len(k_caches) if separate else caches[0].shape[-4]
    if page_table is not None:
        if separate:
            raise ValueError(
                "page_table: expected k_caches to be one pool of pages, got separate arrays"
            )
        page_table = checks.integers("page_table", page_table, "int32[M, W]", (None, None))
        sequences = page_table.shape[0]
    scales = _bare_scales(caches, k_scales, v_scales)
    rows: list[Any] = []
    for name, new, cache, scale in zip("kv", (k, v), caches, scales, strict=True):
        if new is None:
            rows.append(None)
            continue
        into = _Into(cache[0] if separate else cache, scale is not None, sequences)
        rows.append(_new_rows(name, new, into))
    if v is not None and rows[0].shape[:3] != rows[1].shape[:3]:
        raise ValueError(
            f"v: expected [M, t, K] = {rows[0].shape[:3]} as in k, got {rows[1].shape[:3]}"
        )
    layers = None if layer is None else (caches[0][0] if separate else caches[0]).shape[0]
    lengths = checks.integers(
        "lengths_before",
        lengths_before,
        f"int32[{sequences}] (rows held before the append)",
        (sequences,),
    )
    inputs = AppendInputs(
        caches[0],
        caches[1],
        rows[0],
        rows[1],
        None,
        checks.int_vector("new_lengths", new_lengths, sequences, "rows of each sequence"),
        page_table,
        checks.layer(0 if layer is None else layer, layers),
        k_scale=scales[0],
        v_scale=scales[1],
        start=lengths,
    )
    written = rows_into(inputs, kind, implementation)
    return tuple(written[: 2 if k_scales is None else 4])


def _bare_scales(caches: list, k_scales: Argument, v_scales: Argument) -> list:
    if (v_scales is None) != (k_scales is None or caches[1] is None):
        raise ValueError(
            "k_scales, v_scales: give scales for every cache that is given, or none at all"
        )
    scales = []
    for name, scale, cache in zip(("k", "v"), (k_scales, v_scales), caches, strict=True):
        arrays = tuple(scale) if isinstance(scale, (tuple, list)) else scale
        arrays = jax.tree.map(lambda x, name=name: checks.array(f"{name}_scales", x), arrays)
        facts.check_scales(f"{name}_scales", arrays, f"{name}_caches", cache)
        scales.append(arrays)
    return scales


def _bare(name: str, value: Argument, kind: str, layer: Argument) -> Any:
    axes = (3 if kind == "per_sequence" else 4) + (layer is not None)
    separate = kind == "per_sequence"
    if separate and not isinstance(value, (tuple, list)):
        raise ValueError(
            f"{name}: expected a tuple of arrays as in k_caches, got {type(value).__name__}"
        )
    arrays = value if separate else (value,)
    if not arrays:
        raise ValueError(f"{name}: expected at least one array, got none")
    arrays = tuple(checks.array(name, x) for x in arrays)
    for x in arrays:
        if x.ndim != axes:
            raise ValueError(
                f"{name}: expected {axes} axes ({kind}, "
                f"{'with' if layer is not None else 'without'} layers), got {x.shape}"
            )
        checks.cache_dtype(name, x.dtype)
        first = arrays[0]
        if (x.shape[:-2], x.shape[-1], x.dtype) != (first.shape[:-2], first.shape[-1], first.dtype):
            raise ValueError(
                f"{name}: expected every array to differ from the first {first.shape} "
                f"{first.dtype} in nothing but its capacity, got {x.shape} {x.dtype}"
            )
    return arrays if separate else arrays[0]


class _Into(NamedTuple):
    """An array that rows go to, or a sample of several."""

    cache: Array
    quantized: bool
    sequences: int | None  # None: rows are packed
    dim: int | None = None  # columns of a row, where the array has more
    dtype: str | None = None  # dtype of its numbers, where it holds bytes


def _rows(cache: KVCache, k: Array, v: Array | None, *, packed: bool) -> _Rows:
    """The new rows of a call, checked against the cache."""
    if not isinstance(cache, KVCache):
        raise not_a_cache(cache)
    shape = facts_of(cache)
    if (v is None) != shape.shared_kv:
        raise ValueError(
            f"v: this cache keeps V within K (its first {shape.dims[1]} columns): leave v out"
            if shape.shared_kv
            else "v: expected rows of V: leave v out only where the cache keeps V within K "
            "(create(shared_kv=True))"
        )
    sequences, (dim, v_dim) = None if packed else shape.sequences, shape.dims
    sample = cache.k[0] if isinstance(cache.k, tuple) else cache.k
    dtype = shape.cache_dtype if shape.byte_rows else None
    k_rows = _new_rows("k", k, _Into(sample, shape.quantized, sequences, dim, dtype))
    k_rows = checks.widened(k_rows, shape.head_dim)
    if v is None:
        return _Rows(k_rows, None, shape)
    sample = cache.v[0] if isinstance(cache.v, tuple) else cache.v
    v_rows = _new_rows("v", v, _Into(sample, shape.quantized, sequences, v_dim))
    if v_rows.shape[-3] != k_rows.shape[-3]:
        each = "" if packed else " a sequence"
        raise ValueError(
            f"v: expected {k_rows.shape[-3]} rows{each} as in k, got {v_rows.shape[-3]}"
        )
    return _Rows(k_rows, checks.widened(v_rows, shape.v_head_dim), shape)


def _new_rows(name: str, new: Array, into: _Into) -> Array:
    """[M, t, K, H] from rows with or without t, or packed rows [tokens, K, H]."""
    rows = new = new if isinstance(new, Array) else checks.array(name, new)
    sequences = into.sequences
    heads, dim = into.cache.shape[-3], into.dim or into.cache.shape[-1]
    if sequences is None:
        wanted = f"packed rows [tokens, K, H] = [tokens, {heads}, {dim}] to go with starts"
        fits = rows.ndim == 3
    else:
        rows = rows[:, None] if rows.ndim == 3 else rows
        wanted = f"[M, t, K, H] = [{sequences}, t, {heads}, {dim}] (or without t)"
        fits = rows.ndim == 4 and rows.shape[0] == sequences
    if not fits or rows.shape[-2:] != (heads, dim):
        packs = sequences is not None and new.ndim == 3 and not fits
        hint = "; packed rows take starts" if packs else ""
        raise ValueError(f"{name}: expected {wanted}, got {list(new.shape)}{hint}")
    if into.quantized or rows.dtype != into.cache.dtype:
        _check_dtypes(name, rows, into)
    return rows


def _check_dtypes(name: str, rows: Array, into: _Into) -> None:
    """ValueError for rows that are neither cast nor quantised to the cache's dtype."""
    dtype, is_float = into.cache.dtype, jnp.issubdtype(rows.dtype, jnp.floating)
    dtype = dtype if into.dtype is None else jnp.dtype(into.dtype)
    if into.quantized and dtype.name not in QUANTIZED:
        raise ValueError(
            f"{name}_scales: expected caches of {', '.join(QUANTIZED)} to go with scales, got "
            f"{dtype}"
        )
    if into.quantized and not is_float:
        raise ValueError(
            f"{name}: expected floating-point rows, which a quantised {dtype} cache quantises "
            f"itself, got {rows.dtype}; numbers that have been quantised already go into a cache "
            "without scales (scales=False)"
        )
    if not (into.quantized or (is_float and jnp.issubdtype(dtype, jnp.floating))):
        raise ValueError(
            f"{name}: expected {dtype} rows for a {dtype} cache, got {rows.dtype}; quantise first"
        )
