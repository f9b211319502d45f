"""A decoder of the Llama family in jax.numpy and this package's operations.

Llama 2 and 3, Mistral, Qwen2 and Qwen3 are one model with a few choices: x plus attention of the
norm of x, plus a gated MLP of the norm of that. Four ways to run it share every layer:

    forward(config, params, tokens)               all positions at once, no cache: training, checks
    prefill(config, params, cache, ...)           prompts through `flash_attention` into the cache
    decode(config, params, cache, tokens)         one token a sequence over the cache
    mixed(config, params, cache, tokens, ...)     any number a sequence, packed, over the cache

Layers are stacked and scanned. Layers in a row with the same window form a run, which is one scan:
a static window is the fastest, and a model with one kind of layer is one run. Weights are
`[out, in]`, as checkpoints have them; q, k and v are one matrix and so are gate and up, since at a
few rows a matmul costs what its weights take to read, and a launch.

Axes: M sequences, t rows of each, D hidden, N query heads, K kv heads, H head dim.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn.append import write_kv
from pallas_attn.attention import flash_attention
from pallas_attn.context import Context
from pallas_attn.decode import decode_attention
from pallas_attn.lm import rows as lm_rows
from pallas_attn.lm.exchange import Exchange
from pallas_attn.lm.rows import (
    Added,
    Angles,
    Layer,
    add_norm,
    gated,
    linear,
    partials,
    rms_norm,
    rotate,
    total,
)
from pallas_attn.masks import CAUSAL, Mask, sliding_window
from pallas_attn.prefixes import SharedPrefixes
from pallas_attn.rotary import RMSNorm, Rotary

Array = jax.Array
Params = dict[str, Any]
STREAMED = ("qkv", "out", "gate_up", "down", "attn_norm", "mlp_norm")


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions: the base, and how its frequencies are stretched for longer contexts."""

    theta: float = 10000.0
    kind: str = "default"  # or linear, llama3, yarn
    factor: float = 1.0
    original_positions: int = 0  # what the model saw before it was stretched: llama3, yarn
    low_freq_factor: float = 1.0  # llama3: slower than this many turns in that context: stretched
    high_freq_factor: float = 4.0  # llama3: faster than this: left alone
    beta_fast: float = 32.0  # yarn: the same two bounds
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: bounds at whole dimensions
    attention_factor: float = 1.0  # yarn: multiplies cos and sin

    def angles(self, positions: Array, head_dim: int) -> Angles:
        """cos and sin of positions int32[...], float32[..., H / 2]."""
        radians = self.frequencies(head_dim).reshape((1,) * positions.ndim + (-1,))
        angles = positions.astype(jnp.float32)[..., None] * radians
        factor = self.attention_factor
        return Angles(jnp.cos(angles) * factor, jnp.sin(angles) * factor)

    def frequencies(self, head_dim: int) -> np.ndarray:
        """float32[H / 2]: radians a position."""
        plain = self.theta ** -(np.arange(0, head_dim, 2) / head_dim)
        if self.kind == "default":
            keep = np.ones_like(plain)
        elif self.kind == "linear":
            keep = np.zeros_like(plain)
        elif self.kind == "llama3":
            turns = self.original_positions * plain / (2 * math.pi)
            low, high = self.low_freq_factor, self.high_freq_factor
            keep = np.clip((turns - low) / (high - low), 0, 1)
        elif self.kind == "yarn":
            low, high = self._bounds(head_dim)
            keep = 1 - np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0, 1)
        else:
            raise ValueError(f"rope: expected default, linear, llama3 or yarn, got {self.kind!r}")
        return (keep * plain + (1 - keep) * plain / self.factor).astype(np.float32)

    def _bounds(self, head_dim: int) -> tuple[float, float]:
        """The dimensions between which yarn goes from keeping a frequency to stretching it."""

        def dimension(turns: float) -> float:
            positions = self.original_positions / (turns * 2 * math.pi)
            return head_dim * math.log(positions) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        return max(low, 0), min(high, head_dim - 1)


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes and choices of one model. Hashable: a jit key."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    positions: int  # the longest context that the model was made for
    rope: Rope = Rope()
    norm_eps: float = 1e-6
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3
    tied: bool = False  # the head is the embedding
    windows: tuple[int | None, ...] = ()  # keys that each layer sees, its own counted; None: all
    # The mesh axis of the devices that have the other heads and columns of the MLP: sizes are then
    # those of one device, within jax.shard_map (`mesh.local`).
    over: str | None = None

    @property
    def runs(self) -> tuple[tuple[int, Mask], ...]:
        """Layers in a row with the same mask: (how many, the mask)."""
        windows = self.windows or (None,) * self.layers
        found = []
        for window, group in itertools.groupby(windows):
            mask = CAUSAL if window is None else sliding_window(window)
            found.append((len(list(group)), mask))
        return tuple(found)

    def kv_bytes(self, dtype: Any) -> int:
        """Bytes of cache that one token takes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * jnp.dtype(dtype).itemsize

    @property
    def size(self) -> int:
        """Numbers in all parameters."""
        return sum(map(math.prod, jax.tree.leaves(self.shapes(), is_leaf=is_shape)))

    def shapes(self) -> Params:
        """The shape of every parameter, in the tree that the parameters form."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        one: dict[str, tuple[int, ...]] = {
            "attn_norm": (self.hidden,),
            "qkv": (qkv, self.hidden),
            "out": (self.hidden, self.heads * self.head_dim),
            "mlp_norm": (self.hidden,),
            "gate_up": (2 * self.mlp, self.hidden),
            "down": (self.hidden, self.mlp),
        }
        if self.qkv_bias:
            one["qkv_bias"] = (qkv,)
        if self.qk_norm:
            one |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
        params: Params = {"embed": (self.vocab, self.hidden), "norm": (self.hidden,)}
        if not self.tied:
            params["head"] = (self.vocab, self.hidden)
        params["runs"] = tuple(
            {name: (count, *shape) for name, shape in one.items()} for count, _ in self.runs
        )
        return params


