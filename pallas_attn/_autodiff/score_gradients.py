"""Gradients of the arrays that a score function reads, beside kernels: by autodiff of the
reference, some query rows at a time.

Kernels give the gradients of q, k and v. An array that a score reads has one number for many
logits: its gradient is a sum over rows and keys of a head, or of a distance, as the function says.
It is taken in float32. `SLAB` logits are in memory at a time, a few times over. Where nobody wants
these gradients nothing is computed.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from pallas_attn._call import batching, reference, sharding
from pallas_attn._call.problem import AttentionInputs, AttentionProblem
from pallas_attn.merge import cotangents_of_part

Array = jax.Array
Rows = tuple[Array, Array, Array, Array]  # out, lse and their cotangents
Results = tuple[Array, Array]  # out and lse
Aux = tuple[Array, ...]
Gradients = Callable[..., list[Array]]  # see `attended`
Primals = Any  # a tree whose leaves have fields `value` and `perturbed`
SLAB = 2**26  # logits


def attended(
    attend: Callable[[AttentionInputs], tuple[Array, Array]],
    inputs: AttentionInputs,
    gradients: Gradients,
) -> tuple[Array, Array]:
    """`attend(inputs)`, the out and lse of a call, such that arrays that its score function reads
    have gradients. `gradients(inputs, numbers, rows)`: those of some of `inputs.score_aux`, in
    float32, by out, lse and their cotangents.
    """
    aux = inputs.score_aux
    held = inputs._replace(score_aux=tuple(map(lax.stop_gradient, aux)))
    results = attend(held)
    if not any(jnp.issubdtype(x.dtype, jnp.floating) for x in aux):
        return results
    return _attach(gradients, results, jax.tree.map(lax.stop_gradient, held), aux)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attach(gradients: Gradients, results: Results, inputs: AttentionInputs, aux: Aux) -> Results:
    """`results`, such that `aux` has gradients; `inputs` have none here."""
    del gradients, inputs, aux
    return results


def _forward(gradients: Gradients, *primals: Primals) -> tuple[Results, Any]:
    del gradients
    values = jax.tree.map(lambda x: x.value, primals, is_leaf=lambda x: hasattr(x, "perturbed"))
    # None: nobody wants its gradient
    wanted = tuple(x.value if x.perturbed else None for x in primals[2])
    return values[0], (values, wanted)


def _backward(
    gradients: Gradients,
    residuals: tuple[tuple[Results, AttentionInputs, Aux], Aux],
    cotangents: Results,
) -> tuple[Results, None, tuple[Array | None, ...]]:
    (results, inputs, aux), wanted = residuals
    zeros = [isinstance(x, SymbolicZero) for x in cotangents]
    d_out, d_lse = (
        sharding.varying_like(jnp.zeros(x.shape, x.dtype), result) if zero else x
        for x, zero, result in zip(cotangents, zeros, results, strict=True)
    )
    d_aux: list[Array | None] = [None] * len(aux)
    numbers = [n for n, x in enumerate(wanted) if x is not None]
    if numbers and not all(zeros):
        rows = (*results, d_out, d_lse)
        some = gradients(inputs._replace(score_aux=aux), numbers, rows)
        for n, gradient in zip(numbers, some, strict=True):
            d_aux[n] = sharding.gradient_of(aux[n], gradient).astype(aux[n].dtype)
    return (d_out, d_lse), None, tuple(d_aux)


_attach.defvjp(_forward, _backward, symbolic_zeros=True)


def of_call(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    numbers: list[int],
    rows_of_all: Rows,
    *,
    some_keys: bool = False,
) -> list[Array]:
    """The gradients of some of `inputs.score_aux`, in float32. `some_keys`: the inputs have only
    some of the keys that `rows_of_all` are results of.
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
    arrays = {name: getattr(inputs, name) for name in axes}
    by_row = {name: x for name, x in arrays.items() if x is not None and x.shape[axes[name]] > 1}
    by_row |= {"q": inputs.q}
    slabs = {name: split(x, axes[name]) for name, x in by_row.items()}
    out, lse, d_out, d_lse = rows_of_all
    slabs_of_rows = split(out, 1), split(lse, 2, jnp.inf), split(d_out, 1), split(d_lse, 2)
    offset = problem.q_offset if inputs.q_offset is None else inputs.q_offset

    def add_slab(sums: list[Array], slab: tuple[Array, Any, Rows]) -> tuple[list[Array], None]:
        first, fields, of_rows = slab
        at = jnp.broadcast_to(jnp.asarray(offset + first, jnp.int32), (batch,))
        some = inputs._replace(q_offset=at, **fields)
        if inputs.q_lengths is not None:
            some = some._replace(q_lengths=jnp.clip(inputs.q_lengths - first, 0, rows))

        def attention(*arrays: Array) -> tuple[Array, Array]:
            read = list(aux)
            for n, x in zip(numbers, arrays, strict=True):
                read[n] = x
            with_aux = some._replace(score_aux=tuple(read))
            return reference.attention(with_aux, batching.resized(problem, with_aux))

        own, pull = jax.vjp(attention, *wide)
        gradients = pull(cotangents_of_part(own, of_rows) if some_keys else of_rows[2:])
        return [total + x for total, x in zip(sums, gradients, strict=True)], None

    varying = (inputs.q, *cotangents)
    wide = [sharding.varying_like(aux[n].astype(jnp.float32), *varying) for n in numbers]
    firsts = jnp.arange(count, dtype=jnp.int32) * rows
    return lax.scan(add_slab, list(map(jnp.zeros_like, wide)), (firsts, slabs, slabs_of_rows))[0]
