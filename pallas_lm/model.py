"""A decoder of the Llama family in jax.numpy and this package's operations.

Llama 2 and 3, Mistral, Qwen2, Qwen3 and Gemma 2, 3 and 4 are one model with a few choices
(`Config`): x plus attention of the norm of x, plus a gated MLP of the norm of that. DeepSeek-V2 has
another attention (`latent`) and another MLP (`experts`) in it. Four ways to run it share every
layer:

    forward(config, params, tokens)               all positions at once, no cache: training, checks
    prefill(config, params, cache, ...)           prompts through `flash_attention` into the cache
    decode(config, params, cache, tokens, ...)    as many tokens of each sequence, over the cache
    mixed(config, params, cache, tokens, ...)     any number of each, packed, over the cache

Layers are stacked and scanned. Layers in a row with the same window form a run, which is one scan:
a static window is the fastest, and a model with one kind of layer is one run. Weights are
`[out, in]`, as checkpoints have them; q, k and v are one matrix and so are gate and up, since at a
few rows a matmul costs what its weights take to read, and a launch.

A few rows on Hopper are streamed: `rows` has kernels that read each weight out of the stack.

Axes: M sequences, t rows of each, D hidden, N query heads, K kv heads, H head dim.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn.append import write_kv
from pallas_attn.attention import flash_attention
from pallas_attn.cache import KVCache
from pallas_attn.context import Context
from pallas_attn.decode import decode_attention
from pallas_attn.devices import overlapping, varying_like
from pallas_attn.masks import Mask
from pallas_attn.prefixes import SharedPrefixes
from pallas_attn.rotary import RMSNorm, Rotary
from pallas_lm import experts, gemma4, latent, tensor_parallel
from pallas_lm import rows as lm_rows
from pallas_lm.config import Config, Params
from pallas_lm.gemma4 import part_of, shared_prefixes, with_part
from pallas_lm.rows import Angles, Layer, add_norm, gated, linear, partials, rms_norm

Array = jax.Array
Cache = Any  # a KVCache; None without one
Sent = Any  # an array that is NumPy's on the host and jax's in a program
Tables = tuple[Rotary, ...]  # tables for each of `Config.ropes`
STREAMED = ("qkv", "out", "gate_up", "down", "attn_norm", "mlp_norm")  # read out of the stack


# ---- the layers ---------------------------------------------------------------------------------


class Heads(NamedTuple):
    """The inputs of one layer's attention."""

    q: Array  # [M, t, N, H]
    k: Array  # [M, t, K, H]; the cache's rows [M, t, 1, ..] of latent attention
    v: Array | None  # None where it is made of those
    weights: Params  # one layer's
    mask: Mask
    layer: Array  # its number
    written: bool = False  # k and v are those of an earlier layer, which the cache has


class _Pass(NamedTuple):
    """The choices of one of the four ways to run a model."""

    positions: Array | None  # int32[M, t]; None where append and attention rotate q and k
    attend: Callable[[Heads, Cache], tuple[Array, Cache]]  # (heads, cache) -> (out, cache)
    stream: bool = False  # weights are read out of the stack of all layers


def _layers(config: Config, params: Params, tokens: Array, run: _Pass, cache: Cache = None):
    """(rows [M, t, D] after the last norm, the cache that `attend` passed from layer to layer)."""
    x = embedded(config, params["embed"], tokens)
    eps, angles = config.norm_eps, None
    if run.positions is not None:
        at = run.positions[:, :, None]
        turned = zip(config.ropes, config.rotary_dims, strict=True)
        angles = tuple(rope.angles(at, dim) for rope, dim in turned)
    added = _nothing_added(config, params["runs"][0]["down"], x, run.stream)
    inputs, done = _inputs(config, params, x, tokens), 0
    held: dict[bool, tuple[Array, ...]] = {}  # k and v of the newest layers with no window, and one
    for place, (weights, (count, mask)) in enumerate(zip(params["runs"], config.runs, strict=True)):
        stacks = {name: weights[name] for name in STREAMED if run.stream}
        sliced = {name: x for name, x in weights.items() if name not in stacks}
        if inputs is not None:
            sliced["input"] = inputs[done : done + count]
        turn = None if angles is None else angles[config.rope_number(mask)]
        first, part = config.first_layer(place), part_of(cache, mask)
        own = _Run(config.of_run(place), mask, stacks, first, turn, held.get(mask.left is None))
        carry = _Carry(x, added, part, jnp.asarray(first, jnp.int32))
        unroll = count if run.stream else 1  # XLA's kernel that counts layers would hold up ours
        layer = functools.partial(_layer, run, own)
        (x, added, part, _), rows = lax.scan(layer, carry, sliced, count, unroll=unroll)
        cache, done = with_part(cache, mask, part), done + count
        if rows is not None:
            held[mask.left is None] = tuple(x[-1] for x in rows)
    norm = params["norm"]
    return add_norm(x, added, Layer(norm[None], 0) if run.stream else norm, eps)[1], cache