def random_params(
    config: Config, seed: int, dtype: Any, place: Callable[[str, Array], Array] | None = None
) -> Params:
    """Random weights: what training starts from, and what throughput is measured with. Those of
    layers are made one after the other, so that little more is held than what is made. `place`:
    what becomes of a layer's, by name, on a mesh.
    """
    shapes = config.shapes()
    leaves, tree = jax.tree.flatten_with_path(shapes, is_leaf=is_shape)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    made = []
    for (path, shape), key in zip(leaves, keys, strict=True):
        name = path[-1].key
        if name.endswith("norm"):
            made.append(jnp.ones(shape, dtype))
        elif name == "qkv_bias":
            made.append(jnp.zeros(shape, dtype))
        else:  # what adds to the residual stream is small where there are many to add
            spread = 0.02 / math.sqrt(2 * config.layers) if name in ("out", "down") else 0.02
            finish = None if place is None else functools.partial(place, name)
            made.append(_normal(key, spread, shape, jnp.dtype(dtype).name, finish))
    return jax.tree.unflatten(tree, made)


@jax.jit(static_argnums=(2, 3, 4))
def _normal(
    key: Array, spread: float, shape: tuple[int, ...], dtype: str, finish: Any = None
) -> Array:
    def one(key: Array, shape: tuple[int, ...]) -> Array:
        return jax.random.normal(key, shape, dtype) * jnp.asarray(spread, dtype)

    if len(shape) < 3:  # of no layer
        return one(key, shape)

    def layer(key: Array) -> Array:
        x = one(key, shape[1:])
        return x if finish is None else finish(x)

    return jax.lax.map(layer, jax.random.split(key, shape[0]))


def is_shape(x: Any) -> bool:
    return isinstance(x, tuple) and all(isinstance(n, int) for n in x)


