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
from pallas_lm.exchange import Exchange

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


class Added(NamedTuple):
    """The result of a matmul, to be added to x [..., D]."""

    partials: Array  # [n, ..., D]
    exchange: Exchange | None = None  # set if other devices have partials too


def exchange_over(axis: str, x: Array, weight: Array) -> Exchange | None:
    """The exchange for rows like x [..., D] and norms like `weight`, within jax.shard_map; None
    where no kernel adds up over devices.
    """
    from pallas_lm.kernels import all_reduce
    from pallas_lm.kernels import norm as kernel

    dim = x.shape[-1]
    problem = kernel.Problem(x.size // dim, dim, 1, str(x.dtype), 0.0, lax.axis_size(axis))
    takes = kernel.takes(problem) and weight.dtype == x.dtype
    if not (takes and devices.reaches_peers(axis)):
        return None
    device = lax.axis_index(axis).astype(jnp.int32)[None]
    begin = functools.partial(all_reduce.begin, problem=problem.over_gpus)
    (received,) = devices.sealed(begin, x, device)
    return Exchange(devices.varying_like(received, device), device, jnp.zeros(1, jnp.int32))


def add_norm(
    x: Array, added: Added, weight: Array | Layer, eps: float
) -> tuple[Array, Array, Exchange | None]:
    """(x [..., D] plus `added`, the norm of that, the exchange for the next sum)."""
    partials, exchange = added
    if not isinstance(weight, Layer):
        x += total(partials, x.dtype)
        return x, rms_norm(x, weight, eps), None
    rows, stack, number = _operands(x, weight)
    operands = rows, partials.reshape(-1, *rows.shape), stack, number
    if exchange is None:
        x_and_normed = devices.over_devices(
            functools.partial(_add_norm, eps),
            operands,
            devices.Split(
                inputs=(("m", "d"), ("s", "m", "d"), ("l", "d"), ("n",)),
                outputs=(("m", "d"), ("m", "d")),
                free=(),
            ),
        )
    else:
        run = functools.partial(_add_norm_over_devices, eps)
        received, *results = devices.sealed(run, *operands, *exchange)
        x_and_normed = tuple(results)
        received = devices.varying_like(received, exchange.device)
        exchange = Exchange(received, exchange.device, exchange.calls + 1)
    x, normed = (result.reshape(x.shape) for result in x_and_normed)
    return x, normed, exchange


def _add_norm(eps: float, x: Array, added: Array, stack: Array, number: Array) -> tuple[Array, ...]:
    from pallas_lm.kernels import norm as kernel

    rows, dim = x.shape
    problem = kernel.Problem(rows, dim, added.shape[0], str(x.dtype), eps)
    if kernel.takes(problem) and stack.dtype == x.dtype:
        return kernel.run(x, added, stack, number, problem)
    weight = lax.dynamic_index_in_dim(stack, number[0], keepdims=False)
    return add_norm(x, Added(added), weight, eps)[:2]


def _add_norm_over_devices(  # noqa: PLR0913
    eps: float, x: Array, added: Array, stack: Array, number: Array, *exchange: Array
) -> tuple[Array, ...]:
    from pallas_lm.kernels import norm as kernel

    (rows, dim), count = x.shape, exchange[0].shape[0] // 2
    problem = kernel.Problem(rows, dim, added.shape[0], str(x.dtype), eps, count)
    return kernel.run_over_devices(x, added, stack, number, Exchange(*exchange), problem)


def rotate(x: Array, angles: Angles) -> Array:
    """Turns each pair (i, i + H / 2) of a head by its angle: checkpoints are laid out so."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (
        first * angles.cos - second * angles.sin,
        second * angles.cos + first * angles.sin,
    )
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def heads(
    added: Array, angles: Angles, sizes: tuple[int, int], dtype: DTypeLike
) -> tuple[Array, ...]:
    """q [M, t, N, H], k and v [M, t, K, H], q and k rotated, from partial sums
    float32[n, M, t, (N + 2 K) H]; for Hopper. `sizes`: N and K.
    """
    count, m, t, width = added.shape
    results = devices.over_devices(
        functools.partial(_heads, sizes, jnp.dtype(dtype).name),
        (added.reshape(count, m * t, width), *(x.reshape(m * t, -1) for x in angles)),
        devices.Split(
            inputs=(("s", "m", "d"), ("m", "c"), ("m", "c")),
            outputs=(("m", "n", "h"), ("m", "k", "h"), ("m", "k", "h")),
            free=(),
        ),
    )
    return tuple(x.reshape(m, t, *x.shape[1:]) for x in results)


def _heads(
    sizes: tuple[int, int], dtype: str, added: Array, cos: Array, sin: Array
) -> tuple[Array, ...]:
    from pallas_lm.kernels import rotate as kernel

    partials, rows, _ = added.shape
    problem = kernel.Problem(rows, *sizes, 2 * cos.shape[-1], partials, dtype)
    return kernel.run(added, cos, sin, problem)
