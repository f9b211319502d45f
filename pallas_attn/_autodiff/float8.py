"""Calls on float8 arrays, which have no derivative, and 16-bit calls with a float8 forward."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn._autodiff import linear
from pallas_attn._autodiff.derivative import Attention, KernelCall
from pallas_attn._call import batching, checks, dispatch
from pallas_attn._call.float8 import blocks_of
from pallas_attn._call.problem import FLOAT8, AttentionInputs, AttentionProblem, live, rows_of_scale
from pallas_attn.errors import Limit

Array = jax.Array

_NO_DERIVATIVE = Limit(
    "kernels on float8 have no derivative",
    "pass bfloat16 q, k and v with float8=True, which has the derivative of their rounded numbers",
)


def of_float8(
    problem: AttentionProblem, inputs: AttentionInputs, implementation: str | None
) -> tuple[Array, Array]:
    """(out, lse) of float8 q, k and v by the implementation that takes the problem."""
    chosen = dispatch.select(problem, implementation)
    if isinstance(chosen, dispatch.Reference):
        return chosen.run(inputs, problem)
    (inputs,) = batching.underived(problem, _NO_DERIVATIVE)(inputs)
    out, lse = batching.compiled_once(batching.attention, chosen, problem, inputs)
    return out, lse


def refuse_devices(problem: AttentionProblem) -> None:
    """Raises the ValueError for float8 arrays with a `context`."""
    raise ValueError(
        f"context: expected None for {problem.dtype} q, k and v; dequantise them, "
        "x.astype(jnp.bfloat16) * scale"
    )


# ---- training: float8 forward, 16-bit backward ---------------------------------------------------

BLOCK = 128  # rows of a head that share a scale, at most


def straight_through(
    problem: AttentionProblem, inputs: AttentionInputs, implementation: str | None
) -> tuple[Array, Array]:
    """(out, lse) of 16-bit q, k and v rounded to float8. Scales are powers of 2, so that the
    rounded numbers times their scales are exact in 16 bits. The forward multiplies float8;
    derivatives are those of 16-bit kernels on the rounded numbers, and the derivative of the
    rounding counts as 1.
    """
    if problem.dtype not in ("bfloat16", "float16"):
        raise ValueError(
            f"float8: expected bfloat16 or float16 q, k and v, got {problem.dtype}; cast them, or "
            "leave float8 out"
        )
    ends = {"q": inputs.q_lengths, "k": inputs.kv_lengths, "v": inputs.kv_lengths}
    rows: dict[str, Any] = {
        name: rounded(live(getattr(inputs, name), end)) for name, end in ends.items()
    }
    inputs = inputs._replace(**rows)
    chosen = dispatch.select(problem, implementation)
    if isinstance(chosen, dispatch.Reference):
        return chosen.run(inputs, problem)
    call = KernelCall(problem, implementation, chosen, _forward)
    out, lse = linear.differentiable(Attention, call, inputs)
    return out, lse


def _forward(
    problem: AttentionProblem, implementation: str | None, inputs: AttentionInputs
) -> tuple[Array, Array]:
    """The forward kernel on rounded inputs, which are float8 times powers of 2."""
    q, k, v = (quantised(getattr(inputs, name)) for name in "qkv")
    inputs = inputs._replace(q=q[0], k=k[0], v=v[0], q_scale=q[1], k_scale=k[1], v_scale=v[1])
    narrow = dataclasses.replace(
        problem,
        dtype=FLOAT8[0],
        out_dtype=problem.dtype,
        scale_blocks=(q[1].shape[1], k[1].shape[1], v[1].shape[1]),
    )
    narrow = batching.resized(narrow, inputs)
    chosen = dispatch.select(narrow, implementation)
    return batching.compiled_once(batching.attention, chosen, narrow, inputs)


def quantised(x: Array) -> tuple[Array, Array]:
    """x as float8_e4m3fn, and scales [B, n, heads], one for a block of rows: the power of 2 that
    brings the block's largest number into 224 .. 448. `rounded` returns numbers times scales.
    """
    batch, rows, heads, dim = x.shape
    blocks = blocks_of(rows, BLOCK)
    size = rows_of_scale(rows, blocks)
    wide = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, blocks * size - rows), (0, 0), (0, 0)))
    wide = wide.reshape(batch, blocks, size, heads, dim)
    top = jnp.abs(wide).max(axis=(2, 4), keepdims=True)
    # The next power of 2, by bits: jnp.frexp has a derivative, which kernels' primitives refuse.
    bits = lax.bitcast_convert_type(
        jnp.maximum(top, checks.LEAST_SCALE) * np.float32(1 / 448), jnp.int32
    )
    exponent = jnp.minimum((bits >> 23 & 255) + 1, 254)  # an infinity or a NaN: the largest power
    scale = lax.bitcast_convert_type(exponent << 23, jnp.float32)
    numbers = (wide / scale).astype(FLOAT8[0]).reshape(batch, blocks * size, heads, dim)
    return numbers[:, :rows], scale[:, :, 0, :, 0]


@jax.custom_jvp
def rounded(x: Array) -> Array:
    """x rounded to float8 with scales; its derivative is 1."""
    numbers, scale = quantised(x)
    size = rows_of_scale(x.shape[1], scale.shape[1])
    each = jnp.repeat(scale, size, axis=1)[:, : x.shape[1], :, None]
    return (numbers.astype(jnp.float32) * each).astype(x.dtype)


@rounded.defjvp
def _pass_on(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return rounded(*primals), tangents[0]