def num_bytes(params: Params) -> int:
    """Bytes of all parameters."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))


# ---- one layer ----------------------------------------------------------------------------------


def qkv_of(config: Config, weights: Params, x: Array, angles: Angles | None) -> tuple[Array, ...]:
    """q [M, t, N, H], k and v [M, t, K, H] of x; with angles q and k are normalised and rotated
    here, without them by append and attention.
    """
    sizes = (config.heads, config.kv_heads, config.kv_heads)
    if angles is not None and _kernel_rotates(config, isinstance(weights["qkv"], Layer)):
        return lm_rows.heads(partials(x, weights["qkv"], jnp.float32), angles, sizes[:2], x.dtype)
    rows = linear(x, weights["qkv"])
    if config.qkv_bias:
        rows += weights["qkv_bias"][None, None]
    rows = rows.reshape(*x.shape[:2], sum(sizes), config.head_dim)
    q, k, v = jnp.split(rows, np.cumsum(sizes)[:2], axis=2)
    if angles is None:
        return q, k, v
    if config.qk_norm:
        q = rms_norm(q, weights["q_norm"], config.norm_eps)
        k = rms_norm(k, weights["k_norm"], config.norm_eps)
    return rotate(q, angles), rotate(k, angles), v


def _kernel_rotates(config: Config, stream: bool) -> bool:
    """Whether a kernel rotates q and k on their way out of the matmul that makes them."""
    return stream and not (config.qkv_bias or config.qk_norm)


class Heads(NamedTuple):
    """What one layer hands to its attention."""

    q: Array  # [M, t, N, H]
    k: Array  # [M, t, K, H]
    v: Array
    weights: Params  # of the layer
    mask: Mask
    layer: Array  # its number


class _Pass(NamedTuple):
    """What the four ways to run a model differ in."""

    positions: Array | None  # int32[M, t]; None where append and attention rotate q and k
    attend: Callable[[Heads, Any], tuple[Array, Any]]  # (rows, cache) -> (out, cache)
    stream: bool = False  # matrices are read where they lie, in the stack of all layers


def _layers(config: Config, params: Params, tokens: Array, how: _Pass, cache: Any = None):
    """Rows [M, t, D] for the head: after all layers and the last norm; and the cache that `attend`
    passed from layer to layer.
    """
    x = embedded(config, params["embed"], tokens)
    eps, first, angles = config.norm_eps, 0, None
    if how.positions is not None:
        angles = config.rope.angles(how.positions[:, :, None], config.head_dim)
    if how.stream:  # else XLA's kernel of the angles stands between ours, and those wait for it
        x, angles = lax.optimization_barrier((x, angles))
    exchange = None
    if config.over is not None and how.stream:
        exchange = lm_rows.exchange_over(config.over, x, params["norm"])
    added = _nothing(config, params["runs"][0]["down"], x, how.stream, exchange)
    for weights, (count, mask) in zip(params["runs"], config.runs, strict=True):
        stacks = {name: weights[name] for name in STREAMED if how.stream}
        sliced = {name: x for name, x in weights.items() if name not in stacks}

        def layer(carry, item, mask=mask, stacks=stacks, first=first):
            # What a matmul leaves to be added waits for the norm that follows, which adds it.
            (x, added, cache, number), weights = carry, dict(item)
            weights |= {name: Layer(stack, number - first) for name, stack in stacks.items()}
            x, normed, exchange = add_norm(x, added, weights["attn_norm"], eps)
            q, k, v = qkv_of(config, weights, normed, angles)
            out, cache = how.attend(Heads(q, k, v, weights, mask, number), cache)
            added = _added(config, out.reshape(*x.shape[:2], -1), weights["out"], exchange)
            x, normed, exchange = add_norm(x, added, weights["mlp_norm"], eps)
            added = _added(config, gated(normed, weights["gate_up"]), weights["down"], exchange)
            return (x, added, cache, number + 1), None

        carry = (x, added, cache, jnp.asarray(first, jnp.int32))
        unroll = count if how.stream else 1  # XLA's kernel that counts layers would hold up ours
        (x, added, cache, _), _ = lax.scan(layer, carry, sliced, count, unroll=unroll)
        first += count
    norm = params["norm"]
    return add_norm(x, added, Layer(norm[None], 0) if how.stream else norm, eps)[1], cache


def embedded(config: Config, embed: Array, tokens: Array) -> Array:
    """Rows [..., D] of an embedding; on a mesh each device has some of them, the others are zeros
    there, and the sum is exact.
    """
    if config.over is None:
        return jnp.take(embed, tokens, axis=0, mode="clip")
    count = embed.shape[0]
    at = jnp.clip(tokens, 0, config.vocab - 1) - lax.axis_index(config.over) * count
    own = (at >= 0) & (at < count)
    found = jnp.take(embed, at, axis=0, mode="clip")
    return lax.psum(jnp.where(own[..., None], found, 0), config.over)


def _added(
    config: Config, x: Array, weight: Array | Layer, exchange: Exchange | None = None
) -> Added:
    """The partial sums of a matmul, to be added; on a mesh without an exchange the sum over
    devices, in float32, of what each has, rounded: as an exchange adds it up.
    """
    if config.over is None:
        return Added(partials(x, weight))
    added = partials(x, weight, jnp.float32)
    if exchange is not None:
        return Added(added, exchange)
    rounded = total(added, x.dtype).astype(jnp.float32)
    return Added(lax.psum(rounded, config.over)[None])


def _nothing(
    config: Config, down: Array, x: Array, stream: bool, exchange: Exchange | None
) -> Added:
    """Zeros of the shape of what a layer's last matmul leaves to be added to x."""
    inner = jax.ShapeDtypeStruct((*x.shape[:2], down.shape[2]), x.dtype)
    weight = Layer(down, 0) if stream else down[0]
    left = jax.eval_shape(lambda rows: _added(config, rows, weight, exchange).partials, inner)
    like = x if exchange is None else exchange.device
    return Added(lm_rows.varying_like(jnp.zeros(left.shape, left.dtype), like), exchange)


