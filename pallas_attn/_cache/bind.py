"""From the arguments of calls over caches to their problems and inputs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn import trees
from pallas_attn._cache import blocks
from pallas_attn._cache.facts import Cache, CacheFacts, facts_of, holders_of
from pallas_attn._call import checks, device
from pallas_attn._call.bind import is_static, precision, query_heads
from pallas_attn._call.byte_rows import BYTE_DTYPE, BYTE_ROW
from pallas_attn._call.changed_rows import changed
from pallas_attn._call.problem import (
    FLOAT8,
    FLOAT8_PRECISIONS,
    MOST_ROWS,
    AppendInputs,
    AppendProblem,
    Caches,
    Change,
    DecodeInputs,
    DecodeProblem,
    KeepInputs,
    KeepProblem,
    owned_rows,
)
from pallas_attn._functions.program import check_reads
from pallas_attn._mesh import sharding
from pallas_attn.context import mapped_shards
from pallas_attn.masks import CAUSAL, FULL, Mask, MaskFunction
from pallas_attn.prefixes import Prefix, SharedPrefixes
from pallas_attn.rotary import RMSNorm, Rotary
from pallas_attn.scores import ScoreFunction
from pallas_attn.trees import DraftTree

Array = jax.Array

# Least bound of the packed rows of a sequence, which may have up to all rows that there are:
# kernels then take them alike whatever else is in the batch.
LEAST_BOUND = 64


class DecodeCall(NamedTuple):
    """The arguments of `decode_attention` beside q and the cache."""

    starts: Array | None = None
    parents: Array | DraftTree | None = None
    layer: int | Array | None = None
    mask: Mask | MaskFunction = CAUSAL
    score: ScoreFunction | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Array | None = None
    precision: checks.Precision = None
    batch_invariant: bool = False
    rotary: Rotary | None = None
    norm: RMSNorm | None = None
    shared_prefixes: SharedPrefixes | None = None
    prefix: Prefix | None = None
    kv_indices: Array | None = None
    implementation: str | None = None


def decode(q: Array, cache: Cache, options: DecodeCall) -> tuple[DecodeProblem, DecodeInputs]:
    """The problem and the inputs of a call of `decode_attention`. Queries [M, N, H] of one token
    come out as [M, 1, N, H].
    """
    facts, starts = facts_of(cache), options.starts
    q = _queries(q, facts, packed=starts is not None)
    rows = q.shape[1]
    if starts is not None:
        rows = q.shape[0]
        starts = checks.row_starts("starts", starts, rows, facts.sequences)
    band: Any = options.mask
    function, tree, bounds = None, None, {}
    if options.parents is not None or not is_static(band):
        band, function, tree = _visible(q, cache, starts, options)
        if tree is not None and starts is not None:
            wrong = trees.of_other_rows(tree, starts, options.starts)
            q = q if wrong is None else jnp.where(wrong[:, None, None], jnp.nan, q)
        band, bounds = band.static, checks.mask_bounds(band)
    if options.rotary is not None or options.norm is not None:
        q = _changed(q, cache, (options.rotary, options.norm), starts, tree)
    sinks, softcap, invariant = options.sinks, options.softcap, options.batch_invariant
    indices = None if options.kv_indices is None else _indices(options, q, cache)
    allowed = None if options.precision is None else _float8(options.precision, facts)
    score = None if options.score is None else _score(options, q, cache)
    inputs = DecodeInputs(
        checks.widened(q, facts.head_dim),
        cache.k,
        cache.v,
        cache.lengths,
        cache.page_table,
        checks.layer(options.layer, facts.layers),
        None if sinks is None else checks.sink_logits(sinks, q),
        cache.k_scale,
        cache.v_scale,
        cache.new_lengths,
        starts,
        bounds.get("left"),
        bounds.get("right"),
        () if function is None else function.aux,
        kv_indices=indices,
        score_aux=() if score is None else score.aux,
    )
    return DecodeProblem(
        gpu=device.gpu_generation(),
        dtype=str(q.dtype),
        q_len=rows if starts is None else max(rows, LEAST_BOUND),
        q_heads=q.shape[-2],
        mask=band,
        scale=facts.dims[0] ** -0.5 if options.scale is None else checks.scale(options.scale),
        softcap=None if softcap is None else checks.softcap(softcap),
        sinks=sinks is not None,
        precision=allowed or precision(options.precision, q),
        batch_invariant=invariant is not False and checks.boolean("batch_invariant", invariant),
        tokens=None if starts is None else rows,
        mask_program=None if function is None else function.program,
        tree=tree is not None and cache.context is None and not band.bounds_left,
        listed=None if indices is None else indices.shape[-1],
        score_program=None if score is None else score.program,
        **facts.of_problem(),
    ), inputs


def _float8(precision: checks.Precision, facts: CacheFacts) -> str | None:
    """The precision that allows matmuls on the numbers of this cache, or None."""
    name = str(getattr(precision, "name", precision))
    scaled = facts.quantized and facts.cache_dtype in FLOAT8
    return "float8" if scaled and name in FLOAT8_PRECISIONS else None


def _queries(q: Array, facts: CacheFacts, *, packed: bool) -> Array:
    """q as [M, t, N, H], or packed rows as [tokens, N, H], checked against the cache."""
    rows = q if isinstance(q, Array) else checks.array("q", q)
    dim, sequences = facts.dims[0], facts.sequences
    q = rows[:, None] if rows.ndim == 3 and not packed else rows
    if packed:
        wanted, fits = f"packed rows [tokens, N, H] = [tokens, N, {dim}] to go with starts", True
    else:
        wanted = f"[M, t, N, H] = [{sequences}, t, N, {dim}] (or without t)"
        fits = q.ndim == 4 and q.shape[0] == sequences
    if not fits or q.ndim != 4 - packed or q.shape[-1] != dim:
        hint = "; packed rows take starts" if rows.ndim == 3 and not fits else ""
        raise ValueError(f"q: expected {wanted} for this cache, got {list(rows.shape)}{hint}")
    query_heads(q, facts.kv_heads)
    return q


def _indices(options: DecodeCall, q: Array, cache: Cache) -> Array:
    """The argument `kv_indices` of query rows [M, t, N, H], or packed rows [tokens, N, H]."""
    rows, beside = q.shape[:-2], "kv_indices: expected None beside "
    if options.parents is not None:
        raise ValueError(
            beside + "parents, which say what drafts see, got both; list the ancestors of each "
            "draft in kv_indices instead"
        )
    if cache.context is not None:
        raise ValueError(
            beside + "a cache whose rows are split over devices, got both; use a cache without "
            "context"
        )
    size = ", ".join(map(str, rows))
    wanted = f"int32[{size}, n] (n >= 1 positions a query row, -1 for none)"
    indices: Any = options.kv_indices
    if options.starts is None and rows[1] == 1 and getattr(indices, "ndim", None) == 2:
        indices = indices[:, None]
    indices = checks.integers("kv_indices", indices, wanted, (*rows, None))
    if not indices.shape[-1]:
        raise ValueError(f"kv_indices: expected {wanted}, got int32{list(indices.shape)}")
    return indices


def _score(options: DecodeCall, q: Array, cache: Cache) -> ScoreFunction:
    """The argument `score` of query rows [.., N, H]."""
    if options.parents is not None:
        raise ValueError(
            "score: expected None beside parents, by whose depth drafts stand, got both; verify "
            "one path of drafts at a time"
        )
    if cache.context is not None:
        raise ValueError(
            "score: expected None beside a cache whose rows are split over devices, got both; use "
            "a cache without context"
        )
    return checks.score(options.score, (cache.num_sequences, q.shape[-2], None, None))


def _visible(
    q: Array, cache: Cache, starts: Array | None, options: DecodeCall
) -> tuple[Mask, MaskFunction | None, DraftTree | None]:
    """The band of keys that are read, the function that hides some of them, and the tree that it
    describes.
    """
    mask = options.mask
    if options.parents is not None:
        return _visible_in_tree(q, cache, starts, options)
    if not isinstance(mask, MaskFunction):
        return checks.mask(mask), None, None
    if mask.is_full:
        return FULL, None, None
    if cache.context is not None:
        raise ValueError(
            "mask: expected a Mask over a cache whose rows are split over devices, got a mask "
            "function; use a cache without context"
        )
    check_reads("mask", mask.program, (cache.num_sequences, q.shape[-2], None, None))
    return mask.within, mask, None


def _visible_in_tree(
    q: Array, cache: Cache, starts: Array | None, options: DecodeCall
) -> tuple[Mask, MaskFunction, DraftTree]:
    mask: Any = options.mask
    parents: Any = options.parents
    if not (isinstance(mask, Mask) and mask.is_causal):
        got = mask if isinstance(mask, Mask) else type(mask).__name__
        raise ValueError(
            "mask: expected CAUSAL or a window, Mask(left=.., right=0), beside parents, which "
            f"say what drafts see, got {got}"
        )
    if starts is not None:
        tree = trees.of_packed(parents, starts, q.shape[0], options.starts)
        if mask.left is None:
            return CAUSAL, trees.packed(tree, starts), tree
        return *trees.windowed(tree, mask.left, cache.lengths - jnp.diff(starts), starts), tree
    tree = trees.of(parents, *q.shape[:2])
    if cache.context is not None:
        begins = blocks.begins(cache.context, cache.held, cache.lengths, q.shape[1])
        return FULL, trees.split(tree, mask.left, begins), tree
    if mask.left is None:
        return CAUSAL, MaskFunction(trees.program(tree.bits.shape), (tree.bits,)), tree
    return *trees.windowed(tree, mask.left, cache.lengths - q.shape[1]), tree


def _changed(
    q: Array,
    cache: Cache,
    by: tuple[Rotary | None, RMSNorm | None],
    starts: Array | None,
    tree: DraftTree | None,
) -> Array:
    """The query rows normed and rotated, each by its position."""
    change, arrays = change_of(cache, *by, cache.head_dim)
    lengths = cache.lengths
    rows = q.shape[1 if starts is None else 0]
    at = jnp.arange(rows, dtype=jnp.int32)
    if starts is None:
        positions = (lengths - rows)[:, None] + (at[None] if tree is None else tree.depth)
    else:
        owners, _ = owned_rows(starts, rows)
        if tree is None:
            positions = lengths[owners] - starts[owners + 1] + at
        else:
            positions = lengths[owners] - jnp.diff(starts)[owners] + tree.depth
    assert change is not None
    return changed(q, positions, change, arrays).astype(q.dtype)


def change_of(
    cache: Cache, rotary: Rotary | None, norm: RMSNorm | None, columns: int
) -> tuple[Change | None, dict[str, Array]]:
    """The norm and the rotation of rows of K or q that have so many columns, and their arrays."""
    if rotary is None and norm is None:
        return None, {}
    held = max(cache.capacities, default=0)
    rows = (held if cache.longest is None else cache.longest), held
    return checks.change(rotary, norm, cache.head_dim, columns, rows)


def append(inputs: AppendInputs, kind: str, *, change: Change | None = None) -> AppendProblem:
    """The problem of an append of these arrays."""
    caches, table = inputs.k_cache, inputs.page_table
    separate = isinstance(caches, tuple)
    sample = caches[0] if separate else caches
    page_size = sample.shape[-3 if kind == "interleaved" else -2]
    if separate:
        sequences, capacities = len(caches), tuple([x.shape[-2] for x in caches])
    else:
        sequences = sample.shape[-4] if table is None else table.shape[0]
        each = sample.shape[-2] if table is None else table.shape[1] * page_size
        # An exported program may leave the number of sequences open.
        capacities = (each,) * (sequences if isinstance(sequences, int) else 1)
    new_rows, kv_heads, head_dim = inputs.k.shape[-3:]
    byte_rows = sample.dtype == np.uint8 and jnp.issubdtype(inputs.k.dtype, jnp.floating)
    return AppendProblem(
        gpu=device.gpu_generation(),
        kind=kind,
        dtype=str(inputs.k.dtype),
        cache_dtype=BYTE_DTYPE if byte_rows else str(sample.dtype),
        sequences=sequences,
        new_rows=new_rows,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=None if inputs.v is None else inputs.v.shape[-1],
        capacities=capacities,
        page_size=None if table is None else page_size,
        pages=None if table is None else sample.shape[-4],
        layers=None if inputs.layer is None else sample.shape[0],
        quantized=byte_rows or inputs.k_scale is not None,
        byte_rows=byte_rows,
        packed=inputs.owners is not None,
        change=change,
    )


def keep(cache: Cache, counts: int | Array, path: Array | None) -> tuple[KeepProblem, KeepInputs]:
    """The problem and the inputs of `cache.keep`. Counts that are one for all stay of one number,
    since to spread them over the sequences would be a launch.
    """
    facts = facts_of(cache)
    static = checks.static_int(counts)
    value: Any = counts if static is None else np.int32(min(max(static, 0), MOST_ROWS))
    counts = checks.one_or_each("counts", value, facts.sequences, "rows to keep of each sequence")
    if getattr(value, "shape", None) == ():
        counts = counts[:1]
    if path is not None:
        wanted = f"int32[{facts.sequences}, p] (the rows to keep, of those that extend took)"
        path = checks.integers("path", path, wanted, (facts.sequences, None))
        path = path if path.shape[1] else None
    if counts.shape == cache.lengths.shape:
        counts = sharding.placed_like(counts, cache.lengths)
    shards = mapped_shards(cache.context) or 1
    problem = KeepProblem(
        gpu=device.gpu_generation(),
        kind=facts.kind,
        cache_dtype=facts.cache_dtype,
        sequences=facts.sequences,
        width=0 if path is None else path.shape[1],
        kv_heads=facts.kv_heads,
        head_dim=BYTE_ROW.size if facts.byte_rows else facts.head_dim,
        v_head_dim=None if facts.shared_kv else facts.v_head_dim,
        capacities=tuple(shards * rows for rows in facts.capacities),
        page_size=facts.page_size,
        pages=facts.pages,
        layers=facts.layers,
        quantized=facts.quantized and not facts.byte_rows,
    )
    buffers = Caches(cache.k, cache.v, cache.k_scale, cache.v_scale)
    rows = path, cache.lengths, cache.new_lengths, counts
    return problem, KeepInputs(*buffers, *rows, cache.page_table, holders_of(cache))
