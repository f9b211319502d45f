"""The same step without this package: dense caches, `dynamic_update_slice`, cuDNN's attention.

It is written to be as fast as it can be: a cache a layer, so that nothing is sliced out of a stack,
layers unrolled, and this model's own fused matmuls. Sequences have lengths of their own, as in any
batch that is served. It serves no model with windows: cuDNN's are counted from row 0. On a mesh
heads, columns and vocabulary are split as ours are; devices add up in the model's dtype.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_lm import mesh as lm_mesh
from pallas_lm import model
from pallas_lm.config import Config, Params
from pallas_lm.options import Options
from pallas_lm.rows import gated, linear, rms_norm

Array = jax.Array
Name = Literal["cudnn", "xla"]
COMPILER = {"xla_gpu_enable_triton_gemm": False}  # CUDA graphs, which ours goes without, help here
_HEADS = P(None, None, lm_mesh.HEADS)  # the split of a cache
Caches = tuple[tuple[Array, Array], ...]  # K and V [M, capacity, K, H] of each layer
Carry = tuple[Caches, Array, Array]  # caches, lengths int32[M], tokens int32[M]


def create(config: Config, options: Options, seed: int) -> Caches:
    """Caches full of random numbers."""
    shape = (options.batch, options.capacity, config.kv_heads, config.head_dim)
    place = None
    if options.mesh is not None:
        place = NamedSharding(options.mesh, _HEADS)
    seeds = np.arange(2 * config.layers, dtype=np.uint32).reshape(-1, 2) + np.uint32(seed)
    normal = functools.partial(_normal, shape, options.dtype, place)
    return tuple((normal(k), normal(v)) for k, v in seeds)


@jax.jit(static_argnums=(0, 1, 2))
def _normal(shape: tuple[int, ...], dtype: str, place: NamedSharding | None, seed: Array) -> Array:
    drawn = jax.random.normal(jax.random.key(seed), shape, dtype)
    return drawn if place is None else lax.with_sharding_constraint(drawn, place)


def steps(
    config: Config,
    options: Options,
    implementation: Name,
    params: Params,
    carry: Carry,
) -> tuple[Carry, Array]:
    """A chunk of greedy steps and its tokens; on a mesh each device has its own heads."""
    if options.mesh is None:
        return _steps(config, implementation, options.chunk, params, carry)
    state = (_HEADS, P(), P())
    local = lm_mesh.local(config, options.mesh)
    return jax.shard_map(
        functools.partial(_steps, local, implementation, options.chunk),
        mesh=options.mesh,
        in_specs=(lm_mesh.specs(config, options.mesh), state),
        out_specs=(state, P()),
        check_vma=False,  # cuDNN's results do not say how they vary
    )(params, carry)


def _steps(
    config: Config, implementation: Name, count: int, params: Params, carry: Carry
) -> tuple[Carry, Array]:
    def step(carry: Carry, _: None) -> tuple[Carry, Array]:
        caches, lengths, tokens = carry
        logits, caches = _decode(config, implementation, params, carry)
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return (caches, lengths + 1, tokens), tokens

    return lax.scan(step, carry, None, count)


def _decode(
    config: Config, implementation: Name, params: Params, carry: Carry
) -> tuple[Array, Caches]:
    caches, lengths, tokens = carry
    x = model.embedded(config, params["embed"], tokens[:, None])
    angles = config.rope.angles(lengths[:, None, None], config.head_dim)
    layers = [
        jax.tree.map(lambda weight, n=n: weight[n], run)
        for run, (count, _) in zip(params["runs"], config.runs, strict=True)
        for n in range(count)
    ]
    put = jax.vmap(lambda cache, row, at: lax.dynamic_update_slice(cache, row, (at, 0, 0)))
    attend = functools.partial(
        jax.nn.dot_product_attention,
        key_value_seq_lengths=lengths + 1,
        implementation=implementation,
    )
    new = []
    for weights, (k_cache, v_cache) in zip(layers, caches, strict=True):
        h = rms_norm(x, weights["attn_norm"], config.norm_eps)
        q, k, v = model.qkv_of(config, weights, h, angles)
        k_cache, v_cache = put(k_cache, k, lengths), put(v_cache, v, lengths)
        out = attend(q, k_cache, v_cache).reshape(*x.shape[:2], -1)
        x += _summed(config, linear(out, weights["out"]))
        h = rms_norm(x, weights["mlp_norm"], config.norm_eps)
        x += _summed(config, linear(gated(h, weights["gate_up"]), weights["down"]))
        new.append((k_cache, v_cache))
    x = rms_norm(x, params["norm"], config.norm_eps)
    return model.logits_of(config, params, x[:, 0]), tuple(new)


def _summed(config: Config, x: Array) -> Array:
    """The sum over the devices of a mesh, each of which has some of the columns."""
    return x if config.over is None else lax.psum(x, config.over)
