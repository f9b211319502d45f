"""Attention over KV caches: one new query row a sequence, or any number of them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn import prefixes, trees
from pallas_attn._cache import sharded_rows
from pallas_attn._call import batching, checks, device, dispatch
from pallas_attn._call.problem import DecodeInputs, DecodeProblem, owner_of_rows
from pallas_attn.cache import KVCache
from pallas_attn.masks import CAUSAL, FULL, Mask, MaskFunction
from pallas_attn.prefixes import LEAST_BOUND, Prefix, SharedPrefixes
from pallas_attn.rotary import RMSNorm, Rotary, changed
from pallas_attn.trees import DraftTree

Array = jax.Array


def decode_attention(  # noqa: PLR0913
    q: Array,
    cache: KVCache,
    *,
    starts: Array | None = None,
    parents: Array | DraftTree | None = None,
    layer: int | Array = 0,
    mask: Mask | MaskFunction = CAUSAL,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    precision: checks.Precision = None,
    batch_invariant: bool = False,
    rotary: Rotary | None = None,
    norm: RMSNorm | None = None,
    shared_prefixes: SharedPrefixes | None = None,
    prefix: Prefix | None = None,
    implementation: str | None = None,
) -> Array:
    """Attention of the newest rows of every sequence to all that its cache holds, those rows
    included.

    Call it after `write_kv` (or `append_kv`): the cache's lengths count the rows just written, and
    query row i of t stands at position length - t + i.

    A row of a quantised cache is its numbers times its scale. Numbers of another dtype than q's
    without scales are read as they stand, by the reference alone. Where V is part of K
    (`shared_kv`), it is read once.

    Args:
      q: `[M, t, N, H]`, or `[M, N, H]` for one token: t = 1 is plain decoding, t > 1 speculative or
        chunked. With `starts`, packed rows `[tokens, N, H]`.
      cache: a `PerSequenceCache`, `StackedCache` or `PagedCache` of M sequences. Where its rows are
        split over devices (`context`), the call is one of all of them, within `jax.shard_map`: each
        attends to the rows that it has, and all get the same result.
      starts: int32[M + 1], traced or not: sequences have different numbers of rows, packed one
        behind the other. Sequence i owns rows starts[i] to starts[i + 1] of q, none where they are
        equal; the last of them stands at position length - 1. One call serves prompts, chunks
        of prompts and single tokens. Starts are clipped to 0 .. tokens and then never below an
        earlier one.
      parents: int32[M, t], traced or not: the t rows of a sequence are drafts that form a tree, and
        parents[m, i] is the draft that draft i of sequence m follows, an earlier one. A draft sees
        the rows before the drafts, itself and its ancestors. Any number that is not from 0 to
        i - 1, as -1, says that the draft follows the sequence itself. With `starts`, int32[tokens]:
        one for each packed row, drafts counted from the first row of their sequence. Where many
        layers decode one step, `DraftTree.create(parents, starts)` finds the ancestors once for all
        of them; it may also be told how many drafts a sequence has at most, so that longer ones
        are prompts.
      layer: which layer of a cache that holds several: an int or a traced int32 (one that the cache
        does not have gives NaN).
      mask: `CAUSAL`, `sliding_window(n)` or any `Mask`; or a function of positions, `mask_fn(f)`,
        which is called with the number of the sequence. Positions are those of the sequence.
        Combine a function with a band, `CAUSAL & mask_fn(f)`: keys outside of it are not read. With
        `parents` it is `CAUSAL` or a window, in which drafts stand where their depth puts them.
      scale, softcap, sinks: as in `flash_attention`.
      precision: as in `flash_attention`; kernels are float32-accurate at any.
      batch_invariant: the bits of a sequence's result do not depend on what else is in the batch.
      rotary, norm: what is done to the rows of q first, as `write_kv` does it to K: the norm, then
        the rotation by each row's position; in float32, rounded once, to q's dtype. With `parents`
        a draft stands as many positions after the last row before the drafts as its path has
        drafts: those of one depth have the same position.
      shared_prefixes: what `cache.shared_prefixes(tokens=t)` found once in this step, for all
        layers: pages that several sequences have in common are read once for all of them. The
        result is the same up to rounding. Where a window bounds the mask's left side, under a mask
        function, with parents, over a latent cache, for packed rows and with batch_invariant, each
        sequence reads all that it has.
      prefix: rows of another cache that stand before those of each sequence, `Prefix(cache,
        groups)`; each group's are read once. Every query sees all of them; `sinks` count once.
        It takes no window, mask function, parents, starts, batch_invariant and rotary: positions
        here are those of the sequence's own rows.
      implementation: as in `flash_attention`.

    Returns:
      `[M, t, N, Hv]` (`[M, N, Hv]`; packed `[tokens, N, Hv]`) in q's dtype. An empty sequence gives
      0; one that overflowed gives NaN, and only it, and so does one that `extend` has not reached
      since it was made or emptied, where `write_kv` has no rows to fill. Packed rows that no
      sequence owns give 0.
    """
    return decode_attention_with_lse(
        q,
        cache,
        starts=starts,
        parents=parents,
        layer=layer,
        mask=mask,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        precision=precision,
        batch_invariant=batch_invariant,
        rotary=rotary,
        norm=norm,
        shared_prefixes=shared_prefixes,
        prefix=prefix,
        implementation=implementation,
    )[0]


def decode_attention_with_lse(  # noqa: PLR0913
    q: Array,
    cache: KVCache,
    *,
    starts: Array | None = None,
    parents: Array | DraftTree | None = None,
    layer: int | Array = 0,
    mask: Mask | MaskFunction = CAUSAL,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    precision: checks.Precision = None,
    batch_invariant: bool = False,
    rotary: Rotary | None = None,
    norm: RMSNorm | None = None,
    shared_prefixes: SharedPrefixes | None = None,
    prefix: Prefix | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """`decode_attention`, with the same arguments, and the log of each row's softmax denominator.

    Returns:
      out, and lse `[M, N, t]` (`[M, N]`; packed `[N, tokens]`), a natural log in float32 (float64
      for float64 queries), the sink included; -inf for a row that sees no key.
    """
    if not isinstance(cache, KVCache):
        raise ValueError(
            "cache: expected a PerSequenceCache, StackedCache or PagedCache, got "
            f"{type(cache).__name__}"
        )
    rows = checks.array("q", q)
    packed = starts is not None
    one_token = rows.ndim == 3 and not packed
    rows = rows[:, None] if one_token else rows
    checks.kv_cache(cache)
    checks.decode_query(rows, cache, packed, one_token)
    tokens = rows.shape[0] if packed else None
    if packed:
        starts = checks.row_starts("starts", starts, rows.shape[0], cache.num_sequences)
    band, function, tree = _visible(cache, rows, starts, mask, parents)
    longest = max(cache.capacities, default=0)
    change, arrays = checks.change(rotary, norm, cache.head_dim, cache.head_dim, longest)
    if change is not None:
        positions = _positions(cache.lengths, rows.shape[0 if packed else 1], starts, tree)
        rows = changed(rows, positions, change, arrays).astype(rows.dtype)
    k_dim, v_dim = cache.stored_dims
    inputs = DecodeInputs(
        checks.widened(rows, k_dim),
        cache.k,
        cache.v,
        cache.lengths,
        cache.page_table,
        checks.layer(layer, cache.layers),
        checks.sink_logits(sinks, rows),
        cache.k_scale,
        cache.v_scale,
        cache.new_lengths,
        starts,
        mask_aux=() if function is None else function.aux,
        **{f"mask_{side}": x for side, x in checks.mask_bounds(band).items()},
    )
    problem = DecodeProblem(
        gpu=device.gpu_generation(),
        kind=cache.kind,
        dtype=str(rows.dtype),
        cache_dtype=str(cache.dtype),
        sequences=cache.num_sequences,
        q_len=rows.shape[1] if tokens is None else max(tokens, LEAST_BOUND),
        q_heads=rows.shape[-2],
        kv_heads=cache.kv_heads,
        head_dim=k_dim,
        v_head_dim=v_dim,
        capacities=cache.held,
        mask=band.static,
        scale=checks.scale(scale, cache.head_dim),
        softcap=checks.softcap(softcap),
        page_size=cache.page_size,
        pages=cache.pages,
        layers=cache.layers,
        sinks=inputs.sinks is not None,
        precision=checks.precision(precision, rows.dtype),
        batch_invariant=checks.boolean("batch_invariant", batch_invariant),
        quantized=cache.quantized,
        shared_kv=cache.shared_kv,
        tokens=tokens,
        mask_program=None if function is None else function.program,
        tree=tree is not None and cache.context is None and not band.bounds_left,
    )
    run = functools.partial(_decode, implementation=implementation)
    runs = prefixes.Run(run, functools.partial(_merged, implementation=implementation))
    if shared_prefixes is not None and prefix is not None:
        raise ValueError("shared_prefixes: expected None beside prefix, got both; pass one of them")
    if prefix is not None:
        other = prefixes.checked(prefix, cache, problem, rotary)
        out, lse = prefixes.over_prefix(other, problem, inputs, runs)
    elif shared_prefixes is not None and prefixes.applies(shared_prefixes, cache, problem):
        out, lse = prefixes.over_shared(shared_prefixes, problem, inputs, runs)
    elif cache.context is not None:
        chosen = functools.partial(_chosen, implementation=implementation)
        out, lse = sharded_rows.decode(cache.context, problem, inputs, run, chosen)
    else:
        out, lse = run(problem, inputs)
    if out.shape[-1] != cache.v_head_dim:
        out = out[..., : cache.v_head_dim]
    return (out[:, 0], lse[..., 0]) if one_token else (out, lse)


def _visible(
    cache: KVCache, rows: Array, starts: Array | None, mask: Any, parents: Any
) -> tuple[Mask, MaskFunction | None, DraftTree | None]:
    """Which keys are read; what hides some of them, if anything does; the tree if that is it."""
    split = cache.context is not None
    if parents is not None:
        if not (isinstance(mask, Mask) and mask.is_causal):
            given = mask if isinstance(mask, Mask) else type(mask).__name__
            raise ValueError(
                "mask: expected CAUSAL or a window, Mask(left=.., right=0), beside parents, which "
                f"say what drafts see, got {given}"
            )
        if starts is not None:
            tree = trees.of_packed(parents, starts, rows.shape[0])
            if mask.left is None:
                return CAUSAL, trees.packed(tree, starts), tree
            begin = cache.lengths - jnp.diff(starts)
            return *trees.windowed(tree, mask.left, begin, starts), tree
        tree = trees.of(parents, cache.num_sequences, rows.shape[1])
        if cache.context is not None:
            begins = sharded_rows.begins(cache.context, cache.held, cache.lengths, rows.shape[1])
            return FULL, trees.split(tree, mask.left, begins), tree
        if mask.left is None:
            return CAUSAL, MaskFunction(trees.program(tree.bits.shape), (tree.bits,)), tree
        begin = cache.lengths - rows.shape[1]
        return *trees.windowed(tree, mask.left, begin), tree
    if not isinstance(mask, MaskFunction):
        return checks.mask(mask), None, None
    if split:
        raise ValueError(
            "mask: expected a Mask over a cache whose rows are split over devices, got a mask "
            "function; use a cache without context"
        )
    return mask.within, mask, None


def _positions(lengths: Array, rows: int, starts: Array | None, tree: DraftTree | None) -> Array:
    """int32[M, t], of packed rows int32[tokens]: where query rows stand."""
    at = jnp.arange(rows, dtype=jnp.int32)
    if starts is None:
        return (lengths - rows)[:, None] + (at[None] if tree is None else tree.depth)
    owners = jnp.clip(owner_of_rows(starts, rows), 0, lengths.size - 1)
    if tree is not None:
        return lengths[owners] - jnp.diff(starts)[owners] + tree.depth
    return lengths[owners] - starts[owners + 1] + at


def _merged(
    problem: DecodeProblem, inputs: DecodeInputs, implementation: str | None
) -> tuple[Array, Array] | None:
    """The results of `inputs.into` with those of packed rows merged in, where a kernel does it."""
    if 0 in problem.out_shape or (chosen := dispatch.merging(problem, implementation)) is None:
        return None
    return batching.kept(batching.decode, chosen, problem, inputs)


def _chosen(problem: DecodeProblem, implementation: str | None) -> str:
    """The name of who serves it; a question, which no report on what ran is to show."""
    with dispatch.recorded():
        return dispatch.select(problem, implementation).name


def _decode(
    problem: DecodeProblem, inputs: DecodeInputs, implementation: str | None
) -> tuple[Array, Array]:
    rows = problem.out_shape
    dispatch.check_name(implementation)
    if 0 in rows:
        out = jnp.zeros((*rows, problem.v_head_dim), problem.dtype)
        return out, jnp.zeros(problem.lse_shape, problem.lse_dtype)
    chosen = dispatch.select(problem, implementation)
    if chosen.name == "reference":
        return chosen.run(inputs, problem)
    return batching.kept(batching.decode, chosen, problem, inputs)
