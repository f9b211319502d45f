"""The static facts of a cache, by which its calls become problems; and the checks of its arrays.

Kernels find their way by what is in the small arrays of a cache, so these are checked against the
buffers: once for each shape that a cache has.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef

from pallas_attn._call import checks
from pallas_attn._call.checks import Argument

Cache = Any  # a `KVCache`, whose module imports this one
Buffers = jax.Array | tuple[jax.Array, ...]  # an array of all sequences, or one of each


class CacheFacts(NamedTuple):
    """The fields of a `DecodeProblem` that are those of its cache, and more sizes of the cache."""

    kind: str
    cache_dtype: str
    sequences: int
    kv_heads: int
    head_dim: int  # columns of the buffers of K and V
    v_head_dim: int
    capacities: tuple[int, ...]  # rows of each sequence in these buffers
    page_size: int | None
    pages: int | None
    layers: int | None
    quantized: bool
    shared_kv: bool
    byte_rows: bool  # a row is the bytes of `byte_rows.BYTE_ROW`
    dims: tuple[int, int]  # columns of K and V without those that `create` added

    def of_problem(self) -> dict[str, Any]:
        """The fields that a problem has."""
        return dict(zip(self._fields[:-1], self[:-1], strict=True))


def of_live[**P, R](call: Callable[P, R]) -> Callable[P, R]:
    """The same function, with a ValueError where jax finds that arrays of a cache were donated."""

    @functools.wraps(call)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except RuntimeError:
            for value in (*args, *kwargs.values()):
                for x in value if isinstance(value, tuple) else (value,):  # a record of arguments
                    _refuse_donated(getattr(x, "cache", x))  # a `Prefix` has one
            raise

    return run


def _refuse_donated(cache: Cache) -> None:
    if not hasattr(cache, "new_lengths") or not dataclasses.is_dataclass(cache):
        return
    gone = [
        field.name
        for field in dataclasses.fields(cache)
        for x in jax.tree.leaves(getattr(cache, field.name))[:1]
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted()
    ]
    if gone:
        raise ValueError(
            f"cache: its arrays {', '.join(gone)} were donated to a jitted function "
            "(donate_argnums), and are gone; use the cache that this function returned"
        ) from None


def facts_of(cache: Cache) -> CacheFacts:
    """The facts of a cache whose arrays fit each other; else a ValueError."""
    leaves, tree = jax.tree.flatten(cache)
    if not all([isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves]):
        return _facts_of(cache)
    return _facts_at(tree, tuple([(leaf.shape, leaf.dtype) for leaf in leaves]))


@functools.lru_cache(maxsize=256)
def _facts_at(tree: PyTreeDef, shapes: tuple[tuple[tuple[int, ...], Any], ...]) -> CacheFacts:
    stand_ins = [np.broadcast_to(np.zeros((), dtype), shape) for shape, dtype in shapes]
    return _facts_of(jax.tree.unflatten(tree, stand_ins))


def _facts_of(cache: Cache) -> CacheFacts:
    _check(cache)
    head_dim, v_head_dim = cache.stored_dims
    return CacheFacts(
        cache.kind,
        str(cache.dtype),
        cache.num_sequences,
        cache.kv_heads,
        head_dim,
        v_head_dim,
        cache.held,
        cache.page_size,
        cache.pages,
        cache.layers,
        cache.quantized,
        cache.shared_kv,
        cache.byte_rows,
        (cache.head_dim, cache.v_head_dim),
    )


def _check(cache: Cache) -> None:
    """ValueError where arrays of a cache do not fit each other."""
    for name in ("k", "v", "k_scale", "v_scale"):
        if name == "k" or getattr(cache, name) is not None:
            _check_buffers(f"cache.{name}", getattr(cache, name))
    if not cache.byte_rows:
        checks.cache_dtype("cache.k", cache.dtype)
    check_twins("cache.k", cache.k, "cache.v", cache.v)
    if (cache.v is None) != cache.shared_kv:
        raise ValueError(
            "cache.v: expected None where v_columns says that V is part of K, and only there; make "
            "caches with create(shared_kv=True)"
        )
    check_scales("cache.k_scale", cache.k_scale, "cache.k", cache.k)
    check_scales("cache.v_scale", cache.v_scale, "cache.v", cache.v)
    if (cache.v_scale is None) != (cache.k_scale is None or cache.v is None):
        raise ValueError("cache.v_scale: expected scales of k and of v, or none of both")
    if cache.kind == "paged":
        _check_small("page_table", cache.page_table, "int32[M, W]", (None, None))
        sequences = cache.page_table.shape[0]
    else:
        sequences = len(cache.k) if cache.kind == "per_sequence" else cache.k.shape[-4]
    for name in ("lengths", "new_lengths"):
        wanted = f"int32[{sequences}] (one a sequence)"
        _check_small(name, getattr(cache, name), wanted, (sequences,))


def check_twins(k_name: str, k: Buffers, v_name: str, v: Buffers | None) -> None:
    """ValueError for arrays of K and V that differ in more than the head dim: a kernel finds both
    by one index, and would write past the end of a smaller one.
    """
    if v is None:
        return
    ks, vs = (x if isinstance(x, tuple) else (x,) for x in (k, v))
    if len(ks) != len(vs):
        raise ValueError(f"{v_name}: expected {len(ks)} arrays as in {k_name}, got {len(vs)}")
    for of_k, of_v in zip(ks, vs, strict=True):
        if (of_k.shape[:-1], of_k.dtype) != (of_v.shape[:-1], of_v.dtype):
            raise ValueError(
                f"{v_name}: expected {of_k.dtype}{list(of_k.shape)} as in {k_name}, but for the "
                f"last axis, got {of_v.dtype}{list(of_v.shape)}"
            )


def check_scales(name: str, scale: Any, cache_name: str, cache: Cache) -> None:
    """ValueError for scales that do not lie as the rows of a cache do, without the head dim."""
    if scale is None:
        return
    scales, caches = (x if isinstance(x, tuple) else (x,) for x in (scale, cache))
    if isinstance(scale, tuple) != isinstance(cache, tuple) or len(scales) != len(caches):
        raise ValueError(
            f"{name}: expected {len(caches)} arrays as in {cache_name}, got {len(scales)}"
        )
    for x, rows in zip(scales, caches, strict=True):
        if x.shape != rows.shape[:-1] or x.dtype != jnp.float32:
            raise ValueError(
                f"{name}: expected float32{list(rows.shape[:-1])}, a scale for each row of "
                f"{cache_name} {list(rows.shape)}, got {x.dtype}{list(x.shape)}"
            )


def _check_small(name: str, value: Argument, wanted: str, shape: tuple[int | None, ...]) -> None:
    """ValueError where a small array of a cache is no int32 of that shape (None: any size)."""
    sizes = getattr(value, "shape", None)
    if sizes is None:
        raise ValueError(f"cache.{name}: expected {wanted}, got {type(value).__name__}")
    fits = len(sizes) == len(shape) and all(
        want in (None, size) for want, size in zip(shape, sizes, strict=True)
    )
    if not fits or value.dtype != jnp.int32:
        raise ValueError(f"cache.{name}: expected {wanted}, got {value.dtype}{list(sizes)}")


def _check_buffers(name: str, buffers: Argument) -> None:
    """ValueError for leaves that are no arrays: None, specs, or shapes of `jax.eval_shape`."""
    for x in buffers if isinstance(buffers, tuple) else (buffers,):
        if not isinstance(x, (jax.Array, np.ndarray)):
            raise ValueError(
                f"{name}: expected arrays, got {type(x).__name__}; where nothing but shapes is "
                "known, pass the cache to the function that jax.eval_shape calls"
            )


def holders_of(cache: Cache) -> jax.Array | None:
    """int32[pages] of a PagedCache, checked; None of other caches."""
    if cache.kind != "paged":
        return None
    wanted = f"int32[{cache.pages}] (one a page)"
    _check_small("holders", cache.holders, wanted, (cache.pages,))
    return cache.holders


def check_reached(name: str, cache: Cache, among: np.ndarray | None = None) -> None:
    """ValueError for sequences that decoding would make NaN, since no extend has reached them since
    they were made or emptied, if that is known already. `among`: the numbers of some of them.
    """
    new = checks.known(cache.new_lengths)
    if new is None or not (new < 0).any() or (lengths := checks.known(cache.lengths)) is None:
        return
    without = np.flatnonzero((new < 0) & (lengths < 1))
    if among is not None:
        without = np.intersect1d(without, among)
    if without.size:
        raise ValueError(
            f"{name}: expected sequences that were extended since they were made or emptied, got "
            f"{without.tolist()}, which were not; call append_kv first, or cache.extend(rows) and "
            "write_kv (0 rows for a sequence that stays empty)"
        )


def check_taken(cache: Cache, rows: int | jax.Array) -> None:
    """ValueError where `write_kv` would fill other rows of a sequence than the latest extend took,
    if that is known already. `rows`: of each sequence, or where packed rows start.
    """
    new = checks.known(cache.new_lengths)
    if new is None:
        return
    without = np.flatnonzero(new < 0).tolist()
    if without and (not isinstance(rows, int) or rows):
        raise ValueError(
            "cache: write_kv fills the rows that the latest extend took, and there was none since "
            f"sequences {without} were made, emptied or forked into; call cache.extend(rows) "
            "first, with 0 for a sequence that gets no rows"
        )
    if isinstance(rows, int):
        if (new > rows).any():
            raise ValueError(
                "k: expected at least the rows that the latest extend took of each sequence, "
                f"{new.tolist()}, got {rows} of each; extend the cache by as many as are written"
            )
    elif (starts := checks.known(rows)) is not None and (np.diff(starts) != new).any():
        raise ValueError(
            "starts: expected as many rows of each sequence as the latest extend took, "
            f"{new.tolist()}, got {np.diff(starts).tolist()}; call "
            "cache.extend(jnp.diff(starts)) first"
        )
