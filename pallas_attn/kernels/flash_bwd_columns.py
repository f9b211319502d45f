"""A backward whose V has more columns than shared memory has room for.

Attention with a wide V is attention over the same q and k with each part of V's columns: outputs
stand side by side, and so do their gradients dv; dS is a sum over columns, and with it are dq, dk,
dbias and dsinks. So each part is a backward of its own. All make P again, and dq and dk as wide as
ever: it is slow, and for what would not be taken else.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_attn._problem import AttentionInputs, AttentionProblem


def part_of(problem: AttentionProblem, parts: int) -> AttentionProblem:
    """The problem of the widest of so many parts."""
    return dataclasses.replace(problem, v_head_dim=_width(problem, parts))


def _width(problem: AttentionProblem, parts: int) -> int:
    return 8 * pl.cdiv(problem.v_head_dim, 8 * parts)


def run(
    residuals: Any,
    problem: AttentionProblem,
    parts: int,
    one: Callable[[Any, AttentionProblem], AttentionInputs],
) -> AttentionInputs:
    """The cotangents of inputs, by `one` part after the other."""
    inputs, out, lse, d_out, d_lse = residuals
    summed = {
        name: x.astype(jnp.float32)
        for name in ("bias", "sinks")
        if (x := getattr(inputs, name)) is not None
    }
    width = _width(problem, parts)
    found: list[AttentionInputs] = []
    for start in range(0, problem.v_head_dim, width):
        end = min(start + width, problem.v_head_dim)
        v, o, do = (lax.slice_in_dim(x, start, end, axis=3) for x in (inputs.v, out, d_out))
        if found:  # one at a time
            v = lax.optimization_barrier((v, found[-1]))[0]
        through_lse = jnp.zeros_like(d_lse) if found else d_lse  # which has no columns: once
        given = (inputs._replace(v=v, **summed), o, lse, do, through_lse)
        found.append(one(given, dataclasses.replace(problem, v_head_dim=end - start)))
    total = jax.tree.map(lambda *x: sum(x[1:], x[0]), *[each._replace(v=None) for each in found])
    back = {name: getattr(total, name).astype(getattr(inputs, name).dtype) for name in summed}
    dv = jnp.concatenate([each.v for each in found], axis=3)
    return total._replace(v=dv, **back)
