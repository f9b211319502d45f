"""New rows into KV caches: one launch for K and V of every sequence, in place under donation."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn import trees
from pallas_attn._cache import sharded_rows, write
from pallas_attn._call import checks
from pallas_attn._call.problem import QUANTIZED, AppendInputs, Change, owner_of_rows
from pallas_attn.cache import KVCache
from pallas_attn.rotary import RMSNorm, Rotary, changed
from pallas_attn.trees import DraftTree

Array = jax.Array


def write_kv[Cache: KVCache](  # noqa: PLR0913
    cache: Cache,
    k: Array,
    v: Array | None = None,
    *,
    starts: Array | None = None,
    parents: Array | DraftTree | None = None,
    layer: int | Array = 0,
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
        more, the last ones stay as they are. Another float type is cast to the cache's; a quantised
        cache stores each row of a head as narrow numbers and a float32 scale (a row with a NaN or
        an infinity in it becomes NaN throughout). No v where the cache keeps V within K
        (`shared_kv`). With `starts`, packed rows `[tokens, K, H]` and `[tokens, K, Hv]`.
      starts: int32[M + 1], traced or not: sequence i owns rows starts[i] to starts[i + 1], as in
        `decode_attention`; `cache.extend(jnp.diff(starts))` takes them. Rows that no sequence owns
        are ignored.
      parents: where the rows are drafts that form a tree, which draft each follows, as in
        `decode_attention`: `rotary` turns a draft by its position in the tree. Rows are written one
        behind the other all the same.
      layer: which layer: an int or a traced int32. Outside of the cache's layers nothing is
        written.
      rotary, norm: what is done to the rows of K on their way, in the same launch: first the norm,
        then the rotation by each row's position in its sequence; in float32, and rounded once, to
        what the cache keeps. `decode_attention` takes the same for q.
      implementation: "sm80", "reference" or None.

    Returns:
      The cache with those rows written and nothing else touched. Inside jit, with the cache donated
      or in a loop's carry, the buffers are updated in place.
    """
    packed = starts is not None
    k_rows, v_rows = _rows(cache, k, v, packed)
    change, arrays = checks.change(
        rotary, norm, cache.head_dim, cache.stored_dims[0], max(cache.capacities, default=0)
    )
    where: tuple[Array, Array | None] = cache.lengths, cache.new_lengths
    owners = None
    if starts is not None:
        starts = checks.row_starts("starts", starts, k_rows.shape[0], cache.num_sequences)
    if parents is not None:
        k_rows, change = _in_tree(cache, k_rows, parents, (change, arrays), starts), None
        arrays = {}
    fills = 0 not in k_rows.shape[: 1 if packed else 2]
    if cache.context is not None and starts is None:  # rows have positions, each its own
        # Constants: of an iota and a comparison XLA makes kernels, which run at every call.
        numbers = np.arange(cache.num_sequences + 1, dtype=np.int32)
        starts = jnp.asarray(numbers * k_rows.shape[1])
        owners = jnp.asarray(np.repeat(numbers[:-1], k_rows.shape[1]))
        k_rows = k_rows.reshape(-1, *k_rows.shape[2:])
        v_rows = None if v_rows is None else v_rows.reshape(-1, *v_rows.shape[2:])
        packed = True
    if starts is not None:
        if owners is None:
            owners = owner_of_rows(starts, k_rows.shape[0])
        owners, positions = _places(cache, starts, owners)
        if cache.context is not None:
            if change is not None:  # by positions in the sequence, not those in a device's block
                kept = k_rows if cache.quantized else k_rows.astype(cache.dtype)
                k_rows, change, arrays = changed(kept, positions, change, arrays), None, {}
            positions = sharded_rows.own(cache.context, cache.held, owners, positions)
        where = positions, None
    inputs = AppendInputs(
        cache.k,
        cache.v,
        k_rows,
        v_rows,
        *where,
        cache.page_table,
        checks.layer(layer, cache.layers),
        cache.k_scale,
        cache.v_scale,
        owners,
        **arrays,
    )
    if fills:
        checks.extended(cache)
    new = write.rows_into(inputs, cache.kind, implementation, from_end=not packed, change=change)
    return cache._with(k=new.k_cache, v=new.v_cache, k_scale=new.k_scale, v_scale=new.v_scale)


