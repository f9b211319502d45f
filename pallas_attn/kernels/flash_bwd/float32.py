"""Float32 in the Hopper backward: powers of 2 of what is multiplied, and the left operands of
gradients, in terms (see `wgmma`). Other dtypes pass through unchanged.

P lies below 1, and dS = P (dP - delta) below a bound that is known beforehand; most of dS stays far
below it. By default, where 16 bits count, both are multiplied by one power of 2 to use float16's
range. At the highest precision each row of a tile has a power of 2 of its own, by which its sum is
multiplied.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.kernels.lang.types import GmemRef, Index, RegisterTile, Scalar, SmemRef
from pallas_attn.kernels.mma import wgmma, wgmma_float32

SPREAD = 2.0 ** (wgmma_float32.EXPONENT + 1)  # factor of probabilities, by default


class Units(NamedTuple):
    """The powers of 2 that products of a kv head still lack. None: 1."""

    scores: Scalar = None
    dp: Scalar = None  # in units of dS
    dv: Scalar = None
    dk: Scalar = None  # with the scale
    dq: Scalar = None  # with the scale
    ds: Scalar = None


def units_of(units: GmemRef, batch: Index, kv_head: Index) -> Units:
    if units is None:
        return Units()
    return Units(*(units[n, batch, kv_head] for n in range(len(Units._fields))))


def scaled(x: RegisterTile, unit: Scalar) -> RegisterTile:
    return x if unit is None else x * unit


def powers_of(
    problem: AttentionProblem, inputs: AttentionInputs, d_out: jax.Array, delta: jax.Array
) -> dict[str, jax.Array]:
    """The powers of 2 that q, k, v, dO and dS are divided by, [B, kv heads]; delta is [B, heads,
    rows].
    """
    powers, group = wgmma_float32.powers(inputs, problem.group), problem.group
    most = wgmma_float32.largest(d_out, group, inputs.q_lengths)
    powers["do"] = wgmma_float32.power_of_two(most)
    dp = most * (wgmma_float32.largest(inputs.v, 1, inputs.kv_lengths) * problem.v_head_dim)
    deltas = wgmma_float32.largest(delta.swapaxes(1, 2)[..., None], group)
    powers["ds"] = wgmma_float32.power_of_two(2 * jnp.maximum(dp, deltas))
    return powers


def units(problem: AttentionProblem, powers: dict[str, jax.Array]) -> jax.Array:
    """float32[6, B, kv heads]: see `Units`."""
    q, k, v, do, ds = (powers[name] for name in ("q", "k", "v", "do", "ds"))
    scale, dp = problem.scale, (do * wgmma_float32.inverse(ds)) * v
    dv = do if wgmma_float32.is_exact(problem) else do * (1 / SPREAD)
    return jnp.stack(Units(q * k, dp, dv, dk=q * ds * scale, dq=k * ds * scale, ds=ds))


def left_operand(
    problem: AttentionProblem, x: RegisterTile, by: float = 1.0
) -> tuple[RegisterTile, ...]:
    """P or dS, times `by`, as the matmul of its gradient takes it: terms and, at the highest
    precision, after them one number a row.
    """
    kind = wgmma_float32.value_kind(problem)
    if wgmma_float32.is_exact(problem):
        terms, power = wgmma_float32.terms_of_rows(x, kind)
        return (*terms, power)
    x = x * by if problem.dtype == "float32" else x
    return wgmma.terms_of_registers(x, kind)


def matmul_add(
    problem: AttentionProblem,
    acc: RegisterTile,
    left: Sequence[RegisterTile],
    b: Sequence[SmemRef],
    swizzle: int,
    last: Callable[[], int] = lambda: 0,
) -> RegisterTile:
    """acc + left @ b; `swizzle`, `last`: see `wgmma_float32.exact_matmul_add`."""
    if wgmma_float32.is_exact(problem):
        return wgmma_float32.exact_matmul_add(acc, left[:-1], b, swizzle, (None, left[-1]), last)
    return wgmma.matmul_add(acc, left, b)
