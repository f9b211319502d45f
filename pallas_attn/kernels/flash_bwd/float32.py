"""Float32 in the Hopper backward: powers of 2 of what is multiplied, and the left operands of
gradients, in terms (see `wgmma`). Other dtypes pass through unchanged.

P lies below 1, and dS = P (dP - delta) below a bound that is known beforehand; most of dS stays far
below it. By default, where 16 bits count, both are multiplied by one power of 2 to use float16's
range. At the highest precision each row of a tile has a power of 2 of its own, by which its sum is
multiplied.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_attn._call.problem import AttentionInputs
from pallas_attn.kernels.mma import wgmma

SPREAD = 2.0 ** (wgmma.EXPONENT + 1)  # what probabilities are multiplied by, by default


class Units(NamedTuple):
    """The powers of 2 that products of a kv head still lack. None: 1."""

    scores: Any = None
    dp: Any = None  # in units of dS
    dv: Any = None
    dk: Any = None  # with the scale
    dq: Any = None  # with the scale
    ds: Any = None


def units_of(refs: Any, batch: Any, kv_head: Any) -> Units:
    if refs.units is None:
        return Units()
    return Units(*(refs.units[n, batch, kv_head] for n in range(len(Units._fields))))


def scaled(x: Any, unit: Any) -> Any:
    return x if unit is None else x * unit


def powers_of(problem: Any, inputs: AttentionInputs, d_out: Any, delta: Any) -> dict[str, Any]:
    """Of q, k, v, dO and dS, [B, kv heads]; delta is [B, heads, rows]."""
    powers, group = wgmma.powers(inputs, problem.group), problem.group
    most = wgmma.largest(d_out, group, inputs.q_lengths)
    powers["do"] = wgmma.power_of_two(most)
    dp = most * (wgmma.largest(inputs.v, 1, inputs.kv_lengths) * problem.v_head_dim)
    deltas = wgmma.largest(delta.swapaxes(1, 2)[..., None], group)
    powers["ds"] = wgmma.power_of_two(2 * jnp.maximum(dp, deltas))
    return powers


def units(plan: Any, powers: dict[str, Any]) -> Any:
    """float32[6, B, kv heads]: see `Units`."""
    q, k, v, do, ds = (powers[name] for name in ("q", "k", "v", "do", "ds"))
    scale, dp = plan.problem.scale, (do * wgmma.inverse(ds)) * v
    dv = do if plan.exact else do * (1 / SPREAD)
    return jnp.stack(Units(q * k, dp, dv, dk=q * ds * scale, dq=k * ds * scale, ds=ds))


def left_operand(plan: Any, x: Any, by: float = 1.0) -> tuple[Any, ...]:
    """P or dS, times `by`, as the matmul of its gradient takes it: terms and, at the highest
    precision, after them one number a row.
    """
    if plan.exact:
        terms, power = wgmma.terms_of_rows(x, plan.values)
        return (*terms, power)
    x = x * by if plan.problem.dtype == "float32" else x
    return wgmma.terms_of_registers(x, plan.values)


def matmul_add(
    plan: Any, acc: Any, left: Sequence[Any], b: Any, swizzle: int, last: Any = lambda: 0
) -> Any:
    """acc + left @ b; `swizzle`, `last`: see `wgmma.exact_matmul_add`."""
    if plan.exact:
        return wgmma.exact_matmul_add(acc, left[:-1], b, swizzle, (None, left[-1]), last)
    return wgmma.matmul_add(acc, left, b)
