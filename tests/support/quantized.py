"""Rows that are quantised with a scale each, a second time: in NumPy's own float32 and by
ml_dtypes' conversions.
"""

import jax.numpy as jnp
import numpy as np

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}


def quantized(rows, dtype):
    """(numbers, scales) of rows [..., H]."""
    x = np.asarray(rows).astype(np.float32)
    finite = np.isfinite(x).all(axis=-1)
    x = np.where(finite[..., None], x, np.float32(0))
    scale = np.abs(x).max(axis=-1) * (np.float32(1) / np.float32(LARGEST[dtype]))
    scale = np.maximum(scale, np.float32(2.0**-100))
    numbers = x * (np.float32(1) / scale)[..., None]
    assert numbers.dtype == scale.dtype == np.float32
    numbers = np.rint(numbers) if dtype == "int8" else numbers
    return numbers.astype(jnp.dtype(dtype)), np.where(finite, scale, np.float32(np.nan))


def awkward_rows(rng):
    """Rows of every magnitude that float32 has, of zeros, with NaN, with infinities."""
    bits = rng.integers(0, 2**32, (500, 32), np.uint64).astype(np.uint32).view(np.float32)
    wide = rng.standard_normal((2000, 32)) * 2.0 ** rng.integers(-145, 125, (2000, 1))
    rows = np.concatenate([bits, wide.astype(np.float32), np.zeros((1, 32), np.float32)])
    rows[3, 5], rows[4, 0], rows[5, 31] = np.nan, np.inf, -np.inf
    # Halfway between two numbers of each dtype, and a little to each side.
    ties = np.concatenate([np.arange(1, 250) + 0.5, (np.arange(8, 16) + 0.5) / 16])
    ties = np.resize(
        np.concatenate([ties, np.nextafter(ties, 0), np.nextafter(ties, 999)]), (40, 31)
    )
    for largest in LARGEST.values():
        tied = np.concatenate([np.full((40, 1), largest), ties], axis=1).astype(np.float32)
        rows = np.concatenate([rows, tied, -tied])
    return rows