def logits_of(
    config: Config, params: Params, x: Array, stream: bool = False, whole: bool = True
) -> Array:
    """float32[..., vocab] of normed rows [..., D]. `whole`: also on a mesh; else of each device's
    part of the words, where -inf stands for those that there are not.
    """
    head = params["embed" if config.tied else "head"]
    logits = linear(x, Layer(head[None], 0) if stream else head, jnp.float32)
    if config.over is None:
        return logits
    if not whole:
        words = lax.axis_index(config.over) * logits.shape[-1] + jnp.arange(logits.shape[-1])
        return jnp.where(words < config.vocab, logits, -jnp.inf)
    axis = logits.ndim - 1
    every = lax.all_gather(logits, config.over, axis=axis, tiled=True, to="invarying")
    return every[..., : config.vocab]  # rows that fill up the last device are no tokens


# ---- the four ways to run it --------------------------------------------------------------------


def forward(
    config: Config,
    params: Params,
    tokens: Array,
    *,
    implementation: str | None = None,
    context: Context | None = None,
) -> Array:
    """Logits float32[M, t, vocab] of tokens int32[M, t], without a cache. Differentiable. With a
    context, of this device's rows of longer sequences.
    """

    def attend(of, cache):
        how: dict[str, Any] = {"implementation": implementation, "context": context}
        return flash_attention(of.q, of.k, of.v, mask=of.mask, **how), cache

    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    if context is not None:
        positions = context.positions(tokens.shape[1])[None]
    x, _ = _layers(config, params, tokens, _Pass(positions, attend))
    return logits_of(config, params, x)


class Prompts(NamedTuple):
    """n prompts on their way into a cache of M sequences."""

    tokens: Array  # int32[n, t], padded with anything
    lengths: Array  # int32[n]
    slots: Array  # int32[n]: the sequence that each fills; M for a row that is no prompt


def prefill(
    config: Config, params: Params, cache: Any, prompts: Prompts, implementation: str | None = None
) -> tuple[Array, Any]:
    """Prompts into the empty sequences of a cache: logits float32[n, vocab] after each, the cache.

    The sequences that get no prompt take no rows.
    """
    sequences, (n, t) = cache.num_sequences, prompts.tokens.shape
    rows = jnp.zeros(sequences, jnp.int32).at[prompts.slots].set(prompts.lengths, mode="drop")
    # Which prompt a sequence gets; those that get none take no rows of the one named here.
    source = jnp.zeros(sequences, jnp.int32).at[prompts.slots].set(jnp.arange(n), mode="drop")

    def attend(of, cache):
        out = flash_attention(
            of.q,
            of.k,
            of.v,
            mask=of.mask,
            q_lengths=prompts.lengths,
            kv_lengths=prompts.lengths,
            implementation=implementation,
        )
        k, v = (jnp.take(x, source, axis=0) for x in (of.k, of.v))
        return out, write_kv(cache, k, v, layer=of.layer, implementation=implementation)

    positions = jnp.arange(t, dtype=jnp.int32)[None]
    how = _Pass(positions, attend)
    x, cache = _layers(config, params, prompts.tokens, how, cache.extend(rows))
    last = jnp.maximum(prompts.lengths - 1, 0)[:, None, None]
    return logits_of(config, params, jnp.take_along_axis(x, last, axis=1)[:, 0]), cache


