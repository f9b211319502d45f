"""Rows by a weight [out, in]: XLA's matmul, and for the few rows of a decoding step on Hopper a
kernel that reads the weight as fast as memory gives it, out of the stack of all layers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn import _device, _sharding

Array = jax.Array

# Beyond, x takes as much of L2 as half the weight does, and XLA's matmul is as quick.
FEW = 32


class Layer(NamedTuple):
    """One weight of a stack [layers, out, in], not taken out of it."""

    stack: Array
    number: Array | int


def streams(rows: int, implementation: str | None) -> bool:
    """Whether so many rows are few enough for the kernel, on this machine."""
    return implementation in (None, "sm90") and _device.gpu_generation() == "sm90" and rows <= FEW


def linear(x: Array, weight: Array | Layer, dtype: Any = None) -> Array:
    """x [..., in] by a weight [out, in]: [..., out] in `dtype`, or x's."""
    dtype = jnp.dtype(dtype or x.dtype)
    if not isinstance(weight, Layer):
        dims = (((x.ndim - 1,), (1,)), ((), ()))
        return lax.dot_general(x, weight, dims, preferred_element_type=dtype)
    number = jnp.asarray(weight.number, jnp.int32).reshape(1)

    def run(x: Array, stack: Array, number: Array) -> tuple[Array]:
        return (_of_layer(x, stack, number, dtype.name),)

    rows = x.reshape(-1, x.shape[-1])
    (out,) = _sharding.over_devices(
        run,
        (rows, weight.stack, number),
        inputs=(("m", "d"), ("l", "o", "d"), ("n",)),
        outputs=(("m", "o"),),
        free=("o", "d"),
        sums=(("d",),),
    )
    return out.reshape(*x.shape[:-1], -1)


def _of_layer(x: Array, stack: Array, number: Array, dtype: str) -> Array:
    from pallas_attn.kernels import linear_sm90 as kernel

    problem = kernel.Problem(x.shape[0], stack.shape[1], stack.shape[2], str(x.dtype), dtype)
    if not kernel.takes(problem) or stack.dtype != x.dtype:
        weight = lax.dynamic_index_in_dim(stack, number[0], keepdims=False)
        return linear(x, weight, dtype)
    parts = kernel.run(x, stack, number, problem, kernel.Config.default(problem))
    return parts[0] if parts.shape[0] == 1 else parts.sum(axis=0).astype(dtype)
