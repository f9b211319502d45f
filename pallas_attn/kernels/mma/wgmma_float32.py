"""float32 on Hopper's tensor cores: its terms, its powers of 2, and sums that keep its bits.

A float32 is a power of 2, the same for all rows of a kv head, times one or two float16 `terms` of
11 bits each. A product of two sums of terms is a sum of matmuls, all but that of the two small
terms. With two terms it is good to 2**-23, float32 but for its last bit, in three matmuls; bfloat16
needs no powers of 2, but three terms and six matmuls. Scores at the default precision are TF32, as
JAX multiplies float32: 11 bits of each number, which are one term.

Numbers of a head keep all bits down to 2**-17 of the largest one (2**-29 with a single term),
smaller ones fewer, down to 2**-39: less is lost than plain float32 loses in one rounding of the
largest. All rows of a head decide the power together, hidden keys too, but not rows past a length.

Terms of an array in memory lie side by side in its last axis.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn._call.problem import AttentionProblem
from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.mma.wgmma import Kind, multiply, products, terms_of_registers

EXPONENT = 14  # the largest number of an operand lies in [2**EXPONENT, 2**(EXPONENT + 1))
LOWEST = 40  # the exponent's bits of the smallest number that is scaled in full
MANTISSA = 23  # bits


def is_exact(problem: AttentionProblem) -> bool:
    """Whether all that is multiplied owes float32's bits."""
    return problem.dtype == "float32" and problem.precision == "highest"


def is_unscaled(problem: AttentionProblem) -> bool:
    """Whether float32 goes without powers of 2: q and k as TF32, twice the work of float16, the
    rest as bfloat16 terms, good to 2**-16. Where exponents take longer than matmuls anyway, looking
    for the powers would make a forward pass slower.
    """
    few = max(problem.head_dim, problem.v_head_dim) <= 64 and problem.precision is None
    return problem.dtype == "float32" and problem.op == "flash_forward" and few


def value_kind(problem: AttentionProblem) -> Kind:
    """v, dO, probabilities and dS."""
    if problem.dtype != "float32":
        return Kind(problem.dtype, 1)
    return Kind("bfloat16" if is_unscaled(problem) else "float16", 2)


def score_kind(problem: AttentionProblem) -> Kind:
    """q and k. The backward, which sums over queries and keys too, has the same bits of them."""
    if is_unscaled(problem):
        return Kind("float32", 1)
    kind = value_kind(problem)
    return kind if is_exact(problem) else kind._replace(terms=1)


# ---- arrays, by XLA -----------------------------------------------------------------------------


def power_of_two(largest: Any) -> Any:
    """The divisor by which a number up to `largest` ends below 2**(EXPONENT + 1); 2**-100 or more,
    so that neither it nor its inverse is lost.
    """
    exponent = lax.bitcast_convert_type(largest, jnp.int32) >> MANTISSA
    exponent = jnp.maximum(exponent, LOWEST) - EXPONENT
    return lax.bitcast_convert_type(exponent << MANTISSA, jnp.float32)


def inverse(power: Any) -> Any:
    """1 / a power of 2."""
    bits = lax.bitcast_convert_type(power, jnp.int32)
    return lax.bitcast_convert_type((254 << MANTISSA) - bits, jnp.float32)


def largest(x: Any, group: int, lengths: Any = None) -> Any:
    """float32[B, kv heads]: of the finite numbers of [B, rows, heads, dim], `group` heads of which
    belong together; rows past `lengths` do not count.
    """
    size = jnp.abs(x)
    size = jnp.where(jnp.isfinite(size), size, 0).max(axis=3)
    size = lax.optimization_barrier(size)  # XLA would turn x around to reduce both axes at once
    if lengths is not None:
        row = jnp.arange(x.shape[1], dtype=jnp.int32)
        size = jnp.where((row[None] < lengths[:, None])[..., None], size, 0)
    size = size.max(axis=1)
    return size.reshape(size.shape[0], -1, group).max(axis=2)


def powers(inputs: Any, group: int) -> dict[str, Any]:
    """The divisors of q, k and v, [B, kv heads]."""
    operands = (
        ("q", inputs.q, group, inputs.q_lengths),
        ("k", inputs.k, 1, inputs.kv_lengths),
        ("v", inputs.v, 1, inputs.kv_lengths),
    )
    return {name: power_of_two(largest(*of)) for name, *of in operands}


