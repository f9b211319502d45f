"""A matmul of Hopper's tensor cores whose operands have different swizzles: Mosaic's wgmma takes
one for both, the tensor core does not.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import mma_utils, utils
from jax.experimental.mosaic.gpu.wgmma import wgmma_m64
from jaxlib.mlir import ir

from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import RegisterTile, SmemRef


class Pair(NamedTuple):
    """Operands of a matmul a^T b over the same rows, each panel as wide as its swizzle."""

    a: SmemRef  # [rows, 64]
    b: Sequence[SmemRef]  # panels [rows, columns]


def issue_rest(sums: Sequence[RegisterTile], pairs: Iterable[Pair]) -> list[RegisterTile]:
    """`sums`, one for each panel of b after the first, and a^T b of all pairs added to them. The
    matmuls are issued, not committed: they belong to the group of the warpgroup's next
    `plgpu.wgmma`, by the first panel, and the results are there when that one has been waited for.
    """
    if not sums:
        return []
    a, b = zip(*pairs, strict=True)
    return [_issue_transposed(x, a, [panels[n] for panels in b]) for n, x in enumerate(sums, 1)]


def _issue_transposed(
    acc: RegisterTile, a: Sequence[SmemRef], b: Sequence[SmemRef]
) -> RegisterTile:
    """acc + the sum of a^T b over tiles. One fence before all of them: `acc` is then in flight."""

    def code(_, acc, a, b):
        acc = mgpu.WGMMAAccumulator.from_registers(acc)  # with a fence
        registers = acc._value.registers
        for left, right in zip(a, b, strict=True):
            registers = _issue(registers, left, right)
        value = mgpu.FragmentedArray(
            _registers=registers, _layout=acc._value.layout, _is_signed=None
        )
        layout = acc._original_layout
        return mgpu.WGMMAAccumulator(_value=value, _original_layout=layout, _sync=False).value

    def twin(acc, a, b):
        left, right = (np.concatenate([x[:] for x in rows]).astype(np.float32) for rows in (a, b))
        return acc + left.T @ right

    known: Any = code
    known.twin, known.is_matmul = twin, True
    tiles = [
        tuple(plgpu.RefType(mosaic.swizzle_transforms(x.dtype, 2 * x.shape[1])) for x in rows)
        for rows in (a, b)
    ]
    result = mosaic.tile_type(acc.shape, jnp.float32, layout=mosaic.TILE)
    types = (mosaic.TILE, *tiles)
    return plgpu.inline_mgpu(arg_types=types, return_type=result)(known)(acc, tuple(a), tuple(b))


def _issue(registers: np.ndarray, a: ir.Value, b: ir.Value) -> np.ndarray:
    """The registers of an accumulator, to which a^T b is being added."""
    (rows, columns), kind = mma_utils.tiled_memref_shape(b)
    operands = []
    for ref, is_right in ((utils.memref_transpose(a, (1, 0, 3, 2)), False), (b, True)):
        width = columns if is_right else 64
        (first, (_, steps)), _, fastest = mma_utils.create_descriptor(
            ref,
            swizzle=2 * width,
            group_size=(rows, width) if is_right else (width, rows),
            logical_k_major=is_right,
        )
        assert fastest == mma_utils.Dim.MN
        operands.append((first, steps[0]))
    (left, left_step), (right, right_step) = operands
    return wgmma_m64(
        registers,
        left,
        right,
        a_transpose=True,
        b_transpose=True,
        a_k_stride=left_step,
        b_k_stride=right_step,
        n=columns,
        swizzle=2 * rows,  # all rows at once
        a_element_type=kind,
        b_element_type=kind,
    )
