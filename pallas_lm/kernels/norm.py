"""Work between two matmuls of a decoding step on Hopper: the result of the first is added to the
rows x, which are then normalised (RMS norm) for the second.

One block a row. It is a kernel because XLA's kernels end before the next one begins, while during
this one the next matmul already fills its ring (see linear.py). It rounds where the model in
jax.numpy does: the sum of partials in float32, the sum with x, the normalised row, and its product
with the weight.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import GmemRef, Operand

_STEP = 4 * mosaic.THREADS  # elements that a block reads at once


@dataclasses.dataclass(frozen=True)
class Problem:
    """x + sum of partials, and rms_norm of that by one weight of a stack."""

    rows: int
    dim: int
    partials: int
    dtype: str
    eps: float


def takes(problem: Problem) -> bool:
    """Whether the kernel serves it; XLA serves the rest."""
    narrow = problem.dtype in ("bfloat16", "float16")
    return narrow and problem.dim % _STEP == 0 and problem.dim <= 16 * _STEP


class NormRefs(NamedTuple):
    x: GmemRef  # [rows, dim]
    partials: GmemRef  # [partials, rows, dim]
    weight: GmemRef  # [layers, dim]
    layer: GmemRef  # [1]


def _kernel(refs: NormRefs, x_ref: GmemRef, normed_ref: GmemRef, *, problem: Problem) -> None:
    row = lax.axis_index("row")
    dtype = jnp.dtype(problem.dtype)
    plgpu.griddepcontrol_launch_dependents()
    weight = refs.weight[refs.layer[0]]
    plgpu.griddepcontrol_wait()  # for x and its partials
    x = refs.x[row]
    wide = refs.partials[0, row].astype(jnp.float32)
    for n in range(1, problem.partials):
        wide += refs.partials[n, row].astype(jnp.float32)
    x = (x.astype(jnp.float32) + wide.astype(dtype).astype(jnp.float32)).astype(dtype)
    x_ref[row] = x
    wide = x.astype(jnp.float32)
    wide *= lax.rsqrt(jnp.sum(wide * wide) * (1 / problem.dim) + problem.eps)
    normed_ref[row] = wide.astype(dtype) * weight


@functools.partial(jax.jit, static_argnames="problem")
def run(
    x: Operand, partials: Operand, weight: Operand, layer: Operand, problem: Problem
) -> tuple[Operand, Operand]:
    """(x [rows, dim], normed [rows, dim])."""
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    like = jax.ShapeDtypeStruct((problem.rows, problem.dim), problem.dtype)
    kernel = plgpu.kernel(
        functools.partial(_kernel, problem=problem),
        out_type=(like, like),
        grid=(problem.rows,),
        grid_names=("row",),
        kernel_name="norm_sm90",
    )
    return kernel(NormRefs(x, partials, weight, layer))