class _Carry(NamedTuple):
    """State between two layers."""

    x: Array  # [M, t, D], the residual stream
    added: Array  # a term of it that is not added yet, as partial sums [n, M, t, D]
    cache: Cache
    number: Array  # the next layer's


class _Run(NamedTuple):
    """Facts that the layers of a run share."""

    config: Config  # with their heads
    mask: Mask
    stacks: Params  # weights that are read out of the stack of all layers
    first: int  # number of the first layer
    angles: Angles | None
    held: tuple[Array, ...] | None  # k and v of an earlier layer, for layers that read its rows


def _layer(how: _Pass, own: _Run, carry: _Carry, item: Params) -> tuple[_Carry, Any]:
    """One layer; its k and v beside the carry, where later layers may read their rows."""
    # The result of a matmul waits for the norm that follows, which adds it to x.
    (x, added, cache, number), weights, config = carry, dict(item), own.config
    weights |= {name: Layer(stack, number - own.first) for name, stack in own.stacks.items()}
    eps, read = config.norm_eps, own.held if config.reads_only else None
    x, normed = add_norm(x, added, weights["attn_norm"], eps)
    q, k, v = _heads_of(config, weights, normed, own.angles, read)
    heads = Heads(q, k, v, weights, own.mask, number, config.reads_only)
    out, cache = how.attend(heads, cache)
    added = _added(config, out.reshape(*x.shape[:2], -1), weights["out"])
    added = _normed(config, added, weights, "attn_post_norm", x)
    x, normed = add_norm(x, added, weights["mlp_norm"], eps)
    added = _mlp(config, normed, weights)
    if config.gemma4 is not None:
        added = _with_experts(config, x, added, weights)
    added = _normed(config, added, weights, "mlp_post_norm", x)
    if config.gemma4 is not None:
        x, added = _ended(x, added, weights, eps)
    number += int(not config.reads_only)
    return _Carry(x, added, cache, number), (k, v) if _is_read(config) else None


def embedded(config: Config, embed: Array, tokens: Array) -> Array:
    """Rows [..., D] of the embedding."""
    if config.over is not None:
        rows = tensor_parallel.embedded(config.over, config.vocab, embed, tokens)
    else:
        rows = jnp.take(embed, tokens, axis=0, mode="clip")
    return rows * jnp.asarray(config.hidden**0.5, rows.dtype) if config.gemma else rows


def _inputs(config: Config, params: Params, x: Array, tokens: Array) -> Array | None:
    """The inputs of all layers, if they have any."""
    if config.gemma4 is None or not config.gemma4.inputs:
        return None
    return gemma4.inputs_of(config.gemma4.inputs, params, x, tokens, config.norm_eps)


def _is_read(config: Config) -> bool:
    """Whether later layers may read k and v of a layer."""
    return config.gemma4 is not None and config.gemma4.readers > 0 and not config.reads_only


def _ended(x: Array, added: Array, weights: Params, eps: float) -> tuple[Array, Array]:
    """The residual stream and the term for it after a layer of Gemma 4."""
    if "input" in weights:
        x, added = gemma4.with_input(x, added, weights, eps)
    return x * weights["factor"][0], added * weights["factor"][0]


