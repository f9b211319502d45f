"""Scores as functions of positions."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_attn._functions import program as _program
from pallas_attn._functions import tracing
from pallas_attn._functions.picture import Picture
from pallas_attn._functions.program import Program
from pallas_attn.errors import described
from pallas_attn.masks import UNKNOWN, aux_arrays, known, named_at, shown, shown_at


@dataclasses.dataclass(frozen=True, eq=False)
class ScoreFunction:
    """A function of scores and positions with the arrays that it reads, made by `score_fn`. A
    pytree: the arrays are its leaves, the function is static.

    Example::

        >>> q = jnp.ones((1, 8, 2, 64))
        >>> near = pa.score_fn(lambda s, b, h, q, kv: s - abs(q - kv))
        >>> pa.flash_attention(q, q, q, score=near).shape
        (1, 8, 2, 64)
    """

    program: Program  # inputs: score, batch row, query head, a query's position, a key's position
    aux: tuple[jax.Array, ...] = ()

    def __post_init__(self) -> None:
        _program.check(self.program, "score_fn")

    def __bool__(self) -> bool:
        raise ValueError("score: a score function is neither true nor false; write one function "
                         "that does the work of both")  # fmt: skip

    def show(
        self,
        q_len: int,
        kv_len: int,
        *,
        logits: ArrayLike = 0.0,
        q_offset: int = 0,
        b: int = 0,
        h: int = 0,
        most: int = 64,
    ) -> Picture:
        """A picture of what the function makes of `logits` in batch row b and query head h.

        `logits`: a number, or floats that broadcast to [q_len, kv_len]. The rest is as in
        `Mask.show`::

            >>> pa.score_fn(lambda s, b, h, q, kv: s - abs(q - kv)).show(3, 8)
            score function: 3 queries (down), 8 keys (across); from -7 to 0
            █ ▇ ▆ ▅ ▄ ▃ ▂ ▁
            ▇ █ ▇ ▆ ▅ ▄ ▃ ▂
            ▆ ▇ █ ▇ ▆ ▅ ▄ ▃
        """
        where = shown_at(q_len, kv_len, q_offset, most, b=b, h=h)
        numbers = known(logits)
        if numbers is None:
            raise ValueError(UNKNOWN)
        try:
            scores = np.broadcast_to(numbers.astype(np.float64), (q_len, kv_len))
        except (TypeError, ValueError):
            raise ValueError(
                f"logits: expected numbers that broadcast to [{q_len}, {kv_len}], got "
                f"{described(logits)}"
            ) from None
        scores = scores[where[0] - q_offset, where[1]].astype(np.float32)
        values = shown(self.program, self.aux, where, scores, b=b, h=h).astype(np.float32)
        return Picture(values, "score function" + named_at(self.program, b, h), q_len, kv_len)


jax.tree_util.register_dataclass(ScoreFunction, data_fields=["aux"], meta_fields=["program"])


def score_fn(f: Callable[..., Any], *aux: ArrayLike) -> ScoreFunction:
    """A score function: `f(score, b, h, q, kv, *aux)` is the logit of query head h of batch row b,
    at position q, for the key at position kv. For arguments `score=`::

        alibi = pa.score_fn(lambda s, b, h, q, kv, slope: s - slope[h] * (q - kv), slopes)

    `score` is float32, after scale and softcap; bias and masks come after. The rules of `mask_fn`
    for functions hold here too. The result is a floating-point number; -inf hides the key.

    Example::

        >>> pa.score_fn(lambda s, b, h, q, kv: s * 2).show(1, 4, logits=[1.0, 2.0, 3.0, 4.0])
        score function: 1 query (down), 4 keys (across); from 2 to 8
        ▁ ▃ ▆ █
    """
    arrays = aux_arrays("score_fn", f, aux)
    numbers = (jnp.float32, *(jnp.int32,) * 4)
    program, kept = tracing.trace("score_fn", f, numbers, arrays, "score, b, h, q, kv")
    if "float" not in program.result_dtype:
        raise ValueError(
            f"score_fn: expected a function that gives a floating-point number, got "
            f"{program.result_dtype}; for a mask use mask_fn"
        )
    return ScoreFunction(program, tuple(kept))