def _in_tree(
    cache: KVCache,
    k: Array,
    parents: Any,
    given: tuple[Change | None, dict],
    starts: Array | None,
) -> Array:
    """Rows of K that are drafts of a tree, normed and rotated as `given` says."""
    (change, arrays), begin = given, cache.lengths - jnp.maximum(cache.new_lengths, 0)
    if starts is None:
        tree, begin = trees.of(parents, *k.shape[:2]), begin[:, None]
    else:
        tree = trees.of_packed(parents, starts, k.shape[0])
        owners = owner_of_rows(starts, k.shape[0])
        begin = begin[jnp.clip(owners, 0, cache.num_sequences - 1)]
    if change is None:
        return k
    kept = k if cache.quantized else k.astype(cache.dtype)
    return changed(kept, begin + tree.depth, change, arrays)


def _places(cache: KVCache, starts: Array, owners: Array) -> tuple[Array, Array]:
    """int32[rows], twice: the sequence of each packed row, and its position there, or -1 where the
    row is to be dropped. Nothing here depends on the layer, so a program does it once a step.
    """
    owned = (owners >= 0) & (owners < cache.num_sequences)
    owners = jnp.clip(owners, 0, cache.num_sequences - 1)
    new, end = cache.new_lengths[owners], cache.lengths[owners]
    within = jnp.arange(owners.size, dtype=jnp.int32) - starts[owners]
    begins = jnp.where((end >= 0) & (new >= 0), end - new, -1)
    exists = owned & (within < new) & (begins >= 0)
    return owners, jnp.where(exists, begins + within, -1)


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
    """
    k_rows, _ = _rows(cache, k, v, starts is not None)
    options: Any = {"rotary": rotary, "norm": norm, "implementation": implementation}
    options["parents"] = parents
    if cache.layers not in (None, 1):
        raise ValueError(
            f"cache: append_kv serves a cache of one layer, got {cache.layers} layers; take the "
            "rows once with "
            "cache.extend(t), then write_kv(cache, k, v, layer=l) for each layer"
        )
    if starts is not None:
        if new_lengths is not None:
            raise ValueError(
                "new_lengths: expected None beside starts, whose differences are the counts"
            )
        starts = checks.row_starts("starts", starts, k_rows.shape[0], cache.num_sequences)
        cache = cache.extend(jnp.diff(starts))
        return write_kv(cache, k, v, starts=starts, **options)
    rows: int | Array = k_rows.shape[1]
    if new_lengths is not None:
        counts = checks.int_vector(
            "new_lengths", new_lengths, cache.num_sequences, "rows of each sequence"
        )
        rows = jnp.minimum(counts, k_rows.shape[1])
    return write_kv(cache.extend(rows), k, v, **options)


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
    """
    if (v_caches is None) != (v is None):
        raise ValueError("v_caches, v: give both, or neither to append to one array alone")
    separate = isinstance(k_caches, (tuple, list))
    kind = "per_sequence" if separate else "stacked" if page_table is None else "paged"
    caches = [_bare("k_caches", k_caches, kind, layer)]
    caches.append(None if v_caches is None else _bare("v_caches", v_caches, kind, layer))
    checks.twin_caches("k_caches", caches[0], "v_caches", caches[1])
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
        sample = write.sample_of(cache)
        rows.append(
            None if new is None else _new_rows(name, new, sequences, sample, scale is not None)
        )
    if v is not None and rows[0].shape[:3] != rows[1].shape[:3]:
        raise ValueError(
            f"v: expected [M, t, K] = {rows[0].shape[:3]} as in k, got {rows[1].shape[:3]}"
        )
    layers = None if layer is None else write.sample_of(caches[0]).shape[0]
    inputs = AppendInputs(
        caches[0],
        caches[1],
        rows[0],
        rows[1],
        checks.integers(
            "lengths_before",
            lengths_before,
            f"int32[{sequences}] (rows held before the append)",
            (sequences,),
        ),
        checks.int_vector("new_lengths", new_lengths, sequences, "rows of each sequence"),
        page_table,
        checks.layer(0 if layer is None else layer, layers),
        *scales,
    )
    written = write.rows_into(inputs, kind, implementation)
    return tuple(written[: 2 if k_scales is None else 4])


