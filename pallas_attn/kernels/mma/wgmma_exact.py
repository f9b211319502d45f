"""Sums of many tiles' matmuls that owe float32's bits.

A tensor core adds up with fewer bits and rounds towards 0, which many tiles on would be seen: here
it adds up one tile alone, and the tiles are added up in registers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.mma import wgmma

# Up to how many columns of a sum a tile is made in parts of how many, for want of registers (but of
# whole swizzles), and how many of these at a time: by measurement.
PARTS = ((192, 64, 2), (224, 64, 1), (256, 32, 1))

Factors = tuple[Any, Any]  # one number a row each, or None: 1


def added(
    acc: jax.Array,
    a: Sequence[Any],
    b: Sequence[Any],
    swizzle: int,
    factors: Factors = (None, None),
    last: Callable[[], int] = lambda: 0,
) -> jax.Array:
    """acc * factors[0] + (a @ b) * factors[1], of the terms of both, b in shared memory, where it
    has a `swizzle` of so many bytes. `last` issues matmuls behind all of these, and says how many.
    """
    part, together = next(how for most, *how in PARTS if acc.shape[1] <= most)
    part = max(part, swizzle // 2)
    starts, parts = range(0, acc.shape[1], part), []
    for some in (starts[n : n + together] for n in range(0, len(starts), together)):
        widths = [min(part, acc.shape[1] - start) for start in some]

        def body(*refs, some=some, widths=widths):
            for ref, start, width in zip(refs, some, widths, strict=True):
                wgmma.multiply(ref, a, [term.at[:, pl.ds(start, width)] for term in b])
            behind = last() if some[-1] == starts[-1] else 0
            each, found = wgmma.products(len(a), len(b)), []
            for n, (ref, start, width) in enumerate(zip(refs, some, widths, strict=True), 1):
                issued = (len(refs) - n) * each + behind
                product = plgpu.wgmma_accumulator_load(ref, wait_n=issued)
                older = lax.slice(acc, (0, start), (acc.shape[0], start + width))
                found.append(_sum((older, product), factors))
            return tuple(found)

        shapes = [plgpu.ACC((acc.shape[0], width), jnp.float32) for width in widths]
        parts.extend(pl.run_scoped(body, *shapes))
    return lax.concatenate(parts, 1)


def _sum(both: tuple[Any, Any], factors: Factors) -> jax.Array:
    """Here and now: LLVM would add behind the next branch, and hold twice as many registers."""
    pairs = zip(both, factors, strict=True)
    older, product = (x if by is None else x * mosaic.down_rows(by, x.shape) for x, by in pairs)
    return lax.optimization_barrier(older + product)


def beside(
    acc: jax.Array,
    a: Sequence[Any],
    b: Sequence[Any],
    swizzle: int,
    factors: Factors,
    shape: tuple[int, int],
    product: Callable[[], tuple[Any, Any]],
) -> tuple[jax.Array, jax.Array]:
    """`added`, and the matmul of the two operands that `product` gives, which runs behind it."""

    def body(ref):
        def last():
            left, right = product()
            wgmma.multiply(ref, left, right)
            return wgmma.products(len(left), len(right))

        return added(acc, a, b, swizzle, factors, last), ref[...]

    return pl.run_scoped(body, plgpu.ACC(shape, jnp.float32))
