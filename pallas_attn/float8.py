"""float8 q, k and v with scales, for `flash_attention`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_attn._call import bind, checks, device
from pallas_attn._call.float8 import blocks_of, quantize
from pallas_attn._call.problem import FLOAT8, QuantizeInputs, QuantizeProblem
from pallas_attn.errors import described
from pallas_attn.values import Float8

Array = jax.Array
ROUNDED = ("bfloat16", "float16", "float32")  # dtypes that are rounded; others become float32 first


class QuantizedQKV(NamedTuple):
    """The result of `quantize_qkv`.

    Example::

        >>> pa.QuantizedQKV._fields
        ('q', 'k', 'v', 'q_scale', 'k_scale', 'v_scale')
    """

    q: Array  # [B, T, N, H], float8
    k: Array  # [B, S, K, H]
    v: Array  # [B, S, K, Hv]
    q_scale: Array  # float32[B, n, N]
    k_scale: Array  # float32[B, n, K]
    v_scale: Array  # float32[B, n, K]

    @property
    def scales(self) -> Float8:
        """The scales, as `flash_attention(q, k, v, float8=)` takes them."""
        return Float8(self.q_scale, self.k_scale, self.v_scale)


def quantize_qkv(
    q: Array,
    k: Array,
    v: Array,
    *,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    rows: int | None = 128,
    q_lengths: Array | None = None,
    kv_lengths: Array | None = None,
    implementation: str | None = None,
) -> QuantizedQKV:
    """Converts q, k and v to float8 with scales, for
    `flash_attention(x.q, x.k, x.v, float8=x.scales)`. On a GPU one launch reads each array once and
    writes it once; only where registers do not hold the rows of a scale (`rows=None`, or blocks
    above 64 KiB) are largest numbers found by another read before.

    Args:
      q: `[B, T, N, H]`, bfloat16, float16 or float32; k and v likewise, in the shapes of
        `flash_attention`.
      dtype: float8_e4m3fn, or float8_e5m2, whose numbers have one bit less and a wider range.
      rows: largest number of rows of a head that share a scale. From 128 on, blocks have 128 rows
        (or the multiple of 128 up to `rows`) and the last one what is left; below, blocks are the
        largest equal parts of T (or S) that `flash_attention` takes. None: all rows. Kernels read
        scales of 128 rows, or of a head, once a tile.
      q_lengths: int32[B]; rows at or past it become 0 and count in no scale.
      kv_lengths: int32[B], for k and v.
      implementation: None (the fastest), "sm80" or "reference".

    Returns:
      `QuantizedQKV`. The largest number of a block of rows becomes the largest number of the dtype;
      the scale of a block with a NaN or an infinity is NaN.

    Example::

        >>> q = jnp.ones((1, 256, 2, 64), jnp.bfloat16)
        >>> narrow = pa.quantize_qkv(q, q, q)
        >>> out = pa.flash_attention(narrow.q, narrow.k, narrow.v, float8=narrow.scales)
        >>> out.dtype, narrow.q_scale.shape
        (dtype(bfloat16), (1, 2, 2))
    """
    q, k, v = bind.operands(q, k, v)
    name = _dtype(dtype)
    if q.dtype.itemsize < 2:
        raise ValueError(
            f"q, k, v: expected 16 bits or more, got {q.dtype}; they are rounded already"
        )
    if rows is not None and (type(rows) is not int or rows < 1):
        raise ValueError(f"rows: expected an int of at least 1 or None, got {described(rows)}")
    (batch, q_len, q_heads, head_dim), (kv_len, kv_heads, v_head_dim) = q.shape, v.shape[1:]
    if str(q.dtype) not in ROUNDED:
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    of_q, of_kv = (blocks_of(n, rows or max(n, 1)) for n in (q_len, kv_len))
    problem = QuantizeProblem(
        gpu=device.gpu_generation(),
        dtype=str(q.dtype),
        to=name,
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        blocks=(of_q, of_kv, of_kv),
    )
    q_ends = checks.lengths("q_lengths", q_lengths, batch, q_len)
    kv_ends = checks.lengths("kv_lengths", kv_lengths, batch, kv_len)
    inputs = QuantizeInputs(q, k, v, q_ends, kv_ends)
    return QuantizedQKV(*quantize(problem, inputs, implementation))


def _dtype(value: DTypeLike) -> str:
    name = checks.dtype_name(value)
    if name not in FLOAT8:
        raise ValueError(f"dtype: expected {' or '.join(FLOAT8)}, got {described(value)}")
    return name