def _heads_of(
    config: Config,
    weights: Params,
    x: Array,
    angles: Angles | None,
    read: tuple[Array, ...] | None,
) -> tuple[Array, Array, Array | None]:
    """q, k and v of `Heads`. `read`: k and v of an earlier layer."""
    if read is not None:
        q = linear(x, weights["qkv"]).reshape(*x.shape[:2], config.heads, config.head_dim)
        if angles is not None:
            q = lm_rows.rotate(rms_norm(q, weights["q_norm"], config.norm_eps), angles)
        return q, read[0], read[1]
    if config.latent is None:
        q, k, v = qkv_of(config, weights, x, angles)
        return q, k, v
    assert angles is not None
    return *latent.queries_and_rows(config.latent, weights, x, angles), None


def _of_each_head(config: Config, heads: Heads) -> tuple[Array, Array, Array]:
    """q, k and v [M, t, heads, ..] for attention without a cache."""
    q, k, v = heads[:3]
    if v is None:
        assert config.latent is not None
        k, v = latent.expanded(config.latent, k, heads.weights["kv_b"])
    return q, k, v


def qkv_of(config: Config, weights: Params, x: Array, angles: Angles | None) -> tuple[Array, ...]:
    """q [M, t, N, H], k and v [M, t, K, H] of x. With angles q and k are normalised and rotated
    here, without them by append and attention.
    """
    sizes = (config.heads, config.kv_heads, *(() if config.values_are_keys else (config.kv_heads,)))
    rows = linear(x, weights["qkv"])
    if config.qkv_bias:
        rows += weights["qkv_bias"][None, None]
    rows = rows.reshape(*x.shape[:2], sum(sizes), config.head_dim)
    q, k, *made = jnp.split(rows, np.cumsum(sizes)[:-1], axis=2)
    v = made[0] if made else k
    if config.gemma4 is not None:
        v = rms_norm(v, jnp.ones(config.head_dim, v.dtype), config.norm_eps)
    if angles is None:
        return q, k, v
    if config.qk_norm:
        q = rms_norm(q, weights["q_norm"], config.norm_eps)
        k = rms_norm(k, weights["k_norm"], config.norm_eps)
    return lm_rows.rotate(q, angles), lm_rows.rotate(k, angles), v


def _added(config: Config, x: Array, weight: Array | Layer) -> Array:
    """x by a weight, as partial sums that the next norm adds to the residual stream."""
    if config.over is None:
        return partials(x, weight)
    sums = partials(x, weight, jnp.float32)
    return tensor_parallel.summed(config.over, sums, x.dtype)[None]


def _normed(config: Config, added: Array, weights: Params, name: str, x: Array) -> Array:
    """The term for the residual stream, with Gemma's norm applied in a Gemma model."""
    if not config.gemma:
        return added
    rows = lm_rows.total(added, x.dtype)
    return rms_norm(rows, weights[name], config.norm_eps)[None]


def _mlp(config: Config, x: Array, weights: Params) -> Array:
    """The gated MLP of normed rows, or the experts in its place."""
    if config.experts is not None and "router" in weights:
        return experts.mlp(config.experts, x, weights)[None]
    inner = gated(x, weights["gate_up"], _gelu if config.gemma else jax.nn.silu)
    return _added(config, inner, weights["down"])


def _with_experts(config: Config, x: Array, added: Array, weights: Params) -> Array:
    """The result of Gemma 4's MLP for rows x, with that of the experts beside it."""
    if config.gemma4 is None or config.gemma4.experts is None:
        return added
    own, result = config.gemma4.experts, added[0]
    return gemma4.with_experts(own, x, result, weights, config.norm_eps)[None]


def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=True)


def _scores_of(config: Config) -> dict[str, Any]:
    """Options of attention that turn scores into logits: scale and softcap."""
    return {"scale": config.scale, "softcap": config.softcap}


def _nothing_added(config: Config, down: Array, x: Array, stream: bool) -> Array:
    """Zeros in the shape of the partial sums that a layer leaves to be added to x."""
    inner = jax.ShapeDtypeStruct((*x.shape[:2], down.shape[2]), x.dtype)
    weight = Layer(down, 0) if stream else down[0]
    sums = jax.eval_shape(lambda rows: _added(config, rows, weight), inner)
    return varying_like(jnp.zeros(sums.shape, sums.dtype), x)


