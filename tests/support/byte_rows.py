"""Latent rows of 656 bytes in NumPy: a second definition of FlashMLA's format."""

import jax.numpy as jnp
import numpy as np

from tests.support.quantized import quantized


def as_bytes(rows):
    """uint8[.., 656] of rows [.., 576]."""
    rows = np.asarray(rows)
    lead = rows.shape[:-1]
    numbers, scales = quantized(rows[..., :512].reshape(*lead, 4, 128), "float8_e4m3fn")
    rest = np.ascontiguousarray(rows[..., 512:].astype(np.float32).astype(jnp.bfloat16))
    parts = numbers.reshape(*lead, 512), scales.astype("<f4"), rest
    return np.concatenate([x.view(np.uint8).reshape(*lead, -1) for x in parts], axis=-1)


def as_floats(rows):
    """float32[.., 576] of rows uint8[.., 656]."""
    parts = np.split(np.asarray(rows), (512, 528), axis=-1)
    numbers, scales, rest = (
        np.ascontiguousarray(x).view(dtype).astype(np.float32)
        for x, dtype in zip(parts, (jnp.float8_e4m3fn, "<f4", jnp.bfloat16), strict=True)
    )
    with np.errstate(all="ignore"):  # any bytes may come
        v = numbers * np.repeat(scales, 128, axis=-1)
    return np.concatenate([v, rest], axis=-1)
