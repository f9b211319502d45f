"""Arguments of `flash_attention` that belong together, as one value each: packed rows, block lists
and scales of float8 numbers. They are pytrees; fields that hold no arrays are static.
"""

import dataclasses

import jax
from jax.typing import DTypeLike

Array = jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """Packed rows: sequences one behind the other, without a batch axis. Other libraries call the
    starts cu_seqlens.

    q is `[tokens, N, H]`, k and v `[kv_tokens, K, H(v)]`. Queries q_starts[i] .. q_starts[i + 1]
    are those of sequence i, 0 of them or more. They see keys kv_starts[i] .. kv_starts[i + 1] and
    no others. Positions count from 0 in each sequence, and q_offset is an int or int32[M]. Starts
    are clipped to the rows there are, and none is below an earlier one. Rows that no sequence owns
    give 0 and take no gradient; past the last start they may hold anything.

    Example::

        >>> q, starts = jnp.ones((7, 2, 64)), jnp.array([0, 4, 7])
        >>> pa.flash_attention(q, q, q, packed=pa.Packed(starts)).shape
        (7, 2, 64)
    """

    q_starts: Array  # int32[M + 1], traced or not
    kv_starts: Array | None = None  # int32[M + 1] for k and v; None: they are packed as q is


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """Block lists: query rows see the keys of the listed blocks only, of those that `mask` shows.

    List i is that of the query rows of block i; -1 is none, and so is any number of no block. A
    block that is listed twice counts once. Tiles of keys that lists leave out are not computed,
    forward and backward. By sizes that are multiples of 64, tiles of kernels are hidden or shown
    whole; below, tiles that a block cuts are masked number by number, which is slow.

    Example::

        >>> q = jnp.ones((1, 256, 2, 64))
        >>> lists = jnp.array([[0], [1]])[None, None]  # each block of queries sees its own keys
        >>> pa.flash_attention(q, q, q, kv_blocks=pa.Blocks(lists, 128)).shape
        (1, 256, 2, 64)
    """

    lists: Array  # int32[B or 1, heads, q blocks, n], traced or not, where heads are N, K or 1
    size: int | tuple[int, int] = 128  # query rows of a list and keys of a block: an int or a pair


@dataclasses.dataclass(frozen=True, eq=False)
class Float8:
    """The scales of float8_e4m3fn or float8_e5m2 q, k and v, which stand for q * q_scale,
    k * k_scale and v * v_scale. `quantize_qkv` makes arrays and scales.

    A scale is a number, one a head (`[N]`; `[K]` of k and v), or floats that broadcast to
    `[B, n, N]`: one for each of n blocks of rows. n = T is one a row. Up to T / 128 (rounded up)
    blocks have a multiple of 128 rows, T / n rounded up to one, and the last one what is left; more
    blocks are equal parts of T. Two axes are a ValueError: FlashAttention-3's descale, one a batch
    row and head, is `[B, 1, N]`, `x[:, None]`. Default 1. Scales below 2**-100 count as 2**-100.

    Kernels take head dims up to 256 and round probabilities to float8_e4m3fn. Tensor cores add
    products of float8 with about 14 bits, so kernels add the sums of each kv tile in float32
    registers; with `precision=jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM` the tensor
    cores add all.

    Example::

        >>> q = jnp.ones((1, 256, 2, 64), jnp.float8_e4m3fn)
        >>> pa.flash_attention(q, q, q, float8=pa.Float8(v_scale=0.5)).dtype
        dtype(bfloat16)
    """

    q_scale: Array | float | None = None
    k_scale: Array | float | None = None
    v_scale: Array | float | None = None
    out_dtype: DTypeLike | None = None  # bfloat16 (default), float16 or float32; static


for _value, _static in ((Packed, []), (Blocks, ["size"]), (Float8, ["out_dtype"])):
    _arrays = [field.name for field in dataclasses.fields(_value) if field.name not in _static]
    jax.tree_util.register_dataclass(_value, data_fields=_arrays, meta_fields=_static)
