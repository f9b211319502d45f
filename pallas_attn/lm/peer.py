"""The same step as people write it today: dense caches, `dynamic_update_slice`, cuDNN's attention.

It is written to be fast, not to lose: a cache a layer, so that nothing is sliced out of a stack,
layers unrolled, and this model's own fused matmuls. Sequences have lengths of their own, as in any
batch that is served. Models with windows it does not serve: cuDNN's are counted from row 0. On a
mesh heads, columns and vocabulary are split as ours are; devices add up in the model's dtype.
"""

import functools
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_attn.lm import mesh as lm_mesh
from pallas_attn.lm import model
from pallas_attn.lm.model import Config, Params
from pallas_attn.lm.options import Options
from pallas_attn.lm.rows import gated, linear, rms_norm
from pallas_attn.lm.sampling import likeliest

Array = jax.Array
COMPILER = {"xla_gpu_enable_triton_gemm": False}  # as ours; and CUDA graphs, which help this one
Caches = tuple[tuple[Array, Array], ...]  # K and V [M, capacity, K, H] of each layer


def create(config: Config, options: Options, seed: int) -> Caches:
    """Caches full of random numbers."""
    shape = (options.slots, options.capacity, config.kv_heads, config.head_dim)
    where = None
    if options.mesh is not None:
        where = NamedSharding(options.mesh, lm_mesh.spec_of_heads(len(shape)))
    seeds = np.arange(2 * config.layers, dtype=np.uint32).reshape(-1, 2) + np.uint32(seed)
    return tuple(
        (_normal(shape, options.dtype, where, k), _normal(shape, options.dtype, where, v))
        for k, v in seeds
    )


@jax.jit(static_argnums=(0, 1, 2))
def _normal(shape: tuple[int, ...], dtype: str, where: NamedSharding | None, seed: Array) -> Array:
    drawn = jax.random.normal(jax.random.key(seed), shape, dtype)
    return drawn if where is None else lax.with_sharding_constraint(drawn, where)


def steps(
    config: Config, options: Options, implementation: Any, params: Params, carry: Any
) -> tuple[tuple[Caches, Array, Array], Array]:
    """`_steps`, on a mesh on each device with its own heads."""
    if options.mesh is None:
        return _steps(config, options, implementation, params, carry)
    caches = jax.tree.map(lambda x: lm_mesh.spec_of_heads(x.ndim), carry[0])
    state = (caches, P(), P())
    local = lm_mesh.local(config, options.mesh)
    return jax.shard_map(
        functools.partial(_steps, local, options, implementation),
        mesh=options.mesh,
        in_specs=(lm_mesh.specs(config, options.mesh), state),
        out_specs=(state, P()),
        check_vma=False,  # cuDNN's results do not say how they vary
    )(params, carry)


def _steps(
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
        tokens = likeliest(logits, config.over)[0]
        return (caches, lengths + 1, tokens), tokens

    return lax.scan(one, carry, None, options.chunk)


def _decode(
    config: Config, implementation: Any, params: Params, caches: Any, lengths: Any, tokens: Any
) -> tuple[Array, Caches]:
    x = model.embedded(config, params["embed"], tokens[:, None])
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
        x += _summed(config, linear(out.reshape(*x.shape[:2], -1), weights["out"]))
        h = rms_norm(x, weights["mlp_norm"], config.norm_eps)
        x += _summed(config, linear(gated(h, weights["gate_up"]), weights["down"]))
        new.append((k_cache, v_cache))
    x = rms_norm(x, params["norm"], config.norm_eps)
    return model.logits_of(config, params, x[:, 0], whole=False), tuple(new)


def _summed(config: Config, x: Array) -> Array:
    """Of what each device of a mesh has of the columns."""
    return x if config.over is None else lax.psum(x, config.over)
