"""Operations of the demo's model on rows, from one attention to the next.

By default these are XLA's matmuls and jax.numpy. The few rows of a decoding step on Hopper have
kernels: each weight is a `Layer`, read where it lies in the stack of all layers, as fast as memory
gives it. A kernel begins while the one before it ends (programmatic dependent launch): a matmul
fills its ring with the weight before there is an x. Even the small work between two matmuls is a
kernel, since behind a kernel of XLA's the next matmul would have to wait.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_attn import devices

if TYPE_CHECKING:  # kernels are imported where a program needs them
    from pallas_lm.kernels.linear import Problem

Array = jax.Array
FEW = 64  # rows that kernels serve


class Layer(NamedTuple):
    """One weight of a stack [layers, ...], not taken out of it.

    It is read before the kernel in front is done. It and its number must be there before the
    program starts, or be made by kernels of XLA's, which are done when another begins.
    """

    stack: Array
    number: Array | int


class Angles(NamedTuple):
    """cos and sin of every row's position, [M, t, 1, H / 2] in float32."""

    cos: Array
    sin: Array


def streams(rows: int, dtype: DTypeLike, implementation: str | None) -> bool:
    """Whether the kernels serve so many rows of weights of this dtype, on this machine."""
    here = implementation in (None, "sm90") and devices.gpu_generation() == "sm90"
    return here and rows <= FEW and jnp.dtype(dtype).name in ("bfloat16", "float16")


# ---- matmuls ------------------------------------------------------------------------------------


def linear(x: Array, weight: Array | Layer, dtype: DTypeLike | None = None) -> Array:
    """x [..., in] by a weight [out, in]: [..., out] in `dtype`, or x's."""
    dtype = jnp.dtype(dtype or x.dtype)
    if isinstance(weight, Layer):
        return total(partials(x, weight, dtype), dtype)
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, weight, dims, preferred_element_type=dtype)


def partials(x: Array, weight: Array | Layer, dtype: DTypeLike | None = None) -> Array:
    """The partial sums of `linear`, to be added up, [n, ..., out]; more than one are float32."""
    dtype = jnp.dtype(dtype or x.dtype)
    if not isinstance(weight, Layer):
        return linear(x, weight, dtype)[None]
    (out,) = devices.over_devices(
        functools.partial(_partials, dtype.name, _splits(x, weight)),
        _operands(x, weight),
        devices.Split(
            inputs=(("m", "d"), ("l", "o", "d"), ("n",)),
            outputs=(("s", "m", "o"),),
            free=("o", "d"),
            sums=(("d",),),
        ),
    )
    return out.reshape(out.shape[0], *x.shape[:-1], -1)


def total(added: Array, dtype: DTypeLike) -> Array:
    """The sum of partial sums."""
    return added[0].astype(dtype) if len(added) == 1 else added.sum(axis=0).astype(dtype)


def gated(
    x: Array, weight: Array | Layer, gate_of: Callable[[Array], Array] = jax.nn.silu
) -> Array:
    """The gated product [..., out]: gate_of(x by the first half of a weight [2 out, in]) times x by
    the second half. The kernel for a `Layer` has silu as its gate.
    """
    if isinstance(weight, Layer) and _takes(_gated_problem(x, weight.stack), weight.stack):
        (out,) = devices.over_devices(
            _gated,
            _operands(x, weight),
            devices.Split(
                inputs=(("m", "d"), ("l", "g", "d"), ("n",)),
                outputs=(("m", "o"),),
                free=(),
            ),
        )
        return out.reshape(*x.shape[:-1], -1)
    gate, up = jnp.split(linear(x, weight), 2, axis=-1)
    return gate_of(gate) * up


def _kernel():
    from pallas_lm.kernels import linear as kernel

    return kernel


def _operands(x: Array, weight: Layer) -> tuple[Array, Array, Array]:
    number = jnp.asarray(weight.number, jnp.int32).reshape(1)
    return x.reshape(-1, x.shape[-1]), weight.stack, number


def _problem(x: Array, stack: Array, dtype: str) -> "Problem":
    _, out, inner = stack.shape
    return _kernel().Problem(x.size // inner, out, inner, str(x.dtype), dtype)


def _gated_problem(x: Array, stack: Array) -> "Problem":
    problem = _problem(x, stack, str(x.dtype))
    return dataclasses.replace(problem, out=problem.out // 2, gated=True)


def _takes(problem: "Problem", stack: Array) -> bool:
    return _kernel().takes(problem) and str(stack.dtype) == problem.dtype


def _splits(x: Array, weight: Layer) -> int:
    """Parts of the result: as many on every device, whatever its share of the weight."""
    problem = _problem(x, weight.stack, "float32")
    return _kernel().Config.default(problem).splits if _takes(problem, weight.stack) else 1


def _partials(dtype: str, splits: int, x: Array, stack: Array, number: Array) -> tuple[Array]:
    problem = _problem(x, stack, dtype)
    if _takes(problem, stack):
        config = _kernel().Config.default(problem, splits)
        return (_kernel().run(x, stack, number, problem, config),)
    weight = lax.dynamic_index_in_dim(stack, number[0], keepdims=False)
    return (jnp.pad(linear(x, weight, dtype)[None], ((0, splits - 1), (0, 0), (0, 0))),)


def _gated(x: Array, stack: Array, number: Array) -> tuple[Array]:
    problem = _gated_problem(x, stack)
    config = _kernel().Config.default(problem)
    return (_kernel().run(x, stack, number, problem, config)[0],)


# ---- between matmuls ----------------------------------------------------------------------------


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """RMS norm of rows [..., D]."""
    wide = x.astype(jnp.float32)
    wide *= lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight.reshape((1,) * (x.ndim - 1) + weight.shape)


def add_norm(x: Array, added: Array, weight: Array | Layer, eps: float) -> tuple[Array, Array]:
    """(x [..., D] plus a matmul's partial sums `added` [n, ..., D], the norm of that)."""
    if not isinstance(weight, Layer):
        x += total(added, x.dtype)
        return x, rms_norm(x, weight, eps)
    rows, stack, number = _operands(x, weight)
    results = devices.over_devices(
        functools.partial(_add_norm, eps),
        (rows, added.reshape(-1, *rows.shape), stack, number),
        devices.Split(
            inputs=(("m", "d"), ("s", "m", "d"), ("l", "d"), ("n",)),
            outputs=(("m", "d"), ("m", "d")),
            free=(),
        ),
    )
    added_up, normed = (result.reshape(x.shape) for result in results)
    return added_up, normed


def _add_norm(eps: float, x: Array, added: Array, stack: Array, number: Array) -> tuple[Array, ...]:
    from pallas_lm.kernels import norm as kernel

    rows, dim = x.shape
    problem = kernel.Problem(rows, dim, added.shape[0], str(x.dtype), eps)
    if kernel.takes(problem) and stack.dtype == x.dtype:
        return kernel.run(x, added, stack, number, problem)
    weight = lax.dynamic_index_in_dim(stack, number[0], keepdims=False)
    return add_norm(x, added, weight, eps)


def rotate(x: Array, angles: Angles) -> Array:
    """Turns each pair (i, i + H / 2) of a head by its angle: checkpoints are laid out so."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (
        first * angles.cos - second * angles.sin,
        second * angles.cos + first * angles.sin,
    )
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
