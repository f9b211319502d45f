"""The same step as people write it today: dense caches, `dynamic_update_slice`, cuDNN's attention.

It is written to be fast, not to lose: a cache a layer, so that nothing is sliced out of a stack,
layers unrolled, and this model's own fused matmuls. Sequences have lengths of their own, as in any
batch that is served. Models with windows it does not serve: cuDNN's are counted from row 0.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn.lm import model
from pallas_attn.lm.decode import Options
from pallas_attn.lm.model import Config, Params
from pallas_attn.lm.rows import gated, linear, rms_norm

Array = jax.Array
COMPILER = {"xla_gpu_enable_triton_gemm": False}  # as ours; and CUDA graphs, which help this one
Caches = tuple[tuple[Array, Array], ...]  # K and V [M, capacity, K, H] of each layer


def create(config: Config, options: Options, seed: int) -> Caches:
    """Caches full of random numbers."""
    shape = (options.slots, options.capacity, config.kv_heads, config.head_dim)
    keys = jax.random.split(jax.random.key(seed), (config.layers, 2))
    return tuple(
        (_normal(shape, options.dtype, k), _normal(shape, options.dtype, v)) for k, v in keys
    )


@jax.jit(static_argnums=(0, 1))
def _normal(shape: tuple[int, ...], dtype: str, key: Array) -> Array:
    return jax.random.normal(key, shape, dtype)


def steps(
    config: Config,
    options: Options,
    implementation: Any,
    params: Params,
    carry: tuple[Caches, Array, Array],
) -> tuple[tuple[Caches, Array, Array], Array]:
    """A chunk of greedy steps: (caches, lengths int32[M], tokens int32[M]) on, and its tokens."""

    def one(carry, _):
        caches, lengths, tokens = carry
        logits, caches = _decode(config, implementation, params, caches, lengths, tokens)
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return (caches, lengths + 1, tokens), tokens

    return lax.scan(one, carry, None, options.chunk)


def _decode(
    config: Config, implementation: Any, params: Params, caches: Any, lengths: Any, tokens: Any
) -> tuple[Array, Caches]:
    x = jnp.take(params["embed"], tokens[:, None], axis=0, mode="clip")
    angles = config.rope.angles(lengths[:, None, None], config.head_dim)
    layers = [
        jax.tree.map(lambda weight, n=n: weight[n], run)
        for run, (count, _) in zip(params["runs"], config.runs, strict=True)
        for n in range(count)
    ]
    put = jax.vmap(lambda cache, row, at: lax.dynamic_update_slice(cache, row, (at, 0, 0)))
    new = []
    for weights, (k_cache, v_cache) in zip(layers, caches, strict=True):
        h = rms_norm(x, weights["attn_norm"], config.norm_eps)
        q, k, v = model.qkv_of(config, weights, h, angles)
        k_cache, v_cache = put(k_cache, k, lengths), put(v_cache, v, lengths)
        out = jax.nn.dot_product_attention(
            q,
            k_cache,
            v_cache,
            key_value_seq_lengths=lengths + 1,
            implementation=implementation,
        )
        x += linear(out.reshape(*x.shape[:2], -1), weights["out"])
        h = rms_norm(x, weights["mlp_norm"], config.norm_eps)
        x += linear(gated(h, weights["gate_up"]), weights["down"])
        new.append((k_cache, v_cache))
    x = rms_norm(x, params["norm"], config.norm_eps)
    return model.logits_of(config, params, x[:, 0]), tuple(new)