def split(x: Any, power: Any, kind: Kind, width: int) -> Any:
    """[B, rows, heads, n] float32 -> [B, rows, heads, terms * width], of x / power [B, kv heads]
    (None: 1); columns beyond n are 0.

    What is not finite goes to the last term alone, which meets nothing but the first terms of the
    other operand: elsewhere infinity would meet rests that are 0 or of the other sign. TF32 is the
    nearest 11 bits, too: a tensor core would cut the others off, twice as far off and always
    towards 0.
    """
    if power is not None:
        x = x * jnp.repeat(inverse(power), x.shape[2] // power.shape[1], axis=1)[:, None, :, None]
    first = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10)
    if kind.dtype == "bfloat16":  # cut off: nothing overflows
        bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        first = lax.bitcast_convert_type(bits, jnp.float32)
    terms = [first]
    if kind.terms == 2:
        finite = jnp.isfinite(x)
        terms = [jnp.where(finite, first, 0), jnp.where(finite, x - first, x)]
    pad = [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])]
    terms = [term.astype(kind.dtype) for term in terms]
    terms = [jnp.pad(term, pad) for term in terms] if width > x.shape[-1] else terms
    return jnp.concatenate(terms, axis=-1)


# ---- tiles, in a kernel -------------------------------------------------------------------------


def terms_of_rows(x: Any, kind: Kind) -> tuple[tuple[Any, ...], Any]:
    """The terms of a tile in registers, each row of which is divided by a power of 2 of its own,
    and these powers.
    """
    power = power_of_two(jnp.abs(x).max(axis=1))
    return terms_of_registers(x * lax.broadcast_in_dim(inverse(power), x.shape, [0]), kind), power


# ---- sums of many tiles' matmuls that keep float32's bits ---------------------------------------
#
# A tensor core adds up with fewer bits and rounds towards 0, which would show in the sum of many
# tiles: here it adds up a single tile, and the tiles are added up in registers.

# (largest width of the sum, columns of a chunk in whole swizzles, chunks at a time): a tile is made
# in chunks, for want of registers. Measured.
_EXACT_CHUNKS = ((192, 64, 2), (224, 64, 1), (256, 32, 1))

Factors = tuple[Any, Any]  # one number a row each, or None: 1


def exact_matmul_add(
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
    chunk, together = next(how for most, *how in _EXACT_CHUNKS if acc.shape[1] <= most)
    chunk = max(chunk, swizzle // 2)
    starts, chunks = range(0, acc.shape[1], chunk), []
    for some in (starts[n : n + together] for n in range(0, len(starts), together)):
        widths = [min(chunk, acc.shape[1] - start) for start in some]

        def body(*refs, some=some, widths=widths):
            for ref, start, width in zip(refs, some, widths, strict=True):
                multiply(ref, a, [term.at[:, pl.ds(start, width)] for term in b])
            behind = last() if some[-1] == starts[-1] else 0
            each, sums = products(len(a), len(b)), []
            for n, (ref, start, width) in enumerate(zip(refs, some, widths, strict=True), 1):
                issued = (len(refs) - n) * each + behind
                product = plgpu.wgmma_accumulator_load(ref, wait_n=issued)
                older = lax.slice(acc, (0, start), (acc.shape[0], start + width))
                sums.append(_sum((older, product), factors))
            return tuple(sums)

        shapes = [plgpu.ACC((acc.shape[0], width), jnp.float32) for width in widths]
        chunks.extend(pl.run_scoped(body, *shapes))
    return lax.concatenate(chunks, 1)


def _sum(both: tuple[Any, Any], factors: Factors) -> jax.Array:
    """Here and now: LLVM would add behind the next branch, and hold twice as many registers."""
    pairs = zip(both, factors, strict=True)
    older, product = (
        x if by is None else x * mosaic.broadcast_rows(by, x.shape) for x, by in pairs
    )
    return lax.optimization_barrier(older + product)


def exact_matmul_add_overlapped(
    acc: jax.Array,
    a: Sequence[Any],
    b: Sequence[Any],
    swizzle: int,
    factors: Factors,
    shape: tuple[int, int],
    product: Callable[[], tuple[Any, Any]],
) -> tuple[jax.Array, jax.Array]:
    """`exact_matmul_add`, and behind it the matmul of the two operands that `product` gives."""

    def body(ref):
        def last():
            left, right = product()
            multiply(ref, left, right)
            return products(len(left), len(right))

        return exact_matmul_add(acc, a, b, swizzle, factors, last), ref[...]

    return pl.run_scoped(body, plgpu.ACC(shape, jnp.float32))