def decode(  # noqa: PLR0913
    config: Config,
    params: Params,
    cache: Any,
    tokens: Array,
    rows: Array,
    rotary: Rotary,
    implementation: str | None = None,
    *,
    levels: int = 0,
    whole: bool = True,
) -> tuple[Array, Any]:
    """Tokens int32[M, t] into the sequences whose `rows` int32[M] is t, not 0: logits
    float32[M, t, vocab] after each (`whole`: see `logits_of`), the cache.

    `levels`: how often sequences part that share pages of a PagedCache, which are then read once
    for all of them; 0: each reads all that it has.
    """
    cache = cache.extend(rows)
    count = tokens.shape[1]
    within = jnp.arange(count, dtype=jnp.int32)[None]
    positions = jnp.maximum(cache.lengths[:, None] - count + within, 0)
    shared = cache.shared_prefixes(tokens=count, levels=levels) if levels else None
    how = _over_cache(config, params, _Place(positions, rotary, shared=shared), implementation)
    x, cache = _layers(config, params, tokens, how, cache)
    return logits_of(config, params, x, how.stream, whole), cache


def mixed(
    config: Config,
    params: Params,
    cache: Any,
    tokens: Array,
    starts: Array,
    after: Array,
    rotary: Rotary,
    implementation: str | None = None,
) -> tuple[Array, Any]:
    """Packed tokens int32[R]: sequence i of the cache takes those from starts[i] to starts[i + 1],
    chunks of prompts, a token and its drafts, or none. Logits float32[..., vocab] after the tokens
    of the numbers `after` int32[...] (of one that there is not: anything), the cache.
    """
    cache = cache.extend(jnp.diff(starts))
    owners = owners_of(starts, tokens.shape[0])
    place = jnp.arange(tokens.shape[0], dtype=jnp.int32) - starts[owners + 1]
    positions = jnp.maximum(cache.lengths[owners] + place, 0)[None]
    how = _over_cache(config, params, _Place(positions, rotary, starts), implementation)
    x, cache = _layers(config, params, tokens[None], how, cache)
    wanted = jnp.take(x[0], after, axis=0, mode="clip")
    return logits_of(config, params, wanted, how.stream), cache


def owners_of(starts: Array, rows: int) -> Array:
    """int32[rows]: the sequence that owns each packed row; of rows past the end, the last."""
    row = jnp.arange(rows, dtype=jnp.int32)
    found = jnp.searchsorted(starts, row, side="right").astype(jnp.int32) - 1
    return jnp.clip(found, 0, starts.shape[0] - 2)


def rotary_of(config: Config, cache: Any) -> Rotary:
    """Tables for all rows that a sequence of the cache can hold."""
    every = jnp.arange(max(cache.capacities), dtype=jnp.int32)
    return Rotary(*config.rope.angles(every, config.head_dim))


class _Place(NamedTuple):
    """Where new rows stand in a cache."""

    positions: Array  # int32[M, t]; packed int32[1, R]
    rotary: Rotary
    starts: Array | None = None  # of packed rows
    shared: SharedPrefixes | None = None  # pages that are read once for several sequences


def _over_cache(config: Config, params: Params, place: _Place, implementation: str | None) -> _Pass:
    """Rows are written to the cache, and attend to all that it holds.

    Where no kernel in front of them rotates q and k, K is normalised and rotated by the launch that
    writes it, and q before it is used.
    """
    positions, starts = place.positions, place.starts
    stream = lm_rows.streams(positions.size, params["embed"].dtype, implementation)
    launches = lm_rows.overlapping if stream else contextlib.nullcontext
    rotated = _kernel_rotates(config, stream)
    rotary = None if rotated else place.rotary

    def norm(weights: Params, name: str) -> RMSNorm | None:
        normed = config.qk_norm and not rotated
        return RMSNorm(weights[name], config.norm_eps) if normed else None

    def attend(of: Heads, cache: Any) -> tuple[Array, Any]:
        q, k, v = (x if starts is None else x[0] for x in of[:3])
        how: dict[str, Any] = {"starts": starts, "rotary": rotary, "layer": of.layer}
        how["implementation"] = implementation
        with launches():
            cache = write_kv(cache, k, v, norm=norm(of.weights, "k_norm"), **how)
            how |= {"mask": of.mask, "norm": norm(of.weights, "q_norm")}
            how["shared_prefixes"] = place.shared
            out = decode_attention(q, cache, **how)
        return out if starts is None else out[None], cache

    return _Pass(positions if rotated else None, attend, stream)
