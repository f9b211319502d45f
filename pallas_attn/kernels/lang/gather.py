"""Numbers of an array in global memory, at positions that each thread holds in registers."""

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_attn.kernels.lang import asm, mosaic
from pallas_attn.kernels.lang.types import GmemRef, Layout


def gather(ref: GmemRef, index: jax.Array, layout: Layout) -> jax.Array:
    """`ref.ravel()[index]` of an array of any dtype but booleans; `index`, int32, is a tile of that
    layout or a vector along one side of it, and within the array.
    """
    dtype = ref.dtype

    def code(ref, index):
        kind = utils.dtype_to_ir_type(dtype)
        base, registers = asm.pointer_of(ref), index.registers.copy()

        def load(place):
            return llvm.load(kind, utils.getelementptr(base, [place], kind))

        for at, register in np.ndenumerate(index.registers):  # vectors
            count = ir.VectorType(register.type).shape[0]
            places = [vector.extract(register, [], [i]) for i in range(count)]
            result = ir.VectorType.get((count,), kind)
            registers[at] = vector.from_elements(result, [load(x) for x in places])
        signed = True if isinstance(kind, ir.IntegerType) else None
        return mgpu.FragmentedArray(_registers=registers, _layout=index.layout, _is_signed=signed)

    result = mosaic.tile_type(index.shape, dtype, layout=layout)
    types = (plgpu.RefType(), layout)
    return mosaic.inline(code, lambda ref, index: ref.ravel()[index], (ref, index), types, result)
