"""What a function of positions makes of scores."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_attn._functions import program as _program
from pallas_attn._functions.program import Program
from pallas_attn.masks import aux_arrays


@dataclasses.dataclass(frozen=True, eq=False)
class ScoreFunction:
    """A function of scores and positions, and the arrays that it reads: what `score_fn` makes. A
    pytree: its arrays are its leaves, what it computes is static.
    """

    program: Program  # of a score, a batch row, a query head, a query's position and a key's
    aux: tuple[jax.Array, ...] = ()


jax.tree_util.register_dataclass(ScoreFunction, data_fields=["aux"], meta_fields=["program"])


def score_fn(f: Callable[..., Any], *aux: Any) -> ScoreFunction:
    """What becomes of scores, by a function: `f(score, b, h, q, kv, *aux)` gives the logit of query
    head h of batch row b, at position q, for the key at position kv. Goes where `score=` goes::

        alibi = pa.score_fn(lambda s, b, h, q, kv, slope: s - slope[h] * (q - kv), slopes)

    `score` is float32, scaled and soft-capped already; bias and masks come after. Whatever is said
    of functions in `mask_fn` holds here too. The result is a floating-point number; -inf hides the
    key.
    """
    arrays = aux_arrays("score_fn", f, aux)
    numbers = (jnp.float32, *(jnp.int32,) * 4)
    program, kept = _program.trace("score_fn", f, numbers, arrays)
    if "float" not in program.result_dtype:
        raise ValueError(
            f"score_fn: expected a function that gives a floating-point number, got "
            f"{program.result_dtype}; for a mask use mask_fn"
        )
    return ScoreFunction(program, tuple(kept))
