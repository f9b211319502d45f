"""Attention over rows that several devices have, by the methods "gather" and "ring".

The backward starts from this device's q, k, v, out and lse: what others have is moved again. dk and
dv leave a device in the dtype of k, as the backward kernels round them, half of what float32 would
move; what arrives is added up in float32, in the order of the devices, and rounded once.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_attn._autodiff import score_gradients
from pallas_attn._autodiff.score_gradients import Rows
from pallas_attn._call import sharding
from pallas_attn._call.problem import AttentionInputs
from pallas_attn._context_parallel import gather, launch, layout, ring
from pallas_attn._context_parallel.layout import Split

Array = jax.Array


def attend(split: Split, inputs: AttentionInputs) -> tuple[Array, Array]:
    """(out, lse) of this device's rows."""
    run = functools.partial(_attention, split)
    return score_gradients.attended(run, inputs, functools.partial(_of_score_aux, split))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(split: Split, inputs: AttentionInputs) -> tuple[Array, Array]:
    method = ring if split.context.method == "ring" else gather
    return method.forward(split, inputs)


def _forward(split: Split, inputs: AttentionInputs) -> tuple[Any, Any]:
    out, lse = _attention(split, inputs)
    out = checkpoint_name(out, "flash_attention_out")
    lse = checkpoint_name(lse, "flash_attention_lse")
    return (out, lse), (inputs, out, lse)


def _backward(
    split: Split,
    residuals: tuple[AttentionInputs, Array, Array],
    cotangents: tuple[Array, Array],
) -> tuple[AttentionInputs]:
    inputs, out, lse = residuals
    method = ring if split.context.method == "ring" else gather
    gradients = method.backward(split, inputs, (out, lse, *cotangents))
    gradients = {
        name: sharding.gradient_of(x, gradients[name].astype(x.dtype))
        for name, x in launch.floats_of(inputs).items()
    }
    nothing: Any = None
    aux = {name: (nothing,) * len(getattr(inputs, name)) for name in launch.AUX}
    return (AttentionInputs.of(gradients)._replace(**aux),)


_attention.defvjp(_forward, _backward)


def _of_score_aux(
    split: Split, inputs: AttentionInputs, numbers: list[int], rows: Rows
) -> list[Array]:
    """The gradients of arrays that a score function reads, from this device's rows, in float32."""
    rows = layout.rows_by_chunk(split, rows)
    in_ring = split.context.method == "ring"

    def of_launch(inputs: AttentionInputs) -> list[Array]:
        call = launch.problem_of(split, "flash_forward", launch.Launch(inputs, ()))
        return score_gradients.of_call(*launch.repeated(*call), numbers, rows, some_keys=in_ring)

    if not in_ring:
        return of_launch(gather.launch_of_all(split, inputs))
    zeros = [jnp.zeros(inputs.score_aux[n].shape, jnp.float32) for n in numbers]
    zeros = [sharding.varying_like(x, *rows) for x in zeros]
    return ring.summed_over_parts(split, inputs, of_launch, zeros)
