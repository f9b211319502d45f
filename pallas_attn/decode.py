"""Attention over KV caches: one new query row a sequence, or any number of them."""

import jax

from pallas_attn._cache import attend_in_parts, bind, facts, sharded_rows
from pallas_attn._cache.attend import attend
from pallas_attn._cache.bind import DecodeCall
from pallas_attn._call import checks
from pallas_attn.cache import KVCache, not_a_cache
from pallas_attn.masks import CAUSAL, Mask, MaskFunction
from pallas_attn.prefixes import Prefix, SharedPrefixes
from pallas_attn.rotary import RMSNorm, Rotary
from pallas_attn.scores import ScoreFunction
from pallas_attn.trees import DraftTree

Array = jax.Array


def decode_attention(  # noqa: PLR0913
    q: Array,
    cache: KVCache,
    *,
    starts: Array | None = None,
    parents: Array | DraftTree | None = None,
    layer: int | Array | None = None,
    mask: Mask | MaskFunction = CAUSAL,
    score: ScoreFunction | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    precision: checks.Precision = None,
    batch_invariant: bool = False,
    rotary: Rotary | None = None,
    norm: RMSNorm | None = None,
    shared_prefixes: SharedPrefixes | None = None,
    prefix: Prefix | None = None,
    kv_indices: Array | None = None,
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
      layer: which layer of a cache: an int or a traced int32 (one that the cache does not have
        gives NaN). It may be left out where the cache has one.
      mask: `CAUSAL`, `sliding_window(n)` or any `Mask`; or a function of positions, `mask_fn(f)`,
        which is called with the number of the sequence. Positions are those of the sequence.
        Combine a function with a band, `CAUSAL & mask_fn(f)`: keys outside of it are not read. With
        `parents` it is `CAUSAL` or a window, in which drafts stand where their depth puts them.
      score: a function of the scaled, capped scores, `score_fn(f, *aux)`, as in `flash_attention`:
        ALiBi, T5's biases. It is called with the number of the sequence, and positions are those of
        the sequence. It takes no parents, prefix and no cache whose rows are split over devices.
      scale, softcap, sinks: as in `flash_attention`.
      precision: as in `flash_attention`; kernels are float32-accurate at any. Over a float8 cache
        `jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32` allows kernels to multiply its numbers in
        float8, which is faster where query rows are many, and less accurate: q and probabilities
        are rounded to float8, and rows of K and V to a scale that 128 of them share.
        `ANY_F8_ANY_F8_F32_FAST_ACCUM` allows the same. Others ignore it.
      batch_invariant: the bits of a sequence's result do not depend on what else is in the batch.
      rotary, norm: applied to the rows of q first, as `write_kv` does it to K: the norm, then the
        rotation by each row's position; in float32, rounded once, to q's dtype. With `parents`
        a draft stands as many positions after the last row before the drafts as its path has
        drafts: those of one depth have the same position.
      shared_prefixes: the result of `cache.shared_prefixes(tokens=t)`, for packed rows of
        `shared_prefixes(tokens=tokens, starts=starts)`, made once in this step for all layers:
        pages that several sequences have in common are read once for all of them. The result is
        the same up to rounding. Where a window bounds the mask's left side, under a mask function,
        with a score function or parents, over a latent cache and with batch_invariant, each
        sequence reads all that it has.
      prefix: rows of another cache that stand before those of each sequence, `Prefix(cache,
        groups)`; each group's are read once. Every query sees all of them; `sinks` count once.
        It takes no window, mask function, score, parents, starts, batch_invariant and rotary:
        positions here are those of the sequence's own rows.
      kv_indices: int32[M, t, n] ([M, n] of one token), traced or not, of packed rows int32[tokens,
        n]: a query row attends to these positions of its sequence only, in any order. -1 is none,
        and so does any position that the sequence does not have or that `mask` hides from the row.
        A position counts as often as it is listed: list each once. All heads of a row share its
        list. It takes no parents, shared_prefixes, prefix and no cache whose rows are split over
        devices.
      implementation: as in `flash_attention`.

    Returns:
      `[M, t, N, Hv]` (`[M, N, Hv]`; packed `[tokens, N, Hv]`) in q's dtype. An empty sequence gives
      0. One that overflowed gives NaN, and only it. So does one that was never extended since it
      was made or emptied, which outside of jit is a ValueError. Packed rows that no sequence owns
      give 0.

    Example::

        >>> cache = pa.StackedCache.create(2, 16, kv_heads=2, head_dim=64)
        >>> rows = jnp.ones((2, 5, 2, 64), cache.k.dtype)
        >>> cache = pa.append_kv(cache, rows, rows)
        >>> pa.decode_attention(jnp.ones((2, 8, 64), cache.k.dtype), cache).shape
        (2, 8, 64)
    """
    call = DecodeCall(
        starts=starts,
        parents=parents,
        layer=layer,
        mask=mask,
        score=score,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        precision=precision,
        batch_invariant=batch_invariant,
        rotary=rotary,
        norm=norm,
        shared_prefixes=shared_prefixes,
        prefix=prefix,
        kv_indices=kv_indices,
        implementation=implementation,
    )
    return _attend(q, cache, call)[0]


def decode_attention_with_lse(  # noqa: PLR0913
    q: Array,
    cache: KVCache,
    *,
    starts: Array | None = None,
    parents: Array | DraftTree | None = None,
    layer: int | Array | None = None,
    mask: Mask | MaskFunction = CAUSAL,
    score: ScoreFunction | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    precision: checks.Precision = None,
    batch_invariant: bool = False,
    rotary: Rotary | None = None,
    norm: RMSNorm | None = None,
    shared_prefixes: SharedPrefixes | None = None,
    prefix: Prefix | None = None,
    kv_indices: Array | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """`decode_attention`, with the same arguments, and the log of each row's softmax denominator.

    Returns:
      out, and lse `[M, N, t]` (`[M, N]`; packed `[N, tokens]`), a natural log in float32 (float64
      for float64 queries), the sink included; -inf for a row that sees no key.

    Example::

        >>> cache = pa.StackedCache.create(2, 16, kv_heads=2, head_dim=64)
        >>> rows = jnp.ones((2, 5, 2, 64), cache.k.dtype)
        >>> cache = pa.append_kv(cache, rows, rows)
        >>> q = jnp.ones((2, 3, 8, 64), cache.k.dtype)
        >>> [x.shape for x in pa.decode_attention_with_lse(q, cache)]
        [(2, 3, 8, 64), (2, 8, 3)]
    """
    call = DecodeCall(
        starts=starts,
        parents=parents,
        layer=layer,
        mask=mask,
        score=score,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        precision=precision,
        batch_invariant=batch_invariant,
        rotary=rotary,
        norm=norm,
        shared_prefixes=shared_prefixes,
        prefix=prefix,
        kv_indices=kv_indices,
        implementation=implementation,
    )
    return _attend(q, cache, call)


@facts.of_live
def _attend(q: Array, cache: KVCache, call: DecodeCall) -> tuple[Array, Array]:
    """out and lse of a call."""
    if not isinstance(cache, KVCache):
        raise not_a_cache(cache)
    problem, inputs = bind.decode(q, cache, call)
    prefix, shared_prefixes = call.prefix, call.shared_prefixes
    if call.kv_indices is not None and not (prefix is None and shared_prefixes is None):
        name = "shared_prefixes" if prefix is None else "prefix"
        raise ValueError(f"{name}: expected None beside kv_indices, got both; pass one of them")
    if prefix is not None and shared_prefixes is not None:
        raise ValueError("shared_prefixes: expected None beside prefix, got both; pass one of them")
    made = attend_in_parts.Call(problem, inputs, call.implementation)
    if prefix is not None:
        out, lse = attend_in_parts.with_prefix(prefix, cache, made, call.rotary is not None)
    elif shared_prefixes is not None:
        out, lse = attend_in_parts.with_shared_prefixes(shared_prefixes, cache, made, call.starts)
    elif cache.context is not None:
        out, lse = sharded_rows.decode(cache.context, *made)
    else:
        out, lse = attend(*made)
    if not isinstance(cache.new_lengths, jax.core.Tracer):  # last: other errors say more
        facts.check_reached("cache", cache)
    columns = problem.v_head_dim if cache.dims is None else cache.dims[1]
    if out.shape[-1] != columns:  # zeros, as of columns that `create` added
        out = out[..., :columns]
    return (out[:, 0], lse[..., 0]) if q.ndim == 3 and call.starts is None else (out, lse)
