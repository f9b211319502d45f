"""What a kernel does under `jax.vmap` and under `jax.jit` with sharded inputs, in one place.

`vmap` folds the mapped axis into one that the kernel has already, so that one launch still serves
everything and the schedule stays what was tuned: into the batch in general; into the query heads of
a group where only q is mapped, so that keys and values are neither copied nor read twice.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from pallas_attn import _sharding
from pallas_attn._problem import AttentionInputs, AttentionProblem

Array = jax.Array


def attention(kernel: Any, problem: AttentionProblem, inputs: AttentionInputs):
    """`kernel.run(inputs, problem)` -> (out, lse), for any batching and sharding of the inputs."""

    given = [name for name, x in zip(inputs._fields, inputs, strict=True) if x is not None]

    def named(arrays: tuple[Array, ...]) -> AttentionInputs:
        return AttentionInputs(**dict(zip(given, arrays, strict=True)))

    @custom_vmap
    def call(*arrays: Array):
        return _attention_over_devices(kernel, problem, named(arrays))

    @call.def_vmap
    def rule(axis_size: int, batched: list[bool], *arrays: Array):
        mapped = [name for name, is_mapped in zip(given, batched, strict=True) if is_mapped]
        if mapped == ["q"] and problem.bias_shape is None and problem.mask_shape is None:
            results = _fold_into_heads(kernel, problem, named(arrays), axis_size)
        elif "sinks" in mapped:  # a sink a head is all that the kernels know
            results = _one_by_one(kernel, problem, named(arrays), mapped)
        else:
            results = _fold_into_batch(kernel, problem, named(arrays), mapped, axis_size)
        return results, (True, True)

    return call(*(getattr(inputs, name) for name in given))


def resized(problem: AttentionProblem, inputs: AttentionInputs) -> AttentionProblem:
    """The same problem at the sizes of `inputs`."""
    return dataclasses.replace(
        problem,
        batch=inputs.q.shape[0],
        q_heads=inputs.q.shape[2],
        kv_heads=inputs.k.shape[2],
        bias_shape=None if inputs.bias is None else inputs.bias.shape,
        mask_shape=None if inputs.mask_array is None else inputs.mask_array.shape,
    )


def _fold_into_heads(kernel, problem, inputs, size: int):
    batch, q_len, kv_heads = problem.batch, problem.q_len, problem.kv_heads
    q = inputs.q.reshape(size, batch, q_len, kv_heads, problem.group, problem.head_dim)
    q = jnp.moveaxis(q, 0, 3).reshape(batch, q_len, size * problem.q_heads, problem.head_dim)
    sinks = inputs.sinks
    if sinks is not None:
        grouped = sinks.reshape(kv_heads, 1, problem.group)
        sinks = jnp.broadcast_to(grouped, (kv_heads, size, problem.group)).reshape(-1)
    folded = inputs._replace(q=q, sinks=sinks)
    out, lse = attention(kernel, resized(problem, folded), folded)
    out = out.reshape(batch, q_len, kv_heads, size, problem.group, problem.v_head_dim)
    lse = lse.reshape(batch, kv_heads, size, problem.group, q_len)
    return (
        jnp.moveaxis(out, 3, 0).reshape(size, batch, q_len, problem.q_heads, -1),
        jnp.moveaxis(lse, 2, 0).reshape(size, batch, problem.q_heads, q_len),
    )


def _fold_into_batch(kernel, problem, inputs, mapped, size: int):
    batch = problem.batch

    def fold(name: str, x: Array | None):
        if x is None or name == "sinks":
            return x
        if name in mapped:
            rest = x.shape[2:]
            if x.shape[1] != batch:  # a broadcast batch axis of a bias or mask
                x = jnp.broadcast_to(x, (size, batch, *rest))
        elif x.shape[0] == 1 and name in ("bias", "mask_array"):
            return x
        else:
            rest = x.shape[1:]
            x = jnp.broadcast_to(x[None], (size, batch, *rest))
        return x.reshape(size * batch, *rest)

    fields = zip(AttentionInputs._fields, inputs, strict=True)
    folded = AttentionInputs(*(fold(name, x) for name, x in fields))
    results = attention(kernel, resized(problem, folded), folded)
    return tuple(x.reshape(size, batch, *x.shape[1:]) for x in results)


def _one_by_one(kernel, problem, inputs, mapped):
    def one(fields: dict[str, Array]):
        return attention(kernel, problem, inputs._replace(**fields))

    return jax.lax.map(one, {name: getattr(inputs, name) for name in mapped})


def _attention_over_devices(kernel, problem: AttentionProblem, inputs: AttentionInputs):
    given = [name for name in AttentionInputs._fields if getattr(inputs, name) is not None]
    heads = {"q": "k" if problem.group == 1 else "k g", "kv": "k"}
    if problem.kv_heads == 1:
        heads["q"] = "g"  # every query head reads the one kv head: they split freely
    score_axes = ("b", heads["q"], "t", "s")

    def broadcast_axes(name: str) -> tuple[str, ...]:
        shape = getattr(inputs, name).shape
        named = zip(shape, score_axes, range(4), strict=True)
        return tuple(f"{name[0]}one{i}" if size == 1 else axis for size, axis, i in named)

    axes = {
        "q": ("b", "t", heads["q"], "h"),
        "k": ("b", "s", "k", "h"),
        "v": ("b", "s", "k", "e"),
        "q_segment_ids": ("b", "t"),
        "kv_segment_ids": ("b", "s"),
        "sinks": (heads["q"],),
        **dict.fromkeys(("q_offset", "q_lengths", "kv_lengths"), ("b",)),
        **{name: broadcast_axes(name) for name in ("bias", "mask_array") if name in given},
    }

    def run(*arrays: Array):
        local = AttentionInputs(**dict(zip(given, arrays, strict=True)))
        return kernel.run(local, resized(problem, local))

    return _sharding.over_devices(
        run,
        [getattr(inputs, name) for name in given],
        [axes[name] for name in given],
        [("b", "t", heads["q"], "e"), ("b", heads["q"], "t")],
        free=("b", "k", "g") if problem.kv_heads == 1 else ("b", "k"),
    )