def logits_of(config: Config, params: Params, x: Array, stream: bool = False) -> Array:
    """float32[..., vocab] of normed rows [..., D]."""
    head = params["embed" if config.tied else "head"]
    logits = linear(x, Layer(head[None], 0) if stream else head, jnp.float32)
    if config.over is not None:
        logits = tensor_parallel.all_logits(config.over, config.vocab, logits)
    if (cap := config.logit_softcap) is not None:
        logits = cap * jnp.tanh(logits / cap)
    return logits


# ---- without a cache, and prompts ---------------------------------------------------------------


def forward(
    config: Config,
    params: Params,
    tokens: Array,
    *,
    implementation: str | None = None,
    context: Context | None = None,
) -> Array:
    """Logits float32[M, t, vocab] of tokens int32[M, t], without a cache. Differentiable. With a
    context the tokens are this device's rows of longer sequences.
    """

    def attend(heads: Heads, cache: None) -> tuple[Array, None]:
        shared = _scores_of(config) | {"implementation": implementation, "context": context}
        return flash_attention(*_of_each_head(config, heads), mask=heads.mask, **shared), cache

    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    if context is not None:
        positions = context.positions(tokens.shape[1])
    x, _ = _layers(config, params, tokens, _Pass(positions[None], attend))
    return logits_of(config, params, x)


class Prompts(NamedTuple):
    """n prompts on their way into a cache of M sequences."""

    tokens: Sent  # int32[n, t], padded with anything
    lengths: Sent  # int32[n]
    slots: Sent  # int32[n]: the sequence that each fills; M for a row that is no prompt


def prefill(
    config: Config,
    params: Params,
    cache: KVCache,
    prompts: Prompts,
    implementation: str | None = None,
) -> tuple[Array, KVCache]:
    """Prompts into the empty sequences of a cache: logits float32[n, vocab] after each, the cache.
    Sequences without a prompt take no rows.
    """
    n, t = prompts.tokens.shape
    none = jnp.zeros(cache.num_sequences, jnp.int32)
    rows = none.at[prompts.slots].set(prompts.lengths, mode="drop")
    source = none.at[prompts.slots].set(jnp.arange(n, dtype=jnp.int32), mode="drop")  # prompt

    def attend(heads: Heads, cache: KVCache) -> tuple[Array, KVCache]:
        shared = _scores_of(config) | {"mask": heads.mask, "implementation": implementation}
        shared |= {"q_lengths": prompts.lengths, "kv_lengths": prompts.lengths}
        out = flash_attention(*_of_each_head(config, heads), **shared)
        if heads.written:
            return out, cache
        k = jnp.take(heads.k, source, axis=0)
        v = None if heads.v is None else jnp.take(heads.v, source, axis=0)
        return out, write_kv(cache, k, v, layer=heads.layer, implementation=implementation)

    positions = jnp.arange(t, dtype=jnp.int32)[None]
    run = _Pass(positions, attend)
    x, cache = _layers(config, params, prompts.tokens, run, cache.extend(rows))
    last = jnp.maximum(prompts.lengths - 1, 0)[:, None, None]
    return logits_of(config, params, jnp.take_along_axis(x, last, axis=1)[:, 0]), cache


# ---- over a cache -------------------------------------------------------------------------------


def decode(
    config: Config,
    params: Params,
    cache: KVCache,
    tokens: Array,
    rows: Array,
    rotary: Tables,
    implementation: str | None = None,
    levels: int = 0,
) -> tuple[Array, KVCache]:
    """Tokens int32[M, t] into the sequences whose `rows` int32[M] is t, not 0: logits
    float32[M, t, vocab] after each, the cache.

    `levels`: levels at which sequences that share pages of a PagedCache branch off; shared pages
    are then read once for all of them. 0: each sequence reads all of its own.
    """
    cache = cache.extend(rows)
    count = tokens.shape[1]
    within = jnp.arange(count, dtype=jnp.int32)[None]
    positions = jnp.maximum(cache.lengths[:, None] - count + within, 0)
    shared = shared_prefixes(cache, tokens=count, levels=levels) if levels else None
    run = _over_cache(config, params, _NewRows(positions, rotary, shared=shared), implementation)
    x, cache = _layers(config, params, tokens, run, cache)
    return logits_of(config, params, x, run.stream), cache


