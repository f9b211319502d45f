"""float8 q, k and v with scales, for `flash_attention`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_attn._call import bind, checks, reference
from pallas_attn._call.float8 import block_rows, live
from pallas_attn._call.problem import FLOAT8
from pallas_attn.errors import described

Array = jax.Array


class QuantizedQKV(NamedTuple):
    """The result of `quantize_qkv`, under the names that `flash_attention` has."""

    q: Array  # [B, T, N, H], float8
    k: Array  # [B, S, K, H]
    v: Array  # [B, S, K, Hv]
    q_scale: Array  # float32[B, n, N]
    k_scale: Array  # float32[B, n, K]
    v_scale: Array  # float32[B, n, K]


def quantize_qkv(  # noqa: PLR0913
    q: Array,
    k: Array,
    v: Array,
    *,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    rows: int | None = 128,
    q_lengths: Array | None = None,
    kv_lengths: Array | None = None,
) -> QuantizedQKV:
    """Converts q, k and v to float8 with scales, for
    `flash_attention(**quantize_qkv(q, k, v)._asdict())`.

    Args:
      q: `[B, T, N, H]`, bfloat16, float16 or float32; k and v likewise, in the shapes of
        `flash_attention`.
      dtype: float8_e4m3fn, or float8_e5m2, whose numbers have one bit less and a wider range.
      rows: largest number of rows of a head that share a scale: the largest divisor of T, or of S,
        up to it is taken. None: all rows. Scales of 128 rows, or of a head, cost kernels nothing.
      q_lengths: int32[B]; rows at or past it become 0 and count in no scale.
      kv_lengths: int32[B], for k and v.

    Returns:
      `QuantizedQKV`. The largest number of a block of rows becomes the largest number of the dtype;
      the scale of a block with a NaN or an infinity is NaN.
    """
    q, k, v = bind.operands(q, k, v)
    name = _dtype(dtype)
    if rows is not None and (type(rows) is not int or rows < 1):
        raise ValueError(f"rows: expected an int of at least 1 or None, got {described(rows)}")
    (batch, q_len), kv_len = q.shape[:2], k.shape[1]
    q_ends = checks.lengths("q_lengths", q_lengths, batch, q_len)
    kv_ends = checks.lengths("kv_lengths", kv_lengths, batch, kv_len)
    arrays = ((q, q_ends), (k, kv_ends), (v, kv_ends))
    quantised = [_blocks(x, ends, name, rows) for x, ends in arrays]
    numbers, scales = zip(*quantised, strict=True)
    return QuantizedQKV(*numbers, *scales)


def _dtype(value: DTypeLike) -> str:
    try:
        name = str(jnp.dtype(value))
    except TypeError:
        name = ""
    if name not in FLOAT8:
        raise ValueError(f"dtype: expected {' or '.join(FLOAT8)}, got {described(value)}")
    return name


def _blocks(x: Array, ends: Array | None, dtype: str, rows: int | None) -> tuple[Array, Array]:
    """x [B, rows, heads, dim] as numbers and scales [B, n, heads]."""
    if x.size == 0:
        return x.astype(dtype), jnp.ones((x.shape[0], 1, x.shape[2]), jnp.float32)
    x = live(x, ends)
    batch, length, heads, dim = x.shape
    size = block_rows(length, length if rows is None else rows)
    blocks = x.reshape(batch, length // size, size, heads, dim)
    numbers, scales = reference.quantize_over(blocks, dtype, (2, 4))
    return numbers.reshape(x.shape), lax.squeeze(scales, (2, 4))
