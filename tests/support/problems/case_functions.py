"""Masks and scores as functions, which cases name. Each is written once, of operators that NumPy,
jax and torch have in common: the subject, its peers and the oracle read the same line.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_attn.masks import CAUSAL, FULL, sliding_window

Number = Any  # a number or an array of NumPy, jax or torch


class Positions(NamedTuple):
    """A mask and a score by their positions."""

    mask: Callable[..., Any]  # (b, h, q, kv, *aux) -> bool
    aux: tuple[np.ndarray, ...] = ()
    score: Callable[..., Any] | None = None  # (s, b, h, q, kv, *aux)
    built_in: dict[str, Any] | None = None  # the options that say the same; None: there are none


def _log(x: Number) -> Number:
    if hasattr(x, "log"):  # a torch tensor
        return x.log()
    return np.log(x) if isinstance(x, (np.ndarray, np.generic)) else jnp.log(x)


def _int(x: Number) -> Number:
    return x.astype(np.int32) if hasattr(x, "astype") else x.int()


def made(name: str, n: int, sizes: tuple[int, int, int, int]) -> Positions:
    """`n`: what the name counts; sizes: B, N, T, S."""
    batch, heads, q_len, kv_len = sizes
    if name == "full":
        return Positions(lambda b, h, q, kv: kv >= 0, built_in={"mask": FULL})
    if name == "causal":
        return Positions(lambda b, h, q, kv: q >= kv, built_in={"mask": CAUSAL})
    if name == "window":
        window = {"mask": sliding_window(n)}
        return Positions(lambda b, h, q, kv: (q >= kv) & (q - kv < n), built_in=window)
    if name == "documents":
        ids = np.arange(max(q_len, kv_len), dtype=np.int32)[None].repeat(batch, 0) // n
        return Positions(
            lambda b, h, q, kv, ids: (ids[b, q] == ids[b, kv]) & (q >= kv),
            (ids,),
            built_in={"mask": CAUSAL, "segment_ids": (ids[:, :q_len], ids[:, :kv_len])},
        )
    if name == "prefix":
        return Positions(lambda b, h, q, kv: (kv < n) | (q >= kv))
    if name == "block_diffusion":
        return Positions(lambda b, h, q, kv: q // n >= kv // n)
    if name == "dilated":
        return Positions(lambda b, h, q, kv: ((q - kv) % n == 0) & (q >= kv))
    if name == "alibi":
        slopes = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)
        return Positions(
            lambda b, h, q, kv, m: q >= kv,
            (slopes.astype(np.float32),),
            lambda s, b, h, q, kv, m: s - m[h] * (q - kv),
        )
    if name == "t5":  # 16 exact buckets of distances, then 16 logarithmic ones up to 128
        numbers = np.random.default_rng(0).standard_normal((heads, 32), np.float32)

        def score(s: Number, b: int, h: int, q: Number, kv: Number, table: Number) -> Number:
            n = (q - kv).clip(0, 127)
            far = 16 + _int(_log(n.clip(1, 127) * (1 / 16)) * (16 / math.log(8)))
            return s + table[h, n * (n < 16) + far * (n >= 16)]

        return Positions(lambda b, h, q, kv, table: q >= kv, (numbers,), score)
    if name == "random_blocks":  # one in ten is live
        shape = -(-q_len // n), -(-kv_len // n)
        table = np.random.default_rng(0).random(shape) < 0.1
        return Positions(lambda b, h, q, kv, table: table[q // n, kv // n], (table,))
    raise ValueError(f"function: expected a name of this table, got {name!r}")
