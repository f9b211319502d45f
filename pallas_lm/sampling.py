"""The next token from logits: greedy, temperature, top-k, top-p, with a key a sequence."""

import dataclasses
import numbers
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_attn.errors import described

Array = jax.Array


def is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def at_least_1(name: str, value: object) -> None:
    if not is_int(value):
        raise ValueError(f"{name}: expected an int of at least 1, got {described(value)}")
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The choice of a token. Temperature divides the logits, top_k keeps the largest, and top_p
    keeps the fewest of these whose probabilities reach it.
    """

    temperature: float = 0.0  # 0, or what is 0 as a normal float32: the largest logit
    top_k: int = 0  # 0: all
    top_p: float = 1.0

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn; else the likeliest are taken."""
        return bool(self.temperature >= jnp.finfo(jnp.float32).tiny)

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            if not isinstance(getattr(self, name), numbers.Real):
                raise ValueError(f"{name}: expected a number, got {getattr(self, name)!r}")
        if not is_int(self.top_k):
            raise ValueError(f"top_k: expected an int, got {described(self.top_k)}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature: expected at least 0, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k: expected at least 0 (0: all), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected above 0 and at most 1, got {self.top_p}")


def sample(logits: Array, keys: Array, sampling: Sampling) -> Array:
    """int32[M] from float32[M, vocab] and M keys. A sequence's token depends on its own row and key
    alone, so it is the same whatever else is in the batch.
    """
    if not sampling.draws:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # The largest is 0, so that no division by a small number makes two infinities of two logits.
    logits = logits - logits.max(axis=-1, keepdims=True)
    kept = _truncated(logits / sampling.temperature, sampling)
    return jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)


def _truncated(logits: Array, sampling: Sampling) -> Array:
    """The logits, -inf for tokens that top_k and top_p leave out; equal logits stay together."""
    vocab = logits.shape[-1]
    count = min(sampling.top_k, vocab) if sampling.top_k else vocab
    if count == vocab and sampling.top_p == 1:
        return logits
    # Largest first; top-k of a large vocabulary is far cheaper than its sort.
    ordered = lax.top_k(logits, count)[0] if count < vocab else -jnp.sort(-logits, axis=-1)
    weights = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(weights, axis=-1) - weights
    # The first always stays: nothing comes before it.
    least = jnp.where(before < sampling.top_p, ordered, jnp.inf).min(axis=-1, keepdims=True)
    return jnp.where(logits >= least, logits, -jnp.inf)
