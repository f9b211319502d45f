"""Gradients of the arrays that a score function reads, beside kernels: by autodiff of the
reference, some query rows at a time.

Kernels give the gradients of q, k and v. What a score reads has one number for many logits, and
the sum over them is as the function says: over all rows and keys of a head, or of a distance. It is
taken in float32. `SLAB` logits are in memory at a time, a few times over. Where nobody wants these
gradients nothing is computed.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from pallas_attn._call import batching, dispatch, sharding
from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.merge import cotangents_of_part

Array = jax.Array
Rows = tuple[Array, Array, Array, Array]  # out, lse and their cotangents
SLAB = 2**26  # logits


def attended(
    attend: Callable[[AttentionInputs], tuple[Array, Array]],
    inputs: AttentionInputs,
    find: Callable[..., list[Array]],
) -> tuple[Array, Array]:
    """`attend(inputs)`, the out and lse of a call, such that what its score function reads has
    gradients. `find(inputs, numbers, rows)`: those of some of `inputs.score_aux`, in float32, by
    out, lse and their cotangents.
    """
    aux = inputs.score_aux
    held = inputs._replace(score_aux=tuple(map(lax.stop_gradient, aux)))
    results = attend(held)
    if not any(jnp.issubdtype(x.dtype, jnp.floating) for x in aux):
        return results
    return _attach(find, results, jax.tree.map(lax.stop_gradient, held), aux)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attach(find: Any, results: Any, inputs: AttentionInputs, aux: Any) -> Any:
    """`results`, such that `aux` has gradients; `inputs` are none of its own."""
    del find, inputs, aux
    return results


def _forward(find: Any, results: Any, inputs: Any, aux: Any) -> Any:
    del find
    values = jax.tree.map(lambda x: x.value, (results, inputs, aux), is_leaf=_is_primal)
    # None: nobody wants its gradient
    wanted = tuple(x.value if x.perturbed else None for x in aux)
    return values[0], (values, wanted)


def _is_primal(x: Any) -> bool:
    return hasattr(x, "perturbed")


def _backward(find: Any, residuals: Any, cotangents: Any) -> Any:
    (results, inputs, aux), wanted = residuals
    zeros = [isinstance(x, SymbolicZero) for x in cotangents]
    cotangents = tuple(
        sharding.varying_like(jnp.zeros(x.shape, x.dtype), result) if zero else x
        for x, zero, result in zip(cotangents, zeros, results, strict=True)
    )
    gradients: list[Any] = [None] * len(aux)
    numbers = [n for n, x in enumerate(wanted) if x is not None]
    if numbers and not all(zeros):
        found = find(inputs._replace(score_aux=aux), numbers, (*results, *cotangents))
        for n, gradient in zip(numbers, found, strict=True):
            gradients[n] = sharding.gradient_of(aux[n], gradient).astype(aux[n].dtype)
    return cotangents, None, tuple(gradients)


_attach.defvjp(_forward, _backward, symbolic_zeros=True)


def of_call(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    numbers: list[int],
    rows_of_all: Rows,
    *,
    some_keys: bool = False,
) -> list[Array]:
    """The gradients of some of `inputs.score_aux`, in float32. `some_keys`: those of the inputs are
    not all, as `rows_of_all` are of.
    """
    aux, cotangents = inputs.score_aux, rows_of_all[2:]
    batch, q_len, heads = inputs.q.shape[:3]
    rows = max(1, min(q_len, SLAB // (batch * heads * problem.kv_len)))
    count = -(-q_len // rows)

    def split(x: Array, axis: int, fill: float = 0) -> Array:
        pads = [(0, 0)] * x.ndim
        pads[axis] = (0, count * rows - q_len)
        shape = (*x.shape[:axis], count, rows, *x.shape[axis + 1 :])
        return jnp.moveaxis(jnp.pad(x, pads, constant_values=fill).reshape(shape), axis, 0)

    axes = {"q": 1, "q_segment_ids": 1, "q_positions": 1, "bias": 2, "mask_array": 2}
    given = {name: getattr(inputs, name) for name in axes}
    by_row = {name: x for name, x in given.items() if x is not None and x.shape[axes[name]] > 1}
    by_row |= {"q": inputs.q}
    slabs = {name: split(x, axes[name]) for name, x in by_row.items()}
    out, lse, d_out, d_lse = rows_of_all
    of_rows = split(out, 1), split(lse, 2, jnp.inf), split(d_out, 1), split(d_lse, 2)
    offset = problem.q_offset if inputs.q_offset is None else inputs.q_offset

    def one(sums: list[Array], slab: tuple[Array, Any, Rows]) -> tuple[list[Array], None]:
        first, fields, of_rows = slab
        at = jnp.broadcast_to(jnp.asarray(offset + first, jnp.int32), (batch,))
        some = inputs._replace(q_offset=at, **fields)
        if inputs.q_lengths is not None:
            some = some._replace(q_lengths=jnp.clip(inputs.q_lengths - first, 0, rows))

        def attention(*arrays: Array) -> tuple[Array, Array]:
            read = list(aux)
            for n, x in zip(numbers, arrays, strict=True):
                read[n] = x
            given = some._replace(score_aux=tuple(read))
            return dispatch.by_definition(given, batching.resized(problem, given))

        own, pull = jax.vjp(attention, *wide)
        found = pull(cotangents_of_part(own, of_rows) if some_keys else of_rows[2:])
        return [total + x for total, x in zip(sums, found, strict=True)], None

    varying = (inputs.q, *cotangents)
    wide = [sharding.varying_like(aux[n].astype(jnp.float32), *varying) for n in numbers]
    firsts = jnp.arange(count, dtype=jnp.int32) * rows
    return lax.scan(one, list(map(jnp.zeros_like, wide)), (firsts, slabs, of_rows))[0]
