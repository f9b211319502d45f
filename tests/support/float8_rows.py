"""Rows that prefill over a float8 cache multiplies on 8 bits, in NumPy: q with a scale a row, K and
V with one for 128 rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_attn._call import quantization
from pallas_attn.kernels.prefill import float8_tiles
from tests.support import budget

KEYS = float8_tiles.KEYS
# Largest numbers of rows that lie off ties: primes of 8 bits. No quotient of two, by which numbers
# are multiplied, makes one lie halfway between two float8: a GPU's reciprocal may be off by a bit,
# and round such numbers the other way.
PRIMES = (131, 137, 149, 163, 179, 197, 223, 251)


def off_ties(rng: np.random.Generator, x: np.ndarray, primes: tuple[int, ...] = PRIMES) -> Any:
    """Rows [.., H] of bfloat16 whose largest number is one of `primes` / 32."""
    x = np.clip(x, -4, 4)
    at = rng.integers(x.shape[-1], size=(*x.shape[:-1], 1))
    np.put_along_axis(x, at, rng.choice(primes, at.shape) / 32, axis=-1)
    return jnp.asarray(x, "bfloat16")


def dense(cache: Any, x: Any, layer: int | None, lengths: Any) -> np.ndarray:
    """Rows [M, S, K, ..] of one array of the cache, zeros past lengths; S: whole tiles."""
    at = () if layer is None else layer
    each = [np.asarray(a)[at] for a in (x if isinstance(x, tuple) else (x,))]
    if cache.page_table is not None:
        pages = each[0][np.maximum(np.asarray(cache.page_table), 0)]
        each = [np.concatenate(list(rows), axis=1) for rows in pages]
    elif not isinstance(x, tuple):
        each = list(each[0])
    size = -(-max(a.shape[1] for a in each) // KEYS) * KEYS
    rows = np.zeros((len(each), size, *each[0].shape[:1], *each[0].shape[2:]), each[0].dtype)
    for m, have in enumerate(each):
        rows[m, : lengths[m]] = have.swapaxes(0, 1)[: lengths[m]]
    return rows


def of_tiles(numbers: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows [M, S, K, H] with a scale each as rows with one for 128, [M, S / 128, K]."""
    tiles = scales.reshape(scales.shape[0], -1, KEYS, scales.shape[2])
    largest = np.fmax(tiles, float8_tiles.LEAST_SCALE).max(axis=2, keepdims=True)
    ratios = (tiles * (np.float32(1) / largest)).reshape(scales.shape)[..., None]
    return (numbers.astype(np.float32) * ratios).astype(numbers.dtype), largest[:, :, 0]


def arguments_of(
    q: jax.Array, cache: Any, layer: int | None, lengths: np.ndarray
) -> dict[str, Any]:
    """The call of `flash_attention` on the rows that kernels multiply, `lengths` of them within
    capacities.
    """
    q, q_scale = quantization.quantize(q, jnp.float8_e4m3fn)
    k, k_scale, v, v_scale = (
        dense(cache, x, layer, lengths) for x in (cache.k, cache.k_scale, cache.v, cache.v_scale)
    )
    (k, k_scale), (v, v_scale) = of_tiles(k, k_scale), of_tiles(v, v_scale)
    arrays = {"q": q, "k": k, "v": v, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    arrays |= {"kv_lengths": lengths, "q_offset": lengths - q.shape[1]}
    return {name: jnp.asarray(x) for name, x in arrays.items()}


def expected(q: jax.Array, cache: Any, layer: int | None, **options: Any) -> budget.Expected:
    """Results on the rows that kernels multiply."""
    arrays = arguments_of(q, cache, layer, np.asarray(cache.lengths))
    return budget.attention(arrays | options)
