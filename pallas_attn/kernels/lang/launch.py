"""The launch of kernels whose blocks take work tiles, one after another, until none is left."""

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_attn.kernels.lang import mosaic
from pallas_attn.kernels.lang.types import SmemRef


def persistent_kernel(
    body: Callable[..., None],
    name: str,
    out_type: Any,
    scratch: SmemRef,
    size: tuple[int, int],
    barriers: bool = False,
) -> Callable[..., Any]:
    """The launch of `body(refs, *outs, scratch)`. `size`: the blocks (axis "block") and the
    warpgroups of each (axis "wg"). `barriers`: whether Mosaic adds those that
    `mosaic.without_barriers` leaves out.
    """
    usual = plgpu.CompilerParams(approx_math=True)
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=(scratch,),
        grid=size[:1],
        grid_names=("block",),
        num_threads=size[1],
        thread_name="wg",
        compiler_params=usual if barriers else mosaic.without_barriers(),
        kernel_name=name,
    )
