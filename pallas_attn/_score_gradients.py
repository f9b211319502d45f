"""Gradients of the arrays that a score function reads, beside kernels: by autodiff of the
reference, some query rows at a time.

Kernels give the gradients of q, k and v. What a score reads has one number for many logits, and
the sum over them is as the function says: over all rows and keys of a head, or of a distance. It is
taken in float32. `SLAB` logits are in memory at a time, a few times over. Where nobody wants these
gradients nothing is computed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from pallas_attn import _dispatch, _sharding, _transforms
from pallas_attn._problem import AttentionInputs, AttentionProblem

Array = jax.Array
SLAB = 2**26  # logits


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attach(
    problem: AttentionProblem,
    results: tuple[Array, Array],
    inputs: AttentionInputs,
    aux: tuple[Array, ...],
) -> tuple[Array, Array]:
    """`results`, the out and lse of a call, such that `aux`, what its score function reads, has
    gradients. `inputs`: of the call, but for `aux`.
    """
    del problem, inputs, aux
    return results


def _forward(problem: AttentionProblem, results: Any, inputs: Any, aux: Any) -> Any:
    del problem
    values = jax.tree.map(lambda x: x.value, (results, inputs, aux), is_leaf=_is_primal)
    # None: nobody wants its gradient
    wanted = tuple(x.value if x.perturbed else None for x in aux)
    return values[0], (values[1], values[2], wanted)


def _is_primal(x: Any) -> bool:
    return hasattr(x, "perturbed")


def _backward(problem: AttentionProblem, residuals: Any, cotangents: Any) -> Any:
    inputs, aux, wanted = residuals
    zeros = [isinstance(x, SymbolicZero) for x in cotangents]
    cotangents = tuple(
        jnp.zeros(x.shape, x.dtype) if zero else x
        for x, zero in zip(cotangents, zeros, strict=True)
    )
    gradients: list[Any] = [None] * len(aux)
    numbers = [n for n, x in enumerate(wanted) if x is not None]
    if numbers and not all(zeros):
        found = _gradients(problem, inputs, aux, numbers, cotangents)
        for n, gradient in zip(numbers, found, strict=True):
            gradients[n] = _sharding.gradient_of(aux[n], gradient.astype(aux[n].dtype))
    return cotangents, None, tuple(gradients)


attach.defvjp(_forward, _backward, symbolic_zeros=True)


def _gradients(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    aux: tuple[Array, ...],
    numbers: list[int],
    cotangents: tuple[Array, Array],
) -> list[Array]:
    """Of some of `aux`, in float32."""
    batch, q_len, heads = inputs.q.shape[:3]
    rows = max(1, min(q_len, SLAB // (batch * heads * problem.kv_len)))
    count = -(-q_len // rows)

    def split(x: Array, axis: int) -> Array:
        pads = [(0, 0)] * x.ndim
        pads[axis] = (0, count * rows - q_len)
        shape = (*x.shape[:axis], count, rows, *x.shape[axis + 1 :])
        return jnp.moveaxis(jnp.pad(x, pads).reshape(shape), axis, 0)

    axes = {"q": 1, "q_segment_ids": 1, "q_positions": 1, "bias": 2, "mask_array": 2}
    given = {name: getattr(inputs, name) for name in axes}
    by_row = {name: x for name, x in given.items() if x is not None and x.shape[axes[name]] > 1}
    by_row |= {"q": inputs.q}
    slabs = {name: split(x, axes[name]) for name, x in by_row.items()}
    slabs |= {"d_out": split(cotangents[0], 1), "d_lse": split(cotangents[1], 2)}
    offset = problem.q_offset if inputs.q_offset is None else inputs.q_offset

    def one(sums: list[Array], slab: tuple[Array, dict[str, Any]]) -> tuple[list[Array], None]:
        first, fields = slab
        d_out, d_lse = (fields.pop(name) for name in ("d_out", "d_lse"))
        at = jnp.broadcast_to(jnp.asarray(offset + first, jnp.int32), (batch,))
        some = inputs._replace(q_offset=at, **fields)
        if inputs.q_lengths is not None:
            some = some._replace(q_lengths=jnp.clip(inputs.q_lengths - first, 0, rows))

        def attention(*arrays: Array) -> tuple[Array, Array]:
            read = list(aux)
            for n, x in zip(numbers, arrays, strict=True):
                read[n] = x
            given = some._replace(score_aux=tuple(read))
            return _dispatch.by_definition(given, _transforms.resized(problem, given))

        _, pull = jax.vjp(attention, *wide)
        return [total + x for total, x in zip(sums, pull((d_out, d_lse)), strict=True)], None

    varying = (inputs.q, *cotangents)
    wide = [_sharding.varying_like(aux[n].astype(jnp.float32), *varying) for n in numbers]
    firsts = jnp.arange(count, dtype=jnp.int32) * rows
    return lax.scan(one, list(map(jnp.zeros_like, wide)), (firsts, slabs))[0]
