"""float32 on tensor cores: what its matmuls multiply.

Tensor cores take float32 as TF32, 11 bits of each number, and only where both operands lie with
the summed axis innermost: scores, not values. What serves everywhere is a float32 as a sum of
bfloat16 `terms`, 8 bits each and the same exponents: the product of two sums is a sum of matmuls,
less those too small to count. Two terms and three matmuls are good to 2**-16, three and six to
2**-24.

Terms of an array in memory lie side by side in its last axis.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._problem import AttentionProblem

# Which terms meet, smallest products first: a tensor core rounds each sum towards 0.
PRODUCTS = {
    1: ((0, 0),),
    2: ((1, 0), (0, 1), (0, 0)),
    3: ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0)),
}


class Kind(NamedTuple):
    """What an operand is stored as."""

    dtype: str
    terms: int

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def bytes(self) -> int:
        """Of one number, all terms."""
        return self.terms * self.itemsize


def of_values(problem: AttentionProblem) -> Kind:
    """Operands of matmuls over keys (or, backward, over queries)."""
    if problem.dtype != "float32":
        return Kind(problem.dtype, 1)
    return Kind("bfloat16", 3 if problem.precision == "highest" else 2)


def of_scores(problem: AttentionProblem) -> Kind:
    """q and k. TF32, which is what JAX multiplies float32 by, costs two matmuls of bfloat16, not
    three, and neither array has to be split. The backward, which sums over queries and keys too,
    has terms of what `for_scores` leaves.
    """
    kind = of_values(problem)
    tf32 = kind.terms == 2 and problem.op == "flash_forward"
    return Kind("float32", 1) if tf32 else kind


def for_scores(x: Any, problem: AttentionProblem) -> Any:
    """q or k with the bits that scores are made of where those are TF32: the nearest 11 of each
    number. A tensor core would cut the others off, which is twice as far off, and always towards 0:
    out was then farther off than XLA's own TF32 is. Also in a backward: with any other
    bits than the forward's no row of probabilities would add up to 1.
    """
    if problem.dtype != "float32" or of_values(problem).terms == 3:
        return x
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10)


def _masked(x: Any, bits: int) -> Any:
    kept = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(bits)
    return lax.bitcast_convert_type(kept, jnp.float32)


def split(x: Any, terms: int, width: int) -> Any:
    """[.., n] float32 -> [.., terms * width] bfloat16, by XLA; columns beyond n are 0.

    By truncation, so that all terms of a number have its sign and add up to it without a rounding
    between. What is not finite goes to the last term alone, which meets nothing but the first terms
    of the other operand: elsewhere infinity would meet rests that are 0 or of the other sign.
    """
    finite = jnp.isfinite(x)
    rest, parts = jnp.where(finite, x, 0), []
    for _ in range(terms - 1):
        parts.append(_masked(rest, 0xFFFF0000))
        rest = rest - parts[-1]
    parts = [part.astype(jnp.bfloat16) for part in (*parts, jnp.where(finite, rest, x))]
    if width > x.shape[-1]:
        pad = [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])]
        parts = [jnp.pad(part, pad) for part in parts]
    return jnp.concatenate(parts, axis=-1)


def of_registers(x: Any, kind: Kind) -> tuple[Any, ...]:
    """The terms of a tile in registers."""
    parts = [x.astype(kind.dtype)]
    for _ in range(kind.terms - 1):
        x = x - parts[-1].astype(jnp.float32)
        parts.append(x.astype(kind.dtype))
    return tuple(parts)


def of_memory(ref: Any, kind: Kind) -> tuple[Any, ...]:
    """The terms of a tile in shared memory [rows, terms * width]."""
    if kind.terms == 1:
        return (ref,)
    width = ref.shape[-1] // kind.terms
    return tuple(ref.at[:, pl.ds(n * width, width)] for n in range(kind.terms))


def transposed(parts: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(part.transpose((1, 0)) for part in parts)


def multiply(acc: Any, a: Sequence[Any], b: Sequence[Any]) -> None:
    """Issues acc += a @ b, of the terms of both."""
    for i, j in PRODUCTS[len(a)]:
        plgpu.wgmma(acc, a[i], b[j])