def _bare_scales(caches: list, k_scales: Any, v_scales: Any) -> list:
    if (v_scales is None) != (k_scales is None or caches[1] is None):
        raise ValueError(
            "k_scales, v_scales: give scales for every cache that is given, or none at all"
        )
    found = []
    for name, scale, cache in zip(("k", "v"), (k_scales, v_scales), caches, strict=True):
        arrays = tuple(scale) if isinstance(scale, (tuple, list)) else scale
        arrays = jax.tree.map(lambda x, name=name: checks.array(f"{name}_scales", x), arrays)
        checks.scales(f"{name}_scales", arrays, f"{name}_caches", cache)
        found.append(arrays)
    return found


def _bare(name: str, value: Any, kind: str, layer: Any) -> Any:
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
        first = arrays[0]
        if (x.shape[:-2], x.shape[-1], x.dtype) != (first.shape[:-2], first.shape[-1], first.dtype):
            raise ValueError(
                f"{name}: expected every array to differ from the first {first.shape} "
                f"{first.dtype} in nothing but its capacity, got {x.shape} {x.dtype}"
            )
    return arrays if separate else arrays[0]


def _rows(cache: KVCache, k: Array, v: Array | None, packed: bool) -> tuple[Array, Array | None]:
    if not isinstance(cache, KVCache):
        raise ValueError(
            "cache: expected a PerSequenceCache, StackedCache or PagedCache, got "
            f"{type(cache).__name__}"
        )
    checks.kv_cache(cache)
    if (v is None) != cache.shared_kv:
        raise ValueError(
            f"v: this cache keeps V within K (its first {cache.v_head_dim} columns): leave v out"
            if cache.shared_kv
            else "v: expected rows of V: leave v out only where the cache keeps V within K "
            "(create(shared_kv=True))"
        )
    dims, stored, given = (cache.head_dim, cache.v_head_dim), cache.stored_dims, cache.quantized
    sequences = None if packed else cache.num_sequences
    k_rows = _new_rows("k", k, sequences, write.sample_of(cache.k), given, dims[0])
    k_rows = checks.widened(k_rows, stored[0])
    if v is None:
        return k_rows, None
    v_rows = _new_rows("v", v, sequences, write.sample_of(cache.v), given, dims[1])
    v_rows = checks.widened(v_rows, stored[1])
    if v_rows.shape[-3] != k_rows.shape[-3]:
        each = "" if packed else " a sequence"
        raise ValueError(
            f"v: expected {k_rows.shape[-3]} rows{each} as in k, got {v_rows.shape[-3]}"
        )
    return k_rows, v_rows


def _new_rows(
    name: str,
    new: Array,
    sequences: int | None,
    cache: Array,
    quantized: bool = False,
    dim: int | None = None,
) -> Array:
    """[M, t, K, H] from rows with or without t, or [tokens, K, H] of packed rows (`sequences`
    None), checked against the cache they go to; `dim`: H, where the cache is wider.
    """
    rows = checks.array(name, new)
    of_row = (cache.shape[-3], cache.shape[-1] if dim is None else dim)
    if sequences is None:
        wanted = (
            f"packed rows [tokens, K, H] = [tokens, {of_row[0]}, {of_row[1]}] to go with starts"
        )
        fits = rows.ndim == 3
    else:
        rows = rows[:, None] if rows.ndim == 3 else rows
        wanted = f"[M, t, K, H] = [{sequences}, t, {of_row[0]}, {of_row[1]}] (or without t)"
        fits = rows.ndim == 4 and rows.shape[0] == sequences
    if not fits or rows.shape[-2:] != of_row:
        given = list(jnp.shape(new))
        packs = sequences is not None and len(given) == 3 and not fits
        hint = "; packed rows take starts" if packs else ""
        raise ValueError(f"{name}: expected {wanted}, got {given}{hint}")
    if quantized:
        if cache.dtype.name not in QUANTIZED:
            raise ValueError(
                f"{name}_scales: expected caches of {', '.join(QUANTIZED)} to go with scales, got "
                f"{cache.dtype}"
            )
        if not jnp.issubdtype(rows.dtype, jnp.floating):
            raise ValueError(
                f"{name}: expected floating-point rows, which a quantised {cache.dtype} cache "
                f"quantises itself, got {rows.dtype}; numbers that have been quantised already go "
                "into a cache without scales (scales=False)"
            )
        return rows
    both_float = jnp.issubdtype(rows.dtype, jnp.floating) and jnp.issubdtype(
        cache.dtype, jnp.floating
    )
    if rows.dtype != cache.dtype and not both_float:
        raise ValueError(
            f"{name}: expected {cache.dtype} rows for a {cache.dtype} cache, got {rows.dtype}; "
            "quantise first"
        )
    return rows
