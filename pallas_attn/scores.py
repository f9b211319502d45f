"""Scores as functions of positions."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_attn._functions import program as _program
from pallas_attn._functions import tracing
from pallas_attn._functions.program import Program
from pallas_attn.masks import aux_arrays


@dataclasses.dataclass(frozen=True, eq=False)
class ScoreFunction:
    """A function of scores and positions with the arrays that it reads, made by `score_fn`. A
    pytree: the arrays are its leaves, the function is static.
    """

    program: Program  # inputs: score, batch row, query head, a query's position, a key's position
    aux: tuple[jax.Array, ...] = ()

    def __post_init__(self) -> None:
        _program.check(self.program, "score_fn")

    def __bool__(self) -> bool:
        raise ValueError("score: a score function is neither true nor false; write one function "
                         "that does the work of both")  # fmt: skip


jax.tree_util.register_dataclass(ScoreFunction, data_fields=["aux"], meta_fields=["program"])


def score_fn(f: Callable[..., Any], *aux: ArrayLike) -> ScoreFunction:
    """A score function: `f(score, b, h, q, kv, *aux)` is the logit of query head h of batch row b,
    at position q, for the key at position kv. For arguments `score=`::

        alibi = pa.score_fn(lambda s, b, h, q, kv, slope: s - slope[h] * (q - kv), slopes)

    `score` is float32, after scale and softcap; bias and masks come after. The rules of `mask_fn`
    for functions hold here too. The result is a floating-point number; -inf hides the key.
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
