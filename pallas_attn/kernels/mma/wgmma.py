"""Matmuls of Hopper's tensor cores, and two of them in flight.

An operand is a tuple of `terms`, numbers whose sum it stands for: a single tile of bfloat16 or
float16, or two of them for a float32 (`wgmma_float32.py`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_attn.kernels.lang.types import RegisterTile, RegisterTiles, SmemRef

Terms = Sequence[RegisterTile | SmemRef]  # an operand

# (terms of a, terms of b) -> index pairs to multiply, smallest product first, since a tensor core
# rounds each sum towards 0.
PRODUCTS = {
    (1, 1): ((0, 0),),
    (2, 1): ((1, 0), (0, 0)),
    (2, 2): ((1, 0), (0, 1), (0, 0)),
}


class Kind(NamedTuple):
    """The format of an operand: a dtype, and how many numbers of it a value takes."""

    dtype: str
    terms: int

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def bytes(self) -> int:
        """Bytes of a value, all terms."""
        return self.terms * self.itemsize


def terms_of_registers(x: RegisterTile, kind: Kind) -> tuple[RegisterTile, ...]:
    """The terms of a tile in registers; two need numbers below 2**(wgmma_float32.EXPONENT + 1)."""
    terms = [x.astype(kind.dtype)]
    for _ in range(kind.terms - 1):
        x = x - terms[-1].astype(jnp.float32)
        terms.append(x.astype(kind.dtype))
    return tuple(terms)


def terms_of_smem(ref: SmemRef, kind: Kind) -> tuple[SmemRef, ...]:
    """The terms of a tile in shared memory [rows, terms * width]."""
    if kind.terms == 1:
        return (ref,)
    width = ref.shape[-1] // kind.terms
    return tuple(ref.at[:, pl.ds(n * width, width)] for n in range(kind.terms))


def transposed(terms: Terms) -> tuple[SmemRef, ...]:
    return tuple(term.transpose((1, 0)) for term in terms)


def products(a: int, b: int) -> int:
    """The number of matmuls that `multiply` issues for operands of `a` and `b` terms."""
    return len(PRODUCTS[a, b])


def multiply(acc: RegisterTile, a: Terms, b: Terms) -> None:
    """Issues acc += a @ b; b is in shared memory."""
    for i, j in PRODUCTS[len(a), len(b)]:
        plgpu.wgmma(acc, a[i], b[j])


def matmul(
    shape: Sequence[int],
    a: Terms,
    b: Terms,
    meanwhile: Callable[[], None] | None = None,
    issue: Callable[..., None] = multiply,
) -> jax.Array:
    """a @ b, issued by `issue`; `meanwhile` is run while the matmul is in flight."""

    def body(acc):
        issue(acc, a, b)
        if meanwhile is not None:
            meanwhile()
        return acc[...]

    return pl.run_scoped(body, plgpu.ACC((shape[0], shape[1]), jnp.float32))


def score_panels(acc: RegisterTile, q: Terms, k: Terms) -> None:
    """Issues acc += q @ k^T, where the columns of q and k lie in panels."""
    for a, b in zip(q, k, strict=True):
        plgpu.wgmma(acc, a, b.transpose((1, 0)))


def value_panels(accs: RegisterTiles, p: RegisterTile, v: Terms) -> None:
    """Issues accs += p @ v, with an accumulator for each panel of v."""
    for acc, values in zip(jax.tree.leaves(accs), v, strict=True):
        plgpu.wgmma(acc, p, values)


def add_value_panels(accs: RegisterTiles, p: RegisterTile, v: Terms) -> Any:
    """accs + p @ v."""
    body = functools.partial(value_panels, p=p, v=v)
    return pl.run_state(body)(jax.tree.map(plgpu.ACC.init, accs))


def matmul_add(acc: jax.Array, a: Terms, b: Terms) -> jax.Array:
    """acc + a @ b."""
    return pl.run_state(functools.partial(multiply, a=a, b=b))(plgpu.ACC.init(acc))


def overlapped(
    acc: RegisterTiles,
    like: Any,
    start: Callable[[Any, Any], None],
    work: Callable[..., Any],
    behind: int = 1,
) -> tuple[Any, Any]:
    """Two matmuls in flight, and arithmetic on the result of the first under the second.

    `start(first, second)` issues matmuls into two accumulators, the last `behind` of them into the
    second, which may be a tree of several. The first accumulator starts from 0 and has the shape of
    the first leaf of the tree `like`, the second starts from `acc`. `work(first)`
    gives values of the form of `like`. Returns the second accumulator and those values, when all
    matmuls are done.
    """
    shape = jax.tree.leaves(like)[0].shape

    def body(state):
        second, outs = state

        def matmuls(first):
            start(first, second)
            return plgpu.wgmma_accumulator_load(first, wait_n=behind)

        value = pl.run_scoped(matmuls, plgpu.ACC(shape, jnp.float32))
        for out, result in zip(jax.tree.leaves(outs), jax.tree.leaves(work(value)), strict=True):
            out[...] = result

    return pl.run_state(body)((jax.tree.map(plgpu.ACC.init, acc), like))
