"""Rows rounded to 8 bits, with scales, in plain jax.numpy: the definition, bit for bit, of what
every implementation stores.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from pallas_attn._call.problem import QuantizeInputs, QuantizeProblem, live, rows_of_scale

Array = jax.Array

_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}


def quantize(rows: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    """rows [..., H] as numbers of a narrow dtype [..., H] and one float32 scale each [...]: a row
    is close to numbers * scale.

    In float32, every operation rounded to nearest even and none fused:

        scale   = max(max |x| * (1 / largest), 2**-100)     largest: 448, 57344 or 127
        numbers = convert(x * (1 / scale))

    so that the largest number of a row is the largest of the dtype, and every implementation makes
    the same bits. The floor of the scale keeps subnormals, which XLA flushes on a CPU and not on a
    GPU, out of it: a row of zeros has that scale. A row that holds a NaN or an infinity has the
    scale NaN and zeros for numbers: it is NaN from then on, whatever dtype it lies in.
    """
    numbers, scales = quantize_over(rows, dtype, (rows.ndim - 1,))
    return numbers, scales[..., 0]


def quantize_over(x: Array, dtype: DTypeLike, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """`quantize` with one scale for all numbers along `axes`, which have length 1 in the scales."""
    x = x.astype(jnp.float32)
    bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF  # bits of |x| order as |x| does
    top = bits.max(axis=axes, keepdims=True)
    finite = top < 0x7F800000
    top = lax.bitcast_convert_type(jnp.where(finite, top, 0), jnp.float32)
    inverse = np.float32(1) / np.float32(_LARGEST[jnp.dtype(dtype).name])
    scale = jnp.maximum(top * inverse, np.float32(2.0**-100))
    scaled = jnp.where(finite, x, 0) * reciprocal(scale)
    if jnp.dtype(dtype) == jnp.int8:
        scaled = jnp.round(scaled)
    return scaled.astype(dtype), jnp.where(finite, scale, jnp.nan)


def quantize_blocks(inputs: QuantizeInputs, problem: QuantizeProblem) -> tuple[Array, ...]:
    """q, k and v in float8, and the scales of their blocks of rows; rows past a length are zeros
    that count in no scale.
    """
    ends = inputs.q_lengths, inputs.kv_lengths, inputs.kv_lengths
    each = [
        _quantized(live(x, end), blocks, problem.to)
        for x, end, blocks in zip(inputs[:3], ends, problem.blocks, strict=True)
    ]
    numbers, scales = zip(*each, strict=True)
    return *numbers, *scales


def _quantized(x: Array, blocks: int, dtype: str) -> tuple[Array, Array]:
    """x [B, rows, heads, dim] as numbers and scales [B, blocks, heads]."""
    batch, rows, heads, dim = x.shape
    if x.size == 0:
        return x.astype(dtype), jnp.ones((batch, blocks, heads), jnp.float32)
    size = rows_of_scale(rows, blocks)
    x = jnp.pad(x, ((0, 0), (0, blocks * size - rows), (0, 0), (0, 0)))
    numbers, scales = quantize_over(x.reshape(batch, blocks, size, heads, dim), dtype, (2, 4))
    return numbers.reshape(x.shape)[:, :rows], lax.squeeze(scales, (2, 4))


def reciprocal(x: Array) -> Array:
    """1 / x for float32 x from 2**-126 to 2**125, correctly rounded: by long division of integers,
    since XLA's own division is not on a GPU.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    divisor = bits & 0x7FFFFF | 0x800000  # 2**23 to 2**24
    remainder = jnp.full(bits.shape, 2**23, jnp.uint32)
    quotient = jnp.zeros(bits.shape, jnp.uint32)  # 2**47 / divisor in the end: 2**23 to 2**24
    for _ in range(3):
        remainder = remainder << 8
        quotient = (quotient << 8) + remainder // divisor
        remainder = remainder % divisor
    # No quotient lies halfway: that takes a divisor of which 2**48 is an odd multiple.
    quotient = quotient + (2 * remainder > divisor).astype(jnp.uint32)
    # A power of two has the quotient 2**24, which carries into the exponent as it should.
    return lax.bitcast_convert_type(((252 - (bits >> 23)) << 23) + quotient, jnp.float32)