class Packed(NamedTuple):
    """New rows of all sequences, one behind the other: chunks of prompts, a token and its drafts,
    or none.
    """

    tokens: Array  # int32[R]
    starts: Array  # int32[M + 1]: sequence i takes those from starts[i] to starts[i + 1]
    after: Array  # int32[...]: rows whose logits are wanted; those past the end give anything


def mixed(
    config: Config,
    params: Params,
    cache: KVCache,
    packed: Packed,
    rotary: Tables,
    implementation: str | None = None,
    levels: int = 0,
) -> tuple[Array, KVCache]:
    """Packed rows into the cache: logits float32[..., vocab] after the wanted ones, and the cache.
    `levels`: as in `decode`.
    """
    tokens, starts, after = packed
    cache = cache.extend(jnp.diff(starts))
    owners = owners_of(starts, tokens.shape[0])
    place = jnp.arange(tokens.shape[0], dtype=jnp.int32) - starts[owners + 1]
    positions = jnp.maximum(cache.lengths[owners] + place, 0)[None]
    shared = None
    if levels:
        shared = shared_prefixes(cache, tokens=tokens.shape[0], levels=levels, starts=starts)
    run = _over_cache(config, params, _NewRows(positions, rotary, starts, shared), implementation)
    x, cache = _layers(config, params, tokens[None], run, cache)
    wanted = jnp.take(x[0], after, axis=0, mode="clip")
    return logits_of(config, params, wanted, run.stream), cache


def owners_of(starts: Array, rows: int) -> Array:
    """int32[rows]: the sequence that owns each packed row; the last one for rows past the end."""
    row = jnp.arange(rows, dtype=jnp.int32)
    owner = jnp.searchsorted(starts, row, side="right").astype(jnp.int32) - 1
    return jnp.clip(owner, 0, starts.shape[0] - 2)


def rotary_of(config: Config, cache: KVCache) -> Tables:
    """Tables for all rows that a sequence of the cache can hold."""
    positions = jnp.arange(max(cache.capacities), dtype=jnp.int32)
    turned = zip(config.ropes, config.rotary_dims, strict=True)
    return tuple(Rotary(*rope.angles(positions, dim)) for rope, dim in turned)


class _NewRows(NamedTuple):
    """The place of new rows in a cache."""

    positions: Array  # int32[M, t]; packed int32[1, R]
    rotary: Tables
    starts: Array | None = None  # packed: start of each sequence's rows
    shared: SharedPrefixes | None = None  # pages that are read once for several sequences


def _over_cache(config: Config, params: Params, new: _NewRows, implementation: str | None) -> _Pass:
    """New rows are written to the cache, and attend to all that it holds.

    K is normalised and rotated by the launch that writes it, q before it is used; rows of latent
    attention are before.
    """
    positions, starts = new.positions, new.starts
    few = lm_rows.streams(positions.size, params["embed"].dtype, implementation)
    stream = few and not (config.gemma or config.latent)
    launches = overlapping if stream else contextlib.nullcontext
    rotated = config.latent is not None

    def norm(weights: Params, name: str) -> RMSNorm | None:
        return RMSNorm(weights[name], config.norm_eps) if config.qk_norm else None

    def attend(heads: Heads, cache: KVCache) -> tuple[Array, KVCache]:
        q, k, v = heads[:3]
        if starts is not None:
            q, k, v = q[0], k[0], None if v is None else v[0]
        if config.latent is not None:
            q = latent.absorbed(config.latent, q, heads.weights["kv_b"])
        shared: dict[str, Any] = {"starts": starts, "layer": heads.layer}
        shared["rotary"] = None if rotated else new.rotary[config.rope_number(heads.mask)]
        shared["implementation"] = implementation
        with launches():
            if not heads.written:
                cache = write_kv(cache, k, v, norm=norm(heads.weights, "k_norm"), **shared)
            shared |= {"mask": heads.mask, "norm": norm(heads.weights, "q_norm")}
            shared |= _scores_of(config)
            out = decode_attention(q, cache, shared_prefixes=new.shared, **shared)
        if config.latent is not None:
            out = latent.values(config.latent, out, heads.weights["kv_b"])
        return out if starts is None else out[None], cache

    return _Pass(positions if rotated else None, attend, stream)
